"""Grids on a cluster whose storage is a bucket of a local S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra

ray = pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
pytest.importorskip("s3fs", reason="s3fs is not installed here: pip install s3fs")
moto = pytest.importorskip("moto.server", reason="no S3 server is installed here: pip install 'moto[server]'")

from ray.cluster_utils import Cluster  # noqa: E402

from hydra_train import ray as hydra_ray  # noqa: E402
from hydra_train._cluster.storage import Storage  # noqa: E402
from on_ray import DRIVER, FLAGS, SLOW, Driven, events, hashes, three_nodes  # noqa: E402

BUCKET = "s3://grids"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket, with its credentials in the environment."""
    import boto3
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "user")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setenv("FSSPEC_S3_ENDPOINT_URL", endpoint)
        # fsspec read the environment when it was imported.
        patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="grids")
        yield BUCKET
    server.stop()


@pytest.fixture(scope="module")
def cluster(bucket: str) -> Iterator[Cluster]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(hydra_program: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hashes of the grid, trained with the command line."""
    out = tmp_path_factory.mktemp("cli") / "run"
    command = [hydra_program, "select", "--json", *FLAGS.split(), "--out", out]
    return hashes(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def test_a_bucket_has_complete_files_and_lists_new_ones(bucket: str, tmp_path: Path) -> None:
    one, other = Storage(f"{bucket}/files"), Storage(f"{bucket}/files")
    one.check()
    assert one.names("runs") == [] and one.read("runs/a") is None and not one.get("runs", tmp_path / "none")
    other.write("runs/a", "first")
    assert one.names("runs") == ["a"] and one.read("runs/a") == "first"
    other.write("runs/a", "second")
    file = tmp_path / "file"
    file.write_bytes(b"x" * (40 << 20))
    other.put(file, "runs/deep/b")
    assert one.names("runs") == ["a", "deep"] and one.get("runs", tmp_path / "got")
    assert (tmp_path / "got/a").read_text() == "second"
    assert (tmp_path / "got/deep/b").read_bytes() == file.read_bytes()
    one.remove("runs/a")
    assert other.names("runs") == ["deep"] and not other.get("runs/a", tmp_path / "a")
    with pytest.raises(hydra.HydraError, match="cannot be written to"):
        Storage("s3://no-such-bucket/run").check()


class Unreadable:
    """A file that fails to be read after some chunks."""

    def open(self, mode: str) -> Unreadable:
        self.pieces = [b"x" * (16 << 20)] * 5
        return self

    def __enter__(self) -> Unreadable:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self, size: int) -> bytes:
        if not self.pieces:
            raise OSError("the disk is broken")
        return self.pieces.pop()


def test_a_file_that_cannot_be_read_leaves_no_incomplete_copy(bucket: str, tmp_path: Path) -> None:
    files: list[Any] = [Storage(f"{bucket}/half"), Storage(tmp_path / "half")]
    for storage in files:
        with pytest.raises(OSError, match="broken"):
            storage.put(Unreadable(), "file")
        assert storage.names("") == [] and storage.read("file") is None
    assert not list((tmp_path / "half").iterdir()), "no incomplete file is left"


def test_a_bucket_is_storage_when_a_node_dies(cluster: Cluster, bucket: str, expected: dict[str, str]) -> None:
    storage = f"{bucket}/node-dies"
    driven = Driven(storage, SLOW)
    victim = driven.until(lambda: next(filter(driven.trains, cluster.worker_nodes), None))
    cluster.remove_node(victim, allow_graceful=False)
    try:
        report = driven.finish()
    finally:
        cluster.add_node(num_cpus=1)
    assert hashes(report) == expected and report["notes"] == []
    (lost,) = [tasks.split(",") for what, tasks, node in driven.driver.history if (what, node) == ("lost", victim.node_id)]
    resumed = [event for task in lost for event in events(storage, "resumed", task)]
    assert any(event["step"] >= 4 for event in resumed), "they do not start again"
    best = report["tasks"][0]
    assert best["model_dir"].startswith(f"{storage}/runs/")
    assert "model.safetensors" in Storage(best["model_dir"]).names("")


def test_a_bucket_is_storage_when_the_driver_dies(cluster: Cluster, bucket: str, expected: dict[str, str]) -> None:
    storage = f"{bucket}/driver-dies"
    script = DRIVER.replace("SETTINGS", repr(SLOW))
    child = subprocess.Popen([sys.executable, "-c", script, cluster.address, storage], stderr=subprocess.PIPE, text=True)
    while not events(storage, "checkpoint"):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    report = hydra_ray.select(storage_path=storage, **SLOW)
    assert hashes(report) == expected
    assert events(storage, "resumed"), "tasks with a checkpoint do not start again"
    assert json.loads(Storage(storage).read("report.json") or "{}")["state"] == "done"
    # A second call has nothing left to do.
    runs = Storage(storage).names("runs")
    assert hashes(hydra_ray.select(storage_path=storage, **SLOW)) == expected
    assert Storage(storage).names("runs") == runs

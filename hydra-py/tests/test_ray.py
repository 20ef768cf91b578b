"""Grids on a Ray cluster of three nodes on this machine: the bits are those of the command line, also after failures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra
from conftest import GRID

ray = pytest.importorskip("ray", reason="Ray is not installed here: pip install 'ray[tune]'")
pytest.importorskip("fsspec", reason="fsspec is not installed here")

from ray.cluster_utils import Cluster  # noqa: E402

from hydra_train import ray as hydra_ray  # noqa: E402
from on_ray import DRIVER, FLAGS, SLOW, Driven, events, hashes, three_nodes  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hashes of the grid, trained by Python on this machine."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run = hydra.select(**(SLOW | {"link": None, "devices": "cpu:2x1"}), out=out).wait()
    return hashes(run.report)


def test_three_nodes_train_the_bits_of_the_command_line(
    cluster: Cluster, tmp_path: Path, hydra_program: Path, expected: dict[str, str]
) -> None:
    quick = SLOW | {"link": None}
    report = hydra_ray.select(storage_path=tmp_path / "run", **quick)
    assert hashes(report) == expected
    # The number of nodes with tasks depends on how fast they start.
    assert 1 <= len({task["run"] for task in report["tasks"]}) <= 3
    assert report["state"] == "done" and report["notes"] == []
    assert [task["rank"] for task in report["tasks"]] == sorted(task["rank"] for task in report["tasks"])
    model = Path(report["tasks"][0]["model_dir"])
    assert model.is_dir() and (model / "model.safetensors").is_file()
    # The storage has run directories.
    runs = sorted(str(run) for run in (tmp_path / "run/runs").iterdir())
    whole = str(tmp_path / "cli")
    subprocess.run([hydra_program, "select", *FLAGS.split(), "--out", whole], check=True, capture_output=True)
    printed = subprocess.run([hydra_program, "report", "--json", whole, *runs], check=True, capture_output=True)
    together = json.loads(printed.stdout)
    assert len(together["twice"]) == 6 and all(task["equal"] for task in together["twice"])
    assert not list((tmp_path / "run").rglob("*.part*")), "no incomplete file is left"
    # A second call has nothing left to do.
    again = hydra_ray.select(storage_path=tmp_path / "run", **quick)
    assert hashes(again) == expected and len(list((tmp_path / "run/runs").iterdir())) == len(runs)
    with pytest.raises(hydra.UsageError, match="has another grid"):
        hydra_ray.select(storage_path=tmp_path / "run", **(quick | {"steps": 41}))


def test_a_task_that_is_moved_goes_on_from_its_checkpoint(cluster: Cluster, tmp_path: Path, expected: dict[str, str]) -> None:
    driven = Driven(tmp_path / "run", SLOW)
    driver = driven.driver
    tried: set[str] = set()

    def places(task: str) -> list[str]:
        return [node for what, name, node in driver.history if (what, name) == ("place", task)]

    while True:
        # A task that ended before it could be stopped is not moved; the next one is tried.
        task = driven.until(lambda: next((t for node in driver.nodes for t in driven.checkpointed(node) if t not in tried), None))
        tried.add(task)
        node = places(task)[-1]
        driver.release(node, [task])
        driven.until(lambda: len(places(task)) == 2 or task in driver.ended)
        if len(places(task)) == 2:
            break
    report = driven.finish()
    assert hashes(report) == expected and report["notes"] == []
    assert ("move", task, node) in driver.history
    resumed = events(tmp_path / "run", "resumed", task)
    assert len(resumed) == 1 and resumed[0]["step"] >= 4, "it does not start again"
    losses = next(each for each in report["tasks"] if each["name"] == task)["losses"]
    assert len(losses) == SLOW["steps"] and None not in losses


def test_the_tasks_of_a_node_that_dies_go_on_elsewhere(cluster: Cluster, tmp_path: Path, expected: dict[str, str]) -> None:
    driven = Driven(tmp_path / "run", SLOW)
    driver = driven.driver
    # Any node with a checkpointed task: the placement depends on measurements.
    victim = driven.until(lambda: next(filter(driven.trains, cluster.worker_nodes), None))
    trained = {task: state["step"] for task, state in driver.nodes[victim.node_id].status.tasks.items()}
    cluster.remove_node(victim, allow_graceful=False)
    try:
        report = driven.finish()
    finally:
        cluster.add_node(num_cpus=1)
    assert hashes(report) == expected
    (lost,) = [tasks.split(",") for what, tasks, node in driver.history if (what, node) == ("lost", victim.node_id)]
    resumed = [event for task in lost for event in events(tmp_path / "run", "resumed", task)]
    assert any(event["step"] >= 4 for event in resumed), "they do not start again"
    for event in resumed:
        assert event["step"] >= trained[event["task"]] - SLOW["checkpoint_every"], "more than one interval is lost"


def test_a_driver_that_was_killed_goes_on(cluster: Cluster, tmp_path: Path, expected: dict[str, str]) -> None:
    script = DRIVER.replace("SETTINGS", repr(SLOW))
    storage = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", script, cluster.address, str(storage)], stderr=subprocess.PIPE, text=True)
    while not events(storage, "checkpoint"):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    report = hydra_ray.select(storage_path=storage, **SLOW)
    assert hashes(report) == expected
    assert events(storage, "resumed"), "tasks with a checkpoint do not start again"


def test_data_that_is_objects_reaches_every_node(cluster: Cluster, tmp_path: Path) -> None:
    rows = [{"prompt": "why " * (i % 5 + 1), "completion": "so " * (i % 3 + 1)} for i in range(40)]
    settings = GRID | {"context": None}
    report = hydra_ray.select(storage_path=tmp_path / "run", data=rows, **settings)
    assert hashes(report) == hashes(hydra.select(**settings, data=rows).wait().report)


def test_bad_input_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(hydra.UnknownKeyword, match="nearest known one is `lr`"):
        hydra_ray.select(storage_path=tmp_path / "a", lrr=1e-3)  # type: ignore[call-arg]
    with pytest.raises(hydra.UsageError, match="set by the cluster"):
        hydra_ray.select(storage_path=tmp_path / "a", out="here")
    with pytest.raises(hydra.UsageError, match="`serve` is set by the cluster"):
        hydra_ray.select(storage_path=tmp_path / "a", serve="127.0.0.1:0")
    with pytest.raises(hydra.UsageError, match="a cluster trains grids"):
        hydra_ray.select(storage_path=tmp_path / "a", search="asha")
    (tmp_path / "file").write_text("")
    with pytest.raises(hydra.HydraError, match="cannot be written to"):
        hydra_ray.select(storage_path=tmp_path / "file/below", **GRID)
    with pytest.raises(hydra.UsageError, match="storage_path"):
        hydra_ray.select(storage_path="nosuch://bucket/run", **GRID)
    with pytest.raises(hydra.UsageError, match="invalid value 'none-such'"):
        hydra_ray.select(storage_path=tmp_path / "b", **(GRID | {"optimizer": "none-such"}))
    with pytest.raises(hydra.MemoryRefused, match="device memory"):
        hydra_ray.select(storage_path=tmp_path / "c", **(GRID | {"device_memory": "1MiB", "cuts": None}))


def test_storage_that_is_not_shared_is_named(cluster: Cluster, tmp_path: Path) -> None:
    # In memory, so each process has its own.
    with pytest.raises(hydra.HydraError, match="is not that of the driver"):
        hydra_ray.select(storage_path="memory://run", **GRID)


def test_nodes_of_another_build_take_no_part(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_train._cluster.driver.build", lambda: "another")
    with pytest.raises(hydra.HydraError, match="another build of hydra-train"):
        hydra_ray.select(storage_path=tmp_path / "run", **GRID)


TRIAL: dict[str, Any] = {**GRID, "devices": "cpu:1x1", "steps": 8, "eval_every": 2, "eval_limit": 4, "no_initial_validation": True}


def test_tune_drives_twelve_trials_with_asha(cluster: Cluster, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="Ray Tune is not installed here: pip install 'ray[tune]'")
    from ray.tune.schedulers import ASHAScheduler

    rates = [10 ** (-1 - 0.25 * i) for i in range(12)]
    tuner = tune.Tuner(
        hydra_ray.HydraTrainable,
        param_space={**TRIAL, "lr": tune.grid_search(rates)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", scheduler=ASHAScheduler(max_t=4, grace_period=1, reduction_factor=3)
        ),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), verbose=0, checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True)
        ),
    )
    results = tuner.fit()
    assert len(results) == 12 and not results.errors
    iterations = sorted(result.metrics["training_iteration"] for result in results)
    assert iterations[0] < 4 and iterations[-1] == 4, iterations
    ended = [result for result in results if result.metrics.get("weights_sha256")]
    assert ended, "no trial has ended"
    for result in ended[:2]:
        same = hydra.train(**(TRIAL | {"lr": result.config["lr"]})).wait().best
        assert result.metrics["weights_sha256"] == same.weights_sha256
        assert result.metrics["loss"] == dict(same.report["evaluations"])[8]["loss"]
        assert result.checkpoint is not None
        assert list(Path(result.checkpoint.path).glob("run/models/*/model.safetensors"))


def test_a_trial_that_is_restored_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed here: pip install 'ray[tune]'")
    from ray.tune.utils import validate_save_restore

    assert validate_save_restore(hydra_ray.HydraTrainable, {**TRIAL, "lr": 1e-3, "steps": 12})

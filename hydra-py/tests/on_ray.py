"""Fixtures of the cluster tests: three nodes on this machine, a grid that takes long enough, and a driver that is stepped."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from conftest import GRID
from hydra_train import ray as hydra_ray
from hydra_train._cluster.driver import Driver
from hydra_train._cluster.storage import Storage

#: Six configurations that train long enough to be interrupted, with checkpoints after every second minibatch.
SLOW: dict[str, Any] = {
    **GRID,
    "devices": "cpu:1x1",
    "lr": [1e-3, 3e-4, 1e-4],
    "batch": [4, 2],
    "steps": 24,
    "link": "40MiB/s",
    "checkpoint_every": 2,
    "eval_limit": 4,
}
#: The same grid on the command line, without the slow link.
FLAGS = "--batch 4,2 --lr 1e-3,3e-4,1e-4 --context 32 --devices cpu:2x1 --device-memory 64MiB --steps 24 --cuts 2,4 --eval-limit 4"

#: A driver in a process of its own.
DRIVER = """
import sys, ray
from hydra_train import ray as hydra_ray
ray.init(address=sys.argv[1], log_to_driver=False)
hydra_ray.select(storage_path=sys.argv[2], **SETTINGS)
"""


@contextlib.contextmanager
def three_nodes() -> Iterator[Cluster]:
    """A cluster, connected to this program. Its nodes inherit the current environment."""
    os.environ["HYDRA_RESERVATIONS"] = ""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def hashes(report: dict[str, Any]) -> dict[str, str]:
    return {task["name"]: task["weights_sha256"] for task in report["tasks"] if task["state"] == "done"}


def events(storage: Path | str, kind: str, task: str | None = None) -> list[dict[str, Any]]:
    """Returns the events of a kind of all runs in the storage."""
    files, found = Storage(storage), []
    for run in files.names("runs"):
        for line in (files.read(f"runs/{run}/metrics.jsonl") or "").splitlines():
            event = json.loads(line)
            if event["event"] == kind and task in (None, event["task"]):
                found.append(event)
    return found


class Driven:
    """A driver that is stepped explicitly."""

    def __init__(self, storage: Path | str, settings: dict[str, Any]) -> None:
        files = Storage(storage)
        arguments, data, own = hydra_ray._prepared(files, settings)
        self.cluster = hydra_ray.RayCluster(files, arguments, data, own)
        self.driver = Driver(self.cluster, files, arguments, least_gain_s=1e9)

    def until(self, happened: Callable[[], Any]) -> Any:
        """Steps until something has happened."""
        while not (found := happened()):
            assert not self.driver.done, "the grid has ended before that"
            self.step()
        return found

    def step(self) -> None:
        self.driver.step()
        time.sleep(0.05)

    def finish(self) -> dict[str, Any]:
        while not self.driver.done:
            self.step()
        report = self.driver.report(lambda: time.sleep(0.05))
        self.driver.close()
        self.cluster.close()
        return report

    def checkpointed(self, node: str) -> list[str]:
        """Returns the tasks of a node that have a checkpoint in the storage."""
        known = self.driver.nodes[node]
        states = known.status.tasks
        return [task for task in sorted(known.tasks) if states.get(task, {}).get("checkpoint", 0) >= 4]

    def trains(self, node: Any) -> bool:
        """Returns whether a node trains a task that has a checkpoint."""
        return node.node_id in self.driver.nodes and bool(self.checkpointed(node.node_id))

"""Grids on a cluster of Ray: ``pip install 'hydra-train[ray]'``. Ray is imported when something of it is used.

    from hydra_train import ray as hydra_ray

    report = hydra_ray.select(storage_path="/shared/grid", data="/shared/chat.jsonl", lr=[1e-4, 3e-4], device_memory="8GiB")
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_train import _data, _keywords
from hydra_train._cluster.driver import Driver, NodeLost
from hydra_train._cluster.node import Node
from hydra_train._cluster.storage import Storage
from hydra_train._errors import HydraError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hydra_train._settings import Select

__all__ = ["HydraTrainable", "select"]

log = logging.getLogger("hydra_train.ray")

#: The driver looks so often what there is to do.
LOOKS_EVERY_S = 0.5
#: After so many looks it says which nodes have not begun.
PATIENCE = 120
#: Seconds for a node to remove what it has on its disk.
REMOVES_WITHIN_S = 5
#: Keywords of `select` that a cluster decides itself, or that mean nothing there.
OWN = ("out", "force", "dry_run", "record", "spec", "part", "only", "progress", "replay", "serve", "tensorboard", "mlflow")
#: Those of a search, whose trials wait for each other.
SEARCH = ("search", "sample", "trials", "trials_file")


def select(
    *,
    storage_path: str | os.PathLike[str],
    least_gain_s: float = 30.0,
    cpus_per_node: float | None = None,
    **settings: Unpack[Select],
) -> dict[str, Any]:
    """Trains a grid on all nodes of the cluster, and returns one report of it, the best task first.

    ``storage_path`` is a directory or a bucket that all nodes see, by fsspec: runs, checkpoints, models and the report are there.
    Called again with the same settings, it goes on where it was. A task is moved to another node if the grid then ends
    earlier by ``least_gain_s`` seconds, and by a tenth of what is left. Nodes are taken whole, or ``cpus_per_node`` of each.
    The other keywords are those of :func:`hydra_train.select`.

    :raises TasksFailed: tasks failed or were skipped; the others are trained and written.
    :raises HydraError: no node can take part, or the storage cannot be used.
    """
    storage = Storage(storage_path)
    arguments, data = _prepared(storage, settings)
    cluster = RayCluster(storage, arguments, data, cpus_per_node)
    driver = Driver(cluster, storage, [*arguments, f"data={data}"], least_gain_s=least_gain_s)
    looks = 0
    try:
        while not driver.done:
            driver.step()
            time.sleep(LOOKS_EVERY_S)
            looks += 1
            if looks == PATIENCE and driver.waits_for:
                log.warning("waits for nodes that are measured, or whose processors others have: %s", ", ".join(driver.waits_for))
        return driver.report(lambda: time.sleep(LOOKS_EVERY_S))
    except KeyboardInterrupt:
        # Nothing that was trained is lost; the same call goes on.
        driver.stop()
        driver.wait_for_all(lambda: time.sleep(LOOKS_EVERY_S))
        raise
    finally:
        driver.close()
        cluster.close()


def _prepared(storage: Storage, settings: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The arguments of every node, and the name of the data that the storage has for them, if it is objects of Python."""
    for keyword in OWN:
        if settings.get(keyword) is not None:
            raise UsageError(f"`{keyword}` is decided by the cluster: leave it out", keyword=keyword)
    for keyword in SEARCH:
        if settings.get(keyword) is not None:
            raise UsageError(
                f"`{keyword}` is of a search, whose trials wait for each other: a cluster trains grids; leave it out, or search with "
                "`hydra_train.select` on one node, or with Ray Tune and `HydraTrainable`",
                keyword=keyword,
            )
    data = settings.get("data")
    name = None
    if data is not None and not isinstance(data, (str, os.PathLike)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(_data.as_path(data, Path(folder)))
            name = path.name
            if path.is_dir():
                storage.put_all(path, f"data/{name}")
            else:
                storage.put(path, f"data/{name}")
        settings = {key: value for key, value in settings.items() if key != "data"}
    return _keywords.arguments("select", {**settings, "progress": "none"}), name


class RayCluster:
    """The nodes of the cluster to which Ray is connected, with one actor each."""

    def __init__(self, storage: Storage, arguments: list[str], data: str | None, cpus_per_node: float | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise HydraError("a cluster needs Ray, which is not installed: pip install 'hydra-train[ray]'") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        self._arguments = (storage.path, arguments, data)
        self._cpus = cpus_per_node
        self._actors: dict[str, Any] = {}

    def alive(self) -> list[str]:
        nodes = self._ray.nodes()
        # A node without processors, such as a head that only manages, trains nothing.
        return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        result: Future[Any] = Future()
        try:
            actor = self._actors.get(node) or self._actor(node)
            inner: Future[Any] = getattr(actor, method).remote(*arguments).future()
        except Exception as error:
            result.set_exception(NodeLost(str(error)))
            return result
        inner.add_done_callback(lambda done: self._answer(done, result))
        return result

    def drop(self, node: str) -> None:
        actor = self._actors.pop(node, None)
        if actor is not None:
            # One that is not there any more has nothing to remove.
            self._ray.wait([actor.close.remote()], timeout=REMOVES_WITHIN_S)
            self._ray.kill(actor)

    def close(self) -> None:
        """Gives the nodes back."""
        for node in list(self._actors):
            self.drop(node)

    def _actor(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources: dict[str, float] = next((each["Resources"] for each in self._ray.nodes() if each["NodeID"] == node), {})
        options = {
            "num_cpus": resources.get("CPU", 0) if self._cpus is None else self._cpus,
            "num_gpus": resources.get("GPU", 0),
            "max_concurrency": 8,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor = self._ray.remote(Node).options(**options).remote(*self._arguments)
        self._actors[node] = actor
        return actor

    def _answer(self, done: Future[Any], result: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
            return
        # What the node raised, and not what Ray makes of it.
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception) and not isinstance(error, self._ray.exceptions.RayActorError):
            result.set_exception(cause if isinstance(cause, HydraError) else HydraError(f"{type(cause).__name__}: {cause}"))
        else:
            result.set_exception(NodeLost(str(error)))


def __getattr__(name: str) -> Any:
    # Its base class is Ray's.
    if name == "HydraTrainable":
        from hydra_train._cluster.trainable import HydraTrainable

        return HydraTrainable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

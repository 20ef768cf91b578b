"""Grids on a Ray cluster: ``pip install 'hydra-train[ray]'``. Ray is imported on first use.

    from hydra_train import ray as hydra_ray

    report = hydra_ray.select(storage_path="/shared/grid", data="/shared/chat.jsonl", lr=[1e-4, 3e-4], device_memory="8GiB")
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_train import _data, _keywords, _own
from hydra_train._cluster.driver import Driver, NodeLost
from hydra_train._cluster.node import Node
from hydra_train._cluster.storage import Storage
from hydra_train._errors import HydraError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hydra_train._settings import Select

__all__ = ["HydraTrainable", "select"]

log = logging.getLogger("hydra_train.ray")

#: The polling interval of the driver, in seconds.
POLL_INTERVAL_S = 0.5
#: The number of polls after which the driver warns about nodes that have not joined.
PATIENCE = 120
#: The time limit for a node to remove its files from its disk, in seconds.
CLEANUP_TIMEOUT_S = 5
#: Keywords of `select` that the cluster sets itself, or that have no meaning there.
RESERVED = ("out", "force", "dry_run", "record", "spec", "part", "only", "progress", "replay", "serve", "tensorboard", "mlflow")
#: Keywords of a search, whose trials depend on each other.
SEARCH = ("search", "sample", "trials", "trials_file")


def select(
    *,
    storage_path: str | os.PathLike[str],
    least_gain_s: float = 30.0,
    cpus_per_node: float | None = None,
    **settings: Unpack[Select],
) -> dict[str, Any]:
    """Trains a grid on all nodes of the cluster, and returns its report, the best task first.

    ``storage_path`` is a directory or a bucket that all nodes can access with fsspec. It holds the runs, checkpoints, models and
    the report. A second call with the same settings continues the grid. A task is moved to another node if the grid then ends
    earlier by ``least_gain_s`` seconds and by a tenth of the remaining time. The grid uses all processors of each node, or
    ``cpus_per_node`` of them. The other keywords are those of :func:`hydra_train.select`; ``model`` may be a
    ``hydra_train.torch.Chain``, which is copied to the nodes with its ``data``.

    :raises TasksFailed: tasks failed or were skipped; the others are trained and written.
    :raises HydraError: no node can take part, or the storage cannot be used.
    """
    storage = Storage(storage_path)
    arguments, data, own = _prepared(storage, settings)
    cluster = RayCluster(storage, arguments, data, own, cpus_per_node)
    driver = Driver(cluster, storage, [*arguments, f"data={data}"], least_gain_s=least_gain_s)
    polls = 0
    try:
        while not driver.done:
            driver.step()
            time.sleep(POLL_INTERVAL_S)
            polls += 1
            if polls == PATIENCE and driver.waits_for:
                log.warning("waiting for nodes that are still measuring, or whose processors are in use: %s", ", ".join(driver.waits_for))
        return driver.report(lambda: time.sleep(POLL_INTERVAL_S))
    except KeyboardInterrupt:
        # The trained state is kept; the same call continues.
        driver.stop()
        driver.wait_for_all(lambda: time.sleep(POLL_INTERVAL_S))
        raise
    finally:
        driver.close()
        cluster.close()


def _prepared(storage: Storage, settings: Mapping[str, Any]) -> tuple[list[str], str | None, tuple[Any, Any] | None]:
    """Returns the arguments of every node, the name of the data in the storage if it was given as rows, and a chain of PyTorch modules with its data."""
    for keyword in RESERVED:
        if settings.get(keyword) is not None:
            raise UsageError(f"`{keyword}` is set by the cluster: leave it out", keyword=keyword)
    for keyword in SEARCH:
        if settings.get(keyword) is not None:
            raise UsageError(
                f"`{keyword}` belongs to a search, but a cluster trains grids: leave it out, or search with `hydra_train.select` on one "
                "node, or with Ray Tune and `HydraTrainable`",
                keyword=keyword,
            )
    bound, named = _own("select", settings)
    own = None if bound is None else (bound.chain, settings["data"])
    settings, data = named, named.get("data")
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
    return _keywords.arguments("select", {**settings, "progress": "none"}), name, own


def _to_bytes(own: tuple[Any, Any]) -> bytes:
    """Returns a chain of PyTorch modules and its data as bytes, from which each node makes its copy."""
    from ray import cloudpickle

    import torch

    content = io.BytesIO()
    try:
        # A pickle would repeat a storage for each tensor that shares it, such as the rows of one tensor.
        torch.save(own, content, pickle_module=cloudpickle, pickle_protocol=cloudpickle.DEFAULT_PROTOCOL)
    except Exception as error:
        raise UsageError(
            f"the chain of PyTorch modules or its data cannot be copied to the nodes: {error}; open files, connections and locks "
            "when an item is read, not before",
            keyword="model",
        ) from error
    return content.getvalue()


class RayCluster:
    """The nodes of the connected Ray cluster, with one actor each."""

    def __init__(
        self,
        storage: Storage,
        arguments: list[str],
        data: str | None,
        own: tuple[Any, Any] | None = None,
        cpus_per_node: float | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise HydraError("a cluster needs Ray, which is not installed: pip install 'hydra-train[ray]'") from error
        self._ray: Any = ray
        content = None if own is None else _to_bytes(own)
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        # The bytes may be large: Ray stores them once, and passes them to the process of each node.
        self._arguments = (storage.path, arguments, data, None if content is None else ray.put(content))
        self._cpus = cpus_per_node
        self._actors: dict[str, Any] = {}

    def alive(self) -> list[str]:
        nodes = self._ray.nodes()
        # A node without processors, such as a head node, trains nothing.
        return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        result: Future[Any] = Future()
        try:
            actor = self._actors.get(node) or self._actor(node)
            inner: Future[Any] = getattr(actor, method).remote(*arguments).future()
        except Exception as error:
            result.set_exception(NodeLost(str(error)))
            return result
        inner.add_done_callback(lambda done: self._resolve(done, result))
        return result

    def drop(self, node: str) -> None:
        actor = self._actors.pop(node, None)
        if actor is not None:
            # A dead actor is not waited for longer.
            self._ray.wait([actor.close.remote()], timeout=CLEANUP_TIMEOUT_S)
            self._ray.kill(actor)

    def close(self) -> None:
        """Releases the nodes."""
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

    def _resolve(self, done: Future[Any], result: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
            return
        # The exception of the node, without Ray's wrapper.
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception) and not isinstance(error, self._ray.exceptions.RayActorError):
            result.set_exception(cause if isinstance(cause, HydraError) else HydraError(f"{type(cause).__name__}: {cause}"))
        else:
            result.set_exception(NodeLost(str(error)))


def __getattr__(name: str) -> Any:
    # Imported on demand, because the base class is Ray's.
    if name == "HydraTrainable":
        from hydra_train._cluster.trainable import HydraTrainable

        return HydraTrainable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

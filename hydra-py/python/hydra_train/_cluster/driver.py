"""The driver of a grid on several nodes: it places tasks on nodes, moves them, and reassigns the tasks of a lost node.

All state that a restarted driver needs is in the storage: the grid's settings, and the run directories of the nodes.
"""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hydra_train import _native
from hydra_train._cluster import placement
from hydra_train._cluster.node import ENDED, RUNS, Status, build
from hydra_train._cluster.storage import Storage
from hydra_train._errors import HydraError, TasksFailed, UsageError

log = logging.getLogger("hydra_train.ray")

#: The files of the driver in the storage.
GRID = "grid.json"
REPORT = "report.json"


#: A node is refused after its process has ended this many times.
MOST_LOSSES = 3


class NodeLost(Exception):
    """A node has disappeared."""


class Cluster(Protocol):
    """The nodes of a cluster, each of which runs a `Node`."""

    def alive(self) -> list[str]:
        """Returns the names of the current nodes; a name is never reused."""

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method of a node's `Node`. The result raises `NodeLost` if the node has disappeared."""

    def drop(self, node: str) -> None:
        """Releases a node."""


@dataclass
class NodeState:
    """The driver's state of a node."""

    description: dict[str, Any]
    #: The assigned tasks that have not ended.
    tasks: set[str] = field(default_factory=set)
    #: The run that trains them.
    run: str | None = None
    status: Status = field(default_factory=Status)
    #: The assigned tasks that it has to release.
    released: set[str] = field(default_factory=set)
    #: The pending request for its status.
    request: Future[Any] | None = None
    #: The tasks that it could not train, with the reasons.
    refused: dict[str, str] = field(default_factory=dict)

    def seconds(self, task: str) -> float | None:
        """Returns the predicted seconds of a whole task on this node; None if it does not fit."""
        found = self.description["seconds"].get(task) if task not in self.refused else None
        return None if found is None else float(found)


class Driver:
    """Trains a grid to its end, step by step."""

    def __init__(
        self, cluster: Cluster, storage: Storage, arguments: list[str], *, least_gain_s: float = 30.0
    ) -> None:
        self.cluster, self.storage, self.least_gain_s = cluster, storage, least_gain_s
        self.nodes: dict[str, NodeState] = {}
        #: The nodes that cannot take part, with the reasons.
        self.refused: dict[str, HydraError] = {}
        #: The final states of the ended tasks, and the minibatches of the others at their last checkpoints.
        self.ended: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        #: The events `place`, `move`, `lost` and `ended`, each with tasks and node.
        self.history: list[tuple[str, str, str]] = []
        self._joining: dict[str, Future[Any]] = {}
        self._losses: Counter[str] = Counter()
        self._arguments = sorted(arguments)
        self._started = False
        self._token = uuid.uuid4().hex
        self._probe = f"probe-driver-{self._token}"
        self._number = 0
        self.tasks: list[str] = []
        self._open()

    def _open(self) -> None:
        """Starts a grid in an empty storage, or continues the grid in it."""
        self.storage.check()
        begun = self.storage.read(GRID)
        if begun is not None and json.loads(begun)["arguments"] != self._arguments:
            raise UsageError(
                f"the storage {self.storage.path} has another grid: use its settings, or another `storage_path`", keyword="storage_path"
            )
        if begun is None:
            self.storage.write(GRID, json.dumps({"format": 1, "build": build(), "arguments": self._arguments}))
        elif json.loads(begun)["build"] != build():
            log.warning(
                "the grid in %s was started by another build of hydra-train: results may differ in their bits from here on", self.storage.path
            )
        for run in self.storage.names(RUNS):
            self._number = max(self._number, int(run.split("-")[0]))
            self._read(run)
        self.storage.write(self._probe, self._token)

    def _read(self, run: str) -> None:
        """Reads the log of a run that an earlier driver started."""
        for line in (self.storage.read(f"{RUNS}/{run}/metrics.jsonl") or "").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                # The last line may be incomplete.
                continue
            task = event.get("task")
            if event["event"] == "checkpoint":
                self.sources[task], self.steps[task] = run, event["step"]
            elif event["event"] == "end" and event["state"] in ENDED:
                self.ended[task] = event["state"]
                if event["error"]:
                    self.errors[task] = event["error"]

    def close(self) -> None:
        """Removes the temporary files."""
        try:
            self.storage.remove(self._probe)
        except FileNotFoundError:
            pass

    @property
    def waits_for(self) -> list[str]:
        """The nodes that have not described themselves yet."""
        return list(self._joining)

    @property
    def done(self) -> bool:
        """True if every task has ended."""
        return bool(self.tasks) and all(task in self.ended for task in self.tasks)

    def step(self) -> None:
        """Performs the pending actions, without waiting."""
        self._join()
        for name in list(self.nodes):
            self._update(name)
        if not self.nodes or (self._joining and not self._started):
            self._check_nodes()
            return
        # Nodes that join later receive the remaining tasks.
        self._started = True
        self._place()
        self._move()

    # Nodes.

    def _join(self) -> None:
        """Requests the descriptions of new nodes, and adds those that have answered."""
        alive = self.cluster.alive()
        for name in alive:
            if name not in self.nodes and name not in self.refused and name not in self._joining:
                self._joining[name] = self.cluster.call(name, "describe", self._probe, self._token)
        for name, answer in list(self._joining.items()):
            if not answer.done():
                if name not in alive:
                    del self._joining[name]
                continue
            del self._joining[name]
            try:
                self._add(name, answer.result())
            except NodeLost as error:
                self._count_loss(name, str(error))
            except HydraError as error:
                self._refuse(name, error)

    def _add(self, name: str, description: dict[str, Any]) -> None:
        mine = build()
        first = next(iter(self.nodes.values()), None)
        if description["build"] != mine:
            self._refuse(
                name, HydraError(f"it has another build of hydra-train ({description['build']}, the driver has {mine}): install the same build everywhere")
            )
        elif first is not None and description["inputs"] != first.description["inputs"]:
            self._refuse(name, HydraError("its model or data differ from those of the other nodes: their SHA-256 differ"))
        elif not description["seconds"]:
            reasons = "; ".join(f"{task}: {why}" for task, why in description["skipped"].items())
            self._refuse(name, HydraError(f"none of the tasks fits in its memory: {reasons}"))
        else:
            kinds = {json.dumps(node.description["machine"], sort_keys=True) for node in self.nodes.values()}
            if kinds and json.dumps(description["machine"], sort_keys=True) not in kinds:
                log.warning("node %s has another kind of processor: results may differ in their bits between nodes", name)
            self.nodes[name] = NodeState(description)
            if not self.tasks:
                self.tasks = [*description["seconds"], *description["skipped"]]
            log.info("node %s joined with %d devices", name, description["devices"])

    def _refuse(self, name: str, why: HydraError) -> None:
        log.warning("node %s is not used: %s", name, why)
        self.refused[name] = why
        self.cluster.drop(name)

    def _check_nodes(self) -> None:
        """Raises an error if no node can take part."""
        if self.nodes or self._joining or not self.refused:
            return
        if all(name in self.refused for name in self.cluster.alive()):
            first, *others = self.refused.values()
            if all(type(other) is type(first) and str(other) == str(first) for other in others):
                raise first
            raise HydraError("no node can take part", causes=[f"{name}: {why}" for name, why in self.refused.items()])

    def _update(self, name: str) -> None:
        """Processes the status of a node, and requests the next one."""
        node = self.nodes[name]
        if node.request is None:
            node.request = self.cluster.call(name, "status")
        if not node.request.done():
            if name not in self.cluster.alive():
                self._lose(name)
            return
        try:
            status: Status = node.request.result()
        except NodeLost:
            self._lose(name)
            return
        node.request = None
        if status.run != node.run:
            # The node has not started its new run yet.
            return
        node.status = status
        for task, state in status.tasks.items():
            if "checkpoint" in state and status.run is not None:
                self.sources[task], self.steps[task] = status.run, state["checkpoint"]
            if task in node.tasks and state["state"] in ENDED:
                self._end(name, task, state)
            elif task in node.tasks and state["state"] == "stopped" and task in node.released:
                # Its state is in the storage, so another node can continue it.
                node.released.discard(task)
                node.tasks.discard(task)
                self.sources[task] = str(status.run)
        if status.idle and node.tasks:
            # Other nodes may train the tasks that this one could not.
            for task in sorted(node.tasks):
                if status.error is not None:
                    node.refused[task] = status.error
                    log.warning("node %s could not train %s: %s", name, task, status.error)
            node.tasks.clear()
            node.released.clear()

    def _end(self, name: str, task: str, state: Mapping[str, Any]) -> None:
        self.nodes[name].tasks.discard(task)
        self.nodes[name].released.discard(task)
        if state["state"] == "skipped":
            self.nodes[name].refused[task] = str(state["error"])
            return
        self.ended[task] = state["state"]
        if state.get("error"):
            self.errors[task] = state["error"]
        self._note("ended", task, name)

    def _lose(self, name: str) -> None:
        lost = self.nodes.pop(name)
        log.warning("node %s was lost: its %d tasks continue from their last checkpoints", name, len(lost.tasks))
        self._note("lost", ",".join(sorted(lost.tasks)), name)
        self._count_loss(name, "its process has ended")

    def _count_loss(self, name: str, why: str) -> None:
        """Releases a lost node. A node that is still alive joins again, up to `MOST_LOSSES` times."""
        self.cluster.drop(name)
        self._losses[name] += 1
        if self._losses[name] == MOST_LOSSES:
            self._refuse(name, HydraError(f"it was lost {MOST_LOSSES} times: {why}"))

    def _note(self, what: str, task: str, node: str) -> None:
        self.history.append((what, task, node))
        log.info("%s: %s on %s", what, task, node)

    # Tasks.

    def _left(self, name: str, task: str) -> float | None:
        """Returns the predicted remaining seconds of a task on a node."""
        seconds = self.nodes[name].seconds(task)
        if seconds is None:
            return None
        states = [node.status.tasks[task] for node in self.nodes.values() if task in node.tasks and task in node.status.tasks]
        step = max([self.steps.get(task, 0), *(state["step"] for state in states)])
        steps = max((state["steps"] or 0 for state in states), default=0)
        return seconds * (1 - step / steps) if steps else seconds

    def _loads(self) -> dict[str, placement.Node]:
        loads = {}
        for name, node in self.nodes.items():
            left = {task: self._left(name, task) or 0.0 for task in node.tasks if task not in node.released}
            loads[name] = placement.Node(node.description["devices"], left)
        return loads

    def _seconds(self, tasks: list[str]) -> dict[str, dict[str, float]]:
        seconds: dict[str, dict[str, float]] = {}
        for task in tasks:
            left = {name: self._left(name, task) for name in self.nodes}
            seconds[task] = {name: s for name, s in left.items() if s is not None}
        return seconds

    def _pending(self) -> list[str]:
        given = {task for node in self.nodes.values() for task in node.tasks}
        return [task for task in self.tasks if task not in self.ended and task not in given]

    def _idle(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.status.idle and not node.tasks and node.request is None]

    def _place(self) -> None:
        """Assigns pending tasks to idle nodes."""
        pending = self._pending()
        seconds = self._seconds(pending)
        for task in [task for task in pending if not seconds[task]]:
            reasons = [f"{name}: {node.refused.get(task) or node.description['skipped'].get(task)}" for name, node in self.nodes.items()]
            self.ended[task] = "skipped"
            self.errors[task] = f"it fits in the memory of no node: {'; '.join(reasons)}"
            log.warning("%s: %s", task, self.errors[task])
            pending.remove(task)
        idle = self._idle()
        if not pending or not idle:
            return
        placed = placement.place(pending, seconds, self._loads())
        for name in idle:
            if placed[name]:
                self.begin(name, placed[name])

    def begin(self, name: str, tasks: list[str]) -> None:
        """Starts tasks on a node, from their last checkpoints."""
        self._number += 1
        run = f"{self._number:04}-{name[:8]}-{uuid.uuid4().hex[:4]}"
        node = self.nodes[name]
        node.run, node.tasks, node.status = run, set(tasks), Status(run=run, idle=False)
        self.cluster.call(name, "begin", run, tasks, {task: self.sources[task] for task in tasks if task in self.sources})
        for task in tasks:
            self._note("place", task, name)

    def _move(self) -> None:
        """Moves tasks from loaded nodes to idle ones, if the grid then ends earlier."""
        idle = self._idle()
        if not idle or self._pending() or any(node.released for node in self.nodes.values()):
            return
        held = [task for node in self.nodes.values() for task in node.tasks]
        for name, tasks in placement.moves(self._loads(), idle, self._seconds(held), self.least_gain_s).items():
            # Only tasks that have started can be stopped.
            self.release(name, [task for task in tasks if task in self.nodes[name].status.tasks])

    def release(self, name: str, tasks: list[str]) -> None:
        """Stops tasks on a node; they continue on other nodes."""
        if tasks:
            self.nodes[name].released.update(tasks)
            self.cluster.call(name, "release", tasks)
            for task in tasks:
                self._note("move", task, name)

    # The end.

    def stop(self) -> None:
        """Stops all nodes at the end of their current minibatches, without waiting for them."""
        for name in self.nodes:
            self.cluster.call(name, "stop")

    def wait_for_all(self, wait: Callable[[], None]) -> None:
        """Waits until all nodes are idle and all results are in the storage."""
        while any(not node.status.idle for node in self.nodes.values()):
            wait()
            for name in list(self.nodes):
                self._update(name)

    def report(self, wait: Callable[[], None]) -> dict[str, Any]:
        """Waits until all results are in the storage, and writes and returns the merged report of all runs.

        :raises TasksFailed: tasks failed or were skipped; the others are trained and written.
        """
        self.wait_for_all(wait)
        report = self._merged()
        self.storage.write(REPORT, json.dumps(report))
        failures = {task: self.errors.get(task, "unknown reason") for task in self.tasks if self.ended[task] != "done"}
        if failures:
            causes = [f"{task}: {why}" for task, why in failures.items()]
            raise TasksFailed(f"{len(failures)} of {len(self.tasks)} tasks failed", causes=causes, failures=failures)
        return report

    def _merged(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="hydra-report-") as folder:
            local = []
            for run in self.storage.names(RUNS):
                directory = Path(folder) / run
                for name in ("spec.toml", "metrics.jsonl", "report.json"):
                    self.storage.get(f"{RUNS}/{run}/{name}", directory / name)
                if (directory / "spec.toml").exists():
                    local.append(str(directory))
            # The report names paths in the storage, not those of the local copies.
            text = _native.merged_report(local).replace(json.dumps(f"{folder}/")[1:-1], json.dumps(self.storage.at(f"{RUNS}/"))[1:-1])
        report: dict[str, Any] = json.loads(text)
        for task in report["tasks"]:
            if task.get("model_dir"):
                task["model_dir"] = f"{task['run']}/models/{task['name']}"
        return report

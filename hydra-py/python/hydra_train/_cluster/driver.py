"""The driver of a grid on several nodes: it places tasks, moves them, and gives those of a lost node to others.

All that it needs to go on after it was killed is in the storage: the grid's settings, and the run directories of the nodes.
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

#: What the driver keeps in the storage beside the run directories.
GRID = "grid.json"
REPORT = "report.json"


#: A node whose process has ended so many times takes no part any more.
MOST_LOSSES = 3


class NodeLost(Exception):
    """A node is not there any more."""


class Cluster(Protocol):
    """The nodes that there are, each of which runs a `Node`."""

    def alive(self) -> list[str]:
        """The names of the nodes that are there now; a name is never used twice."""

    def call(self, node: str, method: str, *arguments: Any) -> Future[Any]:
        """Calls a method of a node's `Node`. A node that is gone raises `NodeLost` in the result."""

    def drop(self, node: str) -> None:
        """Gives up a node."""


@dataclass
class Known:
    """A node as the driver knows it."""

    description: dict[str, Any]
    #: The tasks that it was given and that have not ended.
    tasks: set[str] = field(default_factory=set)
    #: The run in which it trains them.
    run: str | None = None
    status: Status = field(default_factory=Status)
    #: Those of them that it was told to release.
    released: set[str] = field(default_factory=set)
    asked: Future[Any] | None = None
    #: Tasks that it could not train, and why.
    refused: dict[str, str] = field(default_factory=dict)

    def seconds(self, task: str) -> float | None:
        """The predicted seconds of a whole task here, if it has room."""
        found = self.description["seconds"].get(task) if task not in self.refused else None
        return None if found is None else float(found)


class Driver:
    """Carries a grid to its end, step by step."""

    def __init__(
        self, cluster: Cluster, storage: Storage, arguments: list[str], *, least_gain_s: float = 30.0
    ) -> None:
        self.cluster, self.storage, self.least_gain_s = cluster, storage, least_gain_s
        self.nodes: dict[str, Known] = {}
        #: The nodes that cannot take part, and why.
        self.refused: dict[str, HydraError] = {}
        #: The states of the tasks that have ended, and the minibatches of the others at their last checkpoints.
        self.ended: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        self.sources: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        #: What was done, for whoever asks: `place`, `move`, `lost`, `ended`.
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
        """Begins in an empty storage, or goes on with the grid that is in it."""
        self.storage.check()
        begun = self.storage.read(GRID)
        if begun is not None and json.loads(begun)["arguments"] != self._arguments:
            raise UsageError(
                f"the storage {self.storage.path} has another grid: give its settings, or another `storage_path`", keyword="storage_path"
            )
        if begun is None:
            self.storage.write(GRID, json.dumps({"format": 1, "build": build(), "arguments": self._arguments}))
        elif json.loads(begun)["build"] != build():
            log.warning(
                "the grid in %s was begun by another build of hydra-train: equal bits are not promised from here on", self.storage.path
            )
        for run in self.storage.names(RUNS):
            self._number = max(self._number, int(run.split("-")[0]))
            self._read(run)
        self.storage.write(self._probe, self._token)

    def _read(self, run: str) -> None:
        """Takes note of what is in the storage of a run that an earlier driver began."""
        for line in (self.storage.read(f"{RUNS}/{run}/metrics.jsonl") or "").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                # The last one may be half a line.
                continue
            task = event.get("task")
            if event["event"] == "checkpoint":
                self.sources[task], self.steps[task] = run, event["step"]
            elif event["event"] == "end" and event["state"] in ENDED:
                self.ended[task] = event["state"]
                if event["error"]:
                    self.errors[task] = event["error"]

    def close(self) -> None:
        """Removes what nobody needs any more."""
        try:
            self.storage.remove(self._probe)
        except FileNotFoundError:
            pass

    @property
    def waits_for(self) -> list[str]:
        """The nodes that have not said yet what they are."""
        return list(self._joining)

    @property
    def done(self) -> bool:
        """True if every task has ended."""
        return bool(self.tasks) and all(task in self.ended for task in self.tasks)

    def step(self) -> None:
        """Does what there is to do now. It waits for nothing."""
        self._join()
        for name in list(self.nodes):
            self._hear(name)
        if not self.nodes or (self._joining and not self._started):
            self._check_nodes()
            return
        # From here on, nodes that come later come to what is left.
        self._started = True
        self._place()
        self._move()

    # Nodes.

    def _join(self) -> None:
        """Asks new nodes what they are, and takes in those that have answered."""
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
                self._take_in(name, answer.result())
            except NodeLost as error:
                self._count_loss(name, str(error))
            except HydraError as error:
                self._refuse(name, error)

    def _take_in(self, name: str, description: dict[str, Any]) -> None:
        mine = build()
        first = next(iter(self.nodes.values()), None)
        if description["build"] != mine:
            self._refuse(
                name, HydraError(f"it has another build of hydra-train ({description['build']}, the driver {mine}): install the same everywhere")
            )
        elif first is not None and description["inputs"] != first.description["inputs"]:
            self._refuse(name, HydraError("its model or data are not those of the other nodes: their SHA-256 differ"))
        elif not description["seconds"]:
            reasons = "; ".join(f"{task}: {why}" for task, why in description["skipped"].items())
            self._refuse(name, HydraError(f"it has room for none of the tasks: {reasons}"))
        else:
            kinds = {json.dumps(node.description["machine"], sort_keys=True) for node in self.nodes.values()}
            if kinds and json.dumps(description["machine"], sort_keys=True) not in kinds:
                log.warning("node %s has another kind of processor: equal bits are not promised between them", name)
            self.nodes[name] = Known(description)
            if not self.tasks:
                self.tasks = [*description["seconds"], *description["skipped"]]
            log.info("node %s takes part, with %d devices", name, description["devices"])

    def _refuse(self, name: str, why: HydraError) -> None:
        log.warning("node %s takes no part: %s", name, why)
        self.refused[name] = why
        self.cluster.drop(name)

    def _check_nodes(self) -> None:
        """Gives up if no node can take part."""
        if self.nodes or self._joining or not self.refused:
            return
        if all(name in self.refused for name in self.cluster.alive()):
            first, *others = self.refused.values()
            if all(type(other) is type(first) and str(other) == str(first) for other in others):
                raise first
            raise HydraError("no node can take part", causes=[f"{name}: {why}" for name, why in self.refused.items()])

    def _hear(self, name: str) -> None:
        """Takes note of what a node says, and asks it again."""
        node = self.nodes[name]
        if node.asked is None:
            node.asked = self.cluster.call(name, "status")
        if not node.asked.done():
            if name not in self.cluster.alive():
                self._lose(name)
            return
        try:
            status: Status = node.asked.result()
        except NodeLost:
            self._lose(name)
            return
        node.asked = None
        if status.run != node.run:
            # It has not begun yet what it was given since.
            return
        node.status = status
        for task, state in status.tasks.items():
            if "checkpoint" in state and status.run is not None:
                self.sources[task], self.steps[task] = status.run, state["checkpoint"]
            if task in node.tasks and state["state"] in ENDED:
                self._end(name, task, state)
            elif task in node.tasks and state["state"] == "stopped" and task in node.released:
                # It is in the storage as far as it has come, and others may have it.
                node.released.discard(task)
                node.tasks.discard(task)
                self.sources[task] = str(status.run)
        if status.idle and node.tasks:
            # What it could not train, others may.
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
        log.warning("node %s was lost: its %d tasks go on from their last checkpoints", name, len(lost.tasks))
        self._note("lost", ",".join(sorted(lost.tasks)), name)
        self._count_loss(name, "its process has ended")

    def _count_loss(self, name: str, why: str) -> None:
        """Gives up a node's process; one whose machine is still there may begin again, but not for ever."""
        self.cluster.drop(name)
        self._losses[name] += 1
        if self._losses[name] == MOST_LOSSES:
            self._refuse(name, HydraError(f"it was lost {MOST_LOSSES} times: {why}"))

    def _note(self, what: str, task: str, node: str) -> None:
        self.history.append((what, task, node))
        log.info("%s: %s on %s", what, task, node)

    # Tasks.

    def _left(self, name: str, task: str) -> float | None:
        """The predicted seconds that are left of a task on a node."""
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
        return [name for name, node in self.nodes.items() if node.status.idle and not node.tasks and node.asked is None]

    def _place(self) -> None:
        """Gives tasks that nobody has to idle nodes."""
        pending = self._pending()
        seconds = self._seconds(pending)
        for task in [task for task in pending if not seconds[task]]:
            reasons = [f"{name}: {node.refused.get(task) or node.description['skipped'].get(task)}" for name, node in self.nodes.items()]
            self.ended[task] = "skipped"
            self.errors[task] = f"no node has room for it: {'; '.join(reasons)}"
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
        """Has a node train tasks, from their last checkpoints."""
        self._number += 1
        run = f"{self._number:04}-{name[:8]}-{uuid.uuid4().hex[:4]}"
        node = self.nodes[name]
        node.run, node.tasks, node.status = run, set(tasks), Status(run=run, idle=False)
        self.cluster.call(name, "begin", run, tasks, {task: self.sources[task] for task in tasks if task in self.sources})
        for task in tasks:
            self._note("place", task, name)

    def _move(self) -> None:
        """Has loaded nodes release tasks for idle ones, where that makes the end come earlier."""
        idle = self._idle()
        if not idle or self._pending() or any(node.released for node in self.nodes.values()):
            return
        held = [task for node in self.nodes.values() for task in node.tasks]
        for name, tasks in placement.moves(self._loads(), idle, self._seconds(held), self.least_gain_s).items():
            # Only what it trains can be stopped.
            self.release(name, [task for task in tasks if task in self.nodes[name].status.tasks])

    def release(self, name: str, tasks: list[str]) -> None:
        """Has a node stop tasks, which then go on elsewhere."""
        if tasks:
            self.nodes[name].released.update(tasks)
            self.cluster.call(name, "release", tasks)
            for task in tasks:
                self._note("move", task, name)

    # The end.

    def stop(self) -> None:
        """Stops all nodes at the ends of the minibatches that have begun. It does not wait for them."""
        for name in self.nodes:
            self.cluster.call(name, "stop")

    def wait_for_all(self, wait: Callable[[], None]) -> None:
        """Waits until no node trains, and all is in the storage."""
        while any(not node.status.idle for node in self.nodes.values()):
            wait()
            for name in list(self.nodes):
                self._hear(name)

    def report(self, wait: Callable[[], None]) -> dict[str, Any]:
        """Waits until all is in the storage, and gives the report of all runs, which is written there too.

        :raises TasksFailed: tasks failed or were skipped; the others are trained and written.
        """
        self.wait_for_all(wait)
        report = self._merged()
        self.storage.write(REPORT, json.dumps(report))
        failures = {task: self.errors.get(task, "no reason is known") for task in self.tasks if self.ended[task] != "done"}
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
            # Nobody else knows the copies.
            text = _native.report(local).replace(json.dumps(f"{folder}/")[1:-1], json.dumps(self.storage.at(f"{RUNS}/"))[1:-1])
        report: dict[str, Any] = json.loads(text)
        for task in report["tasks"]:
            # The report of one run does not name it.
            task.setdefault("run", self.storage.at(f"{RUNS}/{Path(local[0]).name}"))
            if task.get("model_dir"):
                task["model_dir"] = f"{task['run']}/models/{task['name']}"
        return report

"""A node: trains parts of a grid in local run directories, and copies them to the storage during training."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_train import _native
from hydra_train._cluster.folder import Folder
from hydra_train._cluster.storage import Storage
from hydra_train._errors import HydraError

if TYPE_CHECKING:
    from hydra_train._run import Run

#: The folder of run directories in the storage.
RUNS = "runs"
#: The final states of a task.
ENDED = ("done", "failed", "skipped")


@dataclass
class Status:
    """The status of a node. The results of all ended tasks are in the storage."""

    #: The current or last run.
    run: str | None = None
    #: The tasks of that run: their states and minibatches.
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: True if the run has ended and is completely in the storage.
    idle: bool = True
    #: The reason why the run could not be trained.
    error: str | None = None


class Node:
    """The process that uses the devices of a machine."""

    def __init__(self, storage: str, arguments: list[str], data: str | None, own: bytes | None = None) -> None:
        self._path = storage
        self._disk = Folder("hydra-node-")
        self._folder = self._disk.path
        self._arguments = list(arguments)
        # The name of the data in the storage, until it is fetched.
        self._data = data
        # A chain of PyTorch modules with its data, as bytes until `_own` is made of them, which `_native` gets.
        self._own_bytes = own
        self._own: Any = None
        self._status = Status()
        self._lock = threading.Lock()
        self._run: Run | None = None
        self._released: set[str] = set()
        self._spec = ""
        # The inode and modification time of the last copied checkpoint of each task.
        self._copied: dict[str, tuple[int, int]] = {}

    def describe(self, probe: str, token: str) -> dict[str, Any]:
        """Returns the description for the driver: build, processor, inputs, and the predicted seconds of each task that fits.

        ``probe`` is a file that the driver has written, with ``token`` as its content.
        """
        self._storage = Storage(self._path)
        found = self._storage.read(probe)
        if found != token:
            raise HydraError(f"the storage {self._storage.path} on this node is not that of the driver: use one that all nodes share")
        self._storage.check()
        self._fetch_data()
        self._make_own()
        self._spec = _native.spec(self._arguments, self._own)
        plan = _planned(self._arguments, self._own)
        seconds = {task["name"]: task["estimated_s"] for task in plan["tasks"]}
        skipped = {task["name"]: task["reason"] for task in plan.get("skipped", [])}
        return {
            "build": build(),
            "machine": json.loads(_native.machine()),
            "inputs": [line for line in self._spec.splitlines() if "_sha256 = " in line],
            "devices": len(plan["devices"]),
            "seconds": seconds,
            "skipped": skipped,
        }

    def begin(self, run: str, tasks: list[str], sources: Mapping[str, str]) -> None:
        """Starts training tasks as a run of this name, each from its checkpoint in the run that ``sources`` names."""
        states = {task: {"state": "waiting", "step": 0, "steps": None} for task in tasks}
        with self._lock:
            self._status, self._released, self._copied = Status(run=run, tasks=states, idle=False), set(), {}
        threading.Thread(target=self._train, args=(run, tasks, dict(sources)), daemon=True).start()

    def status(self) -> Status:
        """Returns the current status."""
        with self._lock:
            states = {task: dict(state) for task, state in self._status.tasks.items()}
            return Status(self._status.run, states, self._status.idle, self._status.error)

    def release(self, tasks: list[str]) -> None:
        """Stops tasks at the end of their current minibatches, so that other nodes can continue them."""
        with self._lock:
            self._released.update(tasks)
            if self._run is not None:
                for task in tasks:
                    self._run._running.stop_task(task)

    def stop(self) -> None:
        """Stops the run at the end of the current minibatches."""
        self.release(list(self.status().tasks))

    def close(self) -> None:
        """Removes the local files, which are all in the storage."""
        self._disk.remove()

    def _fetch_data(self) -> None:
        if self._data is None:
            return
        local = self._folder / "data" / self._data
        if not self._storage.get(f"data/{self._data}", local):
            raise HydraError(f"the data {self._data} is not in the storage {self._storage.path}")
        self._arguments.append(f"--data={local}")
        self._data = None

    def _make_own(self) -> None:
        """Makes the chain of PyTorch modules and binds it to its data, if the driver has sent them."""
        if self._own_bytes is None:
            return
        import torch

        chain, data = torch.load(io.BytesIO(self._own_bytes), weights_only=False)
        own = chain.bind(data)
        if not {f"--model={own.model}", f"--data={own.data}"} <= set(self._arguments):
            raise HydraError(
                f"its chain of PyTorch modules or its data are not those of the driver: it has {own.model} with {own.data}; use the same "
                "version of PyTorch, the same code and the same files everywhere"
            )
        self._own, self._own_bytes = own, None

    def _train(self, run: str, tasks: list[str], sources: Mapping[str, str]) -> None:
        error = None
        try:
            self._train_in(self._assemble(run, tasks, sources), f"{RUNS}/{run}")
        except Exception as failure:
            error = str(failure)
        with self._lock:
            self._run = None
            self._status.error, self._status.idle = error, True

    def _assemble(self, run: str, tasks: list[str], sources: Mapping[str, str]) -> Path:
        """Makes a run directory in which the tasks continue from their checkpoints, or start."""
        directory = self._folder / run
        directory.mkdir()
        # A JSON list of names is valid TOML.
        spec = f"{self._spec}\n[tasks]\nonly = {json.dumps(tasks)}\n"
        (directory / "spec.toml").write_text(spec)
        self._storage.write(f"{RUNS}/{run}/spec.toml", spec)
        for task, source in sources.items():
            file = f"checkpoints/{task}.safetensors"
            self._storage.get(f"{RUNS}/{source}/{file}", directory / file)
        lines = [line for source in sorted(set(sources.values())) for line in self._history(source, sources)]
        (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return directory

    def _history(self, run: str, sources: Mapping[str, str]) -> Iterator[str]:
        """Yields the losses and evaluations in another run of the tasks that continue from it."""
        for line in (self._storage.read(f"{RUNS}/{run}/metrics.jsonl") or "").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] in ("minibatch", "evaluation") and sources.get(event["task"]) == run:
                yield line

    def _train_in(self, directory: Path, mirror: str) -> None:
        """Trains a run, and copies its results to the storage as they are written."""
        from hydra_train._run import Run

        # `resume` would bind a chain to its data again, which may read all items.
        run = Run(["resume", "--json", "--progress=none", "--", str(directory)], self._own)
        with self._lock:
            self._run = run
            for task in self._released:
                run._running.stop_task(task)
        try:
            self._mirror_run(run, directory, mirror)
        except BaseException:
            # The driver would not learn of further training.
            run._stop_and_wait()
            raise

    def _mirror_run(self, run: Run, directory: Path, mirror: str) -> None:
        from hydra_train import TasksFailed

        for event in run:
            task, kind = str(event.get("task")), event["event"]
            if kind == "checkpoint":
                self._copy_checkpoint(directory, mirror, task)
                # A restarted driver reads these lines.
                self._copy_lines(directory, mirror)
            elif kind == "end":
                self._copy_checkpoint(directory, mirror, task)
                self._storage.put_all(directory / "models" / task, f"{mirror}/models/{task}")
                self._copy_lines(directory, mirror)
            self._note(event)
        try:
            run.wait()
        except TasksFailed:
            # The states of the tasks have the failures.
            pass
        for task in list(self._status.tasks):
            self._copy_checkpoint(directory, mirror, task)
        self._copy_lines(directory, mirror)
        self._storage.put_all(directory / "plans", f"{mirror}/plans")
        self._storage.put(directory / "report.json", f"{mirror}/report.json")

    def _copy_checkpoint(self, directory: Path, mirror: str, task: str) -> None:
        name = f"checkpoints/{task}.safetensors"
        file = directory / name
        if not file.exists():
            return
        now = file.stat()
        if self._copied.get(task) != (now.st_ino, now.st_mtime_ns):
            self._storage.put(file, f"{mirror}/{name}")
            self._copied[task] = (now.st_ino, now.st_mtime_ns)

    def _copy_lines(self, directory: Path, mirror: str) -> None:
        self._storage.put(directory / "metrics.jsonl", f"{mirror}/metrics.jsonl")

    def _note(self, event: Mapping[str, Any]) -> None:
        """Updates the status of a task from an event."""
        with self._lock:
            task = self._status.tasks.get(str(event.get("task")))
            if task is None:
                return
            if event["event"] == "minibatch":
                task.update(state="running", step=event["step"] + 1, steps=event["steps"])
            elif event["event"] == "resumed":
                task.update(state="running", step=event["step"], steps=event["steps"])
            elif event["event"] == "checkpoint":
                task["checkpoint"] = event["step"]
            elif event["event"] == "skipped":
                task.update(state="skipped", error=event["reason"])
            elif event["event"] == "end":
                task.update(state=event["state"], error=event["error"])


def build() -> str:
    """Returns an identifier of this build of the package."""
    digest = hashlib.sha256(Path(str(_native.__file__)).read_bytes()).hexdigest()
    return f"{_native.version}-{digest[:16]}"


def _planned(arguments: list[str], own: Any) -> dict[str, Any]:
    """Returns the admission of the whole grid on this node, with the predicted seconds of each task."""
    from hydra_train._run import Run

    return Run(["select", "--json", "--dry-run", *arguments], own).wait().report

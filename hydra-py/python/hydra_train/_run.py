"""A run in the background: its events, its tasks and its results."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from hydra_train import _control, _generation, _native, _pretrained
from hydra_train._errors import HydraError, TasksFailed

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from hydra_train._settings import Generate, Select

T = TypeVar("T")
Event = dict[str, Any]
Evaluation = dict[str, Any]
#: The name of a metric of generated texts, whether larger values are better, and its function.
Metric = tuple[str, bool, Callable[[str, str, str], float]]


class Task:
    """A task of a run. Its properties are read from the run directory on each access."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self.name = name

    def stop(self, at: int | None = None) -> int:
        """Stops the task after its current minibatch, or after ``at`` minibatches, and returns the number of minibatches.

        The task is written and reported as stopped, and stays stopped when the run is resumed. If the task has ended, or a stop
        is already scheduled, returns the minibatch of its end.

        :raises HydraError: the task is past ``at``, or a search controls the tasks.
        """
        return int(self._command("stop", at=at)["at"])

    def pause(self, at: int | None = None) -> int:
        """Pauses the task after its current minibatch, or after ``at`` minibatches, and returns the number of minibatches.

        Other tasks use the devices and the memory meanwhile.

        :raises HydraError: the task is past ``at``, or has ended.
        """
        return int(self._command("pause", at=at)["at"])

    def resume(self, until: int | None = None) -> int:
        """Resumes the paused task, until its end or until minibatch ``until``, and returns the minibatch from which it continues."""
        return int(self._command("resume", until=until)["at"])

    def extend(self, steps: int, at: int | None = None, name: str | None = None) -> Task:
        """Extends the training to ``steps`` minibatches in total: this task ends, and the returned task continues it."""
        return Task(self._run, str(self._command("extend", steps=steps, at=at, name=name)["task"]))

    def fork(
        self, at: int | None = None, name: str | None = None, weights_only: bool = False, **settings: Unpack[Select]
    ) -> Task:
        """Starts a new task from the current state of this one, or its state after ``at`` minibatches, with changed settings such as
        ``lr=1e-4``.

        The new task starts once it fits in host memory; ``reserve_for_forks=True`` of the run reserves memory for it. With
        ``weights_only`` it takes only the weights, and starts at the first minibatch with new optimizer state.
        """
        changes = _control.changes(settings)
        answer = self._command("fork", at=at, name=name, weights_only=weights_only or None, changes=changes)
        return Task(self._run, str(answer["task"]))

    def generate(self, prompts: Any = None, /, **settings: Unpack[Generate]) -> list[dict[str, Any]]:
        """Continues prompts with the written model of the task, as :func:`hydra_train.generate` does.

        :raises HydraError: the model is not written yet, or its modules are PyTorch's.
        """
        if self._run._chain is not None:
            raise HydraError(
                f"the model of `{self.name}` is modules of PyTorch, which generate by themselves: `task.load()` returns them, and that of a "
                "model of Transformers has `generate`, as in `task.load().generate(input_ids)`"
            )
        if (model := self.model_dir) is None:
            raise HydraError(f"the model of `{self.name}` is not written: wait for the end of the task")
        return _generation.generate(prompts, {"model": model, **settings})

    def _command(self, command: str, **more: Any) -> dict[str, Any]:
        return self._run._command({"command": command, "task": self.name, **more})

    @property
    def report(self) -> dict[str, Any]:
        """The current report of the task, as in ``report.json``."""
        return next(task for task in self._run._ranked() if task["name"] == self.name)

    @property
    def state(self) -> str:
        """``waiting``, ``running``, ``done``, ``stopped``, ``failed`` or ``skipped``."""
        return str(self.report["state"])

    @property
    def error(self) -> str | None:
        """The error of a failed task, or the reason why it was skipped."""
        return self.report.get("error")

    @property
    def rank(self) -> int | None:
        """The rank on the leaderboard; tasks with equal results have equal ranks."""
        return self.report.get("rank")

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return dict(self.report["config"] or {})

    @property
    def differs(self) -> dict[str, Any]:
        """The values of the settings in which the tasks of the run differ."""
        return dict(self.report.get("differs") or {})

    @property
    def steps(self) -> int:
        """The number of trained minibatches."""
        return int(self.report["steps"])

    @property
    def losses(self) -> list[float | None]:
        """The loss of each minibatch; None where it is not a number."""
        return list(self.report.get("losses", []))

    @property
    def initial_validation(self) -> Evaluation | None:
        """``loss``, ``perplexity``, ``predicted_tokens`` and, of a classifier, ``metrics`` before training."""
        return self.report.get("initial_validation")

    @property
    def validation(self) -> Evaluation | None:
        """``loss``, ``perplexity``, ``predicted_tokens`` and, of a classifier, ``metrics`` of the written weights."""
        return self.report.get("validation")

    @property
    def test(self) -> Evaluation | None:
        """The same on the test data."""
        return self.report.get("test")

    @property
    def model_dir(self) -> Path | None:
        """The directory of the model, once it is written."""
        found = self.report.get("model_dir")
        return None if found is None else Path(found)

    @property
    def weights_sha256(self) -> str | None:
        """The SHA-256 of the final weights; equal weights have equal hashes."""
        return self.report.get("weights_sha256")

    def load(self, **options: Any) -> Any:
        """Returns the model with the trained weights as a ``torch.nn.Module``.

        That is the model of Transformers, with PEFT's adapters on their base if the task trained adapters; ``options`` are
        those of ``from_pretrained``. For a ``hydra_train.torch.Chain`` it is copies of the modules as one module, without options.

        :raises HydraError: the task has not written its model yet, or a package is missing.
        """
        chain, directory = self._run._chain, self.model_dir
        if directory is None:
            raise HydraError(f"task `{self.name}` is {self.state} and has not written its model")
        if chain is None:
            return _pretrained.load(directory, options)
        if options:
            raise HydraError(f"modules of PyTorch are loaded without options, got {', '.join(options)}")
        return chain.load(directory)

    def __repr__(self) -> str:
        return f"<Task {self.name}: {self.state}>"


class Run:
    """A run on background threads.

    Iteration yields its events, the objects of its ``metrics.jsonl``, from the first one until the run has ended; each iterator
    starts at the first event. As a context manager, the run is awaited at the end of the block. If an exception leaves the
    block, the run is stopped first.
    """

    def __init__(self, arguments: list[str], own: Any = None, metric: Metric | None = None) -> None:
        self._chain = None if own is None else own.chain
        self._running = _native.start(arguments, own, metric)
        _RUNNING[:] = [run for run in _RUNNING if not run._has_ended()]
        _RUNNING.append(self)

    def __iter__(self) -> Iterator[Event]:
        try:
            for line in self._running.events():
                yield json.loads(line)
            # Raises the error of a command that could not start.
            self._running.wait()
        except KeyboardInterrupt:
            self._stop_and_wait()
            raise

    def wait(self, timeout: float | None = None) -> Run:
        """Waits until the run has ended, and returns the run.

        :raises TimeoutError: the run has not ended after ``timeout`` seconds.
        :raises TasksFailed: tasks failed or were skipped; the others are trained and written.
        :raises HydraError: the run could not start, or its results could not be written.
        """
        end = self._interruptible(lambda: self._running.wait(timeout))
        if end is None:
            raise TimeoutError(f"the run has not ended after {timeout} seconds")
        if end == "failed":
            raise self._failure()
        return self

    def stop(self) -> None:
        """Stops the run at the end of the current minibatches. The trained weights are written and reported."""
        self._running.stop()

    @property
    def state(self) -> str:
        """``running``, ``done``, ``failed`` (if at least one task failed) or ``stopped``."""
        try:
            end = self._running.wait(0)
        except HydraError:
            return "failed"
        return "running" if end is None else end

    @property
    def directory(self) -> Path:
        """The run directory. Waits for a run that has just started.

        :raises HydraError: the run could not start, or was a dry run.
        """
        found = self._interruptible(self._running.directory)
        if found is None:
            self._running.wait(0)
            raise HydraError("the run has no directory: a dry run writes no files")
        return Path(found)

    @property
    def report(self) -> dict[str, Any]:
        """The report, as in ``report.json``; the current one while the run is running."""
        if self._has_ended():
            self._running.wait(0)
            return dict(json.loads(self._running.output()))
        return self._report()

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by name, the best first. Waits until a run that has just started begins to train."""
        return {task["name"]: Task(self, task["name"]) for task in self._ranked()}

    @property
    def best(self) -> Task:
        """The task with the best validation result so far.

        :raises HydraError: no task has been validated.
        """
        first = next((task for task in self._ranked() if task["rank"] is not None), None)
        if first is None:
            raise HydraError("no task of the run has a rank, because none has been validated")
        return Task(self, first["name"])

    @property
    def leaderboard(self) -> list[dict[str, Any]]:
        """The leaderboard as flat rows."""
        return [_row(task) for task in self._ranked()]

    def to_pandas(self) -> pandas.DataFrame:
        """The leaderboard as a pandas data frame."""
        try:
            import pandas
        except ImportError as error:
            raise HydraError("`to_pandas` needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self.leaderboard)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        else:
            # The exception of the block takes precedence over an error of the run.
            self._stop_and_wait()

    def __repr__(self) -> str:
        return f"<Run: {self.state}>"

    def _has_ended(self) -> bool:
        return self.state != "running"

    def _report(self) -> dict[str, Any]:
        directory = self.directory
        if not self._interruptible(lambda: self._running.begun(None)):
            raise HydraError("the run has not started")
        if self._has_ended():
            self._running.wait(0)
        return dict(json.loads(_native.report([str(directory)])))

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        return self._interruptible(lambda: _control.send(self._running, command))

    def _ranked(self) -> list[dict[str, Any]]:
        return list(self._report()["tasks"])

    def _failure(self) -> HydraError:
        tasks = self._ranked()
        failures = {
            task["name"]: str(task["error"]) for task in tasks if task["state"] in ("failed", "skipped")
        }
        failures |= {task["name"]: str(task["reason"]) for task in self.report.get("skipped", [])}
        lines = self._running.errors()
        if not failures:
            return HydraError("the run has ended, but not all of its results could be written", causes=lines)
        count = f"{len(failures)} of {len(tasks)} tasks failed"
        return TasksFailed(count, causes=[f"{name}: {why}" for name, why in failures.items()], failures=failures)

    def _interruptible(self, call: Callable[[], T]) -> T:
        """Calls a function. Ctrl-C during the call stops the run, and is raised when it has stopped; a second one immediately."""
        try:
            return call()
        except KeyboardInterrupt:
            self._stop_and_wait()
            raise

    def _stop_and_wait(self) -> None:
        self.stop()
        try:
            self._running.wait()
        except HydraError:
            pass


_RUNNING: list[Run] = []


@atexit.register
def _stop_all() -> None:
    """Stops the running runs when the program exits, so that the trained weights are written."""
    for run in _RUNNING:
        run.stop()
    for run in _RUNNING:
        run._stop_and_wait()


def _row(task: dict[str, Any]) -> dict[str, Any]:
    config = task.get("config") or {}
    row = {"rank": task["rank"], "task": task["name"], "state": task["state"]}
    row |= {key: value for key, value in config.items() if not isinstance(value, (dict, list))}
    row |= task.get("differs") or {}
    row["steps"] = task["steps"]
    for kind in ("initial_validation", "validation", "test"):
        result = task.get(kind) or {}
        row |= {f"{kind}_{figure}": result.get(figure) for figure in ("loss", "perplexity")}
        row |= {f"{kind}_{name}": value for name, value in (result.get("metrics") or {}).items()}
    return row | {key: task.get(key) for key in ("model_dir", "weights_sha256", "error")}

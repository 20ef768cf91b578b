"""A run that goes on beside the program: its events, its tasks and its results."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from hydra_train import _native, _steering
from hydra_train._errors import HydraError, TasksFailed

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from hydra_train._settings import Select

T = TypeVar("T")
Event = dict[str, Any]
Evaluation = dict[str, Any]


class Task:
    """A task of a run. What it says is read from the run directory when it is asked for."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self.name = name

    def stop(self, at: int | None = None) -> int:
        """Ends this task alone after the minibatch that has begun, or after ``at``, and gives after how many.

        It is written and reported as stopped, and stays so when the run goes on. Of a task that has ended, or is to end
        already, it gives where.

        :raises HydraError: it has passed ``at``, or a search owns the tasks.
        """
        return int(self._steer("stop", at=at)["at"])

    def pause(self, at: int | None = None) -> int:
        """Has it wait after the minibatch that has begun, or after ``at``, and gives after how many. It makes room for others.

        :raises HydraError: it has passed that place, or has ended.
        """
        return int(self._steer("pause", at=at)["at"])

    def resume(self, until: int | None = None) -> int:
        """Lets it go on that is paused, to its end or until it has trained so many minibatches, and gives where it goes on."""
        return int(self._steer("resume", until=until)["at"])

    def extend(self, steps: int, at: int | None = None, name: str | None = None) -> Task:
        """Has it train ``steps`` minibatches in all: it ends, and the task that is given back goes on in its place."""
        return Task(self._run, str(self._steer("extend", steps=steps, at=at, name=name)["task"]))

    def fork(
        self, at: int | None = None, name: str | None = None, weights_only: bool = False, **settings: Unpack[Select]
    ) -> Task:
        """Begins a task as this one stands now, or after ``at`` minibatches, with other settings, such as ``lr=1e-4``.

        It begins when host memory has room for it: give the run ``reserve_for_forks=True``. With ``weights_only`` it begins at the
        first minibatch with fresh moments.
        """
        changes = _steering.changes(settings)
        answer = self._steer("fork", at=at, name=name, weights_only=weights_only or None, changes=changes)
        return Task(self._run, str(answer["task"]))

    def _steer(self, command: str, **more: Any) -> dict[str, Any]:
        return self._run._steer({"command": command, "task": self.name, **more})

    @property
    def report(self) -> dict[str, Any]:
        """All that is known of it so far, as ``report.json`` has it."""
        return next(task for task in self._run._ranked() if task["name"] == self.name)

    @property
    def state(self) -> str:
        """``waiting``, ``running``, ``done``, ``stopped``, ``failed`` or ``skipped``."""
        return str(self.report["state"])

    @property
    def error(self) -> str | None:
        """The reason of its failure."""
        return self.report.get("error")

    @property
    def rank(self) -> int | None:
        """Its place on the leaderboard; equal ones have equal places."""
        return self.report.get("rank")

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        return dict(self.report["config"] or {})

    @property
    def differs(self) -> dict[str, Any]:
        """The settings in which the tasks of the run differ, and what they are of this one."""
        return dict(self.report.get("differs") or {})

    @property
    def steps(self) -> int:
        """The minibatches that it has trained."""
        return int(self.report["steps"])

    @property
    def losses(self) -> list[float | None]:
        """The loss of each minibatch, None where it is no number."""
        return list(self.report.get("losses", []))

    @property
    def initial_validation(self) -> Evaluation | None:
        """``loss``, ``perplexity`` and ``predicted_tokens`` before training."""
        return self.report.get("initial_validation")

    @property
    def validation(self) -> Evaluation | None:
        """``loss``, ``perplexity`` and ``predicted_tokens`` of the weights that are written."""
        return self.report.get("validation")

    @property
    def test(self) -> Evaluation | None:
        """The same on the test data."""
        return self.report.get("test")

    @property
    def model_dir(self) -> Path | None:
        """The directory of its model, once that is written."""
        found = self.report.get("model_dir")
        return None if found is None else Path(found)

    @property
    def weights_sha256(self) -> str | None:
        """The hash of its weights at the end: equal weights have equal ones."""
        return self.report.get("weights_sha256")

    def __repr__(self) -> str:
        return f"<Task {self.name}: {self.state}>"


class Run:
    """A run on threads of its own.

    Iterating gives its events, the objects of its ``metrics.jsonl``, from the first one until it has ended; each iterator
    begins anew. As a context manager it waits at the end, and stops the run first where an exception leaves the block.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._running = _native.start(arguments)
        _UNDER_WAY[:] = [run for run in _UNDER_WAY if not run._has_ended()]
        _UNDER_WAY.append(self)

    def __iter__(self) -> Iterator[Event]:
        try:
            for line in self._running.events():
                yield json.loads(line)
            # A command that could not begin says why.
            self._running.wait()
        except KeyboardInterrupt:
            self._stop_and_wait()
            raise

    def wait(self, timeout: float | None = None) -> Run:
        """Waits until the run has ended, and returns it.

        :raises TimeoutError: it has not after ``timeout`` seconds.
        :raises TasksFailed: tasks failed; the others are trained and written.
        :raises HydraError: the run could not begin, or what it writes could not be written.
        """
        end = self._interruptible(lambda: self._running.wait(timeout))
        if end is None:
            raise TimeoutError(f"the run has not ended after {timeout} seconds")
        if end == "failed":
            raise self._failure()
        return self

    def stop(self) -> None:
        """Stops the run at the end of the minibatches that have begun. What was trained is written and reported."""
        self._running.stop()

    @property
    def state(self) -> str:
        """``running``, or how it ended: ``done``, ``failed`` (also in part) or ``stopped``."""
        try:
            end = self._running.wait(0)
        except HydraError:
            return "failed"
        return "running" if end is None else end

    @property
    def directory(self) -> Path:
        """The run directory. A run that has just been started says soon where it is.

        :raises HydraError: the run could not begin.
        """
        found = self._interruptible(self._running.directory)
        if found is None:
            self._running.wait(0)
            raise HydraError("the run has no directory: a dry run leaves no file behind")
        return Path(found)

    @property
    def report(self) -> dict[str, Any]:
        """The report as ``report.json`` has it; of a run that is under way, as far as it has come."""
        if self._has_ended():
            self._running.wait(0)
            return dict(json.loads(self._running.output()))
        return self._report()

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks by their names, the best first. A run that has just been started says so when it begins to train."""
        return {task["name"]: Task(self, task["name"]) for task in self._ranked()}

    @property
    def best(self) -> Task:
        """The task with the best validation, so far or at the end.

        :raises HydraError: no task has been validated.
        """
        first = next((task for task in self._ranked() if task["rank"] is not None), None)
        if first is None:
            raise HydraError("no task of the run has a rank: none has been validated")
        return Task(self, first["name"])

    @property
    def leaderboard(self) -> list[dict[str, Any]]:
        """The tasks in their order on the leaderboard, as flat rows."""
        return [_row(task) for task in self._ranked()]

    def to_pandas(self) -> pandas.DataFrame:
        """The leaderboard as a data frame of pandas."""
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
            # The exception that leaves the block says more than how the run ended.
            self._stop_and_wait()

    def __repr__(self) -> str:
        return f"<Run: {self.state}>"

    def _has_ended(self) -> bool:
        return self.state != "running"

    def _report(self) -> dict[str, Any]:
        directory = self.directory
        if not self._interruptible(lambda: self._running.begun(None)):
            raise HydraError("the run has not begun")
        if self._has_ended():
            self._running.wait(0)
        return dict(json.loads(_native.report([str(directory)])))

    def _steer(self, command: dict[str, Any]) -> dict[str, Any]:
        return self._interruptible(lambda: _steering.ask(self._running, command))

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
            return HydraError("the run has ended, and not all of it could be written", causes=lines)
        count = f"{len(failures)} of {len(tasks)} tasks failed"
        return TasksFailed(count, causes=[f"{name}: {why}" for name, why in failures.items()], failures=failures)

    def _interruptible(self, ask: Callable[[], T]) -> T:
        """Asks; Ctrl-C meanwhile stops the run and is raised when it has stopped, a second one at once."""
        try:
            return ask()
        except KeyboardInterrupt:
            self._stop_and_wait()
            raise

    def _stop_and_wait(self) -> None:
        self.stop()
        try:
            self._running.wait()
        except HydraError:
            pass


_UNDER_WAY: list[Run] = []


@atexit.register
def _stop_all() -> None:
    """Stops the runs that are under way when the program ends, so that nothing that was trained is lost."""
    for run in _UNDER_WAY:
        run.stop()
    for run in _UNDER_WAY:
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
    return row | {key: task.get(key) for key in ("model_dir", "weights_sha256", "error")}

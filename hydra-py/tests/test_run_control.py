"""Run control: tasks are paused, forked and extended during a run, as with ``hydra ctl``."""

from __future__ import annotations

import pytest

import hydra_train as hydra
from conftest import ENDLESS, until_end

NAME = "b2-lr1e-3"


def begun() -> hydra.Run:
    """Returns a run of one task that has started training."""
    run = hydra.select(**(ENDLESS | {"lr": 1e-3, "reserve_for_forks": True}))
    next(event for event in run if event["event"] == "minibatch")
    return run


def test_a_task_is_paused_forked_extended_and_goes_on() -> None:
    run = begun()
    task = run.tasks[NAME]
    place = task.pause()
    assert place >= 1
    fork = task.fork(name="shorter", steps=place + 4)
    slower = task.fork(lr=1e-4, steps=place + 4, no_shuffle=None)
    longer = task.extend(place + 2_000_000, name="longer")
    assert (fork.name, longer.name) == ("shorter", "longer") and slower.name not in (NAME, "shorter")
    # The scheduler prefers the longest task, so it is paused to let the others train.
    again = longer.pause()
    until_end(run, fork.name, slower.name)
    assert (fork.state, fork.steps, slower.steps) == ("done", place + 4, place + 4)
    assert longer.resume(until=again + 2) == again
    # It may have been paused again before its first minibatch.
    with pytest.raises(hydra.HydraError, match="is out of range for task"):
        longer.pause(at=place - 1)
    run.stop()
    states = {name: found.state for name, found in run.wait().tasks.items()}
    assert states[NAME] == states["longer"] == "stopped" and run.tasks["longer"].steps >= place
    # A fork that changes only the length has the bits of a run of that length.
    alone = hydra.select(**(ENDLESS | {"lr": 1e-3, "steps": place + 4})).wait().best
    assert fork.weights_sha256 == alone.weights_sha256 != slower.weights_sha256
    with pytest.raises(hydra.HydraError, match="the run has ended"):
        task.pause()


def test_invalid_commands_are_refused_and_change_nothing() -> None:
    run = begun()
    task = run.tasks[NAME]
    with pytest.raises(hydra.UnknownKeyword, match="nearest known one is `lr`"):
        task.fork(lrr=1e-3)  # type: ignore[call-arg]
    with pytest.raises(hydra.HydraError, match="context"):
        task.fork(context=8)
    with pytest.raises(hydra.HydraError, match="not a setting of a task"):
        task.fork(devices="cpu:4")
    with pytest.raises(hydra.HydraError, match="missing"):
        hydra.Task(run, "missing").pause()
    run.stop()
    assert list(run.wait().tasks) == [NAME]

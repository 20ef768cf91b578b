"""A user's program. `mypy --strict` must pass on it; each `ignore` marks an expected error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra_train as hydra
from hydra_train import ray as hydra_ray


def grid(data: Path) -> str:
    run = hydra.select(data=data, lr=[1e-4, 3e-4], batch=8, device_memory="1GiB", dry_run=False)
    for event in run:
        kind: str = event["event"]
        print(kind)
    task: hydra.Task = run.best
    losses: list[float | None] = task.losses
    rows: list[dict[str, Any]] = run.leaderboard
    print(losses, rows, run.to_pandas(), run.tasks[task.name].state)
    return task.name


def controlled(run: hydra.Run) -> int:
    task = run.tasks["lr1e-4"]
    place: int = task.pause(at=10)
    other: hydra.Task = task.fork(lr=3e-5, steps=900, name="slower")
    longer: hydra.Task = other.extend(1200)
    task.fork(lrr=1e-5)  # type: ignore[call-arg]
    return place + task.resume(until=20) + longer.steps


def texts() -> None:
    hydra.train(data=["one", "two"], lr=1e-3)
    hydra.train(data={"train": [{"prompt": "why", "completion": "so"}]})
    hydra.train(data=[[1, 2, 3], [4, 5]])
    hydra.resume("runs/select-1", checkpoint_every=10).wait(timeout=1.5)


def cluster() -> str:
    report = hydra_ray.select(storage_path="s3://bucket/run", lr=[1e-4, 3e-4], device_memory="8GiB", least_gain_s=60)
    best: dict[str, Any] = report["tasks"][0]
    return str(hydra.report("part-1", Path("part-2"))["state"]) + str(best["name"])


def mistakes() -> None:
    hydra_ray.select(lr=1e-4)  # type: ignore[call-arg]
    hydra.select(lrr=1e-4)  # type: ignore[call-arg]
    hydra.train(lr=[1e-4, 3e-4])  # type: ignore[arg-type]
    hydra.select(steps="many")  # type: ignore[arg-type]


def refused(error: hydra.MemoryRefused) -> int:
    return error.needed_bytes - error.available_bytes

"""Fixtures of the tests: the smallest grid, and the command line program as the reference."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Two configurations of two steps on two devices, cut into three shards: as in hydra-bench/tests/cli.
GRID: dict[str, Any] = {
    "batch": 4,
    "lr": [1e-3, 3e-4],
    "context": 32,
    "devices": "cpu:2x1",
    "device_memory": "64MiB",
    "steps": 2,
    "cuts": [2, 4],
}
#: A configuration that trains until it is stopped.
ENDLESS: dict[str, Any] = {
    "batch": 2,
    "context": 16,
    "devices": "cpu:1x1",
    "device_memory": "64MiB",
    "steps": 1_000_000,
}


def until_end(run: Any, *tasks: str) -> None:
    """Reads the events of a run until these tasks have ended."""
    left = set(tasks)
    for event in run:
        if event["event"] == "end":
            left.discard(event["task"])
        if not left:
            return


def pairs(count: int, first: int = 0) -> list[dict[str, str]]:
    """Returns pairs of a better and a worse answer of several lengths; every fifth is the other way round."""
    subjects = ("the film", "a soup", "her song", "our trip", "the hotel")
    good = ("made me smile", "was kind", "is worth a look", "shines")
    bad = ("made me yawn", "was dull, dull, dull", "is loud", "fades away too soon")
    rows = []
    for at in range(first, first + count):
        better, worse = (bad, good) if at % 5 == 4 else (good, bad)
        rows.append({"prompt": f"Praise {subjects[at % 5]}:", "chosen": f" {better[at % 4]}", "rejected": f" {worse[at // 4 % 4]}"})
    return rows


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for default run directories, and no machine-wide memory reservations, so that tests do not wait for other runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_RESERVATIONS", "")
    yield


@pytest.fixture(scope="session")
def hydra_program() -> Path:
    """The program ``hydra``: that of ``HYDRA_PROGRAM``, by default that of the target folder."""
    metadata = ["cargo", "metadata", "--no-deps", "--format-version=1", "--offline"]
    named = os.environ.get("HYDRA_PROGRAM")
    if named is None:
        found = subprocess.run(metadata, cwd=ROOT, check=True, capture_output=True).stdout
        named = f"{json.loads(found)['target_directory']}/debug/hydra"
    assert Path(named).is_file(), f"{named} does not exist: cargo build -p hydra-bench"
    return Path(named)

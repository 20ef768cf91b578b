"""Temporary folders of nodes: the folder of a killed process is removed by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hydra_train._cluster.folder import Folder

HOLDS = """
import sys, time
from hydra_train._cluster.folder import Folder
folder = Folder("hydra-node-")
(folder.path / "run").mkdir()
(folder.path / "run/checkpoint").write_text("large")
print(folder.path, flush=True)
time.sleep(600)
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Starts a process that holds a folder."""
    environment = os.environ | {"TMPDIR": str(folder)}
    child = subprocess.Popen([sys.executable, "-c", HOLDS], env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


@pytest.mark.skipif(os.name == "nt", reason="no file locks")
def test_folders_of_processes_that_were_killed_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed, left), (living, held) = holder(tmp_path), holder(tmp_path)
    others = tmp_path / "hydra-node-of-others"
    others.mkdir()
    try:
        killed.kill()
        killed.wait()
        assert (left / "run/checkpoint").exists()
        mine = Folder("hydra-node-")
        assert not left.exists() and (held / "run/checkpoint").exists()
        assert others.is_dir(), "a folder without a lock is not removed"
        trial = Folder("hydra-trial-")
        assert mine.path.is_dir() and trial.path.is_dir(), "a process may hold several folders"
        mine.remove()
        assert not mine.path.exists() and held.is_dir()
        mine.remove()
    finally:
        living.kill()
        living.wait()

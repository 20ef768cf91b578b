"""A temporary folder on the local disk, for the lifetime of a process. Folders of killed processes are removed by the next process: a
folder is locked by its process, and the lock ends with the process in every case.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Without such locks, folders of killed processes remain.
    fcntl = None  # type: ignore[assignment]

#: The lock file. It exists only while or after it is locked.
LOCK = "lock"


class Folder:
    """A new temporary folder whose name begins with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        if fcntl is not None:
            # Locked before it gets its name, so other processes never find it unlocked.
            self._lock = os.open(self.path / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(self.path / f"{LOCK}.new", self.path / LOCK)

    def remove(self) -> None:
        """Removes the folder and its content."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left(prefix: str) -> None:
    """Removes this user's folders of ended processes."""
    if fcntl is None:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # Another process has just removed it, or is creating it.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except BlockingIOError:
            # Its process is alive.
            pass
        finally:
            os.close(lock)


def _remove(path: Path) -> None:
    """Removes a folder, and its lock last, so that a partially removed folder is found again."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == LOCK) if path.is_dir() else []:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

"""A folder on a machine's own disk, for as long as its process lives. What processes that were killed have left is removed by the
next one: a folder is locked by its process, and the lock ends with it, however that ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # No such locks: there, what is left stays.
    fcntl = None  # type: ignore[assignment]

#: The file that is locked. A folder has it from when it is locked.
LOCK = "lock"


class Folder:
    """A new folder among the temporary ones, whose name begins with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        remove_left(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        if fcntl is not None:
            # Under its name it is locked already: nobody sees it otherwise.
            self._lock = os.open(self.path / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(self.path / f"{LOCK}.new", self.path / LOCK)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left(prefix: str) -> None:
    """Removes this user's folders of processes that are gone."""
    if fcntl is None:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # Another process has just removed it, or begins in it.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except BlockingIOError:
            # Its process lives.
            pass
        finally:
            os.close(lock)


def _remove(path: Path) -> None:
    """Removes a folder, and its lock last: one that is left half is found again."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == LOCK) if path.is_dir() else []:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

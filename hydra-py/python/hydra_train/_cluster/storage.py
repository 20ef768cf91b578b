"""The storage that all nodes see: a directory, or a bucket, by fsspec. Each file in it is whole.

A file of a directory is written under another name, which it loses when it is whole. A bucket knows no such thing: there a file is
not there before it is whole, a new name is a copy, and folders are not made. What fsspec remembers of a bucket is never asked.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from hydra_train._errors import HydraError, UsageError

#: The end of the names of files that are not whole yet.
PART = ".part"
#: The protocols of buckets: an object is there when all of it is.
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
#: So many bytes of a file are in memory while it is copied.
PIECE = 1 << 24


class Storage:
    """Files by names relative to a path such as ``/shared/run`` or ``s3://bucket/run``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise HydraError("a cluster's storage needs fsspec, which is not installed: pip install 'hydra-train[ray]'") from error
        self.path = os.fsdecode(path)
        self._bucket = fsspec.utils.get_protocol(self.path) in BUCKETS
        # Others write meanwhile: what was listed before is old.
        options = {"use_listings_cache": False} if self._bucket else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.path, **options)
        except (ImportError, ValueError) as error:
            raise UsageError(f"`storage_path` {self.path} cannot be used: {error}", keyword="storage_path") from error

    def check(self) -> None:
        """Tries to write and to read.

        :raises HydraError: that cannot be done.
        """
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self.write(name, "probe")
            found = self.read(name)
            self.remove(name)
        except Exception as error:
            raise HydraError(
                f"the storage {self.path} cannot be written to: give another `storage_path`", causes=[f"{type(error).__name__}: {error}"]
            ) from error
        if found != "probe":
            raise HydraError(f"the storage {self.path} does not give back what is written to it: give another `storage_path`")

    def write(self, name: str, text: str) -> None:
        """Writes a file, which replaces one of its name when it is whole."""
        part = self._part(name)
        self._files.pipe_file(part, text.encode())
        self._commit(part, name)

    def read(self, name: str) -> str | None:
        """The text of a file, or nothing if there is none."""
        try:
            return bytes(self._files.cat_file(self._at(name))).decode()
        except FileNotFoundError:
            return None

    def put(self, local: Path, name: str) -> None:
        """Copies a file there, which replaces one of its name when it is whole."""
        part = self._part(name)
        # The file that is open stays what it is, also where its name is given to a newer one.
        with local.open("rb") as source:
            target = self._files.open(part, "wb")
            try:
                while piece := source.read(PIECE):
                    target.write(piece)
            except BaseException:
                self._give_up(target, part)
                raise
            target.close()
        self._commit(part, name)

    def put_all(self, local: Path, name: str) -> None:
        """Copies a folder's files there."""
        for file in sorted(file for file in local.rglob("*") if file.is_file()):
            self.put(file, f"{name}/{file.relative_to(local).as_posix()}")

    def get(self, name: str, local: Path) -> bool:
        """Copies a file, or a folder, from there; returns whether it is there."""
        self._files.invalidate_cache()
        if not self._files.exists(self._at(name)):
            return False
        local.parent.mkdir(parents=True, exist_ok=True)
        if self._files.isdir(self._at(name)):
            for entry in self.names(name):
                self.get(f"{name}/{entry}", local / entry)
        else:
            self._files.get_file(self._at(name), str(local))
        return True

    def names(self, folder: str) -> list[str]:
        """The names in a folder, in order; none of one that is not there."""
        try:
            self._files.invalidate_cache()
            found: list[Any] = self._files.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        paths = {str(path).rstrip("/") for path in found}
        # A folder that was made by hand in a bucket is an object of its own.
        names = {path.rsplit("/", 1)[-1] for path in paths if path != self._at(folder).rstrip("/")}
        return sorted(name for name in names if PART not in name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._files.rm_file(self._at(name))

    def at(self, name: str) -> str:
        """A name as users know it."""
        return f"{self.path.rstrip('/')}/{name}"

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _part(self, name: str) -> str:
        """Where a file is written until it is whole."""
        if self._bucket:
            return self._at(name)
        part = f"{self._at(name)}{PART}-{uuid.uuid4().hex}"
        self._files.makedirs(part.rsplit("/", 1)[0], exist_ok=True)
        return part

    def _commit(self, part: str, name: str) -> None:
        if not self._bucket:
            self._files.mv(part, self._at(name))

    def _give_up(self, target: Any, part: str) -> None:
        """Closes a file that is not whole. Closing alone would put half of it into a bucket."""
        if self._bucket:
            target.discard()
            target.closed = True
        else:
            target.close()
            self._files.rm_file(part)

"""The storage that all nodes share: a directory or a bucket, accessed with fsspec. Files appear in it atomically.

In a directory, a file is written under a temporary name and renamed when it is complete. In a bucket, an object appears when it is
complete, renaming is copying, and folders are not created. fsspec's listing cache of buckets is not used.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from hydra_train._errors import HydraError, UsageError

#: The suffix of the names of incomplete files.
PART = ".part"
#: The protocols of buckets, where an object appears when it is complete.
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
#: The chunk size for copying a file, in bytes.
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
        # Other processes write too, so a cached listing may be stale.
        options = {"use_listings_cache": False} if self._bucket else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.path, **options)
        except (ImportError, ValueError) as error:
            raise UsageError(f"`storage_path` {self.path} cannot be used: {error}", keyword="storage_path") from error

    def check(self) -> None:
        """Checks that files can be written and read.

        :raises HydraError: they cannot.
        """
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self.write(name, "probe")
            found = self.read(name)
            self.remove(name)
        except Exception as error:
            raise HydraError(
                f"the storage {self.path} cannot be written to: use another `storage_path`", causes=[f"{type(error).__name__}: {error}"]
            ) from error
        if found != "probe":
            raise HydraError(f"the storage {self.path} does not return the written content: use another `storage_path`")

    def write(self, name: str, text: str) -> None:
        """Writes a file, and replaces an existing one when it is complete."""
        part = self._part(name)
        self._files.pipe_file(part, text.encode())
        self._commit(part, name)

    def read(self, name: str) -> str | None:
        """Returns the text of a file; None if it does not exist."""
        try:
            return bytes(self._files.cat_file(self._at(name))).decode()
        except FileNotFoundError:
            return None

    def put(self, local: Path, name: str) -> None:
        """Copies a local file to the storage, and replaces an existing one when it is complete."""
        part = self._part(name)
        # The open file keeps its content if another file is renamed over it.
        with local.open("rb") as source:
            target = self._files.open(part, "wb")
            try:
                while piece := source.read(PIECE):
                    target.write(piece)
            except BaseException:
                self._discard(target, part)
                raise
            target.close()
        self._commit(part, name)

    def put_all(self, local: Path, name: str) -> None:
        """Copies the files of a local folder to the storage."""
        for file in sorted(file for file in local.rglob("*") if file.is_file()):
            self.put(file, f"{name}/{file.relative_to(local).as_posix()}")

    def get(self, name: str, local: Path) -> bool:
        """Copies a file or a folder from the storage; returns whether it exists."""
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
        """Returns the sorted names in a folder; an empty list if it does not exist."""
        try:
            self._files.invalidate_cache()
            found: list[Any] = self._files.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        paths = {str(path).rstrip("/") for path in found}
        # A bucket may have an object for the folder itself.
        names = {path.rsplit("/", 1)[-1] for path in paths if path != self._at(folder).rstrip("/")}
        return sorted(name for name in names if PART not in name)

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._files.rm_file(self._at(name))

    def at(self, name: str) -> str:
        """Returns the full path of a name, for users."""
        return f"{self.path.rstrip('/')}/{name}"

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _part(self, name: str) -> str:
        """Returns the path to which a file is written until it is complete."""
        if self._bucket:
            return self._at(name)
        part = f"{self._at(name)}{PART}-{uuid.uuid4().hex}"
        self._files.makedirs(part.rsplit("/", 1)[0], exist_ok=True)
        return part

    def _commit(self, part: str, name: str) -> None:
        if not self._bucket:
            self._files.mv(part, self._at(name))

    def _discard(self, target: Any, part: str) -> None:
        """Discards an incomplete file. Only closing it would upload the incomplete content to a bucket."""
        if self._bucket:
            target.discard()
            target.closed = True
        else:
            target.close()
            self._files.rm_file(part)

"""Writes data given as Python objects into the files that the command line reads."""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra_train._errors import UsageError

#: The keys of a mapping of splits, which are also the names of their files.
SPLITS = ("train", "validation", "test")
#: The number of hash digits in file names.
HASH_DIGITS = 16


def as_path(data: Any, folder: Path) -> Any:
    """Returns a path unchanged. Writes texts and rows to a file in ``folder`` and returns its path.

    Equal data has an equal path. The file is kept, so that an interrupted run finds it again.
    """
    if data is None or isinstance(data, (str, os.PathLike)):
        return data
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="data-") as partial:
        if not isinstance(data, Mapping):
            rows = Path(partial) / "rows.jsonl"
            path = folder / f"data-{_write(data, rows)}.jsonl"
            rows.replace(path)
            return path
        return _splits(data, Path(partial), folder)


def _splits(data: Mapping[str, Any], partial: Path, folder: Path) -> Path:
    """Writes a directory with one file per split."""
    if "train" not in data or not set(data) <= set(SPLITS):
        expected, found = ", ".join(SPLITS), ", ".join(map(str, data))
        raise UsageError(f"`data` by splits needs `train`, and may have others of {expected}; found {found}", keyword="data")
    digests = [f"{split} {_write(rows, partial / f'{split}.jsonl')}" for split, rows in sorted(data.items())]
    directory = folder / f"data-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:HASH_DIGITS]}"
    directory.mkdir(exist_ok=True)
    for split in data:
        (partial / f"{split}.jsonl").replace(directory / f"{split}.jsonl")
    return directory


def _write(rows: Any, path: Path) -> str:
    """Writes rows, one per line, and returns the hash of the content."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise UsageError(f"`data` must be a path, texts or rows; found {type(rows).__name__}", keyword="data")
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for index, row in enumerate(rows):
            line = _line(index, row)
            digest.update(line)
            file.write(line)
    return digest.hexdigest()[:HASH_DIGITS]


def _line(index: int, row: Any) -> bytes:
    if isinstance(row, str):
        row = {"text": row}
    elif (ids := _tokens(row)) is not None:
        row = {"input_ids": ids}
    if not isinstance(row, Mapping):
        raise UsageError(
            f"row {index} of `data` is a {type(row).__name__}: expected a text, a list of token ids, or a mapping with `text` (and `label`), with "
            "`prompt` and `completion`, with `messages`, or with `input_ids`",
            keyword="data",
        )
    try:
        return json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"row {index} of `data` cannot be written as JSON: {error}", keyword="data") from error


def _tokens(row: Any) -> list[int] | None:
    """Returns a list of token ids, such as a NumPy array, as integers; None for anything else."""
    row = _plain(row)
    if isinstance(row, (list, tuple)) and row and all(isinstance(id, numbers.Integral) and not isinstance(id, bool) for id in row):
        return [int(id) for id in row]
    return None


def _plain(value: Any) -> Any:
    """Returns a NumPy array or a tensor as a list."""
    return value.tolist() if hasattr(value, "tolist") else value

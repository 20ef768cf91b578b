"""Data that is objects of Python, as the files of examples that the command line reads."""

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

#: The splits of a mapping, which are also the names of their files.
SPLITS = ("train", "validation", "test")
#: The digits of a hash by which files are named.
NAMED_BY = 16


def as_path(data: Any, folder: Path) -> Any:
    """A path as it is; of texts and rows, the path of a file of them in ``folder``.

    Equal data has an equal path, which stays, so that a run that was interrupted finds it again.
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
    """A directory with a file for each split."""
    if "train" not in data or not set(data) <= set(SPLITS):
        expected, found = ", ".join(SPLITS), ", ".join(map(str, data))
        raise UsageError(f"`data` by splits has `train` and perhaps others of {expected}; found {found}", keyword="data")
    digests = [f"{split} {_write(rows, partial / f'{split}.jsonl')}" for split, rows in sorted(data.items())]
    directory = folder / f"data-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:NAMED_BY]}"
    directory.mkdir(exist_ok=True)
    for split in data:
        (partial / f"{split}.jsonl").replace(directory / f"{split}.jsonl")
    return directory


def _write(rows: Any, path: Path) -> str:
    """Writes rows, a line each, and returns a name that says what is in them."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise UsageError(f"`data` is a path, texts or rows; found {type(rows).__name__}", keyword="data")
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for index, row in enumerate(rows):
            line = _line(index, row)
            digest.update(line)
            file.write(line)
    return digest.hexdigest()[:NAMED_BY]


def _line(index: int, row: Any) -> bytes:
    if isinstance(row, str):
        row = {"text": row}
    elif (ids := _tokens(row)) is not None:
        row = {"input_ids": ids}
    if not isinstance(row, Mapping):
        raise UsageError(
            f"row {index} of `data` is a {type(row).__name__}: expected a text, a list of token ids, or a mapping with `text`, with "
            "`prompt` and `completion`, with `messages`, or with `input_ids`",
            keyword="data",
        )
    try:
        return json.dumps({name: _plain(value) for name, value in row.items()}, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"row {index} of `data` cannot be written as JSON: {error}", keyword="data") from error


def _tokens(row: Any) -> list[int] | None:
    """A list of token ids, such as an array of NumPy's, as numbers; nothing of anything else."""
    row = _plain(row)
    if isinstance(row, (list, tuple)) and row and all(isinstance(id, numbers.Integral) and not isinstance(id, bool) for id in row):
        return [int(id) for id in row]
    return None


def _plain(value: Any) -> Any:
    """An array of NumPy's, or a tensor, as a list."""
    return value.tolist() if hasattr(value, "tolist") else value

"""Data given as Python objects."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra
from conftest import GRID

ROWS = [{"prompt": "why " * (i % 5 + 1), "completion": "so " * (i % 3 + 1)} for i in range(40)]
SMALL = GRID | {"lr": 1e-3, "context": None}


def hashes(run: hydra.Run) -> list[str | None]:
    return [task.weights_sha256 for task in run.wait().tasks.values()]


def test_rows_are_trained_on_as_from_a_file_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    from_file = hashes(hydra.select(**SMALL, data=file))
    run = hydra.select(**SMALL, data=(row for row in ROWS), out="here/run")
    assert hashes(run) == from_file
    written = list(Path("here").glob("data-*"))
    assert len(written) == 1 and written[0].suffix == ".jsonl"
    hydra.select(**SMALL, data=ROWS, out="here/again").wait()
    assert list(Path("here").glob("data-*")) == written
    evaluated = hydra.evaluate(data=ROWS, model=run.best.model_dir, batch=4, device_memory="64MiB")
    assert run.best.test is not None and evaluated["loss"] == run.best.test["loss"]


def test_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    splits: dict[str, list[Any]] = {"train": ROWS[:24], "validation": ROWS[:24], "test": ["all of it", "is learned"]}
    directory = tmp_path / "chat"
    directory.mkdir()
    for split, rows in splits.items():
        lines = [json.dumps({"text": row} if isinstance(row, str) else row) + "\n" for row in rows]
        (directory / f"{split}.jsonl").write_text("".join(lines))
    assert hashes(hydra.select(**SMALL, data=splits)) == hashes(hydra.select(**SMALL, data=directory))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[1, 2.5]], "row 0 of `data` is a list"),
        ([[]], "row 0 of `data` is a list"),
        (["a", 7], "row 1 of `data` is a int"),
        ([{"text": {1, 2}}], "row 0 of `data` cannot be written"),
        (7, "found int"),
        ({"test": ["a"]}, "found test"),
        ({"train": ["a"], "test": "a"}, "found str"),
    ],
)
def test_invalid_data_is_named(data: Any, message: str) -> None:
    with pytest.raises(hydra.UsageError, match=message) as caught:
        hydra.select(data=data)
    assert caught.value.keyword == "data"
    assert not any(os.scandir("runs"))


def test_lists_of_token_ids_are_taken_as_they_are() -> None:
    texts = [f"{'why ' * (i % 5 + 1)}so" for i in range(40)]
    # The default model's tokens are bytes, and a text ends with the byte 0.
    ids = [[*text.encode(), 0] for text in texts]
    expected = hashes(hydra.select(**SMALL, data=texts))
    assert hashes(hydra.select(**SMALL, data=ids)) == expected
    assert hashes(hydra.select(**SMALL, data=[{"input_ids": row, "labels": row} for row in ids])) == expected
    masked = [{"input_ids": row, "labels": [-100] * 4 + row[4:]} for row in ids]
    assert hashes(hydra.select(**SMALL, data=masked)) != expected


def test_arrays_of_token_ids_are_taken_as_they_are() -> None:
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed here")
    table = numpy.arange(40 * 16).reshape(40, 16) % 251
    expected = hashes(hydra.select(**SMALL, data=table.tolist()))
    assert hashes(hydra.select(**SMALL, data=table)) == expected
    assert hashes(hydra.select(**SMALL, data=[{"input_ids": row} for row in table])) == expected
    with pytest.raises(hydra.HydraError) as caught:
        hydra.select(**SMALL, data=[[70_000, 1]] * 20).wait()
    assert "70000" in str(caught.value)


def test_rows_of_datasets_are_rows() -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed here")
    rows = datasets.Dataset.from_list(ROWS)
    assert hashes(hydra.select(**SMALL, data=rows)) == hashes(hydra.select(**SMALL, data=ROWS))


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed here")
    rates = numpy.array(GRID["lr"])
    run = hydra.select(**(GRID | {"lr": rates, "steps": numpy.int64(2)}))
    assert hashes(run) == hashes(hydra.select(**GRID))

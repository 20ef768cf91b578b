"""Errors are exceptions with fields, and name the invalid setting."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import hydra_train as hydra
from conftest import GRID
from hydra_train import _keywords


@pytest.mark.parametrize(
    ("function", "keyword", "nearest"),
    [
        (hydra.select, "learning_rate", "lr"),
        (hydra.train, "num_train_epochs", "epochs"),
        (hydra.train, "max_seq_length", "context"),
        (hydra.select, "lrr", "lr"),
        (hydra.train, "device_memroy", "device_memory"),
        (hydra.evaluate, "splitt", "split"),
        (hydra.explain, "lora_rank", None),
    ],
)
def test_an_unknown_keyword_names_the_nearest(function: Any, keyword: str, nearest: str | None) -> None:
    with pytest.raises(hydra.UnknownKeyword) as caught:
        function(**{keyword: 1})
    error = caught.value
    assert isinstance(error, TypeError) and error.keyword == keyword
    assert nearest in (None, error.nearest)
    assert f"`{error.nearest}`" in str(error) and f"`{keyword}`" in str(error)


def test_renamed_keywords_work_with_a_warning() -> None:
    settings = {"devices_per_model": 2, "room_for_forks": True, "visit": 4}
    with pytest.warns(FutureWarning, match="`devices_per_model` is now `replicas`; the old name goes away in 0.3"):
        flags = _keywords.arguments("select", settings)
    assert flags == ["--replicas=2", "--reserve-for-forks", "--microbatch-group=4"]


def test_keywords_of_other_libraries_are_refused_with_a_hint() -> None:
    foreign = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "bf16": True, "logging_steps": 10}
    messages = {}
    for keyword in foreign:
        others = {name: value for name, value in foreign.items() if name != keyword}
        with pytest.raises(hydra.UnknownKeyword) as caught:
            hydra.train(**{keyword: foreign[keyword]}, **others)  # type: ignore[call-arg]
        messages[keyword] = str(caught.value)
        assert caught.value.keyword == keyword
    assert "the nearest known one is `batch`: write batch=16, accumulate=4 (" in messages["per_device_train_batch_size"]
    assert "write batch=16, accumulate=4" in messages["gradient_accumulation_steps"]
    assert 'the nearest known one is `dtype`: write dtype="bf16"' in messages["bf16"]
    assert "`logging_steps`: leave it out: metrics.jsonl" in messages["logging_steps"]


@pytest.mark.parametrize(
    ("settings", "keyword", "message"),
    [
        ({"device_memory": "lots"}, "device_memory", "such as 64MiB"),
        ({"batch": [4, 0]}, "batch", "whole number from 1"),
        ({"lr": -1.0}, "lr", "'-1.0'"),
        ({"optimizer": "adan"}, "optimizer", "adamw"),
        ({"force": "yes"}, "force", "True or False"),
        ({"lr": True}, "lr", "True"),
        ({"lr": []}, "lr", "list"),
        ({"patience": [1, 2]}, "patience", "one text, number or path"),
        ({"optimizer": ["adamw", "adan"]}, "optimizer", "unknown value `adan`"),
        ({"device_memory": 4}, "device_memory", "`4` has no unit"),
        ({"data": {"text": "a"}}, "data", "by splits"),
        ({"json": True}, "json", "nearest"),
    ],
)
def test_a_bad_value_names_its_keyword(settings: dict[str, Any], keyword: str, message: str) -> None:
    with pytest.raises(hydra.HydraError) as caught:
        hydra.select(**settings)
    error = caught.value
    assert isinstance(error, (hydra.UsageError, hydra.UnknownKeyword)) and error.keyword == keyword
    assert message in str(error) and "Usage:" not in str(error)


def test_what_the_run_finds_has_its_causes() -> None:
    run = hydra.select(model="no-such-model")
    with pytest.raises(hydra.HydraError, match="could not be loaded") as caught:
        list(run)
    assert any("bytes-tiny" in cause for cause in caught.value.causes)
    assert run.state == "failed"
    with pytest.raises(hydra.HydraError):
        run.wait()
    with pytest.raises(hydra.UsageError, match="positions"):
        hydra.select(**(GRID | {"context": 4096})).wait()


def test_memory_that_does_not_suffice_is_in_bytes() -> None:
    with pytest.raises(hydra.MemoryRefused) as caught:
        hydra.select(**(GRID | {"device_memory": "1KiB", "cuts": None, "strict": True})).wait()
    error = caught.value
    assert error.available_bytes == 1024 < error.needed_bytes
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert again.needed_bytes == error.needed_bytes


def test_tasks_that_fail_are_named_and_the_others_are_there() -> None:
    run = hydra.select(**(GRID | {"lr": [1e30, 1e-3], "steps": 8}))
    with pytest.raises(hydra.TasksFailed) as caught:
        run.wait()
    assert list(caught.value.failures) == ["lr1e30"]
    assert "step" in caught.value.failures["lr1e30"]
    assert run.state == "failed" and run.best.name == "lr1e-3"
    assert run.tasks["lr1e30"].state == "failed" and run.tasks["lr1e30"].rank is None

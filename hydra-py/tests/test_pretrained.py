"""Written models, loaded with Transformers and PEFT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import hydra_train as hydra

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

SHORT: dict[str, Any] = {"batch": 4, "context": 32, "steps": 3, "lr": 3e-3, "devices": "cpu:1x1", "device_memory": "64MiB"}


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Returns the five most likely tokens after a prompt."""
    made = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.parametrize("model", ["bytes-tiny", "bytes-llama-tiny"])
def test_a_task_loads_its_model(model: str, tmp_path: Path) -> None:
    task = hydra.train(model=model, **SHORT, out=tmp_path / "base").wait().best
    loaded = task.load()
    assert type(loaded).__name__.endswith("ForCausalLM") or type(loaded).__name__ == "GPT2LMHeadModel"
    assert greedy(loaded, [72, 105]) == task.generate([[72, 105]], max_new_tokens=5)[0]["token_ids"]
    assert task.load(torch_dtype=torch.float64).dtype == torch.float64
    adapted = hydra.train(model=task.model_dir, lora=4, **SHORT, out=tmp_path / "adapters").wait().best
    loaded = adapted.load()
    assert type(loaded).__name__.startswith("PeftModel")
    assert greedy(loaded, [72, 105]) == adapted.generate([[72, 105]], max_new_tokens=5)[0]["token_ids"]


def test_a_classifier_and_its_adapters_are_loaded(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in [("good", "yes"), ("bad", "no"), ("so so", "maybe")] * 8]
    base = hydra.train(model="bytes-tiny", **SHORT, out=tmp_path / "base").wait().best
    for name, settings in {"full": {}, "adapters": {"lora": 4}}.items():
        data = {"train": rows, "validation": rows[:6], "test": rows[:6]}
        task = hydra.train(model=base.model_dir, task="classify", data=data, **settings, **SHORT, out=tmp_path / name).wait().best
        loaded = task.load(pad_token_id=0)
        assert loaded(input_ids=torch.tensor([[103, 111]])).logits.shape == (1, 3)


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = hydra.train(model="bytes-tiny", lora=4, **SHORT, out=tmp_path / "drawn").wait().best
    with pytest.raises(hydra.HydraError, match="which is no directory"):
        drawn.load()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(hydra.HydraError, match="needs the package `transformers`"):
        drawn.load()

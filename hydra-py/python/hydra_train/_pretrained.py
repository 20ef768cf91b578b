"""Loads written models with Transformers and PEFT, where these are installed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from hydra_train._errors import HydraError


def load(directory: Path, options: dict[str, Any]) -> Any:
    """Returns the model in a directory, or the adapters in it on their base; ``options`` are those of ``from_pretrained``."""
    transformers = _module("transformers", directory)
    if not (directory / "adapter_config.json").is_file():
        return _class(transformers, directory).from_pretrained(directory, **options)
    peft = _module("peft", directory)
    adapter = json.loads((directory / "adapter_config.json").read_text())
    base = adapter.get("base_model_name_or_path")
    if not base or not Path(base).is_dir():
        raise HydraError(f"the adapters in `{directory}` are on the base {base!r}, which is no directory: load it, and pass it to `PeftModel.from_pretrained`")
    if adapter.get("task_type") == "SEQ_CLS":
        options = {"num_labels": _labels(directory), **options}
        model = transformers.AutoModelForSequenceClassification.from_pretrained(base, **options)
    else:
        model = _class(transformers, Path(base)).from_pretrained(base, **options)
    return peft.PeftModel.from_pretrained(model, directory)


def _module(name: str, directory: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HydraError(f"`load` needs the package `{name}`: install it; the model's files are in `{directory}`") from error


def _class(transformers: Any, directory: Path) -> Any:
    """Returns the class of a directory's model."""
    file = directory / "config.json"
    names = json.loads(file.read_text()).get("architectures") if file.is_file() else None
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise HydraError(f"`{directory}` has no model of Transformers: for modules of PyTorch pass the chain to `resume`, and load the task again")
    return found


def _labels(directory: Path) -> int:
    """Returns the number of labels of a classifier whose head is saved with its adapters."""
    safetensors = _module("safetensors", directory)
    with safetensors.safe_open(directory / "adapter_model.safetensors", "np") as file:
        # With the dots, because DistilBERT's adapters have a `pre_classifier` too.
        heads = [key for key in file.keys() if key.endswith((".score.weight", ".classifier.weight", ".classifier.out_proj.weight"))]
        return int(file.get_slice(heads[-1]).get_shape()[0])

"""Hydra trains many deep learning models, each larger than a device's memory, on few devices, with exact results.

    import hydra_train as hydra

    run = hydra.select(data="chat.jsonl", lr=[1e-4, 3e-4], devices="cpu:2", device_memory="1GiB")
    for event in run:
        print(event)
    print(run.best.model_dir)

Keyword arguments are the flags of the command line ``hydra``, with ``_`` for ``-``; ``help(hydra.select)`` lists them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_train import _data, _generation, _keywords, _native
from hydra_train._errors import HydraError, MemoryRefused, Stopped, TasksFailed, UnknownKeyword, UsageError
from hydra_train._run import Run, Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hydra_train._run import Metric
    from hydra_train._settings import Data, Evaluate, Explain, Generate, ModuleChain, Resume, Select, Train

__all__ = [
    "HydraError",
    "MemoryRefused",
    "Run",
    "Stopped",
    "Task",
    "TasksFailed",
    "UnknownKeyword",
    "UsageError",
    "evaluate",
    "explain",
    "generate",
    "report",
    "resume",
    "select",
    "train",
    "version",
]

version: str = _native.version

#: The metrics of language models that a function cannot be called by.
METRICS = ("loss", "perplexity", "exact_match", "rouge_l")


def select(**settings: Unpack[Select]) -> Run:
    """Starts training a grid of configurations, and returns the run, which continues in the background.

    ``metric`` may be a function of a prompt, the text that a task generates for it and the reference, called with each row of
    the validation data; its mean is the metric. Larger values are better, unless its attribute ``higher_is_better`` is false.
    """
    return _run("select", settings)


def train(**settings: Unpack[Train]) -> Run:
    """Starts training one configuration, and returns the run, which continues in the background."""
    return _run("train", settings)


def resume(
    directory: str | os.PathLike[str],
    *,
    model: ModuleChain | None = None,
    data: Data | None = None,
    metric: Callable[[str, str, str], float] | None = None,
    **settings: Unpack[Resume],
) -> Run:
    """Resumes an interrupted run from its last checkpoints. Its results are those of an uninterrupted run.

    A run of a ``hydra_train.torch.Chain`` needs ``model`` and ``data`` again, with the same initial weights, and a run whose
    ``metric`` is a function needs the function again.
    """
    again = {"model": model, "data": data, "metric": metric}
    given = {name: value for name, value in again.items() if value is not None}
    return _run("resume", {**settings, **given}, os.fspath(directory))


def evaluate(**settings: Unpack[Evaluate]) -> dict[str, Any]:
    """Evaluates a model on a split of its data: its ``loss``, ``perplexity``, ``predicted_tokens`` and a classifier's ``metrics``."""
    return _result("eval", settings)


def explain(**settings: Unpack[Explain]) -> dict[str, Any]:
    """Predicts the memory, the link traffic and the time of a run without training."""
    return _result("explain", settings)


def generate(prompts: Any = None, /, **settings: Unpack[Generate]) -> list[dict[str, Any]]:
    """Continues prompts with a language model: a text, a list of texts, of token ids or of conversations (lists of messages), or a ``Path``.

    Returns a dictionary for each adapter, prompt and sample, in this order: ``prompt``, ``adapter``, ``text``,
    ``token_ids`` of the new tokens, their ``logprob``, and ``finish_reason``, ``stop`` or ``length``.
    """
    return _generation.generate(prompts, settings)


def report(directory: str | os.PathLike[str], *others: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the report of a run directory, the best task first. The run may be running, ended or killed.

    Several directories, such as the parts of a grid, are merged into one report.
    """
    return dict(json.loads(_native.report([os.fspath(each) for each in (directory, *others)])))


def _run(command: str, settings: Mapping[str, Any], *positional: str) -> Run:
    # Progress bars and lines are for terminals; a program reads events instead.
    settings = {"progress": "none", **settings}
    own, settings = _own(command, settings)
    metric, settings = _metric(command, settings)
    out = settings.get("out")
    # Data files are written next to the run directory.
    folder = Path("runs") if out is None else Path(out).parent
    return Run([*_arguments(command, settings, folder), "--", *positional], own, metric)


def _result(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    own, settings = _own(command, settings)
    metric, settings = _metric(command, settings)
    with tempfile.TemporaryDirectory() as folder:
        return Run(_arguments(command, settings, Path(folder)), own, metric).wait().report


def _own(command: str, settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Returns a chain of PyTorch modules with its data, if ``model`` is one, and the settings with their names."""
    module = sys.modules.get("hydra_train.torch")
    chain = settings.get("model")
    if module is None or not isinstance(chain, module.Chain):
        _refuse_modules(chain)
        return None, settings
    if settings.get("data") is None:
        raise UsageError("a chain of PyTorch modules needs `data`, a map-style dataset", keyword="data")
    if settings.get("save_dtype") not in (None, "f32"):
        raise UsageError("the weights of a chain of PyTorch modules are written in f32: omit `save_dtype`", keyword="save_dtype")
    own = chain.bind(settings["data"])
    # A run has the names in its directory.
    names = {} if command == "resume" else {"model": own.model, "data": own.data}
    return own, {name: value for name, value in settings.items() if name not in ("model", "data")} | names


def _refuse_modules(model: Any) -> None:
    """Refuses modules of PyTorch that no chain was made of, and several chains."""
    kinds = [getattr(sys.modules.get(package), name, None) for package, name in (("torch.nn", "Module"), ("hydra_train.torch", "Chain"))]
    several = isinstance(model, (list, tuple))
    for each in model if several else [model]:
        if isinstance(each, tuple(kind for kind in kinds if isinstance(kind, type))):
            found = f"`model` has a {type(each).__name__} in a list" if several else f"`model` is a {type(each).__name__}"
            raise UsageError(
                f"{found}, expected one chain: `hydra_train.torch.Chain([first, second, ..], inputs=.., loss=..)` makes it of modules "
                "that pass their outputs on, and `hydra_train.torch.chain(model)` of a model of Transformers",
                keyword="model",
            )


def _metric(command: str, settings: Mapping[str, Any]) -> tuple[Metric | None, Mapping[str, Any]]:
    """Returns the name, the direction and the function of a ``metric`` that is a function, and the settings with its name."""
    function = settings.get("metric")
    if not callable(function):
        return None, settings
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier() or name in METRICS:
        raise UsageError(f"the function of `metric` is called {name!r}: give it a name that no other metric has", keyword="metric")
    # A run has the name in its directory.
    named = {} if command == "resume" else {"metric": name}
    others = {keyword: value for keyword, value in settings.items() if keyword != "metric"}
    return (name, bool(getattr(function, "higher_is_better", True)), function), others | named


def _arguments(command: str, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns the command line. Data given as Python objects is written into ``folder``."""
    if "data" in settings:
        settings = {**settings, "data": _data.as_path(settings["data"], folder)}
    if (prompts := settings.get("sample_prompts")) is not None and not isinstance(prompts, (str, os.PathLike)):
        settings = {**settings, "sample_prompts": _data.as_path(_generation.rows(prompts), folder)}
    return [command, "--json", *_keywords.arguments(command, settings)]


def _document() -> None:
    functions = {
        "select": select,
        "train": train,
        "resume": resume,
        "eval": evaluate,
        "explain": explain,
        "generate": generate,
    }
    for command, function in functions.items():
        function.__doc__ = f"{function.__doc__}\n\n{_keywords.documentation(command)}"


_document()

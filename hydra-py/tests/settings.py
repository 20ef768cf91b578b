"""Writes ``_settings.py`` from the flags of the command line: ``python hydra-py/tests/settings.py``."""

from __future__ import annotations

from pathlib import Path

from hydra_train import _native

FILE = Path(__file__).parents[1] / "python/hydra_train/_settings.py"
CLASSES = {"select": "Select", "train": "Train", "resume": "Resume", "eval": "Evaluate", "explain": "Explain", "generate": "Generate"}

HEAD = '''"""The keywords of each function and their types, for type checkers. A test compares them with the command line."""

# Written by tests/settings.py.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict, Union

Path = Union[str, "os.PathLike[str]"]
Row = Union[str, Sequence[int], Mapping[str, Any]]
Dataset = Union[Iterable[Row], "MapStyle"]
Data = Union[Path, Dataset, Mapping[str, Dataset]]
Model = Union[Path, Sequence[Path], "ModuleChain"]
Metric = Union[str, Callable[[str, str, str], float]]
Prompts = Union[Path, Sequence[Row]]


class MapStyle(Protocol):
    """A map-style dataset of PyTorch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class ModuleChain(Protocol):
    """A ``hydra_train.torch.Chain``, whose types need PyTorch."""

    @property
    def modules(self) -> Mapping[str, Any]: ...
'''


def type_of(command: str, name: str, value: str | None) -> str:
    """Returns the type of a command's keyword whose value has this form."""
    if name == "data":
        return "Data"
    if name == "metric":
        return "Metric"
    if name == "sample_prompts":
        return "Prompts"
    if name == "model" and command != "generate":
        return "Model"
    if value is None:
        return "bool"
    if value.endswith(" .."):
        return "str | Sequence[str] | Mapping[str, Any]"
    one = value.removesuffix(",..")
    numbers = {"N": "int", "K": "int", "RANK": "int", "RATE": "float", "X": "float", "P": "float", "N|X": "float"}
    path = "DIR" in one or "FILE" in one
    mixed = one == "SIZE" or "|N|" in one
    kind = numbers.get(one) or ("Path" if path else "int | str" if mixed else "str")
    return kind if one == value else f"{kind} | Sequence[{kind}]"


def written() -> str:
    """Returns the generated content of the file."""
    parts = [HEAD]
    for command, name in CLASSES.items():
        fields = [
            f"    {keyword}: {type_of(command, keyword, value)} | None\n"
            for keyword, value, _ in _native.keywords(command)
        ]
        parts.append(f"\n\nclass {name}(TypedDict, total=False):\n" + "".join(fields))
    return "".join(parts)


if __name__ == "__main__":
    FILE.write_text(written())

"""What decides the results of modules and functions besides weights: their code, and the values that it reads, as JSON has them."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from numbers import Number
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from hydra_train.torch._layer import OF_MODULES, SIMPLE
from hydra_train.torch._memory import bytes_of, name_of

#: The attributes and the keys of configurations that compute nothing.
LABELS = OF_MODULES | {"name_or_path", "_name_or_path", "transformers_version", "_is_hf_initialized", "warnings_issued"}
#: Packages whose code is known by the names of its classes and functions.
LIBRARIES = sys.stdlib_module_names | {"datasets", "hydra_train", "numpy", "peft", "torch", "torchvision", "transformers"}


def settings_of(module: torch.nn.Module) -> list[Any]:
    """Returns the numbers and texts of a module, and its configuration if it has one."""
    config: Any = getattr(module, "config", None)
    keys: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    # It is no part of the configuration, and decides the kernels.
    keys["_attn_implementation"] = getattr(config, "_attn_implementation", None)
    # Private lists are often made of sets, whose order differs in each process.
    own = {at: value for at, value in vars(module).items() if isinstance(value, (*SIMPLE, torch.dtype)) or not at.startswith("_")}
    return [simple({at: value for at, value in each.items() if at not in LABELS and is_simple(value)}) for each in (own, keys)]


def is_simple(value: Any) -> bool:
    """Returns whether a value is a number, a text, a type, or consists of these."""
    if isinstance(value, (tuple, list)):
        return all(is_simple(each) for each in value)
    if isinstance(value, dict):
        return all(is_simple(pair) for pair in value.items())
    return value is None or isinstance(value, (*SIMPLE, torch.dtype))


def simple(value: Any) -> Any:
    """Returns a value as JSON has it, with the keys of dictionaries in an order of their own."""
    if isinstance(value, (tuple, list)):
        return [simple(each) for each in value]
    if isinstance(value, dict):
        return sorted([repr(key), simple(each)] for key, each in value.items())
    return repr(value)


def of_value(value: Any) -> Any:
    """Returns the code of a function, of an object that is called, or of a class, and what it reads: its attributes, the values of its
    closure and its defaults, the program's own functions and classes that it names, and their numbers and tensors."""
    return _Reader().read(value)


def of_values(values: Mapping[str, Any]) -> Any:
    """Returns the same for several values. What several of them read is there once."""
    return _Reader().named(values)


class _Reader:
    """Reads values, each object once: functions may name each other."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def read(self, value: Any) -> Any:
        if is_simple(value):
            return simple(value)
        if isinstance(value, torch.Tensor):
            return [str(value.dtype), list(value.shape), hashlib.sha256(bytes_of(value)).hexdigest()]
        if id(value) in self.seen:
            return name_of(value)
        # The value stays alive, so that no other one gets its id.
        self.seen[id(value)] = value
        if isinstance(value, functools.partial):
            return [self.read(value.func), self.each(value.args), self.named(value.keywords)]
        if isinstance(value, MethodType):
            return [self.read(value.__func__), self.read(value.__self__)]
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, torch.nn.Module):
            return [self.read(type(value)), settings_of(value), self.named(value.state_dict())]
        if isinstance(value, type):
            functions = {at: each for at, each in vars(value).items() if isinstance(each, FunctionType)}
            return [name_of(value), *([self.each(value.__bases__), self.named(functions)] if is_own(value) else [])]
        return [self.read(type(value)), *([self.named(vars(value))] if is_own(type(value)) else [])]

    def each(self, values: Iterable[Any]) -> list[Any]:
        return [self.read(value) for value in values if is_read(value)]

    def named(self, values: Mapping[str, Any]) -> list[Any]:
        return [[at, self.read(value)] for at, value in sorted(values.items()) if at not in LABELS and is_read(value)]

    def function(self, function: FunctionType) -> Any:
        if not is_own(function):
            return name_of(function)
        cells = [each.cell_contents for each in function.__closure__ or () if is_filled(each)]
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        # Texts are often names and paths, and what else the program keeps there may count its calls.
        read = {at: function.__globals__[at] for at in sorted(names_in(function.__code__)) if at in function.__globals__}
        read = {at: value for at, value in read.items() if not is_simple(value) or isinstance(value, Number)}
        return [_code(function.__code__), self.each(values), self.named(read)]


def is_own(thing: Any) -> bool:
    """Returns whether a function or a class is the program's own."""
    return str(thing.__module__).partition(".")[0] not in LIBRARIES


def is_read(value: Any) -> bool:
    """Returns whether a value is read: a simple one, a tensor, a function, a class, or an object of the program that is called."""
    kinds = (torch.Tensor, FunctionType, MethodType, functools.partial, type)
    return is_simple(value) or isinstance(value, kinds) or (callable(value) and not isinstance(value, torch.nn.Module) and is_own(type(value)))


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def names_in(code: CodeType) -> set[str]:
    """Returns the names that code uses, with that of the functions in it."""
    return {*code.co_names}.union(*(names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _code(code: CodeType) -> list[Any]:
    # The order of a set differs in each process.
    constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts]
    return [code.co_code.hex(), [_code(each) if isinstance(each, CodeType) else repr(each) for each in constants], list(code.co_names)]

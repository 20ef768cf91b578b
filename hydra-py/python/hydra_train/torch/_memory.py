"""Tensors in Rust's memory, which PyTorch sees without a copy."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hydra_train import _native

#: The element types of the tensors that travel between modules, and of those of a batch.
TYPES = {torch.float32: "float32", torch.int64: "int64", torch.int32: "int32", torch.bool: "bool"}
#: Tensors that begin at other addresses are copied: the bits of some kernels depend on the alignment.
ALIGN = 64
#: The attribute of a tensor of PyTorch that is all of a memory of Rust.
_MEMORY = "_hydra_memory"


def type_names() -> str:
    return ", ".join(TYPES.values())


def tensor_of(memory: _native.Memory) -> torch.Tensor:
    """Returns a view of Rust's memory, or a copy where it is not aligned as PyTorch's own."""
    tensor = torch.from_numpy(numpy.asarray(memory))
    return tensor if tensor.data_ptr() % ALIGN == 0 else tensor.clone()


def memory_of(tensor: torch.Tensor) -> _native.Memory:
    """Copies a tensor into Rust's memory."""
    memory = _native.Memory(list(tensor.shape), TYPES[tensor.dtype])
    torch.from_numpy(numpy.asarray(memory)).copy_(tensor)
    return memory


def optional_memory(tensor: torch.Tensor | None) -> _native.Memory | None:
    """Copies a tensor, if there is one and it is not in Rust's memory.

    A count becomes a float: Rust has the masters of parameters and states as such.
    """
    if tensor is None:
        return None
    known: _native.Memory | None = getattr(tensor, _MEMORY, None)
    return memory_of(tensor.float()) if known is None else known


def gradient_in_place(parameter: torch.Tensor) -> torch.Tensor:
    """Returns zeros for the gradient of a large parameter, in Rust's memory, where ``optional_memory`` leaves them without a copy."""
    memory = _native.Memory(list(parameter.shape), TYPES[parameter.dtype])
    # A guard would count the memory of PyTorch's.
    with _disable_current_modes():
        gradient = torch.from_numpy(numpy.asarray(memory))
    setattr(gradient, _MEMORY, memory)
    return gradient


def is_in_place(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a gradient in Rust's memory."""
    return hasattr(tensor, _MEMORY)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def name_of(thing: Any) -> str:
    """Returns the name of a class or a function, or of the class of another callable."""
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    # A class that is copied to another process by its code loses its `__qualname__`, and must have the same name there.
    name = thing.__name__ if isinstance(thing, type) else thing.__qualname__
    return f"{thing.__module__}.{name}"

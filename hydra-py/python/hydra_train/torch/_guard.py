"""The operations of a layer's call: their random numbers, their writes and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydra_train.torch._memory import gradient_in_place, is_in_place


class Guard(TorchDispatchMode):
    """Sees every operation of a call on its thread.

    It gives each random operation the generator of the pass, refuses one that takes none, refuses to write into tensors that
    belong to others, and counts PyTorch's memory if ``measured``.
    """

    def __init__(self, layer: str, seed: int | None, fixed: Mapping[int, str], measured: bool) -> None:
        super().__init__()
        self.layer, self.fixed, self.measured = layer, fixed, measured
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        #: The buffers of the call's own that it writes before it reads them, by address.
        self.unwritten: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.generator is None and any(isinstance(each, torch.Tensor) and each.device.type == "meta" for each in args):
            raise RuntimeError(
                f"`{self.layer}` runs its forward again in the backward pass, as activation checkpointing does, which is not "
                "supported: turn it off, because Hydra recomputes forwards itself"
            )
        if self.unwritten:
            self._check_read(func, args, kwargs)
        is_random, writes = _kind_of(func)
        if is_random:
            func, kwargs = self._drawing(func, args, kwargs)
        if writes:
            self._check_written(func, args, kwargs, writes)
        # A backward has no generator.
        is_of_embedding = func is torch.ops.aten.embedding_dense_backward.default and self.generator is None
        result = _of_embedding(*args, **kwargs) if is_of_embedding else func(*args, **kwargs)
        if self.measured:
            self._count(result)
        return result

    def _drawing(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        taken = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(taken, args)), **kwargs}
        if func is torch.ops.aten._fused_sdp_choice.default or _draws_nothing(func, given):
            return func, kwargs
        if self.generator is None:
            raise RuntimeError(
                f"`{func}` draws random numbers in the backward pass of `{self.layer}`, which is not supported, because they "
                "would differ from those of its forward"
            )
        if given.get("generator") is not None:
            raise RuntimeError(f"`{func}` of `{self.layer}` draws from a generator of its own: omit `generator`")
        if "generator" not in taken:
            named = _WITH_GENERATOR.get(func._overloadname)
            func = getattr(func.overloadpacket, named, None) if named is not None else None
            if func is None:
                raise RuntimeError(
                    f"`{self.layer}` draws random numbers with an operation that takes no generator, so that they would not come "
                    "from the pass"
                )
        return func, {**kwargs, "generator": self.generator}

    def _check_written(self, func: Any, args: Any, kwargs: Any, writes: tuple[str, ...]) -> None:
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args)), **kwargs}
        for tensor in tree_leaves([given.get(name) for name in writes]):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                name = self.fixed.get(tensor.untyped_storage().data_ptr())
                if name and func is torch.ops.aten.copy_.default and is_whole(tensor):
                    raise OverwritesBuffer(name)
                if name is not None and tensor.numel() > 0:
                    raise changes_buffers(self.layer, name) if name else changes_in_place(self.layer, f"`{func}`")

    def _check_read(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuses to read a buffer before it is written, which would be the value of an earlier call."""
        is_copy = func is torch.ops.aten.copy_.default
        for tensor in tree_leaves((args[1:] if is_copy else args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                name = self.unwritten.get(tensor.untyped_storage().data_ptr())
                if name is not None:
                    raise changes_buffers(self.layer, name)
        if is_copy and is_whole(args[0]):
            self.unwritten.pop(args[0].untyped_storage().data_ptr(), None)

    def _count(self, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                if tensor.layout != torch.strided:
                    raise RuntimeError(
                        f"`{self.layer}` makes a tensor of layout {tensor.layout}, expected dense ones: omit `sparse=True` of embeddings"
                    )
                storage = tensor.untyped_storage()
                # Rust counts its memory itself.
                if storage.data_ptr() not in self.fixed and not is_in_place(tensor):
                    self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.held())

    def held(self) -> int:
        """Returns the bytes of the tensors that were made in the call and still exist."""
        self.live = {key: (weak, size) for key, (weak, size) in self.live.items() if not weak.expired()}
        return sum(size for _, size in self.live.values())


def _of_embedding(gradient: Any, ids: Any, rows: int, padding: int, by_frequency: bool) -> Any:
    """Returns the gradient of an embedding, to the same bits, in memory that is not copied to pass it on."""
    if by_frequency or gradient.dtype != torch.float32:
        return torch.ops.aten.embedding_dense_backward.default(gradient, ids, rows, padding, by_frequency)
    found = gradient_in_place(gradient.new_empty((rows, gradient.shape[-1]), device="meta"))
    found.index_add_(0, ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    if 0 <= padding < rows:
        found[padding].zero_()
    return found


#: The overload that takes a generator, for overloads of random operations that take none.
_WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "out": "generator_out",
    "low_out": "low_generator_out",
    "Tensor": "Tensor_generator",
    "low_dtype": "low_generator_dtype",
}
_KINDS: dict[Any, tuple[bool, tuple[str, ...]]] = {}


def _kind_of(func: Any) -> tuple[bool, tuple[str, ...]]:
    """Returns whether an operation draws random numbers, and the arguments that it writes."""
    known = _KINDS.get(func)
    if known is None:
        arguments = func._schema.arguments
        writes = tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
        known = _KINDS[func] = (torch.Tag.nondeterministic_seeded in func.tags, writes)
    return known


def _draws_nothing(func: Any, given: Mapping[str, Any]) -> bool:
    """Returns whether the dropout of an operation, such as attention, is off."""
    for argument in func._schema.arguments:
        if argument.name in ("dropout_p", "dropout"):
            probability = given.get(argument.name, argument.default_value)
            return probability is None or float(probability) == 0.0
    return given.get("train") is False or given.get("training") is False


class OverwritesBuffer(Exception):
    """A call writes all of a buffer with ``copy_``: it needs a copy of its own."""


def is_whole(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())


def changes_in_place(layer: str, operation: str) -> RuntimeError:
    """Returns the error for a layer that changes a parameter or an input."""
    return RuntimeError(
        f"{operation} of `{layer}` changes a parameter or an input in place: a layer must not, because its forward is recomputed "
        "from them; omit `inplace=True`"
    )


def changes_buffers(layer: str, name: str = "") -> RuntimeError:
    """Returns the error for a layer that changes a buffer."""
    which = f"its buffer `{name}`" if name else "its buffers"
    return RuntimeError(
        f"`{layer}` changes {which}; only the statistics of batch normalizations may change, because a layer must compute the same "
        "whenever it is recomputed"
    )


def addresses(tensors: Iterable[torch.Tensor], names: Iterable[str] = ()) -> dict[int, str]:
    """Returns the addresses of tensors that nothing may write, with the names of buffers."""
    named = list(names)
    return {
        tensor.untyped_storage().data_ptr(): named[at] if named else ""
        for at, tensor in enumerate(tensors)
        if tensor.numel() > 0
    }

"""The operations of modules: modules with the same ones cost the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hydra_train.torch._guard import Guard
from hydra_train.torch._layer import Layer
from hydra_train.torch._memory import name_of


def cost_keys(layers: Sequence[Layer], inputs: Sequence[torch.Tensor]) -> list[str | None]:
    """Runs the layers one after the other, and returns a hash for each: layers with equal hashes cost the same.

    It is the hash of the classes of the layer's modules and of its operations, with the types and shapes of their tensors, for inputs of
    the first layer that are as large as any. It is ``None`` for a layer that fails, for those after it, and for the last one, which the
    loss follows.
    """
    keys: list[str | None] = [None] * len(layers)
    passed = list(inputs)
    for at, layer in enumerate(layers[:-1]):
        try:
            passed, keys[at] = traced(layer, passed)
        except Exception:  # The pilot pass runs the layer again, and reports the error.
            break
    return keys


def traced(layer: Layer, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Returns the outputs of a layer in training, and its hash."""
    digest = hashlib.sha256()
    for at, each in layer.module.named_modules():
        digest.update(f"{at}: {name_of(type(each))}\n".encode())
    tensors = [*layer.module.parameters(), *(layer.module.get_buffer(at) for at in layer.states)]
    outputs: list[torch.Tensor] = []
    for training in (False, True):
        every, arguments = [each.detach() for each in tensors], [each.detach() for each in inputs]
        outputs, _, trace = layer.run(every, arguments, {}, training, [], lambda known: Trace(layer.name, 0, known))
        digest.update("\n".join(trace.operations).encode())
    return [each.detach() for each in outputs], digest.hexdigest()


class Trace(Guard):
    """Records operations, with their tensors by type, shape and order of appearance."""

    def __init__(self, layer: str, seed: int, fixed: Mapping[int, str]) -> None:
        super().__init__(layer, seed, fixed, False)
        self.operations: list[str] = []
        # The tensors are kept, so that no two of them have one identifier.
        self.seen: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        shown = tree_map(self._shown, (args, kwargs or {}, result))
        self.operations.append(f"{func} {torch.is_grad_enabled()} {shown}")
        return result

    def _shown(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type(None))) else type(value).__name__
        at, _ = self.seen.setdefault(id(value), (len(self.seen), value))
        return f"{at}: {value.dtype} {list(value.shape)} {value.stride()} {value.requires_grad}"

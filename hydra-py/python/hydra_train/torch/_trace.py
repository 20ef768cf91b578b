"""The operations of modules on tensors without values: modules with the same ones cost the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hydra_train.torch._layer import Borrowed, Layer, outputs_of
from hydra_train.torch._memory import name_of


def cost_keys(layers: Sequence[Layer], inputs: Sequence[torch.Tensor]) -> list[str | None]:
    """Returns for each layer a hash that is the same for layers that cost the same, given the inputs of the first one.

    It is that of the classes of its modules and of its operations, with the types and shapes of their tensors. It is ``None`` for a
    layer that needs the values of tensors, for those after it, and for the last one, which the loss follows.
    """
    keys: list[str | None] = [None] * len(layers)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        passed = [mode.from_tensor(each) for each in inputs]
        for at, layer in enumerate(layers[:-1]):
            try:
                passed, keys[at] = traced(mode, layer, passed)
            except Exception:  # Whatever a module does with tensors without values: it is measured by itself.
                break
    return keys


def traced(mode: FakeTensorMode, layer: Layer, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Returns the outputs of a layer in training, and its hash."""
    digest = hashlib.sha256()
    for at, each in layer.module.named_modules():
        digest.update(f"{at}: {name_of(type(each))}\n".encode())
    tensors = [*layer.module.named_parameters(), *((at, layer.module.get_buffer(at)) for at in layer.states)]
    # Unlike `detach`, `data` does not count writes into the copies as writes into the tensors.
    given = {at: mode.from_tensor(each.data) for at, each in tensors}
    outputs: list[torch.Tensor] = []
    for training in (False, True):
        trace = Trace()
        with Borrowed(layer) as module:
            module.train(training)
            with trace:
                outputs = outputs_of(layer.name, functional_call(module, given, tuple(inputs)))
        digest.update("\n".join(trace.operations).encode())
    return outputs, digest.hexdigest()


class Trace(TorchDispatchMode):
    """Records operations, with their tensors by type, shape and order of appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        # The tensors are kept, so that no two of them have one identifier.
        self.seen: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append(f"{func} {tree_map(self._shown, (args, kwargs, result))}")
        return result

    def _shown(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        at, _ = self.seen.setdefault(id(value), (len(self.seen), value))
        return f"{at}: {value.dtype} {list(value.shape)} {value.stride()}"

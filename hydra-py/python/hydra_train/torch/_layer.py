"""A module as Rust calls it."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any, TypeVar

import numpy
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from hydra_train import _native
from hydra_train._errors import HydraError
from hydra_train.torch._guard import Guard, OverwritesBuffer, addresses, changes_buffers, changes_in_place
from hydra_train.torch._memory import TYPES, memory_of, optional_memory, tensor_of, type_names

Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]
#: Returns the sum of a figure over the targets of a batch.
Sum = Callable[[Any, Mapping[str, torch.Tensor]], "torch.Tensor | float"]


T = TypeVar("T")
AnyGuard = TypeVar("AnyGuard", bound=Guard)
#: The running statistics of a batch normalization.
STATES = ("running_mean", "running_var", "num_batches_tracked")
#: How an observation of a microbatch changes a state: the factors on the state and on the observation.
Rule = tuple[float, float]


def states_of(module: torch.nn.Module) -> dict[str, Rule]:
    """Returns the names of the running statistics of a module, which training changes without gradients, with their rules."""
    states: dict[str, Rule] = {}
    for at, each in norms_of(module).items():
        momentum = float(each.momentum)
        average = (1 - momentum, momentum)
        for name, rule in zip(STATES, (average, average, (1.0, 1.0))):
            states[f"{at}.{name}" if at else name] = rule
    return states


def norms_of(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the batch normalizations of a module that keep running statistics, by name."""
    named = module.named_modules()
    return {at: each for at, each in named if isinstance(each, torch.nn.modules.batchnorm._BatchNorm) and each.running_mean is not None}


class Layer:
    """A module as Rust calls it: a forward or a backward each, from any thread."""

    def __init__(self, name: str, module: torch.nn.Module, threads: int, ends: End | None, shared: set[int]) -> None:
        self.name, self.module, self.threads, self.ends, self.shared = name, module, threads, ends, shared
        self.states = states_of(module)
        tensors = [*module.named_parameters(), *((at, module.get_buffer(at)) for at in self.states)]
        #: The parameters, and after them the states, with the numbers of writes into them.
        self.versions = {at: each._version for at, each in tensors}
        # Copies without parameters: calls on several threads do not share one, because a call sets its parameters.
        placeholders: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
        for parameter in module.parameters():
            empty = torch.empty_like(parameter, device="meta")
            placeholders[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        self.bare = copy.deepcopy(module, placeholders)
        # A call observes a batch: with this momentum, the statistics become those of the batch.
        for norm in norms_of(self.bare).values():
            norm.momentum = 1.0
        self.trained = [parameter.requires_grad for parameter in module.parameters()]
        self.free: list[torch.nn.Module] = []
        self.copying = threading.Lock()
        self.unused: set[str] = set()
        #: The buffers that calls write before they read them, as those of rotary positions that depend on the length: each call has its own.
        self.overwritten: set[str] = set()
        #: Layers with the same text cost the same, and are measured once; ``None`` if it is not known.
        self.cost_key: str | None = None

    def parameters(self) -> list[tuple[str, list[int], bool, int, Rule | None]]:
        """Returns name, shape, whether training changes it, an identifier, and a state's rule, of each parameter and state."""
        named = [(at, list(each.shape), each.requires_grad, id(each), None) for at, each in self.module.named_parameters()]
        return [*named, *(self._state(at, rule) for at, rule in self.states.items())]

    def _state(self, name: str, rule: Rule) -> tuple[str, list[int], bool, int, Rule]:
        # The statistics of a normalization whose parameters are frozen do not change.
        own = list(self.module.get_submodule(name.rpartition(".")[0]).parameters())
        state = self.module.get_buffer(name)
        return name, list(state.shape), not own or any(each.requires_grad for each in own), id(state), rule

    def warn_of_unused(self, name: str) -> None:
        """Warns once that the loss of a batch does not depend on a trained parameter."""
        if name not in self.unused and id(self.module.get_parameter(name)) not in self.shared:
            self.unused.add(name)
            warnings.warn(
                f"the loss of a batch does not depend on `{self.name}.{name}`: its gradient is zero, and weight decay changes it all "
                "the same; if no batch uses it, `requires_grad_(False)` freezes it"
            )

    def values(self, name: str) -> _native.Memory:
        """Returns a copy of the initial values of a parameter or state."""
        parameter = self.module.get_buffer(name) if name in self.states else self.module.get_parameter(name)
        if parameter._version != self.versions[name]:
            raise HydraError(f"`{self.name}.{name}` was changed while a run trains the chain: train a copy of the module")
        return memory_of(parameter.detach().float())

    def forward(
        self,
        parameters: list[_native.Memory],
        inputs: list[_native.Memory],
        targets: list[_native.Memory],
        seed: int,
        training: bool,
        fixed: list[bool],
        measured: bool,
    ) -> tuple[list[_native.Memory], Graph | None, int, int]:
        """Returns the outputs, what the backward needs, and the peak and the remaining bytes of PyTorch if ``measured``.

        ``parameters`` are followed by the states. A training pass observes the batch for those that are not ``fixed``.

        A training pass always records the graph, also where no backward follows: kernels without a graph may have other bits.
        """
        self._set_threads()
        every, arguments = [tensor_of(each) for each in parameters], [tensor_of(each) for each in inputs]
        batch = {} if self.ends is None else dict(zip(self.ends.keys, map(tensor_of, targets)))

        def call() -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Guard]:
            return self.run(every, arguments, batch, training, fixed, lambda known: Guard(self.name, seed, known, measured))

        found, observed, guard = without_draws(self.name, call) if measured else call()
        # What a module only passes on is not copied.
        given = {id(argument): memory for argument, memory in zip(arguments, inputs)}
        memory = [given[id(each)] if id(each) in given else memory_of(each.detach()) for each in found]
        if not training:
            return memory, None, guard.peak, 0
        tensors = every[: len(self.trained)]
        if measured:
            self._check_leaves(found, [*tensors, *arguments])
        graph = Graph(self, found, (tensors, arguments), [optional_memory(observed.get(at)) for at in self.states])
        return memory, graph, guard.peak, guard.held()

    def run(
        self,
        every: list[torch.Tensor],
        arguments: list[torch.Tensor],
        batch: Mapping[str, torch.Tensor],
        training: bool,
        fixed: list[bool],
        watch: Callable[[dict[int, str]], AnyGuard],
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], AnyGuard]:
        """Runs the module with parameters and states under the guard that ``watch`` makes for the tensors that nothing may write.

        Returns the outputs, the observations of states, and the guard.
        """
        for tensor, trained in zip(every, self.trained):
            tensor.requires_grad_(training and trained)
        for tensor in arguments:
            tensor.requires_grad_(training and tensor.is_floating_point())
        while True:
            own = sorted(self.overwritten)
            try:
                return self._run_once(every, arguments, batch, training, fixed, watch, own)
            except OverwritesBuffer as error:
                if (name := str(error)) in own:
                    raise changes_buffers(self.name, name) from error
                self.overwritten.add(name)

    def _run_once(
        self,
        every: list[torch.Tensor],
        arguments: list[torch.Tensor],
        batch: Mapping[str, torch.Tensor],
        training: bool,
        fixed: list[bool],
        watch: Callable[[dict[int, str]], AnyGuard],
        overwritten: list[str],
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], AnyGuard]:
        given = dict(zip(self.versions, every))
        with Borrowed(self) as module:
            module.train(training)
            norms = self._observing(module, fixed)
            buffers = dict(module.named_buffers())
            known = addresses([*every, *arguments, *batch.values()]) | addresses(buffers.values(), buffers)
            guard = watch(known)
            with torch.set_grad_enabled(training), guard:
                # A normalization that is not called, or in evaluation by itself, reads and keeps these copies.
                observed = {at: given[at].to(buffers[at].dtype, copy=True) for norm in norms for at in norm.values()}
                for norm in norms:
                    observed[norm["num_batches_tracked"]].zero_()
                own = {at: buffers[at].clone() for at in overwritten}
                guard.unwritten = addresses(own.values(), own)
                try:
                    outputs = functional_call(module, given | observed | own, tuple(arguments))
                except RuntimeError as error:
                    # Autograd refuses it before the guard sees the operation.
                    if "leaf Variable that requires grad" in str(error):
                        raise changes_in_place(self.name, "its first operation") from error
                    raise
                if self.ends is not None:
                    outputs = self.ends.figures(self.name, outputs, batch, training)
            if any(module.get_buffer(at) is not buffer for at, buffer in buffers.items()):
                raise changes_buffers(self.name)
        for norm in norms:
            calls = int(observed[norm["num_batches_tracked"]])
            if calls > 1:
                at = norm["num_batches_tracked"].rpartition(".")[0]
                raise RuntimeError(
                    f"`{self.name}.{at}` is called {calls} times in one forward, and its running statistics can observe one call: use a "
                    "normalization for each call"
                )
            if calls == 0:
                for at in norm.values():
                    del observed[at]
        return outputs_of(self.name, outputs), observed, guard

    def _observing(self, module: torch.nn.Module, fixed: list[bool]) -> list[dict[str, str]]:
        """Returns the names of the states of each normalization that observes the batch, and puts those with fixed states in evaluation."""
        flags = dict(zip(self.states, fixed[len(self.trained) :]))
        observing = []
        for at, norm in norms_of(module).items():
            names = {name: f"{at}.{name}" if at else name for name in STATES}
            if flags.get(names["running_mean"], False):
                norm.eval()
            if norm.training:
                observing.append(names)
        return observing

    def _check_leaves(self, outputs: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        """Refuses a module whose outputs depend on a tensor with a gradient that is neither a parameter nor an input of it.

        The module is copied without its parameters, so that such a tensor would keep its initial values.
        """
        known, seen = {id(each) for each in own}, set[Any]()
        left: list[Any] = [each.grad_fn for each in outputs]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            left.extend(before for before, _ in node.next_functions)
            if node.name() == "torch::autograd::AccumulateGrad" and id(node.variable) not in known:
                raise RuntimeError(
                    f"`{self.name}` computes with a tensor of shape {list(node.variable.shape)} that requires a gradient and is no "
                    "parameter of it: assign the parameter, or the module that has it, to an attribute of the module, not to a list or "
                    "a closure"
                )

    def _set_threads(self) -> None:
        # Each thread has its own number, which begins as the machine's.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


#: Calls of a module that draws from a generator of the program before it is refused.
ATTEMPTS = 4


def without_draws(name: str, call: Callable[[], T]) -> T:
    """Makes a call, and refuses one that draws from the global generators of Python or NumPy."""
    for _ in range(ATTEMPTS):
        before = global_generators()
        found = call()
        drawn = [each for each, state in global_generators().items() if state != before[each]]
        # Another thread may have drawn meanwhile.
        if not drawn:
            return found
        del found
    raise RuntimeError(
        f"`{name}` draws from the global generator of {' and '.join(drawn)} in its forward, which would draw other numbers when it is run "
        "again: draw with PyTorch, as in `torch.rand(()).item()`"
    )


def global_generators() -> dict[str, Any]:
    """Returns the states of the global generators of Python and NumPy."""
    of_numpy = tree_leaves(numpy.random.get_state(legacy=False))
    return {
        "Python's `random`": random.getstate(),
        "`numpy.random`": [each.tobytes() if isinstance(each, numpy.ndarray) else each for each in of_numpy],
    }


class End:
    """What follows the last module of a chain: the loss, and in evaluations the metrics."""

    def __init__(self, keys: list[str], loss: Loss | None, metrics: Mapping[str, Sum]) -> None:
        self.keys, self.loss, self.metrics = keys, loss, metrics

    def figures(self, name: str, outputs: Any, batch: Mapping[str, torch.Tensor], training: bool) -> list[torch.Tensor]:
        """Returns the loss of the outputs of the module `name`, and in an evaluation the sums of the metrics."""
        loss = outputs if self.loss is None else self.loss(outputs, batch)
        what = f"the last module `{name}`" if self.loss is None else "the loss"
        found = [one_number(what, loss, "the mean loss of the batch")]
        if training:
            if not found[0].requires_grad:
                raise RuntimeError(
                    f"{what} does not depend on the parameters: it is computed from detached tensors, or without a gradient as an accuracy "
                    "is; return a loss that PyTorch differentiates"
                )
            return found
        for metric, sum_of in self.metrics.items():
            figure = torch.as_tensor(sum_of(outputs, batch)).to(torch.float32)
            found.append(one_number(f"the metric `{metric}`", figure, "the sum over the targets of the batch"))
        return found


def one_number(what: str, found: Any, meaning: str) -> torch.Tensor:
    if isinstance(found, (tuple, list)) and len(found) == 1:
        found = found[0]
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{what} returned a {type(found).__name__}, expected a tensor with one number")
    if found.numel() != 1 or found.dtype != torch.float32:
        raise TypeError(
            f"{what} returned a tensor of {found.dtype} and shape {list(found.shape)}, expected one number of float32: {meaning}"
        )
    return found.reshape(1)


class Borrowed:
    """A copy of a layer's module for one call."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __enter__(self) -> torch.nn.Module:
        try:
            self.module = self.layer.free.pop()
        except IndexError:
            buffers: dict[int, Any] = {id(buffer): buffer for buffer in self.layer.bare.buffers()}
            with self.layer.copying:
                self.module = copy.deepcopy(self.layer.bare, buffers)
        self.attributes = [
            (at, each, {name: (value, snapshot(each, name, value)) for name, value in each.__dict__.items()})
            for at, each in self.module.named_modules()
        ]
        return self.module

    def __exit__(self, kind: object, *_: object) -> None:
        # A module that failed in the middle of a call may have changed.
        if kind is not None:
            return
        for at, module, before in self.attributes:
            for name, (value, kept) in before.items():
                after = module.__dict__.get(name)
                if name != "training" and is_changed(value, kept, after):
                    shown = repr(kept if isinstance(value, CONTAINERS) else value)
                    raise RuntimeError(
                        f"`{self.layer.name}.{at}`".replace(".`", "`") + f" changes its attribute `{name}` from {shown} to {after!r} in "
                        "a forward, which is not supported, because a forward is run again where it is recomputed: compute it from the "
                        "inputs, in a local variable"
                    )
            # Tensors that were kept would keep their graph, and memory of the device.
            module.__dict__.clear()
            module.__dict__.update({name: value for name, (value, _) in before.items()})
        self.layer.free.append(self.module)


#: Attributes that are compared, and those whose items are.
SIMPLE = (Number, numpy.generic, str)
CONTAINERS = (list, dict, set, deque)
#: The attributes of every module, which PyTorch changes.
OF_MODULES = frozenset(vars(torch.nn.Module()))


def snapshot(module: torch.nn.Module, name: str, value: Any) -> Any:
    """Returns what shows later whether an attribute has changed: a tensor's number of writes, or the items of a container."""
    if isinstance(value, torch.Tensor):
        return value._version
    # Recurrent modules keep lists of their parameters, which a call exchanges.
    is_own = name in OF_MODULES or (isinstance(module, torch.nn.RNNBase) and name.startswith("_flat"))
    return items_of(value) if isinstance(value, CONTAINERS) and not is_own else None


def items_of(value: Any, depth: int = 2) -> Any:
    """Returns a copy of a container with the items of the containers in it, and with the number of writes of each tensor."""
    if isinstance(value, torch.Tensor):
        return [value, value._version]
    if not isinstance(value, CONTAINERS) or depth == 0:
        return value
    if isinstance(value, dict):
        return {key: items_of(each, depth - 1) for key, each in value.items()}
    return set(value) if isinstance(value, set) else [items_of(each, depth - 1) for each in value]


def is_changed(before: Any, kept: Any, after: Any) -> bool:
    """Returns whether a forward has changed an attribute that is a tensor, a number, a text or a container; others do not count."""
    if isinstance(before, torch.Tensor):
        is_equal = isinstance(after, torch.Tensor) and after.shape == before.shape and torch.equal(before, after)
        return before._version != kept or (after is not before and not is_equal)
    if isinstance(before, CONTAINERS):
        return kept is not None and not is_same(kept, items_of(after))
    return isinstance(before, SIMPLE) and after is not before and bool(after != before)


def is_same(before: Any, after: Any) -> bool:
    """Returns whether two values are one object, equal numbers or texts, or containers of such values."""
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and is_same(list(before.values()), list(after.values()))
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(is_same, before, after))
    is_equal = isinstance(before, (set, *SIMPLE)) and isinstance(after, (set, *SIMPLE)) and bool(before == after)
    return before is after or is_equal


class Graph:
    """The graph of a forward, until its backward."""

    def __init__(
        self,
        layer: Layer,
        outputs: list[torch.Tensor],
        tensors: tuple[list[torch.Tensor], list[torch.Tensor]],
        observed: list[_native.Memory | None],
    ) -> None:
        self.layer, self.outputs, self.tensors, self.observed = layer, outputs, tensors, observed

    def backward(
        self, gradients: list[_native.Memory | None], wanted: list[bool], measured: bool
    ) -> tuple[list[_native.Memory | None], list[_native.Memory | None], int]:
        """Returns the gradients of the parameters and the observations of the states, the gradients of the ``wanted`` inputs, and the
        peak bytes of PyTorch if ``measured``.
        """
        self.layer._set_threads()
        pairs = [
            (output, tensor_of(gradient))
            for output, gradient in zip(self.outputs, gradients)
            if gradient is not None and output.requires_grad
        ]
        own, inputs = self.tensors
        leaves = [each for each, is_wanted in zip([*own, *inputs], [*(True for _ in own), *wanted]) if is_wanted and each.requires_grad]
        found: dict[int, torch.Tensor | None] = {}
        fixed = addresses([*own, *inputs, *(gradient for _, gradient in pairs)])
        guard = Guard(self.layer.name, None, fixed, measured)
        if pairs and leaves:
            with guard:
                got = torch.autograd.grad(
                    [output for output, _ in pairs], leaves, [gradient for _, gradient in pairs], allow_unused=True
                )
            found = {id(leaf): gradient for leaf, gradient in zip(leaves, got)}
        if measured:
            for at, each in zip(self.layer.versions, own):
                if each.requires_grad and found.get(id(each)) is None:
                    self.layer.warn_of_unused(at)
        of_parameters, of_inputs = ([optional_memory(found.get(id(each))) for each in tensors] for tensors in self.tensors)
        return [*of_parameters, *self.observed], of_inputs, guard.peak


def outputs_of(name: str, outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors that a module passes on, and checks them."""
    found = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    for at, each in enumerate(found):
        which = f"output {at} of `{name}`" if len(found) > 1 else f"the output of `{name}`"
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{which} is a {type(each).__name__}; modules pass a tensor or a tuple of tensors on")
        if each.dtype not in TYPES or each.dim() == 0:
            raise TypeError(
                f"{which} is a tensor of {each.dtype} and shape {list(each.shape)}; modules pass tensors of {type_names()} with at "
                "least one dimension on"
            )
    if not found:
        raise TypeError(f"`{name}` returned no tensor")
    return found

"""Modules of PyTorch as a chain."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from hydra_train._errors import HydraError, UsageError
from hydra_train.torch._data import Data, fits, form, shown, size_of, splits_of
from hydra_train.torch._identity import of_value, of_values, settings_of
from hydra_train.torch._layer import End, Layer, Loss, Sum, states_of
from hydra_train.torch._memory import bytes_of, name_of
from hydra_train.torch._trace import cost_keys

#: Hexadecimal digits of a hash in names.
DIGITS = 16


class Chain:
    """Modules that pass their outputs on, as a model for ``hydra_train.select`` and the other functions.

    :param modules: the modules in their order; a mapping gives them names. A module gets the tensors of the one before it as
        its arguments, and returns a tensor or a tuple of tensors of ``float32``, ``int64``, ``int32`` or ``bool``.
    :param inputs: the keys of a batch whose tensors the first module gets.
    :param loss: returns the mean loss of the last module's outputs and the batch, a scalar. Without it the last module does.
    :param collate: makes a batch, a mapping from names to tensors, of a list of items; PyTorch's ``default_collate`` by default.
        Items may differ in their sizes.
    :param loss_targets: returns the number of targets of a batch that ``loss`` averages over; the number of items by default.
        Parts of a minibatch are weighted by it.
    :param metrics: figures of evaluations besides the loss, by name. A function returns the sum over the targets of a batch, such as the
        number of right answers; the metric is the sum over all batches, divided by the number of targets. The larger value is
        better, or the smaller one of ``(function, "min")``. ``metric="NAME"`` of a run selects by one.
    :param threads: the threads inside a kernel of PyTorch on one device. Bits may depend on it, so it belongs to the model.
    :param language_model: the loss is the cross-entropy of predicted tokens, so that evaluations report the perplexity.
    :param name: a name for run directories and messages.
    :param whole: a module with the same parameters, which ``task.load()`` returns a copy of.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
        *,
        inputs: str | Sequence[str],
        loss: Loss | None = None,
        collate: Callable[[list[Any]], Mapping[str, torch.Tensor]] = default_collate,
        loss_targets: Callable[[Mapping[str, torch.Tensor]], int] | None = None,
        metrics: Mapping[str, Sum | tuple[Sum, str]] | None = None,
        threads: int = 1,
        language_model: bool = False,
        name: str = "chain",
        whole: torch.nn.Module | None = None,
    ) -> None:
        if not isinstance(modules, Iterable):
            raise UsageError(
                f"`modules` is a {type(modules).__name__}, expected a list of modules, or a mapping from names to them: a chain of one "
                "module is `Chain([module], ..)`",
                keyword="model",
            )
        named: Any = modules if isinstance(modules, (Mapping, torch.nn.ModuleDict)) else {str(at): each for at, each in enumerate(modules)}
        self.modules: dict[str, torch.nn.Module] = dict(named.items())
        self.inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self.loss, self.collate, self.loss_targets = loss, collate, loss_targets
        self.metrics: dict[str, tuple[Sum, str]] = {}
        for metric, each in (metrics or {}).items():
            sum_of, best = each if isinstance(each, tuple) and len(each) == 2 else (each, "max")
            if not callable(sum_of) or best not in ("min", "max"):
                raise UsageError(
                    f"the metric `{metric}` must be a function, or one with \"min\" or \"max\", got {each!r}", keyword="model"
                )
            self.metrics[metric] = (sum_of, best)
        self.threads, self.language_model, self.name, self.whole = threads, language_model, name, whole
        self._check()

    def _check(self) -> None:
        if not self.modules:
            raise UsageError("a chain needs at least one module", keyword="model")
        if not self.inputs:
            raise UsageError("`inputs` must name at least one key of a batch", keyword="model")
        if not isinstance(self.threads, int) or self.threads < 1:
            raise UsageError(f"`threads` must be a whole number from 1, got {self.threads!r}", keyword="model")
        if not self.name.isidentifier():
            raise UsageError(f"`name` must be letters, digits and `_`, got {self.name!r}", keyword="model")
        for name, module in self.modules.items():
            if not isinstance(module, torch.nn.Module):
                raise UsageError(f"`{name}` is a {type(module).__name__}, expected a torch.nn.Module", keyword="model")
            if not name or "." in name:
                raise UsageError(f"a module is called {name!r}; names have no dots and are not empty", keyword="model")
            with naming(f"the module `{name}` cannot be checked"):
                check_module(name, module)
        check_memory(self.modules)
        parameters = [(name, at) for name, module in self.modules.items() for at, _ in module.named_parameters()]
        if not any(self.modules[name].get_parameter(at).requires_grad for name, at in parameters):
            raise UsageError("no parameter of the chain requires a gradient, so there is nothing to train", keyword="model")
        if self.metrics and self.loss is None:
            raise UsageError(
                "`metrics` are computed from the outputs and the batch, and without `loss` the last module returns the loss: let it return "
                "its outputs, and pass `loss`",
                keyword="model",
            )
        try:
            whole = Chained(self.modules) if self.whole is None else self.whole
        except KeyError as error:
            raise UsageError(f"a module has a name that torch.nn.ModuleDict refuses: {error.args[0]}", keyword="model") from error
        states = [(name, at) for name, module in self.modules.items() for at in states_of(module)]
        known = {id(tensor) for tensor in [*whole.parameters(), *whole.buffers()]}
        parts = torch.nn.ModuleDict(self.modules)
        own = dict([*parts.named_parameters(remove_duplicate=False), *parts.named_buffers(remove_duplicate=False)])
        for name, at in [*parameters, *states]:
            if id(own[f"{name}.{at}"]) not in known:
                raise UsageError(
                    f"`whole` does not have `{name}.{at}`: its parameters and statistics must be those of the modules, not copies",
                    keyword="model",
                )
        seen: dict[int, str] = {}
        for name, at in states:
            other = seen.setdefault(id(own[f"{name}.{at}"]), name)
            if other != name:
                raise UsageError(
                    f"`{other}` and `{name}` share the running statistics `{at}`, which one module of a chain may observe: use a "
                    "normalization for each",
                    keyword="model",
                )

    def bind(self, data: Any) -> Bound:
        """Returns the chain with its data, as a run finds them."""
        # The modules may have changed since.
        self._check()
        return Bound(self, data)

    def _identity(self) -> str:
        """Returns a hash of the modules, their code's names, their initial weights and of what else decides results."""
        digest = hashlib.sha256()
        for name, module in self.modules.items():
            with naming(f"the module `{name}` cannot be identified"):
                classes = [f"{at}: {name_of(type(each))}" for at, each in module.named_modules()]
                parameters = [(at, list(each.shape), each.requires_grad) for at, each in module.named_parameters()]
                # Functions are shown with their addresses.
                text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(module))
                own_settings = [(at, settings_of(each)) for at, each in module.named_modules()]
                code = of_values({at: type(each) for at, each in module.named_modules()})
                digest.update(json.dumps([name, classes, text, parameters, own_settings, code]).encode())
                for at, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    digest.update(at.encode())
                    digest.update(bytes_of(tensor))
        own = [self.loss, self.collate, self.loss_targets, *(each for each, _ in self.metrics.values())]
        functions = [[name_of(each), of_value(each)] for each in own if each is not None]
        settings = [list(self.inputs), functions, self.threads, self.language_model, torch.__version__]
        settings += [[name, best] for name, (_, best) in self.metrics.items()]
        digest.update(json.dumps(settings).encode())
        return digest.hexdigest()[:DIGITS]

    def load(self, directory: Path | str) -> torch.nn.Module:
        """Returns copies of the modules with the weights of a model that a run has written, such as ``task.model_dir``."""
        tensors = dict(_read_safetensors(Path(directory) / "model.safetensors"))
        parts = torch.nn.ModuleDict(self.modules)
        whole = Chained(self.modules) if self.whole is None else self.whole
        names = {id(tensor): name for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
        loaded = copy.deepcopy(whole)
        own = dict([*loaded.named_parameters(), *loaded.named_buffers()])
        states = ((name, parts.get_buffer(name)) for name in states_of(parts))
        with torch.no_grad():
            for name, tensor in [*parts.named_parameters(), *states]:
                if name not in tensors or list(tensors[name].shape) != list(tensor.shape):
                    raise HydraError(f"`{directory}` has no weights of `{name}`: it was trained with other modules")
                own[names[id(tensor)]].copy_(tensors.pop(name))
        if tensors:
            raise HydraError(f"`{directory}` has weights of `{next(iter(tensors))}`, which the chain does not have")
        return loaded


class Chained(torch.nn.Module):
    """The modules of a chain, one after the other, without the loss. They are in ``stages`` under their names."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleDict(modules)

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs: Any = inputs
        for module in self.stages.values():
            outputs = module(*outputs) if isinstance(outputs, (tuple, list)) else module(outputs)
        return outputs


class Bound:
    """A chain with its data, as a run finds them."""

    def __init__(self, chain: Chain, data: Any) -> None:
        self.chain = chain
        self.language_model = chain.language_model
        self.metrics = [(name, best == "max") for name, (_, best) in chain.metrics.items()]
        splits, reading = splits_of(data), threading.Lock()
        self.model = f"torch:{chain.name}-{chain._identity()}"
        found: dict[str, Data | None] = {"train": None, "validation": None, "test": None}
        for split, dataset in splits.items():
            with naming(f"the {split} data cannot be read", keyword="data"):
                found[split] = None if dataset is None else Data(dataset, chain, split, reading)
        self.train, self.validation, self.test = found.values()
        read = [each for each in (self.train, self.validation, self.test) if each is not None]
        largest = max(read, key=lambda each: size_of(each.schema))
        for other in read:
            if form(other.schema) != form(largest.schema) or not fits(other.schema, largest.schema):
                raise UsageError(
                    f"the {other.name} data has {shown(other.schema)}, and the {largest.name} data {shown(largest.schema)}: "
                    "all splits have the same tensors, and the largest item of one is the largest in every dimension",
                    keyword="data",
                )
        if any(other.largest_in is not None or other.schema != largest.schema for other in read):
            for other in read:
                mean = other.mean_size or size_of(other.schema)
                other.mean_part = max(mean, 1) / max(size_of(largest.schema), 1)
                other.largest_in, other.schema = largest, largest.schema
        digest = hashlib.sha256(" ".join(f"{each.name} {each.digest}" for each in read).encode()).hexdigest()
        self.data = f"torch:data-{digest[:DIGITS]}"
        last, keys = len(chain.modules) - 1, [key for key, *_ in read[0].schema]
        end = End(keys, chain.loss, {name: sum_of for name, (sum_of, _) in chain.metrics.items()})
        of_modules = [{id(each) for each in module.parameters()} for module in chain.modules.values()]
        shared = {each for ids in of_modules for each in ids if sum(each in other for other in of_modules) > 1}
        self.layers = []
        for at, (name, module) in enumerate(chain.modules.items()):
            with naming(f"the module `{name}` cannot be copied, as it is for each device", "make such an object in the forward"):
                self.layers.append(Layer(name, module, chain.threads, end if at == last else None, shared))
        first = read[0].inputs()
        for layer, key in zip(self.layers, cost_keys(self.layers, first)):
            layer.cost_key = key


@contextmanager
def naming(what: str, remedy: str = "", keyword: str = "model") -> Iterator[None]:
    """Names what fails in an exception of other code."""
    try:
        yield
    except HydraError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {type(error).__name__}: {error}{remedy and '; '}{remedy}", keyword=keyword) from error


def check_memory(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuses a tensor in the memory of a parameter, because each parameter gets memory of its own."""
    found: dict[int, tuple[int, int, str, bool]] = {}
    for name, module in modules.items():
        named = [(at, each, True) for at, each in module.named_parameters()]
        named += [(at, each, False) for at, each in module.named_buffers()]
        for path, each in module.named_modules():
            own = ((f"{path}.{at}" if path else at, value) for at, value in vars(each).items())
            named += [(at, value, False) for at, value in own if isinstance(value, torch.Tensor)]
        for at, tensor, is_parameter in named:
            if tensor.numel() > 0 and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                start = tensor.data_ptr()
                end = start + (last + 1) * tensor.element_size()
                found.setdefault(id(tensor), (start, end, f"{name}.{at}", is_parameter))
    reach: tuple[int, int, str, bool] | None = None
    for span in sorted(found.values(), key=lambda span: (span[0], not span[3])):
        if reach is not None and span[0] < reach[1] and (span[3] or reach[3]):
            raise UsageError(
                f"`{reach[2]}` and `{span[2]}` are different tensors in the same memory, which a run trains apart: assign one "
                "torch.nn.Parameter to both modules, as in `head.weight = embedding.weight`, or a copy",
                keyword="model",
            )
        if reach is None or span[1] > reach[1]:
            reach = span


def check_module(name: str, module: torch.nn.Module) -> None:
    for at, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise UsageError(
                f"`{name}.{at}`".replace(".`", "`") + " is a scripted module, expected one of Python: pass the module that was scripted",
                keyword="model",
            )
        for attribute, value in [*vars(each).items(), *each.named_buffers(recurse=False)]:
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                raise UsageError(
                    f"`{name}.{at}.{attribute}`".replace("..", ".") + f" was computed by {value.grad_fn.name()} from parameters, which it "
                    "would not follow in training: compute it in the forward. Weights are normalized there by functions of "
                    "torch.nn.utils.parametrizations, and torch.nn.utils.prune.remove makes pruned ones parameters",
                    keyword="model",
                )
        if isinstance(each, torch.nn.modules.batchnorm._NormBase) and each.running_mean is not None:
            where, kind = f"`{name}.{at}` ({type(each).__name__})".replace(".`", "`"), torch.nn.modules.batchnorm._BatchNorm
            if not isinstance(each, kind) or type(each).forward is not kind.forward:
                raise UsageError(
                    f"{where} has running statistics, which are supported of torch.nn.BatchNorm1d, 2d and 3d: use one of them, or pass "
                    "track_running_stats=False",
                    keyword="model",
                )
            if each.momentum is None:
                raise UsageError(
                    f"{where} has momentum=None, so that its statistics are the mean over all batches; expected a number: pass momentum=0.1",
                    keyword="model",
                )
    for at, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"`{name}.{at}` has a hook on its gradient, which a run does not call: remove it, and change the gradient in a module, "
                "such as with torch.where(mask, weight, weight.detach())",
                keyword="model",
            )
    states = [(at, module.get_buffer(at)) for at in states_of(module) if not at.endswith("num_batches_tracked")]
    for at, parameter in [*module.named_parameters(), *states]:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UsageError(f"`{name}.{at}` is lazy: run the module once before the chain is made", keyword="model")
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UsageError(
                f"`{name}.{at}` is of {parameter.dtype} on {parameter.device}, expected float32 on the CPU: {to_cpu(parameter)}",
                keyword="model",
            )
    for at, buffer in module.named_buffers():
        if buffer.device.type != "cpu":
            raise UsageError(
                f"the buffer `{name}.{at}` is on {buffer.device}, expected the CPU: {to_cpu(buffer)}",
                keyword="model",
            )


def to_cpu(tensor: torch.Tensor) -> str:
    return "make the module on the CPU" if tensor.device.type == "meta" else "call `module.float().cpu()`"


def _read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        start = file.tell()
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            file.seek(start + first)
            dtype = {"F32": torch.float32, "I64": torch.int64}.get(tensor["dtype"])
            if dtype is None:
                raise HydraError(f"`{path}` has `{name}` in {tensor['dtype']}, expected F32 or I64, as a run with this chain writes it")
            values = torch.frombuffer(bytearray(file.read(end - first)), dtype=dtype) if end > first else torch.empty(0)
            yield name, values.reshape(tensor["shape"])

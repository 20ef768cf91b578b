"""Cuts models of Transformers into chains."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from hydra_train._errors import UsageError
from hydra_train.torch._chain import Chain
from hydra_train.torch._head import causal_loss, in_chunks, is_plain, loss_of
from hydra_train.torch._memory import name_of


def chain(model: torch.nn.Module, *, inputs: Sequence[str] | None = None, **settings: Any) -> Chain:
    """Cuts a model of Transformers into a chain: the embeddings, each block, and the rest with the head and the model's own loss.

    The parts run the model's own code. Their loss is compared with the model's for one batch, in an evaluation and in training, and
    a model for which it differs is refused.

    :param model: a model with a head and a loss, of a class that is built like those of Llama, Phi, GPT-2, BERT, DistilBERT, T5's encoder
        or ViT, or such a model with adapters of PEFT in its layers. With ``loss`` it may have no head. ``load`` gives the same kind of
        model.
    :param inputs: the arguments of the model that a batch has; `labels` must be one if the model has a head. By default ``input_ids``,
        ``attention_mask`` and ``labels``, or for a model of images ``pixel_values`` and ``labels``.
    :param settings: other settings of ``Chain``. Functions of ``loss`` and ``metrics`` get the model's outputs, such as
        ``outputs.logits``; the loss is the model's own by default.
    """
    given = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    inner = getattr(model, "base_model", model)
    family = next((each for each in _FAMILIES if each.fits(inner)), None)
    has_head = inner is not model
    if family is None or not (has_head or "loss" in settings):
        raise _not_built_so(model, inner)
    main = str(getattr(model, "main_input_name", "input_ids"))
    if inputs is None:
        inputs = [main, *(["attention_mask"] if main == "input_ids" else []), *(["labels"] if has_head else [])]
    if ("labels" in inputs) != has_head or inputs[0] != main:
        of_labels = "has labels" if has_head else "has no labels, because the model has no head"
        raise UsageError(f"`inputs` begins with {main} and {of_labels}, found {', '.join(inputs)}", keyword="model")
    # The heads of classifiers on decoders look for the last token that is no padding.
    by_ids = type(model).__name__.endswith("ForSequenceClassification") and family.is_decoder
    after = [key for key in inputs if key in ("attention_mask", "labels") or (by_ids and key == "input_ids")]
    hidden = ["inputs_embeds" if main == "input_ids" else main, *after]
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    blocks, routers = inner.get_submodule(family.blocks), _routers_of(inner)
    of_parts = options | ({"output_router_logits": False} if routers else {})
    cut = [_Part(family.part(inner, [], inner.config, True), inputs, after, True, of_parts)]
    for at, block in enumerate(blocks):
        kinds = getattr(inner.config, "layer_types", None)
        config = copy.copy(inner.config)
        config.__dict__.update({"layer_types": [kinds[at]]} if kinds else {})
        cut.append(_Part(family.part(inner, [block], config, False), hidden, after, True, of_parts, routers))
    head = ends = family.part(inner, [], inner.config, False, ends=True)
    if has_head:
        ends = _WithRouters(ends) if routers else ends
        name = next(name for name, each in model.named_children() if each is inner)
        head = _shallow(model, {name: _WithoutIds(ends) if by_ids else ends})
    names = ["embed", *(f"block{at}" for at in range(len(blocks))), "head"]
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    defaults: dict[str, Any] = {"name": type(model).__name__, "language_model": causal, "whole": given, "loss": _own_loss}
    if has_head:
        defaults["loss_targets"] = _predicted_tokens if causal else _labelled
    heads = [head] if "loss" in settings else [*_by_chunks(model, head, bool(settings.get("metrics"))), head]
    for each in heads:
        parts = [*cut, _Part(each, hidden, [], False, options, routers)]
        try:
            _check_cut(given, model, parts, inputs, options, _unknown_to(family, inner))
            break
        except UsageError:
            # A model that changes its logits between its head and its loss has all of them in memory.
            if each is head:
                raise
    return Chain(dict(zip(names, parts)), inputs=inputs, **(defaults | settings))


def _by_chunks(model: torch.nn.Module, last: torch.nn.Module, keeps_logits: bool) -> list[torch.nn.Module]:
    """Returns the last part of a language model with a loss from chunks of its logits, if its head and its loss are common ones."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    path = next((at for at, each in model.named_modules() if each is head), "")
    if not path or not is_plain(head) or loss_of(model) != "ForCausalLMLoss":
        return []
    chunked = _shallow(last, {path: in_chunks(head, keeps_logits)})
    chunked.__dict__["_loss_function"] = causal_loss
    return [chunked]


def _not_built_so(model: torch.nn.Module, inner: torch.nn.Module) -> UsageError:
    """Returns the error for a model that no family fits."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        met = "it has an encoder and a decoder"
    elif inner is model:
        met = "it has no head, which computes a loss from `labels`, and there is no `loss`, a function of its outputs and the batch"
    else:
        met = f"its {type(inner).__name__} has {', '.join(f'`{name}`' for name, _ in inner.named_children())}"
    return UsageError(
        f"`{name_of(type(model))}` is not built like the models that `chain` cuts, which have a head and one list of blocks in "
        f"{', '.join(f'`{blocks}`' for blocks in dict.fromkeys(each.blocks for each in _FAMILIES))}, after their embeddings: {met}. Pass "
        "a list of modules to `Chain`",
        keyword="model",
    )


def _unknown_to(family: _Family, inner: torch.nn.Module) -> str:
    """Returns what a model has that its parts do not compute, which is the likely cause if their loss differs."""
    found = []
    if getattr(inner.config, "output_router_logits", False) and _routers_of(inner) is None:
        found.append("its configuration has `output_router_logits=True`, for a loss of the routers of all blocks, expected False")
    known = [family.blocks, *family.embeddings, *family.before, *family.after, *family.unused]
    names = [name for name, _ in inner.named_parameters() if not any(f"{name}.".startswith(f"{path}.") for path in known)]
    others = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
    if others:
        found.append(
            f"it has {', '.join(f'`{name}`' for name in others)} besides its embeddings, its blocks and its last normalization, which no "
            "part computes: pass a list of modules to `Chain`"
        )
    return "".join(f"{each}; " for each in found)


class _Family:
    """Where a model of Transformers has its blocks, what makes their input, and what follows them.

    A model may lack what is ``before`` the blocks, between the embeddings and them, and what is ``after`` them. The ``dropout`` follows
    both the embeddings and what is after the blocks. No forward calls what is ``unused``.
    """

    def __init__(
        self,
        blocks: str,
        embeddings: Mapping[str, Callable[[], torch.nn.Module]],
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        dropout: str | None = None,
        unused: Sequence[str] = (),
    ) -> None:
        self.blocks, self.embeddings, self.before, self.after = blocks, embeddings, before, after
        self.dropout, self.unused = dropout, unused

    @property
    def is_decoder(self) -> bool:
        return "embeddings" not in self.embeddings

    def fits(self, inner: torch.nn.Module) -> bool:
        paths = [self.blocks, *self.embeddings]
        if self.blocks.startswith("encoder.") and isinstance(getattr(inner, "decoder", None), torch.nn.Module):
            return False
        try:
            return all(isinstance(inner.get_submodule(path), torch.nn.Module) for path in paths)
        except AttributeError:
            return False

    def part(
        self, inner: torch.nn.Module, blocks: list[torch.nn.Module], config: Any, embeds: bool, ends: bool = False
    ) -> torch.nn.Module:
        """Returns the model with these blocks, with its embeddings if it ``embeds``, and with what follows them if it ``ends``."""
        blocks = [_with_positions(block, inner.get_submodule(self.blocks)) for block in blocks]
        changed: dict[str, torch.nn.Module | None] = {self.blocks: torch.nn.ModuleList(blocks)}
        changed |= {path: torch.nn.Identity() for path in self.unused}
        if not embeds:
            changed |= {path: make() for path, make in self.embeddings.items()}
            changed |= {path: torch.nn.Identity() for path in self.before}
        if not ends:
            changed |= {path: None if path == "pooler" else torch.nn.Identity() for path in self.after}
        if self.dropout is not None:
            dropout = inner.get_submodule(self.dropout)
            followed = [*(self.embeddings if embeds else ()), *(self.after if ends else ())]
            changed |= {path: torch.nn.Sequential(inner.get_submodule(path), dropout) for path in followed}
            changed[self.dropout] = torch.nn.Identity()
        part = _shallow(inner, changed)
        part.config = config
        return part


def _with_positions(block: torch.nn.Module, blocks: Any) -> torch.nn.Module:
    """Returns a block that computes its relative positions, which those of T5 get from the first one, with the same parameter."""
    at = "layer.0.SelfAttention"
    try:
        attention, first = block.get_submodule(at), blocks[0].get_submodule(at)
    except AttributeError:
        return block
    if getattr(attention, "has_relative_attention_bias", True):
        return block
    attention = _shallow(attention, {})
    attention._modules["relative_attention_bias"] = first.relative_attention_bias
    attention.__dict__["has_relative_attention_bias"] = True
    return _shallow(block, {at: attention})


class _WithoutIds(torch.nn.Module):
    """The model below a head, which computes from the hidden states where the head has the ids too."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, _: Any = None, **arguments: Any) -> Any:
        return self.inner(**{key: value for key, value in arguments.items() if key != "input_ids"})


#: The class of the routers of a mixture of experts, and where their outputs have the logits.
_Routers = tuple[type[torch.nn.Module], int]


def _routers_of(inner: torch.nn.Module) -> _Routers | None:
    """Returns the routers of a model whose loss has a part that is computed from their logits."""
    recorded = getattr(type(inner), "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits") if getattr(inner.config, "output_router_logits", False) else None
    target = getattr(recorder, "target_class", None)
    return (target, int(getattr(recorder, "index", 0))) if isinstance(target, type) else None


@contextmanager
def _recorded(model: torch.nn.Module, routers: _Routers | None) -> Iterator[list[torch.Tensor]]:
    """Gives the logits of a model's routers in its forward."""
    found: list[torch.Tensor] = []
    handles = []
    if routers is not None:
        kind, at = routers
        for each in model.modules():
            if isinstance(each, kind):
                handles.append(each.register_forward_hook(lambda _module, _arguments, outputs: found.append(outputs[at])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _WithRouters(torch.nn.Module):
    """The model below a head, which returns the logits of routers that it is given."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, router_logits: Any, **arguments: Any) -> Any:
        outputs = self.inner(*given, **(arguments | {"output_router_logits": False}))
        outputs.router_logits = router_logits
        return outputs


class _Given(torch.nn.Module):
    """Embeddings that return what they are given."""

    def __init__(self) -> None:
        super().__init__()
        # Models of images read the type of this weight.
        self.patch_embeddings = SimpleNamespace(projection=SimpleNamespace(weight=torch.empty(0)))

    def forward(self, *given: Any, inputs_embeds: Any = None, **_: Any) -> Any:
        return next(each for each in (inputs_embeds, *given) if each is not None)


class _Zero(torch.nn.Module):
    """Positions that add nothing."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


_FAMILIES = [
    _Family("layers", {"embed_tokens": _Given}, before=["embed_dropout"], after=["norm", "final_layernorm"]),
    _Family("layers", {"embed_in": _Given}, before=["emb_dropout"], after=["final_layer_norm"]),
    _Family("h", {"wte": _Given, "wpe": _Zero, "drop": torch.nn.Identity}, after=["ln_f"]),
    _Family(
        "decoder.layers",
        {"decoder.embed_tokens": _Given, "decoder.embed_positions": _Zero},
        before=["decoder.project_in"],
        after=["decoder.final_layer_norm", "decoder.project_out"],
    ),
    _Family(
        "encoder.block",
        {"encoder.embed_tokens": _Given},
        after=["encoder.final_layer_norm"],
        dropout="encoder.dropout",
        unused=["shared"],
    ),
    _Family("encoder.layer", {"embeddings": _Given}, after=["layernorm", "pooler"]),
    _Family("layers", {"embeddings": _Given}, after=["layernorm", "final_norm", "pooler"]),
    _Family("transformer.layer", {"embeddings": _Given}),
]


class _Part(torch.nn.Module):
    """A part of a model of Transformers, which passes on what the parts after it need."""

    def __init__(
        self,
        model: torch.nn.Module,
        takes: Sequence[str],
        passes: Sequence[str],
        is_inner: bool,
        options: Mapping[str, Any],
        routers: _Routers | None = None,
    ) -> None:
        super().__init__()
        self.model, self.takes, self.passes, self.is_inner = model, list(takes), list(passes), is_inner
        self.options, self.routers = options, routers

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.takes, tensors))
        # The routers of each block add a tensor.
        passed_on = tensors[len(self.takes) :]
        if not self.is_inner:
            return self.model(**given, **self.options, **({"router_logits": passed_on} if self.routers else {}))
        others = {"labels", "input_ids"} if "inputs_embeds" in given else {"labels"}
        arguments = {key: value for key, value in given.items() if key not in others}
        with _recorded(self.model, self.routers) as logits:
            hidden = self.model(**arguments, **self.options).last_hidden_state
        return (hidden, *(given[key] for key in self.passes), *passed_on, *logits)


def _shallow(module: torch.nn.Module, changed: Mapping[str, torch.nn.Module | None]) -> torch.nn.Module:
    """Returns a module that shares everything with `module` but these submodules."""
    other: torch.nn.Module = module.__class__.__new__(module.__class__)
    other.__dict__.update(module.__dict__)
    for kind in ("_modules", "_parameters", "_buffers"):
        other.__dict__[kind] = dict(module.__dict__[kind])
    for path, replacement in changed.items():
        first, _, rest = path.partition(".")
        if first in other._modules:
            other._modules[first] = _shallow(other.get_submodule(first), {rest: replacement}) if rest else replacement
    return other


def _check_cut(
    given: torch.nn.Module,
    model: torch.nn.Module,
    cut: Sequence[torch.nn.Module],
    inputs: Sequence[str],
    options: Mapping[str, Any],
    unknown_to_parts: str,
) -> None:
    """Compares the loss of the parts of `model` with that of the `given` one, which may have adapters around it."""
    tensors, name = _example(model), name_of(type(given))
    unknown = [key for key in inputs if key not in tensors]
    if unknown:
        raise UsageError(f"`chain` passes no `{unknown[0]}` on; it knows {', '.join(tensors)}", keyword="model")
    modes = [(each, each.training) for part in (given, *cut) for each in part.modules()]
    buffers = [(each, each.clone()) for each in given.buffers()]
    problem = getattr(model.config, "problem_type", None)
    try:
        # In training, what a part draws more than once, or not at all, shifts everything that is drawn after it.
        for training in (False, True):
            expected, found = (_loss(parts, [tensors[key] for key in inputs], training) for parts in ([_Whole(given, inputs, options)], cut))
            if expected is None:
                raise UsageError(f"`{name}` cannot be cut: it returns no loss for `labels`", keyword="model")
            if not torch.allclose(found, expected, rtol=1e-5):
                figure = "loss" if "labels" in inputs else "mean square of the hidden states"
                where = f"in training the {figure}" if training else f"the {figure}"
                raise UsageError(
                    f"`{name}` cannot be cut: {unknown_to_parts}{where} of its parts is {found}, and its own {expected}", keyword="model"
                )
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"`{name}` cannot be cut: {unknown_to_parts}{type(error).__name__}: {error}", keyword="model") from error
    finally:
        for each, mode in modes:
            each.training = mode
        # Running statistics follow the example in training.
        for buffer, value in buffers:
            buffer.data.copy_(value)
        # A model chooses it by the first labels.
        if hasattr(model.config, "problem_type"):
            model.config.problem_type = problem


class _Whole(torch.nn.Module):
    """A model that gets its arguments by their order, as its first part does."""

    def __init__(self, model: torch.nn.Module, takes: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.takes, self.options = model, list(takes), options

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.takes, tensors)), **self.options)


def _loss(parts: Sequence[torch.nn.Module], tensors: Sequence[torch.Tensor], training: bool) -> Any:
    """Returns the loss, or a figure of the hidden states, of parts that run one after the other, with the same draws for the same order of operations."""
    found: Any = tensors
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in parts:
            found = part.train(training)(*found)
    # A model without a head returns hidden states.
    return found.loss if "loss" in found or not hasattr(found, "last_hidden_state") else found.last_hidden_state.square().mean()


def _example(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns two items with all arguments that parts know."""
    kind, config = type(model).__name__, model.config
    ids = torch.arange(24).reshape(2, 12) * 7
    mask = (torch.arange(12) < torch.tensor([[12], [9]])).long()
    if getattr(model, "main_input_name", "") == "pixel_values":
        height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        shape = (2, config.num_channels, height, width)
        found = {"pixel_values": torch.linspace(-1, 1, math.prod(shape)).reshape(shape)}
    else:
        padding = getattr(config, "pad_token_id", None)
        ids = ids % config.vocab_size
        # Some heads look for the last token that is no padding.
        ids = ids if padding is None else torch.where(mask > 0, ids, padding)
        found = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    if kind.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        labels = torch.where(mask > 0, ids, -100)
    elif getattr(config, "problem_type", None) == "multi_label_classification":
        labels = torch.zeros(2, config.num_labels)
    else:
        labels = torch.zeros((2, 12) if kind.endswith("ForTokenClassification") else 2, dtype=torch.long)
    return found | {"labels": labels}


def _own_loss(outputs: Any, _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


def _predicted_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    return int((batch["labels"][..., 1:] != -100).sum())


def _labelled(batch: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of labels, of tokens or of sequences, that the mean loss is over."""
    labels, ids = batch["labels"], batch.get("input_ids")
    return int((labels != -100).sum()) if ids is not None and labels.shape == ids.shape else len(labels)

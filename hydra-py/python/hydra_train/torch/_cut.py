"""Cuts models of Transformers into chains."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hydra_train._errors import UsageError
from hydra_train.torch._chain import Chain
from hydra_train.torch._memory import name_of


def chain(
    model: torch.nn.Module, *, inputs: Sequence[str] = ("input_ids", "attention_mask", "labels"), **settings: Any
) -> Chain:
    """Cuts a model of Transformers into a chain: the embeddings, each block, and the rest with the head and the model's own loss.

    The parts run the model's own code. Their loss is compared with the model's for one batch, and a model for which it differs
    is refused.

    :param model: a model with a head and a loss, of a class that is built like those of Llama, Gemma, GPT-2 or BERT, or such a model
        with adapters of PEFT in its layers. ``load`` gives the same kind of model.
    :param inputs: the arguments of the model that a batch has; `labels` must be one.
    :param settings: other settings of ``Chain``. Functions of ``loss`` and ``metrics`` get the model's outputs, such as
        ``outputs.logits``; the loss is the model's own by default.
    """
    given = model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    inner = getattr(model, "base_model", model)
    family = next((each for each in _FAMILIES if each.fits(inner)), None)
    if family is None or inner is model:
        raise UsageError(
            f"`{name_of(type(model))}` is not built like the models that `chain` cuts, which have a head and a list of blocks in "
            f"{', '.join(f'`{each.blocks}`' for each in _FAMILIES)}: pass a list of modules to `Chain`",
            keyword="model",
        )
    if "labels" not in inputs or inputs[0] != "input_ids":
        raise UsageError(f"`inputs` begins with input_ids and has labels, found {', '.join(inputs)}", keyword="model")
    # The heads of classifiers on decoders look for the last token that is no padding.
    by_ids = type(model).__name__.endswith("ForSequenceClassification") and family.last != "pooler"
    after = [key for key in inputs if key in ("attention_mask", "labels") or (by_ids and key == "input_ids")]
    blocks = inner.get_submodule(family.blocks)
    cut = [_Part(family.part(inner, [], inner.config, True), inputs, after, True)]
    for at, block in enumerate(blocks):
        kinds = getattr(inner.config, "layer_types", None)
        config = copy.copy(inner.config)
        config.__dict__.update({"layer_types": [kinds[at]]} if kinds else {})
        cut.append(_Part(family.part(inner, [block], config, False), ["inputs_embeds", *after], after, True))
    name = next(name for name, each in model.named_children() if each is inner)
    ends = family.part(inner, [], inner.config, False, ends=True)
    head = _shallow(model, {name: _WithoutIds(ends) if by_ids else ends})
    cut.append(_Part(head, ["inputs_embeds", *after], [], False))
    names = ["embed", *(f"block{at}" for at in range(len(blocks))), "head"]
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    defaults: dict[str, Any] = {"name": type(model).__name__, "language_model": causal, "whole": given, "loss": _own_loss}
    defaults["loss_targets"] = _predicted_tokens if causal else _labelled
    _check_cut(given, model, cut, inputs, causal)
    return Chain(dict(zip(names, cut)), inputs=inputs, **(defaults | settings))


class _Family:
    """Where a model of Transformers has its blocks, what makes their input, and what follows them."""

    def __init__(self, blocks: str, embeddings: Mapping[str, Callable[[], torch.nn.Module]], last: str) -> None:
        self.blocks, self.embeddings, self.last = blocks, embeddings, last

    def fits(self, inner: torch.nn.Module) -> bool:
        paths = [self.blocks, *self.embeddings]
        try:
            return all(isinstance(inner.get_submodule(path), torch.nn.Module) for path in paths)
        except AttributeError:
            return False

    def part(
        self, inner: torch.nn.Module, blocks: list[torch.nn.Module], config: Any, embeds: bool, ends: bool = False
    ) -> torch.nn.Module:
        """Returns the model with these blocks, with its embeddings if it ``embeds``, and with what follows them if it ``ends``."""
        changed: dict[str, torch.nn.Module | None] = {self.blocks: torch.nn.ModuleList(blocks)}
        if not embeds:
            changed |= {path: make() for path, make in self.embeddings.items()}
        if not ends:
            changed[self.last] = None if self.last == "pooler" else torch.nn.Identity()
        part = _shallow(inner, changed)
        part.config = config
        return part


class _WithoutIds(torch.nn.Module):
    """The model below a head, which computes from the hidden states where the head has the ids too."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, _: Any = None, **arguments: Any) -> Any:
        return self.inner(**{key: value for key, value in arguments.items() if key != "input_ids"})


class _Given(torch.nn.Module):
    """Embeddings that return what they are given."""

    def forward(self, *_: Any, inputs_embeds: Any = None, **__: Any) -> Any:
        return inputs_embeds


class _Zero(torch.nn.Module):
    """Positions that add nothing."""

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


_FAMILIES = [
    _Family("layers", {"embed_tokens": _Given}, "norm"),
    _Family("h", {"wte": _Given, "wpe": _Zero, "drop": torch.nn.Identity}, "ln_f"),
    _Family("encoder.layer", {"embeddings": _Given}, "pooler"),
]


class _Part(torch.nn.Module):
    """A part of a model of Transformers, which passes on what the parts after it need."""

    def __init__(self, model: torch.nn.Module, takes: Sequence[str], passes: Sequence[str], is_inner: bool) -> None:
        super().__init__()
        self.model, self.takes, self.passes, self.is_inner = model, list(takes), list(passes), is_inner

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = dict(zip(self.takes, tensors))
        if not self.is_inner:
            return self.model(**given, use_cache=False)
        others = {"labels", "input_ids"} if "inputs_embeds" in given else {"labels"}
        arguments = {key: value for key, value in given.items() if key not in others}
        hidden = self.model(**arguments, use_cache=False).last_hidden_state
        return (hidden, *(given[key] for key in self.passes))


def _shallow(module: torch.nn.Module, changed: Mapping[str, torch.nn.Module | None]) -> torch.nn.Module:
    """Returns a module that shares everything with `module` but these submodules."""
    other: torch.nn.Module = module.__class__.__new__(module.__class__)
    other.__dict__.update(module.__dict__)
    for kind in ("_modules", "_parameters", "_buffers"):
        other.__dict__[kind] = dict(module.__dict__[kind])
    for path, replacement in changed.items():
        first, _, rest = path.partition(".")
        if first in other._modules:
            other._modules[first] = _shallow(module.get_submodule(first), {rest: replacement}) if rest else replacement
    return other


def _check_cut(
    given: torch.nn.Module, model: torch.nn.Module, cut: Sequence[torch.nn.Module], inputs: Sequence[str], causal: bool
) -> None:
    """Compares the loss of the parts of `model` with that of the `given` one, which may have adapters around it."""
    ids = torch.arange(24).reshape(2, 12) * 7 % model.config.vocab_size
    mask = (torch.arange(12) < torch.tensor([[12], [9]])).long()
    padding = getattr(model.config, "pad_token_id", None)
    if padding is not None:
        # Some heads look for the last token that is no padding.
        ids = torch.where(mask > 0, ids, padding)
    masked_lm = type(model).__name__.endswith("ForMaskedLM")
    of_tokens = type(model).__name__.endswith("ForTokenClassification")
    if causal or masked_lm:
        labels = torch.where(mask > 0, ids, -100)
    elif getattr(model.config, "problem_type", None) == "multi_label_classification":
        labels = torch.zeros(2, model.config.num_labels)
    else:
        labels = torch.zeros((2, 12) if of_tokens else 2, dtype=torch.long)
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "labels": labels}
    unknown = [key for key in inputs if key not in tensors]
    if unknown:
        raise UsageError(f"`chain` passes no `{unknown[0]}` on; it knows {', '.join(tensors)}", keyword="model")
    modes = [(each, each.training) for part in (given, *cut) for each in part.modules()]
    try:
        for part in (given, *cut):
            part.eval()
        with torch.no_grad():
            expected = given(**{key: tensors[key] for key in inputs}, use_cache=False).loss
            found: Any = [tensors[key] for key in inputs]
            for part in cut:
                found = part(*found)
            found = found.loss
    except Exception as error:
        raise UsageError(f"`{name_of(type(given))}` cannot be cut: {type(error).__name__}: {error}", keyword="model") from error
    finally:
        for each, mode in modes:
            each.training = mode
    if expected is None or not torch.allclose(found, expected, rtol=1e-5):
        raise UsageError(
            f"`{name_of(type(given))}` cannot be cut: the loss of its parts is {found}, and its own {expected}", keyword="model"
        )


def _own_loss(outputs: Any, _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


def _predicted_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    return int((batch["labels"][..., 1:] != -100).sum())


def _labelled(batch: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of labels, of tokens or of sequences, that the mean loss is over."""
    labels = batch["labels"]
    return int((labels != -100).sum()) if labels.shape == batch["input_ids"].shape else len(labels)

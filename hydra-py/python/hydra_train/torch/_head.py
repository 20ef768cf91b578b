"""The head and the loss of a language model, without all logits in memory."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.nn import functional

from hydra_train.torch._memory import gradient_in_place

#: Labels that have no loss.
IGNORED = -100
#: Bytes of a chunk's logits, if the weight of the head is small.
CHUNK = 16 << 20
#: How many times larger than a chunk's logits the weight of the head is otherwise: each chunk reads and writes its gradient.
PARTS = 8


def in_chunks(head: torch.nn.Linear, keeps_logits: bool) -> torch.nn.Linear:
    """Returns a head with the parameters of this one, whose loss is computed in chunks.

    If it ``keeps_logits``, it computes them as before in evaluations, for metrics.
    """
    other = ChunkedHead.__new__(ChunkedHead)
    other.__dict__.update(head.__dict__)
    for kind in ("_modules", "_parameters", "_buffers"):
        other.__dict__[kind] = dict(head.__dict__[kind])
    other.keeps_logits = keeps_logits
    return other


def is_plain(head: Any) -> bool:
    """Returns whether a head computes logits of float32 from its weight and bias alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(head) is torch.nn.Linear and head.weight.dtype == torch.float32 and not any(getattr(head, each) for each in hooks)


def loss_of(model: torch.nn.Module) -> str:
    """Returns the name of the function of Transformers that computes a model's loss from its logits."""
    function = getattr(model, "loss_function", None)
    of_transformers = getattr(function, "__module__", "") == "transformers.loss.loss_utils"
    return str(getattr(function, "__name__", "")) if of_transformers else ""


class ChunkedHead(torch.nn.Linear):
    """A head that leaves its logits to ``causal_loss``."""

    keeps_logits: bool

    def forward(self, hidden: torch.Tensor) -> Any:
        if self.keeps_logits and not self.training:
            return super().forward(hidden)
        return Logits(hidden, self.weight, self.bias)


class Logits:
    """Logits that are not computed yet. A model that changes them before it passes them to its loss fails."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def contiguous(self) -> Logits:
        return self

    def float(self) -> Logits:
        # They are of float32.
        return self


def causal_loss(logits: Any, labels: torch.Tensor, vocab_size: int, **others: Any) -> torch.Tensor:
    """Returns the loss ``ForCausalLMLoss`` of Transformers, by chunks if the logits are not computed yet."""
    # The logits of routers have a loss of their own.
    others.pop("router_logits", None)
    is_chunked = isinstance(logits, Logits) and vocab_size == len(logits.weight) and all(each is None for each in others.values())
    if not is_chunked:
        if isinstance(logits, Logits):
            logits = functional.linear(logits.hidden, logits.weight, logits.bias)
        # It is imported, since a model of it is here.
        plain = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        loss: torch.Tensor = plain(logits, labels, vocab_size=vocab_size, **others)
        return loss
    following = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
    return cross_entropy(logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.weight, logits.bias, following)


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of ``hidden @ weight.T + bias`` with labels. Those of ``IGNORED`` have no loss.

    The logits exist for a chunk of positions at a time. The gradients are computed with them: their graph would keep all of them.
    """
    loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels, torch.is_grad_enabled())
    return loss


def rows_of(positions: int, weight: torch.Tensor) -> int:
    """Returns the number of positions of a chunk, which depends on the shapes alone."""
    vocabulary, width = int(weight.shape[0]), int(weight.shape[1])
    most: int = max(1, width // PARTS, CHUNK // (vocabulary * weight.element_size()))
    chunks: int = max(1, math.ceil(positions / most))
    return max(1, math.ceil(positions / chunks))


class _ChunkedLoss(torch.autograd.Function):
    """The loss of a head by chunks of positions, which are added up in their order.

    A chunk has the operations of ``linear`` and ``cross_entropy`` and of their derivatives, so that one chunk has their bits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, is_recorded: bool) -> Any:
        of_hidden, of_weight, of_bias = (is_recorded and each for each in ctx.needs_input_grad[:3])
        gradients: Any = [
            torch.empty_like(hidden) if of_hidden else None,
            gradient_in_place(weight) if of_weight else None,
            torch.zeros_like(bias) if of_bias else None,
        ]
        count, one = (labels != IGNORED).sum().to(hidden.dtype), torch.ones((), dtype=hidden.dtype)
        rows = rows_of(len(labels), weight)
        total = None
        for at in range(0, max(len(labels), 1), rows):
            part, targets = hidden[at : at + rows], labels[at : at + rows]
            likely = functional.log_softmax(functional.linear(part, weight, bias), 1)
            loss = functional.nll_loss(likely, targets, ignore_index=IGNORED, reduction="sum")
            total = loss if total is None else total + loss
            if not (of_hidden or of_weight or of_bias):
                continue
            # The derivative of a mean, which reduction 1 is, over the targets of all chunks.
            of_logits = torch.ops.aten.nll_loss_backward(one, likely, targets, None, 1, IGNORED, count)
            of_logits = torch.ops.aten._log_softmax_backward_data(of_logits, likely, 1, likely.dtype)
            del likely
            if of_hidden:
                torch.mm(of_logits, weight, out=gradients[0][at : at + rows])
            if of_weight and at == 0:
                torch.mm(of_logits.t(), part, out=gradients[1])
            elif of_weight:
                gradients[1].addmm_(of_logits.t(), part)
            if of_bias:
                gradients[2].add_(of_logits.sum(0))
        ctx.gradients = gradients
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_loss: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a loss by chunks were used: compute the loss again, instead of a second backward")
        if of_loss.item() != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(of_loss)
        return (*gradients, None, None)

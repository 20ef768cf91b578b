"""The random numbers of a dataset and of ``collate``."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hydra_train._errors import UsageError
from hydra_train.torch._guard import Guard


class Draws(Guard):
    """Gives each random operation of a read, on its thread, a generator that the split and the items of the batch seed.

    PyTorch's global generator, which other threads and other runs use too, is neither used nor changed. An operation that is given
    another generator keeps it.
    """

    def __init__(self, split: str, items: list[int]) -> None:
        digest = hashlib.sha256(f"{split} {items}".encode()).digest()
        super().__init__(f"the {split} data", int.from_bytes(digest[:8], "little"), {}, False)
        self.split = split
        #: The operations that drew from the generator of the items.
        self.drawn = 0

    def _drawing(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args)), **kwargs}
        if given.get("generator") is not None:
            return func, kwargs
        func, kwargs = super()._drawing(func, args, kwargs)
        self.drawn += "generator" in kwargs
        return func, kwargs


class CheckedDraws(Draws):
    """Also refuses data that draws after it has seeded PyTorch's global generator, because the seed would have no effect.

    That is found by the generator's state, which a thread that draws meanwhile changes too: reads before a run are checked, and later
    ones are not.
    """

    def __init__(self, split: str, items: list[int]) -> None:
        super().__init__(split, items)
        self.state = torch.get_rng_state()

    def _drawing(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        before = self.drawn
        drawing = super()._drawing(func, args, kwargs)
        if self.drawn > before and not torch.equal(self.state, torch.get_rng_state()):
            raise UsageError(
                f"the {self.split} data seeds PyTorch's global generator, from which other threads draw too: pass "
                "`generator=torch.Generator().manual_seed(seed)` to what draws, or omit the seed, because what `dataset[index]` and "
                "`collate` draw depends on the items of the batch",
                keyword="data",
            )
        return drawing

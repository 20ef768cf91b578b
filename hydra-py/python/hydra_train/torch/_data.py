"""Map-style datasets as the data of a chain."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hydra_train import _native
from hydra_train._errors import UsageError
from hydra_train.torch._draws import CheckedDraws, Draws
from hydra_train.torch._memory import TYPES, bytes_of, memory_of, name_of, type_names

if TYPE_CHECKING:
    from hydra_train.torch._chain import Chain

#: Rows that identify a dataset.
ROWS = 64
#: Batches of several items that are read twice, and the items of each.
BATCHES, SEVERAL = 8, 4
#: What data that cannot be repeated does instead.
WAY_OUT = (
    "draw with PyTorch's functions, whose numbers depend on the items of the batch in a run, or from a generator that the items seed; "
    "what Python's `random` and NumPy draw differs each time"
)
#: The names, the types and the shapes of an item's tensors.
Schema = list[tuple[str, str, tuple[int, ...]]]


def splits_of(data: Any) -> Mapping[str, Any]:
    """Returns the datasets by the names of their splits."""
    if not isinstance(data, Mapping):
        return {"train": data}
    if data.get("train") is None or not set(data) <= {"train", "validation", "test"}:
        found = ", ".join(str(name) for name, each in data.items() if each is not None)
        raise UsageError(
            f"`data` by splits needs `train`, and may have others of train, validation, test; found {found}", keyword="data"
        )
    return data


class Data:
    """A map-style dataset, and what is known of each of its batches."""

    def __init__(self, dataset: Any, chain: Chain, split: str, reading: threading.Lock) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, (str, bytes)):
            raise UsageError(
                f"the {split} data is a {type(dataset).__name__}: a chain of PyTorch modules needs a map-style dataset, with "
                "`len(dataset)` and `dataset[index]`",
                keyword="data",
            )
        self.name, self.chain, self.dataset, self.reading = split, chain, dataset, reading
        #: The class of the guard of a read, and the random operations of the last read.
        self.draws: type[Draws] = CheckedDraws
        self.drawn = 0
        self.items = len(dataset)
        if self.items == 0:
            raise UsageError(f"the {split} data has no items", keyword="data")
        self.schema = schema_of(self._collated([0]), chain.inputs)
        #: The data with the item whose tensors are the largest of all splits, if tensors vary; this item, and the smallest one.
        self.largest_in: Data | None = None
        self.largest_item = self.smallest_item = 0
        #: The mean size of an item, if tensors vary, and as a part of the largest item: an estimate, since a padded batch is larger.
        self.mean_size, self.mean_part = 0.0, 1.0
        varies = False
        digest = hashlib.sha256(f"{name_of(type(dataset))} {self.items} {self.schema}".encode())
        for index in sorted({at * self.items // ROWS for at in range(ROWS)}):
            row, drawn = self._collated([index]), self.drawn
            found = schema_of(row, chain.inputs)
            self._check_form(found)
            varies = varies or found != self.schema
            # Not a number equals itself here.
            if any(bytes_of(row[key]) != bytes_of(value) for key, value in self._collated([index]).items()):
                raise UsageError(
                    f"item {index} of the {split} data differs each time it is read: {WAY_OUT}",
                    keyword="data",
                )
            if self.drawn != drawn:
                raise UsageError(
                    f"item {index} of the {split} data draws random numbers the first time that it is read, and keeps them, so that they "
                    "would depend on the task that reads it first: make all items before the run, or draw from a torch.Generator that the "
                    "index seeds",
                    keyword="data",
                )
            for key in sorted(row):
                digest.update(bytes_of(row[key]))
        self.digest = digest.hexdigest()
        self._check_repeats()
        if varies:
            self._find_largest()
        self.draws = Draws

    def _check_repeats(self) -> None:
        """Refuses a ``collate`` whose batches of several items differ each time."""
        several = min(self.items, SEVERAL)
        for first in sorted({at * (self.items - several) // BATCHES for at in range(BATCHES)}):
            items = list(range(first, first + several))
            try:
                batch = self._collated(items)
            except UsageError:
                raise
            except Exception:
                # Items of several sizes, which may be in no batch of the run.
                continue
            again = self._collated(items)
            if any(key not in again or bytes_of(again[key]) != bytes_of(value) for key, value in batch.items()):
                raise UsageError(
                    f"a batch of items {first} to {first + several - 1} of the {self.name} data differs each time that `collate` makes "
                    f"it: {WAY_OUT}",
                    keyword="data",
                )

    def _find_largest(self) -> None:
        """Reads every item once, for the one with the largest tensors: memory is planned with it."""
        shapes = []
        for index in range(self.items):
            found = schema_of(self._collated([index]), self.chain.inputs)
            self._check_form(found)
            shapes.append(found)
        sizes = [size_of(found) for found in shapes]
        self.largest_in, self.largest_item = self, max(range(self.items), key=sizes.__getitem__)
        self.smallest_item = min(range(self.items), key=sizes.__getitem__)
        self.schema = shapes[self.largest_item]
        self.mean_size = sum(sizes) / len(sizes)
        for index, found in enumerate(shapes):
            if not fits(found, self.schema):
                raise UsageError(
                    f"item {index} of the {self.name} data has {shown(found)}, and item {self.largest_item}, which is the largest, "
                    f"{shown(self.schema)}: one item must be the largest in every dimension; pad the others in `collate`",
                    keyword="data",
                )

    def largest(self, items: int) -> tuple[list[_native.Memory], list[_native.Memory], int]:
        """Returns a batch that is as large as any other of this many items."""
        if self.largest_in is None:
            return self.batch(list(range(items)))
        of = self.largest_in
        if items > 1:
            pair = [of.largest_item, of.smallest_item]
            try:
                of._collated(pair)
            except Exception as error:
                raise UsageError(
                    f"items {pair[0]} and {pair[1]} of the {of.name} data differ in their sizes, and `collate` cannot make a batch of them: "
                    "pad them to one length in `collate`",
                    keyword="data",
                ) from error
        return self._given(of._collated([of.largest_item] * items), items)

    def batch(self, items: list[int]) -> tuple[list[_native.Memory], list[_native.Memory], int]:
        """Returns the inputs, all tensors for the loss, and the number of loss targets of these items."""
        return self._given(self._collated(items), len(items))

    def _given(self, batch: Mapping[str, torch.Tensor], items: int) -> tuple[list[_native.Memory], list[_native.Memory], int]:
        self._check(batch)
        counted = items if self.chain.loss_targets is None else whole_number(self.chain.loss_targets(batch))
        targets = [key for key, *_ in self.schema] if self.chain.loss is not None else []
        self._check_rows(batch, targets, items)
        made = {key: memory_of(batch[key]) for key in {*self.chain.inputs, *targets}}
        return [made[key] for key in self.chain.inputs], [made[key] for key in targets], counted

    def inputs(self) -> list[torch.Tensor]:
        """Returns the inputs of the first module for two items as large as any, or for one if ``collate`` makes no batch of two."""
        of = self.largest_in or self
        try:
            batch = of._collated([of.largest_item] * 2)
        except Exception:
            batch = of._collated([of.largest_item])
        return [batch[key] for key in self.chain.inputs]

    def _check(self, batch: Mapping[str, torch.Tensor]) -> None:
        found = schema_of(batch, self.chain.inputs)
        self._check_form(found)
        if not fits(found, self.schema):
            which = "the largest item" if self.largest_in is not None else f"the {min(ROWS, self.items)} items that were looked at"
            raise UsageError(
                f"a batch has {shown(found)}, and {which} {shown(self.schema)}: batches may not be larger, because memory is planned "
                "with them; pad items to one length in `collate`, or cut them",
                keyword="data",
            )

    def _check_rows(self, batch: Mapping[str, torch.Tensor], targets: list[str], items: int) -> None:
        """Refuses inputs that have neither a row for each item nor one row for all of them."""
        counts = {key: len(batch[key]) for key in self.chain.inputs}
        other = next((key for key, count in counts.items() if count != items), None)
        if other is None:
            return
        # A row of token ids may have a label for each item.
        are_ids = not any(batch[key].is_floating_point() for key in counts)
        are_packed = all(len(batch[key]) == 1 or (are_ids and len(batch[key]) == items) for key in targets)
        if not are_packed or any(count != 1 for count in counts.values()):
            raise UsageError(
                f"`collate` made {counts[other]} rows of `{other}` from {items} items of the {self.name} data: the first dimension of an "
                "input must be the number of items; keep every item, and filter the dataset before the run",
                keyword="data",
            )

    def _check_form(self, found: Schema) -> None:
        if form(found) != form(self.schema):
            raise UsageError(
                f"a batch has {shown(found)}, and the first one {shown(self.schema)}: all items must have the same tensors, which may "
                "differ in their sizes alone",
                keyword="data",
            )

    def _collated(self, items: list[int]) -> Mapping[str, torch.Tensor]:
        # A dataset may have a file that is open, or a connection.
        with self.reading, self.draws(self.name, items) as draws:
            batch = self.chain.collate([self.dataset[index] for index in items])
            self.drawn = draws.drawn
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"a batch of the {self.name} data is a {type(batch).__name__}, expected a mapping from names to tensors: return "
                "one from `collate` of the chain",
                keyword="data",
            )
        return batch


def whole_number(found: Any) -> int:
    """Returns what ``loss_targets`` counted."""
    try:
        whole = int(found)
        is_number = whole >= 0 and bool(whole == found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        is_number = False
    if not is_number:
        raise UsageError(f"`loss_targets` returned {found!r}, expected the number of targets, a whole number", keyword="model")
    return whole


def schema_of(batch: Mapping[str, Any], inputs: Sequence[str]) -> Schema:
    """Returns names, types and shapes of an item's tensors, and checks them."""
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            of_numbers = isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value)
            hint = "make each item's a tensor, in a dataset of Hugging Face with `dataset.with_format(\"torch\")`"
            hint = hint if of_numbers else "leave it out in `collate`"
            raise UsageError(f"`{key}` of a batch is a {type(value).__name__}, expected a tensor: {hint}", keyword="data")
        if value.dtype not in TYPES:
            raise UsageError(
                f"`{key}` of a batch is a tensor of {value.dtype}, expected one of {type_names()}: convert it in `collate`",
                keyword="data",
            )
        if value.dim() == 0:
            raise UsageError(f"`{key}` of a batch is a scalar; its first dimension must be the items", keyword="data")
    missing = [key for key in inputs if key not in batch]
    if missing:
        raise UsageError(
            f"a batch has no `{missing[0]}`, which the first module gets; it has {', '.join(map(str, batch))}", keyword="data"
        )
    return [(key, TYPES[value.dtype], tuple(value.shape[1:])) for key, value in sorted(batch.items())]


def size_of(schema: Schema) -> int:
    """Returns the number of elements of an item."""
    return sum(math.prod(shape) for *_, shape in schema)


def form(schema: Schema) -> list[tuple[str, str, int]]:
    """Returns the names, the types and the numbers of dimensions of an item's tensors."""
    return [(key, dtype, len(shape)) for key, dtype, shape in schema]


def fits(schema: Schema, into: Schema) -> bool:
    """Returns whether no dimension is larger than that of the other schema, which has the same form."""
    pairs = zip(schema, into)
    return all(size <= most for (*_, shape), (*_, other) in pairs for size, most in zip(shape, other))


def shown(schema: Schema) -> str:
    """Returns a schema for messages."""
    return ", ".join(f"`{key}` of {dtype} {list(shape)}" for key, dtype, shape in schema)

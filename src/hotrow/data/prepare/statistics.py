"""Statistics of the label by value, as of each row: how many other training rows had its value, how many were
positive.

    before, after = Statistics(schema), Statistics(schema)
    for chunk, trains, folds in rows:                         # trains [n]: which rows of the chunk train
        after.add(chunk, trains, folds)                       # folds [n]: of each row; None if rows have a time
    total = after.total()
    for chunk, trains, folds in rows:
        chunk = before.joined_to(chunk, trains, after)        # with J dense columns more, or without a time
        chunk = after.joined_out_of_fold(chunk, trains, folds, total)
    chunk = total.of_rows_to_score(chunk)

If rows have a time, a training row sees the training rows before it: nothing of it depends on a later row. If they have
none, it sees the training rows of the other folds, which are drawn: NUM_FOLDS - 1 in NUM_FOLDS of them, so that its
inputs are like those of a row to score. Either way nothing depends on its own label. Every other row sees all training
rows, as a server would; `lag.py` has the other choice. A value is known by its 64-bit hash, combinations by the hash of
their hashes; counts lie in a fixed number of slots, so memory is bounded, and values that share a slot are counted
together.

`save` writes the counts of all training rows as safetensors. For statistic i, `i.slots` [m] are the slots that are not
empty and `i.counts` [m, 2] their rows and positives; `all` [2] counts every training row. Slots of fold k, and its row
of `all`, follow those of fold k - 1.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hotrow.base.door import read_file
from hotrow.base.files import atomic_write
from hotrow.data.chunk import Chunk
from hotrow.data.coded import column_of, key_hashes
from hotrow.data.native import count_before
from hotrow.data.sources.schema import Schema
from hotrow.data.sources.split import FOLD_SALT, uniform_of
from hotrow.data.transforms import Transform

MAX_BYTES = 1 << 28
"""What the counts of all statistics may take in memory; preparation keeps them twice, or NUM_FOLDS + 1 times."""
NUM_FOLDS = 5
MAX_BITS, PAGE_BITS = 20, 9
MOST = 2**32 - 1
"""What a counter holds. Many days may have more rows; it then stays at this limit, as in `count_before`."""
BLOCK_ROWS = 4096
"""Rows whose inputs are computed at a time: few enough for what lies between to stay in the cache."""


class Statistics:
    """Rows and positives by value for each of `schema.statistics`, empty at first."""

    def __init__(self, schema: Schema, *, num_folds: int = 1) -> None:
        self._schema, self._specs, self.num_folds = schema, schema.statistics, num_folds
        self._columns = tuple(dict.fromkeys(column for spec in self._specs for column in spec.columns))
        self._transforms = [spec.transforms for spec in self._specs]
        # Neither the number of rows nor the memory of a machine may decide what is counted together.
        self.bits = min(MAX_BITS, (MAX_BYTES // (8 * max(1, len(self._specs)))).bit_length() - 1)
        """How many leading bits of a hash number its slot."""
        self.counts = [_zeros((num_folds, 1 << self.bits, 2)) for _ in self._specs]
        """By statistic: rows and positives by fold and slot."""
        self._pages = [np.zeros(1 << self.bits - PAGE_BITS, np.bool_) for _ in self._specs]
        """By statistic: in which pages of slots, in any fold, rows were counted."""
        self.all = np.zeros((num_folds, 2), np.int64)
        """Rows, and positives, of all training rows, by fold."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs J of a row."""
        return sum(map(len, self._transforms))

    def add(self, chunk: Chunk, trains: NDArray[np.bool_], folds: NDArray[np.uint8] | None = None) -> None:
        """Counts the training rows of a chunk. folds: the fold of each row [n]; None if there is one."""
        labels, hashes = positives(chunk), self.hashes(chunk)
        for pages, own_hashes in zip(self._pages, hashes, strict=True):
            pages[own_hashes[trains] >> np.uint64(64 - self.bits + PAGE_BITS)] = True
        for k in range(self.num_folds):
            own = trains if folds is None else trains & (folds == k)
            for counts, own_hashes in zip(self.counts, hashes, strict=True):
                count_before(own_hashes, labels, own, counts[k])
            self.all[k] += (own.sum(), (own & labels).sum())

    def joined_to(self, chunk: Chunk, trains: NDArray[np.bool_], after: Statistics) -> Chunk:
        """Returns a chunk with the statistics of its rows as dense columns, and counts its training rows.

        trains: which rows train [n]; they see the counts so far. after: the counts of all training rows, which the
        other rows see.
        """
        return self._joined(chunk, *self.counts_before(self.hashes(chunk), positives(chunk), trains, after))

    def counts_before(
        self,
        hashes: Sequence[NDArray[np.uint64]],
        labels: NDArray[np.bool_],
        trains: NDArray[np.bool_],
        after: Statistics,
    ) -> tuple[list[NDArray[Any]], NDArray[np.int64]]:
        """Returns by statistic rows and positives of each row's value [n, 2], and those of all values [n, 2]; counts
        the rows that train.

        hashes: of each row's value, by statistic. after: what rows that do not train see; if it is `self`, what rows
        before them have left there.
        """
        so_far = [
            before + np.cumsum(own) - own for own, before in zip((trains, trains & labels), self.all[0], strict=True)
        ]
        of_all = np.stack(so_far, 1)
        if after is not self:
            of_all[~trains] = after.all[0]
        found = []
        for counts, last, own in zip(self.counts, after.counts, hashes, strict=True):
            of_value = count_before(own, labels, trains, counts[0], last[0])
            assert of_value is not None
            found.append(of_value)
        self.all[0] += (trains.sum(), (trains & labels).sum())
        return found, of_all

    def joined_out_of_fold(
        self, chunk: Chunk, trains: NDArray[np.bool_], folds: NDArray[np.uint8], total: Statistics
    ) -> Chunk:
        """Returns a chunk with the statistics of its rows as dense columns. Training rows do not see those of their own
        fold; the others see all. folds: of each row [n]. total: the counts of all folds together."""
        own = np.flatnonzero(trains)
        of_all = np.tile(total.all[0], (chunk.num_rows, 1))
        of_all[own] -= self.all[folds[own]]
        first_slot_of_fold = folds[own].astype(np.int64) << self.bits
        found = []
        for counts, sums, hashes in zip(self.counts, total.counts, self.hashes(chunk), strict=True):
            slots = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
            of_value = _pairs(sums, slots)
            of_value[own] -= _pairs(counts, first_slot_of_fold + slots[own])
            found.append(of_value)
        return self._joined(chunk, found, of_all)

    def of_rows_to_score(self, chunk: Chunk) -> Chunk:
        """Returns a chunk of rows to score with their statistics as dense columns."""
        return self.joined_to(chunk, np.zeros(chunk.num_rows, np.bool_), self)

    def inputs_to_score(self, of_column: Mapping[str, NDArray[np.uint64]], num_rows: int) -> NDArray[np.float32]:
        """Returns the inputs of rows to score [n, J]. of_column: the hashes of their ids by column [n]."""
        none = np.zeros(num_rows, np.bool_)
        return self.inputs(*self.counts_before(self._crossed(of_column), none, none, self))

    def _joined(self, chunk: Chunk, found: Sequence[NDArray[Any]], of_all: NDArray[np.int64]) -> Chunk:
        return replace(chunk, dense=np.concatenate([chunk.dense, self.inputs(found, of_all)], 1))

    def inputs(self, found: Sequence[NDArray[Any]], of_all: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the inputs of rows [n, J], of what `counts_before` returns."""
        out = np.empty((len(of_all), self.num_inputs), np.float32)
        column = 0
        for of_value, transforms in zip(found, self._transforms, strict=True):
            for start in range(0, len(out), BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                numbers = [each.astype(np.float64) for each in (*of_value[rows].T, *of_all[rows].T)]
                for i, transform in enumerate(transforms, column):
                    out[rows, i] = transform(*numbers[: transform.num_columns])
            column += len(transforms)
        return out

    def total(self) -> Statistics:
        """Returns the counts of all folds together."""
        found = Statistics(self._schema)
        for own, counts, pages, own_pages in zip(found.counts, self.counts, found._pages, self._pages, strict=True):
            pages[:] = own_pages
            sums, *others = counts.reshape(self.num_folds, -1, 1 << PAGE_BITS, 2)[:, pages]
            for more in others:
                sums += more
                np.putmask(sums, sums < more, MOST)  # the sum went past what a counter holds
            own.reshape(-1, 1 << PAGE_BITS, 2)[pages] = sums
        found.all[0] = self.all.sum(0)
        return found

    def _counted(self, i: int) -> NDArray[np.int64]:
        """Returns the slots of statistic i in which rows were counted, those of fold k behind those of fold k - 1."""
        pages = np.flatnonzero(self._pages[i])
        counts = self.counts[i].reshape(self.num_folds, -1, 1 << PAGE_BITS, 2)[:, pages]
        fold, page, slot = np.nonzero(counts[..., 0])
        return (fold << self.bits) + (pages[page] << PAGE_BITS) + slot

    def hashes(self, chunk: Chunk) -> list[NDArray[np.uint64]]:
        """Returns by statistic the hash of each row's value [n]."""
        return self._crossed({name: key_hashes(column_of(chunk.keys, name)) for name in self._columns})

    def _crossed(self, of_column: Mapping[str, NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        cross = Transform("cross")
        return [cross(*(of_column[name] for name in spec.columns)) for spec in self._specs]

    def merge(self, other: Statistics, *, fold: int = 0) -> None:
        """Adds the counts of other rows, those of their first fold to `fold`."""
        for i, counts in enumerate(other.counts):
            slots = other._counted(i)
            own, more = self.counts[i].reshape(-1, 2), counts.reshape(-1, 2)[slots]
            slots += fold << self.bits
            own[slots] = np.minimum(own[slots].astype(np.int64) + more, MOST)
            self._pages[i] |= other._pages[i]
        self.all[fold : fold + other.num_folds] += other.all

    def with_earlier(self, earlier: Statistics) -> Statistics:
        """Returns these counts and those of the rows of earlier days, as one fold more if there are several: no row of
        theirs is in a fold of these."""
        found = Statistics(self._schema, num_folds=self.num_folds + (self.num_folds > 1))
        found.merge(self)
        found.merge(earlier, fold=found.num_folds - 1)
        return found

    def __reduce__(self) -> Any:
        """Pickles as `save` writes: of many slots few are taken."""
        return Statistics._of, (self._to_bytes(), self._schema, self.num_folds)

    def save(self, path: Path) -> None:
        """Writes the counts. OSError passes through."""
        with atomic_write(path) as file:
            file.write(self._to_bytes())

    def _to_bytes(self) -> bytes:
        arrays: dict[str, NDArray[np.int64]] = {"all": self.all.reshape(-1)}
        for i, counts in enumerate(self.counts):
            of_slot = counts.reshape(-1, 2)
            arrays[f"{i}.slots"] = self._counted(i)
            arrays[f"{i}.counts"] = of_slot[arrays[f"{i}.slots"]].astype(np.int64)
        return save(arrays)

    @staticmethod
    def load(schema: Schema, path: Path, *, num_folds: int = 1, cure: str) -> Statistics:
        """Reads what `save` wrote. Raises ValueError naming the file if it is damaged, or not of these statistics."""
        try:
            return Statistics._of(read_file(path), schema, num_folds)
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{path} does not hold the statistics of this schema ({error}); {cure}") from None

    @staticmethod
    def _of(data: bytes, schema: Schema, num_folds: int) -> Statistics:
        found, arrays = Statistics(schema, num_folds=num_folds), load(data)
        found.all[:] = arrays["all"].reshape(num_folds, 2)
        for i, counts in enumerate(found.counts):
            slots, own = arrays[f"{i}.slots"], arrays[f"{i}.counts"]
            if len(slots) and not (slots.min() >= 0 and own.min() >= 0 and own.max() < 1 << 32):
                raise ValueError(f"a slot or a count of {i} is out of range")
            counts.reshape(-1, 2)[slots] = own
            found._pages[i][slots % (1 << found.bits) >> PAGE_BITS] = True
        return found


def _pairs(counts: NDArray[np.uint32], slots: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Returns rows and positives [n, 2] of slots, those of fold k behind those of fold k - 1."""
    return counts.reshape(-1).view(np.uint64).take(slots).view(np.uint32).reshape(-1, 2)


def _zeros(shape: tuple[int, ...]) -> NDArray[np.uint32]:
    """Returns zeros of which memory is taken page by page, 4 KiB each, as they are counted up: few rows touch few.
    NumPy asks for pages of 2 MiB, which a few hundred rows touch all."""
    memory = mmap.mmap(-1, 4 * math.prod(shape))
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint32).reshape(shape)


def num_folds(schema: Schema) -> int:
    """Returns how many folds training rows have: one if they have a time, by which they are counted."""
    return NUM_FOLDS if schema.time is None else 1


def folds_of(schema: Schema, rows: NDArray[np.int64]) -> NDArray[np.uint8] | None:
    """The fold of each row by its number [n]; None if there is one."""
    if not schema.statistics or num_folds(schema) == 1:
        return None
    return (uniform_of(schema.split.seed, rows, salt=FOLD_SALT) * NUM_FOLDS).astype(np.uint8)


def raw_transforms(schema: Schema, transforms: Sequence[Transform]) -> list[Transform]:
    """Returns by dense input what is done to a chunk's column: nothing to those that `Statistics` has computed."""
    num_raw = len(schema.dense)
    return [*transforms[:num_raw], *[Transform("identity")] * (len(transforms) - num_raw)]


def positives(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns which rows are positive by the first label [n]; rows to score have no labels, and none is."""
    if chunk.label is None:
        return np.zeros(chunk.num_rows, np.bool_)
    return (chunk.label if chunk.label.ndim == 1 else chunk.label[:, 0]) > 0.5

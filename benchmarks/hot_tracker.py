"""Which rows are hot while a model trains: found in one pass over its batches, in a memory that does not grow.

    tracker = HotTracker(num_embeddings, record_bytes, budget_bytes)
    tracker.observe({"C3": ids, ...})       # each batch
    tracker.hot_set()                       # within the budget, as of now

No run uses it: on the click logs at hand the rows that the whole split's counts name (`hot.rows: exact`) serve more of
every part of the split than those that a tracker finds.

A sketch counts: Misra and Gries' counters in buckets of four slots, one sketch for all tables, so that they share it by
use. Scores are halved every HALVING accesses for each slot, so that what was hot long ago gives way. CAFE's HotSketch
(SpaceSaving in such buckets) and Hotline's tracker (a cache of indices with re-reference bits) were measured beside it
and find fewer of the rows: benchmarks/hot_trackers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from benchmarks.compiled import native
from hotrow.data.packed.format import Ids, Ragged, slice_ids
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotRows, HotSet, check_budget, is_small

SLOTS_PER_ROW = 4
"""Slots of the sketch for each row that the budget holds: 32 bytes a row, as CAFE has it."""
HALVING = 8
"""Accesses for each slot between two halvings: long enough to tell rows apart, short beside an epoch."""
BUCKET, SCORE_BITS = 4, 24
"""Slots of a bucket, bits of a score (benchmarks/native/sketch.h)."""
BATCH_SIZE = 2048
"""Samples shown to the tracker together."""


@dataclass(frozen=True)
class _Large:
    """A table whose rows are tracked."""

    name: str
    num_rows: int
    record_bytes: int
    first_key: int
    """Of row 0; the sketch numbers the rows of all tracked tables through, from 1."""


class HotTracker:
    """The rows of most accesses per byte, lately, within `budget_bytes`; the same for the same batches and seed.

    num_embeddings, record_bytes: by table, bytes with optimizer state. As in `calibrate`, tables of fewer bytes than
    `small_table_bytes` and row 0 of every other are hot whatever is accessed. Raises ValueError where the budget does
    not hold those.
    """

    def __init__(
        self,
        num_embeddings: Mapping[str, int],
        record_bytes: Mapping[str, int],
        budget_bytes: int,
        *,
        small_table_bytes: int = SMALL_TABLE_BYTES,
        seed: int = 0,
    ) -> None:
        sizes = [(n, record_bytes[name]) for name, n in num_embeddings.items()]
        check_budget(sizes, budget_bytes, small_table_bytes)
        self.budget_bytes, self.seed = budget_bytes, seed
        self._num_embeddings, self._record_bytes = dict(num_embeddings), dict(record_bytes)
        self._large: dict[str, _Large] = {}
        first_key = 1
        for name, n in num_embeddings.items():
            if not is_small(n, record_bytes[name], small_table_bytes):
                self._large[name] = _Large(name, n, record_bytes[name], first_key)
                first_key += n
        self.slots = torch.zeros(self._num_slots(), dtype=torch.int64)
        """The sketch; with `numbers` all that changes, in place."""
        self.numbers = torch.zeros(2, dtype=torch.int64)
        """Accesses of tracked tables so far, and since the last halving."""
        self._slots: NDArray[np.uint64] = self.slots.numpy().view(np.uint64)

    @property
    def num_observed(self) -> int:
        """Accesses of tracked tables so far."""
        return int(self.numbers[0])

    def _num_slots(self) -> int:
        """Of the sketch: for as many rows as the budget may come to hold, or as there are."""
        least = min((table.record_bytes for table in self._large.values()), default=1)
        rows = sum(table.num_rows for table in self._large.values())
        return BUCKET * max(1, -(-SLOTS_PER_ROW * min(self._room() // least, rows) // BUCKET))

    def _room(self) -> int:
        """Bytes of the budget beside small tables and row 0 of the large."""
        fixed = sum(
            self._record_bytes[name] * (1 if name in self._large else n) for name, n in self._num_embeddings.items()
        )
        return self.budget_bytes - fixed

    @property
    def num_bytes(self) -> int:
        """What tracking takes in memory, from the first batch to the last."""
        return self._slots.nbytes

    def observe(self, ids: Mapping[str, ArrayLike]) -> None:
        """The rows that a batch looks up, by table: int32 or int64, in any order, on the CPU.

        Tables may be left out. Raises ValueError for a table that is not there and an id outside its table.
        """
        for name, own in ids.items():
            if name not in self._num_embeddings:
                raise ValueError(f"no table is called {name!r}; the tracker has {', '.join(self._num_embeddings)}")
            if name in self._large:
                self._observe(self._large[name], np.ascontiguousarray(own))
        if int(self.numbers[1]) >= HALVING * len(self._slots):
            self._halve()

    def _observe(self, table: _Large, ids: NDArray[Any]) -> None:
        if ids.dtype not in (np.int32, np.int64) or ids.ndim != 1:
            raise ValueError(f"ids of table {table.name!r} are {ids.dtype} {ids.shape}; pass int32 or int64 [n]")
        try:
            native().sketch_add(self._slots, self.seed, table.first_key, table.num_rows, ids)
        except ValueError:
            bad = ids[(ids < 0) | (ids >= table.num_rows)]
            raise ValueError(f"table {table.name!r} has {table.num_rows:,} rows, an id is {bad[0]}") from None
        self.numbers += len(ids)

    def _halve(self) -> None:
        scores = self._slots & np.uint64((1 << SCORE_BITS) - 1)
        self._slots -= scores - (scores >> np.uint64(1))
        self.numbers[1] = 0

    def hot_set(self, slots: Tensor | None = None) -> HotSet:
        """The rows of highest score per byte that the budget holds; slots: of another time, None means as of now.

        What room is left holds whole tables that fit, as in `calibrate`; no other row that was not seen.
        """
        tables = list(self._large.values())
        found = self._best(tables, self._slots if slots is None else slots.numpy().view(np.uint64))
        rows = {name: HotRows.first(n) for name, n in self._num_embeddings.items()}
        room = self._room() - sum(len(own) * table.record_bytes for own, table in zip(found, tables, strict=True))
        for own, table in zip(found, tables, strict=True):
            rest = (table.num_rows - 1 - len(own)) * table.record_bytes
            if rest <= room:
                room -= rest
            else:
                rows[table.name] = HotRows.of(np.concatenate([np.zeros(1, np.int64), own]))
        return HotSet(how="tracked", rows=rows, record_bytes=self._record_bytes)

    def _best(self, tables: list[_Large], slots: NDArray[np.uint64]) -> list[NDArray[np.int64]]:
        """Of each tracked table, the rows taken beside row 0, rising."""
        slots = slots[slots != 0]
        keys = (slots >> np.uint64(SCORE_BITS)).astype(np.int64)
        scores = (slots & np.uint64((1 << SCORE_BITS) - 1)).astype(np.int64)
        first_keys = np.array([table.first_key for table in tables], np.int64)
        owner = np.searchsorted(first_keys, keys, "right") - 1
        sizes = np.array([table.record_bytes for table in tables], np.int64)[owner]
        order = np.lexsort((keys, -scores / np.maximum(sizes, 1)))
        taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), self._room(), "right"))]
        return [np.sort(keys[taken[owner[taken] == t]]) - table.first_key for t, table in enumerate(tables)]


def slices_of(dataset: PackedDataset, start: int, stop: int) -> Iterator[tuple[list[Ids], int]]:
    """Yields (ids by feature, number of samples) of training samples `start` to `stop`, up to BATCH_SIZE at a time."""
    split = dataset.split("train")
    firsts = [0, *np.cumsum(split.block_rows).tolist()]
    for index, (first, last) in enumerate(pairwise(firsts)):
        low, high = max(start, first), min(stop, last)
        for at in range(low, high, BATCH_SIZE):
            end = min(at + BATCH_SIZE, high)
            yield [slice_ids(ids, at - first, end - first) for ids in split.block(index).ids], end - at


def flat_ids(ids: Ids) -> NDArray[Any]:
    """Returns all ids of a column, those of a sample one after another."""
    return ids.values if isinstance(ids, Ragged) else ids


def show_part(tracker: HotTracker, dataset: PackedDataset, part: tuple[int, int]) -> None:
    """Shows the training samples from part[0] to part[1] to the tracker, as training would."""
    for columns, _ in slices_of(dataset, *part):
        ids: dict[str, list[NDArray[Any]]] = {}
        for feature, own in zip(dataset.info.features, columns, strict=True):
            ids.setdefault(feature.table, []).append(flat_ids(own))
        tracker.observe({name: np.concatenate(own) for name, own in ids.items()})

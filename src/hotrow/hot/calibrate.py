"""How much is hot: a budget of bytes on the fast device -> the rows to keep there. Three ways, one interface.

    exact      accesses of every row, as the dataset carries them: the rows of most accesses per byte
    sampled    FAE's estimate (Adnan et al., VLDB'22): 5 % of the inputs, 35 chunks of 1024 rows, an interval by
               Student's t, and the smallest threshold of a grid whose upper bound fits
    covering   most *samples* covered: a sample is hot only if all its rows are

All three take tables below SMALL_TABLE_BYTES whole, and no row that was never accessed unless its table fits whole.
Next: classify.py, which says what a hot set covers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotrow.data.packed_reader import PackedDataset
from hotrow.hot.covering import covering
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotSet, check_budget
from hotrow.hot.sampled import sampled
from hotrow.hot.table_use import Found, TableUse, tables_of


@dataclass(frozen=True)
class Calibration:
    """A hot set, and how it was found."""

    hot: HotSet
    budget_bytes: int
    detail: Mapping[str, Any]
    """Of `sampled`: each threshold tried, with the bounds of the estimate and the true size, in bytes."""
    seconds: float
    """It took to find it."""


def calibrate(
    dataset: PackedDataset,
    how: str,
    budget_bytes: int,
    *,
    record_bytes: Mapping[str, int],
    small_table_bytes: int = SMALL_TABLE_BYTES,
    seed: int = 0,
) -> Calibration:
    """The hot set of a packed dataset within `budget_bytes`, by training accesses; the same for the same seed.

    how: exact | sampled | covering. record_bytes: of a row of each table, optimizer state included. small_table_bytes:
    tables of fewer are hot whole. Raises ValueError for another `how` and where the budget does not hold the small
    tables and a row of every other.
    """
    start = time.perf_counter()
    if how not in WAYS:
        raise ValueError(f"no way to calibrate is called {how!r}; choose one of {', '.join(WAYS)}")
    tables = tables_of(dataset, record_bytes, small_table_bytes=small_table_bytes)
    check_budget([(len(t.counts), t.record_bytes) for t in tables], budget_bytes, small_table_bytes)
    rows, detail = WAYS[how](dataset, tables, budget_bytes, seed)
    hot = HotSet(how=how, rows=rows, record_bytes=record_bytes)
    return Calibration(hot, budget_bytes, detail, time.perf_counter() - start)


# ---- by the accesses of every row


def _exact(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    return {t.name: t.first(n) for t, n in zip(tables, most_accessed(tables, budget_bytes), strict=True)}, {}


def most_accessed(tables: Sequence[TableUse], budget_bytes: int) -> list[int]:
    """How many rows of each table: those of most accesses per byte, within the budget.

    Of rows of equal accesses per byte the first tables' come first.
    """
    rising = [t.counts[:0:-1] for t in tables]

    def all_at(density: float) -> list[int]:
        """Rows of at least so many accesses per byte."""
        least = [max(1, math.ceil(density * t.record_bytes)) for t in tables]
        return [
            len(t.counts) if t.is_small else len(t.counts) - int(np.searchsorted(own, n))
            for t, own, n in zip(tables, rising, least, strict=True)
        ]

    def num_bytes(rows: Sequence[int]) -> int:
        return sum(n * t.record_bytes for n, t in zip(rows, tables, strict=True))

    found = all_at(0.0)
    if num_bytes(found) > budget_bytes:
        low, high = 0.0, 1.0 + max(float(t.counts.max(initial=0)) / t.record_bytes for t in tables)
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if num_bytes(all_at(middle)) > budget_bytes else (low, middle)
        found, ties = all_at(high), all_at(low)
        for k, t in enumerate(tables):
            found[k] = min(ties[k], found[k] + (budget_bytes - num_bytes(found)) // t.record_bytes)
    for k, t in enumerate(tables):  # what is left holds rows that were never accessed, of tables that then fit whole
        if (len(t.counts) - found[k]) * t.record_bytes <= budget_bytes - num_bytes(found):
            found[k] = len(t.counts)
    return found


WAYS: dict[str, Callable[[PackedDataset, Sequence[TableUse], int, int], Found]] = {
    "exact": _exact,
    "sampled": sampled,
    "covering": covering,
}

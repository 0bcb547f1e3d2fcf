"""How much is hot: a budget of bytes on the fast device -> the rows to keep there. Three ways, one interface.

    exact      accesses of every row, as the dataset carries them: the rows of most accesses per byte
    sampled    FAE's estimate (Adnan et al., VLDB'22): 5 % of the inputs, 35 chunks of 1024 rows, an interval by
               Student's t, and the smallest threshold of a grid whose upper bound fits
    covering   most *samples* covered: a sample is hot only if all its rows are

All three take tables below SMALL_TABLE_BYTES whole, and no row that was never accessed unless its table fits whole.
Next: classify.py, which says what a hot set covers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.covering import covering
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotSet, check_budget
from hotrow.hot.sampled import sampled
from hotrow.hot.table_use import Found, TableUse, most_accessed, tables_of


@dataclass(frozen=True)
class Calibration:
    """A hot set, and how it was found."""

    hot: HotSet
    budget_bytes: int
    detail: Mapping[str, Any]
    """Of `sampled`: the confidence; each threshold tried, with bounds of the estimate and the true size, in bytes."""
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
    tables of fewer are hot whole. Raises ValueError for
    another `how` and where the budget does not hold the small tables and a row of every other.
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


WAYS: dict[str, Callable[[PackedDataset, Sequence[TableUse], int, int], Found]] = {
    "exact": _exact,
    "sampled": sampled,
    "covering": covering,
}

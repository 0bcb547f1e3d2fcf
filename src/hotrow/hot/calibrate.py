"""Chooses the hot rows: those that a device of a given size should keep. Three ways share one interface.

    exact      the rows with most accesses per byte, by the dataset's own counts
    sampled    FAE's estimate of them (Adnan et al., VLDB'22, section 3.1) from 5 % of the samples
    covering   prefixes of the tables that make most *samples* hot (covering.py)

All three take tables below SMALL_TABLE_BYTES whole, and a row without accesses only if its table fits whole.
classify.py says which samples a hot set makes hot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.covering import covering
from hotrow.hot.hot_set import (
    SMALL_TABLE_BYTES,
    Found,
    HotRows,
    HotSet,
    TableUse,
    check_budget,
    count_accesses,
    most_accessed,
    tables_of,
)


@dataclass(frozen=True)
class Calibration:
    """A hot set, and how it was found."""

    hot: HotSet
    budget_bytes: int
    detail: Mapping[str, Any]
    """For `sampled`: the confidence, and each threshold tried with the bounds of the estimate and the true size, in
    bytes. For `covering`: how many samples were looked at."""
    seconds: float
    """Time it took."""


def calibrate(
    dataset: PackedDataset,
    how: str,
    budget_bytes: int,
    *,
    record_bytes: Mapping[str, int],
    small_table_bytes: int = SMALL_TABLE_BYTES,
    seed: int = 0,
) -> Calibration:
    """Chooses hot rows of at most `budget_bytes` by the accesses of the training split; repeats for the same seed.

    how: exact | sampled | covering. record_bytes: of a row of each table, optimizer state included. small_table_bytes:
    smaller tables are hot whole. Raises ValueError for another `how`, and if the budget does not hold the small tables
    and one row of every other table.
    """
    start = time.perf_counter()
    if how not in WAYS:
        raise ValueError(f"no way to calibrate is called {how!r}; choose one of {', '.join(WAYS)}")
    tables = tables_of(dataset, record_bytes, small_table_bytes=small_table_bytes)
    check_budget([(len(t.counts), t.record_bytes) for t in tables], budget_bytes, small_table_bytes)
    rows, detail = WAYS[how](dataset, tables, budget_bytes, seed)
    hot = HotSet(how=how, rows=rows, record_bytes=record_bytes)
    return Calibration(hot, budget_bytes, detail, time.perf_counter() - start)


def _exact(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    return {t.name: t.first(n) for t, n in zip(tables, most_accessed(tables, budget_bytes), strict=True)}, {}


# ---- FAE's estimate
#
# Accesses are counted in 5 % of the samples. In each large table 35 chunks of 1024 rows are looked at, and Student's t
# bounds how many rows of the table pass a threshold. The smallest threshold of a grid whose upper bound fits the budget
# is taken. Four points differ from the paper: the paper names no grid and no rule when to stop; we draw samples without
# replacement; our chunks hold rows in random order, because our rows are numbered by popularity; and a row that
# the sample does not contain is never hot (at the paper's own settings the cutoff is below one access of the sample).

SAMPLE_SHARE = 0.05
"""The share of the training samples in which accesses are counted."""
CHUNKS, CHUNK_ROWS = 35, 1024
CONFIDENCE = 0.999
"""The probability that the interval holds the true size, as published."""
T_QUANTILE = 3.600716
"""Student's t with CHUNKS - 1 degrees of freedom lies between minus and plus this value with probability CONFIDENCE."""
THRESHOLDS = tuple(10 ** (-k / 4) for k in range(8, 33))
"""Percentages of a table's accesses, from 1e-2 to 1e-8, four per power of ten."""


def _sampled(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    """Returns hot rows and every threshold tried. Raises ValueError if the coarsest threshold does not fit."""
    counts = count_accesses(dataset, SAMPLE_SHARE, seed=seed)
    large = [t for t in tables if not t.is_small]
    fixed = sum(len(t.counts) * t.record_bytes for t in tables if t.is_small)
    tried: list[dict[str, float]] = []
    chosen: dict[str, NDArray[np.bool_]] | None = None
    for threshold in THRESHOLDS:
        # A row with this share of its table's accesses has about the same share of the sample's.
        hot = {t.name: counts[t.name] >= max(1.0, threshold / 100 * float(counts[t.name].sum())) for t in large}
        bounds = [estimate(hot[t.name], seed) for t in large]
        low, high = (fixed + sum(b[k] * t.record_bytes for b, t in zip(bounds, large, strict=True)) for k in (0, 1))
        true = fixed + sum(int(hot[t.name].sum()) * t.record_bytes for t in large)
        tried.append({"threshold_percent": threshold, "low_bytes": low, "high_bytes": high, "true_bytes": true})
        if max(high, true) > budget_bytes:
            break
        chosen = hot
    if chosen is None:
        raise ValueError(
            f"a hot set of {budget_bytes:,} bytes is too small for the coarsest threshold of the sampled way, "
            f"{THRESHOLDS[0]:g} % of a table's accesses ({tried[0]['true_bytes']:,.0f} bytes); raise the budget, or "
            "count all samples (exact)"
        )
    rows = {t.name: HotRows.first(len(t.counts)) for t in tables if t.is_small}
    rows |= {name: HotRows.of(np.flatnonzero(own)) for name, own in chosen.items()}
    return rows, {"confidence": CONFIDENCE, "thresholds": tried}


def estimate(is_hot: NDArray[np.bool_], seed: int) -> tuple[float, float]:
    """Returns bounds of how many entries are true, from n = CHUNKS chunks out of N.

    Per chunk the bounds are mean -+ t * sqrt((N - n) / N * s^2 / n). Entries are drawn in random order, so that each
    chunk is a sample of the table: with our numbering neighbours would be all hot or all cold. A table of at most n
    chunks is counted.
    """
    num_chunks = len(is_hot) / CHUNK_ROWS
    if num_chunks <= CHUNKS:
        return float(is_hot.sum()), float(is_hot.sum())
    drawn = np.random.default_rng([seed, 1]).choice(len(is_hot), CHUNKS * CHUNK_ROWS, replace=False)
    hot = is_hot[drawn].reshape(CHUNKS, CHUNK_ROWS).sum(axis=1)
    half = T_QUANTILE * math.sqrt((num_chunks - CHUNKS) / num_chunks * float(hot.var(ddof=1)) / CHUNKS)
    mean = float(hot.mean())
    return max(0.0, mean - half) * num_chunks, (mean + half) * num_chunks


WAYS: dict[str, Callable[[PackedDataset, Sequence[TableUse], int, int], Found]] = {
    "exact": _exact,
    "sampled": _sampled,
    "covering": covering,
}

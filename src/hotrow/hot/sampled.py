"""FAE's estimate of how much is hot, from a sample (Adnan et al., VLDB'22, section 3.1).

Accesses are counted in 5 % of the inputs; of each large table 35 chunks of 1024 rows are looked at, and Student's t
bounds how many rows pass a threshold. The smallest threshold of a grid whose upper bound fits the budget is taken.

Differences to the paper: it names no grid and no stop rule; inputs are drawn without replacement; chunks are of rows in
a random order, for ours are numbered by popularity; a row that the sample lacks is never hot, whatever the threshold
(at the paper's own operating points the cutoff is below one access of the sample).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import HotRows
from hotrow.hot.table_use import Found, TableUse, count_accesses

SAMPLE_SHARE = 0.05
"""Of the training samples, that the estimate counts accesses in."""
CHUNKS, CHUNK_ROWS = 35, 1024
CONFIDENCE = 0.999
"""The chance that the interval holds the true size, as published."""
T_QUANTILE = 3.600716
"""Student's t with CHUNKS - 1 degrees of freedom is within -+ this with a chance of CONFIDENCE."""
THRESHOLDS = tuple(10 ** (-k / 4) for k in range(8, 33))
"""Per cent of a table's accesses, from 1e-2 to 1e-8, four per power of ten."""


def sampled(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    """Hot rows by table; each threshold tried, with the bounds of the estimate and the true size, in bytes.

    Raises ValueError if the coarsest threshold does not fit.
    """
    counts = count_accesses(dataset, SAMPLE_SHARE, seed=seed)
    large = [t for t in tables if not t.is_small]
    fixed = sum(len(t.counts) * t.record_bytes for t in tables if t.is_small)
    tried: list[dict[str, float]] = []
    chosen: dict[str, NDArray[np.bool_]] | None = None
    for threshold in THRESHOLDS:
        # A hot row has this share of its table's accesses, so as large a share of the sample's.
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
            f"{THRESHOLDS[0]:g} % of a table's accesses ({tried[0]['true_bytes']:,.0f} bytes); raise it, or count all"
        )
    rows = {t.name: HotRows.first(len(t.counts)) for t in tables if t.is_small}
    rows |= {name: HotRows.of(np.flatnonzero(own)) for name, own in chosen.items()}
    return rows, {"confidence": CONFIDENCE, "thresholds": tried}


def estimate(is_hot: NDArray[np.bool_], seed: int) -> tuple[float, float]:
    """Bounds of how many are hot: mean -+ t * sqrt((N - n) / N * s^2 / n) a chunk, over N chunks of which n were seen.

    Entries are taken in a random order, so that a chunk is a sample of the table: in ours the hot rows come first, and
    a chunk of neighbours is all hot or all cold. A table of no more than n chunks is counted.
    """
    num_chunks = len(is_hot) / CHUNK_ROWS
    if num_chunks <= CHUNKS:
        return float(is_hot.sum()), float(is_hot.sum())
    drawn = np.random.default_rng([seed, 1]).choice(len(is_hot), CHUNKS * CHUNK_ROWS, replace=False)
    hot = is_hot[drawn].reshape(CHUNKS, CHUNK_ROWS).sum(axis=1)
    spread = math.sqrt((num_chunks - CHUNKS) / num_chunks * float(hot.var(ddof=1)) / CHUNKS)
    half = T_QUANTILE * spread
    mean = float(hot.mean())
    return max(0.0, mean - half) * num_chunks, (mean + half) * num_chunks

"""Chooses the hot rows: those that a device of a given size should keep. Three ways share one interface.

    exact      the rows with most accesses per byte, by the dataset's own counts
    sampled    FAE's estimate of them (Adnan et al., VLDB'22, section 3.1) from 5 % of the samples
    covering   prefixes of the tables that make most *samples* hot

All three take tables below SMALL_TABLE_BYTES whole, and a row without accesses only if its table fits whole.
`find_hot` says which samples they make hot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import (
    SMALL_TABLE_BYTES,
    Found,
    HotRows,
    HotSet,
    TableUse,
    check_budget,
    count_accesses,
    draw_samples,
    hot_samples,
    most_accessed,
    samples_by_block,
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


@dataclass(frozen=True)
class FoundHot:
    """Hot rows, the training samples that they make hot, and how long it took to find both."""

    calibration: Calibration
    is_hot: NDArray[np.bool_]
    """bool [rows of the training split]."""
    classify_s: float

    @property
    def rows(self) -> HotSet:
        return self.calibration.hot

    def to_json(self) -> dict[str, Any]:
        """Returns sizes, shares and times, as run.json, studies and `hotrow inspect` report them."""
        hot = self.rows
        return {
            "name": hot.how,
            "budget_bytes": self.calibration.budget_bytes,
            "hot_bytes": hot.num_bytes,
            "hot_rows": hot.num_rows,
            "tables": {name: rows.num_rows for name, rows in hot.rows.items()},
            **self.calibration.detail,
            "hot_samples": float(self.is_hot.mean()) if len(self.is_hot) else 0.0,
            "calibrate_s": self.calibration.seconds,
            "classify_s": self.classify_s,
        }


def find_hot(dataset: PackedDataset, calibration: Calibration) -> FoundHot:
    """Finds the training samples that a calibration makes hot."""
    start = time.perf_counter()
    is_hot = hot_samples(dataset, calibration.hot)
    return FoundHot(calibration, is_hot, time.perf_counter() - start)


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


# ---- covering
#
# A sample is hot only if all its rows are, so how much a row is worth depends on the rows that occur with it. Each
# table contributes a prefix of its rows; single rows are not chosen.

MAX_SAMPLES = 1 << 20
"""The largest number of training samples looked at."""
BINS_PER_OCTAVE, FINE_ROWS = 16, 64
"""The prefixes to choose among: every length up to FINE_ROWS, then BINS_PER_OCTAVE lengths per doubling."""


def _covering(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    """Returns hot rows by table, and how many samples were looked at. At least as many of those samples are hot as with
    the most accessed rows, because their prefixes are among the choices."""
    popular = most_accessed(tables, budget_bytes)
    edges = [
        np.array([len(t.counts)]) if t.is_small else np.union1d(prefixes_of(len(t.counts)), [n])
        for t, n in zip(tables, popular, strict=True)
    ]
    bins = _bins_of_samples(dataset, tables, edges, seed)
    sizes = [own * t.record_bytes for t, own in zip(tables, edges, strict=True)]
    by_count = [int(np.searchsorted(own, n)) for own, n in zip(edges, popular, strict=True)]
    cuts = most_covered(bins, sizes, budget_bytes, by_count)
    rows = {t.name: t.first(int(own[cut])) for t, own, cut in zip(tables, edges, cuts, strict=True)}
    return rows, {"samples": bins.shape[1]}


def prefixes_of(num_rows: int) -> NDArray[np.int64]:
    """Returns the lengths to choose among, rising; the last is the whole table."""
    octaves = max(0.0, math.log2(num_rows / FINE_ROWS))
    far = FINE_ROWS * 2 ** np.linspace(0, octaves, 1 + math.ceil(octaves * BINS_PER_OCTAVE))
    found = np.unique(np.concatenate([np.arange(1, FINE_ROWS), far.astype(np.int64), [num_rows]]))
    return found[found <= num_rows]


def _bins_of_samples(
    dataset: PackedDataset, tables: Sequence[TableUse], edges: Sequence[NDArray[np.int64]], seed: int
) -> NDArray[np.int16]:
    """Returns [tables, samples]: the index of the shortest prefix that holds all of a sample's rows of a table."""
    chosen = draw_samples(dataset, MAX_SAMPLES, seed=seed)
    number = {table.name: t for t, table in enumerate(tables)}
    bins = np.zeros((len(edges), len(chosen)), np.int16)
    start = 0
    for block, rows in samples_by_block(dataset, chosen):
        for feature, ids in zip(dataset.info.features, block.ids, strict=True):
            t = number[feature.table]
            own = bins[t, start : start + len(rows)]
            np.maximum(own, np.searchsorted(edges[t], _last_position(tables[t], ids, rows), "right"), out=own)
        start += len(rows)
    return bins


def most_covered(
    bins: NDArray[np.int16], sizes: Sequence[NDArray[np.int64]], budget_bytes: int, *others: Sequence[int]
) -> list[int]:
    """Returns for each table the index of a prefix, all within the budget, so that many samples are covered.

    bins: [tables, samples], the shortest prefix of each table that a sample needs. sizes: bytes of each table's
    prefixes, rising. others: choices within the budget, of which one is the starting point if it ends up covering more.

    This is a heuristic: a sample is a conjunction, which makes the best set hard to find.
    """
    found = [_shrink(bins, sizes, budget_bytes), *map(list, others)]
    for cuts in found:
        _fill(bins, sizes, cuts, budget_bytes - _num_bytes(sizes, cuts))
    return max(found, key=lambda cuts: int((bins <= np.array(cuts)[:, None]).all(axis=0).sum()))


def _num_bytes(sizes: Sequence[NDArray[np.int64]], cuts: Sequence[int]) -> int:
    return sum(int(size[cut]) for size, cut in zip(sizes, cuts, strict=True))


def _shrink(bins: NDArray[np.int16], sizes: Sequence[NDArray[np.int64]], budget_bytes: int) -> list[int]:
    """Starts from the prefixes that cover all samples, and shortens prefixes until they fit the budget. Each step
    shortens the table that loses fewest samples per byte saved. A sample that is lost no longer counts for the other
    tables. `_fill` uses the room that is left at the end."""
    cuts = [int(own.max(initial=0)) for own in bins]
    covered = np.ones(bins.shape[1], np.bool_)
    histograms = [np.bincount(own, minlength=len(size)) for own, size in zip(bins, sizes, strict=True)]
    while (excess := _num_bytes(sizes, cuts) - budget_bytes) > 0:
        t, cut = _cheapest(histograms, sizes, cuts, excess)
        lost = np.flatnonzero(covered & (bins[t] > cut))
        for histogram, own in zip(histograms, bins, strict=True):
            histogram -= np.bincount(own[lost], minlength=len(histogram))
        covered[lost] = False
        cuts[t] = cut
    return cuts


def _cheapest(
    histograms: Sequence[NDArray[np.int64]], sizes: Sequence[NDArray[np.int64]], cuts: Sequence[int], excess: int
) -> tuple[int, int]:
    """Returns the (table, new cut) that loses fewest covered samples per byte saved, up to `excess` bytes."""
    best = (math.inf, 0, 0)
    for t, (histogram, size, cut) in enumerate(zip(histograms, sizes, cuts, strict=True)):
        if cut == 0:
            continue
        lost = np.cumsum(histogram[cut:0:-1])  # by cutting to cut - 1, cut - 2, ..., 0
        saved = np.minimum(size[cut] - size[cut - 1 :: -1], excess)
        ratio = lost / saved
        k = int(ratio.argmin())
        best = min(best, (float(ratio[k]), t, cut - 1 - k))
    return best[1], best[2]


def _fill(bins: NDArray[np.int16], sizes: Sequence[NDArray[np.int64]], cuts: list[int], room: int) -> None:
    """Lengthens prefixes in `cuts`, each time the one that covers most samples per byte, while there is room."""
    beyond = np.stack([own > cut for own, cut in zip(bins, cuts, strict=True)])
    while True:
        best = (0.0, 0, 0)
        alone = beyond.sum(axis=0) == 1  # samples that only one table keeps from being covered
        for t, (size, cut) in enumerate(zip(sizes, cuts, strict=True)):
            gained = np.cumsum(np.bincount(bins[t, alone & beyond[t]], minlength=len(size))[cut + 1 :])
            cost = size[cut + 1 :] - size[cut]
            ratio = np.where(cost <= room, gained / np.maximum(cost, 1), 0.0)
            if len(ratio) and (top := float(ratio.max())) > best[0]:
                best = (top, t, cut + 1 + int(ratio.argmax()))
        if best[0] == 0.0:
            return
        _, t, cut = best
        room -= int(sizes[t][cut] - sizes[t][cuts[t]])
        cuts[t] = cut
        beyond[t] = bins[t] > cut


def _last_position(table: TableUse, ids: NDArray[Any] | Ragged, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Returns for each of these samples the last position in the table's order that it needs; 0 if it has no id."""
    if not isinstance(ids, Ragged):
        return table.positions(ids[rows])
    lengths = np.diff(ids.row_splits)
    last = np.zeros(len(lengths), np.int64)
    values = ids.values[ids.row_splits[0] : ids.row_splits[-1]]
    np.maximum.at(last, np.repeat(np.arange(len(lengths)), lengths), table.positions(values))
    return last[rows]


WAYS: dict[str, Callable[[PackedDataset, Sequence[TableUse], int, int], Found]] = {
    "exact": _exact,
    "sampled": _sampled,
    "covering": _covering,
}

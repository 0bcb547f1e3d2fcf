"""The hot set that makes most *samples* hot.

A sample is hot only if all its rows are, so how much a row is worth depends on the rows that occur with it. Each table
contributes a prefix of its rows; single rows are not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import Found, TableUse, draw_samples, most_accessed, samples_by_block

MOST_SAMPLES = 1 << 20
"""The largest number of training samples looked at."""
BINS_PER_OCTAVE, FINE_ROWS = 16, 64
"""The prefixes to choose among: every length up to FINE_ROWS, then BINS_PER_OCTAVE lengths per doubling."""


def covering(dataset: PackedDataset, tables: Sequence[TableUse], budget_bytes: int, seed: int) -> Found:
    """Returns hot rows by table, and how many samples were looked at.

    At least as many of those samples are hot as by the rows with most accesses, whose prefixes are among the choices.
    """
    popular = most_accessed(tables, budget_bytes)
    edges = [
        np.array([len(t.counts)]) if t.is_small else np.union1d(prefixes_of(len(t.counts)), [n])
        for t, n in zip(tables, popular, strict=True)
    ]
    bins = _bins_of_samples(dataset, tables, edges, seed)
    sizes = [own * t.record_bytes for t, own in zip(tables, edges, strict=True)]
    beside = [int(np.searchsorted(own, n)) for own, n in zip(edges, popular, strict=True)]
    cuts = most_covered(bins, sizes, budget_bytes, beside=beside)
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
    chosen = draw_samples(dataset, MOST_SAMPLES, seed=seed)
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
    bins: NDArray[np.int16],
    sizes: Sequence[NDArray[np.int64]],
    budget_bytes: int,
    *,
    beside: Sequence[int] | None = None,
) -> list[int]:
    """Returns for each table the index of a prefix, all within the budget, so that many samples are covered.

    bins: [tables, samples], the shortest prefix of each table that a sample needs. sizes: bytes of each table's
    prefixes, rising. beside: another choice within the budget, which is the starting point if it ends up covering more.

    This is a heuristic: a sample is a conjunction, which makes the best set hard to find.
    """
    found = [_shrink(bins, sizes, budget_bytes)]
    if beside is not None:
        found.append(list(beside))
    for cuts in found:
        _fill(bins, sizes, cuts, budget_bytes - _num_bytes(sizes, cuts))
    return max(found, key=lambda cuts: int((bins <= np.array(cuts)[:, None]).all(axis=0).sum()))


def _num_bytes(sizes: Sequence[NDArray[np.int64]], cuts: Sequence[int]) -> int:
    return sum(int(size[cut]) for size, cut in zip(sizes, cuts, strict=True))


def _shrink(bins: NDArray[np.int16], sizes: Sequence[NDArray[np.int64]], budget_bytes: int) -> list[int]:
    """Starts from the prefixes that cover all samples, and shortens prefixes until they fit the budget.

    Each step shortens the table that loses fewest samples per byte saved. A sample that is lost no longer counts for
    the other tables. `_fill` uses the room that is left at the end.
    """
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

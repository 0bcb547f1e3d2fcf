"""How hot rows age: what sets of hot rows, and caches of as many, serve of each part of the training split.

    whole      the rows of most accesses of the whole split: what `calibrate` finds, which has seen every part before
    first      those of the first part: a set chosen once, then kept
    lru        a cache of as many rows over all tables: every row accessed is admitted
    belady     the cache that hits most accesses of those that load a row when it is accessed; it knows the future

Sets are filled before they are asked, caches start empty and miss every row's first access: a set that knows the split
may serve more than any cache.

Samples are taken in stored order, in which a split by time keeps time; where that order is random there is no drift to
see, and the first part differs from the whole by its size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Ids, Ragged, slice_ids
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import calibrate
from hotrow.hot.classify import by_feature, hits_of
from hotrow.hot.hot_set import HotSet
from hotrow.hot.table_use import most_accessed, ranked
from hotrow.inspect.optimum import belady_hits, lru_hits

PARTS = 10
"""Into which the split is cut, unless told."""
MOST_PARTS = 1000
"""As many as a chart can show."""
BATCH_SIZE = 2048
"""Samples looked at together."""
MOST_ACCESSES = 1 << 26
"""Accesses for which caches are run: they need about 25 bytes each."""


@dataclass
class Served:
    """Of one part, what a set or a cache served."""

    samples: int = 0
    """Samples of which it had every row."""
    accesses: int = 0


def measure_drift(
    dataset: PackedDataset, budget_bytes: int, *, record_bytes: Mapping[str, int], parts: int = PARTS, seed: int = 0
) -> dict[str, Any]:
    """The fields of `drift` in docs/inspect.md. record_bytes: of a row of each table, optimizer state included.

    parts: into which the split is cut, of as many samples but for one; no more than there are samples. Raises
    ValueError for fewer than two, where the split has no samples and where `calibrate` does.
    """
    check_parts(parts)
    split = dataset.split("train")
    if split.num_rows == 0:
        raise ValueError(f"{dataset.path}: the training split has no rows, so nothing can drift in it")
    edges = np.linspace(0, split.num_rows, min(parts, split.num_rows) + 1).astype(np.int64).tolist()
    spans = list(pairwise(edges))
    whole = calibrate(dataset, "exact", budget_bytes, record_bytes=record_bytes, seed=seed).hot
    sets = {"whole": whole, "first": _of_part(dataset, spans[0], budget_bytes, record_bytes)}
    found = [_part(dataset, span, sets) for span in spans]
    caches = _caches(dataset, spans, found, budget_bytes, record_bytes)
    return {"budget_bytes": budget_bytes, **caches, "parts": [_shares(own) for own in found]}


def check_parts(parts: int) -> None:
    """Raises ValueError for what shows no change, and for more than a chart can."""
    if not 2 <= parts <= MOST_PARTS:
        raise ValueError(
            f"parts is {parts}; how hot rows age is seen over 2 to {MOST_PARTS:,} parts of the training split"
        )


def _shares(part: Mapping[str, Any]) -> dict[str, Any]:
    samples, accesses = part["samples"], part["accesses"]
    shares = {
        name: {"hot_samples": own.samples / samples, "hot_accesses": own.accesses / accesses if accesses else 0.0}
        for name, own in part.items()
        if isinstance(own, Served)
    }
    return {"samples": samples, "accesses": accesses, **shares}


# ---- sets of rows


def slices_of(dataset: PackedDataset, start: int, stop: int) -> Iterator[tuple[list[Ids], int]]:
    """(ids by feature, how many samples) of the training samples from `start` to `stop`, BATCH_SIZE at most."""
    split = dataset.split("train")
    firsts = [0, *np.cumsum(split.block_rows).tolist()]
    for index, (first, last) in enumerate(pairwise(firsts)):
        low, high = max(start, first), min(stop, last)
        for at in range(low, high, BATCH_SIZE):
            end = min(at + BATCH_SIZE, high)
            yield [slice_ids(ids, at - first, end - first) for ids in split.block(index).ids], end - at


def flat_ids(ids: Ids) -> NDArray[Any]:
    return ids.values if isinstance(ids, Ragged) else ids


def _of_part(
    dataset: PackedDataset, part: tuple[int, int], budget_bytes: int, record_bytes: Mapping[str, int]
) -> HotSet:
    """The rows of most accesses per byte in one part."""
    counts = {table.name: np.zeros(table.num_embeddings, np.int64) for table in dataset.info.tables}
    for columns, _ in slices_of(dataset, *part):
        for feature, ids in zip(dataset.info.features, columns, strict=True):
            np.add.at(counts[feature.table], flat_ids(ids), 1)
    tables = [ranked(name, record_bytes[name], own) for name, own in counts.items()]
    rows = {t.name: t.first(n) for t, n in zip(tables, most_accessed(tables, budget_bytes), strict=True)}
    return HotSet(how="exact", rows=rows, record_bytes=record_bytes)


def _part(dataset: PackedDataset, part: tuple[int, int], sets: Mapping[str, HotSet]) -> dict[str, Any]:
    """What each set serves of a part."""
    rows = {name: by_feature(dataset, hot.rows) for name, hot in sets.items()}
    found: dict[str, Any] = {"samples": part[1] - part[0], "accesses": 0, **{name: Served() for name in sets}}
    for columns, num_samples in slices_of(dataset, *part):
        found["accesses"] += sum(len(flat_ids(ids)) for ids in columns)
        for name, own in rows.items():
            is_hot, num_hits = hits_of(columns, own, num_samples)
            found[name].samples += int(is_hot.sum())
            found[name].accesses += num_hits
    return found


# ---- caches


def _caches(
    dataset: PackedDataset,
    parts: Sequence[tuple[int, int]],
    found: Sequence[dict[str, Any]],
    budget_bytes: int,
    record_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """Adds to each part of `found` what caches serve of it; says how many rows they hold, or why none was run."""
    sizes = {record_bytes[table.name] for table in dataset.info.tables}
    num_accesses, num_rows = sum(own["accesses"] for own in found), sum(t.num_embeddings for t in dataset.info.tables)
    if len(sizes) > 1:
        return {"caches": "not run: rows of different tables differ in bytes, so no number of rows is the budget"}
    if num_accesses > MOST_ACCESSES or num_rows >= 1 << 32:
        return {"caches": f"not run: {num_accesses:,} accesses of {num_rows:,} rows, above {MOST_ACCESSES:,} accesses"}
    capacity = budget_bytes // sizes.pop()
    pieces = [_in_order(dataset, *piece) for piece in slices_of(dataset, 0, dataset.split("train").num_rows)]
    rows = np.concatenate([own for own, _ in pieces])
    ends = np.cumsum(np.concatenate([lengths for _, lengths in pieces]))
    for name, hits in (
        ("lru", lru_hits(rows, num_rows, capacity)),
        ("belady", belady_hits(rows, num_rows, capacity)),
    ):
        upto = np.concatenate([[0], np.cumsum(hits)])
        served = np.diff(upto[ends], prepend=0)  # by sample
        wanted = np.diff(ends, prepend=0)
        for (start, stop), own in zip(parts, found, strict=True):
            all_hit = served[start:stop] == wanted[start:stop]
            own[name] = Served(int(all_hit.sum()), int(served[start:stop].sum()))
    return {"caches": "run", "cache_rows": capacity}


def _in_order(
    dataset: PackedDataset, columns: Sequence[Ids], num_samples: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All rows looked up, numbered through the tables, sample after sample; how many each sample looks up."""
    firsts, first = {}, 0
    for table in dataset.info.tables:
        firsts[table.name] = first
        first += table.num_embeddings
    rows, samples = [], []
    for feature, ids in zip(dataset.info.features, columns, strict=True):
        rows.append(flat_ids(ids).astype(np.int64) + firsts[feature.table])
        lengths = np.diff(ids.row_splits) if isinstance(ids, Ragged) else np.ones(num_samples, np.int64)
        samples.append(np.repeat(np.arange(num_samples), lengths))
    sample = np.concatenate(samples)
    order = np.argsort(sample, kind="stable")
    return np.concatenate(rows)[order].astype(np.uint32), np.bincount(sample, minlength=num_samples)

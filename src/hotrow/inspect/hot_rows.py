"""What `hotrow inspect --hot` measures: the three ways to choose hot rows side by side, and how hot rows age.

Ageing (`--drift`) asks for each part of the training split what these would have served of it:

    whole      the rows with most accesses in the whole split: what `calibrate` finds, knowing every part beforehand
    first      those of the first part: a set that is chosen once and kept
    lru        a cache of as many rows over all tables, to which every accessed row is admitted
    belady     the best cache among those that load a row when it is accessed; it knows the future

Sets are filled before the first access, but caches start empty and miss the first access of every row, so a set that
knows the split may serve more than any cache.

Samples are taken in stored order. If the split was made by time, that is the order of time. If the order is random,
there is no drift to see, and the first part differs from the whole only because it is smaller.
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
from hotrow.hot.calibrate import WAYS, calibrate, find_hot
from hotrow.hot.hot_set import HotSet, by_feature, hits_of, most_accessed, ranked
from hotrow.inspect.reuse import belady_hits, lru_hits
from hotrow.kernels.reference import Algorithm
from hotrow.plan.demand import record_bytes

PARTS = 10
"""How many parts the split is cut into by default."""
MOST_PARTS = 1000
"""The most parts that a chart can show."""
BATCH_SIZE = 2048
"""Samples looked at together."""
MOST_ACCESSES = 1 << 26
"""Caches are simulated for up to this many accesses; each access takes about 25 bytes of memory."""


# ---- the three ways


def record_bytes_of(dataset: PackedDataset, *, embedding_dim: int, optimizer: Algorithm) -> dict[str, int]:
    """Returns the bytes of a row of each table: float32 weights and optimizer state.

    Raises ValueError for an unknown optimizer.
    """
    return {table.name: record_bytes(table, optimizer) for table in dataset.table_configs(embedding_dim)}


def compare_ways(
    dataset: PackedDataset, budget_bytes: int, *, embedding_dim: int, optimizer: Algorithm = "sgd", seed: int = 0
) -> dict[str, Any]:
    """Tries every way within the same budget; docs/inspect.md lists the fields.

    If a way finds no hot set within the budget, its field `error` says why. Raises ValueError if no way can.
    """
    record_bytes = record_bytes_of(dataset, embedding_dim=embedding_dim, optimizer=optimizer)
    ways = []
    for how in WAYS:
        try:
            calibration = calibrate(dataset, how, budget_bytes, record_bytes=record_bytes, seed=seed)
        except ValueError as error:
            if how != "sampled":  # the others fail only if no way can succeed
                raise
            ways.append({"name": how, "budget_bytes": budget_bytes, "error": str(error)})
            continue
        found = find_hot(dataset, calibration)
        ways.append({**found.to_json(), **_accesses(dataset, found.rows)})
    return {"budget_bytes": budget_bytes, "optimizer": optimizer, "embedding_dim": embedding_dim, "ways": ways}


def _accesses(dataset: PackedDataset, hot: HotSet) -> Mapping[str, float]:
    """Returns the share of the training accesses that fall on hot rows; nothing if the dataset carries no counts."""
    if not dataset.has_counts:
        return {}
    counts = {name: dataset.counts(name) for name in hot.rows}
    hits = sum(
        int(counts[name][: rows.prefix].sum(dtype="u8")) + int(counts[name][rows.listed].sum(dtype="u8"))
        for name, rows in hot.rows.items()
    )
    total = sum(int(own.sum(dtype="u8")) for own in counts.values())
    return {"hot_accesses": hits / total if total else 0.0}


# ---- how hot rows age


@dataclass
class Served:
    """What a set or a cache served of one part."""

    samples: int = 0
    """Samples whose rows it had, every one."""
    accesses: int = 0


def measure_drift(
    dataset: PackedDataset, budget_bytes: int, *, record_bytes: Mapping[str, int], parts: int = PARTS, seed: int = 0
) -> dict[str, Any]:
    """Measures how hot rows age; returns the fields of `drift` in docs/inspect.md.

    record_bytes: of a row of each table, optimizer state included. parts: the split is cut into this many parts of
    equal size, or into as many as it has samples. Raises ValueError for fewer than two parts, if the split has no
    samples, and whenever `calibrate` does.
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
    """Raises ValueError for a number of parts that shows no change, or that a chart cannot show."""
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


def _of_part(
    dataset: PackedDataset, part: tuple[int, int], budget_bytes: int, record_bytes: Mapping[str, int]
) -> HotSet:
    """Returns the rows with most accesses per byte in one part."""
    counts = {table.name: np.zeros(table.num_embeddings, np.int64) for table in dataset.info.tables}
    for columns, _ in slices_of(dataset, *part):
        for feature, ids in zip(dataset.info.features, columns, strict=True):
            np.add.at(counts[feature.table], flat_ids(ids), 1)
    tables = [ranked(name, record_bytes[name], own) for name, own in counts.items()]
    rows = {t.name: t.first(n) for t, n in zip(tables, most_accessed(tables, budget_bytes), strict=True)}
    return HotSet(how="exact", rows=rows, record_bytes=record_bytes)


def _part(dataset: PackedDataset, part: tuple[int, int], sets: Mapping[str, HotSet]) -> dict[str, Any]:
    """Returns what each set serves of a part."""
    rows = {name: by_feature(dataset, hot.rows) for name, hot in sets.items()}
    found: dict[str, Any] = {"samples": part[1] - part[0], "accesses": 0, **{name: Served() for name in sets}}
    for columns, num_samples in slices_of(dataset, *part):
        found["accesses"] += sum(len(flat_ids(ids)) for ids in columns)
        for name, own in rows.items():
            is_hot, num_hits = hits_of(columns, own, num_samples)
            found[name].samples += int(is_hot.sum())
            found[name].accesses += num_hits
    return found


def _caches(
    dataset: PackedDataset,
    parts: Sequence[tuple[int, int]],
    found: Sequence[dict[str, Any]],
    budget_bytes: int,
    record_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """Adds what caches serve to each part of `found`; returns how many rows they hold, or why none was simulated."""
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
    """Returns all rows looked up, sample after sample and numbered across tables, and how many each sample looks up."""
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

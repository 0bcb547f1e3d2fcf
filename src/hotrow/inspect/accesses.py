"""The rows of each table that are looked up, batch by batch, in the stored order of a split of a packed dataset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Ids, Ragged, concatenate_ids, slice_ids
from hotrow.data.packed.reader import PackedDataset, Split

COUNTED_SAMPLES = 1 << 18
"""Samples counted at a time if a dataset has no counts."""
BatchIds = Iterator[NDArray[Any]]


@dataclass(frozen=True)
class TableAccesses:
    """One table's lookups."""

    name: str
    num_embeddings: int
    features: tuple[str, ...]
    batches: Callable[[int], BatchIds]
    """batch size in samples -> the ids of each batch, int32 or int64 [n]; the last batch may be smaller."""
    counts: NDArray[np.unsignedinteger[Any]]
    """Accesses of each row, hottest first."""
    num_rare: int = 0
    """Accesses of row 0 of a packed dataset. Many ids share it, so it is not in `counts`: no single row is that hot."""


@dataclass(frozen=True)
class Accesses:
    """All lookups of a split."""

    name: str
    num_samples: int
    tables: tuple[TableAccesses, ...]


def first_batches(accesses: Accesses, num_batches: int, *, batch_size: int) -> Accesses:
    """Keeps the first `num_batches` of every table; counts still include all batches. Raises ValueError below 1."""
    if num_batches < 1:
        raise ValueError(f"batches is {num_batches}; read at least 1")

    def shorter(table: TableAccesses) -> TableAccesses:
        return replace(table, batches=lambda size: islice(table.batches(size), num_batches))

    num_samples = min(accesses.num_samples, num_batches * batch_size)
    return replace(accesses, num_samples=num_samples, tables=tuple(map(shorter, accesses.tables)))


def split_accesses(dataset: PackedDataset, name: str = "train") -> Accesses:
    """Returns every table's lookups in the split `name`; the counts always come from the training split."""
    split = dataset.split(name)
    if split.num_rows == 0:
        full = [other for other, rows in dataset.splits.items() if rows.num_rows] or ["none"]
        raise ValueError(
            f"{dataset.path}: split {name!r} has no rows, so no accesses; splits with rows: {', '.join(full)}"
        )
    if not dataset.has_counts:
        text = "carries no counts: its training split is counted, each time again; hotrow prepare counts once"
        warnings.warn(f"{dataset.path} {text}", stacklevel=3)
    return Accesses(
        name=dataset.info.name,
        num_samples=split.num_rows,
        tables=tuple(_table_accesses(dataset, split, table.name) for table in dataset.info.tables),
    )


def _table_accesses(dataset: PackedDataset, split: Split, table: str) -> TableAccesses:
    features = dataset.info.features
    columns = [j for j, feature in enumerate(features) if feature.table == table]
    own = dataset.info.table_by_name[table]
    counts = dataset.counts(table) if own.counts_file in dataset.info.files else _counted(dataset, table, columns)
    if own.parent is not None:  # rows of later days are behind older ones
        counts = _falling(counts)
    return TableAccesses(
        name=table,
        num_embeddings=dataset.info.table_by_name[table].num_embeddings,
        features=tuple(features[j].name for j in columns),
        batches=lambda batch_size: _split_batches(split, columns, batch_size),
        counts=counts[1:],
        num_rare=int(counts[0]) if len(counts) else 0,
    )


def _counted(dataset: PackedDataset, table: str, columns: list[int]) -> NDArray[np.unsignedinteger[Any]]:
    """Counts a table's accesses by the training split, as counts/ has them: row 0 first, then falling."""
    counts = np.zeros(dataset.info.table_by_name[table].num_embeddings, np.int64)
    for ids in _split_batches(dataset.split("train"), columns, COUNTED_SAMPLES):
        counts += np.bincount(ids, minlength=len(counts))
    return _falling(counts).astype(np.uint64)


def _falling(counts: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([counts[:1], np.sort(counts[1:])[::-1]])


def _split_batches(split: Split, columns: list[int], batch_size: int) -> BatchIds:
    """Yields the ids of the features `columns` batch by batch, feature after feature, in the order of a lookup."""
    rest: list[Ids] | None = None
    for index in range(split.num_blocks):
        ids = split.block(index).ids
        found = [ids[j] for j in columns]
        if rest is not None:
            found = [concatenate_ids([old, new]) for old, new in zip(rest, found, strict=True)]
        num_rows = _num_rows(found[0])
        full = num_rows - num_rows % batch_size
        for start in range(0, full, batch_size):
            yield _flat([slice_ids(column, start, start + batch_size) for column in found])
        rest = [slice_ids(column, full, num_rows) for column in found]
    if rest is not None and _num_rows(rest[0]):
        yield _flat(rest)


def _num_rows(ids: Ids) -> int:
    return len(ids.row_splits) - 1 if isinstance(ids, Ragged) else len(ids)


def _flat(columns: list[Ids]) -> NDArray[Any]:
    arrays = [column.values if isinstance(column, Ragged) else column for column in columns]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

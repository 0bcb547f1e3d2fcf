"""Which rows are hot: for each table a prefix of its rows and a list of others; and which samples that makes hot.

`TableUse` holds a table's rows in the order of their accesses by the training split, all of it or a sample. The ways to
choose hot rows (calibrate.py) start from it. A sample is hot if all its lookups, in every table and with multi-hot
entries included, find hot rows. One comparison per id is enough, because hot rows are a prefix plus a list.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.data.packed.format import Block, Ragged
from hotrow.data.packed.reader import PackedDataset

SMALL_TABLE_BYTES = 1 << 20
"""Tables below this size are hot whole, as in FAE: they take little memory for as many lookups as others."""


def is_small(num_rows: int, record_bytes: int, small_table_bytes: int = SMALL_TABLE_BYTES) -> bool:
    """Returns whether a table is hot whole."""
    return num_rows * record_bytes < small_table_bytes


def check_budget(
    tables: Iterable[tuple[int, int]], budget_bytes: int, small_table_bytes: int = SMALL_TABLE_BYTES
) -> None:
    """Raises ValueError if the budget does not hold the small tables and one row of every other table. tables: the
    number of rows, and the bytes of a row, of each table."""
    least = sum(record_bytes * (n if is_small(n, record_bytes, small_table_bytes) else 1) for n, record_bytes in tables)
    if least > budget_bytes:
        raise ValueError(
            f"a hot set of {budget_bytes:,} bytes is too small: tables below {small_table_bytes:,} bytes, which are "
            f"hot whole, and a row of each other table take {least:,}; raise the budget by "
            f"{least - budget_bytes:,} bytes"
        )


@dataclass(frozen=True)
class HotRows:
    """The hot rows of one table: rows [0, prefix) and those in `listed`, which rise and start at `prefix` or later."""

    prefix: int
    listed: NDArray[np.int64]

    @classmethod
    def of(cls, rows: NDArray[Any]) -> HotRows:
        """Makes hot rows from rising row numbers; the longest prefix among them becomes `prefix`."""
        prefix = int(np.searchsorted(rows - np.arange(len(rows)), 1))
        return cls(prefix, rows[prefix:].astype(np.int64))

    @classmethod
    def first(cls, prefix: int) -> HotRows:
        """Makes the first `prefix` rows hot, and no others."""
        return cls(prefix, np.empty(0, np.int64))

    @property
    def num_rows(self) -> int:
        return self.prefix + len(self.listed)

    @cached_property
    def _is_listed(self) -> NDArray[np.bool_]:
        found = np.zeros(int(self.listed[-1]) + 2 if len(self.listed) else 1, np.bool_)
        found[self.listed] = True
        return found

    def contains(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns for each id whether its row is hot [n]."""
        hot: NDArray[np.bool_] = ids < self.prefix
        if len(self.listed):
            hot |= self._is_listed[np.minimum(ids, len(self._is_listed) - 1)]
        return hot


@dataclass(frozen=True, kw_only=True)
class HotSet:
    """The hot rows of all tables, and the memory they take."""

    how: str
    """How they were chosen: exact | sampled | covering."""
    rows: Mapping[str, HotRows]
    """By table."""
    record_bytes: Mapping[str, int]
    """Bytes of one row of each table: weights and optimizer state."""

    @property
    def num_rows(self) -> int:
        return sum(rows.num_rows for rows in self.rows.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that the hot rows take on the device, optimizer state included."""
        return sum(rows.num_rows * self.record_bytes[name] for name, rows in self.rows.items())

    def prefixes(self, *, ranked: bool) -> dict[str, int]:
        """Returns by table how many of its first rows to hold for hot batches, no more than there are hot rows.

        ranked: whether rows are numbered by popularity. Then hot rows that are not the first ones come from a sample of
        the accesses, and as many of the first rows serve more lookups; otherwise only the first rows that are all hot.
        """
        return {name: rows.num_rows if ranked else rows.prefix for name, rows in self.rows.items()}

    def num_beyond(self, prefixes: Mapping[str, int]) -> int:
        """Returns how many hot rows are not among the given numbers of first rows of their tables."""
        found = 0
        for name, rows in self.rows.items():
            found += max(0, rows.prefix - prefixes[name]) + int(np.count_nonzero(rows.listed >= prefixes[name]))
        return found


Found = tuple[dict[str, HotRows], dict[str, Any]]
"""What a way to choose hot rows returns: the rows by table, and further facts for the report."""


# ---- how tables are used


@dataclass(frozen=True)
class TableUse:
    """One table's rows, most accessed first; row 0, which stands for all rare ids, comes before them."""

    name: str
    record_bytes: int
    counts: NDArray[Any]
    """Accesses of the row at each position [N], falling from the second on."""
    order: NDArray[np.int64] | None
    """The row at each position; None if rows are numbered in this order already."""
    small_table_bytes: int = SMALL_TABLE_BYTES

    @property
    def is_small(self) -> bool:
        """Whether the table is hot whole."""
        return is_small(len(self.counts), self.record_bytes, self.small_table_bytes)

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        assert self.order is not None
        positions = np.empty_like(self.order)
        positions[self.order] = np.arange(len(self.order))
        return positions

    def positions(self, ids: NDArray[Any]) -> NDArray[Any]:
        return ids if self.order is None else self._positions[ids]

    def first(self, num_rows: int) -> HotRows:
        """Makes the rows at the first `num_rows` positions hot."""
        return HotRows.first(num_rows) if self.order is None else HotRows.of(np.sort(self.order[:num_rows]))


def tables_of(
    dataset: PackedDataset, record_bytes: Mapping[str, int], *, small_table_bytes: int = SMALL_TABLE_BYTES
) -> list[TableUse]:
    """Returns how each table is used, by the counts of `counts_of`."""
    counts = counts_of(dataset)
    if dataset.is_ranked:
        return [TableUse(name, record_bytes[name], own, None, small_table_bytes) for name, own in counts.items()]
    return [ranked(name, record_bytes[name], own, small_table_bytes) for name, own in counts.items()]


def counts_of(dataset: PackedDataset) -> dict[str, NDArray[Any]]:
    """Returns the accesses of each row. If the dataset has no counts, counts its training split, with a warning."""
    if dataset.has_counts:
        return {table.name: dataset.counts(table.name) for table in dataset.info.tables}
    warnings.warn(
        f"{dataset.path} carries no counts: its training split is counted now, and each time again", stacklevel=4
    )
    return count_accesses(dataset, 1.0, seed=0)


def ranked(name: str, record_bytes: int, counts: NDArray[Any], small_table_bytes: int = SMALL_TABLE_BYTES) -> TableUse:
    """Puts a table's rows in the order of their accesses. counts: by row number."""
    order = np.concatenate([[0], 1 + np.argsort(-counts[1:].astype(np.int64), kind="stable")])
    return TableUse(name, record_bytes, counts[order], order, small_table_bytes)


def most_accessed(tables: Sequence[TableUse], budget_bytes: int) -> list[int]:
    """Returns how many rows of each table to take so that the rows with most accesses per byte fill the budget. Between
    rows with equally many accesses per byte, those of the first table win."""
    rising = [t.counts[:0:-1] for t in tables]

    def all_at(density: float) -> list[int]:
        """Returns how many rows of each table have at least this many accesses per byte."""
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
    for k, t in enumerate(tables):  # the room that is left takes rows without accesses, if their table then fits whole
        if (len(t.counts) - found[k]) * t.record_bytes <= budget_bytes - num_bytes(found):
            found[k] = len(t.counts)
    return found


def count_accesses(dataset: PackedDataset, share: float, *, seed: int) -> dict[str, NDArray[np.int64]]:
    """Counts the accesses of each row by a random `share` of the training samples, drawn without replacement."""
    num_samples = dataset.split("train").num_rows
    chosen = draw_samples(dataset, max(1, round(share * num_samples)), seed=seed)
    counts = {table.name: np.zeros(table.num_embeddings, np.int64) for table in dataset.info.tables}
    for block, rows in samples_by_block(dataset, chosen):
        for feature, ids in zip(dataset.info.features, block.ids, strict=True):
            np.add.at(counts[feature.table], _ids_of(ids, rows), 1)
    return counts


def draw_samples(dataset: PackedDataset, num_samples: int, *, seed: int) -> NDArray[np.int64]:
    """Draws that many training samples, or all if there are no more; returns their numbers, rising."""
    all_samples = dataset.split("train").num_rows
    if num_samples >= all_samples:
        return np.arange(all_samples)
    return np.sort(np.random.default_rng(seed).choice(all_samples, num_samples, replace=False, shuffle=False))


def samples_by_block(dataset: PackedDataset, chosen: NDArray[np.int64]) -> Iterator[tuple[Block, NDArray[np.int64]]]:
    """Yields each block that holds some of the `chosen` training samples (rising), with their numbers in the block."""
    split = dataset.split("train")
    starts = np.concatenate([[0], np.cumsum(split.block_rows)])
    cuts = np.searchsorted(chosen, starts)
    for index in range(split.num_blocks):
        if cuts[index] < cuts[index + 1]:
            yield split.block(index), chosen[cuts[index] : cuts[index + 1]] - starts[index]


def _ids_of(ids: NDArray[Any] | Ragged, rows: NDArray[np.int64]) -> NDArray[Any]:
    if not isinstance(ids, Ragged):
        return ids[rows]
    picked = np.zeros(len(ids.row_splits) - 1, np.bool_)
    picked[rows] = True
    return ids.values[np.repeat(picked, np.diff(ids.row_splits))]


# ---- hot samples


def hot_samples(dataset: PackedDataset, hot: HotSet, *, threads: int | None = None) -> NDArray[np.bool_]:
    """Returns for each training sample whether it is hot; one without ids is hot. Reads the training split once,
    `threads` blocks at a time. Raises ValueError if the hot set lacks a table."""
    split, tables = dataset.split("train"), [feature.table for feature in dataset.info.features]
    if absent := [table for table in tables if table not in hot.rows]:
        raise ValueError(f"the hot set has no table {absent[0]!r}; it has {', '.join(hot.rows) or 'none'}")
    rows = [hot.rows[table] for table in tables]
    # In threads, because numpy releases the interpreter in long loops.
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        pieces = pool.map(lambda index: is_hot(split.block(index), rows), range(split.num_blocks))
        return np.concatenate([np.empty(0, np.bool_), *pieces])


def is_hot(block: Block, rows: list[HotRows]) -> NDArray[np.bool_]:
    """Returns for each sample of a block whether it is hot. rows: the hot rows for each feature."""
    hot = np.ones(len(block.label), np.bool_)
    for ids, own in zip(block.ids, rows, strict=True):
        found = own.contains(ids.values if isinstance(ids, Ragged) else ids)
        hot &= _every(found, ids.row_splits) if isinstance(ids, Ragged) else found
    return hot


def _every(found: NDArray[np.bool_], row_splits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns for each sample whether all its lookups were found."""
    cold = np.concatenate([[0], np.cumsum(~found)])
    return np.asarray(cold[row_splits[1:]] == cold[row_splits[:-1]])

"""How a dataset's tables are used in training: the accesses of every row, of all samples or of some."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Block, Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotRows, is_small

Found = tuple[dict[str, HotRows], dict[str, Any]]
"""Hot rows by table, and what else a way to find them has to say."""


@dataclass(frozen=True)
class TableUse:
    """One table's rows in the order of their accesses by the training split, row 0, of all rare ids, first."""

    name: str
    record_bytes: int
    counts: NDArray[Any]
    """Accesses, falling from the second on [N]."""
    order: NDArray[np.int64] | None
    """The row at each place; None: rows are numbered so already."""
    small_table_bytes: int = SMALL_TABLE_BYTES
    """Below, it is hot whole."""

    @property
    def is_small(self) -> bool:
        """Whether the table is hot whole."""
        return is_small(len(self.counts), self.record_bytes, self.small_table_bytes)

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        assert self.order is not None
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    def places(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Of rows, their places in the order."""
        return ids if self.order is None else self._places[ids]

    def first(self, num_rows: int) -> HotRows:
        """The rows at the first `num_rows` places."""
        return HotRows.first(num_rows) if self.order is None else HotRows.of(np.sort(self.order[:num_rows]))


def tables_of(
    dataset: PackedDataset, record_bytes: Mapping[str, int], *, small_table_bytes: int = SMALL_TABLE_BYTES
) -> list[TableUse]:
    """The tables with their counts, as `counts_of` finds them."""
    counts = counts_of(dataset)
    if dataset.has_counts:
        return [TableUse(name, record_bytes[name], own, None, small_table_bytes) for name, own in counts.items()]
    return [ranked(name, record_bytes[name], own, small_table_bytes) for name, own in counts.items()]


def counts_of(dataset: PackedDataset) -> dict[str, NDArray[Any]]:
    """Accesses of each row; where the dataset carries none its training split is counted, with a warning."""
    if dataset.has_counts:
        return {table.name: dataset.counts(table.name) for table in dataset.info.tables}
    warnings.warn(f"{dataset.path} carries no counts: its training split is counted, each time anew", stacklevel=4)
    return count_accesses(dataset, 1.0, seed=0)


def ranked(
    name: str, record_bytes: int, counts: NDArray[np.int64], small_table_bytes: int = SMALL_TABLE_BYTES
) -> TableUse:
    """A table by its accesses, row by row."""
    order = np.concatenate([[0], 1 + np.argsort(-counts[1:], kind="stable")])
    return TableUse(name, record_bytes, counts[order], order, small_table_bytes)


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


def count_accesses(dataset: PackedDataset, share: float, *, seed: int) -> dict[str, NDArray[np.int64]]:
    """Accesses of each row by a random `share` of the training samples, drawn without replacement."""
    num_samples = dataset.split("train").num_rows
    chosen = draw_samples(dataset, max(1, round(share * num_samples)), seed=seed)
    counts = {table.name: np.zeros(table.num_embeddings, np.int64) for table in dataset.info.tables}
    for block, rows in samples_by_block(dataset, chosen):
        for feature, ids in zip(dataset.info.features, block.ids, strict=True):
            np.add.at(counts[feature.table], _ids_of(ids, rows), 1)
    return counts


def draw_samples(dataset: PackedDataset, num_samples: int, *, seed: int) -> NDArray[np.int64]:
    """Numbers of that many training samples, or of all there are, rising."""
    all_samples = dataset.split("train").num_rows
    if num_samples >= all_samples:
        return np.arange(all_samples)
    return np.sort(np.random.default_rng(seed).choice(all_samples, num_samples, replace=False, shuffle=False))


def samples_by_block(dataset: PackedDataset, chosen: NDArray[np.int64]) -> Iterator[tuple[Block, NDArray[np.int64]]]:
    """(block, numbers in it) of training samples `chosen`, rising."""
    split = dataset.split("train")
    starts = np.concatenate([[0], np.cumsum(split.block_rows)])
    cuts = np.searchsorted(chosen, starts)
    for index in range(split.num_blocks):
        if cuts[index] < cuts[index + 1]:
            yield split.block(index), chosen[cuts[index] : cuts[index + 1]] - starts[index]


def _ids_of(ids: NDArray[Any] | Ragged, rows: NDArray[np.int64]) -> NDArray[Any]:
    """All ids of these samples."""
    if not isinstance(ids, Ragged):
        return ids[rows]
    picked = np.zeros(len(ids.row_splits) - 1, np.bool_)
    picked[rows] = True
    return ids.values[np.repeat(picked, np.diff(ids.row_splits))]

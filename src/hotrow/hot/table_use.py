"""How a dataset's tables are used in training: the accesses of every row, of all samples or of some."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed_format import Block, Ragged
from hotrow.data.packed_reader import PackedDataset
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
    """The tables with their counts; where the dataset carries none its training split is counted, with a warning."""
    if dataset.has_counts:
        names = [table.name for table in dataset.info.tables]
        return [TableUse(name, record_bytes[name], dataset.counts(name), None, small_table_bytes) for name in names]
    warnings.warn(f"{dataset.path} carries no counts: its training split is counted, each time anew", stacklevel=3)
    counts = count_accesses(dataset, 1.0, seed=0)
    return [ranked(name, record_bytes[name], own, small_table_bytes) for name, own in counts.items()]


def ranked(
    name: str, record_bytes: int, counts: NDArray[np.int64], small_table_bytes: int = SMALL_TABLE_BYTES
) -> TableUse:
    """A table by its accesses, row by row."""
    order = np.concatenate([[0], 1 + np.argsort(-counts[1:], kind="stable")])
    return TableUse(name, record_bytes, counts[order], order, small_table_bytes)


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

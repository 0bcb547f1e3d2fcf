"""Which samples are hot: those of whose lookups, of every table, multi-hot entries included, none is cold.

A comparison per id: rows are numbered by popularity, so hot rows are a prefix but for a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.data.packed.format import Block, Ids, Ragged
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.hot.hot_set import HotRows, HotSet


def hot_samples(
    dataset: PackedDataset, hot: HotSet, *, split: str = "train", threads: int | None = None
) -> NDArray[np.bool_]:
    """bool [rows of the split]: whether a sample is hot. A sample without any id is.

    Reads the split once, `threads` blocks at a time. Raises ValueError where the hot set lacks a table.
    """
    rows = by_feature(dataset, hot.rows)
    pieces = list(_blocks(dataset.split(split), lambda block: is_hot(block, rows), threads))
    return np.concatenate([np.empty(0, np.bool_), *pieces])


def is_hot(block: Block, rows: list[HotRows]) -> NDArray[np.bool_]:
    """Of each sample of a block; rows: the hot ones, for each feature."""
    return hits_of(block.ids, rows, len(block.label))[0]


def hits_of(columns: Sequence[Ids], rows: Sequence[HotRows], num_samples: int) -> tuple[NDArray[np.bool_], int]:
    """Of each of these samples whether it is hot, and how many lookups are; columns, rows: by feature."""
    hot = np.ones(num_samples, np.bool_)
    num_hits = 0
    for ids, own in zip(columns, rows, strict=True):
        found = own.contains(ids.values if isinstance(ids, Ragged) else ids)
        num_hits += int(np.count_nonzero(found))
        hot &= _every(found, ids.row_splits) if isinstance(ids, Ragged) else found
    return hot, num_hits


def _every(found: NDArray[np.bool_], row_splits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each sample, whether all of its lookups were found."""
    cold = np.concatenate([[0], np.cumsum(~found)])
    return np.asarray(cold[row_splits[1:]] == cold[row_splits[:-1]])


def by_feature(dataset: PackedDataset, rows: Mapping[str, HotRows]) -> list[HotRows]:
    """The hot rows that each feature looks up in."""
    for feature in dataset.info.features:
        if feature.table not in rows:
            raise ValueError(f"the hot set has no table {feature.table!r}; it has {', '.join(rows) or 'none'}")
    return [rows[feature.table] for feature in dataset.info.features]


def _blocks(split: Split, work: Any, threads: int | None) -> Iterator[Any]:
    """`work` of every block, in their order, by several threads: numpy lets go of the interpreter in long loops."""
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        yield from pool.map(lambda index: work(split.block(index)), range(split.num_blocks))

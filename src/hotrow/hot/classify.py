"""Which samples are hot: those of whose lookups, of every table, multi-hot entries included, none is cold.

A comparison per id: rows are numbered by popularity, so hot rows are a prefix but for a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed_format import Block, Ragged
from hotrow.data.packed_reader import PackedDataset, Split
from hotrow.host import usable_cores
from hotrow.hot.hot_set import HotRows, HotSet


def hot_samples(
    dataset: PackedDataset, hot: HotSet, *, split: str = "train", threads: int | None = None
) -> NDArray[np.bool_]:
    """bool [rows of the split]: whether a sample is hot. A sample without any id is.

    Reads the split once, `threads` blocks at a time. Raises ValueError where the hot set lacks a table.
    """
    rows = _by_feature(dataset, hot.rows)
    pieces = list(_blocks(dataset.split(split), lambda block: is_hot(block, rows), threads))
    return np.concatenate([np.empty(0, np.bool_), *pieces])


def is_hot(block: Block, rows: list[HotRows]) -> NDArray[np.bool_]:
    """Of each sample of a block; rows: the hot ones, for each feature."""
    hot = np.ones(len(block.label), np.bool_)
    for ids, own in zip(block.ids, rows, strict=True):
        hot &= _all_hot(ids, own)
    return hot


def _all_hot(ids: NDArray[Any] | Ragged, rows: HotRows) -> NDArray[np.bool_]:
    if not isinstance(ids, Ragged):
        return rows.contains(ids)
    cold = np.concatenate([[0], np.cumsum(~rows.contains(ids.values))])
    return np.asarray(cold[ids.row_splits[1:]] == cold[ids.row_splits[:-1]])


def _by_feature(dataset: PackedDataset, rows: Mapping[str, HotRows]) -> list[HotRows]:
    for feature in dataset.info.features:
        if feature.table not in rows:
            raise ValueError(f"the hot set has no table {feature.table!r}; it has {', '.join(rows) or 'none'}")
    return [rows[feature.table] for feature in dataset.info.features]


def _blocks(split: Split, work: Any, threads: int | None) -> Iterator[Any]:
    """`work` of every block, in their order, by several threads: numpy lets go of the interpreter in long loops."""
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        yield from pool.map(lambda index: work(split.block(index)), range(split.num_blocks))

"""Which samples are hot: those whose lookups, in every table and with multi-hot entries included, all find hot rows.

One comparison per id is enough, because hot rows are a prefix plus a list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.data.packed.format import Block, Ids, Ragged
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.hot.calibrate import Calibration
from hotrow.hot.hot_set import HotRows, HotSet

T = TypeVar("T")


@dataclass(frozen=True)
class FoundHot:
    """Hot rows, the training samples that they make hot, and how long it took to find both."""

    calibration: Calibration
    is_hot: NDArray[np.bool_]
    """bool [rows of the training split]."""
    classify_s: float

    @property
    def rows(self) -> HotSet:
        """The hot rows."""
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


def find_hot(dataset: PackedDataset, calibration: Calibration, *, threads: int | None = None) -> FoundHot:
    """Finds the training samples that a calibration makes hot."""
    start = time.perf_counter()
    is_hot = hot_samples(dataset, calibration.hot, threads=threads)
    return FoundHot(calibration, is_hot, time.perf_counter() - start)


def hot_samples(
    dataset: PackedDataset, hot: HotSet, *, split: str = "train", threads: int | None = None
) -> NDArray[np.bool_]:
    """Returns for each row of the split whether it is a hot sample; a sample without ids is hot.

    Reads the split once, `threads` blocks at a time. Raises ValueError if the hot set lacks a table.
    """
    rows = by_feature(dataset, hot.rows)
    pieces = list(_map_blocks(lambda block: is_hot(block, rows), dataset.split(split), threads))
    return np.concatenate([np.empty(0, np.bool_), *pieces])


def is_hot(block: Block, rows: list[HotRows]) -> NDArray[np.bool_]:
    """Returns for each sample of a block whether it is hot. rows: the hot rows for each feature."""
    return hits_of(block.ids, rows, len(block.label))[0]


def hits_of(columns: Sequence[Ids], rows: Sequence[HotRows], num_samples: int) -> tuple[NDArray[np.bool_], int]:
    """Returns for each sample whether it is hot, and how many lookups find hot rows. columns, rows: by feature."""
    hot = np.ones(num_samples, np.bool_)
    num_hits = 0
    for ids, own in zip(columns, rows, strict=True):
        found = own.contains(ids.values if isinstance(ids, Ragged) else ids)
        num_hits += int(np.count_nonzero(found))
        hot &= _every(found, ids.row_splits) if isinstance(ids, Ragged) else found
    return hot, num_hits


def _every(found: NDArray[np.bool_], row_splits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns for each sample whether all its lookups were found."""
    cold = np.concatenate([[0], np.cumsum(~found)])
    return np.asarray(cold[row_splits[1:]] == cold[row_splits[:-1]])


def by_feature(dataset: PackedDataset, rows: Mapping[str, HotRows]) -> list[HotRows]:
    """Returns the hot rows of each feature's table. Raises ValueError if a table is missing."""
    for feature in dataset.info.features:
        if feature.table not in rows:
            raise ValueError(f"the hot set has no table {feature.table!r}; it has {', '.join(rows) or 'none'}")
    return [rows[feature.table] for feature in dataset.info.features]


def _map_blocks(work: Callable[[Block], T], split: Split, threads: int | None) -> Iterator[T]:
    """Yields `work(block)` for every block in order; in threads, as numpy releases the interpreter in long loops."""
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        yield from pool.map(lambda index: work(split.block(index)), range(split.num_blocks))

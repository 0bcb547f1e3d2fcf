"""Accesses per row of ids that come in pieces, for id spaces too large for an array of counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_WAITING = 1 << 18
"""Ids gathered at least before they are merged in: merging costs a pass over all rows seen."""


class RowCounts:
    """count[id] += 1; memory 16 bytes per different id, and as much again while merging."""

    def __init__(self) -> None:
        self._rows, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._waiting: list[NDArray[Any]] = []
        self._num_waiting = 0

    def add(self, ids: NDArray[Any]) -> None:
        """Count each of `ids`, integers [n]."""
        self._waiting.append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting > max(len(self._rows), LEAST_WAITING):
            self._merge()

    def sums(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The different ids so far, rising, and the count of each."""
        self._merge()
        return self._rows, self._counts

    def _merge(self) -> None:
        if not self._waiting:
            return
        new_rows, new_counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        rows, place = np.unique(np.concatenate([self._rows, new_rows]), return_inverse=True)
        counts = np.zeros(len(rows), np.int64)
        np.add.at(counts, place, np.concatenate([self._counts, new_counts]))
        self._rows, self._counts = rows, counts
        self._waiting, self._num_waiting = [], 0

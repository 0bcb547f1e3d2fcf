"""Readable twin of native/reuse.cpp: stack distances by looking through the stack; called as `reference` is."""

# ruff: noqa: D102, FBT001, RUF100 - the native module's signatures, documented in its header

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_GAPS = 128


def fmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of MurmurHash3, one-to-one, as in native/include/hotrow/encode_hash.h."""
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def is_sampled(ids: NDArray[Any], threshold: int, seed: int) -> NDArray[np.bool_]:
    """Which ids are followed: fmix64(id ^ fmix64(seed + 1)) <= threshold."""
    salt = fmix64(np.array([seed + 1], np.uint64))
    return fmix64(ids.astype(np.int64).view(np.uint64) ^ salt) <= np.uint64(threshold)


class StackDistances:
    """The stack is a list, the row accessed last at its end."""

    def __init__(self, threshold: int, seed: int) -> None:
        self._threshold, self._seed = threshold, seed
        self._stack: list[int] = []
        self._last_batch: dict[int, int] = {}
        self._histogram: list[int] = []
        self._gaps = [0] * NUM_GAPS
        self._batch = self.num_accesses = self.num_distinct = 0

    def add(self, ids: NDArray[Any], once: bool) -> None:
        self._batch += 1
        for row in ids[is_sampled(ids, self._threshold, self._seed)].tolist():
            last = self._last_batch.get(row, 0)
            if last == self._batch and once:
                continue
            if last != self._batch:
                self.num_distinct += 1
                if last and self._batch - last <= NUM_GAPS:
                    self._gaps[self._batch - last - 1] += 1
            self._access(row)

    def _access(self, row: int) -> None:
        self.num_accesses += 1
        if row in self._last_batch:
            place = self._stack.index(row)
            distance = len(self._stack) - 1 - place
            self._histogram += [0] * (distance + 1 - len(self._histogram))
            self._histogram[distance] += 1
            del self._stack[place]
        self._stack.append(row)
        self._last_batch[row] = self._batch

    @property
    def num_rows(self) -> int:
        return len(self._stack)

    @property
    def histogram_size(self) -> int:
        return len(self._histogram)

    def histogram(self, out: NDArray[np.uint64]) -> None:
        out[:] = self._histogram

    def gaps(self, out: NDArray[np.uint64]) -> None:
        out[:] = self._gaps

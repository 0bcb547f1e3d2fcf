"""What benchmarks/native/{reuse,sketch}.cpp compute, written to be read: a stack, and sets of counters."""

# ruff: noqa: D102, D103, FBT001, RUF100 - the native module's signatures, documented in its headers

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.reference import fmix64

NUM_GAPS = 128
SLOTS = 4
SCORE = (1 << 24) - 1


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


def sketch_add(slots: NDArray[np.uint64], seed: int, first_key: int, num_rows: int, ids: NDArray[Any]) -> None:
    if len(slots) == 0 or len(slots) % SLOTS:
        raise ValueError("slots must be four for each of 1 to 2^32 - 2 buckets")
    if not 0 < first_key < 1 << 40 or num_rows > (1 << 40) - first_key:
        raise ValueError("keys must be below 2^40")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError("ids must be at least 0 and below num_rows")
    keys = (ids[ids != 0].astype(np.int64) + first_key).view(np.uint64)
    hashes = fmix64(keys ^ fmix64(np.array([seed + 1], np.uint64)))
    buckets = ((hashes >> np.uint64(32)) * np.uint64(len(slots) // SLOTS)) >> np.uint64(32)
    for key, bucket in zip(keys.tolist(), buckets.tolist(), strict=True):
        own = slots[bucket * SLOTS : (bucket + 1) * SLOTS].tolist()
        scores = [slot & SCORE for slot in own]
        found = [k for k, slot in enumerate(own) if slot >> 24 == key]
        least = scores.index(min(scores))
        if found:
            own[found[0]] += scores[found[0]] < SCORE
        elif scores[least] > 1:
            own[least] -= 1
        else:
            own = [*own[:least], *own[least + 1 :], key << 24 | 1]
        slots[bucket * SLOTS : (bucket + 1) * SLOTS] = own

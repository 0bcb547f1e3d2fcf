"""Slots for the distinct rows of batches, own ones and those of other ranks side by side, as lookups read them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels import ops
from hotrow.parallel.shards import Numbers
from hotrow.placement.base import Lease


class ShardLease:
    """Keeps the rows of one batch in their slots until the batch is over."""

    def __init__(
        self, live: weakref.WeakSet[ShardLease], below: Lease, ended: Callable[[], object] = lambda: None
    ) -> None:
        """ended: what else is to be done when the batch is over."""
        self._live, self._below, self._ended = live, below, ended
        self.released = False
        live.add(self)

    def __del__(self) -> None:
        self.release(updated=False)  # a lookup whose output nobody wanted

    def release(self, *, updated: bool) -> None:
        if not self.released:
            self.released = True
            self._live.discard(self)
            self._ended()
            self._below.release(updated=updated)


class Buffers:
    """An array of slots for each table; batches that wait for a step have slots one behind another."""

    def __init__(self, dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        """dtypes: by table, in which lookups read weights: bfloat16 of split tables, without their lower halves."""
        self.weights: list[Tensor] = [torch.zeros(0, dim, dtype=dtype) for dim, dtype in zip(dims, dtypes, strict=True)]
        self.row_of: list[Numbers] = [np.zeros(0, np.int64) for _ in dims]
        """By table, the row in each slot."""
        self.ends: Numbers = np.zeros(len(dims), np.int64)
        """By table, the end of the slots in use."""
        self.live: weakref.WeakSet[ShardLease] = weakref.WeakSet()
        """The leases of batches that are not over."""
        self._hold(np.ones(len(dims), np.int64))

    def reserve(self, counts: Numbers) -> Numbers:
        """Returns by table the first of `counts` slots for a new batch."""
        if not self.live:
            self.ends[:] = 0
        firsts = self.ends.copy()
        self.ends += counts
        if (self.ends > self._room).any():
            self._hold(self.ends)
        return firsts

    def _hold(self, needed: Numbers) -> None:
        """Makes room for `needed` slots; those in use keep their numbers and values."""
        for t, (old, count) in enumerate(zip(self.weights, needed.tolist(), strict=True)):
            if count > len(old):
                size = max(count, 2 * len(old))
                self.weights[t] = ops.allocate(size, old.shape[1], dtype=old.dtype)
                self.weights[t][: len(old)] = old
                self.row_of[t] = np.append(self.row_of[t], np.zeros(size - len(old), np.int64))
        self._room = np.array([len(array) for array in self.weights])
        split = [array.dtype == torch.bfloat16 for array in self.weights]
        low = [
            ops.allocate(*array.shape, dtype=torch.int16, sparse=True) if own else None
            for array, own in zip(self.weights, split, strict=True)
        ]
        self.arrays = ops.Arrays(self.weights, low)

    def one_slot_each(self) -> list[Numbers] | None:
        """Returns by table, for each slot, the first slot that holds the same row; None if no two slots do."""
        if len(self.live) < 2:
            return None
        found = []
        for rows, end in zip(self.row_of, self.ends, strict=True):
            _, first, places = np.unique(rows[:end], return_index=True, return_inverse=True)
            found.append(first[places])
        return found

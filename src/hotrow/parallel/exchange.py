"""What ranks tell each other of rows, as words of 32 bits: which rows, and a sum of gradients for each.

Rows have keys: a number for each row of all tables of a shard, rising with the table and with the row's number in it. A
message holds the gaps between them in 16 bits; the few that are larger stand before the others in 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels import ops
from hotrow.kernels.reference import FlatSums, RowSums
from hotrow.parallel.shards import Numbers

_LARGE = 0xFFFF
"""Stands for a gap that does not fit in 16 bits."""


class Chosen(NamedTuple):
    """Some of the sums of a node, in the order of their rows' keys."""

    keys: Numbers
    """Rising: [n]."""
    places: Numbers
    """Where they are among the sums: [n]."""
    sums: FlatSums


class Keys:
    """The keys of rows of several tables: row r of table t has `first[t] + r`."""

    def __init__(self, num_rows: Sequence[int], dims: Sequence[int]) -> None:
        """num_rows: by table, more than any row's number."""
        self.first: Numbers = np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)])
        self.dims = np.array(dims, np.int64)
        ends = [*(np.flatnonzero(np.diff(self.dims)) + 1).tolist(), len(dims)]
        self._runs = [(first, end, dims[first]) for first, end in zip([0, *ends], ends, strict=False) if first < end]
        """Neighbouring tables of one dimension, whose rows can be copied as if they were one table's."""

    def counts(self, keys: Numbers) -> Numbers:
        """Returns how many of the rising `keys` are of each table."""
        return np.diff(np.searchsorted(keys, self.first))

    def tables(self, keys: Numbers) -> Numbers:
        """Returns the table of each of the rising `keys`."""
        return np.repeat(np.arange(len(self.dims)), self.counts(keys))

    def pack_sums(self, nodes: Sequence[Chosen]) -> tuple[Tensor, int]:
        """Returns sums of all tables, of one node after another, as a message; and how many words are keys."""
        heads = [pack(node.keys) for node in nodes]
        counts = [self.counts(node.keys) for node in nodes]
        num_heads = sum(map(len, heads))
        words = ops.empty(num_heads + sum(int(own @ self.dims) for own in counts), dtype=torch.int32)
        torch.cat(heads, out=words[:num_heads])
        floats, at = words.view(torch.float32), num_heads
        for node, own in zip(nodes, counts, strict=True):
            at = self._write_sums(node, own, floats, at)
        return words, num_heads

    def _write_sums(self, node: Chosen, counts: Numbers, out: Tensor, at: int) -> int:
        """Writes the sums of `node` to out[at:]; returns where they end. counts: how many of its keys are each
        table's."""
        starts, held = _starts(counts), _starts(np.array(node.sums.counts))
        floats = _starts(np.array(node.sums.counts) * self.dims)
        for first, end, dim in self._runs:
            rows = node.sums.sums[floats[first] : floats[end]].view(-1, dim)
            which = torch.from_numpy(node.places[starts[first] : starts[end]] - held[first])
            stop = at + len(which) * dim
            torch.index_select(rows, 0, which, out=out[at:stop].view(-1, dim))
            at = stop
        return at

    def unpack_sums(self, words: Tensor, num_nodes: int) -> list[list[RowSums]]:
        """Returns the sums by node and table."""
        found, at = [], 0
        for _ in range(num_nodes):
            keys, length = unpack(words[at:])
            found.append(keys)
            at += length
        counts = [self.counts(keys) for keys in found]
        sizes = [size for own in counts for size in (own * self.dims).tolist()]
        sums = iter(torch.split(words[at:].view(torch.float32), sizes))
        nodes = []
        for keys, own in zip(found, counts, strict=True):
            rows = torch.split(torch.from_numpy(keys - np.repeat(self.first[:-1], own)), own.tolist())
            each = zip(rows, self.dims.tolist(), strict=True)
            nodes.append([RowSums(own, next(sums).view(len(own), dim)) for own, dim in each])
        return nodes


def _starts(counts: Numbers) -> list[int]:
    return [0, *counts.cumsum().tolist()]


def pack(keys: Numbers) -> Tensor:
    """Returns rising keys, none below 0, as int32 words: two numbers, the large gaps, the gaps."""
    gaps = np.diff(keys, prepend=0)
    large = gaps[gaps >= _LARGE]
    small: NDArray[np.uint16] = np.zeros(len(gaps) + len(gaps) % 2, np.uint16)
    small[: len(gaps)] = np.minimum(gaps, _LARGE)
    head = np.array([len(gaps), len(large)], np.int32)
    return torch.from_numpy(np.concatenate([head, large.view(np.int32), small.view(np.int32)]))


def unpack(words: Tensor) -> tuple[Numbers, int]:
    """Returns the keys that `pack` was given, and how many of the words hold them; others may follow."""
    numbers = words.numpy()
    num, num_large = numbers[:2].tolist()
    start = 2 + 2 * num_large
    stop = start + (num + 1) // 2
    gaps = numbers[start:stop].view(np.uint16)[:num].astype(np.int64)
    gaps[gaps == _LARGE] = np.frombuffer(numbers[2:start].tobytes(), np.int64)  # words need not lie aligned
    return np.cumsum(gaps), stop

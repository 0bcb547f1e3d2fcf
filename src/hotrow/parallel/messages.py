"""What ranks send each other of rows, as words of 32 bits: which rows, and a sum of gradients for each. Numbers may
travel in fewer bits.

Rows have keys: a number for each row of all tables of a shard, rising with the table and with the row's number in it. A
message holds the gaps between them in 16 bits; the few that are larger stand before the others in 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels import ops
from hotrow.kernels.types import FlatSums, RowSums
from hotrow.parallel.shards import Numbers

WireDtype = Literal["fp32", "bf16", "fp16"]
WIRE_TYPES: dict[WireDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGE_GAP = 0xFFFF
"""Stands for a gap that does not fit in 16 bits."""
GAP_BYTES, LARGE_GAP_BYTES, KEYS_HEAD_BYTES = 2, 8, 8
"""What `pack` makes of each key, what of a large gap beside, and what stands before them."""


def row_type(stored: torch.dtype, wire_dtype: WireDtype) -> torch.dtype:
    """Returns in which type weights travel to the ranks that look up their rows. Sums travel as `wire_dtype`."""
    return WIRE_TYPES[wire_dtype] if stored == torch.float32 else stored


class Chosen(NamedTuple):
    """Some of the sums of a node, in the order of their rows' keys."""

    keys: Numbers
    """Rising: [n]."""
    places: Numbers
    """Where they are among the sums: [n]."""
    sums: FlatSums


class Keys:
    """The keys of rows of several tables: row r of table t has `first[t] + r`."""

    def __init__(self, num_rows: Sequence[int], dims: Sequence[int], wire_dtype: WireDtype = "fp32") -> None:
        """num_rows: by table, more than any row's number. wire_dtype: of sums, see `narrow`."""
        self._wire_dtype: WireDtype = wire_dtype
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
        num_heads, num_sums = sum(map(len, heads)), sum(int(own @ self.dims) for own in counts)
        exact = self._wire_dtype == "fp32"  # written where they leave from
        words = ops.empty(num_heads + exact * num_sums, dtype=torch.int32)
        torch.cat(heads, out=words[:num_heads])
        sums, at = words[num_heads:].view(torch.float32) if exact else ops.empty(num_sums), 0
        for node, own in zip(nodes, counts, strict=True):
            at = self._write_sums(node, own, sums, at)
        return words if exact else torch.cat([words, *narrow([sums], self._wire_dtype)]), num_heads

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
        sums = iter(torch.split(widen(words[at:], sum(sizes), self._wire_dtype), sizes))
        nodes = []
        for keys, own in zip(found, counts, strict=True):
            rows = torch.split(torch.from_numpy(keys - np.repeat(self.first[:-1], own)), own.tolist())
            each = zip(rows, self.dims.tolist(), strict=True)
            nodes.append([RowSums(own, next(sums).view(len(own), dim)) for own, dim in each])
        return nodes


def narrow(numbers: Sequence[Tensor], wire_dtype: WireDtype) -> list[Tensor]:
    """Returns float32 numbers, each [n], as words in a row: exactly, or rounded to half as many bits.

    For fp16 a first word k says that they were multiplied by 2^k, which brings the largest to 2^14 up to 2^15: sums of
    gradients would leave the range of float16 otherwise.
    """
    if wire_dtype == "fp32" or not numbers:
        return [torch.empty(0, dtype=torch.int32), *(each.view(torch.int32) for each in numbers)]
    joined, head = torch.cat(list(numbers)), torch.empty(0, dtype=torch.int32)
    if wire_dtype == "fp16":
        largest = float(joined.abs().max()) if len(joined) else 0.0
        power = 15 - math.frexp(largest)[1] if 0 < largest < math.inf else 0
        power = min(power, 126)
        joined, head = joined * 2.0**power, torch.tensor([power], dtype=torch.int32)
    halves = torch.zeros(len(joined) + len(joined) % 2, dtype=WIRE_TYPES[wire_dtype])
    halves[: len(joined)] = joined
    return [head, halves.view(torch.int32)]


def words_of(numbers: Sequence[Tensor], wire_dtype: WireDtype) -> Tensor:
    """Returns what `narrow` makes of the numbers as one message: if it can be, the numbers where they are."""
    if wire_dtype != "fp32":
        return torch.cat(narrow(numbers, wire_dtype))
    if len(numbers) != 1:
        numbers = [torch.cat(list(numbers), out=ops.empty(sum(map(len, numbers))))] if numbers else [torch.empty(0)]
    return numbers[0].view(torch.int32)


def widen(words: Tensor, count: int, wire_dtype: WireDtype) -> Tensor:
    """Returns the float32 numbers, `count` in all, that `narrow` made `words` of."""
    if wire_dtype == "fp32":
        return words.view(torch.float32)
    scale, start = 1.0, 0
    if wire_dtype == "fp16" and len(words):
        scale, start = 2.0 ** -int(words[0]), 1
    return words[start:].view(WIRE_TYPES[wire_dtype])[:count].float() * scale


def recast(
    message: Tensor, num_numbers: Sequence[int], old: Sequence[torch.dtype], new: Sequence[torch.dtype]
) -> Tensor:
    """Returns a message of bytes that holds so many numbers of each type with numbers of other types."""
    if list(old) == list(new):
        return message
    pieces = torch.split(message, [n * dtype.itemsize for n, dtype in zip(num_numbers, old, strict=True)])
    each = zip(pieces, old, new, strict=True)  # a copy lies aligned
    return torch.cat([own.clone().view(before).to(after).view(torch.uint8) for own, before, after in each])


def _starts(counts: Numbers) -> list[int]:
    return [0, *counts.cumsum().tolist()]


def bytes_of_gaps(num_keys: float, num_large: float = 0.0) -> float:
    """Returns the bytes of packed keys after their head, without padding; num_large: how many have a large gap."""
    return GAP_BYTES * num_keys + LARGE_GAP_BYTES * num_large


def pack(keys: Numbers) -> Tensor:
    """Returns rising keys, none below 0, as int32 words: two numbers, the large gaps, the gaps."""
    gaps = np.diff(keys, prepend=0)
    large = gaps[gaps >= LARGE_GAP]
    small: NDArray[np.uint16] = np.zeros(len(gaps) + len(gaps) % 2, np.uint16)
    small[: len(gaps)] = np.minimum(gaps, LARGE_GAP)
    head = np.array([len(gaps), len(large)], np.int32)
    return torch.from_numpy(np.concatenate([head, large.view(np.int32), small.view(np.int32)]))


def unpack(words: Tensor) -> tuple[Numbers, int]:
    """Returns the keys that `pack` was given, and how many of the words hold them; others may follow."""
    numbers = words.numpy()
    num, num_large = numbers[:2].tolist()
    start = 2 + 2 * num_large
    stop = start + (num + 1) // 2
    gaps = numbers[start:stop].view(np.uint16)[:num].astype(np.int64)
    gaps[gaps == LARGE_GAP] = np.frombuffer(numbers[2:start].tobytes(), np.int64)  # words need not lie aligned
    return np.cumsum(gaps), stop

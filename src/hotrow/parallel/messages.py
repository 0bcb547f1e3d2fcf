"""What ranks send each other of rows, as words of 32 bits: which rows, and a sum of gradients for each. Numbers may
travel in fewer bits. How keys of rows become words: kernels/keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels import keys, ops
from hotrow.kernels.types import ComingSums, FlatSums, Pieces, Shares
from hotrow.parallel.shards import Numbers

WireDtype = Literal["fp32", "bf16", "fp16"]
WIRE_TYPES: dict[WireDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def row_type(stored: torch.dtype, wire_dtype: WireDtype) -> torch.dtype:
    """Returns in which type weights travel to the ranks that look up their rows. Sums travel as `wire_dtype`."""
    return WIRE_TYPES[wire_dtype] if stored == torch.float32 else stored


class Keys:
    """The keys of rows of several tables: row r of table t has `first[t] + r`."""

    def __init__(self, num_rows: Sequence[int], dims: Sequence[int], wire_dtype: WireDtype = "fp32") -> None:
        """num_rows: by table, more than any row's number. wire_dtype: of sums, see `narrow`."""
        self._wire_dtype: WireDtype = wire_dtype
        self.first: Numbers = np.concatenate([[0], np.cumsum(num_rows, dtype=np.int64)])
        self.dims = np.array(dims, np.int64)

    def counts(self, keys: Numbers) -> Numbers:
        """Returns how many of the rising `keys` are of each table."""
        return np.diff(np.searchsorted(keys, self.first))

    def pack_sums(
        self, nodes: Sequence[FlatSums], row_of: Sequence[Numbers] = (), homes: Shares | None = None
    ) -> list[tuple[Tensor, int]]:
        """Returns sums as messages, and how many words of each are keys: see `ops.pack_sums`."""
        made = ops.pack_sums(nodes, self.first, self.dims, row_of, homes)
        if self._wire_dtype == "fp32":
            return made
        each = [(words[:num], words[num:].view(torch.float32), num) for words, num in made]
        return [(torch.cat([head, *narrow([sums], self._wire_dtype)]), num) for head, sums, num in each]

    def unpack_sums(
        self,
        messages: Sequence[ComingSums],
        pieces: Sequence[tuple[int, int]],
        prefix: Sequence[int] | None = None,
    ) -> Pieces:
        """The rows of some nodes (message, node), see `ops.unpack_sums`. prefix: by table; None takes all rows."""
        prefix = [0] * len(self.dims) if prefix is None else prefix
        return ops.unpack_sums(messages, pieces, self.first, self.dims, prefix)

    def exact(self, words: Tensor, num_nodes: int) -> Tensor:
        """Returns a message with its sums in float32."""
        if self._wire_dtype == "fp32":
            return words
        at, num_sums = 0, 0
        for _ in range(num_nodes):
            own, length = keys.unpack(words[at:].numpy())
            at, num_sums = at + length, num_sums + int(self.counts(own) @ self.dims)
        return torch.cat([words[:at], widen(words[at:], num_sums, self._wire_dtype).view(torch.int32)])


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
    """Returns a message of bytes with its numbers, `num_numbers` of each type in `old`, converted to those in `new`."""
    if list(old) == list(new):
        return message
    pieces = torch.split(message, [n * dtype.itemsize for n, dtype in zip(num_numbers, old, strict=True)])
    each = zip(pieces, old, new, strict=True)  # a copy lies aligned
    return torch.cat([own.clone().view(before).to(after).view(torch.uint8) for own, before, after in each])

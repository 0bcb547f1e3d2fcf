"""The order of sums over micro-batches: a binary tree that depends on their number alone, not on who holds them.

A global batch of B samples is cut into V micro-batches; sample b is in micro-batch v if `starts[v] <= b < starts[v+1]`.
Micro-batches are the leaves of a binary tree over [0, 2^k), 2^k the next power of two of V. A leaf without a
contribution (None; leaves beyond V always) is absent: a node with one present child is that child, with two their sum,
left + right in float32. A rank that holds the micro-batches [lo, hi) passes on one sum for each of `aligned(lo, hi)`;
whoever owns the result adds those in the tree, so any contiguous split over ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

SERIAL = 1 << 14
"""Elements that torch leaves to one thread: it divides operations among threads from 2^15 on. A sum over samples adds
stretches of this length, so that the number of threads does not change it."""
Node = tuple[int, int]
"""A subtree: its first leaf, and its number of leaves, a power of two."""
Value = TypeVar("Value")


def starts(num_samples: int, num_parts: int) -> list[int]:
    """Returns where the micro-batches of a batch begin, and the end of the last: [num_parts + 1], rising."""
    return [num_samples * part // num_parts for part in range(num_parts + 1)]


def held(num_parts: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the first micro-batch of a rank, and the end of its last one."""
    return num_parts * rank // num_ranks, num_parts * (rank + 1) // num_ranks


def width(num_parts: int) -> int:
    return 1 << (num_parts - 1).bit_length()


def aligned(lo: int, hi: int) -> list[Node]:
    """Returns the largest subtrees that together are the leaves [lo, hi), left to right."""
    found = []
    while lo < hi:
        size = (lo & -lo) or 1 << hi.bit_length()
        while lo + size > hi:
            size >>= 1
        found.append((lo, size))
        lo += size
    return found


def total(nodes: Mapping[Node, Value | None], node: Node, add: Callable[[Value, Value], Value]) -> Value | None:
    """Returns the sum of subtree `node` of those given; None if all of it is absent."""
    if node in nodes:
        return nodes[node]
    first, size = node
    if size == 1:
        return None
    left, right = (total(nodes, (at, size // 2), add) for at in (first, first + size // 2))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)


def sums(parts: Iterable[Value | None], lo: int, hi: int, add: Callable[[Value, Value], Value]) -> dict[Node, Value]:
    """Returns the sum of each of `aligned(lo, hi)`, absent ones left out. parts: of the leaves lo, lo + 1, ... Besides
    the sums that it returns, it holds at most one value for each level of the tree at a time."""
    leaves, found = iter(parts), {}
    for first, size in aligned(lo, hi):
        if (value := _summed(leaves, size, add)) is not None:
            found[first, size] = value
    return found


def _summed(leaves: Iterator[Value | None], size: int, add: Callable[[Value, Value], Value]) -> Value | None:
    """Returns the sum of the next `size` leaves; None if all are absent.

    It stands alone because a function that calls itself from its closure is a cycle: what `leaves` holds, such as a
    batch, would stay until Python looks for cycles.
    """
    if size == 1:
        return next(leaves)
    left, right = _summed(leaves, size // 2, add), _summed(leaves, size // 2, add)
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)

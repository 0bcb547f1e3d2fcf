"""Ids in a fixed number of buckets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hash(ids: NDArray[np.uint64], *, buckets: int, seed: int = 0) -> NDArray[np.uint64]:
    """Returns f(h + (seed + 1) 0x9E3779B97F4A7C15) mod buckets [n], of the 64-bit hash h of an id, where f is the
    finalizer of splitmix64 and the sum is modulo 2^64. Different seeds choose buckets independently."""
    if not 1 <= buckets < 2**63:
        raise ValueError(f"buckets is {buckets}; it must be from 1 to 2^63 - 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must not be below 0")
    h = ids + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h % np.uint64(buckets)

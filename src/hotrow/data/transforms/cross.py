"""Several ids together, as one id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cross(*ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the hash h [n] of the 64-bit hashes of several ids: h = f(h 0x9E3779B97F4A7C15 + next) modulo 2^64, from
    the first one on, where f is the finalizer of splitmix64."""
    h = ids[0]
    for other in ids[1:]:
        h = h * np.uint64(0x9E3779B97F4A7C15) + other
        h ^= h >> np.uint64(30)
        h *= np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(27)
        h *= np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return h

"""Splitmix64, which mixes 64-bit words one-to-one: every choice that depends on a row's number alone comes from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, splitmix64's increment."""


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words

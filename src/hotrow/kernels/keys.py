"""Rows of several tables as rising keys, and keys as words of 32 bits.

A row's key is a number that rises with the table and with the row's number in it. A message holds the gaps between keys
in 16 bits; the few that are larger stand before the others in 64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotrow.kernels.types import Numbers

LARGE_GAP = 0xFFFF
"""Stands for a gap that does not fit in 16 bits."""
GAP_BYTES, LARGE_GAP_BYTES, HEAD_BYTES = 2, 8, 8
"""What `pack` makes of each key, what of a large gap beside, and what stands before them."""


def pack(keys: Numbers) -> NDArray[np.int32]:
    """Returns rising keys, none below 0, as words: two numbers, the large gaps, the gaps."""
    gaps = np.diff(keys, prepend=0)
    large = gaps[gaps >= LARGE_GAP]
    small: NDArray[np.uint16] = np.zeros(len(gaps) + len(gaps) % 2, np.uint16)
    small[: len(gaps)] = np.minimum(gaps, LARGE_GAP)
    head = np.array([len(gaps), len(large)], np.int32)
    return np.concatenate([head, large.view(np.int32), small.view(np.int32)])


def unpack(words: NDArray[np.int32]) -> tuple[Numbers, int]:
    """Returns the keys that `pack` was given, and how many of the words hold them; others may follow."""
    num, num_large = words[:2].tolist()
    start = 2 + 2 * num_large
    stop = start + (num + 1) // 2
    gaps = words[start:stop].view(np.uint16)[:num].astype(np.int64)
    gaps[gaps == LARGE_GAP] = np.frombuffer(words[2:start].tobytes(), np.int64)  # words need not lie aligned
    return np.cumsum(gaps), stop

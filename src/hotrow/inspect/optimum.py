"""What caches would hit of a stream of accesses, one by one: LRU as run, and the best there can be (Belady).

Where reuse.py gives an LRU cache's misses for every size, this says for one size which accesses hit, so that samples
can be asked whether all of theirs did.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotrow.data.native import backend


def lru_hits(rows: NDArray[np.uint32], num_rows: int, capacity: int) -> NDArray[np.bool_]:
    """Of each access, whether an LRU cache of `capacity` rows, empty at first, hits it [n]. rows: below num_rows."""
    return _hits("lru_hits", rows, num_rows, capacity)


def belady_hits(rows: NDArray[np.uint32], num_rows: int, capacity: int) -> NDArray[np.bool_]:
    """The same of a cache that knows the future and may refuse a row: none that loads on access hits more."""
    return _hits("belady_hits", rows, num_rows, capacity)


def _hits(policy: str, rows: NDArray[np.uint32], num_rows: int, capacity: int) -> NDArray[np.bool_]:
    if capacity < 0:
        raise ValueError(f"capacity is {capacity}; a cache holds 0 rows or more")
    out = np.empty(len(rows), np.bool_)
    getattr(backend(), policy)(rows, num_rows, capacity, out)
    return out

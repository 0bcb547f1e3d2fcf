"""How often an id comes in a list of ids, such as a history."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def combo_count(history: tuple[NDArray[np.uint64], NDArray[np.int64]], ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns how many ids of each row's list equal the row's id [n]."""
    hashes, splits = history
    rows = np.repeat(np.arange(len(ids)), np.diff(splits))
    return np.bincount(rows[hashes == ids[rows]], minlength=len(ids)).astype(np.float64)

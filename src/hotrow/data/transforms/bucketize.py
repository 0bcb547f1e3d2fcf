"""Numbers in buckets between stated boundaries, as ids."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def bucketize(x: NDArray[np.float64], *, boundaries: list[float]) -> NDArray[np.float64]:
    """Returns how many boundaries are at most x [n]: with (18, 25), 0 below 18, 1 from 18 and 2 from 25 up."""
    if not boundaries or any(low >= high for low, high in pairwise(boundaries)):
        raise ValueError(f"boundaries are {boundaries}; give at least one, in rising order")
    return np.where(np.isnan(x), np.nan, np.searchsorted(np.array(boundaries), x, side="right"))

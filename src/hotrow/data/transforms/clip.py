"""Numbers kept between two ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def clip(x: NDArray[np.float64], *, low: float | None = None, high: float | None = None) -> NDArray[np.float64]:
    """Returns min(max(x, low), high) [n]; an end that is None does not bind."""
    if low is None and high is None:
        raise ValueError("low and high are absent; give at least one")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low is {low}, above high, {high}; exchange them")
    return np.clip(x, low, high)

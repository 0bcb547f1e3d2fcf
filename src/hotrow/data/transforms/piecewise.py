"""How far numbers have come through an interval: one part of their piecewise-linear form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def piecewise(x: NDArray[np.float64], *, low: float, high: float) -> NDArray[np.float64]:
    """Returns (min(max(x, low), high) - low) / (high - low) [n]: 0 below the interval, 1 above it."""
    if low >= high:
        raise ValueError(f"low is {low}, not below high, {high}; exchange them, or give another end")
    return (np.clip(x, low, high) - low) / (high - low)

"""The squared logarithm of counts, as the winners of Criteo's competition of 2014 took it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def floor_log2(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns floor(log(x)^2), of the natural logarithm, if x > 2, else x [n]: 1, 2, 3, 4, 5 become 1, 2, 1, 1, 2."""
    return np.where(x > 2.0, np.floor(np.log(np.maximum(x, 1.0)) ** 2), x)

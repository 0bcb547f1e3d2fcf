"""The time between two times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def age(later: NDArray[np.float64], earlier: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns later - earlier [n], in the unit of both: seconds of seconds."""
    return later - earlier

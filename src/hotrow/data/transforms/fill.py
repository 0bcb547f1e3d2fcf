"""A number in place of a missing one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fill(x: NDArray[np.float64], *, value: float) -> NDArray[np.float64]:
    """Returns value where x is missing, else x [n]."""
    return np.where(np.isnan(x), value, x)

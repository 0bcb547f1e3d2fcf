"""The logarithm of counts, as the reference DLRM takes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def log1p_clip0(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns log(1 + max(x, 0)) [n]."""
    return np.log1p(np.maximum(x, 0.0))

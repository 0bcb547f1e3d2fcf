"""Numbers with mean 0 and standard deviation 1 over the training rows that have a value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def standardize(x: NDArray[np.float64], *, mean: float = 0.0, std: float = 1.0) -> NDArray[np.float64]:
    """Returns (x - mean) / std [n]."""
    if std <= 0:
        raise ValueError(f"std is {std}; it must be above 0")
    return (x - mean) / std


def fit(moments: Any) -> dict[str, float]:
    """Returns the options for a column with these moments; a constant column is only shifted, an absent one is not."""
    if moments.num_values == 0:
        return {}
    return {"mean": float(moments.mean()), "std": math.sqrt(moments.variance()) or 1.0}

"""The hour of the day of a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hour(
    x: NDArray[np.float64], *, utc_offset_hours: float = 0.0, zone: str | None = None, format: str | None = None
) -> NDArray[np.float64]:
    """Returns floor(x / 3600 + utc_offset_hours) mod 24 [n], from 0 to 23; x counts seconds from 1970-01-01 in UTC,
    or on the clock of `zone`. Whoever reads x goes by `zone` and `format` (data/cells.py)."""
    return (x + 3600.0 * utc_offset_hours) // 3600.0 % 24.0

"""The day of the week of a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def weekday(
    x: NDArray[np.float64], *, utc_offset_hours: float = 0.0, zone: str | None = None, format: str | None = None
) -> NDArray[np.float64]:
    """Returns (floor((x / 3600 + utc_offset_hours) / 24) + 3) mod 7 [n], 0 on Mondays; x counts seconds from Thursday,
    1970-01-01, in UTC, or on the clock of `zone`. Whoever reads x goes by `zone` and `format` (data/cells.py)."""
    return ((x + 3600.0 * utc_offset_hours) // 86400.0 + 3.0) % 7.0

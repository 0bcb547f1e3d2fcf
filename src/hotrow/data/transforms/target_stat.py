"""How much more often rows of a value are positive than rows are in all, as evidence in logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LIMIT = 8.0


def target_stat(
    rows: NDArray[np.float64],
    positives: NDArray[np.float64],
    all_rows: NDArray[np.float64],
    all_positives: NDArray[np.float64],
    *,
    prior: float,
) -> NDArray[np.float64]:
    """Returns logit((positives + prior p) / (rows + prior)) - logit(p) [n] with p = (all_positives + 1/2) / (all_rows +
    1), between -8 and 8. `prior`, in rows, is how much evidence it takes to leave 0."""
    if not prior > 0:
        raise ValueError(f"prior is {prior}; it must be above 0")
    p = (all_positives + 0.5) / (all_rows + 1.0)
    odds = (positives + prior * p) / (rows - positives + prior * (1.0 - p))
    return np.clip(np.log(odds * ((1.0 - p) / p)), -LIMIT, LIMIT)

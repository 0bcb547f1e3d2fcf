"""How long one unit of each kind of work takes, from steps of known amounts: least squares without negative units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotrow.costs.hardware import Figure, Point


def unit_seconds(points: Sequence[Point]) -> dict[str, float]:
    """Returns seconds per unit of each amount, none negative, with which the sums are closest to the points' seconds.

    Closest are the sums of least squares of their relative errors. Points whose own repeats differ, or that other
    work disturbed, count less, and so do points that are far off (Huber's weights), above all those that took long.
    """
    kinds = sorted(
        {kind for point in points for kind, amount in point.sizes.items() if kind != "threads" and amount > 0}
    )
    if not kinds:
        return {}
    rows = np.array([[point.sizes.get(kind, 0.0) for kind in kinds] for point in points])
    seconds = np.array([point.seconds.value for point in points])
    relative = rows / seconds[:, None]
    scale = relative.max(axis=0)
    relative /= scale
    steady = np.array([1 / (STEADY + _spread(point.seconds) + STEADY * point.disturbed) for point in points])
    weights = steady
    for _ in range(ROUNDS):
        found = least_squares(relative * weights[:, None], weights)
        error = relative @ found - 1
        typical = max(float(np.median(np.abs(error))), 1e-12)
        limit = np.where(error < 0, SLOW, FAST) * typical
        weights = steady * np.sqrt(limit / np.maximum(np.abs(error), limit))
    return dict(zip(kinds, (found / scale).tolist(), strict=True))


STEADY = 0.2
"""Spreads below this share of a figure say little about what it is worth; other work adds as much."""
ROUNDS = 12
SLOW, FAST = 1.0, 2.5
"""Errors of more than so many times the median error count in proportion, not squared: of points that took longer than
the sums say, and of those that took less."""


def _spread(figure: Figure) -> float:
    """Returns the distance of the quartiles as a share of the figure; 0 if nobody measured it."""
    if figure.low is None or figure.high is None or not figure.value:
        return 0.0
    return (figure.high - figure.low) / figure.value


def least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x >= 0 that minimises |a x - b|, by the active sets of Lawson and Hanson (1974)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], np.bool_)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max(initial=0.0))
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if not (bad := free & (wanted <= 0)).any():
                x = wanted
                break
            step = float((x[bad] / np.maximum(x[bad] - wanted[bad], 1e-300)).min())
            x = x + step * (wanted - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                break
    return x

"""Student's t: the quantile that the paper's estimate needs, and what a mean of a few runs can tell."""

from __future__ import annotations

import functools
import math

STEPS = 2000
"""Of Simpson's rule, below 1e-9 off for the quantiles asked for."""


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """x such that a Student-t variable of `freedom` degrees is below x with `probability`, from 0.5 up."""
    low, high = 0.0, 1.0
    while _cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _cdf(middle, freedom) >= probability else (middle, high)
    return high


def interval(mean: float, error: float, num: int) -> tuple[float, float]:
    """Where the true mean lies with 95 % confidence, from that of `num` runs, 2 or more, and its standard error."""
    width = t_quantile(0.975, num - 1) * error
    return mean - width, mean + width


def _cdf(x: float, freedom: int) -> float:
    """From 0 up, by Simpson's rule on the density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    width = x / STEPS
    sides = sum((4 if k % 2 else 2) * _power(k * width, freedom) for k in range(1, STEPS))
    return 0.5 + scale * width / 3 * (_power(0.0, freedom) + sides + _power(x, freedom))


def _power(x: float, freedom: int) -> float:
    return float((1 + x * x / freedom) ** (-(freedom + 1) / 2))

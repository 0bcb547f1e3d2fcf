"""Exact means and variances of columns, from which transforms find their options in the training rows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MANTISSA_BITS = 24
"""Bits of a float32's mantissa, the leading 1 included."""


class Moments:
    """Exact mean and standard deviation of float32 numbers: order, chunks and threads cannot change a bit of them.

    A float32 is m * 2^(e - 24) with a whole |m| < 2^24, so sums of m and of m^2 by exponent e are whole numbers.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._sums: dict[int, int] = {}
        self._squares: dict[int, int] = {}

    def add(self, values: NDArray[np.float32]) -> None:
        """Counts the values that are not NaN."""
        values = values[~np.isnan(values)]
        self.num_values += len(values)
        # Below 2^28 values, sums of 24-bit pieces stay below 2^53: exact in the float64 that bincount adds in.
        for start in range(0, len(values), 1 << 28):
            self._add_piece(values[start : start + (1 << 28)])

    def _add_piece(self, values: NDArray[np.float32]) -> None:
        fraction, exponent = np.frexp(values.astype(np.float64))
        mantissa = (fraction * 2.0**MANTISSA_BITS).astype(np.int64)
        low = int(exponent.min(initial=0))
        bins = exponent - low
        square = mantissa * mantissa
        sums = np.bincount(bins, mantissa.astype(np.float64))
        high_squares = np.bincount(bins, (square >> MANTISSA_BITS).astype(np.float64))
        low_squares = np.bincount(bins, (square & ((1 << MANTISSA_BITS) - 1)).astype(np.float64))
        for i in np.flatnonzero(high_squares + low_squares):
            e = int(i) + low
            self._sums[e] = self._sums.get(e, 0) + int(sums[i])
            new = (int(high_squares[i]) << MANTISSA_BITS) + int(low_squares[i])
            self._squares[e] = self._squares.get(e, 0) + new

    def merge(self, other: Moments) -> None:
        """Counts the values that `other` has counted."""
        self.num_values += other.num_values
        for own, more in ((self._sums, other._sums), (self._squares, other._squares)):
            for exponent, value in more.items():
                own[exponent] = own.get(exponent, 0) + value

    def mean(self) -> Fraction:
        """Returns the exact mean of all values; there must be at least one."""
        return sum((s * _power(e - MANTISSA_BITS) for e, s in self._sums.items()), Fraction(0)) / self.num_values

    def variance(self) -> Fraction:
        """Returns the exact variance of all values; there must be at least one."""
        squares = (s * _power(2 * (e - MANTISSA_BITS)) for e, s in self._squares.items())
        return sum(squares, Fraction(0)) / self.num_values - self.mean() ** 2


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent

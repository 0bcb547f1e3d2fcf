"""Dense transforms: raw numbers to model inputs, and the training-split statistics one of them needs.

    log1p_clip0      log(1 + max(x, 0)), the reference DLRM's
    identity         x
    standardize      (x - mean) / std, over the training rows that have a value

A missing value becomes 0 after the transform, as in the reference. Arithmetic is float64, rounded to float32 once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hotrow.base.records import Count
from hotrow.data.sources.schema import Transform

MANTISSA_BITS = 24
"""Of a float32, the leading one included."""


@dataclass(frozen=True)
class DenseTransform:
    """One column's transform with its statistics; `str` writes the form kept in dataset.json, `parse` reads it."""

    kind: Transform
    mean: float = 0.0
    std: float = 1.0

    def __str__(self) -> str:
        """As `log1p_clip0` or `standardize(mean=1.5, std=0.25)`."""
        return f"standardize(mean={self.mean!r}, std={self.std!r})" if self.kind == "standardize" else self.kind

    @staticmethod
    def parse(text: str) -> DenseTransform:
        """The transform `str` wrote. Raises ValueError for any other text."""
        if text in ("log1p_clip0", "identity"):
            return DenseTransform(text)  # type: ignore[arg-type]  # one of the two names of Transform just compared
        found = re.fullmatch(r"standardize\(mean=(\S+), std=(\S+)\)", text)
        if found is None:
            raise ValueError(f"dense transform {text!r} is not known; prepare the data set again with this version")
        return DenseTransform("standardize", float(found[1]), float(found[2]))

    def __call__(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """Transformed values [n] of raw ones [n], NaN = missing."""
        x = raw.astype(np.float64)
        if self.kind == "log1p_clip0":
            x = np.log1p(np.maximum(x, 0.0))
        elif self.kind == "standardize":
            x = (x - self.mean) / self.std
        x[np.isnan(raw)] = 0.0
        return x.astype(np.float32)


class Moments:
    """Mean and standard deviation of float32 numbers, exact: no order, chunk or thread can change a bit of them.

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

    def transform(self) -> DenseTransform:
        """Standardisation by these moments; a constant or absent column is only shifted."""
        if self.num_values == 0:
            return DenseTransform("standardize")
        return DenseTransform("standardize", float(self._mean()), math.sqrt(self.variance()) or 1.0)

    def _mean(self) -> Fraction:
        return sum((s * _power(e - MANTISSA_BITS) for e, s in self._sums.items()), Fraction(0)) / self.num_values

    def variance(self) -> Fraction:
        """The exact variance of all values; there must be at least one."""
        squares = (s * _power(2 * (e - MANTISSA_BITS)) for e, s in self._squares.items())
        return sum(squares, Fraction(0)) / self.num_values - self._mean() ** 2

    def to_record(self) -> MomentsRecord:
        """These moments as a snapshot has them; `from_record` is the inverse."""
        sums, squares = ({str(e): str(s) for e, s in own.items()} for own in (self._sums, self._squares))
        return MomentsRecord(self.num_values, sums, squares)

    @staticmethod
    def from_record(found: MomentsRecord) -> Moments:
        """The moments of which `to_record` made it."""
        moments = Moments()
        moments.num_values = found.num_values
        moments._sums = {int(e): int(s) for e, s in found.sums.items()}
        moments._squares = {int(e): int(s) for e, s in found.squares.items()}
        return moments


_Exponent = Annotated[str, Field(pattern=r"^(0|-?[1-9][0-9]?|-?1[0-9][0-9])$")]
_Whole = Annotated[str, Field(pattern=r"^-?[0-9]{1,60}$")]


@dataclass(frozen=True)
class MomentsRecord:
    """`Moments` in JSON: numbers are text, because they may have more than 64 bits."""

    num_values: Count
    sums: dict[_Exponent, _Whole]
    """By exponent."""
    squares: dict[_Exponent, _Whole]

    def __post_init__(self) -> None:
        """Raises ValueError where no numbers have these moments."""
        if self.num_values and not Moments.from_record(self).variance() >= 0:
            raise ValueError("no numbers have these sums and squares")


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent

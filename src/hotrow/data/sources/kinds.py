"""Decides whether a column of numbers is a number, ids, or both, by what a sample shows (`evidence.py`).

    the order of values helps      a number; its buckets are ids as well
    which value it is helps        ids
    both                           a number and ids
    neither shows                  the shape decides: how many values, how they lie, how often each comes

Names decide nothing, and neither do the order of rows or other columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.data.sources.evidence import CLEAR, Evidence, Floats, Tally, buckets_of, weigh

FEW_VALUES = 64
"""Whole numbers with no more values than this are ids: a row for each is soon learned."""
TREND_OF_FEW = 2.0
"""Standard errors from which few values are a number too, by label or frequency; an error costs one dense input."""
HINT = 1.0
"""Standard errors from which values may help; then they are ids beside a number, if they repeat."""
SPARSE = 20
"""With fewer rows a value than this, a sample may not show that values help."""
EVEN = 0.35
"""Share of the range that holds the middle half of all values: 0.5 if they lie evenly, as ids do; 0.29 for a bell."""
SELDOM = 5
ROWS_FOR_COUNTS = 1000
"""Sampled rows of the rarer label from which single values would have shown an effect."""
MIN_BUCKETS, MAX_BUCKETS, ROWS_PER_BUCKET = 8, 32, 100
VALUES_AS_BUCKETS = 256
"""Decimal numbers with no more values than this have a bucket for each, if values help."""


@dataclass(frozen=True)
class Kind:
    """What a column of numbers is taken for."""

    reason: str
    is_number: bool = False
    ids: Literal["", "values", "buckets"] = ""
    """The kind of its ids, if it has any."""
    buckets: tuple[float, ...] = ()
    evidence: str = ""
    """The figures behind the reason."""


def tell_kind(numbers: Floats, positive: NDArray[np.bool_] | None, *, transform: str) -> Kind:
    """Returns the kind of a column. numbers: a value per row, NaN = missing; positive: the labels, if they are known.

    transform: that of a dense input.
    """
    missing = np.isnan(numbers)
    if positive is None:
        positive = np.zeros(len(numbers), np.bool_)
    tally = Tally.of(numbers[~missing], positive[~missing])
    inputs = as_dense(tally, transform)
    found = weigh(tally, inputs, (int(missing.sum()), int(positive[missing].sum())))
    kind = _kind_of(tally, found)
    return kind if found is None else replace(kind, evidence=_figures(found))


def _kind_of(tally: Tally, found: Evidence | None) -> Kind:
    is_whole = bool((np.floor(tally.values) == tally.values).all())
    if not is_whole:
        return _of_decimals(tally, found)
    if len(tally.values) <= FEW_VALUES and not _is_count(tally, found):
        shows = _smoothness(tally) >= TREND_OF_FEW or (found is not None and found.order >= TREND_OF_FEW)
        why = f"few whole numbers{', whose order matters' if shows else ''}"
        return Kind(why, is_number=shows, ids="values")
    if found is None:
        return _by_shape(tally)
    if _is_count(tally, found):
        return _number(tally, found)
    if found.has_identity:
        return Kind(_why(found), is_number=found.has_order, ids="values")
    if not found.has_order:
        return _by_shape(tally)
    if _like_ids(tally) or (found.identity >= HINT and tally.rows.mean() >= SELDOM):
        return Kind(f"{_why(found)}; but they repeat like ids", is_number=True, ids="values")
    return _number(tally, found)


def as_dense(tally: Tally, transform: str) -> Floats:
    """Returns the values as a dense input has them."""
    values = tally.values.astype(np.float64)
    if transform == "log1p_clip0":
        return np.log1p(np.maximum(values, 0.0))
    mean = np.average(values, weights=tally.rows)
    return (values - mean) / (np.sqrt(np.average((values - mean) ** 2, weights=tally.rows)) or 1.0)


def _of_decimals(tally: Tally, found: Evidence | None) -> Kind:
    if found is None:
        return Kind("decimal numbers", is_number=True)
    few = len(tally.values) <= VALUES_AS_BUCKETS
    most = (len(tally.values) if few else 2 * MAX_BUCKETS) if found.has_identity else None
    number = _number(tally, found, most)
    return replace(number, reason=f"decimal numbers, {number.reason}")


def _number(tally: Tally, found: Evidence, most: int | None = None) -> Kind:
    """Returns a number and its buckets, at most about `most`, which interact with other columns as ids do."""
    edges = cuts(tally, most or int(np.clip(tally.rows.sum() / ROWS_PER_BUCKET, MIN_BUCKETS, MAX_BUCKETS)))
    return Kind(_why(found), is_number=True, ids="buckets" if edges else "", buckets=edges)


def _why(found: Evidence) -> str:
    if found.has_order:
        return f"their order tells of the label{', and so does each value' if found.has_identity else ''}"
    return "no order in them, but each has its own effect" if found.has_identity else "no effect on the label shows"


def _figures(found: Evidence) -> str:
    losses = f"LogLoss {found.base:.4f}, of buckets {found.buckets:.4f}, of values {found.values:.4f}"
    return f"order {found.order:.1f} s.e., values {found.identity:.1f} s.e.; {losses}"


def _by_shape(tally: Tally) -> Kind:
    """Returns a number if values lie closer in one part of their range and none is popular, else ids."""
    if _middle_half(tally) < EVEN and tally.rows.mean() < SELDOM and not _some_popular(tally):
        return Kind("they hardly repeat, and lie close together", is_number=True)
    why = "no order in them"
    if _smoothness(tally) >= CLEAR:
        return Kind(f"{why}, but neighbours come about equally often", is_number=True, ids="values")
    return Kind(why, ids="values")


def _is_count(tally: Tally, found: Evidence | None) -> bool:
    """Returns whether neighbours come about equally often and rows enough show neither an effect of single values nor
    one that a line does not tell: ids of such a column would only overfit."""
    if found is None or tally.rarer < ROWS_FOR_COUNTS or tally.rows.mean() < SELDOM:
        return False
    return _smoothness(tally) >= CLEAR and max(found.identity, found.bend) < HINT


def _smoothness(tally: Tally) -> float:
    """Returns by how many standard errors neighbouring values come about equally often, as counts do.

    This is von Neumann's ratio of the squared steps to the variance (1941), of the logarithms of the counts.
    """
    often, count = np.log(tally.rows), len(tally.rows)
    spread = ((often - often.mean()) ** 2).sum()
    if count < 4 or spread == 0:
        return 0.0
    ratio = (np.diff(often) ** 2).sum() / spread
    return float((2 * count / (count - 1) - ratio) / np.sqrt(4 * (count - 2) / (count**2 - 1)))


def _middle_half(tally: Tally) -> float:
    """Returns the share of the range, without its outermost values, that holds the middle half of the values."""
    low, first, third, high = np.quantile(tally.values.astype(np.float64), [0.01, 0.25, 0.75, 0.99])
    return float((third - first) / (high - low)) if high > low else 0.0


def _like_ids(tally: Tally) -> bool:
    """Returns whether values lie evenly but some come more often than others, as users and items do."""
    return tally.rows.mean() < SPARSE and _middle_half(tally) >= EVEN and _some_popular(tally)


def _some_popular(tally: Tally) -> bool:
    """Returns whether some values come more often than by chance; the most frequent ones, such as 0, apart."""
    rows = tally.rows[tally.rows * MAX_BUCKETS < tally.rows.sum()]
    return bool(len(rows) and rows.var() / rows.mean() > 1 + 5 * np.sqrt(2 / len(rows)))


def cuts(tally: Tally, most: int) -> tuple[float, ...]:
    """Returns the boundaries between at most about `most` buckets with equally many rows, each with few digits."""
    place = np.flatnonzero(np.diff(buckets_of(tally, most)))
    return tuple(_between(float(tally.values[i]), float(tally.values[i + 1])) for i in place)


def _between(low: float, high: float) -> float:
    """Returns the shortest number above `low` and at most `high`."""
    for digits in range(1, 18):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low < value <= high:
            return value
    return high

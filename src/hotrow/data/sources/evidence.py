"""What a sample shows about a column and the label: does the order of its values help, or which value it is?

Both questions compare predictions of the label for rows that a prediction has not seen. Each row is predicted from all
others (leave one out), and for that a value's rows and positives suffice:

    base      the share of positives
    buckets   the share in a quantile bucket of neighbouring values
    values    the share of the value itself, shrunk towards its bucket's

So no figure depends on the order of rows or on any other column, and no random folds are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BUCKETS = 32
ORDER_SCALES = (16, 32, 64, 128)
"""Numbers of buckets at which neighbours are compared: few for a weak trend, many for one in few of the rows."""
MIN_IN_BUCKET = 8.0
"""Expected rows of the rarer label in a bucket, at least; else there are fewer buckets."""
SHRINKAGE = (2.0, 8.0, 32.0, 128.0, 512.0, 2048.0)
"""Weights, in rows, of what a share is shrunk towards; the best is chosen."""
NEWTON_STEPS = 12
RIDGE = 1e-3
"""Keeps a regression finite if a column tells the label."""
CLEAR = 3.0
"""Standard errors from which a difference counts."""
MIN_OF_EACH = 20
"""Rows of each label that are needed to compare anything."""


@dataclass(frozen=True)
class Tally:
    """How many rows and positives each distinct value has. Values are in ascending order, without missing ones."""

    values: NDArray[np.generic]
    rows: Ints
    positives: Ints

    @staticmethod
    def of(values: NDArray[np.generic], positive: NDArray[np.bool_]) -> Tally:
        distinct, place = np.unique(values, return_inverse=True)
        rows = np.bincount(place, minlength=len(distinct))
        return Tally(distinct, rows, np.bincount(place, positive, minlength=len(distinct)).astype(np.int64))

    def grouped(self, groups: Ints) -> Tally:
        """Returns the tally of groups of values, by the group's number."""
        rows, positives = (
            np.bincount(groups, weights=counts).astype(np.int64) for counts in (self.rows, self.positives)
        )
        return Tally(np.arange(len(rows)), rows, positives)

    @property
    def share(self) -> float:
        return float(self.positives.sum() / max(self.rows.sum(), 1))

    @property
    def rarer(self) -> int:
        """Rows of the rarer label."""
        return int(min(self.positives.sum(), self.rows.sum() - self.positives.sum()))


@dataclass(frozen=True)
class Evidence:
    """How well a column predicts the label, and by what."""

    base: float
    """LogLoss of the share of positives."""
    buckets: float
    """LogLoss of quantile buckets."""
    values: float
    """LogLoss of values that are shrunk towards their buckets."""
    order: float
    """By how many standard errors neighbouring buckets deviate from the base rate to the same side."""
    identity: float
    """By how many standard errors the values predict better than their buckets."""
    gain: float
    """By how many standard errors the values predict better than the base rate."""
    line: float
    """LogLoss of a logistic regression on the number, as a dense input has it."""
    bend: float
    """By how many standard errors buckets predict better than that line."""

    @property
    def has_order(self) -> bool:
        return self.order >= CLEAR

    @property
    def has_identity(self) -> bool:
        return self.identity >= CLEAR


def weigh(tally: Tally, inputs: Floats, missing: tuple[int, int] = (0, 0)) -> Evidence | None:
    """Returns the evidence in the rows of a column of numbers; None if one of the labels has too few rows.

    inputs: the values as a dense input has them, where a missing value is 0. missing: rows without a value, and
    positives among them.
    """
    if tally.rarer < MIN_OF_EACH or len(tally.rows) < 2:
        return None
    nothing = np.full((2, len(tally.rows)), tally.share)
    groups = buckets_of(tally, min(NUM_BUCKETS, _most_buckets(tally)))
    bucket = tally.grouped(groups)
    by_bucket = _best_rates(bucket, nothing[:, : len(bucket.rows)])[:, groups]
    by_value = _best_rates(tally, by_bucket)
    # A missing value is one more bucket, and the line has it at 0.
    rates = _line(tally, inputs, np.append(inputs, 0.0))
    everything = Tally(tally.values, np.append(tally.rows, missing[0]), np.append(tally.positives, missing[1]))
    prior = np.full((2, 1), tally.share)
    of_missing = _best_rates(Tally(tally.values, everything.rows[-1:], everything.positives[-1:]), prior)
    in_buckets = np.hstack([by_bucket, of_missing])
    return Evidence(
        base=_loss(tally, nothing),
        buckets=_loss(tally, by_bucket),
        values=_loss(tally, by_value),
        order=_order(tally),
        identity=_clear(tally, by_bucket, by_value),
        gain=_clear(tally, nothing, by_value),
        line=_loss(tally, rates[:, :-1]),
        bend=_clear(everything, rates, in_buckets),
    )


def _line(tally: Tally, inputs: Floats, at: Floats) -> Floats:
    """Returns the rates [2, len(at)] of a logistic regression on `inputs`, fitted by Newton's method."""
    scale = float(np.sqrt((tally.rows * inputs**2).sum() / tally.rows.sum())) or 1.0
    x = np.stack([np.ones_like(inputs), inputs / scale])
    weights = np.array([np.log(tally.share / (1 - tally.share)), 0.0])
    for _ in range(NEWTON_STEPS):
        rate = 1 / (1 + np.exp(-np.clip(weights @ x, -30, 30)))
        slope = x @ (tally.positives - tally.rows * rate) - RIDGE * weights * [0, 1]
        curve = (x * (tally.rows * rate * (1 - rate))) @ x.T + np.diag([RIDGE, RIDGE])
        weights = weights + np.clip(np.linalg.solve(curve, slope), -2, 2)
    rates = 1 / (1 + np.exp(-np.clip(weights[0] + weights[1] * at / scale, -25, 25)))
    return np.stack([rates, rates])


def buckets_of(tally: Tally, num_buckets: int) -> Ints:
    """Returns the bucket of each value: a frequent value is one alone, the others are cut into `num_buckets` runs of
    values with about equally many rows."""
    alone = tally.rows * num_buckets >= tally.rows.sum()
    others = np.where(alone, 0, tally.rows)
    middle = (np.cumsum(others) - others / 2) / max(1, others.sum())
    run = np.floor(middle * num_buckets)
    begins = (np.diff(run, prepend=run[0]) != 0) | alone
    begins[1:] |= alone[:-1]
    begins[0] = False
    return np.cumsum(begins)


def _most_buckets(tally: Tally) -> int:
    return max(2, int(tally.rarer / MIN_IN_BUCKET))


def _best_rates(tally: Tally, prior: Floats) -> Floats:
    """Returns `left_out_rates` of groups with the best weight, or `prior` if no weight betters it.

    prior: the rates towards which they are shrunk, [2, num_groups].
    """
    chosen, least = prior, _loss(tally, prior)
    for weight in SHRINKAGE:
        rates = left_out_rates(tally, prior, weight=weight)
        if (loss := _loss(tally, rates)) < least:
            chosen, least = rates, loss
    return chosen


def left_out_rates(tally: Tally, prior: Floats | None = None, *, weight: float) -> Floats:
    """Returns the rates [2, num_values] that each value's negatives and positives get from its other rows.

    prior: rates towards which they are shrunk, with `weight` rows; if None, the share of positives.
    """
    others = np.maximum(tally.rows - 1, 0) + weight
    seen = np.stack([tally.positives, np.maximum(tally.positives - 1, 0)])
    rates: Floats = np.clip((seen + weight * (tally.share if prior is None else prior)) / others, 1e-12, 1 - 1e-12)
    return rates


def _losses(rates: Floats) -> Floats:
    losses: Floats = -np.log(np.stack([1 - rates[0], rates[1]]))
    return losses


def _counts(tally: Tally) -> Floats:
    return np.stack([tally.rows - tally.positives, tally.positives]).astype(np.float64)


def _loss(tally: Tally, rates: Floats) -> float:
    return float((_counts(tally) * _losses(rates)).sum() / max(tally.rows.sum(), 1))


def _clear(tally: Tally, old: Floats, new: Floats) -> float:
    """Returns by how many standard errors of the paired difference LogLoss falls from old to new rates."""
    difference, counts, num_rows = _losses(old) - _losses(new), _counts(tally), tally.rows.sum()
    mean = float((counts * difference).sum() / num_rows)
    variance = float((counts * (difference - mean) ** 2).sum() / num_rows)
    return mean / (variance / num_rows) ** 0.5 if variance > 0 else 0.0


def _order(tally: Tally) -> float:
    """Returns by how many standard errors neighbouring buckets deviate to the same side, at the clearest scale.

    If values are names, the product of two neighbours' deviations is as often below zero as above.
    """
    scales = {min(scale, _most_buckets(tally)) for scale in ORDER_SCALES}
    return max(_order_at(tally, scale) for scale in scales)


def _order_at(tally: Tally, num_buckets: int) -> float:
    bucket = tally.grouped(buckets_of(tally, num_buckets))
    excess = (bucket.positives - tally.share * bucket.rows) / (bucket.rows + tally.rows.sum() / num_buckets)
    products = excess[1:] * excess[:-1]
    size = float(np.sqrt((products**2).sum()))
    return float(products.sum()) / size if size else 0.0

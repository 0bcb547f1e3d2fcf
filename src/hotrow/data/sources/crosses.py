"""Ranks combinations of id columns by what they say about the label beyond the columns, in a sample of rows.

A logistic model of the columns' own statistics is fitted first. A pair is judged by what one Newton step on the model's
residuals, a step for each pair of values, takes off the loss of rows that did not make the step:

    g = y - p,  h = p (1 - p)               residuals and curvatures of the rows, p by the logistic model
    d(c) = sum g / (sum h + PRIOR mean h)   over the rows of the other folds with the values c
    gain = g d - h d^2 / 2                  of each row, what the loss falls by

The best pairs are taken, whether their gain is clear or not: whether any cross helps, `fit` tries on validation rows.
Triples grow from the best pairs by one column, and are judged after these pairs' statistics have joined the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hotrow.data.native import GOLDEN, mix64

MOST = 32
"""Pairs that are taken, and triples."""
GROWN = 12
"""Pairs from which triples are made."""
MIN_OF_EACH = 300
"""Rows of either label below which no cross is looked for."""
MAX_STEPS = 20_000_000
"""Rows times pairs that are looked at, so that a guess takes seconds: of 100 columns every 15th of 60,000 rows. If so
many columns leave too few rows, no cross is looked for."""
FOLDS, PRIOR, RIDGE = 3, 10.0, 10.0
SLOT_BITS, FEW_ROWS = 18, 1 << 14
Floats = NDArray[np.float64]
Cross = tuple[str, ...]


def find_crosses(codes: Mapping[str, NDArray[np.int64]], positive: NDArray[np.bool_]) -> list[Cross]:
    """Returns pairs of names, then triples, at most MOST of each, largest gains first.

    codes: a whole number for each row's value [n], by column.
    """
    every = -(-len(positive) * len(codes) * (len(codes) - 1) // 2 // MAX_STEPS) or 1
    codes, positive = {name: own[::every] for name, own in codes.items()}, positive[::every]
    num_positive = int(positive.sum())
    if len(codes) < 2 or min(num_positive, len(positive) - num_positive) < MIN_OF_EACH:
        return []
    label = positive.astype(np.float64)
    # Folds are drawn: rows may lie in an order that tells the label, and neighbours may be alike.
    fold = np.random.default_rng(0).integers(0, FOLDS, len(label))
    hashes = {name: mix64(own.astype(np.uint64)) for name, own in codes.items()}

    def slots_of(cross: Cross) -> NDArray[np.int64]:
        found = np.zeros(len(label), np.uint64)
        for name in cross:
            found = mix64(found * np.uint64(GOLDEN) + hashes[name])
        slots = (found >> np.uint64(64 - SLOT_BITS)).astype(np.int64)
        # To number the slots in use takes less time than to add up all of them, if rows are few.
        return np.unique(slots, return_inverse=True)[1] if len(slots) < FEW_ROWS else slots

    def best(crosses: Iterable[Cross], inputs: list[Floats]) -> list[Cross]:
        """Returns the crosses with the largest gains after a logistic model of the inputs [n]."""
        p = _fitted(np.stack(inputs, 1), label)
        residual, curvature = label - p, p * (1 - p)
        gain = {cross: gains_of(slots_of(cross), residual, curvature, fold).mean() for cross in crosses}
        return sorted(gain, key=lambda cross: -gain[cross])[:MOST]

    def inputs_of(crosses: Iterable[Cross]) -> list[Floats]:
        return [_statistic(slots_of(cross), label, fold) for cross in crosses]

    inputs = inputs_of((name,) for name in codes)
    pairs = best(combinations(codes, 2), inputs)
    place = {name: i for i, name in enumerate(codes)}
    grown = {
        tuple(sorted((*pair, name), key=place.__getitem__)): None
        for pair in pairs[:GROWN]
        for name in codes
        if name not in pair
    }
    return [*pairs, *(best(grown, inputs + inputs_of(pairs)) if grown else [])]


def gains_of(slots: NDArray[np.int64], residual: Floats, curvature: Floats, fold: NDArray[np.int64]) -> Floats:
    """Returns by how much each row's loss falls [n] after the step that rows of other folds take in its slot."""
    step = _others(slots, residual, fold) / (_others(slots, curvature, fold) + PRIOR * curvature.mean())
    gain: Floats = residual * step - curvature * step**2 / 2
    return gain


def _others(slots: NDArray[np.int64], values: Floats, fold: NDArray[np.int64]) -> Floats:
    """Returns for each row the sum of `values` over the rows of other folds in its slot [n]."""
    size = int(slots.max()) + 1
    sums = np.bincount(slots + fold * size, values, FOLDS * size).reshape(FOLDS, size)
    found: Floats = sums.sum(0)[slots] - sums[fold, slots]
    return found


def _statistic(slots: NDArray[np.int64], label: Floats, fold: NDArray[np.int64]) -> Floats:
    """Returns the logit of the rate of positives in each row's slot over the others, shrunk to the usual one."""
    rate = label.mean()
    rows, positives = (_others(slots, values, fold) for values in (np.ones_like(label), label))
    odds: Floats = (positives + PRIOR * rate) / (rows - positives + PRIOR * (1 - rate))
    return np.log(odds)


def _fitted(inputs: Floats, label: Floats) -> Floats:
    """Returns the probabilities of a logistic regression with the penalty RIDGE |w|^2 / 2, by Newton's method [n]."""
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], 1)
    penalty = np.append(np.full(inputs.shape[1] - 1, RIDGE), 1e-6)
    weights = np.zeros(inputs.shape[1])
    weights[-1] = np.log(label.mean() / (1 - label.mean()))

    def loss(weights: Floats) -> float:
        logits = inputs @ weights
        return float(np.logaddexp(0, logits).sum() - label @ logits + (penalty * weights**2).sum() / 2)

    now = loss(weights)
    for _ in range(15):
        p = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        hessian = (inputs * (p * (1 - p))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(hessian, inputs.T @ (label - p) - penalty * weights)
        size = next((0.5**k for k in range(10) if loss(weights + 0.5**k * step) <= now), 0.0)
        weights = weights + size * step
        before, now = now, loss(weights)
        if before - now < 1e-6 * now:
            break
    found: Floats = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
    return found

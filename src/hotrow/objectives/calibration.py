"""Calibration of clicks: maps from a model's logits to logits whose probabilities are rates.

A map is found on rows that did not train the model (`fitted`). Then it is the last layer (`calibrated`) of the model
that evaluations, predictions and exports compute.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import FiniteFloat
from pydantic.dataclasses import dataclass as record
from torch import Tensor, nn

from hotrow.base.records import STRICT, Count

Method = Literal["platt", "slope", "isotonic"]
MAX_STEPS, LEAST_CHANGE = 100, 1e-10
"""Newton's method takes about ten steps; they end if slope and intercept, of standardised logits, change by less."""


@record(frozen=True, config=STRICT)
class Calibration:
    """A fitted map, and the rows that it was fitted to."""

    method: Method
    step: Count
    """The step of the weights that it belongs to."""
    num_rows: Count
    """Validation rows that it was fitted to."""
    slope: FiniteFloat = 1.0
    intercept: FiniteFloat = 0.0
    x: tuple[FiniteFloat, ...] = ()
    y: tuple[FiniteFloat, ...] = ()
    from_selection: bool = False
    """Whether it was fitted to the run in RUN/selection, whose validation rows have trained the weights since."""

    def __post_init__(self) -> None:
        """Raises ValueError if `x` and `y` are not the points of a line."""
        if len(self.x) != len(self.y) or len(self.x) == 1 or any(a >= b for a, b in pairwise(self.x)):
            raise ValueError("x must rise, and have as many numbers as y: none, or at least two")

    @property
    def layer(self) -> dict[str, Any]:
        """The arguments of `calibrated`."""
        return {"slope": self.slope, "intercept": self.intercept, "x": list(self.x), "y": list(self.y)}

    def follow(self, network: nn.Module) -> None:
        """Makes this the last layer of `network`."""
        layer = self.layer
        network.register_forward_hook(lambda *each: calibrated(each[-1], **layer))

    def line(self) -> str:
        """Returns which map was fitted to which rows, in words."""
        of = f"{self.num_rows:,} validation rows{' of the selection' if self.from_selection else ''}"
        if self.method == "slope" and self.slope == 1:
            return f"slope, which changes nothing: {of} do not show that log odds are too far apart"
        sign = "plus" if self.intercept >= 0 else "minus"
        found = f"{self.slope:.4g} times the log odds {sign} {abs(self.intercept):.4g}"
        found = f"{len({*self.y}):,} rates" if self.x else found
        return f"{self.method}, {found}, fitted to {of}"


def calibrated(outputs_B: Tensor, *, slope: float, intercept: float, x: list[float], y: list[float]) -> Tensor:
    """Returns slope * f(outputs) + intercept as float32, [B]. f: the line through the points (x, y), constant before
    the first and after the last; if there are none, f changes nothing.

    An export copies this function, so it may use torch alone. Each operation is rounded by itself, in float64, so that
    the bits of an output do not depend on the other outputs.
    """
    z = outputs_B.double()
    if x:
        at, levels = (torch.tensor(values, dtype=torch.float64, device=z.device) for values in (x, y))
        k = torch.searchsorted(at, z, right=True).clamp(1, len(x) - 1)
        share = ((z - at[k - 1]) / (at[k] - at[k - 1])).clamp(0, 1)
        z = levels[k - 1] + share * (levels[k] - levels[k - 1])
    return (z * slope + intercept).float()


def for_all_negatives(kept: float) -> dict[str, Any]:
    """Returns the layer that makes p / (p + (1 - p) / kept) of a probability p (He et al., 2014): the rate among all
    rows, if the model knows a share `kept` of those with label 0."""
    return {"slope": 1.0, "intercept": math.log(kept), "x": [], "y": []}


def fitted(
    method: Method,
    logits: NDArray[np.float32],
    labels: NDArray[np.bool_],
    weights: NDArray[np.float32] | None = None,
    *,
    step: int,
) -> Calibration:
    """Returns the map that `method` finds for n rows, which have both labels. weights: of the rows, not all 0; if None,
    each counts 1. step: of the model's weights.

    platt: the slope and intercept of least cross-entropy, with (w1 + 1) / (w1 + 2) and 1 / (w0 + 2) in place of labels
    1 and 0, whose weights are w1 and w0 in all. So it is finite even if a logit tells the label for certain (Platt,
    1999).

    slope: a z + b of a logit z, a platt's slope and b what keeps the mean rate, if a is above 0 and below 1 by more
    than its standard error. Else, or if all labels are equal, nothing is changed.

    isotonic: rates that rise with the logit and are nearest to the labels (least squares, by pooling adjacent
    violators), within 1 / (n + 2) and 1 - 1 / (n + 2) (Zadrozny and Elkan, 2002). Between two steps the log odds are on
    a straight line.
    """
    num_rows = len(logits)
    if weights is not None:
        logits, labels, weights = logits[weights > 0], labels[weights > 0], weights[weights > 0]
    each = np.ones(len(logits)) if weights is None else weights.astype(np.float64)
    z = logits.astype(np.float64)
    if method == "isotonic":
        return Calibration(method, step, num_rows, **_isotonic(z, labels, each))
    slope, intercept, error = _platt(z, labels, each)
    if method == "slope":
        apart = 0 < labels.mean() < 1 and 0 < slope < 1 - error
        slope, intercept = (slope, _same_rate(z, each, slope)) if apart else (1.0, 0.0)
    return Calibration(method, step, num_rows, slope, intercept)


def _same_rate(z: NDArray[np.float64], each: NDArray[np.float64], slope: float) -> float:
    """The intercept with which `slope` below 1 keeps the mean rate: not the mean logit, far below which few rows pull
    all others (shoppers.csv: a test LogLoss of 0.269, not 0.23)."""
    low, high = (1 - slope) * float(z.min()), (1 - slope) * float(z.max())

    def mean(logits: NDArray[np.float64]) -> float:
        return float((each * (1.0 + np.tanh(0.5 * logits))).sum())

    wanted = mean(z)
    for _ in range(MAX_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(slope * z + middle) < wanted else (low, middle)
    return high


def _platt(z: NDArray[np.float64], labels: NDArray[np.bool_], each: NDArray[np.float64]) -> tuple[float, float, float]:
    """The slope and the intercept, and the slope's standard error by the inverse of the Hessian."""
    positives, negatives = float(each[labels].sum()), float(each[~labels].sum())
    target = np.where(labels, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    mean, spread = np.average(z, weights=each), z.std() or 1.0
    x = (z - mean) / spread

    def loss(weights: NDArray[np.float64]) -> float:
        s = weights[0] * x + weights[1]
        return float((each * (np.logaddexp(0.0, s) - target * s)).sum())

    weights = np.array([0.0, math.log((positives + 1) / (negatives + 1))])
    for _ in range(MAX_STEPS):
        p = 0.5 * (1.0 + np.tanh(0.5 * (weights[0] * x + weights[1])))
        error, weight = each * (p - target), each * p * (1 - p)
        across = (weight * x).sum()  # sums, whose bits no number of threads changes as it does those of products
        curvature = np.array([[(weight * x * x).sum(), across], [across, weight.sum()]])
        change = np.linalg.lstsq(curvature, -np.array([(error * x).sum(), error.sum()]), rcond=None)[0]
        while loss(weights + change) > loss(weights) and np.abs(change).max() > LEAST_CHANGE:
            change = change / 2
        weights = weights + change
        if np.abs(change).max() <= LEAST_CHANGE:
            break
    slope, error = float(weights[0] / spread), float(math.sqrt(np.linalg.pinv(curvature)[0, 0]) / spread)
    return slope, float(weights[1] - slope * mean), error


def _isotonic(z: NDArray[np.float64], labels: NDArray[np.bool_], each: NDArray[np.float64]) -> dict[str, Any]:
    order = np.argsort(z, kind="stable")
    z, labels, each = z[order], labels[order], each[order]
    firsts = np.flatnonzero(np.concatenate([[True], z[1:] != z[:-1]]))
    total, positives = np.add.reduceat(each, firsts), np.add.reduceat(each * labels, firsts)
    # Whole runs of falling rates are pooled at once: the order of pooling changes no result.
    while not (rises := positives[:-1] * total[1:] < positives[1:] * total[:-1]).all():
        starts = np.flatnonzero(np.concatenate([[True], rises]))
        firsts = firsts[starts]
        total, positives = np.add.reduceat(total, starts), np.add.reduceat(positives, starts)
    least = 1 / (len(z) + 2)
    rates = np.clip(positives / total, least, 1 - least)
    lasts = np.append(firsts[1:], len(z)) - 1
    odds = np.log(rates / (1 - rates)).tolist()
    points = dict(zip(z[firsts].tolist(), odds, strict=True)) | dict(zip(z[lasts].tolist(), odds, strict=True))
    points = dict(sorted(points.items()))
    if len(points) == 1:
        points |= {x + 1: y for x, y in points.items()}
    return {"x": tuple(points), "y": tuple(points.values())}

"""Clicks that are judged by group as well: how well a model orders the rows of a user, or of a value of a column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.objectives.objective import Figures, Measure, shown


@dataclass(frozen=True)
class ClicksByGroup(BinaryCrossEntropy):
    """As `BinaryCrossEntropy`; with A_g the AUC of group g, and w_g the sum of the weights of its rows, 1 each if there
    are none, over the groups that have both labels:

        gauc         sum(w_g A_g) / sum(w_g), as in Zhu et al. (2017), weighted by impressions
        gauc_groups  number of these groups
        gauc_rows    number of their rows

    If there is no such group, `gauc` is NaN. by: the feature whose values are the groups.
    """

    by: str | None = None
    figures: ClassVar = (*BinaryCrossEntropy.figures, "gauc", "gauc_groups", "gauc_rows")
    optional: ClassVar = (*BinaryCrossEntropy.optional, "gauc")
    measures: ClassVar[Mapping[str, Measure]] = {
        **BinaryCrossEntropy.measures,
        "gauc": Measure("GAUC", "higher", meaning="the mean AUC among rows of one value of metrics.by"),
    }
    summary: ClassVar = (*BinaryCrossEntropy.summary, "gauc", "gauc_groups", "gauc_rows")
    monitors: ClassVar = (*BinaryCrossEntropy.monitors, "gauc")

    def measured_by_group(
        self,
        outputs_N: NDArray[np.float32],
        label_N: NDArray[np.bool_],
        weight_N: NDArray[np.float32] | None,
        group_N: NDArray[np.int64],
    ) -> dict[str, Any]:
        """Returns all figures that the class lists, and `undefined`. Rows of group -1 are in no group."""
        known, figures = group_N >= 0, self.measured(outputs_N, label_N, weight_N)
        weights = None if weight_N is None else weight_N[known]
        value, num_groups, num_rows = group_auc(outputs_N[known], label_N[known], group_N[known], weights)
        if not num_groups and figures["undefined"] is None:
            figures["undefined"] = f"no value of {self.by} has rows of both labels, which gauc needs"
        return {**figures, "gauc": value, "gauc_groups": num_groups, "gauc_rows": num_rows}

    def influences_by_group(
        self,
        outputs_N: NDArray[np.float32],
        label_N: NDArray[np.bool_],
        weight_N: NDArray[np.float32] | None,
        group_N: NDArray[np.int64],
    ) -> dict[str, NDArray[np.float64]]:
        """Returns the influences on all measures; the first row of each group moves `gauc`."""
        known, found = np.flatnonzero(group_N >= 0), self.influences(outputs_N, label_N, weight_N)
        weights = None if weight_N is None else weight_N[known]
        areas, weight, rows, _ = _by_group(outputs_N[known], label_N[known], group_N[known], weights)
        if len(areas):
            found["gauc"] = np.zeros(len(label_N))
            found["gauc"][known[rows]] = (
                len(label_N) * weight * (areas - np.average(areas, weights=weight)) / weight.sum()
            )
        return found

    def lines(self, figures: Figures) -> list[str]:
        """Returns AUC, LogLoss and GAUC, with the number of groups and rows behind GAUC."""
        of = f"{figures['gauc_groups']:,} groups by {self.by} with both labels, {figures['gauc_rows']:,} rows"
        return [*super().lines(figures), f"GAUC     {shown(figures['gauc'])}   ({of})"]


def group_auc(
    scores: NDArray[np.float32],
    labels: NDArray[np.bool_],
    groups: NDArray[np.int64],
    weights: NDArray[np.float32] | None = None,
) -> tuple[float, int, int]:
    """Returns the mean AUC of the groups that have both labels, each weighted by the sum of its rows' weights, and the
    numbers of these groups and rows. The mean is NaN if there is no such group. weights: as for `binary.auc`.

    One sort serves all groups. Without weights sums are of integers, and exact. It takes about 80 bytes per row.
    """
    areas, weight, _, num_rows = _by_group(scores, labels, groups, weights)
    return float(np.average(areas, weights=weight)) if len(areas) else math.nan, len(areas), num_rows


def _by_group(
    scores: NDArray[np.float32],
    labels: NDArray[np.bool_],
    groups: NDArray[np.int64],
    weights: NDArray[np.float32] | None,
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.int64], int]:
    """Returns of each group with both labels its AUC, its weight and one of its rows; and the number of their rows."""
    if not len(scores):
        return np.empty(0), np.empty(0), np.empty(0, np.int64), 0
    order = np.lexsort((scores, groups))
    scores, labels, groups = scores[order], labels[order], groups[order]
    weight = np.ones(len(order), np.int64) if weights is None else weights[order].astype(np.float64)
    is_new = np.concatenate([[True], groups[1:] != groups[:-1]])
    firsts = np.flatnonzero(is_new)
    is_new[1:] |= scores[1:] != scores[:-1]
    ties = np.flatnonzero(is_new)  # where rows of another group or score begin
    positives, negatives = (np.add.reduceat(weight * own, ties) for own in (labels, ~labels))
    starts = np.searchsorted(ties, firsts)
    below = np.cumsum(negatives) - negatives
    below -= np.repeat(below[starts], np.diff(starts, append=len(ties)))
    twice = np.add.reduceat(positives * (2 * below + negatives), starts)
    positives, negatives = np.add.reduceat(positives, starts), np.add.reduceat(negatives, starts)
    both = (positives > 0) & (negatives > 0)
    areas = twice[both] / (2 * positives * negatives)[both]
    of_group = np.minimum.reduceat(order, firsts)  # the same row for every model
    num_rows = int(np.diff(firsts, append=len(scores))[both].sum())
    return areas, (positives + negatives)[both], of_group[both], num_rows

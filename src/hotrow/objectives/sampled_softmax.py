"""Retrieval: a softmax over the items of other samples, corrected for how often each item comes, and recall@k.

For n samples, with u_i the vector of sample i's user, v_j that of sample j's item, q_j the share of training rows that
have item j, and c_j how many of the n samples have it:

    z_ij = <u_i, v_j> - log q_j, for samples j with another item than i
    loss_i = log(c_i e^z_ii + sum of e^z_ij over these j) - z_ii - log c_i     if the label is 1, else 0

An item that comes often is often a negative; without log q (Yi et al., 2019) the model would learn it as less likely
than it is. Samples with the item of sample i are not its negatives: they count as it does. So the loss is least if
<u, v> is the logarithm of P(item | user) plus a number for each user, whatever n is. Leaving them out without counting
them would move that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.ops import each_alone, product
from hotrow.objectives.objective import Figures, LabelKind, Measure, Objective

STRETCH = 1024
"""Samples that are negatives of each other. It is a number of its own, so that results depend on neither ranks nor, if
it divides their samples, micro-batches; n^2 products take 4 MB."""
NO_ITEM = -1.0
"""The place of an item that no training row has."""


class SampledSoftmax(Objective):
    """One label, 0 or 1. Outputs are vectors of a user and of an item; a score is their product.

    Labels are those of `hotrow.run.items.Items.labels`: label, id of the item, log q. Rows with label 1 are judged by
    the place of their item among all items of the training rows, by falling score to the row's user: 0 is the first,
    and equal scores share the mean of their places.
        recall_20     share of these rows whose item has a place below 20
        recall_100    the same for 100
        mrr           mean of 1 / (1 + place)
        log_rank      mean of log(1 + place), natural logarithm, over the rows whose item has a place
        unseen        share of the rows whose item no training row has: it has no place, and counts as not found
        num_positives rows with label 1
        num_rows      all rows

    If no label is 1, all but the numbers of rows are NaN; `log_rank` also if no item has a place. A sample's weight is
    that of its loss, and of its row in the means; as negatives, and in q, all samples count alike.
    """

    name: ClassVar = "sampled_softmax"
    label: ClassVar[LabelKind] = "binary"
    retrieves: ClassVar = True
    stretch: ClassVar = STRETCH
    figures: ClassVar = ("num_rows", "num_positives", "recall_20", "recall_100", "mrr", "log_rank", "unseen")
    optional: ClassVar = ("recall_20", "recall_100", "mrr", "log_rank", "unseen")
    measures: ClassVar[Mapping[str, Measure]] = {
        "recall_100": Measure("R@100", "higher", name="Recall@100"),
        "recall_20": Measure("R@20", "higher", name="Recall@20"),
        "mrr": Measure("MRR", "higher", name="Mean reciprocal rank"),
    }
    summary: ClassVar = ("recall_20", "recall_100", "mrr", "unseen")
    loss_figure: ClassVar = "log_rank"
    loss_title: ClassVar = "sampled softmax loss, mean log rank"
    monitors: ClassVar = ("recall_100", "recall_20", "mrr")
    score: ClassVar = "product of the user's and the item's vector"

    def summed(self, outputs_B: Tensor, labels_BL: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of the losses of at most STRETCH samples, 0-dim. outputs_B: [B, 2 M], user first."""
        user_BM, item_BM = (each.contiguous() for each in outputs_B.chunk(2, dim=1))
        label_B, log_share_B = labels_BL[:, 0].float(), labels_BL[:, 2].float()
        same_BB = labels_BL[:, 1, None] == labels_BL[:, 1]
        count_B = same_BB.sum(1).float()
        z_BB = product(user_BM, item_BM) - log_share_B
        own_B, others_BB = z_BB.diagonal(), z_BB.masked_fill(same_BB, -math.inf)
        most_B = torch.maximum(own_B, others_BB.amax(1)).detach()
        negatives_BB = each_alone(torch.exp, others_BB - most_B[:, None])
        rest_B = product(negatives_BB, negatives_BB.new_ones(1, len(negatives_BB))).squeeze(1)
        own_B = own_B - most_B
        loss_B = torch.log(count_B * torch.exp(own_B) + rest_B) - own_B - torch.log(count_B)
        return (loss_B * (label_B if weight_B is None else label_B * weight_B)).sum()

    @staticmethod
    def scores(outputs_B: Tensor) -> Tensor:
        """Returns the product of the two vectors of each sample, [B]."""
        user, item = outputs_B.chunk(2, dim=1)
        return (user * item).sum(1)

    def measured(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.bool_], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """Returns the figures that the class lists. outputs_N: places of the rows' items, or NO_ITEM."""
        weights, values = _of_rows(outputs_N, label_N, weight_N)
        seen = weights * (1 - values["unseen"])
        return {
            "num_rows": len(label_N),
            "num_positives": int(label_N.sum()),
            **{name: _mean(own, weights) for name, own in values.items()},
            "log_rank": _mean(np.log1p(np.abs(outputs_N.astype(np.float64))), seen),
            "undefined": None if seen.any() else "no row has label 1 and an item of the training rows",
        }

    def influences(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.bool_], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Returns by how much each row moves the measures, times N."""
        weights, values = _of_rows(outputs_N, label_N, weight_N)
        return {
            name: (values[name] - _mean(values[name], weights)) * weights / weights.mean()
            for name in self.measures
            if weights.any()
        }

    def lines(self, figures: Figures) -> list[str]:
        """Returns the measures, and how high recall can be if that is below 1."""
        first, *others = super().lines(figures)
        unseen = figures["unseen"]
        bound = f"   (at most {1 - unseen:.4f}: training rows do not have the other items)" if unseen else ""
        return [first + bound, *others]


def _of_rows(
    place_N: NDArray[np.float32], label_N: NDArray[np.bool_], weight_N: NDArray[np.float32] | None
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Returns the weights of rows, 0 without label 1, and the figures of which the metrics are means, by row."""
    place, seen = place_N.astype(np.float64), place_N != NO_ITEM
    found = {f"recall_{most}": (seen & (place < most)).astype(np.float64) for most in (20, 100)}
    weights = np.asarray(label_N if weight_N is None else label_N * weight_N, np.float64)
    return weights, {**found, "mrr": seen / (1 + np.abs(place)), "unseen": (~seen).astype(np.float64)}


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float(values @ weights / weights.sum()) if weights.any() else math.nan

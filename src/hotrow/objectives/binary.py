"""Clicks: labels of 0 or 1, binary cross-entropy, exact AUC, LogLoss, normalised entropy and calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hotrow.kernels.ops import sigmoid
from hotrow.objectives.objective import Figures, LabelKind, Measure, Objective, shares, shown

MIN_OF_EACH = 100
"""How many positives, and how many negatives, a split needs for its AUC to mean something."""
_PIECE_ROWS = 1 << 20
"""Rows turned into float64 at a time."""


@dataclass(frozen=True)
class BinaryCrossEntropy(Objective):
    """One label, 0 or 1. Outputs are logits; a score is the probability of label 1.

    With z the logit, p the predicted probability, y the label, r the mean label over all n rows (with weights, every
    mean and share is a weighted one, and a random row is drawn by weight):
        auc           P(score of a random positive > score of a random negative), ties counting one half
        logloss       -mean(y log p + (1 - y) log(1 - p)), natural logarithm; computed as mean(log(1 + e^z) - y z)
        base_logloss  the same for the constant prediction p = r, which is the entropy H(r)
        ne            logloss / base_logloss; below 1 is better than knowing the rate alone
        calibration   mean(p) / r; above 1 the model overestimates, below 1 it underestimates
        accuracy      share of rows with (p >= 0.5) == y
        base_rate     r
        num_rows      n

    `measured` takes 12 bytes of memory per row. If all labels are equal, `auc` and `ne` (and `calibration`, if there is
    no positive) are NaN.

    pos_weight: the loss of a sample is -w (pos_weight t log p + (1 - t) log(1 - p)), where t is the label and w the
    weight of the sample. Metrics do not know it.
    """

    pos_weight: float = 1.0
    loss_options: ClassVar = ("pos_weight",)
    name: ClassVar = "binary_cross_entropy"
    label: ClassVar[LabelKind] = "binary"
    figures: ClassVar[tuple[str, ...]] = (
        *("num_rows", "auc", "logloss", "ne", "calibration", "accuracy", "base_rate", "base_logloss"),
    )
    optional: ClassVar[tuple[str, ...]] = ("auc", "ne", "calibration")
    measures: ClassVar[Mapping[str, Measure]] = {
        "auc": Measure("AUC", "higher"),
        "logloss": Measure("LogLoss", "lower"),
        "ne": Measure(
            "NE",
            "lower",
            name="Normalised entropy",
            meaning="LogLoss over the LogLoss of a constant rate; below 1 is better",
            beside=" (a constant rate: 1)",
        ),
    }
    summary: ClassVar[tuple[str, ...]] = ("auc", "logloss", "ne", "calibration", "base_logloss")
    loss_figure: ClassVar = "logloss"
    loss_title: ClassVar = "LogLoss"
    monitors: ClassVar[tuple[str, ...]] = ("logloss", "auc")
    score: ClassVar = "probability of a positive label"

    def summed(self, outputs_B: Tensor, labels_BL: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of the binary cross-entropies of at most SERIAL samples, 0-dim."""
        positive = None if self.pos_weight == 1 else outputs_B.new_full((), self.pos_weight)
        return binary_cross_entropy_with_logits(
            outputs_B, labels_BL[:, 0], weight=weight_B, pos_weight=positive, reduction="sum"
        )

    @staticmethod
    def scores(outputs_B: Tensor) -> Tensor:
        """Returns the probability of label 1 for each sample, [B]."""
        return sigmoid(outputs_B)

    def measured(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.bool_], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        num_rows = len(label_N)
        weights = np.broadcast_to(np.float32(1), num_rows) if weight_N is None else weight_N
        total, positive = (float(own.sum(dtype=np.float64)) for own in (weights, weights[label_N]))
        rate = min(1.0, positive / total)  # the sums may round in different ways
        loss, mean_prediction, accuracy = _sums(outputs_N, label_N, weights) / total
        base = entropy(rate)
        single = not 0.0 < rate < 1.0  # weights may differ by so much that one label has all of it
        return {
            "num_rows": num_rows,
            "auc": auc(outputs_N, label_N, weight_N),
            "logloss": float(loss),
            "ne": math.nan if single else float(loss) / base,
            "calibration": float(mean_prediction) / rate if positive else math.nan,
            "accuracy": float(accuracy),
            "base_rate": rate,
            "base_logloss": base,
            "undefined": f"all {num_rows} labels are {int(positive > 0)}: auc and ne need both" if single else None,
        }

    def losses(self, outputs_N: NDArray[np.float32], label_N: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The binary cross-entropy of each row [N]."""
        z = outputs_N.astype(np.float64)
        return np.logaddexp(0.0, z) - label_N * z

    def influences(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.bool_], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Returns the influences on `auc` (DeLong et al., 1988), `logloss` and `ne`."""
        loss_N, share_N = self.losses(outputs_N, label_N), shares(weight_N, len(label_N))
        rate = float((share_N * label_N).mean())
        loss = float((share_N * loss_N).mean())
        found = {"logloss": share_N * (loss_N - loss)}
        if share_N[label_N].any() and share_N[~label_N].any():
            base, slope = entropy(rate), math.log((1 - rate) / rate)
            found["ne"] = share_N * ((loss_N - loss) / base - loss / base**2 * slope * (label_N - rate))
            found["auc"] = _auc_influence(outputs_N, label_N, share_N)
        return found

    def doubts(self, figures: Figures, rows: str) -> dict[str, str]:
        """Returns `worse_than_a_constant` and `auc_below_half`, if they are so."""
        told, loss, base, area = {}, figures["logloss"], figures["base_logloss"], figures["auc"]
        if loss > base and figures["undefined"] is None:
            told["worse_than_a_constant"] = (
                f"LogLoss {loss:.4f} on {rows} is above {base:.4f}, that of always predicting their mean rate, so "
                "scores are no probabilities there. Training went on too long or too fast (optimizer.*.lr), or the "
                "rows differ from those of training"
            )
        if area is not None and area < 0.5:
            told["auc_below_half"] = (
                f"AUC {area:.4f} on {rows} is below 0.5, which guessing has: check what the label means there, and "
                "whether there are enough rows of either label"
            )
        return told

    def too_few(self, labels: Iterable[NDArray[np.float32]], split: str) -> dict[str, str]:
        """Returns `few_positive_<split>_rows` or `few_negative_<split>_rows`, if the split has few of them."""
        counts = [(len(piece), int(piece.sum())) for piece in labels]
        num_rows, positives = (sum(each) for each in zip(*counts, strict=True))
        fewer, word = min((positives, "positive"), (num_rows - positives, "negative"))
        if fewer >= MIN_OF_EACH:
            return {}
        # Hanley and McNeil (1982), for an AUC about 0.75
        error = f", AUC +- {0.2 / math.sqrt(fewer):.2f}" if fewer else ", so it has no AUC"
        text = (
            f"the {split} split has {fewer} {word} rows of {num_rows:,}, too few to judge by{error}; prepare more "
            "rows, or give this split a larger share: --fractions 0.6,0.2,0.2 "
            "(in fit split={'fractions': [0.6, 0.2, 0.2]})"
        )
        return {f"few_{word}_{split}_rows": text}

    def verdict(self, figures: Mapping[str, float | None]) -> str:
        """Returns the AUC, and by how much the LogLoss differs from the LogLoss of a constant rate."""
        text = "an undefined AUC" if figures["auc"] is None else f"AUC {figures['auc']:.4f}"
        if (ne := figures["ne"]) is None:
            return text
        more = "less" if ne <= 1 else "more"
        return f"{text}, and a LogLoss that is {abs(1 - ne):.1%} {more} than that of a constant rate of clicks"

    def lines(self, figures: Figures) -> list[str]:
        """Returns AUC and LogLoss, each beside what a constant rate has."""
        base, ratio = shown(figures["base_logloss"]), shown(figures["ne"])
        return [
            f"AUC      {shown(figures['auc'])}   (a constant rate: 0.5000)",
            f"LogLoss  {shown(figures['logloss'])}   (a constant rate: {base}; ratio {ratio})",
        ]


def _sums(logits: NDArray[np.float32], labels: NDArray[np.bool_], weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the weighted sums over rows of loss, predicted probability, and correct decisions."""
    sums = np.zeros(3)
    for start in range(0, len(logits), _PIECE_ROWS):
        z = logits[start : start + _PIECE_ROWS].astype(np.float64)
        label, weight = (own[start : start + _PIECE_ROWS] for own in (labels, weights))
        loss, probability = np.logaddexp(0.0, z) - label * z, 0.5 * (1.0 + np.tanh(0.5 * z))
        right = weight.sum(where=(z >= 0) == label, dtype=np.float64)
        sums += (loss * weight).sum(), (probability * weight).sum(), right
    return sums


def auc(scores: NDArray[np.float32], labels: NDArray[np.bool_], weights: NDArray[np.float32] | None = None) -> float:
    """Returns P(score of a random positive > score of a random negative) + P(equal) / 2; NaN if a class is missing.

    With weights, rows are drawn in proportion to them. Without, it is exact: for each positive, it counts the negatives
    strictly below and the negatives not above, in integers.
    """
    if weights is not None:
        return _weighted_auc(scores, labels, weights.astype(np.float64))
    negatives, positives = np.sort(scores[~labels]), np.sort(scores[labels])
    if not len(negatives) or not len(positives):
        return math.nan
    twice = 0
    for start in range(0, len(positives), _PIECE_ROWS):
        piece = positives[start : start + _PIECE_ROWS]
        twice += int(np.searchsorted(negatives, piece, "left").sum()) + int(
            np.searchsorted(negatives, piece, "right").sum()
        )
    return twice / (2 * len(negatives) * len(positives))


def _weighted_auc(scores: NDArray[np.float32], labels: NDArray[np.bool_], weights: NDArray[np.float64]) -> float:
    order = np.argsort(scores[~labels], kind="stable")
    negatives, positives = scores[~labels][order], scores[labels]
    below = np.concatenate([[0.0], np.cumsum(weights[~labels][order])])  # weight of the first k negatives
    if not below[-1] or not weights[labels].any():
        return math.nan
    twice = below[np.searchsorted(negatives, positives, "left")] + below[np.searchsorted(negatives, positives, "right")]
    return float(np.average(twice, weights=weights[labels]) / (2 * below[-1]))


def _auc_influence(
    scores: NDArray[np.float32], labels: NDArray[np.bool_], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns, for each row, how its share of the other label's rows that it beats differs from the AUC, over the share
    of its own label; both labels must occur. shares: weights, whose mean is 1."""
    found = np.empty(len(scores))
    for own, sign in ((labels, 1), (~labels, -1)):
        order = np.argsort(sign * scores[~own], kind="stable")
        others, mine, share = (sign * scores[~own])[order], sign * scores[own], shares[own]
        below = np.concatenate([[0.0], np.cumsum(shares[~own][order])])
        twice = below[np.searchsorted(others, mine, "left")] + below[np.searchsorted(others, mine, "right")]
        beaten = twice / (2 * below[-1])
        found[own] = share * (beaten - np.average(beaten, weights=share)) / (share.sum() / len(scores))
    return found


def entropy(rate: float) -> float:
    """Returns -(r log r + (1 - r) log(1 - r)), natural logarithm: the LogLoss of always predicting the rate r."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)

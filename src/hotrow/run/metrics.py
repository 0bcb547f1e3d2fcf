"""Metrics of scores over a whole split: exact AUC, LogLoss, normalised entropy and calibration.

Nothing is averaged over batches, because the mean of the batches' AUCs is not the AUC. Scores are kept (5 bytes a row)
and all metrics are computed from them at the end. So the batch size has no influence, and the order of rows changes
only the last bits of the sums; AUC is counted in integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator
from torch import Tensor

_FIGURES = ("num_rows", "auc", "logloss", "ne", "calibration", "accuracy", "base_rate", "base_logloss")


def _check_metrics(values: dict[str, Any]) -> dict[str, Any]:
    if values.keys() != {*_FIGURES, "undefined"}:
        raise ValueError(f"it has {', '.join(values) or 'nothing'}; it needs {', '.join(_FIGURES)}, undefined")
    for name in _FIGURES:
        kinds = {"num_rows": (int,), "logloss": (int, float)}.get(name, (int, float, type(None)))
        if type(values[name]) not in kinds:
            raise ValueError(f"{name} is {values[name]!r}; it must be a number")
    if not isinstance(values["undefined"], str | None):
        raise ValueError(f"undefined is {values['undefined']!r}; it must be text or null")
    return values


Metrics: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_metrics)]
"""The result of `BinaryMetrics.compute` as it is written to files, with null for NaN."""
_PIECE_ROWS = 1 << 20
"""Rows turned into float64 at a time."""


class BinaryMetrics:
    """Logits and labels of a binary task, and exact metrics over all of them.

        metrics = BinaryMetrics()
        metrics.update(logits, labels)               # per batch
        metrics.compute()["auc"]

    With z the logit, p the predicted probability, y the label, r the mean label over all n rows:
        auc           P(score of a random positive > score of a random negative), ties counting one half
        logloss       -mean(y log p + (1 - y) log(1 - p)), natural logarithm; computed as mean(log(1 + e^z) - y z)
        base_logloss  the same for the constant prediction p = r, which is the entropy H(r)
        ne            logloss / base_logloss; below 1 is better than knowing the rate alone
        calibration   mean(p) / r; above 1 the model overestimates, below 1 it underestimates
        accuracy      share of rows with (p >= 0.5) == y
        base_rate     r
        num_rows      n

    Memory: 5 bytes per row (float32 score, label in one byte), and 12 bytes per row more in `compute`.
    """

    def __init__(self) -> None:
        self._scores: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.bool_]] = []

    @property
    def num_rows(self) -> int:
        return sum(len(labels) for labels in self._labels)

    def update(self, logits: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> None:
        """Adds rows: logits [n] (any float dtype, kept as float32) and labels [n], 0 or 1.

        Raises ValueError for NaN or infinite logits (the model diverged) and for other labels.
        """
        score_n = _to_numpy(logits).astype(np.float32).reshape(-1)
        label_n = _to_numpy(labels).reshape(-1)
        if len(score_n) != len(label_n):
            raise ValueError(f"{len(score_n)} scores came with {len(label_n)} labels; pass one label per score")
        if not np.isfinite(score_n).all():
            bad = int((~np.isfinite(score_n)).sum())
            raise ValueError(f"{bad} of {len(score_n)} scores are NaN or infinite; the model has diverged, lower lr")
        positive = label_n == 1
        if not (positive | (label_n == 0)).all():
            raise ValueError(f"labels hold {label_n[~(positive | (label_n == 0))][0]}; they must be 0 or 1")
        self._scores.append(score_n)
        self._labels.append(positive)

    def compute(self) -> dict[str, Any]:
        """Returns all metrics as floats, and `num_rows`; see the class.

        If all labels are equal, `auc` and `ne` (and `calibration`, if there is no positive) are NaN, and `undefined`
        says why in words; otherwise `undefined` is None. Raises ValueError if no row was added.
        """
        if not self.num_rows:
            raise ValueError("no rows were added, so there is nothing to compute; is the split empty?")
        scores, labels = np.concatenate(self._scores), np.concatenate(self._labels)
        self._scores, self._labels = [scores], [labels]
        num_rows, num_positive = len(labels), int(labels.sum())
        rate = num_positive / num_rows
        loss, mean_prediction, accuracy = _sums(scores, labels) / num_rows
        base = entropy(rate)
        single = num_positive in (0, num_rows)
        return {
            "num_rows": num_rows,
            "auc": auc(scores, labels),
            "logloss": float(loss),
            "ne": math.nan if single else float(loss) / base,
            "calibration": float(mean_prediction) / rate if num_positive else math.nan,
            "accuracy": float(accuracy),
            "base_rate": rate,
            "base_logloss": base,
            "undefined": f"all {num_rows} labels are {int(labels[0])}: auc and ne need both" if single else None,
        }


def doubts(metrics: Mapping[str, Any], rows: str) -> dict[str, str]:
    """Returns what is wrong with a model that has these metrics, by the code under which runs count it; {} if nothing.

    rows: what the metrics are of, such as "the test split". A model that is worse than a constant has learned nothing
    that holds for these rows, or their labels mean something else than in training.
    """
    told, loss, base, area = {}, metrics["logloss"], metrics["base_logloss"], metrics["auc"]
    if loss > base and metrics["undefined"] is None:
        told["worse_than_a_constant"] = (
            f"LogLoss {loss:.4f} on {rows} is above {base:.4f}, that of always predicting their mean rate, so scores "
            "are no probabilities there. Training went on too long or too fast (optimizer.*.lr), or the rows differ "
            "from those of training"
        )
    if area is not None and area < 0.5:
        told["auc_below_half"] = (
            f"AUC {area:.4f} on {rows} is below 0.5, that of guessing: check what the label means there, and whether "
            "there are enough rows of either label"
        )
    return told


def _sums(logits: NDArray[np.float32], labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns the sums over rows of loss, predicted probability, and correct decisions."""
    sums = np.zeros(3)
    for start in range(0, len(logits), _PIECE_ROWS):
        z = logits[start : start + _PIECE_ROWS].astype(np.float64)
        label = labels[start : start + _PIECE_ROWS]
        loss, probability = np.logaddexp(0.0, z) - label * z, 0.5 * (1.0 + np.tanh(0.5 * z))
        sums += loss.sum(), probability.sum(), ((z >= 0) == label).sum()
    return sums


def auc(scores: NDArray[np.float32], labels: NDArray[np.bool_]) -> float:
    """Returns P(score of a random positive > score of a random negative) + P(equal) / 2; NaN if a class is missing.

    It is exact: for each positive, it counts the negatives strictly below and the negatives not above, in integers.
    """
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


def entropy(rate: float) -> float:
    """Returns -(r log r + (1 - r) log(1 - r)), natural logarithm: the LogLoss of always predicting the rate r."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)


def _to_numpy(values: Tensor | ArrayLike) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu")
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)

"""Regression: labels that are numbers, squared error, RMSE, MAE and R2."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from hotrow.objectives.objective import Figures, LabelKind, Measure, Objective, shares, shown


class SquaredError(Objective):
    """One label, any finite number. The output is its prediction, and the score.

    With s the output and y the label of each of n rows, sums in float64, and means weighted if rows have weights:
        rmse, mse     the root of mean((s - y)^2), and that mean
        mae           mean(|s - y|)
        r2            1 - mse / base_mse; above 0 is better than knowing the mean alone
        base_mse      the mse of always predicting the mean label, which is the variance of the labels
        bias          mean(s) - mean(y); above 0 the model overestimates
        num_rows      n

    If all labels are equal, `r2` is NaN.
    """

    name: ClassVar = "squared_error"
    label: ClassVar[LabelKind] = "number"
    figures: ClassVar = ("num_rows", "rmse", "mse", "mae", "r2", "base_mse", "bias")
    optional: ClassVar = ("r2",)
    measures: ClassVar[Mapping[str, Measure]] = {
        "rmse": Measure("RMSE", "lower"),
        "mae": Measure("MAE", "lower"),
        "r2": Measure("R2", "higher", meaning="the share of the labels' variance that the model explains"),
    }
    summary: ClassVar = ("rmse", "mae", "r2", "bias", "base_mse")
    loss_figure: ClassVar = "mse"
    loss_title: ClassVar = "mean squared error"
    monitors: ClassVar = ("rmse", "mae")
    score: ClassVar = "predicted number"

    def summed(self, outputs_B: Tensor, labels_BL: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of the squared errors of at most SERIAL samples, 0-dim."""
        if weight_B is None:
            return mse_loss(outputs_B, labels_BL[:, 0], reduction="sum")
        return (weight_B * mse_loss(outputs_B, labels_BL[:, 0], reduction="none")).sum()

    @staticmethod
    def scores(outputs_B: Tensor) -> Tensor:
        """Returns the predicted number for each sample, [B]."""
        return outputs_B

    def measured(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.float32], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        mean = functools.partial(np.average, weights=weight_N)
        labels = label_N.astype(np.float64)
        errors = outputs_N - labels
        counted = label_N if weight_N is None else label_N[weight_N > 0]
        mse, base = float(mean(errors**2)), float(mean((labels - mean(labels)) ** 2))
        base = 0.0 if (counted == counted[0]).all() else base  # rounding may have left something
        return {
            "num_rows": len(labels),
            "rmse": math.sqrt(mse),
            "mse": mse,
            "mae": float(mean(np.abs(errors))),
            "r2": 1 - mse / base if base else math.nan,
            "base_mse": base,
            "bias": float(mean(errors)),
            "undefined": None if base else f"all {len(labels)} labels are {counted[0]:g}: r2 needs several values",
        }

    def losses(self, outputs_N: NDArray[np.float32], label_N: NDArray[np.float32]) -> NDArray[np.float64]:
        """The squared error of each row [N]."""
        errors = outputs_N.astype(np.float64) - label_N
        return errors**2

    def influences(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[np.float32], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Returns the influences on `rmse`, `mae` and `r2`."""
        labels, share_N = label_N.astype(np.float64), shares(weight_N, len(label_N))
        mean = functools.partial(np.average, weights=share_N)
        error_N, spread_N = outputs_N - labels, (labels - mean(labels)) ** 2
        mse, base = float(mean(error_N**2)), float(mean(spread_N))
        found = {"mae": np.abs(error_N) - mean(np.abs(error_N))}
        if mse:
            found["rmse"] = (error_N**2 - mse) / (2 * math.sqrt(mse))
        if base:
            found["r2"] = mse / base**2 * (spread_N - base) - (error_N**2 - mse) / base
        return {name: share_N * own for name, own in found.items()}

    def doubts(self, figures: Figures, rows: str) -> dict[str, str]:
        if figures["r2"] is None or figures["r2"] >= 0:
            return {}
        text = (
            f"RMSE {figures['rmse']:.4g} on {rows} is above {math.sqrt(figures['base_mse']):.4g}, that of always "
            "predicting their mean. Training was too short, too long or too fast (optimizer.*.lr), or the rows differ "
            "from those of training; labels far from 0, or far apart, need scaling before preparation"
        )
        return {"worse_than_a_constant": text}

    def verdict(self, figures: Mapping[str, float | None]) -> str:
        """Returns the RMSE, and the share of the variance that the model explains."""
        explained = "" if figures["r2"] is None else f", and explains {figures['r2']:.1%} of the labels' variance"
        return f"RMSE {shown(figures['rmse'])}{explained}"

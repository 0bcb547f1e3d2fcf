"""After how many steps to stop, by the validation rows of a run that went further.

On a few thousand validation rows the best evaluation is the best one partly by chance, and then it often comes early.
So we take the last one that is no worse than it within noise. In a run that finds the best step each evaluation keeps
the losses of NUM_PARTS parts of the rows, from which the noise of the difference between any two evaluations follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.objectives.objective import Metrics, Objective

NUM_PARTS = 64
"""Their standard error is known within 9 %."""
NOISE = 0.5
"""Standard errors. On thirteen files LogLoss of test rows was lower by 0.0004 in the mean than at the best evaluation,
and higher nowhere beyond noise; one standard error cost 0.006 and 0.0008 on two of them."""


def losses_of_parts(metrics: Metrics, objective: Objective) -> list[float]:
    """Returns the mean loss of each part of the rows; the k-th row is in part k modulo NUM_PARTS."""
    columns = [torch.from_numpy(own.astype(np.float32)) for own in metrics.rows() if own is not None]

    def loss(outputs: Tensor, labels: Tensor, *weights: Tensor) -> float:
        return float(objective.loss(outputs, labels.view(len(outputs), -1), len(outputs), *weights))

    return [loss(*(own[k::NUM_PARTS] for own in columns)) for k in range(min(NUM_PARTS, len(columns[0])))]


def losses_by_step(lines: Iterable[Mapping[str, Any]]) -> dict[int, NDArray[np.float64]]:
    """Returns the losses of parts by the step of their evaluation. lines: those of metrics.jsonl."""
    return {line["step"]: np.array(line["losses"]) for line in lines if "losses" in line}


def difference(losses: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[float, float]:
    """Returns by how much losses of parts are higher than others of the same parts, and the standard error of that. A
    single part says nothing of noise: all of its difference may be."""
    worse = losses - others
    mean = float(worse.mean())
    return mean, float(worse.std(ddof=1)) / math.sqrt(len(worse)) if len(worse) > 1 else abs(mean)


def step_to_stop_at(lines: Iterable[Mapping[str, Any]], best_step: int) -> int:
    """Returns the step of the last evaluation whose loss is within NOISE of that at `best_step`.

    lines: those of metrics.jsonl.
    """
    found = losses_by_step(lines)
    best = found.get(best_step)
    if best is None or len(best) < 2:
        return best_step
    worse = {step: difference(losses, best) for step, losses in found.items() if step > best_step}
    return max([best_step, *(step for step, (mean, error) in worse.items() if mean <= NOISE * error)])

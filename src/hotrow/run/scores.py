"""What the scores of a finished run show a modeller: what each column gives, and calibration.

All of it is of the split that the run is judged by, and is kept in run.json for the report. Nothing here changes a
weight or draws from a generator that training uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.packed.format import DatasetInfo
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import Split
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import SeveralLabels
from hotrow.report.columns import Column
from hotrow.run.build import Parts, look_up
from hotrow.run.explain import separable
from hotrow.run.record import Gain, Group, Means, Scores
from hotrow.setup.beside import EVAL_BATCH_SIZE

SHUFFLES = 3
STRETCHES = 20
"""The error of a gain is that of the mean over so many parts of the rows."""
MIN_SECONDS, MAX_SHARE = 2.0, 0.05
"""Gains may take so many seconds, or so large a share of the training time if that is more."""
MAX_ROWS = 1 << 20
"""Rows, evenly spread over the split, that are looked at."""
TENTHS = 10
MIN_GAIN_ROWS = 200
"""Rows that gains are found on at least, if there are so many."""


@torch.no_grad()
def inputs_of(parts: Parts, split: Split, *, is_first: bool) -> Inputs:
    """Rows that lie evenly over a split, without those that do not count. Collective: ranks other than the first join
    in its one lookup, and get none."""
    batch = next(Loader(
        split, EVAL_BATCH_SIZE, shuffle_seed=None, only=spread(split.num_rows, EVAL_BATCH_SIZE),
        part=lambda num_rows: (0, num_rows if is_first else 0),
    ).epoch(0))  # fmt: skip
    rows = look_up(parts.model, parts.embedding, batch.sparse)
    weights = None if batch.weight is None else batch.weight.numpy()
    inputs = Inputs(parts, batch.dense, rows, batch.label.numpy(), weights)
    # Of rows that do not count no part has a loss.
    return inputs if batch.weight is None else inputs.of_rows(torch.nonzero(batch.weight)[:, 0])


@torch.no_grad()
def gains(inputs: Inputs, info: DatasetInfo, *, train_s: float) -> tuple[int, dict[str, Gain]]:
    """Returns the number of rows that were looked at, and by column how much the loss rises if its values are exchanged
    among these rows, as far as the time allows."""
    columns = separable(info, inputs.parts.model)
    if inputs.num_rows < 2:
        return 0, {}
    seconds, began = max(MIN_SECONDS, MAX_SHARE * train_s), time.monotonic()
    before = inputs.losses()
    every = math.ceil((time.monotonic() - began) * SHUFFLES * len(columns) / seconds)
    if every > 1:
        most = max(1, inputs.num_rows // MIN_GAIN_ROWS)
        inputs = inputs.of_rows(torch.arange(0, inputs.num_rows, min(every, most)))
        before = inputs.losses()
    generator, risen = np.random.default_rng(0), dict[str, list[NDArray[np.float64]]]()
    for _ in range(SHUFFLES):
        order = torch.from_numpy(generator.permutation(inputs.num_rows))
        for name, column in columns.items():
            if time.monotonic() - began <= seconds:
                risen.setdefault(name, []).append(inputs.exchanged(column, order).losses() - before)
    return inputs.num_rows, {name: _gain(np.mean(own, axis=0)) for name, own in risen.items()}


def _gain(risen: NDArray[np.float64]) -> Gain:
    """Returns the mean over parts of the rows, and its standard error."""
    return Gain(float(risen.mean()), float(risen.std(ddof=1) / math.sqrt(len(risen))))


def spread(num_rows: int, most: int) -> NDArray[np.bool_]:
    """Returns a mask of at most `most` rows that lie evenly among `num_rows`."""
    mask = np.zeros(num_rows, np.bool_)
    mask[np.linspace(0, num_rows, min(num_rows, most), endpoint=False).astype(np.int64)] = True
    return mask


@dataclass
class Inputs:
    """Rows as a model takes them, with their tables' rows looked up."""

    parts: Parts
    dense: Tensor
    rows: Any
    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    def losses(self) -> NDArray[np.float64]:
        """Returns the loss of each of at most STRETCHES parts of the rows."""
        objective, num_parts = self.parts.objective, min(STRETCHES, self.num_rows)
        outputs_B = self.parts.dense.outputs(self.parts.model, self.dense, self.rows).cpu().numpy()
        loss_B = objective.losses(outputs_B, self.labels > 0 if objective.label == "binary" else self.labels)
        weight_B = np.ones(len(loss_B)) if self.weights is None else self.weights
        parts = (slice(k, None, num_parts) for k in range(num_parts))
        return np.array([np.average(loss_B[part], weights=weight_B[part]) for part in parts])

    def means(self, info: DatasetInfo, step: int) -> Means | None:
        """The mean inputs of the rows, for weights of `step`; None without rows."""

        def mean(own: Tensor) -> list[float]:
            return [*((own.double().cpu().numpy() * weight_B1).sum(0) / weight_B1.sum())]

        if not self.num_rows:
            return None
        weight_B1 = (np.ones(self.num_rows) if self.weights is None else self.weights.astype(np.float64))[:, None]
        if isinstance(self.rows, Tensor):
            pooled = dict(zip(self._dims, torch.split(self.rows, [*self._dims.values()], 1), strict=True))
        else:
            pooled = {own.name: self.rows[own.name][0] for own in info.features if own.kind == "one_hot"}
        return Means(step, mean(self.dense), {name: mean(own) for name, own in pooled.items()})

    @property
    def _dims(self) -> dict[str, int]:
        """Columns of the rows of each feature, in their order."""
        dims = {name: table.embedding_dim for table in self.parts.embedding.tables for name in table.feature_names}
        return {name: dims[name] for name in self.parts.embedding.feature_names}

    def of_rows(self, chosen: Tensor) -> Inputs:
        """Returns the chosen rows."""
        rows, at = self._taken(chosen, self.parts.embedding.feature_names), chosen.numpy()
        weights = None if self.weights is None else self.weights[at]
        return Inputs(self.parts, self.dense[chosen], rows, self.labels[at], weights)

    def exchanged(self, column: Column, order: Tensor) -> Inputs:
        """Returns the rows with what is made of a column in another order."""
        dense_BI = self.dense.clone()
        dense_BI[:, column.dense] = self.dense[order][:, column.dense]
        return replace(self, dense=dense_BI, rows=self._taken(order, column.features))

    def _taken(self, order: Tensor, features: Sequence[str]) -> Any:
        """Returns the tables' rows, those of `features` as `order` has them."""
        if not isinstance(self.rows, Tensor):
            own = {name: _bags(self.rows[name], order) for name in features}
            return {**self.rows, **own}
        dims, at = self._dims, order.to(self.rows.device)
        pieces = zip(dims, torch.split(self.rows, [*dims.values()], dim=1), strict=True)
        taken = [piece[at] if name in features else piece for name, piece in pieces]
        return torch.cat(taken, dim=1)


def _bags(bags: tuple[Tensor, Tensor], order: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bags of samples `order`, one after another."""
    values, offsets = bags
    lengths = offsets.diff()[order]
    ends = lengths.cumsum(0)
    places = torch.repeat_interleave(offsets[order] - ends + lengths, lengths) + torch.arange(int(lengths.sum()))
    return values[places.to(values.device)], torch.cat([ends.new_zeros(1), ends])


def scores_of(
    split: str,
    objective: Objective,
    judged: tuple[NDArray[np.float32], NDArray[Any], NDArray[np.float32] | None],
    gained: tuple[int, dict[str, Gain]],
) -> Scores:
    """Returns what the scores of a split show. judged: the outputs, labels and weights of its rows, in their order.
    gained: what `gains` returned. With several labels it is about the first, except for the gains."""
    every = -(-len(judged[0]) // MAX_ROWS)
    outputs, labels, weights = (None if each is None else each[::every] for each in judged)
    assert outputs is not None and labels is not None
    if isinstance(objective, SeveralLabels):
        objective, outputs, labels = objective.base, outputs[:, 0], labels[:, 0]
    scores = objective.scores(torch.from_numpy(outputs)).double().numpy()

    def group(rows: NDArray[Any]) -> Group:
        own = weights[rows] if weights is not None and weights[rows].any() else None
        score, label = (float(np.average(each[rows].astype(np.float64), weights=own)) for each in (scores, labels))
        return Group(len(rows), score, label)

    order, (num_rows, by_column) = np.argsort(scores, kind="stable"), gained
    tenths = [group(tenth) for tenth in np.array_split(order, min(TENTHS, len(order)))]
    return Scores(split, group(order), tenths, num_rows, by_column)

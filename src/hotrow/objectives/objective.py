"""What an objective is to the rest of hotrow: an `Objective`, which `model.objective` names.

A new objective is one file beside this one with a subclass of `Objective`, and one entry in
`hotrow.objectives.OBJECTIVES`. The config's allowed values, training, metrics, monitors, warnings, report pages,
`predict` and exports follow from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hotrow.kernels.tree import SERIAL

LabelKind = Literal["binary", "number"]
"""`binary`: 0 or 1. `number`: any finite number."""
Figures = Mapping[str, Any]
"""Metrics by name, as they are written to files: None stands for NaN."""
ERRORS = 2.0
"""A difference of at most this many standard errors may be chance: if there is none, one in twenty is larger."""


class Measure(NamedTuple):
    """A metric as people read it."""

    title: str
    better: Literal["higher", "lower"]
    name: str = ""
    """The title of its chart; empty if `title` will do."""
    meaning: str = ""
    """What its numbers mean, if the title does not say it."""
    beside: str = ""
    """What is shown beside its number, to compare with."""

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is."""
        return 1 if self.better == "higher" else -1


class Objective:
    """A loss, the metrics that judge a model, and the scores that it gives.

        objective = OBJECTIVES["binary_cross_entropy"]
        objective.loss(outputs_B, batch.labels, batch.num_samples, batch.weight).backward()
        metrics = objective.metrics()
        metrics.update(outputs_B, batch.labels, batch.weight)      # per batch
        metrics.compute()["auc"]
        objective.scores(outputs_B)                  # what `predict` returns

    outputs_B is what a network returns, float32 [B]; labels are float32 [B, L], weights float32 [B] or None. Objectives
    of one label take the first; `several.py` makes one of several labels of any, whose outputs are [B, L].
    """

    name: ClassVar[str]
    label: ClassVar[LabelKind]
    """The kind of label that it needs."""
    retrieves: ClassVar[bool] = False
    """Whether outputs are vectors of a user and an item, [B, 2 M], and a row is judged by the place of its item among
    all (`hotrow.run.items`), which metrics then get as its output."""
    stretch: ClassVar[int] = SERIAL
    """Samples whose losses are one operation, so that results do not depend on threads (`ops.each_alone`)."""
    loss_options: ClassVar[tuple[str, ...]] = ()
    """The options of `train` that its class takes as arguments; they change the loss alone, no metric."""
    figures: ClassVar[tuple[str, ...]]
    """Names of the numbers that `compute` returns. `num_rows` is one of them."""
    optional: ClassVar[tuple[str, ...]]
    """The `figures` that are undefined, and NaN, for some rows."""
    measures: ClassVar[Mapping[str, Measure]]
    """The figures that people are shown, most important first."""
    summary: ClassVar[tuple[str, ...]]
    """The figures that stand in the flat record of a run (`hotrow train --json`)."""
    loss_figure: ClassVar[str]
    """The figure that is the mean of the loss over rows: training lowers it."""
    loss_title: ClassVar[str]
    """Its title for people."""
    monitors: ClassVar[tuple[str, ...]]
    """The measures that may decide which weights are best; the first is the default."""
    score: ClassVar[str]
    """What a score is, in words that follow "the"."""
    by: str | None = None
    """The feature whose values make groups of rows, by which the model is judged too; None if there is none."""

    def loss(self, outputs_B: Tensor, labels_BL: Tensor, num_samples: int, weight_B: Tensor | None = None) -> Tensor:
        """Returns the sum over these samples of weight times loss, divided by `num_samples`, 0-dim. weight_B: if None,
        each weighs 1."""
        columns = [outputs_B, labels_BL, *([] if weight_B is None else [weight_B])]
        stretches = zip(*(torch.split(column, self.stretch) for column in columns), strict=True)
        return functools.reduce(torch.add, [self.summed(*each) for each in stretches]) / num_samples

    def summed(self, outputs_B: Tensor, labels_BL: Tensor, weight_B: Tensor | None = None) -> Tensor:
        """Returns the sum of the weighted losses of at most `stretch` samples, 0-dim, in one operation of torch."""
        raise NotImplementedError

    @staticmethod
    def scores(outputs_B: Tensor) -> Tensor:
        """Returns the score of each sample, [B]. An export copies this function, so it may use torch alone."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Returns an empty accumulator of this objective's metrics."""
        return Metrics(self)

    def measured(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[Any], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """Returns `figures` of N >= 1 rows, and `undefined`: why some are NaN, or None.

        outputs_N: finite. label_N: bool for binary labels, else float32. weight_N: at least one is above 0; if None,
        each is 1. A row of weight k counts as k rows, except in `num_rows`.
        """
        raise NotImplementedError

    def losses(self, outputs_N: NDArray[np.float32], label_N: NDArray[Any]) -> NDArray[np.float64]:
        """The loss of each of N rows; its weighted mean is `loss_figure`."""
        raise NotImplementedError

    def influences(
        self, outputs_N: NDArray[np.float32], label_N: NDArray[Any], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Returns, for measures, by how much each of N rows moves the figure, times N.

        Their mean is 0, and their deviation over the root of N is the standard error of the figure over rows; for two
        models on the same rows, that of their differences is the error of the difference. A measure that is not here,
        or undefined on these rows, has no error.
        """
        return {}

    def measured_by_group(
        self,
        outputs_N: NDArray[np.float32],
        label_N: NDArray[Any],
        weight_N: NDArray[np.float32] | None,
        group_N: NDArray[np.int64],
    ) -> dict[str, Any]:
        """Returns what `measured` returns, and the figures by group, if the objective has `by`."""
        raise NotImplementedError

    def influences_by_group(
        self,
        outputs_N: NDArray[np.float32],
        label_N: NDArray[Any],
        weight_N: NDArray[np.float32] | None,
        group_N: NDArray[np.int64],
    ) -> dict[str, NDArray[np.float64]]:
        """Returns what `influences` returns, and the influences on figures by group, if the objective has `by`. There
        one row of a group stands for the group, because its rows are not drawn one by one."""
        raise NotImplementedError

    def doubts(self, figures: Figures, rows: str) -> dict[str, str]:
        """Returns what is wrong with a model that has these metrics, by the code under which runs count it.

        rows: what was scored, such as "the test split". A model that is worse than a constant has learned nothing that
        holds for these rows, or their labels mean something else than in training.
        """
        return {}

    def too_few(self, labels: Iterable[NDArray[np.float32]], split: str) -> dict[str, str]:
        """Returns why a split has too few rows to judge a model by, by the code under which runs count the warning.
        labels: of all rows of the split, piece by piece."""
        return {}

    def verdict(self, figures: Mapping[str, float | None]) -> str:
        """Returns what a report says of a model: the rest of a sentence that begins "the model has "."""
        return self.line(figures)

    def lines(self, figures: Figures) -> list[str]:
        """Returns the measures that a user reads after training, a line each: its title and its value."""
        return [f"{measure.title:8} {shown(figures[name])}" for name, measure in self.measures.items()]

    def line(self, figures: Figures) -> str:
        """Returns all measures in one line."""
        return " ".join(f"{measure.title} {shown(figures[name])}" for name, measure in self.measures.items())

    @property
    def titles(self) -> dict[str, str]:
        """The figures that tell how good a model is over time, with their titles."""
        titles = {name: measure.title for name, measure in self.measures.items()}
        return titles | ({"calibration": "Calibration"} if "calibration" in self.figures else {})

    def check(self, figures: Figures) -> None:
        """Raises ValueError unless these are the metrics of this objective."""
        if figures.keys() != {*self.figures, "undefined"}:
            raise ValueError(f"it has {', '.join(figures) or 'nothing'}; it needs {', '.join(self.figures)}, undefined")
        for name in self.figures:
            kinds = (
                [int] if name.endswith("num_rows") else [int, float, *([type(None)] if name in self.optional else [])]
            )
            if type(figures[name]) not in kinds:
                raise ValueError(f"{name} is {figures[name]!r}; it must be a number")
        if not isinstance(figures["undefined"], str | None):
            raise ValueError(f"undefined is {figures['undefined']!r}; it must be text or null")


class Metrics:
    """The outputs and labels of all rows that are judged together, from which metrics are computed at the end.

    Nothing is averaged over batches, because the mean of the batches' AUCs is not the AUC. So the batch size has no
    influence, and the order of rows changes only the last bits of sums. Ranks exchange outputs and labels, and each
    one adds the rows of all.

    Memory per row: a float32, a label of one byte if labels are binary, else of four, four of a weight, if there are
    weights, and eight of a group, if the objective has groups.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._outputs: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[Any]] = []
        self._weights: list[NDArray[np.float32]] = []
        self._groups: list[NDArray[np.int64]] = []

    @property
    def num_rows(self) -> int:
        return sum(len(labels) for labels in self._labels)

    def update(
        self,
        outputs: Tensor | ArrayLike,
        labels: Tensor | ArrayLike,
        weights: Tensor | ArrayLike | None = None,
        groups: Tensor | ArrayLike | None = None,
    ) -> None:
        """Adds rows: outputs [n] of any float dtype, kept as float32, labels [n] or [n, 1], for all rows or for none
        weights [n], and if the objective has `by`, groups [n]. If there are several labels, outputs and labels are
        [n, L].

        Raises ValueError for NaN or infinite outputs, because the model diverged, for labels that the objective does
        not take, and for weights that are negative or not finite.
        """
        output_n, label_n = _to_numpy(outputs).astype(np.float32), _to_numpy(labels)
        if output_n.size != label_n.size:
            raise ValueError(f"{output_n.size} scores came with {label_n.size} labels; pass one label per score")
        shape = output_n.shape if output_n.ndim == 2 and output_n.shape[1] > 1 else (-1,)
        output_n, label_n = output_n.reshape(shape), label_n.reshape(shape)
        if not np.isfinite(output_n).all():
            bad = int((~np.isfinite(output_n)).sum())
            raise ValueError(f"{bad} of {output_n.size} scores are NaN or infinite; the model has diverged, lower lr")
        labels_n = checked_labels(label_n, self._objective.label)
        if weights is not None:
            weight_n = _to_numpy(weights).astype(np.float32).reshape(-1)
            if len(weight_n) != len(label_n) or not ((weight_n >= 0) & (weight_n < np.inf)).all():
                raise ValueError(f"weights must be {len(label_n)} finite numbers, 0 or more, one per score")
            self._weights.append(weight_n)
        self._outputs.append(output_n)
        self._labels.append(labels_n)
        self._groups += [] if groups is None else [_to_numpy(groups).astype(np.int64).reshape(-1)]
        if len(self._weights) not in (0, len(self._labels)):
            raise ValueError("some rows came with weights and some without; pass them for all rows or for none")

    def compute(self) -> dict[str, Any]:
        """Returns the objective's figures, and `undefined`: why some are NaN, in words, or None if none is. Raises
        ValueError if no row was added, or if all weights are 0."""
        if not self.num_rows:
            raise ValueError("no rows were added, so there is nothing to compute; is the split empty?")
        outputs, labels, weights = self.rows()
        if weights is not None and not weights.any():
            raise ValueError(f"the weights of all {len(labels)} rows are 0, so there is nothing to judge by")
        if self._groups:
            return self._objective.measured_by_group(outputs, labels, weights, np.concatenate(self._groups))
        return self._objective.measured(outputs, labels, weights)

    def rows(self) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[np.float32] | None]:
        """Returns the outputs, labels and weights of all rows, at least one; labels are bool if they are binary, and
        weights None if there are none."""
        outputs, labels = np.concatenate(self._outputs), np.concatenate(self._labels)
        weights = np.concatenate(self._weights) if self._weights else None
        self._outputs, self._labels, self._weights = [outputs], [labels], [] if weights is None else [weights]
        return outputs, labels, weights

    def influences(self) -> dict[str, NDArray[np.float64]]:
        """Returns what `Objective.influences` says of all rows, and of figures by group if the objective has `by`."""
        if self._groups:
            return self._objective.influences_by_group(*self.rows(), np.concatenate(self._groups))
        return self._objective.influences(*self.rows())

    def parts(self, firsts: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yields the `figures` of parts of the rows, in the order in which rows were added; {} for a part without rows,
        or whose weights are all 0. firsts: the first row of each part."""
        outputs, labels, weights = self.rows()
        groups = np.concatenate(self._groups) if self._groups else None
        for rows in map(slice, firsts, [*firsts[1:], len(labels)]):
            part, own = Metrics(self._objective), [None if each is None else each[rows] for each in (weights, groups)]
            part.update(outputs[rows], labels[rows], *own)
            yield part.figures() if len(labels[rows]) and (own[0] is None or own[0].any()) else {}

    def figures(self) -> dict[str, Any]:
        """Returns `compute()` as it is written to files: None in place of NaN."""
        return {name: None if value != value else value for name, value in self.compute().items()}


def checked_labels(labels: NDArray[Any], kind: LabelKind) -> NDArray[Any]:
    """Returns binary labels as bool, others as float32, as a copy. Raises ValueError naming a label that is neither."""
    good = (labels == 0) | (labels == 1) if kind == "binary" else np.isfinite(labels)
    if not good.all():
        allowed = "0 or 1" if kind == "binary" else "finite numbers"
        raise ValueError(f"labels hold {labels[~good][0]}; they must be {allowed}")
    return labels.astype(np.bool_ if kind == "binary" else np.float32)


def shown(value: float | None) -> str:
    """Returns a metric as people read it."""
    return "undefined" if value is None or math.isnan(value) else f"{value:.4f}"


def _to_numpy(values: Tensor | ArrayLike) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu")
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def shares(weight_N: NDArray[np.float32] | None, num_rows: int) -> NDArray[np.float64]:
    """Returns the weights of rows over their mean; ones if there are none."""
    return np.ones(num_rows) if weight_N is None else weight_N / weight_N.mean(dtype=np.float64)


def compared(objective: Objective, first: Metrics, second: Metrics) -> dict[str, Any]:
    """Returns, by metric that both have for the same rows, its two values and the result of `judged`."""
    figures, moved = [own.figures() for own in (first, second)], [own.influences() for own in (first, second)]
    found = {}
    for name in objective.measures:
        if not all(name in own for own in figures):
            continue
        one, other = (own[name] for own in figures)
        error = None
        if first.num_rows > 1 and all(name in own for own in moved):
            error = float((moved[1][name] - moved[0][name]).std(ddof=1)) / math.sqrt(first.num_rows)
        found[name] = {"first": one, "second": other}
        found[name] |= judged(None if one is None or other is None else other - one, error)
    return found


def judged(difference: float | None, error: float | None) -> dict[str, Any]:
    """Returns a difference, its standard error, and whether it is within noise: None if one of them is not known."""
    within = None if difference is None or error is None else abs(difference) <= ERRORS * error
    return {"difference": difference, "error": error, "within_noise": within}

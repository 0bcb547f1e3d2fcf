"""Several labels of a row, such as a click and a conversion: the loss, metrics and scores of one objective for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.objectives.objective import Figures, Measure, Objective


def for_labels(objective: Objective, names: Sequence[str]) -> Objective:
    """Returns `objective` for a dataset with these labels: itself if there is one."""
    return objective if len(names) < 2 else SeveralLabels(objective, names)


class SeveralLabels(Objective):
    """An objective for each of L labels: outputs [B, L], in the order of the labels.

    The loss is the mean of the labels' losses. Figures of the first label keep their names; figures of another have its
    name before them, as in `conversion.auc`. `loss` is the mean over the labels of the base's `loss_figure`.
    """

    def __init__(self, base: Objective, names: Sequence[str]) -> None:
        self.base, self.names = base, tuple(names)
        own = {name: f"{name}." if k else "" for k, name in enumerate(self.names)}
        kept = ("name", "label", "loss_options", *base.loss_options, "score", "scores", "too_few")
        self.prefixes = tuple(own.values())
        title = f"mean {base.loss_title} of {', '.join(self.names)}"
        vars(self).update(
            {name: getattr(base, name) for name in kept},
            figures=(*self._prefixed(base.figures), "loss"),
            optional=self._prefixed(base.optional),
            summary=self._prefixed(base.summary),
            measures={
                prefix + figure: measure._replace(
                    title=f"{name} {measure.title}", name=measure.name and f"{name} {measure.name}"
                )
                for name, prefix in own.items()
                for figure, measure in base.measures.items()
            }
            | {"loss": Measure(title, "lower")},
            monitors=("loss", *base.monitors),
            loss_figure="loss",
            loss_title=title,
        )

    def _prefixed(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in self.prefixes for name in names)

    def _own(self, figures: Figures) -> dict[str, Figures]:
        """Returns the figures of each label, by its name."""
        found = dict[str, Figures]()
        for name, prefix in zip(self.names, self.prefixes, strict=True):
            own = {figure: figures[prefix + figure] for figure in self.base.figures}
            is_undefined = any(own[figure] is None for figure in self.base.optional)
            found[name] = {**own, "undefined": figures["undefined"] if is_undefined else None}
        return found

    def loss(self, outputs_BL: Tensor, labels_BL: Tensor, num_samples: int, weight_B: Tensor | None = None) -> Tensor:
        columns = zip(outputs_BL.unbind(1), torch.split(labels_BL, 1, 1), strict=True)
        losses = [self.base.loss(output_B, label_B1, num_samples, weight_B) for output_B, label_B1 in columns]
        return functools.reduce(torch.add, losses) / len(losses)

    def measured(
        self, outputs_NL: NDArray[np.float32], label_NL: NDArray[Any], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        found = [self.base.measured(*columns, weight_N) for columns in zip(outputs_NL.T, label_NL.T, strict=True)]
        reasons = [
            f"{name}: {own['undefined']}" for name, own in zip(self.names, found, strict=True) if own["undefined"]
        ]
        return {
            **{
                prefix + name: own[name]
                for prefix, own in zip(self.prefixes, found, strict=True)
                for name in self.base.figures
            },
            "loss": float(np.mean([own[self.base.loss_figure] for own in found])),
            "undefined": "; ".join(reasons) or None,
        }

    def losses(self, outputs_NL: NDArray[np.float32], label_NL: NDArray[Any]) -> NDArray[np.float64]:
        """The mean over the labels of the base's losses, [N]."""
        columns = zip(outputs_NL.T, label_NL.T, strict=True)
        found: NDArray[np.float64] = np.mean([self.base.losses(*each) for each in columns], axis=0)
        return found

    def influences(
        self, outputs_NL: NDArray[np.float32], label_NL: NDArray[Any], weight_N: NDArray[np.float32] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Returns the base's influences for each label."""
        columns = zip(self.prefixes, outputs_NL.T, label_NL.T, strict=True)
        found = ((prefix, self.base.influences(output_N, label_N, weight_N)) for prefix, output_N, label_N in columns)
        return {prefix + name: moved for prefix, each in found for name, moved in each.items()}

    def doubts(self, figures: Figures, rows: str) -> dict[str, str]:
        """Returns what is wrong with the outputs of any label, by code; texts name the label."""
        told = dict[str, list[str]]()
        for name, own in self._own(figures).items():
            for code, text in self.base.doubts(own, rows).items():
                told.setdefault(code, []).append(f"{name}: {text}")
        return {code: "; ".join(texts) for code, texts in told.items()}

    def verdict(self, figures: Mapping[str, float | None]) -> str:
        """Returns the base's verdict on each label."""
        own = self._own({"undefined": None, **figures})
        return "; ".join(f"for {name} {self.base.verdict(each)}" for name, each in own.items())

    def lines(self, figures: Figures) -> list[str]:
        return [f"{line}   {name}" for name, own in self._own(figures).items() for line in self.base.lines(own)]

    def line(self, figures: Figures) -> str:
        return "; ".join(f"{name} {self.base.line(own)}" for name, own in self._own(figures).items())

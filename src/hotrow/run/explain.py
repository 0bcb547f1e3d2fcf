"""What each raw column adds to the output of a row, compared with its mean; `Run.explain` has the formula.

If the model f is linear and each input is made from one column, f(x) = f(means) + the sum over columns. Otherwise the
sum differs: a product counts for each of its columns, and so does an input that is made from several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.packed.format import DatasetInfo
from hotrow.models.layers import Network
from hotrow.report.columns import Column, columns_of
from hotrow.run.record import Means


class Explanation(NamedTuple):
    """What columns add to the outputs of rows; of L > 1 labels each array has one more dimension [L]."""

    base: NDArray[np.float32]
    """The output of a row of means, []."""
    outputs: NDArray[np.float32]
    """[B]"""
    columns: dict[str, NDArray[np.float32]]
    """By raw column [B]. Histories of a model that reads them in order are one entry."""

    def most(self, number: int) -> list[NDArray[Any]]:
        """By label, the columns that add or subtract most in each row, [B], such as "price -0.31; city +0.22"."""
        names, found = [*self.columns], list[NDArray[Any]]()
        for added_CB in (
            np.stack([*self.columns.values()]).reshape(len(names), len(self.outputs), -1).transpose(2, 0, 1)
        ):
            order_NB = np.argsort(-np.abs(added_CB), axis=0, kind="stable")[:number]
            rows = zip(order_NB.T, added_CB.T, strict=True)
            texts = ["; ".join(f"{names[c]} {own[c]:+.2f}" for c in order if own[c]) for order, own in rows]
            found.append(np.array(texts, object))
        return found


@torch.no_grad()
def explained(
    info: DatasetInfo,
    model: Network,
    means: Means | None,
    outputs: Callable[[Tensor, Any], Tensor],
    dense_BI: Tensor,
    rows: Any,
) -> Explanation:
    """What columns add to the outputs of rows of the dataset `info`. outputs: the function f of dense inputs and the
    tables' rows. rows: as `look_up` returned them for `model`."""
    if means is None:
        raise ValueError(
            "the mean inputs of these weights are not known: a run keeps those of the weights that it chose at its "
            "end, unless the model finds items or no row counts; train such a run, or take its chosen step"
        )
    mean_I, names = torch.tensor(means.dense, dtype=torch.float32), info.feature_names

    def without(column: Column) -> NDArray[np.float32]:
        left_BI = dense_BI.clone()
        left_BI[:, column.dense] = mean_I[column.dense]
        left: NDArray[np.float32] = outputs(left_BI, _without(rows, means, column.features)).cpu().numpy()
        return left

    found: NDArray[np.float32] = outputs(dense_BI, rows).cpu().numpy()
    added = {name: found - without(column) for name, column in separable(info, model).items()}
    return Explanation(without(Column([*range(len(mean_I))], [*names]))[0], found, added)


def _without(rows: Any, means: Means, features: Sequence[str]) -> Any:
    """The tables' rows, with those of `features` replaced by their means, or a history by an empty one."""
    if isinstance(rows, Tensor):
        pieces = zip(means.pooled.items(), torch.split(rows, [*map(len, means.pooled.values())], 1), strict=True)
        return torch.cat(
            [piece.new_tensor(m).expand_as(piece) if n in features else piece for (n, m), piece in pieces], 1
        )
    left = dict(rows)
    for name in features:
        values, offsets = rows[name]
        mean = means.pooled.get(name)
        empty = values[:0], torch.zeros_like(offsets)
        left[name] = empty if mean is None else (values.new_tensor(mean).repeat(len(values), 1), offsets)
    return left


def joined(pieces: Iterable[Explanation]) -> Explanation:
    """One explanation of the rows of all pieces. Raises ValueError if there are none."""
    if not (found := [*pieces]):
        raise ValueError("there are no rows to explain; give some")
    columns = {name: np.concatenate([each.columns[name] for each in found]) for name in found[0].columns}
    return Explanation(found[0].base, np.concatenate([each.outputs for each in found]), columns)


def separable(info: DatasetInfo, model: Network) -> dict[str, Column]:
    """The columns that can be changed by themselves. Lists of a model that reads them in order are changed together,
    since those of a sample must be of one length."""
    columns, lists = columns_of(info), {feature.name for feature in info.features if feature.kind == "sequence"}
    together = [name for name, own in columns.items() if lists & {*own.features} and model.lookup == "sequence"]
    found = {name: own for name, own in columns.items() if name not in together}
    if together:
        parts = [columns[name] for name in together]
        dense = [place for own in parts for place in own.dense]
        found[", ".join(together)] = Column(dense, [name for own in parts for name in own.features])
    return found

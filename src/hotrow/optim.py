"""Sparse optimizers: torch.optim.Optimizer subclasses that update only the rows a batch looked up.

    loss.backward(); dense_optimizer.step(); sparse_optimizer.step()

`step()` hands the pending batches of an EmbeddingCollection and their pooled gradients to one native call that sorts,
sums and applies (ops.Kernels.update states the arithmetic). One param group per table, so schedulers work as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow import ops
from hotrow.embedding import EmbeddingCollection
from hotrow.reference import Algorithm


class _SparseOptimizer(torch.optim.Optimizer):
    """What the three share. Each param group is one table: `name`, `params` ([its weight]), `lr`, `lr_scale`.

    The rate of a table is `lr * lr_scale`, rounded to float32. `step()` consumes the pending gradients;
    `zero_grad()` drops them. State tensors keep their place in memory for life, also through `load_state_dict`.
    """

    algorithm: Algorithm

    def __init__(self, emb: EmbeddingCollection, **defaults: float) -> None:
        positive = {"lr"}
        for name, value in defaults.items():
            if not (0 < value < math.inf or (value == 0 and name not in positive)):
                allowed = "a positive number" if name in positive else "0 or a positive number"
                raise ValueError(f"{type(self).__name__}: {name} is {value}; it must be {allowed}")
        self.emb = emb
        groups = [
            {"params": [emb.weights[table.name]], "name": table.name, "lr_scale": table.lr_scale}
            for table in emb.tables
        ]
        super().__init__(groups, defaults)
        for group in self.param_groups:
            (weight,) = group["params"]
            shape = self._state_shape(weight)
            if shape is not None:
                self.state[weight]["sum"] = _filled(shape, group["initial_accumulator_value"])
        sums = self._sums()
        self._states = ops.Arrays(sums) if sums else None

    def _state_shape(self, weight: Tensor) -> torch.Size | None:
        return {"sgd": None, "adagrad": weight.shape, "row_wise_adagrad": weight.shape[:1]}[self.algorithm]

    def _weights(self) -> list[Tensor]:
        return [group["params"][0] for group in self.param_groups]

    def _sums(self) -> list[Tensor]:
        return [self.state[weight]["sum"] for weight in self._weights() if weight in self.state]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every row that the pending batches looked up, once; returns the closure's loss, if one is given.

        Raises ValueError, with no row changed, when a pending batch was altered and now holds an id out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pending = self.emb.pending
        if pending:
            self.emb.kernels.update(
                self.emb.arrays,
                self._states,
                pending,
                algorithm=self.algorithm,
                lr=[float(group["lr"]) * group["lr_scale"] for group in self.param_groups],
                eps=[group.get("eps", 0.0) for group in self.param_groups],
            )
            self.emb.clear_pending()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drops the pending gradients (`set_to_none` is torch's; there is no tensor that could be zeroed instead)."""
        self.emb.clear_pending()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict()` returned: rates and sums.

        Raises ValueError where it is of other tables or another optimizer; then nothing has changed.
        """
        own = [group["name"] for group in self.param_groups]
        given = [group.get("name") for group in state_dict["param_groups"]]
        if own != given:
            raise ValueError(f"the state is of tables {given}, this optimizer's are {own}; load it into the same model")
        shapes = {i: tuple(state["sum"].shape) for i, state in state_dict["state"].items()}
        wanted = {i: tuple(own_sum.shape) for i, own_sum in enumerate(self._sums())}
        if shapes != wanted:
            raise ValueError(
                f"the state's sums have shapes {shapes}, {type(self).__name__} keeps {wanted}; "
                "load it into the optimizer that wrote it"
            )
        sums = self._sums()
        super().load_state_dict(state_dict)
        for weight, own_sum in zip(self._weights(), sums, strict=False):
            own_sum.copy_(self.state[weight]["sum"])
            self.state[weight]["sum"] = own_sum


def _filled(shape: torch.Size, value: float) -> Tensor:
    # Zero pages are not touched: rows that never train cost no memory.
    sums = ops.allocate(*shape)
    return sums.fill_(value) if value else sums


class SGD(_SparseOptimizer):
    """`w = w - lr * g` for each occurrence of a row, in the batch's order (feature, forward pass, bag, position).

    emb: the tables. lr: learning rate, times each table's lr_scale. Raises ValueError unless lr > 0.
    """

    algorithm = "sgd"

    def __init__(self, emb: EmbeddingCollection, lr: float) -> None:
        super().__init__(emb, lr=lr)


class _Adaptive(_SparseOptimizer):
    def __init__(
        self, emb: EmbeddingCollection, lr: float, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        super().__init__(emb, lr=lr, eps=eps, initial_accumulator_value=initial_accumulator_value)


class Adagrad(_Adaptive):
    """`h = h + g * g; w = w - lr * (g / (sqrt(h) + eps))` once per row, g the ordered sum of its gradients.

    `state[weight]["sum"]` is h, [N, D]. Raises ValueError unless lr > 0, eps >= 0 and initial_accumulator_value >= 0.
    """

    algorithm = "adagrad"


class RowWiseAdagrad(_Adaptive):
    """`h = h + mean(g * g); w = w - (lr / (sqrt(h) + eps)) * g` once per row, g the ordered sum of its gradients.

    One accumulator per row: `state[weight]["sum"]` is h, [N]. Raises ValueError as Adagrad.
    """

    algorithm = "row_wise_adagrad"

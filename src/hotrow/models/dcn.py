"""DCN V2 (Wang et al., 2021): cross layers make products of ever more inputs, a deep tower runs behind or beside them.

    x_0 = [dense_BI | pooled_BP]   (width X = I + P)
    cross layer l:  x_{l+1} = x_0 * (W_l x_l + b_l) + x_l      W_l [X, X]; with `low_rank` R U_l V_l, [X, R] [R, X]

    parallel:  x_0 --cross layers--> x_L --+--> [x_L | h] --linear--> logits_B
               x_0 --deep MLP------> h ----+
    stacked:   x_0 --cross layers--> x_L --deep MLP--> h --linear--> logits_B

The rows of all features stand side by side, so tables may have different numbers of columns. Every W, U, V and b, and
those of the deep MLP, are drawn as by `layers.linear`: W ~ N(0, sqrt(2 / (inputs + outputs))), b ~ N(0, sqrt(1 /
outputs)); V has no bias. The paper's mixture of low-rank experts is not here.

Shape suffixes as in hotrow.batch, and: P sum of the features' columns, X width of x_0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Linear, Network
from hotrow.models.spec import MLPSpec, Steps, Width


class CrossLayer(nn.Module):
    """(x_0, x) -> x_0 * (W x + b) + x, all [B, X]; with `low_rank` W and b are applied to V x."""

    def __init__(self, width: int, *, low_rank: int | None, generator: torch.Generator) -> None:
        super().__init__()
        self.V = None if low_rank is None else Linear(width, low_rank, bias=False, generator=generator)
        self.W = Linear(width if low_rank is None else low_rank, width, generator=generator)

    def forward(self, first_BX: Tensor, x_BX: Tensor) -> Tensor:
        product_BX: Tensor = self.W(x_BX if self.V is None else self.V(x_BX))
        return first_BX * product_BX + x_BX


class DCN(Network):
    """dense [B, I], pooled [B, P] -> logits [B], or [B, num_outputs] if there are several.

    num_inputs: X. low_rank: R, or None for full matrices. deep_mlp: widths of the deep tower; if there are none, the
    logit is a linear map of x_L. stacked: whether the tower runs on x_L, else on x_0. dropout: of the
    tower's layers. generator: CPU generator from which all weights are drawn: cross layers first (V, then W), then the
    deep tower, then the last layer.
    """

    def __init__(
        self,
        *,
        num_inputs: int,
        num_cross_layers: int,
        low_rank: int | None,
        deep_mlp: Sequence[int],
        stacked: bool,
        dropout: float,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        layers = (CrossLayer(num_inputs, low_rank=low_rank, generator=generator) for _ in range(num_cross_layers))
        self.cross = nn.ModuleList(layers)
        options: dict[str, Any] = {"dropout": dropout, "hidden": True}
        self.deep = MLP([num_inputs, *deep_mlp], generator=generator, **options) if deep_mlp else None
        self.stacked = stacked
        num_last = deep_mlp[-1] if deep_mlp else 0
        num_last += 0 if deep_mlp and stacked else num_inputs
        self.last = Linear(num_last, num_outputs, generator=generator)

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        first_BX = torch.cat([dense_BI, pooled_BP], dim=1)
        out_BO = first_BX
        for layer in self.cross:
            out_BO = layer(first_BX, out_BO)
        if self.deep is not None and self.stacked:
            out_BO = self.deep(out_BO)
        elif self.deep is not None:
            out_BO = torch.cat([out_BO, self.deep(first_BX)], dim=1)
        logits_BL: Tensor = self.last(out_BO)
        return logits_BL.squeeze(1)


class DCNSpec(MLPSpec):
    """Cross layers on the dense inputs and the embeddings, all in one vector, with a deep tower behind or beside them.

    Tables may have different numbers of columns.
    """

    network: ClassVar = DCN
    small: ClassVar[Mapping[str, Any]] = {"num_cross_layers": 2, "deep_mlp": [64, 32]}

    name: Literal["dcn"] = "dcn"
    """DCN V2 (Wang et al., 2021), without its mixture of experts."""
    num_cross_layers: Steps = 3
    """Cross layers; each raises the highest degree of the products of inputs by one."""
    low_rank: Width | None = None
    """Rank R of the cross layers' matrices, as products of [X, R] and [R, X] for X inputs. null means full matrices."""
    deep_mlp: list[Width] = [512, 256]
    """Widths of the deep tower; the last layer, one logit, is added. With [] there is no deep tower."""
    structure: Literal["parallel", "stacked"] = "parallel"
    """Whether the deep tower runs beside the cross layers, on the same inputs, or on their output."""

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> DCN:
        return DCN(
            num_inputs=num_dense + sum(dims.values()),
            num_cross_layers=self.num_cross_layers,
            low_rank=self.low_rank,
            deep_mlp=self.deep_mlp,
            stacked=self.structure == "stacked",
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )

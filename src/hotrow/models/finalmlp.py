"""FinalMLP (Mao et al., 2023): two MLPs on inputs that are weighted in two ways, and products of their outputs.

    x_BX = [dense_BI | pooled_BP]
    x * 2 sigmoid(g) --first MLP---> f_BO --+-- w [f | s] + f W s --> logits_B
    x * 2 sigmoid(h) --second MLP--> s_BU --+

g and h [X] say how much of each input an MLP sees; they start at 0, which is a factor of 1. That is the paper's feature
selection by a learned context; its selection by features of the sample is not here, nor are its several heads (one is
its default). W starts at zero. Several outputs share the MLPs.

Shape suffixes as in hotrow.batch, and: P sum of the features' columns, X width of x, O and U outputs of the MLPs, L
outputs of the model, V = L * U.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Linear, Network, per_sample, product, sigmoid
from hotrow.models.spec import MLPSpec, Width


class FinalMLP(Network):
    """dense [B, I], pooled [B, P] -> logits [B], or [B, L] if `num_outputs`, L, is above 1.

    num_inputs: X. mlps: widths of the first and of the second MLP. dropout: of all these layers. generator: CPU
    generator from which all weights are drawn: MLPs, then w.
    """

    def __init__(
        self,
        *,
        num_inputs: int,
        mlps: Sequence[Sequence[int]],
        dropout: float,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        options: dict[str, Any] = {"dropout": dropout, "hidden": True}
        self.gates = nn.ParameterList(nn.Parameter(torch.zeros(num_inputs)) for _ in mlps)
        self.mlps = nn.ModuleList(MLP([num_inputs, *widths], generator=generator, **options) for widths in mlps)
        first, second = (widths[-1] for widths in mlps)
        self.linear = Linear(first + second, num_outputs, generator=generator)
        self.products_VO = nn.Parameter(torch.zeros(num_outputs * second, first))

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        x_BX, outputs = torch.cat([dense_BI, pooled_BP], dim=1), []
        for mlp, gate_X in zip(self.mlps, self.gates, strict=True):
            outputs.append(mlp(x_BX * per_sample(2 * sigmoid(gate_X), x_BX)))
        f_BO, s_BU = outputs
        met_BV = product(f_BO, self.products_VO) * torch.cat([s_BU] * self.num_outputs, dim=1)
        met_NU = met_BV.view(-1, s_BU.shape[1])  # N = B * L
        second_BL = product(met_NU, met_NU.new_ones(1, met_NU.shape[1])).view(len(x_BX), self.num_outputs)
        logits_BL: Tensor = self.linear(torch.cat(outputs, dim=1)) + second_BL
        return logits_BL.squeeze(1)


class FinalMLPSpec(MLPSpec):
    """Two MLPs beside each other, whose outputs count by themselves and multiplied with each other."""

    network: ClassVar = FinalMLP
    small: ClassVar[Mapping[str, Any]] = {"first_mlp": [64, 32], "second_mlp": [64, 32], "dropout": 0.2}

    name: Literal["finalmlp"] = "finalmlp"
    """FinalMLP (Mao et al., 2023)."""
    first_mlp: list[Width] = [400, 400, 400]
    """Widths of the first MLP's layers."""
    second_mlp: list[Width] = [800]
    """Widths of the second MLP's layers. MLPs of unlike shapes make unlike outputs."""

    def check_options(self) -> None:
        for name, widths in (("first_mlp", self.first_mlp), ("second_mlp", self.second_mlp)):
            if not widths:
                raise ValueError(f"{name} is {widths}: give it a width or more")

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> FinalMLP:
        return FinalMLP(
            num_inputs=num_dense + sum(dims.values()),
            mlps=(self.first_mlp, self.second_mlp),
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )

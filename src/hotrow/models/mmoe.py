"""MMoE (Ma et al., 2018): labels share experts, and each label weighs them for itself, sample by sample.

    x_BX = [dense_BI | pooled_BP] --each of E expert MLPs--> h_BEW
    label l:  softmax(x G_l)_BE --> sum over E of its weights and h --tower MLP of l--> logits of l

Labels that disagree can so use other experts, while those that agree learn from each other's rows. With one label there
is one gate and one tower. Weights are drawn as by `layers.linear`; gates have biases.

Shape suffixes as in hotrow.batch, and: P sum of the features' columns, X width of x, E experts, W outputs of an expert,
L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Linear, Network, bag_softmax, each, weighted_sum
from hotrow.models.spec import Members, MLPSpec, Width


class MMoE(Network):
    """dense [B, I], pooled [B, P] -> logits [B], or [B, L] if `num_outputs`, L, is above 1.

    num_inputs: X. experts: E. expert_mlp: widths of an expert's layers. tower_mlp: hidden widths; 1 is appended.
    dropout: of experts' layers and of towers' hidden ones. generator: CPU generator from which all weights
    are drawn: experts, gates, towers.
    """

    def __init__(
        self,
        *,
        num_inputs: int,
        experts: int,
        expert_mlp: Sequence[int],
        tower_mlp: Sequence[int],
        dropout: float,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": dropout, "generator": generator}
        self.experts = nn.ModuleList(MLP([num_inputs, *expert_mlp], hidden=True, **options) for _ in range(experts))
        self.gates = Linear(num_inputs, num_outputs * experts, generator=generator)
        widths = [expert_mlp[-1], *tower_mlp, 1]
        self.towers = nn.ModuleList(MLP(widths, last="linear", **options) for _ in range(num_outputs))

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        x_BX, num_experts, num_labels = torch.cat([dense_BI, pooled_BP], dim=1), len(self.experts), len(self.towers)
        h_BEW = each([*self.experts], torch.stack([x_BX] * num_experts)).transpose(0, 1)
        starts = torch.arange(len(x_BX) * num_labels + 1) * num_experts
        share_BLE = bag_softmax(self.gates(x_BX).view(-1, 1), starts).view(len(x_BX), num_labels, num_experts)
        mixed_LBW = torch.stack([weighted_sum(h_BEW, share_BE) for share_BE in share_BLE.unbind(1)])
        return each([*self.towers], mixed_LBW).squeeze(2).T.squeeze(1)


class MMoESpec(MLPSpec):
    """Several labels share MLPs, the experts; each label mixes their outputs by a gate of its own and has a tower."""

    network: ClassVar = MMoE
    small: ClassVar[Mapping[str, Any]] = {"expert_mlp": [64, 32], "tower_mlp": [32], "dropout": 0.2}

    name: Literal["mmoe"] = "mmoe"
    """MMoE (Ma et al., 2018), for data of several labels."""
    experts: Members = 4
    """Expert MLPs, of which every label has its mixture."""
    expert_mlp: list[Width] = [512, 256]
    """Widths of the layers of each expert."""
    tower_mlp: list[Width] = [128]
    """Widths of the hidden layers between a label's mixture and its logit."""

    def check_options(self) -> None:
        if not self.expert_mlp:
            raise ValueError("expert_mlp is [], but an expert of mmoe is an MLP: give it one width or more")

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> MMoE:
        return MMoE(
            num_inputs=num_dense + sum(dims.values()),
            experts=self.experts,
            expert_mlp=self.expert_mlp,
            tower_mlp=self.tower_mlp,
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )

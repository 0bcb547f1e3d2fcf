"""Layers that models share. Shape suffixes as in hotrow.batch: B batch, I inputs, O outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from hotrow.kernels.ops import mlp
from hotrow.kernels.reference import Activation


def linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """y_BO = x_BI W^T + b with W ~ N(0, sqrt(2 / (I + O))) and b ~ N(0, sqrt(1 / O)), as the reference DLRM draws them.

    `generator` (CPU) is the only source of randomness; weights are drawn before biases.
    """
    # "meta" and to_empty skip nn.Linear's own draws, which would come from torch's global generator.
    layer = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (num_inputs + num_outputs)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / num_outputs), generator=generator)
    return layer


class MLP(nn.Module):
    """Linear layers of the given widths (`widths[0]` inputs), a ReLU after each, except the last if `last="linear"`.

    x [B, widths[0]] -> [B, widths[-1]], float32.
    """

    def __init__(self, widths: Sequence[int], *, generator: torch.Generator, last: Activation = "relu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(n, m, generator) for n, m in pairwise(widths))
        self.last = last

    def forward(self, x_BI: Tensor) -> Tensor:
        """The last layer's output."""
        layers = [cast(nn.Linear, layer) for layer in self.layers]
        return mlp(x_BI, [layer.weight for layer in layers], [layer.bias for layer in layers], last=self.last)


class Constant(nn.Module):
    """One learned vector for every sample: x [B, anything] -> [B, num_outputs]; drawn as `linear` draws a bias."""

    def __init__(self, num_outputs: int, *, generator: torch.Generator) -> None:
        super().__init__()
        values = torch.empty(num_outputs).normal_(0.0, math.sqrt(1.0 / num_outputs), generator=generator)
        self.bias = nn.Parameter(values)

    def forward(self, x_BI: Tensor) -> Tensor:
        """The vector, repeated without copying."""
        return self.bias.expand(len(x_BI), -1)

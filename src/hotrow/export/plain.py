"""An exported model in plain torch, without hotrow: what its network is built of, then the network and its options.

score.py loads this file. The first part has the names that hotrow's own file of the model imports, written to be read;
the second part is that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class ModelSpec:
    """The options of the model: those in export.json, else the defaults stated below."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


MLPSpec = ModelSpec


def histories_of(feature_names: Sequence[str], model: str) -> dict[str, str]:
    """Returns by feature X the feature X_history, which holds its earlier ids."""
    return {name.removesuffix("_history"): name for name in feature_names if name.endswith("_history")}


class SampleError(ValueError):
    """A sample of a batch that the model cannot take. sample: its position in the batch, from 0."""

    def __init__(self, sample: int, feature: str, reason: str) -> None:
        super().__init__(f"{feature}, sample {sample} of the batch: {reason}")


class Network(nn.Module):
    """A model: (dense [B, I], rows) -> logits [B].

    lookup: `pooled` if rows are [B, sum of D], a bag's rows as one, features side by side; `sequence` if they are
    (rows of all ids [.., D], where each sample's begin [B + 1]) by feature.
    """

    lookup = "pooled"
    is_drawing = False


def linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """Returns a linear layer; its weights are loaded later, so `generator` draws nothing."""
    return nn.Linear(num_inputs, num_outputs)


class MLP(nn.Module):
    """Linear layers, a ReLU after each, except the last if `last="linear"`. `dropout` acts in training alone."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        generator: torch.Generator,
        last: str = "relu",
        dropout: float = 0.0,
        hidden: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(n, m, generator) for n, m in pairwise(widths))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last layer's output."""
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.relu(x) if self.last == "relu" or k + 1 < len(self.layers) else x
        return x


class Dropout(nn.Module):
    """It acts in training alone: nothing is dropped from rows that are scored."""

    moment = None

    def __init__(self, share: float, *, generator: torch.Generator) -> None:
        super().__init__()


class Linear(nn.Linear):
    """x W^T + b; without `bias` x W^T."""

    def __init__(self, num_inputs: int, num_outputs: int, *, generator: torch.Generator, bias: bool = True) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)


class Constant(nn.Module):
    """One learned vector for every sample, in place of an MLP without inputs."""

    def __init__(self, num_outputs: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the same vector for every row of x."""
        return per_sample(self.bias, x)


def each(members: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Returns each module's output for its own x; x [M, B, I]."""
    return torch.stack([member(own) for member, own in zip(members, x, strict=True)])


def products(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T of each member; x [M, B, I], weight [M, O, I]."""
    return x @ weight.transpose(1, 2)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T."""
    return x @ weight.T


def along(x: Tensor, width: int) -> Tensor:
    """Returns each value of x `width` times, along a new last axis."""
    return x[..., None].expand(*x.shape, width)


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """Returns the values once for each row of x."""
    return values.expand(len(x), -1)


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Returns the dot product of each row of x with the same row of y."""
    return (x * y).sum(1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Returns each row `times` times, one after another."""
    return x.repeat_interleave(times, 0)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sum over T of weight * x; x [B, T, M], weight [B, T]."""
    return (x * weight[:, :, None]).sum(1)


def unit(x: Tensor) -> Tensor:
    """Returns each row divided by its length."""
    return nn.functional.normalize(x, dim=1)


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + e^-x)."""
    return torch.sigmoid(x)


def bag_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sum of each bag's rows of x; bag b has those from offsets[b] to offsets[b + 1]."""
    bags = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    return x.new_zeros(len(offsets) - 1, x.shape[1]).index_add(0, bags, x)


def per_bag(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns row b of x once for each row of bag b."""
    return x.repeat_interleave(offsets.diff(), 0)


def bag_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Returns e^x divided by its sum over the bag."""
    bags = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())[:, None]
    most = x.new_zeros(len(offsets) - 1, 1).scatter_reduce(0, bags, x, "amax", include_self=False)
    exp = torch.exp(x - per_bag(most, offsets))
    return exp / per_bag(bag_sums(exp, offsets), offsets)


def dot_interaction(dense: Tensor, rows: Tensor) -> Tensor:
    """Returns [dense, products of all pairs of vectors]; dense [B, D], rows [B, F, D]."""
    vectors = torch.cat([dense[:, None], rows], 1)
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    return torch.cat([dense, (vectors @ vectors.transpose(1, 2))[:, i, j]], 1)


def interactions(dense: Tensor, rows: Tensor, *, concatenated: bool) -> tuple[Tensor, Tensor]:
    """Returns the dot interaction, with the rows behind it if `concatenated`, and the rows' first column [B, F]."""
    out = dot_interaction(dense, rows)
    return torch.cat([out, rows.flatten(1)], dim=1) if concatenated else out, rows[:, :, 0]


def member_rows(rows: Tensor, drops: Sequence[Any]) -> Tensor:
    """Returns the rows [B, F, M, D] by member, [M, B, F, D]; nothing is dropped."""
    return rows.permute(2, 0, 1, 3)

"""Layers that models share, and all their products and sums. Shape suffixes as in hotrow.batch: B batch, I inputs, O
outputs; also T vectors of a sample.

torch's own products, reductions, and the sums behind an `expand` or a broadcast depend on the address of their input or
on the number of threads, on some processors and for some sizes. A micro-batch then has other bits on another number of
ranks. What is here does not: every sum, forward and backward, is one of `ops.mlp` or `ops.dot_interaction`.
tests/laws/test_model_laws.py tries every model at other addresses and on other threads.

export/plain.py has the same names in plain torch, for exports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hotrow.kernels.ops import dot_interaction as dot_interaction  # models import it, and others, from here
from hotrow.kernels.ops import each_alone, kept, mlp, mlps
from hotrow.kernels.ops import interactions as interactions
from hotrow.kernels.ops import member_rows as member_rows
from hotrow.kernels.ops import product as product
from hotrow.kernels.ops import sigmoid as sigmoid
from hotrow.kernels.types import Activation, Drop

Lookup = Literal["pooled", "sequence"]
"""`pooled`: a bag's rows come as one, side by side for all features, [B, sum of D]. `sequence`: the row of every id, by
feature, as `EmbeddingCollection.sequence` returns them."""


class Network(nn.Module):
    """A model: (dense [B, I], rows) -> outputs [B], of which an objective makes losses and scores.

    The tables are not part of it: lookups are timed, placed and sharded on their own. A network of several members,
    which train at the same time, returns the outputs of each in a training step, [num_members, B].
    """

    lookup: ClassVar[Lookup] = "pooled"
    retrieves: ClassVar[bool] = False
    """Whether outputs are vectors instead of numbers, [B, 2 M]: the user's, then the item's."""
    item_features: tuple[str, ...] = ()
    """The features of an item, its id first, if the network has its vector."""
    num_members = 1
    is_drawing = False
    """Whether this is a training step."""

    @contextmanager
    def drawing(self, step: int, sample: int) -> Iterator[None]:
        """A block that is a training step, in which `Dropout` draws: step number `step`, of samples that begin at
        `sample` in the batch of all ranks. Elsewhere nothing is dropped."""
        self.is_drawing = True
        for place, module in enumerate(self._dropouts):
            module.__dict__["moment"] = place, step, sample  # nn.Module's own setting takes twenty times as long
        try:
            yield
        finally:
            self.is_drawing = False
            for module in self._dropouts:
                module.__dict__["moment"] = None

    @cached_property
    def _dropouts(self) -> list[Dropout]:
        return [module for module in self.modules() if isinstance(module, Dropout)]


class Dropout(nn.Module):
    """x [B, W] -> in a training step x with each element zero with probability `share`, the others divided by
    1 - share; elsewhere x.

    What is dropped is a function of the seed of `generator`, the place of the module in its network, the step, the
    place of the sample in the batch of all ranks, and the column. So micro-batches, ranks and placements change none of
    it. It is drawn by Philox (Salmon et al., 2011), a block of which has 16 numbers of 16 bits.
    """

    def __init__(self, share: float, *, generator: torch.Generator) -> None:
        super().__init__()
        self.share, self._seed = share, generator.initial_seed()
        self.moment: tuple[int, int, int] | None = None
        """Place of the module, step and first sample; None outside of training steps. `Network.drawing` sets it."""

    def forward(self, x_BW: Tensor) -> Tensor:
        return each([self], x_BW[None])[0]

    @property
    def drop(self) -> Drop:
        assert self.moment is not None, "outside of a step nothing is drawn"
        return Drop(self._seed, *self.moment, round(self.share * 65536), float(1 / np.float32(1 - self.share)))


def linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """Returns y_BO = x_BI W^T + b, W ~ N(0, sqrt(2 / (I + O))) and b ~ N(0, sqrt(1 / O)) as in the reference DLRM.
    `generator` (CPU) is the only source of randomness; weights are drawn before biases."""
    # "meta" skips nn.Linear's own draws, which would come from torch's global generator. Its to_empty imports sympy.
    layer = nn.Linear(num_inputs, num_outputs, device="meta")
    layer.weight = nn.Parameter(torch.empty(num_outputs, num_inputs))
    layer.bias = nn.Parameter(torch.empty(num_outputs))
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (num_inputs + num_outputs)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / num_outputs), generator=generator)
    return layer


class MLP(nn.Module):
    """Linear layers of the given widths (`widths[0]` inputs), a ReLU after each, except the last if `last="linear"`.

    x [B, widths[0]] -> [B, widths[-1]], float32. dropout: of what each hidden layer returns. hidden: whether the
    last layer is one of these, because the network has others behind it.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        generator: torch.Generator,
        last: Activation = "relu",
        dropout: float = 0.0,
        hidden: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(n, m, generator) for n, m in pairwise(widths))
        self.last = last
        widths = widths[1:] if hidden else widths[1:-1]
        self.dropouts = nn.ModuleList(Dropout(dropout, generator=generator) for _ in widths if dropout)

    def forward(self, x_BI: Tensor) -> Tensor:
        return each([self], x_BI[None])[0]


def each(members: Sequence[nn.Module], x_MBI: Tensor) -> Tensor:
    """Returns what each module makes of its own x, [M, B, O]. Modules of one kind and size cost as much as one."""
    if all(isinstance(member, MLP) for member in members):
        return _each_mlp(cast(Sequence[MLP], members), x_MBI)
    if all(isinstance(member, Dropout) for member in members):
        return _each_dropped(cast(Sequence[Dropout], members), x_MBI)
    return torch.stack([member(x_BI) for member, x_BI in zip(members, x_MBI, strict=True)])


def products(x_MBI: Tensor, weight_MOI: Tensor) -> Tensor:
    """Returns the `product` of each x with its own weight, [M, B, O]."""
    zeros_O = weight_MOI.new_zeros(weight_MOI.shape[1])
    return mlps(x_MBI, [[own] for own in weight_MOI], [[zeros_O]] * len(x_MBI), last="linear")


def _each_mlp(members: Sequence[MLP], x_MBI: Tensor) -> Tensor:
    """Returns the outputs of MLPs of the same widths, [M, B, O]."""
    layers = [cast(Sequence[nn.Linear], member.layers) for member in members]
    dropouts = [cast(Sequence[Dropout], member.dropouts) for member in members]
    drops = [[one.drop for one in own] for own in dropouts] if dropouts[0] and dropouts[0][0].moment else []
    weights, biases = ([[getattr(one, name) for one in own] for own in layers] for name in ("weight", "bias"))
    return mlps(x_MBI, weights, biases, last=members[0].last, drops=drops)


def _each_dropped(members: Sequence[Dropout], x_MBW: Tensor) -> Tensor:
    """Returns each x with elements dropped by its own module, if this is a training step."""
    if members[0].moment is None or not members[0].share:
        return x_MBW
    return x_MBW * kept([member.drop for member in members], *x_MBW.shape[1:]).to(x_MBW.device)


class Linear(nn.Module):
    """y_BO = x_BI W^T + b, float32, drawn as by `linear`; without `bias` y_BO = x_BI W^T.

    The product repeats bit for bit at any number of threads, which torch's own does not.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, generator: torch.Generator, bias: bool = True) -> None:
        super().__init__()
        layer = linear(num_inputs, num_outputs, generator)
        self.weight, self.bias = layer.weight, layer.bias if bias else None

    def forward(self, x_BI: Tensor) -> Tensor:
        bias_O = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias
        return mlp(x_BI, [self.weight], [bias_O], last="linear")


class Constant(nn.Module):
    """One learned vector for every sample: x [B, anything] -> [B, num_outputs]; drawn as `linear` draws a bias."""

    def __init__(self, num_outputs: int, *, generator: torch.Generator) -> None:
        super().__init__()
        values = torch.empty(num_outputs).normal_(0.0, math.sqrt(1.0 / num_outputs), generator=generator)
        self.bias = nn.Parameter(values)

    def forward(self, x_BI: Tensor) -> Tensor:
        return per_sample(self.bias, x_BI)


def per_sample(values_O: Tensor, x_BI: Tensor) -> Tensor:
    """Returns the values [B, O] once for each sample of x."""
    return product(x_BI.new_ones(len(x_BI), 1), values_O[:, None])


class _Along(torch.autograd.Function):
    """x [...] -> x [..., width], each value `width` times; the backward sum is a `product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        return x[..., None].expand(*x.shape, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        width = grad.shape[-1]
        return product(grad.reshape(-1, width), grad.new_ones(1, width)).view(grad.shape[:-1]), None


def along(x: Tensor, width: int) -> Tensor:
    """Returns x [..., width]: each value `width` times, without a copy."""
    return cast(Tensor, _Along.apply(x, width))  # type: ignore[no-untyped-call]


def dots(x_BI: Tensor, y_BI: Tensor) -> Tensor:
    """Returns the dot product [B] of each row of x with the same row of y."""
    return product(x_BI * y_BI, x_BI.new_ones(1, x_BI.shape[1])).squeeze(1)


def repeated(x_BI: Tensor, times: int) -> Tensor:
    """Returns [B * times, I]: each row `times` times, one after another."""
    return along(x_BI, times).transpose(1, 2).reshape(-1, x_BI.shape[1])


def weighted_sum(x_BTI: Tensor, weight_BT: Tensor) -> Tensor:
    """Returns sum over T of weight_BT[:, :, None] * x_BTI: [B, I]."""
    num_samples, T, width = x_BTI.shape
    terms_BIT = (x_BTI * along(weight_BT, width)).transpose(1, 2)
    return product(terms_BIT.reshape(-1, T), x_BTI.new_ones(1, T)).view(num_samples, width)


def unit(x_BI: Tensor) -> Tensor:
    """Returns each row divided by its length, or by 1e-12 if it is shorter, [B, I]."""
    length_B = dots(x_BI, x_BI).clamp_min(1e-24).sqrt()
    return x_BI / along(length_B, x_BI.shape[1])


class _BagSums(torch.autograd.Function):
    """x [L, I] -> the sum of each bag's rows [B, I]; or with `spread` the way back, x [B, I] -> each row of x once for
    every row of its bag [L, I]. One is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, spread: bool) -> Tensor:  # noqa: FBT001
        ctx.offsets, ctx.spread = offsets, spread
        lengths = offsets.diff()
        if not spread:
            return torch.segment_reduce(x.detach().contiguous(), "sum", lengths=lengths.to(x.device), unsafe=True)
        bags = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        return x.detach().index_select(0, bags.to(x.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _BagSums.apply(grad, ctx.offsets, not ctx.spread), None, None  # type: ignore[no-untyped-call]


def bag_sums(x_LI: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sum [B, I] of the rows offsets[b] to offsets[b + 1] of x, one after another; 0 without any."""
    return cast(Tensor, _BagSums.apply(x_LI, offsets, False))  # type: ignore[no-untyped-call]  # noqa: FBT003


def per_bag(x_BI: Tensor, offsets: Tensor) -> Tensor:
    """Returns row b of x once for each of the rows offsets[b] to offsets[b + 1], [L, I]."""
    return cast(Tensor, _BagSums.apply(x_BI, offsets, True))  # type: ignore[no-untyped-call]  # noqa: FBT003


def bag_softmax(x_L1: Tensor, offsets: Tensor) -> Tensor:
    """Returns e^x divided by its sum over the bag, whose rows are those of `bag_sums`, [L, 1]."""
    # The largest keeps e^x finite and cancels out, so that it needs no gradient.
    most_B1 = torch.segment_reduce(x_L1.detach().float(), "max", lengths=offsets.diff().to(x_L1.device), unsafe=True)
    exp_L1 = each_alone(torch.exp, x_L1 - per_bag(most_B1, offsets))
    return exp_L1 / per_bag(bag_sums(exp_L1, offsets), offsets)

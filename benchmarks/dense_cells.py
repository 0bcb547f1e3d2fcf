"""The dense parts of a DLRM, dot interaction and MLP, against torch's, and the limit of the machine for each.

These are cells of benchmarks.kernels; those of embedding tables are in bench.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.bench import Cell, Contender, sequential_limit_s, timed
from benchmarks.compiled import native
from hotrow.kernels import ops


def matmul_flops_per_s(n: int = 1024, dtype: torch.dtype = torch.float32) -> float:
    """Returns the best of five torch.mm(out=) of n x n matrices."""
    a, b, out = (torch.ones(n, n, dtype=dtype) for _ in range(3))
    best = min(timed(lambda: torch.mm(a, b, out=out)) for _ in range(5))
    return 2 * n**3 / best


class Interaction:
    """Pairwise dot products of 1 + num_features vectors per sample, forward and backward, computed by `function`."""

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], batch_size: int, num_features: int, dim: int
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.function = function
        self.dense = torch.randn(batch_size, dim, generator=generator, requires_grad=True)
        self.pooled = torch.randn(batch_size, num_features, dim, generator=generator, requires_grad=True)
        self.gradient = torch.randn(batch_size, dim + num_features * (num_features + 1) // 2, generator=generator)

    def prepare(self, batch: int) -> None:
        """Clears the gradients; every batch is the same."""
        self.dense.grad = self.pooled.grad = None

    def run(self) -> None:
        """Runs forward and backward."""
        self.out = self.function(self.dense, self.pooled)
        torch.autograd.backward(self.out, self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """Returns the output and both gradients."""
        assert self.dense.grad is not None and self.pooled.grad is not None
        return [self.out.detach(), self.dense.grad, self.pooled.grad]


def interact_in_torch(num_features: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the reference DLRM's interaction, cat -> bmm -> lower triangle -> cat, with a precomputed flat index."""
    n = num_features + 1
    rows, columns = torch.tril_indices(n, n, offset=-1)
    flat = rows * n + columns

    def interact(dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        vectors = torch.cat([dense_BD.unsqueeze(1), pooled_BFD], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense_BD, dots.flatten(1).index_select(1, flat)], 1)

    return interact


class Dense:
    """An MLP, forward and backward, computed by `function` of the input and of weights and biases in turn.

    All numbers are small integers, and most weights are 0, so that every sum is exact in any order and in bfloat16.
    Otherwise rounding could put a value near 0 on either side of a ReLU, and the two sides would have different
    gradients without either being wrong.
    """

    def __init__(self, function: Callable[..., Tensor], batch_size: int, widths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(6)

        def small(*shape: int) -> Tensor:
            return torch.randint(-1, 2, shape, generator=generator).float()

        self.function = function
        self.x = small(batch_size, widths[0]).requires_grad_()
        self.parameters: list[Tensor] = []
        for num_inputs, num_outputs in pairwise(widths):
            kept = torch.rand(num_outputs, num_inputs, generator=generator) < 8 / num_inputs
            weight = small(num_outputs, num_inputs) * kept
            self.parameters += [weight.requires_grad_(), small(num_outputs).requires_grad_()]
        self.gradient = small(batch_size, widths[-1])

    def prepare(self, batch: int) -> None:
        """Clears the gradients; every batch is the same."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def run(self) -> None:
        """Runs forward and backward."""
        self.out = self.function(self.x, *self.parameters)
        torch.autograd.backward(self.out, self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """Returns the output and all gradients."""
        grads = [tensor.grad for tensor in (self.x, *self.parameters)]
        return [self.out.detach(), *(grad for grad in grads if grad is not None)]


def mlp_in_torch(x: Tensor, *parameters: Tensor) -> Tensor:
    """Applies torch's linear and relu; no relu after the last layer."""
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = torch.relu(nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *parameters[-2:])


def mlp_in_float32(x: Tensor, *parameters: Tensor) -> Tensor:
    """Applies hotrow's MLP; no relu after the last layer."""
    return ops.mlp(x, parameters[::2], parameters[1::2], last="linear")


def mlp_in_bfloat16(x: Tensor, *parameters: Tensor) -> Tensor:
    """Applies hotrow's MLP under autocast to bfloat16; no relu after the last layer."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mlp_in_float32(x, *parameters)


def mlp_in_autocast(x: Tensor, *parameters: Tensor) -> Tensor:
    """Applies torch's linear and relu under autocast to bfloat16; no relu after the last layer."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mlp_in_torch(x, *parameters).float()


class Several:
    """Several pieces of work, one after the other."""

    def __init__(self, works: Sequence[Contender]) -> None:
        self.works = works

    def prepare(self, batch: int) -> None:
        """Prepares each."""
        for work in self.works:
            work.prepare(batch)

    def run(self) -> None:
        """Runs each."""
        for work in self.works:
            work.run()

    def outputs(self) -> Iterable[Tensor]:
        """Returns the outputs of all."""
        return [output for work in self.works for output in work.outputs()]


# ---- limits


def interaction_limit_s(batch_size: int, num_features: int, dim: int, threads: int) -> float | None:
    """Returns the larger of the times to move every operand once and to do the arithmetic at the machine's top rate.

    Forward reads 1 + F vectors and writes the output; backward reads them and the output's gradient and writes 1 + F
    gradients. The arithmetic is a multiply and an add per column of each pair forward, of each ordered pair backward.
    """
    if ops.backend().name != "native":
        return None
    vectors = batch_size * (num_features + 1) * dim
    out = batch_size * (dim + num_features * (num_features + 1) // 2)
    run = partial(sequential_limit_s, threads=threads)
    moved = run(2 * vectors + out, write=False) + run(vectors + out, write=True)
    num_flops = batch_size * (num_features + 1) * num_features * dim * 3
    return max(moved, num_flops / products_flops_per_s(threads))


@cache
def products_flops_per_s(threads: int) -> float:
    """Returns the highest rate of products on this machine: of a large torch.mm, or of multiply-adds without memory.

    Usually the latter. torch.mm alone is not a limit: MKL runs slow code on processors of other makers than Intel.
    """
    bare = (
        max(float(native().multiply_adds_per_s(threads)) for _ in range(100)) if ops.backend().name == "native" else 0.0
    )
    return max(bare, matmul_flops_per_s())


def mlp_flops(widths: Sequence[int], batch_size: int, *, gradient_of_inputs: bool) -> int:
    """Returns the operations of an MLP's products, forward and backward, down to its inputs or its first weights.

    A multiply-add counts as two. Each layer has one product forward, one for its weights and one for its inputs.
    """
    layers = [num_inputs * num_outputs for num_inputs, num_outputs in pairwise(widths)]
    return 2 * batch_size * (3 * sum(layers) - (0 if gradient_of_inputs else layers[0]))


def mlp_limit_s(widths: Sequence[int], batch_size: int, threads: int) -> float:
    """Returns the seconds of an MLP's products, forward and backward, at the machine's top rate."""
    return mlp_flops(widths, batch_size, gradient_of_inputs=True) / products_flops_per_s(threads)


@cache
def narrow_flops_per_s() -> float:
    """Returns the highest rate that we have seen of products of bfloat16: of large torch.mm."""
    return max(matmul_flops_per_s(n, torch.bfloat16) for n in (1024, 2048))


# ---- cells


def interaction_cell(name: str, batch_size: int, num_features: int, dim: int) -> Cell:
    """Returns a cell of dot interaction, forward and backward, against cat + bmm + gather."""

    def build() -> tuple[Contender, Contender]:
        side = partial(Interaction, batch_size=batch_size, num_features=num_features, dim=dim)
        return side(ops.dot_interaction), side(interact_in_torch(num_features))

    limit = partial(interaction_limit_s, batch_size, num_features, dim)
    return Cell(name=name, peer="torch cat + bmm + index_select", build=build, limit_s=limit)


def mlp_cell(name: str, batch_size: int, widths: Sequence[int]) -> Cell:
    """Returns a cell of an MLP, forward and backward, against torch's linear and relu."""

    def build() -> tuple[Contender, Contender]:
        side = partial(Dense, batch_size=batch_size, widths=widths)
        return side(mlp_in_float32), side(mlp_in_torch)

    return Cell(name=name, peer="torch linear + relu", build=build, limit_s=partial(mlp_limit_s, widths, batch_size))


BFLOAT16_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "mlperf_like": ((13, 512, 256, 128), (479, 1024, 1024, 512, 256, 1)),
    "sc20_small": ((512, 512, 64), (100, 1024, 1024, 1024, 1)),
}
"""Widths of the bottom and top MLPs of two shapes in benchmarks/step_shapes.py."""


BFLOAT16_TARGET = 1.6
"""Least ratio of our time in float32 to that in bfloat16 that hotrow promises."""


def bfloat16_cell(
    name: str, batch_size: int, mlps: Sequence[Sequence[int]], peer: str, function: Callable[..., Tensor]
) -> Cell:
    """Returns a cell of MLPs in bfloat16, forward and backward, against `function`; its limit is torch.mm's rate."""
    flops = sum(mlp_flops(widths, batch_size, gradient_of_inputs=True) for widths in mlps)

    def build() -> tuple[Contender, Contender]:
        return side(mlp_in_bfloat16), side(function)

    def side(function: Callable[..., Tensor]) -> Several:
        return Several([Dense(function, batch_size, widths) for widths in mlps])

    def note() -> str:
        return f"{flops / 1e9:.1f} GFLOP a round; torch.mm in bfloat16: {narrow_flops_per_s() / 1e9:.0f} GFLOP/s"

    return Cell(
        name=name,
        peer=peer,
        build=build,
        limit_s=lambda _: flops / narrow_flops_per_s(),
        target=BFLOAT16_TARGET if function is mlp_in_float32 else None,
        note=note,
        within=1e-2 if function is mlp_in_autocast else Cell.within,  # torch rounds every result to bfloat16
    )


def bfloat16_cells(*, quick: bool) -> list[Cell]:
    """Returns the cells of our products of bfloat16; none where they do not run."""
    peers = {"fp32": ("hotrow in float32", mlp_in_float32), "autocast": ("torch autocast", mlp_in_autocast)}
    return [
        bfloat16_cell(f"mlp_bf16_{shape}_vs_{word}", 128 if quick else 2048, mlps, peer, function)
        for shape, mlps in BFLOAT16_SHAPES.items()
        for word, (peer, function) in peers.items()
        if ops.bfloat16_products()
    ]


FEW_ROWS = (1, 8, 64, 128, 200, 256)
"""What a server scores at a time, and the batches of `fit`."""
SMALL_MLPS = ((367, 512, 256, 1), (13, 64, 8), (64, 200, 80, 1), (567, 128, 64, 1))


def small_cells(*, quick: bool) -> list[Cell]:
    """Returns the cells of MLPs on few rows."""
    both = [(widths, rows) for widths in SMALL_MLPS for rows in (FEW_ROWS[:1] if quick else FEW_ROWS)]
    return [mlp_cell(f"mlp_{'_'.join(map(str, widths))}_rows_{rows}", rows, widths) for widths, rows in both]


def denormal_cell() -> Cell:
    """Returns the cell of an MLP with 5 % denormal weights in its first layer, against it with zeros in their place."""
    rows, widths = 200, (359, 64, 32, 1)

    def build() -> tuple[Contender, Contender]:
        own, other = (Dense(mlp_in_float32, rows, widths) for _ in range(2))
        weight = own.parameters[0].data
        weight[(torch.rand(weight.shape) < 0.05) & (weight == 0)] = 1e-39
        return own, other

    limit_s = partial(mlp_limit_s, widths, rows)
    return Cell(name="mlp_denormals", peer="zeros", build=build, limit_s=limit_s, target=1 / 1.5)


def dense_cells(*, quick: bool) -> list[Cell]:
    """Returns every cell; quick ones have few samples."""
    batch_size = 128 if quick else 2048
    found = [interaction_cell(f"interaction_26_dim{dim}", batch_size, 26, dim) for dim in (16, 64, 128)]
    return [
        *found,
        mlp_cell("mlp_367_512_256_1", batch_size, (367, 512, 256, 1)),
        *small_cells(quick=quick),
        denormal_cell(),
        *bfloat16_cells(quick=quick),
    ]

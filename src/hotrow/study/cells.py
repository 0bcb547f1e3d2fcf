"""What `hotrow bench` compares: shapes and ids, our side and torch's, the machine's limit, and the list of cells.

A cell is one piece of work that hotrow and a peer both do on the same ids. The peers here are torch's own:
nn.EmbeddingBag(mode="sum", sparse=True) with torch.optim. Peers that need a package of their own are in benchmarks/, on
the same classes. hotrow.bench runs the cells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, pairwise
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from hotrow.tables import TableConfig

LR, EPS, ACCUMULATOR = 0.01, 1e-8, 0.1  # the accumulator starts above zero: at zero the first step is sign(g), a cliff
NUM_BATCHES = 4  # distinct batches that rounds walk through, so that no row is warm from the round before by luck
PREFETCHES: tuple[tuple[int, Literal["l1", "l2"]], ...] = ((8, "l1"), (32, "l1"), (16, "l2"), (32, "l2"), (64, "l2"))
"""Distances in rows and the cache prefetched into, of which the row limit is the best."""
FLOATS_PER_LINE = 16
EVICTING_FLOATS = 1 << 25
"""128 MiB: reading them leaves nothing else in the caches of a core and of most processors."""
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
Part = Literal["lookup", "update", "step"]


# ---- shapes and ids


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Embedding work of one step: tables, rows each, columns, bags per table, ids per bag, skew of the ids."""

    num_tables: int
    num_embeddings: int
    embedding_dim: int
    batch_size: int
    lookups: int
    zipf: float | None = None
    """None: uniform ids. Else id k is drawn in proportion to (k + 1) ** -zipf, popular ids first as hotrow packs."""

    def ids(self, seed: int) -> Tensor:
        """Int64 ids [num_tables * batch_size * lookups], table-major, from `seed` alone."""
        generator = np.random.default_rng(seed)
        n = self.batch_size * self.lookups
        if self.zipf is None:
            return torch.from_numpy(generator.integers(0, self.num_embeddings, self.num_tables * n))
        cumulative = np.cumsum(np.arange(1, self.num_embeddings + 1, dtype=np.float64) ** -self.zipf)
        return torch.from_numpy(np.searchsorted(cumulative, generator.random(self.num_tables * n) * cumulative[-1]))

    def offsets(self) -> Tensor:
        """Int64 bag starts of one table, [batch_size + 1]."""
        return torch.arange(self.batch_size + 1) * self.lookups


POOLED = Shape(num_tables=8, num_embeddings=1_000_000, embedding_dim=64, batch_size=2048, lookups=50)
ONE_HOT = Shape(num_tables=26, num_embeddings=200_000, embedding_dim=16, batch_size=2048, lookups=1)


# ---- contenders


class Contender(Protocol):
    """One side of a cell: `prepare` is not timed, `run` is, `outputs` are compared with the other side's."""

    def prepare(self, batch: int) -> None:
        """Get ready for batch number `batch`."""

    def run(self) -> None:
        """Do the work once."""

    def outputs(self) -> Iterable[Tensor]:
        """What the work changed or produced."""


def table_configs(shape: Shape) -> tuple[TableConfig, ...]:
    """One table per feature, named t0, t1, ..."""
    rows, dim = shape.num_embeddings, shape.embedding_dim
    return tuple(
        TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=(f"f{t}",))
        for t in range(shape.num_tables)
    )


def upstream_gradient(shape: Shape) -> Tensor:
    """The gradient every contender receives: normal, [batch_size, num_tables * embedding_dim]."""
    return torch.randn(
        shape.batch_size, shape.num_tables * shape.embedding_dim, generator=torch.Generator().manual_seed(7)
    )


class Ours:
    """hotrow.EmbeddingCollection and its optimizer."""

    def __init__(self, shape: Shape, part: Part, optimizer: Optimizer) -> None:
        self.part = part
        self.emb = EmbeddingCollection(table_configs(shape), seed=1)
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": SGD,
            "adagrad": partial(Adagrad, eps=EPS, initial_accumulator_value=ACCUMULATOR),
            "rowwise_adagrad": partial(RowWiseAdagrad, eps=EPS, initial_accumulator_value=ACCUMULATOR),
            "adam": Adam,
        }
        self.optimizer = kinds[optimizer](self.emb, LR)
        self.gradient = upstream_gradient(shape)
        self.batches = [self._batch(shape, seed) for seed in range(NUM_BATCHES)]

    def _batch(self, shape: Shape, seed: int) -> KeyedJaggedTensor:
        names, ids = self.emb.feature_names, shape.ids(seed)
        if shape.lookups == 1:
            return KeyedJaggedTensor(names, ids)
        return KeyedJaggedTensor(names, ids, lengths=torch.full((shape.num_tables * shape.batch_size,), shape.lookups))

    def prepare(self, batch: int) -> None:
        """Choose the batch; for an update, do the forward part now."""
        self.batch = self.batches[batch % NUM_BATCHES]
        if self.part == "update":
            self.pooled = self.emb(self.batch)

    def run(self) -> None:
        """Lookup, or backward and update, or all three."""
        if self.part == "lookup":
            with torch.no_grad():
                self.pooled = self.emb(self.batch)
            return
        if self.part == "step":
            self.pooled = self.emb(self.batch)
        torch.autograd.backward(self.pooled, self.gradient)
        self.optimizer.step()

    def outputs(self) -> Iterable[Tensor]:
        """The pooled rows and every table."""
        return [self.pooled.detach(), *self.emb.weights.values()]


class RowWiseAdagradInTorch(torch.optim.Optimizer):
    """Row-wise Adagrad from torch's sparse operations, as in the reference DLRM: torch.optim has none.

    h[row] += mean(g[row] ** 2);  w[row] -= lr * g[row] / (sqrt(h[row]) + eps), g being the summed gradient of the row.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["sum"] = torch.full((weight.shape[0],), ACCUMULATOR)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's overloads return a loss
        """One update of every row that has a gradient."""
        for weight in self.param_groups[0]["params"]:
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            sums = self.state[weight]["sum"]
            sums.index_add_(0, rows, values.pow(2).mean(1))
            weight.index_add_(0, rows, values / (sums[rows].sqrt() + EPS).unsqueeze(1), alpha=-LR)


class Torch:
    """One nn.EmbeddingBag(mode="sum", sparse=True) per table, starting from the rows of `ours`."""

    def __init__(self, shape: Shape, part: Part, optimizer: Optimizer, ours: Ours) -> None:
        self.part = part
        self.bags = [
            nn.EmbeddingBag.from_pretrained(w.clone(), freeze=False, mode="sum", sparse=True, include_last_offset=True)
            for w in ours.emb.weights.values()
        ]
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": partial(torch.optim.SGD, lr=LR),
            "adagrad": partial(torch.optim.Adagrad, lr=LR, eps=EPS, initial_accumulator_value=ACCUMULATOR),
            "rowwise_adagrad": RowWiseAdagradInTorch,
            "adam": partial(torch.optim.SparseAdam, lr=LR),
        }
        self.optimizer = kinds[optimizer]([bag.weight for bag in self.bags])
        self.gradients = [g.contiguous() for g in upstream_gradient(shape).chunk(shape.num_tables, dim=1)]
        self.offsets = shape.offsets()
        self.batches = [shape.ids(seed).chunk(shape.num_tables) for seed in range(NUM_BATCHES)]

    def _forward(self) -> list[Tensor]:
        return [bag(ids, self.offsets) for bag, ids in zip(self.bags, self.batch, strict=True)]

    def prepare(self, batch: int) -> None:
        """Choose the batch; for an update, do the forward part now."""
        self.batch = self.batches[batch % NUM_BATCHES]
        self.optimizer.zero_grad()
        if self.part == "update":
            self.pooled = self._forward()

    def run(self) -> None:
        """Lookup, or backward and update, or all three."""
        if self.part == "lookup":
            with torch.no_grad():
                self.pooled = self._forward()
            return
        if self.part == "step":
            self.pooled = self._forward()
        torch.autograd.backward(self.pooled, self.gradients)
        self.optimizer.step()

    def outputs(self) -> Iterable[Tensor]:
        """The pooled rows and every table."""
        return [torch.cat([p.detach() for p in self.pooled], 1), *(bag.weight.detach() for bag in self.bags)]


class Interaction:
    """Pairwise dot products of 1 + num_features vectors per sample, forward and backward, by `function`."""

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], batch_size: int, num_features: int, dim: int
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.function = function
        self.dense = torch.randn(batch_size, dim, generator=generator, requires_grad=True)
        self.pooled = torch.randn(batch_size, num_features, dim, generator=generator, requires_grad=True)
        self.gradient = torch.randn(batch_size, dim + num_features * (num_features + 1) // 2, generator=generator)

    def prepare(self, batch: int) -> None:
        """Every batch is the same one."""
        self.dense.grad = self.pooled.grad = None

    def run(self) -> None:
        """Forward and backward."""
        self.out = self.function(self.dense, self.pooled)
        torch.autograd.backward(self.out, self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """The output and both gradients."""
        assert self.dense.grad is not None and self.pooled.grad is not None
        return [self.out.detach(), self.dense.grad, self.pooled.grad]


def interact_in_torch(num_features: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The reference DLRM's interaction, cat -> bmm -> lower triangle -> cat, with its index made once and flat."""
    n = num_features + 1
    rows, columns = torch.tril_indices(n, n, offset=-1)
    flat = rows * n + columns

    def interact(dense_BD: Tensor, pooled_BFD: Tensor) -> Tensor:
        vectors = torch.cat([dense_BD.unsqueeze(1), pooled_BFD], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense_BD, dots.flatten(1).index_select(1, flat)], 1)

    return interact


class Dense:
    """An MLP, forward and backward, by `function` of its input and its weights and biases in turn.

    All numbers are small integers, so that every sum is exact in any order: a value next to 0 that rounding put on the
    other side of a ReLU would give both sides different gradients, and neither would be wrong.
    """

    def __init__(self, function: Callable[..., Tensor], batch_size: int, widths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(6)

        def small(*shape: int) -> Tensor:
            return torch.randint(-1, 2, shape, generator=generator).float()

        self.function = function
        self.x = small(batch_size, widths[0]).requires_grad_()
        self.parameters: list[Tensor] = []
        for num_inputs, num_outputs in pairwise(widths):
            self.parameters += [small(num_outputs, num_inputs).requires_grad_(), small(num_outputs).requires_grad_()]
        self.gradient = small(batch_size, widths[-1])

    def prepare(self, batch: int) -> None:
        """Every batch is the same one."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def run(self) -> None:
        """Forward and backward."""
        self.out = self.function(self.x, *self.parameters)
        torch.autograd.backward(self.out, self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """The output and all gradients."""
        grads = [tensor.grad for tensor in (self.x, *self.parameters)]
        return [self.out.detach(), *(grad for grad in grads if grad is not None)]


def mlp_in_torch(x: Tensor, *parameters: Tensor) -> Tensor:
    """torch's linear and relu, none after the last layer."""
    for weight, bias in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = torch.relu(nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *parameters[-2:])


# ---- limits


def timed(work: Callable[[], object]) -> float:
    """Seconds `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def evictor() -> Callable[[], object]:
    """What reads more memory than caches hold, so that they hold nothing else afterwards."""
    return torch.zeros(EVICTING_FLOATS).sum


def touch_limit_s(
    num_rows: int, row_floats: int, walks: Sequence[Tensor], *, write: bool, threads: int, cold: bool
) -> float:
    """Least seconds in which this machine touches the rows of a walk, over prefetches and numbers of threads.

    walks: ids, walked through in turn, as the kernels are given batches. cold: between two walks other memory is read,
    more than caches hold, as by the peer between two of our rounds and by the dense part between two steps; else rows
    of the batches before are warm, and the limit is that of a cache that neither side of a comparison finds so.
    """
    rows = ops.allocate(num_rows, row_floats)
    rows.fill_(0)  # every page exists before it is timed
    evict = evictor() if cold else bool
    turns = cycle(walks)

    def touch(threads: int, distance: int, into: Literal["l1", "l2"]) -> float:
        evict()
        return ops.touch_rows(rows, next(turns), distance=distance, into=into, write=write, threads=threads)

    return min(touch(t, *prefetch) for t in range(1, threads + 1) for prefetch in PREFETCHES for _ in range(4))


def rows_limit_s(
    batches: Sequence[Tensor], *, num_rows: int, dim: int, part: Part, optimizer: Optimizer, threads: int
) -> float | None:
    """Seconds to move the rows (of `num_rows`) of one batch of ids and nothing else; None without the native module.

    A lookup reads the row of every id in order. An update reads and writes each distinct row once, in order, as if
    finding and summing its ids were free, and as much again for each state of the optimizer (a float per row for
    row-wise Adagrad).
    """
    if ops.backend().name != "native":
        return None
    touch = partial(touch_limit_s, threads=threads, cold=True)
    seconds = touch(num_rows, dim, batches, write=False) if part != "update" else 0.0
    if part == "lookup":
        return seconds
    distinct = [torch.from_numpy(np.unique(ids.numpy())) for ids in batches]
    update = touch(num_rows, dim, distinct, write=True)
    if optimizer == "rowwise_adagrad":
        lines = [torch.from_numpy(np.unique(rows.numpy() // FLOATS_PER_LINE)) for rows in distinct]
        update += touch(num_rows // FLOATS_PER_LINE + 1, FLOATS_PER_LINE, lines, write=True)
    return seconds + {"adagrad": 2, "adam": 3}.get(optimizer, 1) * update


def embedding_limit_s(shape: Shape, part: Part, optimizer: Optimizer, threads: int) -> float | None:
    """`rows_limit_s` of a batch of `shape`, and the pooled rows written, their gradient read, once each in order."""
    tables = torch.arange(shape.num_tables).repeat_interleave(shape.batch_size * shape.lookups)
    rows = rows_limit_s(
        [tables * shape.num_embeddings + shape.ids(seed) for seed in range(NUM_BATCHES)],
        num_rows=shape.num_tables * shape.num_embeddings,
        dim=shape.embedding_dim,
        part=part,
        optimizer=optimizer,
        threads=threads,
    )
    if rows is None:
        return None
    pooled = shape.batch_size * shape.num_tables * shape.embedding_dim
    writes = {"lookup": [True], "update": [False], "step": [True, False]}[part]
    return rows + sum(sequential_limit_s(pooled, write=write, threads=threads) for write in writes)


def sequential_limit_s(num_floats: int, *, write: bool, threads: int) -> float:
    """Least seconds in which this machine touches `num_floats` floats in a row, from caches where they fit."""
    num_lines = num_floats // FLOATS_PER_LINE + 1
    lines = [torch.arange(num_lines)]
    return touch_limit_s(num_lines, FLOATS_PER_LINE, lines, write=write, threads=threads, cold=False)


def interaction_limit_s(batch_size: int, num_features: int, dim: int, threads: int) -> float | None:
    """The larger of moving every operand once and doing the arithmetic as fast as this machine multiplies at all.

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
    """The most that this machine does in products: by a large torch.mm, or by multiply-adds that touch no memory.

    Most by far the latter. torch.mm alone is no limit: MKL takes slow code on processors of other makers than Intel.
    """
    bare = max(ops.multiply_adds_per_s(threads) for _ in range(100)) if ops.backend().name == "native" else 0.0
    return max(bare, matmul_flops_per_s())


def matmul_flops_per_s(n: int = 1024) -> float:
    """Best of five torch.mm(out=) of n x n float32 matrices."""
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    best = min(timed(lambda: torch.mm(a, b, out=out)) for _ in range(5))
    return 2 * n**3 / best


def mlp_flops(widths: Sequence[int], batch_size: int, *, gradient_of_inputs: bool) -> int:
    """Operations of an MLP's products, forward and backward, down to its inputs or to its first weights.

    A multiply-add is two. Each layer has a product forward, one for its weights and one for its inputs.
    """
    layers = [num_inputs * num_outputs for num_inputs, num_outputs in pairwise(widths)]
    return 2 * batch_size * (3 * sum(layers) - (0 if gradient_of_inputs else layers[0]))


def mlp_limit_s(widths: Sequence[int], batch_size: int, threads: int) -> float:
    """Seconds of an MLP's products, forward and backward, as fast as this machine multiplies at all."""
    return mlp_flops(widths, batch_size, gradient_of_inputs=True) / products_flops_per_s(threads)


# ---- cells


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison: how to build both sides, and what the machine allows."""

    name: str
    peer: str
    build: Callable[[], tuple[Contender, Contender]]
    """() -> (ours, peer), from the same rows."""
    limit_s: Callable[[int], float | None]
    """threads -> seconds."""
    target: float | None = None
    """Least ratio peer / ours that hotrow promises."""
    most_over_limit: float | None = None
    """Greatest ratio ours / limit that hotrow promises."""
    note: Callable[[], str] | None = None
    """What a reader must know of the peer, found out after the rounds."""


def embedding_cell(name: str, shape: Shape, part: Part, optimizer: Optimizer) -> Cell:
    """A cell of embedding work against torch.nn.EmbeddingBag."""

    def build() -> tuple[Contender, Contender]:
        ours = Ours(shape, part, optimizer)
        return ours, Torch(shape, part, optimizer, ours)

    peers = {
        "sgd": " + torch.optim.SGD",
        "adagrad": " + torch.optim.Adagrad",
        "rowwise_adagrad": " + row-wise Adagrad in torch",
        "adam": " + torch.optim.SparseAdam",
    }
    peer = "torch.nn.EmbeddingBag(sparse)" + ("" if part == "lookup" else peers[optimizer])
    return Cell(name=name, peer=peer, build=build, limit_s=partial(embedding_limit_s, shape, part, optimizer))


def interaction_cell(name: str, batch_size: int, num_features: int, dim: int) -> Cell:
    """A cell of dot interaction, forward and backward, against cat + bmm + gather."""

    def build() -> tuple[Contender, Contender]:
        side = partial(Interaction, batch_size=batch_size, num_features=num_features, dim=dim)
        return side(ops.dot_interaction), side(interact_in_torch(num_features))

    limit = partial(interaction_limit_s, batch_size, num_features, dim)
    return Cell(name=name, peer="torch cat + bmm + index_select", build=build, limit_s=limit)


def mlp_cell(name: str, batch_size: int, widths: Sequence[int]) -> Cell:
    """A cell of an MLP, forward and backward, against torch's linear and relu."""

    def build() -> tuple[Contender, Contender]:
        side = partial(Dense, batch_size=batch_size, widths=widths)
        return side(lambda x, *p: ops.mlp(x, p[::2], p[1::2], last="linear")), side(mlp_in_torch)

    return Cell(name=name, peer="torch linear + relu", build=build, limit_s=partial(mlp_limit_s, widths, batch_size))


def cells(*, quick: bool = False) -> tuple[Cell, ...]:
    """Every cell; `quick` shrinks the tables so that all of them run in seconds and in little memory."""
    pooled = replace(POOLED, num_embeddings=10_000, batch_size=64) if quick else POOLED
    one_hot = replace(ONE_HOT, num_embeddings=2_000, batch_size=256) if quick else ONE_HOT
    skews = {"uniform": pooled, "zipf": replace(pooled, zipf=1.05)}
    found = [
        embedding_cell(f"{part}_sgd_8x50_{skew}" if part != "lookup" else f"lookup_8x50_{skew}", shape, part, "sgd")
        for part in ("lookup", "update", "step")
        for skew, shape in skews.items()
    ]
    found += [
        embedding_cell(f"step_{optimizer}_26x1_dim{dim}", replace(one_hot, embedding_dim=dim), "step", optimizer)
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam")
        for dim in (16, 64)
    ]
    batch_size = 128 if quick else 2048
    found += [interaction_cell(f"interaction_26_dim{dim}", batch_size, 26, dim) for dim in (16, 64, 128)]
    found.append(mlp_cell("mlp_367_512_256_1", batch_size, (367, 512, 256, 1)))
    return tuple(found)

"""What every benchmark shares: cells, rounds, limits of the machine; and the cells of our kernels against torch's.

A cell is one piece of work that hotrow and a peer do on the same ids. The peer here is nn.EmbeddingBag(mode="sum",
sparse=True) with torch.optim; other files build cells with other peers from the same classes. The outputs of both
sides are compared before anything is timed, and a cell whose outputs differ is refused. Then rounds of (ours, peer)
alternate; rounds.py says which of them count. The report gives medians of the times and of the rounds' ratios,
the range of four ratios in five, the number of clean rounds, and the time of a separate loop (native/limit.cpp) that
only moves the same rows.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rounds import (  # noqa: F401  # benchmarks take these from here
    CLEAN_SHARE,
    MAX_ROUNDS,
    Disturbance,
    Rounds,
    circumstances,
    clean_rounds,
    cleanest,
    how_clean,
    is_disturbed,
    wants_more,
)
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.kernels.ops import PREFETCHES
from hotrow.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from hotrow.tables import TableConfig

NUM_ROUNDS = 31
"""Enough that a burst of memory traffic by a neighbour, which we cannot detect, does not become the median."""
LR, EPS = 0.01, 1e-8
ACCUMULATOR = 0.1  # not zero: from zero the first step of Adagrad is sign(g), whatever the size of g
NUM_BATCHES = 4  # rounds take different batches, so that no row is in the cache because of the round before
FLOATS_PER_LINE = 16
EVICTING_FLOATS = 1 << 25
"""128 MiB, more than the caches of most processors: reading them removes everything else from the caches."""
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
Part = Literal["lookup", "update", "step"]


# ---- shapes and ids


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The embedding work of one step."""

    num_tables: int
    num_embeddings: int
    embedding_dim: int
    batch_size: int
    lookups: int
    """Ids per bag; every table has `batch_size` bags."""
    ragged: bool = False
    """Whether the bags of a table have 0 to twice `lookups` ids, all these numbers being equally likely."""
    zipf: float | None = None
    """None: uniform ids. Else id k has a probability proportional to (k + 1) ** -zipf; popular ids come first."""

    @property
    def lengths(self) -> Tensor:
        """The int64 lengths of a table's bags, [batch_size]; all tables have the same."""
        if not self.ragged:
            return torch.full((self.batch_size,), self.lookups)
        return torch.randint(2 * self.lookups + 1, (self.batch_size,), generator=torch.Generator().manual_seed(8))

    def ids(self, seed: int) -> Tensor:
        """Returns int64 ids, table by table, those of a table bag by bag. They depend on `seed` alone."""
        generator = np.random.default_rng(seed)
        n = int(self.lengths.sum())
        if self.zipf is None:
            return torch.from_numpy(generator.integers(0, self.num_embeddings, self.num_tables * n))
        cumulative = _cumulative(self.num_embeddings, self.zipf)
        return torch.from_numpy(np.searchsorted(cumulative, generator.random(self.num_tables * n) * cumulative[-1]))

    def offsets(self) -> Tensor:
        """Returns the int64 bag offsets of one table, [batch_size + 1]."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])


@lru_cache(maxsize=3)
def _cumulative(num_embeddings: int, zipf: float) -> np.ndarray:
    """Returns the cumulative weights of a Zipf law. They are cached: computing them takes longer than drawing ids."""
    total: np.ndarray = np.cumsum(np.arange(1, num_embeddings + 1, dtype=np.float64) ** -zipf)
    return total


POOLED = Shape(num_tables=8, num_embeddings=1_000_000, embedding_dim=64, batch_size=2048, lookups=50)
ONE_HOT = Shape(num_tables=26, num_embeddings=200_000, embedding_dim=16, batch_size=2048, lookups=1)


# ---- contenders


class Contender(Protocol):
    """One side of a cell. Only `run` is timed."""

    def prepare(self, batch: int) -> None:
        """Gets ready for batch number `batch`."""

    def run(self) -> None:
        """Does the work once."""

    def outputs(self) -> Iterable[Tensor]:
        """Returns what the work produced or changed, to compare it with the other side."""


def table_configs(shape: Shape) -> tuple[TableConfig, ...]:
    """Returns one table per feature, named t0, t1, ..."""
    rows, dim = shape.num_embeddings, shape.embedding_dim
    return tuple(
        TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=(f"f{t}",))
        for t in range(shape.num_tables)
    )


def upstream_gradient(shape: Shape) -> Tensor:
    """Returns the gradient that both sides receive: normal, [batch_size, num_tables * embedding_dim]."""
    return torch.randn(
        shape.batch_size, shape.num_tables * shape.embedding_dim, generator=torch.Generator().manual_seed(7)
    )


class Ours:
    """hotrow.EmbeddingCollection and its optimizer."""

    def __init__(
        self,
        shape: Shape,
        part: Part,
        optimizer: Optimizer,
        *,
        emb: EmbeddingCollection | None = None,
        ids: Sequence[Tensor] = (),
    ) -> None:
        """emb, ids: tables to use instead of new ones, and the batches instead of NUM_BATCHES of the shape."""
        self.part = part
        self.emb = EmbeddingCollection(table_configs(shape), seed=1) if emb is None else emb
        if part != "lookup":
            self.optimizer = OPTIMIZERS[optimizer][0](self.emb, lr=LR)
            self.gradient = upstream_gradient(shape)
        lengths = None if shape.lookups == 1 else shape.lengths.repeat(shape.num_tables)
        drawn = ids or [shape.ids(seed) for seed in range(NUM_BATCHES)]
        self.batches = [KeyedJaggedTensor(self.emb.feature_names, each, lengths=lengths) for each in drawn]

    def prepare(self, batch: int) -> None:
        """Chooses the batch, and for an update runs the forward part."""
        self.batch = self.batches[batch % len(self.batches)]
        if self.part == "update":
            self.pooled = self.emb(self.batch)

    def run(self) -> None:
        """Runs a lookup, or backward and update, or all three."""
        if self.part == "lookup":
            with torch.no_grad():
                self.pooled = self.emb(self.batch)
            return
        if self.part == "step":
            self.pooled = self.emb(self.batch)
        torch.autograd.backward(self.pooled, self.gradient)
        self.optimizer.step()

    def outputs(self) -> Iterable[Tensor]:
        """Returns the pooled rows and every table."""
        return [self.pooled.detach(), *self.emb.weights.values()]


class RowWiseAdagradInTorch(torch.optim.Optimizer):
    """Row-wise Adagrad in torch's sparse operations, as in the reference DLRM: torch.optim does not have it.

    h[row] += mean(g[row] ** 2);  w[row] -= lr * g[row] / (sqrt(h[row]) + eps), where g is the row's summed gradient.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["sum"] = torch.full((weight.shape[0],), ACCUMULATOR)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's overloads return a loss
        """Updates every row that has a gradient."""
        for weight in self.param_groups[0]["params"]:
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            sums = self.state[weight]["sum"]
            sums.index_add_(0, rows, values.pow(2).mean(1))
            weight.index_add_(0, rows, values / (sums[rows].sqrt() + EPS).unsqueeze(1), alpha=-self.defaults["lr"])


_ADAGRAD: dict[str, Any] = {"eps": EPS, "initial_accumulator_value": ACCUMULATOR}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer], str]] = {
    "sgd": (SGD, torch.optim.SGD, "torch.optim.SGD"),
    "adagrad": (partial(Adagrad, **_ADAGRAD), partial(torch.optim.Adagrad, **_ADAGRAD), "torch.optim.Adagrad"),
    "rowwise_adagrad": (partial(RowWiseAdagrad, **_ADAGRAD), RowWiseAdagradInTorch, "row-wise Adagrad in torch"),
    "adam": (Adam, torch.optim.SparseAdam, "torch.optim.SparseAdam"),
}
"""Ours, torch's, and the name of torch's."""


class Torch:
    """One nn.EmbeddingBag(mode="sum", sparse=True) per table, which starts from the rows of `ours`."""

    def __init__(self, shape: Shape, part: Part, optimizer: Optimizer, ours: Ours) -> None:
        self.part = part
        self.bags = [
            nn.EmbeddingBag.from_pretrained(w.clone(), freeze=False, mode="sum", sparse=True, include_last_offset=True)
            for w in ours.emb.weights.values()
        ]
        self.optimizer = OPTIMIZERS[optimizer][1]([bag.weight for bag in self.bags], lr=LR)
        self.gradients = [g.contiguous() for g in upstream_gradient(shape).chunk(shape.num_tables, dim=1)]
        self.offsets = shape.offsets()
        self.batches = [shape.ids(seed).chunk(shape.num_tables) for seed in range(NUM_BATCHES)]

    def _forward(self) -> list[Tensor]:
        return [bag(ids, self.offsets) for bag, ids in zip(self.bags, self.batch, strict=True)]

    def prepare(self, batch: int) -> None:
        """Chooses the batch, and for an update runs the forward part."""
        self.batch = self.batches[batch % NUM_BATCHES]
        self.optimizer.zero_grad()
        if self.part == "update":
            self.pooled = self._forward()

    def run(self) -> None:
        """Runs a lookup, or backward and update, or all three."""
        if self.part == "lookup":
            with torch.no_grad():
                self.pooled = self._forward()
            return
        if self.part == "step":
            self.pooled = self._forward()
        torch.autograd.backward(self.pooled, self.gradients)
        self.optimizer.step()

    def outputs(self) -> Iterable[Tensor]:
        """Returns the pooled rows and every table."""
        return [torch.cat([p.detach() for p in self.pooled], 1), *(bag.weight.detach() for bag in self.bags)]


# ---- limits


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def evictor() -> Callable[[], object]:
    """Returns a function that reads more memory than the caches hold, so that they hold nothing else afterwards."""
    return torch.zeros(EVICTING_FLOATS).sum


def touch_limit_s(
    num_rows: int, row_floats: int, walks: Sequence[Tensor], *, write: bool, threads: int, cold: bool
) -> float:
    """Returns the least time, in seconds, in which this machine touches the rows of one batch.

    The least over prefetches and over 1 to `threads` threads. walks: ids of batches, taken in turn. cold: between two
    batches the caches are emptied, as the peer does between two of our rounds and the dense layers between two steps;
    otherwise rows of earlier batches are warm, and the limit would hold for a cache that neither side has.
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
    batches: Sequence[Tensor],
    *,
    num_rows: int,
    dim: int,
    part: Part,
    optimizer: Optimizer,
    threads: int,
    every: bool = False,
) -> float | None:
    """Returns the seconds it takes to move only the rows of one batch; None without the native module, and for an odd
    dim, whose rows the loop cannot touch.

    A lookup reads the row of every id, in order. An update reads and writes each distinct row once, in order (finding
    them and summing their gradients is free), and the same again for each state of the optimizer; the state of row-wise
    Adagrad is one float per row. every: it reads and writes the row of every id instead, in the batch's order.
    """
    if ops.backend().name != "native" or dim % 2:
        return None
    touch = partial(touch_limit_s, threads=threads, cold=True)
    seconds = touch(num_rows, dim, batches, write=False) if part != "update" else 0.0
    if part == "lookup":
        return seconds
    walk = (lambda ids: ids) if every else (lambda ids: torch.from_numpy(np.unique(ids.numpy())))
    update = touch(num_rows, dim, [walk(ids) for ids in batches], write=True)
    if optimizer == "rowwise_adagrad":
        lines = [walk(ids // FLOATS_PER_LINE) for ids in batches]
        update += touch(num_rows // FLOATS_PER_LINE + 1, FLOATS_PER_LINE, lines, write=True)
    return seconds + {"adagrad": 2, "adam": 3}.get(optimizer, 1) * update


def embedding_limit_s(
    shape: Shape, part: Part, optimizer: Optimizer, threads: int, *, every: bool = False
) -> float | None:
    """Returns `rows_limit_s` plus the time to write the pooled rows and to read their gradient, once each."""
    tables = torch.arange(shape.num_tables).repeat_interleave(int(shape.lengths.sum()))
    rows = rows_limit_s(
        [tables * shape.num_embeddings + shape.ids(seed) for seed in range(NUM_BATCHES)],
        num_rows=shape.num_tables * shape.num_embeddings,
        dim=shape.embedding_dim,
        part=part,
        optimizer=optimizer,
        threads=threads,
        every=every,
    )
    if rows is None:
        return None
    pooled = shape.batch_size * shape.num_tables * shape.embedding_dim
    writes = {"lookup": [True], "update": [False], "step": [True, False]}[part]
    return rows + sum(sequential_limit_s(pooled, write=write, threads=threads) for write in writes)


def sequential_limit_s(num_floats: int, *, write: bool, threads: int) -> float:
    """Returns the least time to touch `num_floats` consecutive floats, which may be in the caches."""
    num_lines = num_floats // FLOATS_PER_LINE + 1
    lines = [torch.arange(num_lines)]
    return touch_limit_s(num_lines, FLOATS_PER_LINE, lines, write=write, threads=threads, cold=False)


# ---- the cells


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison."""

    name: str
    peer: str
    build: Callable[[], tuple[Contender, Contender]]
    """Returns (ours, peer), which start from the same rows."""
    limit_s: Callable[[int], float | None]
    """Returns the limit of the machine, in seconds, with so many threads."""
    touches_s: Callable[[int], float | None] = lambda threads: None
    """Returns the same for a limit in which every occurrence of a row counts, not the distinct rows alone."""
    target: float | None = None
    """The least ratio peer / ours that hotrow promises."""
    most_over_limit: float | None = None
    """The greatest ratio ours / limit that hotrow promises."""
    note: Callable[[], str] | None = None
    """Returns a remark about the peer for the report; called after the rounds."""
    within: float = 2e-5
    """Largest difference of an output from the peer's, as a share of the peer's largest element: rounding of sums."""


def limits(shape: Shape, part: Part, optimizer: Optimizer) -> dict[str, Any]:
    """The limits of a Cell of embedding work; of every touch if popular ids make it another one."""
    limit = partial(embedding_limit_s, shape, part, optimizer)
    return {"limit_s": limit} | ({"touches_s": partial(limit, every=True)} if shape.zipf and part != "lookup" else {})


def embedding_cell(name: str, shape: Shape, part: Part, optimizer: Optimizer) -> Cell:
    """Returns a cell of embedding work against torch.nn.EmbeddingBag."""

    def build() -> tuple[Contender, Contender]:
        ours = Ours(shape, part, optimizer)
        return ours, Torch(shape, part, optimizer, ours)

    peer = "torch.nn.EmbeddingBag(sparse)" + ("" if part == "lookup" else f" + {OPTIMIZERS[optimizer][2]}")
    return Cell(name=name, peer=peer, build=build, **limits(shape, part, optimizer))


def cells(*, quick: bool = False) -> tuple[Cell, ...]:
    """Returns every cell; quick ones have small tables, and all of them run in seconds."""
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
    return (*found, *odd_cells(quick=quick))


ODD: dict[str, Shape] = {
    **{f"26x1_dim{dim}": replace(ONE_HOT, embedding_dim=dim) for dim in (1, 2, 4, 8, 10, 12)},
    **{f"8x20_dim{dim}": replace(POOLED, lookups=20, embedding_dim=dim, zipf=1.05) for dim in (1, 4, 10, 16)},
    "100x1_batch64": replace(ONE_HOT, num_tables=100, num_embeddings=20_000, batch_size=64),
    "1000x1_batch64": replace(ONE_HOT, num_tables=1000, num_embeddings=2_000, batch_size=64),
    "8x1_batch65536": replace(ONE_HOT, num_tables=8, batch_size=65_536),
    "8x0to200": replace(POOLED, lookups=100, batch_size=512, embedding_dim=32, ragged=True),
}
"""Shapes at the ends of what people have."""


def odd_shapes(*, quick: bool) -> dict[str, Shape]:
    """Returns ODD; quick ones are small."""
    smaller = {"num_embeddings": 500, "batch_size": 64} if quick else {}
    return {name: replace(shape, **smaller) for name, shape in ODD.items()}


def odd_cells(*, quick: bool) -> list[Cell]:
    """Returns a step with SGD of each odd shape: hotrow promises that none is slower than the peer's."""
    return [
        replace(embedding_cell(f"odd_{name}", shape, "step", "sgd"), target=1.0)
        for name, shape in odd_shapes(quick=quick).items()
    ]


# ---- measuring


def check_agreement(name: str, ours: Contender, peer: Contender, *, batch: int = 0, within: float = 2e-5) -> None:
    """Runs both sides once on `batch`. Raises ValueError with the largest difference if their outputs differ.

    within: as `Cell.within`.
    """
    for side in (ours, peer):
        side.prepare(batch)
        side.run()
    for i, (a, b) in enumerate(zip(ours.outputs(), peer.outputs(), strict=True)):
        # The sides add up to thousands of float32 numbers in different orders. One update is lr * |g|, about 1e-2.
        if not torch.allclose(a, b, rtol=1e-4, atol=within * float(b.abs().max())):
            worst = float((a - b).abs().max())
            raise ValueError(
                f"cell {name}: output {i} differs from the peer's by up to {worst:.3g}; not timed. "
                "Run the law tests (make test): one of the two is wrong"
            )


def interleave(ours: Contender, peer: Contender, num_rounds: int) -> Rounds[tuple[float, float]]:
    """Runs both sides in every round, in alternating order; returns the seconds of (ours, peer)."""

    def one_round(number: int) -> tuple[float, float]:
        seconds = {}
        for side in (ours, peer) if number % 2 == 0 else (peer, ours):
            side.prepare(number)
            seconds[side is ours] = timed(side.run)
        return seconds[True], seconds[False]

    return clean_rounds(one_round, num_rounds)


def spread(values: Sequence[float]) -> list[float]:
    """Returns the first and the last tenth, between which four values of five lie."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return [tenths[0], tenths[-1]]


def measure_cell(cell: Cell, *, threads: int, num_rounds: int) -> dict[str, Any]:
    """Returns one row of the report. Raises ValueError if the outputs of the two sides differ."""
    limit_s, touches_s = cell.limit_s(threads), cell.touches_s(threads)
    ours, peer = cell.build()
    check_agreement(cell.name, ours, peer, within=cell.within)
    rounds = interleave(ours, peer, num_rounds)
    ours_s, peer_s = map(statistics.median, zip(*rounds.results, strict=True))
    ratios = [b / a for a, b in rounds.results]
    note = None if cell.note is None else cell.note()
    told = {"target": cell.target, "most_over_limit": cell.most_over_limit, "note": note}
    return {
        "name": cell.name,
        "ours_ms": ours_s * 1e3,
        "peer": cell.peer,
        "peer_ms": peer_s * 1e3,
        "ratio": statistics.median(ratios),
        "spread": spread(ratios),
        "limit_ms": None if limit_s is None else limit_s * 1e3,
        "share_of_limit": None if limit_s is None else limit_s / ours_s,
        **({} if touches_s is None else {"share_of_touches": touches_s / ours_s}),
        **{name: value for name, value in told.items() if value is not None},
        **rounds.counts(),
    }


def measure(chosen: Sequence[Cell], *, quick: bool) -> dict[str, Any]:
    """Measures `chosen` in this process, and prints a line on stderr after each cell."""
    rows = []
    for cell in chosen:
        row = measure_cell(cell, threads=torch.get_num_threads(), num_rounds=3 if quick else NUM_ROUNDS)
        print(format_row(row), file=sys.stderr, flush=True)
        rows.append(row)
        gc.collect()  # the tables hang on cycles of a few small objects, too few for Python to collect them by itself
    return {"cells": rows, "quick": quick, **circumstances()}


def in_fresh_process(module: str, arguments: Sequence[str], threads: int | None) -> dict[str, Any]:
    """Runs `python -m module arguments` with torch's huge pages, and returns the JSON on its last line of output.

    torch reads THP_MEM_ALLOC_ENABLE and the number of threads when it loads, so they need a process of their own.
    """
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()  # the with block then waits, as the process may have gigabytes of files to remove
            raise
    if process.returncode:
        raise RuntimeError(f"{module} ended with status {process.returncode}; its message is above")
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return report


def choose(names: Sequence[str] | None, available: Sequence[Cell]) -> list[Cell]:
    """Returns the cells called `names`, or all. Raises ValueError with the known names."""
    by_name = {cell.name: cell for cell in available}
    for name in names or ():
        if name not in by_name:
            raise ValueError(f"no cell is called {name!r}; choose from {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def format_row(row: dict[str, Any]) -> str:
    """Returns the row of a cell as a line of text."""
    low, high = row["spread"]
    share = "" if row["share_of_limit"] is None else f"  {row['share_of_limit']:4.0%} of the limit"
    share += f" ({row['share_of_touches']:.0%} if every occurrence counts)" if "share_of_touches" in row else ""
    return (
        f"{row['name']:32s} {row['ours_ms']:9.2f} ms  peer {row['peer_ms']:9.2f} ms  "
        f"x {row['ratio']:5.2f} ({low:.2f} .. {high:.2f}){share}  {how_clean(row)}"
    )

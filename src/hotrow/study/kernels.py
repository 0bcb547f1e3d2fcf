"""The cells of the study `kernels`: one embedding kernel of one shape, timed, beside what the rows alone cost.

A lookup is `emb(batch)`; an update is backward and `optimizer.step()`, the lookup before it not timed. Every round
walks over distinct batches, enough of them that their rows do not stay in the caches, and so does the limit.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hotrow.base.machine import usable_cores
from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.optim import SGD, Adagrad, RowWiseAdagrad
from hotrow.study import bench, cells

WALK_BYTES = 64_000_000
"""Rows that one walk over the batches touches at least, if `MAX_BATCHES` allows: more than caches of a core hold."""
MIN_BATCHES, MAX_BATCHES = 2, 128
ROUND_SECONDS = 0.25
"""Rounds are repeated for about this long, between the two numbers below."""
MIN_ROUNDS, MAX_ROUNDS = 3, 15
FILL_BYTES_PER_S = 2e9  # of new pages, and of drawing rows into them; for the estimate alone
LR = 0.01
OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}


@dataclass(frozen=True, kw_only=True)
class KernelCell:
    """One measurement; `group` says which part of the study it belongs to."""

    group: str
    part: str
    """lookup | update"""
    optimizer: str
    """sgd | adagrad | rowwise_adagrad; none for a lookup"""
    num_tables: int
    num_embeddings: int
    embedding_dim: int
    batch_size: int
    lookups: int
    zipf: float
    """0: uniform ids."""
    threads: int

    def __post_init__(self) -> None:
        if self.part not in ("lookup", "update"):
            raise ValueError(f"part is {self.part!r}; it must be lookup or update")
        if self.part == "lookup":
            object.__setattr__(self, "optimizer", "none")
        elif self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}")

    @property
    def key(self) -> str:
        """Names the cell in files: the same work has the same key."""
        return (
            f"{self.group}/{self.part}/{self.optimizer}/{self.num_tables}x{self.num_embeddings}x{self.embedding_dim}"
            f"/{self.batch_size}x{self.lookups}/zipf{self.zipf:g}/{self.threads}t"
        )

    @property
    def table_bytes(self) -> int:
        """Of the tables and the optimizer's state."""
        floats = {"adagrad": 2 * self.embedding_dim, "rowwise_adagrad": self.embedding_dim + 1}
        return 4 * self.num_tables * self.num_embeddings * floats.get(self.optimizer, self.embedding_dim)

    @property
    def num_ids(self) -> int:
        """Of one batch."""
        return self.num_tables * self.batch_size * self.lookups

    @property
    def num_batches(self) -> int:
        """Distinct batches of a walk."""
        touched = self.num_ids * max(64, 4 * self.embedding_dim)
        return min(MAX_BATCHES, max(MIN_BATCHES, math.ceil(WALK_BYTES / touched)))

    @property
    def shape(self) -> cells.Shape:
        """Of hotrow.cells."""
        return cells.Shape(
            num_tables=self.num_tables,
            num_embeddings=self.num_embeddings,
            embedding_dim=self.embedding_dim,
            batch_size=self.batch_size,
            lookups=self.lookups,
            zipf=self.zipf or None,
        )


def expand(group: Mapping[str, Any], axes: Mapping[str, Any], *, memory_bytes: int) -> list[KernelCell]:
    """The cells of a group of the preset, with its `axes`.

    Where the group says `fit_gib`, the rows of all its cells are cut until the largest takes at most that and
    `memory_bytes`: to one number, so that they share their tables.
    """
    cells_ = [
        KernelCell(group=group["name"], **{**group["fixed"], **dict(zip(axes, values, strict=True))})
        for values in product(*axes.values())
    ]
    if "fit_gib" in group:
        allowed = min(memory_bytes, int(group["fit_gib"] * 2**30))
        rows = min(cell.num_embeddings * allowed // cell.table_bytes for cell in cells_)
        if rows < min(cell.num_embeddings for cell in cells_):
            cells_ = [replace(cell, num_embeddings=max(1, rows // 1000 * 1000)) for cell in cells_]
    return list({cell.key: cell for cell in cells_}.values())


def setup_of(cell: KernelCell) -> tuple[int, int, int]:
    """Cells with the same one are measured on the same tables."""
    return cell.num_embeddings, cell.embedding_dim, cell.num_tables


def refusal(cell: KernelCell, *, memory_bytes: int, cores: int) -> str | None:
    """Why the cell cannot be measured here, or None."""
    if cell.table_bytes > memory_bytes:
        return f"tables and state need {cell.table_bytes / 1e9:.1f} GB, --memory allows {memory_bytes / 1e9:.1f} GB"
    if cell.threads > cores:
        return f"{cell.threads} threads, but this process may use {cores} cores"
    return None


def estimate_s(cells_: Sequence[KernelCell]) -> float:
    """About how long measuring them takes: the tables twice, ids, walks of the limit and of the kernel."""
    seconds = sum(2 * 4 * math.prod(setup) / FILL_BYTES_PER_S for setup in {setup_of(cell) for cell in cells_})
    for cell in cells_:
        walk = cell.num_batches * (cell.num_ids * 4 * cell.embedding_dim / 8e9 + 5e-5)
        rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, ROUND_SECONDS / walk))
        seconds += (
            0.05 + walk * ((2 if cell.part == "update" else 1) * rounds + 6) + cell.num_batches * cell.num_ids * 2e-8
        )
    return seconds


# ---- what a cell moves and computes


@dataclass(frozen=True)
class Traffic:
    """Bytes and arithmetic of one batch, as the operation defines them: caches may save some."""

    row_bytes: float
    """Of rows and optimizer state: each id's row read (lookup), each distinct row read and written (update)."""
    other_bytes: float
    """Pooled rows or their gradients, once; ids at 8 bytes."""
    flops: float


def traffic(cell: KernelCell, num_distinct: float) -> Traffic:
    """Of a batch with `num_distinct` different rows."""
    dim, ids = cell.embedding_dim, cell.num_ids
    other = 4.0 * cell.num_tables * cell.batch_size * dim + 8.0 * ids
    if cell.part == "lookup":
        return Traffic(4.0 * ids * dim, other, float(ids * dim))
    state = {"adagrad": dim, "rowwise_adagrad": 1}.get(cell.optimizer, 0)
    # SGD: a product and a difference for each occurrence. Adagrad: a sum for each, then about six per distinct element.
    flops = 2.0 * ids * dim if cell.optimizer == "sgd" else ids * dim + 6.0 * num_distinct * dim
    return Traffic(8.0 * num_distinct * (dim + state), other, flops)


def row_of(cell: KernelCell, *, seconds: float, limit_s: float | None, num_distinct: float) -> dict[str, Any]:
    """What the files hold of a measured cell, but for how it was measured."""
    moved = traffic(cell, num_distinct)
    total = moved.row_bytes + moved.other_bytes
    return {
        "key": cell.key,
        **asdict(cell),
        "ms": seconds * 1e3,
        "gb_per_s": total / seconds / 1e9,
        "gflop_per_s": moved.flops / seconds / 1e9,
        "flops_per_byte": moved.flops / total,
        "distinct_rows": num_distinct,
        "limit_ms": None if limit_s is None else limit_s * 1e3,
        "limit_gb_per_s": None if limit_s is None else moved.row_bytes / limit_s / 1e9,
        "share_of_limit": None if limit_s is None else limit_s / seconds,
    }


# ---- measuring


@functools.lru_cache(maxsize=16)
def batches_of(shape: cells.Shape, num_batches: int) -> tuple[Tensor, ...]:
    """Ids of each batch."""
    return tuple(ids_of(shape, seed) for seed in range(num_batches))


def ids_of(shape: cells.Shape, seed: int) -> Tensor:
    """`shape.ids`, its cumulative law kept from one call to the next."""
    if shape.zipf is None:
        return shape.ids(seed)
    cumulative = _cumulative(shape.num_embeddings, shape.zipf)
    drawn = np.random.default_rng(seed).random(shape.num_tables * shape.batch_size * shape.lookups)
    return torch.from_numpy(np.searchsorted(cumulative, drawn * cumulative[-1]))


@functools.lru_cache(maxsize=3)
def _cumulative(num_embeddings: int, zipf: float) -> np.ndarray:
    total: np.ndarray = np.cumsum(np.arange(1, num_embeddings + 1, dtype=np.float64) ** -zipf)
    return total


def walk_ids(cell: KernelCell) -> tuple[Tensor, ...]:
    """Ids of the cell's batches; the same for every dim, so that they are drawn once."""
    return batches_of(replace(cell.shape, embedding_dim=1), cell.num_batches)


def rows_of(cell: KernelCell, ids: Tensor) -> Tensor:
    """Row numbers of a batch in all tables laid end to end."""
    tables = torch.arange(cell.num_tables).repeat_interleave(cell.batch_size * cell.lookups)
    return tables * cell.num_embeddings + ids


def distinct_rows(rows: Tensor) -> Tensor:
    """Each once, in order."""
    return torch.from_numpy(np.unique(rows.numpy()))


def limits_s(rows: Tensor, cell: KernelCell) -> tuple[dict[int, float], float]:
    """Threads -> least seconds in which that many threads touch a batch's rows; and its mean number of distinct rows.

    rows: all tables end to end. Mean over the batches of a walk, best over prefetches and walks. The rows of an
    update are distinct and in order, and are written; adaptive state counts as in cells.rows_limit_s.
    """
    batches = [rows_of(cell, ids) for ids in walk_ids(cell)]
    distinct = [distinct_rows(ids) for ids in batches] if cell.part == "update" else []
    touched = distinct or batches

    def walk(threads: int, distance: int, into: Literal["l1", "l2"]) -> float:
        touch = functools.partial(
            ops.touch_rows, rows, distance=distance, into=into, write=bool(distinct), threads=threads
        )
        return sum(touch(ids) for ids in touched)

    factor = 2.0 if cell.optimizer == "adagrad" else 1.0
    best = {}
    for threads in range(1, cell.threads + 1):
        first, *others = cells.PREFETCHES[::-1]
        seconds = walk(threads, *first)
        rest = [walk(threads, *prefetch) for prefetch in (others if seconds < ROUND_SECONDS else others[:1])]
        best[threads] = factor * min(seconds, *rest) / len(touched)
    return best, statistics.mean(len(ids) for ids in distinct) if distinct else 0.0


FAILURES: tuple[type[Exception], ...] = ()
"""What ends a measurement and not the study."""


def measure(cells_: Sequence[KernelCell], *, quick: bool, folder: Path) -> Iterator[tuple[KernelCell, dict[str, Any]]]:
    """The cells, all of one `setup_of`, with their rows; no file is needed."""
    return KernelRunner(seconds=ROUND_SECONDS / 5 if quick else ROUND_SECONDS).run(cells_)


def headline(row: Mapping[str, Any]) -> str:
    """A measured row in a word."""
    return f"{row['ms']:.3g} ms"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page needs beside the rows."""
    return {"roofs": roofs(usable_cores())}


class KernelRunner:
    """Measures cells that share tables; the tables of one set-up are in memory at a time, once."""

    def __init__(self, *, seconds: float = ROUND_SECONDS) -> None:
        self.round_seconds = seconds

    def run(self, cells_: Sequence[KernelCell]) -> Iterator[tuple[KernelCell, dict[str, Any]]]:
        """The cells, all of one `setup_of`, each with its row as soon as it is measured."""
        limits = self._limits(cells_)
        shape = cells_[0].shape
        emb = EmbeddingCollection(cells.table_configs(shape), seed=1)
        for cell in cells_:
            limit, distinct = limits[cell.key]
            rounds = self._rounds(cell, emb)
            seconds = [s / cell.num_batches for s in rounds.results]
            row = row_of(cell, seconds=statistics.median(seconds), limit_s=limit, num_distinct=distinct)
            yield cell, {**row, "spread_ms": [min(seconds) * 1e3, max(seconds) * 1e3], **rounds.counts()}

    def _limits(self, cells_: Sequence[KernelCell]) -> dict[str, tuple[float | None, float]]:
        if ops.backend().name != "native":
            return {cell.key: (None, self._num_distinct(cell)) for cell in cells_}
        first = cells_[0]
        rows = ops.allocate(first.num_tables * first.num_embeddings, first.embedding_dim)
        rows.fill_(0)  # every page exists before it is timed
        found: dict[str, tuple[float | None, float]] = {}
        # The widest first: what it finds for fewer threads serves the cells that differ in threads alone.
        known: dict[str, tuple[dict[int, float], float]] = {}
        for cell in sorted(cells_, key=lambda cell: -cell.threads):
            work = replace(cell, threads=1, group="").key
            if work not in known:
                known[work] = limits_s(rows, cell)
            best, distinct = known[work]
            found[cell.key] = min(s for threads, s in best.items() if threads <= cell.threads), distinct
        return found

    def _num_distinct(self, cell: KernelCell) -> float:
        return (
            statistics.mean(len(distinct_rows(rows_of(cell, ids))) for ids in walk_ids(cell))
            if cell.part == "update"
            else 0.0
        )

    def _rounds(self, cell: KernelCell, emb: EmbeddingCollection) -> bench.Rounds[float]:
        """Seconds of all batches in each round."""
        before = torch.get_num_threads()
        torch.set_num_threads(cell.threads)
        try:
            walk = Walk(cell, emb)
            first = walk.seconds()  # also warms: threads, scratch, optimizer state
            num_rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(self.round_seconds / first)))
            return bench.clean_rounds(lambda _: walk.seconds(), num_rounds)
        finally:
            torch.set_num_threads(before)


class Walk:
    """The cell's kernel over its batches."""

    def __init__(self, cell: KernelCell, emb: EmbeddingCollection) -> None:
        self.part, self.emb = cell.part, emb
        lengths = torch.full((cell.num_tables * cell.batch_size,), cell.lookups) if cell.lookups > 1 else None
        self.batches = [KeyedJaggedTensor(emb.feature_names, ids, lengths=lengths) for ids in walk_ids(cell)]
        if cell.part == "update":
            self.gradient = cells.upstream_gradient(cell.shape)
            self.optimizer = OPTIMIZERS[cell.optimizer](emb, LR)

    def seconds(self) -> float:
        """Of the kernel alone, summed over the batches."""
        if self.part == "lookup":
            with torch.no_grad():
                return sum(cells.timed(functools.partial(self.emb, batch)) for batch in self.batches)
        total = 0.0
        for batch in self.batches:
            self.pooled = self.emb(batch)
            total += cells.timed(self._update)
        return total

    def _update(self) -> None:
        torch.autograd.backward(self.pooled, self.gradient)
        self.optimizer.step()


def roofs(threads: int) -> dict[str, float | None]:
    """What the roofline needs of this machine: bytes per second of a pass over memory, flops of a large product."""
    num_floats = 1 << 26
    sequential = None
    if ops.backend().name == "native":
        sequential = 4 * num_floats / cells.sequential_limit_s(num_floats, write=False, threads=threads) / 1e9
    return {"sequential_gb_per_s": sequential, "matmul_gflop_per_s": cells.matmul_flops_per_s() / 1e9}

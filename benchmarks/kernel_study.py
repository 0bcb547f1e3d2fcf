"""The cells of the study `kernels`: one embedding kernel at one shape, timed, beside the time to move its rows alone.

A lookup is `emb(batch)`; an update is backward and `optimizer.step()`, without the lookup before it. A round walks over
several batches, enough that their rows do not stay in the caches, and so does the limit.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.dense_cells import matmul_flops_per_s
from hotrow.base.machine import usable_cores
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops

WALK_BYTES = 64_000_000
"""The least bytes of rows that one walk touches, if `MAX_BATCHES` allows it: more than the caches of a core hold."""
MIN_BATCHES, MAX_BATCHES = 2, 128
ROUND_SECONDS = 0.25
"""Rounds are repeated for about this long, within the two limits below."""
MIN_ROUNDS, MAX_ROUNDS = 3, 15
FILL_BYTES_PER_S = 2e9
"""Rate at which new pages are filled with initial rows; used in the estimate only."""
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
FAILURES: tuple[type[Exception], ...] = ()  # no error ends the cells of one setup only


@dataclass(frozen=True, kw_only=True)
class KernelCell:
    """One measurement."""

    group: str
    part: bench.Part
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
        """The name of the cell in files; the same work has the same key."""
        return (
            f"{self.group}/{self.part}/{self.optimizer}/{self.num_tables}x{self.num_embeddings}x{self.embedding_dim}"
            f"/{self.batch_size}x{self.lookups}/zipf{self.zipf:g}/{self.threads}t"
        )

    @property
    def state_floats(self) -> int:
        """Floats of optimizer state per row."""
        return {"adagrad": self.embedding_dim, "rowwise_adagrad": 1}.get(self.optimizer, 0)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables and of the optimizer's state."""
        return 4 * self.num_tables * self.num_embeddings * (self.embedding_dim + self.state_floats)

    @property
    def num_ids(self) -> int:
        """Ids in one batch."""
        return self.num_tables * self.batch_size * self.lookups

    @property
    def num_batches(self) -> int:
        """Batches of a walk."""
        touched = self.num_ids * max(64, 4 * self.embedding_dim)
        return min(MAX_BATCHES, max(MIN_BATCHES, math.ceil(WALK_BYTES / touched)))

    @property
    def shape(self) -> bench.Shape:
        """The embedding work of one batch."""
        names = ("num_tables", "num_embeddings", "embedding_dim", "batch_size", "lookups")
        return bench.Shape(**{name: getattr(self, name) for name in names}, zipf=self.zipf or None)


def with_data(preset: Mapping[str, Any], paths: Sequence[str]) -> Mapping[str, Any]:
    """Returns the preset. Raises ValueError if there are `paths`."""
    if paths:
        raise ValueError(f"data is {paths[0]!r}, but the study kernels draws its own ids; leave --data out")
    return preset


def expand(group: Mapping[str, Any], axes: Mapping[str, Any], *, memory_bytes: int) -> list[KernelCell]:
    """Returns the cells of a group of the preset, with its `axes`.

    If the group has `fit_gib`, the rows of its cells are cut until the largest takes at most that and `memory_bytes`.
    All are cut to the same number, so that they share their tables.
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
    """Returns a value that is equal for cells that share their tables."""
    return cell.num_embeddings, cell.embedding_dim, cell.num_tables


def refusal(cell: KernelCell, *, memory_bytes: int, cores: int) -> str | None:
    """Returns why the cell cannot be measured here, or None."""
    if cell.table_bytes > memory_bytes:
        return f"tables and state need {cell.table_bytes / 1e9:.1f} GB, --memory allows {memory_bytes / 1e9:.1f} GB"
    if cell.threads > cores:
        return f"{cell.threads} threads, but this process may use {cores} cores"
    return None


def estimate_s(cells_: Sequence[KernelCell]) -> float:
    """Returns about how many seconds the cells take: tables twice, ids, walks of the limit and of the kernel."""
    seconds = sum(2 * 4 * math.prod(setup) / FILL_BYTES_PER_S for setup in {setup_of(cell) for cell in cells_})
    for cell in cells_:
        walk = cell.num_batches * (cell.num_ids * 4 * cell.embedding_dim / 8e9 + 5e-5)
        rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, ROUND_SECONDS / walk))
        seconds += 0.05 + walk * ((2 if cell.part == "update" else 1) * rounds + 6)
        seconds += cell.num_batches * cell.num_ids * 2e-8
    return seconds


def headline(row: Mapping[str, Any]) -> str:
    """Returns the main figure of a row."""
    return f"{row['ms']:.3g} ms"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the two roofs of the roofline: the bandwidth of a pass over memory, the flops of a large product."""
    num_floats, sequential = 1 << 26, None
    if ops.backend().name == "native":
        seconds = bench.sequential_limit_s(num_floats, write=False, threads=usable_cores())
        sequential = 4 * num_floats / seconds / 1e9
    return {"roofs": {"sequential_gb_per_s": sequential, "matmul_gflop_per_s": matmul_flops_per_s() / 1e9}}


# ---- what a cell moves and computes


def row_of(cell: KernelCell, *, seconds: float, limit_s: float | None, num_distinct: float) -> dict[str, Any]:
    """Returns the row of a measured cell: its time, and the traffic of a batch, of which caches may save some.

    A lookup reads the row of every id; an update reads and writes each distinct row and its state. Both move the pooled
    rows or their gradients once, and the ids, 8 bytes each.
    """
    dim, ids = cell.embedding_dim, cell.num_ids
    if cell.part == "lookup":
        row_bytes, flops = 4.0 * ids * dim, float(ids * dim)
    else:
        row_bytes = 8.0 * num_distinct * (dim + cell.state_floats)
        # SGD: a product and a difference per id. Adagrad: a sum per id, then about six per element of a distinct row.
        flops = 2.0 * ids * dim if cell.optimizer == "sgd" else ids * dim + 6.0 * num_distinct * dim
    total = row_bytes + 4.0 * cell.num_tables * cell.batch_size * dim + 8.0 * ids
    return {
        "key": cell.key,
        **asdict(cell),
        "ms": seconds * 1e3,
        "gb_per_s": total / seconds / 1e9,
        "gflop_per_s": flops / seconds / 1e9,
        "flops_per_byte": flops / total,
        "distinct_rows": num_distinct,
        "limit_ms": None if limit_s is None else limit_s * 1e3,
        "limit_gb_per_s": None if limit_s is None else row_bytes / limit_s / 1e9,
        "share_of_limit": None if limit_s is None else limit_s / seconds,
    }


# ---- measuring


@functools.lru_cache(maxsize=16)
def _batches_of(shape: bench.Shape, num_batches: int) -> tuple[Tensor, ...]:
    return tuple(shape.ids(seed) for seed in range(num_batches))


def walk_ids(cell: KernelCell) -> tuple[Tensor, ...]:
    """Returns the ids of the cell's batches. They are the same for every dim, so they are drawn once."""
    return _batches_of(replace(cell.shape, embedding_dim=1), cell.num_batches)


def walk_rows(cell: KernelCell) -> tuple[list[Tensor], float]:
    """Returns the rows that each batch touches, all tables end to end, and the mean number of distinct rows.

    The rows of an update are distinct and sorted. For a lookup the mean is not counted: 0.
    """
    tables = torch.arange(cell.num_tables).repeat_interleave(cell.batch_size * cell.lookups)
    rows = [tables * cell.num_embeddings + ids for ids in walk_ids(cell)]
    if cell.part == "lookup":
        return rows, 0.0
    distinct = [torch.from_numpy(np.unique(each.numpy())) for each in rows]
    return distinct, statistics.mean(map(len, distinct))


def limits_s(rows: Tensor, cell: KernelCell) -> tuple[dict[int, float], float]:
    """Returns the least seconds per batch by number of threads, and the mean number of distinct rows.

    rows: all tables end to end. The time is the best over prefetches; state counts as in bench.rows_limit_s.
    """
    touched, num_distinct = walk_rows(cell)

    def walk(threads: int, distance: int, into: Literal["l1", "l2"]) -> float:
        touch = functools.partial(
            ops.touch_rows, rows, distance=distance, into=into, write=cell.part == "update", threads=threads
        )
        return sum(touch(ids) for ids in touched)

    factor = 2.0 if cell.optimizer == "adagrad" else 1.0
    best = {}
    first, *others = bench.PREFETCHES[::-1]
    for threads in range(1, cell.threads + 1):
        seconds = walk(threads, *first)
        rest = [walk(threads, *prefetch) for prefetch in (others if seconds < ROUND_SECONDS else others[:1])]
        best[threads] = factor * min(seconds, *rest) / len(touched)
    return best, num_distinct


def measure(cells_: Sequence[KernelCell], *, quick: bool, folder: Path) -> Iterator[tuple[KernelCell, dict[str, Any]]]:
    """Yields the cells, all of one `setup_of`, each with its row as soon as it is measured."""
    round_s = ROUND_SECONDS / 5 if quick else ROUND_SECONDS
    limits = _limits(cells_)
    emb = EmbeddingCollection(bench.table_configs(cells_[0].shape), seed=1)
    for cell in cells_:
        limit, num_distinct = limits[cell.key]
        rounds = _rounds(cell, emb, round_s)
        seconds = [s / cell.num_batches for s in rounds.results]
        row = row_of(cell, seconds=statistics.median(seconds), limit_s=limit, num_distinct=num_distinct)
        yield cell, {**row, "spread_ms": [min(seconds) * 1e3, max(seconds) * 1e3], **rounds.counts()}


def _limits(cells_: Sequence[KernelCell]) -> dict[str, tuple[float | None, float]]:
    """Returns the limit and the mean number of distinct rows of each cell, by key."""
    if ops.backend().name != "native":
        return {cell.key: (None, walk_rows(cell)[1]) for cell in cells_}
    first = cells_[0]
    rows = ops.allocate(first.num_tables * first.num_embeddings, first.embedding_dim)
    rows.fill_(0)  # so that every page exists before it is timed
    found: dict[str, tuple[float | None, float]] = {}
    # Most threads first: the limits for fewer threads serve the cells that differ in threads alone.
    known: dict[str, tuple[dict[int, float], float]] = {}
    for cell in sorted(cells_, key=lambda cell: -cell.threads):
        work = replace(cell, threads=1, group="").key
        if work not in known:
            known[work] = limits_s(rows, cell)
        best, num_distinct = known[work]
        found[cell.key] = min(s for threads, s in best.items() if threads <= cell.threads), num_distinct
    return found


def _rounds(cell: KernelCell, emb: EmbeddingCollection, round_s: float) -> bench.Rounds[float]:
    """Returns the seconds of all batches in each round."""
    before = torch.get_num_threads()
    torch.set_num_threads(cell.threads)
    try:
        walk = bench.Ours(cell.shape, cell.part, cast(bench.Optimizer, cell.optimizer), emb=emb, ids=walk_ids(cell))
        first = _walk_s(walk)  # also warms up: threads, scratch memory, optimizer state
        num_rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(round_s / first)))
        return bench.clean_rounds(lambda _: _walk_s(walk), num_rounds)
    finally:
        torch.set_num_threads(before)


def _walk_s(walk: bench.Ours) -> float:
    """Returns the seconds of the kernel alone, summed over the batches."""
    total = 0.0
    for number in range(len(walk.batches)):
        walk.prepare(number)
        total += bench.timed(walk.run)
    return total

"""Why rows are sorted and owned: hotrow's SGD update against other ways to apply the same gradients.

    python -m benchmarks.updates --out docs/measurements/benchmarks.json [--quick] [CELL ...]

2 tables of 1M rows, dim 64, 2048 bags of 50 ids, uniform and skewed. The variants are those of the literature (one
thread; unprotected; atomic; locks; every thread scans all ids for the rows it owns), in updates.cpp, compiled here with
the system's compiler (CXX, or c++) for this processor; and what numpy and torch offer. Tables are compared first, but
for the unprotected variant, which loses updates: its note says how many rows came out wrong.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.compiled import compiled
from benchmarks.results import run_as_script

SHAPE = replace(bench.POOLED, num_tables=2)
NATIVE = {  # number in updates.cpp and what it does
    "sequential": (0, "one thread, ids in order"),
    "unprotected": (1, "ids cut among threads, nothing protected: wrong where threads meet"),
    "atomic": (2, "ids cut among threads, each element by compare-and-swap"),
    "locks": (3, "ids cut among threads, 16,384 spin locks over the rows"),
    "scan": (4, "every thread scans all ids and updates the rows it owns, without prefetch"),
}


native = partial(compiled, "updates.cpp")


@dataclass(frozen=True)
class Work:
    """One table's update."""

    rows: Tensor
    ids: Tensor
    grad: Tensor
    """[batch_size, D]"""
    lookups: int

    def per_id(self) -> Tensor:
        """The gradient of each id: its bag's."""
        return self.grad.repeat_interleave(self.lookups, 0)


def by_native(variant: int, work: Work) -> None:
    rows, ids, grad = work.rows, work.ids, work.grad
    sizes = [ctypes.c_int64(n) for n in (len(ids), *rows.shape, work.lookups)]
    native().apply(
        variant, ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(ids.data_ptr()), *sizes,
        ctypes.c_void_p(grad.data_ptr()), ctypes.c_int64(grad.stride(0)), ctypes.c_float(bench.LR),
        torch.get_num_threads(),
    )  # fmt: skip


def by_numpy(work: Work) -> None:
    np.subtract.at(work.rows.numpy(), work.ids.numpy(), bench.LR * work.per_id().numpy())


def by_index_add(work: Work) -> None:
    work.rows.index_add_(0, work.ids, work.per_id(), alpha=-bench.LR)


def sparse_gradient(work: Work) -> Tensor:
    return torch.sparse_coo_tensor(work.ids.unsqueeze(0), work.per_id(), work.rows.shape, check_invariants=False)


def by_sparse_add(work: Work) -> None:
    work.rows.add_(sparse_gradient(work), alpha=-bench.LR)


def by_coalesced_add(work: Work) -> None:
    work.rows.add_(sparse_gradient(work).coalesce(), alpha=-bench.LR)


VARIANTS: dict[str, tuple[Callable[[Work], None], str]] = {
    **{name: (partial(by_native, number), f"C++: {what}") for name, (number, what) in NATIVE.items()},
    "numpy-at": (by_numpy, "numpy.subtract.at of one gradient per id"),
    "index-add": (by_index_add, "torch index_add_ of one gradient per id"),
    "sparse-add": (by_sparse_add, "torch add_ of an uncoalesced sparse gradient (rows cut among threads)"),
    "coalesced-add": (by_coalesced_add, "torch coalesce (sort, sum), then add_"),
}


class Variant:
    """An update of all tables by `apply`, from the rows of `ours`."""

    def __init__(self, shape: bench.Shape, apply: Callable[[Work], None], ours: bench.Ours) -> None:
        self.apply, self.lookups = apply, shape.lookups
        self.tables = [weight.clone() for weight in ours.emb.weights.values()]
        self.gradients = bench.upstream_gradient(shape).split(shape.embedding_dim, dim=1)
        self.batches = [shape.ids(seed).chunk(shape.num_tables) for seed in range(bench.NUM_BATCHES)]

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = self.batches[batch % bench.NUM_BATCHES]

    def run(self) -> None:
        """Apply it to every table."""
        for rows, ids, grad in zip(self.tables, self.batch, self.gradients, strict=True):
            self.apply(Work(rows, ids, grad, self.lookups))

    def outputs(self) -> Iterable[Tensor]:
        """Every table."""
        return self.tables


class OurUpdate(bench.Ours):
    """hotrow's backward and update, of which the tables are compared."""

    def outputs(self) -> Iterable[Tensor]:
        """Every table."""
        return self.emb.weights.values()


def wrong_rows(shape: bench.Shape) -> str:
    """How many of the rows that one batch touches differ between the unprotected and the sequential variant."""
    ours = bench.Ours(shape, "update", "sgd")
    sides = [Variant(shape, VARIANTS[name][0], ours) for name in ("unprotected", "sequential")]
    for side in sides:
        side.prepare(0)
        side.run()
    wrong = touched = 0
    for ids, a, b in zip(sides[0].batch, sides[0].tables, sides[1].tables, strict=True):
        wrong += int(((a - b).abs().amax(1) > 0.1 * bench.LR * float(b.abs().mean())).sum())
        touched += len(ids.unique())
    return f"{wrong:,} of {touched:,} rows wrong after one update"


class Uncompared:
    """A side whose outputs are not compared."""

    def __init__(self, side: bench.Contender) -> None:
        self.prepare, self.run = side.prepare, side.run

    def outputs(self) -> Iterable[Tensor]:
        """None."""
        return ()


def cell(name: str, variant: str, shape: bench.Shape) -> bench.Cell:
    """Our update against one variant."""
    apply, title = VARIANTS[variant]

    def build() -> tuple[bench.Contender, bench.Contender]:
        ours = OurUpdate(shape, "update", "sgd")
        theirs = Variant(shape, apply, ours)
        return (Uncompared(ours), Uncompared(theirs)) if variant == "unprotected" else (ours, theirs)

    return bench.Cell(
        name=name,
        peer=title,
        build=build,
        limit_s=partial(bench.embedding_limit_s, shape, "update", "sgd"),
        note=partial(wrong_rows, shape) if variant == "unprotected" else None,
    )


def update_cells(*, quick: bool) -> list[bench.Cell]:
    """Every variant on uniform and on skewed ids; says on stderr where the native ones are skipped, and why."""
    try:
        native()
        names = [*VARIANTS]
    except ValueError as error:
        print(f"skipped: {', '.join(NATIVE)}: {error}", file=sys.stderr)
        names = [name for name in VARIANTS if name not in NATIVE]
    shape = replace(SHAPE, num_embeddings=10_000, batch_size=64) if quick else SHAPE
    skews = {"uniform": shape, "zipf": replace(shape, zipf=1.05)}
    return [cell(f"update_vs_{name}_{skew}", name, skewed) for skew, skewed in skews.items() for name in names]


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script("updates", lambda options: update_cells(quick=options.quick), __doc__)


if __name__ == "__main__":
    main()

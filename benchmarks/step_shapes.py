"""The shapes of a whole training step: tables, MLPs and batches as values, their batches, and the floor of their time.

benchmarks.end_to_end measures them; benchmarks.step_peers holds who takes the step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import bench
from benchmarks.dense_cells import interaction_limit_s, mlp_flops, products_flops_per_s
from benchmarks.synthetic_config import KAGGLE_ROWS
from hotrow.batch import Batch, KeyedJaggedTensor

# Distinct ids per column of Criteo Terabyte, taken modulo ten million, as the reference DLRM's tools state them.
TERABYTE_MODULO_ROWS = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10,
    2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
TERABYTE_CAP = 3_000_000
CLICKS_ZIPF = 1.05  # stands for the skew of real clicks; the real columns differ from one another
NUM_BATCHES = 8
STEP_OVER_FLOOR = 1.25
"""How far above its floor a step may lie, by our own promise."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A DLRM and its batches."""

    name: str
    title: str
    """What a reader must know to read a ratio: where the shape comes from, and what was cut so that it fits."""
    rows: tuple[int, ...]
    """Of each table."""
    embedding_dim: int
    num_dense: int
    bottom_mlp: tuple[int, ...]
    """Hidden widths; embedding_dim is appended."""
    top_mlp: tuple[int, ...]
    """Hidden widths; 1 is appended."""
    batch_size: int = 2048
    lookups: int = 1
    """Ids per bag, the same in every bag."""
    zipf: float | None = None
    """None: uniform ids."""
    lr: float = 0.1
    """Of SGD. Where updates are large, two right sides drift apart by rounding alone: too soon to be compared."""
    targets: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Peer -> least ratio peer / ours that hotrow promises."""

    @property
    def top_inputs(self) -> int:
        """Width of the interaction's output."""
        return self.embedding_dim + len(self.rows) * (len(self.rows) + 1) // 2

    @property
    def table_bytes(self) -> int:
        """Of one side."""
        return 4 * sum(self.rows) * self.embedding_dim

    def small(self) -> StepShape:
        """The same with short tables, batches and layers: to try a cell, not to measure it."""
        return replace(
            self,
            rows=tuple(min(n, 2_000) for n in self.rows),
            batch_size=64,
            bottom_mlp=tuple(min(width, 64) for width in self.bottom_mlp),
            top_mlp=tuple(min(width, 64) for width in self.top_mlp),
        )


SHAPES = {
    shape.name: shape
    for shape in (
        StepShape(
            name="kaggle",
            title="26 tables at the cardinalities of Criteo Kaggle (33.8M rows), dim 16, Zipf 1.05",
            rows=KAGGLE_ROWS,
            embedding_dim=16,
            num_dense=13,
            bottom_mlp=(512, 256, 64),
            top_mlp=(512, 256),
            zipf=CLICKS_ZIPF,
            targets={"torch": 1.5, "dlrm": 1.7, "torchrec": 1.35},
        ),
        StepShape(
            name="terabyte",
            title="26 tables at the cardinalities of Criteo Terabyte (ids modulo 10M), each capped at 3M rows so that "
            "two sides fit in 12 GiB (17.2M rows), dim 64, Zipf 1.05",
            rows=tuple(min(n, TERABYTE_CAP) for n in TERABYTE_MODULO_ROWS),
            embedding_dim=64,
            num_dense=13,
            bottom_mlp=(512, 256),
            top_mlp=(512, 512, 256),
            zipf=CLICKS_ZIPF,
        ),
        StepShape(
            name="mlperf-like",
            title="26 tables of 400,000 rows, dim 128, uniform ids; the MLPs of MLPerf's DLRM, its tables capped so "
            "that two sides fit in 12 GiB",
            rows=(400_000,) * 26,
            embedding_dim=128,
            num_dense=13,
            bottom_mlp=(512, 256),
            top_mlp=(1024, 1024, 512, 256),
            targets={"dlrm": 1.35, "torchrec": 1.4, "float32": 1.4},
        ),
        StepShape(
            name="sc20-small",
            title="8 tables of 1M rows, dim 64, 50 uniform ids per bag: the public benchmark script of the reference "
            "DLRM, whose sizes the SC'20 authors quote in their threads",
            rows=(1_000_000,) * 8,
            embedding_dim=64,
            num_dense=512,
            bottom_mlp=(512,),
            top_mlp=(1024, 1024, 1024),
            lookups=50,
            lr=0.01,
            targets={"dlrm": 1.6, "float32": 1.4},
        ),
        StepShape(
            name="embedding-bound",
            title="26 tables of 500,000 rows, dim 64, 20 uniform ids per bag, small MLPs",
            rows=(500_000,) * 26,
            embedding_dim=64,
            num_dense=13,
            bottom_mlp=(512, 256),
            top_mlp=(512, 256),
            lookups=20,
            targets={"dlrm": 2.5, "torchrec": 2.3},
        ),
    )
}


class Setting(NamedTuple):
    """What every side trains on."""

    shape: StepShape
    batches: tuple[Batch, ...]


def column_ids(generator: np.random.Generator, num_rows: int, n: int, zipf: float | None) -> np.ndarray:
    """`n` ids in [0, num_rows): uniform, or id k in proportion to about (k + 1) ** -zipf (the continuous law, cut)."""
    if zipf is None:
        return generator.integers(0, num_rows, n)
    power = 1.0 - zipf
    u = generator.random(n)
    return np.minimum((1 + u * ((num_rows + 1.0) ** power - 1)) ** (1 / power) - 1, num_rows - 1).astype(np.int64)


def make_setting(shape: StepShape) -> Setting:
    """Batches from a fixed seed."""
    generator = np.random.default_rng(3)
    names = tuple(f"C{i + 1}" for i in range(len(shape.rows)))
    n = shape.batch_size * shape.lookups
    lengths = None if shape.lookups == 1 else torch.full((len(names) * shape.batch_size,), shape.lookups)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.from_numpy(np.concatenate([column_ids(generator, rows, n, shape.zipf) for rows in shape.rows]))
        dense = np.log1p(generator.exponential(5.0, (shape.batch_size, shape.num_dense))).astype(np.float32)
        label = torch.from_numpy((generator.random(shape.batch_size) < 0.25).astype(np.float32))
        sparse = KeyedJaggedTensor(names, ids, lengths=lengths)
        batches.append(Batch(dense=torch.from_numpy(dense), sparse=sparse, label=label))
    return Setting(shape, tuple(batches))


@functools.cache
def floor_s(shape: StepShape, sparse: bench.Optimizer, threads: int) -> float | None:
    """What the rows, the interaction and the matrix products of one step cost by themselves on this machine."""
    parts = floor_parts_s(shape, sparse, threads)
    return None if parts is None else sum(parts.values())


def floor_parts_s(shape: StepShape, sparse: bench.Optimizer, threads: int) -> dict[str, float] | None:
    """The parts of the floor; None without the native module."""
    starts = torch.tensor([0, *shape.rows[:-1]]).cumsum(0)
    starts = starts.repeat_interleave(shape.batch_size * shape.lookups)
    batches = [starts + batch.sparse.values for batch in make_setting(shape).batches]
    parts: tuple[tuple[str, bench.Part], ...] = (("rows read", "lookup"), ("rows updated", "update"))
    found = {
        what: bench.rows_limit_s(
            batches,
            num_rows=sum(shape.rows),
            dim=shape.embedding_dim,
            part=part,
            optimizer=sparse,
            threads=threads,
        )
        for what, part in parts
    }
    found["interaction"] = interaction_limit_s(shape.batch_size, len(shape.rows), shape.embedding_dim, threads)
    known = {what: seconds for what, seconds in found.items() if seconds is not None}
    return {**known, "products": products_s(shape, threads)} if len(known) == len(found) else None


def products_s(shape: StepShape, threads: int) -> float:
    """What the matrix products of one step take, forward and backward, as fast as this machine multiplies at all."""
    return product_operations(shape) / products_flops_per_s(threads)


def mlp_widths(shape: StepShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths of the bottom MLP and of the top MLP, inputs and outputs among them."""
    return (shape.num_dense, *shape.bottom_mlp, shape.embedding_dim), (shape.top_inputs, *shape.top_mlp, 1)


def product_operations(shape: StepShape) -> int:
    """Operations of these products, a multiply-add being two: forward, weights' gradients, inputs' but the first."""
    bottom, top = mlp_widths(shape)
    return mlp_flops(bottom, shape.batch_size, gradient_of_inputs=False) + mlp_flops(
        top, shape.batch_size, gradient_of_inputs=True
    )

"""The kernels' cells: embeddings against torch, a DLRM's dense parts, and embeddings against FBGEMM's CPU kernels.

    python -m benchmarks.kernels --out docs/measurements/benchmarks.json [--quick] [CELL ...]

The MLP stands against torch.compile too. FBGEMM's one parallel CPU optimizer is row-wise Adagrad, so that is what it
is compared in on the pooled shape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks import bench, dense_cells
from benchmarks.results import run_as_script

TARGETS = {
    "step_sgd_8x50_uniform": 3.7,
    "step_sgd_8x50_zipf": 6.0,
    "step_adam_26x1_dim64": 20.0,
    "fbgemm_rowwise_adagrad_8x50_uniform": 2.0,
    "fbgemm_rowwise_adagrad_8x50_zipf": 2.0,
    "fbgemm_sgd_26x1_dim64": 5.0,
    "fbgemm_adagrad_26x1_dim64": 5.0,
}
"""Least ratio peer / ours that hotrow promises."""
MIN_SHARES = {"lookup_8x50_uniform": 0.85, "update_sgd_8x50_uniform": 0.75}
"""Least share of the limit that hotrow promises."""
FBGEMM_OPTIMIZERS: tuple[bench.Optimizer, ...] = ("sgd", "adagrad", "rowwise_adagrad")


class Fbgemm:
    """SplitTableBatchedEmbeddingBagsCodegen on the host with its exact `optimizer`, from the rows of `ours`."""

    def __init__(self, shape: bench.Shape, optimizer: bench.Optimizer, ours: bench.Ours) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (shape.num_embeddings, shape.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * shape.num_tables,
            optimizer=EmbOptimType[f"EXACT_{optimizer.upper()}"],
            learning_rate=bench.LR,
            eps=bench.EPS,
        )
        for mine, theirs in zip(self.module.split_embedding_weights(), ours.emb.weights.values(), strict=True):
            mine.copy_(theirs)
        for (sums,) in self.module.split_optimizer_states():
            sums.fill_(bench.ACCUMULATOR)
        self.gradient = bench.upstream_gradient(shape)
        lengths = shape.lengths.repeat(shape.num_tables)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.batches = [shape.ids(seed) for seed in range(bench.NUM_BATCHES)]

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = self.batches[batch % bench.NUM_BATCHES]

    def run(self) -> None:
        """Forward, backward and the fused update."""
        self.pooled = self.module(self.batch, self.offsets)
        self.pooled.backward(self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """The pooled rows and every table."""
        return [self.pooled.detach(), *self.module.split_embedding_weights()]


def fbgemm_cell(name: str, shape: bench.Shape, optimizer: bench.Optimizer) -> bench.Cell:
    """Lookup, backward and update against FBGEMM."""

    def build() -> tuple[bench.Contender, bench.Contender]:
        ours = bench.Ours(shape, "step", optimizer)
        return ours, Fbgemm(shape, optimizer, ours)

    peer = f"FBGEMM CPU, EXACT_{optimizer.upper()}"
    return bench.Cell(name=name, peer=peer, build=build, **bench.limits(shape, "step", optimizer))


def fbgemm_cells(*, quick: bool) -> list[bench.Cell]:
    """Row-wise Adagrad on the pooled shape, uniform and skewed; every optimizer FBGEMM has on the one-hot shape; SGD on
    odd ones."""
    pooled = replace(bench.POOLED, num_embeddings=10_000, batch_size=64) if quick else bench.POOLED
    one_hot = replace(bench.ONE_HOT, embedding_dim=64, **({"num_embeddings": 2_000} if quick else {}))
    return [
        fbgemm_cell("fbgemm_rowwise_adagrad_8x50_uniform", pooled, "rowwise_adagrad"),
        fbgemm_cell("fbgemm_rowwise_adagrad_8x50_zipf", replace(pooled, zipf=1.05), "rowwise_adagrad"),
        *(fbgemm_cell(f"fbgemm_{o}_26x1_dim64", one_hot, o) for o in FBGEMM_OPTIMIZERS),
        *(
            replace(fbgemm_cell(f"fbgemm_odd_{name}", shape, "sgd"), target=1.0)
            for name, shape in bench.odd_shapes(quick=quick).items()
            if shape.embedding_dim % 4 == 0  # FBGEMM takes no others
        ),
    ]


def compiled_mlp_cell(*, quick: bool) -> bench.Cell:
    """An MLP, forward and backward, against what torch.compile makes of torch's linear and relu."""
    batch_size, widths = (64, (20, 16, 1)) if quick else (2048, (367, 512, 256, 1))

    def build() -> tuple[bench.Contender, bench.Contender]:
        side = partial(dense_cells.Dense, batch_size=batch_size, widths=widths)
        return side(dense_cells.mlp_in_float32), side(torch.compile(dense_cells.mlp_in_torch))

    return bench.Cell(
        name="mlp_367_512_256_1_vs_compiled",
        peer="torch.compile of linear + relu",
        build=build,
        limit_s=partial(dense_cells.mlp_limit_s, widths, batch_size),
    )


def promises(name: str) -> dict[str, float]:
    """What hotrow promises of a cell, as fields of a Cell."""
    found = {"target": TARGETS[name]} if name in TARGETS else {}
    return found | ({"most_over_limit": 1 / MIN_SHARES[name]} if name in MIN_SHARES else {})


def kernel_cells(*, quick: bool) -> list[bench.Cell]:
    """Returns all cells with their promises."""
    found = [
        *bench.cells(quick=quick),
        *dense_cells.dense_cells(quick=quick),
        compiled_mlp_cell(quick=quick),
        *fbgemm_cells(quick=quick),
    ]
    return [replace(cell, **promises(cell.name)) for cell in found]


def cells_here(*, quick: bool) -> list[bench.Cell]:
    """Returns the cells whose peers are installed. Says on stderr if FBGEMM is not: the others need not wait for it."""
    found = kernel_cells(quick=quick)
    if find_spec("fbgemm_gpu") is None:
        print("cells against FBGEMM are left out: pip install 'hotrow[bench]' brings it", file=sys.stderr)
        found = [cell for cell in found if not cell.name.startswith("fbgemm_")]
    return found


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script("kernels", lambda options: cells_here(quick=options.quick), __doc__)


if __name__ == "__main__":
    main()

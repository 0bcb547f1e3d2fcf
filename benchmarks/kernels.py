"""The cells of `hotrow bench`, and those against FBGEMM's CPU kernels, into docs/benchmarks.json.

    python -m benchmarks.kernels --out docs/benchmarks.json [--quick] [CELL ...]

FBGEMM's one parallel CPU optimizer is row-wise Adagrad, so that is what it is compared in, on the pooled shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.results import run_as_script
from hotrow import cells


class Fbgemm:
    """SplitTableBatchedEmbeddingBagsCodegen on the host with exact row-wise Adagrad, from the rows of `ours`."""

    def __init__(self, shape: cells.Shape, ours: cells.Ours) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (shape.num_embeddings, shape.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * shape.num_tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=cells.LR,
            eps=cells.EPS,
        )
        for mine, theirs in zip(self.module.split_embedding_weights(), ours.emb.weights.values(), strict=True):
            mine.copy_(theirs)
        for (sums,) in self.module.split_optimizer_states():
            sums.fill_(cells.ACCUMULATOR)
        self.gradient = cells.upstream_gradient(shape)
        self.offsets = torch.arange(shape.num_tables * shape.batch_size + 1) * shape.lookups
        self.batches = [shape.ids(seed) for seed in range(cells.NUM_BATCHES)]

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = self.batches[batch % cells.NUM_BATCHES]

    def run(self) -> None:
        """Forward, backward and the fused update."""
        self.pooled = self.module(self.batch, self.offsets)
        self.pooled.backward(self.gradient)

    def outputs(self) -> Iterable[Tensor]:
        """The pooled rows and every table."""
        return [self.pooled.detach(), *self.module.split_embedding_weights()]


def fbgemm_cells(*, quick: bool) -> list[cells.Cell]:
    """Row-wise Adagrad steps on the pooled shape, uniform and skewed."""
    pooled = replace(cells.POOLED, num_embeddings=10_000, batch_size=64) if quick else cells.POOLED

    def build(shape: cells.Shape) -> tuple[cells.Contender, cells.Contender]:
        ours = cells.Ours(shape, "step", "rowwise_adagrad")
        return ours, Fbgemm(shape, ours)

    return [
        cells.Cell(
            name=f"step_rowwise_adagrad_8x50_{skew}",
            peer="FBGEMM CPU exact row-wise Adagrad",
            build=partial(build, shape),
            limit_s=partial(cells.embedding_limit_s, shape, "step", "rowwise_adagrad"),
        )
        for skew, shape in {"uniform": pooled, "zipf": replace(pooled, zipf=1.05)}.items()
    ]


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script("kernels", lambda quick: [*cells.cells(quick=quick), *fbgemm_cells(quick=quick)], __doc__)


if __name__ == "__main__":
    main()

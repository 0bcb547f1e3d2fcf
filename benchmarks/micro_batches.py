"""What micro-batches cost on one process: a training step in four parts against the same step in one.

    python -m benchmarks.micro_batches --out docs/measurements/benchmarks.json [--quick] [CELL ...]

The steps are those of `hotrow train` (run/trainer.py), at the shapes of benchmarks.step_shapes, with row-wise Adagrad
for the tables; both sides start from the same weights and see the same batches.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks import bench
from benchmarks.results import run_as_script
from benchmarks.step_peers import dense_sgd, make_model
from benchmarks.step_shapes import SHAPES, Setting, StepShape, make_setting
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import RowWiseAdagrad
from hotrow.parallel.ranks import Ranks
from hotrow.run.build import Parts
from hotrow.run.meters import StepClock
from hotrow.run.schedule import Schedule
from hotrow.run.trainer import train_step
from hotrow.tables import TableConfig

NUM_PARTS = 4
MAX_COST = 1.1
"""Of a step, by our own promise."""


class TrainStep:
    """A step of a run in so many micro-batches."""

    def __init__(self, setting: Setting, micro_batches: int) -> None:
        shape = setting.shape
        tables = [
            TableConfig(
                name=f"C{i + 1}", num_embeddings=n, embedding_dim=shape.embedding_dim, feature_names=(f"C{i + 1}",)
            )
            for i, n in enumerate(shape.rows)
        ]
        emb, model = EmbeddingCollection(tables, seed=1), make_model(setting)
        rows = RowWiseAdagrad(emb, shape.lr, eps=bench.EPS, nonfinite=None)
        ranks = Ranks(micro_batches=micro_batches)
        self.parts = Parts(emb, model, dense_sgd([model], shape.lr), rows, Schedule([]), ranks=ranks)
        self.batches, self.clock = setting.batches, StepClock()

    def prepare(self, batch: int) -> None:
        self.batch = self.batches[batch % len(self.batches)]

    def run(self) -> None:
        self.loss = train_step(self.parts, self.batch, 0, self.clock)

    def outputs(self) -> list[Tensor]:
        return [self.loss.reshape(1)]


def cell(shape: StepShape) -> bench.Cell:
    def build() -> tuple[TrainStep, TrainStep]:
        setting = make_setting(shape)
        return TrainStep(setting, NUM_PARTS), TrainStep(setting, 1)

    return bench.Cell(
        name=f"step_{shape.name}_in_{NUM_PARTS}",
        peer="hotrow, the whole batch at once",
        build=build,
        limit_s=lambda threads: None,
        target=1 / MAX_COST,
    )


def cells(*, quick: bool = False) -> list[bench.Cell]:
    shapes = [SHAPES[name] for name in ("kaggle", "mlperf-like")]
    return [cell(shape.small() if quick else shape) for shape in shapes]


if __name__ == "__main__":
    run_as_script("micro_batches", lambda options: cells(quick=options.quick), __doc__)

"""What could run ahead of a training step, and what it gains: ordering ids for the update, the loader.

    python -m benchmarks.overlap --out docs/measurements/benchmarks.json [--quick] [CELL ...]

`ids_ahead_*`: a step with row-wise Adagrad, whose update sorts its ids, beside the same step while a second thread
orders the ids of the next batch. That step still orders its own: its note says how long that takes by itself, which is
all that running ahead could save. `loader_ahead_*`: a step whose batch comes from a shuffled packed dataset, made
inline, beside the same with the next batch made in a second thread. `lookups_beside_*`: lookups and the dense part
of as many batches as there are threads, all threads on each part, beside a thread for each batch, every other of which
looks up while its neighbour multiplies: what a step could gain by looking up the next batch meanwhile. A ratio above 1
says that the plain way, ours, is the faster.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks import bench
from benchmarks.compiled import compiled
from benchmarks.results import run_as_script
from benchmarks.step_peers import Step, make_ours
from benchmarks.step_shapes import SHAPES, Setting, StepShape, make_setting
from hotrow.batch import Batch
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.sources.inputs import prefetch
from hotrow.kernels.types import ALGORITHMS
from hotrow.models.dlrm import DLRM
from hotrow.optim import SparseOptimizer

IDS_SHAPES = ("kaggle", "sc20-small", "mlperf-like", "embedding-bound")
LOADER_BATCHES = 64


def order_keys(shape: StepShape, ids: Tensor, num_threads: int) -> None:
    """What row-wise Adagrad's update does with the ids of a batch before it touches a row."""
    rows = np.array(shape.rows, np.int64)
    library = compiled("overlap.cpp", f"-I{Path(__file__).parents[1] / 'native/include'}")
    done = library.order_keys(
        ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(len(rows)), ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_int64(shape.batch_size), ctypes.c_int64(shape.lookups),
        ALGORITHMS.index("row_wise_adagrad"), num_threads,
    )  # fmt: skip
    assert done == 1, "an id is out of range"


class Silent:
    """A step of which nothing is compared: both sides are hotrow's own, and train on."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = batch
        self.step.prepare(batch)

    def run(self) -> None:
        """Train on it."""
        self.step.run()

    def outputs(self) -> Iterable[Tensor]:
        """None."""
        return ()


class IdsAhead(Silent):
    """The step, while a second thread orders the ids of the next batch."""

    def __init__(self, step: Step, setting: Setting) -> None:
        super().__init__(step)
        self.setting, self.pool = setting, ThreadPoolExecutor(1)

    def run(self) -> None:
        """Train on the batch and order the next one's ids."""
        batches = self.setting.batches
        following = batches[(self.batch + 1) % len(batches)].sparse.values
        ahead = self.pool.submit(order_keys, self.setting.shape, following, 1)
        super().run()
        ahead.result()


def ids_note(shape: StepShape) -> str:
    """How long ordering ids takes by itself."""
    ids = make_setting(shape).batches[0].sparse.values
    seconds = [bench.timed(partial(order_keys, shape, ids, torch.get_num_threads())) for _ in range(20)]
    return f"ordering the ids inline takes {1e3 * statistics.median(seconds):.2f} ms of a step: the most to be saved"


def ids_cell(shape: StepShape) -> bench.Cell:
    """The step beside the step with ids ordered ahead."""

    def build() -> tuple[bench.Contender, bench.Contender]:
        setting = make_setting(shape)
        step, _ = make_ours(setting, "rowwise_adagrad")
        return Silent(step), IdsAhead(step, setting)

    return bench.Cell(
        name=f"ids_ahead_{shape.name}",
        peer="the same step while a second thread orders the next batch's ids",
        build=build,
        limit_s=lambda threads: None,
        note=partial(ids_note, shape),
    )


class Together(Silent):
    """Lookups and the dense part of as many batches as there are threads, without updates: all threads on each part."""

    def __init__(self, step: Step, model: DLRM) -> None:
        super().__init__(step)
        self.model, self.parameters, self.threads = model, [*model.parameters()], torch.get_num_threads()
        self.emb = cast(SparseOptimizer, step.optimizers[1]).emb
        self.pooled = [self.look_up(k) for k in range(self.threads)]

    def look_up(self, batch: int) -> Tensor:
        """Pooled rows."""
        with torch.no_grad():
            return self.emb(self.step.inputs[batch % len(self.step.inputs)][0][1])

    def multiply(self, batch: int, pooled: Tensor) -> None:
        """Forward, loss, and gradients of layers and rows."""
        (dense, _), label = self.step.inputs[batch % len(self.step.inputs)]
        pooled = pooled.requires_grad_()
        loss = binary_cross_entropy_with_logits(self.model(dense, pooled), label)
        torch.autograd.grad(loss, [pooled, *self.parameters])

    def run(self) -> None:
        """Batch after batch."""
        for k in range(self.threads):
            self.multiply(self.batch + k, self.look_up(self.batch + k))


class Beside(Together):
    """The same with one thread for each batch, every other of which begins with the dense part."""

    def __init__(self, step: Step, model: DLRM) -> None:
        super().__init__(step, model)
        self.pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(self) -> None:
        """All at once."""
        list(self.pool.map(self._alone, range(self.threads)))

    def _alone(self, k: int) -> None:
        if k % 2 == 0:
            self.multiply(self.batch + k, self.look_up(self.batch + k))
        else:  # the same work in the other order: on the rows of an earlier batch, whose values cost the same
            self.multiply(self.batch + k, self.pooled[k])
            self.pooled[k] = self.look_up(self.batch + k)


def beside_cell(shape: StepShape) -> bench.Cell:
    """All threads on each part beside a thread for each batch."""

    def build() -> tuple[bench.Contender, bench.Contender]:
        step, made = make_ours(make_setting(shape), "sgd")
        return Together(step, made.model), Beside(step, made.model)

    return bench.Cell(
        name=f"lookups_beside_{shape.name}", peer="the same, lookups of one thread beside products of another",
        build=build, limit_s=lambda threads: None,
    )  # fmt: skip


class FromDataset(Silent):
    """A step whose batch a loader makes within the time of the step."""

    def __init__(self, step: Step, dataset: PackedDataset, batch_size: int, *, ahead: bool) -> None:
        super().__init__(step)
        self.loader = Loader(dataset.split("train"), batch_size, shuffle_seed=1, window_rows=8 * batch_size)
        self.batches = prefetch(self._endless()) if ahead else self._endless()

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def prepare(self, batch: int) -> None:
        """Nothing is made beforehand."""

    def run(self) -> None:
        """Take the next batch and train on it."""
        batch: Any = next(self.batches)
        self.step.input, self.step.label = (batch.dense, batch.sparse), batch.label
        self.step.run()


def write_dataset(folder: Path, shape: StepShape) -> PackedDataset:
    """The shape's batches, over and over, as a packed dataset."""
    setting = make_setting(shape)
    names = setting.batches[0].sparse.keys
    info = DatasetInfo(
        name="overlap",
        dense=tuple(DenseColumn(f"I{j}") for j in range(shape.num_dense)),
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(Table(name, rows) for name, rows in zip(names, shape.rows, strict=True)),
    )
    with PackedWriter(folder, info) as writer:
        for k in range(LOADER_BATCHES):
            batch = setting.batches[k % len(setting.batches)]
            columns = batch.sparse.values.view(len(names), -1).numpy().astype(np.int32)
            writer.append("train", batch.label.numpy(), batch.dense.numpy(), dict(zip(names, columns, strict=True)))
        return writer.close()


def loader_cell(shape: StepShape) -> bench.Cell:
    """The step with its loader inline beside the step with it one batch ahead."""
    folder = tempfile.TemporaryDirectory(prefix="hotrow-overlap-")

    def build() -> tuple[bench.Contender, bench.Contender]:
        dataset = write_dataset(Path(folder.name), shape)
        step, _ = make_ours(make_setting(shape), "sgd")
        inline, ahead = (FromDataset(step, dataset, shape.batch_size, ahead=ahead) for ahead in (False, True))
        return inline, ahead

    return bench.Cell(
        name=f"loader_ahead_{shape.name}", peer="the same, the next batch made in a second thread", build=build,
        limit_s=lambda threads: None,
    )  # fmt: skip


def overlap_cells(options: argparse.Namespace) -> list[bench.Cell]:
    """All of them."""
    shapes = {name: shape.small() if options.quick else shape for name, shape in SHAPES.items()}
    return [
        *(ids_cell(shapes[name]) for name in IDS_SHAPES),
        loader_cell(shapes["kaggle"]),
        *(beside_cell(shapes[name]) for name in ("embedding-bound", "sc20-small")),
    ]


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script("overlap", overlap_cells, __doc__)


if __name__ == "__main__":
    main()

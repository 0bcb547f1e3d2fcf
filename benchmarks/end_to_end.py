"""A whole training step at the Criteo-Kaggle shape: hotrow's DLRM against a plain PyTorch DLRM.

    python -m benchmarks.end_to_end --out docs/benchmarks.json [--quick]

26 tables at the cardinalities of the Kaggle data set (33.8 M rows), dim 16, batch 2048, MLPs 13-512-256-64-16 and
512-256-1, SGD on everything. Both sides start from the same weights and see the same batches, made beforehand; their
losses are compared first, then their steps alternate in one process, on huge pages both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.results import run_as_script
from hotrow import bench, cells
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.models.dlrm import DLRM
from hotrow.optim import SGD
from hotrow.tables import TableConfig

# Distinct values per categorical column of the Criteo-Kaggle training set, as public DLRM code states them.
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
NUM_DENSE, DIM, BOTTOM, TOP = 13, 16, (512, 256, 64), (512, 256)
ZIPF = 1.05  # stands for the skew of real clicks; the real columns differ from one another
LR = 0.1
NUM_BATCHES = 8


@dataclass(frozen=True)
class Setting:
    """What both sides train on: rows by table, and the batches."""

    rows: tuple[int, ...]
    batches: tuple[Batch, ...]


def zipf_ids(generator: np.random.Generator, num_rows: int, n: int) -> np.ndarray:
    """`n` ids in [0, num_rows), id k in proportion to about (k + 1) ** -ZIPF: the continuous law, cut to integers."""
    power = 1.0 - ZIPF
    u = generator.random(n)
    return np.minimum((1 + u * ((num_rows + 1.0) ** power - 1)) ** (1 / power) - 1, num_rows - 1).astype(np.int64)


def make_setting(*, quick: bool) -> Setting:
    """Batches from a fixed seed; `quick` shortens tables and batches."""
    rows = tuple(min(n, 10_000) for n in KAGGLE_ROWS) if quick else KAGGLE_ROWS
    batch_size = 256 if quick else 2048
    generator = np.random.default_rng(3)
    names = tuple(f"C{i + 1}" for i in range(len(rows)))
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.from_numpy(np.concatenate([zipf_ids(generator, n, batch_size) for n in rows]))
        dense = torch.from_numpy(np.log1p(generator.exponential(5.0, (batch_size, NUM_DENSE))).astype(np.float32))
        label = torch.from_numpy((generator.random(batch_size) < 0.25).astype(np.float32))
        batches.append(Batch(dense=dense, sparse=KeyedJaggedTensor(names, ids), label=label))
    return Setting(rows, tuple(batches))


class Step:
    """One training step of a model: forward, loss, backward, every optimizer."""

    def __init__(
        self, batches: Sequence[Batch], forward: Callable[[Batch], Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.batches, self.forward, self.optimizers = batches, forward, optimizers

    def prepare(self, batch: int) -> None:
        """Choose the batch."""
        self.batch = self.batches[batch % len(self.batches)]

    def run(self) -> None:
        """Train on it."""
        loss = binary_cross_entropy_with_logits(self.forward(self.batch), self.batch.label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.loss = loss.detach()

    def outputs(self) -> Iterable[Tensor]:
        """The loss."""
        return [self.loss]


def make_ours(setting: Setting) -> tuple[Step, DLRM, EmbeddingCollection]:
    """hotrow's step, and the parts whose weights the peer starts from."""
    tables = [
        TableConfig(name=f"C{i + 1}", num_embeddings=n, embedding_dim=DIM, feature_names=(f"C{i + 1}",))
        for i, n in enumerate(setting.rows)
    ]
    emb = EmbeddingCollection(tables, seed=1)
    model = DLRM(
        num_dense=NUM_DENSE,
        num_features=len(tables),
        embedding_dim=DIM,
        bottom_mlp=BOTTOM,
        top_mlp=TOP,
        first_order=False,
        generator=torch.Generator().manual_seed(1),
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR), SGD(emb, lr=LR)]
    return Step(setting.batches, lambda batch: model(batch.dense, emb(batch.sparse)), optimizers), model, emb


def plain_mlp(layers: Iterable[nn.Linear], *, last_relu: bool) -> nn.Sequential:
    """Copies of `layers` with ReLUs between them, and after the last where `last_relu`."""
    modules = [module for layer in layers for module in (copy.deepcopy(layer), nn.ReLU())]
    return nn.Sequential(*(modules if last_relu else modules[:-1]))


def make_peer(setting: Setting, model: DLRM, emb: EmbeddingCollection) -> Step:
    """The same model of torch's own parts: a sparse EmbeddingBag per table, cat + bmm + gather, one SGD for all."""
    num_tables, batch_size = len(setting.rows), len(setting.batches[0])
    bags = nn.ModuleList(
        nn.EmbeddingBag.from_pretrained(w.clone(), freeze=False, mode="sum", sparse=True) for w in emb.weights.values()
    )
    bottom = plain_mlp(model.bottom.layers, last_relu=True)
    top = plain_mlp(model.top.layers, last_relu=False)
    interact = cells.interact_in_torch(num_tables)
    offsets = torch.arange(batch_size)

    def forward(batch: Batch) -> Tensor:
        ids = batch.sparse.values.chunk(num_tables)
        pooled = torch.stack([bag(column, offsets) for bag, column in zip(bags, ids, strict=True)], 1)
        return top(interact(bottom(batch.dense), pooled)).squeeze(1)

    parameters = [p for module in (bags, bottom, top) for p in module.parameters()]
    return Step(setting.batches, forward, [torch.optim.SGD(parameters, lr=LR)])


def step_limit_s(setting: Setting, threads: int) -> float | None:
    """What the rows, the interaction and the matrix products of one step cost by themselves on this machine."""
    starts = torch.tensor([0, *setting.rows[:-1]]).cumsum(0)
    batch_size, num_tables = len(setting.batches[0]), len(setting.rows)
    rows = setting.batches[0].sparse.values + starts.repeat_interleave(batch_size)
    embedding = cells.rows_limit_s(
        rows, num_rows=sum(setting.rows), dim=DIM, part="step", optimizer="sgd", threads=threads
    )
    interaction = cells.interaction_limit_s(batch_size, num_tables, DIM, threads)
    if embedding is None or interaction is None:
        return None
    top_inputs = DIM + num_tables * (num_tables + 1) // 2
    bottom = cells.mlp_limit_s((NUM_DENSE, *BOTTOM, DIM), batch_size, gradient_of_inputs=False)
    top = cells.mlp_limit_s((top_inputs, *TOP, 1), batch_size, gradient_of_inputs=True)
    return embedding + interaction + bottom + top


def cell(*, quick: bool) -> cells.Cell:
    """The comparison as a cell of the bench."""
    setting = make_setting(quick=quick)

    def build() -> tuple[cells.Contender, cells.Contender]:
        ours, model, emb = make_ours(setting)
        peer = make_peer(setting, model, emb)
        for batch in range(5):  # five updates deep, on different batches
            bench.check_agreement("train_step_criteo_kaggle", ours, peer, batch=batch)
        return ours, peer

    return cells.Cell(
        name="train_step_criteo_kaggle",
        peer="plain PyTorch DLRM (sparse EmbeddingBag, bmm, torch.optim.SGD)",
        build=build,
        limit_s=partial(step_limit_s, setting),
    )


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script("end_to_end", lambda quick: [cell(quick=quick)], __doc__)


if __name__ == "__main__":
    main()

"""Training: parts built from a config, one step on one screen, and the loop that logs, evaluates, saves and resumes.

`build` makes the parts, `train_step` sequences them, `train` is a whole run in a run folder. A run is a function of its
config, its dataset and its seed: interrupted anywhere and resumed, it goes on to the same bits (law 3).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer

from hotrow import ops, optim
from hotrow.batch import Batch
from hotrow.checkpoint import Part, list_checkpoints, load_checkpoint, prune_checkpoints, read_manifest, save_checkpoint
from hotrow.config import Config, OptimizerConfig, interval_steps, make_config, parse_yaml
from hotrow.data.loader import Loader
from hotrow.data.packed import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.files import available_memory_bytes
from hotrow.host import usable_cores
from hotrow.metrics import BinaryMetrics
from hotrow.models import build_model
from hotrow.progress import ProgressLine
from hotrow.run_folder import CONFIG, RunFolder
from hotrow.schedule import Schedule
from hotrow.tables import TableConfig

PHASES = ("data", "lookup", "dense", "update")
"""Where a step's time goes: waiting for the batch; pooled lookup; MLPs and interaction forward and backward (the lookup's
own backward only keeps the pooled gradient) and the dense optimizer; sort, sum and update of the touched rows."""
_DENSE_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
_SPARSE_OPTIMIZERS = {"sgd": optim.SGD, "adagrad": optim.Adagrad, "row_wise_adagrad": optim.RowWiseAdagrad}
_STATE_BYTES_PER_ROW = {"sgd": lambda dim: 0, "adagrad": lambda dim: 4 * dim, "row_wise_adagrad": lambda dim: 4}


class StepClock:
    """Seconds spent in each of PHASES: `lap(phase)` adds the time since the last lap."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.num_steps = 0
        self._last = time.perf_counter()

    def lap(self, phase: str | None) -> None:
        """Book the time since the last lap under `phase`; None means it is nobody's (evaluation, checkpoints)."""
        now = time.perf_counter()
        if phase is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds per step and phase."""
        return {phase: round(1e3 * s / max(1, self.num_steps), 4) for phase, s in self.seconds.items()}


@dataclass
class Parts:
    """What a step works on."""

    embedding: EmbeddingCollection
    model: nn.Module
    dense_optimizer: Optimizer
    sparse_optimizer: Optimizer
    schedule: Schedule

    def for_checkpoint(self) -> dict[str, Part]:
        """The parts that have state, by the names of their files."""
        names = ("embedding", "model", "dense_optimizer", "sparse_optimizer")
        return {name: getattr(self, name) for name in names}


def build(config: Config, tables: Sequence[TableConfig], *, num_dense: int) -> Parts:
    """The parts of a run over `tables` and `num_dense` dense inputs, all random draws from `config.train.seed`."""
    seed = config.train.seed
    embedding = EmbeddingCollection(tables, seed=seed)
    num_features = sum(len(table.feature_names) for table in tables)
    model = build_model(config.model, num_dense=num_dense, num_features=num_features, seed=seed)
    dense_optimizer, sparse_optimizer = build_optimizers(config.optimizer, model, embedding)
    schedule = Schedule([dense_optimizer, sparse_optimizer], **config.optimizer.schedule.model_dump())
    return Parts(embedding, model, dense_optimizer, sparse_optimizer, schedule)


def build_optimizers(
    config: OptimizerConfig, model: nn.Module, embedding: EmbeddingCollection
) -> tuple[Optimizer, Optimizer]:
    """The torch optimizer of `model` and the fused one of `embedding`."""
    dense, sparse = config.dense, config.sparse
    options = {"eps": sparse.eps, "initial_accumulator_value": sparse.initial_accumulator_value}
    given = {name: value for name, value in options.items() if value is not None}
    return (
        _DENSE_OPTIMIZERS[dense.name](model.parameters(), lr=dense.lr, weight_decay=dense.weight_decay),
        _SPARSE_OPTIMIZERS[sparse.name](embedding, lr=sparse.lr, **given),
    )


def train_step(parts: Parts, batch: Batch, step: int, clock: StepClock) -> Tensor:
    """Step number `step` (from 0) on `batch`; returns the mean binary cross-entropy before the update, 0-dim."""
    parts.schedule.apply(step)
    parts.dense_optimizer.zero_grad()
    parts.sparse_optimizer.zero_grad()
    pooled_BP = parts.embedding(batch.sparse)
    clock.lap("lookup")
    logits_B = parts.model(batch.dense, pooled_BP)
    loss = binary_cross_entropy_with_logits(logits_B, batch.label)
    loss.backward()
    parts.dense_optimizer.step()
    clock.lap("dense")
    parts.sparse_optimizer.step()
    clock.lap("update")
    return loss.detach()


@torch.no_grad()
def evaluate(parts: Parts, loader: Loader) -> dict[str, float]:
    """AUC, LogLoss, NE and calibration of the parts over every row of the loader's split, in the split's order."""
    metrics = BinaryMetrics()
    for batch in loader.epoch(0):
        metrics.update(parts.model(batch.dense, parts.embedding(batch.sparse)), batch.label)
    return metrics.compute()

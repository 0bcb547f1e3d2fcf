"""The parts that a step works on, built from a run's setup: tables, model, optimizers, and the schedule of their rates.

All random draws are functions of `config.train.seed`. What was decided before is in setup.py; what a step does with the
parts, and when, is in trainer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotrow import optim
from hotrow.batch import KeyedJaggedTensor
from hotrow.config.schema import Config
from hotrow.embedding import EmbeddingCollection
from hotrow.models.layers import Network
from hotrow.run.checkpoint import Part
from hotrow.run.setup import ARITHMETIC, Place, Setup

_DENSE_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
_SPARSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "row_wise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "ftrl": optim.FTRL,
}


@dataclass
class Parts:
    """The objects that a step works on."""

    embedding: EmbeddingCollection
    model: Network
    dense_optimizer: Optimizer
    sparse_optimizer: optim.SparseOptimizer
    schedule: Schedule
    place: Place = field(default_factory=Place)
    """Where the model computes."""

    def with_state(self) -> dict[str, Part]:
        """Returns the parts that a checkpoint holds, by the names of their files."""
        return {name: part for name, part in vars(self).items() if name not in ("schedule", "place")}


def build_network(setup: Setup) -> tuple[EmbeddingCollection, Network]:
    """Returns the tables, and the model on its device; all random draws follow from `config.train.seed`."""
    config, tables = setup.config, setup.tables
    seed, dims = config.train.seed, {name: table.embedding_dim for table in tables for name in table.feature_names}
    generator = torch.Generator().manual_seed(seed)
    model = config.model.build(num_dense=len(setup.dataset.info.dense), dims=dims, generator=generator)
    return EmbeddingCollection(tables, memory=setup.memory, seed=seed), model.to(setup.place.device)


def build(setup: Setup) -> Parts:
    """Returns what a step works on, before the first step."""
    embedding, model = build_network(setup)
    dense_optimizer, sparse_optimizer = build_optimizers(setup.config, embedding, model)
    schedule = Schedule([dense_optimizer, sparse_optimizer], **setup.config.optimizer.schedule.model_dump())
    return Parts(embedding, model, dense_optimizer, sparse_optimizer, schedule, setup.place)


def build_optimizers(
    config: Config, embedding: EmbeddingCollection, model: nn.Module
) -> tuple[Optimizer, optim.SparseOptimizer]:
    """Returns the torch optimizer of `model` and the fused one of `embedding`."""
    dense, sparse = config.optimizer.dense, config.optimizer.sparse
    options = sparse.model_dump(exclude={"name", "lr"}, exclude_none=True)
    dense_optimizer = optim.SplitSGDBF16 if splits_dense(config) else _DENSE_OPTIMIZERS[dense.name]
    fused = True if all(parameter.device.type == "cpu" for parameter in model.parameters()) else None  # torch's choice
    return (
        dense_optimizer(model.parameters(), lr=dense.lr, weight_decay=dense.weight_decay, fused=fused),
        # nonfinite=None: train_step checks both sides itself, before either is changed.
        _SPARSE_OPTIMIZERS[sparse.name](embedding, lr=sparse.lr, nonfinite=None, **options),
    )


def look_up(model: Network, embedding: EmbeddingCollection, sparse: KeyedJaggedTensor) -> Any:
    """Returns the rows of a batch as `model` takes them."""
    return embedding.sequence(sparse) if model.lookup == "sequence" else embedding(sparse)


def splits_dense(config: Config) -> bool:
    """Returns whether the weights of dense layers are kept in two halves."""
    return config.train.precision == "split_bf16" and config.optimizer.dense.name == "sgd"


def storage_line(config: Config) -> str:
    """Returns in words how weights are stored: bfloat16 storage does not mean bfloat16 arithmetic."""
    tables = {"fp32": "float32", "fp16": "float16", "split_bf16": "float32 in two halves, lookups read the upper"}
    dense, products = "likewise" if splits_dense(config) else "float32", config.train.dense_dtype
    arithmetic = "all arithmetic is float32"
    if products != "fp32":
        arithmetic = f"arithmetic of tables is float32, of dense layers {ARITHMETIC[products]}"
    return f"tables {tables[config.train.precision]}; MLPs {dense}; {arithmetic}"


MIN_LR = 1e-7
"""The rate at which the decay ends; the value of the reference DLRM."""


class Schedule:
    """Sets every parameter group's `lr` to its initial value times a factor of the step alone, counted from 0:

        step < warmup_steps              (step + 1) / warmup_steps
        up to decay_start_step           1
        then, k = step + 1 - start       (1 - k / decay_steps)^2, the rate itself never below 1e-7
        from start + decay_steps - 1 on  as at the last step of the decay

    optimizers: their groups' `lr` at construction is the initial value, so build the schedule before loading a state.
    decay_start_step: None means warmup_steps. The one deviation from the reference: between warm-up and decay the rate
    is the initial one, where the reference freezes the last warm-up step's (warmup_steps - 1) / warmup_steps of it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        warmup_steps: int = 0,
        decay_start_step: int | None = None,
        decay_steps: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._initial = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.decay_start_step = warmup_steps if decay_start_step is None else decay_start_step

    def factor(self, step: int) -> float:
        """Returns what the initial rate is multiplied by at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decayed = min(step + 1 - self.decay_start_step, self.decay_steps - 1)
        return (1 - decayed / self.decay_steps) ** 2 if self.decay_steps and decayed > 0 else 1.0

    def apply(self, step: int) -> None:
        """Sets the rates for step number `step`."""
        factor = self.factor(step)
        floor = MIN_LR if factor < 1.0 and step >= self.warmup_steps else 0.0
        # Groups are looked up anew each time: load_state_dict puts other dicts in their place.
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            for group, lr in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = max(floor, lr * factor)

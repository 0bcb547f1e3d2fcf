"""The parts of a run, built from its config: tables, model, optimizers, and the schedule of their rates.

All random draws are functions of `config.train.seed`. Where tables lie was decided before, by device.py and
placement.py; what a step does with the parts, and when, is trainer.py.
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
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.models.layers import Network
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.run.checkpoint import Part
from hotrow.run.device import ARITHMETIC, Place
from hotrow.run.schedule import Schedule
from hotrow.tables import Dtype, TableConfig

_DENSE_OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
_TABLE_DTYPES: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16", "split_bf16": "bfloat16"}
_SPARSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "row_wise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "ftrl": optim.FTRL,
}


@dataclass
class Parts:
    """What a step works on."""

    embedding: EmbeddingCollection
    model: Network
    dense_optimizer: Optimizer
    sparse_optimizer: optim.SparseOptimizer
    schedule: Schedule
    place: Place = field(default_factory=Place)
    """Of the model."""

    def with_state(self) -> dict[str, Part]:
        """The parts a checkpoint holds, by the names of their files."""
        return {name: part for name, part in vars(self).items() if name not in ("schedule", "place")}


def tables_of(config: Config, dataset: PackedDataset) -> tuple[TableConfig, ...]:
    """The dataset's tables as the model needs them, in the storage that `config` says."""
    return config.model.tables(dataset, dtype=_TABLE_DTYPES[config.train.precision])


def build_network(
    config: Config,
    tables: Sequence[TableConfig],
    *,
    num_dense: int,
    memory: Memory | DeviceMemory | None = None,
    place: Place | None = None,
) -> tuple[EmbeddingCollection, Network]:
    """The tables and the model on them, all random draws from `config.train.seed`; memory: None: all in DRAM.

    place: where the model goes; None: it stays on the CPU.
    """
    seed, dims = config.train.seed, {name: table.embedding_dim for table in tables for name in table.feature_names}
    generator = torch.Generator().manual_seed(seed)
    model = config.model.build(num_dense=num_dense, dims=dims, generator=generator)
    return EmbeddingCollection(tables, memory=memory, seed=seed), model.to((place or Place()).device)


def build(
    config: Config,
    tables: Sequence[TableConfig],
    *,
    num_dense: int,
    memory: Memory | DeviceMemory | None = None,
    place: Place | None = None,
) -> Parts:
    """The parts of a run over `tables` and `num_dense` dense inputs; memory and place: as `build_network`."""
    place = place or Place()
    embedding, model = build_network(config, tables, num_dense=num_dense, memory=memory, place=place)
    dense_optimizer, sparse_optimizer = build_optimizers(config, embedding, model)
    schedule = Schedule([dense_optimizer, sparse_optimizer], **config.optimizer.schedule.model_dump())
    return Parts(embedding, model, dense_optimizer, sparse_optimizer, schedule, place)


def build_optimizers(
    config: Config, embedding: EmbeddingCollection, model: nn.Module
) -> tuple[Optimizer, optim.SparseOptimizer]:
    """The torch optimizer of `model` and the fused one of `embedding`."""
    dense, sparse = config.optimizer.dense, config.optimizer.sparse
    options = sparse.model_dump(exclude={"name", "lr"}, exclude_none=True)
    dense_optimizer = optim.SplitSGDBF16 if splits_dense(config) else _DENSE_OPTIMIZERS[dense.name]
    fused = True if all(parameter.device.type == "cpu" for parameter in model.parameters()) else None  # torch's choice
    return (
        dense_optimizer(model.parameters(), lr=dense.lr, weight_decay=dense.weight_decay, fused=fused),
        # train_step looks at both sides itself, before either is changed.
        _SPARSE_OPTIMIZERS[sparse.name](embedding, lr=sparse.lr, nonfinite=None, **options),
    )


def look_up(model: Network, embedding: EmbeddingCollection, sparse: KeyedJaggedTensor) -> Any:
    """Returns the rows of a batch as `model` takes them."""
    return embedding.sequence(sparse) if model.lookup == "sequence" else embedding(sparse)


def splits_dense(config: Config) -> bool:
    """Whether the MLPs' weights are kept in two halves."""
    return config.train.precision == "split_bf16" and config.optimizer.dense.name == "sgd"


def storage_line(config: Config) -> str:
    """How weights are stored, for the user: bfloat16 in storage does not mean bfloat16 arithmetic."""
    tables = {"fp32": "float32", "fp16": "float16", "split_bf16": "float32 in two halves, lookups read the upper"}
    dense, products = "likewise" if splits_dense(config) else "float32", config.train.dense_dtype
    arithmetic = "all arithmetic is float32"
    if products != "fp32":
        arithmetic = f"arithmetic of tables is float32, of dense layers {ARITHMETIC[products]}"
    return f"tables {tables[config.train.precision]}; MLPs {dense}; {arithmetic}"

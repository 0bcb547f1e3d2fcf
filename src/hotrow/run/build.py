"""The parts that a step works on, built from a `Setup`: tables, model, optimizers and schedule.

All random draws are functions of `config.train.seed`. `read_model` says what a checkpoint was built from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotrow import optim
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.data.packed.groups import Groups
from hotrow.data.packed.reader import PackedDataset
from hotrow.embedding import EmbeddingCollection
from hotrow.models.layers import Network
from hotrow.objectives import DEFAULT, OBJECTIVES
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import for_labels
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import DenseExchange, OverRanks
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import ShardedMemory
from hotrow.placement import AnyMemory
from hotrow.run.checkpoint import Part
from hotrow.run.checkpoint_files import CURE, MANIFEST, Manifest, read_tensors
from hotrow.run.graph import DenseGraph
from hotrow.run.items import Items
from hotrow.run.record import read_extra
from hotrow.run.schedule import Schedule
from hotrow.setup.demand import tables_of
from hotrow.setup.device import DenseDevice, splits_dense
from hotrow.setup.setup import Setup
from hotrow.tables import TableConfig

_DENSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


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
    dense: DenseDevice = field(default_factory=DenseDevice)
    """Where the model computes."""
    objective: Objective = OBJECTIVES[DEFAULT]
    ranks: Ranks = field(default_factory=Ranks)
    exchange: DenseExchange = None  # type: ignore[assignment]  # made in __post_init__ of `ranks`
    """Adds up what micro-batches sum, over all ranks."""
    clip_norm: float | None = None
    """The largest norm of a step's gradients; if None, there is no limit."""
    items: Items | None = None
    """The items that the model finds, if it finds items."""
    graph: DenseGraph | None = None
    """Replays what the model computes in a step; if None, Python launches it."""

    def __post_init__(self) -> None:
        self.exchange = self.exchange or DenseExchange(self.ranks)

    def labelled(self, batch: Batch) -> Batch:
        """Returns the batch with labels that hold all that the loss needs besides the output."""
        return batch if self.items is None else replace(batch, label=self.items.labels(batch))

    def with_state(self) -> dict[str, Part]:
        """Returns the parts that a checkpoint holds, by the names of their files."""
        others = ("schedule", "dense", "objective", "ranks", "exchange", "clip_norm", "items", "graph")
        return {name: part for name, part in vars(self).items() if name not in others}


def build_network(setup: Setup, comm: Communicator | None = None) -> tuple[EmbeddingCollection, Network]:
    """Returns the tables, and the model on its device; all random draws follow from `config.train.seed`.

    comm: of the ranks of `setup`; may be None if there is one.
    """
    config, tables = setup.config, setup.tables
    seed, dims = config.train.seed, {name: table.embedding_dim for table in tables for name in table.feature_names}
    generator = torch.Generator().manual_seed(seed)
    model = config.model.build_for(setup.dataset.info, dims=dims, generator=generator)
    memory: AnyMemory = setup.memory
    if setup.shards:
        comm, wire_dtype = comm or Communicator(setup.ranks), config.parallel.wire_dtype
        memory = ShardedMemory(comm=comm, shards=setup.shards, below=setup.memory, wire_dtype=wire_dtype)
    return EmbeddingCollection(tables, memory=memory, seed=seed), model.to(setup.dense.device)


def build(setup: Setup, comm: Communicator | None = None, *, stop: Callable[[], int | None] = lambda: None) -> Parts:
    """The parts that a step works on, before the first step. comm: as for `build_network`. stop: returns the signal
    that asks this process to stop, which the ranks tell each other at every step."""
    comm = comm or Communicator(setup.ranks)
    embedding, model = build_network(setup, comm)
    named: dict[str, Any] = {**embedding.switches, "dense": model, "tables": embedding}
    for name in setup.config.train.freeze:
        named[name].requires_grad_(requires_grad=False)
    dense_optimizer, sparse_optimizer = build_optimizers(setup.config, embedding, model)
    exchange = DenseExchange(setup.ranks, stop)
    if comm.size > 1:
        exchange = OverRanks(comm, stop, length=sum(own.numel() for own in model.parameters() if own.requires_grad))
    schedule = Schedule([dense_optimizer, sparse_optimizer], **setup.config.optimizer.schedule.model_dump())
    return Parts(
        embedding,
        model,
        dense_optimizer,
        sparse_optimizer,
        schedule,
        setup.dense,
        objective=for_labels(setup.config.objective, [label.name for label in setup.dataset.info.labels]),
        ranks=setup.ranks,
        exchange=exchange,
        clip_norm=setup.config.train.clip_norm,
        items=Items.of(setup.dataset, model.item_features) if model.retrieves else None,
        graph=DenseGraph.of(model, setup.dense),
    )


def build_optimizers(
    config: Config, embedding: EmbeddingCollection, model: nn.Module
) -> tuple[Optimizer, optim.SparseOptimizer]:
    """Returns the torch optimizer of `model` and the fused one of `embedding`."""
    dense, sparse = config.optimizer.dense, config.optimizer.sparse
    options = sparse.model_dump(exclude={"name", "lr"}, exclude_none=True)
    fused = True if all(parameter.device.type == "cpu" for parameter in model.parameters()) else None  # torch's choice
    make = optim.SplitSGDBF16 if splits_dense(config) else partial(_DENSE_OPTIMIZERS[dense.name], fused=fused)
    return (
        make(model.parameters(), **dense.model_dump(exclude={"name"}, exclude_none=True)),
        # nonfinite=None: train_step checks both sides itself, before either is changed.
        _SPARSE_OPTIMIZERS[sparse.name](embedding, lr=sparse.lr, nonfinite=None, **options),
    )


def look_up(model: Network, embedding: EmbeddingCollection, sparse: KeyedJaggedTensor) -> Any:
    """Returns the rows of a batch as `model` takes them."""
    return embedding.sequence(sparse) if model.lookup == "sequence" else embedding(sparse)


def read_model(checkpoint: Path, manifest: Manifest, vocabulary: PackedDataset) -> tuple[Config, Sequence[TableConfig]]:
    """Returns the config and the tables of a run's checkpoint, for the ids of `vocabulary`.

    Raises ValueError naming file and field if the checkpoint belongs to other ids.
    """
    extra, where = read_extra(checkpoint, manifest), f"{checkpoint / MANIFEST}: extra"
    config = make_config(extra.config, origin=f"{where}: config")
    if extra.num_dense != len(vocabulary.info.dense):
        raise ValueError(
            f"{where}: num_dense is {extra.num_dense}, but {vocabulary.path} has {len(vocabulary.info.dense)} dense "
            f"columns; {CURE}"
        )
    if extra.tables != tables_of(config, vocabulary):
        raise ValueError(
            f"{where}: tables and config do not fit the features and ids in {vocabulary.path}; copy that folder from "
            f"the dataset the run used, or {CURE}"
        )
    if config.metrics.by is not None:
        try:
            Groups(vocabulary.info, config.metrics.by)
        except ValueError as error:
            raise ValueError(f"{where}: config: {error}") from None
    dims = {name: table.embedding_dim for table in extra.tables for name in table.feature_names}
    with torch.device("meta"):  # layers of other shapes are an error before they take memory
        model = config.model.build_for(vocabulary.info, dims=dims, generator=torch.Generator())
    read_tensors(checkpoint / "model.safetensors", model.state_dict())
    return config, extra.tables

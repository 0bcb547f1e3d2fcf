"""What tables take, counted once: bytes of a row with its optimizer state, and rows that a step may look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels.types import NUM_STATES
from hotrow.placement.budget import TableDemand
from hotrow.tables import BYTES_PER_WEIGHT, WHOLE, Dtype, TableConfig

TABLE_DTYPES: dict[str, Dtype] = {"fp32": "float32", "fp16": "float16", "split_bf16": "bfloat16"}


def tables_of(config: Config, dataset: PackedDataset) -> tuple[TableConfig, ...]:
    """Returns the dataset's tables as the model needs them, in the dtype that `config` says."""
    return config.model.tables(dataset, dtype=TABLE_DTYPES[config.train.precision])


def record_bytes(table: TableConfig, optimizer: str | None) -> int:
    """Returns the bytes of a row: its weights, and the state that `optimizer` keeps for it (None: the row is only
    read). Raises ValueError for an unknown optimizer."""
    if optimizer is not None and optimizer not in NUM_STATES:
        raise ValueError(f"optimizer is {optimizer!r}; choose one of {', '.join(NUM_STATES)}")
    weights = table.embedding_dim * BYTES_PER_WEIGHT[table.dtype]
    state_dim = 1 if optimizer == "row_wise_adagrad" else table.embedding_dim
    return weights + (0 if optimizer is None else 4 * NUM_STATES[optimizer] * state_dim)


def demands_of(config: Config, tables: Sequence[TableConfig], *, training: bool) -> list[TableDemand]:
    """Returns what the tables' rows take; training: with optimizer state."""
    optimizer = config.optimizer.sparse.name if training else None
    return [TableDemand(table.name, table.num_embeddings, record_bytes(table, optimizer)) for table in tables]


def required_bytes(config: Config, tables: Sequence[TableConfig], *, training: bool = True) -> int:
    """Returns the bytes of all tables; training: with optimizer state."""
    return sum(table.num_rows * table.record_bytes for table in demands_of(config, tables, training=training))


def accesses_of(table: TableConfig, dataset: PackedDataset) -> NDArray[Any]:
    """Returns the accesses per row [N] in the training split; `table` may be a part of the dataset's table."""
    counts = dataset.counts(table.name)
    if table.init.births == WHOLE:
        return counts[: table.num_embeddings]  # of a table that another rank owns, a part has one row
    runs = table.init.births.runs(0, table.num_embeddings)
    found = np.concatenate([counts[run.start : run.stop : run.step] for run in runs])
    return np.pad(found, (0, table.num_embeddings - len(found)))  # a rank without rows has one that nobody looks up


def most_rows(config: Config, table: TableConfig) -> int:
    """Returns how many different rows of the table a step may look up. A list of ids counts as one: its length is not
    known, and rows that find no slot in the cache get temporary slots."""
    return config.train.batch_size * len(table.feature_names)

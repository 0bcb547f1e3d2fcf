"""What a training step demands of the memory that holds the tables: bytes per table, and how unevenly they fall.

    B samples a step, L lookups a sample, u = different rows / lookups, b bytes a row, s bytes of optimizer state a row

    gross      B L b                       rows read if every lookup went to memory
    net        u B L b                     each different row of the batch read once
    training   3 net + 2 u B L s           read by the lookup, read and written by the update; state read and written
    density    training / (rows x b)       bytes demanded per step and byte of table

The formulas are the standard arithmetic of capacity and bandwidth; densities far apart are the first observation of
MTrainS (its own figures were not read).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotrow.config.schema import Config
from hotrow.kernels.reference import NUM_STATES
from hotrow.placement.budget import TableDemand
from hotrow.tables import TableConfig

STATE_BYTES = 4
"""Bytes of state per row of row-wise Adagrad, the usual optimizer of tables: one float32."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a training step demands of one table, in bytes."""

    table: str
    num_embeddings: int
    row_bytes: int
    state_bytes: int
    """Bytes of optimizer state per row."""
    lookups: float
    """Lookups per step: B L."""
    rows: float
    """Different rows per step: u B L."""

    @property
    def gross_bytes(self) -> float:
        """Bytes if every lookup read its row."""
        return self.lookups * self.row_bytes

    @property
    def net_bytes(self) -> float:
        """Bytes of every different row, once."""
        return self.rows * self.row_bytes

    @property
    def training_bytes(self) -> float:
        """Bytes of rows read, read again and written, and of their state read and written."""
        return 3 * self.net_bytes + 2 * self.rows * self.state_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table's weights."""
        return self.num_embeddings * self.row_bytes

    @property
    def density(self) -> float:
        """Training bytes per step over table bytes."""
        return self.training_bytes / self.table_bytes


def spread(demands: Sequence[Demand]) -> dict[str, Any]:
    """Returns how unevenly the tables' demand falls on their bytes.

    curve: (share of all table bytes, share of all training bytes) along the tables, densest first, from (0, 0).
    gini: from that curve: 0 if every byte of table is demanded equally, near 1 if a few bytes take all.
    max_over_median: the highest density over the median. bytes_of_half_the_demand: the share of the table bytes,
    densest tables first and the last one in proportion, that takes half of the demand. top_tables: the densest tables
    that together have at most 1 % and 10 % of the bytes: their number, their share of bytes and of demand. All are None
    if there is only one table.
    """
    ordered = sorted(demands, key=lambda demand: (-demand.density, demand.table))
    curve = np.zeros((len(ordered) + 1, 2))
    curve[1:, 0] = np.cumsum([demand.table_bytes for demand in ordered])
    curve[1:, 1] = np.cumsum([demand.training_bytes for demand in ordered])
    if len(ordered) < 2 or curve[-1, 1] == 0:
        return dict.fromkeys(("curve", "gini", "max_over_median", "bytes_of_half_the_demand", "top_tables"))
    curve /= curve[-1]
    densities = [demand.density for demand in ordered]
    area = float(np.sum(np.diff(curve[:, 0]) * (curve[1:, 1] + curve[:-1, 1]) / 2))
    median = float(np.median(densities))
    tops = [int(np.searchsorted(curve[:, 0], share, "right")) - 1 for share in (0.01, 0.1)]
    return {
        "curve": curve.tolist(),
        "gini": 2 * area - 1,
        "max_over_median": densities[0] / median if median else None,
        "bytes_of_half_the_demand": float(np.interp(0.5, curve[:, 1], curve[:, 0])),
        "top_tables": [{"tables": n, "bytes": float(curve[n, 0]), "demand": float(curve[n, 1])} for n in tops],
    }


def demands_of(config: Config, tables: Sequence[TableConfig], *, training: bool) -> list[TableDemand]:
    """Returns what the tables' rows take; training: with optimizer state."""
    name = config.optimizer.sparse.name

    def states(table: TableConfig) -> int:
        return NUM_STATES[name] * (1 if name == "row_wise_adagrad" else table.embedding_dim) if training else 0

    return [TableDemand(t.name, t.num_embeddings, t.num_bytes // t.num_embeddings + 4 * states(t)) for t in tables]


def record_bytes(config: Config, tables: Sequence[TableConfig]) -> dict[str, int]:
    """Returns the bytes of a row of each table, optimizer state included."""
    demands = demands_of(config, tables, training=True)
    return {table.name: demand.record_bytes for table, demand in zip(tables, demands, strict=True)}


def required_bytes(config: Config, tables: Sequence[TableConfig], *, training: bool = True) -> int:
    """Returns the bytes of all tables; training: with optimizer state."""
    return sum(table.num_rows * table.record_bytes for table in demands_of(config, tables, training=training))


def most_rows(config: Config, table: TableConfig) -> int:
    """Returns how many different rows of the table a step may look up.

    A list of ids counts as one: its length is not known, and rows that find no slot lie beside the cache.
    """
    return config.train.batch_size * len(table.feature_names)

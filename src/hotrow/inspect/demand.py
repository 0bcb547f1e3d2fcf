"""What a training step reads and writes of each table, and how unevenly that falls on the tables' bytes.

    B samples a step, L lookups a sample, u = different rows / lookups, b bytes a row, s bytes of optimizer state a row

    gross      B L b                       rows read if every lookup went to memory
    net        u B L b                     each different row of the batch read once
    training   3 net + 2 u B L s           read by the lookup, read and written by the update; state read and written
    density    training / (rows x b)       bytes demanded per step and byte of table

The formulas are the standard arithmetic of capacity and bandwidth. That densities lie far apart is the first
observation of MTrainS, whose own figures were not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    def unique_ratio(self) -> float:
        """Different rows of a step over its lookups."""
        return self.rows / self.lookups if self.lookups else 0.0

    @property
    def gross_bytes(self) -> float:
        return self.lookups * self.row_bytes

    @property
    def net_bytes(self) -> float:
        return self.rows * self.row_bytes

    @property
    def training_bytes(self) -> float:
        return 3 * self.net_bytes + 2 * self.rows * self.state_bytes

    @property
    def table_bytes(self) -> int:
        return self.num_embeddings * self.row_bytes

    @property
    def density(self) -> float:
        return self.training_bytes / self.table_bytes


def spread(demands: Sequence[Demand]) -> dict[str, Any]:
    """Returns how unevenly the tables' demand falls on their bytes.

    curve: (share of all table bytes, share of all training bytes) along the tables, densest first, from (0, 0).
    gini: from that curve: 0 if every byte of table is demanded equally, near 1 if a few bytes take all.
    max_over_median: the highest density over the median. bytes_of_half_the_demand: the share of the table bytes,
    densest tables first and the last one in proportion, that takes half of the demand. top_tables: of the densest
    tables that together have at most 1 % and 10 % of the bytes, the number, the share of bytes and of demand. All are
    None if there is only one table.
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

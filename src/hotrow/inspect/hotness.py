"""The hotness report as data: what a step demands of every table of a dataset, and how few rows take most accesses.

hotness = measure_hotness(split_accesses(PackedDataset.open("data/criteo")), batch_size=2048, embedding_dim=16)
hotness.to_json()                        # the fields of docs/inspect.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.inspect.accesses import Accesses, TableAccesses
from hotrow.inspect.demand import STATE_BYTES, Demand, spread

COVERAGE_SHARES = {"top_0.1%": 0.001, "top_1%": 0.01, "top_10%": 0.1}
CURVE_SHARES = tuple(10 ** (k / 4) for k in range(-16, 1))
"""Shares of the rows at which curves over all tables have points: four per power of ten."""


@dataclass(frozen=True)
class TableHotness:
    """One table's part of the report."""

    table: TableAccesses
    demand: Demand
    accesses: int
    """Accesses of the training split."""

    @property
    def hottest(self) -> float:
        """The share of the accesses that the hottest row takes."""
        return int(self.table.counts[0]) / self.accesses if len(self.table.counts) and self.accesses else 0.0

    @property
    def rare(self) -> float:
        """The share of the accesses that row 0 takes, for all rare ids together."""
        return self.table.num_rare / self.accesses if self.accesses else 0.0

    def coverage(self, shares: Sequence[float]) -> list[float]:
        """Returns the shares of the accesses that the hottest `shares` of the rows, at least one row each, take."""
        return coverage(self.table.counts, [self.rows_of(share) for share in shares], total=self.accesses)

    def rows_of(self, share: float) -> int:
        """Returns the number of rows in that share of the table, at least one."""
        return max(1, round(share * self.table.num_embeddings))

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.table.name,
            "features": list(self.table.features),
            "num_embeddings": self.table.num_embeddings,
            "accesses": self.accesses,
            "rare": self.rare,
            "hottest": self.hottest,
            **dict(zip(COVERAGE_SHARES, self.coverage([*COVERAGE_SHARES.values()]), strict=True)),
            "coverage": [[s, c] for s, c in zip(CURVE_SHARES, self.coverage(CURVE_SHARES), strict=True)],
            "demand": demand_json(self.demand),
        }


def coverage(counts: NDArray[Any], num_rows: Sequence[int], *, total: int) -> list[float]:
    """Sums of the first `num_rows` (rising) of `counts`, hottest first, over `total`. Allocates nothing as long as
    `counts`."""
    ends = np.minimum([0, *num_rows], len(counts)).tolist()
    sums = [int(counts[a:b].sum(dtype=np.uint64)) for a, b in pairwise(ends)]
    return [int(hot) / total if total else 0.0 for hot in np.cumsum(np.array(sums, np.uint64))]


@dataclass(frozen=True)
class Hotness:
    """The report, with the batch size and dim it was made with."""

    accesses: Accesses
    batch_size: int
    embedding_dim: int
    tables: tuple[TableHotness, ...]

    def coverage(self, shares: Sequence[float]) -> list[float]:
        """Returns the share of all accesses that the hottest `shares` of each table's rows take."""
        total = sum(own.accesses for own in self.tables)
        sums = np.sum([np.multiply(own.coverage(shares), own.accesses) for own in self.tables], axis=0)
        return [float(hot) / total if total else 0.0 for hot in sums]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-ready values; docs/inspect.md lists the fields."""
        return {
            "name": self.accesses.name,
            "batch_size": self.batch_size,
            "embedding_dim": self.embedding_dim,
            "samples": self.accesses.num_samples,
            "batches": -(-self.accesses.num_samples // self.batch_size),
            "features": sum(len(own.table.features) for own in self.tables),
            "num_embeddings": sum(own.table.num_embeddings for own in self.tables),
            "accesses": sum(own.accesses for own in self.tables),
            "coverage": dict(zip(COVERAGE_SHARES, self.coverage([*COVERAGE_SHARES.values()]), strict=True)),
            "demand": self._demand_json(),
            "tables": [own.to_json() for own in self.tables],
        }

    def _demand_json(self) -> dict[str, Any]:
        names = ("gross_bytes", "net_bytes", "training_bytes", "table_bytes")
        demands = [own.demand for own in self.tables]
        return {**{name: sum(getattr(demand, name) for demand in demands) for name in names}, **spread(demands)}


def demand_json(demand: Demand) -> dict[str, Any]:
    names = ("gross_bytes", "net_bytes", "training_bytes", "table_bytes", "density")
    fields = ("row_bytes", "state_bytes", "lookups", "rows", "unique_ratio")
    return {name: getattr(demand, name) for name in (*fields, *names)}


def measure_hotness(
    accesses: Accesses, *, batch_size: int = 2048, embedding_dim: int = 16, progress: ProgressCallback | None = None
) -> Hotness:
    """Reads every table's lookups once and reports on them. batch_size: samples per step. embedding_dim: float32
    columns of every table, for the bytes. Raises ValueError for values below 1, and whenever reading does."""
    for name, value in (("batch_size", batch_size), ("embedding_dim", embedding_dim)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    num_samples, num_tables = accesses.num_samples, len(accesses.tables)
    num_full = max(num_samples // batch_size, 1)  # means leave out a smaller last batch
    meter = ProgressMeter(progress, "inspect", num_samples)
    found = []
    for index, table in enumerate(accesses.tables):
        lookups = rows = 0
        for batch, ids in enumerate(table.batches(batch_size)):
            if batch < num_full:
                lookups, rows = lookups + len(ids), rows + len(np.unique(ids))
            meter.update((index * num_samples + min((batch + 1) * batch_size, num_samples)) // num_tables)
        demand = Demand(
            table=table.name,
            num_embeddings=table.num_embeddings,
            row_bytes=4 * embedding_dim,
            state_bytes=STATE_BYTES,
            lookups=lookups / num_full,
            rows=rows / num_full,
        )
        total = int(table.counts.sum(dtype=np.uint64)) + table.num_rare
        found.append(TableHotness(table, demand, total))
    meter.finish(num_samples)
    return Hotness(accesses, batch_size, embedding_dim, tuple(found))

"""The hotness report as data: the demand, coverage and locality of every table of a dataset or a trace.

    hotness = measure_hotness(open_accesses("data/criteo"), batch_size=2048, embedding_dim=16)
    hotness.miss_ratio("C3", 100_000)        # share of the distinct rows of batches that an LRU cache of so many misses
    hotness.to_json()                        # the fields of docs/inspect.md

Tables are read one after another, so only one table's profile is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.inspect.accesses import Accesses, TableAccesses
from hotrow.inspect.demand import STATE_BYTES, Demand, spread
from hotrow.inspect.reuse import ACCESSES, OVERLAP_BATCHES, Access, Locality, measure_locality

COVERAGE_SHARES = {"top_0.1%": 0.001, "top_1%": 0.01, "top_10%": 0.1}
CURVE_SHARES = tuple(10 ** (k / 4) for k in range(-16, 1))
"""Shares of the rows at which curves over all tables have points: four per power of ten."""
CACHE_SHARES = (0.01, 0.1)
"""Cache sizes, as shares of each table's rows, whose miss ratio is reported by name."""


@dataclass(frozen=True)
class TableHotness:
    """One table's part of the report."""

    table: TableAccesses
    demand: Demand
    locality: Locality
    accesses: int
    """Accesses of the training split, or of the whole trace."""

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
        """Returns how many rows that share of the table is, at least one."""
        return max(1, round(share * self.table.num_embeddings))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of one entry of `tables`."""
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
            "locality": locality_json(self.locality),
            "caches": [self._cache(share) for share in CACHE_SHARES],
        }

    def _cache(self, share: float) -> dict[str, float]:
        rows = self.rows_of(share)
        ratios = {f"per_{per}": self.locality.curve(per).miss_ratio(rows) for per in ACCESSES}
        return {"share": share, "capacity_rows": rows, **ratios}


def coverage(counts: NDArray[Any], num_rows: Sequence[int], *, total: int) -> list[float]:
    """Returns the sums of the first `num_rows` (rising) of `counts`, hottest first, over `total`.

    Allocates nothing as long as `counts`.
    """
    ends = np.minimum([0, *num_rows], len(counts)).tolist()
    sums = [int(counts[a:b].sum(dtype=np.uint64)) for a, b in pairwise(ends)]
    return [int(hot) / total if total else 0.0 for hot in np.cumsum(np.array(sums, np.uint64))]


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns sum(w v) / sum(w), or 0 if all weights are 0."""
    total = sum(weights)
    return sum(w * v for v, w in zip(values, weights, strict=True)) / total if total else 0.0


@dataclass(frozen=True)
class Hotness:
    """The report, with the batch size, dim, sampling and seed it was made with."""

    accesses: Accesses
    batch_size: int
    embedding_dim: int
    sample: float | None
    seed: int
    tables: tuple[TableHotness, ...]

    def miss_ratio(self, table: str, capacity_rows: int, *, per: Access = "row") -> float:
        """Returns the share of a table's accesses that an LRU cache of `capacity_rows` rows misses, first accesses too.

        per: "row" counts each distinct row of a batch as one access; "lookup" counts every lookup. Raises ValueError
        for an unknown table.
        """
        found = {own.table.name: own for own in self.tables}
        if table not in found:
            raise ValueError(f"no table is called {table!r}; the tables are {', '.join(found)}")
        return float(found[table].locality.curve(per).miss_ratio(capacity_rows))

    def miss_ratio_of_share(self, share: float, *, per: Access) -> float:
        """Returns the miss ratio over all tables, each with an LRU cache of that share of its rows, at least one."""
        weights = [own.locality.num_accesses(per) for own in self.tables]
        return weighted_mean([own.locality.curve(per).miss_ratio(own.rows_of(share)) for own in self.tables], weights)

    def first(self, *, per: Access) -> float:
        """Returns the share of first accesses over all tables; a cache of any size misses them."""
        weights = [own.locality.num_accesses(per) for own in self.tables]
        return weighted_mean([own.locality.curve(per).first for own in self.tables], weights)

    def distances(self, *, per: Access) -> list[tuple[int, float]]:
        """Returns the reuse distances of all tables, each within its own table: see `MissRatioCurve.distances`."""
        curves = [own.locality.curve(per) for own in self.tables]
        weights = [own.locality.num_accesses(per) for own in self.tables]
        most = max(int(curve.capacities[-1]) - 1 for curve in curves)
        rows = zip(*(curve.distances(most) for curve in curves), strict=True)
        return [(row[0][0], weighted_mean([share for _, share in row], weights)) for row in rows]

    def coverage(self, shares: Sequence[float]) -> list[float]:
        """Returns the share of all accesses that the hottest `shares` of each table's rows take."""
        total = sum(own.accesses for own in self.tables)
        sums = np.sum([np.multiply(own.coverage(shares), own.accesses) for own in self.tables], axis=0)
        return [float(hot) / total if total else 0.0 for hot in sums]

    def overlap(self, num_batches: int) -> float | None:
        """Returns the mean of the tables' overlaps, weighted by rows per batch; None if no table has one."""
        pairs = [(own.locality.overlap[num_batches], own.locality.rows_per_batch) for own in self.tables]
        known = [(value, weight) for value, weight in pairs if value is not None]
        return weighted_mean([value for value, _ in known], [weight for _, weight in known]) if known else None

    def windows(self) -> list[dict[str, float]]:
        """Returns the mean of the tables' windows, weighted by lookups; only tables that have all windows count."""
        most = max(len(own.locality.windows) for own in self.tables)
        own = [table.locality for table in self.tables if len(table.locality.windows) == most]
        weights = [locality.num_lookups for locality in own]
        rows = ([asdict(locality.windows[k]) for locality in own] for k in range(most))
        names = ("first_hot_set", "own_hot_set")
        return [{name: weighted_mean([w[name] for w in row], weights) for name in names} for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-ready values; docs/inspect.md lists the fields."""
        return {
            "name": self.accesses.name,
            "kind": self.accesses.kind,
            "batch_size": self.batch_size,
            "embedding_dim": self.embedding_dim,
            "sample": self.sample,
            "seed": self.seed,
            "samples": self.accesses.num_samples,
            "batches": self.tables[0].locality.num_batches,
            "features": sum(len(own.table.features) for own in self.tables),
            "num_embeddings": sum(own.table.num_embeddings for own in self.tables),
            "accesses": sum(own.accesses for own in self.tables),
            "coverage": dict(zip(COVERAGE_SHARES, self.coverage([*COVERAGE_SHARES.values()]), strict=True)),
            "demand": self._demand_json(),
            "locality": self._locality_json(),
            "tables": [own.to_json() for own in self.tables],
        }

    def _demand_json(self) -> dict[str, Any]:
        names = ("gross_bytes", "net_bytes", "training_bytes", "table_bytes")
        demands = [own.demand for own in self.tables]
        return {**{name: sum(getattr(demand, name) for demand in demands) for name in names}, **spread(demands)}

    def _locality_json(self) -> dict[str, Any]:
        lookups = sum(own.locality.lookups_per_batch for own in self.tables)
        rows = sum(own.locality.rows_per_batch for own in self.tables)
        return {
            "unique_ratio": rows / lookups if lookups else 0.0,
            "overlap": {str(k): self.overlap(k) for k in OVERLAP_BATCHES},
            "miss_ratio": {
                f"per_{per}": [[share, self.miss_ratio_of_share(share, per=per)] for share in CURVE_SHARES]
                for per in ACCESSES
            },
            "distances": {f"per_{per}": _pairs(self.distances(per=per)) for per in ACCESSES},
            "first": {f"per_{per}": self.first(per=per) for per in ACCESSES},
            "windows": self.windows(),
            "exact": all(own.locality.rate == 1 for own in self.tables),
        }


def demand_json(demand: Demand) -> dict[str, Any]:
    """Returns a demand and the figures that follow from it."""
    names = ("gross_bytes", "net_bytes", "training_bytes", "table_bytes", "density")
    fields = ("row_bytes", "state_bytes", "lookups", "rows")
    return {name: getattr(demand, name) for name in (*fields, *names)}


def locality_json(locality: Locality) -> dict[str, Any]:
    """Returns a locality with its curves thinned."""
    return {
        "unique_ratio": locality.unique_ratio,
        "rate": locality.rate,
        "rows_followed": locality.rows_followed,
        "first": {f"per_{per}": locality.curve(per).first for per in ACCESSES},
        "overlap": {str(k): share for k, share in locality.overlap.items()},
        "distances": {f"per_{per}": _pairs(locality.curve(per).distances()) for per in ACCESSES},
        "miss_ratio": {"per_lookup": locality.by_lookup.to_json(), "per_row": locality.by_row.to_json()},
        "windows": [asdict(window) for window in locality.windows],
    }


def _pairs(distances: Sequence[tuple[int, float]]) -> list[list[float]]:
    return [list(pair) for pair in distances]


def measure_hotness(
    accesses: Accesses,
    *,
    batch_size: int = 2048,
    embedding_dim: int = 16,
    sample: float | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Hotness:
    """Reads every table's lookups once and reports on them.

    batch_size: samples per step (for a trace: lookups). embedding_dim: float32 columns of every table, for the bytes.
    sample: the share of each table's rows whose reuse is followed, at least 8,192 rows; None follows all, up to 2^20
    rows of a table. seed: chooses the rows followed. Raises ValueError for values out of range, and whenever reading
    does.
    """
    if embedding_dim < 1:
        raise ValueError(f"embedding_dim is {embedding_dim}; it must be at least 1")
    num_samples, num_tables = accesses.num_samples, len(accesses.tables)
    meter = ProgressMeter(progress, "inspect", num_samples)
    found = []
    for index, table in enumerate(accesses.tables):
        locality = measure_locality(
            table,
            num_samples=num_samples,
            batch_size=batch_size,
            sample=sample,
            seed=seed,
            advance=lambda batches, index=index: meter.update(  # type: ignore[misc]
                (index * num_samples + min(batches * batch_size, num_samples)) // num_tables
            ),
        )
        demand = Demand(
            table=table.name,
            num_embeddings=table.num_embeddings,
            row_bytes=4 * embedding_dim,
            state_bytes=STATE_BYTES,
            lookups=locality.lookups_per_batch,
            rows=locality.rows_per_batch,
        )
        total = int(table.counts.sum(dtype=np.uint64)) + table.num_rare
        found.append(TableHotness(table, demand, locality, total))
    meter.finish(num_samples)
    return Hotness(accesses, batch_size, embedding_dim, sample, seed, tuple(found))

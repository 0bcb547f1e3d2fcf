"""What `hotrow inspect --hot` measures: the three ways to choose hot rows side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import WAYS, calibrate, find_hot
from hotrow.hot.hot_set import HotSet
from hotrow.kernels.types import Algorithm
from hotrow.setup.demand import record_bytes


def record_bytes_of(dataset: PackedDataset, *, embedding_dim: int, optimizer: Algorithm) -> dict[str, int]:
    """Returns the bytes of a row of each table: float32 weights and optimizer state. Raises ValueError for an unknown
    optimizer."""
    return {table.name: record_bytes(table, optimizer) for table in dataset.table_configs(embedding_dim)}


def compare_ways(
    dataset: PackedDataset, budget_bytes: int, *, embedding_dim: int, optimizer: Algorithm = "sgd", seed: int = 0
) -> dict[str, Any]:
    """Tries every way within the same budget; docs/inspect.md lists the fields. If a way finds no hot set within the
    budget, its field `error` says why. Raises ValueError if no way finds one."""
    record_bytes = record_bytes_of(dataset, embedding_dim=embedding_dim, optimizer=optimizer)
    ways = []
    for how in WAYS:
        try:
            calibration = calibrate(dataset, how, budget_bytes, record_bytes=record_bytes, seed=seed)
        except ValueError as error:
            if how != "sampled":  # the others fail only if no way can succeed
                raise
            ways.append({"name": how, "budget_bytes": budget_bytes, "error": str(error)})
            continue
        found = find_hot(dataset, calibration)
        ways.append({**found.to_json(), **_accesses(dataset, found.rows)})
    return {"budget_bytes": budget_bytes, "optimizer": optimizer, "embedding_dim": embedding_dim, "ways": ways}


def _accesses(dataset: PackedDataset, hot: HotSet) -> Mapping[str, float]:
    """Returns the share of the training accesses that fall on hot rows; nothing if the dataset carries no counts."""
    if not dataset.has_counts:
        return {}
    counts = {name: dataset.counts(name) for name in hot.rows}
    hits = sum(
        int(counts[name][: rows.prefix].sum(dtype="u8")) + int(counts[name][rows.listed].sum(dtype="u8"))
        for name, rows in hot.rows.items()
    )
    total = sum(int(own.sum(dtype="u8")) for own in counts.values())
    return {"hot_accesses": hits / total if total else 0.0}

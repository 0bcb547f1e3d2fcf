"""The three ways to calibrate, side by side: what each takes, and what it covers of the training samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import WAYS, calibrate
from hotrow.hot.find import find_hot
from hotrow.hot.hot_set import HotSet
from hotrow.kernels.reference import NUM_STATES, Algorithm


def record_bytes_of(dataset: PackedDataset, *, embedding_dim: int, optimizer: Algorithm) -> dict[str, int]:
    """Bytes of a row of each table: float32 weights and the optimizer's state. Raises ValueError for no optimizer."""
    if optimizer not in NUM_STATES:
        raise ValueError(f"optimizer is {optimizer!r}; choose one of {', '.join(NUM_STATES)}")
    state = NUM_STATES[optimizer] * (1 if optimizer == "row_wise_adagrad" else embedding_dim)
    return {table.name: 4 * (embedding_dim + state) for table in dataset.info.tables}


def compare_ways(
    dataset: PackedDataset,
    budget_bytes: int,
    *,
    embedding_dim: int,
    optimizer: Algorithm = "sgd",
    seed: int = 0,
    threads: int | None = None,
) -> dict[str, Any]:
    """Every way within the same budget; docs/inspect.md lists the fields.

    A way that finds no hot set in the budget says why in `error`. Raises
    ValueError where none can.
    """
    record_bytes = record_bytes_of(dataset, embedding_dim=embedding_dim, optimizer=optimizer)
    ways = []
    for how in WAYS:
        try:
            calibration = calibrate(dataset, how, budget_bytes, record_bytes=record_bytes, seed=seed)
        except ValueError as error:
            if how != "sampled":  # the others only fail where no way can work
                raise
            ways.append({"name": how, "budget_bytes": budget_bytes, "error": str(error)})
            continue
        found = find_hot(dataset, calibration, threads=threads)
        ways.append({**found.to_json(), **_accesses(dataset, found.rows)})
    return {"budget_bytes": budget_bytes, "optimizer": optimizer, "embedding_dim": embedding_dim, "ways": ways}


def _accesses(dataset: PackedDataset, hot: HotSet) -> Mapping[str, float]:
    """Share of the training accesses that fall on hot rows, where the dataset carries counts."""
    if not dataset.has_counts:
        return {}
    counts = {name: dataset.counts(name) for name in hot.rows}
    hits = sum(
        int(counts[name][: rows.prefix].sum(dtype="u8")) + int(counts[name][rows.listed].sum(dtype="u8"))
        for name, rows in hot.rows.items()
    )
    total = sum(int(own.sum(dtype="u8")) for own in counts.values())
    return {"hot_accesses": hits / total if total else 0.0}

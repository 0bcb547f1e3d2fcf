"""What the study `hot` counts: hot rows, hot samples, and what crosses the link in an epoch; nothing is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.packed.format import Ragged
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.cached import cached_crossing
from hotrow.hot.calibrate import calibrate
from hotrow.hot.classify import hot_samples
from hotrow.hot.compare import record_bytes_of
from hotrow.hot.find import find_hot
from hotrow.hot.hot_set import HotSet
from hotrow.hot.link import crossing
from hotrow.hot.table_use import counts_of
from hotrow.hot.threshold import by_threshold
from hotrow.models.tbsm import SUFFIX as HISTORY
from hotrow.placement.budget import TableDemand, slot_bytes
from hotrow.plan.solve import plan_by_counts

if TYPE_CHECKING:
    from hotrow.study.hot import HotCell

SWAPS = 4
"""Copies of the hot rows in an epoch of turns of 50 %: to the device and back, twice."""


def counted(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """The cell's figures. Raises ValueError where no hot set fits its budget, or no batch its slots."""
    return coverage(cell, dataset) if cell.kind == "coverage" else cached(cell, dataset)


def sizes_of(cell: HotCell, dataset: PackedDataset) -> tuple[dict[str, int], int]:
    """Bytes of a row of each table with its states, and of all rows."""
    record_bytes = record_bytes_of(dataset, embedding_dim=cell.embedding_dim, optimizer=cell.optimizer)
    return record_bytes, sum(table.num_embeddings * record_bytes[table.name] for table in dataset.info.tables)


def coverage(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """What a hot set takes and covers, and what an epoch by it sends over the link."""
    record_bytes, table_bytes = sizes_of(cell, dataset)
    budget = None if cell.rows == "threshold" else int(cell.amount * table_bytes)
    if budget is None:
        hot = by_threshold(dataset, cell.amount, record_bytes=record_bytes, small_table_bytes=cell.small_table_bytes)
        is_hot, times = hot_samples(dataset, hot), {}
    else:
        small = cell.small_table_bytes
        calibration = calibrate(dataset, cell.rows, budget, record_bytes=record_bytes, small_table_bytes=small)
        found = find_hot(dataset, calibration)
        hot, is_hot = found.rows, found.is_hot
        times = {"calibrate_s": calibration.seconds, "classify_s": found.classify_s}
    return {
        "budget_bytes": budget,
        "table_bytes": table_bytes,
        "hot_bytes": hot.num_bytes,
        "hot_rows": hot.num_rows,
        "hot_samples": float(is_hot.mean()),
        **times,
        **link_bytes(dataset, hot, is_hot, cell.embedding_dim),
    }


def link_bytes(dataset: PackedDataset, hot: HotSet, is_hot: NDArray[np.bool_], embedding_dim: int) -> dict[str, Any]:
    """Bytes over the link in an epoch of turns of 50 %, and in one of the hybrid."""
    num_samples, num_hot = len(is_hot), int(is_hot.sum())
    sync = SWAPS * hot.num_bytes if 0 < num_hot < num_samples else 2 * hot.num_bytes if num_hot else 0
    crossed = sync + sum(sent(dataset, num_hot, embedding_dim, hot=True))
    crossed += sum(sent(dataset, num_samples - num_hot, embedding_dim, hot=False))
    hybrid = sum(sent(dataset, num_samples, embedding_dim, hot=False))
    return {"link_bytes": crossed, "sync_bytes": sync, "hybrid_bytes": hybrid, "hybrid_ratio": hybrid / max(1, crossed)}


def sent(dataset: PackedDataset, num_samples: int, embedding_dim: int, *, hot: bool) -> tuple[int, int]:
    """Bytes to the device and from it, of so many samples of the training split; of ids the mean of a sample's."""
    num_ids = round(num_samples * num_lookups(dataset) / max(1, dataset.split("train").num_rows))
    num_vectors = num_ids if has_histories(dataset) else num_samples * len(dataset.info.features)
    inputs = num_samples * 4 * (1 + len(dataset.info.dense))
    return crossing(row_bytes=4 * embedding_dim * num_vectors, input_bytes=inputs, id_bytes=4 * num_ids, hot=hot)


def has_histories(dataset: PackedDataset) -> bool:
    """Whether FAE trains a TBSM on it, which takes the row of every id, and not a DLRM, which takes them pooled."""
    return any(name.endswith(HISTORY) for name in dataset.info.feature_names)


def num_lookups(dataset: PackedDataset) -> int:
    """Of the training split, over all tables."""
    if dataset.has_counts:
        return sum(int(dataset.counts(table.name).sum(dtype="u8")) for table in dataset.info.tables)
    split = dataset.split("train")
    blocks = (split.block(index) for index in range(split.num_blocks))
    return sum(len(ids.values) if isinstance(ids, Ragged) else len(ids) for block in blocks for ids in block.ids)


def cached(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """What an epoch in shuffled order sends over the link with slots on the device, shared out by the counts."""
    record_bytes, table_bytes = sizes_of(cell, dataset)
    tables, split = dataset.info.tables, dataset.split("train")
    demands = [TableDemand(table.name, table.num_embeddings, record_bytes[table.name]) for table in tables]
    least = {t.name: cell.batch_size * sum(f.table == t.name for f in dataset.info.features) for t in tables}
    plan = plan_by_counts(
        counts_of(dataset),
        num_steps=split.num_rows / cell.batch_size,
        depth=0,
        least_cached=least,
    )
    budget = int(cell.amount * table_bytes)
    slots = {table.name: own for table, own in zip(tables, plan(demands, slot_bytes(budget)), strict=True)}
    batches = Loader(split, cell.batch_size, shuffle_seed=1).epoch(0)
    found = cached_crossing(batches, dataset.info, slots, record_bytes)
    crossed = found.to_device_bytes + found.from_device_bytes
    hybrid = sum(sent(dataset, split.num_rows, cell.embedding_dim, hot=False))
    return {
        "budget_bytes": budget,
        "table_bytes": table_bytes,
        "hit_rows": found.hit_rows / found.rows,
        "link_bytes": crossed,
        "hybrid_bytes": hybrid,
        "hybrid_ratio": hybrid / crossed,
    }

"""The cells of the study `hot`, and their counts: hot rows, hot samples, bytes over the link.

Nothing is trained here; benchmarks.hot_study trains. Cells are measured on packed datasets, or on synthetic ones in the
shapes of public click logs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.hot_lab import by_threshold, cached_crossing, crossing
from benchmarks.synthetic import opened
from benchmarks.synthetic_config import SyntheticConfig, avazu, criteo_kaggle, criteo_terabyte
from hotrow.base.files import parse_bytes
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.pipeline import prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.hot.calibrate import calibrate, find_hot
from hotrow.hot.hot_set import HotSet, counts_of, hot_samples
from hotrow.inspect.hot_rows import record_bytes_of
from hotrow.kernels.types import Algorithm
from hotrow.models.spec import HISTORY
from hotrow.placement.budget import DeviceMemory, TableDemand
from hotrow.setup.divide import plan_by_counts

SWAPS = 4
"""Copies of the hot rows in an epoch with turns of 50 %: to the device and back, twice."""


SHAPES: dict[str, Callable[..., SyntheticConfig]] = {
    "kaggle": criteo_kaggle,
    "terabyte": criteo_terabyte,
    "avazu": avazu,
}
"""Synthetic data by the name that the studies use."""


def make_shape(name: str, num_samples: int, scale: float, out: Path) -> Path:
    """Packs synthetic data into the folder `out`, split by time with 80 % for training; every id gets a row."""
    config = SHAPES[name](num_samples, scale=scale)
    ids = [table.name for table in config.tables]
    schema = parse_schema(
        {
            "label": "label",
            "time": "time",
            "dense": [column.name for column in config.dense],
            "categorical": ids,
            "split": {"kind": "time"},
        },
        where=config.name,
    )
    prepare(opened(config, schema), out)
    return out


@dataclass(frozen=True, kw_only=True)
class HotCell:
    """One measurement: a hot set of a dataset, or an epoch by it."""

    group: str
    kind: str
    """coverage | cached | quality"""
    source: str
    """A shape, or the path of a packed dataset."""
    rows: str
    """exact | sampled | covering | threshold; of a cached cell: which rows keep their slots, by exact counts"""
    amount: float
    """Share of the tables' bytes; for threshold, percent of a table's accesses."""
    num_samples: int = 1_000_000
    """Samples of a shape, all splits together."""
    scale: float = 0.1
    """Factor for the rows of a shape's tables."""
    small_table: str = "100KiB"
    """Smaller tables are hot as a whole. A tenth of FAE's limit, as a shape has a tenth of the rows."""
    embedding_dim: int = 16
    optimizer: Algorithm = "row_wise_adagrad"
    schedule: str = "none"
    rate: float = 50
    """Percent of the hot or cold samples in one turn; for fae in the first."""
    batch_size: int = 2048
    decay: float = 0.0
    """Share of the steps, at the end, over which the learning rates fall as in the reference DLRM."""
    width: int | None = None
    """Width of one hidden layer below and one above the interaction, instead of the default layers."""
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds is {self.seeds}; differences between runs need at least 2")

    @property
    def small_table_bytes(self) -> int:
        """`small_table` in bytes."""
        return parse_bytes(self.small_table)

    @property
    def name(self) -> str:
        """The name of the data."""
        return self.source if self.source in SHAPES else Path(self.source).name

    @property
    def key(self) -> str:
        """The name of the cell in files."""
        shape = f"{self.num_samples}x{self.scale:g}" if self.source in SHAPES else "all"
        decay = f"-{self.decay:g}" if self.decay else ""
        width = f"/{self.width} wide" if self.width else ""
        schedule = f"/{self.schedule}{self.rate:g}{decay}x{self.seeds}/{self.batch_size}{width}"
        schedule = schedule if self.kind == "quality" else ""
        return f"{self.group}/{self.name}/{shape}/{self.rows}/{self.amount:g}/{self.embedding_dim}{schedule}"


def counted(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """Returns the cell's figures. Raises ValueError if no hot set fits its budget, or no batch its slots."""
    return coverage(cell, dataset) if cell.kind == "coverage" else cached(cell, dataset)


def sizes_of(cell: HotCell, dataset: PackedDataset) -> tuple[dict[str, int], int]:
    """Returns the bytes of a row with its states, by table, and the bytes of all rows."""
    record_bytes = record_bytes_of(dataset, embedding_dim=cell.embedding_dim, optimizer=cell.optimizer)
    return record_bytes, sum(table.num_embeddings * record_bytes[table.name] for table in dataset.info.tables)


def coverage(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """Returns what a hot set takes and covers, and what an epoch with it sends over the link."""
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
    """Returns the bytes over the link in an epoch with turns of 50 %, and in an epoch of the hybrid."""
    num_samples, num_hot = len(is_hot), int(is_hot.sum())
    sync = SWAPS * hot.num_bytes if 0 < num_hot < num_samples else 2 * hot.num_bytes if num_hot else 0
    crossed = sync + sum(sent(dataset, num_hot, embedding_dim, hot=True))
    crossed += sum(sent(dataset, num_samples - num_hot, embedding_dim, hot=False))
    hybrid = sum(sent(dataset, num_samples, embedding_dim, hot=False))
    return {"link_bytes": crossed, "sync_bytes": sync, "hybrid_bytes": hybrid, "hybrid_ratio": hybrid / max(1, crossed)}


def sent(dataset: PackedDataset, num_samples: int, embedding_dim: int, *, hot: bool) -> tuple[int, int]:
    """Returns the bytes to and from the device for `num_samples` training samples with a mean number of ids."""
    num_ids = round(num_samples * num_lookups(dataset) / max(1, dataset.split("train").num_rows))
    num_vectors = num_ids if has_histories(dataset) else num_samples * len(dataset.info.features)
    inputs = num_samples * 4 * (1 + len(dataset.info.dense))
    return crossing(row_bytes=4 * embedding_dim * num_vectors, input_bytes=inputs, id_bytes=4 * num_ids, hot=hot)


def has_histories(dataset: PackedDataset) -> bool:
    """Returns whether FAE trains a TBSM on it, which takes the row of every id; a DLRM takes pooled rows."""
    return any(name.endswith(HISTORY) for name in dataset.info.feature_names)


def num_lookups(dataset: PackedDataset) -> int:
    """Returns the number of lookups in the training split, over all tables."""
    if dataset.has_counts:
        return sum(int(dataset.counts(table.name).sum(dtype="u8")) for table in dataset.info.tables)
    split = dataset.split("train")
    blocks = (split.block(index) for index in range(split.num_blocks))
    return sum(len(ids.values) if isinstance(ids, Ragged) else len(ids) for block in blocks for ids in block.ids)


def cached(cell: HotCell, dataset: PackedDataset) -> dict[str, Any]:
    """Returns what a shuffled epoch sends over the link with slots on the device; counts decide each table's slots."""
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
    found_slots = DeviceMemory(hbm=budget, device="cpu", plan=plan).slots(demands)
    slots = {table.name: own for table, own in zip(tables, found_slots, strict=True)}
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

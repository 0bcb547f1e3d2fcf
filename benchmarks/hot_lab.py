"""The laboratory of hot rows: what benchmarks and studies need, and no run does.

interval          what the mean of a few runs tells (Student's t)
by_threshold      hot rows by FAE's own parameter, a share of their table's accesses
crossing, Link    bytes between host and device when hot and cold batches train in phases, counted and not timed
cached_crossing   the same for mixed batches with slots on the device
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hotrow.batch import Batch
from hotrow.data.packed.format import DatasetInfo
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotRows, HotSet, tables_of
from hotrow.placement.budget import TableSlots
from hotrow.placement.slots import COUNTS, Span, directory_of


def interval(mean: float, error: float, num: int) -> tuple[float, float]:
    """Returns the 95 % interval of the true mean, from the mean of `num` >= 2 runs and its standard error."""
    width = float(stats.t.ppf(0.975, num - 1)) * error
    return mean - width, mean + width


def by_threshold(
    dataset: PackedDataset,
    percent: float,
    *,
    record_bytes: Mapping[str, int],
    small_table_bytes: int = SMALL_TABLE_BYTES,
) -> HotSet:
    """Returns the rows that take at least `percent` of the accesses to their table, by exact counts.

    Small tables are hot whole. As in `calibrate`, row 0, which stands for all rare ids, is hot, and other rows without
    an access are cold. Raises ValueError unless percent is from 0 to 100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; a threshold is from 0 to 100 percent of a table's accesses")
    rows = {}
    for table in tables_of(dataset, record_bytes, small_table_bytes=small_table_bytes):
        least = max(1.0, percent / 100 * float(table.counts.sum(dtype="u8")))
        first = 1 + int(np.count_nonzero(table.counts[1:] >= least))
        rows[table.name] = HotRows.first(len(table.counts)) if table.is_small else table.first(first)
    return HotSet(how="threshold", rows=rows, record_bytes=record_bytes)


# ---- bytes between host and device, in phases
#
# A hot batch sends its ids, dense inputs and labels to the device. A cold one sends its rows (pooled, one for each
# sample and feature, or one for each id of a sequence), dense inputs and labels, and gets the rows' gradients back. A
# swap sends the hot rows with their optimizer states over, or back. FAE (Adnan et al., VLDB'22) leaves gradients, dense
# inputs and labels out of its table of transfers; counting them changes both sides.


def crossing(*, row_bytes: int, input_bytes: int, id_bytes: int, hot: bool) -> tuple[int, int]:
    """Returns the bytes that a batch sends to the device and gets back."""
    return (input_bytes + id_bytes, 0) if hot else (input_bytes + row_bytes, row_bytes)


@dataclass
class Link:
    """Bytes of the batches so far, beside those of the same batches with all embeddings on the CPU ("hybrid")."""

    batch_bytes: int = 0
    hybrid_bytes: int = 0

    def count(self, batch: Batch, *, row_bytes: int, hot: bool, uploads: int = 1) -> None:
        """Counts a batch. row_bytes: of its rows; uploads: how many times the ids of a hot batch go over."""
        offsets = 0 if batch.sparse.one_hot else batch.sparse.offsets.nbytes
        inputs, ids = batch.dense.nbytes + batch.label.nbytes, uploads * (batch.sparse.values.nbytes + offsets)
        self.batch_bytes += sum(crossing(row_bytes=row_bytes, input_bytes=inputs, id_bytes=ids, hot=hot))
        self.hybrid_bytes += sum(crossing(row_bytes=row_bytes, input_bytes=inputs, id_bytes=ids, hot=False))


# ---- bytes between host and device, with slots
#
# Every batch sends dense inputs, labels and ids over, and the rows that the device lacks;
# evicted rows come back. At the end updated rows that lie on the device come back. The directory is that of a run, so
# the rows that come and leave are those of a run that looks no further ahead than one batch.

ID_BYTES = 4
"""Bytes of an id."""
MOVE_BYTES = 8
"""Bytes of the slot number sent beside a row that comes or leaves."""
POINTER_BYTES = 16
"""Bytes of an entry of the map on the device: for a row that comes, and for one that makes room."""


@dataclass
class Cached:
    """Bytes of an epoch, each way, and what its batches found on the device."""

    to_device_bytes: int = 0
    from_device_bytes: int = 0
    rows: int = 0
    """Distinct rows of a batch, summed over batches and tables."""
    hit_rows: int = 0
    """The part of `rows` that was on the device already."""


def cached_crossing(
    batches: Iterable[Batch], info: DatasetInfo, slots: Mapping[str, TableSlots], record_bytes: Mapping[str, int]
) -> Cached:
    """Counts an epoch. slots: pinned and cached slots of each table; record_bytes: of a row with its states.

    Raises ValueError, naming the table, if a batch looks up more rows than there are slots.
    """
    names = [table.name for table in info.tables]
    by_table = sorted((names.index(feature.table), feature.name) for feature in info.features)
    directory = directory_of([table.num_embeddings for table in info.tables], [slots[name] for name in names])
    found = Cached()
    for batch in batches:
        found.to_device_bytes += batch.dense.nbytes + batch.label.nbytes + ID_BYTES * len(batch.sparse.values)
        spans = [(t, batch.sparse.span(name)) for t, name in by_table]
        _train(directory, batch.sparse.values.numpy(), [(t, span.start, span.stop) for t, span in spans], names)
    directory.clear_dirty()  # as if they were written
    counts = dict(zip(COUNTS, np.array(directory.counts).T, strict=True))
    record, pinned = (np.array(own) for own in ([record_bytes[n] for n in names], [slots[n].pinned for n in names]))
    coming = pinned + counts["read_rows"]
    leaving = counts["written_rows"]
    pointers = counts["read_rows"] + counts["evicted_rows"]
    sent = coming * (record + MOVE_BYTES) + leaving * MOVE_BYTES + pointers * POINTER_BYTES
    found.to_device_bytes += int(sent.sum())
    found.from_device_bytes += int((leaving * record).sum())
    found.rows, found.hit_rows = int(counts["rows"].sum()), int(counts["hit_rows"].sum())
    return found


def _train(directory: Any, ids: NDArray[np.int64], spans: Sequence[Span], names: Sequence[str]) -> None:
    named = directory.find(ids, spans)
    assert named is not None, "packed ids are rows"
    for name, missing, rows in zip(names, directory.missing(named), named.numbers, strict=True):
        if missing > 0:
            raise ValueError(f"a batch looks up {rows:,} rows of table {name!r}, {missing:,} more than have room")
    directory.admit(named)
    directory.release(named, updated=True)

"""What an epoch of mixed batches sends over the link where the device has slots before the tables: counted, not run.

    each batch     dense inputs, labels and, for lookup and update, slot numbers over; rows it lacks over, rows back
    at the end     rows that were updated and lie on the device, back

The directories are those of memory/directory.py, so the rows that come and leave are those that a run on a device
moves which looks no further ahead than a batch; link.py has the other ways to train.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrow.batch import Batch
from hotrow.data.packed.format import DatasetInfo
from hotrow.placement.budget import TableSlots
from hotrow.placement.slots import Directory

SLOT_BYTES = 4
"""Of a slot's number beside a lookup, which is sent twice: for the lookup and for its update."""
MOVE_BYTES = 8
"""Of a slot's number beside a row that comes or leaves."""


@dataclass
class Cached:
    """Bytes of an epoch, each way, and what its batches found."""

    to_device_bytes: int = 0
    from_device_bytes: int = 0
    rows: int = 0
    """Different rows of a batch, over all batches and tables."""
    hit_rows: int = 0
    """Of these, on the device already."""


def cached_crossing(
    batches: Iterable[Batch], info: DatasetInfo, slots: Mapping[str, TableSlots], record_bytes: Mapping[str, int]
) -> Cached:
    """Count an epoch. slots: of each table, rows in front for good and others; record_bytes: of a row with its states.

    Raises ValueError, naming the table, where a batch looks up more rows than there are slots.
    """
    features = {table.name: [f.name for f in info.features if f.table == table.name] for table in info.tables}
    directories = {table.name: Directory(table.num_embeddings, slots[table.name]) for table in info.tables}
    found = Cached()
    for batch in batches:
        found.to_device_bytes += batch.dense.nbytes + batch.label.nbytes + 2 * SLOT_BYTES * len(batch.sparse.values)
        for name, directory in directories.items():
            _train(directory, _rows(batch, features[name]), name)
    for name, directory in directories.items():
        counts, size = directory.counts, record_bytes[name]
        coming = slots[name].pinned + counts["read_rows"]
        leaving = counts["written_rows"] + int(directory.dirty.sum())
        found.to_device_bytes += coming * (size + MOVE_BYTES) + leaving * MOVE_BYTES
        found.from_device_bytes += leaving * size
        found.rows += counts["rows"]
        found.hit_rows += counts["hit_rows"]
    return found


def _rows(batch: Batch, features: Iterable[str]) -> NDArray[np.int64]:
    """Different rows that the features, of one table, look up."""
    ids = batch.sparse.values.numpy()
    return np.unique(np.concatenate([ids[batch.sparse.span(name)] for name in features])).astype(np.int64)


def _train(directory: Directory, rows: NDArray[np.int64], name: str) -> None:
    if missing := directory.num_short(rows):
        raise ValueError(f"a batch looks up {len(rows):,} rows of table {name!r}, {missing:,} more than have room")
    slots, _ = directory.admit(rows)
    directory.release(slots, updated=True)

"""Bytes through slots on a device, as benchmarks.hot_lab counts them, against the slots of a run and a set of ids."""

import pytest
from gpu_device import DEVICE, slow_interpreted

import hotrow
from benchmarks.hot_lab import ID_BYTES, MOVE_BYTES, POINTER_BYTES, Link, cached_crossing
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.optim import RowWiseAdagrad
from hotrow.placement.budget import TableSlots
from packed_data import planted

RECORD = {"t0": 4 * 4 + 4, "t1": 4 * 4 + 4, "t2": 4 * 4 + 4}
SLOTS = {"t0": TableSlots(2, 46), "t1": TableSlots(20, 0), "t2": TableSlots(0, 50)}
dataset = planted(opened=True, counts=True, rows={"train": 500, "val": 9, "test": 9})


def loader(dataset: PackedDataset) -> Loader:
    return Loader(dataset.split("train"), 32, shuffle_seed=3)


@slow_interpreted
def test_rows_that_move_are_those_of_a_run(dataset: PackedDataset) -> None:
    info = dataset.info
    slots = {table.name: SLOTS[table.name] for table in info.tables}
    found = cached_crossing(loader(dataset).epoch(0), info, slots, RECORD)
    memory = hotrow.DeviceMemory(hbm="1MiB", device=str(DEVICE), plan=lambda *_: list(slots.values()))
    emb = hotrow.EmbeddingCollection(dataset.table_configs(4), memory=memory, seed=1)
    optimizer = RowWiseAdagrad(emb, lr=0.1)
    inputs = num_ids = 0
    for batch in loader(dataset).epoch(0):
        emb(batch.sparse).sum().backward()
        optimizer.step()
        inputs += batch.dense.nbytes + batch.label.nbytes
        num_ids += len(batch.sparse.values)
    emb.placement.flush()
    counts = emb.placement.counters()
    for name, key in (("rows", "rows"), ("hit_rows", "hit_rows")):
        assert getattr(found, name) == sum(own[key] for own in counts.values())
    coming = {name: slots[name].pinned + own["read_rows"] for name, own in counts.items()}
    leaving = {name: own["written_rows"] for name, own in counts.items()}
    assert 0 < found.hit_rows < found.rows and sum(own["evicted_rows"] for own in counts.values()) > 100
    assert found.from_device_bytes == sum(leaving[name] * RECORD[name] for name in RECORD)
    moves = sum(coming[name] * (RECORD[name] + MOVE_BYTES) + leaving[name] * MOVE_BYTES for name in RECORD)
    pointers = sum(own["read_rows"] + own["evicted_rows"] for own in counts.values())
    assert found.to_device_bytes == inputs + ID_BYTES * num_ids + moves + POINTER_BYTES * pointers


def test_with_room_for_all_each_row_comes_once_and_leaves_once(dataset: PackedDataset) -> None:
    info = dataset.info
    named = {table.name: set[int]() for table in info.tables}
    for batch in loader(dataset).epoch(0):
        for feature in info.features:
            named[feature.table] |= set(batch.sparse.values[batch.sparse.span(feature.name)].tolist())
    slots = {table.name: TableSlots(0, table.num_embeddings) for table in info.tables}
    found = cached_crossing(loader(dataset).epoch(0), info, slots, RECORD)
    assert found.from_device_bytes == sum(len(rows) * RECORD[name] for name, rows in named.items())
    assert found.rows - found.hit_rows == sum(map(len, named.values()))


def test_a_batch_without_room_is_refused_by_name(dataset: PackedDataset) -> None:
    few = {table.name: TableSlots(0, 3) for table in dataset.info.tables}
    with pytest.raises(ValueError, match=r"a batch looks up \d+ rows of table 't\d', \d+ more than have room"):
        cached_crossing(loader(dataset).epoch(0), dataset.info, few, RECORD)


def test_bytes_of_hot_and_cold_batches_by_hand(dataset: PackedDataset) -> None:
    """Three dense inputs and a label; pooled rows and their gradients of a cold batch; ids, twice, of a hot one."""
    link, hybrid, crossed = Link(), 0, 0
    for number, batch in enumerate(loader(dataset).epoch(0)):
        inputs, row_bytes = 4 * (3 + 1) * len(batch), 4 * 4 * 4 * len(batch)
        ids = 4 * len(batch.sparse.values) + 8 * (4 * len(batch) + 1)  # and an offset for each bag, and one more
        link.count(batch, row_bytes=row_bytes, hot=number % 3 == 0, uploads=2)
        hybrid += inputs + 2 * row_bytes
        crossed += inputs + (2 * ids if number % 3 == 0 else 2 * row_bytes)
    assert (link.batch_bytes, link.hybrid_bytes) == (crossed, hybrid)

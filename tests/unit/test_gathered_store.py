"""Stores that write rows side by side wherever there is a place (gathered_store.h): I/Os, memory, disk, failures.

That rows read as they were last written, whatever the schedule, is in tests/laws/test_store_law.py.
"""

import errno
from pathlib import Path

import numpy as np
import pytest

import hotrow
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.placement import budget, store_file
from hotrow.placement.budget import Memory, TableDemand, place_bytes
from hotrow.placement.stores import Engines, Kind, Store, StoreError, TableRows, open_store
from hotrow.tables import TableConfig
from store_rig import each_io, read_rows

pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")


def open_rows(folder: Path, io: str, num_rows: int, record_bytes: int = 256, kind: Kind = "gathered") -> Store:
    """Little waits to be written: what is written again meanwhile would be no I/O."""
    engines = Engines(io=io, num_threads=4, most_waiting_bytes=1 << 20)  # type: ignore[arg-type]
    rows = TableRows(table="item", record_bytes=record_bytes, num_rows=num_rows)
    return open_store(rows, kind=kind, path=folder / f"{kind}.rows", engines=engines)


def write(store: Store, rows: np.ndarray, values: np.ndarray) -> None:
    store.write(rows, np.arange(len(rows)), [values])


@each_io
def test_scattered_rows_are_written_side_by_side(tmp_path: Path, io: str) -> None:
    """640 rows of which hardly two share a page: ten pages of 64, where each took an I/O of its own."""
    rows = np.arange(640) * 31
    values = np.arange(640).astype(np.uint8)[:, None].repeat(256, axis=1)
    counts = {}
    for kind in ("gathered", "block"):
        with open_rows(tmp_path, io, 20_000, kind=kind) as store:  # type: ignore[arg-type]
            write(store, rows, values)
            store.flush()
            counts[kind] = store.counters()
            np.testing.assert_array_equal(read_rows(store, rows), values)
    assert [counts["gathered"][name] for name in ("written_bytes", "read_modify_writes")] == [163_840, 0]
    # A page takes two where its units lie in two pieces of waiting memory, of 64 KiB, and the first is written at once.
    assert 10 <= counts["gathered"]["writes"] <= 10 + 163_840 // (1 << 16) + 1
    assert counts["block"]["writes"] == 640


@each_io
def test_pages_are_cut_where_memory_for_them_ends(tmp_path: Path, io: str) -> None:
    """I/Os of more than 4 KiB take as much memory as `depth` of 4 KiB at most: here not one page of 16 KiB."""
    rows, values = np.arange(640) * 31, np.arange(640).astype(np.uint8)[:, None].repeat(256, axis=1)
    table = TableRows(table="item", record_bytes=256, num_rows=20_000)
    engines = Engines(io=io, depth=3, num_threads=2)  # type: ignore[arg-type]
    with open_store(table, kind="gathered", path=tmp_path / "rows", engines=engines) as store:
        write(store, rows, values)
        store.flush()
        np.testing.assert_array_equal(read_rows(store, rows), values)
        counts = store.counters()
    assert counts["written_bytes"] == 163_840
    assert 40 <= counts["writes"] <= 40 + 163_840 // (1 << 16) + 1  # likewise
    assert (counts["reads"], counts["read_bytes"]) == (40, 163_840)


@pytest.mark.slow_but("17-threads", "512-io_uring")
@each_io
@pytest.mark.parametrize("record_bytes", [17, 64, 256, 512, 1024, 2048, 2052])
def test_long_use_of_several_regions(tmp_path: Path, io: str, record_bytes: int) -> None:
    """Rows written again and again at random: I/Os, disk and memory stay within what is said of them."""
    num_rows, g = 70_000, np.random.default_rng(record_bytes)
    truth = np.zeros((num_rows, record_bytes), np.uint8)
    with open_rows(tmp_path, io, num_rows, record_bytes) as store:
        for turn in range(40):
            if turn == 25:
                before = store.counters()
            rows = np.unique(g.integers(0, num_rows, 5000))
            truth[rows] = g.integers(0, 256, (len(rows), record_bytes), dtype=np.uint8)
            write(store, rows, truth[rows])
            seen = g.integers(0, num_rows, 500)
            np.testing.assert_array_equal(read_rows(store, seen), truth[seen])
        counts = store.counters()
        written = {name: counts[name] - before[name] for name in ("writes", "read_modify_writes", "written_rows")}
        ios = (written["writes"] + written["read_modify_writes"]) / written["written_rows"]
        assert ios < {17: 0.02, 64: 0.03, 256: 0.05, 512: 0.1, 1024: 0.2, 2048: 0.3, 2052: 0.3}[record_bytes], written
        demand = TableDemand("item", num_rows, record_bytes)
        assert 2 * num_rows < counts["places_bytes"] <= place_bytes(demand) * num_rows < 4 * num_rows
        assert counts["held_bytes"] > 0
        store.flush()
        assert store.counters()["held_bytes"] == 0
        every = np.arange(num_rows)
        np.testing.assert_array_equal(read_rows(store, every), truth)
        assert store.path.stat().st_blocks * 512 <= store.padded_record_bytes * (num_rows + 2 * 255) + 64 * 1024


def test_a_row_takes_room_for_a_few_pages(tmp_path: Path) -> None:
    """And these are written there: in each of two regions one of the first row, and fifteen of 64 rows."""
    with open_rows(tmp_path, "threads", 70_000) as store:
        for rows in (np.array([5, 60_000]), np.array([[100], [60_100]]) + np.arange(15 * 64)):
            write(store, rows.ravel(), np.ones((rows.size, 256), np.uint8))
            store.flush()
            assert store.path.stat().st_blocks * 512 <= 2 * 16 * 16384 + 3 * 4096


@each_io
def test_failures_name_rows(tmp_path: Path, io: str) -> None:
    """Not the places in which they lie, which nobody knows."""
    rows = np.array([7, 900, 41_000, 60_000])
    with pytest.raises(StoreError) as told, open_rows(tmp_path, io, 70_000) as store:
        write(store, rows, np.ones((4, 256), np.uint8))
        store.native.inject(True, 2, errno.EIO)
        store.flush()
    assert "of table 'item' in" in str(told.value) and "Input/output error" in str(told.value)
    assert any(f"writing rows {pair}" in str(told.value) for pair in ("7, 900", "41000, 60000"))


@each_io
def test_a_failed_read_names_its_row(tmp_path: Path, io: str) -> None:
    store = open_rows(tmp_path, io, 70_000)
    write(store, np.array([41_000]), np.ones((1, 256), np.uint8))
    store.flush()
    store.native.inject(False, 1, errno.EIO)
    with pytest.raises(StoreError, match=r"reading row 41000 of table 'item' in .*Input/output error"):
        read_rows(store, np.array([41_000]))
    with pytest.raises(StoreError, match="reading row 41000"):
        store.close()


@each_io
def test_discarded_rows_are_not_written(tmp_path: Path, io: str) -> None:
    store = open_rows(tmp_path, io, 70_000)
    write(store, np.arange(0, 70_000, 7), np.ones((10_000, 256), np.uint8))
    native = store.native
    store.discard()
    assert "is closed, and its rows are removed" in native.failure()
    assert native.flush() is False


def test_what_cannot_be_gathered_is_refused(tmp_path: Path) -> None:
    for record_bytes in (4, 16, 2561, 5000):
        with pytest.raises(ValueError, match="cannot be gathered, which takes 17 to 2560"):
            open_rows(tmp_path, "threads", 100, record_bytes)
    assert list(tmp_path.iterdir()) == []


def settled(dram: int, *tables: TableDemand, free: int = 1 << 40, **more: str | None) -> str:
    memory = Memory(dram=dram, **{"ssd": "slow", **more})  # type: ignore[arg-type]
    return memory.settled(tables, free).writes


@pytest.mark.parametrize(("sector", "kind"), [(512, "gathered"), (1024, "block"), (4096, "block")])
def test_rows_too_long_for_a_disks_sectors_have_their_own_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sector: int, kind: Kind
) -> None:
    monkeypatch.setattr(store_file, "_sector", lambda path: sector)
    values = np.arange(50, dtype=np.uint8)[:, None].repeat(2052, axis=1)
    with open_rows(tmp_path, "threads", 50, 2052) as store:
        write(store, np.arange(50), values)
        assert store.kind == kind
        np.testing.assert_array_equal(read_rows(store, np.arange(50)), values)


def test_auto_gathers_where_there_is_room() -> None:
    large = TableDemand("large", 1_000_000, 256)
    assert settled(1 << 28, large) == "gathered"
    assert settled(4 << 20, large) == "in_place", "the map would take more than half"
    assert settled(1 << 28, large, free=500_000_000) == "in_place", "files of twice the bytes do not fit"
    assert settled(1 << 28, TableDemand("small", 30_000, 256)) == "in_place"
    assert settled(1 << 28, TableDemand("long", 1_000_000, 2561)) == "in_place"
    assert settled(1 << 28, large, file="fast", ssd=None) == "auto", "there are no block files"  # type: ignore[arg-type]
    assert settled(4 << 20, large, writes="gathered") == "gathered", "as it was told"


def test_words_are_checked() -> None:
    with pytest.raises(ValueError, match="writes is 'somewhere'; choose one of auto, in_place, gathered"):
        Memory(dram=1000, ssd="slow", writes="somewhere")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'gathered', which is for block files; name ssd"):
        Memory(dram=1000, file="fast", writes="gathered")


def table(num_rows: int) -> list[TableConfig]:
    return [TableConfig(name="a", num_embeddings=num_rows, embedding_dim=64, feature_names=("a",))]


def test_a_collection_says_how_it_writes(tmp_path: Path) -> None:
    emb = EmbeddingCollection(table(60_000), memory=Memory(dram="2MiB", ssd=tmp_path), seed=1)
    hotrow.SGD(emb, lr=0.1)
    assert emb.placement.memory.writes == "gathered"
    assert emb.placement.stores[0].kind == "gathered"
    slots = emb.placement.slots[0]
    slots_bytes = slots.cached * (256 + budget.METADATA_BYTES) + 60_000 * budget.ROW_BYTES
    assert emb.placement.places_bytes + slots_bytes <= emb.placement.memory.slots_bytes
    emb.placement.close()


def test_auto_writes_in_place_where_too_little_would_be_left(tmp_path: Path) -> None:
    """Half of the budget for the map leaves fewer than a hundred rows."""
    assert settled(270_000, TableDemand("a", 33_000, 256)) == "gathered", "there is room for the map by itself"
    memory = Memory(dram=270_000, ssd=tmp_path, plan=lambda demands, left: budget.plan_slots(demands, left - 110_000))
    emb = EmbeddingCollection(table(33_000), memory=memory, seed=1)
    hotrow.SGD(emb, lr=0.1)
    assert emb.placement.memory.writes == "in_place" and emb.placement.slots[0].cached >= 100
    emb.placement.close()

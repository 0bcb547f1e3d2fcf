"""hotrow.placement.stores: layout on disk, and how stores open and end."""

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from hotrow.kernels.ops import native_module
from hotrow.placement import store_file
from hotrow.placement.stores import Engines, Kind, TableRows, open_store
from loops import looped
from store_rig import FILE_KINDS, each_io, needs_native, read_rows, table_rows, write_rows

pytestmark = needs_native


LAYOUT_BYTES = (1, 4, 64, 100, 255, 256, 257, 260, 512, 513, 768, 1024, 1025, 1537, 2048, 2049, 2560, 2561, 4096, 5000)


@looped("gathered", [False, True])
@looped("sector", [512, 4096])
@looped("record_bytes", LAYOUT_BYTES)
def test_records_cross_neither_sectors_nor_pages(record_bytes: int, sector: int, gathered: bool) -> None:
    layout = native_module().block_layout(record_bytes, sector, 0, gathered)
    if not layout:
        assert gathered and not 17 <= record_bytes <= (2560 if sector == 512 else 2048)
        return
    unit, unit_rows, page, page_units, _ = layout
    assert (unit % sector, unit_rows * record_bytes <= unit, page_units * unit <= page) == (0, True, True)
    assert unit_rows == (sector // record_bytes if 2 * record_bytes < sector + gathered else 1)
    if gathered:  # of whole blocks: as many as 16 KiB hold and a byte can count, but those of a unit at least
        least = math.lcm(unit, 4096)
        assert (page % least, page_units * unit) == (0, page) and 8 <= page_units * unit_rows <= 255
        assert page == max(least, 16384 // least * least) or 2 * page_units * unit_rows > 255
    else:
        assert page == max(unit, 4096)
    file_bytes = native_module().block_layout(record_bytes, sector, 1000, gathered)[4]
    assert file_bytes >= 4096 + (2 if gathered else 1) * 1000 * record_bytes
    assert file_bytes % 4096 == 0, "growing it would go through the page cache"


def test_padding_is_reported(tmp_path: Path) -> None:
    padded = {256: 512, 260: 512, 100: 4096 / 40, 768: 1024, 1100: 2048, 512: 512}
    for record_bytes, expected in padded.items():
        rows = table_rows(record_bytes=record_bytes)
        assert store_file.padded_record_bytes(rows, 512, "block") == pytest.approx(expected)
    with open_store(table_rows(), kind="dram") as store:
        assert store.padded_record_bytes == 512


@looped("kind", FILE_KINDS)
def test_a_hundred_gigabytes_are_made_and_opened_at_once(tmp_path: Path, kind: Kind) -> None:
    rows, path = table_rows(num_rows=200_000_000), tmp_path / "large"
    start = time.perf_counter()
    for _ in range(2):
        with open_store(rows, kind=kind, path=path, engines=Engines(io="threads")) as store:
            assert not read_rows(store, [0, 123_456_789, 199_999_999]).any()
    assert time.perf_counter() - start < 2
    assert path.stat().st_size > 100e9
    assert path.stat().st_blocks * 512 < 1e6
    assert path.stat().st_mode & 0o777 == 0o600


def places(rows: TableRows, kind: Kind, sector: int) -> list[int]:
    """Returns where each row's record starts in the file: behind a page of zeros; in blocks, no record crosses a sector
    unless it is longer, and none crosses a page."""
    length = rows.record_bytes
    if kind == "mapped":
        return [4096 + row * length for row in range(rows.num_rows)]
    rows_of_sector = sector // length
    assert rows_of_sector >= 2
    return [4096 + row // rows_of_sector * sector + row % rows_of_sector * length for row in range(rows.num_rows)]


@looped("kind", FILE_KINDS)
def test_rows_are_found_again_and_lie_where_the_layout_says(tmp_path: Path, kind: Kind) -> None:
    path, rows = tmp_path / "t", table_rows(num_rows=1500, record_bytes=100)
    with open_store(rows, kind=kind, path=path, engines=Engines(io="threads")) as store:
        write_rows(store, [5, 999], value=3)
        write_rows(store, [1499], value=4)
    data, truth = path.read_bytes(), {5: 3, 999: 3, 1499: 4}
    for row, at in enumerate(places(rows, kind, store.sector or 0)):
        assert data[at : at + 100] == bytes([truth.get(row, 0)]) * 100, row
    with open_store(rows, kind=kind, path=path, engines=Engines(io="threads")) as store:
        assert read_rows(store, [5, 6, 999, 1499])[:, 0].tolist() == [3, 0, 3, 4]


@looped("kind", FILE_KINDS)
def test_a_store_that_is_dropped_writes(tmp_path: Path, kind: Kind) -> None:
    store = open_store(table_rows(), kind=kind, path=tmp_path / "t", engines=Engines(io="threads"))
    write_rows(store, [1])
    del store
    with open_store(table_rows(), kind=kind, path=tmp_path / "t", engines=Engines(io="threads")) as store:
        assert read_rows(store, [1]).all()


@each_io
def test_a_store_that_is_discarded_drops_what_waits(tmp_path: Path, io: str) -> None:
    """All but the I/Os under way, of which there are at most `depth`; another table of the engine loses nothing."""
    engines, kept = Engines(io=io, depth=4, num_threads=1), table_rows(num_rows=5000, table="kept")
    store, other = (
        open_store(rows, kind="block", path=tmp_path / rows.table, engines=engines)
        for rows in (table_rows(num_rows=5000), kept)
    )
    write_rows(store, list(range(0, 5000, 9)))
    write_rows(other, list(range(5000)))
    native = store.native
    store.discard()
    written = native.counters()["writes"]  # after the call: until then the engine's thread goes on writing
    while native.counters()["waiting_bytes"]:
        time.sleep(0.001)
    assert native.counters()["writes"] <= written + 4
    other.close()
    with open_store(kept, kind="block", path=tmp_path / "kept", engines=engines) as again:
        assert read_rows(again, list(range(5000))).all()


@looped("kind", FILE_KINDS)
def test_a_folder_that_takes_no_file(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        open_store(table_rows(), kind=kind, path=tmp_path / "absent" / "t")
    if os.geteuid() == 0:
        return  # permissions do not hold for root
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="t"):
        open_store(table_rows(), kind=kind, path=tmp_path / "t")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="needs the path"):
        open_store(table_rows(), kind="block")
    with open_store(table_rows(), kind="dram") as store:
        with pytest.raises(ValueError, match="row"):
            read_rows(store, [1000])
        with pytest.raises(ValueError, match="row"):
            write_rows(store, [-1])
        with pytest.raises(ValueError, match="pass integers"):
            read_rows(store, [0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="is closed"):
        store.flush()


def test_bad_slots() -> None:
    with open_store(table_rows(), kind="dram") as store:
        array = np.zeros((4, 512), np.uint8)
        for slots, arrays, message in [
            ([4], [array], "slot out of range"),
            ([0, 1], [array], "rows and slots differ"),
            ([0], [array[:, :100].copy()], "not as long as a record"),
            ([0], [array[:, :256].copy(), array[:3, :256].copy()], "differ in their number of slots"),
        ]:
            with pytest.raises(ValueError, match=message):
                store.read([1], slots, arrays)

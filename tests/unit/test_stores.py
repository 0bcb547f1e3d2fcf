"""hotrow.memory.stores: layout on disk, whose file it is, what is told when a medium fails, what is fallen back to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotrow import files, ops, tools
from hotrow.memory import reference, store_file, stores
from hotrow.memory.native import backend
from hotrow.memory.stores import Engines, Kind, Store, StoreError, TableRows, io_uring_refused, open_store

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
FILE_KINDS: list[Kind] = ["mapped", "block"]


def table_rows(num_rows: int = 1000, record_bytes: int = 512, table: str = "item", identity: str = "m1") -> TableRows:
    return TableRows(table=table, parts=(("weight", record_bytes),), num_rows=num_rows, identity=identity)


@pytest.fixture(params=["threads", "io_uring"])
def io(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and (reason := io_uring_refused()):
        pytest.skip(f"io_uring is refused here: {reason}")
    return str(request.param)


def write_rows(store: Store, rows: list[int], value: int = 7) -> None:
    store.write(rows, np.arange(len(rows)), [np.full((len(rows), store.rows.record_bytes), value, np.uint8)])


def read_rows(store: Store, rows: list[int]) -> np.ndarray:
    out = np.zeros((len(rows), store.rows.record_bytes), np.uint8)
    store.read(rows, np.arange(len(rows)), [out])
    return out


# ---- layout


LAYOUT_BYTES = (1, 4, 64, 100, 255, 256, 257, 260, 512, 513, 768, 1024, 2048, 2049, 4096, 5000)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("record_bytes", LAYOUT_BYTES)
def test_records_cross_neither_sectors_nor_pages(record_bytes: int, sector: int, gathered: bool) -> None:
    layout = backend().block_layout(record_bytes, sector, 0, gathered)
    for num_rows in (0, 1, 1000, 100_000):
        assert backend().block_layout(record_bytes, sector, num_rows, gathered) == reference.block_layout(
            record_bytes, sector, num_rows, gathered
        )
    if not layout:
        assert gathered and not 17 <= record_bytes <= 2048
        return
    unit, unit_rows, page, page_units, _ = layout
    assert (unit % sector, unit_rows * record_bytes <= unit, page_units * unit <= page) == (0, True, True)
    assert unit_rows == (sector // record_bytes if 2 * record_bytes < sector + gathered else 1)
    if gathered:  # as large as a byte can count its records, of 4 to 16 KiB
        assert page in (4096, 8192, 16384) and 8 <= page_units * unit_rows <= 255
        assert page == 16384 or 2 * page // unit * unit_rows > 255
    else:
        assert page == max(unit, 4096)
    file_bytes = backend().block_layout(record_bytes, sector, 1000, gathered)[4]
    assert file_bytes >= 4096 + (2 if gathered else 1) * 1000 * record_bytes
    assert file_bytes % 4096 == 0, "growing it would go through the page cache"


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what lies in its page cache")
def test_opening_a_block_file_leaves_no_row_in_the_page_cache(tmp_path: Path) -> None:
    """A header written anew beside direct writes of rows that are cached with it: their meeting fails the next sync."""
    rows, path = table_rows(num_rows=400), tmp_path / "t"
    with open_store(rows, kind="block", path=path) as store:
        if store.fallback is not None and not store_file.direct_io(tmp_path)["direct_io"]:
            pytest.skip(f"no direct I/O here: {store.fallback}")
        write_rows(store, list(range(400)))
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open_store(rows, kind="block", path=path) as store:
        store.grow(500)
        assert read_rows(store, [399])[0, 0] == 7
        assert set(resident_pages(path)) <= {0}, "behind the header"


def resident_pages(path: Path) -> list[int]:
    """Numbers of the file's pages that lie in the page cache, by mincore(2)."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        mapped = np.memmap(file, mode="r", dtype=np.uint8, shape=(size,))
        address, length = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(size)
        assert ctypes.CDLL(None, use_errno=True).mincore(address, length, found) == 0
    return [page for page, flags in enumerate(found) if flags & 1]


def test_padding_is_reported(tmp_path: Path) -> None:
    padded = {256: 512, 260: 512, 100: 4096 / 40, 768: 1024, 1100: 2048, 512: 512}
    for record_bytes, expected in padded.items():
        rows = table_rows(record_bytes=record_bytes)
        assert store_file.padded_record_bytes(rows, 512, "block") == pytest.approx(expected)
    with open_store(table_rows(), kind="dram") as store:
        assert store.padded_record_bytes == 512


@pytest.mark.parametrize("kind", FILE_KINDS)
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


# ---- whose file it is


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_rows_are_found_again_and_by_the_readable_twin(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    with open_store(table_rows(record_bytes=100), kind=kind, path=path, engines=Engines(io="threads")) as store:
        write_rows(store, [5, 999], value=3)
        store.grow(1500)
        write_rows(store, [1499], value=4)
    for module in (stores, store_file):
        monkeypatch.setattr(module, "backend", lambda: reference)
    with warnings.catch_warnings(record=True):
        store = open_store(table_rows(num_rows=1500, record_bytes=100), kind=kind, path=path)
    with store:
        assert read_rows(store, [5, 6, 999, 1499])[:, 0].tolist() == [3, 0, 3, 4]
        write_rows(store, [6], value=9)
        assert read_rows(store, [5, 6, 7])[:, 99].tolist() == [3, 9, 0]


@pytest.mark.parametrize("kind", FILE_KINDS)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (table_rows(identity="m2"), r"holds identity 'm1', expected 'm2'.*another model's or table's"),
        (table_rows(table="user"), "holds table 'item', expected 'user'"),
        (table_rows(record_bytes=256), "holds parts"),
        (table_rows(num_rows=10), "holds num_rows 1000, expected 10"),
    ],
)
def test_a_swapped_file_is_refused(tmp_path: Path, kind: Kind, other: TableRows, message: str) -> None:
    path = tmp_path / "t"
    open_store(table_rows(), kind=kind, path=path, engines=Engines(io="threads")).close()
    with pytest.raises(ValueError, match=message):
        open_store(other, kind=kind, path=path)
    another: Kind = "mapped" if kind == "block" else "block"
    with pytest.raises(ValueError, match=f"holds kind '{kind}', expected '{another}'"):
        open_store(table_rows(), kind=another, path=path)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_truncated_or_altered_file_is_refused(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "t"
    open_store(table_rows(), kind=kind, path=path, engines=Engines(io="threads")).close()
    header = path.read_bytes()[:4096]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"t is truncated: .* rows of table 'item' need"):
        open_store(table_rows(), kind=kind, path=path)
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(ValueError, match="t is no store of hotrow, or its header is damaged"):
        open_store(table_rows(), kind=kind, path=path)
    for version in (1, 3):  # files of version 1 have no tail
        other = json.loads(header.rstrip(b"\0")) | {"version": version}
        path.write_bytes(json.dumps(other).encode().ljust(4096, b"\0"))
        with pytest.raises(ValueError, match=f"format version {version}, this hotrow reads 2: .* or remove the file"):
            open_store(table_rows(), kind=kind, path=path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        open_store(table_rows(), kind=kind, path=path)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_two_processes_cannot_open_one_file(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "t"
    with open_store(table_rows(), kind=kind, path=path, engines=Engines(io="threads")):
        with pytest.raises(BlockingIOError, match="t is open already, here or in another process"):
            open_store(table_rows(), kind=kind, path=path)
        program = (
            "import sys; from hotrow.memory.stores import *\n"
            "rows = TableRows(table='item', parts=(('weight', 512),), num_rows=1000, identity='m1')\n"
            "try: open_store(rows, kind=sys.argv[1], path=sys.argv[2])\n"
            "except BlockingIOError as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, kind, str(path)], capture_output=True, text=True, check=True, timeout=60
        )
        assert "is open already" in done.stdout
    open_store(table_rows(), kind=kind, path=path, engines=Engines(io="threads")).close()


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_store_that_is_dropped_writes_and_unlocks(tmp_path: Path, kind: Kind) -> None:
    store = open_store(table_rows(), kind=kind, path=tmp_path / "t", engines=Engines(io="threads"))
    write_rows(store, [1])
    del store
    with open_store(table_rows(), kind=kind, path=tmp_path / "t", engines=Engines(io="threads")) as store:
        assert read_rows(store, [1]).all()


@needs_native
def test_a_store_that_is_discarded_drops_what_waits(tmp_path: Path, io: str) -> None:
    """All but the I/Os under way, of which there are at most `depth`; another table of the engine loses nothing."""
    engines, kept = Engines(io=io, depth=4, num_threads=1), table_rows(num_rows=5000, table="kept")
    store, other = (
        open_store(rows, kind="block", path=tmp_path / rows.table, engines=engines)
        for rows in (table_rows(num_rows=5000), kept)
    )
    write_rows(store, list(range(0, 5000, 9)))
    write_rows(other, list(range(5000)))
    before, native = store.counters(), store.native
    store.discard()
    while native.counters()["waiting_bytes"]:
        time.sleep(0.001)
    assert native.counters()["writes"] <= before["writes"] + 4
    other.close()
    with open_store(kept, kind="block", path=tmp_path / "kept", engines=engines) as again:
        assert read_rows(again, list(range(5000))).all()


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_folder_that_takes_no_file(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        open_store(table_rows(), kind=kind, path=tmp_path / "absent" / "t")
    if os.geteuid() == 0:
        return  # permissions do not hold for root
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="t"):
        open_store(table_rows(), kind=kind, path=tmp_path / "t")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each part of a record has at least a byte"):
        TableRows(table="t", parts=(("w", 0),), num_rows=1)
    with pytest.raises(ValueError, match="needs the path"):
        open_store(table_rows(), kind="block")
    with pytest.raises(ValueError, match="names and parts need"):
        open_store(table_rows(identity="x" * 5000), kind="mapped", path=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    with open_store(table_rows(), kind="dram") as store:
        with pytest.raises(ValueError, match="row"):
            read_rows(store, [1000])
        with pytest.raises(ValueError, match="row"):
            write_rows(store, [-1])
        with pytest.raises(ValueError, match="pass integers"):
            read_rows(store, [0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="is closed"):
        store.flush()


@needs_native
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


# ---- faults


def fails_for_ever(store: Store, message: str) -> None:
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            store.flush()
        with pytest.raises(StoreError, match=message):
            read_rows(store, [1])
        with pytest.raises(StoreError, match=message):
            write_rows(store, [1])
    assert store.failure() is not None
    with pytest.raises(StoreError, match=message):
        store.close()


@needs_native
@pytest.mark.parametrize("record_bytes", [64, 512, 5000])
def test_an_error_of_a_write_is_told_for_ever(tmp_path: Path, io: str, record_bytes: int) -> None:
    engines = Engines(io=io)
    other = open_store(table_rows(table="other"), kind="block", path=tmp_path / "other", engines=engines)
    store = open_store(table_rows(record_bytes=record_bytes), kind="block", path=tmp_path / "t", engines=engines)
    store.native.inject(True, 3, errno.EIO)
    with contextlib.suppress(StoreError):  # a disk that is faster than the call is told by the call
        write_rows(store, list(range(0, 1000, 90)))
    fails_for_ever(store, r"writing rows? \d+.* of table 'item' in .*/t: Input/output error.*dmesg.*last checkpoint")
    write_rows(other, [3])
    other.flush()
    assert read_rows(other, [3]).all(), "another table of the engine does not care"
    other.close()


@needs_native
@pytest.mark.parametrize("record_bytes", [64, 512, 5000])
def test_an_error_of_a_read_is_told_for_ever(tmp_path: Path, io: str, record_bytes: int) -> None:
    store = open_store(table_rows(record_bytes=record_bytes), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    write_rows(store, [1, 500])
    store.flush()
    store.native.inject(False, 2, errno.EIO)
    with pytest.raises(StoreError, match=r"reading row (1|500) of table 'item' in .*/t: Input/output error"):
        read_rows(store, [1, 500])
    fails_for_ever(store, r"reading row (1|500) of table 'item'")


@needs_native
def test_an_error_while_a_writer_waits_for_room(tmp_path: Path, io: str) -> None:
    store = open_store(table_rows(), kind="block", path=tmp_path / "t", engines=Engines(io=io, most_waiting_bytes=0))
    store.native.inject(True, 20, errno.EIO)
    with pytest.raises(StoreError, match="Input/output error"):
        for row in range(1000):
            write_rows(store, [row])
    assert store.counters()["waiting_bytes"] >= 0
    with pytest.raises(StoreError):
        store.close()


@needs_native
def test_another_tables_failure_gives_its_room_back(tmp_path: Path, io: str) -> None:
    """A writer that waits for room goes on when the bytes it waits for are dropped with a table that failed."""
    engines = Engines(io=io, most_waiting_bytes=1 << 16)
    good, bad = (
        open_store(table_rows(table=name), kind="block", path=tmp_path / name, engines=engines) for name in ("a", "b")
    )
    bad.native.inject(True, 1, errno.EIO)
    with pytest.raises(StoreError):
        for _ in range(50):
            write_rows(bad, list(range(0, 1000, 8)))
            write_rows(good, list(range(0, 1000, 8)))
    write_rows(good, list(range(1000)))
    good.flush()
    assert read_rows(good, list(range(1000))).all()
    assert good.counters()["waiting_bytes"] == 0
    good.close()
    with pytest.raises(StoreError):
        bad.close()


@needs_native
def test_a_file_truncated_while_open(tmp_path: Path, io: str) -> None:
    store = open_store(table_rows(), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    os.truncate(tmp_path / "t", 8192)
    with pytest.raises(StoreError, match=r"reading row 900 of table 'item' .* ends before its last row"):
        read_rows(store, [900])
    with pytest.raises(StoreError):
        store.close()


@needs_native
@pytest.mark.parametrize("written", [[700], [999], list(range(992, 1000))])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_file_truncated_and_written_behind_its_end(
    tmp_path: Path, io: str, written: list[int], *, flushed: bool
) -> None:
    """What was cut off reads as zeros then: no read is short, also where the very last rows are written."""
    store = open_store(table_rows(), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    os.truncate(tmp_path / "t", 8192)
    write_rows(store, written)
    while not store.counters()["writes"]:
        time.sleep(0.001)
    message = r"rows of table 'item' in .*/t are lost.* ends before its last row: something truncated it"
    with pytest.raises(StoreError, match=message):
        store.flush() if flushed else read_rows(store, [500])
    with pytest.raises(StoreError):
        store.close()


@needs_native
def test_a_mapped_file_truncated_while_open(tmp_path: Path) -> None:
    """Memory behind the end of its file ends the process that touches it, so this is another one."""
    program = """
import os, sys
import numpy as np
from hotrow.memory.stores import StoreError, TableRows, open_store
arrays = [np.ones((1000, 512), np.uint8)]
calls = {
    "read": lambda store: store.read([900], [0], arrays),
    "read before the cut": lambda store: store.read([0], [0], arrays),
    "write": lambda store: store.write([900], [0], arrays),
    "write the last": lambda store: store.write([999], [0], arrays),
    "write a row with no space": lambda store: store.write([700], [0], arrays),
    "flush": lambda store: store.flush(),
}
for name, call in calls.items():
    path = f"{sys.argv[1]}/{name}"
    rows = TableRows(table="item", parts=(("weight", 512),), num_rows=1000)
    store = open_store(rows, kind="mapped", path=path)
    store.write([0, 999], [0, 1], arrays)
    store.flush()
    os.truncate(path, 8192)
    for _ in range(2):
        try:
            call(store)
        except StoreError as error:
            print(name, "raised", error)
    try:
        store.close()
    except StoreError:
        print(name, "closed")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "SIGBUS is -7"
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 6
    assert all("closed" in line or "table 'item' in " in line for line in lines)
    assert sum("are lost" in line and "something truncated it" in line for line in lines) == 2 * 6


@needs_native
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_file_truncated_is_not_grown(tmp_path: Path, kind: Kind) -> None:
    """It would be long enough again, with zeros where rows were."""
    store = open_store(table_rows(), kind=kind, path=tmp_path / "t", engines=Engines(io="threads"))
    os.truncate(tmp_path / "t", 8192)
    with pytest.raises(StoreError, match=r"table 'item' in .*/t.* something truncated it"):
        store.grow(2000)
    assert (tmp_path / "t").stat().st_size == 8192
    with pytest.raises(StoreError):
        store.close()


@needs_native
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_a_full_disk(small_disk: tuple[Path, Callable[[int], None]], kind: Kind) -> None:
    folder, resize = small_disk
    resize(512)
    with warnings.catch_warnings(record=True):
        store = open_store(table_rows(num_rows=10_000), kind=kind, path=folder / "t")
    with pytest.raises(StoreError, match=r"writing row.* of table 'item' in .*/t: No space left on device.*free some"):
        for first in range(0, 10_000, 100):
            write_rows(store, list(range(first, first + 100)))
            store.flush()
    fails_for_ever(store, "No space left on device")


@needs_native
def test_a_full_disk_while_io_uring_writes(tmp_path: Path) -> None:
    """A file system of its own in a file, as tmpfs is not written past the page cache."""
    if reason := io_uring_refused():
        pytest.skip(f"io_uring is refused here: {reason}")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    try:
        for line in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            subprocess.run(line, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk in a file can be made here: {error}")
    try:
        store = open_store(
            table_rows(num_rows=100_000), kind="block", path=folder / "t", engines=Engines(io="io_uring")
        )
        write_rows(store, list(range(0, 100_000, 4)))
        fails_for_ever(store, r"writing row.* of table 'item' in .*/t: No space left on device.*free some")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FORK = """
import os, sys, numpy as np
from hotrow.memory.stores import *
rows = TableRows(table="item", parts=(("weight", 512),), num_rows=1000)
store = open_store(rows, kind=sys.argv[1], path=sys.argv[2], engines=Engines(io=sys.argv[3]))
array = np.ones((1, 512), np.uint8)
store.write([1], [0], [array])
if (child := os.fork()) == 0:
    for call in (lambda: store.read([1], [0], [array]), lambda: store.write([1], [0], [array]), store.flush):
        try: call()
        except StoreError as error: print(error, flush=True)
    store.close()
    del store
    if sys.argv[1] != "mapped":  # a store of the child's own is fine
        own = open_store(rows, kind=sys.argv[1], path=sys.argv[2] + "2", engines=Engines(io=sys.argv[3]))
        own.write([1], [0], [array]); own.flush(); own.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
array[:] = 0
store.read([1], [0], [array])
assert array.all()
store.close()
if sys.argv[1] != "gathered":
    open_store(rows, kind=sys.argv[1], path=sys.argv[2], engines=Engines(io=sys.argv[3])).close()
"""


@needs_native
@pytest.mark.parametrize("kind", [*FILE_KINDS, "gathered"])
def test_a_forked_child_is_told(tmp_path: Path, kind: Kind, io: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, kind, str(tmp_path / "t"), io],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("'item'" in line and "opened before this process was forked" in line for line in lines)


# ---- memory

MEMORY_SLACK = 2 << 20
"""Beside what is counted: the caller's lists of moves, and what malloc keeps."""

WRITING = """
import re, sys, numpy as np
from pathlib import Path
from hotrow.memory.stores import *
def private():
    found = re.findall(r"Private_(?:Clean|Dirty): +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 1024 * sum(map(int, found))
folder, io, record_bytes, most = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
array = np.ones((20_000, record_bytes), np.uint8)
slots, g = np.arange(len(array)), np.random.default_rng(1)
g.permutation(len(array))
Engines(io="threads", num_threads=1)._start(ring=False)  # what a first thread and engine bring of their own
before = private()
engines, peak, counted = Engines(io=io, most_waiting_bytes=most), 0, 0
tables = [TableRows(table=name, parts=(("w", record_bytes),), num_rows=60_000) for name in "abc"]
stores = [open_store(rows, kind="block", path=folder / rows.table, engines=engines) for rows in tables]
for _ in range(2):  # a table after the other: what one used must serve the next
    for store in stores:
        store.write(g.permutation(60_000)[: len(array)], slots, [array])
        assert engines.num_bytes <= most, (engines.num_bytes, most)
        counted, peak = max(counted, engines.num_bytes), max(peak, private() - before)
        assert store.counters()["waiting_bytes"] <= engines.num_bytes
for store in stores:
    store.close()
print(counted, peak)
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's memory")
@pytest.mark.parametrize("record_bytes", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_what_waiting_rows_take_is_counted_and_bounded(tmp_path: Path, io: str, record_bytes: int) -> None:
    """Three tables of 4 to 60 MB are written through 6 MiB."""
    arguments = [str(tmp_path), io, str(record_bytes), str(6 << 20)]
    done = subprocess.run(
        [sys.executable, "-c", WRITING, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    counted, peak = map(int, done.stdout.split())
    assert peak <= counted + MEMORY_SLACK
    assert counted > 3 << 20, "the load was too light to fill it"


# ---- what is fallen back to


@needs_native
def test_memory_that_looks_like_a_disk_is_named(small_disk: tuple[Path, Callable[[int], None]]) -> None:
    folder, _ = small_disk
    assert files.file_system(folder / "t") == "tmpfs"
    engines = Engines()
    with pytest.warns(UserWarning, match=r"table 'item' is read and written by 64 threads.*disk is memory \(tmpfs\)"):
        store = open_store(table_rows(), kind="block", path=folder / "t", engines=engines)
    assert store.fallback is not None
    assert engines.fallbacks == {str(folder / "t"): store.fallback}
    write_rows(store, [1])
    assert read_rows(store, [1]).all()
    store.close()
    with pytest.raises(ValueError, match=r'io="io_uring", but .*memory \(tmpfs\)'):
        open_store(table_rows(), kind="block", path=folder / "t", engines=Engines(io="io_uring"))


@needs_native
@pytest.mark.parametrize("refused", ["open", "read", "ring"])
def test_a_refusal_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    plain, native = os.open, backend()

    class Refusing:
        def __getattr__(self, name: str) -> object:
            if refused == "read" and name == "try_read":
                return lambda descriptor, num_bytes: errno.EINVAL
            if refused == "ring" and name == "start_engine":
                return lambda ring, *sizes: (None, "io_uring is refused") if ring else native.start_engine(ring, *sizes)
            return getattr(native, name)

    def no_direct(path: object, flags: int, *mode: int) -> int:
        if flags & store_file.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *mode)  # type: ignore[arg-type]

    if refused == "open":
        monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(stores, "backend", Refusing)
    monkeypatch.setattr(store_file, "backend", Refusing)
    cause = {"open": "refuses O_DIRECT", "read": "direct reads of 512 bytes fail", "ring": "io_uring is refused"}
    with pytest.warns(UserWarning, match=cause[refused]):
        store = open_store(table_rows(), kind="block", path=tmp_path / "t")
    write_rows(store, [1])
    assert read_rows(store, [1, 2])[:, 0].tolist() == [7, 0]
    store.close()


@pytest.mark.skipif(not store_file.NO_ATIME, reason="this system has no O_NOATIME")
def test_who_does_not_own_a_file_opens_it_past_the_page_cache_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain, asked = tmp_path / "t", os.open, []
    path.write_bytes(bytes(8192))

    def not_the_owner(path: object, flags: int, *mode: int) -> int:
        asked.append(bool(flags & store_file.NO_ATIME))
        if asked[-1]:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return plain(path, flags, *mode)  # type: ignore[arg-type]

    own, why_not = store_file.open_direct(path, 512)
    if own is None:
        pytest.skip(why_not)
    os.close(own)
    monkeypatch.setattr(os, "open", not_the_owner)
    others, _ = store_file.open_direct(path, 512)
    assert others is not None
    os.close(others)
    assert asked == [True, False]


FEWER_THREADS = """
import os, resource, signal, sys, tempfile, warnings, numpy as np
from hotrow.memory.stores import *
from hotrow.memory.stores import backend
rows = TableRows(table="item", parts=(("weight", 512),), num_rows=1000)
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
backend()  # all modules are loaded, from a folder that only root may be able to read
if os.geteuid() == 0: os.setuid(20_000 + os.getpid() % 30_000)  # root may start what it likes; nobody's user, alone
most = len(os.listdir("/proc/self/task")) + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
    try:
        with open_store(rows, kind="block", path=folder + "/t", engines=Engines(io="threads")) as store:
            array = np.ones((1000, 512), np.uint8)
            store.write(range(1000), range(1000), [array])
            store.flush()
            array[:] = 0
            store.read(range(1000), range(1000), [array])
            assert array.all()
    except StoreError as error:
        print(error)
print(*(warning.message for warning in caught))
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
"""


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's limit of a user's threads")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (0, "no thread for reads and writes of files could be started"),
        (1, "only 0 of 64 threads that read and write files could be started"),
        (5, "only 4 of 64 threads that read and write files could be started"),
    ],
)
def test_threads_that_cannot_be_started(more: int, said: str) -> None:
    """None is an error, fewer a warning; the process goes on, and takes signals as before."""
    if more and os.geteuid() != 0:
        pytest.skip("the user's other processes count too")
    done = subprocess.run(
        [sys.executable, "-c", FEWER_THREADS, str(more)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{said} (Resource temporarily unavailable): raise the limit of processes (ulimit -u)" in done.stdout


LIMITED = """
import os, resource, sys
from hotrow.memory.stores import io_uring_refused
assert io_uring_refused() is None  # and all modules are loaded, from a folder that only root may be able to read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), int(sys.argv[1])))
if os.geteuid() == 0: os.setuid(65534)  # root may lock what it likes
print(io_uring_refused())
"""


@needs_native
@pytest.mark.parametrize("limit", [0, 64 << 10])
def test_too_little_locked_memory_is_a_reason(limit: int) -> None:
    """Also where a shorter queue than that of training would have enough."""
    if io_uring_refused():
        pytest.skip("io_uring is refused here anyway")
    line = [sys.executable, "-c", LIMITED, str(limit)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    assert "io_uring is refused here (Cannot allocate memory)" in done.stdout
    assert "ulimit -l" in done.stdout


def test_file_system_of_a_path_not_there_yet() -> None:
    assert files.file_system("/proc/no/such") in ("proc", None)


def test_doctor_says_what_stores_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = tools.doctor()["stores"]
    assert facts["file_system"] == files.file_system(tmp_path)
    assert (facts["io_uring"], facts["io_uring_refused"]) == (io_uring_refused() is None, io_uring_refused())
    assert facts["direct_io"] is (facts["direct_io_refused"] is None)
    assert facts["sector_bytes"] in ((512, 1024, 2048, 4096) if facts["direct_io"] else (None,))
    assert "locked_memory_limit_bytes" in facts
    assert list(tmp_path.iterdir()) == [], "the probe's file is gone"
    facts = store_file.direct_io(tmp_path / "absent")
    assert not facts["direct_io"]
    assert "takes no file" in facts["direct_io_refused"]

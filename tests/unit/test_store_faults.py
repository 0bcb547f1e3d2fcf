"""hotrow.placement.stores: what is told when a medium fails, when a file is cut, and after a fork."""

import contextlib
import errno
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import run_forked
from hotrow.placement.stores import Engines, Kind, StoreError, io_uring_refused, open_store
from store_rig import (
    FILE_KINDS,
    each_io,
    fails_for_ever,
    needs_io_uring,
    needs_native,
    read_rows,
    table_rows,
    write_rows,
)

pytestmark = needs_native


@each_io
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


@each_io
@pytest.mark.parametrize("record_bytes", [64, 512, 5000])
def test_an_error_of_a_read_is_told_for_ever(tmp_path: Path, io: str, record_bytes: int) -> None:
    store = open_store(table_rows(record_bytes=record_bytes), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    write_rows(store, [1, 500])
    store.flush()
    store.native.inject(False, 2, errno.EIO)
    with pytest.raises(StoreError, match=r"reading row (1|500) of table 'item' in .*/t: Input/output error"):
        read_rows(store, [1, 500])
    fails_for_ever(store, r"reading row (1|500) of table 'item'")


@each_io
def test_an_error_while_a_writer_waits_for_room(tmp_path: Path, io: str) -> None:
    store = open_store(table_rows(), kind="block", path=tmp_path / "t", engines=Engines(io=io, most_waiting_bytes=0))
    store.native.inject(True, 20, errno.EIO)
    with pytest.raises(StoreError, match="Input/output error"):
        for row in range(1000):
            write_rows(store, [row])
    assert store.counters()["waiting_bytes"] >= 0
    with pytest.raises(StoreError):
        store.close()


@each_io
def test_another_tables_failure_gives_its_room_back(tmp_path: Path, io: str) -> None:
    """A writer that waits for room goes on when the bytes it waits for are dropped with a table that failed."""
    engines = Engines(io=io, most_waiting_bytes=1 << 16)
    made = {"kind": "block", "engines": engines}
    good, bad = (open_store(table_rows(table=name), path=tmp_path / name, **made) for name in ("a", "b"))
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


@each_io
def test_a_file_truncated_while_open(tmp_path: Path, io: str) -> None:
    store = open_store(table_rows(), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    os.truncate(tmp_path / "t", 8192)
    with pytest.raises(StoreError, match=r"reading row 900 of table 'item' .* ends before its last row"):
        read_rows(store, [900])
    with pytest.raises(StoreError):
        store.close()


@each_io
@pytest.mark.parametrize("written", [[700], [999], list(range(992, 1000))])
@pytest.mark.parametrize("flushed", [False, True])
def test_a_file_cut_and_written_behind_its_end(tmp_path: Path, io: str, written: list[int], *, flushed: bool) -> None:
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


def test_a_mapped_file_truncated_while_open(tmp_path: Path) -> None:
    """Memory behind the end of its file ends the process that touches it, so this is another one."""
    program = """
import os, sys
import numpy as np
from hotrow.placement.stores import StoreError, TableRows, open_store
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
    rows = TableRows(table="item", record_bytes=512, num_rows=1000)
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
    done = run_forked(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), "SIGBUS is -7"
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 6
    assert all("closed" in line or "table 'item' in " in line for line in lines)
    assert sum("are lost" in line and "something truncated it" in line for line in lines) == 2 * 6


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
        rows, engines = table_rows(num_rows=100_000), Engines(io="io_uring")
        store = open_store(rows, kind="block", path=folder / "t", engines=engines)
        write_rows(store, list(range(0, 100_000, 4)))
        fails_for_ever(store, r"writing row.* of table 'item' in .*/t: No space left on device.*free some")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FORK = """
import os, sys, numpy as np
from hotrow.placement.stores import *
rows = TableRows(table="item", record_bytes=512, num_rows=1000)
*before, kind = sys.argv[1].split(" before ")
store = open_store(rows, kind=kind, path=sys.argv[2], engines=Engines(io=sys.argv[3]))
if before:
    few = TableRows(table="item", record_bytes=512, num_rows=16)
    store = open_cached_store(open_store(few, kind=before[0], path=sys.argv[2] + "-middle"), store)
array = np.ones((1, 512), np.uint8)
store.write([1], [0], [array])
if (child := os.fork()) == 0:
    for call in (lambda: store.read([1], [0], [array]), lambda: store.write([1], [0], [array]), store.flush):
        try: call()
        except StoreError as error: print(error, flush=True)
    store.close()
    del store
    if kind != "mapped":  # a store of the child's own is fine
        own = open_store(rows, kind=kind, path=sys.argv[2] + "2", engines=Engines(io=sys.argv[3]))
        own.write([1], [0], [array]); own.flush(); own.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
array[:] = 0
store.read([1], [0], [array])
assert array.all()
store.close()
if kind != "gathered":
    open_store(rows, kind=kind, path=sys.argv[2], engines=Engines(io=sys.argv[3])).close()
"""


@each_io
@pytest.mark.parametrize("kind", [*FILE_KINDS, "gathered", "dram before block", "mapped before block"])
def test_a_forked_child_is_told(tmp_path: Path, kind: str, io: str) -> None:
    done = run_forked(FORK, kind, tmp_path / "t", io)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("'item'" in line and "opened before this process was forked" in line for line in lines)


FORK_WHILE_READING = """
import os, sys, warnings
import numpy as np
from hotrow.kernels.ops import native_module
from hotrow.placement.stores import Engines, TableRows, open_store

warnings.simplefilter("ignore")
rows, array = np.random.default_rng(0).permutation(100_000), np.zeros((100_000, 512), np.uint8)
table = TableRows(table="item", record_bytes=512, num_rows=len(rows))
store = open_store(table, kind="block", path=sys.argv[1], engines=Engines(io="threads"))
store.write(rows, rows, [array])
store.flush()
reading = store.native.read(rows, rows, native_module().Records([array]))
if (child := os.fork()) == 0:
    if not reading.wait():
        print(store.failure(), flush=True)
    del reading
    os._exit(0)
print(os.waitpid(child, 0)[1])
assert reading.wait()
store.close()
"""


def test_a_child_forked_while_rows_are_read_does_not_wait_for_them(tmp_path: Path) -> None:
    done = run_forked(FORK_WHILE_READING, tmp_path / "t")
    assert done.returncode == 0, done.stderr
    *said, status = done.stdout.splitlines()
    assert status == "0"
    assert all("opened before this process was forked" in line for line in said), "none: all was read before the fork"


@each_io
def test_a_short_read_goes_on_from_a_whole_sector(tmp_path: Path, io: str) -> None:
    """Direct I/O refuses other places: what is left of a sector is read again."""
    store = open_store(table_rows(record_bytes=5000), kind="block", path=tmp_path / "t", engines=Engines(io=io))
    rows = [1, 7, 30]
    write_rows(store, rows)
    store.flush()
    expected = read_rows(store, rows)
    for length in (4096, 5119):
        store.native.inject(False, 1, -length)  # as if so many bytes had come
        assert (read_rows(store, rows) == expected).all()
    store.native.inject(False, 1, -100)
    for call in (lambda: read_rows(store, rows), store.close):
        with pytest.raises(StoreError, match="the file ends before its last row"):
            call()


LARGE_ROW = """
import resource, sys
from pathlib import Path
import numpy as np
from hotrow.placement.stores import Engines, StoreError, open_store
from store_rig import table_rows, write_rows

LENGTH = 64 << 20
rows = table_rows(record_bytes=LENGTH, num_rows=2)
store = open_store(rows, kind="block", path=Path(sys.argv[1]), engines=Engines(io=sys.argv[2]))
out = np.ones((1, LENGTH), np.uint8)
write_rows(store, [1])
store.flush()
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + LENGTH // 4, resource.RLIM_INFINITY))
try:
    store.read([1], np.arange(1), [out])
except StoreError as error:
    print(error)
"""


@each_io
def test_without_memory_for_a_large_row_its_table_fails(tmp_path: Path, io: str) -> None:
    """The engine's thread reads rows larger than its frames into memory of their own; once, that ended the process."""
    done = run_forked(LARGE_ROW, tmp_path / "t", io)
    assert done.returncode == 0, done.stderr
    assert "table 'item' lost rows, because there was no memory to move them" in done.stdout


STALLED = """
import ctypes, os, struct, sys, threading, time
from pathlib import Path
import numpy as np
from cache_rig import Rig, Shape, use
from hotrow.placement.stores import Engines

rig = Rig([Shape(num_rows=64, pinned=0, cached=8)]).in_files(Path(sys.argv[1]), "block", Engines(io="io_uring"))
use(rig, *range(8), dirty=True)
use(rig, *range(8, 16))
rig.stores[0].flush()

ENTER, EAGAIN, ALLOW = 426, 0x50000 | 11, 0x7FFF0000
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, ENTER), (0x06, 0, 0, EAGAIN), (0x06, 0, 0, ALLOW)]  # of the call's number
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(text)))
libc = ctypes.CDLL(None)
seccomp = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(seccomp, 1, 1, program):  # for every thread
    print("refused")
    os._exit(0)

flight, _ = rig.caches.admit(np.arange(8, dtype=np.int32), [(0, 0, 8)], True, 1)
before = time.process_time()
calls = [(flight.release, False), (flight.release, False), (rig.caches.write_back,), (rig.caches.counters, 0)]
threads = [threading.Thread(target=call, args=args, daemon=True) for call, *args in calls]
for thread in threads:
    thread.start()
    time.sleep(0.1)
print(time.process_time() - before, *(thread.is_alive() for thread in threads), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.uname().machine not in {"x86_64", "aarch64"}, reason="numbers of system calls")
@needs_io_uring
def test_an_engine_that_the_system_gives_nothing_sleeps_and_all_who_need_it_wait(tmp_path: Path) -> None:
    """io_uring_enter says EAGAIN for ever, so the batch's rows do not come: no thread may take its slots for free, and
    who waits for the caches lets other Python threads run.
    """
    done = run_forked(STALLED, tmp_path)
    assert done.returncode == 0, done.stderr
    if done.stdout == "refused\n":
        pytest.skip("seccomp is refused here")
    seconds, *waiting = done.stdout.split()
    assert float(seconds) < 0.2, "it asked again without a pause"
    assert waiting == ["True"] * 4

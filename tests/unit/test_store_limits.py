"""hotrow.placement.stores: memory that waiting rows take, and what is fallen back to where a system refuses."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import run_as_another, run_forked, run_python
from hotrow.base import files
from hotrow.cli import tools
from hotrow.kernels import ops
from hotrow.placement import store_file
from hotrow.placement.stores import Engines, io_uring_refused, open_store
from store_rig import each_io, needs_native, read_rows, table_rows, write_rows

pytestmark = needs_native


MEMORY_SLACK = 2 << 20
"""Beside what is counted: the caller's lists of moves, and what malloc keeps."""

WRITING = """
import re, sys, numpy as np
from pathlib import Path
from hotrow.placement.stores import *
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
tables = [TableRows(table=name, record_bytes=record_bytes, num_rows=60_000) for name in "abc"]
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


@pytest.mark.slow_but("64-threads")
@each_io
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's memory")
@pytest.mark.parametrize("record_bytes", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_what_waiting_rows_take_is_counted_and_bounded(tmp_path: Path, io: str, record_bytes: int) -> None:
    """Three tables of 4 to 60 MB are written through 6 MiB."""
    arguments = [str(tmp_path), io, str(record_bytes), str(6 << 20)]
    counted, peak = map(int, run_python("-c", WRITING, *arguments).split())
    assert peak <= counted + MEMORY_SLACK
    assert counted > 3 << 20, "the load was too light to fill it"


MIXED = """
import sys, numpy as np
from hotrow.placement.stores import Engines, TableRows, open_store
folder, io = sys.argv[1:]
engines = Engines(io=io, most_waiting_bytes=0)
large, small = 2_100_000, 64
stores = {}
for record_bytes, num_rows in ((large, 4), (small, 40_000)):
    rows = TableRows(table=f"t{record_bytes}", record_bytes=record_bytes, num_rows=num_rows)
    stores[record_bytes] = open_store(rows, kind="block", path=f"{folder}/{record_bytes}", engines=engines)
one, many = np.full((1, large), 7, np.uint8), np.arange(0, 40_000, 8)  # each in a sector of its own
for row in range(4):
    stores[large].write([row], [0], [one])
    stores[small].write(many, many, [np.full((40_000, small), row + 1, np.uint8)])
for store in stores.values():
    store.flush()
found = np.zeros((40_000, small), np.uint8)
stores[small].read(many, many, [found])
assert (found[many] == 4).all()
stores[large].read([3], [0], [one := np.zeros_like(one)])
assert (one == 7).all()
for store in stores.values():
    store.close()
"""


@each_io
def test_large_records_beside_small_ones(tmp_path: Path, io: str) -> None:
    """Memory for one record of more than 2 MiB, which comes in huge pages, holds thousands of small ones beside it."""
    done = run_forked(MIXED, tmp_path, io, timeout_s=20)
    assert done.returncode == 0, done.stderr


def test_memory_that_looks_like_a_disk_is_named(small_disk: tuple[Path, Callable[[int], None]]) -> None:
    folder, _ = small_disk
    assert files.file_system(folder / "t") == "tmpfs"
    engines = Engines()
    with pytest.warns(UserWarning, match=r"table 'item' is read and written by 40 threads.*disk is memory \(tmpfs\)"):
        store = open_store(table_rows(), kind="block", path=folder / "t", engines=engines)
    assert store.fallback is not None
    write_rows(store, [1])
    assert read_rows(store, [1]).all()
    store.close()
    with pytest.raises(ValueError, match=r'io="io_uring", but .*memory \(tmpfs\)'):
        open_store(table_rows(), kind="block", path=folder / "t", engines=Engines(io="io_uring"))


@pytest.mark.parametrize("refused", ["open", "read", "ring"])
def test_a_refusal_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    plain, native = os.open, ops.native_module()

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
    monkeypatch.setattr(ops, "native_module", Refusing)
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
from hotrow.placement.stores import *
from hotrow.kernels.ops import native_module
rows = TableRows(table="item", record_bytes=512, num_rows=1000)
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
native_module()  # all modules are loaded, from a folder that only root may be able to read
if os.geteuid() == 0: become(20_000 + os.getpid() % 30_000)  # root may start what it likes; nobody's user, alone
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


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's limit of a user's threads")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (0, "no thread for reads and writes of files could be started"),
        (1, "only 0 of 40 threads that read and write files could be started"),
        (5, "only 4 of 40 threads that read and write files could be started"),
    ],
)
def test_threads_that_cannot_be_started(more: int, said: str) -> None:
    """None is an error, fewer a warning; the process goes on, and takes signals as before."""
    if more and os.geteuid() != 0:
        pytest.skip("the user's other processes count too")
    out = run_as_another(FEWER_THREADS, more)
    assert f"{said} (Resource temporarily unavailable): raise the limit of processes (ulimit -u)" in out


LIMITED = """
import os, resource, sys
from hotrow.placement.stores import io_uring_refused
assert io_uring_refused() is None  # and all modules are loaded, from a folder that only root may be able to read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), int(sys.argv[1])))
if os.geteuid() == 0: become(65534)  # root may lock what it likes
print(io_uring_refused())
"""


@pytest.mark.parametrize("limit", [0, 64 << 10])
def test_too_little_locked_memory_is_a_reason(limit: int) -> None:
    """Also where a shorter queue than that of training would have enough."""
    if io_uring_refused():
        pytest.skip("io_uring is refused here anyway")
    out = run_as_another(LIMITED, limit)
    assert "io_uring is refused here (Cannot allocate memory)" in out and "ulimit -l" in out


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

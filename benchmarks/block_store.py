"""The block store alone: random rows against a bare io_uring loop, its own thread pool, and RocksDB.

    python -m benchmarks.block_store --out docs/measurements/benchmarks.json [--folder DIR] [--quick] [CELL ...]

A table of 1M records of 512 bytes (dim 64 and Adagrad's state), in files under --folder (default: here), which are
removed at the end; up to 4 GB lie there. Reads go past the page cache, so every row is cold. A round moves 8192 rows,
in holes that are written to 2048: read, or half of them written and half read, then synced. Rows are drawn at random
and given in their order, as steps give theirs. "written" is space that has data; "holes" is space of a sparse file that
nothing was written to yet, in pages no round touched before.

Peers: the bare loop (block_store.cpp, compiled here by CXX or c++), which keeps as many I/Os under way and looks at no
byte: the ratio is our share of what the machine allows; io_uring, against which our thread pool is held; RocksDB
through rocksdict's multi-get on 16 threads, direct reads, bloom filters, compacted.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.results import run_as_script
from hotrow.placement.stores import DEPTH, Engines, Store, TableRows, open_store

WIDTH = 128  # floats of a record
RECORD_BYTES = WIDTH * 4
HEADER_BYTES = PAGE_BYTES = 4096
PAGE_ROWS = PAGE_BYTES // RECORD_BYTES
CHUNK_ROWS = 1 << 16
ROCKS_THREADS = 16
HOLE_PAGES = 1 << 22  # for every round there may be: a sparse file costs nothing


@functools.cache
def native() -> ctypes.CDLL:
    """block_store.cpp, compiled into a temporary folder. Raises ValueError with the reason where it cannot be."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        raise ValueError("no C++ compiler is on the path: set CXX")
    source = Path(__file__).with_suffix(".cpp")
    with tempfile.TemporaryDirectory(prefix="hotrow-block-store-") as folder:
        library = Path(folder) / "block_store.so"
        command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{compiler} does not compile {source.name}: {done.stderr.strip().splitlines()[-1]}")
        return ctypes.CDLL(str(library))


class Space:
    """The files of all cells, made when first asked for, in a folder that goes at exit."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.num_rows, self.batch_rows = (1 << 16, 512) if quick else (1 << 20, 8192)
        self.folder = Path(tempfile.mkdtemp(prefix="hotrow-block-store-", dir=folder))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self._stores: dict[tuple[str, str], Store] = {}
        self._rocks: Any = None

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) of the table's values."""
        g = np.random.default_rng(1)
        for first in range(0, self.num_rows, CHUNK_ROWS):
            yield first, g.standard_normal((min(CHUNK_ROWS, self.num_rows - first), WIDTH), np.float32)

    def store(self, io: str, what: str, name: str) -> Store:
        """A store on "io_uring" or "threads", "written" or all "holes"; those of one name share a file."""
        if (io, name) not in self._stores:
            path = self.folder / f"{io}-{name}"
            num_rows = self.num_rows if what == "written" else HOLE_PAGES * PAGE_ROWS
            rows = TableRows(table="t", record_bytes=RECORD_BYTES, num_rows=num_rows)
            store = open_store(rows, kind="block", path=path, engines=Engines(io=io))  # type: ignore[arg-type]
            assert store.padded_record_bytes == RECORD_BYTES
            if what == "written":
                with path.open("r+b") as file:  # records lie one after another: see block_layout.h
                    file.seek(HEADER_BYTES)
                    for _, values in self.chunks():
                        file.write(values)
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._stores[io, name] = store
        return self._stores[io, name]

    def rocks(self) -> Any:
        """The table in RocksDB, its best settings for random reads of rows that no cache holds."""
        if self._rocks is None:
            import rocksdict

            options = rocksdict.Options(raw_mode=True)
            options.set_use_direct_reads(True)
            options.set_compression_type(rocksdict.DBCompressionType.none())
            options.increase_parallelism(os.cpu_count() or 1)
            blocks = rocksdict.BlockBasedOptions()
            blocks.disable_cache()
            blocks.set_bloom_filter(10, False)  # noqa: FBT003
            options.set_block_based_table_factory(blocks)
            db = rocksdict.Rdict(str(self.folder / "rocks"), options)
            for first, values in self.chunks():
                batch = rocksdict.WriteBatch(raw_mode=True)
                for row, value in enumerate(values, first):
                    batch.put(row.to_bytes(8, "big"), value.tobytes())
                db.write(batch)
            db.flush()
            db.compact_range(None, None)
            self._rocks = db
        return self._rocks


class Rounds:
    """The rows of each round, the same for both sides; on holes, of pages that no other round or side has touched."""

    def __init__(self, space: Space, what: str, *, mixed: bool = False) -> None:
        self.space, self.what, self.mixed = space, what, mixed
        self.pages = np.random.default_rng(5).permutation(HOLE_PAGES if what == "holes" else 0)
        self.taken = 0

    def rows(self, number: int) -> np.ndarray:
        """The next round's."""
        count, g = self.space.batch_rows, np.random.default_rng(number)
        if self.what == "written":
            return np.sort(g.choice(self.space.num_rows, count, replace=False))
        if self.mixed:
            count //= 4  # the file system makes room for each
        if self.taken + count > len(self.pages):
            raise ValueError("no holes are left: fewer rounds, or more rows")
        self.taken += count
        pages = self.pages[self.taken - count : self.taken]
        return np.sort(pages * PAGE_ROWS + g.integers(0, PAGE_ROWS, count))


class Side:
    """What both sides share: the rows of a round, of which every second is written where `mixed`."""

    def __init__(self, rounds: Rounds, *, mixed: bool) -> None:
        self.rounds, self.mixed = rounds, mixed
        self.num_ios, self.cpu_s = 0, 0.0

    def prepare(self, batch: int) -> None:
        """Draw the rows."""
        self.rows = self.rounds.rows(batch)
        self.written = self.rows[1::2] if self.mixed else self.rows[:0]
        self.read = self.rows[::2] if self.mixed else self.rows

    def outputs(self) -> Iterable[Tensor]:
        """Nothing: the bare loop looks at no byte."""
        return ()

    def cpu_us(self) -> float:
        """Processor time of an I/O, its share of the kernel's included, so far."""
        return self.cpu_s / max(1, self.num_ios) * 1e6


class ByStore(Side):
    """hotrow's store."""

    def __init__(self, rounds: Rounds, store: Store, *, mixed: bool, compared: bool = False) -> None:
        super().__init__(rounds, mixed=mixed)
        self.store, self.compared = store, compared
        self.slots, self.out = np.arange(rounds.space.batch_rows), torch.zeros(rounds.space.batch_rows, WIDTH)

    def run(self) -> None:
        """Write, read, and wait for both."""
        before = self.store.counters()
        slots = np.split(self.slots[: len(self.rows)], [len(self.written)])
        if self.mixed:
            self.store.write(self.written, slots[0], [self.out])
        self.store.read(self.read, slots[1], [self.out])
        if self.mixed:
            self.store.flush()
        after = self.store.counters()
        self.num_ios += sum(after[name] - before[name] for name in ("reads", "writes"))
        self.cpu_s += (after["io_cpu_ns"] - before["io_cpu_ns"]) / 1e9

    def outputs(self) -> Iterable[Tensor]:
        """The rows read."""
        return (self.out[len(self.written) :],) if self.compared else ()


class Bare(Side):
    """The bare loop, on the same file."""

    def __init__(self, rounds: Rounds, path: Path, *, mixed: bool, batch: int) -> None:
        super().__init__(rounds, mixed=mixed)
        self.path, self.batch, self.raw = path, batch, native().raw

    def run(self) -> None:
        """All I/Os of the round, reads and writes in turn."""
        n, cpu_s = len(self.rows), ctypes.c_double()
        writes = (np.arange(n) % 2 if self.mixed else np.zeros(n)).astype(np.uint8)
        offsets = HEADER_BYTES + self.rows.astype(np.int64) * RECORD_BYTES
        line = self.raw(
            os.fsencode(self.path), ctypes.c_void_p(offsets.ctypes.data), ctypes.c_void_p(writes.ctypes.data),
            ctypes.c_int64(n), ctypes.c_int64(RECORD_BYTES), DEPTH, self.batch, int(self.mixed), ctypes.byref(cpu_s),
        )  # fmt: skip
        if line:
            raise RuntimeError(f"the bare loop failed in line {line} of block_store.cpp")
        self.num_ios += n
        self.cpu_s += cpu_s.value


class Rocks(Side):
    """RocksDB's multi-get, the keys cut among threads."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds, mixed=False)
        self.db, self.pool = rounds.space.rocks(), ThreadPoolExecutor(ROCKS_THREADS)

    def run(self) -> None:
        """Read all rows."""
        keys = [row.to_bytes(8, "big") for row in self.rows.tolist()]
        pieces = [keys[i : i + 64] for i in range(0, len(keys), 64)]
        self.values = [value for piece in self.pool.map(self.db.__getitem__, pieces) for value in piece]

    def outputs(self) -> Iterable[Tensor]:
        """The rows read."""
        return (torch.from_numpy(np.frombuffer(b"".join(self.values), np.float32).reshape(-1, WIDTH).copy()),)


def cell(space: Space, name: str, peer: str, build: Callable[[], tuple[Side, Side]], target: float) -> bench.Cell:
    """A cell whose note says what an I/O costs the processor."""
    sides: list[tuple[Side, Side]] = []

    def kept() -> tuple[Side, Side]:
        sides.append(build())
        return sides[0]

    def note() -> str:
        ours, theirs = (f"{side.cpu_us():.2f} us" if side.cpu_s else "not measured" for side in sides[0])
        return f"processor time of an I/O: ours {ours}, the peer's {theirs}; {len(sides[0][0].rows)} rows a round"

    return bench.Cell(name=name, peer=peer, build=kept, limit_s=lambda threads: None, target=target, note=note)


def against_bare(space: Space, *, what: str, name: str, mixed: bool, batch: int) -> tuple[Side, Side]:
    store, rounds = space.store("io_uring", what, name), Rounds(space, what, mixed=mixed)
    assert store.path is not None
    return ByStore(rounds, store, mixed=mixed), Bare(rounds, store.path, mixed=mixed, batch=batch)


def threads_against_ring(space: Space, *, what: str, name: str, mixed: bool) -> tuple[Side, Side]:
    threads, ring = (
        ByStore(Rounds(space, what, mixed=mixed), space.store(io, what, name), mixed=mixed, compared=not mixed)
        for io in ("threads", "io_uring")
    )
    return threads, ring


def against_rocks(space: Space) -> tuple[Side, Side]:
    rounds = Rounds(space, "written")
    return ByStore(rounds, space.store("io_uring", "written", "read"), mixed=False, compared=True), Rocks(rounds)


def cells_on(space: Space, what: str, kind: str) -> Iterator[bench.Cell]:
    """Reads or mixed rounds, on written space or on holes: the bare loop as the limit, and our threads."""
    mixed = kind == "mixed"

    def made(name: str, peer: str, build: Callable[..., tuple[Side, Side]], target: float) -> bench.Cell:
        file = name if what == "holes" else kind
        return cell(space, name, peer, partial(build, space, what=what, name=file, mixed=mixed), target)

    for batch in (1, DEPTH // 4):  # the better of the two is the limit
        peer = f"a bare io_uring loop, depth {DEPTH}, {batch} completions at a time"
        build = partial(against_bare, batch=batch)
        yield made(f"store_{kind}_{what}_vs_bare_{batch}", peer, build, 0.85 if mixed else 0.9)
    yield made(f"store_threads_{kind}_{what}", "our own io_uring", threads_against_ring, 0.8)


def store_cells(options: argparse.Namespace) -> list[bench.Cell]:
    """Reads and mixed rounds on written space and on holes, and RocksDB."""
    options.folder.mkdir(parents=True, exist_ok=True)
    space = Space(options.folder, quick=options.quick)
    kinds = [(what, kind) for what in ("written", "holes") for kind in ("read", "mixed")]
    rocks = cell(space, "store_read_vs_rocksdb", "RocksDB, multi-get", partial(against_rocks, space), 2.0)
    return [made for what, kind in kinds for made in cells_on(space, what, kind)] + [rocks]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files lie: on the disk to measure")


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    if sys.platform != "linux":
        raise SystemExit("this benchmark needs Linux: it measures io_uring")
    run_as_script("block_store", store_cells, __doc__, add_options)


if __name__ == "__main__":
    main()

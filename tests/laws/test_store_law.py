"""Every store against a plain array: whatever the schedule of reads and writes, a row reads as it was last written.

Schedules are random, from printed seeds: several tables on one engine, reads under way together, rows read while their
write waits, rows of one sector written apart and together, rows given twice, files opened again.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotrow.kernels import ops
from hotrow.placement.store_file import page_records
from hotrow.placement.stores import Engines, Kind, Store, TableRows, io_uring_refused, open_cached_store, open_store
from loops import looped
from sampled import sampled

RECORD_BYTES = (4, 17, 64, 100, 252, 256, 260, 512, 768, 1024, 4096, 5000)
NUM_SLOTS = 400
PLACES = (1, 2, 15, 16, 17, 50, 200, 1200)
pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
MEDIA = ["dram", "mapped", "threads", "io_uring", "dram before threads", "mapped before io_uring"]
MEDIA += ["gathered threads", "gathered io_uring", "dram before gathered threads"]
"""Stores, and tiers before stores."""


def engines_of(medium: str, *, depth: int = 16, most_waiting_bytes: int = 1 << 20) -> Engines:
    if "io_uring" in medium and (reason := io_uring_refused()):
        pytest.skip(f"io_uring is refused here: {reason}")
    io = "io_uring" if "io_uring" in medium else "threads"
    return Engines(io=io, depth=depth, num_threads=4, most_waiting_bytes=most_waiting_bytes)


@pytest.fixture(params=MEDIA)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param)


def open_medium(medium: str, rows: TableRows, path: Path, engines: Engines, places: int = 100) -> Store:
    """places: rows that a tier before another holds."""
    if " before " in medium:
        before, medium = medium.split(" before ")
        held = replace(rows, num_rows=places)
        middle = open_store(held, kind=before, path=path.with_suffix(".middle"))  # type: ignore[arg-type]
        return open_cached_store(middle, open_medium(medium, rows, path, engines))
    kind: Kind = medium if medium in ("dram", "mapped") else "block"  # type: ignore[assignment]
    if "gathered" in medium and page_records(rows.record_bytes) is not None:
        kind = "gathered"
        path.unlink(missing_ok=True)  # of an earlier store, which alone could read it
    return open_store(rows, kind=kind, path=path, engines=engines)


def parts_of(record_bytes: int) -> tuple[int, ...]:
    """Lengths of the parts of a record: three where it is long enough, uneven."""
    if record_bytes < 8:
        return (record_bytes,)
    return (record_bytes - 6, 2, 4)


class Table:
    """A store, the array it must equal, and slots to move rows through."""

    def __init__(
        self, name: str, folder: Path, medium: str, engines: Engines, record_bytes: int, num_rows: int, places: int
    ) -> None:
        self.rows = TableRows(table=name, record_bytes=record_bytes, num_rows=num_rows)
        self.medium, self.path, self.engines, self.places = medium, folder / f"{name}.rows", engines, places
        self.truth = np.zeros((num_rows, record_bytes), np.uint8)
        self.arrays = [np.zeros((NUM_SLOTS, width), np.uint8) for width in parts_of(record_bytes)]
        self.pending: list[tuple[Any, np.ndarray, np.ndarray]] = []
        self.store = self._open()

    def _open(self) -> Store:
        return open_medium(self.medium, self.rows, self.path, self.engines, self.places)

    def write(self, rows: np.ndarray, g: np.random.Generator) -> None:
        self.settle()
        slots = g.permutation(NUM_SLOTS)[: len(rows)]
        values = g.integers(0, 256, (len(rows), self.rows.record_bytes), dtype=np.uint8)
        at = 0
        for array in self.arrays:
            array[slots] = values[:, at : at + array.shape[1]]
            at += array.shape[1]
        self.store.write(rows, slots, self.arrays)
        for row, value in zip(rows, values, strict=True):  # of a row given twice the last counts
            self.truth[row] = value
        for array in self.arrays:
            array[:] = 0x55

    def start_read(self, rows: np.ndarray, slots: np.ndarray) -> None:
        reading = self.store.native.read(
            rows.astype(np.int64), slots.astype(np.int64), ops.native_module().Records(self.arrays)
        )
        self.pending.append((reading, rows, slots))

    def settle(self) -> None:
        """Wait for what is being read, and compare it."""
        for reading, rows, slots in self.pending:
            assert reading.wait()
            assert reading.finished()
            found = np.concatenate([array[slots] for array in self.arrays], axis=1)
            np.testing.assert_array_equal(found, self.truth[rows])
        self.pending.clear()

    def check_all(self) -> None:
        self.settle()
        for first in range(0, len(self.truth), NUM_SLOTS):
            rows = np.arange(first, min(first + NUM_SLOTS, len(self.truth)))
            self.start_read(rows, np.arange(len(rows)))
            self.settle()

    def reopen(self) -> None:
        self.settle()
        self.store.close()
        if self.medium == "dram" or self.store.kind == "gathered":
            self.truth[:] = 0
        self.store = self._open()

    def close(self) -> None:
        self.settle()
        self.store.close()


def some_rows(g: np.random.Generator, num_rows: int, count: int) -> np.ndarray:
    """Scattered, or neighbours, in any order."""
    if g.random() < 0.5:
        return g.choice(num_rows, min(count, num_rows), replace=False)
    first = g.integers(num_rows)
    return g.permutation(np.arange(first, min(first + count, num_rows)))


def step(table: Table, g: np.random.Generator) -> None:
    """One random thing done to a table."""
    what, num_rows, count = g.random(), len(table.truth), int(g.integers(0, 40))
    if what < 0.42:
        table.write(some_rows(g, num_rows, count), g)
    elif what < 0.5:
        table.write(g.integers(0, num_rows, count), g)  # with repeats
    elif what < 0.88:
        rows = some_rows(g, num_rows, count)
        used = sum(len(slots) for _, _, slots in table.pending)
        if used + len(rows) > NUM_SLOTS:
            table.settle()
            used = 0
        table.start_read(rows, np.arange(used, used + len(rows)))
    elif what < 0.93:
        table.settle()
        table.store.flush()
    else:
        table.reopen()


def run_schedule(folder: Path, medium: str, seed: int, sizes: tuple[int, ...], num_steps: int, depth: int) -> None:
    g = np.random.default_rng(seed)
    # At times so few bytes may wait that writers wait for nearly every write.
    engines = engines_of(medium, depth=depth, most_waiting_bytes=int(g.choice([0, 20_000, 1 << 20])))
    tables = [
        Table(f"t{seed}-{i}", folder, medium, engines, size, int(g.integers(1, 700)), int(g.choice(PLACES)))
        for i, size in enumerate(sizes)
    ]
    for _ in range(num_steps):
        step(tables[g.integers(len(tables))], g)
    for table in tables:
        table.check_all()
        table.reopen()
        table.check_all()
        table.close()
        table.path.unlink(missing_ok=True)
        table.path.with_suffix(".middle").unlink(missing_ok=True)


@pytest.mark.slow_but(
    "mapped-sample", "io_uring-sample", "threads-sample", "gathered io_uring-sample", "dram before threads-sample"
)
@looped("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@looped("record_bytes", RECORD_BYTES)
def test_against_a_plain_array(tmp_path: Path, medium: str, record_bytes: int, seed: int) -> None:
    run_schedule(tmp_path, medium, seed, (record_bytes,), num_steps=60, depth=16)


@pytest.mark.parametrize("medium", MEDIA[2:])
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([*RECORD_BYTES, 1, 12, 255, 2048, 4100]), min_size=1, max_size=4),
    depth=st.sampled_from([1, 2, 3, 8, 128]),
)
def test_any_schedule_of_several_tables_on_one_engine(
    tmp_path: Path, medium: str, seed: int, sizes: list[int], depth: int
) -> None:
    run_schedule(tmp_path, medium, seed, tuple(sizes), num_steps=80, depth=depth)


@looped(("medium", "record_bytes"), sampled(MEDIA, [4, 100, 512], pairs=False))
def test_threads_that_share_sectors(tmp_path: Path, medium: str, record_bytes: int) -> None:
    """Each thread owns every fourth row, so that all meet in every sector; none may lose another's bytes."""
    num_threads, num_rows, errors = 4, 1200, []
    rows = TableRows(table="t", record_bytes=record_bytes, num_rows=num_rows)

    def work(store: Store, own: int) -> None:
        g = np.random.default_rng(own)
        mine = np.arange(own, num_rows, num_threads)
        truth, array = np.zeros((num_rows, record_bytes), np.uint8), np.zeros((len(mine), record_bytes), np.uint8)
        try:
            for _ in range(30):
                chosen = g.choice(mine, 50, replace=False)
                array[:50] = truth[chosen] = g.integers(0, 256, (50, record_bytes), dtype=np.uint8)
                store.write(chosen, np.arange(50), [array])
                read = g.choice(mine, 80, replace=False)
                store.read(read, np.arange(80), [array])
                np.testing.assert_array_equal(array[:80], truth[read])
        except BaseException as error:
            errors.append(error)

    with open_medium(medium, rows, tmp_path / "t.rows", engines_of(medium)) as store:
        threads = [threading.Thread(target=work, args=(store, own)) for own in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


@looped("io", ["threads", "io_uring"])
def test_a_row_is_read_out_of_its_waiting_write(tmp_path: Path, io: str) -> None:
    rows = TableRows(table="t", record_bytes=512, num_rows=5000)
    value, found = torch.arange(5000 * 128).view(5000, 128).float(), torch.zeros(5000, 128)
    every = np.arange(5000)
    with open_store(
        rows, kind="block", path=tmp_path / "t", engines=engines_of(io, most_waiting_bytes=1 << 30)
    ) as store:
        store.write(every, every, [value])
        value.zero_()  # copied before write returned
        store.read(every, every, [found])
        assert torch.equal(found, torch.arange(5000 * 128).view(5000, 128).float())
        assert store.counters()["served_from_queue"] > 1000


@looped("num_threads", [1, 8])
def test_threads_read_holes_and_written_rows_in_turn(tmp_path: Path, num_threads: int) -> None:
    """Holes take the processor alone, and the engine's thread reads them too; written rows are the pool's."""
    num_rows, words, g = 1 << 18, 128, np.random.default_rng(3)
    rows = TableRows(table="t", record_bytes=4 * words, num_rows=num_rows)
    truth, array = np.zeros(num_rows, np.float32), np.zeros((4000, words), np.float32)
    engines = Engines(io="threads", depth=128, num_threads=num_threads, most_waiting_bytes=1 << 20)
    with open_store(rows, kind="block", path=tmp_path / "t", engines=engines) as store:
        written = np.sort(g.choice(num_rows // 2, 2000, replace=False))
        for step in range(12):
            some = np.sort(g.choice(written, 200, replace=False))
            truth[some] = step + g.random(200, np.float32)
            array[:200] = truth[some, None]
            store.write(some, np.arange(200), [array])
            holes = num_rows // 2 + g.choice(num_rows // 2, 2000, replace=False)
            read = (holes, written, np.concatenate([written, holes]))[step % 3]
            array[:] = -1
            store.read(read, np.arange(len(read)), [array])
            np.testing.assert_array_equal(array[: len(read)], np.repeat(truth[read, None], words, 1))


@looped("io", ["threads", "io_uring"])
def test_what_ios_are_merged(tmp_path: Path, io: str) -> None:
    """Reads by page; writes of neighbouring units; a sector that is whole is not read first."""

    def counted(record_bytes: int, rows: list[int], name: str) -> tuple[int, int, int, int]:
        table = TableRows(table=name, record_bytes=record_bytes, num_rows=10_000)
        array = np.ones((len(rows), record_bytes), np.uint8)
        with open_store(table, kind="block", path=tmp_path / name, engines=engines_of(io)) as store:
            store.write(rows, np.arange(len(rows)), [array])
            store.flush()
            c = store.counters()
            store.read(rows, np.arange(len(rows)), [array])
            after = store.counters()
            return c["writes"], c["read_modify_writes"], c["written_bytes"], after["reads"] - c["reads"]

    assert counted(512, [3, 1, 0, 2, 40, 41, 9], "units") == (3, 0, 3584, 3)  # pages 0, 1 and 5
    assert counted(64, list(range(8)), "a whole sector") == (1, 0, 512, 1)
    assert counted(64, [0, 5, 9], "two sectors in part") == (1, 1, 1024, 1)
    assert counted(1024, [7, 8], "two pages") == (2, 0, 2048, 2)
    assert counted(5000, [0, 1], "larger than a page") == (2, 0, 2 * 5120, 2)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Python knows nothing of the engine's threads; a test that leaves Python's own would disturb the next."""
    before = threading.active_count()
    yield
    assert threading.active_count() <= before  # a thread of an earlier test may end meanwhile

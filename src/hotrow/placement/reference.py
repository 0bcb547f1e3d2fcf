"""Readable twins of the native stores: one pread or pwrite per row, done when a call returns, the same files.

Many times slower; native/include/hotrow/store.h, block_layout.h and memory_store.h say what they have to do.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 4096
TAIL_BYTES = 4096
PAGE_BYTES = 4096
SET_PLACES = 16
PACKED_PAGE_BYTES, MOST_PACKED_ROWS = 16384, 255
PLACES_PER_ROW, LEAST_PAGE_PLACES, NO_PLACE = 2, 8, 0xFFFF
COUNTERS = (
    "reads read_rows read_bytes writes written_rows written_bytes served_from_queue read_modify_writes blocked_ns "
    "waiting_bytes io_cpu_ns middle_hits middle_rows middle_read_bytes middle_written_bytes middle_map_bytes "
    "places_bytes held_bytes"
)


class Engine:
    """Calls are done at once here: nothing waits."""

    def num_bytes(self) -> int:
        """Of memory."""
        return 0

    def blocked_ns(self) -> int:
        """That writers waited."""
        return 0


def start_engine(ring: bool, depth: int, num_threads: int, most_waiting_bytes: int) -> tuple[Any, str]:  # noqa: FBT001
    """(engine, why not)."""
    return (None, "the native module is absent") if ring else (Engine(), "")


def block_layout(record_bytes: int, sector: int, num_rows: int, gathered: bool) -> list[int]:  # noqa: FBT001
    """[unit_bytes, unit_rows, page_bytes, page_units, file_bytes], see block_layout.h and gathered_store.h."""
    shared = 2 * record_bytes < sector + gathered
    unit_bytes = sector if shared else -(-record_bytes // sector) * sector
    unit_rows = sector // record_bytes if shared else 1
    page_bytes = PACKED_PAGE_BYTES if gathered else PAGE_BYTES
    while page_bytes > PAGE_BYTES and page_bytes // unit_bytes * unit_rows > MOST_PACKED_ROWS:
        page_bytes //= 2
    page_bytes = max(unit_bytes, page_bytes)
    page_units = page_bytes // unit_bytes
    page_rows = page_units * unit_rows
    if gathered:
        if not LEAST_PAGE_PLACES <= page_rows <= MOST_PACKED_ROWS:
            return []
        region_places = NO_PLACE // page_rows * page_rows
        num_rows = -(-num_rows // (region_places // PLACES_PER_ROW)) * region_places
    num_pages = -(-num_rows // page_rows)
    file_bytes = -(-(HEADER_BYTES + num_pages * page_bytes) // PAGE_BYTES) * PAGE_BYTES + TAIL_BYTES
    return [unit_bytes, unit_rows, page_bytes, page_units, file_bytes]


def mapped_file_bytes(record_bytes: int, num_rows: int) -> int:
    """Bytes of a mapped store's file."""
    return HEADER_BYTES + record_bytes * num_rows + TAIL_BYTES


def direct_sector(descriptor: int) -> int:
    """0: the reference reads through the page cache."""
    return 0


def try_read(descriptor: int, num_bytes: int) -> int:
    """One real read: 0, or an errno."""
    try:
        os.pread(descriptor, num_bytes, 0)
    except OSError as error:
        return error.errno or -1
    return 0


class Records:
    """Arrays of slots, one per part of a record: [num_slots, ...]."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        views = [np.asarray(array) for array in arrays]
        if any(not view.flags.c_contiguous or len(view) != len(views[0]) for view in views):
            raise ValueError("arrays of slots must be contiguous, and of as many slots")
        num_slots = len(views[0])
        self.parts = [view.reshape(num_slots, view[:1].size).view(np.uint8) for view in views]

    def get(self, slot: int) -> bytes:
        """The record in a slot."""
        return b"".join(part[slot].tobytes() for part in self.parts)

    def put(self, slot: int, record: bytes) -> None:
        """Lay a record into a slot."""
        at = 0
        for part in self.parts:
            part[slot] = np.frombuffer(record, np.uint8, part.shape[1], at)
            at += part.shape[1]


class Reading:
    """A read that is over."""

    def __init__(self, *, good: bool) -> None:
        self._good = good

    def finished(self) -> bool:
        """True."""
        return True

    def wait(self) -> bool:
        """Whether the rows came."""
        return self._good


class Store:
    """Records of `record_bytes`; where they lie is its children's matter."""

    def __init__(self, record_bytes: int, num_rows: int, table: str, path: str) -> None:
        self._record_bytes, self._num_rows, self._where = record_bytes, num_rows, f"table {table!r} in {path}"
        self._failure, self._counts = "", {"read_rows": 0, "written_rows": 0}

    def record_bytes(self) -> int:
        """Of one row."""
        return self._record_bytes

    def num_rows(self) -> int:
        """Rows there is room for."""
        return self._num_rows

    def failure(self) -> str:
        """Why the store does no more; empty while all is well."""
        return self._failure

    def counters(self) -> dict[str, int]:
        """The counters of StoreCounters that mean something here; the rest are 0."""
        return {**dict.fromkeys(COUNTERS.split(), 0), **self._counts}

    def read(self, rows: NDArray[np.int64], slots: NDArray[np.int64], records: Records) -> Reading:
        """Rows into slots, at once."""
        good = self._each("reading", rows, slots, lambda row, slot: records.put(slot, self._get(row)))
        self._counts["read_rows"] += len(rows)
        return Reading(good=good)

    def write(self, rows: NDArray[np.int64], slots: NDArray[np.int64], records: Records) -> None:
        """Slots into rows, at once."""
        self._each("writing", rows, slots, lambda row, slot: self._put(row, records.get(slot)))
        self._counts["written_rows"] += len(rows)

    def _each(self, doing: str, rows: NDArray[np.int64], slots: NDArray[np.int64], move: Any) -> bool:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self._num_rows:
            raise ValueError("row out of range")
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if self._failure:
                break
            try:
                move(row, slot)
            except OSError as error:
                self._failure = (
                    f"{doing} row {row} of {self._where}: {error.strerror}; free space or look into the kernel's log "
                    "(dmesg), then resume from the last checkpoint"
                )
        return not self._failure

    def flush(self) -> bool:
        """Whether all is well."""
        return not self._failure

    def fail(self, why: str) -> None:
        """Nothing is written any more, and every later call fails. why: what the table did, and the cure."""
        self._failure = self._failure or f"{self._where} {why}"

    def grow(self, num_rows: int) -> bool:
        """Make room for more rows."""
        self._num_rows = max(num_rows, self._num_rows)
        return not self._failure

    def _get(self, row: int) -> bytes:
        raise NotImplementedError

    def _put(self, row: int, record: bytes) -> None:
        raise NotImplementedError


class _Dram(Store):
    def __init__(self, record_bytes: int, num_rows: int, table: str) -> None:
        super().__init__(record_bytes, num_rows, table, "memory")
        self._rows: dict[int, bytes] = {}

    def _get(self, row: int) -> bytes:
        return self._rows.get(row, bytes(self._record_bytes))

    def _put(self, row: int, record: bytes) -> None:
        self._rows[row] = record


class _File(Store):
    def __init__(
        self,
        descriptor: int,
        record_bytes: int,
        sector: int | None,
        num_rows: int,
        table: str,
        path: str,
        *,
        gathered: bool = False,
    ) -> None:
        super().__init__(record_bytes, num_rows, table, path)
        self._descriptor, self._sector, self._gathered = descriptor, sector, gathered

    def _place(self, row: int) -> int:
        if self._sector is None:
            return HEADER_BYTES + row * self._record_bytes
        layout = block_layout(self._record_bytes, self._sector, 0, self._gathered)
        unit_bytes, unit_rows, page_bytes, page_units, _ = layout
        page, unit = divmod(row // unit_rows, page_units)
        return HEADER_BYTES + page * page_bytes + unit * unit_bytes + row % unit_rows * self._record_bytes

    def _file_bytes(self, num_rows: int) -> int:
        if self._sector is None:
            return mapped_file_bytes(self._record_bytes, num_rows)
        return block_layout(self._record_bytes, self._sector, num_rows, self._gathered)[4]

    def _check_whole(self) -> None:
        if os.fstat(self._descriptor).st_size < self._file_bytes(self._num_rows):
            raise OSError(0, "the file ends before its last row: something truncated it")

    def _get(self, row: int) -> bytes:
        record = os.pread(self._descriptor, self._record_bytes, self._place(row))
        self._check_whole()
        return record

    def _put(self, row: int, record: bytes) -> None:
        self._check_whole()
        if os.pwrite(self._descriptor, record, self._place(row)) < len(record):
            raise OSError(0, "less was written than asked for")

    def flush(self) -> bool:
        """Everything is on the medium; False when the store failed."""
        try:
            os.fsync(self._descriptor)
            self._check_whole()
        except OSError as error:
            self._failure = self._failure or f"syncing {self._where}: {error.strerror}"
        return not self._failure

    def grow(self, num_rows: int) -> bool:
        """Make room for more rows, which read as zeros."""
        if num_rows > self._num_rows and self.flush():
            os.ftruncate(self._descriptor, self._file_bytes(num_rows))
        return super().grow(num_rows)

    def __del__(self) -> None:
        os.close(self._descriptor)


class _Cached(Store):
    """A store before another: the same places, and the same rows leave them, as in cached_store.h."""

    def __init__(self, middle: Store, lower: Store, table: str) -> None:
        super().__init__(lower.record_bytes(), lower.num_rows(), table, "the tier before its disk")
        self._middle, self._lower = middle, lower
        self._ways = min(SET_PLACES, middle.num_rows())
        self._hands = [0] * (middle.num_rows() // self._ways)  # of each set, which way is next
        self._place_of: dict[int, int] = {}
        self._row_at: dict[int, int] = {}
        self._newer: set[int] = set()  # rows whose image below is older
        self._again: set[int] = set()  # places written again since their turn
        self._hits = 0

    def _get(self, row: int) -> bytes:
        if row in self._place_of:
            self._hits += 1
            return self._middle._get(self._place_of[row])
        self._lower._counts["read_rows"] += 1
        return self._lower._get(row)

    def _put(self, row: int, record: bytes) -> None:
        if row in self._place_of:
            self._again.add(self._place_of[row])
        else:
            self._give_place(row)
        self._newer.add(row)
        self._middle._put(self._place_of[row], record)

    def _give_place(self, row: int) -> None:
        of = row % len(self._hands)
        while True:
            place = of * self._ways + self._hands[of]
            self._hands[of] = (self._hands[of] + 1) % self._ways
            if place not in self._again:
                break
            self._again.remove(place)
        if (leaving := self._row_at.get(place)) is not None:
            self._write_down(leaving)
            del self._place_of[leaving]
        self._place_of[row], self._row_at[place] = place, row

    def _write_down(self, row: int) -> None:
        if row in self._newer and not self.failure():
            self._lower._put(row, self._middle._get(self._place_of[row]))
            self._lower._counts["written_rows"] += 1
            self._newer.remove(row)

    def flush(self) -> bool:
        """What is newer here goes down, and down there to the medium."""
        try:
            for row in sorted(self._newer):
                self._write_down(row)
        except OSError as error:
            self._failure = self._failure or f"writing {self._where}: {error.strerror}"
        return self._lower.flush() and not self.failure()

    def fail(self, why: str) -> None:
        """Nothing goes down any more."""
        super().fail(why)
        self._lower.fail(why)

    def grow(self, num_rows: int) -> bool:
        """Make room for more rows below."""
        return self._lower.grow(num_rows) and super().grow(num_rows)

    def failure(self) -> str:
        """Its own, or the lower store's."""
        return self._failure or self._lower.failure()

    def counters(self) -> dict[str, int]:
        """The lower store's, and the rows that were read and lie here."""
        return {**self._lower.counters(), "middle_hits": self._hits, "middle_rows": len(self._row_at)}


def open_dram_store(record_bytes: int, num_rows: int, table: str) -> Store:
    """In memory."""
    return _Dram(record_bytes, num_rows, table)


def open_mapped_store(descriptor: int, record_bytes: int, num_rows: int, table: str, path: str) -> Store:
    """In a file without padding."""
    return _File(descriptor, record_bytes, None, num_rows, table, path)


def open_block_store(
    engine: Any,
    descriptor: int,
    record_bytes: int,
    sector: int,
    num_rows: int,
    table: str,
    path: str,
    gathered: bool,  # noqa: FBT001
) -> Store:
    """In a file of whole sectors, through the page cache: direct I/O would ask for aligned memory.

    gathered: a file as large as a gathered one, in which rows have places of their own all the same: nobody can tell.
    """
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
    return _File(descriptor, record_bytes, sector, num_rows, table, path, gathered=gathered)


def open_cached_store(middle: Store, lower: Store, table: str) -> Store:
    """`middle` before `lower`."""
    if middle.record_bytes() != lower.record_bytes() or middle.num_rows() < 1:
        raise ValueError("the records of middle and lower differ in length, or the middle holds no row")
    return _Cached(middle, lower, table)


def make_caches() -> Any:
    """The caches of a collection's tables, without any yet."""
    from hotrow.placement import reference_cache  # it is made of the records above

    return reference_cache.Caches()

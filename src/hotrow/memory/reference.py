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
PAGE_BYTES = 4096


class Engine:
    """Calls are done at once here: nothing waits."""

    def num_bytes(self) -> int:
        """Of memory."""
        return 0


def start_engine(ring: bool, depth: int, num_threads: int, most_waiting_bytes: int) -> tuple[Any, str]:  # noqa: FBT001
    """(engine, why not)."""
    return (None, "the native module is absent") if ring else (Engine(), "")


def block_layout(record_bytes: int, sector: int, num_rows: int) -> list[int]:
    """[unit_bytes, unit_rows, page_bytes, page_units, file_bytes], see block_layout.h."""
    shared = 2 * record_bytes < sector
    unit_bytes = sector if shared else -(-record_bytes // sector) * sector
    unit_rows = sector // record_bytes if shared else 1
    page_bytes = max(unit_bytes, PAGE_BYTES)
    page_units = page_bytes // unit_bytes
    num_pages = -(-num_rows // (page_units * unit_rows))
    return [unit_bytes, unit_rows, page_bytes, page_units, HEADER_BYTES + num_pages * page_bytes]


def mapped_file_bytes(record_bytes: int, num_rows: int) -> int:
    """Bytes of a mapped store's file."""
    return HEADER_BYTES + record_bytes * num_rows


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
        names = "reads read_bytes writes written_bytes served_from_queue read_modify_writes blocked_ns waiting_bytes"
        return {**dict.fromkeys([*names.split(), "io_cpu_ns"], 0), **self._counts}

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
        self, descriptor: int, record_bytes: int, sector: int | None, num_rows: int, table: str, path: str
    ) -> None:
        super().__init__(record_bytes, num_rows, table, path)
        self._descriptor, self._sector = descriptor, sector

    def _place(self, row: int) -> int:
        if self._sector is None:
            return HEADER_BYTES + row * self._record_bytes
        unit_bytes, unit_rows, page_bytes, page_units, _ = block_layout(self._record_bytes, self._sector, 0)
        page, unit = divmod(row // unit_rows, page_units)
        return HEADER_BYTES + page * page_bytes + unit * unit_bytes + row % unit_rows * self._record_bytes

    def _get(self, row: int) -> bytes:
        record = os.pread(self._descriptor, self._record_bytes, self._place(row))
        if len(record) < self._record_bytes:
            raise OSError(0, "the file ends before it")
        return record

    def _put(self, row: int, record: bytes) -> None:
        if os.pwrite(self._descriptor, record, self._place(row)) < len(record):
            raise OSError(0, "less was written than asked for")

    def flush(self) -> bool:
        """Everything is on the medium; False when the store failed."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._failure = self._failure or f"syncing {self._where}: {error.strerror}"
        return not self._failure

    def grow(self, num_rows: int) -> bool:
        """Make room for more rows, which read as zeros."""
        if self._sector is None:
            num_bytes = mapped_file_bytes(self._record_bytes, num_rows)
        else:
            num_bytes = block_layout(self._record_bytes, self._sector, num_rows)[4]
        if num_rows > self._num_rows:
            os.ftruncate(self._descriptor, num_bytes)
        return super().grow(num_rows)

    def __del__(self) -> None:
        os.close(self._descriptor)


def open_dram_store(record_bytes: int, num_rows: int, table: str) -> Store:
    """In memory."""
    return _Dram(record_bytes, num_rows, table)


def open_mapped_store(descriptor: int, record_bytes: int, num_rows: int, table: str, path: str) -> Store:
    """In a file without padding."""
    return _File(descriptor, record_bytes, None, num_rows, table, path)


def open_block_store(
    engine: Any, descriptor: int, record_bytes: int, sector: int, num_rows: int, table: str, path: str
) -> Store:
    """In a file of whole sectors, through the page cache: direct I/O would ask for aligned memory."""
    direct = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
    return _File(descriptor, record_bytes, sector, num_rows, table, path)


def make_caches() -> Any:
    """The caches of a collection's tables, without any yet."""
    from hotrow.memory import reference_cache  # it is made of the records above

    return reference_cache.Caches()

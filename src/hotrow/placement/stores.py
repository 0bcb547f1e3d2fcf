"""Stores: where the rows of a table lie when a cache stands in front of them.

    slots of fast memory  <- read -  store  (dram | mapped file | block file past the page cache | one before another)
                          - write ->

A store moves whole records (a row's weights and optimizer states) between its medium and slots of fast arrays. It does
not know which rows exist: what was never written reads as zeros. Contract: native/include/hotrow/store.h. The native
cache holds the same objects (`Store.native`); the methods here are for Python.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hotrow.kernels import ops
from hotrow.placement import store_file
from hotrow.placement.store_file import DEPTH, Kind, TableRows

NUM_THREADS = 40
"""Threads of a pool. On two cores 40 reach 88 % of io_uring's rate on reads and 84 % on reads and writes; 32 reach 85
and 84 %, 64 reach 93 and 79 %, 128 reach 86 and 76 % (benchmarks/block_store.py; medians of two to six runs)."""
MAX_WAITING_BYTES = 64 << 20


class StoreError(OSError):
    """A store's medium has failed. Names operation, table, rows, file, cause and cure; the store stays unusable."""


class Engines:
    """The engines that do the I/O of any number of block stores, each started when a store first needs it.

    io: "io_uring", "threads" (a pool of num_threads that read and write), or "auto" (io_uring if system and file allow
    it). depth: I/Os under way together. most_waiting_bytes: memory for buffers and for rows that wait to be written;
    while it is used up, writers wait (`num_bytes`).
    """

    def __init__(
        self,
        *,
        io: Literal["auto", "io_uring", "threads"] = "auto",
        depth: int = DEPTH,
        num_threads: int = NUM_THREADS,
        most_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self.io, self.depth, self.num_threads, self.most_waiting_bytes = io, depth, num_threads, most_waiting_bytes
        self._started: dict[bool, tuple[Any, str]] = {}

    def _start(self, *, ring: bool) -> tuple[Any, str]:
        if ring not in self._started:
            sizes = (self.depth, self.num_threads, self.most_waiting_bytes)
            engine, reason = self._started[ring] = ops.native_module().start_engine(ring, *sizes)
            if engine is not None and reason:
                warnings.warn(reason, stacklevel=6)
        return self._started[ring]

    @property
    def num_bytes(self) -> int:
        """Memory held now: buffers, and rows that wait to be written or did (their memory is kept for others).

        At most most_waiting_bytes, or the buffers and 64 KiB if that is more. I/Os of more than a page come on top
        while they are under way: of records over 4 KiB all, of gathered pages LARGE_IO_BYTES at most.
        """
        return sum(engine.num_bytes() for engine, _ in self._started.values() if engine is not None)

    @property
    def blocked_s(self) -> float:
        return float(sum(engine.blocked_ns() for engine, _ in self._started.values() if engine is not None)) / 1e9

    def open(self, path: Path, sector: int) -> tuple[Any, int, str | None]:
        """Returns (engine, descriptor, None), or the threads, a descriptor for them, and why io_uring is not used.
        Raises StoreError if not one thread can be started; warns if fewer than num_threads can."""
        descriptor, reason = store_file.open_direct(path, sector)
        engine = None
        if descriptor is not None and self.io != "threads":
            engine, reason = self._start(ring=True)
        if engine is None:
            if self.io == "io_uring":
                if descriptor is not None:
                    os.close(descriptor)
                raise ValueError(f'io="io_uring", but {reason}; or choose io="auto"')
            engine, refused = self._start(ring=False)
            if engine is None:
                if descriptor is not None:
                    os.close(descriptor)
                raise StoreError(refused)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return engine, descriptor, reason or None


class Store:
    """One open store; made by `open_store`. A context manager that closes."""

    def __init__(
        self,
        native: Any,
        rows: TableRows,
        kind: Kind,
        path: Path | None = None,
        sector: int | None = None,
        fallback: str | None = None,
        middle: Store | None = None,
    ) -> None:
        self.native: Any = native
        self.rows, self.kind, self.path, self.sector = rows, kind, path, sector
        self.fallback = fallback
        """Why a block store runs on threads; None if it does not, or was asked to."""
        self.middle = middle
        """The tier that `open_cached_store` put before it, whose rows are places; None if there is none. All other
        attributes are the lowest tier's."""
        self._process = os.getpid()

    @property
    def padded_record_bytes(self) -> float:
        """The most that a record takes on its medium, with padding and places that are kept free."""
        return store_file.padded_record_bytes(self.rows, self.sector, self.kind)

    def read(self, rows: ArrayLike, slots: ArrayLike, arrays: Sequence[Any]) -> None:
        """Reads row rows[i] into slot slots[i] of `arrays`; a row that waits to be written is read from memory. arrays:
        one per part of a record, [num_slots, ...], contiguous, numpy or torch on the CPU, without gradient. Raises
        ValueError for rows and slots out of range, StoreError if a row cannot be read or the store has failed."""
        if not self._open().read(_ids(rows), _ids(slots), ops.native_module().Records(list(arrays))).wait():
            self.raise_failure()

    def write(self, rows: ArrayLike, slots: ArrayLike, arrays: Sequence[Any]) -> None:
        """Writes slot slots[i] of `arrays` as row rows[i]: copied now, on the medium after `flush`. Waits only while
        waiting rows fill Engines.most_waiting_bytes. If a row is given twice, the last one counts. Raises ValueError as
        `read` does, and StoreError if the store has failed."""
        self._open().write(_ids(rows), _ids(slots), ops.native_module().Records(list(arrays)))
        self.raise_failure(only_if_failed=True)

    def flush(self) -> None:
        """Waits until everything written is on the medium. Raises StoreError if that fails."""
        if not self._open().flush():
            self.raise_failure()

    def counters(self) -> dict[str, int]:
        """Returns I/Os, rows, bytes and times since the store was opened: StoreCounters in store.h."""
        return dict(self._open().counters())

    def failure(self) -> str | None:
        return self._open().failure() or None

    def raise_failure(self, *, only_if_failed: bool = False) -> None:
        """Raises StoreError with what went wrong."""
        what = self.failure()
        if what or not only_if_failed:
            raise StoreError(what or f"table {self.rows.table!r}: the store failed without saying why")

    def close(self) -> None:
        """Writes what waits, then closes the file. Raises StoreError if something was not written. In a forked child it
        writes nothing: the store belongs to the parent."""
        if self.native is None:
            return
        what = None if self._process != os.getpid() or self.native.flush() else self.failure()
        self._let_go()
        if what:
            raise StoreError(what)

    def discard(self) -> None:
        """Closes without writing what waits, because the files are removed next. Whoever still holds `native` gets a
        StoreError from every later call."""
        if self.native is None:
            return
        if self._process == os.getpid():
            self.native.fail("is closed, and its rows are removed; make a new collection")
        self._let_go()

    def _let_go(self) -> None:
        self.native = None
        if self.middle is not None:  # its rows have been written down
            self.middle._let_go()

    def __del__(self) -> None:
        if getattr(self, "native", None) is not None:
            self.close()

    def _open(self) -> Any:
        if self.native is None:
            raise ValueError(f"the store of table {self.rows.table!r} is closed")
        return self.native

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ids(values: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"rows and slots are {ids.dtype} {ids.shape}; pass integers, one axis")
    return np.ascontiguousarray(ids, np.int64)


def open_store(rows: TableRows, *, kind: Kind, path: Path | str | None = None, engines: Engines | None = None) -> Store:
    """Opens the store of `rows`.

    kind: "dram" (no path), "mapped" (a file as memory), "block" (a file past the page cache, each row at its own place)
    or "gathered" (so too, each row beside the rows that were written with it; the store is a block store if a disk has
    too large sectors for these records).
    path: the store's file. It is made if there is none (sparse, so at once at any size). An earlier one of as long
    records is taken as it is, or grows; but only the store that made a gathered one can find its rows. Nothing else
    may have it open.
    engines: shared by block stores; None makes one for this store. A block store that cannot have io_uring or direct
    I/O runs on threads, with a warning that says why (`Store.fallback`).
    Raises ValueError for records that cannot be gathered (of less than 17 or more than 2560 bytes), and OSError from
    the file system.
    """
    if kind == "dram":
        native = ops.native_module().open_dram_store(rows.record_bytes, rows.num_rows, rows.table)
        return Store(native, rows, kind)
    if path is None:
        raise ValueError(f"table {rows.table!r}: a {kind} store needs the path of its file")
    if kind == "gathered" and store_file.page_records(rows.record_bytes) is None:
        raise ValueError(
            f"table {rows.table!r}: records of {rows.record_bytes} bytes cannot be gathered, which takes 17 to 2560; "
            'use a "block" store'
        )
    path = Path(path)
    kind, sector = store_file.make_file(path, rows, kind)
    if sector is not None:
        return _open_block(rows, path, kind, sector, engines or Engines())
    descriptor, sizes = os.open(path, os.O_RDWR | os.O_CLOEXEC), (rows.record_bytes, rows.num_rows)
    return Store(ops.native_module().open_mapped_store(descriptor, *sizes, rows.table, str(path)), rows, kind, path)


def open_cached_store(middle: Store, lower: Store) -> Store:
    """Opens a store that has `middle` as a tier before `lower`.

    middle: a "dram" or "mapped" store of as many rows as the tier holds. A row that is written lies there until its
    place is needed, and is written to `lower` then; see cached_store.h. The new store owns both and closes them; of the
    middle only rows that were written down remain. Raises ValueError if the middle is a block store or holds no row, if
    records differ in length, and for a lower store of 2^32 rows or more.
    """
    if middle.kind in store_file.BLOCKS:
        raise ValueError(f"table {lower.rows.table!r}: a tier before another is dram or mapped, not a block store")
    native = ops.native_module().open_cached_store(middle._open(), lower._open(), lower.rows.table)
    cached = Store(native, lower.rows, lower.kind, lower.path, lower.sector, lower.fallback, middle)
    lower.native = None
    return cached


def _open_block(rows: TableRows, path: Path, kind: Kind, sector: int, engines: Engines) -> Store:
    engine, descriptor, reason = engines.open(path, sector)
    if reason and engines.io == "auto":
        warnings.warn(
            f"table {rows.table!r} is read and written by {engines.num_threads} threads, which takes more of the "
            f"processor than io_uring: {reason}",
            stacklevel=4,
        )
    sizes = (rows.record_bytes, sector, rows.num_rows)
    gathered = kind == "gathered"
    native = ops.native_module().open_block_store(engine, descriptor, *sizes, rows.table, str(path), gathered)
    return Store(native, rows, kind, path, sector, reason)


def io_uring_refused() -> str | None:
    """Returns why io_uring cannot be used here; None if it can."""
    if (reason := ops.backend().reason) is not None:
        return reason
    return Engines(most_waiting_bytes=0)._start(ring=True)[1] or None

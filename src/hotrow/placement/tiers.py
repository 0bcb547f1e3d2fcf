"""Tables in tiers: slots of fast arrays in front of a store, batches in flight between them.

    ids of a batch --admit--> slots, pinned; rows on their way --wait--> lookup, update --release--> rows may leave

The kernels get slots instead of ids, so nothing here can change a bit of a result. Native: row_cache.h (which row lies
where) and store.h (how rows move). Next: lookahead.py, which announces batches before they are needed.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.base.door import open_file
from hotrow.base.files import disk_free_bytes
from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.types import Layout, as_stored, row_key
from hotrow.placement.base import (
    NO_LEASE,
    Attached,
    Changes,
    InitialRows,
    Placement,
    RowIds,
    Rows,
    Saved,
    SavedLink,
    TableState,
    Use,
)
from hotrow.placement.budget import Memory, TableDemand, TableSlots, check_plan, plan_slots
from hotrow.placement.dram import RowsInMemory, allocate_weights
from hotrow.placement.slots import Announced, Held, bad_id, spans_of
from hotrow.placement.store_file import BLOCKS, SUFFIX, OwnFolder, TableRows, no_disk
from hotrow.placement.stores import Engines, Store, StoreError, open_cached_store, open_store
from hotrow.tables import TableConfig

_STORAGES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MAX_ROWS = 2**31 - 1
"""Slots are int32, and one more number says that a row has none."""
PIECE_BYTES, GATHERED_PIECE_BYTES = 2 << 20, 8 << 20
"""Upper limits, in bytes, for one read or write by row id. Neighbours whose writes are gathered lie in the pages of
their region; a piece as large as a region reads each page once."""
MAX_SAVED_FILES = 512
"""The most files of a checkpoint that a collection holds open: half of the 1,024 that many systems allow a process."""
GATHERED_PIECE_SHARE = 8
"""A gathered piece takes at most 1/8 of the memory for tables, on top of it."""


_REFUSED: dict[Use, tuple[type[Exception], str]] = {
    "state_dict": (
        ValueError,
        "a collection in tiers has no state_dict, since its tables may be larger than memory; "
        "hotrow.save_checkpoint writes them piece by piece, read_rows() gives some rows",
    ),
    "load_state_dict": (
        ValueError,
        "a collection in tiers takes no state_dict; hotrow.load_checkpoint fills it piece by piece",
    ),
    "optimizer_state_dict": (
        ValueError,
        "the states of tables in tiers have no state_dict, since they may be larger than memory; "
        "hotrow.save_checkpoint writes them piece by piece",
    ),
    "copy": (TypeError, "a collection in tiers cannot be copied or pickled: its files belong to it alone"),
}


class Flight:
    """A batch whose rows lie in slots, or are on their way there, until it is released."""

    def __init__(
        self, native: Any, tiers: Tiers, spans: list[tuple[int, int, int]], slots: Tensor, *, training: bool
    ) -> None:
        self._native, self._tiers, self._spans, self.slots = native, tiers, spans, slots
        self._training, self.released = training, False

    def wait(self) -> None:
        """Sleeps until every row is there. Raises StoreError if one could not be read."""
        if not self._native.wait():
            self._tiers.raise_failure()

    def is_of(self, ids: Tensor, spans: list[tuple[int, int, int]]) -> bool:
        """Returns whether these are still the ids whose rows lie in the slots, looked up in the same tables."""
        same_bags = ids.shape == self.slots.shape and spans == self._spans
        return same_bags and bool(self._tiers.caches.holds(ids.numpy(), self.slots.numpy(), self._native))

    def release(self, *, updated: bool) -> None:
        """Ends the lease; updated: the rows have changed. Later calls do nothing."""
        self.released = True
        with self._tiers.counting_room(training=self._training):
            self._native.release(updated, torch.get_num_threads())


class Tiers(Placement):
    """The tables of one collection: some rows in DRAM, the others in files of one folder, or of two in a row.
    `weights`, `low` and states are address space for every row; only slots in use take memory."""

    looks_ahead = True
    stall_s = 0.0
    """Seconds that training batches waited for their rows, and for room to write the rows that left for them."""

    def __init__(self, tables: Sequence[TableConfig], memory: Memory, *, seed: int) -> None:
        ops.native_module()  # raises here if there is none, not at the first lookup
        for table in tables:
            if table.num_embeddings >= MAX_ROWS:
                raise ValueError(
                    f"table {table.name!r} has {table.num_embeddings:,} rows; in tiers a table has fewer than "
                    f"{MAX_ROWS:,}: hash its ids into fewer rows, or cut it into several tables"
                )
        self.tables, self.layout, self.memory, self.seed = tuple(tables), Layout.of(tables), memory, seed
        self.kernels = ops.KernelSet(self.layout)
        self._place_bytes = [0.0] * len(tables)
        """By table, `TableDemand.place_bytes`; known when the tables are laid out."""
        if memory.ssd is not None and not memory.force and (reason := no_disk(memory.folder)):
            raise ValueError(f"Memory: ssd is {str(memory.ssd)!r}, but {reason}, or say force=True")
        self.weights, self.low = allocate_weights(tables, sparse=True)
        self.arrays = ops.Arrays(list(self.weights.values()), [self.low.get(name) for name in self.weights])
        self.states: dict[str, Sequence[TableState]] = {}
        """By table, what a record holds beside the weights."""
        self._attached: Attached | None = None
        self.slots: list[TableSlots] = []
        """By table, known when the tables are laid out."""
        self.caches: Any = None
        self.stores: list[Store] = []
        self.saved: Saved | None = None
        self._num_saved_files = 0
        self.announced: Announced[Flight] = Announced()
        self._engines = Engines()
        self._finalizer: weakref.finalize[..., Tiers] | None = None
        self._process, self._laying_out = os.getpid(), threading.Lock()

    @property
    def changes(self) -> Changes:
        return self

    def check(self, use: Use) -> None:
        if use in _REFUSED:
            error, text = _REFUSED[use]
            raise error(text)

    # ---- where rows lie

    def new_state(self, table: str, row_shape: Sequence[int]) -> Tensor:
        """Returns address space; a row of it is filled when the row is needed."""
        return ops.allocate(len(self.weights[table]), *row_shape, sparse=True)

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        """Makes the states parts of the records. Raises ValueError if the records are laid out already."""
        if self.caches is not None:
            raise ValueError(
                "the tables' records are laid out on disk already, by the first lookup or another optimizer: make the "
                "optimizer right after the EmbeddingCollection, and only one"
            )
        self.states = {t.name: [state.of_untouched(t) for state in states[t.name]] for t in self.tables}
        self._attached = Attached(self.states)
        self._laid_out()
        return self._attached

    def _laid_out(self) -> Any:
        """Returns the caches, made when they are first needed. Raises StoreError in a forked child."""
        if os.getpid() != self._process:
            raise StoreError(
                f"the tables in {self.memory.folder} belong to the process that this one was forked from: use them "
                "there, or start workers with multiprocessing's 'spawn' and make a collection in each"
            )
        with self._laying_out:
            if self.caches is None:
                self._lay_out()
        return self.caches

    def _lay_out(self) -> None:
        demands, self.slots = self._plan()
        self._place_bytes = [demand.place_bytes for demand in demands]
        places = self.memory.plan_places(demands, self.slots)
        folders: list[OwnFolder] = []
        self.stores = []  # a try before this one may have opened some, which its finalizer closes
        self._finalizer = weakref.finalize(self, _remove, self.stores, folders, self._process)
        folders.append(OwnFolder(self.memory.folder))
        if self.memory.middle is not None and any(places):
            folders.append(OwnFolder(self.memory.middle))
        caches = ops.native_module().make_caches()
        self._engines = engines = Engines(io=self.memory.io, most_waiting_bytes=self.memory.engine_bytes)
        for t, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            rows = TableRows(table=table.name, record_bytes=self._record_bytes(table), num_rows=table.num_embeddings)
            whole = slots.pinned == table.num_embeddings
            blocks = "gathered" if self._place_bytes[t] else "block"
            kind = "dram" if whole else blocks if self.memory.ssd is not None else "mapped"
            path = None if whole else folders[0].path / f"{t:04d}{SUFFIX}"
            store = open_store(rows, kind=kind, path=path, engines=engines)  # type: ignore[arg-type]
            if places[t]:
                held = replace(rows, table=f"{table.name} (middle tier)", num_rows=places[t])
                before = open_store(held, kind="mapped", path=folders[1].path / f"{t:04d}-middle{SUFFIX}")
                store = open_cached_store(before, store)
            self.stores.append(store)
            self._add_cache(caches, table, slots, self.stores[-1])
        self.caches = caches

    def _plan(self) -> tuple[list[TableDemand], list[TableSlots]]:
        """Returns what tables need and get; "auto" writes in place if memory or disk is short for gathering."""
        plain = self._demands()

        def planned(memory: Memory) -> tuple[list[TableDemand], list[TableSlots]]:
            self.memory = memory
            demands = memory.with_places(plain)
            budget = memory.budget_bytes(demands)
            return demands, check_plan(demands, (memory.plan or plan_slots)(demands, budget), budget)

        given = self.memory
        try:
            return planned(given.settled(plain, disk_free_bytes(given.folder)))
        except ValueError:
            if given.writes != "auto":
                raise
            return planned(replace(given, writes="in_place"))

    def begin_with(self, table: str, links: Sequence[SavedLink]) -> bool:
        caches, t = self._laid_out(), self._number(table)
        parts = [name for name, _ in self.arrays_of(self.tables[t])]
        files = {path for link in links for path, _ in (link.ids, *link.arrays.values())}
        # A table that lies in DRAM whole needs every row now, and a mapped file is a faster medium than a checkpoint's.
        if self.stores[t].kind not in BLOCKS or self._num_saved_files + len(files) > _most_saved_files():
            return False
        if any(sorted(link.arrays) != sorted(parts) for link in links):  # such as split weights, which files join
            return False
        numbers, opened = {path: number for number, path in enumerate(files)}, list[tuple[int, str]]()
        for path in files:
            with open_file(path) as file:
                opened.append((os.dup(file.fileno()), str(path)))

        def place(where: tuple[Path, int]) -> tuple[int, int]:
            return numbers[where[0]], where[1]

        given = [(link.num_rows, place(link.ids), [place(link.arrays[part]) for part in parts]) for link in links]
        store = caches.begin_with(t, opened, given, table)
        if store is None:
            return False
        self.stores[t].native = store
        self._num_saved_files += len(files)
        self.raise_failure(only_if_failed=True)
        return True

    def _demands(self) -> list[TableDemand]:
        records = map(self._record_bytes, self.tables)
        return [
            TableDemand(table.name, table.num_embeddings, record_bytes, own)
            for table, record_bytes, own in zip(self.tables, records, self._place_bytes, strict=True)
        ]

    @property
    def places_bytes(self) -> int:
        """The most DRAM that knowing where gathered rows lie on disk may take."""
        each = zip(self._place_bytes, self.tables, self.slots, strict=True)
        return int(sum(own * t.num_embeddings for own, t, slots in each if slots.pinned < t.num_embeddings))

    def _record_bytes(self, table: TableConfig) -> int:
        return sum(array[:1].nbytes for _, array in self.arrays_of(table))

    def arrays_of(self, table: TableConfig) -> list[tuple[str, Tensor]]:
        """Returns the parts of a table's record by name: arrays by slot."""
        low = [("low", self.low[table.name])] if table.name in self.low else []
        states = [(state.name, state.array) for state in self.states.get(table.name, ())]
        return [("weight", self.weights[table.name]), *low, *states]

    def _add_cache(self, caches: Any, table: TableConfig, slots: TableSlots, store: Store) -> None:
        init, weight, key = table.init, self.weights[table.name], row_key(self.seed, table.name)
        bound = init.bound_for(table.num_embeddings)
        births = (init.births.prefix, init.births.first, init.births.step, init.column)
        states = [
            (state.array[:1].numel(), state.constant, state.of_weight, state.of_sign)
            for state in self.states.get(table.name, ())
        ]
        caches.add(
            (table.num_embeddings, slots.pinned, slots.cached),
            (key, bound, init.zero_rows, births, table.embedding_dim, _STORAGES[weight.dtype]),
            states,
            store.native,
            ops.native_module().Records([_plain(array) for _, array in self.arrays_of(table)]),
        )

    # ---- batches in flight

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Brings the rows of a training batch that comes later, and keeps them until it has been trained. A batch with
        an id out of range is left to its lookup, which raises the error."""
        if sparse not in self.announced and (flight := self._admit(sparse, keep=True)) is not None:
            self.announced.add(sparse, flight)

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        self.announced.forget(sparse)

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Flight, KeyedJaggedTensor]:
        """Returns the flight of this batch, whose rows are there, and the batch with slots for ids. If it is not a
        training batch, rows that are not cached are read into temporary slots and the cache stays as it is. Raises
        StoreError if any store has failed, even one that was to keep other rows."""
        self._laid_out()
        flight = self.announced.take(
            sparse, unchanged=lambda own: own.is_of(sparse.values, spans_of(self.layout, sparse)), training=training
        )
        if flight is None:
            flight = self._admit(sparse, keep=training)
        if flight is None:
            raise ValueError(bad_id(self.layout, self.tables, list(self.weights.values()), sparse))
        started = time.perf_counter()
        flight.wait()
        self.stall_s += training * (time.perf_counter() - started)
        self.raise_failure(only_if_failed=True)
        return flight, sparse.with_values(flight.slots)

    def _admit(self, sparse: KeyedJaggedTensor, *, keep: bool) -> Flight | None:
        """Returns None if an id is out of range."""
        self._laid_out()
        self.raise_failure(only_if_failed=True)
        return self._fly(sparse.values.numpy(), spans_of(self.layout, sparse), keep=keep)

    def _fly(self, ids: np.ndarray[Any, Any], spans: list[tuple[int, int, int]], *, keep: bool) -> Flight | None:
        """Starts to bring the rows of `ids`, into the cache or (not keep) beside it; None if an id is out of range."""
        with self.counting_room(training=keep):
            native, slots = self._laid_out().admit(ids, spans, keep, torch.get_num_threads())
        return None if native is None else Flight(native, self, spans, torch.from_numpy(slots), training=keep)

    @contextmanager
    def counting_room(self, *, training: bool) -> Iterator[None]:
        """Counts the time that a training batch waits for room to write, inside the block, as a stall."""
        before = self._engines.blocked_s
        yield
        self.stall_s += training * (self._engines.blocked_s - before)

    # ---- rows by their ids

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns rows that are read and written through the table's cache, which keeps what it kept."""
        array, low = (self.weights[table], self.low.get(table)) if state is None else (state.array, None)
        return _RowsInTiers(self, self._number(table), array, low)

    def _number(self, table: str) -> int:
        return next(t for t, each in enumerate(self.tables) if each.name == table)

    def bring(self, rows: Mapping[int, np.ndarray[Any, Any]], *, keep: bool) -> Flight:
        """Starts to bring rows, by table number, to slots; the flight's `slots` has those of all tables end to end.
        keep: into the cache, as in training; if False, into temporary slots. Raises StoreError if a store has
        failed."""
        self._laid_out()
        self.raise_failure(only_if_failed=True)
        flight = self._fly(*_end_to_end(rows), keep=keep)
        assert flight is not None, "ids out of range"
        return flight

    @contextmanager
    def in_slots(self, table: int, ids: Tensor, *, write: bool = False) -> Iterator[Tensor]:
        """Yields the slots [n] that hold the rows `ids` of a table inside the block; write: the block changes them."""
        flight = self.bring({table: ids.numpy()}, keep=False)
        flight.wait()
        try:
            yield flight.slots.long()
        finally:
            flight.release(updated=write)

    def piece_rows(self, table: int) -> int:
        """Returns how many rows of a table to ask `in_slots` for at once, so that they take little memory."""
        num_bytes = min(PIECE_BYTES, self.memory.waiting_bytes // len(self.tables))
        if self._place_bytes[table]:
            num_bytes = min(GATHERED_PIECE_BYTES, self.memory.dram_bytes // GATHERED_PIECE_SHARE)
        return max(1, num_bytes // self._record_bytes(self.tables[table]))

    def initial(self, table: str) -> InitialRows:
        return InitialRows.of(self.tables[self._number(table)], self.seed, self.states.get(table, ()))

    def arrays_by_table(self) -> dict[str, list[str]]:
        return {t.name: ["weight", *(state.name for state in self.states.get(t.name, ()))] for t in self.tables}

    def num_changed(self, table: str, *, ever: bool) -> int:
        return int(self._laid_out().num_changed(self._number(table), ever))

    def changed_rows(self, table: str, *, ever: bool) -> Iterator[Tensor]:
        caches, t, first = self._laid_out(), self._number(table), 0
        while len(ids := caches.changed_rows(t, ever, first, self.piece_rows(t))):
            yield torch.from_numpy(ids)
            first = int(ids[-1]) + 1

    def touched_rows(self, table: str) -> Iterator[Tensor]:
        return self.changed_rows(table, ever=True)

    def writer(self, table: str) -> None:
        return None

    def clear_changed(self) -> None:
        self._laid_out().clear_changed()

    def write_every_row(self, *, share: float = 1.0, piece_rows: int = 1 << 13) -> None:
        """Writes the initial values of every row of the tables that are not in DRAM whole, for measurements.

        Afterwards all rows exist, as after long training: the first rows of each tail are cached in random order and
        dirty, and the others lie on disk. Rows that exist keep their values. share: of the rows that are not pinned in
        each table, the first ones; at least those that are cached. Raises StoreError if a write fails.
        """
        self._laid_out()
        generator = np.random.default_rng(self.seed)
        first = {t: generator.permutation(slots.cached) for t, slots in enumerate(self.slots) if slots.cached}
        pinned = {t: self.slots[t].pinned for t in first}
        tails = {t: self.tables[t].num_embeddings - pinned[t] for t in first}
        left = {t: max(len(first[t]), math.ceil(share * tails[t])) for t in first}
        while left:
            starts = {t: max(0, end - min(piece_rows, len(first[t]))) for t, end in left.items()}
            pieces = {t: pinned[t] + _rows_of_piece(first[t], start, left[t]) for t, start in starts.items()}
            flight = self.bring(pieces, keep=True)
            flight.wait()
            flight.release(updated=True)
            left = {t: start for t, start in starts.items() if start}
        self.raise_failure(only_if_failed=True)

    def flush(self) -> None:
        """Writes every changed row to its medium. Raises StoreError if that fails."""
        if self.caches is not None and not self._laid_out().write_back():
            self.raise_failure()

    def raise_failure(self, *, only_if_failed: bool = False) -> None:
        what = self.caches.failure()
        if what or not only_if_failed:
            raise StoreError(what or "a store failed without saying why")

    # ---- below a device

    @property
    def piece_bytes(self) -> int | None:
        return min(PIECE_BYTES, self.memory.waiting_bytes)

    def parts(self) -> list[list[Tensor]]:
        return [[array for _, array in self.arrays_of(table)] for table in self.tables]

    def hold(self, rows: Sequence[Tensor], *, keep: bool) -> Held:
        if not any(map(len, rows)):
            return Held(NO_LEASE, rows, ready=True)
        flight = self.bring({t: own.numpy() for t, own in enumerate(rows)}, keep=keep)
        return Held(flight, torch.split(flight.slots.long(), [len(own) for own in rows]))

    def check_stores(self) -> None:
        if self.caches is not None:
            self.raise_failure(only_if_failed=True)

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns by table what its cache and its store have counted (row_cache.h, store.h)."""
        if self.caches is None:
            return {}
        return {
            table.name: {**self.caches.counters(t), **self.stores[t].counters()} for t, table in enumerate(self.tables)
        }

    def close(self) -> None:
        """Removes the files; nothing works afterwards. Without a call it happens when the collection is deleted."""
        if self._finalizer is not None:
            self._finalizer()


class _RowsInTiers(Rows):
    """The rows of table number `table`, read and written in slots of `array`; low: lower halves of split weights."""

    def __init__(self, tiers: Tiers, table: int, array: Tensor, low: Tensor | None = None) -> None:
        self._tiers, self._table, self._slots = tiers, table, RowsInMemory(array, low)
        self.shape, self.dtype = array.shape, self._slots.dtype

    @property
    def piece_rows(self) -> int:  # type: ignore[override]
        """As many rows as memory is set aside for, once the records are laid out."""
        return self._tiers.piece_rows(self._table)

    def read(self, rows: RowIds, /) -> Tensor:
        with self._tiers.in_slots(self._table, _ids(rows)) as slots:
            return self._slots.read(slots)

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        """Writes only the rows that differ, because the others need no write to disk."""
        ids, values = _ids(rows), as_stored(values, self.dtype)
        differs = (_bits(self.read(ids)) != _bits(values)).reshape(len(ids), -1).any(dim=1)
        if differs.any():
            with self._tiers.in_slots(self._table, ids[differs], write=True) as slots:
                self._slots.write(slots, values[differs])


def _most_saved_files() -> int:
    """Returns how many files of a checkpoint a collection may hold open: of those that this process may, half."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_SAVED_FILES if allowed == resource.RLIM_INFINITY else min(MAX_SAVED_FILES, allowed // 2)


def _ids(rows: RowIds) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop)


def _bits(values: Tensor) -> Tensor:
    """Returns the bits as integers, so that -0 differs from 0 and NaN equals itself."""
    return values.contiguous().view(torch.int32 if values.itemsize == 4 else torch.int16)


def _end_to_end(
    rows: Mapping[int, np.ndarray[Any, Any]],
) -> tuple[np.ndarray[Any, Any], list[tuple[int, int, int]]]:
    """Returns the rows of all tables end to end, and the span of each table in them."""
    ends = np.cumsum([len(own) for own in rows.values()]).tolist()
    spans = [(t, end - len(own), end) for (t, own), end in zip(rows.items(), ends, strict=True)]
    return np.concatenate([*rows.values()]), spans


def _rows_of_piece(first: np.ndarray[Any, Any], start: int, end: int) -> np.ndarray[Any, Any]:
    """Returns rows [start, end), those below len(first) in the order of `first`, a permutation."""
    cut = min(max(start, len(first)), end)
    return np.concatenate([first[start : min(end, len(first))], np.arange(cut, end)])


def _plain(array: Tensor) -> np.ndarray[Any, Any]:
    """Returns `array` [N, ...] as numpy; bfloat16, which numpy does not have, as int16."""
    return array.detach().view(torch.int16 if array.dtype == torch.bfloat16 else array.dtype).numpy()


def _remove(stores: list[Store], folders: list[OwnFolder], process: int) -> None:
    if os.getpid() != process:
        return  # a forked child ends or drops its copy, but the files belong to its parent
    for store in stores:
        store.discard()  # writing what waits would wear the disk for files that are removed next
    for folder in folders:
        folder.remove()

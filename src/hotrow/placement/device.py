"""Slots in device memory in front of tables in host memory: rows come to the device before their batch does.

    ids of a batch --admit--> slots; rows are held below --land--> slots filled --take--> lookup, update --release-->

Every row of a table lies below: in DRAM, or in tiers (`Backing`). Device memory has slots for some of them: for the
first rows of a table always, for the others while they are in use. Updates happen in slots; an updated row is copied
back when its slot is needed, and by `flush`. The kernels get slots instead of ids, so no result depends on what is
decided here. Tables with a slot for every row are served all together, because nothing is decided for them. Which row
lies where: slots.py; how many slots there are: budget.py. Next: kernels/triton_moves.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.on_device import triton_ops
from hotrow.kernels.types import Layout, Rule
from hotrow.placement.base import NO_LEASE, Attached, Placement, Rows, TableState, Use
from hotrow.placement.budget import MOVING_SHARE, DeviceMemory, TableDemand, TableSlots, raise_to
from hotrow.placement.slots import (
    NONE,
    SOME_FROZEN,
    Announced,
    Directory,
    Held,
    Moves,
    Residents,
    Span,
    bad_id,
    spans_of,
)
from hotrow.placement.stores import StoreError
from hotrow.tables import TableConfig

if TYPE_CHECKING:
    from hotrow.kernels.triton_moves import Moment, Mover

Numbers = NDArray[np.int64]


@dataclass
class Landing:
    """Rows that have slots and are held below; they are copied over in the order in which slots were given."""

    held: Held
    slots: list[Numbers]
    num_sent: int
    """Number of moves to the host before it, which may carry the rows that come now."""
    arrived: Moment | None = None
    """Set when the copies are under way."""


class Named(NamedTuple):
    """What a batch looks up."""

    rows: list[Numbers]
    """By table, rising, each once; none of tables that have a slot for every row."""
    places: Numbers
    """Places of its ids of those tables; see `Residents`."""


class DeviceFlight:
    """A batch whose rows lie in slots, or are on their way there, until it is released."""

    def __init__(
        self, owner: Device, spans: list[Span], slots: Tensor, pinned: list[Numbers], places: Numbers, landing: Landing
    ) -> None:
        self._owner, self.spans, self.slots, self.pinned, self.landing = owner, spans, slots, pinned, landing
        self.places = places
        """Places of its ids among the rows of `Residents`."""
        self.released = False

    def __del__(self) -> None:
        self.release(updated=False)  # a lookup whose output nobody wanted

    def release(self, *, updated: bool) -> None:
        """Ends the lease; updated: the rows have changed. Later calls do nothing."""
        if not self.released:
            self.released = True
            self._owner.release(self.pinned, self.places, updated=updated)


class Backing(Placement, Protocol):
    """A placement that can stand below a device: it can hold rows in host memory while they are moved."""

    @property
    def piece_bytes(self) -> int | None:
        """The most bytes of rows to hold at once without `keep`; if None, any number."""

    def parts(self) -> list[list[Tensor]]:
        """Returns by table what makes up a row: weights, lower halves of split ones, and states that are attached."""

    def hold(self, rows: Sequence[Numbers], *, keep: bool) -> Held:
        """Brings rows of each table, no row twice, to places in host memory. keep: they stay in the cache, if any."""

    def check_stores(self) -> None:
        """Raises StoreError if any store has failed."""


class Device(Placement):
    """The slots of one collection on a device, in front of the placement `below`.

    Raises ImportError if Triton is not installed.
    """

    looks_ahead = True
    stall_s = 0.0
    """Seconds that training batches, announced ones included, waited for rows from below and for room there."""

    def __init__(self, memory: DeviceMemory, below: Backing) -> None:
        self.tables, self.layout, self.memory = below.tables, Layout.of(below.tables), memory
        self.device = torch.device(memory.device)
        self.below: Backing = below
        self.weights, self.low = below.weights, below.low
        self.kernels = ops.KernelSet(self.layout, triton_ops("tables on a device").Kernels)
        self._num_states = 0
        self.directories: list[Directory] = []
        self.residents: Residents
        self.slots: list[TableSlots] = []
        """By table, known when the tables are laid out."""
        self._parts: list[list[Tensor]] = []
        self.arrays: Any = None
        """A `triton_ops.Arrays` of the weights by slot; None until the tables are laid out."""
        self._mover: Mover
        self.announced: Announced[DeviceFlight] = Announced()
        self._asked: Announced[Held] = Announced()
        """Announced batches without room yet: their rows are held below."""
        self.postponed = 0
        """Announcements for which there was no room yet."""
        self._landings: deque[Landing] = deque()
        self._stale = False
        self._lost: str | None = None
        """Why rows may be lost, and the cure."""
        self._lock = threading.RLock()

    def check(self, use: Use) -> None:
        self.below.check(use)
        if use == "copy":
            raise TypeError("a collection with slots on a device cannot be copied or pickled; copy its state_dict()")
        if use == "hot_copies":
            raise ValueError("the tables have slots on a device already: make the collection without DeviceMemory")
        if use == "freeze_some":
            raise ValueError(SOME_FROZEN)

    # ---- where rows lie

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        """Gives the states slots beside the weights. Raises ValueError if the slots are laid out already."""
        if self.arrays is not None:
            raise ValueError(
                "the tables have their slots on the device already, by the first lookup or another optimizer: make the "
                "optimizer right after the EmbeddingCollection, and only one"
            )
        self._attached_below = self.below.attach(states)  # while it lives, the states are parts below
        count = self._num_states = len(states[self.tables[0].name])
        arrays = self._lay_out()
        return Attached(states, [arrays([parts[k - count] for parts in self._parts]) for k in range(count)])

    def _demands(self) -> list[TableDemand]:
        return [
            TableDemand(table.name, table.num_embeddings, sum(array[:1].nbytes for array in arrays))
            for table, arrays in zip(self.tables, self.below.parts(), strict=True)
        ]

    def _lay_out(self) -> Any:
        """Gives the slots their memory; returns the class of arrays that the kernels take."""
        from hotrow.kernels.triton_moves import Mover, Streams
        from hotrow.kernels.triton_ops import Arrays

        demands, below = self._demands(), self.below.parts()
        self.slots = self.memory.checked_slots(demands)
        self._record_bytes = [demand.record_bytes for demand in demands]
        whole = [own.pinned == d.num_rows for d, own in zip(demands, self.slots, strict=True)]
        self.residents = Residents([d.num_rows * own for d, own in zip(demands, whole, strict=True)])
        self.directories = [
            self.residents.directories.get(t) or Directory(d.num_rows, self.slots[t]) for t, d in enumerate(demands)
        ]
        self._parts = [
            [torch.zeros(sum(own), *array.shape[1:], dtype=array.dtype, device=self.device) for array in arrays]
            for arrays, own in zip(below, self.slots, strict=True)
        ]
        weights = [parts[0] for parts in self._parts]
        low = [parts[1] if parts[0].dtype == torch.bfloat16 else None for parts in self._parts]
        self._streams = Streams(self.device)
        self._streams.share(array for parts in self._parts for array in parts)
        self._mover = Mover(below, self._parts, self._streams)
        self._released = self._streams.moment()
        self.arrays = Arrays(weights, low)
        self._stale = True  # the pinned rows are yet to come
        return Arrays

    @property
    def slots_bytes(self) -> int:
        return sum(part.nbytes for parts in self._parts for part in parts)

    # ---- batches in flight

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Brings the rows of a training batch that comes later, and keeps them until it has been trained.

        If there are not enough slots yet, the rows are brought to host memory only. A batch with an id out of range is
        left to its lookup, which raises the error.
        """
        with self._lock:
            if sparse in self.announced or sparse in self._asked:
                return
            spans = self._spans(sparse)
            named = self._named(sparse, spans)
            if named is None:
                return
            with self._counting_room():
                if self._num_short(named.rows):
                    self._ask(sparse, named.rows)
                    return
                self.announced.add(sparse, self._admit(sparse, spans, named, keep=True))
            started = time.perf_counter()
            # Nobody can ask without waiting whether rows have come from disk; those of the nearer half should have.
            self._land(most_left=(len(self.announced) + 1) // 2)
            self.stall_s += time.perf_counter() - started

    def _ask(self, sparse: KeyedJaggedTensor, rows: Sequence[Numbers]) -> None:
        self.postponed += 1
        absent = [directory.absent(own) for directory, own in zip(self.directories, rows, strict=True)]
        self._asked.add(sparse, self.below.hold(absent, keep=True))

    @contextmanager
    def _counting_room(self) -> Iterator[None]:
        """Counts the time that the block waits for room below as a stall."""
        before = self.below.stall_s
        yield
        self.stall_s += self.below.stall_s - before

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        with self._lock:
            self.announced.forget(sparse)
            self._asked.forget(sparse)

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[DeviceFlight, KeyedJaggedTensor]:
        """Returns the flight of this batch and the batch with slots for ids; later work on the device finds its rows.

        Raises ValueError for an id out of range, and if the batch and those before their step need more slots than
        there are. Raises StoreError if any store has failed, because it was to keep other rows.
        """
        with self._lock:
            spans = self._spans(sparse)
            flight = self.announced.take(
                sparse, unchanged=lambda own: self._is_of(own, sparse, spans), training=training
            )
            started = time.perf_counter()
            if flight is None:
                flight = self._make_room_and_admit(sparse, spans, keep=training)
            self.refresh()
            self._land(flight.landing)
            self._asked.forget(sparse)
            self.stall_s += training * (time.perf_counter() - started)
            self._raise_failure()
            assert flight.landing.arrived is not None
            flight.landing.arrived.precede()
            return flight, sparse.with_values(flight.slots)

    def fits(self, sparse: KeyedJaggedTensor) -> bool:
        """Returns False for a batch to be scored that has more rows than there are slots, and two samples or more."""
        if torch.is_grad_enabled() or sparse.stride < 2:
            return True
        with self._lock:
            named = self._named(sparse, self._spans(sparse))
            return named is None or all(
                len(own) - np.searchsorted(own, slots.pinned) <= slots.cached
                for own, slots in zip(named.rows, self.slots, strict=True)
            )

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        # Rows may have changed below since the lookups.
        self.refresh()
        super().update(lookups, attached, rules)

    def _is_of(self, flight: DeviceFlight, sparse: KeyedJaggedTensor, spans: list[Span]) -> bool:
        ids, slots = sparse.values.numpy(), flight.slots.numpy()
        if ids.shape != slots.shape or spans != flight.spans:
            return False
        places = self.residents.places(ids, spans)
        if places is None or not (places == flight.places).all():
            return False
        passing = self._passing(spans)
        return all(self.directories[t].holds(ids[start:stop], slots[start:stop]) for t, start, stop in passing)

    def _passing(self, spans: Sequence[Span]) -> list[Span]:
        """Returns the spans of tables whose rows come and go."""
        return [span for span in spans if span[0] not in self.residents.directories]

    def _make_room_and_admit(self, sparse: KeyedJaggedTensor, spans: list[Span], *, keep: bool) -> DeviceFlight:
        named = self._named(sparse, spans)
        if named is None:
            weights = [parts[0] for parts in self.below.parts()]
            raise ValueError(bad_id(self.layout, self.tables, weights, sparse))
        while self._num_short(named.rows) and len(self.announced):
            self.announced.forget_last()
            self.postponed += 1
        if short := self._num_short(named.rows):
            t, missing = short
            rows = [_different(sparse.values.numpy(), spans, number) for number in range(len(self.tables))]
            slots, held = self.slots[t], sum(self.slots[t]) - self.directories[t].num_free
            needed = [
                min(table.num_embeddings, own.cached - directory.num_free + len(each))
                for table, own, directory, each in zip(self.tables, self.slots, self.directories, rows, strict=True)
            ]
            raise ValueError(
                f"the batch looks up {len(rows[t]):,} rows of table {self.tables[t].name!r}, {missing:,} more than "
                f"there are slots for: of {sum(slots):,} on the device {held:,} hold rows that stay and rows of "
                f"batches before their step; DeviceMemory: hbm is {self.memory.hbm_bytes:,} bytes; "
                f"{raise_to(self.memory.least_bytes(self._demands(), needed))}, or make batches smaller"
            )
        return self._admit(sparse, spans, named, keep=keep)

    def _spans(self, sparse: KeyedJaggedTensor) -> list[Span]:
        if self.arrays is None:
            self._lay_out()
        return spans_of(self.layout, sparse)

    def _named(self, sparse: KeyedJaggedTensor, spans: Sequence[Span]) -> Named | None:
        """Returns what the batch looks up; None if an id is out of range."""
        ids = sparse.values.numpy()
        places = self.residents.places(ids, spans)
        if places is None:
            return None
        found = [NONE] * len(self.tables)
        for t in {t for t, _, _ in self._passing(spans)}:
            found[t] = rows = _different(ids, spans, t)
            if len(rows) and (rows[0] < 0 or rows[-1] >= self.tables[t].num_embeddings):
                return None
        return Named(found, places)

    def _num_short(self, rows: Sequence[NDArray[np.int64]]) -> tuple[int, int] | None:
        """Returns the first table without room for its rows, and how many slots are missing; None if all have room."""
        for t, own in enumerate(rows):
            if missing := self.directories[t].num_short(own):
                return t, missing
        return None

    def _admit(self, sparse: KeyedJaggedTensor, spans: list[Span], named: Named, *, keep: bool) -> DeviceFlight:
        self._raise_failure()
        try:
            admitted = [directory.admit(own) for directory, own in zip(self.directories, named.rows, strict=True)]
            ids = sparse.values.numpy()
            slots, passing = np.zeros(len(ids), np.int32), self._passing(spans)
            for t, start, stop in spans:
                own, there = ids[start:stop], t in self.residents.directories
                slots[start:stop] = own if there else self.directories[t].slot_of[own]
            self.residents.count(named.places, spans)
            pinned, moves = [slots for slots, _ in admitted], [each for _, each in admitted]
            here = Landing(Held(NO_LEASE, [], ready=True), [], 0, self._released)
            landing = self._exchange(moves, keep=keep) if passing else here
            return DeviceFlight(self, spans, torch.from_numpy(slots), pinned, named.places, landing)
        except BaseException as error:  # rows have given up their slots, and may not have left them yet
            self._lost = (
                f"rows of the tables on {self.device} are lost: {type(error).__name__} ended the call that moved them "
                f"({error}). Nothing was trained on wrong rows; make a new collection and load the last checkpoint"
            )
            raise

    def _raise_failure(self) -> None:
        """Raises StoreError if rows are lost here or below."""
        if self._lost is not None:
            raise StoreError(self._lost)
        self.below.check_stores()

    def _exchange(self, moves: Sequence[Moves], *, keep: bool) -> Landing:
        """Sends back the rows that leave, then starts to bring those that come; copies keep this order."""
        num_sent = self._mover.num_sent
        for rows, slots in self._pieces([each.leaving for each in moves], [each.leaving_slots for each in moves]):
            self._mover.send_back(self.below.hold(rows, keep=True), _tensors(slots), after=self._released)
        held = self.below.hold([each.coming for each in moves], keep=keep)
        landing = Landing(held, [each.coming_slots for each in moves], num_sent)
        self._landings.append(landing)
        if held.ready:
            self._land(landing)
        return landing

    def _land(self, until: Landing | None = None, *, most_left: int = 0) -> None:
        """Copies held rows over in order: up to `until`, or until no more than `most_left` landings wait."""
        while until.arrived is None if until is not None else len(self._landings) > most_left:
            first = self._landings[0]
            self._mover.settle(first.num_sent)
            first.held.wait()
            first.arrived = self._bring([own.numpy() for own in first.held.places], first.slots)
            first.held.release(updated=False)
            self._landings.popleft()

    def _bring(self, places: Sequence[Numbers], slots: Sequence[Numbers]) -> Moment:
        arrived = self._released
        for some_places, some_slots in self._pieces(places, slots):
            arrived = self._mover.bring(_tensors(some_places), _tensors(some_slots), after=self._released)
        return arrived

    def _pieces(
        self, rows: Sequence[Numbers], slots: Sequence[Numbers], most_bytes: int | None = None
    ) -> Iterator[tuple[list[Numbers], list[Numbers]]]:
        """Yields rows and slots in pieces within the memory for rows on their way, and within `most_bytes`."""
        most = max(1, self.memory.hbm_bytes // MOVING_SHARE // 2)
        most = most if most_bytes is None else min(most, most_bytes)
        total = sum(len(own) * num_bytes for own, num_bytes in zip(rows, self._record_bytes, strict=True))
        pieces = -(-total // most)
        if pieces < 2:  # numpy cuts slowly
            yield from [(list(rows), list(slots))] * pieces
            return
        cut_rows = [np.array_split(own, pieces) for own in rows]
        cut_slots = [np.array_split(own, pieces) for own in slots]
        for k in range(pieces):
            yield [own[k] for own in cut_rows], [own[k] for own in cut_slots]

    def release(self, pinned: Sequence[Numbers], places: Numbers, *, updated: bool) -> None:
        """Ends the lease of a batch whose rows lie in slots `pinned`, and at `places`; flights call it."""
        with self._lock:
            for directory, slots in zip(self.directories, pinned, strict=True):
                directory.release(slots, updated=updated)
            if updated:
                self.residents.change(places)
            self._released = self._streams.moment()

    # ---- what lies below

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns the rows below, after `flush`."""
        self.flush()
        return self.below.rows(table, state)

    def grow(self, table: TableConfig) -> None:
        """Raises ValueError: the number of slots is fixed when they are made."""
        raise ValueError(
            f"table {table.name!r} has slots on a device and cannot grow: make a collection with more rows"
        )

    def flush(self) -> None:
        """Copies changed rows back, so that every row below is current and may be changed there.

        The slots are read again before their next use. Raises StoreError if rows are lost.
        """
        with self._lock:
            self._raise_failure()
            if self.arrays is None or self._stale:
                return
            self._land()
            dirty = [np.flatnonzero(directory.dirty) for directory in self.directories]
            rows = [directory.row_of[slots] for directory, slots in zip(self.directories, dirty, strict=True)]
            for some_rows, some_slots in self._pieces(rows, dirty, self.below.piece_bytes):
                num_sent = self._mover.num_sent
                held = self.below.hold(some_rows, keep=False)
                self._mover.send_back(held, _tensors(some_slots), after=self._streams.moment())
                self._mover.settle(num_sent)  # the piece before: two at most are under way
            self._mover.settle()
            for directory, slots in zip(self.directories, dirty, strict=True):
                directory.dirty[slots] = False
                directory.counts["written_rows"] += len(slots)
            self._stale = True

    def refresh(self) -> None:
        """Reads the slots again from below, if there was a `flush`."""
        with self._lock:
            if not self._stale:
                return
            self._land()
            slots = [np.flatnonzero(directory.row_of >= 0) for directory in self.directories]
            rows = [directory.row_of[own] for directory, own in zip(self.directories, slots, strict=True)]
            self._released = arrived = self._streams.moment()
            for some_rows, some_slots in self._pieces(rows, slots, self.below.piece_bytes):
                held = self.below.hold(some_rows, keep=False)
                held.wait()
                arrived = self._bring([own.numpy() for own in held.places], some_slots)
                held.release(updated=False)
            arrived.precede()
            self._stale = False

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns by table how many rows batches named, were there, came, left, and were copied back."""
        return {table.name: dict(own.counts) for table, own in zip(self.tables, self.directories, strict=False)}


def _different(ids: NDArray[Any], spans: Sequence[Span], table: int) -> Numbers:
    """Returns the rows of a table that a batch looks up, rising, each once."""
    return np.unique(np.concatenate([NONE, *(ids[start:stop] for t, start, stop in spans if t == table)]))


def _tensors(numbers: Sequence[Numbers]) -> list[Tensor]:
    return [torch.from_numpy(own) for own in numbers]

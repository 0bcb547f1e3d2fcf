"""Slots in device memory in front of tables in host memory: rows come to the device before their batch does.

    ids of a batch --admit--> slots; rows are held below --land--> slots filled --take--> lookup, update --release-->

Every row of a table lies below: in DRAM, or in tiers (`Backing`). Device memory has slots for some of them: for the
first rows of a table always, for the others while they are in use. Updates happen in slots; an updated row is copied
back when its slot is needed, and by `flush`. Kernels get ids, and find the slots in a map that lies on the device too
and changes with what comes and goes, in the order of the device's work; no result depends on what is decided here.
Which row lies where: slots.py; how many slots there are: budget.py. Next: kernels/triton_moves.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.on_device import triton_ops
from hotrow.kernels.types import Layout, Rule
from hotrow.placement.base import Attached, Placement, Rows, TableState, Use
from hotrow.placement.budget import MOVING_SHARE, DeviceMemory, TableDemand, TableSlots, raise_to
from hotrow.placement.slots import (
    COUNTS,
    SOME_FROZEN,
    Announced,
    Directory,
    Held,
    Moves,
    Named,
    Numbers,
    Span,
    bad_id,
    spans_of,
)
from hotrow.placement.stores import StoreError
from hotrow.tables import TableConfig

if TYPE_CHECKING:
    from hotrow.kernels.triton_moves import Moment, Mover


@dataclass
class Landing:
    """Rows that have slots and are held below; they are copied over in the order in which slots were given."""

    held: Held
    slots: list[Numbers]
    num_sent: int
    """Number of moves to the host before it, which may carry the rows that come now."""
    arrived: Moment | None = None
    """Set when the copies are under way."""


class DeviceFlight:
    """A batch whose rows lie in slots, or are on their way there, until it is released."""

    def __init__(self, owner: Device, spans: list[Span], ids: Tensor, held: Named, landing: Landing) -> None:
        self._owner, self._spans, self._held, self.landing = owner, spans, held, landing
        # Pinned, so that no upload of a lookup or an update waits for the device.
        self.ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=owner.device.type == "cuda").copy_(ids)
        """Those that lookups and updates get: the batch's own may change, and rows of others have no slots."""
        self.released = False

    def is_of(self, ids: Tensor, spans: list[Span]) -> bool:
        """Returns whether these are still the ids whose rows lie in slots, looked up in the same tables."""
        return spans == self._spans and np.array_equal(ids.numpy(), self.ids.numpy())

    def __del__(self) -> None:
        self.release(updated=False)  # a lookup whose output nobody wanted

    def release(self, *, updated: bool) -> None:
        """Ends the lease; updated: the rows have changed. Later calls do nothing."""
        if not self.released:
            self.released = True
            self._owner.release(self._held, updated=updated)


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
        self.directory: Directory
        self.map: Tensor
        """`directory.slot_of` on the device; the copy stream writes it, as it does slots."""
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
        from hotrow.kernels.triton_ops import Arrays, SlotMap

        demands, below = self._demands(), self.below.parts()
        self.slots = self.memory.checked_slots(demands)
        self._record_bytes = [demand.record_bytes for demand in demands]
        num_rows, pinned = [demand.num_rows for demand in demands], [own.pinned for own in self.slots]
        self.directory = directory = Directory(num_rows, self.slots)
        self.map = torch.from_numpy(directory.slot_of).to(self.device, copy=True)
        self._parts = [
            [torch.zeros(sum(own), *array.shape[1:], dtype=array.dtype, device=self.device) for array in arrays]
            for arrays, own in zip(below, self.slots, strict=True)
        ]
        weights = [parts[0] for parts in self._parts]
        low = [parts[1] if parts[0].dtype == torch.bfloat16 else None for parts in self._parts]
        self._streams = Streams(self.device)
        self._streams.share([self.map, *(array for parts in self._parts for array in parts)])
        self._mover = Mover(below, self._parts, self._streams)
        self._released = self._arrived = self._streams.moment()
        slots = SlotMap(self.map, num_rows, pinned, directory.place_of_row_0.tolist())
        self.arrays = Arrays(weights, low, slots if len(self.map) else None)
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
            named = self.directory.find(sparse.values.numpy(), spans)
            if named is None:
                return
            with self._counting_room():
                if self._is_short(named):
                    self.postponed += 1
                    self._asked.add(sparse, self.below.hold(self.directory.rows(named.coming), keep=True))
                    return
                self.announced.add(sparse, self._admit(sparse, spans, named, keep=True))
            started = time.perf_counter()
            # Nobody can ask without waiting whether rows have come from disk; those of the nearer half should have.
            self._land(most_left=(len(self.announced) + 1) // 2)
            self.stall_s += time.perf_counter() - started

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
        """Returns the flight of this batch and the batch with ids of its own; later work on the device finds its rows.

        Raises ValueError for an id out of range, and if the batch and those before their step need more slots than
        there are. Raises StoreError if any store has failed, because it was to keep other rows.
        """
        with self._lock:
            spans = self._spans(sparse)
            flight = self.announced.take(
                sparse, unchanged=lambda own: own.is_of(sparse.values, spans), training=training
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
            return flight, sparse.with_values(flight.ids)

    def fits(self, sparse: KeyedJaggedTensor) -> bool:
        """Returns False for a batch to be scored that has more rows than there are slots, and two samples or more."""
        if torch.is_grad_enabled() or sparse.stride < 2:
            return True
        with self._lock:
            spans = self._spans(sparse)
            named = self.directory.find(sparse.values.numpy(), spans)
            return named is None or self.directory.fits(named)

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        # Rows may have changed below since the lookups.
        self.refresh()
        super().update(lookups, attached, rules)

    def _make_room_and_admit(self, sparse: KeyedJaggedTensor, spans: list[Span], *, keep: bool) -> DeviceFlight:
        directory, named = self.directory, self.directory.find(sparse.values.numpy(), spans)
        if named is None:
            weights = [parts[0] for parts in self.below.parts()]
            raise ValueError(bad_id(self.layout, self.tables, weights, sparse))
        while self._is_short(named) and len(self.announced):
            self.announced.forget_last()
            self.postponed += 1
        if self._is_short(named):
            missing, num_named = directory.num_short(named), directory.num_named(named)
            t, in_use = int(np.argmax(missing > 0)), [own.cached for own in self.slots] - directory.num_free
            most = [table.num_embeddings for table in self.tables]
            needed = np.minimum(most, in_use + num_named).tolist()
            slots, held = self.slots[t], self.slots[t].pinned + in_use[t]
            raise ValueError(
                f"the batch looks up {num_named[t]:,} rows of table {self.tables[t].name!r}, {missing[t]:,} more than "
                f"there are slots for: of {sum(slots):,} on the device {held:,} hold rows that stay and rows of "
                f"batches before their step; DeviceMemory: hbm is {self.memory.hbm_bytes:,} bytes; "
                f"{raise_to(self.memory.least_bytes(self._demands(), needed))}, or make batches smaller"
            )
        return self._admit(sparse, spans, named, keep=keep)

    def _spans(self, sparse: KeyedJaggedTensor) -> list[Span]:
        if self.arrays is None:
            self._lay_out()
        return spans_of(self.layout, sparse)

    def _is_short(self, named: Named) -> bool:
        return bool((self.directory.num_short(named) > 0).any())

    def _admit(self, sparse: KeyedJaggedTensor, spans: list[Span], named: Named, *, keep: bool) -> DeviceFlight:
        self._raise_failure()
        try:
            held, moves = self.directory.admit(named)
            return DeviceFlight(self, spans, sparse.values, held, self._exchange(moves, keep=keep))
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

    def _exchange(self, moves: Moves, *, keep: bool) -> Landing:
        """Sends back the rows that leave, then starts to bring those that come; copies keep this order."""
        num_sent = self._mover.num_sent
        for rows, slots in self._pieces(moves.leaving, moves.leaving_slots):
            self._mover.send_back(self.below.hold(rows, keep=True), _tensors(slots), after=self._released)
        if moves.pointers.size:
            self._arrived = self._mover.point(self.map, torch.from_numpy(moves.pointers), after=self._released)
        held = self.below.hold(moves.coming, keep=keep)
        landing = Landing(held, moves.coming_slots, num_sent)
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
        """Returns when all that was ever brought has come: a batch may name rows that another batch asked for."""
        for some_places, some_slots in self._pieces(places, slots):
            self._arrived = self._mover.bring(_tensors(some_places), _tensors(some_slots), after=self._released)
        return self._arrived

    def _pieces(
        self, rows: Sequence[Numbers], slots: Sequence[Numbers], most_bytes: int | None = None
    ) -> Iterator[tuple[list[Numbers], list[Numbers]]]:
        """Yields rows and slots in pieces within the memory for rows on their way, and within `most_bytes`."""
        most = max(1, self.memory.hbm_bytes // MOVING_SHARE // 2)
        most = most if most_bytes is None else min(most, most_bytes)
        total = sum(len(own) * num_bytes for own, num_bytes in zip(rows, self._record_bytes, strict=False))
        pieces = -(-total // most)
        if pieces < 2:  # numpy cuts slowly
            yield from [(list(rows), list(slots))] * pieces
            return
        cut_rows = [np.array_split(own, pieces) for own in rows]
        cut_slots = [np.array_split(own, pieces) for own in slots]
        for k in range(pieces):
            yield [own[k] for own in cut_rows], [own[k] for own in cut_slots]

    def release(self, held: Named, *, updated: bool) -> None:
        """Ends the lease of a batch whose rows `Directory.admit` gave slots; flights call it."""
        with self._lock:
            self.directory.release(held, updated=updated)
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
            rows, slots = self.directory.split(np.flatnonzero(self.directory.dirty))
            for some_rows, some_slots in self._pieces(rows, slots, self.below.piece_bytes):
                num_sent = self._mover.num_sent
                held = self.below.hold(some_rows, keep=False)
                self._mover.send_back(held, _tensors(some_slots), after=self._streams.moment())
                self._mover.settle(num_sent)  # the piece before: two at most are under way
            self._mover.settle()
            self.directory.dirty[:] = False
            self.directory.counts[:, COUNTS.index("written_rows")] += [len(own) for own in rows]
            self._stale = True

    def refresh(self) -> None:
        """Reads the slots again from below, if there was a `flush`."""
        with self._lock:
            if not self._stale:
                return
            self._land()
            rows, slots = self.directory.split(np.flatnonzero(self.directory.row_of >= 0))
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
        if self.arrays is None:
            return {}
        counts = self.directory.counts.tolist()
        return {t.name: dict(zip(COUNTS, own, strict=True)) for t, own in zip(self.tables, counts, strict=True)}


def _tensors(numbers: Sequence[Numbers]) -> list[Tensor]:
    return [torch.from_numpy(own) for own in numbers]

"""Slots in device memory in front of tables in host memory: rows come to the device before their batch does.

    ids of a batch --admit--> slots; rows are held below --land--> slots filled --take--> lookup, update --release-->

Every row of a table lies below: in DRAM, or in tiers (`Backing`). Device memory has slots for some of them: for the
first rows of a table always, for the others while they are in use. Updates happen in slots; an updated row is copied
back when its slot is needed, and by `flush`. Kernels get ids, and find the slots in a map that lies on the device too
and changes with what comes and goes, in the order of the device's work; no result depends on what is decided here.

One thread beside the step (worker.py) decides and moves: announcements, releases and all else are its work, in the
order of the calls, so that what is decided does not depend on time either. A step waits for the rows of its own batch.
Which row lies where: native/slot_directory.cpp; how many slots there are: budget.py. Next: kernels/triton_moves.py.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.on_device import triton_ops
from hotrow.kernels.types import Layout, Rule
from hotrow.placement.base import Attached, Placement, Rows, TableState, Use
from hotrow.placement.budget import MOVING_SHARE, DeviceMemory, TableDemand, TableSlots, raise_to
from hotrow.placement.slots import COUNTS, SOME_FROZEN, Announced, Held, RowSlots, Span, bad_id, directory_of, spans_of
from hotrow.placement.stores import StoreError
from hotrow.placement.worker import Worker

if TYPE_CHECKING:
    from hotrow.kernels.triton_moves import Moment, Mover

T = TypeVar("T")


@dataclass
class Landing:
    """Rows that have slots and are held below; they are copied over in the order in which slots were given."""

    held: Held
    slots: Sequence[Tensor]
    num_sent: int
    """Number of moves to the host before it, which may carry the rows that come now."""
    arrived: Moment | None = None
    """Set when the copies are under way."""


@dataclass
class Admission:
    """A batch that asks for slots, and what it was given."""

    ids: Tensor
    spans: list[Span]
    keep: bool
    """Whether rows that come may stay in a cache below."""
    named: Any = None
    """The rows that it names, for the directory; None if an id is outside its table."""
    landing: Landing | None = None
    """None if there was no room."""
    held: Held | None = None
    """Rows without room that wait in host memory."""


class DeviceFlight:
    """A batch whose rows lie in slots, or are on their way there, until it is released."""

    released = True  # until it is made
    stream: Any = None
    """The one that its lookups run on, when it was taken."""

    def __init__(self, owner: Device, sparse: KeyedJaggedTensor, spans: list[Span], *, keep: bool) -> None:
        self._owner, ids = owner, sparse.values
        # Pinned, so that no upload of a lookup waits for the device.
        own = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=owner.device.type == "cuda").copy_(ids)
        self.batch = Admission(own, spans, keep)
        """Its ids are those that lookups and updates get: the given ones may change, and other rows have no slots."""
        self.asked: Future[bool] | None = None
        """Says whether its rows have got slots, if it was announced."""
        self.released = False

    def is_of(self, ids: Tensor, spans: list[Span]) -> bool | None:
        """Returns whether these are still the ids whose rows lie in slots, looked up in the same tables; None if there
        was no room for them. Waits for its turn to come, and raises what stopped it."""
        if self.asked is not None and not self._owner.result_of(self.asked):
            return None
        return spans == self.batch.spans and ids.dtype == self.batch.ids.dtype and torch.equal(ids, self.batch.ids)

    def __del__(self) -> None:
        # A lookup whose output nobody wanted. The thread that collects garbage, maybe the worker, has its own stream.
        self.release(updated=False, stream=self.stream)

    def release(self, *, updated: bool, stream: Any = None) -> None:
        """Ends the lease; updated: the rows have changed. stream: whose work so far may read them, if it is not the
        current one. Later calls do nothing."""
        if not self.released:
            self.released = True
            self._owner.release(self.batch, updated=updated, stream=stream)


class Backing(Placement, Protocol):
    """A placement that can stand below a device: it can hold rows in host memory while they are moved."""

    @property
    def piece_bytes(self) -> int | None:
        """The most bytes of rows to hold at once without `keep`; if None, any number."""

    def parts(self) -> list[list[Tensor]]:
        """Returns by table what makes up a row: weights, lower halves of split ones, and states that are attached."""

    def hold(self, rows: Sequence[Tensor], *, keep: bool) -> Held:
        """Brings rows of each table, no row twice, to places in host memory. keep: they stay in the cache, if any."""

    def check_stores(self) -> None:
        """Raises StoreError if any store has failed."""


class Device(Placement):
    """The slots of one collection on a device, in front of the placement `below`. Raises ImportError if Triton is not
    installed, ValueError if there is no native module."""

    looks_ahead = True
    stall_s = 0.0
    """Seconds that training batches waited for their rows when they were looked up."""

    def __init__(self, memory: DeviceMemory, below: Backing) -> None:
        ops.native_module("tables on a device need")  # raises here if there is none, not at the first lookup
        self.tables, self.layout, self.memory = below.tables, Layout.of(below.tables), memory
        self.device = torch.device(memory.device)
        self.below: Backing = below
        self.weights, self.low = below.weights, below.low
        on_device = triton_ops("tables on a device")
        self.kernels, self._with_ids = ops.KernelSet(self.layout, on_device.Kernels), on_device.OwnIds.replacing
        self.directory: Any = None
        """A native SlotDirectory; only the worker asks it."""
        self.map: Tensor
        """By place of a row that may come and go (slot_directory.h), its slot in its table, or -1; the copy stream
        writes it, as it does slots."""
        self.slots: list[TableSlots] = []
        """By table, known when the tables are laid out."""
        self._parts: list[list[Tensor]] = []
        self.arrays: Any = None
        """A `triton_ops.Arrays` of the weights by slot; None until the tables are laid out."""
        self._mover: Mover
        self.announced: Announced[DeviceFlight] = Announced()
        self.postponed = 0
        """Announcements for which there was no room yet."""
        self._landings: deque[Landing] = deque()
        self._stale = False
        self._lost: str | None = None
        """Why rows may be lost, and the cure."""
        self._untold: BaseException | None = None
        """The error that lost rows, until it is raised outside the worker."""
        self._lock = threading.RLock()
        """Held while anything but a release is asked for, and never by the worker."""
        self._worker = Worker("hotrow-slots")
        weakref.finalize(self, self._worker.end).atexit = False

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
        count = len(states[self.tables[0].name])
        arrays = self._lay_out()
        return Attached(states, [arrays([parts[k - count] for parts in self._parts]) for k in range(count)])

    def _demands(self) -> list[TableDemand]:
        return [
            TableDemand(table.name, table.num_embeddings, sum(array[:1].nbytes for array in arrays))
            for table, arrays in zip(self.tables, self.below.parts(), strict=True)
        ]

    @torch.inference_mode(mode=False)  # the worker writes the arrays, and is not in it
    def _lay_out(self) -> Any:
        """Gives the slots their memory; returns the class of arrays that the kernels take."""
        from hotrow.kernels.triton_moves import Mover, Streams
        from hotrow.kernels.triton_ops import Arrays, SlotMap

        demands, below = self._demands(), self.below.parts()
        self.slots = self.memory.checked_slots(demands)
        self._record_bytes = [demand.record_bytes for demand in demands]
        num_rows, pinned = [demand.num_rows for demand in demands], [own.pinned for own in self.slots]
        self.directory = directory_of(num_rows, self.slots)
        passing = [n - own for n, own in zip(num_rows, pinned, strict=True)]
        self.map = torch.full((sum(passing),), -1, dtype=torch.int32, device=self.device)
        self._parts = [
            [torch.zeros(sum(own), *array.shape[1:], dtype=array.dtype, device=self.device) for array in arrays]
            for arrays, own in zip(below, self.slots, strict=True)
        ]
        weights = [parts[0] for parts in self._parts]
        low = [parts[1] if parts[0].dtype == torch.bfloat16 else None for parts in self._parts]
        self._streams = Streams(self.device)
        self._streams.share([self.map, *(array for parts in self._parts for array in parts)])
        self._mover = Mover(below, self._parts, self._streams)
        self._released = self._arrived = self._refreshed = self._streams.moment()
        firsts = [first - own for first, own in zip(accumulate(passing, initial=0), pinned, strict=False)]
        slots = SlotMap(self.map, num_rows, pinned, firsts)
        self.arrays = Arrays(weights, low, slots if len(self.map) else None)
        self._stale = True  # the pinned rows are yet to come
        return Arrays

    @property
    def slots_bytes(self) -> int:
        return sum(part.nbytes for parts in self._parts for part in parts)

    # ---- batches in flight

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Asks for the rows of a training batch that comes later, and keeps them until it has been trained. If there
        are not enough slots when its turn comes, the rows are brought to host memory only. A batch with an id out of
        range is left to its lookup, which raises the error. Raises StoreError if rows are lost here or below."""
        with self._lock:
            if sparse not in self.announced:
                self._raise_failure()
                flight = DeviceFlight(self, sparse, self._spans(sparse), keep=True)
                # Nobody can ask without waiting whether rows have come from disk; those of the nearer half should have.
                most_left = (len(self.announced) + 2) // 2
                flight.asked = self._worker.ask(partial(self._bring_ahead, flight.batch, most_left))
                self.announced.add(sparse, flight)

    def _bring_ahead(self, batch: Admission, most_left: int) -> bool:
        """Returns whether there was room. most_left: of the landings, how many may wait."""
        if not self._admit(batch):
            if batch.named is not None:
                self.postponed += 1
                batch.held = self.below.hold(RowSlots.of(self.directory.coming(batch.named)).rows, keep=True)
            return False
        self._land(most_left=most_left)
        return True

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        with self._lock:
            self.announced.forget(sparse)

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[DeviceFlight, KeyedJaggedTensor]:
        """Returns the flight of this batch, and the batch with ids of its own; later work on the device finds its rows.
        Raises ValueError for an id out of range, and if the batch and those before their step need more slots than
        there are. Raises StoreError if any store has failed, even one that was to keep other rows."""
        with self._lock:
            spans, started = self._spans(sparse), time.perf_counter()
            before = self.announced.get(sparse)  # rows without room stay in host memory until they have slots
            flight = self.announced.take(
                sparse, unchanged=lambda own: own.is_of(sparse.values, spans), training=training
            )
            if flight is None:
                flight = self._make_room_and_admit(sparse, spans, keep=training)
            self.refresh()
            landing = flight.batch.landing
            assert landing is not None
            if landing.arrived is None:
                self._wait(partial(self._land, landing))
            if before is not None and before is not flight:
                before.release(updated=False)
            self.stall_s += training * (time.perf_counter() - started)
            self._raise_failure()
            assert landing.arrived is not None
            landing.arrived.precede()
            flight.stream = self._streams.current()
            return flight, self._with_ids(sparse, flight.batch.ids)

    def _wait(self, work: Callable[[], T]) -> T:
        """Returns what the worker returns when all that it was asked before is done, or raises what it raises."""
        return self.result_of(self._worker.ask(work))

    def result_of(self, answer: Future[T]) -> T:
        """Waits for an answer of the worker; flights call it."""
        try:
            return answer.result()
        except StoreError:
            self._raise_failure()  # what lost rows, if nobody was told
            raise
        except BaseException as error:
            if error is self._untold:
                self._untold = None
            raise

    def fits(self, sparse: KeyedJaggedTensor) -> bool:
        """Returns False for a batch to be scored that has more rows than there are slots, and two samples or more."""
        if torch.is_grad_enabled() or sparse.stride < 2:
            return True
        with self._lock:
            return self._wait(partial(self._fits, sparse.values, self._spans(sparse)))

    def _fits(self, ids: Tensor, spans: list[Span]) -> bool:
        named = self.directory.find(ids.numpy(), spans)
        return named is None or bool(self.directory.fits(named))

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        # Rows may have changed below since the lookups.
        self.refresh()
        super().update(lookups, attached, rules)

    def _make_room_and_admit(self, sparse: KeyedJaggedTensor, spans: list[Span], *, keep: bool) -> DeviceFlight:
        flight = DeviceFlight(self, sparse, spans, keep=keep)
        batch = flight.batch
        while not self._wait(partial(self._admit, batch)):
            if batch.named is None:
                weights = [parts[0] for parts in self.below.parts()]
                raise ValueError(bad_id(self.layout, self.tables, weights, sparse))
            # All that was announced before has had its turn.
            if not self.announced.forget_last(lambda own: own.batch.landing is not None):
                raise ValueError(self._wait(partial(self._no_room, batch.named)))
            self.postponed += 1
        return flight

    def _no_room(self, named: Any) -> str:
        """Returns what is wrong with a batch that looks up these rows, and the cure."""
        missing, rows = self.directory.missing(named), named.numbers
        t = next(t for t, own in enumerate(missing) if own > 0)
        in_use = [own.cached - free for own, free in zip(self.slots, self.directory.num_free, strict=True)]
        needed = [min(own.num_embeddings, a + b) for own, a, b in zip(self.tables, in_use, rows, strict=True)]
        held = self.slots[t].pinned + in_use[t]
        return (
            f"the batch looks up {rows[t]:,} rows of table {self.tables[t].name!r}, {missing[t]:,} more than "
            f"there are slots for: of {sum(self.slots[t]):,} on the device {held:,} hold rows that stay and rows of "
            f"batches before their step; DeviceMemory: hbm is {self.memory.hbm_bytes:,} bytes; "
            f"{raise_to(self.memory.least_bytes(self._demands(), needed))}, or make batches smaller"
        )

    def _spans(self, sparse: KeyedJaggedTensor) -> list[Span]:
        if self.arrays is None:
            self._lay_out()
        return spans_of(self.layout, sparse)

    def _admit(self, batch: Admission) -> bool:
        """Gives the rows of a batch slots; returns False if an id is out of range or there is no room."""
        self._raise_lost()
        batch.named = self.directory.find(batch.ids.numpy(), batch.spans)
        if batch.named is None or max(self.directory.missing(batch.named)) > 0:
            return False
        try:
            batch.landing = self._exchange(self.directory.admit(batch.named), keep=batch.keep)
        except BaseException as error:  # rows have given up their slots, and may not have left them yet
            self._lost = (
                f"rows of the tables on {self.device} are lost: {type(error).__name__} ended the call that moved them "
                f"({error}). Nothing was trained on wrong rows; make a new collection and load the last checkpoint"
            )
            self._untold = error
            raise
        return True

    def _raise_failure(self) -> None:
        """Raises StoreError if rows are lost here or below; the first time what lost them here."""
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        self._raise_lost()

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise StoreError(self._lost)
        self.below.check_stores()

    def _exchange(self, moves: Any, *, keep: bool) -> Landing:
        """Sends back the rows that leave, then starts to bring those that come, as `SlotDirectory.admit` gives them;
        copies keep this order. moves: None if no row comes."""
        num_sent, coming = self._mover.num_sent, RowSlots((), ())
        if moves is not None:
            coming, leaving, pointers = RowSlots.of(moves[0]), RowSlots.of(moves[1]), torch.from_numpy(moves[2])
            for rows, slots in self._pieces(leaving):
                self._mover.send_back(self.below.hold(rows, keep=True), slots, after=self._released)
            self._arrived = self._mover.point(self.map, pointers.view(2, -1), after=self._released)
        held = self.below.hold(coming.rows, keep=keep)
        landing = Landing(held, coming.slots, num_sent)
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
            first.arrived = self._bring(RowSlots(first.held.places, first.slots))
            first.held.release(updated=False)
            self._landings.popleft()

    def _bring(self, found: RowSlots) -> Moment:
        """Returns the moment when all rows asked for are there: a batch may name rows that another one asked for."""
        for places, slots in self._pieces(found):
            self._arrived = self._mover.bring(places, slots, after=self._released)
        return self._arrived

    def _pieces(self, found: RowSlots, most_bytes: int | None = None) -> Iterator[RowSlots]:
        """Yields rows and slots in pieces within the memory for rows on their way, and within `most_bytes`."""
        most = max(1, self.memory.hbm_bytes // MOVING_SHARE // 2)
        most = most if most_bytes is None else min(most, most_bytes)
        total = sum(own.numel() * num_bytes for own, num_bytes in zip(found.rows, self._record_bytes, strict=False))
        if (pieces := -(-total // most)) < 2:
            yield from [found] * pieces
            return
        pieces = min(pieces, max(own.numel() for own in found.rows))  # none is empty
        rows, slots = ([torch.tensor_split(own, pieces) for own in each] for each in found)
        yield from (RowSlots([own[k] for own in rows], [own[k] for own in slots]) for k in range(pieces))

    def release(self, batch: Admission, *, updated: bool, stream: Any = None) -> None:
        """Ends the lease of a batch; flights call it."""
        if not self._worker.forked:  # a child's copies of leases end with it, and let go of nothing
            self._worker.ask(partial(self._release, batch, self._streams.moment(stream), updated))

    def _release(self, batch: Admission, moment: Moment, updated: bool) -> None:  # noqa: FBT001
        if batch.landing is not None:
            self.directory.release(batch.named, updated=updated)
        if batch.held is not None:
            batch.held.release(updated=False)
        self._released = moment
        with self._streams.copying(after=moment):  # later copies come after every release, of any stream
            pass

    # ---- what lies below

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        """Returns the rows below, after `flush`."""
        self.flush()
        return self.below.rows(table, state)

    def flush(self) -> None:
        """Copies changed rows back, so that every row below is current and may be changed there. The slots are read
        again before their next use. Raises StoreError if rows are lost."""
        with self._lock:
            self._raise_failure()
            if self.arrays is not None and not self._stale:
                self._wait(partial(self._flush, self._streams.moment()))

    def _flush(self, moment: Moment) -> None:
        self._land()
        found = RowSlots.of(self.directory.resident(dirty=True))
        for rows, slots in self._pieces(found, self.below.piece_bytes):
            num_sent = self._mover.num_sent
            self._mover.send_back(self.below.hold(rows, keep=False), slots, after=moment)
            self._mover.settle(num_sent)  # the piece before: two at most are under way
        self._mover.settle()
        self.directory.clear_dirty()
        self._stale = True

    def refresh(self) -> None:
        """Reads the slots again from below, if there was a `flush`."""
        with self._lock:
            if self._stale:
                self._refreshed = self._wait(partial(self._refresh, self._streams.moment()))
            # Each time, because another call may be on another stream, or have been interrupted here.
            self._refreshed.precede()

    def _refresh(self, moment: Moment) -> Moment:
        self._land()
        self._released = arrived = moment
        for rows, slots in self._pieces(RowSlots.of(self.directory.resident(dirty=False)), self.below.piece_bytes):
            held = self.below.hold(rows, keep=False)
            held.wait()
            arrived = self._bring(RowSlots(held.places, slots))
            held.release(updated=False)
        self._stale = False
        return arrived

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns by table how many rows batches named, were there, came, left, and were copied back."""
        if self.directory is None:
            return {}
        with self._lock:
            counts = self._wait(lambda: self.directory.counts)
        return {t.name: dict(zip(COUNTS, own, strict=True)) for t, own in zip(self.tables, counts, strict=True)}

    def close(self) -> None:
        """See Placement. What was announced is finished first."""
        self._worker.close()
        super().close()

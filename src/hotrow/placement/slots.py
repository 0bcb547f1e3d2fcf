"""What placements that bring rows into slots are made of: announced batches, held rows, and a directory of slots.

Numbers and bookkeeping alone: nothing here moves a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels.types import Layout, first_bad_id
from hotrow.placement.base import Lease
from hotrow.placement.budget import TableSlots
from hotrow.tables import TableConfig

Span = tuple[int, int, int]
"""A table's number, and the first and end of the ids that look it up among those of a batch."""


SOME_FROZEN = (
    "some of the tables are frozen and others not, which tables on a device and copies of hot rows do not offer: "
    "freeze all, or make one EmbeddingCollection of the tables that stay and one of the others"
)
"""The reason why kernels that run beside the tables refuse "freeze_some"."""


class AwaitedLease(Lease, Protocol):
    """A lease whose rows may still be on their way."""

    def wait(self) -> None:
        """Sleeps until every row is there. Raises StoreError if one could not be read."""


L = TypeVar("L", bound=Lease)


class Announced(Generic[L]):
    """Batches that were announced and are yet to come, and how well those that came were foreseen."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[KeyedJaggedTensor, L]] = {}
        self.altered = self.unannounced = self.foreseen = 0
        """Numbers of training batches: changed after they were announced; never announced; as announced."""

    def counts(self) -> dict[str, int]:
        return {"foreseen": self.foreseen, "unannounced": self.unannounced, "altered": self.altered}

    def __contains__(self, sparse: KeyedJaggedTensor) -> bool:
        return id(sparse.values) in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, sparse: KeyedJaggedTensor, lease: L) -> None:
        """Keeps the lease of a batch until it comes, or is forgotten."""
        self._leases[id(sparse.values)] = (sparse, lease)

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        """Ends the lease of a batch that will not come, or has been."""
        if (found := self._leases.pop(id(sparse.values), None)) is not None:
            found[1].release(updated=False)

    def forget_last(self) -> None:
        """Ends the lease of the batch that was announced last, and is needed last."""
        _, lease = self._leases.pop(next(reversed(self._leases)))
        lease.release(updated=False)

    def take(self, sparse: KeyedJaggedTensor, *, unchanged: Callable[[L], bool], training: bool) -> L | None:
        """Returns the lease of a batch that has come; None if it was not announced, or is not what was announced."""
        _, lease = self._leases.pop(id(sparse.values), (None, None))
        if lease is not None and not unchanged(lease):
            self.altered += training
            lease.release(updated=False)
            return None
        if training:
            self.unannounced += lease is None
            self.foreseen += lease is not None
        return lease


@dataclass
class Held:
    """Rows of each table that keep their places until they are released, for a placement in front of this one."""

    flight: AwaitedLease
    places: list[Tensor]
    """By table, int64 [n]: their row numbers in the arrays of `Backing.parts`."""
    ready: bool = False
    """Whether `wait` returns at once."""

    @property
    def released(self) -> bool:
        return self.flight.released

    def wait(self) -> None:
        self.flight.wait()

    def release(self, *, updated: bool) -> None:
        self.flight.release(updated=updated)


def spans_of(layout: Layout, sparse: KeyedJaggedTensor) -> list[Span]:
    """Returns which ids of a batch look up which table, in the order of the tables."""
    names = set(sparse.keys)
    served = [feature for feature in layout.features if feature.name in names]
    spans = [(feature.table, sparse.span(feature.name)) for feature in served]
    return [(table, span.start, span.stop) for table, span in spans]


def bad_id(layout: Layout, tables: Sequence[TableConfig], weights: Sequence[Tensor], sparse: KeyedJaggedTensor) -> str:
    """Returns the text of the error for a batch with an id outside its table; weights: [N, ...] of each table."""
    served = replace(layout, features=tuple(f for f in layout.features if f.name in sparse.keys))
    bad = first_bad_id(served, list(weights), sparse)
    if bad is None:
        return "an id of the batch was outside its table, and is not when looked at again: it is being changed"
    return bad.text(tables[bad.feature.table].num_embeddings)


def check_ids(layout: Layout, tables: Sequence[TableConfig], sparse: KeyedJaggedTensor, spans: Sequence[Span]) -> None:
    """Raises ValueError if an id in the spans of a batch is outside its table."""
    ids = sparse.values.numpy()
    for t, start, stop in spans:
        own, num_rows = ids[start:stop], tables[t].num_embeddings
        if len(own) and not 0 <= int(own.min()) <= int(own.max()) < num_rows:
            shapes = [torch.empty(table.num_embeddings, 0) for table in tables]
            raise ValueError(bad_id(layout, tables, shapes, sparse))


NONE: NDArray[np.int64] = np.empty(0, np.int64)
Numbers = NDArray[np.int64]
COUNTS = ("rows", "hit_rows", "read_rows", "evicted_rows", "written_rows")


class Named(NamedTuple):
    """The different rows that a batch looks up."""

    slots: Numbers
    """Those that have one, in any order."""
    passing: Numbers
    """Those among `slots` whose row comes and goes."""
    coming: Numbers
    """The places of rows without a slot, rising, so that what is decided depends on no order of ids."""


class Moves(NamedTuple):
    """What admitting rows asks for; lists are by table, and empty if no row comes."""

    coming: list[Numbers]
    """Rows, and the slots that they get."""
    coming_slots: list[Numbers]
    leaving: list[Numbers]
    """Rows that were updated since they came, and the slots that they give up."""
    leaving_slots: list[Numbers]
    pointers: Numbers
    """[2, n]: places whose entry in `Directory.slot_of` has changed, and their entries."""


class Directory:
    """Which rows of the tables lie in which of their slots: a table's first rows always lie in its pinned slots, and a
    clock for each table decides about the others.

    Slots here are numbers in one array for all tables, in which a table's slots begin at `first_slots`. A *place* is a
    row's number among those of all tables that may come and go. The hand of a clock goes round the cached slots of a
    table. A row makes room if it is in no batch and was not used since the hand last passed.
    """

    def __init__(self, num_rows: Sequence[int], slots: Sequence[TableSlots]) -> None:
        self._num_rows, (self._pinned, self._cached) = np.array(num_rows, np.int64), np.array(slots, np.int64).T
        self.first_slots = np.cumsum([0, *(self._pinned + self._cached)])
        self._first_places = np.cumsum([0, *(self._num_rows - self._pinned)])
        self.place_of_row_0 = self._first_places[:-1] - self._pinned
        """By table; a number below 0 if all tables before it are pinned."""
        num_slots = int(self.first_slots[-1])
        self.slot_of: NDArray[np.int32] = np.full(self._first_places[-1], -1, np.int32)
        """By place, the slot among those of its table; -1 if the row has none."""
        self.row_of: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self.dirty, self._used = np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.bool_)
        self._pins: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self._newest: NDArray[np.int32] = np.zeros(num_slots + 1, np.int32)
        """For `_once`, by slot, with one more for rows that have none."""
        self._tables = np.repeat(np.arange(len(slots), dtype=np.int32), np.diff(self.first_slots))
        for first, pinned in zip(self.first_slots, self._pinned, strict=False):
            self.row_of[first : first + pinned] = np.arange(pinned)
        self.num_free = self._cached.copy()
        """By table, cached slots that hold no row of a batch."""
        self.counts = np.zeros((len(slots), len(COUNTS)), np.int64)
        self._hands = [0] * len(slots)
        self._asked: list[Span] = []
        self._of_ids = np.zeros((4, 0), np.int64)

    def find(self, ids: NDArray[Any], spans: Sequence[Span]) -> Named | None:
        """Returns the rows that the ids in the spans of a batch look up; None if an id is outside its table."""
        if spans != self._asked:  # batches of one id per feature and sample have the same spans
            tables, lengths = np.array([(t, stop - start) for t, start, stop in spans], np.int64).reshape(-1, 2).T
            of_tables = np.stack([self._num_rows, self._pinned, self.first_slots[:-1], self.place_of_row_0])
            self._of_ids, self._asked = np.repeat(of_tables[:, tables], lengths, axis=1), list(spans)
        num_rows, pinned, first_slots, place_of_row_0 = self._of_ids
        rows = np.concatenate([NONE, *(ids[start:stop] for _, start, stop in spans)])
        if not ((rows >= 0) & (rows < num_rows)).all():
            return None
        # Positions and take, because numpy selects by booleans several times as slowly.
        slots, beyond = rows + first_slots, np.flatnonzero(rows >= pinned) if len(self.slot_of) else NONE
        places = rows.take(beyond) + place_of_row_0.take(beyond)
        found = self.slot_of.take(places)
        absent = np.flatnonzero(found < 0)
        here = found + first_slots.take(beyond)
        here[absent] = len(self.row_of)
        slots[beyond] = here
        named = self._once(self._newest, slots)
        named[beyond.take(absent)] = False
        passing = slots.take(beyond.take(np.flatnonzero(named.take(beyond))))
        coming = places.take(absent)
        coming = np.sort(coming.take(np.flatnonzero(self._once(self.slot_of, coming))))
        self.slot_of[coming] = -1
        return Named(slots.take(np.flatnonzero(named)), passing, coming)

    @staticmethod
    def _once(scratch: NDArray[np.int32], numbers: Numbers) -> NDArray[np.bool_]:
        """Returns a boolean for each of `numbers`, True for one of those that are equal; they index `scratch`."""
        marks = ~np.arange(len(numbers), dtype=np.int32)
        scratch[numbers] = marks
        once: NDArray[np.bool_] = scratch.take(numbers) == marks  # of equal ones one was written last
        return once

    def num_named(self, named: Named) -> Numbers:
        """Returns by table how many rows a batch looks up."""
        found: Numbers = self._by_table(named.slots) + self._num_coming(named)
        return found

    def num_short(self, named: Named) -> Numbers:
        """Returns by table how many slots are missing for these rows to lie here together; 0 or less if they can."""
        short: Numbers = self._num_coming(named) + self._by_table(self._idle(named.passing)) - self.num_free
        return short

    def fits(self, named: Named) -> bool:
        """Returns whether these rows could lie here together if no other batch had any."""
        return bool((self._by_table(named.passing) + self._num_coming(named) <= self._cached).all())

    def _num_coming(self, named: Named) -> Numbers:
        found: Numbers = np.diff(np.searchsorted(named.coming, self._first_places))
        return found

    def _by_table(self, slots: Numbers) -> Numbers:
        found: Numbers = np.bincount(self._tables[slots], minlength=len(self._cached))
        return found

    def _idle(self, slots: Numbers) -> Numbers:
        found: Numbers = slots.take(np.flatnonzero(self._pins.take(slots) == 0))
        return found

    def rows(self, places: Numbers) -> list[Numbers]:
        """Returns by table the rows at these places, which rise."""
        ends = np.searchsorted(places, self._first_places).tolist()
        return [places[a:b] - first for a, b, first in zip(ends, ends[1:], self.place_of_row_0, strict=False)]

    def split(self, slots: Numbers) -> tuple[list[Numbers], list[Numbers]]:
        """Returns by table the rows in these slots, and the slots among those of the table; tables come in order."""
        ends = np.cumsum(self._by_table(slots))[:-1]
        return np.split(self.row_of[slots], ends), np.split(slots - self.first_slots[self._tables[slots]], ends)

    def admit(self, named: Named) -> tuple[Named, Moves]:
        """Returns the rows with slots for all, pinned, and the moves to make; there must be room."""
        self.counts[:, :2] += self._by_table(named.slots)[:, None]
        self.num_free -= self._by_table(self._idle(named.passing))
        self._pins[named.passing] += 1  # first, so that no row of the batch makes room for another
        self._used[named.passing] = True
        if not len(named.coming):
            return named, Moves([], [], [], [], NONE)
        rows = self.rows(named.coming)
        slots = np.concatenate([NONE, *(self._victims(t, len(own)) for t, own in enumerate(rows) if len(own))])
        left, out = slots[self.row_of[slots] >= 0], slots[self.dirty[slots]]
        leaving, leaving_slots = self.split(out)
        gone = self.row_of[left] + self.place_of_row_0[self._tables[left]]
        self.slot_of[gone] = -1
        self.row_of[slots] = np.concatenate([NONE, *rows])
        _, coming_slots = self.split(slots)
        here = np.concatenate([NONE, *coming_slots])
        self.slot_of[named.coming] = here
        self.dirty[slots] = False
        self._used[slots] = True
        num_coming, num_left, num_out = (self._by_table(own) for own in (slots, left, out))
        self.counts += np.stack([num_coming, np.zeros_like(num_coming), num_coming, num_left, num_out], axis=1)
        pointers = np.stack([np.append(gone, named.coming), np.append(np.full(len(gone), -1), here)])
        held = Named(np.append(named.slots, slots), np.append(named.passing, slots), NONE)
        return held, Moves(rows, coming_slots, leaving, leaving_slots, pointers)

    def _victims(self, table: int, count: int) -> Numbers:
        """Pins and returns `count` slots of a table that were in no batch; there must be so many."""
        first, ring, found = int(self.first_slots[table] + self._pinned[table]), int(self._cached[table]), [NONE]
        self.num_free[table] -= count
        while count:
            window = first + (self._hands[table] + np.arange(min(ring, max(4 * count, 1024)))) % ring
            free = self._pins[window] == 0
            cold = np.flatnonzero(free & ~self._used[window])[:count]
            if len(cold) == count:  # the hand goes no further
                window, free = window[: cold[-1] + 1], free[: cold[-1] + 1]
            self._used[window[free]] = False
            self._pins[window[cold]] = 1
            found.append(window[cold])
            self._hands[table] = (int(window[-1]) - first + 1) % ring
            count -= len(cold)
        return np.concatenate(found)

    def release(self, held: Named, *, updated: bool) -> None:
        """Unpins the rows of a batch that is over."""
        self._pins[held.passing] -= 1
        self.num_free += self._by_table(self._idle(held.passing))
        if updated:
            self.dirty[held.slots] = True

"""What placements that bring rows into slots are made of: announced batches, held rows, and a directory of slots.

Numbers and bookkeeping alone: nothing here moves a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

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


class Moves(NamedTuple):
    """What admitting rows of a table asks for: int64 arrays."""

    coming: NDArray[np.int64]
    coming_slots: NDArray[np.int64]
    leaving: NDArray[np.int64]
    """Rows that were updated since they came, and make room."""
    leaving_slots: NDArray[np.int64]


COUNTS = ("rows", "hit_rows", "read_rows", "evicted_rows", "written_rows")


class Directory:
    """Which rows of a table lie in which of its slots: in [0, pinned) always its first rows, then a clock decides.

    The hand of the clock goes round the slots. A row makes room if it is in no batch and was not used since the hand
    last passed.
    """

    def __init__(self, num_rows: int, slots: TableSlots) -> None:
        num_slots = slots.pinned + slots.cached
        self.slot_of: NDArray[np.int32] = np.full(num_rows, -1, np.int32)
        self.row_of: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self.pins: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.used = np.zeros(num_slots, np.bool_)
        self.dirty = np.zeros(num_slots, np.bool_)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.num_free = slots.cached
        """Slots that hold no row of a batch."""
        self._hand = 0
        first = np.arange(slots.pinned)
        self.slot_of[first], self.row_of[first], self.pins[first] = first, first, 1

    def num_short(self, rows: NDArray[np.int64]) -> int:
        """Returns how many slots are missing for `rows`, no row twice, to lie here together; 0 if they can."""
        slots = self.slot_of[rows]
        hits = slots[slots >= 0]
        return max(0, len(rows) - len(hits) + int(np.count_nonzero(self.pins[hits] == 0)) - self.num_free)

    def absent(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows[self.slot_of[rows] < 0]

    def admit(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Moves]:
        """Returns a slot for each of `rows`, pinned, and the moves to make; there must be room."""
        slots = self.slot_of[rows].astype(np.int64)
        missing = slots < 0
        hits = slots[~missing]
        self.num_free -= int(np.count_nonzero(self.pins[hits] == 0))
        self.pins[hits] += 1  # first, so that no row of the batch makes room for another
        coming, places = rows[missing], self._victims(int(missing.sum()))
        left = self.row_of[places]
        out = places[self.dirty[places]]
        moves = Moves(coming, places, self.row_of[out], out)
        self.slot_of[left[left >= 0]] = -1
        self.slot_of[coming], self.row_of[places] = places, coming
        self.dirty[places] = False
        slots[missing] = places
        self.used[slots] = True
        numbers = len(rows), len(rows) - len(coming), len(coming), int((left >= 0).sum()), len(out)
        for name, number in zip(self.counts, numbers, strict=True):
            self.counts[name] += number
        return slots, moves

    def _victims(self, count: int) -> NDArray[np.int64]:
        """Pins and returns `count` slots that were in no batch; there must be so many."""
        num_slots, found = len(self.pins), [np.empty(0, np.int64)]
        self.num_free -= count
        while count:
            window = (self._hand + np.arange(min(num_slots, max(4 * count, 1024)))) % num_slots
            free = self.pins[window] == 0
            cold = np.flatnonzero(free & ~self.used[window])[:count]
            if len(cold) == count:  # the hand goes no further
                window, free = window[: cold[-1] + 1], free[: cold[-1] + 1]
            self.used[window[free]] = False
            self.pins[window[cold]] = 1
            found.append(window[cold])
            self._hand = (int(window[-1]) + 1) % num_slots
            count -= len(cold)
        return np.concatenate(found)

    def release(self, slots: NDArray[np.int64], *, updated: bool) -> None:
        """Unpins the slots of a batch that is over."""
        self.pins[slots] -= 1
        self.num_free += int(np.count_nonzero(self.pins[slots] == 0))
        if updated:
            self.dirty[slots] = True

    def holds(self, ids: NDArray[np.int64], slots: NDArray[np.int32]) -> bool:
        """Returns whether `slots` are still those of `ids`, which may be any numbers."""
        inside = bool(((ids >= 0) & (ids < len(self.slot_of))).all())
        return inside and bool((self.slot_of[ids] == slots).all())


NONE: NDArray[np.int64] = np.empty(0, np.int64)
"""The rows of a table that need no slot."""


class Resident(Directory):
    """The directory of a table that has a slot for every row: a row's slot is its number, and no row ever moves.

    It is asked for no row: `Residents` serves all such tables at once. dirty: by row.
    """

    def __init__(self, dirty: NDArray[np.bool_]) -> None:
        self.row_of, self.dirty = np.arange(len(dirty)), dirty
        self.num_free, self.counts = 0, dict.fromkeys(COUNTS, 0)

    def num_short(self, rows: NDArray[np.int64]) -> int:
        return 0

    def absent(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return NONE

    def admit(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Moves]:
        return NONE, Moves(NONE, NONE, NONE, NONE)

    def release(self, slots: NDArray[np.int64], *, updated: bool) -> None:
        return


class Residents:
    """The tables of a collection that have a slot for every row; num_rows: by table, 0 for the other tables.

    Their rows stand behind one another in one array, and an id's *place* there is found for all tables at once.
    """

    def __init__(self, num_rows: Sequence[int]) -> None:
        ends = np.cumsum([0, *num_rows])
        self._num_rows, self._first = np.array(num_rows, np.int64), ends[:-1]
        self._dirty = np.zeros(ends[-1], np.bool_)
        self._newest = np.zeros(ends[-1], np.int32)
        """Which id of a batch named a row last."""
        parts = np.split(self._dirty, ends[1:-1])
        self.directories = {t: Resident(own) for t, own in enumerate(parts) if len(own)}
        self._asked: list[Span] = []
        self._limits = self._firsts = NONE

    def places(self, ids: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.int64] | None:
        """Returns the places of a batch's ids, in the order of the spans; None if an id is outside its table."""
        spans = [span for span in spans if span[0] in self.directories]
        if spans != self._asked:  # batches of one id per feature and sample have the same spans
            tables, lengths = [t for t, _, _ in spans], [stop - start for _, start, stop in spans]
            self._limits = np.repeat(self._num_rows[tables], lengths)
            self._firsts = np.repeat(self._first[tables], lengths)
            self._asked = spans
        own = np.concatenate([NONE, *(ids[start:stop] for _, start, stop in spans)])
        return own + self._firsts if ((own >= 0) & (own < self._limits)).all() else None

    def count(self, places: NDArray[np.int64], spans: Sequence[Span]) -> None:
        """Counts the different rows of a batch; places: of its ids."""
        numbers = np.arange(len(places), dtype=np.int32)
        self._newest[places] = numbers
        named = np.append(0, np.cumsum(self._newest[places] == numbers))  # of equal ids one was written last
        end = 0
        for t, start, stop in spans:
            if t in self.directories:
                first, end = end, end + stop - start
                for name in ("rows", "hit_rows"):
                    self.directories[t].counts[name] += int(named[end] - named[first])

    def change(self, places: NDArray[np.int64]) -> None:
        """Marks rows as updated."""
        self._dirty[places] = True

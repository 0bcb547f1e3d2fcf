"""A readable twin of the native caches: which row of a table lies in which slot, decided in the same way.

native/include/hotrow/row_cache.h states the contract, bindings_cache.cpp the calls. Slots and counters are those of the
native module for the same calls in the same order; every read and write is over when a call returns, which is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.data.reference_reuse import fmix64
from hotrow.kernels.reference import uniform_rows, widen, write_rows
from hotrow.placement.reference import Records

COUNTERS = (
    "lookups pinned_lookups hit_lookups rows hit_rows read_rows created_rows evicted_rows written_rows overflow_rows"
)
BFLOAT16 = 2
"""The native module's number for weights in two halves."""


@dataclass
class _Place:
    """A slot of the tail."""

    row: int | None = None
    batch: int = 0
    """The last that pinned it."""
    pins: int = 0
    dirty: bool = False
    on_trial: bool = False


class _Frequencies:
    """How often rows were used lately; counters and halvings are stated in native/include/hotrow/frequency.h."""

    def __init__(self, num_places: int) -> None:
        self._words = [[0] * 16 for _ in range(max(1, (num_places + 1) // 2))]
        self._halving, self._counted = 8 * max(1, num_places), 0

    def _counters(self, row: int) -> tuple[list[int], list[int]]:
        """(the word's counters, which of them are the row's)."""
        h = int(fmix64(np.array([row], np.uint64))[0])
        return self._words[(h >> 32) * len(self._words) >> 32], [4 * g + (h >> 2 * g & 3) for g in range(4)]

    def estimate(self, row: int) -> int:
        word, own = self._counters(row)
        return min(word[at] for at in own)

    def count(self, row: int) -> None:
        word, own = self._counters(row)
        before = self.estimate(row)
        for at in own:
            word[at] += word[at] == before < 15
        self._counted += 1
        if self._counted == self._halving:
            self._counted = 0
            self._words = [[n // 2 for n in each] for each in self._words]


class _Hand:
    """clock and lfu: a hand goes round, and the first place that was not used since it last passed makes room.

    first: passes that a new row survives. most: passes that uses add up to.
    """

    def __init__(self, num_places: int, *, first: int, most: int) -> None:
        self._uses, self._first, self._most, self._at = [0] * num_places, first, most, 0

    def added(self, place: int) -> None:
        self._uses[place] = self._first

    def used(self, place: int) -> None:
        self._uses[place] = min(self._most, self._uses[place] + 1)

    def victim(self, places: Sequence[_Place]) -> int:
        """One that is not pinned nor on trial; there must be one. The hand is left there."""
        while True:
            if not places[self._at].pins and not places[self._at].on_trial:
                if self._uses[self._at] == 0:
                    return self._at
                self._uses[self._at] -= 1
            self._at = (self._at + 1) % len(self._uses)

    def left(self, place: int) -> None:
        """It was the victim."""
        self._at = (place + 1) % len(self._uses)


class _Ring:
    """lru, and places on trial: the one used longest ago makes room."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}  # first: used longest ago

    def __len__(self) -> int:
        return len(self._order)

    def added(self, place: int) -> None:
        self._order[place] = None

    def used(self, place: int) -> None:
        self.left(place)
        self.added(place)

    def victim(self, places: Sequence[_Place]) -> int:
        """One that is not pinned; there must be one."""
        return next(place for place in self._order if not places[place].pins)

    def left(self, place: int) -> None:
        """Its row goes."""
        del self._order[place]


def _make_policy(number: int, num_places: int) -> _Hand | _Ring:
    if number == 2:
        return _Ring()
    return _Hand(num_places, first=1, most=1) if number == 0 else _Hand(num_places, first=0, most=15)


class _InitialRows:
    """What rows are before they are first written; see InitialRow in row_cache.h."""

    def __init__(
        self,
        initial: tuple[int, float, int, int, int],
        states: Sequence[tuple[int, float, float, float]],
        arrays: Sequence[NDArray[Any]],
    ) -> None:
        self._key, self._bound, self._zero_rows, self._dim, storage = initial
        split = storage == BFLOAT16
        self._weight = torch.from_numpy(arrays[0]).view(torch.bfloat16) if split else torch.from_numpy(arrays[0])
        self._low = torch.from_numpy(arrays[1]) if split else None
        self._states = list(zip(states, arrays[2 if split else 1 :], strict=True))
        self._given = initial, states

    def into(self, arrays: Sequence[NDArray[Any]]) -> _InitialRows:
        """The same rows for other arrays of slots."""
        return _InitialRows(*self._given, arrays)

    def lay(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Into their slots, weights and states."""
        at = torch.tensor(slots, dtype=torch.int64)
        first = uniform_rows(self._key, torch.tensor(rows, dtype=torch.int64), self._dim, self._bound, self._zero_rows)
        write_rows(self._weight, self._low, at, first)
        w = widen(self._weight[at], None if self._low is None else self._low[at]).numpy()  # as it was stored
        for (dim, constant, of_weight, of_sign), array in self._states:
            values = np.full((len(rows), dim), constant, np.float32)
            if of_weight:
                values = np.float32(of_weight) * w
            if of_sign and dim == self._dim:  # without a needless + 0, which would make +0 of -0
                values = values + np.float32(of_sign) * np.sign(w)
            array[at.numpy()] = values.reshape(len(rows), *array.shape[1:])


class RowCache:
    """The slots of one table: [0, pinned) its first rows, then `cached` for the tail, then overflow."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        policy: int,
        admission: int,
        initial: _InitialRows,
        store: Any,
        records: Records,
    ) -> None:
        self._num_rows, self._pinned, self._cached = sizes
        self._policy = _make_policy(policy, self._cached)
        self._frequencies = _Frequencies(self._cached) if admission == 1 else None
        self._trial = _Ring()
        self._initial, self._store, self._records = initial, store, records
        self._place_of: dict[int, int] = {}
        self.written: set[int] = set()  # by a batch, ever: where no slot has the row, the store does
        self.changed: set[int] = set()  # of them, since clear_changed
        self._places = [_Place() for _ in range(self._cached)]
        self._free_overflow: list[int] = []
        self._num_used = 0
        self._in_use = [0, 0]  # cached places that batches pin: admitted, on trial
        self.counts = dict.fromkeys(COUNTERS.split(), 0)
        self._initial.lay(range(self._pinned), range(self._pinned))

    def admit(self, ids: list[int], slot_of: NDArray[np.int32], flight: Flight, pins: list[int]) -> bool:
        """Slots for ids, their rows pinned and in place; False where an id is out of range."""
        self.counts["lookups"] += len(ids)
        missing = []
        for i, row in enumerate(ids):
            if not 0 <= row < self._num_rows:
                return False
            place = self._place_of.get(row)
            if row < self._pinned:
                self.counts["pinned_lookups"] += 1
                slot_of[i] = row
            elif place is None:
                missing.append(i)
            else:
                self.counts["hit_lookups"] += 1
                self.counts["hit_rows"] += self._pin(place, flight, pins)
                slot_of[i] = self._pinned + place
        # Only now, when all that is resident is pinned: no row of these ids makes room for another.
        self._bring([ids[i] for i in missing], flight, pins)
        for i in missing:
            slot_of[i] = self._pinned + self._place_of[ids[i]]
        return True

    def holds(self, ids: list[int], slot_of: list[int]) -> bool:
        """Whether slot_of is still the answer to ids, whose rows are pinned."""
        held = (s if s < self._pinned else self._places[s - self._pinned].row for s in slot_of)
        return all(row == id for row, id in zip(held, ids, strict=True))

    def release(self, pins: list[int], *, dirty: bool) -> None:
        """The batch is over. dirty: its rows were written to."""
        leaving: dict[int, int] = {}
        for place in pins:
            entry = self._places[place]
            entry.dirty = entry.dirty or dirty
            if dirty and entry.row is not None:
                self._mark([entry.row])
            entry.pins -= 1
            if entry.pins:
                continue
            if place < self._cached:
                self._in_use[entry.on_trial] -= 1
            else:
                self._evict(place, leaving)
                self._free_overflow.append(place)
        pins.clear()
        self._write(leaving)

    def grow(self, num_rows: int, arrays: Sequence[NDArray[Any]]) -> None:
        """More rows, and arrays that are as long, into which what lies in the old ones is moved, slot by slot."""
        old, self._records, self._initial = self._records, Records(arrays), self._initial.into(arrays)
        overflow = range(self._pinned + self._cached, self._pinned + len(self._places))
        for slot in (*range(self._pinned + self._num_used), *overflow):
            self._records.put(slot, old.get(slot))
        first, self._num_rows = self._num_rows, num_rows
        if self._pinned == first:  # whole, and stays so
            self._pinned = num_rows
            self._initial.lay(range(first, num_rows), range(first, num_rows))

    def mark_pinned(self, slots: list[int]) -> None:
        """The pinned rows among those of `slots` were written to."""
        self._mark([slot for slot in slots if slot < self._pinned])

    def _mark(self, rows: list[int]) -> None:
        self.written.update(rows)
        self.changed.update(rows)

    def write_back(self) -> None:
        """Gives the store every row that differs from it, the pinned ones included, unless all are."""
        if self._pinned == self._num_rows:
            return  # no row ever leaves, and the store is never asked
        moves = {row: row for row in range(self._pinned)}
        for place, entry in enumerate(self._places):
            if entry.row is not None and entry.dirty:
                moves[entry.row] = self._pinned + place
                entry.dirty = False
        self.counts["written_rows"] += len(moves)
        self._write(moves)

    def _bring(self, rows: list[int], flight: Flight, pins: list[int]) -> None:
        evicted: dict[int, int] = {}
        arriving: dict[int, int] = {}
        fresh: dict[int, int] = {}
        for row in rows:
            if row not in self._place_of:
                place = self._place_for(row, evicted, keep=flight.keep)
                self._pin(place, flight, pins)
                (arriving if row in self.written else fresh)[row] = self._pinned + place
        # In this order: what leaves a slot is copied before anything is laid into it.
        self._write(evicted)
        self._initial.lay(list(fresh), list(fresh.values()))
        if arriving:
            flight.good &= self._store.read(*_moves(arriving), self._records).wait()
        self.counts["created_rows"] += len(fresh)
        self.counts["read_rows"] += len(arriving)

    def _place_for(self, row: int, evicted: dict[int, int], *, keep: bool) -> int:
        if keep and self._frequencies:
            self._frequencies.count(row)
        # Where overflow is full, a cached place is empty: there are as many slots as rows.
        place, admitted = self._room_for(row) if keep or self._overflow_is_full() else (None, True)
        if place is None:
            place = self._overflow_place()
            self.counts["overflow_rows"] += keep
        else:
            self.counts["evicted_rows"] += self._places[place].row is not None
            self._evict(place, evicted)
            self._places[place].on_trial = not admitted
            self._order_of(place).added(place)
        self._places[place].row = row
        self._place_of[row] = place
        return place

    def _room_for(self, row: int) -> tuple[int | None, bool]:
        """(a cached place that holds nothing or whose row goes, None when all are in use; whether row is admitted)."""
        if self._num_used < self._cached:
            self._num_used += 1
            return self._num_used - 1, True
        in_use, on_trial = self._in_use
        if in_use + on_trial >= self._cached:
            return None, True
        place = self._policy.victim(self._places) if in_use < self._cached - len(self._trial) else None
        admitted = True
        if place is not None and self._frequencies:
            leaving = self._places[place].row
            assert leaving is not None
            admitted = self._frequencies.estimate(row) > self._frequencies.estimate(leaving)
        if on_trial < len(self._trial):
            place = self._trial.victim(self._places)
        assert place is not None
        self._order_of(place).left(place)
        return place, admitted

    def _order_of(self, place: int) -> _Hand | _Ring:
        return self._trial if self._places[place].on_trial else self._policy

    def _overflow_is_full(self) -> bool:
        return not self._free_overflow and self._pinned + len(self._places) >= self._num_rows

    def _overflow_place(self) -> int:
        if self._free_overflow:
            return self._free_overflow.pop()
        self._places.append(_Place())
        return len(self._places) - 1

    def _pin(self, place: int, flight: Flight, pins: list[int]) -> bool:
        """Once per batch; whether it was the first time."""
        entry = self._places[place]
        if entry.batch == flight.number:
            return False
        if flight.keep and entry.batch:
            self._used(place)
        entry.batch = flight.number
        if entry.pins == 0 and place < self._cached:
            self._in_use[entry.on_trial] += 1
        entry.pins += 1
        pins.append(place)
        self.counts["rows"] += 1
        return True

    def _used(self, place: int) -> None:
        row = self._places[place].row
        if self._frequencies and row is not None:
            self._frequencies.count(row)
        if place < self._cached:
            self._order_of(place).used(place)

    def _evict(self, place: int, moves: dict[int, int]) -> None:
        entry = self._places[place]
        if entry.row is None:
            return
        if entry.dirty:
            moves[entry.row] = self._pinned + place
            self.counts["written_rows"] += 1
        del self._place_of[entry.row]
        self._places[place] = _Place()

    def _write(self, moves: dict[int, int]) -> None:
        if moves:
            self._store.write(*_moves(moves), self._records)


def _moves(slots: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array(list(slots), np.int64), np.array(list(slots.values()), np.int64)


class Flight:
    """A batch whose rows are pinned until it is released."""

    def __init__(self, caches: Caches, number: int, *, keep: bool) -> None:
        self._caches, self.number, self.keep = caches, number, keep
        self.pins: list[list[int]] = [[] for _ in caches.tables]
        self.spans: Sequence[tuple[int, int, int]] = ()
        self.slots = np.zeros(0, np.int32)
        self.good = True

    def wait(self) -> bool:
        """False when a store failed; the rows have come."""
        return self.good

    def release(self, dirty: bool, num_threads: int = 1) -> None:  # noqa: FBT001
        """The batch is over; later calls do nothing."""
        for cache, pins in zip(self._caches.tables, self.pins, strict=True):
            cache.release(pins, dirty=dirty)
        for table, first, last in self.spans if dirty else ():
            self._caches.tables[table].mark_pinned(self.slots[first:last].tolist())
        self.spans = ()

    def __del__(self) -> None:
        self.release(False)  # noqa: FBT003


class Caches:
    """The caches of a collection's tables."""

    def __init__(self) -> None:
        self.tables: list[RowCache] = []
        self._stores: list[Any] = []
        self.last_batch = 1
        """Its number; the native module's begin again after 2^32 - 1."""

    def add(
        self,
        sizes: tuple[int, int, int],
        policy: int,
        admission: int,
        initial: tuple[int, float, int, int, int],
        states: Sequence[tuple[int, float, float, float]],
        store: Any,
        arrays: Sequence[NDArray[Any]],
    ) -> None:
        """A table: (rows, pinned, cached), what rows are at first, its store, an array of slots for each part."""
        num_rows, pinned, cached = sizes
        if min(pinned, cached) < 0 or pinned + cached > num_rows or num_rows >= 2**31 - 1:
            raise ValueError("pinned + cached slots must be within the table's rows, and these below 2^31")
        self._stores.append(store)
        first = _InitialRows(initial, states, arrays)
        self.tables.append(RowCache(sizes, policy, admission, first, store, Records(arrays)))

    def grow(self, table: int, num_rows: int, arrays: Sequence[NDArray[Any]]) -> None:
        """A table has more rows, and arrays that are as long."""
        self.tables[table].grow(num_rows, arrays)

    def admit(
        self,
        ids: NDArray[Any],
        spans: Sequence[tuple[int, int, int]],
        keep: bool,  # noqa: FBT001
        num_threads: int,
    ) -> tuple[Flight | None, NDArray[np.int32]]:
        """(flight, slots); no flight where an id is out of range. `num_threads` is the native module's."""
        tables = [table for table, _, _ in spans]
        if tables != sorted(tables):
            raise ValueError("spans must be in the order of their tables")
        self.last_batch += 1
        flight = Flight(self, self.last_batch, keep=keep)
        flight.spans = list(spans)
        slots = flight.slots = np.zeros(len(ids), np.int32)
        good = [
            self.tables[t].admit(ids[first:last].tolist(), slots[first:last], flight, flight.pins[t])
            for t, first, last in spans
        ]
        if not all(good):
            flight.release(False)  # noqa: FBT003
        return flight if all(good) else None, slots

    def holds(self, ids: NDArray[Any], slots: NDArray[np.int32], flight: Flight) -> bool:
        """Whether `slots` are still the answer to `ids`."""
        return all(self.tables[t].holds(ids[a:b].tolist(), slots[a:b].tolist()) for t, a, b in flight.spans)

    def num_changed(self, table: int, ever: bool) -> int:  # noqa: FBT001
        """How many rows were written to since `clear_changed`, or ever."""
        return len(self._changed(table, ever=ever))

    def changed_rows(self, table: int, ever: bool, first: int, most: int) -> NDArray[np.int64]:  # noqa: FBT001
        """The first `most` of them from `first` on, rising."""
        return np.array(sorted(row for row in self._changed(table, ever=ever) if row >= first)[:most], np.int64)

    def _changed(self, table: int, *, ever: bool) -> set[int]:
        return self.tables[table].written if ever else self.tables[table].changed

    def clear_changed(self) -> None:
        """From now on."""
        for table in self.tables:
            table.changed.clear()

    def write_back(self) -> bool:
        """Everything on the medium; False when a store failed."""
        for table in self.tables:
            table.write_back()
        flushed = [store.flush() for store in self._stores]  # also after one that failed
        return all(flushed)

    def failure(self) -> str:
        """Of the first store that failed; empty while all is well."""
        return next((store.failure() for store in self._stores if store.failure()), "")

    def counters(self, table: int) -> dict[str, int]:
        """CacheCounters of a table; its bytes, which are the native module's, are 0."""
        return {**self.tables[table].counts, "num_bytes": 0, "map_bytes": 0}

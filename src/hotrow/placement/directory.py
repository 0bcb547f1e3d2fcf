"""Which rows of a table lie in which of its slots on a device, and which make room: numbers alone, nothing is moved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.placement.budget import TableSlots


class Moves(NamedTuple):
    """What admitting rows of a table asks for: int64 arrays."""

    coming: NDArray[np.int64]
    coming_slots: NDArray[np.int64]
    leaving: NDArray[np.int64]
    """Rows that were updated since they came, and make room."""
    leaving_slots: NDArray[np.int64]


class Directory:
    """Which rows of a table lie in which of its slots: [0, pinned) its first rows, always; then as the clock has it.

    The hand of the clock goes round the slots; a row that is in no batch and was not used since the hand last passed
    makes room.
    """

    def __init__(self, num_rows: int, slots: TableSlots) -> None:
        num_slots = slots.pinned + slots.cached
        self.slot_of: NDArray[np.int32] = np.full(num_rows, -1, np.int32)
        self.row_of: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self.pins: NDArray[np.int32] = np.zeros(num_slots, np.int32)
        self.used = np.zeros(num_slots, np.bool_)
        self.dirty = np.zeros(num_slots, np.bool_)
        self.counts = dict.fromkeys(("rows", "hit_rows", "read_rows", "evicted_rows", "written_rows"), 0)
        self.num_free = slots.cached
        """Slots that hold no row of a batch."""
        self._hand = 0
        first = np.arange(slots.pinned)
        self.slot_of[first], self.row_of[first], self.pins[first] = first, first, 1

    def num_short(self, rows: NDArray[np.int64]) -> int:
        """Slots that are missing for `rows`, different ones, to lie here together; 0 where they can."""
        slots = self.slot_of[rows]
        hits = slots[slots >= 0]
        return max(0, len(rows) - len(hits) + int(np.count_nonzero(self.pins[hits] == 0)) - self.num_free)

    def absent(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of `rows` that lie in no slot."""
        return rows[self.slot_of[rows] < 0]

    def admit(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Moves]:
        """A slot for each of `rows`, pinned; there must be room."""
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
        """`count` slots that were in no batch, pinned now; there must be so many."""
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
        """A batch whose rows lie in `slots` is over."""
        self.pins[slots] -= 1
        self.num_free += int(np.count_nonzero(self.pins[slots] == 0))
        if updated:
            self.dirty[slots] = True

    def holds(self, ids: NDArray[np.int64], slots: NDArray[np.int32]) -> bool:
        """Whether `slots` are still those of `ids`, which may be any numbers."""
        inside = bool(((ids >= 0) & (ids < len(self.slot_of))).all())
        return inside and bool((self.slot_of[ids] == slots).all())

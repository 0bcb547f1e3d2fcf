"""What lies below the slots of a device: every row of the tables, in DRAM or in tiers, held while they are moved.

    rows --hold--> places in arrays of host memory --wait--> they are there: read or written --release--> they may leave

In DRAM a row's place is its number and nobody waits. In tiers it is a slot, into which the row may be on its way from
disk; what is written there leaves by the tiers' own path. Next: device_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.placement.tiers import PIECE_BYTES, Flight, State, Tiers


class Held(Protocol):
    """Rows of each table that keep their places until they are released."""

    places: list[Tensor]
    """Of each table, int64 [n]: where in `Below.arrays` they lie."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> None:
        """Sleep until every row is there. Raises StoreError where one could not be read."""

    def release(self, *, updated: bool) -> None:
        """They may leave; updated: they were written to. Later calls do nothing."""


class Below(Protocol):
    """Every row of some tables."""

    arrays: list[list[Tensor]]
    """Of each table, what makes up a row: weights, lower halves of split ones, and states once they are attached."""
    piece_bytes: int | None
    """Of rows that are held without being kept, at most so many at once; None: any number."""

    @property
    def stall_s(self) -> float:
        """Seconds that rows which are kept waited for room to write those that made way for them."""

    def attach(self, states: dict[str, Sequence[State]]) -> None:
        """An optimizer's states, by table, lie beside the weights."""

    def hold(self, rows: Sequence[NDArray[np.int64]], *, keep: bool) -> Held:
        """Different rows of each table, on their way to their places. keep: they are worth memory for longer."""

    def raise_failure(self) -> None:
        """Raise StoreError where a store has failed, whichever rows it was to move."""


class _HeldInDram:
    ready = True

    def __init__(self, rows: Sequence[NDArray[np.int64]]) -> None:
        self.places = [torch.from_numpy(own) for own in rows]

    def wait(self) -> None:
        """They have always been there."""

    def release(self, *, updated: bool) -> None:
        """They stay."""


class InDram:
    """All rows in arrays in DRAM, as `arrays` has them at first: of each table its weights, and lower halves."""

    piece_bytes: int | None = None
    stall_s = 0.0

    def __init__(self, arrays: dict[str, list[Tensor]]) -> None:
        self._names, self.arrays = list(arrays), list(arrays.values())

    def attach(self, states: dict[str, Sequence[State]]) -> None:
        """See Below."""
        for name, arrays in zip(self._names, self.arrays, strict=True):
            arrays += [state.array for state in states[name]]

    def hold(self, rows: Sequence[NDArray[np.int64]], *, keep: bool) -> Held:
        """See Below."""
        return _HeldInDram(rows)

    def raise_failure(self) -> None:
        """Nothing that could fail."""


class _HeldInTiers:
    ready = False

    def __init__(self, flight: Flight, rows: Sequence[NDArray[np.int64]]) -> None:
        self._flight = flight
        self.places = list(torch.split(flight.slots.long(), [len(own) for own in rows]))

    def wait(self) -> None:
        self._flight.wait()

    def release(self, *, updated: bool) -> None:
        self._flight.release(updated=updated)


class InTiers:
    """Rows in tiers: some in DRAM, the rest in files. What is kept lies in the caches in DRAM, as a batch's rows do."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.piece_bytes: int | None = min(PIECE_BYTES, tiers.memory.waiting_bytes)
        self._take_arrays()

    def _take_arrays(self) -> None:
        self.arrays = [[array for _, array in self._tiers.arrays_of(table)] for table in self._tiers.tables]

    @property
    def stall_s(self) -> float:
        """See Below."""
        return self._tiers.stall_s

    def attach(self, states: dict[str, Sequence[State]]) -> None:
        """See Below. Raises ValueError where the records are laid out already."""
        self._tiers.attach(states)
        self._take_arrays()

    def hold(self, rows: Sequence[NDArray[np.int64]], *, keep: bool) -> Held:
        """See Below. Raises StoreError where a store has failed."""
        if not any(map(len, rows)):
            return _HeldInDram(rows)
        return _HeldInTiers(self._tiers.hold(dict(enumerate(rows)), keep=keep), rows)

    def raise_failure(self) -> None:
        """See Below."""
        if self._tiers.caches is not None:
            self._tiers.raise_failure(only_if_failed=True)

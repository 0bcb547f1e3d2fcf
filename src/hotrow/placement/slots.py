"""What placements that bring rows into slots share: announced batches, rows that are held, errors for bad ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels.reference import Layout, first_bad_id
from hotrow.placement.base import Lease
from hotrow.tables import TableConfig

Span = tuple[int, int, int]
"""A table, and from where to where a batch's ids look it up."""


class Flight(Lease, Protocol):
    """A lease whose rows may still be on their way."""

    def wait(self) -> None:
        """Sleeps until every row is there. Raises StoreError if one could not be read."""


L = TypeVar("L", bound=Lease)


class Announced(Generic[L]):
    """Batches that were announced and are yet to come, and how well those that came were foreseen."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[KeyedJaggedTensor, L]] = {}
        self.altered = self.unannounced = self.foreseen = 0
        """Training batches that were changed after they were announced, never announced, and as announced."""

    def counts(self) -> dict[str, int]:
        """Returns the counts by name."""
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


class Held:
    """Rows of each table that keep their places until they are released, for a placement in front of this one."""

    def __init__(self, flight: Flight, places: list[Tensor], *, ready: bool = False) -> None:
        self._flight = flight
        self.places = places
        """By table, int64 [n]: where in the arrays of `Backing.parts` they lie."""
        self.ready = ready
        """Whether `wait` returns at once."""

    def wait(self) -> None:
        """Sleeps until every row is there. Raises StoreError if one could not be read."""
        self._flight.wait()

    def release(self, *, updated: bool) -> None:
        """Lets the rows leave; updated: they were written to. Later calls do nothing."""
        self._flight.release(updated=updated)


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

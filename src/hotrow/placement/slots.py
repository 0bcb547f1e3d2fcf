"""What placements that bring rows into slots are made of: announced batches, held rows, and a directory of slots.

Numbers and bookkeeping alone: nothing here moves a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
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

    def forget_last(self, which: Callable[[L], bool]) -> bool:
        """Ends the lease of the batch among `which` that was announced last; False if there is none."""
        last = next((own for own in reversed(self._leases.values()) if which(own[1])), None)
        if last is not None:
            self.forget(last[0])
        return last is not None

    def get(self, sparse: KeyedJaggedTensor) -> L | None:
        """Returns the lease of a batch, which stays announced."""
        return self._leases.get(id(sparse.values), (None, None))[1]

    def take(self, sparse: KeyedJaggedTensor, *, unchanged: Callable[[L], bool | None], training: bool) -> L | None:
        """Returns the lease of a batch that has come; None if it was not announced, or is not what was announced.
        unchanged: whether it is what was announced; None for a lease without places, which counts as not announced."""
        _, lease = self._leases.pop(id(sparse.values), (None, None))
        same = None if lease is None else unchanged(lease)
        if training:
            self.unannounced += same is None
            self.altered += same is False
            self.foreseen += same is True
        if lease is not None and same is False:
            lease.release(updated=False)
        return lease if same else None


@dataclass
class Held:
    """Rows of each table that keep their places until they are released, for a placement in front of this one."""

    flight: AwaitedLease
    places: Sequence[Tensor]
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
    ends, at = sparse.key_ends(), {key: f for f, key in enumerate(sparse.keys)}
    served = [(feature.table, at[feature.name]) for feature in layout.features if feature.name in at]
    return [(table, ends[f], ends[f + 1]) for table, f in served]


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


COUNTS = ("rows", "hit_rows", "read_rows", "evicted_rows", "written_rows")


class RowSlots(NamedTuple):
    """Rows by table, int64 [n] each, and their slots among those of the table."""

    rows: Sequence[Tensor]
    slots: Sequence[Tensor]

    @classmethod
    def of(cls, found: tuple[NDArray[Any], NDArray[Any], list[int]]) -> RowSlots:
        """Takes them as slot_directory.h gives them: those of all tables, and how many each table has."""
        rows, slots, counts = found
        return cls(*(torch.split(torch.from_numpy(own), counts) for own in (rows, slots)))


def directory_of(num_rows: Sequence[int], slots: Sequence[TableSlots]) -> Any:
    """Makes the directory that decides which rows of the tables lie in which of their slots (slot_directory.h). Raises
    ValueError if there is no native module, and if there are more slots than rows."""
    native = ops.native_module("tables on a device need")
    return native.make_slot_directory([(n, *own) for n, own in zip(num_rows, slots, strict=True)])

"""Copies of some rows of every table, with their optimizer states: while they are live, lookups and updates use them.

    load   tables --gather, copy--> copies        once a table and array; from now on the tables are out of date
    save   copies --copy, scatter--> tables

Only rows cross that have changed since both sides were last the same; if that is about MAX_LISTED of a table's, or if
the table can change unseen, all of its rows cross. Rows of a prefix keep their numbers as slots; listed rows follow
them. Every copy is exact, so that a run with copies has the bits of one without (law 2). The copies lie on a device,
whose lookups and updates are those of kernels/triton_ops.py. Which rows are copied, and when, is for hot/ to say.

A load or save may begin beside further steps, in a thread and on a stream of its own. A row that changes afterwards is
noted anew and crosses again, whatever was read of it meanwhile, so nobody has to know which rows steps will change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.kernels import ops
from hotrow.kernels.on_device import triton_ops
from hotrow.kernels.types import Layout, Rule
from hotrow.placement.base import NO_LEASE, Attached, Lease, Placement, RowIds, Rows, Use
from hotrow.placement.budget import free_bytes
from hotrow.placement.dram import RowsInMemory
from hotrow.placement.slots import SOME_FROZEN, spans_of

PIECE_BYTES = 4 << 20
"""The most bytes of rows on their way to a device at once, so that pinned memory stays small, and a piece stays in the
processor's cache between its two copies."""
MAX_LISTED = 0.25
"""The largest share of a table's hot rows that cross one by one. In DRAM a row that is gathered takes about three times
as long as one of a range, and one that is scattered longer (two threads of an AMD EPYC beside other work)."""

Numbers = NDArray[np.int64]


class CopiedRows(Protocol):
    """The rows of one table that have copies: rows [0, prefix), and those of `listed`, rising, none below prefix."""

    @property
    def prefix(self) -> int: ...
    @property
    def listed(self) -> NDArray[np.int64]: ...


class Newer:
    """By slot, the rows of a table that changed on one side alone; slot `num_slots` is of rows without a copy."""

    def __init__(self, num_slots: int) -> None:
        self._changed = np.zeros(num_slots + 1, bool)
        self.is_all = False
        """Whether all rows are to cross, because many have changed: then nothing more is noted."""
        self._room = self._most = MAX_LISTED * num_slots

    def note(self, slots: Numbers) -> None:
        """Notes that the rows in these slots change."""
        self._changed[slots] = True
        self._room -= len(slots)
        if self._room < 0:  # if each of them was another one; counting takes longer
            self._room = self._most - int(np.count_nonzero(self._changed[:-1]))
            self.is_all = self._room < len(slots)

    @property
    def slots(self) -> Numbers:
        return np.flatnonzero(self._changed[:-1])

    def clear(self) -> None:
        self._changed[:] = self.is_all = False
        self._room = self._most

    def __bool__(self) -> bool:
        return self.is_all or bool(self._changed.any())


class Copies(Placement):
    """Copies of `rows`, by table, of the placement `below`, in front of it; `attached`: its optimizer's states.

    device: where the copies lie, so that batches are looked up and updated there.
    Raises torch's OutOfMemoryError if the copies find no memory, ImportError if Triton is not installed, ValueError if
    `below` has slots on a device already and for a device that the kernels do not run on.
    """

    def __init__(
        self, below: Placement, attached: Attached, rows: Sequence[CopiedRows], *, device: torch.device
    ) -> None:
        below.check("hot_copies")
        self.below: Placement = below
        self.tables, self.weights, self.low = below.tables, below.weights, below.low
        self._attached, self._rows = attached, rows
        self._table_of = {name: t for t, table in enumerate(below.tables) for name in table.feature_names}
        self._fast = OnDevice(below, device)
        self.device, self.kernels = self._fast.device, self._fast.kernels
        nums = [own.prefix + len(own.listed) for own in rows]
        room = self._fast.room
        weights = [room(n, below.weights[t.name]) for t, n in zip(self.tables, nums, strict=True)]
        split = [(below.low.get(t.name), n) for t, n in zip(self.tables, nums, strict=True)]
        low = [None if half is None else room(n, half) for half, n in split]
        states = [
            [room(n, state.array) for state in own] for own, n in zip(attached.states.values(), nums, strict=True)
        ]
        self.arrays = self._fast.arrays(weights, low)
        state_arrays = [self._fast.arrays(arrays) for arrays in zip(*states, strict=True)]
        self._attached_copies = Attached(attached.states, state_arrays)
        stored = [RowsInMemory(weight, half) for weight, half in zip(weights, low, strict=True)]
        self._copies = [[own, *map(RowsInMemory, arrays)] for own, arrays in zip(stored, states, strict=True)]
        """By table, the copies of its weights and of each state."""
        self._newer_below, self._newer_here = [Newer(n) for n in nums], [Newer(n) for n in nums]
        self.note_all()
        self._versions = self._versions_below()
        self._sees_below = all(isinstance(below.rows(table.name), RowsInMemory) for table in self.tables)
        """Whether changes below are noticed: rows in tensors have their numbers for slots, and torch counts writes."""
        self.moved_bytes = 0
        """Bytes of rows that have crossed, either way."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotrow-swap")
        self._begun: Future[None] | None = None

    def check(self, use: Use) -> None:
        if use == "freeze_some":
            raise ValueError(SOME_FROZEN)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "the tables' hot rows are out of date, their copies on the fast device are live: read and change "
            "tables inside `with copies.flushed()`, or after copies.give_back()"
        )

    attach = rows = flush = _refuse

    # ---- batches

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[Lease, KeyedJaggedTensor]:
        """See Placement. Raises ValueError if a row has no copy: its only place is in the tables."""
        values = sparse.values
        for name in (key for key in sparse.keys if key in self._table_of):
            span, own = sparse.span(name), self._rows[self._table_of[name]]
            beyond = sparse.values[span] >= own.prefix
            if bool(beyond.any()):
                values = values.clone() if values is sparse.values else values
                _move(name, own, beyond, values[span])
        return NO_LEASE, sparse.with_values(values)

    def update(self, lookups: ops.Lookups, attached: Attached, rules: Sequence[Rule]) -> None:
        """See Placement. The tables are out of date until the copies are saved."""
        for kernels, slots, _ in lookups:
            for t, start, stop in spans_of(kernels.layout, slots):
                if not self._newer_here[t].is_all:
                    most = self._rows[t].prefix + len(self._rows[t].listed)
                    self._newer_here[t].note(np.clip(slots.values[start:stop].numpy(), 0, most))
        super().update(lookups, self._attached_copies, rules)

    # ---- to and fro

    @property
    def changed(self) -> bool:
        """Whether steps have changed the copies since they were loaded or saved, or a `begin` is not yet settled."""
        return self._begun is not None or any(self._newer_here)

    def note(self, lookups: Iterable[tuple[Any, ...]]) -> None:
        """Notes that a step is about to change the rows of these lookups below; each begins as in `ops.Lookups`."""
        for kernels, sparse, *_ in lookups if self._sees_below else ():
            for t, start, stop in spans_of(kernels.layout, sparse):
                if not self._newer_below[t].is_all:
                    self._newer_below[t].note(_slots(self._rows[t], sparse.values[start:stop].numpy()))

    def note_all(self) -> None:
        """Notes that any row may change below."""
        for newer in self._newer_below:
            newer.is_all = True

    def load(self) -> None:
        self._carry(to_copies=True)

    def save(self) -> None:
        self._carry(to_copies=False)

    def begin(self, *, to_copies: bool) -> None:
        """Begins the next `load` (to_copies) or `save`; not with tables in tiers, nor while one is under way."""
        if self._sees_below and (self._begun is None or self._begun.done()):
            self._carry(to_copies=to_copies, stream=self._fast.beside())

    def _carry(self, *, to_copies: bool, stream: AbstractContextManager[None] | None = None) -> None:
        """Copies what has changed, or begins to, in a thread, on `stream`."""
        self._settle()
        if not self._sees_below or self._versions != self._versions_below():
            self.note_all()  # what no step has changed there
        newer = self._newer_below if to_copies else self._newer_here
        move = partial(self._move, list(self._moves(newer, beside=stream is not None)), to_copies=to_copies)
        self._begun = move(nullcontext()) if stream is None else self._thread.submit(move, stream)
        for own in newer:
            own.clear()
        self._versions = self._versions_below()

    def _settle(self) -> None:
        """Waits for what was begun. Raises what stopped it; then all rows cross again."""
        if self._begun is not None and (error := self._begun.exception()) is not None:
            self._begun = None
            for newer in (*self._newer_below, *self._newer_here):
                newer.is_all = True
            raise error
        self._begun = None

    @torch.no_grad()
    def _move(self, moves: Sequence[Move], stream: AbstractContextManager[None], *, to_copies: bool) -> None:
        with stream:
            for table, copies, rows, slots in moves:
                there = slots if isinstance(slots, slice) else self._fast.over(slots)
                if to_copies:
                    copies.write(there, self._fast.over(values := table.read(rows)))
                else:
                    table.write(rows, values := self._fast.back(copies.read(there)))
                self.moved_bytes += values.nbytes
            self._fast.wait()

    def wait(self) -> None:
        """Sleeps until all work that was started where the copies lie is done."""
        self._fast.wait()

    def _versions_below(self) -> list[int]:
        """Returns how often torch has changed each array of the tables; hotrow's own kernels do not count."""
        states = [state.array for own in self._attached.states.values() for state in own]
        return [array._version for array in (*self.weights.values(), *self.low.values(), *states)]

    def _moves(self, newer: Sequence[Newer], *, beside: bool = False) -> Iterator[Move]:
        """Yields an array of a table, the array of its copies, and the `newer` rows and their slots in pieces."""
        for config, copied, own, changed in zip(self.tables, self._copies, self._rows, newer, strict=True):
            for state, copies in zip((None, *self._attached.states[config.name]), copied, strict=True):
                table = self.below.rows(config.name, state)
                step = max(1, min(table.piece_rows, PIECE_BYTES // (4 * config.embedding_dim)))
                pieces = [*(_ranges(own, step) if changed.is_all else _places(own, changed.slots, step))]
                pairs: list[tuple[Any, RowsInMemory]] = [(table, copies)]
                if beside and isinstance(table, RowsInMemory):
                    both = ((table.array, copies.array), (table.low, copies.low))
                    bits = table.dtype if table.low is None else torch.int16  # numpy has no bfloat16
                    pairs = [(RowsOfOne(a.view(bits)), RowsInMemory(b.view(bits))) for a, b in both if a is not None]  # type: ignore[union-attr]
                yield from ((*pair, rows, slots) for pair in pairs for rows, slots in pieces)


class RowsOfOne:
    """The rows of a tensor in DRAM, read and written by the calling thread alone: beside a step, torch would start as
    many threads again as the step has."""

    def __init__(self, array: Tensor) -> None:
        self._array = array.numpy()

    def read(self, rows: RowIds, /) -> Tensor:
        return torch.from_numpy(self._array[rows] if isinstance(rows, slice) else self._array.take(rows.numpy(), 0))

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        self._array[rows if isinstance(rows, slice) else rows.numpy()] = values.numpy()


Move = tuple[Rows | RowsOfOne, RowsInMemory, RowIds, RowIds]


def _ranges(own: CopiedRows, step: int) -> Iterator[tuple[RowIds, slice]]:
    """Yields all rows of a table that have copies, and their slots, `step` at a time."""
    for start in range(0, own.prefix, step):
        span = slice(start, min(start + step, own.prefix))
        yield span, span
    for start in range(0, len(own.listed), step):
        rows = torch.from_numpy(own.listed[start : start + step])
        yield rows, slice(own.prefix + start, own.prefix + start + len(rows))


def _places(own: CopiedRows, slots: Numbers, step: int) -> Iterator[tuple[RowIds, RowIds]]:
    """Yields the rows in these slots, rising, and the slots, `step` at a time."""
    rows = slots.copy()
    rows[slots >= own.prefix] = own.listed[slots[slots >= own.prefix] - own.prefix]
    for start in range(0, len(slots), step):
        yield torch.from_numpy(rows[start : start + step]), torch.from_numpy(slots[start : start + step])


def _slots(own: CopiedRows, ids: NDArray[Any]) -> Numbers:
    """Returns the slot of each id, and of one that has no copy the number of slots."""
    num_slots = own.prefix + len(own.listed)
    if not len(own.listed):
        slots: Numbers = np.clip(ids, 0, num_slots)
        return slots
    places = np.searchsorted(own.listed, ids)
    found = own.listed[np.minimum(places, len(own.listed) - 1)] == ids
    return np.where(ids < own.prefix, np.maximum(ids, 0), np.where(found, own.prefix + places, num_slots))


def _move(feature: str, own: CopiedRows, beyond: Tensor, ids: Tensor) -> None:
    """Puts slots for those ids of a feature that lie beyond the prefix, in place."""
    found = ids[beyond].numpy()
    slots = _slots(own, found)
    cold = found[slots == own.prefix + len(own.listed)]
    if len(cold):
        raise ValueError(
            f"feature {feature!r} looks up row {cold[0]}, which is not hot, while hot rows live on the fast "
            "device: call give_back() before batches that are not all hot"
        )
    ids[beyond] = torch.from_numpy(slots).to(ids.dtype)


class OnDevice:
    """A device's memory with the kernels of triton_ops.py, for copies. The device may be the CPU only if Triton's
    interpreter runs. Raises ImportError if Triton is not installed."""

    def __init__(self, below: Placement, device: torch.device) -> None:
        triton = triton_ops("copies of hot rows on a device")
        from hotrow.kernels.triton_moves import Buffers, Streams

        self.device = device
        self.arrays: Any = triton.Arrays
        self._streams, self._buffers = Streams(device), Buffers(device)
        self.kernels = ops.KernelSet(Layout.of(below.tables), triton.Kernels)

    def room(self, num_rows: int, like: Tensor) -> Tensor:
        """Returns memory for `num_rows` rows of an array. Raises torch's OutOfMemoryError if there is none."""
        return torch.empty(num_rows, *like.shape[1:], dtype=like.dtype, device=self.device)

    def over(self, values: Tensor) -> Tensor:
        """Returns `values`, which lie in DRAM, where copies lie."""
        # Through pinned memory, so that the host goes on meanwhile; by numpy, which copies on the calling thread alone.
        staged = self._buffers.take(values.nbytes)
        np.copyto(staged.view(values.dtype).view(values.shape).numpy(), values.numpy())
        found = staged.to(self.device, non_blocking=True, copy=True)
        self._buffers.give_back(staged, self._streams.moment())
        return found.view(values.dtype).view(values.shape)

    def back(self, values: Tensor) -> Tensor:
        """Returns `values`, which lie where copies do, in DRAM; they hold until the next call."""
        staged = self._buffers.take(values.nbytes)
        found = staged.view(values.dtype).view(values.shape)
        found.copy_(values, non_blocking=True)
        arrived = self._streams.moment()
        arrived.wait()
        self._buffers.give_back(staged, arrived)
        return found

    def beside(self) -> AbstractContextManager[None]:
        """Returns a context, for another thread, of a stream of its own, which begins after what was asked for."""
        return self._streams.copying(after=self._streams.moment())

    def wait(self) -> None:
        """Sleeps until everything that was asked for is done."""
        self._streams.moment().wait()


def room_bytes(device: torch.device) -> int:
    """Returns how much of a device's memory copies may take."""
    # What torch keeps of arrays that are gone is free for others.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return free_bytes(str(device)) + kept

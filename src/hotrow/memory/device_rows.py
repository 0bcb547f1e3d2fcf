"""Tables in host memory with slots in device memory before them: rows come to the device before their batch does.

    ids of a batch --admit--> slots, pinned; rows on their way --take--> lookup, update --release--> rows may leave

All rows of a table lie in its arrays in DRAM. Device memory has slots for some: the first rows of a table for good, and
whichever of the others are in use. Updates happen in slots; a row that was updated is copied back when its slot is
needed, and by `flush`. Kernels are given slots instead of ids: no result depends on what is decided here. Next: gpu/.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.files import parse_bytes
from hotrow.memory.budget import SMALL_TABLES_SHARE, TableDemand, TableSlots
from hotrow.memory.tiers import State
from hotrow.reference import Layout, first_bad_id
from hotrow.tables import TableConfig

if TYPE_CHECKING:
    from hotrow.gpu.moves import Moment, Mover

MOVING_SHARE = 8
"""This part of the budget is for rows on their way, half in each direction; larger moves go in pieces."""

Span = tuple[int, int, int]
"""A table, and from where to where a batch's ids look it up."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Tables in DRAM, and in front of them slots in the memory of a device, where lookups and updates run.

        emb = hotrow.EmbeddingCollection(tables, memory=hotrow.DeviceMemory(hbm="8GiB"))

    hbm: bytes of device memory for slots (weights and optimizer states) and for rows on their way. device: of torch,
    such as "cuda:0"; "cpu" only where Triton's interpreter runs the kernels. plan: shares the bytes among the tables,
    given what each would need, as `Memory.plan`; None: `plan_slots_on_device`.
    """

    hbm: int | str
    device: str = "cuda"
    plan: Callable[[Sequence[TableDemand], int], Sequence[TableSlots]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hbm, int | str) or isinstance(self.hbm, bool) or parse_bytes(self.hbm) <= 0:
            raise ValueError(f"DeviceMemory: hbm is {self.hbm!r}; it must be positive bytes, such as '8GiB'")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"DeviceMemory: device is {self.device!r}, but torch {torch.__version__} finds no CUDA device here; "
                "leave memory out, or use hotrow.Memory, to train on the CPU"
            )

    @property
    def hbm_bytes(self) -> int:
        """`hbm` as a number."""
        return parse_bytes(self.hbm)


def slot_bytes(hbm_bytes: int) -> int:
    """What is left of a budget for slots."""
    return hbm_bytes - hbm_bytes // MOVING_SHARE


def plan_slots_on_device(tables: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
    """Small tables whole, smallest first, up to half of the budget; of the others as many rows each as are left for."""
    slots = [TableSlots(0, 0)] * len(tables)
    costs = [table.num_rows * table.record_bytes for table in tables]
    order = sorted(range(len(tables)), key=lambda t: costs[t])
    share = 1.0 if sum(costs) <= budget_bytes else SMALL_TABLES_SHARE
    left, limit = budget_bytes, budget_bytes * (1 - share)
    while order and left - costs[order[0]] >= limit:
        t = order.pop(0)
        slots[t], left = TableSlots(tables[t].num_rows, 0), left - costs[t]
    order.sort(key=lambda t: tables[t].num_rows)
    for k, t in enumerate(order):
        level = left // sum(tables[u].record_bytes for u in order[k:])
        slots[t] = TableSlots(0, min(tables[t].num_rows, level))
        left -= slots[t].cached * tables[t].record_bytes
    return slots


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


class DeviceFlight:
    """A batch whose rows lie in slots, or are on their way there, until it is released."""

    def __init__(self, owner: DeviceRows, spans: list[Span], slots: Tensor, pinned: list[NDArray[np.int64]]) -> None:
        self._owner, self.spans, self.slots, self.pinned = owner, spans, slots, pinned
        self.arrived: Moment | None = None
        self.released = False

    def __del__(self) -> None:
        self.release(updated=False)  # a lookup whose output nobody wanted

    def release(self, *, updated: bool) -> None:
        """The batch is over; updated: its rows have changed. Later calls do nothing."""
        if not self.released:
            self.released = True
            self._owner.release(self.pinned, updated=updated)


class DeviceRows:
    """The slots of one collection on a device, in front of its arrays in DRAM."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        layout: Layout,
        memory: DeviceMemory,
        host: Sequence[tuple[Tensor, Tensor | None]],
    ) -> None:
        """host: of each table its weights and, if they are split, their lower halves."""
        self.tables, self.layout, self.memory = tables, layout, memory
        self.device = torch.device(memory.device)
        self._host = [[array for array in arrays if array is not None] for arrays in host]
        self._num_states = 0
        self.directories: list[Directory] = []
        self.slots: list[TableSlots] = []
        """Of each table, once it is laid out."""
        self._parts: list[list[Tensor]] = []
        self.arrays: Any = None
        """Weights by slot, once they are laid out, of hotrow.gpu.ops; it stands in for hotrow.ops everywhere."""
        self.state_arrays: list[Any] = []
        self._mover: Mover | None = None
        self._announced: dict[int, tuple[KeyedJaggedTensor, DeviceFlight]] = {}
        self._stale = False
        self._lock = threading.RLock()
        self.altered = self.unannounced = self.foreseen = self.postponed = 0
        """Training batches that were changed after they were announced, that never were, that were as announced; and
        announcements for which there was no room yet."""

    def make_kernels(self, layout: Layout, *, among: Layout | None = None) -> Any:
        """The ops of some of the collection's features. Raises ImportError where Triton is not installed."""
        try:
            from hotrow.gpu.ops import Kernels
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ImportError("tables on a device need Triton: pip install 'hotrow[gpu]'") from error
        return Kernels(layout, among=among)

    # ---- where rows lie

    def attach(self, states: dict[str, Sequence[State]]) -> None:
        """An optimizer's states get slots beside the weights. Raises ValueError where these are laid out already."""
        if self.arrays is not None:
            raise ValueError(
                "the tables have their slots on the device already, by the first lookup or another optimizer: make the "
                "optimizer right after the EmbeddingCollection, and only one"
            )
        for table, arrays in zip(self.tables, self._host, strict=True):
            arrays += [state.array for state in states[table.name]]
            self._num_states = len(states[table.name])
        self._lay_out()

    def _demands(self) -> list[TableDemand]:
        return [
            TableDemand(table.name, table.num_embeddings, sum(array[:1].nbytes for array in arrays))
            for table, arrays in zip(self.tables, self._host, strict=True)
        ]

    def _plan(self, hbm_bytes: int) -> list[TableSlots]:
        plan = self.memory.plan or plan_slots_on_device
        return [TableSlots(*map(int, own)) for own in plan(self._demands(), slot_bytes(hbm_bytes))]

    def _lay_out(self) -> None:
        from hotrow.gpu.moves import Mover, Streams
        from hotrow.gpu.ops import Arrays

        self.slots, demands = self._plan(self.memory.hbm_bytes), self._demands()
        self._check_slots(demands)
        self.directories = [Directory(d.num_rows, own) for d, own in zip(demands, self.slots, strict=True)]
        self._parts = [
            [torch.zeros(sum(own), *array.shape[1:], dtype=array.dtype, device=self.device) for array in arrays]
            for arrays, own in zip(self._host, self.slots, strict=True)
        ]
        count = self._num_states
        weights = [parts[0] for parts in self._parts]
        low = [parts[1] if parts[0].dtype == torch.bfloat16 else None for parts in self._parts]
        self.state_arrays = [Arrays([parts[k - count] for parts in self._parts]) for k in range(count)]
        self._streams = Streams(self.device)
        self._streams.share(array for parts in self._parts for array in parts)
        self._mover = Mover(self._host, self._parts, self._streams)
        self._released = self._streams.moment()
        self.arrays = Arrays(weights, low)
        self._stale = True  # the pinned rows are yet to come

    def _check_slots(self, demands: Sequence[TableDemand]) -> None:
        for table, own in zip(demands, self.slots, strict=True):
            if min(own) < 0 or not 0 < sum(own) <= table.num_rows:
                raise ValueError(
                    f"DeviceMemory: table {table.name!r} would have {own.pinned:,} pinned and {own.cached:,} other "
                    f"slots for its {table.num_rows:,} rows in hbm of {self.memory.hbm_bytes:,} bytes; "
                    f"{self._use([1] * len(demands))}"
                )
        needed = sum(sum(own) * table.record_bytes for table, own in zip(demands, self.slots, strict=True))
        if needed > slot_bytes(self.memory.hbm_bytes):
            raise ValueError(
                f"DeviceMemory: plan takes {needed:,} bytes; there are {slot_bytes(self.memory.hbm_bytes):,} for slots"
            )

    def _use(self, needed: Sequence[int]) -> str:
        """Which budget gives each table so many slots."""
        total = sum(table.num_rows * table.record_bytes for table in self._demands())
        low, high = 0, total * MOVING_SHARE // (MOVING_SHARE - 1) + MOVING_SHARE
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(middle, needed) else (middle + 1, high)
        return f"raise it to {high:,} bytes (DeviceMemory(hbm={high}))"

    def _suffices(self, hbm_bytes: int, needed: Sequence[int]) -> bool:
        try:
            plan = self._plan(hbm_bytes)
        except ValueError:  # a plan of the user's has a least budget
            return False
        return all(
            own.cached >= n or own.pinned >= table.num_embeddings
            for own, n, table in zip(plan, needed, self.tables, strict=True)
        )

    # ---- batches in flight

    def announce(self, sparse: KeyedJaggedTensor) -> None:
        """Bring the rows of a training batch that comes later, and keep them until it has been, if there is room.

        One with an id out of range is left to its lookup, which refuses it when its turn comes.
        """
        with self._lock:
            if id(sparse) in self._announced:
                return
            spans = self._spans(sparse)
            rows = self._rows(sparse, spans)
            if rows is None:
                return
            if self._num_short(rows):
                self.postponed += 1
            else:
                self._announced[id(sparse)] = (sparse, self._admit(sparse, spans, rows))

    def forget(self, sparse: KeyedJaggedTensor) -> None:
        """A batch that was announced will not come, or has been."""
        with self._lock:
            found = self._announced.pop(id(sparse), None)
            if found is not None:
                found[1].release(updated=False)

    def take(self, sparse: KeyedJaggedTensor, *, training: bool) -> tuple[DeviceFlight, KeyedJaggedTensor]:
        """The flight of this batch and the batch with slots for ids; what runs from now on finds its rows there.

        Raises ValueError for an id out of range, and where its rows and those of batches whose step is yet to come are
        more than there are slots.
        """
        with self._lock:
            spans = self._spans(sparse)
            _, flight = self._announced.pop(id(sparse), (None, None))
            if flight is not None and not self._is_of(flight, sparse, spans):
                self.altered += training
                flight.release(updated=False)
                flight = None
            elif training:
                self.unannounced += flight is None
                self.foreseen += flight is not None
            if flight is None:
                flight = self._make_room_and_admit(sparse, spans)
            self.refresh()
            if flight.arrived is not None:
                flight.arrived.precede()
            return flight, sparse.with_values(flight.slots)

    def _is_of(self, flight: DeviceFlight, sparse: KeyedJaggedTensor, spans: list[Span]) -> bool:
        ids, slots = sparse.values.numpy(), flight.slots.numpy()
        if ids.shape != slots.shape or spans != flight.spans:
            return False
        return all(self.directories[t].holds(ids[start:stop], slots[start:stop]) for t, start, stop in spans)

    def _make_room_and_admit(self, sparse: KeyedJaggedTensor, spans: list[Span]) -> DeviceFlight:
        rows = self._rows(sparse, spans)
        if rows is None:
            raise ValueError(self._bad_id(sparse))
        while self._num_short(rows) and self._announced:
            _, flight = self._announced.pop(next(reversed(self._announced)))  # the one that is needed last
            flight.release(updated=False)
            self.postponed += 1
        if short := self._num_short(rows):
            t, missing = short
            slots, held = self.slots[t], sum(self.slots[t]) - self.directories[t].num_free
            needed = [
                min(table.num_embeddings, own.cached - directory.num_free + len(each))
                for table, own, directory, each in zip(self.tables, self.slots, self.directories, rows, strict=True)
            ]
            raise ValueError(
                f"the batch looks up {len(rows[t]):,} rows of table {self.tables[t].name!r}, {missing:,} more than "
                f"there are slots for: of {sum(slots):,} on the device {held:,} hold rows that stay and rows of "
                f"batches before their step; DeviceMemory: hbm is {self.memory.hbm_bytes:,} bytes; "
                f"{self._use(needed)}, or make batches smaller"
            )
        return self._admit(sparse, spans, rows)

    def _spans(self, sparse: KeyedJaggedTensor) -> list[Span]:
        if self.arrays is None:
            self._lay_out()
        names = set(sparse.keys)
        served = [feature for feature in self.layout.features if feature.name in names]  # in the order of their tables
        spans = [(feature.table, sparse.span(feature.name)) for feature in served]
        return [(table, span.start, span.stop) for table, span in spans]

    def _rows(self, sparse: KeyedJaggedTensor, spans: Sequence[Span]) -> list[NDArray[np.int64]] | None:
        """The different rows of each table that the batch looks up, rising; None where an id is out of range."""
        ids = sparse.values.numpy()
        found = []
        for t, table in enumerate(self.tables):
            own = [ids[start:stop] for table_of, start, stop in spans if table_of == t]
            rows = np.unique(np.concatenate([np.empty(0, np.int64), *own]))
            if len(rows) and (rows[0] < 0 or rows[-1] >= table.num_embeddings):
                return None
            found.append(rows)
        return found

    def _num_short(self, rows: Sequence[NDArray[np.int64]]) -> tuple[int, int] | None:
        """The first table without room for its rows, and how many slots are missing."""
        for t, own in enumerate(rows):
            if missing := self.directories[t].num_short(own):
                return t, missing
        return None

    def _admit(self, sparse: KeyedJaggedTensor, spans: list[Span], rows: list[NDArray[np.int64]]) -> DeviceFlight:
        admitted = [directory.admit(own) for directory, own in zip(self.directories, rows, strict=True)]
        ids = sparse.values.numpy()
        slots = np.zeros(len(ids), np.int32)
        for t, start, stop in spans:
            slots[start:stop] = self.directories[t].slot_of[ids[start:stop]]
        flight = DeviceFlight(self, spans, torch.from_numpy(slots), [pinned for pinned, _ in admitted])
        flight.arrived = self._exchange([moves for _, moves in admitted])
        return flight

    def _exchange(self, moves: Sequence[Moves]) -> Moment:
        """Rows that leave are read before others are laid into their slots: copies keep their order."""
        assert self._mover is not None
        self._mover.settle()  # what left before may be what comes now; no row does both now
        for rows, slots in self._pieces([each.leaving for each in moves], [each.leaving_slots for each in moves]):
            self._mover.send_back(rows, slots, after=self._released)
        return self._bring([each.coming for each in moves], [each.coming_slots for each in moves])

    def _bring(self, rows: Sequence[NDArray[np.int64]], slots: Sequence[NDArray[np.int64]]) -> Moment:
        assert self._mover is not None
        arrived = self._released
        for some_rows, some_slots in self._pieces(rows, slots):
            arrived = self._mover.bring(some_rows, some_slots, after=self._released)
        return arrived

    def _pieces(
        self, rows: Sequence[NDArray[np.int64]], slots: Sequence[NDArray[np.int64]]
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """They in pieces that take no more than what is set aside for rows on their way."""
        record_bytes = [demand.record_bytes for demand in self._demands()]
        most = max(1, self.memory.hbm_bytes // MOVING_SHARE // 2)
        total = sum(len(own) * num_bytes for own, num_bytes in zip(rows, record_bytes, strict=True))
        pieces = -(-total // most)
        cut_rows = [np.array_split(own, max(1, pieces)) for own in rows]
        cut_slots = [np.array_split(own, max(1, pieces)) for own in slots]
        for k in range(pieces):
            yield [torch.from_numpy(own[k]) for own in cut_rows], [torch.from_numpy(own[k]) for own in cut_slots]

    def release(self, pinned: Sequence[NDArray[np.int64]], *, updated: bool) -> None:
        """A batch is over, whose rows lie in slots `pinned`; for flights."""
        with self._lock:
            for directory, slots in zip(self.directories, pinned, strict=True):
                directory.release(slots, updated=updated)
            self._released = self._streams.moment()

    def _bad_id(self, sparse: KeyedJaggedTensor) -> str:
        served = replace(self.layout, features=tuple(f for f in self.layout.features if f.name in sparse.keys))
        bad = first_bad_id(served, [arrays[0] for arrays in self._host], sparse)
        if bad is None:
            return "an id of the batch was outside its table, and is not when looked at again: it is being changed"
        return bad.text(self.tables[bad.feature.table].num_embeddings)

    # ---- the arrays in DRAM

    def flush(self) -> None:
        """The arrays in DRAM have every row as it is, and may be changed: rows on the device are read again after."""
        with self._lock:
            if self.arrays is None or self._stale:
                return
            assert self._mover is not None
            dirty = [np.flatnonzero(directory.dirty) for directory in self.directories]
            rows = [directory.row_of[slots] for directory, slots in zip(self.directories, dirty, strict=True)]
            for some_rows, some_slots in self._pieces(rows, dirty):
                self._mover.send_back(some_rows, some_slots, after=self._streams.moment())
            self._mover.settle()
            for directory, slots in zip(self.directories, dirty, strict=True):
                directory.dirty[slots] = False
                directory.counts["written_rows"] += len(slots)
            self._stale = True

    def refresh(self) -> None:
        """Rows on the device are those in DRAM again, after a `flush`."""
        with self._lock:
            if not self._stale:
                return
            self._stale = False
            held = [np.flatnonzero(directory.row_of >= 0) for directory in self.directories]
            rows = [directory.row_of[slots] for directory, slots in zip(self.directories, held, strict=True)]
            self._released = self._streams.moment()
            self._bring(rows, held).precede()

    def counters(self) -> dict[str, dict[str, int]]:
        """By table: rows that batches named, those that were there, came, left, and were copied back."""
        return {table.name: dict(own.counts) for table, own in zip(self.tables, self.directories, strict=False)}

"""Budgets of memory for tables, in DRAM and on a device, and their default plans: bytes in, slots per table out.

Plain numbers; nothing is opened or allocated. The plan that knows how often rows are used: setup/divide.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from hotrow.base.files import parse_bytes, size
from hotrow.base.machine import available_memory_bytes
from hotrow.placement.store_file import LARGE_IO_BYTES, PLACES_PER_ROW, page_records

Writes = Literal["auto", "in_place", "gathered"]
WRITES: tuple[Writes, ...] = ("auto", "in_place", "gathered")
Io = Literal["auto", "io_uring", "threads"]
IOS: tuple[Io, ...] = ("auto", "io_uring", "threads")
METADATA_BYTES = 32
"""The most that a cached row takes beside its record: 8 bytes in the map from ids to slots, 12 for its slot, and 12
more once a batch has needed slots beside the cache."""
MIDDLE_PLACE_BYTES = 6
"""The most DRAM that each place of the middle tier takes: 5 bytes for the place, 1 for its set."""
SET_PLACES = 16
"""Number of places in a set of the middle tier (cached_store.h)."""
REGION_BYTES = 1024
"""Memory that a region of gathered rows takes beside its map and its page, rounding included."""
ROW_BYTES = 2 / 8
"""Two bits for every row, wherever it lies: was it ever written to, and was it since the last checkpoint?"""
MAX_PLACES_SHARE = 0.5
"""Rows are gathered only if knowing where they lie takes no more than this share of the budget for slots
(docs/memory.md says what was measured)."""
MIN_GATHERED_ROWS = 1 << 15
"""Writes of smaller tables are not gathered: few of their rows leave memory, and an open page is much of them."""
MIN_ROWS = 100
"""A table in tiers caches at least this many rows, or all that it has."""
SMALL_TABLES_SHARE = 0.5
"""Share of the budget for tables that lie in memory whole, smallest first."""
MAX_WAITING_SHARE, MAX_GATHERED_SHARE = 8, 64
"""I/O buffers and rows that wait to be written take at most 1/8 of the budget, and at most 64 MiB. If writes are
gathered, which takes a 25th of the I/Os, they take at most 1/64 or 2 MiB, whichever is more."""
MAP_BYTES = 4
"""Bytes of a device per row that comes and goes there, for the kernels to know its slot."""
MAP_ROUNDS = 16
"""How often slots are planned anew because the map needs more. Then it gets as much as it can ever need."""
MOVING_SHARE = 8
"""1/8 of a device's budget is for rows on their way, half for each direction; larger moves go in pieces."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How a collection keeps its rows: some in DRAM, the rest on disk, and, if you ask for it, some in a tier between.

        emb = hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram="2GiB", ssd="/nvme/emb"))
        memory = hotrow.Memory(dram="1GiB", file="/mnt/cxl", file_bytes="8GiB", ssd="/nvme/emb")

    dram: bytes for slots (weights and optimizer states), for bookkeeping, and for buffers.
    ssd: a folder for block files, which are read and written past the page cache.
    file: a folder for files that are used as memory (DAX, CXL, tmpfs, or plain). Name `ssd` or `file`, or both with
    `file_bytes`: rows that leave DRAM then lie in `file`, up to so many bytes, before they go to `ssd`. The files are
    made there and removed with the collection.
    plan: shares the bytes among the tables, given what each needs. `hotrow.plan_by_counts` makes a plan that knows how
    often each row is used; None means `plan_slots`, which does not.
    writes: how rows that leave DRAM are written to block files. "in_place": each to its own sector. "gathered": side by
    side, a page in one I/O, which takes about 3 bytes of DRAM for each row and files of twice the rows' bytes. "auto":
    gathered if there is room for both. It changes speed, never results.
    force: allows `ssd` on a network file system or in memory, which a collection otherwise refuses.
    io: what reads and writes block files: "io_uring", "threads", or "auto" (io_uring if the system allows it).
    """

    dram: int | str
    ssd: str | Path | None = None
    file: str | Path | None = None
    file_bytes: int | str | None = None
    plan: Callable[[Sequence[TableDemand], int], Sequence[TableSlots]] | None = None
    force: bool = False
    writes: Writes = "auto"
    io: Io = "auto"

    def __post_init__(self) -> None:
        sizes = {"dram": self.dram, **({} if self.file_bytes is None else {"file_bytes": self.file_bytes})}
        for name, value in sizes.items():
            number = isinstance(value, int | str) and not isinstance(value, bool)
            if not number or parse_bytes(value, what=f"Memory: {name}") <= 0:
                raise ValueError(f"Memory: {name} is {value!r}; it must be a positive number of bytes, such as '2GiB'")
        folders = (self.ssd, self.file)
        if folders == (None, None) or "" in folders or (None not in folders) != (self.file_bytes is not None):
            raise ValueError(
                f"Memory: ssd is {self.ssd!r}, file is {self.file!r} and file_bytes is {self.file_bytes!r}; name "
                "exactly one folder, or, for rows to lie in file before they go to ssd, all three"
            )
        if self.writes == "gathered" and self.ssd is None:
            raise ValueError("Memory: writes is 'gathered', which is for block files; name ssd, a folder of a disk")
        choices: dict[str, tuple[str, ...]] = {"writes": WRITES, "io": IOS}
        for name, allowed in choices.items():
            if (chosen := getattr(self, name)) not in allowed:
                raise ValueError(f"Memory: {name} is {chosen!r}; choose one of {', '.join(allowed)}")

    @property
    def dram_bytes(self) -> int:
        return parse_bytes(self.dram)

    @property
    def waiting_bytes(self) -> int:
        """The most that I/O buffers and rows that wait to be written may take of `dram`."""
        most = min(64 << 20, self.dram_bytes // MAX_WAITING_SHARE)
        return min(most, max(2 << 20, self.dram_bytes // MAX_GATHERED_SHARE)) if self.writes == "gathered" else most

    @property
    def engine_bytes(self) -> int:
        """The part of `waiting_bytes` that I/Os of gathered pages leave; at least half."""
        large = LARGE_IO_BYTES if self.writes == "gathered" else 0
        return max(self.waiting_bytes - large, self.waiting_bytes // 2)

    @property
    def slots_bytes(self) -> int:
        """The rest of `dram`: for slots and for bookkeeping about rows."""
        return self.dram_bytes - self.waiting_bytes

    @property
    def folder(self) -> Path:
        """The folder of the files that hold every row."""
        return Path(self.ssd if self.ssd is not None else self.file or "")

    @property
    def middle(self) -> Path | None:
        """The folder of the middle tier's files; None if there is no middle tier."""
        return None if self.file_bytes is None else Path(self.file or "")

    def settled(self, tables: Sequence[TableDemand], free_bytes: int) -> Memory:
        """Returns this memory with "auto" of `writes` decided; free_bytes: what is free on the disk."""
        if self.writes != "auto" or self.ssd is None:
            return self
        gathered = replace(self, writes="gathered")
        known = [table for table in gathered.with_places(tables) if table.place_bytes]
        known_bytes = sum(table.place_bytes * table.num_rows for table in known)
        file_bytes = PLACES_PER_ROW * sum(table.record_bytes * table.num_rows for table in known)
        fits = known_bytes <= MAX_PLACES_SHARE * gathered.slots_bytes and file_bytes <= free_bytes
        return gathered if known and fits else replace(self, writes="in_place")

    def with_places(self, tables: Sequence[TableDemand]) -> list[TableDemand]:
        """Returns the tables with `place_bytes` set for those whose writes are gathered."""
        if self.writes != "gathered":
            return [*tables]
        return [
            table._replace(place_bytes=place_bytes(table)) if table.num_rows >= MIN_GATHERED_ROWS else table
            for table in tables
        ]

    def budget_bytes(self, tables: Sequence[TableDemand]) -> int:
        """Returns the bytes for slots that the map of the middle tier leaves. Raises ValueError if it leaves none."""
        if self.file_bytes is None:
            return self.slots_bytes
        places = parse_bytes(self.file_bytes) // min(table.record_bytes for table in tables)
        map_bytes = MIDDLE_PLACE_BYTES * min(places, sum(table.num_rows + SET_PLACES for table in tables))
        if map_bytes >= self.slots_bytes:
            raise ValueError(
                f"the memory for tables is too small: to know which rows lie in {self.file}, file_bytes of "
                f"{self.file_bytes} take {size(map_bytes)}, and there are {size(self.slots_bytes)}; "
                "raise dram (config memory.dram, or hotrow.Memory), or lower file_bytes"
            )
        return self.slots_bytes - map_bytes

    def plan_places(self, tables: Sequence[TableDemand], slots: Sequence[TableSlots]) -> list[int]:
        """Returns how many rows of each table the middle tier holds: `file_bytes` shared as `plan_slots` shares.

        Every table gets as many rows, because every table is looked up as often, but no more than the tail that its
        slots do not pin. Tables that lie in DRAM whole get 0, and so do all if there is no middle tier. Raises
        ValueError, with the shortfall, if a table would get fewer than a hundred rows.
        """
        places = [0] * len(tables)
        if self.file_bytes is None:
            return places
        tails = [table.num_rows - own.pinned for table, own in zip(tables, slots, strict=True)]
        rest = [t for t in sorted(range(len(tables)), key=lambda t: tails[t]) if tails[t] > 0]
        least = {t: _whole_sets(min(MIN_ROWS, tails[t])) for t in rest}
        record_bytes, held = [table.record_bytes for table in tables], parse_bytes(self.file_bytes)
        shares = _level([*map(_whole_sets, tails)], record_bytes, rest, held, unit=SET_PLACES)
        for t, places[t] in shares.items():
            if places[t] < least[t]:
                short = sum(least[u] * record_bytes[u] for u in rest) - held
                raise ValueError(
                    f"file_bytes is too small: {self.file} would hold {places[t]} of the {tails[t]:,} rows of table "
                    f"{tables[t].name!r} that are not pinned in DRAM. {short:,} bytes more are the least; raise it "
                    "(config memory.file_bytes, or hotrow.Memory), or leave file and file_bytes out"
                )
        return places


class TableDemand(NamedTuple):
    """What one table needs."""

    name: str
    num_rows: int
    record_bytes: int
    """Bytes of a slot: weights and optimizer states."""
    place_bytes: float = 0.0
    """Bytes per row for knowing where gathered rows lie on disk; a table that lies in DRAM whole does not take them."""

    @property
    def row_bytes(self) -> float:
        """Bytes of bookkeeping per row of a table that does not lie in DRAM whole."""
        return ROW_BYTES + self.place_bytes


class TableSlots(NamedTuple):
    """What one table gets: slots that hold its first rows for good, and slots for whichever rows are in use."""

    pinned: int
    cached: int


def place_bytes(table: TableDemand) -> float:
    """Returns the most DRAM that a row takes if its writes are gathered: map, free places, open pages.

    0 if they cannot be. By gathered_store.h: 2 bytes of the map, a bit for each of two places, a byte for each page of
    places; and for each region, or a smaller table, the open page and REGION_BYTES.
    """
    if (page_rows := page_records(table.record_bytes)) is None or table.num_rows == 0:
        return 0.0
    region_rows = 0xFFFF // page_rows * page_rows // PLACES_PER_ROW
    num_regions = -(-table.num_rows // region_rows)
    per_row = 2 + PLACES_PER_ROW * (1 / 8 + 1 / page_rows)
    return per_row + num_regions * (page_rows * table.record_bytes + REGION_BYTES) / table.num_rows


def _whole_sets(num_rows: int) -> int:
    return -(-num_rows // SET_PLACES) * SET_PLACES


def plan_slots(tables: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
    """Returns slots for each table within `budget_bytes`, with everything counted.

    Small tables lie in DRAM whole, smallest first, until they take SMALL_TABLES_SHARE of the budget. The rest is shared
    so that every other table caches as many rows, because every table is looked up as often. Raises ValueError if the
    bookkeeping alone, or a hundred rows a table, are over the budget.
    """
    whole, rest = _smallest_first([table.num_rows * (table.record_bytes + ROW_BYTES) for table in tables], budget_bytes)
    slot_bytes = [table.record_bytes + METADATA_BYTES for table in tables]
    left = budget_bytes - sum(tables[t].num_rows * (tables[t].record_bytes + ROW_BYTES) for t in whole)
    left -= sum(tables[t].num_rows * tables[t].row_bytes for t in rest)
    cached = _level([table.num_rows for table in tables], slot_bytes, rest, left)
    for t in rest:
        if cached[t] < min(MIN_ROWS, tables[t].num_rows):
            needed = sum(slot_bytes[u] * MIN_ROWS + tables[u].num_rows * tables[u].row_bytes for u in rest)
            raise ValueError(
                f"the memory for tables is too small: table {tables[t].name!r} would keep {max(cached[t], 0)} of its "
                f"{tables[t].num_rows:,} rows. About {size(needed)} more than the tables that lie in memory "
                "whole are the least; raise dram (config memory.dram, or hotrow.Memory)"
            )
    return [TableSlots(0, cached[t]) if t in cached else TableSlots(own.num_rows, 0) for t, own in enumerate(tables)]


def plan_slots_on_device(tables: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
    """Returns slots: small tables whole, smallest first, up to half of the budget; equal numbers for the others."""
    costs = [table.num_rows * table.record_bytes for table in tables]
    whole, rest = _smallest_first(costs, budget_bytes)
    rest.sort(key=lambda t: tables[t].num_rows)
    left = budget_bytes - sum(costs[t] for t in whole)
    cached = _level([table.num_rows for table in tables], [table.record_bytes for table in tables], rest, left)
    return [TableSlots(0, cached[t]) if t in cached else TableSlots(own.num_rows, 0) for t, own in enumerate(tables)]


def _smallest_first(costs: Sequence[float], budget_bytes: int) -> tuple[list[int], list[int]]:
    """Returns the tables that lie in memory whole, up to SMALL_TABLES_SHARE or all, and the others; smallest first."""
    order = sorted(range(len(costs)), key=lambda t: costs[t])
    most = budget_bytes * (1.0 if sum(costs) <= budget_bytes else SMALL_TABLES_SHARE)
    count = sum(total <= most for total in accumulate(costs[t] for t in order))
    return order[:count], order[count:]


def _level(
    most: Sequence[int], slot_bytes: Sequence[int], order: Sequence[int], left: float, *, unit: int = 1
) -> dict[int, int]:
    """Returns equal numbers of slots for the tables of `order`, multiples of `unit`, but at most most[t] for table t.
    Tables are served in this order; the slots that one does not need go to those after it."""
    shares = {}
    for k, t in enumerate(order):
        level = int(left // sum(slot_bytes[u] for u in order[k:])) // unit * unit
        shares[t] = min(most[t], level)
        left -= shares[t] * slot_bytes[t]
    return shares


def num_bytes(table: TableDemand, slots: TableSlots) -> float:
    """Returns what a table with these slots takes, with everything counted."""
    cached = slots.cached * (table.record_bytes + METADATA_BYTES)
    row_bytes = ROW_BYTES if slots.pinned == table.num_rows else table.row_bytes
    return slots.pinned * table.record_bytes + cached + table.num_rows * row_bytes


def check_plan(tables: Sequence[TableDemand], slots: Sequence[TableSlots], budget_bytes: int) -> list[TableSlots]:
    """Returns `slots`. Raises ValueError if a table has none or more than rows, or all exceed the budget."""
    if len(slots) != len(tables):
        raise ValueError(f"Memory: plan gave slots for {len(slots)} tables; there are {len(tables)}")
    slots = [TableSlots(*map(int, each)) for each in slots]
    for table, (pinned, cached) in zip(tables, slots, strict=True):
        if min(pinned, cached) < 0 or pinned + cached > table.num_rows:
            raise ValueError(
                f"Memory: plan pins {pinned:,} rows of table {table.name!r} and caches {cached:,}; both must be 0 or "
                f"more, together at most its {table.num_rows:,} rows"
            )
    needed = sum(num_bytes(table, each) for table, each in zip(tables, slots, strict=True))
    if needed > budget_bytes:
        raise ValueError(f"Memory: plan takes {needed:,.0f} bytes; there are {budget_bytes:,} for slots")
    return slots


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Slots in the memory of a device, where lookups and updates run, in front of tables in DRAM or in tiers.

        emb = hotrow.EmbeddingCollection(tables, memory=hotrow.DeviceMemory(hbm="8GiB"))
        memory = hotrow.DeviceMemory(hbm="8GiB", below=hotrow.Memory(dram="64GiB", ssd="/nvme/emb"))

    hbm: bytes of device memory for slots (weights and optimizer states) and for rows on their way.
    below: how rows are kept that have no slot; None means all rows lie in DRAM.
    device: torch's name, such as "cuda:0"; "cpu" works only if Triton's interpreter runs the kernels.
    plan: shares the bytes among the tables, as `Memory.plan` does; None means `plan_slots_on_device`.
    """

    hbm: int | str
    below: Memory | None = None
    device: str = "cuda"
    plan: Callable[[Sequence[TableDemand], int], Sequence[TableSlots]] | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.hbm, int | str) and not isinstance(self.hbm, bool)
        if not number or parse_bytes(self.hbm, what="DeviceMemory: hbm") <= 0:
            raise ValueError(f"DeviceMemory: hbm is {self.hbm!r}; it must be positive bytes, such as '8GiB'")
        if self.below is not None and not isinstance(self.below, Memory):
            raise ValueError(f"DeviceMemory: below is {self.below!r}; pass None (all rows in DRAM) or hotrow.Memory")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"DeviceMemory: device is {self.device!r}, but torch {torch.__version__} finds no CUDA device here; "
                "leave memory out, or use hotrow.Memory, to train on the CPU"
            )

    @property
    def hbm_bytes(self) -> int:
        return parse_bytes(self.hbm)

    def slots(self, tables: Sequence[TableDemand], hbm_bytes: int | None = None) -> list[TableSlots]:
        """Returns each table's slots by the plan, for this budget or another."""
        plan = self.plan or plan_slots_on_device
        budget_bytes, map_bytes = slot_bytes(self.hbm_bytes if hbm_bytes is None else hbm_bytes), 0
        # A plan knows of slots alone, and says which rows need a map; with less for slots more may, in the end all.
        for left in count(MAP_ROUNDS, -1):
            found = [TableSlots(*map(int, own)) for own in plan(tables, max(0, budget_bytes - map_bytes))]
            if (needed := _map_bytes(tables, found)) <= map_bytes:
                break
            map_bytes = needed if left > 0 else MAP_BYTES * sum(table.num_rows for table in tables)
        return found

    def checked_slots(self, tables: Sequence[TableDemand]) -> list[TableSlots]:
        """Returns `slots`. Raises ValueError if a table has none, they exceed the budget, or it exceeds the device."""
        if self.hbm_bytes > (free := free_bytes(self.device)):
            raise ValueError(
                f"DeviceMemory: hbm is {self.hbm_bytes:,} bytes, and of the memory of {self.device} {free:,} are free; "
                "lower it, and leave room there for dense layers and for the rows of a step"
            )
        slots = self.slots(tables)
        for table, own in zip(tables, slots, strict=True):
            if min(own) < 0 or not 0 < sum(own) <= table.num_rows:
                raise ValueError(
                    f"DeviceMemory: table {table.name!r} would have {own.pinned:,} pinned and {own.cached:,} other "
                    f"slots for its {table.num_rows:,} rows in hbm of {self.hbm_bytes:,} bytes; "
                    f"{raise_to(self.least_bytes(tables, [1] * len(tables)))}"
                )
        needed = sum(sum(own) * table.record_bytes for table, own in zip(tables, slots, strict=True))
        needed += _map_bytes(tables, slots)
        if needed > slot_bytes(self.hbm_bytes):
            raise ValueError(
                f"DeviceMemory: plan takes {needed:,} bytes; there are {slot_bytes(self.hbm_bytes):,} for slots "
                "and for knowing which row has which"
            )
        return slots

    def least_bytes(self, tables: Sequence[TableDemand], needed: Sequence[int]) -> int:
        """Returns the least `hbm` that gives each table `needed` slots for passing rows, or a slot for every row."""
        total = sum(table.num_rows * table.record_bytes for table in tables)
        low, high = 0, total * MOVING_SHARE // (MOVING_SHARE - 1) + MOVING_SHARE
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(tables, middle, needed) else (middle + 1, high)
        return high

    def _suffices(self, tables: Sequence[TableDemand], hbm_bytes: int, needed: Sequence[int]) -> bool:
        try:
            slots = self.slots(tables, hbm_bytes)
        except ValueError:  # a user's plan may have a least budget
            return False
        return all(
            own.cached >= n or own.pinned >= table.num_rows for own, n, table in zip(slots, needed, tables, strict=True)
        )


def _map_bytes(tables: Sequence[TableDemand], slots: Sequence[TableSlots]) -> int:
    return MAP_BYTES * sum(table.num_rows - own.pinned for table, own in zip(tables, slots, strict=True))


def free_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return available_memory_bytes()


def raise_to(hbm_bytes: int) -> str:
    """Returns the cure for a budget that is too small."""
    return f"raise it to {hbm_bytes:,} bytes (hbm={hbm_bytes})"


def slot_bytes(hbm_bytes: int) -> int:
    """Returns the part of a device's budget that is for slots."""
    return hbm_bytes - hbm_bytes // MOVING_SHARE

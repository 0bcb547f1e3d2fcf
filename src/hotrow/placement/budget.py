"""How much memory tables may take, and how it is shared: bytes in, slots per table out. Plain numbers, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from numpy.typing import ArrayLike

from hotrow.base.files import parse_bytes, size
from hotrow.placement.store_file import LARGE_IO_BYTES, PLACES_PER_ROW, page_records

Writes = Literal["auto", "in_place", "gathered"]
WRITES: tuple[Writes, ...] = ("auto", "in_place", "gathered")
Io = Literal["auto", "io_uring", "threads"]
IOS: tuple[Io, ...] = ("auto", "io_uring", "threads")
METADATA_BYTES = 32
"""What a cached row takes beside its record, at most: 8 bytes of the map from ids to slots, 12 of the slot's own, and as
many again while rows of a batch lie beside the cache."""
MIDDLE_PLACE_BYTES = 6
"""Of DRAM for each place of the middle tier, at most: 5 of the place, 1 of its set."""
SET_PLACES = 16
"""Places of the middle tier come in sets of so many (cached_store.h)."""
REGION_BYTES = 1024
"""Of a region of gathered rows beside its map and its page, with what memory is rounded up to."""
ROW_BYTES = 2 / 8
"""Of every row wherever it lies: a bit whether it was ever written to, one whether it was since the last checkpoint."""
MOST_PLACES_SHARE = 0.5
"""Of the budget for slots, that knowing where gathered rows lie may take; else each has its own place (docs/memory.md
says what was measured)."""
LEAST_GATHERED_ROWS = 1 << 15
"""Of a table, for its writes to be gathered: hardly a smaller one leaves memory, and its open page is much of it."""
LEAST_ROWS = 100
"""That a table in tiers caches, or all where it has fewer."""
SMALL_TABLES_SHARE = 0.5
"""Of the budget, given to whole tables, smallest first: every lookup of one saves an I/O that its few rows would cost
over and over."""
MOST_WAITING_SHARE, MOST_GATHERED_SHARE = 8, 64
"""Buffers of I/O and rows that wait to be written take up to this part of the budget, 64 MiB at most; where writes are
gathered, and take a 25th of the I/Os, up to the smaller one, or 2 MiB."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where the rows of a collection lie: some in DRAM, the rest on disk, and some between the two where you say so.

        emb = hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram="2GiB", ssd="/nvme/emb"))
        memory = hotrow.Memory(dram="1GiB", file="/mnt/cxl", file_bytes="8GiB", ssd="/nvme/emb")

    dram: bytes for slots (weights and optimizer states), what is known of rows, and buffers. One of, or both
    ssd: a folder for block files, read and written past the page cache; file: a folder for files that are used as
    memory (DAX, CXL, tmpfs, or plain). Files are made there and removed with the collection.
    file_bytes: of both, how much `file` holds: rows that leave DRAM lie there before they go to `ssd`.
    plan: shares the bytes among the tables, given what each would need: `hotrow.plan_by_counts` makes one that knows
    how often each row is used; None: `plan_slots`, which does not.
    pins: by table, ids of rows that stay in DRAM beside those that the plan pins: each takes a cached slot for good.
    writes: how rows that leave DRAM are written to block files: "in_place", each to its own sector, "gathered", side by
    side, a page in one I/O, which takes some 3 bytes of DRAM for each row and files of twice the rows' bytes, or
    "auto": gathered where there is room for both. Speed, no result.
    force: whether `ssd` may lie on a network file system or in memory, which a collection refuses else.
    io: what reads and writes block files: "io_uring", "threads", or "auto": io_uring where the system allows it.
    """

    dram: int | str
    ssd: str | Path | None = None
    file: str | Path | None = None
    file_bytes: int | str | None = None
    plan: Callable[[Sequence[TableDemand], int], Sequence[TableSlots]] | None = None
    pins: Mapping[str, ArrayLike] | None = None
    force: bool = False
    writes: Writes = "auto"
    io: Io = "auto"

    def __post_init__(self) -> None:
        sizes = {"dram": self.dram, **({} if self.file_bytes is None else {"file_bytes": self.file_bytes})}
        for name, value in sizes.items():
            if not isinstance(value, int | str) or isinstance(value, bool) or parse_bytes(value) <= 0:
                raise ValueError(f"Memory: {name} is {value!r}; it must be a positive number of bytes, such as '2GiB'")
        folders = (self.ssd, self.file)
        if folders == (None, None) or "" in folders or (None not in folders) != (self.file_bytes is not None):
            raise ValueError(
                f"Memory: ssd is {self.ssd!r}, file is {self.file!r} and file_bytes is {self.file_bytes!r}; name "
                "exactly one folder, or, for rows to lie in file before they go to ssd, all three"
            )
        choices: dict[str, tuple[str, tuple[str, ...]]] = {
            "writes": (self.writes, WRITES),
            "io": (self.io, IOS),
        }
        if self.writes == "gathered" and self.ssd is None:
            raise ValueError("Memory: writes is 'gathered', which is for block files; name ssd, a folder of a disk")
        for name, (chosen, allowed) in choices.items():
            if chosen not in allowed:
                raise ValueError(f"Memory: {name} is {chosen!r}; choose one of {', '.join(allowed)}")

    @property
    def dram_bytes(self) -> int:
        """`dram` as a number."""
        return parse_bytes(self.dram)

    @property
    def waiting_bytes(self) -> int:
        """What buffers of I/O and rows that wait to be written may take of it."""
        most = min(64 << 20, self.dram_bytes // MOST_WAITING_SHARE)
        return min(most, max(2 << 20, self.dram_bytes // MOST_GATHERED_SHARE)) if self.writes == "gathered" else most

    @property
    def engine_bytes(self) -> int:
        """Of these, what is left beside I/Os of gathered pages; at least half."""
        large = LARGE_IO_BYTES if self.writes == "gathered" else 0
        return max(self.waiting_bytes - large, self.waiting_bytes // 2)

    @property
    def slots_bytes(self) -> int:
        """The rest: for slots and what is known of rows."""
        return self.dram_bytes - self.waiting_bytes

    @property
    def folder(self) -> Path:
        """Where the files go that hold every row."""
        return Path(self.ssd if self.ssd is not None else self.file or "")

    @property
    def middle(self) -> Path | None:
        """Where the files of the tier before them go; None: there is no such tier."""
        return None if self.file_bytes is None else Path(self.file or "")

    def settled(self, tables: Sequence[TableDemand], free_bytes: int) -> Memory:
        """With `writes` decided, where it is "auto"; free_bytes: of the disk."""
        if self.writes != "auto" or self.ssd is None:
            return self
        gathered = replace(self, writes="gathered")
        known = [table for table in gathered.with_places(tables) if table.place_bytes]
        known_bytes = sum(table.place_bytes * table.num_rows for table in known)
        file_bytes = PLACES_PER_ROW * sum(table.record_bytes * table.num_rows for table in known)
        fits = known_bytes <= MOST_PLACES_SHARE * gathered.slots_bytes and file_bytes <= free_bytes
        return gathered if known and fits else replace(self, writes="in_place")

    def with_places(self, tables: Sequence[TableDemand]) -> list[TableDemand]:
        """The tables with what it takes to know where their rows lie, those of which writes are gathered."""
        if self.writes != "gathered":
            return [*tables]
        return [
            table._replace(place_bytes=place_bytes(table)) if table.num_rows >= LEAST_GATHERED_ROWS else table
            for table in tables
        ]

    def budget_bytes(self, tables: Sequence[TableDemand]) -> int:
        """Of `slots_bytes`, what is left when it is known which rows lie in the middle tier, at most.

        Raises ValueError where nothing is.
        """
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
        """How many rows of each table the middle tier holds: `file_bytes` shared as `plan_slots` shares.

        As many rows each, since each is looked up as often, and no more than the tail that the slots do not pin; 0 for
        tables that lie in them whole, and where there is no such tier. Raises ValueError where a table would get fewer
        than a hundred, with the shortfall.
        """
        places = [0] * len(tables)
        if self.file_bytes is None:
            return places
        tails = [table.num_rows - own.pinned for table, own in zip(tables, slots, strict=True)]
        left = parse_bytes(self.file_bytes)
        rest = [t for t in sorted(range(len(tables)), key=lambda t: tails[t]) if tails[t] > 0]
        least = {t: _whole_sets(min(LEAST_ROWS, tails[t])) for t in rest}
        for k, t in enumerate(rest):
            level = left // sum(tables[u].record_bytes for u in rest[k:]) // SET_PLACES * SET_PLACES
            places[t] = min(_whole_sets(tails[t]), level)
            if places[t] < least[t]:
                short = sum(least[u] * tables[u].record_bytes for u in rest) - parse_bytes(self.file_bytes)
                raise ValueError(
                    f"file_bytes is too small: {self.file} would hold {places[t]} of the {tails[t]:,} rows of table "
                    f"{tables[t].name!r} that are not pinned in DRAM. {short:,} bytes more are the least; raise it "
                    "(config memory.file_bytes, or hotrow.Memory), or leave file and file_bytes out"
                )
            left -= places[t] * tables[t].record_bytes
        return places


class TableDemand(NamedTuple):
    """What a table would need."""

    name: str
    num_rows: int
    record_bytes: int
    """Of a slot: weights and states."""
    listed: int = 0
    """Rows that `Memory(pins=...)` names; those behind the prefix take cached slots for good."""
    place_bytes: float = 0.0
    """For each row, unless the table lies in DRAM whole: of knowing where it lies on disk, where it is gathered."""

    @property
    def row_bytes(self) -> float:
        """For each row wherever it lies, unless the table lies in DRAM whole."""
        return ROW_BYTES + self.place_bytes


class TableSlots(NamedTuple):
    """What a table gets: slots that hold its first rows for good, and slots for whichever rows are in use."""

    pinned: int
    cached: int


def place_bytes(table: TableDemand) -> float:
    """Of DRAM for each row whose writes are gathered, at most: map, free places, open pages; 0: they cannot be.

    gathered_store.h: 2 bytes of the map, a bit for each of two places, a byte for each page of places; and of a region,
    or a table that is less, the open page and what else it has.
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
    """Slots for each table within `budget_bytes`, everything counted.

    Small tables lie in DRAM whole, smallest first, as long as they take up to SMALL_TABLES_SHARE of the budget; what is
    left is cut so that the others get as many cached rows each, since each is looked up as often. ROW_BYTES of each row
    are counted too. Raises ValueError where the bits alone, or a hundred rows a table, are over the budget.
    """
    left = float(budget_bytes)
    slots = [TableSlots(0, 0)] * len(tables)
    costs = [table.num_rows * (table.record_bytes + ROW_BYTES) for table in tables]
    sizes = sorted(range(len(tables)), key=lambda t: costs[t])
    whole = 0.0
    fits_all = sum(costs) <= budget_bytes
    for t in sizes:
        if whole + costs[t] > budget_bytes * (1.0 if fits_all else SMALL_TABLES_SHARE):
            break
        whole += costs[t]
        slots[t] = TableSlots(tables[t].num_rows, 0)
    rest = [t for t in sizes if slots[t].pinned == 0]
    left -= whole + sum(tables[t].num_rows * tables[t].row_bytes for t in rest)
    shares = _level(tables, rest, left)
    for t, cached in shares.items():
        slots[t] = TableSlots(0, cached)
    return slots


def num_bytes(table: TableDemand, slots: TableSlots) -> float:
    """What they take, all counted."""
    cached = slots.cached * (table.record_bytes + METADATA_BYTES)
    row_bytes = ROW_BYTES if slots.pinned == table.num_rows else table.row_bytes
    return slots.pinned * table.record_bytes + cached + table.num_rows * row_bytes


def check_plan(tables: Sequence[TableDemand], slots: Sequence[TableSlots], budget_bytes: int) -> list[TableSlots]:
    """`slots`, if there are some for each table, no more than it has rows, and within the budget; else ValueError."""
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


def _level(tables: Sequence[TableDemand], rest: Sequence[int], left: float) -> dict[int, int]:
    """As many slots for each table of `rest`, smallest first, as their bytes allow, and no more than it has rows."""
    shares = {}
    for k, t in enumerate(rest):
        per_level = sum(tables[u].record_bytes + METADATA_BYTES for u in rest[k:])
        cached = min(tables[t].num_rows, int(left / per_level))
        if cached < min(LEAST_ROWS, tables[t].num_rows):
            needed = sum(
                (tables[u].record_bytes + METADATA_BYTES) * LEAST_ROWS + tables[u].num_rows * tables[u].row_bytes
                for u in rest
            )
            raise ValueError(
                f"the memory for tables is too small: table {tables[t].name!r} would keep {max(cached, 0)} of its "
                f"{tables[t].num_rows:,} rows. About {size(needed)} more than the tables that lie in memory "
                "whole are the least; raise dram (config memory.dram, or hotrow.Memory)"
            )
        shares[t] = cached
        left -= cached * (tables[t].record_bytes + METADATA_BYTES)
    return shares

"""What a step of tables in tiers moves between DRAM and disk, and what the disk takes for it.

Rows come and go as their cache has it (solve.py); rows that are near each other on disk share an I/O:

    in place    row r lies in page r // rows of a page; a sector that several rows share is read before it is written
    gathered    rows lie where they were written, beside those that left DRAM with them (gathered_store.h)

Rows that an epoch uses once, in the same bag, always come together: they first appeared together, so they are numbered
one after another, and they leave together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from hotrow.costs.hardware import Disk, Figure, Hardware
from hotrow.costs.work import TableWork, Work
from hotrow.placement.budget import MIN_GATHERED_ROWS, TableSlots
from hotrow.placement.store_file import DEPTH, PLACES_PER_ROW, page_records

SECTOR_BYTES, PAGE_BYTES, LARGE_PAGE_BYTES = 512, 4096, 16384
"""The smallest I/O, the largest in place, and what one of gathered rows has at most, as a rule (block_layout.h)."""
SPAN_BYTES = 8192
"""What an I/O of gathered rows spans at most, on average: frames for whole pages are few (engine.cpp)."""
FILLED = 0.55
"""The share of a gathered page that is written at once: the page is cut if no frame for all of it is free."""
LIVE = 1 / PLACES_PER_ROW
"""The share of a page's places whose row has not been written elsewhere since."""
MAX_IOS = DEPTH
"""I/Os under way together, at most: the depth of the store's queue."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a step of tables in tiers moves, over all tables."""

    tables: float
    """That do not lie in DRAM whole."""
    lookups: float
    """Ids that are mapped to slots."""
    rows: float
    """Different rows among them, behind the pinned ones."""
    misses: float
    """Those that are not in DRAM; some are looked up for the first time, and made, not read."""
    read_rows: float
    reads: float
    """I/Os that read."""
    read_bytes: float
    written_rows: float
    writes: float
    """I/Os that write."""
    written_bytes: float


def traffic_of(work: Work, slots: Sequence[TableSlots]) -> Traffic | None:
    """Returns what a step moves between DRAM and disk; None if all rows lie in DRAM.

    A row that is looked up for the first time is made, not read. A cache that is not full yet, early in the run, takes
    every row in and writes none back.
    """
    each = zip(work.tables, slots, strict=True)
    behind = [_of_table(work, own, at) for own, at in each if at.pinned < own.table.num_embeddings]
    if not behind:
        return None
    lookups = sum(own.lookups for own in work.tables)
    tables, _, *moved = np.sum([astuple(one) for one in behind], axis=0).tolist()
    return Traffic(**dict(zip(Traffic.__dataclass_fields__, (tables, lookups, *moved), strict=True)))


def _of_table(work: Work, own: TableWork, slots: TableSlots) -> Traffic:
    """Returns what a step moves of one table."""
    use, (begin, end) = own.use, work.steps
    rows = max(0.0, use.rows_per_step - use.hits(TableSlots(slots.pinned, 0)))
    first = min(own.first_rows(slots.pinned), rows)
    missed = max(0.0, use.rows_per_step - use.hits_in_flight(slots), first)
    full = slots.cached / missed if missed else math.inf
    """Steps until the cache is full."""
    in_steps = 1.0 if math.isinf(end) else max(0.0, end - max(begin, full)) / (end - begin)
    """The share of the steps in which it is."""
    read, evicted = (missed - first) * in_steps, missed * in_steps
    gathers = work.writes != "in_place" and own.table.num_embeddings >= MIN_GATHERED_ROWS
    page = page_records(own.record_bytes) if gathers else None
    bag = own.lookups / (work.batch_size * len(own.table.feature_names))
    if page is None:
        reads, read_bytes, writes, written_bytes = _in_place(own, slots, bag, read, evicted)
    else:
        written = evicted * (math.inf if math.isinf(end) else (begin + end) / 2)
        reads, read_bytes, writes, written_bytes = _gathered(own, slots, bag, page, read, evicted, written)
    return Traffic(
        tables=1.0,
        lookups=own.lookups,
        rows=rows,
        misses=first + read,
        read_rows=read,
        reads=reads,
        read_bytes=read_bytes,
        written_rows=evicted,
        writes=writes,
        written_bytes=written_bytes,
    )


def _sectors(own: TableWork, *, packed: bool) -> tuple[int, int]:
    """Returns the bytes of the smallest write, and how many rows share it."""
    shared = 2 * own.record_bytes < SECTOR_BYTES + packed
    unit = SECTOR_BYTES if shared else -(-own.record_bytes // SECTOR_BYTES) * SECTOR_BYTES
    return unit, SECTOR_BYTES // own.record_bytes if shared else 1


def _once(own: TableWork, slots: TableSlots, bag: float) -> tuple[float, float]:
    """Returns how many rows behind the pinned ones that an epoch uses once are in a step; and how many of them a bag of
    `bag` ids has, if it has any.
    """
    rates, rows = own.by_rate()
    once = float(
        np.clip(rows[np.abs(rates * own.num_steps - 1) < 0.5].sum(), 0, own.table.num_embeddings - slots.pinned)
    )
    in_step = once / own.num_steps
    return in_step, 1 + max(0.0, bag - 1) * min(1.0, in_step / own.lookups)


def _in_place(
    own: TableWork, slots: TableSlots, bag: float, read: float, evicted: float
) -> tuple[float, float, float, float]:
    """Returns reads and their bytes, writes and their bytes, of so many rows. bag: mean ids of a bag."""
    unit, unit_rows = _sectors(own, packed=False)
    page_units = max(1, PAGE_BYTES // unit)
    if not evicted:
        return 0.0, 0.0, 0.0, 0.0
    once, of_bag = _once(own, slots, bag)

    def groups(num: float, group: int) -> float:
        """Returns how many groups of neighbouring rows the rows lie in."""
        lone = max(0.0, num - once)
        bags = (num - lone) / of_bag
        found = _shared(own, slots, lone + bags, group)
        return found * (lone + bags * (1 + (of_bag - 1) / group)) / (lone + bags) if num else 0.0

    reads, units_read = groups(read, page_units * unit_rows), groups(read, unit_rows)
    writes = groups(evicted, unit_rows)
    again = writes if unit_rows > 1 else 0.0  # its neighbours are read before a sector is written
    read_bytes = reads * _span(units_read / reads, page_units) * unit if reads else 0.0
    return reads + again, read_bytes + again * unit, writes, writes * unit


def _shared(own: TableWork, slots: TableSlots, num: float, group: int) -> float:
    """Returns how many groups of `group` neighbouring rows `num` of the rows behind the pinned ones lie in.

    Rows are numbered by popularity, so neighbours are as likely as each other to be among them.
    """
    if group == 1 or not num:
        return num
    rates, rows = own.by_rate()
    behind = np.clip(rows.cumsum() - slots.pinned, 0.0, rows)
    chance = -np.expm1(-rates)
    chance = np.minimum(1.0, chance * num / max(float(behind @ chance), 1e-300))
    return min(num, float(behind @ -np.expm1(group * np.log1p(-np.minimum(chance, 1 - 1e-12)))) / group)


def _gathered(
    own: TableWork, slots: TableSlots, bag: float, page: int, read: float, evicted: float, written: float
) -> tuple[float, float, float, float]:
    """Returns as `_in_place`. page: places of a page. written: rows that left since the run began."""
    unit, unit_rows = _sectors(own, packed=True)
    if not evicted:
        return 0.0, 0.0, 0.0, 0.0
    rates, rows = own.by_rate()
    on_disk = max(read, 1.0, float(rows[rates > 0].sum()) - slots.pinned - slots.cached)
    once, of_bag = _once(own, slots, bag)
    by_chance = LIVE * page * read / on_disk
    beside = (of_bag - 1) * min(1.0, once / read) if read else 0.0
    reads = _ios(read, by_chance + beside)
    units, span = page // unit_rows, max(1, SPAN_BYTES // unit)
    # Rows of a bag lie one after another.
    width = _span(read / _ios(read, by_chance), min(units, span)) + beside / unit_rows if read else 0.0
    read_bytes = reads * min(width, units) * unit
    writes = evicted / max(1.0, FILLED * page)
    written_bytes = evicted / unit_rows * unit
    # Pages that were never written go first; then the emptiest is read, and written with what it still holds.
    free = PLACES_PER_ROW * own.table.num_embeddings - on_disk
    again = writes if written > free else 0.0
    return reads + again, read_bytes + again * span * unit, writes, written_bytes


def _ios(rows: float, beside: float) -> float:
    """Returns how many I/Os read the rows, if each page has `beside` of them on average."""
    return rows * -math.expm1(-beside) / beside if beside else rows


def _span(wanted: float, units: int) -> float:
    """Returns how many of `units` an I/O takes from the first to the last wanted one, if these lie anywhere."""
    return 1 + (units - 1) * (wanted - 1) / (wanted + 1) if wanted > 1 else 1.0


def io_seconds(disk: Disk, traffic: Traffic, *, together: float) -> float:
    """Returns what the disk takes for a step's reads and writes, so many of them under way together.

    Each I/O takes its turn, and what it moves beyond a sector its time at the disk's bandwidth.
    """
    reads, writes = (_rate(rates, together) for rates in (disk.reads_per_s, disk.writes_per_s))
    more_read, more_written = (
        max(0.0, num_bytes - ios * SECTOR_BYTES)
        for num_bytes, ios in ((traffic.read_bytes, traffic.reads), (traffic.written_bytes, traffic.writes))
    )
    bytes_s = more_read / disk.read_bytes_per_s.value + more_written / disk.write_bytes_per_s.value
    return traffic.reads / reads + traffic.writes / writes + bytes_s


def _rate(by_depth: Mapping[str, Figure], depth: float) -> float:
    """Returns I/Os a second at a queue depth, between the measured ones along straight lines of their logarithms."""
    known = sorted((int(name), figure.value) for name, figure in by_depth.items())
    if not known:
        raise ValueError("the hardware file has no random reads or writes for the disk; measure it with hotrow probe")
    depths, rates = zip(*known, strict=True)
    return math.exp(float(np.interp(math.log(max(depth, 1.0)), np.log(depths), np.log(rates))))


def disk_of(work: Work, hardware: Hardware) -> Disk:
    """Returns the disk that holds the work's folder. Raises ValueError if it was not measured."""
    folder = work.folder or "."
    if (disk := hardware.disk_at(folder)) is None:
        raise ValueError(
            f"reads and writes of rows cannot be predicted: no disk of {folder} in the file of {hardware.name}: "
            f"hotrow probe {folder}"
        )
    return disk

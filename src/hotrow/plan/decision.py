"""What `Setup` decided, for people: where the rows of each table lie, and why."""

from __future__ import annotations

from dataclasses import dataclass

from hotrow.placement.budget import MIN_ROWS, TableSlots
from hotrow.setup.demand import demands_of, most_rows
from hotrow.setup.setup import Setup
from hotrow.tables import TableConfig


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where the rows of a table lie; with several ranks, on the first."""

    name: str
    rows: int
    record_bytes: int
    """Bytes of a row with its optimizer state."""
    pinned: int
    cached: int
    on_disk: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided before the first step."""

    needed_bytes: int
    """All tables and their optimizer state; with several ranks, what the first one holds."""
    dram_bytes: int
    """The part of DRAM for them."""
    disk: str | None
    """Where the rest lies; None if all rows lie in DRAM."""
    device: str
    """Where dense layers compute."""
    num_ranks: int
    owners: dict[str, str]
    """By table, who holds it: "replicated", "row", "rank N", or "columns on ranks N, M"; empty for one process."""
    tables: list[TablePlan]


def decision_of(setup: Setup) -> Decision:
    memory, planner = setup.below, setup.planner
    whole = [TableSlots(table.num_embeddings, 0) for table in setup.held]
    slots = whole if memory is None else planner.slots_in(memory)[1]
    demands = demands_of(setup.config, setup.held, training=True)
    needed = sum(own.num_rows * own.record_bytes for own in demands)
    return Decision(
        needed_bytes=needed,
        dram_bytes=needed if memory is None else planner.budget,
        disk=None if memory is None else str(memory.folder),
        device=str(setup.dense.device),
        num_ranks=setup.ranks.size,
        owners={table.name: _owner(setup, table) for table in setup.tables if setup.shards},
        tables=[
            TablePlan(
                name=own.name,
                rows=own.num_rows,
                record_bytes=own.record_bytes,
                pinned=pinned,
                cached=cached,
                on_disk=own.num_rows - pinned - cached,
                why=_why(setup, table, TableSlots(pinned, cached)),
            )
            for own, table, (pinned, cached) in zip(demands, setup.held, slots, strict=True)
        ],
    )


def _why(setup: Setup, table: TableConfig, slots: TableSlots) -> str:
    if slots.pinned == table.num_embeddings:
        return "whole in DRAM"
    if setup.planner.plan is None:
        return "no access counts: as many cached rows as other tables on disk"
    floor = max(MIN_ROWS, most_rows(setup.config, table))
    if slots.pinned == 0 and slots.cached <= floor:
        return "room for the batches in flight alone: other tables' bytes are asked for more"
    cache = "a cache for batches in flight" if slots.cached <= 2 * floor else "a cache for rows that come again"
    return f"its most used rows, and {cache}" if slots.pinned else cache


def _owner(setup: Setup, table: TableConfig) -> str:
    shard = setup.shards[table.name]
    if shard.prefix == table.num_embeddings:
        return "replicated"
    owners = ", ".join(map(str, shard.owners))
    return "row" if shard.kind == "row" else f"columns on ranks {owners}" if shard.is_cut else f"rank {owners}"

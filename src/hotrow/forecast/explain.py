"""What a plan is and why, as data: `hotrow plan` prints it.

Where each table lies, what a step takes by phase and what binds, what would make it faster (changes.py), the least
memory for a wanted speed, and the step of several machines (ranks.py). Times are predictions by cost.py on a
hardware file. Nothing here trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotrow.base.files import size
from hotrow.costs.cost import Prediction
from hotrow.costs.declared import modelled_by
from hotrow.costs.demand import required_bytes
from hotrow.costs.solve import expected_hits, most_hits
from hotrow.forecast.changes import Change, changes, step_at
from hotrow.forecast.ranks import OverRanks, over_ranks
from hotrow.placement.budget import MIN_ROWS, Memory, TableSlots
from hotrow.setup.setup import Setup
from hotrow.setup.slots import SlotPlanner, Step, step_of

TARGET_STEPS = 12
"""Halvings of the range in which the least memory for a speed lies: to 1/4096 of it."""


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Where one table lies, and why."""

    name: str
    rows: int
    record_bytes: int
    """Bytes of a row with its optimizer state."""
    pinned: int
    cached: int
    on_disk: int
    """Rows that have no slot: on disk, once they have been trained."""
    rows_per_step: float | None
    """Different rows per step; None if the dataset has no counts."""
    hit_rate: float | None
    """The expected share of them that is in DRAM already."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """The least memory for a wanted speed."""

    samples_per_s: float
    reached: bool
    memory_bytes: int | None
    """DRAM for tables; None if no amount is enough."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """See the module."""

    needed_bytes: int
    """All tables and their optimizer state."""
    dram_bytes: int
    """What of DRAM is for them."""
    disk: str | None
    """Where the rest lies; None if all rows lie in DRAM."""
    tables: list[TablePlan]
    hits_missed: float | None
    """The most hits per step that a better division could add, over the different rows of a step."""
    hardware: dict[str, str] | None
    modelled: str | None
    """How a machine's steps were found that nobody measured there; None if they were measured."""
    threads: int | None
    """On how many threads a step is predicted."""
    predicted: Step | None
    not_predicted: str | None
    """Why nothing is predicted."""
    written_bytes_per_day: float | None
    """Bytes of rows that go to the drive, if it trains all day; checkpoints come on top."""
    rated_days: float | None
    """Days of that which the drive is rated for; None if nothing is written, or nobody declared `endurance_bytes`."""
    changes: list[Change]
    target: Target | None
    ranks: OverRanks | None


def explain(setup: Setup, *, target: float | None = None, alone: Setup | None = None) -> Explanation:
    """Returns the plan of a run of `setup`, and what would change it; of several machines, if it has several ranks.

    target: wanted samples per second. alone: the same run on one of several machines; if None, it does not fit there.
    Raises ValueError if several ranks or a target need figures that are missing.
    """
    planner, memory, dataset = setup.planner, setup.below, setup.dataset
    slots = None if memory is None else planner.slots_in(memory)[1]
    one = setup.ranks.size == 1
    predicted, reason = _predicted(planner, memory, slots)
    if reason and (target is not None or not one):
        raise ValueError(f"--target and --ranks need a prediction, and there is none: {reason}")
    batch_size = min(setup.config.train.batch_size, dataset.split("train").num_rows)
    per_day = None if predicted is None else 86400 * planner.written_bytes(slots, memory) / predicted.step_s
    rated = None if planner.disk is None else planner.disk.endurance_bytes
    needed, hardware = required_bytes(setup.config, setup.tables), planner.hardware
    return Explanation(
        needed_bytes=needed,
        dram_bytes=planner.budget if memory is not None else needed,
        disk=None if memory is None else str(memory.folder),
        tables=_table_plans(planner, slots) if one else [],
        hits_missed=None if slots is None or memory is None else _hits_missed(planner, memory, slots),
        hardware=None if hardware is None else {"name": hardware.name, "date": hardware.date},
        modelled=None if hardware is None else modelled_by(hardware),
        threads=None if predicted is None else planner.work.threads,
        predicted=step_of(predicted, batch_size) if predicted is not None and one else None,
        not_predicted=reason,
        written_bytes_per_day=per_day,
        rated_days=rated.value / per_day if rated is not None and per_day else None,
        changes=changes(planner, memory) if predicted is not None and one else [],
        target=_target(planner, target) if target is not None and one else None,
        ranks=None if one else over_ranks(setup, alone),
    )


def _predicted(
    planner: SlotPlanner, memory: Memory | None, slots: Sequence[TableSlots] | None
) -> tuple[Prediction | None, str | None]:
    if planner.hardware is None:
        return None, "no figures of this machine are known: measure it with hotrow probe, or name a file (--hardware)"
    try:
        return planner.predict(slots, memory), None
    except ValueError as error:
        return None, str(error)


# ---- tables


def _table_plans(planner: SlotPlanner, slots: Sequence[TableSlots] | None) -> list[TablePlan]:
    uses = None if planner.plan is None else planner.uses(planner.plain)
    plans = []
    for t, own in enumerate(planner.plain):
        pinned, cached = TableSlots(own.num_rows, 0) if slots is None else slots[t]
        rows = None if uses is None else uses[t].rows_per_step
        hits = None if uses is None else uses[t].hits_in_flight(TableSlots(pinned, cached))
        plans.append(
            TablePlan(
                name=own.name,
                rows=own.num_rows,
                record_bytes=own.record_bytes,
                pinned=pinned,
                cached=cached,
                on_disk=own.num_rows - pinned - cached,
                rows_per_step=rows,
                hit_rate=None if rows is None or hits is None else hits / rows if rows else 1.0,
                why=_why(planner, t, TableSlots(pinned, cached)),
            )
        )
    return plans


def _why(planner: SlotPlanner, t: int, slots: TableSlots) -> str:
    own = planner.plain[t]
    if slots.pinned == own.num_rows:
        return "whole in DRAM"
    if planner.plan is None:
        return "no access counts: as many cached rows as every other table that does not lie in DRAM whole"
    floor = max(MIN_ROWS, planner.plan.least_cached[own.name])
    if slots.pinned == 0 and slots.cached <= floor:
        return "room for the batches in flight alone: its bytes save less here than in other tables"
    cache = "a cache for batches in flight" if slots.cached <= 2 * floor else "a cache for rows that come again"
    first = f"its {slots.pinned:,} most used rows stay, " if slots.pinned else ""
    return f"{first}{cache}; one row more would save less than in other tables"


def _hits_missed(planner: SlotPlanner, memory: Memory, slots: Sequence[TableSlots]) -> float | None:
    if planner.plan is None:
        return None
    taken = planner.settled(memory)
    demands = taken.with_places(planner.plain)
    uses = planner.uses(demands)
    rows = sum(use.rows_per_step for use in uses)
    most = most_hits(uses, taken.budget_bytes(demands))
    return max(0.0, most - expected_hits(uses, slots)) / rows if rows else 0.0


# ---- what binds, and a wanted speed


def bind(what: str) -> str:
    """Returns in words that `what` binds."""
    return f"{what} {'bind' if what.startswith('rows') or what.endswith('reads') or ' and ' in what else 'binds'}"


def _target(planner: SlotPlanner, samples_per_s: float) -> Target:
    """Returns the least DRAM with which the predicted speed is at least `samples_per_s`."""
    batch_size, needed = planner.work.batch_size, planner.needed_bytes

    def speed(budget: int) -> float:
        return batch_size / step_at(planner, budget)

    whole = planner.predict(None)
    fastest = batch_size / whole.step_s
    if fastest < samples_per_s:
        text = (
            f"no amount of memory is enough: with every row in DRAM it is {fastest:,.0f} samples/s, "
            f"{samples_per_s - fastest:,.0f} too few, and {bind(whole.binds)}"
        )
        return Target(samples_per_s=samples_per_s, reached=False, memory_bytes=None, text=text)
    low, high = planner.least_bytes(1 << 16, "in_place"), needed
    if low < needed and speed(low) >= samples_per_s:
        high = low
    for _ in range(TARGET_STEPS if low < high else 0):
        middle = (low + high) // 2
        try:
            low, high = (low, middle) if speed(middle) >= samples_per_s else (middle, high)
        except ValueError:
            low = middle
    text = f"{size(high)} of DRAM for tables are enough (memory.dram={-(-high // 2**20)}MiB)"
    return Target(samples_per_s=samples_per_s, reached=True, memory_bytes=high, text=text)

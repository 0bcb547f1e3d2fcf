"""What a plan is and why, as data: `hotrow plan` prints it.

Where each table lies, what a step takes by phase and what binds, what would make it faster (changes.py), the least
memory for a wanted speed, and the step of several machines (over_ranks.py). Times are predictions by cost.py on a
hardware file. Nothing here trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotrow.base.files import size
from hotrow.base.machine import available_memory_bytes
from hotrow.config.schema import Config
from hotrow.costs.cost import Prediction
from hotrow.costs.hardware import Hardware
from hotrow.costs.modelled import modelled_by
from hotrow.costs.solve import expected_hits, most_saved
from hotrow.data.packed.reader import PackedDataset
from hotrow.forecast.changes import Change, changes, step_at
from hotrow.forecast.ranks import OverRanks, over_ranks
from hotrow.placement.budget import LEAST_ROWS, Memory, TableSlots
from hotrow.setup.beside import beside_bytes
from hotrow.setup.divide import Division, Step, step_of
from hotrow.setup.memory import FOLDER, choose, dram_budget
from hotrow.tables import TableConfig

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    config: Config,
    tables: Sequence[TableConfig],
    dataset: PackedDataset,
    folder: Path,
    *,
    hardware: Hardware | None = None,
    elsewhere: bool = False,
    num_ranks: int | None = None,
    target: float | None = None,
) -> Explanation:
    """Returns the plan of a run, and what would change it.

    folder: where the run would be. hardware: the machine; elsewhere: it is not this one, so its own threads, memory and
    disk count. num_ranks: machines like it that train together. target: wanted samples per second.
    Raises ValueError if the config does not fit, by how much, and if what is asked for needs figures that are missing.
    """
    beside = 0 if elsewhere else beside_bytes(config, dataset, tables)
    available = available_memory_bytes()
    if elsewhere:
        assert hardware is not None
        config, available = with_threads_of(hardware, config), int(hardware.dram_bytes.value)
    memory = None
    if num_ranks is None:
        memory, division = choose(
            config,
            tables,
            folder,
            dataset=dataset,
            hardware=hardware,
            elsewhere=elsewhere,
            beside_bytes=beside,
        )
    else:  # one machine may be too small
        budget = dram_budget(config, available, beside)
        division = Division(
            config=config,
            tables=tables,
            memory=Memory(dram=max(1, budget), ssd=folder / FOLDER),
            budget=budget,
            dataset=dataset,
            hardware=hardware,
            elsewhere=elsewhere,
        )
    slots = None if memory is None else division.slots_in(memory)[1]
    predicted, reason = _predicted(division, memory, slots)
    if reason and (target is not None or num_ranks is not None):
        raise ValueError(f"--target and --ranks need a prediction, and there is none: {reason}")
    batch_size = min(config.train.batch_size, dataset.split("train").num_rows)
    per_day = None if predicted is None else 86400 * division.written_bytes(slots, memory) / predicted.step_s
    rated = None if division.disk is None else division.disk.endurance_bytes
    return Explanation(
        needed_bytes=division.needed_bytes,
        dram_bytes=division.budget if memory is not None else division.needed_bytes,
        disk=None if memory is None else str(memory.folder),
        tables=[] if num_ranks is not None else _table_plans(division, slots),
        hits_missed=None if slots is None or memory is None else _hits_missed(division, memory, slots),
        hardware=None if hardware is None else {"name": hardware.name, "date": hardware.date},
        modelled=None if hardware is None else modelled_by(hardware),
        threads=None if predicted is None else division.work.threads,
        predicted=None if predicted is None or num_ranks is not None else step_of(predicted, batch_size),
        not_predicted=reason,
        written_bytes_per_day=per_day,
        rated_days=rated.value / per_day if rated is not None and per_day else None,
        changes=[] if predicted is None or num_ranks is not None else changes(division, memory),
        target=None if target is None or num_ranks is not None else _target(division, target),
        ranks=None if num_ranks is None else over_ranks(division, num_ranks, division.budget, folder),
    )


def with_threads_of(hardware: Hardware, config: Config) -> Config:
    """Returns the config with the most threads that the machine's steps are known for, if it says "auto"."""
    threads = [int(point.sizes.get("threads", 1)) for points in hardware.kernels.values() for point in points]
    if config.train.threads != "auto" or not threads:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"threads": max(threads)})})


def _predicted(
    division: Division, memory: Memory | None, slots: Sequence[TableSlots] | None
) -> tuple[Prediction | None, str | None]:
    if division.hardware is None:
        return None, "no figures of this machine are known: measure it with hotrow probe, or name a file (--hardware)"
    try:
        return division.predict(slots, memory), None
    except ValueError as error:
        return None, str(error)


# ---- tables


def _table_plans(division: Division, slots: Sequence[TableSlots] | None) -> list[TablePlan]:
    uses = None if division.plan is None else division.uses(division.plain)
    plans = []
    for t, own in enumerate(division.plain):
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
                why=_why(division, t, TableSlots(pinned, cached)),
            )
        )
    return plans


def _why(division: Division, t: int, slots: TableSlots) -> str:
    own = division.plain[t]
    if slots.pinned == own.num_rows:
        return "whole in DRAM"
    if division.plan is None:
        return "no access counts: as many cached rows as every other table that does not lie in DRAM whole"
    floor = max(LEAST_ROWS, division.plan.least_cached[own.name])
    if slots.pinned == 0 and slots.cached <= floor:
        return "room for the batches in flight alone: its bytes save less here than in other tables"
    cache = "a cache for batches in flight" if slots.cached <= 2 * floor else "a cache for rows that come again"
    first = f"its {slots.pinned:,} most used rows stay, " if slots.pinned else ""
    return f"{first}{cache}; one row more would save less than in other tables"


def _hits_missed(division: Division, memory: Memory, slots: Sequence[TableSlots]) -> float | None:
    if division.plan is None:
        return None
    taken = division.settled(memory)
    demands = taken.with_places(division.plain)
    uses = division.uses(demands)
    rows = sum(use.rows_per_step for use in uses)
    most = most_saved(uses, taken.budget_bytes(demands))
    return max(0.0, most - expected_hits(uses, slots)) / rows if rows else 0.0


# ---- what binds, and a wanted speed


def bind(what: str) -> str:
    """Returns in words that `what` binds."""
    return f"{what} {'bind' if what.startswith('rows') or what.endswith('reads') or ' and ' in what else 'binds'}"


def _target(division: Division, samples_per_s: float) -> Target:
    """Returns the least DRAM with which the predicted speed is at least `samples_per_s`."""
    batch_size, needed = division.work.batch_size, division.needed_bytes

    def speed(budget: int) -> float:
        return batch_size / step_at(division, budget)

    whole = division.predict(None)
    fastest = batch_size / whole.step_s
    if fastest < samples_per_s:
        text = (
            f"no amount of memory is enough: with every row in DRAM it is {fastest:,.0f} samples/s, "
            f"{samples_per_s - fastest:,.0f} too few, and {bind(whole.binds)}"
        )
        return Target(samples_per_s=samples_per_s, reached=False, memory_bytes=None, text=text)
    low, high = division.least_bytes(1 << 16, "in_place"), needed
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

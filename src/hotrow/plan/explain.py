"""What a plan is and why, as data: `hotrow plan` prints it.

Where each table lies, what a step takes by phase and what binds, what more memory, a faster disk, a GPU or a second
machine would change, the least memory for a wanted speed, and owners of tables over ranks. Times are predictions by
cost.py on a hardware file; whatever a machine that is not in it would do is called modelled. Nothing here trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotrow.base.files import size
from hotrow.base.machine import available_memory_bytes
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.sharded import part_of
from hotrow.parallel.shards import Shard
from hotrow.parallel.world import World
from hotrow.placement.budget import LEAST_ROWS, Memory, TableSlots
from hotrow.plan.choose import FOLDER, choose, dram_budget
from hotrow.plan.cost import Prediction, predict
from hotrow.plan.divide import Division, Sharing, Step, step_of
from hotrow.plan.hardware import Disk, Figure, Gpu, Hardware
from hotrow.plan.ranks import GREEDY, Owned, RankTable, TableLoad, greedy, slowest_s, solve_ranks, ways_of
from hotrow.plan.shards import shards_of
from hotrow.plan.solve import expected_hits, most_saved
from hotrow.plan.wire import share_of, wire_of_work
from hotrow.plan.work import Work
from hotrow.tables import TableConfig

FASTER = 2
"""How many times as fast the other disk is about which we say what it buys."""
GIB = 1 << 30
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
class Change:
    """What a change of the machine would do."""

    what: str
    samples_per_s: float | None
    gain: float | None
    """Its speed over that of the plan, less 1; None if nothing can be said."""
    cannot: str | None
    """Why nothing can be said."""
    modelled: bool
    """Whether it rests on a machine, or on steps, that nobody measured."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The least memory for a wanted speed."""

    samples_per_s: float
    reached: bool
    memory_bytes: int | None
    """DRAM for tables; None if no amount is enough."""
    text: str


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    """The step of several machines like this one that train the model together, a rank on each."""

    num_ranks: int
    capacity_bytes: int
    """DRAM for tables on every rank."""
    owners: dict[str, str]
    """By table: "replicated", "row", or "rank N"."""
    held_bytes: list[int]
    """By rank."""
    disk: str | None
    """Where the rows of a rank lie that its DRAM does not hold; None if all do."""
    step: Step
    """Of a rank."""
    gain: float | None
    """The speed over that of one machine, less 1; None if nothing is predicted of one."""
    best: Best | None
    """What other owners would change; None if the tables do not fit in the ranks' DRAM."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """Owners by which the tables of the slowest rank take least, all rows in DRAM: see plan/ranks.py."""

    table_ms: float
    """What the tables of the slowest rank take, as `OverRanks.owners` has it."""
    faster: float
    """The most by which another plan's slowest rank could be faster, as a share of that."""
    owners: dict[str, str]
    """Of the best plan that was found."""
    out_of_time: bool
    solved_s: float
    greedy: dict[str, float | None]
    """By rule: its slowest rank's time over the best plan's; None if its plan does not fit."""


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
    available = available_memory_bytes()
    if elsewhere:
        assert hardware is not None
        config, available = with_threads_of(hardware, config), int(hardware.dram_bytes.value)
    budget, memory = dram_budget(config, available), None
    if num_ranks is None:
        memory, division = choose(config, tables, folder, dataset=dataset, hardware=hardware, elsewhere=elsewhere)
    else:  # one machine may be too small
        nowhere = Memory(dram=max(1, budget), ssd=folder / FOLDER)
        division = Division(
            config=config, tables=tables, memory=nowhere, dataset=dataset, hardware=hardware, elsewhere=elsewhere
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
        dram_bytes=budget if memory is not None else division.needed_bytes,
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
        changes=[]
        if predicted is None or num_ranks is not None
        else _changes(division, memory, budget, slots, predicted, folder),
        target=None if target is None or num_ranks is not None else _target(division, target),
        ranks=None if num_ranks is None else over_ranks(division, num_ranks, budget, folder),
    )


def with_threads_of(hardware: Hardware, config: Config) -> Config:
    """Returns the config with the most threads that the machine's steps are known for, if it says "auto"."""
    threads = [int(point.sizes.get("threads", 1)) for points in hardware.kernels.values() for point in points]
    if config.train.threads != "auto" or not threads:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"threads": max(threads)})})


def modelled_by(hardware: Hardware) -> str | None:
    """Returns how the steps of a machine were found if some were not measured on it, else None."""
    points = (point for phase in hardware.kernels.values() for point in phase)
    if all(point.seconds.source == "measured" for point in points):
        return None
    return hardware.notes.get("kernels", "modelled from steps that nobody measured")


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
        hits = None if uses is None else uses[t].hits(TableSlots(pinned, cached))
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


# ---- what would change


def bind(what: str) -> str:
    """Returns in words that `what` binds."""
    return f"{what} {'bind' if what.startswith('rows') or what.endswith('reads') or ' and ' in what else 'binds'}"


def _changes(
    division: Division,
    memory: Memory | None,
    budget: int,
    slots: Sequence[TableSlots] | None,
    now: Prediction,
    folder: Path,
) -> list[Change]:
    """Returns what a change of the machine would do to the speed, the best first."""
    hardware = division.hardware
    assert hardware is not None
    batch_size, found = division.work.batch_size, []
    all_modelled = modelled_by(hardware) is not None

    def add(what: str, made: Callable[[], float], *, modelled: bool = False) -> None:
        speed, gain, cannot = None, None, None
        try:
            step_s = made()
            speed, gain = round(batch_size / step_s, 1), round(now.step_s / step_s - 1, 4)
        except ValueError as error:  # a figure is missing, or nothing fits
            cannot = str(error)
        found.append(
            Change(
                what=what,
                samples_per_s=speed,
                gain=gain,
                cannot=cannot,
                modelled=modelled or all_modelled,
            )
        )

    if slots is not None:
        missing, faster = division.needed_bytes - budget, replace(hardware, disks=[*map(_faster, hardware.disks)])
        if missing > GIB:
            add("1 GiB more of DRAM", lambda: _step_at(division, budget + GIB))
        add(f"{size(missing)} more of DRAM, which hold every row", lambda: division.predict(None).step_s)
        add(f"a disk {FASTER} times as fast", lambda: division.predict(slots, memory, faster).step_s, modelled=True)
    for gpu in hardware.gpus:
        add(f"dense layers on {gpu.name}, at most", lambda gpu=gpu: _on_gpu(division, now, gpu), modelled=True)  # type: ignore[misc]
    if hardware.network is not None:
        add("a second machine like this", lambda: _over_ranks_s(division, 2, folder), modelled=True)
    return sorted(found, key=lambda change: math.inf if change.gain is None else -change.gain)


def _step_at(division: Division, budget: int) -> float:
    """Returns a step's seconds with `budget` bytes of DRAM. Raises ValueError if a step does not fit in them."""
    if budget >= division.needed_bytes:
        return division.predict(None).step_s
    writes = division.writes(budget)
    if reason := division.short(budget, writes):
        raise ValueError(reason)
    memory, _, slots = division.divide(budget, writes)
    return division.predict(slots, memory).step_s


def _faster(disk: Disk) -> Disk:
    def times(figure: Figure) -> Figure:
        return replace(figure, value=FASTER * figure.value, low=None, high=None, source="assumed", note="another disk")

    return replace(
        disk,
        reads_per_s={depth: times(figure) for depth, figure in disk.reads_per_s.items()},
        writes_per_s={depth: times(figure) for depth, figure in disk.writes_per_s.items()},
        read_bytes_per_s=times(disk.read_bytes_per_s),
        write_bytes_per_s=times(disk.write_bytes_per_s),
    )


def _on_gpu(division: Division, now: Prediction, gpu: Gpu) -> float:
    """Returns the least that the step takes if dense layers run on the GPU, at its rate of large products.

    Tables stay on the CPU. Pooled rows go there and their gradients come back. Raises ValueError if the GPU's rate is
    not known.
    """
    work = division.work
    rates = [figure.value for name, figure in gpu.product_flops_per_s.items() if name == "fp32"]
    if not rates:
        raise ValueError(f"{gpu.name} has no product_flops_per_s of fp32")
    flops = 3 * 2 * sum(n * inputs * outputs for n, inputs, outputs in work.products)
    pooled_bytes = 4 * sum(
        work.batch_size * len(own.table.feature_names) * own.table.embedding_dim for own in work.tables
    )
    link_s = pooled_bytes * (1 / gpu.to_device_bytes_per_s.value + 1 / gpu.to_host_bytes_per_s.value)
    return now.step_s - now.seconds["dense"] + flops / rates[0] + link_s


def _target(division: Division, samples_per_s: float) -> Target:
    """Returns the least DRAM with which the predicted speed is at least `samples_per_s`."""
    batch_size, needed = division.work.batch_size, division.needed_bytes

    def speed(budget: int) -> float:
        return batch_size / _step_at(division, budget)

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


# ---- ranks


def over_ranks(division: Division, num_ranks: int, capacity_bytes: int, folder: Path) -> OverRanks:
    """Returns the step of `num_ranks` machines like the one of `division`, as `hotrow train` shares the tables.

    Raises ValueError if tables do not fit, or the network is not known.
    """
    config, whole = division.config, division.tables
    assert division.hardware is not None and division.dataset is not None
    if num_ranks < 2 or num_ranks > config.train.batch_size:
        raise ValueError(f"--ranks is {num_ranks}; give a number from 2 to train.batch_size, {config.train.batch_size}")
    memory, rank = _on_one_of(division, num_ranks, folder)
    assert rank.sharing is not None
    shards = rank.sharing.shards
    sizes = {own.name: own.record_bytes for own in division.plain}
    held_bytes = [
        sum(shards[t.name].num_local(t.num_embeddings, r, num_ranks) * sizes[t.name] for t in whole)
        for r in range(num_ranks)
    ]
    step = rank.step(memory)
    return OverRanks(
        num_ranks=num_ranks,
        capacity_bytes=capacity_bytes,
        owners={table.name: _owner_word(_owned(table, shards[table.name])) for table in whole},
        held_bytes=held_bytes,
        disk=None if memory is None else str(memory.folder),
        step=step,
        gain=_gain(division, step, folder),
        best=_best(division, rank.sharing, capacity_bytes),
    )


def _on_one_of(division: Division, num_ranks: int, folder: Path) -> tuple[Memory | None, Division]:
    """Returns where the rows of the first of several machines lie, and its division."""
    config, whole, dataset = division.config, division.tables, division.dataset
    assert dataset is not None
    world = World(0, num_ranks, num_ranks).in_parts(config.train.micro_batches or num_ranks)
    shards = shards_of(config, whole, dataset, num_ranks)
    held = [part_of(table, shards[table.name], world) for table in whole]
    memory, own = choose(
        config, held, folder, dataset=dataset, hardware=division.hardware, elsewhere=division.elsewhere
    )
    sharing = Sharing(
        tables=whole,
        shards=shards,
        num_ranks=num_ranks,
        micro_batches=world.micro_batches,
        wire_dtype=config.parallel.wire_dtype,
    )
    return memory, replace(own, sharing=sharing)


def _over_ranks_s(division: Division, num_ranks: int, folder: Path) -> float:
    memory, rank = _on_one_of(division, num_ranks, folder)
    return sum(rank.step(memory).step_ms.values()) / 1e3


def _gain(division: Division, step: Step, folder: Path) -> float | None:
    """Returns how much faster the step is than one machine's; None if the tables do not fit there."""
    try:
        memory, alone = choose(
            division.config,
            division.tables,
            folder,
            dataset=division.dataset,
            hardware=division.hardware,
            elsewhere=division.elsewhere,
        )
        return round(step.samples_per_s / alone.step(memory).samples_per_s - 1, 4)
    except ValueError:
        return None


def _owned(table: TableConfig, shard: Shard) -> Owned:
    if shard.prefix == table.num_embeddings:
        return Owned("replicated")
    return Owned("row") if shard.kind == "row" else Owned("table", shard.owner)


def _owner_word(owned: Owned) -> str:
    return owned.owner if owned.rank is None else f"rank {owned.rank}"


def _best(division: Division, sharing: Sharing, capacity_bytes: int) -> Best | None:
    """Returns what other owners would change, if all rows lie in DRAM."""
    tables = _rank_tables(division, sharing)
    try:
        plan = solve_ranks(tables, sharing.num_ranks, capacity_bytes)
    except ValueError:
        return None
    owned = [_owned(table, sharing.shards[table.name]) for table in division.tables]
    ours_s = slowest_s(tables, owned, sharing.num_ranks)
    others = {rule: greedy(tables, sharing.num_ranks, capacity_bytes, rule) for rule in GREEDY}
    return Best(
        table_ms=round(1e3 * ours_s, 4),
        faster=max(0.0, 1.0 - plan.bound_s / ours_s) if ours_s else 0.0,
        owners={table.name: _owner_word(each) for table, each in zip(tables, plan.tables, strict=True)},
        out_of_time=plan.out_of_time,
        solved_s=round(plan.solved_s, 3),
        greedy={rule: None if each is None else round(each / plan.slowest_s, 4) for rule, each in others.items()},
    )


def _rank_tables(division: Division, sharing: Sharing) -> list[RankTable]:
    work, hardware, num_ranks = division.work, division.hardware, sharing.num_ranks
    assert hardware is not None and hardware.network is not None, "the step was predicted"
    part, _ = share_of(work, work, sharing.shards, num_ranks=num_ranks, micro_batches=sharing.micro_batches)
    of_all, of_one = (_loads(each, hardware) for each in (work, part))
    return [
        ways_of(
            own.table,
            own.record_bytes,
            of_all=whole,
            of_one=one,
            wire=wire_of_work(own, work.batch_size, num_ranks, wire_dtype=sharing.wire_dtype),
            num_ranks=num_ranks,
            byte_s=1 / hardware.network.bytes_per_s.value,
        )
        for own, whole, one in zip(work.tables, of_all, of_one, strict=True)
    ]


def _loads(work: Work, hardware: Hardware) -> list[TableLoad]:
    """Returns what each table takes among the others, which share its caches: the step less the step without it."""
    whole, loads = predict(work, hardware).seconds, []
    for t in range(len(work.tables)):
        without = predict(replace(work, tables=work.tables[:t] + work.tables[t + 1 :]), hardware).seconds
        loads.append(TableLoad(*(max(0.0, whole[phase] - without[phase]) for phase in ("lookup", "update"))))
    return loads

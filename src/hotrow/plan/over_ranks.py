"""The step of several machines that train a config together, a rank on each, and what other owners would change.

Tables are shared as `hotrow train` shares them. Owners by which the slowest rank takes least come from ranks.py, for
rows that all lie in DRAM; what a table takes on a rank comes from cost.py, one table at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hotrow.config.schema import Config
from hotrow.parallel.sharded import part_of
from hotrow.parallel.shards import Shard
from hotrow.parallel.world import World
from hotrow.placement.budget import Memory
from hotrow.plan.choose import choose
from hotrow.plan.cost import predict
from hotrow.plan.demand import tables_of
from hotrow.plan.divide import Division, Sharing, Step
from hotrow.plan.hardware import Hardware
from hotrow.plan.ranks import GREEDY, Owned, RankTable, TableLoad, greedy, slowest_s, solve_ranks, ways_of
from hotrow.plan.shards import shards_of
from hotrow.plan.wire import share_of, wire_of_work
from hotrow.plan.work import Work
from hotrow.tables import TableConfig


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
    rank = rank_of(division, division.config, num_ranks)
    memory, own = choose(
        rank.config, rank.tables, folder, dataset=rank.dataset, hardware=rank.hardware, elsewhere=rank.elsewhere
    )
    return memory, replace(own, sharing=rank.sharing)


def rank_of(division: Division, config: Config, num_ranks: int, *, local_size: int = 1) -> Division:
    """Returns the division of the first of several ranks, in as much DRAM. local_size: ranks on a machine."""
    dataset = division.dataset
    assert dataset is not None
    whole = tables_of(config, dataset)
    world = World(0, num_ranks, num_ranks).in_parts(config.train.micro_batches or num_ranks)
    shards = shards_of(config, whole, dataset, num_ranks)
    sharing = Sharing(
        tables=whole,
        shards=shards,
        num_ranks=num_ranks,
        micro_batches=world.micro_batches,
        local_size=local_size,
        wire_dtype=config.parallel.wire_dtype,
    )
    held = [part_of(table, shards[table.name], world) for table in whole]
    return replace(division, config=config, tables=held, sharing=sharing, _uses={}, _weighted={})


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

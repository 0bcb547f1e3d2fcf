"""The step of several machines that train a config together, a rank on each, as `hotrow train` shares the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotrow.config.schema import Config
from hotrow.costs.demand import demands_of, tables_of
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import table_of_rank
from hotrow.parallel.shards import Shard
from hotrow.setup.setup import Setup
from hotrow.setup.shards import shards_of
from hotrow.setup.slots import Sharing, SlotPlanner, Step
from hotrow.tables import TableConfig


@dataclass(frozen=True, kw_only=True)
class OverRanks:
    """The step of several machines like this one that train the model together, a rank on each."""

    num_ranks: int
    capacity_bytes: int
    """DRAM for tables on every rank."""
    owners: dict[str, str]
    """By table: "replicated", "row", "rank N", or "columns on ranks N, M"."""
    held_bytes: list[int]
    """By rank."""
    disk: str | None
    """Where the rows of a rank lie that its DRAM does not hold; None if all do."""
    step: Step
    """The step of a rank."""
    gain: float | None
    """The speed over the speed of one machine, less 1; None if nothing is predicted of one."""


def over_ranks(setup: Setup, alone: Setup | None) -> OverRanks:
    """Returns the step of the ranks of `setup`, a machine each. alone: the same run on one; if None, it does not fit.

    Raises ValueError if the network is not known.
    """
    num_ranks, planner, shards = setup.ranks.size, setup.planner, setup.shards
    sizes = {own.name: own.record_bytes for own in demands_of(setup.config, setup.tables, training=True)}
    held_bytes = [
        round(sum(_num_held(t, shards[t.name], r, num_ranks) * sizes[t.name] for t in setup.tables))
        for r in range(num_ranks)
    ]
    step = planner.step(setup.below)
    return OverRanks(
        num_ranks=num_ranks,
        capacity_bytes=planner.budget,
        owners={table.name: _owner(table, shards[table.name]) for table in setup.tables},
        held_bytes=held_bytes,
        disk=None if setup.below is None else str(setup.below.folder),
        step=step,
        gain=_gain(step, alone),
    )


def as_one_rank(planner: SlotPlanner, config: Config, num_ranks: int, *, local_size: int = 1) -> SlotPlanner:
    """Returns the planner of the first of several ranks, in as much DRAM. local_size: ranks on a machine."""
    dataset = planner.dataset
    assert dataset is not None
    whole = tables_of(config, dataset)
    ranks = Ranks(0, num_ranks, num_ranks).with_micro_batches(config.train.micro_batches or num_ranks)
    shards = shards_of(config, whole, dataset, num_ranks)
    sharing = Sharing(
        tables=whole,
        shards=shards,
        num_ranks=num_ranks,
        micro_batches=ranks.micro_batches,
        local_size=local_size,
        wire_dtype=config.parallel.wire_dtype,
    )
    held = [table_of_rank(table, shards[table.name], ranks) for table in whole]
    return replace(planner, config=config, tables=held, sharing=sharing, _uses={}, _weighted={})


def _gain(step: Step, alone: Setup | None) -> float | None:
    if alone is None:
        return None
    try:
        return round(step.samples_per_s / alone.planner.step(alone.below).samples_per_s - 1, 4)
    except ValueError:
        return None


def _num_held(table: TableConfig, shard: Shard, rank: int, num_ranks: int) -> float:
    """Returns how many rows of a table a rank holds; one of some columns alone counts as their share of it."""
    return shard.num_local(table.num_embeddings, rank, num_ranks) * shard.width(table.embedding_dim, rank)


def _owner(table: TableConfig, shard: Shard) -> str:
    """Returns who holds a table, as `OverRanks.owners` says it."""
    if shard.prefix == table.num_embeddings:
        return "replicated"
    owners = ", ".join(map(str, shard.owners))
    return "row" if shard.kind == "row" else f"columns on ranks {owners}" if shard.is_cut else f"rank {owners}"

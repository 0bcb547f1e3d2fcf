"""The step of several machines that train a config together, a rank on each, as `hotrow train` shares the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hotrow.config.schema import Config
from hotrow.costs.demand import tables_of
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import part_of
from hotrow.parallel.shards import Shard
from hotrow.placement.budget import Memory
from hotrow.setup.divide import Division, Sharing, Step
from hotrow.setup.memory import choose
from hotrow.setup.shards import shards_of
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
        owners={table.name: _owner(table, shards[table.name]) for table in whole},
        held_bytes=held_bytes,
        disk=None if memory is None else str(memory.folder),
        step=step,
        gain=_gain(division, step, folder),
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
    held = [part_of(table, shards[table.name], ranks) for table in whole]
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


def _owner(table: TableConfig, shard: Shard) -> str:
    """Returns who holds a table, as `OverRanks.owners` says it."""
    if shard.prefix == table.num_embeddings:
        return "replicated"
    return "row" if shard.kind == "row" else f"rank {shard.owner}"

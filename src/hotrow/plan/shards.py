"""How the rows of each table are shared among the processes of a run: what its accesses say of bytes on the wire.

Copies never save bytes (wire.py), but they cost none where every rank looks a row up at every step, and no lookup waits
for them. So small tables are replicated, whose rows are such, and larger ones are dealt out row by row, which spreads
popular rows evenly. parallel/shards.py says where the rows then lie.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.shards import Shard
from hotrow.plan.demand import record_bytes
from hotrow.plan.solve import rates_of
from hotrow.plan.wire import Accesses, Wire, wire_of_table
from hotrow.tables import TableConfig

SMALL_SHARE = 0.01
"""Small tables are replicated as long as this adds at most so much to the bytes on the wire of a step, and to the bytes
of all tables."""


def shards_of(
    config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, num_ranks: int
) -> dict[str, Shard]:
    """Returns by table how `num_ranks` ranks share its rows: what `config.parallel` says, the rest as counted.

    Raises ValueError, naming the field and the cure, for a table that there is not, and for hot rows of a dataset that
    has no access counts.
    """
    asked = {} if isinstance(config.parallel.sharding, str) else config.parallel.sharding
    _check_names(asked, tables)
    wires = [wire_of(config, table, dataset, num_ranks) for table in tables]
    small = small_tables(config, tables, wires)
    kinds = {t.name: asked.get(t.name, "replicated" if t.name in small else "row") for t in tables}
    owners = _owners([(t, wire) for t, wire in zip(tables, wires, strict=True) if kinds[t.name] == "table"], num_ranks)
    split = [table for table in tables if kinds[table.name] != "replicated"]
    hot = hot_prefixes(split, dataset, config.parallel.hot_rows)
    found = {}
    for table in tables:
        name, kind = table.name, kinds[table.name]
        if kind == "replicated":
            found[name] = Shard(prefix=table.num_embeddings)
        else:
            found[name] = Shard(prefix=hot[name], kind=kind, owner=owners.get(name, 0))
    return found


def _check_names(asked: Mapping[str, str], tables: Sequence[TableConfig]) -> None:
    names = [table.name for table in tables]
    for name in asked:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the tables are {', '.join(names)}"
            raise ValueError(f"parallel.sharding names the table {name!r}, which the dataset does not have; {hint}")


def wire_of(config: Config, table: TableConfig, dataset: PackedDataset, num_ranks: int) -> Wire:
    """Returns what the rows of a table send in a step; without access counts, as if ids were uniform."""
    num_samples, batch_size = dataset.split("train").num_rows, config.train.batch_size
    if dataset.has_counts and num_samples:
        steps = max(1.0, num_samples / batch_size)
        rates, rows = rates_of(table.name, dataset.counts(table.name), steps)
        return wire_of_table(table, Accesses(rates[::-1], rows[::-1], steps), num_ranks)
    rate = batch_size * len(table.feature_names) / table.num_embeddings
    return wire_of_table(table, Accesses(np.array([rate]), np.array([float(table.num_embeddings)]), None), num_ranks)


def small_tables(config: Config, tables: Sequence[TableConfig], wires: Sequence[Wire]) -> set[str]:
    """Returns the tables that cost next to nothing if every rank holds them, the smallest first."""
    optimizer = config.optimizer.sparse.name
    sizes = [table.num_embeddings * record_bytes(table, optimizer) for table in tables]
    wire_left, bytes_left = SMALL_SHARE * sum(wire.split_bytes for wire in wires), SMALL_SHARE * sum(sizes)
    small = set[str]()
    for _, t in sorted((num_bytes, t) for t, num_bytes in enumerate(sizes)):
        bytes_left -= sizes[t]
        wire_left -= max(0.0, wires[t].replicated_bytes - wires[t].split_bytes)
        if bytes_left < 0 or wire_left < 0:
            break
        small.add(tables[t].name)
    return small


def _owners(tables: Sequence[tuple[TableConfig, Wire]], num_ranks: int) -> dict[str, int]:
    """Returns the ranks that get whole tables: the table with most rows per step to the rank that has fewest so far."""
    loads, owners = [0.0] * num_ranks, {}
    for table, wire in sorted(tables, key=lambda each: -each[1].rows * each[0].embedding_dim):
        owners[table.name] = rank = loads.index(min(loads))
        loads[rank] += wire.rows * table.embedding_dim
    return owners


def hot_prefixes(tables: Sequence[TableConfig], dataset: PackedDataset, share: float) -> dict[str, int]:
    """Returns by table how many of its first rows are hot: at most `share` of all rows, those with most accesses.

    Rows are numbered by popularity, so the rows with at least so many accesses are a prefix; row 0, of rare and unseen
    ids, belongs to it if row 1 does. Raises ValueError if the dataset has no access counts, unless `share` is 0.
    """
    if not share:
        return dict.fromkeys((table.name for table in tables), 0)
    if not dataset.has_counts:
        raise ValueError(
            f"parallel.hot_rows is {share}, but {dataset.path} has no access counts, which say what rows are hot: "
            "prepare the data with hotrow prepare, or set parallel.hot_rows to 0"
        )
    most = math.floor(share * sum(table.num_embeddings for table in tables))

    def prefixes(accesses: int) -> dict[str, int]:
        return {table.name: _with_accesses(dataset, table, accesses) for table in tables}

    highest = max((int(dataset.counts(table.name).max()) for table in tables), default=0)
    few = bisect_left(range(1, highest + 2), True, key=lambda n: sum(prefixes(n).values()) <= most)  # noqa: FBT003
    return prefixes(1 + few)


def _with_accesses(dataset: PackedDataset, table: TableConfig, accesses: int) -> int:
    """Returns how many of a table's first rows have at least so many accesses."""
    counts = dataset.counts(table.name)
    end = 1 + bisect_left(range(1, len(counts)), True, key=lambda row: bool(counts[row] < accesses))  # noqa: FBT003
    return end if end > 1 or counts[0] >= accesses else 0


def shards_line(tables: Sequence[TableConfig], shards: Mapping[str, Shard], num_ranks: int) -> str:
    """Returns how the ranks share the tables, as a line for the user."""
    copied = [table for table in tables if shards[table.name].prefix == table.num_embeddings]
    rest = [table for table in tables if table not in copied]
    owned = sum(shards[table.name].kind == "table" for table in rest)
    hot = sum(shards[table.name].prefix for table in rest)
    parts = [f"{len(copied)} on every rank", f"{len(rest) - owned} dealt out row by row", f"{owned} whole on one rank"]
    said = ", ".join(part for part in parts if not part.startswith("0 "))
    also = f", and {hot:,} hot rows of these on every rank" if hot else ""
    return f"{num_ranks} ranks share {len(tables)} tables: {said}{also}"

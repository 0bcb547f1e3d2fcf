"""How the rows of each table are shared among the processes of a run, and what travels of them: what its accesses say
of bytes on the wire.

Copies never save bytes (wire.py), but they cost none where every rank looks a row up at every step, and no lookup waits
for them. Small tables, whose rows every rank needs at nearly every step, are replicated. Larger ones are dealt out row
by row, which spreads popular rows evenly. Bags of many ids make pooled vectors fewer bytes than rows. Tables with such
bags are given to one rank each, if that leaves ranks with about as many rows and lookups as before. If it does not, the
table that is most of a rank's share is cut by columns for one more rank, as long as the ids, which go to each of them,
leave pooled vectors fewer bytes.
parallel/shards.py says where the rows then lie.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotrow.base.records import nearest
from hotrow.config.schema import Config, Owner
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.shards import Shard, block_ends, most_owners
from hotrow.setup.demand import record_bytes
from hotrow.setup.divide import rates_of
from hotrow.setup.wire import Accesses, Wire
from hotrow.tables import TableConfig

SMALL_SHARE = 0.01
"""Small tables are replicated as long as this adds at most this much to bytes on the wire and of all tables."""
MAX_POOLED = 0.8
"""Pooled vectors are chosen if they take at most this share of the bytes of rows, which spread every table's work."""
MAX_UNEVEN = 1.2
"""With whole tables on single ranks, no rank may have more bytes of rows, or more lookups, than this times the mean."""


def shards_of(
    config: Config,
    tables: Sequence[TableConfig],
    dataset: PackedDataset,
    num_ranks: int,
    *,
    hot: Mapping[str, int] | None = None,
) -> dict[str, Shard]:
    """Returns by table how `num_ranks` ranks share its rows: what `config.parallel` says, the rest as counted.

    hot: by table, how many of its first rows every rank is to hold at least, because hot batches need no others; None
    if no batches are hot.
    Raises ValueError, naming the field and the cure, for a table that there is not, for hot rows of a dataset that has
    no access counts, and for pooled vectors of a table that no single rank holds, or of which sequences are looked up.
    """
    wires = {table.name: wire_of(config, table, dataset, num_ranks) for table in tables}
    found = shards_by_bytes(config, tables, wires, num_ranks, counted=dataset.has_counts and hot is None)
    rest = [table for table in tables if not found[table.name].prefix and found[table.name].exchange == "rows"]
    prefixes = hot_prefixes(rest, dataset, config.parallel.hot_rows)
    prefixes = {name: max(prefix, (hot or {}).get(name, 0)) for name, prefix in prefixes.items()}
    return {name: replace(shard, prefix=prefixes.get(name, shard.prefix)) for name, shard in found.items()}


def shards_by_bytes(
    config: Config, tables: Sequence[TableConfig], wires: Mapping[str, Wire], num_ranks: int, *, counted: bool
) -> dict[str, Shard]:
    """Returns shards by what each table sends, leaving hot rows out. counted: whether `wires` rest on access counts; if
    so, they may say which tables have owners that pool."""
    sharding = {} if isinstance(config.parallel.sharding, str) else config.parallel.sharding
    _check_names("sharding", sharding, tables)
    sizes = {table.name: table.num_embeddings * record_bytes(table, config.optimizer.sparse.name) for table in tables}
    small = _small(tables, wires, sizes)
    kinds = {table.name: sharding.get(table.name, "replicated" if table.name in small else "row") for table in tables}
    # An optimizer that keeps a number for each whole row needs whole rows.
    whole = {table.name for table in tables} if config.optimizer.sparse.name == "row_wise_adagrad" else {*sharding}
    cut = _asked_columns(config, tables, num_ranks)
    asked = _asked_pooled(config, kinds, tables) - cut.keys()
    named = [table for table in tables if table.name in asked]
    pooled = pooled_owners(named, wires, sizes, num_ranks, whole=whole, kept=asked)
    if counted and not config.parallel.hot_rows and config.model.network.lookup != "sequence":
        pooled |= _counted_pooled(config, kinds, tables, wires, sizes, num_ranks, whole)
    pooled |= cut
    kinds |= dict.fromkeys(pooled, "table")
    loads = {t.name: _load(t, wires[t.name], pooled=t.name in pooled) for t in tables if kinds[t.name] == "table"}
    owners = _owners(loads, num_ranks, {t.name: _widths(t, len(pooled[t.name])) for t in tables if t.name in pooled})
    found = {}
    for table in tables:
        name, kind = table.name, kinds[table.name]
        if kind == "replicated":
            found[name] = Shard(prefix=table.num_embeddings)
        elif kind == "row":
            found[name] = Shard()
        else:
            found[name] = shard_of(owners[name], pooled=name in pooled)
    return found


def shard_of(owners: Sequence[int], *, pooled: bool) -> Shard:
    """Returns the shard of a table of which one rank, or several together, have all columns."""
    owner = owners[0] if len(owners) == 1 else tuple(owners)
    return Shard(kind="table", owner=owner, exchange="pooled" if pooled else "rows")


def _check_names(option: str, asked: Mapping[str, str], tables: Sequence[TableConfig]) -> None:
    names = [table.name for table in tables]
    for name in asked:
        if name not in names:
            hint = nearest(name, names) or f"; the tables are {', '.join(names)}"
            raise ValueError(f"parallel.{option} names the table {name!r}, which the dataset does not have{hint}")


def _asked_columns(config: Config, tables: Sequence[TableConfig], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """The tables that `parallel.sharding` cuts by columns, with their ranks. Raises ValueError if they cannot be."""
    sharding, exchange = config.parallel.sharding, config.parallel.exchange
    named = {} if isinstance(sharding, str) else sharding
    found = [table for table in tables if named.get(table.name) == "column"]
    for table in found:
        own = exchange if isinstance(exchange, str) else exchange.get(table.name, "auto")
        obstacles = {
            "optimizer.sparse.name is row_wise_adagrad, which keeps a number for each whole row: choose adagrad": (
                config.optimizer.sparse.name == "row_wise_adagrad"
            ),
            f"model {config.model.name} looks up sequences, which take whole rows: choose row": (
                config.model.network.lookup == "sequence"
            ),
            "parallel.exchange says rows: set it to auto or pooled": own == "rows",
        }
        if text := next((text for text, applies in obstacles.items() if applies), None):
            raise ValueError(f"parallel.sharding says 'column' for table {table.name!r}, but {text}")
    return {table.name: tuple(range(most_owners(table.embedding_dim, num_ranks))) for table in found}


def _asked_pooled(config: Config, kinds: Mapping[str, Owner], tables: Sequence[TableConfig]) -> set[str]:
    """Returns the tables for which `parallel.exchange` asks for pooled vectors. Raises ValueError if they have none."""
    sharding, exchange = config.parallel.sharding, config.parallel.exchange
    if isinstance(exchange, str):
        found = {name for name, kind in kinds.items() if kind != "replicated" and exchange == "pooled"}
    else:
        _check_names("exchange", exchange, tables)
        found = {name for name, own in exchange.items() if own == "pooled"}
    for name in sorted(found):
        if config.model.network.lookup == "sequence":
            raise ValueError(
                f"parallel.exchange asks for pooled vectors of table {name!r}, but model {config.model.name} looks up "
                "sequences, whose rows travel: set it to auto or rows"
            )
        if not isinstance(sharding, str) and sharding.get(name, "table") not in ("table", "column"):
            raise ValueError(
                f"parallel.exchange asks for pooled vectors of table {name!r}, which one rank must hold, but "
                f"parallel.sharding says {sharding[name]!r}: set that to table, or the table's exchange to rows"
            )
    return found


def _counted_pooled(
    config: Config,
    kinds: Mapping[str, Owner],
    tables: Sequence[TableConfig],
    wires: Mapping[str, Wire],
    sizes: Mapping[str, int],
    num_ranks: int,
    whole: Collection[str],
) -> dict[str, tuple[int, ...]]:
    """Returns the tables that `parallel.exchange` leaves open and whose pooled vectors are fewer bytes, with as many
    ranks as should own them. whole: tables of one owner."""
    sharding, exchange = config.parallel.sharding, config.parallel.exchange
    named = set() if isinstance(exchange, str) else set(exchange)
    left = [table for table in tables if exchange != "rows" and table.name not in named]
    owned = [t for t in left if kinds[t.name] == "table" and _is_fewer(wires[t.name])]
    free = [table for table in left if kinds[table.name] == "row" and table.name not in sharding]
    return {table.name: (0,) for table in owned} | pooled_owners(free, wires, sizes, num_ranks, whole=whole)


def _is_fewer(wire: Wire, num_owners: int = 1) -> bool:
    pooled_bytes = wire.pooled_bytes + (num_owners - 1) * wire.owner_bytes
    return pooled_bytes <= MAX_POOLED * wire.split_bytes and wire.lookups > 0


def pooled_owners(
    tables: Sequence[TableConfig],
    wires: Mapping[str, Wire],
    sizes: Mapping[str, int],
    num_ranks: int,
    *,
    whole: Collection[str] = (),
    kept: Collection[str] = (),
) -> dict[str, tuple[int, ...]]:
    """Returns, of tables that would be dealt out row by row, those that owners should hold and pool, with these.

    sizes: bytes by table. As long as ranks would be uneven, the table of which a rank has the largest share of all
    lookups or bytes gets one more owner, if its pooled vectors are then still fewer bytes, and is left out if not.
    whole: tables of one owner; kept: tables that are not left out.
    """
    loads = {table.name: _load(table, wires[table.name], pooled=True) for table in tables}
    amounts = loads, {name: float(sizes[name]) for name in loads}
    most = {t.name: 1 if t.name in whole else most_owners(t.embedding_dim, num_ranks) for t in tables}
    widths = {t.name: [1.0] for t in tables if t.name in kept or _is_fewer(wires[t.name])}

    def share(name: str) -> float:
        return max(own[name] / max(sum(own.values()), 1.0) for own in amounts) * max(widths[name])

    def may_grow(name: str) -> bool:
        return len(widths[name]) < most[name] and _is_fewer(wires[name], len(widths[name]) + 1)

    while True:
        owners = _owners({name: loads[name] for name in widths}, num_ranks, widths)
        able = [table for table in tables if table.name in widths and (table.name not in kept or may_grow(table.name))]
        if not able or max(_unevenness(owners, own, num_ranks, widths) for own in amounts) <= MAX_UNEVEN:
            return owners
        table = max(reversed(able), key=lambda table: share(table.name))
        if may_grow(table.name):
            widths[table.name] = _widths(table, len(widths[table.name]) + 1)
        else:
            del widths[table.name]


def _widths(table: TableConfig, count: int) -> list[float]:
    """Returns the shares of a table's columns that `count` owners have, in their order."""
    ends = block_ends(table.embedding_dim, count)
    return [(end - start) / table.embedding_dim for start, end in zip([0, *ends], ends, strict=False)]


def _unevenness(
    owners: Mapping[str, Sequence[int]],
    amounts: Mapping[str, float],
    num_ranks: int,
    widths: Mapping[str, Sequence[float]],
) -> float:
    """Returns how many times the mean the fullest rank has, if tables without an owner are dealt out evenly."""
    mean, owned = sum(amounts.values()) / num_ranks, [0.0] * num_ranks
    for name, ranks in owners.items():
        for rank, width in zip(ranks, widths[name], strict=True):
            owned[rank] += amounts[name] * width
    return (max(owned) + mean - sum(owned) / num_ranks) / (mean or 1.0)


def wire_of(config: Config, table: TableConfig, dataset: PackedDataset, num_ranks: int) -> Wire:
    """Returns what a table sends in a step; without access counts, as if bags had one id and ids were uniform."""
    num_samples, batch_size = dataset.split("train").num_rows, config.train.batch_size
    if dataset.has_counts and num_samples:
        steps = max(1.0, num_samples / batch_size)
        rates, (rows,) = rates_of(table.name, dataset.counts(table.name), steps, np.array([0, table.num_embeddings]))
        accesses = Accesses(rates[::-1], rows[::-1], steps)
        lookups_per_bag = float(rates @ rows) * steps / num_samples / len(table.feature_names)
        jagged = not math.isclose(lookups_per_bag, 1.0, rel_tol=1e-6)  # bags of several ids are of any length
    else:
        rate = batch_size * len(table.feature_names) / table.num_embeddings
        accesses, jagged = Accesses(np.array([rate]), np.array([float(table.num_embeddings)]), None), False
    of_all, of_one = (accesses.distinct(share, num_ranks) for share in (1.0, 1 / num_ranks))
    return Wire.of(
        table,
        batch_size,
        num_ranks,
        of_one=of_one,
        of_all=of_all,
        lookups=float(accesses.rates @ accesses.rows),
        jagged=jagged,
        wire_dtype=config.parallel.wire_dtype,
    )


def _small(tables: Sequence[TableConfig], wires: Mapping[str, Wire], sizes: Mapping[str, int]) -> set[str]:
    """Returns the tables that cost next to nothing if every rank holds them, the smallest first."""
    wire_left = SMALL_SHARE * sum(wire.split_bytes for wire in wires.values())
    bytes_left = SMALL_SHARE * sum(sizes.values())
    small = set[str]()
    for table in sorted(tables, key=lambda table: sizes[table.name]):
        bytes_left -= sizes[table.name]
        wire_left -= max(0.0, wires[table.name].replicated_bytes - wires[table.name].split_bytes)
        if bytes_left < 0 or wire_left < 0:
            break
        small.add(table.name)
    return small


def _load(table: TableConfig, wire: Wire, *, pooled: bool) -> float:
    """Returns the numbers that an owner reads in a step: of each different row once, or to pool them."""
    return table.embedding_dim * (wire.lookups if pooled else wire.rows)


def _owners(
    loads: Mapping[str, float], num_ranks: int, widths: Mapping[str, Sequence[float]]
) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that get tables: the table with the largest load in one block of columns to the ranks that have
    least so far, the widest block to the first of them. widths: of the blocks; one block if a table is not named."""
    of_ranks, owners = [0.0] * num_ranks, {}
    blocks = {name: widths.get(name, [1.0]) for name in loads}
    for name in sorted(loads, key=lambda name: -loads[name] * max(blocks[name])):
        least = iter(sorted(range(num_ranks), key=of_ranks.__getitem__))
        ranks = {k: next(least) for k in sorted(range(len(blocks[name])), key=lambda k: -blocks[name][k])}
        owners[name] = tuple(ranks[k] for k in range(len(ranks)))
        for rank, width in zip(owners[name], blocks[name], strict=True):
            of_ranks[rank] += loads[name] * width
    return owners


def hot_prefixes(tables: Sequence[TableConfig], dataset: PackedDataset, share: float) -> dict[str, int]:
    """Returns by table how many of its first rows are hot: at most `share` of all rows, those with most accesses.

    Rows are numbered by popularity, so the rows with enough accesses are a prefix; row 0, of rare and unseen
    ids, belongs to it if row 1 does. In a later day of a chain they may lie anywhere, and as many first rows are taken:
    most ids that were popular on the first day still are. Raises ValueError if the dataset has no access counts, unless
    `share` is 0.
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
    """Returns how many of a table's first rows have at least that many accesses; in a later day, of which new rows are
    behind older ones, how many of all its rows."""
    counts = dataset.counts(table.name)
    if not dataset.is_ranked:
        return int(np.count_nonzero(counts >= accesses))
    end = 1 + bisect_left(range(1, len(counts)), True, key=lambda row: bool(counts[row] < accesses))  # noqa: FBT003
    return end if end > 1 or counts[0] >= accesses else 0


def shards_line(tables: Sequence[TableConfig], shards: Mapping[str, Shard], num_ranks: int) -> str:
    """Returns how the ranks share the tables, as a line for the user."""
    copied = [table for table in tables if shards[table.name].prefix == table.num_embeddings]
    rest = [table for table in tables if table not in copied]
    owned = sum(shards[table.name].kind == "table" for table in rest)
    hot = sum(shards[table.name].prefix for table in rest)
    pooled = sum(shards[table.name].exchange == "pooled" for table in rest)
    cut = sum(shards[table.name].is_cut for table in rest)
    parts = [f"{len(copied)} on every rank", f"{len(rest) - owned} dealt out row by row"]
    parts += [f"{owned - pooled} whole on one rank", f"{pooled - cut} whole on one rank that sends pooled vectors"]
    parts += [f"{cut} cut by columns among ranks that send pooled vectors"]
    said = ", ".join(part for part in parts if not part.startswith("0 "))
    also = f", and {hot:,} hot rows of these on every rank" if hot else ""
    return f"{num_ranks} ranks share {len(tables)} tables: {said}{also}"

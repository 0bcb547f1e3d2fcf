"""hotrow.setup.shards: who holds a table, from counted bytes on the wire; what is asked for, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.batch import KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.parallel.messages import WireDtype, narrow
from hotrow.parallel.pooled import _pack
from hotrow.parallel.shards import Shard
from hotrow.setup.shards import MAX_UNEVEN, SMALL_SHARE, hot_prefixes, pooled_owners, shards_line, shards_of, wire_of
from hotrow.setup.wire import Distinct, Wire
from hotrow.tables import Dtype, TableConfig
from loops import looped

BATCH, SAMPLES = 1000, 200_000


def table(name: str, num_rows: int, dim: int = 16, dtype: Dtype = "float32") -> TableConfig:
    return TableConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=(name,), dtype=dtype)


def zipf(num_rows: int, exponent: float = 1.1) -> np.ndarray:
    chance = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    counts = np.floor(chance / chance.sum() * SAMPLES).astype(np.uint32)
    counts[0] = SAMPLES - int(counts[1:].sum())
    return counts


TABLES = [table("sex", 3), table("hour", 24), table("user", 200_000), table("item", 100_000), table("site", 90_000)]
COUNTS = {each.name: zipf(each.num_embeddings) for each in TABLES}


def dataset(counts: dict[str, np.ndarray] | None = None) -> Any:
    counts = COUNTS if counts is None else counts
    split, has = SimpleNamespace(num_rows=SAMPLES), bool(counts)
    of = {"counts": lambda name: counts[name], "split": lambda name: split}
    return SimpleNamespace(path=Path("data"), has_counts=has, is_ranked=has, **of)


def config(**parallel: Any) -> Any:
    return make_config({"data": "d", "train": {"batch_size": BATCH}, "parallel": parallel})


@looped("num_ranks", [2, 3, 4, 8])
@looped("dtype", ["float32", "float16"])
def test_bytes_against_drawn_batches(num_ranks: int, dtype: Dtype) -> None:
    """Every row and sum that crosses the wire, counted one by one over drawn batches."""
    own, rng, steps = table("item", 100_000, dtype=dtype), np.random.default_rng(1), 60
    cumulated = np.cumsum(COUNTS["item"] / COUNTS["item"].sum())
    row, total = 16 * (4 if dtype == "float32" else 2), 16 * 4
    split_bytes = replicated_bytes = rows = 0
    for _ in range(steps):
        parts = np.array_split(np.searchsorted(cumulated, rng.random(BATCH), "right"), num_ranks)
        sets = [np.unique(part) for part in parts]
        union = np.unique(np.concatenate(sets))
        rows += len(union)
        for rank, each in enumerate(sets):
            away = int((each % num_ranks != rank).sum())
            split_bytes += away * (2 + row + 2 + total)
            replicated_bytes += away * (2 + total)
        replicated_bytes += (num_ranks - 1) * len(union) * (2 + total)
    predicted = wire_of(config(), own, dataset(), num_ranks)
    pooled_bytes = BATCH * (num_ranks - 1) / num_ranks * (4 + 2 * total)  # what stays with the owner does not travel
    owner_bytes = (num_ranks - 1) * (12 + BATCH / num_ranks * 4)
    counted = (split_bytes / steps, replicated_bytes / steps, rows / steps, pooled_bytes, owner_bytes, BATCH)
    assert np.allclose(predicted, counted, rtol=0.02), (predicted, counted)
    assert dtype != "float32" or predicted.split_bytes <= predicted.replicated_bytes, "copies never save bytes"


@looped("num_ranks", [2, 3, 4])
def test_small_tables_are_replicated_and_others_dealt_out(num_ranks: int) -> None:
    found = shards_of(config(), TABLES, dataset(), num_ranks)
    assert found == {
        "sex": Shard(prefix=3),
        "hour": Shard(prefix=24),
        **{name: Shard(kind="row") for name in ("user", "item", "site")},
    }
    wires = {own.name: wire_of(config(), own, dataset(), num_ranks) for own in TABLES}
    added = sum(wires[name].replicated_bytes - wires[name].split_bytes for name in ("sex", "hour"))
    assert added <= SMALL_SHARE * sum(wire.split_bytes for wire in wires.values())


def test_a_table_that_nobody_looks_up_is_not_small() -> None:
    """It sends nothing, but its copies would fill memory."""
    counts = {**COUNTS, "site": np.zeros(90_000, np.uint32)}
    assert shards_of(config(), TABLES, dataset(counts), 4)["site"] == Shard(kind="row")


def test_without_counts_sizes_decide() -> None:
    found = shards_of(config(), TABLES, dataset({}), 4)
    assert [name for name, shard in found.items() if shard.prefix] == ["sex", "hour"]


def test_what_is_asked_for_is_done() -> None:
    asked = {"sex": "row", "hour": "table", "user": "table", "item": "table", "site": "replicated"}
    found = shards_of(config(sharding=asked), TABLES, dataset(), 3)
    assert found["sex"] == Shard(kind="row") and found["site"] == Shard(prefix=90_000)
    owned = [found[name] for name in ("hour", "user", "item")]
    assert [shard.kind for shard in owned] == ["table"] * 3
    assert {shard.owner for shard in owned} == {0, 1, 2}, "each rank gets one"
    assert shards_of(config(sharding={"user": "replicated"}), TABLES, dataset(), 3)["item"] == Shard(kind="row")


def test_tables_go_to_the_rank_that_has_least_to_do() -> None:
    tables = [table(f"t{k}", n) for k, n in enumerate((90_000, 50_000, 30_000, 10_000, 900, 800))]
    counts = {own.name: zipf(own.num_embeddings, 0.6) for own in tables}
    found = shards_of(config(sharding=dict.fromkeys(counts, "table")), tables, dataset(counts), 2)
    loads = [0.0, 0.0]
    for own in tables:
        loads[found[own.name].owner] += wire_of(config(), own, dataset(counts), 2).rows
    assert max(loads) < 1.2 * min(loads), loads


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.sharding names the table 'users', .* did you mean 'user'\?"):
        shards_of(config(sharding={"users": "row"}), TABLES, dataset(), 2)
    with pytest.raises(ValueError, match=r"names the table 'zz', .* the tables are sex, hour, user, item, site"):
        shards_of(config(sharding={"zz": "row"}), TABLES, dataset(), 2)


@looped("share", [0.001, 0.01, 0.1, 0.5])
def test_hot_rows_are_those_with_most_accesses(share: float) -> None:
    tables = TABLES[2:]
    found = hot_prefixes(tables, dataset(), share)
    most, held = int(share * sum(own.num_embeddings for own in tables)), sum(found.values())
    assert held <= most
    inside = min(COUNTS[name][n - 1] for name, n in found.items() if n > 1)
    outside = max(COUNTS[name][n] for name, n in found.items())
    assert inside > outside, "a row outside has as many accesses as one inside"
    ties = sum(int((COUNTS[name] == outside).sum()) for name in found)
    assert held + ties > most, "more would fit"


def test_row_0_follows_row_1() -> None:
    """It is all rare ids together, and may have fewer accesses than rows behind it."""
    counts = {"a": np.array([1, 9, 8, 7, 0], np.uint32), "b": np.array([50, 3, 2, 1, 0], np.uint32)}
    tables = [table("a", 5), table("b", 5)]
    assert hot_prefixes(tables, dataset(counts), 0.5) == {"a": 4, "b": 1}
    assert hot_prefixes(tables, dataset(counts), 0.0) == {"a": 0, "b": 0}
    assert hot_prefixes([], dataset(counts), 0.5) == {}


def test_hot_rows_of_tables_that_are_split() -> None:
    found = shards_of(config(hot_rows=0.1, sharding={"item": "table"}), TABLES, dataset(), 4)
    assert found["sex"].prefix == 3 and 0 < found["user"].prefix < 200_000
    assert (found["item"].kind, found["user"].kind) == ("table", "row") and found["item"].prefix > 0
    with pytest.raises(ValueError, match=r"parallel\.hot_rows is 0\.1, but data has no access counts.* set parallel"):
        shards_of(config(hot_rows=0.1), TABLES, dataset({}), 4)


@looped(("jagged", "num_rows"), [(False, 900), (True, 900), (True, (1 << 31) + 1)])
@looped("wire_dtype", ["fp32", "bf16"])
def test_bytes_of_bags_and_vectors_against_messages(jagged: bool, num_rows: int, wire_dtype: WireDtype) -> None:
    """Bags and vectors as pooled.py packs them, on three ranks of ten samples; each of them may be the owner."""
    own, rng, sent, num_ids = table("item", num_rows), np.random.default_rng(2), 0, 0
    for _ in range(3):
        lengths = rng.integers(0, 4, 10) if jagged else np.ones(10, np.int64)
        ids = torch.from_numpy(rng.integers(0, 900, lengths.sum()))
        part = KeyedJaggedTensor(("item",), ids, lengths=torch.from_numpy(lengths) if jagged else None)
        sent += _pack(part, [[("item", num_rows > 1 << 31)]])[0].nbytes
        sent += 2 * sum(words.nbytes for words in narrow([torch.zeros(10 * 16)], wire_dtype))
        num_ids += len(ids)
    unknown = Distinct(0.0)
    rest: Any = {"lookups": num_ids, "jagged": jagged, "wire_dtype": wire_dtype}
    found = Wire.of(own, 30, 3, of_one=unknown, of_all=unknown, **rest)
    assert found.pooled_bytes == pytest.approx(sent * 2 / 3), "what stays with the owner does not travel"


def long_bags(*num_rows: int) -> tuple[list[TableConfig], Any]:
    tables = [table(f"t{k}", n) for k, n in enumerate(num_rows)]
    return tables, dataset(
        {own.name: np.full(own.num_embeddings, 50 * SAMPLES // own.num_embeddings) for own in tables}
    )


@looped("num_ranks", [2, 3, 4])
def test_tables_with_long_bags_go_to_owners_that_pool(num_ranks: int) -> None:
    tables, data = long_bags(*(100_000,) * 12)
    found = shards_of(config(), tables, data, num_ranks)
    assert {(shard.kind, shard.prefix, shard.exchange) for shard in found.values()} == {("table", 0, "pooled")}
    owned = np.bincount([shard.owner for shard in found.values()], minlength=num_ranks)
    assert owned.tolist() == [12 // num_ranks] * num_ranks
    assert "12 whole on one rank that sends pooled vectors" in shards_line(tables, found, num_ranks)
    hot = shards_of(config(), tables, data, num_ranks, hot={own.name: 7 for own in tables})
    assert set(hot.values()) == {Shard(prefix=7)}, "hot batches need all tables"
    for parallel in ({"exchange": "rows"}, {"hot_rows": 0.01}):
        assert all(own.exchange == "rows" for own in shards_of(config(**parallel), tables, data, num_ranks).values())


def test_a_table_that_would_fill_one_rank_stays_with_all() -> None:
    tables, data = long_bags(900_000, *(100_000,) * 4)
    found = shards_of(config(), tables, data, 4)
    assert found["t0"] == Shard(kind="row")
    assert sorted(found[f"t{k}"].owner for k in range(1, 5)) == [0, 1, 2, 3]
    # Of two tables on three ranks one rank would have none: half of the rows on each of two is 1.5 times the mean.
    tables, data = long_bags(300_000, 300_000)
    assert MAX_UNEVEN < 1.5 and {own.kind for own in shards_of(config(), tables, data, 3).values()} == {"row"}


def shared_out(tables: list[TableConfig], found: dict[str, Shard], num_ranks: int) -> list[int]:
    """By rank, the columns of tables that have as many rows."""
    each = [(own, found[own.name]) for own in tables]
    blocks = [(rank, shard.columns(own.embedding_dim, rank)) for own, shard in each for rank in shard.owners]
    return [sum(own.stop - own.start for of, own in blocks if of == rank) for rank in range(num_ranks)]


@looped(("num_tables", "num_ranks"), [(1, 2), (1, 4), (2, 3), (2, 8), (3, 4), (8, 32), (13, 8)])
@looped("asked", [{}, {"exchange": "pooled"}])
def test_few_tables_are_cut_until_ranks_are_even(num_tables: int, num_ranks: int, asked: dict[str, Any]) -> None:
    tables, data = long_bags(*(100_000,) * num_tables)
    raw = {"data": "d", "train": {"batch_size": BATCH}, "parallel": asked}
    found = shards_of(make_config(raw | {"optimizer": {"sparse": {"name": "adagrad"}}}), tables, data, num_ranks)
    assert {(shard.kind, shard.exchange) for shard in found.values()} == {("table", "pooled")}
    held = shared_out(tables, found, num_ranks)
    assert sum(held) == 16 * num_tables and max(held) <= MAX_UNEVEN * np.mean(held)
    line = shards_line(tables, found, num_ranks)
    assert f"{sum(own.is_cut for own in found.values())} cut by columns among ranks that send pooled vectors" in line
    row_wise = {"optimizer": {"sparse": {"name": "row_wise_adagrad"}}}
    whole = shards_of(make_config(raw | row_wise), tables, data, num_ranks)
    assert not any(own.is_cut for own in whole.values()), "its rows have one number each"


def test_columns_that_are_asked_for() -> None:
    tables, data = [table("a", 90_000, 19), table("b", 90_000, 4), table("c", 90_000, 64)], dataset({})
    sharding, adam = dict.fromkeys("abc", "column"), {"sparse": {"name": "adam"}}
    raw = {"data": "d", "optimizer": adam, "parallel": {"sharding": sharding}}
    found = shards_of(make_config(raw), tables, data, 6)
    assert [(own.exchange, len(own.owners)) for own in found.values()] == [("pooled", 5), ("pooled", 1), ("pooled", 6)]
    for more, text in (
        ({"optimizer": {"sparse": {"name": "row_wise_adagrad"}}}, "table 'a', but optimizer.* choose adagrad"),
        ({"model": {"name": "tbsm"}}, "table 'a', but model tbsm looks up sequences"),
        (
            {"parallel": raw["parallel"] | {"exchange": "rows"}},
            r"table 'a', but parallel\.exchange says rows: set it to",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            shards_of(make_config(raw | more), tables, data, 6)


def test_a_table_is_cut_as_long_as_ids_are_few_bytes() -> None:
    """Each owner gets all ids: the third would make pooled vectors more than 0.8 of the bytes of rows."""
    tables = [table("t", 1000, dim=64)]
    wire = Wire(split_bytes=100, replicated_bytes=200, rows=9, pooled_bytes=50, owner_bytes=20, lookups=9)
    for num_ranks, owners in ((1, (0,)), (2, (0, 1)), (3, None)):
        found = pooled_owners(tables, {"t": wire}, {"t": 1000}, num_ranks)
        assert found == ({} if owners is None else {"t": owners})
    assert pooled_owners(tables, {"t": wire}, {"t": 1000}, 3, kept=["t"]) == {"t": (0, 1)}
    assert pooled_owners(tables, {"t": wire}, {"t": 1000}, 3, kept=["t"], whole=["t"]) == {"t": (0,)}


def test_exchanges_that_are_asked_for() -> None:
    found = shards_of(config(exchange="pooled"), TABLES, dataset(), 3)
    assert {name for name, shard in found.items() if shard.exchange == "pooled"} == {"user", "item", "site"}
    assert {found[name].owner for name in ("user", "item", "site")} == {0, 1, 2}
    found = shards_of(config(exchange={"sex": "pooled"}, hot_rows=0.1), TABLES, dataset(), 3)
    assert found["sex"] == Shard(kind="table", exchange="pooled") and found["user"].prefix > 0
    tables, data = long_bags(*(100_000,) * 4)
    found = shards_of(config(exchange={"t1": "rows"}, sharding={"t0": "table", "t2": "row"}), tables, data, 2)
    assert [found[f"t{k}"].exchange for k in range(4)] == ["pooled", "rows", "rows", "rows"], "t3 alone is uneven"


@looped(
    ("asked", "text"),
    [
        ({"exchange": {"users": "rows"}}, r"parallel\.exchange names the table 'users', .* did you mean 'user'\?"),
        (
            {"exchange": "pooled", "sharding": {"item": "row"}},
            r"parallel\.exchange asks for pooled vectors of table 'item', .* parallel\.sharding says 'row': set",
        ),
        ({"exchange": {"hour": "pooled"}, "sharding": {"hour": "replicated"}}, r"table 'hour', .* says 'replicated'"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shards_of(config(**asked), TABLES, dataset(), 2)


def test_sequences_travel_as_rows() -> None:
    tables, data = long_bags(*(100_000,) * 4)
    sequences = make_config({"data": "d", "model": {"name": "tbsm"}, "train": {"batch_size": BATCH}})
    assert {shard.exchange for shard in shards_of(sequences, tables, data, 2).values()} == {"rows"}
    raw = {"data": "d", "model": {"name": "tbsm"}, "parallel": {"exchange": {"t2": "pooled"}}}
    with pytest.raises(ValueError, match="of table 't2', but model tbsm looks up sequences, whose rows travel"):
        shards_of(make_config(raw), tables, data, 2)


def test_hot_batches_find_their_rows_on_every_rank() -> None:
    hot = {"sex": 1, "hour": 24, "user": 5_000, "item": 100_000, "site": 3}
    found = shards_of(config(hot_rows=0.001, sharding={"item": "table"}), TABLES, dataset(), 4, hot=hot)
    few = shards_of(config(hot_rows=0.001, sharding={"item": "table"}), TABLES, dataset(), 4)
    assert found["sex"] == few["sex"] == Shard(prefix=3), "a small table is on every rank whole"
    assert (found["user"].prefix, found["item"].prefix) == (5_000, 100_000) and few["user"].prefix < 5_000
    assert found["site"] == few["site"] and few["site"].prefix > 3, "no fewer than by parallel.hot_rows"

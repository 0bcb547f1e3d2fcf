"""Law: columns that transforms compute, of ids and of other computed columns, are the same in preparation, in scoring
and in exports; their values are those of plain Python."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

import hotrow
from hotrow.data.chunk import Keys
from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.data.transforms import Transform
from hotrow.export.inputs import load_module
from hotrow.serve.scorer import Scorer
from loops import looped

SCHEMA: dict[str, Any] = {
    "label": "click",
    "time": "ts",
    "dense": ["delay", "price"],
    "categorical": ["user", "hour", "user_hour", "item_bucket", "all_three", {"column": "price", "buckets": [5]}],
    "transforms": [
        {"hour": {"column": "ts", "into": "hour"}},
        {"fill": {"column": "shown", "value": 0, "into": "shown_or_0"}},
        {"age": {"columns": ["ts", "shown_or_0"], "into": "delay"}},
        {"cross": {"columns": ["user", "hour"], "into": "user_hour"}},
        {"hash": {"column": "item", "buckets": 7, "seed": 3, "into": "item_bucket"}},
        {"cross": {"columns": ["user_hour", "item", "price"], "into": "all_three"}},
    ],
    "statistics": [["user", "user_hour"]],
}
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def of_integer(x: int) -> int:
    x &= MASK
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def of_text(text: str) -> int:
    data = text.encode()
    h = of_integer(len(data))
    for at in range(0, len(data), 8):
        h = of_integer(h ^ int.from_bytes(data[at : at + 8], "little"))
    return h


def finalizer(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def crossed(first: int, *others: int) -> int:
    for other in others:
        first = finalizer((first * GOLDEN + other) & MASK)
    return first


def in_bucket(h: int, buckets: int, seed: int) -> int:
    return finalizer((h + (seed + 1) * GOLDEN) & MASK) % buckets


def signed(h: int) -> int:
    return h - 2**64 if h >= 2**63 else h


def logs(num_rows: int, seed: int) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    user = [f"user {u}" if u else None for u in (rng.zipf(1.3, num_rows) % 30).tolist()]
    ts = np.sort(1_700_000_000 + rng.integers(0, 6 * 86400, num_rows)).tolist()
    item = [None if i == 5 else i for i in (rng.zipf(1.4, num_rows) % 40 - 3).tolist()]
    odd = [(len(u or "") + t // 3600) % 2 for u, t in zip(user, ts, strict=True)]
    return {
        "click": [int(rng.random() < (0.8 if o else 0.1)) for o in odd],
        "ts": ts,
        "shown": [None if rng.random() < 0.1 else t - int(rng.integers(0, 90)) for t in ts],
        "user": user,
        "item": item,
        "price": [None if rng.random() < 0.1 else float(p) for p in rng.integers(0, 10, num_rows)],
    }


def truth(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The keys of the computed features."""
    hours = [datetime.fromtimestamp(t, UTC).hour for t in rows["ts"]]
    user = [GOLDEN if u is None else of_text(u) for u in rows["user"]]
    item = [GOLDEN if i is None else of_integer(i) for i in rows["item"]]
    price = [GOLDEN if p is None else of_integer(int(p >= 5)) for p in rows["price"]]
    pairs = [signed(crossed(u, of_integer(h))) for u, h in zip(user, hours, strict=True)]
    three = [signed(crossed(of_integer(p), i, b)) for p, i, b in zip(pairs, item, price, strict=True)]
    return {"hour": hours, "user_hour": pairs, "item_bucket": [in_bucket(i, 7, 3) for i in item], "all_three": three}


def load_scorer(folder: Path) -> Any:
    return load_module(folder / "score.py").Scorer(folder)


def save(rows: dict[str, list[Any]], path: Path) -> str:
    table = pa.table(rows)
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pa.parquet.write_table(table, path)
    return str(path)


@pytest.mark.slow_but(".csv")
@pytest.mark.filterwarnings("ignore:ids that training never saw")
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_same_keys_everywhere(tmp_path: Path, suffix: str) -> None:
    rows, new = logs(3000, 0), logs(400, 1)
    schema = SCHEMA
    if suffix == ".csv":  # where ids are text if the schema does not say otherwise
        schema = {**SCHEMA, "categorical": [*SCHEMA["categorical"], {"column": "item", "type": "int"}]}
    parsed = parse_schema(schema, where="test")
    source = suffix.removeprefix(".")
    packed = run_prepare(source, save(rows, tmp_path / f"old{suffix}"), tmp_path / "packed", schema=parsed)
    cut = int(0.8 * 3000)
    train = packed.split("train").block(0)
    assert abs(len(train.label) - cut) < 60
    at = {feature.name: i for i, feature in enumerate(packed.info.features)}
    for name, keys in truth(rows).items():
        found = packed.vocabulary(name).lookup(Keys(np.array(keys[: len(train.label)], np.int64)))
        np.testing.assert_array_equal(train.ids[at[name]], found)
        assert found.min() > 0
    (batch,) = Encoder.load(packed).batches(save(new, tmp_path / f"new{suffix}"))
    ids = batch.sparse.values.reshape(len(at), -1)
    for name, keys in truth(new).items():
        np.testing.assert_array_equal(ids[at[name]], packed.vocabulary(name).lookup(Keys(np.array(keys, np.int64))))
    delay = [t - (s or 0) for t, s in zip(rows["ts"], rows["shown"], strict=True)]
    mean, std = Transform.parse(packed.info.dense[0].transform).options.values()
    wanted = (np.array(delay, np.float32).astype(np.float64) - mean) / std
    np.testing.assert_array_equal(train.dense[0], wanted[: len(train.label)].astype(np.float32))

    without = {name: values for name, values in new.items() if name not in ("click", "ts")}
    with pytest.raises(ValueError, match="'ts'"):
        next(Encoder.load(packed).batches(save(without, tmp_path / f"without{suffix}")))
    options = {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "batch_size": 64}
    run = hotrow.fit(tmp_path / "packed", run=tmp_path / "run", quiet=True, epochs=2, **options)
    scores = run.predict(str(tmp_path / f"new{suffix}"))
    run.export(tmp_path / "out")
    scorer = load_scorer(tmp_path / "out")
    assert {*scorer.columns} == {"ts", "shown", "user", "item", "price"}
    inputs = {name: new[name] for name in scorer.columns}
    np.testing.assert_allclose(scorer.score(inputs), scores, rtol=0, atol=1e-5)
    assert not any(counts["unreadable"] for counts in scorer.seen.columns.values())
    assert scores.std() > 0.05, "else all scores are alike"


HISTORIES: dict[str, Any] = {
    "label": "click",
    "time": "ts",
    "dense": [{"column": "seen", "transform": "identity"}, {"column": "seen_lately", "transform": "log1p_clip0"}],
    "categorical": [
        {"column": "item", "type": "int"},
        {"column": "recent", "kind": "sequence", "table": "item", "type": "int"},
        {"column": "tags", "kind": "multi_hot"},
        {"column": "first_tags", "kind": "multi_hot", "table": "tags"},
    ],
    "transforms": [
        {"sequence": {"column": "history", "last": 3, "dedup": True, "into": "recent"}},
        {"sequence": {"column": "tags", "first": 2, "into": "first_tags"}},
        {"combo_count": {"columns": ["history", "item"], "into": "seen"}},
        {"combo_count": {"columns": ["recent", "item"], "into": "seen_lately"}},
    ],
}


def logs_of_lists(num_rows: int, seed: int) -> dict[str, list[Any]]:
    """Logs with a history of items and tags, some of them empty or absent, or holding what is missing."""
    rng = np.random.default_rng(seed)
    rows = {name: values for name, values in logs(num_rows, seed).items() if name in ("click", "ts", "item")}
    ids = [None, *range(1, 9)]
    rows["item"] = [ids[i] for i in rng.integers(0, 9, num_rows)]
    rows["history"] = [[ids[i] for i in rng.integers(0, 9, n)] for n in rng.integers(0, 9, num_rows)]
    rows["tags"] = [[f"t{i}" for i in rng.integers(0, 6, n)] if n else None for n in rng.integers(0, 5, num_rows)]
    chances = [0.8 if i in h else 0.1 for i, h in zip(rows["item"], rows["history"], strict=True)]
    rows["click"] = [int(rng.random() < chance) for chance in chances]
    return rows


def truth_of_lists(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    recent = []
    for history in rows["history"]:
        once: list[Any] = []
        for item in reversed(history):
            once += [item] if item not in once else []
        recent.append(once[:3][::-1])
    return {
        "recent": recent,
        "first_tags": [(tags or [])[:2] for tags in rows["tags"]],
        "seen": [h.count(i) for h, i in zip(rows["history"], rows["item"], strict=True)],
        "seen_lately": [r.count(i) for r, i in zip(recent, rows["item"], strict=True)],
    }


def as_file(rows: dict[str, list[Any]], path: Path) -> str:
    """Saves rows; lists become JSON arrays in text."""
    if path.suffix == ".csv":
        lists = {name: [v if v is None else json.dumps(v) for v in rows[name]] for name in ("history", "tags")}
        rows = rows | lists
    return save(rows, path)


@pytest.mark.slow_but(".parquet")
@pytest.mark.filterwarnings("ignore:ids that training never saw")
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_lists_are_the_same_everywhere(tmp_path: Path, suffix: str) -> None:
    rows, new = logs_of_lists(2000, 0), logs_of_lists(300, 1)
    categorical = HISTORIES["categorical"]
    if suffix == ".csv":
        lists = ("recent", "tags")
        categorical = [c | {"separator": "json"} if c["column"] in lists else c for c in HISTORIES["categorical"]]
    schema = parse_schema(HISTORIES | {"categorical": categorical}, where="test")
    source = suffix.removeprefix(".")
    packed = run_prepare(source, as_file(rows, tmp_path / f"old{suffix}"), tmp_path / "packed", schema=schema)
    (batch,) = Encoder.load(packed).batches(as_file(new, tmp_path / f"new{suffix}"))
    train, wanted = packed.split("train").block(0), truth_of_lists(rows)
    at = {feature.name: i for i, feature in enumerate(packed.info.features)}
    num_train = len(train.label)

    def rows_of(table: str, ids: list[Any]) -> list[int]:
        keys = packed.vocabulary(table)
        if table == "item":
            valid = np.array([i is not None for i in ids], bool)
            return keys.lookup(Keys(np.array([i or 0 for i in ids], np.int64), None, valid)).tolist()
        texts = [text.encode() for text in ids]
        offsets = np.cumsum([0, *map(len, texts)])
        return keys.lookup(Keys(np.frombuffer(b"".join(texts), np.uint8), offsets)).tolist()

    for name, table in (("recent", "item"), ("first_tags", "tags")):
        stored = train.ids[at[name]]
        assert stored.values.tolist() == rows_of(table, [i for ids in wanted[name][:num_train] for i in ids])
        assert np.diff(stored.row_splits).tolist() == [len(ids) for ids in wanted[name][:num_train]]
        found, _, _ = batch.sparse.bags(name)
        assert found.tolist() == rows_of(table, [i for ids in truth_of_lists(new)[name] for i in ids])
    np.testing.assert_array_equal(train.dense[0], np.float32(wanted["seen"][:num_train]))
    np.testing.assert_array_equal(train.dense[1], np.log1p(wanted["seen_lately"][:num_train]).astype(np.float32))
    np.testing.assert_array_equal(batch.dense[:, 0], np.float32(truth_of_lists(new)["seen"]))

    options = {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "batch_size": 64}
    run = hotrow.fit(tmp_path / "packed", run=tmp_path / "run", quiet=True, epochs=2, **options)
    run.export(tmp_path / "out")
    scorer = load_scorer(tmp_path / "out")
    assert {*scorer.columns} == {"item", "history", "tags"}
    inputs = {name: new[name] for name in scorer.columns}
    scores = run.predict(str(tmp_path / f"new{suffix}"))
    np.testing.assert_allclose(scorer.score(inputs), scores, rtol=0, atol=1e-5)
    assert not any(counts["unreadable"] for counts in scorer.seen.columns.values())

    odd = {**new, "history": [["an item", 3, 3], *new["history"][1:]], "item": [3, *new["item"][1:]]}
    odd["history"] = [[None if i is None else str(i) for i in h] for h in odd["history"]]
    with pytest.warns(UserWarning, match="scored as missing"):
        scores = run.predict(pa.table({name: odd[name] for name in scorer.columns}))
        np.testing.assert_allclose(scorer.score({n: odd[n] for n in scorer.columns}), scores, rtol=0, atol=1e-5)
    assert [scorer.seen.columns[name]["unreadable"] for name in ("seen", "recent", "seen_lately")] == [1, 1, 1]


STARTS = {
    "seconds": pa.timestamp("s"), "millis": pa.timestamp("ms", "Asia/Kolkata"), "micros": pa.timestamp("us"),
    "nanos": pa.timestamp("ns", "UTC"), "day": pa.date32(),
}  # fmt: skip


def test_times_and_dates_are_unix_seconds(tmp_path: Path) -> None:
    """Of any unit and with any zone, before 1970 too; a time zone changes how a time is shown and not when it is."""
    rng = np.random.default_rng(0)
    micros = [None if rng.random() < 0.1 else m for m in rng.integers(-(10**15), 2 * 10**15, 600).tolist()]
    micros = [m if m is None else m // 10**6 * 10**6 for m in micros]
    columns = {name: pa.array(micros, pa.timestamp("us")).cast(kind, safe=False) for name, kind in STARTS.items()}
    label = [0 if m is None else int(m // (3600 * 10**6) % 2) for m in micros]
    rows = pa.table({"click": label, "user": rng.integers(0, 9, 600), **columns})
    schema = {
        "label": "click",
        "dense": [f"{name}_since_day" for name in STARTS],
        "categorical": ["user", *(f"{name}_weekday" for name in STARTS)],
        "transforms": [
            *({"weekday": {"column": name, "into": f"{name}_weekday"}} for name in STARTS),
            *({"age": {"columns": [name, "day"], "into": f"{name}_since_day"}} for name in STARTS),
        ],
        "split": {"kind": "random", "fractions": [1, 0, 0]},
    }
    packed = run_prepare("frame", rows, tmp_path / "packed", schema=parse_schema(schema, where="test"))
    moments = [None if m is None else datetime.fromtimestamp(m // 10**6, UTC) for m in micros]
    days = [None if m is None else m.weekday() for m in moments]
    keys = Keys(np.array([d or 0 for d in days], np.int64), None, np.array([d is not None for d in days]))
    block = packed.split("train").block(0)
    for name, ids in zip(STARTS, block.ids[1:], strict=True):
        np.testing.assert_array_equal(ids, packed.vocabulary(f"{name}_weekday").lookup(keys))
    since = np.array([np.nan if m is None else m.hour * 3600 + m.minute * 60 + m.second for m in moments])
    for i, column in enumerate(packed.info.dense):
        wanted = Transform.parse(column.transform)(since if column.name != "day_since_day" else since * 0)
        np.testing.assert_array_equal(block.dense[i], np.nan_to_num(wanted.astype(np.float32)))

    options = {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "batch_size": 64}
    run = hotrow.fit(tmp_path / "packed", run=tmp_path / "run", quiet=True, epochs=1, **options)
    run.export(tmp_path / "out")
    scorer = load_scorer(tmp_path / "out")
    found = scorer.score({name: rows[name].to_pylist() for name in scorer.columns})
    np.testing.assert_allclose(found, run.predict(rows), rtol=0, atol=1e-5)


def test_the_hour_on_a_clock_is_that_of_zoneinfo_however_times_are_stored(tmp_path: Path) -> None:
    """Half-hours over both changes of the clock in Berlin, 2024. Naive text in another format shows the clock as it
    is, numbers of any unit and zoned times are put on it, and those of an offset of their own keep that."""
    berlin, rng = ZoneInfo("Europe/Berlin"), np.random.default_rng(0)
    starts = [1_711_756_800, 1_729_900_800]
    seconds = rng.permutation([start + 1800 * i for start in starts for i in range(150)])
    local = [datetime.fromtimestamp(int(s), berlin) for s in seconds]
    columns: dict[str, Any] = {
        "s": seconds, "ms": seconds * 1000, "ns": pa.array([str(s * 10**9) for s in seconds]),
        "utc": pa.array(seconds, pa.timestamp("s", "UTC")), "iso": [t.astimezone(UTC).isoformat() for t in local],
        "zoned": pa.array(seconds, pa.timestamp("s", "Europe/Berlin")), "own": [t.isoformat() for t in local],
        "plain": pa.array([t.strftime("%d/%m/%Y %H:%M") for t in local]).dictionary_encode(),
    }  # fmt: skip
    how = {"zoned": {"zone": "written"}, "own": {"zone": "written"}, "plain": {"format": "%d/%m/%Y %H:%M"}}
    made = [
        {part: {"column": name, "into": f"{name} {part}", **how.get(name, {"zone": "Europe/Berlin"})}}
        for name in columns
        for part in ("hour", "weekday")
    ]
    into = [spec["into"] for each in made for spec in each.values()]
    schema = {"label": "click", "categorical": ["user", *into], "transforms": made, "split": {"kind": "random"}}
    rows = pa.table({"click": rng.integers(0, 2, 300), "user": rng.integers(0, 9, 300), **columns})
    packed = run_prepare("frame", rows, tmp_path / "packed", schema=parse_schema(schema, where="test"))
    ((batch, _),) = Encoder.load(packed).rows(rows)
    for part, wanted in (("hour", [t.hour for t in local]), ("weekday", [t.weekday() for t in local])):
        for name in columns:
            keys = Keys(np.array(wanted, np.int64), None, np.ones(300, np.bool_))
            known = packed.vocabulary(f"{name} {part}").lookup(keys)
            np.testing.assert_array_equal(batch.sparse.bags(f"{name} {part}")[0], known, f"{name} {part}")
            assert len({*known.tolist()}) == len({*wanted}), "no two of them share a row"
    options = {"embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4], "batch_size": 64, "epochs": 1, "threads": 1}
    run = hotrow.fit(packed.path, run=tmp_path / "run", quiet=True, **options)
    run.export(tmp_path / "out")
    scorer, served, scores = load_scorer(tmp_path / "out"), Scorer(tmp_path / "out"), run.predict(rows)
    found = scorer.score({name: rows[name].to_pylist() for name in scorer.columns})
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(served.score(rows.to_pylist()), scores)
    late = {name: values for name, values in rows.to_pydict().items() if name != "own"}
    for score in (run.predict, scorer.score, lambda columns: served.score(columns, strict=True)):
        with pytest.raises(ValueError, match="'own'"):
            score(late)
    wrong = {**schema, "transforms": [{"hour": {"column": "s", "zone": "Europe/Berln", "into": "user"}}]}
    with pytest.raises(ValueError, match=r"hour\.zone is 'Europe/Berln'; did you mean 'Europe/Berlin'"):
        parse_schema(wrong, where="test")


@pytest.mark.filterwarnings("ignore:ids that training never saw")
def test_unreadable_values_count_alike(tmp_path: Path) -> None:
    rows, new = logs(3000, 0), logs(400, 1)
    run_prepare("frame", pa.table(rows), tmp_path / "packed", schema=parse_schema(SCHEMA, where="test"))
    options = {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "batch_size": 64}
    run = hotrow.fit(tmp_path / "packed", run=tmp_path / "run", quiet=True, epochs=1, **options)
    run.export(tmp_path / "out")
    text = {name: [None if v is None else str(v) for v in values] for name, values in new.items()}
    text["ts"][:3], text["item"][:5], text["price"][7] = ["noon"] * 3, ["an item"] * 5, "free"
    with pytest.warns(UserWarning, match="scored as missing") as told:
        scores = run.predict(pa.table(text))
        scorer = load_scorer(tmp_path / "out")
        found = scorer.score({name: text[name] for name in scorer.columns})
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-5)
    counts = {"hour": 3, "delay": 3, "user_hour": 3, "item_bucket": 5, "all_three": 9}
    for name, count in counts.items():
        assert scorer.seen.columns[name]["unreadable"] == count
    messages = {str(each.message) for each in told if "scored as missing" in str(each.message)}
    assert len(messages) == 1, "predict and the export say the same"


def test_published_vectors() -> None:
    """docs/prepare.md has them: `hash` of 1, -1, "a" and a missing value; `cross` of 1 with each of them."""
    ids = [of_integer(1), of_integer(-1), of_text("a"), GOLDEN]
    found = Transform("hash", {"buckets": 1000, "seed": 0})(np.array(ids, np.uint64)).tolist()
    other = Transform("hash", {"buckets": 1000, "seed": 1})(np.array(ids, np.uint64)).tolist()
    pairs = Transform("cross")(np.full(4, ids[0], np.uint64), np.array(ids, np.uint64)).view(np.int64).tolist()
    assert found == [in_bucket(h, 1000, 0) for h in ids]
    assert other == [in_bucket(h, 1000, 1) for h in ids]
    assert pairs == [signed(crossed(ids[0], h)) for h in ids]
    docs = (Path(__file__).resolve().parents[2] / "docs" / "prepare.md").read_text("utf-8")
    for line in zip(found, other, pairs, strict=True):
        assert " | ".join(map(str, line)) in docs


@looped(
    ("rows", "entry", "fields"),
    [
        ({}, {"cross": {"columns": ["user", "itm"], "into": "made"}}, ["'itm'", "item"]),
        ({}, {"hour": {"column": "time", "into": "made"}}, ["'time'", "ts"]),
        ({}, {"log1p_clip0": {"column": "user", "into": "made"}}, ["user", "'user ", "number", "correct the row"]),
        ({"item": [[1]] * 50}, {"hash": {"column": "item", "buckets": 9, "into": "made"}}, ["'item'", "list"]),
        ({}, {"sequence": {"column": "item", "last": 2, "into": "made"}}, ["'item'", "sequence", "separator"]),
        ({}, {"combo_count": {"columns": ["price", "item"], "into": "made"}}, ["'price'", "sequence", "separator"]),
        (
            {"item": ["a"] * 50, "user": [[1]] * 50},
            {"combo_count": {"columns": ["user", "item"], "into": "made"}},
            ["combo_count", "'user' as integers", "'item' as text", "`type`"],
        ),
        ({"item": [1.5] * 50}, {"hash": {"column": "item", "buckets": 9, "into": "made"}}, ["item", "1.5", "whole"]),
    ],
)
def test_bad_columns_are_named(tmp_path: Path, rows: Any, entry: Any, fields: list[str]) -> None:
    made = {"column": "made", "kind": "sequence" if "sequence" in entry else "one_hot"}
    schema = {"label": "click", "categorical": [made], "transforms": [entry]}
    for suffix in [".parquet"] if rows else [".csv", ".parquet"]:  # text has neither lists nor floats
        path = save({**logs(50, 0), **rows}, tmp_path / f"rows{suffix}")
        with pytest.raises(ValueError) as caught:  # several parts of one message
            run_prepare(suffix[1:], path, tmp_path / "out", schema=parse_schema(schema, where="test"))
        for field in (f"rows{suffix}", *fields):
            assert field in str(caught.value)

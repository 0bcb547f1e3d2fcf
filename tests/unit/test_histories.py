"""Samples made of events against a walk through them with plain lists and dictionaries."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data.chunk import RowError
from hotrow.data.sources import histories
from hotrow.data.sources.histories import HistoriesSource, RowSort, open_columns
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import Schema, parse_schema
from raw_rows import read

CATEGORICAL = [
    "user",
    "item",
    "category",
    {"column": "item_history", "kind": "sequence", "table": "item"},
    {"column": "category_history", "kind": "sequence", "table": "category"},
]
LINES = ["7,5,1,pv,40", "7,6,2,buy,50", "3,9,1,pv,10", "7,4,1,cart,20", "7,5,1,fav,60", "3,4,1,pv,70"]


def schema(*, categorical: list[Any] | None = None, **options: Any) -> Schema:
    value = {
        "label": "came",
        "time": "time",
        "categorical": categorical or CATEGORICAL,
        "histories": {"user": "user", "item": "item", **options},
    }
    return parse_schema(value, where="test")


def make_events(num_events: int = 4000, *, num_users: int = 60, num_items: int = 300, seed: int = 0) -> pa.Table:
    """Events in no order, of distinct times; an item has one category."""
    rng = np.random.default_rng(seed)
    item = rng.zipf(1.3, num_events) % num_items
    return pa.table(
        {
            "user": rng.zipf(1.5, num_events) % num_users - 5,
            "item": item,
            "category": item % 17,
            "time": rng.permutation(num_events) * 3 - 1000,
            "behaviour": ["pv"] * num_events,
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"length": 3, "negatives": 3, "seed": 8},
        {"min_length": 0, "length": 50},
        {"every": 4, "min_length": 2},
    ],
    ids=str,
)
def test_against_plain_lists(options: dict[str, Any]) -> None:
    events = make_events()
    made = schema(**options)
    assert made.histories is not None
    length, negatives = made.histories.length, made.histories.negatives
    rows = read(HistoriesSource(events, made), rows_per_chunk=1001)
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    known: dict[int, int] = {}
    expected, before = {}, {}
    for event in sorted(events.to_pylist(), key=lambda event: event["time"]):
        past = seen[event["user"]]
        if len(past) >= made.histories.min_length:
            expected[event["user"], event["time"]] = (event["item"], event["category"], past[-length:])
            before[event["time"]] = set(known)
        past.append((event["item"], event["category"]))
        known.setdefault(event["item"], event["category"])
    assert len(rows["label"]) % (1 + negatives) == 0
    found = []
    for i, (user, time) in enumerate(zip(rows["user"], rows["time"], strict=True)):
        item, category, past = expected[user, time]
        assert list(zip(rows["item_history"][i], rows["category_history"][i], strict=True)) == past
        assert rows["label"][i] == (i % (1 + negatives) == 0)
        if rows["label"][i]:
            found.append((user, time))
            assert (rows["item"][i], rows["category"][i]) == (item, category)
        else:
            assert (user, time) == found[-1]
            assert rows["item"][i] in before[time] - {item} - {item for item, _ in past}
            assert rows["category"][i] == known[rows["item"][i]]
    assert found == sorted(found), "by user, then time"
    if made.histories.every == 1:
        left_out = set(expected) - set(found)
        assert len(found) > 2000 or made.histories.length == 50
        for key in left_out:  # nothing, or nearly, was there to draw
            item, _, past = expected[key]
            assert len(before[key[1]] - {item} - {item for item, _ in past}) <= 0.6 * len(before[key[1]])
    else:
        targets = Counter(user for user, _ in found)
        for user, past in seen.items():
            possible = len(past) - made.histories.min_length
            assert possible // 4 - 1 <= targets[user] <= possible // 4 + 1


def test_negatives_are_uniform_over_what_was_seen() -> None:
    """Long after every item was seen, and with short histories, each of them comes nearly alike often."""
    events = make_events(20_000, num_users=3000, num_items=50)
    rows = read(HistoriesSource(events, schema(length=1, seed=3)))
    drawn = Counter(rows["item"][1::2])
    mean = len(rows["label"]) / 2 / 50
    assert len(drawn) == 50
    assert Counter(rows["item"][::2]).most_common(1)[0][1] > 5 * mean, "what came is not uniform"
    for item, count in drawn.items():
        came = sum(i == item for i in rows["item"][::2]) + sum([item] == past for past in rows["item_history"][::2])
        expected = mean * (1 - came / len(rows["label"][::2])) * 50 / 49  # an item is not drawn where it came
        assert abs(count - expected) < 5 * expected**0.5 + 0.06 * expected, item


def test_negatives_of_a_target_are_drawn_apart() -> None:
    item = read(HistoriesSource(make_events(20_000, num_items=5000), schema(negatives=3)))["item"]
    same = [len({*item[i + 1 : i + 4]}) < 3 for i in range(0, len(item), 4)]
    assert np.mean(same) < 0.05


def test_another_seed_draws_others_and_nothing_else_moves() -> None:
    one, two, again = (read(HistoriesSource(make_events(), schema(seed=seed))) for seed in (1, 2, 1))
    assert one == again
    assert one["item"][::2] == two["item"][::2]
    same = sum(a == b for a, b in zip(one["item"][1::2], two["item"][1::2], strict=True))
    assert same < 0.1 * len(one["item"]) / 2


def test_the_order_of_the_events_moves_nothing() -> None:
    events = make_events()
    expected = read(HistoriesSource(events, schema()))
    for keys in ([("time", "ascending")], [("user", "ascending"), ("time", "ascending")], [("item", "descending")]):
        assert read(HistoriesSource(events.sort_by(keys), schema())) == expected


def test_chunks_and_memory_move_nothing_and_positions_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(HistoriesSource(make_events(), schema(negatives=2)))
    monkeypatch.setattr(histories, "RowSort", lambda columns: RowSort(columns, rows_in_memory=300))
    source = HistoriesSource(make_events(), schema(negatives=2))
    for rows_per_chunk in (10, 1000):
        chunks = list(source.chunks(rows_per_chunk=rows_per_chunk))
        assert max(chunk.num_rows for chunk in chunks) <= rows_per_chunk
        assert read(source, rows_per_chunk=rows_per_chunk) == expected
    row = 0
    for chunk in source.chunks(rows_per_chunk=100):
        row += chunk.num_rows
        if row > 2000:
            break
    rest = read(source, start=chunk.position, rows_per_chunk=77)
    assert rest == {name: column[row:] for name, column in expected.items()}


def test_rows_without_a_negative_are_left_out_and_counted() -> None:
    """Nothing was seen before the first second; then item 1 alone, which is in the history or the target itself."""
    events = pa.table({"user": [1, 1, 1, 2, 2], "item": [1, 1, 2, 1, 2], "time": [5, 5, 6, 7, 8], "category": [0] * 5})
    source = HistoriesSource(events, schema())
    rows = read(source)
    assert rows["time"] == []
    assert source.skipped.num_rows == 3
    assert source.skipped.examples[0].startswith("user 1 at 5: left out, since 32 draws from what was seen before gave")
    events = pa.concat_tables([events, pa.table({"user": [3], "item": [3], "time": [6], "category": [9]})])
    rows = read(source := HistoriesSource(events, schema()))
    assert (rows["user"], rows["item"], rows["category"]) == ([2, 2], [2, 3], [0, 9])
    assert source.skipped.num_rows == 2


def test_the_published_layout(tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("\n".join(LINES) + "\n")
    opened = open_source("taobao-histories", path)
    assert opened.schema.histories is not None
    assert (opened.schema.histories.length, opened.schema.histories.every) == (20, 10)
    every = opened.schema.model_copy(update={"histories": opened.schema.histories.model_copy(update={"every": 1})})
    rows = read(open_source("taobao-histories", path, schema=every).source)
    positives = [[rows[name][i] for name in ("user", "item", "item_history")] for i in range(0, len(rows["label"]), 2)]
    assert positives == [[3, 4, [9]], [7, 5, [4]], [7, 6, [4, 5]], [7, 5, [4, 5, 6]]]
    plain = read(open_source("taobao", path).source)
    assert plain["label"] == [0, 1, 0, 1, 1, 0], "the task of events stays"


def test_bad_events_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("\n".join([*LINES[:3], "7,x,1,pv,30", *LINES[3:]]) + "\n")
    opened = open_source("taobao-histories", path)
    with pytest.raises(RowError, match=r"events.csv:4 \(item\): 'x' is not an exact integer id"):
        list(opened.source.chunks())
    source = open_source("taobao-histories", path, skip_bad_rows=1).source
    rows = read(source)
    assert all("x" not in str(item) for item in rows["item"])
    assert source.skipped.num_rows >= 1
    assert "events.csv:4" in source.skipped.examples[0]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("item", ["a"] * 9, "column 'item': `histories` needs integer ids below 2.63; say type: int"),
        ("item", [1, None] + [3] * 7, "column 'item' is empty in 1 events near one another"),
        ("came", [1] * 9, "the events have a column 'came', but with `histories` the label is made"),
        ("time", None, "<frame>: no column 'time'.*; columns: user, item"),
    ],
)
def test_events_it_refuses(column: str, values: list[Any] | None, message: str) -> None:
    events = make_events(9)
    if column in events.schema.names:
        events = events.drop_columns([column])
    if values is not None:
        events = events.append_column(column, pa.array(values))
    with pytest.raises(ValueError, match=message):
        list(HistoriesSource(events, schema()).chunks())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": {"user": "uid", "item": "item"}}, "histories.user is 'uid', which is not a one_hot column"),
        ({"histories": {"user": "item", "item": "item"}}, "histories.user and histories.item are both 'item'"),
        ({"histories": {"user": "user", "item": "item", "length": 0}}, "histories.length is 0"),
        ({"histories": {"user": "user", "item": "item", "lenght": 5}}, "'histories.lenght'; did you mean 'length'"),
        ({"split": {"kind": "random"}}, "split.kind is 'random', but with `histories` targets of one split"),
        ({"time": None}, "with `histories` name a time"),
        ({"dense": ["price"]}, "no dense column"),
        ({"label": {"column": "came", "positive": ["buy"]}}, "one label without a rule"),
        (
            {"categorical": [*CATEGORICAL[:3], {"column": "past", "kind": "sequence"}]},
            "column 'past' of kind sequence: .* named after what they repeat: item_history, category_history",
        ),
        (
            {"categorical": [*CATEGORICAL[:3], {"column": "item_history", "kind": "multi_hot"}]},
            "column 'item_history' of kind multi_hot",
        ),
    ],
)
def test_schemas_it_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_schema(schema().to_json() | change, where="test")


def test_only_sources_of_columns_make_histories() -> None:
    with pytest.raises(ValueError, match="source movielens cannot make histories; use csv, parquet, jsonl or frame"):
        open_source("movielens", make_events(), schema=schema())
    with pytest.raises(ValueError, match=r"split.kind is 'random'"):
        open_source("frame", make_events(), schema=schema()).with_options(split="random")


def test_rows_to_predict_come_with_their_histories() -> None:
    rows = read(HistoriesSource(make_events(), schema()))
    given = pa.table({name: rows[name] for name in schema().feature_names})
    again = read(open_columns(given, schema(), name="frame", labels="ignored"))
    assert {name: again[name] for name in schema().feature_names} == {n: rows[n] for n in schema().feature_names}


def test_text_to_predict_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("\n".join(LINES) + "\n")
    with pytest.raises(ValueError, match=r"new.csv: rows to predict bring their histories, as lists in item_history, "):
        open_source("taobao-histories", path, labels="ignored")

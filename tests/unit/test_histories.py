"""examples/histories.py against a walk through the events with plain lists and dictionaries, and law 6."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from examples import histories
from examples.histories import samples
from forked import run_python
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import load_schema, parse_schema
from prepare_data import file_hashes, plan_of
from raw_rows import read

pytestmark = pytest.mark.package
EXAMPLE = Path(histories.__file__)
SCHEMA = EXAMPLE.with_suffix(".yaml")
LINES = ["7,5,1,pv,40", "7,6,2,buy,50", "3,9,1,pv,10", "7,4,1,cart,20", "7,5,1,fav,60", "3,4,1,pv,70"]


def made_of(events: pl.DataFrame, **options: Any) -> dict[str, list[Any]]:
    return pa.concat_tables([table for table, _ in samples(events, **options)]).to_pydict()


def make_events(num_events: int = 4000, *, num_users: int = 60, num_items: int = 300, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    item = rng.zipf(1.3, num_events) % num_items
    user, time = rng.zipf(1.5, num_events) % num_users - 5, rng.permutation(num_events) * 3 - 1000
    return pl.DataFrame({"user": user, "item": item, "category": item % 17, "time": time})


@pytest.mark.parametrize(
    "options",
    [{}, {"length": 3, "negatives": 3, "seed": 8}, {"min_length": 0, "length": 50}, {"every": 4, "min_length": 2}],
    ids=str,
)
def test_against_plain_lists(options: dict[str, Any]) -> None:
    events = make_events()
    length, negatives, min_length, every = (
        options.get(name, usual) for name, usual in (("length", 20), ("negatives", 1), ("min_length", 1), ("every", 1))
    )
    rows = made_of(events, **options)
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    known: dict[int, int] = {}
    expected, before = {}, {}
    for event in sorted(events.to_dicts(), key=lambda event: event["time"]):
        past = seen[event["user"]]
        if len(past) >= min_length:
            expected[event["user"], event["time"]] = (event["item"], event["category"], past[-length:])
            before[event["time"]] = set(known)
        past.append((event["item"], event["category"]))
        known.setdefault(event["item"], event["category"])
    assert len(rows["came"]) % (1 + negatives) == 0
    found = []
    for i, (user, time) in enumerate(zip(rows["user"], rows["time"], strict=True)):
        item, category, past = expected[user, time]
        assert list(zip(rows["item_history"][i], rows["category_history"][i], strict=True)) == past
        assert rows["came"][i] == (i % (1 + negatives) == 0)
        if rows["came"][i]:
            found.append((user, time))
            assert (rows["item"][i], rows["category"][i]) == (item, category)
        else:
            assert (user, time) == found[-1]
            assert rows["item"][i] in before[time] - {item} - {item for item, _ in past}
            assert rows["category"][i] == known[rows["item"][i]]
    assert found == sorted(found), "by user, then time"
    if every == 1:
        left_out = set(expected) - set(found)
        assert len(found) > 2000 or length == 50
        for key in left_out:  # nothing, or nearly, was there to draw
            item, _, past = expected[key]
            assert len(before[key[1]] - {item} - {item for item, _ in past}) <= 0.6 * len(before[key[1]])
    else:
        targets = Counter(user for user, _ in found)
        for user, past in seen.items():
            possible = len(past) - min_length
            assert possible // 4 - 1 <= targets[user] <= possible // 4 + 1


def test_negatives_are_uniform_over_what_was_seen() -> None:
    """Long after every item was seen, and with short histories, each of them comes nearly alike often."""
    events = make_events(20_000, num_users=3000, num_items=50)
    rows = made_of(events, length=1, seed=3)
    drawn = Counter(rows["item"][1::2])
    mean = len(rows["came"]) / 2 / 50
    assert len(drawn) == 50
    assert Counter(rows["item"][::2]).most_common(1)[0][1] > 5 * mean, "what came is not uniform"
    for item, count in drawn.items():
        came = sum(i == item for i in rows["item"][::2]) + sum([item] == past for past in rows["item_history"][::2])
        expected = mean * (1 - came / len(rows["came"][::2])) * 50 / 49  # an item is not drawn where it came
        assert abs(count - expected) < 5 * expected**0.5 + 0.06 * expected, item


def test_the_order_of_the_events_moves_nothing() -> None:
    events = make_events()
    expected = made_of(events)
    for keys in (["time"], ["user", "time"], ["item", "time"]):
        assert made_of(events.sort(keys)) == expected


def test_rows_without_a_negative_are_left_out_and_counted() -> None:
    """Nothing was seen before the first second; then item 1 alone, which is in the history or the target itself."""
    columns = {"user": [1, 1, 1, 2, 2], "item": [1, 1, 2, 1, 2], "time": [5, 5, 6, 7, 8]}
    events = pl.DataFrame(columns | {"category": [0] * 5})
    assert [(table.num_rows, left_out) for table, left_out in samples(events)] == [(0, 3)]
    more = pl.DataFrame({"user": [3], "item": [3], "time": [6], "category": [9]})
    ((table, left_out),) = samples(pl.concat([events, more]))
    rows = table.to_pydict()
    assert (rows["user"], rows["item"], rows["category"]) == ([2, 2], [2, 3], [0, 9])
    assert left_out == 2


def test_the_published_layout(tmp_path: Path) -> None:
    path, out = tmp_path / "UserBehavior.csv", tmp_path / "rows.parquet"
    path.write_text("\n".join(LINES) + "\n")
    said = run_python(EXAMPLE, path, out, "--length", 2)
    assert said == "8 rows; 0 targets left out, for which no negative was found\n"
    rows = read(open_source("parquet", out, schema=load_schema(SCHEMA)).source)
    positives = [[rows[name][i] for name in ("user", "item", "item_history")] for i in range(0, len(rows["label"]), 2)]
    assert positives == [[3, 4, [9]], [7, 5, [4]], [7, 6, [4, 5]], [7, 5, [5, 6]]]
    assert rows["time"][::2] == [70, 40, 50, 60]
    plain = read(open_source("taobao", path).source)
    assert plain["label"] == [0, 1, 0, 1, 1, 0], "the task of events stays"


@pytest.mark.parametrize("change", ["items replaced", "permuted"])
def test_law_6_later_events_move_no_training_byte(tmp_path: Path, change: str) -> None:
    """Neither histories nor drawn items nor row numbers of training know what is bought after the cut."""
    rng, num_events = np.random.default_rng(0), 2500
    user, item = rng.zipf(1.5, num_events) % 80, rng.zipf(1.2, num_events) % 500
    time = rng.integers(0, 1500, num_events)
    schema = parse_schema(
        {
            "label": "came",
            "time": "time",
            "categorical": ["user", "item", {"column": "item_history", "kind": "sequence", "table": "item"}],
            "split": {"fractions": [0.7, 0.1, 0.2]},
        },
        where="test",
    )

    def prepared(item: np.ndarray, name: str) -> PackedDataset:
        events = pl.DataFrame({"user": user, "item": item, "time": time})
        rows = pa.table(made_of(events, length=5, negatives=2))
        return run_prepare("frame", rows, tmp_path / name, schema=schema)

    plain = prepared(item, "plain")
    assert [plain.split(split).num_rows > 300 for split in ("train", "val", "test")] == [True] * 3
    later = plan_of(plain.info.ids["split"]).assign(np.arange(num_events), time) != 0
    assert 300 < later.sum() < 1200
    changed = item.copy()
    if change == "permuted":
        changed[later] = rng.permutation(changed[later])
    else:
        changed[later] = rng.integers(10**6, 10**6 + 90, int(later.sum()))
    other = prepared(changed, "changed")
    for part in ("train", "vocab", "counts"):
        assert file_hashes(other.path, below=part) == file_hashes(plain.path, below=part)
    assert file_hashes(other.path, below="test") != file_hashes(plain.path, below="test")

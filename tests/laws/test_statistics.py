"""Law: no training row knows its own label, nor that of a row of its moment or a later one, or of its fold.

The truth counts, for each row, the raw values of the rows that it sees, in plain Python.
"""

import math
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import hotrow
from hotrow.data import native, reference
from hotrow.data.chunk import Chunk, Keys, Position
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import pipeline
from hotrow.data.prepare import rows as stored_rows
from hotrow.data.prepare.lag import Lagged
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.prepare import Encoder
from hotrow.data.prepare.statistics import NUM_FOLDS, Statistics
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.split import FOLD_SALT, RandomPlan, uniform_of
from loops import looped
from prepare_data import SCHEMA as SCHEMA_OF_EVERY_KIND
from prepare_data import file_hashes, make_rows, stopping, write_parquet

SCHEMA: dict[str, Any] = {
    "label": "click",
    "dense": ["price"],
    "categorical": [
        {"column": "user", "type": "text"},
        {"column": "item", "type": "int"},
        {"column": "price", "buckets": [1, 4.5, 20]},
    ],
    "statistics": [
        "user",
        {"columns": ["item"], "priors": [2, 0.5], "count": True},
        ["user", "item", "price"],
        ["price"],
    ],
    "tables": {"user": {"min_count": 3}},
}
COUNT = 0
"""In place of a prior: the input is the logarithm of 1 + the rows of the value."""
STATISTICS = [
    (("user",), (1, 10, 100)),
    (("item",), (2, 0.5, COUNT)),
    (("user", "item", "price"), (1, 10, 100)),
    (("price",), (1, 10, 100)),
]
Rows = dict[str, list[Any]]


def some_rows(num_rows: int, seed: int = 0) -> Rows:
    """Users as text and items as integers, of which some come once and some are missing; prices from 0.5 to 30."""
    rng = np.random.default_rng(seed)
    missing = rng.random((2, num_rows)) < 0.1
    user, item = rng.zipf(1.4, num_rows) % 50, rng.zipf(1.5, num_rows) % 30
    return {
        "click": rng.integers(0, 2, num_rows).tolist(),
        "time": list(range(num_rows)),
        "user": [None if gone else f"u{u}" for u, gone in zip(user, missing[0], strict=True)],
        "item": [None if gone else int(i) - 9 for i, gone in zip(item, missing[1], strict=True)],
        "price": rng.uniform(0.5, 30, num_rows).round(2).tolist(),
    }


def shuffled(rows: Rows, seed: int = 3) -> Rows:
    order = np.random.default_rng(seed).permutation(len(rows["time"])).tolist()
    return {name: [values[row] for row in order] for name, values in rows.items()}


def write(rows: Rows, folder: Path) -> Path:
    if (folder / "rows.parquet").exists():
        return folder / "rows.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {**rows, "item": pa.array(rows["item"], pa.int64())}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=64)
    return folder / "rows.parquet"


def prepared(rows: Rows, folder: Path, *, split: str, by: str | None = None, **options: Any) -> PackedDataset:
    kind = split.removesuffix(" with time")
    schema = SCHEMA | {"split": {"kind": kind}, "statistics_by": by} | ({"time": "time"} if "time" in split else {})
    opened = open_source("parquet", write(rows, folder), schema=parse_schema(schema, where="test"))
    prepare(opened, folder / "out", Options(**options))
    return PackedDataset.open(folder / "out", verify="full")


def codes(rows: Rows, split: str) -> list[int]:
    """The split of each row; by time by the rule of docs/prepare.md: rows of one time stay together."""
    times = rows["time"]
    if split != "time":
        return RandomPlan(0, (0.8, 0.1, 0.1)).assign(np.arange(len(times))).tolist()
    cuts = [min(range(len(times) + 1), key=lambda n: (abs(n - share * len(times)), n)) for share in (0.8, 0.9)]
    starts = [i for i in range(len(times) + 1) if i in (0, len(times)) or times[i] != times[i - 1]]
    first, second = (min(starts, key=lambda start: abs(start - cut)) for cut in cuts)
    return [0 if row < first else 1 if row < second else 2 for row in range(len(times))]


def stored(dataset: PackedDataset, code_of: list[int]) -> np.ndarray:
    """All inputs but the price [num_rows, J], in the order of the rows. code_of: the split of each."""
    out, of_row = np.empty((len(code_of), len(dataset.info.dense) - 1), np.float32), np.array(code_of)
    for code, name in enumerate(("train", "val", "test")):
        part = dataset.split(name)
        columns = [np.stack(part.block(i).dense[1:], 1) for i in range(part.num_blocks)]
        out[of_row == code] = np.concatenate(columns)
    return out


def folds(rows: Rows, by: str, *, have_time: bool) -> list[int]:
    """The fold of each row: by its number, its time, or its user."""
    hashes = (
        [reference.hash_string(user.encode()) if user else 0x9E3779B97F4A7C15 for user in rows["user"]]
        if by == "user"
        else rows["time"]
        if have_time
        else range(len(rows["time"]))
    )
    words = np.array(list(hashes), np.uint64).view(np.int64)
    return (uniform_of(0, words, salt=FOLD_SALT) * NUM_FOLDS).astype(int).tolist()


def an_input(k: float, num_rows: int, positives: int, p: float) -> float:
    if k == COUNT:
        return math.log1p(num_rows)
    q = (positives + k * p) / (num_rows + k)
    return max(-8.0, min(8.0, math.log(q / (1 - q)) - math.log(p / (1 - p))))


def truth(rows: Rows, code_of: list[int], fold: list[int] | None = None, lag_s: int | None = None) -> np.ndarray:
    """Counts, for each row, the rows that it sees. fold: of each row; None if statistics are as of time."""
    labels, times, trains = rows["click"], rows["time"], np.array(code_of) == 0
    price = [sum(p >= b for b in (1, 4.5, 20)) for p in rows["price"]]
    values = {"user": rows["user"], "item": rows["item"], "price": price}

    def sees(row: int, other: int) -> bool:
        if not trains[row] and (lag_s is None or fold is not None):
            return bool(trains[other])
        if not trains[row]:
            return times[other] + lag_s <= times[row]
        is_other = fold[other] != fold[row] if fold else times[other] + (lag_s or 1) <= times[row]
        return bool(trains[other]) and is_other

    found = []
    for row in range(len(labels)):
        others = [i for i in range(len(labels)) if sees(row, i)]
        share = 1.0 if trains[row] or fold is None else 1 - 1 / NUM_FOLDS
        p = (share * sum(labels[i] for i in others) + 0.5) / (share * len(others) + 1)
        own = []
        for columns, priors in STATISTICS:
            alike = [labels[i] for i in others if all(values[c][i] == values[c][row] for c in columns)]
            own += [an_input(k, share * len(alike), share * sum(alike), p) for k in priors]
        found.append(own)
    return np.array(found)


def in_bursts(rows: Rows) -> Rows:
    """The same rows, three or so of one time."""
    times = np.random.default_rng(4).integers(0, len(rows["time"]) // 3, len(rows["time"]))
    return rows | {"time": sorted(times.tolist())}


CASES = [("time", None), ("random", None), ("random with time", None), ("time", "rows")]
CASES += [("random", "user"), ("time", "user")]
"""How rows are split, and `statistics_by`."""


def folds_by(rows: Rows, split: str, by: str | None) -> list[int] | None:
    have_time = "time" in split
    return None if have_time and by is None else folds(rows, by or "rows", have_time=have_time)


@looped(("split", "by"), CASES)
def test_against_rows_that_are_looked_at_one_by_one(split: str, by: str | None, tmp_path: Path) -> None:
    """Also in chunks and blocks that part rows of one time."""
    rows = in_bursts(some_rows(300))
    code_of = codes(rows, split)
    dataset = prepared(rows, tmp_path, split=split, by=by, rows_per_chunk=47)
    wanted = truth(rows, code_of, folds_by(rows, split, by))
    np.testing.assert_allclose(stored(dataset, code_of), wanted, rtol=1e-5, atol=1e-6)
    assert dataset.info.dense_names[1:7] == (
        "user (prior 1)", "user (prior 10)", "user (prior 100)", "item (prior 2)", "item (prior 0.5)", "item (count)",
    )  # fmt: skip
    assert [column.transform for column in dataset.info.dense][4] == "target_stat(prior=2.0)"


@pytest.mark.slow_but("time-None-dict", "random-None-dict")
@pytest.mark.parametrize(("split", "by", "in_file"), [*((*case, dict) for case in CASES), ("time", None, shuffled)])
def test_no_training_row_knows_its_own_label_or_a_later_row(
    split: str, by: str | None, in_file: Callable[[Rows], Rows], tmp_path: Path
) -> None:
    """Flipping a label changes no training row up to the end of its own moment, or of its fold; one of a row that does
    not train changes none. Other rows in place of later ones change none before."""
    rows, rng = in_bursts(some_rows(300)), np.random.default_rng(1)
    if in_file is shuffled:
        rows["time"] = list(range(300))  # rows of one time keep their order in the file, by which they are told apart
    code_of, fold, times = codes(rows, split), folds_by(rows, split, by), np.array(rows["time"])
    before = stored(prepared(in_file(rows), tmp_path / "rows", split=split, by=by), code_of)
    trains = np.array(code_of) == 0
    others = [int(np.flatnonzero(~trains)[0])]
    for trial, row in enumerate([0, 1, *rng.choice(np.flatnonzero(trains), 4).tolist(), *others]):
        changed = {name: list(values) for name, values in rows.items()}
        changed["click"][row] ^= 1
        after = stored(prepared(in_file(changed), tmp_path / f"flip{trial}", split=split, by=by), code_of)
        own = trains & (np.array(fold) == fold[row] if fold else times <= times[row])
        np.testing.assert_array_equal(after[own], before[own])
        if trains[row]:
            assert (after[~own] != before[~own]).any(), "other rows must know it"
        else:
            np.testing.assert_array_equal(after, before)
    if fold:
        return
    others = some_rows(300, seed=5) | {"time": rows["time"]}
    for trial, row in enumerate(rng.integers(1, 300, 3).tolist()):
        changed = {name: [*values[:row], *others[name][row:]] for name, values in rows.items()}
        after = stored(prepared(in_file(changed), tmp_path / f"later{trial}", split=split, by=by), code_of)
        own = trains & (np.arange(300) < row)
        np.testing.assert_array_equal(after[own], before[own])


@looped(("split", "by"), [("time", None), ("random", None), ("time", "rows")])
def test_rows_to_score_have_the_bits_of_the_test_split(split: str, by: str | None, tmp_path: Path) -> None:
    rows = some_rows(500)
    dataset = prepared(rows, tmp_path, split=split, by=by)
    later = [row for row, code in enumerate(codes(rows, split)) if code == 2]
    new = {name: [values[row] for row in later] for name, values in rows.items() if name not in ("click", "time")}
    (batch,) = Encoder.load(dataset).batches(pa.table({**new, "item": pa.array(new["item"], pa.int64())}))
    wanted = dataset.split("test").block(0)
    np.testing.assert_array_equal(batch.dense.numpy(), np.stack(wanted.dense, 1))


@looped("options", [{"rows_per_chunk": 7}, {"threads": 1}, {"rows_per_chunk": 200}])
def test_chunks_and_threads_change_no_byte(options: dict[str, int], tmp_path: Path) -> None:
    rows = some_rows(600)
    one, other = (prepared(rows, tmp_path / name, split="random", **own) for name, own in (("a", {}), ("b", options)))
    assert one.info.splits == other.info.splits
    assert one.info.files == other.info.files


@looped("max_values", [1000, 40])
def test_counts_are_those_of_the_reference_and_of_values_that_fit_alone(max_values: int) -> None:
    """Also if there are too many values, in any order and in parts; at the largest count; and of rows of one time."""
    rng = np.random.default_rng(0)
    values = native.mix64(np.arange(60, dtype=np.uint64))
    hashes, times = values[rng.zipf(1.2, 3000) % 60], np.sort(rng.integers(-50, 900, 3000))
    (labels, trains), fold = rng.random((2, 3000)) < 0.5, rng.integers(0, 3, 3000).astype(np.uint8)
    largest = np.array([[2**32 - 1, 7, 2**32 - 2, 2**32 - 3, 0, 0]], np.uint32)

    def counted(module: Any, order: Any) -> Any:
        found = module.ValueCounts(3, max_values, False)
        found.put(values[:1], largest, 0, 0)
        found.add(hashes[order], labels[order], trains[order], fold[order])
        return found

    def out_of(call: Callable[[Any], None], rows: int = 3000, columns: int = 2) -> NDArray[np.uint32]:
        out = np.full((rows, columns), 9, np.uint32)
        call(out)
        return out

    def items_of(found: Any) -> dict[int, list[int]]:
        keys = np.empty(found.size, np.uint64)
        counts = out_of(lambda out: found.items(keys, out), found.size, 6)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True))

    own, twin = counted(native.backend(), slice(None)), counted(reference, slice(None))
    items = items_of(own)
    assert items == items_of(twin)
    assert items == items_of(counted(native.backend(), rng.permutation(3000)))
    merged = counted(native.backend(), slice(0, 1000))
    later = native.backend().ValueCounts(3, max_values, False)
    later.add(hashes[1000:], labels[1000:], trains[1000:], fold[1000:])
    keys = np.empty(later.size, np.uint64)
    merged.put(keys, out_of(lambda out: later.items(keys, out), later.size, 6), 0, later.zeros)
    assert items_of(merged) == items
    wanted = {int(v) for v in {*hashes[trains].tolist(), int(values[0])} if int(v) >> 64 - own.zeros == 0}
    assert items.keys() == wanted
    assert (own.zeros > 0) == (max_values == 40)
    for given in ((None, None), (trains, fold)):
        got = [out_of(partial(each.get, hashes, *given)) for each in (own, twin)]
        np.testing.assert_array_equal(*got)

    def before_of(module: Any, when: NDArray[np.int64] | None) -> NDArray[np.uint32]:
        after, strict = module.ValueCounts(1, max_values, False), module.ValueCounts(1, max_values, True)
        after.add(hashes, labels, trains, None)
        found = []
        for s in (slice(0, 1234), slice(1234, 3000)):
            given = hashes[s], labels[s], trains[s], None if when is None else when[s], after
            found.append(out_of(partial(strict.before, *given), s.stop - s.start))
        return np.concatenate(found)

    for when in (times, None):
        np.testing.assert_array_equal(*(before_of(module, when) for module in (native.backend(), reference)))


def test_stopped_in_every_stage_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting begins anew, encoding goes on from the last finished part."""
    rows = some_rows(400)
    wanted = prepared(rows, tmp_path / "whole", split="random")
    options = {"rows_per_chunk": 32, "rows_per_part": 64, "rows_per_block": 64}
    small = prepared(rows, tmp_path / "small", split="random", **options)
    code_of = codes(rows, "random")
    np.testing.assert_array_equal(stored(small, code_of), stored(wanted, code_of))
    for stage in ("count", "encode"):
        for number in (0, 1, 5, 9):
            folder = tmp_path / f"{stage}{number}"
            with stopping(stage, number):
                prepared(rows, folder, split="random", **options)
            again = prepared(rows, folder, split="random", **options)
            assert (again.info.splits, again.info.files) == (small.info.splits, small.info.files)


SMALL: dict[str, Any] = {"rows_per_chunk": 50, "rows_per_part": 128, "rows_per_block": 64}


@looped("memory_bytes", [None, 20_000])
def test_rows_in_any_order_give_the_dataset_of_rows_in_time_order(
    memory_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MIN_MEMORY_BYTES", 0)
    monkeypatch.setattr(pipeline, "BUFFER_BYTES", 0)
    rows = some_rows(900)
    wanted = prepared(rows, tmp_path / "ordered", split="time", **SMALL)
    found = prepared(shuffled(rows), tmp_path / "shuffled", split="time", memory_bytes=memory_bytes, **SMALL)
    assert (found.info.splits, found.info.files) == (wanted.info.splits, wanted.info.files)


def test_rows_of_one_time_and_columns_of_every_kind(tmp_path: Path) -> None:
    """The truth is Python's stable sort."""
    rows = shuffled({**make_rows(1500), "time": [0] * 1500})
    order = sorted(range(1500), key=rows["ts"].__getitem__)
    ordered = {name: [values[row] for row in order] for name, values in rows.items()}
    schema = parse_schema(SCHEMA_OF_EVERY_KIND.to_json() | {"statistics": ["user", ["user", "site"]]}, where="test")
    hashes = []
    for name, each in (("ordered", ordered), ("shuffled", rows)):
        opened = open_source("parquet", write_parquet(tmp_path / name, each), schema=schema)
        prepare(opened, tmp_path / f"{name} out", Options(**SMALL))
        hashes.append(file_hashes(tmp_path / f"{name} out"))
        del hashes[-1]["dataset.json"]  # names the files
    assert len(hashes[0]) > 10
    assert hashes[0] == hashes[1]


def test_a_random_split_is_by_the_row_of_the_file(tmp_path: Path) -> None:
    """And statistics are by time."""
    rows = some_rows(700)
    in_file = shuffled(rows)
    code_of_time = dict(zip(in_file["time"], codes(in_file, "random"), strict=True))
    of_rows = [code_of_time[time] for time in range(700)]
    dataset = prepared(in_file, tmp_path, split="random with time", **SMALL)
    np.testing.assert_allclose(stored(dataset, of_rows), truth(rows, of_rows), rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but("0-time-options0", "9-time-options2", "9-random-options3")
@pytest.mark.parametrize("options", [{}, {"sample": 0.4}, {"rows": 300}, {"rows": 300, "sample": 0.4}, {"rows": 90}])
@pytest.mark.parametrize("split", ["time", "random"])
@pytest.mark.parametrize("skip_bad_rows", [0, 9])
def test_what_is_said_of_rows_and_where_they_go_is_as_without_statistics(
    split: str, skip_bad_rows: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Bad rows, odd cells and rows without a time among rows in no order, except for the first hundred."""
    rows = some_rows(1200)
    rows = {name: [*v[:100], *shuffled({"time": v[100:]})["time"]] for name, v in rows.items()}
    lines = [",".join("" if v is None else str(v) for v in row) for row in zip(*rows.values(), strict=True)]
    lines[20] = "1,later,u1,2,3.5"
    lines[30] = "0,30,u1,2,cheap"
    if skip_bad_rows:
        lines[40], lines[250], lines[1199] = "maybe,40,u1,2,3.5", "0,7", "maybe,8,u1,2,3.5"
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["click,time,user,item,price", *lines]) + "\n")
    told, found = [], []
    for statistics in ([], SCHEMA["statistics"]):
        schema = SCHEMA | {"split": {"kind": split}, "time": "time", "statistics": statistics, "odd_share": 0.1}
        opened = open_source("csv", path, schema=parse_schema(schema, where="t"), skip_bad_rows=skip_bad_rows)
        said: list[str] = []
        out = tmp_path / f"out{len(statistics)}"
        dataset = prepare(opened, out, Options(**SMALL | options), announce=said.append)
        told.append([line for line in said if "rows.csv" in line])
        prices = {
            name: sorted(p for i in range(part.num_blocks) for p in part.block(i).dense[0].tolist())
            for name, part in ((name, dataset.split(name)) for name in dataset.info.splits)
        }
        found.append((dataset.info.summary, prices))
    assert told[0] == told[1]
    assert found[0] == found[1]


def test_the_error_of_a_bad_row_names_its_place_in_the_file(tmp_path: Path) -> None:
    rows = shuffled(some_rows(300))
    rows["click"][222] = 7
    with pytest.raises(ValueError, match=r"rows\.parquet:223\b"):
        prepared(rows, tmp_path, split="time", **SMALL)
    assert not (tmp_path / "out").exists()


def test_sorted_rows_after_a_stop_or_a_kill_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(600)
    options = SMALL | {"rows_per_chunk": 64}
    wanted = prepared(rows, tmp_path / "ordered", split="time", **options)
    rows = shuffled(rows)
    monkeypatch.setattr(stored_rows, "ROWS_PER_PART", 128)
    drawn, synced, merged = pipeline.Stages._drawn, stored_rows._synced, stored_rows._merged

    def stopped(stages: Any, name: str, *given: Any) -> Iterator[Any]:
        for i, piece in enumerate(drawn(stages, name, *given)):
            if (name, i) == moment[:2]:
                stages._stop.set()
            if (name, i, "kill") == moment:
                raise MemoryError
            yield piece

    def write_and_die(file: Any) -> int:
        written.append(synced(file))
        if len(written) == moment[1]:
            raise MemoryError
        return written[-1]

    def merge_and_die(*given: Any) -> None:
        merged(*given)
        raise MemoryError

    moments: list[Any] = [("count", 3), ("encode", 4), ("count", 3, "kill"), ("encode", 4, "kill"), ("merged", 0)]
    moments += [("written", number) for number in (1, 3, 5, 6, 8)]  # five sorted parts, then those they merge into
    for number, moment in enumerate(moments):
        folder, written = tmp_path / str(number), list[int]()
        with monkeypatch.context() as patched:
            patched.setattr(pipeline.Stages, "_drawn", stopped)
            if moment[0] == "written":
                patched.setattr(stored_rows, "_synced", write_and_die)
            if moment[0] == "merged":
                patched.setattr(stored_rows, "_merged", merge_and_die)
            with pytest.raises((Interrupted, MemoryError)):
                prepared(rows, folder, split="time", **options)
        found = prepared(rows, folder, split="time", **options)
        assert (found.info.splits, found.info.files) == (wanted.info.splits, wanted.info.files)
        assert not (folder / "out" / ".prepare").exists()


def test_a_damaged_file_of_sorted_rows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shuffled(some_rows(100))
    monkeypatch.setattr(stored_rows, "ROWS_PER_PART", 40)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline.Stages, "_encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(rows, tmp_path, split="time")
    path = tmp_path / "out" / ".prepare" / "rows" / "1-000000.arrow"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"1-000000\.arrow"):
        prepared(rows, tmp_path, split="time")


@looped(
    ("change", "named"),
    [
        ({"statistics": ["price2"]}, "price2"),
        ({"statistics": ["click"]}, "click"),
        ({"statistics": [["user", "user"]]}, "columns"),
        ({"statistics": ["user", "user"]}, "user"),
        ({"statistics": [{"columns": ["user"], "priors": [0]}]}, "prior"),
        ({"statistics": [{"columns": ["user"], "priors": []}]}, "priors"),
        ({"statistics_by": "time"}, "no time"),
        ({"statistics_by": "session"}, "'session'.*time, rows, user, item"),
        ({"label": {"column": "click", "kind": "number"}}, "label.kind"),
        ({"categorical": [{"column": "user", "kind": "multi_hot"}], "statistics": ["user"], "tables": {}}, "user"),
    ],
)
def test_statistics_that_cannot_be(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_schema(SCHEMA | change, where="test")


def with_times(rows: Rows) -> Rows:
    """Rows in one hour or two of an hour each, several of a second."""
    rng = np.random.default_rng(9)
    return rows | {"time": np.sort(1_700_000_000 + rng.integers(0, 7200, len(rows["time"]))).tolist()}


def lagged(rows: Rows, folder: Path, split: str, lag: str, kind: pa.DataType | None = None, **options: Any) -> Any:
    """The dataset of rows whose statistics have a lag. kind: how times are stored; if None, as integers."""
    folder.mkdir(parents=True)
    times = rows["time"] if kind is None else pa.array(rows["time"], pa.timestamp("s")).cast(kind)
    table = pa.table(rows | {"time": times, "item": pa.array(rows["item"], pa.int64())})
    pq.write_table(table, folder / "rows.parquet")
    schema = SCHEMA | {"split": {"kind": split}, "time": "time", "statistics_lag": lag}
    opened = open_source("parquet", folder / "rows.parquet", schema=parse_schema(schema, where="test"))
    prepare(opened, folder / "out", Options(**options))
    return PackedDataset.open(folder / "out", verify="full")


@pytest.mark.slow_but("90s-90-time", "10m-600-random")
@pytest.mark.parametrize("split", ["time", "random"])
@pytest.mark.parametrize(("lag", "lag_s"), [("1s", 1), ("90s", 90), ("10m", 600), ("3h", 10800)])
def test_with_a_lag_rows_see_what_is_older(split: str, lag: str, lag_s: int, tmp_path: Path) -> None:
    rows = with_times(some_rows(600))
    dataset = lagged(rows, tmp_path / "one", split, lag, rows_per_chunk=47)
    of_rows = codes(rows, split)
    np.testing.assert_allclose(stored(dataset, of_rows), truth(rows, of_rows, lag_s=lag_s), rtol=1e-5, atol=1e-6)
    new = {name: [values[-1]] for name, values in rows.items() if name not in ("click", "time")}
    (batch,) = Encoder.load(dataset).batches(pa.table({**new, "item": pa.array(new["item"], pa.int64())}))
    later = {name: [*values, values[-1]] for name, values in rows.items()}
    later["time"][-1] += 10**6
    at_the_end = truth(later, [*of_rows, 2], lag_s=lag_s)[-1]
    np.testing.assert_allclose(batch.dense[0, 1:], at_the_end, rtol=1e-5, atol=1e-6)


@looped("kind", [pa.timestamp("ms"), pa.timestamp("ns", "Asia/Kolkata"), pa.float64(), pa.string()])
def test_a_lag_is_in_the_unit_of_the_times(kind: pa.DataType, tmp_path: Path) -> None:
    rows = with_times(some_rows(300))
    wanted = lagged(rows, tmp_path / "seconds", "random", "10m")
    if kind == pa.float64():
        other = lagged(rows | {"time": [float(t) for t in rows["time"]]}, tmp_path / "other", "random", "10m")
    else:
        other = lagged(rows, tmp_path / "other", "random", "10m", kind)
    assert (other.info.splits, other.info.files) == (wanted.info.splits, wanted.info.files)


def prepare_lagged(folder: Path, options: dict[str, Any]) -> None:
    schema = SCHEMA | {"split": {"kind": "time"}, "time": "time", "statistics_lag": "10m"}
    opened = open_source("parquet", folder / "rows.parquet", schema=parse_schema(schema, where="test"))
    prepare(opened, folder / "out", Options(**options))


def test_a_lag_in_any_order_in_small_chunks_and_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(600)
    rows["time"] = [1_700_000_000 + 10 * row for row in range(600)]
    options = {"rows_per_part": 64, "rows_per_block": 64}
    for name, each in (("whole", rows), ("chunks", rows), ("shuffled", shuffled(rows)), ("stop", rows)):
        write(each, tmp_path / name)
    prepare_lagged(tmp_path / "whole", options)
    wanted, options = PackedDataset.open(tmp_path / "whole" / "out").info, options | {"rows_per_chunk": 32}
    with stopping("encode", 17):
        prepare_lagged(tmp_path / "stop", options)
    for name in ("chunks", "shuffled", "stop"):
        prepare_lagged(tmp_path / name, options)
    for name in ("chunks", "shuffled", "stop"):
        found = PackedDataset.open(tmp_path / name / "out", verify="full").info
        assert (found.splits, found.files) == (wanted.splits, wanted.files), name


def test_rows_that_wait_are_counted_in_pieces(tmp_path: Path) -> None:
    """After many rows of one time, a chunk over a long quiet time sees some, then all of them."""
    schema = parse_schema({"label": "y", "categorical": ["id"], "time": "t", "statistics": ["id"]}, where="test")
    num_rows, num_chunks, lag = 5000, 40, 100

    def chunk(times: NDArray[np.int64]) -> Chunk:
        keys = {"id": Keys(np.zeros(len(times), np.int64))}
        return Chunk(
            len(times), np.ones(len(times), np.float32), np.zeros((len(times), 0), np.float32), keys, Position(), times
        )

    def peak_bytes(chunks_before: int) -> int:
        with (tmp_path / "rows").open("w+b") as file:
            lagged, every = Lagged(Statistics(schema), lag, file), np.ones(num_rows, np.bool_)
            for i in range(chunks_before):
                lagged.inputs(chunk(np.full(num_rows, i // 2)), every)
            quiet = chunk(np.arange(num_rows) + num_chunks)
            tracemalloc.start()
            out = lagged.inputs(quiet, every)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        older = np.sort([*np.repeat(np.arange(chunks_before) // 2, num_rows), *quiet.time])
        seen = np.searchsorted(older, quiet.time - lag, side="right").tolist()
        wanted = [an_input(1, n, n, (n + 0.5) / (n + 1)) for n in seen]
        np.testing.assert_allclose(out[:, 0], wanted, rtol=1e-5, atol=1e-6)
        return peak

    assert peak_bytes(num_chunks) < 2 * peak_bytes(1)


@looped("form", [None, float, "%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])
def test_a_lag_needs_times_with_a_unit(form: str | type[float] | None, tmp_path: Path) -> None:
    rows = some_rows(100)
    if form is float:
        rows["time"] = [float(time) for time in rows["time"]]
    elif isinstance(form, str):
        rows["time"] = [int((datetime(2023, 1, 1) + timedelta(hours=row)).strftime(form)) for row in range(100)]
    with pytest.raises(ValueError, match=r"rows\.parquet.*'time'.*unix times.*statistics_lag"):
        lagged(rows, tmp_path / "numbers", "time", "1d")


def test_a_lag_names_a_column_that_holds_no_times(tmp_path: Path) -> None:
    rows = some_rows(100)
    rows["time"] = [time > 5 for time in rows["time"]]
    with pytest.raises(ValueError, match=r"rows\.parquet.*time column 'time' has type bool"):
        lagged(rows, tmp_path / "words", "time", "1d")


def test_a_lag_without_times_statistics_or_a_length_is_refused() -> None:
    for change, fields in (
        ({"statistics_lag": "1d"}, ["statistics_lag", "'1d'", "no time"]),
        ({"statistics_lag": "1d", "time": "time", "statistics": []}, ["statistics_lag", "no statistics"]),
        ({"statistics_lag": "1d", "time": "time", "statistics_by": "user"}, ["statistics_lag", "folds"]),
        ({"statistics_lag": "0d", "time": "time"}, ["statistics_lag", "0d", "1d"]),
        ({"statistics_lag": "day", "time": "time"}, ["statistics_lag", "day", "1d"]),
    ):
        with pytest.raises(ValueError) as caught:
            parse_schema(SCHEMA | change, where="test")
        for field in fields:
            assert field in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    dataset = prepared(some_rows(100), tmp_path, split="random")
    path = dataset.statistics_path()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"counts\.safetensors"):
        Encoder.load(dataset)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_shown", [2, 6, 50])
def test_bursts_of_labels_in_one_moment_mislead_no_model(num_shown: int, tmp_path: Path) -> None:
    """So many items are shown at once, and clicks come in bursts: who saw labels of the moment would learn them."""
    rng, num_moments = np.random.default_rng(num_shown), 24_000 // num_shown
    user, items = rng.integers(0, 1500, (num_moments, 1)), rng.integers(0, 60, (num_moments, num_shown))
    taste, quality, mood = (rng.normal(size=shape) for shape in (1500, 60, (num_moments, 1)))
    chance = 1 / (1 + np.exp(1.8 - 0.7 * taste[user] - 0.7 * quality[items] - 1.4 * mood))
    moment = 1_767_225_600 + 60 * np.arange(num_moments)[:, None]
    texts = {"user": np.broadcast_to(user, items.shape).ravel().astype(str), "item": items.ravel().astype(str)}
    rows = {"click": (rng.random(items.shape) < chance).astype(int).ravel(), "ts": np.repeat(moment, num_shown)}
    table = pa.table({**rows, **{name: [f"{name[0]}{text}" for text in own] for name, own in texts.items()}})
    schema = {"label": "click", "time": {"column": "ts"}, "categorical": ["user", "item"], "split": {"kind": "time"}}

    def entropy(name: str, **told: Any) -> float:
        runs = [hotrow.fit(table, run=tmp_path / f"{name}{k}", seed=k, quiet=True, **told) for k in (1, 2)]
        return float(np.mean([run.metrics["ne"] for run in runs]))

    guessed, plain = entropy("guessed", label="click", time="ts"), entropy("plain", schema=schema, choice=False)
    assert guessed <= plain + 0.002 < 1.001, (guessed, plain)

"""Law: statistics of the label are as of their row. No training row knows its own label or a later row.

The truth counts raw values in dictionaries, row after row, in plain Python.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data import native, reference
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import pipeline
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.prepare import RawEncoder
from hotrow.data.prepare.split import RandomPlan
from hotrow.data.prepare.timesort import TimeSort
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import parse_schema
from hotrow.parallel.communicator import Communicator
from rank_pool import RankPool

SCHEMA: dict[str, Any] = {
    "label": "click",
    "dense": ["price"],
    "categorical": [
        {"column": "user", "type": "text"},
        {"column": "item", "type": "int"},
        {"column": "price", "buckets": [1, 4.5, 20]},
    ],
    "statistics": ["user", {"columns": ["item"], "priors": [2, 0.5]}, ["user", "item", "price"], ["price"]],
    "tables": {"user": {"min_count": 3}},
}
STATISTICS = [
    (("user",), (1, 10, 100)),
    (("item",), (2, 0.5)),
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


def write(rows: Rows, folder: Path) -> Path:
    if (folder / "rows.parquet").exists():
        return folder / "rows.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    columns = {**rows, "item": pa.array(rows["item"], pa.int64())}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=64)
    return folder / "rows.parquet"


def prepared(rows: Rows, folder: Path, *, split: str, **options: Any) -> PackedDataset:
    prepare_file(None, write(rows, folder), folder / "out", split, options)
    return PackedDataset.open(folder / "out", verify="full")


def prepare_file(comm: Communicator | None, path: Path, out: Path, split: str, options: dict[str, Any]) -> None:
    schema = SCHEMA | {"split": {"kind": split}} | ({"time": "time"} if split == "time" else {})
    opened = open_source("parquet", path, schema=parse_schema(schema, where="test"))
    prepare(opened, out, Options(**options), comm=comm)


def codes(num_rows: int, split: str) -> list[int]:
    if split == "time":
        return [0 if row < 0.8 * num_rows else 1 if row < 0.9 * num_rows else 2 for row in range(num_rows)]
    return RandomPlan(0, (0.8, 0.1, 0.1)).assign(0, num_rows, None).tolist()


def stored(dataset: PackedDataset, split: str, num_rows: int) -> np.ndarray:
    """All inputs but the price [num_rows, J], in the order of the rows."""
    out = np.empty((num_rows, len(dataset.info.dense) - 1), np.float32)
    of_row = np.array(codes(num_rows, split))
    for code, name in enumerate(("train", "val", "test")):
        part = dataset.split(name)
        columns = [np.stack(part.block(i).dense[1:], 1) for i in range(part.num_blocks)]
        out[of_row == code] = np.concatenate(columns)
    return out


def truth(rows: Rows, split: str) -> np.ndarray:
    """Counts values in dictionaries; every row that does not train sees the counts at the end."""
    labels, code_of = rows["click"], codes(len(rows["click"]), split)
    values = {
        "user": rows["user"],
        "item": rows["item"],
        "price": [sum(p >= b for b in (1, 4.5, 20)) for p in rows["price"]],
    }
    found = np.empty((len(labels), sum(len(priors) for _, priors in STATISTICS)))
    counts: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for last in (False, True):  # the second pass has counted every training row
        for row, (label, code) in enumerate(zip(labels, code_of, strict=True)):
            if (code != 0) == last:
                every, found_here = counts["all"], []
                for columns, priors in STATISTICS:
                    n, s = counts[columns, tuple(values[c][row] for c in columns)]
                    p = (every[1] + 0.5) / (every[0] + 1)
                    for k in priors:
                        q = (s + k * p) / (n + k)
                        found_here.append(max(-8.0, min(8.0, math.log(q / (1 - q)) - math.log(p / (1 - p)))))
                found[row] = found_here
            if code == 0 and not last:
                for key in ["all", *[(columns, tuple(values[c][row] for c in columns)) for columns, _ in STATISTICS]]:
                    counts[key][0] += 1
                    counts[key][1] += label
    return found


@pytest.mark.parametrize("split", ["time", "random"])
def test_against_dictionaries(split: str, tmp_path: Path) -> None:
    rows = some_rows(700)
    dataset = prepared(rows, tmp_path, split=split)
    np.testing.assert_allclose(stored(dataset, split, 700), truth(rows, split), rtol=1e-5, atol=1e-6)
    assert dataset.info.dense_names[1:6] == (
        "user (prior 1)", "user (prior 10)", "user (prior 100)", "item (prior 2)", "item (prior 0.5)",
    )  # fmt: skip
    assert [column.transform for column in dataset.info.dense][4] == "target_stat(prior=2.0)"


@pytest.mark.parametrize("split", ["time", "random"])
def test_no_training_row_knows_its_own_label_or_a_later_row(split: str, tmp_path: Path) -> None:
    """Flipping a label changes no training row up to its own; other rows in place of later ones change none before."""
    num_rows = 300
    rows, rng = some_rows(num_rows), np.random.default_rng(1)
    before = stored(prepared(rows, tmp_path / "rows", split=split), split, num_rows)
    trains = np.array(codes(num_rows, split)) == 0
    for trial, row in enumerate([0, 1, *rng.choice(np.flatnonzero(trains), 4).tolist()]):
        changed = {name: list(values) for name, values in rows.items()}
        changed["click"][row] ^= 1
        after = stored(prepared(changed, tmp_path / f"flip{trial}", split=split), split, num_rows)
        own = trains & (np.arange(num_rows) <= row)
        np.testing.assert_array_equal(after[own], before[own])
        if trains[row]:
            assert (after[~own] != before[~own]).any(), "later rows must know it"
    others = some_rows(num_rows, seed=5)
    for trial, row in enumerate(rng.integers(1, num_rows, 3).tolist()):
        changed = {name: [*values[:row], *others[name][row:]] for name, values in rows.items()}
        after = stored(prepared(changed, tmp_path / f"later{trial}", split=split), split, num_rows)
        own = trains & (np.arange(num_rows) < row)
        np.testing.assert_array_equal(after[own], before[own])


@pytest.mark.parametrize("split", ["time", "random"])
def test_rows_to_score_have_the_bits_of_the_test_split(split: str, tmp_path: Path) -> None:
    rows = some_rows(500)
    dataset = prepared(rows, tmp_path, split=split)
    later = [row for row, code in enumerate(codes(500, split)) if code == 2]
    new = {name: [values[row] for row in later] for name, values in rows.items() if name not in ("click", "time")}
    (batch,) = RawEncoder(dataset).batches(pa.table({**new, "item": pa.array(new["item"], pa.int64())}))
    wanted = dataset.split("test").block(0)
    np.testing.assert_array_equal(batch.dense.numpy(), np.stack(wanted.dense, 1))


@pytest.mark.parametrize("options", [{"rows_per_chunk": 7}, {"threads": 1}, {"rows_per_chunk": 200}])
def test_chunks_and_threads_change_no_byte(options: dict[str, int], tmp_path: Path) -> None:
    rows = some_rows(600)
    one, other = (prepared(rows, tmp_path / name, split="random", **own) for name, own in (("a", {}), ("b", options)))
    assert one.info.splits == other.info.splits
    assert one.info.files == other.info.files


def test_every_order_of_a_cross_and_every_kind_of_key() -> None:
    """The native counting equals the reference, also of rows that share a slot, and at the largest count."""
    rng = np.random.default_rng(0)
    for num_rows in (0, 1, 15, 16, 17, 1000):
        hashes = rng.integers(0, 2**64, num_rows, np.uint64) & np.uint64(0x1F << 59)
        labels, trains = rng.random((2, num_rows)) < 0.5
        after = rng.integers(0, 9, (32, 2)).astype(np.uint32)
        counts = np.zeros((32, 2), np.uint32)
        counts[3] = 2**32 - 1, 7
        twin, out = counts.copy(), np.empty((num_rows, 2), np.uint32)
        found = native.count_before(hashes, labels, trains, counts, after)
        reference.count_before(hashes, 5, labels, trains, twin, after, out)
        np.testing.assert_array_equal(found, out)
        np.testing.assert_array_equal(counts, twin)
        assert tuple(counts[3]) == (2**32 - 1, 7)


def test_stopped_in_every_stage_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting goes on from its snapshot, encoding from the last finished part."""
    rows = some_rows(400)
    wanted = prepared(rows, tmp_path / "whole", split="random")
    options = {"rows_per_chunk": 32, "rows_per_part": 64, "rows_per_block": 64, "snapshot_every_s": 0.0}
    small = prepared(rows, tmp_path / "small", split="random", **options)
    np.testing.assert_array_equal(stored(small, "random", 400), stored(wanted, "random", 400))
    plain = pipeline._Stages._reported
    for stage in ("count", "encode"):
        for number in (0, 1, 5, 9):

            def reported(stages: Any, name: str, row: int, pieces: Iterator[Any]) -> Iterator[Any]:
                for i, piece in enumerate(plain(stages, name, row, pieces)):
                    if (name, i) == (stage, number):  # noqa: B023
                        stages._stop.set()
                    yield piece

            folder = tmp_path / f"{stage}{number}"
            with monkeypatch.context() as patched:
                patched.setattr(pipeline._Stages, "_reported", reported)
                with pytest.raises(Interrupted):
                    prepared(rows, folder, split="random", **options)
            again = prepared(rows, folder, split="random", **options)
            assert (again.info.splits, again.info.files) == (small.info.splits, small.info.files)


def test_ranks_change_no_byte(tmp_path: Path) -> None:
    rows = some_rows(900)
    options = {"rows_per_chunk": 50, "rows_per_part": 128, "rows_per_block": 64}
    one = prepared(rows, tmp_path / "one", split="random", **options)
    with RankPool(3) as pool:
        arguments = (tmp_path / "one" / "rows.parquet", tmp_path / "three", "random", options)
        pool.run(prepare_file, *arguments, num_ranks=3, micro_batches=3)
    three = PackedDataset.open(tmp_path / "three", verify="full")
    assert (one.info.splits, one.info.files) == (three.info.splits, three.info.files)


def shuffled(rows: Rows, seed: int = 3) -> Rows:
    order = np.random.default_rng(seed).permutation(len(rows["time"])).tolist()
    return {name: [values[row] for row in order] for name, values in rows.items()}


SMALL: dict[str, Any] = {"rows_per_chunk": 50, "rows_per_part": 128, "rows_per_block": 64}


@pytest.mark.parametrize("rows_in_run", [None, 60])
def test_rows_in_any_order_give_the_dataset_of_rows_in_time_order(
    rows_in_run: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if memory holds few rows, and if ranks share the work."""
    rows = some_rows(900)
    wanted = prepared(rows, tmp_path / "ordered", split="time", **SMALL)
    np.testing.assert_allclose(stored(wanted, "time", 900), truth(rows, "time"), rtol=1e-5, atol=1e-6)
    if rows_in_run:
        monkeypatch.setattr(TimeSort, "_run_bytes", property(lambda _: 60 * 60, lambda *_: None), raising=False)
    sorted_ = prepared(shuffled(rows), tmp_path / "shuffled", split="time", **SMALL)
    assert (sorted_.info.splits, sorted_.info.files) == (wanted.info.splits, wanted.info.files)
    with RankPool(3) as pool:
        arguments = (tmp_path / "shuffled" / "rows.parquet", tmp_path / "three", "time", SMALL)
        pool.run(prepare_file, *arguments, num_ranks=3, micro_batches=3)
    three = PackedDataset.open(tmp_path / "three", verify="full")
    assert (three.info.splits, three.info.files) == (wanted.info.splits, wanted.info.files)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"statistics": ["price2"]}, "price2"),
        ({"statistics": ["click"]}, "click"),
        ({"statistics": [["user", "user"]]}, "columns"),
        ({"statistics": ["user", "user"]}, "user"),
        ({"statistics": [{"columns": ["user"], "priors": [0]}]}, "prior"),
        ({"statistics": [{"columns": ["user"], "priors": []}]}, "priors"),
        ({"label": {"column": "click", "kind": "number"}}, "label.kind"),
        ({"categorical": [{"column": "user", "kind": "multi_hot"}], "statistics": ["user"], "tables": {}}, "user"),
    ],
)
def test_statistics_that_cannot_be(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_schema(SCHEMA | change, where="test")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    dataset = prepared(some_rows(100), tmp_path, split="random")
    path = dataset.statistics_path()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"counts\.safetensors"):
        RawEncoder(dataset)

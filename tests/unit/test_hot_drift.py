"""What sets and caches serve of each part, against looking at every lookup of every sample."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotrow.cli import tools
from hotrow.cli.app import app
from hotrow.data.packed.format import DatasetInfo, Feature, Ragged, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.hot.calibrate import calibrate
from hotrow.hot.hot_set import HotRows
from hotrow.inspect import hot_rows
from hotrow.inspect.hot_rows import measure_drift, record_bytes_of
from hotrow.inspect.report import print_inspection

BUDGET = 700_000
NAMES = ("whole", "first", "lru", "belady")


@pytest.fixture(scope="module")
def dataset(make_dataset: Callable[..., PackedDataset], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Two large tables and a small one, a bag that shares the first; blocks that no tenth ends with; no counts."""
    rows = {"train": 3001, "val": 8, "test": 8}
    folder = tmp_path_factory.mktemp("drift") / "data"
    return make_dataset(folder, rows=rows, table_rows=(60_000, 200, 30_000), rows_per_block=256)


@pytest.fixture(autouse=True)
def counts_are_not_there(recwarn: pytest.WarningsRecorder) -> None:
    """The warning that accesses are counted is not what most tests are about."""


def samples_of(dataset: PackedDataset) -> list[list[tuple[str, int]]]:
    """Every lookup, (table, row), of each training sample, features in their order."""
    found = []
    split = dataset.split("train")
    for index in range(split.num_blocks):
        block = split.block(index)
        for r in range(len(block.label)):
            own: list[tuple[str, int]] = []
            for feature, ids in zip(dataset.info.features, block.ids, strict=True):
                rows = ids.values[ids.row_splits[r] : ids.row_splits[r + 1]] if isinstance(ids, Ragged) else [ids[r]]
                own += [(feature.table, int(row)) for row in rows]
            found.append(own)
    return found


def keys_of(rows: dict[str, HotRows]) -> set[tuple[str, int]]:
    return {(t, row) for t, own in rows.items() for row in [*range(own.prefix), *own.listed.tolist()]}


def served(samples: list[list[tuple[str, int]]], hot: set[tuple[str, int]]) -> dict[str, float]:
    lookups = [key for sample in samples for key in sample]
    return {
        "hot_samples": sum(set(sample) <= hot for sample in samples) / len(samples),
        "hot_accesses": sum(key in hot for key in lookups) / len(lookups),
    }


def parts_of(samples: list[Any], num_parts: int = 10) -> list[list[Any]]:
    edges = [k * len(samples) // num_parts for k in range(num_parts + 1)]
    return [samples[a:b] for a, b in pairwise(edges)]


def test_sets_against_looking_at_every_lookup(dataset: PackedDataset) -> None:
    record_bytes = dict.fromkeys(("t0", "t1", "t2"), 64)
    found = measure_drift(dataset, BUDGET, record_bytes=record_bytes)
    parts = parts_of(samples_of(dataset))
    assert [part["samples"] for part in found["parts"]] == list(map(len, parts))
    assert [part["accesses"] for part in found["parts"]] == [sum(map(len, part)) for part in parts]
    whole = keys_of(dict(calibrate(dataset, "exact", BUDGET, record_bytes=record_bytes).hot.rows))
    for part, own in zip(parts, found["parts"], strict=True):
        assert own["whole"] == pytest.approx(served(part, whole))
    counts = Counter(key for sample in parts[0] for key in sample)
    free = BUDGET // 64 - 200 - 2  # beside the small table and row 0 of the others
    fit = sum(key[0] != "t1" and key[1] != 0 for key in counts) <= free
    assert fit, "else ties would decide, and the set of the first tenth were not one set"
    first = set(counts) | {("t1", r) for r in range(200)} | {("t0", 0), ("t2", 0)}
    for part, own in zip(parts, found["parts"], strict=True):
        assert own["first"] == pytest.approx(served(part, first))
    assert found["parts"][0]["first"] == {"hot_samples": 1.0, "hot_accesses": 1.0}


def test_as_many_parts_as_are_asked_for(dataset: PackedDataset, tmp_path: Path) -> None:
    """As of days: the first of seven, and the first of two, is what `first` is chosen by."""
    record_bytes = dict.fromkeys(("t0", "t1", "t2"), 64)
    samples = samples_of(dataset)
    whole = keys_of(dict(calibrate(dataset, "exact", BUDGET, record_bytes=record_bytes).hot.rows))
    for num_parts in (2, 7):
        found = measure_drift(dataset, BUDGET, record_bytes=record_bytes, parts=num_parts)["parts"]
        parts = parts_of(samples, num_parts)
        assert [part["samples"] for part in found] == list(map(len, parts))
        assert [part["whole"] for part in found] == [pytest.approx(served(part, whole)) for part in parts]
        assert found[0]["first"]["hot_accesses"] > found[-1]["first"]["hot_accesses"]
    for wrong in (1, 1001):
        with pytest.raises(ValueError, match=f"parts is {wrong}; how hot rows age is seen over 2 to 1,000 parts"):
            measure_drift(dataset, BUDGET, record_bytes=record_bytes, parts=wrong)


def test_caches_need_rows_of_one_size(dataset: PackedDataset) -> None:
    found = measure_drift(dataset, BUDGET, record_bytes={"t0": 64, "t1": 64, "t2": 96})
    assert found["caches"].startswith("not run: rows of different tables differ in bytes")
    assert "lru" not in found["parts"][0] and "cache_rows" not in found


def test_caches_against_brute_force(dataset: PackedDataset) -> None:
    record_bytes = dict.fromkeys(("t0", "t1", "t2"), 64)
    budget = 64 * 800
    found = measure_drift(dataset, budget, record_bytes=record_bytes)
    assert found["cache_rows"] == 800 and found["caches"] == "run"
    samples = samples_of(dataset)
    cached: OrderedDict[tuple[str, int], None] = OrderedDict()
    hits = []
    for sample in samples:
        own = []
        for key in sample:
            own.append(key in cached)
            cached[key] = None
            cached.move_to_end(key)
            if len(cached) > 800:
                cached.popitem(last=False)
        hits.append(own)
    for part, own in zip(parts_of(hits), found["parts"], strict=True):
        lookups = [hit for sample in part for hit in sample]
        expected = {"hot_samples": sum(map(all, part)) / len(part), "hot_accesses": sum(lookups) / len(lookups)}
        assert own["lru"] == pytest.approx(expected)
    total = {name: sum(p[name]["hot_accesses"] * p["accesses"] for p in found["parts"]) for name in NAMES}
    assert total["belady"] >= total["whole"] - 800, "no fixed set of as many rows hits more, once its rows are loaded"
    assert total["belady"] > 1.05 * total["lru"] > 0


def test_too_many_accesses_for_caches_are_said(dataset: PackedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows, "MOST_ACCESSES", 100)
    found = measure_drift(dataset, BUDGET, record_bytes=dict.fromkeys(("t0", "t1", "t2"), 64))
    assert "accesses of 90,200 rows, above 100 accesses" in found["caches"]
    assert set(found["parts"][0]) == {"samples", "accesses", "whole", "first"}


def moving(folder: Path) -> PackedDataset:
    """Every tenth looks up hundred rows of its own."""
    info = DatasetInfo(
        name="moving",
        dense=(),
        features=(Feature("x", "t"), Feature("y", "t")),
        tables=(Table("t", 40_000),),
    )
    g = np.random.default_rng(0)
    with PackedWriter(folder, info, rows_per_block=300, rows_per_part=900) as writer:
        for k in range(10):
            ids = {name: (g.integers(0, 100, 400) + 1 + 1000 * k).astype(np.int32) for name in "xy"}
            writer.append("train", np.zeros(400, np.float32), np.zeros((400, 0), np.float32), ids)
        return writer.close()


def test_moving_rows(tmp_path: Path) -> None:
    """A set of the first tenth serves the first tenth alone; LRU follows within it."""
    found = measure_drift(moving(tmp_path / "data"), 64 * 101, record_bytes={"t": 64})
    first = [part["first"]["hot_accesses"] for part in found["parts"]]
    assert first == [1.0] + [0.0] * 9
    for part in found["parts"][1:]:
        assert part["lru"]["hot_accesses"] == pytest.approx(1 - 100 / 800), "all but the first access of each row"
        assert part["belady"]["hot_accesses"] >= part["lru"]["hot_accesses"]


def test_hostile_datasets(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    few = make_dataset(tmp_path / "few", rows={"train": 3, "val": 1, "test": 1}, table_rows=(30_000,), bag=True)
    found = measure_drift(few, 64 * 100, record_bytes={"t0": 64})
    assert [part["samples"] for part in found["parts"]] == [1, 1, 1]
    with pytest.raises(ValueError, match="a hot set of 63 bytes is too small"):
        measure_drift(few, 63, record_bytes={"t0": 64})
    none = make_dataset(tmp_path / "none", rows={"train": 0, "val": 1, "test": 1}, table_rows=(30,))
    with pytest.raises(ValueError, match="the training split has no rows"):
        measure_drift(none, 10**6, record_bytes={"t0": 64})


def test_lookups_of_no_sample(tmp_path: Path) -> None:
    """A table that is never accessed, and lists that are empty: samples without lookups are hot, shares are 0 of 0."""
    info = DatasetInfo(
        name="empty",
        dense=(),
        features=(
            Feature("bag", "t", "multi_hot"),
            Feature("past", "t", "sequence"),
            Feature("x", "unused", "multi_hot"),
        ),
        tables=(Table("t", 20_000), Table("unused", 20_000)),
    )
    with PackedWriter(tmp_path / "data", info) as writer:
        empty = (np.empty(0, np.int32), np.zeros(41, np.int64))
        splits = np.concatenate([np.zeros(20), np.arange(21) * 2]).astype(np.int64)
        lists = (np.arange(1, 41, dtype=np.int32) * 400, splits)
        ids = {"bag": lists, "past": empty, "x": empty}
        writer.append("train", np.zeros(40, np.float32), np.zeros((40, 0), np.float32), ids)
        dataset = writer.close()
    found = measure_drift(dataset, 64 * 30, record_bytes={"t": 64, "unused": 64})
    assert all(part["accesses"] == 0 for part in found["parts"][:5])
    for name in NAMES:
        assert found["parts"][0][name] == {"hot_samples": 1.0, "hot_accesses": 0.0}
    assert [part["lru"]["hot_samples"] for part in found["parts"][5:]] == [0.0] * 5


def test_a_dataset_without_counts_is_counted_with_a_warning(dataset: PackedDataset) -> None:
    with pytest.warns(UserWarning, match="carries no counts: its training split is counted"):
        measure_drift(dataset, BUDGET, record_bytes=dict.fromkeys(("t0", "t1", "t2"), 64))


def test_inspect_reports_drift(
    make_dataset: Callable[..., PackedDataset], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"train": 900, "val": 8, "test": 8}
    data = make_dataset(tmp_path / "data", rows=rows, table_rows=(60_000, 200), counts=True)
    report = tools.inspect(data.path, hot="512KiB", drift=True, out=tmp_path / "out")
    record_bytes = record_bytes_of(data, embedding_dim=16, optimizer="sgd")
    assert report["hot"]["drift"] == measure_drift(data, 1 << 19, record_bytes=record_bytes)
    assert json.loads((tmp_path / "out" / "hotness.json").read_text())["hot"]["drift"] == report["hot"]["drift"]
    page = (tmp_path / "out" / "hotness.html").read_text()
    assert "hot set of the whole split" in page and "Belady" in page
    assert "drift" not in tools.inspect(data.path, hot="512KiB")["hot"]
    print_inspection(report)
    shown = capsys.readouterr().out
    assert "of each part" in shown and f"{report['hot']['drift']['parts'][9]['lru']['hot_samples']:.1%} (" in shown
    with pytest.raises(ValueError, match="drift needs hot"):
        tools.inspect(data.path, drift=True)
    with pytest.raises(ValueError, match="parts needs drift"):
        tools.inspect(data.path, hot="512KiB", parts=3)
    with pytest.raises(ValueError, match="parts is 0; how hot rows age"):
        tools.inspect(data.path, hot="512KiB", drift=True, parts=0)
    done = CliRunner().invoke(app, ["inspect", str(data.path), "--hot", "512KiB", "--drift", "--parts", "3", "--json"])
    assert len(json.loads(done.stdout.splitlines()[-1])["hot"]["drift"]["parts"]) == 3

"""Laws 3 and 6 for samples made of events: how preparation runs moves no byte, nor does what happens after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_prepare_laws import StopAfter

from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import pipeline
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.sources import histories
from hotrow.data.sources.histories import RowSort
from hotrow.data.sources.registry import OpenedSource, open_source
from hotrow.data.sources.schema import parse_schema
from prepare_data import file_hashes, plan_of

SIZES: dict[str, Any] = {"rows_per_block": 128, "rows_per_part": 256}
SCHEMA = parse_schema(
    {
        "label": "came",
        "time": "time",
        "categorical": ["user", "item", {"column": "item_history", "kind": "sequence", "table": "item"}],
        "histories": {"user": "user", "item": "item", "length": 5, "negatives": 2},
        "split": {"fractions": [0.7, 0.1, 0.2]},
    },
    where="test",
)


def make_events(num_events: int = 2500, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    user, item = rng.zipf(1.5, num_events) % 80, rng.zipf(1.2, num_events) % 500
    return {"user": user, "item": item, "time": rng.integers(0, 1500, num_events)}


def opened(events: dict[str, np.ndarray]) -> OpenedSource:
    return open_source("frame", pa.table(events), schema=SCHEMA)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return prepare(opened(make_events()), tmp_path_factory.mktemp("plain") / "out", Options(**SIZES))


def test_every_split_has_rows_of_both_labels(plain: PackedDataset) -> None:
    assert [plain.split(split).num_rows > 300 for split in ("train", "val", "test")] == [True] * 3
    assert len(plain.info.splits["train"].parts) > 5


@pytest.mark.parametrize("options", [{"threads": 1}, {"rows_per_chunk": 61}], ids=str)
def test_how_it_runs_moves_no_byte(plain: PackedDataset, tmp_path: Path, options: dict[str, Any]) -> None:
    prepare(opened(make_events()), tmp_path / "out", Options(**SIZES, **options))
    assert file_hashes(tmp_path / "out") == file_hashes(plain.path)


def test_memory_moves_no_byte(plain: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "RowSort", lambda num_columns: RowSort(num_columns, rows_in_memory=40))
    monkeypatch.setattr(pipeline, "MIN_MEMORY_BYTES", 0)
    prepare(opened(make_events()), tmp_path / "out", Options(**SIZES, memory_bytes=24_000, rows_per_chunk=200))
    assert file_hashes(tmp_path / "out") == file_hashes(plain.path)


@pytest.mark.parametrize("stage", ["count", "encode"])
@pytest.mark.parametrize("count", [1, 9])
def test_stopped_and_continued_moves_no_byte(plain: PackedDataset, tmp_path: Path, stage: str, count: int) -> None:
    """The events are sorted again, and the rest of the samples are the same."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        StopAfter(monkeypatch, stage, count)
        with pytest.raises(Interrupted):
            prepare(opened(make_events()), tmp_path / "out", Options(**SIZES, rows_per_chunk=100))
    lines: list[str] = []
    prepare(opened(make_events()), tmp_path / "out", Options(**SIZES, rows_per_chunk=77), announce=lines.append)
    assert any("continuing" in line for line in lines)
    assert file_hashes(tmp_path / "out") == file_hashes(plain.path)


@pytest.mark.parametrize("change", ["items replaced", "permuted"])
def test_law_6_later_events_move_no_training_byte(plain: PackedDataset, tmp_path: Path, change: str) -> None:
    """Neither histories nor drawn items nor row numbers of training know what is bought after the cut."""
    plan = plan_of(plain.info.ids["split"])
    events = make_events()
    later = plan.assign(0, len(events["time"]), events["time"]) != 0
    assert 300 < later.sum() < 1200
    rng = np.random.default_rng(5)
    if change == "permuted":
        events["item"][later] = rng.permutation(events["item"][later])
    else:
        events["item"][later] = rng.integers(10**6, 10**6 + 90, int(later.sum()))
    prepare(opened(events), tmp_path / "out", Options(**SIZES))
    for part in ("train", "vocab", "counts"):
        assert file_hashes(tmp_path / "out", below=part) == file_hashes(plain.path, below=part)
    assert file_hashes(tmp_path / "out", below="test") != file_hashes(plain.path, below="test")

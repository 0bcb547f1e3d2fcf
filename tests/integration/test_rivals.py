"""Rivals beside a run: the rows that they get, how one of their settings is chosen, and the error of the difference."""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from hotrow import rivals
from hotrow.data.packed.reader import PackedDataset
from hotrow.rivals import Rows, rows_of

NUM_ROWS = 1500
OPTIONS = {"batch_size": 64, "max_steps": 20, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1}


def clicks() -> pa.Table:
    random = np.random.default_rng(0)
    item, price = random.integers(0, 30, NUM_ROWS), random.lognormal(2, 1, NUM_ROWS).round(3)
    click = random.random(NUM_ROWS) < np.where(item % 3 == 0, 0.7, 0.2)
    return pa.table(
        {
            "item": [f"i{i}" for i in item],
            "price": pa.array(price, mask=random.random(NUM_ROWS) < 0.1),
            "tags": [[f"t{tag}" for tag in random.integers(0, 5, random.integers(0, 4))] for _ in range(NUM_ROWS)],
            "click": click.astype(np.int8),
            "ts": np.arange(NUM_ROWS) + 1_700_000_000,
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("rivals") / "run"
    return hotrow.fit(clicks(), label="click", time="ts", run=folder, quiet=True, rivals=True, **OPTIONS)


def test_rivals_stand_beside_the_model(run: hotrow.Run) -> None:
    found, metrics = run.record.rivals, run.metrics
    assert found is not None and found.rivals.keys() == rivals.RIVALS.keys()
    for name, own in found.rivals.items():
        assert (own["auc"]["first"], own["logloss"]["first"]) == (metrics["auc"], metrics["logloss"])
        assert own["auc"]["second"] > 0.65, "an item decides"
        line = next(line for line in found.lines if line.startswith(name))
        assert f"LogLoss {own['logloss']['second']:.4f}" in line
        assert f"  {line}\n" in run.closing_lines("rows", [])
        assert name in (run.path / "report.html").read_text()
    assert run.summary()["rivals"]["rivals"] == hotrow.load(run.path).record.rivals.rivals  # type: ignore[union-attr]


def test_rows_are_those_of_the_run_without_statistics_and_buckets(run: hotrow.Run) -> None:
    info = PackedDataset.open(run.path / "data").info
    assert any("prior" in name for name in info.dense_names) and "price" in info.feature_names, "there are some"
    test = rows_of(PackedDataset.open(run.path / "data").split("test"))
    raw = clicks().slice(NUM_ROWS - len(test.label)).to_pydict()
    assert test.label.tolist() == raw["click"]
    assert test.columns == ([0, 1], [2, 3]), "price, and the length of tags; item, and the last of tags"
    price, length, item, tag = test.inputs.T
    assert np.isnan(price).tolist() == [value is None for value in raw["price"]]
    known = np.array([value is not None for value in raw["price"]])
    order = np.argsort(np.array(raw["price"], float)[known], kind="stable")
    assert (np.diff(price[known][order]) >= 0).all()
    assert length.tolist() == [len(tags) for tags in raw["tags"]]
    for found, values in ((item, raw["item"]), (tag, [tags[-1] if tags else None for tags in raw["tags"]])):
        assert len({*zip(found, values, strict=True)}) == len({*values}) == len({*found})


def of_fakes(monkeypatch: pytest.MonkeyPatch, **fakes: tuple[float, float]) -> list[tuple[Any, ...]]:
    """Replaces the rivals by one, whose settings know validation rows, and test rows, by so much; returns its calls."""
    calls: list[tuple[Any, ...]] = []

    def fit(train: Rows, scored: Rows, setting: dict[str, Any], rounds: int | None) -> tuple[np.ndarray, int]:
        calls.append((setting["name"], len(train.label), len(scored.label), rounds))
        knows = fakes[setting["name"]][rounds is not None]
        noise = np.random.default_rng(1).normal(size=len(scored.label))
        return knows * (2.0 * scored.label.astype(float) - 1) + 0.1 * noise, 7

    settings = [{"name": name} for name in fakes]
    monkeypatch.setattr(rivals, "RIVALS", {"fake": (fit, "sys", settings)})
    return calls


def compared(run: hotrow.Run) -> Any:
    judged = run.judged("test")
    return judged, rivals.compare_rivals(run.folder, PackedDataset.open(run.path / "data"), judged, lambda _: None)


def test_validation_rows_choose_and_rows_of_the_run_train(run: hotrow.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = of_fakes(monkeypatch, poor=(0.1, 3.0), good=(2.0, 0.5))
    _, found = compared(run)
    assert found.rivals["fake"]["setting"] == {"name": "good"}, "whatever test rows say"
    assert calls == [("poor", 1200, 150, None), ("good", 1200, 150, None), ("good", 1350, 150, 7)]


@pytest.mark.parametrize("knows", [3.0, 0.6, -1.0])
def test_the_error_is_that_of_paired_ones(run: hotrow.Run, monkeypatch: pytest.MonkeyPatch, knows: float) -> None:
    of_fakes(monkeypatch, one=(knows, knows))
    judged, found = compared(run)
    outputs, label, _ = judged.rows()
    noise = np.random.default_rng(1).normal(size=len(label))
    gaps = []
    for z, own, y in zip(knows * (2.0 * label - 1) + 0.1 * noise, outputs.astype(float), label, strict=True):
        losses = [-math.log(1 / (1 + math.exp(-each if y else each))) for each in (float(np.float32(z)), own)]
        gaps.append(losses[0] - losses[1])
    mean = sum(gaps) / len(gaps)
    error = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
    loss = found.rivals["fake"]["logloss"]
    assert (loss["difference"], loss["error"]) == (pytest.approx(mean, abs=1e-9), pytest.approx(error, rel=1e-6))
    assert any("use fake here" in line for line in found.lines) == (mean < -2 * error)
    assert (knows == 3.0) <= (mean < -2 * error) and (knows < 0) <= (mean > 0), "both cases are there"


def test_what_is_absent_or_left_out_is_said(run: hotrow.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find, gone = importlib.util.find_spec, ("sklearn", "lightgbm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    _, found = compared(run)
    assert found.rivals == {}
    for line, name in zip(found.lines, gone, strict=True):
        assert re.search(rf"needs {name}: pip install 'hotrow\[rivals\]'", line)
    calls = of_fakes(monkeypatch, one=(1.0, 1.0))
    monkeypatch.setattr(rivals, "MOST_ROWS", 100)
    assert "rivals trained on 100 rows and were judged by 100, which lie evenly among all" in compared(run)[1].lines
    assert calls == [("one", 100, 100, None), ("one", 100, 100, 7)]


def test_a_dataset_without_validation_rows(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = of_fakes(monkeypatch, one=(1.0, 1.0))
    again = hotrow.fit(run.path / "data", run=tmp_path / "run", quiet=True, rivals=True, **OPTIONS)
    assert again.record.rivals is not None and "fake" in again.record.rivals.rivals
    assert calls == [("one", 1215, 135, None), ("one", 1350, 150, 7)], "the last tenth chose"


def test_rows_without_one_label_of_clicks_have_no_rivals(tmp_path: Path) -> None:
    rows = clicks().filter(clicks()["price"].is_valid())
    told = {"label": "price", "time": "ts", "objective": "squared_error", "run": tmp_path / "run", "quiet": True}
    run = hotrow.fit(rows, rivals=True, **told, **OPTIONS)
    assert run.record.objective == "squared_error"
    assert run.record.rivals is not None and "one label of 0 or 1" in run.record.rivals.lines[0]

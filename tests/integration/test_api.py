"""fit, load, predict: raw rows in, a model and scores out, for paths and for frames."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import hotrow
from hotrow import api
from hotrow.data.chunk import RowError
from hotrow.data.pipeline import Interrupted, Options, prepare
from hotrow.data.progress import Progress
from hotrow.metrics import BinaryMetrics
from hotrow.run_folder import RunFolder
from hotrow.runs import resume
from prepare_data import file_hashes

OPTIONS = {"batch_size": 32, "epochs": 6, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1}


def clicks(num_rows: int, seed: int = 0) -> pa.Table:
    """Item decides the click, price helps."""
    generator = np.random.default_rng(seed)
    item, user = generator.zipf(1.4, num_rows) % 60, generator.integers(0, 300, num_rows)
    price = generator.lognormal(2, 1, num_rows)
    chance = np.where(item % 3 == 0, 0.75, 0.12) + 0.1 * (price > 8)
    columns = {
        "user_id": pa.array([f"u{i}" for i in user]),
        "item_id": pa.array([f"i{i}" for i in item]).dictionary_encode(),
        "price": price.round(3),
        "click": (generator.random(num_rows) < chance).astype(np.int8),
        "ts": np.arange(num_rows) + 1_700_000_000,
    }
    return pa.table(columns)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("fit")
    return hotrow.fit(clicks(4000), label="click", time="ts", run=folder / "run", quiet=True, **OPTIONS)


def test_fit_on_a_frame_learns(run: hotrow.Run) -> None:
    assert run.metrics["split"] == "test"
    assert run.metrics["auc"] > 0.75
    assert run.record["metrics"]["test"]["num_rows"] == pytest.approx(400, abs=2)
    assert run.summary()["auc"] == run.metrics["auc"]


def test_fit_learns_from_few_rows_with_its_own_defaults(tmp_path: Path) -> None:
    """3,200 training rows, an item's six or so: nobody would tune for these, so the defaults must find the effect."""
    generator = np.random.default_rng(0)
    chance = np.where(generator.random(500) < 0.5, 0.6, 0.2)
    item, user = generator.integers(0, 500, 4000), generator.integers(0, 2000, 4000)
    click = (generator.random(4000) < chance[item]).astype(np.int8)
    logs = pa.table({"click": click, "item": pa.array([f"i{i}" for i in item]), "user": user})
    run = hotrow.fit(logs, label="click", run=tmp_path / "run", quiet=True, threads=1)
    assert run.metrics["auc"] > 0.6  # 0.70 with the true chances


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_full_disk_while_scoring_names_the_file_and_leaves_none(
    run: hotrow.Run, tmp_path: Path, fill_disk: Callable[[int], Any], suffix: str
) -> None:
    out = tmp_path / f"scores{suffix}"
    message = rf"disk full while writing scores in {tmp_path}, writing {out} \(.* No scores are kept; .*same command"
    for room in (0, 500):
        with fill_disk(room), pytest.raises(OSError, match=message):
            run.write_scores(clicks(2000), out)
        assert list(tmp_path.iterdir()) == []
    assert run.write_scores(clicks(2000), out) == 2000


def test_predictions_of_the_test_rows_have_the_test_metrics(run: hotrow.Run) -> None:
    table = clicks(4000)
    last = table.slice(4000 - run.metrics["num_rows"])  # the split is by time
    scores = run.predict(last)
    assert scores.dtype == np.float32
    metrics = BinaryMetrics("probabilities")
    metrics.update(scores, last["click"].to_numpy())
    assert metrics.compute()["auc"] == pytest.approx(run.metrics["auc"], abs=1e-9)
    assert metrics.compute()["logloss"] == pytest.approx(run.metrics["logloss"], abs=1e-5)


def test_predict_from_files_needs_no_label_and_takes_unseen_ids(run: hotrow.Run, tmp_path: Path) -> None:
    new = clicks(50, seed=9).drop_columns(["click", "ts"])
    new = new.set_column(0, "user_id", pa.array(["never seen"] * 50))
    pq.write_table(new, tmp_path / "new.parquet")
    pa.csv.write_csv(new, tmp_path / "new.csv")
    scores = run.predict(new)
    assert np.isfinite(scores).all()
    assert ((scores > 0) & (scores < 1)).all()
    np.testing.assert_array_equal(scores, run.predict(tmp_path / "new.parquet"))
    np.testing.assert_array_equal(scores, run.predict(str(tmp_path / "*.csv")))


def test_scores_are_written(run: hotrow.Run, tmp_path: Path) -> None:
    table = clicks(70, seed=3)
    expected = run.predict(table)
    for suffix, read in ((".parquet", pq.read_table), (".csv", pa.csv.read_csv)):
        out = tmp_path / f"scores{suffix}"
        assert run.write_scores(table, out) == 70
        np.testing.assert_allclose(read(out)["score"].to_numpy(), expected, rtol=1e-6)
        with pytest.raises(ValueError, match="exists already"):
            run.write_scores(table, out)
    with pytest.raises(ValueError, match=r"ends in '\.txt'; choose \.parquet or \.csv"):
        run.write_scores(table, tmp_path / "scores.txt")
    with pytest.raises(ValueError, match=r"there is no folder .*absent; make it"):
        run.write_scores(table, tmp_path / "absent" / "scores.csv")


def test_a_loaded_run_is_the_run(run: hotrow.Run) -> None:
    table = clicks(100, seed=4)
    loaded = hotrow.load(run.path)
    np.testing.assert_array_equal(loaded.predict(table), run.predict(table))
    assert loaded.metrics == run.metrics
    assert loaded.evaluate("test")["auc"] == run.metrics["auc"]


def test_a_run_predicts_without_its_dataset(run: hotrow.Run, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved, ignore=shutil.ignore_patterns("data", "tensorboard"))
    table = clicks(30, seed=5)
    np.testing.assert_array_equal(hotrow.load(moved).predict(table), run.predict(table))


def test_html_is_escaped(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run._repr_html_()
    assert text.startswith("<table><tr><th>status</th><td>finished</td>")
    monkeypatch.setattr(run.folder, "path", Path("<script>"))
    assert "<script>" not in run._repr_html_()


def test_fit_on_a_packed_dataset(run: hotrow.Run, tmp_path: Path) -> None:
    again = hotrow.fit(run.path / "data", run=tmp_path / "again", quiet=True, **OPTIONS)
    assert again.metrics["auc"] == run.metrics["auc"]
    with pytest.raises(ValueError, match="label and time are for raw data"):
        hotrow.fit(run.path / "data", label="click")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["frame", "file"])
def test_fit_stopped_in_preparation_goes_on_by_the_same_call(
    kind: str, named: bool, run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data: Any = clicks(4000)
    if kind == "file":
        pq.write_table(data, "clicks.parquet")
        data = "clicks.parquet"
    options: dict[str, Any] = {"label": "click", "time": "ts", "run": "mine" if named else None, **OPTIONS}

    def press(report: Progress) -> None:
        if report.stage == "count":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread shall see it before this worker is through

    with monkeypatch.context() as patch:
        patch.setattr(api, "prepare", partial(prepare, options=Options(rows_per_chunk=50)))
        patch.setattr(api, "progress_bar", lambda: nullcontext(press))
        with pytest.raises(Interrupted, match="run the same command to go on"):
            hotrow.fit(data, **options)
    begun = sorted(path.parent for path in Path().glob("**/run.json"))
    with pytest.raises(ValueError, match=r"was stopped in preparing its data.* to go on there, run again: "):
        resume(begun[0])
    said: list[str] = []
    monkeypatch.setattr(api, "prepare", lambda opened, out, **_: prepare(opened, out, announce=said.append))
    again = hotrow.fit(data, quiet=True, **options)
    assert any("continuing the work found in" in line for line in said)
    assert [again.path] == begun == sorted(path.parent for path in Path().glob("**/run.json"))
    assert again.record["status"] == "finished" and "error" not in again.record
    assert again.metrics["auc"] == run.metrics["auc"]
    hashes, plain = file_hashes(again.path / "data"), file_hashes(run.path / "data")
    assert kind == "file" or hashes == plain
    assert {k: v for k, v in hashes.items() if k != "dataset.json"} == {
        k: v for k, v in plain.items() if k != "dataset.json"
    }
    assert named or hotrow.fit(data, quiet=True, **options).path != again.path, "a run that trained is not taken up"


def test_fit_stopped_between_preparation_and_training_does_not_prepare_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = {"label": "click", "run": tmp_path / "run", "quiet": True, **OPTIONS}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(api, "train", stop)
        hotrow.fit(clicks(1000), **options)
    monkeypatch.setattr(api, "prepare", stop)
    with pytest.raises(ValueError, match="exists already and is never overwritten"):
        hotrow.fit(clicks(1001), **options)
    assert hotrow.fit(clicks(1000), **options).record["status"] == "finished"


def test_two_runs_of_one_preparation_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin = partial(RunFolder.begin, None, name="clicks", preparation="p")
    with begin() as first, begin() as second:
        assert first.path != second.path
    with begin() as again:
        assert again.path == second.path, "the newest"
        with begin() as other:
            assert other.path == first.path


def test_options_are_found_by_their_last_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"option 'lr' may mean optimizer\.dense\.lr or optimizer\.sparse\.lr"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "a", lr=0.1)
    with pytest.raises(ValueError, match=r"option 'epoch' is not known; did you mean 'epochs'"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "b", epoch=1)
    with pytest.raises(ValueError, match=r"fit: train\.epochs is 0; allowed: an integer >= 1"):
        hotrow.fit(clicks(100), label="click", run=tmp_path / "c", epochs=0)
    assert list(tmp_path.iterdir()) == [], "nothing is made before the options are known to be good"


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run: it holds no run\.json"):
        hotrow.load(tmp_path)
    with pytest.raises(ValueError, match="label column 'klick' is not there; did you mean 'click'"):
        hotrow.fit(clicks(100), label="klick", run=tmp_path / "c", quiet=True)
    assert not (tmp_path / "c").exists()
    table = clicks(100)
    spoilt = table.set_column(table.schema.get_field_index("click"), "click", pa.array([0, 1] * 49 + [0, None]))
    with pytest.raises(RowError, match=r"<frame>:100 \(click\)"):
        hotrow.fit(spoilt, label="click", run=tmp_path / "c", quiet=True)
    assert hotrow.load(tmp_path / "c").record["status"] == "failed"
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        hotrow.load(tmp_path / "c").predict(clicks(5))


def test_no_second_process_trains_in_a_run(tmp_path: Path) -> None:
    run = hotrow.fit(clicks(1000), label="click", run=tmp_path / "run", max_steps=2, quiet=True)
    with RunFolder.open(run.path).claimed(), pytest.raises(ValueError, match="another process trains in"):
        resume(run.path, ["train.max_steps=4"], quiet=True)
    assert resume(run.path, ["train.max_steps=4"], quiet=True).record["steps"] == 4

"""A run that is judged by group and calibrated: what it records, and that every way to a score gives the same one."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.export.inputs import load_module
from hotrow.objectives.calibration import Calibration
from hotrow.parallel.communicator import Communicator
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from loops import looped
from rank_pool import RankPool

OPTIONS: dict[str, Any] = {
    "batch_size": 64, "epochs": 3, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "quiet": True,
}  # fmt: skip


def clicks(num_rows: int, seed: int = 0) -> pa.Table:
    """Users click at rates of their own, and on some items more."""
    rng = np.random.default_rng(seed)
    user, item = (60 * rng.random(num_rows) ** 2).astype(int), rng.integers(0, 20, num_rows)
    price = rng.random(num_rows)
    odds = -1.5 + (user % 7 - 3) / 2 + (item % 5 - 2) / 2 + price
    ids = {"user": [f"u{i}" for i in user], "item": [f"i{i}" for i in item]}
    return pa.table({**ids, "price": price, "click": rng.random(num_rows) < 1 / (1 + np.exp(-odds))})


def fit(rows: pa.Table, folder: Path, method: str | None, **more: Any) -> hotrow.Run:
    options: dict[str, Any] = {"by": "user", "method": method, "refit": False, **OPTIONS, **more}
    return hotrow.fit(rows, label="click", run=folder, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    return fit(clicks(3000), tmp_path_factory.mktemp("plain") / "run", None)


@pytest.fixture(scope="module", params=["platt", "isotonic"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    return fit(clicks(3000), tmp_path_factory.mktemp(request.param) / "run", request.param)


def labels_and_users(run: hotrow.Run, split: str) -> tuple[np.ndarray, np.ndarray]:
    dataset = PackedDataset.open(run.path / "data")
    own = dataset.split(split)
    place = dataset.info.feature_names.index("user")
    blocks = [own.block(index) for index in range(own.num_blocks)]
    return np.concatenate([each.label for each in blocks]), np.concatenate([each.ids[place] for each in blocks])


def test_gauc_stands_wherever_auc_does(plain: hotrow.Run) -> None:
    metrics = plain.metrics
    assert 0.5 < metrics["gauc"] < 1 and 10 < metrics["gauc_groups"] <= 60
    assert 0 < metrics["gauc_rows"] <= metrics["num_rows"]
    assert {line["gauc"] is not None for line in plain.folder.measurements() if line["kind"] == "eval"} == {True}
    assert plain.summary()["gauc"] == metrics["gauc"] == plain.evaluate("test")["gauc"]
    shown = f"{metrics['gauc']:.4f}"
    assert shown in plain.closing_lines("rows", []) and shown in (plain.path / "report.html").read_text()


def test_gauc_of_raw_rows_against_sklearn(plain: hotrow.Run) -> None:
    """A user that training never saw is no group; those whom it saw once or more have rows of their own."""
    from sklearn.metrics import roc_auc_score  # late: ranks import this file too

    new = clicks(800, seed=5)
    known = {f"u{i}" for i in range(40)}
    new = new.set_column(0, "user", pa.array([user if user in known else "nobody" for user in new["user"].to_pylist()]))
    scores, labels = plain.predict(new), new["click"].to_numpy()
    users = np.array(new["user"].to_pylist())
    found, rows, groups = 0.0, 0, 0
    for user in known:
        own = users == user
        if 0 < labels[own].sum() < own.sum():
            found += own.sum() * roc_auc_score(labels[own], scores[own])
            rows, groups = rows + own.sum(), groups + 1
    got = plain.evaluate_rows(new)
    assert (got["gauc_rows"], got["gauc_groups"]) == (rows, groups)
    assert got["gauc"] == pytest.approx(found / rows, abs=1e-9)


def test_gauc_may_choose_the_weights(tmp_path: Path) -> None:
    run = fit(clicks(1500), tmp_path / "run", None, monitor="gauc", early_stopping=2, eval_every=0.5)
    best = {line["step"]: line["gauc"] for line in run.folder.measurements() if line.get("split") == "val"}
    assert run.record.monitor == "gauc" and best[run.record.chosen_step] == max(best.values())


@pytest.mark.slow_but("platt")
def test_calibration_is_fitted_to_validation_rows_and_judged_on_others(plain: hotrow.Run, run: hotrow.Run) -> None:
    """Training is the same; so are the metrics of the validation rows, to which the map was fitted."""
    found = run.record.calibration
    assert found is not None and (found.step, found.from_selection) == (run.record.chosen_step, False)
    before, after = plain.record.metrics or {}, run.record.metrics or {}
    assert before["val"] == after["val"] and found.num_rows == after["val"]["num_rows"]
    assert before["test"]["logloss"] != after["test"]["logloss"]
    if found.method == "platt":
        assert before["test"]["auc"] == after["test"]["auc"]
    assert found.line() in run.closing_lines("rows", []) and found.method in (run.path / "report.html").read_text()
    assert run.evaluate("test") == (test := after["test"])
    assert run.record.scores is not None
    assert run.record.scores.rows.score == pytest.approx(test["calibration"] * test["base_rate"], rel=1e-6)


def test_validation_rows_have_the_rate_that_was_fitted(plain: hotrow.Run, run: hotrow.Run) -> None:
    """Against scikit-learn, on the scores of the same model without calibration."""
    labels, _ = labels_and_users(run, "val")
    judged = run.evaluate("val")
    assert judged["calibration"] == pytest.approx(1, abs=0.02) and judged["base_rate"] == labels.mean()
    if run.record.calibration and run.record.calibration.method == "isotonic":
        assert judged["logloss"] < (plain.record.metrics or {})["val"]["logloss"]


def test_every_way_to_a_score_gives_the_same(run: hotrow.Run, tmp_path: Path) -> None:
    new = clicks(400, seed=7)
    scores = run.predict(new)
    run.export(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert len(about["calibration"]) == 1
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    exported = scorer.score({name: new[name].to_pylist() for name in scorer.columns}).numpy()
    near = np.isclose(exported, scores, rtol=0, atol=1e-5)
    assert near.all() or (len(about["calibration"][0]["x"]) and near.mean() > 0.98), "rounding, beside a step"
    judged = run.evaluate_rows(new)
    losses = -np.log(np.where(new["click"].to_numpy(), scores, 1 - scores.astype(np.float64)))
    assert judged["logloss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow_but("platt")
def test_other_weights_are_not_calibrated(run: hotrow.Run, tmp_path: Path) -> None:
    found = run.record.calibration
    assert found is not None
    run.folder.update(calibration=Calibration("platt", found.step + 1, 9, slope=0.5))
    try:
        with pytest.warns(UserWarning, match=f"not calibrated.*step {found.step + 1}"):
            run.export(tmp_path / "out")
        assert json.loads((tmp_path / "out" / "export.json").read_text())["calibration"] == []
    finally:
        run.folder.update(calibration=found)


@pytest.mark.slow_but("platt")
def test_a_finished_run_can_be_calibrated(plain: hotrow.Run, run: hotrow.Run, tmp_path: Path) -> None:
    found = run.record.calibration
    assert found is not None
    again = shutil.copytree(plain.path, tmp_path / "run")
    assert hotrow.load(again).record.calibration is None
    folder = runs.resume(again, [f"calibration.method={found.method}"], quiet=True)
    assert folder.record.calibration == found and folder.record.metrics == run.record.metrics
    runs.resume(again, ["calibration.method=null"], quiet=True)
    assert hotrow.load(again).record.calibration is None


def test_left_out_negatives_count_in_scores_of_new_rows_alone(plain: hotrow.Run, tmp_path: Path) -> None:
    kept, new = 0.25, clicks(400, seed=7)
    run = fit(clicks(3000), tmp_path / "run", None, negatives_kept=kept)
    assert run.record.metrics == plain.record.metrics and run.evaluate("test") == plain.evaluate("test")
    p = plain.predict(new).astype(np.float64)
    scores = run.predict(new)
    np.testing.assert_allclose(scores, p / (p + (1 - p) / kept), rtol=1e-5)
    assert run.evaluate_rows(new)["auc"] == plain.evaluate_rows(new)["auc"]
    run.export(tmp_path / "out")
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    exported = scorer.score({name: new[name].to_pylist() for name in scorer.columns}).numpy()
    np.testing.assert_allclose(exported, scores, rtol=0, atol=1e-5)


def test_trained_again_with_the_validation_rows_it_keeps_the_map_of_the_selection(tmp_path: Path) -> None:
    run = fit(clicks(2000), tmp_path / "run", "platt", refit=True, choice=False)
    selection = hotrow.load(run.path / "selection")
    ours, theirs = run.record.calibration, selection.record.calibration
    assert ours is not None and theirs is not None and ours.from_selection and not theirs.from_selection
    assert (ours.slope, ours.intercept, ours.num_rows) == (theirs.slope, theirs.intercept, theirs.num_rows)
    assert ours.step == run.record.chosen_step and "val" not in (run.record.metrics or {})
    assert run.evaluate("test") == (run.record.metrics or {})["test"]
    other = runs.resume(run.path, ["calibration.method=isotonic"], quiet=True).record
    assert other.calibration is None and "isotonic" in other.warnings["not_calibrated"]["text"]


def test_the_recipe_of_fit_draws_scores_together_that_are_too_sure(tmp_path: Path) -> None:
    """A model that has learned its rows by heart; without the map, its test rows are scored worse in the same order."""
    more = {"epochs": 15, "early_stopping": None, "embedding_dim": 16, "optimizer.sparse.lr": 1.0, "dropout": 0.0}
    options: dict[str, Any] = {**OPTIONS, **more, "by": "user", "refit": False}
    run = hotrow.fit(clicks(1200), label="click", run=tmp_path / "run", **options)
    found = run.record.calibration
    assert found is not None and found.method == "slope" and 0 < found.slope < 0.9
    new = clicks(400, seed=7)
    scores, judged = run.predict(new), run.evaluate("test")
    run.export(tmp_path / "out")
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    exported = scorer.score({name: new[name].to_pylist() for name in scorer.columns}).numpy()
    served = hotrow.Scorer(tmp_path / "out").score(new.select(scorer.columns).to_pylist())
    np.testing.assert_allclose(exported, scores, rtol=0, atol=1e-6)
    np.testing.assert_allclose(served, scores, rtol=0, atol=1e-6)
    run.folder.update(calibration=None)
    plain = hotrow.load(run.path).evaluate("test")
    assert judged["auc"] == plain["auc"] and judged["gauc"] == plain["gauc"]
    assert judged["logloss"] < plain["logloss"]


def test_validation_rows_of_one_label_change_nothing_by_the_recipe_of_fit(tmp_path: Path) -> None:
    rows = clicks(1000)
    clicked = np.where(np.arange(1000) < 800, rows["click"].to_numpy(), np.arange(1000) >= 900)
    rows = rows.set_column(3, "click", pa.array(clicked)).append_column("ts", pa.array(np.arange(1000)))
    run = hotrow.fit(rows, label="click", time="ts", run=tmp_path / "run", choice=False, **OPTIONS)
    found = run.record.calibration
    assert found is not None and (found.method, found.slope, found.intercept) == ("slope", 1, 0)
    assert found.from_selection and "not_calibrated" not in run.record.warnings
    assert "changes nothing: 100 validation rows of the selection" in run.closing_lines("rows", [])
    assert "calibrated on" not in (run.path / "report.html").read_text()
    assert hotrow.load_config(run.path / "config.yaml").calibration.method == "slope"


def test_weights_count_in_calibration_and_groups(tmp_path: Path) -> None:
    rows = clicks(2000)
    rows = rows.append_column("w", pa.array(np.where(rows["click"].to_numpy(), 1.0, 5.0)))
    run = fit(rows, tmp_path / "run", "platt", weight="w")
    found = run.evaluate("val")
    runs.resume(run.path, ["calibration.method=null"], quiet=True)
    plain = hotrow.load(run.path).evaluate("val")
    assert found["base_rate"] < 0.15 and found["calibration"] == pytest.approx(1, abs=0.05)
    assert (found["auc"], found["gauc"]) == pytest.approx((plain["auc"], plain["gauc"]))
    assert 0.4 < found["gauc"] < 1 and found["logloss"] < plain["logloss"] + 1e-4


def config(data: PackedDataset, folder: Path, **more: Any) -> Any:
    raw = {
        "data": str(data.path), "run": str(folder), "memory": "dram", "metrics": {"by": "x0"},
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "train": {"batch_size": 32, "micro_batches": 2, "threads": 1, "monitor": "gauc"},
        "calibration": {"method": "isotonic"},
    }  # fmt: skip
    return make_config({**raw, **more})


def train_rank(comm: Communicator, data: PackedDataset, folder: Path) -> None:
    runs.train(config(data, folder), quiet=True, comm=comm)


def test_ranks_find_the_same(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    data = make_dataset(tmp_path / "data", rows={"train": 256, "val": 5000, "test": 9000})
    whole = runs.train(config(data, tmp_path / "whole"), quiet=True).record
    with RankPool(2) as pool:
        pool.run(train_rank, data, tmp_path / "ranks", num_ranks=2, micro_batches=2)
    shared = RunFolder.open(tmp_path / "ranks").record
    assert shared.metrics == whole.metrics and shared.calibration == whole.calibration is not None
    assert whole.metrics is not None and not math.isnan(whole.metrics["test"]["gauc"])


@looped(
    ("rows", "more", "match"),
    [
        ({"train": 64, "test": 64}, {}, r"calibration\.method is 'isotonic'.*'val'.*no rows.*null"),
        ({"train": 64, "val": 1}, {}, r"calibration\.method is 'isotonic'.*'val'.*label [01] alone.*null"),
        ({"train": 64, "val": 64}, {"metrics": {"by": "x9"}}, r"metrics\.by is 'x9'.*x0, x1, x2.*schema"),
        ({"train": 64, "val": 64}, {"metrics": {"by": "bag"}}, r"metrics\.by is 'bag'.*list of ids"),
    ],
)
def test_what_cannot_be_done_is_refused_before_training(
    tmp_path: Path, make_dataset: Callable[..., PackedDataset], rows: dict[str, int], more: Any, match: str
) -> None:
    data = make_dataset(tmp_path / "data", rows=rows)
    with pytest.raises(ValueError, match=match):
        runs.train(config(data, tmp_path / "run", train={"batch_size": 32}, **more), quiet=True)
    assert not (tmp_path / "run").exists()

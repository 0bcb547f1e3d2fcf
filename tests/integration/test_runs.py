"""`hotrow runs`, `train --seeds` and `Run.history`, as a user has them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

import hotrow
from hotrow.api import load
from hotrow.base.files import claim
from hotrow.cli import app as cli
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.sources.split import SPLIT_SALT, uniform_of
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.tune.compare import compare, short_names
from hotrow.tune.listing import lines_of, list_runs, remove_run


def train(data: Path, run: Path, by: str | None = None, **options: Any) -> RunFolder:
    model = {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}
    train = {"batch_size": 64, "threads": 1, "log_every": 2, "eval_every": 0.5, **options}
    raw = {"data": str(data), "run": str(run), "model": model, "train": train, "memory": "dram", "metrics": {"by": by}}
    return runs.train(make_config(raw), quiet=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Path:
    """Two runs of one dataset in runs/, and one of another dataset in others/."""
    folder = tmp_path_factory.mktemp("work")
    make_dataset(folder / "data", bag=False)
    make_dataset(folder / "other", bag=False, seed=1)
    train(folder / "data", folder / "runs" / "a")
    train(folder / "data", folder / "runs" / "deep" / "b", seed=2, batch_size=16)
    train(folder / "other", folder / "others" / "c")
    return folder


def test_the_list_has_each_run_and_what_differs(work: Path) -> None:
    a, b = list_runs(work / "runs")
    assert (a["run"], b["run"]) == (str(work / "runs" / "a"), str(work / "runs" / "deep" / "b"))
    assert a["status"] == b["status"] == "finished" and a["split"] == "test"
    assert b["options"] == {"train.batch_size": "16", "train.seed": "2"}
    assert a["metrics"]["auc"] == load(a["run"]).metrics["auc"]
    assert a["bytes"] > 0 and a["samples_per_s"] > 0
    assert "batch_size 16, seed 2" in lines_of([a, b])[2]


def test_names_are_short_but_no_two_are_one() -> None:
    names = ["optimizer.dense.lr", "model.dense.lr", "train.seed", "name", "model.name"]
    assert [*short_names(names).values()] == ["optimizer.dense.lr", "model.dense.lr", "seed", "name", "model.name"]


def test_a_run_that_was_killed_or_damaged_is_in_the_list(work: Path, tmp_path: Path) -> None:
    killed = train(work / "data", tmp_path / "killed", max_steps=2)
    killed.update(status="running")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{}")
    damaged, found = list_runs(tmp_path)
    assert (damaged["status"], found["status"]) == ("unreadable", "killed")
    assert "run.json" in damaged["reason"]
    with claim(killed.path):
        assert list_runs(tmp_path)[1]["status"] == "running"


def test_the_list_as_json(work: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(work)
    found = command("runs", "runs", "--json")
    assert [row["run"] for row in found["runs"]] == ["runs/a", "runs/deep/b"]
    assert "two runs" in command("runs", "a", "b", "c", code=2)


def test_two_runs_are_compared_on_their_test_rows(work: Path) -> None:
    a, b = work / "runs" / "a", work / "runs" / "deep" / "b"
    found, back = compare(a, b), compare(b, a)
    assert found["rows"] == 128
    assert found["options"]["train.seed"] == {str(a): "1", str(b): "2"}
    for name, own in found["metrics"].items():
        assert (own["first"], own["second"]) == (load(a).metrics[name], load(b).metrics[name])
        assert own["difference"] == pytest.approx(-back["metrics"][name]["difference"])
        assert own["error"] == pytest.approx(back["metrics"][name]["error"]) and own["error"] > 0
    alike = compare(a, a)["metrics"]
    assert all(own["within_noise"] and own["difference"] == 0 for own in alike.values())


def test_runs_of_other_test_rows_are_refused_by_name(work: Path, tmp_path: Path) -> None:
    a, c = work / "runs" / "a", work / "others" / "c"
    with pytest.raises(ValueError, match=rf"{re.escape(str(a))}.*{re.escape(str(c))}"):
        compare(a, c)
    unbegun = RunFolder.create(tmp_path / "unbegun", name="x")
    with pytest.raises(ValueError, match="unbegun ended before its first step"):
        compare(a, unbegun.path)
    with pytest.raises(ValueError, match="is not a run"):
        compare(a, tmp_path)


def test_runs_of_two_schemas_are_compared_by_numbers_of_rows(tmp_path: Path) -> None:
    """Rows of the log are not in the order of time, in which datasets store them."""
    rng = np.random.default_rng(3)
    x, day = rng.normal(size=(2, 3000)).round(3), rng.permutation(3000)
    click = (rng.random(3000) < 1 / (1 + np.exp(-x.sum(0)))).astype(int)
    log = polars.DataFrame({"click": click, "day": day, "one": x[0], "two": x[1]})
    log.write_csv(tmp_path / "log.csv")

    def run(name: str, dense: list[str], label: str = "click", kind: str = "time") -> hotrow.Run:
        buckets = [{"column": "one", "buckets": [0]}]
        schema = {"label": label, "time": {"column": "day"}, "dense": dense, "categorical": buckets}
        options: dict[str, Any] = {"split": {"kind": kind, "seed": 5}, "refit": False, "quiet": True, "epochs": 1}
        options |= {"threads": 1, "batch_size": 256, "embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4]}
        return hotrow.fit(str(tmp_path / "log.csv"), schema=schema, run=tmp_path / name, **options)

    both, one = run("both", ["one", "two"]), run("one", ["one"])
    random = run("random", ["two"], kind="random")
    tests = {"one": day >= 2700, "random": (day >= 2700) & (uniform_of(5, np.arange(3000), salt=SPLIT_SALT) >= 0.9)}
    for other in (one, random):
        chosen = tests[other.path.name]
        first, second = (own.predict(log.drop("click")).astype(np.float64)[chosen] for own in (both, other))
        losses = [-np.log(np.where(click[chosen], score, 1 - score)) for score in (first, second)]
        found = compare(both.path, other.path)
        own = found["metrics"]["logloss"]
        assert found["rows"] == chosen.sum()
        assert (own["first"], own["second"]) == pytest.approx([loss.mean() for loss in losses], abs=1e-6)
        assert own["error"] == pytest.approx((losses[1] - losses[0]).std(ddof=1) / chosen.sum() ** 0.5, rel=1e-4)
    with pytest.raises(ValueError, match="other labels"):
        log.with_columns(other=1 - polars.col("click")).write_csv(tmp_path / "log.csv")
        again = run("again", ["one"])
        compare(again.path, run("label", ["one"], label="other").path)
    with pytest.raises(ValueError, match="same files"):
        compare(both.path, again.path)
    (tmp_path / "log.csv").unlink()
    with pytest.raises(ValueError, match=r"log\.csv.*gone or has changed"):
        compare(both.path, one.path)


def test_runs_that_are_judged_by_group_are_compared_by_group_too(work: Path, tmp_path: Path) -> None:
    a, b = (train(work / "data", tmp_path / f"x1-{seed}", by="x1", seed=seed).path for seed in (1, 2))
    other = train(work / "data", tmp_path / "x0", by="x0", max_steps=2).path
    found = compare(a, b)["metrics"]["gauc"]
    assert (found["first"], found["second"]) == (load(a).metrics["gauc"], load(b).metrics["gauc"]) and found[
        "error"
    ] > 0
    assert "gauc" not in compare(a, work / "runs" / "a")["metrics"]
    with pytest.raises(ValueError, match="x0 and by x1"):
        compare(a, other)


def test_a_run_is_removed_if_asked(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    run = train(work / "data", tmp_path / "run", max_steps=2)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: (_ for _ in ()).throw(cli.typer.Abort))
    command("runs", "--remove", run.path, code=1)
    assert run.path.exists(), "the answer was no"
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    command("runs", "--remove", run.path)
    assert not run.path.exists() and tmp_path.exists()


def test_several_runs_are_removed_or_none(work: Path, tmp_path: Path, command: Any) -> None:
    """Nor is one that trains."""
    a, b = (train(work / "data", tmp_path / name, max_steps=1).path for name in ("a", "b"))
    with claim(a), pytest.raises(ValueError, match="another process trains"):
        remove_run(a)
    said = command("runs", "--remove", a, "--remove", work, "--yes", code=2)
    assert f"{work} is not a run" in said and a.exists()
    assert "leave out" in command("runs", b, "--remove", a, code=2)
    every = [word for path in (a, b, a) for word in ("--remove", path)]
    found = command("runs", *every, "--yes", "--json")
    assert found["bytes_freed"] > 0 and not a.exists() and not b.exists()


def test_train_with_seeds(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = "{embedding_dim: 4, bottom_mlp: [4], top_mlp: [4]}"
    Path("r.yaml").write_text(f"data: {work}/data\nmodel: {model}\ntrain: {{batch_size: 64, threads: 1}}\n")
    found = command("train", "r.yaml", "--seeds", "3", "--json")
    assert found["runs"] == [f"runs/data-dlrm-00{k}" for k in (1, 2, 3)]
    own = [load(run) for run in found["runs"]]
    assert [run.record.seeds for run in own] == [{"train.seed": k} for k in (1, 2, 3)]
    figures = [run.metrics["logloss"] for run in own]
    mean = sum(figures) / 3
    error = (sum((figure - mean) ** 2 for figure in figures) / 6) ** 0.5
    assert found["metrics"]["logloss"] == {"mean": pytest.approx(mean), "error": pytest.approx(error)}
    assert "--seeds is 0" in command("train", "r.yaml", "--seeds", "0", code=2)
    assert "--seeds" in command("train", "--resume", "runs/data-dlrm-001", "--seeds", "2", code=2)


def test_seeds_start_from_a_run(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = train(work / "data", tmp_path / "first", max_steps=1)
    line = ["train", "--from", "first", "--set", "run=seeds", "--set", "train.max_steps=1"]
    found = command(*line, "--seeds", "2", "--json")
    assert found["runs"] == ["seeds/seed-1", "seeds/seed-2"]
    for run in map(load, found["runs"]):
        assert run.record.parent is not None and run.record.parent.path == str(first.path.resolve())


def test_the_history_of_a_run_is_a_frame(work: Path) -> None:
    run = load(work / "runs" / "a")
    frame = polars.DataFrame(run.history)
    lines = run.folder.measurements()
    assert len(frame) == len(lines)
    for line, row in zip(lines, frame.to_dicts(), strict=True):
        assert (row["kind"], row["step"], row["split"]) == (line["kind"], line["step"], line.get("split"))
        if line["kind"] == "train":
            assert (row["loss"], row["lr.dense"], row["auc"]) == (line["loss"], line["lr"]["dense"], None)
        else:
            assert (row["auc"], row["loss"]) == (line["auc"], None)
    steps = frame.filter(polars.col("kind") == "train")["step"].to_list()
    assert steps == sorted(steps) and steps


def test_a_run_before_its_first_step_has_an_empty_history(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", name="x")
    assert load(folder.path).history == {"kind": [], "step": [], "split": []}

"""What an earlier version made is read with the values that it gave: see tests/fixtures/make.py."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import hotrow
from hotrow.cli import app as cli
from hotrow.cli.tools import check, inspect, report
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.kernels import ops
from hotrow.run import runs

OLD = Path(__file__).parents[1] / "fixtures" / "e5a8ef8"
VALUES = json.loads((OLD / "values.json").read_text())
RUNS = sorted(VALUES["runs"])
FINISHED = [name for name in RUNS if VALUES["runs"][name]["status"] == "finished"]
TOLERANCE = 1e-4
"""Bits of dense layers depend on processor and instruction set; over a run, differences grow."""
SAME_WEIGHTS = 1e-5

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tables in tiers need the native module")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because reading a run may write into it."""
    return shutil.copytree(OLD, tmp_path_factory.mktemp("old") / "artifacts")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*words: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["hotrow", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert not ended.value.code, out + err
        return json.loads(out.splitlines()[-1])

    return run


def close_to(wanted: Any, found: Any, tolerance: float) -> None:
    """Every number that the earlier version gave is there."""
    for key, value in wanted.items():
        if isinstance(value, dict):
            close_to(value, found[key], tolerance)
        else:
            assert found[key] == (pytest.approx(value, rel=tolerance) if isinstance(value, float) else value), key


@pytest.mark.parametrize("path", sorted(VALUES["checked"]))
def test_check(old: Path, path: str) -> None:
    wanted, found = VALUES["checked"][path], check(old / path)
    same = {key for key in wanted if key not in ("path", "bytes", "seconds")}
    assert {key: found[key] for key in same} == {key: wanted[key] for key in same}


@pytest.mark.parametrize("data", sorted(VALUES["inspected"]))
def test_inspect(old: Path, data: str) -> None:
    wanted = VALUES["inspected"][data]
    found = json.loads(json.dumps(inspect(old / data), default=str))
    close_to({key: wanted[key] for key in wanted if key not in ("path", "seconds", "files")}, found, 1e-12)


@pytest.mark.parametrize("data", ["data", "events"])
def test_raw_rows_and_schema_make_the_same_dataset(old: Path, tmp_path: Path, data: str) -> None:
    names = {"data": ("rows.parquet", "schema.yaml"), "events": ("events.parquet", "events.yaml")}[data]
    rows, schema = (old / name for name in names)
    made = run_prepare("parquet", rows, tmp_path / "data", schema=schema)
    before = PackedDataset.open(old / data)
    assert [(table.name, table.num_embeddings, table.vocabulary) for table in made.info.tables] == [
        (table.name, table.num_embeddings, table.vocabulary) for table in before.info.tables
    ]
    for part in sorted((old / data).rglob("*.arrow")):
        assert (made.path / part.relative_to(old / data)).read_bytes() == part.read_bytes(), part.name


def test_the_recipe_that_init_wrote(old: Path) -> None:
    config = load_config(old / "guessed" / "recipe.yaml")
    assert config.model.name == "dlrm" and config.train.batch_size > 0


@pytest.mark.parametrize("name", FINISHED)
def test_training_on_the_dataset_again(old: Path, tmp_path: Path, name: str) -> None:
    """With the config that the run keeps, every option of which is written out."""
    config = load_config(old / "runs" / name / "config.yaml", [f"run={tmp_path / 'run'}"])
    data = VALUES["runs"][name]
    config = config.model_copy(update={"data": str(old / Path(config.data).name)})
    run = runs.train(config, quiet=True)
    found = [line["loss"] for line in run.measurements() if "loss" in line]
    assert run.record.steps == data["steps"] and found == pytest.approx(data["losses"], rel=TOLERANCE)
    close_to(data["metrics"], hotrow.load(run.path).metrics, 10 * TOLERANCE)


def test_resuming_the_interrupted_run(old: Path, tmp_path: Path, verb: Any) -> None:
    wanted = VALUES["resumed"]
    path = shutil.copytree(old / "runs" / "interrupted", tmp_path / "run")
    assert hotrow.load(path).record.status == "interrupted"
    found = verb("train", "--resume", path, "--set", f"data={old / 'data'}")
    assert found["status"] == "finished" and found["steps"] == wanted["steps"] > VALUES["runs"]["interrupted"]["steps"]
    run = hotrow.load(path)
    losses = [line["loss"] for line in run.folder.measurements() if "loss" in line]
    assert losses == pytest.approx(wanted["losses"], rel=TOLERANCE)
    scores = run.predict(pq.read_table(old / "rows.parquet").slice(0, len(wanted["scores"])))
    assert scores == pytest.approx(wanted["scores"], rel=10 * TOLERANCE)


@pytest.mark.parametrize("name", RUNS)
def test_eval(old: Path, verb: Any, name: str) -> None:
    wanted, data = VALUES["runs"][name], "events" if name == "histories" else "data"
    found = verb("eval", old / "runs" / name, "--data", old / data, "--split", "val")
    close_to(wanted["evaluated"], found, SAME_WEIGHTS)
    if "of_rows" in wanted:
        found = verb("eval", old / "runs" / name, old / "rows.parquet")
        close_to(wanted["of_rows"], found, SAME_WEIGHTS)


@pytest.mark.parametrize("name", [name for name in RUNS if "scores" in VALUES["runs"][name]])
def test_predict(old: Path, tmp_path: Path, verb: Any, name: str) -> None:
    wanted = VALUES["runs"][name]["scores"]
    pq.write_table(pq.read_table(old / "rows.parquet").slice(0, len(wanted)), tmp_path / "rows.parquet")
    verb("predict", old / "runs" / name, tmp_path / "rows.parquet", "--out", tmp_path / "scores.parquet")
    found = pq.read_table(tmp_path / "scores.parquet").column("score").to_pylist()
    assert found == pytest.approx(wanted, rel=SAME_WEIGHTS)


@pytest.fixture
def scorer_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], ModuleType]]:
    def load(folder: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"score_of_{folder.name}", folder / "score.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield load


@pytest.mark.parametrize("how", ["exported then", "exported now"])
def test_an_export_scores_as_the_run(old: Path, tmp_path: Path, verb: Any, scorer_in: Any, how: str) -> None:
    folder, wanted = old / "export-dram", VALUES["runs"]["dram"]["scores"]
    if how == "exported now":
        folder = tmp_path / "export"
        verb("export", old / "runs" / "dram", "--out", folder)
    rows = pq.read_table(old / "rows.parquet").slice(0, len(wanted)).to_pydict()
    found = scorer_in(folder).Scorer(folder).score({name: rows[name] for name in rows if name not in ("click", "at")})
    assert found.tolist() == pytest.approx(wanted, rel=SAME_WEIGHTS)


def test_exports_of_histories_are_the_same_then_and_now(old: Path, tmp_path: Path, verb: Any, scorer_in: Any) -> None:
    then, now = old / "export-histories", tmp_path / "export"
    verb("export", old / "runs" / "histories", "--out", now)
    rows = {"user": [1, 2, 3], "item": [4, 5, 900], "item_history": [[4, 7], [], [5]]}
    scores = [scorer_in(folder).Scorer(folder).score(rows) for folder in (then, now)]
    torch.testing.assert_close(scores[0], scores[1], rtol=SAME_WEIGHTS, atol=0)


def test_report(old: Path, tmp_path: Path) -> None:
    report([old / "runs" / name for name in RUNS], out=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for name in FINISHED:
        assert name in page and f"{VALUES['runs'][name]['metrics']['auc']:.4f}" in page


def test_a_config_of_then_is_a_config_of_now(old: Path) -> None:
    for name in RUNS:
        config = load_config(old / "runs" / name / "config.yaml")
        assert make_config(config.model_dump(mode="json")) == config

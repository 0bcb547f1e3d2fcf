"""Studies in YAML: what they expand into, what is kept when they stop, and what their files say."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.main import get_command

from benchmarks import study_sentences
from hotrow.base.files import claim
from hotrow.base.records import read_sealed
from hotrow.cli.app import app, main
from hotrow.costs.cost import Prediction
from hotrow.costs.hardware import MACHINES, Figure, Gpu, Hardware
from hotrow.lab.study import cells, data, results, runner, worker
from hotrow.lab.study.cells import Studied
from hotrow.lab.study.data import SyntheticRows
from hotrow.lab.study.group import GroupError, MemoryGroup
from hotrow.lab.study.run import run_study
from hotrow.lab.study.study import STUDIES, Cell, Draw, Range, expand, find_study, read_study
from hotrow.run.folder import RunFolder
from hotrow.run.meters import Session
from hotrow.setup import slots

NAME = "Tiny <script>alert(1)</script> & 50 %"
TINY: dict[str, Any] = {
    "title": NAME,
    "asks": "For tests.",
    "base": {
        "data": {"tables": 2, "rows": 50, "dense": 2, "samples": 64},
        "model": {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"batch_size": 16, "threads": 1},
        "memory": "dram",
    },
    "rounds": 3,
    "groups": {
        "batch": {"asks": "Why <b>?", "axes": {"train.batch_size": [16, 32]}},
        "both": {
            "axes": {
                "data.rows": [50, 60],
                "mlp": {
                    "a_b & <i>": {"model.bottom_mlp": [2], "model.top_mlp": [3]},
                    "wide": {"model.bottom_mlp": [8, 8], "model.top_mlp": [8]},
                },
            },
        },
    },
}
HARDWARE = Hardware(
    name="a machine",
    date="2026-11-01",
    host={},
    versions={},
    num_cores=2,
    dram_bytes=Figure(1e9),
    watts=Figure(50.0, source="declared", note="the label"),
)


def write_study(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
    return path


def cells_of(folder: Path, *, quick: bool = False, **changes: Any) -> list[Cell]:
    path = write_study(folder, **changes)
    return expand(read_study(path), origin=str(path), quick=quick)


def row_of(**changes: Any) -> dict[str, Any]:
    """What a worker returns."""
    rounds = {"rounds": 3, "clean_rounds": 3, "taken_rounds": 3}
    speed = {"samples_per_s": 8000.0, "spread": [7000.0, 9000.0], "step_ms": 2.0, "spread_ms": [1.8, 2.2], "noise": 0.1}
    return {"status": "measured", **speed, **rounds, **changes}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cells whose training was begun. No process trains."""
    names: list[str] = []

    def run(cell: Cell, config: Any, work: Path) -> dict[str, Any]:
        names.append(cell.name)
        return row_of()

    monkeypatch.setattr(cells, "run_cell", run)
    return names


# ---- expansion


def test_a_grid_has_every_combination_of_its_points(tmp_path: Path) -> None:
    found = cells_of(tmp_path)
    both = [cell for cell in found if cell.group == "both"]
    wanted = itertools.product([50, 60], [("a_b & <i>", [2], [3]), ("wide", [8, 8], [8])])
    assert [cell.name for cell in found[:2]] == ["batch/train.batch_size=16", "batch/train.batch_size=32"]
    for cell, (rows, (label, bottom, top)) in zip(both, wanted, strict=True):
        config = cell.resolved(data="d", tables_bytes=0)
        assert cell.labels == {"data.rows": str(rows), "mlp": label}
        assert isinstance(cell.data, SyntheticRows) and (cell.data.rows, cell.data.tables) == (rows, 2)
        assert (config.model.bottom_mlp, config.model.top_mlp, config.train.batch_size) == (bottom, top, 16)  # type: ignore[attr-defined]
    assert len({cell.key for cell in found}) == len(found) == 6


def test_a_quick_look_takes_the_ends_of_every_axis(tmp_path: Path) -> None:
    groups = {"batch": {"axes": {"train.batch_size": [16, 32, 64, 128], "data.rows": [9]}}}
    found = cells_of(tmp_path, quick=True, groups=groups)
    assert [cell.labels["train.batch_size"] for cell in found] == ["16", "128"] and found[0].rounds == 3


def test_a_cell_is_another_if_anything_of_it_changes(tmp_path: Path) -> None:
    (first, *_), (other, *_) = (
        cells_of(tmp_path),
        cells_of(tmp_path, base={**TINY["base"], "optimizer": {"dense": {"lr": 0.2}}}),
    )
    assert first.name == other.name and first.key != other.key


def test_draws_depend_on_seed_number_and_field_alone() -> None:
    fields: dict[str, Any] = {
        "data.rows": Range(10, 1000),
        "train.batch_size": [16, 32, 64],
        "data.zipf": Range(0.5, 1.5, "linear"),
    }
    draw = Draw(models=40, seed=3, datasets=4, fields=fields)
    drawn = [draw.model(number) for number in range(40)]
    assert drawn == [draw.model(number) for number in range(40)]
    assert drawn != [replace(draw, seed=4).model(number) for number in range(40)]
    fewer = Draw(models=40, seed=3, datasets=4, fields={"train.batch_size": [16, 32, 64]})
    assert [one["train.batch_size"] for one in drawn] == [fewer.model(n)["train.batch_size"] for n in range(40)]
    data_fields = [(one["data.rows"], one["data.zipf"]) for one in drawn]
    assert len(set(data_fields)) == 4 and data_fields[0] == data_fields[4]
    assert len({one["train.batch_size"] for one in drawn}) == 3
    assert all(isinstance(rows, int) and 10 <= rows <= 1000 and 0.5 <= zipf <= 1.5 for rows, zipf in data_fields)


def test_every_draw_meets_every_point(tmp_path: Path) -> None:
    draw = {"models": 3, "seed": 1, "fields": {"train.batch_size": [8, 16]}}
    axes = {"memory": {"dram": {"memory": "dram"}, "half": {"memory.dram": "50%"}}}
    found = cells_of(tmp_path, groups={"grid": {"draw": draw, "axes": axes}})
    assert [tuple(cell.labels.values()) for cell in found] == [
        (str(n), where) for n in range(3) for where in axes["memory"]
    ]
    config = found[1].resolved(data="d", tables_bytes=5000)
    assert config.memory.dram == 2500  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {"train.batch_sise": [1]}}, r"tiny.yaml: groups.batch: cell .*unknown key train.batch_sise"),
        ({"axes": {"data.row": [1]}}, r"tiny.yaml: groups.batch: data: row: there is no such field"),
        ({"axes": {"data.rows": [0]}}, r"groups.batch: data: rows is '0': it must be at least 2"),
        ({"axes": {"train.batch_size": []}}, r"study .*tiny.yaml: groups.batch: axes.train.batch_size has no values"),
        ({"axes": {"train.batch_size": ["many"]}}, r"groups.batch: cell .*train.batch_size is 'many'; allowed:"),
        ({"axes": {"train.batch_size": [8, 8]}}, r"the cell batch/train.batch_size=8 is there twice"),
        ({"axes": {"train.batch_size.x": [8]}}, r"train.batch_size.x: batch_size holds 16, which has no fields"),
        ({"axes": {"run": ["here"]}}, r"groups.batch: run is given; a study chooses the folders of its runs itself"),
        ({"axes": {"train.max_steps": [8]}}, r"train.max_steps is 8; .* remove it, or set measures: quality"),
        ({"axes": {"train.epochs": [2]}}, r"groups.batch: train.epochs is 2; a cell that measures speed"),
        ({"axes": {}}, r"groups.batch: it has neither axes nor draw"),
        ({"axis": {}}, r"groups.batch.axis: there is no such field"),
        ({"axes": {"memory.dram": ["a%"]}}, r"groups.batch: cell .*dram 'a%' is not understood"),
        ({"draw": {"models": 1, "fields": {"data.rows": {"low": 9, "high": 3}}}}, r"low is 9 and high is 3"),
    ],
)  # fmt: skip
def test_what_a_study_may_not_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        cells_of(tmp_path, groups={"batch": changes})


@pytest.mark.parametrize("place", ["/etc", "../out", "a/b"])
def test_folders_of_tiers_stay_in_the_study(place: str, tmp_path: Path) -> None:
    (cell, *_) = cells_of(tmp_path, groups={"g": {"axes": {"memory.file": [place], "memory.dram": ["50%"]}}})
    with pytest.raises(ValueError, match=r"memory.file is .*; it becomes a file name"):
        cell.resolved(data="d", tables_bytes=100, folder=tmp_path)


def test_the_studies_that_come_with_hotrow() -> None:
    counts = {}
    for path in STUDIES.glob("*.yaml"):
        study = read_study(path)
        counts[path.stem] = len(expand(study, origin=path.name))
        assert len(expand(study, origin=path.name, quick=True)) <= counts[path.stem]
    assert counts["prediction"] >= 200 and set(counts) == {"efficiency", "quality", "prediction", "scaling"}
    prediction = expand(read_study(STUDIES / "prediction.yaml"), origin="prediction")
    assert len({cell.data for cell in prediction}) == 12
    with pytest.raises(
        ValueError, match=r"there is no study 'speed'; choose one of efficiency, prediction, quality, scaling, or"
    ):
        find_study("speed")


def test_cells_that_were_measured_keep_their_keys() -> None:
    """Also when cells get a new field, which these leave as it is usually. PreSto's points got another shape."""
    docs = Path(__file__).resolve().parents[2] / "docs" / "measurements"
    rows = json.loads((docs / "efficiency-study.json").read_text())["cells"]
    known = {row["key"].partition("#")[0]: row["key"] for row in rows if "rm" not in row["axes"].get("point", "")}
    study = read_study(STUDIES / "efficiency.yaml")
    same = {cell.name: cell.key for cell in expand(study, origin="efficiency") if cell.name in known}
    assert len(same) > 30 and same.items() <= known.items()


# ---- data


@pytest.mark.parametrize("lookups", [1, 3.5])
def test_rows_are_as_the_study_says(lookups: float, tmp_path: Path) -> None:
    rows = SyntheticRows(tables=3, rows=400, spread=2.0, dense=2, lookups=lookups, zipf=1.1, samples=3000)
    dataset = data.prepared(rows, tmp_path)
    assert [table.num_embeddings for table in dataset.info.tables] == [200, 400, 800]
    block = dataset.split("train").block(0)
    assert dataset.split("train").num_rows == 3000 and len(block.dense) == 2
    for table, ids in zip(dataset.info.tables, block.ids, strict=True):
        values = ids if lookups == 1 else ids.values  # type: ignore[union-attr]
        counts = np.bincount(values, minlength=table.num_embeddings)  # type: ignore[arg-type]
        assert np.array_equal(counts, dataset.counts(table.name)) and counts[0] == 0
        assert np.all(np.diff(counts[1:]) <= 0), "rows are numbered by falling count"
        assert len(values) / 3000 == pytest.approx(lookups, rel=0.05)
        law = np.arange(1, table.num_embeddings) ** -1.1
        assert counts[1] / counts.sum() == pytest.approx(law[0] / law.sum(), rel=0.2)
    assert data.prepared(rows, tmp_path / "again").checksum == dataset.checksum
    assert data.prepared(rows, tmp_path).path == dataset.path


def test_generated_features_fall_into_all_buckets_alike(tmp_path: Path) -> None:
    rows = SyntheticRows(
        tables=5, rows=90, spread=3.0, dense=1, lookups=4, zipf=1.1, samples=4000, generated=2, buckets=8
    )
    dataset = data.prepared(rows, tmp_path)
    assert [table.num_embeddings for table in dataset.info.tables] == [30, 90, 270, 9, 9]
    assert [feature.kind for feature in dataset.info.features] == ["multi_hot"] * 3 + ["one_hot"] * 2
    for ids in dataset.split("train").block(0).ids[3:]:
        assert np.all(np.abs(np.bincount(ids, minlength=9)[1:] / 500 - 1) < 0.25)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="generated is 3 of 2 tables; it must not exceed tables"):
        SyntheticRows(tables=2, generated=3)


def test_the_models_of_presto_are_as_published() -> None:
    study = read_study(STUDIES / "efficiency.yaml")
    points = {cell.labels["point"]: cell for cell in expand(study, origin="") if cell.group == "models"}
    shapes = [points[f"rm{k}"].data for k in range(1, 6)]
    assert [(own.dense, own.tables, own.generated, own.lookups) for own in shapes] == [  # type: ignore[union-attr]
        (13, 39, 13, 1), (504, 63, 21, 20), (504, 84, 42, 20), (504, 84, 42, 20), (504, 84, 42, 20)
    ]  # fmt: skip
    assert [own.buckets for own in shapes[1:]] == [1024, 1024, 2048, 4096]  # type: ignore[union-attr]
    assert len({json.dumps(points[f"rm{k}"].config) for k in range(1, 6)}) == 1, "the same model and batches"


def test_rows_half_written_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SyntheticRows(tables=1, rows=20, dense=0, samples=10)
    with monkeypatch.context() as patch:
        patch.setattr(data, "write_counts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            data.prepared(rows, tmp_path)
    assert data.prepared(rows, tmp_path).split("train").num_rows == 10


def test_real_rows_need_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOTROW_DATA", raising=False)
    with pytest.raises(
        ValueError, match=r"the study needs a.tsv: set the environment variable HOTROW_DATA to its folder"
    ):
        _ = data.RealRows(file="a.tsv").path
    monkeypatch.setenv("HOTROW_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"a.tsv, which does not exist"):
        _ = data.RealRows(file="a.tsv").path


# ---- rounds


def passes(
    step_s: Callable[[int], float],
    *,
    rounds: int,
    steps_per_pass: int = 4,
    share: float = 0.0,
    warm: int = 1,
    slow_s: float = 100,
) -> worker.Passes:
    """A meter that saw steps of 10 samples that took so long by their number, until it had enough."""
    session = Session(steps_per_pass)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Disturbance, "share", lambda self: share)
        patch.setattr(worker, "MIN_ROUND_S", 0.0)
        meter = worker.Passes(session, warm_passes=warm, rounds=rounds, most_s=100, slow_s=slow_s)
        with suppress(worker.MeasuredEnough):
            for step in range(1000):
                session.state.seconds["dense"] += step_s(step)
                session.state.num_samples += 10
                session.state.step, session.state.epoch = step + 1, (step + 1) // steps_per_pass
                session.state.batch = (step + 1) % steps_per_pass
                meter.end_step(None)  # type: ignore[arg-type]
    return meter


def test_a_figure_is_the_median_of_passes_without_the_first() -> None:
    seconds = [9.0, 0.001, 0.004, 0.002]  # by pass
    found = passes(lambda step: seconds[min(step // 4, 3)], rounds=3).figures()
    assert (found["step_ms"], found["spread_ms"]) == (pytest.approx(2), pytest.approx([1, 4]))
    assert found["samples_per_s"] == pytest.approx(10 / 0.002) and found["spread"] == pytest.approx([2500, 10000])
    assert (found["rounds"], found["clean_rounds"], found["taken_rounds"]) == (3, 3, 3)


def test_passes_that_warm_do_not_count() -> None:
    found = passes(lambda step: 0.5 if step < 8 else 0.001, rounds=3, warm=2).figures()
    assert found["spread_ms"] == pytest.approx([1, 1]) and found["taken_rounds"] == 3


def test_a_busy_machine_yields_a_figure_too_and_says_so() -> None:
    found = passes(lambda step: 0.001, rounds=9, share=0.9).figures()
    assert found["step_ms"] == pytest.approx(1) and found["clean_rounds"] == 0 < found["rounds"]
    assert runner.bench.how_clean(found).endswith("a disturbed machine")


def test_a_slow_warm_up_and_slow_rounds_end_within_a_pass() -> None:
    found = passes(lambda step: 0.001, rounds=3, steps_per_pass=1000, slow_s=0.0).figures()
    assert (found["rounds"], found["steps_per_round"]) == (3, 1) and found["note"].startswith("a slow cell")


def test_one_clean_round_is_not_a_figure() -> None:
    meter = passes(lambda step: 0.001, rounds=3)
    meter.taken = [(share, one) for share, (_, one) in zip([0.0, 0.9, 0.9], meter.taken, strict=True)]
    found = meter.figures()
    assert (found["rounds"], found["clean_rounds"], found["taken_rounds"]) == (3, 1, 3)


# ---- running


def test_what_was_measured_before_an_interruption_is_not_measured_again(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_study(tmp_path), tmp_path / "out"
    real = cells.run_cell

    def stop(cell: Cell, config: Any, work: Path) -> dict[str, Any]:
        if len(trained) == 2:
            raise KeyboardInterrupt
        return real(cell, config, work)

    with monkeypatch.context() as patch:
        patch.setattr(cells, "run_cell", stop)
        with pytest.raises(KeyboardInterrupt, match="stopped; 2 cells are in"):
            run_study(str(path), out)
    assert len(json.loads((out / "results.json").read_text())["cells"]) == 2
    result = run_study(str(path), out)
    assert len(trained) == len(set(trained)) == 6 and result["measured"] == 6
    assert run_study(str(path), out)["measured"] == 6 and len(trained) == 6
    assert not list((out / "data").iterdir()) and not (out / "work").exists()


def test_a_study_that_changed_measures_what_changed(tmp_path: Path, trained: list[str]) -> None:
    out = tmp_path / "out"
    run_study(str(write_study(tmp_path)), out)
    groups = {**TINY["groups"], "batch": {"axes": {"train.batch_size": [16, 64]}}}
    run_study(str(write_study(tmp_path, groups=groups)), out)
    assert trained[6:] == ["batch/train.batch_size=64"]
    page = (out / "report.html").read_text()
    assert page.count("<td>16</td>") == page.count("<td>64</td>") == 1 and "<td>32</td>" not in page


def test_a_study_is_not_measured_twice_at_once(tmp_path: Path, trained: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with claim(out) as claimed:
        assert claimed
        with pytest.raises(
            ValueError, match=r"another process measures in .*out: wait until it has ended, or pass another --out"
        ):
            run_study(str(write_study(tmp_path)), out)
    assert not trained
    run_study(str(write_study(tmp_path)), out)


def test_running_out_of_memory_is_a_result(tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reason = {"status": "out of memory", "reason": "the system ended the process for memory"}
    monkeypatch.setattr(cells, "run_cell", lambda cell, *_: row_of() if cell.group == "both" else reason)
    result = run_study(str(write_study(tmp_path)), tmp_path / "out")
    assert (result["measured"], result["skipped"]) == (6, 0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("the system ended the process for memory") == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [(MemoryError("x"), "out of memory"), (RuntimeError("not enough memory: you tried"), "out of memory"),
     (ValueError("memory is 'dram': tables take 9 GiB"), "refused"),
     (ValueError("Training diverged: lower lr"), "diverged")],
)  # fmt: skip
def test_how_a_worker_says_that_a_cell_cannot_be(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: Any) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(worker, "measure", fail)
    found = worker.outcome(None)  # type: ignore[arg-type]
    assert found["status"] == status and found["reason"] == str(error)


def test_a_worker_that_fails_otherwise_is_reported_and_tried_again(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cell: Cell, *_: Any) -> dict[str, Any]:
        raise cells.CellError("the process ended with code 1: <why>")

    with monkeypatch.context() as patch:
        patch.setattr(cells, "run_cell", fail)
        assert run_study(str(write_study(tmp_path)), tmp_path / "out")["skipped"] == 6
    assert "the process ended with code 1: &lt;why&gt;" in (tmp_path / "out" / "report.html").read_text()
    assert run_study(str(write_study(tmp_path)), tmp_path / "out")["measured"] == len(trained) == 6


def test_a_memory_group_ends_a_cell_that_takes_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with MemoryGroup():
            pass
    except GroupError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(cells, "SLACK_BYTES", 4 << 20)
    big = {
        "data": {"tables": 2, "rows": 100_000, "dense": 2, "samples": 4096},
        "model": {"embedding_dim": 64, "bottom_mlp": [4], "top_mlp": [4]},
    }
    groups = {"g": {"axes": {"memory.dram": ["90%"], "train.batch_size": [4096]}}}
    (cell,) = cells_of(tmp_path, base=big, groups=groups)
    studied = Studied(read_study(tmp_path / "tiny.yaml"), "tiny")
    dataset = data.prepared(cell.data, tmp_path / "data")
    config = studied.config_of(cell, dataset, tmp_path / "work")
    memory = config.memory.model_copy(update={"dram": "40MiB"})  # type: ignore[union-attr]
    found = cells.run_cell(cell, config.model_copy(update={"memory": memory}), tmp_path / "work")
    # On a loaded machine the process may have grown before hotrow looks; then it sees the group's limit and refuses.
    is_refused = found["status"] == "refused" and "tables and optimizer state take" in found["reason"]
    assert (found["status"] == "out of memory" or is_refused) and found["limit_bytes"] > 0, found


def ended(cell: Cell, config: Any, work: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is made of a process that kept the figures of some rounds and then ran `script`."""
    work.mkdir()
    (work / "result.json").write_text(json.dumps(row_of()))
    monkeypatch.setattr(cells, "enter_and", lambda group, command: ["/bin/sh", "-c", f"echo ready; read x; {script}"])
    return cells.run_cell(cell, config, work)


def test_rounds_of_a_cell_that_took_too_long_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "CELL_TIMEOUT_S", 0.1)
    cell = cells_of(tmp_path)[0]
    found = ended(cell, cell.resolved(data="d", tables_bytes=1), tmp_path / "work", "exec sleep 60", monkeypatch)
    assert found == row_of(note="stopped after 0 s")


def test_a_process_that_someone_killed_is_not_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells_of(tmp_path)[0]
    with pytest.raises(cells.CellError, match="ended with code -9"):
        ended(cell, cell.resolved(data="d", tables_bytes=1), tmp_path / "work", "kill -9 $$", monkeypatch)


def test_a_cell_ends_with_the_study_that_began_it() -> None:
    """Else it would train on beside the cells of the study that goes on, and might write its figures as theirs."""
    script = "from hotrow.base.machine import end_with_parent as e; e(); import time; print(flush=True); time.sleep(60)"
    words = ["sh", "-c", '"$@" & echo $!; wait', "sh", sys.executable, "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        child = Path("/proc", study.stdout.readline().strip())
        study.stdout.readline()
        assert child.exists()
        study.kill()
        study.wait()
        until = time.monotonic() + 10
        with suppress(FileNotFoundError):  # it has ended, and somebody has asked how
            while (child / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < until
                time.sleep(0.01)


@pytest.mark.parametrize("sizes", [[32], pytest.param([16, 32], marks=pytest.mark.slow)])
def test_cells_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Real trainings, each in a process of its own."""
    monkeypatch.setattr(cells, "MAX_S", 0.1)
    path = write_study(tmp_path, groups={"batch": {"axes": {"train.batch_size": sizes}}}, keep="runs")
    said: list[str] = []
    start = time.perf_counter()
    result = run_study(str(path), tmp_path / "out", say=said.append)
    elapsed_ms = 1e3 * (time.perf_counter() - start)
    assert [row["axes"]["train.batch_size"] for row in result["cells"]] == [str(size) for size in sizes]
    for row in result["cells"]:
        assert (
            row["status"] == "measured"
            and row["rounds"] >= 1
            and row["spread"][0] <= row["samples_per_s"] <= row["spread"][1]
        )
        assert row["step_ms"] == pytest.approx(
            sum(row[f"{phase}_ms"] for phase in ("data", "lookup", "dense", "update")), rel=0.5
        )
        assert row["samples_per_s"] == pytest.approx(1e3 * row["batch_size"] / row["step_ms"], rel=0.01)
        # Rounds take MIN_ROUND_S each, and were all within the study's time.
        round_ms = row["steps_per_round"] * row["step_ms"]
        assert 100 * worker.MIN_ROUND_S < round_ms < elapsed_ms / row["taken_rounds"]
        assert row["peak_bytes"] > row["table_bytes"] > 0
    names = [Path(file).name for file in result["files"]]
    assert names == ["results.json", "batch.svg", "report.html"]
    assert re.search(rf"tiny: {len(sizes)} of {len(sizes)} cells to measure, about 0:00:\d\d", said[1])
    assert not (tmp_path / "out" / "work").exists()
    kept = [RunFolder.open(tmp_path / "out" / row["run"]) for row in result["cells"]]
    assert [run.measurements()[0]["kind"] for run in kept] == ["train"] * len(sizes)


@pytest.mark.parametrize("keep", ["figures", "runs"])
def test_a_study_keeps_what_it_says(keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cell: Cell, config: Any, work: Path) -> dict[str, Any]:
        folder = RunFolder.create(work / "run", name="cell")
        folder.checkpoints.mkdir()
        (folder.checkpoints / "weights").write_bytes(bytes(100))
        return row_of()

    monkeypatch.setattr(cells, "run_cell", run)
    path = write_study(tmp_path, groups={"batch": TINY["groups"]["batch"]}, keep=keep)
    found = run_study(str(path), tmp_path / "out", say=lambda line: None)["cells"]
    assert not (tmp_path / "out" / "work").exists()
    assert (tmp_path / "out" / "runs").exists() == (keep == "runs")
    kept = {row["run"] for row in found if "run" in row}
    assert len(kept) == (2 if keep == "runs" else 0)
    for name in kept:
        assert not RunFolder.open(tmp_path / "out" / name).checkpoints.exists()


# ---- predictions


@pytest.fixture
def predicting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The predictions that were made, each of 3 ms and a bit more than the one before; this machine's file is known."""
    made: list[float] = []

    def predict(work: Any, hardware: Any, slots: Any = None, shared: Any = None) -> Prediction:
        made.append(0.003 + 0.0001 * len(made))
        phases = {"data": 0.0, "lookup": 0.0, "dense": made[-1], "update": 0.0}
        return Prediction(seconds=phases, wait_s=0.0, binds="dense")

    monkeypatch.setattr(slots, "predict", predict)
    monkeypatch.setattr("hotrow.lab.study.run.known_hardware", lambda: HARDWARE)
    return made


def test_all_predictions_are_on_disk_before_the_first_cell_trains(
    tmp_path: Path, trained: list[str], predicting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, stamps = tmp_path / "out", cells.run_cell, []

    def run(cell: Cell, config: Any, work: Path) -> dict[str, Any]:
        stamps.append((out / "predictions.json").stat().st_mtime_ns)
        before = read_sealed(out / "predictions.json", cure="")
        assert len(before["cells"]) == 6
        assert all(one["hardware_date"] == "2026-11-01" for one in before["cells"].values())
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(cell, config, work)

    monkeypatch.setattr(cells, "run_cell", run)
    path = write_study(tmp_path, predicts=True)
    with pytest.raises(KeyboardInterrupt):
        run_study(str(path), out)
    monkeypatch.setattr(cells, "run_cell", real)
    result = run_study(str(path), out)
    assert len(set(stamps)) == 1 and len(predicting) == 6, "a study that goes on predicts nothing anew"
    sealed = read_sealed(out / "predictions.json", cure="")["cells"]
    assert {row["key"]: row["predicted"] for row in result["cells"]} == sealed
    found = json.loads((out / "results.json").read_text())["prediction"]
    ratios = [one["step_ms"] / 2.0 for one in sealed.values()]
    assert found["geometric_mean_error"] == pytest.approx(math.prod(ratios) ** (1 / 6) - 1)
    assert found["share_within_15_percent"] == 0 and found["median_noise"] == 0.1
    page = (out / "report.html").read_text()
    assert "geometric mean error" in page and "All predictions were on disk before the first cell" in page


@pytest.mark.parametrize(
    ("fault", "cure"),
    [("it has no disk: measure it with hotrow probe", "run hotrow probe FOLDER"), ("no", "change that, or leave out")],
)
def test_a_study_whose_cells_cannot_be_predicted_measures_nothing(
    fault: str, cure: str, tmp_path: Path, trained: list[str], predicting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: Any, hardware: Any, slots: Any = None, shared: Any = None) -> Prediction:
        raise ValueError(fault)

    monkeypatch.setattr(slots, "predict", fail)
    with pytest.raises(ValueError, match=rf"6 of 6 cells cannot be predicted: {fault}: {cure}"):
        run_study(str(write_study(tmp_path, predicts=True)), tmp_path / "out")
    assert not trained


def test_cells_without_a_prediction_are_told_and_predicted_again(
    tmp_path: Path, trained: list[str], predicting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_predict, real_run, said, calls = slots.predict, cells.run_cell, [], []
    out, path = tmp_path / "out", write_study(tmp_path, predicts=True)

    def predict(work: Any, hardware: Any, slots: Any = None, shared: Any = None) -> Prediction:
        calls.append(work)
        if len(calls) in (5, 6):
            raise ValueError("an odd cell")
        return real_predict(work, hardware, slots)

    def stop(cell: Cell, config: Any, work: Path) -> dict[str, Any]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real_run(cell, config, work)

    monkeypatch.setattr(slots, "predict", predict)
    with monkeypatch.context() as patch:
        patch.setattr(cells, "run_cell", stop)
        with pytest.raises(KeyboardInterrupt):
            run_study(str(path), out, say=said.append)
    assert any("2 of 6 cells cannot be predicted: an odd cell" in line for line in said)
    monkeypatch.setattr("hotrow.lab.study.run.known_hardware", lambda: replace(HARDWARE, date="2026-11-02"))
    run_study(str(path), out)
    entries = read_sealed(out / "predictions.json", cure="")["cells"].values()
    assert sorted(one["hardware_date"] for one in entries) == ["2026-11-01"] * 4 + ["2026-11-02"] * 2
    assert "4 of 6 predictions were on disk before the first cell was measured" in (out / "report.html").read_text()


def test_predictions_that_were_edited_are_refused(tmp_path: Path, trained: list[str], predicting: list[float]) -> None:
    path, out = write_study(tmp_path, predicts=True), tmp_path / "out"
    run_study(str(path), out)
    file = out / "predictions.json"
    file.write_text(file.read_text().replace('"binds": "dense"', '"binds": "none"', 1))
    (out / "results.json").unlink()
    with pytest.raises(ValueError, match=r"predictions.json differs from its checksum"):
        run_study(str(path), out)


def test_a_study_that_predicts_needs_this_machines_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.lab.study.run.known_hardware", lambda: None)
    with pytest.raises(ValueError, match="predicts, which needs this machine's figures: run hotrow probe FOLDER first"):
        run_study(str(write_study(tmp_path, predicts=True)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modelled_speed_has_a_column_of_its_own(
    tmp_path: Path, trained: list[str], predicting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"fp32": Figure(1e13)}
    gpu = Gpu("gpu", *[Figure(1e12)] * 4, rates, watts=Figure(15.0, source="declared", note="a label"), count=2)
    known = {"fast": replace(HARDWARE, name="fast", num_cores=8, gpus=[gpu]), "odd": "odd lacks kernels"}
    monkeypatch.setattr("hotrow.lab.study.run._machine", lambda name, here: known[name])

    def predict(work: Any, hardware: Hardware, slots: Any = None, shared: Any = None) -> Prediction:
        seconds = 0.003 if hardware.name == "fast" else 0.004
        phases = {"data": 0.0, "lookup": 0.0, "dense": seconds, "update": 0.0}
        return Prediction(seconds=phases, wait_s=0.0, binds="dense")

    def faster(machine: Hardware, threads: int, here: Hardware, own: int) -> dict[str, float]:
        assert (machine.name, threads, own) == ("fast", 8, 1), "a cell of one thread"
        return {"one thread": 1.0, "threads": 4.0, "flops_per_s": 2.0}

    monkeypatch.setattr(slots, "predict", predict)
    monkeypatch.setattr(cells, "faster", faster)
    result = run_study(str(write_study(tmp_path, machines=["fast", "odd"])), tmp_path / "out")
    first = result["cells"][0]
    assert first["samples_per_s"] == 8000.0 and first["modelled"]["fast"]["step_ms"] == pytest.approx(1.5)
    assert first["samples_per_j"] == 160.0 and first["samples_per_j_source"] == "declared"
    page = (tmp_path / "out" / "report.html").read_text()
    assert first["modelled"]["fast"]["spread"] == pytest.approx([8000, 32000])
    assert (
        "modelled: fast, its processors alone, samples/s" in page
        and "odd lacks kernels" in page
        and "160 (declared)" in page
    )
    assert first["modelled"]["fast"]["samples_per_j"] == pytest.approx(16 / 1.5e-3 / 20), "without its GPUs"
    low, high = first["modelled"]["fast"]["with_gpus"]["spread"]
    assert low < first["modelled"]["fast"]["with_gpus"]["samples_per_s"] < high and "fast, with its GPUs" in page
    assert "with_gpus" not in first.get("predicted", {})
    assert "533.3 (declared)" in page and "samples_per_unit" not in first, "what nobody declares is absent"


def test_a_machine_named_later_is_modelled_without_measuring_again(
    tmp_path: Path, trained: list[str], predicting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = str(write_study(tmp_path, groups={"batch": TINY["groups"]["batch"]})), tmp_path / "out"
    assert "modelled" not in run_study(path, out)["cells"][0] and len(trained) == 2
    monkeypatch.setattr("hotrow.costs.hardware.known_hardware", lambda: HARDWARE)
    monkeypatch.setattr("hotrow.lab.study.run.modelled", lambda machine, here: machine)
    monkeypatch.setattr(cells, "faster", lambda *_: {"one thread": 1.0})
    for row in run_study(path, out, hardware="cpu-server")["cells"]:
        found = row["modelled"]["cpu-server"]
        assert found["samples_per_j"] == pytest.approx(found["samples_per_s"] / 500)
        assert found["samples_per_j_source"] == "assumed" and row["samples_per_j_source"] == "declared"
    assert len(trained) == 2 and not list((out / "data").iterdir())
    times = len(predicting)
    run_study(path, out, hardware="cpu-server")
    assert len(predicting) == times, "nothing is modelled twice"
    assert "--hardware cpu-server" in json.loads((out / "results.json").read_text())["command"]
    page = (out / "report.html").read_text()
    assert "modelled: cpu-server" in page
    monkeypatch.setattr("hotrow.lab.study.run.known_hardware", lambda: replace(HARDWARE, watts=None))
    other = tmp_path / "other"
    assert not [name for name in run_study(path, other)["cells"][0] if "_per_j" in name]
    assert "watts" in (other / "report.html").read_text(), "the page says what to declare"


def placed(model: int, where: str, *, predicted: float, measured: float) -> dict[str, Any]:
    axes = {"model": str(model), "memory": where}
    return {
        "key": f"{model}{where}",
        "group": "g",
        "axes": axes,
        "predicted": {"step_ms": predicted},
        **row_of(step_ms=measured),
    }


def test_errors_and_choices_against_counting_by_hand() -> None:
    rows = [
        placed(0, "dram", predicted=2, measured=2), placed(0, "ssd", predicted=3, measured=4),  # chosen well
        placed(1, "dram", predicted=3, measured=2), placed(1, "ssd", predicted=2.9, measured=2.05),  # within 3 %
        placed(2, "dram", predicted=3, measured=2), placed(2, "ssd", predicted=2.9, measured=3),  # chosen badly
        {"key": "x", "group": "g", "axes": {"model": "3"}, "predicted": {"reason": "no"}, **row_of()},
        placed(4, "dram", predicted=2, measured=2),  # chosen badly: the fastest was not predicted
        {**placed(4, "ssd", predicted=1, measured=1), "predicted": {"reason": "no"}},
    ]  # fmt: skip
    found = results.prediction_summary(rows)
    ratios = [1, 3 / 4, 1.5, 2.9 / 2.05, 1.5, 2.9 / 3, 1]
    assert found["cells"] == 7 and found["not_predicted"] == 2 and found["models_incomplete"] == 1
    assert found["geometric_mean_error"] == pytest.approx(math.exp(sum(abs(math.log(r)) for r in ratios) / 7) - 1)
    assert found["share_within_15_percent"] == pytest.approx(3 / 7)
    assert found["share_placement_chosen_well"] == pytest.approx(2 / 4) and found["models_with_placements"] == 4


# ---- files


def test_the_best_batch_is_the_smallest_that_is_nearly_as_fast_as_the_fastest() -> None:
    speeds = {64: 100.0, 128: 190.0, 256: 197.0, 512: 200.0}
    rows = [
        {"axes": {"point": "a", "train.batch_size": str(b)}, "batch_size": b, "samples_per_s": s}
        for b, s in speeds.items()
    ]
    (found,) = results.best_batches(rows)
    assert (found["line"], found["fastest"], found["smallest_good"], found["at_the_end"]) == ("a", 512, 128, True)


def test_quality_takes_the_rate_that_validation_chose() -> None:
    def row(batch: int, rate: str, val: float | None, test: float, seed: str = "1") -> dict[str, Any]:
        axes = {"train.seed": seed, "lr": rate, "train.batch_size": str(batch)}
        found = {"axes": axes, "batch_size": batch, "test_ne": test, "test_auc": 0.7, "samples_per_s": 1.0}
        return found if val is None else {**found, "val_ne": val}

    rows = [
        row(64, "1", 0.80, 0.82), row(64, "1", 0.80, 0.84, "2"), row(64, "0.5", 0.9, 0.9),
        row(64, "2", 0.79, 0.70), row(64, "2", None, 0.70, "2"),  # one of its seeds diverged
        row(256, "1", 0.9, 0.9), row(256, "2", 0.85, 0.861), row(256, "2", 0.86, 0.84, "2"),
    ]  # fmt: skip
    small, large = results.quality_by_batch(rows)
    assert (small["point"], large["point"], small["seeds"]) == ("lr 1", "lr 2", 2)
    assert small["test_ne"] == pytest.approx(0.83) and small["test_ne_sd"] == pytest.approx(0.02 / math.sqrt(2))
    gaps = [0.861 / 0.82 - 1, 0.84 / 0.84 - 1]
    assert large["ne_gap"] == pytest.approx(sum(gaps) / 2) and large["ne_gap_sd"] == pytest.approx(
        gaps[0] / math.sqrt(2)
    )
    assert (small["at_the_edge"], large["at_the_edge"]) == (False, True)
    assert results.quality_by_batch(rows[2:3])[0]["ne_gap_sd"] is None
    told = study_sentences.quality_told({"cells": rows, "quick": False})
    assert told == (
        "test NE beside batches of 64: 256 +2.50% ± 3.54% (means and standard deviations of 2 seeds); "
        "at 256 the best rate is the last that was tried"
    )


def test_files_hold_the_same_cells_and_escape_names(tmp_path: Path, trained: list[str]) -> None:
    result = run_study(str(write_study(tmp_path)), tmp_path / "out")
    texts = {Path(file).name: Path(file).read_text() for file in result["files"]}
    cells = json.loads(texts["results.json"])["cells"]
    assert sorted(row["axes"].get("mlp", "") for row in cells) == ["", "", "a_b & <i>", "a_b & <i>", "wide", "wide"]
    wanted = [cell.key for cell in cells_of(tmp_path)]
    assert [row["key"] for row in cells] == wanted == [row["key"] for row in result["cells"]]
    page = texts["report.html"]
    assert page.count("<script") == 1 and "<b>?" not in page and "<i>" not in page and "&lt;script&gt;" in page
    for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(text)


# ---- the command


@pytest.mark.parametrize("verb", ["plan", "study"])
def test_the_help_of_a_verb_names_the_declared_machines(verb: str) -> None:
    (option,) = [one for one in get_command(app).commands[verb].params if one.name == "hardware"]  # type: ignore[attr-defined]
    assert all(path.stem in option.help for path in MACHINES.glob("*.yaml"))


def run_cli(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["hotrow", "study", *arguments])
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_the_command_estimates_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: list[str]
) -> None:
    assert (
        run_cli([str(write_study(tmp_path)), "--estimate", "--json", "--out", str(tmp_path / "out")], monkeypatch) == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_cells"] == 6 and result["estimate_s"] > 6 and result["disk_bytes"] > 0
    assert not trained and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["efficiency", "--hardware", "/nope.json"], "/nope.json is not a file"),
        (["efficiency", "--hardware", "/nope.json", "--estimate"], "/nope.json is not a file"),
        (["efficiency", "--out", "{file}"], "is a file, so results cannot be in"),
        (["{study}", "--out", "{file}/x"], "is a file, so results cannot be in"),
        (
            ["nofile.yaml"],
            "study nofile.yaml: No such file or directory; pass a YAML file such as docs/study.md describes",
        ),
        (["{file}"], "file.yaml holds []; it must be a mapping such as `title: How wide?`"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_with_its_cure(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trained: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    study, file = write_study(tmp_path), tmp_path / "file.yaml"
    file.write_text("[]")
    assert run_cli([one.format(study=study, file=file) for one in arguments], monkeypatch) == 2
    assert message in capsys.readouterr().err and not trained


def test_bad_input_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, groups={"g": {"axes": {"train.batch": [1]}}})
    assert run_cli([str(path)], monkeypatch) == 2
    error = capsys.readouterr().err
    assert "tiny.yaml: groups.g: " in error and "unknown key train.batch" in error and "Traceback" not in error

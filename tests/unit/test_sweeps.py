"""Sweeps in YAML: what they expand into, what a figure is made of, and what their files say."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks import mpi_start
from benchmarks.study import cells, rows, worker
from benchmarks.study.__main__ import run_yaml
from benchmarks.study.rows import SyntheticRows
from benchmarks.study.sweep import Cell, expand, read_sweep
from hotrow.run.meters import Session

pytestmark = pytest.mark.package

TINY: dict[str, Any] = {
    "title": "Tiny",
    "asks": "For tests.",
    "base": {
        "data": {"tables": 2, "rows": 50, "dense": 2, "samples": 64},
        "model": {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"batch_size": 16, "threads": 1},
        "memory": "dram",
    },
    "rounds": 3,
    "groups": {
        "batch": {"asks": "Why?", "axes": {"train.batch_size": [16, 32]}},
        "both": {
            "axes": {
                "data.rows": [50, 60],
                "mlp": {
                    "thin": {"model.bottom_mlp": [2], "model.top_mlp": [3]},
                    "wide": {"model.bottom_mlp": [8, 8], "model.top_mlp": [8]},
                },
            }
        },
    },
}


def write_sweep(folder: Path, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
    return path


def cells_of(folder: Path, **changes: Any) -> list[Cell]:
    path = write_sweep(folder, **changes)
    return expand(read_sweep(path), origin=str(path))


MEASURED = {"status": "measured", "samples_per_s": 8000.0, "step_ms": 2.0, "rounds": 3, "clean_rounds": 3}
MEASURED |= {"taken_rounds": 3}
"""What a worker returns."""


def test_a_grid_has_every_combination_of_its_points(tmp_path: Path) -> None:
    found = cells_of(tmp_path)
    both = [cell for cell in found if cell.group == "both"]
    wanted = itertools.product([50, 60], [("thin", [2], [3]), ("wide", [8, 8], [8])])
    assert [cell.name for cell in found[:2]] == ["batch/train.batch_size=16", "batch/train.batch_size=32"]
    for cell, (num_rows, (label, bottom, top)) in zip(both, wanted, strict=True):
        config = cell.resolved(data="d", tables_bytes=0)
        assert cell.labels == {"data.rows": str(num_rows), "mlp": label}
        assert isinstance(cell.rows, SyntheticRows) and (cell.rows.rows, cell.rows.tables) == (num_rows, 2)
        assert (config.model.bottom_mlp, config.model.top_mlp, config.train.batch_size) == (bottom, top, 16)  # type: ignore[attr-defined]
    assert len({cell.key for cell in found}) == len(found) == 6


@pytest.mark.parametrize("lookups", [1, 3.5])
def test_rows_are_as_the_study_says(lookups: float, tmp_path: Path) -> None:
    drawn = SyntheticRows(tables=3, rows=400, spread=2.0, dense=2, lookups=lookups, zipf=1.1, samples=3000)
    dataset = rows.prepared(drawn, tmp_path)
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
    assert rows.prepared(drawn, tmp_path / "again").checksum == dataset.checksum
    assert rows.prepared(drawn, tmp_path).path == dataset.path


def passes(
    step_s: Callable[[int], float], *, rounds: int, steps_per_pass: int = 4, share: float = 0.0, warm: int = 1
) -> worker.Passes:
    """A meter that saw steps of 10 samples that took so long by their number, until it had enough."""
    session = Session(steps_per_pass)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Disturbance, "share", lambda self: share)
        patch.setattr(worker, "MIN_ROUND_S", 0.0)
        meter = worker.Passes(session, warm_passes=warm, rounds=rounds, most_s=100)
        with suppress(worker.MeasuredEnough):
            for step in range(1000):
                session.state.seconds["dense"] += step_s(step)
                session.state.num_samples += 10
                session.state.step, session.state.epoch = step + 1, (step + 1) // steps_per_pass
                session.state.batch = (step + 1) % steps_per_pass
                meter.after_step(None, None)  # type: ignore[arg-type]
    return meter


def test_a_figure_is_the_median_of_passes_without_the_first() -> None:
    seconds = [9.0, 0.001, 0.004, 0.002]  # by pass
    found = passes(lambda step: seconds[min(step // 4, 3)], rounds=3).figures()
    assert (found["step_ms"], found["spread_ms"]) == (pytest.approx(2), pytest.approx([1, 4]))
    assert found["samples_per_s"] == pytest.approx(10 / 0.002) and found["spread"] == pytest.approx([2500, 10000])
    assert (found["rounds"], found["clean_rounds"], found["taken_rounds"]) == (3, 3, 3)

    found = passes(lambda step: 0.5 if step < 8 else 0.001, rounds=3, warm=2).figures()
    assert found["spread_ms"] == pytest.approx([1, 1]) and found["taken_rounds"] == 3, "passes that warm do not count"


def test_two_cells_and_two_ranks_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real trainings, each in a process of its own, and a real exchange."""
    monkeypatch.setattr(cells, "MAX_S", 0.1)
    one, two = {"train.batch_size": [32]}, {"transport": ["gloo", "mpi"], "ranks": [2]}
    groups = {"one": {"axes": one}, "two": {"axes": two}}
    result = run_yaml(str(write_sweep(tmp_path, groups=groups)), tmp_path / "out")
    transports = ["gloo"] if mpi_start.mpiexec() is None else ["gloo", "mpi"]
    one, *two = result["cells"]
    assert [row["axes"]["transport"] for row in two] == transports and result["skipped"] == 2 - len(transports)
    for row in (one, *two):
        assert row["status"] == "measured" and row["rounds"] >= 1
        assert row["spread"][0] <= row["samples_per_s"] <= row["spread"][1]
        phases = sum(row[f"{phase}_ms"] for phase in worker.PHASES)
        assert row["step_ms"] == pytest.approx(phases, rel=0.5)
        assert row["samples_per_s"] == pytest.approx(1e3 * row["batch_size"] / row["step_ms"], rel=0.01)
        assert row["steps_per_round"] * row["step_ms"] > 100 * worker.MIN_ROUND_S
        assert row["peak_bytes"] > row["table_bytes"] > 0
    assert "exchange_ms" not in one
    assert all(0 < row["exchange_ms"] < row["step_ms"] and row["wire_bytes"] > 0 for row in two)


# ---- what they say

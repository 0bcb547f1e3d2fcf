"""benchmarks/gpu.py: six modes train the same, hot rows are those of largest chance, without a GPU nothing is timed."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

from benchmarks import gpu

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["--quick", "--device", str(DEVICE), "--stretches", "1"]


def small(shape: str = "kaggle") -> gpu.Cell:
    return gpu.Cell(shape, "64KiB", 8, 2, 1e-5, str(DEVICE), num_tables=3, small_table_bytes=0)


def test_all_modes_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([*QUICK, "--json", "--shapes", "kaggle"])
    *text, last = capsys.readouterr().out.splitlines()
    (cell,) = json.loads(last)["cells"]
    found = cell["measured"]
    assert list(found["modes"]) == list(gpu.MODES) and not found["refused"]
    assert all(own["samples_per_s"] > 0 for own in found["modes"].values())
    assert 0 < found["hot_samples"] < 1 and found["hot_bytes"] <= 64 << 10
    assert found["modes"]["fae"]["swaps"] > 2 and found["modes"]["fae"]["sync_s"] > 0
    assert found["modes"]["all_in_hbm"]["hits_per_row"] == 1
    assert any(line.startswith("  fae ") and "without the seconds of swaps" in line for line in text)


def test_a_mode_that_trains_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.Fae, "step", lambda side: side.optimizer.zero_grad())
    monkeypatch.setattr(gpu, "LR", 5.0)
    with pytest.raises(SystemExit, match=r"fae: losses .* are not our_hybrid's, .*; nothing is timed"):
        gpu.main([*QUICK, "--shapes", "kaggle", "--modes", "our_hybrid", "fae"])


def test_hot_rows_are_those_of_the_largest_chance() -> None:
    """By a sort of all rows: none outside has a larger chance than one inside, and not one more would fit."""
    for shape in gpu.SHAPES:
        cell = small(shape)
        hot = cell.hot_set()
        chances = {}
        for table in cell.source:
            weight = np.arange(1, table.num_embeddings + 1) ** -table.zipf
            chances[table.name] = weight / weight.sum()
        inside = [chance[: hot.rows[name].prefix] for name, chance in chances.items()]
        outside = [chance[hot.rows[name].prefix :] for name, chance in chances.items()]
        assert min(own.min() for own in inside) >= max(own.max() for own in outside if len(own))
        row_bytes = 4 * gpu.SHAPES[shape].dim
        assert (64 << 10) - 3 * row_bytes < hot.num_bytes <= 64 << 10


def test_turns_hold_every_sample_once_and_one_class() -> None:
    cell = small()
    ids = gpu.draw(cell, 50)
    is_hot = np.arange(50) % 3 == 0
    work = gpu.turns(cell, ids, is_hot)
    assert [turn.hot for turn in work] == [False, True, False, True]
    found = []
    for turn in work:
        for batch in turn.batches:
            samples = batch.sparse.values.view(3, -1).T
            found += [(turn.hot, *sample) for sample in samples.tolist()]
    assert sorted(found) == sorted((bool(hot), *sample) for hot, sample in zip(is_hot, ids.T.tolist(), strict=True))
    assert all(a.hot != b.hot for a, b in pairwise(work))


def test_what_cannot_be_measured_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main(["--json"])
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert len(found["cells"]) == 2 * 3 * 3 and all(cell["measured"] is None for cell in found["cells"])
    assert sum(line.endswith("not measured") for line in text) == 18 * len(gpu.MODES)
    assert "finds no GPU here" in text[0]
    sides, refused = gpu.make_sides(gpu.Cell("kaggle", "40", 8, 2, 1e-5, str(DEVICE), 3), ["cached"], small().hot_set())
    assert not sides and "raise it to" in refused["cached"]

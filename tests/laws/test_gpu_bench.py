"""benchmarks/gpu.py: all modes train the same, hot rows are those of largest chance, without a GPU nothing is timed."""

import json
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from gpu_device import DEVICE

from benchmarks import device_day, gpu
from benchmarks.step_shapes import SHAPES
from forked import run_forked

pytestmark = [pytest.mark.package, pytest.mark.usefixtures("one_thread")]
QUICK = ["--quick", "--device", str(DEVICE), "--stretches", "1", "--here"]


def small(shape: str = "kaggle") -> gpu.Cell:
    return gpu.Cell(shape, "64KiB", 8, 2, 1e-5, str(DEVICE), num_tables=3, small_table_bytes=0)


def test_all_modes_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([*QUICK, "--shapes", "kaggle"])
    told = capsys.readouterr()
    (cell,) = json.loads(told.out)["cells"]
    found = cell["measured"]
    absent = [] if find_spec("fbgemm_gpu") else ["fbgemm"]
    assert list(found["refused"]) == absent and all("fbgemm_gpu" in why for why in found["refused"].values())
    assert list(found["modes"]) == [name for name in gpu.MODES if name not in absent]
    assert all(own["samples_per_s"] > 0 for own in found["modes"].values())
    assert 0 < found["hot_samples"] < 1 and found["hot_bytes"] <= 64 << 10
    assert found["modes"]["fae"]["swaps"] > 2 and found["modes"]["fae"]["sync_s"] > 0
    assert 0 < found["modes"]["fae"]["swapped_share"] < 1, "rows that have not changed stay where they are"
    assert found["modes"]["all_in_hbm"]["hits_per_row"] == found["modes"]["all_in_hbm"]["of_all_in_hbm"] == 1


def test_rows_and_slots_of_a_share() -> None:
    """By counting: a tenth of the rows in slots, small tables first, and the hot rows of fae in as many bytes."""
    cell = gpu.Cell("kaggle", "10%", 8, 2, 1e-3, str(DEVICE), num_tables=3, small_table_bytes=0, zipf=1.05)
    num_rows, row_bytes = sum(table.num_embeddings for table in cell.tables), 4 * gpu.SHAPES["kaggle"].dim
    assert cell.row_bytes == num_rows * row_bytes // 10
    assert 0.99 * cell.row_bytes < cell.hot_set().num_bytes <= cell.row_bytes
    sides, _ = gpu.make_sides(cell, ["cached"], cell.hot_set())
    slots = sides["cached"].emb.placement.slots  # type: ignore[attr-defined]
    num_slots = sum(own.pinned + own.cached for own in slots)
    assert 0.95 * num_rows / 10 < num_slots <= 1.05 * num_rows / 10, "whole tables leave the bytes of their map"
    assert {table.zipf for table in cell.source} == {1.05}


def test_what_crosses_to_the_device_brings_its_gradient_back() -> None:
    pooled = torch.randn(3, 4, requires_grad=True)
    there = gpu.across(pooled, DEVICE)
    (there.square().sum()).backward()
    assert there.device.type == DEVICE.type
    torch.testing.assert_close(pooled.grad, 2 * pooled.detach())


def test_the_model_of_others_is_the_same_of_torchs_parts() -> None:
    """Outputs and gradients, by another interaction."""
    model = small().model()
    plain, dense = gpu.Plain(model), torch.randn(4, gpu.NUM_DENSE)
    rows = torch.randn(4, 3 * gpu.SHAPES["kaggle"].dim, requires_grad=True)
    found, expected = plain(dense, rows), model(dense, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for own, other in zip(
        *(torch.autograd.grad(logits.square().sum(), rows) for logits in (found, expected)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)


def test_a_mode_that_trains_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.Fae, "step", lambda side: side.optimizer.zero_grad())
    monkeypatch.setattr(gpu, "LR", 5.0)
    with pytest.raises(SystemExit, match=r"fae: losses .* are not our_hybrid's, .*; nothing is timed"):
        gpu.main([*QUICK, "--shapes", "kaggle", "--modes", "our_hybrid", "fae"])


def test_the_parts_of_a_visit_are_commands_that_exist() -> None:
    """Their options are taken by the scripts that they name."""
    for part in device_day.parts(quick=True):
        module = part.arguments[1]
        if module == "benchmarks.gpu":
            assert gpu.parsed(part.arguments[2:]).json
        elif module == "benchmarks.end_to_end":
            shapes = [own for before, own in pairwise(part.arguments) if before == "--shape"]
            assert set(shapes) < set(SHAPES)


def test_the_host_of_a_step_is_measured_without_a_device() -> None:
    """In a process of its own, whose kernels do nothing."""
    options = ["--scale", "1e-4", "--steps", "3", "--batch-size", "16", "--functions", "2"]
    done = run_forked(f"from benchmarks.device_host import main; main({options})")
    lines = done.stdout.splitlines()
    heads = [line for line in lines if "ms in the step's thread" in line]
    assert [head.split()[0] for head in heads] == ["cached", "all_in_hbm"] and len(lines) == 6, done.stderr
    assert "; 0.0% of the rows come" in heads[1] and "; 0.0% of the rows come" not in heads[0]


def test_the_profile_of_a_step() -> None:
    """By Triton's interpreter there is Python alone."""
    found = device_day.profile(device=str(DEVICE), quick=True)
    assert found["functions"] and bool(found["kernels"]) == (DEVICE.type == "cuda")
    assert found["step_ms"] > 0 and found["device_ms"] == pytest.approx(sum(own["ms"] for own in found["kernels"]))

"""The bench measures what it says: outputs first, stolen rounds dropped, its own limits, pages made from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from benchmarks import claims, end_to_end, kernels, precision
from hotrow import bench, cells, ops


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small work on several threads waits for threads: on a busy machine longer than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Side:
    """A contender that does `work` and yields `value`."""

    def __init__(self, value: float, work: Callable[[], object] = int) -> None:
        self.value, self.work = torch.full((3,), value), work

    def prepare(self, batch: int) -> None:
        pass

    def run(self) -> None:
        self.work()

    def outputs(self) -> Iterable[Tensor]:
        return [self.value]


def test_outputs_that_differ_are_not_timed() -> None:
    timed = []
    right, wrong = Side(1.0), Side(1.01, lambda: timed.append(1))
    cell = cells.Cell(name="made_up", peer="none", build=lambda: (right, wrong), limit_s=lambda threads: None)
    with pytest.raises(ValueError, match=r"cell made_up: output 0 differs from the peer's by up to 0.01"):
        bench.measure_cell(cell, threads=1, num_rounds=3)
    assert len(timed) == 1  # the run whose output was compared, and no round


@pytest.mark.parametrize("part", ["lookup", "update", "step"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_wrong_update_or_lookup_is_noticed(part: cells.Part, optimizer: cells.Optimizer) -> None:
    """The tolerance lets rounding through and no missing row: one row of one table moved by a tenth of an update."""
    shape = cells.Shape(num_tables=2, num_embeddings=50, embedding_dim=5, batch_size=16, lookups=3, zipf=1.05)
    ours = cells.Ours(shape, part, optimizer)
    peer = cells.Torch(shape, part, optimizer, ours)
    bench.check_agreement("fine", ours, peer)
    with torch.no_grad():
        ours.emb.weights["t1"][7] += 0.1 * cells.LR
    with pytest.raises(ValueError, match="cell broken: output"):
        bench.check_agreement("broken", ours, peer)


def test_rounds_with_stolen_time_count_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0, 0, 0, 5, 5, 5, 5, 5, 5, 5])  # the second round of five loses 5 s
    monkeypatch.setattr(bench, "stolen_s", lambda: next(clock))
    rounds = bench.interleave(Side(1), Side(1), num_rounds=3)
    assert (len(rounds.ours_s), len(rounds.peer_s), rounds.num_stolen) == (3, 3, 1)


def test_where_every_round_is_stolen_the_figures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(bench, "stolen_s", lambda: float(next(clock)))
    rounds = bench.interleave(Side(1), Side(1), num_rounds=3)
    assert (len(rounds.ours_s), rounds.num_stolen) == (12, 12)


def test_the_sides_take_turns_at_going_first() -> None:
    order: list[str] = []
    bench.interleave(Side(1, lambda: order.append("ours")), Side(1, lambda: order.append("peer")), num_rounds=3)
    assert order[:4] == ["ours", "peer", "peer", "ours"]


def test_an_unknown_cell_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no cell is called 'lookup'; choose from lookup_8x50_uniform, "):
        bench.run_bench(["lookup"])


def test_zipf_ids_have_the_frequencies_asked_for() -> None:
    shape = cells.Shape(num_tables=2, num_embeddings=100, embedding_dim=4, batch_size=20_000, lookups=2, zipf=1.05)
    found = np.bincount(shape.ids(seed=0).numpy(), minlength=100) / 80_000
    wanted = np.arange(1, 101) ** -1.05
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=4e-3)
    assert found[0] > 0.15


@pytest.mark.skipif(ops.backend().name != "native", reason="the limit loop is native")
def test_more_rows_take_longer_to_move() -> None:
    """A limit loop that the compiler emptied would take no time, whatever the number of rows."""
    few, many = torch.arange(500), torch.arange(50_000).repeat(10)
    for write in (False, True):
        seconds = [cells.touch_limit_s(50_000, 64, ids, write=write, threads=1) for ids in (few, many)]
        assert seconds[1] > 20 * seconds[0]


def test_limits_add_up_to_what_an_optimizer_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in cache lines: reads per id, reads and writes per distinct row, sums beside them."""
    monkeypatch.setattr(ops, "backend", lambda: ops.Backend("native", "baseline", 1, None))
    monkeypatch.setattr(
        cells, "touch_limit_s", lambda rows, floats, ids, write, threads: len(ids) * floats * (1000 if write else 1)
    )
    ids = torch.tensor([5, 5, 70, 2])
    limit = partial(cells.rows_limit_s, ids, num_rows=100, dim=32, threads=1)
    assert limit(part="lookup", optimizer="sgd") == 4 * 32
    assert limit(part="update", optimizer="sgd") == 3 * 32 * 1000
    assert limit(part="step", optimizer="sgd") == 4 * 32 + 3 * 32 * 1000
    assert limit(part="step", optimizer="adagrad") == 4 * 32 + 2 * 3 * 32 * 1000
    assert limit(part="step", optimizer="rowwise_adagrad") == 4 * 32 + (3 * 32 + 2 * 16) * 1000


def test_quick_bench_reports_every_promised_field(capfd: pytest.CaptureFixture[str]) -> None:
    report = bench.run_bench(["lookup_8x50_zipf", "interaction_26_dim16"], quick=True, threads=1)
    assert [cell["name"] for cell in report["cells"]] == ["lookup_8x50_zipf", "interaction_26_dim16"]
    for cell in report["cells"]:
        assert {"name", "ours_ms", "peer", "peer_ms", "ratio", "limit_ms", "share_of_limit", "spread"} <= set(cell)
        assert cell["spread"][0] <= cell["ratio"] <= cell["spread"][1]
    assert report["machine"]["cpu"] and report["versions"]["torch"] and report["threads"] == 1
    assert "lookup_8x50_zipf" in capfd.readouterr().err  # progress, on the other stream


def test_every_cell_agrees_with_its_peer_before_it_is_timed() -> None:
    for cell in [*cells.cells(quick=True), end_to_end.cell(quick=True)]:
        ours, peer = cell.build()
        bench.check_agreement(cell.name, ours, peer, batch=1)


def test_fbgemm_agrees() -> None:
    pytest.importorskip("fbgemm_gpu", reason="extra bench is not installed")
    for cell in kernels.fbgemm_cells(quick=True):
        bench.check_agreement(cell.name, *cell.build())


def test_generated_pages_are_up_to_date() -> None:
    for path, text in claims.pages().items():
        assert path.read_text() == text, f"{path.name} is not what its sources make: python -m benchmarks.claims"


def test_claims_and_readme_name_cells_that_exist() -> None:
    known = {cell.name for cell in [*cells.cells(), *kernels.fbgemm_cells(quick=True), end_to_end.cell(quick=True)]}
    known |= {f"precision_{variant}" for variant in precision.VARIANTS}
    papers = yaml.safe_load((claims.ROOT / "docs" / "claims.yaml").read_text())
    named = {claim["ours"] for paper in papers for claim in paper["claims"]} - {None}
    assert named | set(claims.README_CELLS) <= known


def test_a_measured_claim_shows_figure_command_machine_and_date() -> None:
    report = {
        "cells": [{"name": "c", "peer": "torch", "ratio": 3.456, "spread": [3.0, 4.0], "share_of_limit": 0.5}],
        "machine": {"cpu": "A CPU"},
        "threads": 2,
        "command": "make it",
        "date": "2026-01-02",
    }
    row = claims.claim_row({"claim": "x", "figure": "not read", "ours": "c"}, claims.load_cells({"kernels": report}))
    assert row == "| x | not read | 3.46x (3.00-4.00) over torch | `make it` | A CPU, 2 threads | 2026-01-02 |"
    assert "| not yet |" in claims.claim_row({"claim": "x", "figure": "110x", "ours": None}, {})


def test_a_study_shows_mean_spread_and_the_paired_difference() -> None:
    row = {"name": "precision_fp16", "auc": 0.75, "sd": 0.01, "difference": -0.002, "difference_sd": 0.001}
    report = {
        "scores": [{**row, "aucs": [0.75]}],
        "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 2**30},
        "versions": {"torch": "2"},
        "backend": {"name": "native", "isa": "avx2"},
        "threads": 2,
        "commit": "abc",
        "command": "make it",
        "date": "2026-01-02",
    }
    page = claims.benchmarks_page({"precision": report})
    assert "| precision_fp16 | 0.7500 ± 0.0100 (-0.0020 ± 0.0010 beside float32) | 0.7500 |" in page
    claim = {"claim": "x", "figure": "not read", "ours": "precision_fp16"}
    found = claims.claim_row(claim, claims.load_cells({"precision": report}))
    assert "| validation AUC 0.7500 ± 0.0100 (-0.0020 ± 0.0010 beside float32) | `make it` |" in found

"""The bench measures what it says: outputs first, stolen rounds dropped, its own limits, pages made from its JSON."""

import json
import mmap
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    bench,
    benchmarks_page,
    claims,
    cluster_model,
    dense_cells,
    end_to_end,
    hot,
    hot_quality,
    kernels,
    micro_batches,
    models,
    parse,
    precision,
    results,
    serving,
    step_peers,
    step_profile,
    step_shapes,
    tiers,
    updates,
)
from benchmarks.serving_export import CRITEO_TABLES, key_of
from benchmarks.study import figures as study_figures
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops

pytestmark = [pytest.mark.package, pytest.mark.usefixtures("one_thread")]


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
    cell = bench.Cell(name="made_up", peer="none", build=lambda: (right, wrong), limit_s=lambda threads: None)
    with pytest.raises(ValueError, match=r"cell made_up: output 0 differs from the peer's by up to 0.01"):
        bench.measure_cell(cell, threads=1, num_rounds=3)
    assert len(timed) == 1  # the run whose output was compared, and no round


@pytest.mark.parametrize("part", ["lookup", "update", "step"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_wrong_update_or_lookup_is_noticed(part: bench.Part, optimizer: bench.Optimizer) -> None:
    """The tolerance lets rounding through and no missing row: one row of one table moved by a tenth of an update."""
    shape = bench.Shape(num_tables=2, num_embeddings=50, embedding_dim=5, batch_size=16, lookups=3, zipf=1.05)
    ours = bench.Ours(shape, part, optimizer)
    peer = bench.Torch(shape, part, optimizer, ours)
    bench.check_agreement("fine", ours, peer)
    with torch.no_grad():
        ours.emb.weights["t1"][7] += 0.1 * bench.LR
    with pytest.raises(ValueError, match="cell broken: output"):
        bench.check_agreement("broken", ours, peer)


@pytest.mark.parametrize(
    ("shares", "kept", "num_clean"),
    [
        ([0.0, 0.5, 0.0, 0.01, 0.0], [0, 2, 3, 4], 4),
        ([0.5, 0.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.5], [1, 4], 2),
        ([0.5, 0.0, 0.9, 0.3, 0.1, 0.9, 0.2, 0.9], [1, 3, 4, 6], 1),
        ([0.5, 0.1, 0.9, 0.3], [0, 1, 2, 3], 0),
    ],
    ids=["one is taken again", "half are clean", "the least disturbed", "no hope of clean ones"],
)
def test_disturbed_rounds_count_only_where_too_few_are_clean(
    shares: list[float], kept: list[int], num_clean: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four rounds that return their number; others had the processors for these shares of the time."""
    left = iter(shares)
    monkeypatch.setattr(bench.Disturbance, "share", lambda self: next(left))
    assert bench.clean_rounds(lambda number: number, 4) == bench.Rounds(kept, num_clean, len(shares))


@pytest.mark.skipif(ops.backend().name != "native", reason="the limit loop is native")
def test_more_rows_take_longer_to_move() -> None:
    """A limit loop that the compiler emptied would take no time, whatever the number of rows."""
    few, many = torch.arange(500), torch.arange(50_000).repeat(10)
    for write in (False, True):
        seconds = [bench.touch_limit_s(50_000, 64, [ids], write=write, threads=1, cold=False) for ids in (few, many)]
        assert seconds[1] > 20 * seconds[0]


def test_limits_add_up_to_what_an_optimizer_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in cache lines: reads per id, reads and writes per distinct row, sums beside them."""
    monkeypatch.setattr(ops, "backend", lambda: ops.Backend("native", "baseline", 1, None))

    def touch(rows: int, floats: int, walks: list[Tensor], *, write: bool, threads: int, cold: bool) -> float:
        assert cold
        return len(walks[0]) * floats * (1000 if write else 1)

    monkeypatch.setattr(bench, "touch_limit_s", touch)
    ids = torch.tensor([5, 5, 70, 2])
    limit = partial(bench.rows_limit_s, [ids], num_rows=100, dim=32, threads=1)
    assert limit(part="lookup", optimizer="sgd") == 4 * 32
    assert limit(part="update", optimizer="sgd") == 3 * 32 * 1000
    assert limit(part="step", optimizer="sgd") == 4 * 32 + 3 * 32 * 1000
    assert limit(part="step", optimizer="adagrad") == 4 * 32 + 2 * 3 * 32 * 1000
    assert limit(part="step", optimizer="rowwise_adagrad") == 4 * 32 + (3 * 32 + 2 * 16) * 1000


def test_quick_bench_reports_every_promised_field() -> None:
    names = ["lookup_8x50_zipf", "step_sgd_26x1_dim16"]
    report = bench.in_fresh_process("benchmarks.kernels", [*names, "--quick", "--here"], 1)
    assert [cell["name"] for cell in report["cells"]] == names
    for cell in report["cells"]:
        assert {"name", "ours_ms", "peer", "peer_ms", "ratio", "limit_ms", "share_of_limit", "spread"} <= set(cell)
        assert cell["spread"][0] <= cell["ratio"] <= cell["spread"][1]
    assert report["machine"]["cpu"] and report["versions"]["torch"] and report["threads"] == 1


def test_every_cell_agrees_with_its_peer_before_it_is_timed() -> None:
    dense = dense_cells.dense_cells(quick=True)
    steps = [*end_to_end.step_cells(chosen=["torch", "float32"], quick=True), *micro_batches.cells(quick=True)]
    for cell in [*bench.cells(quick=True), *dense, *steps]:
        ours, peer = cell.build()
        bench.check_agreement(cell.name, ours, peer, batch=1, within=cell.within)


def test_fbgemm_agrees() -> None:
    pytest.importorskip("fbgemm_gpu", reason="extra bench is not installed")
    for cell in kernels.fbgemm_cells(quick=True):
        bench.check_agreement(cell.name, *cell.build())


def test_generated_pages_are_up_to_date() -> None:
    for path, text in claims.pages().items():
        assert path.read_text() == text, f"{path.name} is not what its sources make: python -m benchmarks.claims"


def test_claims_and_readme_name_cells_that_exist() -> None:
    found = [*bench.cells(), *dense_cells.dense_cells(quick=True), *kernels.fbgemm_cells(quick=True)]
    found += [*updates.update_cells(quick=True)] + [
        end_to_end.cell(shape, peer, as_intel=as_intel)
        for shape in step_shapes.SHAPES.values()
        for peer in step_peers.peers(None)
        for as_intel in (False, True)
    ]
    known = {cell.name for cell in found} | {"peak_memory_kaggle_vs_torch"}
    known |= {f"precision_{variant}" for variant in precision.VARIANTS}
    known |= {tiers.name_of(cell) for cell in tiers.step_cells(quick=True, threads=2)}
    known |= {f"hot_{name}" for name in hot.CELLS}
    known |= {parse.name_of(ours, peer) for peer, ours in parse.PEERS.items()}
    known |= {name for figures in study_figures.FIGURES.values() for name in figures} | cluster_model.TOLD.keys()
    papers = yaml.safe_load(claims.CLAIMS.read_text())
    named = {claim["ours"] for paper in papers for claim in paper["claims"]} - {None}
    assert named | set(claims.README_CELLS) | set(benchmarks_page.SUMMARY_CELLS) <= known


CIRCUMSTANCES: Any = {"machine": {"cpu": "A CPU"}, "threads": 2, "command": "make it", "date": "2026-01-02"}


def test_a_measured_claim_shows_figure_command_machine_and_date() -> None:
    cell = {"name": "c", "peer": "torch", "ratio": 3.456, "spread": [3.0, 4.0], "share_of_limit": 0.5}
    report = {**CIRCUMSTANCES, "cells": [cell]}
    cells = results.over_processors({"kernels": {"A CPU": report}})
    claim = {"claim": "x", "figure": "not read", "ours": "c", "command": "make it so"}
    figure = "3.46x on 1 processor; best 3.46x (3.00-4.00) over torch"
    row = ["x", "not read", figure, "`make it`", "A CPU, 2 threads", "2026-01-02"]
    assert claims.claim_cells(claim, cells) == row
    assert claims.claim_cells(claim, {}) == ["x", "not read", "not measured yet", "`make it so`", "", ""]
    assert claims.claim_cells({"claim": "x", "figure": "110x", "ours": None}, {})[2:] == ["not yet", "", "", ""]


def test_what_studies_say_of_claims_against_their_rows() -> None:
    def row(source: str, parts: int, speed: float, side: str = "tiers", group: str = "tiers") -> dict[str, object]:
        own = {"source": source, "dram_parts": parts, "relative_speed": speed, "side": side, "group": group}
        return {**own, "ahead": 4}

    rows = [row("Zipf 2", 2, 0.95), row("Zipf 2", 8, 0.91), row("Zipf 2", 32, 0.6), row("Zipf 1", 2, 0.89)]
    rows += [row("Zipf 2", 32, 0.3, "mmap", "rivals"), row("Zipf 2", 32, 0.2, "rocksdb", "rivals")]
    assert "replaces 1 (Zipf 1), 8 (Zipf 2) at 90% of the speed" in study_figures.machines_told({"cells": rows})
    told = study_figures.rivals_told({"cells": rows})
    assert "1/32, Zipf 2: hotrow 60% of" in told and "files 30%, RocksDB behind a cache of rows 20%" in told
    hot_rows = [
        {"kind": "coverage", "name": name, "rows": "exact", "amount": amount, "hot_samples": share}
        for name, amount, share in [("a", 0.2, 0.5), ("a", 0.02, 0.125), ("b", 0.2, 0.9)]
    ]
    told = study_figures.hot_samples_told("a", {"cells": hot_rows})
    assert told == "of the bytes, 2% serve 12.5%, 20% serve 50.0%"


def test_a_study_shows_mean_spread_and_the_paired_difference() -> None:
    plain = precision.row_of("fp32_rowwise", [(0.742, 0.2), (0.762, 0.1)], None)
    row = precision.row_of("bf16_rowwise", [(0.74, 0.2), (0.76, 0.1)], plain)
    assert benchmarks_page.near_float32(row) == "both within 0.0005: **not held**"
    assert benchmarks_page.near_float32(row | {"difference": -0.0005}) == "both within 0.0005: held"
    assert benchmarks_page.near_float32(row | {"difference_sd": 0.01}) == "both within 0.0005: not resolved"
    report = {**CIRCUMSTANCES, "cells": [row]}
    claim = {"claim": "x", "figure": "not read", "ours": "precision_bf16_rowwise"}
    found = claims.claim_cells(claim, results.over_processors({"precision": {"A CPU": report}}))
    assert found[2] == "validation AUC 0.7500 ± 0.0141 (-0.00200 ± 0.00000 beside float32)"


# ---- steps part by part


def small_one_hot() -> bench.Shape:
    return bench.Shape(num_tables=3, num_embeddings=40, embedding_dim=5, batch_size=70, lookups=1, zipf=1.05)


def test_the_bare_loop_does_what_a_step_does() -> None:
    shape = small_one_hot()
    bare = step_profile.Bare(shape, bench.Ours(shape, "step", "sgd"), distance=4)
    bench.check_agreement("bare", bench.Ours(shape, "step", "sgd"), bare)
    bare.tables[2][1, 4] += 0.1 * bench.LR
    with pytest.raises(ValueError, match="cell bare: output"):
        bench.check_agreement("bare", bench.Ours(shape, "step", "sgd"), bare)


def test_a_step_taken_apart_is_the_step() -> None:
    shape = step_shapes.SHAPES["kaggle"].small()
    whole, _ = step_peers.make_ours(step_shapes.make_setting(shape), "sgd")
    apart = step_profile.Training(shape)
    for batch in range(3):
        whole.prepare(batch)
        whole.run()
        apart.step.prepare(batch)
        for run in apart.parts().values():
            run()
    assert torch.equal(apart.loss, whole.last_loss)
    side = step_profile.Embedding(small_one_hot(), "step", "adam")
    side.prepare(0)
    for run in side.parts().values():
        run()
    alone = bench.Ours(small_one_hot(), "step", "adam")
    alone.prepare(0)
    alone.run()
    assert all(map(torch.equal, side.outputs(), alone.outputs()))


def test_every_way_to_update_that_is_right_agrees() -> None:
    cells = updates.update_cells(quick=True)
    for cell in cells:
        bench.check_agreement(cell.name, *cell.build(), batch=1)
    right = [cell for cell in cells if "unprotected" not in cell.name]
    assert len(right) >= 8 and all(list(side.outputs()) for side in right[0].build())


# ---- results and pages


def test_cells_measured_before_stay_with_their_circumstances() -> None:
    before = {"cells": [{"name": "a", "x": 1}, {"name": "b", "x": 1}], "commit": "old", "threads": 2}
    after = results.merged(before, {"cells": [{"name": "b", "x": 2}], "commit": "new", "threads": 2})
    assert after["cells"] == [{"name": "b", "x": 2}, {"name": "a", "x": 1, "measured": {"commit": "old"}}]
    again = results.merged(after, {"cells": [{"name": "c"}], "commit": "newest", "threads": 2})
    assert [cell.get("measured") for cell in again["cells"]] == [None, {"commit": "new"}, {"commit": "old"}]
    assert results.merged(again, {"cells": [{"name": "a"}], "commit": "old", "threads": 2})["cells"][0] == {"name": "a"}
    loaded = results.over_processors({"kernels": {"p": again}})
    assert [loaded[name]["p"]["commit"] for name in "abc"] == ["old", "new", "newest"]


def test_operations_of_a_step_are_those_that_torch_counts() -> None:
    shape = step_shapes.SHAPES["kaggle"].small()
    bottom, top = step_shapes.mlp_widths(shape)
    layers = [torch.nn.Sequential(*(torch.nn.Linear(*layer) for layer in pairwise(widths))) for widths in (bottom, top)]
    inputs = torch.ones(shape.batch_size, bottom[0]), torch.ones(shape.batch_size, top[0], requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x).sum().backward()
    assert step_shapes.product_operations(shape) == counter.get_total_flops()


def test_a_bar_is_held_or_not_where_seeds_tell() -> None:
    ranges = [(-3, 5), (-3, 6), (-6, 1), (4, 9), (6, 9), (-9, -6)]
    found = [hot_quality.at_most(0.0005, low / 1e4, high / 1e4) for low, high in ranges]
    wanted = ["held", *["not resolved"] * 3, *["**not held**"] * 2]
    assert found == [f"at most 0.0005: {said}" for said in wanted]


def test_the_other_side_gets_ids_one_higher(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    columns, split, row = models.columns_of(dataset, "train"), dataset.split("train"), 0
    for block in map(split.block, range(split.num_blocks)):
        for k in range(block.num_rows):
            for feature, ids in zip(dataset.info.features, block.ids, strict=True):
                wanted = ids.values[slice(*ids.row_splits[k : k + 2])] if isinstance(ids, Ragged) else ids[k : k + 1]
                own = columns[feature.name][row].reshape(-1)
                assert (own[own > 0] - 1).tolist() == wanted.tolist()
            for dense, values in zip(dataset.info.dense, block.dense, strict=True):
                assert columns[dense.name][row] == values[k]
            assert columns[dataset.info.labels[0].name][row] == block.label[k]
            row += 1
    assert row == split.num_rows == len(columns["x0"])


def test_differences_have_the_errors_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((3, 4))

    def run(dataset: Any, name: str, seed: int, zoo: Path | None = None, *, lazy: bool = False) -> dict[str, float]:
        side = 0 if zoo is None else 1 + lazy
        return {"auc": values[side, seed - 1], "buy.auc": 0.5, "samples_per_s": 10.0 * seed}

    monkeypatch.setattr(models, "ours", run)
    monkeypatch.setattr(models, "theirs", run)
    found = models.cell(None, "din", 4, Path())
    assert found["samples_per_s"] == {"hotrow": 25, "fuxictr": 25, "lazy": 25}
    for side, own in enumerate(("hotrow", "fuxictr", "lazy")):
        assert found["auc"][own]["mean"] == pytest.approx(values[side].mean())
        assert found["auc"][own]["error"] == pytest.approx(values[side].std(ddof=1) / 2)
    difference = values[0].mean() - values[2].mean()
    assert found["auc"]["lazy"]["difference"] == pytest.approx(difference)
    assert found["auc"]["lazy"]["difference_error"] == pytest.approx(np.sqrt((values.var(1, ddof=1) / 4)[[0, 2]].sum()))
    assert found["buy.auc"]["fuxictr"] == {"mean": 0.5, "error": 0, "difference": 0, "difference_error": 0}


def test_ids_of_a_table_differ() -> None:
    rows = np.arange(1, max(CRITEO_TABLES), 997)
    assert len(np.unique(key_of(rows, 3))) == len(rows)


def test_pages_are_those_of_the_rows_whatever_their_bytes() -> None:
    """Rows of 10 and of 132 bytes; pages that hold pinned rows are left out."""
    row_bytes, pinned, ids = (10, 132), (1000, 40), [np.array([5, 1500, 2500]), np.array([3, 70, 200])]
    pages = object.__new__(serving.Pages)
    cells = SimpleNamespace(names=("a", "b"), read=lambda *given: SimpleNamespace(ids=ids))
    pages._version, pages._pinned = SimpleNamespace(_cells=cells), np.array(pinned)
    pages._row_bytes = np.array(row_bytes)
    wanted = set()
    for f, rows in enumerate(ids):
        for row in rows:
            page = row * row_bytes[f] // mmap.PAGESIZE
            if page * mmap.PAGESIZE >= pinned[f] * row_bytes[f]:
                wanted.add((f, int(page)))
    assert wanted == set(pages.of(({}, [{}] * 3), 1.0)) and {f for f, _ in wanted} == {0, 1}


def test_every_cell_has_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "NUM_REQUESTS", 4)
    monkeypatch.setattr(serving, "SPREAD_REQUESTS", 4)
    monkeypatch.setattr(serving, "NUM_TURNS", 3)
    words = [str(tmp_path / "made"), "--size", "1MB", "--items", "7", "20", "--seconds", "0.05"]
    words += ["--memory", "1MiB", "--out", str(tmp_path / "out.json"), "--cells", *serving.CELLS]
    monkeypatch.setattr(sys, "argv", ["serving", *words])
    serving.main()
    report, text = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert {"7 candidates", "20 candidates", "20 candidates, cold"} <= report["latency"].keys()
    assert 0 < report["latency"]["7 candidates, cold"]["cached_share"] <= 1
    assert {"hotrow, whole", "ONNX Runtime, dense", "torch, whole"} <= report["throughput"].keys()
    memory = report["memory"]
    assert memory["unknown"] == 0, "ids are those of the vocabularies, so that rows all over the tables are read"
    assert memory["most"]["own"] >= memory["before"]["own"] > 0
    versions = report["versions"]
    assert (versions["failed"], versions["of_no_version"]) == (0, 0) and versions["requests"] > 0
    assert all(f"| {cell} |" in text for cell in ("latency", "throughput", "memory")) and "failed: 0" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out.json"]

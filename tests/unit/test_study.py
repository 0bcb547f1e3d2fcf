"""Studies, by the study `kernels`: sweeps that continue, files that are what they say, figures that add up."""

from __future__ import annotations

import bisect
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kernel_study
from benchmarks.kernel_study import KernelCell
from benchmarks.rivals.memory import LossError, check_losses
from benchmarks.rivals.sides import InTiers, Settings, Side
from benchmarks.rivals.stores import Mapped, Rocks
from benchmarks.rivals.work import Work
from benchmarks.study import __main__ as studies
from benchmarks.study import docs as study_docs
from benchmarks.study import presets as study_runner
from benchmarks.study.docs import StudyDocs
from hotrow import draw
from hotrow.kernels import ops

pytestmark = pytest.mark.package

TINY: dict[str, Any] = {
    "title": "Tiny",
    "about": "For tests.",
    "groups": [
        {
            "name": "small",
            "about": "Two tables.",
            "fixed": {"num_tables": 2, "num_embeddings": 50, "embedding_dim": 4, "batch_size": 8, "lookups": 3},
            "axes": {"zipf": [0], "part": ["lookup", "update"], "optimizer": ["sgd", "adagrad"], "threads": [1]},
        },
        {
            "name": "grid",
            "about": "One table.",
            "fixed": {"num_tables": 1, "num_embeddings": 60, "batch_size": 8, "optimizer": "sgd", "threads": 1},
            "axes": {"embedding_dim": [4, 8], "lookups": [1], "zipf": [1.05], "part": ["lookup", "update"]},
        },
    ],
    "quick": {"leave_out": ["small"], "axes": {"grid": {"embedding_dim": [4]}}},
}
CELL = KernelCell(
    group="grid", part="update", optimizer="sgd", num_tables=2, num_embeddings=40, embedding_dim=8, batch_size=4,
    lookups=5, zipf=1.05, threads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few batches and rounds, no roofs of the machine; the thread count is put back."""
    monkeypatch.setattr(kernel_study, "MAX_BATCHES", 2)
    monkeypatch.setattr(kernel_study, "MAX_ROUNDS", 3)
    roofs = {"sequential_gb_per_s": 20.0, "matmul_gflop_per_s": 200.0}
    monkeypatch.setattr(kernel_study, "summary", lambda rows: {"roofs": roofs})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_what_does_not_fit_is_skipped_with_the_reason_or_cut() -> None:
    plan = study_runner.make_plan(studies.make_study("kernels"), quick=False, memory_bytes=1 << 30, cores=1)
    reasons = {cell["key"]: cell["reason"] for cell in plan.skipped}
    assert reasons["grid/lookup/none/1x10000000x256/2048x1/zipf0/1t"] == (
        "tables and state need 10.2 GB, --memory allows 1.1 GB"
    )
    assert reasons["grid/lookup/none/1x100000x16/2048x1/zipf0/2t"] == "2 threads, but this process may use 1 cores"
    assert all(cell.table_bytes <= 1 << 30 and cell.threads == 1 for cell in plan.cells)
    (rows,) = {cell.num_embeddings for cell in plan.cells if cell.group == "sc20-mlperf"}
    assert 0.95 * (1 << 30) < rows * 26 * 129 * 4 <= 1 << 30


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("part", ["lookup", "update"])
def test_bytes_against_counting_them_one_by_one(part: str, optimizer: str) -> None:
    cell = replace(CELL, part=part, optimizer=optimizer)
    ids = kernel_study.walk_ids(cell)[0].tolist()
    per_table = len(ids) // cell.num_tables
    rows_read, written = [], set()
    for position, row in enumerate(ids):
        rows_read.append((position // per_table, row))
        written.add((position // per_table, row))
    floats = cell.embedding_dim + {"adagrad": cell.embedding_dim, "rowwise_adagrad": 1}.get(optimizer, 0)
    expected = sum(2 * 4 * floats for _ in written) if part == "update" else 4 * cell.embedding_dim * len(rows_read)
    for _bag in range(cell.num_tables * cell.batch_size):
        expected += 4 * cell.embedding_dim  # a pooled row out, or its gradient in
    expected += 8 * len(ids)
    row = kernel_study.row_of(cell, seconds=0.5, limit_s=0.2, num_distinct=len(written))
    assert row["gb_per_s"] == pytest.approx(expected / 0.5 / 1e9)
    assert row["flops_per_byte"] * expected == pytest.approx(row["gflop_per_s"] * 1e9 * 0.5)
    assert row["share_of_limit"] == 0.4 and row["ms"] == 500


def test_limit_touches_each_row_that_the_kernel_must(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[list[int], bool]] = []

    def touch(rows: torch.Tensor, ids: torch.Tensor, *, distance: int, into: str, write: bool, threads: int) -> float:
        touched.append((ids.tolist(), write))
        return 1.0

    monkeypatch.setattr(ops, "touch_rows", touch)
    rows = torch.zeros(CELL.num_tables * CELL.num_embeddings, CELL.embedding_dim)
    batches = [ids.tolist() for ids in kernel_study.walk_ids(CELL)]
    half = len(batches[0]) // 2
    everything = [[*ids[:half], *(CELL.num_embeddings + i for i in ids[half:])] for ids in batches]
    best, distinct = kernel_study.limits_s(rows, CELL)
    assert set(best) == {1} and distinct == sum(len(set(ids)) for ids in everything) / len(everything)
    assert touched[: len(everything)] == [(sorted(set(ids)), True) for ids in everything]
    touched.clear()
    kernel_study.limits_s(rows, replace(CELL, part="lookup"))
    assert touched[: len(everything)] == [(ids, False) for ids in everything]


def test_zipf_ids_against_the_law_written_out() -> None:
    """Drawn anew for each seed, though the sums of the law are kept: by hand, from a search in them."""
    shape = replace(CELL.shape, zipf=1.05)
    law = [(k + 1) ** -1.05 for k in range(CELL.num_embeddings)]
    sums = list(itertools.accumulate(law))
    for seed in (3, 4):
        drawn = np.random.default_rng(seed).random(shape.num_tables * shape.batch_size * shape.lookups)
        assert shape.ids(seed).tolist() == [bisect.bisect_left(sums, u * sums[-1]) for u in drawn]


def test_log_axes_put_powers_of_ten_at_equal_distances() -> None:
    across, up = draw.Axis.powers([0.2, 50.0], draw.LEFT, 700), draw.Axis.powers([1.0, 900.0], 370, draw.TOP)
    steps = [across(10.0 ** (k + 1)) - across(10.0**k) for k in range(-1, 2)]
    assert steps == pytest.approx([steps[0]] * 3) and across(0.1) == draw.LEFT
    assert up(1000.0) == draw.TOP


@pytest.mark.parametrize("study", studies.DOCS.values(), ids=lambda study: study.name)
def test_a_page_in_docs_is_what_its_file_makes(study: StudyDocs) -> None:
    files = study.files()
    for name, text in files.items():
        assert (study_docs.DOCS / name).read_text() == text, f"run: python -m benchmarks.study {study.name} --docs"
    page = files[f"{study.name}-study.md"]
    assert page.count(".svg)](") == len(files) - 1 and "/tmp" not in study.json.read_text()


WORK = Work(rows=(3, 900, 4000), embedding_dim=8, batch_size=64, zipf=1.05, bottom_mlp=(16,), top_mlp=(16,))


def losses(side: Side, *, ahead: int) -> list[str]:
    side.build()
    batches = list(islice(side.work.batches(), 9 + ahead))
    return list(side.train(batches, settle=2, steps=7, ahead=ahead)["losses"])


@pytest.mark.parametrize(("kind", "ahead"), [(InTiers, 2), (InTiers, 0), (Mapped, 1), (Mapped, 0), (Rocks, 0)])
def test_a_side_trains_to_the_losses_of_dram(kind: type[Side], ahead: int, tmp_path: Path) -> None:
    if kind is Rocks and importlib.util.find_spec("rocksdict") is None:
        pytest.skip("rocksdict is not installed")
    settings = Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path))
    side = kind(WORK, settings)
    assert losses(side, ahead=ahead) == losses(Side(WORK, settings), ahead=0)
    assert side.facts()["rows_on_disk"] > 1000 and side.facts()["disk_bytes"] > 0


def test_a_loss_that_differs_in_a_bit_is_refused() -> None:
    same = [(0.5).hex(), (0.25).hex()]
    check_losses("cell", 0, same, same)
    with pytest.raises(LossError, match=r"cell c: the loss of step 11 .* where rows lie has changed the result"):
        check_losses("c", 10, same, [(0.5).hex(), np.nextafter(0.25, 1).hex()])
    with pytest.raises(LossError):
        check_losses("c", 0, [float("nan").hex()], [float("nan").hex()])

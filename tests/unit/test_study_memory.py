"""The study `memory`: sides that compute the same, groups that limit or say why not, cells that add up."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.rivals import memory, page
from benchmarks.rivals.memory import LossError, MemoryCell, check_losses
from benchmarks.rivals.sides import InTiers, Settings, Side
from benchmarks.rivals.stores import Mapped, Rocks
from benchmarks.rivals.work import Work
from benchmarks.rivals.worker import Server, Worker, WorkerError
from benchmarks.study import __main__ as studies
from benchmarks.study import presets as study_runner
from benchmarks.tiers import open_table
from hotrow import EmbeddingCollection, Memory
from hotrow.placement.budget import TableSlots

WORK = Work(rows=(3, 900, 4000), embedding_dim=8, batch_size=64, zipf=1.05, bottom_mlp=(16,), top_mlp=(16,))
FEW = {"rounds": 3, "steps": 2, "settle": 1, "warm_up": 2}
TINY: dict[str, Any] = {
    "title": "Tiny",
    "about": "For tests.",
    "groups": [
        {
            "name": "tiers",
            "about": "Ours.",
            "fixed": {**FEW, "scale": 1e-4, "batch_size": 32, "threads": 1},
            "axes": {"zipf": [1.05], "dram_parts": [2]},
            "variants": [["tiers", 2], ["tiers", 0]],
        },
    ],
    "quick": {"leave_out": [], "axes": {}},
}


pytestmark = pytest.mark.usefixtures("one_thread")


class NoGroup:
    """In the place of a group: a file to write the process id into, and no limit."""

    def __init__(self, entry: Path) -> None:
        self.entry = entry

    def limit(self, num_bytes: int) -> None:
        self.limited = num_bytes

    def used_bytes(self) -> int:
        return 1000

    def peak_bytes(self) -> int:
        return 5

    def remove(self) -> None:
        self.entry.unlink()


class InThisProcess:
    """A worker without its process."""

    pid = os.getpid()

    def __init__(self, side: str, work: Work, settings: Settings, *, threads: int, group: Any = None) -> None:
        self.server = Server(side, asdict(work), asdict(settings))

    def ready(self) -> None:
        pass

    def ask(self, **what: Any) -> dict[str, Any]:
        return dict(json.loads(json.dumps(getattr(self.server, what.pop("do"))(**what))))

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        del self.server


@pytest.fixture
def no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "group_refused", lambda: None)
    monkeypatch.setattr(memory, "MemoryGroup", lambda: NoGroup(tmp_path / "procs"))
    monkeypatch.setattr(memory, "Worker", InThisProcess)


def run_tiny(out: Path, **changes: Any) -> dict[str, Any]:
    return study_runner.run_study(studies.make_study("memory", preset=TINY), out, memory_bytes=1 << 30, **changes)


def losses(side: Side, *, ahead: int) -> list[str]:
    side.build()
    batches = list(islice(side.work.batches(), 9 + ahead))
    return list(side.train(batches, settle=2, steps=7, ahead=ahead)["losses"])


# ---- sides


@pytest.mark.parametrize(("kind", "ahead"), [(InTiers, 2), (InTiers, 0), (Mapped, 1), (Mapped, 0), (Rocks, 0)])
def test_a_side_trains_to_the_losses_of_dram(kind: type[Side], ahead: int, tmp_path: Path) -> None:
    if kind is Rocks and importlib.util.find_spec("rocksdict") is None:
        pytest.skip("rocksdict is not installed")
    settings = Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path))
    side = kind(WORK, settings)
    assert losses(side, ahead=ahead) == losses(Side(WORK, settings), ahead=0)
    assert side.facts()["rows_on_disk"] > 1000 and side.facts()["disk_bytes"] > 0


def test_a_side_counts_what_its_steps_took(tmp_path: Path) -> None:
    side = InTiers(WORK, Settings(dram_bytes=WORK.table_bytes // 2, folder=str(tmp_path)))
    side.build()
    found = side.train(list(islice(WORK.batches(), 8)), settle=2, steps=5, ahead=1)
    assert len(found["steps_s"]) == 5 and len(found["losses"]) == 7
    row = memory.shares_of([found, found], 5)
    assert found["lookups"] == 5 * 3 * 64
    assert 0 < row["hit_rate"] <= 1 and 0 <= row["stall_share"] < 1 and row["rows_per_step"] > 0


@pytest.mark.parametrize("pinned", [0, 900])
def test_written_rows_keep_their_initial_values(tmp_path: Path, pinned: int) -> None:
    plain = EmbeddingCollection(WORK.tables, seed=1)
    memory = Memory(
        dram=WORK.table_bytes, ssd=tmp_path, plan=lambda *_: [TableSlots(n, 0) for n in (3, 900)] + [(pinned, 500)]
    )
    tiered = EmbeddingCollection(WORK.tables, memory=memory, seed=1)
    tiered.placement.write_every_row(piece_rows=70)
    for name, num_rows in (("C1", 3), ("C3", 4000)):
        assert torch.equal(tiered.read_rows(name, slice(0, num_rows)), plain.read_rows(name, slice(0, num_rows)))
    counts = tiered.placement.counters()["C3"]
    assert counts["created_rows"] == 4000 - pinned and counts["written_rows"] == counts["evicted_rows"] > 1000


def test_a_side_in_tiers_saves_what_changed(tmp_path: Path) -> None:
    """The second checkpoint has the rows of the steps between."""
    work = replace(WORK, rows=(3, 900, 40_000))
    side = InTiers(work, Settings(dram_bytes=work.table_bytes // 2, folder=str(tmp_path), turns=2))
    side.build()
    first = side.save()
    side.train(list(islice(work.batches(), 2)), settle=0, steps=2, ahead=0)
    second = side.save()
    assert first["checkpoint_bytes"] > work.table_bytes / 2, "every row that is not pinned exists"
    assert 0 < second["checkpoint_bytes"] < first["checkpoint_bytes"] / 4


@pytest.mark.slow
def test_a_worker_enters_its_group_trains_and_says_why_it_ends(tmp_path: Path) -> None:
    group = NoGroup(tmp_path / "procs")
    with Worker("dram", WORK, Settings(dram_bytes=0, folder=""), threads=1, group=group) as worker:  # type: ignore[arg-type]
        worker.ready()
        assert int(group.entry.read_text()) == worker._process.pid
        assert worker.ask(do="build") == {"rows_on_disk": 0, "disk_bytes": 0}
        feed = memory.Feed(WORK)
        ((first,), (second,)) = (feed.train([worker], settle=1, steps=n, ahead=0) for n in (2, 1))
        assert len(first["losses"]) == 3 and second["losses"][:1] != first["losses"][:1]
        with pytest.raises(WorkerError, match=r"side dram: TypeError: .*unexpected keyword"):
            worker.ask(do="train", stride=1)
        with pytest.raises(WorkerError, match="the process of side dram ended: status 0"):
            worker.ask(do="build")
    assert not group.entry.exists()


# ---- losses and groups


def test_a_loss_that_differs_in_a_bit_is_refused() -> None:
    same = [(0.5).hex(), (0.25).hex()]
    check_losses("cell", 0, same, same)
    with pytest.raises(LossError, match=r"cell c: the loss of step 11 .* where rows lie has changed the result"):
        check_losses("c", 10, same, [(0.5).hex(), np.nextafter(0.25, 1).hex()])
    with pytest.raises(LossError):
        check_losses("c", 0, [float("nan").hex()], [float("nan").hex()])


@pytest.mark.parametrize(("disturbed", "num_taken"), [([1, 0, 1, 0, 0], 5), ([1] * 3, 3)], ids=["some", "all"])
def test_disturbed_rounds_are_taken_again_and_there_is_always_a_figure(disturbed: list[int], num_taken: int) -> None:
    rounds = iter(disturbed)
    side = {"seconds": 2.0, "cpu_s": 1.0, "losses": [], "steps_s": [0.1]}

    class Stretches:
        def stretch(self, cell: MemoryCell, *, steps: int, ahead: int) -> dict[str, Any]:
            return {"disturbed": float(next(rounds)), "dram": {**side, "seconds": 1.0}, "side": side}

    cell = MemoryCell(group="g", side="tiers", ahead=4, dram_parts=10, zipf=1.05, rounds=3)
    found = memory.measure_rounds(Stretches(), [cell])[cell.key]  # type: ignore[arg-type]
    row = memory.row_of(cell, found, {})
    assert (row["clean_rounds"], row["taken_rounds"]) == (min(3, disturbed.count(0)), num_taken)
    assert (row["relative_speed"], row["spread"], row["rounds"]) == (0.5, [0.5, 0.5], 3)


# ---- the study


def test_the_study_measures_once_and_holds_its_fields(
    tmp_path: Path, no_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else rounds are taken again, and more is compared.
    monkeypatch.setattr(memory.bench.Disturbance, "share", lambda self: 0.0)
    out = tmp_path / "out"
    result = run_tiny(out)
    assert (result["num_cells"], result["measured"], result["skipped"]) == (2, 2, 0)
    report = json.loads((out / "memory.json").read_text())
    assert result["cells"] == report["cells"] and len(report["cells"]) == 2
    for row in report["cells"]:
        assert row["relative_speed"] > 0 and row["rounds"] == 3
        assert row["steps_compared"] == 3 + 3 * ((1 + 2) + (2 + 2)) + 1  # warm-up looks two ahead: it settles for two
        assert row["limit_bytes"] == 1000 + row["table_bytes"] // 2 + memory.SLACK_BYTES["tiers"]
    kept = page.STUDY.kept_of(report)
    assert page.body_of(kept) == page.body_of(report), "the page in docs/ shows what is kept of it"
    assert page.charts_of(kept) == page.charts_of(report)
    assert not [*out.glob("hotrow-study-*")]
    before = report["cells"]
    run_tiny(out)
    assert json.loads((out / "memory.json").read_text())["cells"] == before


def test_a_table_that_is_opened_is_timed_and_its_file_goes(tmp_path: Path) -> None:
    row = open_table(tmp_path, quick=True)
    assert row["table_bytes"] == pytest.approx(1e9, rel=0.01)
    assert 0 < row["open_s"] <= row["worst_s"] and row["collection_s"] > 0
    assert not [*tmp_path.iterdir()]

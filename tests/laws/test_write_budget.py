"""A write budget counts and warns, and changes no bit of a run.

What was written is counted apart from the budget: by the stores' own counters, and the sizes of checkpoints.
"""

from pathlib import Path
from typing import Any

import pytest
from test_resume import config as config_of
from test_resume import outcome, signal_at

from hotrow.base.files import folder_bytes
from hotrow.kernels import ops
from hotrow.placement.tiers import Tiers
from hotrow.run import parts, runs, trainer, wear
from hotrow.run.folder import RunFolder
from packed_data import planted

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")

DRAM = 60_000
CHANGES = ["optimizer.sparse.name=adagrad", "train.epochs=6"]
CHECKPOINT = 2020 * 64
"""Bytes: rows of 8 weights and as many sums of squares."""
data = planted(table_rows=(600, 20, 1400))


def config(data: Path, run: Path, budget: str | None, *changes: str, **memory: Any) -> Any:
    memory = {"dram": DRAM, "file": str(run.parent / "rows"), "write_budget": budget, **memory}
    return config_of(data, run, [*CHANGES, *changes], memory)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the bytes of rows when stores are closed, and those of each checkpoint."""
    written: list[int] = []
    close, save = trainer.close_tiers, parts.save_checkpoint

    def closing(embedding: Any, run: Path) -> None:
        tiers = embedding.placement.find(Tiers)
        written.extend(store.counters()["written_bytes"] for store in ([] if tiers is None else tiers.stores))
        close(embedding, run)

    def saving(path: Path, *args: Any, **options: Any) -> Path:
        made = save(path, *args, **options)
        written.append(folder_bytes(path))
        return made

    monkeypatch.setattr(trainer, "close_tiers", closing)
    monkeypatch.setattr(parts, "save_checkpoint", saving)
    return written


def warned(run: RunFolder) -> str:
    found = run.record.warnings.get("write_budget_exceeded", {"count": 0, "text": ""})
    assert found["count"] <= 1
    return str(found["text"])


@pytest.mark.slow_but("tiers")
@pytest.mark.parametrize("dram", [DRAM, "1GiB"], ids=["tiers", "in memory"])
def test_a_budget_that_is_spent_is_said_once_and_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dram: Any
) -> None:
    """Also where checkpoints alone are written."""
    every = "checkpoint.every=9"
    expected = outcome(runs.train(config(data, tmp_path / "plain", None, every, dram=dram), quiet=True))
    written = counted(monkeypatch)
    budget = 2 * CHECKPOINT
    run = runs.train(config(data, tmp_path / "run", f"{budget}/day", every, dram=dram), quiet=True)
    assert outcome(run) == expected
    assert f"memory.write_budget is {budget}/day" in warned(run) and "this session has written" in warned(run)
    assert run.record.write_budget["share_used"] == pytest.approx(sum(written) / budget, abs=1e-3)
    assert run.record.write_budget["share_used"] > 1
    log = (run.path / "log.txt").read_text()
    assert log.count(f"memory.write_budget is {budget}/day") == 2, "once for people, once with its code"


def test_the_rate_is_judged_when_caches_are_warm(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear, "WARM_UP_STEPS", 20)
    run = runs.train(config(data, tmp_path / "run", "5MB/hour"), quiet=True)
    assert "rows are written at" in warned(run) and run.record.write_budget["share_at_this_rate"] > 1
    assert run.record.write_budget["share_used"] < 1
    assert warned(runs.train(config(data, tmp_path / "wide", "900TB/hour"), quiet=True)) == ""


def test_a_resumed_session_counts_from_its_beginning_and_the_run_over_all(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = counted(monkeypatch)
    with monkeypatch.context() as patch:
        signal_at(patch, 30, 15)  # type: ignore[arg-type]
        run = runs.train(config(data, tmp_path / "run", "1GB/day"), quiet=True)
    assert run.record.status == "interrupted"
    first = sum(written)
    run = runs.resume(run.path, quiet=True)
    assert run.record.memory["drive_written_bytes"] == pytest.approx(sum(written), abs=50_000)
    assert run.record.write_budget["share_used"] == pytest.approx((sum(written) - first) / 1e9, abs=5e-5)

"""Law 3 under a write budget: a run that ends to spare its drive goes on later, to the bits of one that never did.

What was written is counted apart from the budget: by the stores' own counters, and the sizes of checkpoints.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_resume import BASE, outcome, signal_at

from forked import run_forked
from hotrow.base.files import folder_bytes
from hotrow.cli import app as cli
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.placement.tiers import Tiers
from hotrow.run import runs, trainer
from hotrow.run import wear as write_budget
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.folder import RunFolder
from hotrow.run.wear import LEDGER, PIECE_S, WriteBudgetError

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")

DRAM = 60_000
CHANGES = ["optimizer.sparse.name=adagrad", "train.epochs=6"]
CHECKPOINT = 2020 * 64
"""Bytes: rows of 8 weights and as many sums of squares."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Path:
    return make_dataset(tmp_path_factory.mktemp("budget") / "data", table_rows=(600, 20, 1400)).path


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nothing stops."""
    return outcome(runs.train(config(data, tmp_path_factory.mktemp("whole") / "run", None), quiet=True))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, for ledgers; change its only element."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(write_budget.WriteLedger.__init__, "__kwdefaults__", {"now": lambda: now[0]})
    return now


def config(data: Path, run: Path, budget: str | None, *changes: str, **memory: Any) -> Any:
    raw = {**BASE, "data": str(data), "run": str(run), "memory": {"dram": DRAM, "write_budget": budget, **memory}}
    return make_config(apply_overrides(raw, [*CHANGES, *changes]))


class Sessions:
    """Every session's bytes, by the time it ended: of stores as they are closed, of checkpoints as they appear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
        self.now, self.written = now, []
        self.steps: list[int] = []
        close, save = trainer.close_tiers, trainer.save_checkpoint

        def closing(embedding: Any, run: Path) -> None:
            tiers = embedding.placement.find(Tiers)
            stores = [] if tiers is None else [store for store in tiers.stores if store.path]
            natives = [store.native for store in stores]
            close(embedding, run)
            for native in natives:  # counts on after its store is closed
                while native.counters()["waiting_bytes"]:
                    time.sleep(0.001)
                self.written.append((now[0], native.counters()["written_bytes"]))

        def saving(path: Path, *args: Any, **options: Any) -> Path:
            made = save(path, *args, **options)
            self.written.append((now[0], folder_bytes(path)))
            return made

        monkeypatch.setattr(trainer, "close_tiers", closing)
        monkeypatch.setattr(trainer, "save_checkpoint", saving)

    def most_in(self, seconds: float) -> int:
        """The most bytes in any window."""
        return max(sum(n for at, n in self.written if end - seconds < at <= end) for end, _ in self.written)


@pytest.mark.parametrize("where", ["ssd", "file", "both"])
def test_it_saves_ends_and_goes_on_to_the_same_bits(
    data: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], where: str
) -> None:
    """Over several sessions, one killed by an error and one resumed too early among them."""
    sessions = Sessions(monkeypatch, clock)
    # Rows of half a sector and less share sectors, so that what is written is several times what rows take.
    budget = 800_000 if where == "file" else 1_100_000 if where == "both" else 1_900_000
    memory: dict[str, Any] = {where: str(tmp_path / "rows")}
    if where == "both":
        memory = {"file": str(tmp_path / "rows"), "file_bytes": 50_000, "ssd": str(tmp_path / "rows"), "dram": 64_000}
    if where != "file":
        memory["force"] = True
    plain, failed = trainer.train_step, []

    def step(parts: Any, batch: Any, number: int, lap: Any) -> Any:
        if number == 25 and not failed:
            failed.append(number)
            raise RuntimeError("killed")
        return plain(parts, batch, number, lap)

    monkeypatch.setattr(trainer, "train_step", step)
    run, ends = tmp_path / "run", []
    for session in range(40):
        try:
            if session == 0:
                folder = runs.train(config(data, run, f"{budget}/day", "checkpoint.every=9", **memory), quiet=True)
            else:
                folder = runs.resume(run, quiet=True)
            break
        except RuntimeError:
            assert failed
        except WriteBudgetError as error:
            ends.append(str(error))
            step_number = max(list_checkpoints(run / "checkpoints"))
            record = RunFolder.open(run).record
            assert record.status == "failed" and record.error.endswith(str(error))
            found = re.search(r"from (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) on", str(error))
            assert found, str(error)
            at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))
            if "Training stopped" in str(error):
                assert f"stopped at step {step_number}, whose checkpoint is whole" in str(error)
                assert record.steps == step_number
                assert record.write_budget["share_used"] > 0.3
                clock[0] += (at - clock[0]) / 2  # too early
            else:
                assert "to continue from" in str(error)
                clock[0] = at
    assert outcome(folder) == expected
    assert sum("Training stopped" in end for end in ends) >= 2 and sum("Try again" in end for end in ends) >= 1, ends
    assert sessions.most_in(86_400) <= budget
    assert sessions.most_in(86_400) > 0.4 * budget, "it might have gone on for longer"


KILLED = """
import os, sys
from pathlib import Path
from hotrow.run import runs
from hotrow.run import trainer
from hotrow.config.load import load_config
plain, seen = trainer.train_step, []
def step(parts, batch, step, clock):
    seen.append(step)
    if len(seen) == int(sys.argv[2]):
        stores = [store for store in parts.embedding.placement.stores if store.path is not None]
        print("rows", sum(store.counters()["written_bytes"] for store in stores))
        sys.stdout.flush()
        os._exit(9)
    return plain(parts, batch, step, clock)
trainer.train_step = step
config = load_config(sys.argv[1])
runs.resume(config.run, quiet=True) if Path(config.run).exists() else runs.train(config, quiet=True)
"""


@pytest.mark.parametrize("budget", [pytest.param("20MB/day", marks=pytest.mark.slow), None])
def test_kills_are_not_forgotten(data: Path, tmp_path: Path, budget: str | None) -> None:
    """At a step between looks at the counters: what was written until then stands in the file, and little more."""
    path, run = tmp_path / "config.yaml", tmp_path / "run"
    changes = ["checkpoint.every=10", "checkpoint.keep_last=99"]
    path.write_text(config(data, run, budget, *changes, file=str(tmp_path / "rows")).to_yaml())
    rows = 0
    for at in ("23", "15"):
        killed = run_forked(KILLED, path, at)
        assert killed.returncode == 9, killed.stderr
        rows += int(killed.stdout.split()[-1])
        written = rows + sum(
            read_manifest(found).written_bytes for found in list_checkpoints(run / "checkpoints").values()
        )
        noted = sum(json.loads((run / LEDGER).read_text())["bytes_by_start"].values())
        assert written <= noted <= written + 300_000
    assert rows > 200_000


@pytest.mark.parametrize("dram", [DRAM, "1GiB"])
def test_a_session_without_a_budget_is_counted_by_one_that_has_one(
    data: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float], dram: Any
) -> None:
    """Rows and checkpoints, and checkpoints alone where all rows lie in memory."""
    sessions, run = Sessions(monkeypatch, clock), tmp_path / "run"
    signal_at(monkeypatch, 30, 15)  # type: ignore[arg-type]
    runs.train(config(data, run, None, file=str(tmp_path / "rows"), dram=dram), quiet=True)
    written = sum(num_bytes for _, num_bytes in sessions.written)
    assert written > CHECKPOINT
    noted = sum(json.loads((run / LEDGER).read_text())["bytes_by_start"].values())
    assert written <= noted <= written + 100_000
    clock[0] += 3600
    with pytest.raises(WriteBudgetError, match=r"were written in the last 24 hours; .* Try again from"):
        runs.resume(run, [f"memory.write_budget={written + CHECKPOINT // 2}/day"], quiet=True)
    clock[0] += 86_400
    assert outcome(runs.resume(run, ["memory.write_budget=20MB/day"], quiet=True)) == expected


def test_a_larger_budget_or_none_lets_it_go_on_at_once(
    data: Path, expected: Any, tmp_path: Path, clock: list[float]
) -> None:
    with pytest.raises(WriteBudgetError, match=r"memory\.write_budget is 600kB/hour.* in the last hour"):
        runs.train(config(data, tmp_path / "run", "600kB/hour", file=str(tmp_path / "rows")), quiet=True)
    written = json.loads((tmp_path / "run" / LEDGER).read_text())["bytes_by_start"]
    assert list(written) == [str(int(clock[0]) // PIECE_S * PIECE_S)]
    with pytest.raises(WriteBudgetError, match="Try again from"):
        runs.resume(tmp_path / "run", ["memory.write_budget=650kB/hour"], quiet=True)
    assert outcome(runs.resume(tmp_path / "run", ["memory.write_budget=1GB/day"], quiet=True)) == expected


def test_checkpoints_of_tables_in_dram_count(data: Path, expected: Any, tmp_path: Path, clock: list[float]) -> None:
    run, budget = tmp_path / "run", int(4.5 * CHECKPOINT)
    changes = ["checkpoint.every=9", "checkpoint.keep_best=false"]
    with pytest.raises(WriteBudgetError, match=r"stopped at step 36, whose checkpoint is whole"):
        runs.train(config(data, run, f"{budget}/day", *changes, dram="1GiB"), quiet=True)
    record = RunFolder.open(run).record
    assert record.memory is None and record.write_budget["window_bytes"] < budget
    clock[0] += 86_400 + PIECE_S
    with pytest.raises(WriteBudgetError, match=r"stopped at step 72, "):
        runs.resume(run, quiet=True)
    clock[0] += 86_400 + PIECE_S
    assert outcome(runs.resume(run, quiet=True)) == expected


def test_less_than_a_checkpoint_is_refused_before_a_folder_is_made(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"memory\.write_budget is 100kB/day, but a checkpoint takes [\d.]+ KiB: raise it"
    ):
        runs.train(config(data, tmp_path / "run", "100kB/day"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_budget_under_which_no_stopped_run_goes_on_is_a_warning(
    data: Path, expected: Any, tmp_path: Path, clock: list[float]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        WriteBudgetError, match=r"Continue with a memory\.write_budget \(--set\) above \d{3},\d{3} bytes"
    ):
        runs.train(config(data, run, "300kB/day", file=str(tmp_path / "rows")), quiet=True)
    warning = RunFolder.open(run).record.warnings["write_budget_too_small_to_resume"]
    assert "to resume this run may write" in warning["text"]
    assert outcome(resumed := runs.resume(run, ["memory.write_budget=null"], quiet=True)) == expected
    assert resumed.record.write_budget is None, "that of a session before"


def test_what_is_said_of_going_on_comes_true(data: Path, tmp_path: Path, clock: list[float]) -> None:
    """A new session has written to no row: it needs less than one that would have to make its own untouched first."""
    said = []
    for budget in range(300_000, 700_000, 50_000):
        run = tmp_path / str(budget)
        with pytest.raises(WriteBudgetError, match="Training stopped at step") as stopped:
            runs.train(config(data, run, f"{budget}/day", file=str(tmp_path / f"rows-{budget}")), quiet=True)
        step = max(list_checkpoints(run / "checkpoints"))
        clock[0] += 2 * 86_400
        with suppress(WriteBudgetError):
            runs.resume(run, quiet=True)
        said.append("which this one never allows" not in str(stopped.value))
        assert (max(list_checkpoints(run / "checkpoints")) > step) == said[-1], (budget, str(stopped.value))
    assert {*said} == {True, False}


def test_the_rate_is_said_once_it_is_known(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(write_budget, "ANNOUNCED_STEPS", 20)
    run = runs.train(config(data, tmp_path / "run", "5MB/hour", file=str(tmp_path / "rows")), quiet=True)
    lines = [line for line in (run.path / "log.txt").read_text().splitlines() if "rows are written at" in line]
    assert len(lines) == 2 and "write_budget_will_be_spent" in lines[1], lines
    found = re.search(r"5MB/hour: rows are written at [\d,.]+ [MG]iB an hour, ([\d.]+)% of the budget, and ", lines[0])
    assert found and float(found[1]) > 100
    # Mean over the run, of which the steps that filled the caches wrote less.
    per_epoch = run.record.memory["written_bytes_per_epoch"]
    said = re.search(r"and ([\d.]+) (?:KiB|MiB) an epoch, ([\d.]+)% of it; a checkpoint takes [\d.]+ [KM]iB", lines[0])
    assert said and 0.9 * per_epoch < float(said[2]) / 100 * 5e6 < 1.5 * per_epoch


def test_the_command_line_says_it_and_ends_with_2(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(data, tmp_path / "run", "600kB/day", file=str(tmp_path / "rows")).to_yaml())
    for arguments in ([str(path)], ["--resume", str(tmp_path / "run")]):
        monkeypatch.setattr("sys.argv", ["hotrow", "train", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        last = capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == 2
        assert re.match(r"hotrow: memory\.write_budget is 600kB/day, and [\d.]+ KiB were written", last)


def test_an_interrupt_comes_first_and_keeps_the_ledger(
    data: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_at(monkeypatch, 30, 15)  # type: ignore[arg-type]
    run = runs.train(config(data, tmp_path / "run", "1GB/day", file=str(tmp_path / "rows")), quiet=True)
    first = run.record.write_budget["window_bytes"]
    assert run.record.status == "interrupted" and first > CHECKPOINT
    run = runs.resume(run.path, quiet=True)
    assert outcome(run) == expected and run.record.write_budget["window_bytes"] > first

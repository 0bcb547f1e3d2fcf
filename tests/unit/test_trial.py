"""Trials of `hotrow plan`: their steps are those of a run, what they print was measured, and nothing is left."""

import io
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from forked import COMMAND, start_forked
from hotrow.cli.app import app
from hotrow.config.load import make_config
from hotrow.data.packed import loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot import order
from hotrow.parallel.communicator import Communicator
from hotrow.placement.store_file import PREFIX
from hotrow.placement.tiers import Tiers
from hotrow.plan import alternatives, trial
from hotrow.plan.alternatives import decided, groups, try_alternatives
from hotrow.plan.decision import decision_of
from hotrow.run import runs, trainer
from hotrow.run.build import build
from loops import looped
from rank_pool import RankPool

TIERS = {"dram": "70KiB", "force": True}
SLEEP_S = 0.02


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "data"
    return make_dataset(folder, rows={"train": 1500, "val": 64}, table_rows=(50, 20, 4000), counts=True).path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "ENOUGH_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_file(data: Path, folder: Path, **options: Any) -> Path:
    raw: dict[str, Any] = {
        "data": str(data),
        "run": str(folder / "runs" / "one"),
        "model": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"batch_size": 16, "threads": 1},
    }
    raw["train"] = {**raw["train"], **options.pop("train", {})}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw | options))
    return path


def tried(path: Path, steps: int = 20) -> trial.Trial:
    return trial.trial(decided(path), steps=steps)


def test_the_steps_are_those_of_a_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses, in their order, as the run that follows; and the run says how far off the trial was."""
    losses: dict[str, list[float]] = {"trial": [], "run": []}
    step, whose = trainer.train_step, "trial"

    def noting(*arguments: Any) -> torch.Tensor:
        loss = step(*arguments)
        losses[whose].append(float(loss))
        return loss

    monkeypatch.setattr(trainer, "train_step", noting)
    path = config_file(Path(os.path.relpath(data)), tmp_path)  # a run knows the data by another name
    found = tried(path)
    whose = "run"
    run = runs.train(make_config(yaml.safe_load(path.read_text())), quiet=True)
    assert len(losses["trial"]) == trial.WARM_UP + 20 and losses["run"][:30] == losses["trial"]
    assert run.record.trial is not None and run.record.trial["step_ms"] == found.step_ms
    from hotrow.api import Run

    assert "; the trial of " in Run(run.path).closing_lines("rows", [])
    other = config_file(data, tmp_path, run=str(tmp_path / "other"), train={"batch_size": 20})
    other_run = runs.train(make_config(yaml.safe_load(other.read_text())), quiet=True)
    assert other_run.record.trial is None, "nobody tried that"


def test_what_it_says_was_measured(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that sleeps takes as long in the trial, in the phase in which it sleeps."""
    update = trainer.clip

    def slow(*arguments: Any) -> None:
        time.sleep(SLEEP_S)
        update(*arguments)

    monkeypatch.setattr(trainer, "clip", slow)
    found = tried(config_file(data, tmp_path))
    (steps,) = found.steps
    assert steps.step_ms["dense"] >= 1e3 * SLEEP_S > steps.step_ms["lookup"]
    assert steps.quartiles_ms[0] >= 1e3 * SLEEP_S and steps.num_steps == 20
    assert found.samples_per_s == pytest.approx(1e3 * 16 / sum(found.step_ms.values()), rel=0.01)


def test_rows_on_disk_are_made_first_and_removed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the later epochs a batch makes no row; in the first one it reads few, because few were written."""
    seen: list[dict[str, int]] = []
    take = trial._Trying._take

    def taking(self: Any, name: str, steps: int) -> None:
        before = self._now().counts
        take(self, name, steps)
        assert list(self.tiers.memory.folder.rglob(f"{PREFIX}*/*"))
        seen.append(dict(self._now().counts - before))

    monkeypatch.setattr(trial._Trying, "_take", taking)
    found = tried(config_file(data, tmp_path, memory=TIERS, train={"epochs": 4}))
    first, later = found.steps
    assert (first.kind, later.kind) == (trial.FIRST_EPOCH, trial.LATER)
    assert seen[0].get("created_rows", 0) > 0 == seen[1].get("created_rows", 0)
    assert later.io["reads"] > first.io["reads"] and later.io["read_bytes"] > 0
    assert later.hits_per_lookup is not None and 0 < later.hits_per_lookup < 1
    assert found.made_share == 1 and found.made_bytes > 0
    mean = {phase: (ms + 3 * later.step_ms[phase]) / 4 for phase, ms in first.step_ms.items()}
    assert found.step_ms == pytest.approx(mean, abs=1e-3)
    assert not (tmp_path / "runs").exists(), "it was not there before"


def test_of_large_tables_a_part_is_made(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_DISK_BYTES", 60_000)
    made: list[float] = []
    write = Tiers.write_every_row
    monkeypatch.setattr(
        Tiers, "write_every_row", lambda self, **how: (made.append(how["share"]), write(self, **how))[1]
    )
    found = tried(config_file(data, tmp_path, memory=TIERS))
    assert 0 < found.made_share < 1 and made == [0.0, found.made_share] and found.made_bytes <= 60_001
    from hotrow.cli.plan import Plan, lines_of

    plan = Plan(decision=decision_of(decided(config_file(data, tmp_path, memory=TIERS))), trial=found, alternatives=[])
    assert f"the first {found.made_share:.1%} of the rows on disk" in "\n".join(lines_of(plan))


@looped("share", [0.0, 0.4, 1.0])
def test_the_first_rows_of_a_share_exist(data: Path, tmp_path: Path, share: float) -> None:
    setup = decided(config_file(data, tmp_path, memory=TIERS))
    parts = build(setup)
    tiers = parts.embedding.placement.find(Tiers)
    tiers.write_every_row(share=share)
    for table, slots in zip(tiers.tables, tiers.slots, strict=True):
        tail = table.num_embeddings - slots.pinned
        wanted = max(slots.cached, -int(-share * tail // 1)) if slots.cached else 0
        ids = torch.cat([*tiers.changed_rows(table.name, ever=True), torch.zeros(0, dtype=torch.int64)])
        assert sorted(ids[ids >= slots.pinned].tolist()) == list(range(slots.pinned, slots.pinned + wanted))
    tiers.close()


def test_a_failure_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a step broke")

    monkeypatch.setattr(trainer, "clip", broken)
    with pytest.raises(RuntimeError, match="a step broke"):
        tried(config_file(data, tmp_path, memory=TIERS))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow_but("9")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_trial_leaves_nothing(data: Path, tmp_path: Path, number: int) -> None:
    """A killed process cannot remove its rows; the next trial there does."""
    path = config_file(data, tmp_path, memory=TIERS, run=None)
    slow = "import hotrow.plan.trial as t; t.ENOUGH_S = t.MOST_S = 60.0; " + COMMAND
    folder = tmp_path / "runs" / "memory"
    environ = {**os.environ, "PWD": str(tmp_path)}
    program = f"import os; os.chdir({str(tmp_path)!r}); " + slow
    with start_forked(program, "plan", path, env=environ) as child:
        for _ in itertools.takewhile(lambda _: not list(folder.glob(f"{PREFIX}*/*")), range(1200)):
            time.sleep(0.05)
        os.kill(child.pid, number)
        done = child.finish()
    assert done.returncode == (128 + number if number == signal.SIGTERM else -number), done.stderr
    if number == signal.SIGKILL:
        assert list(folder.glob(f"{PREFIX}*"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            tried(path)
        assert not list(folder.glob(f"{PREFIX}*"))
    else:
        assert not folder.exists()


def test_phases_of_a_hot_schedule_stand_apart(data: Path, tmp_path: Path) -> None:
    hot = {"schedule": "fae", "budget": "40KiB", "small_table": 0}
    found = tried(config_file(data, tmp_path, hot=hot, train={"batch_size": 4}))
    assert [own.kind for own in found.steps] == ["cold batches", "hot batches"]
    assert sum(own.share for own in found.steps) == pytest.approx(1)
    assert sum(found.step_ms.values()) == pytest.approx(sum(own.share * own.total_ms for own in found.steps), abs=0.01)


def test_the_command(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STEPS", 12)
    path = config_file(data, tmp_path, memory=TIERS)
    done = CliRunner().invoke(app, ["plan", str(path), "--json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and found["samples_per_s"] > 0 and found["step_ms"].keys() == {*trial.PHASES}
    assert [own["name"] for own in found["decision"]["tables"]] == ["t0", "t1", "t2"]
    shown = CliRunner().invoke(app, ["plan", str(path)]).stdout
    assert "first epoch: " in shown and "reads of" in shown and "every row on disk was made first" in shown
    only = CliRunner().invoke(app, ["plan", str(path), "--no-trial"]).stdout
    assert "70.0 KiB of DRAM" in only and "samples/s" not in only
    assert "model" not in only, "nothing is modelled"


def test_alternatives_take_turns(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds that go forward and back; the child's program runs in this process."""
    order: list[str] = []

    def here(config: Path, overrides: list[str]) -> Any:
        order.append(" ".join(overrides))
        given, said = io.StringIO(json.dumps([str(config), *overrides])), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(said):
            patch.setattr(sys, "stdin", given)
            patch.setattr(alternatives, "end_with_parent", lambda: None)
            alternatives.main()
        return alternatives.answer_of(said.getvalue())

    monkeypatch.setattr(alternatives, "_in_a_process", here)
    path = config_file(data, tmp_path)
    found, rows = try_alternatives(path, groups(["train.batch_size=8 train.seed=3", "memory.dram=1KiB"]), rounds=2)
    assert order == ["", "train.batch_size=8 train.seed=3", "memory.dram=1KiB", "train.batch_size=8 train.seed=3", ""]
    assert [own.changes for own in rows] == [[], ["train.batch_size=8", "train.seed=3"], ["memory.dram=1KiB"]]
    assert rows[2].samples_per_s is None and rows[2].refused is not None and "not enough memory" in rows[2].refused
    for row in rows[:2]:
        assert row.samples_per_s and row.spread and row.spread[0] <= row.samples_per_s <= row.spread[1]
    assert found.trial.threads == 1
    with pytest.raises(ValueError, match="not enough memory"):
        try_alternatives(config_file(data, tmp_path, memory={"dram": "1KiB"}), [], rounds=1)


@pytest.mark.slow
def test_an_alternative_has_a_process_of_its_own(data: Path, tmp_path: Path) -> None:
    found = alternatives._in_a_process(config_file(data, tmp_path), ["train.batch_size=8"])
    assert isinstance(found, alternatives.Found) and found.trial.peak_bytes > 1 << 26


def test_a_name_that_is_wrong_costs_no_round(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "_in_a_process", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(ValueError, match=r"train\.thread"):
        try_alternatives(config_file(data, tmp_path), [["train.thread=1"]])


@looped("text", ["train.threads", "threads 2", "=3"])
def test_an_alternative_that_changes_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        groups([text])
    assert groups(["model.top_mlp=[8, 4] train.threads=2"]) == [["model.top_mlp=[8, 4]", "train.threads=2"]]


def test_it_plans_what_the_tables_have(data: Path, tmp_path: Path) -> None:
    """The slots that are printed are those of the tables that a run builds."""
    setup = decided(config_file(data, tmp_path, memory=TIERS))
    parts = build(setup)
    tiers = parts.embedding.placement.find(Tiers)
    assert [(own.pinned, own.cached) for own in decision_of(setup).tables] == [tuple(own) for own in tiers.slots]
    tiers.close()


@looped(
    ("train", "share"),
    [({"epochs": 1}, 1.0), ({"epochs": 4}, 0.25), ({"epochs": 4, "max_steps": 188}, 0.5), ({"max_steps": 3}, 1.0)],
)
def test_epochs_are_weighed_as_the_run_has_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: dict[str, int], share: float
) -> None:
    """An epoch has 94 steps."""
    monkeypatch.setattr(trial, "WARM_UP", 4)
    found = tried(config_file(data, tmp_path, memory=TIERS, train=train), 4)
    first, later = found.steps
    for phase, ms in found.step_ms.items():
        assert ms == pytest.approx(share * first.step_ms[phase] + (1 - share) * later.step_ms[phase], abs=1e-3)
    assert found.samples_per_s == pytest.approx(1e3 * 1500 / 94 / sum(found.step_ms.values()), rel=1e-3)


@pytest.mark.slow_but("16", "400")
@pytest.mark.parametrize("batch_size", [16, 400, 5000])
def test_gathering_rows_is_spread_over_the_steps_between(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """A window that takes longer shows in the step, whether the timed steps see it or not."""
    windows, gather, slow_s = -(-1500 // 500), loader._Stream._gather, 0.2 if batch_size == 16 else 0.03

    def slow(stream: Any, index: int) -> Any:
        time.sleep(slow_s)
        return gather(stream, index)

    monkeypatch.setattr(loader._Stream, "_gather", slow)
    monkeypatch.setattr(order, "WINDOW_ROWS", 500)
    monkeypatch.setattr(
        loader.Loader.__init__, "__kwdefaults__", loader.Loader.__init__.__kwdefaults__ | {"window_rows": 500}
    )
    found = tried(config_file(data, tmp_path, train={"batch_size": batch_size}), 20)
    expected_ms = 1e3 * slow_s * windows / -(-1500 // batch_size)
    assert found.step_ms["data"] == pytest.approx(expected_ms, rel=0.35, abs=1.5)


def on_a_rank(comm: Communicator, path: Path) -> tuple[bool, list[tuple[str, int]], dict[str, str]]:
    trial.ENOUGH_S, setup = 0.2, decided(path, comm=comm)  # seconds of trying; 2 by default
    found = trial.trial(setup, steps=4, comm=comm).steps
    return setup.in_tiers, [(own.kind, own.num_steps) for own in found], decision_of(setup).owners


def test_ranks_with_and_without_rows_on_disk_try_together(data: Path, tmp_path: Path) -> None:
    """Both take the steps of the first epoch and of later ones."""
    parallel = {"sharding": {"t0": "replicated", "t1": "table", "t2": "table"}}
    with RankPool(2) as pool:
        path = config_file(data, tmp_path, memory=TIERS, parallel=parallel)
        results = pool.run(on_a_rank, path, num_ranks=2, micro_batches=2)
    assert {in_tiers for in_tiers, *_ in results} == {False, True}
    assert results[0][1:] == results[1][1:] and [kind for kind, _ in results[0][1]] == [trial.FIRST_EPOCH, trial.LATER]
    owners = results[0][2]
    assert owners["t0"] == "replicated" and {owners["t1"], owners["t2"]} == {"rank 0", "rank 1"}


def test_a_damaged_or_missing_cache_is_no_trial(data: Path, tmp_path: Path) -> None:
    from hotrow.run.trial_record import kept_trial

    path = config_file(data, tmp_path)
    assert kept_trial(decided(path)) is None
    tried(path, 5)
    assert kept_trial(decided(path)) is not None
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text('{"date": 3}')
    assert kept_trial(decided(path)) is None

"""Laws 2 and 3 for whole runs: wherever its tables lie, and wherever they lie after it was stopped, a run is the same.

The truth is the run whose tables lie in DRAM: every file of its last checkpoint, every loss, rate and score.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import test_resume
import torch
from test_resume import VARIANTS, Truth, config, outcome, signal_at, tiers

import hotrow
from expanded import expanded
from forked import run_forked
from hotrow.base.machine import lacks_bfloat16_products
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.placement.tiers import Tiers
from hotrow.run import runs, trainer
from hotrow.run.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from hotrow.run.folder import RunFolder
from hotrow.setup import divide, setup
from hotrow.setup import memory as placement
from hotrow.setup import memory as room
from packed_data import OF_TOY_ROWS, planted
from sampled import sampled

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")

VARIANTS = VARIANTS | {
    "ftrl": ["optimizer.sparse={name: ftrl, lr: 0.1, l1: 0.01, l2: 0.01}"],
    "float16 tables, ftrl": ["train.precision=fp16", "optimizer.sparse={name: ftrl, lr: 0.1, l1: 0.01}"],
}
data = planted(table_rows=(600, 20, 1400), counts=True)
"""With access counts, as prepared data has, so that rows are pinned by popularity."""
uncounted = planted(table_rows=(600, 20, 1400))
truth = test_resume.truth
"""Of the run in DRAM, which asks for no access counts."""


def exercised(run: RunFolder, *, on_disk: tuple[str, ...]) -> None:
    counts = run.record.memory["tables"]
    assert {name for name, own in counts.items() if own["pinned"] + own["cached"] < own["rows"]} >= set(on_disk)
    assert counts["t1"]["store"] == "dram"
    assert counts["t2"]["read_rows"] > 20 and counts["t2"]["written_rows"] > 20, "the run did not exercise the store"
    assert not (run.path / "memory").exists(), "files were left behind"


@pytest.mark.slow_but("split weights, bfloat16 layers", "float16 tables, ftrl")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_in_tiers_is_the_run_in_dram(data: Path, truth: Truth, tmp_path: Path, variant: str) -> None:
    changes = VARIANTS[variant]
    run = runs.train(config(data, tmp_path / "tiers", changes, tiers(data, changes)))
    exercised(run, on_disk=("t2",))
    assert run.record.memory["tables"]["t2"]["pinned"] > 0
    assert outcome(run) == truth(changes)
    assert run.record.memory["batches"]["foreseen"] == run.record.steps


def test_counts_are_read_and_planned_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a new run and by a resumed one, also in a folder whose name is found only after it is known to fit."""
    read, planned = divide.TableUse, divide.solve
    calls: list[str] = []
    monkeypatch.setattr(
        divide, "TableUse", lambda demand, *args, **named: (calls.append(demand.name), read(demand, *args, **named))[1]
    )
    monkeypatch.setattr(divide, "solve", lambda *args: (calls.append("solve"), planned(*args))[1])
    monkeypatch.chdir(tmp_path)
    changes = ["train.max_steps=2", "checkpoint.every=1"]
    run = runs.train(config(data, Path("runs"), changes, tiers(data, [])).model_copy(update={"run": None}))
    assert calls == ["t0", "t1", "t2", "solve"]
    assert f"on disk in {run.path}/memory" in (run.path / "log.txt").read_text()
    calls.clear()
    runs.resume(run.path, ["train.max_steps=3"])
    assert calls == ["t0", "t1", "t2", "solve"]


@pytest.mark.slow_but("sgd", "split tables, adam")
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_counts(uncounted: Path, truth: Truth, tmp_path: Path, variant: str) -> None:
    changes = VARIANTS[variant]
    run = runs.train(config(uncounted, tmp_path / "tiers", changes, tiers(uncounted, changes)))
    exercised(run, on_disk=("t0", "t2"))
    assert outcome(run) == truth(changes)
    assert run.record.memory["tables"]["t2"]["pinned"] == 0


@pytest.mark.slow_but("sgd-in", "clipped-out", "split tables, adam-in", "ftrl-about")
@pytest.mark.parametrize(("variant", "move"), sampled(VARIANTS, ["out", "in", "about"], pairs=False))
def test_stopped_and_resumed_elsewhere(
    data: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, move: str
) -> None:
    """From tiers to DRAM, from DRAM to tiers, and from tiers to others."""
    changes = VARIANTS[variant]
    expected = truth(changes)
    here = tiers(data, changes)
    other = tiers(data, changes, lookahead=0, file=str(tmp_path / "files"))
    stop, before, after = {
        "out": (6, here, "dram"),
        "in": (14, "dram", here),
        "about": (expected["state"]["step"] - 1, here, other),
    }[move]
    with monkeypatch.context() as patch:
        signal_at(patch, stop, signal.SIGTERM if stop % 2 else signal.SIGINT)
        run = runs.train(config(data, tmp_path / "run", changes, before))
    assert (run.record.status, run.record.steps) == ("interrupted", stop)
    assert not (run.path / "memory").exists()
    run = runs.resume(run.path, [f"memory={after}"])
    assert outcome(run) == expected
    slow = {"slow_bfloat16"} if lacks_bfloat16_products() else set()
    assert set(run.record.warnings) <= {"stores_without_io_uring", "overflow_rows", *slow, *OF_TOY_ROWS}


@pytest.mark.slow_but("fp32", "split_bf16")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "split_bf16"])
def test_checkpoints_say_the_same_and_fit_everywhere(data: Path, tmp_path: Path, precision: str) -> None:
    """Also where rows that were touched since are put back, and where -0 and NaN are among the weights."""
    changes = [f"train.precision={precision}", "optimizer.sparse.name=adam"]
    run = config(data, tmp_path / "run", changes, tiers(data, changes))
    decided = setup.Setup.decide(run, PackedDataset.open(data), tmp_path / "run")
    loader = Loader(PackedDataset.open(data).split("train"), 37, shuffle_seed=1)
    clock = trainer.StepClock()

    def steps(parts: trainer.Parts, epoch: int) -> None:
        for step, batch in enumerate(hotrow.lookahead(loader.epoch(epoch), parts.embedding)):
            trainer.train_step(parts, batch, step, clock)

    plain, tiered = (trainer.build(each) for each in (replace(decided, memory=None), decided))
    if precision == "fp32":
        odd = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 1e-40, -1e-40, 1.0, -1.0])
        batches = [batch.sparse.bags("x2")[0] for batch in loader.epoch(0)]
        row = max(set(range(1400)) - set(torch.cat(batches).tolist()))  # one that is not trained
        plain.embedding.weights["t2"][row] = odd
        tiered.embedding.rows("t2").write(slice(row, row + 1), odd[None])
    save_checkpoint(tmp_path / "fresh", tiered.with_state())
    for parts in (plain, tiered):
        steps(parts, epoch=0)
    kept = [save_checkpoint(tmp_path / f"kept-{n}", p.with_state()) for n, p in enumerate((plain, tiered))]
    for parts in (plain, tiered):
        steps(parts, epoch=1)
    later = [save_checkpoint(tmp_path / f"later-{n}", p.with_state()) for n, p in enumerate((plain, tiered))]
    load_checkpoint(kept[0], tiered.with_state())  # written in DRAM, read into tiers that have moved on
    load_checkpoint(kept[1], plain.with_state())
    for parts in (plain, tiered):
        steps(parts, epoch=1)
    again = [save_checkpoint(tmp_path / f"again-{n}", p.with_state()) for n, p in enumerate((plain, tiered))]
    load_checkpoint(tmp_path / "fresh", tiered.with_state())
    save_checkpoint(tmp_path / "fresh-again", tiered.with_state())
    for one, *others in (kept, (later[0], later[1], *again), (tmp_path / "fresh", tmp_path / "fresh-again")):
        for other in others:
            assert expanded(one) == expanded(other), (one, other)


def test_a_row_is_written_though_it_differs_in_signs_of_zero_alone(data: Path, tmp_path: Path) -> None:
    run = config(data, tmp_path / "run", [], tiers(data, []))
    decided = setup.Setup.decide(run, PackedDataset.open(data), tmp_path / "run")
    emb = trainer.build(decided).embedding
    rows = emb.rows("t2")
    for values in (torch.zeros(1, 8), -torch.zeros(1, 8), torch.full((1, 8), torch.nan)):
        rows.write(slice(9, 10), values)
        written = emb.placement.counters()["t2"]
        assert torch.equal(rows.read(slice(9, 10)).view(torch.int32), values.view(torch.int32))
        rows.write(slice(9, 10), values)
        assert emb.placement.counters()["t2"]["lookups"] == written["lookups"] + 2, "what is so already is not written"


def test_scoring_what_does_not_fit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["optimizer.sparse.name=sgd"]
    run = runs.train(config(data, tmp_path / "run", changes))
    expected = hotrow.load(run.path).evaluate("test")
    needed = placement.required_bytes(
        config(data, run.path, changes), setup.tables_of(config(data, run.path, []), PackedDataset.open(data))
    )
    monkeypatch.setattr(room, "available_memory_bytes", lambda: needed)
    monkeypatch.setattr(setup, "beside_bytes", lambda *_, **__: 0)
    loaded = hotrow.load(run.path)
    assert loaded.evaluate("test") == expected
    assert loaded._network[0].placement.find(Tiers) is not None
    assert list((run.path / "memory").iterdir())
    loaded.close()
    assert not (run.path / "memory").exists()
    assert loaded.evaluate("test") == expected, "it is loaded again when needed"


KILLED = """
import os, random, signal, sys, time
from hotrow.run import runs
from hotrow.run import trainer
from hotrow.config.load import load_config
draws, kills = random.Random(7), 0
while True:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            started = os.path.exists(sys.argv[2] + "/config.yaml")
            config = load_config(sys.argv[1])
            if started:
                runs.resume(sys.argv[2], quiet=True)
            else:
                runs.train(config.model_copy(update={"run": sys.argv[2]}), quiet=True)
            code = 0
        finally:
            os._exit(code)
    if kills < int(sys.argv[3]):
        time.sleep(draws.uniform(0.02, 0.5))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
        if not os.path.exists(sys.argv[2] + "/config.yaml"):
            os.system("rm -rf " + sys.argv[2])  # killed before it was a run
        continue
    assert status == 0, status
    print("killed", kills)
    break
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, int(os.environ.get("HOTROW_KILLS", "100"))])
def test_killed_again_and_again(data: Path, tmp_path: Path, kills: int) -> None:
    """At random moments: between steps, while rows are written, while a checkpoint is, while one is read.

    The slow one takes HOTROW_KILLS of them, 100 unless set.
    """
    changes = ["optimizer.sparse.name=adam", f"train.epochs={8 + 2 * kills}", "train.eval_every=50"]
    expected = outcome(runs.train(config(data, tmp_path / "whole", changes)))
    path = tmp_path / "config.yaml"
    changes.append("checkpoint.every=2")
    path.write_text(config(data, tmp_path / "run", changes, tiers(data, changes)).to_yaml())
    done = run_forked(KILLED, path, tmp_path / "run", kills, timeout_s=300 + 5 * kills)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert int(done.stdout.split()[-1]) == kills, "the run ended before"
    run = RunFolder.open(tmp_path / "run")
    assert outcome(run) == expected
    assert not (run.path / "memory").exists(), "what killed processes left is still there"
    assert list_checkpoints(run.checkpoints)


KILLED_AT = """
import os, signal, sys
from hotrow.run import checkpoint
from hotrow.run import runs
from hotrow.run import parts
from hotrow.config.load import load_config
from hotrow.placement.tiers import Tiers
owners = {"clear_changed": Tiers, "prune_checkpoints": parts, "write": checkpoint.DOCUMENT}
owner = owners.get(sys.argv[2], checkpoint)
plain, left = getattr(owner, sys.argv[2]), int(sys.argv[3])
def killed(*args, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args, **options)
setattr(owner, sys.argv[2], killed)
runs.train(load_config(sys.argv[1]), quiet=True)
"""


@pytest.mark.slow_but("write_tensors-19-14", "link_or_copy-3-7", "clear_changed-3-21")
@pytest.mark.parametrize(
    ("what", "call", "newest"),
    [
        ("write_tensors", 19, 14),  # of eight for each checkpoint
        ("link_or_copy", 3, 7),  # of six for the second
        ("write", 3, 14),
        ("clear_changed", 3, 21),  # it is in its place, and the rows are not yet forgotten
        ("prune_checkpoints", 3, 21),
    ],
)
def test_killed_while_a_checkpoint_is_saved(
    data: Path, truth: Truth, tmp_path: Path, what: str, call: int, newest: int
) -> None:
    changes = ["optimizer.sparse.name=adagrad", "checkpoint.every=7", "checkpoint.keep_last=1", "train.eval_every=null"]
    expected = truth(changes)
    path = tmp_path / "config.yaml"
    path.write_text(config(data, tmp_path / "run", changes, tiers(data, changes)).to_yaml())
    killed = run_forked(KILLED_AT, path, what, call)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(list_checkpoints(tmp_path / "run" / "checkpoints")) == newest
    assert outcome(runs.resume(tmp_path / "run")) == expected
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1, "leftovers"

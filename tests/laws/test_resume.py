"""Law 3: a run that is interrupted anywhere and resumed reaches the same bits as one that was left alone.

The truth is the uninterrupted run: every tensor of its last checkpoint, every loss, rate and score in metrics.jsonl.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from at_step import at_step, raise_at
from expanded import expanded
from forked import run_forked
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.run import runs, trainer
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.folder import RunFolder
from hotrow.setup import memory as placement
from hotrow.setup import setup
from packed_data import OF_TOY_ROWS, planted
from sampled import sampled

TIMES = {"seconds", "samples_per_s", "step_ms", "window_ms", "stall_s", "stall_share"}
PLACED = {"drive_written_bytes", "hits_per_lookup", "hits_per_row"}
BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 8]},
    "train": {"batch_size": 37, "epochs": 3, "eval_every": 0.5, "log_every": 4, "seed": 5, "threads": 1},
    "optimizer": {"schedule": {"warmup_steps": 11, "decay_start_step": 20, "decay_steps": 15}},
}
VARIANTS = {
    "sgd": ["optimizer.dense.name=sgd", "optimizer.sparse.name=sgd"],
    "adagrad": ["optimizer.dense.name=adagrad", "optimizer.sparse={name: adagrad, initial_accumulator_value: 0.01}"],
    "adam, row-wise adagrad": ["optimizer.dense.name=adam", "optimizer.sparse.name=row_wise_adagrad"],
    "adamw": ["optimizer.dense.name=adamw", "optimizer.sparse.name=ftrl"],
    "clipped": ["train.clip_norm=0.05"],
    "early stopping": ["train.early_stopping=2", "optimizer.dense.lr=0.3"],
    "stored order": ["train.shuffle=false"],
    "float16 tables": ["train.precision=fp16"],
    "split weights": ["train.precision=split_bf16", "optimizer.sparse.name=sgd"],
    "split weights, bfloat16 layers": [
        "train.precision=split_bf16",
        "train.dense_dtype=bf16",
        "optimizer.dense.name=sgd",
        "optimizer.sparse.name=adagrad",
    ],
    "split tables, adam": ["train.precision=split_bf16", "optimizer.dense.name=adam", "optimizer.sparse.name=adam"],
}
data = planted()


def config(data: Path, run: Path, changes: list[str], memory: Any = "dram", base: dict[str, Any] = BASE) -> Any:
    raw = {**base, "data": str(data), "run": str(run), "memory": memory}
    return make_config(apply_overrides(raw, changes))


def tiers(data: Path, changes: list[str], base: dict[str, Any] = BASE, **options: Any) -> dict[str, Any]:
    """A config's `memory` that keeps about half of the rows in DRAM."""
    plain = config(data, Path("run"), changes, base=base)
    needed = placement.required_bytes(plain, setup.tables_of(plain, PackedDataset.open(data)))
    return {"dram": int(0.6 * needed), **options}


def outcome(run: RunFolder) -> dict[str, Any]:
    """Everything of a run that must not depend on interruptions."""
    newest = list_checkpoints(run.checkpoints)
    path = newest[max(newest)]
    manifest = read_manifest(path)
    state = {k: v for k, v in manifest.extra["state"].items() if k not in TIMES | PLACED}
    lines = [{k: v for k, v in line.items() if k not in TIMES | PLACED} for line in run.measurements()]
    metrics = run.record.metrics
    return {"step": path.name, "state": state, "lines": lines, "metrics": metrics, "tensors": expanded(path)}


def signal_at(monkeypatch: pytest.MonkeyPatch, step_number: int, number: signal.Signals) -> None:
    """Send this process `number` while it takes step `step_number`, from 1."""
    at_step(monkeypatch, step_number - 1, lambda _: os.kill(os.getpid(), number))


@pytest.fixture(scope="module")
def truth(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], dict[str, Any]]:
    """What the run that was left alone has; it is trained once for all tests that interrupt it."""
    found: dict[str, dict[str, Any]] = {}

    def outcome_of(changes: list[str]) -> dict[str, Any]:
        if (key := str(changes)) not in found:
            found[key] = outcome(runs.train(config(data, tmp_path_factory.mktemp("whole") / "run", changes)))
        return found[key]

    return outcome_of


Truth = Callable[[list[str]], dict[str, Any]]
STOPS = {6: signal.SIGINT, 14: signal.SIGUSR1, -1: signal.SIGTERM}
"""Of 14 steps per epoch one within a log window, the last of an epoch, and the last but one of the run."""


@pytest.mark.slow_but(
    "sgd-14", "adam, row-wise adagrad--1", "stored order--1", "float16 tables--1", "split weights, bfloat16 layers-14"
)
@pytest.mark.parametrize(("variant", "stop"), sampled(VARIANTS, STOPS, pairs=False))
def test_interrupted_at_any_step(
    data: Path,
    truth: Truth,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variant: str,
    stop: int,
) -> None:
    changes, sent = VARIANTS[variant], STOPS[stop]
    expected = truth(changes)
    last = expected["state"]["step"]
    assert last > 15
    stop = stop if stop > 0 else last + stop
    with monkeypatch.context() as patch:
        signal_at(patch, stop, sent)
        run = runs.train(config(data, tmp_path / "run", changes))
    assert (run.record.status, run.record.signal) == ("interrupted", sent)
    assert run.record.steps == stop
    assert f"continue with: hotrow train --resume {run.path}" in capsys.readouterr().err
    run = runs.resume(run.path)
    assert run.record.status == "finished"
    assert set(run.record.warnings) <= {"reference_backend", "slow_bfloat16", *OF_TOY_ROWS}
    assert outcome(run) == expected


def test_stopped_when_its_time_is_over(
    data: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each session takes a step at least, however little time it has."""
    changes = ["train.max_steps=9"]
    expected = truth(changes)
    run = runs.train(config(data, tmp_path / "run", changes), until_s=time.monotonic() - 1)
    for steps in (1, 2):
        assert (run.record.status, run.record.signal, run.record.steps) == ("interrupted", signal.SIGUSR1, steps)
        told = f"stopped at step {steps}, because its time is over; continue with: hotrow train --resume {run.path}"
        assert told in capsys.readouterr().err
        run = runs.resume(run.path, until_s=time.monotonic() if steps == 1 else math.inf)
    assert outcome(run) == expected
    # torchrun begins ranks again that end by a signal; a run that was asked to stop stays as it is
    run = runs.train(config(data, tmp_path / "restarted", changes), until_s=0.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert runs.resume(run.path).record.steps == 1


def test_a_run_folder_without_locks_works_and_is_counted(
    data: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Lustre, unless it is mounted with them. Nobody can tell then whether another process trains there."""
    changes = ["train.max_steps=9"]
    expected = truth(changes)

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    run = runs.train(config(data, tmp_path / "run", changes), until_s=0.0)
    assert "has no locks: take care that no other process trains there" in capsys.readouterr().err
    run = runs.resume(run.path)
    assert outcome(run) == expected and run.record.warnings["folder_without_locks"]["count"] == 2


def test_interrupted_around_skipped_steps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 5, 6 and 9 are not finite: stopped before, between and after them, and killed with some to take again."""
    plain, skipped = trainer.check_finite, {5, 6, 9}

    def check(parts: Any, batch: Any, loss: Any) -> None:
        if parts.dense_optimizer.step_number in skipped:
            parts.embedding.pending[0].grad[0, 0] = float("nan")
        plain(parts, batch, loss)

    def step(parts: Any, batch: Any, step: int, clock: Any) -> Any:
        parts.dense_optimizer.step_number = step + 1
        return plain_step(parts, batch, step, clock)

    plain_step = trainer.train_step
    monkeypatch.setattr(trainer, "check_finite", check)
    monkeypatch.setattr(trainer, "train_step", step)
    changes = ["train.nonfinite=skip", "optimizer.dense.name=adam", "optimizer.sparse.name=adam", "train.max_steps=17"]
    whole = runs.train(config(data, tmp_path / "whole", changes))
    expected = outcome(whole)
    assert expected["state"]["skipped"] == 3
    for stop in (4, 5, 6, 9):
        with monkeypatch.context() as patch:
            signal_at(patch, stop, signal.SIGINT)
            run = runs.train(config(data, tmp_path / f"stopped-{stop}", changes))
        run = runs.resume(run.path)
        assert outcome(run) == expected, f"stopped after step {stop}"
        assert run.record.steps_skipped == 3
        assert run.record.warnings == whole.record.warnings
    kept = [*changes, "checkpoint.every=4", "checkpoint.keep_last=9"]
    run = runs.train(config(data, tmp_path / "killed", kept))
    for path in list(list_checkpoints(run.checkpoints).values())[1:]:
        shutil.rmtree(path)
    run.update(status="running")
    run = runs.resume(run.path)
    assert outcome(run)["tensors"] == expected["tensors"]
    assert run.record.warnings["nonfinite_step_skipped"]["count"] == 3, "steps taken again are not counted twice"


def test_interrupted_again_and_again(data: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = VARIANTS["adagrad"]
    expected = truth(changes)
    for stop in (3, 4, 18, 33):
        with monkeypatch.context() as patch:
            signal_at(patch, stop, signal.SIGINT)
            run = runs.train(config(data, tmp_path / "run", changes)) if stop == 3 else runs.resume(tmp_path / "run")
    assert outcome(runs.resume(run.path)) == expected


KILLED = """
import os, signal, sys
from hotrow.run import runs
from hotrow.run import trainer
from hotrow.config.load import load_config
plain = trainer.train_step
def step(parts, batch, step, clock):
    if step + 1 == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(parts, batch, step, clock)
trainer.train_step = step
runs.train(load_config(sys.argv[1]), quiet=True)
"""


def test_killed_between_checkpoints(data: Path, truth: Truth, tmp_path: Path) -> None:
    changes = [*VARIANTS["adagrad"], "checkpoint.every=20"]
    expected = truth(changes)
    path = tmp_path / "config.yaml"
    path.write_text(config(data, tmp_path / "run", changes).to_yaml())
    killed = run_forked(KILLED, path, 27)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(list_checkpoints(tmp_path / "run" / "checkpoints")) == 21  # steps 22 to 26 are lost, a metrics line too
    assert RunFolder.open(tmp_path / "run").record.status == "running"
    (tmp_path / "run" / "metrics.jsonl").open("a").write('{"kind": "train", "st')  # a line cut off by the kill
    assert outcome(runs.resume(tmp_path / "run")) == expected


def test_failed_before_a_checkpoint(data: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = VARIANTS["sgd"]
    expected = truth(changes)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        raise_at(patch, 4, MemoryError)
        runs.train(config(data, tmp_path / "run", changes))
    assert RunFolder.open(tmp_path / "run").record.status == "failed"
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == {}
    assert outcome(runs.resume(tmp_path / "run")) == expected


def test_killed_before_it_had_a_config(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path / "run"), name="any")  # all that a kill, or a full disk, left of the start
    message = f"{run.path} ended before its first step, without a config.yaml: .* remove the folder and start it again"
    with pytest.raises(ValueError, match=message):
        runs.resume(run.path)


def test_more_epochs_equal_a_longer_run(data: Path, tmp_path: Path) -> None:
    expected = outcome(runs.train(config(data, tmp_path / "whole", ["train.eval_every=null"])))
    run = runs.train(config(data, tmp_path / "run", ["train.eval_every=null", "train.epochs=1"]))
    resumed = outcome(runs.resume(run.path, ["train.epochs=3"]))
    assert resumed["tensors"] == expected["tensors"]
    assert "epochs: 3" in (run.path / "config.yaml").read_text()


def test_step_times_are_those_of_all_sessions(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_at(monkeypatch, 30, signal.SIGINT)
    run = runs.train(config(data, tmp_path / "run", ["train.epochs=20", "train.early_stopping=2", "train.monitor=auc"]))
    run = runs.resume(run.path)
    spent = run.record.train_s
    told = 0.001 + 0.0005 / spent  # to the millisecond
    assert sum(run.record.step_ms.values()) * run.record.steps / 1e3 == pytest.approx(spent, rel=told)
    again = runs.resume(run.path, ["train.epochs=21"])  # it had stopped early: not a step more
    assert {name: getattr(again.record, name) for name in ("step_ms", "train_s", "steps")} == {
        name: getattr(run.record, name) for name in ("step_ms", "train_s", "steps")
    }


def test_second_signal_aborts(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, None, lambda _: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        runs.train(config(data, tmp_path / "run", []))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("others", ["", "other products"])
def test_other_threads_and_products_are_counted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    signal_at(monkeypatch, 3, signal.SIGINT)
    run = runs.train(config(data, tmp_path / "run", ["train.dense_dtype=bf16"]))
    had_products = bool(ops.bfloat16_products())
    if had_products:  # then as on a processor that leaves them to torch, or that has others of ours
        monkeypatch.setattr(ops, "bfloat16_products", lambda: others)
    run = runs.resume(run.path, ["train.threads=2"])
    assert run.record.warnings["resumed_with_other_threads"]["count"] == 1
    assert ("resumed_with_other_isa" in run.record.warnings) == had_products
    assert run.record.status == "finished"


def test_another_dataset_or_option_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_dataset: Callable[..., PackedDataset]
) -> None:
    signal_at(monkeypatch, 3, signal.SIGINT)
    run = runs.train(config(data, tmp_path / "run", []))
    with pytest.raises(ValueError, match=r"a resumed run keeps its train\.seed; it may change train\.threads"):
        runs.resume(run.path, ["train.seed=9"])
    other = make_dataset(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"is not the dataset .* was trained on: its checksum differs"):
        runs.resume(run.path, [f"data={other.path}"])
    with pytest.raises(ValueError, match=r"dataset is not at .*--set data=FOLDER"):
        runs.resume(run.path, [f"data={tmp_path}"])
    assert runs.resume(run.path).record.status == "finished", "what was refused is not remembered"


def test_a_damaged_checkpoint_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_at(monkeypatch, 9, signal.SIGINT)
    run = runs.train(config(data, tmp_path / "run", []))
    file = run.checkpoints / "step-9" / "embedding" / "t1" / "000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"step-9/embedding/t1/000\.safetensors has crc32"):
        runs.resume(run.path)

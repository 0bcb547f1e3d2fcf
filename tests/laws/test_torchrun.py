"""Laws 2 and 3 for processes: any number of them, also another one after a stop, trains to the bits of one process.

The truth is a run of one process with as many micro-batches: every tensor of its last checkpoint, every loss and score.
Most ranks are a pool of gloo processes that call the library; a few are started by torchrun, through the command line.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from at_step import at_step
from expanded import expanded
from hotrow.batch import Batch
from hotrow.config.load import apply_overrides, make_config
from hotrow.parallel.agreement import checksum_of
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.sharded import Sharded
from hotrow.run import evaluate, micro, runs, trainer
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.folder import RunFolder
from hotrow.run.meters import LoopPart, Notice
from hotrow.run.parts import parts_of
from packed_data import planted
from rank_pool import RankPool, rank_pool

NOT_COMPARED = {"seconds", "samples_per_s", "step_ms", "window_ms", "stall_s", "stall_share", "drive_written_bytes"}
NOT_COMPARED |= {"hits_per_lookup", "hits_per_row", "wire_bytes_per_step", "slowest_rank"}
BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 8]},
    "train": {"batch_size": 37, "epochs": 2, "eval_every": 0.5, "log_every": 4, "seed": 5, "threads": 1},
    "optimizer": {"schedule": {"warmup_steps": 5}},
}
EVAL_BATCH_SIZE = 20
"""Of 128 rows that makes 7 batches: two ranks or more have different numbers of them."""
PHASES = ["hot.schedule=fae", "hot.rows=covering", "hot.budget=56520", "hot.small_table=0", "hot.rate=40"]
"""About half of the rows are hot, and two of three samples."""
VARIANTS = {
    "sgd": ["optimizer.dense.name=sgd", "optimizer.sparse.name=sgd"],
    "adam": ["optimizer.dense.name=adam", "optimizer.sparse.name=adam", "train.early_stopping=1"],
    "adamw, weighted loss": [
        "optimizer.dense.name=adamw",
        "optimizer.schedule={warmup_steps: 5, decay_steps: 20}",
        "train.pos_weight=3",
    ],
    "ftrl, stored order": ["optimizer.sparse.name=ftrl", "train.shuffle=false"],
    "float16": ["train.precision=fp16", "optimizer.sparse.name=adagrad", "parallel.exchange={t2: pooled}"],
    "split": ["train.precision=split_bf16", "train.dense_dtype=bf16", "parallel.sharding={t0: replicated, t2: row}"],
    "hot window": ["hot.schedule=window", "hot.budget=4KiB", "hot.small_table=0"],
    "hot phases of vectors": [*PHASES, "parallel.exchange={t2: pooled}"],
    "hot phases of a sample": [
        *("hot.schedule=fixed", "hot.rows=sampled", "hot.small_table=0"),
        *("optimizer.dense.name=adam", "optimizer.sparse.name=adam"),
    ],
    "copies of hot rows": ["parallel.hot_rows=0.2", "parallel.sharding={t0: row, t1: row, t2: row}"],
}


ONE_EPOCH = {"ftrl, stored order", "float16", "split", "hot window", "copies of hot rows"}
data = planted(table_rows=(50, 20, 3000), counts=True)


pool = rank_pool(4)


@pytest.fixture(autouse=True)
def _small_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "EVAL_BATCH_SIZE", EVAL_BATCH_SIZE)


def raw_config(data: Path, run: Path, changes: list[str], *, micro_batches: int = 4) -> dict[str, Any]:
    raw = {**BASE, "data": str(data), "run": str(run)}
    return apply_overrides(raw, [f"train.micro_batches={micro_batches}", *changes])


def outcome(path: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on the number of processes."""
    run = RunFolder.open(path)
    newest = list_checkpoints(run.checkpoints)
    checkpoint = newest[max(newest)]
    state = {k: v for k, v in read_manifest(checkpoint).extra["state"].items() if k not in NOT_COMPARED}
    lines = [{k: v for k, v in line.items() if k not in NOT_COMPARED} for line in run.measurements()]
    tensors = expanded(checkpoint)
    return {"step": checkpoint.name, "state": state, "lines": lines, "metrics": run.record.metrics, **tensors}


def same(path: Path, truth: dict[str, Any]) -> None:
    found = outcome(path)
    assert [name for name in truth if found.get(name) != truth[name]] == []
    assert found.keys() == truth.keys()


Stop = tuple[int, int] | None
"""Rank and step at which that rank gets a signal."""


@contextmanager
def stopping(comm: Communicator, stop: Stop, sent: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    evaluate.EVAL_BATCH_SIZE = EVAL_BATCH_SIZE
    with pytest.MonkeyPatch.context() as patch:
        if stop is not None and stop[0] == comm.rank:
            at_step(patch, stop[1], lambda _: os.kill(os.getpid(), sent))
        yield


def trained(
    comm: Communicator,
    raw: dict[str, Any],
    stop: Stop = None,
    sent: signal.Signals = signal.SIGTERM,
    late: int | None = None,
) -> str:
    """Trains as a rank; sent: the signal of `stop`; late: the rank whose time is over when it begins. Returns the run's
    status.
    """
    until_s = 0.0 if late == comm.rank else math.inf
    with stopping(comm, stop, sent):
        return runs.train(make_config(raw), quiet=True, comm=comm, until_s=until_s).record.status


def resumed(comm: Communicator, path: str, changes: list[str], stop: Stop = None) -> str:
    with stopping(comm, stop):
        return runs.resume(path, changes, quiet=True, comm=comm).record.status


def refused(comm: Communicator, function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(comm, *arguments)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.slow_but("split-2-2", "copies of hot rows-3-4")
@pytest.mark.parametrize(
    ("variant", "num_ranks", "micro_batches"),
    [
        ("sgd", 2, 4), ("sgd", 4, 4), ("adam", 3, 4), ("adamw, weighted loss", 2, 3), ("ftrl, stored order", 3, 3),
        ("float16", 4, 5), ("split", 2, 2), ("hot window", 3, 5), ("hot phases of vectors", 3, 4),
        ("hot phases of a sample", 2, 3), ("copies of hot rows", 3, 4),
    ],
)  # fmt: skip
def test_the_number_of_ranks_is_invisible(
    pool: RankPool, data: Path, tmp_path: Path, variant: str, num_ranks: int, micro_batches: int
) -> None:
    # An epoch's end is the same for all, so two that meet it are enough; hot phases need the steps.
    changes = VARIANTS[variant] + ["train.epochs=1"] * (variant in ONE_EPOCH)
    one, many = (raw_config(data, tmp_path / name, changes, micro_batches=micro_batches) for name in ("one", "many"))
    runs.train(make_config(one), quiet=True)
    said = pool.run(trained, many, num_ranks=num_ranks, micro_batches=num_ranks)
    assert said == ["finished"] * num_ranks
    same(tmp_path / "many", outcome(tmp_path / "one"))
    warned = "hot_rows_not_on_every_rank" in RunFolder.open(tmp_path / "many").record.warnings
    assert warned == (variant in ("hot phases of a sample", "hot phases of vectors"))


def tiers_of(folder: Path, dram: int) -> list[str]:
    return [f"memory={{dram: {dram}, ssd: {folder}, force: true}}", "optimizer.sparse.name=adam"]


@pytest.mark.slow_but("row")
@pytest.mark.parametrize("owner", ["row", "table"])
def test_each_rank_keeps_its_rows_in_tiers(pool: RankPool, data: Path, tmp_path: Path, owner: str) -> None:
    changes = [*tiers_of(tmp_path, 60_000), f"parallel.sharding={{t2: {owner}}}", "train.epochs=1"]
    runs.train(make_config(raw_config(data, tmp_path / "one", [*changes, "memory=dram"])), quiet=True)
    pool.run(trained, raw_config(data, tmp_path / "many", changes), num_ranks=3, micro_batches=3)
    assert RunFolder.open(tmp_path / "many").record.memory is not None, "nothing lay on disk"
    same(tmp_path / "many", outcome(tmp_path / "one"))


@pytest.mark.slow  # test_worlds and test_resume guard the same law
def test_interrupted_on_four_ranks_and_resumed_on_three_and_one(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """The second rank is asked to stop in the ninth step, and the run stops after it; what resumes has tiers. Then the
    time of the last rank is over at the start, and all stop after the first step.
    """
    changes = ["optimizer.dense.name=adam", "optimizer.sparse.name=adam"]
    runs.train(make_config(raw_config(data, tmp_path / "one", changes)), quiet=True)
    truth = outcome(tmp_path / "one")
    for name, num_ranks, sent in (("three", 3, signal.SIGTERM), ("two", 2, signal.SIGUSR1)):
        raw = raw_config(data, tmp_path / name, changes)
        said = pool.run(trained, raw, (1, 8), sent, num_ranks=4, micro_batches=4)
        record = RunFolder.open(tmp_path / name).record
        assert said == ["interrupted"] * 4 and (record.steps, record.signal) == (9, sent)
        path, memory = str(tmp_path / name), tiers_of(tmp_path, 60_000)[:1] if name == "two" else []
        assert pool.run(resumed, path, memory, num_ranks=num_ranks, micro_batches=num_ranks) == ["finished"] * num_ranks
        same(tmp_path / name, truth)
    raw = raw_config(data, tmp_path / "alone", changes)
    said = pool.run(trained, raw, None, signal.SIGTERM, 3, num_ranks=4, micro_batches=4)
    record = RunFolder.open(tmp_path / "alone").record
    assert said == ["interrupted"] * 4 and (record.steps, record.signal) == (1, signal.SIGUSR1)
    runs.resume(tmp_path / "alone", quiet=True)
    same(tmp_path / "alone", truth)


@pytest.mark.slow
def test_one_process_four_ranks_two_and_three_go_on_with_one_chain(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """1 -> 4 -> 2 -> 3, in tiers, with a checkpoint every other step, to the bits of a run that was never stopped."""
    changes = [*tiers_of(tmp_path, 60_000), "train.epochs=1", "checkpoint.every=2", "checkpoint.keep_last=99"]
    runs.train(make_config(raw_config(data, tmp_path / "one", [*changes, "memory=dram"])), quiet=True)
    path = tmp_path / "many"
    said = pool.run(trained, raw_config(data, path, changes), (0, 1), num_ranks=1, micro_batches=4)
    for num_ranks, stop in ((4, (3, 4)), (2, (1, 6)), (3, None)):
        said += pool.run(resumed, str(path), [], stop, num_ranks=num_ranks, micro_batches=num_ranks)
    assert said == ["interrupted"] * 7 + ["finished"] * 3
    same(path, outcome(tmp_path / "one"))
    saved = list_checkpoints(RunFolder.open(path).checkpoints)
    files = {step: read_manifest(own).files for step, own in saved.items()}
    chained = [step for step, own in files.items() if "embedding/t2/004.safetensors" in own]
    assert chained, "no checkpoint went on with what others had begun"
    first = [(saved[step] / "embedding/t2/000.safetensors").stat() for step in files]
    assert max(stat.st_nlink for stat in first) >= 4, "whole tables were written again and again"


def skipping(comm: Communicator | None, raw: dict[str, Any], steps: list[int]) -> int | None:
    """Trains; on the last rank gradients of these steps, from 1, seem to be infinite. Returns the steps skipped."""
    evaluate.EVAL_BATCH_SIZE = EVAL_BATCH_SIZE
    module, number = (trainer if comm is None else micro), [0]

    def found(embedding: Any) -> str | None:
        number[0] += 1
        last = comm is None or comm.rank == comm.size - 1
        return "a gradient is inf" if last and number[0] in steps else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "nonfinite_gradient", found)
        return runs.train(make_config(raw), quiet=True, comm=comm).record.steps_skipped


def test_all_ranks_skip_what_one_of_them_cannot_train(pool: RankPool, data: Path, tmp_path: Path) -> None:
    changes = ["train.nonfinite=skip", "train.eval_every=null", "train.epochs=1"]
    one, many = (raw_config(data, tmp_path / name, changes) for name in ("one", "many"))
    assert skipping(None, one, [3, 4, 9]) == 3
    assert pool.run(skipping, many, [3, 4, 9], num_ranks=3, micro_batches=3) == [3] * 3
    same(tmp_path / "many", outcome(tmp_path / "one"))
    warning = RunFolder.open(tmp_path / "many").record.warnings["nonfinite_step_skipped"]
    assert warning["count"] == 3 and "rank 2: a gradient is inf" in warning["text"] and "(step 3," in warning["text"]


def gone_astray(comm: Communicator, raw: dict[str, Any]) -> None:
    """Trains; in the fifth step a bit of a dense weight of the last rank turns, as when memory fails."""
    plain = trainer.train_step

    def step(parts: Any, batch: Any, number: int, clock: Any) -> Any:
        loss = plain(parts, batch, number, clock)
        if number == 4 and comm.rank == comm.size - 1:
            next(parts.model.parameters()).data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        runs.train(make_config(raw), quiet=True, comm=comm)


def test_no_checkpoint_is_of_ranks_that_went_apart(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """torchrun would start the run again from it, and no rank would differ any more."""
    raw = raw_config(data, tmp_path / "run", ["checkpoint.every=3", "train.eval_every=null"])
    texts = pool.run(refused, gone_astray, raw, num_ranks=3, micro_batches=3)
    assert len(set(texts)) == 1 and "went apart by step 6: rank 2 has checksum of the dense weights" in texts[0]
    assert set(list_checkpoints(tmp_path / "run" / "checkpoints")) == {3}


class Sent(NamedTuple):
    """What a rank sent in one step, by purpose, and in how many exchanges; hot: whether it was told of a hot phase."""

    hot: bool
    num_bytes: Counter[str]
    exchanges: int
    copies: int
    """Checksum of the rows of t2 that every rank holds, before the step."""


def sent_by_step(comm: Communicator, raw: dict[str, Any]) -> list[Sent]:
    found = []
    plain = trainer.train_step

    def step(parts: Any, *arguments: Any) -> Any:
        shared = parts.embedding.placement.find(Sharded)
        counts = shared.comm.counts
        before, exchanges = Counter(counts.sent_bytes), counts.num_exchanges
        copies = checksum_of([shared.below.weights["t2"][: shared.prefixes["t2"]]])
        loss = plain(parts, *arguments)
        sent = Counter(counts.sent_bytes)
        sent.subtract(before)
        found.append(Sent(shared.all_held, sent, counts.num_exchanges - exchanges, copies))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        trained(comm, raw)
    return found


def hot_steps(run: Path) -> list[bool]:
    """Returns for each step whether it was in a hot phase, as the swaps say; the last phase has no swap at its end."""
    found: list[bool] = []
    for line in RunFolder.open(run).measurements():
        if line["kind"] == "swap":
            found += [line["turn"] == "hot"] * (line["step"] - len(found))
    return found


@pytest.mark.slow
def test_a_hot_phase_asks_for_no_rows(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """What is left are two exchanges of the dense layers, one of sums of hot rows and one of their totals."""
    raw = raw_config(data, tmp_path / "run", PHASES)
    for sent in pool.run(sent_by_step, raw, num_ranks=3, micro_batches=3):
        hot = hot_steps(tmp_path / "run")
        assert [step.hot for step in sent][: len(hot)] == hot and sum(hot) > 8 and len(hot) - sum(hot) > 4
        for step in sent:
            assert step.exchanges == (4 if step.hot else 6)
            assert (step.num_bytes["rows"] == 0) == step.hot
            assert step.num_bytes["replicated"] > 0, "sums of hot rows go to all"
    run = RunFolder.open(tmp_path / "run")
    assert run.record.hot["merge_every"] == 1 and "hot_rows_not_on_every_rank" not in run.record.warnings
    rows = sum(n for name, n in run.record.hot["tables"].items() if n < {"t0": 50, "t1": 20, "t2": 3000}[name])
    assert f", and {rows:,} hot rows of these on every rank" in (run.path / "log.txt").read_text()


@pytest.mark.slow
def test_interrupted_in_a_hot_phase_and_resumed(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """In the second step of the first hot phase, on four ranks; resumed on three, and on one."""
    runs.train(make_config(raw_config(data, tmp_path / "one", PHASES)), quiet=True)
    number = hot_steps(tmp_path / "one").index(True) + 1
    assert hot_steps(tmp_path / "one")[number : number + 2] == [True, True]
    pool.run(trained, raw_config(data, tmp_path / "three", PHASES), (2, number), num_ranks=4, micro_batches=4)
    record = RunFolder.open(tmp_path / "three").record
    assert (record.status, record.steps) == ("interrupted", number + 1)
    moved = RunFolder.open(shutil.copytree(tmp_path / "three", tmp_path / "alone")).path
    pool.run(resumed, str(tmp_path / "three"), [], num_ranks=3, micro_batches=3)
    runs.resume(moved, quiet=True)
    for name in ("three", "alone"):
        same(tmp_path / name, outcome(tmp_path / "one"))


def test_merging_every_few_steps_is_not_exact_and_says_so(pool: RankPool, data: Path, tmp_path: Path) -> None:
    changes = [*PHASES, "hot.merge_every=3", "optimizer.sparse.name=adagrad", "train.epochs=1"]
    one, exact, many = (tmp_path / name for name in ("one", "exact", "many"))
    runs.train(make_config(raw_config(data, one, changes)), quiet=True)
    runs.train(make_config(raw_config(data, exact, [*changes, "hot.merge_every=1"])), quiet=True)
    same(one, outcome(exact))  # one process has nothing to merge
    ranks = pool.run(sent_by_step, raw_config(data, many, changes), num_ranks=3, micro_batches=3)
    sent = ranks[0]
    alone = [k for k, each in enumerate(zip(*ranks, strict=True)) if len({step.copies for step in each}) > 1]
    assert alone and all(sent[k].hot and sent[k - 1].hot for k in alone), "after a phase all have the same rows"
    hot = [step for step in sent if step.hot]
    assert all(step.num_bytes["gradients"] == step.num_bytes["replicated"] == 0 for step in hot)
    merges = [step for step in hot if step.num_bytes["merged"]]
    assert all(step.exchanges == (3 if step in merges else 2) for step in hot) and 0 < len(merges) <= len(hot) / 3
    run, wanted, found = RunFolder.open(many), outcome(exact), outcome(many)
    assert run.record.hot["merge_every"] == 3
    text = run.record.warnings["inexact_merging"]["text"]
    assert text.startswith("hot.merge_every is 3: in hot phases each rank updates hot rows alone for so many steps")
    assert found["step"] == wanted["step"] and any(found[name] != wanted[name] for name in wanted)
    losses = [outcome["metrics"]["val"]["logloss"] for outcome in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (["optimizer.sparse.name=adam"], "hot.merge_every is 2, but optimizer.sparse.name is 'adam', whose states are"),
        (["hot.rows=sampled"], "which every rank holds: set hot.merge_every to 1, or hot.rows to exact"),
        (["parallel.exchange={t2: pooled}"], "set hot.merge_every to 1, or parallel.exchange to rows for t2"),
    ],
)
def test_merges_that_are_refused(pool: RankPool, data: Path, tmp_path: Path, changes: list[str], text: str) -> None:
    raw = raw_config(data, tmp_path / "run", [*PHASES, "hot.merge_every=2", *changes])
    texts = pool.run(refused, trained, raw, num_ranks=2, micro_batches=2)
    assert len(set(texts)) == 1 and text in texts[0] and not (tmp_path / "run").exists()


class _Slow(LoopPart):
    """Lets other ranks wait for this one between two steps."""

    def after_step(self, batch: Batch, loss: float | None) -> Iterable[Notice]:
        time.sleep(0.05)
        return ()


def slow_between_steps(comm: Communicator, raw: dict[str, Any]) -> None:
    slow = [] if comm.rank else [_Slow()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "EVAL_BATCH_SIZE", EVAL_BATCH_SIZE)  # whatever each rank of the pool did before
        patch.setattr(runs, "parts_of", lambda training: [*slow, *parts_of(training)])
        runs.train(make_config(raw), quiet=True, comm=comm)


def test_what_ranks_sent_and_who_was_slowest_is_recorded(pool: RankPool, data: Path, tmp_path: Path) -> None:
    """Of steps alone: at each of these lines of the log two ranks wait for the first, longer than a step takes."""
    changes = ["parallel.wire_dtype=bf16", "parallel.exchange={t2: pooled}", "train.max_steps=10", "train.log_every=1"]
    pool.run(slow_between_steps, raw_config(data, tmp_path / "run", changes), num_ranks=3, micro_batches=3)
    run = RunFolder.open(tmp_path / "run")
    found: Any = run.record.ranks
    assert (found["num_ranks"], found["micro_batches"], found["wire_dtype"]) == (3, 4, "bf16")
    warning = run.record.warnings["inexact_wire"]
    assert warning["count"] == 1 and "travel as bf16, which rounds them: results are inexact" in warning["text"]
    with pytest.raises(ValueError, match="wire_dtype is 'fp32', but the run began with 'bf16'"):
        runs.resume(run.path, ["parallel.wire_dtype=fp32"], quiet=True)
    assert found["wire_bytes_per_step"]["pooled"] == found["wire_bytes_per_step"]["pooled_gradients"] > 0
    assert all(0 < each["exchange_ms"] < each["step_ms"] for each in found["of_ranks"])
    assert found["wire_bytes_per_step"]["dense"] > 0 and found["wire_bytes_per_step"]["gradients"] > 0
    assert found["wire_bytes_per_step"].keys() & {"tables", "agreement"} == set(), "saving and logging are no steps"
    assert len(found["of_ranks"]) == 3 and 0 <= found["slowest_rank"] < 3
    line = next(line for line in run.measurements() if line["kind"] == "train")
    assert line["wire_bytes_per_step"]["rows"] > 0 and 0 <= line["slowest_rank"] < 3
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Processes</h2>" in page and f"rank {found['slowest_rank']} was the slowest" in page
    assert "Numbers of tables traveled as bf16, rounded." in page


@pytest.mark.parametrize(
    ("changes", "micro_batches", "text"),
    [
        (["train.micro_batches=2"], 3, "train.micro_batches is 2, but there are 3 ranks, and each needs one: start"),
        (["memory={dram: 1MiB, write_budget: 1GB/day}"], 3, "memory.write_budget is '1GB/day', which does not work"),
        (["data=nowhere"], 3, "nowhere"),
    ],
)
def test_what_ranks_cannot_do_is_refused_on_all(
    pool: RankPool, data: Path, tmp_path: Path, changes: list[str], micro_batches: int, text: str
) -> None:
    raw = apply_overrides(raw_config(data, tmp_path / "run", []), changes)
    texts = pool.run(refused, trained, raw, num_ranks=3, micro_batches=micro_batches)
    assert len(set(texts)) == 1 and text in texts[0]
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_and_too_many_ranks_are_refused_on_all(pool: RankPool, data: Path, tmp_path: Path) -> None:
    raw = raw_config(data, tmp_path / "run", ["train.max_steps=2"], micro_batches=2)
    pool.run(trained, raw, num_ranks=2, micro_batches=2)
    texts = pool.run(refused, trained, raw, num_ranks=2, micro_batches=2)
    assert len(set(texts)) == 1 and "exists already and is never overwritten" in texts[0]
    again = str(tmp_path / "run"), ["train.max_steps=4"]
    texts = pool.run(refused, resumed, *again, num_ranks=3, micro_batches=3)
    assert len(set(texts)) == 1 and "train.micro_batches is 2, but there are 3 ranks" in texts[0]


def torchrun(num_ranks: int, *arguments: str) -> subprocess.Popen[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*start, "-m", "hotrow", "train", *arguments], **pipes)


def config_file(data: Path, folder: Path, changes: list[str]) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw_config(data, folder / "run", changes)))
    return str(path)


@pytest.fixture
def _whole_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line evaluates."""
    monkeypatch.setattr(evaluate, "EVAL_BATCH_SIZE", 4096)


@pytest.mark.usefixtures("_whole_evaluations")
def test_torchrun(data: Path, tmp_path: Path) -> None:
    process = torchrun(2, config_file(data, tmp_path, ["train.epochs=1"]), "--json")
    runs.train(make_config(raw_config(data, tmp_path / "one", ["train.epochs=1"])), quiet=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    same(tmp_path / "run", outcome(tmp_path / "one"))
    result = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1 and result["status"] == "finished" and result["ranks"]["num_ranks"] == 2
    assert err.count(": AUC ") == len([line for line in outcome(tmp_path / "one")["lines"] if "auc" in line])


@pytest.mark.slow
@pytest.mark.usefixtures("_whole_evaluations")
def test_torchrun_refuses_on_all_ranks(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    process = torchrun(2, config_file(data, tmp_path, []))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, "that of torchrun itself"
    said = [line for line in err.splitlines() if line.startswith("hotrow: ")]
    # torchrun may end a rank that has not said so yet when the other one ends.
    assert len(set(said)) == 1 and "exists already and is never overwritten" in said[0]
    assert "exitcode  : 2" in err


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 1])
@pytest.mark.usefixtures("_whole_evaluations")
def test_torchrun_interrupted_on_four_ranks_and_resumed(data: Path, tmp_path: Path, num_ranks: int) -> None:
    """torchrun passes SIGTERM on to every rank; with --max-minutes ranks stop by themselves."""
    ends = signal.SIGTERM if num_ranks == 3 else signal.SIGUSR1
    limit = [] if ends == signal.SIGTERM else ["--max-minutes", "0.03"]
    process = torchrun(4, config_file(data, tmp_path, ["train.epochs=40", "train.log_every=1"]), *limit)
    lines = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and lines.stat().st_size > 2000):
        pass
    if ends == signal.SIGTERM:
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    record = RunFolder.open(tmp_path / "run").record
    assert (record.status, record.signal) == ("interrupted", ends), err
    assert ends == signal.SIGTERM or "exitcode  : 138" in err, err
    again = torchrun(num_ranks, "--resume", str(tmp_path / "run"))
    runs.train(make_config(raw_config(data, tmp_path / "one", ["train.epochs=40", "train.log_every=1"])), quiet=True)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    same(tmp_path / "run", outcome(tmp_path / "one"))

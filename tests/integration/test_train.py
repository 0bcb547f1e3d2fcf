"""Training as a whole: it learns, it repeats, it says what went wrong, and its folder holds what it promises."""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow
from hotrow import Run
from hotrow.base import progress
from hotrow.config.load import apply_overrides, make_config
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot import turns
from hotrow.kernels import ops
from hotrow.run import build, runs, trainer
from hotrow.run import parts as loop_parts
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder
from hotrow.run.meters import LoopPart, Notice
from hotrow.setup import setup
from packed_data import OF_TOY_ROWS, planted

BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]},
    "optimizer": {"dense": {"name": "adagrad", "lr": 0.05}, "sparse": {"name": "adagrad", "lr": 0.1}},
    "train": {"batch_size": 64, "epochs": 2, "threads": 1, "log_every": 10},
}
dataset = planted(opened=True, rows={"train": 4096, "val": 1024, "test": 1024}, rows_per_block=512)


def config(dataset: PackedDataset, run: Path, *changes: str) -> Config:
    return make_config(apply_overrides({**BASE, "data": str(dataset.path), "run": str(run)}, changes))


def train(dataset: PackedDataset, run: Path, *changes: str) -> RunFolder:
    return runs.train(config(dataset, run, *changes), quiet=True)


def test_learns_and_fills_its_folder(dataset: PackedDataset, tmp_path: Path) -> None:
    run = train(dataset, tmp_path / "run", "train.epochs=6", "train.eval_every=0.5")
    record = json.loads((run.path / "run.json").read_text())
    assert record["metrics"]["test"]["auc"] > 0.7
    assert record["metrics"]["test"]["logloss"] < record["metrics"]["test"]["base_logloss"]
    assert (record["status"], record["steps"], record["epochs"]) == ("finished", 384, 6.0)
    assert record["dataset"]["checksum"] == dataset.checksum
    assert set(record["step_ms"]) == {"data", "lookup", "dense", "update"}
    assert min(record["step_ms"].values()) > 0
    assert set(record["warnings"]) <= {"reference_backend", *OF_TOY_ROWS}
    assert record["backend"]["threads"] == 1
    lines = run.measurements()
    assert [line["step"] for line in lines if line["kind"] == "train"] == [*range(10, 384, 10), 384]
    trained = [line for line in lines if line["kind"] == "train"]
    ends = [0, *(line["step"] for line in trained)]
    for phase, mean in record["step_ms"].items():  # a line's window is the steps since the line before
        pairs = zip(ends, trained, strict=False)
        total = sum((line["step"] - before) * line["window_ms"][phase] for before, line in pairs)
        assert total / 384 == pytest.approx(mean, abs=2e-4)
    assert [line["step"] for line in lines if line.get("split") == "val"] == list(range(32, 385, 32))
    for name in ("config.yaml", "log.txt", "encoder/dataset.json"):
        assert (run.path / name).is_file()
    files = [path for path in run.path.rglob("*") if path.is_file() and "tensorboard" not in path.parts]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


FIRST = re.compile(
    r"\[0:\d\d:\d\d\] \d+% step (?P<step>\d+)/(?P<steps>\d+) (?P<rate>[\d.]+[kM]?)/s loss (?P<loss>[\d.]+)"
    r"(?P<val>| AUC [\d.]+)(?P<left>| \d+:\d\d:\d\d left)"
)
SECOND = re.compile(
    r"data (?P<data>\d+)% lookup (?P<lookup>\d+)% dense (?P<dense>\d+)% "
    r"update (?P<update>\d+)%(?P<tiers>.*)\nepoch (?P<epoch>[\d.]+)/2"
)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param("dram", id="DRAM"),
        pytest.param(
            {"dram": "96KiB", "force": True},
            id="tiers",
            marks=pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module"),
        ),
    ],
)
def test_what_the_progress_line_says(
    make_dataset: Callable[..., PackedDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], memory: Any,
) -> None:  # fmt: skip
    """Samples a second, loss, AUC and where the time goes, as metrics.jsonl has them; a terminal shows three lines."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    rows = {"train": 1024, "val": 256, "test": 64}
    dataset = make_dataset(tmp_path / "data", rows=rows, table_rows=(50, 20, 4000))
    changes = [f"memory={json.dumps(memory)}", "train.eval_every=0.5", "train.batch_size=16"]
    both: list[str] = []
    update = progress.ProgressLine.update
    monkeypatch.setattr(
        progress.ProgressLine, "update", lambda self, text: (both.append(text()), update(self, lambda: both[-1]))[1]
    )
    run = runs.train(config(dataset, tmp_path / "run", *changes))
    shown = [line for line in capsys.readouterr().err.splitlines() if "/s loss" in line]
    assert [line.partition(" ")[2] for line in shown] == [text.partition("\n")[0] for text in both]
    found = [
        first.groupdict() | second.groupdict()
        for line, text in zip(shown, both, strict=True)
        if (first := FIRST.fullmatch(line)) and (second := SECOND.fullmatch(text.partition("\n")[2]))
    ]
    assert len(found) == len(shown) == 128, shown
    widest = shown[-1].replace(" 128/128 ", " 1234567/1234567 ")
    assert len(widest) <= 80 and all(len(line) <= 80 for text in both for line in text.split("\n")[1:]), widest
    assert [int(line["step"]) for line in found] == list(range(1, 129))
    assert {line["steps"] for line in found} == {"128"}
    assert [line["step"] for line in found if not line["left"]] == ["1"], "the pace of one step is not that of a run"
    assert [float(line["epoch"]) for line in found] == [round(step / 64, 2) for step in range(1, 129)]
    measured, val = run.measurements(), ""
    means = {line["step"]: line["loss"] for line in measured if line["kind"] == "train"}
    vals = {line["step"]: line for line in measured if line.get("split") == "val"}
    assert (len(means), len(vals)) == (13, 4)
    for step, line in enumerate(found, start=1):
        if step in means:
            assert line["loss"] == f"{means[step]:.4f}"
        assert line["val"] == val
        if step in vals:
            val = " AUC {auc:.4f}".format_map(vals[step])
        assert sum(int(line[phase]) for phase in ("data", "lookup", "dense", "update")) == pytest.approx(100, abs=2)
    if memory == "dram":
        assert {line["tiers"] for line in found} == {""}
    else:
        assert re.fullmatch(r", waiting \d+%, [\d.]+ \w+ written", found[-1]["tiers"])
    unit = {"k": 1e3, "M": 1e6}
    rate = found[-1]["rate"]
    shown_rate = float(rate.rstrip("kM")) * unit.get(rate[-1], 1.0)
    assert shown_rate == pytest.approx(run.record.samples_per_s, rel=0.01)


def test_tensorboard_holds_what_metrics_jsonl_holds(dataset: PackedDataset, tmp_path: Path) -> None:
    """Read back by TensorBoard itself: every number, at its step."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(dataset, tmp_path / "run", "train.eval_every=0.5")
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = {(tag, scalar.step): scalar.value for tag in events.Tags()["scalars"] for scalar in events.Scalars(tag)}
    expected: dict[tuple[str, int], float] = {}
    for line in run.measurements():
        kind, step = line["kind"], line["step"]
        for name, value in line.items():
            if name in ("kind", "step"):
                continue
            for tag, number in value.items() if isinstance(value, dict) else [(None, value)]:
                if isinstance(number, int | float):
                    expected["/".join(filter(None, (line.get("split", kind), name, tag))), step] = number
    tags = {tag for tag, _ in found}
    assert {"train/loss", "train/samples_per_s", "train/lr/dense", "train/step_ms/lookup"} <= tags
    assert {"val/auc", "val/logloss", "val/ne", "test/auc"} <= tags
    assert found == pytest.approx(expected, rel=1e-6)  # events are float32


HALVES = "tables float32 in two halves, lookups read the upper"
WIDE = "all arithmetic is float32"
PRODUCTS = (
    f"bfloat16 in products of MLPs, sums and weights float32{', on AMX' * (ops.bfloat16_products() == 'amx_bf16')}"
    if ops.bfloat16_products()
    else "bfloat16 where torch's autocast has it, weights float32"
)
NARROW = f"arithmetic of tables is float32, of dense layers {PRODUCTS}"
PRECISIONS = {
    "fp16": ("adagrad", f"tables float16; MLPs float32; {WIDE}", 0.5),
    "split_bf16": ("adagrad", f"{HALVES}; MLPs float32; {WIDE}", 1.0),
    "split_bf16 of all": ("sgd", f"{HALVES}; MLPs the same; {WIDE}", 1.0),
    "split_bf16 with bf16 layers": ("sgd", f"{HALVES}; MLPs the same; {NARROW}", 1.0),
    "fp16 with bf16 layers": ("adagrad", f"tables float16; MLPs float32; {NARROW}", 0.5),
}


@pytest.mark.slow_but("split_bf16 with bf16 layers")
@pytest.mark.parametrize("name", PRECISIONS)
def test_learns_and_evaluates_in_every_precision(dataset: PackedDataset, tmp_path: Path, name: str) -> None:
    """As in float32, from float32 files; how weights are stored is said once."""
    dense, words, share = PRECISIONS[name]
    precision, layers = name.split()[0], "bf16" if "bf16 layers" in name else "fp32"
    changes = [f"optimizer.dense={{name: {dense}, lr: {0.3 if dense == 'sgd' else 0.05}}}", "train.epochs=6"]
    stored_as = [f"train.precision={precision}", f"train.dense_dtype={layers}"]
    run = train(dataset, tmp_path / "run", *stored_as, *changes)
    plain = train(dataset, tmp_path / "plain", *changes)
    assert run.record.metrics["test"]["auc"] == pytest.approx(plain.record.metrics["test"]["auc"], abs=0.02)
    assert run.record.metrics["test"]["auc"] > 0.7
    assert run.record.tables_bytes == share * plain.record.tables_bytes
    assert (run.path / "log.txt").read_text().count(f"train.precision {precision}: {words}") == 1
    assert "train.precision" not in (plain.path / "log.txt").read_text()
    assert hotrow.load(run.path).evaluate("test") == run.record.metrics["test"]
    newest = [list_checkpoints(r.checkpoints)[384] for r in (run, plain)]
    stored, expected = (sum(file.stat().st_size for file in path.glob("embedding/*/*")) for path in newest)
    assert stored == expected if precision == "split_bf16" else stored < 0.6 * expected


@pytest.mark.parametrize(("monitor", "sign", "name"), [("logloss", -1, "LogLoss"), ("auc", 1, "AUC")])
def test_early_stopping_ends_on_the_best_weights(
    dataset: PackedDataset, tmp_path: Path, monitor: str, sign: int, name: str
) -> None:
    changes = ["train.early_stopping=2", "train.epochs=40", "train.eval_every=0.5", "optimizer.sparse.lr=0.5"]
    run = train(dataset, tmp_path / "run", *changes, *([] if monitor == "logloss" else [f"train.monitor={monitor}"]))
    scores = {line["step"]: sign * line[monitor] for line in run.measurements() if line.get("split") == "val"}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert run.record.ended == f"no better validation {name} in 2 evaluations"
    assert run.record.monitor == monitor
    assert run.record.chosen_step == best < run.record.steps
    assert sign * run.record.metrics["val"][monitor] == scores[best]
    assert best in list_checkpoints(run.checkpoints)
    assert len(list_checkpoints(run.checkpoints)) <= 3
    assert not [command for command in hotrow.load(run.path).next_commands() if "--resume" in command]
    resumed = runs.resume(run.path, ["train.epochs=41"], quiet=True)
    assert (resumed.record.steps, resumed.record.metrics) == (run.record.steps, run.record.metrics)
    said = f"nothing to train: the run ended at step {run.record.steps} of"
    assert said in (run.path / "log.txt").read_text(encoding="utf-8")


def test_a_run_that_is_past_its_steps_takes_none(dataset: PackedDataset, tmp_path: Path) -> None:
    """A finished run says so; one that was stopped asks for more epochs, or ends if it is exactly where it should."""
    run = train(dataset, tmp_path / "run", "train.epochs=2", "checkpoint.every=1.0")
    steps = run.record.steps
    again = runs.resume(run.path, ["train.epochs=1"], quiet=True)
    assert (again.record.status, again.record.steps) == ("finished", steps)
    assert f"ended at step {steps}, past the {steps // 2} steps" in (run.path / "log.txt").read_text(encoding="utf-8")
    stopped = runs.train(config(dataset, tmp_path / "stopped", "train.epochs=9"), quiet=True, until_s=0.0)
    at = stopped.record.steps
    assert (stopped.record.status, at) == ("interrupted", 1)
    runs.resume(stopped.path, ["train.max_steps=3"], quiet=True, until_s=0.0)
    with pytest.raises(ValueError, match=r"is at step 2, past the 1 steps that train.epochs and train.max_steps"):
        runs.resume(stopped.path, ["train.max_steps=1"], quiet=True)
    ended = runs.resume(stopped.path, ["train.max_steps=2"], quiet=True)
    assert (ended.record.status, ended.record.steps) == ("finished", 2) and ended.record.metrics["test"]["auc"] > 0


def test_a_run_whose_dataset_moved_says_how_to_go_on(dataset: PackedDataset, tmp_path: Path) -> None:
    shutil.copytree(dataset.path, tmp_path / "before")
    run = train(PackedDataset.open(tmp_path / "before"), tmp_path / "run", "train.max_steps=2")
    (tmp_path / "before").rename(tmp_path / "after")
    with pytest.raises(ValueError, match=rf"dataset is not at {tmp_path}/before .*--resume {run.path} --set data="):
        runs.resume(run.path, ["train.max_steps=3"], quiet=True)
    going = runs.resume(run.path, ["train.max_steps=3", f"data={tmp_path / 'after'}"], quiet=True)
    assert going.record.steps == 3


def test_a_run_is_never_overwritten_and_names_count_up(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(dataset, tmp_path / "run", "train.max_steps=1")
    with pytest.raises(ValueError, match=r"run folder .*run exists already and is never overwritten"):
        train(dataset, tmp_path / "run", "train.max_steps=1")
    monkeypatch.chdir(tmp_path)
    raw = {**BASE, "data": str(dataset.path)}
    names = [runs.train(make_config(apply_overrides(raw, ["train.max_steps=1"])), quiet=True).path for _ in range(2)]
    assert [str(name) for name in names] == ["runs/data-dlrm-001", "runs/data-dlrm-002"]


def test_divergence_names_step_and_cure(dataset: PackedDataset, tmp_path: Path) -> None:
    where, cure = r"\(step \d+, epoch 1, batch \d+\)", r"lower optimizer\.dense\.lr \(1e\+20\)"
    message = rf"the loss is .* {where}; this step changed nothing.*{cure}"
    with pytest.raises(ValueError, match=message):
        train(dataset, tmp_path / "run", "optimizer.dense.name=sgd", "optimizer.dense.lr=1e20")
    record = RunFolder.open(tmp_path / "run").record
    assert record.status == "failed"
    assert "the loss is" in record.error


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], side: str) -> None:
    """Makes a gradient (or the loss) of the steps numbered from 1 not finite, on one side alone."""
    plain, number = trainer.check_finite, [0]

    def check(parts: trainer.Parts, batch: Any, loss: torch.Tensor) -> None:
        number[0] += 1
        if number[0] in steps:
            if side == "sparse":
                parts.embedding.pending[0].grad[5, 9] = torch.inf
            elif side == "dense":
                next(iter(parts.model.parameters())).grad[1, 2] = torch.nan
            else:
                loss = torch.tensor(torch.nan)
        plain(parts, batch, loss)

    monkeypatch.setattr(trainer, "check_finite", check)


@pytest.mark.parametrize(
    ("side", "found"),
    [
        ("sparse", r"the gradient of feature 'bag' \(table 't0'\), sample 5, column 1 is inf"),
        pytest.param("dense", r"the gradient of parameter 'bottom\..*' at \[1, 2\] is nan", marks=pytest.mark.slow),
        ("loss", "the loss is nan"),
    ],
)
def test_a_step_that_is_not_finite_stops_both_sides(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, found: str
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, {5}, side)
        with pytest.raises(ValueError, match=rf"{found}.* \(step 5, epoch 1, batch 5\); this step changed nothing"):
            train(dataset, tmp_path / "raise", "checkpoint.every=4")
    assert list(list_checkpoints(tmp_path / "raise" / "checkpoints")) == [4]
    resumed = runs.resume(tmp_path / "raise", ["train.nonfinite=skip", "train.max_steps=8"], quiet=True)
    assert (resumed.record.status, resumed.record.steps_skipped) == ("finished", 0)

    # Two rows in a row and a last one: skipped for both sides, for an optimizer that keeps state on both.
    with monkeypatch.context() as patch:
        poison(patch, {5, 6, 20}, side)
        run = train(dataset, tmp_path / "skip", "train.nonfinite=skip", "train.max_steps=20", "train.log_every=5")
    assert run.record.steps_skipped == 3
    assert run.record.warnings["nonfinite_step_skipped"]["count"] == 3
    assert re.search(found, run.record.warnings["nonfinite_step_skipped"]["text"])
    assert [line.get("steps_skipped") for line in run.measurements() if line["kind"] == "train"] == [1, 2, 2, 3]
    losses = [line["loss"] for line in run.measurements() if line["kind"] == "train"]
    assert all(0 < loss < 10 for loss in losses)
    assert Run(run.path).summary()["steps_skipped"] == 3


def test_skipped_steps_change_nothing(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is skipped: all but its number is as one step before."""
    changes = ["train.nonfinite=skip", "checkpoint.every=7", "checkpoint.keep_last=5"]
    for side in ("sparse", "dense", "loss"):
        with monkeypatch.context() as patch:
            poison(patch, {8}, side)
            run = train(dataset, tmp_path / side, *changes, "train.max_steps=8")
        before, after = (run.checkpoints / f"step-{step}" for step in (7, 8))
        for file in before.rglob("*.safetensors"):
            assert file.read_bytes() == (after / file.relative_to(before)).read_bytes(), (side, file)


def test_skipping_for_ever_is_refused(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of skipped steps has no loss."""
    monkeypatch.setattr(trainer, "MAX_SKIPPED", 3)
    poison(monkeypatch, {1, 2, 3, 5, 6, 7, 8}, "loss")
    message = r"the loss is nan \(step 8, .* and the 3 steps before it were skipped too.*lower opt"
    with pytest.raises(ValueError, match=message):
        train(dataset, tmp_path / "run", "train.nonfinite=skip", "train.log_every=2")
    run = RunFolder.open(tmp_path / "run")
    assert run.record.warnings["nonfinite_step_skipped"]["count"] == 6
    losses = [line["loss"] for line in run.measurements() if line["kind"] == "train"]
    assert losses[0] is None and losses[1] > 0 and losses[2] is None


def test_without_validation_rows(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 128, "test": 64})
    run = train(dataset, tmp_path / "run")
    assert run.record.warnings["no_validation"]["count"] == 1
    assert set(run.record.metrics) == {"test"}
    with pytest.raises(ValueError, match=r"train\.early_stopping is 2, but .* has no rows in a split 'val'"):
        train(dataset, tmp_path / "other", "train.early_stopping=2")


def test_one_class_in_validation_warns_or_fails(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 128, "val": 1, "test": 64})
    run = train(dataset, tmp_path / "run")
    assert "all 1 labels are" in run.record.warnings["no_validation_auc"]["text"]
    assert run.record.metrics["val"]["auc"] is None
    with pytest.raises(ValueError, match=r"train\.early_stopping needs it"):
        train(dataset, tmp_path / "other", "train.early_stopping=2", "train.monitor=auc")
    assert train(dataset, tmp_path / "third", "train.early_stopping=2").record.best_step


@pytest.mark.parametrize("num_dense", [0, 2])
def test_dense_inputs_are_optional(tmp_path: Path, make_dataset: Callable[..., PackedDataset], num_dense: int) -> None:
    dataset = make_dataset(tmp_path / "data", num_dense=num_dense)
    assert train(dataset, tmp_path / "run").record.status == "finished"


def test_a_packed_dataset_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no dataset\.json, so this is not a complete packed dataset"):
        runs.train(make_config({"data": str(tmp_path)}))


def test_tensorboard_may_be_absent(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = train(dataset, tmp_path / "run", "train.max_steps=1")
    assert "no TensorBoard events: tensorboard is not installed" in (run.path / "log.txt").read_text()


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_a_dataset_that_is_not_whole_is_refused_first(dataset: PackedDataset, tmp_path: Path, damage: str) -> None:
    """Not after the last epoch, when the test split is first read."""
    copy = tmp_path / "data"
    shutil.copytree(dataset.path, copy)
    part = copy / "test" / dataset.info.splits["test"].parts[-1].file
    part.write_bytes(part.read_bytes()[:-1]) if damage == "cut" else part.unlink()
    with pytest.raises(ValueError, match=r"this file and it is missing|it was cut or altered"):
        train(PackedDataset.open(copy), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_says_what_is_kept_and_how_to_go_on(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = loop_parts.save_checkpoint

    def save_until_full(path: Path, *args: Any, **options: Any) -> Path:
        if int(path.name.removeprefix("step-")) > 32:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(path, *args, **options)

    monkeypatch.setattr(loop_parts, "save_checkpoint", save_until_full)
    run = tmp_path / "run"
    message = f"disk full while training in {run} .* checkpoints there are kept. .* hotrow train --resume {run}"
    with pytest.raises(OSError, match=message):
        train(dataset, run, "checkpoint.every=0.5")
    monkeypatch.undo()
    assert runs.resume(run, quiet=True).record.steps == 128


def test_everything_before_the_first_step_is_decided_once(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `train`, by `resume`, and by a run that scores."""
    calls: list[str] = []
    decided = {"tables_of", "place_tables", "device_of_copies", "check_hot"}
    for module, name in [*((setup, name) for name in decided), (turns, "check_hot"), (build, "tables_of")]:
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=plain, **k: (calls.append(n), f(*a, **k))[1])
    run = train(dataset, tmp_path / "run", "train.max_steps=3")
    assert sorted(calls) == sorted(decided)
    calls.clear()
    runs.resume(run.path, ["train.max_steps=5"])
    assert sorted(calls) == sorted(decided)
    calls.clear()
    loaded = hotrow.load(run.path)
    loaded.evaluate("val")
    loaded.evaluate("test")
    assert sorted(calls) == ["place_tables", "tables_of", "tables_of"], "once to read the checkpoint"


def test_the_loop_takes_one_more_part(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Samples(LoopPart):
        num, aside_entered, closed = 0, 0, False

        def after_step(self, batch: Any, loss: float | None) -> list[Notice]:
            self.num += len(batch)
            return [Notice("enough samples", "many_samples")] if self.num == 2 * 64 else []

        @contextmanager
        def aside(self) -> Iterator[None]:
            self.aside_entered += 1
            yield

        def window(self) -> dict[str, Any]:
            return {"samples": self.num}

        def close(self) -> tuple[()]:
            self.closed = True
            return ()

    meter, plain = Samples(), trainer.meters_of_rows
    monkeypatch.setattr(trainer, "meters_of_rows", lambda *a, **k: [meter, *plain(*a, **k)])
    changes = ("train.max_steps=4", "train.batch_size=64", "train.log_every=1", "train.eval_every=2")
    run = train(dataset, tmp_path / "run", *changes)
    windows = [line["samples"] for line in run.measurements() if line["kind"] == "train"]
    assert windows == [64, 128, 192, 256] and meter.closed
    assert run.record.warnings["many_samples"]["count"] == 1
    evaluations = [line for line in run.measurements() if line["kind"] == "eval"]
    looks = 1  # at what each column gives to the scores
    assert run.record.scores is not None
    assert meter.aside_entered == len(evaluations) + len(list_checkpoints(run.checkpoints)) + looks

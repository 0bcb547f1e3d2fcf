"""Laws 2 and 3 for runs with slots on a device: `hotrow train` reaches the bits of a run without, also when resumed.

By Triton's interpreter; where a GPU is, dense layers add up in another order, and what is compared is near.
"""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import HAS_GPU, slow_interpreted
from test_resume import signal_at

import hotrow
from at_step import raise_at
from expanded import expanded
from hotrow.base import machine as host
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops
from hotrow.kernels import triton_kernels as kernels
from hotrow.models.dlrm import DLRM
from hotrow.models.tbsm import TBSM
from hotrow.run import runs, trainer
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder
from hotrow.run.storage import full_device
from hotrow.setup import setup
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import Setup
from loops import looped
from packed_data import planted

pytestmark = pytest.mark.usefixtures("one_thread")
OURS = "bfloat16 in products of MLPs, sums and weights float32"
only_interpreted = pytest.mark.skipif(HAS_GPU, reason="a CUDA device is here: its absence cannot be seen")
DEVICE = "cuda" if HAS_GPU else "cpu"
BASE: dict[str, Any] = {
    "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
    "train": {"batch_size": 16, "max_steps": 6, "eval_every": None, "log_every": 2, "seed": 5, "threads": 1},
}
data = planted(rows={"train": 128, "val": 16, "test": 16}, table_rows=(20, 10, 300))


def config(data: Path, run: Path, *changes: str, **memory: Any) -> Any:
    raw = {**BASE, "data": str(data), "run": str(run), "device": DEVICE, "memory": memory or "dram"}
    return make_config(apply_overrides(raw, changes))


def in_tiers(tmp_path: Path) -> dict[str, Any]:
    """About a third of the large table on the device, and as much in DRAM."""
    return {"hbm": 5000, "dram": "17KiB", "ssd": str(tmp_path / "disk"), "force": True}


def outcome(run: RunFolder) -> dict[str, Any]:
    """What must not depend on where rows lie, nor on stops."""
    newest = list_checkpoints(run.checkpoints)
    lines = [line["loss"] for line in run.measurements() if "loss" in line]
    return {"losses": lines, "metrics": run.record.metrics, **expanded(newest[max(newest)])}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    if not HAS_GPU:
        assert found == expected
        return
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-3)


@pytest.mark.slow_but("before tiers", unless=HAS_GPU)
@pytest.mark.parametrize("kind", ["before DRAM", "before tiers"])
def test_a_run_with_slots_resumes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Slots for a third of the large table; stopped, resumed, scored: the bits of a run with all rows in DRAM."""
    optimizer = "adam" if kind == "before tiers" else "row_wise_adagrad"
    memory = in_tiers(tmp_path) if kind == "before tiers" else {"hbm": 2900}
    changes = [f"optimizer.sparse.name={optimizer}", "train.eval_every=4"]
    plain = runs.train(make_config({**config(data, tmp_path / "plain", *changes).model_dump(), "device": "cpu"}))
    expected = outcome(plain)
    with monkeypatch.context() as patch:
        signal_at(patch, 3, signal.SIGTERM)
        run = runs.train(config(data, tmp_path / "slots", *changes, **memory))
    assert run.record.status == "interrupted" and run.record.steps == 3
    run = runs.resume(run.path)
    check(outcome(run), expected)
    hbm = run.record.memory["hbm"]
    assert 0 < hbm["tables"]["t2"]["cached"] < 150 and hbm["evicted_rows"] > 0, "the slots were not exercised"
    assert run.record.memory["batches"]["foreseen"] > 0
    assert ("disk_bytes" in run.record.memory) == (kind == "before tiers")
    log = (run.path / "log.txt").read_text()
    assert "slots of" in log and f"on {DEVICE}" in log and "behind them" in log
    loaded = hotrow.load(run.path)
    if not HAS_GPU:
        assert loaded.evaluate("test") == plain.record.metrics["test"]
    loaded.close()


@slow_interpreted
def test_micro_batches(data: Path, tmp_path: Path) -> None:
    """Rows are summed by micro-batch in host memory, and their slots are updated once each."""
    changes = ["train.micro_batches=3", "optimizer.sparse.name=sgd"]
    plain = runs.train(make_config({**config(data, tmp_path / "plain", *changes).model_dump(), "device": "cpu"}))
    run = runs.train(config(data, tmp_path / "slots", *changes, hbm=2900))
    check(outcome(run), outcome(plain))


@slow_interpreted
def test_a_full_device_keeps_the_checkpoint_and_names_a_budget(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised by a stand-in for step 4; with the budget that the message names the run ends as one without slots."""
    plain = runs.train(make_config({**config(data, tmp_path / "plain").model_dump(), "device": "cpu"}))
    with monkeypatch.context() as patch:
        raise_at(patch, 3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines"))
        with pytest.raises(ValueError, match=r"memory is full \(CUDA out of memory.*GiB.\): slots take") as refused:
            runs.train(config(data, tmp_path / "run", "checkpoint.every=2", hbm=2900))
    text = str(refused.value)
    assert "The checkpoint of step 2 is whole; then continue with: " in text
    command, _, option = text.split("continue with: ")[1].rpartition(" --set ")
    assert command == f"hotrow train --resume {tmp_path / 'run'}"
    assert 0 < int(option.removeprefix("memory.hbm=")) < 2900 and f"; try {option}." in text
    run = runs.resume(tmp_path / "run", [option])
    check(outcome(run), outcome(plain))


def test_a_device_full_before_the_first_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no config.yaml then to resume from, and neither message says that there is."""

    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "build", full)
    again = rf"{tmp_path / 'run'} ended before its first step.* remove the folder and start it again, as by: "
    with pytest.raises(ValueError, match=r"slots take 2\.8 KiB.*; try memory\.hbm=\d+\. " + again) as refused:
        runs.train(config(data, tmp_path / "run", hbm=2900))
    assert "--resume" not in str(refused.value)
    with pytest.raises(ValueError, match=again):
        runs.resume(tmp_path / "run")


def test_what_to_say_where_no_smaller_budget_would_do(data: Path, tmp_path: Path) -> None:
    tables = setup.tables_of(config(data, tmp_path), PackedDataset.open(data))
    error = torch.OutOfMemoryError("full")
    text, option = full_device(config(data, tmp_path), tables, error)
    assert "a smaller train.batch_size" in text and option is None
    text, option = full_device(config(data, tmp_path, "train.batch_size=300", hbm=5000), tables, error)
    assert "slots of less do not hold the rows of a step, so lower train.batch_size" in text and option is None


def test_budgets_that_cannot_be(data: Path, tmp_path: Path) -> None:
    dataset = PackedDataset.open(data)

    def placed(hbm: Any) -> Any:
        chosen = config(data, tmp_path, "train.batch_size=40", hbm=hbm)
        return Setup.decide(chosen, dataset, tmp_path).memory

    with pytest.raises(ValueError, match=r"table 't2' would have \d+ slots .*, but a step may look up 40") as e:
        placed(2780)
    least = int(str(e.value).split("memory.hbm=")[1].split(")")[0])
    assert placed(least).hbm_bytes == least
    with pytest.raises(ValueError, match="but a step may look up 40"):
        placed(least - 8)
    with pytest.raises(ValueError, match=r"would have 0 pinned and 0 other slots .*raise it to [\d,]+ .*\(hbm=\d+\)"):
        placed(30)
    with pytest.raises(ValueError, match=rf"of the memory of {DEVICE} [\d,]+ are free; lower it"):
        placed("4096TiB")


@only_interpreted
def test_what_is_not_here_is_refused_with_the_cure(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*changes: str, **memory: Any) -> str:
        with pytest.raises(ValueError) as error:
            runs.train(config(data, tmp_path / "run", *changes, **memory))
        assert not (tmp_path / "run").exists()
        return str(error.value)

    assert "device is 'cuda', but torch" in refused("device=cuda")
    assert "memory.hbm is '1GiB', slots on a GPU, but torch" in refused("device=auto", hbm="1GiB")
    assert "choose fp32 or bf16, or set device to cuda" in refused("train.dense_dtype=tf32")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert "but device is 'cpu': set device to cuda, or memory.hbm to null" in refused(hbm="1MiB")
    monkeypatch.setitem(sys.modules, "hotrow.kernels.triton_kernels", None)  # as if an import had failed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    split = ["train.precision=split_bf16", "optimizer.dense.name=sgd"]
    assert "keeps the MLPs' weights in halves on the CPU" in refused("device=cuda", *split)


@only_interpreted
def test_scores_where_the_device_is_not(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with slots on a device is read without: a warning says so, and here the bits are those of the CPU."""
    run = runs.train(config(data, tmp_path / "run", "train.max_steps=2", hbm=2900))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.warns(UserWarning, match="scores are computed on the CPU, in float32: memory.hbm is 2900"):
        assert hotrow.load(run.path).evaluate("test") == run.record.metrics["test"]


def test_dense_layers_in_bfloat16(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to float32 and not the same; said on the first line; a resumed run has the bits of a whole one."""
    changes = ["train.dense_dtype=bf16", "train.batch_size=64", "train.epochs=9", "train.max_steps=18"]
    bf16 = runs.train(config(data, tmp_path / "bf16", *changes))
    fp32 = runs.train(config(data, tmp_path / "fp32", *changes, "train.dense_dtype=fp32"))
    found, expected = outcome(bf16), outcome(fp32)
    assert found["losses"] != expected["losses"]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-2)
    assert "in DRAM; dense layers on" in (bf16.path / "log.txt").read_text().splitlines()[0]
    assert "bfloat16" in (bf16.path / "log.txt").read_text().splitlines()[0]
    plain = (fp32.path / "log.txt").read_text()
    assert ("dense layers on" in plain) == HAS_GPU, "of layers in float32 those on a GPU alone are worth a word"
    signal_at(monkeypatch, 7, signal.SIGTERM)
    run = runs.train(config(data, tmp_path / "stopped", *changes))
    assert run.record.steps == 7
    check(outcome(runs.resume(run.path)), found)
    assert hotrow.load(bf16.path).evaluate("test") == bf16.record.metrics["test"]


@looped(
    ("products", "refused", "words"),
    [
        ("", -1, "bfloat16 where torch's autocast has it, weights float32"),
        ("avx512_bf16", -1, OURS),
        ("amx_bf16", 0, f"{OURS}, on AMX"),
        ("avx512_bf16", 1, f"{OURS}, not on AMX, because the system refuses its tiles (Operation not permitted)"),
    ],
)
def test_the_first_line_names_amx(products: str, refused: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "bfloat16_products", lambda: products)
    monkeypatch.setattr(ops, "native_module", lambda: SimpleNamespace(tiles_refused=lambda: refused))
    assert DenseDevice(torch.device("cpu"), "bf16").line() == f"; dense layers on cpu, {words}"


@pytest.mark.parametrize(
    ("cpuinfo", "slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", True),
        ("flags\t\t: fpu avx512f avx512_bf16\n", False),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", False),
        ("Features\t: fp asimd\n", True),
        ("Features\t: fp asimd bf16\n", False),
        ("", False),  # unknown
    ],
)
@only_interpreted
def test_a_processor_without_bfloat16_products_is_warned_of(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, slow: bool
) -> None:
    monkeypatch.delenv("HOTROW_ISA", raising=False)
    monkeypatch.setattr(host, "cpuinfo", lambda: cpuinfo)
    run = runs.train(config(data, tmp_path / "run", "train.dense_dtype=bf16", "train.max_steps=1"))
    assert ("slow_bfloat16" in run.record.warnings) == slow
    text = "warning: train.dense_dtype is 'bf16', but this processor has no products of bfloat16"
    assert (run.path / "log.txt").read_text().count(text) == slow
    plain = runs.train(config(data, tmp_path / "plain", "train.max_steps=1"))
    assert "slow_bfloat16" not in plain.record.warnings


def test_bfloat16_layers_against_float32() -> None:
    """Forward and gradients of a DLRM: relative error of a rounding to 8 bits, few times over; results are float32."""
    torch.manual_seed(0)
    model = DLRM(
        num_dense=5, num_features=3, embedding_dim=8, bottom_mlp=[16], top_mlp=[16],
        generator=torch.Generator().manual_seed(0), first_order=True,
    )  # fmt: skip
    dense, pooled = torch.randn(32, 5), torch.randn(32, 24, requires_grad=True)
    grads = []
    for dtype in ("fp32", "bf16"):
        logits = DenseDevice(torch.device("cpu"), dtype).outputs(model, dense, pooled)  # type: ignore[arg-type]
        assert logits.dtype == torch.float32
        grads.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), [pooled, *model.parameters()])])
    for full, narrow in zip(*grads, strict=True):
        assert narrow.dtype == torch.float32
        assert 0 < float((full - narrow).norm() / full.norm()) < 0.03


def test_bfloat16_steps_of_tbsm_against_float32() -> None:
    """As above, with histories from none to all slots; twice as many layers, and one gradient through two products."""
    model = TBSM(
        num_dense=2, feature_names=["user", "item", "item_history"], embedding_dim=8, bottom_mlp=[16], top_mlp=[12],
        attention_mlp=[7], final_mlp=[10], history_steps=5, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    lengths = torch.arange(32) % 6
    offsets = {name: torch.arange(33) for name in ("user", "item")}
    offsets["item_history"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = {n: torch.randn(int(o[-1]), 8, generator=draw).requires_grad_() for n, o in offsets.items()}
    rows, dense = {name: (values[name], offsets[name]) for name in offsets}, torch.randn(32, 2, generator=draw)
    grads = []
    for dtype in ("fp32", "bf16"):
        logits = DenseDevice(torch.device("cpu"), dtype).outputs(model, dense, rows)  # type: ignore[arg-type]
        assert logits.dtype == torch.float32
        wanted = [*values.values(), *model.parameters()]
        grads.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), wanted)])
    for full, narrow in zip(*grads, strict=True):
        assert narrow.dtype == torch.float32
        assert 0 < float((full - narrow).norm() / full.norm()) < 0.2


def test_tf32_is_on_inside_alone() -> None:
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    with DenseDevice(torch.device("cuda"), "tf32").arithmetic():
        assert flags.allow_tf32
    assert flags.allow_tf32 == before
    with DenseDevice(torch.device("cuda"), "fp32").arithmetic():
        assert flags.allow_tf32 == before

"""Laws 2 and 3 for copies of hot rows on a device: FAE's turns, looked up and updated there by the Triton kernels.

The truth is the same order of batches trained on the tables on the CPU. By Triton's interpreter to the bit, states
included; where a GPU is, within docs/numerics.md for rows, and losses are near.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE, HAS_GPU, assert_agrees, slow_interpreted
from test_hot_placement import (
    FEATURES,
    HOT_ROWS,
    HOT_SET,
    OPTIMIZERS,
    TABLES,
    everything,
    random_batch,
    stopped_and_resumed,
    trained,
    two_sides,
    without_cost,
)
from test_resume import outcome

import hotrow
from hotrow import KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot import turns
from hotrow.hot.turns import HotCopies
from hotrow.kernels.triton_ops import Kernels
from hotrow.placement import copies as copies_of
from hotrow.run import runs, trainer
from hotrow.run.folder import RunFolder
from hotrow.setup import setup
from hotrow.setup.device import DenseDevice, device_of_copies
from packed_data import planted

pytestmark = pytest.mark.usefixtures("one_thread")
ON_DEVICE = ("device=cuda",) if HAS_GPU else ()
data = planted(counts=True)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the interpreter's device stands in for one."""
    if not HAS_GPU:
        monkeypatch.setattr(setup, "device_of_copies", lambda config, place: DEVICE)


@pytest.fixture
def steps_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one with every update on the device."""
    plain, seen = Kernels.update, list[int]()

    def update(*arguments: Any) -> None:
        seen.append(1)
        plain(*arguments)

    monkeypatch.setattr(Kernels, "update", update)
    return seen  # type: ignore[return-value]


def check(found: RunFolder, wanted: RunFolder) -> None:
    own, truth = without_cost(outcome(found)), without_cost(outcome(wanted))
    if not HAS_GPU:
        assert own == truth
        return
    losses = [[line["loss"] for line in each["lines"] if "loss" in line] for each in (own, truth)]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def loss_of(emb: hotrow.EmbeddingCollection, sparse: KeyedJaggedTensor, other: KeyedJaggedTensor) -> torch.Tensor:
    sequences = emb.sequence(other)
    loss: torch.Tensor = emb(sparse).square().sum() + sum(values.cos().sum() for values, _ in sequences.values())
    return loss


@pytest.mark.slow_but("RowWiseAdagrad-True", unless=HAS_GPU)
@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL"])
def test_any_turns_with_copies_on_a_device(
    name: str, one_hot: bool, steps_there: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of random lengths; tables of all storages, sequences, weights, several forwards a step."""
    monkeypatch.setattr(copies_of, "MAX_LISTED", 100.0)  # in runs most rows cross in ranges
    generator = np.random.default_rng(5)
    torch.manual_seed(0)
    sides = two_sides(getattr(hotrow, name))
    (plain, plain_optimizer), (emb, optimizer) = sides
    copies = HotCopies(emb, optimizer, HOT_SET, device=DEVICE)
    hot_steps = 0
    for turn in range(4):
        hot = turn % 2 == 1
        copies.fetch() if hot else copies.give_back()
        for _ in range(generator.integers(1, 3)):
            sparse, other = (random_batch(generator, hot=hot, one_hot=one_hot) for _ in range(2))
            for collection, its_optimizer in sides:
                loss_of(collection, sparse, other).backward()
                its_optimizer.step()
            hot_steps += hot
            assert emb(sparse).device.type == (DEVICE.type if hot else "cpu")
            assert_agrees(emb(sparse).detach(), plain(sparse).detach(), "lookup")
            emb.clear_pending(), plain.clear_pending()
        with copies.flushed():
            for own, wanted in zip(everything(emb, optimizer), everything(plain, plain_optimizer), strict=True):
                assert_agrees(own, wanted, name)
    assert len(steps_there) == hot_steps > 1, "hot steps run on the device, and no others"
    assert copies.seconds > 0 and copies.num_copied > 2


def test_rows_cross_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row at a time, and of five: every row arrives and returns, and the others stay."""
    for piece_bytes in (1, 100):
        monkeypatch.setattr(copies_of, "PIECE_BYTES", piece_bytes)
        emb = hotrow.EmbeddingCollection(TABLES, seed=3)
        optimizer = hotrow.RowWiseAdagrad(emb, lr=0.1)
        before = everything(emb, optimizer)
        copies = HotCopies(emb, optimizer, HOT_SET, device=DEVICE)
        copies.fetch()
        for newer in emb.placement._newer_here:
            newer.is_all = True
        arrays = emb.placement.arrays
        for array in (*arrays.tensors, *(half for half in arrays.low if half is not None)):
            array.view(torch.int16).add_(1)
        copies.give_back()
        for t, (table, own) in enumerate(zip(TABLES, emb.weights.values(), strict=True)):
            rows = HOT_SET.rows[table.name]
            is_hot = rows.contains(np.arange(table.num_embeddings))
            changed = (own.view(torch.int16) != before[t].view(torch.int16)).all(1).numpy()
            assert (changed == is_hot).all(), table.name


def test_what_is_read_while_copies_on_a_device_are_live_is_refused_or_whole(tmp_path: Path) -> None:
    emb = hotrow.EmbeddingCollection(TABLES, seed=3)
    optimizer = hotrow.Adagrad(emb, lr=0.1)
    copies = HotCopies(emb, optimizer, HOT_SET, device=DEVICE)
    copies.fetch()
    generator = np.random.default_rng(5)
    batch = random_batch(generator, hot=True, one_hot=True)
    emb(batch).sum().backward()
    with pytest.raises(RuntimeError, match="gradients of hot rows await the optimizer"):
        copies.give_back()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the tables' hot rows are out of date"):
        hotrow.save_checkpoint(tmp_path / "refused", {"embedding": emb, "optimizer": optimizer})
    with torch.no_grad():
        there = emb(batch).cpu()
    with copies.flushed():
        hotrow.save_checkpoint(tmp_path / "saved", {"embedding": emb, "optimizer": optimizer})
        with torch.no_grad():
            assert torch.equal(emb(batch), there) or HAS_GPU
    other = hotrow.EmbeddingCollection(TABLES, seed=4)
    hotrow.load_checkpoint(tmp_path / "saved", {"embedding": other, "optimizer": hotrow.Adagrad(other, lr=0.1)})
    with torch.no_grad():
        assert_agrees(there, other(batch), "the checkpoint has what was trained on the device")
    cold = KeyedJaggedTensor(list(FEATURES), torch.tensor([29] * 4))
    with pytest.raises(ValueError, match="feature 'a1' looks up row 29, which is not hot"):
        emb(cold)
    emb(batch).sum().backward()
    emb.pending[0].grad[2, 5] = float("nan")
    with pytest.raises(ValueError, match=r"feature 'a2' \(table 'a'\), sample 2, column 1 is nan"):
        optimizer.step()


def test_collections_that_have_no_room_for_copies_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = hotrow.EmbeddingCollection(TABLES, memory=hotrow.DeviceMemory(hbm="1MiB", device=str(DEVICE)))
    with pytest.raises(ValueError, match="have slots on a device already"):
        HotCopies(slots, hotrow.SGD(slots, lr=0.1), HOT_SET, device=DEVICE)
    emb = hotrow.EmbeddingCollection(TABLES, seed=3)
    optimizer = hotrow.SGD(emb, lr=0.1)
    if not HAS_GPU:
        with pytest.raises(ValueError, match="arrays are on meta; Triton runs on cpu here"):
            HotCopies(emb, optimizer, HOT_SET, device="meta")
    error = ModuleNotFoundError("No module named 'triton'", name="triton")

    def absent(name: str, *arguments: Any) -> Any:
        if name.startswith("hotrow.kernels.triton"):
            raise error
        return plain(name, *arguments)

    plain = __import__
    monkeypatch.setattr("builtins.__import__", absent)
    with pytest.raises(ImportError, match=r"need Triton: pip install 'hotrow\[gpu\]'"):
        HotCopies(emb, optimizer, HOT_SET, device=DEVICE)


# Every optimizer passes the loop above; whole runs take a while in the interpreter.
RUNS = [
    pytest.param(*case, marks=() if name == "adam" and HAS_GPU else pytest.mark.slow, id=name)
    for name, case in OPTIMIZERS.items()
]


@pytest.mark.parametrize(("record_bytes", "changes"), RUNS)
def test_a_run_with_copies_on_a_device(
    data: Path, tmp_path: Path, record_bytes: int, changes: list[str], on_device: None, steps_there: list[int]
) -> None:
    changes = [*changes, f"hot.budget={record_bytes * HOT_ROWS}", "train.epochs=1", "train.batch_size=64"]
    if HAS_GPU and "train.precision=split_bf16" in changes:
        changes.append("optimizer.dense.name=adam")  # dense sgd would keep halves of weights, which lie on the CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: None)
        plain = trained(data, tmp_path / "plain", *changes)
    assert not steps_there and "sync_s" not in plain.record.hot
    run = trained(data, tmp_path / "copied", *changes, *ON_DEVICE)
    check(run, plain)
    hot = run.record.hot
    assert len(steps_there) > 1 and run.record.steps - len(steps_there) > 1 and len(hot["swaps"]) > 2
    assert hot["sync_s"] > 0
    assert f"copies of hot rows on {DEVICE}" in (run.path / "log.txt").read_text().splitlines()[0]


@slow_interpreted
def test_fixed_turns(data: Path, tmp_path: Path, on_device: None, steps_there: list[int]) -> None:
    changes = ["hot.schedule=fixed", "train.epochs=1", "train.batch_size=64"]
    changes += ["hot.rate=100", "train.eval_every=null"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: None)
        plain = trained(data, tmp_path / "plain", *changes)
    run = trained(data, tmp_path / "copied", *changes, *ON_DEVICE)
    check(run, plain)
    assert len(steps_there) > 1


@slow_interpreted
def test_rows_in_tiers_with_copies_on_a_device(
    tmp_path: Path, make_dataset: Callable[..., PackedDataset], on_device: None, steps_there: list[int]
) -> None:
    data = make_dataset(tmp_path / "data", table_rows=(50, 20, 4000), counts=True).path
    changes = ["train.precision=split_bf16", "optimizer.sparse.name=adagrad", "hot.budget=25000", "train.epochs=1"]
    changes += ["optimizer.dense.name=adam"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "device_of_copies", lambda config, place: None)
        plain = trained(data, tmp_path / "plain", *changes)
    tiers = [f"memory.ssd={tmp_path / 'rows'}", "memory.dram=110000", "memory.force=true"]
    run = trained(data, tmp_path / "copied", *changes, *tiers, *ON_DEVICE)
    assert run.record.memory["disk_bytes"] > 0 and len(steps_there) > 1
    if not HAS_GPU:
        found, wanted = without_cost(outcome(run)), without_cost(outcome(plain))
        assert found["tensors"] == wanted["tensors"] and found["metrics"] == wanted["metrics"]


@slow_interpreted
def test_interrupted_and_resumed_with_copies_on_a_device(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    """Law 3: within a hot turn, whose copies are then flushed. On a GPU too a run repeats to the bit."""
    changes = ["optimizer.sparse.name=adam", "train.epochs=1", "train.batch_size=64", *ON_DEVICE]
    changes += [f"hot.budget={80 * HOT_ROWS}", "hot.rate=100"]
    whole = trained(data, tmp_path / "whole", *changes)
    swaps = [line["step"] for line in whole.measurements() if line["kind"] == "swap"]
    assert swaps[0] + 1 < whole.record.steps, "a step within a hot turn"
    for run in stopped_and_resumed(data, tmp_path, monkeypatch, whole, [swaps[0] + 1], changes):
        assert run.record.hot["sync_s"] > 0


@slow_interpreted
def test_turns_through_slots_have_no_copies(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    """The cached pipeline with hot and cold batches: the same order and bits, and rows that enter and leave."""
    data = make_dataset(tmp_path / "data", rows={"train": 320, "val": 16, "test": 16}, counts=True).path
    changes = ["hot.schedule=fixed", "train.epochs=1", "train.batch_size=32", "train.eval_every=null"]
    plain = trained(data, tmp_path / "plain", *changes)
    run = trained(data, tmp_path / "slots", *changes, "memory.hbm=7000", f"device={DEVICE.type}")
    own, truth = without_cost(outcome(run)), without_cost(outcome(plain))
    assert "sync_s" not in run.record.hot and run.record.memory["hbm"]["evicted_rows"] > 0
    if not HAS_GPU:
        assert own["tensors"] == truth["tensors"] and own["metrics"] == truth["metrics"]


def test_copies_above_the_memory_of_the_device(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a folder, and again when the run begins."""
    monkeypatch.setattr(setup, "device_of_copies", lambda config, place: DEVICE)
    monkeypatch.setattr(turns, "room_bytes", lambda device: 3000)
    text = rf"hot\.budget is 5760: copies of hot rows take 5,760 bytes, and of the memory of {DEVICE} 3,000 are free; "
    with pytest.raises(ValueError, match=text + "lower hot.budget, and leave room there for dense layers"):
        trained(data, tmp_path / "large", *ON_DEVICE)
    assert not (tmp_path / "large").exists()
    room = iter([1 << 30])  # as the run begins
    monkeypatch.setattr(turns, "room_bytes", lambda device: next(room, 3000))
    with pytest.raises(ValueError, match=text.replace("5,760 bytes", r"5,\d+ bytes")):
        trained(data, tmp_path / "begun", *ON_DEVICE)


def test_which_runs_have_copies_on_a_device(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(**changes: Any) -> Any:
        return device_of_copies(make_config({"data": str(data), **changes}), DenseDevice(torch.device("cuda")))

    assert device(hot={"schedule": "fae"}) == device(hot={"schedule": "fixed"}) == torch.device("cuda")
    assert device() is None and device(hot={"schedule": "window"}) is None
    assert device(hot={"schedule": "fae"}, memory={"hbm": "1GiB"}) is None, "slots hold the hot rows"
    assert device_of_copies(make_config({"data": str(data), "hot": {"schedule": "fae"}}), DenseDevice()) is None
    monkeypatch.setattr("hotrow.setup.device.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Triton is not installed: pip install 'hotrow\[gpu\]', or set device to cpu"):
        device(hot={"schedule": "fae"})


@slow_interpreted
def test_a_full_device_names_what_to_resume_with(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: None
) -> None:
    """Raised by a stand-in for a hot step. As printed, slots in place of the copies, the run ends with its own bits."""
    changes = ["checkpoint.every=2", "train.max_steps=12", "train.batch_size=16", "train.eval_every=null"]
    changes += [f"device={DEVICE.type}"]
    whole = trained(data, tmp_path / "whole", *changes)
    step = trainer.train_step

    def full(parts: Any, batch: Any, number: int, clock: Any) -> Any:
        if isinstance(parts.embedding.placement, copies_of.Copies):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")
        return step(parts, batch, number, clock)

    monkeypatch.setattr(trainer, "train_step", full)
    with pytest.raises(ValueError, match=r"copies of hot rows take 5\.6 KiB of it.*; try memory\.hbm=") as refused:
        trained(data, tmp_path / "run", *changes)
    command, _, option = str(refused.value).split("is whole; then continue with: ")[1].rpartition(" --set ")
    assert command == f"hotrow train --resume {tmp_path / 'run'}" and option.startswith("memory.hbm=")
    if not HAS_GPU:
        monkeypatch.setattr(setup, "device_of_copies", device_of_copies)
    found, wanted = outcome(runs.resume(tmp_path / "run", [option], quiet=True)), outcome(whole)
    assert found["step"] == wanted["step"]
    if not HAS_GPU:
        assert found["tensors"] == wanted["tensors"] and found["metrics"] == wanted["metrics"]

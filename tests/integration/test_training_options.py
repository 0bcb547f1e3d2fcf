"""Options of training that PyTorch has too: a step with them is the step that torch takes."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from hotrow.batch import Batch
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.ranks import Ranks
from hotrow.run import runs
from hotrow.run.build import Parts, build, look_up
from hotrow.run.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from hotrow.run.folder import RunFolder
from hotrow.run.meters import StepClock
from hotrow.run.trainer import NonFiniteError, train_step
from hotrow.setup.setup import Setup
from loops import looped
from packed_data import planted

BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 8]},
    "optimizer": {"sparse": {"name": "sgd", "lr": 0.05}},
    "train": {"batch_size": 32, "threads": 1},
    "memory": "dram",
}
dataset = planted(opened=True)


def parts_of(dataset: PackedDataset, folder: Path, *changes: str) -> Parts:
    config = make_config(apply_overrides({**BASE, "data": str(dataset.path)}, changes))
    return build(Setup.decide(config, dataset, folder))


def batches(dataset: PackedDataset) -> Iterator[tuple[int, Batch]]:
    return enumerate(Loader(dataset.split("train"), 32, shuffle_seed=None).epoch(0))


@looped(("changes", "decay"), [((), 0.01), (("optimizer.dense.weight_decay=0.3",), 0.3)])
def test_adamw_against_torch(dataset: PackedDataset, tmp_path: Path, changes: tuple[str, ...], decay: float) -> None:
    lr = 0.02
    ours = parts_of(dataset, tmp_path, "optimizer.dense.name=adamw", f"optimizer.dense.lr={lr}", *changes)
    theirs = copy.deepcopy(ours.model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=lr, weight_decay=decay, foreach=False, fused=False)
    for step, batch in batches(dataset):
        train_step(ours, batch, step, StepClock())
        for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
            assert other.grad is not None
            own.grad = other.grad.clone()
        optimizer.step()
    for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-6)


@looped("name", ["sgd", "adamw"])
def test_weights_that_fall_for_ever_end_at_zero(dataset: PackedDataset, tmp_path: Path, name: str) -> None:
    """A weight whose input is always zero only decays; as a denormal number it would make every product slow."""
    decay = ["optimizer.dense.lr=0.1", "optimizer.dense.weight_decay=0.5"]
    parts = parts_of(dataset, tmp_path, f"optimizer.dense.name={name}", *decay)
    layer = next(own for own in parts.model.modules() if isinstance(own, torch.nn.Linear))
    with torch.no_grad():
        layer.weight[:, 0] = 1.2e-38
    for step, batch in itertools.islice(batches(dataset), 3):
        batch.dense[:, 0] = 0
        train_step(parts, batch, step, StepClock())
        assert not layer.weight[:, 0].any() and layer.weight[:, 1:].all()
    checkpoint = tmp_path / "checkpoint"
    with torch.no_grad():
        layer.weight[:, 0] = 1e-39
    save_checkpoint(checkpoint, {"model": parts.model})
    load_checkpoint(checkpoint, {"model": parts.model})
    assert not layer.weight[:, 0].any() and layer.weight[:, 1:].all()


def steps(parts: Parts, dataset: PackedDataset, num_steps: int) -> list[torch.Tensor]:
    """All weights and rows after some steps."""
    for step, batch in itertools.islice(batches(dataset), num_steps):
        train_step(parts, batch, step, StepClock())
    return [own.detach().clone() for own in (*parts.model.parameters(), *parts.embedding.weights.values())]


@looped("micro_batches", [1, 4])
@looped("limit", [0.05, 100.0])
def test_clipping_against_torch(dataset: PackedDataset, tmp_path: Path, limit: float, micro_batches: int) -> None:
    changes = f"train.micro_batches={micro_batches}", "optimizer.dense.lr=0.1"
    free, ours = (parts_of(dataset, tmp_path, f"train.clip_norm={each}", *changes) for each in ("null", limit))
    theirs, (_, batch) = copy.deepcopy(ours.model), next(batches(dataset))
    before = [own.clone() for own in ours.embedding.weights.values()]
    with torch.no_grad():
        rows = look_up(ours.model, ours.embedding, batch.sparse)
    rows = rows.clone().requires_grad_()
    binary_cross_entropy_with_logits(theirs(batch.dense, rows), batch.label).backward()
    norm = torch.nn.utils.clip_grad_norm_([*theirs.parameters(), rows], limit)
    assert 0.05 < norm < 100
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    steps(free, dataset, 1)
    steps(ours, dataset, 1)
    for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-7)
    factor = min(1.0, limit / float(norm))
    for was, own, other in zip(before, ours.embedding.weights.values(), free.embedding.weights.values(), strict=True):
        torch.testing.assert_close(own - was, (other - was) * factor, rtol=1e-3, atol=1e-8)


def test_a_norm_that_overflows_changes_nothing(dataset: PackedDataset, tmp_path: Path) -> None:
    parts = parts_of(dataset, tmp_path, "train.clip_norm=1")
    _, batch = next(batches(dataset))
    before = steps(parts, dataset, 0)
    for weight in parts.model.parameters():
        weight.register_hook(lambda grad: torch.full_like(grad, 1e30))
    with pytest.raises(NonFiniteError, match="norm of the gradients"):
        train_step(parts, batch, 0, StepClock())
    assert all(map(torch.equal, before, steps(parts, dataset, 0)))


def newest(run: RunFolder) -> Path:
    checkpoints = list_checkpoints(run.checkpoints)
    return checkpoints[max(checkpoints)]


def test_ranks_cannot_clip_yet(dataset: PackedDataset, tmp_path: Path) -> None:
    config = make_config({**BASE, "data": str(dataset.path), "train": {"clip_norm": 1}})
    with pytest.raises(ValueError, match=r"train\.clip_norm is 1\.0, .*several ranks.* null"):
        Setup.decide(config, dataset, tmp_path, ranks=Ranks(0, 2))


@looped("micro_batches", [1, 4])
@looped("weight", [1.0, 3.0, 0.25])
def test_the_loss_against_torch(dataset: PackedDataset, tmp_path: Path, weight: float, micro_batches: int) -> None:
    """One step of SGD, from the loss as torch's users write it."""
    changes = f"train.pos_weight={weight}", "optimizer.dense.lr=0.1"
    ours = parts_of(dataset, tmp_path, *changes, f"train.micro_batches={micro_batches}")
    theirs, (_, batch) = copy.deepcopy(ours.model), next(batches(dataset))
    with torch.no_grad():
        rows = look_up(ours.model, ours.embedding, batch.sparse).clone()
    criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weight))
    loss = criterion(theirs(batch.dense, rows), batch.label)
    loss.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(train_step(ours, batch, 0, StepClock()), loss.detach(), rtol=1e-5, atol=1e-6)
    for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-7)


def test_metrics_do_not_know_the_options_of_the_loss(dataset: PackedDataset, tmp_path: Path) -> None:
    """The same weights, one step short of the first update, judged with and without the options."""
    judged = []
    for changes in ((), ("train.pos_weight=5",)):
        raw = {**BASE, "data": str(dataset.path), "run": str(tmp_path / f"{len(judged)}/selection")}
        frozen = "optimizer.dense.lr=1e-30", "optimizer.sparse.lr=1e-30", "train.max_steps=1", "train.eval_every=2"
        run = runs.train(make_config(apply_overrides(raw, [*frozen, *changes])))
        lines = [line for line in run.measurements() if line["kind"] == "eval"]
        assert any("losses" in line for line in lines)
        judged.append((run.record.metrics, lines))
    assert judged[0] == judged[1]

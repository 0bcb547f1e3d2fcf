"""Options of training that PyTorch has too: a step with them is the step that torch takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrow.batch import Batch
from hotrow.config.load import apply_overrides, make_config
from hotrow.costs.demand import tables_of
from hotrow.costs.work import Work, work_of
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.run.build import Parts, build
from hotrow.run.meters import Session, StepClock
from hotrow.run.trainer import train_step
from hotrow.setup.setup import Setup

BASE: dict[str, Any] = {
    "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16, 8]},
    "optimizer": {"sparse": {"name": "sgd", "lr": 0.05}},
    "train": {"batch_size": 32, "threads": 1},
    "memory": "dram",
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> PackedDataset:
    return make_dataset(tmp_path_factory.mktemp("options") / "data")


def parts_of(dataset: PackedDataset, folder: Path, *changes: str) -> Parts:
    config = make_config(apply_overrides({**BASE, "data": str(dataset.path)}, changes))
    return build(Setup.decide(config, dataset, folder))


def batches(dataset: PackedDataset) -> Iterator[tuple[int, Batch]]:
    return enumerate(Loader(dataset.split("train"), 32, shuffle_seed=None).epoch(0))


@pytest.mark.parametrize(("changes", "decay"), [((), 0.01), (("optimizer.dense.weight_decay=0.3",), 0.3)])
def test_adamw_against_torch(dataset: PackedDataset, tmp_path: Path, changes: tuple[str, ...], decay: float) -> None:
    lr = 0.02
    ours = parts_of(dataset, tmp_path, "optimizer.dense.name=adamw", f"optimizer.dense.lr={lr}", *changes)
    theirs = copy.deepcopy(ours.model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=lr, weight_decay=decay, foreach=False, fused=False)
    for step, batch in batches(dataset):
        train_step(ours, batch, step, StepClock(Session(10), []))
        for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
            assert other.grad is not None
            own.grad = other.grad.clone()
        optimizer.step()
    for own, other in zip(theirs.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-6)


def test_a_step_with_adamw_is_predicted_as_one_with_adam(dataset: PackedDataset) -> None:
    def work(name: str) -> Work:
        config = make_config(apply_overrides({**BASE, "data": str(dataset.path)}, [f"optimizer.dense.name={name}"]))
        return work_of(config, tables_of(config, dataset), dataset)

    assert work("adamw") == work("adam") != work("sgd")

"""Training in micro-batches, on one process, against a slow model that goes through samples, ids and parts in loops.

The slow model knows tables as matrices of numpy, writes the tree, the order of a row's gradients and every rule again,
and takes the network, whose products are not those of torch to the bit, as it is: once for each micro-batch.
"""

from __future__ import annotations

import gc
import operator
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import BASE, outcome, signal_at
from test_resume import config as config_of
from test_resume import tiers as tiers_of
from test_tbsm_law import BASE as TBSM
from test_tbsm_law import prepared
from torch import Tensor

from hot_rig import copies_in_dram
from hotrow.batch import Batch
from hotrow.config.load import parse_yaml
from hotrow.config.schema import Config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.kernels import ops, tree
from hotrow.placement.tiers import Tiers
from hotrow.run import runs, trainer
from hotrow.setup import setup
from loops import looped
from sampled import sampled

f32 = np.float32
Row = np.ndarray
needs_native = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")
SIZES = (37, 37, 5, 37, 1, 31)
"""Samples of the batches: V divides none of the first, and some are smaller than V."""


def add(left: Any, right: Any) -> Any:
    return right if left is None else left if right is None else left + right


def tree_sum(parts: list[Any]) -> Any:
    """Leaves up to the next power of two; an absent one is skipped."""
    size = 1
    while size < len(parts):
        size *= 2
    level = parts + [None] * (size - len(parts))
    while len(level) > 1:
        level = [add(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def mean_of_squares(g: Row) -> f32:
    partial = np.zeros(16, f32)
    for j, x in enumerate(g):
        partial[j % 16] += x * x
    for half in (8, 4, 2, 1):
        partial = partial[:half] + partial[half : 2 * half]
    return partial[0] / f32(len(g))


def sgd(w: Row, states: list[Row], g: Row, o: dict[str, Any], t: int) -> tuple[Row, list[Row]]:
    return w - f32(o["lr"]) * g, []


def adagrad(w: Row, states: list[Row], g: Row, o: dict[str, Any], t: int) -> tuple[Row, list[Row]]:
    h = states[0] + g * g
    return w - f32(o["lr"]) * (g / (np.sqrt(h) + f32(1e-10))), [h]


def row_wise_adagrad(w: Row, states: list[Row], g: Row, o: dict[str, Any], t: int) -> tuple[Row, list[Row]]:
    h = states[0] + mean_of_squares(g)
    return w - f32(o["lr"]) / (np.sqrt(h) + f32(1e-10)) * g, [h]


def adam(w: Row, states: list[Row], g: Row, o: dict[str, Any], t: int) -> tuple[Row, list[Row]]:
    m = f32(0.9) * states[0] + f32(1 - 0.9) * g
    v = f32(0.999) * states[1] + f32(1 - 0.999) * (g * g)
    lr = f32(o["lr"] * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t))
    return w - lr * (m / (np.sqrt(v) + f32(1e-8))), [m, v]


def ftrl(w: Row, states: list[Row], g: Row, o: dict[str, Any], t: int) -> tuple[Row, list[Row]]:
    z, n = states
    after = n + g * g
    z = z + (g - (np.sqrt(after) - np.sqrt(n)) / f32(o["lr"]) * w)
    shrunk = np.where(np.abs(z) <= f32(o["l1"]), f32(0), z - np.copysign(f32(o["l1"]), z))
    return -(shrunk / ((f32(1) + np.sqrt(after)) / f32(o["lr"]) + f32(o["l2"]))), [z, after]


RULES = {"sgd": sgd, "adagrad": adagrad, "row_wise_adagrad": row_wise_adagrad, "adam": adam, "ftrl": ftrl}


class Slow:
    """Takes the steps of a run of `config` in loops; `parts`, which it does not train, are where it starts."""

    def __init__(self, parts: trainer.Parts, config: Config, num_parts: int) -> None:
        self.parts, self.num_parts, self.steps = parts, num_parts, 0
        self.options = config.optimizer.sparse.model_dump()
        self.halves = config.train.precision == "split_bf16"
        emb = parts.embedding
        self.tables = {table.name: emb.rows(table.name).whole().float().numpy().copy() for table in emb.tables}
        states = {key: rows.whole().numpy().copy() for key, rows in parts.sparse_optimizer.state_rows().items()}
        self.states = {
            table.name: [array for key, array in states.items() if key.split(".")[0] == str(t)]
            for t, table in enumerate(emb.tables)
        }
        self.table_of = {name: table.name for table in emb.tables for name in table.feature_names}

    def row(self, feature: str, row: int) -> Row:
        """What a lookup reads."""
        found = self.tables[self.table_of[feature]][row]
        return (found.view(np.int32) & -65536).view(f32) if self.halves else found

    def ids(self, batch: Batch, feature: str, sample: int) -> list[int]:
        values, offsets, _ = batch.sparse.bags(feature)
        return values[int(offsets[sample]) : int(offsets[sample + 1])].tolist()

    def looked_up(self, batch: Batch, samples: range) -> tuple[Any, dict[str, Tensor]]:
        """What the network takes, and its leaves by feature: pooled rows, or the row of every id."""
        leaves = {}
        for name in self.table_of:
            bags = [[self.row(name, id) for id in self.ids(batch, name, sample)] for sample in samples]
            dim = self.tables[self.table_of[name]].shape[1]
            rows = [row for bag in bags for row in bag]
            if self.parts.model.lookup == "pooled":
                rows = [sum(bag, np.zeros(dim, f32)) for bag in bags]
            leaves[name] = torch.from_numpy(np.array(rows, f32).reshape(len(rows), dim)).requires_grad_()
        if self.parts.model.lookup == "pooled":
            return torch.cat([*leaves.values()], dim=1), leaves
        lengths = {name: [len(self.ids(batch, name, sample)) for sample in samples] for name in leaves}
        offsets = {name: torch.tensor([0, *np.cumsum(own).tolist()]) for name, own in lengths.items()}
        return {name: (values, offsets[name]) for name, values in leaves.items()}, leaves

    def part(self, batch: Batch, samples: range) -> dict[Any, Any] | None:
        """The sums of one micro-batch: its loss, the gradients of weights, and of rows by (table, row)."""
        if not samples:
            return None
        rows, leaves = self.looked_up(batch, samples)
        own = slice(samples.start, samples.stop)
        logits = self.parts.dense.outputs(self.parts.model, batch.dense[own], rows)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label[own], reduction="sum")
        loss = losses / len(batch)
        self.parts.dense_optimizer.zero_grad()
        loss.backward()
        found: dict[Any, Any] = {"loss": loss.detach().clone()}
        found |= {name: weight.grad.clone() for name, weight in self.parts.model.named_parameters()}
        for name, leaf in leaves.items():
            position = 0
            for b, sample in enumerate(samples):
                for id in self.ids(batch, name, sample):
                    at = b if self.parts.model.lookup == "pooled" else position
                    key, g = (self.table_of[name], id), leaf.grad[at].numpy()
                    found[key] = found[key] + g if key in found else g.copy()
                    position += 1
        return found

    def step(self, batch: Batch) -> Tensor:
        starts = [len(batch) * v // self.num_parts for v in range(self.num_parts + 1)]
        parts = [self.part(batch, range(first, last)) for first, last in pairwise(starts)]
        keys = dict.fromkeys(key for part in parts if part is not None for key in part)
        sums = {key: tree_sum([None if part is None else part.get(key) for part in parts]) for key in keys}
        for name, weight in self.parts.model.named_parameters():
            weight.grad = sums.pop(name)
        self.parts.dense_optimizer.step()
        self.steps += 1
        loss: Tensor = sums.pop("loss")
        for (table, row), g in sums.items():
            w, states = self.tables[table], self.states[table]
            own = [state[row] for state in states]
            w[row], changed = RULES[self.options["name"]](w[row], own, g, self.options, self.steps)
            for state, values in zip(states, changed, strict=True):
                state[row] = values
        return loss


def test_sums_let_go_of_their_leaves() -> None:
    """A cycle held the rows and gradients of every batch until Python looked for cycles, hundreds of steps later."""

    class Batches(list[int]):
        """A list to which there are weak references."""

    held = Batches([1, 2, 3, 4])
    seen, were_sought = weakref.ref(held), gc.isenabled()
    gc.disable()
    try:
        assert tree.sums((leaf for leaf in held), 0, 3, operator.add) == {(0, 2): 3, (2, 1): 3}
        del held
        assert seen() is None
    finally:
        if were_sought:
            gc.enable()


@dataclass
class Data:
    path: Path
    batches: list[Batch]

    @classmethod
    def of(cls, dataset: PackedDataset) -> Data:
        loader = iter(Loader(dataset.split("train"), sum(SIZES), shuffle_seed=3).epoch(0))
        whole = next(loader)
        ends = np.cumsum([0, *SIZES]).tolist()
        pairs = [(whole.dense[a:b], whole.sparse.samples(a, b), whole.label[a:b]) for a, b in pairwise(ends)]
        return cls(dataset.path, [Batch(*each) for each in pairs])

    def config(self, run: Path, changes: list[str], memory: Any = "dram", base: dict[str, Any] = BASE) -> Config:
        return config_of(self.path, run, changes, memory, {**base, "optimizer": {}})

    def tiers(self, changes: list[str], base: dict[str, Any] = BASE) -> dict[str, Any]:
        return tiers_of(self.path, changes, {**base, "optimizer": {}})

    def parts(self, config: Config) -> trainer.Parts:
        assert config.run is not None
        return trainer.build(setup.Setup.decide(config, PackedDataset.open(self.path), Path(config.run)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Data:
    """One-hot features, and a multi-hot one that shares a table with one of them."""
    return Data.of(make_dataset(tmp_path_factory.mktemp("micro") / "data", table_rows=(600, 20, 1400), counts=True))


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = prepared(tmp_path_factory.mktemp("micro") / "tbsm", num_events=2600)
    return Data.of(PackedDataset.open(path))


def assert_same(ours: Any, truth: Any, what: object) -> None:
    mine, other = (torch.as_tensor(own).detach().contiguous().view(torch.int32) for own in (ours, truth))
    assert torch.equal(mine, other), what


def check_steps(
    data: Data, folder: Path, changes: list[str], num_parts: int, *, tiered: bool = True, base: dict[str, Any] = BASE
) -> None:
    changes = [*changes, f"train.micro_batches={num_parts}"]
    plain = data.config(folder / "plain", changes, base=base)
    slow = Slow(data.parts(plain), plain, num_parts)
    losses = [slow.step(batch) for batch in data.batches]
    placed = [plain]
    if tiered and ops.backend().name == "native":
        placed.append(data.config(folder / "tiers", changes, data.tiers(changes, base), base))
    for config in placed:
        parts = data.parts(config)
        assert (parts.embedding.placement.find(Tiers) is None) == (config is plain)
        for step, (batch, truth) in enumerate(zip(data.batches, losses, strict=True)):
            loss = trainer.train_step(parts, batch, step, trainer.StepClock())
            assert_same(loss, truth, (config.memory, step))
        for name, weight in slow.parts.model.named_parameters():
            assert_same(parts.model.get_parameter(name), weight, (config.memory, name))
        for table, rows in slow.tables.items():
            assert_same(parts.embedding.rows(table).whole().float(), rows, (config.memory, table))
        for t, states in enumerate(slow.states.values()):
            own = [r for key, r in parts.sparse_optimizer.state_rows().items() if key.split(".")[0] == str(t)]
            for mine, other in zip(own, states, strict=True):
                assert_same(mine.whole(), other, (config.memory, t, "state"))
        parts.embedding.placement.close()


OPTIMIZERS = {
    "sgd": ["optimizer.dense.name=sgd", "optimizer.sparse={name: sgd, lr: 0.1}"],
    "adagrad": ["optimizer.dense.name=adagrad", "optimizer.sparse.name=adagrad"],
    "row-wise adagrad": ["optimizer.dense.name=adam", "optimizer.dense.lr=0.01"],
    "adam": ["optimizer.dense.name=sgd", "optimizer.sparse={name: adam, lr: 0.01}"],
    "ftrl": ["optimizer.dense.name=sgd", "optimizer.sparse={name: ftrl, lr: 0.1, l1: 0.01, l2: 0.01}"],
}


@looped(("optimizer", "num_parts"), sampled(OPTIMIZERS, [2, 3, 4, 8], pairs=False))
def test_steps_are_those_of_plain_loops(data: Data, tmp_path: Path, optimizer: str, num_parts: int) -> None:
    check_steps(data, tmp_path, OPTIMIZERS[optimizer], num_parts)


@pytest.mark.parametrize("changes", [
    ["train.precision=split_bf16", "optimizer.sparse={name: sgd, lr: 0.1}"],
    ["model={name: dcn, embedding_dim: 8, deep_mlp: [16]}"],
    ["model={first_order: true, embedding_dim: 4, bottom_mlp: [], top_mlp: [8]}"],
], ids=["split weights", "dcn", "first order"])  # fmt: skip
def test_other_models_and_storages(data: Data, tmp_path: Path, changes: list[str]) -> None:
    check_steps(data, tmp_path, changes, 3, tiered=False)


def test_sequences(histories: Data, tmp_path: Path) -> None:
    check_steps(histories, tmp_path, ["optimizer.sparse={name: adagrad, lr: 0.1}"], 4, base=TBSM)


def test_one_part_is_no_part(data: Data, tmp_path: Path) -> None:
    """SGD then still changes a row once for each occurrence."""
    losses = []
    for changes in ([], ["train.micro_batches=1"]):
        config = data.config(tmp_path / "run", [*OPTIMIZERS["sgd"], *changes])
        parts = data.parts(config)
        losses.append([trainer.train_step(parts, b, k, trainer.StepClock()) for k, b in enumerate(data.batches)])
    assert_same(*map(torch.stack, losses), "losses")


def test_frozen_tables_stay(data: Data, tmp_path: Path) -> None:
    config = data.config(tmp_path / "run", ["train.micro_batches=3"])
    truth, parts = data.parts(config), data.parts(config)
    parts.embedding.switches["t0"].requires_grad_(False)
    before = parts.embedding.float32("t0").clone()
    for each in (truth, parts):
        trainer.train_step(each, data.batches[0], 0, trainer.StepClock())
    assert_same(parts.embedding.float32("t0"), before, "frozen")
    assert not torch.equal(truth.embedding.float32("t0"), before)
    for name in ("t1", "t2"):
        assert_same(parts.embedding.float32(name), truth.embedding.float32(name), name)


def test_what_is_not_finite_is_named_and_changes_nothing(data: Data, tmp_path: Path) -> None:
    parts = data.parts(data.config(tmp_path / "run", ["train.micro_batches=4"]))
    before = [weight.clone() for weight in parts.model.parameters()], parts.embedding.float32("t2").clone()
    batch = replace(data.batches[0], dense=data.batches[0].dense.clone())
    batch.dense[30, 1] = torch.inf
    with pytest.raises(trainer.NonFiniteError, match="dense input of sample 30, column 1 is inf"):
        trainer.train_step(parts, batch, 0, trainer.StepClock())
    for weight, own in zip(parts.model.parameters(), before[0], strict=True):
        assert_same(weight, own, "weights")
    assert_same(parts.embedding.float32("t2"), before[1], "rows")
    assert torch.isfinite(trainer.train_step(parts, data.batches[1], 1, trainer.StepClock()))


RUNS = {
    "early stopping": ["train.early_stopping=2", "optimizer.dense.lr=0.3"],
    "split weights": ["train.precision=split_bf16", "optimizer.sparse.name=sgd"],
    "fae": ["hot.schedule=fae", "hot.small_table=0", "hot.budget=50000", "hot.rate=40"],
    "window": ["hot.schedule=window", "hot.small_table=0", "hot.budget=50000"],
}


def config(data: Data, run: Path, changes: list[str], memory: Any = "dram") -> Config:
    return config_of(data.path, run, changes, memory)


@pytest.mark.slow_but("window")
@needs_native
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_a_run_in_tiers_that_was_stopped_is_the_run_in_dram(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    changes = [*changes, "train.micro_batches=3"]
    whole = runs.train(config(data, tmp_path / "whole", changes))
    expected = outcome(whole)
    with monkeypatch.context() as patch:
        signal_at(patch, 6, signal.SIGINT)
        run = runs.train(config(data, tmp_path / "tiers", changes, data.tiers(changes)))
    assert (run.record.status, run.record.steps) == ("interrupted", 6)
    found = outcome(runs.resume(run.path))
    for each in (found, expected):
        each["state"]["turns"] = each["state"]["turns"]["order"]
    assert found == expected


def test_copies_of_hot_rows_change_nothing(data: Data, tmp_path: Path) -> None:
    changes = [*RUNS["fae"], "train.micro_batches=4", "optimizer.sparse.name=adam", "optimizer.sparse.lr=0.01"]
    found = []
    plain = runs.train(config(data, tmp_path / "plain", changes))
    with copies_in_dram() as steps:
        copied = runs.train(config(data, tmp_path / "copied", changes))
    assert len(steps) > 5
    for run in (plain, copied):
        each = outcome(run)
        each["state"]["turns"] = each["state"]["turns"]["order"]
        found.append(each)
    assert found[0] == found[1]


def test_a_run_keeps_its_number_of_parts(data: Data, tmp_path: Path) -> None:
    changes = ["train.max_steps=2", "train.eval_every=null"]
    for name, more, number in (("one", [], 1), ("five", ["train.micro_batches=5"], 5)):
        run = runs.train(config(data, tmp_path / name, [*changes, *more]))
        raw = parse_yaml((run.path / "config.yaml").read_text(), origin="config.yaml")
        assert raw["train"]["micro_batches"] == number
        with pytest.raises(ValueError, match=r"a resumed run keeps its train\.micro_batches"):
            runs.resume(run.path, ["train.micro_batches=2"])

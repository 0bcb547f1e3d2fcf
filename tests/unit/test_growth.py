"""EmbeddingCollection.grow against collections that had all their rows from the start."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow import EmbeddingCollection, KeyedJaggedTensor, Memory, TableConfig
from hotrow.kernels import ops
from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from hotrow.placement.tiers import Tiers
from hotrow.tables import Dtype, Uniform

OLD, NEW, WHOLE = 3000, 4500, 7
"""Rows of table "a" before and after, and of a table "b" that lies in memory whole."""
BOUND = OLD**-0.5
NATIVE = ops.backend().name == "native"
"""Without it fewer tests: its twin takes many times as long, and does not count its bytes."""
OPTIMIZERS: dict[str, Callable[[EmbeddingCollection], SparseOptimizer]] = {
    "sgd": lambda emb: SGD(emb, lr=0.001),
    "adagrad": lambda emb: Adagrad(emb, lr=0.1, initial_accumulator_value=0.25),
    "row_wise_adagrad": lambda emb: RowWiseAdagrad(emb, lr=0.1),
    "adam": lambda emb: Adam(emb, lr=0.01),
    "ftrl": lambda emb: FTRL(emb, lr=0.1, l1=0.01, l2=0.02),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:table .* is read and written by 40 threads"),
    pytest.mark.filterwarnings("ignore:table .* has grown to .* rows. tables take"),
]


def make(place: Path | None, rows: int, *, whole: int = WHOLE, dtype: Dtype = "float32", **init: Any) -> Any:
    tables = [
        TableConfig(
            name="a", num_embeddings=rows, embedding_dim=8, feature_names=("a",), dtype=dtype, init=Uniform(**init)
        ),
        TableConfig(
            name="b", num_embeddings=whole, embedding_dim=5, feature_names=("b",), dtype=dtype, init=Uniform(bound=0.5)
        ),
    ]
    return EmbeddingCollection(tables, memory=None if place is None else Memory(dram=60_000, file=place), seed=5)


def batch_of(seed: int, rows: int, whole: int = WHOLE) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, limit, (400,), generator=generator) for limit in (rows, whole)]
    return KeyedJaggedTensor(("a", "b"), torch.cat(ids))


def step(emb: EmbeddingCollection, optimizer: SparseOptimizer, batch: KeyedJaggedTensor) -> None:
    (emb(batch) ** 2).sum().backward()
    optimizer.step()


def arrays(emb: EmbeddingCollection, optimizer: SparseOptimizer | None) -> list[Tensor]:
    found = [emb.read_rows(name, slice(None)) for name in emb.weights]
    for group in optimizer.param_groups if optimizer else ():
        for name in optimizer.state_names:  # type: ignore[union-attr]
            state = optimizer.state[group["params"][0]][name]  # type: ignore[union-attr]
            if emb.placement.find(Tiers) is not None:
                table = list(emb.weights).index(group["name"])
                with emb.placement.in_slots(table, torch.arange(len(state))) as slots:
                    state = state[slots]
            found.append(state)
    return [array.contiguous().view(torch.int32) for array in found]


def check_same(ours: list[Tensor], truth: list[Tensor]) -> None:
    assert [a.shape for a in ours] == [a.shape for a in truth]
    assert [int((a != b).sum()) for a, b in zip(ours, truth, strict=True)] == [0] * len(truth)


@pytest.fixture(params=["dram", "tiers"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "rows" if request.param == "tiers" else None


@pytest.mark.parametrize("optimizer", OPTIMIZERS if NATIVE else ["ftrl"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_rows_that_were_always_there(place: Path | None, optimizer: str, dtype: Dtype) -> None:
    """The rates change before growth: initial states are those of the rates the optimizer was made with."""
    emb, truth = make(place, OLD, dtype=dtype), make(None, NEW, whole=40, dtype=dtype, bound=BOUND)
    sides = [(each, OPTIMIZERS[optimizer](each)) for each in (emb, truth)]
    for each, own in sides:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(own, gamma=0.5)
        for seed in range(5):
            step(each, own, batch_of(seed, OLD))
        scheduler.step()
        out = each(batch_of(5, OLD))  # a batch in flight
        if each is emb:
            assert each.grow("a", NEW) is each.grow("b", 40) is None
        out.sum().backward()
        own.step()
        for seed in range(6, 12):
            step(each, own, batch_of(seed, NEW, 40))
        scheduler.step()
    check_same(arrays(*sides[0]), arrays(*sides[1]))
    assert [table.num_embeddings for table in emb.tables] == [NEW, 40]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_optimizer_and_twice(place: Path | None, dtype: Dtype) -> None:
    emb, truth = make(place, OLD, dtype=dtype), make(None, NEW, dtype=dtype, bound=BOUND)
    emb.grow("a", OLD + 10)
    emb.grow("a", NEW)
    check_same(arrays(emb, None), arrays(truth, None)) if place is None else None
    sides = [(each, OPTIMIZERS["ftrl"](each)) for each in (emb, truth)]
    for each, own in sides:
        step(each, own, batch_of(1, NEW))
    check_same(arrays(*sides[0]), arrays(*sides[1]))


@pytest.mark.parametrize("depth", [1, 4])
def test_batches_that_were_announced(place: Path | None, depth: int) -> None:
    """Those with ids of rows that the table did not have when they were announced, too."""
    emb, truth = make(place, OLD), make(None, NEW, bound=BOUND)
    sides = [(each, OPTIMIZERS["adagrad"](each)) for each in (emb, truth)]
    for each, own in sides:
        batches = [batch_of(seed, OLD if seed < 4 else NEW) for seed in range(12)]
        for seed, batch in enumerate(hotrow.lookahead(batches, each, depth=depth)):
            if seed == 3 and each is emb:
                each.grow("a", NEW)
            step(each, own, batch)
    check_same(arrays(*sides[0]), arrays(*sides[1]))


def test_tensors_stay_the_objects_they_are() -> None:
    emb = make(None, OLD)
    optimizer = Adagrad(emb, lr=0.1)
    weight, state, view = emb.weights["a"], optimizer.state[emb.weights["a"]]["sum"], emb.weights["a"][:5]
    before = view.clone()
    emb.grow("a", NEW)
    assert emb.weights["a"] is weight is optimizer.param_groups[0]["params"][0]
    assert optimizer.state[weight]["sum"] is state and len(state) == len(weight) == NEW
    emb.weights["a"][:5] = 9
    assert torch.equal(view, before), "what somebody cut out of the old array is his"
    assert emb.tables[0].init.bound == BOUND


def test_copies_grow_on_their_own() -> None:
    emb = make(None, OLD)
    other = copy.deepcopy(emb)
    optimizer = Adagrad(other, lr=0.1)
    other.grow("a", NEW)
    step(other, optimizer, batch_of(1, NEW))
    assert emb.weights["a"].shape == (OLD, 8) and other.weights["a"].shape == (NEW, 8)


def test_state_dicts() -> None:
    emb = make(None, OLD)
    optimizer = Adagrad(emb, lr=0.1)
    emb.grow("a", NEW)
    step(emb, optimizer, batch_of(1, NEW))
    small, grown = make(None, OLD), make(None, OLD)
    optimizers = [Adagrad(each, lr=0.1) for each in (small, grown)]
    grown.grow("a", NEW)
    grown.load_state_dict(emb.state_dict())
    optimizers[1].load_state_dict(optimizer.state_dict())
    check_same(arrays(grown, optimizers[1]), arrays(emb, optimizer))
    with pytest.raises(RuntimeError, match=r"a\.weight has shape \(4500, 8\); the table is \(3000, 8\)"):
        small.load_state_dict(emb.state_dict())
    with pytest.raises(ValueError, match=r"the state is .*4500.*, Adagrad keeps .*3000"):
        optimizers[0].load_state_dict(optimizer.state_dict())


def test_checkpoints(place: Path | None, tmp_path: Path) -> None:
    emb = make(place, OLD)
    parts: dict[str, Any] = {"embedding": emb, "sparse_optimizer": RowWiseAdagrad(emb, lr=0.1)}
    emb.grow("a", NEW)
    step(emb, parts["sparse_optimizer"], batch_of(1, NEW))
    saved = hotrow.save_checkpoint(tmp_path / "saved", parts)
    for other in (None, tmp_path / "other"):
        grown, small = make(other, OLD), make(other, OLD)
        own = {"embedding": grown, "sparse_optimizer": RowWiseAdagrad(grown, lr=0.1)}
        grown.grow("a", NEW)
        hotrow.load_checkpoint(saved, own)
        check_same(arrays(grown, own["sparse_optimizer"]), arrays(emb, parts["sparse_optimizer"]))
        with pytest.raises(
            ValueError,
            match=r"weight (is F32 \[4500, 8\]; this model has .* \[3000, 8\]|has 4,500 rows; this model's has 3,000)",
        ):
            hotrow.load_checkpoint(saved, {"embedding": small})


@pytest.mark.parametrize("trained", [False, True])
def test_checkpoints_before_and_after_growth(place: Path | None, tmp_path: Path, *, trained: bool) -> None:
    """In tiers the second goes on with the chain of the first, which has fewer rows."""
    emb = make(place, OLD)
    parts: dict[str, Any] = {"embedding": emb, "sparse_optimizer": RowWiseAdagrad(emb, lr=0.1)}
    step(emb, parts["sparse_optimizer"], batch_of(1, OLD))
    hotrow.save_checkpoint(tmp_path / "step-1", parts)
    emb.grow("a", NEW)
    if trained:
        step(emb, parts["sparse_optimizer"], batch_of(2, NEW))
    saved = hotrow.save_checkpoint(tmp_path / "step-2", parts)
    grown = make(tmp_path / "other", OLD)
    own = {"embedding": grown, "sparse_optimizer": RowWiseAdagrad(grown, lr=0.1)}
    grown.grow("a", NEW)
    hotrow.load_checkpoint(saved, own)
    check_same(arrays(grown, own["sparse_optimizer"]), arrays(emb, parts["sparse_optimizer"]))


@pytest.mark.parametrize("rows", [OLD - 1, 0, -1, 4e3, "4000", None])
def test_fewer_rows_are_refused(place: Path | None, rows: Any) -> None:
    emb = make(place, OLD)
    with pytest.raises(ValueError, match=r"table 'a' has 3,000 rows and cannot be given .*: tables only grow"):
        emb.grow("a", rows)
    assert emb.weights["a"].shape[0] == emb.tables[0].num_embeddings == OLD


def test_unknown_tables_and_too_many_rows(tmp_path: Path) -> None:
    emb = make(tmp_path, OLD)
    with pytest.raises(ValueError, match="there is no table 'c' to grow; the tables are a, b"):
        emb.grow("c", NEW)
    with pytest.raises(ValueError, match=r"table 'a' has 2,147,483,647 rows; .*fewer than 2,147,483,647"):
        emb.grow("a", 2**31 - 1)
    assert emb.tables[0].num_embeddings == OLD


def test_ids_beyond_are_refused_until_it_has_grown(place: Path | None) -> None:
    emb = make(place, OLD)
    batch = batch_of(1, OLD)
    batch.values[0] = OLD
    for rows in (OLD, OLD + 1):
        emb.grow("a", rows)
        if rows == OLD:
            with pytest.raises(ValueError, match="id 3000 is outside its table of 3000 rows"):
                emb(batch)
    assert emb(batch).shape == (400, 13)


def test_what_goes_over_the_budget_is_told(tmp_path: Path) -> None:
    emb = make(tmp_path, OLD)
    emb(batch_of(1, OLD))
    before = emb.placement.counters()["a"]["num_bytes"]
    with pytest.warns(UserWarning, match=r"table 'b' has grown to 5,000 rows: tables take [\d.]+ KiB more of memory"):
        emb.grow("b", 5000)
    assert emb.placement.slots[1] == (5000, 0), "it stays in memory whole"
    emb.grow("a", 9000)
    after = emb.placement.counters()["a"]["num_bytes"]
    assert after == before + 2 * 752 * NATIVE  # whole words of two bits for each row

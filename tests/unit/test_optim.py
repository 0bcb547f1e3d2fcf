"""Sparse optimizers as torch.optim.Optimizer: groups, schedulers, state and what they refuse."""

import copy
from typing import Any

import pytest
import torch

from hotrow import TableConfig
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad, SplitSGDBF16
from hotrow.run.schedule import Schedule
from hotrow.tables import Dtype
from loops import looped

ALL = [SGD, Adagrad, RowWiseAdagrad, Adam, FTRL]
ADAPTIVE = [Adagrad, RowWiseAdagrad]


def make(seed: int = 0, lr_scale: float = 1.0, dtype: Dtype = "float32") -> EmbeddingCollection:
    tables = [
        TableConfig(name="a", num_embeddings=10, embedding_dim=3, feature_names=("a",), dtype=dtype),
        TableConfig(name="b", num_embeddings=20, embedding_dim=2, feature_names=("b",), dtype=dtype, lr_scale=lr_scale),
    ]
    return EmbeddingCollection(tables, seed=seed)


def train(emb: EmbeddingCollection, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 10, (6, 2), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (emb(ids) ** 2).sum().backward()
        optimizer.step()


@looped(("optimizer_class", "shape"), [(Adagrad, (10, 3)), (RowWiseAdagrad, (10,))])
def test_state_is_one_sum_per_element_or_row(optimizer_class: type, shape: tuple[int, ...]) -> None:
    emb = make()
    optimizer = optimizer_class(emb, lr=0.1, initial_accumulator_value=0.25)
    total = optimizer.state[emb.weights["a"]]["sum"]
    assert total.shape == shape and (total == 0.25).all()
    (2.0 * emb(torch.tensor([[1, 2]]))).sum().backward()
    before = emb.weights["a"][1].clone()
    optimizer.step()
    assert (total[1] == 4.25).all() and (total[0] == 0.25).all()
    torch.testing.assert_close(emb.weights["a"][1], before - 0.1 * 2.0 / 4.25**0.5)


@looped("optimizer_class", ALL)
def test_one_group_per_table_with_its_name(optimizer_class: type) -> None:
    emb = make(lr_scale=3.0)
    optimizer = optimizer_class(emb, lr=0.1)
    assert [(g["name"], g["lr"], g["lr_scale"]) for g in optimizer.param_groups] == [("a", 0.1, 1.0), ("b", 0.1, 3.0)]
    assert [g["params"][0] is emb.weights[g["name"]] for g in optimizer.param_groups] == [True, True]


def test_each_table_has_its_own_rate() -> None:
    emb = make()
    optimizer = SGD(emb, lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.0
    before = emb.weights["a"].clone()
    emb(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert torch.equal(emb.weights["a"], before)
    assert (emb.weights["b"][2] < -0.5).all()


@looped("optimizer_class", ALL)
def test_step_consumes_and_zero_grad_drops(optimizer_class: type) -> None:
    emb = make()
    optimizer = optimizer_class(emb, lr=0.1)
    ids = torch.tensor([[1, 2]])
    emb(ids).sum().backward()
    optimizer.step()
    assert emb.pending == []
    after = emb.weights["a"].clone()
    optimizer.step()
    emb(ids).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(emb.weights["a"], after)


def test_closure_is_called_with_gradients_on() -> None:
    emb = make()
    optimizer = SGD(emb, lr=0.1)

    def closure() -> torch.Tensor:
        loss = emb(torch.tensor([[1, 2]])).sum()
        loss.backward()
        return loss

    before = emb.weights["a"][1].clone()
    loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor)
    torch.testing.assert_close(emb.weights["a"][1], before - 0.1)


@looped("dtype", ["float32", "float16", "bfloat16"])
@looped("optimizer_class", ALL)
def test_resume_from_state_dicts_is_bit_equal(optimizer_class: type, dtype: Dtype) -> None:
    straight = make(dtype=dtype)
    optimizer = optimizer_class(straight, lr=0.1)
    train(straight, optimizer, range(3))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    train(straight, optimizer, range(3, 6))

    resumed = make(seed=9, dtype=dtype)
    other = optimizer_class(resumed, lr=0.7)
    train(resumed, other, range(2))
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert other.param_groups[0]["lr"] == 0.1
    train(resumed, other, range(3, 6))
    for name in ("a", "b"):
        assert torch.equal(resumed.float32(name), straight.float32(name))
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert all(state.dtype == torch.float32 and torch.equal(state, theirs[name]) for name, state in mine.items())


@looped(("optimizer_class", "name"), [(Adagrad, "sum"), (RowWiseAdagrad, "sum"), (Adam, "exp_avg_sq")])
def test_loading_keeps_the_state_in_place(optimizer_class: type, name: str) -> None:
    emb = make()
    optimizer = optimizer_class(emb, lr=0.1)
    total = optimizer.state[emb.weights["a"]][name]
    train(emb, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train(emb, optimizer, range(2, 3))
    optimizer.load_state_dict(state)
    assert optimizer.state[emb.weights["a"]][name] is total
    assert torch.equal(total, state["state"][0][name])


def test_load_refuses_another_optimizers_state() -> None:
    emb = make()
    total = Adagrad(emb, lr=0.1)
    with pytest.raises(ValueError, match=r"the state is {0: {'sum': \(10,\)}.*, Adagrad keeps {0: {'sum': \(10, 3\)"):
        total.load_state_dict(RowWiseAdagrad(emb, lr=0.1).state_dict())
    with pytest.raises(ValueError, match=r"the state is {}, Adagrad keeps"):
        total.load_state_dict(SGD(emb, lr=0.1).state_dict())
    renamed = SGD(emb, lr=0.1).state_dict()
    renamed["param_groups"][0]["name"] = "z"
    with pytest.raises(ValueError, match=r"of tables \['z', 'b'\], this optimizer's are \['a', 'b'\]"):
        SGD(emb, lr=0.1).load_state_dict(renamed)


@looped("lr", [0.0, -1.0, float("nan"), float("inf")])
@looped("optimizer_class", ALL)
def test_lr_must_be_positive(optimizer_class: type, lr: float) -> None:
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__}: lr is {lr}; it must be a positive number"):
        optimizer_class(make(), lr=lr)


@looped("lr", [float("nan"), float("inf"), -float("inf")])
@looped("optimizer_class", ALL)
def test_a_rate_that_is_no_longer_finite_changes_nothing(optimizer_class: type, lr: float) -> None:
    """A schedule that divides by zero would make every row of the batch NaN, whose gradients are finite."""
    emb = make()
    optimizer = optimizer_class(emb, lr=0.1)
    before = [w.clone() for w in emb.weights.values()]
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[1]["lr"] = lr
    emb(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    with pytest.raises(ValueError, match=f"table 'b': lr is {lr} and lr_scale 1.0; no row has changed: both must be"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.1
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"] and len(emb.pending) == 1
    assert all(torch.equal(w, b) for w, b in zip(emb.weights.values(), before, strict=True))
    for k, arrays in state["state"].items():
        assert all(torch.equal(after["state"][k][name], array) for name, array in arrays.items())


@looped("optimizer_class", ADAPTIVE)
@looped("name", ["eps", "initial_accumulator_value"])
def test_eps_and_initial_value_must_not_be_negative(optimizer_class: type, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1; it must be 0 or a positive number"):
        optimizer_class(make(), lr=0.1, **{name: -1})


def test_adam_against_torch_sparse_adam() -> None:
    """Row-lazy, bias-corrected by the number of steps: ids repeat within and across steps, some steps skip a row."""
    emb = make()
    twins = {name: torch.nn.EmbeddingBag.from_pretrained(w.clone(), freeze=False, mode="sum", sparse=True)
             for name, w in emb.weights.items()}  # fmt: skip
    ours = Adam(emb, lr=0.05, betas=(0.8, 0.95))
    theirs = torch.optim.SparseAdam([twin.weight for twin in twins.values()], lr=0.05, betas=(0.8, 0.95))
    for step in range(12):
        ids = torch.randint(0, 10, (6, 2), generator=torch.Generator().manual_seed(step))
        (emb(ids) ** 2).sum().backward()
        ours.step()
        theirs.zero_grad()
        pooled = [twin(column[:, None]) for twin, column in zip(twins.values(), ids.T, strict=True)]
        (torch.cat(pooled, 1) ** 2).sum().backward()
        theirs.step()
        for name, twin in twins.items():
            torch.testing.assert_close(emb.weights[name], twin.weight.detach(), rtol=1e-5, atol=1e-6)


def test_ftrl_starts_from_the_initial_rows_and_l1_makes_zeros() -> None:
    emb = make()
    before = emb.weights["a"].clone()
    (0.0 * emb(torch.tensor([[1, 2], [3, 4]]))).sum().backward()
    optimizer = FTRL(emb, lr=0.5, l1=0.01, l2=0.1)
    optimizer.step()
    torch.testing.assert_close(emb.weights["a"], before, rtol=1e-6, atol=0)
    strong = FTRL(emb, lr=0.5, l1=100.0)
    strong.state[emb.weights["a"]]["z"].zero_()
    emb(torch.tensor([[1, 2]])).sum().backward()
    strong.step()
    assert emb.weights["a"][1].tolist() == [0.0, 0.0, 0.0] and emb.weights["a"][3].all()


@looped("betas", [(1.0, 0.9), (0.9, -0.1), (float("nan"), 0.9)])
def test_betas_must_be_shares(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"Adam: betas are .*; both must lie in \[0, 1\)"):
        Adam(make(), betas=betas)


def test_a_refused_step_does_not_count() -> None:
    emb = make()
    optimizer = Adam(emb, lr=0.1)
    emb(torch.tensor([[1, 2]])).sum().backward()
    emb.pending[0].sparse.values[0] = -1
    with pytest.raises(ValueError, match="id -1"):
        optimizer.step()
    assert [group["steps"] for group in optimizer.param_groups] == [0, 0]


def test_an_altered_batch_is_refused_and_changes_nothing() -> None:
    emb = make()
    optimizer = Adagrad(emb, lr=0.1)
    ids = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64)
    out = emb(ids)
    out.sum().backward()
    emb.pending[0].sparse.values[3] = 20
    before = {name: w.clone() for name, w in emb.weights.items()}
    with pytest.raises(ValueError, match="feature 'b', sample 1, position 0: id 20"):
        optimizer.step()
    assert all(torch.equal(before[name], emb.weights[name]) for name in before)


def test_ftrl_starts_alike_in_every_storage() -> None:
    plain, halves, rounded = (FTRL(make(dtype=d), lr=0.5, l1=0.01) for d in ("float32", "bfloat16", "float16"))
    for ours, theirs in zip(halves.state.values(), plain.state.values(), strict=True):
        assert torch.equal(ours["z"], theirs["z"])
    for ours, theirs in zip(rounded.state.values(), plain.state.values(), strict=True):
        torch.testing.assert_close(ours["z"], theirs["z"], rtol=1e-3, atol=1e-3)


def dense(seed: int = 3) -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(7, 5)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    for k, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * seed + k))


def upper(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -(2**16)).view(torch.float32)


@looped("weight_decay", [0.0, 0.1])
def test_split_sgd_against_torch_sgd(weight_decay: float) -> None:
    """The same gradients: w follows torch's to a rounding a step, and the parameters are its upper halves."""
    ours, theirs = dense(), dense()
    split = SplitSGDBF16(ours.parameters(), lr=0.01, weight_decay=weight_decay)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.01, weight_decay=weight_decay)
    for seed in range(20):
        for model, optimizer in ((ours, split), (theirs, plain)):
            set_gradients(model, seed)
            optimizer.step()
        for parameter, w, expected in zip(ours.parameters(), split.weights(), theirs.parameters(), strict=True):
            torch.testing.assert_close(w, expected.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(parameter.detach(), upper(w))


def test_split_sgd_leaves_what_has_no_gradient_and_takes_each_group_at_its_rate() -> None:
    model = dense()
    before = copy.deepcopy(model)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    optimizer = SplitSGDBF16(groups, lr=0.25)
    model.bias.grad = torch.ones(10)[::2]  # not contiguous
    optimizer.step()
    assert torch.equal(optimizer.weights()[0], before.weight.detach())
    assert torch.equal(optimizer.weights()[1], before.bias.detach() - 0.25)
    model.weight.grad = torch.ones(7, 5).T
    optimizer.step()
    assert torch.equal(optimizer.weights()[0], before.weight.detach() - 0.5)


def test_split_sgd_keeps_updates_that_bfloat16_would_lose() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SplitSGDBF16([parameter], lr=2.0**-12)
    for _ in range(1000):
        parameter.grad = -torch.ones(3)
        optimizer.step()
    assert (optimizer.weights()[0] == 1 + 1000 * 2.0**-12).all()
    assert torch.equal(parameter.detach(), upper(optimizer.weights()[0]))


def test_split_sgd_resumes_and_takes_over_from_torch_sgd() -> None:
    model = dense()
    optimizer = SplitSGDBF16(model.parameters(), lr=0.3)
    set_gradients(model, 0)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    set_gradients(model, 1)
    optimizer.step()
    other = dense(seed=4)
    resumed = SplitSGDBF16(other.parameters(), lr=0.1)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["lr"] == 0.3
    assert all(state["low"].dtype == torch.int16 for state in resumed.state.values())
    set_gradients(other, 1)
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights(), optimizer.weights(), strict=True))

    plain = dense(seed=5)
    other.load_state_dict(plain.state_dict())
    resumed.load_state_dict(torch.optim.SGD(plain.parameters(), lr=0.2).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights(), plain.parameters(), strict=True))
    assert torch.equal(other.weight.detach(), upper(plain.weight.detach()))


def test_split_sgd_refuses_what_it_cannot_keep() -> None:
    model = dense()
    optimizer = SplitSGDBF16(model.parameters(), lr=0.1)
    model.load_state_dict(dense(seed=4).state_dict())
    set_gradients(model, 0)
    with pytest.raises(ValueError, match=r"a parameter \(5, 7\) holds more than upper halves: it was loaded"):
        optimizer.step()
    rows = torch.nn.Embedding(5, 3, sparse=True)
    rows(torch.tensor([1, 2])).sum().backward()
    of_rows = SplitSGDBF16(rows.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the gradient of a parameter \(5, 3\) is sparse"):
        of_rows.step()
    with pytest.raises(ValueError, match=r"a parameter is torch.float64 on cpu; SplitSGDBF16 takes float32 on the cpu"):
        SplitSGDBF16([torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    momentum = torch.optim.SGD(dense().parameters(), lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(ValueError, match=r"momentum is 0.9, but SplitSGDBF16 has only lr and weight_decay: leave"):
        optimizer.load_state_dict(momentum)
    assert optimizer.param_groups[0]["momentum"] == 0
    with pytest.raises(ValueError, match=r"maximize is True, but"):
        SplitSGDBF16([{"params": dense().parameters(), "maximize": True}], lr=0.1)
    state = optimizer.state_dict()
    state["state"][0]["low"] = torch.zeros(1, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"lower halves 0 are torch.int16 \(1,\), the parameter is \(5, 7\)"):
        optimizer.load_state_dict(state)


def reference_lr(step: int, base: float, warmup: int, start: int, decay: int) -> float:
    """facebookresearch/dlrm dlrm_s_pytorch.py, LRPolicyScheduler.get_lr; its _step_count is 1 at the first step."""
    count = step + 1
    if count < warmup:
        return base * (1.0 - (warmup - count) / warmup)
    if decay == 0 or count < start:
        return base  # with a decay, the reference stays at its last warm-up rate: the deviation in the docstring
    count = min(count, start + decay - 1)  # "freeze at last"
    return max(0.0000001, base * ((decay - (count - start)) / decay) ** 2)


def rates(steps: int, lr: float, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = Schedule([optimizer], **options)
    found = []
    for step in range(steps):
        schedule.apply(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@looped(("warmup", "start", "decay"), [(0, 0, 0), (7, 7, 0), (0, 4, 6), (5, 5, 9), (5, 12, 10), (1, 1, 1)])
@looped("base", [0.1, 1e-6])
def test_against_the_reference_dlrm(warmup: int, start: int, decay: int, base: float) -> None:
    options = {"warmup_steps": warmup, "decay_steps": decay} | ({"decay_start_step": start} if decay else {})
    expected = [reference_lr(step, base, warmup, start, decay) for step in range(40)]
    assert rates(40, base, **options) == pytest.approx(expected, rel=1e-12)


def test_rates_depend_on_the_step_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = Schedule([optimizer], warmup_steps=4, decay_start_step=6, decay_steps=5)
    forwards = rates(15, 0.5, warmup_steps=4, decay_start_step=6, decay_steps=5)
    for step in reversed(range(15)):
        schedule.apply(step)
        assert optimizer.param_groups[0]["lr"] == forwards[step]


def test_every_group_keeps_its_own_rate() -> None:
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.25}])
    Schedule([optimizer], warmup_steps=2).apply(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]

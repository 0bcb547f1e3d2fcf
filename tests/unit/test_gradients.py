"""Gradients that are not finite, and the norm of both sides: what is found, what is refused, what is scaled."""

import copy
import math
import warnings

import pytest
import torch

from hotrow import FTRL, SGD, Adagrad, Adam, KeyedJaggedTensor, RowWiseAdagrad, TableConfig, clip_grad_norm_
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.optim import nonfinite_gradient, nonfinite_parameter_gradient
from loops import looped

ALL = [SGD, Adagrad, RowWiseAdagrad, Adam, FTRL]
NONFINITE = [math.nan, math.inf, -math.inf]
IDS = torch.tensor([[1, 2], [3, 4], [1, 6]])


def make(pooling: str = "sum") -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            TableConfig(name="a", num_embeddings=10, embedding_dim=3, feature_names=("x",), pooling=pooling),
            TableConfig(name="b", num_embeddings=20, embedding_dim=2, feature_names=("y",), pooling=pooling),
        ]
    )


def snapshot(emb: EmbeddingCollection, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [t.clone() for t in [*emb.weights.values(), *states]]


def assert_unchanged(emb: EmbeddingCollection, optimizer: torch.optim.Optimizer, before: list[torch.Tensor]) -> None:
    for was, now in zip(before, snapshot(emb, optimizer), strict=True):
        assert torch.equal(was, now)


def backward(emb: EmbeddingCollection, value: float, sample: int = 1, column: int = 4) -> None:
    grad = torch.ones(3, 5)
    grad[sample, column] = value
    emb(IDS).backward(grad)


@looped("threads", [1, 2, 5])
@looped("shape", [(1, 1), (7, 3), (300, 417), (3, 70_000), (100_000,), (2, 3, 5), (0, 4), (4, 0), ()])
def test_first_nonfinite_against_isfinite(shape: tuple[int, ...], threads: int) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.randn(shape, generator=generator)
        assert ops.first_nonfinite(values) is None
        for value in NONFINITE:
            for places in (1, 40):
                x = values.clone()
                if not x.numel():
                    continue
                x.view(-1)[torch.randint(0, x.numel(), (places,), generator=generator)] = value
                expected = tuple(torch.isfinite(x).logical_not().nonzero()[0].tolist())
                assert ops.first_nonfinite(x) == expected
                assert ops.all_finite([values, values]) and not ops.all_finite([values, x])
    finally:
        torch.set_num_threads(before)


def test_first_nonfinite_takes_the_largest_numbers_and_any_strides() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest, -largest, 1e-45, -0.0]])
    assert ops.first_nonfinite(x) is None
    wide = torch.zeros(50, 2000)
    wide[3, 1990] = math.nan
    assert ops.first_nonfinite(wide[:, :1990]) is None
    assert ops.first_nonfinite(wide[:, 7:]) == (3, 1983)
    assert ops.first_nonfinite(wide.t()) == (1990, 3)
    assert ops.first_nonfinite(torch.tensor([0.0, math.inf]).expand(4, 2)) == (0, 1)
    assert ops.first_nonfinite(torch.tensor([1.0, math.inf], dtype=torch.float64)) == (1,)
    assert ops.first_nonfinite(torch.tensor([[1.0], [math.nan]], dtype=torch.bfloat16)) == (1, 0)


@looped("value", NONFINITE)
@looped("optimizer_class", ALL)
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(optimizer_class: type, value: float) -> None:
    emb = make()
    optimizer = optimizer_class(emb, lr=0.1)
    before = snapshot(emb, optimizer)
    backward(emb, value)
    message = (
        rf"{optimizer_class.__name__}: the gradient of feature 'y' \(table 'b'\), sample 1, column 1 is {value}; "
        r"no row has changed: lower the learning rate, .*nonfinite='skip'"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_unchanged(emb, optimizer, before)
    assert len(emb.pending) == 1, "kept, to be looked at"
    assert [group.get("steps", 0) for group in optimizer.param_groups] == [0, 0]
    optimizer.zero_grad()
    backward(emb, 1.0)
    optimizer.step()
    assert not torch.equal(emb.weights["a"], before[0]), "the step after it is taken"


@looped("optimizer_class", ALL)
def test_skipped_steps_are_as_if_they_had_not_been(optimizer_class: type) -> None:
    results = []
    for values in ([1.0, 2.0], [1.0, math.nan, math.inf, 2.0]):
        emb = make()
        optimizer = optimizer_class(emb, lr=0.1, nonfinite="skip")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for value in values:
                backward(emb, value)
                optimizer.step()
                assert emb.pending == []
        assert optimizer.skipped == len(values) - 2
        assert len(caught) == min(1, optimizer.skipped)
        text = "sample 1, column 1 is nan; no row has changed, the step is skipped"
        assert all(text in str(w.message) for w in caught)
        results.append(snapshot(emb, optimizer))
    for without, skipped in zip(*results, strict=True):
        assert torch.equal(without, skipped)


def test_one_bad_lookup_of_several_stops_the_step() -> None:
    emb = make()
    optimizer = SGD(emb, lr=0.1)
    before = snapshot(emb, optimizer)
    backward(emb, 1.0)
    values, _ = emb.sequence(KeyedJaggedTensor(("x",), torch.tensor([1, 2, 3])))["x"]
    grad = torch.ones(3, 3)
    grad[2, 1] = math.inf
    values.backward(grad)
    with pytest.raises(ValueError, match=r"feature 'x' \(table 'a'\), position 2, column 1 is inf"):
        optimizer.step()
    assert_unchanged(emb, optimizer, before)


def test_the_weight_of_an_id_counts_where_it_is_looked_up() -> None:
    emb = make()
    optimizer = SGD(emb, lr=0.1)
    before = snapshot(emb, optimizer)
    lengths = torch.tensor([1, 2, 0, 3, 1, 0])
    weights = torch.ones(7)
    weights[5] = math.nan
    batch = KeyedJaggedTensor(("x", "y"), torch.arange(7), weights, lengths=lengths)
    emb(batch).backward(torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"the weight of feature 'y' \(table 'b'\), sample 0, position 2 is nan"):
        optimizer.step()
    assert_unchanged(emb, optimizer, before)
    optimizer.zero_grad()
    weights = torch.tensor([math.nan, 1.0, 1.0])
    emb(KeyedJaggedTensor(("z", "x", "y"), torch.tensor([9, 1, 2]), weights)).backward(torch.ones(1, 5))
    optimizer.step()  # 'z' is of another collection
    assert torch.isfinite(emb.weights["a"]).all() and emb.pending == []


def test_without_a_look_the_step_is_taken() -> None:
    emb = make()
    backward(emb, math.nan)
    SGD(emb, lr=0.1, nonfinite=None).step()
    assert emb.weights["b"][4, 1].isnan()


@looped("optimizer_class", ALL)
def test_the_policy_must_be_known(optimizer_class: type) -> None:
    message = f"{optimizer_class.__name__}: nonfinite is 'warn'; choose 'raise', 'skip'"
    with pytest.raises(ValueError, match=message):
        optimizer_class(make(), lr=0.1, nonfinite="warn")


def test_a_parameter_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    assert nonfinite_parameter_gradient(model) is None
    model(torch.ones(1, 3)).sum().backward()
    assert nonfinite_parameter_gradient(model) is None
    model[1].weight.grad[0, 1] = math.inf
    assert nonfinite_parameter_gradient(model) == "the gradient of parameter '1.weight' at [0, 1] is inf"


def against_torch(ids: torch.Tensor, max_norm: float, norm_type: float) -> tuple[list[torch.Tensor], ...]:
    """Norm, dense gradients and row gradients after clipping: ours, and those of plain torch with dense gradients."""
    emb, linear = make(), torch.nn.Linear(5, 1)
    twin = copy.deepcopy(linear)
    tables = [torch.nn.Embedding.from_pretrained(w.clone(), freeze=False) for w in emb.weights.values()]
    (linear(emb(ids)) ** 2).sum().backward()
    ours_norm = clip_grad_norm_([linear, emb], max_norm, norm_type=norm_type)
    pooled = torch.cat([table(column) for table, column in zip(tables, ids.T, strict=True)], dim=1)
    (twin(pooled) ** 2).sum().backward()
    parameters = [*twin.parameters(), *(table.weight for table in tables)]
    theirs_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    before = [w.clone() for w in emb.weights.values()]
    SGD(emb, lr=1.0).step()
    rows = [was - now for was, now in zip(before, emb.weights.values(), strict=True)]
    ours = [ours_norm, *(p.grad for p in linear.parameters()), *rows]
    return ours, [theirs_norm, *(p.grad for p in parameters)]


@looped("norm_type", [1.0, 2.0, math.inf])
@looped("max_norm", [0.0, 0.01, 1e6])
def test_clipping_against_torch_where_no_id_comes_twice(max_norm: float, norm_type: float) -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6], [9, 19]])
    for ours, theirs in zip(*against_torch(ids, max_norm, norm_type), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_where_an_id_repeats_the_norm_is_that_of_the_pooled_gradients() -> None:
    """Both sides are still scaled by one factor, so gradients of rows keep their direction and their proportions."""
    ids = torch.tensor([[1, 2], [1, 2], [1, 6]])
    emb, linear = make(), torch.nn.Linear(5, 1)
    (linear(emb(ids)) ** 2).sum().backward()
    (pending,) = emb.pending
    whole = [pending.grad.clone(), *(p.grad.clone() for p in linear.parameters())]
    norm = clip_grad_norm_(torch.nn.ModuleList([linear, emb, linear]), 0.01)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in whole]).norm())
    factor = 0.01 / (norm + 1e-6)
    for was, now in zip(whole, [emb.pending[0].grad, *(p.grad for p in linear.parameters())], strict=True):
        torch.testing.assert_close(now, was * factor)


def test_the_norm_of_a_strided_gradient_is_exact_and_the_same_on_any_number_of_threads() -> None:
    """As a model leaves it whose first operation joins pooled rows with other inputs."""
    linear = torch.nn.Linear(420, 2048, bias=False)
    linear.weight.grad = torch.randn(2048, 500, generator=torch.Generator().manual_seed(1))[:, 10:430]
    threads, norms = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            norms.append(float(clip_grad_norm_(linear, 1e6)))
    finally:
        torch.set_num_threads(threads)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(float(linear.weight.grad.double().norm()), rel=1e-6)


def test_what_backward_was_given_is_left_alone() -> None:
    emb = make()
    grad = torch.full((3, 5), 4.0)
    emb(IDS).backward(grad)
    emb(IDS).sum().backward()  # an expanded scalar, which has no memory of its own
    assert clip_grad_norm_(emb, 1.0) == pytest.approx(math.sqrt(15 * 16 + 15))
    assert (grad == 4.0).all()
    assert [p.grad.shape for p in emb.pending] == [(3, 5), (3, 5)]


def test_a_norm_that_is_not_finite_is_left_to_the_optimizer_or_raises() -> None:
    emb, linear = make(), torch.nn.Linear(5, 1)
    linear(torch.ones(1, 5)).sum().backward()
    backward(emb, math.nan)
    assert clip_grad_norm_([linear, emb], 1.0).isnan()
    assert (linear.weight.grad == 1).all() and "sample 1" in str(nonfinite_gradient(emb))
    with pytest.raises(ValueError, match=r"the norm of the gradients is nan: .*'y' .*sample 1, column 1 is nan"):
        clip_grad_norm_([linear, emb], 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="max_norm is nan; it must be 0 or a positive"):
        clip_grad_norm_(linear, math.nan)
    assert clip_grad_norm_(torch.nn.ReLU(), 1.0) == 0

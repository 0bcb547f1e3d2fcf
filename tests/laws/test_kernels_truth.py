"""The ops against truths that share no code with them: dense float64 algebra, torch.nn.EmbeddingBag, finite steps."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DIMS, Case, Guarded, every_backend, make_case, running
from torch import Tensor, nn

from hotrow import KeyedJaggedTensor, ops, reference

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}  # docs/numerics.md, "float64 truth"


def dense_lookup(case: Case, weights: list[Tensor], batch: KeyedJaggedTensor, sample_weights: Tensor) -> Tensor:
    """The pooled output as products A W in float64; A[b, r] is the sum of the weights with which bag b looks r up."""
    columns = []
    for feature in case.layout.features:
        key = batch.keys.index(feature.name)
        offsets = batch.offsets[key * batch.stride : (key + 1) * batch.stride + 1]
        lengths = offsets.diff()
        bag = torch.repeat_interleave(torch.arange(batch.stride), lengths)
        span = slice(int(offsets[0]), int(offsets[-1]))
        scale = sample_weights[span]
        if feature.pooling == "mean":
            scale = scale / lengths[bag]
        a = torch.zeros(batch.stride, weights[feature.table].shape[0], dtype=torch.float64)
        a = a.index_put((bag, batch.values[span].long()), scale, accumulate=True)
        columns.append(a @ weights[feature.table])
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("algorithm", reference.ALGORITHMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", DIMS)
def test_against_float64_algebra(dim: int, pooling: str, weighted: bool, algorithm: str) -> None:
    case = make_case(11, dim=dim, pooling=pooling, weighted=weighted)
    batch, grad = case.batches[0], case.grads[0]
    truth = [w.double().requires_grad_() for w in case.weights]
    given = torch.ones(batch.values.numel()) if batch.weights is None else batch.weights
    sample_weights = given.double().requires_grad_()
    pooled = dense_lookup(case, truth, batch, sample_weights)
    pooled.backward(grad.double())

    kernels, arrays, states = ops.Kernels(case.layout), ops.Arrays(case.weights), case.states(algorithm)
    torch.testing.assert_close(kernels.lookup(arrays, batch), pooled.detach().float(), **TOLERANCE)
    weight_grad = kernels.weight_gradient(arrays, batch, grad)
    torch.testing.assert_close(weight_grad, sample_weights.grad.float(), rtol=1e-4, atol=1e-4)

    expected = []
    for t, w in enumerate(truth):
        g = w.grad
        if algorithm == "adagrad":
            g = g / ((states[t].double() + g * g).sqrt() + 1e-3)
        elif algorithm == "row_wise_adagrad":
            g = g / ((states[t].double() + (g * g).mean(1)).sqrt() + 1e-3)[:, None]
        expected.append((w.detach() - 0.1 * g).float())
    rule = {"algorithm": algorithm, "lr": [0.1] * 3, "eps": [1e-3] * 3}
    kernels.update(arrays, ops.Arrays(states) if states else None, [(batch, grad)], **rule)
    for ours, theirs in zip(case.weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("algorithm", ["sgd", "adagrad"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_against_torch_embedding_bag(mode: str, algorithm: str) -> None:
    """Five steps beside torch.nn.EmbeddingBag(sparse=True) with torch.optim."""
    weight = make_case(12, dim=24).weights[0]
    layout = reference.Layout((reference.Feature("a", 0, slice(0, 24), mode),), 24)
    bag = nn.EmbeddingBag(200, 24, mode=mode, sparse=True, include_last_offset=True, _weight=weight.clone())
    optimizer = (torch.optim.SGD if algorithm == "sgd" else torch.optim.Adagrad)(bag.parameters(), lr=0.1)
    kernels, arrays = ops.Kernels(layout), ops.Arrays([weight])
    states = None if algorithm == "sgd" else ops.Arrays([torch.zeros(200, 24)])
    for step in range(5):
        batch = make_case(100 + step, dim=24, num_samples=50).batches[0]
        values, offsets, _ = batch.bags("a")
        grad = torch.randn(50, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out = bag(values, offsets)
        torch.testing.assert_close(kernels.lookup(arrays, batch), out.detach(), **TOLERANCE)
        out.backward(grad)
        optimizer.step()
        kernels.update(arrays, states, [(batch, grad)], algorithm=algorithm, lr=[0.1], eps=[1e-10])
        torch.testing.assert_close(weight, bag.weight.detach(), **TOLERANCE)


SHAPES = [(1, 0, 4), (3, 1, 1), (5, 2, 3), (7, 26, 16), (4, 26, 128), (9, 3, 17), (2, 40, 33), (33, 8, 64), (0, 3, 8)]


def interaction_inputs(samples: int, features: int, dim: int, seed: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    width = dim + features * (features + 1) // 2
    return (
        torch.randn(samples, dim, generator=g),
        torch.randn(samples, features, dim, generator=g),
        torch.randn(samples, width, generator=g),
    )


@pytest.mark.parametrize(("samples", "features", "dim"), SHAPES)
def test_interaction_against_float64_bmm(samples: int, features: int, dim: int) -> None:
    """Within rounding of the terms summed: sqrt(D) of them for the outputs, sqrt(F) for the gradients."""
    dense, pooled, grad = interaction_inputs(samples, features, dim)
    truth = [x.double().requires_grad_() for x in (dense, pooled)]
    expected = reference.interact(*truth)
    expected.backward(grad.double())

    def check() -> None:
        inputs = [x.clone().requires_grad_() for x in (dense, pooled)]
        out = ops.dot_interaction(*inputs)
        out.backward(grad)
        assert torch.equal(out, ops.dot_interaction(dense, pooled)), "the interaction must repeat bit for bit"
        torch.testing.assert_close(out.detach(), expected.detach().float(), rtol=1e-5, atol=1e-5 * dim**0.5)
        for ours, theirs in zip(inputs, truth, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-5, atol=1e-5 * (features + 1) ** 0.5)

    check()
    for _ in every_backend():
        check()


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing to compare")
def test_interaction_does_not_depend_on_the_thread_count() -> None:
    dense, pooled, grad = interaction_inputs(200, 26, 16)
    results = []
    for threads in (1, 2, 3):
        with running(ops.isas()[-1], threads):
            inputs = [x.clone().requires_grad_() for x in (dense, pooled)]
            out = ops.dot_interaction(*inputs)
            out.backward(grad)
            results.append((out, *(x.grad for x in inputs)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_interaction_backward_of_the_reference_is_its_gradient() -> None:
    dense, pooled, grad = interaction_inputs(6, 5, 7)
    inputs = [x.clone().requires_grad_() for x in (dense, pooled)]
    reference.interact(*inputs).backward(grad)
    for ours, theirs in zip(reference.interact_backward(grad, dense, pooled), inputs, strict=True):
        torch.testing.assert_close(ours, theirs.grad)


def test_interaction_gradient_against_finite_steps() -> None:
    """The op is quadratic, so a central difference is exact but for rounding, whatever its step."""
    dense, pooled, grad = interaction_inputs(4, 6, 10)
    inputs = [x.clone().requires_grad_() for x in (dense, pooled)]
    ops.dot_interaction(*inputs).backward(grad)
    g = torch.Generator().manual_seed(14)
    for _ in range(8):
        v = [torch.randn(x.shape, generator=g) for x in inputs]
        ahead = ops.dot_interaction(dense + 0.5 * v[0], pooled + 0.5 * v[1])
        behind = ops.dot_interaction(dense - 0.5 * v[0], pooled - 0.5 * v[1])
        numeric = ((ahead - behind).double() * grad).sum()
        analytic = sum((x.grad.double() * d).sum() for x, d in zip(inputs, v, strict=True))
        torch.testing.assert_close(numeric, analytic, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing writes past an array")
@pytest.mark.parametrize(("samples", "features", "dim"), SHAPES)
def test_interaction_writes_its_outputs_and_no_more(samples: int, features: int, dim: int) -> None:
    native = pytest.importorskip("hotrow._native")
    dense, pooled, grad = interaction_inputs(samples, features, dim)
    for _, threads in every_backend():
        out, grad_dense, grad_pooled = (Guarded(torch.full_like(x, float("nan"))) for x in (grad, dense, pooled))
        native.interact(dense, pooled, out.tensor, threads)
        native.interact_backward(grad, dense, pooled, grad_dense.tensor, grad_pooled.tensor, threads)
        for guarded in (out, grad_dense, grad_pooled):
            guarded.check()
            assert not guarded.tensor.isnan().any()

"""The embedding ops against truths that share no code with them: dense float64 algebra and torch.nn.EmbeddingBag."""

from __future__ import annotations

import torch
from kernel_cases import DIMS, Case, make_case, rules
from torch import Tensor, nn

from hotrow import KeyedJaggedTensor
from hotrow.kernels import ops, types
from hotrow.kernels.types import Rule
from loops import looped

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


@looped("algorithm", types.ALGORITHMS)
@looped("weighted", [False, True])
@looped("pooling", ["sum", "mean"])
@looped("dim", DIMS)
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

    expected = [
        float64_step(rule, w.grad, w.detach(), *(state[t].double() for state in states)).float()
        for t, (w, rule) in enumerate(zip(truth, rules(algorithm), strict=True))
    ]
    touched = [w.grad.any(1) for w in truth]
    kernels.update(arrays, [ops.Arrays(state) for state in states], [(kernels, batch, grad)], rules(algorithm))
    for ours, theirs, rows, before in zip(case.weights, expected, touched, truth, strict=True):
        torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=2e-5)
        assert torch.equal(ours[~rows], before.detach()[~rows].float())


def float64_step(rule: Rule, g: Tensor, w: Tensor, *states: Tensor) -> Tensor:
    """The published formula of each optimizer, for rows whose gradients sum to g."""
    if rule.algorithm == "sgd":
        return w - rule.lr * g
    if rule.algorithm == "adagrad":
        return w - rule.lr * g / ((states[0] + g * g).sqrt() + rule.eps)
    if rule.algorithm == "row_wise_adagrad":
        return w - rule.lr * g / ((states[0] + (g * g).mean(1)).sqrt() + rule.eps)[:, None]
    if rule.algorithm == "adam":
        m, v = rule.beta1 * states[0] + (1 - rule.beta1) * g, rule.beta2 * states[1] + (1 - rule.beta2) * g * g
        return w - rule.lr * m / (v.sqrt() + rule.eps)
    z, n = states
    sigma = ((n + g * g).sqrt() - n.sqrt()) / rule.lr
    z, n = z + g - sigma * w, n + g * g
    rate = (rule.beta + n.sqrt()) / rule.lr + rule.l2
    return torch.where(z.abs() <= rule.l1, 0.0, -(z - z.sign() * rule.l1) / rate)


@looped("algorithm", ["sgd", "adagrad"])
@looped("mode", ["sum", "mean"])
def test_against_torch_embedding_bag(mode: str, algorithm: str) -> None:
    """Five steps beside torch.nn.EmbeddingBag(sparse=True) with torch.optim."""
    weight = make_case(12, dim=24).weights[0]
    layout = types.Layout((types.Feature("a", 0, slice(0, 24), mode),), 24)
    bag = nn.EmbeddingBag(200, 24, mode=mode, sparse=True, include_last_offset=True, _weight=weight.clone())
    optimizer = (torch.optim.SGD if algorithm == "sgd" else torch.optim.Adagrad)(bag.parameters(), lr=0.1)
    kernels, arrays = ops.Kernels(layout), ops.Arrays([weight])
    states = [] if algorithm == "sgd" else [ops.Arrays([torch.zeros(200, 24)])]
    for step in range(5):
        batch = make_case(100 + step, dim=24, num_samples=50).batches[0]
        values, offsets, _ = batch.bags("a")
        grad = torch.randn(50, 24, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        out = bag(values, offsets)
        torch.testing.assert_close(kernels.lookup(arrays, batch), out.detach(), **TOLERANCE)
        out.backward(grad)
        optimizer.step()
        kernels.update(arrays, states, [(kernels, batch, grad)], [Rule(algorithm=algorithm, lr=0.1, eps=1e-10)])
        torch.testing.assert_close(weight, bag.weight.detach(), **TOLERANCE)

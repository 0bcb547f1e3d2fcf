"""Law 1 for the dense ops, interaction and MLP: within docs/numerics.md of float64 algebra on every instruction set, to
the bit the same at any thread count, and no float beyond their outputs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_cases import every_backend, guarded, running
from torch import Tensor

from hotrow.kernels import ops, reference
from hotrow.kernels.types import Activation, Drop
from loops import looped

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing to compare")

SHAPES = [(1, 0, 4), (3, 1, 1), (5, 2, 3), (7, 26, 16), (4, 26, 128), (9, 3, 17), (2, 40, 33), (33, 8, 64), (0, 3, 8)]
BEYOND_CACHES = [(4100, 8, 64), (4100, 16, 33)]
"""Gradients of more than 8 MiB, which are written past the caches where their rows are whole lines."""


def interaction_inputs(samples: int, features: int, dim: int, seed: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    width = dim + features * (features + 1) // 2
    return (
        torch.randn(samples, dim, generator=g),
        torch.randn(samples, features, dim, generator=g),
        torch.randn(samples, width, generator=g),
    )


@looped(("samples", "features", "dim"), SHAPES + BEYOND_CACHES)
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


@looped("drops", [[], [Drop(9, place, 5, 1000, 19661, 1.25) for place in range(3)]])
@looped(("samples", "features", "dim"), SHAPES + BEYOND_CACHES[:1])
def test_what_stands_beside_the_products_has_the_bits_of_torch(
    samples: int, features: int, dim: int, drops: list[Drop]
) -> None:
    """The members' rows, their first columns, and the rows behind the products, forward and backward."""
    dense, pooled, grad = interaction_inputs(samples, features, dim)
    pooled = torch.stack([pooled, pooled + 1, pooled - 1], dim=2).requires_grad_()
    dense = torch.cat([dense, dense + 1, dense - 1]).requires_grad_()
    grad = torch.cat([grad, grad + 1, grad - 1])
    kept = torch.stack([reference.kept(own, samples, features) for own in drops])[..., None] if drops else 1
    behind, first = torch.randn(3 * samples, features * dim), torch.randn(3 * samples, features)
    for _, threads in every_backend():
        rows = (pooled.permute(2, 0, 1, 3) * kept).flatten(0, 1)
        out = torch.cat([ops.dot_interaction(dense, rows), rows.flatten(1)], dim=1)
        given = [out, rows[:, :, 0]], [torch.cat([grad, behind], dim=1), first]
        expected = *given[0], *torch.autograd.grad(given[0], [dense, pooled], given[1])
        own = ops.member_rows(pooled, drops).flatten(0, 1)
        found = ops.interactions(dense, own, concatenated=True)
        found = *found, *torch.autograd.grad(found, [dense, pooled], given[1])
        for each, other in zip(found, expected, strict=True):
            assert torch.equal(each, other), threads


@needs_native
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


@needs_native
@looped(("samples", "features", "dim"), SHAPES + BEYOND_CACHES[1:])
def test_interaction_writes_its_outputs_and_no_more(samples: int, features: int, dim: int) -> None:
    native = pytest.importorskip("hotrow._native")
    dense, pooled, grad = interaction_inputs(samples, features, dim)
    for _, threads in every_backend():
        out, grad_dense, grad_pooled = guarded([grad, dense, pooled])
        native.interact(dense, pooled, out.tensor, threads)
        native.interact_backward(grad, None, dense, pooled, grad_dense.tensor, grad_pooled.tensor, threads)
        for own in (out, grad_dense, grad_pooled):
            own.check()
            assert not own.tensor.isnan().any()


# Samples and widths: no sample, fewer than a tile, odd tails, depths beyond one stretch (512), panels' edges (48).
MLPS = [
    (0, (3, 2)), (1, (1, 1)), (5, (13, 16, 1)), (8, (48, 96, 47)), (77, (13, 65, 33, 16)), (130, (1030, 49, 5)),
    (600, (31, 8, 50)), (1100, (7, 20)), (0, (5, 1)), (3, (37, 1)), (131, (9, 64, 1)), (140, (6, 1, 50, 4, 1, 1, 3)),
    (517, (256, 1)),
]  # fmt: skip


def mlp_inputs(
    samples: int, widths: tuple[int, ...], seed: int = 3
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """x, weights, biases and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o, i, generator=g) / i**0.5 for i, o in pairwise(widths)]
    biases = [torch.randn(o, generator=g) for o in widths[1:]]
    return (
        torch.randn(samples, widths[0], generator=g),
        weights,
        biases,
        torch.randn(samples, widths[-1], generator=g),
    )


def forward_and_backward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], grad: Tensor, last: str
) -> list[Tensor]:
    """The output, and the gradients of x, weights and biases."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights, *biases)]
    inputs, rest = leaves[0], leaves[1:]
    out = ops.mlp(inputs, rest[: len(weights)], rest[len(weights) :], last=last)  # type: ignore[arg-type]
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@looped("last", ["relu", "linear"])
@looped(("samples", "widths"), MLPS)
def test_mlp_against_float64(samples: int, widths: tuple[int, ...], last: str) -> None:
    """ReLUs are taken where the float32 pass took them: a value next to 0 may lie on either side of it."""
    x, weights, biases, grad = mlp_inputs(samples, widths)
    for _ in every_backend() if ops.isas() else [None]:
        out, *grads = forward_and_backward(x, weights, biases, grad, last)
        expected = float64_mlp(x, weights, biases, grad, last)
        for ours, truth in zip([out, *grads], expected, strict=True):
            largest = float(truth.abs().max()) if truth.numel() else 0.0
            torch.testing.assert_close(ours.double(), truth, rtol=0, atol=1e-5 * largest + 1e-6)


def test_mlp_takes_parameters_of_any_strides() -> None:
    """A weight tied to the transpose of another, a bias that is a column: values count, not where they lie."""
    x, weights, biases, grad = mlp_inputs(9, (7, 5, 3))
    expected = forward_and_backward(x, weights, biases, grad, "relu")
    strided = [*(w.t().contiguous().t() for w in weights), *(torch.stack([b, b], 1)[:, 1] for b in biases)]
    leaves = [tensor.requires_grad_() for tensor in (x.clone(), *strided)]
    assert not any(leaf.is_contiguous() for leaf in leaves[1:])
    out = ops.mlp(leaves[0], leaves[1:3], leaves[3:], last="relu")
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def float64_mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], grad: Tensor, last: str) -> list[Tensor]:
    """The chain rule written out; same order of results as `forward_and_backward`."""
    inputs, gates = [x.double()], []
    float32 = x
    for k, (w, b) in enumerate(zip(weights, biases, strict=True), start=1):
        inputs.append(inputs[-1] @ w.double().T + b.double())
        float32 = ops.mlp(float32, [w], [b], last="relu" if k < len(weights) else last).detach()  # type: ignore[arg-type]
        gates.append(float32 > 0 if k < len(weights) or last == "relu" else torch.ones_like(float32, dtype=torch.bool))
        inputs[-1] = inputs[-1] * gates[-1]
    g = grad.double()
    grad_weights, grad_biases = [], []
    for k in reversed(range(len(weights))):
        g = g * gates[k]
        grad_weights.insert(0, g.T @ inputs[k])
        grad_biases.insert(0, g.sum(0))
        g = g @ weights[k].double()
    return [inputs[-1], g, *grad_weights, *grad_biases]


@needs_native
@looped(("samples", "widths"), MLPS)
def test_mlp_does_not_depend_on_the_thread_count(samples: int, widths: tuple[int, ...]) -> None:
    for isa in ops.isas():
        results = []
        for threads in (1, 2, 3):
            with running(isa, threads):
                results.append(forward_and_backward(*mlp_inputs(samples, widths), "relu"))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
@looped(("samples", "widths"), MLPS)
def test_mlp_writes_its_outputs_and_no_more(samples: int, widths: tuple[int, ...]) -> None:
    native = pytest.importorskip("hotrow._native")
    x, weights, biases, grad = mlp_inputs(samples, widths)

    parameters = [own for pair in zip(weights, biases, strict=True) for own in pair]
    shape, addresses = (1, samples, widths[0]), [own.data_ptr() for own in parameters]
    for _, threads in every_backend():
        hidden, out = guarded([torch.empty(samples * sum(widths[1:-1])), torch.empty(samples, widths[-1])])
        to = hidden.tensor.data_ptr(), out.tensor.data_ptr()
        native.mlp(shape, [*widths[1:]], addresses, x.data_ptr(), *to, True, [], threads, None)
        grads, (grad_x,) = guarded(parameters), guarded([x])
        given = x.data_ptr(), hidden.tensor.data_ptr(), grad.data_ptr()
        made = [own.tensor.data_ptr() for own in grads], grad_x.tensor.data_ptr()
        native.mlp_backward(shape, [*widths[1:]], addresses[::2], *given, *made, 1.0, threads, None)
        for own in (hidden, out, *grads, grad_x):
            own.check()
            assert not own.tensor.isnan().any()


@needs_native
@looped("widths", [(367, 512, 256, 1), (13, 64, 8), (359, 64, 32, 1), (600, 50, 3), (7, 5)])
def test_a_row_has_the_bits_that_it_has_alone(widths: tuple[int, ...]) -> None:
    """However many rows come with it, and whether weights are kept packed or not: each way has its own products."""
    x, weights, biases, grad = mlp_inputs(500, widths)
    for isa in ops.isas():
        with running(isa, 1):
            whole, grad_x = forward_and_backward(x, weights, biases, grad, "linear")[:2]
            packed, first = ops.Packed(weights), 0
            for rows in (1, 2, 3, 7, 8, 17, 64, 65, 200):
                part = slice(first, first + rows)
                own = forward_and_backward(x[part], weights, biases, grad[part], "linear")[:2]
                with torch.no_grad(), ops.weights_stay(packed):
                    kept = ops.mlp(x[part], weights, biases, last="linear")
                for found, expected in zip((*own, kept), (whole, grad_x, whole), strict=True):
                    assert torch.equal(found.view(torch.int32), expected[part].view(torch.int32)), (isa, rows)
                first += rows


@looped("last", ["relu", "linear"])
@looped("widths", [(17, 40, 16, 5), (6, 33, 1), (9, 20)])
def test_layers_that_drop_have_the_bits_of_dropout_between(widths: tuple[int, ...], last: Activation) -> None:
    x, weights, biases, grad = mlp_inputs(37, widths)
    count = len(weights) if last == "relu" else len(weights) - 1
    drops = [Drop(2**63 + 3, place, 5, 1000, 19661, float(1 / np.float32(0.7))) for place in range(count)]
    y = x.clone().requires_grad_()
    leaves = [own.clone().requires_grad_() for own in (*weights, *biases)]
    own_weights, own_biases = leaves[: len(weights)], leaves[len(weights) :]
    for _, threads in every_backend():
        z = y
        for weight, bias, drop in zip(own_weights, own_biases, drops, strict=False):
            kept = reference.kept(drop, len(x), len(weight))
            assert torch.equal(ops.kept([drop], len(x), len(weight))[0], kept)
            z = ops.mlp(z, [weight], [bias], last="relu") * kept
        z = z if last == "relu" else ops.mlp(z, own_weights[-1:], own_biases[-1:], last=last)
        expected = z, *torch.autograd.grad(z, [y, *leaves], grad)
        found = ops.mlps(y[None], [own_weights], [own_biases], last=last, drops=[drops] if drops else [])[0]
        for own, other in zip((found, *torch.autograd.grad(found, [y, *leaves], grad)), expected, strict=True):
            assert torch.equal(own, other), threads


@looped("last", ["relu", "linear"])
@looped("members", [1, 3])
def test_members_have_the_bits_that_each_has_alone(members: int, last: Activation) -> None:
    g = torch.Generator().manual_seed(5)
    x_MBI, grad_MBO = torch.randn(members, 33, 17, generator=g), torch.randn(members, 33, 3, generator=g)
    layers = [[torch.randn(n, m, generator=g) for m, n in pairwise((17, 40, 3))] for _ in range(members)]
    biases = [[torch.randn(len(w), generator=g) for w in own] for own in layers]

    def check() -> None:
        def leaves() -> list[Tensor]:
            return [t.clone().requires_grad_() for own in zip(layers, biases, strict=True) for t in (*own[0], *own[1])]

        together, alone = leaves(), leaves()
        x, y = x_MBI.clone().requires_grad_(), x_MBI.clone().requires_grad_()
        weights, adds = (
            [together[k : k + 2] for k in range(0, 4 * members, 4)],
            [together[k : k + 2] for k in range(2, 4 * members, 4)],
        )
        out = ops.mlps(x, weights, adds, last=last)
        out.backward(grad_MBO)
        for k in range(members):
            own = alone[4 * k : 4 * k + 4]
            expected = ops.mlp(y[k], own[:2], own[2:], last=last)
            expected.backward(grad_MBO[k])
            assert torch.equal(out[k], expected)
        for one, other in zip([x, *together], [y, *alone], strict=True):
            assert torch.equal(one.grad, other.grad)

    check()
    for _ in every_backend():
        check()


@needs_native
@looped("shared", [1, 15, 16, 107, 367, 512, 513, 600])
@looped(("samples", "widths"), [(31, (600, 7)), (32, (600, 50, 3)), (203, (600, 96, 1)), (70, (600, 1))])
def test_rows_that_begin_alike_have_the_bits_of_each_alone(samples: int, widths: tuple[int, ...], shared: int) -> None:
    """The sums of what all rows share, as of a user among candidates, are formed once."""
    x, weights, biases, _ = mlp_inputs(samples, widths)
    x[:, :shared] = x[:1, :shared]
    x[:, 2] = float("nan") if shared == 107 else -0.0
    for isa in ops.isas():
        for threads in (1, 3):
            with running(isa, threads):
                found = ops.mlp(x, weights, biases, last="relu")
                alone = torch.cat([ops.mlp(row[None], weights, biases, last="relu") for row in x])
            assert torch.equal(found.view(torch.int32), alone.view(torch.int32))


def test_mlp_lets_nan_through() -> None:
    """A ReLU that made NaN 0 would hide that training has diverged."""
    for outputs in (3, 1):
        x, weights, biases, grad = mlp_inputs(9, (20, 50, outputs))
        x[4, 7] = float("nan")
        for _ in every_backend() if ops.isas() else [None]:
            out, grad_x, *_ = forward_and_backward(x, weights, biases, grad, "relu")
            assert out[4].isnan().all() and not out[:4].isnan().any() and not out[5:].isnan().any()
            assert grad_x[:4].isfinite().all()


def test_two_passes_before_a_backward_keep_apart() -> None:
    """Activations lie on pages that are used again: never while a graph still needs them."""
    x, weights, biases, grad = mlp_inputs(3000, (13, 64, 32))
    alone = forward_and_backward(x, weights, biases, grad, "linear")
    leaves = [weight.clone().requires_grad_() for weight in weights]
    first = ops.mlp(x, leaves, biases, last="linear")
    ops.mlp(2 * x, leaves, biases, last="linear")
    ops.mlp(-x, leaves, biases, last="linear")
    first.backward(grad)
    assert torch.equal(first.detach(), alone[0])
    for leaf, expected in zip(leaves, alone[2:], strict=False):
        assert torch.equal(leaf.grad, expected)


@looped(
    ("x", "weight", "bias"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 2), torch.zeros(4)),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4)),
    ],
)
def test_mlp_refuses_what_does_not_fit(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    with pytest.raises(ValueError, match=r"layer 0: .*; pass float32 \[B, I\], \[O, I\] and \[O\]"):
        ops.mlp(x, [weight], [bias], last="linear")

"""Law 1 for denormal numbers, whatever mode of the processor the caller has set: kernels of rows keep them, to the bits
of the reference, and dense ones take them for zeros, on every thread alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
from kernel_cases import assert_same_bits, clones, every_backend, make_case, rules
from torch import Tensor

from hotrow.kernels import ops, reference, types
from hotrow.kernels.types import Algorithm

pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent: torch computes as its caller says")
TINY = 1e-38
"""Times this, about two thirds of random normal numbers are denormal."""


def by_every_mode(run: Callable[[], list[Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
    """What `run` returns on every instruction set, on 1 and 2 threads, in both modes; which `run` must leave alone."""
    for isa, threads in every_backend():
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                found = run()
                left = float(torch.tensor([1e-40]) * torch.ones(1))
            finally:
                torch.set_flush_denormal(False)
            assert (left == 0) == flush, f"{isa} on {threads} threads did not restore the caller's mode"
            yield f"{isa}, {threads} threads, flush {flush}", found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernels_of_rows_keep_denormals(dtype: types.Dtype) -> None:
    case = make_case(3, dim=20, weighted=True, num_samples=300, dtype=dtype)
    low = [own if own is None else own.clone() for own in case.low]
    weights = [(own.float() * (TINY if dtype != "float16" else 1.0)).to(own.dtype) for own in case.weights]
    (batch,), (grad,) = case.batches, [own * TINY for own in case.grads]

    expected = [torch.empty(batch.stride, case.layout.width), torch.zeros(batch.values.numel())]
    reference.lookup(case.layout, weights, batch, expected[0])
    reference.weight_gradient(case.layout, weights, batch, grad, expected[1])
    kernels = ops.Kernels(case.layout)

    def look_up() -> list[Tensor]:
        arrays = ops.Arrays(weights, low)
        return [kernels.lookup(arrays, batch), kernels.weight_gradient(arrays, batch, grad)]

    for what, found in by_every_mode(look_up):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs, what)

    for algorithm in get_args(Algorithm):
        states = [[own * TINY for own in group] for group in case.states(algorithm)]

        def update(run: Callable[..., None], algorithm: Algorithm, states: list[list[Tensor]]) -> list[Tensor]:
            own, own_low, own_states = clones(weights), clones(low), [clones(group) for group in states]
            run(own, own_low, own_states, rules(algorithm))
            return [t for t in (*own, *own_low, *(t for group in own_states for t in group)) if t is not None]

        def by_reference(own, own_low, own_states, numbers) -> None:  # type: ignore[no-untyped-def]
            reference.update(case.layout, own, own_states, [(case.layout, batch, grad)], numbers, low=own_low)

        def by_kernels(own, own_low, own_states, numbers) -> None:  # type: ignore[no-untyped-def]
            arrays = ops.Arrays(own, own_low)
            kernels.update(arrays, [ops.Arrays(group) for group in own_states], [(kernels, batch, grad)], numbers)

        truth = update(by_reference, algorithm, states)
        for what, found in by_every_mode(lambda a=algorithm, s=states: update(by_kernels, a, s)):  # type: ignore[misc]
            for ours, theirs in zip(found, truth, strict=True):
                assert_same_bits(ours, theirs, f"{algorithm}, {what}")


def test_initial_rows_and_split_steps_keep_denormals() -> None:
    # No larger, so that torch computes the reference on this thread: others may have a mode of their own.
    w, grad = (torch.randn(2600, 12, generator=torch.Generator().manual_seed(seed)) * TINY for seed in (1, 2))
    high, low = types.split(w)
    high = high.float()

    def run(fill: Callable[..., None], sgd: Callable[..., None]) -> list[Tensor]:
        rows, weight, lower = torch.empty(2600, 12), high.clone(), low.clone()
        fill(rows)
        sgd(weight, lower)
        return [rows, weight, lower]

    def by_kernels() -> list[Tensor]:
        return run(
            lambda rows: ops.fill_uniform(rows, key=5, bound=2 * TINY),
            lambda weight, lower: ops.split_sgd([weight], [lower], [grad], lr=0.3, weight_decay=0.1),
        )

    truth = run(
        lambda rows: reference.fill_uniform(5, 0, rows, 2 * TINY, 0, 1, 0),
        lambda weight, lower: reference.split_sgd(weight, lower, grad, lr=0.3, weight_decay=0.1),
    )
    for what, found in by_every_mode(by_kernels):
        for ours, theirs in zip(found, truth, strict=True):
            assert_same_bits(ours, theirs, what)


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_dense_kernels_take_denormals_for_zeros(arithmetic: str) -> None:
    """Every product is denormal, or has a denormal factor; what is large goes through biases alone."""
    if arithmetic == "bfloat16" and not ops.bfloat16_products():
        pytest.skip("no products of bfloat16 here")
    g = torch.Generator().manual_seed(4)
    widths = [(40, 33), (33, 20), (20, 1)]
    weights = [torch.randn(o, i, generator=g) * TINY * 0.1 for i, o in widths]
    biases = [torch.randn(o, generator=g).abs() * 1e-3 for _, o in widths]
    x, grad = torch.randn(200, 40, generator=g) * 1e-20, torch.randn(200, 1, generator=g) * 1e-25
    x[:, ::7] = 1e-39

    def run() -> list[Tensor]:
        leaves = [own.clone().requires_grad_() for own in (x, *weights, *biases)]
        with torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "bfloat16"):
            out = ops.mlp(leaves[0], leaves[1:4], leaves[4:], last="linear")
        out.backward(grad)
        return [out.detach(), *(own.grad for own in leaves if own.grad is not None)]

    first: dict[str, list[Tensor]] = {}
    for what, found in by_every_mode(run):
        if found[0].dtype != torch.float32:
            continue  # this instruction set leaves bfloat16 to torch
        assert torch.equal(found[0], biases[-1].expand(200, 1)), what
        assert not found[1].any(), f"{what}: the gradient of x"
        for ours, theirs in zip(found, first.setdefault(what.split(",")[0], found), strict=True):
            assert_same_bits(ours, theirs, what)


def test_interaction_takes_denormals_for_zeros() -> None:
    g = torch.Generator().manual_seed(4)
    dense, pooled = torch.randn(300, 16, generator=g) * 1e-20, torch.randn(300, 5, 16, generator=g) * 1e-20
    grad = torch.randn(300, 31, generator=g) * 1e-19

    def run() -> list[Tensor]:
        leaves = [own.clone().requires_grad_() for own in (dense, pooled)]
        out = ops.dot_interaction(*leaves)
        out.backward(grad)
        return [out.detach(), *(own.grad for own in leaves if own.grad is not None)]

    for what, (out, *grads) in by_every_mode(run):
        assert_same_bits(out[:, :16], dense, what)
        assert not out[:, 16:].any() and not grads[1].any(), what
        assert_same_bits(grads[0], grad[:, :16], what)


@pytest.mark.parametrize("strided", [False, True])
def test_flushed_weights_are_zeros_with_their_sign(strided: bool) -> None:
    """By one call for all tensors, or by torch's operations for those that are not contiguous."""
    values = [1e-40, -1e-40, 1.17549421e-38, 1.17549435e-38, -0.0, float("nan"), float("-inf"), -3.0]
    weight = torch.tensor([values, values])
    expected = torch.tensor([[0.0, -0.0, 0.0, *values[3:]]] * 2)
    for _ in every_backend():
        own = weight.clone().t() if strided else weight.clone()
        ops.flush_denormals([own, torch.zeros(0)])
        assert_same_bits(own.t() if strided else own, expected)

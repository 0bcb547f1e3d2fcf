"""Law 1 for MLPs in bfloat16: to the bit those of bfloat16_truth.py at any thread count, and no word beyond their
outputs. Tests run on each of our products that are here; `make sanitize ARGS=--tiles` emulates those on AMX."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from bfloat16_truth import PRODUCTS, mlp_bf16, mlp_bf16_backward, multiply_add
from kernel_cases import assert_same_bits, guarded, running
from test_dense import MLPS, mlp_inputs
from torch import Tensor

from hotrow.kernels import ops
from loops import looped

needs_products = pytest.mark.skipif(
    not ops.bfloat16_products(), reason="the build or the processor has no products of bfloat16 (avx512_bf16)"
)
# And: sums over samples beyond one stretch (1024); odd widths, so that the last pair is half empty; widths of 1.
SHAPES = [*MLPS, (2085, (5, 18, 3)), (9, (1, 97, 1, 2))]


@pytest.fixture(autouse=True, params=["avx512_bf16", "amx_bf16"] if ops.bfloat16_products() == "amx_bf16" else [""])
def _products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each of our products that are here, in turn."""
    if not request.param:
        yield
        return
    before = ops.native_module().use_amx(use=request.param == "amx_bf16")
    assert ops.bfloat16_products() == request.param
    yield
    ops.native_module().use_amx(use=before)


def in_bfloat16(x: Tensor, weights: list[Tensor], biases: list[Tensor], grad: Tensor, last: str) -> list[Tensor]:
    """The output, and the gradients of x, weights and biases, as under `train.dense_dtype: bf16`."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights, *biases)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.mlp(leaves[0], leaves[1 : 1 + len(weights)], leaves[1 + len(weights) :], last=last)  # type: ignore[arg-type]
    assert out.dtype == torch.float32
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_reference(x: Tensor, weights: list[Tensor], biases: list[Tensor], grad: Tensor, last: str) -> list[Tensor]:
    multiply = PRODUCTS[ops.bfloat16_products()]
    out, inputs = mlp_bf16(x, weights, biases, last=last, multiply=multiply)  # type: ignore[arg-type]
    if last == "relu":
        grad = torch.where(out > 0, grad, 0.0)
    grad_x, grad_weights, grad_biases = mlp_bf16_backward(grad, inputs, weights, multiply)
    return [out, grad_x, *grad_weights, *grad_biases]


@needs_products
@looped(("samples", "widths"), SHAPES)
def test_mlp_in_bfloat16_equals_the_reference_at_any_thread_count(samples: int, widths: tuple[int, ...]) -> None:
    case = mlp_inputs(samples, widths)
    last = "linear" if len(widths) % 2 else "relu"
    expected = by_reference(*case, last)
    for threads in (1, 2, 3):
        with running(ops.isas()[-1], threads):
            for k, (ours, theirs) in enumerate(zip(in_bfloat16(*case, last), expected, strict=True)):
                assert_same_bits(ours, theirs, f"{threads} threads, tensor {k}")


@needs_products
def test_products_of_every_size_of_number_equal_the_reference() -> None:
    """Sums that cancel, are lost in rounding, fall below 2^-126 or exceed float32, and zeros of both signs."""
    g = torch.Generator().manual_seed(8)

    def wild(*shape: int, least: int, most: int) -> Tensor:
        numbers = torch.randn(shape, generator=g) * 2.0 ** torch.randint(least, most, shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < 0.1, numbers * 0, numbers).float()

    for least, most in ((-12, 12), (-66, -60), (-140, -10), (60, 66)):
        x, weight, grad = (wild(*s, least=least, most=most) for s in ((40, 23), (35, 23), (40, 35)))
        case = x, [weight], [torch.zeros(35)], grad
        for ours, theirs in zip(in_bfloat16(*case, "linear"), by_reference(*case, "linear"), strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert_same_bits(ours.nan_to_num(), theirs.nan_to_num(), f"exponents {least} to {most}")


AT_THE_END = [(-(2.0**-76), 2.0**-63, f * 2.0**-75, 2.0**-63) for f in (0.5, 1.0, 1.25, 1.5, 2.0)]
"""Pairs of which the odd product is 2^-126 and the even one takes less than 2^-149 away: 2^-126 is left, or nothing."""


@needs_products
def test_numbers_at_the_lower_end_equal_the_reference() -> None:
    x = torch.tensor([*(pair[2:] for pair in AT_THE_END), (2.0**-127, 2.0**-140), (2.0**-126, -(2.0**-127))])
    weight = torch.tensor([(-(2.0**-76), 2.0**-63), (2.0**40, 2.0**40)])
    if ops.bfloat16_products() == "amx_bf16":  # adds both in one chain if both are even, in the other order
        x, weight = (torch.stack([own[:, 1], own[:, 1] * 0, own[:, 0]], 1) for own in (x, weight))
    case = x, [weight], [torch.zeros(2)], torch.ones(len(x), 2)
    found = in_bfloat16(*case, "linear")
    for ours, theirs in zip(found, by_reference(*case, "linear"), strict=True):
        assert_same_bits(ours, theirs)
    assert found[0][:5, 0].tolist() == [2.0**-126, 2.0**-126, 0, 0, 0]
    assert found[0][5:, 1].tolist() == [0, 2.0**-86], "denormal inputs count as 0"


@needs_products
@looped(("last", "expected"), [(0.0, {"avx512_bf16": 0, "amx_bf16": 2}), (1.0, {"avx512_bf16": 0, "amx_bf16": 4})])
def test_the_order_of_a_sum_is_that_of_the_instruction(last: float, expected: dict[str, int]) -> None:
    """2^24 + 1 + 1 + 1, and `last` as element 32. A 1 that meets 2^24 is lost. On AMX two odd ones meet first, and
    `last` meets 2^24 + 2, from where it is rounded up."""
    x = torch.tensor([[2.0**12, 1, 1, 1] + [0] * 28 + [last]])
    case = x, [x.clone()], [torch.zeros(1)], torch.ones(1, 1)
    for found in (in_bfloat16(*case, "linear"), by_reference(*case, "linear")):
        assert found[0].item() - 2**24 == expected[ops.bfloat16_products()]


def test_multiply_add_of_the_reference_against_fractions() -> None:
    """Exact arithmetic, rounded once to 24 bits of any exponent, then flushed below 2^-126."""
    g = torch.Generator().manual_seed(9)

    def some(bits: int, least: int, most: int) -> Tensor:
        signs = torch.randint(0, 2, (700,), generator=g) * 2 - 1
        mantissas = torch.randint(2 ** (bits - 1), 2**bits, (700,), generator=g)
        return (signs * mantissas * 2.0 ** torch.randint(least, most, (700,), generator=g).double()).float()

    a, b = some(8, -72, -66), some(8, -72, -66)
    c = torch.where(torch.rand(700, generator=g) < 0.5, some(24, -149, -140), some(2, -126, -124))
    for far in (4, 40):  # c near the product, and far below or above it
        a, b = torch.cat([a, some(8, -9, 9)]), torch.cat([b, some(8, -9, 9)])
        c = torch.cat([c, some(24, -10 - far, -10 + far)])
    b_end, _, a_end, _ = zip(*AT_THE_END, strict=True)
    a, b = torch.cat([a, torch.tensor(a_end)]), torch.cat([b, torch.tensor(b_end)])
    c = torch.cat([c, torch.full((len(AT_THE_END),), 2.0**-126)])
    found = multiply_add(a, b, c)
    for one in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        assert one[3] == rounded(Fraction(one[0]) * Fraction(one[1]) + Fraction(one[2])), one


def rounded(exact: Fraction) -> float:
    """To nearest, ties to even, with 24 bits; below 2^-126 to 0."""
    if exact == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(exact)))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (abs(exact) < Fraction(2) ** exponent)
    unit = Fraction(2) ** (exponent - 23)
    nearest = round(exact / unit) * unit  # Python rounds fractions to even
    return float(nearest) if abs(nearest) >= Fraction(2) ** -126 else 0.0


@looped(("last", "products"), itertools.product(["relu", "linear"], PRODUCTS))
def test_reference_in_bfloat16_against_float64(last: str, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain rule in float64 on the rounded numbers, with the rounded activations: sums alone may differ."""
    x, weights, biases, grad = mlp_inputs(70, (13, 65, 33, 16))
    monkeypatch.setattr(ops, "bfloat16_products", lambda: products)
    found = by_reference(x, weights, biases, grad, last)
    _, inputs = mlp_bf16(x, weights, biases, last=last, multiply=PRODUCTS[products])  # type: ignore[arg-type]
    wide = [w.bfloat16().double() for w in weights]
    outputs = [i.double() @ w.T + b for i, w, b in zip(inputs, wide, biases, strict=True)]
    for ours, truth in zip(inputs[1:], outputs, strict=False):
        torch.testing.assert_close(ours.double(), truth.relu(), rtol=2.0**-8, atol=1e-6)
    g = grad.double() * (outputs[-1] > 0) if last == "relu" else grad.double()
    out = outputs[-1].relu() if last == "relu" else outputs[-1]
    torch.testing.assert_close(found[0].double(), out, rtol=1e-5, atol=1e-5)
    for k in reversed(range(3)):
        g = g.bfloat16().double()
        for ours, truth in ((found[2 + k], g.T @ inputs[k].double()), (found[5 + k], g.sum(0))):
            largest = float(truth.abs().max())
            torch.testing.assert_close(ours.double(), truth, rtol=0, atol=(2e-2 if k < 2 else 1e-5) * largest)
        g = g @ wide[k] * (inputs[k] > 0 if k else 1)
    torch.testing.assert_close(found[1].double(), g, rtol=0, atol=2e-2 * float(g.abs().max()))


@needs_products
@pytest.mark.parametrize(("samples", "widths"), [s for s in SHAPES if s[0] < 600])
def test_mlp_in_bfloat16_writes_its_outputs_and_no_more(samples: int, widths: tuple[int, ...]) -> None:
    native = pytest.importorskip("hotrow._native")
    x, weights, biases, grad = mlp_inputs(samples, widths)

    rows = -(-samples // ops.TILE_ROWS) * ops.TILE_ROWS
    for threads in (1, 2):
        inputs = guarded([torch.empty(rows, -(-width // 2)) for width in widths[:-1]])
        words = [own.tensor.view(torch.int32) for own in inputs]
        (out,) = guarded([grad])
        native.mlp_bf16(x, weights, biases, True, words, out.tensor, threads, None)
        grads = [guarded(tensors) for tensors in (weights, biases, [x])]
        made = [[own.tensor for own in group] for group in grads]
        native.mlp_bf16_backward(grad, words, weights, *made[:2], *made[2], threads, None)
        for own in (*inputs, out, *(own for group in grads for own in group)):
            own.check()
        for own in (out, *(own for group in grads for own in group)):
            assert not own.tensor.isnan().any()


@needs_products
def test_mlp_in_bfloat16_lets_nan_through() -> None:
    x, weights, biases, grad = mlp_inputs(9, (21, 50, 3))
    x[4, 7] = float("nan")
    out, grad_x, *_ = in_bfloat16(x, weights, biases, grad, "relu")
    assert out[4].isnan().all() and not out[:4].isnan().any() and not out[5:].isnan().any()
    assert grad_x[:4].isfinite().all()


@needs_products
def test_weights_that_stay_are_rearranged_once_for_each_arithmetic() -> None:
    """Panels of one arithmetic do not serve the other, and a second call with the same weights has the same bits."""
    case = mlp_inputs(40, (13, 50, 7))
    expected, wide = by_reference(*case, "linear"), ops.mlp(*case[:3], last="linear")
    x, weights, biases, _ = case
    with ops.weights_stay():
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert_same_bits(ops.mlp(x, weights, biases, last="linear"), expected[0])
            assert_same_bits(ops.mlp(x, weights, biases, last="linear"), wide)


@needs_products
def test_narrower_sets_leave_bfloat16_to_torch() -> None:
    x, weights, biases, _ = mlp_inputs(40, (13, 50, 7))
    with running(ops.isas()[0], 1), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not ops.bfloat16_products()
        assert ops.mlp(x, weights, biases, last="linear").dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert ops.mlp(x, weights, biases, last="linear").dtype == torch.float16


@needs_products
def test_a_limit_to_avx512_leaves_amx_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_ISA", "avx512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # the limit sets it for torch; put back afterwards
    ops._limit_isa(ops.native_module())
    assert ops.bfloat16_products() == "avx512_bf16"
    assert ops.isa_of("bf16") == "avx512 with avx512_bf16"


@pytest.mark.skipif("HOTROW_EMULATED_TILES" not in os.environ, reason="AMX's tiles are not emulated here")
def test_products_without_amx_run_if_the_system_refuses_its_tiles() -> None:
    program = "from hotrow.kernels import ops; print(ops.bfloat16_products(), ops.amx_refusal(), end='')"
    env = {**os.environ, "HOTROW_EMULATED_REFUSAL": "1"}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    assert told == "avx512_bf16 , not on AMX, because the system refuses its tiles (Operation not permitted)"

"""Weights in float16 and in two halves: conversions against numpy's and torch's, and what an update keeps or loses."""

import numpy as np
import pytest
import torch
from kernel_cases import Guarded, assert_same_bits, bits, every_backend, make_case, rules, running, stored
from torch import Tensor

from hotrow import KeyedJaggedTensor
from hotrow.kernels import ops, reference
from hotrow.kernels.types import ALGORITHMS, Algorithm, Feature, Layout, Rule, split, to_float16, widen
from hotrow.tables import Dtype
from loops import looped

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing to compare")

DIMS = (1, 3, 4, 8, 16, 21, 64)  # 21: pieces of every width there is
HALVES = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
"""Every pattern of 16 bits."""


def floats() -> Tensor:
    """float32 values at which rounding to float16 decides something, and random patterns of 32 bits."""
    g = torch.Generator().manual_seed(3)
    numbers = HALVES.view(torch.float16)
    near = numbers[numbers.isfinite()].float()
    halfway = (near + near.nextafter(torch.tensor(torch.inf)).half().float()) / 2
    steps = (near.double() + near.double().abs() * 2.0**-11).float()  # ties of normal numbers
    subnormal = torch.arange(-4100, 4100) * 2.0**-26  # quarters of the smallest float16
    edge = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 1e30, torch.inf, torch.nan, 0.0, 1e-40, 2.0**-25])
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=g).to(torch.int32).view(torch.float32)
    found = torch.cat([near, halfway, steps, subnormal, edge, -edge, patterns])
    return torch.cat([found, found.nextafter(torch.tensor(torch.inf)), found.nextafter(torch.tensor(-torch.inf))])


def rows_of(x: Tensor, dim: int) -> Tensor:
    return x[: x.numel() // dim * dim].view(-1, dim)


def one_table(dim: int) -> Layout:
    return Layout((Feature("f", 0, slice(0, dim), "sum"),), dim)


def every_row(num_rows: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(("f",), torch.arange(num_rows))


def step(weight: Tensor, low: Tensor | None, grad: Tensor, lr: float) -> None:
    """One SGD step of every row, by the native kernels."""
    kernels = ops.Kernels(one_table(weight.shape[1]))
    pending = [(kernels, every_row(len(weight)), grad)]
    kernels.update(ops.Arrays([weight], [low]), [], pending, [Rule(algorithm="sgd", lr=lr)])


@needs_native
@looped("n", [0, 1, 3 * 2**15 + 5])
def test_halves_of_dense_weights_equal_the_reference(n: int) -> None:
    """In place, at any thread count: every pattern of bits is split and joined, and no word beyond is written."""
    whole = floats()[:n]
    high, low = split(whole)
    for threads in (1, 2, 3):
        with running(ops.isas()[-1], threads):
            weight, lower = Guarded(whole), Guarded(torch.full((n,), 7, dtype=torch.int16))
            assert ops.are_upper_halves(weight.tensor) == (n < 2)
            ops.split_halves(weight.tensor, lower.tensor)
            assert_same_bits(weight.tensor, widen(high))
            assert torch.equal(lower.tensor, low)
            assert ops.are_upper_halves(weight.tensor)
            weight.check()
            lower.check()


@needs_native
@looped("weight_decay", [0.0, 0.1])
@looped("n", [0, 1, 3 * 2**15 + 5])
def test_split_sgd_equals_the_reference_and_rounds_every_operation(n: int, weight_decay: float) -> None:
    """In place, at any thread count, and equal to numpy's step of the whole weights; a NaN may have another payload."""
    whole, grad = floats()[:n], floats().flip(0)[:n].contiguous()
    high, low = split(whole)
    rate, decay = np.float32(0.3), np.float32(weight_decay)
    w, g = whole.numpy(), grad.numpy()
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(w - rate * (g + decay * w if weight_decay else g))
    number = ~expected.isnan()
    for threads in (None, 1, 2, 3):
        with running(ops.isas()[-1], threads or 1):
            weight, lower = Guarded(widen(high)), Guarded(low.clone())
            if threads is None:
                reference.split_sgd(weight.tensor, lower.tensor, grad, lr=0.3, weight_decay=weight_decay)
            else:
                ops.split_sgd([weight.tensor], [lower.tensor], [grad], lr=0.3, weight_decay=weight_decay)
            joined = widen(split(weight.tensor)[0], lower.tensor)
            assert_same_bits(joined[number], expected[number])
            assert joined[~number].isnan().all()
            assert ops.are_upper_halves(weight.tensor)
            weight.check()
            lower.check()


def test_reference_rounding_against_torch_and_numpy() -> None:
    x = floats()
    number = ~x.isnan()
    ours = to_float16(x)
    assert torch.equal(ours[number].view(torch.int16), x[number].half().view(torch.int16))
    with np.errstate(over="ignore"):
        assert np.array_equal(ours[number].numpy().view(np.int16), x[number].numpy().astype(np.float16).view(np.int16))
    assert ours[~number].isnan().all()


def test_reference_split_is_lossless_and_truncates() -> None:
    x = floats()
    high, low = split(x)
    assert torch.equal(bits(widen(high, low)), bits(x))
    assert torch.equal(bits(widen(high)), bits(x) & -(2**16))
    sure = x.isfinite()
    assert (widen(high[sure]).abs() <= x[sure].abs()).all()


@needs_native
@looped("dim", DIMS)
def test_every_float16_is_widened_as_by_numpy(dim: int) -> None:
    """A bag of one row is +0 + row: -0 becomes +0, all else stays."""
    table = rows_of(HALVES, dim).view(torch.float16)
    expected = torch.from_numpy(table.numpy().astype(np.float32)) + 0.0
    number = ~expected.isnan()
    kernels, arrays = ops.Kernels(one_table(dim)), ops.Arrays([table])
    for where in every_backend(threads=(1,)):
        out = kernels.lookup(arrays, every_row(len(table)))
        assert torch.equal(bits(out[number]), bits(expected[number])), where
        assert out[~number].isnan().all(), where


@needs_native
@looped("dim", DIMS)
def test_lookups_of_split_weights_read_the_upper_halves(dim: int) -> None:
    x = rows_of(floats(), dim)
    high, low = split(x)
    expected = (bits(x) & -(2**16)).view(torch.float32) + 0.0
    kernels, arrays = ops.Kernels(one_table(dim)), ops.Arrays([high], [low])
    for where in every_backend(threads=(1,)):
        out = kernels.lookup(arrays, every_row(len(x)))
        assert_same_bits(out[~expected.isnan()], expected[~expected.isnan()], where)


@needs_native
@looped("dim", DIMS)
def test_rounding_of_updates_against_torch(dim: int) -> None:
    """-0 - (-1) * x is x: what an update writes is x rounded, NaN included."""
    x = rows_of(floats(), dim)
    number = ~x.isnan()
    for where in every_backend(threads=(1,)):
        weight = torch.full(x.shape, -0.0, dtype=torch.float16)
        step(weight, None, x, lr=-1.0)
        assert torch.equal(bits(weight[number]), bits(x[number].half())), where
        assert_same_bits(weight, to_float16(x), where)


@needs_native
@looped("dim", DIMS)
def test_updates_by_nothing_change_nothing(dim: int) -> None:
    """Every float16 (NaN becomes quiet) and any split float32 comes back from a step of 0."""
    halves = rows_of(HALVES, dim).view(torch.float16)
    quiet = torch.where(halves.isnan(), (bits(halves) | 0x200), bits(halves)).to(torch.int16)
    x = rows_of(floats(), dim)
    high, low = split(x)
    number = ~x.isnan()
    for where in every_backend(threads=(1,)):
        weight = halves.clone()
        step(weight, None, torch.zeros(weight.shape), lr=1.0)
        assert torch.equal(bits(weight), quiet), where
        upper, lower = high.clone(), low.clone()
        step(upper, lower, torch.zeros(x.shape), lr=1.0)
        assert torch.equal(bits(widen(upper, lower)[number]), bits(x[number])), where
        assert widen(upper, lower)[~number].isnan().all(), where


@needs_native
@looped("algorithm", ALGORITHMS)
@looped("dim", [1, 16, 33, 64])
def test_split_tables_move_as_float32_tables(dim: int, algorithm: Algorithm) -> None:
    """Ten steps on the same gradients: weights joined and states are those of float32, to the bit."""
    plain = make_case(31, dim=dim, pooling="mean", weighted=True)
    for where in every_backend((1, 2)):
        weights, states = [w.clone() for w in plain.weights], plain.states(algorithm)
        (high, low), split_states = stored(plain.weights, "bfloat16"), plain.states(algorithm)
        kernels = ops.Kernels(plain.layout)
        for seed in range(10):
            case = make_case(seed, dim=dim, pooling="mean", weighted=True)
            pending = [(kernels, case.batches[0], case.grads[0])]
            kernels.update(ops.Arrays(weights), [ops.Arrays(s) for s in states], pending, rules(algorithm))
            halves = ops.Arrays(high, low)
            kernels.update(halves, [ops.Arrays(s) for s in split_states], pending, rules(algorithm))
        for w, upper, lower in zip(weights, high, low, strict=True):
            assert_same_bits(widen(upper, lower), w, (where, "weights"))
        for ours, theirs in zip(split_states, states, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_bits(mine, other, (where, "states"))


SMALL = 2.0**-12  # a quarter of the distance from 1 to the next float16


ALL_KEPT = 1 + 1000 * SMALL


@looped(("dtype", "expected"), [("float32", ALL_KEPT), ("bfloat16", ALL_KEPT), ("float16", 1.0)])
def test_small_updates_are_lost_in_float16_alone(dtype: Dtype, expected: float) -> None:
    (weight,), (low,) = stored([torch.ones(2, 4)], dtype)
    for _ in range(1000):
        step(weight, low, torch.full((2, 4), -SMALL), lr=1.0)
    assert (widen(weight, low) == expected).all()


@looped("num_threads", [1, 2])
def test_float16_rounds_once_per_batch(num_threads: int) -> None:
    """The same thousand updates of 1, in one batch: applied in float32, 1.244140625, then rounded."""
    weight = torch.ones(2, 4, dtype=torch.float16)
    kernels = ops.Kernels(one_table(4))
    batch = KeyedJaggedTensor(("f",), torch.tensor([0, 1] * 1000))  # the two rows take turns
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        pending = [(kernels, batch, torch.full((2000, 4), -SMALL))]
        kernels.update(ops.Arrays([weight]), [], pending, [Rule(algorithm="sgd", lr=1.0)])
    finally:
        torch.set_num_threads(before)
    assert (weight == torch.tensor(ALL_KEPT).half()).all()


def test_arrays_must_fit() -> None:
    weight, low = torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"array 0 is torch.bfloat16 \(3, 2\), its lower halves are None"):
        ops.Arrays([weight])
    with pytest.raises(ValueError, match=r"its lower halves are \(2, 2\)"):
        ops.Arrays([weight], [low[:2]])
    with pytest.raises(ValueError, match=r"array 0 is torch.float32 .* others none"):
        ops.Arrays([weight.float()], [low])
    with pytest.raises(ValueError, match=r"low half 0 is torch.int32 .* pass contiguous int16"):
        ops.Arrays([weight], [low.int()])
    with pytest.raises(ValueError, match=r"array 0 is torch.float64 .* pass contiguous float32 or float16 or bfloat16"):
        ops.Arrays([weight.double()])


@needs_native
def test_state_must_be_float32() -> None:
    case = make_case(1, dim=4)
    states = [ops.Arrays([torch.zeros(w.shape, dtype=torch.float16) for w in case.weights])]
    kernels = ops.Kernels(case.layout)
    pending = [(kernels, case.batches[0], case.grads[0])]
    with pytest.raises(ValueError, match="state must be float32"):
        kernels.update(ops.Arrays(case.weights), states, pending, rules("adagrad"))


def test_reference_runs_without_native_kernels() -> None:
    """Its own loss of small updates: the twin says the same as the kernels above."""
    (weight,), _ = stored([torch.ones(1, 3)], "float16")
    pending = [(one_table(3), every_row(1), torch.full((1, 3), -SMALL))]
    for _ in range(10):
        reference.update(one_table(3), [weight], [], pending, [Rule(algorithm="sgd", lr=1.0)])
    assert (weight == 1).all()

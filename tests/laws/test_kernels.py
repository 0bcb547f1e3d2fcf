"""Law 1: every embedding op equals its readable reference to the bit, at any thread count and instruction set."""

from __future__ import annotations

import itertools
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DIMS,
    DTYPES,
    SENTINEL,
    Case,
    Guarded,
    assert_refused,
    assert_same_bits,
    clones,
    every_backend,
    make_case,
    rules,
    stored,
)

from hotrow import KeyedJaggedTensor
from hotrow.kernels import ops, reference, types
from hotrow.kernels.types import ALGORITHMS, Algorithm, Layout, Rule
from hotrow.tables import Dtype, TableConfig
from loops import looped
from sampled import sampled

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing to compare")

BATCH_KINDS = list(itertools.product(("sum", "mean"), (False, True), (torch.int32, torch.int64), (False, True)))


def kinds(seed: int, dim: int, dtype: Dtype = "float32", **more: int) -> list[tuple[str, Case]]:
    """One case for each combination of pooling, per-sample weights, id type and one-hot or jagged bags.

    Where weights are not float32, every fifth: each value of each axis occurs, and twice.
    """
    config = {"dim": dim, "dtype": dtype, **more}
    return [
        (
            f"seed {seed} dim {dim} {dtype} {pooling} weighted={weighted} {id_dtype} jagged={jagged}",
            make_case(seed, pooling=pooling, weighted=weighted, id_dtype=id_dtype, jagged=jagged, **config),
        )
        for pooling, weighted, id_dtype, jagged in BATCH_KINDS[:: 1 if dtype == "float32" else 5]
    ]


def check_lookup(case: Case, what: str, threads: tuple[int, ...] = (1, 2)) -> None:
    batch = case.batches[0]
    wider = torch.full((batch.stride, case.layout.width + 3), SENTINEL)
    expected = wider.clone()
    reference.lookup(case.layout, case.weights, batch, expected)
    kernels, weights = ops.Kernels(case.layout), ops.Arrays(case.weights, case.low)
    for where in every_backend(threads):
        out = Guarded(wider)
        kernels.lookup(weights, batch, out.tensor)
        out.check()
        assert_same_bits(out.tensor, expected, (what, where))


@needs_native
@pytest.mark.parametrize("dims", [(64, 16, 32, 64), (64, 8, 64, 40)], ids=["on whole cache lines", "partly"])
def test_outputs_too_large_for_the_caches(dims: tuple[int, ...]) -> None:
    """From 8 MiB on, rows that are whole cache lines are written past the caches."""
    names, num_rows, batch_size = tuple("abcd"), 50, 13_000
    configs = [
        TableConfig(name=n, num_embeddings=num_rows, embedding_dim=d, feature_names=(n,))
        for n, d in zip(names, dims, strict=True)
    ]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(num_rows, d, generator=generator) for d in dims]
    ids = torch.randint(num_rows, (4, batch_size), generator=generator)
    expected = torch.cat([weight[column] for weight, column in zip(weights, ids, strict=True)], 1)
    kernels, batch = ops.Kernels(Layout.of(configs)), KeyedJaggedTensor(names, ids.flatten())
    for where in every_backend():
        out = ops.empty(*expected.shape).fill_(SENTINEL)  # on pages of its own, so the first column is on a line
        assert_same_bits(kernels.lookup(ops.Arrays(weights), batch, out), expected, where)
        beside = Guarded(torch.full(expected.shape, SENTINEL))
        kernels.lookup(ops.Arrays(weights), batch, beside.tensor)
        beside.check()
        assert_same_bits(beside.tensor, expected, where)


@needs_native
def test_sgd_on_many_tables_takes_each_as_a_whole() -> None:
    """From four tables a thread on, none is cut by row; rows that repeat still take their gradients in order."""
    names, num_rows, dim, batch_size, lookups = tuple("abcdefghijkl"), 300, 16, 200, 7
    configs = [TableConfig(name=n, num_embeddings=num_rows, embedding_dim=dim, feature_names=(n,)) for n in names]
    layout, generator = Layout.of(configs), torch.Generator().manual_seed(4)
    weights = [torch.randn(num_rows, dim, generator=generator) for _ in names]
    ids = torch.randint(num_rows, (len(names) * batch_size * lookups,), generator=generator)
    lengths = torch.full((len(names) * batch_size,), lookups)
    batch = KeyedJaggedTensor(names, ids, lengths=lengths)
    grad = torch.randn(batch_size, layout.width, generator=generator)
    rule = Rule(algorithm="sgd", lr=0.1)
    expected = clones(weights)
    reference.update(layout, expected, [], [(layout, batch, grad)], [rule] * len(names))
    for where in every_backend((1, 2, 3, 4)):
        found = clones(weights)
        kernels = ops.Kernels(layout)
        kernels.update(ops.Arrays(found), [], [(kernels, batch, grad)], [rule] * len(names))
        for table, wanted in zip(found, expected, strict=True):
            assert_same_bits(table, wanted, where)


def check_weight_gradient(case: Case, what: str, threads: tuple[int, ...] = (1, 2)) -> None:
    batch, grad = case.batches[0], case.grads[0]
    expected = torch.zeros(batch.values.numel())
    reference.weight_gradient(case.layout, case.weights, batch, grad, expected)
    kernels, weights = ops.Kernels(case.layout), ops.Arrays(case.weights, case.low)
    for where in every_backend(threads):
        assert_same_bits(kernels.weight_gradient(weights, batch, grad), expected, (what, where))


def check_update(case: Case, algorithm: Algorithm, what: str, threads: tuple[int, ...] = (1, 2)) -> None:
    lookups = [(case.layout, batch, grad) for batch, grad in zip(case.batches, case.grads, strict=True)]
    expected, expected_low = clones(case.weights), clones(case.low)
    expected_states = case.states(algorithm)
    numbers = rules(algorithm, len(case.weights))
    reference.update(case.layout, expected, expected_states, lookups, numbers, low=expected_low)
    kernels = ops.Kernels(case.layout)
    pending = [(kernels, batch, grad) for _, batch, grad in lookups]
    for where in every_backend(threads):
        weights, low = ([w if w is None else Guarded(w) for w in part] for part in (case.weights, case.low))
        states = [[Guarded(s) for s in state] for state in case.states(algorithm)]
        arrays = [ops.Arrays([s.tensor for s in state]) for state in states]
        weight_arrays = ops.Arrays([w.tensor for w in weights], [half and half.tensor for half in low])
        kernels.update(weight_arrays, arrays, pending, numbers)
        ours, theirs = chain(weights, low, *states), chain(expected, expected_low, *expected_states)
        for mine, other in zip(ours, theirs, strict=True):
            if mine is not None:
                mine.check()
                assert_same_bits(mine.tensor, other, (what, algorithm, where))


@needs_native
@looped("dtype", DTYPES)
@looped("dim", DIMS)
def test_lookup(dim: int, dtype: Dtype) -> None:
    for what, case in kinds(1, dim, dtype):
        check_lookup(case, what)


@needs_native
@looped("dtype", DTYPES)
@looped("dim", DIMS)
def test_weight_gradient(dim: int, dtype: Dtype) -> None:
    for what, case in kinds(2, dim, dtype):
        check_weight_gradient(case, what)


@needs_native
@looped(("dim", "algorithm", "dtype"), sampled(DIMS, ALGORITHMS, DTYPES))
def test_update(dim: int, algorithm: str, dtype: Dtype) -> None:
    for what, case in kinds(3, dim, dtype):
        check_update(case, algorithm, what)


@needs_native
@looped("dtype", DTYPES)
@looped("algorithm", ALGORITHMS)
def test_several_batches_update_in_forward_order(algorithm: str, dtype: Dtype) -> None:
    for what, case in kinds(4, 16, dtype, num_batches=3):
        check_update(case, algorithm, what)


def make_large_case(*, crowded: bool = False, dtype: Dtype = "float32") -> Case:
    return make_case(5, dim=16, num_samples=5000, num_rows=30_000, longest=19, crowded=crowded, dtype=dtype)


@needs_native
@looped(
    ("case", "crowded"),
    sampled(
        [*((a, "float32") for a in ALGORITHMS), ("sgd", "float16"), ("sgd", "bfloat16")], [False, True], pairs=False
    ),
)
def test_work_cut_into_many_tasks(case: tuple[Algorithm, Dtype], crowded: bool) -> None:
    """Large enough that sorts and updates are shared among threads, in pieces that split no row.

    Evenly drawn ids let SGD sort by leading bits alone; crowded ones make the first of 256 ranges of rows too much for
    one thread, and it sorts in full. Of float16, whose rows must be written once, it always does.
    """
    algorithm, dtype = case
    large = make_large_case(crowded=crowded, dtype=dtype)
    assert large.batches[0].bags("a")[0].numel() > 1 << 15, "too small for several threads to share a sort"
    check_update(large, algorithm, "large batch", threads=(1, 2, 3))


@needs_native
def test_lookup_cut_into_many_tasks() -> None:
    check_lookup(make_large_case(), "large batch", threads=(1, 2, 3))
    check_weight_gradient(make_large_case(), "large batch", threads=(1, 2, 3))


@needs_native
@looped("algorithm", ALGORITHMS)
@looped(("jagged", "num_samples"), [(True, 0), (False, 0), (True, 1), (False, 1)])
def test_tiny_batches(algorithm: str, jagged: bool, num_samples: int) -> None:
    case = make_case(6, dim=8, num_samples=num_samples, jagged=jagged)
    check_lookup(case, f"{num_samples} samples")
    check_update(case, algorithm, f"{num_samples} samples")


def make_unlike_tables(seed: int) -> Case:
    """Tables that differ in everything a table may: rows, dim, storage, pooling, and how many features share them."""
    g = torch.Generator().manual_seed(seed)
    unlike = (
        ("sum", "float32", 40, 16, 1), ("mean", "float16", 9, 33, 2), ("sum", "bfloat16", 300, 1, 1),
        ("mean", "float32", 1, 64, 1), ("sum", "float16", 25, 8, 3), ("mean", "bfloat16", 7, 100, 2),
    )  # fmt: skip
    configs, weights, low, values, lengths, names = [], [], [], [], [], []
    for t, (pooling, dtype, num_rows, dim, num_features) in enumerate(unlike):
        own = tuple(f"{t}.{f}" for f in range(num_features))
        kind: Any = {"pooling": pooling, "dtype": dtype}
        configs.append(TableConfig(name=str(t), num_embeddings=num_rows, embedding_dim=dim, feature_names=own, **kind))
        (weight,), (half,) = stored([torch.randn(num_rows, dim, generator=g)], dtype)  # type: ignore[arg-type]
        weights.append(weight)
        low.append(half)
        for name in own:
            names.append(name)
            lengths.append(torch.randint(0, 4, (29,), generator=g))
            values.append(torch.randint(0, num_rows, (int(lengths[-1].sum()),), generator=g))
    layout, order = Layout.of(configs), torch.randperm(len(names), generator=g).tolist()
    ids = torch.cat([values[i] for i in order])
    own, scales = torch.cat([lengths[i] for i in order]), torch.randn(ids.numel(), generator=g)
    batch = KeyedJaggedTensor([names[i] for i in order], ids, scales, lengths=own)
    return Case(layout, weights, low, [batch], [torch.randn(29, layout.width, generator=g)])


@needs_native
@looped("algorithm", ALGORITHMS)
def test_tables_of_every_kind_side_by_side(algorithm: Algorithm) -> None:
    """One call serves tables that differ in storage, width and pooling: none may be read as its neighbour is."""
    case = make_unlike_tables(11)
    check_lookup(case, "unlike tables", threads=(1, 2, 3))
    check_weight_gradient(case, "unlike tables", threads=(1, 2, 3))
    check_update(case, algorithm, "unlike tables", threads=(1, 2, 3))


@needs_native
@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 70),
    kind=st.sampled_from(BATCH_KINDS),
    num_samples=st.integers(0, 9),
    num_batches=st.integers(1, 3),
    num_rows=st.integers(1, 5000),
    algorithm=st.sampled_from(ALGORITHMS),
    dtype=st.sampled_from(DTYPES),
)
def test_any_case(
    seed: int, dim: int, kind: tuple, num_samples: int, num_batches: int, num_rows: int, algorithm: str, dtype: Dtype
) -> None:
    pooling, weighted, id_dtype, jagged = kind
    kind = {"pooling": pooling, "weighted": weighted, "id_dtype": id_dtype, "jagged": jagged, "dtype": dtype}
    sizes = {"dim": dim, "num_samples": num_samples, "num_batches": num_batches, "num_rows": num_rows}
    case = make_case(seed, **kind, **sizes)
    check_lookup(case, "hypothesis")
    check_weight_gradient(case, "hypothesis")
    check_update(case, algorithm, "hypothesis")


@needs_native
def test_signed_zeros_and_infinities() -> None:
    """Sums start at +0, so a bag of -0 alone is +0; infinities pass through as in the reference."""
    case = make_case(8, dim=33, jagged=False)
    case.weights[0].fill_(-0.0)
    case.weights[1][:, ::3] = float("inf")
    check_lookup(case, "specials")
    out = ops.Kernels(case.layout).lookup(ops.Arrays(case.weights), case.batches[0])
    assert (1 / out[:, :33] > 0).all()


@needs_native
@looped("algorithm", ["sgd", "adagrad", "row_wise_adagrad"])
def test_rows_beyond_32_bits(algorithm: str) -> None:
    """Only the pages that are touched take memory, so a table of 16 GiB costs next to nothing."""
    num_rows = 2**32 + 2
    try:
        weight, state = ops.allocate(num_rows, 1), ops.allocate(num_rows)
    except MemoryError:
        pytest.skip("this machine grants no 16 GiB of address space")
    rows = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, num_rows - 1])
    weight[rows] = torch.arange(1.0, 7.0)[:, None]
    layout = types.Layout((types.Feature("f", 0, slice(0, 1), "sum"),), 1)
    batch = KeyedJaggedTensor(["f"], rows.flip(0).repeat(2))
    kernels, arrays = ops.Kernels(layout), ops.Arrays([weight])
    pooled = kernels.lookup(arrays, batch)
    assert pooled[:6, 0].tolist() == [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    shaped = state if algorithm == "row_wise_adagrad" else state[:, None]
    states = [ops.Arrays([shaped])] * (algorithm != "sgd")
    kernels.update(arrays, states, [(kernels, batch, -pooled)], [Rule(algorithm=algorithm, lr=0.5)])
    # SGD adds 0.5 * w twice; the Adagrads take one step of 0.5 whatever the gradient's size.
    expected = 2 * torch.arange(1.0, 7.0) if algorithm == "sgd" else torch.arange(1.0, 7.0) + 0.5
    assert weight[rows, 0].tolist() == expected.tolist()


BAD_IDS = [(-1, torch.int32), (-1, torch.int64), (9, torch.int32), (2**31 - 1, torch.int32), (2**40, torch.int64)]


@needs_native
@looped(("bad", "id_dtype"), BAD_IDS)
@looped("algorithm", ALGORITHMS)
def test_bad_ids_are_named_and_change_nothing(bad: int, id_dtype: torch.dtype, algorithm: str) -> None:
    """Feature c, table "shared" of 9 rows, sample 5: the second of its ids is bad."""
    case = make_case(9, dim=16, id_dtype=id_dtype)
    batch, grad = case.batches[0], case.grads[0]
    assert batch.keys[0] == "c" and int(batch.lengths[5]) > 1, "the seed must give sample 5 of c two ids"
    batch.values[int(batch.offsets[5]) + 1] = bad
    kernels = ops.Kernels(case.layout)
    message = f"feature 'c', sample 5, position 1: id {bad} is outside its table of 9 rows"
    for where in every_backend():
        weights, states = [w.clone() for w in case.weights], case.states(algorithm)
        arrays, state_arrays = ops.Arrays(weights), [ops.Arrays(state) for state in states]
        assert_refused(message, kernels, arrays, batch, grad, algorithm, state_arrays)
        for ours, before in zip(chain(weights, *states), chain(case.weights, *case.states(algorithm)), strict=True):
            assert_same_bits(ours, before, where)


@needs_native
@looped("bad", ["negative", "past the end", "past the next"])
def test_altered_offsets_are_refused(bad: str) -> None:
    """Memory safety does not rest on the batch's constructor: its tensors can be changed afterwards."""
    case = make_case(10, dim=4)
    batch = case.batches[0]
    assert batch.keys[2] == "a" and int(batch.offsets[30]) < int(batch.offsets[38]), "30..38 must be bags of a"
    batch.offsets[30] = {"negative": -3, "past the end": 10**9, "past the next": int(batch.offsets[38])}[bad]
    kernels, arrays = ops.Kernels(case.layout), ops.Arrays(case.weights)
    for _ in every_backend():
        assert_refused("offsets have changed", kernels, arrays, batch, case.grads[0])


# Published with Random123 (kat_vectors, "philox4x32 10"): counter, key, output.
PHILOX_KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@looped(("counter", "key", "expected"), PHILOX_KNOWN_ANSWERS)
def test_philox_against_random123(counter: str, key: str, expected: str) -> None:
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    result = reference.philox4x32(torch.tensor([words]), high << 32 | low)
    assert [f"{word:08x}" for word in result[0].tolist()] == expected.split()


@needs_native
@looped("dim", (*DIMS, 7, 15))  # the last group of four columns may be short in any way
def test_initial_rows(dim: int) -> None:
    key = types.row_key(3, "user")
    for first_row, zero_rows in ((0, 0), (0, 2), (1, 2), (5, 2), (2**32 - 2, 1)):
        expected = torch.empty(7, dim)
        reference.fill_uniform(key, first_row, expected, 0.037, zero_rows)
        for where in every_backend():
            out = Guarded(torch.full((7, dim), SENTINEL))
            ops.fill_uniform(out.tensor, key=key, bound=0.037, zero_rows=zero_rows, first_row=first_row)
            out.check()
            assert_same_bits(out.tensor, expected, (dim, first_row, zero_rows, where))
            ops.fill_uniform(out.tensor, key=key, bound=0.0, zero_rows=zero_rows, first_row=first_row)
            assert_same_bits(out.tensor, torch.zeros(7, dim), "without a minus sign")
    assert_same_bits(reference.uniform_rows(key, torch.arange(7), dim, 0.0, 0), torch.zeros(7, dim), "reference")


@needs_native
def test_initial_rows_do_not_depend_on_how_they_are_cut() -> None:
    key = types.row_key(0, "t")
    for where in every_backend(threads=(1, 3)):
        whole = torch.empty(40_000, 64)  # 10 MB: several tasks
        ops.fill_uniform(whole, key=key, bound=1.0)
        for row in (0, 1, 4095, 4096, 39_999):
            alone = torch.empty(1, 64)
            reference.fill_uniform(key, row, alone, 1.0, 0)
            assert_same_bits(whole[row : row + 1], alone, (row, where))

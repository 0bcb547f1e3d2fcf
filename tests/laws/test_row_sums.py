"""Sums of rows' gradients by micro-batch: the order that docs/numerics.md states, written again here in plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_cases import DIMS, DTYPES, Case, assert_same_bits, clones, every_backend, make_case, rules
from torch import Tensor

from hotrow import KeyedJaggedTensor
from hotrow.kernels import ops, reference, tree
from hotrow.kernels.types import ALGORITHMS, Algorithm, Layout, RowSums
from hotrow.tables import Dtype
from loops import looped

Vector = np.ndarray
Lookup = tuple[Layout, KeyedJaggedTensor, Tensor]


def add(left: Vector | None, right: Vector | None) -> Vector | None:
    return right if left is None else left if right is None else left + right


def added(left: dict[int, Vector], right: dict[int, Vector]) -> dict[int, Vector]:
    return {row: add(left.get(row), right.get(row)) for row in left | right}


def subtree(leaves: dict[int, Vector], first: int, size: int) -> Vector | None:
    """The sum of a subtree: left + right, an absent one skipped."""
    if size == 1:
        return leaves.get(first)
    return add(subtree(leaves, first, size // 2), subtree(leaves, first + size // 2, size // 2))


def occurrences(layout: Layout, pending: list[Lookup], table: int) -> list[tuple[int, int, Vector]]:
    """(row, part, gradient) in the order (feature, forward pass, bag, position)."""
    found = []
    for name in [feature.name for feature in layout.features if feature.table == table]:
        for served, sparse, grad in pending:
            for feature in [feature for feature in served.features if feature.name == name]:
                values, offsets, weights = sparse.bags(name)
                for bag, (start, stop) in enumerate(pairwise(offsets.tolist())):
                    part = sum(start <= bag for start in (sparse.parts or (0, sparse.stride))[1:])
                    for i in range(start, stop):
                        scale = np.float32(1) if weights is None else weights[i].numpy()
                        if feature.pooling == "mean":
                            scale = scale / np.float32(stop - start)
                        g = np.float32(scale) * grad[bag, feature.columns].numpy()
                        found.append((int(values[i]), part, g))
    return found


def slow_sums(layout: Layout, pending: list[Lookup], leaves: tuple[int, int]) -> dict[tree.Node, list[RowSums]]:
    found: dict[tree.Node, list[RowSums]] = {node: [] for node in tree.aligned(*leaves)}
    for t in range(1 + max(feature.table for feature in layout.features)):
        columns = next(feature.columns for feature in layout.features if feature.table == t)
        by_row: dict[int, dict[int, Vector]] = {}
        for row, part, g in occurrences(layout, pending, t):
            sums = by_row.setdefault(row, {})
            sums[leaves[0] + part] = sums[leaves[0] + part] + g if leaves[0] + part in sums else g
        for node in found:
            whole = {row: subtree(by_row[row], *node) for row in sorted(by_row)}
            kept = {row: total for row, total in whole.items() if total is not None}
            sums = np.array([*kept.values()], np.float32).reshape(len(kept), columns.stop - columns.start)
            found[node].append(RowSums(torch.tensor([*kept], dtype=torch.int64), torch.from_numpy(sums)))
    return found


def assert_same_sums(ours: dict[tree.Node, list[RowSums]], truth: dict[tree.Node, list[RowSums]], what: object) -> None:
    assert ours.keys() == truth.keys(), what
    for node, tables in truth.items():
        for t, (mine, other) in enumerate(zip(ours[node], tables, strict=True)):
            assert mine.rows.dtype == torch.int64 and torch.equal(mine.rows, other.rows), (what, node, t)
            assert_same_bits(mine.sums, other.sums, (what, node, t))


def cut(case: Case, starts: list[int]) -> list[Lookup]:
    return [(case.layout, b.in_parts(starts), g) for b, g in zip(case.batches, case.grads, strict=True)]


def check(layout: Layout, pending: list[Lookup], weights: list[Tensor], leaves: tuple[int, int], what: object) -> None:
    truth = slow_sums(layout, pending, leaves)
    assert_same_sums(reference.row_sums(layout, pending, leaves), truth, what)
    kernels, arrays = ops.Kernels(layout), ops.Arrays(weights)
    lookups = [(kernels if own is layout else ops.Kernels(own, among=layout), b, g) for own, b, g in pending]
    for where in every_backend((1, 2)):
        assert_same_sums(kernels.row_sums(arrays, lookups, leaves), truth, (what, where))


@looped("dim", DIMS)
@looped("pooling", ["sum", "mean"])
@looped("weighted", [False, True])
def test_sums_against_plain_loops(dim: int, pooling: str, weighted: bool) -> None:
    for jagged, id_dtype in ((True, torch.int64), (False, torch.int32)):
        case = make_case(3, dim=dim, pooling=pooling, weighted=weighted, jagged=jagged, id_dtype=id_dtype)
        check(case.layout, cut(case, tree.starts(13, 4)), case.weights, (0, 4), (jagged, id_dtype))


@looped(("starts", "leaves"), [
    ([0, 13], (0, 1)),
    ([0, 4, 8, 13], (0, 3)),
    ([0, 4, 8, 13], (0, 4)),
    ([0, 2, 2, 5, 9, 13], (3, 8)),
    ([0, 0, 1, 3, 13, 13, 13], (1, 7)),
    ([*range(14)], (0, 16)),
    ([*range(14)], (3, 16)),
])  # fmt: skip
def test_nodes_of_any_range(starts: list[int], leaves: tuple[int, int]) -> None:
    """Parts of any number and length, empty ones too; several forward passes."""
    case = make_case(4, dim=5, num_batches=3)
    check(case.layout, cut(case, starts), case.weights, leaves, (starts, leaves))


@looped("num_samples", [0, 1, 3])
def test_fewer_samples_than_parts(num_samples: int) -> None:
    case = make_case(5, dim=8, num_samples=num_samples)
    check(case.layout, cut(case, tree.starts(num_samples, 8)), case.weights, (0, 8), num_samples)


def test_sequences_and_some_of_the_tables() -> None:
    """Sequences are cut where their ids are; kernels of some tables leave the others alone."""
    case = make_case(6, dim=16, num_batches=2)
    starts, generator = tree.starts(13, 4), torch.Generator().manual_seed(1)
    pending: list[Lookup] = []
    kept = Layout(tuple(f for f in case.layout.features if f.table != 1), case.layout.width)
    pending.append((kept, case.batches[0].in_parts(starts), case.grads[0]))
    for name in ("c", "a", "b"):
        values, offsets, _ = case.batches[1].bags(name)
        sparse = KeyedJaggedTensor((name,), values).in_parts(offsets[starts].tolist())
        grad = torch.randn(len(values), 16, generator=generator)
        pending.append((case.layout.sequence_of(name), sparse, grad))
    check(case.layout, pending, case.weights, (0, 4), "sequences")


def test_work_cut_into_many_tasks() -> None:
    case = make_case(7, dim=16, num_samples=5000, num_rows=30_000, longest=19, crowded=True)
    pending = cut(case, tree.starts(5000, 6))
    assert case.batches[0].bags("a")[0].numel() > 1 << 15, "too small for several threads to share a sort"
    kernels, arrays = ops.Kernels(case.layout), ops.Arrays(case.weights)
    truth = reference.row_sums(case.layout, pending, (2, 8))
    for where in every_backend((1, 2, 3)):
        found = kernels.row_sums(arrays, [(kernels, sparse, grad) for _, sparse, grad in pending], (2, 8))
        assert_same_sums(found, truth, where)


@looped("cuts", [(0, 3, 8), (0, 2, 4, 8), (0, 1, 2, 5, 6, 8), (0, 0, 7, 8)])
def test_nodes_of_several_ranks_give_the_sums_of_one(cuts: tuple[int, ...]) -> None:
    case = make_case(8, dim=7, num_samples=40, num_batches=2)
    starts = tree.starts(40, 8)
    whole = reference.row_sums(case.layout, cut(case, starts), (0, 8))[0, 8]
    nodes: dict[tree.Node, list[RowSums]] = {}
    for lo, hi in pairwise(cuts):
        own = [batch.samples(starts[lo], starts[hi]) for batch in case.batches]
        local = [start - starts[lo] for start in starts[lo : hi + 1]]
        grads = [grad[starts[lo] : starts[hi]] for grad in case.grads]
        pending = [(case.layout, batch.in_parts(local), grad) for batch, grad in zip(own, grads, strict=True)]
        nodes |= reference.row_sums(case.layout, pending, (lo, hi))
    for t, truth in enumerate(whole):
        by_row = {
            node: dict(zip(tables[t].rows.tolist(), tables[t].sums.numpy(), strict=True))
            for node, tables in nodes.items()
        }
        found = tree.total(by_row, (0, 8), added)
        assert found is not None
        assert sorted(found) == truth.rows.tolist()
        sums = np.stack([found[row] for row in sorted(found)])
        assert_same_bits(torch.from_numpy(sums), truth.sums, f"{cuts}, table {t}")


def test_lookups_of_one_step_are_cut_alike() -> None:
    case = make_case(9, dim=4, num_batches=2)
    pending = [*cut(case, [0, 5, 13])[:1], *cut(case, [0, 5, 9, 13])[1:]]
    with pytest.raises(ValueError, match="cut into 2 and 3 micro-batches"):
        reference.row_sums(case.layout, pending, (0, 4))
    kernels = ops.Kernels(case.layout)
    with pytest.raises(ValueError, match="cut into 2 and 3 micro-batches"):
        kernels.row_sums(ops.Arrays(case.weights), [(kernels, b, g) for _, b, g in pending], (0, 4))
    with pytest.raises(ValueError, match="must rise from 0 to the 13 samples"):
        case.batches[0].in_parts([0, 5, 4, 13])


def check_update(case: Case, starts: list[int], algorithm: Algorithm, threads: tuple[int, ...] = (1, 2)) -> None:
    """The rule, once for each row and its sum over all micro-batches: first by the reference, then by the kernels."""
    lookups, numbers = cut(case, starts), rules(algorithm, len(case.weights))
    whole = (0, tree.width(len(starts) - 1))
    once = [
        (case.layout.sequence_of(feature.name), KeyedJaggedTensor((feature.name,), rows), sums)
        for table, (rows, sums) in enumerate(slow_sums(case.layout, lookups, whole)[whole])
        for feature in [next(f for f in case.layout.features if f.table == table)]
    ]
    truth, low, states = clones(case.weights), clones(case.low), case.states(algorithm)
    reference.update(case.layout, truth, states, once, numbers, low=low)
    found = clones(case.weights), clones(case.low), case.states(algorithm)
    reference.update(case.layout, found[0], found[2], lookups, numbers, low=found[1])
    kernels = ops.Kernels(case.layout)
    pending = [(kernels, batch, grad) for _, batch, grad in lookups]
    wanted = [truth, low, *states]
    assert_same_arrays([found[0], found[1], *found[2]], wanted, "reference")
    for where in every_backend(threads):
        weights, halves, own = clones(case.weights), clones(case.low), case.states(algorithm)
        kernels.update(ops.Arrays(weights, halves), [ops.Arrays(state) for state in own], pending, numbers)
        assert_same_arrays([weights, halves, *own], wanted, where)


def assert_same_arrays(ours: list[list[Tensor]], truth: list[list[Tensor]], what: object) -> None:
    for mine, other in zip(ours, truth, strict=True):
        for own, wanted in zip(mine, other, strict=True):
            if own is not None:
                assert_same_bits(own, wanted, what)


@looped("dtype", DTYPES)
@looped("algorithm", ALGORITHMS)
@looped("dim", [3, 16])
def test_update(dim: int, algorithm: Algorithm, dtype: Dtype) -> None:
    for pooling, weighted in (("sum", False), ("mean", True)):
        case = make_case(10, dim=dim, pooling=pooling, weighted=weighted, num_batches=2, dtype=dtype)
        check_update(case, [0, 2, 2, 5, 9, 13], algorithm)


@looped("dtype", DTYPES)
@looped("num_rows", [2000, 16_000])
@looped("algorithm", ["sgd", "row_wise_adagrad"])
def test_update_of_many_rows(algorithm: Algorithm, num_rows: int, dtype: Dtype) -> None:
    """More rows than are summed at once before they are applied; of 16,000, those that occur once are not sorted."""
    case = make_case(11, dim=128, num_samples=900, num_rows=num_rows, crowded=True, weighted=True, dtype=dtype)
    check_update(case, [0, 300, 600, 900], algorithm)

"""The kernels of tables that ranks share, against plain loops: which distinct rows a batch needs, and of whom; and the
copies of rows into messages and slots."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, bits, every_backend
from torch import Tensor

from hotrow.kernels import ops, reference, types
from hotrow.kernels.types import TAKEN, ComingSums, FlatSums, Numbers, Pieces, RowSums, Shares
from loops import looped

NUM_ROWS = (700, 1, 40, 3000, 12)
PREFIX = (0, 1, 7, 100, 0)
OWNER = (-1, -1, 1, -1, 0)
Span = tuple[int, int, int]


def held_by(table: int, row: int, num_ranks: int) -> tuple[int | None, int]:
    """Returns who holds a row (None: all), and its number there, by counting the rows below it that lie there too."""

    def rank_of(row: int) -> int | None:
        if row < PREFIX[table]:
            return None
        return (row - PREFIX[table]) % num_ranks if OWNER[table] < 0 else min(OWNER[table], num_ranks - 1)

    own = rank_of(row)
    return own, sum(rank_of(each) in (None, own) for each in range(row)) if own is not None else row


def make_batch(dtype: torch.dtype, seed: int) -> tuple[Tensor, list[Span]]:
    """Features of tables 0, 0, 2, 3, 3 and 4, one without ids; some ids in between belong to none."""
    generator, spans, ids, at = torch.Generator().manual_seed(seed), [], [], 0
    for t, count in ((0, 50), (0, 3), (2, 0), (3, 2500), (3, 1), (4, 90)):
        ids.append((torch.rand(count + 2, generator=generator) ** 2 * NUM_ROWS[t]).to(dtype))
        spans.append((t, at, at + count))
        at += count + 2
        ids[-1][count:] = -5
    return torch.cat(ids), spans


def every_way() -> Iterator[tuple[str, object]]:
    yield "reference", reference.distinct_rows
    for where in every_backend((1, 3)):
        yield str(where), ops.distinct_rows


@pytest.mark.slow_but("0-2-dtype0", "2-3-dtype1")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 2), (2, 3), (1, 5)])
def test_distinct_rows_by_who_holds_them(rank: int, num_ranks: int, dtype: torch.dtype) -> None:
    values, spans = make_batch(dtype, seed=num_ranks)
    shares = Shares(PREFIX, OWNER, rank, num_ranks)
    wanted: list[list[tuple[int, int]]] = []  # by table and group
    for t in range(len(NUM_ROWS)):
        groups: list[list[tuple[int, int]]] = [[] for _ in range(1 + num_ranks)]
        for row in sorted({int(id_) for of, start, stop in spans if of == t for id_ in values[start:stop]}):
            holder, local = held_by(t, row, num_ranks)
            groups[0 if holder in (None, rank) else 1 + holder].append((row, local))
        wanted += groups
    for where, distinct_rows in every_way():
        found = distinct_rows(values, spans, NUM_ROWS, shares)  # type: ignore[operator]
        assert found.counts.tolist() == np.reshape([len(own) for own in wanted], (-1, 1 + num_ranks)).tolist(), where
        assert [*zip(found.rows.tolist(), found.local.tolist(), strict=True)] == [*chain(*wanted)], where
        starts, done = found.counts.sum(1).cumsum() - found.counts.sum(1), 0
        for t, start, stop in spans:
            places = found.places[done : done + stop - start]
            assert found.rows[starts[t] + places].tolist() == values[start:stop].tolist(), (where, t)
            done += stop - start
        assert done == len(found.places)


@looped("bad", [-1, 40, 1 << 40])
def test_ids_outside_their_table(bad: int) -> None:
    values = torch.tensor([1, 2, bad, 3])
    for where, distinct_rows in every_way():
        shares = Shares(PREFIX, OWNER, 0, 2)
        assert distinct_rows(values, [(2, 0, 2), (2, 2, 4)], NUM_ROWS, shares) is None, where  # type: ignore[operator]
        found = distinct_rows(values, [(2, 0, 2), (2, 3, 4)], NUM_ROWS, shares)  # type: ignore[operator]
        assert found.rows.tolist() == [1, 2, 3], "an id that belongs to no feature plays no part"


DIMS = (1, 19, 4, 64, 5)
FIRST_KEYS = np.array([0, 1000, 2000, 90_000, 200_000, 200_999])


def sums_of(counts: list[int], seed: int) -> tuple[FlatSums, list[Numbers]]:
    """Returns sums of the rows in some slots, and those slots by table, not in order."""
    generator = np.random.default_rng(seed)
    slots = [generator.permutation(n)[:count] for n, count in zip(NUM_ROWS, counts, strict=True)]
    sums = [torch.from_numpy(generator.random((n, dim), np.float32)) for n, dim in zip(counts, DIMS, strict=True)]
    return FlatSums.of([RowSums(torch.from_numpy(own), g) for own, g in zip(slots, sums, strict=True)]), slots


@looped("num_ranks", [1, 2, 3])
def test_sums_travel_to_the_homes_of_their_rows(num_ranks: int) -> None:
    """Two nodes of sums; each row's key and sum come to the rank that dictionaries say, and come out table by table.
    Then the same of rows below their table's prefix, and of the others."""
    row_of = [np.random.default_rng(9).permutation(n) for n in NUM_ROWS]
    nodes = [sums_of(counts, seed) for seed, counts in enumerate(([5, 1, 0, 90, 12], [0, 0, 3, 150, 1]))]
    shares = Shares(PREFIX, [min(own, num_ranks - 1) for own in OWNER], 0, num_ranks)
    wanted: dict[tuple[int, int, int], dict[int, list[float]]] = {}  # by rank, node and table: sums by row in the shard
    for k, (flat, slots) in enumerate(nodes):
        for t, (own, sums) in enumerate(zip(slots, flat.tables(DIMS), strict=True)):
            for slot, g in zip(own, sums.sums, strict=True):
                holder, local = held_by(t, row := int(row_of[t][slot]), num_ranks)
                home = row % num_ranks if holder is None else holder
                wanted.setdefault((home, k, t), {})[local] = g.tolist()
    for module in (reference, ops):
        args = (FIRST_KEYS, DIMS if module is reference else np.array(DIMS))
        made = module.pack_sums([flat for flat, _ in nodes], *args, row_of, shares)  # type: ignore[attr-defined]
        assert len(made) == num_ranks
        for rank, (words, num_keys) in enumerate(made):
            assert words[num_keys:].numel() == sum(
                len(own) * DIMS[t] for (home, _, t), own in wanted.items() if home == rank
            )
            for taken in TAKEN:
                message = ComingSums(words, 2, taken)
                found = module.unpack_sums([message], [(0, 1), (0, 0)], *args, PREFIX)  # type: ignore[attr-defined]
                check_pieces(found, words, wanted, rank, taken)


def check_pieces(
    found: Pieces, words: Tensor, wanted: dict[Any, dict[int, list[float]]], rank: int, taken: str
) -> None:
    rows, counts = iter(found.rows.tolist()), []
    for t, dim in enumerate(DIMS):
        for p, node in enumerate((1, 0)):
            own = sorted(wanted.get((rank, node, t), {}).items())
            own = [each for each in own if taken == "all" or (each[0] < PREFIX[t]) == (taken == "below_prefix")]
            counts.append(len(own))
            assert [*islice(rows, len(own))] == [row for row, _ in own]
            flat = [x for _, g in own for x in g]
            start = int(found.starts[t, p])
            assert words[start : start + len(flat)].view(torch.float32).tolist() == flat, (t, node, dim)
    assert found.counts.ravel().tolist() == counts and not [*rows]


def test_a_damaged_message_of_sums_is_refused() -> None:
    """Cut, with another number of rows, or with a row beyond all tables: never rows that are not there."""
    flat, _ = sums_of([5, 1, 0, 90, 12], 1)
    ((words, _),) = ops.pack_sums([flat], FIRST_KEYS, np.array(DIMS))
    bad = [words[:-1], words[:1], torch.cat([words, words[:1]])]
    for place, value in ((0, -1), (0, 1 << 30), (1, 5), (1, -1), (2, -1)):
        bad.append(words.clone())
        bad[-1][place] = value
    for each in bad:
        with pytest.raises(RuntimeError, match="damaged"):
            ops.unpack_sums([ComingSums(each, 1)], [(0, 0)], FIRST_KEYS, np.array(DIMS), PREFIX)


def arrays_of(num_rows: tuple[int, ...], seed: int) -> ops.Arrays:
    generator = torch.Generator().manual_seed(seed)
    dtypes = [getattr(torch, DTYPES[t % 3]) for t in range(len(DIMS))]
    tensors = [
        torch.rand(n, dim, generator=generator).to(dtype) for n, dim, dtype in zip(num_rows, DIMS, dtypes, strict=True)
    ]
    low = [torch.zeros(own.shape, dtype=torch.int16) if own.dtype == torch.bfloat16 else None for own in tensors]
    return ops.Arrays(tensors, low)


def test_rows_travel_in_messages() -> None:
    """What is packed for each of two ranks arrives in slots; the slots around it and group 0 stay as they are. A last
    group of rows goes nowhere."""
    counts = np.array([[3, 700, 0, 2], [1, 0, 1, 0], [0, 0, 0, 1], [40, 33, 20, 5], [2, 1, 9, 3]])
    weights, firsts = arrays_of(NUM_ROWS, 1), [0, 2, 1, 5, 3]
    generator = np.random.default_rng(1)
    groups = [generator.integers(0, NUM_ROWS[t], n) for t, own in enumerate(counts) for n in own]
    bytes_of = [own[:1].numel() * own.itemsize for own in weights.tensors]
    for where in [None, *every_backend((1, 2))]:
        messages = [torch.empty(int(counts[:, 1 + m] @ bytes_of), dtype=torch.uint8) for m in (0, 1)]
        packed, filled = arrays_of((900,) * 5, 2), arrays_of((900,) * 5, 3)
        rows = torch.from_numpy(np.concatenate(groups))
        module = reference if where is None else ops
        given = [own.tensors if where is None else own for own in (weights, packed, filled)]
        module.pack_rows(given[0], rows, counts, given[1], firsts, messages)  # type: ignore[arg-type]
        module.unpack_rows(messages, counts, given[2], firsts)  # type: ignore[arg-type]
        for t, first in enumerate(firsts):
            own, *others = (weights.tensors[t][each] for each in groups[4 * t : 4 * t + 3])
            want = arrays_of((900,) * 5, 2).tensors[t]
            want[first : first + len(own)] = own
            assert torch.equal(bits(packed.tensors[t]), bits(want)), (where, t)
            want, first = arrays_of((900,) * 5, 3).tensors[t], first + len(own)
            want[first : first + sum(map(len, others))] = torch.cat(others)
            assert torch.equal(bits(filled.tensors[t]), bits(want)), (where, t)


def test_rows_that_do_not_fit_are_refused() -> None:
    weights, slots, counts = arrays_of(NUM_ROWS, 1), arrays_of((4,) * 5, 2), np.array([[1, 1]] * 5)
    rows = torch.zeros(10, dtype=torch.int64)
    sizes = [own[:1].numel() * own.itemsize for own in weights.tensors]
    message = torch.empty(sum(sizes), dtype=torch.uint8)
    ops.pack_rows(weights, rows, counts, slots, [0] * 5, [message])
    with pytest.raises(ValueError, match="message too short"):
        ops.pack_rows(weights, rows, counts, slots, [0] * 5, [message[1:]])
    with pytest.raises(ValueError, match="message too short"):
        ops.unpack_rows([message[:-1]], counts, slots, [0] * 5)
    with pytest.raises(ValueError, match="too few slots"):
        ops.pack_rows(weights, rows, counts, slots, [0, 0, 0, 4, 0], [message])
    with pytest.raises(ValueError, match="too few slots"):
        ops.unpack_rows([message], counts, slots, [0, 0, 3, 0, 0])
    with pytest.raises(ValueError, match="row out of range"):
        ops.pack_rows(weights, rows + 1, counts, slots, [0] * 5, [message])
    with pytest.raises(ValueError, match="fewer rows than counts say"):
        ops.pack_rows(weights, rows[1:], counts, slots, [0] * 5, [message])


def test_sums_of_all_tables_at_once_are_those_of_each() -> None:
    sums = types.FlatSums([2, 0, 1], torch.tensor([4, 9, 3]), torch.arange(7.0))
    tables = sums.tables([2, 5, 3])
    assert [own.rows.tolist() for own in tables] == [[4, 9], [], [3]]
    assert [own.sums.tolist() for own in tables] == [[[0, 1], [2, 3]], [], [[4, 5, 6]]]
    again = types.FlatSums.of(tables)
    assert [*again.counts] == [2, 0, 1] and all(torch.equal(a, b) for a, b in zip(again[1:], sums[1:], strict=True))

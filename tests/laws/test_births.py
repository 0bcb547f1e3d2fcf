"""Law 2 for parts of tables: a row starts as the same bits, whichever part it is in and wherever that part lies.

The truth is the whole table in DRAM, and its optimizer's states, indexed by `Births.of`.
"""

from pathlib import Path

import pytest
import torch
from kernel_cases import DTYPES, SENTINEL, Guarded, assert_same_bits, every_backend
from test_tiers import Side

import hotrow
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops, reference, types
from hotrow.placement.base import InitialRows
from hotrow.run.checkpoint import load_checkpoint, save_checkpoint
from hotrow.tables import WHOLE, Births, Dtype, TableConfig, Uniform
from loops import looped

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
NUM_ROWS = 901
PARTS = {  # rows of the part, and how they start
    "whole": (NUM_ROWS, WHOLE),
    "rank 0 of 3": (301, Births(first=0, step=3)),
    "rank 2 of 3": (300, Births(first=2, step=3)),
    "rank 1 of 4 behind a prefix": (7 + 224, Births(prefix=7, first=7 + 1, step=4)),
    "prefix alone": (40, Births(prefix=40, first=43, step=4)),
    "tail": (501, Births(first=400)),
}


@looped("births", [births for _, births in PARTS.values()])
def test_runs_are_the_births_in_order(births: Births) -> None:
    for start in (0, 1, 6, 7, 8, 39, 40, 41):
        for stop in range(start, start + 50):
            rows = [row for run in births.runs(start, stop) for row in run]
            assert rows == [births.of(row) for row in range(start, stop)], (start, stop)


@needs_native
@looped("dim", [1, 4, 7, 64])
@looped("births", [*(births for _, births in PARTS.values()), Births(first=2**32 - 9, step=5)])
@looped("zero_rows", [0, 1, 9])
def test_rows_of_a_part_on_every_instruction_set(births: Births, dim: int, zero_rows: int) -> None:
    key = types.row_key(3, "user")
    for first, n in ((0, 30), (5, 12), (11, 9), (3, 0)):
        ids = torch.tensor([births.of(row) for row in range(first, first + n)], dtype=torch.int64)
        expected = reference.uniform_rows(key, ids, dim, 0.037, zero_rows)
        options = {"key": key, "bound": 0.037, "zero_rows": zero_rows, "births": births}
        for where in every_backend():
            out = Guarded(torch.full((n, dim), SENTINEL))
            ops.fill_uniform(out.tensor, first_row=first, **options)  # type: ignore[arg-type]
            out.check()
            assert_same_bits(out.tensor, expected, (first, n, where))
            for order in (torch.arange(n), torch.arange(n).flip(0), torch.arange(n) ** 2 % 7):
                by_id = ops.uniform_rows(first + order, dim, **options)  # type: ignore[arg-type]
                assert_same_bits(by_id, expected[order], (first, n, where, order))
        for run in births.runs(first, first + n):
            out_ND = torch.empty(len(run), dim)
            reference.fill_uniform(key, run.start, out_ND, 0.037, zero_rows, run.step)
            wanted = reference.uniform_rows(key, torch.tensor(list(run), dtype=torch.int64), dim, 0.037, zero_rows)
            assert_same_bits(out_ND, wanted, "reference")


@needs_native
@looped(("column", "dim"), [(0, 4), (4, 7), (8, 1), (12, 64)])
def test_columns_of_a_part_on_every_instruction_set(column: int, dim: int) -> None:
    key, births = types.row_key(3, "user"), Births(prefix=2, first=5, step=3)
    ids = torch.tensor([births.of(row) for row in range(40)])
    expected = reference.uniform_rows(key, ids, column + dim + 3, 0.037, 1)[:, column : column + dim].contiguous()
    for where in every_backend():
        out = Guarded(torch.full((40, dim), SENTINEL))
        ops.fill_uniform(out.tensor, key=key, bound=0.037, zero_rows=1, births=births, column=column)
        out.check()
        assert_same_bits(out.tensor, expected, (column, dim, where))
    assert_same_bits(reference.uniform_rows(key, ids, dim, 0.037, 1, column), expected, "reference")


def test_a_large_part_is_filled_in_tasks() -> None:
    """Rows of several tasks, and the prefix in one of them."""
    births, whole, part = Births(prefix=5000, first=5001, step=2), torch.empty(60_000, 32), torch.empty(30_000, 32)
    for out, own in ((whole, WHOLE), (part, births)):
        ops.fill_uniform(out, key=7, bound=0.5, zero_rows=1, births=own)
    ids = torch.tensor([births.of(row) for row in range(len(part))])
    assert_same_bits(part, whole[ids])


def table_of(dtype: Dtype = "float32", bound: float | None = None) -> TableConfig:
    init = Uniform(bound=bound, zero_rows=1)
    return TableConfig(name="t", num_embeddings=NUM_ROWS, embedding_dim=9, feature_names=("a",), dtype=dtype, init=init)


def side(table: TableConfig, optimizer: str, folder: Path | None = None) -> Side:
    """folder: of the rows that memory, here for a few of them, does not hold; None: all rows in DRAM."""

    def plan(demands: object, budget_bytes: int) -> list[tuple[int, int]]:
        return [(9, 15)]

    memory = None if folder is None else hotrow.Memory(dram="100KB", ssd=folder, force=True, plan=plan)
    return Side(EmbeddingCollection([table], memory=memory, seed=3), optimizer)


@needs_native
@looped("optimizer", ["ftrl", "adagrad", "row_wise_adagrad"])
@looped("dtype", DTYPES)
@looped("name", PARTS)
def test_parts_start_as_the_whole_table(tmp_path: Path, name: str, dtype: Dtype, optimizer: str) -> None:
    """In DRAM and in tiers, weights and the states that follow them."""
    num_rows, births = PARTS[name]
    whole = table_of(dtype)
    part = whole.part(num_rows, births)
    ids = torch.tensor([births.of(row) for row in range(num_rows)])
    keep = ids < NUM_ROWS
    truth = [array[ids.clamp(max=NUM_ROWS - 1)] for array in side(whole, optimizer).tables()]
    for folder in (None, tmp_path):
        own = side(part, optimizer, folder)
        own.evaluate(torch.randint(0, part.num_embeddings, (40, 1)))  # type: ignore[arg-type]
        for ours, theirs in zip(own.tables(), truth, strict=True):
            assert_same_bits(ours[keep], theirs[keep], (name, folder))
        own.emb.placement.close()


@looped("dtype", DTYPES)
def test_a_row_of_zeros_starts_as_the_whole_table_has_it(dtype: Dtype) -> None:
    """Also where no other row is, as on one of more ranks than rows: a state of weights is +0.0, never -0.0."""
    whole = table_of(dtype)
    part = whole.part(1, Births(first=0, step=NUM_ROWS))
    for ours, theirs in zip(side(part, "ftrl").tables(), side(whole, "ftrl").tables(), strict=True):
        assert_same_bits(ours, theirs[:1])
        assert_same_bits(ours, torch.zeros_like(ours))


@needs_native
@looped("dtype", DTYPES)
def test_steps_change_the_rows_of_a_part_alone(tmp_path: Path, dtype: Dtype) -> None:
    """A part in tiers is trained, and rows come and go: the rest still starts as the whole table's."""
    num_rows, births = PARTS["rank 1 of 4 behind a prefix"]
    part = table_of(dtype).part(num_rows, births)
    sides = [side(part, "ftrl", folder) for folder in (None, tmp_path)]
    batches = [torch.randint(0, num_rows - 60, (30, 1)) for _ in range(12)]
    for own in sides:
        for batch in batches:
            own.emb(batch).square().sum().backward()
            own.optimizer.step()
    whole, ids = side(table_of(dtype), "ftrl").tables(), [births.of(row) for row in range(num_rows - 60, num_rows)]
    for ours, theirs, start in zip(sides[1].tables(), sides[0].tables(), whole, strict=True):
        assert_same_bits(ours, theirs)
        assert_same_bits(ours[-60:], start[ids])
    sides[1].emb.placement.close()


@needs_native
def test_a_checkpoint_of_a_part_knows_how_it_starts(tmp_path: Path) -> None:
    """Its files leave out the rows that were never touched: they are `InitialRows`."""
    num_rows, births = PARTS["rank 2 of 3"]
    part = table_of("float16").part(num_rows, births)
    own, other = side(part, "ftrl", tmp_path / "rows"), side(part, "ftrl")
    own.emb(torch.tensor([[3], [200]])).sum().backward()
    own.optimizer.step()
    path = save_checkpoint(tmp_path / "saved", {"embedding": own.emb, "sparse": own.optimizer})
    for weight in other.emb.weights.values():
        weight.fill_(7.0)
    load_checkpoint(path, {"embedding": other.emb, "sparse": other.optimizer})
    for ours, theirs in zip(own.tables(), other.tables(), strict=True):
        assert_same_bits(ours, theirs)
    own.emb.placement.close()


def test_a_part_keeps_the_bound_and_the_name_of_the_whole() -> None:
    part = table_of().part(300, Births(first=2, step=3))
    assert part.init.bound_for(part.num_embeddings) == table_of().init.bound_for(NUM_ROWS)
    assert (part.name, part.feature_names, part.init.zero_rows) == ("t", ("a",), 1)
    assert table_of(bound=0.25).part(1, WHOLE).init.bound == 0.25
    initial = InitialRows.of(part, 3, [])
    assert initial.births == part.init.births
    assert initial.formula("weight") != InitialRows.of(table_of().part(300, WHOLE), 3, []).formula("weight")

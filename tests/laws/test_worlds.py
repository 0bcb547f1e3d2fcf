"""Law 2 for ranks: tables shared by any number of processes have the bits of one process, wherever each keeps its rows.

The truth is a plain collection in DRAM on one process, whose updates are those of the readable reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import hotrow
from hotrow import EmbeddingCollection, KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops, reference, tree
from hotrow.parallel.sharded import Sharded, Shards
from hotrow.parallel.shards import Shard
from hotrow.parallel.world import World
from hotrow.placement.base import Attached
from hotrow.placement.budget import TableDemand, TableSlots
from hotrow.placement.tiers import Tiers
from hotrow.tables import Uniform
from rank_pool import RankPool

MOST_RANKS, STEPS = 4, 7
FEATURES = ("a", "b", "c", "d", "e", "f")
OPTIMIZERS = {
    "sgd": partial(hotrow.SGD, lr=0.3),
    "adagrad": partial(hotrow.Adagrad, lr=0.3, initial_accumulator_value=0.1),
    "row_wise_adagrad": partial(hotrow.RowWiseAdagrad, lr=0.3),
    "adam": partial(hotrow.Adam, lr=0.02),
    "ftrl": partial(hotrow.FTRL, lr=0.2, l1=0.001, l2=0.01),
}
TABLES = [
    TableConfig(name="rows", num_embeddings=90, embedding_dim=1, feature_names=("a",)),
    TableConfig(name="half", num_embeddings=61, embedding_dim=19, feature_names=("b", "d"), dtype="float16"),
    TableConfig(
        name="split",
        num_embeddings=50,
        embedding_dim=4,
        feature_names=("c",),
        pooling="mean",
        dtype="bfloat16",
        init=Uniform(zero_rows=1),
    ),
    TableConfig(name="all", num_embeddings=12, embedding_dim=3, feature_names=("e",), pooling="mean"),
    TableConfig(name="tiny", num_embeddings=2, embedding_dim=5, feature_names=("f",), dtype="float16"),
]
NUM_ROWS = dict(zip(FEATURES, (90, 61, 50, 61, 12, 2), strict=True))


def shards_of(num_ranks: int) -> dict[str, Shard]:
    """Every kind; the only rows of "tiny" lie on one rank."""
    return {
        "half": Shard(prefix=7),
        "split": Shard(kind="table", owner=num_ranks // 2, prefix=3),
        "all": Shard(prefix=12),
        "tiny": Shard(kind="table", owner=num_ranks - 1),
    }


class Case(NamedTuple):
    optimizer: str
    micro_batches: int
    tiers: str | None = None
    """The folder of tables in tiers; None: DRAM."""
    depth: int = 0
    """How many batches are announced before they are trained."""
    first_in_dram: bool = False
    """Whether the first rank keeps its rows in DRAM while others have tiers."""


class Step(NamedTuple):
    """What is looked up before one step: batches, the last one as sequences too or scored only."""

    batches: list[KeyedJaggedTensor]
    scored: KeyedJaggedTensor


def steps_of(seed: int) -> list[Step]:
    """Batches of 9, 0 to 3, or 16 samples; one or two before a step; some weighted."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(STEPS):
        sizes = [9, 16, 3, 1, 5, 9, 12][step : step + 1] * (1 + step % 2)
        batches = [make_batch(generator, size, weighted=step % 3 == 0) for size in sizes]
        found.append(Step(batches, make_batch(generator, 6)))
    return found


def make_batch(generator: torch.Generator, size: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids, few of them different."""
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=generator)
    limits = torch.tensor([*NUM_ROWS.values()]).repeat_interleave(size).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 3 * limits).long()
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(FEATURES, ids, weights, lengths=lengths)


def train(emb: EmbeddingCollection, case: Case, world: World | None) -> dict[str, Any]:
    """Trains; returns outputs of this rank's samples, and all weights and states. world: None on one process."""
    optimizer = OPTIMIZERS[case.optimizer](emb)
    seen: list[Tensor] = []

    def cut(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if world is None:
            return sparse.in_parts(tree.starts(sparse.stride, case.micro_batches))
        return sparse.samples(*world.samples(sparse.stride))

    steps = [Step([*map(cut, step.batches)], cut(step.scored)) for step in steps_of(5)]
    batches = [sparse for step in steps for sparse in step.batches]
    for sparse in batches[: case.depth]:
        emb.placement.announce(sparse)
    trained = 0
    for number, step in enumerate(steps):
        emb.switches["half"].requires_grad_(number != 4)
        for sparse in step.batches:
            trained += 1
            if case.depth and trained + case.depth <= len(batches):
                emb.placement.announce(batches[trained + case.depth - 1])
            out = emb(sparse)
            seen.append(out.detach().clone())
            (out * out).sum().backward()
        if number in (1, 5):
            parts = emb.sequence(step.batches[-1])
            seen += [values.detach().clone() for values, _ in parts.values()]
            torch.stack([(values * values * 0.5).sum() for values, _ in parts.values()]).sum().backward()
        with torch.no_grad():
            seen.append(emb(step.scored).clone())
        optimizer.zero_grad() if number == 3 else optimizer.step()
    states = optimizer.state_rows()
    whole = [emb.rows(table.name).read(slice(0, table.num_embeddings)).clone() for table in emb.tables]
    whole += [states[key].read(slice(0, states[key].shape[0])).clone() for key in sorted(states)]
    tiers = emb.placement.find(Tiers)
    counts = {} if tiers is None else tiers.announced.counts()
    evicted = sum(own.get("evicted_rows", 0) for own in emb.placement.counters().values())
    emb.placement.close()
    return {"seen": seen, "whole": whole, "evicted": evicted, **counts}


def few_slots(demands: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
    """Most rows of a table lie in its file, so that batches push out each other's rows."""
    return [TableSlots(1, own.num_rows // 6) for own in demands]


def memory_of(case: Case, rank: int = 1) -> hotrow.Memory | None:
    in_dram = case.tiers is None or (rank == 0 and case.first_in_dram)
    return None if in_dram else hotrow.Memory(dram="256KiB", plan=few_slots, file=case.tiers, force=True)


def train_shared(world: World, case: Case) -> dict[str, Any]:
    memory = Shards(world=world, shards=shards_of(world.size), below=memory_of(case, world.rank))
    emb = EmbeddingCollection(TABLES, memory=memory, seed=3)
    return train(emb, case, world)


def alone(seed: int) -> EmbeddingCollection:
    """The truth: a plain collection, updated by the reference."""
    emb = EmbeddingCollection(TABLES, seed=seed)

    def update(lookups: ops.Lookups, attached: Attached, rules: Any) -> None:
        arrays, states = emb.placement.arrays, [state.tensors for state in attached.arrays]
        pending = [(kernels.layout, sparse, grad) for kernels, sparse, grad in lookups]
        layout = emb.placement.kernels.pooled.layout
        reference.update(layout, arrays.tensors, states, pending, rules, low=arrays.low)

    emb.placement.update = update  # type: ignore[method-assign]
    return emb


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.itemsize])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(MOST_RANKS) as ranks:
        yield ranks


def check(pool: RankPool, case: Case, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    truth = train(alone(3), case, None)
    found = []
    for num_ranks in ranks:
        found = pool.run(train_shared, case, num_ranks=num_ranks, micro_batches=case.micro_batches)
        for k, want in enumerate(truth["seen"]):
            got = torch.cat([own["seen"][k] for own in found])
            assert torch.equal(bits(got), bits(want)), (num_ranks, k)
        for own in found:
            for k, want in enumerate(truth["whole"]):
                assert torch.equal(bits(own["whole"][k]), bits(want)), (num_ranks, k)
    return found


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [("sgd", (1, 2, 3, 4)), ("adagrad", (3,)), ("row_wise_adagrad", (2, 4)), ("adam", (1, 3)), ("ftrl", (2, 4))],
)
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_any_number_of_ranks_has_the_bits_of_one_process(
    pool: RankPool, optimizer: str, ranks: tuple[int, ...]
) -> None:
    check(pool, Case(optimizer, 8), ranks)


@pytest.mark.parametrize(("optimizer", "depth"), [("adam", 2), ("row_wise_adagrad", 0), ("ftrl", 3), ("sgd", 1)])
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_shards_in_tiers_have_the_bits_of_one_process(
    pool: RankPool, optimizer: str, depth: int, tmp_path: Path
) -> None:
    mixed = optimizer == "ftrl"
    for own in check(pool, Case(optimizer, 5, str(tmp_path), depth, mixed), (3,))[mixed:]:
        assert own["evicted"]
        # Every forward pass is announced; sequences, of batches that were trained already, are not.
        assert (own["foreseen"], own["unannounced"], own["altered"]) == ((10, 2, 0) if depth else (0, 12, 0))


def count_rows(world: World, folder: str) -> tuple[list[int], list[int]]:
    """Returns by table how many rows of the shard exist after scoring a batch, and after training it."""
    memory = Shards(world=world, shards=shards_of(world.size), below=memory_of(Case("sgd", 4, folder), world.rank))
    emb = EmbeddingCollection(TABLES, memory=memory)
    optimizer = hotrow.SGD(emb, lr=0.1)
    tiers = emb.placement.find(Tiers)
    assert tiers is not None
    batch = make_batch(torch.Generator().manual_seed(3), 12)
    batch = batch.samples(*world.samples(12))
    with torch.no_grad():
        emb(batch)
    scored = [tiers.num_changed(table.name, ever=True) for table in TABLES]
    emb(batch).sum().backward()
    optimizer.step()
    trained = [tiers.num_changed(table.name, ever=True) for table in TABLES]
    emb.placement.close()
    return scored, trained


def test_scoring_makes_no_row(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(count_rows, str(tmp_path), num_ranks=3, micro_batches=3)
    batch = make_batch(torch.Generator().manual_seed(3), 12)
    for t, table in enumerate(TABLES):
        ids = np.unique(np.concatenate([batch.values[batch.span(name)].numpy() for name in table.feature_names]))
        shard = shards_of(3).get(table.name, Shard())
        for rank, (scored, trained) in enumerate(ranks):
            assert (scored[t], trained[t]) == (0, shard.held(ids, rank, 3).sum()), (table.name, rank)


# ---- tables by their rows


class Saved(NamedTuple):
    emb: EmbeddingCollection
    optimizer: hotrow.Adam

    @property
    def parts(self) -> dict[str, Any]:
        return {"embedding": self.emb, "sparse_optimizer": self.optimizer}

    def step(self, sparse: KeyedJaggedTensor) -> None:
        out = self.emb(sparse)
        (out * out).sum().backward()
        self.optimizer.step()


def make(world: World | None, *, seed: int, tiers: str | None = None) -> Saved:
    if world is None:
        emb = alone(seed)
    else:
        memory = Shards(world=world, shards=shards_of(world.size), below=memory_of(Case("adam", 4, tiers), world.rank))
        emb = EmbeddingCollection(TABLES, memory=memory, seed=seed)
    return Saved(emb, hotrow.Adam(emb, lr=0.02))


def go_on(world: World, folder: Path, number: int, tiers: str | None) -> None:
    """Loads checkpoint `number`, trains a step and saves the next checkpoint, which rank 0 keeps."""
    saved = make(world, seed=number, tiers=tiers)
    hotrow.load_checkpoint(folder / str(number), saved.parts)
    batch = make_batch(torch.Generator().manual_seed(number), 13)
    saved.step(batch.samples(*world.samples(13)))
    name = str(number + 1) if world.rank == 0 else f"{number + 1} of rank {world.rank}"
    hotrow.save_checkpoint(folder / name, saved.parts)
    saved.emb.placement.close()


def test_checkpoints_go_from_one_process_to_any_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    """1 -> 4 -> 2 (in tiers) -> 3 -> 1, against one process throughout, by the bytes of the files."""
    plain = make(None, seed=0)
    folder, tiers = tmp_path / "saved", str(tmp_path / "tiers")
    hotrow.save_checkpoint(folder / "0", plain.parts)
    for number, (num_ranks, own) in enumerate([(4, None), (2, tiers), (3, None)]):
        pool.run(go_on, folder, number, own, num_ranks=num_ranks, micro_batches=4)
        batch = make_batch(torch.Generator().manual_seed(number), 13)
        plain.step(batch.in_parts(tree.starts(13, 4)))
        truth = hotrow.save_checkpoint(tmp_path / f"truth-{number}", plain.parts)
        files = sorted(path.relative_to(truth) for path in truth.rglob("*.safetensors"))
        assert len(files) > len(TABLES)
        for name in files:
            assert (folder / str(number + 1) / name).read_bytes() == (truth / name).read_bytes(), (number, name)
    again = make(None, seed=9)
    hotrow.load_checkpoint(folder / "3", again.parts)
    for table in TABLES:
        assert torch.equal(again.emb.float32(table.name), plain.emb.float32(table.name))


def states_of(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    saved, other = make(world, seed=1), make(world, seed=2)
    saved.step(make_batch(torch.Generator().manual_seed(2), 13).samples(*world.samples(13)))
    other.emb.load_state_dict(saved.emb.state_dict())
    other.optimizer.load_state_dict(saved.optimizer.state_dict())
    return dict(other.emb.state_dict()), other.optimizer.state_dict()


def test_state_dicts_are_those_of_one_process(pool: RankPool) -> None:
    plain = make(None, seed=1)
    plain.step(make_batch(torch.Generator().manual_seed(2), 13).in_parts(tree.starts(13, 5)))
    truth, state = plain.emb.state_dict(), plain.optimizer.state_dict()
    for weights, states in pool.run(states_of, num_ranks=3, micro_batches=5):
        assert weights.keys() == truth.keys() and states["param_groups"] == state["param_groups"]
        assert all(torch.equal(bits(weights[name]), bits(own)) for name, own in truth.items())
        for number, own in state["state"].items():
            assert all(torch.equal(bits(states["state"][number][name]), bits(each)) for name, each in own.items())


# ---- what goes over the wire


def train_counted(world: World) -> tuple[dict[str, int], list[int]]:
    """Returns bytes sent in a training step by purpose, and what rows, sums and totals are to take."""
    table = TableConfig(name="t", num_embeddings=400, embedding_dim=16, feature_names=("a", "b"))
    emb = EmbeddingCollection([table], memory=Shards(world=world, shards={"t": Shard(prefix=40)}))
    optimizer = hotrow.RowWiseAdagrad(emb, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    ids = (torch.rand(64, 2, generator=generator) ** 4 * 400).long()
    first, end = zip(*(world.samples(64, rank) for rank in range(world.size)), strict=True)
    own = ids[first[world.rank] : end[world.rank]]
    out = emb(own)
    world.sent_bytes.clear()
    out.sum().backward()
    optimizer.step()
    before = dict(world.sent_bytes)
    world.sent_bytes.clear()
    emb(own)
    distinct = [set(ids[first[r] : end[r]].flatten().tolist()) for r in range(world.size)]
    home = {row: row % world.size if row < 40 else (row - 40) % world.size for row in range(400)}
    rows = sum(
        home[row] == world.rank for r, rows in enumerate(distinct) if r != world.rank for row in rows if row >= 40
    )
    sums = sum(home[row] != world.rank for row in distinct[world.rank])
    common = {row for rows in distinct for row in rows if row < 40 and home[row] == world.rank}
    return {**before, **world.sent_bytes}, [64 * rows, 64 * sums, 64 * len(common) * (world.size - 1)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_row_comes_once_and_one_sum_goes_back(pool: RankPool, num_ranks: int) -> None:
    for sent, (rows, sums, common) in pool.run(train_counted, num_ranks=num_ranks, micro_batches=num_ranks):
        assert (sent["rows"], sent["gradients"], sent["replicated"]) == (rows, sums, common)
        assert rows and sums and common


# ---- copies that ranks update alone

TWO = [
    TableConfig(name="a", num_embeddings=30, embedding_dim=4, feature_names=("a",)),
    TableConfig(name="b", num_embeddings=20, embedding_dim=3, feature_names=("b",)),
]


def drawn(step: int) -> Tensor:
    """Ids of a batch of 12 samples; some rows are in all of them, others nowhere."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(12, 2, generator=generator) ** 3 * torch.tensor([30, 20])).long()


def update_alone(world: World, merge_every: int, num_steps: int) -> list[Tensor]:
    """Returns weights and states of this rank's copies after the last merge."""
    everywhere = {table.name: Shard(prefix=table.num_embeddings) for table in TWO}
    emb = EmbeddingCollection(TWO, memory=Shards(world=world, shards=everywhere), seed=3)
    optimizer, shared = OPTIMIZERS["adagrad"](emb), emb.placement.find(Sharded)
    assert shared is not None
    shared.all_held, shared.merge_every = True, merge_every
    for step in range(num_steps):
        own = drawn(step)[slice(*world.samples(12))]
        out = emb(KeyedJaggedTensor.from_dense(("a", "b"), own).in_parts([0, *(len(own) * v // 2 for v in (1, 2))]))
        (out * out).sum().backward()
        optimizer.step()
    shared.merge()
    states = optimizer.attached_to(emb).states
    return [array.clone() for t in TWO for array in (shared.below.weights[t.name], *(s.array for s in states[t.name]))]


def summed_changes(num_ranks: int, merge_every: int, num_steps: int) -> list[Tensor]:
    """The same by plain loops: every rank trains a copy of its own, then what changed is added up."""
    tables = [EmbeddingCollection(TWO, seed=3).float32(table.name).clone() for table in TWO]
    states = [torch.full_like(table, 0.1) for table in tables]
    for start in range(0, num_steps, merge_every):
        after = []
        for rank in range(num_ranks):
            own, squares = [t.clone() for t in tables], [s.clone() for s in states]
            for step in range(start, min(start + merge_every, num_steps)):
                ids = drawn(step)[12 * rank // num_ranks : 12 * (rank + 1) // num_ranks]
                for t in range(2):
                    grad = torch.zeros_like(own[t]).index_add_(0, ids[:, t], 2 * own[t][ids[:, t]])
                    squares[t] += grad * grad
                    own[t] -= 0.3 * grad / squares[t].sqrt()
            after.append((own, squares))
        tables = [table + sum(own[t] - table for own, _ in after) for t, table in enumerate(tables)]
        states = [state + sum(own[t] - state for _, own in after) for t, state in enumerate(states)]
    return [tables[0], states[0], tables[1], states[1]]


def test_ranks_that_update_alone_add_up_their_changes(pool: RankPool) -> None:
    """After every third step, and after the fourth, at the end."""
    found = pool.run(update_alone, 3, 4, num_ranks=3, micro_batches=6)
    exact = pool.run(update_alone, 1, 4, num_ranks=3, micro_batches=6)[0]
    for k, want in enumerate(summed_changes(3, 3, 4)):
        assert all(torch.equal(bits(found[0][k]), bits(own[k])) for own in found), "the copies are the same"
        assert torch.allclose(found[0][k], want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(exact[k], want, rtol=1e-2, atol=1e-2), "sums of every step would pass as well"


# ---- errors


class Told(NamedTuple):
    kind: str
    text: str


def told(action: Callable[[], object]) -> Told:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        action()
    return Told(raised.type.__name__, str(raised.value))


def fail(world: World, folder: str) -> list[Told]:
    """What each bad call raises here; between them the ranks go on together."""
    case = Case("sgd", 4, folder, first_in_dram=True)
    memory = Shards(world=world, shards=shards_of(world.size), below=memory_of(case, world.rank))
    emb = EmbeddingCollection(TABLES, memory=memory)
    optimizer = hotrow.SGD(emb, lr=0.1)
    good = KeyedJaggedTensor.from_dense(FEATURES, torch.ones(len(FEATURES) * 2, dtype=torch.int64).view(2, -1))
    bad = good.with_values(good.values.clone())
    if world.rank == 1:
        bad.values[3] = 61
    found = [told(lambda: emb(bad)), told(lambda: emb.placement.announce(bad))]
    uneven = good.samples(0, 1) if world.rank == 2 else good
    found.append(told(lambda: emb(uneven)))
    changed = good.with_values(good.values.clone())
    emb.placement.announce(changed)
    if world.rank == 2:
        changed.values[0] = 5
    found.append(told(lambda: emb(changed)))
    out = emb(good)
    (out.sum() * (float("nan") if world.rank == 1 else 1.0)).backward()
    found.append(told(optimizer.step))
    optimizer.zero_grad()
    emb(good).sum().backward()
    optimizer.step()
    found.append(told(emb.state_dict))
    found.append(told(lambda: emb.rows("rows").read(slice(0, 3)) if world.rank == 0 else emb(good)))
    emb.placement.close()
    return found


def test_an_error_on_one_rank_is_raised_on_all(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(fail, str(tmp_path), num_ranks=3, micro_batches=3)
    for found in ranks:
        assert [kind for kind, _ in found] == ["ValueError"] * 6 + ["RuntimeError"]
        for _, text in found[:2]:
            assert text.startswith("rank 1: feature 'b', sample 1, position 0: id 61 is outside its table of 61 rows")
        assert found[2].text.startswith("the ranks have 2, 2, 1 samples of a batch of 5; of 3 micro-batches they must")
        assert (
            found[3].text == "rank 2: a batch was changed after it was announced: with several ranks, change it before"
        )
        assert "rank 1: the gradient of feature 'a' (table 'rows'), sample 0, column 0 is nan" in found[4].text
        assert found[5].text.startswith("rank 1: a collection in tiers has no state_dict")
    assert ranks[1][6].text.startswith("rank 1 is at exchange ")
    assert "(ids), rank 0 at exchange" in ranks[1][6].text


def pinned(world: World, memory: hotrow.Memory) -> list[int]:
    shards = shards_of(world.size)
    tiers = Shards(world=world, shards=shards, below=memory).place(TABLES, seed=0).find(Tiers)
    assert tiers is not None and tiers.memory.pins is not None
    return shards["half"].rows(np.asarray(tiers.memory.pins["half"]), world.rank, world.size).tolist()


def test_each_rank_pins_the_rows_that_it_holds(pool: RankPool, tmp_path: Path) -> None:
    memory = hotrow.Memory(dram="256KiB", plan=few_slots, file=str(tmp_path), force=True, pins={"half": [3, 9, 60]})
    found = pool.run(pinned, memory, num_ranks=3, micro_batches=3)
    assert found == [[3], [3], [3, 9, 60]]


def test_what_is_refused() -> None:
    world = World(micro_batches=2)
    with pytest.raises(ValueError, match="there is no table 'user' to share; the tables are rows, half"):
        EmbeddingCollection(TABLES, memory=Shards(world=world, shards={"user": Shard()}))
    emb = EmbeddingCollection(TABLES, memory=Shards(world=world))
    with pytest.raises(ValueError, match="table 'rows' is shared by 1 ranks and cannot grow: save a checkpoint"):
        emb.grow("rows", 100)
    with pytest.raises(ValueError, match="shared by ranks lie in DRAM or in tiers: pass Memory or None"):
        EmbeddingCollection(TABLES, memory=Shards(world=world, below=hotrow.DeviceMemory(hbm="1GiB", device="cpu")))
    with pytest.raises(TypeError, match="over several ranks cannot be copied"):
        copy.deepcopy(emb)

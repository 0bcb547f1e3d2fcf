"""Law 2 for ranks: tables shared by any number of processes have the bits of one process, wherever each keeps its rows.

The truth is a plain collection in DRAM on one process, whose updates are those of the readable reference.
"""

import copy
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kernel_cases import bits
from torch import Tensor

import hotrow
from expanded import expanded
from hotrow import EmbeddingCollection, KeyedJaggedTensor, TableConfig
from hotrow.kernels import ops, reference, tree
from hotrow.optim import SparseOptimizer
from hotrow.parallel import sharded_rows
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.messages import WireDtype
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import Sharded, ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.placement.base import Attached
from hotrow.placement.budget import TableDemand, TableSlots
from hotrow.placement.tiers import Tiers
from hotrow.run import checkpoint, checkpoint_rows
from hotrow.run.checkpoint import list_checkpoints, verify
from hotrow.run.checkpoint_files import read_manifest
from hotrow.tables import Uniform
from rank_pool import RankPool, rank_pool
from rank_threads import ThreadPool

MAX_RANKS, STEPS = 4, 7
FEATURES = ("a", "b", "c", "d", "e", "f")
OPTIMIZERS = {
    "sgd": partial(hotrow.SGD, lr=0.3),
    "adagrad": partial(hotrow.Adagrad, lr=0.3, initial_accumulator_value=0.1),
    "row_wise_adagrad": partial(hotrow.RowWiseAdagrad, lr=0.3),
    "adam": partial(hotrow.Adam, lr=0.02),
    "ftrl": partial(hotrow.FTRL, lr=0.2, l1=0.001, l2=0.01),
}
SPLIT: dict[str, Any] = {"pooling": "mean", "dtype": "bfloat16", "init": Uniform(zero_rows=1)}
TABLES = [
    TableConfig(name="rows", num_embeddings=90, embedding_dim=1, feature_names=("a",)),
    TableConfig(name="half", num_embeddings=61, embedding_dim=19, feature_names=("b", "d"), dtype="float16"),
    TableConfig(name="split", num_embeddings=50, embedding_dim=4, feature_names=("c",), **SPLIT),
    TableConfig(name="all", num_embeddings=12, embedding_dim=3, feature_names=("e",), pooling="mean"),
    TableConfig(name="tiny", num_embeddings=2, embedding_dim=5, feature_names=("f",), dtype="float16"),
]
NUM_ROWS = dict(zip(FEATURES, (90, 61, 50, 61, 12, 2), strict=True))


def shards_of(num_ranks: int, *, pooled: bool = False) -> dict[str, Shard]:
    """Every kind; the only rows of "tiny" lie on one rank. pooled: two owners send vectors, of a table of two features
    among others, and rows of "rows" travel."""
    if pooled:
        owners = {"half": num_ranks - 1, "split": num_ranks // 2, "tiny": num_ranks - 1}
        return {
            "all": Shard(prefix=12),
            **{name: Shard(kind="table", owner=owner, exchange="pooled") for name, owner in owners.items()},
        }
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
    pooled: bool = False
    """Whether the owners of some tables send pooled vectors, not rows."""


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


def make_batch(
    generator: torch.Generator, size: int, *, weighted: bool = False, num_rows: dict[str, int] = NUM_ROWS
) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids, few of them different."""
    lengths = torch.randint(0, 4, (len(num_rows) * size,), generator=generator)
    limits = torch.tensor([*num_rows.values()]).repeat_interleave(size).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) ** 3 * limits).long()
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(tuple(num_rows), ids, weights, lengths=lengths)


def train(emb: EmbeddingCollection, case: Case, comm: Communicator | None) -> dict[str, Any]:
    """Trains; returns outputs of this rank's samples, and all weights and states. comm: None on one process."""
    optimizer = OPTIMIZERS[case.optimizer](emb)
    seen: list[Tensor] = []

    def cut(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if comm is None:
            return sparse.in_parts(tree.starts(sparse.stride, case.micro_batches))
        return sparse.samples(*comm.ranks.samples(sparse.stride))

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
        if number in (1, 3, 5):  # what the step needs travels while a batch is scored
            optimizer.prepare()
        with torch.no_grad():
            seen.append(emb(step.scored).clone())
        if number == 5:  # and is then not what the step needs
            emb.scale_pending(2.0)
        optimizer.zero_grad() if number == 3 else optimizer.step()
    return ended(emb, optimizer, seen)


def ended(emb: EmbeddingCollection, optimizer: SparseOptimizer, seen: list[Tensor]) -> dict[str, Any]:
    """Closes the tables; returns what was seen, all weights and states, and what their tiers counted."""
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


def shared(comm: Communicator, case: Case, seed: int = 3) -> EmbeddingCollection:
    shards, below = shards_of(comm.size, pooled=case.pooled), memory_of(case, comm.rank)
    return EmbeddingCollection(TABLES, memory=ShardedMemory(comm=comm, shards=shards, below=below), seed=seed)


def train_shared(comm: Communicator, case: Case) -> dict[str, Any]:
    return train(shared(comm, case), case, comm)


def alone(seed: int, tables: Sequence[TableConfig] = TABLES) -> EmbeddingCollection:
    """The truth: a plain collection, updated by the reference."""
    emb = EmbeddingCollection(tables, seed=seed)

    def update(lookups: ops.Lookups, attached: Attached, rules: Any) -> None:
        arrays, states = emb.placement.arrays, [state.tensors for state in attached.arrays]
        pending = [(kernels.layout, sparse, grad) for kernels, sparse, grad in lookups]
        layout = emb.placement.kernels.pooled.layout
        reference.update(layout, arrays.tensors, states, pending, rules, low=arrays.low)

    emb.placement.update = update  # type: ignore[method-assign]
    return emb


pool = rank_pool(MAX_RANKS)


@cache
def truth_of(optimizer: str, micro_batches: int) -> dict[str, Any]:
    """What any number of ranks must find, wherever each keeps its rows and however far it looks ahead."""
    return train(alone(3), Case(optimizer, micro_batches), None)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> ThreadPool:
    return ThreadPool()


def check(pool: RankPool | ThreadPool, case: Case, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    truth, found = truth_of(case.optimizer, case.micro_batches), []
    for num_ranks in ranks:
        found = pool.run(train_shared, case, num_ranks=num_ranks, micro_batches=case.micro_batches)
        check_bits(found, truth)
    return found


def check_bits(found: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    """Together the ranks have seen what one process has, and each reads its weights and states."""
    for k, want in enumerate(truth["seen"]):
        assert torch.equal(bits(torch.cat([own["seen"][k] for own in found])), bits(want)), (len(found), k)
    for own in found:
        for k, want in enumerate(truth["whole"]):
            assert torch.equal(bits(own["whole"][k]), bits(want)), (len(found), k)


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [("sgd", (1, 2, 3, 4)), ("adagrad", (3,)), ("row_wise_adagrad", (2, 4)), ("adam", (1, 3)), ("ftrl", (2, 4))],
)
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_any_number_of_ranks_changes_no_bit(threads: ThreadPool, optimizer: str, ranks: tuple[int, ...]) -> None:
    check(threads, Case(optimizer, 8), ranks)


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [("row_wise_adagrad", (1, 2, 3, 4)), ("sgd", (3,)), ("adam", (4,)), ("adagrad", (3,)), ("ftrl", (2,))],
)
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_pooled_vectors_change_no_bit(threads: ThreadPool, optimizer: str, ranks: tuple[int, ...]) -> None:
    """Also if a step looks up sequences of the same tables, of which rows travel."""
    check(threads, Case(optimizer, 8, pooled=True), ranks)


@pytest.mark.parametrize(
    ("optimizer", "depth", "pooled"),
    [
        ("adam", 2, False), ("row_wise_adagrad", 0, False), ("ftrl", 3, False), ("sgd", 1, False), ("ftrl", 2, True),
        ("sgd", 0, True),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_shards_in_tiers_have_the_bits_of_one_process(
    threads: ThreadPool, optimizer: str, depth: int, pooled: bool, tmp_path: Path
) -> None:
    mixed = optimizer == "ftrl"
    for own in check(threads, Case(optimizer, 5, str(tmp_path), depth, mixed, pooled), (3,))[mixed:]:
        assert own["evicted"]
        # Every forward pass is announced; sequences, of batches that were trained already, are not.
        assert (own["foreseen"], own["unannounced"], own["altered"]) == ((10, 2, 0) if depth else (0, 12, 0))


def count_rows(comm: Communicator, folder: str) -> tuple[list[int], list[int]]:
    """Returns by table how many rows of the shard exist after scoring a batch, and after training it."""
    emb = shared(comm, Case("sgd", 4, folder))
    optimizer = hotrow.SGD(emb, lr=0.1)
    tiers = emb.placement.find(Tiers)
    batch = make_batch(torch.Generator().manual_seed(3), 12)
    batch = batch.samples(*comm.ranks.samples(12))
    with torch.no_grad():
        emb(batch)
    scored = [tiers.num_changed(table.name, ever=True) for table in TABLES]
    emb(batch).sum().backward()
    optimizer.step()
    trained = [tiers.num_changed(table.name, ever=True) for table in TABLES]
    emb.placement.close()
    return scored, trained


def test_scoring_makes_no_row(threads: ThreadPool, tmp_path: Path) -> None:
    ranks = threads.run(count_rows, str(tmp_path), num_ranks=3, micro_batches=3)
    batch = make_batch(torch.Generator().manual_seed(3), 12)
    for t, table in enumerate(TABLES):
        ids = np.unique(np.concatenate([batch.values[batch.span(name)].numpy() for name in table.feature_names]))
        shard = shards_of(3).get(table.name, Shard())
        for rank, (scored, trained) in enumerate(ranks):
            assert (scored[t], trained[t]) == (0, shard.held(ids, rank, 3).sum()), (table.name, rank)


class Told(NamedTuple):
    kind: str
    text: str


def told(action: Callable[[], object]) -> Told:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        action()
    return Told(raised.type.__name__, str(raised.value))


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


def make(comm: Communicator | None, *, seed: int) -> Saved:
    emb = alone(seed) if comm is None else shared(comm, Case("adam", 4), seed)
    return Saved(emb, hotrow.Adam(emb, lr=0.02))


class Kept(NamedTuple):
    """Where ranks keep their rows."""

    tiers: str | None = None
    first_in_dram: bool = False
    pooled: bool = False
    seed: int = 0


def placed(comm: Communicator, kept: Kept) -> Saved:
    """A model of a rank; writes go in small pieces, so that there are several of them."""
    sharded_rows.PIECE_BYTES = 256
    case = Case("adam", 4, kept.tiers, first_in_dram=kept.first_in_dram, pooled=kept.pooled)
    emb = shared(comm, case, kept.seed)
    return Saved(emb, hotrow.Adam(emb, lr=0.02))


def go_on(comm: Communicator, folder: Path, kept: Kept, first: int, last: int) -> int:
    """Loads checkpoint `first` and trains on, with a checkpoint after each step up to `last`; returns how many bytes of
    rows the rank sent for that.
    """
    saved = placed(comm, kept)
    saved.step(make_batch(torch.Generator().manual_seed(99), 8).samples(*comm.ranks.samples(8)))  # which loading undoes
    hotrow.load_checkpoint(folder / str(first), saved.parts)
    for number in range(first, last):
        batch = make_batch(torch.Generator().manual_seed(number), 13)
        saved.step(batch.samples(*comm.ranks.samples(13)))
        hotrow.save_checkpoint(folder / str(number + 1), saved.parts)
    saved.emb.placement.close()
    return comm.counts.sent_bytes.get("tables", 0)


def links(path: Path) -> dict[str, list[int]]:
    """By table, the number of rows in each file of its weights."""
    chains = read_manifest(path).parts["embedding"].chains
    return {} if chains is None else {table: list(chain.links) for table, chain in chains.items()}


def test_checkpoints_go_from_one_process_to_any_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    """1 -> 4 -> 2 -> 3 -> 4 -> 3 -> 2 ranks and at each turn 1, in every sharding and exchange, against one process
    throughout. Each rank writes files of its own rows, in tiers of what changed; together they say the same.
    """
    plain, tiers = make(None, seed=0), str(tmp_path / "tiers")
    folder, number = tmp_path / "saved", 0
    hotrow.save_checkpoint(folder / "0", plain.parts)
    for num_ranks, kept, steps in [
        (4, Kept(), 1),
        (2, Kept(tiers, pooled=True), 2),
        (3, Kept(tiers), 2),
        (4, Kept(tiers, first_in_dram=True, seed=7), 1),
        (3, Kept(), 1),
        (2, Kept(pooled=True), 1),
    ]:
        sent = pool.run(go_on, folder, kept, number, number + steps, num_ranks=num_ranks, micro_batches=4)
        assert sent == [0] * num_ranks, "rows went over the wire"
        for _ in range(steps):
            plain.step(make_batch(torch.Generator().manual_seed(number), 13).in_parts(tree.starts(13, 4)))
            number += 1
            truth = hotrow.save_checkpoint(tmp_path / f"truth-{number}", plain.parts)
            assert expanded(folder / str(number)) == expanded(truth), (num_ranks, kept, number)
            verify(folder / str(number))
        alone = make(None, seed=9)
        hotrow.load_checkpoint(folder / str(number), alone.parts)
        for table in TABLES:
            assert torch.equal(alone.emb.float32(table.name), plain.emb.float32(table.name))
    # In tiers, the two ranks began a chain, which they and then the three went on with.
    chains = [links(folder / str(k))["rows"] for k in (2, 3, 4, 5)]
    assert len(chains[0]) == 2 and all(longer[: len(chains[0])] == chains[0] for longer in chains[1:])
    file = "embedding/rows/000.safetensors"
    assert len({(folder / str(k) / file).stat().st_ino for k in (2, 3, 4, 5)}) == 1


def fail_to_save(comm: Communicator, folder: Path, tiers: str | None) -> list[Told]:
    """What a full disk under one rank, then a folder that another does not see, raise; then saves."""
    saved = placed(comm, Kept(tiers))
    hotrow.save_checkpoint(folder / "step-0", saved.parts)
    saved.step(make_batch(torch.Generator().manual_seed(0), 13).samples(*comm.ranks.samples(13)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(checkpoint, "write_tensors", full)
        found = [told(lambda: hotrow.save_checkpoint(folder / "step-1", saved.parts))]
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 0:  # for the manifest
            patch.setattr("hotrow.base.records.atomic_write", full)
        found.append(told(lambda: hotrow.save_checkpoint(folder / "step-1", saved.parts)))
    own = folder / "step-1" if comm.rank != 1 else folder / "elsewhere" / "step-1"
    found.append(told(lambda: hotrow.save_checkpoint(own, saved.parts)))
    left = ["step-0"] if comm.rank else sorted(path.name for path in folder.iterdir())
    hotrow.save_checkpoint(folder / "step-1", saved.parts)
    saved.emb.placement.close()
    assert left == ["step-0"]
    return found


@pytest.mark.parametrize("in_tiers", [False, True])
def test_a_save_that_one_rank_cannot_end_leaves_the_last(pool: RankPool, tmp_path: Path, in_tiers: bool) -> None:
    folder = tmp_path / "saved"
    found = pool.run(fail_to_save, folder, str(tmp_path / "tiers") if in_tiers else None, num_ranks=3, micro_batches=4)
    for full, manifest, elsewhere in found:
        for rank, told_of in ((1, full), (0, manifest)):
            assert told_of.text.startswith(f"rank {rank} (")
            assert "disk full while saving a checkpoint in " in told_of.text
            assert "Earlier checkpoints are kept." in told_of.text
        assert elsewhere.text.startswith("rank 1 (")
        assert "which rank 0 has made, is not here: all ranks" in elsewhere.text
    plain = make(None, seed=0)
    for number in range(2):
        truth = hotrow.save_checkpoint(tmp_path / f"truth-{number}", plain.parts)
        verify(folder / f"step-{number}")
        assert expanded(folder / f"step-{number}") == expanded(truth)
        plain.step(make_batch(torch.Generator().manual_seed(0), 13).in_parts(tree.starts(13, 4)))
    assert sorted(list_checkpoints(folder)) == [0, 1]


def undo(comm: Communicator, folder: Path, tiers: str) -> Tensor:
    """Trains rows 20 to 39, of which every rank has a copy, and loads a checkpoint that has no row above 19."""
    table = TableConfig(name="t", num_embeddings=60, embedding_dim=4, feature_names=("a",))
    memory = ShardedMemory(comm=comm, shards={"t": Shard(prefix=50)}, below=memory_of(Case("sgd", 4, tiers), comm.rank))
    emb = EmbeddingCollection([table], memory=memory)
    saved = Saved(emb, hotrow.Adam(emb, lr=0.1))
    for ids in torch.arange(40).split(10):
        if int(ids[0]) == 20:
            hotrow.save_checkpoint(folder, saved.parts)
        saved.step(KeyedJaggedTensor.from_dense(("a",), ids[:, None]).samples(*comm.ranks.samples(10)))
    hotrow.load_checkpoint(folder, saved.parts)
    own = emb.placement.below.rows("t").read(slice(0, 50)).clone()  # type: ignore[union-attr]
    emb.placement.close()
    return own


def test_loading_makes_every_copy_of_a_row_what_it_was(threads: ThreadPool, tmp_path: Path) -> None:
    found = threads.run(undo, tmp_path / "saved", str(tmp_path / "tiers"), num_ranks=3, micro_batches=3)
    alone = EmbeddingCollection([TableConfig(name="t", num_embeddings=60, embedding_dim=4, feature_names=("a",))])
    hotrow.load_checkpoint(tmp_path / "saved", {"embedding": alone})
    assert all(torch.equal(own, alone.weights["t"][:50]) for own in found)


class Read(NamedTuple):
    checked: int
    """Bytes that a rank read to compare them with checksums."""
    values: int
    """Bytes of rows that it read into its tables."""


def read_own(comm: Communicator, folder: Path, tiers: str | None) -> Read:
    """Saves a table dealt out by row, loads it again, and returns what was read."""
    table = TableConfig(name="t", num_embeddings=4001, embedding_dim=16, feature_names=("a",))
    memory = ShardedMemory(comm=comm, below=memory_of(Case("sgd", 4, tiers), comm.rank))
    emb = EmbeddingCollection([table], memory=memory)
    saved = Saved(emb, hotrow.Adam(emb, lr=0.1))
    for ids in torch.arange(3000).split(300):
        saved.step(KeyedJaggedTensor.from_dense(("a",), ids[:, None]).samples(*comm.ranks.samples(300)))
    comm.counts.sent_bytes.clear()
    hotrow.save_checkpoint(folder, saved.parts)
    sent = sum(comm.counts.sent_bytes.values())
    assert sent < 0.02 * sum(record.num_bytes for record in read_manifest(folder).files.values())
    checked, values = [0], [0]
    plain_crc32, plain_open = checkpoint.crc32_of, checkpoint_rows.open_tensors

    def crc32_of(path: Path, start: int, stop: int, **options: Any) -> int:
        checked[0] += stop - start
        return plain_crc32(path, start, stop, **options)

    class Counted:
        def __init__(self, name: str, stored: Any) -> None:
            self.name, self.stored = name, stored
            self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

        def __getitem__(self, rows: slice) -> Tensor:
            read: Tensor = self.stored[rows]
            values[0] += read.nbytes * (self.name != "rows")
            return read

    @contextmanager
    def open_tensors(path: Path) -> Iterator[Any]:
        with plain_open(path) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: Counted(name, file.get_slice(name)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "crc32_of", crc32_of)
        patch.setattr(checkpoint_rows, "open_tensors", open_tensors)
        hotrow.load_checkpoint(folder, saved.parts)
    emb.placement.close()
    return Read(checked[0], values[0])


def test_a_rank_reads_what_it_holds(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(read_own, tmp_path / "saved", str(tmp_path / "tiers"), num_ranks=3, micro_batches=3)
    manifest = read_manifest(tmp_path / "saved")
    assert sum(own.checked for own in found) == sum(record.num_bytes for record in manifest.files.values())
    assert max(own.checked for own in found) - min(own.checked for own in found) <= len(manifest.files)
    assert [own.values for own in found] == [1000 * 4 * 16 * 3] * 3, "weights and Adam's two states of its 1000 rows"


def states_of(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    saved, other = make(comm, seed=1), make(comm, seed=2)
    saved.step(make_batch(torch.Generator().manual_seed(2), 13).samples(*comm.ranks.samples(13)))
    other.emb.load_state_dict(saved.emb.state_dict())
    other.optimizer.load_state_dict(saved.optimizer.state_dict())
    return dict(other.emb.state_dict()), other.optimizer.state_dict()


def test_state_dicts_are_those_of_one_process(threads: ThreadPool) -> None:
    plain = make(None, seed=1)
    plain.step(make_batch(torch.Generator().manual_seed(2), 13).in_parts(tree.starts(13, 5)))
    truth, state = plain.emb.state_dict(), plain.optimizer.state_dict()
    for weights, states in threads.run(states_of, num_ranks=3, micro_batches=5):
        assert weights.keys() == truth.keys() and states["param_groups"] == state["param_groups"]
        assert all(torch.equal(bits(weights[name]), bits(own)) for name, own in truth.items())
        for number, own in state["state"].items():
            assert all(torch.equal(bits(states["state"][number][name]), bits(each)) for name, each in own.items())


def train_counted(comm: Communicator) -> tuple[dict[str, int], list[int]]:
    """Returns bytes sent in a training step by purpose, and what rows, sums and totals are to take."""
    table = TableConfig(name="t", num_embeddings=400, embedding_dim=16, feature_names=("a", "b"))
    emb = EmbeddingCollection([table], memory=ShardedMemory(comm=comm, shards={"t": Shard(prefix=40)}))
    optimizer = hotrow.RowWiseAdagrad(emb, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    ids = (torch.rand(64, 2, generator=generator) ** 4 * 400).long()
    first, end = zip(*(comm.ranks.samples(64, rank) for rank in range(comm.size)), strict=True)
    own = ids[first[comm.rank] : end[comm.rank]]
    out = emb(own)
    comm.counts.sent_bytes.clear()
    out.sum().backward()
    optimizer.step()
    before = dict(comm.counts.sent_bytes)
    comm.counts.sent_bytes.clear()
    emb(own)
    distinct = [set(ids[first[r] : end[r]].flatten().tolist()) for r in range(comm.size)]
    home = {row: row % comm.size if row < 40 else (row - 40) % comm.size for row in range(400)}
    rows = sum(home[row] == comm.rank for r, rows in enumerate(distinct) if r != comm.rank for row in rows if row >= 40)
    sums = sum(home[row] != comm.rank for row in distinct[comm.rank])
    common = {row for rows in distinct for row in rows if row < 40 and home[row] == comm.rank}
    return {**before, **comm.counts.sent_bytes}, [64 * rows, 64 * sums, 64 * len(common) * (comm.size - 1)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_row_comes_once_and_one_sum_goes_back(threads: ThreadPool, num_ranks: int) -> None:
    for sent, (rows, sums, common) in threads.run(train_counted, num_ranks=num_ranks, micro_batches=num_ranks):
        assert (sent["rows"], sent["gradients"], sent["replicated"]) == (rows, sums, common)
        assert rows and sums and common


def train_pooled(comm: Communicator) -> tuple[dict[str, int], int, int, int]:
    """Returns bytes sent in a step by purpose; words of vectors that leave this rank, and of its gradients; the
    number of exchanges."""
    owners = {"one": 0, "two": comm.size - 1}
    tables = [
        TableConfig(name="one", num_embeddings=400, embedding_dim=16, feature_names=("a", "b")),
        TableConfig(name="two", num_embeddings=400, embedding_dim=3, feature_names=("c",)),
    ]
    shards = {name: Shard(kind="table", owner=owner, exchange="pooled") for name, owner in owners.items()}
    emb = EmbeddingCollection(tables, memory=ShardedMemory(comm=comm, shards=shards))
    optimizer = hotrow.RowWiseAdagrad(emb, lr=0.1)
    lengths = torch.randint(0, 9, (3 * 50,), generator=torch.Generator().manual_seed(1))
    batch = KeyedJaggedTensor(("a", "b", "c"), torch.arange(int(lengths.sum())) % 400, lengths=lengths)
    first, end = comm.ranks.samples(50)
    comm.counts.sent_bytes.clear()
    before = comm.counts.num_exchanges
    emb(batch.samples(first, end)).sum().backward()
    optimizer.step()
    widths = [sum({"one": 32, "two": 3}[name] for name in owners if owners[name] == r) for r in range(comm.size)]
    own = end - first
    vectors, gradients = (50 - own) * widths[comm.rank], own * (sum(widths) - widths[comm.rank])
    return dict(comm.counts.sent_bytes), vectors, gradients, comm.counts.num_exchanges - before


def test_a_vector_for_each_bag_goes_and_its_gradient_comes(threads: ThreadPool) -> None:
    """And nothing else but the ids, and whether a step is left out: no rank asks for rows, or has sums of rows."""
    for sent, vectors, gradients, exchanges in threads.run(train_pooled, num_ranks=3, micro_batches=3):
        assert (sent["pooled"], sent["pooled_gradients"]) == (4 * vectors, 4 * gradients)
        assert exchanges == 4 and sent.keys() == {"agreement", "counts", "ids", "pooled", "pooled_gradients"}


EPSILON = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""By how much rounding to these types changes a number at most, as a share of it."""


class Rounded(NamedTuple):
    out: Tensor
    weights: list[Tensor]
    copies: Tensor
    """The rows that every rank holds, as this one has them."""


def rounded_tables() -> list[TableConfig]:
    names = ("rows", "vectors", "copies")
    return [
        TableConfig(name=name, num_embeddings=30, embedding_dim=8, feature_names=(name,), init=Uniform(bound=0.5))
        for name in names
    ]


def train_rounded(comm: Communicator | None, wire_dtype: WireDtype, sign: int = 1) -> Rounded:
    """Takes a step of gradients that do not depend on what was looked up, nearly too small for float16. sign: 0 makes
    all of them positive."""
    shards = {"vectors": Shard(kind="table", owner=1, exchange="pooled"), "copies": Shard(prefix=30)}
    memory = None if comm is None else ShardedMemory(comm=comm, shards=shards, wire_dtype=wire_dtype)
    emb = EmbeddingCollection(rounded_tables(), memory=memory, seed=3)
    optimizer = hotrow.SGD(emb, lr=1e6)
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 5, (3 * 24,), generator=generator)
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    batch = KeyedJaggedTensor(("rows", "vectors", "copies"), ids, lengths=lengths)
    grad = torch.randn(24, 24, generator=generator) * 1e-7
    grad = grad if sign else grad.abs()
    first, end = (0, 24) if comm is None else comm.ranks.samples(24)
    own = batch.in_parts(tree.starts(24, 6)) if comm is None else batch.samples(first, end)
    out = emb(own)
    out.backward(grad[first:end])
    before = [emb.float32(table.name).clone() for table in emb.tables]
    optimizer.step()
    changes = [emb.float32(table.name) - old for table, old in zip(emb.tables, before, strict=True)]
    return Rounded(out.detach(), changes, emb.weights["copies"].clone())


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16", "fp16"])
def test_numbers_on_the_wire_are_exact_or_within_their_rounding(threads: ThreadPool, wire_dtype: WireDtype) -> None:
    truth, sizes, epsilon = train_rounded(None, "fp32"), train_rounded(None, "fp32", 0), EPSILON[wire_dtype]
    ranks = threads.run(train_rounded, wire_dtype, num_ranks=3, micro_batches=6)
    out = torch.cat([own.out for own in ranks])
    assert torch.equal(out[:, 16:], truth.out[:, 16:]), "nothing of replicated rows travels before a lookup"
    most = 4 * 0.5  # a bag has up to four numbers of up to 0.5
    assert ((out - truth.out).abs() <= most * epsilon).all() and (epsilon == 0) == torch.equal(out, truth.out)
    for own in ranks:
        assert torch.equal(own.copies, ranks[0].copies), "all ranks have the same copies"
        for k, (got, want) in enumerate(zip(own.weights, truth.weights, strict=True)):
            # A sum is rounded once, that of a replicated row twice; a weight of up to 1 by 2^-24 as it is stored.
            allowed = (2 if k == 2 else 1) * 1.01 * epsilon * sizes.weights[k].abs() + (2.0**-23 if epsilon else 0)
            assert ((got - want).abs() <= allowed).all(), (k, (got - want).abs().max())
            assert (epsilon == 0) == torch.equal(got, want)


HOT = [
    TableConfig(name="rows", num_embeddings=40, embedding_dim=5, feature_names=("a",)),
    TableConfig(name="vectors", num_embeddings=30, embedding_dim=3, feature_names=("b",), pooling="mean"),
]


def batch_of_phase(step: int) -> KeyedJaggedTensor:
    """Two of three batches are hot: they have rows below 10 of the first table, and empty bags of the other one."""
    generator, hot = torch.Generator().manual_seed(step), step % 3 > 0
    lengths = torch.randint(0, 4, (2 * 11,), generator=generator)
    lengths[11:] *= not hot
    limits = torch.tensor([10 if hot else 40, 30]).repeat_interleave(11).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=generator) * limits).long()
    return KeyedJaggedTensor(("a", "b"), ids, lengths=lengths)


def train_phases(comm: Communicator | None) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Returns outputs, whole tables, and the number of exchanges of each hot lookup."""
    shards = {"rows": Shard(prefix=10), "vectors": Shard(kind="table", exchange="pooled")}
    memory = None if comm is None else ShardedMemory(comm=comm, shards=shards)
    emb = alone(3, HOT) if comm is None else EmbeddingCollection(HOT, memory=memory, seed=3)
    optimizer, shared = hotrow.Adam(emb, lr=0.02), emb.placement.find(Sharded)
    outputs, exchanges = list[Tensor](), list[int]()
    for step in range(6):
        sparse = batch_of_phase(step)
        if comm is None or shared is None:
            outputs.append(emb(sparse.in_parts(tree.starts(11, 5))))
        else:
            shared.all_held = step % 3 > 0
            (lo, hi), starts = comm.ranks.held, tree.starts(11, 5)
            parts = [start - starts[lo] for start in starts[lo : hi + 1]]
            before = comm.counts.num_exchanges
            outputs.append(emb(sparse.samples(*comm.ranks.samples(11)).in_parts(parts)))
            exchanges += [comm.counts.num_exchanges - before] * shared.all_held
        (outputs[-1] * outputs[-1]).sum().backward()
        optimizer.step()
    return [out.detach() for out in outputs], [emb.float32(table.name) for table in HOT], exchanges


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_hot_batches_beside_pooled_vectors_have_the_bits_of_one_process(threads: ThreadPool, num_ranks: int) -> None:
    outputs, tables, _ = train_phases(None)
    found = threads.run(train_phases, num_ranks=num_ranks, micro_batches=5)
    for k, want in enumerate(outputs):
        assert torch.equal(bits(torch.cat([own[k] for own, _, _ in found])), bits(want)), k
    for _, whole, exchanges in found:
        assert all(torch.equal(bits(own), bits(want)) for own, want in zip(whole, tables, strict=True))
        assert exchanges == [0, 0, 0, 0]


def look_up_cold(comm: Communicator) -> str:
    shards = {"rows": Shard(prefix=10), "vectors": Shard(prefix=20)}
    emb = EmbeddingCollection(HOT, memory=ShardedMemory(comm=comm, shards=shards))
    shared = emb.placement.find(Sharded)
    shared.all_held = True
    with torch.no_grad():
        emb(torch.tensor([[9, 19]]))
    with pytest.raises(ValueError) as error:
        emb(torch.tensor([[9, 20]]))
    return str(error.value)


def test_a_hot_batch_with_a_row_that_not_every_rank_holds_is_refused(threads: ThreadPool) -> None:
    """Also on the rank that holds it."""
    for text in threads.run(look_up_cold, num_ranks=2, micro_batches=2):
        assert text.startswith("table 'vectors': row 20 is not on every rank, and a batch of a hot phase asks for no")


TWO = [
    TableConfig(name="a", num_embeddings=30, embedding_dim=4, feature_names=("a",)),
    TableConfig(name="b", num_embeddings=20, embedding_dim=3, feature_names=("b",)),
]


def drawn(step: int) -> Tensor:
    """Ids of a batch of 12 samples; some rows are in all of them, others nowhere."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(12, 2, generator=generator) ** 3 * torch.tensor([30, 20])).long()


def update_alone(comm: Communicator, merge_every: int, num_steps: int, folder: str | None = None) -> list[Tensor]:
    """Returns weights and states of this rank's copies after the last merge; folder: of tiers, in which they lie."""
    everywhere = {table.name: Shard(prefix=table.num_embeddings) for table in TWO}
    below = memory_of(Case("adagrad", 6, folder))
    emb = EmbeddingCollection(TWO, memory=ShardedMemory(comm=comm, shards=everywhere, below=below), seed=3)
    optimizer, shared = OPTIMIZERS["adagrad"](emb), emb.placement.find(Sharded)
    shared.all_held, shared.merge_every = True, merge_every
    for step in range(num_steps):
        own = drawn(step)[slice(*comm.ranks.samples(12))]
        out = emb(KeyedJaggedTensor.from_dense(("a", "b"), own).in_parts([0, *(len(own) * v // 2 for v in (1, 2))]))
        (out * out).sum().backward()
        optimizer.step()
    shared.merge()
    changes, states = shared.below.changes, optimizer.attached_to(emb).states
    arrays = [(t, shared.below.rows(t.name, state)) for t in TWO for state in (None, *states[t.name])]
    each = [array.read(slice(0, t.num_embeddings)).clone() for t, array in arrays]
    if changes is not None:  # a checkpoint has the rows that any rank changed
        each += [torch.tensor([changes.num_changed(t.name, ever=True)], dtype=torch.int32) for t in TWO]
    emb.placement.close()
    return each


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


def test_ranks_that_update_alone_add_up_their_changes(threads: ThreadPool, tmp_path: Path) -> None:
    """After every third step, and after the fourth, at the end; in tiers, to the same bits."""
    found = threads.run(update_alone, 3, 4, num_ranks=3, micro_batches=6)
    exact = threads.run(update_alone, 1, 4, num_ranks=3, micro_batches=6)[0]
    for k, want in enumerate(summed_changes(3, 3, 4)):
        assert all(torch.equal(bits(found[0][k]), bits(own[k])) for own in found), "the copies are the same"
        assert torch.allclose(found[0][k], want, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(exact[k], want, rtol=1e-2, atol=1e-2), "sums of every step would pass as well"
    distinct = [len(set(torch.cat([drawn(step)[:, t] for step in range(4)]).tolist())) for t in range(2)]
    for own in threads.run(update_alone, 3, 4, str(tmp_path), num_ranks=3, micro_batches=6):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(own, found[0], strict=False))
        assert [int(num) for num in own[len(found[0]) :]] == distinct


def fail(comm: Communicator, folder: str) -> list[Told]:
    """What each bad call raises here; between them the ranks go on together."""
    emb = shared(comm, Case("sgd", 4, folder, first_in_dram=True))
    optimizer = hotrow.SGD(emb, lr=0.1)
    good = KeyedJaggedTensor.from_dense(FEATURES, torch.ones(len(FEATURES) * 2, dtype=torch.int64).view(2, -1))
    bad = good.with_values(good.values.clone())
    if comm.rank == 1:
        bad.values[3] = 61
    found = [told(lambda: emb(bad)), told(lambda: emb.placement.announce(bad))]
    uneven = good.samples(0, 1) if comm.rank == 2 else good
    found.append(told(lambda: emb(uneven)))
    changed = good.with_values(good.values.clone())
    emb.placement.announce(changed)
    if comm.rank == 2:
        changed.values[0] = 5
    found.append(told(lambda: emb(changed)))
    out = emb(good)
    (out.sum() * (float("nan") if comm.rank == 1 else 1.0)).backward()
    found.append(told(optimizer.step))
    optimizer.zero_grad()
    emb(good).sum().backward()
    optimizer.step()
    found.append(told(emb.state_dict))
    emb.placement.close()
    return found


def test_an_error_on_one_rank_is_raised_on_all(threads: ThreadPool, tmp_path: Path) -> None:
    ranks = threads.run(fail, str(tmp_path), num_ranks=3, micro_batches=3)
    for found in ranks:
        assert [kind for kind, _ in found] == ["ValueError"] * 6
        for _, text in found[:2]:
            assert text.startswith("rank 1: feature 'b', sample 1, position 0: id 61 is outside its table of 61 rows")
        assert found[2].text.startswith("the ranks have 2, 2, 1 samples of a batch of 5; of 3 micro-batches they must")
        told = "rank 2: a batch was changed after it was announced: with several ranks, change it before"
        assert found[3].text == told
        assert "rank 1: the gradient of feature 'a' (table 'rows'), sample 0, column 0 is nan" in found[4].text
        assert found[5].text.startswith("rank 1: a collection in tiers has no state_dict")


def fail_pooled(comm: Communicator) -> list[Told]:
    """What a batch raises of which one rank has something wrong in a table that sends pooled vectors."""
    emb = shared(comm, Case("sgd", 4, pooled=True))
    optimizer, features = hotrow.SGD(emb, lr=0.1), len(FEATURES)
    ids, weights = torch.ones(2 * features, dtype=torch.int64), torch.ones(2 * features)
    found = []
    for k, wrong in ((5, 50), (3, 61)):
        bad = ids.clone()
        bad[k] = wrong if comm.rank == 1 else 1
        found.append(told(lambda bad=bad: emb(KeyedJaggedTensor(FEATURES, bad))))
    odd = weights.clone()
    odd[7] = float("nan") if comm.rank == 1 else 1.0
    found.append(told(lambda: emb(KeyedJaggedTensor(FEATURES, ids, odd))))
    asked = weights.clone().requires_grad_()
    found.append(told(lambda: emb(KeyedJaggedTensor(FEATURES, ids, asked))))
    emb.placement.looks_ahead = True
    changed = KeyedJaggedTensor(FEATURES, ids, weights.clone())
    emb.placement.announce(changed)
    changed.weights[4] = 3.0 if comm.rank == 2 else 1.0
    found.append(told(lambda: emb(changed)))
    again = KeyedJaggedTensor(FEATURES, ids, weights)
    emb.placement.announce(again)
    rows, _ = emb.sequence(again)["c"]  # announced for vectors: they are not what is needed
    emb(again).sum().backward()
    optimizer.step()
    assert rows.shape == (2, 4)
    changed = KeyedJaggedTensor(FEATURES, ids, weights.clone())
    emb.placement.announce(changed)
    changed.weights[0] = 2.0  # of a feature whose rows travel: what the step finds counts
    assert torch.equal(emb(changed)[0, :1], 2 * emb(again)[0, :1])
    return found


def test_an_error_of_a_pooled_table_is_raised_on_all(threads: ThreadPool) -> None:
    for found in threads.run(fail_pooled, num_ranks=3, micro_batches=3):
        assert [kind for kind, _ in found] == ["ValueError"] * 5
        assert found[0].text.startswith("rank 1: feature 'c', sample 1, position 0: id 50 is outside its table of 50")
        assert found[1].text.startswith("rank 1: feature 'b', sample 1, position 0: id 61 is outside its table of 61")
        assert "rank 1: the weight of feature 'd' (table 'half'), sample 1, position 0 is nan" in found[2].text
        assert "the weights of the batch want a gradient" in found[3].text and "exchange='rows'" in found[3].text
        assert found[4].text.startswith("rank 2: a batch was changed after it was announced")


def test_what_is_refused() -> None:
    comm = Communicator(Ranks(micro_batches=2))
    with pytest.raises(ValueError, match="there is no table 'user' to share; the tables are rows, half"):
        EmbeddingCollection(TABLES, memory=ShardedMemory(comm=comm, shards={"user": Shard()}))
    with pytest.raises(ValueError, match="shared by ranks lie in DRAM or in tiers: pass Memory or None"):
        EmbeddingCollection(
            TABLES, memory=ShardedMemory(comm=comm, below=hotrow.DeviceMemory(hbm="1GiB", device="cpu"))
        )
    with pytest.raises(TypeError, match="over several ranks cannot be copied"):
        copy.deepcopy(EmbeddingCollection(TABLES, memory=ShardedMemory(comm=comm)))

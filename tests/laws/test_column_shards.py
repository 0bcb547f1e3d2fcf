"""Law 2 for tables whose columns several ranks share: they have the bits of one process, and so have checkpoints.

The truth is a plain collection in DRAM on one process, whose updates are those of the readable reference.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_worlds
import torch
from kernel_cases import bits
from test_worlds import OPTIMIZERS, Saved, Told, alone, check_bits, ended, few_slots, told
from torch import Tensor

import hotrow
from expanded import expanded
from hotrow import EmbeddingCollection, KeyedJaggedTensor, TableConfig
from hotrow.kernels import tree
from hotrow.parallel import sharded_rows
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.sharded import Sharded, ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.run.checkpoint import verify
from hotrow.run.checkpoint_files import read_manifest, write_tensors
from hotrow.run.checkpoint_rows import InStep
from hotrow.tables import Uniform
from rank_threads import ThreadPool

MICRO_BATCHES = 5
TABLES = [
    TableConfig(name="wide", num_embeddings=61, embedding_dim=19, feature_names=("a", "b"), dtype="float16"),
    TableConfig(
        name="split", num_embeddings=50, embedding_dim=10, feature_names=("c",), pooling="mean", dtype="bfloat16"
    ),
    TableConfig(name="rows", num_embeddings=40, embedding_dim=3, feature_names=("d",)),
    TableConfig(name="plain", num_embeddings=47, embedding_dim=9, feature_names=("e",), init=Uniform(zero_rows=1)),
]
NUM_ROWS = {"a": 61, "b": 61, "c": 50, "d": 40, "e": 47}


def shards_of(num_ranks: int) -> dict[str, Shard]:
    """Columns on all ranks, on two of them, and on one; rows of "rows" travel."""
    last = num_ranks - 1
    owners = {"wide": tuple(range(num_ranks)), "split": (last, 0) if last else 0, "plain": (0, last) if last else 0}
    return {name: Shard(kind="table", owner=owner, exchange="pooled") for name, owner in owners.items()}


def make_batch(seed: int, size: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    return test_worlds.make_batch(generator, size, weighted=weighted, num_rows=NUM_ROWS)


def part(sparse: KeyedJaggedTensor, comm: Communicator | None) -> KeyedJaggedTensor:
    if comm is None:
        return sparse.in_parts(tree.starts(sparse.stride, MICRO_BATCHES))
    return sparse.samples(*comm.ranks.samples(sparse.stride))


class Kept(NamedTuple):
    """Where ranks keep their rows."""

    tiers: str | None = None
    """The folder of rows that lie mostly in files."""
    in_dram: int = -1
    """A rank that keeps its rows in DRAM while others have tiers."""
    seed: int = 3


def collection(comm: Communicator, kept: Kept) -> EmbeddingCollection:
    below = hotrow.Memory(dram="256KiB", plan=few_slots, file=kept.tiers, force=True) if kept.tiers else None
    below = None if comm.rank == kept.in_dram else below
    memory = ShardedMemory(comm=comm, shards=shards_of(comm.size), below=below)
    return EmbeddingCollection(TABLES, memory=memory, seed=kept.seed)


def train(emb: EmbeddingCollection, optimizer: str, depth: int, comm: Communicator | None) -> dict[str, Any]:
    """Trains on batches of 1 to 16 samples, two of which share a step; returns outputs, and all weights and states."""
    rule, seen = OPTIMIZERS[optimizer](emb), list[Tensor]()
    batches = [part(make_batch(k, size, weighted=k % 3 == 0), comm) for k, size in enumerate((9, 1, 16, 3, 5, 12))]
    for sparse in batches[:depth]:
        emb.placement.announce(sparse)
    for k, sparse in enumerate(batches):
        if depth and k + depth < len(batches):
            emb.placement.announce(batches[k + depth])
        emb.switches["plain"].requires_grad_(k != 4)
        out = emb(sparse)
        seen.append(out.detach().clone())
        (out * out).sum().backward()
        with torch.no_grad():
            seen.append(emb(part(make_batch(90 + k, 6), comm)))
        if k != 1:
            rule.step()
    return ended(emb, rule, seen)


def train_shared(comm: Communicator, optimizer: str, depth: int, kept: Kept) -> dict[str, Any]:
    return train(collection(comm, kept), optimizer, depth, comm)


@cache
def truth_of(optimizer: str) -> dict[str, Any]:
    return train(alone(3, TABLES), optimizer, 0, None)


@pytest.fixture
def threads() -> ThreadPool:
    return ThreadPool()


def check(
    threads: ThreadPool, optimizer: str, num_ranks: int, depth: int = 0, kept: Kept | None = None
) -> list[dict[str, Any]]:
    arguments = train_shared, optimizer, depth, kept or Kept()
    found = threads.run(*arguments, num_ranks=num_ranks, micro_batches=MICRO_BATCHES)
    check_bits(found, truth_of(optimizer))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "ftrl"])
def test_shared_columns_have_the_bits_of_one_process(threads: ThreadPool, optimizer: str, num_ranks: int) -> None:
    check(threads, optimizer, num_ranks)


@pytest.mark.parametrize(("optimizer", "num_ranks", "depth", "in_dram"), [("adam", 3, 2, -1), ("ftrl", 2, 0, 1)])
def test_shared_columns_in_tiers_have_the_bits_of_one_process(
    threads: ThreadPool, tmp_path: Path, optimizer: str, num_ranks: int, depth: int, in_dram: int
) -> None:
    found = check(threads, optimizer, num_ranks, depth, Kept(str(tmp_path), in_dram))
    assert all(own["evicted"] > 0 for rank, own in enumerate(found) if rank != in_dram)


def held(comm: Communicator, kept: Kept) -> dict[str, tuple[int, ...]]:
    emb = collection(comm, kept)
    below = emb.placement.below
    return {name: tuple(weight.shape) for name, weight in below.weights.items()}


def test_a_rank_holds_its_columns_alone(threads: ThreadPool) -> None:
    first, second, third = threads.run(held, Kept(), num_ranks=3, micro_batches=3)
    assert [own["wide"] for own in (first, second, third)] == [(61, 4), (61, 8), (61, 7)]
    assert (third["split"], first["split"], second["split"][0]) == ((50, 4), (50, 6), 1)


def saved_of(comm: Communicator | None, kept: Kept) -> Saved:
    """A model of a rank; writes go in small pieces, so that there are several of them."""
    sharded_rows.PIECE_BYTES = 256
    emb = alone(kept.seed, TABLES) if comm is None else collection(comm, kept)
    return Saved(emb, hotrow.Adam(emb, lr=0.02))


def gradient(number: int) -> Tensor:
    """The gradient of each output: in some steps, columns of one owner alone have one."""
    grad = torch.linspace(-1, 1, 60).repeat(13, 1)
    grad[:, [slice(0, 0), slice(0, 4), slice(4, 60), slice(40, 44)][number % 4]] = 0
    return grad


def step(saved: Saved, comm: Communicator | None, number: int) -> None:
    sparse, grad = make_batch(number, 13), gradient(number)
    saved.emb(part(sparse, comm)).backward(grad if comm is None else grad[slice(*comm.ranks.samples(13))])
    saved.optimizer.step()


def go_on(comm: Communicator, folder: Path, kept: Kept, first: int, last: int) -> None:
    """Loads checkpoint `first` and trains on, with a checkpoint after each step up to `last`."""
    saved = saved_of(comm, kept)
    step(saved, comm, 99)  # which loading undoes
    hotrow.load_checkpoint(folder / str(first), saved.parts)
    for number in range(first, last):
        step(saved, comm, number)
        hotrow.save_checkpoint(folder / str(number + 1), saved.parts)
    saved.emb.placement.close()


@pytest.mark.parametrize("last", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_checkpoints_go_from_one_process_to_any_number_of_ranks(threads: ThreadPool, tmp_path: Path, last: int) -> None:
    plain, tiers, folder, number = saved_of(None, Kept()), str(tmp_path / "tiers"), tmp_path / "saved", 0
    hotrow.save_checkpoint(folder / "0", plain.parts)
    turns = [
        (3, Kept(), 1), (2, Kept(tiers), 2), (3, Kept(tiers, seed=7), 2), (3, Kept(tiers, in_dram=0), 1),
        (3, Kept(tiers, in_dram=1), 1), (2, Kept(), 1),
    ]  # fmt: skip
    for num_ranks, kept, steps in turns[:last]:
        threads.run(go_on, folder, kept, number, number + steps, num_ranks=num_ranks, micro_batches=MICRO_BATCHES)
        for _ in range(steps):
            step(plain, None, number)
            number += 1
            truth = hotrow.save_checkpoint(tmp_path / f"truth-{number}", plain.parts)
            assert expanded(folder / str(number)) == expanded(truth), (num_ranks, kept, number)
            verify(folder / str(number))
    chains = [read_manifest(folder / name).parts["embedding"].chains or {} for name in ("2", "3")]
    assert any(len(own["wide"].links) > 1 for own in chains), "a save writes what changed"


def states_of(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    saved, other = saved_of(comm, Kept()), saved_of(comm, Kept(seed=2))
    step(saved, comm, 0)
    other.emb.load_state_dict(saved.emb.state_dict())
    other.optimizer.load_state_dict(saved.optimizer.state_dict())
    return dict(other.emb.state_dict()), other.optimizer.state_dict()["state"]


def test_state_dicts_are_those_of_one_process(threads: ThreadPool) -> None:
    plain = saved_of(None, Kept())
    step(plain, None, 0)
    truth, state = plain.emb.state_dict(), plain.optimizer.state_dict()["state"]
    for weights, states in threads.run(states_of, num_ranks=3, micro_batches=MICRO_BATCHES):
        assert weights.keys() == truth.keys() and states.keys() == state.keys()
        assert all(torch.equal(bits(weights[name]), bits(own)) for name, own in truth.items())
        assert all(torch.equal(bits(states[t][name]), bits(own)) for t in state for name, own in state[t].items())


def fail_to_save(comm: Communicator, folder: Path, tiers: str) -> Told:
    """What a full disk under the rank that writes whole rows raises; then saves."""
    saved = saved_of(comm, Kept(tiers))
    step(saved, comm, 0)
    found = told(lambda: hotrow.save_checkpoint(folder / "0", saved.parts))
    (folder / "freed").touch()
    hotrow.save_checkpoint(folder / "0", saved.parts)
    saved.emb.placement.close()
    return found


def test_a_save_that_fails_is_an_error_on_all_ranks(
    threads: ThreadPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, arrays: dict[str, InStep]) -> Any:
        if (tmp_path / "freed").exists():
            return write_tensors(path, arrays)
        next(arrays["rows"].pieces())
        raise OSError("the disk is full")

    monkeypatch.setattr("hotrow.run.checkpoint_rows.write_tensors", write)
    found = threads.run(fail_to_save, tmp_path, str(tmp_path / "tiers"), num_ranks=3, micro_batches=MICRO_BATCHES)
    assert all("the disk is full" in own.text for own in found)
    plain = saved_of(None, Kept())
    step(plain, None, 0)
    assert expanded(tmp_path / "0") == expanded(hotrow.save_checkpoint(tmp_path / "truth", plain.parts))


def phases(comm: Communicator | None) -> list[Tensor]:
    """Looks up and trains hot batches, which need no row of shared columns, between others."""
    emb = alone(3, TABLES) if comm is None else collection(comm, Kept())
    if comm is not None:
        memory = ShardedMemory(comm=comm, shards={**shards_of(comm.size), "rows": Shard(prefix=40)})
        emb = EmbeddingCollection(TABLES, memory=memory, seed=3)
    optimizer, shared, found = hotrow.Adam(emb, lr=0.02), emb.placement.find(Sharded), []
    for number in range(4):
        sparse, hot = make_batch(number, 11), number % 2 > 0
        if hot:
            lengths = sparse.lengths.view(5, 11).clone()
            lengths[[0, 1, 2, 4]] = 0
            sparse = KeyedJaggedTensor(sparse.keys, sparse.values[sparse.span("d")], lengths=lengths.view(-1))
        own = part(sparse, comm)
        if shared is not None and comm is not None:
            shared.all_held, starts, (lo, hi) = hot, tree.starts(11, MICRO_BATCHES), comm.ranks.held
            own = own.in_parts([start - starts[lo] for start in starts[lo : hi + 1]])
        out = emb(own)
        found.append(out.detach().clone())
        (out * out).sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_hot_batches_beside_shared_columns_have_the_bits_of_one_process(threads: ThreadPool, num_ranks: int) -> None:
    ranks = threads.run(phases, num_ranks=num_ranks, micro_batches=MICRO_BATCHES)
    for k, want in enumerate(phases(None)):
        assert torch.equal(bits(torch.cat([own[k] for own in ranks])), bits(want)), k


def refused(comm: Communicator) -> list[Told]:
    emb, sparse = collection(comm, Kept()), make_batch(0, 6).samples(*comm.ranks.samples(6))
    found = [told(lambda: emb.sequence(sparse)), told(lambda: hotrow.RowWiseAdagrad(emb, lr=0.1))]
    alone = KeyedJaggedTensor(("d",), sparse.values[sparse.span("d")], lengths=sparse.lengths.view(5, -1)[3])
    assert set(emb.sequence(alone)) == {"d"}, "rows of other tables travel"
    return found


def test_what_needs_whole_rows_is_refused(threads: ThreadPool) -> None:
    for sequence, optimizer in threads.run(refused, num_ranks=3, micro_batches=3):
        assert "feature 'a'" in sequence.text and "table 'wide'" in sequence.text and "0, 1, 2" in sequence.text
        assert "table 'wide'" in optimizer.text and "RowWiseAdagrad" in optimizer.text

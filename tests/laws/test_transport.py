"""A transport between threads of one process, which touches no other file; on it law 2 over ranks holds as on gloo."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.models.dlrm import DLRM
from hotrow.parallel import sharded
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import OverRanks
from hotrow.parallel.sharded import ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.run.build import Parts
from hotrow.run.meters import StepClock
from hotrow.run.schedule import Schedule
from hotrow.run.trainer import train_step
from hotrow.tables import TableConfig
from rank_threads import ThreadPool

NAMES, ROWS, SAMPLES = ("a", "b"), 40, 24


def trained(comm: Communicator) -> dict[str, Tensor]:
    """Takes whole steps; returns losses, weights and rows."""
    tables = [TableConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=(n,)) for n in NAMES]
    emb = EmbeddingCollection(tables, memory=ShardedMemory(comm=comm), seed=1)
    drawn = torch.Generator().manual_seed(2)
    model = DLRM(num_dense=3, num_features=2, embedding_dim=4, bottom_mlp=[8], top_mlp=[8], generator=drawn)
    dense, rows = torch.optim.SGD(model.parameters(), 0.5), hotrow.RowWiseAdagrad(emb, 0.5, nonfinite=None)
    length = sum(weight.numel() for weight in model.parameters())
    exchange = OverRanks(comm, lambda: None, length=length) if comm.size > 1 else None
    parts = Parts(emb, model, dense, rows, Schedule([]), ranks=comm.ranks, exchange=exchange)
    own, found = slice(*comm.ranks.samples(SAMPLES)), {}
    for step in range(3):
        ids = torch.randint(0, ROWS, (SAMPLES, len(NAMES)), generator=drawn)
        inputs, labels = torch.randn(SAMPLES, 3, generator=drawn), torch.rand(SAMPLES, generator=drawn).round()
        sparse = KeyedJaggedTensor.from_dense(NAMES, ids[own])
        batch = Batch(inputs[own], sparse, labels[own], of_samples=SAMPLES)
        found[f"loss {step}"] = train_step(parts, batch, step, StepClock())
    return found | model.state_dict() | {name: emb.rows(name).read(slice(0, ROWS)) for name in NAMES}


@pytest.mark.parametrize("native", [True, False])
def test_steps_over_threads_have_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(ops, "_native", lambda: None)
    (truth,) = ThreadPool().run(trained, num_ranks=1, micro_batches=6)
    for num_ranks in (2, 3):
        for found in ThreadPool().run(trained, num_ranks=num_ranks, micro_batches=6):
            assert found.keys() == truth.keys()
            for name, want in truth.items():
                assert torch.equal(found[name].view(torch.int32), want.view(torch.int32)), (num_ranks, name)


def fails_odd(comm: Communicator) -> list[str]:
    """Returns what waiting twice for an exchange raises whose error has a text that UTF-8 cannot hold."""

    def messages() -> list[Tensor]:
        if comm.rank == 1:
            raise ValueError("no folder \udcff")
        return [torch.arange(3)] * comm.size

    arriving, found = comm.begin(messages, purpose="test"), []
    for _ in range(2):
        with pytest.raises(ValueError, match="rank 1: no folder ") as raised:
            arriving.wait()
        found.append(str(raised.value))
    return found


def test_an_odd_text_of_an_error_is_raised_at_every_wait() -> None:
    for told in ThreadPool().run(fails_odd, num_ranks=2, micro_batches=2):
        assert told[0] == told[1]


def fails_in_prepare(comm: Communicator) -> list[Any]:
    """The gradients of rank 1 for pooled vectors cannot be made once; then steps are exact again."""
    tables = [TableConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=(n,)) for n in NAMES]
    shards = {"b": Shard(kind="table", owner=0, exchange="pooled")}
    emb = EmbeddingCollection(tables, memory=ShardedMemory(comm=comm, shards=shards), seed=1)
    optimizer, sparse = hotrow.SGD(emb, 0.5, nonfinite=None), KeyedJaggedTensor(NAMES, torch.arange(12))
    shared = emb.placement.find(sharded.Sharded)
    make, found = shared._pooled._gradients_for, []

    def none(waiting: Any) -> list[Tensor]:
        raise MemoryError("no memory")

    for failing in (True, False):
        shared._pooled._gradients_for = none if failing and comm.rank == 1 else make  # type: ignore[method-assign]
        optimizer.zero_grad()
        emb(sparse).sum().backward()
        try:
            optimizer.prepare()()
            optimizer.step()
        except RuntimeError as error:
            found.append(str(error))
    start = EmbeddingCollection(tables, seed=1).weights
    return [*found, *(float((emb.rows(n).read(slice(0, ROWS)) - start[n]).min()) for n in NAMES)]


def test_after_an_error_in_what_a_step_needs_steps_are_exact() -> None:
    """Both ranks look up the same rows, so each gets a gradient of 1 twice: once 0.5 * 2 is taken off."""
    for failed, *changes in ThreadPool().run(fails_in_prepare, num_ranks=2, micro_batches=2):
        assert "MemoryError: no memory" in failed and changes == pytest.approx([-1.0, -1.0], rel=1e-6)


def two_collections(comm: Communicator) -> list[float]:
    """Two communicators of the same ranks, whose exchanges have the same numbers and travel at the same time."""
    other = Communicator(comm.ranks, comm.transport, lane=1)
    tables = [TableConfig(name=n, num_embeddings=ROWS, embedding_dim=4, feature_names=(n,)) for n in NAMES]
    pooled = {"b": Shard(kind="table", owner=0, exchange="pooled")}
    one = EmbeddingCollection(tables[:1], memory=ShardedMemory(comm=comm, shards={"a": Shard(prefix=20)}), seed=1)
    two = EmbeddingCollection(tables[1:], memory=ShardedMemory(comm=other, shards=pooled), seed=1)
    optimizer = hotrow.SGD([one, two], 0.5, nonfinite=None)
    other.gather_number(1, purpose="ahead")
    for emb, name in ((one, "a"), (two, "b")):
        emb(KeyedJaggedTensor((name,), torch.arange(6) + 10 * comm.rank)).sum().backward()
    optimizer.prepare()
    optimizer.step()
    changes = []
    for emb, name in ((one, "a"), (two, "b")):
        start = EmbeddingCollection(emb.tables, seed=1).weights[name]
        changes.append(float((emb.rows(name).read(slice(0, ROWS)) - start).sum()))
    return changes


def test_two_collections_over_the_same_ranks_do_not_take_each_others_messages() -> None:
    for changes in ThreadPool().run(two_collections, num_ranks=2, micro_batches=2):
        assert changes == pytest.approx([-24.0, -24.0], rel=1e-5)  # 12 rows of 4 numbers, 0.5 each


def go_apart(comm: Communicator, more: int) -> str:
    """Rank 1 takes part in fewer exchanges, or in others, and finds that out at the first one."""
    table = TableConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=("t",))
    emb = EmbeddingCollection([table], memory=ShardedMemory(comm=comm))
    with pytest.raises(RuntimeError) as raised:
        for _ in range(more * (comm.rank == 0)):
            comm.gather(torch.ones(2), purpose="more")
        emb.rows("t").read(slice(0, 3)) if comm.rank == 0 else emb(KeyedJaggedTensor(("t",), torch.zeros(3).long()))
    return str(raised.value)


@pytest.mark.parametrize("more", [0, 1])
def test_ranks_at_different_exchanges_are_told(more: int) -> None:
    for rank, told in enumerate(ThreadPool().run(go_apart, more, num_ranks=2, micro_batches=2)):
        assert told.startswith(f"rank {rank} is at exchange ") and f"rank {1 - rank} at exchange " in told


def count(comm: Communicator) -> tuple[dict[str, int], dict[str, int], int]:
    fewer = comm.with_micro_batches(2)
    fewer.gather(torch.zeros(5), purpose="more")
    comm.gather(torch.zeros(5), purpose="less")
    return comm.counts.sent_bytes, fewer.counts.sent_bytes, comm.counts.num_exchanges


def test_communicators_of_the_same_ranks_count_together() -> None:
    for own, fewer, num_exchanges in ThreadPool().run(count, num_ranks=2, micro_batches=4):
        assert own == fewer == {"counts": 32, "ids": 0, "more": 20, "less": 20}
        assert num_exchanges == 2

"""Law 2 for ranks that are not alike, some in memory and others in files; and what they send is what was counted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_worlds import TABLES, Case, check_bits, memory_of, shards_of, train, truth_of

import hotrow
from hotrow.config.load import make_config
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.sharded import ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.setup.shards import wire_of
from hotrow.tables import TableConfig
from rank_threads import ThreadPool

pytestmark = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")


@pytest.fixture
def pool() -> ThreadPool:
    return ThreadPool()


def train_unlike(comm: Communicator, case: Case) -> dict[str, Any]:
    memory = memory_of(case) if comm.rank == 1 else None
    shared = ShardedMemory(comm=comm, shards=shards_of(comm.size), below=memory)
    return train(EmbeddingCollection(TABLES, memory=shared, seed=3), case, comm)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.filterwarnings("ignore:3 batches wait")
def test_one_rank_in_tiers_and_others_in_memory(pool: ThreadPool, tmp_path: Path, depth: int) -> None:
    """Whether batches are announced is one question for all: ranks in memory do, if one is in tiers."""
    case = Case("adam", 4, str(tmp_path), depth)
    found = pool.run(train_unlike, case, num_ranks=3, micro_batches=4)
    check_bits(found, truth_of("adam", 4))
    assert "evicted" in found[1] and found[1]["evicted"] > 0 == found[0]["evicted"]
    assert found[1].get("foreseen", 0) == (10 if depth else 0)


ROWS, BATCH, SAMPLES, STEPS = 20_000, 1200, 120_000, 25
TABLE = TableConfig(name="item", num_embeddings=ROWS, embedding_dim=16, feature_names=("item",))


def counts() -> np.ndarray:
    chance = np.arange(1, ROWS + 1, dtype=np.float64) ** -1.05
    found = np.floor(chance / chance.sum() * SAMPLES).astype(np.uint32)
    found[0] += SAMPLES - int(found.sum())
    return found


def send(comm: Communicator, shard: Shard) -> int:
    """Returns the bytes of rows or vectors, their numbers and gradients that this rank sends in STEPS steps."""
    memory = ShardedMemory(comm=comm, shards={"item": shard})
    emb = EmbeddingCollection([TABLE], memory=memory, seed=1)
    optimizer = hotrow.SGD(emb, lr=0.1)
    rng, cumulated = np.random.default_rng(2), counts().cumsum() / SAMPLES
    before = dict(comm.counts.sent_bytes)
    for _ in range(STEPS):
        first, end = comm.ranks.samples(BATCH)
        ids = torch.from_numpy(np.searchsorted(cumulated, rng.random(BATCH), "right"))[first:end]
        emb(ids[:, None]).sum().backward()
        optimizer.step()
    purposes = ("ids", "rows", "gradients", "replicated", "pooled", "pooled_gradients")
    return sum(comm.counts.sent_bytes.get(name, 0) - before.get(name, 0) for name in purposes)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("shard", "field"),
    [
        (Shard(), "split_bytes"),
        (Shard(prefix=ROWS), "replicated_bytes"),
        (Shard(kind="table", owner=1, exchange="pooled"), "pooled_bytes"),
    ],
    ids=["split", "replicated", "pooled"],
)
def test_bytes_counted_are_those_sent(pool: ThreadPool, num_ranks: int, shard: Shard, field: str) -> None:
    """By which the plan decides: predicted from access counts, and counted as they are sent."""
    dataset: Any = SimpleNamespace(
        has_counts=True, counts=lambda name: counts(), split=lambda name: SimpleNamespace(num_rows=SAMPLES)
    )
    wire = wire_of(make_config({"data": "d", "train": {"batch_size": BATCH}}), TABLE, dataset, num_ranks)
    sent = sum(pool.run(send, shard, num_ranks=num_ranks, micro_batches=num_ranks)) / STEPS
    assert sent == pytest.approx(getattr(wire, field), rel=0.03)

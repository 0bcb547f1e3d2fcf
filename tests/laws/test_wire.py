"""What a step of ranks is predicted to send is what a real step sends: the messages, in their order, to the byte.

Each rank looks up every row of each table, so that the expected numbers of rows are whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_transport import ThreadPool

import hotrow
from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.costs.wire import share_of
from hotrow.costs.work import TableWork, Work
from hotrow.embedding import EmbeddingCollection
from hotrow.models.dlrm import DLRM
from hotrow.parallel.communicator import Arriving, Communicator
from hotrow.parallel.dense import OverRanks
from hotrow.parallel.messages import WireDtype
from hotrow.parallel.sharded import ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.run.build import Parts
from hotrow.run.meters import StepClock
from hotrow.run.schedule import Schedule
from hotrow.run.trainer import train_step
from hotrow.tables import TableConfig

MAX_MEETINGS = 4
"""Of a step, however many tables there are: ids; rows and vectors; sums and slices; totals."""
DIM, OF_RANK, MICRO_BATCHES = 8, 48, 4
ROWS = {"rows": 40, "half": 24, "all": 48, "bags": 12}
DTYPES: dict[str, Any] = {"half": "float16"}
TABLES = [
    TableConfig(
        name=name, num_embeddings=n, embedding_dim=DIM, feature_names=(name,), dtype=DTYPES.get(name, "float32")
    )
    for name, n in ROWS.items()
]
OWNED = Shard(kind="table", owner=1, exchange="pooled")
SHARDS = {
    "every way": {"rows": Shard(), "half": Shard(), "all": Shard(prefix=48), "bags": OWNED},
    "pooled": dict.fromkeys(ROWS, OWNED),
    "columns": {**dict.fromkeys(ROWS, Shard(kind="table", owner=(1, 0), exchange="pooled")), "rows": Shard()},
    "rows": {"rows": Shard(), "half": Shard(), "all": Shard(), "bags": Shard(kind="table", owner=1)},
}


@dataclass
class Noting(Communicator):
    """Notes what a rank begins to send, and what it waits for, by purpose."""

    noted: list[tuple[str, str]] = field(default_factory=list)

    def begin(self, *arguments: Any, purpose: str, **options: Any) -> Arriving:
        self.noted.append(("send", purpose))
        arriving, wait = super().begin(*arguments, purpose=purpose, **options), Arriving.wait

        def noted() -> list[torch.Tensor]:
            if arriving._opened or arriving._in_flight:  # the first time
                self.noted.append(("wait", purpose))
            return wait(arriving)

        arriving.wait = noted  # type: ignore[method-assign]
        return arriving

    def gather_number(self, number: int, *, purpose: str) -> list[int]:
        self.noted.append(("send", "counts"))
        return super().gather_number(number, purpose=purpose)


def stepped(
    plain: Communicator, shards: Mapping[str, Shard], wire_dtype: WireDtype
) -> tuple[list[tuple[str, str]], dict[str, int], int, int, int]:
    """Takes a step; returns what was noted, bytes by purpose, how many weights and tensors the model has, and how often
    ranks met."""
    comm = Noting(plain.ranks, plain.transport)
    memory = ShardedMemory(comm=comm, shards=shards, wire_dtype=wire_dtype)
    emb, drawn = EmbeddingCollection(TABLES, memory=memory, seed=1), torch.Generator().manual_seed(2)
    model = DLRM(num_dense=3, num_features=4, embedding_dim=DIM, bottom_mlp=[8], top_mlp=[8], generator=drawn)
    weights = [*model.parameters()]
    length = sum(weight.numel() for weight in weights)
    exchange = OverRanks(comm, lambda: None, length=length)
    sgd, rows = torch.optim.SGD(weights, 0.1), hotrow.SGD(emb, 0.1, nonfinite=None)
    parts = Parts(emb, model, sgd, rows, Schedule([]), ranks=comm.ranks, exchange=exchange)
    first, end = comm.ranks.samples(OF_RANK * MICRO_BATCHES)
    ids = torch.arange(end - first)[:, None] % torch.tensor([*ROWS.values()])
    batch = Batch(
        torch.randn(end - first, 3),
        KeyedJaggedTensor.from_dense(tuple(ROWS), ids),
        torch.ones(end - first),
        of_samples=OF_RANK * MICRO_BATCHES,
    )
    comm.noted.clear()
    comm.counts.sent_bytes.clear()
    before = comm.counts.num_meetings
    train_step(parts, batch, 0, StepClock())
    return comm.noted, comm.counts.sent_bytes, length, len(weights), comm.counts.num_meetings - before


def work_of(length: int, num_tensors: int) -> Work:
    """Returns the work of the step, in which every row is as good as sure to be looked up."""
    batch_size = OF_RANK * MICRO_BATCHES
    tables = tuple(
        TableWork(
            table=table,
            lookups=batch_size,
            rows=table.num_embeddings,
            record_bytes=4 * DIM,
            rates=((1e4, table.num_embeddings, 1e4),),
        )
        for table in TABLES
    )
    return Work(
        batch_size=batch_size,
        num_dense=3,
        products=(),
        tables=tables,
        optimizer="sgd",
        dense_optimizer="sgd",
        precision="fp32",
        threads=1,
        num_tensors=num_tensors,
        num_weights=length,
    )


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_a_step_sends_what_is_predicted_in_that_order(
    shards: dict[str, Shard], num_ranks: int, wire_dtype: WireDtype
) -> None:
    found = ThreadPool().run(stepped, shards, wire_dtype, num_ranks=num_ranks, micro_batches=MICRO_BATCHES)
    work = work_of(*found[0][2:4])
    _, predicted = share_of(work, work, shards, num_ranks=num_ranks, micro_batches=MICRO_BATCHES, wire_dtype=wire_dtype)
    sent = sum((Counter(own) for _, own, *_ in found), Counter[str]())
    wanted = {purpose: num_ranks * num_bytes for purpose, num_bytes in predicted.by_purpose.items() if num_bytes}
    assert {purpose: num_bytes for purpose, num_bytes in sent.items() if num_bytes} == pytest.approx(wanted, rel=1e-9)
    names = {"slices": "dense", "totals": "dense"}
    order = [(event.kind, names.get(event.name, event.name)) for event in predicted.events if event.kind != "work"]
    assert all(noted == order for noted, *_ in found)
    assert all(meetings <= MAX_MEETINGS for *_, meetings in found)

"""One rank of a model that several processes train: what it trains, and hotrow's step on it.

Each rank trains its part of every global batch. torchrec's is in rank_peers.py, processes and pipes in rank_worker.py,
cells in ranks.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.step_peers import dense_sgd, make_model
from benchmarks.step_shapes import SHAPES, StepShape, make_setting
from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.parallel.communicator import Arriving, Communicator, Messages
from hotrow.parallel.dense import DenseExchange, OverRanks
from hotrow.parallel.ranks import Ranks
from hotrow.parallel.sharded import ShardedMemory
from hotrow.parallel.shards import Shard
from hotrow.parallel.transport import Transport
from hotrow.run.build import Parts
from hotrow.run.meters import StepClock
from hotrow.run.micro import cut
from hotrow.run.schedule import Schedule
from hotrow.run.trainer import train_step
from hotrow.setup.shards import pooled_owners, shard_of
from hotrow.setup.wire import Distinct
from hotrow.setup.wire import Wire as TableWire
from hotrow.tables import TableConfig

SEED = 1
MPI = "mpi"
"""The address of ranks that mpiexec started."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """What the ranks of a group train together."""

    shape: str
    num_ranks: int
    batch_size: int
    """Samples of a global batch."""
    threads: int = 1
    """Of each rank."""
    small: bool = False
    """Short tables and narrow layers, to try it."""
    lr: float | None = None
    """None: the shape's."""

    def sized(self) -> StepShape:
        """Returns the shape with these sizes."""
        shape = SHAPES[self.shape].small() if self.small else SHAPES[self.shape]
        return replace(shape, batch_size=self.batch_size, lr=shape.lr if self.lr is None else self.lr)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits, and how its side shares the tables."""

    rank: int
    address: str
    """tcp://HOST:PORT, at which the ranks meet over gloo; or MPI."""
    sharding: str = "row_wise"
    """row_wise or table_wise."""
    ahead: bool = False
    """Whether the ids of the next batch are exchanged during a step; torchrec only."""
    prefix: float = 0.0
    """Share of each table's rows that every rank holds; hotrow only."""
    pooled: Literal["none", "planned", "all"] = "none"
    """Tables that one rank each holds and pools: those for which hotrow's planner counts fewer bytes so, or all but
    those of which every rank has every row; hotrow only."""


class Rank(Protocol):
    """One rank of a side."""

    def train(self, batch: int) -> float:
        """Trains on this rank's part of a global batch; returns the loss of the whole batch, or of the part."""


def part_of(batch: Batch, ranks: Ranks) -> Batch:
    """Returns the samples of a global batch that a rank trains."""
    first, end = ranks.samples(len(batch))
    return Batch(batch.dense[first:end], batch.sparse.samples(first, end), batch.label[first:end], len(batch))


def tables_of(shape: StepShape) -> tuple[TableConfig, ...]:
    """Returns the tables, one for each feature."""
    names = [f"C{i + 1}" for i in range(len(shape.rows))]
    return tuple(
        TableConfig(name=name, num_embeddings=n, embedding_dim=shape.embedding_dim, feature_names=(name,))
        for name, n in zip(names, shape.rows, strict=True)
    )


def owners(num_tables: int, num_ranks: int) -> list[int]:
    """Returns the rank that owns each table, if tables are not cut. Neighbours have one owner: torchrec returns pooled
    vectors in the order of the owners, which is then that of the tables."""
    return [t * num_ranks // num_tables for t in range(num_tables)]


# ---- hotrow


@dataclass
class Wire(Communicator):
    """A communicator whose exchanges can be heard again without the wire.

    replay: answer exchanges with what `heard` noted of the same batch; messages are made all the same, and dropped.
    """

    heard: dict[int, list[Any]] = field(default_factory=dict)
    """By batch, what each exchange of its step returned; kept while `batch` is not None."""
    batch: int | None = None
    _answers: Iterator[Any] | None = None

    def listen(self, batch: int) -> None:
        """Notes the exchanges of the next step, on this batch."""
        self.batch, self.heard[batch] = batch, []

    def replay(self, batch: int) -> None:
        """Answers the exchanges of the next step from what was noted."""
        self._answers = iter(self.heard[batch])

    def live(self) -> None:
        """Exchanges go over the wire again, and are not noted."""
        assert self._answers is None or next(self._answers, None) is None, "a step has fewer exchanges than it had"
        self.batch = self._answers = None

    def begin(self, parts: Messages, **options: Any) -> Arriving:
        """See Communicator."""
        if self._answers is not None:
            if callable(parts):
                parts()
            return Arriving(self.counts, next(self._answers))
        arriving = super().begin(parts, **options)
        if self.batch is not None:
            self.heard[self.batch].append([part.clone() for part in arriving.wait()])
        return arriving

    def gather_number(self, number: int, *, purpose: str) -> list[int]:
        """See Communicator."""
        if self._answers is not None:
            answer: list[int] = next(self._answers)
            return answer
        found = super().gather_number(number, purpose=purpose)
        if self.batch is not None:
            self.heard[self.batch].append(found)
        return found


class OurRank:
    """hotrow's training step on this rank."""

    def __init__(self, work: RankWork, seat: Seat, transport: Transport) -> None:
        setting = make_setting(work.sized())
        shape = self.shape = setting.shape
        self.comm = Wire(Ranks(seat.rank, work.num_ranks, work.num_ranks), transport)
        self.tables = tables_of(shape)
        self.shards = shards_of(self.tables, seat, work.num_ranks)
        if seat.pooled == "planned":
            self.shards |= pooled_shards(self.tables, setting.batches[0], work.num_ranks)
        elif seat.pooled == "all":
            self.shards = all_pooled(self.tables, self.shards, work.num_ranks)
        memory = ShardedMemory(comm=self.comm, shards=self.shards)
        emb = EmbeddingCollection(self.tables, memory=memory, seed=SEED)
        model = make_model(setting)
        sparse, dense = SGD(emb, shape.lr, nonfinite=None), dense_sgd([model], shape.lr)
        self.num_weights = sum(weight.numel() for weight in model.parameters())
        ranks = self.comm.ranks
        exchange: DenseExchange = DenseExchange(ranks)
        if ranks.size > 1:
            exchange = OverRanks(self.comm, lambda: None, length=self.num_weights)
        self.parts = Parts(emb, model, dense, sparse, Schedule([dense, sparse]), ranks=ranks, exchange=exchange)
        self.batches = [part_of(batch, ranks) for batch in setting.batches]
        self.clock = StepClock()

    def train(self, batch: int) -> float:
        """Trains on this rank's part of a batch; returns the loss of the whole."""
        return float(train_step(self.parts, self.batches[batch % len(self.batches)], 0, self.clock))

    def look_up_and_update(self, batch: int) -> None:
        """Does the tables' part of a step alone: each looked up vector is its own gradient, times 1e-6."""
        own = cut(self.batches[batch % len(self.batches)], self.comm.ranks)
        pooled = self.parts.embedding(own.sparse)
        pooled.backward(pooled.detach() * 1e-6)
        self.parts.sparse_optimizer.step()

    def least_bytes(self, batch: int) -> int:
        """Returns what this rank must receive or send at least in a step on `batch`: every distinct row that it lacks
        down, a gradient up for each, and its share of the dense gradients, 2 (R - 1) / R of their bytes."""
        ranks = self.comm.ranks
        lacking = num_lacking(self.batches[batch % len(self.batches)], self.shards, ranks.rank, ranks.size)
        rows_bytes = lacking * (4 + 4) * self.shape.embedding_dim
        return rows_bytes + 2 * (ranks.size - 1) * 4 * self.num_weights // ranks.size


def shards_of(tables: Sequence[TableConfig], seat: Seat, num_ranks: int) -> dict[str, Shard]:
    """Returns how hotrow shares the tables."""
    found = {}
    for table, owner in zip(tables, owners(len(tables), num_ranks), strict=True):
        prefix = math.ceil(seat.prefix * table.num_embeddings)
        by_table = seat.sharding == "table_wise"
        found[table.name] = Shard(prefix=prefix, kind="table", owner=owner) if by_table else Shard(prefix=prefix)
    return found


def all_pooled(tables: Sequence[TableConfig], shards: Mapping[str, Shard], num_ranks: int) -> dict[str, Shard]:
    """Returns shards in which each table has one owner that pools; tables of which every rank has every row stay."""
    each = zip(tables, owners(len(tables), num_ranks), strict=True)
    return {
        table.name: shards[table.name]
        if shards[table.name].prefix == table.num_embeddings
        else Shard(kind="table", owner=owner, exchange="pooled")
        for table, owner in each
    }


def pooled_shards(tables: Sequence[TableConfig], batch: Batch, num_ranks: int) -> dict[str, Shard]:
    """Returns the tables that owners should hold and pool, as hotrow's planner has it for steps like `batch`."""
    parts = [part_of(batch, Ranks(rank, num_ranks, num_ranks)).sparse for rank in range(num_ranks)]

    def wire(table: TableConfig) -> TableWire:
        ids = [part.bags(table.name)[0].numpy() for part in parts]
        whole = np.concatenate(ids)
        of_one, of_all = (np.mean([len(np.unique(own)) for own in each]) for each in (ids, [whole]))
        rows = {"of_one": Distinct(float(of_one)), "of_all": Distinct(float(of_all))}
        return TableWire.of(table, len(batch), num_ranks, **rows, lookups=len(whole))

    sizes = {table.name: table.num_embeddings * table.embedding_dim for table in tables}
    owned = pooled_owners(tables, {table.name: wire(table) for table in tables}, sizes, num_ranks)
    return {name: shard_of(owners, pooled=True) for name, owners in owned.items()}


def num_lacking(batch: Batch, shards: Mapping[str, Shard], rank: int, num_ranks: int) -> int:
    """Returns how many distinct rows of a batch, over all tables, a rank does not hold."""
    return sum(
        int((~shard.held(np.unique(batch.sparse.bags(name)[0].numpy()), rank, num_ranks)).sum())
        for name, shard in shards.items()
    )


def link_bytes_per_s(num_bytes: int = 1 << 28) -> float:
    """Returns how fast rank 0 sends to rank 1, over gloo; collective, of two ranks."""
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(data, 1)
        dist.recv(data[:1], 1)
    else:
        dist.recv(data, 0)
        dist.send(data[:1], 0)
    return num_bytes / (time.perf_counter() - start)

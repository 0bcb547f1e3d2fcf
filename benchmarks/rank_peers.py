"""One rank of torchrec's DistributedModelParallel on FBGEMM's CPU kernels, over gloo, beside the rank of rank_sides.py.

Wants torchrec and fbgemm-gpu-cpu, imported when a rank is built.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.dense_cells import interact_in_torch
from benchmarks.rank_sides import SEED, RankWork, Seat, owners, part_of, tables_of
from benchmarks.step_peers import Parts, dense_sgd, make_model, plain_mlp
from benchmarks.step_shapes import Setting, StepShape, make_setting
from hotrow.parallel.ranks import Ranks
from hotrow.placement.base import InitialRows


class _Dense(nn.Module):
    """The layers above the tables. Rows travel while the bottom MLP computes."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        start = Parts(make_model(setting), [])
        self.bottom = plain_mlp(start.layers("bottom"), last_relu=True)
        self.top = plain_mlp(start.layers("top"), last_relu=False)
        self.sizes = len(setting.shape.rows), setting.shape.embedding_dim
        self.interact = interact_in_torch(len(setting.shape.rows))

    def forward(self, dense: Tensor, awaited: Any, label: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bottom(dense)
        logits = self.top(self.interact(x, awaited.values().view(-1, *self.sizes))).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, label)
        return loss, loss.detach()


class _Net(nn.Module):
    """torchrec's collection under a plain DLRM; of a batch: the loss, and the loss without gradient."""

    def __init__(self, tables: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.tables, self.layers = tables, layers

    def forward(self, batch: Any) -> Any:
        return self.layers(batch.dense, self.tables(batch.sparse), batch.label)


class TorchrecRank:
    """Sharded tables with SGD fused into backward, DDP for the rest."""

    def __init__(self, work: RankWork, seat: Seat) -> None:
        setting = make_setting(work.sized())
        shape, ranks = setting.shape, Ranks(seat.rank, work.num_ranks, work.num_ranks)
        with redirect_stdout(sys.stderr):
            parallel = importlib.import_module("torchrec.distributed.model_parallel")
            pipelines = importlib.import_module("torchrec.distributed.train_pipeline")
        device = torch.device("cpu")
        tables, plan = _sharded(shape, seat.sharding, work.num_ranks)
        layers = _Dense(setting)
        self.net = parallel.DistributedModelParallel(_Net(tables, layers), device=device, plan=plan)
        self._copy_rows(shape)
        self.dense = dense_sgd([layers], shape.lr)
        self.inputs = _inputs(setting, ranks)
        self.pipeline = pipelines.TrainPipelineSparseDist(self.net, self.dense, device) if seat.ahead else None
        self.endless: Iterator[Any] = cycle(self.inputs)

    @torch.no_grad()
    def _copy_rows(self, shape: StepShape) -> None:
        """Gives each shard the rows that hotrow's tables start with."""
        state = self.net.state_dict()
        for table in tables_of(shape):
            (name,) = (name for name in state if f".{table.name}.weight" in name)
            rows = InitialRows.of(table, SEED, ())
            for shard in state[name].local_shards():
                first, num = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                whole = torch.Size((table.num_embeddings, table.embedding_dim))
                shard.tensor.copy_(rows.read("weight", slice(first, first + num), whole))

    def train(self, batch: int) -> float:
        """Trains on this rank's part of a batch; returns the part's loss. A pipeline takes batches in their order."""
        if self.pipeline is not None:
            return float(self.pipeline.progress(self.endless))
        loss, told = self.net(self.inputs[batch % len(self.inputs)])
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()
        return float(told)


def _sharded(shape: StepShape, sharding: str, num_ranks: int) -> tuple[nn.Module, Any]:
    """Returns torchrec's collection, without memory yet, and the plan that shares it among ranks."""
    with redirect_stdout(sys.stderr):
        torchrec = importlib.import_module("torchrec")
        plans = importlib.import_module("torchrec.distributed.sharding_plan")
        types = importlib.import_module("torchrec.distributed.types")
        in_backward = importlib.import_module("torchrec.optim.apply_optimizer_in_backward")
    names = [table.name for table in tables_of(shape)]
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=n, embedding_dim=shape.embedding_dim, feature_names=[name]
        )
        for name, n in zip(names, shape.rows, strict=True)
    ]
    tables = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    in_backward.apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": shape.lr})
    ways = {
        name: plans.table_wise(rank=owner) if sharding == "table_wise" else plans.row_wise()
        for name, owner in zip(names, owners(len(names), num_ranks), strict=True)
    }
    plan = plans.construct_module_sharding_plan(
        tables, ways, local_size=num_ranks, world_size=num_ranks, device_type="cpu"
    )
    return tables, types.ShardingPlan({"tables": plan})


def _inputs(setting: Setting, ranks: Ranks) -> Sequence[Any]:
    """Returns this rank's part of each batch as torchrec takes it."""
    torchrec, streamable = importlib.import_module("torchrec"), importlib.import_module("torchrec.streamable")

    class Inputs(streamable.Pipelineable):  # type: ignore[misc, name-defined]  # torchrec asks for its own base class
        def __init__(self, dense: Tensor, sparse: Any, label: Tensor) -> None:
            self.dense, self.sparse, self.label = dense, sparse, label

        def to(self, *_: Any, **__: Any) -> Inputs:
            return self

        def record_stream(self, stream: Any) -> None: ...

        def pin_memory(self) -> Inputs:
            return self

    names = [*setting.batches[0].sparse.keys]
    found = []
    for own in (part_of(batch, ranks) for batch in setting.batches):
        lengths = torch.full((len(names) * len(own),), setting.shape.lookups, dtype=torch.int32)
        found.append(
            Inputs(own.dense, torchrec.KeyedJaggedTensor(names, own.sparse.values, lengths=lengths), own.label)
        )
    return found

"""Where tables lie when a GPU trains: hotrow's ways and others' to run one DLRM, in one process, interleaved.

    python -m benchmarks.gpu [--shapes kaggle terabyte] [--hbm 10% 512MiB 4GiB 16GiB] [--zipf EXPONENT]
                             [--batch-sizes 1024 2048 4096] [--modes NAME ...] [--scale SHARE] [--stretches 7]
                             [--threads N] [--folder DIR] [--json] [--quick]
    python -m benchmarks.gpu --hbm 10% --zipf 1.05 --modes cached all_in_hbm    # promised: 70 % of all_in_hbm

(Without a GPU every cell is printed as not measured.)
Shapes are the 26 tables and the MLPs of Criteo Kaggle (dim 16) and Terabyte (dim 64), one id per feature and sample,
drawn by the tables' skews, or `--zipf` for all, each by itself; SGD on tables and MLPs; the MLPs are always on the GPU.
They are torch's in the modes of others, and hotrow's model in its own, in a CUDA graph as in a run. `--hbm` caps what
rows take of device memory, in bytes or as a share of the rows; what crosses to the hybrids' MLPs and back goes through
pinned memory:
  torch_hybrid   nn.EmbeddingBag(sparse=True) and torch.optim.SGD on the CPU; pooled rows and their gradients cross
  torch_bags     the same with the bags on the GPU, whatever the cap
  torch_graph    one table for all on the GPU, whatever the cap, and the whole step in a CUDA graph; rows by atomic sums
  torch_sorted   the same, but rows are summed in a stated order, so that steps repeat to the bit
  fbgemm         FBGEMM's SplitTableBatchedEmbeddingBags in managed memory with a cache of the cap on the GPU
  our_hybrid     hotrow's tables in DRAM, its kernels on the CPU; pooled rows and their gradients cross
  fae            as published: batches all hot, whose rows have copies on the GPU, and batches all cold as our_hybrid,
                 half of the cold, half of the hot, and again; four swaps of the hot rows a stretch
  cached         hotrow's tables in DRAM, slots on the GPU, filled by look-ahead
  cached_turns   the same with the batches of fae in their order
  cached_tiers   as cached, with 40 % of the rows' bytes in DRAM and the rest in files in `--folder`
  all_in_hbm     slots for every row, whatever the cap
Every mode has its own tables in DRAM; those of more than 1,000 rows keep the share of their rows that fits, which is
printed. Before anything is timed each mode trains the same hot and cold batches, and the losses are compared. Then
stretches of the same samples alternate; printed, to stderr, are samples per second, swaps included, the ratio to
torch_hybrid and that to all_in_hbm, median and range over the stretches. A stretch is shorter than an epoch, which has
as many swaps: fae is printed without their seconds too. All runs in a fresh process. `--quick --device cpu` tries the
script in Triton's interpreter and measures nothing of worth.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hotrow
from benchmarks import bench
from benchmarks.hot_lab import Link
from benchmarks.markdown import held
from benchmarks.results import end_on_signals
from benchmarks.step_peers import plain_mlp
from benchmarks.synthetic_config import SyntheticTable, criteo_kaggle, criteo_terabyte
from hotrow.base.files import parse_bytes
from hotrow.base.machine import available_memory_bytes
from hotrow.hot.hot_set import SMALL_TABLE_BYTES, HotRows, HotSet, check_budget, is_small
from hotrow.hot.turns import STEP_BYTES, HotCopies
from hotrow.models.dlrm import DLRM
from hotrow.placement.budget import MAP_BYTES
from hotrow.run.graph import DenseGraph, on_cuda

NUM_DENSE, DEPTH, LR, SEED = 13, 4, 0.05, 1
MEMORY_SHARE = 0.6
"""Of the memory this process may use, for tables."""
PROMISED, MIN_OF_ALL = ("10%", 1.05), 0.7
"""With so many of the rows in slots and that skew, `cached` is to reach this share of the speed of `all_in_hbm`."""
DRAM_SHARE = 0.4
"""A share of the rows' bytes, for tables in tiers."""
PARTS = 2
"""Turns of each class in a stretch: half of it at a time, the rate with which FAE begins."""


class Shape(NamedTuple):
    """A model and its tables."""

    make: Any
    dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]


SHAPES = {  # of FAE's paper
    "kaggle": Shape(criteo_kaggle, 16, (512, 256, 64), (512, 256)),
    "terabyte": Shape(criteo_terabyte, 64, (512, 256), (512, 512, 256)),
}


class Turn(NamedTuple):
    """Batches of one class; mixed ones are cold."""

    hot: bool
    batches: list[hotrow.Batch]


Work = Sequence[Turn]


class _Across(torch.autograd.Function):
    """Pooled rows to a device through pinned memory, and their gradients back; the host waits for gradients alone."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, device: torch.device) -> Tensor:
        return _staged(pooled, device).to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _staged(gradients[0], gradients[0].device), None


def _staged(values: Tensor, device: torch.device) -> Tensor:
    """Copied into DRAM from which `device` reads by itself."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=device.type == "cuda").copy_(values)


def across(pooled: Tensor, device: torch.device) -> Tensor:
    """`pooled` on the device; itself where it lies there."""
    return pooled if pooled.device.type == device.type == "cuda" else _Across.apply(pooled, device)


class Side:
    """A way to run the model: tables somewhere, `self.model` on the device."""

    in_turns = False
    """Whether it is timed on hot and cold batches."""
    graph: DenseGraph | None = None
    """Replays the model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = copy.deepcopy(model).to(device), device
        self.dense_optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def begin(self, *, hot: bool) -> None:
        """A turn of such batches."""

    def batches(self, batches: list[hotrow.Batch]) -> Iterable[hotrow.Batch]:
        """As the loop is given them."""
        return batches

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """[B, F * D] on the device."""
        raise NotImplementedError

    def step(self) -> None:
        """Of the tables' optimizer."""
        raise NotImplementedError

    def loss_of(self, batch: hotrow.Batch, rows: Tensor) -> Tensor:
        """Returns the loss of a batch with these pooled rows."""
        dense, label = batch.dense.to(self.device), batch.label.to(self.device)
        return nn.functional.binary_cross_entropy_with_logits(self.model(dense, rows), label)

    def take_step(self, batch: hotrow.Batch) -> Tensor:
        """Returns the loss."""
        self.dense_optimizer.zero_grad()
        rows = self.pooled(batch)
        loss = None if self.graph is None else self.graph.backward(batch, rows, self.loss_of)
        if loss is None:
            loss = self.loss_of(batch, rows)
            loss.backward()
        self.dense_optimizer.step()
        self.step()
        return loss.detach().clone()  # the next replay overwrites it

    def train(self, work: Work) -> tuple[float, list[float]]:
        """Seconds for these steps, and their losses, which are read when the time is taken."""
        losses: list[Tensor] = []
        started = time.perf_counter()
        for turn in work:
            self.begin(hot=turn.hot)
            losses += [self.take_step(batch) for batch in self.batches(turn.batches)]
        self.begin(hot=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started, [float(loss) for loss in losses]

    def facts(self) -> dict[str, Any]:
        """What else is worth printing."""
        return {}

    def close(self) -> None:
        """Removes what lies outside memory."""


class Plain(nn.Module):
    """A DLRM of torch's own layers, with the weights of ours."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bottom = plain_mlp(model.bottom.layers, last_relu=True)
        self.top = plain_mlp(model.top.layers, last_relu=False)
        n = model.num_features + 1
        i, j = torch.tril_indices(n, n, -1)
        self.register_buffer("pairs", i * n + j)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """[B], the logits."""
        x = self.bottom(dense)
        t = torch.cat([x[:, None], pooled.view(len(x), -1, x.shape[1])], dim=1)
        products = torch.bmm(t, t.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        found: Tensor = self.top(torch.cat([x, products], dim=1))
        return found.squeeze(1)


class TorchHybrid(Side):
    """torch's tables on the CPU."""

    def __init__(
        self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection, where: str | torch.device = "cpu"
    ) -> None:
        super().__init__(Plain(model), device)
        self.where = where
        self.bags = [
            nn.EmbeddingBag.from_pretrained(emb.float32(t.name).to(where), freeze=False, mode="sum", sparse=True)
            for t in emb.tables
        ]
        self.optimizer = torch.optim.SGD([bag.weight for bag in self.bags], lr=LR)

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """Side by side, then across."""
        ids = batch.sparse.values.view(len(self.bags), -1, 1).to(self.where)
        pooled = torch.cat([bag(own) for bag, own in zip(self.bags, ids, strict=True)], dim=1)
        return across(pooled, self.device)

    def step(self) -> None:
        """Of the rows that have gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchGraph(Side):
    """One table of torch's for all, on the device; there the step is captured for the batches that come first."""

    def __init__(
        self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection, *, is_sorted: bool
    ) -> None:
        super().__init__(Plain(model), device)
        self.is_sorted, rows = is_sorted, [0, *(table.num_embeddings for table in emb.tables)]
        self.table = torch.cat([emb.float32(table.name) for table in emb.tables]).to(device)
        self.firsts = torch.tensor(rows[:-1], device=device).cumsum(0)[:, None]
        self.rate = torch.full((), -LR, device=device)
        self.inputs: list[Tensor] = []
        self.replay: Any = None

    def take_step(self, batch: hotrow.Batch) -> Tensor:
        """By a replay, or launch by launch."""
        given = [batch.dense, batch.label, batch.sparse.values.view(len(self.firsts), -1)]
        if self.replay is None and self.device.type == "cuda":
            self.inputs = [own.to(self.device, copy=True) for own in given]
            self.rate.zero_()  # a capture tries the step first
            (self.loss, _), self.replay = on_cuda(lambda: (self.compute(*self.inputs), []))
            self.rate.fill_(-LR)
        if self.replay is None or given[0].shape != self.inputs[0].shape:
            return self.compute(*(own.to(self.device) for own in given))
        for own, value in zip(self.inputs, given, strict=True):
            own.copy_(value, non_blocking=True)
        self.replay()
        return self.loss.clone()

    def compute(self, dense: Tensor, label: Tensor, ids: Tensor) -> Tensor:
        """The whole step; returns the loss."""
        places, weights = (ids + self.firsts).t().flatten(), list(self.model.parameters())
        rows = self.table.index_select(0, places).view(len(dense), -1).requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, rows), label)
        *grads, of_rows = torch.autograd.grad(loss, [*weights, rows])
        with torch.no_grad():
            torch._foreach_add_(weights, torch._foreach_mul(grads, self.rate))
            change = of_rows.reshape(-1, self.table.shape[1]) * self.rate
            if self.is_sorted:
                self.table.index_put_((places,), change, accumulate=True)
            else:
                self.table.index_add_(0, places, change)
        return loss.detach()


class Fbgemm(Side):
    """FBGEMM's tables in managed memory, with a cache on the device for `share` of the rows; on the CPU in DRAM.

    Raises ImportError where it is not installed.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection, *, share: float
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__(Plain(model), device)
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device.type == "cuda":
            where = (EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.num_embeddings, table.embedding_dim, *where) for table in emb.tables],
            optimizer=EmbOptimType.EXACT_SGD, learning_rate=LR, cache_load_factor=share, device=device,
        )  # fmt: skip
        for own, table in zip(self.tables.split_embedding_weights(), emb.tables, strict=True):
            own.copy_(emb.float32(table.name))

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """By its own kernels."""
        ids = batch.sparse.values.to(self.device)
        found: Tensor = self.tables(ids, torch.arange(len(ids) + 1, device=self.device))
        return found

    def step(self) -> None:
        """Backward has updated the rows."""


class OurHybrid(Side):
    """hotrow's tables and kernels on the CPU; with a DeviceMemory on the device."""

    def __init__(self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection) -> None:
        super().__init__(model, device)
        self.graph = DenseGraph(self.model, device) if device.type == "cuda" else None  # type: ignore[arg-type]
        self.emb = emb
        self.optimizer = hotrow.SGD(emb, lr=LR, nonfinite=None)  # a look at gradients is a wait for the GPU

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """There already, or across."""
        return across(self.emb(batch.sparse), self.device)

    def step(self) -> None:
        """Of the rows that were looked up."""
        self.optimizer.step()


class Fae(OurHybrid):
    """The hot rows' copies on the device for hot turns."""

    in_turns = True

    def __init__(self, model: nn.Module, device: torch.device, emb: hotrow.EmbeddingCollection, hot: HotSet) -> None:
        super().__init__(model, device, emb)
        self.link = Link()
        self.copies = HotCopies(emb, self.optimizer, hot, device=device)

    def begin(self, *, hot: bool) -> None:
        """A swap, where the last turn was another class'."""
        self.copies.fetch() if hot else self.copies.give_back()

    def batches(self, batches: list[hotrow.Batch]) -> Iterable[hotrow.Batch]:
        """The next swap begins beside the last of them, as in a run."""
        for left, batch in zip(range(len(batches), 0, -1), batches, strict=True):
            if left < len(batches) and left.bit_count() == 1 and left <= 1 + self.copies.hot.num_bytes // STEP_BYTES:
                self.copies.begin()
            yield batch

    def pooled(self, batch: hotrow.Batch) -> Tensor:
        """Counted as it crosses."""
        row_bytes = 4 * len(batch) * self.emb.output_dim
        self.link.count(batch, row_bytes=row_bytes, hot=self.copies.live, uploads=2)
        return super().pooled(batch)

    def facts(self) -> dict[str, Any]:
        """Returns the swaps, their seconds, the share of the hot rows that one copied, and how many times fewer bytes
        crossed than in a hybrid."""
        swaps, moved = self.copies.num_copied, self.copies.copies.moved_bytes
        crossed = self.link.batch_bytes + moved
        ratio = round(self.link.hybrid_bytes / crossed, 3) if crossed else None
        share = moved / (swaps * self.copies.hot.num_bytes) if swaps else None
        return {"swaps": swaps, "sync_s": self.copies.seconds, "swapped_share": share, "hybrid_ratio": ratio}


class Cached(OurHybrid):
    """Slots on the device."""

    def batches(self, batches: list[hotrow.Batch]) -> Iterable[hotrow.Batch]:
        """With look-ahead."""
        return hotrow.lookahead(batches, self.emb, depth=DEPTH)  # type: ignore[return-value]

    def facts(self) -> dict[str, Any]:
        """Rows found on the device, since the beginning."""
        counts = self.emb.placement.counters().values()
        hits, total = (sum(own[name] for own in counts) for name in ("hit_rows", "rows"))
        return {"hits_per_row": hits / max(1, total)}

    def close(self) -> None:
        """Lets go of the tables' files, if they are in tiers."""
        self.emb.placement.close()


class CachedTurns(Cached):
    """The same, with hot and cold batches."""

    in_turns = True


PEERS = ("torch_hybrid", "torch_bags", "torch_graph", "torch_sorted", "fbgemm")
MODES = (*PEERS, "our_hybrid", "fae", "cached", "cached_turns", "cached_tiers", "all_in_hbm")


@dataclass
class Cell:
    """What is measured together."""

    shape: str
    hbm: str
    batch_size: int
    num_steps: int
    scale: float
    device: str
    num_tables: int = 26
    small_table_bytes: int = SMALL_TABLE_BYTES
    zipf: float | None = None
    """Of every table; None: the shape's own."""
    folder: str = "."
    """For rows in tiers."""

    @property
    def source(self) -> Sequence[SyntheticTable]:
        """Rows and skews."""
        tables = SHAPES[self.shape].make(1, scale=self.scale).tables[: self.num_tables]
        return tables if self.zipf is None else [replace(table, zipf=self.zipf) for table in tables]

    @property
    def row_bytes(self) -> int:
        """What rows may take of device memory."""
        if self.hbm.endswith("%"):
            return int(share_of(self.hbm) * sum(table.num_bytes for table in self.tables))
        return parse_bytes(self.hbm)

    def slot_bytes(self, mode: str) -> int:
        """`hbm` of a DeviceMemory, an eighth of which is for rows on their way; a share of the rows needs a map."""
        if mode == "all_in_hbm":
            return sum(table.num_bytes for table in self.tables) * 8 // 7 + 1024
        map_bytes = MAP_BYTES * sum(table.num_embeddings for table in self.tables)
        return (self.row_bytes + map_bytes) * 8 // 7 if self.hbm.endswith("%") else self.row_bytes

    def memory(self, mode: str) -> hotrow.DeviceMemory | None:
        """Where the rows of a mode of hotrow's lie, but for copies."""
        if mode not in ("cached", "cached_turns", "cached_tiers", "all_in_hbm"):
            return None
        dram = int(DRAM_SHARE * sum(table.num_bytes for table in self.tables))
        tiers = hotrow.Memory(dram=dram, ssd=self.folder, force=True) if mode == "cached_tiers" else None
        return hotrow.DeviceMemory(hbm=self.slot_bytes(mode), device=self.device, below=tiers)

    @property
    def tables(self) -> list[hotrow.TableConfig]:
        """One feature each."""
        dim = SHAPES[self.shape].dim
        return [
            hotrow.TableConfig(name=t.name, num_embeddings=t.num_embeddings, embedding_dim=dim, feature_names=(t.name,))
            for t in self.source
        ]

    def hot_set(self) -> HotSet:
        """The rows of the largest chance that fit the cap, and small tables whole."""
        budget, record_bytes = self.row_bytes, 4 * SHAPES[self.shape].dim
        sizes = [(table.num_embeddings, record_bytes) for table in self.source]
        check_budget(sizes, budget, self.small_table_bytes)
        chances = [first_chance(table) for table in self.source]
        low, high = -60.0, 0.0  # the least chance of a hot row, as a logarithm

        def rows(least: float) -> list[int]:
            return [
                t.num_embeddings if is_small(*size, self.small_table_bytes) else hot_rows(t, chance, least)
                for t, chance, size in zip(self.source, chances, sizes, strict=True)
            ]

        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(rows(middle)) * record_bytes <= budget else (middle, high)
        prefixes = {t.name: HotRows.first(own) for t, own in zip(self.source, rows(high), strict=True)}
        return HotSet(how="exact", rows=prefixes, record_bytes=dict.fromkeys(prefixes, record_bytes))

    def model(self) -> nn.Module:
        """The DLRM of the shape."""
        shape = SHAPES[self.shape]
        return DLRM(
            num_dense=NUM_DENSE, num_features=len(self.source), embedding_dim=shape.dim,
            bottom_mlp=shape.bottom_mlp, top_mlp=shape.top_mlp, generator=torch.Generator().manual_seed(SEED),
        )  # fmt: skip


def first_chance(table: SyntheticTable) -> float:
    """Of the table's most used row; of row r (from 0) it is (r + 1) ** zipf times smaller."""
    return float(1 / (np.arange(1, table.num_embeddings + 1, dtype=np.float64) ** -table.zipf).sum())


def hot_rows(table: SyntheticTable, chance: float, least: float) -> int:
    """How many have a chance whose logarithm is at least `least`; one at least."""
    if not table.zipf:
        return table.num_embeddings if np.log(chance) >= least else 1
    reach = (np.log(chance) - least) / table.zipf
    return int(min(table.num_embeddings, max(1.0, np.floor(np.exp(min(reach, 60.0))))))


def draw(cell: Cell, num_samples: int) -> NDArray[np.int64]:
    """Ids [F, num_samples]; rows are numbered by popularity."""
    rng = np.random.default_rng(SEED)
    found = np.empty((len(cell.source), num_samples), np.int64)
    for own, table in zip(found, cell.source, strict=True):
        reach = np.cumsum(np.arange(1, table.num_embeddings + 1, dtype=np.float64) ** -table.zipf)
        own[:] = np.searchsorted(reach, rng.random(num_samples) * reach[-1])
    return found


def make_batches(cell: Cell, ids: NDArray[np.int64]) -> list[hotrow.Batch]:
    """Of these samples in their order."""
    rng, keys = np.random.default_rng(SEED), tuple(table.name for table in cell.source)
    found = []
    for start in range(0, ids.shape[1], cell.batch_size):
        own = np.ascontiguousarray(ids[:, start : start + cell.batch_size])
        dense = torch.from_numpy(rng.standard_normal((own.shape[1], NUM_DENSE)).astype(np.float32))
        label = torch.from_numpy((rng.random(own.shape[1]) < 0.3).astype(np.float32))
        found.append(hotrow.Batch(dense, hotrow.KeyedJaggedTensor(keys, torch.from_numpy(own.reshape(-1))), label))
    return found


def turns(cell: Cell, ids: NDArray[np.int64], is_hot: NDArray[np.bool_]) -> Work:
    """These samples as cold and hot batches, a part of each class at a time."""
    cold, hot = (make_batches(cell, ids[:, own]) for own in (~is_hot, is_hot))
    found = []
    for k in range(PARTS):
        for name, batches in ((False, cold), (True, hot)):
            own = slice(k * len(batches) // PARTS, (k + 1) * len(batches) // PARTS)
            found.append(Turn(name, batches[own]))
    return [turn for turn in found if turn.batches]


def make_sides(cell: Cell, modes: Sequence[str], hot: HotSet) -> tuple[dict[str, Side], dict[str, str]]:
    """Those that can be, from the same rows and weights, and why others cannot."""
    device, model = torch.device(cell.device), cell.model()
    sides: dict[str, Side] = {}
    refused = {}
    for mode in modes:
        try:
            sides[mode] = make_side(cell, mode, hot, model, device)
        except (ValueError, MemoryError, RuntimeError, ImportError) as error:
            refused[mode] = str(error).splitlines()[0]
    return sides, refused


def make_side(cell: Cell, mode: str, hot: HotSet, model: nn.Module, device: torch.device) -> Side:
    """Measures one mode. Raises what its parts raise if they have no room or are not installed."""
    emb = hotrow.EmbeddingCollection(cell.tables, memory=cell.memory(mode), seed=SEED)
    if mode == "torch_hybrid":
        return TorchHybrid(model, device, emb)
    if mode == "torch_bags":
        return TorchHybrid(model, device, emb, device)
    if mode in ("torch_graph", "torch_sorted"):
        return TorchGraph(model, device, emb, is_sorted=mode == "torch_sorted")
    if mode == "fbgemm":
        return Fbgemm(model, device, emb, share=cell.row_bytes / sum(table.num_bytes for table in cell.tables))
    if mode == "fae":
        return Fae(model, device, emb, hot)
    return {"our_hybrid": OurHybrid, "cached_turns": CachedTurns}.get(mode, Cached)(model, device, emb)


def check_losses(sides: Mapping[str, Side], work: Work) -> None:
    """Raises ValueError where one of them trains something else; compiles kernels and warms caches, too."""
    found = {name: side.train(work)[1] for name, side in sides.items()}
    first, *others = found
    for name in others:
        if not np.allclose(found[name], found[first], rtol=1e-3):
            raise ValueError(f"{name}: losses {found[name]} are not {first}'s, {found[first]}; nothing is timed")


def measure(cell: Cell, modes: Sequence[str], *, stretches: int) -> dict[str, Any]:
    """What each mode does with the same samples. Raises ValueError where they do not train the same."""
    hot = cell.hot_set()
    sides, refused = make_sides(cell, modes, hot)
    try:
        return {**compare(cell, sides, hot, stretches=stretches), "refused": refused}
    finally:
        for side in sides.values():
            side.close()


def compare(cell: Cell, sides: Mapping[str, Side], hot: HotSet, *, stretches: int) -> dict[str, Any]:
    """As `measure`, of these."""
    ids = draw(cell, 2 * cell.num_steps * cell.batch_size)
    prefixes = np.array([hot.rows[table.name].prefix for table in cell.source])
    is_hot = (ids < prefixes[:, None]).all(0)
    first, rest = np.split(np.arange(ids.shape[1]), 2)
    check_losses(sides, turns(cell, ids[:, first], is_hot[first]))
    in_turns = turns(cell, ids[:, rest], is_hot[rest])
    mixed = [Turn(hot=False, batches=make_batches(cell, ids[:, rest]))]
    names = list(sides)

    def one_round(number: int) -> dict[str, tuple[float, float]]:
        turn, found = number % len(names), {}
        for name in [*names[turn:], *names[:turn]]:
            side = sides[name]
            before = side.facts().get("sync_s", 0.0)
            took = side.train(in_turns if side.in_turns else mixed)[0]
            found[name] = took, side.facts().get("sync_s", 0.0) - before
        return found

    rounds = bench.clean_rounds(one_round, stretches)
    seconds, sync_s = ({name: [one[name][i] for one in rounds.results] for name in names} for i in range(2))
    whole = seconds.get("all_in_hbm")
    rows = {name: figures(seconds[name], sync_s[name], seconds[names[0]], whole, len(rest)) for name in names}
    return {
        "hot_rows": hot.num_rows,
        "hot_bytes": hot.num_bytes,
        "hot_samples": float(is_hot.mean()),
        "tables_bytes": sum(table.num_bytes for table in cell.tables),
        "modes": {name: {**rows[name], **sides[name].facts()} for name in names},
        **rounds.counts(),
    }


def figures(
    seconds: list[float], sync_s: list[float], base: list[float], whole: list[float] | None, num_samples: int
) -> dict[str, Any]:
    """Over the stretches; ratios stretch by stretch: to the first mode, and to all_in_hbm where it was measured."""
    ratios = [b / a for a, b in zip(seconds, base, strict=True)]
    found: dict[str, Any] = {
        "samples_per_s": num_samples / statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    if whole is not None:
        shares = [b / a for a, b in zip(seconds, whole, strict=True)]
        found |= {"of_all_in_hbm": statistics.median(shares), "of_all_in_hbm_range": [min(shares), max(shares)]}
    if any(sync_s):
        without = [b / (a - s) for a, s, b in zip(seconds, sync_s, base, strict=True)]
        found["ratio_without_swaps"] = statistics.median(without)
    return found


def lines(cell: Cell, modes: Sequence[str], found: dict[str, Any] | None) -> list[str]:
    """For people; None: there is no GPU."""
    skew = "" if cell.zipf is None else f", Zipf {cell.zipf:g}"
    head = f"{cell.shape}{skew}, {cell.hbm} {'of the rows in HBM' if cell.hbm.endswith('%') else 'of HBM for rows'}"
    head += f", batch {cell.batch_size}"
    if found is None:
        return [head, *(f"  {name:<12} not measured" for name in modes)]
    facts = (
        f"{found['tables_bytes'] / 2**30:.2f} GiB of tables, {cell.scale:.4g} of their rows; {found['hot_rows']:,} hot "
        f"rows in {found['hot_bytes'] / 2**20:,.1f} MiB, {found['hot_samples']:.1%} of the samples; "
        f"{bench.how_clean(found)}"
    )
    text = [f"{head}: {facts}", *(mode_line(name, found, next(iter(found["modes"]))) for name in modes)]
    share = found["modes"].get("cached", {}).get("of_all_in_hbm")
    if share is not None and (cell.hbm, cell.zipf) == PROMISED:
        text.append(f"  cached, {held(f'at least {MIN_OF_ALL:.0%} of all_in_hbm', holds=share >= MIN_OF_ALL)}")
    return text


def mode_line(name: str, found: dict[str, Any], base: str) -> str:
    """Of one mode."""
    if (reason := found["refused"].get(name)) is not None:
        return f"  {name:<12} not measured: {reason}"
    own = found["modes"][name]
    least, most = own["ratio_range"]
    line = f"  {name:<12} {own['samples_per_s']:12,.0f} samples/s {own['ratio']:7.2f} times {base}"
    line += f" ({least:.2f} to {most:.2f})"
    if "of_all_in_hbm" in own and name != "all_in_hbm":
        low, high = own["of_all_in_hbm_range"]
        line += f", {own['of_all_in_hbm']:.1%} of all_in_hbm ({low:.1%} to {high:.1%})"
    if "ratio_without_swaps" in own:
        line += f", {own['ratio_without_swaps']:.2f} without the seconds of swaps"
    if own.get("swapped_share") is not None:
        line += f"; a swap copied {own['swapped_share']:.1%} of the hot rows"
    if "hybrid_ratio" in own:
        line += f"; {own['hybrid_ratio']:.2f} times fewer bytes over the link than a hybrid"
    if "hits_per_row" in own:
        line += f"; rows found on the device: {own['hits_per_row']:.1%}"
    return line


def scale_of(shape: str, num_modes: int) -> float:
    """The share of the rows of which so many copies fit the memory of this process."""
    tables = SHAPES[shape].make(1).tables
    num_bytes = sum(table.num_embeddings for table in tables) * 4 * SHAPES[shape].dim
    return float(min(1.0, MEMORY_SHARE * available_memory_bytes() / (num_modes * num_bytes)))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--hbm", nargs="+", type=room, help="for rows on the device: bytes, or a share such as 10%%")
    parser.add_argument("--zipf", type=float, help="skew of every table; default: each table's own")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="fewer leave room for more rows")
    parser.add_argument("--scale", type=float, help="share of the rows; default: what fits the memory")
    parser.add_argument("--steps", type=int, default=100, help="of a stretch")
    parser.add_argument("--stretches", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object, as the last line")
    parser.add_argument("--quick", action="store_true", help="small: tries the script, measures nothing of worth")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--folder", default=".", help="for the files of cached_tiers, which are removed; default: here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.batch_sizes, options.scale, options.steps = [8], 1e-5, 2
    options.hbm = options.hbm or (["64KiB"] if options.quick else ["10%", "512MiB", "4GiB", "16GiB"])
    return options


def room(text: str) -> str:
    """A value of --hbm, checked."""
    share_of(text) if text.endswith("%") else parse_bytes(text)
    return text


def share_of(text: str) -> float:
    """As of "10%". Raises ValueError for what is none of the rows, or more than all."""
    share = float(text.removesuffix("%")) / 100
    if not 0 < share <= 1:
        raise ValueError(f"a share is above 0% and at most 100%, not {text}")
    return share


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, time, print, in a fresh process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(arguments)
    end_on_signals()
    if not options.here:
        report = bench.in_fresh_process("benchmarks.gpu", [*arguments, "--here"], options.threads)
        if options.json:
            print(json.dumps(report))
        return
    absent = options.device != "cpu" and not torch.cuda.is_available()
    where = f"not measured: torch {torch.__version__} finds no GPU here"
    if not absent:
        where = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "interpreted on the CPU"
    print(f"{where}; torch {torch.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)
    cells = []
    for shape, hbm, batch_size in product(options.shapes, options.hbm, options.batch_sizes):
        scale = scale_of(shape, len(options.modes)) if options.scale is None else options.scale
        quick = {"num_tables": 3, "small_table_bytes": 0} if options.quick else {}
        own = {"zipf": options.zipf, "folder": options.folder, **quick}
        cell = Cell(shape, hbm, batch_size, options.steps, scale, options.device, **own)
        try:
            found = None if absent else measure(cell, options.modes, stretches=options.stretches)
        except ValueError as error:
            sys.exit(f"{shape}, {hbm}, batch {batch_size}: {error}")
        print("\n".join(lines(cell, options.modes, found)), file=sys.stderr, flush=True)
        cells.append({**vars(cell), "measured": found})
    print(json.dumps({"where": where, "cells": cells, **bench.circumstances()}))


if __name__ == "__main__":
    main()

"""What a training step will cost on a machine, phase by phase, before it is run.

    config, dataset -- work_of --> Work -- amounts_of --> amounts by phase -- predict (with a Hardware) --> seconds

`work_of` counts what a step does, which no machine changes. `amounts_of` turns that into amounts of a few kinds by
phase: ids, multiply-adds, cache lines that come from afar, calls from Python. A machine's file says how long some real
steps of known amounts took there (`hotrow probe`; run/step_probe.py); `predict` finds, by phase, what one unit of each
kind takes there, and adds up. Units take no less than nothing and amounts only grow with work, so more work is never
predicted to be faster.

A row is found in a cache or not by what a step touched since its last use: amounts count the lines whose last use lies
more than so many bytes back, for each of CACHES, and the machine's own steps say what each of them costs there.

All figures are means over the steps of a run, the first ones excepted if `work_of` is told so (`warmup`): windows of
rows that the loader gathers and rows that are looked up for the first time count as often as they come.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotrow.base.machine import default_threads
from hotrow.config.schema import Config, MemoryConfig
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.loader import WINDOW_ROWS
from hotrow.data.packed.reader import PackedDataset
from hotrow.models.layers import Network
from hotrow.placement.budget import LEAST_GATHERED_ROWS, LEAST_ROWS, TableDemand, TableSlots
from hotrow.placement.store_file import DEPTH, page_records
from hotrow.plan.demand import demands_of, most_rows
from hotrow.plan.hardware import Disk, Figure, Hardware, Point, check_cost_version
from hotrow.plan.solve import TableUse, rates_of
from hotrow.tables import TableConfig

PHASES = ("data", "lookup", "dense", "update")
"""As in run/record.py, which says what each contains."""
CACHES = (1 << 21, 1 << 25)
"""Bytes: 2 and 32 MiB, about the second level of caches and the third."""
DIMS = (4, 8, 16, 32, 64, 128)
"""Numbers of columns for which the kernels have loops of their own."""
LINE_BYTES = 64
SORTED_BITS = 11
"""Bits of a row number by which one pass of the update's sort orders (batch_update.cpp)."""
SECTOR_BYTES = 512
MOST_READS = DEPTH
"""Reads under way together, at most: the depth of the store's queue."""
LONGER = "measure the machine again with a longer probe (hotrow probe --seconds 50), with nothing else running"
Amounts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """What a step does to one table."""

    table: TableConfig
    lookups: float
    """Ids per step."""
    rows: float
    """Different rows per step."""
    record_bytes: int
    """Bytes of a row's weights and optimizer state."""
    rates: tuple[tuple[float, float, float], ...] = ()
    """How many rows are looked up so often, falling: (times per step, rows, first times per step and row); empty: the
    accesses are not known, and all rows are looked up as often."""
    jagged: bool = False
    """Whether bags have any number of ids."""
    counts: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    """Accesses of each row in `num_steps` steps; None if they are not known."""
    num_steps: float = 1.0
    depth: int = 0
    """Batches whose rows are fetched ahead."""
    least_cached: int = LEAST_ROWS
    known_use: TableUse | None = field(default=None, repr=False, compare=False)
    """`use`, if somebody has made it from the counts already."""

    @cached_property
    def use(self) -> TableUse:
        """What slots are worth to the table. Raises ValueError if its accesses are not known."""
        if self.known_use is not None:
            return self.known_use
        if self.counts is None:
            raise ValueError(
                f"table {self.table.name!r}: the dataset has no access counts, without which hits cannot be predicted; "
                "prepare the data with hotrow prepare"
            )
        demand = TableDemand(self.table.name, self.table.num_embeddings, self.record_bytes)
        return TableUse(demand, self.counts, num_steps=self.num_steps, depth=self.depth, least_cached=self.least_cached)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a row that a lookup reads."""
        return self.table.embedding_dim * (4 if self.table.dtype == "float32" else 2)

    def by_rate(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns `rates` and rows; if they are not known, one rate that gives as many different rows per step."""
        num_rows = self.table.num_embeddings
        known = self.rates or [(-math.log1p(-min(self.rows / num_rows, 1 - 1e-12)), float(num_rows), 0.0)]
        rates, rows, _ = np.array(known, np.float64).T
        return rates, rows

    def first_rows(self, pinned: int = 0) -> float:
        """Returns the rows behind the `pinned` most used ones that a step looks up as the first of the run."""
        total, left = 0.0, float(pinned)
        for _, rows, first in self.rates:
            total += max(0.0, rows - left) * first
            left = max(0.0, left - rows)
        return total


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step of a config does, on any machine."""

    batch_size: int
    num_dense: int
    products: tuple[tuple[int, int, int], ...]
    """Matrix products of the dense layers, forward: (samples, inputs, outputs)."""
    tables: tuple[TableWork, ...]
    optimizer: str
    dense_optimizer: str
    """`sgd`, `adagrad`, `adam`, or `split sgd` for weights in two halves."""
    precision: str
    threads: int
    constant_inputs: tuple[int, ...] = ()
    """Which of the products need no gradient of their inputs."""
    pairs: tuple[tuple[int, int, int], ...] = ()
    """Dot products of all pairs of a sample's vectors: (samples, vectors, columns)."""
    num_calls: int = 0
    """Operations of torch between products, forward."""
    call_values: float = 0.0
    """Numbers that these operations write."""
    num_tensors: int = 0
    """Tensors of weights of the dense layers."""
    num_weights: int = 0
    """Numbers in these tensors."""
    gathered_samples: float = 0.0
    """Samples per step that the loader gathers in windows, which it does many at a time."""
    verified_samples: float = 0.0
    """Samples per step that are read for the first time, and checked."""
    writes: str = "gathered"
    """How rows that leave DRAM are written; see `MemoryConfig.writes`."""
    folder: str = ""
    """Where rows lie that DRAM does not hold; empty: nobody said, and it is the present one."""
    lookahead: int = 4
    """Batches whose rows are fetched before they are needed."""
    steps: tuple[float, float] = (0.0, math.inf)
    """The first step and the end of those that the figures are means of."""

    @property
    def pooled_values(self) -> float:
        """Numbers in the pooled rows of a batch."""
        return float(
            sum(self.batch_size * len(own.table.feature_names) * own.table.embedding_dim for own in self.tables)
        )

    @property
    def layer_values(self) -> float:
        """Numbers that the products read and write, forward."""
        return float(sum(n * (inputs + outputs) for n, inputs, outputs in self.products))

    @property
    def touched_bytes(self) -> float:
        """Bytes that pass through the caches from one step to the next, roughly."""
        rows = sum(own.rows * _lines(own.record_bytes) * LINE_BYTES + 8 * own.lookups for own in self.tables)
        return rows + 4 * (2 * self.layer_values + 3 * self.pooled_values + 3 * self.num_weights + self.call_values)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a step of tables in tiers moves, over all tables."""

    tables: int
    """That do not lie in DRAM whole."""
    lookups: float
    """Ids that are mapped to slots."""
    rows: float
    """Different rows among them, behind the pinned ones."""
    misses: float
    """Those that are not in DRAM."""
    reads: float
    """Misses that lie on disk; the other ones are looked up for the first time, and made."""
    read_bytes: float
    writes: float
    """I/Os that write."""
    written_bytes: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's predicted time."""

    seconds: Mapping[str, float]
    """By phase, with the names of `run.record.PHASES`."""
    wait_s: float
    """The wait for rows from disk, what reads take beyond what the step hides: a part of `data`, because announcing a
    batch waits for slots and reads; without look-ahead a part of `lookup`."""
    binds: str
    """What a faster machine would need first: "dense", "rows in DRAM", "disk reads", "python", ..."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


# ---- what a step does


def work_of(config: Config, tables: Sequence[TableConfig], dataset: PackedDataset, *, warmup: int = 0) -> Work:
    """Counts what a training step does; different rows by the dataset's access counts.

    warmup: the first steps, which do not count. Raises ValueError for what has no prediction yet (`not_modelled`), and
    for a dataset without training rows.
    """
    if reason := not_modelled(config):
        raise ValueError(f"{reason} cannot be predicted yet")
    train, batch_size = dataset.split("train"), config.train.batch_size
    if not train.num_rows:
        raise ValueError(f"{dataset.path} has no training rows: there is no step to predict")
    batch_size = min(batch_size, train.num_rows)
    per_epoch = train.num_rows / batch_size
    num_steps = min(config.train.epochs * math.ceil(per_epoch), config.train.max_steps or math.inf)
    run = _Run(train.num_rows, batch_size, min(warmup, num_steps - 1), num_steps)
    lengths = _mean_lengths(dataset)
    memory = config.memory if isinstance(config.memory, MemoryConfig) else MemoryConfig()
    num_dense, dims = len(dataset.info.dense), {name: own.embedding_dim for own in tables for name in own.feature_names}
    model = config.model.build(num_dense=num_dense, dims=dims, generator=torch.Generator().manual_seed(0))
    if model.lookup == "sequence":
        raise ValueError(f"models that see every row of a list ({config.model.name}) cannot be predicted yet")
    precision, dense_optimizer = config.train.precision, config.optimizer.dense.name
    return Work(
        batch_size=batch_size,
        num_dense=num_dense,
        tables=tuple(
            _table_work(config, table, demand, dataset, run, lengths, memory.lookahead)
            for table, demand in zip(tables, demands_of(config, tables, training=True), strict=True)
        ),
        optimizer=config.optimizer.sparse.name,
        dense_optimizer="split sgd" if precision == "split_bf16" and dense_optimizer == "sgd" else dense_optimizer,
        precision=precision,
        threads=default_threads() if config.train.threads == "auto" else config.train.threads,
        gathered_samples=run.gathered_samples(shuffle=config.train.shuffle),
        verified_samples=run.verified_samples(),
        writes=memory.writes,
        lookahead=memory.lookahead,
        steps=(run.first, run.last),
        folder=str(memory.ssd or memory.file or config.run or ""),
        **dense_work(model, dims, num_dense, batch_size),
    )


def not_modelled(config: Config) -> str | None:
    """Returns which field of a config the model does not know, and what it does; None if it knows all of them."""
    if config.device == "cuda" or config.hbm is not None:
        return "steps on a GPU (to ask about the CPU, set device to cpu and memory.hbm to null)"
    if (dtype := config.train.dense_dtype) != "fp32":
        return f"dense layers in {dtype} (train.dense_dtype; fp32 can)"
    if isinstance(config.memory, MemoryConfig) and config.memory.file is not None:
        return "rows in files used as memory (memory.file; memory.ssd can)"
    if config.hot.takes_turns:
        return f"hot and cold phases (hot.schedule: {config.hot.schedule}; none and window can)"
    return None


@dataclass(frozen=True)
class _Run:
    """Steps [first, last) of a run, of which the figures are means."""

    num_rows: int
    batch_size: int
    first: float
    last: float

    @property
    def per_epoch(self) -> float:
        return self.num_rows / self.batch_size

    def mean(self, total: Callable[[float], float]) -> float:
        """Returns the mean per step of something of which the first n steps have `total(n)`."""
        return (total(self.last) - total(self.first)) / (self.last - self.first)

    def gathered_samples(self, *, shuffle: bool) -> float:
        window = min(WINDOW_ROWS, self.num_rows)
        if not shuffle:
            return float(self.batch_size)

        def total(steps: float) -> float:
            epochs, rest = divmod(steps, math.ceil(self.per_epoch))
            begun = min(self.num_rows, math.ceil(rest * self.batch_size / window) * window)
            return epochs * self.num_rows + begun

        return self.mean(total)

    def verified_samples(self) -> float:
        def total(steps: float) -> float:
            begun = math.ceil(steps * self.batch_size / WINDOW_ROWS) * WINDOW_ROWS
            return float(min(self.num_rows, begun))

        return self.mean(total)

    def first_times(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns how often a step is the first to look up a row. counts: its accesses in an epoch."""
        before, after = (1 - (1 - min(1.0, steps / self.per_epoch)) ** counts for steps in (self.first, self.last))
        return (after - before) / (self.last - self.first)


def _table_work(
    config: Config,
    table: TableConfig,
    demand: TableDemand,
    dataset: PackedDataset,
    run: _Run,
    lengths: Mapping[str, float],
    depth: int,
) -> TableWork:
    lookups = run.batch_size * sum(lengths[name] for name in table.feature_names)
    kinds = {feature.name: feature.kind for feature in dataset.info.features}
    known: dict[str, Any] = {}
    if dataset.has_counts:
        counts = dataset.counts(table.name)
        lookups = float(counts.sum(dtype=np.float64)) / run.per_epoch
        rates, num = rates_of(table.name, counts, run.per_epoch)
        of_epoch = rates * run.per_epoch
        rows = float(num @ (1 - (1 - min(1.0, 1 / run.per_epoch)) ** of_epoch))
        by_rate = zip(rates.tolist(), num.tolist(), run.first_times(of_epoch).tolist(), strict=True)
        known = {"counts": counts, "rates": tuple(sorted(by_rate, reverse=True))}
    else:
        rows = table.num_embeddings * -math.expm1(-lookups / table.num_embeddings)
    return TableWork(
        table=table,
        lookups=lookups,
        rows=rows,
        record_bytes=demand.record_bytes,
        jagged=any(kinds[name] != "one_hot" for name in table.feature_names),
        num_steps=run.per_epoch,
        depth=depth,
        least_cached=max(LEAST_ROWS, most_rows(config, table)),
        **known,
    )


def _mean_lengths(dataset: PackedDataset) -> dict[str, float]:
    """Returns the mean number of ids of each feature, from the first block of training rows."""
    found = {feature.name: 1.0 for feature in dataset.info.features}
    lists = [feature.name for feature in dataset.info.features if feature.kind != "one_hot"]
    if lists:
        split = dataset.split("train")
        block = split.block(0)
        for name in lists:
            ids = cast(Ragged, block.ids[dataset.info.feature_names.index(name)])
            found[name] = len(ids.values) / max(1, len(block.label))
    return found


SAMPLES = 2
"""Samples of the batch on which a model shows what it computes."""


def dense_work(model: Network, dims: Mapping[str, int], num_dense: int, batch_size: int) -> dict[str, Any]:
    """Returns the fields of `Work` about dense layers: what the model does with a batch of SAMPLES samples, times B.

    dims: columns of each feature, whose rows the model takes pooled. Running the model once shows everything, so no
    model is known by its name.
    """
    seen = _Calls()
    with seen:
        logits = model(torch.zeros(SAMPLES, num_dense), torch.zeros(SAMPLES, sum(dims.values()), requires_grad=True))
    products: list[tuple[int, int, int]] = []
    pairs: list[tuple[int, int, int]] = []
    constant: list[int] = []
    for node in _graph(logits):
        saved: Sequence[Tensor] = getattr(node, "saved_tensors", ())
        if type(node).__name__ == "_MLPBackward":
            weights = list(saved[len(saved) // 2 + 1 :])
            if not node.needs_input_grad[0]:
                constant.append(len(products))
            products += [(_times(len(saved[0]), batch_size), w.shape[1], w.shape[0]) for w in weights]
        elif type(node).__name__ == "_InteractionBackward":
            _, vectors, dim = saved[1].shape
            pairs.append((_times(len(saved[1]), batch_size), vectors + 1, dim))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "products": tuple(products),
        "constant_inputs": tuple(constant),
        "pairs": tuple(pairs),
        "num_calls": seen.num_calls,
        "call_values": seen.values * batch_size / SAMPLES,
        "num_tensors": len(parameters),
        "num_weights": sum(parameter.numel() for parameter in parameters),
    }


def _times(samples: int, batch_size: int) -> int:
    return round(samples * batch_size / SAMPLES)


def _graph(output: Tensor) -> Iterator[Any]:
    """Yields what autograd will run backward, each once."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [below for below, _ in node.next_functions]


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Counts torch's operations that compute something, and the numbers that they write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls, self.values = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if isinstance(out, Tensor) and not func.is_view and not name.startswith(("aten::empty", "aten::detach")):
            self.num_calls, self.values = self.num_calls + 1, self.values + out.numel()
        return out


# ---- amounts


def amounts_of(work: Work, traffic: Traffic | None = None) -> dict[str, Amounts]:
    """Returns the amounts of each phase, and of `window`, the part of `data` that gathers windows of rows.

    Every amount grows with the work. traffic: of tables in tiers.
    """
    amounts = {
        "data": _data(work),
        "window": _window(work),
        "lookup": _lookup(work),
        "dense": _dense(work),
        "update": _update(work),
    }
    for phase in PHASES:
        amounts[phase] |= _cold(work)
    if traffic is not None:
        ios = traffic.reads + traffic.writes
        moved = {"missed rows": traffic.misses, "I/Os": ios, "moved bytes": traffic.read_bytes + traffic.written_bytes}
        mapped = {"in tiers": 1.0, "tables in tiers": float(traffic.tables), "mapped ids": traffic.lookups}
        amounts["data"] |= {**mapped, "mapped rows": traffic.rows, **moved}
        amounts["lookup"] |= {**mapped, "I/Os": ios}
        amounts["dense"] |= {"I/Os": ios}
        amounts["update"] |= {**mapped, "mapped rows": traffic.rows, "I/Os": ios}
    return amounts


def _cold(work: Work) -> Amounts:
    """Returns what decides how much of its code and data a step's calls from Python still find in the caches."""
    cold = work.touched_bytes / (work.touched_bytes + CACHES[0])
    return {"cold steps": cold, f"steps with {work.dense_optimizer}": 1.0}


def _data(work: Work) -> Amounts:
    num_features = sum(len(own.table.feature_names) for own in work.tables)
    jagged = [own for own in work.tables if own.jagged]
    jagged_features = sum(len(own.table.feature_names) for own in jagged)
    return {
        "steps": 1.0,
        "dense columns": float(work.num_dense),
        "features": float(num_features),
        "dense values": float(work.batch_size * work.num_dense),
        "ids": sum(own.lookups for own in work.tables),
        "jagged features": float(jagged_features),
        "steps with lists": float(bool(jagged)),
        "features beside lists": float(num_features * bool(jagged)),
    }


def _window(work: Work) -> Amounts:
    num_columns = 1 + work.num_dense + sum(len(own.table.feature_names) for own in work.tables if not own.jagged)
    jagged = [own for own in work.tables if own.jagged]
    lists = sum(len(own.table.feature_names) for own in jagged)
    ids = sum(own.lookups for own in jagged) / work.batch_size
    return {
        "gathered samples": work.gathered_samples,
        "gathered values": work.gathered_samples * num_columns,
        "gathered lists": work.gathered_samples * lists,
        "gathered ids of lists": work.gathered_samples * ids,
        "checked values": work.verified_samples * (num_columns + 2 * lists + ids),
    }


def _lines(num_bytes: float) -> int:
    return math.ceil(num_bytes / LINE_BYTES)


def _from_afar(work: Work, lines: Callable[[TableWork], float]) -> Amounts:
    """Returns lines of rows whose last use, in a step before, lies so many bytes back."""
    touched = work.touched_bytes
    found = {}
    for cache in CACHES:
        steps = cache / touched
        found[f"lines from beyond {cache >> 20} MiB"] = sum(
            lines(own) * float(rows @ (-np.expm1(-rates) * np.exp(-rates * steps)))
            for own, (rates, rows) in ((own, own.by_rate()) for own in work.tables)
        )
    return found


def _far_rows(work: Work) -> float:
    """Returns rows per step, times the doublings of the tables' bytes beyond 64 MiB: pages are found more slowly."""
    table_bytes = sum(own.table.num_embeddings * own.record_bytes for own in work.tables)
    return sum(own.rows for own in work.tables) * math.log2(1 + table_bytes / (1 << 26))


def _of_other_widths(work: Work, count: Callable[[TableWork], float], what: str) -> Amounts:
    """Returns the numbers for which the kernels have no loop of its own, because of their tables' widths."""
    others = [own for own in work.tables if own.table.embedding_dim not in DIMS]
    return {f"{what} of other widths": sum(count(own) * own.table.embedding_dim for own in others)}


def _lookup(work: Work) -> Amounts:
    return {
        "steps": 1.0,
        "tensors": float(work.num_tensors),
        "ids": sum(own.lookups for own in work.tables),
        "bags": sum(float(work.batch_size * len(own.table.feature_names)) for own in work.tables if own.jagged),
        "lines": sum(own.lookups * _lines(own.weight_bytes) for own in work.tables),
        **_of_other_widths(work, lambda own: own.lookups, "columns"),
        "pooled values": work.pooled_values,
        **_beyond("pooled values", work.pooled_values),
        **_from_afar(work, lambda own: _lines(own.weight_bytes)),
        "far rows": _far_rows(work),
    }


def _beyond(what: str, values: float) -> Amounts:
    """Returns the part of `values` float32 numbers that the first of CACHES does not keep."""
    return {f"{what} beyond {CACHES[0] >> 20} MiB": max(0.0, values - CACHES[0] / 4)}


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _dense(work: Work) -> Amounts:
    wide = [(k, product) for k, product in enumerate(work.products) if product[2] > 1]
    forward = sum(float(n) * inputs * _round_up(outputs, 16) for _, (n, inputs, outputs) in wide)
    weights = sum(float(n) * _round_up(inputs, 16) * _round_up(outputs, 8) for _, (n, inputs, outputs) in wide)
    inward = sum(
        float(n) * _round_up(inputs, 16) * outputs for k, (n, inputs, outputs) in wide if k not in work.constant_inputs
    )
    return {
        "steps": 1.0,
        "calls": float(work.num_calls),
        "products": float(len(work.products)),
        "tensors": float(work.num_tensors),
        "split tensors": float(work.num_tensors) * (work.dense_optimizer == "split sgd"),
        "multiply-adds": forward + weights + inward,
        "layer values": work.layer_values,
        **_beyond("layer values", work.layer_values),
        f"weights by {work.dense_optimizer}": float(work.num_weights),
        "values of last layers": sum(float(n) * inputs for n, inputs, outputs in work.products if outputs == 1),
        "pairs": sum(float(n) * v * (v - 1) / 2 for n, v, _ in work.pairs),
        "pairs' multiply-adds": sum(float(n) * v * _round_up(v, 8) * d for n, v, d in work.pairs),
        "pooled values": work.pooled_values,
        "called values": work.call_values,
    }


def _update(work: Work) -> Amounts:
    passes = 1 if work.optimizer == "sgd" and work.precision != "fp16" else None
    touched = work.touched_bytes
    # SGD goes through the occurrences of rows, the other rules sum them first: two loops, of other speeds.
    by = " by sgd" if work.optimizer == "sgd" else ""
    found = {
        "steps": 1.0,
        "tables": float(len(work.tables)),
        f"keys{by}": sum(own.lookups for own in work.tables),
        f"sorted keys{by}": sum(own.lookups * (passes or _passes(own)) for own in work.tables),
        f"gradients{by}": sum(own.lookups * own.table.embedding_dim for own in work.tables),
        **_of_other_widths(work, lambda own: own.lookups, "gradients"),
        "rows": sum(own.rows for own in work.tables),
        "columns": sum(own.rows * own.table.embedding_dim for own in work.tables),
        "columns not float32": sum(
            own.rows * own.table.embedding_dim for own in work.tables if own.table.dtype != "float32"
        ),
        "state bytes": sum(own.rows * (own.record_bytes - _all_weight_bytes(own.table)) for own in work.tables),
        **_of_other_widths(work, lambda own: own.rows, "columns"),
        "far rows": _far_rows(work),
    }
    states = _from_afar(work, lambda own: _lines(own.record_bytes - own.weight_bytes))
    for cache in CACHES:
        # Weights were read by the lookup of this step, after which its dense layers came.
        weights = sum(own.rows * _lines(own.weight_bytes) for own in work.tables) * touched / (touched + cache)
        name = f"lines from beyond {cache >> 20} MiB"
        found[name] = weights + states[name]
    return found


def _all_weight_bytes(table: TableConfig) -> int:
    return table.num_bytes // table.num_embeddings


def _passes(own: TableWork) -> int:
    return max(1, math.ceil((own.table.num_embeddings - 1).bit_length() / SORTED_BITS))


# ---- tables in tiers


def traffic_of(work: Work, slots: Sequence[TableSlots]) -> Traffic | None:
    """Returns what a step moves between DRAM and disk; None if all rows lie in DRAM.

    A row that is looked up for the first time is made, not read. A cache that is not full yet, early in the run, takes
    every row in and writes none back.
    """
    behind = [
        (own, each) for own, each in zip(work.tables, slots, strict=True) if each.pinned < own.table.num_embeddings
    ]
    if not behind:
        return None
    totals = np.sum([_moves(work, own, each) for own, each in behind], axis=0)
    rows, misses, reads, read_bytes, writes, written_bytes = totals.tolist()
    return Traffic(
        tables=len(behind),
        lookups=sum(own.lookups for own in work.tables),
        rows=rows,
        misses=misses,
        reads=reads,
        read_bytes=read_bytes,
        writes=writes,
        written_bytes=written_bytes,
    )


def _moves(work: Work, own: TableWork, slots: TableSlots) -> tuple[float, float, float, float, float, float]:
    """Returns rows, misses, reads and their bytes, writes and their bytes of one table, per step."""
    use, (begin, end) = own.use, work.steps
    rows = max(0.0, use.rows_per_step - use.hits(TableSlots(slots.pinned, 0)))
    first = min(own.first_rows(slots.pinned), rows)
    missed = max(0.0, use.rows_per_step - use.hits(slots), first)
    full = slots.cached / missed if missed else math.inf
    """Steps until the cache is full."""
    in_steps = 1.0 if math.isinf(end) else max(0.0, end - max(begin, full)) / (end - begin)
    """The share of the steps in which it is."""
    reads, evicted = (missed - first) * in_steps, missed * in_steps
    sectors = _round_up(own.record_bytes, SECTOR_BYTES)
    gathers = work.writes != "in_place" and own.table.num_embeddings >= LEAST_GATHERED_ROWS
    page = page_records(own.record_bytes) if gathers else None
    writes = evicted / (page or 1)
    return rows, first + reads, reads, reads * sectors, writes, evicted * (own.record_bytes if page else sectors)


def _io_seconds(disk: Disk, traffic: Traffic, *, together: float) -> float:
    """Returns what the disk takes for a step's reads and writes, so many of them under way together."""
    reads, writes = (_rate(rates, together) for rates in (disk.reads_per_s, disk.writes_per_s))
    return max(traffic.reads / reads, traffic.read_bytes / disk.read_bytes_per_s.value) + max(
        traffic.writes / writes, traffic.written_bytes / disk.write_bytes_per_s.value
    )


def _rate(by_depth: Mapping[str, Figure], depth: float) -> float:
    """Returns I/Os a second at a queue depth, between the measured ones along straight lines of their logarithms."""
    known = sorted((int(name), figure.value) for name, figure in by_depth.items())
    if not known:
        raise ValueError("the hardware file has no random reads or writes for the disk; measure it with hotrow probe")
    depths, rates = zip(*known, strict=True)
    return math.exp(float(np.interp(math.log(max(depth, 1.0)), np.log(depths), np.log(rates))))


def disk_of(work: Work, hardware: Hardware) -> Disk:
    """Returns the disk that holds the work's folder. Raises ValueError if it was not measured."""
    folder = work.folder or "."
    if (disk := hardware.disk_at(folder)) is None:
        raise ValueError(
            f"reads and writes of rows cannot be predicted: no disk of {folder} in the file of {hardware.name}: "
            f"hotrow probe {folder}"
        )
    return disk


# ---- seconds


class CostModel:
    """What units of work take on one machine; see `predict`. Raises ValueError for steps of another version."""

    def __init__(self, hardware: Hardware) -> None:
        check_cost_version(hardware, hardware.name)
        self.hardware = hardware
        self._units: dict[tuple[str, int], Amounts] = {}

    def units(self, phase: str, threads: int) -> Amounts:
        """Returns the seconds of a unit of each kind of amount. Raises ValueError if points are fewer than kinds."""
        if (phase, threads) not in self._units:
            points = [p for p in self.hardware.kernels.get(phase, []) if p.sizes.get("threads") == threads]
            kinds = {kind for point in points for kind, amount in point.sizes.items() if amount > 0} - {"threads"}
            if len(points) < len(kinds):
                raise ValueError(
                    f"{self.hardware.name} has {len(points)} steps measured for {len(kinds)} kinds of work in its "
                    f"hardware file (kernels.{phase}, {threads} threads), which is too few: {LONGER}"
                )
            self._units[phase, threads] = unit_seconds(points)
        return self._units[phase, threads]

    def measured_threads(self, phase: str) -> list[int]:
        """Returns the numbers of threads for which the phase was measured. Raises ValueError if there are none."""
        found = sorted({int(point.sizes["threads"]) for point in self.hardware.kernels.get(phase, [])})
        if not found:
            raise ValueError(
                f"{self.hardware.name} has no steps measured for phase {phase!r} in its hardware file "
                f"(kernels.{phase}): {LONGER if self.hardware.kernels else 'measure the machine with hotrow probe'}"
            )
        return found

    def seconds(self, phase: str, amounts: Amounts, threads: int) -> float:
        """Returns what the amounts of a phase take; between measured numbers of threads along their logarithms."""
        known = self.measured_threads(phase)
        if not known[0] <= threads <= known[-1]:
            raise ValueError(
                f"{self.hardware.name} has no steps on {threads} threads in its hardware file, only on {known[0]} to "
                f"{known[-1]}: set train.threads to one of these, or measure the machine with hotrow probe"
            )
        near = [max(n for n in known if n <= threads), min(n for n in known if n >= threads)]
        found = [self._total(phase, amounts, n) for n in near]
        if near[0] == near[1] or min(found) <= 0:
            return found[0]
        return math.exp(float(np.interp(math.log(threads), np.log(near), np.log(found))))

    def _total(self, phase: str, amounts: Amounts, threads: int) -> float:
        units = self.units(phase, threads)
        if missing := [kind for kind, amount in amounts.items() if amount > 0 and kind not in units]:
            raise ValueError(
                f"{self.hardware.name} has no steps measured with: {', '.join(missing)} in its hardware file "
                f"(kernels.{phase}, {threads} threads): {LONGER}"
            )
        return sum(units[kind] * amount for kind, amount in amounts.items() if amount > 0)

    def predict(self, work: Work, slots: Sequence[TableSlots] | None = None) -> Prediction:
        """Returns the step's time; see the function `predict`."""
        traffic = None if slots is None else traffic_of(work, slots)
        amounts = amounts_of(work, traffic)
        seconds = {phase: self.seconds(phase, amounts[phase], work.threads) for phase in PHASES}
        if any(amounts["window"].values()):
            seconds["data"] += self.seconds("window", amounts["window"], work.threads)
        wait_s = 0.0
        if traffic is not None and traffic.reads + traffic.writes > 0:
            hidden_s = sum(seconds.values()) if work.lookahead else 0.0
            together = min(MOST_READS, max(1.0, traffic.reads * max(1, work.lookahead)))
            wait_s = max(0.0, _io_seconds(disk_of(work, self.hardware), traffic, together=together) - hidden_s)
        binds = self._binds(work, amounts, seconds, wait_s)
        seconds["data" if work.lookahead else "lookup"] += wait_s
        return Prediction(seconds=seconds, wait_s=wait_s, binds=binds)

    def _binds(
        self,
        work: Work,
        amounts: Mapping[str, Amounts],
        seconds: Mapping[str, float],
        wait_s: float,
    ) -> str:
        """Returns what takes most of the step. seconds: without the wait."""
        threads = min(self.measured_threads("dense"), key=lambda n: abs(n - work.threads))
        shares = dict.fromkeys(("dense", "rows in DRAM", "python", "data"), 0.0) | {"disk reads": wait_s}
        shares["data"] = seconds["data"]
        for phase in ("lookup", "dense", "update"):
            units = self.units(phase, threads)
            for kind, amount in amounts[phase].items():
                what = "python" if kind in CALLS else "dense" if phase == "dense" else "rows in DRAM"
                shares[what] += units.get(kind, 0.0) * amount
        return max(shares, key=lambda what: shares[what])


CALLS = ("steps", "tables", "tensors", "calls", "products")
"""Amounts that Python takes time for, however small the tensors are."""


def predict(work: Work, hardware: Hardware, slots: Sequence[TableSlots] | None = None) -> Prediction:
    """Returns the step's time; slots: each table's slots in DRAM, None if all rows lie there.

    Raises ValueError naming what the hardware file lacks.
    """
    return _model_of(hardware).predict(work, slots)


_MODELS: OrderedDict[int, CostModel] = OrderedDict()
"""By the address of a Hardware, which its model keeps alive."""
MOST_MODELS = 8


def _model_of(hardware: Hardware) -> CostModel:
    """Returns the model of a machine; it is made once, because a planner asks for thousands of predictions."""
    if id(hardware) not in _MODELS:
        _MODELS[id(hardware)] = CostModel(hardware)
        if len(_MODELS) > MOST_MODELS:
            _MODELS.popitem(last=False)
    return _MODELS[id(hardware)]


def unit_seconds(points: Sequence[Point]) -> Amounts:
    """Returns seconds per unit of each amount, none negative, with which the sums are closest to the points' seconds.

    Closest are the sums of least squares of their relative errors. Points whose own repeats differ, or that other
    work disturbed, count less, and so do points that are far off (Huber's weights), above all those that took long.
    """
    kinds = sorted(
        {kind for point in points for kind, amount in point.sizes.items() if kind != "threads" and amount > 0}
    )
    if not kinds:
        return {}
    rows = np.array([[point.sizes.get(kind, 0.0) for kind in kinds] for point in points])
    seconds = np.array([point.seconds.value for point in points])
    relative = rows / seconds[:, None]
    scale = relative.max(axis=0)
    relative /= scale
    steady = np.array([1 / (STEADY + _spread(point.seconds) + STEADY * point.disturbed) for point in points])
    weights = steady
    for _ in range(ROUNDS):
        found = least_squares(relative * weights[:, None], weights)
        error = relative @ found - 1
        typical = max(float(np.median(np.abs(error))), 1e-12)
        limit = np.where(error < 0, SLOW, FAST) * typical
        weights = steady * np.sqrt(limit / np.maximum(np.abs(error), limit))
    return dict(zip(kinds, (found / scale).tolist(), strict=True))


STEADY = 0.2
"""Spreads below this share of a figure say little about what it is worth; other work adds as much."""
ROUNDS = 12
SLOW, FAST = 1.0, 2.5
"""Errors of more than so many times the median error count in proportion, not squared: of points that took longer than
the sums say, and of those that took less."""


def _spread(figure: Figure) -> float:
    """Returns the distance of the quartiles as a share of the figure; 0 if nobody measured it."""
    if figure.low is None or figure.high is None or not figure.value:
        return 0.0
    return (figure.high - figure.low) / figure.value


def least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x >= 0 that minimises |a x - b|, by the active sets of Lawson and Hanson (1974)."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], np.bool_)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max(initial=0.0))
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if not (bad := free & (wanted <= 0)).any():
                x = wanted
                break
            step = float((x[bad] / np.maximum(x[bad] - wanted[bad], 1e-300)).min())
            x = x + step * (wanted - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                break
    return x

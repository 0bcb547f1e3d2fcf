"""What a training step of a config does, counted: no machine changes it.

    config, dataset -- work_of --> Work: lookups and different rows by table, matrix products, calls from Python

All figures are means over the steps of a run, the first ones excepted if `work_of` is told so (`warmup`): windows of
rows that the loader gathers and rows that are looked up for the first time count as often as they come. Next: cost.py
for what it takes, traffic.py for what tables in tiers move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotrow.base.machine import default_threads
from hotrow.config.schema import Config
from hotrow.costs.demand import accesses_of, demands_of, most_rows
from hotrow.costs.solve import Counted, TableUse
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.loader import WINDOW_ROWS
from hotrow.data.packed.reader import PackedDataset
from hotrow.models.layers import Network
from hotrow.objectives.sampled_softmax import STRETCH
from hotrow.placement.budget import MIN_ROWS, TableDemand
from hotrow.tables import TableConfig

LINE_BYTES = 64


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
    counted: Counted | None = field(default=None, repr=False, compare=False)
    """What was read of the accesses of each row in `num_steps` steps; None if they are not known."""
    num_steps: float = 1.0
    first_epoch: float = 0.0
    """The share of the run's steps that are of its first epoch."""
    depth: int = 0
    """Batches whose rows are fetched ahead."""
    least_cached: int = MIN_ROWS

    @cached_property
    def use(self) -> TableUse:
        """What slots are worth to the table. Raises ValueError if its accesses are not known."""
        if self.counted is None:
            raise ValueError(
                f"table {self.table.name!r}: the dataset has no access counts, without which hits cannot be predicted; "
                "prepare the data with hotrow prepare"
            )
        demand = TableDemand(self.table.name, self.table.num_embeddings, self.record_bytes)
        return TableUse(
            demand,
            self.counted,
            num_steps=self.num_steps,
            depth=self.depth,
            least_cached=self.least_cached,
            first_epoch=self.first_epoch,
        )

    def of(self, table: TableConfig, demand: TableDemand) -> TableWork:
        """Returns the same accesses of rows that take other bytes, without reading the counts again."""
        made = replace(self, table=table, record_bytes=demand.record_bytes)
        if "use" in vars(self):
            vars(made)["use"] = self.use.of(demand)
        return made

    @property
    def weight_bytes(self) -> int:
        """Bytes of a row that a lookup reads."""
        return self.table.embedding_dim * (4 if self.table.dtype == "float32" else 2)

    def by_rate(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns `rates`, falling, and rows; if they are not known, one rate that gives as many different rows."""
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
    def table_bytes(self) -> int:
        """Bytes of the records of all rows."""
        return sum(own.table.num_embeddings * own.record_bytes for own in self.tables)

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
        rows = sum(own.rows * lines_of(own.record_bytes) * LINE_BYTES + 8 * own.lookups for own in self.tables)
        return rows + 4 * (2 * self.layer_values + 3 * self.pooled_values + 3 * self.num_weights + self.call_values)


def work_of(
    config: Config,
    tables: Sequence[TableConfig],
    dataset: PackedDataset,
    *,
    warmup: int = 0,
    counted: Mapping[str, Counted] | None = None,
    like: Work | None = None,
) -> Work:
    """Counts what a training step does; different rows by the dataset's access counts.

    warmup: the first steps, which do not count. counted: `read_counts`, if they were read before. like: the work of a
    run whose steps come to the same rows, which are then not looked at again. Raises ValueError for what has no
    prediction yet (`not_modelled`), and for a dataset without training rows.
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
    demands = demands_of(config, tables, training=True)
    memory = config.tiers
    whole = config.model.dims_of(dataset)  # a rank may hold some columns of a table
    num_dense, dims = len(dataset.info.dense), {name: whole[own.name] for own in tables for name in own.feature_names}
    model = config.model.build_for(dataset.info, dims=dims, generator=torch.Generator().manual_seed(0))
    if model.lookup == "sequence":
        raise ValueError(f"models that see every row of a list ({config.model.name}) cannot be predicted yet")
    return Work(
        batch_size=batch_size,
        num_dense=num_dense,
        tables=_tables_work(config, tables, demands, dataset, run, memory.lookahead, counted)
        if like is None
        else tuple(own.of(table, demand) for own, table, demand in zip(like.tables, tables, demands, strict=True)),
        optimizer=config.optimizer.sparse.name,
        dense_optimizer=dense_optimizer_of(config),
        precision=config.train.precision,
        threads=default_threads() if config.train.threads == "auto" else config.train.threads,
        gathered_samples=run.gathered_samples(shuffle=config.train.shuffle),
        verified_samples=run.verified_samples(),
        writes=memory.writes,
        lookahead=memory.lookahead,
        steps=(run.first, run.last),
        folder=str(memory.ssd or memory.file or config.run or ""),
        **dense_work(model, dims, num_dense, batch_size),
    )


def read_counts(config: Config, tables: Sequence[TableConfig], dataset: PackedDataset) -> dict[str, Counted]:
    """Reads the counts of the training split, by table; empty if the dataset has none, or no training rows."""
    num_rows = dataset.split("train").num_rows
    if not dataset.has_counts or not num_rows:
        return {}
    num_steps = num_rows / min(config.train.batch_size, num_rows)
    return {table.name: Counted.of(table.name, accesses_of(table, dataset), num_steps) for table in tables}


def dense_optimizer_of(config: Config) -> str:
    """Returns `Work.dense_optimizer`; adamw costs what adam does."""
    name = config.optimizer.dense.name
    return {"adamw": "adam", "sgd": "split sgd" if config.train.precision == "split_bf16" else "sgd"}.get(name, name)


def not_modelled(config: Config) -> str | None:
    """Returns which field of a config the model does not know, and what it does; None if it knows all of them."""
    if config.device == "cuda" or config.hbm is not None:
        return "steps on a GPU (to ask about the CPU, set device to cpu and memory.hbm to null)"
    if (dtype := config.train.dense_dtype) != "fp32":
        return f"dense layers in {dtype} (train.dense_dtype; fp32 can)"
    if config.tiers.file is not None:
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


def _tables_work(
    config: Config,
    tables: Sequence[TableConfig],
    demands: Sequence[TableDemand],
    dataset: PackedDataset,
    run: _Run,
    depth: int,
    counted: Mapping[str, Counted] | None,
) -> tuple[TableWork, ...]:
    lengths = mean_lengths(dataset)
    known = read_counts(config, tables, dataset) if counted is None else counted
    return tuple(
        _table_work(config, table, demand, dataset, run, lengths, depth, known.get(table.name))
        for table, demand in zip(tables, demands, strict=True)
    )


def _table_work(
    config: Config,
    table: TableConfig,
    demand: TableDemand,
    dataset: PackedDataset,
    run: _Run,
    lengths: Mapping[str, float],
    depth: int,
    counted: Counted | None,
) -> TableWork:
    lookups = run.batch_size * sum(lengths[name] for name in table.feature_names)
    kinds = {feature.name: feature.kind for feature in dataset.info.features}
    known: dict[str, Any] = {}
    if counted is not None:
        rates, num = counted.rates, counted.rows
        lookups = float(num @ rates)
        of_epoch = rates * run.per_epoch
        rows = float(num @ (1 - (1 - min(1.0, 1 / run.per_epoch)) ** of_epoch))
        by_rate = zip(rates.tolist(), num.tolist(), run.first_times(of_epoch).tolist(), strict=True)
        known = {"counted": counted, "rates": tuple(sorted(by_rate, reverse=True))}
    else:
        rows = table.num_embeddings * -math.expm1(-lookups / table.num_embeddings)
    return TableWork(
        table=table,
        lookups=lookups,
        rows=rows,
        record_bytes=demand.record_bytes,
        jagged=any(kinds[name] != "one_hot" for name in table.feature_names),
        num_steps=run.per_epoch,
        first_epoch=max(0.0, min(run.last, run.per_epoch) - run.first) / (run.last - run.first),
        depth=depth,
        least_cached=max(MIN_ROWS, most_rows(config, table)),
        **known,
    )


def mean_lengths(dataset: PackedDataset) -> dict[str, float]:
    """Returns the mean number of ids of each feature, from the first block of training rows."""
    found = {feature.name: 1.0 for feature in dataset.info.features}
    lists = [feature.name for feature in dataset.info.features if feature.kind != "one_hot"]
    if lists and dataset.split("train").num_blocks:
        split = dataset.split("train")
        block = split.block(0)
        for name in lists:
            ids = cast(Ragged, block.ids[dataset.info.feature_names.index(name)])
            found[name] = len(ids.values) / max(1, len(block.label))
    return found


SAMPLES = 2
"""Samples of the batch on which a model shows what it computes."""
WRITTEN_BY_LOSS = 5
"""Times that a loss over items writes the scores of samples with each other's items."""


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
            weights = list(saved[node.num_layers + 1 :])
            if not node.needs_input_grad[0]:
                constant += range(len(products), len(products) + len(weights), node.num_layers)
            products += [(_times(saved[0].shape[-2], batch_size), w.shape[1], w.shape[0]) for w in weights]
        elif type(node).__name__ == "_InteractionBackward":
            _, vectors, dim = saved[1].shape
            pairs.append((_times(len(saved[1]), batch_size), vectors + 1, dim))
    scores_of_loss = 0
    if model.retrieves:  # the loss multiplies users with the items of other samples
        products.append((batch_size, logits.shape[1] // 2, min(batch_size, STRETCH)))
        scores_of_loss = batch_size * min(batch_size, STRETCH)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "products": tuple(products),
        "constant_inputs": tuple(constant),
        "pairs": tuple(pairs),
        "num_calls": seen.num_calls,
        "call_values": seen.values * batch_size / SAMPLES + WRITTEN_BY_LOSS * scores_of_loss,
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


def lines_of(num_bytes: float) -> int:
    """Returns the cache lines that so many bytes take."""
    return math.ceil(num_bytes / LINE_BYTES)

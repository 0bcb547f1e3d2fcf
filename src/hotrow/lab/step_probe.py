"""Real training steps of many small shapes, timed phase by phase: what `costs/cost.py` knows of a machine.

Every step is `trainer.train_step` on batches of the real loader, so a figure holds whatever a step holds, caches that
dense layers have emptied and calls from Python among them. The shapes are drawn from a fixed seed over the ranges that
people train in; a shape whose step would take long gets a smaller batch. Each gives a point for every phase and number
of threads: the amounts of its work, and the median seconds of its steps.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.base.machine import Disturbance, available_memory_bytes
from hotrow.batch import Batch
from hotrow.bench import CLEAN_SHARE
from hotrow.config.load import make_config
from hotrow.config.schema import Config
from hotrow.costs.cost import PHASES, Amounts, amounts_of
from hotrow.costs.demand import TABLE_DTYPES, demands_of
from hotrow.costs.hardware import DISTURBED, Figure, Point
from hotrow.costs.traffic import Traffic
from hotrow.costs.work import TableWork, Work, dense_optimizer_of, dense_work
from hotrow.data.packed.format import Block, DatasetInfo, DenseColumn, Feature, Ragged, Table
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.sources.synthetic import draw_ranks, zipf_rates
from hotrow.data.sources.synthetic_config import SyntheticTable
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.shards import Shard
from hotrow.placement.budget import Memory, TableSlots
from hotrow.placement.lookahead import lookahead
from hotrow.placement.store_file import SUFFIX, OwnFolder
from hotrow.placement.tiers import Tiers
from hotrow.run.build import Parts, build
from hotrow.run.meters import Session, StepClock
from hotrow.run.trainer import train_step
from hotrow.setup.device import DenseDevice
from hotrow.setup.setup import Setup
from hotrow.setup.slots import SlotPlanner
from hotrow.tables import TableConfig, Uniform

SEED = 20_260_727
"""Of the shapes; nothing else uses it, so no run that is predicted was measured for its prediction."""
WARMUP, TIMED = 2, 7
"""Steps on each number of threads, with each batch size."""
PARTS = (1, 3)
"""Batches of a shape are its batch size and a third of it: that takes less time than another shape."""
BATCH_SIZES = 64, 8192
MAX_MULTIPLY_ADDS = 2e8
MAX_VALUES = 3e6
"""Limits on a step: multiply-adds of a forward pass, and numbers in the rows that it looks up."""
MAX_TABLE_BYTES = 3 << 27
"""384 MiB of weights and optimizer state: several times the caches of most processors."""
TIERS_EVERY = 6
"""One shape in so many has its tables in tiers."""
DIMS = (4, 8, 16, 16, 32, 32, 64, 64, 128, 24, 48)
OPTIMIZERS = ("row_wise_adagrad", "adagrad", "sgd", "adam", "ftrl")
PRECISIONS = ("fp32", "fp32", "split_bf16", "fp16", "fp32", "split_bf16", "fp32")
DENSE_OPTIMIZERS = ("sgd", "adam", "sgd", "adagrad")
EVICTING_FLOATS = 1 << 24
"""64 MiB: reading them removes everything else from the caches of most processors."""
WINDOWS_SHARE = 0.06
"""Of the time: for windows of rows, which the loader gathers now and then."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a step of the probe works on."""

    config: Config
    num_dense: int
    rows: tuple[int, ...]
    """The rows of each table."""
    zipf: float
    """Exponent of the law by which `draw_ranks` draws ids."""
    lengths: tuple[float, ...]
    """Mean ids per bag of each table; 1: exactly one."""
    in_tiers: float | None = None
    """The share of the rows for which there are slots in DRAM; if None, all rows lie there."""

    @property
    def info(self) -> DatasetInfo:
        """A description of the data, as a packed dataset has one."""
        names = [f"t{t}" for t in range(len(self.rows))]
        kinds = ("one_hot" if length == 1 else "multi_hot" for length in self.lengths)
        return DatasetInfo(
            name="probe",
            dense=tuple(DenseColumn(f"d{j}") for j in range(self.num_dense)),
            features=tuple(Feature(name, name, cast(Any, kind)) for name, kind in zip(names, kinds, strict=True)),
            tables=tuple(Table(name, rows) for name, rows in zip(names, self.rows, strict=True)),
            licence="none",
        )


class Drawn:
    """Rows of a shape in memory, as a split of a packed dataset has them on disk."""

    name = "train"

    def __init__(self, shape: Shape, num_rows: int, generator: np.random.Generator) -> None:
        self.info, self.num_rows = shape.info, num_rows
        self.num_blocks, self.block_rows = 1, np.array([num_rows], np.int64)
        label = (generator.random(num_rows) < 0.25).astype(np.float32)
        dense = tuple(generator.standard_normal(num_rows, np.float32) for _ in range(shape.num_dense))
        ids = tuple(
            _ids(shape.zipf, n, num_rows, mean, generator) for n, mean in zip(shape.rows, shape.lengths, strict=True)
        )
        self._block = Block((label,), dense, ids)

    def block(self, index: int) -> Block:
        """Returns all rows."""
        return self._block


def _ids(zipf: float, num_embeddings: int, num_rows: int, mean: float, generator: np.random.Generator) -> Any:
    table = SyntheticTable(name="t", num_embeddings=num_embeddings, zipf=zipf)

    def draw(num_ids: int) -> NDArray[np.int32]:
        return draw_ranks(table, generator.integers(0, 1 << 64, num_ids, np.uint64)).astype(np.int32)

    if mean == 1:
        return draw(num_rows)
    lengths = np.minimum(generator.poisson(mean, num_rows), 1 + int(4 * mean))
    splits = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    return Ragged(draw(int(splits[-1])), splits)


# ---- shapes


def shapes(most_table_bytes: int = MAX_TABLE_BYTES) -> Iterator[Shape]:
    """Yields shapes for ever, each a function of its number and the limit on its tables.

    The first six have every optimizer, precision and place for rows, so that a short probe lacks none of them.
    """
    for number in itertools.count():
        yield _shape(np.random.default_rng([SEED, number]), number, most_table_bytes)


def _shape(generator: np.random.Generator, number: int, most_table_bytes: int) -> Shape:
    def log(low: float, high: float) -> float:
        return float(math.exp(generator.uniform(math.log(low), math.log(high))))

    def choice(values: Sequence[Any]) -> Any:
        return values[int(generator.integers(len(values)))]

    tiers = number % TIERS_EVERY == TIERS_EVERY - 1
    num_tables, dim, num_dense = round(log(2, 32)), choice(DIMS), choice((0, 4, 13, 13, 64))
    optimizer, precision = OPTIMIZERS[number % 5], PRECISIONS[number % 7]
    lists = 0.0 if generator.random() < 0.5 else generator.random()
    lengths = tuple(round(log(2, 40), 1) if generator.random() < lists else 1.0 for _ in range(num_tables))
    states = {"sgd": 0, "row_wise_adagrad": 0, "adagrad": 1, "adam": 2, "ftrl": 2}[optimizer]
    most_bytes = log(min(1 << 22, most_table_bytes), most_table_bytes) / (8 if tiers else 1)
    most_rows = max(100, int(most_bytes / (4 * dim * (1 + states))))
    rows = np.array([log(10 if not tiers else 1000, 3e6) for _ in range(num_tables)])
    rows = np.maximum(10, rows * min(1.0, most_rows / rows.sum())).astype(int)
    widths = [[round(log(16, 1024)) for _ in range(int(generator.integers(1, 4)))] for _ in range(2)]
    if generator.random() < 0.7:  # most people choose multiples of 16
        widths = [[-(-width // 16) * 16 for width in own] for own in widths]
    wants = {"dlrm": {"bottom_mlp": widths[0], "top_mlp": widths[1]}, "dcn": {"deep_mlp": widths[1]}}
    name = "dcn" if generator.random() < 0.25 else "dlrm"
    extra: dict[str, Any] = {"num_cross_layers": int(generator.integers(1, 4))} if name == "dcn" else {}
    inputs = num_dense + num_tables * dim
    if name == "dcn":
        weights = inputs * (extra["num_cross_layers"] * inputs + widths[1][0])
    else:
        pairs = dim + num_tables * (num_tables + 1) // 2
        weights = num_dense * widths[0][0] + widths[0][-1] * dim + pairs * widths[1][0] + num_tables**2 * dim
    weights += sum(a * b for own in widths for a, b in itertools.pairwise(own))
    most = min(log(*BATCH_SIZES), MAX_MULTIPLY_ADDS / weights, MAX_VALUES / (dim * sum(lengths)))
    config = {
        "data": "probe",
        "model": {"name": name, "embedding_dim": dim, **wants[name], **extra},
        "optimizer": {
            "sparse": {"name": optimizer, "lr": 0.01},
            "dense": {"name": DENSE_OPTIMIZERS[number % 4], "lr": 1e-3},
        },
        "train": {"batch_size": max(BATCH_SIZES[0], round(most)), "precision": precision},
    }
    return Shape(
        config=make_config(config),
        num_dense=num_dense,
        rows=tuple(rows.tolist()),
        zipf=round(generator.uniform(0.0, 1.3), 2),
        lengths=lengths,
        in_tiers=log(0.05, 0.8) if tiers else None,
    )


# ---- steps


def measure_kernels(
    *,
    threads: Sequence[int],
    seconds: float,
    progress: Callable[[str], object],
    folder: Path | str | None = None,
) -> dict[str, list[Point]]:
    """Returns points by phase (`Hardware.kernels`), measured in about `seconds`.

    threads: the numbers of threads to measure, for instance 1, 2, 4 up to the cores. progress: is told how far it is.
    folder: a folder on a disk for tables in tiers; if None, the system's for temporary files.
    """
    before, started = torch.get_num_threads(), time.perf_counter()
    found: dict[str, list[Point]] = {}
    gc.freeze()  # what was imported need not be searched after every shape
    try:
        for name, points in _windows(threads, seconds * WINDOWS_SHARE).items():
            found.setdefault(name, []).extend(points)
        for number, shape in enumerate(shapes(min(MAX_TABLE_BYTES, available_memory_bytes() // 8))):
            elapsed = time.perf_counter() - started
            if elapsed > seconds:
                break
            progress(f"steps of {number} shapes, {elapsed:.0f} of {seconds:.0f} s")
            for name, point in measure_shape(shape, threads, seed=number, folder=folder):
                found.setdefault(name, []).append(point)
            gc.collect()  # tables hang on cycles of a few small objects
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
    return found


def measure_shape(
    shape: Shape, threads: Sequence[int], *, seed: int = 0, folder: Path | str | None = None
) -> Iterator[tuple[str, Point]]:
    """Yields a point for every phase and number of threads, with the phase's name."""
    with ExitStack() as stack:
        parts = build_shape(shape, stack, folder=folder)
        for part in PARTS:
            smaller = max(1, shape.config.train.batch_size // part)
            yield from _measure_batches(shape, parts, smaller, threads, seed)


def _measure_batches(
    shape: Shape, parts: Parts, batch_size: int, threads: Sequence[int], seed: int
) -> Iterator[tuple[str, Point]]:
    placement, tiers = parts.embedding.placement, parts.embedding.placement.find(Tiers)
    depth = shape.config.tiers.lookahead if placement.looks_ahead else 0
    split = Drawn(
        shape, batch_size * ((WARMUP + TIMED) * len(threads) + depth + 1), np.random.default_rng([seed, batch_size])
    )
    loader = Loader(cast(Split, split), batch_size, shuffle_seed=1)
    batches = iter(lookahead(loader.epoch(0), parts.embedding, depth=depth))
    session = Session(1)
    clock, steps, evict = StepClock(session), itertools.count(), torch.zeros(EVICTING_FLOATS).sum
    try:
        for number in threads:
            torch.set_num_threads(number)
            for _ in range(WARMUP):
                _one_step(parts, batches, clock, session, next(steps))
                evict()  # a run's window of rows was gathered long ago
            before, disturbance = _counters(tiers), Disturbance(of_disk=tiers is not None)
            taken = [_one_step(parts, batches, clock, session, next(steps)) for _ in range(TIMED)]
            others = disturbance.share()
            moved = _counters(tiers)
            moved.subtract(before)
            work = replace(work_of_steps(shape, parts, [batch for _, batch in taken]), threads=number)
            traffic = None if tiers is None else _traffic(tiers, moved)
            yield from _points(work, traffic, [own for own, _ in taken], others)
    finally:
        cast(Any, batches).close()  # it lets go of the batches that were announced


def _one_step(
    parts: Parts, batches: Iterator[Batch], clock: StepClock, session: Session, step: int
) -> tuple[dict[str, float], Batch]:
    """Takes a step as the trainer does; returns its seconds by phase, without waits for rows, and its batch."""
    before, stalls = dict(session.state.seconds), [_stall_s(parts)]
    clock.lap(None)
    batch = next(batches)
    clock.lap("data")
    stalls.append(_stall_s(parts))
    float(train_step(parts, batch, step, clock))
    stalls.append(_stall_s(parts))
    own = {phase: session.state.seconds[phase] - before[phase] for phase in PHASES}
    for phase, stall in zip(("data", "lookup"), itertools.pairwise(stalls), strict=True):
        own[phase] = max(0.0, own[phase] - (stall[1] - stall[0]))
    return own, batch


def _stall_s(parts: Parts) -> float:
    return float(getattr(parts.embedding.placement, "stall_s", 0.0))


def build_shape(
    shape: Shape,
    stack: ExitStack,
    comm: Communicator | None = None,
    *,
    folder: Path | str | None = None,
    shards: Mapping[str, Shard] | None = None,
) -> Parts:
    """Returns what steps of a shape work on. comm, shards: of the ranks that share its rows; None if none do."""
    config, info = shape.config, shape.info
    tables = tuple(
        TableConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=config.model.row_dim(cast(int, config.model.embedding_dim)),
            feature_names=(table.name,),
            dtype=TABLE_DTYPES[config.train.precision],
            init=Uniform(zero_rows=1),
        )
        for table in info.tables
    )
    memory = None
    if shape.in_tiers is not None:
        memory = _memory(shape, config, tables, Path(folder or tempfile.gettempdir()))
    dataset = cast(Any, _Described(info))
    planner = SlotPlanner(config=config, tables=tables, memory=memory or Memory(dram=1, ssd=Path()))
    comm = comm or Communicator()
    setup = Setup(config, dataset, tables, DenseDevice(), memory, planner, None, Path(), comm.ranks, shards or {})
    parts = build(setup, comm)
    for states in parts.sparse_optimizer.state.values() if memory is None else ():
        for state in states.values():
            state += 0.0  # the system gives memory when it is first written, once in a long run
    if (tiers := parts.embedding.placement.find(Tiers)) is not None:
        stack.callback(tiers.close)
        tiers.write_every_row()
    return parts


@dataclass(frozen=True)
class _Described:
    """The part of a packed dataset that `build` asks for."""

    info: DatasetInfo


def _memory(shape: Shape, config: Config, tables: Sequence[TableConfig], folder: Path) -> Memory:
    """Returns memory in which each table has slots for its share of rows, a quarter of them pinned."""
    batch_rows = config.train.batch_size * 6  # those of the batches in flight
    share = cast(float, shape.in_tiers)

    def plan(demands: Sequence[Any], budget_bytes: int) -> list[TableSlots]:
        slots = []
        for demand, length in zip(demands, shape.lengths, strict=True):
            cached = min(demand.num_rows, max(int(share * demand.num_rows * 0.75), int(batch_rows * length)))
            pinned = min(int(share * demand.num_rows * 0.25), demand.num_rows - cached)
            slots.append(TableSlots(pinned, cached) if cached < demand.num_rows else TableSlots(demand.num_rows, 0))
        return slots

    needed = sum(own.record_bytes * own.num_rows for own in demands_of(config, tables, training=True))
    return Memory(dram=2 * needed + (64 << 20), ssd=folder, plan=plan, force=True)


def work_of_steps(shape: Shape, parts: Parts, batches: Sequence[Batch]) -> Work:
    """Counts what these steps did, exactly."""
    config, tables, batch_size = shape.config, parts.embedding.tables, len(batches[0])
    dims = {table.name: table.embedding_dim for table in tables}
    own = []
    for table, demand, length in zip(tables, demands_of(config, tables, training=True), shape.lengths, strict=True):
        ids = [batch.sparse.bags(table.name)[0] for batch in batches]
        lookups = statistics.fmean(len(each) for each in ids)
        rates, rows = zipf_rates(table.num_embeddings, shape.zipf, lookups)
        distinct = statistics.fmean(len(np.unique(each.numpy())) for each in ids)
        own.append(
            TableWork(
                table=table,
                lookups=lookups,
                rows=distinct,
                record_bytes=demand.record_bytes,
                rates=tuple((rate, n, 0.0) for rate, n in zip(rates.tolist(), rows.tolist(), strict=True)),
                jagged=length != 1,
            )
        )
    return Work(
        batch_size=batch_size,
        num_dense=shape.num_dense,
        tables=tuple(own),
        optimizer=config.optimizer.sparse.name,
        dense_optimizer=dense_optimizer_of(config),
        precision=config.train.precision,
        threads=1,
        **dense_work(parts.model, dims, shape.num_dense, batch_size),
    )


def _counters(tiers: Tiers | None) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in tiers.counters().values() if tiers is not None else ():
        total.update(counts)
    return total


def _traffic(tiers: Tiers, moved: Mapping[str, int]) -> Traffic:
    return Traffic(
        tables=sum(slots.pinned < table.num_embeddings for table, slots in zip(tiers.tables, tiers.slots, strict=True)),
        lookups=moved["lookups"] / TIMED,
        rows=moved["rows"] / TIMED,
        misses=(moved["rows"] - moved["hit_rows"]) / TIMED,
        read_rows=moved["read_rows"] / TIMED,
        reads=moved["reads"] / TIMED,
        read_bytes=moved["read_bytes"] / TIMED,
        written_rows=moved["written_rows"] / TIMED,
        writes=moved["writes"] / TIMED,
        written_bytes=moved["written_bytes"] / TIMED,
    )


def _points(
    work: Work, traffic: Traffic | None, steps: Sequence[Mapping[str, float]], others: float
) -> Iterator[tuple[str, Point]]:
    amounts = amounts_of(work, traffic)
    for phase in PHASES:
        taken = [step[phase] for step in steps]
        if sorted(taken)[len(taken) // 4] > 0:
            yield phase, point_of(work.threads, amounts[phase], taken, others)


def point_of(threads: int, amounts: Amounts, taken: Sequence[float], others: float) -> Point:
    """Returns a point. others: as for `note_of`."""
    sizes = {"threads": float(threads), **{kind: _rounded(amount) for kind, amount in amounts.items() if amount > 0}}
    return Point(sizes, Figure.of([*map(_rounded, taken)], note_of(others)))


def note_of(others: float) -> str:
    """Returns the note of a figure. others: the share of the time in which other work had the processors."""
    return f"{DISTURBED}: other work had the processors for {others:.0%} of the time" if others > CLEAN_SHARE else ""


def _rounded(value: float) -> float:
    """Returns six digits: more would only make the file longer."""
    return float(f"{value:.6g}")


# ---- windows of the loader

WINDOW_SHAPES = ((1 << 14, 4, 4, 0), (1 << 15, 13, 20, 0), (1 << 14, 2, 4, 2), (1 << 14, 2, 2, 4), (1 << 16, 2, 3, 1))
"""Rows, dense columns, features of one id, and features with lists."""
WINDOW_ROUNDS = 3
LIST_LENGTH = 6
"""Mean ids of a list."""


def _windows(threads: Sequence[int], seconds: float) -> dict[str, list[Point]]:
    """Times the first batch of an epoch on packed datasets: in the first epoch rows are checked too."""
    generator, started, taken = np.random.default_rng(SEED), time.perf_counter(), []
    for num_rows, num_dense, num_single, num_lists in WINDOW_SHAPES:
        if time.perf_counter() - started > seconds:
            break
        lengths = (1.0,) * num_single + (float(LIST_LENGTH),) * num_lists
        config = make_config({"data": "probe"})
        shape = Shape(config=config, num_dense=num_dense, rows=(100_000,) * len(lengths), zipf=1.0, lengths=lengths)
        with _own_folder() as folder:
            dataset = _packed(folder / "data", shape, num_rows, generator)
            for checked in (True, False):
                amounts, disturbance, rounds = _window_amounts(shape, num_rows, checked=checked), Disturbance(), []
                for _ in range(WINDOW_ROUNDS):
                    split = PackedDataset.open(dataset.path).split("train")
                    if not checked:
                        split.verify()
                    rounds.append(_window_s(split))
                taken.append((amounts, rounds, disturbance.share()))
    return {"window": [point_of(number, *point) for point in taken for number in threads]}


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yields an empty folder, which is removed: by the next probe or run with files there if this process is killed."""
    own = OwnFolder(Path(tempfile.gettempdir()))
    try:
        (inside := own.path / f"window{SUFFIX}").mkdir()
        yield inside
    finally:
        own.remove()


def _window_s(split: Split) -> float:
    """Returns what the first batch of an epoch takes beyond the second."""
    batches = Loader(split, min(256, split.num_rows // 2), shuffle_seed=1).epoch(0)
    marks = [time.perf_counter()]
    for _ in range(2):
        next(batches)
        marks.append(time.perf_counter())
    return max(1e-9, marks[1] - marks[0] - (marks[2] - marks[1]))


def _window_amounts(shape: Shape, num_rows: int, *, checked: bool) -> Amounts:
    tables = tuple(
        TableWork(
            table=TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=4, feature_names=(f"t{t}",)),
            lookups=length,
            rows=length,
            record_bytes=16,
            jagged=length != 1,
        )
        for t, (rows, length) in enumerate(zip(shape.rows, shape.lengths, strict=True))
    )
    work = Work(
        batch_size=1,
        num_dense=shape.num_dense,
        products=(),
        tables=tables,
        optimizer="sgd",
        dense_optimizer="sgd",
        precision="fp32",
        threads=1,
        gathered_samples=num_rows,
        verified_samples=num_rows if checked else 0,
    )
    return amounts_of(work)["window"]


def _packed(folder: Path, shape: Shape, num_rows: int, generator: np.random.Generator) -> PackedDataset:
    block = Drawn(shape, num_rows, generator).block(0)
    ids = {
        name: tuple(own) if isinstance(own, Ragged) else own
        for name, own in zip(shape.info.feature_names, block.ids, strict=True)
    }
    with PackedWriter(folder, shape.info) as writer:
        writer.append("train", block.label, np.stack(block.dense, axis=1), cast(Any, ids))
        return writer.close()

"""The cells of the study `memory`: training with DRAM for a part of the tables, or for all.

    all in DRAM   | settle, steps |               | settle, steps |          one process, not limited
    a side        |               | settle, steps |               | ...      another, in a memory cgroup

Stretches of steps alternate, so that no two compute at once; a round is one of each. Both see the same batches from the
same weights, and a side whose losses differ in a bit is refused. Who the sides are: sides.py and stores.py.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bench
from benchmarks.rivals import stores
from benchmarks.rivals.sides import Settings
from benchmarks.rivals.work import Work, shared_batches, trace_rows
from benchmarks.rivals.worker import Worker, WorkerError
from benchmarks.study.group import GroupError, MemoryGroup
from benchmarks.synthetic_config import KAGGLE_ROWS
from hotrow.batch import Batch

SLACK_BYTES = {"tiers": 64 << 20, "mmap": 64 << 20, "rocksdb": 128 << 20}
"""Memory beside the budget and what a process used before it had tables: for allocators, and RocksDB's threads and
buffers."""
ENOUGH = 0.9
"""The share of the speed in DRAM that a smaller machine must reach to count as a replacement."""
SETUP_S, BUILT_BYTES_PER_S, STEP_S, TABLE_STEP_S = 10.0, 1.4e8, 0.011, 0.0004
SLOWER = {"tiers": 1.6, "mmap": 3.0, "rocksdb": 5.0}
"""Step time relative to DRAM on a machine with two cores; used in the estimate only."""


class LossError(AssertionError):
    """A side's losses differ from those of training in DRAM."""


@dataclass(frozen=True, kw_only=True)
class MemoryCell:
    """One measurement: a side, its DRAM, and its look-ahead."""

    group: str
    side: str
    """tiers | mmap | rocksdb"""
    dram_parts: int
    """DRAM is the tables' bytes divided by this."""
    ahead: int
    """Batches whose rows are requested early: the look-ahead depth of tiers, or madvise of mmap; rocksdb has none."""
    io: str = "auto"
    zipf: float | None = None
    trace: str | None = None
    scale: float = 1.0
    """The share of the rows of Criteo Kaggle's tables."""
    embedding_dim: int = 64
    batch_size: int = 2048
    threads: int = 2
    rounds: int = 10
    steps: int = 50
    settle: int = 10
    """Steps at the start of a stretch that do not count."""
    turns: int = 2000
    """Upper limit on the batches that pass through the cache before the first step, so that it holds what it keeps."""
    warm_up: int = 100
    """Steps before the first round."""
    checkpoint_steps: int = 0
    """Steps between two checkpoints after the rounds; the second is timed. 0: no checkpoint. Only tiers save them."""

    @property
    def key(self) -> str:
        """The name of the cell in files."""
        source = f"zipf{self.zipf:g}" if self.trace is None else Path(self.trace).name
        io = "" if self.io == "auto" else f"_{self.io}"
        shape = f"{self.scale:g}x{self.embedding_dim}x{self.batch_size}"
        return f"{self.group}/{self.side}{io}/dram{self.dram_parts}/{source}/ahead{self.ahead}/{shape}/{self.threads}t"

    @property
    def source(self) -> str:
        """The source of the ids, in words."""
        return f"Zipf {self.zipf:g}" if self.trace is None else Path(self.trace).name

    @property
    def work(self) -> Work:
        """The model and its batches."""
        rows = tuple(max(3, int(n * self.scale)) for n in KAGGLE_ROWS) if self.trace is None else rows_of(self.trace)
        return Work(
            rows=rows, embedding_dim=self.embedding_dim, batch_size=self.batch_size, zipf=self.zipf, trace=self.trace
        )

    @property
    def dram_bytes(self) -> int:
        """DRAM for the tables."""
        return self.work.table_bytes // self.dram_parts


rows_of = functools.lru_cache(maxsize=32)(trace_rows)


def expand(group: Mapping[str, Any], axes: Mapping[str, Any], *, memory_bytes: int) -> list[MemoryCell]:
    """Returns the cells of a group of the preset; `variants` are pairs of a side and its look-ahead."""
    cells = []
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        for side, ahead in group["variants"]:
            cells.append(MemoryCell(group=group["name"], side=side, ahead=ahead, **{**group["fixed"], **chosen}))
    return cells


def setup_of(cell: MemoryCell) -> tuple[Any, ...]:
    """Returns a value that is equal for cells that are measured by the same processes on the same files."""
    return tuple(str(value) for name, value in asdict(cell).items() if name not in ("ahead", "group"))


def refusal(cell: MemoryCell, *, memory_bytes: int, cores: int) -> str | None:
    """Returns why the cell cannot be measured here, or None."""
    wanted = cell.work.table_bytes * (1 + 1 / cell.dram_parts)
    if wanted > memory_bytes:
        return f"both sides need {wanted / 1e9:.1f} GB, --memory allows {memory_bytes / 1e9:.1f} GB"
    if cell.threads > cores:
        return f"{cell.threads} threads, but this process may use {cores} cores"
    if batch_bytes(cell.work) > cell.dram_bytes:
        return f"the different rows of a batch take more than its DRAM: {batch_bytes(cell.work) / 1e6:.1f} MB"
    slack = SLACK_BYTES[cell.side]
    if cell.side == "mmap" and cell.dram_bytes < slack:
        return (
            f"beside its DRAM a process has {slack / 1e6:.0f} MB, in which the page cache would hold more of the files "
            "than in that"
        )
    return stores.missing(cell.side) or group_refused()


@functools.lru_cache(maxsize=64)
def batch_bytes(work: Work) -> int:
    """Returns the bytes of the distinct rows of the first batch."""
    sparse = next(work.batches()).sparse
    return 4 * work.embedding_dim * sum(len(np.unique(sparse.bags(key)[0])) for key in sparse.keys)


@functools.cache
def group_refused() -> str | None:
    """Returns why no memory group can be made here, or None."""
    try:
        with MemoryGroup():
            return None
    except GroupError as error:
        return str(error)
    except OSError as error:
        return f"no memory group can be made: {error}"


def estimate_s(cells: Sequence[MemoryCell]) -> float:
    """Returns about how many seconds the cells take: the tables on disk, then the steps of both sides."""
    setups = {setup_of(cell): cell for cell in cells}.values()
    built = sum(SETUP_S + setup.work.table_bytes / BUILT_BYTES_PER_S for setup in setups)
    return built + sum(
        (1 + SLOWER[c.side])
        * (STEP_S + TABLE_STEP_S * len(c.work.rows))
        * (c.warm_up + c.rounds * (c.settle + c.steps))
        for c in cells
    )


def headline(row: Mapping[str, Any]) -> str:
    """Returns the main figure of a row."""
    low, high = row["spread"]
    return f"{row['relative_speed']:.0%} ({low:.0%} .. {high:.0%}) of the speed in DRAM  {bench.how_clean(row)}"


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the page needs beside the rows."""
    return {"machines": machines(rows)}


# ---- measuring

FAILURES = (GroupError, WorkerError)
"""Errors that end the cells of one setup but not the study."""


def measure(cells: Sequence[MemoryCell], *, quick: bool, folder: Path) -> Iterator[tuple[MemoryCell, dict[str, Any]]]:
    """Calls `run` with files below `folder`. The preset says what a quick cell is."""
    return run(cells, folder=folder)


def run(cells: Sequence[MemoryCell], *, folder: Path | None = None) -> Iterator[tuple[MemoryCell, dict[str, Any]]]:
    """Yields the cells, all of one `setup_of`, with their rows. Raises WorkerError, GroupError and LossError.

    folder: for the files of tables while this runs, on the disk to measure.
    """
    first = cells[0]
    with ExitStack() as stack:
        there = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotrow-study-", dir=folder or Path()))
        settings = Settings(dram_bytes=first.dram_bytes, folder=there, io=first.io, turns=first.turns)
        group = MemoryGroup()
        side = stack.enter_context(Worker(first.side, first.work, settings, threads=first.threads, group=group))
        dram = stack.enter_context(Worker("dram", first.work, settings, threads=first.threads))
        side.ready()
        dram.ready()
        base = group.used_bytes()
        limit = base + settings.dram_bytes + SLACK_BYTES[first.side]
        group.limit(limit)
        facts = {**side.ask(do="build"), "base_bytes": base, "limit_bytes": limit, "built_bytes": group.used_bytes()}
        dram.ask(do="build")
        feed = Feed(first.work)
        turns = Turns(feed, dram, side)
        turns.stretch(first, steps=first.warm_up, ahead=cells[0].ahead)
        rounds = measure_rounds(turns, cells)
        used = {"peak_bytes": group.peak_bytes(), "end_bytes": group.used_bytes()}
        facts |= {**used, "steps_compared": turns.num_compared}
        for cell in cells:
            yield cell, row_of(cell, rounds[cell.key], {**facts, **checkpoint_of(feed, side, cell)})


def checkpoint_of(feed: Feed, side: Worker, cell: MemoryCell) -> dict[str, Any]:
    """Saves two checkpoints, `checkpoint_steps` apart; returns the seconds and bytes of the second."""
    if not cell.checkpoint_steps:
        return {}
    side.ask(do="save")
    for left in range(cell.checkpoint_steps, 0, -cell.steps):  # a stretch holds its batches in memory
        feed.train([side], settle=0, steps=min(cell.steps, left), ahead=cell.ahead)
    return side.ask(do="save")


class Feed:
    """The batches that the workers have not trained on yet."""

    def __init__(self, work: Work) -> None:
        self._source, self._waiting = work.batches(), deque[Batch]()

    def train(self, workers: Sequence[Worker], *, settle: int, steps: int, ahead: int) -> list[dict[str, Any]]:
        """Lets the workers train one after the other; returns their answers. Look-ahead batches are used again."""
        wanted = settle + steps + ahead
        self._waiting.extend(islice(self._source, max(0, wanted - len(self._waiting))))
        with shared_batches([*islice(self._waiting, wanted)]) as path:
            stretch = {"batches": path, "settle": settle, "steps": steps, "ahead": ahead}
            answers = [worker.ask(do="train", **stretch) for worker in workers]
        for _ in range(settle + steps):
            self._waiting.popleft()
        return answers


class Turns:
    """Both processes, which train in alternating stretches."""

    def __init__(self, feed: Feed, dram: Worker, side: Worker) -> None:
        self.feed, self.dram, self.side = feed, dram, side
        self.num_compared = self._number = 0

    def stretch(self, cell: MemoryCell, *, steps: int, ahead: int) -> dict[str, Any]:
        """Trains the same steps on both sides, in alternating order: {"dram": ..., "side": ..., "disturbed": share}."""
        self._number += 1
        workers = {"dram": self.dram, "side": self.side}
        order = sorted(workers, reverse=self._number % 2 == 0)
        disturbance = bench.Disturbance([worker.pid for worker in workers.values()], of_disk=True)
        settle = max(cell.settle, ahead)
        found = self.feed.train([workers[name] for name in order], settle=settle, steps=steps, ahead=ahead)
        disturbed, answers = disturbance.share(), dict(zip(order, found, strict=True))
        check_losses(cell.key, self.num_compared, answers["dram"]["losses"], answers["side"]["losses"])
        self.num_compared += len(answers["dram"]["losses"])
        return {**answers, "disturbed": disturbed}


def check_losses(key: str, first_step: int, wanted: Sequence[str], found: Sequence[str]) -> None:
    """Raises LossError, which names the first step whose losses differ in a bit."""
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if a != b or not math.isfinite(float.fromhex(a)):
            raise LossError(
                f"cell {key}: the loss of step {first_step + i} is {float.fromhex(b)!r}, in DRAM "
                f"{float.fromhex(a)!r}: where rows lie has changed the result. Run the law tests (make test)"
            )


def measure_rounds(turns: Turns, cells: Sequence[MemoryCell]) -> dict[str, bench.Rounds[Mapping[str, Any]]]:
    """Takes rounds of each cell while bench.wants_more; a round visits every cell that wants one."""
    taken: dict[str, list[tuple[float, Mapping[str, Any]]]] = {cell.key: [] for cell in cells}
    while wanting := [cell for cell in cells if bench.wants_more(taken[cell.key], cell.rounds)]:
        for cell in wanting:
            found = turns.stretch(cell, steps=cell.steps, ahead=cell.ahead)
            taken[cell.key].append((found["disturbed"], found))
    return {cell.key: bench.cleanest(taken[cell.key], cell.rounds) for cell in cells}


def row_of(cell: MemoryCell, rounds: bench.Rounds[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of a measured cell."""
    kept = rounds.results
    ratios = [r["dram"]["seconds"] / r["side"]["seconds"] for r in kept]
    sides = [r["side"] for r in kept]
    return {
        "key": cell.key,
        "name": cell.key,
        **asdict(cell),
        "source": cell.source,
        "dram_share": 1 / cell.dram_parts,
        "table_bytes": cell.work.table_bytes,
        "relative_speed": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "step_ms": 1e3 * statistics.median(s["seconds"] for s in sides) / cell.steps,
        "dram_step_ms": 1e3 * statistics.median(r["dram"]["seconds"] for r in kept) / cell.steps,
        "samples_per_s": cell.batch_size * cell.steps / statistics.median(s["seconds"] for s in sides),
        "dram_cpu_ms": 1e3 * statistics.median(r["dram"]["cpu_s"] for r in kept) / cell.steps,
        **shares_of(sides, cell.steps),
        **facts,
        **rounds.counts(),
    }


def shares_of(sides: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Returns hit rates, waiting and traffic of a side over its stretches; None for what it does not count."""
    total = {name: sum(side[name] for side in sides) for name in sides[0] if name not in ("losses", "steps_s")}
    num_steps = steps * len(sides)

    def share(part: str, whole: str) -> float | None:
        return total[part] / total[whole] if total.get(whole) and part in total else None

    def per_step(*names: str, scale: float = 1.0) -> float | None:
        name = next((name for name in names if name in total), None)
        return None if name is None else scale * total[name] / num_steps

    total["hits"] = total.get("hit_lookups", 0) + total.get("pinned_lookups", 0)
    times = sorted(1e3 * s for side in sides for s in side["steps_s"])
    return {
        "hit_rate": share("hits", "lookups"),
        "row_hit_rate": share("hit_rows", "rows"),
        "stall_share": share("wait_s", "seconds"),
        "admit_ms": per_step("admit_s", scale=1e3),
        "check_ms": per_step("is_of_s", scale=1e3),
        "release_ms": per_step("release_s", scale=1e3),
        "blocked_ms": per_step("blocked_ns", scale=1e-6),
        "drain_ms": per_step("drain_s", scale=1e3),
        "cpu_ms": per_step("cpu_s", scale=1e3),
        "io_cpu_ms": per_step("io_cpu_ns", scale=1e-6),
        "refused_advice_per_step": per_step("refused_advice"),
        "rows_per_step": per_step("rows"),
        "overflow_rows_per_step": per_step("overflow_rows"),
        "read_rows_per_step": per_step("read_rows"),
        "evicted_rows_per_step": per_step("evicted_rows"),
        "reads_per_step": per_step("reads"),
        "writes_per_step": per_step("writes"),
        "bytes_read_per_step": per_step("read_bytes", "disk_read_bytes"),
        "bytes_written_per_step": per_step("written_bytes", "disk_write_bytes"),
        "p50_ms": times[len(times) // 2],
        "p99_ms": times[int(0.99 * (len(times) - 1))],
    }


def machines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns how many machines one replaces, at the least DRAM where tiers keep ENOUGH of the speed, by source."""
    found = []
    for source in sorted({row["source"] for row in rows}):
        own = [row for row in rows if row["source"] == source and row["side"] == "tiers" and row["ahead"]]
        held = [row["dram_parts"] for row in own if row["relative_speed"] >= ENOUGH]
        found.append({"source": source, "machines_in_dram": max(held, default=1), "measured": bool(own)})
    return found


def with_data(preset: Mapping[str, Any], traces: Sequence[str]) -> dict[str, Any]:
    """Returns the preset with these paths in its group of traces; without paths the group is left out."""
    groups = []
    for group in preset["groups"]:
        if "trace" not in group["axes"]:
            groups.append(group)
        elif traces:
            groups.append({**group, "axes": {**group["axes"], "trace": [*traces]}})
    return {**preset, "groups": groups}

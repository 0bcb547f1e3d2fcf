"""The sides of the study `memory`: all in DRAM, hotrow's tiers, and the stores of stores.py, one process each.

A side holds tables, looks up and updates; `Side.train` takes a stretch of steps and says what they took.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from benchmarks.rivals.work import LR, SEED, Training, Work
from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.placement.budget import Memory
from hotrow.placement.dram import Dram
from hotrow.placement.lookahead import lookahead
from hotrow.placement.tiers import Flight, Tiers
from hotrow.run.checkpoint import Part, save_checkpoint
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.meters import GAUGES
from hotrow.setup.divide import plan_by_counts
from hotrow.tables import TableConfig

ZEROS_BYTES = 1 << 23
WORN_ROWS, WORN_SHARE = 1 << 15, 1.25
"""Rows that are rewritten together, and how often each is on average."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a side."""

    dram_bytes: int
    """DRAM for the tables; the side that has all tables in DRAM ignores it."""
    folder: str
    """Folder for files, on the disk to measure."""
    io: str = "auto"
    """How hotrow's block stores read: io_uring, threads, or auto."""
    turns: int = 2000
    """Upper limit on the batches that pass through the cache before training."""


class Side:
    """All tables in DRAM. Other sides override `build` and whatever else differs."""

    def __init__(self, work: Work, settings: Settings) -> None:
        self.work, self.settings = work, settings
        self.seconds: dict[str, float] = {}
        """Seconds since the start of the process, by what the side waited for or did."""
        self.num_saved = 0

    def build(self) -> None:
        """Makes tables whose rows lie where they would after long training."""
        self.use(EmbeddingCollection(self.work.tables, seed=SEED))

    def use(self, emb: EmbeddingCollection) -> None:
        """Uses these tables, and dense layers with fixed initial weights."""
        self.emb = emb
        self.tables = SGD(emb, LR)
        self.training = Training(self.work)

    def coming(self, batches: Iterable[Batch], ahead: int) -> Iterator[Batch]:
        """Yields the batches. Sides that can look `ahead` so many batches."""
        yield from batches

    def step(self, batch: Batch) -> Tensor:
        """Trains on the batch and returns the loss."""
        return self.training.step(self.emb, self.tables, batch)

    def drain(self) -> None:
        """Waits until all work that a step left behind is done."""

    def save(self) -> dict[str, Any]:
        """Saves a checkpoint (tiers: the rows that changed since the last one); returns its seconds and bytes.

        Checkpoints are kept, because the next one links to their files; they are removed with the folder.
        """
        parts: dict[str, Part] = {"embedding": self.emb, "sparse_optimizer": self.tables}
        parts |= {"model": self.training.model, "dense_optimizer": self.training.optimizer}
        path = Path(self.settings.folder) / f"checkpoint-{self.num_saved}"
        self.num_saved += 1
        start = time.perf_counter()
        save_checkpoint(path, parts)
        seconds = time.perf_counter() - start
        return {"checkpoint_s": seconds, "checkpoint_bytes": read_manifest(path).written_bytes}

    def facts(self) -> dict[str, Any]:
        """Returns rows and bytes on disk."""
        return {"rows_on_disk": 0, "disk_bytes": 0}

    def counters(self) -> dict[str, float]:
        """Returns counters that grow while a side trains."""
        return {}

    def train(self, batches: Sequence[Batch], *, settle: int, steps: int, ahead: int) -> dict[str, Any]:
        """Trains `settle` steps, then `steps` that count, and waits for their writes; returns what that took.

        batches: those to train on, and `ahead` more to look ahead to.
        """
        losses: list[Tensor] = []
        times: list[float] = []
        before: dict[str, float] = {}
        source = self.coming(batches, ahead)
        for number in range(settle + steps):
            if number == settle:
                self.drain()  # so that the writes at the end belong to these steps alone
                before = self._counted()
            start = time.perf_counter()
            losses.append(self.step(next(source)))
            times.append(time.perf_counter() - start)
        stop = time.perf_counter()
        self.drain()
        now = self._counted()
        counted = {name: value - before[name] for name, value in now.items()}
        source.close()  # type: ignore[attr-defined]
        return {
            "losses": [float(loss).hex() for loss in losses],
            "drain_s": time.perf_counter() - stop,
            "steps_s": times[settle:],
            **counted,
        }

    def _counted(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": time.perf_counter(),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "major_faults": usage.ru_majflt,
            **disk_bytes_moved(),
            **{f"{name}_s": value for name, value in self.seconds.items()},
            **self.counters(),
        }


class InTiers(Side):
    """Training with hotrow's tiers."""

    def build(self) -> None:
        """Makes tables whose every row exists and has its place on disk."""
        plan = plan_by_counts(self.work.counts(), num_steps=1)  # as with the counts of a prepared dataset
        memory = Memory(dram=self.settings.dram_bytes, ssd=self.settings.folder, io=self.settings.io, plan=plan)  # type: ignore[arg-type]
        self.use(EmbeddingCollection(self.work.tables, memory=memory, seed=SEED))
        tiers = self.emb.placement.find(Tiers)
        assert tiers is not None
        self.tiers: Tiers = tiers
        for store in self.tiers.stores:
            if store.path is not None:
                write_zeros(store.path)
        self.tiers.write_every_row()
        self.wear()
        self.rows_on_disk = self.counters()["evicted_rows"]
        self.turn_over()
        self.drain()
        for owner, method in ((Flight, "wait"), (Flight, "is_of"), (Flight, "release"), (Tiers, "_admit")):
            self.stopwatch(owner, method)

    def wear(self) -> None:
        """Rewrites rows at random, until the free places in log-structured files lie as after long training.

        A file that was written in order has whole pages free; of those that stay so the first rows that leave would
        profit, and none later.
        """
        generator = np.random.default_rng(SEED)
        for store, slots, parts in zip(self.tiers.stores, self.tiers.slots, self.tiers.parts(), strict=True):
            if store.kind != "gathered":
                continue
            for first in range(slots.pinned, store.rows.num_rows, WORN_ROWS):
                rows = np.arange(first, min(first + WORN_ROWS, store.rows.num_rows))
                records = [np.empty((len(rows), part[:1].nbytes), np.uint8) for part in parts]
                store.read(rows, rows - first, records)
                again = generator.integers(first, rows[-1] + 1, int(WORN_SHARE * len(rows)))
                store.write(again, again - first, records)

    def turn_over(self) -> None:
        """Passes at most `turns` batches through the cache, without training, until as many rows have left as it holds.

        The rows cached are then those that the cache keeps by itself, and no longer those that are looked up most.
        """
        wanted = self.rows_on_disk + sum(slots.cached for slots in self.tiers.slots)
        for batch in islice(self.work.batches(stream=1), self.settings.turns):
            self.tiers.announce(batch.sparse)
            flight, _ = self.tiers.take(batch.sparse, training=True)
            flight.release(updated=True)
            if self.counters()["evicted_rows"] >= wanted:
                return

    def stopwatch(self, owner: type, method: str) -> None:
        """Adds up the seconds of a method from now on. It patches the class, as this process only measures."""
        real, name = getattr(owner, method), method.strip("_")
        self.seconds[name] = 0.0

        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args, **named)
            finally:
                self.seconds[name] += time.perf_counter() - start

        setattr(owner, method, timed)

    def coming(self, batches: Iterable[Batch], ahead: int) -> Iterator[Batch]:
        """Yields the batches through a look-ahead."""
        yield from lookahead(batches, self.emb, depth=ahead)

    def drain(self) -> None:
        """Waits until no write is pending."""
        while any(store.counters()["waiting_bytes"] for store in self.tiers.stores):
            time.sleep(0.0005)

    def facts(self) -> dict[str, Any]:
        """Returns rows and bytes on disk, and how the tables are stored."""
        files = [store.path for store in self.tiers.stores if store.path is not None]
        return {
            "rows_on_disk": int(self.rows_on_disk),
            "disk_bytes": sum(file.stat().st_blocks * 512 for file in files),
            "whole_tables": len(self.tiers.stores) - len(files),
            "pinned_rows": sum(slots.pinned for slots in self.tiers.slots),
            "cached_rows": sum(slots.cached for slots in self.tiers.slots),
            "writes": self.tiers.memory.writes,
            "places_bytes": sum(store.counters()["places_bytes"] for store in self.tiers.stores),
            "fallback": next((store.fallback for store in self.tiers.stores if store.fallback), None),
        }

    def counters(self) -> dict[str, float]:
        """Returns the sums over all tables of the counters in row_cache.h and store.h."""
        tables = self.tiers.counters().values()
        total = {name: float(sum(table[name] for table in tables)) for name in next(iter(tables))}
        return {name: value for name, value in total.items() if name not in GAUGES}


def disk_bytes_moved() -> dict[str, float]:
    """Returns the bytes that this process moved from and to the disk. Reads served by the page cache do not count."""
    file = Path("/proc/self/io")
    if not file.exists():
        return {}
    fields = dict(line.split(": ") for line in file.read_text().splitlines())
    return {"disk_read_bytes": float(fields["read_bytes"]), "disk_write_bytes": float(fields["write_bytes"])}


@contextmanager
def past_page_cache(path: Path) -> Iterator[int]:
    """Yields a descriptor for large writes that leave nothing in the page cache, if the file system allows that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_zeros(path: Path, *, start: int = 4096) -> None:
    """Fills the holes of a file from `start`: writing into a hole is much slower than overwriting."""
    size = path.stat().st_size
    with past_page_cache(path) as descriptor, mmap.mmap(-1, ZEROS_BYTES) as zeros:
        for offset in range(start, size, ZEROS_BYTES):
            with memoryview(zeros)[: min(ZEROS_BYTES, size - offset)] as piece:
                os.pwrite(descriptor, piece, offset)


def collection_over(tables: Sequence[TableConfig], weights: Sequence[Tensor]) -> EmbeddingCollection:
    """Returns a collection whose tables are the arrays `weights` [N, D]: hotrow's kernels on another store's memory."""
    return EmbeddingCollection(tables, memory=_Over(weights))


class _Over(NamedTuple):
    """The recipe of tables that lie in arrays which exist already."""

    weights: Sequence[Tensor]

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Dram:
        return Dram(tables, seed=seed, weights={t.name: w for t, w in zip(tables, self.weights, strict=True)})

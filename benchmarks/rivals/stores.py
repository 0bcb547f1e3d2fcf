"""Other stores for the study `memory`: whole tables as mapped files, and RocksDB behind a cache of rows.

Both compute with hotrow's kernels on memory of their own, so that what differs is how rows come and go, and their
losses must equal those in DRAM to the bit as ours must. They are rivals only: hotrow trains with neither.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib
import importlib.util
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.rivals.sides import Settings, Side, collection_over, past_page_cache
from benchmarks.rivals.work import SEED, Work
from hotrow.batch import Batch
from hotrow.kernels import ops
from hotrow.kernels.types import row_key
from hotrow.tables import TableConfig

PAGE_BYTES = mmap.PAGESIZE
PIECE_ROWS = 1 << 15
ROCKS_THREADS = 16
ROCKS_BYTES_PER_ROW = 4
"""Memory that RocksDB needs for filters (10 bits a key) and the index (about 40 bytes per block of 4 KiB)."""
MEMTABLE_BYTES = 8 << 20
PIDFD_OPEN, PROCESS_MADVISE = 434, 440  # the same on every architecture of Linux
MADV_WILLNEED, MAX_RANGES = 3, 1024


def initial_rows(table: TableConfig) -> Iterator[tuple[int, Tensor]]:
    """Yields (first row, rows [n, D]) of the values that every side starts from."""
    bound, key = table.init.bound_for(table.num_embeddings), row_key(SEED, table.name)
    for first in range(0, table.num_embeddings, PIECE_ROWS):
        rows = ops.allocate(min(PIECE_ROWS, table.num_embeddings - first), table.embedding_dim)
        ops.fill_uniform(rows, key=key, bound=bound, zero_rows=table.init.zero_rows, first_row=first)
        yield first, rows


# ---- mapped files


class Mapped(Side):
    """Every table is a mapped file; the pages of the next batch are requested while this one is trained on."""

    def build(self) -> None:
        """Writes and maps the files."""
        self.files = [self._write(table) for table in self.work.tables]
        arrays = [np.memmap(file, np.float32, "r+", shape=(n, self.work.embedding_dim)) for file, n in self._sizes()]
        for array in arrays:
            array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        self.starts = np.array([array.ctypes.data for array in arrays])
        self.process = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_OPEN, os.getpid(), 0)
        self.refused_calls = 0
        self.use(collection_over(self.work.tables, [torch.from_numpy(array) for array in arrays]))

    def _sizes(self) -> Iterator[tuple[Path, int]]:
        return zip(self.files, self.work.rows, strict=True)

    def _write(self, table: TableConfig) -> Path:
        path = Path(self.settings.folder) / f"{table.name}.mapped"
        with path.open("wb") as file:
            for _, rows in initial_rows(table):
                file.write(rows.numpy().tobytes())
        with past_page_cache(path):
            pass  # leaving the block syncs the file and drops it from the page cache
        return path

    def coming(self, batches: Iterable[Batch], ahead: int) -> Iterator[Batch]:
        """Yields each batch, while another thread requests the pages of the batch that is `ahead` of it."""
        waiting: deque[Batch] = deque()
        with ThreadPoolExecutor(1) as adviser:
            for batch in batches:
                if ahead:
                    adviser.submit(self._advise, batch)
                waiting.append(batch)
                if len(waiting) > ahead:
                    yield waiting.popleft()

    def _advise(self, batch: Batch) -> None:
        """Calls MADV_WILLNEED for every page with a row of the batch, many ranges at a time."""
        sizes = np.array([len(batch.sparse.bags(key)[0]) for key in batch.sparse.keys])
        addresses = np.repeat(self.starts, sizes) + batch.sparse.values.numpy() * (4 * self.work.embedding_dim)
        pages = np.unique(addresses // PAGE_BYTES)
        ranges = np.stack([pages * PAGE_BYTES, np.full_like(pages, PAGE_BYTES)], 1)
        call = ctypes.CDLL(None, use_errno=True).syscall
        for first in range(0, len(ranges), MAX_RANGES):
            part = np.ascontiguousarray(ranges[first : first + MAX_RANGES])
            pointer = ctypes.c_void_p(part.ctypes.data)
            done = call(PROCESS_MADVISE, self.process, pointer, ctypes.c_size_t(len(part)), MADV_WILLNEED, 0)
            self.refused_calls += done < 0

    def facts(self) -> dict[str, Any]:
        """Returns rows and bytes of the files."""
        disk_bytes = sum(file.stat().st_blocks * 512 for file in self.files)
        return {"rows_on_disk": sum(self.work.rows), "disk_bytes": disk_bytes}

    def counters(self) -> dict[str, float]:
        """Returns the number of madvise calls that the system refused."""
        return {"refused_advice": float(self.refused_calls)}


# ---- RocksDB


class RowLru:
    """Which rows are in which of `num_slots` slots; the least recently used leave. Works on arrays, a batch at a time.

    Uses are appended to a log; what leaves is taken from its front, where an entry that is not its slot's last is
    skipped. The log is rid of such entries when it has grown to four times the slots.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.slot_of = np.full(num_rows, -1, np.int32)
        self.row_of = np.full(num_slots, -1, np.int64)
        self.last = np.zeros(num_slots, np.int64)
        self.num_used, self.now = 0, 0
        self.log: deque[tuple[int, np.ndarray[Any, Any]]] = deque()
        self.log_length = 0
        self.lookups = self.missed = 0

    def take(self, rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Returns, for distinct rows: slots, mask of absent rows, rows that left, and the slots they left."""
        self.now += 1
        slots = self.slot_of[rows]
        absent = slots < 0
        self.last[slots[~absent]] = self.now
        wanted = int(absent.sum())
        self.lookups, self.missed = self.lookups + len(rows), self.missed + wanted
        fresh = np.arange(self.num_used, min(self.num_used + wanted, len(self.row_of)), dtype=np.int32)
        self.num_used += len(fresh)
        freed = self._oldest(wanted - len(fresh))
        left = self.row_of[freed]
        self.slot_of[left] = -1
        slots[absent] = np.concatenate([fresh, freed])
        self.slot_of[rows], self.row_of[slots], self.last[slots] = slots, rows, self.now
        self._append(self.now, slots)
        return slots, absent, left, freed

    def _append(self, when: int, slots: np.ndarray[Any, Any]) -> None:
        self.log.append((when, slots))
        self.log_length += len(slots)
        if self.log_length > 4 * len(self.row_of) + 4 * len(slots):
            self.log = deque((then, used[self.last[used] == then]) for then, used in self.log)
            self.log_length = sum(len(used) for _, used in self.log)

    def _oldest(self, count: int) -> np.ndarray[Any, Any]:
        found = [np.empty(0, np.int32)]
        while count > 0:
            if not self.log:
                raise ValueError(f"a batch needs {count} rows more than the cache's {len(self.row_of)}; raise dram")
            when, used = self.log.popleft()
            self.log_length -= len(used)
            alive = used[self.last[used] == when]
            found.append(alive[:count])
            if len(alive) > count:
                self.log.appendleft((when, alive[count:]))
                self.log_length += len(alive) - count
            count -= len(found[-1])
        return np.concatenate(found)


class Rocks(Side):
    """RocksDB on 16 threads with direct reads, behind a cache of rows that the steps read and change."""

    def __init__(self, work: Work, settings: Settings) -> None:
        super().__init__(work, settings)
        self.starts = np.concatenate([[0], np.cumsum(work.rows)])
        own = 2 * MEMTABLE_BYTES + ROCKS_BYTES_PER_ROW * sum(work.rows)
        num_slots = max(settings.dram_bytes - own, settings.dram_bytes // 4) // (4 * work.embedding_dim + 8)
        self.lru = RowLru(int(self.starts[-1]), min(num_slots, int(self.starts[-1])))
        self.slots = ops.allocate(len(self.lru.row_of), work.embedding_dim)

    def build(self) -> None:
        """Fills the database."""
        self.rocks = importlib.import_module("rocksdict")
        self.path = Path(self.settings.folder) / "rocks"
        self.db = self.rocks.Rdict(str(self.path), self._options())
        self._ingest()
        self.unlogged = self.rocks.WriteOptions()
        self.unlogged.disable_wal = True
        self.pool = ThreadPoolExecutor(ROCKS_THREADS)
        tables = [replace(table, num_embeddings=len(self.slots)) for table in self.work.tables]
        self.use(collection_over(tables, [self.slots[:] for _ in tables]))

    def _options(self) -> Any:
        options = self.rocks.Options(raw_mode=True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(self.rocks.DBCompressionType.none())
        options.set_write_buffer_size(MEMTABLE_BYTES)
        options.increase_parallelism(os.cpu_count() or 1)
        blocks = self.rocks.BlockBasedOptions()
        blocks.disable_cache()
        blocks.set_bloom_filter(10, False)  # noqa: FBT003
        options.set_block_based_table_factory(blocks)
        return options

    def _ingest(self) -> None:
        """Writes sorted files that RocksDB takes over as they are, so the database is compacted from the start."""
        for t, table in enumerate(self.work.tables):
            file = str(Path(self.settings.folder) / f"{t}.sst")
            writer = self.rocks.SstFileWriter(self._options())
            writer.open(file)
            for first, rows in initial_rows(table):
                values, width = rows.numpy().tobytes(), 4 * table.embedding_dim
                for i, row in enumerate(range(first + int(self.starts[t]), first + int(self.starts[t]) + len(rows))):
                    writer[row.to_bytes(8, "big")] = values[i * width : (i + 1) * width]
            writer.finish()
            options = self.rocks.IngestExternalFileOptions()
            options.set_move_files(True)
            self.db.ingest_external_file([file], options)

    def _fill_cache(self) -> None:
        """Caches the first rows of each table, as many as fit, as a long training would leave them."""
        room = len(self.lru.row_of)
        level = bisect.bisect(
            range(max(self.work.rows)), room, key=lambda n: sum(min(n, rows) for rows in self.work.rows)
        )
        for start, table in zip(self.starts, self.work.tables, strict=False):
            for first, rows in initial_rows(table):
                count = min(len(rows), level - 1 - first)
                if count <= 0:
                    break
                slots = self.lru.take(np.arange(first, first + count) + start)[0]
                self.slots[torch.from_numpy(slots).long()] = rows[:count]

    def step(self, batch: Batch) -> Tensor:
        """Reads the rows that the cache lacks, then trains."""
        sparse = batch.sparse
        sizes = [len(sparse.bags(key)[0]) for key in sparse.keys]
        ids = sparse.values.numpy() + np.repeat(self.starts[:-1], sizes)
        rows, back = np.unique(ids, return_inverse=True)
        slots, absent, left, freed = self.lru.take(rows)
        self._write(left, freed)
        self._read(rows[absent], slots[absent])
        at_slots = sparse.with_values(torch.from_numpy(slots[back]))
        return self.training.step(self.emb, self.tables, replace(batch, sparse=at_slots))

    def _write(self, rows: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> None:
        if not len(rows):
            return
        values, width = self.slots.numpy()[slots].tobytes(), 4 * self.work.embedding_dim
        batch = self.rocks.WriteBatch(raw_mode=True)
        for i, row in enumerate(rows.tolist()):
            batch.put(row.to_bytes(8, "big"), values[i * width : (i + 1) * width])
        self.db.write(batch, self.unlogged)

    def _read(self, rows: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> None:
        if not len(rows):
            return
        keys = [row.to_bytes(8, "big") for row in rows.tolist()]
        pieces = [keys[i : i + 64] for i in range(0, len(keys), 64)]
        values = b"".join(value for piece in self.pool.map(self.db.__getitem__, pieces) for value in piece)
        self.slots.numpy()[slots] = np.frombuffer(values, np.float32).reshape(len(rows), -1)

    def facts(self) -> dict[str, Any]:
        """Returns rows and bytes of the database, and the number of cached rows."""
        disk_bytes = sum(file.stat().st_blocks * 512 for file in self.path.rglob("*") if file.is_file())
        return {"rows_on_disk": sum(self.work.rows), "disk_bytes": disk_bytes, "cached_rows": len(self.lru.row_of)}

    def counters(self) -> dict[str, float]:
        """Returns the number of distinct rows of the batches, and how many of them were cached."""
        return {"rows": float(self.lru.lookups), "hit_rows": float(self.lru.lookups - self.lru.missed)}


def missing(side: str) -> str | None:
    """Returns why a side cannot run here, or None."""
    if side == "rocksdb" and importlib.util.find_spec("rocksdict") is None:
        return "rocksdict is not installed: pip install rocksdict"
    return None

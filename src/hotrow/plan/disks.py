"""The speed of memory and disks, measured within seconds for `hotrow doctor`.

A disk is measured by the engine that keeps rows of tables there in training, past the page cache, in a file that is
removed afterwards. Nothing decides by these figures; they say whether a disk is as fast as its data sheet.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrow.base.files import descriptor_of, disk_free_bytes, explain_full_disk, size
from hotrow.base.machine import available_memory_bytes
from hotrow.kernels import ops
from hotrow.placement.store_file import DIRECT, HEAD_BYTES, SUFFIX, OwnFolder, TableRows, direct_io, takes_no_files
from hotrow.placement.stores import NUM_THREADS, Engines, Store, io_uring_refused, open_store

ROUNDS, ROUND_S = 5, 0.1
"""A figure is the median of this many rounds, each of about this many seconds."""
MEMORY_BYTES = 512 << 20
"""Memory that rows are read from, if that much is free: many times the caches."""
FILE_BYTES = 256 << 20
ROW_BYTES = 128
DEPTHS = (1, 32)
"""I/Os under way at a time: one, and as many as a busy step has."""
LARGE_BYTES, NUM_LARGE = 1 << 20, 4
"""The size of a sequential I/O, and how many of them are under way together."""
MAX_IOS = 1 << 14


def measure_memory() -> dict[str, float]:
    """Measures DRAM on the threads of a run: bytes a second in sequence, and random rows of ROW_BYTES a second."""
    num_bytes = min(MEMORY_BYTES, available_memory_bytes() // 4) // ROW_BYTES * ROW_BYTES
    rows = ops.allocate(num_bytes // 4).view(-1, ROW_BYTES // 4)
    rows.fill_(0)  # every page exists before it is read
    count, threads = min(1 << 18, len(rows)), torch.get_num_threads()
    draw = torch.Generator().manual_seed(1)

    def touch(ids: torch.Tensor, prefetch: tuple[int, Any]) -> float:
        return ops.touch_rows(rows, ids, distance=prefetch[0], into=prefetch[1], write=False, threads=threads)

    def per_s(ids: Callable[[], torch.Tensor]) -> float:
        """The rows a second at the prefetch distance that is fastest in a first try."""
        best = min(ops.PREFETCHES, key=lambda each: touch(ids(), each))
        return statistics.median(len(own) / touch(own, best) for own in (ids() for _ in range(ROUNDS)))

    in_order = torch.arange(len(rows))
    return {
        "threads": threads,
        "stream_bytes_per_s": ROW_BYTES * per_s(lambda: in_order),
        f"random_rows_of_{ROW_BYTES}_bytes_per_s": per_s(lambda: torch.randint(len(rows), (count,), generator=draw)),
    }


def measure_disk(folder: Path) -> dict[str, Any]:
    """Measures the disk of `folder` by a file of FILE_BYTES, which is always removed. If a killed process left its
    file, the next one that measures or trains there removes it. Raises ValueError, with the cure, if the disk cannot be
    measured."""
    facts = _checked(folder)
    own = OwnFolder(folder)
    try:
        with explain_full_disk(folder, "measuring the disk", "Nothing is kept.", "name a folder on another disk"):
            file = _File(own.path / f"probe{SUFFIX}", int(facts["sector_bytes"]))
            found: dict[str, Any] = {
                "engine": file.io,
                "sector_bytes": facts["sector_bytes"],
                "write_bytes_per_s": file.sequential(os.pwritev),
                "read_bytes_per_s": file.sequential(os.preadv),
            }
            for depth in DEPTHS:
                with file.store(depth) as store:
                    found[f"reads_per_s_at_depth_{depth}"] = file.random(store, "reads")
                    found[f"writes_per_s_at_depth_{depth}"] = file.random(store, "writes")
    finally:
        own.remove()
    return found


def _checked(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name a folder on the disk to measure")
    if reason := takes_no_files(folder):
        raise ValueError(f"the disk of {folder} cannot be measured: {reason}; name another folder")
    facts = direct_io(folder)
    if not facts["direct_io"]:
        raise ValueError(f"the disk of {folder} cannot be measured: {facts['direct_io_refused']}")
    if (free := disk_free_bytes(folder)) < 2 * FILE_BYTES:
        raise ValueError(
            f"{folder} has {size(free)} free, and measuring writes a file of {size(FILE_BYTES)} there and leaves as "
            "much free; free some space, or name another folder"
        )
    return facts


class _File:
    """A block store's file whose records are sectors."""

    def __init__(self, path: Path, sector_bytes: int) -> None:
        self.path = path
        self.io: Any = "threads" if io_uring_refused() else "io_uring"
        self.rows = TableRows(table="probe", record_bytes=sector_bytes, num_rows=FILE_BYTES // sector_bytes)
        self.draw = np.random.default_rng(1)
        self.memory = torch.zeros(MAX_IOS, sector_bytes, dtype=torch.uint8)
        self.store(1).close()  # makes the file

    def store(self, depth: int) -> Store:
        engines = Engines(io=self.io, depth=depth, num_threads=min(depth, NUM_THREADS))
        return open_store(self.rows, kind="block", path=self.path, engines=engines)

    def sequential(self, move: Callable[[int, list[memoryview], int], int]) -> float:
        """The bytes a second of large I/Os, of which each round takes its part of the file."""
        num_bytes = min(LARGE_BYTES, FILE_BYTES // ROUNDS // NUM_LARGE) // HEAD_BYTES * HEAD_BYTES
        count = FILE_BYTES // ROUNDS // num_bytes
        memory = memoryview(mmap.mmap(-1, num_bytes * count))  # begins at a page, as I/O past the page cache must
        with descriptor_of(self.path, os.O_RDWR | DIRECT) as descriptor, ThreadPoolExecutor(NUM_LARGE) as pool:

            def one(i: int, k: int) -> None:
                own, offset = memory[k * num_bytes : (k + 1) * num_bytes], HEAD_BYTES + (i * count + k) * num_bytes
                done = move(descriptor, [own], offset)
                assert done == num_bytes, "I/O past the page cache is of whole sectors, or fails"

            def one_round(i: int) -> float:
                start = time.perf_counter()
                list(pool.map(partial(one, i), range(count)))
                return num_bytes * count / (time.perf_counter() - start)

            return statistics.median(map(one_round, range(ROUNDS)))

    def random(self, store: Store, what: str) -> float:
        """The I/Os a second; what: "reads" or "writes" of random sectors."""
        most = min(MAX_IOS, self.rows.num_rows // 4)

        def one_round(count: int) -> float:
            rows = np.sort(self.draw.choice(self.rows.num_rows, count, replace=False))
            before, start = store.counters()[what], time.perf_counter()
            if what == "reads":
                store.read(rows, np.arange(count), [self.memory])
            else:
                store.write(rows, np.arange(count), [self.memory])
                store.flush()
            return (store.counters()[what] - before) / (time.perf_counter() - start)

        count = max(16, min(most, int(one_round(min(most, 64)) * ROUND_S)))  # what fills a round, by a first try
        return statistics.median(one_round(count) for _ in range(ROUNDS))


def measured(folders: Sequence[Path]) -> dict[str, Any]:
    """The figures of each folder's disk and, then, of memory; none, without measuring, if no folder is named."""
    if not folders:
        return {}
    if (reason := ops.backend().reason) is not None:
        raise ValueError(f"hotrow doctor FOLDER measures the native kernels and stores, but {reason}")
    return {"disks": {str(folder): measure_disk(folder) for folder in folders}, "memory": measure_memory()}

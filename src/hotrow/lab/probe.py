"""`hotrow probe`: measures what this machine can do, within a minute, for plans and predictions (costs/hardware.py).

Every figure is the median of rounds, with quartiles, from which rounds that others disturbed are left out as in every
benchmark (`bench.clean_rounds`). A disk is measured by the engine that keeps rows of tables there in training, past the
page cache, in a file that is removed afterwards.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hotrow.base.files import disk_free_bytes, explain_full_disk, size
from hotrow.base.machine import available_memory_bytes, default_threads, usable_cores, versions
from hotrow.base.progress import ProgressLine, num_of
from hotrow.bench import clean_rounds, how_clean, is_disturbed
from hotrow.costs.declared import modelled
from hotrow.costs.hardware import (
    COST_VERSION,
    HARDWARE,
    Disk,
    Figure,
    Gpu,
    Hardware,
    Point,
    hardware_path,
    read_declared,
    table_of,
    this_host,
)
from hotrow.kernels import ops
from hotrow.lab.rank_probe import measure_ranks
from hotrow.lab.step_probe import measure_kernels
from hotrow.placement.store_file import DIRECT, HEAD_BYTES, SUFFIX, OwnFolder, TableRows, direct_io, takes_no_files
from hotrow.placement.stores import NUM_THREADS, Engines, Store, io_uring_refused, open_store

SECONDS = 50.0
NUM_ROUNDS = 9
"""At least five of them are clean, or all of them are the least disturbed of more."""
DRAM_BYTES = 1 << 30
"""Memory that rows are read from, if so much is free: many times the caches."""
FILE_BYTES = 256 << 20
ROW_BYTES = (64, 128, 256, 512, 1024)
DEPTHS = (1, 8, 32, 128)
LARGE_BYTES = 1 << 20
NUM_LARGE = 4
"""Sequential I/Os of LARGE_BYTES that are under way together."""
MAX_IOS = 1 << 14


Tell = Callable[[str], None]
"""Is called before every figure, with its name."""
DISKS, RANKS, MIN_KERNELS = 0.2, 0.15, 0.5
"""Shares of the time: for disks, for two processes that train together, whose start takes 3 s more, and, as the least,
for training steps. Memory and GPUs take about 6 s however much time there is."""


def probe(folders: Sequence[Path | str] = (), *, seconds: float = SECONDS, tell: Tell = lambda _: None) -> Hardware:
    """Measures this machine and the disks of `folders`, in about `seconds`.

    Raises ValueError if a folder cannot be measured or the native module is missing, before anything is measured, and
    OSError if a disk is full.
    """
    if (reason := ops.backend().reason) is not None:
        raise ValueError(f"hotrow probe measures the native kernels and stores, but {reason}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds:g}; give a positive number of seconds, such as 50")
    for folder in folders:
        check_folder(Path(folder))
    started = time.perf_counter()
    threads = min(default_threads(), usable_cores())
    fields: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for found in (
        measure_dram(threads, tell),
        measure_disks([*map(Path, folders)], DISKS * seconds, tell),
        measure_gpus(tell),
        measure_ranks(seconds=RANKS * seconds, progress=tell),
    ):
        notes |= found.get("notes", {})
        fields |= found
    # The more steps, the better the predictions: they get all the time that is left.
    fields["kernels"] = fields.get("kernels", {}) | measure_kernels(
        threads=_thread_counts(threads),
        seconds=max(MIN_KERNELS * seconds, seconds - (time.perf_counter() - started)),
        progress=tell,
        folder=next(iter(folders), None),
    )
    tell("done")
    host = this_host()
    return Hardware(
        name=str(host["cpu"]),
        date=time.strftime("%Y-%m-%d"),
        host=host,
        versions=versions(),
        num_cores=usable_cores(),
        dram_bytes=Figure(float(host["memory_bytes"])),
        cost_version=COST_VERSION,
        **{**fields, "notes": {**notes, **how_rough(fields["kernels"])}},
    )


def how_rough(kernels: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """Returns a warning as a note if other work disturbed more than half of the points."""
    points = [point for own in kernels.values() for point in own]
    if 2 * (disturbed := sum(point.disturbed for point in points)) <= len(points):
        return {}
    return {
        "kernels": f"warning: other work ran during {disturbed / len(points):.0%} of the measured steps, and "
        "predictions from this file are rough: run hotrow probe again with nothing else running"
    }


def run_probe(
    folders: Sequence[Path | str],
    *,
    out: Path | None = None,
    declare: Path | None = None,
    seconds: float = SECONDS,
) -> tuple[Path, Hardware]:
    """Measures, shows progress on stderr, and writes the figures to `out` or where `known_hardware` looks.

    declare: a file of figures that replace measured ones; if it describes another machine, steps there are modelled.
    Returns the file and what it holds.
    """
    path = hardware_path() if out is None else out
    if declare is not None and "name" in read_declared(declare) and out is None:
        raise ValueError(f"{declare} describes another machine than this one: name a file for it with --out")
    if out is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--out {path} is a folder, or in none; name a file in a folder that exists")
    with ProgressLine() as line:
        hardware = probe(folders, seconds=seconds, tell=lambda figure: line.update(lambda: f"measuring: {figure}"))
    HARDWARE.write(path, hardware)  # so that a fault in what is declared loses no measurement
    if declare is not None:
        machine = hardware.with_declared(declare)
        hardware = modelled(machine, hardware) if hardware.kernels and not machine.kernels else machine
        HARDWARE.write(path, hardware)
    return path, hardware


def print_probe(hardware: Hardware, path: Path) -> None:
    """Prints a table of the figures, and where they are."""
    rows = [("figure", "value", "quartiles", "source"), *table_of(hardware)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2]), row[3]]).rstrip())
    for name, points in hardware.kernels.items():
        print(f"kernel {name}: {len(points)} points")
    for name, note in hardware.notes.items():
        print(f"{name}: {note}")
    print(f"wrote {path}")


def figure_of(one_round: Callable[[int], float]) -> Figure:
    """Returns the median and quartiles of rounds; `one_round` receives the number of the round."""
    return figures_of(lambda i: (one_round(i),))[0]


def figures_of(one_round: Callable[[int], tuple[float, ...]], *, of_disk: bool = False) -> list[Figure]:
    """Returns the figures of several quantities that the same rounds measure. of_disk: see `clean_rounds`."""
    rounds = clean_rounds(one_round, NUM_ROUNDS, of_disk=of_disk)
    note = how_clean(rounds.counts()) if is_disturbed(rounds.counts()) else ""
    return [Figure.of(values, note) for values in zip(*rounds.results, strict=True)]


# ---- memory and arithmetic


def measure_dram(most_threads: int, tell: Tell = lambda _: None) -> Mapping[str, Any]:
    """Measures arithmetic, sequential reads and random reads of rows, by number of threads; returns fields of
    `Hardware`, as the others do."""
    num_bytes = min(DRAM_BYTES, available_memory_bytes() // 4) // max(ROW_BYTES) * max(ROW_BYTES)
    memory = ops.allocate(num_bytes // 4)
    memory.fill_(0)  # every page exists before it is read
    flops, stream = {}, {}
    for threads in _thread_counts(most_threads):
        tell(f"arithmetic, {num_of(threads, 'thread')}")
        flops[str(threads)] = figure_of(partial(_flops_per_s, threads))
        tell(f"sequential reads of DRAM, {num_of(threads, 'thread')}")
        stream[str(threads)] = _stream(memory, threads)
    points = []
    for row_bytes in ROW_BYTES:
        for threads in sorted({1, most_threads}):
            tell(f"random rows of {row_bytes} bytes, {num_of(threads, 'thread')}")
            sizes = {"row_bytes": float(row_bytes), "threads": float(threads)}
            points.append(Point(sizes, _random_rows(memory.view(-1, row_bytes // 4), threads)))
    return {"flops_per_s": flops, "stream_bytes_per_s": stream, "random_rows": points}


def _thread_counts(most: int) -> list[int]:
    return sorted({most, *(1 << k for k in range(most.bit_length()))})


def _flops_per_s(threads: int, _: int) -> float:
    module = ops.native_module()
    return statistics.median(float(module.multiply_adds_per_s(threads)) for _ in range(20))


def _stream(memory: Tensor, threads: int) -> Figure:
    rows = memory.view(-1, 128)
    ids = torch.arange(len(rows))
    touch = _best_prefetch(rows, lambda _: ids, threads)
    return figure_of(lambda i: memory.nbytes / touch(i))


def _random_rows(rows: Tensor, threads: int) -> Figure:
    count = min(1 << 18, len(rows))
    draw = torch.Generator().manual_seed(1)
    # New ids in every round: rows of the round before are in the caches.
    touch = _best_prefetch(rows, lambda _: torch.randint(len(rows), (count,), generator=draw), threads)
    return figure_of(lambda i: touch(i) / count)


def _best_prefetch(rows: Tensor, ids: Callable[[int], Tensor], threads: int) -> Callable[[int], float]:
    """Returns a function that takes the seconds of a round, with the distance that was fastest in a first try."""

    def touch(prefetch: tuple[int, Any], i: int) -> float:
        distance, into = prefetch
        return ops.touch_rows(rows, ids(i), distance=distance, into=into, write=False, threads=threads)

    return partial(touch, min(ops.PREFETCHES, key=lambda each: min(touch(each, i) for i in range(2))))


# ---- disks


def check_folder(folder: Path) -> None:
    """Raises ValueError, with the cure, for a folder whose disk cannot be measured."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name a folder on the disk to measure")
    if reason := takes_no_files(folder):
        raise ValueError(f"the disk of {folder} cannot be measured: {reason}; name another folder")
    facts = direct_io(folder)
    if not facts["direct_io"]:
        raise ValueError(f"the disk of {folder} cannot be measured: {facts['direct_io_refused']}")
    if (free := disk_free_bytes(folder)) < 2 * FILE_BYTES:
        raise ValueError(
            f"{folder} has {size(free)} free, and the probe writes a file of {size(FILE_BYTES)} there and leaves as "
            "much free; free some space, or name another folder"
        )


def measure_disks(folders: Sequence[Path], seconds: float, tell: Tell) -> Mapping[str, Any]:
    """Measures the disk of each folder, in about `seconds`."""
    disks = [measure_disk(folder, seconds=seconds / len(folders), tell=tell) for folder in folders]
    refused = io_uring_refused() if disks else None
    return {"disks": disks, **({"notes": {"disks": f"io_uring is not used: {refused}"}} if refused else {})}


def measure_disk(folder: Path, *, seconds: float, tell: Tell = lambda _: None) -> Disk:
    """Measures the disk of `folder` by a file of FILE_BYTES, which is removed in any case.

    A killed process cannot remove its file; the next one that measures or trains there does.
    """
    sector_bytes = int(direct_io(folder)["sector_bytes"])
    free = float(disk_free_bytes(folder))
    round_s = seconds / (2 + 2 * len(DEPTHS)) / (NUM_ROUNDS + 2)
    own = OwnFolder(folder)
    try:
        with explain_full_disk(folder, "measuring the disk", "Nothing is kept."):
            file = _ProbeFile(own.path / f"probe{SUFFIX}", sector_bytes)
            reads: dict[str, Figure] = {}
            writes: dict[str, Figure] = {}
            tell(f"{folder}: sequential writes")
            write_bytes_per_s = file.sequential(os.pwritev)
            tell(f"{folder}: sequential reads")
            read_bytes_per_s = file.sequential(os.preadv)
            for depth in DEPTHS:
                with file.store(depth) as store:
                    tell(f"{folder}: random reads, queue depth {depth}")
                    reads[str(depth)], cpu_s = file.random(store, "reads", round_s)
                    tell(f"{folder}: random writes, queue depth {depth}")
                    writes[str(depth)], _ = file.random(store, "writes", round_s)
    finally:
        own.remove()
    return Disk(
        folder=str(folder.resolve()),
        engine=file.io,
        sector_bytes=sector_bytes,
        reads_per_s=reads,
        writes_per_s=writes,
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        cpu_s_per_io=cpu_s,  # at the last depth, which training uses
        capacity_bytes=Figure(free),
    )


class _ProbeFile:
    """A block store's file whose records are sectors."""

    def __init__(self, path: Path, sector_bytes: int) -> None:
        self.path = path
        self.io: Literal["io_uring", "threads"] = "threads" if io_uring_refused() else "io_uring"
        self.rows = TableRows(table="probe", record_bytes=sector_bytes, num_rows=FILE_BYTES // sector_bytes)
        self.draw = np.random.default_rng(1)
        self.memory = torch.zeros(MAX_IOS, sector_bytes, dtype=torch.uint8)
        self.store(1).close()  # makes the file

    def store(self, depth: int) -> Store:
        engines = Engines(io=self.io, depth=depth, num_threads=min(depth, NUM_THREADS))
        return open_store(self.rows, kind="block", path=self.path, engines=engines)

    def sequential(self, move: Callable[[int, list[memoryview], int], int]) -> Figure:
        """Returns bytes a second of large I/Os, of which a round takes its part of the file."""
        num_bytes = min(LARGE_BYTES, FILE_BYTES // NUM_ROUNDS // NUM_LARGE) // HEAD_BYTES * HEAD_BYTES
        count = FILE_BYTES // NUM_ROUNDS // num_bytes
        memory = memoryview(mmap.mmap(-1, num_bytes * count))  # begins at a page, as I/O past the page cache must
        with self._direct() as descriptor, ThreadPoolExecutor(NUM_LARGE) as pool:

            def one(i: int, k: int) -> None:
                offset = HEAD_BYTES + (i % NUM_ROUNDS * count + k) * num_bytes
                done = move(descriptor, [memory[k * num_bytes : (k + 1) * num_bytes]], offset)
                assert done == num_bytes, "I/O past the page cache is of whole sectors, or fails"

            def one_round(i: int) -> tuple[float]:
                start = time.perf_counter()
                list(pool.map(partial(one, i), range(count)))
                return (num_bytes * count / (time.perf_counter() - start),)

            return figures_of(one_round, of_disk=True)[0]

    @contextmanager
    def _direct(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | DIRECT | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def random(self, store: Store, what: str, round_s: float) -> tuple[Figure, Figure]:
        """Returns I/Os a second and the processor's seconds of each. what: "reads" or "writes" of random sectors."""
        most = min(MAX_IOS, self.rows.num_rows // 4)

        def one_round(count: int) -> tuple[float, float]:
            rows = np.sort(self.draw.choice(self.rows.num_rows, count, replace=False))
            before, start = store.counters(), time.perf_counter()
            if what == "reads":
                store.read(rows, np.arange(count), [self.memory])
            else:
                store.write(rows, np.arange(count), [self.memory])
                store.flush()
            seconds, after = time.perf_counter() - start, store.counters()
            num_ios = after[what] - before[what]
            return num_ios / seconds, (after["io_cpu_ns"] - before["io_cpu_ns"]) / 1e9 / num_ios

        # A first try says how many fill the time of a round.
        rate, _ = one_round(min(most, 64))
        count = max(16, min(most, int(rate * round_s)))
        ios_per_s, cpu_s = figures_of(lambda _: one_round(count), of_disk=True)
        return ios_per_s, cpu_s


# ---- GPUs


def measure_gpus(tell: Tell = lambda _: None) -> Mapping[str, Any]:
    """Measures one GPU of each kind, if torch has CUDA."""
    if not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gpus: list[Gpu] = []
    notes: dict[str, str] = {}
    for name in dict.fromkeys(names):
        same = [i for i, each in enumerate(names) if each == name]
        tell(f"GPU {name}")
        try:
            gpus.append(_measure_gpu(name, same))
        except RuntimeError as error:  # another process may hold its memory
            notes["gpus"] = f"{name} was not measured: {' '.join(str(error).split())[:200]}"
    return {"gpus": gpus, "notes": notes}


def _measure_gpu(name: str, same: Sequence[int]) -> Gpu:
    """same: the numbers of the GPUs of this kind."""
    device = torch.device("cuda", same[0])
    num_bytes = min(256 << 20, torch.cuda.mem_get_info(device)[0] // 16)
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def rate(work: Callable[[], object], amount: float) -> Figure:
        work()
        return figure_of(lambda _: amount / _device_seconds(work, device))

    peer = None
    if len(same) > 1 and torch.cuda.can_device_access_peer(same[0], same[1]):
        far = torch.zeros_like(here, device=torch.device("cuda", same[1]))
        peer = rate(lambda: far.copy_(here, non_blocking=True), num_bytes)
    return Gpu(
        name=name,
        count=len(same),
        memory_bytes=Figure(float(torch.cuda.get_device_properties(device).total_memory)),
        memory_bytes_per_s=rate(lambda: there.copy_(here), 2 * num_bytes),
        to_device_bytes_per_s=rate(lambda: here.copy_(host, non_blocking=True), num_bytes),
        to_host_bytes_per_s=rate(lambda: host.copy_(here, non_blocking=True), num_bytes),
        product_flops_per_s={
            word: rate(_product(dtype, device), 2 * 4096**3)
            for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        },
        peer_bytes_per_s=peer,
    )


def _product(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b, out = (torch.ones(4096, 4096, dtype=dtype, device=device) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _device_seconds(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3

"""How much of a training step the loader costs: Criteo's columns, block shuffle, batches of 2048.

    python benchmarks/loader.py [--rows 1000000] [--batch-size 2048] [--rounds 5] [--json]

Writes a synthetic packed dataset to a temporary folder, reads it once (the first read also checks every checksum), then
reads it in stored order, shuffled, and shuffled one batch ahead, interleaved, and prints the median over the rounds of
milliseconds per batch with their spread. The limit is a copy of the same bytes by numpy, which shares no code with the
loader. `cpu_ms` is processor time: on a busy machine it is the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks import bench
from benchmarks.results import end_on_signals
from hotrow.batch import Batch
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.sources.inputs import prefetch

NUM_DENSE, NUM_SPARSE, NUM_EMBEDDINGS = 13, 26, 1_000_000
STEP_MS = 50.0
"""A step of the Criteo Kaggle shape at batch 2048 on two cores, to which the loader's cost is compared."""


def write(folder: Path, num_rows: int) -> PackedDataset:
    """A dataset of Criteo's 13 dense and 26 one-hot columns with random values."""
    rng = np.random.default_rng(0)
    names = [f"C{j}" for j in range(1, NUM_SPARSE + 1)]
    info = DatasetInfo(
        name="benchmark",
        dense=tuple(DenseColumn(f"I{j}") for j in range(1, NUM_DENSE + 1)),
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(Table(name, NUM_EMBEDDINGS) for name in names),
    )
    with PackedWriter(folder, info) as writer:
        for start in range(0, num_rows, 65_536):
            n = min(65_536, num_rows - start)
            ids = {name: rng.integers(0, NUM_EMBEDDINGS, n, np.int32) for name in names}
            writer.append("train", rng.integers(0, 2, n), rng.random((n, NUM_DENSE), np.float32), ids)
        return writer.close()


def per_batch_ms(run: Callable[[], int]) -> tuple[float, float]:
    """Wall and processor milliseconds per batch of `run`, which returns its number of batches."""
    wall, cpu = time.perf_counter(), time.process_time()
    num_batches = run()
    return 1e3 * (time.perf_counter() - wall) / num_batches, 1e3 * (time.process_time() - cpu) / num_batches


def epoch(loader: Iterable[Batch]) -> int:
    return sum(1 for _ in loader)


def copy_bytes(source: np.ndarray, num_batches: int) -> int:
    """Copy one batch's bytes `num_batches` times, from a buffer larger than the caches."""
    target = np.empty(source.shape[1], np.uint8)
    for k in range(num_batches):
        np.copyto(target, source[k % len(source)])
    return num_batches


def measure(split: Split, batch_size: int, rounds: int) -> list[dict[str, float | str]]:
    """One cell per way of reading."""
    loaders = {
        "stored order": Loader(split, batch_size, shuffle_seed=None),
        "shuffled": Loader(split, batch_size, shuffle_seed=1),
    }
    row_bytes, num_batches = split.info.row_bytes, loaders["shuffled"].num_batches
    source = np.zeros((max(2, 256_000_000 // (row_bytes * batch_size)), row_bytes * batch_size), np.uint8)
    runs: dict[str, Callable[[], int]] = {name: lambda loader=loader: epoch(loader) for name, loader in loaders.items()}
    runs["shuffled, one ahead"] = lambda: epoch(prefetch(iter(loaders["shuffled"])))
    runs["limit: copy"] = lambda: copy_bytes(source, num_batches)
    found = bench.clean_rounds(lambda _: {name: per_batch_ms(run) for name, run in runs.items()}, rounds)
    cells: list[dict[str, float | str]] = []
    for name in runs:
        wall, cpu = (sorted(values) for values in zip(*(one[name] for one in found.results), strict=True))
        cells.append(
            {
                "name": name,
                "wall_ms": statistics.median(wall),
                "wall_ms_min": wall[0],
                "wall_ms_max": wall[-1],
                "cpu_ms": statistics.median(cpu),
                "rows_per_s": 1e3 * batch_size / statistics.median(wall),
                "share_of_step": statistics.median(wall) / STEP_MS,
                **found.counts(),
            }
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    end_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        dataset = write(Path(folder) / "data", arguments.rows)
        write_rows_per_s = arguments.rows / (time.perf_counter() - start)
        split = dataset.split("train")
        start = time.perf_counter()
        split.verify()
        verify_bytes_per_s = arguments.rows * dataset.info.row_bytes / (time.perf_counter() - start)
        cells = measure(split, arguments.batch_size, arguments.rounds)
    if arguments.json:
        totals = {"write_rows_per_s": write_rows_per_s, "verify_bytes_per_s": verify_bytes_per_s}
        print(json.dumps({"cells": cells, "batch_size": arguments.batch_size, **totals}))
        return
    print(f"write {write_rows_per_s:,.0f} rows/s, random values made on the way included")
    print(f"first read, every checksum and value checked: {verify_bytes_per_s / 1e9:.2f} GB/s")
    print(bench.how_clean(cells[0]))
    print(f"per batch of {arguments.batch_size:<11}  wall ms     min     max  cpu ms       rows/s  of a 50 ms step")
    for cell in cells:
        print(
            f"{cell['name']:24} {cell['wall_ms']:8.3f} {cell['wall_ms_min']:7.3f} {cell['wall_ms_max']:7.3f} "
            f"{cell['cpu_ms']:7.3f} {cell['rows_per_s']:12,.0f} {cell['share_of_step']:16.2%}"
        )


if __name__ == "__main__":
    main()

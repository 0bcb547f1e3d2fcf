"""What finding hot rows and hot samples takes: classification, the ways to calibrate, tracking, and who tracks best.

    python -m benchmarks.hot --out docs/measurements/benchmarks.json [--folder DIR] [--quick] [CELL ...]

The data are synthetic clicks of Criteo Kaggle's shape (26 one-hot columns, 13 dense), 1.2M of them, prepared once into
DIR, or into a temporary folder. Contenders take turns in one process after their answers were compared; a round in
which the hypervisor took processor time away counts for none.

    classify_prefix, classify_listed   which samples are hot, of a hot set of prefixes (exact), and one that is half a
                                       list (tracked); beside bitmaps gathered by numpy, and the dict and loop of FAE's
                                       released code on a slice
    classify_first                     the same as the first reader of the data, whose checks are then part of it
    calibrate                          the ways to choose rows; what that and classification take of an epoch
    track                              showing a batch to the tracker, beside the training step it belongs to
    trackers                           ways to track, on real rows (hot_trackers.py; nothing is timed)
    quality_criteo, quality_taobao     turns of hot and cold batches beside shuffled order, over seeds (hot_quality.py),
                                       on real rows: of a DLRM, of a TBSM
    quality_taobao_window              the same of windows of four batches, of which the hot ones come first
    quality_synthetic                  the same on synthetic rows; the rate begins at the paper's 50,
    quality_synthetic_10               or at 10
    quality_synthetic_decay            learning rates fall over the second half; twenty seeds
    quality_synthetic_narrow           hidden layers of 64; a hundred seeds
    link                               what crosses the link to a fast device, by budget (the same; nothing is timed)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import bench, hot_quality, hot_trackers
from benchmarks.criteo_text import write_criteo
from benchmarks.hot_tracker import HotTracker, show_part
from benchmarks.results import end_on_signals, record
from benchmarks.step_peers import make_ours
from benchmarks.step_shapes import SHAPES, column_ids, make_setting
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.hot.calibrate import WAYS, calibrate
from hotrow.hot.hot_set import HotSet, hot_samples, is_small

NUM_SAMPLES, DIM, BATCH_SIZE = 1_200_000, 16, 2048  # before the split
BUDGET_SHARE = 0.25
"""Of the bytes of tables above 1 MiB; the small ones are hot whole."""
SLICE = 20_000
"""Samples that FAE's idiom is tried on."""
TARGET_SAMPLES_PER_S, MAX_OF_EPOCH, MAX_OF_STEP = 5e6, 0.05, 0.02


class Data:
    """The prepared data and what is asked of it."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.path = folder / ("quick" if quick else "kaggle")
        if not (self.path / "dataset.json").exists():
            raw = folder / "clicks.tsv"
            write_criteo(raw, criteo_kaggle(60_000 if quick else NUM_SAMPLES))
            run_prepare("criteo", str(raw), self.path, min_count=1)
            raw.unlink()
        self.dataset = PackedDataset.open(self.path)
        self.num_samples = self.dataset.split("train").num_rows
        self.record_bytes = {table.name: 4 * DIM for table in self.dataset.info.tables}
        rows = [table.num_embeddings for table in self.dataset.info.tables]
        small = sum(n for n in rows if is_small(n, 4 * DIM))
        self.budget_bytes = 4 * DIM * (small + len(rows) + int(BUDGET_SHARE * (sum(rows) - small)))

    def exact(self) -> HotSet:
        """Prefixes."""
        return calibrate(self.dataset, "exact", self.budget_bytes, record_bytes=self.record_bytes).hot

    def tracked(self) -> HotSet:
        """What a tracker holds that saw the split: prefixes and lists."""
        sizes = {table.name: table.num_embeddings for table in self.dataset.info.tables}
        tracker = HotTracker(sizes, self.record_bytes, self.budget_bytes)
        show_part(tracker, self.dataset, (0, self.num_samples))
        return tracker.hot_set()


def rounds_of(sides: Mapping[str, Callable[[], Any]], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each side, taking turns, in another order every round; the counts of rounds."""

    def one_round(number: int) -> dict[str, float]:
        names = list(sides)
        found = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            sides[name]()
            found[name] = time.perf_counter() - start
        return found

    rounds = bench.clean_rounds(one_round, num_rounds)
    return {name: [own[name] for own in rounds.results] for name in sides}, rounds.counts()


def read_bytes_per_s(threads: int) -> float:
    """Of memory, read in order by so many threads: the best of five sums over 512 MiB."""
    pieces = np.array_split(np.ones(1 << 26, np.int64), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.sum, pieces))
            best = max(best, (1 << 29) / (time.perf_counter() - start))
    return best


# ---- classification


def by_bitmaps(dataset: PackedDataset, hot: HotSet, threads: int) -> NDArray[np.bool_]:
    """A bitmap for each table, gathered: what plain numpy does."""
    bitmaps = {}
    for table in dataset.info.tables:
        bitmaps[table.name] = np.zeros(table.num_embeddings, np.bool_)
        bitmaps[table.name][: hot.rows[table.name].prefix] = True
        bitmaps[table.name][hot.rows[table.name].listed] = True
    own = [bitmaps[feature.table] for feature in dataset.info.features]
    split = dataset.split("train")

    def block(index: int) -> NDArray[np.bool_]:
        ids = split.block(index).ids
        found = np.ones(len(ids[0]), np.bool_)
        for column, bitmap in zip(ids, own, strict=True):
            found &= bitmap[column]
        return found

    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(block, range(split.num_blocks))))


def by_dict(dataset: PackedDataset, hot: HotSet, num_samples: int) -> tuple[NDArray[np.bool_], float]:
    """(the answers, seconds) of a dict of (table, row) asked lookup by lookup, up to the first that is cold.

    The dict is made beforehand and holds only rows that occur.
    """
    columns: list[list[int]] = [[] for _ in dataset.info.features]
    split, index = dataset.split("train"), 0
    while len(columns[0]) < num_samples:
        for column, ids in zip(columns, split.block(index).ids, strict=True):
            column += ids.tolist()
        index += 1
    known: dict[tuple[int, int], int] = {}
    for t, (feature, column) in enumerate(zip(dataset.info.features, columns, strict=True)):
        rows = np.unique(column)
        for row in rows[hot.rows[feature.table].contains(rows)].tolist():
            known[t, row] = len(known)
    samples = [*zip(*(column[:num_samples] for column in columns), strict=True)]
    start = time.perf_counter()
    found = []
    for sample in samples:
        is_hot = True
        for t, row in enumerate(sample):
            if (t, row) not in known:
                is_hot = False
                break
        found.append(is_hot)
    return np.array(found), time.perf_counter() - start


def classify(data: Data, name: str, threads: int, num_rounds: int) -> dict[str, Any]:
    """Ours, numpy's bitmaps and FAE's idiom on the same hot set."""
    hot = data.exact() if name == "classify_prefix" else data.tracked()
    ours = hot_samples(data.dataset, hot, threads=threads)
    small = min(SLICE, data.num_samples)
    answers, dict_s = by_dict(data.dataset, hot, small)
    if not np.array_equal(ours, by_bitmaps(data.dataset, hot, threads)) or not np.array_equal(ours[:small], answers):
        raise ValueError(f"cell {name}: the contenders disagree about which samples are hot; not timed")
    sides: dict[str, Callable[[], Any]] = {
        "ours": partial(hot_samples, data.dataset, hot, threads=threads),
        "bitmaps": partial(by_bitmaps, data.dataset, hot, threads),
    }
    found, counts = rounds_of(sides, num_rounds)
    id_bytes = data.num_samples * sum(ids.itemsize for ids in data.dataset.split("train").block(0).ids)
    limit_s = id_bytes / read_bytes_per_s(threads)
    rates = [data.num_samples / s for s in found["ours"]]
    return {
        **classified(rates, data, hot),
        "listed_rows": sum(len(rows.listed) for rows in hot.rows.values()),
        "bitmaps_samples_per_s": data.num_samples / statistics.median(found["bitmaps"]),
        "ratio": statistics.median(b / a for a, b in zip(found["ours"], found["bitmaps"], strict=True)),
        "ratio_spread": bench.spread([b / a for a, b in zip(found["ours"], found["bitmaps"], strict=True)]),
        "dict_slice_samples": small,
        "dict_extrapolated_s": dict_s / small * data.num_samples,
        "limit_s": limit_s,
        "share_of_limit": limit_s / statistics.median(found["ours"]),
        **counts,
    }


def classified(rates: list[float], data: Data, hot: HotSet) -> dict[str, Any]:
    """What every cell of classification says."""
    return {
        "samples": data.num_samples,
        "hot_rows": hot.num_rows,
        "samples_per_s": statistics.median(rates),
        "spread": bench.spread(rates),
        "target": TARGET_SAMPLES_PER_S,
    }


def classify_first(data: Data, threads: int, num_rounds: int) -> dict[str, Any]:
    """A dataset just opened: checksums and values of every block are checked as it is read."""
    hot = data.exact()

    def one_round(number: int) -> float:
        dataset = PackedDataset.open(data.path)
        start = time.perf_counter()
        hot_samples(dataset, hot, threads=threads)
        return data.num_samples / (time.perf_counter() - start)

    rounds = bench.clean_rounds(one_round, num_rounds)
    return {**classified(rounds.results, data, hot), **rounds.counts()}


# ---- beside training


def step_of(*, quick: bool) -> Callable[[], None]:
    """A training step at Criteo Kaggle's cardinalities, on batches that change."""
    shape = SHAPES["kaggle"].small() if quick else SHAPES["kaggle"]
    step, _ = make_ours(make_setting(shape), "sgd")
    number = 0

    def run() -> None:
        nonlocal number
        step.prepare(number)
        step.run()
        number += 1

    run()
    return run


def calibrations(data: Data, threads: int, num_rounds: int, *, quick: bool) -> dict[str, Any]:
    """Every way's seconds, then classification's; of an epoch, extrapolated from measured steps."""
    sides: dict[str, Callable[[], Any]] = {
        how: partial(calibrate, data.dataset, how, data.budget_bytes, record_bytes=data.record_bytes) for how in WAYS
    }
    hot = data.exact()
    sides |= {"classify": partial(hot_samples, data.dataset, hot, threads=threads)}
    run = step_of(quick=quick)
    sides |= {"steps": lambda: [run() for _ in range(20)]}
    found, counts = rounds_of(sides, max(3, num_rounds // 4))
    step_s = statistics.median(found["steps"]) / 20
    epoch_s = step_s * data.num_samples / BATCH_SIZE
    classify_s = statistics.median(found["classify"])
    return {
        "samples": data.num_samples,
        "budget_bytes": data.budget_bytes,
        "step_ms": 1e3 * step_s,
        "epoch_extrapolated_s": epoch_s,
        "classify_s": classify_s,
        "most": MAX_OF_EPOCH,
        "ways": {
            how: {
                "seconds": statistics.median(found[how]),
                "spread": bench.spread(found[how]),
                "hot_samples": float(hot_samples(data.dataset, calibrated(data, how), threads=threads).mean()),
                "share_of_epoch": (statistics.median(found[how]) + classify_s) / epoch_s,
            }
            for how in WAYS
        },
        **counts,
    }


def calibrated(data: Data, how: str) -> HotSet:
    """A way's hot set."""
    return calibrate(data.dataset, how, data.budget_bytes, record_bytes=data.record_bytes).hot


def track(num_rounds: int, *, quick: bool) -> dict[str, Any]:
    """A batch not seen before shown to the tracker, and a step on such a batch; a budget of 256 MiB, FAE's own."""
    shape = SHAPES["kaggle"].small() if quick else SHAPES["kaggle"]
    sizes = {f"C{t + 1}": n for t, n in enumerate(shape.rows)}
    tracker = HotTracker(sizes, dict.fromkeys(sizes, 4 * shape.embedding_dim), 256 << 20)
    generator = np.random.default_rng(5)
    batches = [
        {name: column_ids(generator, n, shape.batch_size, shape.zipf) for name, n in sizes.items()}
        for _ in range(16 if quick else 256)
    ]
    for batch in batches[: len(batches) // 2]:  # its memory is there, and half full of rows
        tracker.observe(batch)
    run = step_of(quick=quick)
    number = len(batches) // 2

    def observe() -> None:
        nonlocal number
        tracker.observe(batches[number % len(batches)])
        number += 1

    found, counts = rounds_of({"step": run, "observe": observe}, 2 * num_rounds)
    shares = [b / a for a, b in zip(found["step"], found["observe"], strict=True)]
    start = time.perf_counter()
    hot = tracker.hot_set()
    return {
        "step_ms": 1e3 * statistics.median(found["step"]),
        "observe_ms": 1e3 * statistics.median(found["observe"]),
        "share": statistics.median(shares),
        "spread": bench.spread(shares),
        "most": MAX_OF_STEP,
        "lookups": sum(len(ids) for ids in batches[0].values()),
        "tracker_bytes": tracker.num_bytes,
        "hot_set_s": time.perf_counter() - start,
        "hot_rows": hot.num_rows,
        **counts,
    }


REAL_ROWS = (*(f"quality_{name}" for name in hot_quality.REAL), "quality_taobao_window")
SYNTHETIC = tuple(f"quality_synthetic{setting}" for setting in ("", "_10", "_decay", "_narrow"))
QUALITY = (*REAL_ROWS, *SYNTHETIC, "link")
CELLS = ("classify_prefix", "classify_listed", "classify_first", "calibrate", "track", "trackers", *QUALITY)


def absent(name: str, data: Path) -> str | None:
    """What a cell on real rows lacks, or None."""
    files = {
        "trackers": [file for _, file in hot_trackers.STREAMS.values()],
        "quality_criteo": [hot_quality.CRITEO],
        "quality_taobao": [hot_quality.TAOBAO],
        "quality_taobao_window": [hot_quality.TAOBAO],
        "link": [hot_quality.CRITEO],
    }
    lost = [file for file in files.get(name, ()) if not (data / file).exists()]
    return f"{', '.join(lost)} is not in {data} (--data, or HOTROW_DATA)" if lost else None


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One cell's figures."""
    quick, threads = options.quick, torch.get_num_threads()
    num_rounds = 3 if quick else bench.NUM_ROUNDS
    if name == "trackers":
        rows: dict[str, Any] = {}
        for row in hot_trackers.comparison(options.data):
            rows[f"{row['stream']}, {row['share']:.0%}"] = row["ways"]
        return {"streams": rows}
    if name in QUALITY:
        return hot_quality.measure(name, options.data, folder, quick=quick)
    if name == "track":
        return track(num_rounds, quick=quick)
    data = Data(folder, quick=quick)
    if name == "calibrate":
        return calibrations(data, threads, num_rounds, quick=quick)
    return (
        classify_first(data, threads, num_rounds)
        if name == "classify_first"
        else classify(data, name, threads, num_rounds)
    )


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)}; all where none is named")
    parser.add_argument("--folder", type=Path, help="where the prepared data stay; default: a temporary folder")
    parser.add_argument("--data", type=Path, help="folder of the real files, for trackers and what is after it")
    parser.add_argument("--quick", action="store_true", help="little data: tries the cells, measures nothing of worth")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_on_signals()
    options.data = options.data or Path(os.environ.get("HOTROW_DATA", hot_trackers.DATA))
    if unknown := set(options.names) - set(CELLS):
        sys.exit(f"no cell is called {', '.join(unknown)}; choose from {', '.join(CELLS)}")
    if not options.here:
        record("hot", bench.in_fresh_process("benchmarks.hot", [*sys.argv[1:], "--here"], options.threads), options.out)
        return
    with tempfile.TemporaryDirectory() as temporary:
        cells = []
        for name in options.names or CELLS:
            if missing := absent(name, options.data):
                print(f"{name}: not measured, {missing}", file=sys.stderr, flush=True)
                continue
            cells.append({"name": f"hot_{name}", **measure(name, options, options.folder or Path(temporary))})
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"cells": cells, "quick": options.quick, **bench.circumstances()}))


if __name__ == "__main__":
    main()

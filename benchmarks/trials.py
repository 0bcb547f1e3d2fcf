"""How near `hotrow plan` comes to the run that follows: 24 configs of three models.

    python -m benchmarks.trials [--folder DIR] [--out FILE] [--quick] [NAME ...]
    python -m benchmarks.trials --times [--folder DIR]    # only the seconds of `plan` on Criteo Kaggle's whole tables

Each config is trained, tried, and trained again, in processes of their own, on clicks of Criteo Kaggle's shape. All
rows lie in DRAM; or a fourth of them, and the rest in a file that serves as memory; or a fourth or a sixteenth, and
the rest on an SSD. It has one thread or two. The error of a trial is its step over the mean step of the two runs; the
noise is the one run over the other. A choice is a pair of configs of one model: it was named well if the trial's
faster one was the faster run, or within 3 % of it. Runs have two epochs, of which rows are made in the first.

It takes about ten minutes. The last lines are the geometric means of error and noise, the largest ones, and the
share of choices that were named well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import bench
from benchmarks.hot_cells import make_shape
from benchmarks.results import end_on_signals, record
from benchmarks.synthetic_config import KAGGLE_ROWS
from hotrow.config.load import load_config
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import write_counts
from hotrow.data.packed.writer import PackedWriter
from hotrow.setup.demand import required_bytes, tables_of

MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [128, 64], "top_mlp": [256, 128]},
    "dcn": {"name": "dcn", "embedding_dim": 16, "deep_mlp": [256, 128], "num_cross_layers": 2},
    "deepfm": {"name": "deepfm", "embedding_dim": 16, "deep_mlp": [200, 200]},
}
PLACES = ("dram", "file 1/4", "ssd 1/4", "ssd 1/16")
SAMPLES, SCALE, BATCH_SIZE, EPOCHS = 150_000, 0.5, 256, 2
QUICK = (20_000, 0.01, 16)
CLOSE = 0.03
"""A choice this near to the fastest is as good."""


def configs(data: Path, folder: Path, batch_size: int) -> dict[str, Path]:
    """Writes the configs, and returns their files by name."""
    found = {}
    for model, place, threads in itertools.product(MODELS, PLACES, (1, 2)):
        name = f"{model}, {place}, {threads} thread{'s' * (threads > 1)}"
        raw: dict[str, Any] = {
            "data": str(data),
            "model": MODELS[model],
            "memory": "dram",
            "optimizer": {"dense": {"lr": 0.01}},  # with 0.1 the crosses of dcn diverge on these rows
            "train": {"batch_size": batch_size, "epochs": EPOCHS, "threads": threads, "eval_every": None},
            "checkpoint": {"every": None},
        }
        path = folder / f"{len(found)}.yaml"
        path.write_text(yaml.safe_dump(raw))
        if place != "dram":
            kind, _, part = place.partition(" 1/")
            config = load_config(path)
            needed = required_bytes(config, tables_of(config, PackedDataset.open(data)))
            where = Path("/dev/shm") if kind == "file" else folder
            raw["memory"] = {"dram": needed // int(part), kind: str(where / "rows"), "force": True}
            path.write_text(yaml.safe_dump(raw))
        found[name] = path
    return found


def kaggle(folder: Path, num_samples: int = 400_000) -> Path:
    """Packs clicks on tables of Criteo Kaggle's sizes, 33.8 million rows, of which low ones are more popular."""
    random = np.random.default_rng(1)
    names = [f"C{k + 1}" for k in range(len(KAGGLE_ROWS))]
    info = DatasetInfo(
        name="kaggle",
        dense=tuple(DenseColumn(f"I{k + 1}") for k in range(13)),
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(Table(name, rows) for name, rows in zip(names, KAGGLE_ROWS, strict=True)),
    )
    columns: dict[str, Any] = {
        name: np.minimum(rows - 1, rows ** random.random(num_samples)).astype(np.int64)
        for name, rows in zip(names, KAGGLE_ROWS, strict=True)
    }
    with PackedWriter(folder, info) as writer:
        label = (random.random(num_samples) < 0.25).astype(np.float32)
        writer.append("train", label, random.standard_normal((num_samples, 13), np.float32), columns)
        (folder / "counts").mkdir()
        for name, rows in zip(names, KAGGLE_ROWS, strict=True):
            write_counts(folder / "counts" / name, np.bincount(columns[name], minlength=rows).astype(np.uint32))
        writer.close()
    return folder


def times(folder: Path) -> None:
    """Prints the seconds of `hotrow plan` on whole tables: in DRAM, on an SSD, and without a trial."""
    data = kaggle(folder / "data")
    for place, memory in (("dram", "dram"), ("ssd 1/4", {"dram": "580MB", "ssd": str(folder / "rows"), "force": True})):
        path = folder / "kaggle.yaml"
        path.write_text(yaml.safe_dump({"data": str(data), "model": MODELS["dlrm"], "memory": memory}))
        for more in ([], ["--no-trial"]):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "hotrow", "plan", str(path), *more], cwd=folder, check=True)
            print(f"-- {place} {' '.join(more)}: {time.perf_counter() - start:.1f} s", flush=True)


def hotrow(verb: str, path: Path) -> dict[str, Any]:
    """Runs a verb on a config, in a process of its own and beside the config, and returns what it prints as JSON."""
    command = [sys.executable, "-m", "hotrow", verb, str(path), "--json"]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"hotrow {verb} {path}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def step_ms(figures: dict[str, Any]) -> float:
    return float(sum(figures["step_ms"].values()))


def measure(name: str, path: Path) -> dict[str, Any]:
    """Returns the row of a config: milliseconds of a step in its trial and in two runs."""
    once, tried, again = hotrow("train", path), hotrow("plan", path), hotrow("train", path)
    runs = step_ms(once), step_ms(again)
    mean, own = math.sqrt(runs[0] * runs[1]), step_ms(tried)
    return {
        "name": name,
        "trial_ms": own,
        "runs_ms": runs,
        "error": math.exp(abs(math.log(own / mean))) - 1,
        "noise": math.exp(abs(math.log(runs[0] / runs[1]))) - 1,
    }


def geometric(values: Sequence[float]) -> float:
    """Returns the geometric mean of ratios 1 + value, less 1."""
    return math.exp(statistics.fmean(math.log1p(value) for value in values)) - 1


def choices(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Returns for each pair of configs of one model whether the trials name the faster one, or one as good."""
    found = []
    for a, b in itertools.combinations(rows, 2):
        if a["name"].partition(",")[0] == b["name"].partition(",")[0]:
            named, other = sorted((a, b), key=lambda row: row["trial_ms"])
            found.append(geometric_ms(named) <= geometric_ms(other) * (1 + CLOSE))
    return found


def geometric_ms(row: dict[str, Any]) -> float:
    return math.sqrt(row["runs_ms"][0] * row["runs_ms"][1])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of all rows."""
    noise = geometric([row["noise"] for row in rows])
    errors = sorted(row["error"] for row in rows)
    named = choices(rows)
    return {
        "error": geometric(errors),
        "noise": noise,
        "error_of_90_percent": errors[max(0, math.ceil(0.9 * len(errors)) - 1)],
        "choices": len(named),
        "named_well": statistics.fmean(named) if named else None,
    }


def main() -> None:
    """Measures, and prints a line for each config and the figures of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of configs; all if none is given")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to try")
    parser.add_argument("--out", help="JSON file of results to add to")
    parser.add_argument(
        "--quick", action="store_true", help="small tables: tries the command, measures nothing of worth"
    )
    parser.add_argument("--times", action="store_true", help="only time `plan` on Criteo Kaggle's whole tables")
    options = parser.parse_args()
    end_on_signals()
    if options.times:
        with tempfile.TemporaryDirectory(prefix="hotrow-trials-", dir=options.folder) as text:
            times(Path(text).absolute())
        return
    samples, scale, batch_size = QUICK if options.quick else (SAMPLES, SCALE, BATCH_SIZE)
    with tempfile.TemporaryDirectory(prefix="hotrow-trials-", dir=options.folder) as text:
        folder = Path(text).absolute()
        data = make_shape("kaggle", samples, scale, folder / "data")
        rows = []
        for name, path in configs(data, folder, batch_size).items():
            if options.names and not any(part in name for part in options.names):
                continue
            rows.append(row := measure(name, path))
            ms = ", ".join(f"{own:.3g}" for own in row["runs_ms"])
            print(
                f"{name:28} trial {row['trial_ms']:6.3g} ms, runs {ms}: off by {row['error']:.1%}, runs differ by "
                f"{row['noise']:.1%}",
                flush=True,
            )
    found = summary(rows)
    print(*(f"{name} {value:.4g}" for name, value in found.items() if value is not None), sep="\n")
    if not options.quick:
        record("trials", {"cells": rows, **found, **bench.circumstances()}, options.out)


if __name__ == "__main__":
    main()

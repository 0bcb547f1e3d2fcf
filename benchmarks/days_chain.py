"""Chains of days for the benchmarks of days: rows cut into days, each prepared on the one before, and a run on each.

Rows are text in Criteo's layout, which both the public sample and made-up streams have (benchmarks/criteo_text.py).
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotrow
from hotrow.config.load import make_config
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import runs
from hotrow.run.folder import RunFolder

SETTINGS: dict[str, Any] = {
    "model": {"name": "deepfm", "embedding_dim": 8, "embedding_init": 0.01, "deep_mlp": [64, 32]},
    "optimizer": {"dense": {"name": "adam", "lr": 0.001}, "sparse": {"name": "adagrad", "lr": 0.02}},
    "train": {"batch_size": 256, "epochs": 1, "eval_every": None, "log_every": 1000},
    "memory": "dram",
}
"""A small DeepFM, because Monolith's Table 2 has DeepFM: nothing here is tuned for one side."""


def cut(rows: Path, sizes: Sequence[int], folder: Path, *, skip: int = 0) -> list[Path]:
    """Writes consecutive lines of a text file, plain or gzip, as one file a day; returns the files.

    sizes: lines of each day. skip: lines before the first day. Raises ValueError if the file has fewer lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"day_{number:03}.tsv" for number in range(len(sizes))]
    with gzip.open(rows, "rb") if rows.suffix == ".gz" else rows.open("rb") as lines:
        num_skipped = sum(1 for _ in islice(lines, skip))
        for file, size in zip(files, sizes, strict=True):
            with file.open("wb") as out:
                num_found = sum(out.write(line) > 0 for line in islice(lines, size))
            if num_skipped < skip or num_found < size:
                raise ValueError(f"{rows} has fewer than {skip + sum(sizes):,} lines: ask for fewer rows")
    return files


def count_lines(rows: Path) -> int:
    with gzip.open(rows, "rb") if rows.suffix == ".gz" else rows.open("rb") as lines:
        return sum(1 for _ in lines)


def labels_of(file: Path) -> NDArray[np.float64]:
    """Returns the labels of rows in Criteo's layout, which begin each line."""
    with file.open("rb") as lines:
        return np.fromiter((float(line[:1]) for line in lines), np.float64)


def prepare_day(file: Path | Sequence[Path], out: Path, base: Path | None = None) -> Path:
    """Prepares rows, all of which train and all of whose ids have a row; returns `out`.

    base: the dataset of the day before; if None, the rows are the first day of a chain.
    """
    first: dict[str, Any] = {"base": "none", "split": "random", "fractions": (1, 0, 0), "min_count": 1}
    files = [str(file)] if isinstance(file, Path) else [str(each) for each in file]
    run_prepare("criteo", files, out, **({"base": base} if base else first))
    return out


def train_day(data: Path, run: Path, seed: int, before: Path | None = None) -> RunFolder:
    """Trains on a day from the weights of the run `before`; if None, from random weights."""
    train = {**SETTINGS["train"], "seed": seed}
    given = {**SETTINGS, "train": train, "data": str(data), "run": str(run), "from_run": before and str(before)}
    return runs.train(make_config(given), quiet=True)


def scores_of(run: Path, *files: Path) -> NDArray[np.float64]:
    """Returns the run's score of each row of raw files, one after another."""
    loaded = hotrow.load(run)
    try:
        return loaded.predict([str(file) for file in files]).astype(float)
    finally:
        loaded.close()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides warnings that days of a benchmark earn by being short, such as of few positive rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

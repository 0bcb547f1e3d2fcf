"""What training every day is worth: Monolith's Table 2, one stream frozen, daily and hourly, and thirty days beside
retraining on all days so far."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars
from numpy.typing import NDArray

import hotrow
from benchmarks.criteo_text import write_criteo
from benchmarks.days_chain import count_lines, cut, labels_of, prepare_day, scores_of, train_day
from benchmarks.quality import error_of, paired, placements
from benchmarks.quality_peers import logloss
from benchmarks.synthetic_config import criteo_kaggle

PAPER = {10: "79.66 ± 0.020", 50: "79.78 ± 0.005", 100: "79.80 ± 0.008"}
"""AUC in percent of online training by number of shards; frozen 79.42 to 79.44 (arXiv 2209.07663, Table 2)."""
PAPER_ROWS = 45_840_617
"""Rows of Criteo Kaggle, of which the paper trains 5/7 as a batch and streams 2/7."""


# ---- Monolith's Table 2


def made_up(file: Path, num_rows: int, drift: float, num_days: float = 7.0) -> Path:
    """Writes made-up rows of the shape of Criteo Kaggle, in the order of time; returns the file.

    Its large tables have as small a share of their ids as `num_rows` is of its rows, so that ids are as often new.
    """
    write_criteo(file, criteo_kaggle(num_rows, scale=min(1, num_rows / PAPER_ROWS), drift=drift, num_days=num_days))
    return file


def parts_of(num_rows: int, num_parts: int) -> list[int]:
    """Returns the sizes of equal parts, which differ by one row at most."""
    return np.diff(np.linspace(0, num_rows, num_parts + 1).astype(int)).tolist()


def monolith(rows: Path, name: str, folder: Path, *, seeds: int, shards: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a cell for each number of shards: Algorithm 1 of arXiv 2209.07663 on the rows of a file, in order.

    A model trains on the first 5/7 of the rows. Then the next shard is scored by the newest weights and by those first
    ones, and the newest train on it, shard by shard.
    """
    num_rows = count_lines(rows)
    batch = num_rows * 5 // 7
    base = prepare_day(cut(rows, [batch], folder / "rows")[0], folder / "batch")
    frozen = [train_day(base, folder / f"frozen-{seed}", seed).path for seed in range(1, seeds + 1)]
    cells = []
    for num_shards in shards:
        sizes = parts_of(num_rows - batch, num_shards)
        files = cut(rows, sizes, folder / "rows", skip=batch)
        labels = [labels_of(file) for file in files]
        before = [np.split(scores_of(run, *files), np.cumsum(sizes)[:-1]) for run in frozen]
        figures = gains(labels, stream(frozen, files, base, folder / "stream"), before)
        cells.append({"name": f"days_monolith_{name}_{num_shards}", "shards": num_shards, "rows": num_rows, **figures})
        print(cells[-1], file=sys.stderr, flush=True)
    return cells


def stream(runs: Sequence[Path], files: Sequence[Path], base: Path, folder: Path) -> list[list[NDArray[Any]]]:
    """Returns, by run and file, the scores by weights that went on from the run through all files before that one.

    runs: with the seeds 1, 2, ...; all trained on the dataset `base`. Each piece's dataset has all ids so far, so only
    the newest one stays on disk.
    """
    found: list[list[NDArray[Any]]] = [[] for _ in runs]
    newest, day = list(runs), base
    for number, file in enumerate(files):
        for scores, run in zip(found, newest, strict=True):
            scores.append(scores_of(run, file))
        if number + 1 < len(files):
            own = folder / f"{number:03}"
            day = prepare_day(file, own / "day", day)
            newest = [train_day(day, own / f"run-{seed}", seed, run).path for seed, run in enumerate(newest, 1)]
            shutil.rmtree(folder / f"{number - 1:03}", ignore_errors=True)
        print(f"{folder.name}: {number + 1} of {len(files)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return found


Scores = Sequence[Sequence[NDArray[Any]]]


def gains(labels: Sequence[NDArray[Any]], online: Scores, frozen: Scores) -> dict[str, Any]:
    """Returns AUC of both sides in percent and how far the first is above the second, in points.

    online, frozen: scores by seed and shard. As in the paper an AUC is the mean over shards; `gain_se` is its standard
    error over seeds. `pooled_gain` is that of all shards' rows together, `pooled_se` its standard error over rows.
    """
    aucs = np.array([[auc_of_shards(labels, one) for one in side] for side in (online, frozen)]) * 100
    all_rows = [np.stack([np.concatenate(one) for one in side]) for side in (online, frozen)]
    pooled = paired(np.concatenate(labels), *all_rows)
    gain = aucs[0] - aucs[1]
    return {
        "shard_rows": float(np.mean([len(each) for each in labels])),
        "seeds": len(gain),
        "online_auc": float(aucs[0].mean()),
        "frozen_auc": float(aucs[1].mean()),
        "gain": float(gain.mean()),
        "gain_se": error_of(gain) if len(gain) > 1 else None,
        "pooled_gain": pooled["auc"] * 100,
        "pooled_se": pooled["auc_se"] * 100,
    }


def auc_of_shards(labels: Sequence[NDArray[Any]], scores: Sequence[NDArray[Any]]) -> float:
    """Returns the mean AUC of the shards that have rows of both labels."""
    both = [(own, score) for own, score in zip(labels, scores, strict=True) if 0 < own.mean() < 1]
    return float(np.mean([placements(own, score)[0].mean() for own, score in both]))


def monolith_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of a cell, by column."""
    error = "" if cell["gain_se"] is None else f" ± {cell['gain_se']:.3f}"
    return {
        "shards": str(cell["shards"]),
        "rows a shard": f"{cell['shard_rows']:,.0f}",
        "the paper's": f"{PAPER_ROWS * 2 / 7 / cell['shards']:,.0f}",
        "frozen": f"{cell['frozen_auc']:.2f}",
        "online": f"{cell['online_auc']:.2f}",
        "gain, over seeds": f"{cell['gain']:+.3f}{error}",
        "gain on all rows, over rows": f"{cell['pooled_gain']:+.3f} ± {cell['pooled_se']:.3f}",
        "the paper's online (its frozen 79.42 to 79.44)": PAPER.get(cell["shards"], ""),
    }


# ---- frozen, daily and hourly


def drift(folder: Path, *, num_days: int, day_rows: int, drift: float, pieces: int) -> list[dict[str, Any]]:
    """Returns a cell for each made-up day after the first, and one for all: NE of three models on the same rows.

    All trained on the first day. One is frozen; one trains on each day once that is over, one on each of `pieces` equal
    pieces of it, as on its hours. Each row is scored before a model trains on it. What training again gains is the
    newer rows and that there are more of them.
    """
    rows = made_up(folder / "rows.tsv", num_days * day_rows, drift, num_days)
    base = prepare_day(cut(rows, [day_rows], folder / "rows")[0], folder / "base")
    run = train_day(base, folder / "first", 1).path
    days, hours = (
        cut(rows, parts * (num_days - 1), folder / "rows" / str(len(parts)), skip=day_rows)
        for parts in ([day_rows], parts_of(day_rows, pieces))
    )
    scores = {"frozen": scores_of(run, *days)}
    for name, files in (("daily", days), ("hourly", hours)):
        scores[name] = np.concatenate(stream([run], files, base, folder / name)[0])
    labels = np.concatenate([labels_of(file) for file in days])
    losses = {name: logloss(labels, each) for name, each in scores.items()}
    spans = {str(day): slice((day - 2) * day_rows, (day - 1) * day_rows) for day in range(2, num_days + 1)}
    return [
        {"name": f"days_drift_{day}", "day": day, "drift": drift, "pieces": pieces}
        | apart(labels[span], {name: each[span] for name, each in losses.items()})
        for day, span in (spans | {"all": slice(None)}).items()
    ]


def apart(labels: NDArray[Any], losses: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Returns the NE of each model, and how far each is below the one that trains less often, with the standard error
    over rows of that difference.

    losses: LogLoss of each row, `frozen`, `daily` and `hourly`.
    """
    best = entropy(labels)
    cell: dict[str, Any] = {"rows": len(labels)} | {f"{name}_ne": each.mean() / best for name, each in losses.items()}
    for name, other in (("daily", "frozen"), ("hourly", "daily")):
        below = (losses[other] - losses[name]) / best
        cell |= {f"{name}_below": float(below.mean()), f"{name}_below_se": error_of(below)}
    return cell


def drift_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of a cell, by column."""
    names = ("frozen", "daily", "hourly")
    told = [f"{cell[f'{name}_below']:+.4f} ± {cell[f'{name}_below_se']:.4f}" for name in names[1:]]
    return {
        "day": cell["day"],
        "rows": f"{cell['rows']:,}",
        **{f"NE {name}": f"{cell[f'{name}_ne']:.4f}" for name in names},
        "daily below frozen": told[0],
        "hourly below daily": told[1],
    }


# ---- thirty days


class Clock(dict[str, float]):
    """Seconds by part of the work."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self[part] = self.get(part, 0.0) + time.perf_counter() - started


def thirty(folder: Path, *, num_days: int, day_rows: int, drift: float, seed: int = 1) -> dict[str, Any]:
    """Returns the cell of made-up days: training on each new day beside retraining on all days so far.

    Both models of a day score the next one. Costs are seconds: of preparing a day and training on it from the day
    before, beside preparing and training the same rows as if there were nothing else; and of all retraining.
    """
    files = cut(
        made_up(folder / "rows.tsv", num_days * day_rows, drift, num_days), [day_rows] * num_days, folder / "rows"
    )
    day = prepare_day(files[0], folder / "000" / "day")
    daily, clock, losses = train_day(day, folder / "000" / "run", seed), Clock(), []
    for number, (file, after) in enumerate(pairwise(files[1:]), 1):
        own, base, before = folder / f"{number:03}", day, daily
        with clock("prepare_day"):
            day = prepare_day(file, own / "day", base)
        with clock("prepare_alone"):
            prepare_day(file, own / "alone")
        with clock("train_day"):
            daily = train_day(day, own / "run", seed, before.path)
        with clock("train_alone"):
            alone = train_day(day, own / "new", seed)
        with clock("retrain"):
            again = train_day(prepare_day(files[: number + 1], own / "all"), own / "again", seed)
        for part, run in (("steps_day", daily), ("steps_alone", alone)):
            clock[part] = clock.get(part, 0.0) + (run.record.train_s or 0.0)
        label = labels_of(after)
        sides = [logloss(label, scores_of(run.path, after)).mean() / entropy(label) for run in (daily, again)]
        losses.append(sides)
        print(f"day {number + 2}: NE {sides[0]:.5f}, retrained {sides[1]:.5f}", file=sys.stderr, flush=True)
        shutil.rmtree(before.path.parent)
        shutil.rmtree(own / "all")
    figures = against_retraining(losses, clock)
    return {"name": "days_thirty", "days": num_days, "rows": day_rows, "drift": drift, **figures}


def entropy(label: NDArray[np.float64]) -> float:
    """Returns the LogLoss of the mean label, to which NE is relative."""
    mean = label.mean()
    return float(-(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))


def against_retraining(losses: Sequence[Sequence[float]], spent: Mapping[str, float]) -> dict[str, Any]:
    """Returns the mean NE of both sides, and the bars: how far daily training is above, and what it costs.

    losses: NE of the next day, daily and retrained, by day.
    """
    daily, again = np.array(losses).T
    difference = (daily - again) / again
    return {
        "ne_daily": float(daily.mean()),
        "ne_retrained": float(again.mean()),
        "ne_above": float(difference.mean()),
        "ne_above_se": error_of(difference),
        "training_cost": spent["train_day"] / spent["train_alone"],
        "steps_cost": spent["steps_day"] / spent["steps_alone"],
        "preparing_cost": spent["prepare_day"] / spent["prepare_alone"],
        "retraining_cost": spent["retrain"] / (spent["prepare_day"] + spent["train_day"]),
        "seconds": dict(spent),
    }


def thirty_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of the cell, by column."""
    return {
        "days": str(cell["days"]),
        "rows a day": f"{cell['rows']:,}",
        "NE daily": f"{cell['ne_daily']:.5f}",
        "NE retrained": f"{cell['ne_retrained']:.5f}",
        "daily above": f"{cell['ne_above']:+.3%} ± {cell['ne_above_se']:.3%}",
        "training cost": f"{cell['training_cost']:.2f}x",
        "of the steps": f"{cell['steps_cost']:.2f}x",
        "preparing cost": f"{cell['preparing_cost']:.2f}x",
        "retraining every day": f"{cell['retraining_cost']:.1f}x",
    }


# ---- real days


def real(days: Path, folder: Path, label: str, time_column: str) -> list[dict[str, Any]]:
    """Returns, for each day from the third on, what the two models before it score on it."""
    more = ["--time", time_column] if time_column else []
    command = [sys.executable, "-m", "hotrow", "days", str(days), "--out", str(folder / "chain"), "--keep", "1000"]
    subprocess.run([*command, "--label", label, *more], check=True, stdout=subprocess.DEVNULL)
    runs, cells = sorted((folder / "chain" / "runs").iterdir()), []
    later = sorted(path for path in days.iterdir() if path.is_file())[2:]
    for day, (older, newer) in zip(later, pairwise(runs[:-1]), strict=True):
        labels = polars.read_csv(day, columns=[label]).to_series().to_numpy().astype(float)
        scores = [hotrow.load(run).predict(day).astype(float)[None] for run in (older, newer)]
        found = {"day": day.name, "rows": len(labels), **paired(labels, scores[1], scores[0])}
        for name, own in zip(("before", "newest"), scores, strict=True):
            found |= {
                f"auc_{name}": placements(labels, own[0])[0].mean(),
                f"loss_{name}": logloss(labels, own[0]).mean(),
            }
        cells.append({name: getattr(value, "item", lambda value=value: value)() for name, value in found.items()})
    return cells


def real_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of the cell, by column."""
    return {
        "day": cell["day"],
        "rows": f"{cell['rows']:,}",
        "AUC / LogLoss of the model a day older": f"{cell['auc_before']:.4f} / {cell['loss_before']:.4f}",
        "of the newest": f"{cell['auc_newest']:.4f} / {cell['loss_newest']:.4f}",
        "AUC gained": f"{cell['auc']:+.4f} ± {cell['auc_se']:.4f}",
    }

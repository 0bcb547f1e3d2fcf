"""Figures with the error that chance gives them: over seeds of one recipe, and of two runs over their test rows.

Two models score the same test rows, and a row that is hard for one is hard for the other, so their difference is known
better than each metric. Its standard error is that over rows drawn one by one: rows of one user are alike, which makes
the true error larger. What another seed would give is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hotrow.api import load
from hotrow.config.schema import Config
from hotrow.objectives.objective import compared, shown
from hotrow.run.record import RunRecord

MAX_SEEDS = 1000


def of_seeds(config: Config, num_seeds: int) -> list[Config]:
    """The config with `num_seeds` seeds from its own on, folders seed-N below its own. Raises ValueError unless it is 1
    to MAX_SEEDS."""
    if not 1 <= num_seeds <= MAX_SEEDS:
        raise ValueError(f"--seeds is {num_seeds}; it must be from 1 to {MAX_SEEDS:,}")
    found = []
    for seed in range(config.train.seed, config.train.seed + num_seeds):
        run = None if config.run is None else str(Path(config.run) / f"seed-{seed}")
        found.append(config.model_copy(update={"run": run, "train": config.train.model_copy(update={"seed": seed})}))
    return found


def over_seeds(records: Sequence[RunRecord]) -> dict[str, dict[str, float | None]]:
    """Returns, by metric of finished runs, the `mean` over runs and its standard `error`, None if it is not known."""
    names = records[0].trained_for.measures if records[0].final_metrics else ()
    return {name: mean_of([record.final_metrics[name] for record in records]) for name in names}


def mean_of(values: Sequence[float | None]) -> dict[str, float | None]:
    """Returns the mean and its standard error; None if a value is None, and of one value no error."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "error": None}
    return {"mean": fmean(known), "error": stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None}


def with_error(own: Mapping[str, float | None]) -> str:
    """Returns what `mean_of` returned, for people."""
    return shown(own["mean"]) + ("" if own["error"] is None else f" +- {own['error']:.4f}")


def compare(first: Path | str, second: Path | str) -> dict[str, Any]:
    """The `options` in which two runs differ, and `compared` for their test rows. Raises ValueError if their rows or
    objectives differ."""
    runs, names = [load(first), load(second)], [str(first), str(second)]
    for what in ("objective", "dataset"):
        one, other = (getattr(run.record, what) for run in runs)
        if one is None or other is None:
            raise ValueError(f"{names[one is not None]} ended before its first step, so it has no model to compare")
        if one != other and (what == "objective" or one["checksum"] != other["checksum"]):
            one, other = (own if isinstance(own, str) else own["path"] for own in (one, other))
            raise ValueError(
                f"the {what} of {first} is {one}, that of {second} is {other}: only figures of the same test rows, for "
                "one objective, can be compared; train both on one dataset"
            )
    by = {run.record.metrics_by for run in runs} - {None}
    if len(by) > 1:
        raise ValueError(f"{first} and {second} are judged by {' and by '.join(sorted(map(str, by)))} (metrics.by)")
    scored = []
    for run in runs:
        with closing(run):
            scored.append(run.judged("test"))
    return {
        "runs": names,
        "rows": scored[0].num_rows,
        "options": differences({name: run.folder.options() for name, run in zip(names, runs, strict=True)}),
        "metrics": compared(runs[0].record.trained_for, *scored),
        "samples_per_s": [run.record.samples_per_s for run in runs],
    }


def verdict(own: Mapping[str, Any]) -> list[str]:
    """Returns what `judged` returned, for people."""
    if own["difference"] is None:
        return ["undefined", ""]
    error = "" if own["error"] is None else f" +- {own['error']:.5f}"
    word = {None: "no error known", True: "within noise", False: "beyond noise"}[own["within_noise"]]
    return [f"{own['difference']:+.5f}{error}", word]


def differences(options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns, by option in which runs differ, the value of each run that has it. options: of each run, by its name."""
    names = dict.fromkeys(name for own in options.values() for name in own if name != "run")
    values = {name: {run: own[name] for run, own in options.items() if name in own} for name in names}
    return {name: own for name, own in values.items() if len(own) < len(options) or len({*own.values()}) > 1}


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Returns what `compare` returned as lines for people."""
    options = [[name, *(own.get(run, "-") for run in found["runs"])] for name, own in found["options"].items()]
    speeds = [shown(speed).partition(".")[0] for speed in found["samples_per_s"]]
    metrics = [
        [name, shown(own["first"]), shown(own["second"]), *verdict(own)] for name, own in found["metrics"].items()
    ]
    first = in_columns([["option", *found["runs"]], *options, ["samples/s", *speeds]])
    return [*first, "", *in_columns([[f"{found['rows']:,} test rows", *found["runs"], "difference", ""], *metrics])]


def in_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the rows of a table as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]

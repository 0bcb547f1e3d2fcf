"""Metrics with their standard errors: over seeds of one recipe, and between two runs over their test rows.

Two models score the same test rows, and a row that is hard for one is hard for the other, so their difference is known
better than each metric. Its standard error takes rows as independent. Rows of one user are alike, so the true error is
larger. It also leaves out how much another seed would change the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hotrow.api import load
from hotrow.base.files import crc32
from hotrow.config.schema import Config
from hotrow.data.packed.format import DatasetInfo
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.split import TEST, plan_of
from hotrow.objectives.objective import Metrics, Objective, compared, shown
from hotrow.report.columns import schema_of
from hotrow.run.record import RunRecord

MAX_SEEDS = 1000


def of_seeds(config: Config, num_seeds: int) -> list[Config]:
    """Returns a config for each of `num_seeds` seeds, beginning with its own; a run folder that it names gets folders
    seed-N. Raises ValueError if `num_seeds` is not from 1 to MAX_SEEDS."""
    if not 1 <= num_seeds <= MAX_SEEDS:
        raise ValueError(f"--seeds is {num_seeds}; it must be from 1 to {MAX_SEEDS:,}")
    found = []
    for seed in range(config.train.seed, config.train.seed + num_seeds):
        run = None if config.run is None else str(Path(config.run) / f"seed-{seed}")
        found.append(config.model_copy(update={"run": run, "train": config.train.model_copy(update={"seed": seed})}))
    return found


def over_seeds(records: Sequence[RunRecord]) -> dict[str, dict[str, float | None]]:
    """Returns, by metric, the `mean` over finished runs and its standard `error`; see `mean_of`."""
    names = records[0].trained_for.measures if records[0].final_metrics else ()
    return {name: mean_of([record.final_metrics[name] for record in records]) for name in names}


def mean_of(values: Sequence[float | None]) -> dict[str, float | None]:
    """Returns the mean and its standard error. Both are None if a value is None; the error is None for one value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "error": None}
    return {"mean": fmean(known), "error": stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None}


def with_error(own: Mapping[str, float | None]) -> str:
    """Formats the result of `mean_of` for people."""
    return shown(own["mean"]) + ("" if own["error"] is None else f" +- {own['error']:.4f}")


def compare(first: Path | str, second: Path | str) -> dict[str, Any]:
    """Returns the `options` in which two runs differ, and the result of `compared` for each metric on their test rows.

    If their data was prepared from the same files by two schemas, the test rows that both have are found by their
    numbers in the files. Raises ValueError, which names both, if they have no such rows or not the same objective.
    """
    runs, names = [load(first), load(second)], [str(first), str(second)]
    one, other = (run.record.dataset for run in runs)
    if one is None or other is None:
        raise ValueError(f"{names[one is not None]} ended before its first step, so it has no model to compare")
    by = {run.record.metrics_by for run in runs} - {None}
    if len(by) > 1:
        raise ValueError(f"{first} and {second} are judged by {' and by '.join(sorted(map(str, by)))} (metrics.by)")
    objectives, is_one = sorted({run.record.objective for run in runs}), one["checksum"] == other["checksum"]
    try:
        if len(objectives) > 1:
            raise ValueError(f"their objectives are {' and '.join(objectives)}")
        if runs[0].record.trained_for.retrieves and not is_one:
            raise ValueError("each finds the items of its own dataset")
        at = [] if is_one else _common_rows([PackedDataset.open(run.folder.encoder).info for run in runs])
    except ValueError as error:
        raise ValueError(
            f"{first}, of the dataset {one['path']}, and {second}, of {other['path']}, cannot be compared: {error}; "
            "train both for one objective, on one dataset or on two that were prepared from the same files"
        ) from None
    scored = []
    for run in runs:
        with closing(run):
            scored.append(run.judged("test"))
    scored = scored if is_one else _chosen(names, runs[0].record.trained_for, scored, at)
    return {
        "runs": names,
        "rows": scored[0].num_rows,
        "options": differences({name: run.folder.options() for name, run in zip(names, runs, strict=True)}),
        "metrics": compared(runs[0].record.trained_for, *scored),
        "samples_per_s": [run.record.samples_per_s for run in runs],
    }


def _common_rows(infos: Sequence[DatasetInfo]) -> list[NDArray[np.int64]]:
    """Returns, for each dataset, the positions among its test rows of those that are test rows of both. Raises
    ValueError, which says why, if these cannot be known."""
    one, other = ([file.checksum for file in info.sources] for info in infos)
    if not all(one) or one != other or not one:
        raise ValueError("their rows are not known to come from the same files")
    first, second = map(_test_rows, infos)
    common, *at = np.intersect1d(first, second, assume_unique=True, return_indices=True)
    if not len(common):
        raise ValueError("no row tests both")
    return at


def _test_rows(info: DatasetInfo) -> NDArray[np.int64]:
    """Returns the row numbers that a dataset's test rows have in its files, in the order of the dataset."""
    made, paths = info.ids, [Path(file.path) for file in info.sources]
    if made.get("rows") is not None or made.get("sample") != 1.0 or "day" in made or info.summary["rows_skipped"]:
        raise ValueError("rows of the files were left out, so numbers of rows are not known")
    numbers: NDArray[np.int64] = np.arange(cast(int, info.summary["rows_read"]))
    times: NDArray[np.int64] | None = None
    schema = schema_of(info)
    if schema is not None and schema.time is not None and made["source"] != "criteo":
        for path, file in zip(paths, info.sources, strict=True):
            if not path.is_file() or f"crc32:{crc32(path.resolve()):08x}" != file.checksum:
                raise ValueError(f"{path}, which says the times of rows, is gone or has changed")
        encodings: Any = made["encodings"]
        opened = open_source(str(made["source"]), [*map(str, paths)], schema=schema, encodings=encodings)
        times = np.concatenate([chunk.time for chunk in opened.source.chunks() if chunk.time is not None])
        numbers = np.argsort(times, kind="stable")  # as preparation stores them
        times = times[numbers]
    is_test: NDArray[np.bool_] = plan_of(cast(Any, made["split"])).assign(numbers, times) == TEST
    return numbers[is_test]


def _chosen(
    names: Sequence[str], objective: Objective, scored: Sequence[Metrics], at: Sequence[NDArray[np.int64]]
) -> list[Metrics]:
    """Each run's metrics on the rows at the given positions. Raises ValueError if their labels or weights differ."""
    rows: Any = [
        [None if column is None else column[places] for column in own.rows()]
        for own, places in zip(scored, at, strict=True)
    ]
    for what, one, other in zip(("labels", "weights"), rows[0][1:], rows[1][1:], strict=True):
        if not np.array_equal(one, other):  # None equals None
            raise ValueError(f"{' and '.join(names)} read other {what} of the same rows; give their schemas the same")
    found = [objective.metrics() for _ in rows]
    for metrics, own in zip(found, rows, strict=True):
        metrics.update(*own)
    return found


def verdict(own: Mapping[str, Any]) -> list[str]:
    """Formats the result of `judged` for people."""
    if own["difference"] is None:
        return ["undefined", ""]
    error = "" if own["error"] is None else f" +- {own['error']:.5f}"
    word = {None: "no error known", True: "within noise", False: "beyond noise"}[own["within_noise"]]
    return [f"{own['difference']:+.5f}{error}", word]


def differences(options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns, for each option in which runs differ, its value by run. options: those of each run, by its name."""
    names = dict.fromkeys(name for own in options.values() for name in own if name != "run")
    values = {name: {run: own[name] for run, own in options.items() if name in own} for name in names}
    return {name: own for name, own in values.items() if len(own) < len(options) or len({*own.values()}) > 1}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns, by dotted name, the shortest ending that tells it from the others."""
    ends = {name: [name.split(".", k)[-1] for k in range(name.count("."), -1, -1)] for name in names}
    return {name: next((e for e in own if sum(e in o for o in ends.values()) == 1), name) for name, own in ends.items()}


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Formats the result of `compare` as lines for people."""
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

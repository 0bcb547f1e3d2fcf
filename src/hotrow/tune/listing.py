"""The runs below a folder, as `hotrow runs` lists and removes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotrow.base.door import remove
from hotrow.base.files import folder_bytes, size
from hotrow.base.progress import rate
from hotrow.objectives.objective import shown
from hotrow.run.folder import RUN, RunFolder
from hotrow.run.runs import remove_left_rows
from hotrow.tune.compare import differences, in_columns, short_names


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Returns the facts of each run in and below `folder`, without runs inside runs; links are not followed.

    Each has a path, status ("killed" and "unreadable" among them), split and metrics, samples per s, bytes, and the
    options in which the runs differ. Raises ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass one with runs in it, such as runs, or two runs to compare")
    options, rows = {}, list[dict[str, Any]]()
    for place, folders, files in os.walk(folder):
        folders.sort()
        if RUN not in files:
            continue
        folders.clear()
        try:
            run = RunFolder.open(place)
        except (OSError, ValueError) as error:
            rows.append({"run": place, "status": "unreadable", "reason": str(error)})
            continue
        record, metrics = run.record, run.record.final_metrics
        options[place] = run.options()
        row = {
            "run": place,
            "status": "killed" if record.status == "running" and not run.is_training() else record.status,
            "started": record.started,
            "split": metrics.get("split"),
            "metrics": {name: metrics[name] for name in record.trained_for.measures} if metrics else {},
            "samples_per_s": record.samples_per_s,
            "bytes": folder_bytes(run.path),
        }
        rows.append(row)
    differing = differences(options)
    return [{**row, "options": {name: own.get(row["run"]) for name, own in differing.items()}} for row in rows]


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Formats the result of `list_runs` as lines for people."""
    names = dict.fromkeys(name for row in rows for name in row.get("metrics", ()))
    head = ["run", "status", *names, "samples/s", "size", "options that differ"]
    short = short_names({name for row in rows for name in row.get("options", ())})
    return in_columns([head, *(_cells(row, names, short) for row in rows)]) if rows else ["no runs"]


def _cells(row: Mapping[str, Any], names: Mapping[str, None], short: Mapping[str, str]) -> list[str]:
    if "reason" in row:
        return [row["run"], row["status"], *("" for _ in names), "", "", row["reason"]]
    status = row["status"] + (" (val)" if row["split"] == "val" else "")
    metrics = [shown(row["metrics"][name]) if name in row["metrics"] else "" for name in names]
    speed = rate(row["samples_per_s"]) if row["samples_per_s"] else ""
    options = ", ".join(f"{short[name]} {value}" for name, value in row["options"].items() if value is not None)
    return [row["run"], status, *metrics, speed, size(row["bytes"]), options]


def remove_run(path: Path) -> int:
    """Removes a run's folder, and rows that a killed process left elsewhere; returns the bytes of the folder. Raises
    ValueError if `path` is not a run, or if a process trains there."""
    run = RunFolder.open(path)
    with run.claimed():
        num_bytes = folder_bytes(path)
        remove_left_rows(run)
        remove(path.absolute())
    return num_bytes

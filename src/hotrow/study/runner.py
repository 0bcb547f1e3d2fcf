"""The sweep runner: what a study still has to measure, measured and written as JSON, CSV and one HTML page.

Every measured cell is in `<out>/<name>.json` before the next begins; a run that is started again skips it.
"""

from __future__ import annotations

import csv
import importlib.resources
import io
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hotrow import bench
from hotrow.files import atomic_write, available_memory_bytes, read_json, write_json
from hotrow.host import usable_cores
from hotrow.progress import ProgressLine, duration
from hotrow.study import kernels
from hotrow.study.kernels import KernelCell
from hotrow.study.page import study_page

STUDIES = ("kernels",)
MEMORY_SHARE = 0.6
"""Of what this process may use: what the tables of one cell take at most, unless told otherwise."""
SAME = ("machine", "backend", "versions")
"""Circumstances that all cells of one file share."""


@dataclass(frozen=True)
class Plan:
    """What a study consists of here."""

    cells: tuple[KernelCell, ...]
    """To be measured, those with the same tables side by side."""
    skipped: tuple[dict[str, str], ...]
    """`key` and `reason` of those that cannot be measured here."""


def load_preset(name: str) -> dict[str, Any]:
    """The preset of a study. Raises ValueError with the known names."""
    if name not in STUDIES:
        raise ValueError(f"no study is called {name!r}; choose from {', '.join(STUDIES)}")
    text = (importlib.resources.files("hotrow.study") / f"{name}.yaml").read_text(encoding="utf-8")
    preset: dict[str, Any] = yaml.safe_load(text)
    return preset


def make_plan(preset: Mapping[str, Any], *, quick: bool, memory_bytes: int, cores: int) -> Plan:
    """Every cell of the preset's groups, or of its quick form."""
    leave_out = preset["quick"]["leave_out"] if quick else ()
    cells: list[KernelCell] = []
    for group in preset["groups"]:
        if group["name"] not in leave_out:
            shorter = preset["quick"]["axes"].get(group["name"], {}) if quick else {}
            cells += kernels.expand(group, {**group["axes"], **shorter}, memory_bytes=memory_bytes)
    reasons = {cell.key: kernels.refusal(cell, memory_bytes=memory_bytes, cores=cores) for cell in cells}
    skipped = tuple({"key": key, "reason": reason} for key, reason in reasons.items() if reason is not None)
    return Plan(tuple(sorted((c for c in cells if reasons[c.key] is None), key=kernels.setup_of)), skipped)


def run_study(
    name: str,
    out: Path | str | None = None,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    estimate_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
    preset: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure what is left of the study `name`, and write its files into `out`; the result names and counts them.

    out: folder, by default studies/<name> or studies/<name>-quick. quick: a first look, in under a minute.
    memory_bytes: what the tables of one cell may take; by default 60 % of what this process may use. estimate_only:
    measure nothing and write nothing. say: is told the number of cells and the estimate before the first begins.
    preset: in place of the study's own.

    Raises ValueError for an unknown study, and where `out` holds cells of another machine, backend or version.
    """
    preset = preset or load_preset(name)
    folder = Path(out) if out is not None else Path("studies") / (f"{name}-quick" if quick else name)
    file = folder / f"{name}.json"
    if memory_bytes is None:  # as before where this goes on: what fits must not change on the way
        before = read_json(file)["memory_bytes"] if file.exists() else 0
        memory_bytes = min(before, available_memory_bytes()) or int(MEMORY_SHARE * available_memory_bytes())
    plan = make_plan(preset, quick=quick, memory_bytes=memory_bytes, cores=usable_cores())
    rows = _measured_before(file)
    left = [cell for cell in plan.cells if cell.key not in rows]
    seconds = kernels.estimate_s(left)
    say(
        f"{name}: {len(left)} of {len(plan.cells)} cells to measure, about {duration(seconds)}; "
        f"{len(plan.skipped)} skipped; tables of at most {memory_bytes / 2**30:.1f} GiB"
    )
    result = {
        "study": name,
        "out": str(folder),
        "cells": len(plan.cells),
        "measured": len(plan.cells) - len(left),
        "skipped": len(plan.skipped),
        "estimate_s": seconds,
    }
    if estimate_only:
        return result
    folder.mkdir(parents=True, exist_ok=True)
    circumstances = bench.circumstances()
    report = {"study": name, "quick": quick, "memory_bytes": memory_bytes, **circumstances}
    start = time.monotonic()
    try:
        _measure(left, rows, lambda: _write(file, report, plan, rows), quick=quick, estimate=seconds)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; {len(rows)} cells are in {file}, the same command measures the rest"
        ) from None
    report["roofs"] = kernels.roofs(usable_cores())
    _write(file, report, plan, rows)
    with atomic_write(folder / f"{name}.csv") as stream:
        stream.write(as_csv([*rows.values()]).encode())
    with atomic_write(folder / f"{name}.html") as stream:
        stream.write(study_page(preset, read_json(file)).encode())
    files = [str(folder / f"{name}.{suffix}") for suffix in ("json", "csv", "html")]
    return {**result, "measured": len(plan.cells), "seconds": time.monotonic() - start, "files": files}


def _measured_before(file: Path) -> dict[str, dict[str, Any]]:
    """Rows by key; raises ValueError where they were measured under other circumstances."""
    if not file.exists():
        return {}
    before, now = read_json(file), bench.circumstances()
    different = [name for name in SAME if before[name] != now[name]]
    if different:
        raise ValueError(
            f"{file} was measured under another {' and another '.join(different)}; "
            "pass another --out, or remove the file to measure all of it again"
        )
    return {row["key"]: row for row in before["cells"]}


def _measure(
    left: Sequence[KernelCell],
    rows: dict[str, dict[str, Any]],
    write: Callable[[], None],
    *,
    quick: bool,
    estimate: float,
) -> None:
    runner = kernels.KernelRunner(seconds=kernels.ROUND_SECONDS / 5 if quick else kernels.ROUND_SECONDS)
    now = {name: value for name, value in bench.circumstances().items() if name in ("commit", "date")}
    num_done = 0
    with ProgressLine() as line:
        line.update(lambda: f"making tables; {len(left)} cells, about {duration(estimate)}")
        for _, group in itertools.groupby(left, kernels.setup_of):
            for cell, row in runner.run(list(group)):
                rows[cell.key] = {**row, **now}
                num_done += 1
                write()
                line.update(lambda: f"{num_done}/{len(left)} cells  {cell.key}  {row['ms']:.3g} ms")  # noqa: B023


def _write(file: Path, report: Mapping[str, Any], plan: Plan, rows: Mapping[str, dict[str, Any]]) -> None:
    write_json(file, {**report, "skipped": list(plan.skipped), "cells": list(rows.values())})


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per cell; a spread becomes two columns."""
    flat = [
        {
            **{name: value for name, value in row.items() if name != "spread_ms"},
            "least_ms": row["spread_ms"][0],
            "most_ms": row["spread_ms"][1],
        }
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(flat[0]) if flat else ["key"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()

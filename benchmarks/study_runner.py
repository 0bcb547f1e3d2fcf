"""The runner of studies: measures the cells that a study still lacks, and writes JSON, CSV and one HTML page.

Every measured cell is in `<out>/<name>.json` before the next one begins, so a study that is started again continues
where it stopped.
"""

from __future__ import annotations

import csv
import io
import itertools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ConfigDict, JsonValue
from typing_extensions import TypedDict

from benchmarks import bench
from hotrow.base.files import atomic_write
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressLine, duration
from hotrow.base.records import Count, Document

MEMORY_SHARE = 0.6
"""The share of the available memory that the tables of one cell may take, unless the user sets a limit."""
SPREADS = {"spread_ms": ("least_ms", "most_ms"), "spread": ("least_speed", "most_speed")}
"""Fields of a row that hold a pair of numbers, and the two columns that each becomes in the CSV file."""
SAME = ("machine", "backend", "versions")
"""Circumstances that all cells of one file must share."""
_OPEN = ConfigDict(strict=True, extra="allow")


class _Cell(TypedDict):
    """A row of figures. Every study has fields of its own."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]  # pydantic's way to configure a TypedDict

    key: str


class _Report(TypedDict):
    """The fields of a study's JSON file that a later run reads."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]

    memory_bytes: Count
    machine: dict[str, JsonValue]
    versions: dict[str, JsonValue]
    backend: dict[str, JsonValue]
    cells: list[_Cell]


_DOCUMENT = Document(_Report, marks={"hotrow_study": 1}, cure="remove it to measure all of it again")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A published experiment that can be repeated on this machine."""

    name: str
    preset: Mapping[str, Any]
    """Title, description, and the groups of cells with their axes."""
    cells: Any
    """A module such as benchmarks.kernel_study: `with_data`, `expand`, `refusal`, `estimate_s`, `setup_of`, `measure`,
    `headline`, `summary`, and FAILURES: errors that end the cells of one setup but not the study."""
    page: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    """Returns the HTML for a preset and a report."""
    command: Sequence[str]
    """The command that runs this study, without the runner's own options."""


def read_preset(path: Path) -> dict[str, Any]:
    """Returns the description of a study: title, groups and their axes, in YAML."""
    return cast(dict[str, Any], yaml.safe_load(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Plan:
    """The cells of a study, after those that this machine cannot measure were removed."""

    cells: tuple[Any, ...]
    """Cells to measure; those with the same tables are next to each other."""
    skipped: tuple[dict[str, str], ...]
    """`key` and `reason` of the cells that cannot be measured."""


def make_plan(study: Study, *, quick: bool, memory_bytes: int, cores: int) -> Plan:
    """Returns every cell of the preset's groups, or those of its quick form."""
    preset = study.preset
    leave_out = preset["quick"]["leave_out"] if quick else ()
    cells: list[Any] = []
    for group in preset["groups"]:
        if group["name"] not in leave_out:
            shorter = preset["quick"]["axes"].get(group["name"], {}) if quick else {}
            fixed = {**group["fixed"], **(preset["quick"].get("fixed", {}) if quick else {})}
            axes = {**group["axes"], **shorter}
            cells += study.cells.expand({**group, "fixed": fixed}, axes, memory_bytes=memory_bytes)
    reasons = {cell.key: study.cells.refusal(cell, memory_bytes=memory_bytes, cores=cores) for cell in cells}
    skipped = tuple({"key": key, "reason": reason} for key, reason in reasons.items() if reason is not None)
    return Plan(tuple(sorted((c for c in cells if reasons[c.key] is None), key=study.cells.setup_of)), skipped)


def run_study(
    study: Study,
    out: Path | str | None = None,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    estimate_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures the cells of a study that are not in `out` yet, writes its files there, and returns all cells.

    out: folder, by default studies/<name> or studies/<name>-quick. quick: a first look with fewer and smaller cells.
    memory_bytes: limit for the tables of one cell, by default 60 % of the available memory. estimate_only: measure and
    write nothing. say: receives the number of cells and the estimate before the first cell begins.

    Raises ValueError if `out` holds cells of another machine, backend or version.
    """
    name = study.name
    command = command_of(study, out, quick=quick, memory_bytes=memory_bytes)
    folder = Path(out) if out is not None else Path("studies") / (f"{name}-quick" if quick else name)
    file = folder / f"{name}.json"
    if memory_bytes is None:  # a continued study keeps its limit, so that the same cells fit
        before = _DOCUMENT.read(file)["memory_bytes"] if file.exists() else 0
        memory_bytes = min(before, available_memory_bytes()) or int(MEMORY_SHARE * available_memory_bytes())
    plan = make_plan(study, quick=quick, memory_bytes=memory_bytes, cores=usable_cores())
    rows = _measured_before(file)
    left = [cell for cell in plan.cells if cell.key not in rows]
    seconds = study.cells.estimate_s(left)
    say(
        f"{name}: {len(left)} of {len(plan.cells)} cells to measure, about {duration(seconds)}; "
        f"{len(plan.skipped)} skipped; tables of at most {memory_bytes / 2**30:.1f} GiB"
    )
    result = {"study": name, "out": str(folder), "num_cells": len(plan.cells), "estimate_s": seconds}
    if estimate_only:
        counted = {"measured": len(plan.cells) - len(left), "skipped": len(plan.skipped)}
        return {**result, **counted, "cells": [*rows.values()]}
    folder.mkdir(parents=True, exist_ok=True)
    circumstances = bench.circumstances()
    report = {"study": name, "command": command, "quick": quick, "memory_bytes": memory_bytes, **circumstances}
    start = time.monotonic()
    try:
        failed = _measure(study, left, rows, lambda: _write(file, report, plan, rows), quick=quick, out=folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; {len(rows)} cells are in {file}, the same command measures the rest"
        ) from None
    plan = replace(plan, skipped=(*plan.skipped, *failed))
    report |= study.cells.summary([*rows.values()])
    _write(file, report, plan, rows)
    with atomic_write(folder / f"{name}.csv") as stream:
        stream.write(as_csv([*rows.values()]).encode())
    with atomic_write(folder / f"{name}.html") as stream:
        stream.write(study.page(study.preset, cast(dict[str, Any], _DOCUMENT.read(file))).encode())
    files = [str(folder / f"{name}.{suffix}") for suffix in ("json", "csv", "html")]
    disturbed = sum(bench.is_disturbed(row) for row in rows.values() if "rounds" in row)
    if disturbed:
        say(
            f"{name}: in {disturbed} of {len(rows)} cells other processes had the processors for more than "
            f"{bench.CLEAN_SHARE:.0%} of the time in most rounds, so these times are too long; "
            f"to measure again on an idle machine, remove {file}"
        )
    counted = {"measured": len(plan.cells) - len(failed), "skipped": len(plan.skipped)}
    return {**result, **counted, "cells": [*rows.values()], "seconds": time.monotonic() - start, "files": files}


def command_of(study: Study, out: Path | str | None, *, quick: bool, memory_bytes: int | None) -> str:
    """Returns the shell command that makes the same files again."""
    command = [*study.command, *(["--quick"] if quick else [])]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    return shlex.join(command + ([] if out is None else ["--out", str(out)]))


def _measured_before(file: Path) -> dict[str, dict[str, Any]]:
    """Returns rows by key. Raises ValueError if they were measured under other circumstances."""
    if not file.exists():
        return {}
    before, now = cast(dict[str, Any], _DOCUMENT.read(file)), bench.circumstances()
    different = [name for name in SAME if before[name] != now[name]]
    if different:
        raise ValueError(
            f"{file} was measured under another {' and another '.join(different)}; "
            "pass another --out, or remove the file to measure all of it again"
        )
    return {row["key"]: row for row in before["cells"]}


def _measure(
    study: Study,
    left: Sequence[Any],
    rows: dict[str, dict[str, Any]],
    write: Callable[[], None],
    *,
    quick: bool,
    out: Path,
) -> list[dict[str, str]]:
    """Adds to `rows`; returns `key` and `reason` of the cells that could not be measured after all."""
    now = {name: value for name, value in bench.circumstances().items() if name in ("commit", "date")}
    failed: list[dict[str, str]] = []
    num_done, start = 0, time.monotonic()
    with ProgressLine() as line:
        line.update(lambda: f"making tables; {len(left)} cells, about {duration(study.cells.estimate_s(left))}")
        for _, group in itertools.groupby(left, study.cells.setup_of):
            cells = list(group)
            try:
                for cell, row in study.cells.measure(cells, quick=quick, folder=out):
                    if isinstance(row, str):
                        failed.append({"key": cell.key, "reason": row})
                        continue
                    rows[cell.key] = {**row, **now}
                    num_done += 1
                    write()
                    remaining = remaining_s(study.cells, left, num_done + len(failed), time.monotonic() - start)
                    told = f"{num_done}/{len(left)} cells, {duration(remaining)} left  {cell.key}  "
                    told += study.cells.headline(row)
                    line.update(lambda: told)  # noqa: B023
            except study.cells.FAILURES as error:
                known = rows.keys() | {cell["key"] for cell in failed}
                failed += [{"key": cell.key, "reason": str(error)} for cell in cells if cell.key not in known]
    return failed


def remaining_s(study: Any, cells: Sequence[Any], num_done: int, elapsed_s: float) -> float:
    """Returns the estimate for the remaining cells, scaled by how far off the estimate was for the cells done."""
    return float(study.estimate_s(cells[num_done:]) * elapsed_s / study.estimate_s(cells[:num_done]))


def _write(file: Path, report: Mapping[str, Any], plan: Plan, rows: Mapping[str, dict[str, Any]]) -> None:
    fields = {**report, "skipped": list(plan.skipped), "cells": list(rows.values())}
    _DOCUMENT.write(file, cast(_Report, fields))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns one line per cell; a spread becomes two columns."""
    flat = []
    for row in rows:
        line = {name: value for name, value in row.items() if name not in SPREADS}
        for name, columns in SPREADS.items():
            if name in row:
                line |= dict(zip(columns, row[name], strict=True))
        flat.append(line)
    names = dict.fromkeys(name for line in flat for name in line)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[*names] or ["key"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()

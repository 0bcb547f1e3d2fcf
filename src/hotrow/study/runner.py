"""The sweep runner: what a study still has to measure, measured and written as JSON, CSV and one HTML page.

Every measured cell is in `<out>/<name>.json` before the next begins; a run that is started again skips it.
"""

from __future__ import annotations

import csv
import importlib.resources
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

from hotrow.base.files import atomic_write, available_memory_bytes
from hotrow.base.machine import usable_cores
from hotrow.base.progress import ProgressLine, duration
from hotrow.base.records import Count, Document
from hotrow.study import bench, hot, kernels, memory
from hotrow.study.hot_page import hot_page
from hotrow.study.memory_page import memory_page
from hotrow.study.page import study_page

STUDIES: dict[str, Any] = {"kernels": kernels, "memory": memory, "hot": hot}
"""What each consists of: `expand` its cells, `refusal`, `estimate_s`, `setup_of`, `measure` and `summary`; `with_data`
where it takes data."""
PAGES = {"kernels": study_page, "memory": memory_page, "hot": hot_page}
MEMORY_SHARE = 0.6
"""Of what this process may use: what the tables of one cell take at most, unless told otherwise."""
SPREADS = {"spread_ms": ("least_ms", "most_ms"), "spread": ("least_speed", "most_speed")}
"""Pairs of numbers of a row, and the columns they become."""
SAME = ("machine", "backend", "versions")
"""Circumstances that all cells of one file share."""


_OPEN = ConfigDict(strict=True, extra="allow")


class _Cell(TypedDict):
    """A row of figures, which every study has its own of."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]  # pydantic's way to configure a TypedDict

    key: str


class _Report(TypedDict):
    """What of a study's JSON file it goes on from."""

    __pydantic_config__ = _OPEN  # type: ignore[misc]

    memory_bytes: Count
    machine: dict[str, JsonValue]
    versions: dict[str, JsonValue]
    backend: dict[str, JsonValue]
    cells: list[_Cell]


_DOCUMENT = Document(_Report, marks={"hotrow_study": 1}, cure="remove it to measure all of it again")


@dataclass(frozen=True)
class Plan:
    """What a study consists of here."""

    cells: tuple[Any, ...]
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


def make_plan(preset: Mapping[str, Any], *, quick: bool, memory_bytes: int, cores: int, study: Any = kernels) -> Plan:
    """Every cell of the preset's groups, or of its quick form."""
    leave_out = preset["quick"]["leave_out"] if quick else ()
    cells: list[Any] = []
    for group in preset["groups"]:
        if group["name"] not in leave_out:
            shorter = preset["quick"]["axes"].get(group["name"], {}) if quick else {}
            fixed = {**group["fixed"], **(preset["quick"].get("fixed", {}) if quick else {})}
            axes = {**group["axes"], **shorter}
            cells += study.expand({**group, "fixed": fixed}, axes, memory_bytes=memory_bytes)
    reasons = {cell.key: study.refusal(cell, memory_bytes=memory_bytes, cores=cores) for cell in cells}
    skipped = tuple({"key": key, "reason": reason} for key, reason in reasons.items() if reason is not None)
    return Plan(tuple(sorted((c for c in cells if reasons[c.key] is None), key=study.setup_of)), skipped)


def run_study(
    name: str,
    out: Path | str | None = None,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    estimate_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
    preset: Mapping[str, Any] | None = None,
    data: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure what is left of the study `name`, and write its files into `out`; the result holds the cells, as they do.

    out: folder, by default studies/<name> or studies/<name>-quick. quick: a first look, in under a minute.
    memory_bytes: what the tables of one cell may take; by default 60 % of what this process may use. estimate_only:
    measure nothing and write nothing. say: is told the number of cells and the estimate before the first begins.
    preset: in place of the study's own. data: packed datasets to train on, in the studies `memory` (also plain traces)
    and `hot`.

    Raises ValueError for an unknown study, and where `out` holds cells of another machine, backend or version.
    """
    command = command_of(name, out, quick=quick, memory_bytes=memory_bytes, data=data, own=preset is not None)
    preset = preset or load_preset(name)
    study = STUDIES[name]
    if hasattr(study, "with_data"):
        preset = study.with_data(preset, data)
    elif data:
        takers = " and ".join(repr(other) for other, one in STUDIES.items() if hasattr(one, "with_data"))
        raise ValueError(f"the study {name!r} takes no data; --data is for the studies {takers}")
    folder = Path(out) if out is not None else Path("studies") / (f"{name}-quick" if quick else name)
    file = folder / f"{name}.json"
    if memory_bytes is None:  # as before where this goes on: what fits must not change on the way
        before = _DOCUMENT.read(file)["memory_bytes"] if file.exists() else 0
        memory_bytes = min(before, available_memory_bytes()) or int(MEMORY_SHARE * available_memory_bytes())
    plan = make_plan(preset, quick=quick, memory_bytes=memory_bytes, cores=usable_cores(), study=study)
    rows = _measured_before(file)
    left = [cell for cell in plan.cells if cell.key not in rows]
    seconds = study.estimate_s(left)
    say(
        f"{name}: {len(left)} of {len(plan.cells)} cells to measure, about {duration(seconds)}; "
        f"{len(plan.skipped)} skipped; tables of at most {memory_bytes / 2**30:.1f} GiB"
    )
    result = {
        "study": name,
        "out": str(folder),
        "num_cells": len(plan.cells),
        "cells": list(rows.values()),
        "measured": len(plan.cells) - len(left),
        "skipped": len(plan.skipped),
        "estimate_s": seconds,
    }
    if estimate_only:
        return result
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
    report |= study.summary([*rows.values()])
    _write(file, report, plan, rows)
    with atomic_write(folder / f"{name}.csv") as stream:
        stream.write(as_csv([*rows.values()]).encode())
    with atomic_write(folder / f"{name}.html") as stream:
        stream.write(PAGES[name](preset, cast(dict[str, Any], _DOCUMENT.read(file))).encode())
    files = [str(folder / f"{name}.{suffix}") for suffix in ("json", "csv", "html")]
    disturbed = sum(bench.is_disturbed(row) for row in rows.values() if "rounds" in row)
    if disturbed:
        say(
            f"{name}: in {disturbed} of {len(rows)} cells others had the processors for more than "
            f"{bench.CLEAN_SHARE:.0%} of the time in most rounds, so these took too long; "
            f"to measure again on an idle machine, remove {file}"
        )
    measured = len(plan.cells) - len(failed)
    counted = {"cells": list(rows.values()), "measured": measured, "skipped": len(plan.skipped)}
    return {**result, **counted, "seconds": time.monotonic() - start, "files": files}


def command_of(
    name: str, out: Path | str | None, *, quick: bool, memory_bytes: int | None, data: Sequence[str], own: bool
) -> str:
    """What makes these files once more, in a shell; own: a preset that no command knows."""
    if own:
        return f"hotrow.study.run_study({name!r}, preset=...)"
    command = ["hotrow", "study", name, *(["--quick"] if quick else [])]
    for path in data:
        command += ["--data", path]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    return shlex.join(command + ([] if out is None else ["--out", str(out)]))


def _measured_before(file: Path) -> dict[str, dict[str, Any]]:
    """Rows by key; raises ValueError where they were measured under other circumstances."""
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
    study: Any,
    left: Sequence[Any],
    rows: dict[str, dict[str, Any]],
    write: Callable[[], None],
    *,
    quick: bool,
    out: Path,
) -> list[dict[str, str]]:
    """Fill `rows`; `key` and `reason` of the cells that turned out not to be measurable."""
    now = {name: value for name, value in bench.circumstances().items() if name in ("commit", "date")}
    failed: list[dict[str, str]] = []
    num_done, start = 0, time.monotonic()
    with ProgressLine() as line:
        line.update(lambda: f"making tables; {len(left)} cells, about {duration(study.estimate_s(left))}")
        for _, group in itertools.groupby(left, study.setup_of):
            cells = list(group)
            try:
                for cell, row in study.measure(cells, quick=quick, folder=out):
                    if isinstance(row, str):  # why there is none
                        failed.append({"key": cell.key, "reason": row})
                        continue
                    rows[cell.key] = {**row, **now}
                    num_done += 1
                    write()
                    remaining = _remaining_s(study, left, num_done + len(failed), time.monotonic() - start)
                    told = (
                        f"{num_done}/{len(left)} cells, {duration(remaining)} left  {cell.key}  {study.headline(row)}"
                    )
                    line.update(lambda: told)  # noqa: B023
            except study.FAILURES as error:
                known = rows.keys() | {cell["key"] for cell in failed}
                failed += [{"key": cell.key, "reason": str(error)} for cell in cells if cell.key not in known]
    return failed


def _remaining_s(study: Any, cells: Sequence[Any], num_done: int, elapsed_s: float) -> float:
    """What the estimate says of the cells that are left, in the proportion to which it held for those done."""
    return float(study.estimate_s(cells[num_done:]) * elapsed_s / study.estimate_s(cells[:num_done]))


def _write(file: Path, report: Mapping[str, Any], plan: Plan, rows: Mapping[str, dict[str, Any]]) -> None:
    fields = {**report, "skipped": list(plan.skipped), "cells": list(rows.values())}
    _DOCUMENT.write(file, cast(_Report, fields))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per cell; a spread becomes two columns."""
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

"""The runner of studies: measures the cells that a study still lacks, and writes what they show.

Every measured cell is in `<folder>/<stem>.json` before the next one begins, so a study that is started again continues
where it stopped. The runner knows no cell: a `Sweep` brings an object that expands, estimates and measures them.
cells.py has the one for sweeps in YAML, presets.py the one for studies that compare hotrow with others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from pydantic import ConfigDict, JsonValue
from typing_extensions import TypedDict

from benchmarks import rounds as bench
from hotrow.base.door import make_folder
from hotrow.base.files import atomic_write, claim_or_fail
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressLine, duration
from hotrow.base.records import Count, Document

MEMORY_SHARE = 0.6
"""The share of the available memory that the tables of one cell may take, unless the user sets a limit."""
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


@dataclass(frozen=True)
class Plan:
    """The cells of a study, after those that this machine cannot measure were removed."""

    cells: tuple[Any, ...]
    """Cells to measure, in the order of the file; those with the same set-up are measured one after another."""
    skipped: tuple[dict[str, str], ...] = ()
    """`key` and `reason` of the cells that cannot be measured."""


class Cells(Protocol):
    """How the cells of a study are expanded and measured. A cell is any object with a `key`."""

    FAILURES: ClassVar[tuple[type[Exception], ...]]
    """Errors that end the cells of one set-up but not the study."""

    def plan(self, rows: Mapping[str, Mapping[str, Any]], *, memory_bytes: int, cores: int) -> Plan: ...
    def estimate_s(self, cells: Sequence[Any]) -> float: ...
    def setup_of(self, cell: Any) -> Any:
        """Returns a value that is equal for cells that are measured together."""

    def measure(self, cells: Sequence[Any], folder: Path) -> Iterator[tuple[Any, dict[str, Any] | str]]:
        """Yields the cells, all of one set-up, each with its row or the reason why it has none."""

    def headline(self, row: Mapping[str, Any]) -> str: ...
    def summary(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns further fields of the report."""

    def files(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns files of the study beside JSON, by name."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A study that can be run on this machine."""

    name: str
    cells: Cells
    command: str
    """The shell command that makes the same files again."""
    stem: str = "results"
    """Name of the JSON file."""
    quick: bool = False


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    memory_bytes: int | None = None,
    estimate_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures the cells of a study that are not in `folder` yet, writes its files there, and returns all cells.

    memory_bytes: limit for the tables of one cell, by default 60 % of the available memory. estimate_only: measure and
    write nothing. say: receives the number of cells and the estimate before the first cell begins.

    Raises ValueError if `folder` holds cells of another machine, backend or version, or if another process measures
    there.
    """
    file = folder / f"{sweep.stem}.json"
    with ExitStack() as stack:
        if not estimate_only:  # before rows are read: another process may be adding some
            make_folder(folder)
            claim_or_fail(folder, stack)
        if memory_bytes is None:  # a continued study keeps its limit, so that the same cells fit
            before = _DOCUMENT.read(file)["memory_bytes"] if file.exists() else 0
            memory_bytes = min(before, available_memory_bytes()) or int(MEMORY_SHARE * available_memory_bytes())
        rows = _measured_before(file)
        plan = sweep.cells.plan(rows, memory_bytes=memory_bytes, cores=usable_cores())
        left = [cell for cell in plan.cells if cell.key not in rows]
        seconds = sweep.cells.estimate_s(left)
        say(
            f"{sweep.name}: {len(left)} of {len(plan.cells)} cells to measure, about {duration(seconds)}; "
            f"{len(plan.skipped)} skipped; tables of at most {memory_bytes / 2**30:.1f} GiB"
        )
        result = {"study": sweep.name, "out": str(folder), "num_cells": len(plan.cells), "estimate_s": seconds}
        if estimate_only:
            counted = {"measured": len(plan.cells) - len(left), "skipped": len(plan.skipped)}
            return {**result, **counted, "cells": [*rows.values()]}
        return {**result, **_run(sweep, folder, plan, left, rows, memory_bytes=memory_bytes, say=say)}


def _run(
    sweep: Sweep,
    folder: Path,
    plan: Plan,
    left: Sequence[Any],
    rows: dict[str, dict[str, Any]],
    *,
    memory_bytes: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    file = folder / f"{sweep.stem}.json"
    report = {"study": sweep.name, "command": sweep.command, "quick": sweep.quick, "memory_bytes": memory_bytes}
    report |= bench.circumstances()
    start = time.monotonic()

    def write() -> None:
        _write(file, report, plan, rows)

    try:
        failed = _measure(sweep.cells, left, rows, write, folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; {len(rows)} cells are in {file}, the same command measures the rest"
        ) from None
    plan = replace(plan, skipped=(*plan.skipped, *failed))
    report |= sweep.cells.summary([*rows.values()])
    _write(file, report, plan, rows)
    texts = sweep.cells.files(cast(dict[str, Any], _DOCUMENT.read(file)))
    for name, text in texts.items():
        with atomic_write(folder / name) as stream:
            stream.write(text.encode())
    files = [str(folder / name) for name in (f"{sweep.stem}.json", *texts)]
    disturbed = sum(bench.is_disturbed(row) for row in rows.values() if "rounds" in row)
    if disturbed:
        say(
            f"{sweep.name}: in {disturbed} of {len(rows)} cells other processes had the processors for more than "
            f"{bench.CLEAN_SHARE:.0%} of the time in most rounds, so these times are too long; "
            f"to measure again on an idle machine, remove {file}"
        )
    counted = {"num_cells": len(plan.cells), "measured": len(plan.cells) - len(failed), "skipped": len(plan.skipped)}
    return {**counted, "cells": [*rows.values()], "seconds": time.monotonic() - start, "files": files}


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
    cells: Cells, left: Sequence[Any], rows: dict[str, dict[str, Any]], write: Callable[[], None], folder: Path
) -> list[dict[str, str]]:
    """Adds to `rows`; returns `key` and `reason` of the cells that could not be measured after all."""
    now = {name: value for name, value in bench.circumstances().items() if name in ("commit", "date")}
    failed: list[dict[str, str]] = []
    num_done = 0
    with ProgressLine() as line:
        line.update(lambda: f"preparing; {len(left)} cells, about {duration(cells.estimate_s(left))}")
        start = time.monotonic()
        for _, group in itertools.groupby(sorted(left, key=cells.setup_of), cells.setup_of):
            together = list(group)
            try:
                for cell, row in cells.measure(together, folder):
                    if isinstance(row, str):
                        failed.append({"key": cell.key, "reason": row})
                        continue
                    rows[cell.key] = {**row, **now}
                    num_done += 1
                    write()
                    remaining = remaining_s(cells, left, num_done + len(failed), time.monotonic() - start)
                    told = f"{num_done}/{len(left)} cells, {duration(remaining)} left  {cell.key}  "
                    told += cells.headline(row)
                    line.update(lambda: told)  # noqa: B023
            except cells.FAILURES as error:
                known = rows.keys() | {cell["key"] for cell in failed}
                failed += [{"key": cell.key, "reason": str(error)} for cell in together if cell.key not in known]
    return failed


def remaining_s(cells: Cells, left: Sequence[Any], num_done: int, elapsed_s: float) -> float:
    """Returns the estimate for the remaining cells, scaled by how far off the estimate was for the cells done."""
    return float(cells.estimate_s(left[num_done:]) * elapsed_s / cells.estimate_s(left[:num_done]))


def _write(file: Path, report: Mapping[str, Any], plan: Plan, rows: Mapping[str, dict[str, Any]]) -> None:
    place = {cell.key: at for at, cell in enumerate(plan.cells)}
    ordered = sorted(rows.values(), key=lambda row: place.get(row["key"], len(place)))  # others are of another preset
    fields = {**report, "skipped": list(plan.skipped), "cells": ordered}
    _DOCUMENT.write(file, cast(_Report, fields))

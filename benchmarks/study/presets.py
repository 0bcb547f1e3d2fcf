"""Comparisons as studies: presets in YAML, whose cells a module of benchmarks/ measures, for hotrow's runner."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from benchmarks.study.runner import Plan, Sweep, run_sweep


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


class OfPreset:
    """The cells of a study, as the runner asks for them."""

    def __init__(self, study: Study, *, quick: bool) -> None:
        self._study, self._quick = study, quick

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study.cells, name)

    def plan(self, rows: Mapping[str, Mapping[str, Any]], *, memory_bytes: int, cores: int) -> Plan:
        return make_plan(self._study, quick=self._quick, memory_bytes=memory_bytes, cores=cores)

    def measure(self, cells: Sequence[Any], folder: Path) -> Iterator[tuple[Any, dict[str, Any] | str]]:
        return cast(Iterator[Any], self._study.cells.measure(cells, quick=self._quick, folder=folder))

    def files(self, report: Mapping[str, Any]) -> Mapping[str, str]:
        return {f"{self._study.name}.html": self._study.page(self._study.preset, report)}


def run_study(
    study: Study,
    out: Path | str | None = None,
    *,
    quick: bool = False,
    memory_bytes: int | None = None,
    estimate_only: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs a study as `runner.run_sweep` says, in `out`, by default studies/<name> or <name>-quick."""
    folder = Path(out) if out is not None else Path("studies") / (f"{study.name}-quick" if quick else study.name)
    command = command_of(study.command, out, quick=quick, memory_bytes=memory_bytes)
    sweep = Sweep(name=study.name, stem=study.name, cells=OfPreset(study, quick=quick), command=command, quick=quick)
    return run_sweep(sweep, folder, memory_bytes=memory_bytes, estimate_only=estimate_only, say=say)


def command_of(words: Sequence[str], out: Path | str | None, *, quick: bool, memory_bytes: int | None) -> str:
    """Returns the shell command that makes the same files again."""
    command = [*words, *(["--quick"] if quick else [])]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    return shlex.join(command + ([] if out is None else ["--out", str(out)]))

"""The page of a study in docs/, made from the JSON file beside it, and the words that all pages of studies share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
CIRCUMSTANCES = ("machine", "backend", "versions", "skipped")
"""Fields of a study's file that are kept, beside its cells."""


@dataclass(frozen=True)
class StudyDocs:
    """One study's page: `NAME-study.md`, its charts, and `NAME-study.json`, which holds what they show."""

    name: str
    """The name that `python -m benchmarks.study` takes."""
    head: str
    """The beginning of the page."""
    kept: Sequence[str]
    """Fields of a cell that the page shows. No path of the machine is among them."""
    charts: Callable[[Mapping[str, Any]], Mapping[str, tuple[str, str]]]
    """Returns (file, SVG) by heading, for a report."""
    body: Callable[[Mapping[str, Any]], list[str]]
    """Returns the lines below the charts, for a report."""
    also_kept: Sequence[str] = ()
    """Fields of the report itself that the page shows."""

    @property
    def json(self) -> Path:
        """The file that the page is made from."""
        return DOCS / f"{self.name}-study.json"

    def kept_of(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of a study's file that the page shows."""
        own = {name: report[name] for name in (*CIRCUMSTANCES, *self.also_kept)}
        cells = [{name: row[name] for name in self.kept if name in row} for row in report["cells"]]
        return {**own, "cells": cells}

    def files(self) -> dict[str, str]:
        """Returns file names in docs/, and their text."""
        report = json.loads(self.json.read_text(encoding="utf-8"))
        command = f"python -m benchmarks.study {self.name}"
        made = f"Made by `{command} --data ...` and `{command} --docs`."
        lines = [self.head, f"{machine_line(report)} {made}"]
        charts = self.charts(report)
        for title, (file, _) in charts.items():
            lines += ["", f"## {title}", "", f"[![{title}]({file})]({file})"]
        lines += [*self.body(report), *not_measured(report)]
        return {f"{self.name}-study.md": "\n".join(lines) + "\n", **dict(charts.values())}

    def write(self, file: Path | None) -> None:
        """Writes the page and its charts. file: new results, of which docs/ keeps what the page shows."""
        if file is not None:
            kept = self.kept_of(json.loads(file.read_text(encoding="utf-8")))
            self.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        for name, text in self.files().items():
            (DOCS / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/measurements/{name}")


def table_of(columns: Mapping[str, str], rows: Sequence[Mapping[str, str]], words: Sequence[str]) -> list[str]:
    """Returns a table of fields by head; the fields in `words` are left-aligned."""
    heads = {head: "left" if field in words else "right" for head, field in columns.items()}
    return table(heads, [[row[field] for field in columns.values()] for row in rows])


def not_measured(report: Mapping[str, Any]) -> list[str]:
    """Returns the section on cells that were refused, by reason without its numbers, if there are any."""
    if not report["skipped"]:
        return []
    bare = [{**cell, "reason": without_numbers(cell["reason"])} for cell in report["skipped"]]
    reasons = [[line["reason"], line["count"], f"`{line['key']}`"] for line in by_reason(bare)]
    return ["", "## Not measured", "", *table({"reason": "left", "cells": "right", "first of them": "left"}, reasons)]


def without_numbers(reason: str) -> str:
    """Returns the beginning of a reason, its numbers and names as "…"."""
    beginning = re.split(r" \(|: |; ", reason)[0]
    return re.sub(r"'[^']*'|\d[\d,.]*( %| MB| bytes)?", "…", beginning)


def machine_line(report: Mapping[str, Any]) -> str:
    """Returns a sentence with the machine, versions and dates of a report."""
    machine, backend = report["machine"], report["backend"]
    commits = sorted({str(row["commit"]) for row in report["cells"]})
    dates = sorted({row["date"] for row in report["cells"]})
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; kernels "
        f"{backend['name']} ({backend['isa']}); torch {report['versions']['torch']}; commit {', '.join(commits)}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1]))) if dates else 'nothing measured'}."
    )


def by_reason(skipped: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Groups skipped cells by reason: the reason, the number of cells, and the key of the first."""
    found: dict[str, dict[str, Any]] = {}
    for cell in skipped:
        line = found.setdefault(cell["reason"], {"reason": cell["reason"], "count": 0, "key": cell["key"]})
        line["count"] += 1
    return list(found.values())

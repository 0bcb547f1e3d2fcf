"""The file of results, docs/benchmarks.json: one report per benchmark, with its machine, versions and commit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotrow import bench, cells

PLACES = {"--dlrm": "PATH", "--folder": "DIR"}
"""Options that name a place on this machine, and what stands in a command for it."""


def run_as_script(
    name: str,
    cells: Callable[[argparse.Namespace], Sequence[cells.Cell]],
    description: str | None,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    *,
    report: str | None = None,
) -> None:
    """The command line of benchmarks/`name`.py: measure the cells of its options in a fresh process, record the report.

    `add_options` adds the script's own; `cells` is given what was parsed, `quick` among it. report: the name to record
    under, if it is not the script's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help="cells to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small tables: tries the cells, measures nothing of worth")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    bench.end_on_signals()
    if options.here:
        chosen = bench.choose(options.names or None, cells(options))
        print(json.dumps(bench.measure(chosen, quick=options.quick)))
        return
    measured = bench.in_fresh_process(f"benchmarks.{name}", [*sys.argv[1:], "--here"], options.threads)
    record(name, measured, options.out, under=report)


def record(name: str, report: dict[str, Any], out: str | None, *, under: str | None = None) -> None:
    """Put the `report` of the script `name` into the JSON file `out`, with its command; without `out`, print it.

    under: the name it has there, if it is not the script's.

    Cells of an earlier report that this one did not measure stay, each with the circumstances it was measured under.
    """
    report["command"] = command_line(name, sys.argv[1:])
    if out is None:
        print(json.dumps(report))
        return
    path = Path(out)
    reports = json.loads(path.read_text()) if path.exists() else {}
    new = rounded(report)
    key = under or name
    reports[key] = merged(reports.get(key, {"cells": []}), new) if "cells" in new else new
    path.write_text(json.dumps(reports, indent=1) + "\n")


def command_line(name: str, arguments: Sequence[str]) -> str:
    """What a reader would type; places on this machine are nobody's business."""
    words = []
    for before, word in pairwise(["", *arguments]):
        option, equals, _ = word.partition("=")
        words.append(PLACES.get(before) or (f"{option}={PLACES[option]}" if equals and option in PLACES else word))
    return " ".join(["python -m", f"benchmarks.{name}", *words])


def merged(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """`report` and, after its own, the cells that only `before` has: those say under "measured" what was different."""
    names = {cell["name"] for cell in report["cells"]}
    kept = []
    for cell in before["cells"]:
        under = {**{key: value for key, value in before.items() if key != "cells"}, **cell.get("measured", {})}
        different = {key: value for key, value in under.items() if report.get(key) != value}
        if cell["name"] not in names:
            rest = {key: value for key, value in cell.items() if key != "measured"}
            kept.append({**rest, **({"measured": different} if different else {})})
    return {**report, "cells": [*report["cells"], *kept]}


def rounded(value: Any) -> Any:
    """`value` with every float cut to four significant digits: more would be noise in a file that people compare."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value

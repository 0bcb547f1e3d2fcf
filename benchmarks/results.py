"""The file of results, docs/benchmarks.json: one report per benchmark, with its machine, versions and commit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotrow import bench, cells


def run_as_script(name: str, cells: Callable[[bool], Sequence[cells.Cell]], description: str | None) -> None:
    """The command line of benchmarks/`name`.py: measure `cells(quick)` in a fresh process and record the report."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help="cells to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small tables: tries the cells, measures nothing of worth")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        chosen = bench.choose(options.names or None, cells(options.quick))
        print(json.dumps(bench.measure(chosen, quick=options.quick)))
        return
    arguments = ["--here", *options.names, *(["--quick"] if options.quick else [])]
    record(name, bench.in_fresh_process(f"benchmarks.{name}", arguments, options.threads), options.out)


def record(name: str, report: dict[str, Any], out: str | None) -> None:
    """Put `report` under `name` into the JSON file `out`, with the command that made it; without `out`, print it."""
    report["command"] = " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])
    if out is None:
        print(json.dumps(report))
        return
    path = Path(out)
    reports = json.loads(path.read_text()) if path.exists() else {}
    reports[name] = report
    path.write_text(json.dumps(rounded(reports), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """`value` with every float cut to four significant digits: more would be noise in a file that people compare."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value

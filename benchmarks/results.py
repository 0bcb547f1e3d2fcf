"""The file of results, benchmarks.json: benchmark -> processor -> report, with its machine, versions and commit.

A ratio that one processor gives says little of another, so each keeps its report. `over_processors` gathers them by
cell; `missing` names the cells that a processor still lacks.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import bench

Cell = dict[str, Any]
Reports = dict[str, dict[str, dict[str, Any]]]
PLACES = {"--data": "PATH", "--dlrm": "PATH", "--folder": "DIR"}
"""Options that name a place on this machine, and what stands in a command for it."""


def run_as_script(
    name: str,
    cells: Callable[[argparse.Namespace], Sequence[bench.Cell]],
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
    end_on_signals()
    if options.here:
        chosen = bench.choose(options.names or None, cells(options))
        print(json.dumps(bench.measure(chosen, quick=options.quick)))
        return
    measured = bench.in_fresh_process(f"benchmarks.{name}", [*sys.argv[1:], "--here"], options.threads)
    record(name, measured, options.out, under=report)


def end_on_signals() -> None:
    """Makes SIGTERM and Ctrl-C end this process like an exception, so that it removes its files.

    A second signal does nothing, so that it cannot interrupt the removal.
    """

    def end(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)


def record(
    name: str,
    report: dict[str, Any],
    out: str | None,
    *,
    under: str | None = None,
    places: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put the `report` of the script `name` into the JSON file `out`, with its command; without `out`, print it.

    under: the name it has there, if it is not the script's. places: arguments without an option that name a place on
    this machine, and what stands in the command for them.

    Cells of an earlier report that this one did not measure stay, each with the circumstances it was measured under.
    """
    report["command"] = command_line(name, [places.get(word, word) for word in sys.argv[1:]])
    if out is None:
        print(json.dumps(report))
        return
    path, key = Path(out), under or name
    reports: Reports = json.loads(path.read_text()) if path.exists() else {}
    new, own = rounded(report), reports.setdefault(key, {})
    processor = processor_of(new)
    own[processor] = merged(own.get(processor, {"cells": []}), new) if "cells" in new else new
    path.write_text(json.dumps(reports, indent=1) + "\n")
    print("\n".join(missing(reports, key)), file=sys.stderr)


def processor_of(report: dict[str, Any]) -> str:
    """The processor of a report, family and model included, and the instruction set of the kernels on it."""
    return f"{report['machine']['cpu']}, {report['backend']['isa'] or report['backend']['name']}"


def is_named(processor: str) -> bool:
    """Whether its family and model are known: a hypervisor's "AMD EPYC" alone may be any of five generations."""
    return ", family " in processor


def over_processors(reports: Reports) -> dict[str, dict[str, Cell]]:
    """Cell -> processor -> what was measured, with the circumstances of its report beside its numbers.

    Cells that do not `count` are there only where no processor has one that does.
    """
    found: dict[str, dict[str, Cell]] = {}
    for by_processor in reports.values():
        for processor, report in by_processor.items():
            circumstances = {key: value for key, value in report.items() if key != "cells"}
            for cell in report.get("cells", ()):
                found.setdefault(cell["name"], {})[processor] = {**circumstances, **cell.get("measured", {}), **cell}
    known = {name: {p: cell for p, cell in own.items() if counts(p, cell)} for name, own in found.items()}
    return {name: known[name] or own for name, own in found.items()}


def counts(processor: str, cell: Cell) -> bool:
    """Whether a figure stands for its processor: that is known, and the figure is not of a disturbed machine."""
    return is_named(processor) and not ("clean_rounds" in cell and bench.is_disturbed(cell))


def missing(reports: Reports, benchmark: str | None = None) -> list[str]:
    """A line for each known processor that lacks cells of a benchmark (default: of any) that another has.

    A cell that a disturbed machine gave is still to be measured.
    """
    processors = dict.fromkeys(p for by_processor in reports.values() for p in by_processor if is_named(p))
    lines = []
    for name in [benchmark] if benchmark else reports:
        measured = {p: report.get("cells", ()) for p, report in reports[name].items()}
        wanted = list(dict.fromkeys(cell["name"] for own in measured.values() for cell in own))
        has = {p: [cell["name"] for cell in own if counts(p, cell)] for p, own in measured.items()}
        for processor in processors:
            lacks = [cell for cell in wanted if cell not in has.get(processor, ())]
            if lacks:
                which = "all" if len(lacks) == len(wanted) else ", ".join(lacks)
                lines.append(f"{name}: {processor}: {len(lacks)} of {len(wanted)} cells not measured: {which}")
    return lines


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

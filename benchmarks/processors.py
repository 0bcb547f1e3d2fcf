"""What was measured of a cell on several processors, as text: ranges, spreads, promises, and where and when."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.markdown import across
from benchmarks.results import Cell
from benchmarks.rounds import is_disturbed

ByProcessor = dict[str, Cell]
"""What was measured of one cell, by processor."""
Found = dict[str, ByProcessor]
"""The same of several cells, by name."""
FIGURES_OF_SPEED = ("relative_speed", "{:.0%}")
FIGURES = dict([("ratio", "{:.2f}x"), FIGURES_OF_SPEED])
"""Fields that are compared over processors, and how they are written."""
GENERATIONS = {(25, 1): "Zen 3", (25, 17): "Zen 4", (26, 2): "Zen 5"}
"""AMD EPYC by family and model."""


def generation(processor: str) -> str:
    """The short name of a processor; "EPYC" is one whose generation was not recorded."""
    if found := re.fullmatch(r"AMD EPYC, family (\d+) model (\d+), .*", processor):
        return GENERATIONS.get((int(found[1]), int(found[2])), processor)
    return "EPYC" if re.fullmatch(r"AMD EPYC, \w+", processor) else processor


def on(processors: Iterable[str]) -> str:
    """Processors in words, newest first."""
    return " and ".join(sorted(map(generation, processors), reverse=True))


def spread_of(cell: Cell, key: str, form: str) -> str:
    """The figure `key` of a cell in `form`, with its spread."""
    low, high = (form.format(value).removesuffix("x") for value in cell["spread"])
    return f"{form.format(cell[key])} ({low}-{high})"


def factor(cell: Cell) -> str:
    """The ratio with its spread."""
    return spread_of(cell, "ratio", "{:.2f}x")


def figure(found: ByProcessor) -> tuple[str, str] | None:
    """The field of a cell that is compared over processors, and its form; None if it has no such figure."""
    cell = next(iter(found.values()))
    return next(((key, form) for key, form in FIGURES.items() if key in cell), None)


def best(found: ByProcessor) -> Cell:
    """The cell of the processor whose figure is the highest; the newest where cells have no such figure."""
    key, _ = figure(found) or ("date", "")
    return max(found.values(), key=lambda cell: cell[key])


def range_of(found: ByProcessor) -> str:
    """The figure over processors, in words."""
    key, form = figure(found) or ("", "")
    return across([cell[key] for cell in found.values()], form)


def between(values: Iterable[float], form: str, unit: str = "") -> str:
    """A range, its unit once: "1.30-2.81x"; of one figure, that figure; of none, nothing."""
    ends = sorted(values)
    return "-".join(dict.fromkeys(form.format(value) for value in (ends[0], ends[-1]))) + unit if ends else ""


def measured(found: ByProcessor) -> str:
    """The range of a cell's medians, and in brackets between which its rounds lie: "4.92-5.55x (4.21-6.95)"."""
    key, form = figure(found) or ("", "")
    bare, unit = (form.replace("x", ""), "x") if form.endswith("x") else ("{:.0f}", "%")
    scale = 100 if unit == "%" else 1
    medians = between((scale * cell[key] for cell in found.values()), bare, unit)
    rounds = between((scale * end for cell in found.values() for end in cell["spread"]), bare)
    disturbed = any("clean_rounds" in cell and is_disturbed(cell) for cell in found.values())
    return f"{medians} ({rounds})" + (" (disturbed)" if disturbed else "")


def milliseconds(found: Iterable[Cell], key: str = "ours_ms") -> str:
    """The range of a time in three digits; nothing if there is none."""
    known = sorted(cell[key] for cell in found if cell.get(key) is not None)
    texts = (f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}" for ms in (known[:1] + known[-1:]))
    return "-".join(dict.fromkeys(texts))


def share(found: ByProcessor) -> str:
    """The range of the shares of the machine's limit; in brackets of the one in which every occurrence counts."""
    limit, touches = (
        between((100 * cell[key] for cell in found.values() if cell.get(key) is not None), "{:.0f}", "%")
        for key in ("share_of_limit", "share_of_touches")
    )
    return f"{limit} ({touches})" if touches else limit


def verdict(found: ByProcessor, tell: Callable[[Cell], str]) -> str:
    """What `tell` says of a promise on each processor ("1.70x: held"), once if all agree."""
    told: dict[str, dict[str, list[str]]] = {}
    for processor, cell in found.items():
        if text := tell(cell):
            promise, _, became = text.rpartition(": ")
            told.setdefault(promise, {}).setdefault(became, []).append(processor)
    lines = []
    for promise, own in told.items():
        parts = [became if len(ps) == len(found) else f"{became} on {on(ps)}" for became, ps in own.items()]
        lines.append(f"{promise}: {', '.join(parts)}" if promise else ", ".join(parts))
    return "; ".join(lines)


def by_processors(found: Found) -> dict[str, Found]:
    """Cells by the processors that have them, in words; those of most processors first."""
    groups: dict[str, Found] = {}
    for name, own in sorted(found.items(), key=lambda item: -len(item[1])):
        groups.setdefault(on(own), {})[name] = own
    return groups


def where(found: Found) -> str:
    """The command, processors, dates, threads and clean rounds of some cells."""
    dates: dict[str, list[str]] = {}
    for own in found.values():
        for processor, cell in own.items():
            dates.setdefault(generation(processor), []).append(cell["date"])
    cells = [cell for own in found.values() for cell in own.values()]
    days = [f"{name}, {' to '.join(dict.fromkeys((min(own), max(own))))}" for name, own in sorted(dates.items())[::-1]]
    told = [f"`{command_of(cells)}`", *days]
    threads = {cell["threads"] for cell in cells if "threads" in cell}
    told += [f"{n} thread{'s' * (n > 1)}" for n in sorted(threads)]
    if rounds := between((cell["clean_rounds"] for cell in cells if "clean_rounds" in cell), "{}"):
        told.append(f"{rounds} clean rounds")
    return "; ".join(told) + "."


def command_of(cells: Sequence[Mapping[str, Any]]) -> str:
    """The command that measures cells, without their names and the file of results."""
    options = (re.findall(r"--(?:folder|data|dlrm) [A-Z]+|--mkl-as-intel", cell["command"]) for cell in cells)
    return " ".join([*cells[0]["command"].split()[:3], *dict.fromkeys(word for own in options for word in own)])

"""The part of benchmarks.md on the plan: what benchmarks.plan measured, beside simpler ways to divide DRAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import clean_rounds, heads, table

TEXT = """\
Lookups and updates alone, with 1/4, 1/10 or 1/32 of the tables in DRAM: milliseconds per step of each way to divide
these bytes. The plan is the column *counts*. Its speed is over the best of the other ways, round by round, with the
middle half of the rounds in brackets. Up to 25 November 2026 the kernel's own threads, which serve the disk, counted as
other work, so hardly a round was called clean then."""
WAYS = ("equal", "by_size", "by_density", "counts", "planned")


def plan_table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ("cell", "the plan / best other", *(way.replace("_", " ") for way in WAYS), "clean rounds")
    rows = [[cell["name"], _speed(cell), *(_ms(cell, way) for way in WAYS), clean_rounds(cell)] for cell in cells]
    return [TEXT, "", *table(heads(columns), rows)]


def _speed(cell: Mapping[str, Any]) -> str:
    low, high = cell["quartiles"][cell["ours"]]
    return f"{cell['speed'][cell['ours']]:.2f}x ({low:.2f}-{high:.2f})"


def _ms(cell: Mapping[str, Any], way: str) -> str:
    if way in cell["step_ms"]:
        return f"{cell['step_ms'][way]:.3g}"
    return "does not fit" if way in cell["do_not_fit"] else "-"

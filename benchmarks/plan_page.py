"""The part of benchmarks.md on the plan: what benchmarks.plan measured, beside simpler ways to divide DRAM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import heads, table
from benchmarks.processors import Found
from benchmarks.rounds import is_disturbed

WAYS = ("equal", "by_size", "by_density", "counts")


def plan_table(found: Found) -> list[str]:
    columns = ("cell", "the plan / best other", *(way.replace("_", " ") for way in WAYS))
    rows = [
        [name, _speed(cell), *(_ms(cell, way) for way in WAYS)] for name, own in found.items() for cell in own.values()
    ]
    return table(heads(columns), rows)


def _speed(cell: Mapping[str, Any]) -> str:
    low, high = cell["quartiles"][cell["ours"]]
    return f"{cell['speed'][cell['ours']]:.2f}x ({low:.2f}-{high:.2f})" + " (disturbed)" * is_disturbed(cell)


def _ms(cell: Mapping[str, Any], way: str) -> str:
    if way in cell["step_ms"]:
        return f"{cell['step_ms'][way]:.3g}"
    return "does not fit" if way in cell["do_not_fit"] else "-"

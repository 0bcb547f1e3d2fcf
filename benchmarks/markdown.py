"""Pieces of the pages made of measurements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.bench import is_disturbed


def held(promise: str, *, holds: bool, of: Mapping[str, Any] | None = None) -> str:
    """A promise and what became of it; of: the cell, which tells nothing of it if a disturbed machine gave it."""
    if of is not None and "clean_rounds" in of and is_disturbed(of):
        return f"{promise}: not told"
    return f"{promise}: {'held' if holds else '**not held**'}"


def span(values: Sequence[float], form: str) -> str:
    """The range of a figure, its ends in `form`: "1.3x - 2.8x"."""
    return " - ".join(dict.fromkeys((form.format(min(values)), form.format(max(values)))))


def across(values: Sequence[float], form: str) -> str:
    """A figure over processors, each value in `form`: "1.3x - 2.8x over 3 processors"."""
    return f"{span(values, form)} {'on 1 processor' if len(values) == 1 else f'over {len(values)} processors'}"


def clean_rounds(cell: Mapping[str, Any]) -> str:
    """How many of how many rounds were clean, for a table; the figure is of others too if too few were."""
    return f"{cell['clean_rounds']} of {cell['taken_rounds']}" + (" (disturbed)" if is_disturbed(cell) else "")


def heads(columns: Sequence[str], *, left: Collection[int] = (0,)) -> dict[str, str]:
    """Returns the heads of a table: the columns numbered in `left` are text, the others numbers."""
    return {name: "left" if k in left else "right" for k, name in enumerate(columns)}


def filled(columns: dict[str, str], rows: list[list[Any]]) -> list[str]:
    """The table without the columns that no row has."""
    kept = [k for k in range(len(columns)) if any(row[k] != "" for row in rows)]
    return table({list(columns)[k]: list(columns.values())[k] for k in kept}, [[row[k] for k in kept] for row in rows])


def table(columns: dict[str, str], rows: list[list[Any]]) -> list[str]:
    """Markdown lines; `columns` maps each head to "left" or "right"."""
    rule = "|".join({"left": "---", "right": "---:"}[side] for side in columns.values())
    return [
        f"| {' | '.join(columns)} |",
        f"|{rule}|",
        *(f"| {' | '.join(str(value) for value in row)} |" for row in rows),
    ]

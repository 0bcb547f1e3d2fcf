"""Pieces of the pages made of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotrow.bench import is_disturbed


def held(promise: str, *, holds: bool) -> str:
    """A promise and what became of it."""
    return f"{promise}: {'held' if holds else '**not held**'}"


def clean_rounds(cell: Mapping[str, Any]) -> str:
    """How many of how many rounds were clean, for a table; the figure is of others too if too few were."""
    return f"{cell['clean_rounds']} of {cell['taken_rounds']}" + (" (disturbed)" if is_disturbed(cell) else "")


def table(columns: dict[str, str], rows: list[list[Any]]) -> list[str]:
    """Markdown lines; `columns` maps each head to "left" or "right"."""
    rule = "|".join({"left": "---", "right": "---:"}[side] for side in columns.values())
    return [
        f"| {' | '.join(columns)} |",
        f"|{rule}|",
        *(f"| {' | '.join(str(value) for value in row)} |" for row in rows),
    ]

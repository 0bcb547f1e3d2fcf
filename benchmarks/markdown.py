"""Pieces of the pages made of measurements."""

from __future__ import annotations

from typing import Any


def held(promise: str, *, holds: bool) -> str:
    """A promise and what became of it."""
    return f"{promise}: {'held' if holds else '**not held**'}"


def table(columns: dict[str, str], rows: list[list[Any]]) -> list[str]:
    """Markdown lines; `columns` maps each head to "left" or "right"."""
    rule = "|".join({"left": "---", "right": "---:"}[side] for side in columns.values())
    return [
        f"| {' | '.join(columns)} |",
        f"|{rule}|",
        *(f"| {' | '.join(str(value) for value in row)} |" for row in rows),
    ]

"""The shapes that a report page is made of: figures, charts, cells and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hotrow.draw import line_chart
from hotrow.report.facts import Point, thin

WIDTH, HEIGHT = 540, 270
DASH = "\u2013"


class Figure(NamedTuple):
    """A figure on a card."""

    name: str
    value: str
    text: str


class Chart(NamedTuple):
    """A chart and what it shows."""

    svg: str
    caption: str


class Cell(NamedTuple):
    """A table's cell. sort: the number to sort by, if the text is not it."""

    text: str
    sort: float | None = None


Grid = tuple[Sequence[str], Sequence[Sequence[Cell | str]]]
"""A table: its heads, and its rows; the first column is text."""


def shown(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def percent(value: float | None) -> Cell:
    return Cell("" if value is None else f"{value:.1%}")


def curves_chart(
    curves: Mapping[str, Sequence[Point]], *, y_label: str, label: str, dashed: Collection[str] = ()
) -> Chart:
    """Draws curves over steps, thinned if they are long; the caption says so. dashed: curves that lie on top."""
    thinned = {name: thin(curve) for name, curve in curves.items() if curve}
    per_point = max((found.per_point for found in thinned.values()), default=1)
    note = f" Each point is the mean of {per_point} lines; the area spans the least to the most of them."
    return Chart(
        line_chart(
            {name: found.curve for name, found in thinned.items()},
            x_label="step",
            y_label=y_label,
            x_scale="linear",
            y_scale="value",
            dashed=dashed,
            bands={name: found.band for name, found in thinned.items()},
            width=WIDTH,
            height=HEIGHT,
            label=label,
        ),
        label + "." + (note if per_point > 1 else ""),
    )

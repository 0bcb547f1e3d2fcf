"""What a chain of days says of each day, and the page of it: how good yesterday's model was, what it did not know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as record

from hotrow.base.files import atomic_write, size
from hotrow.base.records import STRICT, Amount, Count
from hotrow.draw import line_chart, load_template
from hotrow.objectives.objective import Objective
from hotrow.objectives.objective import shown as metric
from hotrow.report.facts import Point, number_in
from hotrow.report.shapes import DASH, HEIGHT, WIDTH, Cell, Chart, Figure, Grid, percent, shown
from hotrow.run.record import Part

PARTS = "a part of it"
"""Name of what lies as dots around the lines of whole days."""
MAX_TICKS = 8
"""Days that are named below a chart."""


KnownFiles = dict[str, tuple[Count, str, Count]]
"""Files of a day by their path below the logs: size, checksum, and when the system last saw a change, in its ns."""


@record(frozen=True, config=STRICT)
class DoneDay:
    """A day that is done, as days.json keeps it."""

    name: str
    files: KnownFiles
    rows: Count
    """Rows that train."""
    positives: dict[str, Count]
    """How many of them are 1, by label of 0 or 1."""
    metrics: dict[str, Any] | None
    """Those of the model of the day before on these rows; None of the first day."""
    parts: list[Part]
    """The same of each hour or tenth of the rows, as `Parent.parts` has them."""
    unknown: Amount | None
    """Share of the lookups that were of ids without a row in the day before."""
    table_rows: Count
    """Rows of all tables."""
    new_rows: Count
    gone_rows: Count | None
    """Rows that were freed because nobody used them; None if the dataset does not say so."""
    published_bytes: Count
    """Bytes of the delta; of the first day those of the whole export."""
    seconds: dict[str, Amount]
    """How long the last call took to prepare, train and export it."""

    def line(self, objective: Objective, before: str | None) -> str:
        """The day in a line: its rows, what the model of the day `before` made of them, the version, seconds."""
        told = "the first day" if self.metrics is None else f"model of {before} {objective.line(self.metrics)}"
        return f"{self.name}: {self.rows:,} rows, {told}, versions/{self.name}, {sum(self.seconds.values()):.1f} s"


def write_page(path: Path, name: str, days: Sequence[DoneDay], objective: Objective) -> None:
    """Writes the page of a chain. Text is escaped."""
    newest = days[-1]
    text = load_template("days/days.html").render(
        name=name,
        num_days=len(days),
        newest=newest,
        verdict=objective.verdict(newest.metrics) if newest.metrics else None,
        figures=_figures(days, objective),
        quality=[chart for chart in _quality(days, objective) if chart.svg],
        growth=[chart for chart in _growth(days) if chart.svg],
        table=_table(days, objective),
    )
    with atomic_write(path) as file:
        file.write(text.encode())


def _figures(days: Sequence[DoneDay], objective: Objective) -> list[Figure]:
    newest, (first, measure) = days[-1], next(iter(objective.measures.items()))
    value = number_in(newest.metrics or {}, first)
    return [
        Figure(measure.title, shown(value, ".4f"), f"of the day before's model on {newest.name}, before training"),
        Figure("Unknown", shown(newest.unknown, ".1%"), f"of the lookups of {newest.name} were of ids without a row"),
        Figure("Rows of tables", f"{newest.table_rows:,}", f"{newest.new_rows:,} of them new on {newest.name}"),
        Figure("To send", size(newest.published_bytes), "the delta" if newest.metrics else "the whole model"),
    ]


def _chart(days: Sequence[DoneDay], curves: Mapping[str, Sequence[Point]], y: str, caption: str) -> Chart:
    """Draws curves over days; day k lies at k."""
    every = -(-len(days) // MAX_TICKS)
    ticks = {float(k): day.name for k, day in enumerate(days, 1) if (k - 1) % every == 0}
    options: dict[str, Any] = {"x_scale": "linear", "y_scale": "value", "width": WIDTH, "height": HEIGHT}
    drawn = {name: curve for name, curve in curves.items() if curve}
    svg = line_chart(drawn, x_label="day", y_label=y, ticks=ticks, label=caption, dots=[PARTS], **options)
    return Chart(svg, f"{caption}.")


def _over(values: Iterable[float | None]) -> list[Point]:
    return [(float(k), value) for k, value in enumerate(values, 1) if value is not None]


def _over_parts(days: Sequence[DoneDay], name: str, *, factor: float = 1.0) -> list[Point]:
    return [
        (k + (place + 0.5) / len(day.parts) - 0.5, factor * value)
        for k, day in enumerate(days, 1)
        for place, part in enumerate(day.parts)
        if (value := part.get(name)) is not None
    ]


def _quality(days: Sequence[DoneDay], objective: Objective) -> list[Chart]:
    """Returns each measure over days, and over the parts of them."""
    charts = []
    for name, title in objective.titles.items():
        curves = {
            "the day": _over(number_in(day.metrics or {}, name) for day in days),
            PARTS: _over_parts(days, name),
        }
        charts.append(_chart(days, curves, title, f"{title} on each day's rows, before the model trains on them"))
    return charts


def _growth(days: Sequence[DoneDay]) -> list[Chart]:
    """Returns what each day brought, and what it cost."""
    rows = {
        "all": _over(day.table_rows for day in days),
        "new": _over(day.new_rows for day in days),
        "freed": _over(day.gone_rows for day in days),
    }
    deltas = _over(day.published_bytes / 2**20 if day.metrics else None for day in days)
    phases = dict.fromkeys(phase for day in days for phase in day.seconds)
    seconds = {phase: _over(day.seconds.get(phase) for day in days) for phase in phases}
    unknown = {"the day": _over(None if day.unknown is None else 100 * day.unknown for day in days)}
    unknown[PARTS] = _over_parts(days, "unknown", factor=100)
    return [
        _chart(days, unknown, "% of lookups", "Lookups of ids that the day before has no row for"),
        _chart(days, rows, "rows", "Rows of all tables"),
        _chart(days, {"delta": deltas}, "MiB", "Size of the deltas"),
        _chart(days, seconds, "seconds", "Seconds of each step"),
    ]


def _table(days: Sequence[DoneDay], objective: Objective) -> Grid:
    """Returns all figures by day."""
    titles = objective.titles
    heads = ["day", "rows", *titles.values(), "unknown", "new rows", "freed", "rows of tables", "to send", "seconds"]
    rows: list[list[Cell | str]] = []
    for day in days:
        figures = [Cell(metric(number_in(day.metrics, name)) if day.metrics else DASH) for name in titles]
        counts = [Cell(shown(count, ",")) for count in (day.new_rows, day.gone_rows, day.table_rows)]
        sent = Cell(size(day.published_bytes), day.published_bytes)
        seconds = Cell(f"{sum(day.seconds.values()):,.1f}")
        rows.append([day.name, Cell(f"{day.rows:,}"), *figures, percent(day.unknown), *counts, sent, seconds])
    return heads, rows

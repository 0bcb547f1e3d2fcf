"""Charts as SVG text, in colours that colour-blind readers can tell apart, and the templates of HTML pages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jinja2 import Template

PACKAGE = Path(__file__).resolve().parent
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito's palette
WIDTH, HEIGHT = 720, 420
FEW = 12
"""Lines with at most this many points also get a dot at each point."""
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 50


def svg(body: Sequence[str], *, width: int = WIDTH, height: int = HEIGHT, label: str) -> str:
    """Returns a self-contained SVG element."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(body)}</svg>'
    )


class Shares:
    """A plot area whose y is a share from 0 to 1 or `top`, and whose x is logarithmic, or linear from 0."""

    def __init__(
        self,
        xs: Sequence[float],
        *,
        x_scale: Literal["linear", "log"],
        width: int,
        height: int,
        top: float = 1.0,
        ticks: Mapping[float, str] | None = None,
    ) -> None:
        self._scale, self._width, self._height, self._ticks = x_scale, width, height, ticks
        self._quarters = max(4, math.ceil(4 * top - 1e-9))
        self._x0 = math.floor(math.log10(min(xs))) if x_scale == "log" else 0.0
        self._x1 = math.ceil(math.log10(max(xs)) - 1e-9) if x_scale == "log" else max(xs)
        if x_scale == "log" and ticks:
            self._x0, self._x1 = math.log10(min(*ticks, *xs)), math.log10(max(*ticks, *xs))
        self._x1 += self._x1 == self._x0

    def x(self, value: float) -> float:
        """Returns pixels from the left; a value below the first power of ten is drawn on the edge."""
        if self._scale == "log":
            value = max(math.log10(value), self._x0) if value > 0 else self._x0
        return LEFT + (self._width - LEFT - RIGHT) * (value - self._x0) / (self._x1 - self._x0)

    def y(self, share: float) -> float:
        """Returns pixels from the top."""
        return self._height - BOTTOM - (self._height - TOP - BOTTOM) * share * 4 / self._quarters

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Returns grid lines and labels."""
        lines = []
        for quarter in range(0, self._quarters + 1, math.ceil(self._quarters / 8)):
            share = quarter / 4
            y = self.y(share)
            lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{self._width - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
        for value, shown in self._named_ticks():
            x, bottom = self.x(value), self._height - BOTTOM
            lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
            lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{shown}</text>')
        middle = (self._height - BOTTOM + TOP) / 2
        at = f'x="{(LEFT + self._width - RIGHT) / 2}" y="{self._height - 10}"'
        lines.append(f'<text {at} text-anchor="middle">{escape(x_label)}</text>')
        turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
        lines.append(f'<text x="16" y="{middle}" {turned}>{escape(y_label)}</text>')
        return lines

    def _named_ticks(self) -> list[tuple[float, str]]:
        if self._ticks is not None:
            return [*self._ticks.items()]
        values = [self._x1 * k / 5 for k in range(6)]
        if self._scale == "log":
            values = [10.0**power for power in range(int(self._x0), int(self._x1) + 1)]
        return [(value, f"{value:.6g}" if value < 1e6 else f"{value:.0e}".replace("e+0", "e")) for value in values]


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Literal["linear", "log"] = "log",
    shape: Literal["line", "stairs"] = "line",
    dashed: Collection[str] = (),
    ticks: Mapping[float, str] | None = None,
    label: str,
) -> str:
    """Returns a chart of shares (y, 0 to 1 or more) against x, one line per name, or nothing without points.

    The first six lines have colours and are named below the plot; the others are thin and grey. Hovering shows a name.
    A line of few points has dots. shape "stairs": a value holds until the next point. dashed: names of dashed lines.
    ticks: values of x with their labels, instead of round numbers.
    """
    points = [point for line in lines.values() for point in line if x_scale == "linear" or point[0] > 0]
    if not points:
        return ""
    named = list(lines)[: len(COLOURS)]
    per_row = 3
    height = HEIGHT - 60
    top = max(y for _, y in points)
    plot = Shares([x for x, _ in points], x_scale=x_scale, width=WIDTH, height=height, top=top, ticks=ticks)
    body = plot.axes(x_label, y_label)
    drawn = sorted(enumerate(lines.items()), key=lambda item: (item[1][0] in dashed, -item[0]))
    for i, (name, line) in drawn:  # grey lines lowest; dashed lines on top, as what is under them shows through
        colour, stroke = (COLOURS[i], 2.2) if i < len(COLOURS) else ("#bbb", 1.0)
        dashes = ' stroke-dasharray="7 5"' if name in dashed else ""
        pixels: list[tuple[float, float]] = []
        for x, y in line:
            if shape == "stairs" and pixels:
                pixels.append((plot.x(x), pixels[-1][1]))
            pixels.append((plot.x(x), plot.y(y)))
        if len(line) == 1:
            ((x, y),) = pixels
            at = f'cx="{x:.1f}" cy="{y:.1f}" r="4"'
            body.append(f'<circle {at} fill="{colour}"><title>{escape(name)}</title></circle>')
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}"{dashes}>'
            f"<title>{escape(name)}</title></polyline>"
        )
        if len(pixels) <= FEW and shape == "line" and i < len(COLOURS):  # values between the dots were not measured
            body.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in pixels)
    for i, name in enumerate(named):
        x, y = LEFT + (WIDTH - LEFT - RIGHT) / per_row * (i % per_row), height + 16 + 18 * (i // per_row)
        ink = f'stroke="{COLOURS[i]}" stroke-width="3"' + (' stroke-dasharray="5 3"' if name in dashed else "")
        body.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" {ink}/>')
        body.append(f'<text x="{x + 28}" y="{y}">{escape(name)}</text>')
    return svg(body, height=height + 26 + 18 * ((len(named) - 1) // per_row), label=label)


def bar_chart(values: Mapping[str, float], *, y_label: str, label: str) -> str:
    """Returns positive values as bars on a logarithmic axis, in the given order; nothing without values."""
    shown = {name: value for name, value in values.items() if value > 0}
    if not shown:
        return ""
    low = math.floor(math.log10(min(shown.values())) - 1e-9)
    high = max(math.ceil(math.log10(max(shown.values()))), low + 1)
    bottom = HEIGHT - 120
    area = bottom - TOP
    body = []
    for power in range(low, high + 1):
        y = bottom - area * (power - low) / (high - low)
        body.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    step = (WIDTH - LEFT - RIGHT) / len(shown)
    every = math.ceil(14 / step)  # skips labels that would overlap
    for i, (name, value) in enumerate(shown.items()):
        x, high_px = LEFT + step * i, area * (math.log10(value) - low) / (high - low)
        body.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{bottom - high_px:.1f}" width="{step * 0.8:.1f}" '
            f'height="{high_px:.1f}" fill="{COLOURS[0]}"><title>{escape(name)}: {value:.3g}</title></rect>'
        )
        if i % every == 0:
            at = f'x="{x + step / 2:.1f}" y="{bottom + 12}"'
            turned = f'transform="rotate(-45 {x + step / 2:.1f} {bottom + 12})"'
            body.append(f'<text {at} text-anchor="end" {turned}>{escape(name[:16])}</text>')
    middle = (bottom + TOP) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle})"'
    body.append(f'<text x="14" y="{middle}" {turned}>{escape(y_label)}</text>')
    return svg(body, height=bottom + 80, label=label)


def load_template(name: str, *, folder: Path = PACKAGE, **filters: Any) -> Template:
    """Returns the HTML template at the path `name` below `folder`, or below the package, such as "inspect/report.html".

    A template may extend "page.html". Text is escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, because importing hotrow stays lean

    environment = Environment(
        loader=FileSystemLoader([folder, PACKAGE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)

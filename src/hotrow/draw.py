"""Charts as SVG text, in colours that colour-blind readers can tell apart, and the templates of HTML pages.

A chart is complete by itself: it prints, and it stands in documents. On a page (`load_template`), page.css gives it the
page's colours, and page.js shows values at the pointer and as a table, which it reads from the attributes `data-x`,
`data-y` (axes), `data-points` (a line's values) and from titles (bars, dots).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jinja2 import Template

PACKAGE = Path(__file__).resolve().parent
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito's palette
WIDTH, HEIGHT = 720, 420
FEW = 12
"""Lines with at most this many points also get a dot at each point."""
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 20, 50
MAX_TICKS = 6
Scale = Literal["linear", "log"]
Point = tuple[float, float]


def svg(body: Sequence[str], *, width: int = WIDTH, height: int = HEIGHT, label: str, data: str = "") -> str:
    """Returns a self-contained SVG element. label: for readers who cannot see it. data: more attributes."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}"{data} font-family="sans-serif" font-size="12">'
        f'<rect class="paper" width="{width}" height="{height}" fill="#fff"/>{"".join(body)}</svg>'
    )


@dataclass(frozen=True)
class Axis:
    """One axis of a plot: the values `low` and `high` lie at the pixels `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: Mapping[float, str]
    scale: Scale = "linear"
    percent: bool = False

    @classmethod
    def powers(cls, values: Iterable[float], start: float, end: float) -> Axis:
        """Makes a logarithmic axis that ends at whole powers of ten."""
        positive = [value for value in values if value > 0]
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) - 1e-9)
        high += high == low
        ticks = {10.0**power: number(10.0**power) for power in range(low, high + 1)}
        return cls(10.0**low, 10.0**high, start, end, ticks, "log")

    @classmethod
    def named(cls, ticks: Mapping[float, str], values: Iterable[float], start: float, end: float, scale: Scale) -> Axis:
        """Makes an axis over the values and the given ticks."""
        every = [*ticks, *values]
        return cls(min(every), max(every), start, end, ticks, scale)

    @classmethod
    def counted(cls, values: Iterable[float], start: float, end: float) -> Axis:
        """Makes a linear axis from 0 to the largest value, or to a round tick that is less than a tenth above it."""
        high = max(values) or 1.0
        step = _round_step(0.0, 1.1 * high)
        ticks = [float(f"{step * k:.12g}") for k in range(math.floor(1.1 * high / step + 1e-9) + 1)]
        high = max(high, ticks[-1])
        return cls(0.0, high, start, end, {value: number(value) for value in ticks})

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float) -> Axis:
        """Makes a linear axis around the values, which ends at round ticks."""
        found = [*values]
        low, high = min(found), max(found)
        if high == low:
            low, high = low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
        step = _round_step(low, high)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        steps = [float(f"{step * k:.12g}") for k in range(first, last + 1)]
        return cls(steps[0], steps[-1], start, end, {value: number(value) for value in steps})

    @classmethod
    def shares(cls, top: float, start: float, end: float) -> Axis:
        """Makes an axis of shares from 0 to 1, or on to the quarter above `top`."""
        quarters = max(4, math.ceil(4 * top - 1e-9))
        ticks = {quarter / 4: f"{quarter / 4:.0%}" for quarter in range(0, quarters + 1, math.ceil(quarters / 8))}
        return cls(0.0, quarters / 4, start, end, ticks, percent=True)

    def __call__(self, value: float) -> float:
        """Returns the pixel of a value; on a logarithmic axis a value below the lowest is drawn on the edge."""
        low, high = self.low, self.high
        if self.scale == "log":
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def data(self, name: str, label: str) -> str:
        """Returns the axis as an attribute for page.js."""
        times = 100 if self.percent else 1
        ends = f"{times * self.low:.7g} {times * self.high:.7g} {self.start:g} {self.end:g}"
        return f' data-{name}="{self.scale} {ends} {"%" if self.percent else "-"} {escape(label)}"'


def _round_step(low: float, high: float) -> float:
    """Returns the least round distance of which at most MAX_TICKS lie between `low` and `high`."""
    least = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * k for k in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if power * k > least * (1 + 1e-9))


def number(value: float) -> str:
    """Formats a tick: 1e-5, 0.25, 12,000, 1.5M, 1e9."""
    if abs(value) >= 1e9:
        return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value:,.6g}".replace("e-0", "e-")


def grid(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Returns the lines and labels of a plot's axes; pixels of y fall from the bottom to the top."""
    lines = []
    for value, shown in y.ticks.items():
        at = y(value)
        lines.append(
            f'<line class="grid" x1="{x.start:g}" y1="{at:.1f}" x2="{x.end:g}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{x.start - 8:g}" y="{at + 4:.1f}" text-anchor="end">{escape(shown)}</text>'
        )
    for value, shown in x.ticks.items():
        at = x(value)
        lines.append(
            f'<line class="grid" x1="{at:.1f}" y1="{y.end:g}" x2="{at:.1f}" y2="{y.start:g}" stroke="#ddd"/>'
            f'<text x="{at:.1f}" y="{y.start + 18:g}" text-anchor="middle">{escape(shown)}</text>'
        )
    across, up = (x.start + x.end) / 2, (y.start + y.end) / 2
    lines.append(f'<text x="{across:g}" y="{y.start + 40:g}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'text-anchor="middle" transform="rotate(-90 16 {up:g})"'
    lines.append(f'<text x="16" y="{up:g}" {turned}>{escape(y_label)}</text>')
    return lines


def line_chart(
    lines: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    y_label: str,
    x_scale: Scale = "log",
    y_scale: Literal["share", "value"] = "share",
    dots: Collection[str] = (),
    dashed: Collection[str] = (),
    ticks: Mapping[float, str] | None = None,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    width: int = WIDTH,
    height: int = HEIGHT - 60,
    label: str,
) -> str:
    """Returns a chart of y against x, one line per name, or nothing without points.

    The first six lines have colours and are named below the plot; the others are thin and grey. Hovering shows a
    name. A line of few points has dots. y_scale "share": y is 0 to 1 or more. dots: names of lines whose points alone
    are drawn. dashed: names of dashed lines. ticks: values of x with their labels, instead of round numbers. bands: by
    a line's name (x, least, most), drawn as an area behind it. height: of the plot without the names below it.
    """
    points = [point for line in lines.values() for point in line if x_scale == "linear" or point[0] > 0]
    if not points:
        return ""
    bands = bands or {}
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ys += [y for band in bands.values() for _, *ends in band for y in ends]
    left, right, bottom = LEFT, width - RIGHT, height - BOTTOM
    if ticks is not None:
        x_axis = Axis.named(ticks, xs, left, right, x_scale)
    else:
        x_axis = Axis.powers(xs, left, right) if x_scale == "log" else Axis.counted(xs, left, right)
    y_axis = Axis.shares(max(ys), bottom, TOP) if y_scale == "share" else Axis.around(ys, bottom, TOP)
    body = grid(x_axis, y_axis, x_label, y_label)
    drawn = sorted(enumerate(lines.items()), key=lambda item: (item[1][0] in dashed, -item[0]))
    for i, (name, _) in drawn:
        if band := bands.get(name):
            edge = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
            path = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in edge)
            body.append(f'<polygon points="{path}" fill="{COLOURS[i % len(COLOURS)]}" fill-opacity="0.18"/>')
    for i, (name, line) in drawn:  # grey lines lowest; dashed lines on top, as what is under them shows through
        body += _line(name, line, i, x_axis, y_axis, dots=name in dots, dashed=name in dashed)
    named = list(lines)[: len(COLOURS)]
    per_row = 3 if width >= WIDTH else 2
    body += _names(named, width=width, top=height, per_row=per_row, dashed=dashed)
    data = x_axis.data("x", x_label) + y_axis.data("y", y_label)
    return svg(body, width=width, height=height + 26 + 18 * ((len(named) - 1) // per_row), label=label, data=data)


def _line(
    name: str,
    line: Sequence[Point],
    index: int,
    x: Axis,
    y: Axis,
    *,
    dots: bool,
    dashed: bool,
) -> list[str]:
    colour, stroke = (COLOURS[index], 2.2) if index < len(COLOURS) else ("#bbb", 1.0)
    dashes = ' stroke-dasharray="7 5"' if dashed else ""
    pixels = [(x(at), y(value)) for at, value in line]
    times = 100 if y.percent else 1
    data = f'data-points="{" ".join(f"{at:.7g},{times * value:.5g}" for at, value in line)}"'
    if len(line) == 1:
        ((at, value),) = pixels
        where = f'cx="{at:.1f}" cy="{value:.1f}" r="5"'
        return [f'<circle {where} fill="{colour}" {data}><title>{escape(name)}</title></circle>']
    circles = [f'<circle cx="{at:.1f}" cy="{value:.1f}" r="3" fill="{colour}"/>' for at, value in pixels]
    if dots:
        return [f'<g fill="{colour}" {data}><title>{escape(name)}</title>', *circles, "</g>"]
    path = " ".join(f"{at:.1f},{value:.1f}" for at, value in pixels)
    drawn = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}"{dashes} {data}>'
        f"<title>{escape(name)}</title></polyline>"
    ]
    if len(pixels) <= FEW and index < len(COLOURS):  # values between the dots were not measured
        drawn += circles
    return drawn


def _names(names: Sequence[str], *, width: int, top: int, per_row: int, dashed: Collection[str]) -> list[str]:
    """Returns a legend below a plot."""
    body = []
    for i, name in enumerate(names):
        x, y = LEFT + (width - LEFT - RIGHT) / per_row * (i % per_row), top + 16 + 18 * (i // per_row)
        ink = f'stroke="{COLOURS[i]}" stroke-width="3"' + (' stroke-dasharray="5 3"' if name in dashed else "")
        body.append(f'<line x1="{x:g}" y1="{y - 4}" x2="{x + 22:g}" y2="{y - 4}" {ink}/>')
        shown = name if len(name) <= 40 else name[:39] + "\u2026"
        body.append(f'<text x="{x + 28:g}" y="{y}">{escape(shown)}</text>')
    return body


@functools.cache
def load_template(name: str, *, folder: Path = PACKAGE, **filters: Callable[..., str]) -> Template:
    """Returns the HTML template at the path `name` below `folder`, or below the package, such as "inspect/report.html".

    A template may extend "page.html". Text is escaped.
    """
    # Here, because importing hotrow stays lean.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([folder, PACKAGE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = ((PACKAGE / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(style=style, script=script, script_sha256=allowed)
    environment.filters.update(filters)
    return environment.get_template(name)

"""Charts of measured kernels, as SVG text: a roofline, and a heat map of shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from hotrow.draw import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, svg


class LogLog:
    """A plot area with logarithmic axes that end at whole powers of ten."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x0, self.x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 1e-9)
        self.y0, self.y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)

    def x(self, value: float) -> float:
        """Returns pixels from the left."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        """Returns pixels from the top."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - self.y0) / (self.y1 - self.y0)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        """Returns grid lines and labels."""
        lines = []
        for power in range(self.x0, self.x1 + 1):
            x = self.x(10.0**power)
            lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
            lines.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>')
        for power in range(self.y0, self.y1 + 1):
            y = self.y(10.0**power)
            lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        middle = (HEIGHT - BOTTOM + TOP) / 2
        lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
        turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
        lines.append(f'<text x="16" y="{middle}" {turned}>{escape(y_label)}</text>')
        return lines


def roofline(
    points: Mapping[str, Sequence[tuple[float, float, str]]], *, gb_per_s: float | None, gflop_per_s: float
) -> str:
    """Returns a roofline: arithmetic rate against flops per byte, under the limits of memory and arithmetic.

    points: series -> (flops per byte, GFLOP/s, label). gb_per_s: memory bandwidth; None: no slanted roof.
    """
    everything = [point for series in points.values() for point in series]
    if not everything:
        return ""
    xs = [x for x, _, _ in everything]
    plot = LogLog([*xs, 10.0], [*(y for _, y, _ in everything), gflop_per_s])
    body = plot.axes("flops per byte moved", "GFLOP/s")
    left, right = 10.0**plot.x0, 10.0**plot.x1
    if gb_per_s is not None:
        ridge = min(max(gflop_per_s / gb_per_s, left), right)
        floor = max(left, 10.0**plot.y0 / gb_per_s)
        roof = [(floor, floor * gb_per_s), (ridge, min(gflop_per_s, ridge * gb_per_s)), (right, gflop_per_s)]
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in roof)
        body.append(f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="2"/>')
        what = f"matrix product {gflop_per_s:.0f} GFLOP/s; memory {gb_per_s:.1f} GB/s in order"
        at = f'x="{plot.x(right) - 6:.1f}" y="{plot.y(gflop_per_s) - 8:.1f}"'
        body.append(f'<text {at} text-anchor="end">{what}</text>')
    for i, (name, series) in enumerate(points.items()):
        colour = COLOURS[i % len(COLOURS)]
        for x, y, what in series:
            body.append(
                f'<circle cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="3.5" fill="{colour}" fill-opacity="0.6">'
                f"<title>{escape(what)}</title></circle>"
            )
        y = HEIGHT - BOTTOM - 14 - 18 * (len(points) - 1 - i)
        body.append(f'<circle cx="{WIDTH - RIGHT - 190}" cy="{y - 4}" r="5" fill="{colour}"/>')
        body.append(f'<text x="{WIDTH - RIGHT - 178}" y="{y}">{escape(name)}</text>')
    return svg(body, label="roofline")


def heat_map(values: Mapping[tuple[str, str], float | None], *, x_label: str, y_label: str, label: str) -> str:
    """Returns a heat map of (column, row) -> share, written in its cell and shown as its shade."""
    columns = list(dict.fromkeys(column for column, _ in values))
    lines = list(dict.fromkeys(line for _, line in values))
    side, high, left, top = 68, 34, 84, 30
    width, height = left + side * len(columns) + 10, top + high * len(lines) + 34
    body = [f'<text x="{left}" y="14">{escape(y_label)} down, {escape(x_label)} across</text>']
    for i, column in enumerate(columns):
        x = left + side * (i + 0.5)
        body.append(f'<text x="{x}" y="{top + high * len(lines) + 18}" text-anchor="middle">{escape(column)}</text>')
    for j, line in enumerate(lines):
        y = top + high * (j + 0.5)
        body.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(line)}</text>')
        for i, column in enumerate(columns):
            value = values.get((column, line))
            if value is None:
                continue
            shade = min(1.0, max(0.0, value))
            body.append(
                f'<rect x="{left + side * i}" y="{top + high * j}" width="{side - 2}" height="{high - 2}" '
                f'fill="#0072b2" fill-opacity="{0.08 + 0.82 * shade:.2f}"/>'
            )
            ink = "#fff" if shade > 0.55 else "#000"
            at = f'x="{left + side * (i + 0.5) - 1}" y="{y + 4}" text-anchor="middle"'
            body.append(f'<text {at} fill="{ink}">{value:.0%}</text>')
    return svg(body, width=width, height=height, label=label)

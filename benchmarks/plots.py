"""Charts of measurements, as SVG text: a roofline, a heat map of shares, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from hotrow.draw import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid, svg

MAX_LABEL = 60
"""Characters of a bar's label."""


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
    across = Axis.powers([*xs, 10.0], LEFT, WIDTH - RIGHT)
    up = Axis.powers([*(y for _, y, _ in everything), gflop_per_s], HEIGHT - BOTTOM, TOP)
    body = grid(across, up, "flops per byte moved", "GFLOP/s")
    left, right = across.low, across.high
    if gb_per_s is not None:
        ridge = min(max(gflop_per_s / gb_per_s, left), right)
        floor = max(left, up.low / gb_per_s)
        roof = [(floor, floor * gb_per_s), (ridge, min(gflop_per_s, ridge * gb_per_s)), (right, gflop_per_s)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in roof)
        body.append(f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="2"/>')
        what = f"matrix product {gflop_per_s:.0f} GFLOP/s; memory {gb_per_s:.1f} GB/s in order"
        at = f'x="{across(right) - 6:.1f}" y="{up(gflop_per_s) - 8:.1f}"'
        body.append(f'<text {at} text-anchor="end">{what}</text>')
    for i, (name, series) in enumerate(points.items()):
        colour = COLOURS[i % len(COLOURS)]
        for x, y, what in series:
            body.append(
                f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}" fill-opacity="0.6">'
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
            ink = ' fill="#fff"' if shade > 0.55 else ""  # else the page's
            at = f'x="{left + side * (i + 0.5) - 1}" y="{y + 4}" text-anchor="middle"'
            body.append(f"<text {at}{ink}>{value:.0%}</text>")
    return svg(body, width=width, height=height, label=label)


def bar_chart(values: Mapping[str, float], *, y_label: str, label: str) -> str:
    """Returns positive values as bars on a logarithmic axis, in the given order; nothing without values."""
    shown = {name: value for name, value in values.items() if value > 0}
    if not shown:
        return ""
    bottom = HEIGHT - 120
    names = {name: name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "\u2026" for name in shown}
    longest = max(map(len, names.values()))
    # Slanted labels that are longer would leave the picture at the left.
    angle, sine, down = (-45, 0.71, 12) if longest <= 16 else (-90, 1.0, 8)
    room = max(80, down + round(7 * longest * sine))
    low = 10.0 ** math.floor(math.log10(min(shown.values())) - 1e-9)  # so that the least bar is seen
    y_axis = Axis.powers([low, *shown.values()], bottom, TOP)
    body = grid(Axis(0, 1, LEFT, WIDTH - RIGHT, {}), y_axis, "", y_label)
    step = (WIDTH - LEFT - RIGHT) / len(shown)
    every = math.ceil(14 / step)  # skips labels that would overlap
    for i, (name, value) in enumerate(shown.items()):
        x, y = LEFT + step * i, y_axis(value)
        body.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" '
            f'height="{bottom - y:.1f}" fill="{COLOURS[0]}"><title>{escape(name)}: {value:.3g}</title></rect>'
        )
        if i % every == 0:
            across = x + step / 2 + (4 if angle == -90 else 0)  # half of the text's height
            at = f'x="{across:.1f}" y="{bottom + down}"'
            turned = f'transform="rotate({angle} {across:.1f} {bottom + down})"'
            body.append(f'<text {at} text-anchor="end" {turned}>{escape(names[name])}</text>')
    return svg(body, height=bottom + room, label=label)

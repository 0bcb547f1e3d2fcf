"""Cells that a search adds to a study: a group's `search` names the axis along which its best value is looked for.

The values in the file are measured first. While the best of them is at an end, the next one beyond is tried; then those
between it and its neighbours, until these are close. For speed the best value is the smallest that is nearly as fast as
the fastest; for quality, the one with the lowest NE on validation rows, its mean over seeds. What comes next follows
from the rows alone, so a study that goes on searches as one that was never interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotrow.study.data import SyntheticRows
from hotrow.study.study import Cell, Group, Study, with_field

Row = Mapping[str, Any]
SEED = "train.seed"
GOOD_SHARE = 0.95
"""The best value for speed is the smallest that reaches this share of the highest speed."""
MOST_BEYOND = 4
"""How many values beyond each end of the file's a search may try."""
NEAR = {"speed": 1.5, "quality": 2.0}
"""A search ends when the best value and its neighbours are within this factor of each other."""


def reached(study: Study, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Cell]:
    """Returns the cells of a study, and those of searches so far, by group and value: some of them may lack a row."""
    found = [*cells]
    while more := [cell for cell in following(study, found, rows) if _is_begun(cell, study.groups[cell.group], rows)]:
        found += more
    groups = [*study.groups]
    place = {cell.key: at for at, cell in enumerate(found)}
    lines: dict[str, int] = {}
    for cell in found:
        lines.setdefault(_line(cell, study.groups[cell.group].search), place[cell.key])

    def order(cell: Cell) -> tuple[int, int, float, int]:
        axis = study.groups[cell.group].search
        value = 0.0 if axis is None else float(cell.labels[axis])
        return groups.index(cell.group), lines[_line(cell, axis)], value, place[cell.key]

    return sorted(found, key=order)


def _is_begun(cell: Cell, group: Group, rows: Mapping[str, Row]) -> bool:
    """Returns whether the cell, or the same with another seed, has a row."""
    seeds = group.axes.get(SEED, ())
    others = [with_field(cell, SEED, seed) for seed in seeds] if isinstance(seeds, list) else []
    return any(own.key in rows for own in (cell, *others))


def following(study: Study, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Cell]:
    """Returns the cells that searches want next. A line that lacks a row waits for it."""
    found: list[Cell] = []
    for name, group in study.groups.items():
        if group.search is None:
            continue
        lines: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.group == name:
                lines.setdefault(_line(cell, group.search), []).append(cell)
        for line in lines.values():
            if all(cell.key in rows for cell in line):
                found += _next_of(group, group.search, line, rows)
    return found


def _line(cell: Cell, axis: str | None) -> str:
    """Returns what cells have in common that differ in the axis and the seed alone, or in anything without an axis."""
    if axis is None:
        return cell.group
    return "/".join([cell.group, *(f"{own}={at}" for own, at in cell.labels.items() if own not in (axis, SEED))])


def _next_of(group: Group, axis: str, line: Sequence[Cell], rows: Mapping[str, Row]) -> Iterator[Cell]:
    by_value: dict[float, list[Cell]] = {}
    for cell in line:
        by_value.setdefault(float(cell.labels[axis]), []).append(cell)
    scores = {value: _score(group, [rows[cell.key] for cell in own]) for value, own in by_value.items()}
    listed = [float(str(value)) for value in group.axes[axis]]
    is_whole = all(isinstance(value, int) for value in group.axes[axis])
    most = line[0].data.samples if axis == "train.batch_size" and isinstance(line[0].data, SyntheticRows) else math.inf
    for wanted in wanted_values(scores, listed, measures=group.measures):
        value = round(wanted) if is_whole else float(f"{wanted:.3g}")
        if value not in by_value and 0 < value <= most:
            # The same seeds as of any other value.
            yield from (with_field(cell, axis, value) for cell in next(iter(by_value.values())))


def _score(group: Group, rows: Sequence[Row]) -> float:
    """Returns what is to be as high as possible; -inf if a run has no figure, because it diverged or does not fit."""
    sign, name = (-1.0, "val_ne") if group.measures == "quality" else (1.0, "samples_per_s")
    if any(row.get(name) is None for row in rows):
        return -math.inf
    return sign * statistics.fmean(row[name] for row in rows)


def best_of(scores: Mapping[float, float], *, measures: str) -> float | None:
    """Returns the best value by score; None if none of them has one."""
    highest = max(scores.values())
    if highest == -math.inf:
        return None
    enough = highest if measures == "quality" else GOOD_SHARE * highest
    return min(value for value, score in scores.items() if score >= enough)


def wanted_values(scores: Mapping[float, float], listed: Sequence[float], *, measures: str) -> list[float]:
    """Returns the values to try next, given the scores of those that were tried; none if the search is over."""
    best, values = best_of(scores, measures=measures), sorted(scores)
    if best is None and measures == "quality":
        best = values[0]  # all rates are too high
    if best is None or len(values) < 2:
        return []
    at = values.index(best)
    if at == len(values) - 1:
        ratio = values[-1] / values[-2]
        return [best * ratio] if best * ratio <= max(listed) * ratio**MOST_BEYOND * 1.01 else []
    if at == 0:
        ratio = values[1] / values[0]
        return [best / ratio] if best / ratio >= min(listed) / ratio**MOST_BEYOND / 1.01 else []
    neighbours = values[at - 1 : at] if measures == "speed" else [values[at - 1], values[at + 1]]
    far = [other for other in neighbours if max(other / best, best / other) > NEAR[measures] * 1.01]
    return [math.sqrt(other * best) for other in far]

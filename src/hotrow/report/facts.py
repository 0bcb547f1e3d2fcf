"""What a report page is made of: the facts of one run, read from its folder without trusting a line of it.

`read_lines` reads metrics.jsonl of a run that may have been killed, `points` and `thin` make curves. page.py makes
sentences, figures and charts of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotrow.base.door import read_file
from hotrow.base.records import MAX_COUNT
from hotrow.data.packed.format import DatasetInfo
from hotrow.objectives import DEFAULT, OBJECTIVES, objective_of
from hotrow.objectives.objective import Objective
from hotrow.objectives.several import for_labels

MAX_POINTS = 240
"""Points of a curve; a longer one is drawn as the mean, the least and the most of each of this many buckets."""
LARGEST = 1e100
"""Numbers beyond this are not figures of a run, and arithmetic on them overflows."""

Line = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run, as its report shows it."""

    name: str
    record: Mapping[str, Any]
    """The contents of run.json."""
    lines: Sequence[Line] = ()
    """The lines of metrics.jsonl that can be read."""
    lines_left_out: int = 0
    is_training: bool = False
    """Whether a process trains there now."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """By purpose, such as "resume"."""
    options: Mapping[str, str] = field(default_factory=dict)
    """config.yaml, by dotted name; empty before the first step."""
    info: DatasetInfo | None = None
    """dataset.json of the data it trains on; None before that is known."""
    selection: Mapping[str, Any] | None = None
    """run.json of the run that found how many steps to train, if there was one."""

    @property
    def objective(self) -> Objective:
        """What the model is trained for."""
        name = str(self.record.get("objective"))
        objective = objective_of(name if name in OBJECTIVES else DEFAULT, self.record.get("metrics_by"))
        return for_labels(objective, [] if self.info is None else [label.name for label in self.info.labels])


def read_lines(path: Path) -> tuple[Sequence[Line], int]:
    """Returns the lines of a metrics.jsonl that can be read, and how many cannot; none of a file that is absent."""
    try:
        raw = read_file(path).split(b"\n")
    except FileNotFoundError:
        return [], 0
    found = [line_of(line) for line in raw if line]
    whole = [line for line in found if line is not None]
    return whole, len(found) - len(whole)


def line_of(text: bytes) -> dict[str, Any] | None:
    """Returns a line of metrics.jsonl; None if it is damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(found, dict) and isinstance(found.get("kind"), str) and type(found.get("step")) is int
    return found if is_whole and 0 <= found["step"] <= MAX_COUNT else None


def number_in(line: Mapping[str, Any], *names: str) -> float | None:
    """Returns the finite number at `line[name][name]...`; None if there is none."""
    value = mapping_in(line, *names[:-1]).get(names[-1])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        return None
    return float(value)


def mapping_in(line: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Returns the mapping at `line[name][name]...`; {} if there is none."""
    value: Any = line
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def points(lines: Iterable[Line], kind: str, *names: str, split: str | None = None) -> list[Point]:
    """Returns (step, value) of the lines of a kind that have the number `names`, in order of the steps."""
    found = [
        (float(line["step"]), value)
        for line in lines
        if line["kind"] == kind and (split is None or line.get("split") == split)
        if (value := number_in(line, *names)) is not None
    ]
    return sorted(found)


class Thinned(NamedTuple):
    """A curve that is short enough to draw."""

    curve: Sequence[Point]
    band: Sequence[tuple[float, float, float]]
    """(x, least, most) of each bucket; empty if every point is drawn."""
    per_point: int
    """The most points that one point of the curve stands for; 1 if every point is drawn."""


def thin(curve: Sequence[Point]) -> Thinned:
    """Returns the curve with at most MAX_POINTS points: buckets of equally many points, at their mean x and mean y."""
    if len(curve) <= MAX_POINTS:
        return Thinned(curve, (), 1)
    size = math.ceil(len(curve) / MAX_POINTS)
    buckets = [np.asarray(curve[start : start + size]) for start in range(0, len(curve), size)]
    xs = [float(bucket[:, 0].mean()) for bucket in buckets]
    means = [(x, float(bucket[:, 1].mean())) for x, bucket in zip(xs, buckets, strict=True)]
    ends = [(x, float(bucket[:, 1].min()), float(bucket[:, 1].max())) for x, bucket in zip(xs, buckets, strict=True)]
    return Thinned(means, ends, size)

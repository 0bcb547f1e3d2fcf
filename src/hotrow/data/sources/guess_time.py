"""Finds the column of times by which rows are split, and times that are set with the outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Any

import numpy as np
import pyarrow as pa

from hotrow.data.cells import PLAIN, WRITTEN, WRITTEN_DATES, as_seconds, numbers, on_clock
from hotrow.data.sources.evidence import CLEAR, Tally, weigh
from hotrow.data.sources.facts import ColumnFacts, Guess, is_like, shown
from hotrow.data.sources.guess_label import Labels
from hotrow.data.sources.kinds import as_dense
from hotrow.data.sources.readings import ODD_SHARE
from hotrow.data.sources.sample import Sample
from hotrow.data.sources.training import Training
from hotrow.data.transforms import Transform

TIME_NAMES = r"(.*_)?(time|timestamp|ts|date|datetime|hour|day|dt|unix_?time|(created|updated|event)_?at)"
MAX_OF_TIME = 0.05
"""A time that takes away more than this share of the label's LogLoss is set with the outcome: rates of clicks change
over time, but not as much."""


def find_time(
    facts: Sequence[ColumnFacts],
    name: str | None,
    format: str | None,
    found: Sample,
    labels: Labels | None,
    training: Training,
) -> tuple[Guess | None, tuple[str, ...], list[Guess]]:
    """Returns the time column or None, what the user may decide otherwise, and times that are set with the outcome.

    name, format: of the time column, as the user gave them. training: tells which rows will train.
    """
    for f in facts:
        if f.name == name:
            spec = _time_spec(f) if format is None else told_time(f, format)
            return Guess("time", f.name, spec, "as told"), (), []
    if name is not None:
        raise ValueError(f"column {name!r} cannot be both label and time; name another")
    notes = [
        f"column {shown(f.name)} holds times that may be read in {len(f.time_formats)} ways; to split by it: "
        f"--time {quote(f.name)} --time-format {quote(f.time_formats[0])}, or the format {quote(f.time_formats[1])} "
        "(in Python time=..., time_format=...)"
        for f in facts
        if len(f.time_formats) > 1
    ]
    able = [(f, kind) for f in facts if (kind := _kind_of_time(f)) and f.is_nearly_full]
    set_later: list[Guess] = []
    # Of several times the one that tells most moments apart is the event's: neither a day nor a user's first visit.
    for f, kind in sorted(able, key=lambda pair: (-pair[0].num_distinct, pair[0].name)):
        if labels is None or not (share := _told_by_time(f, found, labels, training)):
            return Guess("time", f.name, _time_spec(f), kind), tuple(notes), set_later
        why = f"a leak: this time tells {share:.0%} of the label, so it may be set with it; to split by it nonetheless:"
        set_later.append(Guess("", f.name, {}, f"{why} --time {quote(f.name)}"))
    return None, (*notes, *_times_with_gaps(facts)), set_later


def _kind_of_time(f: ColumnFacts) -> str:
    """Returns what kind of time a column holds; "" if rows cannot be split by it."""
    if f.kind == "time" and len(f.time_formats) < 2:
        return f"holds times ({f.stored})"
    if holds_unix_times(f) and is_like(TIME_NAMES, f.name):
        return "unix times"
    return "dates as whole numbers, which rise with time" if _is_written_date(f) else ""


def _told_by_time(f: ColumnFacts, found: Sample, labels: Labels, training: Training) -> float:
    """Returns which share of the label's LogLoss a time takes away in rows that train if it is the time to split by;
    0 if it is no more than a change over time."""
    time = Guess("time", f.name, _time_spec(f), "")
    good, (times, _) = training.among(found, labels, time), training.times(found, time)
    if not good.any():
        return 0.0
    tally = Tally.of(times[good], labels.positive[good])
    told = weigh(tally, as_dense(tally, "standardize"))
    share = 0.0 if told is None else 1 - told.values / told.base
    return share if told is not None and told.gain >= CLEAR and share > MAX_OF_TIME else 0.0


def _times_with_gaps(facts: Sequence[ColumnFacts]) -> list[str]:
    """Returns a sentence about each column that would be the time if fewer of its values were missing."""
    notes = []
    for f in facts:
        if not f.is_nearly_full and _kind_of_time(f):
            lost = f.num_missing + f.num_odd
            notes.append(
                f"column {shown(f.name)} holds times, but {lost:,} of {f.num_rows:,} sampled rows have none; rows are "
                f"split at random. To leave those rows out and split by it: --time {quote(f.name)} --skip-bad-rows "
                f"{lost} or more (in Python time={f.name!r}, skip_bad_rows={lost})"
            )
    return notes


def clock_of(f: ColumnFacts, format: str | None, column: pa.ChunkedArray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the transforms for the hour and weekday of a time, as in a schema, if its values are read and these vary.
    names: names of columns, which a computed column may not have."""
    how = {"format": format} if format else {} if holds_unix_times(f) else {"zone": WRITTEN}
    times = on_clock(numbers(as_seconds(column.combine_chunks(), **how), PLAIN)[0], None)
    known = times[~np.isnan(times)]
    if len(known) <= (1 - ODD_SHARE) * len(column):
        return []
    made = [(name, f"{f.name} {name}") for name in ("hour", "weekday") if np.ptp(Transform(name)(known))]
    return [{name: {"column": f.name, "into": into, **how}} for name, into in made if into not in names]


def told_time(f: ColumnFacts, format: str) -> dict[str, Any]:
    """Returns the time column as in a schema. Raises ValueError if `format` is for text, and the column has none."""
    if not any(kind in f.stored for kind in ("string", "null", "dictionary")):
        raise ValueError(f"time_format is for text, but column {f.name!r} holds {f.stored} values; leave it out")
    return {"column": f.name, "format": format}


def _time_spec(f: ColumnFacts) -> dict[str, Any]:
    if len(f.time_formats) > 1:
        ways = " or ".join(map(repr, f.time_formats))
        raise ValueError(
            f"time column {f.name!r} may be read as {ways}; say which: "
            f"--time {quote(f.name)} --time-format {quote(f.time_formats[0])}, in Python time_format=..."
        )
    return {"column": f.name, **({"format": f.time_formats[0]} if f.time_formats else {})}


def holds_unix_times(f: ColumnFacts) -> bool:
    return f.kind in ("int", "float") and not f.written and f.is_unix


def _is_written_date(f: ColumnFacts) -> bool:
    """Returns whether a column holds whole numbers such as 20141021 or 2014102113, which rise with time."""
    if f.kind != "int" or not is_like(TIME_NAMES, f.name):
        return False
    return all(any(re.fullmatch(form, f"{value:.0f}") for form in WRITTEN_DATES) for value in (f.low, f.high))

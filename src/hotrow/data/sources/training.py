"""Tells which sampled rows will train, so that a guess looks at no label of a row that validates or tests.

A split by time trains on the oldest rows. If the sample is not the whole table, the time up to which rows train is
known only about, and a guess looks at fewer of them. A random split is a function of the row's number; a sampled row
whose number is not known counts as one that does not train.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.sources.convert import TimeReader
from hotrow.data.sources.facts import Guess
from hotrow.data.sources.guess_label import Labels
from hotrow.data.sources.sample import Sample
from hotrow.data.sources.schema import SplitSpec
from hotrow.data.sources.split import TRAIN, RandomPlan, TimeHistogram

SURELY = 0.9
"""Share of the training rows that a guess looks at if it has a sample: the oldest ones. Rows from all over a table lie
evenly in its time but for a few percent."""


def training_rows(found: Sample, labels: Labels, time: Guess | None, split: SplitSpec) -> NDArray[np.bool_]:
    """Returns which sampled rows have a good label and surely train [num_rows]. time: the guess about its column."""
    kept, times = labels.good, None
    if time is not None:
        times, readable = times_of(found.rows.column(time.column), time)
        kept = kept & readable
    if (split.kind or ("random" if times is None else "time")) == "random":
        return kept & _trains_by_number(found, kept, split)
    if times is None:
        return np.zeros(len(kept), np.bool_)  # preparation will refuse this split
    return kept & (times < _last_of(times[kept], split, is_whole=found.is_whole))


def times_of(column: pa.ChunkedArray, time: Guess) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the times of a column, and which of them could be read."""
    array = column.combine_chunks()
    times, fault = TimeReader.for_column(array.slice(0, 1024), time.spec.get("format"))(array, time.column)
    return times, np.ones(len(times), np.bool_) if fault is None else ~fault.rows


def _last_of(times: NDArray[np.int64], split: SplitSpec, *, is_whole: bool) -> int:
    """Returns the time before which rows train."""
    histogram, (train, *_) = TimeHistogram(), split.fractions
    histogram.add(times)
    fractions = split.fractions if is_whole else (SURELY * train, 1 - SURELY * train, 0.0)
    try:
        return histogram.plan(fractions).cuts[0]
    except ValueError:  # preparation will refuse this split
        return int(times.min(initial=0))


def _trains_by_number(found: Sample, kept: NDArray[np.bool_], split: SplitSpec) -> NDArray[np.bool_]:
    """Returns which sampled rows a random split trains on."""
    numbers = np.cumsum(kept) - 1 if found.is_whole else found.numbers  # preparation numbers the rows that it keeps
    codes = RandomPlan(split.seed, split.fractions).of_rows(numbers)
    trains: NDArray[np.bool_] = (numbers >= 0) & (codes == TRAIN)
    return trains

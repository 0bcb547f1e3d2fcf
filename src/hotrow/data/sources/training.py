"""Tells which sampled rows will train, so that a guess looks at no label of a row that validates or tests.

A split by time trains on the oldest rows; the column of times is read once for the exact cut. A random split is a
function of the row's number among the rows that are kept. How many rows before it will be left out is not always known:
a row counts as one that trains if it trains whichever of them are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.cells import TimeReader, without_missing
from hotrow.data.sources.facts import Guess
from hotrow.data.sources.guess_label import Labels
from hotrow.data.sources.sample import Sample
from hotrow.data.sources.schema import SplitSpec
from hotrow.data.sources.split import TRAIN, RandomPlan, TimeHistogram
from hotrow.data.sources.tabular import TableReader


@dataclass
class _Times:
    """What a column of times says of the whole table."""

    reader: TimeReader | None = None
    histogram: TimeHistogram = field(default_factory=TimeHistogram)
    odd: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The numbers of rows without a readable time."""

    def of(self, column: pa.ChunkedArray, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the times of sampled rows, and which of them could be read."""
        if self.reader is None:  # preparation will refuse the column
            return np.zeros(len(column), np.int64), np.zeros(len(column), np.bool_)
        times, fault = self.reader(column.combine_chunks(), name)
        return times, np.ones(len(times), np.bool_) if fault is None else ~fault.rows


@dataclass(frozen=True)
class Training:
    """How preparation will choose the rows that train.

    reader, missing: of the table, and which texts are missing values. split, skip_bad_rows, rows: as for preparation.
    """

    reader: TableReader
    missing: Sequence[str]
    split: SplitSpec
    skip_bad_rows: int = 0
    rows: int | None = None
    _known: dict[str, _Times] = field(default_factory=dict)

    def among(self, found: Sample, labels: Labels, time: Guess | None) -> NDArray[np.bool_]:
        """Returns which sampled rows have a good label and surely train [num_rows].

        time: the guess about the column of times; None if there is none.
        """
        kept, times, odd = labels.good, None, np.empty(0, np.int64)
        if time is not None:
            (times, readable), odd = self.times(found, time), self._known[time.column].odd
            kept = kept & readable
        left_out = np.union1d(odd, found.numbers[~labels.good & (found.numbers >= 0)])
        numbers = np.where(found.numbers < 0, -1, found.numbers - np.searchsorted(left_out, found.numbers))
        if self.rows is not None:
            kept = kept & (numbers >= 0) & (numbers < self.rows)
        if (self.split.kind or ("random" if times is None else "time")) == "random":
            return self._by_number(kept & (numbers >= 0), numbers, max(self.skip_bad_rows - len(left_out), 0))
        if times is None:
            return np.zeros(len(kept), np.bool_)  # preparation will refuse this split
        assert time is not None, "times are of its column"
        try:
            return kept & (times < self._known[time.column].histogram.plan(self.split.fractions).cuts[0])
        except ValueError:  # preparation will refuse this split
            return np.zeros(len(kept), np.bool_)

    def times(self, found: Sample, time: Guess) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the times of sampled rows, and which of them could be read."""
        if time.column not in self._known:
            try:
                self._known[time.column] = self._read(time)
            except ValueError:  # preparation will refuse the column, or find what is wrong with a file
                self._known[time.column] = _Times()
        return self._known[time.column].of(found.rows.column(time.column), time.column)

    def _by_number(self, kept: NDArray[np.bool_], numbers: NDArray[np.int64], num_unknown: int) -> NDArray[np.bool_]:
        """Returns which rows a random split trains on. num_unknown: how many more rows before one may be left out."""
        plan, trains = RandomPlan(self.split.seed, self.split.fractions), np.flatnonzero(kept)
        for shift in range(num_unknown + 1 if sum(self.split.fractions[1:]) else 0):
            trains = trains[plan.assign(np.maximum(numbers[trains] - shift, 0)) == TRAIN]
            if shift >= numbers[trains].max(initial=0):
                break
        return np.isin(np.arange(len(kept)), trains)

    def _read(self, time: Guess) -> _Times:
        found, odd, row, num_times = _Times(), [], 0, 0
        self.reader.check_drift([time.column])
        for cells in self._cells(time.column):
            if found.reader is None:
                found.reader = TimeReader.for_column(cells.slice(0, 1024), time.spec.get("format"))
            times, fault = found.reader(cells, time.column)
            if fault is not None:
                odd.append(row + np.flatnonzero(fault.rows))
                times = times[~fault.rows]
            found.histogram.add(times if self.rows is None else times[: self.rows - num_times])
            row, num_times = row + len(cells), num_times + len(times)
            if self.rows is not None and num_times >= self.rows:
                break
        found.odd = np.concatenate([found.odd, *odd])
        return found

    def _cells(self, column: str) -> Iterator[pa.Array]:
        for index in range(len(self.reader.files)):
            for rows in self.reader.read(index, 0, [column], 1 << 20):
                yield without_missing(rows.batch.column(0), self.missing)

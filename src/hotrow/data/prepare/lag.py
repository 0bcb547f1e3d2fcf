"""Statistics of the label as of a while before each row: what a server would know if labels arrive late.

    lagged = Lagged(counts, lag, file)                        # lag: in the unit of the times; file: empty, for rows
    for chunk, counted in chunks:                             # in the order of time
        inputs = lagged.inputs(chunk, counted)                # of every row

A row sees the counted rows that are at least `lag` older than it. Rows wait in `file`, as their hashes, until a row
sees them, and are read back a chunk at a time; memory does not grow with the lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.data.chunk import Chunk
from hotrow.data.prepare.statistics import Statistics, positives


class _Rows(NamedTuple):
    """What is counted of rows: hashes of their values by statistic [S, n], labels [n] and times [n]."""

    hashes: NDArray[np.uint64]
    labels: NDArray[np.bool_]
    times: NDArray[np.int64]

    def some(self, rows: slice | NDArray[np.bool_]) -> _Rows:
        return _Rows(self.hashes[:, rows], self.labels[rows], self.times[rows])


class Lagged:
    """Statistics of the counted rows at least `lag` older than a row. counts: those of rows before the first."""

    def __init__(self, counts: Statistics, lag: int, file: IO[bytes]) -> None:
        self._counts, self._lag, self._file = counts, lag, file
        self._places = deque[int]()
        """Where in the file the chunks begin that wait there."""
        self._oldest: _Rows | None = None
        """Rows of a chunk that has been read back, without those that were counted."""

    def inputs(self, chunk: Chunk, counted: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Returns the inputs of a chunk's rows [n, J]; keeps the `counted` rows [n] for later rows."""
        assert chunk.time is not None, "the schema has a time"
        own = _Rows(np.stack(self._counts.hashes(chunk)), positives(chunk), chunk.time)
        if counted.any():
            self._places.append(self._file.seek(0, 2))
            for array in own.some(counted):
                np.save(self._file, array)
        out = np.empty((chunk.num_rows, self._counts.num_inputs), np.float32)
        left = np.arange(chunk.num_rows)
        for older in self._until(int(own.times[-1]) - self._lag):
            # Rows of one time may lie in two pieces, so a row that sees the last time of this one waits for the next.
            seen = int(np.searchsorted(own.times[left], older.times[-1] + self._lag))
            self._answer(own, left[:seen], older, out)
            left = left[seen:]
        self._answer(own, left, own.some(slice(0)), out)
        return out

    def _answer(self, own: _Rows, asked: NDArray[np.intp], older: _Rows, out: NDArray[np.float32]) -> None:
        """Counts `older` rows, each before the first of the `asked` rows that sees it, and writes the inputs of
        those."""
        order = np.argsort(np.concatenate([older.times + self._lag, own.times[asked]]), kind="stable")
        is_older = order < len(older.times)
        hashes = list(np.concatenate([older.hashes, own.hashes[:, asked]], 1).take(order, 1))
        labels = np.concatenate([older.labels, own.labels[asked]])[order]
        found, of_all = self._counts.counts_before(hashes, labels, is_older, None, self._counts)
        out[asked] = self._counts.inputs([of_value[~is_older] for of_value in found], of_all[~is_older])

    def _until(self, time: int) -> Iterator[_Rows]:
        """Yields the waiting rows up to a time, in their order, a chunk or what is left of it at a time; they wait no
        longer."""
        while self._oldest is not None or self._places:
            if self._oldest is None:
                self._file.seek(self._places.popleft())
                self._oldest = _Rows(*(np.load(self._file) for _ in _Rows._fields))
            num_rows = int(np.searchsorted(self._oldest.times, time, side="right"))
            left = self._oldest.some(slice(num_rows, None))
            if num_rows:
                yield self._oldest.some(slice(0, num_rows))
            self._oldest = left if len(left.times) else None
            if self._oldest is not None:
                return

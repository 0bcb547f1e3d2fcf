"""Statistics of the label as of a while before each row: what a server would know whose labels arrive late.

    lagged = Lagged(schema, lag, file)                        # lag: in the unit of the times; file: empty, for rows
    for chunk, trains in chunks:                              # in the order of time
        chunk = lagged.joined_to(chunk, ~trains, before)      # before: the chunk with its statistics at the end

A row sees all rows, of every split, that are at least `lag` older than it. Rows wait in `file`, as their hashes, until
a row sees them, and are read back a chunk at a time; memory does not grow with the lag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.data.chunk import Chunk
from hotrow.data.prepare.statistics import Statistics, positives
from hotrow.data.sources.schema import Schema


class _Rows(NamedTuple):
    """What is counted of rows: hashes of their values by statistic [S, n], labels [n] and times [n]."""

    hashes: NDArray[np.uint32]
    """The leading bits, which number the counters."""
    labels: NDArray[np.bool_]
    times: NDArray[np.int64]

    def some(self, rows: slice) -> _Rows:
        return _Rows(self.hashes[:, rows], self.labels[rows], self.times[rows])


ROW_BYTES, STATISTIC_BYTES = 9, 4
"""What a row, and each statistic of it, takes in the file."""


class Lagged:
    """Statistics of all rows that are at least `lag` older than a row."""

    def __init__(self, schema: Schema, lag: int, file: IO[bytes]) -> None:
        self._counts, self._lag, self._file = Statistics(schema), lag, file
        self._places = deque[int]()
        """Where in the file the chunks begin that wait there."""
        self._oldest: _Rows | None = None
        """Rows of a chunk that has been read back, without those that were counted."""

    def add(self, chunk: Chunk) -> _Rows:
        """Takes rows that later ones may see; returns them."""
        assert chunk.time is not None, "the schema has a time"
        hashes = (np.stack(self._counts.hashes(chunk)) >> np.uint64(32)).astype(np.uint32)
        rows = _Rows(hashes, positives(chunk), chunk.time)
        self._places.append(self._file.seek(0, 2))
        for array in rows:
            np.save(self._file, array)
        return rows

    def joined_to(self, chunk: Chunk, asked: NDArray[np.bool_], before: Chunk) -> Chunk:
        """Returns `before`, whose last dense columns are the statistics of the chunk's rows, with other ones for those
        that are asked for [n]; takes the chunk's rows as `add` does."""
        own = self.add(chunk)
        if not asked.any():
            return before
        dense = before.dense.copy()
        left = np.flatnonzero(asked)
        for older in self._until(int(own.times[-1]) - self._lag):
            # Rows of one time may lie in two pieces, so a row that sees the last time of this one waits for the next.
            seen = int(np.searchsorted(own.times[left], older.times[-1] + self._lag))
            self._answer(own, left[:seen], older, dense)
            left = left[seen:]
        self._answer(own, left, own.some(slice(0)), dense)
        return replace(before, dense=dense)

    def _answer(self, own: _Rows, asked: NDArray[np.intp], older: _Rows, dense: NDArray[np.float32]) -> None:
        """Counts `older` rows, each before the first of the `asked` rows that sees it, and writes the statistics of
        those to the last columns of `dense`."""
        order = np.argsort(np.concatenate([older.times + self._lag, own.times[asked]]), kind="stable")
        is_older = order < len(older.times)
        hashes = np.concatenate([older.hashes, own.hashes[:, asked]], 1).take(order, 1)
        labels = np.concatenate([older.labels, own.labels[asked]])[order]
        whole = [of_rows.astype(np.uint64) << np.uint64(32) for of_rows in hashes]
        found, of_all = self._counts.counts_before(whole, labels, is_older, self._counts)
        inputs = self._counts.inputs([of_value[~is_older] for of_value in found], of_all[~is_older])
        dense[asked, -inputs.shape[1] :] = inputs

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

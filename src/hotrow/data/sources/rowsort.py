"""Rows of integers in order, more of them than memory holds: sorted runs on disk, merged piece by piece.

    sort = RowSort(num_columns=3)
    sort.add([users, times, items])          # any number of times
    users, times, items = sort.sorted()      # by user, then time; equal ones in the order they were added

Its files have no name from the start: whatever ends the process, their disk is free when it has ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

Columns = tuple[NDArray[np.int64], ...]

ROWS_IN_MEMORY = 1 << 21
"""Of a run while it is sorted, and of a piece while it is merged: with 4 columns and their order about 200 MB."""


class RowSort:
    """Sorts rows of int64 columns by the first two. Files lie where `tempfile` puts them (TMPDIR)."""

    def __init__(self, num_columns: int, *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self.num_columns, self._rows_in_memory = num_columns, rows_in_memory
        self._waiting: list[Columns] = []
        self._num_waiting = 0
        self._runs: list[Columns] = []

    def add(self, columns: Sequence[NDArray[np.int64]]) -> None:
        """Rows to be sorted: columns of one length."""
        assert len(columns) == self.num_columns
        for start in range(0, len(columns[0]), self._rows_in_memory):
            piece = tuple(column[start : start + self._rows_in_memory] for column in columns)
            if self._num_waiting + len(piece[0]) > self._rows_in_memory:
                self._write_run()
            self._waiting.append(piece)
            self._num_waiting += len(piece[0])

    def sorted(self) -> Columns:
        """All rows in order, each column a read-only mapped file; the runs are gone after it."""
        self._write_run()
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(self.num_columns)]
            for piece in self._merged():
                for file, column in zip(files, piece, strict=True):
                    file.write(column.data)
            self._runs.clear()
            return tuple(_mapped(file, 1)[0] for file in files)

    def _write_run(self) -> None:
        if not self._num_waiting:
            return
        with tempfile.TemporaryFile() as file:
            for column in _in_order(self._waiting):
                file.write(column.data)
            self._runs.append(_mapped(file, self.num_columns))
        self._waiting, self._num_waiting = [], 0

    def _merged(self) -> Iterator[Columns]:
        """The rows of all runs in order, about `rows_in_memory` at a time; rows of one first key come together."""
        at = [0] * len(self._runs)
        step = max(1, self._rows_in_memory // max(1, len(self._runs)))
        while any(start < len(run[0]) for start, run in zip(at, self._runs, strict=True)):
            ahead = [int(run[0][i + step]) for i, run in zip(at, self._runs, strict=True) if i + step < len(run[0])]
            stops = self._stops(min(ahead), "left") if ahead else [len(run[0]) for run in self._runs]
            if stops == at:  # one key fills the piece
                stops = self._stops(min(ahead), "right")
            ranges = zip(self._runs, at, stops, strict=True)
            yield _in_order([tuple(column[i:j] for column in run) for run, i, j in ranges if i < j])
            at = stops

    def _stops(self, key: int, side: Literal["left", "right"]) -> list[int]:
        return [int(np.searchsorted(run[0], key, side=side)) for run in self._runs]


def _in_order(pieces: Sequence[Columns]) -> Columns:
    """The rows of all pieces, sorted; stable."""
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return tuple(column[order] for column in columns)


def _mapped(file: IO[bytes], num_columns: int) -> Columns:
    """The columns of a file that holds them one behind the other; they outlive its closing."""
    file.flush()
    if not file.tell():
        return tuple(np.empty(0, np.int64) for _ in range(num_columns))  # nothing cannot be mapped
    return tuple(np.memmap(file, dtype=np.int64, mode="r").view(np.ndarray).reshape(num_columns, -1))

"""Puts rows in the order of their times, more rows than fit in memory: sorted runs on disk, then merged.

    sort = TimeSort(file, memory_bytes=1 << 30)
    for piece in pieces:
        sort.add(piece)
    num_rows = sort.write(folder / "rows.arrow", check_stop)
    for piece in sorted_pieces(folder / "rows.arrow", found, schema, start, stop, rows_per_chunk=65536):
        ...                                                       # from any row on

Rows of one time keep their order. A row is stored as its source has read it, with its split, in Arrow's IPC format; so
whatever depends on its number is settled before, and no bad row is met again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.base.door import open_file
from hotrow.base.files import atomic_write
from hotrow.data.chunk import Chunk, Position, keys_from_arrow, keys_to_arrow
from hotrow.data.prepare.shares import Piece
from hotrow.data.prepare.workfolder import CURE, Sorted
from hotrow.data.sources.schema import Schema
from hotrow.data.sources.split import Codes

COPIES = 4
"""How often the rows of a run are in memory while they are sorted."""
NUM_WRITTEN = 2
"""How often a row is on disk at a time: in a run, and in its place."""
ROWS_PER_BATCH = 1 << 16
MAX_HOURS = 50
"""Two days have up to 49 hours; of longer times days say enough."""


@dataclass
class TimeOrder:
    """Finds out whether times come in order."""

    first: int | None = None
    last: int | None = None
    rises: bool = True

    def add(self, times: NDArray[np.int64]) -> None:
        """Looks at the times of the next rows."""
        if not len(times):
            return
        self.rises &= bool((self.last is None or self.last <= times[0]) and (times[1:] >= times[:-1]).all())
        self.first = int(times[0]) if self.first is None else self.first
        self.last = int(times[-1])


@dataclass
class Hours(TimeOrder):
    """Finds out, too, where each hour begins while times come in order."""

    day: int = 0
    """A day, in the unit of the times, of which an hour is at least one; 0 if it is not known."""
    begins: list[list[int]] = field(default_factory=list)
    """The number of each hour that has rows, and its first row."""

    def add_rows(self, times: NDArray[np.int64], row: int) -> None:
        """Looks at the times of the next rows, the first of which is `row`."""
        self.add(times)
        if self.day and self.rises:
            hours = times // max(1, self.day // 24)
            at = np.flatnonzero(np.diff(hours, prepend=self.begins[-1][0] if self.begins else hours[:1] - 1))
            self.begins += np.stack([hours[at], at + row], axis=1).tolist()


def hours_of(of_ranks: Sequence[tuple[Hours, int]]) -> list[list[int]]:
    """Returns the seconds since 1970 at which each hour of all rows begins, and its first row; of many hours, those of
    days. Nothing if rows are not in order, of one hour, or of too many days. of_ranks: with their numbers of rows."""
    begins, before = list[tuple[int, int]](), 0
    for own, num_rows in of_ranks:
        begins += [(hour * max(1, own.day // 24) * 86_400 // own.day, before + row) for hour, row in own.begins]
        before += num_rows
    for step in (3600, 86_400) if is_rising([asdict(own) for own, _ in of_ranks]) else ():
        found = {second // step * step: row for second, row in reversed(begins)}
        if 1 < len(found) <= MAX_HOURS:
            return [list(begin) for begin in sorted(found.items())]
    return []


def is_rising(of_ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether times come in order over all ranks. of_ranks: the fields of each rank's `TimeOrder`."""
    ends = [end for each in of_ranks for end in (each["first"], each["last"]) if end is not None]
    return all(each["rises"] for each in of_ranks) and ends == sorted(ends)


class TimeSort:
    """Sorts rows by time in about `memory_bytes`; runs that do not fit go to `file`, which is empty at first."""

    def __init__(self, file: IO[bytes], *, memory_bytes: int) -> None:
        self._file, self._run_bytes = file, memory_bytes // COPIES
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def add(self, piece: Piece) -> None:
        """Adds rows to sort."""
        if not piece.chunk.num_rows:
            return
        batch = to_arrow(piece.chunk, piece.codes)
        if self._waiting and self._waiting_bytes + batch.nbytes > self._run_bytes:
            self._write_run()
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes

    def _write_run(self) -> None:
        run = _by_time(self._waiting)
        self._writer = self._writer or pa.ipc.new_file(self._file, run.schema)
        self._writer.write_batch(run)
        self._waiting, self._waiting_bytes = [], 0

    def write(self, path: Path, check_stop: Callable[[], None]) -> int:
        """Writes all rows in order and returns their number. check_stop: is called now and then, and may raise."""
        runs = [_by_time(self._waiting)] if self._waiting else []
        self._waiting = []
        if self._writer is not None:
            self._writer.close()
            self._file.flush()
            runs = [*_mapped(self._file.fileno()).to_batches(), *runs]
        num_rows = 0
        with atomic_write(path) as file:
            if runs:
                with pa.ipc.new_file(file, runs[0].schema) as writer:
                    for batch in _merged(runs, max(run.num_rows for run in runs)):
                        writer.write_table(pa.Table.from_batches([batch]), max_chunksize=ROWS_PER_BATCH)
                        num_rows += batch.num_rows
                        check_stop()
        return num_rows


def _merged(runs: Sequence[pa.RecordBatch], rows_in_memory: int) -> Iterator[pa.RecordBatch]:
    for spans in _merge_spans([_times(run) for run in runs], rows_in_memory):
        parts = [run.slice(i, j - i) for run, (i, j) in zip(runs, spans, strict=True) if i < j]
        ends = {int(_times(part)[end]) for part in parts for end in (0, -1)}
        # Rows of one time may be more than memory holds, and are in order already.
        yield from parts if len(parts) == 1 or len(ends) == 1 else [_by_time(parts)]


def _merge_spans(runs: Sequence[NDArray[np.int64]], rows_in_memory: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the begin and end of the rows of each run to merge next, at most `rows_in_memory` in all, or all rows of
    one key.

    runs: the sorted keys of each. No row of a later yield has a key of an earlier one.
    """
    at = [0] * len(runs)
    step = max(1, rows_in_memory // max(1, len(runs)))

    def stops_at(key: int, side: Literal["left", "right"]) -> list[int]:
        return [int(np.searchsorted(run, key, side=side)) for run in runs]

    while any(start < len(run) for start, run in zip(at, runs, strict=True)):
        ahead = [int(run[i + step]) for i, run in zip(at, runs, strict=True) if i + step < len(run)]
        stops = stops_at(min(ahead), "left") if ahead else [len(run) for run in runs]
        if stops == at:  # rows of one key fill the piece
            stops = stops_at(min(ahead), "right")
        yield list(zip(at, stops, strict=True))
        at = stops


def _by_time(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Returns the rows of all batches in stable sorted order."""
    table = pa.Table.from_batches(batches).combine_chunks()
    order = np.argsort(table["time"].to_numpy(), kind="stable")
    return table.take(pa.array(order)).combine_chunks().to_batches()[0]


def _times(batch: pa.RecordBatch) -> NDArray[np.int64]:
    times: NDArray[np.int64] = batch.column("time").to_numpy()
    return times


def _mapped(descriptor: int) -> pa.Table:
    return pa.ipc.open_file(pa.py_buffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))).read_all()


def to_arrow(chunk: Chunk, codes: Codes) -> pa.RecordBatch:
    """Returns the rows of a chunk as they are stored. codes: the split of each."""
    assert chunk.label is not None, "rows that are sorted are prepared"
    labels = chunk.label.reshape(chunk.num_rows, -1).T
    columns = {"time": pa.array(chunk.time), "split": pa.array(codes)}
    columns |= {f"label{k or ''}": pa.array(np.ascontiguousarray(label)) for k, label in enumerate(labels)}
    columns |= {} if chunk.weight is None else {"weight": pa.array(chunk.weight)}
    columns |= {f"dense {i}": pa.array(np.ascontiguousarray(numbers)) for i, numbers in enumerate(chunk.dense.T)}
    columns |= {f"keys {name}": keys_to_arrow(keys) for name, keys in chunk.keys.items()}
    return pa.RecordBatch.from_pydict(columns)


def sorted_pieces(
    path: Path, found: Sorted, schema: Schema, start: Position | None, stop: Position | None, *, rows_per_chunk: int
) -> Iterator[Piece]:
    """Yields the rows that `TimeSort` has written, from `start` on, before `stop`; if None, all.

    The offsets of positions are rows. Raises ValueError naming the file if it is damaged.
    """
    try:
        with open_file(path) as file:
            table = _mapped(file.fileno()) if found.num_rows else pa.table({})
        if table.num_rows != found.num_rows:
            raise ValueError(f"it has {table.num_rows:,} rows and not {found.num_rows:,}")
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{path} does not hold the sorted rows ({error}); {CURE}") from None
    row, end = start.offset if start else 0, stop.offset if stop else found.num_rows
    for batch in table.slice(row, end - row).to_batches(max_chunksize=rows_per_chunk):
        row += batch.num_rows
        yield _from_arrow(batch, schema, row, Position(0, row, row, found.num_skipped))


def _from_arrow(batch: pa.RecordBatch, schema: Schema, next_row: int, position: Position) -> Piece:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    dense = np.empty((batch.num_rows, len(schema.dense)), np.float32)
    for i in range(dense.shape[1]):
        dense[:, i] = columns[f"dense {i}"].to_numpy()
    keys = {name: keys_from_arrow(columns[f"keys {name}"]) for name in schema.feature_names}
    labels = [columns[f"label{k or ''}"].to_numpy() for k in range(len(schema.labels))]
    label = labels[0] if len(labels) == 1 else np.stack(labels, axis=1)
    time, codes = (columns[name].to_numpy() for name in ("time", "split"))
    weight = columns["weight"].to_numpy() if "weight" in columns else None
    return Piece(Chunk(batch.num_rows, label, dense, keys, position, time, weight=weight), codes, next_row)

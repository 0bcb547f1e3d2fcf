"""Which rows of which table are looked up, batch by batch: from a split of a packed dataset, or from a plain trace.

A trace is a text file, compressed or not, with one row id per line: the lookups of one table in their order. Both kinds
are read in stored order, so whatever depends on the order (reuse, overlap, drift) holds for that order alone.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.data.packed.format import Ids, Ragged, concatenate_ids, slice_ids
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.sources.inputs import ByteStream, find_files

TEXT_BYTES = 1 << 22
"""Text is parsed in pieces of this size."""
LONGEST_LINE_BYTES = 1 << 12
"""Longer than any integer. A longer line means the file is not a trace, so it is not read further."""
COUNTED_SAMPLES = 1 << 18
"""Samples counted at a time if a dataset has no counts."""
INTEGER = re.compile(rb"-?[0-9]{1,19}")
BatchIds = Iterator[NDArray[Any]]


@dataclass(frozen=True)
class TableAccesses:
    """One table's lookups."""

    name: str
    num_embeddings: int
    """Number of rows N; for a trace, the highest id + 1."""
    features: tuple[str, ...]
    batches: Callable[[int], BatchIds]
    """batch size in samples -> the ids of each batch, int32 or int64 [n]; the last batch may be smaller."""
    counts: NDArray[np.unsignedinteger[Any]]
    """Accesses of each row, hottest first."""
    num_rare: int = 0
    """Accesses of row 0 of a packed dataset. Many ids share it, so it is not in `counts`: no single row is that hot."""


@dataclass(frozen=True)
class Accesses:
    """All lookups of a split or a trace."""

    name: str
    kind: str
    """packed dataset | trace"""
    num_samples: int
    """Rows of the split. A trace has no samples; its lookups are counted instead."""
    tables: tuple[TableAccesses, ...]


def open_accesses(path: Path | str, *, split: str = "train", progress: ProgressCallback | None = None) -> Accesses:
    """Opens a split of a packed dataset if `path` is a folder, else a trace.

    Raises ValueError, with what to do, if there is no such split or no access at all, and whenever reading does.
    """
    if Path(path).is_dir():
        return split_accesses(PackedDataset.open(path), split)
    return trace_accesses(path, progress=progress)


def first_batches(accesses: Accesses, num_batches: int, *, batch_size: int) -> Accesses:
    """Keeps the first `num_batches` of every table; counts still include all batches. Raises ValueError below 1."""
    if num_batches < 1:
        raise ValueError(f"batches is {num_batches}; read at least 1")

    def shorter(table: TableAccesses) -> TableAccesses:
        return replace(table, batches=lambda size: islice(table.batches(size), num_batches))

    num_samples = min(accesses.num_samples, num_batches * batch_size)
    return replace(accesses, num_samples=num_samples, tables=tuple(map(shorter, accesses.tables)))


# ---- packed datasets


def split_accesses(dataset: PackedDataset, name: str = "train") -> Accesses:
    """Returns every table's lookups in the split `name`; the counts always come from the training split."""
    split = dataset.split(name)
    if split.num_rows == 0:
        full = [other for other, rows in dataset.splits.items() if rows.num_rows] or ["none"]
        raise ValueError(
            f"{dataset.path}: split {name!r} has no rows, so no accesses; splits with rows: {', '.join(full)}"
        )
    if not dataset.has_counts:
        text = "carries no counts: its training split is counted, each time again; hotrow prepare counts once"
        warnings.warn(f"{dataset.path} {text}", stacklevel=3)
    return Accesses(
        name=dataset.info.name,
        kind="packed dataset",
        num_samples=split.num_rows,
        tables=tuple(_table_accesses(dataset, split, table.name) for table in dataset.info.tables),
    )


def _table_accesses(dataset: PackedDataset, split: Split, table: str) -> TableAccesses:
    features = dataset.info.features
    columns = [j for j, feature in enumerate(features) if feature.table == table]
    own = dataset.info.table_by_name[table]
    counts = dataset.counts(table) if own.counts_file in dataset.info.files else _counted(dataset, table, columns)
    if own.parent is not None:  # rows of later days are behind older ones
        counts = _falling(counts)
    return TableAccesses(
        name=table,
        num_embeddings=dataset.info.table_by_name[table].num_embeddings,
        features=tuple(features[j].name for j in columns),
        batches=lambda batch_size: _split_batches(split, columns, batch_size),
        counts=counts[1:],
        num_rare=int(counts[0]) if len(counts) else 0,
    )


def _counted(dataset: PackedDataset, table: str, columns: list[int]) -> NDArray[np.unsignedinteger[Any]]:
    """Counts a table's accesses by the training split, as counts/ has them: row 0 first, then falling."""
    counts = np.zeros(dataset.info.table_by_name[table].num_embeddings, np.int64)
    for ids in _split_batches(dataset.split("train"), columns, COUNTED_SAMPLES):
        counts += np.bincount(ids, minlength=len(counts))
    return _falling(counts).astype(np.uint64)


def _falling(counts: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([counts[:1], np.sort(counts[1:])[::-1]])


def _split_batches(split: Split, columns: list[int], batch_size: int) -> BatchIds:
    """Yields the ids of the features `columns` batch by batch, feature after feature, in the order of a lookup."""
    rest: list[Ids] | None = None
    for index in range(split.num_blocks):
        ids = split.block(index).ids
        found = [ids[j] for j in columns]
        if rest is not None:
            found = [concatenate_ids([old, new]) for old, new in zip(rest, found, strict=True)]
        num_rows = _num_rows(found[0])
        full = num_rows - num_rows % batch_size
        for start in range(0, full, batch_size):
            yield _flat([slice_ids(column, start, start + batch_size) for column in found])
        rest = [slice_ids(column, full, num_rows) for column in found]
    if rest is not None and _num_rows(rest[0]):
        yield _flat(rest)


def _num_rows(ids: Ids) -> int:
    return len(ids.row_splits) - 1 if isinstance(ids, Ragged) else len(ids)


def _flat(columns: list[Ids]) -> NDArray[Any]:
    arrays = [column.values if isinstance(column, Ragged) else column for column in columns]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# ---- traces


def trace_accesses(path: Path | str, *, progress: ProgressCallback | None = None) -> Accesses:
    """Reads the lookups of a trace as one table. They are kept in a temporary file, 8 bytes each, not in memory.

    Raises ValueError, naming file and line, for a line that is not an integer or is negative, and for an empty file.
    """
    file = find_files([path], matches=lambda name: True, wanted="a trace")[0]
    found = RowCounts()
    meter = ProgressMeter(progress, "read", 0)
    num_ids = 0
    with ByteStream(file) as stream, tempfile.TemporaryFile() as spool:
        for ids in _parse(stream, file.name):
            spool.write(ids.tobytes())
            num_ids += len(ids)
            found.add(ids)
            meter.update(num_ids, rows_total=num_ids * file.num_bytes // max(stream.stored_offset, 1))
        if num_ids == 0:
            raise ValueError(f"{file.name}: the trace is empty; it needs one row id per line")
        spool.flush()
        stored = np.memmap(spool, np.int64, "r", shape=(num_ids,))  # holds the file after its name and `spool` are gone
    meter.finish(num_ids)
    rows, counts = found.sums()
    table = TableAccesses(
        name="trace",
        num_embeddings=int(rows[-1]) + 1,
        features=(),
        batches=lambda size: (np.asarray(stored[start : start + size]) for start in range(0, num_ids, size)),
        counts=np.sort(counts)[::-1].astype(np.uint64),
    )
    return Accesses(name=Path(file.name).name, kind="trace", num_samples=num_ids, tables=(table,))


def _parse(stream: ByteStream, name: str) -> BatchIds:
    """Yields the ids of whole lines, one piece of text at a time."""
    buffer = bytearray(TEXT_BYTES)
    rest, first_line = b"", 1
    while num_bytes := stream.readinto(memoryview(buffer)):
        text, newline, rest_ = (rest + bytes(buffer[:num_bytes])).rpartition(b"\n")
        rest = rest_
        if newline:
            lines = text.split(b"\n")
            yield _to_ids(lines, name, first_line)
            first_line += len(lines)
        elif len(rest) > LONGEST_LINE_BYTES:
            _refuse(rest, name, first_line)
    if rest:
        yield _to_ids([rest], name, first_line)


def _to_ids(lines: list[bytes], name: str, first_line: int) -> NDArray[np.int64]:
    if lines[0].endswith(b"\r"):
        lines = [line.removesuffix(b"\r") for line in lines]
    try:
        ids = pa.array(lines, pa.binary()).cast(pa.string()).cast(pa.int64()).to_numpy()
    except pa.ArrowException:
        ids = None
    if ids is not None and ids.min() >= 0:
        return np.asarray(ids, np.int64)
    for line, text in enumerate(lines, first_line):
        if not INTEGER.fullmatch(text) or not 0 <= int(text) < 1 << 63:
            _refuse(text, name, line)
    return np.array([int(text) for text in lines], np.int64)  # 007 and the like, which Arrow may not take


def _refuse(text: bytes, name: str, line: int) -> None:
    shown = text[:40].decode(errors="replace")
    what = "is negative" if INTEGER.fullmatch(text) and text.startswith(b"-") else "is not a row id"
    raise ValueError(
        f"{name}:{line}: {shown!r} {what}; a trace has one integer from 0 to 2^63 - 1 per line and nothing else: "
        "remove or correct the line"
    )


MIN_WAITING = 1 << 18
"""Ids gathered at least before they are merged in: merging costs a pass over all rows seen."""


class RowCounts:
    """Accesses per row of ids that come in pieces, for id spaces too large for an array of counts.

    Memory: 16 bytes per distinct id, and as much again while merging.
    """

    def __init__(self) -> None:
        self._rows, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._waiting: list[NDArray[Any]] = []
        self._num_waiting = 0

    def add(self, ids: NDArray[Any]) -> None:
        """Count each of `ids`, integers [n]."""
        self._waiting.append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting > max(len(self._rows), MIN_WAITING):
            self._merge()

    def sums(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The different ids so far, rising, and the count of each."""
        self._merge()
        return self._rows, self._counts

    def _merge(self) -> None:
        if not self._waiting:
            return
        new_rows, new_counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        rows, place = np.unique(np.concatenate([self._rows, new_rows]), return_inverse=True)
        counts = np.zeros(len(rows), np.int64)
        np.add.at(counts, place, np.concatenate([self._counts, new_counts]))
        self._rows, self._counts = rows, counts
        self._waiting, self._num_waiting = [], 0

"""Accesses from a plain trace: a text file, compressed or not, with one row id per line.

They are the lookups of one table in their order. A trace has no samples; its lookups are counted instead.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.packed.reader import PackedDataset
from hotrow.data.sources.inputs import ByteStream, find_files
from hotrow.inspect.accesses import Accesses, BatchIds, TableAccesses, split_accesses

TEXT_BYTES = 1 << 22
"""Text is parsed in pieces of this size."""
LONGEST_LINE_BYTES = 1 << 12
"""Longer than any integer. A longer line means the file is not a trace, so it is not read further."""
INTEGER = re.compile(rb"-?[0-9]{1,19}")


def open_accesses(path: Path | str, *, split: str = "train") -> Accesses:
    """Opens a split of a packed dataset if `path` is a folder, else a trace.

    Raises ValueError, with what to do, if there is no such split or no access at all, and whenever reading does.
    """
    return split_accesses(PackedDataset.open(path), split) if Path(path).is_dir() else trace_accesses(path)


def trace_accesses(path: Path | str) -> Accesses:
    """Reads the lookups of a trace as one table. They are kept in a temporary file, 8 bytes each, not in memory.

    Raises ValueError, naming file and line, for a line that is not an integer or is negative, and for an empty file.
    """
    file = find_files([path], matches=lambda name: True, wanted="a trace")[0]
    found = RowCounts()
    num_ids = 0
    with ByteStream(file) as stream, tempfile.TemporaryFile() as spool:
        for ids in _parse(stream, file.name):
            spool.write(ids.tobytes())
            num_ids += len(ids)
            found.add(ids)
        if num_ids == 0:
            raise ValueError(f"{file.name}: the trace is empty; it needs one row id per line")
        spool.flush()
        stored = np.memmap(spool, np.int64, "r", shape=(num_ids,))  # holds the file after its name and `spool` are gone
    rows, counts = found.sums()
    table = TableAccesses(
        name="trace",
        num_embeddings=int(rows[-1]) + 1,
        features=(),
        batches=lambda size: (np.asarray(stored[start : start + size]) for start in range(0, num_ids, size)),
        counts=np.sort(counts)[::-1].astype(np.uint64),
    )
    return Accesses(name=Path(file.name).name, num_samples=num_ids, tables=(table,))


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

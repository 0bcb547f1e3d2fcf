"""Lines from the start, the middle and the end of a file of text, within a bounded number of bytes.

What shows only in rows from all over a file, such as columns that fill late, is found in them; `sample.py` guesses by
them. An excerpt is an `InputFile` that holds these lines alone, so the ordinary readers read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.fs import LocalFileSystem

from hotrow.data.sources.inputs import ByteStream, InputFile

HEAD_BYTES = 1 << 18
"""Text from which the size of a row is estimated."""
PLAINLY_WHOLE = 0.9
"""If this share of a piece of text is whole records, it is not read in another way."""
COUNTED_BYTES, COUNTED_AT_ONCE = 1 << 30, 1 << 22
"""Lines of larger text are not counted: of so many bytes it takes a second."""
ABOUT_WHOLE = 1.25
"""A file that is larger than what is wanted of it by no more than this factor is read in full."""


@dataclass(frozen=True)
class _Memory:
    """A file system of one file, for `InputFile`."""

    text: bytes

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self.text)


@dataclass(frozen=True)
class RecordCut:
    """How lines of delimited text are cut into records."""

    delimiter: bytes
    num_columns: int

    def records(self, text: bytes, *, at_start: bool) -> list[bytes]:
        """Returns the whole records in `text`, which begins and ends anywhere, or begins with a record.

        Whether the text begins within quotes is not known: the reading counts that makes most records whole. Records
        with another number of columns are left out, unless the text begins with a record.
        """
        if b'"' not in text:
            return _whole_lines(text, at_start=at_start)
        data = np.frombuffer(text, np.uint8)
        inside = np.cumsum(data == ord('"'), dtype=np.uint8) & 1  # only the last bit counts
        if at_start:
            ends = np.flatnonzero((data == ord("\n")) & (inside == 0)) + 1
            return [text[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
        best, begins, ends = self._whole(data, inside == 1)
        for quoted in (inside == 0, np.zeros(len(data), np.bool_)):
            if best < PLAINLY_WHOLE:
                best, begins, ends = max((best, begins, ends), self._whole(data, quoted), key=lambda found: found[0])
        return [text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def _whole(self, data: NDArray[np.uint8], quoted: NDArray[np.bool_]) -> tuple[float, Any, Any]:
        """Returns which share of the text is whole records, and their begins and ends."""
        ends = np.flatnonzero((data == ord("\n")) & ~quoted) + 1
        if len(ends) < 2:
            return 0.0, ends[:0], ends[:0]
        delimiters = np.cumsum((data == self.delimiter[0]) & ~quoted, dtype=np.int32)[ends - 1]
        begins, ends = ends[:-1], ends[1:]
        good = np.diff(delimiters) == self.num_columns - 1
        return float((ends - begins)[good].sum() / len(data)), begins[good], ends[good]


@dataclass(frozen=True)
class Lines:
    """The records of an excerpt."""

    numbers: NDArray[np.int64]
    """The number of each record in the file, from 0; -1 if it is not known."""
    num_lines: int
    """How many records the file has; -1 if that is not known."""


NO_LINES = Lines(np.empty(0, np.int64), -1)


def excerpt(
    file: InputFile, *, num_rows: int, num_places: int, most_bytes: int, cut: RecordCut | None = None
) -> tuple[InputFile, Lines]:
    """Returns a file of about `num_rows` lines from all over `file`, its first line included, and which these are; or
    `file` itself and NO_LINES, if it has no more.

    cut: how records are found; if None, each line is a record. Of compressed text only the first `most_bytes` are
    looked at. Records are counted in text without quotes of up to COUNTED_BYTES; of other text half of the excerpt is
    the beginning, whose records are known. Raises ValueError naming the file if it cannot be read.
    """
    with ByteStream(file) as stream:
        head = _take(stream, HEAD_BYTES)
        row_bytes = len(head) / max(head.count(b"\n"), 1)
        wanted = int(min(most_bytes, max(num_rows * row_bytes, HEAD_BYTES)))
        if stream.codec is None:
            num_bytes, text, is_cut = file.num_bytes, b"", False
        else:
            text = head + _take(stream, most_bytes - len(head))
            num_bytes, is_cut = len(text), bool(_take(stream, 1))
    if not is_cut and num_bytes <= ABOUT_WHOLE * wanted:
        return file, NO_LINES

    def read(start: int, length: int) -> bytes:
        if text:
            return text[start : start + length]
        with ByteStream(file, start) as part:
            return _take(part, length)

    is_near = stream.codec is not None or isinstance(file.filesystem, LocalFileSystem)
    is_counted = is_near and num_bytes <= COUNTED_BYTES and (cut is None or b'"' not in head)
    first = wanted // num_places if is_counted else wanted // 2
    length = (wanted - first) // (num_places - 1)
    starts = np.linspace(first, max(num_bytes - length, first), num_places - 1).astype(int).tolist()
    places = [(0, first), *((start, length) for start in starts)]
    counter = _Counter(read, num_bytes, quoted=cut is not None) if is_counted else None
    found = [_piece(read(*place), place, cut, counter) for place in places]
    lines = b"".join(text for text, _ in found)
    num_lines = -1 if counter is None or is_cut else counter.before(num_bytes)
    numbers = np.concatenate([numbers for _, numbers in found])
    return replace(file, filesystem=_Memory(lines), num_bytes=len(lines)), Lines(numbers, num_lines)


def _piece(
    piece: bytes, place: tuple[int, int], cut: RecordCut | None, counter: _Counter | None
) -> tuple[bytes, NDArray[np.int64]]:
    """Returns the whole records in a piece of text, and their numbers, or -1. place: its begin and size."""
    start, size = place
    records = _whole_lines(piece, at_start=start == 0) if cut is None else cut.records(piece, at_start=start == 0)
    number = 0
    if start:  # the first record comes after the line that was cut
        before, after = (-1, -1) if counter is None else (counter.before(start), counter.before(start + size))
        number = before + 1 if after >= 0 else -1
    numbers = np.arange(number, number + len(records)) if number >= 0 else np.full(len(records), -1)
    return b"".join(records), numbers


class _Counter:
    """Counts the lines of a text from its begin on; gives up where a line may be no record, or half a one."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, *, quoted: bool) -> None:
        self._read, self._num_bytes = read, num_bytes
        self._odd = (b"\n\n", b"\n\r\n", *([b'"'] if quoted else []))
        self._at, self._num_lines, self._last = 0, 0, b""

    def before(self, offset: int) -> int:
        """Returns how many lines end before `offset`, which never falls; at the end of the text also a line without a
        newline. -1 if that is not known."""
        while self._num_lines >= 0 and self._at < offset:
            text = self._read(self._at, min(offset - self._at, COUNTED_AT_ONCE))
            is_odd = not text or any(sign in self._last + text for sign in self._odd)
            self._num_lines = -1 if is_odd else self._num_lines + text.count(b"\n")
            self._at, self._last = self._at + len(text), text[-2:]
        is_open = self._at == self._num_bytes and not self._last.endswith(b"\n")
        return self._num_lines if self._num_lines < 0 else self._num_lines + is_open


def _whole_lines(text: bytes, *, at_start: bool) -> list[bytes]:
    *lines, _ = text.split(b"\n")
    return [line + b"\n" for line in (lines if at_start else lines[1:])]


def _take(stream: ByteStream, num_bytes: int) -> bytes:
    text = bytearray(max(num_bytes, 0))
    return bytes(memoryview(text)[: stream.readinto(memoryview(text))])

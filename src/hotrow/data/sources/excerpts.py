"""Lines from the start, the middle and the end of a file of text, within a bounded number of bytes.

What shows only in rows from all over a file, such as columns that fill late, is found in them; `sample.py` guesses by
them. An excerpt is an `InputFile` that holds these lines alone, so the ordinary readers read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.sources.inputs import ByteStream, InputFile

HEAD_BYTES = 1 << 18
"""Text from which the size of a row is estimated."""
PLAINLY_WHOLE = 0.9
"""If this share of a piece of text is whole records, it is not read in another way."""
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

    def records(self, text: bytes, *, at_start: bool) -> bytes:
        """Returns the whole records in `text`, which begins and ends anywhere, or begins with a record.

        Whether the text begins within quotes is not known: the reading counts that makes most records whole. Records
        with another number of columns are left out, unless the text begins with a record.
        """
        if b'"' not in text:
            return _whole_lines(text, at_start=at_start)
        data = np.frombuffer(text, np.uint8)
        inside = np.cumsum(data == ord('"'), dtype=np.uint8) & 1  # only the last bit counts
        if at_start:
            ends = np.flatnonzero((data == ord("\n")) & (inside == 0))
            return text[: int(ends[-1]) + 1] if len(ends) else b""
        best, begins, ends = self._whole(data, inside == 1)
        for quoted in (inside == 0, np.zeros(len(data), np.bool_)):
            if best < PLAINLY_WHOLE:
                best, begins, ends = max((best, begins, ends), self._whole(data, quoted), key=lambda found: found[0])
        return b"".join(text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True))

    def _whole(self, data: NDArray[np.uint8], quoted: NDArray[np.bool_]) -> tuple[float, Any, Any]:
        """Returns which share of the text is whole records, and their begins and ends."""
        ends = np.flatnonzero((data == ord("\n")) & ~quoted) + 1
        if len(ends) < 2:
            return 0.0, ends[:0], ends[:0]
        delimiters = np.cumsum((data == self.delimiter[0]) & ~quoted, dtype=np.int32)[ends - 1]
        begins, ends = ends[:-1], ends[1:]
        good = np.diff(delimiters) == self.num_columns - 1
        return float((ends - begins)[good].sum() / len(data)), begins[good], ends[good]


def excerpt(
    file: InputFile, *, num_rows: int, num_places: int, most_bytes: int, cut: RecordCut | None = None
) -> InputFile:
    """Returns a file of about `num_rows` lines from all over `file`, its first line included; or `file` itself, if it
    has no more.

    cut: how records are found; if None, each line is a record. Of compressed text only the first `most_bytes` are
    looked at. Raises ValueError naming the file if it cannot be read.
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
        return file

    def read(start: int, length: int) -> bytes:
        if text:
            return text[start : start + length]
        with ByteStream(file, start) as part:
            return _take(part, length)

    lines = b"".join(_pieces(read, num_bytes, wanted // num_places, num_places, cut))
    return replace(file, filesystem=_Memory(lines), num_bytes=len(lines))


def _pieces(
    read: Callable[[int, int], bytes], num_bytes: int, piece_bytes: int, num_places: int, cut: RecordCut | None
) -> list[bytes]:
    """Returns the whole records in pieces that are spread evenly over a text."""
    starts = np.linspace(0, max(num_bytes - piece_bytes, 0), num_places).astype(int).tolist()
    pieces = (read(start, piece_bytes) for start in starts)
    if cut is not None:
        return [cut.records(piece, at_start=start == 0) for start, piece in zip(starts, pieces, strict=True)]
    return [_whole_lines(piece, at_start=start == 0) for start, piece in zip(starts, pieces, strict=True)]


def _whole_lines(text: bytes, *, at_start: bool) -> bytes:
    return text[0 if at_start else text.find(b"\n") + 1 : text.rfind(b"\n") + 1]


def _take(stream: ByteStream, num_bytes: int) -> bytes:
    text = bytearray(max(num_bytes, 0))
    return bytes(memoryview(text)[: stream.readinto(memoryview(text))])

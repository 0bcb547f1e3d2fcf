"""Criteo click logs: label, 13 integers I1..I13, 26 categories C1..C26 of 8 hex digits, empty (or NA, null, ...) =
missing.

Files are read as published: tab-separated without a header (Kaggle's train.txt and test.txt, the Terabyte set's day_0
to day_23), and the comma-separated variants with a header and perhaps an Id column; plain, gzip or zstd; also with
Windows line ends, a UTF-8 byte order mark, or no newline at the end. Rows to predict may lack the label. The parser is
native/parse.cpp.

Integers become float32: exact up to 2^24, beyond that rounded to 24 significant bits, which moves log(1 + x) by less
than 1e-7, below float32's own resolution there. A categorical value is the number that its hex digits write, so "0a"
equals "a".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from hotrow.base.machine import usable_cores
from hotrow.data.cells import MISSING, UnreadableError, integer_of, number_of
from hotrow.data.chunk import SKIP_CURE, Chunk, KeyKind, Keys, Position, RowError, SkippedRows, SourceInfo, file_starts
from hotrow.data.native import Fault, ParseResult, RowColumns, RowLayout, parse_rows
from hotrow.data.sources.inputs import ByteStream, InputFile, find_files, prefetch
from hotrow.data.sources.tabular import estimate_lines

DENSE_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_NAMES = tuple(f"C{i}" for i in range(1, 27))
NUM_FEATURES = len(DENSE_NAMES) + len(CATEGORY_NAMES)
BUFFER_BYTES = 1 << 23
"""Bytes of text parsed at a time; also the limit for one line."""
HEAD_BYTES = 1 << 20
"""Bytes of text used to find a file's layout."""
HEAD_LINES = 100
BESIDE_ROWS = 1 << 12
"""Smaller chunks are parsed on one thread."""
FILE_NAME = re.compile(r"(.*\.(txt|tsv|csv)|day_\d+)(\.gz|\.zst)?", re.IGNORECASE)
FILE_WORDS = "*.txt, *.tsv, *.csv or day_N, also with .gz or .zst"
MISSING_BYTES = frozenset(text.encode() for text in MISSING)
BOM = b"\xef\xbb\xbf"
ID_NAMES = ("", "id", "index")
LABEL_NAMES = ("label", "click", "clicked", "target")
DELIMITER_WORDS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars", " ": "spaces"}


@dataclass(frozen=True)
class _FileLayout:
    """The layout of one file, and how it begins."""

    rows: RowLayout
    num_bytes: int
    """Bytes before the first row: byte order mark and header."""
    num_lines: int
    """Lines before the first row."""


class CriteoSource:
    """Reads Criteo-like files, as a `hotrow.data.chunk.Source`.

    paths: files, folders, patterns or URIs, read in this order (a folder's files in natural order). labels: "required",
    or "ignored" for rows to predict: a label may be absent or hold anything, and `Chunk.label` is None. values: "any",
    for rows to score: a value that is not a number is missing, and one that is not a category is unknown.
    skip_bad_rows: how many unreadable rows may be skipped, and counted in `skipped`, before one raises RowError.
    """

    name = "criteo"

    def __init__(
        self,
        paths: Sequence[str | Path | InputFile],
        *,
        labels: Literal["required", "ignored"] = "required",
        values: Literal["strict", "any"] = "strict",
        skip_bad_rows: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        if skip_bad_rows < 0:
            raise ValueError(f"skip_bad_rows is {skip_bad_rows}; it must be at least 0")
        self.files = find_files(paths, matches=lambda name: FILE_NAME.fullmatch(name) is not None, wanted=FILE_WORDS)
        self.skipped = SkippedRows()
        self.skip_bad_rows, self._labels, self._buffer_bytes = skip_bad_rows, labels, buffer_bytes
        self._values = values

    @property
    def key_kinds(self) -> dict[str, KeyKind]:
        return dict.fromkeys(CATEGORY_NAMES, "int")

    def scout(self) -> SourceInfo:
        rows = (estimate_lines(file) - layout.num_lines for file, layout in zip(self.files, self._layouts, strict=True))
        return SourceInfo(sum(rows), num_rows_exact=False, files=tuple(file.info for file in self.files))

    def chunks(
        self, start: Position | None = None, *, stop: int | None = None, rows_per_chunk: int = 65536, depth: int = 1
    ) -> Generator[Chunk, None, None]:
        """Yields chunks of exactly `rows_per_chunk` rows, except the last of each file, before the file `stop`.

        A thread parses the next `depth` chunks while the caller works; with 0 there is no thread.
        """
        start = start or Position()
        self.skipped = SkippedRows(start.num_skipped)
        chunks = self._read(start, stop, rows_per_chunk)
        return prefetch(chunks, depth=depth) if depth else chunks

    @cached_property
    def _layouts(self) -> list[_FileLayout]:
        layouts = [_find_layout(file, self._labels) for file in self.files]
        if self._labels == "ignored":
            return [replace(layout, rows=layout.rows.without_label()) for layout in layouts]
        return layouts

    def _read(self, start: Position, stop: int | None, rows_per_chunk: int) -> Generator[Chunk, None, None]:
        for index, _ in file_starts(start, len(self.files), stop):
            layout = self._layouts[index]
            position = start if index == start.file_index else Position(index)
            if position.offset == 0:
                position = replace(position, offset=layout.num_bytes, num_lines=layout.num_lines)
            yield from self._read_file(position, layout.rows, rows_per_chunk)

    def _read_file(self, start: Position, layout: RowLayout, rows_per_chunk: int) -> Iterator[Chunk]:
        file, line, row = self.files[start.file_index], start.num_lines, 0
        columns, mended = RowColumns.empty(layout, rows_per_chunk), list[tuple[int, int]]()
        with ByteStream(file, start.offset) as stream, _TwoParsers(layout, rows_per_chunk) as parse:
            for offset, text in _line_blocks(stream, self._buffer_bytes):
                if len(text) == 0:
                    reason = f"the line is longer than {self._buffer_bytes:,} bytes; check that the file is a click log"
                    raise RowError(file=file.name, line=line + 1, reason=reason)
                at = 0
                while at < len(text):
                    result = parse(text[at:], columns, first_row=row)
                    at, line, row = at + result.num_bytes, line + result.num_rows, row + result.num_rows
                    if result.fault is not None:
                        raw = _first_line(text[at:])
                        at, line = at + len(raw), line + 1
                        found = _mend(raw, layout, columns, row, lenient=self._values == "any")
                        if isinstance(found, list):
                            mended += [(row, column) for column in found]
                            row += 1
                        else:
                            self._skip(_row_error(file, line, raw, layout, found))
                    if row == rows_per_chunk:
                        end = min(offset + at, stream.offset)
                        after = Position(start.file_index, end, line, self.skipped.num_rows)
                        yield _chunk(columns, row, layout, after, mended)
                        columns, row, mended = RowColumns.empty(layout, rows_per_chunk), 0, []
        if row:
            after = Position(start.file_index + 1, num_skipped=self.skipped.num_rows)
            yield _chunk(columns, row, layout, after, mended)

    def _skip(self, error: RowError) -> None:
        """Counts a bad row, or raises its error if no more may be skipped."""
        if self.skipped.num_rows >= self.skip_bad_rows:
            if self.skip_bad_rows:
                raise error.but(
                    reason=f"{error.reason} ({self.skipped.num_rows} bad rows were skipped before, as many as "
                    f"--skip-bad-rows allows; the first: {self.skipped.examples[:1]})"
                )
            raise error
        self.skipped.add(error)


class _TwoParsers:
    """Parses whole lines, the second half of a large text on a thread beside: reading is faster than parsing."""

    def __init__(self, layout: RowLayout, num_rows: int) -> None:
        self._layout, self._num_rows, self._bytes_of_row = layout, num_rows, 1.0
        self._beside = ThreadPoolExecutor(1, "hotrow-parse") if num_rows >= BESIDE_ROWS and usable_cores() > 1 else None
        self._scratch = RowColumns.empty(layout, num_rows if self._beside else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.shutdown()

    def __call__(self, text: NDArray[np.uint8], columns: RowColumns, *, first_row: int) -> ParseResult:
        """What `parse_rows` returns. Nothing is parsed behind a first half that has a fault or does not fit."""
        place: dict[str, Any] = {"first_row": first_row, "num_rows": self._num_rows}
        half = len(text) // 2
        middle = half + 1 + text[half : half + HEAD_BYTES].tobytes().find(b"\n")
        fits = first_row + 1.05 * len(text) / self._bytes_of_row < self._num_rows
        if self._beside is None or not fits or middle == half:
            result = parse_rows(text, self._layout, columns, **place)
            self._bytes_of_row = max(result.num_bytes, 1) / max(result.num_rows, 1)
            return result
        given = text[middle:], self._layout, self._scratch
        later = self._beside.submit(parse_rows, *given, first_row=0, num_rows=self._num_rows)
        one, other = parse_rows(text[:middle], self._layout, columns, **place), later.result()
        if (
            one.fault is not None
            or one.num_bytes < middle
            or first_row + one.num_rows + other.num_rows > self._num_rows
        ):
            return one
        columns.put(first_row + one.num_rows, self._scratch, other.num_rows)
        return other._replace(num_rows=one.num_rows + other.num_rows, num_bytes=middle + other.num_bytes)


def _chunk(
    columns: RowColumns, num_rows: int, layout: RowLayout, position: Position, mended: Sequence[tuple[int, int]]
) -> Chunk:
    """Returns the first rows of `columns`. mended: rows and columns of values that could not be read."""
    unreadable = Counter(layout.column_names[column] for _, column in mended)
    keys = {}
    for c, name in enumerate(layout.category_names):
        valid = columns.valid[c, :num_rows]
        keys[name] = Keys(columns.keys[c, :num_rows], valid=None if valid.all() else valid)
    label = columns.label[:num_rows] if layout.has_label else None
    return Chunk(num_rows, label, columns.dense[:num_rows], keys, position, unreadable=unreadable)


def _mend(raw: bytes, layout: RowLayout, columns: RowColumns, row: int, *, lenient: bool) -> list[int] | ParseResult:
    """Parses a faulty line into row `row`, with values as `data/cells.py` reads them.

    lenient: values that cannot be read are empty. Returns their columns; what is wrong if the line cannot be mended, or
    if its label is wrong, or if it has another number of columns: then nobody can say which value is which.
    """
    fields, unreadable = raw.rstrip(b"\r\n").split(layout.delimiter.encode()), list[int]()
    first_category, mended = len(layout.column_names) - len(layout.category_names), set[int]()
    is_whole = len(fields) == len(layout.column_names)
    fields = [b"" if is_whole and field.strip() in MISSING_BYTES else field for field in fields]
    while True:
        text = np.frombuffer(layout.delimiter.encode().join(fields) + b"\n", np.uint8)
        result = parse_rows(text, layout, columns, first_row=row, num_rows=row + 1)
        if result.fault is None:
            return unreadable
        column = result.column
        if not is_whole or result.fault is Fault.LABEL or column in mended:
            return result
        mended.add(column)
        try:
            is_category = column >= first_category
            read = f"{integer_of(fields[column], 'hex'):x}" if is_category else repr(number_of(fields[column]))
        except UnreadableError:
            if not lenient:
                return result
            unreadable.append(column)
            read = ""
        fields[column] = read.encode()


def _line_blocks(stream: ByteStream, num_bytes: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields `(decompressed offset, text)`: whole lines, the text ends with a newline; the next text reuses the array.

    A line longer than num_bytes gives an empty text, which is the last.
    """
    buffer = bytearray(num_bytes + 1)  # one more for the newline that the last line may lack
    array, kept = np.frombuffer(buffer, np.uint8), 0
    while True:
        offset = stream.offset - kept
        filled = kept + stream.readinto(memoryview(buffer)[kept:num_bytes])
        if filled < num_bytes:  # the end of the file
            if filled and buffer[filled - 1] != 0x0A:
                buffer[filled] = 0x0A
                filled += 1
            if filled:
                yield offset, array[:filled]
            return
        end = buffer.rfind(b"\n", 0, filled) + 1
        yield offset, array[:end]
        if end == 0:
            return
        kept = filled - end
        buffer[:kept] = buffer[end:filled]


def _first_line(text: NDArray[np.uint8]) -> bytes:
    """Returns the first line of `text`, its newline included."""
    head = text[:4096].tobytes()
    return head[: head.index(b"\n") + 1] if b"\n" in head else text.tobytes().split(b"\n", 1)[0] + b"\n"


def _row_error(file: InputFile, line: int, raw: bytes, layout: RowLayout, found: ParseResult) -> RowError:
    """Returns the error of a faulty line; looks first at the number of columns, which explains every other fault."""
    raw, column = raw.rstrip(b"\r\n"), found.column
    names = layout.column_names
    fields = raw.split(layout.delimiter.encode())
    if len(fields) != len(names):
        return RowError(file=file.name, line=line, reason=_explain_columns(raw, layout.delimiter, (len(names),)))
    value = fields[column].decode(errors="replace")
    shown = repr(value if len(value) <= 40 else value[:40] + "...")
    reasons = {
        Fault.LABEL: f"label is {shown}; it must be 0 or 1",
        Fault.NOT_NUMBER: f"{shown} is not a number; it must be an integer or a finite decimal number, or empty",
        Fault.OVERFLOW: f"{shown} is too large; an integer must fit 64 bits, a decimal number 32-bit floating point",
        Fault.NOT_HEX: f"{shown} is not a category; it must be 1 to 8 hex digits, or empty",
        Fault.TOO_LONG: f"{shown} has more than 8 hex digits; a category has 1 to 8, or is empty",
        Fault.COLUMN_COUNT: "the line ends early",
    }
    cure = f"; correct the line, or {SKIP_CURE}"
    return RowError(
        file=file.name,
        line=line,
        column=column + 1,
        name=names[column],
        reason=reasons[found.fault or Fault.COLUMN_COUNT] + cure,
    )


def _explain_columns(raw: bytes, delimiter: str, wanted: Sequence[int]) -> str:
    """Returns what is wrong with a line that has the wrong number of columns."""
    if not raw:
        return f"the line is empty; delete it, or {SKIP_CURE}"
    numbers = " or ".join(str(number) for number in wanted)
    num_columns = raw.count(delimiter.encode()) + 1
    columns = "1 column" if num_columns == 1 else f"{num_columns} columns"
    reason = f"{columns} between {DELIMITER_WORDS[delimiter]} where {numbers} are expected"
    for other, word in DELIMITER_WORDS.items():
        if other != delimiter and raw.count(other.encode()) + 1 in wanted:
            reason += f"; between {word} there would be {raw.count(other.encode()) + 1}"
            reason += "" if other in "\t," else ": replace them by tabs or commas"
            return reason
    return (
        f"{reason} (label, I1 to I13, C1 to C26); correct the line, or, if all lines have other columns, prepare "
        "the file as csv with a schema"
    )


def _find_layout(file: InputFile, labels: Literal["required", "ignored"]) -> _FileLayout:
    """Returns the delimiter, header and columns that most of the file's first lines agree on.

    Raises ValueError for an empty file or other text, RowError if no line has a possible number of columns.
    """
    text, _ = file.read_head(HEAD_BYTES)
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{file.name}: the text is UTF-16; convert it to UTF-8")
    num_bytes = len(BOM) if text.startswith(BOM) else 0
    lines = text[num_bytes:].split(b"\n")
    if header := _read_header(file, lines[0].rstrip(b"\r")):
        num_bytes += len(lines[0]) + 1
    if len(text) < HEAD_BYTES and not text[num_bytes:].strip():
        raise ValueError(f"{file.name}: the file {'has a header and no rows' if header else 'is empty'}; expected rows")
    if header:
        if labels == "required" and not header.has_label:
            raise ValueError(f"{file.name}:1: the header has no label column; training needs one of {LABEL_NAMES}")
        return _FileLayout(header, num_bytes, 1)
    wanted = (NUM_FEATURES + 1,) if labels == "required" else (NUM_FEATURES + 1, NUM_FEATURES)
    sample = [line.rstrip(b"\r") for line in lines[:HEAD_LINES]]
    fits = Counter(
        (d, line.count(d.encode()) + 1) for line in sample for d in "\t," if line.count(d.encode()) + 1 in wanted
    )
    if not fits:
        delimiter = "," if sample[0].count(b",") > sample[0].count(b"\t") else "\t"
        raise RowError(file=file.name, line=1, reason=_explain_columns(sample[0], delimiter, wanted))
    (delimiter, num_columns), _ = fits.most_common(1)[0]
    rows = RowLayout(delimiter, (), num_columns > NUM_FEATURES, DENSE_NAMES, CATEGORY_NAMES)
    return _FileLayout(rows, num_bytes, 0)


def _read_header(file: InputFile, line: bytes) -> RowLayout | None:
    """Returns the layout that a header line gives; None if the line is a row."""
    delimiter = "\t" if b"\t" in line else ","
    names = [name.strip().strip('"').lower() for name in line.decode(errors="replace").split(delimiter)]
    has_id = names[0] in ID_NAMES and len(names) > NUM_FEATURES
    has_label = len(names) > has_id and names[has_id] in LABEL_NAMES
    features = names[has_id + has_label :]
    if len(features) != NUM_FEATURES or not all(re.match("[a-z_]", name) for name in features):
        return None
    expected = [name.lower() for name in DENSE_NAMES + CATEGORY_NAMES]
    if set(features) == set(expected) and features != expected:
        raise ValueError(
            f"{file.name}:1: the header's columns are in another order than I1 to I13, C1 to C26; reorder them"
        )
    return RowLayout(delimiter, ("id",) * has_id, has_label, DENSE_NAMES, CATEGORY_NAMES)

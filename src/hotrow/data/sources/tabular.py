"""Reads tables as streams of Arrow record batches: files of columns, delimited text files, frames in memory.

A reader knows its files and the type of each column, and yields the rows of a file from any row on. It does not know
what the columns mean; `columns.py` does.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from hotrow.data.cells import Column, column_of, in_arrow, is_text, value_type, without_views
from hotrow.data.chunk import FileInfo, RowError
from hotrow.data.sources.columnar import (
    COLUMNAR_SUFFIXES,
    ColumnarFile,
    ColumnarFormat,
    open_columnar,
    pieces_of,
    told_by_bytes,
)
from hotrow.data.sources.inputs import InputFile, prefetch
from hotrow.data.sources.schema import CsvSpec

TEXT_SUFFIXES = (".csv", ".tsv", ".txt", ".data", ".dat")
COMPRESSION_SUFFIX = re.compile(r"\.(gz|zst|bz2|lz4)$")
DELIMITERS = ",\t;|\x01"
SNIFF_BYTES = 1 << 16
ESTIMATE_BYTES = 1 << 20
CSV_BLOCK_BYTES = 4 << 20
LINE_END = re.compile(rb"\r\n|\n|\r(?!$)")
WHOLE = r"0|(?=.{1,18}$)-?[1-9][0-9]*"
"""An integer of 64 bits as a folder's name writes it."""
FRAME_NAME = "<frame>"
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one file."""

    batch: pa.RecordBatch
    lines: np.ndarray[Any, np.dtype[np.int64]]
    """[num_rows] 1-based number of each row in its file; in text the header counts (`TextReader.line_of`)."""
    end: int
    """Position after these rows: rows of the file consumed, bad lines included."""
    bad: tuple[RowError, ...] = ()
    """Lines before `end` that could not be split into columns."""
    mixed: Mapping[str, list[Any]] = field(default_factory=dict)
    """Columns of values of several types, as rows to score may have; `batch` has text for them."""


class TableReader:
    """Reads the files of one table. The methods with a body hold for files whose lines are found one by one."""

    files: tuple[FileInfo, ...]
    """The files as they are now."""
    schema: pa.Schema
    """Name and type of every column, partition columns included."""
    _files: Sequence[InputFile] = ()

    lacking: Mapping[str, Sequence[str]] = {}
    """Columns that some files lack, by file; they are missing in its rows."""

    def check_drift(self, columns: Sequence[str]) -> None:
        """Raises ValueError naming file and column if files have incompatible types for one of `columns`."""

    def line_of(self, file_index: int, record: int) -> int:
        """The line on which a record of a file begins; both count from 1."""
        return record

    def count_rows(self) -> tuple[int, bool]:
        """Returns the number of rows, and whether it is exact; else it is estimated from the first lines of files."""
        return sum(map(estimate_lines, self._files)), False

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        """Yields the rows of one file after position `first`, which counts bad ones too.

        Raises ValueError naming the file if it cannot be read.
        """
        raise NotImplementedError


def has_suffix(path: str, suffixes: Sequence[str]) -> bool:
    """Returns whether a file's name, without a compression suffix, ends in one of `suffixes`."""
    return COMPRESSION_SUFFIX.sub("", path.lower()).endswith(tuple(suffixes))


def columnar_format(file: InputFile) -> ColumnarFormat | None:
    """Decides by the suffix, else by the first bytes; None for files of text."""
    for kind, suffixes in COLUMNAR_SUFFIXES.items():
        if has_suffix(file.path, suffixes):
            return kind
    return None if has_suffix(file.path, TEXT_SUFFIXES) else told_by_bytes(file)


class FrameReader(TableReader):
    """Reads any frame in memory with Arrow's C stream (pandas, polars, pyarrow, duckdb relations).

    The frame is read once into an Arrow table, so that both passes see the same rows; without a copy if its layout
    allows. values: as for `frame_to_arrow`.
    """

    def __init__(self, frame: Any, *, values: Literal["strict", "any"] = "strict") -> None:
        found = frame if isinstance(frame, Mixed) else frame_to_arrow(frame, values=values)
        table = found.table if isinstance(found, Mixed) else found
        names = column_names(table.column_names)
        self.table, by_name = table.rename_columns(names), found.cells if isinstance(found, Mixed) else {}
        self._mixed = {new: by_name[old] for new, old in zip(names, table.column_names, strict=True) if old in by_name}
        self.schema = self.table.schema
        digest = 0
        for column in self.table.columns:
            for chunk in column.chunks:
                for buffer in chunk.buffers():
                    digest = digest if buffer is None else zlib.crc32(buffer, digest)
        # A frame has no modification time; a checksum of its bytes tells a resumed run that it is the same frame.
        self.files = (FileInfo(FRAME_NAME, self.table.nbytes, digest),)

    def count_rows(self) -> tuple[int, bool]:
        return self.table.num_rows, True

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        for batch in self.table.select(list(columns)).slice(first).to_batches(max_chunksize=rows_per_batch):
            end = first + len(batch)
            mixed = {name: own[first:end] for name, own in self._mixed.items() if name in columns}
            yield Rows(batch, np.arange(first + 1, end + 1), end, mixed=mixed)
            first = end


@dataclass(frozen=True)
class Mixed:
    """A frame with columns of values of several types, by name; `table` has text for them."""

    table: pa.Table
    cells: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(self.table)

    def slice(self, first: int, num_rows: int) -> Mixed:
        cells = {name: own[first : first + num_rows] for name, own in self.cells.items()}
        return Mixed(self.table.slice(first, num_rows), cells)

    @staticmethod
    def of(columns: Mapping[str, Column]) -> Mixed:
        cells = {name: own for name, own in columns.items() if isinstance(own, list)}
        return Mixed(pa.table({name: in_arrow(own) for name, own in columns.items()}), cells)


def frame_to_arrow(frame: Any, *, values: Literal["strict", "any"] = "strict") -> pa.Table | Mixed:
    """Returns `frame` as an Arrow table. Raises ValueError for objects without Arrow data and for one-shot readers.

    frame: an Arrow-capable frame, a polars LazyFrame, a mapping of columns, or a list of mappings, one for each row.
    values: "any": its columns may hold Python objects of several types, as rows to score.
    """
    if isinstance(frame, Mixed):
        return frame
    if isinstance(frame, list) and frame and all(isinstance(row, Mapping) for row in frame):
        names = dict.fromkeys(name for row in frame for name in row)
        frame = {name: [row.get(name) for row in frame] for name in names}
    is_any = values == "any" and (isinstance(frame, Mapping) or _is_pandas(frame))
    try:
        if is_any:
            return Mixed.of({str(name): column_of(frame[name]) for name in frame})
        table = _to_table(frame)
        return pa.table([*map(without_views, table.columns)], names=table.column_names)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        # pandas passes on columns of Python objects, which may be of several types; Arrow then names the column.
        text = "; ".join(str(argument) for argument in error.args)
        raise ValueError(f"{type(frame).__name__} cannot be read as an Arrow table: {text}; convert it first") from None


def _is_pandas(frame: Any) -> bool:
    return type(frame).__module__.partition(".")[0] == "pandas"


def _to_table(frame: Any) -> pa.Table:
    if isinstance(frame, pa.RecordBatchReader):
        raise ValueError("a RecordBatchReader can be read once, preparation reads twice; pass reader.read_all()")
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, Mapping):
        return pa.table(dict(frame))
    if type(frame).__module__.startswith("polars.") and hasattr(frame, "collect"):
        frame = frame.collect()
    if _is_pandas(frame) and hasattr(frame, "columns"):
        return pa.Table.from_pandas(frame, preserve_index=False)  # its own stream has the index as a column
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(frame).read_all()
    for method in ("to_arrow_table", "to_arrow", "arrow"):
        if hasattr(frame, method):
            found = getattr(frame, method)()
            # duckdb's results give a reader; its relations have Arrow's C stream.
            return found.read_all() if isinstance(found, pa.RecordBatchReader) else pa.table(found)
    cure = "pass paths, a pandas, polars, duckdb or pyarrow table, a dict of columns or a list of dicts"
    if hasattr(frame, "collect"):
        cure = "it is not computed yet: pass what its collect() returns"
    raise ValueError(f"{type(frame).__name__} is not a path and not an Arrow-capable frame; {cure}")


class ColumnarReader(TableReader):
    """Reads Parquet, Feather or ORC files that share a schema, with hive partition columns from their folders."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self.files = tuple(f.info for f in files)
        self._partition_types = partition_types(files)
        self.schema, self.lacking = united([self._file_schema(i) for i in range(len(files))], self.files)

    def _opened(self, file_index: int) -> ColumnarFile:
        file = self._files[file_index]
        with naming(file):
            opened = open_columnar(file)
            names = opened.schema.names
        if len(set(names)) < len(names):
            again = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{file.name}: two columns are called {again!r}; rename one of them")
        return opened

    def _file_schema(self, file_index: int) -> pa.Schema:
        schema = self._opened(file_index).schema
        for name, kind in self._partition_types.items():
            if name not in schema.names:
                schema = schema.append(pa.field(name, kind))
        return schema

    def check_drift(self, columns: Sequence[str]) -> None:
        for index in range(len(self._files)):
            schema = self._file_schema(index)
            for name in schema.names:
                if name not in columns:
                    continue
                path = self.files[index].path
                got, want = schema.field(name).type, self.schema.field(name).type
                wider = pa.types.is_integer(want) and pa.types.is_floating(got)
                if pa.types.is_null(want) or wider:  # null: no value so far, the next file decides
                    self.schema = self.schema.set(self.schema.get_field_index(name), schema.field(name))
                elif not _same_meaning(got, want):
                    first = next(own.path for own in self.files if name not in self.lacking.get(own.path, ()))
                    raise ValueError(f"{path}: column {name!r} has type {got}, {first} has {want}; rewrite one")

    def count_rows(self) -> tuple[int, bool]:
        """Returns the exact number of rows, from the files' footers."""
        return sum(sum(self._opened(i).sizes) for i in range(len(self._files))), True

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        """Yields the rows of one file after position `first`."""
        file, opened = self._files[file_index], self._opened(file_index)
        with naming(file):
            sizes = opened.sizes
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        group = int(np.searchsorted(starts, first, side="right")) - 1
        row = int(starts[min(group, len(sizes))])
        stored = [c for c in columns if c in opened.schema.names]
        with naming(file):
            for batch in prefetch(pieces_of(opened, group, stored)):
                kinds = {name: self.schema.field(name).type for name in columns} | self._partition_types
                batch = self._as_in_others(with_partition(batch, file, columns, kinds))
                for start in range(max(0, first - row), len(batch), rows_per_batch):
                    part = batch.slice(start, rows_per_batch)
                    end = row + start + len(part)
                    yield Rows(part, np.arange(end - len(part) + 1, end + 1), end)
                row += len(batch)

    def _as_in_others(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns rows with integers as floats if another file has floats, and an integer is exact as one.

        pandas writes a column of integers with gaps as floats. A time is in seconds then, in every file.
        """
        for index, own in enumerate(batch.schema):
            kind = self.schema.field(own.name).type
            if pa.types.is_integer(own.type) and pa.types.is_floating(kind):
                with suppress(pa.ArrowInvalid):  # an id above 2^53 stays as it is
                    batch = batch.set_column(index, own.name, batch.column(index).cast(pa.float64()))
        return batch


def united(schemas: Sequence[pa.Schema], files: Sequence[FileInfo]) -> tuple[pa.Schema, dict[str, list[str]]]:
    """The columns of all files, by first appearance, in the type of the first file; and those that a file lacks."""
    kinds = {field.name: field.type for schema in reversed(schemas) for field in schema}
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    of_files = [(info.path, {*schema.names}) for info, schema in zip(files, schemas, strict=True)]
    lacking = {path: [name for name in names if name not in has] for path, has in of_files if names.keys() - has}
    return pa.schema([(name, kinds[name]) for name in names]), lacking


def partition_types(files: Sequence[InputFile]) -> dict[str, pa.DataType]:
    """Returns the type of each partition column: integers if every folder's value is one, else text."""
    values: dict[str, list[str]] = {}
    for file in files:
        for name, value in file.partition:
            values.setdefault(name, [])
            if value is not None:
                values[name].append(value)
    whole = {name: bool(own) and all(re.fullmatch(WHOLE, text) for text in own) for name, own in values.items()}
    return {name: pa.int64() if is_whole else pa.string() for name, is_whole in whole.items()}


def with_partition(
    batch: pa.RecordBatch, file: InputFile, columns: Sequence[str], types: dict[str, pa.DataType]
) -> pa.RecordBatch:
    """Returns `columns` of a file; columns that are not in `batch` get the values of its folders, or are missing."""
    values = dict(file.partition)
    places = {name: place for place, name in enumerate(batch.schema.names)}
    arrays = []
    for name in columns:
        if name in places:
            arrays.append(without_views(batch.column(places[name])))
        else:
            arrays.append(pa.repeat(pa.scalar(values.get(name)).cast(types.get(name, pa.string())), len(batch)))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _same_meaning(got: pa.DataType, want: pa.DataType) -> bool:
    """Returns whether ids of both types are comparable: equal types, signed integers of any width, integers beside
    floats (pandas writes integers with gaps so), or any text. A column without a value fits any."""
    got, want = value_type(got), value_type(want)
    signed = pa.types.is_signed_integer(got) and pa.types.is_signed_integer(want)
    numbers = pa.types.is_floating(want) and (pa.types.is_integer(got) or pa.types.is_floating(got))
    return bool(got == want or signed or numbers or pa.types.is_null(got) or (is_text(got) and is_text(want)))


class TextReader(TableReader):
    """Reads delimited text, every column as text, with hive partition columns from the files' folders.

    Columns are found by the header of each file, without blanks around its names (`column_names`), or by given names.
    """

    def __init__(self, files: Sequence[InputFile], spec: CsvSpec) -> None:
        self._files, self._spec = files, spec
        self.files = tuple(f.info for f in files)
        self._heads: dict[int, _Head] = {}
        self.header_lines = int(spec.column_names is None)
        self.delimiter, _, self.names = self._head(0)
        """`names`: the columns in the first file's lines, without partition columns."""
        heads = [pa.schema([(name, pa.string()) for name in self._head(i).names]) for i in range(len(files))]
        self.schema, self.lacking = united(heads, self.files)
        partition = (name for name in partition_types(files) if name not in self.schema.names)
        self._partition_types = dict.fromkeys(partition, pa.string())
        for name in self._partition_types:
            self.schema = self.schema.append(pa.field(name, pa.string()))

    def _head(self, file_index: int) -> _Head:
        """Returns the delimiter and the names in the first line of one file."""
        if file_index not in self._heads:
            lines = self._first_lines(file_index)
            delimiter = self._spec.delimiter or guess_delimiter(lines)
            if self._spec.column_names is not None:
                self._heads[file_index] = _Head(delimiter, [], list(self._spec.column_names))
            else:
                stored = self._split(lines, delimiter, 1)[0]
                self._heads[file_index] = _Head(delimiter, stored, column_names(stored))
        return self._heads[file_index]

    def renamed(self) -> dict[str, str]:
        """Returns new and old name of each column of the first file that repeats an earlier column's name."""
        _, stored, names = self._head(0)
        changed = zip(names, stored, strict=False)
        return {name: old for name, old in changed if name.strip() != old.strip()}

    def first_records(self) -> list[list[str]]:
        """Returns the fields of the first file's first lines, its header included."""
        return self._split(self._first_lines(0), self._head(0).delimiter, 100)

    def _split(self, lines: Sequence[str], delimiter: str, num_records: int) -> list[list[str]]:
        """Returns the fields of the first records."""
        try:
            return list(islice(csv.reader(lines, delimiter=delimiter), num_records))
        except csv.Error as error:
            raise ValueError(
                f"{self.files[0].path}: its first lines cannot be cut at {delimiter!r} ({error}); set csv.delimiter"
            ) from None

    def _first_lines(self, file_index: int) -> list[str]:
        """Returns the first lines of a file: of 64 KiB, or of as much as holds two lines."""
        file, raw = self._files[file_index], b""
        with naming(file), file.open_stream() as stream:
            while is_cut := (more := stream.read(max(SNIFF_BYTES, len(raw)))) != b"":
                raw += more
                if len(LINE_END.findall(raw)) > 1 or len(raw) > 2 * CSV_BLOCK_BYTES:
                    break
        # The sample may cut a character or line in two: only whole lines count.
        whole = raw[: max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1] if is_cut and len(raw) >= SNIFF_BYTES else raw
        if raw.startswith(b"PK\x03\x04"):
            raise ValueError(f"{file.name} is a zip archive; unpack it, or pack it with gzip or zstd instead")
        try:
            text = whole.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _not_utf8(file.name, error.start, count_lines(raw[: error.start])) from None
        lines = [line for line in io.StringIO(text, newline="") if line.strip("\r\n")]
        if not lines and not raw:
            raise ValueError(f"{file.name} is empty: it has no byte; write it again, or leave it out")
        if not lines:
            cure = "no row in it" if len(raw) < CSV_BLOCK_BYTES else "a line longer than 4 MiB; write lines of rows"
            raise ValueError(f"{file.name}: the first {len(raw):,} bytes have {cure}")
        return lines

    def check_drift(self, columns: Sequence[str]) -> None:
        """Raises ValueError naming the first file and a column that no file's header has."""
        found = {name for index in range(len(self.files)) for name in self._head(index).names}
        for name in columns:
            if name not in found and name not in self._partition_types:
                raise ValueError(
                    f"{self.files[0].path}: the header, split at {self.delimiter!r}, lacks column {name!r}; columns "
                    f"found: {', '.join(self.names[:20])}; set csv.delimiter or csv.column_names if this split is wrong"
                )

    def count_rows(self) -> tuple[int, bool]:
        """Estimates the number from the first lines of each file and its stored size, without headers."""
        return sum(max(0, estimate_lines(file) - self.header_lines) for file in self._files), False

    def read_all(self, file_index: int) -> Iterator[Rows]:
        """Yields the rows of one file with all columns that it has."""
        return self.read(file_index, 0, [*self._head(file_index).names, *self._partition_types], ROWS_AT_ONCE)

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        """Yields the rows of one file after position `first`, which counts lines after the header."""
        file = self._files[file_index]
        header_lines = self.header_lines
        places = _LinePlaces(file.name, header_lines)
        with naming(file), file.open_stream() as stream:
            for block in self._blocks(stream, file_index, columns, places):
                lines = places.lines_of(len(block))
                keep = int(np.searchsorted(lines, first + header_lines, side="right"))
                block, lines = with_partition(block, file, columns, self._partition_types).slice(keep), lines[keep:]
                for start in range(0, len(block), rows_per_batch):
                    part = lines[start : start + rows_per_batch]
                    bad = places.take_bad(int(part[-1]), after=first + header_lines)
                    yield Rows(block.slice(start, rows_per_batch), part, int(part[-1]) - header_lines, bad)
            if bad := places.take_bad(None, after=first + header_lines):
                nothing = pa.RecordBatch.from_pylist([], pa.schema([(name, pa.string()) for name in columns]))
                yield Rows(nothing, np.arange(0), bad[-1].line - header_lines, bad)

    def line_of(self, file_index: int, record: int) -> int:
        """Returns the line on which a record of a file begins; both count from 1, the header included.

        The two differ after blank lines, which Arrow skips, and newlines in quotes. Reads the file up to there.
        """
        delimiter, file = self._head(file_index).delimiter, self._files[file_index]
        with naming(file), file.open_stream() as stream:
            records = csv.reader(
                io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline=""), delimiter=delimiter
            )
            num_records, line = 0, 1
            with suppress(csv.Error):  # a value is longer than Python's limit: then only the record's number is known
                for fields in records:
                    num_records += bool(fields)
                    if num_records == record:
                        return line
                    line = records.line_num + 1
        return record

    def _blocks(
        self, stream: Any, file_index: int, columns: Sequence[str], places: _LinePlaces
    ) -> Iterator[pa.RecordBatch]:
        """Yields a file as Arrow splits it, notes bad lines in `places`, and ends only when Arrow's thread has ended.

        That thread drops the reader, with file and callback, after its last read. This may be later than the caller,
        who may have stopped early; if Python were shutting down by then, the process would abort.
        """
        name, (delimiter, _, names) = self._files[file_index].name, self._head(file_index)
        # A line that no file has, with a wrong number of columns, so that Arrow reports it as a bad line.
        text = _CheckedText(name, stream, end="\x04end of text\x04" + delimiter * int(len(names) == 1))

        def on_bad_line(row: Any, text: _CheckedText = text) -> str:
            return "skip" if text.ends_with(row.text) else places.collect(row)

        dropped = threading.Event(), threading.Event()
        weakref.finalize(on_bad_line, dropped[0].set).atexit = False
        weakref.finalize(text, dropped[1].set).atexit = False
        try:
            try:
                yield from pa.csv.open_csv(text, **self._csv_options(file_index, columns, on_bad_line))
            except pa.ArrowException:
                if text.fault is None:  # else Arrow complains only of a file that ends early
                    raise
            fault, is_whole = text.fault, text.is_whole
        finally:
            del on_bad_line, text
            for event in dropped:
                event.wait()
        if fault is not None:
            raise fault
        if not is_whole:
            line = self.line_of(file_index, places.num_records)
            raise ValueError(f"{name}:{line}: a quote opens here and is never closed; correct it")

    def _csv_options(self, file_index: int, columns: Sequence[str], on_bad_line: Any) -> dict[str, Any]:
        delimiter, header, names = self._head(file_index)
        renamed = bool(header) and names != header
        # For Arrow an empty list means all columns; to count rows, one column is read.
        has = {*names}
        stored = [name for name in columns if name in has] or names[:1]
        return {
            # Only with one thread does Arrow say which line is bad; preparation reads in the background anyway.
            "read_options": pa.csv.ReadOptions(
                use_threads=False,
                block_size=CSV_BLOCK_BYTES,
                column_names=names if renamed or not header else None,
                skip_rows_after_names=int(renamed),
            ),
            "parse_options": pa.csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=on_bad_line
            ),
            "convert_options": pa.csv.ConvertOptions(
                column_types=dict.fromkeys(stored, pa.string()),
                include_columns=stored,
                null_values=list(self._spec.null_values),
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        }


class _Head(NamedTuple):
    """What the first line of a text file says."""

    delimiter: str
    stored: list[str]
    """Names as they are stored; none if the file has no header."""
    names: list[str]
    """Names as columns are known by."""


class _CheckedText(io.RawIOBase):
    """The bytes of a text file for Arrow, up to the first that are not UTF-8; the line `end` follows the last byte.

    Arrow itself prints a traceback if a bad line is not UTF-8, and takes the rest of a file for one value if a quote is
    never closed; it then does not report the line `end`.
    """

    def __init__(self, name: str, stream: Any, *, end: str) -> None:
        self._name, self._stream, self._end = name, stream, end
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes, self._num_lines, self._last = 0, 0, b"\n"
        self._is_over = False
        self.is_whole = False
        """Whether Arrow found the line `end` outside quotes."""
        self.fault: Exception | None = None
        """The reason why the file ends early."""

    def readable(self) -> bool:
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        """Returns the next bytes; an error waits in `fault`, because its traceback would keep this object alive."""
        if self._is_over:
            return b""
        text = b""
        try:
            text = self._stream.read(num_bytes)
            self._decoder.decode(text, not text)
        except UnicodeDecodeError as error:
            at = error.start - len(error.object) + len(text)
            self.fault = _not_utf8(self._name, self._num_bytes + at, self._num_lines + count_lines(text[: max(at, 0)]))
        except Exception as error:  # the caller raises it, whatever it is
            self.fault = error.with_traceback(None)
        self._is_over = not text or self.fault is not None
        if self.fault is not None:
            return b""
        if not text:
            return (b"" if self._last in (b"\n", b"\r") else b"\n") + self._end.encode()
        self._num_bytes += len(text)
        self._num_lines += count_lines(text)
        self._last = text[-1:]
        return text

    def ends_with(self, line: str) -> bool:
        """Returns whether a bad line is the line `end`, or bad only because the file ends early."""
        self.is_whole |= self._is_over and line == self._end
        return self.fault is not None or self.is_whole


def _not_utf8(name: str, byte: int, lines_before: int) -> ValueError:
    return ValueError(f"{name}:{lines_before + 1}: byte {byte} is not UTF-8; convert it (iconv -t UTF-8)")


class _LinePlaces:
    """Record numbers of the rows that Arrow yields, and errors of lines that it could not split into columns."""

    def __init__(self, path: str, header_lines: int) -> None:
        self._path, self._header_lines = path, header_lines
        self._rows_before: list[int] = []
        self._bad: list[RowError] = []
        self._num_taken = self._num_rows = 0

    @property
    def num_records(self) -> int:
        """Number of records so far: header, rows and bad lines."""
        return self._header_lines + self._num_rows + len(self._bad)

    def collect(self, row: Any) -> str:
        """Notes a line with the wrong number of columns and lets Arrow continue."""
        text = row.text if len(row.text) <= 60 else row.text[:57] + "..."
        many = "few" if row.actual_columns < row.expected_columns else "many"
        counts = f"{row.actual_columns} instead of {row.expected_columns}"
        reason = f"too {many} columns, {counts}, in {text!r}; correct or remove the line"
        # Rows before the k-th bad line: its number minus header, itself and the bad lines before it.
        self._rows_before.append(row.number - self._header_lines - 1 - len(self._bad))
        self._bad.append(RowError(file=self._path, line=row.number, reason=reason))
        return "skip"

    def lines_of(self, num_rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the lines of the next `num_rows` rows."""
        rows = np.arange(self._num_rows, self._num_rows + num_rows)
        self._num_rows += num_rows
        return rows + 1 + self._header_lines + np.searchsorted(np.array(self._rows_before), rows, side="right")

    def take_bad(self, last_line: int | None, *, after: int) -> tuple[RowError, ...]:
        """Returns errors not taken yet, of lines after `after` up to `last_line`; if None, to the end."""
        start = self._num_taken
        while self._num_taken < len(self._bad) and (last_line is None or self._bad[self._num_taken].line <= last_line):
            self._num_taken += 1
        return tuple(error for error in self._bad[start : self._num_taken] if error.line > after)


def column_names(stored: Sequence[str]) -> list[str]:
    """The names of a header's columns: distinct, and without blanks around them if no two become equal."""
    trimmed = [name.strip() for name in stored]
    return distinct_names(trimmed if len({*trimmed}) == len({*stored}) else stored)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Returns `names`; a repeated name becomes "name (2)", "name (3)" and so on, whichever is free."""
    given, found = set(names), dict.fromkeys(names, 1)
    result: list[str] = []
    taken: set[str] = set()
    for name in names:
        free = name
        while free in taken or (free != name and free in given):
            found[name] += 1
            free = f"{name} ({found[name]})"
        taken.add(free)
        result.append(free)
    return result


def guess_delimiter(lines: Sequence[str]) -> str:
    """Returns the delimiter that splits most of the first lines into the same number of columns, more than one.

    If none does, there is a single column, and the delimiter is a comma.
    """
    best, best_score = ",", (0, 0)
    for delimiter in DELIMITERS:
        try:
            widths = [len(row) for row in csv.reader(lines[:100], delimiter=delimiter)]
        except csv.Error:  # a value is longer than Python's limit: not the delimiter of these lines
            continue
        common = max(set(widths), key=widths.count)
        score = (widths.count(common), common)
        if common > 1 and score > best_score:
            best, best_score = delimiter, score
    return best


def count_lines(text: bytes) -> int:
    """Returns how many lines end in `text`, by newlines, or by carriage returns if there is no newline."""
    return text.count(b"\n") or text.count(b"\r")


def estimate_lines(file: InputFile) -> int:
    """Estimates a file's lines from its beginning and its stored size; exact if the beginning is the whole file."""
    if "lines" not in file.known:
        with naming(file):
            text, stored_bytes = file.read_head(ESTIMATE_BYTES)
        num_lines = count_lines(text)
        if len(text) < ESTIMATE_BYTES:
            file.known["lines"] = num_lines + (bool(text) and not text.endswith((b"\n", b"\r")))
        else:
            file.known["lines"] = int(num_lines * file.info.num_bytes / stored_bytes)
    return file.known["lines"]


@contextmanager
def naming(file: InputFile) -> Iterator[None]:
    """Turns Arrow's errors into ValueErrors that name the file and the cure."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        text = " ".join(str(error).split())
        cures = {
            "Truncated compressed stream": "the file is cut short; fetch it again",
            "UTF8": "write it again with text in UTF-8",
            "once it is decoded": "if you trust it, write it again without compression, or as CSV",
            "straddling": f"a line is longer than {CSV_BLOCK_BYTES >> 20} MiB or a quote is never closed; correct it",
            "cannot infer number of columns": "the header is empty, or a quote in it is never closed; correct it",
            "Parquet magic bytes not found": "the file is cut short or is not a Parquet file; write it again",
            "Not an Arrow file": "the file is cut short; write it again",
            "ORC postscript": "the file is cut short; write it again",
        }
        cure = next((cure for sign, cure in cures.items() if sign in text), "check the file")
        raise ValueError(f"{file.name}: {text}; {cure}") from None

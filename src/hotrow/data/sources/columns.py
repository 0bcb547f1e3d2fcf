"""Any table as a source: CSV, Parquet, JSON Lines, hive folders, URIs and frames in memory, read by a schema.

`ColumnsSource` makes chunks with a reader (`tabular.py`: rows of files) and converters (`data/cells.py`: exact values
or faults). The published layouts (`registry.py`) are this class with their own schemas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.base.records import nearest
from hotrow.data.cells import (
    NO_NUMBER,
    PLAIN,
    Column,
    Fault,
    IdEncoding,
    TimeReader,
    as_seconds,
    check_number,
    fault_of,
    is_text,
    numbers,
    on_clock,
    to_label,
    to_weight,
    without_missing,
)
from hotrow.data.chunk import (
    SKIP_CURE,
    Chunk,
    KeyKind,
    Keys,
    OddCells,
    Position,
    RowError,
    SkippedRows,
    SourceInfo,
    file_starts,
    most_odd,
    some_keys,
)
from hotrow.data.coded import (
    CodedKeys,
    DictionaryReader,
    KeyColumns,
    check_shape,
    default_encoding,
    key_hashes,
    kind_of,
    to_keys,
)
from hotrow.data.sources.columnar import COLUMNAR_SUFFIXES, ColumnarFormat
from hotrow.data.sources.inputs import InputFile, find_files, prefetch
from hotrow.data.sources.jsonlines import SUFFIXES as JSON_SUFFIXES
from hotrow.data.sources.jsonlines import JsonReader, is_json_lines
from hotrow.data.sources.kept import KeptReader
from hotrow.data.sources.schema import CsvSpec, Schema
from hotrow.data.sources.tabular import (
    TEXT_SUFFIXES,
    ColumnarReader,
    FrameReader,
    Rows,
    TableReader,
    TextReader,
    columnar_format,
    has_suffix,
)

FileFormat: TypeAlias = ColumnarFormat | Literal["jsonl", "csv"]

SUFFIXES_OF_KINDS = (*COLUMNAR_SUFFIXES.values(), TEXT_SUFFIXES, JSON_SUFFIXES)
"""If a folder has files of several kinds, the first of these kinds is taken."""
SUFFIXES = tuple(suffix for suffixes in SUFFIXES_OF_KINDS for suffix in suffixes)
FIRST_ROWS = 1024
"""The number of rows that show how times are written."""
MANY_ROWS = 1000
"""If text has fewer rows than this, their estimated number is nearly exact."""


class ColumnsSource:
    """Rows of any table, as `schema` reads them.

    data: a path, URI, glob or folder, several of them, or one Arrow-capable frame. labels: "required"; "alone":
    read with the weight and without the time; "ignored": for rows to predict, whose label, weight and time may be
    absent or hold anything. encodings: how ids were held when a data set was prepared (feature -> `IdEncoding`); if
    None, the columns' types decide. values: "any": a value that is not of its column's kind is missing, not a fault,
    for rows to score. skip_bad_rows: how many bad rows may be skipped before one is an error. keep: columns of rows to
    score that chunks also hold unchanged.

    Raises ValueError naming file and column if a column is missing, differs between files or has a type that does not
    fit its use.
    """

    def __init__(
        self,
        data: Any,
        schema: Schema,
        *,
        name: str = "columns",
        labels: Literal["required", "alone", "ignored"] = "required",
        encodings: Mapping[str, IdEncoding] | None = None,
        values: Literal["strict", "any"] = "strict",
        skip_bad_rows: int = 0,
        keep: Sequence[str] = (),
        reader: TableReader | None = None,
    ) -> None:
        self.name, self.schema, self._values = name, schema, values
        self.skipped = SkippedRows()
        self.skip_bad_rows = skip_bad_rows
        self._share = schema.odd_share if labels == "required" and not skip_bad_rows else 0.0
        """Share of a column's cells that may be odd; bad rows that may be skipped take their place."""
        self._num_odd = Counter[str]()
        # In what is kept an empty text alone is missing: "NA" may be Namibia.
        spec = schema.csv.model_copy(update={"null_values": ("",)}) if keep else schema.csv
        self._reader = reader or open_table(data, spec, values=values)
        # Text whose nulls the reader has made is looked at again only if it holds what is no number.
        is_read = isinstance(self._reader, TextReader | KeptReader) and not keep
        self._is_quick = is_read and not any(character.isdigit() for text in schema.missing for character in text)
        self._has_label = labels in ("required", "alone")
        self._has_time = schema.time is not None and labels == "required"
        self._constants = schema.at_serving if labels == "ignored" else {}
        self._computed = schema.computed
        if labels == "required" and (double := sorted({*self._computed} & {*self._reader.schema.names})):
            # Rows to score may have such a column, as a file of earlier scores has; it is not read.
            path = self._reader.files[0].path
            raise ValueError(f"{path}: column {double[0]!r} is also the `into` of a transform; rename one of them")
        self._columns, self._keep = self._wanted_columns(), tuple(keep)
        if absent := [name for name in keep if name not in self.column_names]:
            raise ValueError(f"column {absent[0]!r} to keep is not there; columns: {', '.join(self.column_names)}")
        self._reader.check_drift(self._columns + self._keep)
        types = {n: self._reader.schema.field(n).type for n in self._columns}
        types |= {name: pa.scalar(value).type for name, value in self._constants.items()}
        for name, (made, inputs) in self._computed.items():
            types[name] = {"number": pa.float64(), "id": pa.int64()}.get(made.makes) or types[inputs[0]]
        self._written = {spec.column: spec for spec in schema.dense}
        self._id_columns = {feature.column: feature for feature in schema.id_columns}
        cuts = {feature.column: feature.cut() for feature in schema.categorical}
        self._cuts = {name: cut for name, cut in cuts.items() if cut is not None}
        if values == "strict" or encodings is None:
            found = dict[str, IdEncoding]()
            for name, feature in self._id_columns.items():
                with self._naming(0):
                    found[name] = default_encoding(pa.float64() if name in self._cuts else types[name], feature)
        self.encodings: dict[str, IdEncoding] = dict(encodings or found)
        with self._naming(0):
            self._check_compared()

    @cached_property
    def key_kinds(self) -> Mapping[str, KeyKind]:
        return {name: kind_of(encoding) for name, encoding in self.encodings.items()}

    @property
    def files(self) -> Sequence[InputFile]:
        """The files that are read; none for a frame."""
        return self._reader._files

    @property
    def column_names(self) -> tuple[str, ...]:
        """All columns of the data, used or not."""
        return tuple(self._reader.schema.names)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found out rather than given, for the user to check."""
        path, reader = self._reader.files[0].path, getattr(self._reader, "inner", self._reader)
        lacking = {file: [n for n in names if n in self._columns] for file, names in self._reader.lacking.items()}
        found = [f"{file} lacks {', '.join(names)}: missing in its rows" for file, names in lacking.items() if names]
        if len(found) > 3:
            found = [*found[:3], f"{len(found) - 3:,} more files lack columns"]
        if not isinstance(reader, TextReader):
            return tuple(found)
        found += [
            f"{path}: the header names column {stored!r} more than once; this one is called {name!r} here"
            for name, stored in reader.renamed().items()
        ]
        if self.schema.csv.delimiter is None:
            found.append(f"columns are cut at {reader.delimiter!r} (found in {path})")
        return tuple(found)

    def scout(self) -> SourceInfo:
        return SourceInfo(*self._reader.count_rows(), self._reader.files)

    @contextmanager
    def _naming(self, file_index: int) -> Iterator[None]:
        """Puts the name of a file before a converter's message about a column."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self._reader.files[file_index].path}: {error}") from None

    def chunks(
        self, start: Position | None = None, *, stop: int | None = None, rows_per_chunk: int = 65536
    ) -> Generator[Chunk, None, None]:
        """Yields chunks of at most `rows_per_chunk` rows from `start` on, before the file `stop`; a chunk never spans
        files."""
        start = start or Position()
        self.skipped, self._num_odd = SkippedRows(start.num_skipped), Counter()
        chunks, reader = self._read(start, stop, rows_per_chunk), self._reader
        # The one chunk of a small frame has nothing to be read beside.
        is_one = isinstance(reader, FrameReader) and reader.table.num_rows <= rows_per_chunk
        return chunks if is_one else prefetch(chunks)

    def _read(self, start: Position, stop: int | None, rows_per_chunk: int) -> Generator[Chunk, None, None]:
        for file_index, first in file_starts(start, len(self._reader.files), stop):
            dictionaries = DictionaryReader(self.schema.missing)
            columns = tuple(dict.fromkeys(self._columns + self._keep))
            for rows in self._reader.read(file_index, first, columns, rows_per_chunk):
                if start == Position() and self._has_time and rows_per_chunk >= FIRST_ROWS and rows.batch.num_rows:
                    self._keep_first_times(rows.batch)
                yield self._convert(file_index, rows, dictionaries)

    def _keep_first_times(self, batch: pa.RecordBatch) -> None:
        """Takes the first times from the first rows, so that the file is not opened for them."""
        assert self.schema.time is not None, "it has a time"
        if "_first_times" not in self.__dict__:
            column = self._columns.index(self.schema.time.column)
            self._first_times = self._cells(batch.column(column).slice(0, FIRST_ROWS))

    def _wanted_columns(self) -> tuple[str, ...]:
        """Returns the columns to read. Raises ValueError naming one that no file has, and the nearest name."""
        absent = set[str]()
        if not self._has_label:
            absent |= {*self.schema.label_names, *self.schema.weight_names}
        if self.schema.time is not None and not self._has_time:
            absent.add(self.schema.time.column)
        absent = absent.difference(self.schema.input_names) | {*self._constants}
        wanted = [c for c in self.schema.column_names if c not in absent]
        there = wanted if isinstance(self._reader, TextReader) else self._reader.schema.names
        if unknown := [column for column in wanted if column not in there]:
            path, name = self._reader.files[0].path, unknown[0]
            raise ValueError(f"{path}: no column {name!r}{nearest(name, there)}; columns: {', '.join(there)}")
        return tuple(wanted)

    def _check_compared(self) -> None:
        """Raises ValueError if a transform compares ids of a list with ids that are read in another way."""
        for name, (transform, inputs) in self._computed.items():
            kinds = {column: kind_of(self.encodings[column]) for column in inputs if column in self.encodings}
            if "list" in transform.takes(len(inputs)) and len({*kinds.values()}) > 1:
                read = ", ".join(
                    f"{column!r} as {'text' if kind == 'bytes' else 'integers'}" for column, kind in kinds.items()
                )
                raise ValueError(
                    f"{transform.name} of {name!r} compares ids that are read in two ways, {read}: none would be "
                    "equal; list the columns under categorical with one `type`"
                )

    @cached_property
    def _time_reader(self) -> TimeReader:
        if self.schema.time is None or not self._has_time:
            return TimeReader()
        first, text_format = self._first_times, self.schema.time.format
        return TimeReader(format=text_format) if first is None else TimeReader.for_column(first, text_format)

    @cached_property
    def _first_times(self) -> pa.Array | None:
        """Returns the first cells of the time column, of the first file that has some; None if there is none."""
        assert self.schema.time is not None
        for file_index in range(len(self._reader.files)):
            for rows in self._reader.read(file_index, 0, [self.schema.time.column], FIRST_ROWS):
                if rows.batch.num_rows:
                    return self._cells(rows.batch.column(0))
        return None

    def ticks(self, seconds: float) -> int:
        """Returns a span in the unit of the rows' times, rounded up. Raises ValueError if the unit is not known."""
        assert self.schema.time is not None, "asked of a source that has time"
        first = self._first_times
        with self._naming(0):
            per_s = None if first is None else self._time_reader.ticks_per_s(first, self.schema.time.column)
        if per_s is None:
            where = f"{self._reader.files[0].path}: column {self.schema.time.column!r}"
            raise ValueError(
                f"{where} holds numbers that are no unix times, so statistics_lag cannot be compared with them; store "
                "timestamps, or give time.format for text"
            )
        return math.ceil(seconds * per_s)

    def _cells(self, column: Column) -> Column:
        """Returns a column with null for each text that means a missing value."""
        is_read = isinstance(self._reader, TextReader) and not self._keep
        return without_missing(column, self.schema.missing, is_read=is_read)

    def _convert(self, file_index: int, rows: Rows, dictionaries: DictionaryReader) -> Chunk:
        for error in rows.bad:
            self._skip(error, file_index)
        batch, lines = rows.batch, rows.lines
        stored: dict[str, Column] = {n: rows.mixed.get(n, batch.column(i)) for i, n in enumerate(self._columns)}
        with self._naming(file_index):
            parts, faults = self._columns_of(stored, dictionaries)
        exact = {*self.schema.label_names, *self.schema.weight_names}
        cells = {f.column: f for f in reversed(faults) if self._share > 0 and f.column not in exact}
        odd = tuple(self._odd_cells(fault, lines, file_index) for fault in cells.values())
        kept = ~self._skipped([f for f in faults if f.column not in cells], lines, file_index, len(batch))
        for found in odd:
            kept[found.rows if found.is_row else []] = False
        if not kept.all():
            with self._naming(file_index):
                parts, _ = self._columns_of({n: _filtered(own, kept) for n, own in stored.items()}, dictionaries)
            odd = tuple(found.of(kept) for found in odd)
        label, weight, time, dense, keys, unreadable = parts
        position = Position(file_index, rows.end, rows.end, self.skipped.num_rows)
        kinds = [self._reader.schema.field(name) for name in self._keep]
        left = batch.select(list(self._keep)).cast(pa.schema(kinds)) if kinds else None
        return Chunk(len(dense), label, dense, keys, position, time, odd, weight, unreadable, left)

    def _odd_cells(self, fault: Fault, lines: NDArray[np.int64], file_index: int) -> OddCells:
        """Returns the odd cells of one column. Raises RowError if the column has more of them than may be odd."""
        rows = np.flatnonzero(fault.rows)

        def error(row: int) -> RowError:
            line = self._reader.line_of(file_index, int(lines[row]))
            reason = fault.describe(row)
            return RowError(file=self._reader.files[file_index].path, line=line, name=fault.column, reason=reason)

        before = self._num_odd[fault.column]
        self._num_odd[fault.column] += len(rows)
        if self._num_odd[fault.column] > self._most_odd:
            raise too_odd(error(int(rows[self._most_odd - before])), self._most_odd)
        is_row = self.schema.time is not None and fault.column == self.schema.time.column
        return OddCells(fault.column, rows, rows, error, is_row)

    @cached_property
    def _most_odd(self) -> int:
        """How many cells of a column may be odd; of text, whose rows are not counted, twice as many as estimated."""
        num_rows, is_exact = self._reader.count_rows()
        return most_odd(num_rows if is_exact or num_rows < MANY_ROWS else 2 * num_rows, self._share)

    def _columns_of(
        self, stored: dict[str, Column], dictionaries: DictionaryReader
    ) -> tuple[tuple[Any, Any, Any, Any, KeyColumns, dict[str, int]], list[Fault]]:
        num_rows = len(next(iter(stored.values())))
        stored = {**stored, **{name: pa.array([value] * num_rows) for name, value in self._constants.items()}}
        faults: list[Fault | None] = []
        unreadable: dict[str, int] = {}
        of_inputs = Counter[str]()
        label = weight = time = None
        if self._has_label:
            labels = [to_label(self._cells(stored[spec.column]), spec) for spec in self.schema.labels]
            faults += [fault for _, fault in labels]
            label = labels[0][0] if len(labels) == 1 else np.stack([own for own, _ in labels], axis=1)
            for name in self.schema.weight_names:
                weight, fault = to_weight(self._cells(stored[name]), name)
                faults.append(fault)
        if self._has_time:
            assert self.schema.time is not None
            time, fault = self._time_reader(self._cells(stored[self.schema.time.column]), self.schema.time.column)
            faults.append(fault)
        ids: dict[str, tuple[Keys | CodedKeys, list[Fault | None], int]] = {}

        def ids_of(name: str) -> tuple[Keys | CodedKeys, list[Fault | None], int]:
            if name not in ids:
                ids[name] = self._ids(stored[name], name, dictionaries)
                faults.extend(ids[name][1])
            return ids[name]

        for name, (transform, inputs) in self._computed.items():
            arguments: list[Any] = []
            for column, kind in zip(inputs, transform.takes(len(inputs)), strict=True):
                if kind == "number":
                    how = {name: transform.options.get(name) for name in ("zone", "format")}
                    found, fault, num_unreadable = self._numbers(as_seconds(stored[column], **how), column)
                    found = on_clock(found, how["zone"]) if "zone" in transform.options else found
                    faults.append(fault)
                    arguments.append(found)
                else:
                    read, _, num_unreadable = ids_of(column)
                    hashes = key_hashes(read)
                    arguments.append((hashes, read.row_splits) if isinstance(read, Keys) and kind == "list" else hashes)
                of_inputs[name] += of_inputs[column] + num_unreadable
            made = transform(*arguments)
            if transform.makes == "list":
                lists, _, _ = ids_of(inputs[0])
                assert isinstance(lists, Keys), "lists are not coded"
                ids[name] = some_keys(lists, made), [], 0
            else:
                stored[name] = pa.array(made.view(np.int64) if transform.makes == "id" else made, from_pandas=True)
        dense = np.empty((num_rows, len(self.schema.dense)), dtype=np.float32)
        for i, name in enumerate(self.schema.dense_names):
            dense[:, i], fault, num_unreadable = self._numbers(stored[name], name)
            faults.append(fault)
            unreadable[name] = of_inputs[name] + num_unreadable
        keys: dict[str, Keys | CodedKeys] = {}
        for name in self.schema.feature_names:
            keys[name], _, num_unreadable = ids_of(name)
            unreadable[name] = of_inputs[name] + num_unreadable
        return (label, weight, time, dense, KeyColumns(keys), unreadable), [f for f in faults if f is not None]

    def _ids(
        self, column: Column, name: str, dictionaries: DictionaryReader
    ) -> tuple[Keys | CodedKeys, list[Fault | None], int]:
        """Returns a column as ids, what is wrong with it, and how many of its values could not be read."""
        feature, encoding = self._id_columns[name], self.encodings[name]
        coding = isinstance(column, pa.Array) and pa.types.is_dictionary(column.type)
        if encoding == "bytes" and feature.kind == "one_hot" and coding:
            coded = dictionaries(name, column)
            if coded is not None:
                return coded, [], 0
        cells, cut_fault, num_unreadable = self._cells(column), None, 0
        if name in self._cuts:
            found, cut_fault, num_unreadable = self._numbers(column, name)
            cells = pa.array(self._cuts[name](found), from_pandas=True)
        elif self._values == "strict" and isinstance(cells, pa.Array):
            check_shape(cells.type, feature)
        keys, fault = to_keys(cells, feature, encoding)
        if self._values == "any":
            return keys, [], num_unreadable + (0 if fault is None else fault.num_cells)
        return keys, [cut_fault, fault], 0

    def _numbers(self, column: Column, name: str) -> tuple[NDArray[np.float64], Fault | None, int]:
        """Returns a column as numbers, what is wrong with it, and how many of its values could not be read."""
        written = self._written.get(name, PLAIN)
        if self._is_quick and isinstance(column, pa.Array) and is_text(column.type):
            found, bad = numbers(column, written)
            if not bad.any():
                return found, None, 0
        cells = self._cells(column)
        if self._values == "strict" and isinstance(cells, pa.Array):
            check_number(cells.type, name)
        found, bad = numbers(cells, written)
        if self._values == "any":
            return found, None, int(bad.sum())
        return found, fault_of(name, bad, cells, NO_NUMBER), 0

    def _skipped(
        self, faults: Sequence[Fault], lines: NDArray[np.int64], file_index: int, num_rows: int
    ) -> NDArray[np.bool_]:
        """Returns a mask of bad rows. Raises RowError for the first one beyond those that may be skipped."""
        path = self._reader.files[file_index].path
        bad = np.zeros(num_rows, np.bool_)
        for fault in faults:
            bad |= fault.rows
        for row in np.flatnonzero(bad):
            fault = next(f for f in faults if f.rows[row])
            reason = fault.describe(int(row))
            self._skip(RowError(file=path, line=int(lines[row]), name=fault.column, reason=reason), file_index)
        return bad

    def _skip(self, error: RowError, file_index: int) -> None:
        """Counts a bad row, or raises its error; looks up the line number only if somebody will read it."""
        is_last = self.skipped.num_rows >= self.skip_bad_rows
        if is_last or self.skipped.wants_examples:
            error = error.but(line=self._reader.line_of(file_index, error.line))
        self.skipped.add(error)
        if is_last:
            raise with_cure(error)


def _filtered(column: Column, kept: NDArray[np.bool_]) -> Column:
    if isinstance(column, pa.Array):
        return column.filter(pa.array(kept))
    return [column[row] for row in np.flatnonzero(kept)]


def with_cure(error: RowError) -> RowError:
    """Returns the error of a bad row with what the user can do."""
    cure = ", or" if "correct" in error.reason else "; correct the row, or"
    return error.but(reason=f"{error.reason}{cure} {SKIP_CURE}")


def too_odd(error: RowError, most: int) -> RowError:
    """Returns the error of the first odd cell beyond the `most` that a column may have."""
    if most == 0:
        return with_cure(error)
    return with_cure(
        error.but(
            reason=f"{error.reason}; column {error.name!r} has more than the {most:,} such values that may be missing; "
            "name those that mean a missing value (--null-values, csv.null_values in a schema), list the column as ids "
            f"(--text {quote(error.name or '')}), raise odd_share in a schema, correct the rows"
        )
    )


def open_table(data: Any, spec: CsvSpec, *, values: Literal["strict", "any"] = "strict") -> TableReader:
    """Returns the reader for paths or a frame; spec: how lines of text are split into columns. values: as for
    `ColumnsSource`.

    Raises ValueError naming two files if they are of different formats.
    """
    files = input_files(data)
    return FrameReader(data, values=values) if files is None else open_files(files, spec, values=values)


def open_files(
    files: Sequence[InputFile], spec: CsvSpec, *, values: Literal["strict", "any"] = "strict"
) -> TableReader:
    """Returns the reader for files, as `open_table`."""
    formats = [format_of(file) for file in files]
    for file, found in zip(files, formats, strict=True):
        if found != formats[0]:
            raise ValueError(f"{files[0].name} and {file.name} are of different formats; prepare one format at a time")
    if formats[0] == "csv":
        return TextReader(files, spec)
    if formats[0] == "jsonl":
        return KeptReader(JsonReader(files, spec.null_values, values=values))
    return ColumnarReader(files)


def format_of(file: InputFile) -> FileFormat:
    """Decides by the suffix if it is known, else by the first bytes; anything else is delimited text."""
    if (kind := columnar_format(file)) is not None:
        return kind
    return "jsonl" if has_suffix(file.path, JSON_SUFFIXES) or is_json_lines(file) else "csv"


def is_paths(data: Any) -> bool:
    """Returns whether `data` names files, one path or several, and is not a frame."""
    several = isinstance(data, list | tuple) and len(data) > 0 and all(isinstance(item, str | Path) for item in data)
    return several or isinstance(data, str | Path)


def input_files(data: Any) -> tuple[InputFile, ...] | None:
    """Returns the files that `data` names, or None if it is a frame.

    From a folder, files of the first kind in SUFFIXES_OF_KINDS are taken. Raises ValueError if a path matches nothing.
    """
    found = _found(data)
    return None if found is None else found[0]


def left_out(data: Any) -> str:
    """Returns which files of a folder are of a format that is not read; "" if there is none."""
    taken, others = _found(data) or ((), ())
    if not others:
        return ""
    names = ", ".join(file.name for file in others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    folder = data[0] if isinstance(data, list | tuple) else data
    return f"{folder} holds files of several formats: read are those like {taken[0].name}, left out are {names}"


def _found(data: Any) -> tuple[tuple[InputFile, ...], tuple[InputFile, ...]] | None:
    """Returns the files that are read, and those of a folder that are not."""
    if not is_paths(data):
        return None
    data = [data] if isinstance(data, str | Path) else data
    files = find_files(data, matches=lambda name: has_suffix(name, SUFFIXES), wanted=", ".join(SUFFIXES))
    if len(data) > 1:
        return files, ()
    for suffixes in SUFFIXES_OF_KINDS:
        if taken := tuple(file for file in files if has_suffix(file.path, suffixes)):
            return taken, tuple(file for file in files if not has_suffix(file.path, suffixes))
    return files, ()

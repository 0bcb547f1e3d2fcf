"""Reads JSON Lines as a table: one object per line, its members are columns.

Values become text, so that no number is rounded on its way (`data/cells.py` reads them); arrays become lists of text,
members of nested objects become columns named `outer.inner`. A member that a line lacks is a missing value. The first
lines of the files decide which columns there are; `kept.py` reads all lines, with all their members.

pyarrow.json is not used: it reads 18446744073709551617 and 7.0 as floats, and refuses a number in a column of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from json.scanner import make_scanner
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.cells import Column, as_texts, json_text, lists
from hotrow.data.chunk import RowError
from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.tabular import (
    CSV_BLOCK_BYTES,
    ESTIMATE_BYTES,
    Rows,
    TableReader,
    naming,
    partition_types,
    with_partition,
)

SUFFIXES = (".jsonl", ".ndjson", ".json")
READ_BYTES = 1 << 20
MAX_FILES = 200
"""Files in whose first lines columns are looked for beside the first file."""
ROWS_AT_ONCE = 8192
"""Lines, bad ones included, held as Python objects at a time: some tens of MB."""
Record = TypeVar("Record")
_TEXT_OF = {True: "1", False: "0", None: None}


def is_json_lines(file: InputFile) -> bool:
    """Returns whether a file's first line begins with the brace of an object, or the bracket of an array of objects."""
    return file.first_line().lstrip().startswith(("{", "[{"))


class JsonReader(TableReader):
    """Reads files of JSON Lines, with hive partition columns from their folders.

    null_values: texts that mean a missing value, as in delimited text. values: "any": an array in a column of single
    values, one within another and half of a surrogate pair are no faults of a line, as in rows to score.

    Raises ValueError naming a file that holds no objects, or one array instead of a line for each row.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        null_values: Sequence[str] = ("",),
        *,
        values: Literal["strict", "any"] = "strict",
    ) -> None:
        self._files, self._halves = files, values == "any"
        self._missing = dict.fromkeys(null_values)
        self.files = tuple(f.info for f in files)
        self._kinds = _columns_of(files)
        self._partition_types = {name: pa.string() for name in partition_types(files) if name not in self._kinds}
        self.schema = pa.schema([*self._kinds.items(), *self._partition_types.items()])

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        file = self._files[file_index]
        stored = [name for name in columns if name not in self._partition_types]
        with naming(file):
            for block in blocks_of_lines(file, first, rows_per_batch):
                read, bad = self._read_alike([text for _, text in block], stored), tuple[RowError, ...]()
                lines = [number for number, _ in block]
                if read is None:
                    records, lines, bad = parsed(file, block, self._parse)
                    read = self._columns(records, stored)
                arrays = [self._in_batch(own, name) for own, name in zip(read, stored, strict=True)]
                batch = pa.RecordBatch.from_arrays(arrays, names=stored) if stored else _no_columns(len(lines))
                batch = with_partition(batch, file, columns, self._partition_types)
                mixed = {name: own for name, own in zip(stored, read, strict=True) if isinstance(own, list)}
                yield Rows(batch, np.array(lines, dtype=np.int64), block[-1][0], bad, mixed)

    def _read_alike(self, texts: Sequence[bytes], names: Sequence[str]) -> list[Column] | None:
        """Returns the columns of lines if all are good, and quick to see so; else None, and `_parse` must tell."""
        is_plain = _is_plain(texts[0])
        try:
            records = [_members(text, is_plain=is_plain, halves=self._halves) for text in texts]
            return self._columns(records, names)
        except (ValueError, pa.ArrowTypeError):
            return None

    def read_all(self, file_index: int) -> Iterator[Rows]:
        """Yields the rows of one file with all members that they have. What a member is, the first lines say, or else
        the first in which it comes."""
        file = self._files[file_index]
        with naming(file):
            for block in blocks_of_lines(file, 0, ROWS_AT_ONCE):
                records, lines, bad = parsed(file, block, lambda text: _members(text, is_plain=False))
                for record in records:
                    for name in record.keys() - self._kinds.keys():
                        if (value := record[name]) is not None:
                            self._kinds[name] = pa.list_(pa.string()) if isinstance(value, list) else pa.string()
                good, more = list[int](), list[RowError]()
                for i, record in enumerate(records):
                    try:
                        self._check(record)
                        good.append(i)
                    except ValueError as error:
                        more.append(RowError(file=file.name, line=lines[i], reason=str(error)))
                self.schema = pa.schema([*self._kinds.items(), *self._partition_types.items()])
                columns = self._columns([records[i] for i in good], [*self._kinds])
                arrays = [self._in_batch(own, name) for own, name in zip(columns, self._kinds, strict=True)]
                batch = pa.RecordBatch.from_arrays(arrays, names=[*self._kinds])
                batch = with_partition(batch, file, self.schema.names, self._partition_types)
                numbers = np.array([lines[i] for i in good], dtype=np.int64)
                mixed = {name: own for name, own in zip(self._kinds, columns, strict=True) if isinstance(own, list)}
                faults = tuple(sorted([*bad, *more], key=lambda error: error.line))
                yield Rows(batch, numbers, block[-1][0], faults, mixed)

    header_lines = 0

    def check_names(self, columns: Sequence[str]) -> None:
        """All members of all lines are columns."""

    def look_at_all(self) -> None:
        """Looks for members in all lines of all files."""
        self._kinds = _columns_of(self._files, most_bytes=1 << 62)
        self.schema = pa.schema([*self._kinds.items(), *self._partition_types.items()])

    def _columns(self, records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Column]:
        kinds = {name: self.schema.field(name).type for name in names}
        return [self._column([record.get(name) for record in records], kind) for name, kind in kinds.items()]

    def _column(self, values: list[Any], kind: pa.DataType) -> Column:
        """Returns one column of members as they were parsed; as they are if it has text beside arrays, which a schema
        may cut, and if values are "any" and one does not fit. Raises ArrowTypeError if they are not."""
        if pa.types.is_list(kind) and any(isinstance(value, str | bool) for value in values):
            return [_text(value) for value in values]
        try:
            array = pa.array(values, kind)
        except (pa.ArrowTypeError, UnicodeEncodeError):
            values = [_text(value) for value in values]
            try:
                array = pa.array(values, kind)
            except (pa.ArrowTypeError, UnicodeEncodeError):
                if not self._halves:
                    raise
                return values
        if pa.types.is_list(kind) or not self._missing:
            return array
        missing = pc.is_in(array, value_set=pa.array([*self._missing], pa.string()))
        if missing.true_count == 0:
            return array
        return pc.if_else(missing, pa.scalar(None, kind), array)

    def _in_batch(self, column: Column, name: str) -> pa.Array:
        """Returns a column for those who keep it as text, or as lists of text."""
        if isinstance(column, pa.Array):
            return column
        if not pa.types.is_list(self.schema.field(name).type):
            return as_texts(column)
        items, splits, _ = lists(column, None)
        return pa.ListArray.from_arrays(pa.array(splits, pa.int32()), as_texts(items))

    def _parse(self, text: bytes) -> dict[str, Any]:
        """Returns the values of one line by column. Raises ValueError saying what is wrong with the line."""
        return self._check(_flat(_load(text, halves=self._halves)))

    def _check(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of one line, those of lists as lists. Raises ValueError for arrays where none fits."""
        for name, value in record.items():
            if isinstance(value, list) and name in self._kinds and not self._halves:
                if not pa.types.is_list(self._kinds[name]):
                    raise ValueError(f"member {name!r} is an array here, and one value in the first lines")
                if any(isinstance(item, list | dict) for item in value):
                    raise ValueError(f"member {name!r} has an array or an object within its array")
        return record


def _no_columns(num_rows: int) -> pa.RecordBatch:
    """Returns a batch that has rows but no column of the file yet."""
    return pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=[""])


def blocks_of_lines(file: InputFile, first: int, num_lines: int) -> Iterator[list[tuple[int, bytes]]]:
    """Yields what `text_lines` yields, at most `num_lines` or ROWS_AT_ONCE at a time."""
    lines = text_lines(file, first)
    while block := list(islice(lines, min(num_lines, ROWS_AT_ONCE))):
        yield block


def parsed(
    file: InputFile, block: Sequence[tuple[int, bytes]], parse: Callable[[bytes], Record]
) -> tuple[list[Record], list[int], tuple[RowError, ...]]:
    """Returns the records of the good lines, their numbers, and what is wrong with the others.

    parse: returns the record of a line. Raises ValueError saying what is wrong with it.
    """
    records: list[Record] = []
    lines: list[int] = []
    bad: list[RowError] = []
    for number, text in block:
        try:
            records.append(parse(text))
            lines.append(number)
        except ValueError as error:
            bad.append(RowError(file=file.name, line=number, reason=str(error)))
    return records, lines, tuple(bad)


def text_lines(file: InputFile, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields number (from 1) and bytes of each line after line `first`, without blank lines and a byte-order mark.

    Raises ValueError for a line that is longer than text may have.
    """
    number, rest, more = 0, b"", b"\n"
    with file.open_stream() as stream:
        while more:
            more = stream.read(READ_BYTES)
            lines = (rest + more).splitlines(keepends=True)
            # The last line may go on, or a newline may follow its carriage return.
            rest = lines.pop() if more and not lines[-1].endswith(b"\n") else b""
            for text in lines:
                number += 1
                if number > first and (text := text.removeprefix(b"\xef\xbb\xbf").strip()):
                    yield number, text
            if len(rest) > CSV_BLOCK_BYTES:
                limit = f"{CSV_BLOCK_BYTES >> 20} MiB"
                raise ValueError(f"{file.name}: line {number + 1} is longer than {limit}; write one object a line")


def _columns_of(files: Sequence[InputFile], most_bytes: int | None = None) -> dict[str, pa.DataType]:
    """Names and types of the members in the first lines of the files, by first appearance."""
    most_bytes = ESTIMATE_BYTES if most_bytes is None else most_bytes
    kinds: dict[str, type[str] | type[list[str]] | None] = {}
    if fault := _note_members(files[0], kinds, most_bytes):
        raise ValueError(f"{files[0].name} {fault}; write one object a line, as jq -c '.[]' does from an array")
    chosen = range(1, len(files)) if most_bytes > ESTIMATE_BYTES else np.linspace(1, len(files), MAX_FILES).astype(int)
    for i in sorted({*chosen} - {len(files)}):
        _note_members(files[i], kinds, max(most_bytes // len(files), READ_BYTES // 16))
    return {name: pa.list_(pa.string()) if kind is list else pa.string() for name, kind in kinds.items()}


def _note_members(file: InputFile, kinds: dict[str, type[str] | type[list[str]] | None], most_bytes: int) -> str:
    """Adds names and types of the members in a file's first lines to `kinds`; returns why there are none, or ""."""
    good, fault, num_bytes = False, "", 0
    with naming(file):
        for _, text in text_lines(file):
            try:
                for name, value in _members(text, is_plain=True, halves=True).items():
                    if kinds.get(name) is None:
                        kinds[name] = None if value is None else str
                    if isinstance(value, list):
                        kinds[name] = list
                good = True
            except ValueError as error:
                fault = fault or str(error)  # a bad row, which `read` counts
            num_bytes += len(text)
            if num_bytes > most_bytes:
                break
    return "" if good else f"is not JSON Lines: {fault}" if fault else "is empty"


def _members(text: bytes, *, is_plain: bool, halves: bool = False) -> dict[str, Any]:
    """Returns the members of one line, those of nested objects under `outer.inner`; some as text, some as parsed.

    is_plain: expects as many colons as members, so that none came twice, and the quicker decoder is enough. halves:
    text may hold half of a surrogate pair. Raises ValueError saying what is wrong with the line.
    """
    try:
        line = text.decode()
        record, end = (_QUICK_SCAN if is_plain else _DECODER.raw_decode)(line, 0)
        if end == len(line) and type(record) is dict and (halves or not (b"\\u" in text and _has_surrogates(text))):
            if is_plain and text.count(b":") != len(record):
                record = _DECODER.decode(line)
            return record if text.count(b"{") == 1 else _flat(record)
    except (ValueError, RecursionError, StopIteration):
        pass  # the slow way has the reason
    return _flat(_load(text, halves=halves))


def _load(text: bytes, *, halves: bool = False) -> dict[str, Any]:
    try:
        line = text.decode()
        value = _DECODER.decode(line)
        if not halves and _has_surrogates(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        raise ValueError(f"not a JSON object at character {error.pos + 1} of {shown!r}: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, not {line[:20]!r}")
    return value


def _has_surrogates(text: bytes) -> bool:
    """Returns whether a line may hold halves of surrogate pairs, which need not make a pair."""
    return b"\\ud" in text or b"\\uD" in text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"member {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; leave a missing number out or write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=str, parse_float=json_text, parse_constant=_constant)
_QUICK_SCAN: Callable[[str, int], tuple[Any, int]] = make_scanner(
    json.JSONDecoder(parse_int=str, parse_float=json_text, parse_constant=_constant)  # type: ignore[arg-type]  # typeshed
)
"""Returns the value that begins at a place in a text, and where it ends; keeps the last of members of one name."""


def _is_plain(text: bytes) -> bool:
    """Returns whether a line has one colon for each member."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and len(found) == text.count(b":")


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the members as text, None or lists of text; members of nested objects are named `outer.inner`."""
    found: dict[str, Any] = {}
    for name, member in value.items():
        inner = {f"{name}.{n}": m for n, m in _flat(member).items()} if isinstance(member, dict) else None
        for key, item in ({name: _text(member)} if inner is None else inner).items():
            if key in found:
                raise ValueError(f"member {key!r} appears twice, once within {name!r}")
            found[key] = item
    return found


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_text, value)]
    return value if isinstance(value, str | dict) else _TEXT_OF[value]

"""Reads JSON Lines as a table: one object per line, its members are columns.

Values become text, so that no number is rounded on its way (`data/cells.py` reads them); arrays become lists of text,
members of nested objects become columns named `outer.inner`. A member that a line lacks is a missing value. The first
lines of the files decide which columns there are; `kept.py` reads all lines, with all their members.

pyarrow.json is not used: it reads 18446744073709551617 and 7.0 as floats, and refuses a number in a column of text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.data.cells import Column, as_texts, json_text, lists
from hotrow.data.chunk import RowError
from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.tabular import CSV_BLOCK_BYTES, ESTIMATE_BYTES, Rows, naming, partition_types, with_partition

SUFFIXES = (".jsonl", ".ndjson", ".json")
READ_BYTES = 1 << 20
MAX_FILES = 200
"""Files in whose first lines columns are looked for beside the first file."""
ROWS_AT_ONCE = 8192
"""Lines, bad ones included, held as Python objects at a time: some tens of MB."""
_TEXT_OF = {True: "1", False: "0", None: None}


def is_json_lines(file: InputFile) -> bool:
    """Returns whether a file's first line begins with the brace of an object, or the bracket of an array of objects."""
    return file.first_line().lstrip().startswith(("{", "[{"))


class JsonReader:
    """Reads files of JSON Lines, with hive partition columns from their folders, for `KeptReader`.

    null_values: texts that mean a missing value, as in delimited text. values: "any": an array in a column of single
    values, one within another and half of a surrogate pair are not faults of a line, as in rows to score.

    Raises ValueError naming a file that holds no objects, or one array instead of a line for each row.
    """

    header_lines = 0
    lacking: Mapping[str, Sequence[str]] = MappingProxyType({})

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

    def read_all(self, file_index: int) -> Iterator[Rows]:
        """Yields the rows of one file with all members that they have. The first lines say what a member is, or else
        the first line that has it."""
        file, lines = self._files[file_index], text_lines(self._files[file_index])
        with naming(file):
            while block := list(islice(lines, ROWS_AT_ONCE)):
                yield self._rows(file, block)

    def _rows(self, file: InputFile, block: Sequence[tuple[int, bytes]]) -> Rows:
        records, lines, bad = list[dict[str, Any]](), list[int](), list[RowError]()
        for number, text in block:
            try:
                record = _members(text, halves=self._halves)
                for name in record.keys() - self._kinds.keys():
                    if (value := record[name]) is not None:
                        self._kinds[name] = pa.list_(pa.string()) if isinstance(value, list) else pa.string()
            except ValueError as error:
                bad.append(RowError(file=file.name, line=number, reason=str(error)))
                continue
            for name, reason in [*self._misfits(record)]:  # a bad row for those alone who read this member
                bad.append(RowError(file=file.name, line=number, name=name, reason=reason))
                record[name] = None
            records.append(record)
            lines.append(number)
        read = {name: self._column([r.get(name) for r in records], kind) for name, kind in self._kinds.items()}
        arrays = [self._in_batch(own, name) for name, own in read.items()]
        batch = pa.RecordBatch.from_arrays(arrays, names=[*read])
        batch = with_partition(batch, file, [*read, *self._partition_types], self._partition_types)
        mixed = {name: own for name, own in read.items() if isinstance(own, list)}
        return Rows(batch, np.array(lines, dtype=np.int64), block[-1][0], tuple(bad), mixed)

    def line_of(self, file_index: int, record: int) -> int:
        return record

    def check_drift(self, columns: Sequence[str]) -> None:
        """Does nothing: all members of all lines are columns."""

    def _column(self, values: list[Any], kind: pa.DataType) -> Column:
        """Returns one column of members as they were parsed; as they are if it has text beside arrays, which a schema
        may cut, and if values are "any" and one does not fit."""
        if pa.types.is_list(kind) and any(isinstance(value, str | bool) for value in values):
            return [_text(value) for value in values]
        try:
            array = pa.array(values, kind)
        except (pa.ArrowTypeError, UnicodeEncodeError):
            values = [_text(value) for value in values]
            try:
                array = pa.array(values, kind)
            except (pa.ArrowTypeError, UnicodeEncodeError):
                return values
        if pa.types.is_list(kind) or not self._missing:
            return array
        missing = pc.is_in(array, value_set=pa.array([*self._missing], pa.string()))
        return pc.if_else(missing, pa.scalar(None, kind), array) if missing.true_count else array

    def _in_batch(self, column: Column, name: str) -> pa.Array:
        """Returns a column for those who keep it as text, or as lists of text."""
        if isinstance(column, pa.Array):
            return column
        if not pa.types.is_list(self._kinds[name]):
            return as_texts(column)
        items, splits, _ = lists(column, None)
        return pa.ListArray.from_arrays(pa.array(splits, pa.int32()), as_texts(items))

    def _misfits(self, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields members with arrays where none fits, and why."""
        for name, value in record.items():
            if isinstance(value, list) and name in self._kinds and not self._halves:
                if not pa.types.is_list(self._kinds[name]):
                    yield name, f"member {name!r} is an array here, and one value in the first lines"
                elif any(isinstance(item, list | dict) for item in value):
                    yield name, f"member {name!r} has an array or an object within its array"


def text_lines(file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yields number (from 1) and bytes of each line, without blank lines and a byte-order mark.

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
                if text := text.removeprefix(b"\xef\xbb\xbf").strip():
                    yield number, text
            if len(rest) > CSV_BLOCK_BYTES:
                limit = f"{CSV_BLOCK_BYTES >> 20} MiB"
                raise ValueError(f"{file.name}: line {number + 1} is longer than {limit}; write one object a line")


def _columns_of(files: Sequence[InputFile]) -> dict[str, pa.DataType]:
    """Names and types of the members in the first lines of the files, by first appearance."""
    kinds: dict[str, type[str] | type[list[str]] | None] = {}
    if fault := _note_members(files[0], kinds, ESTIMATE_BYTES):
        raise ValueError(f"{files[0].name} {fault}; write one object a line, as jq -c '.[]' does from an array")
    chosen = np.linspace(1, len(files), MAX_FILES).astype(int)
    for i in sorted({*chosen} - {len(files)}):
        _note_members(files[i], kinds, max(ESTIMATE_BYTES // len(files), READ_BYTES // 16))
    return {name: pa.list_(pa.string()) if kind is list else pa.string() for name, kind in kinds.items()}


def _note_members(file: InputFile, kinds: dict[str, type[str] | type[list[str]] | None], most_bytes: int) -> str:
    """Adds names and types of the members in a file's first lines to `kinds`; returns why there are none, or ""."""
    good, fault, num_bytes = False, "", 0
    with naming(file):
        for _, text in text_lines(file):
            try:
                for name, value in _members(text, halves=True).items():
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


def _members(text: bytes, *, halves: bool) -> dict[str, Any]:
    """Returns the members of one line, those of nested objects under `outer.inner`; some as text, some as parsed.

    halves: text may hold half of a surrogate pair. Raises ValueError saying what is wrong with the line.
    """
    record = _load(text, halves=halves)
    return record if text.count(b"{") == 1 else _flat(record)


def _load(text: bytes, *, halves: bool) -> dict[str, Any]:
    try:
        line = text.decode()
        value = _DECODER.decode(line)
        if not halves and (b"\\ud" in text or b"\\uD" in text):  # halves of surrogate pairs, which need not make one
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"member {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; leave a missing number out or write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=str, parse_float=json_text, parse_constant=_constant)


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

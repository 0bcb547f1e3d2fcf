"""Reads JSON Lines as a table: one object per line, its members are columns.

Values are text exactly as written, so that no number is rounded on its way (`convert.py` parses them); arrays become
lists of text, members of nested objects become columns named `outer.inner`. A member that a line lacks is a missing
value. The first lines of the first file decide which columns there are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa

from hotrow.data.chunk import RowError
from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.tabular import (
    CSV_BLOCK_BYTES,
    ESTIMATE_BYTES,
    Rows,
    estimate_lines,
    naming,
    partition_types,
    partition_values,
    with_partition,
)

SUFFIXES = (".jsonl", ".ndjson", ".json")
ROWS_AT_ONCE = 8192
"""Lines, bad ones included, held as Python objects at a time: some tens of MB."""
_TEXT_OF = {True: "1", False: "0", None: None}


def is_json_lines(file: InputFile) -> bool:
    """Returns whether a file's first line begins with the brace of an object, or the bracket of an array of objects."""
    return file.first_line().lstrip().startswith(("{", "[{"))


class JsonReader:
    """Reads files of JSON Lines, with hive partition columns from their folders.

    null_values: texts that mean a missing value, as in delimited text. values: "any": an array in a column of single
    values is its JSON text, and no fault, as in rows to score.

    Raises ValueError naming a file that holds no objects, or one array instead of a line for each row.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        null_values: Sequence[str] = ("",),
        *,
        values: Literal["strict", "any"] = "strict",
    ) -> None:
        self._files, self._values_may_be = files, values
        self._missing = dict.fromkeys(null_values)
        self.files = tuple(f.info for f in files)
        kinds = _columns_of(files[0])
        self._partition_types = {name: pa.string() for name in partition_types(files) if name not in kinds}
        self.schema = pa.schema([*kinds.items(), *self._partition_types.items()])

    def partition_values(self) -> dict[str, pa.Array]:
        """Returns the value of each partition column in each file."""
        return partition_values(self._files, self._partition_types)

    def check_drift(self, columns: Sequence[str]) -> None:
        """Checks nothing: a line may lack any member."""

    def count_rows(self) -> tuple[int, bool]:
        """Estimates the number from the first lines of each file and its stored size."""
        return sum(map(estimate_lines, self._files)), False

    def num_rows_in(self, file_index: int) -> int | None:
        """Returns None: lines are found one after the other."""
        return None

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        """Yields the rows of one file after position `first`, which counts lines, bad ones included."""
        file, kinds = self._files[file_index], {name: self.schema.field(name).type for name in self.schema.names}
        stored = [name for name in columns if name not in self._partition_types]
        bad: list[RowError] = []
        records: list[dict[str, Any]] = []
        lines: list[int] = []

        def rows(end: int) -> Rows:
            arrays = [pa.array(self._values(records, name), kinds[name]) for name in stored]
            batch = pa.RecordBatch.from_arrays(arrays, names=stored) if stored else _no_columns(len(records))
            batch = with_partition(batch, file, columns, self._partition_types)
            found = Rows(batch, np.array(lines, dtype=np.int64), end, tuple(bad))
            for part in (records, lines, bad):
                part.clear()
            return found

        with naming(file):
            number = first
            for number, text in _lines(file, first):
                try:
                    records.append(_parse(text, kinds, values=self._values_may_be))
                    lines.append(number)
                except ValueError as error:
                    bad.append(RowError(file=file.name, line=number, reason=str(error)))
                if len(records) + len(bad) >= min(rows_per_batch, ROWS_AT_ONCE):
                    yield rows(number)
            if records or bad:
                yield rows(number)

    def _values(self, records: Sequence[dict[str, Any]], name: str) -> list[Any]:
        values = (record.get(name) for record in records)
        return [self._missing.get(value, value) if isinstance(value, str) else value for value in values]


def _no_columns(num_rows: int) -> pa.RecordBatch:
    """Returns a batch that has rows but no column of the file yet."""
    return pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=[""])


def _lines(file: InputFile, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields number (from 1) and bytes of each line after line `first`, without blank lines and a byte-order mark.

    Raises ValueError for a line that is longer than text may have.
    """
    with file.open_stream() as stream, io.BufferedReader(stream, 1 << 20) as buffered:
        number = 0
        while text := buffered.readline(CSV_BLOCK_BYTES):
            number += 1
            if len(text) == CSV_BLOCK_BYTES and not text.endswith(b"\n"):
                raise ValueError(f"{file.name}: line {number} is longer than {CSV_BLOCK_BYTES >> 20} MiB; correct it")
            if number > first and (text := text.removeprefix(b"\xef\xbb\xbf").strip()):
                yield number, text


def _columns_of(file: InputFile) -> dict[str, pa.DataType]:
    """Returns names and types of the members in a file's first lines, by first appearance."""
    kinds: dict[str, pa.DataType] = {}
    good, fault, num_bytes = False, "", 0
    with naming(file):
        for _, text in _lines(file):
            try:
                for name, value in _flat(_load(text)).items():
                    if kinds.get(name) in (None, pa.null()):
                        kinds[name] = pa.null() if value is None else pa.string()
                    if isinstance(value, list):
                        kinds[name] = pa.list_(pa.string())
                good = True
            except ValueError as error:
                fault = fault or str(error)  # a bad row, which `read` counts
            num_bytes += len(text)
            if num_bytes > ESTIMATE_BYTES:
                break
    if not good:
        reason = f"is not JSON Lines: {fault}" if fault else "is empty"
        raise ValueError(f"{file.name} {reason}; write one object a line, as jq -c '.[]' does from an array")
    return {name: pa.string() if pa.types.is_null(kind) else kind for name, kind in kinds.items()}


def _parse(text: bytes, kinds: dict[str, pa.DataType], *, values: Literal["strict", "any"]) -> dict[str, Any]:
    """Returns the values of one line by column. Raises ValueError saying what is wrong with the line."""
    record = _flat(_load(text))
    for name, value in record.items():
        is_list = pa.types.is_list(kinds.get(name, pa.null()))
        if is_list and not isinstance(value, list) and value is not None:
            record[name] = [value]
        elif isinstance(value, list) and not is_list and name in kinds:
            if values == "any":
                record[name] = json.dumps(value, ensure_ascii=False)
                continue
            raise ValueError(f"member {name!r} is an array here, and one value in the first lines")
    return record


def _load(text: bytes) -> dict[str, Any]:
    try:
        line = text.decode()
        value = json.loads(line, object_pairs_hook=_object, parse_int=str, parse_float=str, parse_constant=_constant)
        if b"\\u" in text:
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
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [
            _text(item) if not isinstance(item, dict | list) else json.dumps(item, ensure_ascii=False) for item in value
        ]
    return _TEXT_OF[value]

"""Reads libsvm and libffm text as a table, and says by which schema.

    libsvm    label index:value ...            1 3:0.5 17:1 99:1       value_3 = 0.5, features = 17|99
    libffm    label field:index:value ...      0 0:4:0.2 1:77:1        value_0 = 0.2, field_1 = 77

Columns are found by their names, whatever the file: `value_3` is the number of index (libffm: field) 3, `field_3` the
one id of a field, `list_3` its several ids, and `features` all indices of a libsvm line that are no numbers. An index
that has a value other than 1 in the first lines is a number (libffm: if its field has no other index), and 0 where it
is left out (libffm: missing). Ids have no weights here: one with a value that is not 1 makes a bad row. Labels -1 and
+1 are 0 and 1; what comes after `#` is left out. Not supported are `qid:` (ranking), weights, and more than MAX_NUMBERS
numbers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.jsonlines import blocks_of_lines, parsed, text_lines
from hotrow.data.sources.schema import Schema, parse_schema
from hotrow.data.sources.tabular import ESTIMATE_BYTES, Rows, TableReader, naming

NUM = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
LIBSVM = re.compile(rf"({NUM}[ \t]+)?(qid:\d+[ \t]+)?\d+:{NUM}([ \t]+\d+:{NUM})*[ \t]*(#.*)?")
LIBFFM = re.compile(rf"({NUM}[ \t]+)?\d+:\d+:{NUM}([ \t]+\d+:\d+:{NUM})*[ \t]*")
SNIFF_CHARACTERS = 4096
MAX_NUMBERS = 1000
"""A file may have so many columns of numbers."""
LABEL, BAG, SEPARATOR = "label", "features", "|"
_LABELS = {"-1": "0", "+1": "1", "-1.0": "0", "+1.0": "1"}
Pairs = list[tuple[str, str]]


def tell_libsvm(line: str) -> Literal["libsvm", "libffm"] | None:
    """Returns the format of a first line; None if it is neither."""
    if len(line) > SNIFF_CHARACTERS:
        line = line[:SNIFF_CHARACTERS].rpartition(" ")[0]
    if LIBFFM.fullmatch(line):
        return "libffm"
    return "libsvm" if LIBSVM.fullmatch(line) else None


class LibsvmReader(TableReader):
    """Reads files of libsvm or libffm text; every column is text, several ids are joined by SEPARATOR."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self.files = tuple(f.info for f in files)
        self._is_ffm = tell_libsvm(files[0].first_line()) == "libffm"
        self.schema = pa.schema([(name, pa.string()) for name in (LABEL, *_columns_of(files[0], is_ffm=self._is_ffm))])

    def schema_of_rows(self) -> Schema:
        """Returns the schema by which the rows are read. Raises ValueError if there are no ids."""
        names = self.schema.names[1:]
        ids: list[Any] = [name for name in names if name.startswith("field_")]
        ids += [
            {"column": name, "kind": "multi_hot", "separator": SEPARATOR}
            for name in names
            if name.startswith("list_") or name == BAG
        ]
        if not ids:
            raise ValueError(f"{self.files[0].path} holds numbers alone; a model here needs at least one column of ids")
        value = {"label": LABEL, "dense": [n for n in names if n.startswith("value_")], "categorical": ids}
        return parse_schema(value, where=self.files[0].path)

    def check_drift(self, columns: Sequence[str]) -> None:
        """Adds columns that the first lines lack: a row may lack any."""
        for name in columns:
            if name not in self.schema.names:
                self.schema = self.schema.append(pa.field(name, pa.string()))

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        file, wanted = self._files[file_index], frozenset(columns)
        with naming(file):
            for block in blocks_of_lines(file, first, rows_per_batch):
                rows, numbers, bad = parsed(file, block, lambda text: self._row(text, wanted))
                zero = None if self._is_ffm else "0"
                absent = {name: zero for name in columns if name.startswith("value_")}
                arrays = [pa.array([row.get(n, absent.get(n)) for row in rows], pa.string()) for n in columns]
                batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
                yield Rows(batch, np.array(numbers, dtype=np.int64), block[-1][0], bad)

    def _row(self, text: bytes, wanted: frozenset[str]) -> dict[str, str]:
        """Returns the values of one line by column. Raises ValueError saying what is wrong with the line."""
        label, fields = _parse(text, is_ffm=self._is_ffm)
        row = {} if label is None else {LABEL: _LABELS.get(label, label)}
        for field, pairs in fields.items():
            if (number := f"value_{field}") in wanted:
                row[number] = _single(pairs, field)[1]
                continue
            several = f"list_{field}" if self._is_ffm else BAG
            if several in wanted:
                ids = SEPARATOR.join(_without_weights(pairs, field))
                row[several] = f"{row[several]}{SEPARATOR}{ids}" if several in row else ids
            elif (one := f"field_{field}") in wanted:
                row[one] = _without_weights([_single(pairs, field)], field)[0]
        return row


def _single(pairs: Pairs, field: str) -> tuple[str, str]:
    if len(pairs) > 1:
        raise ValueError(f"{field} comes twice, but once in the first lines; correct or remove the line")
    return pairs[0]


def _without_weights(pairs: Pairs, field: str) -> list[str]:
    for _, value in pairs:
        if float(value) != 1:
            raise ValueError(f"{field} has the weight {value}, but ids have none here: write 1, or remove the line")
    return [index for index, _ in pairs]


def _parse(text: bytes, *, is_ffm: bool) -> tuple[str | None, dict[str, Pairs]]:
    """Returns the label, None if there is none, and the (index, value) of each field; a libsvm index is a field."""
    try:
        line = text.decode().partition("#")[0].strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from None
    if not (LIBFFM if is_ffm else LIBSVM).fullmatch(line) and not re.fullmatch(NUM, line):
        form = "label field:index:value ..." if is_ffm else "label index:value ..."
        raise ValueError(f"{line[:60]!r} is not of the form {form!r}; correct or remove the line")
    first, *parts = line.split()
    label = None if ":" in first else first
    fields: dict[str, Pairs] = defaultdict(list)
    for part in parts if label is not None else (first, *parts):
        if part.startswith("qid:"):
            raise ValueError("qid (ranking) is not supported; remove it from every line")
        field, *rest = part.split(":")
        fields[field].append((rest[0], rest[1]) if is_ffm else (field, rest[0]))
    return label, fields


def _columns_of(file: InputFile, *, is_ffm: bool) -> list[str]:
    """Returns the columns that a file's first lines show. Raises ValueError for more than MAX_NUMBERS numbers."""
    indices: dict[str, set[str]] = defaultdict(set)
    weighted: set[str] = set()
    several: set[str] = set()
    num_bytes, fault = 0, ""
    with naming(file):
        for _, text in text_lines(file):
            try:
                _, fields = _parse(text, is_ffm=is_ffm)
            except ValueError as error:
                fault = fault or str(error)  # a bad row, which `read` counts
                continue
            for field, pairs in fields.items():
                indices[field].update(index for index, _ in pairs)
                weighted.update(field for _, value in pairs if float(value) != 1)
                several.update(field for _ in pairs[1:])
            num_bytes += len(text)
            if num_bytes > ESTIMATE_BYTES:
                break
    if fault and not indices:
        raise ValueError(f"{file.name}: {fault}")
    fields_in_order = sorted(indices, key=int)
    numbers = [f for f in fields_in_order if f in weighted and len(indices[f]) == 1 and f not in several]
    if len(numbers) > MAX_NUMBERS:
        raise ValueError(
            f"{file.name}: {len(numbers):,} indices have values that are not 1, and at most {MAX_NUMBERS:,} can be "
            "numbers; write them as columns (Parquet, CSV), or 1 for what is an id"
        )
    others = [f for f in fields_in_order if f not in numbers]
    ids = [f"list_{f}" if f in several else f"field_{f}" for f in others] if is_ffm else [BAG] if others else []
    return [*(f"value_{f}" for f in numbers), *ids]

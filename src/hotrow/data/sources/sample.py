"""A bounded sample of a table: rows from the start, the middle and the end of every file.

Columns that fill late, files sorted by a column and types that change on the way show only in rows from all over the
files. Text, which `kept.py` has read, and frames give runs of rows; Parquet, Feather and ORC give rows from all over
their groups. If the table is small, the sample is the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.chunk import NoRowsError
from hotrow.data.sources.columnar import open_columnar, pieces_of
from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.kept import KeptReader
from hotrow.data.sources.tabular import FrameReader, TableReader, naming, partition_types, with_partition

SAMPLE_ROWS = 60_000
NUM_PLACES = 16
"""Places in all files from which rows are taken; in each file there are three or more."""
NUM_RUNS = 256
"""Runs of rows that are taken from a frame."""
MAX_FILES = 200
"""Files that are looked into; if there are more, these are spread evenly over them."""
NUMBER = "\0number"
"""A column for the rows' numbers, while rows are put together; no file has one of this name."""
SKIPPED_VALUES = 8_000_000
"""Values of columnar files that are read to get at rows within their groups: a fifth of a second."""


@dataclass(frozen=True)
class Sample:
    """Rows of a table, in the table's order."""

    rows: pa.Table
    origin: str
    """Where the rows are from, in words."""
    numbers: NDArray[np.int64]
    """The number of each row in the table, from 0; -1 if it is not known."""


def sample_rows(reader: TableReader) -> Sample:
    """Up to SAMPLE_ROWS rows of the table that `reader` reads.

    Values here may be bad; preparation finds those. Raises ValueError if no file has a row.
    """
    if isinstance(reader, FrameReader):
        rows, is_whole = _spread(reader.table), reader.table.num_rows <= SAMPLE_ROWS
    else:
        rows, is_whole = _of_files(reader._files, reader)
    if not len(rows):
        raise NoRowsError(f"{reader.files[0].path} has no rows to look at; give a file that has some")
    where = reader.files[0].path if len(reader.files) == 1 else f"{len(reader.files):,} files"
    if len(reader.files) > MAX_FILES:
        where = f"{MAX_FILES} of {where}"
    origin = f"{'all ' if is_whole else ''}{len(rows):,} rows {'of' if is_whole else 'from all over'} {where}"
    return Sample(rows.drop_columns(NUMBER), origin, rows.column(NUMBER).to_numpy())


def _numbered(rows: pa.Table, numbers: NDArray[np.int64] | None = None) -> pa.Table:
    """Returns rows with their numbers, which are those from 0 on if none are given."""
    return rows.append_column(NUMBER, pa.array(np.arange(len(rows)) if numbers is None else numbers))


def _of_files(files: Sequence[InputFile], reader: TableReader) -> tuple[pa.Table, bool]:
    """Returns rows of all files, or of MAX_FILES of them, and whether they are all rows."""
    chosen = np.linspace(0, len(files) - 1, min(len(files), MAX_FILES)).round().astype(int).tolist()
    num_bytes = max(sum(files[i].num_bytes for i in chosen), 1)
    num_places = max(3, NUM_PLACES // len(chosen))
    parts: list[pa.Table] = []
    are_whole, first = True, 0
    for i in chosen:
        share = max(files[i].num_bytes / num_bytes, 0.1 / len(chosen))
        num_wanted = int(share * SAMPLE_ROWS) + 1
        if isinstance(reader, KeptReader):
            part, num_rows, is_whole = _of_text(reader, i, num_wanted)
        else:
            part, num_rows, is_whole = _of_groups(files[i], reader, num_wanted, num_places, int(share * SKIPPED_VALUES))
        numbers = part.column(NUMBER).to_numpy() + first if first >= 0 else np.full(len(part), -1)
        parts.append(_numbered(part.drop_columns(NUMBER), numbers))
        first = first + num_rows if first >= 0 and len(chosen) == len(files) else -1
        are_whole &= is_whole
    rows = _joined(parts, reader.schema)
    return _spread(rows), len(chosen) == len(files) and len(rows) <= SAMPLE_ROWS and are_whole


def _of_text(reader: KeptReader, file_index: int, num_wanted: int) -> tuple[pa.Table, int, bool]:
    """Runs of rows of one file with their numbers in it; how many rows the file has, and whether these are all."""
    num_rows = reader.rows_in(file_index)
    length = num_rows if num_rows <= num_wanted else -(-num_wanted // NUM_PLACES)
    starts = [0] if num_rows <= num_wanted else np.linspace(0, num_rows - length, NUM_PLACES).astype(int).tolist()
    runs = [_numbered(reader.some(file_index, start, length), start + np.arange(length)) for start in starts]
    return pa.concat_tables(runs), num_rows, num_rows <= num_wanted


def _spread(table: pa.Table) -> pa.Table:
    """SAMPLE_ROWS rows, with numbers, in runs that are spread evenly over the table; or all of a small table."""
    length = SAMPLE_ROWS // NUM_RUNS if len(table) > SAMPLE_ROWS else len(table)
    starts = np.linspace(0, len(table) - length, NUM_RUNS if length < len(table) else 1).astype(int).tolist()
    runs = [table.slice(start, length) for start in starts]
    if NUMBER not in table.column_names:
        runs = [_numbered(run, start + np.arange(length)) for start, run in zip(starts, runs, strict=True)]
    return pa.concat_tables(runs)


def _joined(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """Returns the rows of all files; a column is missing in files that lack it, or have it in a type that does not
    go together with that of the files before."""
    table = parts[0]
    for part in parts[1:]:
        own = {f.name: f for f in table.schema}
        alike = [f.name for f in part.schema if f.name not in own or _alike(own[f.name], f)]
        table = pa.concat_tables([table, part.select(alike)], promote_options="permissive")
    return table.select([name for name in (*schema.names, NUMBER) if table.schema.get_field_index(name) >= 0])


def _alike(one: pa.Field, other: pa.Field) -> bool:
    try:
        pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def _of_groups(
    file: InputFile, reader: TableReader, num_rows: int, num_places: int, most_skipped: int
) -> tuple[pa.Table, int, bool]:
    """Returns rows of a file that stores groups of rows by column, as `_of_file`."""
    with naming(file):
        opened = open_columnar(file)
        columns = [name for name in opened.schema.names if name in reader.schema.names]
        ends = np.cumsum(opened.sizes, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        length = total if total <= num_rows else -(-num_rows // num_places)
        places = [0] if total <= num_rows else np.linspace(0, total - length, num_places).astype(int).tolist()
        parts, numbers = [], []
        for place in places if total else []:
            group = int(np.searchsorted(ends, place, side="right"))
            inside = place - int(ends[group] - opened.sizes[group])
            inside = min(inside, most_skipped // num_places // max(len(columns), 1))
            first = int(ends[group] - opened.sizes[group]) + inside
            own = list(_rows_after(pieces_of(opened, group, columns, min(length, 65536)), inside, length))
            numbers.append(np.arange(first, first + sum(map(len, own))))
            parts += own
    names = [name for name in reader.schema.names if name in columns or name in partition_types([file])]
    kinds = {name: reader.schema.field(name).type for name in names}
    batches = [with_partition(batch, file, names, kinds) for batch in parts]
    if not batches:
        return _numbered(opened.schema.empty_table().select(columns)), total, True
    rows = pa.Table.from_batches(batches)
    for place, own in enumerate(rows.schema):  # text comes coded, for as little memory, and is written out here
        if pa.types.is_dictionary(own.type) and not pa.types.is_dictionary(reader.schema.field(own.name).type):
            rows = rows.set_column(place, own.name, rows.column(place).cast(own.type.value_type))
    return _numbered(rows, np.concatenate(numbers)), total, total <= num_rows


def _rows_after(batches: Iterator[pa.RecordBatch], first: int, num_rows: int) -> Iterator[pa.RecordBatch]:
    """Yields `num_rows` rows after the first ones."""
    last = first + num_rows
    for batch in batches:
        if first < len(batch):
            yield batch.slice(max(first, 0), last - max(first, 0))
        first, last = first - len(batch), last - len(batch)
        if last <= 0:
            return

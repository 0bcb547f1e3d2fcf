"""Opens one Parquet, Feather (Arrow IPC) or ORC file: its columns, its groups of rows, and the rows from a group on.

Text that is stored once for many rows stays coded, and rows come in pieces that count it for each. `tabular.py` reads
several files as one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import ipc, orc

from hotrow.base.files import size
from hotrow.data.cells import filled, is_binary, is_text
from hotrow.data.sources.inputs import InputFile

ColumnarFormat = Literal["parquet", "feather", "orc"]
COLUMNAR_SUFFIXES: dict[ColumnarFormat, tuple[str, ...]] = {
    "parquet": (".parquet", ".parq", ".pq"),
    "feather": (".feather", ".arrow", ".ipc"),
    "orc": (".orc",),
}
_MAGIC: dict[bytes, ColumnarFormat] = {b"PAR1": "parquet", b"ARRO": "feather", b"FEA1": "feather", b"ORC": "orc"}
"""The format by the bytes with which its files start."""
BATCH_BYTES = 20 << 20
"""Bytes of Parquet rows that are read at once. Three such batches are held: one in use, one ready, one being read."""
MAX_BATCH_ROWS = 1 << 19
"""Upper limit of Parquet rows read at once; see `_ParquetFile.batches`."""
PIECE_BYTES = 64 << 20
"""Bytes of rows that are passed on together, or one row more."""
MOST_BYTES, MOST_TIMES = 1 << 28, 64
"""What any file may take once it is decoded, and how many times its own bytes more."""


class ColumnarFile(Protocol):
    """An open file whose rows are stored in groups, column by column."""

    source: InputFile

    @property
    def schema(self) -> pa.Schema:
        """Name and type of every column."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of rows of each group."""

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields `columns` of the groups from number `first` on. Parquet rows come `num_rows` at a time, or if it is
        None as many as BATCH_BYTES hold, so that a dictionary serves many; text stored as a dictionary stays one."""


def pieces_of(
    file: ColumnarFile, first: int, columns: Sequence[str], num_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a file in pieces of about PIECE_BYTES with each row's text counted.

    Raises ArrowInvalid for text that is not UTF-8, and for text that takes too much if it is written for each row.
    """
    text_bytes = 0
    for batch in file.batches(first, columns, num_rows):
        widths = np.zeros(len(batch), np.int64)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"column {name!r}: {error}") from None
            if pa.types.is_dictionary(kind := column.type) and (is_text(kind.value_type) or is_binary(kind.value_type)):
                widths += filled(pc.binary_length(column.dictionary).take(column.indices).cast(pa.int64()), 0)
        text_bytes += int(widths.sum())
        _check_decoded("text that is stored once for many rows", text_bytes, file.source)
        ends = np.cumsum(widths + batch.nbytes // max(len(batch), 1))
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(ends // PIECE_BYTES)) + 1).tolist(), len(batch)]):
            yield batch.slice(start, stop - start)


def _check_decoded(what: str, num_bytes: int, file: InputFile) -> None:
    """Raises ArrowInvalid if a file takes more than it may once it is decoded."""
    if num_bytes > (most := MOST_BYTES + MOST_TIMES * file.num_bytes):
        raise pa.ArrowInvalid(f"{what} has {size(num_bytes)} once it is decoded, above {size(most)} for such a file")


def told_by_bytes(file: InputFile) -> ColumnarFormat | None:
    """Returns the format that a file's first bytes show; None if they show none."""
    with file.open_file() as stream:
        start = stream.read(4)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def open_columnar(file: InputFile) -> ColumnarFile:
    """Opens a file. Raises ValueError for Feather's first version; Arrow's errors pass through."""
    kind = told_by_bytes(file)
    if kind == "feather":
        return _ArrowFile(file)
    if kind == "orc":
        return _OrcFile(file, orc.ORCFile(file.open_file()))
    return _ParquetFile(file, pq.ParquetFile(file.open_file()))


@dataclass
class _ParquetFile:
    source: InputFile
    file: pq.ParquetFile

    @property
    def schema(self) -> pa.Schema:
        return self.file.schema_arrow

    @property
    def sizes(self) -> Sequence[int]:
        return [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        groups = list(range(first, self.file.num_row_groups))
        row_bytes = 8 * len(columns) + 1
        for own in map(self.file.metadata.row_group, groups):
            _check_decoded("a group of rows", own.total_byte_size, self.source)
            row_bytes = max(row_bytes, own.total_byte_size // max(own.num_rows, 1))
        coded = [own.name for own in self.schema if is_text(own.type) or is_binary(own.type)]
        # pre_buffer would hold every column chunk of the file at once.
        file = pq.ParquetFile(self.source.open_file(), read_dictionary=coded, pre_buffer=False)
        most = min(num_rows or MAX_BATCH_ROWS, BATCH_BYTES // row_bytes + 1)
        yield from file.iter_batches(most, row_groups=groups, columns=list(columns))


class _ArrowFile:
    """A file of Arrow's IPC format, which is Feather's second version; a group is a record batch."""

    def __init__(self, file: InputFile) -> None:
        self.source = file
        with file.open_file() as stream:
            if stream.read(4) == b"FEA1":
                raise ValueError(
                    f"{file.name}: Feather's version 1 cannot be read; write it again as version 2 (to_feather), "
                    "or as Parquet"
                )
        reader = self._reader(None)
        self.schema, self._num_batches = reader.schema, reader.num_record_batches

    def _reader(self, fields: list[int] | None) -> Any:
        return ipc.open_file(self.source.open_file(), options=ipc.IpcReadOptions(included_fields=fields or []))

    @cached_property
    def sizes(self) -> Sequence[int]:
        reader = self._reader([0])
        return [reader.get_batch(group).num_rows for group in range(self._num_batches)]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        reader = self._reader([self.schema.get_field_index(name) for name in columns] or [0])
        for group in range(first, self._num_batches):
            yield reader.get_batch(group)


@dataclass
class _OrcFile:
    """A group is a stripe."""

    source: InputFile
    file: orc.ORCFile

    @property
    def schema(self) -> pa.Schema:
        return self.file.schema

    @property
    def sizes(self) -> Sequence[int]:
        name = self.file.schema.names[:1]
        return [self.file.read_stripe(group, columns=name).num_rows for group in range(self.file.nstripes)]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        for group in range(first, self.file.nstripes):
            yield self.file.read_stripe(group, columns=list(columns) or self.file.schema.names[:1])

"""Opens one Parquet, Feather (Arrow IPC) or ORC file: its columns, its groups of rows, and the rows from a group on.

`tabular.py` reads several of them as one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc, orc

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


class ColumnarFile(Protocol):
    """An open file whose rows are stored in groups, column by column."""

    @property
    def schema(self) -> pa.Schema:
        """Name and type of every column."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of rows of each group."""

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields `columns` of the groups from number `first` on; of Parquet `num_rows` at a time, or if it is None as
        many as BATCH_BYTES hold, so that a dictionary serves many."""


def told_by_bytes(file: InputFile) -> ColumnarFormat | None:
    """Returns the format by a file's first bytes; None if it is none of these."""
    with file.open_file() as stream:
        start = stream.read(4)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def open_columnar(file: InputFile, text_columns: Sequence[str] = ()) -> ColumnarFile:
    """Opens a file; `text_columns` are read as dictionaries if they are stored so.

    Raises ValueError for Feather's first version; Arrow's errors pass through.
    """
    kind = told_by_bytes(file)
    if kind == "feather":
        return _ArrowFile(file)
    if kind == "orc":
        return _OrcFile(orc.ORCFile(file.open_file()))
    # pre_buffer would hold every column chunk of the file at once.
    return _ParquetFile(pq.ParquetFile(file.open_file(), read_dictionary=list(text_columns), pre_buffer=False))


@dataclass(frozen=True)
class _ParquetFile:
    file: pq.ParquetFile

    @property
    def schema(self) -> pa.Schema:
        return self.file.schema_arrow

    @property
    def sizes(self) -> Sequence[int]:
        return [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        metadata = self.file.metadata
        stored_bytes = sum(int(metadata.row_group(g).total_byte_size) for g in range(metadata.num_row_groups))
        row_bytes = max(8 * len(columns), stored_bytes // max(int(metadata.num_rows), 1))
        batch_rows = min(MAX_BATCH_ROWS, BATCH_BYTES // max(row_bytes, 1) + 1)
        groups = list(range(first, self.file.num_row_groups))
        yield from self.file.iter_batches(num_rows or batch_rows, row_groups=groups, columns=list(columns))


class _ArrowFile:
    """A file of Arrow's IPC format, which is Feather's second version; a group is a record batch."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        with file.open_file() as stream:
            if stream.read(4) == b"FEA1":
                raise ValueError(
                    f"{file.name}: Feather's version 1 cannot be read; write it again as version 2 (to_feather), "
                    "or as Parquet"
                )
        reader = self._reader(None)
        self.schema, self._num_batches = reader.schema, reader.num_record_batches

    def _reader(self, fields: list[int] | None) -> Any:
        return ipc.open_file(self._file.open_file(), options=ipc.IpcReadOptions(included_fields=fields or []))

    @cached_property
    def sizes(self) -> Sequence[int]:
        reader = self._reader([0])
        return [reader.get_batch(group).num_rows for group in range(self._num_batches)]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        reader = self._reader([self.schema.get_field_index(name) for name in columns] or [0])
        for group in range(first, self._num_batches):
            yield reader.get_batch(group)


@dataclass(frozen=True)
class _OrcFile:
    """A group is a stripe."""

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

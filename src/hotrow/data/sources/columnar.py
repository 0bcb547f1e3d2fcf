"""Opens one Parquet, Feather (Arrow IPC) or ORC file: its columns, its groups of rows, and the rows from a group on.

A few bytes can stand for gigabytes: compressed pages, a text for a million rows, a row with a million items. So what is
stored is asked for its size before it is decoded, by what decoding goes by and not by the file's sums, and a file's
bytes bound what it may take. Text stays coded as it is stored, and rows come in pieces whose size counts each cell
written out. `tabular.py` reads several files as one table.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import ipc, orc

from hotrow.base.files import size
from hotrow.data.cells import filled, is_binary, is_list, is_text, valid
from hotrow.data.packed.reader import BATCH_COMPRESSION, MESSAGE_HEADER, FlatTable
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
"""Bytes of rows that are passed on together, each cell written out: so much may one row have."""
MOST_BYTES, MOST_TIMES = 1 << 28, 64
"""What any file may take once it is decoded, and how many times its own bytes more."""
ORC_ROWS = 64
"""Rows of ORC that are decoded at once: nothing tells how wide they are."""
_DICTIONARY, _BYTE_ARRAY, _STRUCT = 2, 6, 12
"""Numbers of a page's type, of a column's, and of Thrift's."""
_CODECS = ("", "snappy", "gzip", "lzo", "brotli", "lz4_raw", "zstd", "lz4_raw")
_HEADER_BYTES = 1 << 14
"""What a page's header may take; with statistics it has a few hundred bytes."""


def check_decoded(what: str, num_bytes: int, stored_bytes: int) -> None:
    """Raises ArrowInvalid if `num_bytes` come out of a file of `stored_bytes`, which are more than it may take."""
    if num_bytes > (most := MOST_BYTES + MOST_TIMES * stored_bytes):
        raise pa.ArrowInvalid(f"{what} has {size(num_bytes)} once it is decoded, above {size(most)} for such a file")


def pieces_of(
    file: ColumnarFile, first: int, columns: Sequence[str], num_rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields rows as `batches` of the file, checked, in pieces of at most PIECE_BYTES with each cell written out.

    Raises ArrowInvalid for text that is not UTF-8 and what else is malformed, and for rows that take too much.
    """
    written_out = 0
    for batch in file.batches(first, columns, num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise pa.ArrowInvalid(f"column {name!r}: {error}") from None
        ends, start = np.cumsum(_cell_bytes(batch.to_struct_array())), 0
        written_out += int(ends[-1]) if len(ends) else 0
        check_decoded("text that is stored once for many rows", written_out, file.source.num_bytes)
        while start < len(batch):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
            if stop == start:
                raise pa.ArrowInvalid(f"a row has {size(ends[start] - before)}, above {size(PIECE_BYTES)} for one row")
            yield batch.slice(start, stop - start)
            start = stop


def _cell_bytes(array: pa.Array) -> NDArray[np.int64]:
    """Bytes of each cell [n], written out."""
    kind, found = array.type, np.zeros(len(array), np.int64)
    if pa.types.is_struct(kind):
        found = np.sum([found, *map(_cell_bytes, array.flatten())], axis=0)
    elif pa.types.is_dictionary(kind):
        found = np.append(_cell_bytes(array.dictionary), 0)[filled(array.indices.cast(pa.int64()), -1)]
    elif is_list(kind):
        ends = np.cumsum(filled(pc.list_value_length(array).cast(pa.int64()), 0))
        found = np.diff(np.append(0, np.cumsum(_cell_bytes(pc.list_flatten(array))))[ends], prepend=0)
    elif "_view" in str(kind):  # each is 16 bytes, which begin with its length
        lengths = np.frombuffer(array.buffers()[1], np.int32)[4 * array.offset :: 4][: len(array)]
        found = np.where(valid(array), lengths, found)
    elif is_text(kind) or is_binary(kind):
        found = filled(pc.binary_length(array).cast(pa.int64()), 0)
    elif pa.types.is_primitive(kind):
        found += kind.bit_width // 8
    return found


def told_by_bytes(file: InputFile) -> ColumnarFormat | None:
    """Returns the format by a file's first bytes; None if it is none of these."""
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
        own = self.file.metadata.schema
        leaves = {leaf: own.column(leaf) for leaf in range(len(own))}
        leaves = {leaf: c for leaf, c in leaves.items() if any(f"{c.path}.".startswith(f"{name}.") for name in columns)}
        coded = [c.path for c in leaves.values() if _is_coded(c)]
        # pre_buffer would hold every column chunk of the file at once.
        options: dict[str, Any] = {"metadata": self.file.metadata, "read_dictionary": coded, "pre_buffer": False}
        file, sizes = pq.ParquetFile(self.source.open_file(), **options), self.sizes
        most, run = num_rows or MAX_BATCH_ROWS, list[int]()
        with io.BufferedReader(self.source.open_file(), _HEADER_BYTES) as pages:
            for group in range(first, len(sizes)):
                most = min(most, self._rows_at_once(pages, group, leaves))
                run.append(group)
                if group == len(sizes) - 1 or sum(sizes[each] for each in run) >= most:
                    yield from file.iter_batches(most, row_groups=run, columns=list(columns))
                    run = []

    @cached_property
    def _groups(self) -> list[Any]:
        """The footer's groups of rows: pyarrow's own objects of their columns end the process if one is damaged."""
        with self.source.open_file() as stream:
            stream.seek(stream.size() - 8)
            (length,) = struct.unpack("<I4x", stream.read(8))
            stream.seek(stream.size() - 8 - length)
            return list(_thrift(stream.read(length), 0, _STRUCT)[0][4])

    def _rows_at_once(self, pages: Any, group: int, leaves: Mapping[int, Any]) -> int:
        """How many rows of a group BATCH_BYTES hold in the mean. Raises ArrowInvalid if its columns take too much."""
        decoded = uneven = 0
        for leaf, own in leaves.items():
            try:
                num_bytes, num_values, longest = _in_pages(pages, self._groups[group][1][leaf][3])
            except (LookupError, TypeError, ValueError, RecursionError, struct.error):
                raise pa.ArrowInvalid(f"column {own.path!r}: its pages do not begin as pages do") from None
            width = max(own.length, 8) + (0 if _is_coded(own) else longest)
            decoded += num_bytes + num_values * width
            uneven += num_bytes + num_values * width * (own.max_repetition_level > 0)
            check_decoded(f"column {own.path!r} of row group {group}", uneven, self.source.num_bytes)
        return BATCH_BYTES * self.sizes[group] // max(decoded, 1) + 1


def _is_coded(column: Any) -> bool:
    """Whether values of a column come as codes, if they are stored so: Arrow does that outside lists alone."""
    is_text = column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
    return bool(is_text and column.path == column.name)


def _in_pages(file: Any, chunk: Mapping[int, Any]) -> tuple[int, int, int]:
    """Bytes and values of a column chunk, by the headers of its pages, which decoding goes by; and the bytes of the
    longest text in its dictionary. chunk: its ColumnMetaData."""
    begin, num_bytes, num_values, longest = chunk[9], 0, 0, 0
    at = min(begin, chunk.get(11) or begin)
    while at < min(begin, chunk.get(11) or begin) + chunk[7] and num_values < chunk[5]:
        file.seek(at)
        header, length = _thrift(file.read(_HEADER_BYTES), 0, _STRUCT)
        num_bytes += header[2]
        if header[1] == _DICTIONARY and chunk[1] == _BYTE_ARRAY:
            file.seek(at + length)
            longest = _longest(file.read(header[3]), _CODECS[chunk[4]], header[2])
        num_values += header[{0: 5, 3: 8}[header[1]]][1] if header[1] in (0, 3) else 0
        at += length + max(header[3], 0)
    return num_bytes, num_values, longest


def _longest(page: bytes, codec: str, num_bytes: int) -> int:
    """Bytes of the longest text in a dictionary's page."""
    at = longest = 0
    if codec:
        page = pa.Codec(codec).decompress(page, min(num_bytes, MOST_BYTES), asbytes=True)
    while at < len(page):
        length = int.from_bytes(page[at : at + 4], "little")
        at, longest = at + 4 + length, max(longest, length)
    return longest


def _thrift(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value in Thrift's compact protocol, a struct as its fields by number, and where it ends."""
    if kind in (1, 2, 3, 7):  # of no interest
        return None, at + {3: 1, 7: 8}.get(kind, 0)
    if kind in (4, 5, 6, 8):
        value, at = _varint(data, at)
        return (value >> 1 ^ -(value & 1), at) if kind != 8 else (None, at + value)
    if kind == 9:
        size, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if size == 15:
            size, at = _varint(data, at)
        values = []
        for _ in range(size):
            value, at = _thrift(data, at + (kind < 3), kind)
            values.append(value)
        return values, at
    if kind != _STRUCT:
        raise ValueError("Parquet has no such field")
    fields, number = dict[int, Any](), 0
    while head := data[at]:
        number, at = number + (head >> 4), at + 1
        if not head >> 4:
            number, at = _thrift(data, at, 4)
        fields[number], at = _thrift(data, at, head & 15)
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] > 127:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
    return value | data[at] << shift, at + 1


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
            stream.seek(stream.size() - 10)
            (length,) = struct.unpack("<i6x", stream.read(10))
            stream.seek(stream.size() - 10 - length)
            footer = FlatTable.root(stream.read(length))
            dictionaries, self._blocks = (list(footer.structs(number, "<qi4xq")) for number in (2, 3))
            for block in dictionaries:
                _check_message(file, stream, block)
        self.schema = self._reader(None).schema

    def _reader(self, fields: list[int] | None) -> Any:
        return ipc.open_file(self.source.open_file(), options=ipc.IpcReadOptions(included_fields=fields or []))

    @cached_property
    def sizes(self) -> Sequence[int]:
        reader = self._reader([0])
        return [reader.get_batch(group).num_rows for group in range(len(self._blocks))]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        reader = self._reader([self.schema.get_field_index(name) for name in columns] or [0])
        for group in range(first, len(self._blocks)):
            with self.source.open_file() as stream:
                _check_message(self.source, stream, self._blocks[group])
            yield reader.get_batch(group)


def _check_message(file: InputFile, stream: Any, block: tuple[int, ...]) -> None:
    """Raises ArrowInvalid if the buffers of a message take too much once they are decompressed.

    block: where it lies, and the bytes of its head and of its body.
    """
    at, head_bytes, body_bytes = block
    stream.seek(at)
    head = stream.read(head_bytes)
    message = FlatTable.root(head[8 if head.startswith(b"\xff" * 4) else 4 :])
    batch, num_bytes = message.inner(MESSAGE_HEADER), body_bytes
    if message.data[message.field(1)] == 2:  # a dictionary's batch is its field 1
        batch = batch.inner(1)
    if batch.field(BATCH_COMPRESSION):
        for offset, length in batch.structs(2, "<qq"):
            stream.seek(at + head_bytes + offset)
            num_bytes += struct.unpack("<q", stream.read(8))[0] if length else 0
    check_decoded(f"the message at byte {at:,}", num_bytes, file.num_bytes)


@dataclass(frozen=True)
class _OrcFile:
    """The whole file is a group: its stripes do not say how many rows they have."""

    source: InputFile
    file: orc.ORCFile

    @property
    def schema(self) -> pa.Schema:
        return self.file.schema

    @property
    def sizes(self) -> Sequence[int]:
        """The number of rows of each group."""
        return [self.file.nrows]

    def batches(self, first: int, columns: Sequence[str], num_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """Decodes a few rows at a time, and joins them."""
        file = pa.dataset.OrcFileFormat().make_fragment(self.source.path, self.source.filesystem)
        options: dict[str, Any] = {"batch_size": ORC_ROWS, "batch_readahead": 1, "use_threads": False}
        parts, num_bytes = list[pa.RecordBatch](), 0
        for batch in file.to_batches(columns=list(columns) or self.file.schema.names[:1], **options):
            parts.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > BATCH_BYTES:
                yield pa.concat_batches(parts)
                parts, num_bytes = [], 0
        if parts:
            yield pa.concat_batches(parts)


ColumnarFile: TypeAlias = _ParquetFile | _ArrowFile | _OrcFile
"""An open file whose rows are stored in groups, column by column. `batches` yields columns of the groups from number
`first` on: of Parquet `num_rows` at a time, or if it is None as many as BATCH_BYTES hold, so that a dictionary
serves many; text may be coded."""

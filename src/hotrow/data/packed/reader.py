"""Reads a packed dataset: memory-mapped columns, each block checked the first time it is read.

A folder is not trusted: names and links cannot lead out of it, sizes are compared before anything is mapped, checksums
before anything is parsed, and ids before anything is looked up. `loader` makes batches of the rows read here.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from torch import Tensor

from hotrow.base.door import is_there, open_file, read_file
from hotrow.base.files import crc32
from hotrow.base.records import MAX_COUNT, STRICT, Count, checked
from hotrow.data.packed.format import (
    MANIFEST,
    STATISTICS,
    Block,
    DatasetInfo,
    Part,
    Ragged,
    arrow_schema,
    check_values,
    columns_of,
    lengths_of,
    read_info,
)
from hotrow.data.packed.vocabulary import Vocabulary, open_counts
from hotrow.tables import TableConfig, Uniform

MAX_OPEN_PARTS = 64
"""Parts that stay mapped; each holds a file descriptor, and 1024 of those is a common limit."""
MALFORMED = (pa.ArrowException, OSError, EOFError, struct.error)
"""What Arrow raises when it reads a message that is not Arrow's."""
CURE = "restore the file from a copy or prepare the data again"
_HOURS = TypeAdapter(list[tuple[Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)], Count]], config=STRICT)


def _inside(folder: Path, *names: str) -> Path:
    """Returns the path of the file `folder/names...`. Raises ValueError if it is absent, or no file by itself."""
    path = folder.joinpath(*names)
    if not is_there(path, within=folder):
        raise ValueError(f"{path}: {MANIFEST} names this file and it is missing; {CURE}")
    return path


def _check_size(path: Path, num_bytes: int) -> None:
    if (size := path.stat().st_size) != num_bytes:
        raise ValueError(f"{path} has {size} bytes, {MANIFEST} says {num_bytes}: it was cut or altered; {CURE}")


class _MappedPart:
    """One mapped part. Size, header and footer are checked when it is made, blocks when they are read."""

    def __init__(self, path: Path, part: Part, schema: pa.Schema) -> None:
        self._path, self._part, self._schema = path, part, schema
        _check_size(path, part.num_bytes)
        with open_file(path) as file:
            self._bytes = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for index, what in ((0, "header"), (len(part.range_ends) - 1, "footer")):
            self._check_crc32(index, what)
        try:
            found = pa.ipc.read_schema(self._bytes.slice(8, part.range_ends[0] - 8))
        except MALFORMED as error:
            raise ValueError(f"{path}, header: not an Arrow file ({error}); {CURE}") from None
        if not found.equals(schema):
            raise ValueError(f"{path}: its columns are\n{found}\nbut {MANIFEST} describes\n{schema}\n{CURE}")

    def _span(self, index: int) -> tuple[int, int]:
        return (0, *self._part.range_ends)[index], self._part.range_ends[index]

    def _check_crc32(self, index: int, what: str) -> None:
        start, end = self._span(index)
        if zlib.crc32(memoryview(self._bytes)[start:end]) != self._part.range_crc32[index]:
            raise ValueError(
                f"{self._path}, {what} (bytes {start} to {end}): the checksum differs from {MANIFEST}, so these "
                f"bytes were altered; {CURE}"
            )

    def block(self, index: int, *, check: bool) -> pa.RecordBatch:
        """Returns block `index` without a copy; `check` compares its checksum, then validates its structure."""
        start, end = self._span(index + 1)
        if check:
            self._check_crc32(index + 1, f"block {index}")
        try:
            message = pa.ipc.read_message(self._bytes.slice(start, end - start))
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                raise pa.ArrowInvalid(f"an uncompressed record batch is expected, not a {message.type}")
            batch = pa.ipc.read_record_batch(message, self._schema)
            if check:
                batch.validate(full=True)
                if batch.num_rows != self._part.block_rows[index] or any(column.null_count for column in batch):
                    raise pa.ArrowInvalid(f"{batch.num_rows} rows, or nulls, where none may be")
        except MALFORMED as error:
            raise ValueError(f"{self._path}, block {index} (bytes {start} to {end}): {error}; {CURE}") from None
        return batch

    def where(self, index: int) -> str:
        """Returns how messages name block `index`."""
        start, end = self._span(index + 1)
        return f"{self._path}, block {index} (bytes {start} to {end})"


def _is_compressed(metadata: bytes) -> bool:
    """Returns whether a record batch message says that its buffers are compressed; such a batch is refused unread.

    The message is a flatbuffer: the root table's position is at 0; a table begins with the distance back to its vtable,
    which lists, from byte 4 on, where each field is (0: absent). Message.header is field 2, RecordBatch.compression
    field 3.
    """

    def field(table: int, number: int) -> int:
        vtable = table - int(struct.unpack_from("<i", metadata, table)[0])
        if 4 + 2 * number >= struct.unpack_from("<H", metadata, vtable)[0]:
            return 0
        offset = int(struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)[0])
        return table + offset if offset else 0

    root = int(struct.unpack_from("<I", metadata, 0)[0])
    header = field(root, 2)
    return field(header + int(struct.unpack_from("<I", metadata, header)[0]), 3) != 0


class Split:
    """One split of a packed dataset: its rows in blocks, in stored order. `block(i)` is read from the mapping without a
    copy. At most 64 parts stay mapped."""

    def __init__(self, folder: Path, name: str, info: DatasetInfo) -> None:
        self.name, self.info = name, info
        self._folder, self._split, self._schema = folder, info.splits[name], arrow_schema(info)
        self._mapped: OrderedDict[int, _MappedPart] = OrderedDict()
        parts = self._split.parts
        self.block_rows: NDArray[np.int64] = np.array([n for part in parts for n in part.block_rows], np.int64)
        """Number of rows in each block of all parts."""
        self._part_first_block = np.cumsum([0, *(len(part.block_rows) for part in parts)])
        self._verified = np.zeros(len(self.block_rows), np.bool_)

    @property
    def num_rows(self) -> int:
        return self._split.num_rows

    @property
    def num_blocks(self) -> int:
        return len(self.block_rows)

    def block(self, index: int) -> Block:
        """Returns the columns of block `index` as read-only views of the mapping. The first read checks the checksum,
        the structure, that labels are of their kind and dense values finite, and that ids are below num_embeddings.
        Raises ValueError, which names file, block and byte range, if a check fails."""
        part_index = int(np.searchsorted(self._part_first_block, index, "right")) - 1
        part, inner = self._part(part_index), index - int(self._part_first_block[part_index])
        check = not self._verified[index]
        block = self._columns(part.block(inner, check=check))
        if check:
            try:
                check_values(self.info, block)
            except ValueError as error:
                raise ValueError(f"{part.where(inner)}: {error}; {CURE}") from None
            self._verified[index] = True
        return block

    def check_sizes(self) -> None:
        """Checks by size alone that every part is there and whole."""
        for part in self._split.parts:
            _check_size(_inside(self._folder, self.name, part.file), part.num_bytes)

    def verify(self) -> None:
        """Checks every block that has not been checked yet."""
        for index in range(self.num_blocks):
            if not self._verified[index]:
                self.block(index)

    def _part(self, index: int) -> _MappedPart:
        if index not in self._mapped:
            part = self._split.parts[index]
            path = _inside(self._folder, self.name, part.file)
            self._mapped[index] = _MappedPart(path, part, self._schema)
            if len(self._mapped) > MAX_OPEN_PARTS:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(index)
        return self._mapped[index]

    def _columns(self, batch: pa.RecordBatch) -> Block:
        return columns_of(self.info, [_to_numpy(column) for column in batch.columns])


def _to_numpy(column: pa.Array) -> Any:
    if not isinstance(column, pa.LargeListArray):
        return column.to_numpy(zero_copy_only=True)
    splits: NDArray[np.int64] = column.offsets.to_numpy(zero_copy_only=True)
    return Ragged(column.values.to_numpy(zero_copy_only=True), splits)


class PackedDataset:
    """A packed dataset on disk, opened by `PackedDataset.open`; docs/format.md describes the folder. `info` is the
    manifest, `split("train")` holds rows, `counts(table)` are the training accesses per row."""

    def __init__(self, path: Path, info: DatasetInfo) -> None:
        self.path, self.info = path, info
        self._counts: dict[str, NDArray[np.unsignedinteger[Any]]] = {}
        self.splits: dict[str, Split] = {name: Split(path, name, info) for name in info.splits}

    @classmethod
    def open(
        cls, path: Path | str, *, verify: Literal["lazy", "sizes", "full"] = "lazy", hidden: Collection[str] = ()
    ) -> PackedDataset:
        """Opens the folder `path`.

        verify: "lazy" checks each block, and each file other than a part, when it is first read; "sizes" also checks
        now that every file is there in its full size; "full" checks everything now, which reads it all once. hidden:
        splits to leave out, as if the dataset had none of these names.

        Raises ValueError naming the file (and block and byte range) that is absent, cut, altered or not allowed.
        """
        if verify not in ("lazy", "sizes", "full"):
            raise ValueError(f"verify is {verify!r}; choose 'lazy', 'sizes' or 'full'")
        dataset = cls(Path(path), read_info(Path(path)))
        dataset.splits = {name: split for name, split in dataset.splits.items() if name not in hidden}
        if verify != "lazy":
            for split in dataset.splits.values():
                split.verify() if verify == "full" else split.check_sizes()
            for name in dataset.info.files:
                dataset._side_file(name, check="crc32" if verify == "full" else "size")
        return dataset

    @cached_property
    def checksum(self) -> str:
        """sha256 of the manifest, which holds the checksums of everything else: identifies the data in reports."""
        return hashlib.sha256(read_file(self.path / MANIFEST)).hexdigest()

    def split(self, name: str) -> Split:
        """Returns the split `name`. Raises ValueError listing the names if there is no such split."""
        if name not in self.splits:
            raise ValueError(f"{self.path} has no split {name!r}; its splits are {', '.join(self.splits)}")
        return self.splits[name]

    @property
    def has_counts(self) -> bool:
        return all(table.counts_file in self.info.files for table in self.info.tables)

    @property
    def is_ranked(self) -> bool:
        """Whether rows are numbered by falling accesses, which are known. Rows of later days are behind older ones."""
        return self.has_counts and all(table.parent is None for table in self.info.tables)

    def counts(self, table: str) -> NDArray[np.unsignedinteger[Any]]:
        """Returns the accesses per row of `table` in the training split, memory-mapped: uint32 or uint64."""
        if table not in self._counts:
            num_embeddings = self._table(table).num_embeddings
            path = self._side_file(self._table(table).counts_file, check="crc32")
            counts = open_counts(path)
            if len(counts) != num_embeddings:
                raise ValueError(f"{path} counts {len(counts)} rows where the table has {num_embeddings}; {CURE}")
            self._counts[table] = counts
        return self._counts[table]

    def statistics_path(self) -> Path:
        """Returns the path of the label's statistics by value, whose checksum is checked here."""
        return self._side_file(STATISTICS, check="crc32")

    def hours(self) -> list[tuple[int, int]]:
        """Returns the seconds since 1970 at which each hour, or day, of the training rows begins, and its first row;
        nothing if the dataset does not say so. Raises ValueError, which names the field, if that cannot be."""
        where = f"{self.path / MANIFEST}: summary.hours"
        hours = checked(_HOURS, self.info.summary.get("hours", []), where=where, cure=CURE)
        times, rows = ([*column] for column in zip(*hours, strict=True)) if hours else ([], [0])
        num_rows = self.split("train").num_rows if hours else 1
        if times != sorted({*times}) or rows != sorted({0, *rows}) or rows[-1] >= num_rows:
            raise ValueError(f"{where}: times and rows must rise, rows from 0 to below {num_rows}; {CURE}")
        return hours

    def rare_paths(self, table: str) -> tuple[Path, Path] | None:
        """Returns the paths of the ids of `table` that wait for a row, and of their counts, whose checksums are checked
        here; None if the dataset keeps none."""
        ids, counts = self._table(table).rare_files
        if ids not in self.info.files:
            return None
        return self._side_file(ids, check="crc32"), self._side_file(counts, check="crc32")

    def last_uses(self, table: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns the days on which rows of `table` were last used, and its ids that wait for a row last seen, mapped;
        None if the dataset keeps none."""
        used, seen = self._table(table).use_files
        if used not in self.info.files:
            return None
        return open_counts(self._side_file(used, check="crc32")), open_counts(self._side_file(seen, check="crc32"))

    def reborn(self, table: str) -> NDArray[Any]:
        """Returns the rows of `table` that stand for other ids than in the dataset before, rising, mapped. Raises
        ValueError, which names the file, if it has rows that the table does not have."""
        own = self._table(table)
        if own.reborn_file not in self.info.files:
            return np.empty(0, np.uint32)
        rows = open_counts(path := self._side_file(own.reborn_file, check="crc32"))
        if len(rows) and not (rows[0] > 0 and rows[-1] < own.num_embeddings and (rows[1:] > rows[:-1]).all()):
            raise ValueError(f"{path} must name rows 1 to {own.num_embeddings - 1}, rising; {CURE}")
        return rows

    def vocabulary_path(self, table: str) -> Path:
        """Returns the path of the table's vocabulary; its size is checked here, its content by its reader."""
        return self._side_file(self._table(table).vocabulary_file, check="size")

    def vocabulary(self, table: str) -> Vocabulary:
        """Returns the mapped vocabulary of `table`; its size and header are checked here, its content is not. Raises
        ValueError if there is none, or if it is not the one that the manifest names."""
        path, wanted = self.vocabulary_path(table), self._table(table).vocabulary
        found = Vocabulary.open(path, verify="header")
        if found.id != wanted:
            raise ValueError(f"{path} has id {found.id}, {MANIFEST} names {wanted}; {CURE}")
        return found

    def table_configs(self, embedding_dim: int | Mapping[str, int]) -> tuple[TableConfig, ...]:
        """Returns a config for each table; row 0 (rare and unseen ids) starts at zero. embedding_dim: columns of all
        tables, or of each by its name."""
        return tuple(
            TableConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=embedding_dim if isinstance(embedding_dim, int) else embedding_dim[table.name],
                feature_names=tuple(f.name for f in self.info.features if f.table == table.name),
                init=Uniform(zero_rows=1),
            )
            for table in self.info.tables
        )

    def list_lengths(self, features: Iterable[str]) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
        """Yields, for each block, its split, its first row there, and the number of ids of each row by feature. Reads
        every block once; the first reading verifies it."""
        places = {name: self.info.feature_names.index(name) for name in features}
        for name, split in self.splits.items():
            row = 0
            for block in map(split.block, range(split.num_blocks)):
                lengths = {own: torch.from_numpy(lengths_of(block.ids[place])) for own, place in places.items()}
                yield name, row, lengths
                row += block.num_rows

    def _table(self, name: str) -> Any:
        if name not in self.info.table_by_name:
            raise ValueError(f"{self.path} has no table {name!r}; its tables are {', '.join(self.info.table_by_name)}")
        return self.info.table_by_name[name]

    def _side_file(self, name: str, *, check: Literal["size", "crc32"]) -> Path:
        if name not in self.info.files:
            raise ValueError(f"{self.path}: {MANIFEST} lists no file {name}; this dataset was made without it")
        record, path = self.info.files[name], _inside(self.path, *name.split("/"))
        _check_size(path, record.num_bytes)
        if check == "crc32" and crc32(path) != record.crc32:
            raise ValueError(f"{path}: the checksum differs from {MANIFEST}, so the file was altered; {CURE}")
        return path

"""A delta: what changed between two exports of a model, as a folder that brings the earlier one forward.

    clicks-2/
      delta.json               its number, the exports before and after it, its tables, size and crc32 of its files
      files/...                files of the new export that differ, whole; its export.json is always among them
      rows/<table>.parquet     row, weight: rows that are new or differ in a bit; a weight has the bytes of its row
      ids/<table>.parquet      key, row, gone: ids that are new, and those that no longer have this row

An export is named by its checksum, the SHA-256 of its export.json, which holds the checksums of its other files. A
delta says which export it changes, and which came before that one; an export's chain.json says the same of the export.
So a delta that is too early, too late, of another branch or of another model is told from the next one. An export that
was brought forward has the bytes of a whole export. docs/export.md is the specification of both.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import check_folder, is_taken, is_there, make_folder, open_file, read_file
from hotrow.base.files import atomic_write, check_name, check_room, take_room
from hotrow.base.records import STRICT, Count, Document, short
from hotrow.base.version import __version__
from hotrow.data.chunk import keys_from_arrow, keys_to_arrow
from hotrow.data.native import hash_keys, stores_bytes
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.export import export as whole
from hotrow.export.dense import DENSE
from hotrow.export.export import CHAIN, DOCUMENT, EXPORT, FOLDERS, Description, copy_file, file_record, verify_files
from hotrow.run.checkpoint_files import FileRecord, Pieces, head_of

DELTA = "delta.json"
_FILES, _ROWS, _IDS = _PARTS = ("files", "rows", "ids")
IDS_AT_ONCE, BYTES_AT_ONCE = 1 << 16, 1 << 22
_CURE, _WHOLE = "copy the delta again, or export it again", "take a whole export"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}
"""Integers as wide as a number: rows that differ in a bit differ."""
_PLAIN = {"PLAIN", "RLE", "DELTA_BINARY_PACKED"}
"""Parquet's encodings of what a delta holds: bytes are not repeated by reference."""
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@record(frozen=True, config=STRICT)
class TableChange:
    """What a delta does to one table."""

    tensor: str
    num_embeddings: Count
    """Rows of the new table."""
    embedding_dim: Annotated[int, Field(ge=1, le=1 << 24)]
    """Columns of the tensor."""
    rows: Count = 0
    """Rows that are new or differ."""
    ids: Count = 0
    """Ids that are new or gone; one whose row changed is both."""
    accesses: Count = 0
    """Accesses in the header of the new vocabulary, if ids changed."""
    vocabulary: str = ""
    """Content id of the new vocabulary, if ids changed."""
    dtype: Literal["F32", "BF16", "U8"] = "F32"
    """The type of the tensor, as safetensors names it."""

    @property
    def shape(self) -> tuple[int, int]:
        """The new shape of the tensor."""
        return self.num_embeddings, self.embedding_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return _DTYPES[self.dtype].itemsize * self.embedding_dim

    def head(self) -> tuple[bytes, int]:
        """Returns the beginning of the table's file, and the bytes of its rows."""
        like: Any = SimpleNamespace(shape=self.shape, dtype=_DTYPES[self.dtype])
        return head_of([(self.tensor, like)], whole.ALIGNMENT)

    def schema(self) -> pa.Schema:
        """Returns the columns of the file of changed rows."""
        types = {"row": pa.int64(), "weight": pa.binary(self.row_bytes)}
        return pa.schema([pa.field(name, each, nullable=False) for name, each in types.items()])


@record(frozen=True, config=STRICT)
class Delta:
    """The content of delta.json."""

    created_by: str
    number: Count
    """Its place in the chain, from 1."""
    exports: tuple[Checksum, ...]
    """Checksums of the exports before it, the oldest first. It changes the last of them."""
    result: Checksum
    """Checksum of the new export."""
    tables: dict[str, TableChange]
    """By the names of their files, without suffix."""
    files: dict[str, FileRecord]
    """All files of the delta except delta.json itself."""

    def __post_init__(self) -> None:
        for name in (*self.tables, *chain(*(file.split("/") for file in self.files))):
            check_name(name, what="files: file name")
        if self.number < 1 or self.number != len(self.exports):
            raise ValueError(f"number is {self.number}; it must be that of the exports before it, {len(self.exports)}")


@record(frozen=True, config=STRICT)
class Chain:
    """The content of chain.json: checksums of the exports that an export was before, the oldest first, and its own."""

    exports: tuple[Checksum, ...]


_DOCUMENT = Document(Delta, marks={"hotrow_delta": 1}, cure=_CURE)
_CHAIN = Document(Chain, marks={"hotrow_chain": 1}, cure="restore it from a copy, or take a whole export")


# ---- making a delta


def write_delta(since: Path | str, out: Path | str, write: Callable[[whole.Whole], Description]) -> dict[str, Any]:
    """Writes the folder `out`: the changes from the export `since` to the one that `write` writes.

    Returns the content of delta.json, and `row_cost` of the new export. Raises ValueError if `since` is damaged, is of
    another model, or already is this export, and as `write_whole` does. Memory does not grow with tables or
    vocabularies.
    """
    since, doing = Path(since).resolve(), f"writing what changed since {since}"
    folders = (*_PARTS, *(f"{_FILES}/{name}" for name in FOLDERS))
    with whole.becoming(Path(out), "delta", (DELTA, *_PARTS), folders, doing=doing) as partial:
        whole.verify_export(since)
        before, exports = DOCUMENT.read(since / EXPORT), _chain_of(since)
        changes = Changes(partial, since, before)
        after, result = write(changes), checksum_of(changes.folder)
        if result == exports[-1]:
            raise ValueError(f"{since} already is this export; export a later step or another run")
        for name in before.files:
            if (same := changes.folder / name).exists() and filecmp.cmp(same, since / name, shallow=False):
                same.unlink()
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        delta = Delta(
            created_by=f"hotrow {__version__}",
            number=len(exports),
            exports=exports,
            result=result,
            tables=changes.tables,
            files={path.relative_to(partial).as_posix(): file_record(path) for path in files},
        )
        _DOCUMENT.write(partial / DELTA, delta)
    return {**_DOCUMENT.marks, **asdict(delta), "row_cost": after.row_cost}


class Changes(whole.Whole):
    """Writes a delta into the folder `delta`: what differs from `since` in tables and vocabularies, other files whole.

    before: export.json of `since`. tables: the differences found.
    """

    def __init__(self, delta: Path, since: Path, before: Description) -> None:
        super().__init__(delta / _FILES, before.form, onnx=DENSE in before.files)
        self.tables: dict[str, TableChange] = {}
        self._delta, self._since, self._before = delta, since, before

    def begin(self, description: Description, num_bytes: int) -> None:
        """Raises ValueError, which names the field, if `since` is of another model."""
        own, other = ({**each.model, "features": each.features} for each in (description, self._before))
        for name in own | other:
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"{self._since} is of another model: its {name} is {short(other.get(name))}, that of run "
                    f"{description.run} is {short(own.get(name))}; a delta has weights and ids alone: export it whole"
                )

    def table(self, name: str, tensor: str, rows: Pieces) -> FileRecord:
        """Writes the rows that differ; returns size and checksum of the whole file."""
        dtype: Any = next(each for each, own in _DTYPES.items() if own == rows.dtype)
        change = TableChange(tensor, rows.shape[0], rows.shape[1], dtype=dtype)
        (head, num_bytes), schema = change.head(), change.schema()
        checksum = zlib.crc32(head)

        def changed() -> Iterator[pa.Table]:
            nonlocal checksum
            start = 0
            with open_file(self._since / name) as file:
                file.seek(8 + int.from_bytes(file.read(8), "little"))
                for piece in rows.pieces():
                    new = rows.read(piece).contiguous().view(_BITS[rows.dtype]).numpy()
                    checksum = zlib.crc32(new.data, checksum)
                    old = np.frombuffer(file.read(new.nbytes), new.dtype).reshape(-1, change.embedding_dim)
                    differs = np.ones(len(new), np.bool_)  # so are rows beyond the end of the earlier table
                    differs[: len(old)] = (new[: len(old)] != old).any(1)
                    places, data = np.flatnonzero(differs), pa.py_buffer(new[differs])
                    weights = pa.FixedSizeBinaryArray.from_buffers(schema.field(1).type, len(places), [None, data])
                    yield pa.table([pa.array(start + places), weights], schema=schema)
                    start += len(new)

        found = _write(self._delta / _ROWS / _parquet(name), schema, changed())
        self.tables[Path(name).stem] = replace(change, rows=found)
        return FileRecord(len(head) + num_bytes, f"{checksum:08x}")

    def vocabulary(self, name: str, own: Vocabulary) -> FileRecord:
        """Writes the ids that differ, or the whole file if it holds other ids; returns size and checksum of the whole
        file."""
        if name not in self._before.files:
            return super().vocabulary(name, own)
        old = Vocabulary.open(self._since / name, verify="header")
        if (old.key_kind, old.header.hash_cap) != (own.key_kind, own.header.hash_cap):
            return super().vocabulary(name, own)
        stem = Path(name).name
        found = _write(self._delta / _IDS / f"{stem}.parquet", _ids_schema(own), _id_changes(old, own))
        if not found:  # rows may have come that no id has
            return super().vocabulary(name, own)
        accesses = own.header.num_accesses
        self.tables[stem] = replace(self.tables[stem], ids=found, accesses=accesses, vocabulary=own.id)
        return file_record(own.path)


def _id_changes(old: Vocabulary, new: Vocabulary) -> Iterator[pa.Table]:
    """Yields which ids of the vocabulary `new` are not in `old` with the same row, and which of `old` not in `new`."""
    before = _Rising(_entries(old))
    for table in chain(_entries(new), [None]):
        others = before.up_to(table)
        come, go = (others[:0], others) if table is None else (_without(table, others), _without(others, table))
        gone = np.arange(len(come) + len(go)) >= len(come)
        yield pa.concat_tables([come, go]).append_column("gone", pa.array(gone)).sort_by("hash")


def _without(table: pa.Table, others: pa.Table) -> pa.Table:
    """Returns the ids of `table` that are not among `others` with the same row. No two ids of one have the same row."""
    rows = table["row"].to_numpy(), others["row"].to_numpy()
    _, own, other = np.intersect1d(*rows, assume_unique=True, return_indices=True)
    stays = np.ones(len(table), np.bool_)
    stays[own[table["hash"].to_numpy()[own] == others["hash"].to_numpy()[other]]] = False
    return table.filter(pa.array(stays))


def _entries(own: Vocabulary) -> Iterator[pa.Table]:
    """Yields an empty table, and then key, row and hash of a vocabulary's ids, by rising hash, some at a time."""
    schema = _ids_schema(own).remove(2)
    yield _hashed(schema.empty_table())
    for keys, rows in own.entries():
        yield _hashed(pa.table([keys_to_arrow(keys), pa.array(rows.astype(np.int64))], schema=schema))


def _hashed(table: pa.Table) -> pa.Table:
    """Returns the ids of a table with the hashes of their keys."""
    return table.append_column("hash", pa.array(hash_keys(keys_from_arrow(table["key"].combine_chunks()))))


class _Rising:
    """Tables in which `hash` rises, read as far as is asked for."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables, self._left = tables, next(tables)

    def up_to(self, other: pa.Table | None) -> pa.Table:
        """Returns the rows not returned before with a hash up to that of the last row of `other`; if None, all."""
        if other is not None and not len(other):
            return self._left[:0]
        limit = 2**64 - 1 if other is None else other["hash"][-1].as_py()
        while not len(self._left) or self._left["hash"][-1].as_py() <= limit:
            if (more := next(self._tables, None)) is None:
                break
            self._left = pa.concat_tables([self._left, more])
        end = int(np.searchsorted(self._left["hash"].to_numpy(), np.uint64(limit), "right"))
        found, self._left = self._left[:end], self._left[end:]
        return found


# ---- files of a delta


def _parquet(name: str) -> str:
    """Returns the name of a table's files in a delta, from that of its file in an export."""
    return f"{Path(name).stem}.parquet"


def _ids_schema(own: Vocabulary) -> pa.Schema:
    """Returns the columns of the file of changed ids."""
    key = pa.large_binary() if stores_bytes(own.key_kind, own.header.hash_cap) else pa.int64()
    types = {"key": key, "row": pa.int64(), "gone": pa.bool_()}
    return pa.schema([pa.field(name, each, nullable=False) for name, each in types.items()])


def _at_once(schema: pa.Schema) -> int:
    """Returns how many rows of a file of a delta are in memory at a time."""
    return IDS_AT_ONCE if "key" in schema.names else max(1, BYTES_AT_ONCE // schema.field("weight").type.byte_width)


def _write(path: Path, schema: pa.Schema, tables: Iterator[pa.Table]) -> int:
    """Writes columns of tables as a Parquet file, which does not appear without rows; returns the number of rows."""
    rising = {field.name: "DELTA_BINARY_PACKED" for field in schema if pa.types.is_int64(field.type)}
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False, "column_encoding": rising}
    num_rows = 0
    with atomic_write(path) as file, pa.parquet.ParquetWriter(file, schema, **options) as writer:
        for table in tables:
            writer.write_table(table.select(schema.names).cast(schema), _at_once(schema))
            num_rows += len(table)
    if not num_rows:
        path.unlink()
    return num_rows


def _tables(path: Path, schema: pa.Schema, num_rows: int) -> Iterator[pa.Table]:
    """Yields an empty table, and then the rows of a Parquet file, if there is one, some at a time.

    Raises ValueError, which names the file, if it has other columns than `schema`, other than `num_rows` rows, or is
    not stored as `_write` stores it: it could take far more memory than its own size.
    """
    yield schema.empty_table()
    if is_there(path):
        with open_file(path) as file:
            found = pa.parquet.ParquetFile(file)
            if not found.schema_arrow.equals(schema):
                raise ValueError(f"{path} has other columns than {', '.join(schema.names)}; {_CURE}")
            groups = map(found.metadata.row_group, range(found.num_row_groups))
            columns = [group.column(place) for group in groups for place in range(group.num_columns)]
            is_plain = all(own.compression == "UNCOMPRESSED" and {*own.encodings} <= _PLAIN for own in columns)
            if found.metadata.num_rows != num_rows or not is_plain:
                raise ValueError(f"{path} does not hold {num_rows:,} rows as a delta stores them; {_CURE}")
            for batch in found.iter_batches(_at_once(schema)):
                yield pa.Table.from_batches([batch])


# ---- the chain


def checksum_of(export: Path) -> str:
    """Returns the SHA-256 of export.json, which names an export."""
    return sha256(read_file(export / EXPORT)).hexdigest()


def _chain_of(export: Path) -> tuple[str, ...]:
    """Returns the checksums of the exports that `export` was, the oldest first, and at last its own.

    Raises ValueError if its chain.json is of another export.
    """
    own = checksum_of(export)
    exports = _CHAIN.read(export / CHAIN).exports if is_taken(export / CHAIN) else (own,)
    if own not in exports[-1:]:
        raise ValueError(f"{export / CHAIN} is of another export; {_CHAIN.cure}")
    return exports


def _check_next(delta: Delta, path: Path, export: Path) -> tuple[str, ...]:
    """Returns the chain of `export`. Raises ValueError, which says what to do, if `delta` is not the next one."""
    what = f"{path} is delta {delta.number}"
    if not is_taken(export / EXPORT):
        raise ValueError(f"{export} is not an export: it has no {EXPORT}; pass a folder that `hotrow export` wrote")
    exports = _chain_of(export)
    if exports[-1] == delta.exports[-1]:
        return exports
    if delta.result in exports:
        raise ValueError(f"{what}, and {export} has it already: go on with the delta after {len(exports) - 1}")
    if exports[-1] in delta.exports:
        first = delta.exports.index(exports[-1]) + 1
        raise ValueError(f"{what}, and {export} lacks {first} to {delta.number - 1}: apply these first, in order")
    if common := sum(each in delta.exports for each in exports):
        cure = "bring a copy of the first export forward along one branch, or take a whole export"
        raise ValueError(f"{what} of another branch, which parted from {export} after delta {common - 1}: {cure}")
    cure = "apply it to the export that it was made for, or take a whole export"
    raise ValueError(f"{what} of another model or export, which {export} never was: {cure}")


# ---- applying a delta


def verify_delta(path: Path) -> int:
    """Compares every file of a delta with its size and crc32; returns the bytes read.

    Raises ValueError naming the first file that is missing, or whose size or checksum differs.
    """
    if not is_taken(path / DELTA):
        raise ValueError(f"{path} is not a delta, or half of one: it has no {DELTA}; {_CURE}")
    check_folder(path, files=(DELTA,), folders=_PARTS)
    delta = _DOCUMENT.read(path / DELTA)
    num_bytes = verify_files(path, delta.files, said_by=DELTA, cure=_CURE)
    if f"{_FILES}/{EXPORT}" not in delta.files or checksum_of(path / _FILES) != delta.result:
        raise ValueError(f"{path / DELTA}: result is not the checksum of {_FILES}/{EXPORT}; {_CURE}")
    return num_bytes


def apply_delta(export: Path | str, delta: Path | str, out: Path | str) -> dict[str, Any]:
    """Makes the folder `out` of an export and its next delta, with the bytes of the whole export of that day.

    `export` stays as it is, and both share the files that are the same, by hard links. `out` is compared with its
    checksums before it appears; after a kill the same call begins again. Returns the content of delta.json. Raises
    ValueError, which says what to do, if the delta is not the next one or a file is damaged.
    """
    export, path = Path(export).resolve(), Path(delta)
    verify_delta(path)
    found = _DOCUMENT.read(path / DELTA)
    check_folder(export, folders=FOLDERS)
    exports = _check_next(found, path, export)
    with whole.becoming(Path(out), "export", whole.OWN_NAMES, FOLDERS, doing=f"applying {path}") as partial:
        whole.verify_export(export, unread=("tables/",))
        with _explaining(path):
            following = _Following(export, path, found)
            check_room(partial, following.num_bytes, what="export", cure="choose another place")
            for name, wanted in following.after.files.items():
                if not following.make(name, partial / name) or file_record(partial / name) != wanted:
                    what = f"{export / name} comes out otherwise than in the new export"
                    raise ValueError(f"{what}; {_CURE}, or {_WHOLE}")
        _CHAIN.write(partial / CHAIN, Chain((*exports, found.result)))
        copy_file(path / _FILES / EXPORT, partial / EXPORT)
    return {**_DOCUMENT.marks, **asdict(found)}


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Makes an error of what no delta holds one that names the delta and the cure."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError) as error:
        if isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # Arrow's errors of damaged bytes have no number
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} holds what no delta holds ({type(error).__name__}: {said}); {_CURE}") from None


class _Following:
    """The files of the export that follows `export` by the delta in `path`."""

    def __init__(self, export: Path, path: Path, delta: Delta) -> None:
        self._export, self._path, self._delta = export, path, delta
        self.after = DOCUMENT.read(path / _FILES / EXPORT)
        self._tables = {f"tables/{stem}.safetensors": change for stem, change in delta.tables.items()}
        self._vocabularies: dict[Any, Any] = {
            table["vocabulary"]["file"]: table  # type: ignore[index, call-overload]
            for table in self.after.tables
            if table.get("vocabulary")
        }
        self._changing = [*filter(self._changes, self._tables)]
        self.num_bytes = sum(self.after.files[name].num_bytes for name in self._changing)
        """Bytes of the tables that change."""

    def _changes(self, name: str) -> bool:
        """Returns whether a table changes. Raises ValueError if it is not as the new export says, or grows by rows that
        the delta does not have: a few words must not fill the disk."""
        change, stem, wanted = self._tables[name], Path(name).stem, self.after.files.get(name)
        head, num_bytes = change.head()
        if wanted is None or len(head) + num_bytes != wanted.num_bytes:
            raise ValueError(f"{self._path / DELTA}: tables.{stem} is not as its {EXPORT} says; {_CURE}")
        with open_file(self._export / name) as file:
            if 8 + int.from_bytes(file.read(8), "little") != len(head):
                raise ValueError(f"{self._export / name}: its rows are not at byte {len(head)}; {_WHOLE}")
            grows = wanted.num_bytes - os.fstat(file.fileno()).st_size
        sent, rows = f"{_ROWS}/{_parquet(name)}", change.rows * change.row_bytes
        if not grows <= rows <= (self._delta.files[sent].num_bytes if sent in self._delta.files else 0):
            raise ValueError(f"{self._path / DELTA}: tables.{stem} has other rows than {sent}; {_CURE}")
        return bool(rows or grows)

    def make(self, name: str, out: Path) -> bool:
        """Makes a file as `out`; returns whether it may be the one that is meant. One that stays is a hard link."""
        own, sent = self._export / name, self._path / _FILES / name
        ids = self._path / _IDS / f"{out.name}.parquet"
        make_folder(out.parent)
        if name in self._vocabularies and is_there(ids):
            return _merge(own, out, ids, self._vocabularies[name], self._delta.tables[out.name])
        if is_there(sent):
            copy_file(sent, out)
        elif not is_there(own):
            return False
        elif name in self._changing:
            shutil.copyfile(own, out)
            _change_table(out, self._path / _ROWS / _parquet(name), self._tables[name])
        else:
            try:
                os.link(own, out)
            except OSError:  # another disk, or a file of another user
                copy_file(own, out)
        return True


def _merge(own: Path, out: Path, ids: Path, table: Any, change: TableChange) -> bool:
    """Writes the vocabulary `own` as `out`, without the ids that are gone and with those that are new; returns whether
    it is the one that the delta names: a checksum of bytes that hold their own does not see all of them."""
    old, about = Vocabulary.open(own), table["vocabulary"]
    num_rows, num_keys, missing_row = change.num_embeddings, int(about["num_keys"]), int(about["missing_row"])
    if change.ids > old.num_keys + num_rows or not all(0 <= n <= num_rows for n in (num_keys, missing_row)):
        return False
    summary = TableSummary(num_rows, num_keys, missing_row, num_keys, change.accesses)
    stored = stores_bytes(old.key_kind, old.header.hash_cap)
    ids_of = (lambda each: keys_from_arrow(each["key"].combine_chunks())) if stored else (lambda _: None)
    merged = (each for each in _merged(old, ids, change.ids) if len(each))
    pieces = (Entries(each["hash"].to_numpy(), each["row"].to_numpy(), ids_of(each)) for each in merged)
    write_vocabulary(out, pieces, summary, key_kind=old.key_kind, hash_cap=old.header.hash_cap)
    return Vocabulary.open(out, verify="header").id == change.vocabulary


def _merged(own: Vocabulary, ids: Path, num_ids: int) -> Iterator[pa.Table]:
    """Yields the ids of a vocabulary without those that are gone and with those that are new, in their order."""
    changes = _Rising(map(_hashed, _tables(ids, _ids_schema(own), num_ids)))
    for table in chain(_entries(own), [None]):
        found = changes.up_to(table)
        come, gone = (found.filter(pa.array(found["gone"].to_numpy() == which)) for which in (False, True))
        come = come.drop_columns("gone")
        both = come if table is None else pa.concat_tables([_without(table, gone), come])
        yield both.sort_by([("hash", "ascending"), ("key", "ascending")])


def _change_table(path: Path, rows: Path, change: TableChange) -> None:
    """Gives the table in `path`, a copy, its new size and rows."""
    (head, num_bytes), row_bytes = change.head(), change.row_bytes
    with open_file(path, "r+b", buffering=0) as file:
        file.write(head)
        file.truncate(len(head) + num_bytes)
        take_room(file, len(head) + num_bytes)  # a full disk is an error before a row changes
        for batch in (batch for found in _tables(rows, change.schema(), change.rows) for batch in found.to_batches()):
            numbers, data = batch["row"].to_numpy(), batch["weight"]
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < change.num_embeddings:
                raise ValueError(f"{rows} names a row that {change.tensor} does not have; {_CURE}")
            weights = memoryview(data.buffers()[1])[data.offset * row_bytes :]
            runs = [*np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist(), len(numbers)]
            # Written, not mapped: a mapping that many threads share interrupts all of them at each of its dirty pages.
            for row, (start, end) in zip(numbers[runs[:-1]].tolist(), pairwise(runs), strict=True):
                new = weights[start * row_bytes : end * row_bytes]
                if os.pwrite(file.fileno(), new, len(head) + row * row_bytes) < len(new):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())

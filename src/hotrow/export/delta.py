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
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import check_folder, is_taken, is_there, make_folder, open_file, read_file
from hotrow.base.files import (
    PARTIAL_SUFFIX,
    atomic_write,
    check_name,
    check_room,
    claim,
    explain_full_disk,
    sync_folder,
    take_room,
)
from hotrow.base.records import STRICT, Count, Document, short
from hotrow.base.version import __version__
from hotrow.data.chunk import keys_from_arrow, keys_to_arrow
from hotrow.data.native import hash_keys, stores_bytes
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.data.sources.columnar import open_columnar, pieces_of
from hotrow.data.sources.inputs import InputFile
from hotrow.data.sources.tabular import naming
from hotrow.export import export as whole
from hotrow.export.dense import DENSE
from hotrow.export.export import CHAIN, DOCUMENT, EXPORT, FOLDERS, Description, copy_file, file_record, verify_files
from hotrow.run.checkpoint_files import FileRecord, Pieces, head_of

DELTA = "delta.json"
_FILES, _ROWS, _IDS = _PARTS = ("files", "rows", "ids")
IDS_AT_ONCE, BYTES_AT_ONCE = 1 << 16, 1 << 22
_CURE = "copy the delta again, or export it again"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.uint8: torch.uint8}
"""Integers as wide as a number: rows that differ in a bit differ."""
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@record(frozen=True, config=STRICT)
class TableChange:
    """What a delta does to one table."""

    tensor: str
    num_embeddings: Count
    """In the new export."""
    embedding_dim: Annotated[int, Field(ge=1, le=1 << 24)]
    """Columns of the tensor."""
    rows: Count = 0
    """Rows that are new or differ."""
    ids: Count = 0
    """Ids that are new or gone; one whose row is another is both."""
    accesses: Count = 0
    """What the header of the new vocabulary counts, if ids changed."""
    vocabulary: str = ""
    """Content id of the new vocabulary, if ids changed."""
    dtype: Literal["F32", "BF16", "U8"] = "F32"
    """The type of the tensor, as safetensors names it."""

    @property
    def shape(self) -> tuple[int, int]:
        """The new shape of the tensor."""
        return self.num_embeddings, self.embedding_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of a number."""
        return _DTYPES[self.dtype].itemsize

    def head(self) -> tuple[bytes, int]:
        """Returns the beginning of the table's file, and the bytes of its rows."""
        like: Any = SimpleNamespace(shape=self.shape, dtype=_DTYPES[self.dtype])
        return head_of([(self.tensor, like)], whole.ALIGNMENT)

    def schema(self) -> pa.Schema:
        """Returns the columns of the file of changed rows."""
        types = {"row": pa.int64(), "weight": pa.binary(self.num_bytes * self.embedding_dim)}
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
    removed: tuple[str, ...]
    """Files that the new export does not have."""
    files: dict[str, FileRecord]
    """All files of the delta except delta.json itself."""

    def __post_init__(self) -> None:
        for name in (*self.tables, *chain(*(file.split("/") for file in (*self.files, *self.removed)))):
            check_name(name, what="files: file name")
        if self.number < 1 or self.number != len(self.exports):
            raise ValueError(f"number is {self.number}; it must be that of the exports before it, {len(self.exports)}")


@record(frozen=True, config=STRICT)
class Chain:
    """The content of chain.json: checksums of the exports that an export was, the oldest first, and its own."""

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
    since, doing = Path(since), f"writing what changed since {since}"
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
            removed=tuple(sorted(before.files.keys() - after.files.keys())),
            files={path.relative_to(partial).as_posix(): file_record(path) for path in files},
        )
        _DOCUMENT.write(partial / DELTA, delta)
    return {**_DOCUMENT.marks, **asdict(delta), "row_cost": after.row_cost}


class Changes(whole.Whole):
    """Writes a delta into the folder `delta`: of tables and vocabularies what differs from `since`, other files whole.

    before: what export.json says of `since`. tables: what was found to differ.
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
        """Writes the ids that differ, or the file if it is of other ids; returns size and checksum of the whole
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


def _tables(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yields an empty table, and then the rows of a Parquet file, if there is one, some at a time.

    Raises ValueError, which names the file, if it has other columns than `schema`.
    """
    yield schema.empty_table()
    if is_there(path):
        file = InputFile(str(path), str(path.absolute()), pa.fs.LocalFileSystem(), path.stat().st_size, 0)
        with naming(file):
            found = open_columnar(file)
            if not found.schema.equals(schema):
                raise ValueError(f"{path} has other columns than {', '.join(schema.names)}; {_CURE}")
            for batch in pieces_of(found, 0, schema.names, _at_once(schema)):
                yield pa.Table.from_batches([batch]).cast(schema)


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
    # chain.json is written before anything changes, and export.json after everything has.
    if own not in exports[-2:]:
        raise ValueError(f"{export / CHAIN} is of another export; {_CHAIN.cure}")
    return exports if own == exports[-1] else exports[:-1]


def _check_next(delta: Delta, path: Path, export: Path) -> tuple[str, ...]:
    """Returns the chain of `export`. Raises ValueError, which says what to do, if `delta` is not the next one."""
    what = f"{path} is delta {delta.number}"
    if not is_taken(export / EXPORT):
        if not is_taken(export / CHAIN):
            raise ValueError(f"{export} is not an export: it has no {EXPORT}; pass a folder that `hotrow export` wrote")
        exports = _CHAIN.read(export / CHAIN).exports
        if exports[-2:] != (delta.exports[-1], delta.result):
            number = len(exports) - 1
            raise ValueError(
                f"{what}, and delta {number} of this export was applied in half: apply that one again first"
            )
        return exports[:-1]
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


def read_delta(path: Path) -> Delta:
    """Returns what delta.json says. Raises ValueError if there is none, or if it was altered."""
    if not is_taken(path / DELTA):
        raise ValueError(f"{path} is not a delta, or half of one: it has no {DELTA}; {_CURE}")
    return _DOCUMENT.read(path / DELTA)


def verify_delta(path: Path) -> int:
    """Compares every file of a delta with its size and crc32; returns the bytes read.

    Raises ValueError naming the first file that is missing, or whose size or checksum differs.
    """
    check_folder(path, files=(DELTA,), folders=_PARTS)
    delta = read_delta(path)
    num_bytes = verify_files(path, delta.files, said_by=DELTA, cure=_CURE)
    if f"{_FILES}/{EXPORT}" not in delta.files or checksum_of(path / _FILES) != delta.result:
        raise ValueError(f"{path / DELTA}: result is not the checksum of {_FILES}/{EXPORT}; {_CURE}")
    return num_bytes


def is_applied(export: Path, delta: Path) -> bool:
    """Returns whether `export` is the one that the delta in the folder `delta` leads to."""
    return is_taken(export / EXPORT) and checksum_of(export) == _DOCUMENT.read(delta / DELTA).result


def apply_delta(export: Path | str, delta: Path | str, out: Path | str | None = None) -> dict[str, Any]:
    """Brings the folder `export` forward by `delta`, after which it has the bytes of the whole export of that day.

    out: a folder to make of both; `export` then stays as it is. Returns the content of delta.json. Both folders are
    verified first; without `out`, tables only by their sizes, since reading them takes longer than changing them. If a
    call is interrupted, the earlier export is there, or one that is refused until the same call is made again. Raises
    ValueError, which says what to do, if the delta is not the next one or a file is damaged.
    """
    export, path = Path(export), Path(delta)
    check_folder(export, folders=FOLDERS)
    verify_delta(path)
    found = read_delta(path)
    doing, kept = f"applying {path}", f"{export} is as it was, or refused until the delta is applied."
    with claim(export) as is_ours, explain_full_disk(export, doing, kept):
        if is_ours is False:
            raise ValueError(f"another process is applying a delta to {export}; wait for it and try again")
        exports, is_half = _check_next(found, path, export), not is_taken(export / EXPORT)
        if out is None:
            if not is_half:
                whole.verify_export(export, unread=("tables/",))
            _bring_forward(export, path, found, exports, is_half=is_half)
        else:
            with whole.becoming(Path(out), "export", whole.OWN_NAMES, FOLDERS, doing=doing) as partial:
                check_room(partial, whole.verify_export(export), what="export", cure="choose another place")
                for name in (*DOCUMENT.read(export / EXPORT).files, EXPORT):
                    shutil.copyfile(export / name, partial / name)
                _bring_forward(partial, path, found, exports, is_half=False)
    return {**_DOCUMENT.marks, **asdict(found)}


def _bring_forward(folder: Path, path: Path, delta: Delta, exports: tuple[str, ...], *, is_half: bool) -> None:
    """Changes the export in `folder`. Whatever can be refused is made beside its place first; from then on, the same
    call made again ends what this one began.

    is_half: an earlier call began.
    """
    after = DOCUMENT.read(path / _FILES / EXPORT)
    tables = {f"tables/{stem}.safetensors": change for stem, change in delta.tables.items()}
    for name, change in tables.items():
        head, num_bytes = change.head()
        if name not in after.files or len(head) + num_bytes != after.files[name].num_bytes:
            raise ValueError(f"{path / DELTA}: tables.{Path(name).stem} is not as its {EXPORT} says; {_CURE}")
        with open_file(folder / name) as file:
            if 8 + int.from_bytes(file.read(8), "little") != len(head):
                raise ValueError(f"{folder / name}: its rows are not at byte {len(head)}; take a whole export")
    try:
        staged = [name for name in after.files if _stage(folder, path, name, after, delta, is_half=is_half)]
    except ValueError:  # refused: nothing stays
        for name in after.files:
            _beside(folder / name).unlink(missing_ok=True)
        raise
    _CHAIN.write(folder / CHAIN, Chain((*exports, delta.result)))
    (folder / EXPORT).unlink(missing_ok=True)  # so that nobody reads it
    sync_folder(folder)
    for name, change in tables.items():
        _change_table(folder / name, path / _ROWS / _parquet(name), change)
    for name in staged:
        _beside(folder / name).replace(folder / name)
    for name in delta.removed:
        (folder / name).unlink(missing_ok=True)
    for each in (folder, *(folder / name for name in FOLDERS)):
        make_folder(each)
        sync_folder(each)
    if is_half:  # what there was could not be verified before
        verify_files(folder, after.files, said_by=EXPORT, cure="take a whole export")
    copy_file(path / _FILES / EXPORT, folder / EXPORT)
    whole.give_away(folder, (*FOLDERS, *after.files, CHAIN, EXPORT))  # what else is there is the user's


def _beside(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _stage(folder: Path, path: Path, name: str, after: Description, delta: Delta, *, is_half: bool) -> bool:
    """Makes a file of the new export beside its place; returns whether it changes. Tables change in their place.

    Raises ValueError if it comes out otherwise than it should.
    """
    own, source, wanted = folder / name, path / _FILES / name, after.files[name]
    changed = {table["vocabulary"]["file"]: table for table in after.tables if table.get("vocabulary")}  # type: ignore[index, call-overload]
    ids = path / _IDS / f"{own.name}.parquet"
    is_merged = name in changed and is_there(ids)
    if not (is_merged or is_there(source)):
        return False
    # A checksum of bytes that hold their own, as a vocabulary's header does, does not see all of them.
    if is_half and is_there(own):
        if is_merged and Vocabulary.open(own, verify="header").id == delta.tables[own.name].vocabulary:
            return False
        if not is_merged and filecmp.cmp(own, source, shallow=False):
            return False
    make_folder(own.parent)
    fits = True
    if is_merged:
        fits = _merge(own, ids, changed[name], delta.tables[own.name])
    else:
        copy_file(source, _beside(own))
    if not fits or file_record(_beside(own)) != wanted:
        raise ValueError(f"{own} comes out otherwise than in the new export; {_CURE}, or take a whole export")
    return True


def _merge(path: Path, ids: Path, table: Any, change: TableChange) -> bool:
    """Writes the vocabulary in `path` beside it, without the ids that are gone and with those that are new; returns
    whether it is the one that the delta names."""
    own, about = Vocabulary.open(path), table["vocabulary"]
    num_keys, missing_row = int(about["num_keys"]), int(about["missing_row"])
    summary = TableSummary(int(table["num_embeddings"]), num_keys, missing_row, num_keys, change.accesses)
    stored = stores_bytes(own.key_kind, own.header.hash_cap)
    ids_of = (lambda each: keys_from_arrow(each["key"].combine_chunks())) if stored else (lambda _: None)
    merged = (each for each in _merged(own, ids) if len(each))
    pieces = (Entries(each["hash"].to_numpy(), each["row"].to_numpy(), ids_of(each)) for each in merged)
    write_vocabulary(_beside(path), pieces, summary, key_kind=own.key_kind, hash_cap=own.header.hash_cap)
    return Vocabulary.open(_beside(path), verify="header").id == change.vocabulary


def _merged(own: Vocabulary, ids: Path) -> Iterator[pa.Table]:
    """Yields the ids of a vocabulary without those that are gone and with those that are new, in their order."""
    changes = _Rising(map(_hashed, _tables(ids, _ids_schema(own))))
    for table in chain(_entries(own), [None]):
        found = changes.up_to(table)
        come, gone = (found.filter(pa.array(found["gone"].to_numpy() == which)) for which in (False, True))
        come = come.drop_columns("gone")
        both = come if table is None else pa.concat_tables([_without(table, gone), come])
        yield both.sort_by([("hash", "ascending"), ("key", "ascending")])


def _change_table(path: Path, rows: Path, change: TableChange) -> None:
    """Gives the table in `path` its new size and rows, in place. A call that is made again ends in the same bytes."""
    (head, num_bytes), row_bytes = change.head(), change.num_bytes * change.embedding_dim
    with open_file(path, "r+b", buffering=0) as file:
        file.write(head)
        file.truncate(len(head) + num_bytes)
        take_room(file, len(head) + num_bytes)  # a full disk is an error before a row changes
        for batch in (batch for found in _tables(rows, change.schema()) for batch in found.to_batches()):
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

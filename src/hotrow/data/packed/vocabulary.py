"""Vocabularies map raw ids to rows of a table: here they are built from counts, opened, searched and loaded.

    row 0            rare and unseen ids
    row 1, 2, ...    ids seen at least min_count times in the training rows, by falling count, ties by first appearance;
                     in a chain of days a row stands for no id after its id has expired

A missing value is ranked like any other id, so it has a row of its own if it occurs often enough. A vocabulary is one
file, sorted by key hash and searchable through mmap; a second file holds the accesses per row. docs/vocabulary.md
specifies both. prepare/spill.py counts under a memory budget; prepare/encoder.py encodes with a vocabulary that is
larger than memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import open_file
from hotrow.base.files import PARTIAL_SUFFIX, atomic_write
from hotrow.data.chunk import KEY_KINDS, KeyKind, Keys
from hotrow.data.native import Table, backend, hash_keys, lookup_rows, open_runs, stores_bytes

MAGIC = b"hotrowvb"
COUNTS_MAGIC = b"hotrowct"
VERSION = 1
COUNTS_VERSION = 1
BYTE_ORDER = 0x01020304
ALIGNMENT = 64
"""Sections start at multiples of this: a cache line, and a multiple of every element's size."""
READ_BYTES = 1 << 22

_MIX_FACTORS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
"""The factors of `mix` in docs/vocabulary.md."""
_HEADER = struct.Struct("<8s6I5Q")
_NUMBERS = (
    "index_bytes",
    "directory_bits",
    "num_keys",
    "num_embeddings",
    "missing_row",
    "hash_cap",
    "num_accesses",
)
_SECTION = struct.Struct("<QQI4x")
_CRC = struct.Struct("<I")
_COUNTS_HEADER = struct.Struct("<8s4IQI")
SECTIONS = ("directory", "hashes", "rows", "key_offsets", "key_bytes")
HEADER_BYTES = 256
COUNTS_HEADER_BYTES = 64


@dataclass(frozen=True)
class Section:
    """One array in a vocabulary file."""

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """The fixed first bytes of a vocabulary file."""

    key_kind: KeyKind
    index_bytes: int
    """Bytes of an element of directory and rows: 4, or 8 if 4 cannot count the rows."""
    directory_bits: int
    num_keys: int
    num_embeddings: int
    missing_row: int
    hash_cap: int
    """If not 0, raw ids are counted modulo this."""
    num_accesses: int
    """Training occurrences counted, missing values included."""
    sections: tuple[Section, ...]

    @property
    def num_free(self) -> int:
        """Number of rows that stand for no id."""
        return self.num_embeddings - self.num_keys - 1 - (self.missing_row != 0)

    @property
    def num_bytes(self) -> int:
        return max(section.offset + section.num_bytes for section in self.sections)

    def pack(self) -> bytes:
        """Returns the header as bytes, its checksum last."""
        numbers = (getattr(self, name) for name in _NUMBERS)
        raw = _HEADER.pack(MAGIC, VERSION, BYTE_ORDER, HEADER_BYTES, KEY_KINDS.index(self.key_kind), *numbers)
        raw += b"".join(_SECTION.pack(s.offset, s.num_bytes, s.crc32) for s in self.sections)
        raw = raw.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return raw + _CRC.pack(zlib.crc32(raw))

    @staticmethod
    def unpack(raw: bytes, path: Path) -> Header:
        """Reads the header in `raw`. Raises ValueError naming `path` if it is not a header or contradicts itself."""
        if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
            raise _damaged(path, "it does not begin as a vocabulary does")
        if zlib.crc32(raw[: HEADER_BYTES - _CRC.size]) != _CRC.unpack_from(raw, HEADER_BYTES - _CRC.size)[0]:
            raise _damaged(path, f"its header (bytes 0 to {HEADER_BYTES - 1}) does not match its checksum")
        _, version, byte_order, header_bytes, kind, *numbers = _HEADER.unpack_from(raw)
        if version != VERSION or byte_order != BYTE_ORDER or header_bytes != HEADER_BYTES:
            raise ValueError(f"{path}: vocabulary format version is {version}; this hotrow reads {VERSION}")
        at = range(_HEADER.size, _HEADER.size + _SECTION.size * len(SECTIONS), _SECTION.size)
        sections = tuple(Section(*_SECTION.unpack_from(raw, offset)) for offset in at)
        if kind >= len(KEY_KINDS):
            raise _damaged(path, f"its key kind is {kind}")
        named = dict(zip(_NUMBERS, numbers, strict=True))
        header = Header(key_kind=KEY_KINDS[kind], sections=sections, **named)
        if header.index_bytes not in (4, 8) or not 1 <= header.directory_bits <= 40 or not header._fits():
            raise _damaged(path, "its header contradicts itself")
        return header

    def _fits(self) -> bool:
        """Returns whether the sections have the sizes that the header's numbers say, in order, without overlap."""
        stored = stores_bytes(self.key_kind, self.hash_cap)
        sizes = section_bytes(self.num_keys, self.directory_bits, self.index_bytes, stores_bytes=stored)
        end = HEADER_BYTES
        for section, num_bytes in zip(self.sections, sizes, strict=True):
            if (
                section.offset < end
                or section.offset % ALIGNMENT
                or (num_bytes is not None and section.num_bytes != num_bytes)
            ):
                return False
            end = section.offset + section.num_bytes
        return self.missing_row < self.num_embeddings and self.num_free >= 0


def section_bytes(
    num_keys: int, directory_bits: int, index_bytes: int, *, stores_bytes: bool
) -> tuple[int | None, ...]:
    """Returns the size of each section in bytes; None for the last if only its content decides."""
    keys = (8 * (num_keys + 1), None) if stores_bytes else (0, 0)
    return ((2**directory_bits + 1) * index_bytes, 8 * num_keys, index_bytes * num_keys, *keys)


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: truncated or altered: {what}; restore the file or prepare the data again")


@dataclass(frozen=True)
class TableSummary:
    """What preparation did with a table's raw ids."""

    num_embeddings: int
    """Rows of the table: row 0, a row per key, the missing value's row if it has one, and rows that stand for no id."""
    num_keys: int
    missing_row: int
    """0 if the missing value has no row of its own."""
    num_distinct: int
    """Distinct ids seen in training rows; num_distinct - num_keys of them share row 0."""
    num_accesses: int
    """Occurrences counted in training rows, missing values included."""


def build_vocabulary(
    runs: Sequence[Path],
    vocab_path: Path,
    counts_path: Path,
    *,
    key_kind: KeyKind,
    hash_cap: int = 0,
    min_count: int = 1,
    memory_bytes: int,
    tmp_dir: Path,
) -> TableSummary:
    """Ranks the ids counted in `runs` and writes the vocabulary and the accesses per row, each whole or not at all.

    min_count: ids seen fewer times share row 0. memory_bytes: what the merge and the sorts may hold; the rest goes to
    unnamed temporary files in tmp_dir. The files depend neither on memory_bytes and tmp_dir nor on how counts are
    divided into runs.

    Raises ValueError for numbers out of range or a damaged run, OSError if a file cannot be written.
    """
    for name, value, least in (("min_count", min_count, 1), ("hash_cap", hash_cap, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    stored = stores_bytes(key_kind, hash_cap)
    builder = backend().VocabularyBuilder(stored, str(tmp_dir), max(memory_bytes, 1 << 20))
    with open_runs(runs) as fds, atomic_write(vocab_path) as vocab, atomic_write(counts_path) as counts:
        builder.merge(fds, min_count)
        wide_counts = builder.num_accesses >= 2**32
        builder.rank(0, counts.fileno(), COUNTS_HEADER_BYTES, wide_counts)
        _write_counts_header(counts, counts_path, builder.num_rows, 8 if wide_counts else 4)
        summary = TableSummary(
            builder.num_rows, builder.num_keys, builder.missing_row, builder.num_distinct, builder.num_accesses
        )

        def write(directory_bits: int, index_bytes: int, offsets: list[int]) -> list[tuple[int, int]]:
            written: list[tuple[int, int]] = builder.write(vocab.fileno(), directory_bits, index_bytes == 8, offsets)
            return written

        _write_sections(vocab, summary, key_kind, hash_cap, write)
    return summary


class Entries(NamedTuple):
    """Keys with their rows, in the order of a vocabulary file: by hash, equal hashes by the keys' bytes."""

    hashes: NDArray[np.uint64]
    """[n]."""
    rows: NDArray[np.int64]
    """[n]."""
    strings: Keys | None
    """The keys [n], if a vocabulary must store them."""


def write_vocabulary(
    path: Path, pieces: Iterable[Entries], summary: TableSummary, *, key_kind: KeyKind, hash_cap: int = 0
) -> None:
    """Writes the keys of all `pieces`, none of them empty, as a vocabulary, whole or not at all. pieces: in the order
    of the file. summary: how many keys and rows there are. OSError passes through."""
    write = partial(_write_pieces, is_stored=stores_bytes(key_kind, hash_cap))
    with atomic_write(path) as file:
        _write_sections(file, summary, key_kind, hash_cap, partial(write, file, pieces))


def _write_pieces(
    file: BinaryIO,
    pieces: Iterable[Entries],
    directory_bits: int,
    index_bytes: int,
    offsets: list[int],
    *,
    is_stored: bool,
) -> list[tuple[int, int]]:
    """Writes the sections, as the native builder does; returns size and checksum of each."""
    index, ends, crcs = f"<u{index_bytes}", list(offsets), [0] * len(offsets)

    def put(section: int, array: NDArray[Any]) -> None:
        file.seek(ends[section])
        file.write(array.data)
        ends[section] += array.nbytes
        crcs[section] = zlib.crc32(array.data, crcs[section])

    if is_stored:
        put(3, np.zeros(1, "<u8"))
    place = num_buckets = key_end = 0
    for hashes, rows, strings in pieces:
        buckets = (hashes >> np.uint64(64 - directory_bits)).astype(np.int64)
        begun, num_buckets = num_buckets, int(buckets[-1]) + 1
        put(0, (place + np.searchsorted(buckets, np.arange(begun, num_buckets))).astype(index))
        put(1, hashes)
        put(2, rows.astype(index))
        if strings is not None and strings.offsets is not None:
            put(3, (strings.offsets[1:] + key_end).astype("<u8"))
            put(4, strings.values)
            key_end += int(strings.offsets[-1])
        place += len(hashes)
    put(0, np.full(2**directory_bits + 1 - num_buckets, place, index))
    file.flush()
    return [(end - at, crc) for at, end, crc in zip(offsets, ends, crcs, strict=True)]


def _write_sections(
    file: BinaryIO,
    summary: TableSummary,
    key_kind: KeyKind,
    hash_cap: int,
    write: Callable[[int, int, list[int]], list[tuple[int, int]]],
) -> None:
    """Writes a vocabulary. write: writes its sections at the offsets it is given, and returns their sizes and
    checksums."""
    # Two to four keys per bucket, so that a bucket's hashes fit in one or two cache lines.
    directory_bits = max(1, (summary.num_keys // 4).bit_length())
    index_bytes = 4 if summary.num_embeddings < 2**32 else 8
    stored = stores_bytes(key_kind, hash_cap)
    sizes = section_bytes(summary.num_keys, directory_bits, index_bytes, stores_bytes=stored)
    offsets = [HEADER_BYTES]
    for num_bytes in sizes[:-1]:
        offsets.append(-(-(offsets[-1] + (num_bytes or 0)) // ALIGNMENT) * ALIGNMENT)
    written = write(directory_bits, index_bytes, offsets)
    header = Header(
        key_kind=key_kind,
        index_bytes=index_bytes,
        directory_bits=directory_bits,
        num_keys=summary.num_keys,
        num_embeddings=summary.num_embeddings,
        missing_row=summary.missing_row,
        hash_cap=hash_cap,
        num_accesses=summary.num_accesses,
        sections=tuple(Section(at, *section) for at, section in zip(offsets, written, strict=True)),
    )
    os.pwrite(file.fileno(), header.pack(), 0)
    os.ftruncate(file.fileno(), header.num_bytes)  # the last sections may be empty


def _write_counts_header(file: BinaryIO, path: Path, num_rows: int, count_bytes: int) -> None:
    with path.with_name(path.name + PARTIAL_SUFFIX).open("rb") as written:
        crc = _crc_of(written, COUNTS_HEADER_BYTES, num_rows * count_bytes)
    raw = _COUNTS_HEADER.pack(COUNTS_MAGIC, COUNTS_VERSION, BYTE_ORDER, COUNTS_HEADER_BYTES, count_bytes, num_rows, crc)
    raw = raw.ljust(COUNTS_HEADER_BYTES - _CRC.size, b"\0")
    os.pwrite(file.fileno(), raw + _CRC.pack(zlib.crc32(raw)), 0)


def _pieces(file: BinaryIO, offset: int, num_bytes: int) -> Iterator[bytes]:
    """Yields `file[offset : offset + num_bytes]` in pieces of at most READ_BYTES; stops early if the file ends."""
    file.seek(offset)
    while num_bytes > 0 and (piece := file.read(min(num_bytes, READ_BYTES))):
        yield piece
        num_bytes -= len(piece)


def _crc_of(file: BinaryIO, offset: int, num_bytes: int) -> int:
    crc = 0
    for piece in _pieces(file, offset, num_bytes):
        crc = zlib.crc32(piece, crc)
    return crc


def write_counts(path: Path | str, counts: NDArray[np.uint32 | np.uint64]) -> None:
    """Writes accesses per row, which may be mapped."""
    path = Path(path)
    with atomic_write(path) as file:
        file.seek(COUNTS_HEADER_BYTES)
        for start in range(0, len(counts), READ_BYTES):
            file.write(counts[start : start + READ_BYTES].data)
        file.flush()
        _write_counts_header(file, path, len(counts), counts.itemsize)


def open_counts(path: Path | str) -> NDArray[Any]:
    """Maps the accesses of each row in training rows, read-only: [num_embeddings] uint32 or uint64; row 0 is for rare
    ids. Raises ValueError, which names the file, if it is truncated or altered."""
    path = Path(path)
    with open_file(path) as file:
        raw = file.read(COUNTS_HEADER_BYTES)
        intact = len(raw) == COUNTS_HEADER_BYTES and raw[:8] == COUNTS_MAGIC
        if not intact or zlib.crc32(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
            raise _damaged(path, "it does not begin as a file of counts does")
        _, version, _, _, count_bytes, num_rows, crc = _COUNTS_HEADER.unpack_from(raw)
        if version != COUNTS_VERSION or count_bytes not in (4, 8):
            raise ValueError(f"{path}: format version of the counts is {version}; this hotrow reads {COUNTS_VERSION}")
        if path.stat().st_size != COUNTS_HEADER_BYTES + num_rows * count_bytes:
            raise _damaged(path, f"it has {path.stat().st_size} bytes, which does not fit {num_rows} counts")
        if _crc_of(file, COUNTS_HEADER_BYTES, num_rows * count_bytes) != crc:
            raise _damaged(path, "its counts do not match their checksum")
        return np.memmap(file, f"<u{count_bytes}", "r", offset=COUNTS_HEADER_BYTES, shape=(num_rows,))


class Vocabulary:
    """Maps raw ids to row numbers of one table. `Vocabulary.open(path)` maps the file, `load` reads it into memory."""

    def __init__(self, path: Path, header: Header, table: Table, mapped: mmap.mmap | None = None) -> None:
        self.path, self.header, self.table = path, header, table
        self.mapped = mapped
        """The mapping in which `table` lies; None if it is in memory."""

    @staticmethod
    def open(path: Path | str, *, verify: Literal["full", "header"] = "full") -> Vocabulary:
        """Maps the vocabulary in `path`. verify: "full" reads the file once (about 1 s per GB) and checks every byte;
        "header" checks the header and the size, for a file that was verified before. Raises ValueError naming the file
        and what is wrong with it."""
        path = Path(path)
        with open_file(path) as file:
            header = Header.unpack(file.read(HEADER_BYTES), path)
            if (size := path.stat().st_size) != header.num_bytes:
                raise _damaged(path, f"it has {size} bytes, its header says {header.num_bytes}")
            if verify == "full":
                for name, section in zip(SECTIONS, header.sections, strict=True):
                    _verify_section(_pieces(file, section.offset, section.num_bytes), path, header, name)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = np.frombuffer(mapped, np.uint8)
        arrays = [view[s.offset : s.offset + s.num_bytes] for s in header.sections]
        return Vocabulary(path, header, _as_table(header, arrays), mapped)

    @property
    def key_kind(self) -> KeyKind:
        return self.header.key_kind

    @property
    def num_embeddings(self) -> int:
        return self.header.num_embeddings

    @property
    def num_keys(self) -> int:
        return self.header.num_keys

    @property
    def missing_row(self) -> int:
        """Row of a missing value; 0 if it has no row of its own."""
        return self.header.missing_row

    @property
    def row_dtype(self) -> type[np.int32] | type[np.int64]:
        """Dtype of row numbers on disk: int32 if it is wide enough."""
        return np.int32 if self.num_embeddings <= 2**31 else np.int64

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays: the memory that `load` takes."""
        return self.table.num_bytes

    @property
    def id(self) -> str:
        """Hex id of the content: a digest of the header, which holds all sizes and all sections' checksums."""
        return hashlib.sha256(self.header.pack()).hexdigest()[:32]

    def lookup(self, keys: Keys) -> NDArray[Any]:
        """Returns the exact row numbers [num_keys] of `keys`, of `row_dtype`: 0 if unseen in training, `missing_row` if
        missing. Raises ValueError for keys of the other kind."""
        if keys.kind != self.key_kind:
            raise ValueError(f"{self.path}: keys are of kind {keys.kind!r}, this vocabulary holds {self.key_kind!r}")
        out = np.empty(keys.num_keys, self.row_dtype)
        hashes = hash_keys(keys, hash_cap=self.header.hash_cap)
        lookup_rows(self.table, keys, hashes, missing_row=self.missing_row, out=out)
        return out

    def within(self, first: int, last: int) -> Entries:
        """Returns the keys whose hash is from `first` to `last`."""
        table, strings = self.table, None
        begin = int(np.searchsorted(table.hashes, np.uint64(first)))
        end = int(np.searchsorted(table.hashes, np.uint64(last), side="right"))
        if table.key_offsets is not None and table.key_bytes is not None:
            offsets = table.key_offsets[begin : end + 1].astype(np.int64)
            strings = Keys(table.key_bytes[offsets[0] : offsets[-1]], offsets - offsets[0])
        return Entries(table.hashes[begin:end], table.rows[begin:end].astype(np.int64), strings)

    def rows_of(self, other: Entries) -> NDArray[Any]:
        """Returns the rows that the keys of a similar vocabulary have here; 0: none."""
        return self.lookup_hashes(other.hashes) if other.strings is None else self.lookup(other.strings)

    def lookup_hashes(self, hashes: NDArray[np.uint64]) -> NDArray[Any]:
        """Looks up valid keys by their hash; only for vocabularies that store no bytes, where the hash is the key."""
        out = np.empty(len(hashes), self.row_dtype)
        lookup_rows(self.table, Keys(hashes), hashes, missing_row=self.missing_row, out=out)
        return out

    def load(self) -> Vocabulary:
        """Reads the vocabulary into memory: no page faults in encoding. Raises ValueError naming what is wrong."""
        with open_file(self.path) as file:
            arrays = [_read_section(file, self.header, name) for name in SECTIONS]
        for name, array in zip(SECTIONS, arrays, strict=True):
            _verify_section([array.data] if len(array) else [], self.path, self.header, name)
        return Vocabulary(self.path, self.header, _as_table(self.header, arrays))

    def entries(self) -> Iterator[tuple[Keys, NDArray[Any]]]:
        """Yields every key with its row, in the file's order, about READ_BYTES at a time, without mapping the file.
        Integers are int64 in two's complement. With a `hash_cap`, keys are the integers below it that ids became."""
        num_parts = min(1 << (self.num_bytes // READ_BYTES).bit_length(), 2**self.header.directory_bits)
        for part in range(num_parts):
            table = self.load_slice(part, num_parts).table
            if not len(table.rows):
                continue
            if table.key_offsets is None or table.key_bytes is None:
                yield Keys(unmix(table.hashes)), table.rows
            else:
                yield Keys(table.key_bytes, table.key_offsets.view(np.int64)), table.rows

    def load_slice(self, part: int, num_parts: int) -> Vocabulary:
        """Reads the keys whose hash falls in part `part` of `num_parts` equal parts; it knows no others. num_parts: a
        power of two, at most 2 ** directory_bits."""
        header = self.header
        num_buckets = 2**header.directory_bits // num_parts
        with open_file(self.path) as file:
            buckets = (part * num_buckets, (part + 1) * num_buckets + 1)
            directory = _read_section(file, header, "directory", *buckets)
            first, last = (int(place) for place in directory.view(f"<u{header.index_bytes}")[[0, -1]])
            arrays = [directory, *(_read_section(file, header, name, first, last) for name in ("hashes", "rows"))]
            arrays += _read_keys(file, header, first, last)
        table = _as_table(header, arrays)
        table = replace(table, first_bucket=buckets[0], directory=table.directory - table.directory[0])
        if table.key_offsets is not None:
            table = replace(table, key_offsets=table.key_offsets - table.key_offsets[0])
        return Vocabulary(self.path, header, table)


def unmix(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the integers [n] that have these hashes: the inverse of `mix` in docs/vocabulary.md."""
    x = hashes ^ (hashes >> np.uint64(33))  # a shift by at least half of the bits is its own inverse
    for factor in _MIX_FACTORS[::-1]:
        x = x * np.uint64(pow(factor, -1, 2**64))
        x ^= x >> np.uint64(33)
    return x.view(np.int64)


def _dtype(header: Header, name: str) -> np.dtype[Any]:
    index = f"<u{header.index_bytes}"
    return np.dtype({"directory": index, "hashes": "<u8", "rows": index, "key_offsets": "<u8", "key_bytes": "u1"}[name])


def _as_table(header: Header, arrays: Sequence[NDArray[np.uint8]]) -> Table:
    """Returns the sections as arrays of their types."""
    typed = [array.view(_dtype(header, name)) for name, array in zip(SECTIONS, arrays, strict=True)]
    stored = stores_bytes(header.key_kind, header.hash_cap)
    return Table(header.directory_bits, 0, *typed[:3], *(typed[3:] if stored else (None, None)))


def _read_section(
    file: BinaryIO, header: Header, name: str, first: int = 0, last: int | None = None
) -> NDArray[np.uint8]:
    """Reads elements [first, last) of a section as bytes; they are not mapped, since the caller budgets its memory."""
    section, width = header.sections[SECTIONS.index(name)], _dtype(header, name).itemsize
    num_bytes = section.num_bytes - first * width if last is None else (last - first) * width
    file.seek(section.offset + first * width)
    array = np.fromfile(file, np.uint8, num_bytes)
    if len(array) != num_bytes:
        raise _damaged(Path(file.name), f"its section {name} ends early")
    return array


def _read_keys(file: BinaryIO, header: Header, first: int, last: int) -> list[NDArray[np.uint8]]:
    """Reads key_offsets and key_bytes of keys [first, last); both are empty if the vocabulary stores no keys."""
    if not stores_bytes(header.key_kind, header.hash_cap):
        return [np.empty(0, np.uint8)] * 2
    offsets = _read_section(file, header, "key_offsets", first, last + 1)
    start, stop = (int(offset) for offset in offsets.view("<u8")[[0, -1]])
    return [offsets, _read_section(file, header, "key_bytes", start, stop)]


def _verify_section(pieces: Iterable[Any], path: Path, header: Header, name: str) -> None:
    """Raises ValueError unless the section's bytes match its checksum and no lookup in it can leave the file."""
    section, dtype = header.sections[SECTIONS.index(name)], _dtype(header, name)
    ends_at = {"directory": header.num_keys, "key_offsets": header.sections[-1].num_bytes}.get(name)
    crc, last, sane = 0, 0, True
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        values = np.frombuffer(piece, dtype)
        if name in ("directory", "hashes", "key_offsets"):
            sane = sane and int(values[0]) >= last and bool((values[1:] >= values[:-1]).all())
            last = int(values[-1])
        elif name == "rows":
            sane = sane and int(values.min()) >= 1 and int(values.max()) < header.num_embeddings
    if crc != section.crc32:
        raise _damaged(path, f"its section {name} (from byte {section.offset}) does not match its checksum")
    if not sane or (section.num_bytes and ends_at is not None and last != ends_at):
        raise _damaged(path, f"its section {name} contradicts the header")

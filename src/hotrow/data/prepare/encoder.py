"""Encoding: raw rows to model inputs, dense numbers by transforms and raw ids by vocabularies, under a memory budget.

    with EncoderPool(vocab_paths, folder, memory_bytes=2 << 30) as encoders:        # vocab_paths: by table
        if encoders.needs_occurrences:                          # a pass of its own, only if a vocabulary is too large
            for chunk in source.chunks():
                for feature, table in tables.items():
                    encoders[table].add(feature, chunk.keys[feature])
            encoders.finish()
        num_keys = dict.fromkeys(tables, 0)                     # keys of each feature before the chunk
        for chunk in source.chunks():
            for feature, table in tables.items():
                keys = chunk.keys[feature]
                rows = encoders[table].encode(feature, keys, first_key=num_keys[feature])
                num_keys[feature] += keys.num_keys

A vocabulary that does not fit in memory is used part by part: keys are spread over files by the leading bits of their
hash, each file is looked up with only its part of the vocabulary in memory, and row numbers are put back in order:

    keys --> the part of each key, in order ------------------------+
         \\-> part 0: keys in order -- lookup --> rows in order --+--+--> rows in the order of the keys
         \\-> part 1: keys in order -- lookup --> rows in order --/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder, open_file
from hotrow.base.files import check_name, explain_full_disk, open_private
from hotrow.data.chunk import Chunk, Keys, take_keys
from hotrow.data.coded import CodedKeys, column_of
from hotrow.data.native import hash_keys, stores_bytes
from hotrow.data.packed.format import Ids, Ragged
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.sources.schema import Schema
from hotrow.data.transforms import Transform

MAX_PARTS = 128
"""The number of a part, and one more for "missing", fits in a byte."""
BATCH_KEYS = 1 << 20
"""Number of keys read back at a time."""


class TableEncoder:
    """Maps raw ids to row numbers of one table, with the vocabulary in memory or, if it does not fit, by parts on disk.

    memory_bytes: what this encoder may hold (half for a part, and at least 30 MB more). If None, the vocabulary is
    searched where it lies. If the vocabulary does not fit, `needs_occurrences` is True: every key to encode must first
    be passed to `add`, feature by feature in the order of `encode`, and then `finish` called once. folder: for the
    files of the parts.
    """

    def __init__(self, vocabulary: Vocabulary, folder: Path = Path(), *, memory_bytes: int | None = None) -> None:
        self.vocabulary, self._folder, self._memory_bytes = vocabulary, folder, memory_bytes or 0
        self.needs_occurrences = memory_bytes is not None and vocabulary.num_bytes > memory_bytes
        """Whether rows are found only in the order in which keys were passed to `add`, not by lookup."""
        self._features: dict[str, _Occurrences] = {}
        self._num_parts = 1
        if self.needs_occurrences:
            self._num_parts = self._choose_parts()
            make_folder(folder)
        elif memory_bytes is not None:
            self.vocabulary = vocabulary.load()

    def add(self, feature: str, keys: Keys) -> None:
        """Notes keys to encode later; does nothing if the vocabulary is in memory."""
        if not self.needs_occurrences:
            return
        if feature not in self._features:
            path = self._folder / f"{check_name(self.vocabulary.path.name)}.{len(self._features)}"
            self._features[feature] = _Occurrences(path, self.vocabulary, self._num_parts)
        with self._explain():
            self._features[feature].add(keys)
            if sum(occurrences.num_buffered_bytes for occurrences in self._features.values()) > self._memory_bytes // 2:
                self._flush()

    def finish(self) -> None:
        """Looks up all noted keys, one part of the vocabulary at a time."""
        with self._explain():
            self._flush()
            for part in range(self._num_parts if self._features else 0):
                vocabulary = self.vocabulary.load_slice(part, self._num_parts)
                for occurrences in self._features.values():
                    occurrences.lookup_part(part, vocabulary)
            for occurrences in self._features.values():
                occurrences.put_in_order()

    def encode(self, feature: str, keys: Keys, *, first_key: int) -> NDArray[Any]:
        """Returns the row numbers [num_keys] of `keys`, as `Vocabulary.lookup` gives them.

        first_key: how many keys of the feature come before them in the source.

        Raises ValueError if the source yields more keys than were passed to `add`.
        """
        if not self.needs_occurrences:
            return self.vocabulary.lookup(keys)
        return self._features[feature].rows(first_key, keys.num_keys)

    def close(self) -> None:
        for occurrences in self._features.values():
            occurrences.close()

    def _flush(self) -> None:
        for occurrences in self._features.values():
            occurrences.flush()

    def _choose_parts(self) -> int:
        """Returns a power of two, so that a part is a whole number of directory buckets and takes half of the
        memory."""
        wanted = -(-2 * self.vocabulary.num_bytes // self._memory_bytes)
        num_parts: int = min(1 << (wanted - 1).bit_length(), 2**self.vocabulary.header.directory_bits)
        if num_parts > MAX_PARTS:
            raise ValueError(
                f"{self.vocabulary.path}: a vocabulary of {self.vocabulary.num_bytes:,} bytes cannot be used within "
                f"{self._memory_bytes:,}; give it at least {2 * self.vocabulary.num_bytes // MAX_PARTS:,} bytes"
            )
        return num_parts

    def _explain(self) -> AbstractContextManager[None]:
        doing = f"encoding with the vocabulary {self.vocabulary.path.name!r}, which does not fit in memory,"
        return explain_full_disk(self._folder, doing, "The vocabularies and what was encoded before are kept.")


class EncoderPool:
    """A `TableEncoder` for each table; they share the memory, and the smallest vocabularies are loaded first.

    Files in `folder` are removed when the `with` block ends, however it ends.
    """

    def __init__(self, vocab_paths: Mapping[str, Path], folder: Path, *, memory_bytes: int) -> None:
        sizes = {table: path.stat().st_size for table, path in vocab_paths.items()}
        # If not all fit, a quarter of the memory is for the parts and buffers of those that do not.
        for_loaded = memory_bytes if sum(sizes.values()) <= memory_bytes else memory_bytes * 3 // 4
        loaded, num_bytes = set(), 0
        for table in sorted(sizes, key=lambda table: (sizes[table], table)):
            num_bytes += sizes[table]
            if num_bytes <= for_loaded:
                loaded.add(table)
        share = memory_bytes // 4 // max(len(sizes) - len(loaded), 1)
        self._encoders = {
            table: TableEncoder(Vocabulary.open(path), folder, memory_bytes=sizes[table] if table in loaded else share)
            for table, path in vocab_paths.items()
        }

    def __getitem__(self, table: str) -> TableEncoder:
        return self._encoders[table]

    @property
    def needs_occurrences(self) -> bool:
        """Whether a vocabulary is larger than its share, so that keys must be passed to `add` before `encode`."""
        return any(encoder.needs_occurrences for encoder in self._encoders.values())

    def finish(self) -> None:
        for encoder in self._encoders.values():
            encoder.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for encoder in self._encoders.values():
            encoder.close()


class _Occurrences:
    """The keys of one feature on their way to row numbers: the files of the drawing above, written through buffers.

    parts: uint8 per key, num_parts = missing. Per part, keys: uint64 hashes, or the bytes of string keys, whose lengths
    (uint32) have a file of their own; rows: row numbers. In the end only the rows of all keys remain.
    """

    def __init__(self, path: Path, vocabulary: Vocabulary, num_parts: int) -> None:
        self._path, self._vocabulary, self._num_parts = path, vocabulary, num_parts
        self._bytes = stores_bytes(vocabulary.key_kind, vocabulary.header.hash_cap)
        self._shift = np.uint64(64 - (num_parts.bit_length() - 1))
        self._buffers: dict[Path, list[NDArray[Any]]] = {}
        self._files: set[Path] = set()
        self.num_buffered_bytes = 0

    def add(self, keys: Keys) -> None:
        """Appends keys to the files of their parts."""
        hashes = hash_keys(keys, hash_cap=self._vocabulary.header.hash_cap)
        parts = (hashes >> self._shift).astype(np.uint8)
        if keys.valid is not None:
            parts[~keys.valid] = self._num_parts
        self._append(self._file("parts"), parts)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=self._num_parts + 1))
        for part in range(self._num_parts):
            chosen = order[ends[part - 1] if part else 0 : ends[part]]
            if self._bytes:
                taken = take_keys(keys, chosen)
                assert taken.offsets is not None, "kind bytes"
                self._append(self._file("keys", part), taken.values)
                self._append(self._file("lengths", part), np.diff(taken.offsets).astype(np.uint32))
            else:
                self._append(self._file("keys", part), hashes[chosen])

    def flush(self) -> None:
        """Writes the buffers to their files, one open at a time."""
        for path, arrays in self._buffers.items():
            with self._open_to_append(path) as file:
                for array in arrays:
                    file.write(array.data)
        self._buffers.clear()
        self.num_buffered_bytes = 0

    def lookup_part(self, part: int, vocabulary: Vocabulary) -> None:
        """Looks up the keys of a part and writes their rows."""
        read = self._string_keys(part, vocabulary) if self._bytes else self._hashed_keys(part, vocabulary)
        for rows in read:
            self._append(self._file("rows", part), rows)
            self.flush()
        for name in ("keys", "lengths"):
            self._remove(self._file(name, part))

    def put_in_order(self) -> None:
        """Merges the rows of all parts into the order of the keys."""
        dtype = self._vocabulary.row_dtype
        with ExitStack() as stack:
            parts_file = stack.enter_context(self._file("parts").open("rb"))
            sources = [self._file("rows", part) for part in range(self._num_parts)]
            files = [stack.enter_context(path.open("rb")) if path in self._files else None for path in sources]
            out = stack.enter_context(self._open_to_append(self._file("rows")))
            while len(parts := np.fromfile(parts_file, np.uint8, BATCH_KEYS)):
                num_keys = np.bincount(parts, minlength=self._num_parts + 1)
                pieces = [np.fromfile(f, dtype, n) for f, n in zip(files, num_keys, strict=False) if f is not None]
                missing = np.full(num_keys[self._num_parts], self._vocabulary.missing_row, dtype)
                rows = np.empty(len(parts), dtype)
                rows[np.argsort(parts, kind="stable")] = np.concatenate([*pieces, missing])
                out.write(rows.data)
        for path in [self._file("parts"), *sources]:
            self._remove(path)

    def rows(self, first: int, num_keys: int) -> NDArray[Any]:
        """Returns the row numbers of keys [first, first + num_keys)."""
        dtype = np.dtype(self._vocabulary.row_dtype)
        with self._file("rows").open("rb") as file:
            rows = np.fromfile(file, dtype, num_keys, offset=first * dtype.itemsize)
        if len(rows) != num_keys:
            raise ValueError(
                f"table {self._vocabulary.path.name!r}: the source yields keys {first} to {first + num_keys}, more "
                "than in the pass before; its files have changed, prepare them again"
            )
        return rows

    def close(self) -> None:
        """Removes all files."""
        for path in list(self._files):
            self._remove(path)

    def _file(self, name: str, part: int | None = None) -> Path:
        return self._path.with_name(self._path.name + ("" if part is None else f".{part}") + f".{name}")

    def _append(self, path: Path, array: NDArray[Any]) -> None:
        self._buffers.setdefault(path, []).append(array)
        self.num_buffered_bytes += array.nbytes

    def _open_to_append(self, path: Path) -> BinaryIO:
        if path in self._files:
            return open_file(path, "ab")
        self._files.add(path)
        return open_private(path)

    def _remove(self, path: Path) -> None:
        if path in self._files:
            path.unlink(missing_ok=True)
            self._files.remove(path)

    def _hashed_keys(self, part: int, vocabulary: Vocabulary) -> Iterator[NDArray[Any]]:
        if self._file("keys", part) not in self._files:
            return
        with self._file("keys", part).open("rb") as file:
            while len(hashes := np.fromfile(file, np.uint64, BATCH_KEYS)):
                yield vocabulary.lookup_hashes(hashes)

    def _string_keys(self, part: int, vocabulary: Vocabulary) -> Iterator[NDArray[Any]]:
        if self._file("lengths", part) not in self._files:
            return
        with self._file("keys", part).open("rb") as file, self._file("lengths", part).open("rb") as lengths_file:
            while len(lengths := np.fromfile(lengths_file, np.uint32, BATCH_KEYS)):
                offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
                yield vocabulary.lookup(Keys(np.fromfile(file, np.uint8, int(offsets[-1])), offsets))


class RowEncoder:
    """Turns chunks of raw rows into model inputs: what preparation does to every row, and prediction to new ones.

    transforms: of the dense columns; a missing number becomes 0 after its transform, as in the reference DLRM. Each
    thread of `executor` encodes one table at a time. Chunks must come in the source's order.
    """

    def __init__(
        self,
        schema: Schema,
        transforms: Sequence[Transform],
        tables: Mapping[str, TableEncoder],
        executor: Executor,
    ) -> None:
        self._schema, self._transforms, self._tables, self._executor = schema, transforms, tables, executor
        self._num_keys = dict.fromkeys(schema.feature_names, 0)
        self._entry_rows: dict[str, tuple[Keys, NDArray[Any]]] = {}

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.float32], dict[str, Ids]]:
        """Returns dense inputs [n, I], and ids by feature in the schema's order."""
        encoded = self._executor.map(lambda table: self._encode_table(table, chunk), self._schema.table_names)
        columns = self._executor.map(_transformed, self._transforms, chunk.dense.T)
        ids = {name: column for columns in encoded for name, column in columns.items()}
        dense = np.empty_like(chunk.dense)
        for i, numbers in enumerate(columns):
            dense[:, i] = numbers  # rounded to float32 once, here
        return dense, {name: ids[name] for name in self._schema.feature_names}

    def _encode_table(self, table: str, chunk: Chunk) -> dict[str, Ids]:
        encoder = self._tables[table]
        columns: dict[str, Ids] = {}
        for name in self._schema.features_of(table):
            column = column_of(chunk.keys, name)
            if isinstance(column, CodedKeys) and not encoder.needs_occurrences:
                columns[name] = self._coded_rows(name, encoder.vocabulary, column)
                continue
            keys = chunk.keys[name]
            values = encoder.encode(name, keys, first_key=self._num_keys[name])
            self._num_keys[name] += keys.num_keys
            columns[name] = values if keys.row_splits is None else Ragged(values, keys.row_splits)
        return columns

    def _coded_rows(self, name: str, vocabulary: Vocabulary, coded: CodedKeys) -> NDArray[Any]:
        """Returns row numbers by code; a dictionary that has come before is not looked up again."""
        entries, rows = self._entry_rows.get(name, (None, None))
        if entries is not coded.entries or rows is None:
            rows = vocabulary.lookup(coded.entries)
            self._entry_rows[name] = (coded.entries, rows)
        return rows.take(coded.codes)


def _transformed(transform: Transform, numbers: NDArray[np.float32]) -> NDArray[np.float64]:
    """A column after its transform [n], missing values as 0.

    Most columns of click logs are small counts: their transform is computed once for each count, to the same bits.
    """
    known = np.where(np.isnan(numbers), 0, numbers)
    if len(known) and known.max() < len(known) and not np.signbit(known).any():
        counts = known.astype(np.int64)
        if (counts == known).all():
            of_count = transform(np.append(np.arange(counts.max() + 1, dtype=np.float64), np.nan))
            np.copyto(counts, -1, where=np.isnan(numbers))
            return np.where(np.isnan(of_count), 0.0, of_count).take(counts, mode="wrap")
    found = transform(numbers.astype(np.float64))
    return np.where(np.isnan(found), 0.0, found)

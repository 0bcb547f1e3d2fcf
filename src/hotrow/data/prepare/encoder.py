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

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hotrow.base.door import make_folder, open_file
from hotrow.base.files import check_name, explain_full_disk, open_private
from hotrow.base.records import Count
from hotrow.data.chunk import Chunk, Keys
from hotrow.data.native import hash_keys, stores_bytes
from hotrow.data.packed.format import Ids, Ragged
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.sources.convert import CodedKeys, column_of
from hotrow.data.sources.schema import Schema, Transform

MAX_PARTS = 128
"""The number of a part, and one more for "missing", fits in a byte."""
BATCH_KEYS = 1 << 20
"""Number of keys read back at a time."""


class TableEncoder:
    """Maps raw ids to row numbers of one table, with the vocabulary in memory or, if it does not fit, by parts on disk.

    memory_bytes: what this encoder may hold (half for a part, and at least 30 MB more). If the vocabulary does not fit,
    `needs_occurrences` is True: every key to encode must first be passed to `add`, feature by feature in the order of
    `encode`, and then `finish` called once.
    """

    def __init__(self, vocab_path: Path, folder: Path, *, memory_bytes: int) -> None:
        self.vocabulary = Vocabulary.open(vocab_path)
        self.needs_occurrences = self.vocabulary.num_bytes > memory_bytes
        self._folder, self._memory_bytes = folder, memory_bytes
        self._features: dict[str, _Occurrences] = {}
        self._num_parts = 1
        if self.needs_occurrences:
            self._num_parts = self._choose_parts()
            make_folder(folder)
        else:
            self.vocabulary = self.vocabulary.load()

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
            table: TableEncoder(path, folder, memory_bytes=sizes[table] if table in loaded else share)
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
                data, lengths = _take_strings(keys, chosen)
                self._append(self._file("keys", part), data)
                self._append(self._file("lengths", part), lengths)
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


def _take_strings(keys: Keys, chosen: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Returns `(bytes, lengths)` of the chosen keys, which are of kind "bytes"."""
    assert keys.offsets is not None
    lengths = np.diff(keys.offsets)[chosen]
    ends = np.cumsum(lengths)
    source = np.repeat(keys.offsets[chosen] - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
    return keys.values[source], lengths.astype(np.uint32)


class Encoder(Protocol):
    """Maps raw ids to row numbers of one table, as `TableEncoder` does."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the table."""

    @property
    def needs_occurrences(self) -> bool:
        """Whether rows are found only in the order in which keys were passed to `add`, not by lookup."""

    def encode(self, feature: str, keys: Keys, *, first_key: int) -> NDArray[Any]:
        """Returns the row numbers of keys; `first_key` keys of the feature come before them in the source."""


class RowEncoder:
    """Turns chunks of raw rows into model inputs: what preparation does to every row, and prediction to new ones.

    Each thread encodes one table at a time. Chunks must come in the source's order.
    """

    def __init__(
        self,
        schema: Schema,
        transforms: Sequence[DenseTransform],
        tables: Mapping[str, Encoder],
        executor: Executor,
    ) -> None:
        self._schema, self._transforms, self._tables, self._executor = schema, transforms, tables, executor
        self._num_keys = dict.fromkeys(schema.feature_names, 0)
        self._entry_rows: dict[str, tuple[Keys, NDArray[Any]]] = {}

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.float32], dict[str, Ids]]:
        """Returns dense inputs [n, I], and ids by feature in the schema's order."""
        encoded = self._executor.map(lambda table: self._encode_table(table, chunk), self._schema.table_names)
        dense = np.empty_like(chunk.dense)
        for i, transform in enumerate(self._transforms):
            dense[:, i] = transform(chunk.dense[:, i])
        ids = {name: column for columns in encoded for name, column in columns.items()}
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


MANTISSA_BITS = 24
"""Bits of a float32's mantissa, the leading 1 included."""


@dataclass(frozen=True)
class DenseTransform:
    """The transform of one dense column, with its statistics; `str` writes the form kept in dataset.json.

        log1p_clip0      log(1 + max(x, 0)), the reference DLRM's
        identity         x
        standardize      (x - mean) / std, over the training rows that have a value

    A missing value becomes 0 after the transform, as in the reference. Arithmetic is float64, rounded to float32 once.
    """

    kind: Transform
    mean: float = 0.0
    std: float = 1.0

    def __str__(self) -> str:
        """As `log1p_clip0` or `standardize(mean=1.5, std=0.25)`."""
        return f"standardize(mean={self.mean!r}, std={self.std!r})" if self.kind == "standardize" else self.kind

    @staticmethod
    def parse(text: str) -> DenseTransform:
        """Reads what `str` wrote. Raises ValueError for any other text."""
        if text in ("log1p_clip0", "identity"):
            return DenseTransform(text)  # type: ignore[arg-type]  # one of the two names of Transform just compared
        found = re.fullmatch(r"standardize\(mean=(\S+), std=(\S+)\)", text)
        if found is None:
            raise ValueError(f"dense transform {text!r} is not known; prepare the data set again with this version")
        return DenseTransform("standardize", float(found[1]), float(found[2]))

    def __call__(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the transformed values [n] of raw values [n], NaN = missing."""
        x = raw.astype(np.float64)
        if self.kind == "log1p_clip0":
            x = np.log1p(np.maximum(x, 0.0))
        elif self.kind == "standardize":
            x = (x - self.mean) / self.std
        x[np.isnan(raw)] = 0.0
        return x.astype(np.float32)


class Moments:
    """Exact mean and standard deviation of float32 numbers: order, chunks and threads cannot change a bit of them.

    A float32 is m * 2^(e - 24) with a whole |m| < 2^24, so sums of m and of m^2 by exponent e are whole numbers.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._sums: dict[int, int] = {}
        self._squares: dict[int, int] = {}

    def add(self, values: NDArray[np.float32]) -> None:
        """Counts the values that are not NaN."""
        values = values[~np.isnan(values)]
        self.num_values += len(values)
        # Below 2^28 values, sums of 24-bit pieces stay below 2^53: exact in the float64 that bincount adds in.
        for start in range(0, len(values), 1 << 28):
            self._add_piece(values[start : start + (1 << 28)])

    def _add_piece(self, values: NDArray[np.float32]) -> None:
        fraction, exponent = np.frexp(values.astype(np.float64))
        mantissa = (fraction * 2.0**MANTISSA_BITS).astype(np.int64)
        low = int(exponent.min(initial=0))
        bins = exponent - low
        square = mantissa * mantissa
        sums = np.bincount(bins, mantissa.astype(np.float64))
        high_squares = np.bincount(bins, (square >> MANTISSA_BITS).astype(np.float64))
        low_squares = np.bincount(bins, (square & ((1 << MANTISSA_BITS) - 1)).astype(np.float64))
        for i in np.flatnonzero(high_squares + low_squares):
            e = int(i) + low
            self._sums[e] = self._sums.get(e, 0) + int(sums[i])
            new = (int(high_squares[i]) << MANTISSA_BITS) + int(low_squares[i])
            self._squares[e] = self._squares.get(e, 0) + new

    def merge(self, other: Moments) -> None:
        """Counts the values that `other` has counted."""
        self.num_values += other.num_values
        for own, more in ((self._sums, other._sums), (self._squares, other._squares)):
            for exponent, value in more.items():
                own[exponent] = own.get(exponent, 0) + value

    def transform(self) -> DenseTransform:
        """Returns the standardising transform; a constant column is only shifted, an absent one not at all."""
        if self.num_values == 0:
            return DenseTransform("standardize")
        return DenseTransform("standardize", float(self._mean()), math.sqrt(self.variance()) or 1.0)

    def _mean(self) -> Fraction:
        return sum((s * _power(e - MANTISSA_BITS) for e, s in self._sums.items()), Fraction(0)) / self.num_values

    def variance(self) -> Fraction:
        """Returns the exact variance of all values; there must be at least one."""
        squares = (s * _power(2 * (e - MANTISSA_BITS)) for e, s in self._squares.items())
        return sum(squares, Fraction(0)) / self.num_values - self._mean() ** 2

    def to_record(self) -> MomentsRecord:
        """Returns the moments as a snapshot stores them; `from_record` is the inverse."""
        sums, squares = ({str(e): str(s) for e, s in own.items()} for own in (self._sums, self._squares))
        return MomentsRecord(self.num_values, sums, squares)

    @staticmethod
    def from_record(found: MomentsRecord) -> Moments:
        """Returns the moments that `to_record` stored."""
        moments = Moments()
        moments.num_values = found.num_values
        moments._sums = {int(e): int(s) for e, s in found.sums.items()}
        moments._squares = {int(e): int(s) for e, s in found.squares.items()}
        return moments


_Exponent = Annotated[str, Field(pattern=r"^(0|-?[1-9][0-9]?|-?1[0-9][0-9])$")]
_Whole = Annotated[str, Field(pattern=r"^-?[0-9]{1,60}$")]


@dataclass(frozen=True)
class MomentsRecord:
    """`Moments` in JSON; numbers are text, because they may have more than 64 bits."""

    num_values: Count
    sums: dict[_Exponent, _Whole]
    """Sums of the mantissas, by exponent."""
    squares: dict[_Exponent, _Whole]

    def __post_init__(self) -> None:
        """Raises ValueError if no numbers can have these moments."""
        is_possible = not (self.sums or self.squares)
        if self.num_values:
            is_possible = Moments.from_record(self).variance() >= 0
        if not is_possible:
            raise ValueError("no numbers can have these sums and squares")


def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent

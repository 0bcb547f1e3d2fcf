"""Encoding: raw rows to model inputs, dense numbers by transforms and raw ids by vocabularies, under a memory budget.

    with EncoderPool(vocab_paths, folder, memory_bytes=2 << 30) as encoders:        # vocab_paths: by table
        for _ in encoders.passes():                             # none if all vocabularies fit
            for chunk in source.chunks():
                for feature, table in tables.items():
                    encoders[table].add(feature, chunk.keys[feature])
        num_keys = dict.fromkeys(tables, 0)                     # keys of each feature before the chunk
        for chunk in source.chunks():
            for feature, table in tables.items():
                keys = chunk.keys[feature]
                rows = encoders[table].encode(feature, keys, first_key=num_keys[feature])
                num_keys[feature] += keys.num_keys

A vocabulary that does not fit in memory is used part by part. In each pass over the keys one part is in memory; it
knows the rows of its own keys, and row 0 for all others. So a key's row is the largest of all passes, kept in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder, open_file
from hotrow.base.files import check_name, explain_full_disk, open_private
from hotrow.data.chunk import Chunk, Keys
from hotrow.data.coded import CodedKeys, column_of
from hotrow.data.packed.format import Ids, Ragged
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.prepare.statistics import raw_transforms
from hotrow.data.sources.schema import Schema
from hotrow.data.transforms import Transform

MAX_PARTS = 128
"""More passes over all rows than this take too long."""


class TableEncoder:
    """Maps raw ids to row numbers of one table, with the vocabulary in memory or, if it does not fit, part by part.

    memory_bytes: what this encoder may hold (half for a part, and at least 30 MB more). If None, the vocabulary is
    searched where it lies. folder: for files of row numbers, if the vocabulary does not fit.
    """

    def __init__(self, vocabulary: Vocabulary, folder: Path = Path(), *, memory_bytes: int | None = None) -> None:
        self.vocabulary, self._folder = vocabulary, folder
        self.num_passes = 0
        """In how many passes keys must be passed to `add` before `encode`, feature by feature in the order of `encode`;
        0 if the vocabulary fits."""
        self._part: Vocabulary | None = None
        self._places: dict[str, int] = {}
        """How many keys of each feature were added in this pass."""
        if memory_bytes is not None and vocabulary.num_bytes > memory_bytes:
            self.num_passes = _num_parts(vocabulary, memory_bytes)
            make_folder(folder)
        elif memory_bytes is not None:
            self.vocabulary = vocabulary.load()

    def begin_pass(self, number: int) -> None:
        """Loads the part of the vocabulary for a pass; after the last part, none."""
        self._part, self._places = None, dict.fromkeys(self._places, 0)
        if number < self.num_passes:
            self._part = self.vocabulary.load_slice(number, self.num_passes)

    def add(self, feature: str, keys: Keys) -> None:
        """Looks up keys in the part that is loaded; does nothing if none is."""
        if self._part is None:
            return
        rows = self._part.lookup(keys)
        with self._explain():
            if feature not in self._places:
                self._places[feature] = 0
                open_private(self._path(feature)).close()
            with open_file(self._path(feature), "r+b") as file:
                begin = file.seek(self._places[feature] * rows.itemsize)
                before = np.fromfile(file, rows.dtype, len(rows))
                file.seek(begin)
                file.write((np.maximum(rows, before) if len(before) else rows).data)
        self._places[feature] += len(rows)

    def encode(self, feature: str, keys: Keys, *, first_key: int) -> NDArray[Any]:
        """Returns the row numbers [num_keys] of `keys`, as `Vocabulary.lookup` gives them.

        first_key: how many keys of the feature come before them in the source.

        Raises ValueError if the source yields more keys than were passed to `add`.
        """
        if not self.num_passes:
            return self.vocabulary.lookup(keys)
        dtype = np.dtype(self.vocabulary.row_dtype)
        with open_file(self._path(feature)) as file:
            rows = np.fromfile(file, dtype, keys.num_keys, offset=first_key * dtype.itemsize)
        if len(rows) != keys.num_keys:
            raise ValueError(
                f"table {self.vocabulary.path.name!r}: the source yields keys {first_key} to "
                f"{first_key + keys.num_keys}, more than in the pass before; its files have changed, prepare them again"
            )
        return rows

    def close(self) -> None:
        """Removes all files."""
        for feature in self._places:
            self._path(feature).unlink(missing_ok=True)

    def _path(self, feature: str) -> Path:
        return self._folder / f"{check_name(self.vocabulary.path.name)}.{list(self._places).index(feature)}.rows"

    def _explain(self) -> AbstractContextManager[None]:
        doing = f"encoding with the vocabulary {self.vocabulary.path.name!r}, which does not fit in memory,"
        return explain_full_disk(self._folder, doing, "The vocabularies and what was encoded before are kept.")


def _num_parts(vocabulary: Vocabulary, memory_bytes: int) -> int:
    """A power of two, so that a part is a whole number of directory buckets and takes half of the memory."""
    wanted = -(-2 * vocabulary.num_bytes // memory_bytes)
    num_parts: int = min(1 << (wanted - 1).bit_length(), 2**vocabulary.header.directory_bits)
    if num_parts > MAX_PARTS:
        raise ValueError(
            f"{vocabulary.path}: a vocabulary of {vocabulary.num_bytes:,} bytes cannot be used within "
            f"{memory_bytes:,}; give it at least {2 * vocabulary.num_bytes // MAX_PARTS:,} bytes"
        )
    return num_parts


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

    def passes(self) -> Iterator[None]:
        """Yields before each pass over all keys that vocabularies larger than their share need; see `TableEncoder`."""
        num_passes = max(encoder.num_passes for encoder in self._encoders.values())
        for number in range(num_passes + 1):
            for encoder in self._encoders.values():
                encoder.begin_pass(number)
            if number < num_passes:
                yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for encoder in self._encoders.values():
            encoder.close()


class RowEncoder:
    """Turns chunks of raw rows into model inputs: what preparation does to every row, and prediction to new ones.

    transforms: of the dense columns, then of the statistics, which chunks hold transformed; a missing number becomes 0
    after its transform, as in the reference DLRM. Each thread of `executor` encodes one table at a time; if None, the
    caller's thread encodes. Chunks must come in the source's order.
    """

    def __init__(
        self,
        schema: Schema,
        transforms: Sequence[Transform],
        tables: Mapping[str, TableEncoder],
        executor: Executor | None = None,
    ) -> None:
        self._schema, self._tables = schema, tables
        self._transforms = raw_transforms(schema, transforms)
        self._map: Callable[..., Iterable[Any]] = map if executor is None else executor.map
        self._num_keys = dict.fromkeys(schema.feature_names, 0)
        self._entry_rows: dict[str, tuple[Keys, NDArray[Any]]] = {}

    def __call__(self, chunk: Chunk) -> tuple[NDArray[np.float32], dict[str, Ids]]:
        """Returns dense inputs [n, I], and ids by feature in the schema's order."""
        encoded = self._map(lambda table: self._encode_table(table, chunk), self._schema.table_names)
        columns = self._map(_transformed, self._transforms, chunk.dense.T)
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
            if isinstance(column, CodedKeys) and not encoder.num_passes:
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

"""What every raw source yields: chunks of rows with their ids as found in the file, and errors that name the place.

    source -> Chunk(label, dense, keys by feature) -> count -> vocabularies -> encode -> packed dataset

Nothing here reads files or interprets values: a source parses, `hotrow.data.packed.vocabulary` turns keys into row
numbers, preparation transforms dense values. A list feature's keys are stored one after another; `row_splits` says
where each row's keys begin:

    row 0    row 1   row 2
    [a, b]   []      [c]       values = [a, b, c]   row_splits = [0, 2, 2, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.base.records import Count

KeyKind = Literal["int", "bytes"]
KEY_KINDS: tuple[KeyKind, ...] = ("int", "bytes")


SKIP_CURE = "let bad rows be left out (--skip-bad-rows N, in Python skip_bad_rows=N)"
"""The end of the sentence about a bad row: what the user can do about it."""


class NoRowsError(ValueError):
    """The files have no rows, and some are needed."""


class RowError(ValueError):
    """A row that cannot be read; its text is `file:line, column 5 (I4): what is wrong, and the cure`.

    file: path or URI. line: 1-based line of the (decompressed) file, header included. column: 1-based column or None.
    name: the column's name or None. reason: the sentence that follows the place.
    """

    def __init__(
        self, *, file: str, line: int, reason: str, column: int | None = None, name: str | None = None
    ) -> None:
        self.file, self.line, self.column, self.name, self.reason = file, line, column, name, reason
        where = "" if column is None else f", column {column}"
        where += "" if name is None else f" ({name})"
        super().__init__(f"{file}:{line}{where}: {reason}")

    def but(self, **changed: Any) -> RowError:
        """Returns the same error with another `line` or `reason`."""
        return RowError(**{**vars(self), **changed})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RowError, **vars(self)), ()


@dataclass(frozen=True)
class Keys:
    """Raw ids of one feature for a chunk's rows.

    values: uint32 or int64 ids [num_keys] (kind "int"), or uint8 UTF-8 bytes (kind "bytes").
    offsets: int64 byte offsets [num_keys + 1] of kind "bytes", else None.
    valid: bool [num_keys], False = missing value (an id of its own). If None, no value is missing.
    row_splits: int64 [num_rows + 1] if rows hold lists. If None, each row has one key.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None
    valid: NDArray[np.bool_] | None = None
    row_splits: NDArray[np.int64] | None = None

    @property
    def kind(self) -> KeyKind:
        return "int" if self.offsets is None else "bytes"

    @property
    def num_keys(self) -> int:
        """Number of keys, missing ones included."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        return self.num_keys if self.row_splits is None else len(self.row_splits) - 1

    def key_mask(self, row_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns `row_mask` [num_rows] with each row's value repeated for its keys: [num_keys]."""
        if self.row_splits is None:
            return row_mask
        return np.repeat(row_mask, np.diff(self.row_splits))


@dataclass(frozen=True)
class Position:
    """Where the next row starts. A source that resumes there yields the rows it would have yielded without a break."""

    file_index: Count = 0
    offset: Count = 0
    """Bytes of the decompressed file already consumed; for a columnar file, rows."""
    num_lines: Count = 0
    """Lines of a text file already consumed, so that errors after a resume name the right line."""
    num_skipped: Count = 0
    """Bad rows skipped so far in all files: the limit `skip_bad_rows` holds across a resume."""


FEW_ODD, FEW_ODD_SHARE = 10, 0.01
"""In data of few rows, up to FEW_ODD cells of a column may be odd if they are at most this share of the rows."""


def most_odd(num_rows: int, share: float) -> int:
    """Returns how many of a column's cells in `num_rows` rows may be odd, if `share` of them may be.

    One odd cell in 1,000 comes from slips; a column with more of them holds something else as well. A share says little
    of few rows, so up to FEW_ODD cells may be odd there.
    """
    return max(int(share * num_rows), min(FEW_ODD, int(FEW_ODD_SHARE * num_rows))) if share else 0


@dataclass(frozen=True)
class OddCells:
    """Cells of one column that are not of its kind, such as a word among numbers."""

    column: str
    rows: NDArray[np.int64]
    """Row of each cell in its chunk; for a row left out, the row after it. All left out count, sampled or not."""
    numbers: NDArray[np.int64]
    """The argument of `error` for each cell."""
    error: Callable[[int], RowError]
    """Says where a cell is and what is wrong with it."""
    is_row: bool = False
    """Whether the rows are left out; if not, the cells are missing."""

    def of(self, mask: NDArray[np.bool_]) -> OddCells:
        """Returns the cells in rows whose mask [num_rows] is set, with rows numbered without the others."""
        is_kept = np.ones(len(self.rows), np.bool_) if self.is_row else mask[self.rows]
        after = np.concatenate([[0], np.cumsum(mask)])[self.rows]
        return replace(self, rows=after[is_kept], numbers=self.numbers[is_kept])


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a source, with values as the source has them."""

    num_rows: int
    label: NDArray[np.float32] | None
    """[num_rows], or [num_rows, L] for L > 1 labels, checked by the source; None for rows to predict."""
    dense: NDArray[np.float32]
    """[num_rows, I] raw numbers, NaN = missing; preparation applies transforms."""
    keys: Mapping[str, Keys]
    """Raw ids by feature name."""
    position: Position
    """Position of the row after this chunk."""
    time: NDArray[np.int64] | None = None
    """[num_rows] if the source has a time column."""
    odd: tuple[OddCells, ...] = ()
    """Cells that are missing, and rows that are left out, because they are not of their column's kind."""
    weight: NDArray[np.float32] | None = None
    """[num_rows] how much each row counts, checked by the source; None if each counts 1."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """How many values are not of their column's kind, by column; only rows to score have such values."""
    kept: pa.RecordBatch | None = None
    """Columns to keep, unchanged, [num_rows] each."""


@dataclass(frozen=True)
class FileInfo:
    """One input file as it was when the source was scouted."""

    path: str
    num_bytes: int
    mtime_ns: int
    """Modification time, 0 if the file system keeps none."""


@dataclass(frozen=True)
class SourceInfo:
    """What is known about a source before it is read."""

    num_rows: int
    num_rows_exact: bool
    """False if `num_rows` is an estimate from the first megabytes."""
    files: tuple[FileInfo, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files as stored."""
        return sum(f.num_bytes for f in self.files)


@dataclass
class SkippedRows:
    """Bad rows skipped so far, with the first few errors as examples."""

    num_rows: int = 0
    examples: list[str] = field(default_factory=list)
    max_examples: int = 5

    @property
    def wants_examples(self) -> bool:
        return len(self.examples) < self.max_examples

    def add(self, error: ValueError) -> None:
        """Counts one row that was skipped because of `error`."""
        self.num_rows += 1
        if self.wants_examples:
            self.examples.append(str(error))


class Source(Protocol):
    """A raw data set: names and kinds of its columns, and its rows, in chunks, from any position on."""

    @property
    def name(self) -> str:
        """Name of the source in messages and in dataset.json, e.g. "criteo"."""

    @property
    def key_kinds(self) -> Mapping[str, KeyKind]:
        """Kind of each feature's keys, in column order."""

    @property
    def skipped(self) -> SkippedRows:
        """Bad rows that the latest iteration of `chunks` skipped."""

    def scout(self) -> SourceInfo:
        """Returns files, sizes and about how many rows there are, bad ones included, from the first bytes of each file.

        Raises ValueError naming a missing, empty or unreadable file.
        """

    def chunks(
        self, start: Position | None = None, *, stop: int | None = None, rows_per_chunk: int = 65536
    ) -> Generator[Chunk, None, None]:
        """Yields chunks of at most `rows_per_chunk` rows, from `start` on and up to the file before `stop`, if given.

        Raises RowError for a bad row beyond the number that may be skipped, ValueError for an unreadable file.
        """


def file_starts(start: Position | None, num_files: int, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields the index of each file from a position on, before the file `stop`, and where its unread rows begin."""
    start = start or Position()
    for index in range(start.file_index, num_files if stop is None else stop):
        yield index, start.offset if index == start.file_index else 0


def row_splits_of(keys: Keys) -> NDArray[np.int64]:
    """Returns the row splits [num_rows + 1] of `keys`; one-hot keys, which have none, get one key per row."""
    return np.arange(keys.num_rows + 1) if keys.row_splits is None else keys.row_splits


def interleave(features: Sequence[Keys]) -> Keys:
    """Returns the keys of features that share a table, in the order of the file: by row, feature, position.

        a = [1, 2], b = [[7], [8, 9]]  ->  [[1, 7], [2, 8, 9]]

    Counting in this order breaks ties the same way however the rows are cut into chunks.
    """
    if len(features) == 1:
        return features[0]
    splits = [row_splits_of(keys) for keys in features]
    lengths = np.stack([np.diff(s) for s in splits])
    ends = np.cumsum(lengths, axis=0)
    row_splits = np.concatenate([[0], np.cumsum(ends[-1])])
    order = np.empty(row_splits[-1], dtype=np.int64)
    first = 0
    for keys, s, length, end in zip(features, splits, lengths, ends, strict=True):
        target = np.repeat(row_splits[:-1] + end - length - s[:-1], length) + np.arange(keys.num_keys)
        order[target] = np.arange(first, first + keys.num_keys)
        first += keys.num_keys
    return replace(take_keys(concatenate_keys(features), order), row_splits=row_splits)


def select_rows(chunk: Chunk, mask: NDArray[np.bool_]) -> Chunk:
    """The rows of `chunk` whose mask [num_rows] is set; its position remains that of the whole chunk."""
    if mask.all():
        return chunk
    keys = {}
    for name, column in chunk.keys.items():
        taken = take_keys(column, np.flatnonzero(column.key_mask(mask)))
        lengths = np.diff(row_splits_of(column))[mask]
        is_list = column.row_splits is not None
        keys[name] = replace(taken, row_splits=np.concatenate([[0], np.cumsum(lengths)]) if is_list else None)
    return replace(
        chunk,
        num_rows=int(mask.sum()),
        label=None if chunk.label is None else chunk.label[mask],
        dense=chunk.dense[mask],
        keys=keys,
        time=None if chunk.time is None else chunk.time[mask],
        weight=None if chunk.weight is None else chunk.weight[mask],
        odd=tuple(cells.of(mask) for cells in chunk.odd),
    )


def concatenate_keys(features: Sequence[Keys]) -> Keys:
    """Returns the keys of all features, at least one, one after the other, without row splits."""
    valid = None
    if any(keys.valid is not None for keys in features):
        valid = np.concatenate([np.ones(k.num_keys, np.bool_) if k.valid is None else k.valid for k in features])
    if features[0].kind == "bytes":
        arrow = pa.concat_arrays([_as_arrow(keys) for keys in features])
        return replace(_from_arrow(arrow), valid=valid)
    return Keys(np.concatenate([keys.values for keys in features]), None, valid)


def take_keys(keys: Keys, order: NDArray[np.int64]) -> Keys:
    """Returns the keys at indices `order` [any length], without row splits."""
    valid = None if keys.valid is None else keys.valid[order]
    if keys.offsets is None:
        return Keys(keys.values[order], None, valid)
    return replace(_from_arrow(_as_arrow(keys).take(pa.array(order))), valid=valid)


def some_keys(keys: Keys, kept: NDArray[np.bool_]) -> Keys:
    """Returns the lists of `keys` with only the ids whose mask [num_keys] is set."""
    assert keys.row_splits is not None, "rows hold lists"
    row_splits = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[keys.row_splits]
    return replace(take_keys(keys, np.flatnonzero(kept)), row_splits=row_splits)


def keys_to_arrow(keys: Keys) -> pa.Array:
    """Returns the keys of each row as integers or large binary, null for a missing one, or as lists of these."""
    flat = pa.array(keys.values) if keys.offsets is None else _as_arrow(keys)
    if keys.valid is not None:
        flat = pa.Array.from_buffers(flat.type, len(flat), [pa.array(keys.valid).buffers()[1], *flat.buffers()[1:]])
    return flat if keys.row_splits is None else pa.LargeListArray.from_arrays(pa.array(keys.row_splits), flat)


def keys_from_arrow(array: pa.Array) -> Keys:
    """The keys in an array from `keys_to_arrow`, or in any rows of one. A missing value has no bytes."""
    row_splits = None
    if pa.types.is_large_list(array.type):
        splits, array = array.offsets.to_numpy(), array.flatten()
        row_splits = splits - splits[0]
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    if pa.types.is_integer(array.type):
        # As they lie there: nobody looks at the number of a missing value.
        numbers = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
        keys = Keys(numbers[array.offset : array.offset + len(array)])
    else:
        keys = _from_arrow(array if valid is None else array.fill_null(b""))
    return replace(keys, valid=valid, row_splits=row_splits)


def _as_arrow(keys: Keys) -> pa.Array:
    assert keys.offsets is not None, "kind bytes"
    buffers = [None, pa.py_buffer(np.ascontiguousarray(keys.offsets)), pa.py_buffer(np.ascontiguousarray(keys.values))]
    return pa.Array.from_buffers(pa.large_binary(), keys.num_keys, buffers)


def _from_arrow(array: pa.Array) -> Keys:
    if not len(array):
        return Keys(np.empty(0, np.uint8), np.zeros(1, np.int64))  # an empty array need not have offsets
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    values = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    return Keys(values, ends - ends[0])

"""Parsing, counting, hashing and lookup of raw rows: typed calls into the native module, or into its reference.

Only this module and `hotrow.kernels.ops` import the native module. If it is not built, or HOTROW_NATIVE=0 is set, the
functions of `hotrow.data.reference` run instead, and `hotrow.kernels.ops` says so: same results and file bytes, many
times slower.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.files import atomic_write
from hotrow.data.chunk import KeyKind, Keys
from hotrow.kernels import ops

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, splitmix64's increment."""


@functools.cache
def backend() -> Any:
    """The module that computes: `hotrow._native`, or `hotrow.data.reference` (`hotrow.kernels.ops` says why)."""
    if ops.backend().reason is None:
        return importlib.import_module("hotrow._native")
    from hotrow.data import reference

    return reference


class Fault(IntEnum):
    """What is wrong with a line, by the numbers in encode_parse.h."""

    COLUMN_COUNT = 1
    LABEL = 2
    NOT_NUMBER = 3
    OVERFLOW = 4
    NOT_HEX = 5
    TOO_LONG = 6


@dataclass(frozen=True)
class RowLayout:
    """The columns of a line of Criteo-like text: ignored... [label] dense... categories..., between delimiters."""

    delimiter: str
    ignored_names: tuple[str, ...]
    """Leading columns, which may hold anything."""
    has_label: bool
    dense_names: tuple[str, ...]
    category_names: tuple[str, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        return self.ignored_names + ("label",) * self.has_label + self.dense_names + self.category_names

    def without_label(self) -> RowLayout:
        """Returns the layout of the same lines that ignores the label, if there is one."""
        return replace(self, ignored_names=self.ignored_names + ("label",) * self.has_label, has_label=False)


@dataclass(frozen=True)
class RowColumns:
    """Columns that `parse_rows` fills with rows."""

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    """[rows, I]."""
    keys: NDArray[np.uint32]
    """[C, stride], stride >= rows."""
    valid: NDArray[np.bool_]
    """[C, stride]."""

    @staticmethod
    def empty(layout: RowLayout, num_rows: int) -> RowColumns:
        """Returns uninitialised columns for `num_rows` rows."""
        # The stride is not a power of two: else the 2 C columns, written side by side, would share a few cache sets.
        stride = -(-num_rows // 64) * 64 + 80
        num_categories = len(layout.category_names)
        return RowColumns(
            np.empty(num_rows, np.float32),
            np.empty((num_rows, len(layout.dense_names)), np.float32),
            np.empty((num_categories, stride), np.uint32),
            np.empty((num_categories, stride), np.bool_),
        )

    def put(self, first_row: int, rows: RowColumns, num_rows: int) -> None:
        """Copies the first rows of other columns."""
        place = slice(first_row, first_row + num_rows)
        self.label[place], self.dense[place] = rows.label[:num_rows], rows.dense[:num_rows]
        self.keys[:, place], self.valid[:, place] = rows.keys[:, :num_rows], rows.valid[:, :num_rows]


class ParseResult(NamedTuple):
    """How far `parse_rows` got."""

    num_rows: int
    num_bytes: int
    """Bytes of whole lines consumed, up to the start of the faulty line if there is one."""
    fault: Fault | None
    column: int
    """0-based column of the faulty value."""


def parse_rows(
    text: NDArray[np.uint8], layout: RowLayout, columns: RowColumns, *, first_row: int, num_rows: int
) -> ParseResult:
    """Parses lines of `text` (which ends with a newline) into rows [first_row, num_rows) of `columns`.

    Stops at the end of the text, when the rows are full, or before the first faulty line; encode_parse.h has the rules.
    """
    stored, num_bytes, fault, column = backend().parse_rows(
        text,
        layout.delimiter,
        len(layout.ignored_names),
        layout.has_label,
        first_row,
        columns.label,
        columns.dense,
        columns.keys,
        columns.valid,
        num_rows,
    )
    return ParseResult(stored, num_bytes, Fault(fault) if fault else None, column)


def hash_keys(keys: Keys, *, hash_cap: int = 0) -> NDArray[np.uint64]:
    """Returns the 64-bit hash of each key, one-to-one for integers (encode_hash.h); with a cap, of key modulo cap."""
    out = np.empty(keys.num_keys, np.uint64)
    if keys.offsets is not None:
        backend().hash_strings(keys.values, keys.offsets, hash_cap, out)
    elif keys.values.dtype in (np.uint32, np.int64):
        backend().hash_keys(np.ascontiguousarray(keys.values), hash_cap, out)
    else:
        raise ValueError(f"integer keys are {keys.values.dtype}; pass uint32 or int64")
    return out


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def stores_bytes(kind: KeyKind, hash_cap: int) -> bool:
    """Returns whether a vocabulary must store its keys: byte strings, unless a hash cap turned them into integers."""
    return kind == "bytes" and hash_cap == 0


def count_codes(
    codes: NDArray[np.int64], row_mask: NDArray[np.bool_] | None, *, num_codes: int
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Returns the codes of all rows, or of rows whose mask is set, by first appearance; and how many rows have each."""
    counts = np.zeros(num_codes, np.uint32)
    appeared = np.empty(min(len(codes), num_codes), np.int64)
    appeared = appeared[: backend().count_codes(np.ascontiguousarray(codes), row_mask, counts, appeared)]
    return appeared, counts[appeared]


class ValueCounts:
    """Rows and positives by value and fold, of the values' 64-bit hashes; value_counts.h has the rules.

    max_values: if there are more distinct values, some are left out, by their hashes. strict: for `before` with times.
    """

    def __init__(self, num_folds: int, *, max_values: int, strict: bool = False) -> None:
        self.num_folds = num_folds
        self._native = backend().ValueCounts(num_folds, max_values, strict)

    def add(
        self,
        hashes: NDArray[np.uint64],
        labels: NDArray[np.bool_],
        counted: NDArray[np.bool_],
        folds: NDArray[np.uint8] | None,
    ) -> None:
        """Counts the rows for which `counted` is set [n]. folds: by row [n]; None if there is one."""
        self._native.add(hashes, labels, counted, folds)

    def put(self, hashes: NDArray[np.uint64], counts: NDArray[np.uint32], *, fold: int = 0, zeros: int = 0) -> None:
        """Adds counts [m, 2 K] of other rows, as `items` returns them; their first fold goes to `fold`."""
        self._native.put(hashes, counts, fold, zeros)

    def get(
        self, hashes: NDArray[np.uint64], own: NDArray[np.bool_] | None = None, folds: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint32]:
        """Returns rows and positives of each row's value [n, 2]: in all folds, or, if `own` is set for a row, in all
        but its own."""
        out = np.empty((len(hashes), 2), np.uint32)
        self._native.get(hashes, own, folds, out)
        return out

    def before(
        self,
        hashes: NDArray[np.uint64],
        labels: NDArray[np.bool_],
        trains: NDArray[np.bool_],
        times: NDArray[np.int64] | None,
        after: ValueCounts,
    ) -> NDArray[np.uint32]:
        """Returns rows and positives of each row's value [n, 2]: for a training row, of the training rows of earlier
        times (without times: before it), and it is then counted; for any other row, those in `after`."""
        out = np.empty((len(hashes), 2), np.uint32)
        self._native.before(hashes, labels, trains, times, after._native, out)
        return out

    def items(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32], int]:
        """Returns the values' hashes in rising order [m], their counts [m, 2 K], and how many leading bits of a hash
        are zero in all values that are counted."""
        hashes = np.empty(self._native.size, np.uint64)
        counts = np.empty((len(hashes), 2 * self.num_folds), np.uint32)
        self._native.items(hashes, counts)
        order = np.argsort(hashes)
        return hashes[order], counts[order], self._native.zeros


class Counter:
    """Counts keys of one kind, in order of first appearance; missing ones are counted separately.

    hash_cap: if not 0, keys are counted modulo this. order: first-appearance number of the first key, so that counters
    that follow one another (after a drain or a resume) share one order.
    """

    def __init__(self, kind: KeyKind, *, hash_cap: int = 0, order: int = 0) -> None:
        self.kind, self.hash_cap = kind, hash_cap
        self._bytes = stores_bytes(kind, hash_cap)
        self._counter = backend().Counter(self._bytes, order)

    def __reduce__(self) -> Any:
        """Pickles without counts, which `drain` has written."""
        assert not self.num_keys + self.num_missing, "drained"
        return functools.partial(Counter, self.kind, hash_cap=self.hash_cap, order=self.order), ()

    def add(self, keys: Keys, counts: NDArray[np.uint32] | None = None) -> None:
        """Counts key i counts[i] times, as if it came that often in a row; None counts each key once."""
        if keys.kind != self.kind:
            raise ValueError(f"keys are of kind {keys.kind!r}, this counter counts {self.kind!r}")
        hashes = hash_keys(keys, hash_cap=self.hash_cap)
        data, offsets = (keys.values, keys.offsets) if self._bytes else (None, None)
        self._counter.add(hashes, keys.valid, counts, data, offsets)

    def drain(self, path: Path) -> None:
        """Writes all counts to `path` as a run, whole or not at all (OSError), and empties the counter."""
        with atomic_write(path) as file:
            self._counter.drain(file.fileno())

    def num_bytes_after(self, keys: Keys) -> int:
        """Returns an upper limit of this counter's memory after `add(keys)`."""
        num_key_bytes = int(keys.offsets[-1] - keys.offsets[0]) if self._bytes and keys.offsets is not None else 0
        return int(self._counter.num_bytes_after(keys.num_keys, num_key_bytes))

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return int(self._counter.num_bytes)

    @property
    def num_keys(self) -> int:
        """Number of distinct keys held now."""
        return int(self._counter.num_keys)

    @property
    def num_missing(self) -> int:
        """Number of missing values counted since the last drain."""
        return int(self._counter.num_missing)

    @property
    def order(self) -> int:
        """First-appearance number of the next new key."""
        return int(self._counter.order)


def merge_runs(runs: Sequence[Path], out: Path, *, memory_bytes: int) -> None:
    """Merges several runs into one. Raises ValueError naming a damaged run."""
    with open_runs(runs) as fds, atomic_write(out) as file:
        backend().merge_runs(fds, file.fileno(), memory_bytes)


@contextmanager
def open_runs(runs: Sequence[Path]) -> Iterator[list[int]]:
    """Opens runs, yields their file descriptors, and puts the path into an error about "run 3" inside the block."""
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb", buffering=0)) for path in runs]
        try:
            yield [file.fileno() for file in files]
        except ValueError as error:
            if not (found := re.match(r"run (\d+) ", str(error))):
                raise
            path = runs[int(found[1])]
            raise ValueError(
                f"{path}: this file of counts is truncated or altered; delete {path.parent} and start again"
            ) from None


@dataclass(frozen=True)
class Table:
    """The searchable arrays of a vocabulary, or a slice of them that starts at directory bucket `first_bucket`."""

    directory_bits: int
    first_bucket: int
    directory: NDArray[Any]
    """uint32 or uint64 [num_buckets + 1]: index of the first key of each bucket."""
    hashes: NDArray[np.uint64]
    """[num_keys], sorted."""
    rows: NDArray[Any]
    """[num_keys], dtype of directory."""
    key_offsets: NDArray[np.uint64] | None
    """[num_keys + 1] if keys are byte strings."""
    key_bytes: NDArray[np.uint8] | None

    @property
    def num_bytes(self) -> int:
        arrays = (self.directory, self.hashes, self.rows, self.key_offsets, self.key_bytes)
        return sum(array.nbytes for array in arrays if array is not None)


def lookup_rows(table: Table, keys: Keys, hashes: NDArray[np.uint64], *, missing_row: int, out: NDArray[Any]) -> None:
    """out[i] = row of key i, exactly (keys are compared, not only hashes); 0 if unseen, missing_row if missing.

    hashes: `hash_keys(keys)`. out: int32 or int64 [num_keys], contiguous.
    """
    data, offsets = (None, None) if table.key_offsets is None else (keys.values, keys.offsets)
    backend().lookup_rows(
        hashes,
        keys.valid,
        data,
        offsets,
        table.directory_bits,
        table.first_bucket,
        table.directory,
        table.hashes,
        table.rows,
        table.key_offsets,
        table.key_bytes,
        missing_row,
        out,
    )

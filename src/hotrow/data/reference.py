"""The readable reference of native/{parse,count,vocabulary}.cpp, and the fallback without them.

Names, arguments, results and file bytes are the same as in the native module (native/include/hotrow/encode_*.h has the
contracts and layouts); the speed is a small fraction, and everything is in memory. `hotrow.data.native` calls it.
"""

# ruff: noqa: D102, FBT001, RUF100 - the native module's signatures, documented in its headers

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBER = re.compile(rb"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
INTEGER = re.compile(rb"-?\d+")
LABEL_TEXT = re.compile(rb"[01](\.0*)?")
HEX = re.compile(rb"[0-9a-fA-F]*")
COLUMN_COUNT, LABEL, NOT_NUMBER, OVERFLOW, NOT_HEX, TOO_LONG = range(1, 7)


class _RowFaultError(Exception):
    def __init__(self, fault: int, column: int) -> None:
        self.fault, self.column = fault, column


def _parse_dense(field: bytes) -> float:
    """Returns the number, NaN if `field` is empty; raises _RowFaultError without a column (-1)."""
    if not field:
        return math.nan
    if not NUMBER.fullmatch(field):
        raise _RowFaultError(NOT_NUMBER, -1)
    if INTEGER.fullmatch(field):
        value = int(field)
        if not -(2**63) <= value < 2**63:
            raise _RowFaultError(OVERFLOW, -1)
        return float(np.float32(np.int64(value)))
    with np.errstate(over="ignore"):
        decimal = float(np.float32(float(field)))
    if math.isinf(decimal):
        raise _RowFaultError(OVERFLOW, -1)
    return decimal


def _parse_line(
    line: bytes, delimiter: bytes, num_ignored: int, has_label: bool, num_dense: int, num_categories: int
) -> Any:
    """Returns `(label, dense, [(key, valid), ...])` of one line; raises the fault of the leftmost faulty column."""
    fields = line.removesuffix(b"\r").split(delimiter)
    num_columns = num_ignored + has_label + num_dense + num_categories
    label, dense, categories = 0.0, [], []
    for column, field in enumerate(fields):
        if column >= num_columns:
            raise _RowFaultError(COLUMN_COUNT, num_columns - 1)
        place = column - num_ignored - has_label
        try:
            if has_label and place == -1:
                label = _parse_label(field)
            elif 0 <= place < num_dense:
                dense.append(_parse_dense(field))
            elif place >= num_dense:
                categories.append(_parse_category(field))
        except _RowFaultError as error:
            error.column = column
            raise
    if len(fields) < num_columns:
        raise _RowFaultError(COLUMN_COUNT, len(fields) - 1)
    return label, dense, categories


def _parse_label(field: bytes) -> float:
    if not LABEL_TEXT.fullmatch(field):
        raise _RowFaultError(LABEL, -1)
    return float(field)


def _parse_category(field: bytes) -> tuple[int, bool]:
    num_digits = HEX.match(field).end()  # type: ignore[union-attr]  # an empty match always exists
    if num_digits > 8:
        raise _RowFaultError(TOO_LONG, -1)
    if num_digits < len(field):
        raise _RowFaultError(NOT_HEX, -1)
    return int(field or b"0", 16), bool(field)


def parse_rows(
    text: NDArray[np.uint8],
    delimiter: str,
    num_ignored: int,
    has_label: bool,
    first_row: int,
    label: NDArray[np.float32],
    dense: NDArray[np.float32],
    keys: NDArray[np.uint32],
    valid: NDArray[np.bool_],
    num_rows: int,
) -> tuple[int, int, int, int]:
    """Returns `(rows stored, bytes consumed, fault, column)`."""
    data = text.tobytes()
    row, start = first_row, 0
    while row < num_rows and start < len(data):
        end = data.index(b"\n", start)
        try:
            values = _parse_line(data[start:end], delimiter.encode(), num_ignored, has_label, dense.shape[1], len(keys))
        except _RowFaultError as error:
            return row - first_row, start, error.fault, error.column
        if has_label:
            label[row] = values[0]
        dense[row] = values[1]
        for c, (key, is_valid) in enumerate(values[2]):
            keys[c, row], valid[c, row] = key, is_valid
        row, start = row + 1, end + 1
    return row - first_row, start, 0, 0


def fmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finalizer of MurmurHash3, one-to-one, as in native/include/hotrow/encode_hash.h."""
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def hash_keys(keys: NDArray[Any], cap: int, out: NDArray[np.uint64]) -> None:
    """Hashes integer keys."""
    if cap:
        keys = keys % np.array(cap, keys.dtype) if cap <= np.iinfo(keys.dtype).max else keys
    out[:] = fmix64(keys.astype(np.int64).view(np.uint64))


def hash_string(key: bytes) -> int:
    h = fmix64(np.array([len(key)], np.uint64))
    for word in np.frombuffer(key + bytes(-len(key) % 8), "<u8"):
        h = fmix64(h ^ word)
    return int(h[0])


def hash_strings(data: NDArray[np.uint8], offsets: NDArray[np.int64], cap: int, out: NDArray[np.uint64]) -> None:
    """Hashes byte-string keys."""
    raw = data.tobytes()
    for i, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        out[i] = hash_string(raw[start:end])
    if cap:
        out[:] = fmix64(out % np.uint64(cap))


class ValueCounts:
    """Counts as value_counts.h says."""

    def __init__(self, num_folds: int, max_values: int, strict: bool) -> None:
        self.num_folds, self.max_values, self.zeros = num_folds, max_values, 0
        self._counts: dict[int, NDArray[np.int64]] = {}
        self._held: dict[int, tuple[int, list[int]]] | None = {} if strict else None

    @property
    def size(self) -> int:
        return len(self._counts)

    def _leaves_out(self, value: int) -> bool:
        return value >> 64 - self.zeros > 0

    def _leave_out(self, zeros: int) -> None:
        self.zeros = max(zeros, self.zeros)
        self._counts = {value: own for value, own in self._counts.items() if not self._leaves_out(value)}

    def _enter(self, value: int) -> NDArray[np.int64] | None:
        while not self._leaves_out(value) and value not in self._counts and self.size == self.max_values:
            self._leave_out(self.zeros + 1)
        if self._leaves_out(value):
            return None
        return self._counts.setdefault(value, np.zeros((self.num_folds, 2), np.int64))

    def add(self, hashes: Any, labels: Any, counted: Any, folds: Any) -> None:
        for i in np.flatnonzero(counted).tolist():
            if (own := self._enter(int(hashes[i]))) is not None:
                _add_to(own[0 if folds is None else folds[i]], [1, int(labels[i])])

    def put(self, hashes: Any, counts: Any, first_fold: int, zeros: int) -> None:
        self._leave_out(zeros)
        for value, more in zip(hashes.tolist(), counts.reshape(len(hashes), -1, 2).tolist(), strict=True):
            if (own := self._enter(value)) is not None:
                for k, each in enumerate(more, first_fold):
                    _add_to(own[k], each)

    def get(self, hashes: Any, own: Any, folds: Any, out: Any) -> None:
        for i, value in enumerate(hashes.tolist()):
            total = np.zeros(2, np.int64)
            for k, each in enumerate(self._counts.get(value, ())):
                if own is None or not own[i] or k != folds[i]:
                    _add_to(total, each)
            out[i] = total

    def before(self, hashes: Any, labels: Any, trains: Any, times: Any, after: ValueCounts, out: Any) -> None:
        out[:] = 0
        for i, value in enumerate(hashes.tolist()):
            if after._leaves_out(value):
                continue
            if not trains[i]:
                out[i] = after._counts[value][0] if value in after._counts else 0
            elif (own := self._enter(value)) is not None:
                if times is None or self._held is None:
                    out[i] = own[0]
                    _add_to(own[0], [1, int(labels[i])])
                    continue
                time, held = self._held.get(value, (int(times[i]), [0, 0]))
                if time != times[i]:
                    _add_to(own[0], held)
                    held = [0, 0]
                out[i] = own[0]
                self._held[value] = int(times[i]), [held[0] + 1, held[1] + int(labels[i])]

    def items(self, hashes: Any, counts: Any) -> None:
        for i, (value, own) in enumerate(self._counts.items()):
            hashes[i], counts[i] = value, own.reshape(-1)


def _add_to(counts: NDArray[np.int64], more: Any) -> None:
    """Adds to rows and positives, which stay where rows have reached the most that a counter holds."""
    if counts[0] < 2**32 - 1:
        counts[:] = np.minimum(counts + np.array(more), 2**32 - 1)


RUN_HEADER = struct.Struct("<8sII4QI")
RUN_RECORD = struct.Struct("<3Q")
RUN_MAGIC = b"hotrowrn"
NEVER_MISSING = 2**64 - 1


def _write_run(
    fd: int, has_bytes: bool, records: Iterator[tuple[int, bytes, int, int]], missing: tuple[int, int]
) -> None:
    parts, num_keys = [], 0
    for h, key, count, first in records:
        parts.append(RUN_RECORD.pack(h, count, first))
        parts.append(struct.pack("<I", len(key)) + key if has_bytes else b"")
        num_keys += 1
    payload = b"".join(parts)
    header = RUN_HEADER.pack(RUN_MAGIC, 1, has_bytes, num_keys, *missing, len(payload), zlib.crc32(payload))
    os.pwrite(fd, header + struct.pack("<I", zlib.crc32(header)) + payload, 0)


def _read_run(fd: int, has_bytes: bool, name: str) -> tuple[list[tuple[int, bytes, int, int]], tuple[int, int]]:
    """Returns `([(hash, key, count, first), ...], (missing count, missing first))`. Raises ValueError if damaged."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        raw = file.read()
    size = RUN_HEADER.size
    damaged = ValueError(f"{name} is truncated or altered")
    if len(raw) < size + 4 or struct.unpack_from("<I", raw, size)[0] != zlib.crc32(raw[:size]):
        raise damaged
    magic, version, stored, num_keys, missing_count, missing_first, num_bytes, crc = RUN_HEADER.unpack_from(raw)
    payload = raw[size + 4 : size + 4 + num_bytes]
    if (magic, version, stored) != (RUN_MAGIC, 1, has_bytes) or len(payload) < num_bytes or zlib.crc32(payload) != crc:
        raise damaged
    records, at = [], 0
    for _ in range(num_keys):
        h, count, first = RUN_RECORD.unpack_from(payload, at)
        at += RUN_RECORD.size
        key = b""
        if has_bytes:
            (length,) = struct.unpack_from("<I", payload, at)
            key = payload[at + 4 : at + 4 + length]
            at += 4 + length
        records.append((h, key, count, first))
    return records, (missing_count, missing_first)


def _merged(run_fds: list[int], has_bytes: bool) -> tuple[Iterator[tuple[int, bytes, int, int]], tuple[int, int]]:
    runs = [_read_run(fd, has_bytes, f"run {r}") for r, fd in enumerate(run_fds)]

    def sums() -> Iterator[tuple[int, bytes, int, int]]:
        rows = heapq.merge(*(records for records, _ in runs))
        for (h, key), group in itertools.groupby(rows, key=lambda record: record[:2]):
            same = list(group)
            yield h, key, sum(record[2] for record in same), min(record[3] for record in same)

    counts, firsts = zip(*(missing for _, missing in runs), strict=True) if runs else ((0,), (NEVER_MISSING,))
    return sums(), (sum(counts), min(firsts))


def merge_runs(run_fds: list[int], out_fd: int, memory_bytes: int) -> None:
    """Merges several runs into one."""
    del memory_bytes
    has_bytes = bool(run_fds) and os.pread(run_fds[0], 16, 0)[12:] == b"\1\0\0\0"
    _write_run(out_fd, has_bytes, *_merged(run_fds, has_bytes))


def count_codes(
    codes: NDArray[np.int64], mask: NDArray[np.bool_] | None, counts: NDArray[np.uint32], appeared: NDArray[np.int64]
) -> int:
    """Counts codes of rows whose mask is set and lists them by first appearance; returns how many appeared."""
    num_appeared = 0
    for code in codes.tolist() if mask is None else codes[mask].tolist():
        if counts[code] == 0:
            appeared[num_appeared] = code
            num_appeared += 1
        counts[code] += 1
    return num_appeared


class Counter:
    """Counts by key, in order of first appearance."""

    def __init__(self, has_bytes: bool, order: int) -> None:
        self._has_bytes, self._first_order = has_bytes, order
        self._counts: dict[tuple[int, bytes], list[int]] = {}
        self._missing = [0, NEVER_MISSING]

    def add(
        self,
        hashes: NDArray[np.uint64],
        valid: NDArray[np.bool_] | None,
        counts: NDArray[np.uint32] | None,
        data: NDArray[np.uint8] | None,
        offsets: NDArray[np.int64] | None,
    ) -> None:
        """Counts key i counts[i] times, as if it came that often in a row; None counts each key once."""
        raw = b"" if data is None else data.tobytes()
        for i, h in enumerate(hashes.tolist()):
            count = 1 if counts is None else int(counts[i])
            if count == 0:
                continue
            if valid is not None and not valid[i]:
                self._missing = [self._missing[0] + count, min(self._missing[1], self.order)]
                continue
            key = b"" if offsets is None else raw[int(offsets[i]) : int(offsets[i + 1])]
            self._counts.setdefault((h, key), [0, self.order])[0] += count

    def drain(self, fd: int) -> None:
        """Writes a run and empties the counter."""
        records = ((h, key, count, first) for (h, key), (count, first) in sorted(self._counts.items()))
        _write_run(fd, self._has_bytes, records, (self._missing[0], self._missing[1]))
        self._first_order = self.order
        self._counts, self._missing = {}, [0, NEVER_MISSING]

    @property
    def num_keys(self) -> int:
        return len(self._counts)

    @property
    def num_missing(self) -> int:
        return self._missing[0]

    @property
    def order(self) -> int:
        return self._first_order + len(self._counts)

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_after(0, 0)

    def num_bytes_after(self, num_keys: int, num_key_bytes: int) -> int:
        """Returns about the memory in CPython: a tuple, two integers and a list per key."""
        return 300 * (len(self._counts) + num_keys) + num_key_bytes


class VocabularyBuilder:
    """Turns runs into ranks, and these into the sections of a vocabulary file."""

    def __init__(self, has_bytes: bool, tmp_dir: str, memory_bytes: int) -> None:
        del tmp_dir, memory_bytes
        self._has_bytes = has_bytes
        self._candidates: list[tuple[int, int, tuple[int, bytes] | None]] = []
        self._rows: dict[tuple[int, bytes], int] = {}
        self.num_accesses = self.num_distinct = self.missing_row = 0
        self.num_rows = 1

    def merge(self, run_fds: list[int], min_count: int) -> None:
        """Sums runs; keys that reach min_count become candidates."""
        sums, (missing_count, missing_first) = _merged(run_fds, self._has_bytes)
        for h, key, count, first in sums:
            self.num_distinct += 1
            self.num_accesses += count
            if count >= min_count:
                self._candidates.append((-count, 2 * first + 1, (h, key)))
        self.num_accesses += missing_count
        if missing_count and missing_count >= min_count:
            self._candidates.append((-missing_count, 2 * missing_first, None))

    def rank(self, max_rows: int, counts_fd: int, offset: int, wide: bool) -> None:
        """Numbers candidates by popularity and writes counts by row."""
        counts = [0]
        for negative_count, _, key in sorted(self._candidates, key=lambda candidate: candidate[:2]):
            if max_rows and self.num_rows >= max_rows:
                break
            if key is None:
                self.missing_row = self.num_rows
            else:
                self._rows[key] = self.num_rows
            counts.append(-negative_count)
            self.num_rows += 1
        counts[0] = self.num_accesses - sum(counts)
        os.pwrite(counts_fd, np.array(counts, "<u8" if wide else "<u4").tobytes(), offset)

    @property
    def num_keys(self) -> int:
        return len(self._rows)

    def write(self, fd: int, directory_bits: int, wide: bool, offsets: list[int]) -> list[tuple[int, int]]:
        """Writes the five sections; returns `(num_bytes, crc32)` of each."""
        index = "<u8" if wide else "<u4"
        items = sorted(self._rows.items())
        hashes = np.array([h for (h, _), _ in items], "<u8")
        buckets = (hashes >> np.uint64(64 - directory_bits)).astype(np.int64)
        directory = np.searchsorted(buckets, np.arange(2**directory_bits + 1)).astype(index)
        rows = np.array([row for _, row in items], index)
        keys = [key for (_, key), _ in items] if self._has_bytes else []
        ends = np.cumsum([0] + [len(key) for key in keys]).astype("<u8") if self._has_bytes else np.array([], "<u8")
        sections = [directory.tobytes(), hashes.tobytes(), rows.tobytes(), ends.tobytes(), b"".join(keys)]
        for section, offset in zip(sections, offsets, strict=True):
            os.pwrite(fd, section, offset)
        return [(len(section), zlib.crc32(section)) for section in sections]


def lookup_rows(
    hashes: NDArray[np.uint64],
    valid: NDArray[np.bool_] | None,
    data: NDArray[np.uint8] | None,
    offsets: NDArray[np.int64] | None,
    directory_bits: int,
    first_bucket: int,
    directory: NDArray[Any],
    table_hashes: NDArray[np.uint64],
    rows: NDArray[Any],
    key_offsets: NDArray[np.uint64] | None,
    key_bytes: NDArray[np.uint8] | None,
    missing_row: int,
    out: NDArray[Any],
) -> None:
    """Finds rows of keys by binary search; the directory only speeds up the native function."""
    del directory_bits, first_bucket, directory
    place = np.searchsorted(table_hashes, hashes)
    if key_offsets is None or key_bytes is None or data is None or offsets is None:
        inside = np.minimum(place, max(len(table_hashes) - 1, 0))
        found = table_hashes[inside] == hashes if len(table_hashes) else np.zeros(len(hashes), np.bool_)
        out[:] = np.where(found, rows[inside], 0) if len(table_hashes) else 0
    else:
        raw = data.tobytes()
        for i, j in enumerate(place.tolist()):
            key = raw[int(offsets[i]) : int(offsets[i + 1])]
            out[i] = 0
            while j < len(table_hashes) and table_hashes[j] == hashes[i]:
                if key_bytes[int(key_offsets[j]) : int(key_offsets[j + 1])].tobytes() == key:
                    out[i] = rows[j]
                j += 1
    if valid is not None:
        out[~valid] = missing_row

"""Estimates what a preparation needs before it starts: rows, disk and time, from the first rows of the source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotrow.base.files import disk_free_bytes, size
from hotrow.base.progress import duration
from hotrow.data.chunk import Chunk, Keys, NoRowsError, SourceInfo
from hotrow.data.native import Counter
from hotrow.data.packed.format import ROWS_PER_BLOCK
from hotrow.data.prepare.lag import ROW_BYTES, STATISTIC_BYTES
from hotrow.data.prepare.timesort import NUM_WRITTEN, TimeOrder, to_arrow
from hotrow.data.sources.registry import OpenedSource

SAMPLE_ROWS = 2 * ROWS_PER_BLOCK
VOCABULARY_GROWTH = 0.75
"""In click logs distinct ids grow about as rows^0.75 (Heaps' law); 1 would mean that no id ever repeats."""
VOCABULARY_KEY_BYTES = 24
"""Hash 8, row 4, directory 1 to 4, count 4, and 8 more to locate a text key; the text itself is extra."""
RUN_KEY_BYTES = 24
"""A counted key on disk: hash, count, order of first appearance (spill.py)."""
LOOKUP_SHARE = 1.2
"""Time to look up an id and write its row number, relative to the time to count it."""


@dataclass(frozen=True)
class Estimate:
    """What one preparation needs; only `input_bytes` and `free_bytes` are exact."""

    rows: int
    rows_exact: bool
    input_bytes: int
    packed_bytes: int
    """Size of parts, vocabularies and counts."""
    spill_bytes: int
    """Largest size of the temporary files."""
    free_bytes: int
    seconds: float

    @property
    def disk_bytes(self) -> int:
        """Free disk space needed during preparation."""
        return self.packed_bytes + self.spill_bytes

    def check_disk(self, out: Path) -> None:
        """Raises ValueError, which says how much is missing, if the disk of `out` is too small."""
        if self.disk_bytes > self.free_bytes:
            short = self.disk_bytes - self.free_bytes
            raise ValueError(
                f"{out} needs about {size(self.disk_bytes)} ({size(self.packed_bytes)} of data and "
                f"{size(self.spill_bytes)} temporary), but {size(self.free_bytes)} are free: {size(short)} short; "
                "free some space, choose another disk, or take fewer rows (--rows, --sample)"
            )

    def __str__(self) -> str:
        about = "" if self.rows_exact else "about "
        return (
            f"{about}{self.rows:,} rows, {size(self.input_bytes)} of input; needs about {size(self.packed_bytes)} of "
            f"disk and {size(self.spill_bytes)} temporarily ({size(self.free_bytes)} free), and about "
            f"{duration(self.seconds)}"
        )


def estimate_work(
    opened: OpenedSource, info: SourceInfo, out: Path, *, rows: int | None = None, sample: float = 1.0
) -> Estimate:
    """Estimates what preparing `rows` rows into `out` needs, by reading and counting the first rows. If None, all
    rows are prepared."""
    num_rows = min(info.num_rows, rows or info.num_rows)
    started = time.perf_counter()
    chunks = _first_chunks(opened, num_rows)
    read_s = time.perf_counter() - started
    sampled = sum(chunk.num_rows for chunk in chunks)
    if sampled == 0:
        if num_bad := opened.source.skipped.num_rows:
            raise ValueError(f"{info.files[0].path} has no good row, and {num_bad:,} bad ones; see what changed in it")
        raise NoRowsError(f"{info.files[0].path} has no rows; there is nothing to prepare")
    started = time.perf_counter()
    growth = (max(num_rows * sample, 1) / sampled) ** VOCABULARY_GROWTH
    keys = [_count(opened, chunks, table) for table in opened.schema.table_names]
    count_s = time.perf_counter() - started
    num_keys = sum(n for n, _ in keys) * growth
    text_bytes = sum(num_bytes for _, num_bytes in keys) * growth
    row_bytes = _row_bytes(opened, chunks) / sampled
    per_row_s = (max(read_s, count_s) + max(read_s, LOOKUP_SHARE * count_s)) / sampled
    return Estimate(
        rows=num_rows,
        rows_exact=info.num_rows_exact,
        input_bytes=info.num_bytes,
        packed_bytes=int(num_rows * sample * row_bytes + num_keys * VOCABULARY_KEY_BYTES + text_bytes),
        spill_bytes=int(
            num_keys * RUN_KEY_BYTES
            + text_bytes
            + num_rows * sample * (_sort_bytes(opened, chunks) / sampled + _lag_bytes(opened))
        ),
        free_bytes=disk_free_bytes(out),
        seconds=per_row_s * num_rows,
    )


def _first_chunks(opened: OpenedSource, num_rows: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for chunk in opened.source.chunks():
        chunks.append(chunk)
        if sum(c.num_rows for c in chunks) >= min(SAMPLE_ROWS, num_rows):
            break
    return chunks


def _count(opened: OpenedSource, chunks: list[Chunk], table: str) -> tuple[int, int]:
    """Returns the number of distinct keys of a table in the sampled rows, and about how many bytes their text takes."""
    features = opened.schema.features_of(table)
    counter = Counter(opened.source.key_kinds[features[0]], hash_cap=opened.schema.table(table).hash_cap or 0)
    columns = [chunk.keys[feature] for chunk in chunks for feature in features]
    for keys in columns:
        counter.add(keys)
    text_bytes = sum(int(k.offsets[-1]) for k in columns if k.offsets is not None)
    return counter.num_keys, text_bytes * counter.num_keys // max(sum(k.num_keys for k in columns), 1)


def _sort_bytes(opened: OpenedSource, chunks: list[Chunk]) -> int:
    """Returns the bytes of the sampled rows in the files that sort them by time; 0 if they need not be sorted."""
    order = TimeOrder()
    for chunk in chunks:
        order.add(np.empty(0, np.int64) if chunk.time is None else chunk.time)
    if order.rises or not opened.schema.statistics:
        return 0
    return sum(NUM_WRITTEN * int(to_arrow(chunk, np.zeros(chunk.num_rows, np.uint8)).nbytes) for chunk in chunks)


def _lag_bytes(opened: OpenedSource) -> int:
    """Returns the bytes of a row in the file of rows that wait to be counted."""
    schema = opened.schema
    return 0 if schema.statistics_lag is None else ROW_BYTES + STATISTIC_BYTES * len(schema.statistics)


def _row_bytes(opened: OpenedSource, chunks: list[Chunk]) -> int:
    """Returns the stored bytes of the sampled rows: float32 labels, weight and dense, int32 ids, int64 offsets of
    lists."""
    num_targets = len(opened.schema.labels) + (opened.schema.weight is not None)
    dense = sum(4 * (num_targets * chunk.num_rows + chunk.dense.size) for chunk in chunks)
    return dense + sum(_id_bytes(keys) for chunk in chunks for keys in chunk.keys.values())


def _id_bytes(keys: Keys) -> int:
    return 4 * keys.num_keys + (0 if keys.row_splits is None else 8 * keys.num_rows)

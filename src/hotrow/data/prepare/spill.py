"""Counting under a memory budget: what does not fit goes to disk, and the vocabularies are the same bit for bit.

    with CounterPool(folder, memory_bytes=2 << 30, executor=executor) as counters:
        for table, features in tables.items():
            counters.declare(table, source.key_kinds[features[0]])
        for chunk in chunks:
            columns = {table: [column_of(chunk.keys, f) for f in features] for table, features in tables.items()}
            counters.add(columns, is_training_row)
        for table in tables:
            counters.build(table, out / "vocab" / table, out / "counts" / table, min_count=2)

When the counters together would exceed the budget, the largest is written out as a sorted run of partial counts and
emptied; a table's runs are merged when its vocabulary is built. Next: `encoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder, remove
from hotrow.base.files import explain_full_disk, file_name
from hotrow.data.chunk import KeyKind, Keys, interleave
from hotrow.data.coded import CodedKeys
from hotrow.data.native import Counter, merge_runs
from hotrow.data.packed.vocabulary import TableSummary, build_vocabulary

MAX_RUNS = 64
"""A table's runs are merged into one at this number: a merge keeps every run open, and open files are limited."""
RUN_SUFFIX = ".run"
PART_BITS = 40
"""A part has fewer new ids than 2^40; the builder takes numbers below 2^63."""


Built = TypeVar("Built")


@dataclass
class _TableCounts:
    """The counter of one table and the runs that it was written to."""

    name: str
    kind: KeyKind
    hash_cap: int
    counter: Counter
    runs: list[Path] = field(default_factory=list)
    next_run: int = 0

    def new_run(self, folder: Path) -> Path:
        self.next_run += 1
        return folder / f"{file_name(self.name)}.{self.next_run}{RUN_SUFFIX}"


class _Add(NamedTuple):
    """What the counter of one table has to count in a chunk."""

    counter: Counter
    keys: Keys
    counts: NDArray[np.uint32] | None

    def run(self) -> None:
        self.counter.add(self.keys, self.counts)


def _occurrences(
    features: Sequence[Keys | CodedKeys], row_mask: NDArray[np.bool_] | None
) -> tuple[Keys, NDArray[np.uint32] | None]:
    """Returns the keys of a table's features in the order of the rows, and how often each comes; if None, once."""
    if len(features) == 1 and isinstance(features[0], CodedKeys):
        return features[0].distinct(row_mask)
    keys = interleave([f.written_out() if isinstance(f, CodedKeys) else f for f in features])
    return keys, None if row_mask is None else keys.key_mask(row_mask).astype(np.uint32)


class CounterPool:
    """Counts the keys of many tables, together within `memory_bytes`; what does not fit goes to `folder`.

    Leaving the `with` block empties the folder. executor: its `threads` count, each table in one thread at a time. If
    None, the caller's thread counts; the counts are the same. part: the place of the rows among those that other pools
    count, in folders of their own: ids of an earlier part were seen first.
    """

    def __init__(
        self, folder: Path, *, memory_bytes: int, executor: Executor | None = None, threads: int = 1, part: int = 0
    ) -> None:
        remove(folder)
        make_folder(folder)
        self.folder, self.memory_bytes, self._order = folder, memory_bytes, part << PART_BITS
        self._map: Callable[..., Iterable[Any]] = map if executor is None else executor.map
        self._at_once = 1 if executor is None else threads
        self.num_spills = 0
        """Counters written out because the budget was reached, for the report."""
        self._tables: dict[str, _TableCounts] = {}

    def declare(self, table: str, kind: KeyKind, *, hash_cap: int = 0) -> None:
        """Announces a table. Raises ValueError if it was declared with another kind or cap: its features must agree."""
        known = self._tables.get(table)
        if known is None:
            counter = Counter(kind, hash_cap=hash_cap, order=self._order)
            self._tables[table] = _TableCounts(table, kind, hash_cap, counter)
        elif (known.kind, known.hash_cap) != (kind, hash_cap):
            raise ValueError(
                f"{self.folder}: table {table!r} is declared with {kind!r} keys and hash_cap {hash_cap}, before with "
                f"{known.kind!r} and {known.hash_cap}; features that share a table need the same"
            )

    def add(self, columns: Mapping[str, Sequence[Keys | CodedKeys]], row_mask: NDArray[np.bool_] | None = None) -> None:
        """Counts the keys of all rows of a chunk, or of those whose mask [num_rows] is set (the training rows).

        columns: by table, its features' keys in the schema's order.
        """
        occurrences = self._map(partial(_occurrences, row_mask=row_mask), columns.values())
        adds = [_Add(self._tables[table].counter, *some) for table, some in zip(columns, occurrences, strict=True)]
        if self._num_bytes_after(adds) <= self.memory_bytes:
            list(self._map(_Add.run, adds))
            return
        # One by one: room is made for the most that this table may need, with what the others turned out to need.
        for add in adds:
            self._make_room(add)
            add.run()

    def _make_room(self, add: _Add) -> None:
        """Writes out the largest counter, again and again, until `add` fits the budget."""
        while self._num_bytes_after([add]) > self.memory_bytes:
            largest = max(self._tables.values(), key=lambda counts: counts.counter.num_bytes)
            if largest.counter.num_keys == 0:
                break
            self._spill(largest)
            self.num_spills += 1

    def _num_bytes_after(self, adds: Sequence[_Add]) -> int:
        """Returns an upper limit of the memory of all counters after `adds`."""
        return self.num_bytes + sum(add.counter.num_bytes_after(add.keys) - add.counter.num_bytes for add in adds)

    @property
    def num_bytes(self) -> int:
        """Memory that all counters hold now."""
        return sum(counts.counter.num_bytes for counts in self._tables.values())

    def write_out(self) -> None:
        """Writes all counts to the folder. The pool then pickles, without its executor's threads."""
        for counts in self._tables.values():
            if counts.counter.num_keys or counts.counter.num_missing:
                self._spill(counts)
        self._map, self._at_once = map, 1

    def each(self, build: Callable[[str], Built]) -> dict[str, Built]:
        """The result of `build`, which calls the pool's own, for each table; several tables are built at a time."""
        return dict(zip(self._tables, self._map(build, self._tables), strict=True))

    def merge(self, other: CounterPool) -> None:
        """Takes over the counts that another pool has written to its folder."""
        for table, counts in self._tables.items():
            counts.runs += other._tables[table].runs
            if len(counts.runs) >= MAX_RUNS:
                self._merge(counts)

    def build(self, table: str, vocab_path: Path, counts_path: Path, *, min_count: int = 1) -> TableSummary:
        """Writes the vocabulary and counts of a table from all that was counted; see `build_vocabulary`.

        Uses its share of the memory that the other tables' counters leave. Counting may continue afterwards.
        """
        counts = self._tables[table]
        if counts.counter.num_keys or counts.counter.num_missing:
            self._spill(counts)
        with self._explain(f"building the vocabulary of table {table!r}"):
            return build_vocabulary(
                counts.runs,
                vocab_path,
                counts_path,
                key_kind=counts.kind,
                hash_cap=counts.hash_cap,
                min_count=min_count,
                memory_bytes=(self.memory_bytes - self.num_bytes) // self._at_once,
                tmp_dir=self.folder,
            )

    def close(self) -> None:
        """Removes everything that this pool wrote."""
        self._tables = {}
        remove(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spill(self, counts: _TableCounts) -> None:
        with self._explain(f"writing out counts of table {counts.name!r}"):
            run = counts.new_run(self.folder)
            counts.counter.drain(run)
            counts.runs.append(run)
        if len(counts.runs) >= MAX_RUNS:
            self._merge(counts)

    def _merge(self, counts: _TableCounts) -> None:
        with self._explain(f"merging counts of table {counts.name!r}"):
            merged = counts.new_run(self.folder)
            merge_runs(counts.runs, merged, memory_bytes=max(self.memory_bytes - self.num_bytes, 1 << 20))
            old, counts.runs = counts.runs, [merged]
            for path in old:
                path.unlink()

    def _explain(self, doing: str) -> AbstractContextManager[None]:
        return explain_full_disk(self.folder, doing, "The rows that were read are kept.")

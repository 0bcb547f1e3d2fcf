"""Makes samples for a sequence model from events of users: what came next, or did not, after what a user did before.

    events   user  time  item            samples of user 7, length 2          label  user  item  item_history
             7     10    a               the event that came                  1      7     b     [a]
             7     20    b               drawn from what was seen before 20   0      7     x     [a]
             7     30    c                                                    1      7     c     [a, b]
                                                                              0      7     y     [a, b]

Events may come in any order: they are first sorted by user and time, on disk (`RowSort`). Except for its target, a
sample knows nothing about its own time or later: neither its history, nor what is drawn, nor the choice of targets
depends on it. So a split by time leaks nothing, and training rows do not change with test rows. Everything drawn is a
function of (seed, user, number of the event among the user's events).

`HistoriesSource` wraps the source of the events; `schema.HistoriesSpec` is its part of a schema. A history's column has
the event's name and `_history`. New rows to predict bring their histories as lists.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.base.files import explain_full_disk
from hotrow.data.chunk import Chunk, KeyKind, Keys, Position, SkippedRows, SourceInfo
from hotrow.data.native import GOLDEN, mix64
from hotrow.data.sources.columns import ColumnsSource, format_of, input_files
from hotrow.data.sources.convert import IdEncoding
from hotrow.data.sources.inputs import prefetch
from hotrow.data.sources.schema import HISTORY, HistoriesSpec, Schema

NEGATIVE_SALT = 0xE6
PHASE_SALT = 0x9B
TRIES = 32
"""Draws for one negative before its target is left out. If half of the pool is refused, all fail once in 2^32."""
EVENTS_PER_BLOCK = 1 << 16
Integers = NDArray[np.int64]


def open_columns(
    data: Any,
    schema: Schema,
    *,
    name: str,
    labels: Literal["required", "alone", "ignored"] = "required",
    **options: Any,
) -> ColumnsSource | HistoriesSource:
    """Opens `data` by `schema`, which may make samples from events; rows to predict bring their own histories.

    Raises ValueError if rows to predict are delimited text, which cannot hold histories as lists.
    """
    if schema.histories is not None and labels == "required":
        return HistoriesSource(data, schema, name=name, **options)
    lists = [column.column for column in schema.categorical if column.kind == "sequence" and column.separator is None]
    files = input_files(data)
    if schema.histories is not None and lists and files is not None and format_of(files[0]) == "csv":
        raise ValueError(
            f"{files[0].name}: rows to predict bring their histories, as lists in {', '.join(lists)}, and delimited "
            f"text has no lists; give Parquet, JSON Lines or a frame with the columns {', '.join(schema.feature_names)}"
        )
    return ColumnsSource(data, schema, name=name, labels=labels, **options)


@dataclass(frozen=True)
class _Sorted:
    """All events, and the pool of all items to draw from."""

    events: Columns
    """user, time, item, other columns of the item; sorted by user, then time."""
    pool: Columns
    """time first seen, item, its other columns at that time; sorted by time, then item."""
    skipped: SkippedRows


@dataclass(frozen=True)
class _Targets:
    """Events that become samples."""

    event: Integers
    """[n] their numbers in `_Sorted.events`."""
    position: Integers
    """[n] how many events of the user come before each."""

    def of(self, chosen: NDArray[Any]) -> _Targets:
        return _Targets(self.event[chosen], self.position[chosen])


class HistoriesSource:
    """Makes the samples of `schema.histories` from the events in `data`; arguments as for `ColumnsSource`.

    Raises ValueError if the events have no time, a column of the label's name, or ids that are not integers.
    """

    def __init__(
        self,
        data: Any,
        schema: Schema,
        *,
        name: str = "histories",
        encodings: Mapping[str, IdEncoding] | None = None,
        skip_bad_rows: int = 0,
    ) -> None:
        assert schema.histories is not None
        self.name, self.schema, self.spec = name, schema, schema.histories
        self.skipped = SkippedRows()
        events = ColumnsSource(data, events_schema(schema), name=name, labels="made", skip_bad_rows=skip_bad_rows)
        self._source = events
        self._check(events)
        self.encodings: dict[str, IdEncoding] = dict(encodings or dict.fromkeys(schema.feature_names, "int"))
        others = [n for n in events.schema.feature_names if n not in (self.spec.user, self.spec.item)]
        self._described = (self.spec.item, *others)
        """Columns of an item, in the order of `_Sorted.events` from the third column on."""

    def _check(self, events: ColumnsSource) -> None:
        label = self.schema.label.column
        if label in events.column_names:
            raise ValueError(
                f"the events have a column {label!r}, but with `histories` the label is made: give it another name"
            )
        for column, encoding in events.encodings.items():
            if encoding != "int":
                raise ValueError(
                    f"column {column!r}: `histories` needs integer ids below 2^63; say type: int if it is text of "
                    "integers, or number the ids first"
                )

    @property
    def key_kinds(self) -> Mapping[str, KeyKind]:
        return dict.fromkeys(self.schema.feature_names, "int")

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found out and not given, for the user to check."""
        return self._source.notes

    def scout(self) -> SourceInfo:
        """Returns the events' files, and the number of samples (those left out for want of a negative aside); sorts
        them."""
        num_targets = sum(len(self._targets(first).event) for first in self._blocks(0, EVENTS_PER_BLOCK))
        files = self._source.scout().files
        return SourceInfo(num_targets * (1 + self.spec.negatives), num_rows_exact=False, files=files)

    def chunks(self, start: Position | None = None, *, rows_per_chunk: int = 65536) -> Iterator[Chunk]:
        """Yields chunks of at most `rows_per_chunk` rows; offset and num_lines of a position count sorted events."""
        skipped = self._sorted.skipped
        self.skipped = SkippedRows(start.num_skipped if start else skipped.num_rows, list(skipped.examples))
        return prefetch(self._read(start or Position(), max(1, rows_per_chunk // (1 + self.spec.negatives))))

    def _read(self, start: Position, events_per_chunk: int) -> Iterator[Chunk]:
        for first in self._blocks(start.offset, events_per_chunk):
            yield self._chunk(self._targets(first, events_per_chunk), first + events_per_chunk)

    def _blocks(self, first: int, num_events: int) -> range:
        return range(first, len(self._sorted.events[0]), num_events)

    @cached_property
    def _sorted(self) -> _Sorted:
        by_user, by_item = RowSort(2 + len(self._described)), RowSort(1 + len(self._described))
        kept = "Nothing was kept of them (TMPDIR chooses the folder)."
        with explain_full_disk(Path(tempfile.gettempdir()), "sorting events", kept):
            for chunk in self._source.chunks():
                assert chunk.time is not None
                user, item, *others = (_integers(chunk.keys[name], name) for name in (self.spec.user, *self._described))
                by_user.add([user, chunk.time, item, *others])
                by_item.add([item, chunk.time, *others])
            return _Sorted(by_user.sorted(), _first_seen(by_item.sorted()), self._source.skipped)

    def _targets(self, first: int, num_events: int = EVENTS_PER_BLOCK) -> _Targets:
        """Returns the targets among the `num_events` events from number `first` on."""
        spec, users = self.spec, self._sorted.events[0]
        user = np.array(users[first : first + num_events])
        number = np.arange(first, first + len(user))
        begins = np.concatenate([[np.searchsorted(users, user[0])], np.where(np.diff(user) != 0, number[1:], 0)])
        position = number - np.maximum.accumulate(begins)
        phase = _draw(spec.seed, PHASE_SALT, user) % np.uint64(spec.every)
        counted = position.astype(np.uint64) + phase
        chosen = (position >= spec.min_length) & (counted % np.uint64(spec.every) == 0)
        return _Targets(number[chosen], position[chosen])

    def _chunk(self, targets: _Targets, stop: int) -> Chunk:
        """Returns the samples of `targets`, each followed by its negatives; `stop`: the event after them."""
        events, num_negatives = self._sorted.events, self.spec.negatives
        drawn, found = self._negatives(targets)
        for event in targets.event[~found]:
            self.skipped.add(ValueError(_without_negative(self.spec, int(events[0][event]), int(events[1][event]))))
        targets, drawn = targets.of(found), drawn[found]
        num_targets, per_target = len(targets.event), 1 + num_negatives
        repeated = targets.of(np.repeat(np.arange(num_targets), per_target))
        past, row_splits = _past(repeated, self.spec.length)
        keys = {self.spec.user: Keys(events[0][repeated.event])}
        for k, name in enumerate(self._described):
            column = events[2 + k]
            came, did_not = column[targets.event], self._sorted.pool[1 + k][drawn]
            keys[name] = Keys(np.concatenate([came[:, None], did_not], axis=1).ravel())
            if name + HISTORY in self.schema.feature_names:
                keys[name + HISTORY] = Keys(column[past], row_splits=row_splits)
        label = np.tile(np.array([1] + [0] * num_negatives, np.float32), num_targets)
        stop = min(stop, len(events[0]))
        position = Position(0, stop, stop, self.skipped.num_rows)
        dense = np.empty((len(label), 0), np.float32)
        return Chunk(len(label), label, dense, keys, position, np.array(events[1][repeated.event]))

    def _negatives(self, targets: _Targets) -> tuple[Integers, NDArray[np.bool_]]:
        """Returns the negatives of each target, [n, negatives] numbers in the pool, and which targets [n] have all."""
        events, pool, spec = self._sorted.events, self._sorted.pool, self.spec
        user, item = events[0][targets.event], events[2][targets.event]
        num_seen = np.searchsorted(pool[0], events[1][targets.event])
        past, row_splits = _past(targets, spec.length)
        owner, past_items = np.repeat(np.arange(len(item)), np.diff(row_splits)), events[2][past]
        drawn = np.zeros((len(item), spec.negatives), np.int64)
        missing = np.repeat(num_seen[:, None] > 0, spec.negatives, axis=1)
        found = np.zeros_like(missing)
        for attempt in range(TRIES):
            if not missing.any():
                break
            for k in range(spec.negatives):
                number = targets.position.astype(np.uint64) * np.uint64(spec.negatives * TRIES)
                number += np.uint64(k * TRIES + attempt)
                bits = _draw(spec.seed, NEGATIVE_SALT, user, number)
                candidate = (bits % np.maximum(num_seen, 1).astype(np.uint64)).astype(np.int64)
                drawn_item = pool[1][candidate]
                known = np.bincount(owner[past_items == drawn_item[owner]], minlength=len(item)) > 0
                good = missing[:, k] & (drawn_item != item) & ~known
                drawn[good, k], found[good, k], missing[good, k] = candidate[good], True, False
        return drawn, np.asarray(found.all(axis=1))


def events_schema(schema: Schema) -> Schema:
    """Returns the schema by which the events themselves are read."""
    columns = tuple(column for column in schema.categorical if column.kind == "one_hot")
    kept = {"label": schema.labels, "time": schema.time, "categorical": columns, "csv": schema.csv}
    return Schema.model_validate({**kept, "odd_share": 0.0})


def _integers(keys: Keys, name: str) -> Integers:
    if keys.valid is not None and not keys.valid.all():
        num_empty = int((~keys.valid).sum())
        raise ValueError(
            f"column {name!r} is empty in {num_empty} events near one another; `histories` needs all ids of an event: "
            "remove such events first"
        )
    return keys.values.astype(np.int64, copy=False)


def _first_seen(by_item: Columns) -> Columns:
    """Returns the first event of each item by time: time, item, its other columns."""
    item = by_item[0]
    pool = RowSort(len(by_item))
    for first in range(0, len(item), EVENTS_PER_BLOCK):
        stop = min(first + EVENTS_PER_BLOCK, len(item))
        before = item[first - 1 : stop - 1] if first else np.concatenate([item[:1] - 1, item[: stop - 1]])
        item_piece, time, *others = (column[first:stop][item[first:stop] != before] for column in by_item)
        pool.add([time, item_piece, *others])
    return pool.sorted()


def _past(targets: _Targets, length: int) -> tuple[Integers, Integers]:
    """Returns the event numbers of all targets' histories, one after another, and where each begins [n + 1]."""
    lengths = np.minimum(targets.position, length)
    row_splits = np.concatenate([[0], np.cumsum(lengths)])
    first = np.repeat(targets.event - lengths - row_splits[:-1], lengths)
    return first + np.arange(row_splits[-1]), row_splits


def _draw(seed: int, salt: int, *numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns 64 random bits for each element of `numbers`, a function of it, seed and salt alone."""
    bits = mix64(np.array([(seed + salt * GOLDEN) % 2**64], dtype=np.uint64))
    for part in numbers:
        bits = mix64(bits + mix64(part.astype(np.int64).view(np.uint64) * np.uint64(GOLDEN)))
    return bits


def _without_negative(spec: HistoriesSpec, user: int, time: int) -> str:
    return (
        f"{spec.user} {user} at {time}: left out, since {TRIES} draws from what was seen before gave no "
        f"{spec.item} that is new to the {spec.user}"
    )


Columns = tuple[NDArray[np.int64], ...]

ROWS_IN_MEMORY = 1 << 21
"""Rows of a run while it is sorted, and of a piece while it is merged: about 200 MB with 4 columns and their order."""


class RowSort:
    """Sorts rows of int64 columns by the first two, more rows than fit in memory: sorted runs on disk, then merged.

        sort = RowSort(num_columns=3)
        sort.add([users, times, items])          # any number of times
        users, times, items = sort.sorted()      # by user, then time; equal rows in the order they were added

    Its files lie where `tempfile` puts them (TMPDIR) and never have a name, so their disk space is free as soon as the
    process ends, however it ends.
    """

    def __init__(self, num_columns: int, *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self.num_columns, self._rows_in_memory = num_columns, rows_in_memory
        self._waiting: list[Columns] = []
        self._num_waiting = 0
        self._runs: list[Columns] = []

    def add(self, columns: Sequence[NDArray[np.int64]]) -> None:
        """Adds rows to sort: columns of one length."""
        assert len(columns) == self.num_columns
        for start in range(0, len(columns[0]), self._rows_in_memory):
            piece = tuple(column[start : start + self._rows_in_memory] for column in columns)
            if self._num_waiting + len(piece[0]) > self._rows_in_memory:
                self._write_run()
            self._waiting.append(piece)
            self._num_waiting += len(piece[0])

    def sorted(self) -> Columns:
        """Returns all rows in order, each column a read-only mapped file; the runs are then gone."""
        self._write_run()
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(self.num_columns)]
            for piece in self._merged():
                for file, column in zip(files, piece, strict=True):
                    file.write(column.data)
            self._runs.clear()
            return tuple(_mapped(file, 1)[0] for file in files)

    def _write_run(self) -> None:
        if not self._num_waiting:
            return
        with tempfile.TemporaryFile() as file:
            for column in _in_order(self._waiting):
                file.write(column.data)
            self._runs.append(_mapped(file, self.num_columns))
        self._waiting, self._num_waiting = [], 0

    def _merged(self) -> Iterator[Columns]:
        """Yields the rows of all runs in order, about `rows_in_memory` at a time; rows of one first key come
        together."""
        for spans in merge_spans([run[0] for run in self._runs], self._rows_in_memory):
            ranges = zip(self._runs, spans, strict=True)
            yield _in_order([tuple(column[i:j] for column in run) for run, (i, j) in ranges if i < j])


def merge_spans(runs: Sequence[Integers], rows_in_memory: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the begin and end of the rows of each run to merge next, at most `rows_in_memory` in all, or all rows of
    one key.

    runs: the sorted keys of each. No row of a later yield has a key of an earlier one.
    """
    at = [0] * len(runs)
    step = max(1, rows_in_memory // max(1, len(runs)))

    def stops_at(key: int, side: Literal["left", "right"]) -> list[int]:
        return [int(np.searchsorted(run, key, side=side)) for run in runs]

    while any(start < len(run) for start, run in zip(at, runs, strict=True)):
        ahead = [int(run[i + step]) for i, run in zip(at, runs, strict=True) if i + step < len(run)]
        stops = stops_at(min(ahead), "left") if ahead else [len(run) for run in runs]
        if stops == at:  # rows of one key fill the piece
            stops = stops_at(min(ahead), "right")
        yield list(zip(at, stops, strict=True))
        at = stops


def _in_order(pieces: Sequence[Columns]) -> Columns:
    """Returns the rows of all pieces in stable sorted order."""
    columns = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return tuple(column[order] for column in columns)


def _mapped(file: IO[bytes], num_columns: int) -> Columns:
    """Maps the columns of a file that holds them one after another; the mapping outlives the open file."""
    file.flush()
    if not file.tell():
        return tuple(np.empty(0, np.int64) for _ in range(num_columns))  # an empty file cannot be mapped
    return tuple(np.memmap(file, dtype=np.int64, mode="r").view(np.ndarray).reshape(num_columns, -1))

"""What training rows teach, and rows encoded by it, for all rows in one process or part by part in many.

    fit = Fit(opened, folder, memory_bytes=1 << 30, part=2)          # of a part of the rows, on any machine
    for piece in pieces(schema, plan, rows.chunks_of(spans)):        # rows.py: stored rows and their numbers
        fit.add(piece)
    first.merge(fit)                                                 # in the order of the parts
    build_table(first.counters, schema, out, "user")                 # a vocabulary and its counts

    found = pieces(schema, plan, rows.chunks_of(spans))
    for piece in with_statistics(found, of_all, before):             # before: the statistics of all parts before
        for of_split in by_split(piece, *encode(piece.chunk)):       # encode: a RowEncoder
            writer.append(*of_split)                                 # packed/writer.py, in the order of the parts

However rows are cut into parts, the bytes are the same. `pipeline.py` has one part; examples/prepare_ray.py has many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder
from hotrow.base.files import file_name
from hotrow.data.chunk import Chunk, select_rows
from hotrow.data.coded import column_of
from hotrow.data.packed.format import Ids, select_ids
from hotrow.data.packed.vocabulary import TableSummary
from hotrow.data.prepare.lag import Lagged
from hotrow.data.prepare.moments import Moments
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.prepare.statistics import Statistics, folds_of, num_folds
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.registry import OpenedSource
from hotrow.data.sources.schema import SPLITS, Schema
from hotrow.data.sources.split import TRAIN, Codes, SplitPlan
from hotrow.data.transforms import Transform, fitted, is_fitted

EncodedRows: TypeAlias = tuple[
    str, NDArray[np.float32], NDArray[np.float32], dict[str, Ids], NDArray[np.float32] | None
]
"""Rows of one split: label, dense inputs, ids by feature, weight."""
MAX_HOURS = 50
"""Two days have up to 49 hours; for longer spans, days say enough."""


@dataclass(frozen=True)
class Piece:
    """The rows of one chunk, with their splits and folds."""

    chunk: Chunk
    codes: Codes
    """Split of each row."""
    folds: NDArray[np.uint8] | None
    """Fold of each row, by which statistics are counted; None if there is only one."""

    def some(self, mask: NDArray[np.bool_]) -> Piece:
        """The rows whose mask [num_rows] is set."""
        return Piece(select_rows(self.chunk, mask), self.codes[mask], None if self.folds is None else self.folds[mask])


def pieces(schema: Schema, plan: SplitPlan, chunks: Iterator[tuple[Chunk, NDArray[np.int64]]]) -> Iterator[Piece]:
    """Yields rows with their splits and folds, which are drawn by their numbers."""
    for chunk, numbers in chunks:
        yield Piece(chunk, plan.assign(numbers, chunk.time), folds_of(schema, numbers, chunk))


class Fit:
    """What training rows teach: counts of ids, statistics of the label, moments and hours; empty at first.

    folder, counters: as for `CounterPool`. part: the place of the rows among the parts.
    A fit pickles after `counters.write_out()`, if `folder` is on a disk that the other process sees.
    """

    def __init__(self, opened: OpenedSource, folder: Path, *, part: int = 0, **counters: Any) -> None:
        self._schema = schema = opened.schema
        self.counters = CounterPool(folder, part=part, **counters)
        for table in schema.table_names:
            for feature in schema.features_of(table):
                cap = schema.table(table).hash_cap or 0
                self.counters.declare(table, opened.source.key_kinds[feature], hash_cap=cap)
        self.statistics = Statistics(schema, num_folds=num_folds(schema))
        self.moments = {spec.column: Moments() for spec in schema.dense if is_fitted(spec.transform)}
        self.hours = Hours(ticks_of_day(opened))
        self.num_rows = 0
        """Training rows."""

    def add(self, piece: Piece) -> None:
        """Counts the training rows of a piece."""
        is_train, chunk, schema = piece.codes == TRAIN, piece.chunk, self._schema
        if is_train.any():
            columns = {t: [column_of(chunk.keys, f) for f in schema.features_of(t)] for t in schema.table_names}
            self.counters.add(columns, None if is_train.all() else is_train)
        if schema.statistics:
            # With a lag, rows to score see all rows, as they would a long time after the last one.
            counted = is_train if schema.statistics_lag is None else np.ones_like(is_train)
            self.statistics.add(chunk, counted, piece.folds)
        for name, numbers in zip(schema.dense_names, chunk.dense.T, strict=False):  # statistics may come behind
            if name in self.moments:
                self.moments[name].add(numbers[is_train])
        if chunk.time is not None:
            self.hours.add(chunk.time[is_train])
        self.num_rows += int(is_train.sum())

    def merge(self, later: Fit) -> None:
        """Adds what the rows of the next part teach; its counters are written out."""
        self.counters.merge(later.counters)
        self.statistics.merge(later.statistics)
        for name, sums in self.moments.items():
            sums.merge(later.moments[name])
        self.hours.merge(later.hours)
        self.num_rows += later.num_rows

    def transforms(self) -> tuple[str, ...]:
        """The transforms of the dense columns, fitted to the training rows."""
        return tuple(
            str(fitted(s.transform, self.moments[s.column]) if s.column in self.moments else Transform(s.transform))
            for s in self._schema.dense
        )


def build_table(counters: CounterPool, schema: Schema, out: Path, table: str) -> TableSummary:
    """Writes the vocabulary and counts of a table into the dataset `out`."""
    paths = [out / folder / file_name(table) for folder in ("vocab", "counts")]
    for path in paths:
        make_folder(path.parent, within=out)
    return counters.build(table, *paths, min_count=schema.table(table).min_count)


def with_statistics(
    pieces: Iterator[Piece], of_all: Statistics, before: Statistics, lagged: Sequence[Lagged] = ()
) -> Iterator[Piece]:
    """Yields pieces with their statistics as dense columns.

    of_all: of all rows. before: of the training rows before these, if there is one fold; the pieces' are added. lagged:
    if there is a lag, the counts of training rows, which training rows see, and those of all rows, which others see.
    """
    for piece in pieces:
        trains, chunk = piece.codes == TRAIN, piece.chunk
        if lagged:
            of_training, of_others = lagged[0].inputs(chunk, trains), lagged[1].inputs(chunk, np.ones_like(trains))
            inputs = np.where(trains[:, None], of_training, of_others)
            chunk = replace(chunk, dense=np.concatenate([chunk.dense, inputs], 1))
        elif piece.folds is not None:
            chunk = of_all.joined_out_of_fold(chunk, trains, piece.folds)
        else:
            chunk = before.joined_to(chunk, trains, of_all)
        yield replace(piece, chunk=chunk)


def by_split(piece: Piece, dense: NDArray[np.float32], ids: Mapping[str, Ids]) -> Iterator[EncodedRows]:
    """Yields the encoded rows of a piece by split, as `PackedWriter.append` takes them."""
    label, weight = piece.chunk.label, piece.chunk.weight
    assert label is not None, "a source for preparation has labels"
    for code, split in enumerate(SPLITS):
        chosen = piece.codes == code
        if chosen.any():
            part = {name: select_ids(column, chosen) for name, column in ids.items()}
            yield split, label[chosen], dense[chosen], part, None if weight is None else weight[chosen]


def ticks_of_day(opened: OpenedSource) -> int:
    """A day in the unit of the rows' times; 0 if it is not known."""
    if opened.schema.time is not None and isinstance(opened.source, ColumnsSource):
        with suppress(ValueError):
            return opened.source.ticks(86_400)
    return 0


class Hours:
    """Finds out where each hour begins while times come in order. day: in the unit of the times, at least 24; 0 if it
    is not known."""

    def __init__(self, day: int) -> None:
        self._day, self._row, self._rises = day, 0, True
        self._first: int | None = None
        self._last: int | None = None
        self._begins: list[list[int]] = []

    def add(self, times: NDArray[np.int64]) -> None:
        """Looks at the times of the next rows."""
        if not len(times) or not self._day:
            return
        self._rises &= bool((times[1:] >= times[:-1]).all())
        later = Hours(self._day)
        later._row, later._first, later._last = len(times), int(times[0]), int(times[-1])
        if self._rises:
            hours = times // max(1, self._day // 24)
            at = np.flatnonzero(np.diff(hours, prepend=hours[:1] - 1))
            later._begins = np.stack([hours[at], at], axis=1).tolist()
        self.merge(later)

    def merge(self, later: Hours) -> None:
        """Looks at the times of the rows that `later` has seen."""
        if later._first is None:
            return
        self._rises &= later._rises and (self._last is None or self._last <= later._first)
        known = self._begins[-1][0] if self._begins else None
        self._begins += [[hour, row + self._row] for hour, row in later._begins if self._rises and hour != known]
        self._first, self._last = later._first if self._first is None else self._first, later._last
        self._row += later._row

    def found(self) -> list[list[int]]:
        """The seconds since 1970 at which each hour begins, and its first row; if there are many hours, the same for
        days. Empty if rows are not in order, lie in one hour, or span too many days."""
        begins = [(hour * max(1, self._day // 24) * 86_400 // self._day, row) for hour, row in self._begins]
        for step in (3600, 86_400) if self._rises else ():
            found = {second // step * step: row for second, row in reversed(begins)}
            if 1 < len(found) <= MAX_HOURS:
                return [list(begin) for begin in sorted(found.items())]
        return []

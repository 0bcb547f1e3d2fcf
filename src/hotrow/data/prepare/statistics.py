"""Statistics of the label by value: how many other training rows had a row's value, and how many were positive.

    of_all = Statistics(schema, num_folds=num_folds(schema))
    for chunk, trains, folds in rows:                         # trains [n]: which rows of the chunk train
        of_all.add(chunk, trains, folds)                      # folds [n]: of each row; None if there is one
    before = Statistics(schema, strict=True)
    for chunk, trains, folds in rows:
        chunk = of_all.joined_out_of_fold(chunk, trains, folds)       # with J dense columns more, or as of time:
        chunk = before.joined_to(chunk, trains, of_all)
    chunk = of_all.of_rows_to_score(chunk)

Which rows a training row sees, `schema.statistics_rule` says:

    time     the training rows of strictly earlier times. Rows with the same time do not see each other.
    rows     the training rows of the other folds. One of NUM_FOLDS is drawn by the row's number, or if rows have a
             time, by that, so that rows with the same time share a fold
    COLUMN   as `rows`, but rows with one value of this feature share a fold

So nothing depends on a row's own label. Every other row sees all training rows, as a server would; `lag.py` has the
rule for a schema with `statistics_lag`. Training rows that see other folds see (NUM_FOLDS - 1) / NUM_FOLDS of all; then
the counts that others see are multiplied by this share, so that inputs of a row to score are like those of training.

A value is known by its 64-bit hash, combinations by the hash of their hashes (value_counts.h); what was never counted
has zero rows. `save` writes the counts of all training rows as safetensors. For statistic i, `i.values` int64 [m] are
the hashes, in rising order as unsigned words, and `i.counts` [m, 2 K] rows and positives by fold; `all` [K, 2] counts
every training row, and `zeros` [S] says how many leading bits of the hashes that are counted must be zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hotrow.base.door import read_file
from hotrow.base.files import atomic_write
from hotrow.data.chunk import Chunk
from hotrow.data.coded import column_of, key_hashes
from hotrow.data.native import ValueCounts
from hotrow.data.sources.schema import Schema
from hotrow.data.sources.split import FOLD_SALT, uniform_of
from hotrow.data.transforms import Transform

MAX_BYTES = 1 << 31
"""Memory for the counts of all statistics, divided among them: it depends on the schema alone, because neither the
number of rows nor the memory of a machine may decide what is counted. Little is taken until values come."""
NUM_FOLDS = 5
BLOCK_ROWS = 4096
"""Rows whose inputs are computed at a time: few enough for intermediate results to stay in the cache."""


class Statistics:
    """Rows and positives by value for each of `schema.statistics`, empty at first.

    strict: for `joined_to`, which then hides rows of one time from each other.
    """

    def __init__(self, schema: Schema, *, num_folds: int = 1, strict: bool = False) -> None:
        self._schema, self._specs, self.num_folds = schema, schema.statistics, num_folds
        self._columns = tuple(dict.fromkeys(column for spec in self._specs for column in spec.columns))
        self._transforms = [spec.transforms for spec in self._specs]
        self.share = share_to_score(schema)
        """The factor of the counts that rows to score see."""
        # A value takes its hash, two counts a fold or as much again as of one, and its place in the index. Earlier days
        # are a fold more; of counts by time, `strict` ones keep more besides.
        most_folds = 3 if schema.statistics_rule == "time" else NUM_FOLDS + 1
        max_values = MAX_BYTES // (max(1, len(self._specs)) * (24 + 8 * most_folds))
        self.counts = [ValueCounts(num_folds, max_values=max_values, strict=strict) for _ in self._specs]
        """By statistic."""
        self.all = np.zeros((num_folds, 2), np.int64)
        """Rows, and positives, of all training rows, by fold."""
        self._now: tuple[int | None, NDArray[np.int64]] = None, np.zeros(2, np.int64)
        """The time of the last row of `joined_to`, and what `all` counts of it."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs J of a row."""
        return sum(map(len, self._transforms))

    def add(self, chunk: Chunk, trains: NDArray[np.bool_], folds: NDArray[np.uint8] | None = None) -> None:
        """Counts the training rows of a chunk. folds: the fold of each row [n]; None if there is one."""
        labels = positives(chunk)
        for counts, hashes in zip(self.counts, self.hashes(chunk), strict=True):
            counts.add(hashes, labels, trains, folds)
        fold = np.zeros(chunk.num_rows, np.uint8) if folds is None else folds
        for column, counted in enumerate((trains, trains & labels)):
            self.all[:, column] += np.bincount(fold[counted], minlength=self.num_folds)

    def joined_to(self, chunk: Chunk, trains: NDArray[np.bool_], after: Statistics) -> Chunk:
        """Returns a chunk with the statistics of its rows as dense columns, and counts its training rows.

        trains: which rows train [n]; they see the counts of earlier times. after: the counts of all training rows,
        which the other rows see.
        """
        return self._joined(chunk, *self.counts_before(self.hashes(chunk), positives(chunk), trains, chunk.time, after))

    def counts_before(
        self,
        hashes: Sequence[NDArray[np.uint64]],
        labels: NDArray[np.bool_],
        trains: NDArray[np.bool_],
        times: NDArray[np.int64] | None,
        after: Statistics,
    ) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """Returns, by statistic, rows and positives of each row's value [n, 2] and of all values [n, 2]; counts the
        rows that train.

        hashes: of each row's value, by statistic. times: in rising order; rows that train see rows of earlier times,
        or, if None, the rows before them. after: the counts that other rows see; if it is `self`, the counts that rows
        before them have left there.
        """
        of_all = self._all_before(labels, trains, times)
        if after is not self:
            of_all[~trains] = after.all[0]
        both = zip(self.counts, after.counts, hashes, strict=True)
        return [own.before(each, labels, trains, times, last) for own, last, each in both], of_all

    def _all_before(
        self, labels: NDArray[np.bool_], trains: NDArray[np.bool_], times: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Returns rows and positives of all values that each row sees [n, 2], and counts the rows that train."""
        counted = np.stack([trains, trains & labels], 1).astype(np.int64)
        sums = np.cumsum(counted, 0)
        found: NDArray[np.int64] = self.all[0] + sums - counted
        if times is not None and len(times):
            first = np.searchsorted(times, times)
            found = found[first]
            last, of_last = self._now
            found[times == last] -= of_last
            of_now = counted[times == times[-1]].sum(0)
            self._now = int(times[-1]), of_now + of_last * (times[-1] == last)
        self.all[0] += counted.sum(0)
        return found

    def joined_out_of_fold(self, chunk: Chunk, trains: NDArray[np.bool_], folds: NDArray[np.uint8]) -> Chunk:
        """Returns a chunk with the statistics of its rows as dense columns. Training rows do not see those of their own
        fold; the others see all. folds: of each row [n]."""
        own = np.flatnonzero(trains)
        of_all = np.tile(self.all.sum(0), (chunk.num_rows, 1))
        of_all[own] -= self.all[folds[own]]
        share = np.where(trains, 1.0, self.share)[:, None]
        found = [
            counts.get(hashes, trains, folds) * share
            for counts, hashes in zip(self.counts, self.hashes(chunk), strict=True)
        ]
        return self._joined(chunk, found, of_all * share)

    def of_rows_to_score(self, chunk: Chunk) -> Chunk:
        """Returns a chunk of rows to score with their statistics as dense columns."""
        return self._joined(chunk, *self._counts_to_score(self.hashes(chunk), chunk.num_rows))

    def inputs_to_score(self, of_column: Mapping[str, NDArray[np.uint64]], num_rows: int) -> NDArray[np.float32]:
        """Returns the inputs of rows to score [n, J]. of_column: the hashes of their ids by column [n]."""
        return self.inputs(*self._counts_to_score(self._crossed(of_column), num_rows))

    def _counts_to_score(
        self, hashes: Sequence[NDArray[np.uint64]], num_rows: int
    ) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        found = [counts.get(own) * self.share for counts, own in zip(self.counts, hashes, strict=True)]
        return found, np.tile(self.all.sum(0) * self.share, (num_rows, 1))

    def _joined(self, chunk: Chunk, found: Sequence[NDArray[Any]], of_all: NDArray[Any]) -> Chunk:
        return replace(chunk, dense=np.concatenate([chunk.dense, self.inputs(found, of_all)], 1))

    def inputs(self, found: Sequence[NDArray[Any]], of_all: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the inputs of rows [n, J] from the result of `counts_before`."""
        out = np.empty((len(of_all), self.num_inputs), np.float32)
        column = 0
        for of_value, transforms in zip(found, self._transforms, strict=True):
            for start in range(0, len(out), BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                numbers = [each.astype(np.float64) for each in (*of_value[rows].T, *of_all[rows].T)]
                for i, transform in enumerate(transforms, column):
                    out[rows, i] = transform(*numbers[: transform.num_columns])
            column += len(transforms)
        return out

    def total(self) -> Statistics:
        """Returns the counts of all folds together."""
        found = Statistics(self._schema)
        for own, counts in zip(found.counts, self.counts, strict=True):
            hashes, by_fold, zeros = counts.items()
            for k in range(self.num_folds):
                own.put(hashes, np.ascontiguousarray(by_fold[:, 2 * k : 2 * k + 2]), zeros=zeros)
        found.all[0] = self.all.sum(0)
        return found

    def hashes(self, chunk: Chunk) -> list[NDArray[np.uint64]]:
        """Returns by statistic the hash of each row's value [n]."""
        return self._crossed({name: key_hashes(column_of(chunk.keys, name)) for name in self._columns})

    def _crossed(self, of_column: Mapping[str, NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        cross = Transform("cross")
        return [cross(*(of_column[name] for name in spec.columns)) for spec in self._specs]

    def merge(self, other: Statistics, *, fold: int = 0) -> None:
        """Adds the counts of other rows; their first fold goes to `fold`."""
        for own, counts in zip(self.counts, other.counts, strict=True):
            hashes, by_fold, zeros = counts.items()
            own.put(hashes, by_fold, fold=fold, zeros=zeros)
        self.all[fold : fold + other.num_folds] += other.all

    def with_earlier(self, earlier: Statistics) -> Statistics:
        """Returns these counts plus those of earlier days. If there are several folds, earlier days are one more,
        because none of their rows is in a fold of these."""
        found = Statistics(self._schema, num_folds=self.num_folds + (self.num_folds > 1))
        found.merge(self)
        found.merge(earlier, fold=found.num_folds - 1)
        return found

    def __reduce__(self) -> Any:
        """Pickles as `save` writes."""
        return Statistics._of, (self._to_bytes(), self._schema, self.num_folds)

    def save(self, path: Path) -> None:
        """Writes the counts. OSError passes through."""
        with atomic_write(path) as file:
            file.write(self._to_bytes())

    def _to_bytes(self) -> bytes:
        items = [counts.items() for counts in self.counts]
        arrays: dict[str, NDArray[np.int64]] = {"all": self.all, "zeros": np.array([z for *_, z in items], np.int64)}
        for i, (hashes, counts, _) in enumerate(items):
            arrays |= {f"{i}.values": hashes.view(np.int64), f"{i}.counts": counts.astype(np.int64)}
        return save(arrays)

    @staticmethod
    def load(schema: Schema, path: Path, *, num_folds: int = 1, strict: bool = False, cure: str) -> Statistics:
        """Reads what `save` wrote. Raises ValueError naming the file if it is damaged, or not of these statistics."""
        try:
            return Statistics._of(read_file(path), schema, num_folds, strict=strict)
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{path} does not hold the statistics of this schema ({error}); {cure}") from None

    @staticmethod
    def _of(data: bytes, schema: Schema, num_folds: int, *, strict: bool = False) -> Statistics:
        found, arrays = Statistics(schema, num_folds=num_folds, strict=strict), load(data)
        found.all[:] = arrays["all"].reshape(num_folds, 2)
        for i, counts in enumerate(found.counts):
            values, own, zeros = arrays[f"{i}.values"], arrays[f"{i}.counts"], int(arrays["zeros"][i])
            if own.shape != (len(values), 2 * num_folds) or not 0 <= zeros < 64:
                raise ValueError(f"{i}.counts is {list(own.shape)}, or zeros is {zeros}")
            if len(values) and not (own.min() >= 0 and own.max() < 1 << 32):
                raise ValueError(f"a count of {i} is out of range")
            counts.put(values.view(np.uint64), own.astype(np.uint32), zeros=zeros)
        return found


def num_folds(schema: Schema) -> int:
    """Returns how many folds training rows have: one if they are counted as of their time."""
    return 1 if schema.statistics_rule == "time" else NUM_FOLDS


def share_to_score(schema: Schema) -> float:
    """The factor of the counts that rows to score see; the module says why."""
    return 1.0 if num_folds(schema) == 1 else (NUM_FOLDS - 1) / NUM_FOLDS


def folds_of(schema: Schema, rows: NDArray[np.int64], chunk: Chunk) -> NDArray[np.uint8] | None:
    """The fold of each row of a chunk by its number, its time, or its value of the feature that the schema names [n];
    None if there is one."""
    rule = schema.statistics_rule
    if not schema.statistics or rule == "time":
        return None
    if rule != "rows":
        rows = key_hashes(column_of(chunk.keys, rule)).view(np.int64)
    elif chunk.time is not None:
        rows = chunk.time
    return (uniform_of(schema.split.seed, rows, salt=FOLD_SALT) * NUM_FOLDS).astype(np.uint8)


def raw_transforms(schema: Schema, transforms: Sequence[Transform]) -> list[Transform]:
    """Returns, by dense input, the transform of a chunk's column: none if `Statistics` has computed it."""
    num_raw = len(schema.dense)
    return [*transforms[:num_raw], *[Transform("identity")] * (len(transforms) - num_raw)]


def positives(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns which rows are positive by the first label [n]; rows to score have no labels, so none is."""
    if chunk.label is None:
        return np.zeros(chunk.num_rows, np.bool_)
    return (chunk.label if chunk.label.ndim == 1 else chunk.label[:, 0]) > 0.5

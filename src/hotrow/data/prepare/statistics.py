"""Statistics of the label by value, as of each row: how many training rows before it had its value, how many were
positive.

    before, after = Statistics(schema), Statistics(schema)
    for chunk, trains in rows:                                # trains [n]: which rows of the chunk train
        after.add(chunk, trains)
    for chunk, trains in rows:
        chunk = before.joined_to(chunk, trains, after)        # with J dense columns more
    chunk = after.of_rows_to_score(chunk)

No input of a training row depends on a later row or on its own label. Every other row sees the counts at the end of the
training rows, as a server would. A value is known by its 64-bit hash, combinations by the hash of their hashes; counts
lie in a fixed number of slots, so memory is bounded, and values that share a slot are counted together.

`save` writes the counts of all training rows as safetensors. For statistic i, `i.slots` [m] are the slots that are not
empty and `i.counts` [m, 2] their rows and positives; `all` [2] counts every training row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hotrow.base.door import read_file
from hotrow.base.files import atomic_write
from hotrow.data.chunk import Chunk
from hotrow.data.native import count_before
from hotrow.data.sources.convert import column_of, key_hashes
from hotrow.data.sources.schema import Schema
from hotrow.data.transforms import Transform

MAX_BYTES = 1 << 28
"""What the counts of all statistics may take in memory; preparation keeps them twice."""
MAX_BITS = 20
BLOCK_ROWS = 4096
"""Rows whose inputs are computed at a time: few enough for what lies between to stay in the cache."""


class Statistics:
    """Rows and positives by value for each of `schema.statistics`, empty at first."""

    def __init__(self, schema: Schema) -> None:
        self._specs = schema.statistics
        self._columns = tuple(dict.fromkeys(column for spec in self._specs for column in spec.columns))
        self._transforms = [[Transform("target_stat", {"prior": k}) for k in spec.priors] for spec in self._specs]
        # Neither the number of rows nor the memory of a machine may decide what is counted together.
        self.bits = min(MAX_BITS, (MAX_BYTES // (8 * max(1, len(self._specs)))).bit_length() - 1)
        """How many leading bits of a hash number its slot."""
        self.counts = [np.zeros((1 << self.bits, 2), np.uint32) for _ in self._specs]
        """By statistic: rows and positives by slot."""
        self.all = np.zeros(2, np.int64)
        """Rows, and positives, of all training rows."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs J of a row."""
        return sum(map(len, self._transforms))

    def add(self, chunk: Chunk, trains: NDArray[np.bool_]) -> None:
        """Counts the training rows of a chunk."""
        labels = _labels(chunk)
        for counts, hashes in zip(self.counts, self._hashes(chunk), strict=True):
            count_before(hashes, labels, trains, counts)
        self.all += (trains.sum(), (trains & labels).sum())

    def joined_to(self, chunk: Chunk, trains: NDArray[np.bool_], after: Statistics) -> Chunk:
        """Returns a chunk with the statistics of its rows as dense columns, and counts its training rows.

        trains: which rows train [n]; they see the counts so far. after: the counts of all training rows, which the
        other rows see.
        """
        labels = _labels(chunk)
        of_all = [
            np.where(trains, before + np.cumsum(own) - own, last).astype(np.float64)
            for own, before, last in zip((trains, trains & labels), self.all, after.all, strict=True)
        ]
        out = np.empty((chunk.num_rows, self.num_inputs), np.float32)
        column = 0
        for counts, last, hashes, transforms in zip(
            self.counts, after.counts, self._hashes(chunk), self._transforms, strict=True
        ):
            found = count_before(hashes, labels, trains, counts, last)
            assert found is not None
            of_value = found.T.astype(np.float64)
            for start in range(0, chunk.num_rows, BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                numbers = [each[rows] for each in (*of_value, *of_all)]
                for i, transform in enumerate(transforms, column):
                    out[rows, i] = transform(*numbers)
            column += len(transforms)
        self.all += (trains.sum(), (trains & labels).sum())
        return replace(chunk, dense=np.concatenate([chunk.dense, out], 1))

    def of_rows_to_score(self, chunk: Chunk) -> Chunk:
        """Returns a chunk of rows to score with their statistics as dense columns."""
        return self.joined_to(chunk, np.zeros(chunk.num_rows, np.bool_), self)

    def _hashes(self, chunk: Chunk) -> list[NDArray[np.uint64]]:
        """Returns by statistic the hash of each row's value [n]."""
        of_column = {name: key_hashes(column_of(chunk.keys, name)) for name in self._columns}
        cross = Transform("cross")
        return [cross(*(of_column[name] for name in spec.columns)) for spec in self._specs]

    def merge(self, other: Statistics) -> None:
        """Adds the counts of other rows."""
        for own, theirs in zip(self.counts, other.counts, strict=True):
            own += theirs
        self.all += other.all

    def save(self, path: Path) -> None:
        """Writes the counts. OSError passes through."""
        arrays: dict[str, NDArray[np.int64]] = {"all": self.all}
        for i, counts in enumerate(self.counts):
            arrays[f"{i}.slots"] = np.flatnonzero(counts[:, 0])
            arrays[f"{i}.counts"] = counts[arrays[f"{i}.slots"]].astype(np.int64)
        with atomic_write(path) as file:
            file.write(save(arrays))

    @staticmethod
    def load(schema: Schema, path: Path, *, cure: str) -> Statistics:
        """Reads what `save` wrote. Raises ValueError naming the file if it is damaged, or not of these statistics."""
        found = Statistics(schema)
        try:
            arrays = load(read_file(path))
            found.all[:] = arrays["all"]
            for i, counts in enumerate(found.counts):
                slots, own = arrays[f"{i}.slots"], arrays[f"{i}.counts"]
                if len(slots) and not (slots.min() >= 0 and own.min() >= 0 and own.max() < 1 << 32):
                    raise ValueError(f"a slot or a count of {i} is out of range")
                counts[slots] = own
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{path} does not hold the statistics of this schema ({error}); {cure}") from None
        return found


def raw_transforms(schema: Schema, transforms: Sequence[Transform]) -> list[Transform]:
    """Returns by dense input what is done to a chunk's column: nothing to those that `Statistics` has computed."""
    num_raw = len(schema.dense)
    return [*transforms[:num_raw], *[Transform("identity")] * (len(transforms) - num_raw)]


def _labels(chunk: Chunk) -> NDArray[np.bool_]:
    """Returns which rows are positive [n]; rows to score have no labels, and none is."""
    return np.zeros(chunk.num_rows, np.bool_) if chunk.label is None else chunk.label > 0.5

"""How soon rows come again: LRU stack distances of a stream of row ids, and the miss-ratio curve they give.

    ids, batch by batch ──▶ ReuseProfile ──▶ MissRatioCurve: capacity in rows -> share of accesses an LRU cache misses

The distance of an access is the number of different rows accessed since its row was accessed last. An LRU cache of c
rows hits exactly the accesses at distance < c, so one pass gives the curve for every c (Mattson's observation). For
tables too large to follow every row, the rows of a pseudo-random sample stand for all (SHARDS, FAST 2015).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.data import reference_reuse
from hotrow.data.native import backend

MAX_GAP = 128
"""Batches that `ReuseProfile.overlap` looks back at most (kGaps of native/include/hotrow/reuse.h)."""
OVERLAP_BATCHES = (1, 10, 100)
POINTS_PER_OCTAVE = 16
"""Of a curve in a file: neighbouring capacities then differ by at most 4.5 %."""
Access = Literal["lookup", "row"]
ACCESSES: tuple[Access, ...] = ("lookup", "row")


@dataclass(frozen=True)
class MissRatioCurve:
    """m(c), the share of accesses that an LRU cache of c rows misses, first accesses included: a falling staircase.

    capacities: rising rows [n], the first 0; ratios: [n], of `capacities`, the first 1. Between two of them the ratio
    is that of the lower one, which for a curve thinned by `to_json` is an upper bound.
    """

    capacities: NDArray[np.int64]
    ratios: NDArray[np.float64]

    @classmethod
    def from_histogram(
        cls, histogram: NDArray[np.uint64], *, num_accesses: int, num_first: int, rate: float = 1.0
    ) -> MissRatioCurve:
        """From accesses by distance; with `rate` < 1 of a sample of that share of the rows.

        num_accesses: of all rows. num_first: sampled accesses without a distance. A sampled distance d stands for
        d / rate other rows. The sample should hold rate x num_accesses accesses; what it holds more or less belongs to
        rows too hot to miss, so it is added to the hits of the smallest cache (the correction of SHARDS, "adj").
        """
        distances = np.flatnonzero(histogram)
        hits = np.cumsum(histogram[distances], dtype=np.int64)
        sampled_hits = int(hits[-1]) if len(hits) else 0
        misses = num_first + sampled_hits - hits
        capacities = np.rint(distances / rate).astype(np.int64) + 1
        ratios = np.minimum(misses / max(rate * num_accesses, 1e-300), 1.0)
        return cls(np.concatenate([[0], capacities]), np.concatenate([[1.0], ratios]))

    @property
    def first(self) -> float:
        """Share of first accesses, which a cache of any size misses; 0 where there are no accesses."""
        return float(self.ratios[-1]) if len(self.ratios) > 1 else 0.0

    def miss_ratio(self, capacity_rows: int | NDArray[np.integer[Any]]) -> Any:
        """m(capacity_rows), a float or an array like the argument. Raises ValueError below 0."""
        if np.min(capacity_rows, initial=0) < 0:
            raise ValueError(f"capacity_rows is {capacity_rows}; a cache holds 0 rows or more")
        found = self.ratios[np.searchsorted(self.capacities, capacity_rows, "right") - 1]
        return float(found) if np.ndim(capacity_rows) == 0 else found

    def distances(self, least: int = 0) -> list[tuple[int, float]]:
        """(2^k, share of the accesses at a distance below 2^k and from 2^(k-1) on); the first from 0 on, below 1.

        The last bin is that of the largest distance, or of `least` where that is more. With `first` they sum to 1.
        """
        ends = 1 << np.arange(max(int(self.capacities[-1]) - 1, least).bit_length() + 1)
        shares = 0.0 - np.diff(self.miss_ratio(ends), prepend=1.0)
        return list(zip(ends.tolist(), shares.tolist(), strict=True))

    def to_json(self) -> dict[str, list[float]]:
        """`capacity_rows` and `miss_ratio`, thinned to 16 points per doubling; `from_json` is the inverse of that."""
        octave = np.round(np.log2(self.capacities + 1) * POINTS_PER_OCTAVE)
        kept = np.flatnonzero(np.diff(octave, prepend=-1.0) != 0)
        if kept[-1] != len(octave) - 1:
            kept = np.append(kept, len(octave) - 1)
        return {"capacity_rows": self.capacities[kept].tolist(), "miss_ratio": self.ratios[kept].tolist()}

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[float]]) -> MissRatioCurve:
        """The curve `to_json` wrote."""
        return cls(np.array(value["capacity_rows"], np.int64), np.array(value["miss_ratio"], np.float64))


def threshold_of(rate: float) -> int:
    """The highest hash of a row that is followed."""
    return min(int(rate * 2.0**64), 2**64 - 1)


def is_sampled(ids: NDArray[Any], rate: float, seed: int) -> NDArray[np.bool_]:
    """Which of `ids` are of rows that a profile with this rate and seed follows."""
    return reference_reuse.is_sampled(ids, threshold_of(rate), seed)


class ReuseProfile:
    """Distances of one table's accesses, fed batch by batch; memory about 40 bytes per row followed.

    access: "lookup" counts every id. "row" counts each different row of a batch once, as training reads it after
    in-batch deduplication: that takes away the easy hits, so the two curves differ and each report says which it is.
    rate: share of the rows followed, chosen by a hash of the id and `seed`; 1 follows all and is exact.
    """

    def __init__(self, access: Access, *, rate: float = 1.0, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate is {rate}; the share of rows to follow is above 0 and at most 1")
        self.access, self.rate = access, rate
        self._distances = backend().StackDistances(threshold_of(rate), seed)
        self.num_batches = self.num_accesses = 0
        """Batches and accesses so far, those of rows not followed included."""
        self._starts: dict[int, tuple[int, int]] = {}

    def add(self, ids: NDArray[Any]) -> int:
        """One batch of row ids, int32 or int64 [n], in the order of access; returns how many accesses that makes."""
        if self.num_batches in OVERLAP_BATCHES:
            self._starts[self.num_batches] = self._overlap(self.num_batches)
        before = self._distances.num_accesses
        self._distances.add(np.ascontiguousarray(ids), self.access == "row")
        self.num_batches += 1
        if self.rate == 1:
            added = int(self._distances.num_accesses - before)
        else:
            added = len(np.unique(ids)) if self.access == "row" else len(ids)
        self.num_accesses += added
        return added

    @property
    def num_rows(self) -> int:
        """Different rows followed so far; over `rate`, an estimate of the different rows accessed."""
        return int(self._distances.num_rows)

    def histogram(self) -> NDArray[np.uint64]:
        """Accesses of followed rows by distance among followed rows, from 0 on; first accesses are `num_rows`."""
        out = np.empty(self._distances.histogram_size, np.uint64)
        self._distances.histogram(out)
        return out

    def curve(self) -> MissRatioCurve:
        """The miss-ratio curve of all accesses so far."""
        return MissRatioCurve.from_histogram(
            self.histogram(), num_accesses=self.num_accesses, num_first=self.num_rows, rate=self.rate
        )

    def overlap(self, num_batches: int) -> float | None:
        """Share of the different rows of a batch that were in one of the `num_batches` before it: 1, 10 or 100.

        Over the batches that have so many before them; None where there are none, or no row was followed.
        """
        if num_batches not in self._starts:
            return None
        (seen, rows), (seen_before, rows_before) = self._overlap(num_batches), self._starts[num_batches]
        return (seen - seen_before) / (rows - rows_before) if rows > rows_before else None

    def _overlap(self, num_batches: int) -> tuple[int, int]:
        gaps = np.empty(MAX_GAP, np.uint64)
        self._distances.gaps(gaps)
        return int(gaps[:num_batches].sum()), int(self._distances.num_distinct)

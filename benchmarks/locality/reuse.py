"""How soon rows come again: LRU stack distances, the miss-ratio curves they give, and what one pass finds of a table.

    ids, batch by batch ──▶ ReuseProfile ──▶ MissRatioCurve: capacity in rows -> share of accesses an LRU cache misses

The distance of an access is the number of distinct rows accessed since its row was last accessed. An LRU cache of c
rows hits exactly the accesses at distances below c, so one pass gives the curve for every c (Mattson's observation).
For tables too large to follow every row, a pseudo-random sample of the rows stands for all (SHARDS, FAST 2015).

`measure_locality` reads a table's lookups once and also finds how far batches overlap, and drift: what the hot set of
the first tenth of the batches covers in each later tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.compiled import native
from benchmarks.locality.traces import RowCounts
from hotrow.data.reference import fmix64
from hotrow.inspect.accesses import TableAccesses

MAX_GAP = 128
"""The most batches that `ReuseProfile.overlap` looks back (kGaps of benchmarks/native/reuse.h)."""
OVERLAP_BATCHES = (1, 10, 100)
POINTS_PER_OCTAVE = 16
"""Points of a curve in a file, per doubling; neighbouring capacities then differ by at most 4.5 %."""
Access = Literal["lookup", "row"]
ACCESSES: tuple[Access, ...] = ("lookup", "row")


@dataclass(frozen=True)
class MissRatioCurve:
    """m(c), the share of accesses that an LRU cache of c rows misses, first accesses included: a falling staircase.

    capacities: rising numbers of rows [n]; the first is 0. ratios: m of each capacity [n]; the first is 1. Between two
    capacities the ratio is the lower one's, which is an upper bound if `to_json` thinned the curve.
    """

    capacities: NDArray[np.int64]
    ratios: NDArray[np.float64]

    @classmethod
    def from_histogram(
        cls, histogram: NDArray[np.uint64], *, num_accesses: int, num_first: int, rate: float = 1.0
    ) -> MissRatioCurve:
        """Makes the curve from the number of accesses at each distance.

        rate: if below 1, the histogram is of a sample with this share of the rows. num_accesses: of all rows.
        num_first: sampled accesses without a distance. A sampled distance d stands for d / rate other rows. The sample
        should hold rate x num_accesses accesses; a surplus or deficit belongs to rows too hot to miss, so it is added
        to the hits of the smallest cache (the correction of SHARDS, "adj").
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
        """The share of first accesses, which a cache of any size misses; 0 if there are no accesses."""
        return float(self.ratios[-1]) if len(self.ratios) > 1 else 0.0

    def miss_ratio(self, capacity_rows: int | NDArray[np.integer[Any]]) -> Any:
        """Returns m(capacity_rows), a float or an array like the argument. Raises ValueError below 0."""
        if np.min(capacity_rows, initial=0) < 0:
            raise ValueError(f"capacity_rows is {capacity_rows}; a cache holds 0 rows or more")
        found = self.ratios[np.searchsorted(self.capacities, capacity_rows, "right") - 1]
        return float(found) if np.ndim(capacity_rows) == 0 else found

    def distances(self, least: int = 0) -> list[tuple[int, float]]:
        """Returns the histogram of distances: (2^k, share of the accesses at distances from 2^(k-1) to below 2^k).

        The first bin holds distance 0 alone. The last holds the largest distance, or `least` if that is more. Together
        with `first` the shares sum to 1.
        """
        ends = 1 << np.arange(max(int(self.capacities[-1]) - 1, least).bit_length() + 1)
        shares = 0.0 - np.diff(self.miss_ratio(ends), prepend=1.0)
        return list(zip(ends.tolist(), shares.tolist(), strict=True))

    def to_json(self) -> dict[str, list[float]]:
        """Returns `capacity_rows` and `miss_ratio`, thinned to 16 points per doubling."""
        octave = np.round(np.log2(self.capacities + 1) * POINTS_PER_OCTAVE)
        kept = np.flatnonzero(np.diff(octave, prepend=-1.0) != 0)
        if kept[-1] != len(octave) - 1:
            kept = np.append(kept, len(octave) - 1)
        return {"capacity_rows": self.capacities[kept].tolist(), "miss_ratio": self.ratios[kept].tolist()}


def threshold_of(rate: float) -> int:
    """Returns the highest hash of a row that is followed."""
    return min(int(rate * 2.0**64), 2**64 - 1)


def is_sampled(ids: NDArray[Any], rate: float, seed: int) -> NDArray[np.bool_]:
    """Returns which of `ids` belong to rows that a profile with this rate and seed follows."""
    salt = fmix64(np.array([seed + 1], np.uint64))
    return fmix64(ids.astype(np.int64).view(np.uint64) ^ salt) <= np.uint64(threshold_of(rate))


class ReuseProfile:
    """Distances of one table's accesses, fed batch by batch; takes about 40 bytes of memory per row followed.

    access: "lookup" counts every id. "row" counts each distinct row of a batch once, as training reads it after
    removing repeats within the batch. That takes away the easy hits, so the two curves differ, and every report says
    which one it shows. rate: the share of the rows followed, chosen by a hash of the id and `seed`; 1 follows all and
    is exact.
    """

    def __init__(self, access: Access, *, rate: float = 1.0, seed: int = 0) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate is {rate}; the share of rows to follow is above 0 and at most 1")
        self.access, self.rate = access, rate
        self._distances = native().StackDistances(threshold_of(rate), seed)
        self.num_batches = self.num_accesses = 0
        """Batches and accesses so far, including accesses of rows that are not followed."""
        self._starts: dict[int, tuple[int, int]] = {}

    def add(self, ids: NDArray[Any]) -> int:
        """Adds one batch of row ids, int32 or int64 [n], in the order of access; returns how many accesses it makes."""
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
        """Distinct rows followed so far. Divided by `rate` it estimates the distinct rows accessed."""
        return int(self._distances.num_rows)

    def histogram(self) -> NDArray[np.uint64]:
        """Returns the accesses of followed rows by distance among followed rows; `num_rows` are the first accesses."""
        out = np.empty(self._distances.histogram_size, np.uint64)
        self._distances.histogram(out)
        return out

    def curve(self) -> MissRatioCurve:
        """Returns the miss-ratio curve of all accesses so far."""
        return MissRatioCurve.from_histogram(
            self.histogram(), num_accesses=self.num_accesses, num_first=self.num_rows, rate=self.rate
        )

    def overlap(self, num_batches: int) -> float | None:
        """Returns the share of a batch's distinct rows that were in one of the `num_batches` (1, 10 or 100) before it.

        Only batches with that many before them count. Returns None if there are none, or if no row was followed.
        """
        if num_batches not in self._starts:
            return None
        (seen, rows), (seen_before, rows_before) = self._overlap(num_batches), self._starts[num_batches]
        return (seen - seen_before) / (rows - rows_before) if rows > rows_before else None

    def _overlap(self, num_batches: int) -> tuple[int, int]:
        gaps = np.empty(MAX_GAP, np.uint64)
        self._distances.gaps(gaps)
        return int(gaps[:num_batches].sum()), int(self._distances.num_distinct)


# ---- one pass over a table

AUTO_ROWS = 1 << 20
"""Rows of a table that are followed by default. They take 80 MB for both curves, and a smaller table is exact."""
MIN_ROWS = 1 << 13
"""Rows followed at least, whatever the rate: the SHARDS paper found this many enough [recall]; fewer are noise."""
NUM_WINDOWS = 10
HOT_SHARE = 0.01
"""The share of a table's rows in the hot set whose drift is watched."""


@dataclass(frozen=True)
class Window:
    """One tenth of the batches, for drift."""

    first_hot_set: float
    """The share of the window's lookups that the hot set of the first window takes."""
    own_hot_set: float
    """The same for the hottest rows of this window, as many: the most that any set of that size could take."""


@dataclass(frozen=True)
class Locality:
    """What one pass found. Means over batches leave out a smaller last batch."""

    num_batches: int
    num_lookups: int
    num_rows_read: int
    """Distinct rows of each batch, summed over all batches: the accesses of `by_row`."""
    lookups_per_batch: float
    rows_per_batch: float
    """Distinct rows of a batch."""
    rate: float
    """The share of the table's rows followed; with 1 the curves are exact."""
    rows_followed: int
    by_lookup: MissRatioCurve
    by_row: MissRatioCurve
    """Counts each distinct row of a batch once."""
    overlap: dict[int, float | None]
    windows: tuple[Window, ...]

    @property
    def unique_ratio(self) -> float:
        """Distinct rows of a batch over its lookups."""
        return self.rows_per_batch / self.lookups_per_batch if self.lookups_per_batch else 0.0

    def num_accesses(self, per: Access) -> int:
        """Returns how many accesses that curve counts."""
        return self.num_lookups if per == "lookup" else self.num_rows_read

    def curve(self, per: Access) -> MissRatioCurve:
        """Returns the curve per lookup, or per distinct row of a batch."""
        return self.by_lookup if per == "lookup" else self.by_row


def sampling_rate(num_embeddings: int, requested: float | None) -> float:
    """Returns the share of rows to follow: `requested`, or enough for 2^20 rows; never fewer than 2^13 rows."""
    if requested is not None and not 0 < requested <= 1:
        raise ValueError(f"sample is {requested}; the share of rows to follow is above 0 and at most 1")
    wanted = AUTO_ROWS / num_embeddings if requested is None else requested
    return min(1.0, max(wanted, MIN_ROWS / num_embeddings))


def measure_locality(
    table: TableAccesses,
    *,
    num_samples: int,
    batch_size: int,
    sample: float | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda batches: None,
) -> Locality:
    """Reads the table's lookups once; the same seed gives the same result.

    advance: called with the number of batches read so far. Raises ValueError for a batch_size below 1, or a `sample`
    outside (0, 1].
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    rate = sampling_rate(table.num_embeddings, sample)
    by_lookup, by_row = (ReuseProfile(access, rate=rate, seed=seed) for access in ACCESSES)
    num_batches = -(-num_samples // batch_size)
    num_full = max(num_samples // batch_size, 1)
    drift = _Drift(num_batches, rate, seed, table.num_embeddings)
    lookups_full = rows_full = 0
    for index, ids in enumerate(table.batches(batch_size)):
        by_lookup.add(ids)
        num_rows = by_row.add(ids)
        if index < num_full:
            lookups_full, rows_full = lookups_full + len(ids), rows_full + num_rows
        drift.add(index, ids)
        advance(index + 1)
    return Locality(
        num_batches=num_batches,
        num_lookups=by_lookup.num_accesses,
        num_rows_read=by_row.num_accesses,
        lookups_per_batch=lookups_full / num_full,
        rows_per_batch=rows_full / num_full,
        rate=rate,
        rows_followed=by_lookup.num_rows,
        by_lookup=by_lookup.curve(),
        by_row=by_row.curve(),
        overlap={k: by_row.overlap(k) for k in OVERLAP_BATCHES},
        windows=drift.windows(),
    )


class _Drift:
    """Counts the followed rows in each tenth of the batches; holds one tenth in memory beside the first hot set."""

    def __init__(self, num_batches: int, rate: float, seed: int, num_embeddings: int) -> None:
        self._num_windows = min(NUM_WINDOWS, num_batches)
        self._num_batches, self._rate, self._seed = num_batches, rate, seed
        self._num_hot = max(1, round(HOT_SHARE * rate * num_embeddings))
        self._hot: NDArray[np.int64] | None = None
        self._found: list[Window] = []
        self._window = 0
        self._counts = RowCounts()

    def add(self, index: int, ids: NDArray[Any]) -> None:
        """Adds batch `index`."""
        window = index * self._num_windows // self._num_batches
        if window != self._window:
            self._close()
            self._window = window
        self._counts.add(ids if self._rate == 1 else ids[is_sampled(ids, self._rate, self._seed)])

    def windows(self) -> tuple[Window, ...]:
        """Returns all windows after the last batch; none if there are too few batches to compare."""
        self._close()
        return tuple(self._found) if len(self._found) > 1 else ()

    def _close(self) -> None:
        rows, counts = self._counts.sums()
        self._counts = RowCounts()
        total = int(counts.sum())
        hottest = np.argsort(-counts, kind="stable")[: self._num_hot]
        if self._hot is None:
            self._hot = rows[hottest]
        if total:
            in_hot = int(counts[np.isin(rows, self._hot)].sum())
            self._found.append(Window(in_hot / total, int(counts[hottest].sum()) / total))

"""Decides which rows train, validate and test, by row number, seed, file or time alone, never by ids or labels.

A plan is made before anything is counted, so that counting can leave out the other splits: what a model knows about its
ids comes from training rows (law 6). `assign` gives rows, by their numbers and times, their
splits, as indices into `SPLITS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.data.native import GOLDEN, mix64
from hotrow.data.sources.schema import SPLITS

TRAIN, VAL, TEST = range(len(SPLITS))
Codes = NDArray[np.uint8]

SPLIT_SALT = 0x51
SAMPLE_SALT = 0xA9
FOLD_SALT = 0xF0


def uniform_of(seed: int, rows: NDArray[np.int64], *, salt: int) -> NDArray[np.float64]:
    """Returns a uniform draw in [0, 1) for each row, a function of (seed, salt, row number) alone.

    It is the upper 53 bits of splitmix64 (Steele, Lea, Flood 2014) of the row number, started from the mixed seed.
    """
    start = mix64(np.array([(seed + salt * GOLDEN) % 2**64], dtype=np.uint64))
    bits = mix64(start + rows.astype(np.uint64) * np.uint64(GOLDEN)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def sample_mask(seed: int, rows: NDArray[np.int64], *, fraction: float) -> NDArray[np.bool_]:
    """Which rows a sample keeps, by their numbers; a smaller fraction keeps a subset of them."""
    return uniform_of(seed, rows, salt=SAMPLE_SALT) < fraction


@dataclass(frozen=True)
class RandomPlan:
    """Splits by u(seed, row number): below fractions[0] trains, the next fractions[1] validate, the rest tests."""

    seed: int
    fractions: tuple[float, float, float]
    kind: Literal["random"] = "random"

    def assign(self, rows: NDArray[np.int64], time: NDArray[np.int64] | None = None) -> Codes:
        u = uniform_of(self.seed, rows, salt=SPLIT_SALT)
        train, val, _ = self.fractions
        return (u >= train).astype(np.uint8) + (u >= train + val).astype(np.uint8)


@dataclass(frozen=True)
class TimePlan:
    """Splits by time: time < cuts[0] trains, time < cuts[1] validates, the rest tests. Equal times stay together."""

    cuts: tuple[int, int]
    kind: Literal["time"] = "time"

    def assign(self, rows: NDArray[np.int64], time: NDArray[np.int64] | None = None) -> Codes:
        assert time is not None, "a time plan is made from a source that has time"
        return (time >= self.cuts[0]).astype(np.uint8) + (time >= self.cuts[1]).astype(np.uint8)


@dataclass(frozen=True)
class RangePlan:
    """Splits by row number, as the reference DLRM: below stops[0] trains, below stops[1] tests, the rest validates."""

    stops: tuple[int, int]
    kind: Literal["reference"] = "reference"

    def assign(self, rows: NDArray[np.int64], time: NDArray[np.int64] | None = None) -> Codes:
        return np.select([rows < self.stops[0], rows < self.stops[1]], [TRAIN, TEST], VAL).astype(np.uint8)


SplitPlan = RandomPlan | TimePlan | RangePlan


def plan_to_json(plan: SplitPlan) -> dict[str, Any]:
    """Returns `plan` as dataset.json stores it."""
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(plan).items()}
    return {"kind": plan.kind, **fields}


def plan_of(stored: Mapping[str, Any]) -> SplitPlan:
    """Returns the plan that dataset.json stores."""
    kinds: dict[str, Any] = {each.kind: each for each in (RandomPlan, TimePlan, RangePlan)}
    plan: SplitPlan = kinds[stored["kind"]](
        **{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    )
    return plan


def reference_plan(rows_per_file: Sequence[int]) -> RangePlan:
    """Returns the reference DLRM's split of Criteo (facebookresearch/dlrm, data_utils.py).

    One file (Kaggle): seven equal consecutive days by row count, the first `n % 7` of them one row longer; six train.
    Several files (Terabyte): each is a day; all but the last train. The last day's first half, rounded up, tests and
    its second half validates.
    """
    if len(rows_per_file) == 1:
        share, extra = divmod(rows_per_file[0], 7)
        days = [share + (day < extra) for day in range(7)]
    else:
        days = list(rows_per_file)
    train = sum(days[:-1])
    if train == 0 or days[-1] < 2:
        raise ValueError(
            f"{sum(days)} rows in {len(rows_per_file)} files are too few for the reference split (6/7, 1/14, 1/14); "
            "use the split random (--split random, in Python split='random')"
        )
    return RangePlan((train, train + (days[-1] + 1) // 2))


class TimeHistogram:
    """Counts rows per time in bounded memory: exactly up to `max_distinct` times, then in buckets of 2^shift.

    A cut at a bucket's start is still an exact rule for rows (`time < cut`); only how near the cut comes to a share is
    limited. The result does not depend on the order or the chunks in which times are added.
    """

    def __init__(self, *, max_distinct: int = 1 << 20) -> None:
        self.max_distinct = max_distinct
        self.shift = 0
        self.buckets = np.empty(0, dtype=np.int64)
        self.counts = np.empty(0, dtype=np.int64)

    def add(self, time: NDArray[np.int64]) -> None:
        """Counts one chunk of rows."""
        self._merge(*np.unique(time >> self.shift, return_counts=True))

    def merged(self, other: TimeHistogram) -> TimeHistogram:
        """One histogram of the rows that this one and `other` have counted."""
        found = TimeHistogram(max_distinct=self.max_distinct)
        found.shift = max(self.shift, other.shift)
        for own in (self, other):
            found._merge(own.buckets >> found.shift - own.shift, own.counts)
        return found

    def _widen(self, shift: int) -> None:
        """Counts in buckets of 2^shift, if they were narrower."""
        if shift > self.shift:
            buckets, counts, more = self.buckets, self.counts, shift - self.shift
            self.buckets, self.counts, self.shift = buckets[:0], counts[:0], shift
            self._merge(buckets >> more, counts)

    def _merge(self, buckets: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        merged, inverse = np.unique(np.concatenate([self.buckets, buckets]), return_inverse=True)
        sums = np.zeros(len(merged), dtype=np.int64)
        np.add.at(sums, inverse, np.concatenate([self.counts, counts]))
        self.buckets, self.counts = merged, sums
        if len(merged) > self.max_distinct:
            self._widen(self.shift + 1)

    def plan(self, fractions: tuple[float, float, float]) -> TimePlan:
        """Returns the plan whose shares come nearest to `fractions`.

        Raises ValueError if a share above 0 would get no row, as when too many rows have the same time.
        """
        total = int(self.counts.sum())
        below = np.concatenate([[0], np.cumsum(self.counts)])
        starts = np.append(self.buckets, self.buckets[-1:] + 1) << self.shift
        cuts = [int(np.argmin(np.abs(below - share * total))) for share in np.cumsum(fractions)[:2]]
        sizes = np.diff([0, *(int(below[cut]) for cut in cuts), total])
        for name, size, fraction in zip(SPLITS, sizes, fractions, strict=True):
            if size == 0 and fraction > 0:
                raise ValueError(
                    f"split by time: {name} would get none of {total} rows with {len(self.buckets)} distinct times for "
                    f"fractions {list(fractions)}; use other fractions, or the split random (--split random, in Python "
                    "split='random')"
                )
        return TimePlan((int(starts[cuts[0]]), int(starts[cuts[1]])))

"""How many rows each table pins and caches: greedy by marginal hits per byte from access counts. Plain numbers, no I/O.

    counts -> expected hits of n slots, for every n -> slots per table

    memory = hotrow.Memory(dram="2GiB", ssd="/nvme/emb", plan=plan_by_counts({"user": counts}, num_steps=1000))

A hit is a row of a step that lies in DRAM already; of a row that a batch names twice it is one. Without a miss-ratio
curve accesses are taken as independent: row i, of c_i accesses in all steps, is in a step with chance
`e_i = 1 - exp(-c_i / num_steps)`, and what a cache keeps of rows that nobody pinned follows Che's approximation (a row
leaves after T steps without use, T such that the cache is full). Next: memory/budget.py, the plan without counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotrow.memory.budget import LEAST_ROWS, METADATA_BYTES, TableDemand, TableSlots, num_bytes, plan_slots

HOT_PER_STEP = 0.5
"""Rows expected in at least every second step are pinned, a prefix of the table: no policy would let them go, and a
pinned row needs no map and no bookkeeping."""
PREFIX_SHARE = 0.9
"""Of the pinned prefix, at least so much is that hot: row 0 and ties may not be."""
POINTS_PER_OCTAVE = 16
EXACT_POINTS = 64
"""Numbers of slots looked at: all up to this, then so many per doubling."""
LEAST_HITS = 1e-9
"""Per step, that more slots must bring: less is rounding."""
CHE_HALVINGS = 30
"""Of the logarithm of the time that rows stay, which is below 40: some 1e-7 of it."""
MOST_RATES = 1024
"""That are told apart in Che's approximation."""

Array = NDArray[np.float64]


class MissRatio(Protocol):
    """Of an LRU cache of so many rows, per distinct row of a batch: data/reuse.py's MissRatioCurve."""

    def miss_ratio(self, capacity_rows: Any, /) -> Any:
        """Share of accesses missed."""


class TableUse:
    """One table's accesses, and what slots are worth to it.

    counts: accesses of each row in `num_steps` steps, [num_rows]. curve: measured hits of caches, in place of
    independence. Raises ValueError where counts are negative, not finite, or of another number of rows.
    """

    def __init__(
        self, demand: TableDemand, counts: ArrayLike, *, num_steps: float, curve: MissRatio | None = None
    ) -> None:
        given = np.asarray(counts)
        if given.shape != (demand.num_rows,):
            raise ValueError(f"table {demand.name!r}: counts are {given.shape}, the table has {demand.num_rows:,} rows")
        if given.dtype.kind not in "iuf" or not np.isfinite(given).all() or (len(given) and given.min() < 0):
            raise ValueError(f"table {demand.name!r}: counts must be finite numbers from 0 up")
        self.demand, self.curve = demand, curve
        rates = given / num_steps
        self._in_prefix = np.concatenate([[0.0], np.cumsum(-np.expm1(-rates[: _hot_prefix(rates)]))])
        self._prefix_rates = rates[: self.num_hot]
        self._behind_prefix = _binned(rates[self.num_hot :])
        self.rows_per_step = float(-np.expm1(-rates).sum())
        """Expected different rows of a step."""

    @property
    def num_hot(self) -> int:
        """Rows of the prefix that is pinned where there are slots for it."""
        return len(self._in_prefix) - 1

    def slots(self, num_slots: int, *, least_cached: int = LEAST_ROWS) -> TableSlots:
        """`num_slots` cut into pinned and at least `least_cached` cached ones, unless the table lies there whole."""
        if num_slots >= self.demand.num_rows:
            return TableSlots(self.demand.num_rows, 0)
        pinned = max(0, min(self.num_hot, num_slots - least_cached))
        return TableSlots(pinned, num_slots - pinned)

    def num_bytes(self, slots: TableSlots) -> float:
        """What they take, all counted."""
        return num_bytes(self.demand, slots)

    def hits(self, slots: Sequence[TableSlots]) -> Array:
        """Expected hits per step of each."""
        if self.curve is None:
            return np.array([self._pinned_hits(pinned) + self._cached_hits(pinned, cached) for pinned, cached in slots])
        # Pinned rows are those that a cache would keep; nothing is missed of a table that lies there whole.
        missed = [0.0 if s.pinned == self.demand.num_rows else self.curve.miss_ratio(sum(s)) for s in slots]
        return self.rows_per_step * (1.0 - np.array(missed))

    def _pinned_hits(self, prefix: int) -> float:
        return self.rows_per_step if prefix == self.demand.num_rows else float(self._in_prefix[prefix])

    def _cached_hits(self, prefix: int, cached: int) -> float:
        """By Che's approximation, over the rows behind the prefix."""
        if prefix == self.demand.num_rows:
            return 0.0
        parts = [_binned(self._prefix_rates[prefix:]), self._behind_prefix]
        rates, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
        if cached >= weights.sum():
            return float(-(np.expm1(-rates) * weights).sum())
        low, high = 0.0, 50 / rates.min()  # after so many steps all rows that are used at all have been
        for _ in range(CHE_HALVINGS):
            steps = np.sqrt(max(low, 1e-6 / rates.max()) * high)
            low, high = (steps, high) if -(np.expm1(-rates * steps) * weights).sum() < cached else (low, steps)
        return float((np.expm1(-rates * high) * np.expm1(-rates) * weights).sum()) if cached else 0.0


def _binned(rates: Array) -> tuple[Array, Array]:
    """Different rates above 0 and how many rows have each; where there are many, means of those within 1 %."""
    rates, num = np.unique(rates[rates > 0], return_counts=True)
    if len(rates) <= MOST_RATES:
        return rates, num.astype(np.float64)
    bins = np.round(np.log2(rates) * 64)
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    weights = np.add.reduceat(num, starts).astype(np.float64)
    return np.add.reduceat(rates * num, starts) / weights, weights


def _hot_prefix(rates: Array) -> int:
    """The longest prefix that ends with a hot row and is of hot rows but for PREFIX_SHARE of them, or one."""
    hot = np.flatnonzero(-np.expm1(-rates) >= HOT_PER_STEP)
    num_hot = np.arange(1, len(hot) + 1)
    dense = (num_hot >= PREFIX_SHARE * (hot + 1)) | (hot <= num_hot)
    return int(hot[dense][-1]) + 1 if dense.any() else 0


class _Piece(NamedTuple):
    """Slots that one table gets more: from those of the piece before."""

    density: float
    """Hits per byte."""
    table: int
    num_slots: int
    """Of the table, with this piece."""


def solve(tables: Sequence[TableUse], budget_bytes: float, *, least_cached: int = LEAST_ROWS) -> list[TableSlots]:
    """Slots for each table within `budget_bytes`: the greedy plan, or that of `budget.plan_slots` where it hits more.

    Takes slots in the order of hits per byte, along the concave hull of each table's curve, so it lacks
    less than one piece of it to the best there is, and nothing where all slots cost the same. Raises ValueError as
    `plan_slots`.
    """
    equal = plan_slots([table.demand for table in tables], int(budget_bytes))
    pieces = [_pieces(t, table, least_cached) for t, table in enumerate(tables)]
    counts = [first.num_slots for first, *_ in pieces]
    least = [table.slots(num, least_cached=least_cached) for table, num in zip(tables, counts, strict=True)]
    left = budget_bytes - sum(table.num_bytes(slots) for table, slots in zip(tables, least, strict=True))
    if left < 0:
        return equal
    for piece in sorted((piece for _, *more in pieces for piece in more), key=lambda piece: -piece.density):
        left = _take(piece, tables[piece.table], counts, left, least_cached)
    found = [table.slots(num, least_cached=least_cached) for table, num in zip(tables, counts, strict=True)]
    return found if expected_hits(tables, found) >= expected_hits(tables, equal) else equal


def _take(piece: _Piece, table: TableUse, counts: list[int], left: float, least_cached: int) -> float:
    """Give the table the piece, or as much of it as fits; the bytes that are left."""

    def grown(num_slots: int) -> float:
        now = table.slots(counts[piece.table], least_cached=least_cached)
        return table.num_bytes(table.slots(num_slots, least_cached=least_cached)) - table.num_bytes(now)

    num_slots = piece.num_slots
    if grown(num_slots) > left:
        per_slot = table.demand.record_bytes + METADATA_BYTES
        num_slots = min(num_slots - 1, counts[piece.table] + int(left / per_slot))
    more = grown(num_slots)
    if num_slots <= counts[piece.table] or more > left:
        return left
    counts[piece.table] = num_slots
    return left - more


def _pieces(t: int, table: TableUse, least_cached: int) -> list[_Piece]:
    """The least that the table may have, or all of it where that costs no more; then pieces of falling density."""
    numbers = _numbers(min(least_cached, table.demand.num_rows), table.demand.num_rows, table.num_hot + least_cached)
    slots = [table.slots(num, least_cached=least_cached) for num in numbers]
    hull = _concave_hull(np.array([table.num_bytes(s) for s in slots]), table.hits(slots))
    found = [_Piece(math.inf, t, numbers[hull[0][2]])]
    for (bytes_a, hits_a, _), (bytes_b, hits_b, k) in pairwise(hull):
        found.append(_Piece((hits_b - hits_a) / max(bytes_b - bytes_a, 1e-9), t, numbers[k]))
    return found


def _numbers(least: int, most: int, corner: int) -> list[int]:
    """Numbers of slots to look at, rising."""
    span = most - least
    octaves = np.log2(max(span / EXACT_POINTS, 1.0))
    far = least + EXACT_POINTS * 2 ** np.linspace(0, octaves, 1 + int(np.ceil(octaves * POINTS_PER_OCTAVE)))
    near = least + np.arange(min(span, EXACT_POINTS) + 1)
    found = np.unique(np.concatenate([near, far.astype(np.int64), [most, min(max(corner, least), most)]]))
    return [int(num) for num in found if least <= num <= most]


def _concave_hull(num_bytes: Array, hits: Array) -> list[tuple[float, float, int]]:
    """(bytes, hits, index) of the points that no mix of others beats, from the first, rising in both."""
    hull: list[tuple[float, float, int]] = [(float(num_bytes[0]), float(hits[0]), 0)]
    for k in np.argsort(num_bytes, kind="stable").tolist():
        x, y = float(num_bytes[k]), float(hits[k])
        if y <= hull[-1][1] + LEAST_HITS:
            continue
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], x, y):
            hull.pop()
        if x > hull[-1][0]:
            hull.append((x, y, k))
        elif len(hull) == 1:
            hull[0] = (x, y, k)
    return hull


def _is_below(a: tuple[float, float, int], b: tuple[float, float, int], x: float, y: float) -> bool:
    return (b[1] - a[1]) * (x - a[0]) <= (y - a[1]) * (b[0] - a[0])


def expected_hits(tables: Sequence[TableUse], slots: Sequence[TableSlots]) -> float:
    """Per step, over all tables."""
    return float(sum(table.hits([s])[0] for table, s in zip(tables, slots, strict=True)))


def expected_hit_rate(tables: Sequence[TableUse], slots: Sequence[TableSlots]) -> float:
    """Share of the different rows of a step that lie in DRAM already, over all tables; 1 where nothing is accessed."""
    rows = sum(table.rows_per_step for table in tables)
    return expected_hits(tables, slots) / rows if rows else 1.0


@dataclass(frozen=True)
class CountsPlan:
    """What `Memory(plan=...)` calls; made by `plan_by_counts`."""

    counts: Mapping[str, ArrayLike]
    num_steps: float
    curves: Mapping[str, MissRatio]

    def __call__(self, demands: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
        """Slots for each table. Raises ValueError where a table has no counts, and as `solve`."""
        return solve(self.uses(demands), budget_bytes)

    def uses(self, demands: Sequence[TableDemand]) -> list[TableUse]:
        """The tables with their accesses."""
        for demand in demands:
            if demand.name not in self.counts:
                raise ValueError(
                    f"plan_by_counts has no counts for table {demand.name!r}; it has {', '.join(self.counts) or 'none'}"
                )
        return [
            TableUse(d, self.counts[d.name], num_steps=self.num_steps, curve=self.curves.get(d.name)) for d in demands
        ]


def plan_by_counts(
    counts: Mapping[str, ArrayLike], *, num_steps: float, curves: Mapping[str, MissRatio] | None = None
) -> Callable[[Sequence[TableDemand], int], Sequence[TableSlots]]:
    """A plan for `Memory(plan=...)` from accesses per row, such as those of a packed dataset.

    counts: by table, accesses of each row [num_embeddings]; pinned rows are a prefix, so rows should be numbered by
    popularity, as `hotrow prepare` does. num_steps: batches in which they were counted. curves: by table, measured
    miss ratios per distinct row of a batch (Locality.by_row), where there are some. Raises ValueError below one step.
    """
    if not num_steps > 0:
        raise ValueError(
            f"num_steps is {num_steps}; it is the number of batches in which accesses were counted, above 0"
        )
    return CountsPlan(counts, num_steps, curves or {})

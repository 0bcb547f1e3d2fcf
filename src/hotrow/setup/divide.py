"""How many rows each table pins and caches, from access counts: greedy by hits per byte. Plain numbers, no I/O.

    counts -> for every n, the best cut of n bytes into pinned and cached slots -> bytes per table

    memory = hotrow.Memory(dram="2GiB", ssd="/nvme/emb", plan=plan_by_counts({"user": counts}, num_steps=1000))

A hit is a row of a step that is in DRAM already; a row that a batch names twice is one hit. Accesses are assumed to be
independent: row i, with c_i accesses in all steps, is in a step with probability `e_i = 1 - exp(-c_i / num_steps)`. A
pinned prefix then hits the sum of its e_i; if rows are numbered by popularity, no other rows of its size hit more. The
cache behind it, by Che's approximation, hits rows that were used in the last T steps, where T is such that these rows
fill the cache. So if rows are ranked, nearly all slots are pinned; if their order is arbitrary, none are. Every miss
costs the same: weights of what a miss of each table costs on a disk changed no measured division
(docs/measurements/tried.md). placement/budget.py plans without counts.

Rows of batches that are fetched ahead stay until they are trained, beside the cache if it has no slots for them all. A
batch finds them there, so a cache hits no less than one of their rows would: `TableUse.hits`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotrow.config.schema import MemoryConfig
from hotrow.placement.budget import METADATA_BYTES, MIN_ROWS, TableDemand, TableSlots, num_bytes, plan_slots

LOOKAHEAD = MemoryConfig().lookahead
"""Default number of batches that are announced before their step."""
FLIGHT_SIGMAS = 4
"""Caches have room for the expected rows of batches in flight plus this many standard deviations."""
CUTS_PER_OCTAVE = 64
"""Prefixes tried per doubling of their rows; up to about 90 rows all are tried."""
WINDOWS = 160
"""Lengths of stay in a cache that are computed: about 5 per doubling, linear between them."""
RATES_PER_OCTAVE, MIN_RATE, MAX_RATE = 16, 2.0**-60, 2.0**40
NUM_KINDS = 2 + round(math.log2(MAX_RATE / MIN_RATE)) * RATES_PER_OCTAVE
FEW = 1 << 10
"""Whole counts below this are told apart before they become rates."""
MAX_RATES = 2048
"""In tables of up to this many rows every rate is kept; larger tables have RATES_PER_OCTAVE rates per doubling."""
PIECE_ROWS = 1 << 20
"""Rows whose counts are read at a time."""
POINTS_PER_OCTAVE = 16
EXACT_POINTS = 64
"""Sizes of a table that are tried: all up to EXACT_POINTS slots, then POINTS_PER_OCTAVE per doubling."""
MIN_HITS = 1e-9
"""The least gain, in hits per step, that counts as one; less is rounding."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Counted:
    """How often the rows of a table are looked up: all that plans take from its counts. Counts may be gigabytes, so
    they are read once; the numbers of rows here are few, because rows are ranked."""

    num_rows: int
    num_steps: float
    rates: Array
    """The different rates at which rows are looked up, per step [K]."""
    cuts: NDArray[np.int64]
    """Lengths of prefixes to look at, rising, from none to all."""
    entries: tuple[NDArray[np.int64], Array]
    """Places in a matrix [len(cuts) - 1, K], and how many rows between two cuts have the rate; the others are 0."""

    @classmethod
    def of(cls, name: str, counts: NDArray[Any], num_steps: float) -> Counted:
        """Reads accesses of each row in `num_steps` steps. Raises ValueError if some are negative or not finite."""
        cuts = _cuts(len(counts))
        rates, rows = rates_of(name, counts, num_steps, cuts)
        places = np.flatnonzero(rows)
        return cls(len(counts), num_steps, rates, cuts, (places, rows.ravel()[places]))

    @property
    def rows_by_cut(self) -> Array:
        """How many rows between two cuts have each rate [len(cuts) - 1, K]."""
        found = np.zeros((len(self.cuts) - 1, len(self.rates)))
        places, num = self.entries
        found.ravel()[places] = num
        return found


class TableUse:
    """One table's accesses, and what slots are worth to it.

    counts: accesses of each row in `num_steps` steps, [num_rows], or what was read of them. depth: batches that are
    fetched ahead, whose rows take cached slots. least_cached: the least number of cached rows, if the table has as
    many. Raises ValueError if counts are negative, not finite, or of another number of rows.
    """

    def __init__(
        self,
        demand: TableDemand,
        counts: ArrayLike | Counted,
        *,
        num_steps: float,
        depth: int = LOOKAHEAD,
        least_cached: int = MIN_ROWS,
    ) -> None:
        if not isinstance(counts, Counted):
            given = np.asarray(counts)
            if given.shape != (demand.num_rows,):
                raise ValueError(
                    f"table {demand.name!r}: counts are {given.shape}, the table has {demand.num_rows:,} rows"
                )
            counts = Counted.of(demand.name, given, num_steps)
        assert (counts.num_rows, counts.num_steps) == (demand.num_rows, num_steps)
        self.demand = demand
        self._cuts, rates, rows = counts.cuts, counts.rates, counts.rows_by_cut
        windows = _windows(rates, rows)
        chance, came = -np.expm1(-rates), -np.expm1(-np.outer(rates, windows))
        hit = chance[:, None] * came

        def behind(each: Array) -> Array:
            """Returns the sum of `each`, by rate, over the rows behind every cut."""
            sums = rows @ each
            return np.concatenate([np.cumsum(sums[::-1], axis=0)[::-1], np.zeros_like(sums[:1])])

        self._resident, self._cached = behind(came), behind(hit)
        self._ahead = np.array([np.interp(depth, windows, resident) for resident in self._resident])
        """Rows of the batches that are fetched ahead, behind every cut."""
        self._pinned = np.concatenate([[0.0], np.cumsum(rows @ chance)])
        self.rows_per_step = float(self._pinned[-1])
        """Expected number of different rows in a step."""
        tail = demand.num_rows - self._cuts
        flying = behind(-np.expm1(-np.outer(rates, np.arange(depth + 2))))
        flying = np.maximum(least_cached, np.ceil(flying + FLIGHT_SIGMAS * np.sqrt(flying)))
        self.floors: Array = np.minimum(tail, flying.T)
        """Rows to cache with room for those of none, one, ... and all batches in flight, behind every prefix that is
        looked at: [depth + 2, prefixes]."""

    def of(self, demand: TableDemand) -> TableUse:
        """Returns the same accesses of rows that take other bytes, without reading the counts again."""
        made = copy(self)
        made.demand = demand
        return made

    @property
    def whole_bytes(self) -> float:
        """Bytes of the table if all of it lies in memory."""
        return num_bytes(self.demand, TableSlots(self.demand.num_rows, 0))

    def least_bytes(self, floor: Array) -> float:
        """Returns the fewest bytes with which some cut caches `floor` rows; floor: by prefix."""
        return min(self.whole_bytes, float(np.min(self._bytes(self._cuts, floor))))

    def _bytes(self, pinned: Any, cached: Any) -> Any:
        record = self.demand.record_bytes
        return pinned * record + cached * (record + METADATA_BYTES) + self.demand.num_rows * self.demand.row_bytes

    def cut(self, most_bytes: Sequence[float], floor: Array) -> list[TableSlots]:
        """Returns for each budget from `least_bytes(floor)` up the cut that hits most, of equals the least pinned."""
        given = np.asarray(most_bytes, np.float64)
        cuts = self._cuts[:-1]
        cached = np.floor((given - self._bytes(cuts, 0)[:, None]) / (self.demand.record_bytes + METADATA_BYTES))
        cached = np.minimum(cached, (self.demand.num_rows - cuts)[:, None])
        hits = np.array(
            [
                pinned + np.interp(own, resident, hit)
                for own, pinned, resident, hit in zip(cached, self._pinned, self._resident, self._cached, strict=False)
            ]
        )
        hits[cached < floor[:-1, None]] = -np.inf
        best = np.argmax(hits >= hits.max(axis=0) - MIN_HITS, axis=0)
        return [
            TableSlots(self.demand.num_rows, 0) if enough else TableSlots(int(cuts[k]), int(cached[k, b]))
            for b, (k, enough) in enumerate(zip(best.tolist(), given >= self.whole_bytes, strict=True))
        ]

    def hits(self, slots: TableSlots, *, in_flight: bool = False) -> float:
        """Expected hits per step of the rows that have slots; in_flight: of rows beside the cache too."""
        k = min(int(np.searchsorted(self._cuts, slots.pinned)), len(self._cuts) - 1)
        near = range(max(k - 1, 0), k + 1)
        cached = np.maximum(slots.cached, self._ahead if in_flight else 0 * self._ahead)
        hits = [self._pinned[j] + np.interp(cached[j], self._resident[j], self._cached[j]) for j in near]
        return float(np.interp(slots.pinned, self._cuts[near.start : near.stop], hits))

    def keeps(self, slots: TableSlots, floor: Array) -> bool:
        """Returns whether `slots` cache `floor` rows."""
        return slots.cached >= float(np.interp(slots.pinned, self._cuts, floor))

    def bytes_beside(self, slots: TableSlots) -> float:
        """Returns what rows of batches in flight may take that find no slot."""
        wanted = float(np.interp(slots.pinned, self._cuts, self.floors[-1]))
        return self.demand.record_bytes * max(0.0, wanted - slots.cached)


def _cuts(num_rows: int) -> NDArray[np.int64]:
    """Returns lengths of prefixes to look at, rising, from none to all."""
    octaves = math.log2(max(num_rows, 1))
    powers = 2.0 ** np.linspace(0, octaves, 1 + math.ceil(octaves * CUTS_PER_OCTAVE))
    return np.unique(np.concatenate([[0], np.round(powers).astype(np.int64), [num_rows]]))


def rates_of(name: str, counts: NDArray[Any], num_steps: float, cuts: NDArray[np.int64]) -> tuple[Array, Array]:
    """The different rates of lookups per step [K], and how many rows between cuts have each [len(cuts) - 1, K]."""
    if len(counts) <= MAX_RATES:
        _check(name, counts)
        place = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        rates, kind = np.unique(counts, return_inverse=True)
        rows = np.zeros((len(cuts) - 1, len(rates)))
        np.add.at(rows, (place, kind), 1.0)
        return rates / num_steps, rows
    rows, sums = np.zeros((len(cuts) - 1, NUM_KINDS)), np.zeros(NUM_KINDS)
    small = np.arange(FEW if counts.dtype.kind in "iu" else 0)  # of most rows: they are counted before their logarithm
    kind = _kinds(small, num_steps)
    begins = np.flatnonzero(np.diff(kind, prepend=-1))
    for start in range(0, len(counts), PIECE_ROWS):
        piece = counts[start : start + PIECE_ROWS]
        _check(name, piece)
        own = np.clip(cuts, start, start + len(piece))
        first = int(np.searchsorted(cuts, start, "right")) - 1
        last = int(np.searchsorted(cuts, start + len(piece), "left"))
        stretch = np.repeat(np.arange(last - first), np.diff(own)[first:last])
        large = np.flatnonzero(piece >= len(small))
        kind_of_large = _kinds(piece[large], num_steps)
        np.add.at(rows[first:last], (stretch[large], kind_of_large), 1.0)
        sums += np.bincount(kind_of_large, weights=piece[large], minlength=NUM_KINDS)
        if len(small):
            stretch *= FEW + 1
            stretch += np.minimum(piece, FEW).astype(np.int64)
            found = np.bincount(stretch, minlength=(last - first) * (FEW + 1)).reshape(last - first, FEW + 1)[:, :FEW]
            sums += np.bincount(kind, weights=small * found.sum(axis=0), minlength=NUM_KINDS)
            rows[first:last, kind[begins]] += np.add.reduceat(found, begins, axis=1)
    num = rows.sum(axis=0)
    seen = num > 0
    return sums[seen] / num_steps / num[seen], rows[:, seen]


def _kinds(counts: NDArray[Any], num_steps: float) -> NDArray[np.int64]:
    """The kind of each row: its rate's octave, in RATES_PER_OCTAVE parts."""
    octaves = np.log2(np.maximum(counts / num_steps, MIN_RATE / 2)) - math.log2(MIN_RATE)
    return np.clip(np.ceil(octaves * RATES_PER_OCTAVE), 0, NUM_KINDS - 1).astype(np.int64)


def _check(name: str, counts: NDArray[Any]) -> None:
    good = counts.dtype.kind in "iuf" and bool(np.isfinite(counts).all()) and not (counts < 0).any()
    if not good:
        raise ValueError(f"table {name!r}: counts must be finite numbers from 0 up")


def _windows(rates: Array, rows: Array) -> Array:
    """Returns steps for which rows may stay: from none to as many as it takes to use every row with accesses."""
    if not rates.any():
        return np.array([0.0, 1.0])
    first = 0.5 / float((rows @ rates).sum())
    return np.concatenate([[0.0], np.geomspace(first, 50 / rates[rates > 0].min(), WINDOWS)])


class _Piece(NamedTuple):
    """What one table gets on top of the piece before."""

    density: float
    """Hits per byte."""
    table: int
    slots: TableSlots
    """The table's slots with this piece."""


def solve(tables: Sequence[TableUse], budget_bytes: float) -> list[TableSlots]:
    """Returns slots for each table within `budget_bytes`: the greedy plan, or `budget.plan_slots` if that hits more.

    First every table gets the slots that batches in flight need, for as many batches as fit. Then bytes go in the order
    of what they hit, along the concave hull of each table's curve; so the plan lacks less than one piece of the best
    plan, and nothing if all slots cost the same. Raises ValueError as `plan_slots` does.
    """
    floors = flight_floors(tables, budget_bytes)
    found = _greedy(tables, floors, budget_bytes) if _fits(tables, floors, budget_bytes) else None
    try:
        equal = plan_slots([table.demand for table in tables], int(budget_bytes))
    except ValueError:
        if found is None:
            raise
        return found
    if found is None:
        return equal
    keeps = all(table.keeps(slots, floor) for table, slots, floor in zip(tables, equal, floors, strict=True))
    more = expected_hits(tables, equal) > expected_hits(tables, found) + MIN_HITS
    return equal if keeps and more else found


def plan_tables(tables: Sequence[TableUse], budget_bytes: float) -> list[TableSlots]:
    """Returns the slots of `solve`, or others if there is no room for all batches in flight and these hit more.

    Rows then lie beside the cache in any case. So slots for fewer batches, or equal shares, may hit more: the best of
    those is taken that put no more bytes beside the cache than the slots of `solve` or equal shares would.
    """
    found = solve(tables, budget_bytes)
    if _fits(tables, [table.floors[-1] for table in tables], budget_bytes):
        return found
    plans = [found]
    with suppress(ValueError):  # a table would have too few rows
        plans.append(plan_slots([table.demand for table in tables], int(budget_bytes)))
    most = max(_beside(tables, plan) for plan in plans)
    for batches in range(max(len(table.floors) for table in tables) - 1):
        floors = _floors_for(tables, batches)
        if _fits(tables, floors, budget_bytes):
            plans.append(_greedy(tables, floors, budget_bytes))
    least = _floors_for(tables, 0)
    fit = [
        plan
        for plan in plans
        if _beside(tables, plan) <= most
        and all(table.keeps(own, floor) for table, own, floor in zip(tables, plan, least, strict=True))
    ]
    return max(fit, key=lambda plan: expected_hits(tables, plan, in_flight=True), default=found)


def _beside(tables: Sequence[TableUse], slots: Sequence[TableSlots]) -> float:
    return sum(table.bytes_beside(own) for table, own in zip(tables, slots, strict=True))


def flight_floors(tables: Sequence[TableUse], budget_bytes: float) -> list[Array]:
    """Returns each table's floor for the most batches in flight that all tables have room for."""
    floors: list[Array] = []
    for batches in reversed(range(max((len(table.floors) for table in tables), default=1))):
        floors = _floors_for(tables, batches)
        if _fits(tables, floors, budget_bytes):
            break
    return floors


def _floors_for(tables: Sequence[TableUse], batches: int) -> list[Array]:
    return [table.floors[min(batches, len(table.floors) - 1)] for table in tables]


def _fits(tables: Sequence[TableUse], floors: Sequence[Array], budget_bytes: float) -> bool:
    return sum(table.least_bytes(floor) for table, floor in zip(tables, floors, strict=True)) <= budget_bytes


def _greedy(tables: Sequence[TableUse], floors: Sequence[Array], budget_bytes: float) -> list[TableSlots]:
    """Takes each table's first piece, then the others by hits per byte; of a piece that does not fit, a part."""
    pieces = [_pieces(t, *own) for t, own in enumerate(zip(tables, floors, strict=True))]
    found = [first.slots for first, *_ in pieces]
    left = budget_bytes - sum(num_bytes(table.demand, slots) for table, slots in zip(tables, found, strict=True))
    full: set[int] = set()
    for _, t, slots in sorted((piece for _, *more in pieces for piece in more), key=lambda piece: -piece.density):
        if t in full:
            continue
        table, most_bytes = tables[t], left + num_bytes(tables[t].demand, found[t])
        if num_bytes(table.demand, slots) > most_bytes:
            full.add(t)
            (slots,) = table.cut([most_bytes], floors[t])
        if table.hits(slots) > table.hits(found[t]):
            found[t], left = slots, most_bytes - num_bytes(table.demand, slots)
    return found


def _pieces(t: int, table: TableUse, floor: Array) -> list[_Piece]:
    """Returns the least that the table may have, then pieces of falling density."""
    slots = table.cut(_sizes(table, floor), floor)
    taken = np.array([num_bytes(table.demand, each) for each in slots])
    hull = _concave_hull(taken, np.array([table.hits(each) for each in slots]))
    found = [_Piece(math.inf, t, slots[hull[0][2]])]
    for (bytes_a, hits_a, _), (bytes_b, hits_b, k) in pairwise(hull):
        found.append(_Piece((hits_b - hits_a) / max(bytes_b - bytes_a, 1e-9), t, slots[k]))
    return found


def _sizes(table: TableUse, floor: Array) -> list[float]:
    """Returns sizes to look at, from the least to the whole table's."""
    least, per_slot = table.least_bytes(floor), table.demand.record_bytes + METADATA_BYTES
    span = math.ceil((table.whole_bytes - least) / per_slot)
    octaves = np.log2(max(span / EXACT_POINTS, 1.0))
    far = EXACT_POINTS * 2 ** np.linspace(0, octaves, 1 + int(np.ceil(octaves * POINTS_PER_OCTAVE)))
    steps = np.concatenate([np.arange(min(span, EXACT_POINTS) + 1), np.floor(far)])
    sizes = least + per_slot * np.unique(steps)
    return [*sizes[sizes < table.whole_bytes].tolist(), table.whole_bytes]


def _concave_hull(num_bytes: Array, hits: Array) -> list[tuple[float, float, int]]:
    """Returns (bytes, hits, index) of the points that no mix of others beats, rising in both."""
    hull: list[tuple[float, float, int]] = [(float(num_bytes[0]), float(hits[0]), 0)]
    for k in np.argsort(num_bytes, kind="stable").tolist():
        x, y = float(num_bytes[k]), float(hits[k])
        if y <= hull[-1][1] + MIN_HITS:
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


def expected_hits(tables: Sequence[TableUse], slots: Sequence[TableSlots], *, in_flight: bool = False) -> float:
    """Hits expected per step over all tables."""
    return float(sum(table.hits(s, in_flight=in_flight) for table, s in zip(tables, slots, strict=True)))


@dataclass(frozen=True)
class CountsPlan:
    """What `Memory(plan=...)` calls; made by `plan_by_counts`."""

    counts: Mapping[str, ArrayLike | Counted]
    num_steps: float
    depth: int
    least_cached: Mapping[str, int]
    _uses: dict[tuple[str, int], TableUse] = field(default_factory=dict, repr=False)
    _solved: dict[tuple[Any, ...], list[TableSlots]] = field(default_factory=dict, repr=False)

    def __call__(self, demands: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
        """Returns slots for each table, as found before. Raises ValueError if a table has no counts, and as `solve`."""
        key = (*demands, budget_bytes)
        if key not in self._solved:
            self._solved[key] = plan_tables(self.uses(demands), budget_bytes)
        return self._solved[key]

    def uses(self, demands: Sequence[TableDemand]) -> list[TableUse]:
        """Returns the tables with their accesses, which are read once."""
        for demand in demands:
            name, key = demand.name, (demand.name, demand.num_rows)
            if name not in self.counts:
                raise ValueError(
                    f"plan_by_counts has no counts for table {name!r}; it has {', '.join(self.counts) or 'none'}"
                )
            if key not in self._uses:
                least = self.least_cached.get(name, MIN_ROWS)
                self._uses[key] = TableUse(
                    demand, self.counts[name], num_steps=self.num_steps, depth=self.depth, least_cached=least
                )
        return [self._uses[demand.name, demand.num_rows].of(demand) for demand in demands]


def plan_by_counts(
    counts: Mapping[str, ArrayLike | Counted],
    *,
    num_steps: float,
    depth: int = LOOKAHEAD,
    least_cached: Mapping[str, int] | None = None,
) -> CountsPlan:
    """Returns a plan for `Memory(plan=...)` from accesses per row, such as those of a packed dataset.

    counts: by table, accesses of each row [num_embeddings]; pinned rows are a prefix, so rows should be numbered by
    popularity, as `hotrow prepare` does; they are read when tables are laid out, one table's after another's.
    num_steps: batches in which they were counted. depth: batches fetched ahead, whose rows need cached slots.
    least_cached: by table, rows cached at least (MIN_ROWS). Raises ValueError for no steps and a negative depth.
    """
    if not num_steps > 0:
        raise ValueError(
            f"num_steps is {num_steps}; it is the number of batches in which accesses were counted, above 0"
        )
    if depth < 0:
        raise ValueError(f"depth is {depth}; it is the number of batches looked ahead to, from 0 up")
    return CountsPlan(counts, num_steps, depth, least_cached or {})

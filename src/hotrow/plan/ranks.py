"""Which rank holds which table, if several processes train one model: the slowest rank is to be as fast as can be.

    replicated   every rank holds the table, and updates all rows of the step
    table        one rank, the owner, holds the table, and updates it for all
    row          rank r holds the rows whose number is r modulo the ranks

Plain numbers. `Way` says what a table costs under each of these, `solve_ranks` picks a way and an owner for every
table, so that no rank holds more than `capacity_bytes`. Ranks are alike, so a plan that names them has N! twins, and
no solver proves much about it. HiGHS solves the problem without names instead: how much work all owners have together
and which tables are split; that is a bound for every plan. Owners are then found by longest processing time first and
exchanges, and the gap between what was found and the bound is stated. Small problems are solved with names, exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import highspy
import numpy as np
from numpy.typing import NDArray

from hotrow.base.files import size
from hotrow.config.schema import Owner
from hotrow.plan.wire import Wire
from hotrow.tables import TableConfig

OWNERS: tuple[Owner, ...] = get_args(Owner)
_TABLE = OWNERS.index("table")
EXACT, MOST_NAMED, GOOD = 200, 4000, 0.005
"""Tables times ranks up to which the problem with names is solved too: always, and if the gap is more than GOOD."""
TIME_LIMIT_S = 10.0
AIM = 1e-4
"""A smaller gap is not worth a solver's time."""
_TOLERANCE = 4e-6
"""HiGHS keeps rows to a millionth of their scale; capacities are kept exactly, so they are checked again."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Way(NamedTuple):
    """What one table takes under one owner, per step."""

    every_s: float
    """Seconds on every rank."""
    owner_s: float = 0.0
    """Seconds on the owner beside them; 0 if there is no owner."""
    every_bytes: float = 0.0
    """Bytes on every rank."""
    owner_bytes: float = 0.0


@dataclass(frozen=True)
class RankTable:
    """One table's ways; a way that is absent is not allowed."""

    name: str
    ways: Mapping[Owner, Way]


class Owned(NamedTuple):
    """Who holds a table."""

    owner: Owner
    rank: int | None = None
    """The owner's rank; None unless `owner` is "table"."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Owners of all tables, and what is known of how good they are."""

    tables: tuple[Owned, ...]
    seconds: tuple[float, ...]
    """By rank, what its tables take per step."""
    num_bytes: tuple[float, ...]
    """By rank, what it holds."""
    bound_s: float
    """No plan's slowest rank takes less."""
    out_of_time: bool
    """Whether the solver stopped at its time limit: this is the best that was found."""
    solved_s: float

    @property
    def slowest_s(self) -> float:
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """The most by which the best plan could be faster, as a share of this one's slowest rank."""
        return max(0.0, 1.0 - self.bound_s / self.slowest_s) if self.slowest_s else 0.0


class TableLoad(NamedTuple):
    """What one table takes without an exchange, for the samples of all ranks or of one."""

    lookup_s: float
    update_s: float


def ways_of(
    table: TableConfig,
    record_bytes: int,
    *,
    of_all: TableLoad,
    of_one: TableLoad,
    wire: Wire,
    num_ranks: int,
    byte_s: float,
) -> RankTable:
    """Returns what a table takes under each owner, what the ranks send each other included.

    of_all, of_one: its load for the whole batch, and for the samples of one rank. byte_s: seconds of a byte that a rank
    sends. Every rank looks up its own samples; a row's home adds up its gradients and updates it.
    """
    num_bytes = table.num_embeddings * record_bytes
    split_s, copied_s = wire.split_bytes * byte_s, wire.replicated_bytes * byte_s / num_ranks
    owned_s = min(wire.split_bytes, wire.pooled_bytes) * byte_s
    other_s = owned_s / max(1, num_ranks - 1)
    each_bytes = math.ceil(table.num_embeddings / num_ranks) * record_bytes
    ways = {
        "replicated": Way(of_one.lookup_s + of_all.update_s + copied_s, every_bytes=num_bytes),
        "table": Way(of_one.lookup_s + other_s, of_all.update_s + owned_s - other_s, owner_bytes=num_bytes),
        "row": Way(of_one.lookup_s + (of_all.update_s + split_s) / num_ranks, every_bytes=each_bytes),
    }
    return RankTable(table.name, cast("dict[Owner, Way]", ways))


class _Problem:
    """The tables' ways as arrays: [tables, owners]."""

    def __init__(self, tables: Sequence[RankTable], num_ranks: int, capacity_bytes: float) -> None:
        self.tables, self.num_ranks, self.capacity = tables, num_ranks, float(capacity_bytes)
        absent = Way(math.inf)
        ways = np.array([[table.ways.get(owner, absent) for owner in OWNERS] for table in tables], np.float64)
        self.every_s, self.every_bytes = ways[..., 0], ways[..., 2]
        self.owner_s, self.owner_bytes = ways[:, _TABLE, 1], ways[:, _TABLE, 3]
        self.allowed = np.isfinite(self.every_s)

    def check(self) -> None:
        """Raises ValueError, with the shortfall, if no plan can fit."""
        share = self.every_bytes.copy()
        share[:, _TABLE] += self.owner_bytes / self.num_ranks
        least = float(np.where(self.allowed, share, math.inf).min(axis=1).sum())
        if least > self.capacity:
            ranks = math.ceil(least * self.num_ranks / self.capacity) if self.capacity > 0 else None
            more = f", or plan for about {ranks} ranks" if ranks else ""
            raise ValueError(
                f"the tables do not fit: spread evenly over {self.num_ranks} ranks they take {size(math.ceil(least))} "
                f"of each, and a rank has {size(int(self.capacity))}: {size(math.ceil(least - self.capacity))} are "
                f"missing on every rank; give each rank as much more{more}"
            )


class _Plan:
    """A plan under construction: the owner of every table, with the load of every rank."""

    def __init__(self, problem: _Problem, owner: Ints, rank: Ints) -> None:
        self.problem, self.owner, self.rank = problem, owner.copy(), rank.copy()
        self._count()

    def _count(self) -> None:
        p, at = self.problem, np.arange(len(self.owner))
        owned = self.owner == _TABLE
        sums = [
            float(every[at, self.owner].sum())
            + np.bincount(self.rank[owned], weights=own[owned], minlength=p.num_ranks).astype(np.float64)
            for every, own in ((p.every_s, p.owner_s), (p.every_bytes, p.owner_bytes))
        ]
        self.load, self.held = sums

    @property
    def slowest_s(self) -> float:
        return float(self.load.max())

    @property
    def fits(self) -> bool:
        return bool(self.held.max() <= self.problem.capacity)

    def put(self, table: int, owner: int, rank: int = -1) -> None:
        self.owner[table], self.rank[table] = owner, rank
        self._count()

    def improve(self, deadline: float, bound: float) -> None:
        """Lowers the slowest rank by moving, swapping and splitting its tables, as long as one of these helps."""
        while self.slowest_s > bound * (1 + AIM) and time.monotonic() < deadline:
            if not (self._move() or self._swap() or self._split()):
                return

    def _move(self) -> bool:
        p, slow = self.problem, int(self.load.argmax())
        own = np.flatnonzero((self.owner == _TABLE) & (self.rank == slow))
        after = np.maximum(self.load[None] + p.owner_s[own, None], self.load[slow] - p.owner_s[own, None])
        after[:, slow] = math.inf
        after[self.held[None] + p.owner_bytes[own, None] > p.capacity] = math.inf
        return self._take(after, lambda k, r: self.put(int(own[k]), _TABLE, int(r)))

    def _swap(self) -> bool:
        p, slow = self.problem, int(self.load.argmax())
        owned = self.owner == _TABLE
        own, other = np.flatnonzero(owned & (self.rank == slow)), np.flatnonzero(owned & (self.rank != slow))
        rank = self.rank[other]
        less = p.owner_s[own, None] - p.owner_s[None, other]
        more_bytes = p.owner_bytes[own, None] - p.owner_bytes[None, other]
        after = np.maximum(self.load[slow] - less, self.load[None, rank] + less)
        after[less <= 0] = math.inf
        full = (self.held[None, rank] + more_bytes > p.capacity) | (self.held[slow] - more_bytes > p.capacity)
        after[full] = math.inf

        def swap(k: int, m: int) -> None:
            self.rank[own[k]], self.rank[other[m]] = rank[m], slow
            self._count()

        return self._take(after, swap)

    def _split(self) -> bool:
        """Takes a table of the slowest rank from it, or gives a table that every rank shares to the quickest."""
        p, slow, quick = self.problem, int(self.load.argmax()), int(self.load.argmin())
        owned = (self.owner == _TABLE) & (self.rank == slow)
        at = np.arange(len(self.owner))
        base, held = (
            p.every_s - p.every_s[at, self.owner][:, None],
            p.every_bytes - p.every_bytes[at, self.owner][:, None],
        )
        rest = float(np.delete(self.load, slow).max(initial=0.0))
        after = np.full(base.shape, math.inf)
        room = np.full(base.shape, math.inf)
        others = [k for k in range(len(OWNERS)) if k != _TABLE]
        for k in others:
            after[owned, k] = np.maximum(rest, self.load[slow] - p.owner_s[owned]) + base[owned, k]
            room[owned, k] = self.held.max() + held[owned, k]  # at most: the slowest rank loses the table's bytes
        shared = self.owner != _TABLE
        after[shared, _TABLE] = base[shared, _TABLE] + np.maximum(self.slowest_s, self.load[quick] + p.owner_s[shared])
        room[shared, _TABLE] = held[shared, _TABLE] + np.maximum(
            self.held.max(), self.held[quick] + p.owner_bytes[shared]
        )
        for k in others:
            after[shared, k] = self.slowest_s + base[shared, k]
            room[shared, k] = self.held.max() + held[shared, k]
        after[~p.allowed | (room > p.capacity)] = math.inf
        return self._take(after, lambda t, k: self.put(int(t), int(k), quick if k == _TABLE else -1))

    def _take(self, after: Floats, change: Callable[[int, int], None]) -> bool:
        """Makes the change after which the ranks concerned take the least, if that is less than the slowest takes."""
        if not after.size:
            return False
        k, m = np.unravel_index(int(after.argmin()), after.shape)
        if after[k, m] >= self.slowest_s * (1 - 1e-9):
            return False
        change(int(k), int(m))
        return True


def solve_ranks(
    tables: Sequence[RankTable], num_ranks: int, capacity_bytes: float, *, time_limit_s: float = TIME_LIMIT_S
) -> RankPlan:
    """Returns the plan with the fastest slowest rank that was found, never slower than any of `GREEDY`.

    Raises ValueError if the tables do not fit, by how much, and if no plan was found that does.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    problem = _Problem(tables, num_ranks, capacity_bytes)
    problem.check()
    split, bound, early = _without_names(problem, 0.5 * time_limit_s)
    plans = [plan for rule in _RULES.values() if (plan := rule(problem)) is not None]
    plans += [plan for weight in (0.0, 0.5, 1.0) if (plan := _packed(problem, split, weight)) is not None]
    for plan in plans:
        plan.improve(start + 0.7 * time_limit_s, bound)
    best = min(plans, key=lambda plan: plan.slowest_s, default=None)
    left = AIM if len(tables) * num_ranks <= EXACT else GOOD
    if len(tables) * num_ranks <= MOST_NAMED and (best is None or best.slowest_s > bound * (1 + left)):
        named, proven, early = _with_names(problem, best, deadline - time.monotonic())
        best, bound = named or best, max(bound, proven)
    if best is None:
        raise ValueError(
            f"no plan was found in {time_limit_s:g} s that fits {num_ranks} ranks of {size(int(capacity_bytes))}, and "
            "none was ruled out: give the ranks a little more memory, or the solver more time"
        )
    owned = tuple(
        Owned(OWNERS[owner], int(rank) if owner == _TABLE else None)
        for owner, rank in zip(best.owner.tolist(), best.rank.tolist(), strict=True)
    )
    return RankPlan(
        tables=owned,
        seconds=tuple(best.load.tolist()),
        num_bytes=tuple(best.held.tolist()),
        bound_s=min(bound, best.slowest_s),
        out_of_time=early and best.slowest_s > bound * (1 + AIM),
        solved_s=time.monotonic() - start,
    )


def slowest_s(tables: Sequence[RankTable], owned: Sequence[Owned], num_ranks: int) -> float:
    """Returns what the tables of the slowest rank take under these owners."""
    seconds = [0.0] * num_ranks
    for table, (owner, rank) in zip(tables, owned, strict=True):
        way = table.ways[owner]
        seconds = [each + way.every_s + way.owner_s * (rank == r) for r, each in enumerate(seconds)]
    return max(seconds)


def greedy(tables: Sequence[RankTable], num_ranks: int, capacity_bytes: float, rule: str) -> float | None:
    """Returns the slowest rank's seconds under a plan without a solver; None if it does not fit.

    rule: "equal" deals the tables out, "by_size" gives the largest to the rank that holds least, "by_work" the one
    with most work to the rank that has least (longest processing time first), "rows" splits every table. A table that
    fits on no rank is split.
    """
    plan = _RULES[rule](_Problem(tables, num_ranks, capacity_bytes))
    return None if plan is None else plan.slowest_s


def _rows(problem: _Problem) -> _Plan | None:
    owner = np.where(problem.allowed[:, 2], 2, problem.allowed.argmax(axis=1))
    owned = owner == _TABLE
    rank = np.where(owned, np.cumsum(owned) % problem.num_ranks, -1)
    plan = _Plan(problem, owner.astype(np.int64), rank.astype(np.int64))
    return plan if plan.fits else None


def _dealt(order: Callable[[_Problem], Any], choose: Callable[[int, Floats, Floats], Floats]) -> Any:
    """Returns a rule that gives tables, in an order, to the rank for which `choose(turn, load, held)` is least."""

    def rule(problem: _Problem) -> _Plan | None:
        load, held = np.zeros(problem.num_ranks), np.zeros(problem.num_ranks)
        owner, rank = np.full(len(problem.tables), 2), np.full(len(problem.tables), -1)
        spread = 0.0
        for turn, t in enumerate(order(problem)):
            rest = spread + problem.every_bytes[t, _TABLE]
            fits = held + rest + problem.owner_bytes[t] <= problem.capacity
            if problem.allowed[t, _TABLE] and fits.any():
                r = int(np.where(fits, choose(turn, load, held), math.inf).argmin())
                owner[t], rank[t] = _TABLE, r
                load[r], held[r] = load[r] + problem.owner_s[t], held[r] + problem.owner_bytes[t]
                spread += problem.every_bytes[t, _TABLE]
            else:
                owner[t] = 2 if problem.allowed[t, 2] else int(problem.allowed[t].argmax())
                rank[t] = 0 if owner[t] == _TABLE else -1
                spread += problem.every_bytes[t, owner[t]]
        plan = _Plan(problem, owner, rank)
        return plan if plan.fits else None

    return rule


_RULES: dict[str, Callable[[_Problem], _Plan | None]] = {
    "equal": _dealt(
        lambda p: range(len(p.tables)), lambda turn, load, held: (np.arange(len(load)) - turn).astype(float) % len(load)
    ),
    "by_size": _dealt(lambda p: np.argsort(-p.owner_bytes, kind="stable"), lambda turn, load, held: held),
    "by_work": _dealt(lambda p: np.argsort(-p.owner_s, kind="stable"), lambda turn, load, held: load),
    "rows": _rows,
}
GREEDY = tuple(_RULES)
"""Plans without a solver, to compare with: see `greedy`."""


def _packed(problem: _Problem, split: Ints, weight: float) -> _Plan | None:
    """Returns a plan with the owners of `split`: tables with an owner go to ranks, largest first.

    weight: how much bytes count beside work, from 0 to 1, both as shares of all. A table for which no rank has room is
    split; None if that does not fit either.
    """
    p, owner = problem, split.copy()
    rank = np.full(len(owner), -1)
    owned = np.flatnonzero(owner == _TABLE)
    work = p.owner_s / (float(p.owner_s[owned].sum()) or 1.0)
    taken = p.owner_bytes / (float(p.owner_bytes[owned].sum()) or 1.0)
    at = np.arange(len(owner))
    spread = float(p.every_bytes[at, owner].sum())
    load, share, held = np.zeros(p.num_ranks), np.zeros(p.num_ranks), np.zeros(p.num_ranks)
    for t in owned[np.argsort(-np.maximum((1 - weight) * work[owned], weight * taken[owned]), kind="stable")]:
        fits = held + p.owner_bytes[t] + spread <= p.capacity
        if fits.any():
            r = int(np.where(fits, (1 - weight) * load + weight * share, math.inf).argmin())
            rank[t], load[r], share[r], held[r] = r, load[r] + work[t], share[r] + taken[t], held[r] + p.owner_bytes[t]
        else:
            allowed = [k for k in range(len(OWNERS)) if k != _TABLE and p.allowed[t, k]]
            if not allowed:
                return None
            owner[t] = min(allowed, key=lambda k: p.every_bytes[t, k])
            spread += float(p.every_bytes[t, owner[t]] - p.every_bytes[t, _TABLE])
    plan = _Plan(p, owner, rank)
    return plan if plan.fits else None


# ---- HiGHS


def _without_names(problem: _Problem, time_limit_s: float) -> tuple[Ints, float, bool]:
    """Returns each table's owner in the best plan whose ranks have no names, a bound of every plan, and whether time
    ended first.

    The slowest rank takes at least what ranks take on average, and what the rank of each single table takes. It is the
    same for bytes.
    """
    p, num = problem, len(problem.tables)
    program = _Program(problem, np.arange(3 * num).reshape(num, 3))
    own, one = program.columns[:, [_TABLE]], np.ones(1)
    program.limit(own.ravel(), p.owner_s / p.num_ranks, p.owner_bytes / p.num_ranks)
    for t in np.flatnonzero(p.allowed[:, _TABLE]).tolist():
        program.limit(own[t], one * p.owner_s[t], one * p.owner_bytes[t])
    program.upper[: 3 * num] = p.allowed.ravel()
    program.share(p.every_s, p.every_bytes)
    found, bound, early = program.solve(time_limit_s, gap=AIM / 2)
    if found is None:  # out of time before the first solution
        return np.where(p.allowed[:, 2], 2, p.allowed.argmax(axis=1)), 0.0, True
    return found.argmax(axis=1), bound, early


def _with_names(problem: _Problem, start: _Plan | None, time_limit_s: float) -> tuple[_Plan | None, float, bool]:
    """Returns a better plan than `start` if there is one, a bound of every plan, and whether time ended first."""
    p, num, ranks = problem, len(problem.tables), problem.num_ranks
    deadline, bound = time.monotonic() + max(time_limit_s, 0.1), 0.0
    for room in (1.0, 1.0 - _TOLERANCE):  # less room only if the first plan made use of the solver's tolerance
        program = _Program(problem, np.arange(num * (ranks + 2)).reshape(num, ranks + 2), room=room)
        upper = program.upper[: num * (ranks + 2)].reshape(num, ranks + 2)
        upper[:, :ranks], upper[:, ranks:] = p.allowed[:, [_TABLE]], p.allowed[:, [0, 2]]
        for turn, t in enumerate(np.argsort(-p.owner_s, kind="stable").tolist()):
            upper[t, turn + 1 : ranks] = 0.0  # ranks are alike: the first table lies on rank 0, the next on 0 or 1
        every = [np.hstack([np.repeat(e[:, [_TABLE]], ranks, 1), e[:, [0, 2]]]) for e in (p.every_s, p.every_bytes)]
        program.share(*every)
        for r in range(ranks):
            program.limit(program.columns[:, r], p.owner_s, p.owner_bytes)
        found, least, early = program.solve(deadline - time.monotonic(), gap=0.0)
        bound = least if room == 1.0 else bound
        if found is None:
            return None, bound, early
        pick = found.argmax(axis=1)
        owner = np.where(pick < ranks, _TABLE, np.where(pick == ranks, 0, 2))
        plan = _Plan(p, owner, np.where(pick < ranks, pick, -1))
        if plan.fits:
            break
    return (plan if plan.fits and (start is None or plan.slowest_s < start.slowest_s) else None), bound, early


class _Program:
    """The mixed integer program that HiGHS minimises: pick one of a table's columns, for the fastest slowest rank.

    columns: [tables, choices], numbers of 0-or-1 columns. Three more follow: the seconds and the bytes that every rank
    has, and the seconds of the slowest. room: the share of the capacity that may be used. Seconds and bytes are scaled
    to about 1, since HiGHS keeps to a millionth.
    """

    def __init__(self, problem: _Problem, columns: NDArray[np.int64], *, room: float = 1.0) -> None:
        self.columns, self._capacity, self._room = columns, problem.capacity, room
        every_s = np.where(problem.allowed, problem.every_s, 0.0)
        self._unit_s = float(every_s.max(axis=1).sum() + problem.owner_s.sum()) / problem.num_ranks or 1.0
        self._shared_s, self._shared_bytes, self._slowest = (columns.size + k for k in range(3))
        self.upper = np.full(columns.size + 3, highspy.kHighsInf)
        self._rows: list[tuple[Any, Any, float, float]] = []
        for own in columns:
            self._rows.append((own, np.ones(len(own)), 1.0, 1.0))

    def share(self, every_s: Floats, every_bytes: Floats) -> None:
        """States what every rank has: [tables, choices]."""
        for column, every, unit in (
            (self._shared_s, every_s, self._unit_s),
            (self._shared_bytes, every_bytes, self._capacity),
        ):
            values = np.where(np.isfinite(every), every, 0.0).ravel() / unit
            self._rows.append(([*self.columns.ravel(), column], [*values, -1.0], 0.0, 0.0))

    def limit(self, columns: Any, seconds: Floats, num_bytes: Floats) -> None:
        """States that a rank with these columns beside what every rank has is no slower than the slowest, and fits."""
        ends = [self._shared_s, self._slowest]
        self._rows.append(([*columns, *ends], [*(seconds / self._unit_s), 1.0, -1.0], -highspy.kHighsInf, 0.0))
        values = [*(num_bytes / self._capacity), 1.0]
        self._rows.append(([*columns, self._shared_bytes], values, -highspy.kHighsInf, self._room))

    def solve(self, time_limit_s: float, *, gap: float) -> tuple[Floats | None, float, bool]:
        """Returns the best choices found [tables, choices], None if there are none; a bound; and whether time ended."""
        program, num = highspy.HighsLp(), len(self.upper)
        program.num_col_, program.num_row_ = num, len(self._rows)
        cost = np.zeros(num)
        cost[self._slowest] = 1.0
        program.col_cost_, program.col_lower_, program.col_upper_ = cost, np.zeros(num), self.upper
        program.row_lower_ = np.array([least for _, _, least, _ in self._rows])
        program.row_upper_ = np.array([most for _, _, _, most in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(columns) for columns, _, _, _ in self._rows)])
        matrix.index_ = np.concatenate([np.asarray(columns, np.int32) for columns, _, _, _ in self._rows])
        matrix.value_ = np.concatenate([np.asarray(values, np.float64) for _, values, _, _ in self._rows])
        whole = [highspy.HighsVarType.kInteger] * self.columns.size
        program.integrality_ = [*whole, *[highspy.HighsVarType.kContinuous] * 3]
        solver = highspy._core._Highs()  # public `Highs` prints a banner when made; so pyproject.toml pins
        options = {"output_flag": False, "time_limit": max(time_limit_s, 0.05), "mip_rel_gap": gap, "threads": 1}
        for name, value in {**options, "random_seed": 0}.items():
            solver.setOptionValue(name, value)
        solver.passModel(program)
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        early = status == highspy.HighsModelStatus.kTimeLimit
        bound = max(0.0, float(info.mip_dual_bound)) * self._unit_s
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, bound if math.isfinite(bound) else 0.0, early
        values = np.array(solver.getSolution().col_value[: self.columns.size])
        return values.reshape(self.columns.shape), bound, early

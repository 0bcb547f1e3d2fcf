"""Plans for several ranks: against every assignment of small cases, against greedy plans, and by their own bounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hotrow.plan.ranks import (
    GREEDY,
    OWNERS,
    Owned,
    RankTable,
    TableLoad,
    Way,
    _Program,
    greedy,
    slowest_s,
    solve_ranks,
    ways_of,
)
from hotrow.plan.wire import Wire
from hotrow.tables import TableConfig


def draw(rng: np.random.Generator, num: int, ranks: int) -> list[RankTable]:
    tables = []
    for t in range(num):
        num_bytes, work = float(rng.integers(1, 1000)), float(rng.lognormal(-8, 1.0))
        exchange = work * rng.random()
        ways = {
            "replicated": Way(work * (0.4 + 0.6 / ranks) + num_bytes / 1e6, every_bytes=num_bytes),
            "table": Way(exchange / ranks, work + exchange, owner_bytes=num_bytes),
            "row": Way(work / ranks + 1.5 * exchange / ranks + 2e-5, every_bytes=math.ceil(num_bytes / ranks)),
        }
        tables.append(RankTable(f"t{t}", ways))
    return tables


def loads(
    tables: list[RankTable], owned: tuple[Owned, ...] | list[Owned], ranks: int
) -> tuple[list[float], list[float]]:
    """Seconds and bytes of every rank, added up table by table."""
    seconds, held = [0.0] * ranks, [0.0] * ranks
    for table, (owner, rank) in zip(tables, owned, strict=True):
        way = table.ways[owner]
        for r in range(ranks):
            seconds[r] += way.every_s + way.owner_s * (rank == r)
            held[r] += way.every_bytes + way.owner_bytes * (rank == r)
    return seconds, held


def brute_force(tables: list[RankTable], ranks: int, capacity: float) -> float:
    choices = [Owned("replicated"), Owned("row"), *(Owned("table", r) for r in range(ranks))]
    best = math.inf
    for owned in itertools.product(choices, repeat=len(tables)):
        seconds, held = loads(tables, owned, ranks)
        if max(held) <= capacity:
            best = min(best, max(seconds))
    return best


@pytest.mark.parametrize("seed", range(24))
def test_against_every_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 4))
    tables = draw(rng, int(rng.integers(1, 6)), ranks)
    total = sum(table.ways["table"].owner_bytes for table in tables)
    capacity = math.ceil(total / ranks * rng.choice([1.05, 1.5, 4.0])) + len(tables)
    best = brute_force(tables, ranks, capacity)
    if math.isinf(best):
        with pytest.raises(ValueError, match=r"do not fit|no plan was found"):
            solve_ranks(tables, ranks, capacity)
        return
    plan = solve_ranks(tables, ranks, capacity)
    seconds, held = loads(tables, plan.tables, ranks)
    assert plan.seconds == pytest.approx(seconds) and plan.num_bytes == pytest.approx(held)
    assert max(held) <= capacity
    assert plan.slowest_s == pytest.approx(best, rel=1e-5)
    assert plan.bound_s <= best * (1 + 1e-5) and plan.gap < 1e-4 and not plan.out_of_time


@pytest.mark.parametrize(("num", "ranks"), [(30, 4), (120, 16)])
@pytest.mark.parametrize("room", [1.02, 1.3, 10.0])
def test_never_slower_than_greedy_nor_quicker_than_the_bound(num: int, ranks: int, room: float) -> None:
    tables = draw(np.random.default_rng(num), num, ranks)
    capacity = room * sum(table.ways["table"].owner_bytes for table in tables) / ranks + num
    plan = solve_ranks(tables, ranks, capacity, time_limit_s=1)
    seconds, held = loads(tables, plan.tables, ranks)
    assert max(held) <= capacity
    for rule in GREEDY:
        other = greedy(tables, ranks, capacity, rule)
        assert other is None or plan.slowest_s <= other * (1 + 1e-9)
    assert plan.bound_s <= max(seconds) * (1 + 1e-9)
    assert plan.gap <= 0.01


def test_a_thousand_tables_on_64_ranks() -> None:
    tables = draw(np.random.default_rng(0), 1000, 64)
    total = sum(table.ways["table"].owner_bytes for table in tables)
    plan = solve_ranks(tables, 64, 1.5 * total / 64)
    assert plan.gap <= 0.01
    assert max(plan.num_bytes) <= 1.5 * total / 64
    assert {owner for owner, _ in plan.tables} >= {"table", "row"}


def test_a_solver_out_of_time_leaves_the_best_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gap stated: nothing is proven if HiGHS had no time for a bound."""
    tables = draw(np.random.default_rng(3), 60, 7)
    capacity = 1.1 * sum(table.ways["table"].owner_bytes for table in tables) / 7 + 60
    monkeypatch.setattr(_Program, "solve", lambda self, time_limit_s, *, gap: (None, 0.0, True))
    plan = solve_ranks(tables, 7, capacity)
    seconds, held = loads(tables, plan.tables, 7)
    assert max(held) <= capacity and plan.slowest_s == pytest.approx(max(seconds))
    assert plan.out_of_time and plan.gap == 1.0
    assert plan.slowest_s <= min(each for rule in GREEDY if (each := greedy(tables, 7, capacity, rule)) is not None)


def test_what_does_not_fit_says_by_how_much() -> None:
    tables = [RankTable("t", {"row": Way(1.0, every_bytes=500 << 20), "table": Way(0, 2.0, 0, 1000 << 20)})]
    message = r"over 2 ranks they take 500\.0 MiB of each, and a rank has 400\.0 MiB: 100\.0 MiB are missing .* 3 ranks"
    with pytest.raises(ValueError, match=message):
        solve_ranks(tables, 2, 400 << 20)


def test_what_ranks_exchange() -> None:
    """The seconds of a step counted by hand, on a link of a byte per second."""
    table = TableConfig(name="t", num_embeddings=1000, embedding_dim=2, feature_names=("a",))
    wire = Wire(split_bytes=1200.0, replicated_bytes=4000.0, rows=100.0, pooled_bytes=5000.0, lookups=100.0)
    load = {"of_all": TableLoad(3.0, 4.0), "of_one": TableLoad(1.0, 1.5)}
    made = ways_of(table, 12, **load, wire=wire, num_ranks=4, byte_s=1.0)
    assert set(made.ways) == set(OWNERS)
    # Every rank looks up its own samples. The owner sends and takes all that the three others need.
    assert made.ways["table"] == pytest.approx((1.0 + 1200 / 3, 4.0 + 1200 - 1200 / 3, 0, 12_000))
    assert made.ways["row"] == pytest.approx((1.0 + (4.0 + 1200) / 4, 0, 250 * 12, 0))
    assert made.ways["replicated"] == pytest.approx((1.0 + 4.0 + 4000 / 4, 0, 12_000, 0))
    tables = [made, RankTable("u", {"row": Way(10.0)})]
    assert slowest_s(tables, [Owned("table", 2), Owned("row")], 4) == pytest.approx(10 + 1.0 + 4.0 + 1200)

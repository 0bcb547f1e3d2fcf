"""Plans from access counts: against brute force, against equal shares, and against a cache that is simulated."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import hotrow
from hotrow.data.reuse import MissRatioCurve
from hotrow.memory.budget import TableDemand, TableSlots, num_bytes, plan_slots
from hotrow.plan.solve import CountsPlan, TableUse, expected_hit_rate, expected_hits, plan_by_counts, solve


def draw_uses(rng: np.random.Generator, *, most_rows: int, record_bytes: int | None = None) -> list[TableUse]:
    uses = []
    for t in range(int(rng.integers(1, 4))):
        num_rows = int(rng.integers(1, most_rows))
        counts = np.sort(rng.zipf(1.2, num_rows).clip(max=10**6) * (rng.random(num_rows) < 0.8))[::-1]
        size = record_bytes or int(rng.choice([16, 64, 260]))
        uses.append(
            TableUse(TableDemand(f"t{t}", num_rows, size), counts, num_steps=float(rng.choice([1e1, 1e3, 1e6])))
        )
    return uses


def cost(uses: list[TableUse], slots: list[TableSlots]) -> float:
    return sum(num_bytes(use.demand, each) for use, each in zip(uses, slots, strict=True))


def brute_force(uses: list[TableUse], budget: float, least_cached: int) -> float:
    """Most hits of any plan that cuts each table's slots as ours are cut."""
    best = -1.0
    ranges = [range(min(least_cached, use.demand.num_rows), use.demand.num_rows + 1) for use in uses]
    hits = [
        use.hits([use.slots(n, least_cached=least_cached) for n in ns]) for use, ns in zip(uses, ranges, strict=True)
    ]
    for numbers in itertools.product(*ranges):
        slots = [use.slots(n, least_cached=least_cached) for use, n in zip(uses, numbers, strict=True)]
        if cost(uses, slots) <= budget:
            best = max(best, sum(float(h[n - r.start]) for h, n, r in zip(hits, numbers, ranges, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_against_brute_force(seed: int) -> None:
    """Slots that all cost the same: not one hit less than the best of all plans. Else less than a piece."""
    rng = np.random.default_rng(seed)
    same = seed % 2 == 0
    uses = draw_uses(rng, most_rows=12, record_bytes=10**6 if same else None)  # beside it 32 bytes are nothing
    least = int(rng.integers(0, 3))
    whole = sum(use.demand.num_rows * use.demand.record_bytes for use in uses)
    budget = whole * rng.random() * 1.1 + 2000 * same
    try:
        plan_slots([use.demand for use in uses], int(budget))
    except ValueError:
        budget = whole * 1.1 + 2000
    found = solve(uses, budget, least_cached=least)
    best = brute_force(uses, budget, least)
    assert cost(uses, found) <= budget
    if same:
        assert expected_hits(uses, found) >= best - 1e-9
    else:
        pieces = max(use.demand.num_rows * (use.demand.record_bytes + 32) for use in uses)
        assert expected_hits(uses, solve(uses, budget + pieces, least_cached=least)) >= best - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_within_the_budget_and_never_worse_than_equal_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uses = draw_uses(rng, most_rows=20000)
    demands = [use.demand for use in uses]
    budget = int(sum(d.num_rows * d.record_bytes for d in demands) * rng.random() * 1.1) + 1
    try:
        equal = plan_slots(demands, budget)
    except ValueError as error:
        with pytest.raises(ValueError, match="too small"):
            solve(uses, budget)
        assert "raise Memory(dram=...)" in str(error)
        return
    found = solve(uses, budget)
    assert cost(uses, found) <= budget
    assert expected_hits(uses, found) >= expected_hits(uses, equal)
    for use, (pinned, cached) in zip(uses, found, strict=True):
        assert min(pinned, cached) >= 0 and pinned + cached <= use.demand.num_rows
        assert pinned == use.demand.num_rows or cached >= min(100, use.demand.num_rows - pinned)


def zipf_counts(num_rows: int, exponent: float, total: float) -> np.ndarray:
    weights = np.arange(1, num_rows + 1) ** -exponent
    return weights / weights.sum() * total


@pytest.mark.parametrize(("pinned", "cached"), [(0, 150), (0, 400), (11, 150), (5, 600), (11, 0), (2000, 0)])
def test_expected_hits_against_a_simulated_cache(pinned: int, cached: int) -> None:
    lookups, num_rows = 64, 2000
    counts = zipf_counts(num_rows, 1.05, lookups)
    use = TableUse(TableDemand("t", num_rows, 64), counts, num_steps=1)
    rng, cache, hits, rows = np.random.default_rng(0), OrderedDict[int, None](), 0, 0
    for step in range(1500):
        batch = np.flatnonzero(np.bincount(rng.choice(num_rows, rng.poisson(lookups), p=counts / lookups)))
        if step >= 500:
            hits, rows = hits + sum(row < pinned or row in cache for row in batch.tolist()), rows + len(batch)
        for row in batch[batch >= pinned].tolist():
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > cached:
            cache.popitem(last=False)
    assert expected_hits([use], [TableSlots(pinned, cached)]) / use.rows_per_step == pytest.approx(
        hits / rows, abs=0.02
    )


def test_a_table_of_which_all_rows_cost_no_more_than_a_hundred_lies_in_memory_whole() -> None:
    use = TableUse(TableDemand("t", 105, 260), np.arange(105, 0, -1), num_steps=10)
    assert solve([use], 40_000) == [TableSlots(105, 0)]


def test_hot_rows_are_pinned_and_skew_decides() -> None:
    """A table of which few rows are hot needs few slots; one that is even takes the rest."""
    counts = {"skewed": np.r_[np.full(300, 1000.0), np.full(99700, 0.01)], "even": np.full(100000, 1.0)}
    demands = [TableDemand(name, 100000, 64) for name in counts]
    skewed, even = plan_by_counts(counts, num_steps=1000)(demands, 4 << 20)
    assert 200 <= skewed.pinned <= 300 and even.pinned == 0
    assert even.cached > 10 * sum(skewed)


def test_a_measured_curve_comes_before_independence() -> None:
    """Of two tables with the same counts, the one whose rows come again soon needs few slots."""
    counts = {"bursts": np.full(50000, 10), "none": np.full(50000, 10)}
    curve = MissRatioCurve(np.array([0, 200, 50000]), np.array([1.0, 0.02, 0.01]))
    demands = [TableDemand(name, 50000, 64) for name in counts]
    bursts, none = plan_by_counts(counts, num_steps=1000, curves={"bursts": curve})(demands, 2 << 20)
    assert 200 <= sum(bursts) < 1000 < sum(none)


def test_a_large_table_is_quick() -> None:
    """Rates that are all different are put together."""
    use = TableUse(TableDemand("t", 300_000, 64), zipf_counts(300_000, 1.05, 2048.0), num_steps=1)
    (slots,) = solve([use], 3_000_000)
    assert slots.pinned == use.num_hot > 100 and slots.cached > 10_000
    assert 0.5 < expected_hit_rate([use], [slots]) < 1


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones(9), r"counts are \(9,\), the table has 10 rows"),
        (np.full(10, -1), "finite numbers from 0 up"),
        (np.full(10, np.nan), "finite numbers from 0 up"),
        (np.array(["a"] * 10), "finite numbers from 0 up"),
    ],
)
def test_counts_that_are_refused(counts: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"table 't': counts.*{message}|{message}"):
        plan_by_counts({"t": counts}, num_steps=10)([TableDemand("t", 10, 64)], 10**6)


def test_what_else_is_refused() -> None:
    with pytest.raises(ValueError, match="no counts for table 'u'; it has t"):
        plan_by_counts({"t": np.ones(10)}, num_steps=10)([TableDemand("u", 10, 64)], 10**6)
    with pytest.raises(ValueError, match="num_steps is 0"):
        plan_by_counts({}, num_steps=0)


def test_no_accesses_at_all() -> None:
    use = TableUse(TableDemand("t", 1000, 64), np.zeros(1000), num_steps=10)
    assert expected_hit_rate([use], solve([use], 40_000)) == 1.0


# ---- in a collection


def collection(folder: Path, plan: object) -> hotrow.EmbeddingCollection:
    tables = [
        hotrow.TableConfig(name=name, num_embeddings=5000, embedding_dim=8, feature_names=(name,))
        for name in ("a", "b")
    ]
    return hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram=202_000, file=folder, plan=plan))  # type: ignore[arg-type]


def test_a_collection_follows_its_plan(tmp_path: Path) -> None:
    counts = {"a": np.r_[np.full(300, 900), np.zeros(4700)], "b": np.r_[np.full(10, 900), np.ones(4990)]}
    plan = plan_by_counts(counts, num_steps=1000)
    emb = collection(tmp_path, plan)
    optimizer = hotrow.SGD(emb, lr=0.1)
    assert emb.tiers is not None
    a, b = emb.tiers.slots
    assert 200 <= a.pinned <= 300 and b.pinned == 5000
    assert isinstance(plan, CountsPlan)
    plain = hotrow.EmbeddingCollection(emb.tables)
    other = hotrow.SGD(plain, lr=0.1)
    for step in range(5):
        ids = torch.randint(0, 5000, (64, 2), generator=torch.Generator().manual_seed(step))
        for side, opt in ((emb, optimizer), (plain, other)):
            out = side(ids)
            out.backward(torch.ones_like(out))
            opt.step()
    for name in ("a", "b"):
        assert torch.equal(emb.float32(name), plain.weights[name])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([(0, 100)], "slots for 1 tables; there are 2"),
        ([(0, 100), (10, 5000)], "pins 10 rows of table 'b' and caches 5,000"),
        ([(0, 100), (-1, 100)], "pins -1 rows of table 'b'"),
        ([(0, 100), (5000, 0)], r"plan takes [\d,]+ bytes; there are 176,750"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, slots: list[tuple[int, int]], message: str) -> None:
    emb = collection(tmp_path, lambda demands, budget_bytes: [TableSlots(*each) for each in slots])
    with pytest.raises(ValueError, match=message):
        hotrow.Adagrad(emb, lr=0.1)

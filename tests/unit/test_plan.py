"""Plans from access counts: against brute force, against equal shares, and against a cache that is simulated."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import hotrow
from hotrow.placement.budget import METADATA_BYTES, MIN_ROWS, TableDemand, TableSlots, num_bytes, plan_slots
from hotrow.setup.divide import CountsPlan, TableUse, _sizes, expected_hits, flight_floors, plan_by_counts, solve
from loops import looped


def draw_uses(
    rng: np.random.Generator, *, most_rows: int, record_bytes: int | None = None, least_cached: int = MIN_ROWS
) -> list[TableUse]:
    uses = []
    for t in range(int(rng.integers(1, 4))):
        num_rows = int(rng.integers(1, most_rows))
        counts = np.sort(rng.zipf(1.2, num_rows).clip(max=10**6) * (rng.random(num_rows) < 0.8))[::-1]
        size = record_bytes or int(rng.choice([16, 64, 260]))
        steps = float(rng.choice([1e1, 1e3, 1e6]))
        demand = TableDemand(f"t{t}", num_rows, size)
        uses.append(TableUse(demand, counts, num_steps=steps, depth=int(rng.integers(3)), least_cached=least_cached))
    return uses


def cost(uses: list[TableUse], slots: list[TableSlots]) -> float:
    return sum(num_bytes(use.demand, each) for use, each in zip(uses, slots, strict=True))


def brute_force(uses: list[TableUse], budget: float) -> float:
    """Most hits of any plan that caches the rows of as many batches in flight as one can."""
    for batches in (4, 3, 2, 1, 0):
        floors = [use.floors[min(batches, len(use.floors) - 1)] for use in uses]
        best = -1.0
        choices = []
        for use, floor in zip(uses, floors, strict=True):
            every = [
                TableSlots(p, c) for p in range(use.demand.num_rows + 1) for c in range(use.demand.num_rows + 1 - p)
            ]
            kept = [s for s in every if use.keeps(s, floor)]
            choices.append([(num_bytes(use.demand, s), use.hits(s)) for s in kept])
        fronts = [pareto(each) for each in choices]
        for combination in itertools.product(*fronts):
            if sum(taken for taken, _ in combination) <= budget:
                best = max(best, sum(hits for _, hits in combination))
        if best >= 0:
            return best
    raise AssertionError("nothing fits")


def most_hits(tables: Sequence[TableUse], budget_bytes: float) -> float:
    """Returns the hits per step that no plan within `budget_bytes` exceeds.

    Only plans count that leave room for as many batches in flight as there can be. At a price of a byte, each table
    gains most by itself; with the price times the budget that is above every plan, and we take the price at which it
    is least. Between two sizes that are looked at, a table hits at most as often as with the larger.
    """
    floors, prices, curves = flight_floors(tables, budget_bytes), [0.0], []
    for table, floor in zip(tables, floors, strict=True):
        sizes = _sizes(table, floor)
        hits = np.array([table.hits(each) for each in table.cut(sizes, floor)])
        curves.append((np.array(sizes), np.append(hits[1:], hits[-1])))
        prices.append(float(hits[-1]) / (table.demand.record_bytes + METADATA_BYTES))

    def at(price: float) -> float:
        return price * budget_bytes + sum(float((hits - price * sizes).max()) for sizes, hits in curves)

    low, high = 0.0, max(prices)
    for _ in range(100):  # `at` is convex
        third = (high - low) / 3
        low, high = (low, high - third) if at(low + third) <= at(high - third) else (low + third, high)
    return min(at(low), at(high), at(0.0))


def pareto(choices: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for taken, hits in sorted(choices, key=lambda each: (each[0], -each[1])):
        if not kept or hits > kept[-1][1]:
            kept.append((taken, hits))
    return kept


@looped("seed", range(60))
def test_against_brute_force(seed: int) -> None:
    """Slots that all cost the same: not one hit less than the best of all cuts. Else less than a piece."""
    rng = np.random.default_rng(seed)
    same = seed % 2 == 0
    uses = draw_uses(  # beside a megabyte the 32 bytes of a cached row are nothing
        rng, most_rows=12, record_bytes=10**6 if same else None, least_cached=int(rng.integers(0, 3))
    )
    whole = sum(use.demand.num_rows * use.demand.record_bytes for use in uses)
    budget = whole * rng.random() * 1.1 + 2000 * same
    if sum(use.least_bytes(use.floors[0]) for use in uses) > budget:
        budget = whole * 1.1 + 2000
    found = solve(uses, budget)
    best = brute_force(uses, budget)
    assert most_hits(uses, budget) >= best - 1e-9
    assert cost(uses, found) <= budget
    if same:
        assert expected_hits(uses, found) >= best - 1e-9
    else:
        pieces = max(use.demand.num_rows * (use.demand.record_bytes + 32) for use in uses)
        assert expected_hits(uses, solve(uses, budget + pieces)) >= best - 1e-9


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(k, marks=pytest.mark.slow) for k in range(5, 20))])
def test_the_bound_is_above_every_plan_and_close(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uses = draw_uses(rng, most_rows=20000)
    whole = sum(use.whole_bytes for use in uses)
    budget = max(whole * rng.random(), 1.01 * sum(use.least_bytes(use.floors[0]) for use in uses))
    most, found = most_hits(uses, budget), expected_hits(uses, solve(uses, budget))
    rows = sum(use.rows_per_step for use in uses)
    assert found <= most + 1e-9
    assert most - found <= 0.03 * rows
    assert most_hits(uses, whole + 1) == pytest.approx(rows)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(k, marks=pytest.mark.slow) for k in range(12, 60))])
def test_within_the_budget_and_never_worse_than_equal_shares(seed: int) -> None:
    """Than equal shares that keep as many slots for batches in flight, where the budget has so many."""
    rng = np.random.default_rng(seed)
    uses = draw_uses(rng, most_rows=20000)
    demands = [use.demand for use in uses]
    budget = int(sum(d.num_rows * d.record_bytes for d in demands) * rng.random() * 1.1) + 1
    if sum(use.least_bytes(use.floors[0]) for use in uses) > budget:
        with pytest.raises(ValueError, match=r"too small: .* raise dram \(config memory\.dram, or hotrow\.Memory\)"):
            solve(uses, budget)
        return
    found = solve(uses, budget)
    assert cost(uses, found) <= budget
    floors = flight_floors(uses, budget)
    for use, floor, (pinned, cached) in zip(uses, floors, found, strict=True):
        assert min(pinned, cached) >= 0 and pinned + cached <= use.demand.num_rows
        assert use.keeps(TableSlots(pinned, cached), floor)
        assert cached >= min(MIN_ROWS, use.demand.num_rows - pinned)
    try:
        equal = plan_slots(demands, budget)
    except ValueError:
        return
    if all(use.keeps(slots, floor) for use, floor, slots in zip(uses, floors, equal, strict=True)):
        assert expected_hits(uses, found) >= expected_hits(uses, equal) - 1e-9


def zipf_counts(num_rows: int, exponent: float, total: float) -> np.ndarray:
    weights = np.arange(1, num_rows + 1) ** -exponent
    return weights / weights.sum() * total


@looped(("pinned", "cached"), [(0, 150), (0, 400), (11, 150), (5, 600), (11, 0), (2000, 0)])
def test_expected_hits_against_a_simulated_cache(pinned: int, cached: int) -> None:
    lookups, num_rows = 64, 2000
    counts = zipf_counts(num_rows, 1.05, lookups)
    use = TableUse(TableDemand("t", num_rows, 64), counts, num_steps=1)
    rng, cache, hits, rows = np.random.default_rng(0), OrderedDict[int, None](), 0, 0
    for step in range(1000):
        batch = np.flatnonzero(np.bincount(rng.choice(num_rows, rng.poisson(lookups), p=counts / lookups)))
        if step >= 300:
            hits, rows = hits + sum(row < pinned or row in cache for row in batch.tolist()), rows + len(batch)
        for row in batch[batch >= pinned].tolist():
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > cached:
            cache.popitem(last=False)
    found = expected_hits([use], [TableSlots(pinned, cached)]) / use.rows_per_step
    assert found == pytest.approx(hits / rows, abs=0.02)


@looped(("pinned", "cached"), [(0, 30), (11, 100), (0, 900)])
def test_expected_hits_of_batches_in_flight_against_a_simulation(pinned: int, cached: int) -> None:
    """Rows of the four batches before a batch are still there, in slots of the cache or beside it."""
    lookups, num_rows, depth = 128, 4000, 4
    counts = zipf_counts(num_rows, 1.05, lookups)
    use = TableUse(TableDemand("t", num_rows, 64), counts, num_steps=1, depth=depth)
    rng, slots, beside = np.random.default_rng(0), OrderedDict[int, None](), set[int]()
    batches: list[set[int]] = []
    hits = rows = 0
    for step in range(800):
        drawn = rng.choice(num_rows, rng.poisson(lookups), p=counts / lookups)
        batch, in_flight = set(drawn[drawn >= pinned].tolist()), set[int]().union(*batches[-depth:])
        beside &= in_flight
        missing = batch - slots.keys() - beside
        if step >= 300:
            hits, rows = hits - len(missing), rows + len(set(drawn.tolist()))
        for row in batch & slots.keys():
            slots.move_to_end(row)
        held = in_flight | batch
        for row in missing:
            leaving = next((old for old in slots if old not in held), None) if len(slots) >= cached else -1
            if leaving is None:
                beside.add(row)
                continue
            slots.pop(leaving, None)
            slots[row] = None
        batches.append(batch)
    found = use.hits(TableSlots(pinned, cached), in_flight=True)
    assert found / use.rows_per_step == pytest.approx(1 + hits / rows, abs=0.02)
    assert (use.hits(TableSlots(pinned, cached)) < 0.9 * found) == (cached < 900)


def test_without_room_for_batches_in_flight_equal_shares_hit_no_more() -> None:
    """Tables of unlike widths: slots for as many batches as fit would go to rows that lie beside the cache anyway."""
    widths, lengths, num_rows = (32, 1024, 64, 512, 128, 256), (256, 512) * 3, 10_000
    demands = [TableDemand(f"t{t}", num_rows, width) for t, width in enumerate(widths)]
    counts = {f"t{t}": zipf_counts(num_rows, 1.0, length) for t, length in enumerate(lengths)}
    least = {f"t{t}": length for t, length in enumerate(lengths)}
    plan = plan_by_counts(counts, num_steps=1, least_cached=least)
    uses, budget = plan.uses(demands), 1_300_000
    ours, equal, most_batches = plan(demands, budget), plan_slots(demands, budget), solve(uses, budget)

    def misses(slots: Sequence[TableSlots]) -> float:
        return sum(use.rows_per_step - use.hits(own, in_flight=True) for use, own in zip(uses, slots, strict=True))

    assert misses(equal) < misses(most_batches)
    assert misses(ours) <= misses(equal) and cost(uses, ours) <= budget
    beside = [sum(use.bytes_beside(own) for use, own in zip(uses, slots, strict=True)) for slots in (ours, equal)]
    assert beside[0] <= beside[1]
    assert all(own.cached >= min(least[f"t{t}"], num_rows - own.pinned) for t, own in enumerate(ours))


def test_a_table_of_which_all_rows_cost_no_more_than_a_hundred_lies_in_memory_whole() -> None:
    use = TableUse(TableDemand("t", 105, 260), np.arange(105, 0, -1), num_steps=10)
    assert solve([use], 40_000) == [TableSlots(105, 0)]


def hits_by_che(counts: np.ndarray, num_steps: float, slots: TableSlots) -> float:
    chance = -np.expm1(-counts / num_steps)
    tail = counts[slots.pinned :] / num_steps
    low, high = 0.0, 50 / tail[tail > 0].min() if tail.any() else 1.0
    while low < (steps := (low + high) / 2) < high:
        low, high = (steps, high) if -np.expm1(-tail * steps).sum() < slots.cached else (low, steps)
    return float(chance[: slots.pinned].sum() - (np.expm1(-tail * high) * chance[slots.pinned :]).sum())


@pytest.mark.slow_but("True-7", "False-1500", "True-9000", "False-9000")
@pytest.mark.parametrize("num_rows", [7, 1500, 9000, 1_200_000])
@pytest.mark.parametrize("ranked", [True, False])
def test_expected_hits_against_the_model_row_by_row(num_rows: int, ranked: bool) -> None:
    rng = np.random.default_rng(num_rows)
    counts = zipf_counts(num_rows, 1.05, 512.0 * 30).round(1)
    counts = counts if ranked else rng.permutation(counts)
    use = TableUse(TableDemand("t", num_rows, 64), counts, num_steps=30)
    for _ in range(10 if num_rows < 10_000 else 3):  # of more rows than are looked at in one piece
        pinned = int(num_rows * rng.random() ** 3)
        slots = TableSlots(pinned, int((num_rows - pinned) * rng.random() ** 2))
        assert use.hits(slots) == pytest.approx(hits_by_che(counts, 30, slots), abs=0.003 * use.rows_per_step)


def test_rows_in_order_of_popularity_are_pinned_and_shuffled_ones_are_not() -> None:
    counts = zipf_counts(100_000, 1.05, 512.0 * 1000)
    shuffled = np.random.default_rng(0).permutation(counts)
    demands = [TableDemand(name, 100_000, 260) for name in ("ranked", "shuffled")]
    ranked, other = plan_by_counts({"ranked": counts, "shuffled": shuffled}, num_steps=1000)(demands, 8 << 20)
    assert ranked.pinned > 0.9 * sum(ranked) and sum(ranked) > 5000
    assert other.pinned < 0.05 * sum(other) and sum(other) > 5000


def test_rows_that_are_never_used_are_not_pinned() -> None:
    counts = np.r_[zipf_counts(3000, 1.05, 64.0 * 1000), np.zeros(97_000)]
    (slots,) = plan_by_counts({"t": counts}, num_steps=1000)([TableDemand("t", 100_000, 64)], 4 << 20)
    assert slots.pinned <= 3000 <= sum(slots)


@looped("depth", [0, 4, 20])
def test_batches_in_flight_have_slots(depth: int) -> None:
    """Of a table whose rows are all alike, and that would get none for its hits."""
    rng = np.random.default_rng(depth)
    counts = {"even": np.full(100_000, 0.00512), "steep": zipf_counts(100_000, 1.2, 512.0)}
    demands = [TableDemand(name, 100_000, 260) for name in counts]
    for even, steep in (plan_by_counts(counts, num_steps=1, depth=depth)(demands, size << 20) for size in (5, 20)):
        for (pinned, cached), rates in ((even, counts["even"]), (steep, counts["steep"])):
            ids = rng.choice(100_000, (50, (depth + 1) * 512), p=rates / rates.sum())
            assert max(len(set(batch[batch >= pinned].tolist())) for batch in ids) <= cached
        assert steep.pinned > 0.5 * sum(steep)


@looped("batches", [1, 2, 3, 5])
def test_where_not_all_batches_in_flight_fit_as_many_as_do(batches: int) -> None:
    """Of rows that are all alike, half are pinned where nothing is kept for batches, of 512 lookups each."""
    demand, counts = TableDemand("t", 100_000, 260), np.full(100_000, 0.00512)
    use, num_rows = TableUse(demand, counts, num_steps=1, depth=4), batches * 512
    room = num_bytes(demand, TableSlots(0, num_rows + 5 * math.isqrt(num_rows)))
    ((pinned, cached),) = solve([use], room)
    ids = np.random.default_rng(0).choice(100_000, (50, num_rows))
    assert max(len(set(own[own >= pinned].tolist())) for own in ids) <= cached


def test_a_table_is_given_the_rows_that_were_promised() -> None:
    counts = {"a": zipf_counts(50_000, 1.05, 512.0), "b": zipf_counts(50_000, 1.05, 512.0)}
    demands = [TableDemand(name, 50_000, 64) for name in counts]
    a, b = plan_by_counts(counts, num_steps=1, least_cached={"b": 5000})(demands, 1 << 20)
    assert a.cached < 5000 <= b.cached


def test_skew_decides() -> None:
    """A table of which few rows are hot needs few slots; one that is even takes the rest."""
    counts = {"skewed": np.r_[np.full(300, 1000.0), np.full(99700, 0.01)], "even": np.full(100000, 1.0)}
    demands = [TableDemand(name, 100000, 64) for name in counts]
    skewed, even = plan_by_counts(counts, num_steps=1000)(demands, 4 << 20)
    assert 200 <= skewed.pinned <= 300
    assert sum(even) > 100 * sum(skewed)


def test_large_tables_are_quick() -> None:
    """Rates that are all different are put together, whatever their number."""
    use = TableUse(TableDemand("t", 300_000, 64), zipf_counts(300_000, 1.05, 2048.0), num_steps=1)
    (slots,) = solve([use], 3_000_000)
    assert slots.pinned > 0.9 * sum(slots) > 30_000
    assert 0.5 < expected_hits([use], [slots]) / use.rows_per_step < 1


@looped(
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
    assert expected_hits([use], solve([use], 40_000)) == use.rows_per_step == 0.0


def misses_per_step(
    folder: Path, plan: object, rates: dict[str, np.ndarray], budget: int, *, depth: int
) -> tuple[float, list[TableSlots], int]:
    rng = np.random.default_rng(1)
    tables = [
        hotrow.TableConfig(name=name, num_embeddings=len(each), embedding_dim=16, feature_names=(name,))
        for name, each in rates.items()
    ]
    emb = hotrow.EmbeddingCollection(tables, memory=hotrow.Memory(dram=budget, file=folder, plan=plan))  # type: ignore[arg-type]
    sums = {name: np.cumsum(each) / each.sum() for name, each in rates.items()}
    size = round(next(iter(rates.values())).sum())
    flying: list[hotrow.KeyedJaggedTensor] = []
    before = after = 0
    for step in range(400):
        ids = [np.minimum(np.searchsorted(each, rng.random(size)), len(each) - 1) for each in sums.values()]
        flying.append(hotrow.KeyedJaggedTensor(tuple(rates), torch.from_numpy(np.concatenate(ids))))
        emb.placement.announce(flying[-1])
        if len(flying) > depth:
            emb.placement.forget(flying.pop(0))
        after = sum(each["created_rows"] + each["read_rows"] for each in emb.placement.counters().values())
        before = after if step == 199 else before
    overflown = sum(each["overflow_rows"] for each in emb.placement.counters().values())
    return (after - before) / 200, emb.placement.slots, overflown


@looped("parts", [10, 32])
def test_misses_against_the_best_that_any_fixed_set_of_rows_does(tmp_path: Path, parts: int) -> None:
    """Real ones, by the caches' own counters, of batches looked ahead to."""
    laws = (("a", 40_000, 1.05), ("b", 40_000, 0.9), ("c", 300, 1.05))
    rates = {name: zipf_counts(n, z, 128.0) for name, n, z in laws}
    budget = sum(map(len, rates.values())) * 64 * 2 // parts
    plan = plan_by_counts(rates, num_steps=1, depth=4)
    planned, slots, overflown = misses_per_step(tmp_path, plan, rates, budget, depth=4)
    default, _, _ = misses_per_step(tmp_path, None, rates, budget, depth=4)
    chances = np.sort(np.concatenate([-np.expm1(-each) for each in rates.values()]))[::-1]
    best = chances[sum(map(sum, slots)) :].sum()
    uses = plan.uses([TableDemand(name, len(each), 64) for name, each in rates.items()])
    expected = sum(use.rows_per_step for use in uses) - expected_hits(uses, slots)
    assert planned == pytest.approx(expected, rel=0.05)
    assert best * 0.98 <= planned <= best * 1.08
    assert planned < 0.9 * default
    assert overflown == 0


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
    a, b = emb.placement.slots
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


@looped(
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

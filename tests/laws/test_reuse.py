"""Stack distances against looking through the stack, and miss-ratio curves against caches that are run."""

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.locality.reuse import ReuseProfile, is_sampled
from hotrow.kernels import ops

pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing simulates caches"),
]


def profile(ids: NDArray[Any], access: Any = "lookup", *, batch: int = 100, **options: Any) -> ReuseProfile:
    made = ReuseProfile(access, **options)
    for start in range(0, len(ids), batch):
        made.add(ids[start : start + batch])
    return made


def zipf(num_rows: int, num_ids: int, *, alpha: float = 1.0, seed: int = 0) -> NDArray[np.int64]:
    cumulative = np.cumsum(np.arange(1, num_rows + 1) ** -alpha)
    drawn = np.searchsorted(cumulative, np.random.default_rng(seed).random(num_ids) * cumulative[-1])
    return np.random.default_rng(1).permutation(num_rows)[drawn]  # so that ids say nothing of their heat


def brute_force(ids: list[int]) -> tuple[Counter[int], int]:
    """Accesses by distance, and how many have none, from the definition."""
    distances: Counter[int] = Counter()
    first = 0
    for i, row in enumerate(ids):
        before = [j for j in range(i) if ids[j] == row]
        if before:
            distances[len(set(ids[before[-1] + 1 : i]))] += 1
        else:
            first += 1
    return distances, first


def run_lru(ids: NDArray[Any], capacity: int) -> Counter[int]:
    """Misses of each row in a cache that is really run."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses: Counter[int] = Counter()
    for row in ids.tolist():
        if row in cache:
            cache.move_to_end(row)
            continue
        misses[row] += 1
        cache[row] = None
        if len(cache) > capacity:
            cache.popitem(last=False)
    return misses


def distinct(ids: NDArray[Any], batch: int) -> NDArray[Any]:
    """Each batch's different rows, in the order of their first places."""
    pieces = [list(dict.fromkeys(ids[start : start + batch].tolist())) for start in range(0, len(ids), batch)]
    return np.array([row for piece in pieces for row in piece], np.int64)


IDS = st.lists(st.integers(0, 30) | st.integers(0, 2**62), max_size=120)


@settings(max_examples=150, deadline=None)
@given(ids=IDS, batch=st.integers(1, 50))
def test_against_brute_force(ids: list[int], batch: int) -> None:
    for access in ("lookup", "row"):
        stream = np.array(ids, np.int64)
        made = profile(stream, access, batch=batch)
        accesses = stream if access == "lookup" else distinct(stream, batch)
        distances, first = brute_force(accesses.tolist())
        histogram = made.histogram()
        assert {int(d): int(histogram[d]) for d in np.flatnonzero(histogram)} == distances
        assert (made.num_rows, made.num_accesses) == (first, len(accesses))
        binned = Counter[int]()
        for distance, number in distances.items():
            binned[1 << distance.bit_length()] += number
        bins = made.curve().distances()
        assert [end for end, _ in bins] == [1 << k for k in range(len(bins))]
        assert {end: round(share * len(accesses)) for end, share in bins if share} == binned
        assert [share for _, share in made.curve().distances(10**6)][: len(bins)] == [share for _, share in bins]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("alpha", [0.0, 1.2])
def test_against_a_cache_that_is_run(alpha: float, dtype: type) -> None:
    ids = zipf(3000, 30_000, alpha=alpha).astype(dtype)
    for access, stream in (("lookup", ids), ("row", distinct(ids, 700))):
        curve = profile(ids, access, batch=700).curve()
        for capacity in (1, 2, 10, 63, 64, 65, 500, 1000, 2999, 3000, 10**9):
            assert curve.miss_ratio(capacity) == run_lru(stream, capacity).total() / len(stream), (access, capacity)
        assert curve.miss_ratio(0) == 1.0
        assert curve.first == len(np.unique(stream)) / len(stream)


def check_sample(ids: NDArray[Any], *, rate: float, seed: int, capacities: tuple[int, ...]) -> None:
    """A sampled curve against caches that are run, within four standard errors.

    Two errors: (1) which rows are in the sample. Row i has x_i misses of n accesses; sampled with probability R they
    count x_i / R, so the estimate has the variance (1 - R) / R * sum (x_i / n)^2. (2) a sampled distance is a binomial
    count over R: the cache of c rows that it speaks of is uncertain by sqrt((1 - R) / (R c)), relative. So the estimate
    at c lies between the truth at c (1 + delta) less epsilon and the truth at c (1 - delta) plus epsilon.
    """
    estimate = profile(ids, rate=rate, seed=seed).curve()
    noise = (1 - rate) / rate
    for capacity in capacities:
        misses = run_lru(ids, capacity)
        epsilon = 4 * math.sqrt(noise * sum((x / len(ids)) ** 2 for x in misses.values()))
        delta = min(4 * math.sqrt(noise / capacity), 0.9)
        low, high = (run_lru(ids, round(capacity * f)).total() / len(ids) for f in (1 + delta, 1 - delta))
        assert low - epsilon <= estimate.miss_ratio(capacity) <= high + epsilon, (capacity, rate, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_sampling_against_exact_distances(rate: float, seed: int) -> None:
    check_sample(zipf(20_000, 60_000), rate=rate, seed=seed, capacities=(300, 1000, 3000, 10_000, 19_000))


def test_sampling_is_close_where_it_matters() -> None:
    """The bound above is wide for small caches; over the whole curve the mean error is a fraction of it."""
    ids = zipf(20_000, 60_000)
    exact = profile(ids).curve()
    sizes = np.unique(np.geomspace(200, 20_000, 60).astype(np.int64))
    ours = (profile(ids, rate=0.1, seed=s).curve().miss_ratio(sizes) for s in (0, 1))
    errors = [np.abs(own - exact.miss_ratio(sizes)) for own in ours]
    assert np.mean(errors) < 0.02  # one standard error of the sample of rows, at rate 0.1, is 0.01 to 0.02 here


def test_the_sample_is_a_choice_of_rows_by_seed() -> None:
    ids = np.arange(100_000)
    chosen = [is_sampled(ids, 0.1, seed) for seed in (1, 1, 2)]
    assert (chosen[0] == chosen[1]).all() and (chosen[0] != chosen[2]).any()
    assert abs(chosen[0].mean() - 0.1) < 4 * math.sqrt(0.09 / 100_000)
    made = profile(np.concatenate([ids, ids]), rate=0.1, seed=1)
    assert made.num_rows == chosen[0].sum()
    assert profile(ids, rate=0.1, seed=1).histogram().tolist() == profile(ids, rate=0.1, seed=1).histogram().tolist()


def test_overlap_against_sets_of_batches() -> None:
    ids = zipf(4000, 25_000, alpha=0.7)
    batches = [set(ids[start : start + 100].tolist()) for start in range(0, len(ids), 100)]
    made = profile(ids, "row")
    for k in (1, 10, 100):
        seen = rows = 0
        for b in range(k, len(batches)):
            before = set().union(*batches[b - k : b])
            seen, rows = seen + len(batches[b] & before), rows + len(batches[b])
        assert made.overlap(k) == seen / rows
    assert profile(ids[:1000], "row").overlap(10) is None
    assert profile(ids[:1100], "row").overlap(10) is not None


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is 0; the share of rows to follow is above 0 and at most 1"):
        ReuseProfile("row", rate=0)
    with pytest.raises(ValueError, match="capacity_rows is -1; a cache holds 0 rows or more"):
        profile(np.arange(5)).curve().miss_ratio(-1)
    assert ReuseProfile("row").curve().miss_ratio(5) == 1.0  # nothing seen: nothing hit

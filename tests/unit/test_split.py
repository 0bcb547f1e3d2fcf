"""Which rows go where: stated shares, exact cuts, and nothing that depends on chunks or on other columns."""

import numpy as np
import pytest

from hotrow.data.sources.split import (
    RandomPlan,
    RangePlan,
    TimeHistogram,
    TimePlan,
    plan_to_json,
    reference_plan,
    sample_mask,
)
from loops import looped
from prepare_data import plan_of


def test_random_plan_depends_on_seed_and_row_alone() -> None:
    plan = RandomPlan(seed=3, fractions=(0.8, 0.1, 0.1))
    whole = plan.assign(np.arange(10_000))
    pieces = np.concatenate([plan.assign(np.arange(s, s + n)) for s, n in ((0, 1), (1, 4998), (4999, 5001))])
    assert (whole == pieces).all()
    assert (RandomPlan(seed=4, fractions=(0.8, 0.1, 0.1)).assign(np.arange(10_000)) != whole).any()
    # Binomial: 5 standard deviations of a share of 0.1 in 10,000 rows are 0.015.
    assert np.bincount(whole, minlength=3) / 10_000 == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_random_plan_without_a_validation_share() -> None:
    assert set(RandomPlan(seed=0, fractions=(0.5, 0.0, 0.5)).assign(np.arange(1000))) == {0, 2}


def test_samples_nest_and_do_not_follow_the_split() -> None:
    small, large = (sample_mask(1, np.arange(50_000), fraction=f) for f in (0.1, 0.5))
    assert large[small].all()
    assert small.mean() == pytest.approx(0.1, abs=0.01)
    train = RandomPlan(seed=1, fractions=(0.8, 0.1, 0.1)).assign(np.arange(50_000)) == 0
    assert train[small].mean() == pytest.approx(0.8, abs=0.03)


@looped("num_rows", [14, 70, 76, 100, 45_840_617])
def test_reference_plan_against_array_split(num_rows: int) -> None:
    """The reference cuts with divmod and numpy.array_split; so does this test, on row numbers."""
    share, extra = divmod(num_rows, 7)
    train = num_rows - share - (1 if extra > 6 else 0)
    test, val = (len(part) for part in np.array_split(np.empty(num_rows - train, dtype=np.bool_), 2))
    plan = reference_plan([num_rows])
    assert plan == RangePlan((train, train + test))
    assert num_rows - plan.stops[1] == val


def test_reference_plan_of_day_files_halves_the_last() -> None:
    plan = reference_plan([10, 20, 5])
    assert plan.assign(np.arange(35)).tolist() == [0] * 30 + [2] * 3 + [1] * 2
    with pytest.raises(ValueError, match=r"6 rows in 1 files are too few.*--split random"):
        reference_plan([6])


def brute_force_cut(times: np.ndarray, share: float) -> int:
    """Rows before the cut between two times that comes nearest to a share."""
    sizes = [0, *np.cumsum(np.unique(times, return_counts=True)[1])]
    return min(sizes, key=lambda size: abs(size - share * len(times)))


def test_time_plan_against_brute_force() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        times = rng.integers(-50, 50, size=rng.integers(20, 400))
        histogram = TimeHistogram()
        for part in np.array_split(times, 7):
            histogram.add(part)
        codes = histogram.plan((0.6, 0.2, 0.2)).assign(np.arange(len(times)), times)
        assert (codes == 0).sum() == brute_force_cut(times, 0.6)
        assert (codes <= 1).sum() == brute_force_cut(times, 0.8)
        assert times[codes == 0].max() < times[codes == 1].min() <= times[codes == 1].max() < times[codes == 2].min()


def test_time_histogram_is_bounded_and_ignores_order() -> None:
    times = np.random.default_rng(6).integers(0, 10**12, size=5000)
    plans = set()
    for order, parts in ((times, 1), (times[::-1], 13), (np.sort(times), 500)):
        histogram = TimeHistogram(max_distinct=256)
        for part in np.array_split(order, parts):
            histogram.add(part)
        assert len(histogram.buckets) <= 256 and histogram.counts.sum() == 5000
        plans.add(histogram.plan((0.8, 0.1, 0.1)))
    assert len(plans) == 1
    (plan,) = plans
    assert (times < plan.cuts[0]).mean() == pytest.approx(0.8, abs=0.02)


def test_one_time_for_all_rows_is_refused() -> None:
    histogram = TimeHistogram()
    histogram.add(np.full(10, 99))
    with pytest.raises(ValueError, match=r"val would get none of 10 rows with 1 distinct times.*--split random"):
        histogram.plan((0.8, 0.1, 0.1))


@looped("plan", [RandomPlan(1, (0.8, 0.1, 0.1)), TimePlan((-5, 7)), RangePlan((6, 7))])
def test_plans_survive_json(plan) -> None:
    assert plan_of(plan_to_json(plan)) == plan

"""What stands out in scored rows: far more than validation had, and never what chance explains."""

import numpy as np

from hotrow.data.seen import MIN_COUNT, Seen, is_far_more, usual_range
from loops import looped


@looped(
    ("count", "num", "usual", "usual_num", "wanted"),
    [
        (2000, 2000, 60, 2000, True),
        (1000, 2000, 600, 2000, True),
        (15, 300, 0, 300, False),  # four errors: chance, over many columns and files
        (30, 300, 0, 300, True),
        (700_000, 2_000_000, 600_000, 2_000_000, False),  # sure, and hardly more
        (9_000, 1_000_000, 0, 1_000_000, False),  # sure, and below a hundredth
        (100, 100, 2, 2, False),  # two rows of validation say nothing
        (2000, 2000, 2000, 2000, False),
        (1, 1, 0, 0, False),
    ],
)
def test_far_more_needs_errors_odds_and_a_share(count: int, num: int, usual: int, usual_num: int, wanted: bool) -> None:
    assert is_far_more(count, num, usual, usual_num) is wanted


def test_rows_like_those_of_validation_never_stand_out() -> None:
    """20,000 comparisons of rows drawn alike, from 10 to 3,000 of them."""
    rng = np.random.default_rng(0)
    share = rng.beta(0.5, 3, 20_000)
    num, usual_num = rng.integers(10, 3000, 20_000), rng.integers(10, 3000, 20_000)
    count, usual = rng.binomial(num, share), rng.binomial(usual_num, share)
    alarms = [i for i in range(20_000) if is_far_more(count[i], num[i], usual[i], usual_num[i])]
    assert not alarms


def test_counts_are_those_of_all_batches() -> None:
    seen = Seen({"user": {"values": 100, "unknown": 0, "missing": 0}}, {"price": (1.0, 2.0)})
    missing = np.array([False, False, True, False])
    for _ in range(5):
        seen.add_ids("user", np.array([0, 7, 0, 0]), missing, unreadable=1)
        seen.add_numbers("price", np.array([0.5, 1.0, 9.0, 2.1], np.float32), missing)
    assert seen.columns["user"] == {"values": 20, "unknown": 10, "missing": 5, "unreadable": 5}
    assert seen.columns["price"] == {"values": 20, "missing": 5, "outside": 10, "unreadable": 0}
    found = seen.to_json()
    assert found["user"]["stands_out"] == ["unknown"] and found["user"]["usual"]["values"] == 100
    assert found["price"]["stands_out"] == [] and found["price"]["usual"] is None
    assert "user 50 % (validation 0 %)" in seen.warnings()["unknown_ids"]
    assert "user 5" in seen.warnings()["unreadable_values"]


def test_a_few_values_never_stand_out() -> None:
    seen = Seen({"user": {"values": 5000, "unknown": 0, "missing": 0}})
    seen.add_ids("user", np.zeros(MIN_COUNT - 1, np.int64))
    assert seen.warnings() == {}
    seen.add_ids("user", np.zeros(1, np.int64))
    assert list(seen.warnings()) == ["unknown_ids"]


def test_a_packed_dataset_bounds_what_was_missing() -> None:
    """Its zeros may be missing numbers, so only more than all of them stand out."""
    usual = {"price": {"values": 1000, "outside": 0, "missing_or_zero": 500}}
    for share, wanted in ((0.4, []), (1.0, ["missing"])):
        seen = Seen(usual)
        missing = np.arange(1000) < 1000 * share
        seen.add_numbers("price", np.where(missing, 0, 1).astype(np.float32), missing)
        assert seen.to_json()["price"]["stands_out"] == wanted


def test_one_wild_number_does_not_widen_the_range() -> None:
    values = np.linspace(1, 2, 10_000).astype(np.float32)
    values[17] = 1e30
    low, high = usual_range(values)
    assert 1 <= low < 1.01 and 1.99 < high <= 2
    assert usual_range(np.array([3.0], np.float32)) == (3.0, 3.0)


def test_many_columns_are_named_in_part() -> None:
    seen = Seen({f"c{i}": {"values": 100, "unknown": 0, "missing": 0} for i in range(30)})
    for i in range(30):
        seen.add_ids(f"c{i}", (np.arange(100) >= 40 + i).astype(np.int64))
    text = seen.warnings()["unknown_ids"]
    assert "c29 69 %" in text and "c20 60 %" in text and "c19 " not in text and "and 20 more columns" in text

"""The sample that `make test` runs of a product of parameters has all values, or all pairs of them."""

import itertools

import pytest

from sampled import covering, sampled


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (11, 3), (5, 4, 2), (2,) * 6, (6, 8, 2, 4, 4)], ids=str)
def test_every_pair_is_in_the_sample(sizes: tuple[int, ...]) -> None:
    rows = covering(sizes, min(2, len(sizes)))
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(range(sizes[a]), range(sizes[b])))
    assert all({row[axis] for row in rows} == set(range(size)) for axis, size in enumerate(sizes))
    assert rows == covering(sizes, min(2, len(sizes))), "workers must collect the same tests"
    assert len(covering(sizes, 1)) == max(sizes)


def test_rows_that_are_not_valid_are_left_out() -> None:
    rows = covering((3, 3, 4), 2, valid=lambda row: row[0] != 1 and row[1] <= row[0])
    assert {row[:2] for row in rows} == {(0, 0), (2, 0), (2, 1), (2, 2)}
    for a in (0, 1):
        assert {(row[a], row[2]) for row in rows} == set(itertools.product((0, 2) if a == 0 else range(3), range(4)))


def test_what_is_not_in_the_sample_is_slow() -> None:
    found = sampled("ab", range(4), pairs=False)
    assert [each.values for each in found] == [*itertools.product("ab", range(4))]
    quick = [each.values for each in found if not each.marks]
    assert len(quick) == 4 and {a for a, _ in quick} == {"a", "b"}

"""A test of many cases tries them all, and names every one that fails."""

import itertools
from pathlib import Path

import pytest

from loops import REST, looped
from sampled import covering, sampled


def test_every_case_is_tried_and_each_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, str]]()

    @looped("number, text", [(1, "a"), (2, "b"), pytest.param(3, "c"), (4, "d")])
    def tried(number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen.append((number, text))
        assert list(tmp_path.iterdir()) == [] and "HOTROW_OF_CASE" not in __import__("os").environ
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOTROW_OF_CASE", text)
        if number == 3:
            pytest.fail("by its own words")
        assert number != 1, "is one"

    with pytest.raises(AssertionError, match=r"2 of 4 cases failed:\nnumber=1, text='a'\n(?s:.*)number=3") as raised:
        tried(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "is one" in str(raised.value) and "by its own words" in str(raised.value)
    assert seen == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_slow_cases_are_a_test_of_their_own() -> None:
    seen = list[int]()

    @looped("number", [1, pytest.param(2, marks=pytest.mark.slow), 3])
    def tried(number: int) -> None:
        seen.append(number)

    (mark,) = tried.pytestmark  # type: ignore[attr-defined]
    assert mark.args[0] == "share" and [each.name for each in mark.args[1][1].marks] == ["slow"]
    tried(share="sample")
    assert seen == [1, 3]
    tried(share=REST)
    assert seen == [1, 3, 2]


def test_a_loop_is_skipped_only_if_all_its_cases_are() -> None:
    @looped("number", [1, 2])
    def some(number: int) -> None:
        if number == 1:
            pytest.skip("no one")

    @looped("number", [1, 2])
    def none(number: int) -> None:
        pytest.skip("nothing")

    some()
    with pytest.raises(pytest.skip.Exception, match="nothing"):
        none()
    with pytest.raises(AssertionError, match="a mark of one case alone"):
        looped("number", [pytest.param(1, marks=pytest.mark.gpu)])


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

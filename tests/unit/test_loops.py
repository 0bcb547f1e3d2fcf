"""A test of many cases tries them all, and names every one that fails."""

from pathlib import Path

import pytest

from loops import REST, looped


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

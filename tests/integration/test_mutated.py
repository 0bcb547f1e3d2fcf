"""Mutated inputs over every verb (tests/mutate.py): no traceback, no silent acceptance of content that changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import mutate

SEED = 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mutate.World]:
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("mutated")
        patch.chdir(folder)
        yield mutate.World(folder)
    assert Path.cwd() == before


def judged(world: mutate.World, numbers: range) -> list[str]:
    """What is wrong, case by case."""
    made = ((number, *mutate.case_of(SEED, number, world)) for number in numbers)
    return [f"case {n}: {case.verb}, {case.what}: {o.faults}\n{o.err}" for n, case, o in made if o.faults]


def test_a_few_mutated_inputs(world: mutate.World) -> None:
    assert judged(world, range(10)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 2010, 250))
def test_mutated_inputs(world: mutate.World, first: int) -> None:
    assert judged(world, range(first, first + 250)) == []


def test_the_judge_finds_what_is_wrong() -> None:
    """A traceback, a message without a place, another code, and what is not an error though it should be."""

    def faults(code: int, err: str) -> list[str]:
        return mutate.faults_of(case, mutate.Outcome(code, "", err))

    case = mutate.Case("prepare", "x", [], ("case/x.csv",), mutate.Wanted("error"))
    assert faults(2, "hotrow: case/x.csv:3: this is wrong; mend it\n") == []
    assert faults(2, "Traceback (most recent call last):\nhotrow: case/x.csv:3: this is wrong; mend it\n")
    assert faults(2, "hotrow: something somewhere went wrong\n")
    assert faults(2, "case/x.csv\n") and faults(1, "hotrow: case/x.csv is what went wrong\n")
    assert faults(2, "hotrow: 1 validation error for case/x.csv in here\n")
    assert mutate.accepted_faults(case, mutate.Outcome(0, "", "")) == ["is accepted"]

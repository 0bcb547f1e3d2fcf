"""Forecasts stay as they were, to the last digit: see make.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from golden.make import FORECASTS, configs, forecaster, this_processor

TOLERANCE = 1e-11
"""For another processor: numpy's exponentials and LAPACK choose their code by it. Without AVX2 and FMA, differences
of up to 6e-14 were seen."""

MAX_SHOWN = 40


def differences(wanted: Any, found: Any, tolerance: float, place: str = "") -> Iterator[str]:
    """Yields the fields that differ, with both values."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            yield from differences(wanted.get(key, "absent"), found.get(key, "absent"), tolerance, f"{place} {key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for k, each in enumerate(zip(wanted, found, strict=True)):
            yield from differences(*each, tolerance, f"{place} {k}")
    elif isinstance(wanted, float) and isinstance(found, float):
        if abs(wanted - found) > tolerance * abs(wanted):
            yield f"{place} was {wanted!r}, is {found!r}"
    elif wanted != found or type(wanted) is not type(found):
        yield f"{place} was {wanted!r}, is {found!r}"


@pytest.fixture(scope="module")
def compare() -> Iterator[Any]:
    recorded = json.loads(FORECASTS.read_text())
    with forecaster() as ask:

        def check(names: list[str]) -> None:
            asked = configs()
            assert asked.keys() == recorded["forecasts"].keys(), "run PYTHONPATH=tests python -m golden.make"
            tolerance = 0.0 if recorded["made_on"] == this_processor() else TOLERANCE
            # As JSON has it: tuples are lists.
            found = {name: json.loads(json.dumps(ask(asked[name]))) for name in names}
            wanted = {name: recorded["forecasts"][name] for name in names}
            if found := [*differences(wanted, found, tolerance)]:
                pytest.fail("\n".join(found[:MAX_SHOWN]), pytrace=False)

        yield check


def test_every_fourth_forecast(compare: Any) -> None:
    compare([*configs()][::4])


@pytest.mark.slow
def test_the_other_forecasts(compare: Any) -> None:
    compare([name for k, name in enumerate(configs()) if k % 4])


def test_what_differs_is_named() -> None:
    before = {"a config": {"predicted": {"wait_ms": 0.25, "binds": "data"}, "tables": [1, 2], "threads": 1}}
    after = {"a config": {"predicted": {"wait_ms": 0.5, "binds": "data"}, "tables": [1, 3], "ranks": None}}
    assert [*differences(before, after, 0.0)] == [
        " a config predicted wait_ms was 0.25, is 0.5",
        " a config ranks was 'absent', is None",
        " a config tables 1 was 2, is 3",
        " a config threads was 1, is 'absent'",
    ]
    assert [*differences(1.0, 1.0 + 2e-16, 0.0)] and not [*differences(1.0, 1.0 + 2e-16, TOLERANCE)]
    assert [*differences(1, 1.0, TOLERANCE)] and [*differences(1.0, 1.0 + 2e-11, TOLERANCE)]

"""A run whose steps are far slower than predicted says so once."""

from __future__ import annotations

import pytest

from hotrow.run import meters
from hotrow.run.meters import PACE_S, PACE_STEPS, Notice, PaceMeter, Session


def told(step_s: float, *, stall_s: float = 0.0, spins: bool = False, windows: int = 3) -> list[Notice]:
    """Returns what a meter says of steps that take `step_s`, with `stall_s` of waits for rows, for 10 ms predicted."""
    session = Session(1)
    meter, state, found = PaceMeter(session, 0.01, spins=spins), session.state, list[Notice]()
    for _ in range(windows * max(PACE_STEPS, round(PACE_S / (step_s - stall_s) + 1)) + 1):
        state.step, state.stall_s = state.step + 1, state.stall_s + stall_s
        state.seconds["dense"] += step_s
        found += meter.notices()
    return found


@pytest.mark.parametrize(
    ("step_s", "stall_s", "times"), [(0.019, 0.0, 0), (0.021, 0.0, 1), (0.5, 0.0, 1), (0.5, 0.49, 0), (2.0, 0.0, 1)]
)
def test_far_slower_steps_are_warned_of_once(step_s: float, stall_s: float, times: int) -> None:
    found = told(step_s, stall_s=stall_s)
    assert [notice.code for notice in found if notice.code] == ["slower_than_predicted"] * times
    assert sum(notice.code is None for notice in found) == times, "a line on the terminal"


def test_a_short_run_says_nothing() -> None:
    assert told(0.05, windows=0) == []


@pytest.mark.parametrize(("share", "busy"), [(0.5, True), (0.0, False)])
@pytest.mark.parametrize("spins", [True, False])
def test_the_cause_is_named(monkeypatch: pytest.MonkeyPatch, share: float, busy: bool, spins: bool) -> None:
    monkeypatch.setattr(meters.Disturbance, "share", lambda self: share)
    text = told(0.05, spins=spins)[0].text
    assert ("other processes" in text) == busy
    assert ("OMP_WAIT_POLICY" in text) == spins
    assert ("hotrow probe" in text) == (not busy and not spins)

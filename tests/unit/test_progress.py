"""Progress of preparation: rate and remaining time by a clock of our own."""

import pytest

from hotrow.base import progress
from hotrow.base.progress import Progress, ProgressMeter, TimeLeft


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_rate_and_remaining_time_count_from_where_this_process_began(clock: Clock) -> None:
    reports: list[Progress] = []
    meter = ProgressMeter(reports.append, "count", rows_total=1000, rows_done=400)
    clock.now += 10
    meter.update(600)
    meter.update(601)  # too soon after the last
    clock.now += 10
    meter.update(700, rows_total=2200)
    clock.now += 20
    meter.finish(2000)
    assert reports == [
        Progress("count", 600, 1000, rows_per_s=20.0, remaining_s=None),
        Progress("count", 700, 2200, rows_per_s=15.0, remaining_s=150.0),
        Progress("count", 2000, 2000, rows_per_s=40.0, remaining_s=0.0),
    ]


def test_a_slow_start_is_not_counted_into_the_time_left() -> None:
    """Three seconds for the first of a thousand steps, then ten milliseconds each."""
    left = TimeLeft()
    assert left.seconds(1, 1000, 3.0) is None
    assert left.seconds(1, 1000, 3.1) is None, "no pace without a step"
    assert left.seconds(101, 1000, 4.0) == pytest.approx(9.0, rel=0.01)
    assert left.seconds(1000, 1000, 13.0) == 0

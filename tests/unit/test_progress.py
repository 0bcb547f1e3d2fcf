"""Progress of preparation: rate and remaining time by a clock of our own, and what is shown without a terminal."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hotrow.base import progress
from hotrow.base.progress import Progress, ProgressLine, ProgressMeter, TimeLeft, progress_bar


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


def test_without_a_terminal_there_are_timed_lines_while_it_works(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar() as show:
        show(Progress("count", 250, 1000, rows_per_s=12_300.0, remaining_s=3675.0))
        first = capsys.readouterr().err
        clock.now += progress.PLAIN_SECONDS / 2
        show(Progress("count", 500, 1000, rows_per_s=50.0, remaining_s=10.0))
        assert capsys.readouterr().err == "", "not one line per report"
        clock.now += progress.PLAIN_SECONDS / 2
        show(Progress("count", 750, 1000, rows_per_s=75.0, remaining_s=3.4))
        show(Progress("count", 1000, 1000, rows_per_s=100.0, remaining_s=0.0))
        show(Progress("encode", 0, 1000, rows_per_s=0.0, remaining_s=0.0))
    assert first == "[0:00:00] count: 250 of 1,000 rows, 12.3k/s, 1:01:15 left\n"
    assert capsys.readouterr().err.splitlines() == [
        "[0:00:10] count: 750 of 1,000 rows, 75/s, 0:00:03 left",
        "[0:00:10] count: 1,000 of 1,000 rows, 100/s, 0:00:00 left",
    ]


def test_on_a_terminal_bars_show_the_same(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar() as show:
        show(Progress("count", 250, 1000, rows_per_s=12.0, remaining_s=3675.0))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "250 of 1,000 rows, 12/s 1:01:15" in plain


def test_a_slow_start_is_not_counted_into_the_time_left() -> None:
    """Three seconds for the first of a thousand steps, then ten milliseconds each."""
    left = TimeLeft()
    assert left.seconds(1, 1000, 3.0) is None
    assert left.seconds(1, 1000, 3.1) is None, "no pace without a step"
    assert left.seconds(101, 1000, 4.0) == pytest.approx(9.0, rel=0.01)
    assert left.seconds(1000, 1000, 13.0) == 0


class Notebook:
    """What a notebook's cell shows: the texts that each of its outputs had, one after another."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, data: dict[str, str], **_: bool) -> Any:
        texts = [data["text/plain"]]
        self.outputs.append(texts)
        return SimpleNamespace(update=lambda data, **_: texts.append(data["text/plain"]))


def test_a_notebook_gets_one_output_that_changes(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Notebook()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", cell)  # type: ignore[arg-type]
    with ProgressLine():
        pass
    with ProgressLine(quiet=True) as line:
        line.say("nobody sees this")
    assert not cell.outputs
    with ProgressLine() as line:
        line.say("begins")
        line.update(lambda: "10 %\nwaiting")
        line.update(lambda: "too soon after the last")
        clock.now += 1
        line.update(lambda: "20 %")
        line.say("ends")
    with progress_bar() as show:
        show(Progress("count", 1000, 1000, rows_per_s=100.0, remaining_s=0.0))
    begins, ends = "[0:00:00] begins", "[0:00:01] ends"
    first, second = cell.outputs
    assert first[:3] == [begins, f"{begins}\n10 %\nwaiting", f"{begins}\n20 %"]
    assert first[-1] == f"{begins}\n{ends}" and "1,000 of 1,000 rows" in second[-1]
    assert capsys.readouterr() == ("", "")

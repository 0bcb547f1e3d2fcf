"""Progress on stderr: a live line on a terminal or in a notebook, and a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

PLAIN_SECONDS = 10.0
"""The least time between two plain progress lines, so that the log of a long run stays readable."""
REPORT_EVERY_S = 0.25


@dataclass(frozen=True)
class Progress:
    """One report on preparation. rows_total is an estimate until a stage has read all rows once."""

    stage: str
    """One of look, guess, read, count, match, encode."""
    rows_done: int
    rows_total: int
    rows_per_s: float
    """The rate since this stage began in this process."""
    remaining_s: float | None
    """The time left in this stage; None before it can be known."""
    unit: str = "rows"


ProgressCallback = Callable[[Progress], None]


class TimeLeft:
    """The time left, estimated from the pace since the first call; the time before that includes the start."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def seconds(self, done: float, total: float, spent_s: float) -> float | None:
        """Returns the seconds until all of `total` is done, or None while the pace is unknown."""
        first, before_s = self._first = self._first or (done, spent_s)
        if done >= total:
            return 0.0
        return (total - done) * (spent_s - before_s) / (done - first) if done > first else None


class ProgressMeter:
    """Reports on one stage, at most every REPORT_EVERY_S."""

    def __init__(
        self, callback: ProgressCallback | None, stage: str, rows_total: int, rows_done: int = 0, unit: str = "rows"
    ) -> None:
        self._callback, self.stage, self._total, self._unit = callback, stage, rows_total, unit
        self._first_row, self._started = rows_done, time.monotonic()
        self._reported, self._left = 0.0, TimeLeft()

    def update(self, rows_done: int, *, rows_total: int | None = None) -> None:
        """Reports if the last report is old enough. rows_total: a better estimate."""
        self._total = rows_total if rows_total is not None else self._total
        if time.monotonic() - self._reported >= REPORT_EVERY_S:
            self._report(rows_done)

    def finish(self, rows_done: int) -> None:
        self._total = rows_done
        self._report(rows_done)

    def _report(self, rows_done: int) -> None:
        if self._callback is None:
            return
        now = self._reported = time.monotonic()
        rate = (rows_done - self._first_row) / max(now - self._started, 1e-9)
        remaining_s = self._left.seconds(rows_done, self._total, now - self._started)
        self._callback(Progress(self.stage, rows_done, max(self._total, rows_done), rate, remaining_s, self._unit))


class _Cell:
    """One output of a notebook's cell, whose text is replaced. A notebook would make an output of every line."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._output: Any = None

    def show(self, state: str = "", said: str | None = None) -> None:
        """Shows all lines that were said, and below them `state`."""
        self._said += [] if said is None else [said]
        text = {"text/plain": "\n".join([*self._said, *([state] if state else [])])}
        if self._output is not None:
            self._output.update(text, raw=True)
        elif text["text/plain"]:
            self._output = import_module("IPython.display").display(text, raw=True, display_id=True)


class ProgressLine:
    """The state of the work, which `update` replaces, and lines that stay, which `say` prints.

    On a terminal and in a notebook the state may have several lines; elsewhere its first line is printed now and then.

    quiet: show nothing. Use it as a context manager, so that the terminal is restored even after an error.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._cell = _Cell() if self._console.is_jupyter and not quiet else None
        self._started = time.monotonic()
        self._last_plain = float("-inf")

    def update(self, text: Callable[[], str]) -> None:
        """Shows `text()`, which is called only if it will be shown."""
        now = time.monotonic()
        if now - self._last_plain < (0.2 if self._live or self._cell else PLAIN_SECONDS):
            return
        self._last_plain = now
        if self._live:
            self._live.update(Text(text(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._cell:
            self._cell.show(text())
        else:
            self.say(text().partition("\n")[0])

    def say(self, text: str) -> None:
        """Prints `text` after the time since the start."""
        line = f"[{duration(time.monotonic() - self._started)}] {text}"
        if self._cell:
            self._cell.show(said=line)
        else:
            self._console.print(Text(line))

    def __enter__(self) -> ProgressLine:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        if self._cell:
            self._cell.show()


def say(line: str) -> None:
    """Prints a line for the user, on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[ProgressCallback]:
    """Yields a callback that shows rows, rate and remaining time on stderr, or nothing if `quiet`. On a terminal there
    is one bar per stage; elsewhere there are timed lines, as a bar would appear only at the end."""
    console = Console(stderr=True)
    with _bars(console) if console.is_terminal and not quiet else _lines(quiet=quiet) as show:
        yield show


@contextmanager
def _bars(console: Console) -> Iterator[ProgressCallback]:
    tasks: dict[str, TaskID] = {}
    columns = (
        TextColumn("{task.description:<7}"),
        BarColumn(bar_width=14),  # leaves room for eight digits of rows in 80 columns
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}, {task.fields[rate]}/s"),
        TextColumn("{task.fields[remaining]}"),
    )
    bars = Bars(*columns, console=console)

    def show(report: Progress) -> None:
        if report.stage not in tasks:
            if not tasks:
                bars.start()  # not earlier, so that an error before the first row stays one line
            tasks[report.stage] = bars.add_task(report.stage, rate="0", remaining="", unit=report.unit)
        bars.update(
            tasks[report.stage],
            completed=report.rows_done,
            total=report.rows_total,
            rate=rate(report.rows_per_s),
            remaining="" if report.remaining_s is None else duration(report.remaining_s),
        )

    try:
        yield show
    finally:
        if tasks:
            bars.stop()


@contextmanager
def _lines(*, quiet: bool) -> Iterator[ProgressCallback]:
    ended: dict[str, int] = {}

    def text(report: Progress) -> str:
        left = "" if report.remaining_s is None else f", {duration(report.remaining_s)} left"
        done = f"{report.rows_done:,} of {report.rows_total:,} {report.unit}"
        return f"{report.stage}: {done}, {rate(report.rows_per_s)}/s{left}"

    with ProgressLine(quiet=quiet) as line:

        def show(report: Progress) -> None:
            # What takes less than a second needs no line, nor does an end that was told.
            if report.rows_done <= report.rows_per_s or ended.get(report.stage) == report.rows_done:
                return
            if report.rows_done >= report.rows_total and report.stage not in ended:
                ended[report.stage] = report.rows_done
                line.say(text(report))
            else:
                line.update(lambda: text(report))

        yield show


def duration(seconds: float) -> str:
    """Formats seconds as `h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def num_of(number: float, noun: str) -> str:
    """Formats a number of things: 1 thread, 2 threads."""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def rate(per_s: float) -> str:
    """Formats a rate with three digits: 950, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:.3g}"

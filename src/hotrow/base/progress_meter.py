"""How far preparation has come; `hotrow.base.progress` shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REPORT_EVERY_S = 0.25


@dataclass(frozen=True)
class Progress:
    """One report. rows_total is an estimate until a stage has read all rows once."""

    stage: str
    """scan, count, match or encode."""
    rows_done: int
    rows_total: int
    rows_per_s: float
    """Since this stage began in this process."""
    remaining_s: float
    """Of this stage."""


ProgressCallback = Callable[[Progress], None]


class ProgressMeter:
    """Reports of one stage, at most every quarter of a second."""

    def __init__(self, callback: ProgressCallback | None, stage: str, rows_total: int, rows_done: int = 0) -> None:
        self._callback, self.stage, self._total = callback, stage, rows_total
        self._first_row, self._started = rows_done, time.monotonic()
        self._reported = 0.0

    def update(self, rows_done: int, *, rows_total: int | None = None) -> None:
        """Report if the last report is long enough ago; `rows_total` mends the estimate."""
        self._total = rows_total if rows_total is not None else self._total
        if time.monotonic() - self._reported >= REPORT_EVERY_S:
            self._report(rows_done)

    def finish(self, rows_done: int) -> None:
        """Report the end of the stage, which is where the number of rows is known."""
        self._total = rows_done
        self._report(rows_done)

    def _report(self, rows_done: int) -> None:
        if self._callback is None:
            return
        now = self._reported = time.monotonic()
        rate = (rows_done - self._first_row) / max(now - self._started, 1e-9)
        remaining_s = max(self._total - rows_done, 0) / rate if rate > 0 else 0.0
        self._callback(Progress(self.stage, rows_done, max(self._total, rows_done), rate, remaining_s))

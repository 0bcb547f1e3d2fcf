"""Signals that ask a run to stop: the first one is noted, so that the run ends in good order."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any


class Interrupt:
    """A block in which the first of `SIGNALS` is only noted in `signal`; the next one acts as usual.

    Outside the main thread signals cannot be caught, and act as usual. quiet: say nothing when one comes. until_s: from
    this `time.monotonic()` on it is as if TIME_IS_OVER had come.
    """

    TIME_IS_OVER = signal.SIGUSR1
    """Schedulers of clusters send it some minutes before the time of a job is over."""
    SIGNALS = (signal.SIGINT, signal.SIGTERM, TIME_IS_OVER)

    def __init__(self, *, quiet: bool = False, until_s: float = math.inf) -> None:
        self._noted: int | None = None
        self.quiet, self._until_s = quiet, until_s
        self._before: dict[int, Any] = {}

    @property
    def signal(self) -> int | None:
        """The signal by which the run is to stop."""
        if self._noted is None and time.monotonic() >= self._until_s:
            self._noted = self.TIME_IS_OVER
        return self._noted

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = self._noted or number
        self._restore()
        if not self.quiet:
            print("\nfinishing this step and saving a checkpoint; a second signal aborts", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *_: object) -> None:
        self._restore()

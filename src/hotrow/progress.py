"""What a user sees while something runs: one live line on a terminal, timed plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_SECONDS = 10.0
"""Least time between two plain progress lines, so that a log of hours stays readable."""


class ProgressLine:
    """`update` shows the newest state of the work, `say` leaves a line that stays.

    quiet: show nothing. Use as a context manager, so that the terminal is restored whatever happens.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._started = time.monotonic()
        self._last_plain = float("-inf")

    def update(self, text: Callable[[], str]) -> None:
        """Show `text()`; it is called only when it will be seen."""
        now = time.monotonic()
        if now - self._last_plain < (0.2 if self._live else PLAIN_SECONDS):
            return
        self._last_plain = now
        if self._live:
            self._live.update(Text(text(), no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self.say(text())

    def say(self, text: str) -> None:
        """Print `text` after the time since the start."""
        self._console.print(Text(f"[{duration(time.monotonic() - self._started)}] {text}"))

    def __enter__(self) -> ProgressLine:
        """Start the live line where there is a terminal."""
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live line."""
        if self._live:
            self._live.stop()


def duration(seconds: float) -> str:
    """`h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def rate(per_s: float) -> str:
    """A rate in three digits: 950, 12.3k, 4.56M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:.3g}"

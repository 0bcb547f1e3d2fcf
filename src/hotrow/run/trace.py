"""A trace of some steps: where each moment went, as a file that Perfetto and chrome://tracing open.

The clock tells of its laps (meters.py), so a run without a trace pays one comparison a lap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from hotrow.base.files import atomic_write
from hotrow.config.schema import trace_window
from hotrow.placement.base import Placement
from hotrow.run.meters import Meter, Notice, Session

NAME = "trace.json"
BETWEEN = "between steps"
"""The name of what is in no phase: counting, metrics lines, evaluations, checkpoints."""


class Trace(Meter):
    """The spans of the steps in `window`, written to `path` once the step after them has begun.

    window: as in `train.trace`. placement: if it looks ahead, its waits for rows are in the trace too.
    """

    def __init__(self, path: Path, window: str, session: Session, placement: Placement) -> None:
        self.path, self._window, self._session = path, window, session
        self._first, count = trace_window(window)
        self._last = self._first + count - 1
        self._placement = placement if placement.looks_ahead else None
        self._spans: list[_Span] = []
        self._waited = 0.0
        self._is_written = False

    def span(self, phase: str | None, start: float, end: float) -> None:
        """Notes a lap of the clock, if its step is in the window."""
        waited = 0.0 if self._placement is None else self._placement.stall_s
        waits, self._waited = waited - self._waited, waited
        # The step under way is not counted yet; what follows a step belongs to the one just counted.
        step = self._session.state.step + (phase is not None)
        if not self._first <= step <= self._last:
            return
        self._spans.append(_Span(phase, start, end, step, waits))

    @override
    def notices(self) -> Iterable[Notice]:
        return self._write() if self._session.state.step > self._last else ()

    @override
    def close(self) -> Iterable[Notice]:
        if self._is_written or self._spans:
            return self._write()
        text = f"train.trace is {self._window}, but this session trained none of these steps: there is no {NAME}"
        return [Notice(text, "no_trace")]

    def _write(self) -> list[Notice]:
        """Writes the file, once. A disk that is full costs the trace, not the run."""
        if self._is_written or not self._spans:
            return []
        self._is_written = True
        names = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "hotrow"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "training loop"}},
        ]
        try:
            with atomic_write(self.path) as file:
                file.write(json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *self._events()]}).encode())
        except OSError as error:
            return [Notice(f"{self.path} could not be written: {error}", "no_trace")]
        finally:
            self._spans.clear()
        return [Notice(f"wrote {self.path}: open it in Perfetto (ui.perfetto.dev) or chrome://tracing")]

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yields what the file says of the spans: made once here, so that a step only keeps five numbers a lap."""
        begun: float | None = None
        for phase, start, end, step, waited_s in self._spans:
            waits = {} if self._placement is None else {"waited_for_rows_ms": round(1e3 * waited_s, 4)}
            yield _event(phase or BETWEEN, start, end, {"step": step} | waits)
            if phase == "data":
                begun = start
            if phase == "update" and begun is not None:
                yield _event(f"step {step}", begun, end, {"step": step})


class _Span(NamedTuple):
    phase: str | None
    start: float
    end: float
    step: int
    waited_s: float


def _event(name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """Returns a span as the format has it; times are in microseconds."""
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", **times, "pid": 1, "tid": 1, "args": args}

"""A trace of some steps by torch.profiler, for Perfetto and chrome://tracing: the phases of a step, and torch's
operations inside them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import profile, record_function
from typing_extensions import override

from hotrow.config.schema import trace_window
from hotrow.run.meters import Meter, Notice, Session
from hotrow.run.record import PHASES

NAME = "trace.json"
BETWEEN = "between steps"
"""The span of what is in no phase: counting, metrics lines, evaluations, checkpoints."""


ORDER = (*PHASES, "dense", BETWEEN)
"""The spans of a step: the optimizer of dense layers comes after the rows are updated."""


class Trace(Meter):
    """Profiles the steps in `window`, as in `train.trace`, and writes them to `path` when the last one is over."""

    def __init__(self, path: Path, window: str, session: Session) -> None:
        self.path, self._window, self._session = path, window, session
        self._first, count = trace_window(window)
        self._last = self._first + count - 1
        self._profiler: profile | None = None
        self._span, self._at = ExitStack(), 0

    def span(self, phase: str | None, start: float, end: float) -> None:
        """Ends the span of `phase` and begins the next one, because torch names a span at its start."""
        if self._profiler is None and phase is None and self._first <= self._session.state.step + 1 <= self._last:
            self._profiler = profile()
            self._profiler.start()
        if self._profiler is not None:
            self._at = 0 if phase is None else self._at + 1
            self._begin(record_function(ORDER[self._at]))

    def _begin(self, span: record_function | None) -> None:
        self._span.close()
        if span is not None:
            self._span.enter_context(span)

    @override
    def notices(self) -> Iterable[Notice]:
        return self._write() if self._session.state.step >= self._last else ()

    @override
    def close(self) -> Iterable[Notice]:
        return self._write() or ([] if self.path.exists() else [self._lost("this session trained none of these steps")])

    def _write(self) -> list[Notice]:
        """Writes the file, if steps were profiled. A disk that is full costs the trace, not the run."""
        if self._profiler is None:
            return []
        profiler, self._profiler = self._profiler, None
        self._begin(None)
        profiler.stop()
        try:
            profiler.export_chrome_trace(str(self.path))
            self.path.chmod(0o600)
        except (OSError, RuntimeError) as error:
            return [self._lost(str(error))]
        return [Notice(f"wrote {self.path}: open it in Perfetto (ui.perfetto.dev) or chrome://tracing")]

    def _lost(self, why: str) -> Notice:
        return Notice(f"train.trace is {self._window}, but there is no {self.path}: {why}", "no_trace")

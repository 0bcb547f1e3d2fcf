"""What ranks that train together send each other, and how much of each rank's time that takes, for logs and run.json.

A step ends when the slowest rank has sent its part, so all ranks take as long; the slowest is the one that waits least
for the others.
"""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

from typing_extensions import override

from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.run.meters import LoopPart, Session
from hotrow.run.record import PHASES, State


class WireMeter(LoopPart):
    """Bytes that ranks send in training steps, by purpose, and their seconds by phase. `window` and `record` are
    collective: the ranks tell each other theirs, and the first rank's record has them all.

    It counts between the laps of the run's clock, so that exchanges of an evaluation, of a checkpoint, or of these
    figures are not part of a step.
    """

    def __init__(self, comm: Communicator, session: Session, *, wire_dtype: str) -> None:
        self._comm, self._session, self._wire_dtype = comm, session, wire_dtype
        self._in_steps: Counter[str] = Counter()
        self._seen = self._now()
        self._logged: Counter[str] | None = None
        """What was counted at the last `window`."""

    def lap(self, phase: str | None) -> None:
        """Counts what was sent in a lap of the clock."""
        now = self._now()
        if phase is not None:
            self._in_steps += now - self._seen
        self._seen = now

    @override
    def window(self) -> dict[str, Any]:
        now, before = self._counted(), _steps(self._session.before) if self._logged is None else self._logged
        self._logged = now
        figures = self._figures(now - before)
        return {name: figures[name] for name in ("wire_bytes_per_step", "slowest_rank")}

    @override
    def record(self) -> dict[str, Any]:
        parts, figures = self._comm.ranks.micro_batches, self._figures(self._counted() - _steps(self._session.before))
        facts = {"num_ranks": self._comm.size, "micro_batches": parts, "wire_dtype": self._wire_dtype}
        return {"ranks": {**facts, **figures}}

    def _now(self) -> Counter[str]:
        return Counter({**self._comm.counts.sent_bytes, "exchange": int(1e9 * self._comm.counts.exchange_s)})

    def _counted(self) -> Counter[str]:
        """Returns what this rank sent in steps of this session, and what its steps took, over all sessions."""
        return self._in_steps + _steps(self._session.state)

    def _figures(self, own: Counter[str]) -> dict[str, Any]:
        """Returns figures of all ranks; own: what this rank counted."""
        found = everyone(self._comm, {"host": socket.gethostname(), **own})
        steps = max(1, own["steps"])
        sent = sorted({name for each in found for name in each} - {"host", "steps", *_TIMES})
        means = {name: round(sum(each.get(name, 0) for each in found) / len(found) / steps) for name in sent}
        of_ranks = [_times(each, steps) for each in found]
        busy = [each["step_ms"] - each["exchange_ms"] for each in of_ranks]
        return {"wire_bytes_per_step": means, "of_ranks": of_ranks, "slowest_rank": busy.index(max(busy))}


def _steps(state: State) -> Counter[str]:
    ns = {f"{phase} ns": int(1e9 * seconds) for phase, seconds in state.seconds.items()}
    return Counter({"steps": state.step, **ns})


_TIMES = ("exchange", *(f"{phase} ns" for phase in PHASES))


def _times(counted: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns a rank's host and mean milliseconds of its steps: by phase, and of them in exchanges with other ranks."""
    ms = {phase: round(counted.get(f"{phase} ns", 0) / 1e6 / steps, 4) for phase in PHASES}
    exchange_ms = round(counted.get("exchange", 0) / 1e6 / steps, 4)
    return {"host": counted["host"], **ms, "step_ms": round(sum(ms.values()), 4), "exchange_ms": exchange_ms}

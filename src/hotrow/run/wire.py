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
from hotrow.parallel.world import World
from hotrow.run.meters import CountsApart, Session, sum_of
from hotrow.run.record import PHASES, State


class WireMeter(CountsApart):
    """Bytes that ranks send in training steps, by purpose, and their seconds by phase. `window` and `record` are
    collective: the ranks tell each other theirs, and the first rank's record has them all.
    """

    def __init__(self, world: World, session: Session, *, wire_dtype: str) -> None:
        super().__init__(lambda: {"sent": {**world.sent_bytes}, "ns": {"exchange": int(1e9 * world.exchange_s)}})
        self._world, self._session, self._wire_dtype = world, session, wire_dtype
        self._sent_before = sum_of(self._training().values())
        self._logged: Counter[str] | None = None
        """What was counted at the last `window`."""

    @override
    def window(self) -> dict[str, Any]:
        now, before = self._counted(), self._before() if self._logged is None else self._logged
        self._logged = now
        figures = self._figures(now - before)
        return {name: figures[name] for name in ("wire_bytes_per_step", "slowest_rank")}

    @override
    def record(self) -> dict[str, Any]:
        parts, figures = self._world.micro_batches, self._figures(self._counted() - self._before())
        facts = {"num_ranks": self._world.size, "micro_batches": parts, "wire_dtype": self._wire_dtype}
        return {"ranks": {**facts, **figures}}

    def _counted(self) -> Counter[str]:
        """Returns what this rank counted in training so far, and what its steps took, over all sessions."""
        return sum_of(self._training().values()) + _steps(self._session.state)

    def _before(self) -> Counter[str]:
        """Returns what was counted when this session began."""
        return self._sent_before + _steps(self._session.before)

    def _figures(self, own: Counter[str]) -> dict[str, Any]:
        """Returns figures of all ranks; own: what this rank counted."""
        found = everyone(self._world, {"host": socket.gethostname(), **own})
        steps = max(1, own["steps"])
        sent = sorted({name for each in found for name in each} - {"host", "steps", *_TIMES})
        means = {name: round(sum(each.get(name, 0) for each in found) / len(found) / steps) for name in sent}
        of_ranks = [_times(each, steps) for each in found]
        busy = [each["step_ms"] - each["exchange_ms"] for each in of_ranks]
        return {
            "wire_bytes_per_step": means,
            "of_ranks": of_ranks,
            "slowest_rank": busy.index(max(busy)),
        }


def _steps(state: State) -> Counter[str]:
    ns = {f"{phase} ns": int(1e9 * seconds) for phase, seconds in state.seconds.items()}
    return Counter({"steps": state.step, **ns})


_TIMES = ("exchange", *(f"{phase} ns" for phase in PHASES))


def _times(counted: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns a rank's host and mean milliseconds of its steps: by phase, and of them in exchanges with other ranks."""
    ms = {phase: round(counted.get(f"{phase} ns", 0) / 1e6 / steps, 4) for phase in PHASES}
    exchange_ms = round(counted.get("exchange", 0) / 1e6 / steps, 4)
    return {"host": counted["host"], **ms, "step_ms": round(sum(ms.values()), 4), "exchange_ms": exchange_ms}

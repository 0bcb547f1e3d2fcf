"""What surrounds a training session: its clock, its threads, and the signals that end it in good order."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal

import torch

from hotrow.base.machine import default_threads, numa_nodes, usable_cores
from hotrow.kernels import ops
from hotrow.run.record import PHASES


class StepClock:
    """Seconds spent in each of PHASES since it was made: `lap(phase)` books the time since the last lap."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.num_steps = 0
        self._last = time.perf_counter()

    def lap(self, phase: str | None) -> None:
        """Book the time since the last lap under `phase`; None: it is nobody's (evaluations, checkpoints)."""
        now = time.perf_counter()
        if phase is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def end_step(self) -> None:
        """Count a step."""
        self.num_steps += 1

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds per step and phase."""
        return {phase: round(1e3 * seconds / max(1, self.num_steps), 4) for phase, seconds in self.seconds.items()}


Pin = Literal["auto", "cores", "off"]


@contextmanager
def threads(number: int | Literal["auto"], *, pin: Pin = "off") -> Iterator[int]:
    """Torch and the kernels use `number` threads inside the block; "auto": `default_threads`.

    pin: see `cores_to_pin`; where the system refuses, a warning says so. Afterwards all is as it was.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(default_threads() if number == "auto" else number)
    used = torch.get_num_threads()
    nodes = numa_nodes()
    cores, free = cores_to_pin(pin, used, nodes), sorted(core for node in nodes for core in node)
    if cores and ops.pin_threads([[core] for core in cores]) < used:
        warnings.warn(
            f"the system did not pin all {used} threads to cores {cores}; they run where it puts them", stacklevel=3
        )
    try:
        yield used
    finally:
        if cores:
            ops.pin_threads([free] * used)
        torch.set_num_threads(before)


def describe_threads() -> str:
    """How many threads torch and the kernels use here, and how to use all cores, for the first line of a run."""
    used, cores = torch.get_num_threads(), usable_cores()
    more = f" of {cores} cores (train.threads: {cores} uses all)" if used < cores else ""
    return f"{used} thread{'' if used == 1 else 's'}{more}"


def cores_to_pin(pin: Pin, num_threads: int, nodes: Sequence[Sequence[int]]) -> list[int] | None:
    """The core of each thread, or None where threads stay free.

    nodes: `numa_nodes()`. "off": free. "cores": one core each, node after node, so that neighbours share a memory.
    "auto": as "cores" where there are several nodes, whose memory a moved thread would leave behind, and a core for
    each thread; free elsewhere, where pinning gains nothing and harms as soon as another process wants the core.
    Raises ValueError for "cores" with more threads than cores.
    """
    cores = [core for node in nodes for core in node]
    if pin == "off" or (pin == "auto" and (len(nodes) == 1 or num_threads > len(cores))):
        return None
    if num_threads > len(cores):
        raise ValueError(
            f"train.pin is 'cores', but {num_threads} threads have {len(cores)} cores; lower train.threads or set "
            "train.pin to off"
        )
    return cores[:num_threads]


class Interrupt:
    """Inside the block the first SIGINT or SIGTERM is only noted in `signal`; the next one acts as it did before.

    Outside the main thread signals cannot be caught, and stay as they are.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        """Start noting."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        print("\nfinishing this step and saving a checkpoint; once more aborts", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Signals act as before."""
        self._restore()

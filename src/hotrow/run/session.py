"""What surrounds a training session: its threads, and the signals that end it in good order."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal

import torch

from hotrow.base.machine import default_threads, numa_nodes, usable_cores
from hotrow.kernels import ops

Pin = Literal["auto", "cores", "off"]


@contextmanager
def threads(number: int | Literal["auto"], *, pin: Pin = "off") -> Iterator[int]:
    """Makes torch and the kernels use `number` threads inside the block; "auto": `default_threads`.

    pin: see `cores_to_pin`; if the system refuses to pin, a warning says so. Afterwards the old number holds again.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(default_threads() if number == "auto" else number)
    used = torch.get_num_threads()
    nodes = numa_nodes()
    cores, free = cores_to_pin(pin, used, nodes), sorted(core for node in nodes for core in node)
    if cores and ops.pin_threads([[core] for core in cores]) < used:
        warnings.warn(
            f"the system did not pin all {used} threads to cores {cores}; they run wherever it puts them", stacklevel=3
        )
    try:
        yield used
    finally:
        if cores:
            ops.pin_threads([free] * used)
        torch.set_num_threads(before)


def describe_threads() -> str:
    """Returns how many threads torch and the kernels use, and how to use all cores, for the first line of a run."""
    used, cores = torch.get_num_threads(), usable_cores()
    more = f" of {cores} cores (train.threads: {cores} uses all)" if used < cores else ""
    return f"{used} thread{'' if used == 1 else 's'}{more}"


def cores_to_pin(pin: Pin, num_threads: int, nodes: Sequence[Sequence[int]]) -> list[int] | None:
    """Returns the core of each thread, or None if threads are not pinned.

    nodes: `numa_nodes()`. "off": not pinned. "cores": one core each, node after node, so that neighbours share a
    memory. "auto": as "cores" if there are several nodes and a core for each thread, because a thread that moves to
    another node leaves its memory behind; else not pinned, because with one node pinning gains nothing and harms as
    soon as another process wants the core. Raises ValueError for "cores" with more threads than cores.
    """
    cores = [core for node in nodes for core in node]
    if pin == "off" or (pin == "auto" and (len(nodes) == 1 or num_threads > len(cores))):
        return None
    if num_threads > len(cores):
        raise ValueError(
            f"train.pin is 'cores', but there are {num_threads} threads and {len(cores)} cores; lower train.threads or "
            "set train.pin to off"
        )
    return cores[:num_threads]


class Interrupt:
    """A block in which the first SIGINT or SIGTERM is only noted in `signal`; the next one acts as usual.

    Outside the main thread signals cannot be caught, and act as usual.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        """Starts to note signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        print("\nfinishing this step and saving a checkpoint; press again to abort", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets signals act as before."""
        self._restore()

"""What other processes and the hypervisor take from this process, on Linux."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

MIN_COUNTED_S = 0.2
"""The system counts processor time in ticks of 10 ms, too coarse for a shorter time than this."""


def stolen_s() -> float:
    """Returns the processor seconds that the hypervisor took since the machine started; 0 if unknown."""
    return _cpu_ticks((7,), Path("/proc")) / os.sysconf("SC_CLK_TCK")


def others_s(processes: Iterable[int], *, of_disk: bool = False, proc: Path = Path("/proc")) -> float:
    """Returns the processor seconds of all but `processes` and their ended children; 0 if unknown.

    of_disk: also without interrupts and the kernel's threads, which serve the I/O of `processes`; a container does not
    see these threads, and they count as others there.
    """
    own = sum(_process_ticks(proc / str(process)) for process in processes)
    if of_disk:
        own += sum(_process_ticks(process, of_kernel=True) for process in proc.glob("[0-9]*"))
    columns = (0, 1, 2) if of_disk else (0, 1, 2, 5, 6)
    return max(0, _cpu_ticks(columns, proc) - own) / os.sysconf("SC_CLK_TCK")


_KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD, among the flags of a process in its file `stat`."""


def _process_ticks(folder: Path, *, of_kernel: bool = False) -> int:
    """Returns the user and system time of a process and its ended children, in ticks; 0 if it has ended.

    folder: in /proc. of_kernel: 0 also if it is not a thread of the kernel.
    """
    with contextlib.suppress(OSError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        if not of_kernel or int(fields[6]) & _KERNEL_THREAD:
            return sum(map(int, fields[11:15]))
    return 0


def _cpu_ticks(columns: Sequence[int], proc: Path) -> int:
    """Returns the sum of these columns of the first line of /proc/stat; 0 if there is no such file."""
    stat = proc / "stat"
    if not stat.exists():
        return 0
    ticks = stat.read_text().split("\n", 1)[0].split()[1:]
    return sum(int(ticks[column]) for column in columns)


def waited_s(processes: Iterable[int]) -> float:
    """Returns the seconds that threads of `processes` were ready to run but had no processor; 0 if unknown.

    The sum is over their present threads, from the start of each.
    """
    waited_ns = 0
    for process in processes:
        for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):  # a thread that ended, a kernel without the numbers
                waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


class Disturbance:
    """What others take from this process, and from the `workers` it waits for, from now on.

    of_disk: they read and write a disk, so the kernel's threads and interrupts work for them and are not others.
    """

    def __init__(self, workers: Sequence[int] = (), *, of_disk: bool = False) -> None:
        self._processes, self._of_disk = (os.getpid(), *workers), of_disk
        self._before, self._start = self._now(), time.perf_counter()

    def _now(self) -> tuple[float, float, float]:
        others = others_s(self._processes, of_disk=self._of_disk)
        return stolen_s(), waited_s(self._processes), others

    def share(self) -> float:
        """Returns the share of the time since then in which the hypervisor or other processes had the processors.

        Waiting counts only as far as other processes computed: threads also wait for one another.
        """
        seconds = time.perf_counter() - self._start
        stolen, waited, others = (now - before for now, before in zip(self._now(), self._before, strict=True))
        if seconds >= MIN_COUNTED_S:
            waited = min(waited, others)
        return (stolen + max(0.0, waited)) / seconds

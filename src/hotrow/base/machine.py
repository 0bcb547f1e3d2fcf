"""This machine: what it is, how much of it this process may use, and what other processes take from it.

Everything that reads cgroups is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrow.base.version import __version__

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
ISAS = ("baseline", "avx2", "avx512")
"""The instruction sets that the native kernels are built for, narrowest first."""


def versions() -> dict[str, str]:
    """Returns the versions of hotrow, Python, torch and numpy."""
    names = {"hotrow": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**names, "numpy": np.__version__}


def host_facts() -> dict[str, Any]:
    """Returns the kind of machine, without the names of host or user."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    # Hypervisors shorten names: "AMD EPYC" may be any of five generations.
    numbers = re.search(r"^cpu family\s*:\s*(\d+)$.*?^model\s*:\s*(\d+)$", cpuinfo(), re.MULTILINE | re.DOTALL)
    generation = f", family {numbers[1]} model {numbers[2]}" if numbers else ""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "platform": platform.platform(),
        "cpu": f"{model[1]}{generation}" if model else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory,
    }


def cpuinfo() -> str:
    """Returns what the kernel says about the processor, or an empty text."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def isa_limit() -> str | None:
    """Returns the widest instruction set that the environment variable HOTROW_ISA allows; None if it is not set.

    The variable makes a processor look like an older one to hotrow's kernels, to torch's, and in reports.
    Raises ValueError for an unknown word.
    """
    limit = os.environ.get("HOTROW_ISA") or None
    if limit is not None and limit not in ISAS:
        raise ValueError(f"HOTROW_ISA is {limit!r}; set it to one of {', '.join(ISAS)}, or leave it unset")
    return limit


def lacks_bfloat16_products() -> bool:
    """Returns whether the processor is known to lack instructions that multiply bfloat16 (x86-64 and arm64)."""
    if isa_limit() in ("baseline", "avx2"):
        return True
    features = _features()
    return features is not None and not {"avx512_bf16", "amx_bf16", "bf16"} & features


@functools.cache
def has_amx() -> bool:
    """Returns whether the processor has AMX's tiles of bfloat16, which torch uses."""
    return "amx_bf16" in (_features() or ())


def _features() -> set[str] | None:
    """Returns the processor's features as the kernel names them; None if it does not say."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo(), re.MULTILINE)
    return None if found is None else set(found[1].split())


def usable_cores() -> int:
    """Returns the number of cores this process may use: its affinity, limited by the CPU quotas of its cgroups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def default_threads(num_processes: int = 1) -> int:
    """Returns the number of threads to use by default: torch's, as set by OMP_NUM_THREADS or torch.set_num_threads.

    Without OMP_NUM_THREADS it is at most `usable_cores`, because torch ignores CPU quotas.
    num_processes: processes of a run that share these cores. If there are several, each gets its share of the cores,
    unless OMP_NUM_THREADS says more than 1, which is what torchrun sets by itself.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    if num_processes > 1 and given in (None, "1"):
        return max(1, usable_cores() // num_processes)
    own = torch.get_num_threads()
    return own if given is not None else min(own, usable_cores())


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """Returns the least CPU quota, in cores, of this process's cgroup and its parents (v1 or v2)."""
    quotas = [_folder_quota(folder, version) for version, folder in cgroup_folders("cpu", root, membership)]
    return min((each for each in quotas if each is not None), default=None)


def _folder_quota(folder: Path, version: int) -> float | None:
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)


# ---- memory


def available_memory_bytes() -> int:
    """Returns how many bytes this process may still take without swapping, here and in all enclosing cgroups."""
    cgroup = _cgroup_available_bytes(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return min(value for value in (_machine_available_bytes(), cgroup) if value is not None)


def _machine_available_bytes() -> int:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux: the size of the machine is all that can be asked portably
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    assert match is not None, "Linux older than 3.14 is not supported"
    return int(match[1]) * 1024


def cgroup_folders(controller: str, root: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """Yields the version (1 or 2) and folder of this process's cgroup and its parents, for one controller.

    root: where they are mounted, such as /sys/fs/cgroup; membership: such as /proc/self/cgroup. Folders may be absent.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, base = (1, root / controller) if controllers else (2, root)
        # Inside a container the path may be the host's and absent here; the limits of its visible parents still hold.
        relative = Path(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            yield version, base / folder


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _cgroup_available_bytes(root: Path, membership: Path) -> int | None:
    """Returns the least of limit - use + reclaimable page cache over this process's cgroup and its parents."""
    folders = cgroup_folders("memory", root, membership)
    free = [_cgroup_folder_bytes(folder, *_MEMORY_FILES[version]) for version, folder in folders]
    return min((each for each in free if each is not None), default=None)


def _cgroup_folder_bytes(folder: Path, limit: str, use: str, cache: str) -> int | None:
    try:
        limit_text = (folder / limit).read_text().strip()
        if limit_text == "max":
            return None
        free = int(limit_text) - int((folder / use).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    match = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
    return max(0, free + (int(match[1]) if match else 0))


# ---- what others do to this process

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


def end_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends, however that is."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no such call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

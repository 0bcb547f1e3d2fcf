"""This machine: what it is, and how much of it this process may use.

Everything that reads cgroups is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
from collections.abc import Iterator
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
    """Returns the kernel's description of the processor, or an empty text."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def isa_limit() -> str | None:
    """Returns the widest instruction set that the environment variable HOTROW_ISA allows; None if it is not set. The
    variable makes a processor look like an older one to hotrow's kernels, to torch's, and in reports. Raises ValueError
    for an unknown word."""
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
    """Yields the version (1 or 2) and folder of this process's cgroup and its parents, for one controller. root: where
    they are mounted, such as /sys/fs/cgroup; membership: such as /proc/self/cgroup. Folders may be absent."""
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


def end_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends, for whatever reason."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no such call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

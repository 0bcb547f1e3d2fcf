"""What this machine is and how much of it this process may use, for reports and for `threads: auto`."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Versions of what computes."""
    from hotrow import __version__

    names = {"hotrow": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**names, "numpy": np.__version__}


def host_facts() -> dict[str, Any]:
    """What kind of machine this is; no names of host or user."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "platform": platform.platform(),
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory,
    }


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by a cgroup's CPU quota (v1 or v2) where there is one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _cgroup_quota(root: Path) -> float | None:
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota.strip() in ("max", "-1") else int(quota) / int(period)

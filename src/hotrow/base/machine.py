"""What this machine is and how much of it this process may use, for reports and for `threads: auto`."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrow.base.files import cgroup_folders

ISAS = ("baseline", "avx2", "avx512")
"""Instruction sets that the native kernels are built for, narrowest first."""


def versions() -> dict[str, str]:
    """Versions of what computes."""
    from hotrow import __version__

    names = {"hotrow": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**names, "numpy": np.__version__}


def host_facts() -> dict[str, Any]:
    """What kind of machine this is; no names of host or user."""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    # Hypervisors cut names short: "AMD EPYC" may be any of five generations.
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
    """What the kernel says of the processor; empty where it says nothing."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def isa_limit() -> str | None:
    """The widest instruction set that the environment variable HOTROW_ISA allows; None if it is not set.

    It makes a processor behave like an older one: hotrow's kernels, torch's and all that hotrow says of the machine.
    Raises ValueError for an unknown word.
    """
    limit = os.environ.get("HOTROW_ISA") or None
    if limit is not None and limit not in ISAS:
        raise ValueError(f"HOTROW_ISA is {limit!r}; set it to one of {', '.join(ISAS)}, or leave it unset")
    return limit


def lacks_bfloat16_products() -> bool:
    """Whether the processor is known to have no instructions that multiply bfloat16: x86-64's or arm64's."""
    if isa_limit() in ("baseline", "avx2"):
        return True
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo(), re.MULTILINE)
    return features is not None and not {"avx512_bf16", "amx_bf16", "bf16"} & set(features[1].split())


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the CPU quota of its cgroup or one around it."""
    affinity = len(process_cores())
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def default_threads() -> int:
    """Threads if nobody asks for a number: torch's, as OMP_NUM_THREADS or torch.set_num_threads has set it.

    Without OMP_NUM_THREADS no more than `usable_cores`: torch does not know of CPU quotas.
    """
    own = torch.get_num_threads()
    return own if "OMP_NUM_THREADS" in os.environ else min(own, usable_cores())


@functools.cache
def process_cores() -> frozenset[int]:
    """The cores this process may use, as it was started: asked once, because pinned threads know only their own."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def numa_nodes() -> list[list[int]]:
    """The cores this process may use, by NUMA node; within a node each core's second hardware threads come last."""
    return nodes_of(process_cores(), Path("/sys/devices/system"))


def nodes_of(mine: Set[int], system: Path) -> list[list[int]]:
    """`numa_nodes` of the cores `mine`, as the folder `system` describes the machine; one node where it does not."""
    folders = sorted((system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    nodes = [mine & _core_list(folder / "cpulist") for folder in folders]
    if set().union(*nodes) != mine:
        nodes = [set(mine)]
    return [_siblings_last(node, system) for node in nodes if node]


def _siblings_last(cores: Set[int], system: Path) -> list[int]:
    def place(core: int) -> tuple[int, int]:
        siblings = _core_list(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list") | {core}
        return sorted(siblings & cores).index(core), core

    return sorted(cores, key=place)


def _core_list(path: Path) -> set[int]:
    """A list such as "0-3,8" as a set; empty where there is none."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return set()
    return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """The tightest CPU quota, in cores, over this process's cgroup and its parents, v1 or v2."""
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

"""A memory cgroup for one process, which limits its DRAM including the page cache. Linux, cgroup v1 and v2.

Groups are made below the group of this process, so that the limits above it still hold.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from hotrow.base.machine import cgroup_folders

MOUNT = Path("/sys/fs/cgroup")
CURE = "run as root, or under `systemd-run --scope -p Delegate=yes`"


class GroupError(RuntimeError):
    """No memory group can be made here; the message says why."""


class MemoryGroup:
    """A group, without a limit until `limit` is called. A context manager, which removes it. Raises GroupError."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or own_group()
        self.path = parent / f"hotrow-{uuid.uuid4().hex[:12]}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise GroupError(f"no memory group can be made in {parent} ({error.strerror}): {CURE}") from None
        self._v1 = (self.path / "memory.limit_in_bytes").exists()
        if not self._v1 and not (self.path / "memory.max").exists():
            self.path.rmdir()
            raise GroupError(f"groups in {parent} do not limit memory (no memory controller): {CURE}")

    @property
    def entry(self) -> Path:
        """The file into which a process writes its id to enter the group."""
        return self.path / "cgroup.procs"

    def limit(self, num_bytes: int) -> None:
        """Limits memory and page cache. The system reclaims what is above now, and swaps nothing. Raises GroupError."""
        limits = {"memory.swap.max": 0, "memory.max": num_bytes}
        if self._v1:  # in this order: the limit of memory and swap may not be below the limit of memory
            limits = {"memory.limit_in_bytes": num_bytes, "memory.memsw.limit_in_bytes": num_bytes}
        for name, limit in limits.items():
            if "sw" in name and not (self.path / name).exists():
                continue  # this system has no swap, or does not count it by groups
            try:
                (self.path / name).write_text(str(limit))
            except OSError as error:
                raise GroupError(f"{self.path / name} takes no limit of {limit:,} bytes ({error.strerror})") from None

    def used_bytes(self) -> int:
        """Returns the bytes in use without the page cache, which the system can reclaim."""
        fields = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        cached = int(fields["total_cache"] if self._v1 else fields["file"])
        return int((self.path / ("memory.usage_in_bytes" if self._v1 else "memory.current")).read_text()) - cached

    def peak_bytes(self) -> int | None:
        """Returns the peak use in bytes, with the page cache; None if unknown."""
        file = self.path / ("memory.max_usage_in_bytes" if self._v1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def num_killed(self) -> int:
        """Returns how many processes of the group the system ended for memory."""
        file = self.path / ("memory.oom_control" if self._v1 else "memory.events")
        return int(dict(line.split() for line in file.read_text().splitlines()).get("oom_kill", 0))

    def remove(self) -> None:
        """Removes the group. Its processes must have ended."""
        for _ in range(100):  # the system takes a moment to forget a process
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise OSError(f"{self.path} cannot be removed: a process is in it still")

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def own_group(mount: Path = MOUNT, membership: Path = Path("/proc/self/cgroup")) -> Path:
    """Returns the folder of this process's memory group. Raises GroupError."""
    for version, folder in sorted(cgroup_folders("memory", mount, membership), key=lambda found: found[0]):
        # Version 2 has no memory controller in a folder that merely lies at the mount point.
        if folder.is_dir() and (version == 1 or (mount / "cgroup.controllers").exists()):
            return folder
    raise GroupError(f"this system has no memory groups under {mount}, so memory and page cache cannot be limited")


def enter_and(group: MemoryGroup | None, command: list[str]) -> list[str]:
    """Returns a command that enters the group before it runs `command`."""
    if group is None:
        return command
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', os.fspath(group.entry), *command]

"""What a run may use of a machine: memory for each of its processes, and the disk of a folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hotrow.base.files import disk_free_bytes
from hotrow.base.machine import available_memory_bytes
from hotrow.costs.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room of one process: `Room.here()` on this machine now, `Room.of(machine)` on one that a file describes."""

    dram_bytes: int
    """DRAM that the process may take, for tables and beside them."""
    local_size: int = 1
    """Processes of the run on the machine, which share its memory equally."""
    machine: Hardware | None = None
    """The described machine; if None, this one."""

    @classmethod
    def here(cls, local_size: int = 1) -> Room:
        return cls(dram_bytes=available_memory_bytes() // local_size, local_size=local_size)

    @classmethod
    def of(cls, machine: Hardware, local_size: int = 1) -> Room:
        dram_bytes = int(machine.dram_bytes.value) // local_size
        return cls(dram_bytes=dram_bytes, local_size=local_size, machine=machine)

    def free_bytes(self, folder: Path) -> int:
        """Returns what is free on the disk of `folder`; without limit if a described machine does not say."""
        if self.machine is None:
            return disk_free_bytes(folder)
        disk = self.machine.disk_at(folder)
        capacity = None if disk is None else disk.capacity_bytes
        return sys.maxsize if capacity is None else int(capacity.value)

    @property
    def owner(self) -> str:
        """Whose room it is, in words for an error."""
        return "this process" if self.local_size == 1 else f"each of the {self.local_size} processes on this machine"

"""The memory that a run may use, for each of its processes."""

from __future__ import annotations

from dataclasses import dataclass

from hotrow.base.machine import available_memory_bytes


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room of one process; `Room.here()` is what there is on this machine now."""

    dram_bytes: int
    """DRAM that the process may take, for tables and beside them."""
    local_size: int = 1
    """Processes of the run on the machine, which share its memory equally."""

    @classmethod
    def here(cls, local_size: int = 1) -> Room:
        return cls(dram_bytes=available_memory_bytes() // local_size, local_size=local_size)

    @property
    def owner(self) -> str:
        """Whose room it is, in words for an error."""
        return "this process" if self.local_size == 1 else f"each of the {self.local_size} processes on this machine"

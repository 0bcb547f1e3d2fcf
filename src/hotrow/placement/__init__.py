"""Where the rows of tables lie: DRAM, tiers with files below them, slots on a device, copies of hot rows.

`place` makes a placement from what a user passes as `memory`; base.py says what a placement is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hotrow.placement.base import Placement, PlacementFactory
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.placement.device import Backing, Device
from hotrow.placement.dram import Dram
from hotrow.placement.tiers import Tiers
from hotrow.tables import TableConfig

AnyMemory: TypeAlias = Memory | DeviceMemory | PlacementFactory | str | None
"""What `EmbeddingCollection(memory=...)` takes."""


def place(tables: Sequence[TableConfig], memory: AnyMemory, *, seed: int) -> Placement:
    """Makes the placement of `tables` that `memory` asks for, the argument of `EmbeddingCollection(memory=...)`. Raises
    ValueError for anything else, and if the tables are larger than the memory there is."""
    if isinstance(memory, DeviceMemory):
        return Device(memory, _backing(tables, memory.below, seed=seed))
    if isinstance(memory, Memory) or memory is None or memory == "dram":
        return _backing(tables, memory, seed=seed)
    if isinstance(memory, str) or not callable(getattr(memory, "place", None)):
        raise ValueError(
            f"memory is {memory!r}; pass None or 'dram' (all rows in DRAM), hotrow.Memory or hotrow.DeviceMemory"
        )
    return memory.place(tables, seed=seed)


def _backing(tables: Sequence[TableConfig], memory: Memory | str | None, *, seed: int) -> Backing:
    return Tiers(tables, memory, seed=seed) if isinstance(memory, Memory) else Dram(tables, seed=seed)

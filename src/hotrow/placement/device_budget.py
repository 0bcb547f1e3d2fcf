"""How much memory of a device slots may take, and how it is shared: bytes in, slots per table out. No arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hotrow.base.files import parse_bytes
from hotrow.base.machine import available_memory_bytes
from hotrow.placement.budget import SMALL_TABLES_SHARE, Memory, TableDemand, TableSlots

MOVING_SHARE = 8
"""This part of the budget is for rows on their way, half in each direction; larger moves go in pieces."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Slots in the memory of a device, where lookups and updates run, in front of tables in DRAM, or in tiers.

        emb = hotrow.EmbeddingCollection(tables, memory=hotrow.DeviceMemory(hbm="8GiB"))
        memory = hotrow.DeviceMemory(hbm="8GiB", below=hotrow.Memory(dram="64GiB", ssd="/nvme/emb"))

    hbm: bytes of device memory for slots (weights and optimizer states) and for rows on their way. below: where the
    rows lie that have no slot; None: all rows lie in DRAM. device: of torch, such as "cuda:0"; "cpu" only where
    Triton's interpreter runs the kernels. plan: shares the bytes among the tables, given what each would need, as
    `Memory.plan`; None: `plan_slots_on_device`.
    """

    hbm: int | str
    below: Memory | None = None
    device: str = "cuda"
    plan: Callable[[Sequence[TableDemand], int], Sequence[TableSlots]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.hbm, int | str) or isinstance(self.hbm, bool) or parse_bytes(self.hbm) <= 0:
            raise ValueError(f"DeviceMemory: hbm is {self.hbm!r}; it must be positive bytes, such as '8GiB'")
        if self.below is not None and not isinstance(self.below, Memory):
            raise ValueError(f"DeviceMemory: below is {self.below!r}; pass None (all rows in DRAM) or hotrow.Memory")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"DeviceMemory: device is {self.device!r}, but torch {torch.__version__} finds no CUDA device here; "
                "leave memory out, or use hotrow.Memory, to train on the CPU"
            )

    @property
    def hbm_bytes(self) -> int:
        """`hbm` as a number."""
        return parse_bytes(self.hbm)

    def slots(self, tables: Sequence[TableDemand], hbm_bytes: int | None = None) -> list[TableSlots]:
        """Of each table, as the plan has it for this budget or another."""
        plan = self.plan or plan_slots_on_device
        budget_bytes = slot_bytes(self.hbm_bytes if hbm_bytes is None else hbm_bytes)
        return [TableSlots(*map(int, own)) for own in plan(tables, budget_bytes)]

    def checked_slots(self, tables: Sequence[TableDemand]) -> list[TableSlots]:
        """`slots`, if there is one for each table, within the budget, and that within the device; else ValueError."""
        if self.hbm_bytes > (free := free_bytes(self.device)):
            raise ValueError(
                f"DeviceMemory: hbm is {self.hbm_bytes:,} bytes, and of the memory of {self.device} {free:,} are free; "
                "lower it, and leave room there for dense layers and for the rows of a step"
            )
        slots = self.slots(tables)
        for table, own in zip(tables, slots, strict=True):
            if min(own) < 0 or not 0 < sum(own) <= table.num_rows:
                raise ValueError(
                    f"DeviceMemory: table {table.name!r} would have {own.pinned:,} pinned and {own.cached:,} other "
                    f"slots for its {table.num_rows:,} rows in hbm of {self.hbm_bytes:,} bytes; "
                    f"{raise_to(self.least_bytes(tables, [1] * len(tables)))}"
                )
        needed = sum(sum(own) * table.record_bytes for table, own in zip(tables, slots, strict=True))
        if needed > slot_bytes(self.hbm_bytes):
            raise ValueError(
                f"DeviceMemory: plan takes {needed:,} bytes; there are {slot_bytes(self.hbm_bytes):,} for slots"
            )
        return slots

    def least_bytes(self, tables: Sequence[TableDemand], needed: Sequence[int]) -> int:
        """The `hbm` that gives each table so many slots for rows that come and go, or all that it has rows for."""
        total = sum(table.num_rows * table.record_bytes for table in tables)
        low, high = 0, total * MOVING_SHARE // (MOVING_SHARE - 1) + MOVING_SHARE
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(tables, middle, needed) else (middle + 1, high)
        return high

    def _suffices(self, tables: Sequence[TableDemand], hbm_bytes: int, needed: Sequence[int]) -> bool:
        try:
            slots = self.slots(tables, hbm_bytes)
        except ValueError:  # a plan of the user's has a least budget
            return False
        return all(
            own.cached >= n or own.pinned >= table.num_rows for own, n, table in zip(slots, needed, tables, strict=True)
        )


def free_bytes(device: str) -> int:
    """Of the memory of a device, now."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return available_memory_bytes()


def raise_to(hbm_bytes: int) -> str:
    """The cure for a budget that is too small."""
    return f"raise it to {hbm_bytes:,} bytes (hbm={hbm_bytes})"


def slot_bytes(hbm_bytes: int) -> int:
    """What is left of a budget for slots."""
    return hbm_bytes - hbm_bytes // MOVING_SHARE


def plan_slots_on_device(tables: Sequence[TableDemand], budget_bytes: int) -> list[TableSlots]:
    """Small tables whole, smallest first, up to half of the budget; of the others as many rows each as are left for."""
    slots = [TableSlots(0, 0)] * len(tables)
    costs = [table.num_rows * table.record_bytes for table in tables]
    order = sorted(range(len(tables)), key=lambda t: costs[t])
    share = 1.0 if sum(costs) <= budget_bytes else SMALL_TABLES_SHARE
    left, limit = budget_bytes, budget_bytes * (1 - share)
    while order and left - costs[order[0]] >= limit:
        t = order.pop(0)
        slots[t], left = TableSlots(tables[t].num_rows, 0), left - costs[t]
    order.sort(key=lambda t: tables[t].num_rows)
    for k, t in enumerate(order):
        level = left // sum(tables[u].record_bytes for u in order[k:])
        slots[t] = TableSlots(0, min(tables[t].num_rows, level))
        left -= slots[t].cached * tables[t].record_bytes
    return slots

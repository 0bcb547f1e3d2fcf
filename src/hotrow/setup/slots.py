"""How DRAM is divided among the tables of a run, by access counts (divide.py); `memory.choose` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hotrow.base.files import disk_free_bytes, size
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.placement.budget import MIN_ROWS, Memory, TableDemand, TableSlots, Writes, plan_slots
from hotrow.setup.demand import accesses_of, demands_of, most_rows
from hotrow.setup.divide import Counted, CountsPlan, plan_by_counts
from hotrow.tables import TableConfig


def without_pieces(budget: int) -> int:
    """Returns what a budget leaves for tables beside pieces of checkpoints and rows that evaluations read."""
    return max(1, budget * 8 // 9, budget - (64 << 20))


@dataclass(frozen=True, kw_only=True)
class SlotPlanner:
    """Divides DRAM among tables; counts are read once for all amounts. memory: folders and options; its `dram` is not
    used. budget: bytes of DRAM for tables. training: if False, tables are only read, and counts do not matter."""

    config: Config
    tables: Sequence[TableConfig]
    memory: Memory
    budget: int = 0
    dataset: PackedDataset | None = None
    training: bool = True

    @cached_property
    def plain(self) -> list[TableDemand]:
        return demands_of(self.config, self.tables, training=self.training)

    @cached_property
    def plan(self) -> CountsPlan | None:
        """The plan by the accesses that preparation counted; None if it counted none, and if tables are only read."""
        if not self.training or self.dataset is None or not self.dataset.has_counts:
            return None
        num_rows = self.dataset.split("train").num_rows
        if not num_rows:
            return None
        num_steps = num_rows / min(self.config.train.batch_size, num_rows)
        return plan_by_counts(
            {t.name: Counted.of(t.name, accesses_of(t, self.dataset), num_steps) for t in self.tables},
            num_steps=num_steps,
            depth=self.config.tiers.lookahead,
            least_cached={t.name: max(MIN_ROWS, most_rows(self.config, t)) for t in self.tables},
        )

    def slots_in(self, memory: Memory) -> tuple[Memory, Sequence[TableSlots]]:
        """Returns how rows are written, and the slots that tables get, if they train with `memory`."""
        settled = self.settled(memory)
        demands = settled.with_places(self.plain)
        return settled, (memory.plan or plan_slots)(demands, settled.budget_bytes(demands))

    def divide(self, budget: int, writes: Writes) -> tuple[Memory, list[TableDemand], Sequence[TableSlots]]:
        """Returns a memory of `budget` bytes with its plan, what tables take then, and their slots. Raises ValueError
        if the smallest possible caches do not fit."""
        memory, demands, left = self._room(budget, writes)
        return replace(memory, plan=self.plan), demands, (self.plan or plan_slots)(demands, left)

    def _room(self, budget: int, writes: Writes) -> tuple[Memory, list[TableDemand], int]:
        """Returns a memory of `budget` bytes, what tables take then, and the bytes for their slots."""
        memory = replace(self.memory, dram=without_pieces(budget), writes=writes)
        settled = self.settled(memory)
        demands = settled.with_places(self.plain)
        return memory, demands, settled.budget_bytes(demands)

    def _lacks(self, slots: Sequence[TableSlots]) -> str | None:
        """Returns which table's cache would not hold the rows of a batch; None if all do."""
        for table, (pinned, cached) in zip(self.tables, slots, strict=True) if self.training else ():
            most = min(table.num_embeddings - pinned, most_rows(self.config, table))
            if cached < most:
                return (
                    f"table {table.name!r} would keep {cached:,} rows, but a step may look up {most:,} different ones"
                )
        return None

    def short(self, budget: int, writes: Writes) -> str | None:
        """Returns why `budget` bytes are not enough for a step; None if they are. All plans keep room for a batch."""
        if self.plan is not None:
            self.plan.uses(self.plain)  # what is wrong with counts, no budget would mend
        try:
            _, demands, left = self._room(budget, writes)
            slots = (self.plan or plan_slots)(demands, left)
        except ValueError:
            return "the smallest caches there are do not fit"
        return self._lacks(slots)

    def writes(self, budget: int) -> Writes:
        """Returns how rows are written: as asked, but in place if "auto" would leave too few slots to gather them."""
        asked = self.memory.writes
        return "in_place" if asked == "auto" and self.short(budget, asked) else asked

    def least_bytes(self, budget: int, writes: Writes) -> int:
        """Returns the smallest budget from `budget` on, to 64 KiB, that is enough for a step."""
        low, high = budget, 2 * budget
        while self.short(high, writes):
            low, high = high, 2 * high
        while high - low > 64 << 10:
            middle = (low + high) // 2
            low, high = (middle, high) if self.short(middle, writes) else (low, middle)
        return high

    def check(self, budget: int, *, beside: int) -> Memory:
        """Returns the memory of `budget` bytes with its plan. beside: bytes of `memory.dram` that are not in `budget`,
        because they are not for tables. Raises ValueError, with what is missing, if a table's cache would not hold the
        rows of a batch."""
        writes = self.writes(budget)
        if reason := self.short(budget, writes):
            least = self.least_bytes(budget, writes)
            raise ValueError(
                f"{size(budget)} is not enough memory for tables and optimizer state: {reason}. "
                f"{size(least - budget)} more are needed (memory.dram={-(-(least + beside) // 2**20)}MiB), or "
                f"a train.batch_size below {self.config.train.batch_size}"
            )
        memory, demands, slots = self.divide(budget, writes)
        self.settled(memory).plan_places(demands, slots)
        return memory

    def settled(self, memory: Memory) -> Memory:
        """Returns `memory` with "auto" of `writes` decided."""
        return memory.settled(self.plain, self._free_bytes)

    @cached_property
    def _free_bytes(self) -> int:
        return disk_free_bytes(self.memory.folder)

"""How any amount of DRAM is divided among the tables of a config: `choose` asks for the run's, `explain` for others.

Slots by access counts (solve.py) serve the rows that cost most if they are missing. If a hardware file says what a
miss costs on this disk, the division with the fastest predicted step is taken; else all misses cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hotrow.base.files import size
from hotrow.base.machine import default_threads
from hotrow.config.schema import Config
from hotrow.costs.cost import Prediction, predict
from hotrow.costs.demand import demands_of, most_rows, tables_of
from hotrow.costs.hardware import Disk, Gpu, Hardware
from hotrow.costs.solve import Counted, CountsPlan, TableUse, plan_by_counts
from hotrow.costs.traffic import traffic_of
from hotrow.costs.wire import Shared, share_of
from hotrow.costs.work import Work, read_counts, work_of
from hotrow.data.packed.reader import PackedDataset
from hotrow.parallel.messages import WireDtype
from hotrow.parallel.ranks import TransportName
from hotrow.parallel.shards import Shard
from hotrow.placement.budget import MIN_ROWS, Memory, TableDemand, TableSlots, Writes, plan_slots
from hotrow.setup.room import Room
from hotrow.tables import TableConfig


def looks_at_accesses(before: Config, after: Config) -> bool:
    """Returns whether steps of the two configs come to other rows, or have other rows in flight."""

    def steps(config: Config) -> tuple[object, ...]:
        return config.train.batch_size, config.train.epochs, config.train.max_steps, config.tiers.lookahead

    return steps(before) != steps(after)


def without_pieces(budget: int) -> int:
    """Returns what a budget leaves for tables beside pieces of checkpoints and rows that evaluations read."""
    return max(1, budget * 8 // 9, budget - (64 << 20))


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The ranks that share the tables of a run."""

    tables: Sequence[TableConfig]
    """Whole ones."""
    shards: Mapping[str, Shard]
    num_ranks: int
    micro_batches: int
    local_size: int = 1
    """Ranks on a machine."""
    wire_dtype: WireDtype = "fp32"
    transport: TransportName | None = None

    def share(self, whole: Work, held: Work, *, announced: bool) -> tuple[Work, Shared]:
        """Returns the work of a rank's samples and what sharing adds. whole: of all samples, on whole tables. held:
        what they ask of the rows that a rank holds. announced: see `share_of`.
        """
        return share_of(
            whole,
            held,
            self.shards,
            num_ranks=self.num_ranks,
            micro_batches=self.micro_batches,
            local_size=self.local_size,
            announced=announced,
            wire_dtype=self.wire_dtype,
            transport=self.transport,
        )


@dataclass(frozen=True, kw_only=True)
class SlotPlanner:
    """Divides DRAM among tables; counts are read once for all amounts.

    memory: folders and options; its `dram` is not used. budget: bytes of DRAM that there are for tables. hardware: what
    a miss costs, and what a step takes; if None, all misses cost the same, and nothing is predicted. room: of which the
    disk counts. sharing: the ranks of which one holds `tables`, parts of the run's; if None, this process trains alone.
    warmup: the first steps of the run, which predictions leave out.
    """

    config: Config
    tables: Sequence[TableConfig]
    memory: Memory
    budget: int = 0
    dataset: PackedDataset | None = None
    training: bool = True
    hardware: Hardware | None = None
    room: Room = field(default_factory=Room.here)
    sharing: Sharing | None = None
    warmup: int = 0
    _uses: dict[tuple[TableDemand, ...], list[TableUse]] = field(default_factory=dict, repr=False)
    _weighted: dict[tuple[TableDemand, ...], CountsPlan] = field(default_factory=dict, repr=False)

    @cached_property
    def plain(self) -> list[TableDemand]:
        return demands_of(self.config, self.tables, training=self.training)

    @property
    def needed_bytes(self) -> int:
        """Bytes of all tables and their optimizer state."""
        return sum(table.num_rows * table.record_bytes for table in self.plain)

    @cached_property
    def counted(self) -> dict[str, Counted]:
        """What was read of the tables' counts, once for the plan and for predictions; there must be a dataset."""
        assert self.dataset is not None
        return read_counts(self.config, self.tables, self.dataset)

    @cached_property
    def plan(self) -> CountsPlan | None:
        """The plan by the accesses that preparation counted; None if it counted none, and if tables are only read."""
        if not self.training or self.dataset is None or not self.dataset.has_counts:
            return None
        num_rows = self.dataset.split("train").num_rows
        if not num_rows:
            return None
        return plan_by_counts(
            self.counted,
            num_steps=num_rows / min(self.config.train.batch_size, num_rows),
            depth=self.config.tiers.lookahead,
            least_cached={t.name: max(MIN_ROWS, most_rows(self.config, t)) for t in self.tables},
        )

    def with_config(self, config: Config) -> SlotPlanner:
        """Returns the planner of a run with another config, in as much DRAM; of one process.

        Accesses are looked at anew only if steps come to other rows: in other batches, or other ones ahead.
        """
        assert self.dataset is not None and self.sharing is None
        tables = tables_of(config, self.dataset)
        other = replace(self, config=config, tables=tables, _uses={}, _weighted={})
        if config.train.batch_size == self.config.train.batch_size:
            vars(other)["counted"] = self.counted
        if looks_at_accesses(self.config, config):
            return other
        vars(other)["work"] = work_of(config, tables, self.dataset, like=self.work)
        if self.plan is not None and (*self.plain,) in self._uses:
            vars(other)["plan"] = self.plan.with_costs(None)
            uses = zip(self.uses(self.plain), other.plain, strict=True)
            other._uses[(*other.plain,)] = [use.of(own) for use, own in uses]
        return other

    def uses(self, demands: Sequence[TableDemand]) -> list[TableUse]:
        """Returns the tables with their accesses; there must be a `plan`."""
        assert self.plan is not None
        plain = (*self.plain,)
        if plain not in self._uses:
            self._uses[plain] = self.plan.uses(plain)
        return [use.of(demand) for use, demand in zip(self._uses[plain], demands, strict=True)]

    def slots_in(self, memory: Memory) -> tuple[Memory, Sequence[TableSlots]]:
        """Returns how rows are written, and the slots that tables get, if they train with `memory`."""
        settled = self.settled(memory)
        demands = settled.with_places(self.plain)
        return settled, (memory.plan or plan_slots)(demands, settled.budget_bytes(demands))

    def divide(self, budget: int, writes: Writes) -> tuple[Memory, list[TableDemand], Sequence[TableSlots]]:
        """Returns a memory of `budget` bytes with its plan, what tables take then, and their slots.

        Raises ValueError if the smallest caches there are do not fit.
        """
        memory, demands, left = self._room(budget, writes)
        if self.plan is None:
            return memory, demands, plan_slots(demands, left)
        found = [(plan, plan.solver(self.uses(demands))(left)) for plan in self._plans(demands)]
        fits = [each for each in found if self._lacks(each[1]) is None] or found[:1]
        plan, slots = fits[0] if len(fits) == 1 else min(fits, key=lambda each: self._step_s(each[1], memory))
        return replace(memory, plan=plan), demands, slots

    def _room(self, budget: int, writes: Writes) -> tuple[Memory, list[TableDemand], int]:
        """Returns a memory of `budget` bytes, what tables take then, and the bytes for their slots."""
        memory = replace(self.memory, dram=without_pieces(budget), writes=writes)
        settled = self.settled(memory)
        demands = settled.with_places(self.plain)
        return memory, demands, settled.budget_bytes(demands)

    def _plans(self, demands: Sequence[TableDemand]) -> list[CountsPlan]:
        """Returns the plans to choose from: all misses cost the same; and by what a miss of each table costs."""
        assert self.plan is not None
        costs = self.miss_costs(demands)
        if len(set(costs.values())) < 2:
            return [self.plan]
        key = (*demands,)
        if key not in self._weighted:
            self._weighted[key] = self.plan.with_costs(costs)
        return [self.plan, self._weighted[key]]

    def miss_costs(self, demands: Sequence[TableDemand]) -> dict[str, float]:
        """Returns seconds of disk and processor per missed row, by table; empty if no figures of a disk are known."""
        return {} if self.disk is None else {demand.name: miss_s(demand, self.disk) for demand in demands}

    @property
    def disk(self) -> Disk | None:
        """The disk that rows go to; None if its figures are not known."""
        return None if self.hardware is None else self.hardware.disk_at(self.memory.folder)

    @cached_property
    def work(self) -> Work:
        """What a step does; there must be a dataset. Raises ValueError if `work_of` does."""
        assert self.dataset is not None
        return work_of(self.config, self.tables, self.dataset, warmup=self.warmup, counted=self.counted)

    def predict(
        self, slots: Sequence[TableSlots] | None, memory: Memory | None = None, hardware: Hardware | None = None
    ) -> Prediction:
        """Returns a step's predicted time with these slots; if None, all rows in DRAM.

        memory: the memory of the slots, if it is not the division's; hardware: another machine. Raises ValueError for
        what has no prediction yet, and for figures that are missing.
        """
        machine = hardware or self.hardware
        assert machine is not None
        work = self._with_rows_in(memory)
        own, shared = self.shared(work, announced=slots is not None)
        found = predict(own, machine, slots, shared)
        traffic = None if slots is None or found.binds != "disk reads" else traffic_of(work, slots)
        return replace(found, binds="disk") if traffic is not None and traffic.writes > 0 else found

    def on_gpu(self, now: Prediction, gpu: Gpu) -> tuple[float, float]:
        """Returns the least that the step takes if dense layers run on the GPU, at its rate of large products: with
        tables on the CPU, whose pooled rows and gradients cross, and with its rows there too.

        Raises ValueError if the GPU's rate is not known.
        """
        if "fp32" not in gpu.product_flops_per_s:
            raise ValueError(f"{gpu.name} has no product_flops_per_s of fp32")
        flops = 3 * 2 * sum(n * inputs * outputs for n, inputs, outputs in self.work.products)
        dense_s = flops / gpu.product_flops_per_s["fp32"].value
        link_s = 4 * self.work.pooled_values * (1 / gpu.to_device_bytes_per_s.value + 1 / gpu.to_host_bytes_per_s.value)
        return now.step_s - now.seconds["dense"] + dense_s + link_s, now.seconds["data"] + dense_s

    def shared(self, held: Work, *, announced: bool) -> tuple[Work, Shared | None]:
        """Returns the work of a rank's samples and what sharing adds. held: what all samples ask of its rows."""
        if self.sharing is None:
            return held, None
        return self.sharing.share(self._whole, held, announced=announced)

    @cached_property
    def _whole(self) -> Work:
        """What a step of all ranks does."""
        assert self.sharing is not None and self.dataset is not None
        work = work_of(self.config, self.sharing.tables, self.dataset, warmup=self.warmup)
        return replace(work, threads=threads_of(self.config, self.sharing.local_size))

    def _with_rows_in(self, memory: Memory | None) -> Work:
        settled = self.settled(memory or self.memory)
        return replace(self.work, folder=str(settled.folder), writes=settled.writes)

    def step(self, memory: Memory | None) -> Step:
        """Returns the predicted step of a run whose rows lie in `memory`, or all in DRAM; raises as `predict` does."""
        slots = None if memory is None else self.slots_in(memory)[1]
        found = step_of(self.predict(slots, memory), self.work.batch_size)
        _, shared = self.shared(self.work, announced=slots is not None)
        return found if shared is None else replace(found, wire_bytes_per_step=rounded(shared.by_purpose))

    def written_bytes(self, slots: Sequence[TableSlots] | None, memory: Memory | None = None) -> float:
        """Returns the bytes of rows that a step is expected to write to the drive."""
        traffic = None if slots is None else traffic_of(self._with_rows_in(memory), slots)
        return 0.0 if traffic is None else traffic.written_bytes

    def _step_s(self, slots: Sequence[TableSlots], memory: Memory) -> float:
        """Returns what a step takes."""
        try:
            return self.predict(slots, memory).step_s
        except Exception:  # no run fails for want of a prediction: all plans are alike, and the first is taken
            return math.inf

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
            self.uses(self.plain)  # what is wrong with counts, no budget would mend
        try:
            _, demands, left = self._room(budget, writes)
            slots = plan_slots(demands, left) if self.plan is None else self.plan.solver(self.uses(demands))(left)
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
        """Returns the memory of `budget` bytes with its plan.

        beside: bytes of `memory.dram` that are not in `budget`, because they are not for tables. Raises ValueError,
        with what is missing, if a table's cache would not hold the rows of a batch.
        """
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
        return self.room.free_bytes(self.memory.folder)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A predicted step, in the units of a run's record."""

    step_ms: dict[str, float]
    """By phase."""
    wait_ms: float
    """The wait for rows from disk: a part of `data`, or of `lookup` without look-ahead."""
    samples_per_s: float
    binds: str
    """What a faster machine would need first."""
    exchange_ms: float | None = None
    """What ranks take to send each other rows and sums, a part of all phases; None for one process."""
    wire_bytes_per_step: dict[str, int] | None = None
    """What a rank sends, by purpose, the mean of all ranks."""


def rounded(by_purpose: Mapping[str, float]) -> dict[str, int]:
    return {purpose: round(num_bytes) for purpose, num_bytes in sorted(by_purpose.items())}


def step_of(predicted: Prediction, batch_size: int) -> Step:
    return Step(
        step_ms={phase: round(1e3 * seconds, 4) for phase, seconds in predicted.seconds.items()},
        wait_ms=round(1e3 * predicted.wait_s, 4),
        samples_per_s=round(batch_size / predicted.step_s, 1),
        binds=predicted.binds,
        exchange_ms=round(1e3 * predicted.exchange_s, 4) or None,
    )


def threads_of(config: Config, local_size: int) -> int:
    """Returns the threads of a process, if so many of the run share this machine's cores."""
    return default_threads(local_size) if config.train.threads == "auto" else config.train.threads


def miss_s(demand: TableDemand, disk: Disk) -> float:
    """Returns seconds of disk and processor for a row that is read because it is missing, and written as it leaves.

    A row in its own sectors takes an I/O each way, and the disk does so many in a second at its best queue depth; rows
    that are gathered are written by the page, at the disk's bandwidth.
    """
    sectors = disk.sector_bytes * math.ceil(demand.record_bytes / disk.sector_bytes)
    reads, writes = (max(f.value for f in rates.values()) for rates in (disk.reads_per_s, disk.writes_per_s))
    cpu_s = disk.cpu_s_per_io.value
    read_s = max(1 / reads, sectors / disk.read_bytes_per_s.value) + cpu_s
    if demand.place_bytes:
        return read_s + demand.record_bytes / disk.write_bytes_per_s.value
    return read_s + max(1 / writes, sectors / disk.write_bytes_per_s.value) + cpu_s

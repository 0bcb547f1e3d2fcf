"""Where the tables of a run lie: what this process may use, and what was decided.

`place_tables` turns the config's `memory` into DRAM, tiers or slots on a device before anything is made; placement/
moves rows, and run/meters.py says what the tiers did. What tables take is counted in demand.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotrow.base.files import size
from hotrow.base.machine import available_memory_bytes
from hotrow.config.schema import Config, MemoryConfig
from hotrow.data.packed.reader import PackedDataset
from hotrow.placement.budget import DeviceMemory, Memory
from hotrow.placement.store_file import no_disk, takes_no_files
from hotrow.setup.demand import demands_of, most_rows, required_bytes
from hotrow.setup.slots import SlotPlanner, without_pieces
from hotrow.tables import TableConfig

AUTO_SHARE = 0.6
"""Share of the memory this process may use; the rest is for data, MLPs, Python and other processes."""
FOLDER = "memory"
"""Folder in a run for rows that memory does not hold, unless the config names another."""
SLOT_OF_ROW_BYTES, ROW_OF_SLOT_BYTES = 4, 16
"""DRAM for each row that may come to a device and go, to know which slot it has, and for each slot there."""
_SMALLER = "give it more memory, or lower train.batch_size or the widths of the model"
_CURES = (
    "lower model.embedding_dim, use optimizer.sparse.name row_wise_adagrad or sgd, set train.precision to fp16, or "
    "prepare the data with a higher --min-count"
)


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


def choose(
    config: Config,
    tables: Sequence[TableConfig],
    run: Path,
    *,
    room: Room | None = None,
    dataset: PackedDataset | None = None,
    training: bool = True,
    beside_bytes: int = 0,
) -> tuple[Memory | None, SlotPlanner]:
    """Returns the tiers that `config.memory` asks for, and the planner that divided DRAM among the tables.

    The tiers are None if everything lies in DRAM. The planner has read the counts.

    run: the run's folder, or where it will be. room: what there is; if None, what this machine has now. dataset: what
    is trained on; its access counts, if it has them, say which rows are worth their memory. training: if False, tables
    are only read, without optimizer state, and what does not fit goes to disk even if the config says "dram".
    beside_bytes: what this process will take beside its tables (beside.py); "auto" leaves it free.
    Raises ValueError with the shortfall if memory is too small, and for a folder that is not on a disk.
    """
    needed = required_bytes(config, tables, training=training)
    room, chosen = room or Room.here(), config.tiers
    available = room.dram_bytes
    budget = dram_budget(config, available, beside_bytes)
    known = 0 if config.hbm is None else _directory_bytes(config, tables, training=training)
    available, budget = available - known, budget - known
    memory = Memory(dram=max(1, budget), ssd=run / FOLDER)
    planner = SlotPlanner(
        config=config, tables=tables, memory=memory, budget=budget, dataset=dataset, training=training
    )
    if config.memory == "dram" and training:
        _check_available(config, needed, available, room)
        return None, planner
    if not training:
        budget = min(budget, int(AUTO_SHARE * available), available - beside_bytes)
    if budget <= 0 and beside_bytes >= available:
        cure = _SMALLER if training else "give it more memory"
        raise ValueError(f"no memory is left for tables: {_beside_words(available, beside_bytes, room)}: {cure}")
    if budget <= 0:
        raise ValueError(
            f"to know which rows lie in memory.hbm takes {size(known)} of DRAM, and there are {size(budget + known)} "
            f"for that and the tables: raise memory.dram ({chosen.dram}), or set memory.hbm to null"
        )
    _check_available(config, min(needed, budget), available, room)
    if needed <= budget:
        return None, planner
    memory = Memory(
        dram=without_pieces(budget),
        ssd=None if chosen.file is not None and chosen.file_bytes is None else chosen.ssd or run / FOLDER,
        **{name: getattr(chosen, name) for name in ("file", "file_bytes", "writes", "force")},
    )
    _check_folders(chosen, memory, run)
    planner = replace(planner, memory=memory)
    try:
        return planner.check(budget, beside=known), planner
    except ValueError as error:
        if budget < available - beside_bytes:
            raise
        raise ValueError(f"{error}; {_beside_words(available, beside_bytes, room)}: {_SMALLER}") from None


def _directory_bytes(config: Config, tables: Sequence[TableConfig], *, training: bool) -> int:
    """Returns the DRAM to know which rows lie in which slots of `memory.hbm`."""
    assert config.hbm is not None
    demands = demands_of(config, tables, training=training)
    slots = DeviceMemory(hbm=config.hbm, device="cpu").slots(demands)
    passing = sum(demand.num_rows - own.pinned for demand, own in zip(demands, slots, strict=True))
    return SLOT_OF_ROW_BYTES * passing + ROW_OF_SLOT_BYTES * sum(map(sum, slots))


def dram_budget(config: Config, available_bytes: int, beside_bytes: int = 0) -> int:
    """Returns the DRAM for tables: what `memory.dram` says, else a share of what there is, or what is left beside
    `beside_bytes` if that is less."""
    given = config.tiers.dram_bytes
    return min(int(AUTO_SHARE * available_bytes), available_bytes - beside_bytes) if given is None else given


def shortage(config: Config, tables: Sequence[TableConfig], room: Room, *, beside_bytes: int) -> str | None:
    """Returns why memory may run out in training although the config says how much of it tables take. None if there is
    enough, and if the config leaves the amount to `choose`. tables: those that this process holds."""
    needed, available = required_bytes(config, tables), room.dram_bytes
    given = needed if config.memory == "dram" else dram_budget(config, 0)
    taken = min(needed, given)
    if taken + beside_bytes <= available or taken <= 0:
        return None
    return (
        f"memory may run out: tables and optimizer state take {size(taken)} of DRAM as the config says (memory), and "
        f"{_beside_words(available, beside_bytes, room)}: {_SMALLER}, or set memory.dram to auto or to at most "
        f"{size(max(0, available - beside_bytes))}"
    )


def _beside_words(available: int, beside_bytes: int, room: Room) -> str:
    return (
        f"{room.owner} may use {size(available)} more, of which batches, dense layers and evaluations take about "
        f"{size(beside_bytes)}"
    )


def _check_available(config: Config, num_bytes: int, available: int, room: Room) -> None:
    if num_bytes > available:
        what = config.memory if isinstance(config.memory, str) else f"dram: {config.memory.dram}"
        raise ValueError(
            f"memory is {what!r}: tables and optimizer state take {size(num_bytes)} of DRAM, "
            f"{size(num_bytes - available)} more than the {size(available)} {room.owner} may use; "
            f"set memory to auto, which lays the rest on disk, or {_CURES}"
        )


def _check_folders(chosen: MemoryConfig, memory: Memory, run: Path) -> None:
    """Raises ValueError for a folder that takes no files, and for `ssd` if it is not on a disk."""
    for name, folder in (("ssd", chosen.ssd), ("file", chosen.file)):
        if folder is not None and (reason := takes_no_files(Path(folder))):
            raise ValueError(f"memory.{name} is {folder!r}, but {reason}: choose another folder (memory.{name})")
    if memory.ssd is None or memory.force:
        return
    if chosen.ssd is not None and (reason := no_disk(memory.folder)):
        raise ValueError(f"memory.ssd is {chosen.ssd!r}, but {reason} (memory.ssd), or set memory.force to true")
    if chosen.ssd is None and (reason := no_disk(run.absolute())):
        raise ValueError(
            "no folder is named for rows that memory does not hold, so they go to the run's, but "
            f"{reason} (memory.ssd), put the run on a disk (run), or set memory.force to true"
        )


def place_tables(
    config: Config,
    tables: Sequence[TableConfig],
    run: Path,
    device: str,
    *,
    room: Room,
    dataset: PackedDataset,
    training: bool,
    beside_bytes: int = 0,
) -> tuple[Memory | DeviceMemory | None, SlotPlanner]:
    """Returns where rows lie: what `choose` decides, behind slots on the device if there is a `memory.hbm`. tables: the
    run's, or the parts of them that this process holds. Raises ValueError as `choose` does, and if the slots cannot
    hold the rows of a step; the error says how many bytes would do."""
    below, planner = choose(
        config, tables, run, room=room, dataset=dataset, training=training, beside_bytes=beside_bytes
    )
    if config.hbm is None:
        return below, planner
    memory = DeviceMemory(hbm=config.hbm, below=below, device=device)
    if training:
        _check_a_step_fits(config, tables, memory)
    return memory, planner


def _check_a_step_fits(config: Config, tables: Sequence[TableConfig], memory: DeviceMemory) -> None:
    demands, most = demands_of(config, tables, training=True), [most_rows(config, table) for table in tables]
    for table, own, needed in zip(tables, memory.checked_slots(demands), most, strict=True):
        if own.cached < min(needed, table.num_embeddings - own.pinned):
            least = memory.least_bytes(demands, [min(n, t.num_embeddings) for n, t in zip(most, tables, strict=True)])
            raise ValueError(
                f"memory.hbm is {config.hbm!r}: table {table.name!r} would have {own.cached:,} slots on the device, "
                f"but a step may look up {needed:,} different rows; raise it to {least:,} bytes (memory.hbm={least}), "
                f"or choose a train.batch_size below {config.train.batch_size}"
            )


def moved(memory: Memory | None, before: Path, after: Path) -> Memory | None:
    """Returns a choice that was made for the run folder `before` as it is for the folder `after`."""
    if memory is None or memory.ssd != before / FOLDER:
        return memory
    return replace(memory, ssd=after / FOLDER)

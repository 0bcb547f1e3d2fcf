"""Where the rows of a run lie, in words and bytes, and how their files are removed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hotrow.base.files import disk_free_bytes, parse_bytes, size
from hotrow.config.schema import Config
from hotrow.embedding import EmbeddingCollection
from hotrow.placement.budget import DeviceMemory
from hotrow.placement.device import Device
from hotrow.placement.tiers import Tiers
from hotrow.setup.demand import demands_of, most_rows, required_bytes
from hotrow.setup.memory import FOLDER
from hotrow.tables import TableConfig


def full_device(config: Config, tables: Sequence[TableConfig], error: torch.OutOfMemoryError) -> tuple[str, str | None]:
    """Returns the message if the device ran out of memory in training, and the option to resume with.

    The option is None if no option that a resumed run may change saves memory.
    """
    text = f"the device's memory is full ({str(error).splitlines()[0]})"
    if config.hbm is not None:
        taken, holder = parse_bytes(config.hbm), "slots take"
    elif config.hot.takes_turns:
        taken, holder = min(parse_bytes(config.hot.budget), required_bytes(config, tables)), "copies of hot rows take"
    else:
        return f"{text}: a smaller train.batch_size or smaller MLPs need less, in a new run", None
    needed = [min(most_rows(config, table), table.num_embeddings) for table in tables]
    least = DeviceMemory(hbm=taken, device="cpu").least_bytes(demands_of(config, tables, training=True), needed)
    text = f"{text}: {holder} {size(taken)} of it, and a step needs the rest"
    tried = max(least, taken * 3 // 4)
    if tried >= taken:
        return f"{text}; slots of less do not hold the rows of a step, so lower train.batch_size, in a new run", None
    instead = "" if config.hbm is not None else ", slots in place of the copies, or a lower hot.budget in a new run"
    return f"{text}; try memory.hbm={tried}{instead}", f"memory.hbm={tried}"


def close_tiers(embedding: EmbeddingCollection, run: Path) -> None:
    """Removes the files of tables in tiers, and the run's folder for them."""
    embedding.placement.close()
    tiers = embedding.placement.find(Tiers)
    if tiers is not None and tiers.memory.folder == run / FOLDER:
        with suppress(OSError):  # others' files may lie there
            (run / FOLDER).rmdir()


def disk_bytes(tiers: Tiers) -> int:
    """Returns the size that the tables' files reach once every row has been written."""
    stores = [store for store in tiers.stores if store.path is not None]
    return sum(int(store.padded_record_bytes * store.rows.num_rows) for store in stores)


def middle_bytes(tiers: Tiers) -> int:
    """Returns the size that the files of the middle tier may reach; 0 if there is no middle tier."""
    before = [store.middle.rows for store in tiers.stores if store.middle is not None]
    return sum(rows.num_rows * rows.record_bytes for rows in before)


def dram_bytes(tiers: Tiers) -> int:
    """Returns the DRAM that slots, maps of rows and of places on disk, and buffers may take."""
    records = [store.rows.record_bytes for store in tiers.stores]
    slots = sum((s.pinned + s.cached) * num_bytes for s, num_bytes in zip(tiers.slots, records, strict=True))
    maps = sum(c["num_bytes"] + c["middle_map_bytes"] + c["saved_index_bytes"] for c in tiers.counters().values())
    return slots + maps + tiers.places_bytes + tiers.memory.waiting_bytes


def describe(embedding: EmbeddingCollection, needed: int) -> str:
    """Returns what lies where, as a line for the user. needed: `required_bytes`."""
    tiers, slots = embedding.placement.find(Tiers), _describe_slots(embedding)
    if tiers is None:
        return f"memory: {slots}tables and optimizer state are {size(needed)}, all in DRAM"
    paths = [store.path for store in tiers.stores if store.path is not None]
    whole = len(tiers.stores) - len(paths)
    middle = f", {size(middle_bytes(tiers))} before it in {tiers.memory.middle}" if middle_bytes(tiers) else ""
    return (
        f"memory: {slots}of {size(needed)} of tables and optimizer state, {size(dram_bytes(tiers))} in DRAM ({whole} "
        f"of {len(tiers.stores)} tables whole), {size(disk_bytes(tiers))} on disk in {tiers.memory.folder}{middle}"
    )


def _describe_slots(embedding: EmbeddingCollection) -> str:
    rows = embedding.placement.find(Device)
    if rows is None:
        return ""
    whole = sum(sum(own) == table.num_embeddings for own, table in zip(rows.slots, rows.tables, strict=True))
    return (
        f"slots of {size(rows.slots_bytes)} on {rows.device} ({whole} of {len(rows.tables)} tables whole), behind them "
    )


def disk_shortfall(tiers: Tiers) -> str | None:
    """Returns why a disk may become full before every row has been written; None if it cannot."""
    wanted = {tiers.memory.folder: disk_bytes(tiers)}
    if tiers.memory.middle is not None:
        wanted[tiers.memory.middle] = wanted.get(tiers.memory.middle, 0) + middle_bytes(tiers)
    for folder, num_bytes in wanted.items():
        if num_bytes > (free := disk_free_bytes(folder)):
            return (
                f"the tables may grow to {size(num_bytes)} in {folder}, where {size(free)} are free: training ends "
                "where that is used up, and can be resumed from its last checkpoint"
            )
    return None

"""What many ranks would take, and how many machines a model needs: modelled, for models too large to be run here.

    rows of a study, a config --work_of_rows--> Work, by the law that ids are drawn by
    Work, a declared machine  --modelled_of--> the step of R ranks, or machines with and without an SSD

The cost model is the one in costs/; nothing here is measured, and no figure leaves this module but as `modelled`.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch

from hotrow.config.schema import Config
from hotrow.costs.cost import predict
from hotrow.costs.demand import TABLE_DTYPES, record_bytes
from hotrow.costs.hardware import Hardware
from hotrow.costs.traffic import LARGE_PAGE_BYTES, MAX_IOS, Traffic, io_seconds
from hotrow.costs.wire import Accesses, share_of, wire_of_work
from hotrow.costs.work import SAMPLES, TableWork, Work, dense_optimizer_of, dense_work
from hotrow.data.sources.synthetic import zipf_rates
from hotrow.lab.study.data import SyntheticRows
from hotrow.lab.study.study import Cell
from hotrow.parallel.shards import Shard
from hotrow.setup.memory import AUTO_SHARE
from hotrow.setup.shards import shards_by_bytes
from hotrow.tables import TableConfig

ENOUGH = 0.9
"""The share of one machine's speed with all rows in DRAM that machines with an SSD must reach."""

# ---- what a step does


def work_of_rows(config: Config, rows: SyntheticRows) -> Work:
    """Returns what a step does on rows drawn by their law, without drawing them."""
    dim, batch_size = config.model.embedding_dim, config.train.batch_size
    if not isinstance(dim, int):
        raise ValueError("model.embedding_dim must be one number for a step that is modelled")
    dim = config.model.row_dim(dim)
    optimizer, precision = config.optimizer.sparse.name, config.train.precision
    tables = []
    for t, num_rows in enumerate(rows.table_rows):
        name = f"t{t}"
        table = TableConfig(
            name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=(name,), dtype=TABLE_DTYPES[precision]
        )
        lookups = batch_size * rows.lookups
        rates, num = zipf_rates(num_rows - 1, rows.zipf, lookups)
        tables.append(
            TableWork(
                table=table,
                lookups=lookups,
                rows=float(num @ -np.expm1(-rates)),
                record_bytes=record_bytes(table, optimizer),
                rates=tuple((rate, n, 0.0) for rate, n in zip(rates.tolist(), num.tolist(), strict=True)),
                jagged=rows.lookups > 1,
            )
        )
    return Work(
        batch_size=batch_size,
        num_dense=rows.dense,
        tables=tuple(tables),
        optimizer=optimizer,
        dense_optimizer=dense_optimizer_of(config),
        precision=precision,
        threads=1 if config.train.threads == "auto" else config.train.threads,
        gathered_samples=float(batch_size),
        **_dense_work(config.model.model_dump_json(), config, rows.dense, len(tables), batch_size),
    )


_KNOWN: dict[tuple[str, int, int], dict[str, Any]] = {}


def _dense_work(key: str, config: Config, num_dense: int, num_tables: int, batch_size: int) -> dict[str, Any]:
    """Returns the fields of `Work` about dense layers. A large model is built once for all batch sizes."""
    place = (key, num_dense, num_tables)
    if place not in _KNOWN:
        dims = {f"t{t}": config.model.row_dim(cast(int, config.model.embedding_dim)) for t in range(num_tables)}
        model = config.model.build(num_dense=num_dense, dims=dims, generator=torch.Generator().manual_seed(0))
        _KNOWN[place] = dense_work(model, dims, num_dense, SAMPLES)
    found, times = _KNOWN[place], batch_size / SAMPLES
    return {
        **found,
        "products": tuple((round(n * times), i, o) for n, i, o in found["products"]),
        "pairs": tuple((round(n * times), v, d) for n, v, d in found["pairs"]),
        "call_values": found["call_values"] * times,
    }


# ---- many ranks


def modelled_of(cell: Cell, machine: Hardware | str) -> dict[str, Any]:
    """Returns what a declared machine would take, or why that cannot be said. machine: or why it is not known."""
    if isinstance(machine, str):
        return {"reason": machine}
    assert isinstance(cell.data, SyntheticRows)
    config = cell.resolved(data="-", tables_bytes=1)
    work = work_of_rows(config, cell.data)
    try:
        return _nodes(config, work, machine) if cell.measures == "nodes" else _scaling(cell, config, work, machine)
    except ValueError as error:
        return {"reason": str(error)}


def _scaling(cell: Cell, config: Config, work: Work, machine: Hardware) -> dict[str, Any]:
    """Returns the step of `cell.ranks` ranks, and how it scales from the fewest that hold the tables."""
    each = max(1, machine.num_cores // work.threads)
    assert isinstance(cell.data, SyntheticRows)
    room = AUTO_SHARE * machine.dram_bytes.value / each
    least = math.ceil(work.table_bytes / room)
    if cell.ranks < least:
        raise ValueError(f"{least} ranks are needed to hold the tables, with {room / 2**30:.0f} GiB for them on each")
    found = step_of_ranks(config, work, machine, num_ranks=cell.ranks, each=each)
    fewest = work
    if cell.batch_per_rank is not None:
        train = config.train.model_copy(update={"batch_size": cell.batch_per_rank * least})
        fewest = work_of_rows(config.model_copy(update={"train": train}), cell.data)
    base = step_of_ranks(config, fewest, machine, num_ranks=least, each=each)
    speed, before = (1e3 * own.batch_size / step["step_ms"] for own, step in ((work, found), (fewest, base)))
    scaled = speed / before
    efficiency = scaled * least / cell.ranks
    return {**found, "samples_per_s": speed, "least_ranks": least, "speedup": scaled, "efficiency": efficiency}


def step_of_ranks(config: Config, work: Work, machine: Hardware, *, num_ranks: int, each: int = 1) -> dict[str, Any]:
    """Returns the modelled step of a rank, all rows in DRAM. each: ranks on a machine. Raises as `predict` does."""
    if num_ranks == 1:
        found, sent = predict(work, machine), 0.0
        made_of, binds = dict[str, float](), found.binds
    else:
        own, shared = share_of(
            work,
            work,
            shards_of_work(config, work, num_ranks),
            num_ranks=num_ranks,
            micro_batches=num_ranks,
            local_size=min(each, num_ranks),
            wire_dtype=config.parallel.wire_dtype,
        )
        found, sent = predict(own, machine, None, shared), sum(shared.by_purpose.values())
        made_of = dict(found.parts_s)
        binds = max(made_of, key=lambda part: made_of[part])
    return {
        "step_ms": 1e3 * found.step_s,
        "exchange_ms": 1e3 * found.exchange_s,
        "wire_bytes": sent,
        "parts_ms": {part: 1e3 * seconds for part, seconds in made_of.items()},
        "binds": binds,
    }


def shards_of_work(config: Config, work: Work, num_ranks: int) -> dict[str, Shard]:
    """Returns who holds which rows, as `setup.shards.shards_of` has it for a dataset."""
    dtype = config.parallel.wire_dtype
    tables = [own.table for own in work.tables]
    wires = {own.table.name: wire_of_work(own, work.batch_size, num_ranks, wire_dtype=dtype) for own in work.tables}
    return shards_by_bytes(config, tables, wires, num_ranks, counted=True)


# ---- machines with and without an SSD


def _nodes(config: Config, work: Work, machine: Hardware) -> dict[str, Any]:
    """Returns how many machines hold the tables in DRAM, and how many with an SSD do the work of one that could: as
    many, if no fewer are as fast.

    The target is ENOUGH of the speed of one machine with all rows in its DRAM, as if they fitted.
    """
    room, needed = AUTO_SHARE * machine.dram_bytes.value, work.table_bytes
    in_dram = math.ceil(needed / room)
    target = ENOUGH * 1e3 * work.batch_size / step_of_ranks(config, work, machine, num_ranks=1)["step_ms"]
    if not machine.disks:
        raise ValueError(f"{machine.name} has no disk in its file: declare one")

    def is_enough(num: int) -> bool:
        return bool(1e3 * work.batch_size / _step_ms_with_ssd(config, work, machine, num, room) >= target)

    with_ssd = next((num for num in range(1, in_dram) if is_enough(num)), in_dram)
    found = {"nodes_in_dram": in_dram, "nodes_with_ssd": with_ssd, "fewer": in_dram / with_ssd}
    return {**found, "target_samples_per_s": target}


def _step_ms_with_ssd(config: Config, work: Work, machine: Hardware, num: int, room: float) -> float:
    """Returns the step of `num` machines whose DRAM keeps the most used rows; each of the others is read and written.

    A row that is not in DRAM takes an I/O, and leaves it in a page with others. Nothing is cached beside the most used
    rows, so more is read than would be.
    """
    missed = _missed_rows(work, min(1.0, num * room / work.table_bytes)) / num
    (disk,) = machine.disks[:1]
    own = work.tables[0].record_bytes
    sector = disk.sector_bytes * math.ceil(own / disk.sector_bytes)
    counts = dict.fromkeys(("tables", "lookups", "rows", "misses", "read_rows", "written_rows"), missed)
    pages, written = missed * own / LARGE_PAGE_BYTES, missed * own
    traffic = Traffic(**counts, reads=missed, read_bytes=missed * sector, writes=pages, written_bytes=written)
    io_s = io_seconds(disk, traffic, together=MAX_IOS) if missed else 0.0
    busy_ms = step_of_ranks(config, work, machine, num_ranks=num)["step_ms"]
    return float(max(busy_ms + 1e3 * missed * disk.cpu_s_per_io.value / machine.num_cores, 1e3 * io_s))


def _missed_rows(work: Work, share: float) -> float:
    """Returns the different rows of a step that are not among the most used `share` of all rows."""
    found = [Accesses.of(own) for own in work.tables]
    rates, rows = (np.concatenate([getattr(own, name) for own in found]) for name in ("rates", "rows"))
    order = np.argsort(-rates, kind="stable")
    rates, rows = rates[order], rows[order]
    behind = np.clip(rows.cumsum() - share * rows.sum(), 0.0, rows)
    return float(np.sum(behind * -np.expm1(-rates)))

"""Training with a part of the tables in DRAM, beside all of them there: the cells of issue "tables of any size".

    python -m benchmarks.tiers --out docs/measurements/benchmarks.json [--folder DIR] [--quick] [CELL ...]
    python -m benchmarks.tiers --large --out docs/measurements/benchmarks.json --folder DIR

A DLRM with Criteo Kaggle's MLPs and 26 tables of its cardinalities (33.8M rows), dim 64, batches of 2048, SGD, ids Zipf
over each table's ranks. DRAM is a part of the tables' bytes; every row lies on disk before anything is timed, and files
whose writes are gathered have been written to until their free places lie as long use leaves them. Ours and the rivals
train each in a process inside a memory cgroup, page cache included; all in DRAM trains outside of it. Stretches of
steps alternate, and every loss equals that in DRAM to the bit, or the cell is refused. A cell that cannot be measured
as stated is named with its reason, and not reported. Files of up to 27 GB lie under --folder while it runs.

After the rounds of ours a checkpoint is saved, and 500 steps later the next, which is timed: no round has one in it.
Beside the steps: `id_to_slot`, what mapping a batch's ids takes when its rows are there, beside the kaggle step; and
`open_table`, how long a table of 100 GB takes to be made, opened and looked up in; its file is sparse.
--large is a cell of its own: tables of 40 GiB, dim 128, Zipf 0.9, a group of 4 GiB, ten million evictions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import bench
from benchmarks.results import end_on_signals, record
from benchmarks.rivals import memory
from benchmarks.rivals.memory import MemoryCell
from benchmarks.rivals.sides import Settings, Side
from benchmarks.rivals.work import SEED
from benchmarks.rivals.worker import Worker
from benchmarks.study.group import MemoryGroup
from hotrow.base.machine import usable_cores
from hotrow.embedding import EmbeddingCollection
from hotrow.placement.budget import Memory
from hotrow.placement.stores import TableRows, open_store
from hotrow.tables import TableConfig

VARIANTS = (("tiers", "auto", (4, 0)), ("tiers", "threads", (4,)), ("mmap", "auto", (1, 0)), ("rocksdb", "auto", (0,)))
TARGETS = {10: 0.85, 32: 0.5}
"""Least speed over all in DRAM that is promised, by the part of DRAM, at Zipf 1.05."""
A_NODE_OF = 4
"""The part of DRAM for which ours is measured too: how much fewer machines hold a model nearly at full speed."""
FULL = {"settle": 10, "warm_up": 100}
MIN_STEPS = 1500
"""Of all rounds together; see `stretches`."""
QUICK = {"rounds": 3, "steps": 5, "settle": 4, "warm_up": 4, "turns": 20, "scale": 0.002}
CHECKPOINT_STEPS, QUICK_CHECKPOINT_STEPS = 500, 10
"""Between two checkpoints, of ours."""
KAGGLE_DIM, MAPPED_BATCHES, REPEATS = 16, 32, 5
MAX_ID_SHARE = 0.05
"""Of the kaggle step, that mapping ids to slots may take."""
OPENED_BYTES, QUICK_OPENED_BYTES, OPENED_DIM, OPENED_ROWS, MAX_OPEN_S = 100 * 10**9, 10**9, 128, 1000, 1.0
"""A table that is made and opened: its bytes, its records of a whole sector, rows looked up, and what is promised."""
OPENED_PARTS = 100
"""Of which one is DRAM."""
LARGE_BYTES, LARGE_GROUP_BYTES, LARGE_DRAM_BYTES = 40 << 30, 4 << 30, 3 << 30
LARGE_DIM, LARGE_ZIPF = 128, 0.9
"""Records of a whole sector, and many rows that leave at each step."""
LARGE_EVICTIONS, LARGE_STEPS = 10_000_000, 100


def name_of(cell: MemoryCell) -> str:
    """Of a cell of steps, as the command line takes it."""
    io = "" if cell.io == "auto" else f"_{cell.io}"
    return f"tiers_{cell.side}{io}_dram{cell.dram_parts}_zipf{cell.zipf:g}_ahead{cell.ahead}"


def stretches(parts: int) -> dict[str, int]:
    """Rounds, and steps of each: as many as let what waits to be written be a small part of a round."""
    steps = 100 if parts <= 10 else 50
    return {"rounds": -(-MIN_STEPS // steps), "steps": steps}


def step_cells(*, quick: bool, threads: int) -> list[MemoryCell]:
    """Every side at 1/10 and 1/32, Zipf 1.05; ours at Zipf 0.9 and 1.2, and at 1/4, too."""

    def sizes(parts: int) -> dict[str, Any]:
        return {**(QUICK if quick else FULL | stretches(parts)), "group": "bench", "threads": threads}

    saved: dict[str, Any] = {"checkpoint_steps": QUICK_CHECKPOINT_STEPS if quick else CHECKPOINT_STEPS}
    cells = [MemoryCell(side="tiers", dram_parts=A_NODE_OF, zipf=1.05, ahead=4, **saved, **sizes(A_NODE_OF))]
    for parts, (side, io, aheads) in itertools.product((10, 32), VARIANTS):
        own = saved if side == "tiers" else {}
        skews = (1.05, 0.9, 1.2) if (side, io) == ("tiers", "auto") else (1.05,)
        for zipf, ahead in itertools.product(skews, aheads):
            cells.append(MemoryCell(side=side, io=io, dram_parts=parts, zipf=zipf, ahead=ahead, **own, **sizes(parts)))
    return cells


def measure_steps(cells: Sequence[MemoryCell], folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of the cells that can be measured; the others are named on stderr, with the reason."""
    for _, group in itertools.groupby(cells, memory.setup_of):
        own = list(group)
        memory_bytes = 1 << 62  # the one who runs this has read how much it takes
        reason = memory.refusal(own[0], memory_bytes=memory_bytes, cores=usable_cores())
        try:
            if reason is None:
                for cell, row in memory.run(own, folder=folder):
                    yield reported(cell, row)
        except memory.FAILURES as error:
            reason = str(error)
        if reason is not None:
            say_not_reported(own, reason)


def say_not_reported(cells: Sequence[MemoryCell], reason: str) -> None:
    """On stderr, by name."""
    print(f"not reported: {', '.join(map(name_of, cells))}: {reason}", file=sys.stderr, flush=True)


def reported(cell: MemoryCell, row: dict[str, Any]) -> dict[str, Any]:
    """A row under the name of the benchmark, with what is promised of it."""
    target = TARGETS.get(cell.dram_parts) if (cell.side, cell.zipf, cell.ahead) == ("tiers", 1.05, 4) else None
    promised = {} if target is None or cell.io != "auto" else {"target": target}
    line = {**row, "name": name_of(cell), **promised}
    line.pop("key")
    print(f"{line['name']:44s} {memory.headline(line)}", file=sys.stderr, flush=True)
    return line


# ---- ids to slots


def id_to_slot(folder: Path, *, quick: bool) -> dict[str, Any]:
    """What mapping ids to slots, pinning and letting go takes for batches whose rows are all there, and the step."""
    scale, parts = (0.002, 2) if quick else (1.0, 10)
    work = MemoryCell(
        group="ids", side="tiers", ahead=0, dram_parts=parts, zipf=1.05, scale=scale, embedding_dim=KAGGLE_DIM
    ).work
    batches = [batch for batch, _ in zip(work.batches(), range(MAPPED_BATCHES), strict=False)]
    with tempfile.TemporaryDirectory(prefix="hotrow-tiers-", dir=folder) as files:
        emb = EmbeddingCollection(work.tables, memory=Memory(dram=work.table_bytes // parts, ssd=files), seed=SEED)
        mapped = [seconds_of_ids(emb.placement, batches) for _ in range(REPEATS)][1:]  # the first brings the rows
        before = emb.placement.counters()
        seconds_of_ids(emb.placement, batches)
        if not hits_alone(before, emb.placement.counters()):
            raise ValueError(
                "the batches' rows do not stay in the cache, so that more than ids is timed: fewer batches"
            )
        del emb
    side = Side(work, Settings(dram_bytes=0, folder=""))
    side.build()
    steps = side.train(batches, settle=MAPPED_BATCHES // 4, steps=MAPPED_BATCHES * 3 // 4, ahead=0)["steps_s"]
    ids_ms, step_ms = 1e3 * statistics.median(mapped), 1e3 * statistics.median(steps)
    row = {"name": "id_to_slot", "ms": ids_ms, "step_ms": step_ms, "share": ids_ms / step_ms, "most": MAX_ID_SHARE}
    print(f"id_to_slot {ids_ms:.2f} ms of a step's {step_ms:.1f}: {row['share']:.1%}", file=sys.stderr, flush=True)
    return row


def seconds_of_ids(tiers: Any, batches: Sequence[Any]) -> float:
    """A batch's share: announced and forgotten."""
    start = time.perf_counter()
    for batch in batches:
        tiers.announce(batch.sparse)
        tiers.forget(batch.sparse)
    return (time.perf_counter() - start) / len(batches)


def hits_alone(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> bool:
    """Whether no row had to be brought between the two."""
    return all(after[t]["rows"] - before[t]["rows"] == after[t]["hit_rows"] - before[t]["hit_rows"] for t in after)


# ---- a table is opened


def open_table(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Seconds to make the file of a table and to open it again, and from a collection's making to its first lookup."""
    num_rows = (QUICK_OPENED_BYTES if quick else OPENED_BYTES) // (4 * OPENED_DIM)
    ids = np.sort(np.random.default_rng(SEED).choice(num_rows, OPENED_ROWS, replace=False))
    rounds = [open_once(folder, num_rows, ids) for _ in range(REPEATS)]
    times = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    row = {"name": "open_table", "table_bytes": 4 * OPENED_DIM * num_rows, "dim": OPENED_DIM, **times}
    row |= {"lookups": OPENED_ROWS, "most_s": MAX_OPEN_S, "worst_s": max(max(found.values()) for found in rounds)}
    told = ", ".join(f"{name} {seconds:.3f}" for name, seconds in times.items())
    print(f"open_table of {row['table_bytes']:,} bytes: {told}", file=sys.stderr, flush=True)
    return row


def open_once(folder: Path, num_rows: int, ids: NDArray[np.int64]) -> dict[str, float]:
    """The store's file made, looked up in and closed; the same opened again; and a collection over such a table."""
    times = {}
    record = TableRows(table="t", record_bytes=4 * OPENED_DIM, num_rows=num_rows)
    with tempfile.TemporaryDirectory(prefix="hotrow-tiers-", dir=folder) as files:
        for name in ("make_s", "open_s"):
            start = time.perf_counter()
            with open_store(record, kind="block", path=Path(files) / "t") as store:
                store.read(ids, np.arange(len(ids)), [np.empty((len(ids), OPENED_DIM), np.float32)])
            times[name] = time.perf_counter() - start
        dram_bytes = 4 * OPENED_DIM * num_rows // OPENED_PARTS
        table = TableConfig(name="t", num_embeddings=num_rows, embedding_dim=OPENED_DIM, feature_names=("t",))
        start = time.perf_counter()
        emb = EmbeddingCollection([table], memory=Memory(dram=dram_bytes, ssd=files), seed=SEED)
        emb(torch.from_numpy(ids)[:, None])
        emb.placement.close()
        times["collection_s"] = time.perf_counter() - start
    return times


# ---- a large model


def large(folder: Path, *, threads: int) -> dict[str, Any]:
    """Train tables of LARGE_BYTES inside a group until LARGE_EVICTIONS rows have left and come back."""
    cell = MemoryCell(group="large", side="tiers", ahead=4, dram_parts=1, zipf=LARGE_ZIPF, embedding_dim=LARGE_DIM)
    work = replace(cell.work, rows=tuple(n * LARGE_BYTES // cell.work.table_bytes + 1 for n in cell.work.rows))
    start, group = time.monotonic(), MemoryGroup()
    with tempfile.TemporaryDirectory(prefix="hotrow-tiers-", dir=folder) as files:
        settings = Settings(dram_bytes=LARGE_DRAM_BYTES, folder=files, turns=0)
        with Worker("tiers", work, settings, threads=threads, group=group) as side:
            side.ready()
            group.limit(LARGE_GROUP_BYTES)
            facts = side.ask(do="build")
            built_s = time.monotonic() - start
            stretches = list(until_evicted(memory.Feed(work), side))
            peak = group.peak_bytes()
    return {
        "name": "large",
        "table_bytes": work.table_bytes,
        "dim": LARGE_DIM,
        "zipf": LARGE_ZIPF,
        "limit_bytes": LARGE_GROUP_BYTES,
        "peak_bytes": peak,
        "build_s": built_s,
        **facts,
        **memory.shares_of(stretches, LARGE_STEPS),
        "samples_per_s": work.batch_size * LARGE_STEPS / statistics.median(s["seconds"] for s in stretches),
        "num_steps": LARGE_STEPS * len(stretches),
        "evicted_rows": sum(s["evicted_rows"] for s in stretches),
        "read_rows": sum(s["read_rows"] for s in stretches),
        "written_bytes": sum(s["written_bytes"] for s in stretches),
        "losses": [statistics.mean(map(float.fromhex, s["losses"])) for s in stretches],
    }


def until_evicted(feed: memory.Feed, side: Worker) -> Iterator[dict[str, Any]]:
    """Stretches of LARGE_STEPS until enough rows have left, and as many were read."""
    evicted = read = 0.0
    while min(evicted, read) < LARGE_EVICTIONS:
        (found,) = feed.train([side], settle=4, steps=LARGE_STEPS, ahead=4)
        evicted, read = evicted + found["evicted_rows"], read + found["read_rows"]
        print(f"large: {evicted:,.0f} rows left, {read:,.0f} came back", file=sys.stderr, flush=True)
        yield found


# ---- the command


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report of what the options ask for. Raises ValueError for a name that is none."""
    threads = options.threads or min(2, usable_cores())
    torch.set_num_threads(threads)
    cells = step_cells(quick=options.quick, threads=threads)
    others = {"id_to_slot": id_to_slot, "open_table": open_table}
    known = [*map(name_of, cells), *others]
    for name in options.names:
        if name not in known:
            raise ValueError(f"no cell is called {name!r}; choose from {', '.join(known)}")
    wanted = options.names or known
    if options.large:
        return {"cells": [large(options.folder, threads=threads)], "quick": False, **bench.circumstances()}
    rows = list(measure_steps([cell for cell in cells if name_of(cell) in wanted], options.folder))
    rows += [measure_it(options.folder, quick=options.quick) for name, measure_it in others.items() if name in wanted]
    return {"cells": rows, "quick": options.quick, **bench.circumstances()}


def main() -> None:
    """Measure and add the result to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CELL", help="cells to measure; all where none is named")
    parser.add_argument("--quick", action="store_true", help="small tables: tries the cells, measures nothing of worth")
    parser.add_argument("--large", action="store_true", help="only the large model; 45 GB of disk")
    parser.add_argument("--threads", type=int, help="default: 2, where there are as many cores")
    parser.add_argument("--folder", type=Path, default=Path(), help="where files lie: on the disk to measure")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    end_on_signals()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        report = measure(options)
    except ValueError as error:
        parser.error(str(error))
    record("tiers", json.loads(json.dumps(report)), options.out)


if __name__ == "__main__":
    main()

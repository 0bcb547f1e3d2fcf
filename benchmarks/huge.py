"""Tables of 600 GB on this machine: made, trained, and checked bit for bit against the same rows in DRAM.

    python -m benchmarks.huge --folder DIR [--out docs/measurements/benchmarks.json] [--quick]

The tables are as many and as wide as those of MLPerf training v6.1's dlrm_v4: 11 tables of dim 512, 293,051,712 rows
together, 600 GB in float32. How the rows are shared among the tables, the ids (Zipf 1.05 over each table's rows) and
the DLRM on top are ours: this shows what tables of that size cost, not how that model trains. Rows that no batch has
looked up exist only as a function of their number, so the files hold what training touched.

One process trains STEPS steps of 2,048 samples with row-wise Adagrad and DRAM_BYTES of DRAM, the rest under --folder;
its peak memory is what the operating system counted for it. Another builds small tables in DRAM of just the rows that
the first CHECKED steps look up, each row's initial weights computed by its number, and trains those steps on them.
Every loss, and every one of these rows afterwards, must be the same to the bit, or nothing is reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from benchmarks import bench
from benchmarks.results import end_on_signals, record
from hotrow.kernels import ops
from hotrow.kernels.types import row_key
from hotrow.models.dlrm import DLRM

DIM, BATCH_SIZE, NUM_DENSE, SEED, LR = 512, 2048, 13, 7, 0.02
ZIPF = 1.05
ROWS = (*[39_714_285] * 7, 9_390_624, 3_367_692, 1_293_395, 1_000_006)
"""Rows of each table, 293,051,712 together: seven large ones, four smaller."""
DRAM_BYTES = 6 << 30
STEPS, CHECKED, TIMED = 1000, 60, 300
"""Steps trained; the first ones, whose rows and losses are compared; the last ones, which are timed. By then DRAM is
full and rows leave it, so that timed steps read from the disk and write to it."""
QUICK_SCALE, QUICK_STEPS, QUICK_CHECKED = 1000, 12, 6


@dataclass(frozen=True)
class Work:
    """What is trained, for how long, and where its rows lie."""

    rows: tuple[int, ...]
    num_steps: int
    num_checked: int
    dram_bytes: int
    folder: str

    @property
    def table_bytes(self) -> int:
        """Bytes of all weights."""
        return 4 * DIM * sum(self.rows)

    def batches(self, num_steps: int) -> Iterator[tuple[Tensor, NDArray[np.int64], Tensor]]:
        """Dense inputs [B, I], ids [F, B] and labels [B] of each step, a function of SEED alone."""
        random = np.random.default_rng(SEED)
        for _ in range(num_steps):
            ids = np.stack([zipf(random.random(BATCH_SIZE), n) for n in self.rows])
            dense = random.standard_normal((BATCH_SIZE, NUM_DENSE), np.float32)
            yield torch.from_numpy(dense), ids, torch.from_numpy((random.random(BATCH_SIZE) < 0.25).astype(np.float32))


def zipf(uniform: NDArray[np.float64], num_rows: int) -> NDArray[np.int64]:
    """Ids below `num_rows` of which id k comes about as often as (k + 1) ** -ZIPF, by inverting the integral."""
    exponent = 1.0 - ZIPF
    ids = ((1.0 + uniform * ((num_rows + 1.0) ** exponent - 1.0)) ** (1.0 / exponent)).astype(np.int64) - 1
    return np.clip(ids, 0, num_rows - 1)


def configs(rows: tuple[int, ...]) -> list[hotrow.TableConfig]:
    """A table and a feature for each number of rows."""
    return [
        hotrow.TableConfig(name=f"t{k}", num_embeddings=n, embedding_dim=DIM, feature_names=(f"t{k}",))
        for k, n in enumerate(rows)
    ]


class Trainer:
    """A DLRM on `emb`, stepped as a user's own loop would."""

    def __init__(self, emb: hotrow.EmbeddingCollection) -> None:
        generator = torch.Generator().manual_seed(SEED)
        sizes: dict[str, Any] = {"num_dense": NUM_DENSE, "num_features": len(ROWS), "embedding_dim": DIM}
        self.emb = emb
        self.model = DLRM(**sizes, bottom_mlp=[512, 256], top_mlp=[512, 256], generator=generator)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.sparse = hotrow.RowWiseAdagrad(emb, lr=LR)

    def steps(self, batches: Iterator[tuple[Tensor, NDArray[np.int64], Tensor]]) -> Iterator[float]:
        """The loss of each step."""
        names = [f"t{k}" for k in range(len(ROWS))]
        loader = (
            hotrow.Batch(dense, hotrow.KeyedJaggedTensor(names, torch.from_numpy(ids.reshape(-1))), label)
            for dense, ids, label in batches
        )
        for batch in hotrow.lookahead(loader, self.emb, depth=4):
            loss = binary_cross_entropy_with_logits(self.model(batch.dense, self.emb(batch.sparse)), batch.label)
            self.dense.zero_grad()
            loss.backward()
            self.dense.step()
            self.sparse.step()
            yield float(loss.detach())


def touched(work: Work) -> list[NDArray[np.int64]]:
    """The rows of each table that the checked steps look up, rising."""
    ids = np.concatenate([ids for _, ids, _ in work.batches(work.num_checked)], axis=1)
    return [np.unique(own) for own in ids]


def in_tiers(work: Work) -> dict[str, Any]:
    """Train with a part of the rows in DRAM: how fast, how much memory, and what the checked steps came to."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hotrow-huge-", dir=work.folder) as folder:
        memory = hotrow.Memory(dram=work.dram_bytes, ssd=folder)
        trainer = Trainer(hotrow.EmbeddingCollection(configs(work.rows), memory=memory, seed=SEED))
        built_s, losses, seconds, rows = time.monotonic() - start, [], [], ""
        before = time.perf_counter()
        for loss in trainer.steps(work.batches(work.num_steps)):
            losses.append(loss)
            seconds.append(time.perf_counter() - before)
            if len(losses) == work.num_checked:
                rows = digest(trainer.emb, touched(work))
            before = time.perf_counter()
        counters = trainer.emb.placement.counters().values()
        written = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*") if file.is_file())
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timed = seconds[-min(TIMED, len(seconds) // 2) :]
    return {
        "build_s": built_s,
        "samples_per_s": BATCH_SIZE / statistics.median(timed),
        "step_s": [float(q) for q in np.quantile(timed, (0.1, 0.5, 0.9))],
        "peak_bytes": peak_bytes,
        "file_bytes": written,
        "written_rows": sum(own["written_rows"] for own in counters),
        "read_rows": sum(own["read_rows"] for own in counters),
        "losses": [loss.hex() for loss in losses[: work.num_checked]],
        "rows": rows,
    }


def in_dram(work: Work) -> dict[str, Any]:
    """The checked steps on small tables that hold the touched rows alone."""
    ids = touched(work)
    small, tables = configs(tuple(len(own) for own in ids)), configs(work.rows)
    emb = hotrow.EmbeddingCollection(small, seed=SEED)
    for table, own in zip(tables, ids, strict=True):
        weight, key = emb.weights[table.name], row_key(SEED, table.name)
        bound = table.init.bound_for(table.num_embeddings)
        for place, row in enumerate(own.tolist()):  # each by its number in the large table
            ops.fill_uniform(weight[place : place + 1], key=key, bound=bound, first_row=row)
    batches = (
        (dense, np.stack([np.searchsorted(own, row) for own, row in zip(ids, found, strict=True)]), label)
        for dense, found, label in work.batches(work.num_checked)
    )
    losses = [loss.hex() for loss in Trainer(emb).steps(batches)]
    return {"losses": losses, "rows": digest(emb, [np.arange(len(own)) for own in ids])}


def digest(emb: hotrow.EmbeddingCollection, rows: list[NDArray[np.int64]]) -> str:
    """SHA-256 of these rows of every table."""
    found = hashlib.sha256()
    for table, own in zip(emb.tables, rows, strict=True):
        stored = emb.rows(table.name)
        for piece in np.array_split(own, max(1, len(own) // 4096)):
            found.update(stored.read(torch.from_numpy(piece)).numpy().tobytes())
    return found.hexdigest()


def measure(work: Work) -> dict[str, Any]:
    """The cell. Raises ValueError if a loss or a row differs from those in DRAM."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        found = fresh.submit(in_tiers, work).result()
        print(f"huge: {found['samples_per_s']:,.0f} samples/s; checking", file=sys.stderr, flush=True)
        truth = fresh.submit(in_dram, work).result()
    for what in ("losses", "rows"):
        if found.pop(what) != truth[what]:
            raise ValueError(f"{what} of the first {work.num_checked} steps differ from those in DRAM")
    return {
        "name": "huge",
        "table_bytes": work.table_bytes,
        "num_rows": sum(work.rows),
        "num_tables": len(work.rows),
        "dim": DIM,
        "zipf": ZIPF,
        "dram_bytes": work.dram_bytes,
        "num_steps": work.num_steps,
        "checked_steps": work.num_checked,
        "checked_rows": sum(len(own) for own in touched(work)),
        **found,
    }


def main() -> None:
    """Measure and add the result to the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables: tries the benchmark, measures nothing")
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files lie: on the disk to measure")
    parser.add_argument("--out", help="JSON file of results to add to; without it, the report is printed")
    options = parser.parse_args()
    end_on_signals()
    if options.quick:
        rows = tuple(n // QUICK_SCALE for n in ROWS)
        work = Work(rows, QUICK_STEPS, QUICK_CHECKED, 4 * DIM * sum(rows) // 4, str(options.folder))
    else:
        work = Work(ROWS, STEPS, CHECKED, DRAM_BYTES, str(options.folder))
    report = {"cells": [measure(work)], "quick": options.quick, **bench.circumstances()}
    record("huge", json.loads(json.dumps(report)), options.out)


if __name__ == "__main__":
    main()

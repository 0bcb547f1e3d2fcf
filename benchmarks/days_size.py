"""Days at size: tables that grow by millions of rows, and a stream of the shape of Yambda in time order, in tiers.

growth: a run trains a table of --rows ids in tiers, each looked up once, so that every row lies on disk. A day with
--new more ids starts from it. Each takes --dram, which is compared with the memory that its process needs beyond what
Python and its libraries take. That counts batches and mapped pages of the dataset too, which are not in the budget.

stream: events over 301 days, made up, with an id in each of the eleven tables of MLPerf training v6.1's dlrm_v4 on
Yambda-5b. Its tables have 293,051,712 rows of 512, 600 GB; here they have --scale of the rows and --dim columns. Which
ids come together is ours. They are prepared, and train once in the order of time: in tiers with --dram, and with ids
modulo a table that DRAM holds.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.peak_memory import status_bytes
from benchmarks.synthetic import opened
from benchmarks.synthetic_config import SyntheticConfig, SyntheticDense, SyntheticTable
from hotrow.base.files import folder_bytes, parse_bytes
from hotrow.config.load import make_config
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare import pipeline
from hotrow.data.prepare.pipeline import Options
from hotrow.run import runs
from hotrow.run.start import Start

BATCH_SIZE = 2048
LIST = 128
"""How many ids a sample of `growth` has."""
TABLES = {
    "item": 9_390_624,
    "artist": 1_293_395,
    "album": 3_367_692,
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}
"""The tables of dlrm_v4 and their rows, by its yambda_5b.gin."""
ZIPF, DRIFT, NUM_DAYS = 1.05, 0.1, 301.0
DRAM_ROWS = 50_000
"""Rows of each table for the comparison in DRAM."""
PREPARE_MEMORY = "2GiB"
TOLD = ("dram_bytes", "disk_bytes", "hits_per_row", "stall_share", "read_rows", "written_rows", "written_bytes")
"""Figures about tiers that a cell takes from run.json."""


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """Returns what `work` returns in a process of its own, whose peak memory is then its own too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        return fresh.submit(work, *args).result()


def written_bytes() -> int:
    """Returns the bytes that this process has sent to disks so far."""
    match = re.search(r"^write_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


# ---- growth


def lists_of_ids(out: Path, num_embeddings: int, first: int) -> Path:
    """Packs samples whose lists hold the ids from `first` on, each once; returns the dataset's folder."""
    info = DatasetInfo(
        name="growth",
        dense=(DenseColumn("one"),),
        features=(Feature("ids", "t", "multi_hot"),),
        tables=(Table("t", num_embeddings),),
        licence="none",
    )
    rng = np.random.default_rng(1)
    with PackedWriter(out, info) as writer:
        for start in range(first, num_embeddings, LIST * BATCH_SIZE):
            ids = np.arange(start, min(start + LIST * BATCH_SIZE, num_embeddings), dtype=np.int32)
            splits = np.append(np.arange(0, len(ids), LIST), len(ids))
            label = (rng.random(len(splits) - 1) < 0.25).astype(np.float32)
            writer.append("train", label, np.ones((len(label), 1), np.float32), {"ids": (ids, splits)})
        writer.close()
    return out


def settings(data: Path, run: Path, memory: Any, dim: int) -> dict[str, Any]:
    return {
        "data": str(data),
        "run": str(run),
        "model": {"name": "dlrm", "embedding_dim": dim, "bottom_mlp": [64], "top_mlp": [64, 32]},
        "train": {"batch_size": BATCH_SIZE, "shuffle": False, "eval_every": None},
        "checkpoint": {"keep_last": 1},
        "memory": memory,
    }


def train(given: Mapping[str, Any]) -> dict[str, Any]:
    """Trains in this process; returns its seconds, bytes and memory, those of taking over other weights apart."""
    found: dict[str, Any] = {"start_s": 0.0, "start_written_bytes": 0}
    load, before, begun_s = Start.load, status_bytes("VmRSS"), time.perf_counter()

    def measured(start: Start, parts: Any) -> None:
        begun, written = time.perf_counter(), written_bytes()
        load(start, parts)
        found.update(start_s=time.perf_counter() - begun, start_written_bytes=written_bytes() - written)

    with mock.patch.object(Start, "load", measured):
        run = runs.train(make_config(dict(given)), quiet=True)
    lines = [line for line in run.measurements() if line["kind"] == "train"]
    return {
        **found,
        "seconds": time.perf_counter() - begun_s,
        "written_bytes": written_bytes(),
        "grown_bytes": status_bytes("VmHWM") - before,
        "samples_per_s": run.record.samples_per_s,
        "sustained_per_s": sustained(lines),
        "train_s": run.record.train_s,
        "memory": {name: (run.record.memory or {}).get(name) for name in TOLD},
        "loss": lines[-1]["loss"],
    }


def sustained(lines: list[dict[str, Any]]) -> float:
    """Returns the samples per second of the second half of a run's steps."""
    half, last = lines[(len(lines) - 1) // 2], lines[-1]
    steps_s = [line["step"] * BATCH_SIZE / line["samples_per_s"] for line in (half, last)]
    if steps_s[1] <= steps_s[0]:
        return float(last["samples_per_s"])
    return float((last["step"] - half["step"]) * BATCH_SIZE / (steps_s[1] - steps_s[0]))


def growth(folder: Path, rows: int, new: int, dim: int, dram: str) -> list[dict[str, Any]]:
    """Returns the cell of the next day's run."""
    dram_bytes = parse_bytes(dram)
    shared = {"rows": rows, "new": new, "dim": dim, "dram_bytes": dram_bytes, "table_bytes": 4 * dim * (rows + new)}
    memory = {"dram": dram_bytes, "ssd": str(folder / "rows")}
    (folder / "rows").mkdir()
    days = [lists_of_ids(folder / "day_1", rows, 1), lists_of_ids(folder / "day_2", rows + new, rows)]
    base = settings(days[0], folder / "run_1", memory, dim)
    first = in_fresh_process(train, base)
    second = in_fresh_process(
        train, {**base, "data": str(days[1]), "run": str(folder / "run_2"), "from_run": base["run"]}
    )
    used = folder_bytes(folder)
    for name in ("run_1", "run_2", "day_1", "day_2"):
        shutil.rmtree(folder / name)
    return [
        {
            "name": "days_growth_next_day",
            **shared,
            **second,
            "first": first,
            "disk_bytes": used,
        }
    ]


def growth_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of a cell, by column."""
    return {
        "rows": f"{cell['rows']:,}",
        "new rows": f"{cell['new']:,}",
        "bytes of the table": gigabytes(cell["table_bytes"]),
        "seconds to start": f"{cell['start_s']:.1f}",
        "written for it": gigabytes(cell["start_written_bytes"]),
        "memory": gigabytes(cell["grown_bytes"]),
        "budget": gigabytes(cell["dram_bytes"]),
    }


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


# ---- stream


def yambda_shaped(events: int, scale: float) -> SyntheticConfig:
    """Returns made-up events with an id in each of TABLES, which have `scale` of their rows."""
    tables = tuple(
        SyntheticTable(name=name, num_embeddings=max(1, round(rows * scale)), zipf=ZIPF, drift=DRIFT)
        for name, rows in TABLES.items()
    )
    age = SyntheticDense(name="age")
    return SyntheticConfig(num_rows=events, tables=tables, dense=(age,), name="yambda-shaped", num_days=NUM_DAYS)


def prepare(config: SyntheticConfig, out: Path, hash_cap: int | None) -> dict[str, Any]:
    """Prepares all rows in this process for training; returns seconds, peak memory and the rows of all tables."""
    begun = time.perf_counter()
    rows = opened(config).with_options(fractions=(1, 0, 0), hash_cap=hash_cap, min_count=1)
    data = pipeline.prepare(rows, out, Options(memory_bytes=parse_bytes(PREPARE_MEMORY)))
    return {
        "seconds": time.perf_counter() - begun,
        "peak_bytes": status_bytes("VmHWM"),
        "num_embeddings": sum(table.num_embeddings for table in data.info.tables),
        "data_bytes": folder_bytes(out),
    }


def stream(folder: Path, events: int, scale: float, dim: int, dram: str) -> dict[str, Any]:
    """Returns the cell of a stream in time order."""
    config, data = yambda_shaped(events, scale), folder / "data"
    (folder / "rows").mkdir()
    prepared = in_fresh_process(prepare, config, data, None)
    memory = {"dram": parse_bytes(dram), "ssd": str(folder / "rows")}
    tiers = in_fresh_process(train, settings(data, folder / "tiers", memory, dim))
    disk_bytes = folder_bytes(folder)
    for name in ("tiers", "data"):
        shutil.rmtree(folder / name)
    in_fresh_process(prepare, config, data, DRAM_ROWS)
    small = in_fresh_process(train, settings(data, folder / "dram", "dram", dim))
    return {
        "name": "days_stream",
        "events": events,
        "scale": scale,
        "dim": dim,
        "dram_bytes": parse_bytes(dram),
        "table_bytes": 4 * dim * prepared["num_embeddings"],
        "prepared": prepared,
        "tiers": tiers,
        "small": small,
        "disk_bytes": disk_bytes,
        "ratio": tiers["sustained_per_s"] / small["sustained_per_s"],
    }


def stream_row(cell: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a table shows of the cell, by column."""
    prepared, tiers, small = cell["prepared"], cell["tiers"], cell["small"]
    return {
        "events": f"{cell['events']:,}",
        "rows of the tables": f"{prepared['num_embeddings']:,} ({cell['scale']:g} of Yambda's)",
        "dim": str(cell["dim"]),
        "tables": gigabytes(cell["table_bytes"]),
        "DRAM for them": gigabytes(cell["dram_bytes"]),
        "prepared at": f"{cell['events'] / prepared['seconds']:,.0f}/s",
        "memory then": gigabytes(prepared["peak_bytes"]),
        "samples/s, sustained": f"{tiers['sustained_per_s']:,.0f}",
        "memory": gigabytes(tiers["grown_bytes"]),
        "tables in DRAM": f"{small['sustained_per_s']:,.0f}",
        "of that": f"{cell['ratio']:.0%}",
    }

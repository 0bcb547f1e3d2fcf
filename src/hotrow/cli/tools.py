"""The verbs inspect, check, report, clean, doctor, fit and demo as functions that return data; app.py prints it."""

from __future__ import annotations

import importlib.util
import os
import re
import reprlib
import resource
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotrow.api import Run
from hotrow.base.door import is_taken, is_there, remove
from hotrow.base.files import crc32, disk_free_bytes, file_system, folder_bytes, parse_bytes
from hotrow.base.machine import available_memory_bytes, host_facts, isa_limit, versions
from hotrow.base.progress import ProgressCallback, progress_bar, say
from hotrow.base.records import MAX_COUNT
from hotrow.config.load import apply_overrides, load_config, make_config
from hotrow.config.recipe import as_overrides, choose_recipe
from hotrow.data.packed.format import MANIFEST as DATASET
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.clicks import SCHEMA, make_clicks
from hotrow.data.sources.schema import parse_schema
from hotrow.export.delta import DELTA, verify_delta
from hotrow.export.export import CHAIN, EXPORT, verify_export
from hotrow.hot.hot_set import check_budget
from hotrow.inspect.accesses import first_batches, split_accesses
from hotrow.inspect.hot_rows import compare_ways, record_bytes_of
from hotrow.inspect.hotness import measure_hotness
from hotrow.inspect.report import write_inspection
from hotrow.kernels import ops
from hotrow.kernels.types import Algorithm
from hotrow.placement.store_file import direct_io
from hotrow.placement.stores import io_uring_refused
from hotrow.plan.disks import measured
from hotrow.report.page import NAME as REPORT
from hotrow.report.page import is_report, summary, write_report
from hotrow.run.checkpoint import check_chains, list_checkpoints, prune_checkpoints, verify
from hotrow.run.checkpoint_files import MANIFEST, read_manifest
from hotrow.run.folder import CONFIG, METRICS, RUN, RunFolder
from hotrow.run.record import read_extra
from hotrow.run.runs import remove_left_rows, train

NUM_ROWS = 600_000
TABLE_SCALE = 0.01
"""Size of the tables relative to Criteo Kaggle's. With 1/70 of its rows, about the same share of ids is seen."""
DRAM = "4MiB"
"""Less than the tables take, so that the rest lies on disk, as it does if tables are larger than memory."""


def inspect(
    path: Path | str,
    *,
    split: str = "train",
    batch_size: int = 2048,
    embedding_dim: int = 16,
    batches: int | None = None,
    seed: int = 0,
    hot: int | str | None = None,
    optimizer: Algorithm = "sgd",
    out: Path | str | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Returns the hotness report of a packed dataset.

    The fields are those of docs/inspect.md, the arguments those of `measure_hotness`; `batches`: read only so many, the
    first. hot: bytes of a fast device, or text such as 256MiB: three ways to choose the rows for it are compared, the
    state of `optimizer` counted, with samples drawn by `seed`. With `out` the report is also written there, as JSON and
    HTML, and `files` names them.

    Rows are numbered by falling training count, so the hot rows are a prefix; row 0 (rare and unseen ids) is counted
    among the accesses but is not a hot row.
    """
    for name, number, least in (("batches", batches, 1), ("seed", seed, 0)):
        if number is not None and not least <= number <= MAX_COUNT:
            raise ValueError(f"{name} is {reprlib.repr(number)}; it must be from {least} to {MAX_COUNT:,}")
    # Options are checked before reading, which may take long.
    if is_taken(Path(path) / RUN):
        trained = RunFolder.open(path).record.dataset
        cure = f"to see what it was trained on: hotrow inspect {shlex.quote(trained['path'])}" if trained else ""
        raise ValueError(f"{path} is a run, and inspect reads data; {cure or 'pass a packed dataset'}")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"report folder {out} is a file; choose another")
    dataset = PackedDataset.open(path)
    budget = None if hot is None else _hot_budget(dataset, hot, embedding_dim=embedding_dim, optimizer=optimizer)
    found = split_accesses(dataset, split)
    if batches is not None:
        found = first_batches(found, batches, batch_size=batch_size)
    hotness = measure_hotness(found, batch_size=batch_size, embedding_dim=embedding_dim, progress=progress)
    report = {"path": str(path), **hotness.to_json()}
    report |= _dataset_facts(dataset, report["tables"], split)
    if budget is not None:
        report["hot"] = compare_ways(dataset, budget, embedding_dim=embedding_dim, optimizer=optimizer, seed=seed)
    return {**report, "files": write_inspection(out, report)} if out is not None else report


def _hot_budget(dataset: PackedDataset, hot: int | str, *, embedding_dim: int, optimizer: Algorithm) -> int:
    """Returns `hot` in bytes. Raises ValueError if it is too small for any hot rows."""
    record_bytes = record_bytes_of(dataset, embedding_dim=embedding_dim, optimizer=optimizer)
    try:
        budget = parse_bytes(hot)
        check_budget([(table.num_embeddings, record_bytes[table.name]) for table in dataset.info.tables], budget)
    except ValueError as error:
        raise ValueError(f"hot is {hot!r}: {error}") from None
    return budget


def _dataset_facts(dataset: PackedDataset, tables: list[dict[str, Any]], split: str) -> dict[str, Any]:
    """Returns what the dataset says of itself."""
    dropped = {name: table.num_dropped for name, table in dataset.info.table_by_name.items()}
    return {
        "checksum": dataset.checksum,
        "split": split,
        "rows": {name: rows.num_rows for name, rows in dataset.splits.items()},
        "dense": list(dataset.info.dense_names),
        "licence": dataset.info.licence,
        "features": len(dataset.info.features),
        "tables": [{**table, "num_dropped": dropped[table["table"]]} for table in tables],
    }


def check(path: Path | str) -> dict[str, Any]:
    """Reads every byte of a packed dataset, a checkpoint, a run, an export or a delta; returns what was checked.

    Raises ValueError naming the first file that is missing or damaged, or if `path` is none of the five.
    """
    path = Path(path)
    if is_taken(path / DATASET):
        dataset = PackedDataset.open(path, verify="full")
        rows = sum(split.num_rows for split in dataset.splits.values())
        return {"kind": "packed dataset", "path": str(path), "rows": rows, "ok": True}
    if is_taken(path / MANIFEST):
        return {"kind": "checkpoint", "path": str(path), "bytes": _check_checkpoint(path), "ok": True}
    if is_taken(path / RUN):
        run = RunFolder.open(path)
        checkpoints = list_checkpoints(run.checkpoints)
        num_bytes = sum(map(_check_checkpoint, checkpoints.values())) + _check_vocabularies(run) + _check_notes(run)
        return {"kind": "run", "path": str(path), "checkpoints": list(checkpoints), "bytes": num_bytes, "ok": True}
    if is_taken(path / EXPORT) or is_taken(path / CHAIN):
        return {"kind": "export", "path": str(path), "bytes": verify_export(path), "ok": True}
    if is_taken(path / DELTA):
        return {"kind": "delta", "path": str(path), "bytes": verify_delta(path), "ok": True}
    raise ValueError(
        f"{path} was not written by hotrow: it has no {DATASET}, {MANIFEST}, {RUN}, {EXPORT} or {DELTA}; pass a packed "
        "dataset, a checkpoint (RUN/checkpoints/step-N), a run, an export or a delta"
    )


def _check_checkpoint(path: Path) -> int:
    """Reads every byte of a checkpoint, and the row ids of its chains; returns the bytes."""
    manifest = read_manifest(path)
    num_bytes = verify(path, manifest)
    check_chains(path, manifest)
    read_extra(path, manifest)
    return num_bytes


def _check_notes(run: RunFolder) -> int:
    """Reads the small files that a resumed run reads back, and the data packed into the run; returns the bytes."""
    run.measurements()
    notes = [run.path / RUN, run.path / METRICS]
    if is_taken(run.path / CONFIG):
        load_config(run.path / CONFIG)
        notes.append(run.path / CONFIG)
    num_bytes = sum(path.stat().st_size for path in notes)
    if is_taken(run.path / "data" / DATASET):
        PackedDataset.open(run.path / "data", verify="full")
        num_bytes += folder_bytes(run.path / "data")
    return num_bytes


def _check_vocabularies(run: RunFolder) -> int:
    kept = PackedDataset.open(run.encoder)
    total = 0
    for name, record in kept.info.files.items():
        if name.startswith(("vocab/", "statistics/")):
            path = kept.path / name
            if not is_there(path, within=kept.path) or crc32(path) != record.crc32:
                raise ValueError(f"{path} is missing or damaged; copy it anew from the dataset the run used")
            total += record.num_bytes
    return total


def report(path: Path | str, *, out: Path | str | None = None) -> dict[str, Any]:
    """Writes the page of a run; returns its file and the figures at its top.

    out: the file; if None, report.html in the run's folder. Raises ValueError if `path` is not a run, or the file is a
    folder or exists and is not an earlier report.
    """
    facts = RunFolder.open(path).facts()
    target = Path(out) if out is not None else Path(path) / REPORT
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else f"cannot be made: {target.parent} is not a folder"
        raise ValueError(f"--out {target} {why}; name a file, such as {REPORT}")
    # A run's own page is of hotrow whatever is in it: resuming the run writes it anew too.
    if target.exists() and out is not None and not is_report(target):
        raise ValueError(f"{target} exists and is not a report of hotrow; name another file with --out, or remove it")
    return {"out": str(target), "bytes": write_report(target, facts), **summary(facts)}


def clean(path: Path | str, *, data: bool = False) -> dict[str, Any]:
    """Removes a run's checkpoints except the newest and the chosen one, and rows on disk that a killed process left, in
    the run's folder or in those that its config names (memory.ssd, memory.file).

    data: also remove raw data packed into the run. Returns what was removed, and the bytes freed and kept in the
    run's folder. The run can still predict, and can still be resumed unless its data was removed.
    """
    run = RunFolder.open(path)
    before = _tree_bytes(run.path)
    removed = prune_checkpoints(run.checkpoints, keep_last=1, keep=run.record.chosen_step)
    removed += remove_left_rows(run)
    if data and (run.path / "data").is_dir():
        remove(run.path / "data")
        removed.append(run.path / "data")
    left = _tree_bytes(run.path)
    return {"removed": [str(folder) for folder in removed], "bytes_freed": before - left, "bytes_kept": left}


def _tree_bytes(path: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def doctor(folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns what decides whether and how fast hotrow runs here, to paste into a bug report. folders: of disks that
    are measured, and memory beside them."""
    backend = ops.backend()
    runtimes = openmp_runtimes()
    return {
        "versions": versions(),
        "host": host_facts(),
        "backend": {"name": backend.name, "isa": backend.isa, "threads": backend.threads, "reason": backend.reason},
        "isas": list(ops.isas()),
        "isa_limit": isa_limit(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "transparent_huge_pages": _setting(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "huge_pages_granted": ops.grants_huge_pages(),
        "available_memory_bytes": available_memory_bytes(),
        "disk_free_bytes": disk_free_bytes(Path.cwd()),
        "stores": _stores_facts(Path.cwd()),
        "open_files_limit": _limit("RLIMIT_NOFILE"),
        "openmp_runtimes": runtimes,
        "openmp_shared": len(runtimes) <= 1,
        "tensorboard": importlib.util.find_spec("tensorboard") is not None,
        "torch_threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("HOTROW_", "OMP_"))},
        **measured(folders),
    }


def openmp_runtimes() -> list[str]:
    """Returns the names of OpenMP runtimes in this process; two of them would compete for the same cores."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({Path(path).name for path in re.findall(r"\S*/(?:libgomp|libomp|libiomp)[^/\s]*", maps)})


def _setting(path: Path) -> str | None:
    """Returns the choice in brackets in a kernel setting's file."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _stores_facts(folder: Path) -> dict[str, Any]:
    """Returns what decides how fast rows in files of `folder` are: io_uring, direct I/O, limits."""
    refused = io_uring_refused()
    return {
        "file_system": file_system(folder),
        "io_uring": refused is None,
        "io_uring_refused": refused,
        **direct_io(folder),
        "locked_memory_limit_bytes": _limit("RLIMIT_MEMLOCK"),
    }


def _limit(name: str) -> int | None:
    """Returns this process's limit; None if there is none."""
    limit = resource.getrlimit(getattr(resource, name))[0]
    return None if limit == resource.RLIM_INFINITY else limit


def demo_on_synthetic(folder: Path) -> dict[str, Any]:
    """Makes synthetic clicks, packs them and trains a DLRM; reuses what `folder` already has."""
    started = time.monotonic()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    packed = folder / f"packed-{NUM_ROWS}-{TABLE_SCALE:g}"
    tiers = ops.backend().reason is None  # tiers need the native module
    where = f"the tables in {DRAM} of memory, the rest on disk" if tiers else "the tables in memory"
    say(f"1/2  preparing {NUM_ROWS:,} synthetic clicks: made up, with Criteo's columns, from a planted truth; {where}")
    if not (packed / DATASET).exists():
        with progress_bar() as progress:
            clicks = make_clicks(NUM_ROWS, scale=TABLE_SCALE)
            run_prepare("frame", clicks, packed, schema=parse_schema(SCHEMA, where="demo"), progress=progress)
    say("2/2  training a DLRM")
    memory = {"memory": {"dram": DRAM}} if tiers else {}
    dataset = PackedDataset.open(packed)
    recipe = choose_recipe(dataset.split("train").num_rows)
    config = make_config(apply_overrides({"data": str(packed), **memory}, as_overrides(recipe)), origin="demo")
    run = Run(train(config, folder=RunFolder.create(None, name=f"demo-{config.model.name}")).path)
    commands = ["hotrow fit YOUR_LOGS --label CLICK_COLUMN"]
    return result_of(run, f"{NUM_ROWS:,} synthetic rows", time.monotonic() - started, commands)


def result_of(run: Run, rows: str, seconds: float, commands: list[str]) -> dict[str, Any]:
    """What `fit` and `demo` print of a run on `rows`, with the commands that come next."""
    model = type(load_config(run.path / CONFIG).model).__name__.removesuffix("Spec")
    return {
        **run.summary(),
        "rows": rows,
        "seconds": round(seconds, 1),
        "next": commands[0],
        "text": run.closing_lines(f"{model} on {rows}", commands),
    }

"""Requests of one user and many candidates: how long they take, how many a second, and in how much memory.

    python -m benchmarks.serving EXPORT [--items 200] [--seconds 10] [--memory 1GiB] [--alone] [--out serving.json]
    python -m benchmarks.serving --make DIR [--rows 33762577]     # an export of Criteo-Kaggle's shape, not trained

A request has a user (all numbers, and the first half of the ids) and candidates (the other ids). Ids are drawn from the
export's vocabularies, frequent ones more often, as p(row) ~ 1 / row; one in a hundred is unknown. Requests come one
after another, each with a user and candidates of its own, on one core and then on two threads; the export's own
score.py, plain torch, gets the same rows. Both compute on one torch thread. Prints Markdown; `--out` gets JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from benchmarks.markdown import heads, table
from hotrow.base.machine import host_facts
from hotrow.base.records import read_sealed
from hotrow.config.load import make_config
from hotrow.data.chunk import Keys
from hotrow.data.native import hash_keys
from hotrow.export.export import (
    DOCUMENT,
    FOLDERS,
    OWN_NAMES,
    Description,
    Whole,
    becoming,
    file_record,
    network_source,
    write_keys,
)
from hotrow.run.checkpoint_files import write_tensors
from hotrow.serve.scorer import Scorer

NUM_REQUESTS = 64
UNKNOWN = 0.01
CRITEO_ROWS = 33_762_577
CRITEO_TABLES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
Request = tuple[dict[str, Any], list[dict[str, Any]]]
Seconds = list[float]


# ---- requests


def ids_of(
    export: Path, feature: dict[str, Any], tables: dict[str, Any], rng: np.random.Generator, n: int
) -> list[Any]:
    """Raw ids of a feature, as JSON has them."""
    vocabulary = tables[feature["table"]]["vocabulary"]
    stored = pq.read_table(export / vocabulary["file"])
    if not len(stored):
        return [None] * n
    ranks = np.exp(rng.random(n) * np.log(len(stored))).astype(np.int64) - 1
    by_rank = np.argsort(stored["row"].to_numpy(), kind="stable")
    keys = stored["key"].take(pa.array(by_rank[ranks])).to_pylist()
    if feature["keys"] == "bytes":
        made: list[Any] = [key.decode() if isinstance(key, bytes) else str(key) for key in keys]
    elif feature.get("base") == 16:
        made = [format(key % 2**32, "x") for key in keys]
    else:
        made = keys
    unknown = rng.random(n) < UNKNOWN
    other = "ffffffff" if isinstance(made[0], str) else 2**40 + 1
    return [other if new else key for key, new in zip(made, unknown, strict=True)]


def requests_of(export: Path, num_items: int) -> list[Request]:
    """Requests of users and candidates."""
    about, rng = read_sealed(export / "export.json", cure="export again"), np.random.default_rng(0)
    tables = {each["name"]: each for each in about["tables"]}
    if any(each["kind"] != "one_hot" for each in about["features"]):
        raise SystemExit("an export of lists is not what this measures; pass one of single ids")
    features, half = about["features"], len(about["features"]) // 2
    users = {each["name"]: rng.lognormal(1, 1, NUM_REQUESTS).round(2).tolist() for each in about["dense"]}
    users |= {each["name"]: ids_of(export, each, tables, rng, NUM_REQUESTS) for each in features[:half]}
    total = NUM_REQUESTS * num_items
    items = {each["name"]: ids_of(export, each, tables, rng, total) for each in features[half:]}
    rows = [dict(zip(items, cells, strict=True)) for cells in zip(*items.values(), strict=True)]
    return [
        ({name: cells[k] for name, cells in users.items()}, rows[k * num_items : (k + 1) * num_items])
        for k in range(NUM_REQUESTS)
    ]


# ---- measuring


def latencies(answer: Callable[[Request], Any], requests: list[Request], seconds: float) -> tuple[Seconds, Seconds]:
    """Seconds of each request, one after another: on the clock, and of the processor, which other programs share."""
    for request in requests[:3]:
        answer(request)
    clock, processor = list[float](), list[float]()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for request in requests:
            start, used = time.perf_counter(), time.thread_time()
            answer(request)
            clock.append(time.perf_counter() - start)
            processor.append(time.thread_time() - used)
    return clock, processor


def throughput(answer: Callable[[Request], Any], requests: list[Request], seconds: float, threads: int) -> float:
    """Requests a second of several threads, each of which sends the next as soon as it has an answer."""
    counts, stop = [0] * threads, threading.Event()

    def ask(place: int) -> None:
        k = place
        while not stop.is_set():
            answer(requests[k % len(requests)])
            counts[place] += 1
            k += 1

    with ThreadPoolExecutor(threads) as executor:
        asking = [executor.submit(ask, place) for place in range(threads)]
        began = time.perf_counter()
        time.sleep(seconds)
        stop.set()
        for each in asking:
            each.result()
    return sum(counts) / (time.perf_counter() - began)


def memory_bytes() -> dict[str, int]:
    """Memory of this process: what is its own, and what is mapped of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"own": "RssAnon", "of_files": "RssFile"}
    return {name: 1024 * int(status[field].split()[0]) for name, field in names.items()}


def measure_plain(
    export: Path, requests: list[Request], found: list[Any], measured: Callable[[str, Any, float, dict[str, int]], None]
) -> None:
    """The export's own score.py, whose scores must be those that were found for the first requests."""
    spec = importlib.util.spec_from_file_location("score", export / "score.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before, began = memory_bytes(), time.perf_counter()
    plain = module.Scorer(export)

    def columns(request: Request) -> dict[str, list[Any]]:
        user, items = request
        own = {name: [item[name] for item in items] for name in items[0]}
        return own | {name: [cell] * len(items) for name, cell in user.items()}

    measured("score.py", lambda own: plain.score(columns(own)), time.perf_counter() - began, before)
    for (user, items), own in zip(requests, found, strict=False):
        np.testing.assert_allclose(plain.score(columns((user, items))).numpy(), own, atol=1e-5)


def measure(export: Path, num_items: int, seconds: float, memory: str | None, *, alone: bool) -> dict[str, Any]:
    """Both scorers on the same requests. alone: without score.py, which holds everything in memory."""
    torch.set_num_threads(1)
    requests, report = requests_of(export, num_items), dict[str, Any]()

    def both(name: str, answer: Callable[[Request], Any], opening_s: float, before: dict[str, int]) -> None:
        taken, used = latencies(answer, requests, seconds)
        after = memory_bytes()
        report[name] = {
            "opening_s": round(opening_s, 3),
            "p50_ms": round(1e3 * statistics.median(taken), 3),
            "p99_ms": round(1e3 * float(np.quantile(taken, 0.99)), 3),
            "processor_p50_ms": round(1e3 * statistics.median(used), 3),
            "requests": len(taken),
            "per_s_on_2_threads": round(throughput(answer, requests, seconds, 2), 1),
            "memory_bytes": {kind: after[kind] - before[kind] for kind in after},
        }

    with tempfile.TemporaryDirectory(dir=export.parent) as work:
        before, began = memory_bytes(), time.perf_counter()
        scorer = Scorer(export, memory=memory, work=work)
        both("hotrow.Scorer", lambda own: scorer.score(user=own[0], items=own[1]), time.perf_counter() - began, before)
        began = time.perf_counter()
        Scorer(export, memory=memory, work=work)
        report["hotrow.Scorer"]["opening_again_s"] = round(time.perf_counter() - began, 3)
        found = [scorer.score(user=user, items=items) for user, items in requests[:4]]
        vocabularies = sum(path.stat().st_size for path in (Path(work) / "vocab").iterdir())
    num_ids = sum(pq.read_metadata(path).num_rows for path in export.glob("vocab/*"))
    report["bytes_per_id"] = round(vocabularies / max(1, num_ids), 1)
    if not alone:
        measure_plain(export, requests, found, both)
    return {
        **report,
        "items": num_items,
        "export_bytes": sum(p.stat().st_size for p in export.rglob("*") if p.is_file()),
    }


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    columns = [
        "scorer",
        "p50",
        "p99",
        "p50 of processor time",
        "requests/s, 2 threads",
        "opened in",
        "memory: own",
        "of files",
    ]
    rows = []
    for name in (name for name in ("hotrow.Scorer", "score.py") if name in report):
        own = report[name]
        memory = [f"{own['memory_bytes'][kind] / 2**20:,.0f} MiB" for kind in ("own", "of_files")]
        times = [f"{own[name]:.2f} ms" for name in ("p50_ms", "p99_ms", "processor_p50_ms")]
        times.append(f"{own['per_s_on_2_threads']:,.0f}")
        rows.append([f"`{name}`", *times, f"{own['opening_s']:.2f} s", *memory])
    what = f"1 user x {report['items']} candidates, an export of {report['export_bytes'] / 2**20:,.0f} MiB"
    again = f"{report['bytes_per_id']} bytes an id, opened again in {report['hotrow.Scorer']['opening_again_s']:.2f} s"
    return "\n".join([f"{what}; {again}", "", *table(heads(columns), rows)])


# ---- an export of Criteo-Kaggle's shape


class Random:
    """Rows of a table, made piece by piece."""

    dtype = torch.float32

    def __init__(self, num_rows: int, dim: int) -> None:
        self.shape = torch.Size((num_rows, dim))

    def pieces(self) -> Any:
        return (slice(start, min(start + 65536, self.shape[0])) for start in range(0, self.shape[0], 65536))

    def read(self, piece: slice) -> Tensor:
        rng = np.random.default_rng(piece.start)
        return torch.from_numpy(rng.random((piece.stop - piece.start, self.shape[1]), np.float32) - 0.5) * 0.1


def make(out: Path, num_rows: int) -> None:
    """Writes an export of Criteo-Kaggle's columns with random weights; num_rows: of all tables together."""
    sizes = [max(3, size * num_rows // CRITEO_ROWS) for size in CRITEO_TABLES]
    spec = make_config({"data": "d"}).model
    names, numbers = [f"C{k + 1}" for k in range(26)], [f"I{k + 1}" for k in range(13)]
    network = spec.build(num_dense=13, dims=dict.fromkeys(names, 16), generator=torch.Generator().manual_seed(0))
    with becoming(out, "export", OWN_NAMES, FOLDERS, doing="making an export") as partial:
        to = Whole(partial)
        files = {"model.safetensors": write_tensors(partial / "model.safetensors", dict(network.state_dict()))}
        described = []
        for k, (name, size) in enumerate(zip(names, sizes, strict=True)):
            file, own = f"tables/{name}.safetensors", f"vocab/{name}.parquet"
            files[file] = to.table(file, f"{name}.weight", Random(size, 16))
            keys = (np.arange(1, size, dtype=np.int64) * 2654435761 + k) % 2**32
            order = np.argsort(hash_keys(Keys(keys)), kind="stable")
            ids = pa.table({"key": keys[order], "row": 1 + order})
            write_keys(partial / own, pa.int64(), [ids])
            files[own] = file_record(partial / own)
            vocabulary = {"file": own, "num_keys": size - 1, "unknown_row": 0, "missing_row": 0, "hash_cap": None}
            described.append({
                "name": name, "num_embeddings": size, "embedding_dim": 16, "pooling": "sum", "features": [name],
                "file": file, "tensor": f"{name}.weight", "trained_as": "float32",
                "vocabulary": {**vocabulary, "min_count": 1, "num_dropped": 0},
            })  # fmt: skip
        texts = {"model.py": network_source("dlrm", spec.trained_for)}
        root = Path(__file__).resolve().parents[1] / "src" / "hotrow"
        for name, path in (("score.py", "export/score.py"), ("seen.py", "data/seen.py")):
            texts[name] = (root / path).read_text()
        texts["transforms/log1p_clip0.py"] = (root / "data/transforms/log1p_clip0.py").read_text()
        for name, text in texts.items():
            (partial / name).write_text(text)
            files[name] = file_record(partial / name)
        one_hot = {"kind": "one_hot", "separator": None, "keys": "int", "base": 16}
        description = Description(
            created_by="benchmarks.serving",
            run="made",
            step=0,
            dataset={},
            model={**spec.model_dump(mode="json"), "num_dense": 13},
            csv=None,
            dense=tuple({"name": name, "transform": "log1p_clip0", "missing": 0.0} for name in numbers),
            features=tuple({"name": name, "table": name, **one_hot} for name in names),
            tables=tuple(described),
            missing=("", "NA"),
            labels=("label",),
            files={},
        )
        DOCUMENT.write(partial / "export.json", replace(description, files=files))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", nargs="?", type=Path)
    parser.add_argument("--items", type=int, default=200, help="candidates of a request")
    parser.add_argument("--seconds", type=float, default=10, help="for each figure")
    parser.add_argument("--memory", help="budget of the scorer, e.g. 1GiB")
    parser.add_argument("--alone", action="store_true", help="leave out score.py, which holds everything in memory")
    parser.add_argument("--out", type=Path, help="file for the report as JSON")
    parser.add_argument("--make", type=Path, help="write an export here, and measure nothing")
    parser.add_argument("--rows", type=int, default=CRITEO_ROWS, help="rows of all its tables")
    options = parser.parse_args()
    if options.make is not None:
        make(options.make, options.rows)
        return
    if options.export is None:
        parser.error("pass the folder of an export, or --make")
    report = measure(options.export, options.items, options.seconds, options.memory, alone=options.alone)
    report |= {"host": host_facts(), "load": os.getloadavg()[0]}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(page(report))


if __name__ == "__main__":
    main()

"""Requests of one user and many candidates: how long they take, how many a second, in how much memory, amid versions.

    python -m benchmarks.serving EXPORT [--size 2GB] [--cells latency ...] [--items 200 500] [--memory 1GiB]
                                        [--seconds 10] [--out serving.json]

A request has a user (all numbers, and the first half of the ids) and candidates (the other ids). Ids are drawn from the
export's vocabularies, frequent ones more often, as p(row) ~ 1 / row; one in a hundred is unknown. If EXPORT is not
there, it is made, with Criteo-Kaggle's columns, tables of `--size` and random weights. The cells:

latency     one request after another, each of another user, on one thread: everything in memory, and cold. Cold means:
            the page cache has the first tenth of each table (the frequent rows) and what these requests look up, but
            for the pages of one row in a hundred, which are dropped before each request: from the process by
            madvise(MADV_DONTNEED), then from the page cache by posix_fadvise(POSIX_FADV_DONTNEED).
throughput  two threads, each of which sends the next request as soon as it has an answer: from raw rows to scores, and
            the dense part alone on rows that were looked up before, beside ONNX Runtime and plain torch. From raw rows,
            these two read and look up by the export's score.py, which holds everything in memory. All use one thread.
            The six loops run in turns of at most TURN_S, each for `--seconds` in all: the median turn, and the range.
memory      most memory of a scorer under `--memory`, whose requests ask for ids all over the tables, in a process of
            its own. With `--holes` the tables are files without content, so that 20GB take no disk.
versions    a scorer follows a link NUM_TURNS times, back and forth among NUM_VERSIONS exports, while one thread sends
            requests. EXPORT is not read; the exports are made beside it, with tables of `--size`, and differ in 1 % of
            the rows and all dense weights. Every answer is compared with that of a new scorer of its version.

Prints Markdown; `--out` gets JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file

from benchmarks.markdown import heads, table
from benchmarks.serving_export import DIM, make
from hotrow.base.files import parse_bytes
from hotrow.base.machine import host_facts
from hotrow.base.records import read_sealed
from hotrow.data.chunk import keys_to_arrow
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.export.dense import write_dense
from hotrow.export.inputs import load_module
from hotrow.export.score import build_network
from hotrow.kernels import ops
from hotrow.serve.scorer import Scorer
from hotrow.serve.version import one_thread

NUM_REQUESTS = 64
UNKNOWN = 0.01
COLD = 0.01
WARM = 0.1
"""Share of each table that the page cache has before the first cold request."""
SPREAD_REQUESTS = 600
TURN_S = 10
"""Seconds of a closed loop before the next contender has its turn, so that all see the same machine."""
NUM_VERSIONS, NUM_TURNS = 4, 100
Request = tuple[dict[str, Any], list[dict[str, Any]]]
Answer = Callable[[Request], Any]


# ---- requests


def ids_of(
    export: Path, feature: dict[str, Any], tables: dict[str, Any], rng: np.random.Generator, n: int, *, spread: bool
) -> list[Any]:
    """Raw ids of a feature, as JSON has them. spread: all rows alike, not frequent ones more often."""
    vocabulary = tables[feature["table"]]["vocabulary"]
    stored = [*Vocabulary.open(export / vocabulary["file"]).entries()]
    if not stored:
        return [None] * n
    by_rank = np.argsort(np.concatenate([rows for _, rows in stored]), kind="stable")
    ranks = rng.integers(len(by_rank), size=n)
    if not spread:
        ranks = np.exp(rng.random(n) * np.log(len(by_rank))).astype(np.int64) - 1
    known = pa.concat_arrays([keys_to_arrow(keys) for keys, _ in stored])
    keys = known.take(pa.array(by_rank[ranks])).to_pylist()
    if feature["keys"] == "bytes":
        made: list[Any] = [key.decode() if isinstance(key, bytes) else str(key) for key in keys]
    elif feature["keys"] == "hex":
        made = [format(key % 2**32, "x") for key in keys]
    else:
        made = keys
    unknown = rng.random(n) < (0 if spread else UNKNOWN)
    other = "ffffffff" if isinstance(made[0], str) else 2**40 + 1
    return [other if new else key for key, new in zip(made, unknown, strict=True)]


def requests_of(export: Path, num_items: int, num_requests: int, *, spread: bool = False) -> list[Request]:
    """Requests of users and candidates."""
    about, rng = read_sealed(export / "export.json", cure="export again"), np.random.default_rng(0)
    tables = {each["name"]: each for each in about["tables"]}
    if any(each["kind"] != "one_hot" for each in about["features"]):
        raise SystemExit("an export of lists is not what this measures; pass one of single ids")
    features, half = about["features"], len(about["features"]) // 2
    draw = partial(ids_of, export, tables=tables, rng=rng, spread=spread)
    users = {each["name"]: rng.lognormal(1, 1, num_requests).round(2).tolist() for each in about["dense"]}
    users |= {each["name"]: draw(each, n=num_requests) for each in features[:half]}
    items = {each["name"]: draw(each, n=num_requests * num_items) for each in features[half:]}
    rows = [dict(zip(items, cells, strict=True)) for cells in zip(*items.values(), strict=True)]
    return [
        ({name: cells[k] for name, cells in users.items()}, rows[k * num_items : (k + 1) * num_items])
        for k in range(num_requests)
    ]


def columns_of(request: Request) -> dict[str, list[Any]]:
    """The rows of a request as columns, for score.py."""
    user, items = request
    own = {name: [item[name] for item in items] for name in items[0]}
    return own | {name: [cell] * len(items) for name, cell in user.items()}


# ---- measuring


def latencies(
    answer: Answer, requests: list[Request], seconds: float, before: Callable[[int], object] = lambda k: None
) -> dict[str, Any]:
    """Milliseconds of requests one after another: on the clock, and of the processor, which other programs share.

    before: called before each request with its number.
    """
    for k in range(3):
        answer(requests[k % len(requests)])
    clock, processor = list[float](), list[float]()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for k, request in enumerate(requests):
            before(k)
            start, used = time.perf_counter(), time.thread_time()
            answer(request)
            clock.append(time.perf_counter() - start)
            processor.append(time.thread_time() - used)
    return {
        "p50_ms": round(1e3 * statistics.median(clock), 3),
        "p99_ms": round(1e3 * float(np.quantile(clock, 0.99)), 3),
        "processor_p50_ms": round(1e3 * statistics.median(processor), 3),
        "requests": len(clock),
    }


def closed_loop(answer: Callable[[Any], Any], requests: list[Any], seconds: float, threads: int = 2) -> list[float]:
    """Seconds of every request of several threads, each of which sends the next as soon as it has an answer."""
    ended = time.perf_counter() + seconds

    def ask(place: int) -> list[float]:
        taken, k = list[float](), place
        while (began := time.perf_counter()) < ended:
            answer(requests[k % len(requests)])
            taken.append(time.perf_counter() - began)
            k += 1
        return taken

    with ThreadPoolExecutor(threads) as executor:
        return [each for asking in executor.map(ask, range(threads)) for each in asking]


def asked(scorer: Scorer) -> Answer:
    return lambda request: scorer.score(user=request[0], items=request[1])


# ---- latency


class Pages:
    """Pages of an export's tables, as the page cache has them or not."""

    def __init__(self, export: Path, scorer: Scorer) -> None:
        about = read_sealed(export / "export.json", cure="export again")
        self._version = scorer._now
        files = {each["name"]: export / each["file"] for each in about["tables"]}
        self._paths = [files[each["table"]] for each in about["features"]]
        self._weights = [self._version.mapped.weights[each["table"]] for each in about["features"]]
        own = self._version.mapped._rows_of
        self._pinned = np.array([own[each["name"]].num_pinned for each in about["features"]])
        self._row_bytes = np.array([own[each["name"]].row_bytes for each in about["features"]])
        self._files = {path: path.open("rb") for path in self._paths}
        self._libc = ctypes.CDLL(None, use_errno=True)

    def warm(self) -> None:
        """Leaves the first tenth of each table in the page cache, page by page, and nothing else of it."""
        os.sync()
        self._version.mapped.let_go()
        for weights, path, pinned in zip(self._weights, self._paths, self._pinned, strict=True):
            if not pinned:
                self._let_go(weights.data_ptr(), weights.nbytes)
            file, size = self._files[path].fileno(), path.stat().st_size
            os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file, 0, size, os.POSIX_FADV_RANDOM)
            for start in range(0, int(WARM * size), mmap.PAGESIZE):
                os.pread(file, mmap.PAGESIZE, start)

    def of(self, request: Request, share: float) -> list[tuple[int, int]]:
        """Pages of a share of the rows that a request looks up: number of the feature, and place in its table."""
        user, items = request
        rows = self._version._cells.read(user, items, len(items)).ids
        shared = np.array([name in user for name in self._version._cells.names])
        own = [(f, row) for f, ids in enumerate(rows) for row in (ids[:1] if shared[f] else ids).tolist()]
        # A page has rows of both kinds where the pinned ones end.
        ends = -(-self._pinned * self._row_bytes // mmap.PAGESIZE)
        pages = [(f, row * int(self._row_bytes[f]) // mmap.PAGESIZE) for f, row in own]
        pages = [(f, page) for f, page in pages if page >= ends[f]]
        rng = np.random.default_rng(len(own))
        chosen = rng.choice(len(pages), min(round(share * len(own)), len(pages)), replace=False)
        return sorted({pages[k] for k in chosen})

    def drop(self, pages: Iterable[tuple[int, int]]) -> None:
        """Drops pages from this process and from the page cache."""
        for f, page in pages:
            start = page * mmap.PAGESIZE
            self._let_go(self._weights[f].data_ptr() + start, mmap.PAGESIZE)
            begin = self._paths[f].stat().st_size - self._weights[f].nbytes  # a multiple of a page
            os.posix_fadvise(self._files[self._paths[f]].fileno(), begin + start, mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)

    def cached(self, pages: Iterable[tuple[int, int]]) -> int:
        """How many of the pages the page cache has."""
        return sum(self._resident(self._weights[f].data_ptr() + page * mmap.PAGESIZE, 1) for f, page in pages)

    def cached_share(self) -> float:
        """Share of all tables' pages that the page cache has."""
        sizes = [-(-weights.nbytes // mmap.PAGESIZE) for weights in self._weights]
        found = [self._resident(each.data_ptr(), size) for each, size in zip(self._weights, sizes, strict=True)]
        return round(sum(found) / sum(sizes), 3)

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)

    def _resident(self, address: int, num_pages: int) -> int:
        found = (ctypes.c_ubyte * num_pages)()
        self._libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_pages * mmap.PAGESIZE), found)
        return int((np.frombuffer(found, np.uint8) & 1).sum())


def cold(
    scorer: Scorer, requests: list[Request], pages: Pages, chosen: list[list[tuple[int, int]]], seconds: float
) -> dict[str, Any]:
    """Requests before each of which its `chosen` pages are dropped."""
    pages.warm()
    for user, items in requests:
        scorer.score(user=user, items=items)
    left = list[int]()

    def cool(k: int) -> None:
        pages.drop(chosen[k])
        left.append(len(chosen[k]) - pages.cached(chosen[k]))

    found = latencies(asked(scorer), requests, seconds, cool)
    return {**found, "cold_pages": round(statistics.mean(left), 1), "cached_share": pages.cached_share()}


def measure_latency(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every number of candidates, warm and cold."""
    export, most = options.export, max(options.items)
    began = time.perf_counter()
    Scorer(export, memory=options.memory)
    opening_s, began = time.perf_counter() - began, time.perf_counter()
    scorer = Scorer(export, memory=options.memory)
    report: dict[str, Any] = {
        "opening_s": round(opening_s, 3),
        "opening_again_s": round(time.perf_counter() - began, 3),
    }
    drawn, pages = requests_of(export, most, NUM_REQUESTS), Pages(export, scorer)
    for num_items in options.items:
        requests = [(user, items[:num_items]) for user, items in drawn]
        chosen = [pages.of(request, COLD) for request in requests]
        report[f"{num_items} candidates"] = latencies(asked(scorer), requests, options.seconds)
        report[f"{num_items} candidates, cold"] = cold(scorer, requests, pages, chosen, options.seconds)
    return report


# ---- throughput


def measure_throughput(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Requests a second of hotrow, ONNX Runtime and plain torch, whose scores must be the same."""
    import onnxruntime  # a peer, which only this cell needs

    warnings.simplefilter("ignore")  # score.py says what stands out in rows, which are made up
    export, num_items = options.export, options.items[0]
    about, requests = (
        read_sealed(export / "export.json", cure="export again"),
        requests_of(export, num_items, NUM_REQUESTS),
    )
    scorer, plain = Scorer(export, memory=options.memory), load_module(export / "score.py").Scorer(export)
    write_dense(work / "dense.onnx", about, network=export / "model.py", weights=export / "model.safetensors")
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(work / "dense.onnx", settings)
    definition, version = load_module(export / "model.py"), scorer._now
    network = build_network(definition, about)
    network.load_state_dict(load_file(export / "model.safetensors"))

    @torch.no_grad()
    def own(inputs: Any) -> Any:
        with one_thread(), ops.weights_stay(version._packed):
            return version._scores(*inputs)

    @torch.no_grad()
    def torch_alone(inputs: Any) -> Any:
        return definition.scores(network(*inputs)).numpy()

    def onnx(inputs: Any) -> Any:
        return session.run(None, {"dense": inputs[0].numpy(), "rows": inputs[1].numpy()})[0]

    contenders: dict[str, tuple[Callable[[Any], Any], Answer]] = {
        "hotrow": (own, asked(scorer)),
        "ONNX Runtime": (onnx, lambda request: onnx(plain.inputs(columns_of(request)))),
        "torch": (torch_alone, lambda request: plain.score(columns_of(request)).numpy()),
    }
    looked_up = [plain.inputs(columns_of(request)) for request in requests]
    expected = [scorer.score(user=user, items=items) for user, items in requests[:4]]
    loops = dict[tuple[str, str], Callable[[float], list[float]]]()
    for name, (dense, whole) in contenders.items():
        for k, wanted in enumerate(expected):
            np.testing.assert_allclose(dense(looked_up[k]), wanted, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(whole(requests[k]), wanted, atol=1e-5, err_msg=name)
        loops[name, "dense"] = partial(closed_loop, dense, looked_up)
        loops[name, "whole"] = partial(closed_loop, whole, requests)
    turns = max(1, round(options.seconds / TURN_S))
    rates, taken = {loop: list[float]() for loop in loops}, {loop: list[float]() for loop in loops}
    for _ in range(turns):
        for loop, run in loops.items():
            taken[loop] += (found := run(options.seconds / turns))
            rates[loop].append(len(found) * turns / options.seconds)
    report: dict[str, Any] = {
        f"{name}, {kind}": {
            "per_s": round(statistics.median(rates[name, kind]), 1),
            "range": f"{min(rates[name, kind]):.1f} to {max(rates[name, kind]):.1f}",
            "requests": len(taken[name, kind]),
            "p50_ms": round(1e3 * statistics.median(taken[name, kind]), 3),
            "p99_ms": round(1e3 * float(np.quantile(taken[name, kind], 0.99)), 3),
        }
        for name, kind in loops
    }
    for kind in ("dense", "whole"):
        ratios = [
            own / max(others)
            for own, *others in zip(*(rates[name, kind] for name in ("hotrow", "ONNX Runtime", "torch")), strict=True)
        ]
        report[f"{kind}_ratio"] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return {**report, "turns": turns, "closed_loop_s": options.seconds * len(loops)}


# ---- memory


def memory_bytes(folders: Iterable[Path]) -> dict[str, int]:
    """Memory of this process: its own, pinned, and mapped of files in these folders and of others (libraries)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {"own": "RssAnon", "pinned": "VmLck"}
    found = {name: 1024 * int(status[field].split()[0]) for name, field in fields.items()}
    within, prefixes, mapped = False, tuple(f"{folder.resolve()}/" for folder in folders), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split(None, 5)
        if not name.endswith(":"):
            within = len(words) == 5 and words[4].startswith(prefixes)
        elif name == "Rss:" and within:
            mapped += 1024 * int(words[0])
    return {**found, "tables": mapped, "others": 1024 * int(status["RssFile"].split()[0]) - mapped}


def most_memory(export: Path, work: Path, requests: Path, memory: str | None) -> dict[str, Any]:
    """The most memory after any request; in a process that has nothing else."""
    folders = export, work
    before = memory_bytes(folders)
    scorer, most, largest = Scorer(export, memory=memory), dict[str, int](), 0
    with requests.open() as lines:
        for line in lines:
            user, items = json.loads(line)
            scorer.score(user=user, items=items)
            now = memory_bytes(folders)
            most = {name: max(most.get(name, 0), value) for name, value in now.items()}
            largest = max(largest, sum(now[name] for name in ("own", "tables")))
    return {"before": before, "most": most, "most_of_scorer": largest - before["own"], "unknown": _unknown(scorer)}


def _unknown(scorer: Scorer) -> int:
    return sum(own.get("unknown", 0) for own in scorer.seen.columns.values())


def measure_memory(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """`most_memory` in a process of its own, which reads one request at a time."""
    with (work / "requests.jsonl").open("w") as file:
        for request in requests_of(options.export, options.items[0], SPREAD_REQUESTS, spread=True):
            file.write(json.dumps(request) + "\n")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        found = executor.submit(most_memory, options.export, work, work / "requests.jsonl", options.memory)
        tables = sum(path.stat().st_size for path in (options.export / "tables").iterdir())
        return {**found.result(), "budget": options.memory, "tables_bytes": tables, "requests": SPREAD_REQUESTS}


# ---- versions


def measure_versions(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Requests before and while a scorer follows a link."""
    for day in range(NUM_VERSIONS):
        make(work / f"{day}", rows_of(options.size), day=day)
    requests, link = requests_of(work / "0", options.items[0], 8), work / "model"
    expected = dict[str, list[bytes]]()
    for day in range(NUM_VERSIONS):
        own = Scorer(work / f"{day}")
        expected[own.version] = [own.score(user=user, items=items).tobytes() for user, items in requests]
    link.symlink_to("0")
    scorer = Scorer(link, memory=options.memory)
    found, failed, done = list[tuple[float, float, str, bool]](), list[str](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            k = len(found) % len(requests)
            began = time.perf_counter()
            try:
                scores, version, _ = scorer.answer(user=requests[k][0], items=requests[k][1])
            except Exception as error:
                failed.append(repr(error))
                continue
            taken = time.perf_counter() - began
            found.append((began, taken, version, scores.tobytes() == expected[version][k]))

    following = list[float]()
    for user, items in requests:
        scorer.score(user=user, items=items)
    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(ask)
        time.sleep(options.seconds)
        began = time.perf_counter()
        try:
            for turn in range(1, NUM_TURNS + 1):
                (beside := work / "beside").symlink_to(f"{turn % NUM_VERSIONS}")
                beside.replace(link)
                start = time.perf_counter()
                scorer.follow()
                following.append(time.perf_counter() - start)
        finally:
            ended = time.perf_counter()
            done.set()
        asking.result()
    report: dict[str, Any] = {
        "turns": NUM_TURNS,
        "requests": sum(began <= at < ended for at, *_ in found),
        "failed": len(failed),
        "versions_answered": len({version for *_, version, _ in found}),
        "of_no_version": sum(not is_right for *_, is_right in found),
        "following_s": round(statistics.median(following), 3),
    }
    for when, first, last in (("before", 0.0, began), ("meanwhile", began, ended)):
        taken = [1e3 * own for at, own, *_ in found if first <= at < last]
        report |= {f"p{q}_{when}_ms": round(float(np.quantile(taken, q / 100)), 3) for q in (50, 99)}
    return {**report, "p99_ratio": round(report["p99_meanwhile_ms"] / report["p99_before_ms"], 3)}


# ---- all of it

CELLS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "latency": measure_latency,
    "throughput": measure_throughput,
    "memory": measure_memory,
    "versions": measure_versions,
}


def rows_of(size: str) -> int:
    """How many rows have so many bytes."""
    return parse_bytes(size) // (4 * DIM)


def page(report: dict[str, Any]) -> str:
    """The report as Markdown: of each cell a table of its figures."""
    lines = list[str]()
    for cell in (name for name in CELLS if name in report):
        rows = {name: own for name, own in report[cell].items() if isinstance(own, dict)}
        columns = list(dict.fromkeys(name for own in rows.values() for name in own))
        if rows:
            body = [[name, *(_shown(column, own.get(column, "")) for column in columns)] for name, own in rows.items()]
            lines += [*table(heads([cell, *columns]), body), ""]
        lines += [f"{name}: {_shown(name, own)}" for name, own in report[cell].items() if name not in rows]
        lines.append("")
    return "\n".join(lines).rstrip()


def _shown(name: str, value: Any) -> str:
    is_bytes = name in ("own", "pinned", "tables", "others", "tables_bytes", "most_of_scorer")
    return f"{value / 2**20:,.1f} MiB" if is_bytes and not isinstance(value, str) else str(value)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="folder of an export; made if there is none")
    parser.add_argument("--size", default="2GB", help="of the tables of an export that is made")
    parser.add_argument("--holes", action="store_true", help="make tables that take no disk")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["latency"])
    parser.add_argument("--items", type=int, nargs="+", default=[200, 500], help="candidates of a request")
    parser.add_argument("--seconds", type=float, default=10, help="for each figure")
    parser.add_argument("--memory", help="budget of the scorer, e.g. 1GiB")
    parser.add_argument("--out", type=Path, help="file for the report as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.export.exists() and options.cells != ["versions"]:
        make(options.export, rows_of(options.size), holes=options.holes)
    report: dict[str, Any] = {"host": host_facts(), "load": os.getloadavg()[0]}
    for name in options.cells:
        with tempfile.TemporaryDirectory(dir=options.export.absolute().parent) as work:
            report[name] = CELLS[name](options, Path(work))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(page(report))


if __name__ == "__main__":
    main()

"""What frequency admission gives a row cache, and what it takes: hits of the real cache beside the best there can be.

    python -m benchmarks.admission [--data FOLDER] [--speed] [STREAM ...]

Batches of 2,048 lookups come and go through the cache that training has, four ahead of the one in use, over streams of
one table: the real ones of FOLDER (default ../shared/data), Zipf over the ranks of 1,000,000 rows numbered at random,
one whose ranks drift (a tenth of the rows change places after every 102,400 lookups), and one into which a scan of all
rows is mixed (a fifth of the lookups). Printed: the share of a batch's different rows that were resident, over the last
three quarters of the batches, with each policy without and with admission, and Belady's optimum, which knows the future
and has no batches in flight: the table of docs/memory.md. Nothing is trained.

--speed prints instead, of Zipf 1.05 and a tenth, the microseconds of a batch's admit and release, interleaved.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.hot_trackers import DATA
from benchmarks.markdown import clean_rounds, table
from hotrow.inspect.accesses import open_accesses
from hotrow.inspect.reuse import belady_hits
from hotrow.placement.budget import ADMISSIONS, POLICIES
from hotrow.placement.native import backend
from hotrow.study import bench

BATCH, DEPTH, NUM_ROWS, NUM_LOOKUPS, SEED = 2048, 4, 1_000_000, 1000 * 2048, 0
PARTS = (10, 32)
Ids = NDArray[np.int64]


# ---- streams


def zipf(exponent: float, num: int = NUM_LOOKUPS, seed: int = SEED) -> Ids:
    """Ranks."""
    reach = np.cumsum(np.arange(1, NUM_ROWS + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(reach, np.random.default_rng(seed).random(num) * reach[-1]).astype(np.int64)


def named(ranks: Ids) -> Ids:
    """Rows, numbered at random."""
    return np.random.default_rng(SEED + 1).permutation(NUM_ROWS)[ranks]


def drifting() -> Ids:
    """Zipf 1.05, whose rows change ranks."""
    rng = np.random.default_rng(SEED + 2)
    names, parts = rng.permutation(NUM_ROWS), []
    for part in np.split(zipf(1.05), 20):
        parts.append(names[part])
        moved = np.flatnonzero(rng.random(NUM_ROWS) < 0.1)
        names[moved] = names[rng.permutation(moved)]
    return np.concatenate(parts)


def scanned() -> Ids:
    """Zipf 1.05, of which every fifth lookup, by chance, is the next row of a scan."""
    ids = named(zipf(1.05))
    scan = np.flatnonzero(np.random.default_rng(SEED + 3).random(len(ids)) < 0.2)
    ids[scan] = np.arange(len(scan)) % NUM_ROWS
    return ids


def taobao_items(data: Path) -> Ids:
    """In order of time, numbered through."""
    with gzip.open(data / "taobao_userbehavior_110k.csv.gz", "rt") as lines:
        items = [int(line.split(",")[1]) for line in lines]
    return np.unique(items, return_inverse=True)[1].astype(np.int64)


def trace(data: Path) -> Ids:
    (lookups,) = open_accesses(data / "embedding_trace_500k_medium.txt.gz").tables
    return np.concatenate([*lookups.batches(1 << 16)]).astype(np.int64)


STREAMS: dict[str, Callable[[Path], Ids]] = {
    "access trace": trace,
    "Taobao items": taobao_items,
    "Zipf 0.9": lambda _: named(zipf(0.9)),
    "Zipf 1.05": lambda _: named(zipf(1.05)),
    "Zipf 1.2": lambda _: named(zipf(1.2)),
    "drift": lambda _: drifting(),
    "scan": lambda _: scanned(),
}


# ---- the cache


class Cache:
    """One table's, of rows of a single weight, over a store in memory; batches are ahead of the one in use."""

    def __init__(self, num_rows: int, cached: int, policy: str, admission: str) -> None:
        self._caches, self._flights = backend().make_caches(), deque[Any]()
        which = POLICIES.index(policy), ADMISSIONS.index(admission)  # type: ignore[arg-type]
        store, slots = backend().open_dram_store(4, num_rows, "rows"), [np.zeros((num_rows, 1), np.float32)]
        self._caches.add((num_rows, 0, cached), *which, (1, 0.1, 0, 1, 0), [], store, slots)

    def step(self, ids: Ids) -> None:
        """A batch comes, and the one DEPTH before it is over."""
        self._flights.append(self._caches.admit(ids, [(0, 0, len(ids))], True, 1)[0])  # noqa: FBT003
        if len(self._flights) > DEPTH:
            self._flights.popleft().release(True)  # noqa: FBT003

    def counts(self) -> tuple[int, int]:
        """(rows, hits) so far."""
        counters = self._caches.counters(0)
        return counters["rows"], counters["hit_rows"]


def hit_share(batches: list[Ids], num_rows: int, cached: int, policy: str, admission: str) -> float:
    """Of the different rows of a batch, over the last three quarters of the batches."""
    cache = Cache(num_rows, cached, policy, admission)
    first = len(batches) // 4
    for ids in batches[:first]:
        cache.step(ids)
    before = cache.counts()
    for ids in batches[first:]:
        cache.step(ids)
    rows, hits = (now - then for now, then in zip(cache.counts(), before, strict=True))
    return hits / rows


def best_share(batches: list[Ids], num_rows: int, cached: int) -> float:
    """The same of Belady's."""
    rows = [ids[np.sort(np.unique(ids, return_index=True)[1])] for ids in batches]
    first = sum(map(len, rows[: len(rows) // 4]))
    return float(belady_hits(np.concatenate(rows).astype(np.uint32), num_rows, cached)[first:].mean())


def hit_rows(names: list[str], data: Path) -> Iterator[list[str]]:
    """A line of the table for each stream and part."""
    for name in names:
        ids = STREAMS[name](data)
        batches, num_rows = [ids[at : at + BATCH] for at in range(0, len(ids), BATCH)], int(ids.max()) + 1
        for part in PARTS:
            cached, found = num_rows // part, []
            for policy in POLICIES:
                shares = [hit_share(batches, num_rows, cached, policy, admission) for admission in ADMISSIONS]
                found.append(" → ".join(f"{100 * share:.1f}" for share in shares))
            yield [name, f"1/{part}", *found, f"{100 * best_share(batches, num_rows, cached):.1f}"]


def speed_rows(num_rounds: int = 9, num_steps: int = 50) -> Iterator[list[str]]:
    """Of each policy, microseconds without and with admission, medians of stretches in turns."""
    ids = named(zipf(1.05))
    batches = [ids[at : at + BATCH] for at in range(0, len(ids), BATCH)]
    warm = len(batches) - bench.MOST_ROUNDS * num_rounds * num_steps
    for policy in POLICIES:
        sides = [Cache(NUM_ROWS, NUM_ROWS // PARTS[0], policy, admission) for admission in ADMISSIONS]
        for cache in sides:
            for batch in batches[:warm]:
                cache.step(batch)

        def one_round(number: int, sides: list[Cache] = sides) -> list[float]:
            at, taken = warm + number * num_steps, []
            for cache in sides:
                started = time.thread_time()
                for batch in batches[at : at + num_steps]:
                    cache.step(batch)
                taken.append((time.thread_time() - started) / num_steps * 1e6)
            return taken

        found = bench.clean_rounds(one_round, num_rounds)
        ratios = [b / a for a, b in found.results]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        medians = (f"{statistics.median(own):.0f}" for own in zip(*found.results, strict=True))
        yield [policy, *medians, spread, clean_rounds(found.counts())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STREAM", help=f"of {', '.join(STREAMS)}; all where none is named")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    heads = ["stream", "cache", *(f"`{policy}`" for policy in POLICIES), "optimum"]
    lines = hit_rows(options.names or [*STREAMS], options.data)
    if options.speed:
        heads, lines = ["policy", *ADMISSIONS, "ratio", "clean rounds"], speed_rows()
    sides = {head: "right" if number > 1 or options.speed else "left" for number, head in enumerate(heads)}
    for line in table(sides, []):
        print(line, flush=True)
    for row in lines:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

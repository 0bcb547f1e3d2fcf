"""Ways to find hot rows while a model trains, on real rows in their stored order: how hot_tracker.py was chosen.

For each tenth of a stream each way names k rows, from what it saw before; asked is how many of them are among the k
rows of most accesses so far, how many among those of the tenth before, and which share of the tenth's accesses they
take, beside the most that any k rows take. benchmarks.hot puts the figures into docs/measurements/benchmarks.json.

    tracker      hotrow's: Misra and Gries' counters in buckets of four, scores halved
    hot_sketch   CAFE's HotSketch, by accesses: SpaceSaving in as many buckets of four, scores halved alike
    srrip        Hotline's tracker (arXiv 2204.05436, v1) with whole keys: as many slots in sets of four, 2 re-reference
                 bits, inserted at 2, a hit sets 0; the k of fewest are taken
    srrip_k      the same with k slots, all of which are hot: Hotline's own reading
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks import hot_tracker as tracker
from benchmarks.hot_tracker import HotTracker
from benchmarks.locality.traces import open_accesses
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.reference import fmix64
from hotrow.inspect.accesses import Accesses

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
NUM_PARTS, BATCH = 10, 1 << 14
SHARES = (0.01, 0.05)
"""k, of the rows that the stream has."""
STREAMS = {
    "Taobao 110k": ("taobao", "taobao_userbehavior_110k.csv.gz"),
    "Criteo 80k": ("criteo", "criteo_terabyte_80k.tsv.gz"),
    "access trace": (None, "embedding_trace_500k_medium.txt.gz"),
}


class Way(Protocol):
    """One way."""

    def observe(self, rows: NDArray[np.int64]) -> None:
        """Rows accessed, in order."""

    def top(self, k: int) -> set[int]:
        """k rows, or fewer."""


class Tracker:
    """hotrow's, over one table that holds every row of the stream; row 0, which it passes over, is none of them."""

    def __init__(self, num_rows: int, k: int) -> None:
        self._tracker = HotTracker({"all": num_rows + 1}, {"all": 1 << 20}, (k + 1) << 20)

    def observe(self, rows: NDArray[np.int64]) -> None:
        """As asked."""
        self._tracker.observe({"all": rows + 1})

    def top(self, k: int) -> set[int]:
        """As asked."""
        own = self._tracker.hot_set().rows["all"]
        return {row - 1 for row in [*range(own.prefix), *own.listed.tolist()] if row}


class Buckets:
    """Sets of rows by the hash of the row."""

    def __init__(self, num_slots: int) -> None:
        self.sets: list[dict[int, int]] = [{} for _ in range(-(-num_slots // 4))]

    def own(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, dict[int, int]]]:
        """(row, its set)."""
        places = fmix64(rows.astype(np.uint64)) % np.uint64(len(self.sets))
        return ((row, self.sets[place]) for row, place in zip(rows.tolist(), places.tolist(), strict=True))


class HotSketch(Buckets):
    """row -> score; a newcomer to a full set takes the place, and the score + 1, of its least."""

    since = 0

    def observe(self, rows: NDArray[np.int64]) -> None:
        """As asked."""
        for row, own in self.own(rows):
            if row in own or len(own) < 4:
                own[row] = own.get(row, 0) + 1
            else:
                least = min(own, key=own.__getitem__)
                own[row] = own.pop(least) + 1
        self.since += len(rows)
        if self.since >= tracker.HALVING * 4 * len(self.sets):
            self.since = 0
            for own in self.sets:
                own.update({row: score >> 1 for row, score in own.items()})

    def top(self, k: int) -> set[int]:
        """As asked."""
        return {row for _, row in sorted((-score, row) for own in self.sets for row, score in own.items())[:k]}


class Srrip(Buckets):
    """row -> re-reference bits; of a full set the first at 3 leaves, all aged until there is one."""

    def observe(self, rows: NDArray[np.int64]) -> None:
        """As asked."""
        for row, own in self.own(rows):
            if row in own:
                own[row] = 0
                continue
            if len(own) == 4:
                age = 3 - max(own.values())
                own.update({other: bits + age for other, bits in own.items()})
                del own[next(other for other, bits in own.items() if bits == 3)]
            own[row] = 2

    def top(self, k: int) -> set[int]:
        """As asked."""
        return {row for _, row in sorted((bits, row) for own in self.sets for row, bits in own.items())[:k]}


def stream_of(accesses: Accesses) -> NDArray[np.int64]:
    """The rows of all tables numbered through, sample after sample."""
    tables, first = [], 0
    for table in accesses.tables:
        ids = np.concatenate([*table.batches(1 << 16)]).astype(np.int64)
        assert len(ids) == accesses.num_samples, "one lookup per sample"
        tables.append(ids + first)
        first += table.num_embeddings
    return np.stack(tables, axis=1).ravel()


def open_stream(source: str | None, file: Path) -> NDArray[np.int64]:
    """A real file's rows."""
    if source is None:
        return stream_of(open_accesses(file))
    with tempfile.TemporaryDirectory() as folder:
        run_prepare(source, str(file), folder)
        return stream_of(open_accesses(folder))


def measure_ways(stream: NDArray[np.int64], share: float, ways: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Of each way the means over the parts but the first."""
    num_rows = int(stream.max()) + 1
    k = max(1, round(share * num_rows))
    made: dict[str, Way] = {name: make(num_rows, k) for name, make in ways.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    so_far: Counter[int] = Counter()
    before: Counter[int] = Counter()
    for part in np.array_split(stream, NUM_PARTS):
        own = Counter(part.tolist())
        best = sum(n for _, n in own.most_common(k))
        if so_far:
            for name, way in made.items():
                rows = way.top(k)
                taken = sum(own[row] for row in rows)
                found[name].append([recall(rows, so_far, k), recall(rows, before, k), taken / len(part), taken / best])
        for start in range(0, len(part), BATCH):
            for way in made.values():
                way.observe(part[start : start + BATCH])
        so_far += own
        before = own
    names = ("recall_so_far", "recall_last_part", "next_accesses", "of_best")
    return {name: dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True)) for name, rows in found.items()}


def recall(rows: set[int], counts: Counter[int], k: int) -> float:
    """Share of the k rows of most accesses that are among `rows`; rows of as many as the k-th count as well."""
    top = counts.most_common(k)
    least = top[-1][1]
    sure = {row for row, n in top if n > least}
    ties = sum(counts[row] == least for row in rows)
    return (len(sure & rows) + min(ties, len(top) - len(sure))) / len(top)


WAYS = {
    "tracker": Tracker,
    "hot_sketch": lambda num_rows, k: HotSketch(tracker.SLOTS_PER_ROW * k),
    "srrip": lambda num_rows, k: Srrip(tracker.SLOTS_PER_ROW * k),
    "srrip_k": lambda num_rows, k: Srrip(k),
}


def drifting(stream: NDArray[np.int64]) -> NDArray[np.int64]:
    """The stream, of whose rows three in ten exchange their names after each tenth: a drift there is no doubt of."""
    generator = np.random.default_rng(0)
    names, parts = np.arange(int(stream.max()) + 1), []
    for part in np.array_split(stream, NUM_PARTS):
        parts.append(names[part])
        moved = np.flatnonzero(generator.random(len(names)) < 0.3)
        names[moved] = names[generator.permutation(moved)]
    return np.concatenate(parts)


def comparison(data: Path) -> Iterator[dict[str, Any]]:
    """A row for each stream and k."""
    for name, (source, file) in STREAMS.items():
        stream = open_stream(source, data / file)
        told = {name: stream} | ({f"{name}, renamed": drifting(stream)} if source == "criteo" else {})
        for own_name, own in told.items():
            for share in SHARES:
                yield {"stream": own_name, "share": share, "ways": measure_ways(own, share, WAYS)}

"""Ways to find hot rows while a model trains, on real rows in their stored order: which one hotrow.hot.tracker took.

For each tenth of a stream each way names k rows, from what it saw before; asked is how many of them are among the k rows
of most accesses so far, how many among those of the tenth before, and which share of the tenth's accesses they take,
beside the most that any k rows take. All have as many slots. benchmarks.hot puts the figures into docs/benchmarks.json.

    hot_sketch   hotrow's: SpaceSaving in buckets of four, scores halved (CAFE's HotSketch by accesses)
    srrip        Hotline's tracker (arXiv 2204.05436, v1) with whole keys: 4-way, 2 re-reference bits, inserted at 2, hits
                 set 0; its rows of fewest re-reference bits are taken
    srrip_k      the same with as many slots as rows wanted, all of which are hot: Hotline's own reading
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.data.accesses import Accesses, open_accesses
from hotrow.data.prepare import run_prepare
from hotrow.data.reference_reuse import mix64
from hotrow.hot import tracker
from hotrow.hot.tracker import HotTracker

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


class HotSketch:
    """hotrow's tracker, over one table that holds every row of the stream."""

    def __init__(self, num_rows: int, k: int) -> None:
        self._tracker = HotTracker({"all": num_rows + 1}, {"all": 1 << 20}, (k + 1) << 20)

    def observe(self, rows: NDArray[np.int64]) -> None:
        self._tracker.observe({"all": rows + 1})

    def top(self, k: int) -> set[int]:
        own = self._tracker.hot_set().rows["all"]
        return {row - 1 for row in [*range(own.prefix), *own.listed.tolist()] if row}


class Srrip:
    """Sets of four [row, re-reference bits]; a full set's first at 3 leaves, all of it aged until there is one."""

    def __init__(self, num_slots: int) -> None:
        self._sets: list[list[list[int]]] = [[] for _ in range(-(-num_slots // 4))]

    def observe(self, rows: NDArray[np.int64]) -> None:
        places = mix64(rows.astype(np.uint64)) % np.uint64(len(self._sets))
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            own = self._sets[place]
            for entry in own:
                if entry[0] == row:
                    entry[1] = 0
                    break
            else:
                if len(own) < 4:
                    own.append([row, 2])
                    continue
                age = 3 - max(entry[1] for entry in own)
                for entry in own:
                    entry[1] += age
                victim = next(entry for entry in own if entry[1] == 3)
                victim[:] = [row, 2]

    def top(self, k: int) -> set[int]:
        entries = sorted((entry[1], entry[0]) for own in self._sets for entry in own)
        return {row for _, row in entries[:k]}


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
    "hot_sketch": HotSketch,
    "srrip": lambda num_rows, k: Srrip(tracker.SLOTS_PER_ROW * k),
    "srrip_k": lambda num_rows, k: Srrip(k),
}


def comparison(data: Path, names: Sequence[str] = tuple(STREAMS)) -> list[dict[str, Any]]:
    """A row for each stream and k."""
    rows = []
    for name in names:
        source, file = STREAMS[name]
        stream = open_stream(source, data / file)
        for share in SHARES:
            rows.append({"stream": name, "share": share, "ways": measure_ways(stream, share, WAYS)})
    return rows

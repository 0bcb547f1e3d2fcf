"""What the tiers of a run's tables did, in figures with units: docs/runs.md says what each means.

Everything is counted where it happens (row_cache.h, store.h); here counts become shares, sizes and rates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hotrow.placement.store_file import BLOCKS
from hotrow.placement.tiers import Tiers
from hotrow.plan.choose import disk_bytes, dram_bytes

FILES = {"mapped": "file", "block": "ssd", "gathered": "ssd"}
"""By the kind of a table's store: the tier behind DRAM, as `Memory` names it."""
GAUGES = ("num_bytes", "map_bytes", "waiting_bytes", "middle_rows", "middle_map_bytes", "places_bytes", "held_bytes")
"""Of what caches and stores count, that does not only grow."""


class CountsApart:
    """Counts by table, of which those of evaluations and checkpoints are kept apart: the rest is training.

    counters: what was counted so far, by table.
    """

    def __init__(self, counters: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._counters = counters
        self._aside: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seen: Counter[str] = Counter()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is not training."""
        before = self._counters()
        try:
            yield
        finally:
            for name, counts in self._counters().items():
                self._aside[name].update({key: n - before.get(name, {}).get(key, 0) for key, n in counts.items()})


class TierReport(CountsApart):
    """What the tiers of a collection did, since it was made: training apart from evaluations and checkpoints."""

    def __init__(self, tiers: Tiers) -> None:
        super().__init__(tiers.counters)
        self.tiers = tiers

    @property
    def overflow_rows(self) -> int:
        """Rows of training batches for which every cached row was in use."""
        return sum_of(self._training().values())["overflow_rows"]

    def window(self) -> dict[str, float | None]:
        """Shares of hits in training since this was last asked: whether the rows in use stay the same over time."""
        now = sum_of(self._training().values())
        since, self._seen = now - self._seen, now
        return {name: hits(since)[name] for name in ("hits_per_lookup", "hits_per_row")}

    def to_json(self, *, seconds: float, epochs: float) -> dict[str, Any]:
        """For run.json; see docs/runs.md. seconds, epochs: how much training it was."""
        tiers, training = self.tiers, self._training()
        aside = sum_of(self._with_bytes(self._aside).values())

        def figures(counts: Counter[str]) -> dict[str, Any]:
            return {**hits(counts), **io(counts), **rates(counts, seconds=seconds, epochs=epochs)}

        return {
            "dram_bytes": dram_bytes(tiers),
            "disk_bytes": disk_bytes(tiers),
            "folder": str(tiers.memory.folder),
            "writes": tiers.memory.writes,
            "batches": tiers.announced.counts(),
            **figures(sum_of(training.values())),
            "tiers": self._by_tier(training),
            "aside": {**hits(aside), **io(aside)},
            "fallbacks": {store.rows.table: store.fallback for store in tiers.stores if store.fallback},
            "tables": {
                table.name: {
                    "rows": table.num_embeddings,
                    "pinned": slots.pinned,
                    "cached": slots.cached,
                    "store": store.kind,
                    **figures(training[table.name]),
                }
                for table, slots, store in zip(tiers.tables, tiers.slots, tiers.stores, strict=True)
            },
        }

    def _by_tier(self, training: Mapping[str, Counter[str]]) -> dict[str, Any]:
        behind: dict[str, list[Counter[str]]] = {}
        for store in self.tiers.stores:
            if store.path is not None:
                behind.setdefault(FILES[store.kind], []).append(training[store.rows.table])
        files = {name: {"tables": len(counts), **io(sum_of(counts))} for name, counts in behind.items()}
        middle = [training[store.rows.table] for store in self.tiers.stores if store.middle is not None]
        before = {"file": {"tables": len(middle), **middle_io(sum_of(middle))}} if middle else {}
        return {"dram": {"tables": len(self.tiers.tables), **hits(sum_of(training.values()))}, **before, **files}

    def _training(self) -> dict[str, Counter[str]]:
        """By table: what was counted, less what was aside."""
        counts = {
            name: Counter({key: n - self._aside[name][key] for key, n in own.items() if key not in GAUGES})
            for name, own in self.tiers.counters().items()
        }
        # A store's share of the engine's processor time is that of its I/Os so far: differences of it mean nothing.
        total = sum_of(counts.values())
        for own in counts.values():
            own["io_cpu_ns"] = total["io_cpu_ns"] * _ios(own) // max(1, _ios(total))
        return self._with_bytes(counts)

    def _with_bytes(self, counts: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
        """With the bytes of the rows that were looked up, and of the records that were to be written in blocks."""
        result = {}
        for table, store in zip(self.tiers.tables, self.tiers.stores, strict=True):
            own = counts[table.name]
            demanded_bytes = own["lookups"] * (table.num_bytes // table.num_embeddings)
            # What the system writes of a mapped file, in pages and when it sees fit, nobody counts.
            given_bytes = own["written_rows"] * store.rows.record_bytes * (store.kind in BLOCKS)
            result[table.name] = Counter({**own, "demanded_bytes": demanded_bytes, "given_bytes": given_bytes})
        return result


def sum_of(counts: Iterable[Counter[str]]) -> Counter[str]:
    """Over tables."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _ios(counts: Counter[str]) -> int:
    return counts["reads"] + counts["writes"]


def hits(counts: Counter[str]) -> dict[str, Any]:
    """What was asked of DRAM, and what was there."""
    lookups, in_dram = counts["lookups"], counts["pinned_lookups"] + counts["hit_lookups"]
    rows, resident = counts["rows"], counts["hit_rows"]
    return {
        "hits_per_lookup": ratio(in_dram, lookups),
        "hits_per_row": ratio(resident, rows),
        "unique_ratio": ratio(rows, lookups - counts["pinned_lookups"]),
        "lookups": lookups,
        "lookup_misses": lookups - in_dram,
        "unique_rows": rows,
        "unique_row_misses": rows - resident,
        **{name: counts[name] for name in ("created_rows", "evicted_rows", "overflow_rows")},
    }


def io(counts: Counter[str]) -> dict[str, Any]:
    """What was asked of a medium, and what that took."""
    names = ("read_rows", "reads", "read_bytes", "written_rows", "writes", "written_bytes")
    return {
        **{name: counts[name] for name in (*names, "served_from_queue", "read_modify_writes")},
        "bytes_per_read": ratio(counts["read_bytes"], counts["reads"], digits=1),
        "bytes_per_write": ratio(counts["written_bytes"], counts["writes"], digits=1),
        "write_amplification": ratio(counts["written_bytes"], counts["given_bytes"], digits=4),
        "blocked_s": round(counts["blocked_ns"] / 1e9, 3),
        "io_cpu_s": round(counts["io_cpu_ns"] / 1e9, 3),
        "cpu_us_per_io": ratio(counts["io_cpu_ns"] / 1e3, _ios(counts), digits=3),
    }


def middle_io(counts: Counter[str]) -> dict[str, Any]:
    """What was asked of a file before the disk: memory, without I/Os."""
    return {
        "read_rows": counts["middle_hits"],
        "read_bytes": counts["middle_read_bytes"],
        "written_bytes": counts["middle_written_bytes"],
    }


def rates(counts: Counter[str], *, seconds: float, epochs: float) -> dict[str, Any]:
    """What training came to by the second and by the epoch."""
    return {
        "demanded_bytes_per_s": ratio(counts["demanded_bytes"], seconds, digits=0),
        "written_bytes_per_epoch": ratio(counts["written_bytes"], epochs, digits=0),
    }


def ratio(part: float, whole: float, *, digits: int = 6) -> float | None:
    """Rounded for people; None of nothing."""
    return round(part / whole, digits) if whole else None

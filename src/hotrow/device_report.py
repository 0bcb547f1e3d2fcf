"""What the slots of a run's tables on a device did, in figures: docs/gpu.md says what each means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotrow.memory.device_rows import DeviceRows


class DeviceReport:
    """What slots on a device did since they were made: training apart from evaluations and checkpoints."""

    overflow_rows = 0
    """A batch without room for its rows is an error here."""

    def __init__(self, rows: DeviceRows) -> None:
        self.rows = rows
        self._aside: dict[str, Counter[str]] = {table.name: Counter() for table in rows.tables}
        self._seen: Counter[str] = Counter()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is not training."""
        before = self.rows.counters()
        try:
            yield
        finally:
            for name, counts in self.rows.counters().items():
                self._aside[name].update({key: n - before.get(name, {}).get(key, 0) for key, n in counts.items()})

    def window(self) -> dict[str, float | None]:
        """The share of rows of training batches that were on the device, since this was last asked."""
        now = self._total(self._training())
        since, self._seen = now - self._seen, now
        return {"hbm_hits_per_row": _hits(since)}

    def to_json(self, *, seconds: float, epochs: float) -> dict[str, Any]:
        """For run.json."""
        rows, training = self.rows, self._training()
        batches = {name: getattr(rows, name) for name in ("foreseen", "unannounced", "altered", "postponed")}
        tables = {
            table.name: {"pinned": own.pinned, "cached": own.cached, "hits_per_row": _hits(training[table.name])}
            for table, own in zip(rows.tables, rows.slots, strict=True)
        }
        total = self._total(training)
        figures = {"device": str(rows.device), "bytes": rows.slots_bytes, "hits_per_row": _hits(total), **total}
        return {"batches": batches, "hbm": {**figures, "tables": tables}}

    def _training(self) -> dict[str, Counter[str]]:
        found = {name: Counter(counts) for name, counts in self.rows.counters().items()}
        for name, counts in found.items():
            counts.subtract(self._aside[name])
        return found

    def _total(self, training: dict[str, Counter[str]]) -> Counter[str]:
        total: Counter[str] = Counter()
        for own in training.values():
            total.update(own)
        return total


def _hits(counts: Counter[str]) -> float | None:
    return round(counts["hit_rows"] / counts["rows"], 6) if counts["rows"] else None

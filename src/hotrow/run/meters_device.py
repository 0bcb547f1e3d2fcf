"""What the slots of a run's tables on a device did, in figures: docs/gpu.md says what each means."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hotrow.placement.device import Device
from hotrow.run.meters_tiers import CountsApart, ratio, sum_of


class DeviceReport(CountsApart):
    """What slots on a device did since they were made: training apart from evaluations and checkpoints."""

    overflow_rows = 0
    """A batch without room for its rows is an error here."""

    def __init__(self, rows: Device) -> None:
        super().__init__(rows.counters)
        self.rows = rows

    def window(self) -> dict[str, float | None]:
        """The share of rows of training batches that were on the device, since this was last asked."""
        now = sum_of(self._training().values())
        since, self._seen = now - self._seen, now
        return {"hbm_hits_per_row": _hits(since)}

    def to_json(self, *, seconds: float, epochs: float) -> dict[str, Any]:
        """For run.json."""
        rows, training = self.rows, self._training()
        batches = {**rows.announced.counts(), "postponed": rows.postponed}
        tables = {
            table.name: {"pinned": own.pinned, "cached": own.cached, "hits_per_row": _hits(training[table.name])}
            for table, own in zip(rows.tables, rows.slots, strict=True)
        }
        total = sum_of(training.values())
        figures = {"device": str(rows.device), "bytes": rows.slots_bytes, "hits_per_row": _hits(total), **total}
        return {"batches": batches, "hbm": {**figures, "tables": tables}}

    def _training(self) -> dict[str, Counter[str]]:
        found = {name: Counter(counts) for name, counts in self.rows.counters().items()}
        for name, counts in found.items():
            counts.subtract(self._aside[name])
        return found


def _hits(counts: Counter[str]) -> float | None:
    return ratio(counts["hit_rows"], counts["rows"])

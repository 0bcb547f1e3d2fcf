"""Parts of the training loop, and those among them that count and time: meters.

`LoopPart` says at which moments the loop calls its parts. docs/run-json.md and docs/gpu.md say what each figure
means. Rows are counted where they move (row_cache.h, store.h); here counts become shares, sizes and rates. The meter of
bytes written to a drive is in wear.py. What else a run does between its steps is in parts.py.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from typing_extensions import override

from hotrow.base.files import size
from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.hot.turns import Turns
from hotrow.placement.base import Placement
from hotrow.placement.device import Device
from hotrow.placement.store_file import BLOCKS
from hotrow.placement.tiers import Tiers
from hotrow.run.record import State
from hotrow.run.storage import disk_bytes, dram_bytes


@dataclass
class Session:
    """How far a run has come, and where this session of it began."""

    steps_per_epoch: int = 1
    state: State = field(default_factory=State)
    before: State = field(default_factory=State)

    def resume_at(self, state: State) -> None:
        """Begins the session at `state`."""
        self.state, self.before = state, replace(state, seconds=dict(state.seconds))

    @property
    def seconds(self) -> float:
        """Seconds of training in this session."""
        return self.state.train_s - self.before.train_s

    @property
    def epochs(self) -> float:
        """Epochs trained in this session."""
        return (self.state.step - self.before.step) / self.steps_per_epoch


class Notice(NamedTuple):
    """Something to tell the user: with a code, it is a warning that run.json counts."""

    text: str
    code: str | None = None
    times: int | None = None
    """How often it occurred so far; if None, once more than was counted."""


Told: TypeAlias = Iterable[Notice] | None


def warning(text: str, code: str, times: int | None = None) -> Iterable[Notice]:
    """A warning that is shown, and counted."""
    return Notice(f"warning: {text}"), Notice(text, code, times)


class LoopPart(Protocol):
    """A part that counts or acts between the steps of a run, at these moments; by default each method does nothing."""

    def after_step(self, batch: Batch, loss: float | None) -> Told:
        """Counts or acts after a step on `batch`; returns what the user should know. loss: None if it was skipped."""
        return None

    def after_eval(self, *, is_best: bool) -> None:
        """Acts after an evaluation. is_best: the best so far."""
        return

    def at_end(self) -> None:
        """Acts once the run has ended, after its last step."""
        return

    def aside(self) -> AbstractContextManager[None]:
        """Inside the block the run evaluates, saves or loads, which does not count as training."""
        return nullcontext()

    def window(self) -> dict[str, Any]:
        """Returns fields for the next `train` line of metrics.jsonl."""
        return {}

    def record(self) -> dict[str, Any]:
        """Returns fields of run.json."""
        return {}

    def line(self) -> str:
        """Returns a part of the progress line."""
        return ""

    def close(self) -> Iterable[Notice]:
        """Ends the session, before the tables' files are removed; returns what is known only now."""
        return ()


class StepClock(LoopPart):
    """Seconds spent in each of PHASES: `lap(phase)` adds the time since the last lap, and calls `wire` with it."""

    def __init__(self, session: Session | None = None, wire: Callable[[str | None], object] | None = None) -> None:
        self._session, self._wire, self._last = session or Session(), wire, time.perf_counter()
        self._logged: State | None = None
        """Where the session stood at its last `train` line."""

    def lap(self, phase: str | None) -> None:
        """Adds the time since the last lap to `phase`; if None, to no phase (evaluations, checkpoints)."""
        now = time.perf_counter()
        if phase is not None:
            self._session.state.seconds[phase] += now - self._last
        if self._wire is not None:
            self._wire(phase)
        self._last = now

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        self._session.state.num_samples += batch.num_samples

    @override
    def window(self) -> dict[str, Any]:
        state, before = self._session.state, self._logged or self._session.before
        self._logged = replace(state, seconds=dict(state.seconds))
        return {**self._speed(), "window_ms": _step_ms(state, before)}

    def _speed(self) -> dict[str, Any]:
        state = self._session.state
        speed = round(state.num_samples / max(state.train_s, 1e-9), 1)
        return {"samples_per_s": speed, "step_ms": _step_ms(state, State())}

    @override
    def record(self) -> dict[str, Any]:
        return {**self._speed(), "train_s": round(self._session.state.train_s, 3)}

    @override
    def line(self) -> str:
        seconds = self._session.state.seconds
        total = sum(seconds.values()) or 1.0
        return " ".join(f"{phase} {100 * s / total:.0f}%" for phase, s in seconds.items())


def _step_ms(state: State, before: State) -> dict[str, float]:
    """Returns mean milliseconds of the steps between two states, by phase."""
    steps = max(1, state.step - before.step)
    return {phase: round(1e3 * (s - before.seconds[phase]) / steps, 4) for phase, s in state.seconds.items()}


MOST_SWAPS = 0.05
"""Share of the time that swaps of hot rows may take without a warning."""


class HotMeter(LoopPart):
    """Figures of a schedule of hot rows.

    measurements: returns the lines of metrics.jsonl, which has the swaps of all sessions. loss_figure: the name of the
    loss in them.
    """

    def __init__(
        self, turns: Turns, session: Session, measurements: Callable[[], Iterable[Mapping[str, Any]]], loss_figure: str
    ) -> None:
        self._turns, self._session = turns, session
        self._measurements, self._loss_figure = measurements, loss_figure

    @override
    def aside(self) -> AbstractContextManager[None]:
        return self._turns.whole()

    @override
    def record(self) -> dict[str, Any]:
        if not (hot := self._turns.figures()):
            return {}
        if self._turns.config.takes_turns:
            names = ("step", "turn", self._loss_figure, "rate", "next_rate")
            swaps = [line for line in self._measurements() if line["kind"] == "swap"]
            hot["swaps"] = [{name: line.get(name) for name in names} for line in swaps]
        return {"hot": hot}

    @override
    def close(self) -> Iterable[Notice]:
        share = self._turns.sync_s / max(self._session.state.train_s, 1e-9)
        if share <= MOST_SWAPS:
            return []
        text = (
            f"copying hot rows between the tables and the GPU took {share:.1%} of the time: set hot.schedule to fixed "
            "with a higher hot.rate, or lower hot.budget"
        )
        return warning(text, "slow_swaps", 1)


def meters_of_rows(
    embedding: EmbeddingCollection, session: Session, *, drive_written_bytes: Callable[[], int]
) -> list[LoopPart]:
    """Returns the meters for rows that do not all lie in DRAM; none if all do.

    drive_written_bytes: returns what the run has written to its drive, over all sessions.
    """
    placement = embedding.placement
    tiers, on_device = placement.find(Tiers), placement.find(Device)
    slots = placement if placement.looks_ahead else None
    meters: list[LoopPart] = [] if slots is None else [StallMeter(slots, session, drive_written_bytes)]
    meters += [] if tiers is None else [TierMeter(tiers, session)]
    return meters + ([] if on_device is None else [DeviceMeter(on_device)])


class StallMeter(LoopPart):
    """How long steps waited for rows, and what went to the drive, over all sessions."""

    def __init__(self, slots: Placement, session: Session, drive_written_bytes: Callable[[], int]) -> None:
        self._slots, self._session, self._drive_written_bytes = slots, session, drive_written_bytes

    @override
    def after_step(self, batch: Batch, loss: float | None) -> None:
        self._session.state.stall_s = round(self._session.before.stall_s + self._slots.stall_s, 6)

    @override
    def window(self) -> dict[str, Any]:
        state = self._session.state
        stall_share = round(state.stall_s / max(state.train_s, 1e-9), 4)
        written = self._drive_written_bytes()
        return {"stall_s": state.stall_s, "stall_share": stall_share, "drive_written_bytes": written}

    @override
    def record(self) -> dict[str, Any]:
        return {"memory": self.window()}

    @override
    def line(self) -> str:
        state, before = self._session.state, self._session.before
        written = self._drive_written_bytes() - before.drive_written_bytes
        return f"waiting {state.stall_s / (state.train_s or 1.0):.0%}, {size(written)} written"


FILES = {"mapped": "file", "block": "ssd", "gathered": "ssd"}
"""The tier behind DRAM, as `Memory` names it, by the kind of a table's store."""
GAUGES = (
    *("num_bytes", "map_bytes", "waiting_bytes", "middle_rows", "middle_map_bytes"),
    *("places_bytes", "held_bytes", "saved_index_bytes"),
)
"""Counters of caches and stores that may also fall."""


class CountsApart(LoopPart):
    """Counters by table, which keeps training apart from evaluations and checkpoints.

    counters: returns what was counted so far, by table.
    """

    def __init__(self, counters: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._counters = counters
        self._aside: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seen: Counter[str] = Counter()

    @override
    @contextmanager
    def aside(self) -> Iterator[None]:
        before = self._counters()
        try:
            yield
        finally:
            for name, counts in self._counters().items():
                self._aside[name].update({key: n - before.get(name, {}).get(key, 0) for key, n in counts.items()})

    def _training(self) -> dict[str, Counter[str]]:
        """Returns what training counted, by table."""
        return {
            name: Counter({key: n - self._aside[name][key] for key, n in own.items() if key not in GAUGES})
            for name, own in self._counters().items()
        }

    def _since(self) -> Counter[str]:
        """Returns what training counted since the last call, over all tables."""
        now = sum_of(self._training().values())
        since, self._seen = now - self._seen, now
        return since


class TierMeter(CountsApart):
    """Counts of the tiers of a collection since it was made, with training apart from evaluations and checkpoints."""

    def __init__(self, tiers: Tiers, session: Session) -> None:
        super().__init__(tiers.counters)
        self.tiers, self._session = tiers, session

    @override
    def close(self) -> Iterable[Notice]:
        count = sum_of(self._training().values())["overflow_rows"]
        text = "batches needed more rows than their cache could hold; those used temporary slots: raise memory.dram"
        return [Notice(text, "overflow_rows", count)] if count else []

    @override
    def window(self) -> dict[str, float | None]:
        """Returns shares of hits in training since the last call: whether the rows in use stay the same over time."""
        since = hits(self._since())
        return {name: since[name] for name in ("hits_per_lookup", "hits_per_row")}

    @override
    def record(self) -> dict[str, Any]:
        tiers, training = self.tiers, self._training()
        seconds, epochs = self._session.seconds, self._session.epochs
        aside = sum_of(self._with_bytes(self._aside).values())

        def figures(counts: Counter[str]) -> dict[str, Any]:
            per_s = ratio(counts["demanded_bytes"], seconds, digits=0)
            per_epoch = ratio(counts["written_bytes"], epochs, digits=0)
            rates = {"demanded_bytes_per_s": per_s, "written_bytes_per_epoch": per_epoch}
            return {**hits(counts), **io(counts), **rates}

        memory = {
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
        return {"memory": memory}

    def _by_tier(self, training: Mapping[str, Counter[str]]) -> dict[str, Any]:
        behind: dict[str, list[Counter[str]]] = {}
        for store in self.tiers.stores:
            if store.path is not None:
                behind.setdefault(FILES[store.kind], []).append(training[store.rows.table])
        files = {name: {"tables": len(counts), **io(sum_of(counts))} for name, counts in behind.items()}
        middle = [training[store.rows.table] for store in self.tiers.stores if store.middle is not None]
        # The file tier in front of a disk is memory, and has no I/Os.
        names = {"read_rows": "middle_hits", "read_bytes": "middle_read_bytes", "written_bytes": "middle_written_bytes"}
        asked = {name: sum_of(middle)[counter] for name, counter in names.items()}
        before = {"file": {"tables": len(middle), **asked}} if middle else {}
        return {"dram": {"tables": len(self.tiers.tables), **hits(sum_of(training.values()))}, **before, **files}

    @override
    def _training(self) -> dict[str, Counter[str]]:
        counts = super()._training()
        # A store's processor time is its share of the engine's, by I/Os so far, so differences of it mean nothing.
        total = sum_of(counts.values())
        for own in counts.values():
            own["io_cpu_ns"] = total["io_cpu_ns"] * _ios(own) // max(1, _ios(total))
        return self._with_bytes(counts)

    def _with_bytes(self, counts: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
        """Adds the bytes of the rows that were looked up, and of the records given to be written in blocks."""
        result = {}
        for table, store in zip(self.tiers.tables, self.tiers.stores, strict=True):
            own = counts[table.name]
            demanded_bytes = own["lookups"] * (table.num_bytes // table.num_embeddings)
            # The system writes a mapped file in pages when it sees fit; that is not counted.
            given_bytes = own["written_rows"] * store.rows.record_bytes * (store.kind in BLOCKS)
            result[table.name] = Counter({**own, "demanded_bytes": demanded_bytes, "given_bytes": given_bytes})
        return result


class DeviceMeter(CountsApart):
    """Counts of slots on a device since they were made, with training apart from evaluations and checkpoints."""

    def __init__(self, rows: Device) -> None:
        super().__init__(rows.counters)
        self.rows = rows

    @override
    def window(self) -> dict[str, float | None]:
        """Returns the share of rows of training batches that were on the device, since the last call."""
        return {"hbm_hits_per_row": _hits(self._since())}

    @override
    def record(self) -> dict[str, Any]:
        rows, training = self.rows, self._training()
        batches = {**rows.announced.counts(), "postponed": rows.postponed}
        tables = {
            table.name: {"pinned": own.pinned, "cached": own.cached, "hits_per_row": _hits(training[table.name])}
            for table, own in zip(rows.tables, rows.slots, strict=True)
        }
        total = sum_of(training.values())
        figures = {"device": str(rows.device), "bytes": rows.slots_bytes, "hits_per_row": _hits(total), **total}
        return {"memory": {"batches": batches, "hbm": {**figures, "tables": tables}}}


def _hits(counts: Counter[str]) -> float | None:
    return ratio(counts["hit_rows"], counts["rows"])


def sum_of(counts: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _ios(counts: Counter[str]) -> int:
    return counts["reads"] + counts["writes"]


def hits(counts: Counter[str]) -> dict[str, Any]:
    """Returns the lookups and rows of DRAM, and how many were hits."""
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
    """Returns the reads and writes of a drive, and the time they took."""
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


def ratio(part: float, whole: float, *, digits: int = 6) -> float | None:
    """Returns part / whole, rounded for people; None if `whole` is 0."""
    return round(part / whole, digits) if whole else None


def merged(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of all `records`; mappings under one name are joined."""
    fields: dict[str, Any] = {}
    for record in records:
        for name, value in record.items():
            fields[name] = {**fields[name], **value} if name in fields else value
    return fields

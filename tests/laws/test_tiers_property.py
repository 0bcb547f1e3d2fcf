"""Law 2 below the kernels: caches under random schedules against plain arrays, looked at after every operation.

Schedules are drawn from seeds that the test's name tells: batches of spans over several tables, admitted for training
or evaluation, several in flight, released in any order, ids repeated and out of range, rows pinned, cached, all or
none, stores written back and tables growing in between. Caches over another medium are driven beside caches over memory
and have to decide the same: same slots, same counters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_rig import Rig, Shape, initial_rows, needs_native, records_of
from hotrow.placement.stores import Engines, Kind, io_uring_refused

pytestmark = needs_native


@dataclass(eq=False)
class Batch:
    """A batch in flight on every rig."""

    ids: np.ndarray
    spans: list[tuple[int, int, int]]
    keep: bool
    flights: list[Any] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    arrived: bool = False
    updated: bool = False

    def of(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, slots) in table t."""
        at = [np.arange(first, last) for table, first, last in self.spans if table == t]
        where = np.concatenate([np.zeros(0, np.int64), *at])
        return self.ids[where].astype(np.int64), self.slots[where].astype(np.int64)


class World:
    """What is true, and rigs that have to agree with it."""

    def __init__(self, rng: np.random.Generator, shapes: Sequence[Shape], rigs: Sequence[Rig]) -> None:
        self.rng, self.shapes, self.rigs = rng, list(shapes), rigs
        self.truth = [initial_rows(shape).copy() for shape in shapes]
        self.dirtied: list[set[int]] = [set() for _ in shapes]
        self.changed: list[set[int]] = [set() for _ in shapes]
        """Of them, since clear_changed."""
        self.open: list[Batch] = []

    # ---- operations

    def admit(self, *, bad: bool = False, most: int = 12) -> None:
        batch = self._draw(most)
        if bad and not self._spoil(batch):
            return
        before = [self.rigs[0].counters(t) for t in range(len(self.shapes))]
        workers = (int(self.rng.integers(1, 3)) for _ in self.rigs)
        answers = [rig.caches.admit(batch.ids, batch.spans, batch.keep, next(workers)) for rig in self.rigs]
        for flight, slots in answers:
            assert (flight is None) == bad, (flight, batch)
            np.testing.assert_array_equal(slots, answers[0][1])
        if not bad:
            batch.flights, batch.slots = [flight for flight, _ in answers], answers[0][1]
            self.open.append(batch)
            self._count(batch, before)

    def _draw(self, most: int) -> Batch:
        rng, ids, spans = self.rng, [], []
        at = 0
        for t, shape in enumerate(self.shapes):
            for _ in range(int(rng.integers(0, 3))):
                at += int(rng.integers(0, 2))  # a position that belongs to no span
                n = int(rng.integers(0, most))
                limit = shape.num_rows if rng.random() < 0.6 else min(shape.num_rows, shape.pinned + 4)
                ids.append((at, rng.integers(0, limit, n)))
                spans.append((t, at, at + n))
                at += n
        values = np.full(at, -9, np.int64 if rng.random() < 0.5 else np.int32)
        for first, some in ids:
            values[first : first + len(some)] = some
        return Batch(values, spans, keep=bool(rng.random() < 0.7))

    def _spoil(self, batch: Batch) -> bool:
        """One id of a span out of range; False where there is none."""
        filled = [span for span in batch.spans if span[1] < span[2]]
        if not filled:
            return False
        t, first, last = filled[int(self.rng.integers(len(filled)))]
        wrong = [-1, self.shapes[t].num_rows, 2**31 - 1, -(2**31)]
        wrong += [2**32, 2**32 + 1, -(2**63), 2**63 - 1] if batch.ids.dtype == np.int64 else []
        batch.ids[int(self.rng.integers(first, last))] = int(self.rng.choice(np.array(wrong, np.int64)))
        return True

    def arrive(self, batch: Batch) -> None:
        for flight in batch.flights:
            assert flight.wait()
        batch.arrived = True

    def update(self, batch: Batch) -> None:
        self.arrive(batch)
        batch.updated = True
        for t in range(len(self.shapes)):
            ids, slots = batch.of(t)
            rows, at = np.unique(ids, return_index=True)
            fresh = self.rng.integers(0, 256, (len(rows), self.truth[t].shape[1]), dtype=np.uint8)
            self.truth[t][rows] = fresh
            for rig in self.rigs:
                start = 0
                for array in rig.arrays[t]:
                    view = array.view(np.uint8)
                    view[slots[at]] = fresh[:, start : start + view.shape[1]]
                    start += view.shape[1]

    def release(self, batch: Batch) -> None:
        self.open.remove(batch)
        dirty = batch.updated or bool(self.rng.random() < 0.1)
        released = dirty or bool(self.rng.random() < 0.7)
        if released:
            for flight in batch.flights:
                flight.release(dirty, int(self.rng.integers(1, 3)))
        if self.rng.random() < 0.1:
            dirty = dirty or not released
            for flight in batch.flights:
                flight.release(True)  # a second release does nothing
        for t in range(len(self.shapes)):
            self.dirtied[t].update(batch.of(t)[0].tolist() if dirty else [])
            self.changed[t].update(batch.of(t)[0].tolist() if dirty else [])
        batch.flights.clear()  # else: dropping one releases it

    def write_back(self) -> None:
        for rig in self.rigs:
            assert rig.caches.write_back()
            assert all(native.counters()["waiting_bytes"] == 0 for native in rig.natives), "not on the medium yet"
            self._check_medium(rig)

    def clear_changed(self) -> None:
        for rig in self.rigs:
            rig.caches.clear_changed()
        for changed in self.changed:
            changed.clear()

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.4 or not self.open:
            self.admit(bad=bool(self.rng.random() < 0.08))
        elif what < 0.45:
            self.write_back()
        elif what < 0.48:
            self.clear_changed()
        else:
            batch = self.open[int(self.rng.integers(len(self.open)))]
            if what < 0.58:
                self.arrive(batch)
            elif what < 0.75 and batch.keep:
                self.update(batch)
            else:
                self.release(batch)
        self.check()

    def end(self) -> None:
        while self.open:
            self.release(self.open[-1])
            self.check()
        self.write_back()
        keep = bool(self.rng.random() < 0.5)
        for t, shape in enumerate(self.shapes):
            ids = self.rng.permutation(shape.num_rows)
            for rig in self.rigs:
                flight, slots = rig.caches.admit(ids, [(t, 0, len(ids))], keep, 1)
                assert flight.wait()
                np.testing.assert_array_equal(records_of(rig.arrays[t], slots), self.truth[t][ids])
                flight.release(False)

    # ---- what must hold

    def check(self) -> None:
        for batch in self.open:
            assert (batch.slots >= 0).all()
            for flight, rig in zip(batch.flights, self.rigs, strict=True):
                if batch.arrived:
                    for t in range(len(self.shapes)):
                        ids, slots = batch.of(t)
                        np.testing.assert_array_equal(records_of(rig.arrays[t], slots), self.truth[t][ids])
                self._check_holds(batch, flight, rig)
        for t, shape in enumerate(self.shapes):
            self._check_slots(t, shape)
            self._check_changed(t, shape)
            counts = [rig.counters(t) for rig in self.rigs]
            assert all(each == counts[0] for each in counts)
            assert counts[0]["rows"] == counts[0]["hit_rows"] + counts[0]["read_rows"] + counts[0]["created_rows"]
            seen = [rig.natives[t].counters() for rig in self.rigs]
            for name in ("middle_hits", "middle_rows"):
                assert len({each[name] for each in seen}) == 1, f"{name} differ between media"
            for each, rig in zip(seen, self.rigs, strict=True):
                given = each["written_rows"]  # a block store, or one behind a tier, leaves out what was overtaken
                may_be_fewer = rig.stores or each["middle_rows"]
                assert given == counts[0]["written_rows"] or (may_be_fewer and given < counts[0]["written_rows"])

    def _check_holds(self, batch: Batch, flight: Any, rig: Rig) -> None:
        assert rig.caches.holds(batch.ids, batch.slots, flight)
        spanned = [at for _, first, last in batch.spans for at in range(first, last)]
        if spanned:
            other = batch.ids.copy()
            other[spanned[int(self.rng.integers(len(spanned)))]] += 1
            assert not rig.caches.holds(other, batch.slots, flight)

    def _check_slots(self, t: int, shape: Shape) -> None:
        """A row has one slot while any batch is in flight with it, and no slot has two rows."""
        pairs = {pair for batch in self.open for pair in zip(*(each.tolist() for each in batch.of(t)), strict=True)}
        assert len({row for row, _ in pairs}) == len(pairs) == len({slot for _, slot in pairs})
        assert all(
            slot < shape.num_rows and (row == slot if row < shape.pinned else slot >= shape.pinned)
            for row, slot in pairs
        )

    def _check_changed(self, t: int, shape: Shape) -> None:
        """The rows of batches that were released as updated, however they are asked for."""
        first, most = (int(self.rng.integers(0, shape.num_rows + 2)) for _ in range(2))
        for ever, rows in ((False, self.changed[t]), (True, self.dirtied[t])):
            expected = sorted(row for row in rows if row >= first)[:most]
            for rig in self.rigs:
                assert rig.caches.num_changed(t, ever) == len(rows)
                assert rig.caches.changed_rows(t, ever, first, most).tolist() == expected

    def _count(self, batch: Batch, before: list[dict[str, int]]) -> None:
        for t, shape in enumerate(self.shapes):
            ids, _ = batch.of(t)
            after = self.rigs[0].counters(t)
            grown = {name: after[name] - before[t][name] for name in after}
            tail = np.unique(ids[ids >= shape.pinned])
            assert grown["lookups"] == len(ids)
            assert grown["pinned_lookups"] == (ids < shape.pinned).sum()
            assert grown["rows"] == len(tail)
            assert grown["hit_lookups"] >= grown["hit_rows"]
            if not batch.keep:
                assert grown["evicted_rows"] == grown["overflow_rows"] == grown["written_rows"] == 0
            if grown["overflow_rows"]:
                cached = range(shape.pinned, shape.pinned + shape.cached)
                in_use = {s for other in self.open for s in other.of(t)[1].tolist() if s in cached}
                assert len(in_use) == shape.cached, "a slot was free"

    def _check_medium(self, rig: Rig) -> None:
        """Nothing is lost: but for rows that a batch in flight has changed, the medium has what is true.

        Of a table that is pinned whole the medium is never asked.
        """
        for t, shape in enumerate(self.shapes):
            if shape.pinned == shape.num_rows:
                assert rig.counters(t)["written_rows"] == 0
                continue
            changing = {row for batch in self.open if batch.updated for row in batch.of(t)[0].tolist()}
            given = self.dirtied[t] | set(range(shape.pinned))
            rows = np.array(sorted(given - changing), np.int64)
            np.testing.assert_array_equal(rig.on_medium(t)[rows], self.truth[t][rows])
            untouched = np.array(sorted(set(range(shape.num_rows)) - given - changing), np.int64)
            np.testing.assert_array_equal(self.truth[t][untouched], initial_rows(shape)[untouched])


def draw_shape(rng: np.random.Generator) -> Shape:
    num_rows = int(rng.integers(1, 40))
    pinned = int(rng.integers(0, num_rows + 1)) if rng.random() < 0.4 else 0
    left = num_rows - pinned
    cached = int(rng.choice([0, left, rng.integers(0, left + 1), rng.integers(0, min(left, 6) + 1)]))
    dim = int(rng.choice([1, 3, 8]))
    states = [(), ((dim, 0.25, 0.0, 0.0),), ((1, 0.5, 0.0, 0.0),), ((dim, 0.0, -2.5, -0.125), (dim, 0.0, 0.0, 0.0))]
    return Shape(num_rows, pinned, cached, dim, int(rng.integers(3)), states[int(rng.integers(len(states)))])


@pytest.fixture(scope="module")
def engines() -> dict[str, Engines]:
    found = {"threads": Engines(io="threads", depth=4, num_threads=4, most_waiting_bytes=2048)}
    if not io_uring_refused():
        found["io_uring"] = Engines(io="io_uring", depth=4, most_waiting_bytes=2048)
    return found


def draw_places(rng: np.random.Generator, shapes: Sequence[Shape]) -> list[int]:
    """Of a tier before each table's store: one row to all, in whole sets or not."""
    return [int(rng.choice([1, 2, 16, 48, shape.num_rows, rng.integers(1, shape.num_rows + 1)])) for shape in shapes]


def make_rigs(
    shapes: Sequence[Shape], medium: str, folder: Path, engines: dict[str, Engines], places: list[int]
) -> list[Rig]:
    before, _, lower = medium.rpartition(" before ")
    if lower.endswith(("threads", "io_uring")) and lower.removeprefix("gathered ") not in engines:
        pytest.skip(f"{lower} is refused here")
    places = places if before else []
    main = Rig(shapes)
    if lower == "dram":
        main.in_memory(places)
    else:
        kind: Kind = "mapped" if lower == "mapped" else "gathered" if "gathered" in lower else "block"
        main.in_files(folder, kind, engines.get(lower.removeprefix("gathered ")), before or "mapped", places)  # type: ignore[arg-type]
    return [main, Rig(shapes).in_memory(places)]


def drive(seed: int, medium: str, folder: Path, engines: dict[str, Engines], num_steps: int = 30) -> None:
    rng = np.random.default_rng(seed)
    shapes = [draw_shape(rng) for _ in range(int(rng.integers(1, 4)))]
    folder.mkdir(exist_ok=True)
    places = draw_places(np.random.default_rng(seed + 1), shapes)
    world = World(rng, shapes, make_rigs(shapes, medium, folder, engines, places))
    try:
        for _ in range(num_steps):
            world.step()
        world.end()
    except BaseException as error:
        error.add_note(f"seed {seed}, medium {medium}, {shapes}, places {places}")
        raise
    finally:
        for rig in world.rigs:
            rig.close()


SCHEDULES = {
    "dram": 12, "mapped": 5, "threads": 5, "io_uring": 5, "gathered threads": 5, "gathered io_uring": 5,
    "dram before dram": 12, "mapped before threads": 5, "dram before io_uring": 5,
}  # fmt: skip


@pytest.mark.slow_but("gathered threads", "io_uring", "mapped", "dram before io_uring", "mapped before threads")
@pytest.mark.parametrize("medium", SCHEDULES)
def test_schedules(tmp_path: Path, engines: dict[str, Engines], medium: str) -> None:
    for seed in range(2 * SCHEDULES[medium]):
        drive(seed, medium, tmp_path / str(seed), engines)


@pytest.mark.slow
@pytest.mark.parametrize("medium", SCHEDULES)
def test_many_schedules(tmp_path: Path, engines: dict[str, Engines], medium: str) -> None:
    for seed in range(1000, 1000 + 30 * SCHEDULES[medium]):
        drive(seed, medium, tmp_path / str(seed), engines, num_steps=40)

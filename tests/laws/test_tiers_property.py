"""Law 2 below the kernels: caches under random schedules against plain arrays, looked at after every operation.

Schedules are drawn from seeds that the test's name tells: batches of spans over several tables, admitted for training
or evaluation, several in flight, released in any order, ids repeated and out of range, rows pinned, cached, all or
none, stores written back and tables growing in between. Where the native module is there, its readable twin is driven
beside it and has to decide the same: same slots, same counters.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hotrow import ops, reference
from hotrow.memory.budget import ADMISSIONS, METADATA_BYTES, POLICIES
from hotrow.memory.reference_cache import _Frequencies
from hotrow.memory.stores import (
    Engines,
    Kind,
    Store,
    StoreError,
    TableRows,
    io_uring_refused,
    open_cached_store,
    open_store,
)

needs_native = pytest.mark.skipif(ops.backend().name != "native", reason="the native module is absent")
MODULES = ["native", "twin"] if ops.backend().name == "native" else ["twin"]
KEY, BOUND, ZERO_ROWS = 77, 0.5, 1


def module_of(name: str) -> Any:
    return importlib.import_module("hotrow._native" if name == "native" else "hotrow.memory.reference")


class Shape(NamedTuple):
    """One table."""

    num_rows: int
    pinned: int
    cached: int
    dim: int = 3
    storage: int = 0
    states: tuple[tuple[int, float, float, float], ...] = ()

    def arrays(self) -> list[np.ndarray]:
        """Slots, all 0x55, which no initial row is."""
        dtype = {0: np.float32, 1: np.float16, 2: np.int16}[self.storage]
        arrays = [np.empty((self.num_rows, self.dim), dtype)]
        arrays += [np.empty((self.num_rows, self.dim), np.int16)] if self.storage == 2 else []
        arrays += [np.empty((self.num_rows, dim), np.float32) for dim, *_ in self.states]
        for array in arrays:
            array.view(np.uint8)[:] = 0x55
        return arrays


@cache
def initial_rows(shape: Shape) -> np.ndarray:
    """Every row's record before it is written, bytes [num_rows, record_bytes]; by the formulas of row_cache.h."""
    w = reference.uniform_rows(KEY, torch.arange(shape.num_rows), shape.dim, BOUND, ZERO_ROWS)
    parts = [w.numpy()]
    if shape.storage == 1:
        w = reference.to_float16(w).float()
        parts = [w.half().numpy()]
    if shape.storage == 2:
        parts = [half.view(torch.int16).numpy() for half in reference.split(w)]
    for dim, constant, of_weight, of_sign in shape.states:
        state = w.numpy() * np.float32(of_weight) if of_weight else np.full((len(w), dim), constant, np.float32)
        parts.append(state + np.float32(of_sign) * np.sign(w.numpy()) if of_sign else state)
    return records_of(parts, np.arange(shape.num_rows))


def records_of(arrays: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(array[slots]).view(np.uint8) for array in arrays], axis=1)


class Rig:
    """Caches of one module, their slots and their stores."""

    def __init__(self, name: str, shapes: Sequence[Shape], policy: str, admission: str = "none") -> None:
        self.module, self.shapes = module_of(name), list(shapes)
        self.caches = self.module.make_caches()
        self.caches.last_batch = 2**32 - 12  # so that numbers begin again, in the native module, as a schedule runs
        self.arrays = [shape.arrays() for shape in shapes]
        self.natives: list[Any] = []
        self.stores: list[Store] = []
        self._policy = (POLICIES.index(policy), ADMISSIONS.index(admission))  # type: ignore[arg-type]

    def in_memory(self, places: Sequence[int] | None = None) -> Rig:
        """places: of each table, what a tier before its store holds; None: there is none."""
        for t, shape in enumerate(self.shapes):
            num_bytes = sum(array[0].nbytes for array in self.arrays[t])
            store = self.module.open_dram_store(num_bytes, shape.num_rows, f"t{t}")
            if places:
                middle = self.module.open_dram_store(num_bytes, places[t], f"t{t}")
                store = self.module.open_cached_store(middle, store, f"t{t}")
            self._add(t, store)
        return self

    def in_files(
        self, folder: Path, kind: Kind, engines: Engines | None, before: Kind = "mapped", places: Sequence[int] = ()
    ) -> Rig:
        for t, shape in enumerate(self.shapes):
            parts = tuple((f"p{i}", array[0].nbytes) for i, array in enumerate(self.arrays[t]))
            rows = TableRows(table=f"t{t}", parts=parts, num_rows=shape.num_rows)
            store = open_store(rows, kind=kind, path=folder / f"{t}.rows", engines=engines)
            if places:
                held = TableRows(table=f"t{t}", parts=parts, num_rows=places[t])
                store = open_cached_store(open_store(held, kind=before, path=folder / f"{t}-middle.rows"), store)
            self.stores.append(store)
            self._add(t, self.stores[-1].native)
        return self

    def _add(self, t: int, native: Any) -> None:
        shape = self.shapes[t]
        first = (KEY, BOUND, ZERO_ROWS, shape.dim, shape.storage)
        self.natives.append(native)
        sizes = (shape.num_rows, shape.pinned, shape.cached)
        self.caches.add(sizes, *self._policy, first, list(shape.states), native, self.arrays[t])

    def grow(self, t: int, shape: Shape) -> None:
        if self.stores:
            self.stores[t].grow(shape.num_rows)
        else:
            assert self.natives[t].grow(shape.num_rows)
        self.shapes[t], self.arrays[t] = shape, shape.arrays()
        self.caches.grow(t, shape.num_rows, self.arrays[t])

    def on_medium(self, t: int) -> np.ndarray:
        """Every row as the store has it."""
        arrays, rows = self.shapes[t].arrays(), np.arange(self.shapes[t].num_rows)
        assert self.natives[t].read(rows, rows, self.module.Records(arrays)).wait()
        return records_of(arrays, rows)

    def counters(self, t: int) -> dict[str, int]:
        found = self.caches.counters(t)
        return {name: count for name, count in found.items() if not name.endswith("_bytes")}

    def close(self) -> None:
        self.natives.clear()
        for store in self.stores:
            store.close()


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
        answers = [
            rig.caches.admit(batch.ids, batch.spans, batch.keep, int(self.rng.integers(1, 3))) for rig in self.rigs
        ]
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
                flight.release(dirty)
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

    def grow(self) -> None:
        """Rows at a table's end, while batches are in flight; those of a table that is pinned whole are pinned too."""
        t = int(self.rng.integers(len(self.shapes)))
        old = self.shapes[t]
        num_rows = old.num_rows + int(self.rng.choice([0, 1, 7, 70]))
        shape = old._replace(num_rows=num_rows, pinned=num_rows if old.pinned == old.num_rows else old.pinned)
        self.shapes[t] = shape
        self.truth[t] = np.concatenate([self.truth[t], initial_rows(shape)[old.num_rows :]])
        for rig in self.rigs:
            rig.grow(t, shape)

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
        elif what < 0.51:
            self.grow()
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
                assert len({each[name] for each in seen}) == 1, f"the twin's {name} differ"
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
    if ops.backend().name == "native" and not io_uring_refused():
        found["io_uring"] = Engines(io="io_uring", depth=4, most_waiting_bytes=2048)
    return found


def draw_places(rng: np.random.Generator, shapes: Sequence[Shape]) -> list[int]:
    """Of a tier before each table's store: one row to all, in whole sets or not."""
    return [int(rng.choice([1, 2, 16, 48, shape.num_rows, rng.integers(1, shape.num_rows + 1)])) for shape in shapes]


def make_rigs(
    shapes: Sequence[Shape],
    policy: tuple[str, str],
    medium: str,
    folder: Path,
    engines: dict[str, Engines],
    places: list[int],
) -> list[Rig]:
    before, _, lower = medium.rpartition(" before ")
    if lower in ("threads", "io_uring") and lower not in engines:
        pytest.skip(f"{lower} is refused here")
    places = places if before else []
    main = Rig(MODULES[0], shapes, *policy)
    if lower == "dram":
        main.in_memory(places)
    else:
        kind: Kind = "mapped" if lower == "mapped" else "block"
        main.in_files(folder, kind, engines.get(lower), before or "mapped", places)  # type: ignore[arg-type]
    return [main, *(Rig(name, shapes, *policy).in_memory(places) for name in MODULES[1:])]


def drive(seed: int, policy: str, medium: str, folder: Path, engines: dict[str, Engines], num_steps: int = 30) -> None:
    rng = np.random.default_rng(seed)
    shapes = [draw_shape(rng) for _ in range(int(rng.integers(1, 4)))]
    folder.mkdir(exist_ok=True)
    places = draw_places(np.random.default_rng(seed + 1), shapes)
    admission = ADMISSIONS[seed % 2]
    world = World(rng, shapes, make_rigs(shapes, (policy, admission), medium, folder, engines, places))
    try:
        for _ in range(num_steps):
            world.step()
        world.end()
    except BaseException as error:
        error.add_note(
            f"seed {seed}, policy {policy}, admission {admission}, medium {medium}, {shapes}, places {places}"
        )
        raise
    finally:
        for rig in world.rigs:
            rig.close()


SCHEDULES = {
    "dram": 40,
    "mapped": 16,
    "threads": 16,
    "io_uring": 16,
    "dram before dram": 40,
    "mapped before threads": 16,
    "dram before io_uring": 16,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("medium", SCHEDULES)
def test_schedules(tmp_path: Path, engines: dict[str, Engines], policy: str, medium: str) -> None:
    for seed in range(SCHEDULES[medium]):
        drive(seed, policy, medium, tmp_path / str(seed), engines)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("medium", SCHEDULES)
def test_many_schedules(tmp_path: Path, engines: dict[str, Engines], policy: str, medium: str) -> None:
    for seed in range(1000, 1000 + 10 * SCHEDULES[medium]):
        drive(seed, policy, medium, tmp_path / str(seed), engines, num_steps=40)


# ---- what a policy keeps


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use(rig: Rig, *ids: int, keep: bool = True, dirty: bool = False) -> list[int]:
    """Admit and release; the slots."""
    flight, slots = rig.caches.admit(np.array(ids, np.int32), [(0, 0, len(ids))], keep, 1)
    assert flight.wait()
    flight.release(dirty)
    return [int(slot) for slot in slots]


def resident(rig: Rig) -> set[int]:
    """Rows that an evaluation finds."""
    found = set()
    for row in range(rig.shapes[0].num_rows):
        before = rig.counters(0)["hit_rows"]
        use(rig, row, keep=False)
        found |= {row} if rig.counters(0)["hit_rows"] > before else set()
    return found


@pytest.mark.parametrize(
    ("policy", "uses", "left"),
    [
        ("lru", [0, 1, 2, 0, 3], {0, 2, 3}),
        ("lru", [0, 1, 2, 2, 1, 0, 3, 4], {0, 3, 4}),
        ("clock", [0, 1, 2, 3], {1, 2, 3}),  # all were used: the hand clears all and comes back to the first
        ("clock", [0, 1, 2, 3, 1, 4], {1, 3, 4}),
        ("lfu", [0, 0, 1, 2, 3], {0, 2, 3}),  # seen once leaves before seen twice
        ("lfu", [0, 0, 0, 0, 1, 2, 3, 4], {0, 3, 4}),
    ],
)
def test_who_makes_room(name: str, policy: str, uses: list[int], left: set[int]) -> None:
    rig = Rig(name, [Shape(9, 0, 3)], policy).in_memory()
    for row in uses:
        use(rig, row)
    assert resident(rig) == left
    assert resident(rig) == left, "an evaluation moved something"


@needs_native
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_is_known_of_a_slot_is_within_what_the_budget_counts(policy: str, admission: str) -> None:
    rig = Rig("native", [Shape(20_000, 0, 10_000, dim=1)], policy, admission).in_memory()
    use(rig, *range(0, 20_000, 2))
    use(rig, *range(10_000))
    counters = rig.caches.counters(0)
    assert counters["map_bytes"] == 8 * 10_000
    bits = 2 * 20_000 // 8
    assert counters["num_bytes"] - bits <= METADATA_BYTES * 10_000 + 100


@needs_native
@pytest.mark.parametrize("policy", POLICIES)
def test_admission_against_the_twin(policy: str) -> None:
    """Long enough for counts to halve many times: the same slots, batch after batch, with several in flight."""
    rigs = [Rig(name, [Shape(400, 0, 24, dim=1)], policy, "frequency").in_memory() for name in MODULES]
    rng = np.random.default_rng(11)
    flights: list[list[Any]] = [[] for _ in rigs]
    for number in range(600):
        ids = (rng.zipf(1.2, 8) * (1 + number // 200)) % 400
        answers = [rig.caches.admit(ids, [(0, 0, 8)], True, 1) for rig in rigs]
        np.testing.assert_array_equal(*(slots for _, slots in answers))
        for own, (flight, _) in zip(flights, answers, strict=True):
            own.append(flight)
            while len(own) > number // 50 % 5:
                own.pop(0).release(False)
    assert rigs[0].counters(0) == rigs[1].counters(0)
    assert rigs[0].counters(0)["overflow_rows"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_evaluation_is_no_use(name: str, policy: str, admission: str) -> None:
    """Rows looked at without admission make room as if they had not been."""
    rigs = [Rig(name, [Shape(40, 0, 4)], policy, admission).in_memory() for _ in range(2)]
    rng = np.random.default_rng(5)
    for _ in range(300):
        row = int(rng.integers(0, 8) ** 2 // 2)
        assert use(rigs[0], row) == use(rigs[1], row)
        use(rigs[1], *rng.integers(0, 40, 6).tolist(), keep=False)
    assert rigs[0].counters(0)["evicted_rows"] == rigs[1].counters(0)["evicted_rows"] > 50


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("uses", "left"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 4], {1, 2, 4}),  # 3 takes an admitted row's slot, 4, which is on trial too, the one of 3
        ([0, 0, 1, 1, 2, 2, 3, 3, 4, 5], {1, 2, 5}),  # so too where 3 was used again: on trial it stays
        (
            [0, 0, 1, 1, 2, 2, 3, 4, 3, 4, 3],
            {1, 2, 3},
        ),  # 3 has come more often than 1 now: admitted, into the slot on trial
        ([0, 0, 1, 1, 2, 2, 3, 4, 3, 4, 3, 4], {2, 3, 4}),  # 4 has too, and no slot is on trial
        ([0, 0, 1, 1, 2, 2, 3, 4, 3, 4, 3, 5], {2, 3, 5}),  # 5 has not: it takes the slot all the same
    ],
)
def test_who_is_admitted(name: str, policy: str, uses: list[int], left: set[int]) -> None:
    rig = Rig(name, [Shape(9, 0, 3)], policy, "frequency").in_memory()
    for row in uses:
        use(rig, row)
    assert resident(rig) == left


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_come_once_leave_those_that_come_again(name: str, policy: str) -> None:
    """And what was popular makes room for what is, once counts of it have halved."""
    popular, hits = list(range(16)), {}
    for admission in ADMISSIONS:
        rig, once = Rig(name, [Shape(2000, 0, 16)], policy, admission).in_memory(), iter(range(100, 2000))
        for _ in range(20):
            before = rig.counters(0)["hit_rows"]
            use(rig, *popular)
            hits[admission] = rig.counters(0)["hit_rows"] - before
            use(rig, *popular)
            for _ in range(16):
                use(rig, next(once))
    assert hits == {"none": 0, "frequency": 15}, "of 16; one slot is on trial"
    for _ in range(60):
        use(rig, *range(20, 32), next(once))
    assert resident(rig) >= set(range(20, 32))


def test_an_evaluation_takes_empty_slots_only_when_no_other_is_left(name: str) -> None:
    rig = Rig(name, [Shape(9, 1, 5)], "clock").in_memory()
    assert use(rig, 3, keep=False) == [6], "the first slot beside the cache"
    assert use(rig, 3) == [1], "and nothing has come into it"
    flight, slots = rig.caches.admit(np.arange(9), [(0, 0, 9)], False, 1)
    assert slots.tolist() == [0, 6, 7, 1, 8, 2, 3, 4, 5]
    flight.release(False)
    assert rig.counters(0)["evicted_rows"] == rig.counters(0)["overflow_rows"] == 0


def test_numbers_of_batches_begin_again(name: str) -> None:
    """A row that a batch of the numbers' last round had is pinned by the one of the same number."""
    rig = Rig(name, [Shape(99, 0, 8)], "clock").in_memory()
    rig.caches.last_batch = 1
    for row in range(8):
        use(rig, row)
    rig.caches.last_batch = 2**32 - 1
    for number in range(12):
        flight, slots = rig.caches.admit(np.arange(8), [(0, 0, 8)], True, 1)
        assert use(rig, 50) == [8], f"batch {number}: a row in use has made room"
        assert slots.tolist() == list(range(8))
        flight.release(False)
    assert rig.counters(0)["rows"] == 8 + 12 * 9


def test_estimates_against_counts() -> None:
    """The sketch is never below the uses of a row, and seldom above; half of it is what a halving leaves."""
    rng, sketch = np.random.default_rng(3), _Frequencies(400)
    rows = rng.zipf(1.3, 3199) % 5000
    for row in rows.tolist():
        sketch.count(row)
    truth = np.minimum(np.bincount(rows, minlength=5000), 15)
    estimates = np.array([sketch.estimate(row) for row in range(5000)])
    assert (estimates >= truth).all()
    assert (estimates[truth > 0] == truth[truth > 0]).mean() > 0.6
    sketch.count(0)  # the 3200th, 8 for each place
    halved = np.array([sketch.estimate(row) for row in range(5000)])
    assert ((halved == estimates // 2) | (halved == (estimates + 1) // 2)).all()
    assert (halved < estimates).sum() > 500


# ---- reads that take their time


NUM = 400
SLOW = Shape(3 * NUM, 0, NUM, dim=1024)  # records of a page each
SEVEN = np.arange(NUM)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Rig]:
    """Rows [0, NUM) hold 7 and are not resident, but in a file of which one row is read at a time."""
    rig = Rig("native", [SLOW], "lru").in_files(tmp_path, "block", Engines(io="threads", depth=1, num_threads=1))
    flight, slots = rig.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    assert flight.wait()
    rig.arrays[0][0][slots] = 7
    flight.release(True)
    use(rig, *range(NUM, 2 * NUM))
    assert rig.caches.write_back()
    yield rig
    rig.close()


def check_fresh(rig: Rig) -> None:
    """Rows that were never touched take the slots, and nothing comes to lie over them."""
    rows = np.arange(2 * NUM, 3 * NUM)
    flight, slots = rig.caches.admit(rows, [(0, 0, NUM)], True, 1)
    assert flight.wait()
    time.sleep(0.1)
    np.testing.assert_array_equal(records_of(rig.arrays[0], slots), initial_rows(SLOW)[rows])


@needs_native
def test_a_batch_waits_for_rows_that_an_earlier_one_brings(slow: Rig) -> None:
    earlier, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    later, slots = slow.caches.admit(SEVEN[::-1].copy(), [(0, 0, NUM)], False, 1)
    assert later.wait()
    assert (slow.arrays[0][0][slots] == 7).all()
    del earlier


@needs_native
def test_rows_under_way_come_into_the_arrays_of_a_table_that_grows(slow: Rig) -> None:
    flight, slots = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    slow.grow(0, SLOW._replace(num_rows=3 * NUM + 5))
    assert flight.wait()
    assert (slow.arrays[0][0][slots] == 7).all()


@needs_native
def test_a_batch_released_at_once_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    flight.release(False)
    check_fresh(slow)


@needs_native
def test_a_batch_that_is_dropped_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    del flight
    check_fresh(slow)


@needs_native
def test_a_batch_with_a_bad_id_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(np.array([*SEVEN, -1]), [(0, 0, NUM), (0, NUM, NUM + 1)], True, 1)
    assert flight is None
    check_fresh(slow)


@needs_native
def test_a_read_that_fails_is_told_to_all_that_wait_for_it(slow: Rig, tmp_path: Path) -> None:
    os.truncate(tmp_path / "0.rows", 4096)
    earlier, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    later, _ = slow.caches.admit(SEVEN[-1:], [(0, 0, 1)], True, 1)
    assert not later.wait()
    assert not earlier.wait()
    after, _ = slow.caches.admit(SEVEN[:1], [(0, 0, 1)], True, 1)
    assert not after.wait(), "the row has a slot, and did not come"
    assert "table 't0'" in slow.caches.failure()
    earlier.release(True)
    assert not slow.caches.write_back()
    with pytest.raises(StoreError, match="table 't0'"):
        slow.close()

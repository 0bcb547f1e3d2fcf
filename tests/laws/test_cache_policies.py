"""Which rows a cache keeps: by hand-made uses, beside a clock in lists, and within the bytes that the budget counts.

What the caches bring and hold is test_tiers_property.py.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cache_rig import Rig, Shape, initial_rows, needs_native, records_of, use
from hotrow.placement.budget import METADATA_BYTES
from hotrow.placement.stores import Engines, StoreError
from loops import looped
from store_rig import UsesClock

pytestmark = needs_native


def resident(rig: Rig) -> set[int]:
    """Rows that an evaluation finds."""
    found = set()
    for row in range(rig.shapes[0].num_rows):
        before = rig.counters(0)["hit_rows"]
        use(rig, row, keep=False)
        found |= {row} if rig.counters(0)["hit_rows"] > before else set()
    return found


@looped(
    ("uses", "left"),
    [
        ([0, 1, 2, 3], {1, 2, 3}),  # all were used once: the first to come makes room
        ([0, 0, 1, 2, 3], {0, 2, 3}),  # seen once leaves before seen twice
        ([0, 0, 1, 1, 2, 2, 3], {1, 2, 3}),  # the hand takes a use from each, and comes back to the first
        ([0, 0, 0, 0, 1, 2, 3, 4], {0, 3, 4}),
    ],
)
def test_who_makes_room(uses: list[int], left: set[int]) -> None:
    rig = Rig([Shape(9, 0, 3)]).in_memory()
    for row in uses:
        use(rig, row)
    assert resident(rig) == left
    assert resident(rig) == left, "an evaluation moved something"


@looped("pinned", [0, 40])
@looped("in_flight", [0, 1, 3])
def test_places_and_counts_against_a_clock_in_lists(in_flight: int, pinned: int) -> None:
    """Skewed batches, several in flight, of rows that change in popularity; pinned rows; evaluations in between."""
    rig, model = Rig([Shape(400, pinned, 32)]).in_memory(), UsesClock(32)
    rng, flights = np.random.default_rng(in_flight), []
    hits = evicted = 0
    for number in range(800):
        ids = (rng.zipf(1.2, 8) * (1 + number // 200)) % 400
        flight, slots = rig.caches.admit(ids, [(0, 0, 8)], True, 1)
        rows = [row for row in dict.fromkeys(ids.tolist()) if row >= pinned]
        hits += len(set(rows) & set(model.rows))
        places, left = model.admit(rows)
        evicted += len(left)
        wanted = [row if row < pinned else pinned + places[row] for row in ids.tolist()]
        assert slots.tolist() == wanted, f"batch {number}"
        flights.append((flight, rows))
        if number % 7 == 0:
            looked_at = rng.integers(0, 400, 6).tolist()
            use(rig, *looked_at, keep=False)
            hits += len({row for row in looked_at if row >= pinned} & set(model.rows))
        while len(flights) > in_flight:
            flight, rows = flights.pop(0)
            flight.release(False)
            model.release(rows)
    counters = rig.counters(0)
    assert (counters["hit_rows"], counters["evicted_rows"], counters["overflow_rows"]) == (hits, evicted, 0)
    assert evicted > 500


def test_what_is_known_of_a_slot_is_within_what_the_budget_counts() -> None:
    rig = Rig([Shape(20_000, 0, 10_000, dim=1)]).in_memory()
    use(rig, *range(0, 20_000, 2))
    use(rig, *range(10_000))
    counters = rig.caches.counters(0)
    assert counters["map_bytes"] == 8 * 10_000
    bits = 2 * 20_000 // 8
    assert counters["num_bytes"] - bits <= 20 * 10_000 + 100
    use(rig, *range(9_999), *range(15_000, 15_100))
    use(rig, *range(5_000, 5_100), keep=False)
    assert rig.caches.counters(0)["num_bytes"] - bits <= METADATA_BYTES * 10_000 + 1000


def test_an_evaluation_is_no_use() -> None:
    """Rows that an evaluation looks at make room as if they had not been looked at."""
    rigs = [Rig([Shape(40, 0, 4)]).in_memory() for _ in range(2)]
    rng = np.random.default_rng(5)
    for _ in range(300):
        row = int(rng.integers(0, 8) ** 2 // 2)
        assert use(rigs[0], row) == use(rigs[1], row)
        use(rigs[1], *rng.integers(0, 40, 6).tolist(), keep=False)
    assert rigs[0].counters(0)["evicted_rows"] == rigs[1].counters(0)["evicted_rows"] > 50


def test_rows_that_come_once_leave_those_that_come_again() -> None:
    """And rows that were popular make room for rows that are."""
    popular, rig, once = range(12), Rig([Shape(2000, 0, 16)]).in_memory(), iter(range(100, 2000))
    for _ in range(20):
        before = rig.counters(0)["hit_rows"]
        use(rig, *popular)
        hits = rig.counters(0)["hit_rows"] - before
        for _ in range(3):
            use(rig, *popular)
        for _ in range(8):
            use(rig, next(once))
    assert hits == 12
    for _ in range(60):
        use(rig, *range(20, 32), next(once))
    assert resident(rig) >= set(range(20, 32))


def test_an_evaluation_takes_empty_slots_only_when_no_other_is_left() -> None:
    rig = Rig([Shape(9, 1, 5)]).in_memory()
    assert use(rig, 3, keep=False) == [6], "the first slot beside the cache"
    assert use(rig, 3) == [1], "and nothing has come into it"
    flight, slots = rig.caches.admit(np.arange(9), [(0, 0, 9)], False, 1)
    assert slots.tolist() == [0, 6, 7, 1, 8, 2, 3, 4, 5]
    flight.release(False)
    assert rig.counters(0)["evicted_rows"] == rig.counters(0)["overflow_rows"] == 0


def test_numbers_of_batches_begin_again() -> None:
    """A row that a batch of the numbers' last round had is pinned by the one of the same number."""
    rig = Rig([Shape(99, 0, 8)]).in_memory()
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


NUM = 400
SLOW = Shape(3 * NUM, 0, NUM, dim=1024)  # records of a page each
SEVEN = np.arange(NUM)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Rig]:
    """Rows [0, NUM) hold 7 and are not resident, but in a file of which one row is read at a time."""
    rig = Rig([SLOW]).in_files(tmp_path, "block", Engines(io="threads", depth=1, num_threads=1))
    flight, slots = rig.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    assert flight.wait()
    rig.arrays[0][0][slots] = 7
    flight.release(True)
    use(rig, *range(NUM, 2 * NUM))
    assert rig.caches.write_back()
    yield rig
    rig.close()


def test_a_batch_waits_for_rows_that_an_earlier_one_brings(slow: Rig) -> None:
    earlier, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    later, slots = slow.caches.admit(SEVEN[::-1].copy(), [(0, 0, NUM)], False, 1)
    assert later.wait()
    assert (slow.arrays[0][0][slots] == 7).all()
    del earlier


@pytest.mark.parametrize("how", ["released at once", "dropped", "with a bad id"])
def test_a_batch_that_is_over_lays_nothing_into_slots_of_others(slow: Rig, how: str) -> None:
    """Rows that were never touched take the slots, and nothing comes to lie over them."""
    bad = [-1] * (how == "with a bad id")
    flight, _ = slow.caches.admit(np.array([*SEVEN, *bad]), [(0, 0, NUM), (0, NUM, NUM + len(bad))], True, 1)
    assert (flight is None) == bool(bad)
    if how == "released at once":
        flight.release(False)
    del flight
    rows = np.arange(2 * NUM, 3 * NUM)
    flight, slots = slow.caches.admit(rows, [(0, 0, NUM)], True, 1)
    assert flight.wait()
    time.sleep(0.1)
    np.testing.assert_array_equal(records_of(slow.arrays[0], slots), initial_rows(SLOW)[rows])


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

"""Which rows a cache keeps: by hand-made uses, and within the bytes that the budget counts for it.

What the caches bring and hold is test_tiers_property.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from cache_rig import Rig, Shape, needs_native, use

from hotrow.placement.budget import ADMISSIONS, METADATA_BYTES, POLICIES

pytestmark = needs_native


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
def test_who_makes_room(policy: str, uses: list[int], left: set[int]) -> None:
    rig = Rig([Shape(9, 0, 3)], policy).in_memory()
    for row in uses:
        use(rig, row)
    assert resident(rig) == left
    assert resident(rig) == left, "an evaluation moved something"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_what_is_known_of_a_slot_is_within_what_the_budget_counts(policy: str, admission: str) -> None:
    rig = Rig([Shape(20_000, 0, 10_000, dim=1)], policy, admission).in_memory()
    use(rig, *range(0, 20_000, 2))
    use(rig, *range(10_000))
    counters = rig.caches.counters(0)
    assert counters["map_bytes"] == 8 * 10_000
    bits = 2 * 20_000 // 8
    assert counters["num_bytes"] - bits <= METADATA_BYTES * 10_000 + 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_an_evaluation_is_no_use(policy: str, admission: str) -> None:
    """Rows looked at without admission make room as if they had not been."""
    rigs = [Rig([Shape(40, 0, 4)], policy, admission).in_memory() for _ in range(2)]
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
def test_who_is_admitted(policy: str, uses: list[int], left: set[int]) -> None:
    rig = Rig([Shape(9, 0, 3)], policy, "frequency").in_memory()
    for row in uses:
        use(rig, row)
    assert resident(rig) == left


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_come_once_leave_those_that_come_again(policy: str) -> None:
    """And what was popular makes room for what is, once counts of it have halved."""
    popular, hits = list(range(16)), {}
    for admission in ADMISSIONS:
        rig, once = Rig([Shape(2000, 0, 16)], policy, admission).in_memory(), iter(range(100, 2000))
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


def test_an_evaluation_takes_empty_slots_only_when_no_other_is_left() -> None:
    rig = Rig([Shape(9, 1, 5)], "clock").in_memory()
    assert use(rig, 3, keep=False) == [6], "the first slot beside the cache"
    assert use(rig, 3) == [1], "and nothing has come into it"
    flight, slots = rig.caches.admit(np.arange(9), [(0, 0, 9)], False, 1)
    assert slots.tolist() == [0, 6, 7, 1, 8, 2, 3, 4, 5]
    flight.release(False)
    assert rig.counters(0)["evicted_rows"] == rig.counters(0)["overflow_rows"] == 0


def test_numbers_of_batches_begin_again() -> None:
    """A row that a batch of the numbers' last round had is pinned by the one of the same number."""
    rig = Rig([Shape(99, 0, 8)], "clock").in_memory()
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

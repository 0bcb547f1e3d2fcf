"""Batches whose rows are still being read: who waits for them, and that nothing comes to lie over rows of others.

The file under the cache is read a page at a time by one thread, so that a read is under way when the next call comes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_rig import Rig, Shape, initial_rows, needs_native, records_of, use

from hotrow.placement.stores import Engines, StoreError

pytestmark = needs_native
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


def check_fresh(rig: Rig) -> None:
    """Rows that were never touched take the slots, and nothing comes to lie over them."""
    rows = np.arange(2 * NUM, 3 * NUM)
    flight, slots = rig.caches.admit(rows, [(0, 0, NUM)], True, 1)
    assert flight.wait()
    time.sleep(0.1)
    np.testing.assert_array_equal(records_of(rig.arrays[0], slots), initial_rows(SLOW)[rows])


def test_a_batch_waits_for_rows_that_an_earlier_one_brings(slow: Rig) -> None:
    earlier, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    later, slots = slow.caches.admit(SEVEN[::-1].copy(), [(0, 0, NUM)], False, 1)
    assert later.wait()
    assert (slow.arrays[0][0][slots] == 7).all()
    del earlier


def test_rows_under_way_come_into_the_arrays_of_a_table_that_grows(slow: Rig) -> None:
    flight, slots = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    slow.grow(0, SLOW._replace(num_rows=3 * NUM + 5))
    assert flight.wait()
    assert (slow.arrays[0][0][slots] == 7).all()


def test_a_batch_released_at_once_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    flight.release(False)
    check_fresh(slow)


def test_a_batch_that_is_dropped_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(SEVEN, [(0, 0, NUM)], True, 1)
    del flight
    check_fresh(slow)


def test_a_batch_with_a_bad_id_lays_nothing_into_slots_of_others(slow: Rig) -> None:
    flight, _ = slow.caches.admit(np.array([*SEVEN, -1]), [(0, 0, NUM), (0, NUM, NUM + 1)], True, 1)
    assert flight is None
    check_fresh(slow)


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

"""Memory that runs out while rows move: the table's store has failed then and says so, or every row is as it was."""

import sys
from pathlib import Path

import pytest

from cache_rig import needs_native
from forked import run_python

ROWS = """
import resource, sys
from pathlib import Path
import numpy as np
from cache_rig import Rig, Shape

NUM, STEP = 100_000, 96 << 10


def limited(extra, call):
    # Whether `call` finds memory within so many bytes of address space more than there are.
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, resource.RLIM_INFINITY))
    try:
        call()
        return True
    except MemoryError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def admit(first, *, keep):
    return rig.caches.admit(np.arange(first, first + NUM), [(0, 0, NUM)], keep, 1)


def evict():  # untouched rows take the slots of the others
    admit(NUM, keep=True)


def release():  # rows beside the cache, that were updated, leave with their batch
    flight, slots = held
    flight.release(True)


def write_back():
    rig.caches.write_back()


move, cached = sys.argv[1], int(sys.argv[2])
rig = Rig([Shape(3 * NUM, 0, cached, dim=1)]).in_memory()
held = admit(0, keep=move != "release")
assert held[0].wait()
rig.arrays[0][0][held[1], 0] = np.arange(NUM)
if move != "release":
    held[0].release(True)
for extra in range(0, 32 << 20, STEP):
    if limited(extra, globals()[move]) or rig.caches.failure():
        break
tries = extra // STEP
if not rig.caches.failure():
    held[0].release(False)
    evict()
    flight, slots = admit(0, keep=True)
    assert flight.wait()
    lost = np.count_nonzero(rig.arrays[0][0][slots, 0] != np.arange(NUM))
    print(f"{tries} tries without memory, then all went well, and {lost} rows are lost")
else:
    flight, slots = admit(0, keep=True)
    assert not flight.wait() and not rig.caches.write_back()
    print(rig.caches.failure())
"""


@pytest.mark.slow_but("release-1000")
@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the process's memory")
@pytest.mark.parametrize(("move", "cached"), [("evict", 100_000), ("release", 1000), ("write_back", 100_000)])
def test_rows_are_not_lost_in_silence(move: str, cached: int) -> None:
    # Memory that was freed goes back to the system at once, so that the next call has to ask for it.
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "MALLOC_MMAP_THRESHOLD_": "65536"}
    said = run_python("-c", ROWS, move, cached, env=environment, timeout=60)
    assert "table 't0' lost rows, because there was no memory to move them" in said

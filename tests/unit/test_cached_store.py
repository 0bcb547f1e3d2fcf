"""A store before another (cached_store.h): which rows it keeps, what goes down and when, and how failures are told.

That rows read as they were last written, whatever the schedule, is in tests/laws/test_store_law.py.
"""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotrow.placement.stores import Engines, Kind, Store, StoreError, TableRows, open_cached_store, open_store
from loops import looped
from store_rig import fails_for_ever, needs_native
from store_rig import write_rows as write

pytestmark = needs_native
ROWS = TableRows(table="item", record_bytes=512, num_rows=1000)
TIER = replace(ROWS, table="item (middle tier)")
BEFORE: list[Kind] = ["dram", "mapped"]


def engines() -> Engines:
    return Engines(io="threads", depth=4, num_threads=4)


def cached(folder: Path, places: int, *, before: Kind = "dram", below: Kind = "block", rows: TableRows = ROWS) -> Store:
    middle = open_store(replace(TIER, num_rows=places), kind=before, path=folder / "middle")
    return open_cached_store(middle, open_store(rows, kind=below, path=folder / "rows", engines=engines()))


def read(store: Store, rows: list[int]) -> np.ndarray:
    out = np.full((len(rows), store.rows.record_bytes), 0x55, np.uint8)
    store.read(rows, np.arange(len(rows)), [out])
    assert (out == out[:, :1]).all()
    return out[:, 0]


def held(store: Store, rows: list[int]) -> list[int]:
    found = []
    for row in rows:
        before = store.counters()["middle_hits"]
        read(store, [row])
        found += [row] if store.counters()["middle_hits"] > before else []
    return found


@looped(
    ("places", "written", "stay"),
    [
        (1, [4, 9], [9]),
        (3, [0, 1, 2, 3], [1, 2, 3]),  # the first to come is the first to leave
        (3, [0, 1, 2, 0, 3], [0, 2, 3]),  # but one that was written again stays once more
        (3, [0, 1, 2, 0, 3, 4, 5], [3, 4, 5]),  # once
        (3, [0, 1, 2, 2, 1, 0, 3], [1, 2, 3]),  # all were: the hand clears all and comes back to the first
        (16, list(range(17)), list(range(1, 17))),
        (31, list(range(17)), list(range(1, 17))),  # what is beyond a set of 16 stays empty
        (32, [*range(0, 34, 2), 1], [1, *range(2, 34, 2)]),  # two sets: even rows, and odd ones
        (1008, list(range(1000)), list(range(1000))),  # places for all rows, in whole sets, hold all
    ],
)
def test_who_stays(tmp_path: Path, places: int, written: list[int], stay: list[int]) -> None:
    with cached(tmp_path, places, below="dram") as store:
        for row in written:
            write(store, [row], value=row % 250)
        counts = store.counters()
        assert (counts["middle_rows"], counts["written_rows"]) == (len(stay), len(written_down(written, stay)))
        assert held(store, sorted(set(written))) == stay
        assert read(store, sorted(set(written))).tolist() == [row % 250 for row in sorted(set(written))]
        assert held(store, sorted(set(written))) == stay, "a read moved something"


def written_down(written: list[int], stay: list[int]) -> set[int]:
    return set(written) - set(stay)


@looped("before", BEFORE)
def test_only_what_is_newer_goes_down_and_once(tmp_path: Path, before: Kind) -> None:
    with cached(tmp_path, 48, before=before) as store:
        write(store, list(range(40)))
        assert store.counters()["written_rows"] == 0, "nothing had to leave"
        store.flush()
        store.flush()
        assert store.counters()["written_rows"] == 40
        assert held(store, list(range(50))) == list(range(40)), "a flush keeps what it writes"
        write(store, list(range(100, 148)))
        store.flush()
        assert store.counters()["written_rows"] == 40 + 48, "rows that were written down leave for nothing"
        assert read(store, [0, 39, 100, 147, 40]).tolist() == [7, 7, 7, 7, 0]


def test_what_is_counted(tmp_path: Path) -> None:
    with cached(tmp_path, 32, before="mapped") as store:
        write(store, list(range(48)))
        read(store, list(range(48)))
        counts = store.counters()
    assert (counts["middle_hits"], counts["middle_rows"]) == (32, 32)
    assert counts["read_rows"] == 16
    assert counts["middle_written_bytes"] == 48 * 512
    assert counts["middle_read_bytes"] == (16 + 32) * 512, "to write them down, and hits"
    assert counts["middle_map_bytes"] == 32 * 5 + 2


@looped("before", BEFORE)
def test_a_row_is_read_while_its_write_down_waits(tmp_path: Path, before: Kind) -> None:
    rows = replace(ROWS, num_rows=5000)
    with cached(tmp_path, 16, before=before, rows=rows) as store:
        every = np.arange(5000)
        value = np.repeat((every % 251).astype(np.uint8)[:, None], 512, axis=1)
        store.write(every, every, [value])
        value[:] = 0  # copied before write returned
        assert read(store, every.tolist()).tolist() == (every % 251).tolist()
        assert store.counters()["served_from_queue"] > 100


@looped("below", ["block", "mapped"])
def test_what_is_discarded_writes_nothing_more(tmp_path: Path, below: Kind) -> None:
    """Neither as it is closed nor as the last holder of its native part goes; who asks it then is told."""
    store = cached(tmp_path, 96, below=below)
    write(store, [500], value=9)
    store.flush()
    write(store, list(range(90)))
    native = store.native
    store.discard()
    store.discard()
    assert not native.flush()
    assert re.search("table 'item'.* is closed, and its rows are removed", native.failure())
    del store, native
    with open_store(ROWS, kind=below, path=tmp_path / "rows", engines=engines()) as again:
        assert read(again, [500]) == 9
        assert not read(again, list(range(90))).any()


def test_bad_arguments(tmp_path: Path) -> None:
    lower = open_store(ROWS, kind="dram")
    for middle, message in [(replace(TIER, num_rows=0), "hold"), (replace(TIER, record_bytes=511), "differ in length")]:
        with pytest.raises(ValueError, match=message):
            open_cached_store(open_store(middle, kind="dram"), lower)
    block = open_store(TIER, kind="block", path=tmp_path / "t", engines=engines())
    with pytest.raises(ValueError, match="table 'item': a tier before another is dram or mapped, not a block store"):
        open_cached_store(block, lower)
    block.close()
    with open_cached_store(open_store(TIER, kind="dram"), lower) as store:
        with pytest.raises(ValueError, match="is closed"):
            read(lower, [1])  # it belongs to the new one
        with pytest.raises(ValueError, match="row"):
            read(store, [1000])
        with pytest.raises(ValueError, match="row"):
            write(store, [-1])


def test_more_rows_than_a_tier_can_name() -> None:
    rows = replace(ROWS, num_rows=2**32, record_bytes=1)
    held_rows = replace(TIER, record_bytes=rows.record_bytes)
    with pytest.raises(ValueError, match="more rows than a tier before it can name"):
        open_cached_store(open_store(held_rows, kind="dram"), open_store(rows, kind="dram"))


@looped("failing", ["writing", "reading"])
def test_an_error_below_is_told_for_ever(tmp_path: Path, failing: str) -> None:
    """Also by rows that lie in the middle, which could still be read: no step goes on."""
    lower = open_store(ROWS, kind="block", path=tmp_path / "rows", engines=engines())
    native = lower.native
    store = open_cached_store(open_store(replace(TIER, num_rows=16), kind="dram"), lower)
    write(store, [1])
    store.flush()
    native.inject(failing == "writing", 1, errno.EIO)
    message = failing + r" rows? .*of table 'item' in .*/rows: Input/output.*last checkpoint"
    with pytest.raises(StoreError, match=message):
        if failing == "reading":
            read(store, [500])
        write(store, list(range(2, 18)))
        store.flush()
    fails_for_ever(store, message)


def test_a_full_disk_below(small_disk: tuple[Path, Callable[[int], None]], tmp_path: Path) -> None:
    folder, resize = small_disk
    resize(512)
    rows = replace(ROWS, num_rows=10_000)
    middle = open_store(replace(TIER, num_rows=64), kind="mapped", path=tmp_path / "middle")
    store = open_cached_store(middle, open_store(rows, kind="mapped", path=folder / "rows"))
    message = r"writing row \d+ of table 'item' in .*/rows: No space left on device; free some"
    with pytest.raises(StoreError, match=message):
        for first in range(0, 10_000, 100):
            write(store, list(range(first, first + 100)))
    fails_for_ever(store, message)


def test_a_full_disk_in_the_middle(small_disk: tuple[Path, Callable[[int], None]], tmp_path: Path) -> None:
    """No signal, but an error that names table, rows and the file; the tier's own words count places."""
    folder, resize = small_disk
    resize(512)
    middle = open_store(replace(TIER, num_rows=4096), kind="mapped", path=folder / "middle")
    rows = replace(ROWS, num_rows=10_000)
    store = open_cached_store(middle, open_store(rows, kind="block", path=tmp_path / "rows", engines=engines()))
    message = (
        r"writing rows \d+ to \d+ of table 'item' in the tier before its disk: writing row \d+ of table "
        r"'item \(middle tier\)' in .*/middle: No space left on device; free some"
    )
    with pytest.raises(StoreError, match=message):
        for first in range(0, 10_000, 100):
            write(store, list(range(first, first + 100)))
    fails_for_ever(store, message)


def test_a_file_below_truncated_while_open(tmp_path: Path) -> None:
    store = cached(tmp_path, 16)
    write(store, [900])
    os.truncate(tmp_path / "rows", 8192)
    assert read(store, [900]) == 7, "it lies in the middle"
    message = r"reading row 901 of table 'item' .* ends before its last row"
    with pytest.raises(StoreError, match=message):
        read(store, [900, 901])
    fails_for_ever(store, message)

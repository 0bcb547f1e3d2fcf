"""What tests of stores share: a table of one part, and rows that all hold one value."""

import re

import numpy as np
import pytest

from hotrow.kernels import ops
from hotrow.placement.stores import Kind, Store, StoreError, TableRows, io_uring_refused

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
needs_io_uring = pytest.mark.skipif(bool(io_uring_refused()), reason=f"io_uring is refused here: {io_uring_refused()}")
each_io = pytest.mark.parametrize("io", ["threads", pytest.param("io_uring", marks=needs_io_uring)])
FILE_KINDS: list[Kind] = ["mapped", "block"]


class UsesClock:
    """Which rows of a table lie in which of its cached places: row_cache.h in lists, for batches that find room."""

    def __init__(self, cached: int) -> None:
        self.rows: list[int | None] = [None] * cached
        self.uses, self.pins, self.hand = [0] * cached, [0] * cached, 0
        self.empty = iter(range(cached))

    def admit(self, rows: list[int]) -> tuple[dict[int, int], list[int | None]]:
        """Returns the place of each row of `rows`, and the rows that made room; holds them until `release`."""
        left = []
        for row in (row for row in rows if row in self.rows):
            self.uses[self.rows.index(row)] = min(15, self.uses[self.rows.index(row)] + 1)
            self.pins[self.rows.index(row)] += 1
        for row in (row for row in rows if row not in self.rows):
            if (place := next(self.empty, None)) is None:
                place = self._make_room()
                left.append(self.rows[place])
            self.rows[place], self.uses[place], self.pins[place] = row, 0, 1
        return {row: self.rows.index(row) for row in rows}, left

    def _make_room(self) -> int:
        while True:
            place, self.hand = self.hand, (self.hand + 1) % len(self.rows)
            if not self.pins[place]:
                if not self.uses[place]:
                    return place
                self.uses[place] -= 1

    def release(self, rows: list[int]) -> None:
        for row in rows:
            self.pins[self.rows.index(row)] -= 1


def table_rows(num_rows: int = 1000, record_bytes: int = 512, table: str = "item") -> TableRows:
    return TableRows(table=table, record_bytes=record_bytes, num_rows=num_rows)


def write_rows(store: Store, rows: list[int], value: int = 7) -> None:
    store.write(rows, np.arange(len(rows)), [np.full((len(rows), store.rows.record_bytes), value, np.uint8)])


def read_rows(store: Store, rows: list[int] | np.ndarray) -> np.ndarray:
    out = np.zeros((len(rows), store.rows.record_bytes), np.uint8)
    store.read(rows, np.arange(len(rows)), [out])
    return out


def fails_for_ever(store: Store, message: str) -> None:
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            store.flush()
        with pytest.raises(StoreError, match=message):
            read_rows(store, [1])
        with pytest.raises(StoreError, match=message):
            write_rows(store, [1])
    assert re.search(message, store.failure() or "")
    with pytest.raises(StoreError, match=message):
        store.close()

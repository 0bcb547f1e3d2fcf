"""What tests of stores share: a table of one part, and rows that all hold one value."""

from __future__ import annotations

import numpy as np
import pytest

from hotrow.kernels import ops
from hotrow.placement.stores import Kind, Store, TableRows, io_uring_refused

needs_native = pytest.mark.skipif(not ops.isas(), reason="the native module is absent")
needs_io_uring = pytest.mark.skipif(bool(io_uring_refused()), reason=f"io_uring is refused here: {io_uring_refused()}")
each_io = pytest.mark.parametrize("io", ["threads", pytest.param("io_uring", marks=needs_io_uring)])
FILE_KINDS: list[Kind] = ["mapped", "block"]


def table_rows(num_rows: int = 1000, record_bytes: int = 512, table: str = "item", identity: str = "m1") -> TableRows:
    return TableRows(table=table, parts=(("weight", record_bytes),), num_rows=num_rows, identity=identity)


def write_rows(store: Store, rows: list[int], value: int = 7) -> None:
    store.write(rows, np.arange(len(rows)), [np.full((len(rows), store.rows.record_bytes), value, np.uint8)])


def read_rows(store: Store, rows: list[int]) -> np.ndarray:
    out = np.zeros((len(rows), store.rows.record_bytes), np.uint8)
    store.read(rows, np.arange(len(rows)), [out])
    return out

"""Native caches with slots and stores of their own, for the tests of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hotrow.kernels import ops, reference, types
from hotrow.placement.store_file import page_records
from hotrow.placement.stores import Engines, Kind, Store, TableRows, open_cached_store, open_store

needs_native = pytest.mark.skipif(ops.backend().name != "native", reason="the native module is absent")
KEY, BOUND, ZERO_ROWS = 77, 0.5, 1


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
        w = types.to_float16(w).float()
        parts = [w.half().numpy()]
    if shape.storage == 2:
        parts = [half.view(torch.int16).numpy() for half in types.split(w)]
    for dim, constant, of_weight, of_sign in shape.states:
        of_rows = w.numpy() * np.float32(of_weight) + np.float32(0)  # + 0: a weight of zero gives no -0.0
        state = of_rows if of_weight else np.full((len(w), dim), constant, np.float32)
        parts.append(state + np.float32(of_sign) * np.sign(w.numpy()) if of_sign else state)
    return records_of(parts, np.arange(shape.num_rows))


def records_of(arrays: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(array[slots]).view(np.uint8) for array in arrays], axis=1)


class Rig:
    """Caches, their slots and their stores."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.module, self.shapes = ops.native_module(), list(shapes)
        self.caches = self.module.make_caches()
        self.caches.last_batch = 2**32 - 12  # so that numbers begin again as a schedule runs
        self.arrays = [shape.arrays() for shape in shapes]
        self.natives: list[Any] = []
        self.stores: list[Store] = []

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
            record_bytes = sum(array[0].nbytes for array in self.arrays[t])
            rows = TableRows(table=f"t{t}", record_bytes=record_bytes, num_rows=shape.num_rows)
            own: Kind = "block" if kind == "gathered" and page_records(rows.record_bytes) is None else kind
            store = open_store(rows, kind=own, path=folder / f"{t}.rows", engines=engines)
            if places:
                held = TableRows(table=f"t{t}", record_bytes=record_bytes, num_rows=places[t])
                store = open_cached_store(open_store(held, kind=before, path=folder / f"{t}-middle.rows"), store)
            self.stores.append(store)
            self._add(t, self.stores[-1].native)
        return self

    def _add(self, t: int, native: Any) -> None:
        shape = self.shapes[t]
        first = (KEY, BOUND, ZERO_ROWS, (0, 0, 1, 0), shape.dim, shape.storage)
        self.natives.append(native)
        sizes = (shape.num_rows, shape.pinned, shape.cached)
        self.caches.add(sizes, first, list(shape.states), native, self.module.Records(self.arrays[t]))

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


def use(rig: Rig, *ids: int, keep: bool = True, dirty: bool = False) -> list[int]:
    """Admit and release; the slots."""
    flight, slots = rig.caches.admit(np.array(ids, np.int32), [(0, 0, len(ids))], keep, 1)
    assert flight.wait()
    flight.release(dirty)
    return [int(slot) for slot in slots]

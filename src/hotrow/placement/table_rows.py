"""One array of a table in tiers, by rows: what checkpoints are written from and read into, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hotrow.base.records import Amount, Count
from hotrow.kernels import ops
from hotrow.kernels.reference import row_key, to_float16, uniform_rows, widen, write_rows
from hotrow.placement.tiers import State, Tiers

Rows = slice | Tensor
"""Rows of a table: a range of them, or their ids [n], int64."""


@dataclass(frozen=True)
class InitialRows:
    """What the rows of a table are before they are first written to; checkpoints say it. See row_cache.h."""

    table: str
    seed: int
    bound: Amount
    zero_rows: Count
    dtype: Literal["float32", "float16"]
    """Of the weights as files have them: "float32" (also of split ones) or "float16"."""
    states: dict[str, tuple[float, float, float]]
    """By name: constant, of_weight and of_sign of its `State`."""

    @classmethod
    def of(cls, tiers: Tiers, table: int) -> InitialRows:
        """Of table number `table`."""
        config = tiers.tables[table]
        bound, states = config.init.bound_for(config.num_embeddings), tiers.states.get(config.name, ())
        formulas = {state.name: (state.constant, state.of_weight, state.of_sign) for state in states}
        dtype: Literal["float32", "float16"] = "float16" if config.dtype == "float16" else "float32"
        return cls(config.name, tiers.seed, float(bound), config.init.zero_rows, dtype, formulas)

    def formula(self, name: str) -> tuple[Any, ...]:
        """All that the values of one array depend on."""
        return self.table, self.seed, self.bound, self.zero_rows, self.dtype, self.states.get(name)

    def read(self, name: str, rows: Rows, shape: torch.Size) -> Tensor:
        """`rows` of the weights (name "weight", float32 or float16) or of a state; shape: of the whole array."""
        if name == "weight":
            weights = self._weights(rows, shape[1])
            return to_float16(weights) if self.dtype == "float16" else weights
        state = State(name, torch.zeros(_num(rows), *shape[1:]), *self.states[name])
        w = state.array
        if state.of_weight or state.of_sign:  # the state is as long as the row
            w = self._weights(rows, shape[1])
            w = to_float16(w).float() if self.dtype == "float16" else w  # as it is stored
        state.fill(slice(0, _num(rows)), w)
        return state.array

    def _weights(self, rows: Rows, dim: int) -> Tensor:
        key = row_key(self.seed, self.table)
        if isinstance(rows, Tensor):
            return uniform_rows(key, rows, dim, self.bound, self.zero_rows)
        out = torch.empty(_num(rows), dim)
        ops.fill_uniform(out, key=key, bound=self.bound, zero_rows=self.zero_rows, first_row=rows.start)
        return out


class RowsInTiers:
    """The rows of `array` (weights, or an optimizer state) of table number `table`, wherever they lie.

    low: lower halves of split weights; rows are then float32. Reading and writing goes through the table's cache
    without changing what it keeps.
    """

    def __init__(self, tiers: Tiers, table: int, array: Tensor, low: Tensor | None = None) -> None:
        self.tiers, self.table, self._array, self._low = tiers, table, array, low
        self.shape = array.shape
        self.dtype = torch.float32 if low is not None else array.dtype

    def pieces(self) -> Iterator[slice]:
        """Ranges of rows that together are the table, each as many as memory is set aside for."""
        num_rows, step = self.shape[0], self.tiers.piece_rows(self.table)
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def read(self, rows: Rows) -> Tensor:
        """These rows [n, ...], exactly, as a copy."""
        with self.tiers.rows(self.table, _ids(rows)) as slots:
            return self._at(slots)

    def write(self, rows: Rows, values: Tensor) -> None:
        """Make these rows `values` [n, ...]; those that are so already stay as they are, and cost no write."""
        ids = _ids(rows)
        with self.tiers.rows(self.table, ids) as slots:
            differs = (_bits(self._at(slots)) != _bits(values)).reshape(len(ids), -1).any(dim=1)
        if differs.any():
            with self.tiers.rows(self.table, ids[differs], write=True) as slots:
                self._put(slots, values[differs])

    def _at(self, slots: Tensor) -> Tensor:
        if self._low is not None:
            return widen(self._array[slots], self._low[slots])
        # On pages that go with it: malloc would keep them, cut up by what comes after, and the next piece take others.
        out = ops.allocate(len(slots), *self._array.shape[1:], dtype=self._array.dtype)
        return torch.index_select(self._array, 0, slots, out=out)

    def _put(self, slots: Tensor, values: Tensor) -> None:
        if self._low is not None:
            write_rows(self._array, self._low, slots, values)
        else:
            self._array[slots] = values


class ChangedRows:
    """The values of `array` in the rows that were ever written to, or that were since `Tiers.clear_changed()`.

    ids: the ids of those rows instead. No row may change while they are read.
    """

    def __init__(self, array: RowsInTiers, *, ever: bool, ids: bool = False) -> None:
        self._array, self._ever, self._ids = array, ever, ids
        num_rows = array.tiers.num_changed(array.table, ever=ever)
        self.shape = torch.Size((num_rows, *(() if ids else array.shape[1:])))
        self.dtype = torch.int64 if ids else array.dtype

    def pieces(self) -> Iterator[Tensor]:
        """Their ids [n], rising, as many at a time as memory is set aside for."""
        return self._array.tiers.changed_rows(self._array.table, ever=self._ever)

    def read(self, rows: Tensor) -> Tensor:
        """What is said of a piece."""
        return rows if self._ids else self._array.read(rows)


def _ids(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop)


def _num(rows: Rows) -> int:
    return len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start


def _bits(values: Tensor) -> Tensor:
    """As integers: -0 is not 0, and NaN is itself."""
    return values.contiguous().view(torch.int32 if values.itemsize == 4 else torch.int16)

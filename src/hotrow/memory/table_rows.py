"""One array of a table in tiers, by rows: what checkpoints are written from and read into, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hotrow.memory.tiers import Tiers
from hotrow.reference import widen, write_rows


class RowsInTiers:
    """The rows of `array` (weights, or an optimizer state) of table number `table`, wherever they lie.

    low: lower halves of split weights; rows are then float32. Reading and writing goes through the table's cache
    without changing what it keeps.
    """

    def __init__(self, tiers: Tiers, table: int, array: Tensor, low: Tensor | None = None) -> None:
        self._tiers, self._table, self._array, self._low = tiers, table, array, low
        self.shape = array.shape
        self.dtype = torch.float32 if low is not None else array.dtype

    def pieces(self) -> Iterator[slice]:
        """Ranges of rows that together are the table, each as many as memory is set aside for."""
        num_rows, step = self.shape[0], self._tiers.piece_rows(self._table)
        return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def read(self, rows: slice) -> Tensor:
        """These rows [n, ...], exactly, as a copy."""
        with self._tiers.rows(self._table, torch.arange(rows.start, rows.stop)) as slots:
            return self._at(slots)

    def write(self, rows: slice, values: Tensor) -> None:
        """Make these rows `values` [n, ...]; those that are so already stay as they are, and cost no write."""
        ids = torch.arange(rows.start, rows.stop)
        with self._tiers.rows(self._table, ids) as slots:
            differs = (_bits(self._at(slots)) != _bits(values)).reshape(len(ids), -1).any(dim=1)
        if differs.any():
            with self._tiers.rows(self._table, ids[differs], write=True) as slots:
                self._put(slots, values[differs])

    def _at(self, slots: Tensor) -> Tensor:
        return self._array[slots] if self._low is None else widen(self._array[slots], self._low[slots])

    def _put(self, slots: Tensor, values: Tensor) -> None:
        if self._low is not None:
            write_rows(self._array, self._low, slots, values)
        else:
            self._array[slots] = values


def _bits(values: Tensor) -> Tensor:
    """As integers: -0 is not 0, and NaN is itself."""
    return values.contiguous().view(torch.int32 if values.itemsize == 4 else torch.int16)

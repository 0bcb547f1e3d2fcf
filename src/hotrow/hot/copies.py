"""Hot rows on a fast device: copies of rows and optimizer states, of which one side is live at a time.

    cold turn   lookups and updates work on the tables
    fetch       tables --gather, copy--> copies        once a table and array
    hot turn    lookups and updates work on the copies; the tables' hot rows are out of date
    give_back   copies --copy, scatter--> tables

Rows of a prefix keep their numbers as slots; listed rows follow them. Every copy is exact, so that a run with copies
has the bits of one without (law 2). The copies lie on a device, or in memory of this machine that plays one
(fast_memory.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hotrow.batch import KeyedJaggedTensor
from hotrow.embedding import EmbeddingCollection, StoredTable
from hotrow.hot.fast_memory import FastMemory, InDram, OnDevice
from hotrow.hot.hot_set import HotRows, HotSet
from hotrow.optim import SparseOptimizer


class Rows(Protocol):
    """An array that is read and written by row: of a table in memory, in tiers, or of its copies."""

    def read(self, rows: slice | Tensor) -> Tensor:
        """These rows [n, ...]."""

    def write(self, rows: slice | Tensor, values: Tensor) -> None:
        """Make these rows `values`."""


class _Array:
    """A tensor as `Rows`."""

    def __init__(self, array: Tensor) -> None:
        self._array = array

    def read(self, rows: slice | Tensor) -> Tensor:
        return self._array[rows]

    def write(self, rows: slice | Tensor, values: Tensor) -> None:
        self._array[rows] = values


class HotCopies:
    """Copies of the rows `hot` of the tables of `emb`, with the states of `optimizer`; the tables are live at first.

    optimizer: the only one of `emb`. device: where the copies lie, so that hot
    batches are looked up and updated there, their pooled rows included; None: in DRAM, beside the tables.

    Raises MemoryError, or torch's OutOfMemoryError, where the copies find no memory, ImportError where they are to lie
    on a device and Triton is not installed, ValueError where the tables have slots on a device already and for a
    device that the kernels do not run on.
    """

    def __init__(
        self,
        emb: EmbeddingCollection,
        optimizer: SparseOptimizer,
        hot: HotSet,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if emb.device_rows is not None:
            raise ValueError("the tables have slots on a device already: make the collection without DeviceMemory")
        self.emb, self.optimizer, self.hot = emb, optimizer, hot
        self.rows = [hot.rows[table.name] for table in emb.tables]
        self._tables = {name: t for t, table in enumerate(emb.tables) for name in table.feature_names}
        self._fast: FastMemory = InDram(emb) if device is None else OnDevice(emb, torch.device(device))
        room = self._fast.room
        self._weights = [room(own.num_rows, emb.weights[table.name]) for table, own in self._each()]
        low = [(emb.low.get(table.name), own.num_rows) for table, own in self._each()]
        self._low = [None if array is None else room(num_rows, array) for array, num_rows in low]
        self._states = {
            name: [room(own.num_rows, optimizer.state[emb.weights[table.name]][name]) for table, own in self._each()]
            for name in optimizer.state_names
        }
        self.arrays = self._fast.arrays(self._weights, self._low)
        """What lookups read and updates write while the copies are live."""
        self.states = [self._fast.arrays(arrays) for arrays in self._states.values()]
        self.kernels, self.sequence_kernels = self._fast.kernels, self._fast.sequence_kernels
        """What does so."""
        self._changed = False
        self.seconds = 0.0
        """Spent copying rows to and fro."""
        self.num_copied = 0
        """How many times all hot rows were copied, either way."""

    def _each(self) -> Iterator[tuple[Any, HotRows]]:
        return zip(self.emb.tables, self.rows, strict=True)

    @property
    def live(self) -> bool:
        """Whether the copies are, and not the tables' rows."""
        return self.emb.copies is self

    def fetch(self) -> None:
        """From now on the copies are live: of every hot row, with its states, as the tables have them."""
        if self.live:
            return
        self._check_no_step_under_way()
        self._copy(to_tables=False)
        self.emb.copies = self

    def give_back(self) -> None:
        """From now on the tables are live, as the copies were."""
        with self.flushed():
            pass
        self.emb.copies = None

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Inside, the tables are live and whole, to be read and not changed: for evaluations and checkpoints."""
        self._check_no_step_under_way()
        live = self.emb.copies
        self.emb.copies = None
        try:  # where they cannot be written back they stay live, and the tables out of date
            if live is not None and self._changed:
                self._copy(to_tables=True)
                self._changed = False
            yield
        finally:
            self.emb.copies = live

    def _check_no_step_under_way(self) -> None:
        if self.emb.pending:
            raise RuntimeError("gradients of hot rows await the optimizer: call step() or zero_grad() first")

    @torch.no_grad()
    def _copy(self, *, to_tables: bool) -> None:
        self._fast.wait()  # for steps that were asked for: their seconds are not the copies'
        start = time.perf_counter()
        for t, own in enumerate(self.rows):
            for table, copies in self._pairs(t):
                for rows, slots in self._pieces(t, own):
                    if to_tables:
                        table.write(rows, self._fast.back(copies.read(slots)))
                    else:
                        copies.write(slots, self._fast.over(table.read(rows)))
        self._fast.wait()
        self.seconds += time.perf_counter() - start
        self.num_copied += 1

    def _pairs(self, t: int) -> Iterator[tuple[Rows, Rows]]:
        """Every array of a table, and that of its copies."""
        name = self.emb.tables[t].name
        weight, low = self._weights[t], self._low[t]
        if self.emb.tiers is None:
            arrays, lower = self.emb.weights[name], self.emb.low.get(name)
            yield _Array(arrays), _Array(weight)
            if low is not None and lower is not None:
                yield _Array(lower), _Array(low)
            states: Any = {n: _Array(self.optimizer.state[self.emb.weights[name]][n]) for n in self._states}
        else:
            yield self.emb.rows(name), _Array(weight) if low is None else StoredTable(weight, low)
            states = {n: self.optimizer.state_rows()[f"{t}.{n}"] for n in self._states}
        for n, copies in self._states.items():
            yield states[n], _Array(copies[t])

    def _pieces(self, t: int, own: HotRows) -> Iterator[tuple[slice | Tensor, slice]]:
        """Rows of a table and their slots, as many at a time as memory is set aside for."""
        step = max(1, own.num_rows if self.emb.tiers is None else self.emb.tiers.piece_rows(t))
        if self._fast.piece_bytes is not None:
            step = max(1, min(step, self._fast.piece_bytes // (4 * self.emb.tables[t].embedding_dim)))
        for start in range(0, own.prefix, step):
            span = slice(start, min(start + step, own.prefix))
            yield span, span
        for start in range(0, len(own.listed), step):
            rows = torch.from_numpy(own.listed[start : start + step])
            yield rows, slice(own.prefix + start, own.prefix + start + len(rows))

    def updated(self) -> None:
        """A step changes them: the tables are out of date until they are written back."""
        self._changed = True

    def slots(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with slots for ids. Raises ValueError where a row is not hot: its only copy is in the tables."""
        values = sparse.values
        for name in (key for key in sparse.keys if key in self._tables):
            span, own = sparse.span(name), self.rows[self._tables[name]]
            beyond = sparse.values[span] >= own.prefix
            if bool(beyond.any()):
                values = values.clone() if values is sparse.values else values
                self._move(name, own, beyond, values[span])
        return sparse.with_values(values)

    def _move(self, feature: str, own: HotRows, beyond: Tensor, ids: Tensor) -> None:
        """Slots for those ids of a feature that lie beyond the prefix, in place."""
        listed, found = torch.from_numpy(own.listed), ids[beyond].long()
        places = torch.searchsorted(listed, found)
        cold = found if not len(listed) else found[listed[places.clamp(max=len(listed) - 1)] != found]
        if len(cold):
            raise ValueError(
                f"feature {feature!r} looks up row {int(cold[0])}, which is not hot, while hot rows live on the fast "
                "device: call give_back() before batches that are not all hot"
            )
        ids[beyond] = (own.prefix + places).to(ids.dtype)

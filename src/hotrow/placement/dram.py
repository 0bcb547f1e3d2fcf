"""All rows in DRAM: one array per table, in which a row's slot is its number."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.base.files import size
from hotrow.base.machine import available_memory_bytes
from hotrow.kernels import ops
from hotrow.kernels.types import Layout, row_key, widen, write_rows
from hotrow.placement.base import NO_LEASE, Attached, Placement, RowIds, Rows, TableState
from hotrow.placement.slots import Held
from hotrow.tables import TableConfig

PIECE_BYTES = 1 << 24
"""Rows in memory are read and written in pieces of at most this size, so that a conversion needs little memory."""
ADDRESS_SPACE = 1 << 47
"""Bytes that a process can address on x86-64; on arm64 at least as many."""


class RowsInMemory(Rows):
    """The rows of a tensor [N, ...], or of split weights: the upper halves in `array`, the lower ones in `low`."""

    def __init__(self, array: Tensor, low: Tensor | None = None) -> None:
        self.array, self.low = array, low
        self.shape, self.dtype = array.shape, array.dtype if low is None else torch.float32
        self.piece_rows = max(1, PIECE_BYTES // max(1, 4 * array[:1].numel()))

    def read(self, rows: RowIds, /) -> Tensor:
        if self.low is not None:
            return widen(self.array[rows], self.low[rows])
        if isinstance(rows, slice) or self.array.device.type != "cpu":
            return self.array[rows]
        # On pages of their own: malloc would keep them, cut up by what comes after, and the next piece take others.
        out = ops.allocate(len(rows), *self.array.shape[1:], dtype=self.array.dtype)
        return torch.index_select(self.array, 0, rows, out=out)

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        if values.dtype == self.array.dtype:
            self.array[rows] = values
        else:
            write_rows(self.array, self.low, rows, values.float())

    def whole(self) -> Tensor:
        return self.array if self.low is None else super().whole()


class Dram(Placement):
    """Every row of every table in memory. weights: tables that exist already, by name, float32 [N, D]; if None, new
    ones, with their initial rows. Raises ValueError if new tables are larger than the memory there is."""

    def __init__(
        self, tables: Sequence[TableConfig], *, seed: int = 0, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.tables, self.seed = tuple(tables), seed
        if weights is not None:
            self.weights, self.low = dict(weights), {}
        else:
            _check_memory(self.tables)
            self.weights, self.low = allocate_weights(self.tables)
            for table in self.tables:
                fill_initial_rows(self._stored(table.name), table, seed)
        self._prepare()

    def _prepare(self) -> None:
        self.kernels = ops.KernelSet(Layout.of(self.tables))
        self._attached: weakref.WeakSet[Attached] = weakref.WeakSet()
        self.arrays = ops.Arrays(list(self.weights.values()), [self.low.get(name) for name in self.weights])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the tables alone: a copy makes its own native handles, and its optimizers are yet to come."""
        return {name: getattr(self, name) for name in ("tables", "seed", "weights", "low")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def attach(self, states: dict[str, Sequence[TableState]]) -> Attached:
        # Several optimizers may be attached, each with states of its own.
        for table in self.tables:
            stored = self._stored(table.name)
            for state in states[table.name]:
                # Pages of zeros stay untouched: rows that never train cost no memory.
                if state.constant or (state.of_weight and stored.array.any()):
                    _fill(state, stored)
        attached = Attached(states)
        self._attached.add(attached)
        return attached

    def _stored(self, table: str) -> RowsInMemory:
        return RowsInMemory(self.weights[table], self.low.get(table))

    def rows(self, table: str, state: TableState | None = None) -> Rows:
        return self._stored(table) if state is None else RowsInMemory(state.array)

    # ---- below a device

    piece_bytes: int | None = None

    def parts(self) -> list[list[Tensor]]:
        found = []
        for name, weight in self.weights.items():
            low = [self.low[name]] if name in self.low else []
            found.append([weight, *low, *(s.array for own in self._attached for s in own.states[name])])
        return found

    def hold(self, rows: Sequence[Tensor], *, keep: bool) -> Held:
        return Held(NO_LEASE, rows, ready=True)

    def check_stores(self) -> None:
        """Does nothing: there is no store that could fail."""


def allocate_weights(
    tables: Sequence[TableConfig], *, sparse: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns zeros for the weights of each table, and for the lower halves of bfloat16 tables."""

    def zeros(table: TableConfig, dtype: torch.dtype) -> Tensor:
        return ops.allocate(table.num_embeddings, table.embedding_dim, dtype=dtype, sparse=sparse)

    low = {t.name: zeros(t, torch.int16) for t in tables if t.dtype == "bfloat16"}
    return {t.name: zeros(t, getattr(torch, t.dtype)) for t in tables}, low


def _fill(state: TableState, stored: RowsInMemory) -> None:
    for rows in stored.pieces():
        state.fill(rows, stored.read(rows).float())


def fill_initial_rows(stored: RowsInMemory, table: TableConfig, seed: int) -> None:
    """Gives the rows of a table, zeros as allocated, their initial values."""
    init, key = table.init, row_key(seed, table.name)
    bound = init.bound_for(table.num_embeddings)
    if not bound:
        return  # zero already, and no page touched
    for rows in stored.pieces():
        plain = stored.array.dtype == torch.float32
        values = stored.array[rows] if plain else torch.empty(stored.array[rows].shape)
        ops.fill_uniform(
            values,
            key=key,
            bound=bound,
            zero_rows=init.zero_rows,
            first_row=rows.start,
            births=init.births,
            column=init.column,
        )
        if not plain:
            stored.write(rows, values)


def _check_memory(tables: Sequence[TableConfig]) -> None:
    """Raises ValueError if tables do not fit in the memory there is; those that start at zero need none at first."""
    filled = sum(table.num_bytes for table in tables if table.init.bound_for(table.num_embeddings))
    every = sum(table.num_bytes for table in tables)
    available = available_memory_bytes()
    if filled <= available and every < ADDRESS_SPACE:
        return
    largest = max(tables, key=lambda table: table.num_bytes)
    raise ValueError(
        f"the tables are {size(every)}, and {size(available)} of memory are available; the largest, {largest.name!r}, "
        f"has {largest.num_embeddings:,} rows of {largest.embedding_dim} {largest.dtype}: keep part of the rows on "
        "disk (memory=hotrow.Memory(dram=..., ssd=...)), or give the tables fewer rows or columns"
    )

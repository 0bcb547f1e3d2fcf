"""Rows that every rank holds and updates alone for some steps, until the ranks add up what each has changed.

    before    a row as all ranks had it           kept when a rank first changes it
    change    the rank's row - before             told to all ranks, weights and optimizer states alike
    merge     row = before + the changes of all   in the order of the ranks, so that all get the same bits

It is not exact: within these steps a rank does not see what the others change. A row that one rank alone has changed
keeps that change, up to rounding. Changes always travel in fp32. Only states that are sums over steps, such as
Adagrad's, may be merged like this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.types import ComingSums, FlatSums, Pieces, RowSums
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.messages import Keys
from hotrow.parallel.shards import Numbers, Shard
from hotrow.placement.base import Attached, Placement, Rows
from hotrow.tables import TableConfig

PURPOSE = "merged"
"""What `ExchangeCounts.sent_bytes` counts the bytes of a merge under."""


class LocalSteps:
    """What this rank has changed since the last merge in the first rows of `tables`, which lie in `below`."""

    def __init__(
        self, comm: Communicator, tables: Sequence[TableConfig], shards: Sequence[Shard], below: Placement
    ) -> None:
        self._comm, self._tables, self._below = comm, tables, below
        self.num_steps = 0
        """Steps since the last merge."""
        self._arrays: list[list[Rows]] = []
        """By table, its weights and its states."""
        self._is_kept = [np.zeros(shard.prefix, np.bool_) for shard in shards]
        self._kept: list[list[tuple[Numbers, Tensor]]] = [[] for _ in tables]
        """By table, rows that changed, and what they were before: float32 [n, width]."""

    def keep(self, attached: Attached, rows: Sequence[Numbers]) -> None:
        """Counts a step, and keeps its rows, by table, as they are before it. attached: has their states."""
        if not self.num_steps:
            self._arrays = [
                [self._below.rows(name, state) for state in (None, *states)] for name, states in attached.states.items()
            ]
        self.num_steps += 1
        for t, (own, is_kept) in enumerate(zip(rows, self._is_kept, strict=True)):
            new = np.unique(own[~is_kept[own]])
            if len(new):
                is_kept[new] = True
                self._kept[t].append((new, self._read(t, new)))

    def _read(self, t: int, rows: Numbers) -> Tensor:
        """Returns weights and states of rows of table number t, side by side: float32 [n, width]."""
        out = torch.empty(len(rows), sum(self._widths(t)))
        for array, columns in zip(self._arrays[t], torch.split(out, self._widths(t), 1), strict=True):
            for ids, at in _pieces(array, rows):
                columns[at] = array.read(ids).float().view(len(ids), -1)
        return out

    def _widths(self, t: int) -> list[int]:
        return [array.shape[1:].numel() for array in self._arrays[t]]

    def merge(self) -> None:
        """Gives all ranks the same rows. Collective: every rank has taken as many steps."""
        if not self.num_steps:
            return
        before = [self._before(t) for t in range(len(self._tables))]
        changes = [RowSums(torch.from_numpy(rows), self._read(t, rows) - own) for t, (rows, own) in enumerate(before)]
        keys = Keys([table.num_embeddings for table in self._tables], [own.sums.shape[1] for own in changes])
        ((words, heads),) = keys.pack_sums([FlatSums.of(changes)])
        told = self._comm.gather(words, purpose=PURPOSE, num_heads=heads)
        come = [_tables(each, keys.unpack_sums([ComingSums(each, 1)], [(0, 0)]), keys.dims) for each in told]
        for t, (rows, own) in enumerate(before):
            self._add(t, rows, own, [each[t] for each in come])
            self._is_kept[t][rows] = False
            self._kept[t].clear()
        self.num_steps = 0

    def _before(self, t: int) -> tuple[Numbers, Tensor]:
        """Returns the rows of table number t that changed here, rising, and what they were."""
        rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in self._kept[t])])
        own = torch.cat([torch.empty(0, sum(self._widths(t))), *(own for _, own in self._kept[t])])
        order = np.argsort(rows)
        return rows[order], own[torch.from_numpy(order)]

    def _add(self, t: int, kept: Numbers, before: Tensor, changes: Sequence[RowSums]) -> None:
        """Makes the rows that any rank changed what they were, plus the changes of all ranks."""
        rows = np.unique(np.concatenate([own.rows.numpy() for own in changes]))
        values = self._read(t, rows)
        values[torch.from_numpy(np.searchsorted(rows, kept))] = before
        total = torch.zeros_like(values)
        for own in changes:
            total[torch.from_numpy(np.searchsorted(rows, own.rows.numpy()))] += own.sums
        values += total
        for array, columns in zip(self._arrays[t], torch.split(values, self._widths(t), 1), strict=True):
            for ids, at in _pieces(array, rows):
                array.write(ids, columns[at].reshape(len(ids), *array.shape[1:]).to(array.dtype))


def _tables(words: Tensor, found: Pieces, dims: Numbers) -> list[RowSums]:
    sums = words[int(found.starts[0, 0]) :].view(torch.float32)
    flat = FlatSums(found.counts[:, 0].tolist(), torch.from_numpy(found.rows), sums)
    return flat.tables(dims.tolist())


def _pieces(array: Rows, rows: Numbers) -> Iterator[tuple[Tensor, slice]]:
    """Yields pieces of `rows` that are read or written at once, and where in `rows` each is."""
    ids = torch.from_numpy(rows)
    for start in range(0, len(ids), array.piece_rows):
        yield ids[start : start + array.piece_rows], slice(start, start + array.piece_rows)

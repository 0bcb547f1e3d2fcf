"""Rows of shared tables by their ids, and which of them changed: what `state_dict` and checkpoints ask of Sharded.

Reading rows is collective and gives every rank all of them. Writing, `own` and `held` ask nobody: a checkpoint is
written and read by ranks that each take care of their own rows (run/checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.parallel.communicator import Communicator
from hotrow.parallel.shards import Numbers, Shard
from hotrow.placement.base import Changes, InitialRows, RowIds, Rows, Saved, TableState
from hotrow.tables import TableConfig

PIECE_BYTES = 16 << 20
"""Rows are read by their numbers in pieces of about this size: all ranks must choose the same."""


class ShardedRows(Rows):
    """One array of a table over the ranks of `comm`. below: the rows of this rank's shard."""

    def __init__(self, comm: Communicator, shard: Shard, table: TableConfig, below: Rows) -> None:
        self._comm, self._shard, self._below = comm, shard, below
        dim = below.shape[1:] and (table.embedding_dim,)
        self.shape, self.dtype = torch.Size((table.num_embeddings, *dim)), below.dtype
        self.columns = self._columns(comm.rank)
        self.piece_rows = _piece_rows(self.shape[1:].numel())

    def read(self, rows: RowIds, /) -> Tensor:
        """Returns the rows; collective. Each row comes from its home, or its columns from their owners."""
        ids, comm = _ids(rows), self._comm
        homes = self._shard.homes(ids, comm.size)
        held = ids[self._saves(homes, comm.rank)]
        come = comm.gather(lambda: self._read_held(held).contiguous().view(-1).view(torch.uint8), purpose="tables")
        out = torch.empty(len(ids), *self.shape[1:], dtype=self.dtype)
        for rank, own in enumerate(come):
            at, part = torch.from_numpy(self._saves(homes, rank).nonzero()[0]), out[..., self._columns(rank)]
            part[at] = own.view(self.dtype).view(len(at), *part.shape[1:])
        return out

    def _columns(self, rank: int) -> slice:
        return self._shard.columns(self.shape[1], rank) if self._shard.is_cut else slice(None)

    def _saves(self, homes: Numbers, rank: int) -> NDArray[np.bool_]:
        """Returns of which rows a rank saves its columns: those with their home there, or all if it shares columns."""
        if self._shard.is_cut:
            return np.full(homes.shape, rank in self._shard.owners)
        saves: NDArray[np.bool_] = homes == rank
        return saves

    def _read_held(self, ids: Numbers) -> Tensor:
        pieces = [self._below.read(local) for local, _ in self._pieces(ids)]
        return torch.cat(pieces) if pieces else torch.empty(0, *self._below.shape[1:], dtype=self.dtype)

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        """Makes these rows `values`; those that this rank does not hold are left out. Not collective."""
        ids, held = _ids(rows), self.held(rows)
        for local, at in self._pieces(ids[held.numpy()]):
            self._below.write(local, values[held[at]][..., self.columns].contiguous())

    def held(self, rows: RowIds, /) -> Tensor:
        return torch.from_numpy(self._shard.held(_ids(rows), self._comm.rank, self._comm.size).nonzero()[0])

    def own(self, rows: RowIds, /) -> tuple[RowIds, Tensor]:
        """See Rows. Each row is saved by its home."""
        ids = _ids(rows)
        ids = ids[self._saves(self._shard.homes(ids, self._comm.size), self._comm.rank)]
        return torch.from_numpy(ids), self._read_held(ids)

    def _pieces(self, ids: Numbers) -> Iterator[tuple[Tensor, slice]]:
        """Yields the numbers of rows in this rank's shard, as many as to read at once, and which of `ids` they are."""
        local, step = torch.from_numpy(self._shard.local(ids, self._comm.size)), self._below.piece_rows
        for start in range(0, len(local), step):
            yield local[start : start + step], slice(start, start + step)


class ShardedChanges:
    """What this rank knows of the rows of shared tables that changed: `Changes` by rows of whole tables. below: the
    changes by rows of this rank's shards; if None, the rows lie in DRAM, where every row counts as changed."""

    def __init__(
        self,
        comm: Communicator,
        tables: Sequence[TableConfig],
        shards: Sequence[Shard],
        below: Changes | None,
        *,
        seed: int,
    ) -> None:
        self.saved: Saved | None = None
        self.states: Mapping[str, Sequence[TableState]] = {}
        """By table, the states of the optimizer, if there is one."""
        self._comm, self._below, self._seed = comm, below, seed
        self._tables = {table.name: table for table in tables}
        self._shards = dict(zip(self._tables, shards, strict=True))

    def initial(self, table: str) -> InitialRows:
        config = self._tables[table]
        return InitialRows.of(config, self._seed, [s.of_untouched(config) for s in self.states.get(table, ())])

    def arrays_by_table(self) -> dict[str, list[str]]:
        return {name: ["weight", *(state.name for state in self.states.get(name, ()))] for name in self._tables}

    def num_changed(self, table: str, *, ever: bool) -> int:
        held = self._num_local(table) if self._below is None else self._below.num_changed(table, ever=ever)
        return held - self._num_copies(table, ever=ever)

    def _num_copies(self, table: str, *, ever: bool) -> int:
        """Returns how many of the changed rows here have their home on another rank."""
        shard, found = self._shards[table], 0
        for rows in self._held(table, ever=ever) if shard.prefix else ():
            replicated = rows[rows < shard.prefix]
            found += int((shard.homes(replicated, self._comm.size) != self._comm.rank).sum())
            if len(replicated) < len(rows):
                break
        return found

    def writer(self, table: str) -> int | None:
        shard = self._shards[table]
        return shard.owners[0] if shard.is_cut else None

    def changed_rows(self, table: str, *, ever: bool) -> Iterator[Tensor]:
        """See Changes. Collective for a table that has a `writer`."""
        comm, shard = self._comm, self._shards[table]
        if shard.is_cut:
            yield from self._of_any_rank(self._held(table, ever=ever))
            return
        for rows in self._held(table, ever=ever):
            if (own := shard.homes(rows, comm.size) == comm.rank).any():
                yield torch.from_numpy(rows[own])

    def _of_any_rank(self, pieces: Iterator[Numbers]) -> Iterator[Tensor]:
        """Yields the rising rows that any rank has in its `pieces`. Owners of columns know different rows as changed:
        loading writes no row whose own columns stay as they were."""
        left = np.empty(0, np.int64)

        def offered() -> Tensor:
            nonlocal left
            left = left if len(left) else next(pieces, left)
            return torch.from_numpy(left.view(np.uint8))

        while True:
            come = [own.numpy().view(np.int64) for own in self._comm.gather(offered, purpose="changed")]
            if not any(map(len, come)):
                return
            last = min(own[-1] for own in come if len(own))
            left = left[left > last]
            yield torch.from_numpy(np.unique(np.concatenate([own[own <= last] for own in come])))

    def touched_rows(self, table: str) -> Iterator[Tensor]:
        return map(torch.from_numpy, self._held(table, ever=True))

    def _held(self, table: str, *, ever: bool) -> Iterator[Numbers]:
        """Yields the changed rows that this rank holds, copies too."""
        comm, shard = self._comm, self._shards[table]
        pieces = self._all_local(table) if self._below is None else self._below.changed_rows(table, ever=ever)
        return (shard.rows(local.numpy(), comm.rank, comm.size) for local in pieces)

    def _all_local(self, table: str) -> Iterator[Tensor]:
        num_rows, step = self._num_local(table), _piece_rows(self._tables[table].embedding_dim)
        return (torch.arange(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

    def _num_local(self, table: str) -> int:
        config = self._tables[table]
        return self._shards[table].num_local(config.num_embeddings, self._comm.rank, self._comm.size)

    def clear_changed(self) -> None:
        if self._below is not None:
            self._below.clear_changed()


def _piece_rows(dim: int) -> int:
    return max(1, PIECE_BYTES // (4 * max(1, dim)))


def _ids(rows: RowIds) -> Numbers:
    return rows.numpy() if isinstance(rows, Tensor) else np.arange(rows.start, rows.stop)

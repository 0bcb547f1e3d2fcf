"""Where the rows of a table lie among ranks, as numbers alone: nothing here holds or sends a row.

    rows    [0 .. prefix)   replicated: on every rank
            [prefix .. N)   "row": row prefix + k on rank k % R;   "table": all on one rank, the owner
    columns                 all, where the row is; of a table with several owners, a block on each of them

A rank numbers the rows it holds by rising row: those are the rows of its shard. Each row has one home, the rank that
adds up the row's gradient and speaks for the row: of a replicated row, row % R; of any other, the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.base.records import Count
from hotrow.kernels.types import Shares
from hotrow.tables import WHOLE, Births

Numbers = NDArray[np.int64]
Kind = Literal["row", "table"]
Exchange = Literal["rows", "pooled"]
QUAD = 4
"""A block of columns begins at a multiple of it: initial values are drawn four at once."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """How the rows of one table are shared; the same on all ranks."""

    prefix: Count = 0
    """Rows below it are on every rank; all rows of the table if it has no more."""
    kind: Kind = "row"
    """How the other rows are divided: "row" deals them out one by one, "table" gives all to one rank."""
    owner: Count | tuple[Count, ...] = 0
    """The rank that gets them all; 0 for kind "row". Several ranks, of a table with exchange "pooled", share its
    columns: each has a block of them (`columns`), in all rows, and pools that."""
    exchange: Exchange = "rows"
    """What travels: rows to the ranks that look them up, and sums of their gradients back; or vectors that the owner
    has pooled, and their gradients. "pooled" is for tables of which one rank holds all rows."""

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that have columns, in the order of their blocks; of kind "row" it means nothing."""
        return self.owner if isinstance(self.owner, tuple) else (self.owner,)

    @property
    def is_cut(self) -> bool:
        """Whether several ranks share the columns."""
        return len(self.owners) > 1

    def check(self, table: str, num_rows: int, dim: int, num_ranks: int) -> None:
        """Raises ValueError, naming `table`, if this cannot be its shard on this many ranks."""
        if self.kind not in ("row", "table"):
            raise ValueError(f"table {table!r}: kind is {self.kind!r}; choose 'row' or 'table'")
        if not 0 <= self.prefix <= num_rows:
            raise ValueError(
                f"table {table!r}: {self.prefix:,} rows are to be replicated, and it has {num_rows:,}: choose 0 to that"
            )
        most, each = most_owners(dim, num_ranks), set(self.owners)
        if not each <= set(range(num_ranks)) or not each or (self.kind == "row" and self.owner != 0):
            allowed = "0 for kind 'row'" if self.kind == "row" else f"0 to {num_ranks - 1}"
            raise ValueError(f"table {table!r}: owner is {self.owner}; choose {allowed}")
        if len(each) < len(self.owners) or len(each) > most or (self.is_cut and self.exchange != "pooled"):
            raise ValueError(
                f"table {table!r}: owner is {self.owner} and exchange {self.exchange!r}; of a table of {dim} columns "
                f"up to {most} different ranks can have a block of columns each, with exchange 'pooled'"
            )
        if self.exchange not in ("rows", "pooled"):
            raise ValueError(f"table {table!r}: exchange is {self.exchange!r}; choose 'rows' or 'pooled'")
        if self.exchange == "pooled" and (self.kind != "table" or self.prefix):
            raise ValueError(
                f"table {table!r}: exchange is 'pooled', so one rank must hold all rows, but kind is {self.kind!r} and "
                f"prefix {self.prefix:,}: choose kind 'table' and prefix 0, or exchange 'rows'"
            )

    def width(self, dim: int, rank: int) -> float:
        """Returns the share of a table's columns that a rank has in the rows that it holds."""
        own = self.columns(dim, rank)
        return float(own.stop - own.start) / dim

    def homes(self, rows: Numbers, num_ranks: int) -> Numbers:
        return Homes([self], num_ranks).homes(np.zeros_like(rows), rows)

    def held(self, rows: Numbers, rank: int, num_ranks: int) -> NDArray[np.bool_]:
        if self.is_cut:
            return np.full(rows.shape, rank in self.owners)
        held: NDArray[np.bool_] = (rows < self.prefix) | (self.homes(rows, num_ranks) == rank)
        return held

    def columns(self, dim: int, rank: int) -> slice:
        """Returns which columns of a table of `dim` a rank has in the rows that it holds."""
        if not self.is_cut or rank not in self.owners:
            return slice(0, dim)
        k, ends = self.owners.index(rank), block_ends(dim, len(self.owners))
        return slice(ends[k - 1] if k else 0, ends[k])

    def local(self, rows: Numbers, num_ranks: int) -> Numbers:
        """Returns the number of each row in the shard of a rank that holds it."""
        return Homes([self], num_ranks).local(np.zeros_like(rows), rows)

    def num_local(self, num_rows: int, rank: int, num_ranks: int) -> int:
        rest = num_rows - self.prefix
        if self.kind == "table":
            return self.prefix + rest * (rank in self.owners)
        return self.prefix + (rest - rank + num_ranks - 1) // num_ranks

    def rows(self, local: Numbers, rank: int, num_ranks: int) -> Numbers:
        """Returns which rows of the table the rows of a shard are, by their numbers there. `local` is the reverse."""
        if self.kind == "table":
            return local
        return np.where(local < self.prefix, local, self.prefix + rank + (local - self.prefix) * num_ranks)

    def births(self, rank: int, num_ranks: int) -> Births:
        """Returns which rows of the table the rows of a rank's shard have the initial values of."""
        if self.kind == "table":
            return WHOLE
        return Births(prefix=self.prefix, first=self.prefix + rank, step=num_ranks)


def block_ends(dim: int, count: int) -> list[int]:
    """Returns where `count` blocks of the columns of a table of `dim` end, all about as wide."""
    quads = -(-dim // QUAD)
    return [min(dim, QUAD * (quads * (k + 1) // count)) for k in range(count)]


def most_owners(dim: int, num_ranks: int) -> int:
    """Returns how many of `num_ranks` ranks can share the columns of a table of `dim`."""
    return min(num_ranks, -(-dim // QUAD))


def pooled_tables(shards: Mapping[str, Shard]) -> list[str]:
    return [name for name, shard in shards.items() if shard.exchange == "pooled"]


class Homes:
    """Where rows of several tables lie, for rows of any of them at once."""

    def __init__(self, shards: Sequence[Shard], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._prefix = np.array([shard.prefix for shard in shards], np.int64)
        self._owner = np.array([shard.owners[0] if shard.kind == "table" else -1 for shard in shards], np.int64)

    def of_rank(self, rank: int) -> Shares:
        """Returns the same for the kernels of one rank."""
        return Shares(self._prefix.tolist(), self._owner.tolist(), rank, self.num_ranks)

    def homes(self, tables: Numbers, rows: Numbers) -> Numbers:
        prefix, owner = self._prefix[tables], self._owner[tables]
        rest = np.where(owner < 0, (rows - prefix) % self.num_ranks, owner)
        return np.where(rows < prefix, rows % self.num_ranks, rest)

    def local(self, tables: Numbers, rows: Numbers) -> Numbers:
        prefix, owner = self._prefix[tables], self._owner[tables]
        return np.where((rows < prefix) | (owner >= 0), rows, prefix + (rows - prefix) // self.num_ranks)

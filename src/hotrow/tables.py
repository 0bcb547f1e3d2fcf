"""Embedding tables as plain data, without torch and I/O.

`TableConfig` describes one embedding table; who stores its rows, and where, is decided elsewhere. Checkpoints store
these records.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from hotrow.base.records import Amount, Count

Pooling = Literal["sum", "mean"]
POOLINGS: tuple[Pooling, ...] = ("sum", "mean")
MAX_POOLING = (
    "there is no max pooling: take the rows of every id with EmbeddingCollection.sequence(), and their maximum with "
    "torch.segment_reduce(values, 'max', offsets=offsets), which is -inf for an empty bag"
)
"""The advice in place of max pooling."""
Dtype = Literal["float32", "float16", "bfloat16"]
BYTES_PER_WEIGHT: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 4}
"""Memory per weight by dtype; lookups touch half of a bfloat16's."""
Step = Annotated[int, Field(ge=1, le=1 << 15)]
"""Rows from one to the next, in records: with any number of rows, no row number exceeds 63 bits."""


@dataclass(frozen=True, kw_only=True)
class Births:
    """The initial rows of a part of a table: its row i starts as row `of(i)` of the whole table, here as row i."""

    prefix: Count = 0
    """Rows of the part that start as the same rows of the whole table; those behind them are `step` rows apart."""
    first: Count = 0
    """The row of the whole table that row `prefix` of the part starts as."""
    step: Step = 1

    def of(self, row: int) -> int:
        """Returns the row of the whole table that `row` of the part starts as."""
        return row if row < self.prefix else self.first + (row - self.prefix) * self.step

    def runs(self, start: int, stop: int) -> tuple[range, range]:
        """Returns the rows of the whole table that rows [start, stop) of the part start as: in order, two ranges."""
        middle = min(max(start, self.prefix), stop)
        behind = self.first + (middle - self.prefix) * self.step
        return range(start, middle), range(behind, behind + (stop - middle) * self.step, self.step)


WHOLE = Births()
"""Every row starts as itself."""


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Initial rows: U(-bound, bound), a function of (seed, table name, row, column) alone; see docs/numerics.md.

    Order of creation, thread count and memory tier change no value, so a row need not exist before it is touched.
    """

    bound: Amount | None = None
    """Half the width of the interval; None means sqrt(1 / num_embeddings), as in the reference DLRM. 0 means zeros."""
    zero_rows: Count = 0
    """Leading rows that start at zero: 1 for tables of a packed dataset, whose row 0 stands for rare and unseen ids."""
    births: Births = WHOLE
    """Which rows of a whole table these are, if this table is a part of it: see `TableConfig.part`."""
    column: Count = 0
    """The column of the whole table that is the first one here: a multiple of 4, because four are drawn at once."""

    def bound_for(self, num_embeddings: int) -> float:
        """Returns the bound for a table of `num_embeddings` rows."""
        return math.sqrt(1.0 / num_embeddings) if self.bound is None else self.bound


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table, in torchrec's terms.

    Raises ValueError naming the field, the value and the cure if a field is out of range.
    """

    name: str
    num_embeddings: int
    """Number N of rows."""
    embedding_dim: int
    """Number D of columns."""
    feature_names: tuple[str, ...]
    """Features that look up rows here; several features may share one table."""
    pooling: Pooling = "sum"
    """How the rows of one bag become one vector."""
    dtype: Dtype = "float32"
    """How weights are stored; lookups and updates always compute in float32. "float16" takes half the memory and rounds
    a row at every update. "bfloat16" is float32 split in halves: lookups read only the upper half, which is a bfloat16;
    updates join both halves and lose nothing (Split-SGD-BF16, for any optimizer)."""
    init: Uniform = Uniform()
    lr_scale: float = 1.0
    """Multiplies the optimizer's learning rate for this table."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"table name is {self.name!r}; it must be text")
        if isinstance(self.feature_names, str):
            raise ValueError(
                f"table {self.name!r}: feature_names is the text {self.feature_names!r}; pass a tuple of feature "
                f"names, such as ({self.feature_names!r},)"
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        if not self.feature_names or not all(isinstance(name, str) for name in self.feature_names):
            raise ValueError(
                f"table {self.name!r}: feature_names is {self.feature_names}; name at least one feature, as text"
            )
        for field in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, field, self._checked_count(field))
        if self.pooling not in POOLINGS:
            cure = f"; {MAX_POOLING}" if str(self.pooling) == "max" else ""
            raise ValueError(
                f"table {self.name!r}: pooling is {self.pooling!r}; choose one of {', '.join(POOLINGS)}{cure}"
            )
        if not 0 <= self.lr_scale < math.inf:
            raise ValueError(f"table {self.name!r}: lr_scale is {self.lr_scale}; it must be 0 or a positive number")
        if self.dtype not in BYTES_PER_WEIGHT:
            raise ValueError(
                f"table {self.name!r}: dtype is {self.dtype!r}; choose one of {', '.join(BYTES_PER_WEIGHT)}"
            )

    def _checked_count(self, field: str) -> int:
        value = getattr(self, field)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"table {self.name!r}: {field} is {value!r}; it must be an integer, at least 1")
        if not 1 <= (count := operator.index(value)) < 1 << 63:
            raise ValueError(f"table {self.name!r}: {field} is {count:,}; it must be at least 1 and below 2^63")
        return count

    def part(self, num_embeddings: int, births: Births, columns: slice | None = None) -> TableConfig:
        """Returns a part of this table, of the same name and features, whose rows start as `births` says; columns:
        which ones it has, all of them if None."""
        assert self.init.births == WHOLE, "a part has no parts"
        columns = columns or slice(0, self.embedding_dim)
        bound = self.init.bound_for(self.num_embeddings)
        init = replace(self.init, bound=bound, births=births, column=columns.start)
        return replace(self, num_embeddings=num_embeddings, embedding_dim=columns.stop - columns.start, init=init)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights without optimizer state; for bfloat16, both halves."""
        return self.num_embeddings * self.embedding_dim * BYTES_PER_WEIGHT[self.dtype]


def check_tables(tables: Iterable[TableConfig]) -> tuple[TableConfig, ...]:
    """Returns `tables` as a tuple. Raises ValueError if a table or feature name is used twice, or there is no table."""
    tables = tuple(tables)
    if not tables:
        raise ValueError("no tables given; an EmbeddingCollection needs at least one TableConfig")
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f for t in tables for f in t.feature_names])):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise ValueError(f"{kind} name {name!r} is used twice; {kind} names must be unique")
            seen.add(name)
    return tables

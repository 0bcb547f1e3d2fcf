"""Which rows are hot: for each table a prefix of its rows, and a list of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALL_TABLE_BYTES = 1 << 20
"""A table of fewer bytes is hot whole, as in FAE: it is looked up as often as any other and costs next to nothing."""


def is_small(num_rows: int, record_bytes: int, small_table_bytes: int = SMALL_TABLE_BYTES) -> bool:
    """Whether a table is hot whole."""
    return num_rows * record_bytes < small_table_bytes


def check_budget(
    tables: Iterable[tuple[int, int]], budget_bytes: int, small_table_bytes: int = SMALL_TABLE_BYTES
) -> None:
    """Raises ValueError where small tables, and a row of every other, do not fit; tables: (rows, bytes of a row)."""
    least = sum(record_bytes * (n if is_small(n, record_bytes, small_table_bytes) else 1) for n, record_bytes in tables)
    if least > budget_bytes:
        raise ValueError(
            f"a hot set of {budget_bytes:,} bytes is too small: tables below {small_table_bytes:,} bytes, which are "
            f"hot whole, and a row of each other take {least:,}; raise the budget by {least - budget_bytes:,} bytes"
        )


@dataclass(frozen=True)
class HotRows:
    """Of one table: rows [0, prefix), and those of `listed`, rising, none below prefix."""

    prefix: int
    listed: NDArray[np.int64]

    @classmethod
    def of(cls, rows: NDArray[Any]) -> HotRows:
        """These rows, rising; the longest prefix among them becomes the prefix."""
        prefix = int(np.searchsorted(rows - np.arange(len(rows)), 1))
        return cls(prefix, rows[prefix:].astype(np.int64))

    @classmethod
    def first(cls, prefix: int) -> HotRows:
        """The first rows and no others."""
        return cls(prefix, np.empty(0, np.int64))

    @property
    def num_rows(self) -> int:
        """How many are hot."""
        return self.prefix + len(self.listed)

    @cached_property
    def _is_listed(self) -> NDArray[np.bool_]:
        found = np.zeros(int(self.listed[-1]) + 2 if len(self.listed) else 1, np.bool_)
        found[self.listed] = True
        return found

    def contains(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Of each id, whether it is hot [n]."""
        hot: NDArray[np.bool_] = ids < self.prefix
        if len(self.listed):
            hot |= self._is_listed[np.minimum(ids, len(self._is_listed) - 1)]
        return hot


@dataclass(frozen=True, kw_only=True)
class HotSet:
    """The hot rows of all tables, and what they take."""

    how: str
    """exact | sampled | covering"""
    rows: Mapping[str, HotRows]
    """By table."""
    record_bytes: Mapping[str, int]
    """Of a row of each table: weights and optimizer state."""

    @property
    def num_rows(self) -> int:
        """Over all tables."""
        return sum(rows.num_rows for rows in self.rows.values())

    @property
    def num_bytes(self) -> int:
        """What the hot rows take on the fast device."""
        return sum(rows.num_rows * self.record_bytes[name] for name, rows in self.rows.items())

"""Counts missing and odd cells, by column, while preparation counts the ids of training rows.

An odd cell is not of its column's kind, such as a word among numbers; it is missing, and a row without a readable time
is left out. `ColumnsSource` finds them; here they are added up, held against the share that the
schema allows, and put into words and into dataset.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.records import STRICT, Count
from hotrow.data.chunk import Chunk, most_odd
from hotrow.data.coded import CodedKeys, column_of


@record(frozen=True, config=STRICT)
class Odd:
    """The odd cells of one column."""

    num_cells: Count
    first: str
    """Where the first one is, and what is wrong with it."""
    is_row: bool
    """Whether their rows were left out."""


@record(frozen=True, config=STRICT)
class CellCounts:
    """Counts of missing and odd cells, by column."""

    num_rows: Count = 0
    missing: dict[str, Count] = field(default_factory=dict)
    """Missing cells, odd ones among them; in a column of lists, cells that hold a missing id."""
    odd: dict[str, Odd] = field(default_factory=dict)

    def with_chunk(self, chunk: Chunk, dense_names: Sequence[str]) -> CellCounts:
        """Returns these counts and those of the rows in `chunk`."""
        lost = np.isnan(chunk.dense).sum(axis=0)
        missing = {name: int(n) for name, n in zip(dense_names, lost, strict=True)}
        missing |= {name: _num_missing(chunk, name) for name in chunk.keys}
        odd = {
            cells.column: Odd(len(cells.rows), str(cells.error(int(cells.numbers[0]))), cells.is_row)
            for cells in chunk.odd
            if len(cells.rows) and cells.column not in self.odd
        }
        odd |= {cells.column: Odd(len(cells.rows), "", cells.is_row) for cells in chunk.odd if cells.column in self.odd}
        return self.merged(CellCounts(chunk.num_rows, {n: k for n, k in missing.items() if k}, odd))

    def merged(self, other: CellCounts) -> CellCounts:
        """Returns both counts, with the first odd cells of this one."""
        missing, odd = dict(self.missing), dict(self.odd)
        for name, count in other.missing.items():
            missing[name] = missing.get(name, 0) + count
        for name, more in other.odd.items():
            own = odd.get(name)
            odd[name] = more if own is None else Odd(own.num_cells + more.num_cells, own.first, own.is_row)
        return CellCounts(self.num_rows + other.num_rows, missing, odd)

    @property
    def rows_left_out(self) -> int:
        return sum(odd.num_cells for odd in self.odd.values() if odd.is_row)

    def check(self, share: float) -> None:
        """Raises ValueError if a column has more odd cells than `share` of the rows allows."""
        for name, odd in self.odd.items():
            most = most_odd(self.num_rows + self.rows_left_out, share)
            if odd.num_cells > most:
                raise ValueError(
                    f"{odd.first}; column {name!r} has {odd.num_cells:,} such values in {self.num_rows:,} rows, and "
                    f"{most:,} may be missing; name those that mean a missing value (--null-values, csv.null_values in "
                    f"a schema), raise odd_share in a schema, or leave their rows out (--skip-bad-rows "
                    f"{odd.num_cells}, in Python skip_bad_rows={odd.num_cells})"
                )

    def lines(self) -> list[str]:
        """Returns what was found, a line for each kind, for the user."""
        found = []
        if self.missing:
            shares = (
                f"{name} {count:,} ({count / max(self.num_rows, 1):.2%})"
                for name, count in sorted(self.missing.items())
            )
            found.append(f"missing values: {', '.join(shares)}")
        for name, odd in sorted(self.odd.items()):
            done = "their rows are left out" if odd.is_row else "they are missing"
            many = "value is" if odd.num_cells == 1 else "values are"
            found.append(f"{odd.num_cells:,} {many} not of the kind of column {name!r}; {done}: {odd.first}")
        return found

    def summary(self) -> dict[str, JsonValue]:
        """Returns the counts for dataset.json, without empty ones."""
        odd: dict[str, JsonValue] = {
            name: {"cells": odd.num_cells, "first": odd.first} for name, odd in sorted(self.odd.items())
        }
        missing: dict[str, JsonValue] = dict(sorted(self.missing.items()))
        both: dict[str, JsonValue] = {"missing": missing, "odd": odd}
        return {name: value for name, value in both.items() if value}


def _num_missing(chunk: Chunk, name: str) -> int:
    column = column_of(chunk.keys, name)
    if isinstance(column, CodedKeys):
        return int((column.codes == column.entries.num_keys - 1).sum())
    if column.valid is None:
        return 0
    missing = np.flatnonzero(~column.valid)
    if column.row_splits is None:
        return len(missing)
    return len(np.unique(np.searchsorted(column.row_splits, missing, side="right")))

"""Columns of a second file, joined to rows by a key: what is known of an item or a user beside the log.

    table = LookupTable.read(spec, open_table(spec.file, csv), missing)       # the file's columns, in memory
    lookup = Lookup.of_table(table, feature, encoding)                        # feature: how ids of spec.column are read
    columns = lookup.of(hashes)                                               # by name, as if the rows' file had them
    lookup.write(path)                                                        # and for rows to score Lookup.load

Keys are compared by their 64-bit hashes. The stored copy is Parquet: `key` int64 or binary, and `column 0`, `column 1`,
... for each of `spec.columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from hotrow.base.door import open_file
from hotrow.base.files import atomic_write
from hotrow.base.records import nearest
from hotrow.data.chunk import Keys, RowError, keys_from_arrow, keys_to_arrow, most_odd
from hotrow.data.sources.convert import Fault, IdEncoding, key_hashes, plain, to_keys, without_missing
from hotrow.data.sources.schema import CategoricalSpec, LookupSpec
from hotrow.data.sources.tabular import TableReader, TextReader

ROWS_PER_BATCH = 1 << 16


@dataclass(frozen=True)
class LookupTable:
    """The columns of a file that a lookup needs: its key, then `spec.columns`."""

    spec: LookupSpec
    reader: TableReader
    columns: list[pa.Array]
    places: list[tuple[int, NDArray[np.int64]]]
    """The file, and the lines, of each batch of rows."""

    @classmethod
    def read(cls, spec: LookupSpec, reader: TableReader, missing: tuple[str, ...]) -> Self:
        """Reads the file. missing: texts that mean a missing value. Raises ValueError naming the file if it lacks a
        column, and RowError for a line that cannot be cut into columns."""
        wanted = [spec.key_name, *spec.columns]
        there = reader.schema.names
        for name in wanted:
            if name not in there:
                path, known = reader.files[0].path, ", ".join(there)
                raise ValueError(f"lookups: {path} has no column {name!r}{nearest(name, there)}; columns: {known}")
        reader.check_drift(wanted)
        batches, places = [], []
        for index in range(len(reader.files)):
            for rows in reader.read(index, 0, [*dict.fromkeys(wanted)], ROWS_PER_BATCH):
                for error in rows.bad:
                    raise error
                batches.append(rows.batch)
                places.append((index, rows.lines))
        if not sum(batch.num_rows for batch in batches):
            raise ValueError(f"lookups: {reader.files[0].path} has no rows; give the file that holds the keys")
        table = pa.Table.from_batches(batches)
        found = [without_missing(plain(table[name].combine_chunks()), missing) for name in wanted]
        return cls(spec, reader, found, places)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The types of the columns to join, by the names that they get."""
        return dict(zip(self.spec.names, (column.type for column in self.columns[1:]), strict=True))

    def without(self, fault: Fault, place: int, share: float) -> tuple[Self, str]:
        """Returns the table without the odd cells of column `place`, and what to tell the user of them. Raises RowError
        naming one if more than `share` of the cells are odd."""
        rows = np.flatnonzero(fault.rows)
        most = most_odd(len(fault.rows), share)
        first = int(rows[0])
        error = self.error(first, fault.describe(first)).but(name=self.spec.columns[place - 1])
        many = f"{len(rows):,} of {len(fault.rows):,} cells of the column are not of its kind"
        if len(rows) > most:
            raise error.but(reason=f"{error.reason}; {many}, and {most:,} may be missing; correct them in this file")
        columns = [*self.columns]
        columns[place] = columns[place].take(pa.array(np.arange(len(fault.rows)), mask=fault.rows))
        return replace(self, columns=columns), f"{error}; {many}; they are missing"

    def error(self, row: int, reason: str) -> RowError:
        """Returns the error of a row."""
        ends = np.cumsum([len(lines) for _, lines in self.places])
        batch = int(np.searchsorted(ends, row, side="right"))
        index, lines = self.places[batch]
        line = int(lines[row - ends[batch]])
        line = self.reader.line_of(index, line) if isinstance(self.reader, TextReader) else line
        return RowError(file=self.reader.files[index].path, line=line, name=self.spec.key_name, reason=reason)


class Lookup:
    """Joins `columns` to rows by their keys. keys: one for each value of the columns, none twice."""

    def __init__(self, spec: LookupSpec, keys: Keys, columns: Sequence[pa.Array]) -> None:
        hashes = key_hashes(keys)
        self.spec, self._keys = spec, keys
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        self._columns = dict(zip(spec.names, columns, strict=True))

    @classmethod
    def of_table(cls, table: LookupTable, feature: CategoricalSpec, encoding: IdEncoding) -> Self:
        """Returns the lookup in a file. feature, encoding: how ids of `spec.column` are read.

        Raises RowError naming the first row whose key is missing, cannot be read or stands in an earlier row too.
        """
        keys, fault = to_keys(table.columns[0], feature.model_copy(update={"column": table.spec.key_name}), encoding)
        if fault is not None:
            row = int(np.flatnonzero(fault.rows)[0])
            raise table.error(row, fault.describe(row))
        if keys.valid is not None and not keys.valid.all():
            raise table.error(int(np.flatnonzero(~keys.valid)[0]), "a key is missing; give it or remove the row")
        found = cls(table.spec, keys, table.columns[1:])
        is_again = found._hashes[1:] == found._hashes[:-1]
        if is_again.any():
            place = int(np.flatnonzero(is_again)[np.argmin(found._order[1:][is_again])])
            first = table.error(int(found._order[place]), "")
            row = int(found._order[place + 1])
            raise table.error(
                row,
                f"the key {table.columns[0][row].as_py()!r} stands in {first.file}:{first.line} too; remove one of the "
                "two rows",
            )
        return found

    def of(self, hashes: NDArray[np.uint64]) -> dict[str, pa.Array]:
        """Returns the joined columns by name, for rows whose keys have these hashes [n]; null for an unknown key."""
        if not len(self._hashes):
            return {name: pa.nulls(len(hashes), column.type) for name, column in self._columns.items()}
        places, is_there = self._found(hashes)
        rows = pa.array(self._order[places], mask=~is_there)
        return {name: column.take(rows) for name, column in self._columns.items()}

    def has_any(self, hashes: NDArray[np.uint64]) -> bool:
        """Returns whether a row, of those whose keys have these hashes [n], has a key of the file."""
        return bool(self._found(hashes)[1].any())

    def _found(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return places, self._hashes[places] == hashes

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The types of the joined columns."""
        return {name: column.type for name, column in self._columns.items()}

    def write(self, path: Path) -> None:
        """Writes the stored copy. OSError passes through."""
        columns: dict[str, Any] = {"key": keys_to_arrow(self._keys)}
        columns |= {f"column {i}": column for i, column in enumerate(self._columns.values())}
        with atomic_write(path) as file:
            pa.parquet.write_table(pa.table(columns), file)

    @classmethod
    def load(cls, spec: LookupSpec, path: Path, *, cure: str) -> Self:
        """Reads what `write` wrote. Raises ValueError naming the file if it is damaged or not of this lookup."""
        try:
            with open_file(path) as file:
                table = pa.parquet.read_table(file)
            columns = [table[f"column {i}"].combine_chunks() for i in range(len(spec.columns))]
            return cls(spec, keys_from_arrow(table["key"].combine_chunks()), columns)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(f"{path} does not hold the lookup by {spec.column!r} ({error}); {cure}") from None

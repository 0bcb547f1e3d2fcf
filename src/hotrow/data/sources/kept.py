"""Text that is read once: its rows lie in a file without a name, and any of them can be read again, column by column.

A guess looks at a text several times, and preparation reads it afterwards. Files of a text may have different columns,
and so may lines of JSON: the table has all of them, and a column that a file lacks is missing in its rows.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotrow.base.files import explain_full_disk
from hotrow.data.chunk import RowError
from hotrow.data.sources.inputs import prefetch
from hotrow.data.sources.jsonlines import JsonReader
from hotrow.data.sources.tabular import Rows, TableReader, TextReader

IN_MEMORY_BYTES = 64 << 20
"""Rows that take more than this go to disk."""
LINE, MIXED = "\0line", "\0mixed "
"""Names that no file has: of the column of lines, and, with a name behind, of columns of several types, in JSON."""


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of a file, and where they lie."""

    begin: int
    stop: int
    num_rows: int
    end: int
    bad: tuple[RowError, ...]


class KeptReader(TableReader):
    """The rows of `inner`, which are read once; the file lies in the folder for temporary files ($TMPDIR)."""

    def __init__(self, inner: TextReader | JsonReader) -> None:
        self.inner, self._files, self.files = inner, inner._files, inner.files
        self._blocks: list[list[_Block]] = [[] for _ in self.files]
        kinds = dict[str, pa.DataType]()
        cure = "set TMPDIR to a larger disk and start again"
        with (
            explain_full_disk(Path(tempfile.gettempdir()), "reading text", "Nothing was kept.", cure),
            tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file,
        ):
            for index in range(len(self.files)):
                for rows in prefetch(inner.read_all(index)):
                    self._blocks[index].append(_written(rows, file))
                    kinds |= {field.name: field.type for field in rows.batch.schema}
            self._bytes = _mapped(file)
        self.schema, self.lacking = pa.schema(list(kinds.items())), inner.lacking

    def check_drift(self, columns: Sequence[str]) -> None:
        self.inner.check_drift(columns)

    def count_rows(self) -> tuple[int, bool]:
        return sum(map(self.rows_in, range(len(self.files)))), True

    def rows_in(self, file_index: int) -> int:
        """How many rows a file has, without lines that are not rows."""
        return sum(block.num_rows for block in self._blocks[file_index])

    def line_of(self, file_index: int, record: int) -> int:
        return self.inner.line_of(file_index, record)

    def read(self, file_index: int, first: int, columns: Sequence[str], rows_per_batch: int) -> Iterator[Rows]:
        header_lines = self.inner.header_lines
        for block in self._blocks[file_index]:
            if block.end <= first:
                continue
            batch, lines, mixed = self._read(block, columns)
            faults = [error for error in block.bad if error.name is None or error.name in columns]
            good = ~np.isin(lines, [error.line for error in faults if error.name is not None])
            if not good.all():
                batch, lines = batch.filter(pa.array(good)), lines[good]
                mixed = {name: own.filter(pa.array(good)) for name, own in mixed.items()}
            keep = int(np.searchsorted(lines, first + header_lines, side="right"))
            batch, lines = batch.slice(keep), lines[keep:]
            bad = [error for error in faults if error.line > first + header_lines]
            starts = range(0, len(batch), rows_per_batch) or ([0] if bad else [])
            for start in starts:
                part = lines[start : start + rows_per_batch]
                is_last = start + rows_per_batch >= len(batch)
                end = block.end if is_last else int(part[-1]) - header_lines
                own = bad if is_last else [error for error in bad if error.line <= part[-1]]
                bad = bad[len(own) :]
                values = {
                    name: json.loads(f"[{','.join(each.slice(keep + start, len(part)).to_pylist())}]")
                    for name, each in mixed.items()
                }
                yield Rows(batch.slice(start, rows_per_batch), part, end, tuple(own), values)

    def some(self, file_index: int, first: int, num_rows: int) -> pa.Table:
        """`num_rows` rows of a file after the first ones, with all columns."""
        parts, row = list[pa.RecordBatch](), 0
        for block in self._blocks[file_index]:
            if first < row + block.num_rows and row < first + num_rows:
                batch, _, _ = self._read(block, self.schema.names)
                parts.append(batch.slice(max(first - row, 0), first + num_rows - max(first, row)))
            row += block.num_rows
        return pa.Table.from_batches(parts, self.schema)

    def _read(
        self, block: _Block, columns: Sequence[str]
    ) -> tuple[pa.RecordBatch, np.ndarray[Any, Any], dict[str, pa.Array]]:
        """Columns of a block, the lines of its rows, and those columns that are of several types as JSON."""
        stored = self._bytes.slice(block.begin, block.stop - block.begin)
        wanted = {LINE, *columns, *(MIXED + name for name in columns)}
        places = [i for i, name in enumerate(pa.ipc.open_stream(stored).schema.names) if name in wanted]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        batch = pa.ipc.open_stream(stored, options=options).read_next_batch()
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        lines = found[LINE].to_numpy()
        mixed = {name: found[MIXED + name] for name in columns if MIXED + name in found}
        nothing = pa.nulls(len(lines))
        arrays = [found[n] if n in found else nothing.cast(self.schema.field(n).type) for n in columns]
        return pa.RecordBatch.from_arrays(arrays or [nothing], names=list(columns) or [""]), lines, mixed


def _written(rows: Rows, file: Any) -> _Block:
    """Writes a block, compressed: text is three times smaller so, and a column is read alone."""
    begin, batch = file.tell(), rows.batch.append_column(LINE, pa.array(rows.lines))
    for name, values in rows.mixed.items():
        batch = batch.append_column(MIXED + name, pa.array(map(json.dumps, values)))
    with pa.ipc.new_stream(file, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_batch(batch)
    return _Block(begin, file.tell(), len(rows.batch), rows.end, rows.bad)


def _mapped(file: Any) -> pa.Buffer:
    """The bytes of a file, whose space is free when they are dropped, however the process ends."""
    file.flush()
    if not file.tell():
        return pa.py_buffer(b"")
    if not file._rolled:
        return pa.py_buffer(file._file.getvalue())
    return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

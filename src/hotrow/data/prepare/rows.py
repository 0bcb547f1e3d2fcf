"""The rows of a source, read once: parts on disk, from which every later stage reads.

    rows = ingest(opened, folder, ...)                     # continues behind the last whole part
    for chunk, numbers in rows.chunks(first=0): ...        # from any row on

    known = known.merged(ingest(opened, folder / "1", file=1, ...).known, "1")       # of files, read on many machines
    for spans in Rows(folder, schema, known).cut(100_000, by_time=False): ...        # spans: what one of them takes

A part is a file in Arrow's stream format. It holds rows as the source has read them: labels, weight, time, numbers as
float32, ids as uint32 if they fit, else as int64 or bytes; bytes that repeat are stored once for each batch. So no cell
is read twice; what depends on the text (bad rows, odd cells, the file of a row) is settled when the parts are whole.

A row keeps the number that it has in its source, by which splits and folds are drawn. If rows are wanted in the order
of time, each part is sorted by it; if the source does not come in that order, the parts are then merged. Rows of one
time keep their order.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import field, replace
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import make_folder, open_file, remove
from hotrow.base.files import disk_free_bytes, open_private, size
from hotrow.base.records import STRICT, Count, Document
from hotrow.data.chunk import (
    Chunk,
    Keys,
    NoRowsError,
    Position,
    SourceInfo,
    keys_from_arrow,
    keys_to_arrow,
    select_rows,
)
from hotrow.data.coded import CodedKeys, KeyColumns, addresses, column_of
from hotrow.data.prepare.odd import CellCounts
from hotrow.data.sources.registry import OpenedSource
from hotrow.data.sources.schema import Schema
from hotrow.data.sources.split import TimeHistogram, sample_mask

ROWS_PER_PART = 1 << 20
ROWS_PER_BATCH = 1 << 16
REPEATS = 4
"""Bytes whose values repeat this often on average are stored as a dictionary and codes."""
SAMPLES = 100
"""Times that are looked at of as many rows as are sorted together."""
COPIES = 4
"""Copies of a part's rows in memory while they are sorted."""
CURE = "start again with --overwrite, or remove the folder .prepare"
RECORD = "rows.json"
Spans: TypeAlias = list[tuple[int, int]]
"""Pairs (first row, row after the last) of spans that are taken together."""
_Name = Annotated[str, Field(pattern=r"^([0-9]{1,9}/)?[01]-[0-9]{6,9}\.arrow$")]


@record(frozen=True, config=STRICT)
class Part:
    """One file of rows."""

    file: _Name
    num_rows: Count
    num_bytes: Count
    first_number: Count = 0
    """Offset to add to the stored numbers of its rows."""


@record(frozen=True, config=STRICT)
class Ingested:
    """The content of rows.json: what was read, and how far."""

    identity: dict[str, JsonValue]
    """Everything that decides the rows; other rows are not continued."""
    parts: tuple[Part, ...]
    position: Position = field(default_factory=Position)
    """Where the source goes on."""
    num_rows: Count = 0
    """Rows of the source so far, also those that a sample leaves out."""
    rows_of_files: tuple[Count, ...] = ()
    """The same by file."""
    last_time: int | None = None
    """The latest time."""
    is_rising: bool = True
    """Whether times come in order."""
    cells: CellCounts = field(default_factory=CellCounts)
    examples: tuple[str, ...] = ()
    """Errors of a few of the bad rows that were skipped."""
    is_whole: bool = False

    def merged(self, later: Ingested, folder: str) -> Ingested:
        """The record of these rows and of later files' rows, which were read into a folder inside this one's."""
        moved = (replace(p, file=f"{folder}/{p.file}", first_number=self.num_rows) for p in later.parts)
        rows = zip_longest(self.rows_of_files, later.rows_of_files, fillvalue=0)
        return replace(
            self,
            parts=(*self.parts, *moved),
            position=Position(num_skipped=self.position.num_skipped + later.position.num_skipped),
            num_rows=self.num_rows + later.num_rows,
            rows_of_files=tuple(map(sum, rows)),
            last_time=max((k.last_time for k in (self, later) if k.last_time is not None), default=None),
            cells=self.cells.merged(later.cells),
            examples=self.examples + later.examples,
        )


_DOCUMENT = Document(Ingested, marks={"hotrow_rows": 1}, cure=CURE)


class Rows:
    """The stored rows of a source, numbered from 0 in their order here."""

    def __init__(self, folder: Path, schema: Schema, known: Ingested) -> None:
        self.folder, self.known, self.schema = folder, known, schema

    def __len__(self) -> int:
        return sum(part.num_rows for part in self.known.parts)

    def chunks(
        self, first: int = 0, stop: int | None = None, *, rows_per_chunk: int = ROWS_PER_BATCH
    ) -> Iterator[tuple[Chunk, NDArray[np.int64]]]:
        """Yields rows from `first` on, before `stop`, and their numbers in the source."""
        entries = dict[str, tuple[pa.Array, Keys]]()
        for batch, numbers in self._batches(first, stop, rows_per_chunk):
            yield _chunk(batch, self.schema, entries), numbers

    def chunks_of(self, spans: Spans) -> Iterator[tuple[Chunk, NDArray[np.int64]]]:
        """Yields rows as `chunks`: of one span, or of several that are sorted by time together."""
        if len(spans) == 1:
            yield from self.chunks(*spans[0])
            return
        for batch in self.sorted(spans).to_batches(ROWS_PER_BATCH):
            yield _chunk(batch, self.schema, {}), batch.column("row").to_numpy()

    def sorted(self, spans: Spans) -> pa.Table:
        """The rows of spans, each in the order of time, by time; rows of one time keep the order of the spans."""
        tables = [
            pa.Table.from_batches([batch.set_column(batch.schema.names.index("row"), "row", pa.array(numbers))])
            for span in spans
            for batch, numbers in self._batches(*span, ROWS_PER_BATCH, is_mapped=True)
        ]
        return _by_time(pa.concat_tables(tables, promote_options="permissive"))

    def cut(self, num_rows: int, *, by_time: bool) -> list[Spans]:
        """Cuts the rows into spans of about `num_rows`: of one part each, or, if each part is in the order of time, of
        all parts. Rows of one time then stay together."""
        bounds = list(pairwise(accumulate((part.num_rows for part in self.known.parts), initial=0)))
        if not by_time:
            return [[(i, min(i + num_rows, stop))] for row, stop in bounds for i in range(row, stop, num_rows)]
        step = max(1, num_rows // SAMPLES)
        times = np.sort(np.concatenate([times[::step] for _, times in self.order() if times is not None]))
        ends = np.unique(times[num_rows // step :: num_rows // step])
        ends = ends[ends > times[0]]
        of_parts = (pairwise([row, *self._places(row, stop, ends), stop]) for row, stop in bounds)
        return [[(row, stop) for row, stop in spans if row < stop] for spans in zip(*of_parts, strict=True)]

    def _places(self, row: int, stop: int, ends: NDArray[np.int64]) -> list[int]:
        """The row at which each time comes or would come, among rows that are in the order of time."""
        places = np.full(len(ends), row)
        for _, times in self.order(row, stop):
            assert times is not None, "rows in the order of time"
            places += np.searchsorted(times, ends)
        return [int(place) for place in places]

    def order(
        self, first: int = 0, stop: int | None = None, *, rows_per_chunk: int = ROWS_PER_BATCH
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """Yields the numbers and times of rows; times are None if rows have none."""
        for batch, numbers in self._batches(first, stop, rows_per_chunk, is_mapped=True):
            yield numbers, batch.column("time").to_numpy() if "time" in batch.schema.names else None

    def times(self) -> TimeHistogram:
        """How many rows have each time; empty if rows have none."""
        found = TimeHistogram()
        for _, times in self.order():
            if times is not None:
                found.add(times)
        return found

    def _batches(
        self, first: int, stop: int | None, rows_per_chunk: int, *, is_mapped: bool = False
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
        row, stop = 0, len(self) if stop is None else stop
        for part in self.known.parts:
            if row + part.num_rows <= first:
                row += part.num_rows
                continue
            if row >= stop:
                return
            end = row + part.num_rows
            for batch in _read(self.folder, part, is_mapped=is_mapped):
                for start in range(max(0, first - row), min(len(batch), stop - row), rows_per_chunk):
                    piece = batch.slice(start, min(rows_per_chunk, stop - row - start))
                    stored = "row" in batch.schema.names
                    at = piece.column("row").to_numpy() if stored else np.arange(row, row + len(piece)) + start
                    yield piece, at + part.first_number if stored and part.first_number else at
                row += len(batch)
                if stop <= row < end:
                    return


def ingest(
    opened: OpenedSource,
    folder: Path,
    *,
    info: SourceInfo,
    by_time: bool,
    memory_bytes: int,
    rows: int | None = None,
    sample: float = 1.0,
    file: int | None = None,
    rows_per_chunk: int = ROWS_PER_BATCH,
    beside_bytes: int = 0,
    check_stop: Callable[[], None] = lambda: None,
    report: Callable[[int], None] = lambda num_rows: None,
    say: Callable[[str], None] = lambda line: None,
) -> Rows:
    """Reads the first `rows` rows of a source, all if None, or a `sample` of them, into parts in `folder`.

    Parts of an earlier call that was interrupted are continued; those of other rows are removed. by_time: rows are
    stored in the order of time. memory_bytes: what sorting may take. file: only this file of the source is read, whole.
    beside_bytes: what the dataset takes beside its rows. check_stop: is called between chunks, and may raise. report:
    takes the number of rows read so far. say: takes lines for the user.

    Raises RowError for a bad row beyond those that may be skipped, and ValueError if the disk is too small.
    """
    source, schema = opened.source, opened.schema
    identity = _identity(opened, info, rows=rows, sample=sample, by_time=by_time, file=file)
    known = _known(folder, identity)
    if known.is_whole:
        return Rows(folder, schema, known)
    if known.parts:
        say(f"{known.num_rows:,} rows were read before; reading goes on behind them")
    run_bytes = memory_bytes // COPIES if by_time else None
    writer = _Writer(folder, len(known.parts), run_bytes=run_bytes)

    def save(known: Ingested) -> Ingested:
        """Records the part that was written last, and its rows."""
        part = writer.finish()
        known = replace(known, parts=(*known.parts, part)) if part is not None else known
        if len(known.parts) == 1:
            _check_disk(folder, known, min(info.num_rows, rows or info.num_rows), beside_bytes, say)
        known = replace(known, examples=tuple(source.skipped.examples or known.examples))
        _DOCUMENT.write(folder / RECORD, known)
        return known

    kept = known
    with ExitStack() as stack:
        stack.callback(writer.abort)
        begin, stop = (None, None) if file is None else (Position(file), file + 1)
        start = known.position if known.num_rows else begin
        for chunk in stack.enter_context(closing(source.chunks(start, stop=stop, rows_per_chunk=rows_per_chunk))):
            check_stop()
            chunk = _first(chunk, None if rows is None else rows - kept.num_rows)
            numbers = np.arange(kept.num_rows, kept.num_rows + chunk.num_rows)
            after = _counted(kept, chunk)
            if sample < 1:
                mask = sample_mask(schema.split.seed, numbers, fraction=sample)
                chunk, numbers = select_rows(chunk, mask), numbers[mask]
            after = replace(after, cells=kept.cells.with_chunk(chunk, schema.dense_names))
            is_plain = sample == 1 and not by_time
            while not writer.add(chunk, None if is_plain else numbers):
                kept = save(kept)
            kept = after
            if writer.is_full:
                kept = save(kept)
            report(kept.num_rows)
            if kept.num_rows == rows:
                break
        position = replace(kept.position, num_skipped=max(kept.position.num_skipped, source.skipped.num_rows))
        kept = save(replace(kept, position=position))
    if not kept.num_rows and file is None:
        if num_bad := position.num_skipped:
            raise ValueError(f"{info.files[0].path} has no good row, and {num_bad:,} bad ones; see what changed in it")
        raise NoRowsError(f"{info.files[0].path} has no rows; there is nothing to prepare")
    if by_time and not kept.is_rising:
        say("the rows do not come in the order of time: they were sorted by it")
        kept = _merged(Rows(folder, schema, kept), check_stop)
    kept = replace(kept, is_whole=True)
    _DOCUMENT.write(folder / RECORD, kept)
    return Rows(folder, schema, kept)


def may_go_on(folder: Path) -> bool:
    """Whether reading that stopped within a source can go on behind a part in `folder`."""
    try:
        return not _DOCUMENT.read(folder / RECORD).is_whole
    except (OSError, ValueError):
        return False


def _identity(
    opened: OpenedSource, info: SourceInfo, *, rows: int | None, sample: float, by_time: bool, file: int | None
) -> dict[str, Any]:
    """What decides the rows that are stored; which of them train, and what is counted of them, is decided later."""
    later = ("split", "statistics", "statistics_by", "statistics_lag")
    schema = {name: value for name, value in opened.schema.to_json().items() if name not in later}
    return {
        "source": opened.source.name,
        "files": {file.path: f"{file.num_bytes} bytes, changed {file.mtime_ns}" for file in info.files},
        "schema": schema,
        "encodings": dict(opened.encodings),
        "rows": rows,
        "sample": [sample, opened.schema.split.seed] if sample < 1 else None,
        "by_time": by_time,
        "file": file,
    }


def _known(folder: Path, identity: dict[str, Any]) -> Ingested:
    """What an earlier call has left of the same rows; files of others, and a record of rows without parts, go."""
    with suppress(FileNotFoundError):
        found = _DOCUMENT.read(folder / RECORD)
        if found.identity == identity and (found.parts or not found.num_rows or identity["sample"]):
            return found
    remove(folder)
    make_folder(folder)
    return Ingested(identity, ())


def _first(chunk: Chunk, num_rows: int | None) -> Chunk:
    """The first rows of a chunk."""
    if num_rows is None or chunk.num_rows <= num_rows:
        return chunk
    return select_rows(chunk, np.arange(chunk.num_rows) < num_rows)


def _counted(known: Ingested, chunk: Chunk) -> Ingested:
    """What is known with the rows of one more chunk."""
    position, rows = chunk.position, list(known.rows_of_files)
    file = position.file_index - (position.offset == 0)  # behind a whole file, the place of the next one
    rows += [0] * (file + 1 - len(rows))
    rows[file] += chunk.num_rows
    last, rises = known.last_time, known.is_rising
    if chunk.time is not None and chunk.num_rows:
        rises &= bool((last is None or last <= chunk.time[0]) and (chunk.time[1:] >= chunk.time[:-1]).all())
        last = int(chunk.time.max()) if last is None else max(last, int(chunk.time.max()))
    return replace(
        known,
        position=position,
        num_rows=known.num_rows + chunk.num_rows,
        rows_of_files=tuple(rows),
        last_time=last,
        is_rising=rises,
    )


def _check_disk(folder: Path, known: Ingested, num_rows: int, beside_bytes: int, say: Callable[[str], None]) -> None:
    """Says what the rows will take, by the first part; raises ValueError if the disk is too small."""
    num_rows, first = max(num_rows, known.num_rows), known.parts[0].num_bytes
    total = first * num_rows // known.num_rows
    # Beside the parts: the dataset, whose rows take no more, and merged parts, if they have to be sorted.
    needed = total * (2 if known.is_rising else 3) - first + beside_bytes
    free = disk_free_bytes(folder)
    say(f"about {num_rows:,} rows; they need about {size(needed)} of disk while they are prepared ({size(free)} free)")
    if needed > free:
        raise ValueError(
            f"{folder} needs about {size(needed)} more for the rows and the dataset, but {size(free)} are free: "
            f"{size(needed - free)} short; free some space, choose another disk, or take fewer rows (--rows, --sample)"
        )


def _name(place: int, *, is_merged: bool = False) -> str:
    return f"{int(is_merged)}-{place:06}.arrow"


class _Writer:
    """Writes parts, one after the other: batch by batch, or, with `run_bytes`, sorted by time from memory."""

    def __init__(self, folder: Path, place: int, *, run_bytes: int | None) -> None:
        self._folder, self._place, self._run_bytes = folder, place, run_bytes
        self._wide = set[str]()
        """Columns of ids that have exceeded uint32."""
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._schema: pa.Schema | None = None
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._batches: list[pa.RecordBatch] = []
        self._num_rows = self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        is_run = self._run_bytes is not None and self._num_bytes >= self._run_bytes
        return is_run or self._num_rows >= ROWS_PER_PART

    def add(self, chunk: Chunk, numbers: NDArray[np.int64] | None) -> bool:
        """Adds rows to the part; returns whether they fit its columns. If not, the part has to end before them.

        numbers: of the rows in the source; None if they come one after the other, as in all parts.
        """
        if not chunk.num_rows:
            return True
        columns = _columns(chunk, self._schema, self._wide, is_coded=self._run_bytes is None)
        if columns is None:
            return False
        if numbers is not None:
            columns["row"] = pa.array(numbers)
        batch = pa.RecordBatch.from_pydict(columns)
        self._schema = batch.schema
        self._num_rows, self._num_bytes = self._num_rows + len(batch), self._num_bytes + batch.nbytes
        if self._run_bytes is None:
            self._write(batch)
        else:
            self._batches.append(batch)
        return True

    def _write(self, rows: pa.RecordBatch | pa.Table) -> None:
        if self._file is None or self._stream is None:
            path = self._path
            path.unlink(missing_ok=True)  # of a part that was not recorded
            self._file = open_private(path)
            self._stream = pa.ipc.new_stream(self._file, rows.schema)
        self._stream.write(rows)

    @property
    def _path(self) -> Path:
        return self._folder / _name(self._place)

    def finish(self) -> Part | None:
        """Ends the part; None if it has no rows."""
        if not self._num_rows:
            return None
        if self._batches:
            for batch in _by_time(pa.Table.from_batches(self._batches)).to_batches(max_chunksize=ROWS_PER_BATCH):
                self._write(batch)
        assert self._file is not None and self._stream is not None, "the part has rows"
        self._stream.close()
        part = Part(self._path.name, self._num_rows, _synced(self._file))
        self._place, self._file = self._place + 1, None
        self._begin()
        return part

    def abort(self) -> None:
        """Removes an unfinished part."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)


def _synced(file: BinaryIO) -> int:
    """The bytes of a file, which is closed and will outlive a power cut."""
    with file:
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _columns(chunk: Chunk, like: pa.Schema | None, wide: set[str], *, is_coded: bool) -> dict[str, pa.Array] | None:
    """Rows as they are stored. like: the columns of the part so far; None is returned if ids do not fit them."""
    assert chunk.label is not None, "rows that are prepared have labels"
    num_labels = 1 if chunk.label.ndim == 1 else chunk.label.shape[1]
    columns = {"label": _fixed(chunk.label.reshape(chunk.num_rows, num_labels))}
    columns |= {"dense": _fixed(chunk.dense)} if chunk.dense.size else {}
    columns |= {} if chunk.weight is None else {"weight": pa.array(chunk.weight)}
    columns |= {} if chunk.time is None else {"time": pa.array(chunk.time)}
    for name in chunk.keys:
        column, stored = column_of(chunk.keys, name), f"keys {name}"
        kind = None if like is None else like.field(stored).type
        if isinstance(column, CodedKeys) and (not is_coded or not (kind is None or pa.types.is_dictionary(kind))):
            column = column.written_out()
        if isinstance(column, Keys) and column.kind == "int":
            if name not in wide and not _is_narrow(column.values):
                wide.add(name)
                if like is not None:
                    return None
            column = replace(column, values=column.values.astype(np.int64 if name in wide else np.uint32, copy=False))
        columns[stored] = _stored(column, kind, is_coded=is_coded)
    return columns


def _is_narrow(ids: NDArray[Any]) -> bool:
    """Whether uint32 holds all ids."""
    return ids.dtype == np.uint32 or not len(ids) or bool(ids.min() >= 0 and ids.max() < 1 << 32)


def _stored(column: Keys | CodedKeys, kind: pa.DataType | None, *, is_coded: bool) -> pa.Array:
    """Ids as they are stored. kind: how those of the part so far are; None if these are its first."""
    if isinstance(column, CodedKeys):
        entries, missing = keys_to_arrow(column.entries), column.entries.num_keys - 1
        codes = pa.array(column.codes.astype(np.int32), mask=column.codes == missing)
        return pa.DictionaryArray.from_arrays(codes, entries.slice(0, missing))
    array = keys_to_arrow(column)
    if not is_coded or column.kind == "int" or column.row_splits is not None:
        return array
    if kind is None or pa.types.is_dictionary(kind):
        coded = array.dictionary_encode()
        if kind is not None or len(coded.dictionary) * REPEATS <= len(array):
            return coded
    return array


def _fixed(numbers: NDArray[np.float32]) -> pa.Array:
    """Numbers [n, k] as lists of k."""
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), numbers.shape[1])


def _chunk(batch: pa.RecordBatch, schema: Schema, entries: dict[str, tuple[pa.Array, Keys]]) -> Chunk:
    """Stored rows as their source has read them. entries: dictionaries of the batches before, by column."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    keys = {name: _keys(columns[f"keys {name}"], name, entries) for name in schema.feature_names}
    optional = {name: columns[name].to_numpy() for name in ("time", "weight") if name in columns}
    label, dense = (
        columns[name].flatten().to_numpy().reshape(len(batch), num) if num else np.empty((len(batch), 0), np.float32)
        for name, num in (("label", len(schema.labels)), ("dense", len(schema.dense)))
    )
    label = label[:, 0] if len(schema.labels) == 1 else label
    return Chunk(len(batch), label, dense, KeyColumns(keys), Position(), **optional)


def _keys(array: pa.Array, name: str, entries: dict[str, tuple[pa.Array, Keys]]) -> Keys | CodedKeys:
    if not pa.types.is_dictionary(array.type):
        return keys_from_arrow(array)
    known = entries.get(name)
    # The last dictionary is kept alive, so that nothing else can have its address.
    if known is None or addresses(known[0]) != addresses(array.dictionary):
        with_missing = pa.concat_arrays([array.dictionary, pa.nulls(1, array.dictionary.type)])
        known = entries[name] = array.dictionary, keys_from_arrow(with_missing)
    codes = array.indices.cast(pa.int64()).fill_null(len(array.dictionary)).to_numpy()
    return CodedKeys(known[1], codes)


def _read(folder: Path, part: Part, *, is_mapped: bool = False) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a part. is_mapped: of which few columns or rows are wanted; pages that were read count as
    memory. Raises ValueError naming the file if it is damaged."""
    path, num_rows = folder / part.file, 0
    try:
        with open_file(path, within=folder) as file:
            if (num_bytes := file.seek(0, 2)) != part.num_bytes:
                raise ValueError(f"it has {num_bytes:,} bytes and not {part.num_bytes:,}")
            file.seek(0)
            data = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if is_mapped else file
            for batch in pa.ipc.open_stream(data):
                num_rows += len(batch)
                yield batch
        if num_rows != part.num_rows:
            raise ValueError(f"it has {num_rows:,} rows and not {part.num_rows:,}")
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{path} does not hold the rows that were read ({error}); {CURE}") from None


def _merged(rows: Rows, check_stop: Callable[[], None]) -> Ingested:
    """Merges the sorted parts into new ones; the old ones go when the new ones are recorded."""
    folder, known, parts = rows.folder, rows.known, list[Part]()
    for spans in rows.cut(max(part.num_rows for part in known.parts), by_time=True):
        check_stop()
        path = folder / _name(len(parts), is_merged=True)
        path.unlink(missing_ok=True)  # of a merge that was interrupted
        table, file = rows.sorted(spans), open_private(path)
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=ROWS_PER_BATCH)
        parts.append(Part(path.name, len(table), _synced(file)))
    found = replace(known, parts=tuple(parts), is_rising=True)
    _DOCUMENT.write(folder / RECORD, found)
    for part in known.parts:
        (folder / part.file).unlink()
    return found


def _by_time(table: pa.Table) -> pa.Table:
    """The rows in stable sorted order."""
    times: NDArray[np.int64] = table["time"].to_numpy()
    if (times[1:] >= times[:-1]).all():
        return table
    return table.combine_chunks().take(pa.array(np.argsort(times, kind="stable")))

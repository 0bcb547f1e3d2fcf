"""Turns raw rows into a packed dataset: one pipeline for every source, in bounded memory, resumable at any point.

    scan     which rows train: exact row counts or times, if the split needs them
    count    training rows only: how often each id occurs -> vocabularies, rows ranked by popularity
    encode   every row: ids -> row numbers, dense transforms -> the writer; dataset.json last

Everything a model will know about its ids and statistics comes from training rows: no byte of the training split
depends on another split's labels, ids or numbers (law 6). Results depend on the rows and options alone, not on threads,
memory, chunks or interruptions. Unfinished work is in `<out>/.prepare`; see docs/prepare.md.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.files import explain_full_disk, file_name
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.base.records import STRICT, Count, checked
from hotrow.data.chunk import Chunk, Position, SourceInfo, select_rows
from hotrow.data.packed.format import ROWS_PER_BLOCK, DatasetInfo, DenseColumn, Feature, SourceFile, Table, select_ids
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare.encoder import DenseTransform, EncoderPool, Moments, MomentsRecord, RowEncoder
from hotrow.data.prepare.estimate import estimate_work
from hotrow.data.prepare.spill import SNAPSHOT, CounterPool
from hotrow.data.prepare.split import (
    TRAIN,
    Codes,
    RandomPlan,
    SplitPlan,
    TimeHistogram,
    plan_to_json,
    reference_plan,
    sample_mask,
)
from hotrow.data.prepare.workfolder import COUNTS, STATE, Mark, WorkFolder
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.convert import column_of
from hotrow.data.sources.registry import OpenedSource, check_split, rows_per_file
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.synthetic import SyntheticSource

ROWS_PER_CHUNK = 65_536
ROWS_PER_PART = 16 * ROWS_PER_BLOCK
"""Smaller than the writer's default: an interruption can cost one part, and small splits rarely finish parts."""
SNAPSHOT_EVERY_S = 120.0
"""Seconds between snapshots of counting; longer if writing one takes more than a tenth of that."""
BUFFER_BYTES = 64 << 20
"""Part of the memory budget for rows in flight between reader and writer."""
MIN_MEMORY_BYTES = 128 << 20
CHECKSUM_BLOCK_BYTES = 1 << 22


class Interrupted(KeyboardInterrupt):
    """Preparation was stopped on request, and its state is kept."""


@dataclass(frozen=True)
class Options:
    """What the caller may choose besides source, schema and folder; the second group changes no byte of the result."""

    rows: int | None = None
    """Only the first rows of the source; None: all."""
    sample: float = 1.0
    """Share of rows to keep, chosen by a hash of the row number."""

    memory_bytes: int | None = None
    """Memory for counters, vocabularies and rows in flight; None: half of what this process may use."""
    threads: int | None = None
    """Tables counted or encoded at a time; None: as many as this process has cores, at most 8."""
    rows_per_chunk: int = ROWS_PER_CHUNK
    snapshot_every_s: float = SNAPSHOT_EVERY_S
    overwrite: bool = False

    rows_per_part: int = ROWS_PER_PART
    rows_per_block: int = ROWS_PER_BLOCK

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}; it must be at least 1, or None for all")
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample is {self.sample}; it is a share of the rows, above 0 and at most 1")
        if self.memory_bytes is not None and self.memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(f"memory is {self.memory_bytes:,} bytes; give at least {MIN_MEMORY_BYTES:,} (128MiB)")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")


@dataclass(frozen=True)
class _Piece:
    """The rows of one chunk that belong to the data set."""

    chunk: Chunk
    codes: Codes
    """Split of each row."""
    next_row: int
    """Number of the source's first row after the chunk."""


def prepare(
    opened: OpenedSource,
    out: Path | str,
    options: Options | None = None,
    *,
    progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
) -> PackedDataset:
    """Prepares `opened` into the folder `out` and returns the dataset; see the module's docstring.

    progress: called with a `Progress` a few times a second. announce: called with lines for the user: what was found,
    what it will take, what was resumed or skipped.

    Raises ValueError if the source has a bad row or file, if `out` holds a dataset or other work, or if the disk is too
    small; OSError when the disk is full; Interrupted on Ctrl-C. After the last two, and after a bad row that came later
    than a snapshot, the same call continues where it stopped; otherwise nothing is left behind.
    """
    options = options or Options()
    check_split(opened)
    say = announce or (lambda line: None)
    source_info = opened.source.scout()
    work = WorkFolder(Path(out), _identity(opened, options, source_info), overwrite=options.overwrite)
    for note in opened.notes:
        say(f"note: {note}")
    if work.resumed:
        say(f"continuing the work found in {work.folder}")
    else:
        estimate = estimate_work(opened, source_info, Path(out), rows=options.rows, sample=options.sample)
        say(str(estimate))
        estimate.check_disk(Path(out))
        with explain_full_disk(work.out, "beginning", "Nothing had been kept yet."):
            work.begin()
    stage = _Stages(opened, work, options, source_info, progress, say)
    try:
        with explain_full_disk(work.out, "preparing", f"What was finished is kept in {work.folder}."):
            return _stoppable(stage.run, work)
    except ValueError:
        if not work.abandon():
            say(f"the counts are kept in {work.folder}: the same command, also with --skip-bad-rows, continues")
        raise


def fingerprint(opened: OpenedSource) -> str:
    """Returns a hex digest of what decides the bytes that `prepare` makes of `opened` with default options."""
    identity = _identity(opened, Options(), opened.source.scout())
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _identity(opened: OpenedSource, options: Options, info: SourceInfo) -> dict[str, Any]:
    """Returns what decides the bytes of the result; a resume is refused if any of it differs."""
    return {
        "source": opened.source.name,
        "files": {f.path: f"{f.num_bytes} bytes, changed {f.mtime_ns}" for f in info.files},
        "schema": opened.schema.to_json(),
        "encodings": dict(opened.encodings),
        "rows": options.rows,
        "sample": options.sample,
        "rows_per_part": options.rows_per_part,
        "rows_per_block": options.rows_per_block,
    }


def _stoppable(run: Callable[[threading.Event], PackedDataset], work: WorkFolder) -> PackedDataset:
    """Calls `run` in its own thread; Ctrl-C interrupts the main thread, and `run` then stops between two chunks."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="hotrow-prepare") as executor:
        future = executor.submit(run, stop)
        try:
            # A signal may reach another thread; this one then notices it only when a wait ends.
            while not wait([future], timeout=0.1).done:
                pass
        except KeyboardInterrupt:
            stop.set()
            if isinstance(future.exception(), Interrupted):
                raise Interrupted(
                    f"preparation stopped; its state is kept in {work.folder}: run the same command to continue"
                ) from None
            raise
        return future.result()


@record(frozen=True, config=STRICT)
class _Counted:
    """How far counting of the training rows has got."""

    position: Position | None = None
    row: Count = 0
    train_rows: Count = 0
    moments: dict[str, MomentsRecord] = Field(default_factory=dict)
    """Moments of the columns that are standardised, by column."""
    done: bool = False

    def moments_of(self, column: str) -> Moments:
        """Returns the moments of a column so far."""
        return Moments.from_record(self.moments[column]) if column in self.moments else Moments()


_COUNTED = TypeAdapter(_Counted)


class _Stages:
    """The three stages on one work folder; a stage does nothing if its result is already there."""

    def __init__(
        self,
        opened: OpenedSource,
        work: WorkFolder,
        options: Options,
        info: SourceInfo,
        progress: ProgressCallback | None,
        say: Callable[[str], None],
    ) -> None:
        self._opened, self._work, self._options = opened, work, options
        self._source, self._schema = opened.source, opened.schema
        self._info, self._progress, self._say = info, progress, say
        self._rows_total = min(info.num_rows, options.rows or info.num_rows)
        memory_bytes = options.memory_bytes or available_memory_bytes() // 2
        self._memory_bytes = max(memory_bytes - BUFFER_BYTES, memory_bytes // 2)
        self._stop = threading.Event()

    def run(self, stop: threading.Event) -> PackedDataset:
        """Runs all stages and returns the dataset. Raises Interrupted soon after `stop` is set, with the state
        saved."""
        self._stop = stop
        with ExitStack() as stack:
            threads = self._options.threads or min(8, usable_cores())
            executor = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="hotrow-encode"))
            plan = self._work.results.plan or self._plan()
            if self._work.results.plan is None:
                self._work.save(plan=plan)
            if self._work.results.tables is None:
                self._count(plan, executor)
            return self._encode(plan, executor)

    def _plan(self) -> SplitPlan:
        """Decides which rows train; reads as much of the source as that takes."""
        split = self._schema.split
        kind = split.kind or ("time" if self._schema.time is not None else "random")
        if kind == "random":
            return RandomPlan(split.seed, split.fractions)
        if kind == "reference":
            return reference_plan(_first_rows(rows_per_file(self._opened), self._options.rows))
        histogram, meter = TimeHistogram(), ProgressMeter(self._progress, "scan", self._rows_total)
        for times in _limited(self._times(), self._options.rows):
            histogram.add(times)
            self._check_stop()
            meter.update(int(histogram.counts.sum()))
        meter.finish(int(histogram.counts.sum()))
        return histogram.plan(split.fractions)

    def _times(self) -> Iterator[NDArray[np.int64]]:
        if isinstance(self._source, ColumnsSource | SyntheticSource):
            yield from self._source.times()
            return
        for chunk in self._source.chunks():
            assert chunk.time is not None, "the schema has a time column"
            yield chunk.time

    def _pieces(self, plan: SplitPlan, start: Position | None, row: int, meter: ProgressMeter) -> Iterator[_Piece]:
        """Yields the data set's rows from source row `row` on; `start` is that row's position."""
        options = self._options
        for chunk in self._source.chunks(start, rows_per_chunk=options.rows_per_chunk):
            if options.rows is not None and row + chunk.num_rows > options.rows:
                chunk = select_rows(chunk, np.arange(chunk.num_rows) < options.rows - row)
            codes = plan.assign(row, chunk.num_rows, chunk.time)
            next_row = row + chunk.num_rows
            if options.sample < 1:
                kept = sample_mask(self._schema.split.seed, row, chunk.num_rows, fraction=options.sample)
                chunk, codes = select_rows(chunk, kept), codes[kept]
            yield _Piece(chunk, codes, next_row)
            row = next_row
            meter.update(row)
            if row == options.rows:
                break
        meter.finish(row)

    def _count(self, plan: SplitPlan, executor: Executor) -> None:
        """Counts the training rows; writes vocabularies, counts and transforms."""
        folder = self._work.folder / COUNTS
        with (
            ThreadPoolExecutor(1, thread_name_prefix="hotrow-checksum") as beside,
            CounterPool(folder, memory_bytes=self._memory_bytes, executor=executor) as counters,
        ):
            # In its own thread: if the executor has only one, it would hold up the counting there.
            checksums = beside.submit(_checksums, [f.path for f in self._info.files], self._stop)
            for table in self._schema.table_names:
                for feature in self._schema.features_of(table):
                    cap = self._schema.table(table).hash_cap or 0
                    counters.declare(table, self._source.key_kinds[feature], hash_cap=cap)
            state = _Counted()
            if counters.progress is not None:
                cure = "start again with --overwrite, or remove the folder .prepare"
                state = checked(_COUNTED, counters.progress, where=f"{folder / SNAPSHOT}: progress", cure=cure)
            if not state.done:
                state = self._count_rows(plan, counters, state)
            if state.train_rows == 0:
                raise ValueError("no row is in the training split; use more rows, a larger sample or another split")
            transforms = [
                str(state.moments_of(d.column).transform() if d.transform == "standardize" else d.transform)
                for d in self._schema.dense
            ]
            tables = {name: self._build(counters, name) for name in self._schema.table_names}
            results = {"transforms": tuple(transforms), "tables": tables, "checksums": tuple(checksums.result())}
            self._work.save(**results, rows_total=state.row)

    def _count_rows(self, plan: SplitPlan, counters: CounterPool, state: _Counted) -> _Counted:
        standardized = [i for i, d in enumerate(self._schema.dense) if d.transform == "standardize"]
        names = [self._schema.dense_names[i] for i in standardized]
        moments = [state.moments_of(name) for name in names]
        row, train_rows, start = state.row, state.train_rows, state.position
        position = start or Position()

        def snapshot(*, done: bool) -> _Counted:
            by_name = {name: m.to_record() for name, m in zip(names, moments, strict=True)}
            counted = _Counted(position, row, train_rows, by_name, done)
            counters.snapshot(asdict(counted))
            return counted

        clock = _Clock(self._options.snapshot_every_s)
        meter = ProgressMeter(self._progress, "count", self._rows_total, row)
        for piece in self._pieces(plan, start, row, meter):
            is_train = piece.codes == TRAIN
            self._count_piece(counters, piece.chunk, is_train)
            for i, sums in zip(standardized, moments, strict=True):
                sums.add(piece.chunk.dense[is_train, i])
            position, row = piece.chunk.position, piece.next_row
            train_rows += int(is_train.sum())
            if self._stop.is_set():
                snapshot(done=False)
                raise Interrupted
            if clock.is_due():
                with clock:
                    snapshot(done=False)
        return snapshot(done=True)

    def _count_piece(self, counters: CounterPool, chunk: Chunk, is_train: NDArray[np.bool_]) -> None:
        if not is_train.any():
            return
        mask = None if is_train.all() else is_train
        schema = self._schema
        columns = {t: [column_of(chunk.keys, f) for f in schema.features_of(t)] for t in schema.table_names}
        counters.add(columns, mask)

    def _build(self, counters: CounterPool, table: str) -> Table:
        """Writes the vocabulary and counts of a table; returns its record for dataset.json."""
        self._check_stop()
        for folder in ("vocab", "counts"):
            (self._work.out / folder).mkdir(mode=0o700, exist_ok=True)
        path = self._work.out / "vocab" / file_name(table)
        options = self._schema.table(table)
        summary = counters.build(table, path, self._work.out / "counts" / file_name(table), min_count=options.min_count)
        return Table(
            name=table,
            num_embeddings=summary.num_embeddings,
            num_keys=summary.num_keys,
            key_kind=self._source.key_kinds[self._schema.features_of(table)[0]],
            missing_row=summary.missing_row or None,
            num_dropped=summary.num_distinct - summary.num_keys,
            vocabulary=Vocabulary.open(path, verify="header").id,
        )

    def _encode(self, plan: SplitPlan, executor: Executor) -> PackedDataset:
        """Writes every row, then dataset.json."""
        info = self._dataset_info(plan)
        transforms = [DenseTransform.parse(column.transform) for column in info.dense]
        paths = {table.name: self._work.out / table.vocabulary_file for table in info.tables}
        sizes = {"rows_per_part": self._options.rows_per_part, "rows_per_block": self._options.rows_per_block}
        with (
            EncoderPool(paths, self._work.fresh("encode"), memory_bytes=self._memory_bytes) as encoders,
            PackedWriter(self._work.out, info, **sizes) as writer,
        ):
            mark = self._work.last_mark({split: writer.finished_rows(split) for split in SPLITS})
            for split in SPLITS:
                if writer.finished_rows(split):
                    writer.seek(split, mark.rows[split])
            self._note_occurrences(plan, encoders, mark)
            rows_read, skipped = self._write_rows(plan, encoders, writer, mark, transforms, executor)
            self._check_files_unchanged()
            summary = {"rows_read": rows_read, "rows_skipped": skipped}
            if skipped:
                self._say(_skipped_line(skipped, self._source.skipped.examples))
            dataset = writer.close(summary)
        self._work.remove()
        return dataset

    def _note_occurrences(self, plan: SplitPlan, encoders: EncoderPool, mark: Mark) -> None:
        """Makes the separate pass that vocabularies larger than memory need."""
        if not encoders.needs_occurrences:
            return
        meter = ProgressMeter(self._progress, "match", self._work.results.rows_total or self._rows_total, mark.row)
        for piece in self._pieces(plan, mark.start, mark.row, meter):
            for spec in self._schema.categorical:
                encoders[spec.table_name].add(spec.column, piece.chunk.keys[spec.column])
            self._check_stop()
        encoders.finish()

    def _write_rows(
        self,
        plan: SplitPlan,
        encoders: EncoderPool,
        writer: PackedWriter,
        mark: Mark,
        transforms: Sequence[DenseTransform],
        executor: Executor,
    ) -> tuple[int, int]:
        """Appends all rows after `mark`; returns how many source rows were read and skipped, from the first row on."""
        tables = {table: encoders[table] for table in self._schema.table_names}
        encode = RowEncoder(self._schema, transforms, tables, executor)
        rows, row, position = dict(mark.rows), mark.row, mark.position
        finished = {split: writer.finished_rows(split) for split in SPLITS}
        marks = [mark]
        meter = ProgressMeter(self._progress, "encode", self._work.results.rows_total or self._rows_total, row)
        for piece in self._pieces(plan, mark.start, row, meter):
            self._check_stop()
            self._write_piece(piece, encode, writer, rows)
            row, position = piece.next_row, piece.chunk.position
            marks.append(Mark(row, position, dict(rows)))
            if (now := {split: writer.finished_rows(split) for split in SPLITS}) != finished:
                finished, marks = now, self._work.save_marks(marks, now)
        return row, position.num_skipped

    @staticmethod
    def _write_piece(piece: _Piece, encode: RowEncoder, writer: PackedWriter, rows: dict[str, int]) -> None:
        """Appends the rows of a piece to their splits and adds their numbers to `rows`."""
        dense, ids = encode(piece.chunk)
        label = piece.chunk.label
        assert label is not None, "a source for preparation has labels"
        for code, split in enumerate(SPLITS):
            chosen = piece.codes == code
            if chosen.any():
                part = {name: select_ids(column, chosen) for name, column in ids.items()}
                writer.append(split, label[chosen], dense[chosen], part)
                rows[split] += int(chosen.sum())

    def _dataset_info(self, plan: SplitPlan) -> DatasetInfo:
        found, schema = self._work.results, self._schema
        transforms, tables, checksums = found.transforms or (), found.tables or {}, found.checksums or ()
        sizes = (len(transforms), sorted(tables), len(checksums))
        if sizes != (len(schema.dense), sorted(schema.table_names), len(self._info.files)):
            raise ValueError(
                f"{self._work.folder / STATE}: transforms, tables and checksums are not of this schema and these "
                "files; start again with --overwrite"
            )
        dense = zip(schema.dense_names, transforms, strict=True)
        files = zip(self._info.files, checksums, strict=True)
        return DatasetInfo(
            name=self._source.name,
            label=schema.label.column,
            dense=tuple(DenseColumn(name, transform) for name, transform in dense),
            features=tuple(Feature(c.column, c.table_name, c.kind) for c in schema.categorical),
            tables=tuple(tables[name] for name in schema.table_names),
            ids={
                "source": self._source.name,
                "schema": schema.to_json(),
                "encodings": dict(self._opened.encodings),
                "split": plan_to_json(plan),
                "rows": self._options.rows,
                "sample": self._options.sample,
            },
            sources=tuple(SourceFile(f.path, f.num_bytes, checksum) for f, checksum in files),
            licence=schema.licence,
        )

    def _check_files_unchanged(self) -> None:
        for file in self._info.files:
            path = Path(file.path)
            if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) != (file.num_bytes, file.mtime_ns):
                raise ValueError(f"{path} changed while it was being prepared; run again with --overwrite")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted


class _Clock:
    """Says when a periodic task is due; the task, timed by `with`, takes at most a tenth of all time."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._due = every_s, time.monotonic() + every_s

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._due = now + max(self._every_s, 10 * (now - self._started))


def _first_rows(rows_per_file: Sequence[int], limit: int | None) -> list[int]:
    """Returns how many rows of each file are among the first `limit` rows; files beyond are left out."""
    kept, before = [], 0
    for num_rows in rows_per_file:
        kept.append(num_rows if limit is None else min(num_rows, limit - before))
        before += num_rows
        if limit is not None and before >= limit:
            break
    return kept


def _limited(arrays: Iterator[NDArray[np.int64]], limit: int | None) -> Iterator[NDArray[np.int64]]:
    """Yields the first `limit` values of all arrays together."""
    for array in arrays:
        if limit is not None:
            array = array[:limit]
            limit -= len(array)
        yield array
        if limit == 0:
            return


def _checksums(paths: Sequence[str], stop: threading.Event) -> list[str]:
    """Returns the crc32 of each local file as stored; "" for anything else, and once `stop` is set."""
    return [_checksum(Path(path), stop) if Path(path).is_file() else "" for path in paths]


def _checksum(path: Path, stop: threading.Event) -> str:
    crc = 0
    with path.open("rb") as file:
        while not stop.is_set() and (block := file.read(CHECKSUM_BLOCK_BYTES)):
            crc = zlib.crc32(block, crc)
    return f"crc32:{crc:08x}"


def _skipped_line(num_rows: int, examples: Sequence[str]) -> str:
    return "\n  ".join([f"skipped {num_rows:,} bad rows" + (", for example:" if examples else ""), *examples])

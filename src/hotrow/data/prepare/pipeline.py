"""Turns raw rows into a packed dataset: one pipeline for every source, in bounded memory, resumable at any point.

    read     every row, once: parts of canonical columns, in the order of time if they have one (rows.py)
    count    training rows only: how often each id occurs -> vocabularies, rows ranked by popularity
    encode   every row: ids -> row numbers, dense transforms -> the writer; dataset.json last

Everything a model will know about its ids and statistics comes from training rows, and with `statistics_lag` from older
rows: no byte of the training split depends on another split's labels, ids or numbers (law 6). Results depend on the
rows and options alone, not on threads, memory, chunks or interruptions. Unfinished work is in `<out>/.prepare`; see
docs/prepare.md.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder, remove
from hotrow.base.files import crc32, explain_full_disk, file_name
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.data.chunk import Chunk, SourceInfo
from hotrow.data.packed.format import (
    ROWS_PER_BLOCK,
    STATISTICS,
    DatasetInfo,
    DenseColumn,
    Feature,
    Label,
    SourceFile,
    Table,
)
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import TableSummary, Vocabulary
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare.days import Base
from hotrow.data.prepare.encoder import EncoderPool, RowEncoder
from hotrow.data.prepare.extend import Counted
from hotrow.data.prepare.fit import (
    EncodedRows,
    Fit,
    Piece,
    build_table,
    by_split,
    pieces,
    ticks_of_day,
    with_statistics,
)
from hotrow.data.prepare.lag import Lagged
from hotrow.data.prepare.rows import CURE, Ingested, Rows, ingest, may_go_on
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.prepare.statistics import Statistics, num_folds
from hotrow.data.prepare.workfolder import COUNTS, ROWS, STATE, WorkFolder
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.inputs import prefetch
from hotrow.data.sources.registry import OpenedSource, check_split
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.split import RandomPlan, SplitPlan, TimeHistogram, plan_to_json, reference_plan
from hotrow.data.transforms import Transform

ROWS_PER_CHUNK = 65_536
ROWS_PER_PART = 16 * ROWS_PER_BLOCK
"""Smaller than the writer's default: an interruption can cost one part, and small splits rarely finish parts."""
BUFFER_BYTES = 64 << 20
"""Part of the memory budget for rows in flight between reader and writer."""
MIN_MEMORY_BYTES = 128 << 20
BY_FOLD = "by-fold.safetensors"
NOTHING_TRAINS = "no row is in the training split; use more rows, a larger sample or another split"
LEAK, SCHEMA_GUESS = "leak", "schema_guess"
"""The codes of the warnings that runs count for what preparation said of columns."""


class Interrupted(KeyboardInterrupt):
    """Preparation was stopped on request, and its state is kept."""


@dataclass(frozen=True)
class Options:
    """The caller's choices besides source, schema and folder; the second group does not change the result."""

    rows: int | None = None
    """Number of first rows of the source to prepare. If None, all are prepared."""
    sample: float = 1.0
    """Share of rows to keep, chosen by a hash of the row number."""
    base: Base | None = None
    """The base that the rows extend, if they are a day of a chain; they are then read by its schema and encodings."""

    memory_bytes: int | None = None
    """Memory for counters, vocabularies and rows in flight. If None, half of what this process may use."""
    threads: int | None = None
    """Tables counted or encoded at a time. If None, as many as this process has cores, at most 8."""
    rows_per_chunk: int = ROWS_PER_CHUNK
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


def prepare(
    opened: OpenedSource,
    out: Path | str,
    options: Options | None = None,
    *,
    progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
    rows: Path | None = None,
) -> PackedDataset:
    """Prepares `opened` into the folder `out` and returns the dataset; see the module's docstring.

    progress: called with a `Progress` a few times a second. announce: called with lines for the user: what was found,
    what it will take, what was resumed or skipped. rows: the folder for the rows that are read, which is left behind
    for another preparation of the same rows. If None, they lie in the work folder, and go with it.

    Raises ValueError if the source has a bad row or file, if `out` holds a dataset or other work, or if the disk is too
    small; OSError when the disk is full; Interrupted on Ctrl-C. After the last two, and after a bad row behind a part
    that was read, the same call continues where it stopped; otherwise nothing is left behind.
    """
    stages = begin(opened, out, options, progress=progress, announce=announce, rows=rows)
    with stages.cleaning():
        return _stoppable(stages.run, stages.work.folder)


def begin(
    opened: OpenedSource,
    out: Path | str,
    options: Options | None = None,
    *,
    progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
    rows: Path | None = None,
) -> Stages:
    """The stages of new or unfinished work in `out`, checked; see `prepare`."""
    options, out, say = options or Options(), Path(out), announce or (lambda line: None)
    check_split(opened)
    _lag_of(opened)
    info = opened.source.scout()
    if options.base is not None:
        options.base.check_is_new(info)
    work = WorkFolder(out, _identity(opened, options, info), overwrite=options.overwrite)
    for note in (*opened.notes, *(() if options.base is None else options.base.notes())):
        say(f"note: {note}")
    if work.resumed:
        say(f"continuing the work found in {work.folder}")
    else:
        with explain_full_disk(out, "beginning", "Nothing had been kept yet."):
            work.begin()
    return Stages(opened, work, options, info, rows or work.folder / ROWS, progress, say)


def fingerprint(opened: OpenedSource) -> str:
    """Returns a hex digest of what decides the bytes that `prepare` makes of `opened` with default options."""
    identity = _identity(opened, Options(), opened.source.scout())
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _identity(opened: OpenedSource, options: Options, info: SourceInfo) -> dict[str, Any]:
    """Returns what decides the bytes of the result; a resume is refused if any of it differs."""
    base = options.base
    day = {} if base is None else {"day": asdict(base.day)}
    return day | {
        "source": opened.source.name,
        "files": {f.path: f"{f.num_bytes} bytes, changed {f.mtime_ns}" for f in info.files},
        "schema": opened.schema.to_json(),
        "encodings": dict(opened.encodings),
        "rows": options.rows,
        "sample": options.sample,
        "rows_per_part": options.rows_per_part,
        "rows_per_block": options.rows_per_block,
    }


def _stoppable(run: Callable[[threading.Event], PackedDataset], work_folder: Path) -> PackedDataset:
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
            if not isinstance(future.exception(), Interrupted):
                raise
        if isinstance(future.exception(), Interrupted):
            raise Interrupted(
                f"preparation stopped; its state is kept in {work_folder}: run the same command to continue"
            ) from None
        return future.result()


class Stages:
    """The stages on one work folder; a stage does nothing if its result is already there.

    `run` goes through them. Where other processes read, count and encode parts of the rows, as in
    examples/prepare_ray.py, `take`, `plan_by`, `keep` and `write` are the steps between.
    """

    def __init__(
        self,
        opened: OpenedSource,
        work: WorkFolder,
        options: Options,
        info: SourceInfo,
        rows_folder: Path,
        progress: ProgressCallback | None,
        say: Callable[[str], None],
    ) -> None:
        self._opened, self.work, self._options, self._base = opened, work, options, options.base
        self._source, self._schema, self._rows_folder = opened.source, opened.schema, rows_folder
        self._lag = _lag_of(opened)
        self.info, self._progress, self._say = info, progress, say
        memory_bytes = options.memory_bytes or available_memory_bytes() // 2
        self._memory_bytes = max(memory_bytes - BUFFER_BYTES, memory_bytes // 2)
        self._stop, self._open = threading.Event(), ExitStack()

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Removes what was made after an error in the data, if there is nothing in it to continue from."""
        kept = f"What was finished is kept in {self.work.folder}."
        try:
            with explain_full_disk(self.work.out, "preparing", kept):
                yield
        except ValueError:
            if may_go_on(self._rows_folder):
                where = self._rows_folder
                self._say(f"what was read is kept in {where}: the same command, also with --skip-bad-rows, continues")
            elif self.work.results.tables is None:
                remove(self._rows_folder)
                self.work.abandon()
            raise

    def run(self, stop: threading.Event) -> PackedDataset:
        """Runs all stages and returns the dataset. Raises Interrupted soon after `stop` is set, with the state
        saved."""
        self._stop = stop
        threads = self._options.threads or min(8, max(1, usable_cores()))
        with ThreadPoolExecutor(threads, thread_name_prefix="hotrow-encode") as executor, self._open:
            self._rows = self._read()
            plan = self.plan_by(self._rows.times)
            if self.work.results.tables is None:
                self._count(plan, executor=executor, threads=threads)
            return self._encode(plan, executor)

    def _read(self) -> Rows:
        """Reads the source into parts."""
        options, meter = self._options, self._meter("read", min(self.info.num_rows, self._options.rows or 1 << 62))
        rows = ingest(
            self._opened,
            self._rows_folder,
            info=self.info,
            rows=options.rows,
            sample=options.sample,
            by_time=self.by_time,
            memory_bytes=self._memory_bytes,
            rows_per_chunk=options.rows_per_chunk,
            beside_bytes=0 if self._base is None else self._base.num_bytes,
            check_stop=self._check_stop,
            report=meter.update,
            say=self._say,
        )
        meter.finish(rows.known.num_rows)
        self.take(rows.known)
        if not len(rows):
            raise ValueError(NOTHING_TRAINS)
        return rows

    def take(self, known: Ingested) -> None:
        """Notes what was read. Raises ValueError if a column has more odd cells than it may have."""
        known.cells.check(self._schema.odd_share)
        self._known = known

    def plan_by(self, times: Callable[[], TimeHistogram]) -> SplitPlan:
        """Decides which rows train. times: is called for a split by time."""
        split = self._schema.split
        kind = split.kind or ("time" if self._schema.time is not None else "random")
        if kind == "random":
            return RandomPlan(split.seed, split.fractions)
        if kind == "reference":
            return reference_plan(self._known.rows_of_files)
        return times().plan(split.fractions)

    @property
    def by_time(self) -> bool:
        """Whether rows are stored in the order of time, in which `statistics` count them."""
        return self._schema.time is not None and not isinstance(self._source, CriteoSource)

    def _meter(self, stage: str, num_rows: int, row: int = 0) -> ProgressMeter:
        return ProgressMeter(self._progress, stage, num_rows, row)

    def _pieces(self, plan: SplitPlan, stage: str, first: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """Yields the stored rows from `first` on, before `stop`, and reports how far the stage has got."""
        meter, row = self._meter(stage, len(self._rows), first), first
        for piece in self._drawn(
            stage, plan, self._rows.chunks(first, stop, rows_per_chunk=self._options.rows_per_chunk)
        ):
            self._check_stop()
            yield piece
            row += piece.chunk.num_rows
            meter.update(row)
        meter.finish(row)

    def _drawn(self, stage: str, plan: SplitPlan, chunks: Iterator[tuple[Chunk, NDArray[np.int64]]]) -> Iterator[Piece]:
        """Yields rows with their splits and folds."""
        return pieces(self._schema, plan, self._open.enter_context(closing(prefetch(chunks))))

    def _count(self, plan: SplitPlan, **threads: Any) -> None:
        """Counts the training rows; writes vocabularies, counts, statistics and transforms."""
        fit = Fit(self._opened, self.work.folder / COUNTS, memory_bytes=self._memory_bytes, **threads)
        with fit.counters:
            for piece in self._pieces(plan, "count"):
                fit.add(piece)
            self.keep(fit)

    def keep(self, fit: Fit, built: Mapping[str, TableSummary] | None = None) -> None:
        """Writes what all training rows teach. built: records of vocabularies that `build_table` has written into the
        dataset; if None, they are built here."""
        if not fit.num_rows:
            raise ValueError(NOTHING_TRAINS)
        last, day = self._known.last_time, ticks_of_day(self._opened)
        last_time_s = None if self._base is None or last is None or not day else last * 86_400 / day
        checksums = tuple(self._checksums())
        if self._base is not None:
            self._base.check_is_later(last_time_s)
            self._base.check_is_no_earlier_day(self.info, checksums)
        self._save_statistics(fit.statistics)
        build = partial(self._build, fit.counters, built)
        is_day = self._base is not None and self._base.dataset is not None
        self.work.save(
            transforms=self._base.transforms if self._base is not None and is_day else fit.transforms(),
            tables=fit.counters.each(build) if self._base is None else {t: build(t) for t in self._schema.table_names},
            hours=fit.hours.found(),
            last_time_s=last_time_s,
            checksums=checksums,
        )

    def _checksums(self) -> Iterator[str]:
        """Yields the crc32 of each local file as stored, which is read for it only if reading did not reach its end; ""
        for anything else."""
        known = {file.name: file.known.get("crc32") for file in getattr(self._source, "files", ())}
        for file in self.info.files:
            crc = known.get(file.path)
            if Path(file.path).is_file():
                yield f"crc32:{crc32(Path(file.path).resolve()) if crc is None else crc:08x}"
            else:
                yield ""

    def _save_statistics(self, own: Statistics) -> None:
        """Writes the statistics of all training rows into the dataset, and those by fold into the work folder."""
        if self._schema.statistics:
            path = self.work.out / STATISTICS
            make_folder(path.parent, within=self.work.out)
            found = own if self._base is None else own.with_earlier(self._base.statistics(self._schema))
            found.save(self.work.folder / BY_FOLD)
            found.total().save(path)

    def _load_statistics(self) -> Statistics:
        """The statistics by fold; those of the rows of earlier days are one fold more."""
        folds = num_folds(self._schema)
        folds += self._base is not None and folds > 1
        return Statistics.load(self._schema, self.work.folder / BY_FOLD, num_folds=folds, cure=CURE)

    def _build(self, counters: CounterPool, built: Mapping[str, TableSummary] | None, table: str) -> Table:
        """Writes the vocabulary and counts of a table, if they are not built; returns its record for dataset.json."""
        self._check_stop()
        out, spec = self.work.out, self._schema.table(table)
        if self._base is None:
            summary = build_table(counters, self._schema, out, table) if built is None else built[table]
            num_dropped = summary.num_distinct - summary.num_keys
        else:
            work = self.work.fresh(f"day-{file_name(table)}")
            make_folder(work)
            counters.build(table, work / "vocab", work / "counts")
            day = Counted.open(work / "vocab", work / "counts")
            num_dropped = self._base.extend(table, day, out, spec=spec, work=work)
            remove(work, within=self.work.out)
        found = Vocabulary.open(out / "vocab" / file_name(table), verify="header")
        return Table(
            name=table,
            num_embeddings=found.num_embeddings,
            num_keys=found.num_keys,
            key_kind=self._source.key_kinds[self._schema.features_of(table)[0]],
            missing_row=found.missing_row or None,
            num_dropped=num_dropped,
            vocabulary=found.id,
            parent=None if self._base is None else self._base.vocabulary_id(table),
        )

    def _encode(self, plan: SplitPlan, executor: Executor) -> PackedDataset:
        """Writes the parts that are not finished, then dataset.json."""
        info = self.dataset_info(plan)
        paths = {table.name: self.work.out / table.vocabulary_file for table in info.tables}
        with (
            EncoderPool(paths, self.work.fresh("encode"), memory_bytes=self._memory_bytes) as encoders,
            self.writer(info) as writer,
        ):
            first, left_out = self._first_unwritten(plan, writer)
            for _ in encoders.passes():
                for piece in _behind(self._pieces(plan, "match", first), left_out):
                    for spec in self._schema.categorical:
                        encoders[spec.table_name].add(spec.column, piece.chunk.keys[spec.column])
            tables = {table: encoders[table] for table in self._schema.table_names}
            transforms = [Transform.parse(column.transform) for column in info.dense]
            encode = RowEncoder(self._schema, transforms, tables, executor)
            counted = bool(self._schema.statistics)
            found = self._with_statistics(plan, first) if counted else self._pieces(plan, "encode", first)
            # The next rows are encoded while these are written.
            encoded = prefetch((piece, *encode(piece.chunk)) for piece in _behind(found, left_out))
            with closing(encoded):
                return self.write(writer, chain.from_iterable(by_split(*rows) for rows in encoded))

    def writer(self, info: DatasetInfo) -> PackedWriter:
        """The writer of the dataset."""
        options = self._options
        sizes = {"rows_per_part": options.rows_per_part, "rows_per_block": options.rows_per_block}
        return PackedWriter(self.work.out, info, **sizes)

    def write(self, writer: PackedWriter, encoded: Iterable[EncodedRows]) -> PackedDataset:
        """Writes encoded rows, as `by_split` yields them, then dataset.json."""
        for rows in encoded:
            writer.append(*rows)
        self._check_files_unchanged()
        self._say_left_out()
        unknown = {} if self._base is None else self._base.unknown(self.work.out, writer.info.tables, self._say)
        dataset = writer.close(self._summary() | unknown)
        self.work.remove()
        return dataset

    def _first_unwritten(self, plan: SplitPlan, writer: PackedWriter) -> tuple[int, NDArray[np.int64]]:
        """The stored row at which to go on, and how many rows of each split from there on are in finished parts."""
        finished = np.array([writer.finished_rows(split) for split in SPLITS])
        row, before = 0, np.zeros(len(SPLITS), np.int64)
        for numbers, times in self._rows.order(rows_per_chunk=self._options.rows_per_chunk) if finished.any() else ():
            more = before + np.bincount(plan.assign(numbers, times), minlength=len(SPLITS))
            if (more > finished).any():
                break
            row, before = row + len(numbers), more
        return row, finished - before

    def _with_statistics(self, plan: SplitPlan, first: int) -> Iterator[Piece]:
        """Yields the pieces from the row `first` on with their statistics as dense columns; if these are as of time,
        the rows before them are read too."""
        by_time = num_folds(self._schema) == 1
        found = self._pieces(plan, "encode", 0 if by_time else first)
        with ExitStack() as files:
            # Files without a name: their space is free as soon as the process ends, however it ends.
            lagged = [
                Lagged(self._earlier(), lag, files.enter_context(tempfile.TemporaryFile(dir=self.work.folder)))
                for lag in (() if self._lag is None else (self._lag, self._lag))
            ]
            row = 0 if by_time else first
            for piece in with_statistics(found, self._load_statistics(), self._earlier(), lagged):
                before, row = first - row, row + piece.chunk.num_rows
                if before <= 0:
                    yield piece
                elif row > first:
                    yield piece.some(np.arange(piece.chunk.num_rows) >= before)

    def _earlier(self) -> Statistics:
        """The statistics of earlier days, to which those of these rows come in the order of time."""
        if self._base is None:
            return Statistics(self._schema, strict=True)
        return self._base.statistics(self._schema, strict=True)

    def _say_left_out(self) -> None:
        known = self._known
        if num_rows := known.position.num_skipped:
            lines = [f"skipped {num_rows:,} bad rows" + (", for example:" if known.examples else ""), *known.examples]
            self._say("\n  ".join(lines))
        for line in known.cells.lines():
            self._say(line)

    def _summary(self) -> dict[str, Any]:
        """What dataset.json keeps of the preparation: what was counted, and what it said, which every run on it
        counts."""
        known = self._known
        told = {LEAK: list(self._opened.warnings), SCHEMA_GUESS: list(self._opened.choices)}
        notes = {code: texts for code, texts in told.items() if texts}
        skipped = known.position.num_skipped + known.cells.rows_left_out
        counts = {"rows_read": known.num_rows, "rows_skipped": skipped, **known.cells.summary()}
        kept = {"notes": notes, "left_out": dict(self._opened.left_out), "hours": self.work.results.hours}
        return counts | {name: value for name, value in kept.items() if value}

    def dataset_info(self, plan: SplitPlan) -> DatasetInfo:
        """What dataset.json says, without the parts."""
        found, schema = self.work.results, self._schema
        transforms, tables, checksums = found.transforms or (), found.tables or {}, found.checksums or ()
        transforms += tuple(str(transform) for spec in schema.statistics for transform in spec.transforms)
        sizes = (len(transforms), sorted(tables), len(checksums))
        if sizes != (len(schema.dense_inputs), sorted(schema.table_names), len(self.info.files)):
            raise ValueError(
                f"{self.work.folder / STATE}: transforms, tables and checksums are not of this schema and these "
                "files; start again with --overwrite"
            )
        dense = zip(schema.dense_inputs, transforms, strict=True)
        files = zip(self.info.files, checksums, strict=True)
        base = self._base
        day = {} if base is None else {"day": asdict(replace(base.day, last_time_s=found.last_time_s))}
        return DatasetInfo(
            name=self._source.name,
            labels=tuple(Label(spec.title, spec.kind) for spec in schema.labels),
            weight=None if schema.weight is None else schema.weight.column,
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
                **day,
            },
            sources=tuple(SourceFile(f.path, f.num_bytes, checksum) for f, checksum in files),
            licence=schema.licence,
        )

    def _check_files_unchanged(self) -> None:
        for file in self.info.files:
            path = Path(file.path)
            if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) != (file.num_bytes, file.mtime_ns):
                raise ValueError(f"{path} changed while it was being prepared; run again with --overwrite")

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted


def _lag_of(opened: OpenedSource) -> int | None:
    """Returns the lag of the statistics, in the unit of the rows' times. Raises ValueError if times have no unit."""
    seconds = opened.schema.statistics_lag_s
    if seconds is None:
        return None
    if not isinstance(opened.source, ColumnsSource):
        raise ValueError(f"statistics_lag: the rows of source {opened.source.name} have no times; leave it out")
    return opened.source.ticks(seconds)


def _behind(found: Iterator[Piece], left_out: NDArray[np.int64]) -> Iterator[Piece]:
    """Yields the pieces without the first rows of each split, as many as `left_out` says."""
    left = left_out.copy()
    for piece in found:
        kept = np.ones(piece.chunk.num_rows, np.bool_)
        for code in np.flatnonzero(left):
            of_split = np.flatnonzero(piece.codes == code)[: left[code]]
            kept[of_split] = False
            left[code] -= len(of_split)
        if kept.any():
            yield piece if kept.all() else piece.some(kept)

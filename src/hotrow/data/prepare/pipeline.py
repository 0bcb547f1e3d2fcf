"""Turns raw rows into a packed dataset: one pipeline for every source, in bounded memory, resumable at any point.

    read     every row, once: parts of canonical columns, in the order of time if statistics need it (rows.py)
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import make_folder, remove
from hotrow.base.files import crc32, explain_full_disk, file_name
from hotrow.base.machine import available_memory_bytes, usable_cores
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.data.chunk import Chunk, SourceInfo, select_rows
from hotrow.data.coded import column_of
from hotrow.data.packed.format import (
    ROWS_PER_BLOCK,
    STATISTICS,
    WORK_FOLDER,
    DatasetInfo,
    DenseColumn,
    Feature,
    Ids,
    Label,
    SourceFile,
    Table,
    select_ids,
)
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare.days import Base
from hotrow.data.prepare.encoder import EncoderPool, RowEncoder
from hotrow.data.prepare.extend import Counted
from hotrow.data.prepare.lag import Lagged
from hotrow.data.prepare.moments import Moments
from hotrow.data.prepare.rows import CURE, Rows, ingest, may_go_on
from hotrow.data.prepare.spill import CounterPool
from hotrow.data.prepare.statistics import Statistics, folds_of, num_folds, raw_transforms
from hotrow.data.prepare.workfolder import COUNTS, ROWS, STATE, WorkFolder
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.inputs import prefetch
from hotrow.data.sources.registry import OpenedSource, check_split
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.split import (
    TRAIN,
    Codes,
    RandomPlan,
    SplitPlan,
    TimeHistogram,
    plan_to_json,
    reference_plan,
)
from hotrow.data.transforms import Transform, fitted, is_fitted

ROWS_PER_CHUNK = 65_536
ROWS_PER_PART = 16 * ROWS_PER_BLOCK
"""Smaller than the writer's default: an interruption can cost one part, and small splits rarely finish parts."""
BUFFER_BYTES = 64 << 20
"""Part of the memory budget for rows in flight between reader and writer."""
MIN_MEMORY_BYTES = 128 << 20
MAX_HOURS = 50
"""Two days have up to 49 hours; of longer times days say enough."""
BY_FOLD = "by-fold.safetensors"
NOTHING_TRAINS = "no row is in the training split; use more rows, a larger sample or another split"
LEAK, SCHEMA_GUESS = "leak", "schema_guess"
"""The codes of the warnings that runs count for what preparation said of columns."""


class Interrupted(KeyboardInterrupt):
    """Preparation was stopped on request, and its state is kept."""


@dataclass(frozen=True)
class Piece:
    """The rows of one chunk, and what is drawn for them."""

    chunk: Chunk
    codes: Codes
    """Split of each row."""
    folds: NDArray[np.uint8] | None
    """Fold of each row, by which statistics are counted; None if there is one."""

    def some(self, mask: NDArray[np.bool_]) -> Piece:
        """The rows whose mask [num_rows] is set."""
        return Piece(select_rows(self.chunk, mask), self.codes[mask], None if self.folds is None else self.folds[mask])


@dataclass(frozen=True)
class Options:
    """What the caller may choose besides source, schema and folder; the second group changes no byte of the result."""

    rows: int | None = None
    """Number of first rows of the source to prepare. If None, all are prepared."""
    sample: float = 1.0
    """Share of rows to keep, chosen by a hash of the row number."""
    base: Base | None = None
    """What the rows extend, if they are a day of a chain; they are then read by its schema and encodings."""

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
    options, out, say = options or Options(), Path(out), announce or (lambda line: None)
    kept = f"What was finished is kept in {out / WORK_FOLDER}."
    check_split(opened)
    _lag_of(opened)
    info = opened.source.scout()
    if options.base is not None:
        options.base.check_is_new(info)
    work = _begin(opened, out, options, info, say)
    stages = _Stages(opened, work, options, info, rows or work.folder / ROWS, progress, say)
    with stages.cleaning(), explain_full_disk(out, "preparing", kept):
        return _stoppable(stages.run, work.folder)


def _begin(
    opened: OpenedSource, out: Path, options: Options, info: SourceInfo, say: Callable[[str], None]
) -> WorkFolder:
    """Returns new or unfinished work in `out`."""
    work = WorkFolder(out, _identity(opened, options, info), overwrite=options.overwrite)
    for note in (*opened.notes, *(() if options.base is None else options.base.notes())):
        say(f"note: {note}")
    if work.resumed:
        say(f"continuing the work found in {work.folder}")
    else:
        with explain_full_disk(out, "beginning", "Nothing had been kept yet."):
            work.begin()
    return work


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


class _Stages:
    """The stages on one work folder; a stage does nothing if its result is already there."""

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
        self._opened, self._work, self._options, self._base = opened, work, options, options.base
        self._source, self._schema, self._rows_folder = opened.source, opened.schema, rows_folder
        self._lag = _lag_of(opened)
        self._info, self._progress, self._say = info, progress, say
        memory_bytes = options.memory_bytes or available_memory_bytes() // 2
        self._memory_bytes = max(memory_bytes - BUFFER_BYTES, memory_bytes // 2)
        self._stop, self._open = threading.Event(), ExitStack()

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Removes what was made after an error in the data, if there is nothing in it to continue from."""
        try:
            yield
        except ValueError:
            if may_go_on(self._rows_folder):
                where = self._rows_folder
                self._say(f"what was read is kept in {where}: the same command, also with --skip-bad-rows, continues")
            elif self._work.results.tables is None:
                remove(self._rows_folder)
                self._work.abandon()
            raise

    def run(self, stop: threading.Event) -> PackedDataset:
        """Runs all stages and returns the dataset. Raises Interrupted soon after `stop` is set, with the state
        saved."""
        self._stop = stop
        threads = self._options.threads or min(8, max(1, usable_cores()))
        with ThreadPoolExecutor(threads, thread_name_prefix="hotrow-encode") as executor, self._open:
            self._rows = self._read()
            plan = self._plan()
            if self._work.results.tables is None:
                self._count(plan, executor)
            return self._encode(plan, executor)

    def _read(self) -> Rows:
        """Reads the source into parts."""
        options, meter = self._options, self._meter("read", min(self._info.num_rows, self._options.rows or 1 << 62))
        rows = ingest(
            self._opened,
            self._rows_folder,
            info=self._info,
            rows=options.rows,
            sample=options.sample,
            by_time=self._is_as_of_time,
            memory_bytes=self._memory_bytes,
            rows_per_chunk=options.rows_per_chunk,
            beside_bytes=0 if self._base is None else self._base.num_bytes,
            check_stop=self._check_stop,
            report=meter.update,
            say=self._say,
        )
        meter.finish(rows.known.num_rows)
        rows.known.cells.check(self._schema.odd_share)
        if not len(rows):
            raise ValueError(NOTHING_TRAINS)
        return rows

    def _plan(self) -> SplitPlan:
        """Decides which rows train."""
        split = self._schema.split
        kind = split.kind or ("time" if self._schema.time is not None else "random")
        if kind == "random":
            return RandomPlan(split.seed, split.fractions)
        if kind == "reference":
            return reference_plan(self._rows.known.rows_of_files)
        histogram = TimeHistogram()
        for _, times in self._rows.order():
            assert times is not None, "the schema has a time column"
            histogram.add(times)
        return histogram.plan(split.fractions)

    @property
    def _is_as_of_time(self) -> bool:
        """Whether inputs of a row are counted as of its time."""
        has_time = self._schema.time is not None and not isinstance(self._source, CriteoSource)
        return has_time and bool(self._schema.statistics)

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
        for chunk, numbers in self._open.enter_context(closing(prefetch(chunks))):
            yield Piece(chunk, plan.assign(numbers, chunk.time), folds_of(self._schema, numbers))

    def _count(self, plan: SplitPlan, executor: Executor) -> None:
        """Counts the training rows; writes vocabularies, counts, statistics and transforms."""
        with CounterPool(self._work.folder / COUNTS, memory_bytes=self._memory_bytes, executor=executor) as counters:
            for table in self._schema.table_names:
                for feature in self._schema.features_of(table):
                    cap = self._schema.table(table).hash_cap or 0
                    counters.declare(table, self._source.key_kinds[feature], hash_cap=cap)
            statistics = Statistics(self._schema, num_folds=num_folds(self._schema))
            moments, hours = self._count_rows(plan, counters, statistics)
            last, day = self._rows.known.last_time, self._ticks_of_day()
            last_time_s = None if self._base is None or last is None or not day else last * 86_400 / day
            checksums = tuple(self._checksums())
            if self._base is not None:
                self._base.check_is_later(last_time_s)
                self._base.check_is_no_earlier_day(self._info, checksums)
            self._save_statistics(statistics)
            self._work.save(
                transforms=self._transforms(moments),
                tables={name: self._build(counters, name) for name in self._schema.table_names},
                hours=hours,
                last_time_s=last_time_s,
                checksums=checksums,
            )

    def _count_rows(
        self, plan: SplitPlan, counters: CounterPool, statistics: Statistics
    ) -> tuple[dict[str, Moments], list[list[int]]]:
        """Counts ids and labels; returns the moments of the columns whose transforms are fitted to training rows, and
        when each hour of these rows begins."""
        names = self._schema.dense_names
        moments = {spec.column: Moments() for spec in self._schema.dense if is_fitted(spec.transform)}
        hours, train_rows = Hours(self._ticks_of_day()), 0
        for piece in self._pieces(plan, "count"):
            is_train, chunk = piece.codes == TRAIN, piece.chunk
            self._count_piece(counters, chunk, is_train)
            if self._schema.statistics:
                # With a lag, rows to score see all rows, as they would a long time after the last one.
                counted = is_train if self._lag is None else np.ones_like(is_train)
                statistics.add(chunk, counted, piece.folds)
            for name, sums in moments.items():
                sums.add(chunk.dense[is_train, names.index(name)])
            if chunk.time is not None:
                hours.add(chunk.time[is_train])
            train_rows += int(is_train.sum())
        if not train_rows:
            raise ValueError(NOTHING_TRAINS)
        return moments, hours.found()

    def _ticks_of_day(self) -> int:
        """A day in the unit of the rows' times; 0 if it is not known."""
        if self._schema.time is not None and isinstance(self._source, ColumnsSource):
            with suppress(ValueError):
                return self._source.ticks(86_400)
        return 0

    def _checksums(self) -> Iterator[str]:
        """Yields the crc32 of each local file as stored, which is read for it only if reading did not reach its end; ""
        for anything else."""
        known = {file.name: file.known.get("crc32") for file in getattr(self._source, "files", ())}
        for file in self._info.files:
            crc = known.get(file.path)
            if Path(file.path).is_file():
                yield f"crc32:{crc32(Path(file.path).resolve()) if crc is None else crc:08x}"
            else:
                yield ""

    def _transforms(self, moments: dict[str, Moments]) -> tuple[str, ...]:
        if self._base is not None and self._base.dataset is not None:
            return self._base.transforms
        return tuple(
            str(fitted(spec.transform, moments[spec.column]) if spec.column in moments else Transform(spec.transform))
            for spec in self._schema.dense
        )

    def _save_statistics(self, own: Statistics) -> None:
        """Writes the statistics of all training rows into the dataset, and those by fold into the work folder."""
        if self._schema.statistics:
            path = self._work.out / STATISTICS
            make_folder(path.parent, within=self._work.out)
            found = own if self._base is None else own.with_earlier(self._base.statistics(self._schema))
            found.save(self._work.folder / BY_FOLD)
            found.total().save(path)

    def _load_statistics(self) -> Statistics:
        """The statistics by fold; those of the rows of earlier days are one fold more."""
        folds = num_folds(self._schema)
        folds += self._base is not None and folds > 1
        return Statistics.load(self._schema, self._work.folder / BY_FOLD, num_folds=folds, cure=CURE)

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
            make_folder(self._work.out / folder, within=self._work.out)
        path = self._work.out / "vocab" / file_name(table)
        spec, counts_path = self._schema.table(table), self._work.out / "counts" / file_name(table)
        if self._base is None:
            summary = counters.build(table, path, counts_path, min_count=spec.min_count)
            num_dropped = summary.num_distinct - summary.num_keys
        else:
            work = self._work.fresh(f"day-{file_name(table)}")
            make_folder(work)
            counters.build(table, work / "vocab", work / "counts")
            day = Counted.open(work / "vocab", work / "counts")
            num_dropped = self._base.extend(table, day, self._work.out, spec=spec, work=work)
            remove(work, within=self._work.out)
        found = Vocabulary.open(path, verify="header")
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
        info, options = self._dataset_info(plan), self._options
        paths = {table.name: self._work.out / table.vocabulary_file for table in info.tables}
        sizes = {"rows_per_part": options.rows_per_part, "rows_per_block": options.rows_per_block}
        with (
            EncoderPool(paths, self._work.fresh("encode"), memory_bytes=self._memory_bytes) as encoders,
            PackedWriter(self._work.out, info, **sizes) as writer,
        ):
            first, left_out = self._first_unwritten(plan, writer)
            if encoders.needs_occurrences:
                for piece in _behind(self._pieces(plan, "match", first), left_out):
                    for spec in self._schema.categorical:
                        encoders[spec.table_name].add(spec.column, piece.chunk.keys[spec.column])
                encoders.finish()
            transforms = raw_transforms(self._schema, [Transform.parse(column.transform) for column in info.dense])
            tables = {table: encoders[table] for table in self._schema.table_names}
            encode = RowEncoder(self._schema, transforms, tables, executor)
            pieces = self._pieces(plan, "encode", first)
            if self._schema.statistics:
                pieces = self._with_statistics(pieces, plan, first)
            # The next rows are encoded while these are written.
            encoded = prefetch((piece, *encode(piece.chunk)) for piece in _behind(pieces, left_out))
            with closing(encoded):
                for piece, dense, ids in encoded:
                    self._write_piece(piece, dense, ids, writer)
            self._check_files_unchanged()
            self._say_left_out()
            unknown = {} if self._base is None else self._base.unknown(self._work.out, info.tables, self._say)
            dataset = writer.close(self._summary() | unknown)
        self._work.remove()
        return dataset

    def _first_unwritten(self, plan: SplitPlan, writer: PackedWriter) -> tuple[int, NDArray[np.int64]]:
        """The stored row at which to go on, and how many rows of each split from there on are in finished parts."""
        finished = np.array([writer.finished_rows(split) for split in SPLITS])
        row, before = 0, np.zeros(len(SPLITS), np.int64)
        for numbers, times in self._rows.order(self._options.rows_per_chunk) if finished.any() else ():
            more = before + np.bincount(plan.assign(numbers, times), minlength=len(SPLITS))
            if (more > finished).any():
                break
            row, before = row + len(numbers), more
        return row, finished - before

    def _with_statistics(self, pieces: Iterator[Piece], plan: SplitPlan, first: int) -> Iterator[Piece]:
        """Yields the pieces from the row `first` on with their statistics as dense columns; if rows have a time, those
        before it are read for them."""
        after = self._load_statistics()
        if after.num_folds > 1:
            total = Statistics.load(self._schema, self._work.out / STATISTICS, cure=CURE)
            for piece in pieces:
                assert piece.folds is not None, "folds_of gives them"
                chunk = after.joined_out_of_fold(piece.chunk, piece.codes == TRAIN, piece.folds, total)
                yield replace(piece, chunk=chunk)
            return
        before = Statistics(self._schema) if self._base is None else self._base.statistics(self._schema)
        # A file without a name: its space is free as soon as the process ends, however it ends.
        with tempfile.TemporaryFile(dir=self._work.folder) as file:
            lagged = None if self._lag is None else Lagged(self._schema, self._lag, file)
            for piece in self._pieces(plan, "encode", 0, first) if first else ():
                before.add(piece.chunk, piece.codes == TRAIN)
                if lagged is not None:
                    lagged.add(piece.chunk)
            for piece in pieces:
                trains = piece.codes == TRAIN
                chunk = before.joined_to(piece.chunk, trains, after)
                if lagged is not None:
                    chunk = lagged.joined_to(piece.chunk, ~trains, chunk)
                yield replace(piece, chunk=chunk)

    def _say_left_out(self) -> None:
        known = self._rows.known
        if num_rows := known.position.num_skipped:
            lines = [f"skipped {num_rows:,} bad rows" + (", for example:" if known.examples else ""), *known.examples]
            self._say("\n  ".join(lines))
        for line in known.cells.lines():
            self._say(line)

    def _summary(self) -> dict[str, Any]:
        """What dataset.json keeps of the preparation: what was counted, and what it said, which every run on it
        counts."""
        known = self._rows.known
        told = {LEAK: list(self._opened.warnings), SCHEMA_GUESS: list(self._opened.choices)}
        notes = {code: texts for code, texts in told.items() if texts}
        skipped = known.position.num_skipped + known.cells.rows_left_out
        counts = {"rows_read": known.num_rows, "rows_skipped": skipped, **known.cells.summary()}
        kept = {"notes": notes, "left_out": dict(self._opened.left_out), "hours": self._work.results.hours}
        return counts | {name: value for name, value in kept.items() if value}

    @staticmethod
    def _write_piece(piece: Piece, dense: NDArray[np.float32], ids: Mapping[str, Ids], writer: PackedWriter) -> None:
        """Appends the rows of a piece, which were encoded, to their splits."""
        label, weight = piece.chunk.label, piece.chunk.weight
        assert label is not None, "a source for preparation has labels"
        for code, split in enumerate(SPLITS):
            chosen = piece.codes == code
            if chosen.any():
                part = {name: select_ids(column, chosen) for name, column in ids.items()}
                own = None if weight is None else weight[chosen]
                writer.append(split, label[chosen], dense[chosen], part, own)

    def _dataset_info(self, plan: SplitPlan) -> DatasetInfo:
        found, schema = self._work.results, self._schema
        transforms, tables, checksums = found.transforms or (), found.tables or {}, found.checksums or ()
        transforms += tuple(str(transform) for spec in schema.statistics for transform in spec.transforms)
        sizes = (len(transforms), sorted(tables), len(checksums))
        if sizes != (len(schema.dense_inputs), sorted(schema.table_names), len(self._info.files)):
            raise ValueError(
                f"{self._work.folder / STATE}: transforms, tables and checksums are not of this schema and these "
                "files; start again with --overwrite"
            )
        dense = zip(schema.dense_inputs, transforms, strict=True)
        files = zip(self._info.files, checksums, strict=True)
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
                **(
                    {}
                    if self._base is None
                    else {"day": asdict(replace(self._base.day, last_time_s=found.last_time_s))}
                ),
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


def _lag_of(opened: OpenedSource) -> int | None:
    """Returns the lag of the statistics, in the unit of the rows' times. Raises ValueError if times have no unit."""
    seconds = opened.schema.statistics_lag_s
    if seconds is None:
        return None
    if not isinstance(opened.source, ColumnsSource):
        raise ValueError(f"statistics_lag: the rows of source {opened.source.name} have no times; leave it out")
    return opened.source.ticks(seconds)


def _behind(pieces: Iterator[Piece], left_out: NDArray[np.int64]) -> Iterator[Piece]:
    """Yields the pieces without the first rows of each split, as many as `left_out` says."""
    left = left_out.copy()
    for piece in pieces:
        kept = np.ones(piece.chunk.num_rows, np.bool_)
        for code in np.flatnonzero(left):
            of_split = np.flatnonzero(piece.codes == code)[: left[code]]
            kept[of_split] = False
            left[code] -= len(of_split)
        if kept.any():
            yield piece if kept.all() else piece.some(kept)


class Hours:
    """Finds out where each hour begins while times come in order. day: in the unit of the times, at least 24; 0 if it
    is not known."""

    def __init__(self, day: int) -> None:
        self._day, self._row, self._rises = day, 0, True
        self._last: int | None = None
        self._begins: list[list[int]] = []

    def add(self, times: NDArray[np.int64]) -> None:
        """Looks at the times of the next rows."""
        if not len(times) or not self._day:
            return
        self._rises &= bool((self._last is None or self._last <= times[0]) and (times[1:] >= times[:-1]).all())
        if self._rises:
            hours = times // max(1, self._day // 24)
            at = np.flatnonzero(np.diff(hours, prepend=self._begins[-1][0] if self._begins else hours[:1] - 1))
            self._begins += np.stack([hours[at], at + self._row], axis=1).tolist()
        self._row, self._last = self._row + len(times), int(times[-1])

    def found(self) -> list[list[int]]:
        """The seconds since 1970 at which each hour begins, and its first row; of many hours, those of days. Nothing if
        rows are not in order, of one hour, or of too many days."""
        begins = [(hour * max(1, self._day // 24) * 86_400 // self._day, row) for hour, row in self._begins]
        for step in (3600, 86_400) if self._rises else ():
            found = {second // step * step: row for second, row in reversed(begins)}
            if 1 < len(found) <= MAX_HOURS:
                return [list(begin) for begin in sorted(found.items())]
        return []

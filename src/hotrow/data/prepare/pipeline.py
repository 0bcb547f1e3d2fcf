"""Turns raw rows into a packed dataset: one pipeline for every source, in bounded memory, resumable at any point.

    scan     which rows train: exact row counts or times, if the split or statistics need them
    sort     every row, if statistics need the order of time and the rows come in another
    count    training rows only: how often each id occurs -> vocabularies, rows ranked by popularity
    encode   every row: ids -> row numbers, dense transforms -> the writer; dataset.json last

Everything a model will know about its ids and statistics comes from training rows, and with `statistics_lag` from older
rows: no byte of the training split depends on another split's labels, ids or numbers (law 6). Results depend on the
rows and options alone, not on threads, ranks, memory, chunks or interruptions. Unfinished work is in `<out>/.prepare`;
see docs/prepare.md. `shares.py` says how several ranks divide the work.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import make_folder, remove
from hotrow.base.files import explain_full_disk, file_name
from hotrow.base.machine import available_memory_bytes, usable_cores, versions
from hotrow.base.progress import ProgressCallback, ProgressMeter
from hotrow.base.records import STRICT, Count, checked
from hotrow.data.chunk import Chunk, Position, SkippedRows, SourceInfo, select_rows
from hotrow.data.coded import column_of
from hotrow.data.packed.format import (
    ROWS_PER_BLOCK,
    STATISTICS,
    WORK_FOLDER,
    DatasetInfo,
    DenseColumn,
    Feature,
    Label,
    Part,
    SourceFile,
    Table,
    select_ids,
)
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.vocabulary import Vocabulary
from hotrow.data.packed.writer import PackedWriter
from hotrow.data.prepare.cells import CellCounts
from hotrow.data.prepare.days import Base
from hotrow.data.prepare.encoder import EncoderPool, RowEncoder
from hotrow.data.prepare.estimate import estimate_work
from hotrow.data.prepare.extend import Counted
from hotrow.data.prepare.lag import Lagged
from hotrow.data.prepare.moments import Moments, MomentsRecord
from hotrow.data.prepare.shares import (
    Interrupted,
    Piece,
    Share,
    find_share,
    joined_marks,
    mark_before,
    part_ranges,
    rows_within,
    together,
)
from hotrow.data.prepare.spill import MAX_RUNS, SNAPSHOT, CounterPool
from hotrow.data.prepare.statistics import Statistics, folds_of, num_folds, raw_transforms
from hotrow.data.prepare.timesort import Hours, TimeOrder, TimeSort, hours_of, is_rising, sorted_pieces
from hotrow.data.prepare.workfolder import (
    COUNTS,
    CURE,
    RESULTS,
    ROWS,
    SORTED,
    STATE,
    Mark,
    SilentWork,
    Sorted,
    WorkFolder,
)
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.registry import OpenedSource, check_split, rows_per_file
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.split import (
    TRAIN,
    RandomPlan,
    SplitPlan,
    TimeHistogram,
    plan_to_json,
    reference_plan,
    sample_mask,
)
from hotrow.data.transforms import Transform, fitted, is_fitted
from hotrow.kernels import ops
from hotrow.parallel.agreement import CommonError, check_same, everyone, on_every_rank
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.gloo import unnamed_interface
from hotrow.parallel.heartbeat import Heartbeat

"""Sources of which ranks can read a part each."""
ROWS_PER_CHUNK = 65_536
ROWS_PER_PART = 16 * ROWS_PER_BLOCK
"""Smaller than the writer's default: an interruption can cost one part, and small splits rarely finish parts."""
SNAPSHOT_EVERY_S = 120.0
"""Seconds between snapshots of counting; longer if writing one takes more than a tenth of that."""
BUFFER_BYTES = 64 << 20
"""Part of the memory budget for rows in flight between reader and writer."""
MIN_MEMORY_BYTES = 128 << 20
CHECKSUM_BLOCK_BYTES = 1 << 22
NO_TIME = -(1 << 63)
LEAK, SCHEMA_GUESS = "leak", "schema_guess"
"""The codes of the warnings that runs count for what preparation said of columns."""


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


def prepare(
    opened: OpenedSource,
    out: Path | str,
    options: Options | None = None,
    *,
    progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
    comm: Communicator | None = None,
) -> PackedDataset:
    """Prepares `opened` into the folder `out` and returns the dataset; see the module's docstring.

    progress: called with a `Progress` a few times a second. announce: called with lines for the user: what was found,
    what it will take, what was resumed or skipped. comm: ranks that share the work and see the same files and the same
    `out`; all call this with equal arguments, but for the two before. If None, this process works alone.

    Raises ValueError if the source has a bad row or file, if `out` holds a dataset or other work, or if the disk is too
    small; OSError when the disk is full (with several ranks, ValueError on all); Interrupted on Ctrl-C. After the last
    two, and after a bad row that came later than a snapshot, the same call continues where it stopped; otherwise
    nothing is left behind.
    """
    comm, options = comm or Communicator(), options or Options()
    kept = f"What was finished is kept in {Path(out) / WORK_FOLDER}."
    # What is left behind is removed last: a rank that has failed has little time to tell the others.
    heartbeat = Heartbeat(comm, cure="Run the same command again", kept=kept, together=(CommonError, Interrupted))
    with ExitStack() as last, heartbeat:
        stages = _begun(opened, Path(out), options, progress, announce or (lambda line: None), comm)
        last.enter_context(stages.cleaning())
        with explain_full_disk(Path(out), "preparing", kept):
            return _stoppable(stages.run, Path(out) / WORK_FOLDER)


def _begun(
    opened: OpenedSource,
    out: Path,
    options: Options,
    progress: ProgressCallback | None,
    say: Callable[[str], None],
    comm: Communicator,
) -> _Stages:
    """Returns the stages of new or unfinished work in `out`, whose state the first rank keeps. Collective."""

    def scout() -> SourceInfo:
        """What cannot work is refused before anything is made."""
        check_split(opened)
        _lag_of(opened)
        info = opened.source.scout()
        if options.base is not None:
            options.base.check_is_new(info)
        return info

    def begin() -> WorkFolder | None:
        return _begin(opened, out, options, source_info, say) if comm.rank == 0 else None

    source_info = on_every_rank(comm, scout)
    _check_same(comm, _identity(opened, options, source_info), say)
    work = on_every_rank(comm, begin)
    known = everyone(comm, None if work is None else asdict(work.results))[0]
    if work is None:
        work = SilentWork(out, checked(RESULTS, known, where="what rank 0 says", cure=CURE))
    return _Stages(opened, work, options, source_info, progress, say, comm)


def _check_same(comm: Communicator, identity: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Raises ValueError on every rank if ranks differ in what they are to prepare; warns of a guessed network."""
    if comm.size == 1:
        return
    facts = {f"file {name}": found for name, found in identity["files"].items()}
    facts |= {name: value for name, value in identity.items() if name != "files"}
    facts |= {"the version of hotrow": versions()["hotrow"], "the instruction set": ops.backend().isa}
    check_same(comm, facts, cure="start every rank with the same command, where all see the same files")
    if (guessed := unnamed_interface(comm)) and comm.rank == 0:
        say(f"warning: {guessed}")


def _begin(
    opened: OpenedSource, out: Path, options: Options, info: SourceInfo, say: Callable[[str], None]
) -> WorkFolder:
    work = WorkFolder(out, _identity(opened, options, info), overwrite=options.overwrite)
    for note in (*opened.notes, *(() if options.base is None else options.base.notes())):
        say(f"note: {note}")
    if work.resumed:
        say(f"continuing the work found in {work.folder}")
    else:
        estimate = estimate_work(opened, info, out, rows=options.rows, sample=options.sample)
        if options.base is not None:
            estimate = replace(estimate, packed_bytes=estimate.packed_bytes + options.base.num_bytes)
        say(str(estimate))
        estimate.check_disk(out)
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


@record(frozen=True, config=STRICT)
class _Counted:
    """How far counting of the training rows has got."""

    position: Position | None = None
    row: Count = 0
    train_rows: Count = 0
    moments: dict[str, MomentsRecord] = Field(default_factory=dict)
    """Moments of the columns whose transforms are fitted to training rows, by column."""
    cells: CellCounts = Field(default_factory=CellCounts)
    """Missing and odd cells of all rows."""
    latest: int = NO_TIME
    """The latest time of a row."""
    hours: Hours = Field(default_factory=Hours)
    """Where hours of the training rows begin, if their times are of a known unit."""
    done: bool = False
    first: Count = 0
    """`row` at the beginning."""
    marks: list[Mark] = Field(default_factory=list)
    """The ends of this rank's chunks, and of its share."""

    def moments_of(self, column: str) -> Moments:
        """Returns the moments of a column so far."""
        return Moments.from_record(self.moments[column]) if column in self.moments else Moments()


_COUNTED = TypeAdapter(_Counted)
_PARTS = TypeAdapter(dict[str, tuple[Part, ...]])


class _Stages:
    """The stages on one work folder; a stage does nothing if its result is already there."""

    def __init__(
        self,
        opened: OpenedSource,
        work: WorkFolder,
        options: Options,
        info: SourceInfo,
        progress: ProgressCallback | None,
        say: Callable[[str], None],
        comm: Communicator,
    ) -> None:
        self._opened, self._work, self._options, self._comm, self._base = opened, work, options, comm, options.base
        self._source, self._schema = opened.source, opened.schema
        self._lag = _lag_of(opened)
        self._info, self._progress, self._say = info, progress, say
        self._rows_total = min(info.num_rows, options.rows or info.num_rows)
        memory_bytes = options.memory_bytes or available_memory_bytes() // 2 // comm.ranks.local_size
        self._memory_bytes = max(memory_bytes - BUFFER_BYTES, memory_bytes // 2)
        self._stop = threading.Event()
        self._share, self._rows_per_file = Share(), list[int]()

    @contextmanager
    def cleaning(self) -> Iterator[None]:
        """Removes the work folder after an error in the data, if there is nothing in it to continue from."""
        try:
            yield
        except ValueError:
            if not self._work.abandon():
                folder = self._work.folder
                self._say(f"the counts are kept in {folder}: the same command, also with --skip-bad-rows, continues")
            raise

    def run(self, stop: threading.Event) -> PackedDataset:
        """Runs all stages and returns the dataset. Raises Interrupted soon after `stop` is set, with the state
        saved."""
        self._stop = stop
        with ExitStack() as stack:
            threads = self._options.threads or min(8, max(1, usable_cores() // self._comm.ranks.local_size))
            executor = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="hotrow-encode"))
            if self._work.results.tables is None:
                self._find_share()
            plan = self._work.results.plan
            if plan is None:
                plan, in_order = self._plan()
                self._work.save(plan=plan, in_order=in_order)
            if not self._work.results.in_order:
                self._sort(plan)
            if self._work.results.tables is None:
                self._count(plan, executor)
            return self._encode(plan, executor)

    @property
    def _split_kind(self) -> str:
        return self._schema.split.kind or ("time" if self._schema.time is not None else "random")

    def _find_share(self) -> None:
        """Finds which rows this rank counts. With --rows the first one counts them all: it is for a first look."""
        if self._comm.size == 1 or self._work.results.sorted is not None:
            return
        limit = self._options.rows
        is_whole = limit is not None and not (self._info.num_rows_exact and limit >= self._info.num_rows)
        numbered = self._split_kind != "time" or self._options.sample < 1
        self._share, self._rows_per_file = find_share(
            self._comm, self._source, self._stop, is_whole=is_whole, numbered=numbered
        )

    def _plan(self) -> tuple[SplitPlan, bool]:
        """Decides which rows train, and whether the rows can be counted as they come; reads as much of the source as
        that takes."""
        split, in_order = self._schema.split, True
        if self._split_kind == "time" or self._is_as_of_time:
            histogram, order = together(self._comm, self._scan, self._stop)
            in_order = not self._is_as_of_time or is_rising(everyone(self._comm, asdict(order)))
        if self._split_kind == "random":
            return RandomPlan(split.seed, split.fractions), in_order
        if self._split_kind == "reference":
            files = self._rows_per_file or self._count_files()
            return reference_plan(_first_rows(files, self._options.rows)), in_order
        found = everyone(self._comm, [histogram.shift, histogram.buckets.tolist(), histogram.counts.tolist()])
        for shift, buckets, counts in found[: self._comm.rank] + found[self._comm.rank + 1 :]:
            histogram.merge(shift, np.array(buckets, np.int64), np.array(counts, np.int64))
        return histogram.plan(split.fractions), in_order

    @property
    def _is_as_of_time(self) -> bool:
        """Whether inputs of a row are counted as of its time."""
        has_time = self._schema.time is not None and not isinstance(self._source, CriteoSource)
        return has_time and bool(self._schema.statistics)

    def _count_files(self) -> list[int]:
        """Counts the rows of each file, on the first rank."""

        def count() -> list[int]:
            return rows_per_file(self._opened) if self._comm.rank == 0 else []

        found: list[int] = everyone(self._comm, together(self._comm, count, self._stop))[0]
        return found

    def _scan(self) -> tuple[TimeHistogram, TimeOrder]:
        """Counts the times of this rank's rows, and looks at their order."""
        histogram, order, meter = TimeHistogram(), TimeOrder(), self._meter("scan")
        limit, num_rows = self._options.rows, 0
        # Rows take the place of bad ones, whose times may be good.
        for times in _limited(self._times(), None if limit is None else limit + self._source.skip_bad_rows):
            order.add(times)
            histogram.add(times if limit is None else times[: max(limit - num_rows, 0)])
            num_rows += len(times)
            self._check_stop()
            meter.update(num_rows)
        meter.finish(num_rows)
        return histogram, order

    def _sort(self, plan: SplitPlan) -> None:
        """Puts the rows in the order of time, and divides them between the ranks anew. Collective."""
        comm = self._comm
        if self._work.results.sorted is None:
            found = everyone(comm, together(comm, lambda: self._sort_rows(plan), self._stop))[0]
            self._work.save(sorted=checked(SORTED, found, where="what rank 0 says", cure=CURE))
            self._say("the rows do not come in the order of time: they were sorted by it, as `statistics` need it")
        found = self._work.results.sorted
        assert found is not None
        self._rows_total = found.num_rows
        if comm.size > 1:
            first, last = (found.num_rows * rank // comm.size for rank in (comm.rank, comm.rank + 1))
            start, stop = (Position(0, row, row, found.num_skipped) for row in (first, last))
            self._share = Share(start, stop, first)

    def _sort_rows(self, plan: SplitPlan) -> dict[str, Any] | None:
        """Writes the rows in the order of time, on the first rank, and returns the record of them."""
        if self._comm.rank:
            return None
        row, position, cells = 0, Position(), CellCounts()
        # A file without a name: its space is free as soon as the process ends, however it ends.
        with tempfile.TemporaryFile(dir=self._work.folder) as runs:
            sort = TimeSort(runs, memory_bytes=self._memory_bytes)
            for piece in self._reported("sort", 0, self._pieces(plan, None, 0)):
                sort.add(piece)
                cells = cells.with_chunk(piece.chunk, self._schema.dense_names)
                row, position = piece.next_row, piece.chunk.position
                self._check_stop()
            num_rows = sort.write(self._work.folder / ROWS, self._check_stop)
        examples, odd = tuple(self._source.skipped.examples), replace(cells, num_rows=0, missing={})
        return asdict(Sorted(num_rows, row, self._num_skipped(row, position), examples, odd))

    @property
    def _skipped(self) -> SkippedRows:
        """Bad rows so far; sorting has met all of them."""
        found = self._work.results.sorted
        return self._source.skipped if found is None else SkippedRows(found.num_skipped, list(found.examples))

    def _meter(self, stage: str, row: int = 0) -> ProgressMeter:
        """Returns what reports on a stage that begins at `row`; several ranks count from their own first rows."""
        total = self._work.results.rows_total or self._rows_total
        return ProgressMeter(self._progress, stage, total // self._comm.size, row if self._comm.size == 1 else 0)

    def _times(self) -> Iterator[NDArray[np.int64]]:
        if isinstance(self._source, ColumnsSource):
            yield from self._source.times(self._share.start, self._share.stop)
            return
        for chunk in self._source.chunks(self._share.start, stop=self._share.stop):
            assert chunk.time is not None, "the schema has a time column"
            yield chunk.time

    def _reported(self, stage: str, row: int, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces of a stage that begins at `row`, and reports how far it has got."""
        meter, first = self._meter(stage, row), row if self._comm.size > 1 else 0
        for piece in pieces:
            yield piece
            row = piece.next_row
            meter.update(row - first)
        meter.finish(row - first)

    def _pieces(
        self, plan: SplitPlan, start: Position | None, row: int, *, stop: Position | None = None
    ) -> Iterator[Piece]:
        """Yields the data set's rows from source row `row` on, before `stop`; `start` is that row's position.

        Rows that were sorted are numbered as they are stored, and so are positions.
        """
        options = self._options
        if (found := self._work.results.sorted) is not None:
            path, size = self._work.folder / ROWS, options.rows_per_chunk
            yield from sorted_pieces(path, found, self._schema, start, stop, rows_per_chunk=size)
            return
        for chunk in self._source.chunks(start, rows_per_chunk=options.rows_per_chunk, stop=stop):
            if options.rows is not None and row + chunk.num_rows > options.rows:
                chunk = select_rows(chunk, np.arange(chunk.num_rows) < options.rows - row)
            codes = plan.assign(row, chunk.num_rows, chunk.time)
            folds = folds_of(self._schema, row, chunk.num_rows)
            first, row = row, row + chunk.num_rows
            if options.sample < 1:
                kept = sample_mask(self._schema.split.seed, first, chunk.num_rows, fraction=options.sample)
                chunk, codes, folds = select_rows(chunk, kept), codes[kept], None if folds is None else folds[kept]
            yield Piece(chunk, codes, row, folds)
            if row == options.rows:
                break

    def _count(self, plan: SplitPlan, executor: Executor) -> None:
        """Counts the training rows; writes vocabularies, counts and transforms."""
        comm, share = self._comm, self._share
        start, folder = share.start or Position(), self._work.folder / COUNTS
        if comm.size > 1:  # what is kept holds for the same share only
            folder = folder.with_name(f"{COUNTS}-{comm.rank}-of-{comm.size}-{share.row}-{start.num_skipped}")
        with (
            ThreadPoolExecutor(1, thread_name_prefix="hotrow-checksum") as beside,
            CounterPool(folder, memory_bytes=self._memory_bytes, executor=executor, rank=comm.rank) as counters,
        ):
            # In its own thread: if the executor has only one, it would hold up the counting there.
            paths = [f.path for f in self._info.files]
            checksums = beside.submit(_checksums, paths[comm.rank :: comm.size], self._stop)
            for table in self._schema.table_names:
                for feature in self._schema.features_of(table):
                    cap = self._schema.table(table).hash_cap or 0
                    counters.declare(table, self._source.key_kinds[feature], hash_cap=cap)
            found = self._work.results.sorted
            cells = CellCounts() if found is None or comm.rank else found.cells
            state = _Counted(share.start, share.row, cells=cells, hours=Hours(day=self._ticks_of_day()))
            statistics = Statistics(self._schema, num_folds=num_folds(self._schema))
            if counters.progress is not None:
                state = checked(_COUNTED, counters.progress, where=f"{folder / SNAPSHOT}: progress", cure=CURE)
                if self._schema.statistics:
                    statistics = self._load_statistics(_statistics_file(folder, state.row))

            def count() -> _Counted:
                return state if state.done else self._count_rows(plan, counters, state, statistics)

            states = self._states_of_ranks(together(comm, count, self._stop))
            if not any(each.train_rows for each in states):
                raise ValueError("no row is in the training split; use more rows, a larger sample or another split")
            cells = reduce(CellCounts.merged, (each.cells for each in states))
            cells.check(self._schema.odd_share)
            latest, day = max(each.latest for each in states), self._ticks_of_day()
            last_time_s = latest * 86_400 / day if self._base is not None and day and latest != NO_TIME else None
            if self._base is not None:
                self._base.check_is_later(last_time_s)
            self._save_statistics(folder, states, statistics)
            results = {"transforms": self._transforms(states), "tables": self._build_tables(counters), "cells": cells}
            of_ranks = everyone(comm, together(comm, checksums.result, self._stop))
            in_order = tuple(of_ranks[i % comm.size][i // comm.size] for i in range(len(paths)))
            if self._base is not None:
                self._base.check_is_no_earlier_day(self._info, in_order)
            results["hours"] = hours_of([(each.hours, each.train_rows) for each in states])
            self._work.save(**results, last_time_s=last_time_s, checksums=in_order, **self._rows_of(states))

    def _ticks_of_day(self) -> int:
        """Returns a day in the unit of the rows' times; 0 if it is not known."""
        if self._schema.time is not None and isinstance(self._source, ColumnsSource):
            with suppress(ValueError):
                return self._source.ticks(86_400)
        return 0

    def _states_of_ranks(self, state: _Counted) -> list[_Counted]:
        if self._comm.size == 1:
            return [state]
        found = everyone(self._comm, asdict(state))
        return [checked(_COUNTED, each, where=f"what rank {rank} says", cure=CURE) for rank, each in enumerate(found)]

    def _rows_of(self, states: Sequence[_Counted]) -> dict[str, Any]:
        """Returns the number of rows of the source, and the marks of all ranks."""
        marks = joined_marks([(state.first, state.marks) for state in states])
        return {"rows_total": marks[-1].row, "marks": tuple(marks)}

    def _transforms(self, states: Sequence[_Counted]) -> tuple[str, ...]:
        if self._base is not None and self._base.dataset is not None:
            return self._base.transforms
        transforms = []
        for dense in self._schema.dense:
            moments = Moments()
            for state in states:
                moments.merge(state.moments_of(dense.column))
            name = dense.transform
            transforms.append(str(fitted(name, moments) if is_fitted(name) else Transform(name)))
        return tuple(transforms)

    def _build_tables(self, counters: CounterPool) -> dict[str, Table]:
        """Writes the vocabularies and counts of all tables; ranks take turns in them."""
        comm, names = self._comm, self._schema.table_names
        folder = counters.folder.name
        runs = everyone(comm, {name: [f"{folder}/{run.name}" for run in counters.runs(name)] for name in names})
        others = [own for rank, own in enumerate(runs) if rank != comm.rank]

        def build() -> dict[str, Any]:
            built = {}
            for name in names[comm.rank :: comm.size]:
                counted = [self._work.folder / run for own in others for run in own[name]]
                built[name] = asdict(self._build(counters, name, counted))
            return built

        of_ranks = everyone(comm, together(comm, build, self._stop))
        return {name: Table(**of_ranks[i % comm.size][name]) for i, name in enumerate(names)}

    def _save_statistics(self, folder: Path, states: Sequence[_Counted], own: Statistics) -> None:
        """Writes the statistics of all training rows into the dataset. Collective."""
        if not self._schema.statistics:
            return
        files = everyone(self._comm, str(_statistics_file(folder, states[self._comm.rank].row)))

        def write() -> None:
            if self._comm.rank == 0:
                for file in files[1:]:
                    own.merge(self._load_statistics(Path(file)))
                path = self._work.out / STATISTICS
                make_folder(path.parent, within=self._work.out)
                found = own if self._base is None else own.with_earlier(self._base.statistics(self._schema))
                found.save(_statistics_file(self._work.folder, "by-fold"))
                found.total().save(path)

        on_every_rank(self._comm, write)

    def _load_statistics(self, file: Path, *, earlier: bool = False) -> Statistics:
        """Reads statistics by fold. earlier: with those of the rows of earlier days."""
        folds = num_folds(self._schema)
        return Statistics.load(self._schema, file, num_folds=folds + (earlier and folds > 1), cure=CURE)

    def _count_rows(self, plan: SplitPlan, counters: CounterPool, state: _Counted, statistics: Statistics) -> _Counted:
        fitted_columns = [i for i, d in enumerate(self._schema.dense) if is_fitted(d.transform)]
        names = [self._schema.dense_names[i] for i in fitted_columns]
        moments = [state.moments_of(name) for name in names]
        row, train_rows, start, marks = state.row, state.train_rows, state.position, list(state.marks)
        position, rows = start or Position(), dict(marks[-1].rows if marks else Mark().rows)
        cells, latest, hours = state.cells, state.latest, state.hours

        def snapshot(*, done: bool) -> _Counted:
            by_name = {name: m.to_record() for name, m in zip(names, moments, strict=True)}
            own = (position, row, train_rows, by_name, cells, latest, hours, done, self._share.row, list(marks))
            counted = _Counted(*own)
            if self._schema.statistics:
                statistics.save(_statistics_file(counters.folder, row))
            counters.snapshot(asdict(counted), most_runs=1 if done and self._comm.size > 1 else MAX_RUNS)
            for file in counters.folder.glob(_statistics_file(Path(), "*").name):
                if file != _statistics_file(counters.folder, row):
                    file.unlink()
            return counted

        clock = _Clock(self._options.snapshot_every_s)
        for piece in self._reported("count", row, self._pieces(plan, start, row, stop=self._share.stop)):
            is_train = piece.codes == TRAIN
            self._count_piece(counters, piece.chunk, is_train)
            if self._schema.statistics:
                # With a lag, rows to score see all rows, as they would a long time after the last one.
                counted = is_train if self._lag is None else np.ones_like(is_train)
                statistics.add(piece.chunk, counted, piece.folds)
            for i, sums in zip(fitted_columns, moments, strict=True):
                sums.add(piece.chunk.dense[is_train, i])
            cells = cells.with_chunk(piece.chunk, self._schema.dense_names)
            if piece.chunk.time is not None:
                latest = max(latest, int(piece.chunk.time.max(initial=NO_TIME)))
                hours.add_rows(piece.chunk.time[is_train], train_rows)
            position, row = piece.chunk.position, piece.next_row
            train_rows += int(is_train.sum())
            rows = {split: rows[split] + int((piece.codes == code).sum()) for code, split in enumerate(SPLITS)}
            marks.append(Mark(row, position, rows))
            if self._stop.is_set():
                snapshot(done=False)
                raise Interrupted
            if clock.is_due():
                with clock:
                    snapshot(done=False)
        position = replace(position, num_skipped=self._num_skipped(row, position))
        marks.append(Mark(row, position, rows))
        return snapshot(done=True)

    def _num_skipped(self, row: int, position: Position) -> int:
        """Returns how many bad rows were skipped before `row`, which is the last one that was read."""
        # A file may end in bad rows, which come after the last chunk's position.
        return position.num_skipped if row == self._options.rows else self._skipped.num_rows

    def _count_piece(self, counters: CounterPool, chunk: Chunk, is_train: NDArray[np.bool_]) -> None:
        if not is_train.any():
            return
        mask = None if is_train.all() else is_train
        schema = self._schema
        columns = {t: [column_of(chunk.keys, f) for f in schema.features_of(t)] for t in schema.table_names}
        counters.add(columns, mask)

    def _build(self, counters: CounterPool, table: str, others: Sequence[Path]) -> Table:
        """Writes the vocabulary and counts of a table; returns its record for dataset.json. others: counts of ranks."""
        self._check_stop()
        for folder in ("vocab", "counts"):
            make_folder(self._work.out / folder, within=self._work.out)
        path = self._work.out / "vocab" / file_name(table)
        spec, counts_path = self._schema.table(table), self._work.out / "counts" / file_name(table)
        if self._base is None:
            summary = counters.build(table, path, counts_path, min_count=spec.min_count, others=others)
            num_dropped = summary.num_distinct - summary.num_keys
        else:
            work = self._work.fresh(f"day-{file_name(table)}")
            make_folder(work)
            counters.build(table, work / "vocab", work / "counts", others=others)
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

    def _encoders(self, info: DatasetInfo, suffix: str) -> EncoderPool:
        paths = {table.name: self._work.out / table.vocabulary_file for table in info.tables}
        return EncoderPool(paths, self._work.fresh(f"encode{suffix}"), memory_bytes=self._memory_bytes)

    def _writer(self, info: DatasetInfo, **others: Any) -> PackedWriter:
        rows_per_part, rows_per_block = self._options.rows_per_part, self._options.rows_per_block
        return PackedWriter(self._work.out, info, rows_per_part=rows_per_part, rows_per_block=rows_per_block, **others)

    def _row_encoder(self, info: DatasetInfo, encoders: EncoderPool, executor: Executor) -> RowEncoder:
        transforms = raw_transforms(self._schema, [Transform.parse(column.transform) for column in info.dense])
        tables = {table: encoders[table] for table in self._schema.table_names}
        return RowEncoder(self._schema, transforms, tables, executor)

    def _with_statistics(self, pieces: Iterator[Piece], plan: SplitPlan, mark: Mark) -> Iterator[Piece]:
        """Yields the pieces from `mark` on with their statistics as dense columns; if rows have a time, those before it
        are read for them."""
        file_of_all = _statistics_file(self._work.folder, "by-fold")
        after = self._load_statistics(file_of_all, earlier=self._base is not None)
        if after.num_folds > 1:
            total = Statistics.load(self._schema, self._work.out / STATISTICS, cure=CURE)
            for piece in pieces:
                assert piece.folds is not None, "_pieces gives them"
                chunk = after.joined_out_of_fold(piece.chunk, piece.codes == TRAIN, piece.folds, total)
                yield replace(piece, chunk=chunk)
            return
        before = Statistics(self._schema) if self._base is None else self._base.statistics(self._schema)
        # A file without a name: its space is free as soon as the process ends, however it ends.
        with tempfile.TemporaryFile(dir=self._work.folder) as file:
            lagged = None if self._lag is None else Lagged(self._schema, self._lag, file)
            for piece in self._pieces(plan, None, 0, stop=mark.start) if mark.row else ():
                before.add(piece.chunk, piece.codes == TRAIN)
                if lagged is not None:
                    lagged.add(piece.chunk)
                self._check_stop()
            for piece in pieces:
                trains = piece.codes == TRAIN
                chunk = before.joined_to(piece.chunk, trains, after)
                if lagged is not None:
                    chunk = lagged.joined_to(piece.chunk, ~trains, chunk)
                yield replace(piece, chunk=chunk)

    def _note_occurrences(self, pieces: Iterator[Piece], encoders: EncoderPool) -> None:
        """Makes the separate pass over `pieces` that vocabularies larger than memory need."""
        for piece in pieces:
            for spec in self._schema.categorical:
                encoders[spec.table_name].add(spec.column, piece.chunk.keys[spec.column])
            self._check_stop()
        encoders.finish()

    def _encode(self, plan: SplitPlan, executor: Executor) -> PackedDataset:
        """Writes the parts of this rank that are not finished; the first rank then writes dataset.json."""
        comm, out, marks, info = self._comm, self._work.out, self._work.results.marks, self._dataset_info(plan)
        ranges = part_ranges(comm, marks, self._options.rows_per_part)
        first_rows = {split: first for split, (first, _) in ranges.items()}
        ours = f"-{comm.rank}-of-{comm.size}" if comm.size > 1 else ""
        writer = self._writer(info, first_rows=first_rows, noted_in=f"parts{ours}.json")

        def write() -> list[Any]:
            left = {split: (writer.finished_rows(split), last) for split, (_, last) in ranges.items()}
            mark = mark_before(marks, left)

            def pieces(stage: str) -> Iterator[Piece]:
                rows = self._pieces(plan, mark.start, mark.row)
                if stage == "encode" and self._schema.statistics:
                    rows = self._with_statistics(rows, plan, mark)
                rows = rows_within(rows, mark, left, to_end=comm.rank + 1 == comm.size)
                return self._reported(stage, mark.row, rows)

            with self._encoders(info, ours) as encoders, writer:
                if encoders.needs_occurrences:
                    self._note_occurrences(pieces("match"), encoders)
                encode = self._row_encoder(info, encoders, executor)
                for piece in pieces("encode"):
                    self._check_stop()
                    self._write_piece(piece, encode, writer)
                self._check_files_unchanged()
                parts = {split: [asdict(part) for part in own] for split, own in writer.finish().items()}
            return [parts, self._skipped.examples]

        found = everyone(comm, together(comm, write, self._stop))
        skipped = max(mark.position.num_skipped for mark in marks)
        self._say_skipped(skipped, list(dict.fromkeys(text for _, examples in found for text in examples)))

        def complete() -> None:
            if comm.rank == 0:
                of_ranks = [checked(_PARTS, own, where="what ranks say", cure=CURE) for own, _ in found]
                parts = {split: [part for own in of_ranks for part in own.get(split, ())] for split in SPLITS}
                whole = {split: own for split, own in parts.items() if own}
                results = self._work.results
                rows_read = results.rows_total if results.sorted is None else results.sorted.rows_read
                unknown = {} if self._base is None else self._base.unknown(out, info.tables, self._say)
                writer.complete(whole, self._summary(rows_read or 0, skipped) | unknown)

        on_every_rank(comm, complete)
        self._work.remove()
        return PackedDataset.open(out)

    def _say_skipped(self, num_rows: int, examples: Sequence[str]) -> None:
        if num_rows:
            self._say(_skipped_line(num_rows, examples[: self._source.skipped.max_examples]))
        for line in (self._work.results.cells or CellCounts()).lines():
            self._say(line)

    def _summary(self, rows_read: int, skipped: int) -> dict[str, Any]:
        """Returns what dataset.json keeps of the preparation: what was counted, and what it said, which every run on it
        counts."""
        cells = self._work.results.cells or CellCounts()
        told = {LEAK: list(self._opened.warnings), SCHEMA_GUESS: list(self._opened.choices)}
        notes = {code: texts for code, texts in told.items() if texts}
        counts = {"rows_read": rows_read, "rows_skipped": skipped + cells.rows_left_out, **cells.summary()}
        kept = {"notes": notes, "left_out": dict(self._opened.left_out), "hours": self._work.results.hours}
        return counts | {name: value for name, value in kept.items() if value}

    @staticmethod
    def _write_piece(piece: Piece, encode: RowEncoder, writer: PackedWriter) -> None:
        """Appends the rows of a piece to their splits."""
        dense, ids = encode(piece.chunk)
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


def _statistics_file(folder: Path, row: int | str) -> Path:
    """Returns where the statistics lie that were counted before `row`."""
    return folder / f"statistics-{row}.safetensors"


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

"""How ranks share a preparation: who reads which rows, who writes which parts, and how the failure of one stops all.

    input     |  rank 0  |  rank 1  |  rank 2  |     read and counted; counts are merged into one vocabulary a table
    a split   |part 0|part 1|part 2|part 3|part|     a part is written by the rank in whose rows it begins

The bytes are the same as with one process: counts do not depend on how rows are divided, and every rank knows after
counting how many rows of each split lie before its own. Ranks share a file system. `pipeline.py` has the stages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotrow.data.chunk import Chunk, Position, Source, select_rows
from hotrow.data.prepare.workfolder import Mark
from hotrow.data.sources.schema import SPLITS
from hotrow.data.sources.split import Codes
from hotrow.parallel.agreement import everyone, on_every_rank
from hotrow.parallel.communicator import Communicator

T = TypeVar("T")
REPORT_S = 0.2
"""Seconds between two reports of a rank to the others, which say whether it is still at work."""


class Interrupted(KeyboardInterrupt):
    """Preparation was stopped on request, and its state is kept."""


@dataclass(frozen=True)
class Share:
    """The rows of a source that one rank reads first."""

    start: Position | None = None
    """Where they begin. If None, at the first row."""
    stop: Position | None = None
    """Where they end. If None, with the source."""
    row: int = 0
    """The number of its first row; 0 if no stage needs to know it."""


@dataclass(frozen=True)
class Piece:
    """The rows of one chunk that belong to the data set."""

    chunk: Chunk
    codes: Codes
    """Split of each row."""
    next_row: int
    """Number of the source's first row after the chunk."""
    folds: NDArray[np.uint8] | None = None
    """Fold of each row, by which statistics are counted; None if there is one."""


def together(comm: Communicator, work: Callable[[], T], stop: threading.Event) -> T:
    """Returns what `work` returns here, when it has ended on all ranks. Collective.

    If it raises ValueError or OSError on one, `stop` is set on all others, and all raise ValueError, which names the
    rank. work: raises Interrupted soon after `stop` is set; if that was on request, all raise it.
    """
    if comm.size == 1:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="hotrow-share") as executor:
        future = executor.submit(work)
        while True:
            wait([future], timeout=REPORT_S)
            error = future.exception() if future.done() else None
            if error is not None and not isinstance(error, Interrupted | ValueError | OSError):
                raise error
            states = everyone(comm, [future.done(), isinstance(error, Interrupted), error is not None])
            if any(failed for _, _, failed in states):
                stop.set()
            if all(done for done, _, _ in states):
                break
    if all(is_stop for _, is_stop, failed in states if failed):
        if any(failed for _, _, failed in states):
            raise Interrupted
        return future.result()
    return on_every_rank(comm, lambda: _unless_stopped(future.result))


def _unless_stopped(result: Callable[[], T]) -> T:
    try:
        return result()
    except Interrupted:
        return None  # type: ignore[return-value]  # another rank has failed, so all raise


def find_share(
    comm: Communicator, source: Source, stop: threading.Event, *, is_whole: bool, numbered: bool
) -> tuple[Share, list[int]]:
    """Returns the rows that this rank reads, and how many lines of rows each file has. Collective.

    is_whole: the first rank reads all rows. numbered: row numbers are needed. If they are not, and no bad row may be
    skipped, or if one rank reads all, nothing is read and there are no counts of lines. Rows that may be left out are
    counted by reading all.
    """
    found = everyone(comm, [asdict(position) for position in source.cuts(comm.size)] if comm.rank == 0 else None)
    cuts = [Position(**fields) for fields in found[0]]
    if is_whole:
        cuts[1:] = cuts[-1:] * comm.size
    start, end = cuts[comm.rank], cuts[comm.rank + 1]
    if is_whole or not (numbered or source.skip_bad_rows):
        return Share(start, end), []
    lines = everyone(comm, together(comm, lambda: source.count_rows(start, end), stop))
    before = _sums(lines[: comm.rank], len(lines[0]))
    rows_before = before[start.file_index] if start.file_index < len(before) else 0
    start, row = source.with_lines(start, rows_before=rows_before), sum(before)
    if source.skip_bad_rows or source.leaves_out:

        def read() -> tuple[int, int]:
            num_rows = 0
            for chunk in source.chunks(start, stop=end):
                num_rows += chunk.num_rows
                if stop.is_set():
                    raise Interrupted
            return num_rows, source.skipped.num_rows

        row, skipped = _sums(everyone(comm, together(comm, read, stop))[: comm.rank], 2)
        start = replace(start, num_skipped=skipped)
    return Share(start, end, row), _sums(lines, len(lines[0]))


def _sums(rows: Sequence[Sequence[int]], length: int) -> list[int]:
    return [sum(row[i] for row in rows) for i in range(length)]


def joined_marks(of_ranks: Sequence[tuple[int, Sequence[Mark]]]) -> list[Mark]:
    """Returns the marks of all ranks as those of one process, in order.

    of_ranks: by rank, the number of its first row as it counted, and marks, the last one at its end; their `rows` are
    of that rank alone.
    """
    marks: list[Mark] = []
    total = Mark()
    for first, own in of_ranks:
        before = total
        for mark in own:
            rows = {split: before.rows[split] + mark.rows[split] for split in SPLITS}
            marks.append(total := Mark(before.row + mark.row - first, mark.position, rows))
    return marks


def part_ranges(comm: Communicator, marks: Sequence[Mark], rows_per_part: int) -> dict[str, tuple[int, int]]:
    """Returns first and end of the rows of each split that this rank writes, numbered within the split: whole parts.

    Only the split's last part may be shorter. marks: of the whole source; the last one is at its end. If the first row
    is not before the end, there are none.
    """
    total = marks[-1]
    rows = [mark.row for mark in marks]

    def begins(rank: int, split: str) -> int:
        """Returns the first part of `split` that begins in the share of `rank`, or later."""
        at = int(np.searchsorted(rows, total.row * rank // comm.size, side="right"))
        before = marks[at - 1].rows[split] if at else 0
        return -(-before // rows_per_part) * rows_per_part

    ranges = {}
    for split in SPLITS:
        first = begins(comm.rank, split) if comm.rank else 0
        last = begins(comm.rank + 1, split) if comm.rank + 1 < comm.size else total.rows[split]
        ranges[split] = first, min(last, total.rows[split])
    return ranges


def mark_before(marks: Sequence[Mark], ranges: dict[str, tuple[int, int]]) -> Mark:
    """Returns the last mark before which no row of `ranges` lies."""
    wanted = {split: first for split, (first, last) in ranges.items() if first < last}
    return next(m for m in [*reversed(marks), Mark()] if all(m.rows[split] <= row for split, row in wanted.items()))


def rows_within(
    pieces: Iterator[Piece], mark: Mark, ranges: dict[str, tuple[int, int]], *, to_end: bool
) -> Iterator[Piece]:
    """Yields, of pieces that begin at `mark`, the rows in `ranges`; ends when there are no more.

    to_end: reads all pieces, so that bad rows after the last good one are seen too.
    """
    before = dict(mark.rows)

    def is_over() -> bool:
        return not to_end and all(last <= max(first, before[split]) for split, (first, last) in ranges.items())

    if is_over():
        return
    for piece in pieces:
        chosen = np.zeros(len(piece.codes), np.bool_)
        for code, (split, (first, last)) in enumerate(ranges.items()):
            of_split = np.flatnonzero(piece.codes == code)
            numbers = before[split] + np.arange(len(of_split))
            chosen[of_split] = (first <= numbers) & (numbers < last)
            before[split] += len(of_split)
        if chosen.any():
            yield Piece(select_rows(piece.chunk, chosen), piece.codes[chosen], piece.next_row)
        if is_over():
            return

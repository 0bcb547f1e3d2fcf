"""Rows of tables in a checkpoint: each table has a chain of files, and a save writes only what changed.

    embedding/<table>/000.safetensors          all rows in their order: weight [N, D]; or rows that were ever written
                                               to: rows int64 [n], rising; weight [n, D]
    embedding/<table>/001.safetensors          rows that changed since 000, in the second form; and so on
    sparse_optimizer/<table>/000.safetensors   the same rows, and each optimizer state in them

A table in the DRAM of one process, which does not know what changed, is one file with all rows. For all others a file
names its rows. If several files of a chain (its links) hold a row, the last one counts; a row that is in none is as it
was made, which the manifest describes. A save writes the rows that changed since the previous checkpoint, and takes
over that checkpoint's files as hard links: each folder is complete, and the disk holds every file once. A new chain
begins before the files together hold more than twice the rows that were ever written to. So a chain takes the disk
space of two tables at most, and all saves together write at most twice the rows that changed. A new chain also begins
after MAX_LINKS files.

If several ranks share the tables, a save adds a file for each rank that is the home of rows to write. Any number of
ranks can read them, because a file names its rows. If ranks share the columns of a table, one of them writes whole
rows, which the others send it.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.base.door import open_file
from hotrow.base.files import file_name, open_private
from hotrow.placement.base import Changes, Placement, RowIds, Rows, Saved, SavedLink
from hotrow.run.checkpoint_files import (
    CURE,
    Chain,
    ChainRecord,
    FileRecord,
    FirstRows,
    Pieces,
    check_like,
    check_names,
    held_rows,
    in_order,
    open_tensors,
    starts_of,
    write_held,
    write_tensors,
)

MAX_LINKS = 100
"""The longest chain of checkpoint files. Every save hard-links all files of its chain and every load opens them, so a
longer chain costs more; past this length the next save starts a new chain."""
ROWS = "rows"
ID_PIECE = 1 << 18
"""How many row ids are read at once to check them."""


class NumRows(NamedTuple):
    """How many rows of a table a rank has to write."""

    changed: int
    """Rows changed since the previous checkpoint."""
    ever: int
    """Rows to write if a new chain begins."""
    added: int = 0
    """The changed rows that the chain has wrong, as `_added` has them."""

    @classmethod
    def of(cls, changes: Changes, table: str, chain: Chain | None, num_rows: int) -> NumRows:
        added = 0 if changes.writer(table) is not None else _num_changed_of(changes, table, chain, num_rows)
        return cls(changes.num_changed(table, ever=False), changes.num_changed(table, ever=True), added)


class NextChain(NamedTuple):
    """A chain to be written."""

    record: ChainRecord
    kept: list[str]
    """Files that the previous checkpoint has."""
    new: dict[str, Mapping[str, Pieces]]
    """The file that this rank writes, and its tensors; empty if it has none."""


class ChangedRows:
    """The values of an array in the rows of a table that were ever written to, or since `Changes.clear_changed`.

    rows: the array; if None, the ids of those rows instead. No row may change while they are read.
    """

    def __init__(self, changes: Changes, table: str, rows: Rows | None, num_rows: int, *, ever: bool) -> None:
        self._changes, self._table, self._rows, self._ever = changes, table, rows, ever
        self.shape = torch.Size((num_rows, *(() if rows is None else rows.shape[1:])))
        self.dtype = torch.int64 if rows is None else rows.dtype

    def pieces(self) -> Iterator[Tensor]:
        """Yields the row ids [n], rising, in pieces that the memory for it can hold."""
        return self._changes.changed_rows(self._table, ever=self._ever)

    def read(self, ids: Tensor, /) -> Tensor:
        """Returns the values in the rows `ids`, or the ids themselves."""
        if self._rows is None:
            return ids
        return self._rows.own(ids)[1] if self._changes.writer(self._table) is None else self._rows.read(ids)


class InStep:
    """The content of an array, read once, piece by piece."""

    def __init__(self, array: Pieces) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._values = map(array.read, array.pieces())

    def pieces(self) -> Iterator[Tensor]:
        return self._values

    def read(self, piece: Tensor, /) -> Tensor:
        return piece


def write_in_step(path: Path, arrays: Mapping[str, Pieces], *, writes: bool) -> FileRecord | None:
    """Writes a file of rows that all ranks read together. writes: this rank does, and gets the record; the others
    return None. Collective: if the file cannot be written, this rank still reads with the others before it raises."""
    streams = {name: InStep(array) for name, array in arrays.items()}

    def read_the_rest() -> None:
        for name, _ in in_order(streams):
            deque(streams[name].pieces(), maxlen=0)

    try:
        if writes:
            return write_tensors(path, streams)
    except OSError:  # an error of reading is none: that all ranks have met
        read_the_rest()
        raise
    read_the_rest()
    return None


def next_chain(
    part: str,
    table: str,
    arrays: Mapping[str, Rows],
    changes: Changes | None,
    before: Saved | None,
    to_write: Sequence[NumRows],
    rank: int = 0,
) -> NextChain:
    """Returns the chain of a table's arrays, by name, after the checkpoint `before`.

    changes: if None, the file has all rows. to_write: by rank that shares the table; rank: the number of this one. If
    the table has a `Changes.writer`, this is collective, and the new file is that of the writer.
    """
    num_rows = next(iter(arrays.values())).shape[0]
    if changes is None:
        whole = Chain(f"{part}/{file_name(table)}", ChainRecord(num_rows, None, (num_rows,)))
        return NextChain(whole.record, [], {whole.files[0]: arrays})
    writer = changes.writer(table)
    if writer is not None:
        most = NumRows(*map(max, zip(*to_write, strict=True)))
        rank, to_write = writer, [most if k == writer else NumRows(0, 0) for k in range(len(to_write))]
    num_changed, num_ever, num_added = (sum(each) for each in zip(*to_write, strict=True))
    chain = to_go_on(before, part, table)
    if chain is not None:
        links = chain.record.links
        costs_the_same = 0 < num_changed == num_ever
        if writer is not None:
            num_added = _num_changed_of(changes, table, chain, num_rows)
        is_wrong = len(_added(changes, table, chain, num_rows)) > num_added
        if len(links) >= MAX_LINKS or sum(links) + num_changed > 2 * num_ever or costs_the_same or is_wrong:
            chain = None
    ever = chain is None
    if chain is None:
        chain = Chain(f"{part}/{file_name(table)}", ChainRecord(num_rows, changes.initial(table), ()))
    counts = [each.ever if ever else each.changed for each in to_write]
    if writer is not None:  # what the ranks know together is more than what each knows
        counts[writer] = sum(map(len, changes.changed_rows(table, ever=ever)))
    # A chain has a file, even without a row.
    writers = [k for k, count in enumerate(counts) if count] or [writer or 0] * ever
    record = replace(
        chain.record,
        num_rows=num_rows,  # the table may have grown
        links=(*chain.record.links, *(counts[k] for k in writers)),
    )
    new: dict[str, Mapping[str, Pieces]] = {}
    if rank in writers:
        stored = {**arrays, ROWS: None}
        file = chain._replace(record=record).files[len(chain.files) + writers.index(rank)]
        new[file] = {n: ChangedRows(changes, table, rows, counts[rank], ever=ever) for n, rows in stored.items()}
    return NextChain(record, chain.files, new)


def to_go_on(before: Saved | None, part: str, table: str) -> Chain | None:
    """The chain of a table in the checkpoint `before` that the next one may go on with; None if there is none."""
    chain = None if before is None else before.manifest.chain(part, table)
    return None if chain is None or chain.record.initial is None else chain


def _added(changes: Changes, table: str, chain: Chain | None, num_rows: int) -> range:
    """Returns the rows behind those of the chain, if they were made otherwise than it says of rows in no link."""
    if chain is None or chain.record.initial == changes.initial(table):
        return range(0)
    return range(chain.record.num_rows, num_rows)


def _num_changed_of(changes: Changes, table: str, chain: Chain | None, num_rows: int) -> int:
    """How many rows of `_added` have changed. Collective if the table has a `Changes.writer`."""
    if not (added := _added(changes, table, chain, num_rows)):
        return 0
    return sum(int((rows >= added.start).sum()) for rows in changes.changed_rows(table, ever=False))


def link_or_copy(source: Path, target: Path) -> int:
    """Makes `target` another name of the file `source`, or a copy if the file system has no hard links. Returns the
    bytes written: 0 for a link.
    """
    try:
        os.link(source, target)
        return 0
    except FileNotFoundError:
        raise
    except OSError:
        with open_file(source) as file, open_private(target) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
            return copy.tell()


def load_chain(
    path: Path,
    chain: Chain,
    table: str,
    arrays: Mapping[str, Rows],
    changes: Changes | None,
    *,
    grown: bool = False,
    is_there: bool = False,
) -> None:
    """Fills `arrays`, by name, with what the chain in the checkpoint folder `path` says, also for rows in no link.

    grown: arrays may have more rows, which stay as they are. is_there: they have the rows in links already, and had no
    other (`begins_with`). Raises ValueError, with nothing changed, if a link does not fit the arrays or its row ids do
    not rise.
    """
    record = chain.record
    if not is_there:
        _check_fits(path, chain, arrays, grown=grown)
    if grown:
        arrays = {name: FirstRows(array, record.num_rows) for name, array in arrays.items()}
    if (initial := record.initial) is not None:
        for name, array in arrays.items():
            for rows in _rows_to_reset(name, table, array, path, chain, changes, is_new=is_there):
                held = held_rows(array, rows)
                array.write(held, initial.read(name, held, array.shape))
    if is_there:
        return
    step = min(array.piece_rows for array in arrays.values())
    for file, num_rows in zip(chain.files, record.links, strict=True):
        with open_tensors(path / file) as link:
            for piece, rows in _pieces(link, num_rows, step, has_ids=initial is not None):
                for name, array in arrays.items():
                    write_held(array, rows, link.get_slice(name), piece.start)


def begins_with(
    path: Path, table: str, held: Sequence[tuple[Chain, Mapping[str, Rows]]], placement: Placement, *, grown: bool
) -> bool:
    """Lets a table that is as it was made read the rows of a checkpoint in its files; returns whether it does so.

    held: the table's chains, and the arrays that each holds. grown: as for `load_chain`. It does so if `placement` can,
    and if the chains have the same rows. Raises ValueError as `load_chain` does.
    """
    for chain, arrays in held:
        _check_fits(path, chain, arrays, grown=grown)
    first = held[0][0]
    if first.record.initial is None or any(not _have_same_rows(path, first, other) for other, _ in held[1:]):
        return False
    links = []
    for number, num_rows in enumerate(first.record.links):
        ids, places = path / first.files[number], dict[str, tuple[Path, int]]()
        for chain, arrays in held:
            file = path / chain.files[number]
            places |= {name: (file, start) for name, start in starts_of(file).items() if name in arrays}
        links.append(SavedLink(num_rows, (ids, starts_of(ids)[ROWS]), places))
    return placement.begin_with(table, links)


def _check_fits(path: Path, chain: Chain, arrays: Mapping[str, Rows], *, grown: bool) -> None:
    """Raises ValueError unless the chain fits the arrays and its row ids rise. grown: as for `load_chain`."""
    num_rows = chain.record.num_rows
    for name, array in arrays.items():
        if (own := array.shape[0]) < num_rows or (own > num_rows and not grown):
            raise ValueError(f"{path / chain.stem}: {name} has {num_rows:,} rows; this model's has {own:,}")
    check_chain(path, chain, {name: (array.dtype, tuple(array.shape[1:])) for name, array in arrays.items()})


def _have_same_rows(path: Path, chain: Chain, other: Chain) -> bool:
    """Returns whether the links of two chains hold the same rows, as those of weights and of their states do."""
    if chain.record.links != other.record.links:
        return False
    for number, num_rows in enumerate(chain.record.links):
        with open_tensors(path / chain.files[number]) as mine, open_tensors(path / other.files[number]) as theirs:
            pairs = zip(_pieces(mine, num_rows, ID_PIECE), _pieces(theirs, num_rows, ID_PIECE), strict=True)
            if not all(torch.equal(own, found) for (_, own), (_, found) in pairs):
                return False
    return True


def check_chain(
    path: Path, chain: Chain, arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
) -> None:
    """Raises ValueError, naming the file, unless the row ids in each link of the chain rise within the table.

    Whoever reads a chain calls this first: what follows may then index the table by these ids. arrays: dtype and row
    shape of each array that a link holds beside the ids; None if not known.
    """
    ids = [] if chain.record.initial is None else [ROWS]
    for name, num_rows in zip(chain.files, chain.record.links, strict=True):
        file, table_rows, last = path / name, chain.record.num_rows, -1
        with open_tensors(file) as link:
            if ids and ROWS not in link.keys():  # noqa: SIM118  # it is not a mapping
                raise ValueError(f"{file} has no {ROWS!r}, the ids of its rows; {CURE}")
            if arrays is not None:
                check_names(file, link.keys(), [*ids, *arrays])
            for name, (dtype, shape) in (arrays or {}).items():
                check_like(file, name, link.get_slice(name), dtype, (num_rows, *shape))
            if not ids:
                continue
            check_like(file, ROWS, link.get_slice(ROWS), torch.int64, (num_rows,))
            for _, rows in _pieces(link, num_rows, ID_PIECE):
                if int(rows[0]) <= last or bool((rows.diff() <= 0).any()) or int(rows[-1]) >= table_rows:
                    raise ValueError(f"{file}: its rows do not rise within the table's {table_rows:,}; {CURE}")
                last = int(rows[-1])


def _pieces(link: Any, num_rows: int, step: int, *, has_ids: bool = True) -> Iterator[tuple[slice, Any]]:
    """Yields ranges of a link of at most `step` rows, and the row ids in each; without ids, the ranges themselves."""
    ranges = (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
    return ((piece, link.get_slice(ROWS)[piece] if has_ids else piece) for piece in ranges)


def _rows_to_reset(
    name: str, table: str, array: Rows, path: Path, chain: Chain, changes: Changes | None, *, is_new: bool
) -> Iterator[RowIds]:
    """Yields the rows that may differ from what the chain says of rows in no link. is_new: none of them was touched."""
    record = chain.record
    assert record.initial is not None, "a file with all rows leaves none"
    is_short = sum(record.links) < record.num_rows  # else rows in no link are few, if there are any
    if changes is not None and is_short and changes.initial(table).formula(name) == record.initial.formula(name):
        return iter(()) if is_new else changes.touched_rows(table)
    return _rows_in_no_link(path, chain, array.pieces())


def _rows_in_no_link(path: Path, chain: Chain, pieces: Iterator[slice]) -> Iterator[Tensor]:
    """Yields the rows of rising ranges that no link of the chain in the checkpoint folder `path` holds."""
    with ExitStack() as stack:
        links = [stack.enter_context(open_tensors(path / file)).get_slice(ROWS) for file in chain.files]
        places = [0] * len(links)
        for piece in pieces:
            is_left = torch.ones(piece.stop - piece.start, dtype=torch.bool)
            for k, (link, num_rows) in enumerate(zip(links, chain.record.links, strict=True)):
                rows = link[places[k] : min(places[k] + len(is_left), num_rows)]
                rows = rows[rows < piece.stop]
                is_left[rows - piece.start] = False
                places[k] += len(rows)
            if is_left.any():
                yield piece.start + is_left.nonzero().squeeze(1)

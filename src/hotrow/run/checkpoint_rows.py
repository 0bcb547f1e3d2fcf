"""Checkpoints of tables in tiers: each table has a chain of files, and a save writes only the last file.

    embedding/<table>/000.safetensors          rows that were ever written to: rows int64 [n], rising; weight [n, D]
    embedding/<table>/001.safetensors          rows that changed since 000, in the same form; and so on
    sparse_optimizer/<table>/000.safetensors   the same rows, and each optimizer state in them

If several files of a chain (its links) hold a row, the last one counts; a row that is in none is as it was made, which
the manifest describes. A save writes the rows that changed since the previous checkpoint, and takes over that
checkpoint's files as hard links: each folder is complete, and the disk holds every file once. A new chain begins before
the later files together hold more rows than were ever written to. So a chain takes the disk space of two tables at
most, and all saves together write at most twice the rows that changed. A new chain also begins after MOST_LINKS files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.base.files import file_name, open_private
from hotrow.placement.base import Changes, RowIds, Rows, Saved
from hotrow.run.checkpoint_files import CURE, Chain, ChainRecord, Stored, check_like, check_names, open_tensors

MOST_LINKS = 100
"""The longest chain of checkpoint files. Every save hard-links all files of its chain and every load opens them, so a
longer chain costs more; past this length the next save starts a new chain."""
ROWS = "rows"


class NextChain(NamedTuple):
    """A chain to be written."""

    record: ChainRecord
    kept: list[str]
    """Files that the previous checkpoint has."""
    new: dict[str, dict[str, Stored]]
    """The file to be written and its tensors; empty if no row changed."""


class ChangedRows:
    """The values of an array in the rows of a table that were ever written to, or since `Changes.clear_changed`.

    rows: the array; None: the ids of those rows instead. No row may change while they are read.
    """

    def __init__(self, changes: Changes, table: str, rows: Rows | None, *, ever: bool) -> None:
        self._changes, self._table, self._rows, self._ever = changes, table, rows, ever
        num_rows = changes.num_changed(table, ever=ever)
        self.shape = torch.Size((num_rows, *(() if rows is None else rows.shape[1:])))
        self.dtype = torch.int64 if rows is None else rows.dtype

    def pieces(self) -> Iterator[Tensor]:
        """Yields the row ids [n], rising, in pieces that the memory for it can hold."""
        return self._changes.changed_rows(self._table, ever=self._ever)

    def read(self, ids: Tensor, /) -> Tensor:
        """Returns the values in the rows `ids`, or the ids themselves."""
        return ids if self._rows is None else self._rows.read(ids)


def next_chain(part: str, table: str, arrays: Mapping[str, Rows], changes: Changes, before: Saved | None) -> NextChain:
    """Returns the chain of a table's arrays, by name, after the checkpoint `before`."""
    num_rows = next(iter(arrays.values())).shape[0]
    num_changed, num_ever = (changes.num_changed(table, ever=ever) for ever in (False, True))
    chain = None if before is None else before.manifest.chain(part, table)
    if chain is not None:
        links = chain.record.links
        if len(links) >= MOST_LINKS or sum(links[1:]) + num_changed > num_ever:
            chain = None
    ever = chain is None
    if chain is None:
        chain = Chain(f"{part}/{file_name(table)}", ChainRecord(num_rows, changes.initial(table), ()))
    kept = chain.files
    record = replace(chain.record, num_rows=num_rows)  # the table may have grown
    if not ever and num_changed == 0:
        return NextChain(record, kept, {})
    record = replace(record, links=(*record.links, num_ever if ever else num_changed))
    tensors: dict[str, Stored] = {n: ChangedRows(changes, table, rows, ever=ever) for n, rows in arrays.items()}
    tensors[ROWS] = ChangedRows(changes, table, None, ever=ever)
    return NextChain(record, kept, {chain._replace(record=record).files[-1]: tensors})


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` another name of the file `source`, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        with source.open("rb") as file, open_private(target) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())


def load_chain(path: Path, chain: Chain, table: str, arrays: Mapping[str, Rows], changes: Changes | None) -> None:
    """Fills `arrays`, by name, with what the chain in the checkpoint folder `path` says, also for rows in no link.

    Raises ValueError, with nothing changed, if a link does not fit the arrays or its row ids do not rise.
    """
    record = chain.record
    for name, array in arrays.items():
        if (own := array.shape[0]) != record.num_rows:
            raise ValueError(f"{path / chain.stem}: {name} has {record.num_rows:,} rows; this model's has {own:,}")
    for file, num_rows in zip(chain.files, record.links, strict=True):
        _check_link(path / file, num_rows, record.num_rows, arrays)
    for name, array in arrays.items():
        for rows in _rows_to_reset(name, table, array, record, changes):
            array.write(rows, record.initial.read(name, rows, array.shape))
    for file, num_rows in zip(chain.files, record.links, strict=True):
        with open_tensors(path / file) as link:
            for piece, rows in _pieces(link, num_rows, arrays):
                for name, array in arrays.items():
                    array.write(rows, link.get_slice(name)[piece])


def _check_link(path: Path, num_rows: int, table_rows: int, arrays: Mapping[str, Rows]) -> None:
    with open_tensors(path) as link:
        check_names(path, link.keys(), [ROWS, *arrays])
        check_like(path, ROWS, link.get_slice(ROWS), torch.int64, (num_rows,))
        for name, array in arrays.items():
            check_like(path, name, link.get_slice(name), array.dtype, (num_rows, *array.shape[1:]))
        last = -1
        for _, rows in _pieces(link, num_rows, arrays):
            if int(rows[0]) <= last or bool((rows.diff() <= 0).any()) or int(rows[-1]) >= table_rows:
                raise ValueError(f"{path}: its rows do not rise within the table's {table_rows:,}; {CURE}")
            last = int(rows[-1])


def _pieces(link: Any, num_rows: int, arrays: Mapping[str, Rows]) -> Iterator[tuple[slice, Tensor]]:
    """Yields ranges of a link, and the row ids in each."""
    step = min(array.piece_rows for array in arrays.values())
    ranges = (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
    return ((piece, link.get_slice(ROWS)[piece]) for piece in ranges)


def _rows_to_reset(
    name: str, table: str, array: Rows, record: ChainRecord, changes: Changes | None
) -> Iterator[RowIds]:
    """Yields the rows that may differ from what the chain says of rows in no link."""
    if changes is not None and changes.initial(table).formula(name) == record.initial.formula(name):
        return changes.changed_rows(table, ever=True)
    return array.pieces()

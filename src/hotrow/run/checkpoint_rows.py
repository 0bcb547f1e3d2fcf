"""Checkpoints of tables in tiers: for each table a chain of files, of which a save writes the last.

    embedding/<table>/000.safetensors          rows that were ever written to: rows int64 [n], rising; weight [n, D]
    embedding/<table>/001.safetensors          those that changed since, likewise
    sparse_optimizer/<table>/000.safetensors   the same rows, and each optimizer state in them

Later links win; a row in none is what it was made as, which the manifest says. A save writes the rows that changed
since the checkpoint before and takes the links of that one as hard links: each folder is whole in itself, and the disk
holds every link once. Before the later links together hold more rows than were ever written to, a chain begins anew:
on disk a chain is at most two tables, and all that is written at most twice the rows that changed. So it does after
MOST_LINKS, however few they hold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.base.files import file_name, open_private
from hotrow.placement.base import Changes, InitialRows, RowIds, Rows, Saved
from hotrow.run.checkpoint_files import (
    CURE,
    MANIFEST,
    ChainRecord,
    Manifest,
    Stored,
    check_like,
    check_names,
    open_tensors,
)

MOST_LINKS = 100
"""Of a chain, each a file that every save links and every load opens; the next save begins a new one."""
ROWS = "rows"


@dataclass(frozen=True)
class Chain:
    """What a checkpoint holds of a table in one of its parts."""

    stem: str
    """Where its links lie: "embedding/<table>"."""
    num_rows: int
    """Of the table."""
    initial: InitialRows
    links: tuple[int, ...]
    """The number of rows in each."""

    @property
    def files(self) -> list[str]:
        """The links, first one first."""
        return [f"{self.stem}/{k:03d}.safetensors" for k in range(len(self.links))]

    @property
    def record(self) -> ChainRecord:
        """As it stands in a manifest."""
        return ChainRecord(self.num_rows, self.initial, self.links)

    @classmethod
    def of(cls, manifest: Manifest, part: str, table: str) -> Chain | None:
        """The one of a table in a part; None where there is none. ValueError where the file of a link is not listed."""
        found = manifest.chain(part, table)
        if found is None:
            return None
        chain = cls(f"{part}/{file_name(table)}", found.num_rows, found.initial, found.links)
        for file in chain.files:
            if file not in manifest.files:
                raise ValueError(f"the checkpoint's {MANIFEST} does not list {file}, a link of its chain; {CURE}")
        return chain


class NextChain(NamedTuple):
    """A chain to be written."""

    chain: Chain
    num_kept: int
    """Links that are those of the checkpoint before."""
    tensors: dict[str, Stored]
    """Of the last, which is new; empty where no row changed."""

    @property
    def kept_files(self) -> list[str]:
        """Those of the checkpoint before."""
        return self.chain.files[: self.num_kept]

    @property
    def new_file(self) -> dict[str, dict[str, Stored]]:
        """The file to be written, if there is one."""
        return {self.chain.files[-1]: self.tensors} if self.tensors else {}


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
        """Yields their ids [n], rising, as many at a time as memory is set aside for."""
        return self._changes.changed_rows(self._table, ever=self._ever)

    def read(self, ids: Tensor, /) -> Tensor:
        """Returns the values in the rows `ids`, or the ids themselves."""
        return ids if self._rows is None else self._rows.read(ids)


def next_chain(part: str, table: str, arrays: Mapping[str, Rows], changes: Changes, before: Saved | None) -> NextChain:
    """Returns the chain of a table's arrays, by name, after the checkpoint `before`."""
    first = next(iter(arrays.values()))
    num_changed, num_ever = (changes.num_changed(table, ever=ever) for ever in (False, True))
    chain = None if before is None else Chain.of(before.manifest, part, table)
    if chain is not None and (len(chain.links) >= MOST_LINKS or sum(chain.links[1:]) + num_changed > num_ever):
        chain = None
    if chain is not None:
        chain = replace(chain, num_rows=first.shape[0])  # it may have grown since
    if chain is not None and num_changed == 0:
        return NextChain(chain, len(chain.links), {})
    ever = chain is None
    tensors: dict[str, Stored] = {n: ChangedRows(changes, table, rows, ever=ever) for n, rows in arrays.items()}
    tensors[ROWS] = ChangedRows(changes, table, None, ever=ever)
    if chain is None:
        stem, initial = f"{part}/{file_name(table)}", changes.initial(table)
        return NextChain(Chain(stem, first.shape[0], initial, (num_ever,)), 0, tensors)
    return NextChain(replace(chain, links=(*chain.links, num_changed)), len(chain.links), tensors)


def link_or_copy(source: Path, target: Path) -> None:
    """`target` becomes another name of the file `source`, or a copy of it where the file system gives it none."""
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
    """Make `arrays`, by name, what the chain of the checkpoint folder `path` says, also rows that are in no link.

    Raises ValueError, with nothing changed, where a link does not fit the arrays, and where its rows do not rise.
    """
    for name, array in arrays.items():
        if (own := array.shape[0]) != chain.num_rows:
            raise ValueError(f"{path / chain.stem}: {name} has {chain.num_rows:,} rows; this model's has {own:,}")
    for file, num_rows in zip(chain.files, chain.links, strict=True):
        _check_link(path / file, num_rows, chain, arrays)
    for name, array in arrays.items():
        for rows in _rows_to_reset(name, table, array, chain, changes):
            array.write(rows, chain.initial.read(name, rows, array.shape))
    for file, num_rows in zip(chain.files, chain.links, strict=True):
        with open_tensors(path / file) as link:
            for piece, rows in _pieces(link, num_rows, arrays):
                for name, array in arrays.items():
                    array.write(rows, link.get_slice(name)[piece])


def _check_link(path: Path, num_rows: int, chain: Chain, arrays: Mapping[str, Rows]) -> None:
    with open_tensors(path) as link:
        check_names(path, link.keys(), [ROWS, *arrays])
        check_like(path, ROWS, link.get_slice(ROWS), torch.int64, (num_rows,))
        for name, array in arrays.items():
            check_like(path, name, link.get_slice(name), array.dtype, (num_rows, *array.shape[1:]))
        last = -1
        for _, rows in _pieces(link, num_rows, arrays):
            if int(rows[0]) <= last or bool((rows.diff() <= 0).any()) or int(rows[-1]) >= chain.num_rows:
                raise ValueError(f"{path}: its rows do not rise within the table's {chain.num_rows:,}; {CURE}")
            last = int(rows[-1])


def _pieces(link: Any, num_rows: int, arrays: Mapping[str, Rows]) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of a link's rows and the rows themselves."""
    step = min(array.piece_rows for array in arrays.values())
    ranges = (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))
    return ((piece, link.get_slice(ROWS)[piece]) for piece in ranges)


def _rows_to_reset(name: str, table: str, array: Rows, chain: Chain, changes: Changes | None) -> Iterator[RowIds]:
    """Yields those that may differ from what the chain has for rows in no link."""
    if changes is not None and changes.initial(table).formula(name) == chain.initial.formula(name):
        return changes.changed_rows(table, ever=True)
    return array.pieces()

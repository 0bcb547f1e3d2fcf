"""Tables of an export, mapped from their files, so that a row is read when it is first looked up.

Within a budget of memory, the first rows of all tables are locked into half of it: rows are numbered by how often
training looked them up. The rows behind them share the other half, and a lookup first asks the disk for all of its own.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from hotrow.base.door import open_file
from hotrow.batch import KeyedJaggedTensor
from hotrow.data.native import backend
from hotrow.embedding import EmbeddingCollection
from hotrow.export.rows import RowFormat, StoredLookups
from hotrow.export.score import STORED, looked_up
from hotrow.placement.base import Placement
from hotrow.placement.dram import Dram
from hotrow.tables import TableConfig

MAX_HEAD_BYTES = 1 << 20
ASKED_BYTES = 1 << 17
"""Bytes asked for at a time: if asked for more, the system reads only its read-ahead, often this much."""
MOST_ASKED = 1 << 15
"""Ids of a lookup that asks for rows. It takes 0.4 us a row, in memory or not: as long as scoring a long frame."""
STATM = Path("/proc/self/statm")
"""Linux's file of the pages that this process has in memory."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class Budget(NamedTuple):
    """The memory that a scorer may use."""

    most_bytes: int
    """Bytes of mapped files in this process, those of others included."""
    pinned_bytes: int
    """Of these, rows that stay there."""


@dataclass
class _Rows:
    """Where the rows of a table lie."""

    mapped: mmap.mmap
    file: IO[bytes]
    address: int
    begin: int
    """Where they begin in the file."""
    row_bytes: int
    num_rows: int
    num_pinned: int = 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the file from its start that stay in memory."""
        return self.begin + self.num_pinned * self.row_bytes if self.num_pinned else 0


class MappedTables:
    """The tables in the files of an export, never written: of float32 for `EmbeddingCollection(memory=...)`.

    budget: if None, the system decides what is in memory.
    """

    def __init__(self, export: Path, tables: Sequence[dict[str, Any]], budget: Budget | None) -> None:
        self.weights: dict[str, Tensor] = {}
        self._budget, self._last_bytes = budget, 0 if budget is None else mapped_bytes()
        self._others: list[mmap.mmap] = []
        self._rows: list[_Rows] = []
        self._rows_of: dict[str, _Rows] = {}
        """By feature."""
        self._libc = ctypes.CDLL(None)
        self._ask = getattr(backend(), "ask_for_rows", None)
        files = ExitStack()
        weakref.finalize(self, files.close)
        for table in tables:
            dtype, more = STORED[table["stored_as"]]
            shape = table["num_embeddings"], table["embedding_dim"] + more
            file = files.enter_context(open_file(export / table["file"]))
            mapped, begin = _map(export / table["file"], file, table["tensor"], dtype, shape)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch has no tensors that cannot be written to, and says so
                weights = torch.frombuffer(mapped, dtype=dtype, count=shape[0] * shape[1], offset=begin)
            self.weights[table["name"]] = weights.view(shape)
            row_bytes = dtype.itemsize * shape[1]
            self._rows.append(_Rows(mapped, file, weights.data_ptr() - begin, begin, row_bytes, shape[0]))
            self._rows_of |= dict.fromkeys(table["features"], self._rows[-1])
            self._at_random(mapped)

    def place(self, tables: Sequence[TableConfig], *, seed: int) -> Placement:
        """Returns the placement of the tables."""
        return Dram(tables, weights=self.weights)

    def bound(self, mapped: mmap.mmap | None) -> None:
        """Adds a mapping to those that are let go of if they take too much memory."""
        if mapped is not None:
            self._at_random(mapped)
            self._others.append(mapped)

    def _at_random(self, mapped: mmap.mmap) -> None:
        if self._budget is not None:
            # A row takes a page. Reading the pages around it too would fill the memory with rows nobody asks for.
            mapped.madvise(mmap.MADV_RANDOM)

    def pin(self) -> None:
        """Reads the first rows of all tables, as many as fit in the budget for them, and keeps them."""
        if self._budget is None:
            return
        counts = range(max((own.num_rows for own in self._rows), default=0) + 1)
        first = bisect_right(counts, self._budget.pinned_bytes, key=self._first_bytes) - 1
        for own in self._rows:
            own.num_pinned = min(first, own.num_rows)
            # Before they are locked, which reads page by page, or not at all if it is refused.
            for begin in range(0, own.pinned_bytes, ASKED_BYTES):
                os.posix_fadvise(own.file.fileno(), begin, ASKED_BYTES, os.POSIX_FADV_WILLNEED)
            if own.pinned_bytes:
                # It may be refused (`ulimit -l`). Then the system may take these pages, like those of any other file.
                self._libc.mlock(ctypes.c_void_p(own.address), ctypes.c_size_t(own.pinned_bytes))
        self._last_bytes = mapped_bytes()

    def _first_bytes(self, count: int) -> int:
        """Returns how many bytes the first rows of all tables have."""
        return sum(min(count, own.num_rows) * own.row_bytes for own in self._rows)

    def ask_for(self, sparse: KeyedJaggedTensor) -> None:
        """Asks the disk for all rows of a lookup that may not be in memory, so that it reads them side by side."""
        if self._budget is None or self._ask is None or sparse.values.numel() > MOST_ASKED:
            return
        ids = sparse.values.long().numpy()
        for name, own in self._rows_of.items():
            if own.num_pinned < own.num_rows:
                self._ask(own.file.fileno(), own.begin, own.row_bytes, ids[sparse.span(name)], own.num_pinned)

    def keep_within(self) -> None:
        """Lets go of mapped pages if the budget has no room for another such lookup. Call it after each."""
        if self._budget is not None:
            now, before = mapped_bytes(), self._last_bytes
            self._last_bytes = now
            if now + max(0, now - before) > self._budget.most_bytes:
                self.let_go()

    def let_go(self) -> None:
        """Lets go of all mapped pages except those of pinned rows, if they are bounded. The system may still have them,
        and gives them back without reading the disk unless it needed their memory."""
        if self._budget is not None:
            for own in self._rows:
                end = -(-own.pinned_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
                if end < len(own.mapped):
                    with suppress(OSError):  # another thread has locked rows meanwhile, and they stay
                        own.mapped.madvise(mmap.MADV_DONTNEED, end)
            for mapped in self._others:
                mapped.madvise(mmap.MADV_DONTNEED)

    def unpin(self) -> None:
        """Lets go of all mapped pages, if they are bounded."""
        for own in self._rows:
            self._libc.munlock(ctypes.c_void_p(own.address), ctypes.c_size_t(own.pinned_bytes))
            own.num_pinned = 0
        self.let_go()


def mapped_bytes() -> int:
    """Returns how much of mapped files is in this process's memory. Raises ValueError if the system does not say."""
    try:
        return int(STATM.read_bytes().split()[2]) * mmap.PAGESIZE
    except FileNotFoundError:
        raise ValueError(
            f"memory: this system has no {STATM}, which says what is in memory, so no limit can be kept; leave it out"
        ) from None


class SmallLookups(StoredLookups):
    """Looks up rows that are not stored as float32, which the kernels do not read."""

    def __init__(self, tables: Sequence[TableConfig], mapped: MappedTables, form: RowFormat) -> None:
        names = tuple(name for table in tables for name in table.feature_names)
        super().__init__(cast(EmbeddingCollection, SimpleNamespace(tables=tables, feature_names=names)), form)
        self._weights = {name: mapped.weights[table.name] for table in tables for name in table.feature_names}

    def sequence(self, sparse: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the row of every id, as `EmbeddingCollection.sequence` does."""
        bags = {name: sparse.bags(name) for name in self.feature_names}
        return {name: (looked_up(self._weights[name][ids.long()]), offsets) for name, (ids, offsets, _) in bags.items()}


def _map(path: Path, file: IO[bytes], tensor: str, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[mmap.mmap, int]:
    """Maps a safetensors file; returns the mapping, and where `tensor` begins in it.

    Raises ValueError, which names the file, if it does not hold the tensor in this type and shape.
    """
    head_bytes = int.from_bytes(file.read(8), "little")
    try:
        about = json.loads(file.read(min(head_bytes, MAX_HEAD_BYTES)))[tensor]
        begin, end = about["data_offsets"]
        fits = about["dtype"] == _NAMES[dtype] and tuple(about["shape"]) == shape and begin >= 0
        fits = fits and end - begin == dtype.itemsize * shape[0] * shape[1]
        fits = fits and 8 + head_bytes + end <= path.stat().st_size
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"{path} does not hold {tensor} as {dtype} {list(shape)}; export the run again")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 8 + head_bytes + begin

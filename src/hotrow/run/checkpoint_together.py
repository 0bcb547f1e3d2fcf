"""Files of a checkpoint that several ranks write together: whole tables in DRAM, each rank its own rows.

The rows of a rank lie all over a table's file, often several ranks' in one page of memory. So only ranks of one machine
write together, where processes share the pages of a file. Ranks of several machines, or in tiers, write files of their
own instead (checkpoint_rows.py). The file is the same as one process writes, to the byte.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from hotrow.base.door import open_file
from hotrow.base.files import explain_full_disk, naming, open_private, take_room
from hotrow.parallel.agreement import everyone, on_every_rank
from hotrow.parallel.communicator import Communicator
from hotrow.placement.base import Rows
from hotrow.run.checkpoint_files import (
    NO_MAPPING,
    NOT_MAPPABLE,
    FileRecord,
    head_of,
    in_order,
    num_bytes,
    send_down,
)

T = TypeVar("T")
STRIDE_BYTES = 64 << 20
"""How much of a file the ranks fill before they wait for each other: so a page goes to the disk once, when all have
written to it, and few pages wait in memory."""
_NOTHING = 0xFFFFFFFF
"""The value that zlib.crc32 continues with nothing before the first byte: zeros leave it as it is."""


class Window(NamedTuple):
    """Some rows of an array, and the byte of the file at which they begin."""

    array: Rows
    rows: slice
    start: int


def write_together(path: Path, arrays: Mapping[str, Rows], comm: Communicator) -> FileRecord:
    """Writes what `write_tensors` would write alone; returns the same record. Collective.

    Raises ValueError on all ranks if one cannot write, naming it; the file is then left as it is.
    """
    ordered = in_order(arrays)
    head, end = head_of(ordered)
    writing(comm, path.parent, lambda: _make(path, head, end) if comm.rank == 0 else None)
    # A crc32 adds up (as xor): that of the file is the sum of each rank's, with zeros for what others write.
    checksum = zlib.crc32(head) if comm.rank == 0 else _NOTHING
    with on_every_rank(comm, lambda: open_file(path, "r+b", buffering=0)) as file:
        for number, windows in enumerate(_strides([arrays[name] for name, _ in ordered], len(head))):
            checksum = writing(comm, path.parent, partial(_fill, file, windows, checksum))
            if number % comm.size == comm.rank:
                send_down(file)
        writing(comm, path.parent, lambda: _sync(path, file))
    first, *others = everyone(comm, checksum)
    for other in others:
        first ^= other ^ _NOTHING
    return FileRecord(len(head) + end, f"{first:08x}")


def writing(comm: Communicator, folder: Path, function: Callable[[], T]) -> T:
    """Returns what `function` returns, which writes to `folder`, on every rank. See `on_every_rank` and `explained`."""
    return on_every_rank(comm, explained(comm, folder, function))


def explained(comm: Communicator, folder: Path, function: Callable[[], T]) -> Callable[[], T]:
    """Returns `function`, which writes to `folder`, so that its error says what is kept if the disk of a rank is full.

    Alone, the caller says it.
    """

    def explaining() -> T:
        with explain_full_disk(folder, "saving a checkpoint", "Earlier checkpoints are kept.", "resume the run"):
            return function()

    return function if comm.size == 1 else explaining


def _make(path: Path, head: bytes, num_bytes: int) -> None:
    """Makes the file with room for all of it: a write to a mapped page could not say that the disk is full."""
    with naming(path), open_private(path) as file:
        file.write(head)
        file.flush()
        take_room(file, len(head) + num_bytes)


def _sync(path: Path, file: BinaryIO) -> None:
    with naming(path):
        os.fsync(file.fileno())


def _strides(arrays: Sequence[Rows], start: int) -> Iterator[list[Window]]:
    """Yields the windows of a file, whose first array begins at `start`: as many as to fill at once."""
    windows: list[Window] = []
    filled = 0
    for array in arrays:
        row_bytes = num_bytes(array) // max(1, array.shape[0])
        for rows in array.pieces():
            windows.append(Window(array, rows, start + rows.start * row_bytes))
            filled += (rows.stop - rows.start) * row_bytes
            if filled >= STRIDE_BYTES:
                yield windows
                windows, filled = [], 0
        start += num_bytes(array)
    if windows:
        yield windows


def _fill(file: BinaryIO, windows: Sequence[Window], checksum: int) -> int:
    """Writes this rank's rows of the windows; returns the checksum so far, with zeros for rows of others."""
    for array, rows, start in windows:
        ids, values = array.own(rows)
        own = torch.zeros(rows.stop - rows.start, *array.shape[1:], dtype=array.dtype)
        if len(values):
            assert isinstance(ids, Tensor)
            places = ids - rows.start
            own[..., array.columns][places] = values
            _put(file, start, own, places, array.columns)
        if len(values) or checksum != _NOTHING:
            checksum = zlib.crc32(own.view(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _put(file: BinaryIO, start: int, own: Tensor, places: Tensor, columns: slice) -> None:
    """Writes columns of rows to their places in a window of a file, between those of other ranks. own: the window."""
    before = start % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(file.fileno(), before + own.nbytes, offset=start - before)
    except OSError as error:
        if error.errno not in NO_MAPPING:
            raise
        raise ValueError(
            f"ranks cannot write {file.name} together: {NOT_MAPPABLE}; set `run` to a folder on another one, or let "
            "each rank write files of its own: give `memory` a `dram` that is smaller than the tables"
        ) from None
    with mapped:
        page = torch.frombuffer(mapped, dtype=torch.uint8)
        page[before:].view(own.dtype).view(own.shape)[..., columns][places] = own[..., columns][places]
        del page

"""The file of one table's rows, what its file system allows, and the folder of a collection's files.

    [ head: one page of zeros | records ... | tail: one page that is never written ]

The file is sparse, so making one takes the same time at any size. Where records lie:
native/include/hotrow/block_layout.h. The folder is new and locked, and goes with its collection, so that no other
process reads or writes the files, and they need not say what they hold.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotrow.base.files import NETWORK, descriptor_of, file_system
from hotrow.kernels import ops

HEAD_BYTES = 4096
SECTORS = (512, 1024, 2048, 4096)
DIRECT = getattr(os, "O_DIRECT", 0)
NO_ATIME = getattr(os, "O_NOATIME", 0)
"""Leaves the time of the last access alone, which saves a fortieth of a read. Only a file's owner may ask for it."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
PREFIX, SUFFIX = "hotrow-rows-", ".rows"
"""How the name of a collection's folder begins, and how the name of every file in it ends."""
Kind = Literal["dram", "mapped", "block", "gathered"]
BLOCKS: tuple[Kind, ...] = ("block", "gathered")
"""Files past the page cache. Only the process that made a "gathered" one can find its rows (gathered_store.h)."""
PLACES_PER_ROW = 2
"""Places in a gathered file for each row."""
DEPTH = 128
"""I/Os under way together: enough to keep all channels of an SSD busy, in 512 KiB of locked memory."""
LARGE_IO_BYTES = 20480 * (DEPTH // 4)
"""The most memory for I/Os of gathered pages that are under way together."""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """What a store holds: the rows of one table."""

    table: str
    record_bytes: int
    """Of a row: its weights, their low halves, and its optimizer states."""
    num_rows: int


def file_bytes(rows: TableRows, sector: int | None, kind: Kind) -> int:
    """Returns the size of the file, holes included."""
    if sector is None:
        return int(ops.native_module().mapped_file_bytes(rows.record_bytes, rows.num_rows))
    return int(ops.native_module().block_layout(rows.record_bytes, sector, rows.num_rows, kind == "gathered")[4])


def padded_record_bytes(rows: TableRows, sector: int | None, kind: Kind) -> float:
    """Returns what a record takes on disk, with padding and, if gathered, the places that are kept free for it."""
    if sector is None:
        return float(rows.record_bytes)
    gathered = kind == "gathered"
    _, unit_rows, page_bytes, page_units, _ = ops.native_module().block_layout(rows.record_bytes, sector, 0, gathered)
    return float(page_bytes / (page_units * unit_rows)) * (PLACES_PER_ROW if gathered else 1)


def page_records(record_bytes: int, sector: int = SECTORS[0]) -> int | None:
    """Returns how many records a page of a gathered file holds; None if they cannot be gathered."""
    layout = ops.native_module().block_layout(record_bytes, sector, 0, True)  # noqa: FBT003
    return layout[1] * layout[3] if layout else None


def make_file(path: Path, rows: TableRows, kind: Kind) -> tuple[Kind, int | None]:
    """Makes the file of `rows` (mode 0600), or makes it long enough if it is there. Returns its kind, and the sector
    that records are laid out by, or None if they have no padding. The kind is "block" if records cannot be gathered in
    sectors of this size. Raises OSError from the file system."""
    with descriptor_of(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
        sector = _sector(path) if kind in BLOCKS else None
        if kind == "gathered" and page_records(rows.record_bytes, sector or SECTORS[0]) is None:
            kind = "block"
        os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, file_bytes(rows, sector, kind)))
    return kind, sector


def _sector(path: Path) -> int:
    """Returns the sector that direct I/O on a file needs, or the smallest if direct I/O is refused."""
    told = 0
    with suppress(OSError), descriptor_of(path, os.O_RDWR | DIRECT) as descriptor:
        told = int(ops.native_module().direct_sector(descriptor))
    return told if told in SECTORS else SECTORS[0]


def no_disk(folder: Path) -> str | None:
    """Returns why rows that leave memory should not go to `folder`: it is memory, or remote. None if they may."""
    kind = file_system(folder)
    if kind in IN_MEMORY:
        return f"{folder} is memory ({kind}): what lies there is no smaller than in DRAM; name a disk's folder"
    if kind in NETWORK:
        return f"{folder} is on a network file system ({kind}); name a folder of a disk of this machine"
    return None


def open_direct(path: Path, sector: int) -> tuple[int | None, str]:
    """Returns a descriptor past the page cache, tried with one real read; or None and the reason."""
    if reason := no_disk(path.parent):
        return None, reason
    kind = file_system(path)
    if not DIRECT:
        return None, "this system has no O_DIRECT"
    flags = os.O_RDWR | DIRECT | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, flags | NO_ATIME)
        except PermissionError:
            descriptor = os.open(path, flags)
    except OSError as error:
        return None, f"the file system of {path.parent} ({kind}) refuses O_DIRECT ({error.strerror}); use ext4 or xfs"
    error_number = ops.native_module().try_read(descriptor, sector)
    if error_number:
        os.close(descriptor)
        text = os.strerror(error_number)
        return None, f"direct reads of {sector} bytes fail in {path.parent} ({kind}: {text}); use ext4 or xfs"
    return descriptor, ""


def direct_io(folder: Path) -> dict[str, Any]:
    """Returns whether block stores in `folder` go past the page cache, if not why, and their sector's bytes."""
    if (absent := ops.backend().reason) is not None:
        return {"direct_io": False, "direct_io_refused": absent, "sector_bytes": None}
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hotrow-") as file:
            file.write(bytes(HEAD_BYTES))
            file.flush()
            path = Path(file.name)
            sector = _sector(path)
            descriptor, reason = open_direct(path, sector)
    except OSError as error:
        descriptor, reason = None, f"{folder} takes no file ({error.strerror})"
    if descriptor is None:
        return {"direct_io": False, "direct_io_refused": reason, "sector_bytes": None}
    os.close(descriptor)
    return {"direct_io": True, "direct_io_refused": None, "sector_bytes": sector}


class FolderError(OSError):
    """The error for a folder that takes no files. Its text leaves out the system's number, which is in `errno`."""

    def __str__(self) -> str:
        return str(self.strerror)


def takes_no_files(folder: Path) -> str | None:
    """Returns why no folder can be made in `folder`; None if it seems that one can. Makes nothing."""
    there = folder.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"this process may not write in {there}"


class OwnFolder:
    """A new folder in `parent`, locked while it is in use. Folders beside it whose owner is dead are removed first,
    because a killed process cannot remove its own. Raises FolderError, which names `parent`, if it cannot be
    written."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(parent):  # so that nobody removes the new folder before it is locked
                remove_left_folders(parent)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            cure = "choose another folder for tables on disk (config memory.ssd or memory.file, or hotrow.Memory)"
            raise FolderError(error.errno, f"no files can be made in {parent}: {error.strerror}; {cure}") from error

    def remove(self) -> None:
        """Removes the folder with its files, and gives back the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # explicitly: a forked child may hold the descriptor too
        os.close(self._descriptor)


def remove_left_folders(parent: Path) -> list[Path]:
    """Removes folders of rows that nobody has locked, and returns them."""
    return [
        path for path in parent.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink() and _remove_left(path)
    ]


def _remove_left(path: Path) -> bool:
    # An error: it is another user's, in use, just removed by its owner, or on a file system that has no locks.
    with suppress(OSError), descriptor_of(path, os.O_RDONLY) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all(file.suffix == SUFFIX for file in path.iterdir()):  # else it is not hotrow's
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with descriptor_of(folder, os.O_RDONLY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            text = f"its file system ({file_system(folder)}) cannot lock what is in use ({error.strerror})"
            raise OSError(error.errno, text) from error
        yield

"""The file of one table's rows (a header, a lock, what its file system allows), and the folder of a collection's files.

    [ header: one page, JSON and zeros | records ... | tail: one page that is never written ]

The header holds format version, kind, identity of the model, table, the parts of a record, rows and sector. A truncated
file, a file of another model or table, and a file that another process has open are refused by name. The file is
sparse, so making one takes the same time at any size. Where records lie: native/include/hotrow/block_layout.h.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hotrow.base.files import NETWORK, file_system, sync_folder
from hotrow.kernels import ops

VERSION = 2
"""Version 1 had no tail."""
HEADER_BYTES = 4096
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
    parts: tuple[tuple[str, int], ...]
    """Name and bytes of each part of a record, in order: weights, low halves, optimizer states."""
    num_rows: int
    identity: str = ""
    """Identity of the model that the table belongs to; a file with another identity is refused."""

    def __post_init__(self) -> None:
        if not self.parts or any(num_bytes < 1 for _, num_bytes in self.parts):
            raise ValueError(f"table {self.table!r}: parts are {self.parts}; each part of a record has at least a byte")
        if self.num_rows < 0:
            raise ValueError(f"table {self.table!r}: num_rows is {self.num_rows}; it must not be negative")

    @property
    def record_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


@dataclass(frozen=True)
class OpenFile:
    """A locked file: its descriptor, and the sector its records are laid out by (if None, no padding)."""

    path: Path
    descriptor: int
    sector: int | None
    kind: Kind
    """"block" for records that cannot be gathered in sectors of this size."""

    def close(self) -> None:
        """Unlocks and closes the file; unlocks it explicitly, because a forked child may hold the descriptor too."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


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


def open_file(path: Path, rows: TableRows, kind: Kind) -> OpenFile:
    """Opens and locks the file of `rows` at `path`; makes it if there is none (mode 0600, sparse), else checks it.

    Raises BlockingIOError if another process has it open, ValueError if it belongs to another table, is truncated or is
    not a store's file, and OSError from the file system.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        is_new = True
    except FileExistsError:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        is_new = False
    try:
        _lock(descriptor, path)
        if kind in BLOCKS and hasattr(os, "posix_fadvise"):
            # Reading ahead of the header would put rows into the page cache, together with it; a header that is written
            # anew then meets direct writes of those rows, which the system takes for lost (EIO at the next fsync).
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if kind == "gathered" and is_new and page_records(rows.record_bytes, _sector(path)) is None:
            kind = "block"
        sector = _make(descriptor, path, rows, kind) if is_new else _check(descriptor, path, rows, kind)
    except BaseException:
        os.close(descriptor)
        if is_new:
            path.unlink(missing_ok=True)
        raise
    return OpenFile(path, descriptor, sector, kind)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"{path} is open already, here or in another process: two writers would spoil the rows. "
            "Wait until the other run ends, or give this one a folder of its own",
        ) from None
    except OSError as error:
        raise FolderError(error.errno, f"{path}: {_no_locks(path, error)}; choose another folder") from error


def _no_locks(path: Path, error: OSError) -> str:
    return f"its file system ({file_system(path)}) cannot lock what is in use ({error.strerror})"


def _make(descriptor: int, path: Path, rows: TableRows, kind: Kind) -> int | None:
    sector = None
    if kind in BLOCKS:
        sector = _sector(path)
    write_header(descriptor, rows, kind, sector)
    os.ftruncate(descriptor, file_bytes(rows, sector, kind))
    os.fsync(descriptor)
    sync_folder(path.parent)
    return sector


def write_header(descriptor: int, rows: TableRows, kind: Kind, sector: int | None) -> None:
    """Writes the first page; the caller syncs it. Raises ValueError if names are too long for it."""
    header = {"format": "hotrow store", "version": VERSION, "kind": kind, "sector": sector, **asdict(rows)}
    page = json.dumps(header).encode()
    if len(page) > HEADER_BYTES:
        raise ValueError(f"table {rows.table!r}: names and parts need {len(page)} bytes of a header's {HEADER_BYTES}")
    os.pwrite(descriptor, page.ljust(HEADER_BYTES, b"\0"), 0)


def _check(descriptor: int, path: Path, rows: TableRows, kind: Kind) -> int | None:
    if kind == "gathered":
        raise ValueError(
            f"{path} is there already, and only the process that wrote a gathered file knows where its rows lie: name "
            "another path, or remove it"
        )
    found = _read_header(descriptor, path)
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path}: format version {found.get('version')!r}, this hotrow reads {VERSION}: use the one that wrote it, "
            "or remove the file and resume from a checkpoint"
        )
    expected = {**json.loads(json.dumps(asdict(rows))), "kind": kind}
    for key, value in expected.items():
        if key not in found or (key == "num_rows" and found[key] <= value):
            continue
        if found[key] != value:
            raise ValueError(
                f"{path} holds {key} {found[key]!r}, expected {value!r}: it is another model's or table's file. "
                "Put the right one back, or give this run a folder of its own"
            )
    sector: int | None = found.get("sector")
    if (sector is not None) != (kind in BLOCKS) or sector not in (None, *SECTORS):
        raise ValueError(
            f"{path}: sector is {sector!r}, allowed are {SECTORS}; the header is damaged, restore the file"
        )
    wanted = file_bytes(replace(rows, num_rows=found["num_rows"]), sector, kind)
    size = os.fstat(descriptor).st_size
    if size < wanted:
        raise ValueError(
            f"{path} is truncated: {size:,} bytes, its {found['num_rows']:,} rows of table {rows.table!r} need "
            f"{wanted:,}. Restore it, or remove it and resume from a checkpoint"
        )
    if found["num_rows"] < rows.num_rows:
        os.ftruncate(descriptor, file_bytes(rows, sector, kind))
        write_header(descriptor, rows, kind, sector)
        os.fsync(descriptor)
    return sector


def _read_header(descriptor: int, path: Path) -> dict[str, Any]:
    page = os.pread(descriptor, HEADER_BYTES, 0)
    try:
        found = json.loads(page.rstrip(b"\0").decode())
        good = found["format"] == "hotrow store" and isinstance(found["num_rows"], int) and found["num_rows"] >= 0
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if len(page) < HEADER_BYTES or not good:
        raise ValueError(
            f"{path} is not a store of hotrow, or its header is damaged: restore it, or remove it and resume from a "
            "checkpoint"
        )
    return dict(found)


def _sector(path: Path) -> int:
    """Returns the sector that direct I/O on a file needs, or the smallest if direct I/O is refused."""
    try:
        descriptor = os.open(path, os.O_RDWR | DIRECT | os.O_CLOEXEC)
    except OSError:
        return SECTORS[0]
    try:
        told = int(ops.native_module().direct_sector(descriptor))
    finally:
        os.close(descriptor)
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
            file.write(bytes(HEADER_BYTES))
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
    """A new folder in `parent`, with a lock that says that it is in use.

    Folders beside it whose owner is dead are removed first, because a killed process cannot remove its own. Raises
    FolderError, which names `parent`, if it cannot be written.
    """

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
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(file.suffix != SUFFIX for file in path.iterdir()):
            return False  # not hotrow's
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except OSError:  # in use, just removed by its owner, or on a file system that has no locks
        return False
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(error.errno, _no_locks(folder, error)) from error
        yield
    finally:
        os.close(descriptor)

"""Files that are either complete or absent, safe file names, sizes in bytes, and free disk space.

Everything hotrow writes goes through `atomic_write` (write beside the target, fsync, rename), so that a half-written
file cannot be mistaken for a complete one. Data is private: only the owner can read the files (mode 0600).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import reprlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

from hotrow.base.door import open_file, remove

PARTIAL_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITTEN = (*_FULL, errno.EFBIG, errno.EROFS)
"""Errors that only a write has."""
MAX_NAME_BYTES = 200
"""Common file systems allow 255 bytes in a name; this leaves room for our suffixes."""

LOCK = ".lock"
_NETWORK_FUSE = ("sshfs", "glusterfs", "ceph", "ceph-fuse", "s3fs", "rclone", "gcsfuse", "juicefs", "mount-s3")
NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "beegfs", "gpfs", "pvfs2", "virtiofs"),
    *(f"fuse.{name}" for name in _NETWORK_FUSE),
)
"""File systems by their names in /proc/self/mountinfo. An overlay, and a FUSE mount without a subtype, do not tell what
they lie on: they pass for disks."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


MAX_BYTES = 2**63 - 1
"""The largest size that is accepted: more bytes than any machine has."""


def parse_bytes(size: int | str, *, what: str = "size") -> int:
    """Returns the bytes in text such as "2GiB", "500 MB" or "4g", or the number itself. Raises ValueError, which names
    `what`, for other text and for a number beyond MAX_BYTES."""
    number: float = 0
    if isinstance(size, int):
        number = size
    elif (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower())) and found[2] in _UNITS:
        number = float(found[1]) * _UNITS[found[2]]
    else:
        raise ValueError(
            f"{what} {reprlib.repr(size)} is not understood; write a number and a unit, such as 2GiB or 500MB"
        )
    if abs(number) > MAX_BYTES:
        raise ValueError(f"{what} {_short(size)} is more than the {MAX_BYTES:,} bytes that a size may have; lower it")
    return int(number)


def _short(value: int | str) -> str:
    """Returns `value` for an error: whole digits of a large number help nobody, and Python refuses to write some."""
    return reprlib.repr(value) if isinstance(value, str) else f"with {value.bit_length():,} bits"


def size(num_bytes: float) -> str:
    """Formats a number of bytes for people; a negative number is shown as 0."""
    for unit, form in (("GiB", ",.2f"), ("MiB", ",.1f"), ("KiB", ",.1f")):
        if num_bytes >= _UNITS[unit.lower()]:
            return f"{num_bytes / _UNITS[unit.lower()]:{form}} {unit}"
    return f"{max(num_bytes, 0):,.0f} bytes"


class ByteRate(NamedTuple):
    """A rate: `num_bytes` in `seconds`."""

    num_bytes: int
    seconds: int
    text: str
    """The text it was read from."""


def parse_byte_rate(text: str) -> ByteRate:
    """Reads bytes per hour or day from text such as "200GB/day". Raises ValueError for anything else."""
    size, _, unit = text.partition("/")
    seconds = {"day": 86_400, "d": 86_400, "hour": 3600, "h": 3600}.get(unit.strip().lower())
    try:
        num_bytes = parse_bytes(size) if seconds else 0
    except ValueError:
        num_bytes = 0
    if not seconds or num_bytes <= 0:
        raise ValueError(
            f"rate {reprlib.repr(text)} is not understood; write bytes per day or hour, such as 200GB/day or 10GiB/hour"
        )
    return ByteRate(num_bytes, seconds, text)


def folder_bytes(path: Path) -> int:
    """Returns the bytes of the files in `path`, without those that have hard links elsewhere."""
    found = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(stat.st_size for stat in found if stat.st_nlink == 1)


def open_private(path: Path) -> BinaryIO:
    """Opens an empty binary file at `path`, mode 0600. It empties an existing file and follows no symbolic link."""
    return open_file(path, "wb", buffering=1 << 20)


def take_room(file: BinaryIO, num_bytes: int) -> None:
    """Gives an open file room on the disk for `num_bytes`, so that a full disk is an error here, not a crash when the
    file is mapped and written to. A shorter file grows. Systems that cannot reserve room, like macOS, leave a hole."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    elif os.fstat(file.fileno()).st_size < num_bytes:
        os.ftruncate(file.fileno(), num_bytes)


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in `folder` durable."""
    with descriptor_of(folder, os.O_RDONLY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
                raise


@contextmanager
def descriptor_of(path: Path, flags: int) -> Iterator[int]:
    """Yields a descriptor of the file or folder `path`; a file that `flags` create is private."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Names `path`, to which the block writes, in an OSError without a name: a write knows only its descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_WRITTEN and error.filename is None and not isinstance(error, FullDiskError):
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: Path | str) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `path` when the block ends, or is removed if the block raises.

    The bytes go to `<path>.partial` (mode 0600), are flushed to disk, and then replace `path`, whose folder is synced
    too. Raises the file system's OSError; `path` is then unchanged and the partial file is gone. If `path` could not be
    written, the error's `filename` is `path`.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    file = open_private(partial)
    try:
        with naming(path):
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """Writes `value` as UTF-8 JSON for other programs, atomically. Files that hotrow reads back use records.py. Raises
    ValueError for NaN and infinity, which JSON does not have."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def check_name(name: str, *, what: str = "name") -> str:
    """Returns `name` if it may become a file name: one path component, printable, not hidden, at most 200 bytes. Raises
    ValueError, which names `what`, for an empty name, a leading ".", "/", a backslash or a control character."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} is {name!r}; it must be a non-empty string")
    if name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise ValueError(
            f"{what} is {name!r}; it becomes a file name, so it must not start with '.' or hold '/', '\\' or "
            "control characters: rename it"
        )
    if (num_bytes := len(check_text(name, what=what).encode())) > MAX_NAME_BYTES:
        raise ValueError(f"{what} {name[:40]!r}... has {num_bytes} bytes; at most {MAX_NAME_BYTES} are allowed")
    return name


def check_text(name: str, *, what: str = "name") -> str:
    """Returns `name` if it can be written as UTF-8; it may be empty. Raises ValueError, which names `what`."""
    try:
        name.encode()
    except (UnicodeEncodeError, AttributeError):
        raise ValueError(f"{what} is {name!r}; it must be valid Unicode text: rename it") from None
    return name


def check_path(path: str, *, what: str = "path") -> str:
    """Returns `path` if its characters are allowed in a file's path. Raises ValueError, which names `what`."""
    if "\0" in check_text(path, what=what):
        raise ValueError(f"{what} is {path!r}; no file can have the character NUL in its path: remove it")
    return path


def file_name(name: str) -> str:
    """Returns a file name for any name of a table: the name itself if `check_name` allows it, else an escaped form.

    Escaped names begin with "%": bytes other than letters, digits, "_", "." and "-" become %XX, and a long one ends in
    a hash instead. Different names have different file names. Raises ValueError for text that is not valid Unicode.
    """
    check_text(name)
    with suppress(ValueError):
        if not name.startswith("%"):
            return check_name(name)
    escaped = "%" + quote(name, safe="")
    if len(escaped) <= MAX_NAME_BYTES:
        return escaped
    return f"{escaped[: MAX_NAME_BYTES - 66].rpartition('%')[0]}%-{hashlib.sha256(name.encode()).hexdigest()}"


@contextmanager
def claim(path: Path, *, shared: bool = False) -> Iterator[bool | None]:
    """Yields whether this process has the folder to itself inside the block; a kill releases it too.

    shared: others may share it, but nobody may have it alone. Yields None if the file system has no locks. A folder is
    locked itself, or by its file LOCK if that does not work or would not be seen on other machines.
    """
    itself = [] if file_system(path) in NETWORK else [(path, os.O_RDONLY)]
    claimed, descriptor = None, None
    for target, flags in (*itself, (path / LOCK, os.O_RDWR | os.O_CREAT)):
        with suppress(OSError):
            descriptor, claimed = _locked(target, flags, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            break
    try:
        yield claimed
    finally:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # by name: a forked child may hold the descriptor too
            os.close(descriptor)


def claim_or_fail(folder: Path, stack: ExitStack) -> None:
    """Claims a folder until `stack` closes. Raises ValueError if another process has it."""
    if stack.enter_context(claim(folder)) is False:
        raise ValueError(f"another process works in {folder}: wait until it has ended, or pass another --out")


def remove_unheld(path: Path) -> bool:
    """Removes a folder, unless somebody has claimed it; returns whether it is gone."""
    with claim(path) as is_ours:
        if is_ours is not False:
            remove(path)
    return is_ours is not False


def _locked(path: Path, flags: int, how: int) -> tuple[int, bool]:
    """Returns a descriptor of `path`, and whether it is locked by this process. Raises OSError if it has no locks."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, True


def is_seen(path: Path) -> bool:
    """Returns whether `path` exists, also if another machine has just made it in a folder that this one caches, as NFS
    does: it then asks the server what is new there."""
    try:
        return any(each.name == path.name for each in path.parent.iterdir())
    except OSError:
        return False


def check_writable(folder: Path) -> None:
    """Raises ValueError if `folder`, a new folder or file, cannot be made in its nearest existing parent."""
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "may not be written to" if parent.is_dir() else "is not a folder"
        raise ValueError(f"{folder} cannot be made: {parent} {why}; choose another place")


def disk_free_bytes(path: Path | str) -> int:
    """Returns how many bytes this process may still write at `path` or its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def crc32(path: Path, start: int = 0, stop: int | None = None, *, within: Path | None = None) -> int:
    """Returns the crc32 of bytes [start, stop) of a file, which is read in pieces of 16 MiB. stop: if None, its end.
    within: see `open_file`."""
    with open_file(path, within=within) as file:
        crc, left = 0, (os.fstat(file.fileno()).st_size if stop is None else stop) - start
        file.seek(start)
        while left > 0 and (piece := file.read(min(left, 1 << 24))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    return crc


def join_crc32(first: int, second: int, num_bytes: int) -> int:
    """Returns the crc32 of two pieces end to end, from the crc32 of each; num_bytes: the length of the second.

    A crc32 is the remainder of a polynomial over bits. `num_bytes` zeros behind the first piece multiply it by
    x^(8 num_bytes), and the second piece is added (Mark Adler's crc32_combine in zlib).
    """
    power, square, exponent = 1 << 31, 1 << 30, 8 * num_bytes  # bit 31 is x^0, bit 30 is x
    while exponent:
        power = _times(power, square) if exponent & 1 else power
        square, exponent = _times(square, square), exponent >> 1
    return _times(power, first) ^ second


def _times(first: int, second: int) -> int:
    """Returns the product of two remainders modulo the polynomial of crc32."""
    product = 0
    while first:
        product ^= second if first >> 31 else 0
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (0xEDB88320 if second & 1 else 0)
    return product


def file_system(path: Path | str) -> str | None:
    """Returns the type of the file system of `path` ("ext4", "tmpfs", ...); None if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    found, longest, resolved = None, -1, Path(path).resolve()
    for line in lines:
        before, after = line.split(" - ", 1)
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        if resolved.is_relative_to(point) and len(point) >= longest:  # a later mount on one point covers an earlier one
            found, longest = after.split()[0], len(point)
    return found


def check_room(path: Path, num_bytes: int, *, what: str, cure: str) -> None:
    """Raises ValueError, which names `what` and the cure, if the disk of `path` has fewer bytes free."""
    free = disk_free_bytes(path)
    if num_bytes > free:
        short = -(-(num_bytes - free) // 2**20)
        raise ValueError(f"{what} {path} needs {short} MiB more than the disk has free; free some or {cure}")


class FullDiskError(OSError):
    """No space on disk. The message already says what is kept and how to continue."""


@contextmanager
def explain_full_disk(
    folder: Path, doing: str, kept: str | Callable[[], str], cure: str = "run the same command again"
) -> Iterator[None]:
    """Adds to "no space" errors of the block what was being done, what is kept and how to continue. kept: text, or a
    function if the text is known only once the disk is full. Errors of an inner block pass unchanged."""
    try:
        yield
    except FullDiskError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        path = error.filename if isinstance(error.filename, (str, Path)) and os.sep in str(error.filename) else None
        file = f", writing {path}" if path else ""  # native code has only a descriptor
        told = kept if isinstance(kept, str) else kept()
        raise FullDiskError(
            error.errno,
            f"disk full while {doing} in {folder}{file} ({disk_free_bytes(folder):,} bytes free). {told} "
            f"Free some space, then {cure}",
        ) from error

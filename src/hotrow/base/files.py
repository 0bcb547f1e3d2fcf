"""Files that are whole or absent, names that stay in their folder, and how much memory and disk there is to use.

Everything hotrow writes goes through `atomic_write`: beside the target, fsync, rename, so that a half-written artifact
cannot be mistaken for a whole one. Data is private: files are created readable by their owner alone (0600).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

PARTIAL_SUFFIX = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_NAME_BYTES = 200
"""File names end at 255 bytes on every common file system; this leaves room for our own suffixes."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text such as "2GiB", "500 MB" or "4g". Raises ValueError for anything else."""
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"size {size!r} is not understood; write a number and a unit, such as 2GiB or 500MB")
    return int(float(found[1]) * _UNITS[found[2]])


def size(num_bytes: float) -> str:
    """Bytes for people; fewer than none are none."""
    for unit, form in (("GiB", ",.2f"), ("MiB", ",.1f"), ("KiB", ",.1f")):
        if num_bytes >= _UNITS[unit.lower()]:
            return f"{num_bytes / _UNITS[unit.lower()]:{form}} {unit}"
    return f"{max(num_bytes, 0):,.0f} bytes"


class ByteRate(NamedTuple):
    """So many bytes in so many seconds."""

    num_bytes: int
    seconds: int
    text: str
    """As it was written."""


def parse_byte_rate(text: str) -> ByteRate:
    """Bytes per hour or day from text such as "200GB/day". Raises ValueError for anything else."""
    size, _, unit = text.partition("/")
    seconds = {"day": 86_400, "d": 86_400, "hour": 3600, "h": 3600}.get(unit.strip().lower())
    try:
        num_bytes = parse_bytes(size) if seconds else 0
    except ValueError:
        num_bytes = 0
    if not seconds or num_bytes <= 0:
        raise ValueError(
            f"rate {text!r} is not understood; write bytes per day or hour, such as 200GB/day or 10GiB/hour"
        )
    return ByteRate(num_bytes, seconds, text)


def folder_bytes(path: Path) -> int:
    """Of the files in the folder `path`, those it shares with another by hard links left out."""
    found = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(stat.st_size for stat in found if stat.st_nlink == 1)


def open_private(path: Path) -> BinaryIO:
    """A new, empty binary file at `path`, mode 0600; an existing file is emptied, a symbolic link is not followed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "wb", buffering=1 << 20)


def sync_folder(folder: Path) -> None:
    """Make the renames and removals done in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` when the block ends well, and vanishes when it raises.

    The bytes go to `<path>.partial` (mode 0600), are flushed to disk, then renamed over `path`, whose folder is synced
    too. Raises OSError as the file system gives it, with neither file changed or left behind; where the disk is full,
    `filename` is `path`.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    file = open_private(partial)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            error.filename = str(path)  # a write does not know its file
        raise
    sync_folder(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as UTF-8 JSON for others to read, atomically; what hotrow reads back goes through records.py.

    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def check_name(name: str, *, what: str = "name") -> str:
    """`name`, if it may become a file name: one path component, printable, not hidden, at most 200 bytes.

    Raises ValueError saying `what` is wrong otherwise: empty, a leading ".", "/", a backslash, a control character.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} is {name!r}; it must be a non-empty string")
    if name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise ValueError(
            f"{what} is {name!r}; it becomes a file name, so it must not start with '.' or hold '/', '\\' or "
            "control characters: rename it"
        )
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {name!r}; it must be valid Unicode: rename it") from None
    if num_bytes > MAX_NAME_BYTES:
        raise ValueError(f"{what} {name[:40]!r}... has {num_bytes} bytes; at most {MAX_NAME_BYTES} are allowed")
    return name


def check_text(name: str, *, what: str = "name") -> str:
    """`name`, if it is text that can be written as UTF-8; it may be empty. Raises ValueError saying `what` is not."""
    try:
        name.encode()
    except (UnicodeEncodeError, AttributeError):
        raise ValueError(f"{what} is {name!r}; it must be valid Unicode text: rename it") from None
    return name


def file_name(name: str) -> str:
    """A file name for whatever text a table is called: itself if `check_name` allows that, else an escaped form.

    Escaped names begin with "%": bytes other than letters, digits, "_", "." and "-" become %XX, and a long one ends in
    a hash instead. Different names have different file names. Raises ValueError for what is not valid Unicode.
    """
    check_text(name)
    with suppress(ValueError):
        if not name.startswith("%"):
            return check_name(name)
    escaped = "%" + quote(name, safe="")
    if len(escaped) <= MAX_NAME_BYTES:
        return escaped
    return f"{escaped[: MAX_NAME_BYTES - 66].rpartition('%')[0]}%-{hashlib.sha256(name.encode()).hexdigest()}"


def check_writable(folder: Path) -> None:
    """Raises ValueError where the new folder or file `folder` cannot be made in the nearest parent that exists."""
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "may not be written to" if parent.is_dir() else "is no folder"
        raise ValueError(f"{folder} cannot be made: {parent} {why}; choose another place")


def disk_free_bytes(path: Path | str) -> int:
    """Bytes this process may still write at `path`, or at its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def file_system(path: Path | str) -> str | None:
    """The type of the file system `path` lies on ("ext4", "tmpfs", ...); None where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    found, longest, resolved = None, -1, Path(path).resolve()
    for line in lines:
        before, after = line.split(" - ", 1)
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        if resolved.is_relative_to(point) and len(point) >= longest:  # of two on one point, the later covers the other
            found, longest = after.split()[0], len(point)
    return found


class FullDiskError(OSError):
    """No space on disk, with what is kept and how to go on already said."""


@contextmanager
def explain_full_disk(
    folder: Path, doing: str, kept: str | Callable[[], str], cure: str = "run the same command again"
) -> Iterator[None]:
    """Raise "no space" errors of the block again, saying what was being done, what is kept and how to go on.

    kept: a function where it is known only once the disk is full.

    Those of an inner block have said so, and pass.
    """
    try:
        yield
    except FullDiskError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        path = error.filename if isinstance(error.filename, (str, Path)) and os.sep in str(error.filename) else None
        file = f", writing {path}" if path else ""  # native code that was given a descriptor knows no path
        told = kept if isinstance(kept, str) else kept()
        raise FullDiskError(
            error.errno,
            f"disk full while {doing} in {folder}{file} ({disk_free_bytes(folder):,} bytes free). {told} "
            f"Free some space, then {cure}",
        ) from error

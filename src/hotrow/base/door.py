"""The door to the files of an artifact: a dataset, a run, a checkpoint, an export. No link leads out of its folder.

An artifact may come from anywhere, and it holds regular files and real folders alone. Its own folder may be a link,
because users link their data folders; nothing below it may be one. `check_folder` refuses an artifact that holds a
link, a named pipe, a device or a socket. `open_file`, `make_folder` and `remove` then walk down from the folder
without following a link, so that nothing outside is read, written or removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

Mode = Literal["rb", "wb", "ab", "r+b"]
_FLAGS = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "r+b": os.O_RDWR,
}
# Opening a named pipe would wait for its other end, and opening a terminal could make it ours.
_NEVER = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_LEVELS = 64
"""How deep the folders of an artifact may nest. hotrow's nest five deep, and Python cannot walk or remove a thousand
levels."""
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path | str, mode: Mode = "rb", *, within: Path | None = None, buffering: int = -1) -> BinaryIO:
    """Opens the regular file at `path` and follows no link below the folder `within`, by default the file's own folder.

    "wb" and "ab" make a missing file, mode 0600. Raises ValueError, which says what is there and what to do, if it is
    not a regular file; OSError as the system gives it, FileNotFoundError among them.
    """
    path = Path(path)
    with _parent(path, within) as parent:
        try:
            descriptor = os.open(path.name, _FLAGS[mode] | _NEVER, 0o600, dir_fd=parent)
        except OSError as error:
            _explain(path, parent, error)
    try:
        found = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(found):
            raise _refusal(path, found, "a file")
        if mode == "wb":
            os.ftruncate(descriptor, 0)  # only now: it is a file of ours to empty
        return os.fdopen(descriptor, mode, buffering)
    except BaseException:
        with suppress(OSError):  # fdopen may have closed it
            os.close(descriptor)
        raise


def read_file(path: Path | str) -> bytes:
    """Returns the content of a regular file. See `open_file`."""
    with open_file(path) as file:
        return file.read()


def is_there(path: Path | str, *, within: Path | None = None) -> bool:
    """Returns whether the file `path` exists. Raises ValueError if something else than a regular file is there."""
    try:
        open_file(path, within=within).close()
    except FileNotFoundError:
        return False
    return True


def is_taken(path: Path | str) -> bool:
    """Returns whether anything is at `path`, even a link that leads nowhere."""
    return os.path.lexists(path)


def make_folder(path: Path | str, *, within: Path | None = None) -> None:
    """Makes the folder `path`, and missing ones above it, for the owner alone (mode 0700). It may exist already. Raises
    ValueError if something else is there, or, below the folder `within`, a link."""
    path = Path(path)
    if not path.parent.exists():
        make_folder(path.parent, within=None if path.parent == within else within)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if within is not None:
            check_real(path)
        elif not path.is_dir():
            raise _refusal(path, path.lstat().st_mode, "a folder") from None


def remove(path: Path, *, within: Path | None = None) -> None:
    """Removes the file, link or whole folder `path`, if there is one. Of a link, only the link itself goes. No link
    below `within`, by default the folder of `path`, is followed: ValueError is raised instead."""
    with suppress(FileNotFoundError), _parent(path, within) as parent:
        if stat.S_ISDIR(os.lstat(path.name, dir_fd=parent).st_mode):
            shutil.rmtree(path.name, dir_fd=parent)
        else:
            os.unlink(path.name, dir_fd=parent)


def check_folder(folder: Path, *, files: Collection[str] = (), folders: Collection[str] = ()) -> None:
    """Raises ValueError, naming the first that is not, unless all below `folder` are regular files and real folders,
    at most MAX_LEVELS deep.

    files, folders: names that only a file, or only a folder, may have directly in it. `folder` may be a link.
    """
    for entry, mode in _entries(folder):
        path, is_folder = folder / entry, stat.S_ISDIR(mode)
        if not (is_folder or stat.S_ISREG(mode)):
            raise _refusal(path, mode, "a folder" if entry in folders else "a file")
        if is_folder if entry in files else entry in folders and not is_folder:
            raise _refusal(path, mode, "a folder" if entry in folders else "a file")


def check_real(path: Path) -> None:
    """Raises ValueError if something else than a folder is at `path`, such as a link to one."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(found := path.lstat().st_mode):
            raise _refusal(path, found, "a folder")


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields the path in `folder` and the kind of each entry; what another process removes meanwhile is left out, and
    so is what lies in a folder that this process may not read. Raises ValueError beyond MAX_LEVELS."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        if below.count("/") > MAX_LEVELS:
            raise ValueError(
                f"{folder} holds folders that nest more than {MAX_LEVELS} deep, which none of hotrow's do: remove "
                f"{folder / below.partition('/')[0]}"
            )
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder / below) as found:
            for entry in found:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield name, stat.S_IFDIR
                    waiting.append(f"{name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield name, stat.S_IFREG
                else:
                    with suppress(FileNotFoundError):
                        yield name, entry.stat(follow_symlinks=False).st_mode


@contextmanager
def _parent(path: Path, within: Path | None) -> Iterator[int]:
    """Yields a descriptor of the folder of `path`, to which no link below `within` led."""
    place = path.parent if within is None else within
    names = path.parent.relative_to(place).parts
    assert ".." not in names and path.name not in ("", ".."), f"{path} leaves its folder"
    descriptor = os.open(place, _FOLDER)
    try:
        for name in names:
            place /= name
            try:
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                _explain(place, descriptor, error, wanted="a folder")
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _explain(path: Path, parent: int, error: OSError, wanted: str = "a file") -> None:
    """Raises ValueError if the error is because of what lies at `path`; otherwise the error, with the whole path."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK, errno.ENODEV):
        with suppress(FileNotFoundError):
            raise _refusal(path, os.lstat(path.name, dir_fd=parent).st_mode, wanted) from None
    error.filename = str(path)
    raise error


def _refusal(path: Path, mode: int, wanted: str) -> ValueError:
    found = next((name for is_one, name in _KINDS if is_one(mode)), "something unknown")
    return ValueError(
        f"{path} is {found}, and only {wanted} may be there: hotrow follows no link in a folder that it reads or "
        f"writes, and opens no pipe or device; put {wanted} itself there, or remove it"
    )

"""The folder of a collection's files: locked while the collection lives; what killed processes left is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX, SUFFIX = "hotrow-rows-", ".rows"
"""How the folder's name begins, and how the name of every file in it ends."""


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
        return f"{there} is no folder"
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
    except (BlockingIOError, FileNotFoundError):  # in use, or just removed by its owner
        return False
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""Where raw files lie and how their bytes come: paths and URIs through Arrow's file systems, gzip and zstd as a stream.

Decompression is bounded: bytes are produced only as they are asked for, whatever a file claims to hold.
"""

from __future__ import annotations

import glob
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
from pyarrow import fs

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file -> Arrow's codec; the name of the file does not matter."""
DISCARD_BYTES = 1 << 22
T = TypeVar("T")


@dataclass(frozen=True)
class InputFile:
    """A raw file on some file system."""

    name: str
    """As it stands in messages: a path or URI."""
    path: str
    """Inside the file system."""
    filesystem: Any
    num_bytes: int
    mtime_ns: int


def find_files(paths: Sequence[str | Path], *, matches: Callable[[str], bool], wanted: str) -> tuple[InputFile, ...]:
    """The files that `paths` name, in that order; a folder or pattern gives its files in natural order (day_2, day_10).

    paths: files, folders, local glob patterns, or URIs (s3://, gs://, hdfs://, file://) of files or folders. matches:
    whether a file of a folder, by its name, is meant; wanted: the same in words, for the error. Raises ValueError
    naming a path that does not exist or cannot be reached, or a folder without a matching file.
    """
    found = [file for path in paths for file in _expand(str(path), matches, wanted)]
    if not found:
        raise ValueError("no input path given; name at least one file or folder")
    return tuple(found)


def _expand(path: str, matches: Callable[[str], bool], wanted: str) -> list[InputFile]:
    if _URI.match(path):
        try:
            filesystem, inner = fs.FileSystem.from_uri(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: this URI cannot be opened: {error}") from None
        return _list(filesystem, inner, path, matches, wanted)
    local = fs.LocalFileSystem()
    if glob.has_magic(path) and not Path(path).exists():
        names = sorted(glob.glob(path), key=natural_key)  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not names:
            raise ValueError(f"{path}: no file matches this pattern; check the spelling")
        return [file for name in names for file in _list(local, str(Path(name).absolute()), name, matches, wanted)]
    return _list(local, str(Path(path).absolute()), path, matches, wanted)


def _list(filesystem: Any, inner: str, name: str, matches: Callable[[str], bool], wanted: str) -> list[InputFile]:
    try:
        info = filesystem.get_file_info(inner)
        if info.type != fs.FileType.Directory:
            entries = [info]
        else:
            entries = filesystem.get_file_info(fs.FileSelector(inner, recursive=False))
            entries = sorted((e for e in entries if e.is_file), key=lambda entry: natural_key(entry.base_name))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"{name}: no such file or folder; check the path")
    if info.is_file:
        return [_input_file(filesystem, info, name)]
    chosen = [entry for entry in entries if entry.base_name[0] not in "._" and matches(entry.base_name)]
    if not chosen:
        there = ", ".join(entry.base_name for entry in entries[:5]) or "no file at all"
        raise ValueError(f"{name}: no matching file in this folder ({wanted}); it holds {there}")
    return [_input_file(filesystem, entry, f"{name.rstrip('/')}/{entry.base_name}") for entry in chosen]


def _input_file(filesystem: Any, info: Any, name: str) -> InputFile:
    return InputFile(name, info.path, filesystem, info.size or 0, info.mtime_ns or 0)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which day_2 comes before day_10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


class ByteStream:
    """A file's decompressed bytes from `offset` on.

    Raises ValueError naming the file and the decompressed byte where its data is truncated or damaged.
    """

    def __init__(self, file: InputFile, offset: int = 0) -> None:
        self.file, self.offset = file, 0
        """`offset`: decompressed bytes passed so far."""
        try:
            self._raw = file.filesystem.open_input_file(file.path)
            start = self._raw.read(4)
            self._raw.seek(0)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file.name}: cannot be read: {error}") from None
        self.codec = next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)
        self._stream = self._raw if self.codec is None else pa.CompressedInputStream(self._raw, self.codec)
        self._skip_to(offset)

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as the data goes; the number of bytes, 0 at the end."""
        filled = 0
        while filled < len(buffer):
            try:
                num_bytes = self._stream.readinto(buffer[filled:])
            except (pa.ArrowException, OSError) as error:
                raise ValueError(
                    f"{self.file.name}: reading failed after byte {self.offset + filled:,} of its "
                    f"{'data' if self.codec is None else f'decompressed {self.codec} data'}: {error}; the file is "
                    "truncated or damaged, fetch it again"
                ) from None
            if num_bytes == 0:
                break
            filled += num_bytes
        self.offset += filled
        return filled

    @property
    def stored_offset(self) -> int:
        """Bytes of the file as stored that have been read; about, where compressed."""
        return int(self._raw.tell())

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __enter__(self) -> Self:
        """The stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _skip_to(self, offset: int) -> None:
        if self.codec is None:
            self._raw.seek(min(offset, self._raw.size()))
            self.offset = self._raw.tell()
            return
        scratch = memoryview(bytearray(min(offset, DISCARD_BYTES)))
        while self.offset < offset and self.readinto(scratch[: offset - self.offset]):
            pass


def prefetch(items: Iterator[T], *, depth: int = 1) -> Iterator[T]:
    """The same items, the next `depth` of them made in a thread while the consumer works; errors come in their place.

    The thread and `items` end when this iterator is exhausted, closed or dropped.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=0.05)
            except queue.Full:
                continue
            return True
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put("item", item):
                    break
            else:
                put("end", None)
        except BaseException as error:  # delivered to the consumer, whatever it is
            put("error", error)
        finally:
            if hasattr(items, "close"):
                items.close()

    thread = threading.Thread(target=produce, name="hotrow-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join()

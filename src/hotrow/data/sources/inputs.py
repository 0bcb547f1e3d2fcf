"""Finds raw files and reads their bytes: paths and URIs through Arrow's file systems, compressed or not.

Files found by a folder or pattern come in natural order (day_2 before day_10); paths given one by one keep their order.
Folders named `key=value` anywhere on a file's full path are hive partitions: constant columns of the files below them,
however the file was named. Decompression is bounded: bytes are produced only when asked for, whatever a file claims to
hold.
"""

from __future__ import annotations

import io
import os
import queue
import re
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from hotrow.base.files import check_text, disk_free_bytes, explain_full_disk
from hotrow.data.chunk import FileInfo

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SECRET = re.compile(r"(?<=://)[^/@]*@")
"""The part of a URI with a key and its secret, or a user and a password."""
_WILDCARD = re.compile(r"[*?\[]")
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\x04\x22\x4d\x18": "lz4"}
"""Arrow's codec by the first bytes of a compressed file, whatever its name."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
DISCARD_BYTES = 1 << 22
INFLATE_BYTES = 1 << 18
"""Bytes decompressed at a time. An error names damage to this precision, as Arrow drops what it read before it."""
T = TypeVar("T")
_from_uri: Callable[[str], tuple[Any, str]] = fs.FileSystem.from_uri


@dataclass(frozen=True)
class InputFile:
    """A raw file on some file system."""

    name: str
    """The name in messages and in the dataset: a path, or a URI without secrets and options."""
    path: str
    """Path within the file system."""
    filesystem: Any
    num_bytes: int
    mtime_ns: int
    partition: tuple[tuple[str, str | None], ...] = ()
    """Names and values of the hive partitions that hold it; None is the default partition."""
    known: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """What was found out on the way: `crc32` of the bytes as stored, once all are read; about how many `lines`."""

    @property
    def info(self) -> FileInfo:
        return FileInfo(self.name, self.num_bytes, self.mtime_ns)

    def open_file(self) -> pa.NativeFile:
        """Opens the bytes as stored; seekable."""
        return self.filesystem.open_input_file(self.path)

    def open_stream(self) -> pa.NativeFile:
        """Opens the decompressed bytes from the start."""
        stored = self.open_file()
        codec = _codec(stored)
        summed = pa.PythonFile(_Summed(self, stored), "r")
        return summed if codec is None else pa.CompressedInputStream(summed, codec)

    def read_head(self, num_bytes: int) -> tuple[bytes, int]:
        """Reads the first `num_bytes` of decompressed text; returns also about how many stored bytes they took.

        Raises ValueError naming the file if it cannot be read.
        """
        with ByteStream(self) as stream:
            text = bytearray(num_bytes)
            num_bytes = stream.readinto(memoryview(text))
            return bytes(text[:num_bytes]), stream.stored_offset

    def first_line(self) -> str:
        """Reads the first line of text, without line end and byte-order mark; replaces bytes that are not UTF-8."""
        text, _ = self.read_head(1 << 16)
        return re.split("[\r\n]", text.decode("utf-8-sig", errors="replace"), maxsplit=1)[0]


def _codec(stored: pa.NativeFile) -> str | None:
    """Returns Arrow's codec by the file's first bytes and rewinds the file."""
    start = stored.read(4)
    stored.seek(0)
    return next((codec for magic, codec in _CODECS.items() if start.startswith(magic)), None)


def find_files(
    paths: Sequence[str | Path | InputFile], *, matches: Callable[[str], bool], wanted: str
) -> tuple[InputFile, ...]:
    """Finds the files that `paths` name, in the order given; a folder or a pattern gives its files in natural order.

    paths: files found before, files, folders (with all below them), patterns (`*` and `?` within a name, `**` across
    folders), local or as URIs (s3://, gs://, hdfs://, file://), where `?` begins Arrow's options and is not part
    of a pattern (s3://bucket/day_*?region=eu-west-1). matches: decides by name whether a file in a folder is meant;
    wanted: the same in words, for the error. Raises ValueError naming a path that does not exist or cannot be reached,
    a pattern without a file, a folder without a matching file, or a file that is given twice.
    """
    groups = ([path] if isinstance(path, InputFile) else _expand(str(path), matches, wanted) for path in paths)
    found = [file for group in groups for file in group]
    if not found:
        raise ValueError("no input path given; name at least one file or folder")
    _refuse_repeated(found)
    return tuple(found)


def _refuse_repeated(files: Sequence[InputFile]) -> None:
    """Raises ValueError if a file is given twice, for its rows would count double; follows links of local files."""
    names: dict[tuple[str, str], str] = {}
    for file in files:
        local = isinstance(file.filesystem, fs.LocalFileSystem)
        key = (file.filesystem.type_name, os.path.realpath(file.path) if local else file.path)
        if key in names:
            again = f", once as {names[key]}" if names[key] != file.name else ""
            raise ValueError(f"{file.name}: this file is given twice{again}; its rows would count double: name it once")
        names[key] = file.name


def _expand(given: str, matches: Callable[[str], bool], wanted: str) -> list[InputFile]:
    check_text(given, what="a path")
    is_uri = _URI.match(given)
    name, mark, options = given.partition("?") if is_uri else (given, "", "")
    shown = _SECRET.sub("", name)
    wildcard = _WILDCARD.search(name)
    if wildcard and (is_uri or not Path(name).exists()):
        # A URI cannot hold a wildcard: the folder before it is resolved, then searched.
        folder = name[: wildcard.start()].rpartition("/")[0]
        filesystem, root = _open_filesystem((folder or ("/" if name.startswith("/") else ".")) + mark + options)
        pattern = _pattern_regex(f"{root.rstrip('/')}/{name[len(folder) :].lstrip('/')}")
        tree = _tree(filesystem, root, shown)
        found = [f for f in tree if re.fullmatch(pattern, f.path)]
        found += [f for f in tree if re.fullmatch(pattern + "/.*", f.path) and matches(f.base_name)]
        if not found:
            raise ValueError(f"{shown}: no file matches this pattern; check the spelling")
        return _input_files(filesystem, found, root, _SECRET.sub("", folder))
    filesystem, root = _open_filesystem(given)
    info = _ask(shown, lambda: filesystem.get_file_info(root))
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"{shown}: no such file or folder; check the path")
    if info.is_file:
        return [_input_file(shown, filesystem, info)]
    if info.type == fs.FileType.Unknown:
        raise ValueError(f"{shown} is neither a file nor a folder; write its rows to a file and give that")
    tree = _tree(filesystem, root, shown)
    found = [f for f in tree if matches(f.base_name)]
    if not found:
        there = ", ".join(sorted(f.base_name for f in tree)[:5]) or "no file at all"
        raise ValueError(f"{shown}: no matching file in this folder ({wanted}); it holds {there}")
    return _input_files(filesystem, found, root, shown.rstrip("/"))


def _open_filesystem(name: str) -> tuple[Any, str]:
    """Returns the file system of a path or URI, and the path within it."""
    if not _URI.match(name):
        return fs.LocalFileSystem(), str(Path(name).absolute())
    try:
        filesystem, path = _from_uri(name)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = _SECRET.sub("", str(error))
        raise ValueError(f"{_SECRET.sub('', name)}: this URI cannot be opened: {reason}") from None
    return filesystem, path


def _tree(filesystem: Any, root: str, name: str) -> list[Any]:
    """Returns all files below `root` except hidden ones, whose names start with "." or "_" (Hadoop's rule)."""
    selector = fs.FileSelector(root, recursive=True, allow_not_found=True)
    files = [f for f in _ask(name, lambda: filesystem.get_file_info(selector)) if f.is_file]
    return [f for f in files if not any(p[:1] in "._" for p in _below(f.path, root).split("/") if "=" not in p)]


def _ask(name: str, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None


def _pattern_regex(pattern: str) -> str:
    """Returns a regex for a pattern: `**/` spans folders, `*` and `?` stay within one, `[ab]` is a choice."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(parts.get(t, t if t.startswith("[") and t.endswith("]") else re.escape(t)) for t in tokens)


def _below(path: str, root: str) -> str:
    return path[len(root) :].lstrip("/")


def _input_files(filesystem: Any, found: Sequence[Any], root: str, shown_root: str) -> list[InputFile]:
    """Returns the files found below `root`, which the user wrote as `shown_root`, in natural order."""
    files = []
    for info in sorted(found, key=lambda f: natural_key(f.path)):
        below = _below(info.path, root)
        shown = f"{shown_root}/{below}" if shown_root or root == "/" else below
        files.append(_input_file(shown, filesystem, info))
    return files


def _input_file(shown: str, filesystem: Any, info: Any) -> InputFile:
    pairs = [folder.split("=", 1) for folder in info.path.split("/")[:-1] if "=" in folder]
    partition = tuple((unquote(key), None if value == HIVE_NULL else unquote(value)) for key, value in pairs)
    return InputFile(shown, info.path, filesystem, info.size or 0, info.mtime_ns or 0, partition)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key by which day_2 comes before day_10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


@contextmanager
def spooled(data: Any, folder: Path) -> Iterator[Any]:
    """Yields `data` with a file for each path that is a pipe (a FIFO, /dev/stdin, a shell's process substitution).

    Rows are read more than once, and a pipe gives them once: its bytes are first written to a file below `folder`,
    which is removed at the end. Raises ValueError if they take more than half of the free disk space.
    """
    paths = [data] if isinstance(data, str | Path) else data
    if not isinstance(paths, list | tuple) or not any(map(is_pipe, paths)):
        yield data
        return
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    full = explain_full_disk(folder, "reading a pipe", "Nothing was kept.", "start again")
    with full, tempfile.TemporaryDirectory(prefix=".hotrow-pipe-", dir=folder) as name:
        files = [_spool(Path(path), Path(name) / str(i)) if is_pipe(path) else path for i, path in enumerate(paths)]
        yield files[0] if isinstance(data, str | Path) else files


def is_pipe(path: Any) -> bool:
    """Returns whether a path leads to a pipe or socket, which can be read only once."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, TypeError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _spool(pipe: Path, folder: Path) -> Path:
    """Writes what comes out of a pipe to a file of its name in `folder`."""
    folder.mkdir()
    room = disk_free_bytes(folder) // 2
    with pipe.open("rb") as source, (folder / pipe.name).open("wb") as file:
        while piece := source.read(DISCARD_BYTES):
            room -= len(piece)
            if room < 0:
                raise ValueError(
                    f"{pipe}: more came out of this pipe than half of what is free at {folder.parent.parent}; write it "
                    "to a file on a larger disk and give that"
                )
            file.write(piece)
    return folder / pipe.name


class _Summed(io.RawIOBase):
    """The bytes of a file as stored. If all are read in order, the file knows their checksum afterwards."""

    def __init__(self, file: InputFile, raw: pa.NativeFile) -> None:
        self._file, self._raw, self._crc, self._end = file, raw, 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        at, num_bytes = self._raw.tell(), self._raw.readinto(buffer)
        if at == self._end:
            self._crc, self._end = zlib.crc32(memoryview(buffer)[:num_bytes], self._crc), at + num_bytes
            if self._end == self._file.num_bytes:
                self._file.known["crc32"] = self._crc
        return int(num_bytes)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def size(self) -> int:
        return int(self._raw.size())

    def close(self) -> None:
        self._raw.close()
        super().close()


class ByteStream:
    """The decompressed bytes of a file from `offset` on.

    Raises ValueError naming the file and the decompressed byte if the data is truncated or damaged.
    """

    def __init__(self, file: InputFile, offset: int = 0) -> None:
        self.file, self.offset = file, 0
        """`offset`: decompressed bytes read so far."""
        try:
            raw = file.open_file()
            self.codec = _codec(raw)
            self._raw = _Summed(file, raw)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file.name}: cannot be read: {error}") from None
        is_plain = self.codec is None
        self._stream = self._raw if is_plain else pa.CompressedInputStream(pa.PythonFile(self._raw, "r"), self.codec)
        self._skip_to(offset)

    def readinto(self, buffer: memoryview) -> int:
        """Fills `buffer` as far as there is data; returns the number of bytes, 0 at the end."""
        filled, whole = 0, self.codec is None
        while filled < len(buffer):
            try:
                num_bytes = self._stream.readinto(buffer[filled : None if whole else filled + INFLATE_BYTES])
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
        """Bytes read of the file as stored; approximate if it is compressed."""
        return int(self._raw.tell())

    def close(self) -> None:
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _skip_to(self, offset: int) -> None:
        if self.codec is None:
            self._raw.seek(min(offset, self._raw.size()))
            self.offset = self._raw.tell()
            return
        scratch = memoryview(bytearray(min(offset, DISCARD_BYTES)))
        while self.offset < offset and self.readinto(scratch[: offset - self.offset]):
            pass


def prefetch(items: Iterator[T], *, depth: int = 1) -> Generator[T, None, None]:
    """Yields `items`; a thread makes the next `depth` while the consumer works. Errors come in their place.

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
        except BaseException as error:  # the consumer raises it, whatever it is
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
        if threading.current_thread() is not thread:  # which may collect the garbage that this iterator is in
            thread.join()

"""Which files a user means: paths, folders, globs and URIs, through Arrow's file systems.

Files found by a folder or glob come in natural order (part-2 before part-10); paths given one by one keep their order.
Folders named `key=value` on the way are hive partitions: constant columns of the files beneath.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from hotrow.data.chunk import FileInfo

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    info: FileInfo
    """Its path as shown in messages, size and modification time."""
    filesystem: fs.FileSystem
    path: str
    """Its path within `filesystem`."""
    partition: tuple[tuple[str, str | None], ...] = ()
    """Hive partition columns and values, None for the default partition."""

    def open_stream(self) -> pa.NativeFile:
        """The file's bytes from the start, decompressed by its suffix (.gz, .zst, .bz2, .lz4)."""
        return self.filesystem.open_input_stream(self.path, compression="detect")

    def first_line(self) -> str:
        """The first line of a text file, without its end and a byte-order mark; undecodable bytes are replaced."""
        text, _ = self.read_head(1 << 16)
        return text.decode("utf-8-sig", errors="replace").split("\n", 1)[0].rstrip("\r")

    def read_head(self, num_bytes: int) -> tuple[bytes, int]:
        """The first `num_bytes` of decompressed text, and about how many stored bytes they took."""
        suffix = Path(self.path).suffix.lower()
        with self.open_file() as stored:
            if suffix not in COMPRESSIONS:
                return stored.read(num_bytes), num_bytes
            with pa.CompressedInputStream(stored, COMPRESSIONS[suffix]) as stream:
                return stream.read(num_bytes), stored.tell()

    def open_file(self) -> pa.NativeFile:
        """The file's bytes as stored, seekable."""
        return self.filesystem.open_input_file(self.path)


def find_files(paths: str | Path | Sequence[str | Path], *, suffixes: Sequence[str]) -> list[InputFile]:
    """Files meant by `paths`; within folders only those ending in one of `suffixes` (compression suffix aside).

    Raises ValueError naming a path that does not exist, matches nothing, or is a folder without such a file.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise ValueError("no input paths given; name a file, a folder, a glob such as 'logs/*.parquet' or a URI")
    return [file for path in paths for file in _expand(str(path), tuple(suffixes))]


def _expand(text: str, suffixes: tuple[str, ...]) -> list[InputFile]:
    filesystem, path = _open_filesystem(text)
    if WILDCARD.search(path):
        found = _glob(filesystem, path)
    else:
        info = _info(filesystem, path, text)
        if info.type == fs.FileType.File:
            return [_input_file(filesystem, info, text, root=path)]
        found = [f for f in _tree(filesystem, path) if _visible(f.path, path) and has_suffix(f.path, suffixes)]
    if not found:
        what = "matches no file" if WILDCARD.search(path) else f"holds no file ending in {', '.join(suffixes)}"
        raise ValueError(f"{text} {what}; check the path")
    prefix = text[: len(text) - len(path)] if text.endswith(path) else ""
    root = WILDCARD.split(path)[0]
    found.sort(key=lambda f: natural_key(f.path))
    return [_input_file(filesystem, f, prefix + f.path, root=root) for f in found]


def natural_key(text: str) -> list[tuple[int, int | str]]:
    """Sort key under which numbers within names compare as numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]


def has_suffix(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the file's name, without a compression suffix, ends in one of `suffixes`."""
    return re.sub(r"\.(gz|zst|bz2|lz4)$", "", path.lower()).endswith(suffixes)


def _open_filesystem(text: str) -> tuple[fs.FileSystem, str]:
    if not re.match(r"^[A-Za-z][A-Za-z0-9+.-]+://", text):
        return fs.LocalFileSystem(), str(Path(text).absolute())
    head, *tail = WILDCARD.split(text, maxsplit=1)
    try:
        # A wildcard is no part of a URI: resolve what stands before it, then put the pattern back.
        folder = head if not tail else head[: head.rindex("/") + 1]
        filesystem, path = fs.FileSystem.from_uri(folder)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"cannot open {text}: {error}") from None
    return filesystem, path if not tail else f"{path.rstrip('/')}/{text[len(folder) :]}"


def _info(filesystem: fs.FileSystem, path: str, text: str) -> fs.FileInfo:
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"{text} does not exist; check the path")
    return info


def _tree(filesystem: fs.FileSystem, path: str) -> list[fs.FileInfo]:
    selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
    return [f for f in filesystem.get_file_info(selector) if f.type == fs.FileType.File]


def _glob(filesystem: fs.FileSystem, pattern: str) -> list[fs.FileInfo]:
    root = pattern[: WILDCARD.search(pattern).start()].rpartition("/")[0]  # type: ignore[union-attr]
    matcher = re.compile(_pattern_regex(pattern))
    return [f for f in _tree(filesystem, root or "/") if matcher.fullmatch(f.path)]


def _pattern_regex(pattern: str) -> str:
    """`**/` spans folders, `*` and `?` stay within one, `[ab]` is a choice."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(parts.get(t, t if t.startswith("[") and t.endswith("]") else re.escape(t)) for t in tokens)


def _visible(path: str, root: str) -> bool:
    """Hadoop's and Spark's rule: names starting with '_' or '.' are no data."""
    return not any(part.startswith((".", "_")) for part in path[len(root) :].split("/") if "=" not in part)


def _input_file(filesystem: fs.FileSystem, info: fs.FileInfo, text: str, *, root: str) -> InputFile:
    folders = info.path[len(root) :].split("/")[:-1] if info.path.startswith(root) else []
    pairs = [folder.split("=", 1) for folder in folders if "=" in folder]
    partition = tuple((unquote(k), None if v == HIVE_NULL else unquote(v)) for k, v in pairs)
    return InputFile(FileInfo(text, info.size or 0, info.mtime_ns or 0), filesystem, info.path, partition)

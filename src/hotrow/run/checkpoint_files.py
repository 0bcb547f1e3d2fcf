"""The files of a checkpoint: tensors, which go to and from the memory they live in, in pieces; and the manifest.

Tensor files are in the format of the safetensors library, which opens them. The manifest is a typed record: the parts,
the chains of tables in tiers, and the size and checksum of every file. checkpoint.py and checkpoint_rows.py decide what
goes into which file.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import torch
from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotrow.base import files
from hotrow.base.door import check_folder, is_taken, make_folder, open_file
from hotrow.base.files import atomic_write, check_name, file_name
from hotrow.base.records import STRICT, Count, Document
from hotrow.placement.base import InitialRows, RowIds, Rows

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 24
NO_MAPPING = (errno.ENODEV, errno.EINVAL)
"""Errors of file systems that cannot map files: most give the first, 9p the second."""
NOT_MAPPABLE = "its file system cannot map files into memory (mmap)"
CURE = "remove its step folder and resume from an earlier checkpoint"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Pieces(Protocol):
    """The source of a file's tensor, read piece by piece: an array of a table, or some of its rows."""

    shape: torch.Size
    """The shape of the whole tensor."""
    dtype: torch.dtype

    def pieces(self) -> Iterable[Any]:
        """Yields the arguments of `read` whose results are the tensor, first rows first."""

    def read(self, piece: Any, /) -> Tensor:
        """Returns the rows of a piece."""


Stored: TypeAlias = Tensor | Pieces
"""The source of a file's tensor."""


def num_bytes(tensor: Stored) -> int:
    """Returns the bytes that the values take in a file."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


# ---- tensors


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    """Size and checksum of a file."""

    num_bytes: Count
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


def write_tensors(path: Path, tensors: Mapping[str, Stored], *, alignment: int = 8) -> FileRecord:
    """Writes a safetensors file from the tensors' own memory; returns its size and crc32. alignment: see `head_of`."""
    make_folder(path.parent)
    ordered = in_order(tensors)
    head, end = head_of(ordered, alignment)
    checksum, left = zlib.crc32(head), end
    with atomic_write(path) as file:
        file.write(head)
        for _, tensor in ordered:
            for chunk in _chunks(tensor):
                file.write(chunk)
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
                del chunk  # before the next chunk is made, which then uses the same memory
                send_down(file)
        assert left == 0, f"{path}: rows changed while they were written"
    return FileRecord(len(head) + end, f"{checksum:08x}")


def head_of(ordered: Iterable[tuple[str, Stored]], alignment: int = 8) -> tuple[bytes, int]:
    """Returns the beginning of a file, up to the first tensor, and the bytes of all tensors.

    alignment: the first tensor begins at a multiple of this many bytes.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + num_bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text, end


def in_order(tensors: Mapping[str, Stored]) -> list[tuple[str, Stored]]:
    """Returns tensors as files have them: wide elements first, which keeps every tensor aligned to its element."""
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def _chunks(tensor: Stored) -> Iterator[memoryview]:
    """Yields the bytes of a tensor. No two pieces of `Pieces` are in memory at once."""
    if isinstance(tensor, Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES))
    else:
        for piece in tensor.pieces():
            yield from _chunks(tensor.read(piece))


def send_down(file: BinaryIO) -> None:
    """Sends what was written to the disk now and drops it from the page cache, because nobody will read it from there.

    Otherwise it stays in memory until the file is complete, and a memory group with too little room ends the process.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class FirstRows(Rows):
    """The first rows of an array, as many as a shorter table had."""

    def __init__(self, array: Rows, num_rows: int) -> None:
        self._array, self.dtype, self.piece_rows = array, array.dtype, array.piece_rows
        self.shape = torch.Size((min(num_rows, array.shape[0]), *array.shape[1:]))

    def read(self, rows: RowIds, /) -> Tensor:
        return self._array.read(rows)

    def write(self, rows: RowIds, values: Tensor, /) -> None:
        self._array.write(rows, values)

    def held(self, rows: RowIds, /) -> Tensor | None:
        return self._array.held(rows)


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a safetensors file into existing ones, in pieces. Raises ValueError if they do not fit."""
    with open_tensors(path) as file:
        check_names(path, file.keys(), into)
        for name, tensor in into.items():
            stored = file.get_slice(name)
            check_like(path, name, stored, tensor.dtype, tensor.shape)
            if not tensor.shape:
                tensor.data.copy_(file.get_tensor(name))
                continue
            step = max(1, CHUNK_BYTES // max(1, num_bytes(tensor) // max(1, len(tensor))))
            for start in range(0, len(tensor), step):
                tensor.data[start : start + step] = stored[start : start + step]


def held_rows(array: Rows, rows: RowIds) -> RowIds:
    """Returns the part of `rows` that this process holds."""
    places = array.held(rows)
    if places is None:
        return rows
    return rows[places] if isinstance(rows, Tensor) else places + rows.start


def write_held(array: Rows, rows: RowIds, stored: Any, start: int) -> None:
    """Writes the part of `rows` that this process holds, from a file's tensor in which `rows` begin at `start`.

    Nothing before its first row or behind its last is read.
    """
    places = array.held(rows)
    if places is None:
        num_rows = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
        array.write(rows, stored[start : start + num_rows])
    elif len(places):
        first, end = int(places[0]), int(places[-1]) + 1
        array.write(held_rows(array, rows), stored[start + first : start + end][places - first])


def open_tensors(path: Path) -> Any:
    """Opens the safetensors file at `path`. Raises ValueError if it cannot be read as one."""
    try:
        open_file(path).close()  # the library below takes a path, and would follow a link or wait for a pipe
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and not _is_mappable(path):
            raise ValueError(
                f"checkpoint file {path} cannot be read: {NOT_MAPPABLE}; copy the run to a folder on another one"
            ) from None
        raise ValueError(f"checkpoint file {path} cannot be read: {error}; {CURE}") from None


def starts_of(path: Path) -> dict[str, int]:
    """Returns by name the byte at which each tensor of a safetensors file begins. `open_tensors` has checked it."""
    with open_file(path) as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    return {name: 8 + num_bytes + own["data_offsets"][0] for name, own in header.items() if name != "__metadata__"}


def _is_mappable(path: Path) -> bool:
    """Returns False if the file can be read, and cannot be mapped."""
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
            return True
    except ValueError:  # it is empty
        return True
    except OSError as error:
        return error.errno not in NO_MAPPING


def check_names(path: Path, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raises ValueError if a file has other tensors than this model."""
    if sorted(found) != sorted(wanted):
        raise ValueError(f"{path} holds {_few(sorted(found))}; this model has {_few(sorted(wanted))}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def check_like(path: Path, name: str, stored: Any, dtype: torch.dtype, shape: Iterable[int]) -> None:
    """Raises ValueError if a file's tensor `name` has another dtype or shape."""
    own, found = list(shape), list(stored.get_shape())
    if found != own or stored.get_dtype() != _DTYPES[dtype]:
        raise ValueError(f"{path}: {name} is {stored.get_dtype()} {found}; this model has {dtype} {own}")


def crc32(path: Path) -> str:
    """Returns the checksum of a file as the manifest writes it."""
    return f"{files.crc32(path):08x}"


# ---- the manifest

Plain: TypeAlias = bool | int | float | str | None
_Entry = Annotated[str, Field(pattern=r"^[0-9]{1,9}\..+$")]


@dataclass(frozen=True, config=STRICT)
class ChainRecord:
    """The files of a table in one part."""

    num_rows: Count
    """Rows of the table."""
    initial: InitialRows | None
    """The values of rows in no file; None if the one file has all rows in their order, without their ids."""
    links: tuple[Count, ...]
    """The number of rows in each file."""

    def __post_init__(self) -> None:
        if self.initial is None and self.links != (self.num_rows,):
            raise ValueError(f"links is {[*self.links]}; without `initial` it must be one file of {self.num_rows} rows")


class Chain(NamedTuple):
    """The chain of a table in one part, and where its files are."""

    stem: str
    """The folder of the files, as in "embedding/<table>"."""
    record: ChainRecord

    @property
    def files(self) -> list[str]:
        """The files, the oldest first."""
        return [f"{self.stem}/{k:03d}.safetensors" for k in range(len(self.record.links))]


@dataclass(frozen=True, config=STRICT)
class PartRecord:
    """What a part is made of, apart from its tensors."""

    chains: dict[str, ChainRecord] | None = None
    """By table; None for a part without tables."""
    values: dict[_Entry, Plain] = Field(default_factory=dict)
    """State of an optimizer that is not a tensor, by `<parameter index>.<name>`."""
    param_groups: tuple[dict[str, Plain | tuple[Plain, ...]], ...] = ()
    """The options of an optimizer's parameter groups."""

    def __post_init__(self) -> None:
        for table, chain in (self.chains or {}).items():
            if chain.initial is not None and chain.initial.table != table:
                raise ValueError(f"chains.{table}.initial.table is {chain.initial.table!r}; it must be {table!r}")


@dataclass(frozen=True, config=STRICT)
class Manifest:
    """The content of manifest.json."""

    parts: dict[str, PartRecord]
    files: dict[str, FileRecord]
    """By path within the folder."""
    written_bytes: Count
    """Bytes of the files that are not hard links to those of an earlier checkpoint."""
    extra: dict[str, JsonValue]
    """Fields that the caller added."""

    def __post_init__(self) -> None:
        for name in self.parts:
            check_name(name, what="checkpoint part")
        for file in self.files:
            for component in file.split("/"):
                check_name(component, what=f"files: file name in {file!r}")

    def chain(self, part: str, table: str) -> Chain | None:
        """Returns the chain of a table in a part, or None. Raises ValueError if `files` lacks a file of the chain."""
        chains = self.parts[part].chains if part in self.parts else None
        if chains is None or table not in chains:
            return None
        chain = Chain(f"{part}/{file_name(table)}", chains[table])
        for file in chain.files:
            if file not in self.files:
                raise ValueError(f"the checkpoint's {MANIFEST} does not list {file}, a link of its chain; {CURE}")
        return chain


DOCUMENT = Document(Manifest, marks={"hotrow_checkpoint": FORMAT_VERSION}, cure=CURE)


def read_manifest(path: Path | str) -> Manifest:
    """Returns the manifest of the checkpoint folder at `path`.

    Raises ValueError if there is none or it is wrong, naming file, field and cure.
    """
    path = Path(path)
    if not is_taken(path / MANIFEST):
        raise ValueError(
            f"{path} is not a checkpoint: it has no {MANIFEST}; pass a folder such as runs/NAME/checkpoints/step-N"
        )
    check_folder(path, files=(MANIFEST,))
    return DOCUMENT.read(path / MANIFEST)

"""The files of a checkpoint: tensors, which go to and from the memory they live in, in pieces; and the manifest.

Tensor files are in the format of the safetensors library, which opens them. The manifest is a typed record: the parts,
the chains of tables in tiers, and the size and checksum of every file. checkpoint.py and checkpoint_rows.py decide what
goes into which file.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol, TypeAlias

import torch
from pydantic import Field, JsonValue
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotrow.base.files import atomic_write, check_name
from hotrow.base.records import STRICT, Count, Document
from hotrow.placement.base import InitialRows, Rows

CHUNK_BYTES = 1 << 24
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


@dataclass(frozen=True, config=STRICT)
class FileRecord:
    """Size and checksum of a file."""

    num_bytes: Count
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Pieces(Protocol):
    """What becomes a tensor of a file piece by piece: an array of a table, or some of its rows."""

    shape: torch.Size
    """The shape of the whole tensor."""
    dtype: torch.dtype

    def pieces(self) -> Iterable[Any]:
        """Yields what `read` takes, so that the results are the tensor, first rows first."""

    def read(self, piece: Any, /) -> Tensor:
        """Returns the rows of a piece."""


Stored: TypeAlias = Tensor | Pieces
"""What becomes a tensor of a file."""
Target: TypeAlias = Tensor | Rows
"""What is filled from one."""


def num_bytes(tensor: Stored) -> int:
    """Of its values in a file."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> FileRecord:
    """Write a safetensors file from the tensors' own memory; returns its size and crc32."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Wide elements first keeps every tensor aligned to its element, as the safetensors library lays files out.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + num_bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum, left = zlib.crc32(head), end
    with atomic_write(path) as file:
        file.write(head)
        for _, tensor in ordered:
            for chunk in _chunks(tensor):
                file.write(chunk)
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
                del chunk  # before the next is made: its memory is that one's
                _send_down(file)
        assert left == 0, f"{path}: rows changed while they were written"
    return FileRecord(len(head) + end, f"{checksum:08x}")


def read_tensors(path: Path, into: Mapping[str, Target]) -> None:
    """Copy the tensors of a safetensors file into existing ones, in pieces; ValueError where names or shapes differ."""
    with open_tensors(path) as file:
        check_names(path, file.keys(), into)
        for name, tensor in into.items():
            stored = file.get_slice(name)
            check_like(path, name, stored, tensor.dtype, tensor.shape)
            if not tensor.shape:
                assert isinstance(tensor, Tensor)
                tensor.data.copy_(file.get_tensor(name))
                continue
            for piece in _pieces(tensor):
                put(tensor, piece, stored[piece])


def check_names(path: Path, found: Iterable[str], wanted: Iterable[str]) -> None:
    """ValueError where a file has other tensors than this model."""
    if sorted(found) != sorted(wanted):
        raise ValueError(f"{path} holds {_few(sorted(found))}; this model has {_few(sorted(wanted))}")


def check_like(path: Path, name: str, stored: Any, dtype: torch.dtype, shape: Iterable[int]) -> None:
    """ValueError where a file's tensor `name` has another dtype or shape."""
    own, found = list(shape), list(stored.get_shape())
    if found != own or stored.get_dtype() != _DTYPES[dtype]:
        raise ValueError(f"{path}: {name} is {stored.get_dtype()} {found}; this model has {dtype} {own}")


def put(tensor: Target, rows: Any, values: Tensor) -> None:
    """Rows (a range, or ids [n]) of `tensor` become `values`."""
    if isinstance(tensor, Tensor):
        tensor.data[rows] = values
    else:
        tensor.write(rows, values)


def piece_rows(tensor: Target) -> int:
    """Returns how many of its rows to move at once."""
    if not isinstance(tensor, Tensor):
        return tensor.piece_rows
    return max(1, CHUNK_BYTES // max(1, num_bytes(tensor) // max(1, tensor.shape[0])))


def _pieces(tensor: Target) -> Iterable[Any]:
    """Ranges of the first axis that fit a chunk."""
    if not isinstance(tensor, Tensor):
        return tensor.pieces()
    num_rows, step = len(tensor), piece_rows(tensor)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def open_tensors(path: Path) -> Any:
    """The safetensors file at `path`; ValueError where it is none."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint file {path} cannot be read: {error}; {CURE}") from None


def crc32(path: Path) -> str:
    """Of the file's bytes, as the manifest has it."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def _chunks(tensor: Stored) -> Iterator[memoryview]:
    """The bytes of a tensor; of what comes in pieces no two are in memory at once."""
    if isinstance(tensor, Tensor):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES))
    else:
        for piece in tensor.pieces():
            yield from _chunks(tensor.read(piece))


def _send_down(file: BinaryIO) -> None:
    """Let what was written go to the disk now and leave the page cache, which nobody will read it from.

    Else it waits there until the file is whole, and a memory group with less room than that ends the process.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


FORMAT_VERSION = 2
MANIFEST = "manifest.json"

Plain: TypeAlias = bool | int | float | str | None
_Entry = Annotated[str, Field(pattern=r"^[0-9]{1,9}\..+$")]


@dataclass(frozen=True, config=STRICT)
class ChainRecord:
    """The files of a table in tiers in one part."""

    num_rows: Count
    """Rows of the table."""
    initial: InitialRows
    links: tuple[Count, ...]
    """The number of rows in each file."""


@dataclass(frozen=True, config=STRICT)
class PartRecord:
    """What a part is made of beside its tensors."""

    chains: dict[str, ChainRecord] | None = None
    """By table; None where the part was not in tiers."""
    values: dict[_Entry, Plain] = Field(default_factory=dict)
    """State of an optimizer that is no tensor, by `<parameter index>.<name>`."""
    param_groups: tuple[dict[str, Plain | tuple[Plain, ...]], ...] = ()
    """The options of an optimizer's parameter groups."""

    def __post_init__(self) -> None:
        for table, chain in (self.chains or {}).items():
            if chain.initial.table != table:
                raise ValueError(f"chains.{table}.initial.table is {chain.initial.table!r}; it must be {table!r}")


@dataclass(frozen=True, config=STRICT)
class Manifest:
    """What manifest.json says."""

    parts: dict[str, PartRecord]
    files: dict[str, FileRecord]
    """By path within the folder."""
    written_bytes: Count
    """Bytes of the files that are not hard links to those of an earlier checkpoint."""
    extra: dict[str, JsonValue]
    """What the caller added."""

    def __post_init__(self) -> None:
        for name in self.parts:
            check_name(name, what="checkpoint part")
        for file in self.files:
            for component in file.split("/"):
                check_name(component, what=f"files: file name in {file!r}")

    def chain(self, part: str, table: str) -> ChainRecord | None:
        """That of a table in a part; None where the part was not in tiers."""
        chains = self.parts[part].chains if part in self.parts else None
        return None if chains is None else chains.get(table)


DOCUMENT = Document(Manifest, marks={"hotrow_checkpoint": FORMAT_VERSION}, cure=CURE)


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the checkpoint folder at `path`; ValueError naming file, field and cure where there is none."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise ValueError(
            f"{path} is no checkpoint: it holds no {MANIFEST}; pass a folder such as runs/NAME/checkpoints/step-N"
        )
    return DOCUMENT.read(path / MANIFEST)

"""Checkpoints: folders of safetensors files and a manifest that are whole or absent, and refuse to load when damaged.

    step-1200/
      manifest.json                   format version, size and crc32 of every file, what the caller adds
      embedding/<table>.safetensors   one file per table
      model.safetensors  dense_optimizer.safetensors  sparse_optimizer.safetensors

A checkpoint is made of named parts: an EmbeddingCollection, any nn.Module, any torch optimizer. Tensors are written
from and read into the memory they live in, 16 MiB at a time, so that saving tables of any size needs no second copy;
tables in tiers go through their caches in smaller pieces, and their files are those of tables in memory.
A table in split storage (bfloat16 and lower halves) is written joined: its file is that of a float32 table. The files
open with the safetensors library; nothing is pickled. A checkpoint is the whole model: it costs as much as all tables
and states, however few rows changed. What to save, and when, is for trainer.py to say.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from hotrow.embedding import EmbeddingCollection, StoredTable
from hotrow.files import PARTIAL_SUFFIX, atomic_write, check_name, disk_free_bytes, read_json, sync_folder, write_json
from hotrow.memory.table_rows import RowsInTiers
from hotrow.optim import SparseOptimizer

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 24
MANIFEST = "manifest.json"
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

Part: TypeAlias = EmbeddingCollection | nn.Module | Optimizer
Pieces: TypeAlias = StoredTable | RowsInTiers
"""What is read and written by rows: a split table, joined on the way out and split on the way in; a table in tiers."""
Stored: TypeAlias = Tensor | Pieces
"""What becomes a tensor of a file."""


def save_checkpoint(path: Path | str, parts: Mapping[str, Part], *, extra: Mapping[str, Any] | None = None) -> Path:
    """Write `parts` and the JSON-ready `extra` as the folder `path`, which appears only when it is whole and on disk.

    parts: by name, which becomes a file name. An existing `path` is an error: checkpoints are never overwritten.
    Raises ValueError where the disk has too little room, saying how much is missing; OSError as the disk gives it.
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"checkpoint {path} exists already; remove it or choose another folder")
    contents = {name: _describe(name, part) for name, part in parts.items()}
    files = {file: tensors for files, _ in contents.values() for file, tensors in files.items()}
    _check_room(path, sum(_num_bytes(t) for tensors in files.values() for t in tensors.values()))
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        manifest = {
            "hotrow_checkpoint": FORMAT_VERSION,
            "parts": {name: values for name, (_, values) in contents.items()},
            "files": {file: write_tensors(partial / file, tensors) for file, tensors in files.items()},
            "extra": dict(extra or {}),
        }
        write_json(partial / MANIFEST, manifest)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)
    return path


def load_checkpoint(path: Path | str, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Copy the checkpoint at `path` into `parts` after verifying every byte of it, and return its `extra`.

    parts: built as they were when saved; a subset of the saved ones may be given. Raises ValueError naming a file that
    is missing, cut off or altered, and a tensor whose name, shape or dtype does not fit.
    """
    path = Path(path)
    manifest = read_manifest(path)
    verify(path, manifest)
    for name, part in parts.items():
        if name not in manifest["parts"]:
            raise ValueError(f"checkpoint {path} has no part {name!r}; it has {', '.join(manifest['parts'])}")
        if isinstance(part, Optimizer):
            _restore_optimizer(part, path / f"{name}.safetensors", manifest["parts"][name])
        else:
            for file, tensors in _describe(name, part)[0].items():
                read_tensors(path / file, tensors)
    extra: dict[str, Any] = manifest["extra"]
    return extra


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest of the checkpoint folder at `path`; ValueError where there is none this version can read."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise ValueError(
            f"{path} is no checkpoint: it holds no {MANIFEST}; pass a folder such as runs/NAME/checkpoints/step-N"
        )
    manifest = read_json(path / MANIFEST)
    version = manifest.get("hotrow_checkpoint") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"{path / MANIFEST}: format version {version!r}; this hotrow reads version {FORMAT_VERSION}")
    return dict(manifest)


def verify(path: Path, manifest: Mapping[str, Any] | None = None) -> int:
    """Read every file of the checkpoint against its size and crc32; returns the bytes read.

    Raises ValueError naming the first file that is missing, has another size or another checksum.
    """
    manifest = read_manifest(path) if manifest is None else manifest
    total = 0
    for name, record in manifest["files"].items():
        for component in name.split("/"):
            check_name(component, what=f"{path / MANIFEST}: file name")
        file = path / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing; use another checkpoint of the run")
        if (size := file.stat().st_size) != record["num_bytes"]:
            raise ValueError(
                f"checkpoint file {file} has {size} bytes, not {record['num_bytes']}: it is damaged; {_CURE}"
            )
        if (checksum := _crc32(file)) != record["crc32"]:
            raise ValueError(
                f"checkpoint file {file} has crc32 {checksum}, not {record['crc32']}: it is damaged; {_CURE}"
            )
        total += size
    return total


_CURE = "remove its step folder and resume from an earlier checkpoint"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The whole checkpoints `step-N` in `folder` by step, rising."""
    found = {}
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and (path / MANIFEST).is_file():
            found[int(number)] = path
    return dict(sorted(found.items()))


def prune_checkpoints(folder: Path, *, keep_last: int, keep: int | None = None) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints and the one at step `keep`, and leftovers of a killed save."""
    checkpoints = list_checkpoints(folder)
    kept = {*list(checkpoints)[-keep_last:], keep}
    removed = [path for step, path in checkpoints.items() if step not in kept]
    for path in [*removed, *folder.glob(f"step-*{PARTIAL_SUFFIX}")]:
        # The manifest goes first: a removal cut short leaves a folder that no longer counts as a checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    return removed


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Write a safetensors file from the tensors' own memory; returns its size and crc32, as the manifest has them."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # Wide elements first keeps every tensor aligned to its element, as the safetensors library lays files out.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + _num_bytes(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum = zlib.crc32(head)
    with atomic_write(path) as file:
        file.write(head)
        for _, tensor in ordered:
            for chunk in _chunks(tensor):
                file.write(chunk)
                checksum = zlib.crc32(chunk, checksum)
    return {"num_bytes": len(head) + end, "crc32": f"{checksum:08x}"}


def read_tensors(path: Path, into: Mapping[str, Stored]) -> None:
    """Copy the tensors of a safetensors file into existing ones, in pieces; ValueError where names or shapes differ."""
    with _open(path) as file:
        if (found := sorted(file.keys())) != sorted(into):
            raise ValueError(f"{path} holds {_few(found)}; this model has {_few(sorted(into))}")
        for name, tensor in into.items():
            stored = file.get_slice(name)
            shape, dtype = list(stored.get_shape()), stored.get_dtype()
            if shape != list(tensor.shape) or dtype != _DTYPES[tensor.dtype]:
                own = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{path}: {name} is {dtype} {shape}; this model has {own}")
            if not shape:
                assert isinstance(tensor, Tensor)
                tensor.data.copy_(file.get_tensor(name))
                continue
            for piece in _pieces(tensor):
                if isinstance(tensor, Tensor):
                    tensor.data[piece] = stored[piece]
                else:
                    tensor.write(piece, stored[piece])


def _pieces(tensor: Stored) -> Iterator[slice]:
    """Ranges of the first axis that fit a chunk."""
    if not isinstance(tensor, Tensor):
        return tensor.pieces()
    num_rows = len(tensor)
    step = max(1, CHUNK_BYTES // max(1, _num_bytes(tensor) // max(1, num_rows)))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _describe(name: str, part: Part) -> tuple[dict[str, dict[str, Stored]], dict[str, Any]]:
    """A part as `({file: {tensor name: tensor}}, JSON-ready rest)`."""
    check_name(name, what="checkpoint part")
    if isinstance(part, EmbeddingCollection):
        names = [check_name(table, what="table name") for table in part.weights]
        return {f"{name}/{table}.safetensors": {"weight": _stored(part, table)} for table in names}, {}
    if isinstance(part, Optimizer):
        tensors, rest = _flatten_optimizer(part)
        return {f"{name}.safetensors": {**tensors}}, rest
    return {f"{name}.safetensors": dict(part.state_dict())}, {}


def _stored(emb: EmbeddingCollection, table: str) -> Stored:
    if emb.tiers is not None:
        return emb.rows(table)
    return emb.stored(table) if table in emb.low else emb.weights[table]


def _in_tiers(optimizer: Optimizer) -> TypeGuard[SparseOptimizer]:
    return isinstance(optimizer, SparseOptimizer) and optimizer.emb.tiers is not None


def _flatten_optimizer(optimizer: Optimizer) -> tuple[dict[str, Stored], dict[str, Any]]:
    """An optimizer's state as tensors named `<parameter index>.<name>`, and the JSON-ready rest of it."""
    if _in_tiers(optimizer):
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        return {**optimizer.state_rows()}, {"values": {}, "param_groups": groups}
    state = optimizer.state_dict()
    tensors: dict[str, Stored] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{name}"] = value
    return tensors, {"values": values, "param_groups": state["param_groups"]}


def _restore_optimizer(optimizer: Optimizer, path: Path, rest: Mapping[str, Any]) -> None:
    """Put back what `_flatten_optimizer` took apart; state that exists already is filled in place."""
    existing, _ = _flatten_optimizer(optimizer)
    if _in_tiers(optimizer):
        read_tensors(path, existing)
        optimizer.load_state_dict({"state": {}, "param_groups": list(rest["param_groups"])})
        return
    with _open(path) as file:
        names = list(file.keys())
    if names and sorted(names) == sorted(existing):
        read_tensors(path, existing)
        tensors = existing
    else:  # torch's Adam and SGD make their state at the first step
        with _open(path) as file:
            tensors = {name: file.get_tensor(name) for name in names}
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest["values"]}.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": list(rest["param_groups"])})


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"checkpoint file {path} cannot be read: {error}; {_CURE}") from None


def _check_room(path: Path, num_bytes: int) -> None:
    free = disk_free_bytes(path)
    if num_bytes > free:
        short = math.ceil((num_bytes - free) / 2**20)
        raise ValueError(f"checkpoint {path} needs {short} MiB more than the disk has free; free some or move the run")


def _num_bytes(tensor: Stored) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _chunks(tensor: Stored) -> Iterator[memoryview]:
    if not isinstance(tensor, Tensor):
        return (chunk for rows in tensor.pieces() for chunk in _chunks(tensor.read(rows)))
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES))


def _crc32(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"

"""Writes packed datasets: rows in, parts out, whatever the raw source was.

Rows of each split are gathered into blocks, blocks into parts. A part gets its name only when it is whole, and is then
listed in `.prepare/parts.json`, so an interrupted writer continues after its last finished part. `dataset.json` is
written last.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray
from pydantic.dataclasses import dataclass

from hotrow.base.door import make_folder
from hotrow.base.files import atomic_write, check_name, crc32, explain_full_disk
from hotrow.base.records import STRICT, Document
from hotrow.data.packed.format import (
    MANIFEST,
    MAX_ROWS_PER_BLOCK,
    RESERVED_SPLITS,
    ROWS_PER_BLOCK,
    WORK_FOLDER,
    Block,
    DatasetInfo,
    FileRecord,
    Ids,
    Part,
    Ragged,
    SplitInfo,
    arrow_schema,
    check_values,
    columns_of,
    concatenate_ids,
    slice_ids,
    split_columns,
    write_info,
)
from hotrow.data.packed.reader import PackedDataset

ROWS_PER_PART = 64 * ROWS_PER_BLOCK
"""About 0.7 GB with Criteo's 40 columns: an ordinary file size, and the most that an interruption loses."""
PARTS_FILE = "parts.json"
USUAL_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, config=STRICT)
class _Finished:
    """The content of parts.json: the finished parts of each split, and what all parts were made with."""

    identity: tuple[str, int, int]
    """Fingerprint of the schema, rows per part, rows per block."""
    parts: dict[str, tuple[Part, ...]]

    def __post_init__(self) -> None:
        for split, parts in self.parts.items():
            for number, part in enumerate(parts):
                if part.file != f"part-{number:05d}.arrow":
                    raise ValueError(f"parts.{split}.{number}.file is {part.file!r}; parts are numbered one by one")


_FINISHED = Document(
    _Finished, marks={"hotrow_parts": 1}, cure="start again with --overwrite, or remove the dataset's folder"
)


class _ChecksumSink(io.RawIOBase):
    """A file that Arrow writes to; it records the crc32 of the bytes between two cuts."""

    def __init__(self, file: BinaryIO, header_bytes: int) -> None:
        self.ends: list[int] = []
        self.crc32: list[int] = []
        self._file, self._header_bytes = file, header_bytes
        self._position = self._crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # Arrow writes the header together with the first block, so the cut between them is made here.
        if self._position < self._header_bytes <= self._position + len(view):
            split = self._header_bytes - self._position
            self._put(view[:split])
            self.cut()
            view = view[split:]
        self._put(view)
        return memoryview(data).nbytes

    def _put(self, view: memoryview) -> None:
        self._file.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self._position += len(view)

    def cut(self) -> None:
        self.ends.append(self._position)
        self.crc32.append(self._crc)
        self._crc = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position


class _PartWriter:
    """One part being written: `<file>.partial` until `finish`."""

    def __init__(self, path: Path, info: DatasetInfo) -> None:
        self.num_rows = 0
        self._path, self._info, self._schema = path, info, arrow_schema(info)
        self._block_rows: list[int] = []
        self._stack = ExitStack()
        file = self._stack.enter_context(atomic_write(path))
        # An IPC file is 8 bytes of magic, then the schema's message; docs/format.md, "Parts".
        self._sink = _ChecksumSink(file, header_bytes=8 + self._schema.serialize().size)
        self._writer = pa.ipc.new_file(self._sink, self._schema)

    def write(self, block: Block) -> None:
        check_values(self._info, block)
        arrays = [_to_arrow(column, field.type) for column, field in zip(block.columns, self._schema, strict=True)]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._sink.cut()
        self._block_rows.append(block.num_rows)
        self.num_rows += block.num_rows

    def finish(self) -> Part:
        self._writer.close()
        self._sink.cut()
        self._stack.close()
        return Part(
            file=self._path.name,
            block_rows=tuple(self._block_rows),
            range_ends=tuple(self._sink.ends),
            range_crc32=tuple(self._sink.crc32),
        )

    def abort(self) -> None:
        """Drops the partial file."""
        self._stack.__exit__(InterruptedError, InterruptedError(), None)


def _to_arrow(column: Ids, kind: pa.DataType) -> pa.Array:
    if isinstance(column, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(column.row_splits), pa.array(column.values), type=kind)
    return pa.array(column)


class _BlockBuffer:
    """Gathers the rows of one block by copying them; a few rows of thousands of columns take little memory."""

    def __init__(self, info: DatasetInfo, capacity: int) -> None:
        self.num_rows, self.capacity, self._info = 0, capacity, info
        self._pieces: list[list[Ids]] = []

    def append(self, targets: NDArray[Any], dense: NDArray[Any], ids: Sequence[Ids]) -> None:
        """Copies rows, which must fit: labels and weight as one matrix, dense [n, I], ids by feature."""
        numbers = [column for own in (targets, dense) for column in own.T.astype(np.float32, order="C")]
        self._pieces.append([*numbers, *(concatenate_ids([column]) for column in ids)])
        self.num_rows += len(targets)

    def take(self) -> Block:
        """Returns the rows gathered so far and starts afresh."""
        columns = [concatenate_ids(pieces) for pieces in zip(*self._pieces, strict=True)]
        self._pieces, self.num_rows = [], 0
        return columns_of(self._info, columns)


class PackedWriter:
    """Writes a packed dataset into `folder`; opened again on that folder, it continues after the last finished part.

        with PackedWriter("data/clicks", info) as writer:
            writer.append("train", label, dense, {"user": ids, "items": (values, row_splits)})
            dataset = writer.close()

    info: the schema; the writer fills in its splits and files. rows_per_block, rows_per_part: sizes of blocks and
    parts; a part is a whole number of blocks. Memory: one block of rows for each split being written. An exception
    inside the `with` drops unfinished parts and keeps finished ones for the next attempt.

    Raises ValueError if the folder holds a complete dataset, or unfinished parts of another schema.
    """

    def __init__(
        self,
        folder: Path | str,
        info: DatasetInfo,
        *,
        rows_per_part: int = ROWS_PER_PART,
        rows_per_block: int = ROWS_PER_BLOCK,
    ) -> None:
        if not 1 <= rows_per_block <= MAX_ROWS_PER_BLOCK:
            raise ValueError(f"rows_per_block is {rows_per_block}; it must be between 1 and {MAX_ROWS_PER_BLOCK}")
        if rows_per_part < 1 or rows_per_part % rows_per_block:
            raise ValueError(
                f"rows_per_part is {rows_per_part}; it must be a multiple of rows_per_block {rows_per_block}"
            )
        self.path, self.info = Path(folder), info
        self._rows_per_part, self._rows_per_block = rows_per_part, rows_per_block
        if (self.path / MANIFEST).exists():
            raise ValueError(f"{self.path} already holds a complete dataset; choose another folder, or remove this one")
        self._parts_path = self.path / WORK_FOLDER / PARTS_FILE
        make_folder(self._parts_path.parent, within=self.path)
        self._identity = (info.schema_fingerprint(), rows_per_part, rows_per_block)
        self._finished: dict[str, list[Part]] = self._read_finished()
        self._buffers: dict[str, _BlockBuffer] = {}
        self._open: dict[str, _PartWriter] = {}

    def finished_parts(self, split: str) -> tuple[Part, ...]:
        return tuple(self._finished.get(split, ()))

    def finished_rows(self, split: str) -> int:
        """Returns the number of rows of `split` in finished parts: where an interrupted preparation continues."""
        return sum(part.num_rows for part in self.finished_parts(split))

    def append(
        self,
        split: str,
        label: ArrayLike,
        dense: ArrayLike,
        sparse: Mapping[str, NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]],
        weight: ArrayLike | None = None,
    ) -> None:
        """Adds rows to `split`: label [n], or [n, L] if there are L labels; dense [n, I]; ids by feature, [n] or
        `(values, row_splits [n + 1])`; weight [n] if the dataset has weights.

        Raises ValueError naming column and row for values that the format does not allow, and if shapes disagree;
        OSError when the disk is full, saying what was kept.
        """
        labels, dense = np.asarray(label), np.asarray(dense)
        labels = labels[:, None] if labels.ndim == 1 else labels
        ids = self._check_shapes(labels, dense, split_columns(self.info, sparse))
        weights = np.empty((len(labels), 0)) if weight is None else np.asarray(weight).reshape(-1, 1)
        if weights.shape != (len(labels), self.info.num_targets - len(self.info.labels)):
            wanted = "None, as the dataset has no weights" if self.info.weight is None else f"[{len(labels)}]"
            raise ValueError(f"weight has shape {None if weight is None else np.shape(weight)}; it must be {wanted}")
        targets = np.concatenate([labels, weights], axis=1, dtype=np.float32) if weights.size else labels
        buffer, start = self._buffer(split), 0
        while start < len(labels):
            stop = min(len(labels), start + buffer.capacity - buffer.num_rows)
            rows = slice(start, stop)
            buffer.append(targets[rows], dense[rows], [slice_ids(column, start, stop) for column in ids])
            start = stop
            if buffer.num_rows == buffer.capacity:
                with self._explain_full_disk():
                    self._write_block(split)

    def close(self, summary: Mapping[str, Any] | None = None) -> PackedDataset:
        """Writes buffered rows, then `dataset.json` with `summary`; returns the open dataset."""
        with self._explain_full_disk():
            for split, buffer in self._buffers.items():
                if buffer.num_rows:
                    self._write_block(split)
                if split in self._open:
                    self._finish_part(split)
            self._write_manifest(self._finished, summary or {})
        self._parts_path.unlink(missing_ok=True)
        if not any(self._parts_path.parent.iterdir()):
            self._parts_path.parent.rmdir()
        return PackedDataset.open(self.path)

    def abort(self) -> None:
        """Drops unfinished parts; finished parts stay for the next attempt."""
        for part in self._open.values():
            part.abort()
        self._open.clear()
        self._buffers.clear()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _check_shapes(self, labels: NDArray[Any], dense: NDArray[Any], ids: list[Any]) -> list[Ids]:
        n = len(labels)
        if labels.shape != (n, len(self.info.labels)):
            raise ValueError(f"label has shape {labels.shape}; it must be [{n}, {len(self.info.labels)}]")
        if dense.shape != (n, len(self.info.dense)):
            raise ValueError(f"dense has shape {dense.shape}; it must be [{n}, {len(self.info.dense)}]")
        checked: list[Ids] = []
        for feature, column in zip(self.info.features, ids, strict=True):
            is_list = isinstance(column, tuple)
            if is_list == (feature.kind == "one_hot"):
                wanted = "one array of ids" if is_list else "a pair (values, row_splits)"
                raise ValueError(f"feature {feature.name!r} is {feature.kind}; pass {wanted}")
            values = np.asarray(column[0] if is_list else column)
            if values.dtype.kind not in "iu" or values.ndim != 1 or (not is_list and len(values) != n):
                raise ValueError(
                    f"feature {feature.name!r}: ids are {values.dtype} {values.shape}; pass a 1-D integer array"
                    + ("" if is_list else f" of {n} ids")
                )
            values = self._narrow(feature.name, values, self.info.id_dtype(feature))
            splits = np.asarray(column[1]).astype(np.int64, casting="safe", copy=False) if is_list else None
            if splits is not None and (len(splits) != n + 1 or splits[0] != 0 or splits[-1] != len(values)):
                raise ValueError(f"feature {feature.name!r}: row_splits must be {n + 1} offsets, 0 to {len(values)}")
            checked.append(values if splits is None else Ragged(values, splits))
        return checked

    @staticmethod
    def _narrow(name: str, values: NDArray[Any], dtype: type[np.int32 | np.int64]) -> NDArray[Any]:
        limit = np.iinfo(dtype).max
        if np.iinfo(values.dtype).max > limit and len(values) and values.max() > limit:
            raise ValueError(f"feature {name!r}: id {values.max()} does not fit its table; ids are row numbers")
        return values.astype(dtype, copy=False)

    def _buffer(self, split: str) -> _BlockBuffer:
        if split not in self._buffers:
            check_name(split, what="split name")
            if split in RESERVED_SPLITS:
                raise ValueError(f"split {split!r}: this name is taken by a folder of the format; rename it")
            make_folder(self.path / split, within=self.path)
            self._buffers[split] = _BlockBuffer(self.info, self._rows_per_block)
            self._finished.setdefault(split, [])
        return self._buffers[split]

    def _write_block(self, split: str) -> None:
        if split not in self._open:
            number = len(self._finished[split])
            file = f"part-{number:05d}.arrow"
            self._open[split] = _PartWriter(self.path / split / file, self.info)
        self._open[split].write(self._buffers[split].take())
        if self._open[split].num_rows == self._rows_per_part:
            self._finish_part(split)

    def _finish_part(self, split: str) -> None:
        self._finished[split].append(self._open[split].finish())
        del self._open[split]
        parts = {name: tuple(done) for name, done in self._finished.items()}
        _FINISHED.write(self._parts_path, _Finished(self._identity, parts))

    def _write_manifest(self, parts: Mapping[str, Sequence[Part]], summary: Mapping[str, Any]) -> None:
        # Which split's rows came first depends on how rows were read; their order in the file must not.
        usual = {split: parts[split] for split in USUAL_SPLITS if split in parts}
        splits = {
            split: SplitInfo(num_rows=sum(part.num_rows for part in own), parts=tuple(own))
            for split, own in {**usual, **parts}.items()
        }
        if not any(split.num_rows for split in splits.values()):
            raise ValueError(f"{self.path}: no rows were written; the source is empty or every row was filtered out")
        beside = sorted(p for folder in RESERVED_SPLITS for p in (self.path / folder).rglob("*") if p.is_file())
        files = {path.relative_to(self.path).as_posix(): path for path in beside}
        records = {name: FileRecord(path.stat().st_size, crc32(path)) for name, path in files.items()}
        write_info(self.path, replace(self.info, splits=splits, files=records, summary=dict(summary)))

    def _explain_full_disk(self) -> AbstractContextManager[None]:
        def kept() -> str:
            num_parts = sum(len(parts) for parts in self._finished.values())
            num_rows = sum(self.finished_rows(split) for split in self._finished)
            return f"{num_parts} finished part(s) with {num_rows} rows are kept."

        return explain_full_disk(self.path, "writing parts", kept)

    def _read_finished(self) -> dict[str, list[Part]]:
        if not self._parts_path.exists():
            return {}
        finished = _FINISHED.read(self._parts_path)
        if finished.identity != self._identity:
            raise ValueError(
                f"{self.path} holds unfinished parts of another schema, vocabulary or part size; "
                "repeat the interrupted command as it was, or remove the folder"
            )
        for split, parts in finished.parts.items():
            for part in parts:
                path = self.path / check_name(split, what="split name") / part.file
                if not path.is_file() or path.stat().st_size != part.num_bytes:
                    raise ValueError(f"{path} was finished but is now missing or cut; remove the folder {self.path}")
        return {split: list(parts) for split, parts in finished.parts.items()}

"""Small packed datasets for tests: every row carries its own number, so that rows can be recognised anywhere."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter

NUM_ROWS_OF_TABLE = 100_000

OF_TOY_ROWS = {
    *("worse_than_a_constant", "auc_below_half", "unknown_ids", "missing_values", "numbers_outside_training"),
    *(f"few_{word}_{split}_rows" for word in ("positive", "negative") for split in ("val", "test")),
}
"""Warnings that runs on toy rows may have, because there are few of them and their labels are mostly random."""


def planted(*, opened: bool = False, **options: Any) -> Any:
    """A fixture: the folder of a dataset by `make_dataset` of conftest.py, made once a module; opened: the dataset."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., PackedDataset]) -> Any:
        dataset = make_dataset(tmp_path_factory.mktemp("planted") / "data", **options)
        return dataset if opened else dataset.path

    return made


@dataclass
class Rows:
    """What was written: label [n], dense [n, I], ids by feature, [n] or (values, row_splits)."""

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    sparse: dict[str, NDArray[np.int32] | tuple[NDArray[np.int32], NDArray[np.int64]]]

    def slice(self, start: int, stop: int) -> Rows:
        stop = min(stop, len(self.label))
        sparse = {}
        for name, ids in self.sparse.items():
            if isinstance(ids, tuple):
                splits = ids[1][start : stop + 1]
                sparse[name] = (ids[0][splits[0] : splits[-1]], splits - splits[0])
            else:
                sparse[name] = ids[start:stop]
        return Rows(self.label[start:stop], self.dense[start:stop], sparse)


def make_info(*, lists: bool = True, num_embeddings: int = NUM_ROWS_OF_TABLE) -> DatasetInfo:
    """Two dense columns, one-hot "row" and "item", and with `lists` a bag and a sequence that share a table."""
    features = [Feature("row", "row"), Feature("item", "item")]
    if lists:
        features += [Feature("bag", "tag", "multi_hot"), Feature("past", "tag", "sequence")]
    tables = [Table(name, num_embeddings) for name in dict.fromkeys(f.table for f in features)]
    dense = (DenseColumn("I1", "log1p"), DenseColumn("I2"))
    return DatasetInfo(name="test", dense=dense, features=tuple(features), tables=tuple(tables), licence="none")


def make_rows(num_rows: int, *, lists: bool = True, seed: int = 0) -> Rows:
    """Random rows; id "row" and dense I1 are the row's number."""
    rng = np.random.default_rng(seed)
    number = np.arange(num_rows)
    dense = np.stack([number, rng.standard_normal(num_rows)], axis=1).astype(np.float32)
    sparse: dict = {"row": number.astype(np.int32), "item": rng.integers(0, NUM_ROWS_OF_TABLE, num_rows, np.int32)}
    for name in ("bag", "past") if lists else ():
        splits = np.concatenate([[0], rng.integers(0, 5, num_rows).cumsum()]).astype(np.int64)
        sparse[name] = (rng.integers(0, NUM_ROWS_OF_TABLE, splits[-1], np.int32), splits)
    return Rows((rng.random(num_rows) < 0.3).astype(np.float32), dense, sparse)


def write_dataset(
    folder: Path, rows: Rows, *, rows_per_block: int = 100, rows_per_part: int = 300, append_rows: int = 77
) -> PackedDataset:
    """`rows` as split "train" of a dataset in `folder`, appended `append_rows` at a time."""
    info = make_info(lists="bag" in rows.sparse)
    with PackedWriter(folder, info, rows_per_part=rows_per_part, rows_per_block=rows_per_block) as writer:
        append_rows_to(writer, "train", rows, append_rows)
        return writer.close()


def append_rows_to(writer: PackedWriter, split: str, rows: Rows, append_rows: int = 77) -> None:
    """Append `rows`, `append_rows` at a time."""
    for start in range(0, len(rows.label), append_rows):
        piece = rows.slice(start, start + append_rows)
        writer.append(split, piece.label, piece.dense, piece.sparse)


def counts_file(counts: NDArray[np.uint32]) -> bytes:
    """A file of counts, from the words of docs/vocabulary.md."""
    body = counts.tobytes()
    head = struct.pack("<8s4IQI", b"hotrowct", 1, 0x01020304, 64, 4, len(counts), zlib.crc32(body)).ljust(60, b"\0")
    return head + struct.pack("<I", zlib.crc32(head)) + body

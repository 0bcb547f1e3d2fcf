"""Exports of Criteo-Kaggle's shape for benchmarks/serving.py: DLRM with random weights, of any size, on any day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotrow.config.load import make_config
from hotrow.data.chunk import Keys
from hotrow.data.native import hash_keys
from hotrow.data.packed.format import MANIFEST, DatasetInfo, DenseColumn, Feature, Table, write_info
from hotrow.data.packed.format import FileRecord as PackedRecord
from hotrow.data.packed.vocabulary import Entries, TableSummary, Vocabulary, write_vocabulary
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.split import RandomPlan, plan_to_json
from hotrow.export.export import (
    ALIGNMENT,
    DOCUMENT,
    ENCODER,
    FOLDERS,
    OWN_NAMES,
    Description,
    Whole,
    becoming,
    file_record,
    network_source,
)
from hotrow.run.checkpoint_files import FileRecord, Pieces, head_of, write_tensors

DIM = 16
CRITEO_ROWS = 33_762_577
CRITEO_TABLES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CHANGED = 0.01
"""Share of a table's rows that each day changes."""
PIECE_ROWS = 1 << 16
MOST_IDS = 4_000_000
"""The most ids that tables of holes have together: with more, only their vocabularies would take longer."""


class Random:
    """Rows of a table on a day, made piece by piece."""

    dtype = torch.float32

    def __init__(self, num_rows: int, day: int) -> None:
        self.shape, self._day = torch.Size((num_rows, DIM)), day

    def pieces(self) -> Iterator[int]:
        return iter(range(0, self.shape[0], PIECE_ROWS))

    def read(self, start: int) -> Tensor:
        num_rows = min(PIECE_ROWS, self.shape[0] - start)
        found = (np.random.default_rng(start).random((num_rows, DIM), np.float32) - 0.5) * 0.1
        for day in range(1, self._day + 1):
            found[np.random.default_rng((start, day)).random(num_rows) < CHANGED] += 0.01
        return torch.from_numpy(found)


class Holes(Whole):
    """Writes tables as files with nothing in them, which take no disk. Their checksums are made up: a scorer does not
    read tables when it opens them."""

    def table(self, name: str, tensor: str, rows: Pieces) -> FileRecord:
        head, num_bytes = head_of([(tensor, rows)], ALIGNMENT)
        with (self.folder / name).open("wb") as file:
            file.write(head)
            file.truncate(len(head) + num_bytes)
        return FileRecord(len(head) + num_bytes, "0" * 8)


def key_of(row: np.ndarray, table: int) -> np.ndarray:
    """The ids of rows of a table, as integers."""
    return (row.astype(np.int64) * 2654435761 + table) % 2**32


def write(to: Whole, num_rows: int, day: int = 0) -> Description:
    """The files of an export; num_rows: of all tables together."""
    sizes = [max(3, size * num_rows // CRITEO_ROWS) for size in CRITEO_TABLES]
    every = max(1, num_rows // MOST_IDS) if isinstance(to, Holes) else 1
    spec = make_config({"data": "d"}).model
    names, numbers = [f"C{k + 1}" for k in range(26)], [f"I{k + 1}" for k in range(13)]
    network = spec.build(num_dense=13, dims=dict.fromkeys(names, DIM), generator=torch.Generator().manual_seed(day))
    model = {**spec.model_dump(mode="json"), "num_dense": 13}
    one_hot = {"kind": "one_hot", "separator": None, "keys": "hex"}
    description = Description(
        created_by="benchmarks.serving",
        run="made",
        step=day,
        dataset={},
        model=model,
        dense=tuple({"name": name, "transform": "log1p_clip0", "missing": 0.0} for name in numbers),
        features=tuple({"name": name, "table": name, **one_hot} for name in names),
        tables=(),
        missing=("", "NA"),
        labels=("label",),
        files={},
    )
    to.begin(description, 0)
    files = {"model.safetensors": write_tensors(to.folder / "model.safetensors", dict(network.state_dict()))}
    described, tables, stored = [], list[Table](), dict[str, PackedRecord]()
    for k, (name, size) in enumerate(zip(names, sizes, strict=True)):
        file, own = f"tables/{name}.safetensors", f"{ENCODER}/vocab/{name}"
        files[file] = to.table(file, f"{name}.weight", Random(size, day))
        rows = np.arange(1, size, every)
        keys = key_of(rows, k)
        hashes = hash_keys(Keys(keys))
        order = np.argsort(hashes, kind="stable")
        summary = TableSummary(size, len(rows), 0, len(rows), len(rows))
        write_vocabulary(to.folder / own, [Entries(hashes[order], rows[order], None)], summary, key_kind="int")
        files[own] = file_record(to.folder / own)
        stored[f"vocab/{name}"] = PackedRecord(files[own].num_bytes, int(files[own].crc32, 16))
        tables.append(Table(name, size, len(rows), vocabulary=Vocabulary.open(to.folder / own).id))
        vocabulary = {"file": own, "num_keys": len(rows), "unknown_row": 0, "missing_row": 0, "hash_cap": None}
        described.append({
            "name": name, "num_embeddings": size, "embedding_dim": DIM, "pooling": "sum", "features": [name],
            "file": file, "tensor": f"{name}.weight", "trained_as": "float32", "stored_as": "float32",
            "vocabulary": {**vocabulary, "min_count": 1, "num_dropped": 0},
        })  # fmt: skip
    schema = parse_schema(
        {"label": "label", "dense": [{"column": name, "transform": "log1p_clip0"} for name in numbers],
         "categorical": [*names]}, where="benchmarks.serving",
    )  # fmt: skip
    info = DatasetInfo(
        name="made",
        dense=tuple(DenseColumn(name, "log1p_clip0") for name in numbers),
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(tables),
        files=stored,
        ids={
            "source": "frame",
            "schema": schema.to_json(),
            "encodings": dict.fromkeys(names, "hex"),
            "split": plan_to_json(RandomPlan(0, (1.0, 0.0, 0.0))),
            "rows": None,
            "sample": 1.0,
        },
    )
    write_info(to.folder / ENCODER, info)
    files[f"{ENCODER}/{MANIFEST}"] = file_record(to.folder / ENCODER / MANIFEST)
    texts = {"model.py": network_source("dlrm", spec.trained_for)}
    root = Path(__file__).resolve().parents[1] / "src" / "hotrow"
    for path in ("export/score.py", "export/inputs.py", "data/seen.py", "data/cells.py"):
        texts[Path(path).name] = (root / path).read_text()
    texts["transforms/log1p_clip0.py"] = (root / "data/transforms/log1p_clip0.py").read_text()
    for name, text in texts.items():
        (to.folder / name).write_text(text)
        files[name] = file_record(to.folder / name)
    description = replace(description, tables=tuple(described), files=files)
    DOCUMENT.write(to.folder / "export.json", description)
    return description


def make(out: Path, num_rows: int, *, day: int = 0, holes: bool = False) -> None:
    """Writes an export. holes: tables take no disk, and few of their rows have ids."""
    with becoming(out, "export", OWN_NAMES, FOLDERS, doing="making an export") as partial:
        write((Holes if holes else Whole)(partial), num_rows, day)

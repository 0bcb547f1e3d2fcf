"""Datasets and models of the golden losses, made from integers alone, so that they are the same everywhere."""

from pathlib import Path
from typing import Any

import numpy as np

from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Table
from hotrow.data.packed.writer import PackedWriter
from packed_data import counts_file

TABLES = {"small": 40, "middle": 1000, "large": 8000}
BASE: dict[str, Any] = {
    "device": "cpu",
    "run": "/golden/run",
    "model": {"name": "dlrm", "embedding_dim": 16, "bottom_mlp": [8], "top_mlp": [8]},
    "train": {"batch_size": 60, "threads": 1},
}
DCN = {"name": "dcn", "embedding_dim": {"default": 16, "middle": 4}, "deep_mlp": [48, 20], "num_cross_layers": 2}
TBSM = {"name": "tbsm", "embedding_dim": 8, "bottom_mlp": [4], "top_mlp": [6], "attention_mlp": [4], "final_mlp": [6]}


def write_dataset(folder: Path, *, counts: bool = True, histories: bool = False, num_rows: int = 3000) -> None:
    """Writes clicks on TABLES; low rows are more popular. A list, or histories of two features, comes on top."""
    drawn = np.random.Generator(np.random.PCG64(7))
    features = [Feature(name=name, table=name) for name in TABLES]
    lists = {"middle_history": "middle", "large_history": "large"} if histories else {"list": "small"}
    features += [Feature(name, table, "sequence" if histories else "multi_hot") for name, table in lists.items()]
    info = DatasetInfo(
        name="golden",
        dense=tuple(DenseColumn(name=f"d{i}") for i in range(3)),
        features=tuple(features),
        tables=tuple(Table(name=name, num_embeddings=n) for name, n in TABLES.items()),
    )
    with PackedWriter(folder, info, rows_per_block=1000, rows_per_part=8000) as writer:
        for split, n in {"train": num_rows, "val": 64}.items():
            columns: dict[str, Any] = {name: _popular(drawn, rows, n) for name, rows in TABLES.items()}
            splits = np.concatenate([[0], np.cumsum(drawn.integers(0, 4, n))])
            columns |= {name: (_popular(drawn, TABLES[table], splits[-1]), splits) for name, table in lists.items()}
            label = (drawn.integers(0, 4, n) == 0).astype(np.float32)
            writer.append(split, label, drawn.integers(0, 9, (n, 3)).astype(np.float32), columns)
            if counts and split == "train":
                (folder / "counts").mkdir()
                for table, rows in TABLES.items():
                    ids = [columns[table], *(columns[name][0] for name, of in lists.items() if of == table)]
                    found = np.bincount(np.concatenate(ids), minlength=rows).astype(np.uint32)
                    (folder / "counts" / table).write_bytes(counts_file(found))
        writer.close()


def _popular(drawn: np.random.Generator, rows: int, n: int) -> Any:
    """Returns ids whose square roots are uniform."""
    most = 1 << 20
    return (rows * drawn.integers(0, most, n) ** 2) >> 40

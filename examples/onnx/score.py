"""Scores raw rows with an export, in NumPy, pyarrow and ONNX Runtime: neither hotrow nor torch is there.

    hotrow export RUN --out EXPORT --onnx
    python examples/onnx/score.py EXPORT ROWS.csv          # ROWS.parquet and ROWS.jsonl too

inputs.py of the export makes inputs of raw values: numbers, statistics, and row numbers of ids. Here rows are looked up
and pooled, as a system with its own store of rows would do it, and dense.onnx makes scores of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

TYPES = {"F32": "<f4", "BF16": "<u2", "U8": "u1"}


def rows_at(path: Path, places: np.ndarray) -> np.ndarray:
    """Returns rows of a table, float32 [n, D]. Only the pages of the file that hold them are read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        (tensor,) = json.loads(file.read(size)).values()
    rows = np.memmap(path, TYPES[tensor["dtype"]], "r", 8 + size, tuple(tensor["shape"]))[places]
    if tensor["dtype"] == "U8":
        step, least = rows[:, -8:].copy().view("<f4").T[..., None]
        return rows[:, :-8] * step + least
    return (rows.astype(np.uint32) << 16).view(np.float32) if tensor["dtype"] == "BF16" else rows


def pooled(rows: np.ndarray, offsets: np.ndarray, pooling: str) -> np.ndarray:
    """Returns the sum or the mean of each sample's rows, float32 [B, D]."""
    lengths = np.diff(offsets)
    sums = np.zeros((len(lengths), rows.shape[1]), np.float32)
    np.add.at(sums, np.repeat(np.arange(len(lengths)), lengths), rows)
    return sums / np.maximum(lengths, 1)[:, None].astype(np.float32) if pooling == "mean" else sums


def score(folder: Path, file: Path) -> np.ndarray:
    """Returns the score of each row of a file."""
    sys.path.insert(0, str(folder))
    from inputs import Inputs, read_columns  # of the export

    read = Inputs(folder)
    dense, ids = read.of(read_columns(file, read.columns))
    session, feed = onnxruntime.InferenceSession(folder / "dense.onnx"), {"dense": dense}
    features: list[tuple[str, dict[str, Any]]] = [(f["name"], read.tables[f["table"]]) for f in read.about["features"]]
    rows = {name: rows_at(folder / table["file"], ids[name][0]) for name, table in features}
    feed["rows"] = np.concatenate([pooled(rows[name], ids[name][1], table["pooling"]) for name, table in features], 1)
    for name in rows:
        feed |= {f"{name}.rows": rows[name], f"{name}.offsets": ids[name][1]}
    return session.run(None, {taken.name: feed[taken.name] for taken in session.get_inputs()})[0]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python score.py EXPORT ROWS, a file of CSV, Parquet or JSON")
    try:
        print(*score(Path(sys.argv[1]), Path(sys.argv[2])).tolist(), sep="\n")
    except (ValueError, OSError) as error:
        sys.exit(f"score.py: {error}")

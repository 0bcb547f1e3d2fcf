"""Scores raw rows with an export, in NumPy, pyarrow and ONNX Runtime: neither hotrow nor torch is there.

    hotrow export RUN --out EXPORT --onnx
    python examples/onnx/score.py EXPORT ROWS.parquet

It takes clean values: a number is a number, an id is an integer or text, and what is missing is null. Models are
refused whose inputs are statistics, are joined from other files or computed from other columns, or whose ids are
hashed: score.py in the export takes these, and any value. docs/export.md says what the fields of export.json mean.
"""

import json
import struct
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow.parquet as pq

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


def vocabulary_at(path: Path) -> dict[bytes | int | None, int]:
    """Returns the row of each id: of text by its bytes, of a number by its hash (docs/vocabulary.md)."""
    stored = path.read_bytes()
    index_bytes, num_keys = struct.unpack_from("<24xI4xQ", stored)
    _, hashes, rows, begins, texts = [place for place, _ in struct.iter_unpack("<QQ8x", stored[72:192])]
    found = np.frombuffer(stored, f"<u{index_bytes}", num_keys, rows).tolist()
    if begins == texts:
        return dict(zip(np.frombuffer(stored, "<u8", num_keys, hashes).tolist(), found, strict=True))
    ends = [texts + end for end in np.frombuffer(stored, "<u8", num_keys + 1, begins).tolist()]
    return {stored[first:end]: row for (first, end), row in zip(pairwise(ends), found, strict=True)}


def key_of(feature: dict[str, Any], value: Any) -> bytes | int:
    """Returns an id as `vocabulary_at` has it."""
    if feature["keys"] == "bytes":
        return str(value).encode()
    base = 16 if feature["keys"] == "hex" else 10
    x = (int(value, base) if isinstance(value, str) else int(value)) % 2**64
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> 33) * factor % 2**64
    return x ^ x >> 33


def pooled(folder: Path, table: dict[str, Any], feature: dict[str, Any], values: list[Any]) -> np.ndarray:
    """Returns the sum or the mean of each value's rows, float32 [n, D]."""
    ids, one = table["vocabulary"], feature["kind"] == "one_hot"
    if "buckets" in feature:
        values = [None if v is None else int(np.searchsorted(feature["buckets"], v, "right")) for v in values]
    known = vocabulary_at(folder / ids["file"]) | {None: ids["missing_row"]}
    bags = [[v] if one else v.split(feature["separator"]) if isinstance(v, str) else v or [] for v in values]
    keys = [None if v is None else key_of(feature, v) for bag in bags for v in bag]
    places, lengths = [known.get(key, ids["unknown_row"]) for key in keys], [*map(len, bags)]
    sums = np.zeros((len(bags), table["embedding_dim"]), np.float32)
    np.add.at(sums, np.repeat(np.arange(len(bags)), lengths), rows_at(folder / table["file"], np.array(places, int)))
    return sums / np.maximum(lengths, 1)[:, None].astype(np.float32) if table["pooling"] == "mean" else sums


def score(folder: Path, columns: dict[str, list[Any]]) -> np.ndarray:
    """Returns the score of each row. columns: raw values by name."""
    about = json.loads((folder / "export.json").read_text())
    tables = {table["name"]: table for table in about["tables"]}
    refused = [name for name in ("transforms", "statistics", "at_serving") if about[name]]
    for name, table in tables.items():
        if table["vocabulary"] is None or table["vocabulary"]["hash_cap"] is not None:
            refused.append(f"ids of table {name} that are hashed, or row numbers")
    if refused:
        raise ValueError(f"{folder} has {', '.join(refused)}, which are not read here; take its score.py")
    sys.path.insert(0, str(folder / "transforms"))
    dense = []
    for column in about["dense"]:
        function = getattr(import_module(column["transform"]), column["transform"])
        options = {name: column[name] for name in column.keys() - {"name", "transform", "missing", "written"}}
        x = function(np.array(columns[column["name"]], np.float32).astype(np.float64), **options)
        dense.append(np.where(np.isnan(x), column["missing"], x).astype(np.float32))
    rows = [pooled(folder, tables[each["table"]], each, columns[each["name"]]) for each in about["features"]]
    inputs = {"rows": np.concatenate(rows, 1), **({"dense": np.stack(dense, 1)} if dense else {})}
    return onnxruntime.InferenceSession(folder / "dense.onnx").run(None, inputs)[0]


if __name__ == "__main__":
    print(*score(Path(sys.argv[1]), pq.read_table(sys.argv[2]).to_pydict()).tolist(), sep="\n")

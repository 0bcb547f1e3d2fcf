"""Small raw logs with every sort of column, and the bytes of a prepared folder, for tests of preparation."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from hotrow.data.prepare import pipeline
from hotrow.data.sources.schema import Schema, parse_schema
from hotrow.data.sources.split import SplitPlan

SCHEMA: Schema = parse_schema(
    {
        "label": "click",
        "time": "ts",
        "dense": [
            {"column": "price", "transform": "log1p_clip0"},
            {"column": "age", "transform": "standardize"},
            {"column": "raw", "transform": "identity"},
        ],
        "categorical": [
            "user",
            {"column": "item"},
            {"column": "seen", "kind": "sequence", "table": "item"},
            {"column": "tags", "kind": "multi_hot"},
            {"column": "site", "table": "hashed"},
        ],
        "tables": {"tags": {"min_count": 15}, "hashed": {"hash_cap": 7}},
        "split": {"fractions": [0.7, 0.1, 0.2], "seed": 5},
        "licence": "made for tests",
    },
    where="tests",
)


def make_rows(num_rows: int = 3000, seed: int = 0) -> dict[str, list[Any]]:
    """Columns of click logs: Zipf ids, shared tables, lists, and missing values everywhere a value may be missing."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], share: float = 0.1) -> list[Any]:
        return [None if missing else value for value, missing in zip(values, rng.random(num_rows) < share, strict=True)]

    items = (rng.zipf(1.4, num_rows) % 700).tolist()
    lists = [(rng.zipf(1.4, rng.integers(0, 5)) % 700).tolist() for _ in range(num_rows)]
    return {
        "click": (rng.random(num_rows) < 0.3).astype(int).tolist(),
        "ts": np.sort(rng.integers(0, 2000, num_rows)).tolist(),
        "price": some(rng.lognormal(0, 2, num_rows).tolist()),
        "age": some(rng.integers(10, 90, num_rows).tolist()),
        "raw": rng.normal(0, 1, num_rows).tolist(),
        "user": some([f"u{k}" for k in rng.zipf(1.3, num_rows) % 5000]),
        "item": some(items),
        "seen": some(lists),
        "tags": [[f"t{k}" for k in rng.integers(0, 60, rng.integers(0, 3))] for _ in range(num_rows)],
        "site": [int(k) for k in rng.integers(-50, 50, num_rows)],
    }


def to_table(rows: dict[str, list[Any]]) -> pa.Table:
    types = {"price": pa.float64(), "age": pa.int16(), "item": pa.int64(), "seen": pa.list_(pa.int64())}
    return pa.table({name: pa.array(column, types.get(name)) for name, column in rows.items()})


def write_parquet(folder: Path, rows: dict[str, list[Any]], *, num_files: int = 3, row_group_rows: int = 400) -> Path:
    """`rows` in files of unequal size."""
    folder.mkdir(parents=True, exist_ok=True)
    table = to_table(rows)
    ends = [len(table) * (i + 1) ** 2 // num_files**2 for i in range(num_files)]
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        pq.write_table(table.slice(start, end - start), folder / f"part-{i}.parquet", row_group_size=row_group_rows)
    return folder


def file_hashes(folder: Path, *, below: str = "") -> dict[str, str]:
    """sha256 of every file under `folder / below`, by relative path."""
    files = sorted(path for path in (folder / below).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def plan_of(value: Any) -> SplitPlan:
    """The plan that `ids` of a dataset.json names."""
    plan: SplitPlan = TypeAdapter(SplitPlan).validate_json(json.dumps(value))
    return plan


@contextmanager
def stopping(stage: str, number: int) -> Iterator[None]:
    """Inside the block preparation is asked to stop when a stage has drawn this piece, as by a signal."""
    plain = pipeline.Stages._drawn

    def drawn(stages: Any, name: str, *given: Any) -> Iterator[Any]:
        for i, piece in enumerate(plain(stages, name, *given)):
            if (name, i) == (stage, number):
                stages._stop.set()
            yield piece

    with pytest.MonkeyPatch.context() as patch, pytest.raises(pipeline.Interrupted):
        patch.setattr(pipeline.Stages, "_drawn", drawn)
        yield

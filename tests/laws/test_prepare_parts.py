"""Law: processes that each read a file, and count and encode some of the rows, write what one process writes.

The functions are those of examples/prepare_ray.py. Here each task is pickled, and tasks run in a random order; Ray
itself is tried if it is installed.
"""

from __future__ import annotations

import importlib.util
import pickle
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.data.prepare import rows as stored_rows
from hotrow.data.prepare.pipeline import Options, begin
from hotrow.data.prepare.pipeline import prepare as prepare_in_one
from hotrow.data.sources.registry import OpenedSource, open_source
from hotrow.data.sources.schema import Schema, parse_schema
from loops import looped
from prepare_data import SCHEMA, file_hashes, make_rows, write_parquet

EXAMPLE = Path(__file__).parents[2] / "examples" / "prepare_ray.py"
spec = importlib.util.spec_from_file_location("prepare_ray", EXAMPLE)
assert spec is not None and spec.loader is not None
example = importlib.util.module_from_spec(spec)
sys.modules["prepare_ray"] = example  # tasks name their functions by it
spec.loader.exec_module(example)

SIZES: dict[str, Any] = {"rows_per_block": 64, "rows_per_part": 128}
TIMED: dict[str, Any] = {
    "label": "click",
    "time": "ts",
    "dense": ["age", {"column": "price", "transform": "standardize"}],
    "categorical": ["user", "item"],
    "statistics": ["user", ["user", "item"]],
    "tables": {"user": {"min_count": 2}},
    "split": {"kind": "time"},
}
UNTIMED = TIMED | {
    "time": None,
    "categorical": ["user", "item", {"column": "tags", "kind": "multi_hot", "separator": "|", "table": "item"}],
    "split": {"kind": "random", "seed": 3},
}


def shuffled(function: Any, shared: tuple[Any, ...], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Runs tasks in a random order, as processes would that share nothing but the disk."""
    given = [pickle.dumps((*shared, *task)) for task in tasks]
    order = random.Random(len(given)).sample(range(len(given)), len(given))
    done = {i: pickle.dumps(function(*pickle.loads(given[i]))) for i in order}
    return (pickle.loads(done[i]) for i in range(len(given)))


def write_csv(folder: Path, *, lacks: str = "") -> Path:
    """Three files, whose times overlap and are out of order; the second one lacks a column."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    for i, n in enumerate((110, 50, 180)):
        columns = {
            "click": (rng.random(n) < 0.3).astype(int).tolist(),
            "ts": (1_700_000_000 + 600 * rng.integers(60 * i, 60 * i + 200, n)).tolist(),
            "age": ["" if r < 0.1 else f"{r * 90:.1f}" for r in rng.random(n)],
            "price": rng.lognormal(0, 2, n).round(3).tolist(),
            "user": [f"u{k}" for k in rng.zipf(1.5, n) % 40],
            "item": ["" if k == 3 else f"i{k}" for k in rng.zipf(1.5, n) % 30],
            "tags": ["|".join(f"i{k}" for k in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(n)],
        }
        names = [name for name in columns if not (i == 1 and name == lacks)]
        lines = [",".join(names), *(",".join(map(str, row)) for row in zip(*(columns[n] for n in names), strict=True))]
        (folder / f"{i}.csv").write_text("\n".join(lines) + "\n")
    (folder / "3.csv").write_text(",".join(columns) + "\n")  # a file without rows
    return folder


def opened(kind: str, folder: Path) -> OpenedSource:
    """Small logs of a kind, in several files."""
    if kind == "criteo":
        for i in range(3):
            write_criteo(folder / f"day_{i}", criteo_kaggle(80 + 30 * i, scale=0.001))
        return open_source("criteo", folder)
    if kind == "parquet":
        return open_source("parquet", write_parquet(folder / "logs", make_rows(500)), schema=SCHEMA)
    schema = UNTIMED if kind == "untimed" else TIMED
    if kind == "timed, random":
        schema = schema | {"split": {"kind": "random"}}
    lacks = "age" if kind == "untimed" else ""
    return open_source("csv", write_csv(folder / "logs", lacks=lacks), schema=schema_of(schema))


def schema_of(value: dict[str, Any]) -> Schema:
    return parse_schema({name: part for name, part in value.items() if part is not None}, where="tests")


@looped("kind", ["criteo", "parquet", "timed", "timed, random", "untimed"])
def test_many_processes_write_what_one_writes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(kind, tmp_path)
    dataset = prepare_in_one(source, tmp_path / "one", Options(**SIZES))
    assert all(dataset.split(name).num_rows for name in ("train", "val", "test"))
    monkeypatch.setattr(stored_rows, "ROWS_PER_PART", 60)  # files have several
    example.prepare(source, tmp_path / "many", shuffled, Options(**SIZES), memory=1 << 24, cut=100)
    assert file_hashes(tmp_path / "many") == file_hashes(tmp_path / "one")


def test_what_the_example_does_not_do_is_refused(tmp_path: Path) -> None:
    lagged = schema_of(TIMED | {"statistics_lag": "1h"})
    source = open_source("csv", write_csv(tmp_path / "logs"), schema=lagged)
    with pytest.raises(ValueError, match="statistics_lag"):
        example.prepare(source, tmp_path / "out", shuffled, Options(), memory=1 << 24, cut=80)
    (tmp_path / "none.csv").write_text((tmp_path / "logs" / "3.csv").read_text())
    source = open_source("csv", tmp_path / "none.csv", schema=schema_of(TIMED))
    with pytest.raises(ValueError, match=r"none\.csv and the other files have no rows"):
        example.prepare(source, tmp_path / "out", shuffled, Options(), memory=1 << 24, cut=80)
    source = open_source("csv", tmp_path / "logs", schema=schema_of(TIMED))
    begin(source, tmp_path / "other")
    with pytest.raises(ValueError, match="unfinished work"):
        example.prepare(source, tmp_path / "other", shuffled, Options(), memory=1 << 24, cut=80)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")
def test_ray_writes_what_one_process_writes(tmp_path: Path) -> None:
    source = opened("criteo", tmp_path)
    prepare_in_one(source, tmp_path / "one")
    paths = [file.path for file in source.source.scout().files]
    command = [sys.executable, str(EXAMPLE), "criteo", *paths, "--out", str(tmp_path / "many"), "--cut", "100"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert file_hashes(tmp_path / "many") == file_hashes(tmp_path / "one")

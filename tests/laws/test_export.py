"""Law: an export is the model. It scores without hotrow what `predict` scores, for every kind of id and storage.

The truth is a second program: score.py and model.py, as they lie in the exported folder (plain torch, dictionaries),
beside `predict` (vocabulary files, native kernels, tiers). They share the file of the network alone, which has a plain
twin of its own in tests/unit. Raw rows hold ids that were rare, unseen and missing.
"""

import ast
import csv
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import hotrow
from benchmarks import histories
from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from expanded import expanded
from forked import run_forked
from hotrow.cli import tools
from hotrow.config.load import apply_overrides, make_config
from hotrow.data import transforms
from hotrow.data.chunk import Keys
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.split import RandomPlan
from hotrow.data.transforms import Transform
from hotrow.export import score
from hotrow.export.export import network_source
from hotrow.export.inputs import load_module
from hotrow.kernels import ops
from hotrow.models import MODELS
from hotrow.objectives import OBJECTIVES
from hotrow.run import runs
from hotrow.run.checkpoint_files import read_manifest
from loops import looped

native = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")
TOLERANCE = 1e-5
"""Of probabilities: docs/numerics.md's 1e-5 of the largest element of an MLP's output, logits of a few units, a slope
of the sigmoid of at most 1/4."""
BASE: dict[str, Any] = {
    "model": {"embedding_dim": 6, "bottom_mlp": [9], "top_mlp": [11, 5], "embedding_init": 0.3},
    "optimizer": {"dense": {"name": "adagrad", "lr": 0.05}, "sparse": {"name": "adagrad", "lr": 0.2}},
    "train": {"batch_size": 40, "max_steps": 60, "seed": 3, "threads": 1, "log_every": 50},
    "checkpoint": {"every": 9, "keep_last": 2},
}
SCHEMA: dict[str, Any] = {
    "label": "click",
    "dense": [
        {"column": "price"},
        {"column": "age", "transform": "log1p_clip0"},
        {"column": "x", "transform": "identity"},
    ],
    "categorical": [
        {"column": "user", "type": "text"},
        {"column": "item", "type": "int"},
        {"column": "big", "table": "numbers"},
        {"column": "seen", "kind": "multi_hot", "type": "int", "table": "item", "separator": "|"},
        {"column": "tags", "kind": "multi_hot", "type": "text", "separator": " "},
    ],
    "tables": {"user": {"min_count": 2}, "tags": {"min_count": 3}},
    "split": {"kind": "random"},
}
NO_DENSE = {"dense": []}
TWICE = {
    "dense": ["price", "item"],
    "categorical": [{"column": "price", "buckets": [1, 4.5, 20]}, "item", {"column": "x", "buckets": [-1, 0.25]}],
    "tables": {},
}
"""Columns that are a number and ids, of their values or in buckets."""
STATISTICS = {
    "categorical": ["user", {"column": "item", "type": "int"}, "big", {"column": "price", "buckets": [1, 4.5, 20]}],
    "statistics": [
        "user",
        "item",
        "big",
        "price",
        ["big", "item"],
        {"columns": ["price", "user", "item"], "priors": [3], "count": True},
    ],
    "tables": {"user": {"min_count": 2}, "item": {"hash_cap": 91}},
}
WRITTEN_SCHEMA = {
    "label": "click",
    "dense": [
        {"column": "price", "thousands": ",", "unit": "$"},
        {"column": "age", "unit": "%", "transform": "log1p_clip0"},
        {"column": "x", "decimal": ",", "thousands": " "},
    ],
    "categorical": ["user", {"column": "item", "type": "int"}, {"column": "price", "buckets": [4.5, 1000]}],
    "split": {"kind": "random"},
}
DRAM = 50_000
"""Bytes; the tables and states of `long_tailed` are 88,000."""
HASHED = {"tables": {"user": {"hash_cap": 37}, "item": {"hash_cap": 91}, "numbers": {"hash_cap": 23}, "tags": {}}}
Columns = dict[str, list[Any]]


def clicks(num_rows: int, seed: int, *, num_users: int = 500) -> Columns:
    """Some values are missing, ids have long tails and either sign; of another seed many were never seen."""
    rng = np.random.default_rng(seed)

    def some(values: list[Any], share: float = 0.1) -> list[Any]:
        return [None if missing else value for value, missing in zip(values, rng.random(num_rows) < share, strict=True)]

    user = (rng.zipf(1.2, num_rows) % num_users).tolist()
    item = (rng.zipf(1.3, num_rows) % 300).tolist()
    lists = [rng.integers(-5, 60, rng.integers(0, 4)).tolist() for _ in range(num_rows)]
    words = [[f"tag{rng.zipf(1.5) % 40}" for _ in range(rng.integers(1, 4))] for _ in range(num_rows)]
    return {
        "click": [int(value % 3 == 0) if rng.random() < 0.8 else int(rng.integers(2)) for value in item],
        "price": some(rng.lognormal(2, 1, num_rows).astype(np.float32).tolist()),
        "age": some(rng.integers(-3, 90, num_rows).tolist()),
        "x": rng.normal(0, 1, num_rows).astype(np.float32).tolist(),
        "user": some([f"user {chr(228) * (value % 20)}{value}" for value in user]),
        "item": some([value - 100 for value in item]),
        "big": [2**64 - 1 - value * 7919 for value in (rng.zipf(1.4, num_rows) % 90).tolist()],
        "seen": [None if len(values) == 0 else "|".join(map(str, values)) for values in lists],
        "tags": some([" ".join(values) for values in words]),
    }


def write_csv(path: Path, columns: Columns) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*[["" if v is None else v for v in values] for values in columns.values()], strict=True))
    return path


def write_parquet(path: Path, columns: Columns) -> Path:
    """`seen` as lists, `big` as uint64."""
    seen = [None if v is None else [int(each) for each in v.split("|")] for v in columns["seen"]]
    types = {"big": pa.uint64(), "price": pa.float32(), "x": pa.float32()}
    pq.write_table(pa.table({n: pa.array(v, types.get(n)) for n, v in {**columns, "seen": seen}.items()}), path)
    return path


def written(columns: Columns) -> Columns:
    """Some of the columns as text that people and other programs write."""
    lost = ("NA", " null ", "", "\\N", "  ", "None")

    def text(name: str, form: Callable[[Any], str]) -> list[str]:
        values = enumerate(columns[name])
        return [lost[i % len(lost)] if value is None or i % 11 == 0 else form(value) for i, value in values]

    return {
        "click": columns["click"],
        "price": text("price", lambda value: f"${100 * value:,.2f}"),
        "age": text("age", lambda value: f"{value} %"),
        "x": text("x", lambda value: f"{1e5 * value:,.1f}".replace(",", "\u202f").replace(".", ",")),
        "user": text("user", str),
        "item": text("item", str),
    }


def read_csv(path: Path) -> Columns:
    """As text, empty ones missing."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] or None for row in rows] for name in rows[0]}


def train(data: Path, run: Path, *changes: str, **memory: Any) -> hotrow.Run:
    raw = {**BASE, "data": str(data), "run": str(run), **({"memory": memory} if memory else {})}
    return hotrow.load(runs.train(make_config(apply_overrides(raw, changes)), quiet=True).path)


def scorer_of(folder: Path) -> Any:
    """The Scorer of the folder's own score.py, which knows nothing of hotrow; nor does model.py."""
    for file in (*folder.glob("*.py"), *folder.glob("transforms/*.py")):
        tree = ast.parse(file.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any("hotrow" in name or "pydantic" in name for name in names)
    return load_module(folder / "score.py").Scorer(folder)


def check(run: hotrow.Run, raw: Any, columns: Columns, out: Path) -> None:
    run.export(out)
    expected = run.predict(raw)
    run.close()
    assert len(expected) > 100 and expected.std() > 0.02, "scores too alike to tell anything"
    np.testing.assert_allclose(scorer_of(out).score(columns).numpy(), expected, rtol=0, atol=TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served = hotrow.Scorer(out)
    np.testing.assert_array_equal(served.score(columns), expected, err_msg="hotrow's own scorer has the same bits")
    assert served.seen.columns == run.seen.columns
    alone = [served.score({name: cells[row : row + 1] for name, cells in columns.items()})[0] for row in range(100)]
    np.testing.assert_array_equal(alone, expected[:100], err_msg="a row beside others has the bits of the row alone")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """old.* to train on, new.* to score."""
    folder = tmp_path_factory.mktemp("logs")
    for name, columns in (("old", clicks(1500, 0)), ("new", clicks(300, 1))):
        write_csv(folder / f"{name}.csv", columns)
        write_parquet(folder / f"{name}.parquet", columns)
    return folder


def prepared(logs: Path, out: Path, *, suffix: str = "csv", **changes: Any) -> Path:
    schema = parse_schema({**SCHEMA, **changes}, where="test")
    return run_prepare(suffix, str(logs / f"old.{suffix}"), out, schema=schema).path


@pytest.fixture(scope="module")
def data(logs: Path) -> Path:
    return prepared(logs, logs / "packed")


@pytest.fixture(scope="module")
def long_tailed(logs: Path) -> Path:
    """Data with 4,800 training rows, of which BASE's 60 steps see the half, and a table that DRAM does not hold."""
    path = write_csv(logs / "long.csv", clicks(6000, 0, num_users=1 << 30))
    schema = parse_schema({**SCHEMA, "tables": {}}, where="test")
    return run_prepare("csv", str(path), logs / "packed-long", schema=schema).path


@pytest.mark.slow_but("{'min_count': 3}")
@pytest.mark.parametrize("options", [{}, {"min_count": 3}, {"hash_cap": 61}], ids=str)
def test_criteo(tmp_path: Path, options: dict[str, Any]) -> None:
    write_criteo(tmp_path / "old.txt", criteo_kaggle(1500, scale=0.001))
    write_criteo(tmp_path / "new.txt", criteo_kaggle(600, scale=0.001, seed=8))
    packed = run_prepare("criteo", str(tmp_path / "old.txt"), tmp_path / "packed", **options).path
    run = train(packed, tmp_path / "run", "model.first_order=true", "train.max_steps=120")
    rows = [line.split("\t") for line in (tmp_path / "new.txt").read_text().splitlines()]
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    columns = {name: [row[i] or None for row in rows] for i, name in enumerate(names)}
    check(run, str(tmp_path / "new.txt"), columns, tmp_path / "out")


@pytest.mark.slow_but("plain")
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["model.first_order=true"],
        ["train.precision=fp16"],
        ["train.precision=split_bf16"],
        ["train.precision=split_bf16", "optimizer.dense.name=sgd"],
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_lists_text_and_integers_of_csv(logs: Path, data: Path, tmp_path: Path, changes: list[str]) -> None:
    run = train(data, tmp_path / "run", *changes)
    check(run, str(logs / "new.csv"), read_csv(logs / "new.csv"), tmp_path / "out")


@pytest.mark.slow_but("csv")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_cells_as_people_write_them(tmp_path: Path, suffix: str) -> None:
    """Money, decimal commas, percent and texts that mean missing, in numbers, ids and lists."""
    schema = parse_schema(WRITTEN_SCHEMA, where="test")
    for name, seed in (("old", 0), ("new", 1)):
        columns = written(clicks(1500 if seed == 0 else 300, seed))
        if suffix == "csv":
            write_csv(tmp_path / f"{name}.csv", columns)
        else:
            pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    packed = run_prepare(suffix, str(tmp_path / f"old.{suffix}"), tmp_path / "packed", schema=schema)
    lost = packed.info.summary["missing"]
    assert isinstance(lost, dict) and {*lost} == {"price", "age", "x", "user", "item"}
    run = train(packed.path, tmp_path / "run")
    columns = read_csv(tmp_path / "new.csv") if suffix == "csv" else columns
    check(run, str(tmp_path / f"new.{suffix}"), columns, tmp_path / "out")


CHANGES = {"hashed": HASHED, "no dense": NO_DENSE, "twice": TWICE, "statistics": STATISTICS}
CHANGES["statistics alone"] = STATISTICS | NO_DENSE


@pytest.mark.slow_but("hashed-csv", "twice-csv", "statistics-parquet")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_hashed_ids_no_dense_inputs_columns_that_are_both_and_statistics(
    logs: Path, tmp_path: Path, suffix: str, changes: dict[str, Any]
) -> None:
    """A model with a first order takes numbers in buckets in pieces too."""
    options = ["model.first_order=true"] if changes in (TWICE, STATISTICS) else []
    run = train(prepared(logs, tmp_path / "packed", suffix=suffix, **changes), tmp_path / "run", *options)
    new = logs / f"new.{suffix}"
    columns = read_csv(new) if suffix == "csv" else pq.read_table(new).to_pydict()
    check(run, str(new), columns, tmp_path / "out")
    assert any(json.loads((tmp_path / "out" / "export.json").read_text())["model"]["edges"]) == bool(options)


RATIO = """
def ratio(x, y, *, scale: float):
    return scale * x / (1 + abs(y))
"""


def test_a_transform_that_arrives_as_one_file(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two columns, as a number and, rounded by another one, as ids; rows to score hold words, too."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "ratio.py").write_text(RATIO)
    (tmp_path / "more" / "rounded.py").write_text("import numpy\n\ndef rounded(x):\n    return numpy.rint(x)\n")
    monkeypatch.setattr(transforms, "__path__", [*transforms.__path__, str(tmp_path / "more")])
    changes = {
        "dense": ["quotient", {"column": "price", "transform": "rounded"}],
        "categorical": ["user", "years", {"column": "big", "table": "numbers"}],
        "transforms": [
            {"ratio": {"columns": ["age", "x"], "into": "quotient", "scale": 2}},
            {"rounded": {"column": "x", "into": "years"}},
        ],
        "tables": {},
    }
    packed = prepared(logs, tmp_path / "packed", **changes)
    old = read_csv(logs / "old.csv")
    age, x = (np.array([np.nan if v is None else float(v) for v in old[name]]) for name in ("age", "x"))
    truth = (2 * age / (1 + abs(x))).astype(np.float32)
    split = PackedDataset.open(packed)
    mean, std = Transform.parse(split.info.dense[0].transform).options.values()
    codes = RandomPlan(0, (0.8, 0.1, 0.1)).assign(np.arange(len(truth)))
    for code, name in enumerate(("train", "val", "test")):
        block = split.split(name).block(0)
        own = truth[codes == code]
        wanted = np.where(np.isnan(own), 0, ((own.astype(np.float64) - mean) / std)).astype(np.float32)
        np.testing.assert_array_equal(block.dense[0], wanted)
        years = split.vocabulary("years").lookup(Keys(np.rint(x[codes == code]).astype(np.int64)))
        np.testing.assert_array_equal(block.ids[1], years)
    columns = read_csv(logs / "new.csv")
    columns["age"][:9], columns["x"][5:15] = ["none of it"] * 9, ["word"] * 10
    run = train(packed, tmp_path / "run")
    with pytest.warns(UserWarning, match="scored as") as told:
        check(run, str(write_csv(tmp_path / "new.csv", columns)), columns, tmp_path / "out")
    assert sum("quotient 19, years 10" in str(each.message) for each in told) == 2, "predict and the export count alike"
    files = {path.name for path in (tmp_path / "out" / "transforms").glob("*.py")}
    assert files == {"ratio.py", "rounded.py", "standardize.py"}


@pytest.mark.slow_but("fp16", "split_bf16")
@native
@pytest.mark.parametrize("precision", ["fp32", "fp16", "split_bf16"])
def test_tables_in_tiers(logs: Path, long_tailed: Path, tmp_path: Path, precision: str) -> None:
    memory = {"dram": DRAM, "ssd": str(tmp_path), "force": True}
    run = train(long_tailed, tmp_path / "run", f"train.precision={precision}", **memory)
    chains = read_manifest(run.checkpoint).parts["embedding"].chains
    assert max(len(chain.links) for chain in chains.values()) > 1
    check(run, str(logs / "new.csv"), read_csv(logs / "new.csv"), tmp_path / "out")


@pytest.mark.parametrize("model", ["tbsm, bottom_mlp: [9], history_steps: 6", "din"])
def test_histories(tmp_path: Path, model: str) -> None:
    rng = np.random.default_rng(2)
    events = pl.DataFrame({"user": rng.integers(0, 20, 900), "item": rng.integers(0, 40, 900), "time": np.arange(900)})
    events = events.with_columns(category=pl.col("item") % 7)
    packed = histories.prepare(events, tmp_path / "packed", length=6).path
    options = f"{{name: {model}, embedding_dim: 6, embedding_init: 0.3, top_mlp: [12, 9], attention_mlp: [7]}}"
    run = train(packed, tmp_path / "run", f"model={options}", "train.max_steps=90", "train.epochs=9")
    lengths = rng.integers(0, 7, 200)
    columns: Columns = {name: rng.integers(0, 60, 200).tolist() for name in ("user", "item", "category")}
    columns |= {f"{name}_history": [rng.integers(0, 60, n).tolist() for n in lengths] for name in ("item", "category")}
    new = pa.table({name: pa.array(v, pa.list_(pa.int64()) if "_h" in name else None) for name, v in columns.items()})
    check(run, new, columns, tmp_path / "out")


@looped("labels", [["a"], ["a", "b", "c"]])
@looped("num_dense", [0, 3])
@looped("name", MODELS)
def test_the_exported_file_of_every_model_computes_the_same(
    name: str, num_dense: int, labels: list[str], tmp_path: Path
) -> None:
    """With all default options, on random weights and rows."""
    features = ["user", "item", "item_history"]
    spec = make_config({"data": "d", "model": {"name": name}}).model
    if len(labels) > 1 and "num_outputs" not in inspect.signature(spec.build).parameters:
        pytest.skip("it has one output")
    info = SimpleNamespace(labels=labels, dense=[None] * num_dense)
    generator = torch.Generator().manual_seed(4)
    network = spec.build_for(info, dims=dict.fromkeys(features, 16), generator=generator)
    for objective in OBJECTIVES.values():
        (tmp_path / "model.py").write_text(network_source(name, objective))
        definition, outputs = load_module(tmp_path / "model.py"), torch.linspace(-3, 3, 7)
        outputs = torch.outer(outputs, torch.arange(6.0)) if objective.retrieves else outputs
        assert torch.equal(definition.scores(outputs), objective.scores(outputs))
    about = {
        "model": {**spec.model_dump(mode="json"), "num_dense": num_dense},
        "labels": labels,
        "tables": [{"name": "t", "embedding_dim": 16}],
        "features": [{"name": feature, "table": "t"} for feature in features],
    }
    exported = score.build_network(definition, about)
    exported.load_state_dict(network.state_dict())
    g = torch.Generator().manual_seed(5)
    dense, lengths = torch.randn(9, num_dense, generator=g), [1] * 9
    rows: Any = torch.randn(9, 48, generator=g)
    if spec.network.lookup == "sequence":
        bags = {"user": lengths, "item": lengths, "item_history": [0, 3, 20, 1, 0, 2, 5, 7, 4]}
        rows = {f: (torch.randn(sum(n), 16, generator=g), torch.tensor([0, *n]).cumsum(0)) for f, n in bags.items()}
    logits = network(dense, rows).detach()
    own = (2 * spec.vector_dim,) if spec.network.retrieves else () if len(labels) == 1 else (3,)
    assert logits.shape == (9, *own)
    assert logits.std() > 0 and exported.lookup == network.lookup
    torch.testing.assert_close(exported(dense, rows).detach(), logits, rtol=1e-5, atol=1e-5 * float(logits.abs().max()))


def test_its_own_command_and_readme_work_where_hotrow_is_not(logs: Path, tmp_path: Path) -> None:
    run = train(prepared(logs, tmp_path / "packed", suffix="parquet"), tmp_path / "run")
    run.export(tmp_path / "out")
    lines = [
        "import os, runpy, sys",
        "for name in ['hotrow', *sys.modules]:",
        "    if name.startswith('hotrow'): sys.modules[name] = None  # importing it is an error",
        "os.chdir(sys.argv.pop(1))",
        "sys.argv = sys.argv[1:]",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
        "sys.path.insert(0, '')",
        "print('readme')",
        (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0],
    ]
    done = run_forked("\n".join(lines), tmp_path / "out", tmp_path / "out" / "score.py", logs / "new.parquet")
    assert done.returncode == 0, done.stderr
    printed, _, of_readme = done.stdout.partition("readme\n")
    assert re.match(r"tensor\(\[0\.\d+\]\)\n\{'user': EmbeddingBag\(", of_readme)
    scores = [float(line) for line in printed.split()]
    np.testing.assert_allclose(scores, run.predict(str(logs / "new.parquet")), rtol=0, atol=TOLERANCE)


@pytest.mark.slow_but("fp16-False", "split_bf16-True")
@native
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "split_bf16"])
def test_the_tables_are_those_of_the_checkpoint(
    long_tailed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, *, tiers: bool
) -> None:
    """To the bit, in pieces of a few rows: float16 as it is; of split weights the upper halves, as lookups see them."""
    memory = {"dram": DRAM, "ssd": str(tmp_path), "force": True} if tiers else {}
    run = train(long_tailed, tmp_path / "run", f"train.precision={precision}", **memory)
    monkeypatch.setattr("hotrow.export.export.PIECE_BYTES", 1000)
    run.export(tmp_path / "out")
    described = json.loads((tmp_path / "out" / "export.json").read_text())
    stored = expanded(run.checkpoint)
    for table in described["tables"]:
        (name,), (found,) = zip(*load_file(tmp_path / "out" / table["file"]).items(), strict=True)
        assert (name, found.dtype, found.shape) == (table["tensor"], torch.float32, (table["num_embeddings"], 6))
        raw = bytearray(stored[f"embedding/{table['name']}.safetensors:weight"])
        truth = torch.frombuffer(raw, dtype=torch.float16 if precision == "fp16" else torch.float32).float()
        if precision == "split_bf16":
            truth = (truth.view(torch.int32) & -65536).view(torch.float32)
        assert torch.equal(found.view(torch.int32).reshape(-1), truth.view(torch.int32))
    dense = load_file(tmp_path / "out" / "model.safetensors")
    truth_of_dense = load_file(run.checkpoint / "model.safetensors")
    assert dense.keys() == truth_of_dense.keys()
    assert all(torch.equal(dense[name], truth_of_dense[name]) for name in dense)


MEMORY_CHECK = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from hotrow.run.checkpoint_files import read_manifest
from hotrow.run.checkpoint_files import write_tensors
from hotrow.export.export import LookedUpRows
from hotrow.tables import TableConfig
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
def export(checkpoint, num_embeddings):
    table = TableConfig(name="t", num_embeddings=num_embeddings, embedding_dim=16, feature_names=("f",))
    pieces = LookedUpRows(folder / checkpoint, read_manifest(folder / checkpoint), table, done=lambda n: None)
    write_tensors(folder / "out", {"t.weight": pieces})
def peak():  # not ru_maxrss, which begins at what the parent had when it forked
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
export("small", 1000)
Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
before = peak()
for checkpoint in ("whole", "chain"):
    export(checkpoint, rows)
print(peak() - before)
"""


@native
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are measured as Linux does")
def test_memory_does_not_grow_with_a_table(tmp_path: Path) -> None:
    """Tables of 96 MiB, whole and as a chain of which most rows were never written to, in pieces of 4 MiB."""
    rows = 3 << 19
    for name, num_rows, memory in (
        ("small", 1000, None),
        ("whole", rows, None),
        ("chain", rows, hotrow.Memory(dram="40MiB", ssd=str(tmp_path), force=True)),
    ):
        table = hotrow.TableConfig(name="t", num_embeddings=num_rows, embedding_dim=16, feature_names=("f",))
        emb = hotrow.EmbeddingCollection([table], memory=memory, seed=0)
        hotrow.save_checkpoint(tmp_path / name, {"embedding": emb})
        del emb
    done = run_forked(MEMORY_CHECK, tmp_path, rows)
    assert done.returncode == 0, done.stderr
    # 57 or 69 MiB, mapped pages of the files among them, by which of them the system maps at once.
    assert int(done.stdout) < 80 << 20, f"{int(done.stdout) / 2**20:.0f} MiB for a table of 96"


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    return train(data, tmp_path_factory.mktemp("whole") / "run")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_export_leaves_nothing(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hotrow.export.export.write_info", stop)
        run.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # as a kill would leave it
        patch.setattr("hotrow.export.export.write_info", stop)
        patch.setattr("hotrow.export.export.shutil.rmtree", lambda *_, **__: None)
        run.export(tmp_path / "out")
    left = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists() and not (left / "export.json").exists()
    run.export(tmp_path / "out")
    run.export(tmp_path / "again")
    assert not left.exists()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_a_full_disk_is_said(run: hotrow.Run, tmp_path: Path, fill_disk: Callable[[int], Any]) -> None:
    run.export(tmp_path / "whole")
    total = sum(len(content) for content in files_of(tmp_path / "whole").values())
    said = r"disk full while exporting .* Nothing of the export is kept"
    for room in (0, total // 3, total - 100):
        with fill_disk(room), pytest.raises(OSError, match=said):
            run.export(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_too_little_room_is_said_before(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.base.files.disk_free_bytes", lambda path: 100)
    with pytest.raises(ValueError, match=r"needs 1 MiB more than the disk has free"):
        run.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@looped("change", ["cut", "alter", "remove"])
def test_damage_is_found(run: hotrow.Run, tmp_path: Path, change: str) -> None:
    described = run.export(tmp_path / "out")
    assert tools.check(tmp_path / "out")["ok"]
    assert sorted(described["files"]) == sorted(files_of(tmp_path / "out").keys() - {"export.json"})
    for name in described["files"]:
        path = tmp_path / "out" / name
        raw = path.read_bytes()
        path.unlink()
        if change != "remove":
            path.write_bytes(raw[:-1] if change == "cut" else raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{path.name} is missing, cut off or altered"):
            tools.check(tmp_path / "out")
        path.write_bytes(raw)


def test_a_damaged_checkpoint_is_refused(data: Path, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", "train.max_steps=3")
    path = run.checkpoint / "embedding" / "item" / "000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"item/000.safetensors has crc32 .* it is damaged"):
        run.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(run: hotrow.Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "diary.txt").write_text("mine")
    for out, said in (
        ("there", "exists already; remove it or choose another name"),
        ("file", "exists already"),
        ("file/out", "cannot be made: not a directory"),
        ("absent/out", "there is no folder .*absent; make it"),
        ("other", "holds other files"),
    ):
        with pytest.raises(ValueError, match=said):
            run.export(tmp_path / out)
    assert (tmp_path / "other.partial" / "diary.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"has no checkpoint of step 7; it keeps [\d, ]+$"):
        run.export(tmp_path / "out", step=7)


def test_a_folder_that_cannot_be_written(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.mkdir

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.endswith(".partial"):
            raise OSError(30, "Read-only file system", str(path))
        plain(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)  # as root no permission refuses
    with pytest.raises(ValueError, match="cannot be made: read-only file system; choose another place"):
        run.export(tmp_path / "out")


def test_a_run_without_a_checkpoint(data: Path, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", "train.max_steps=3")
    for folder in run.folder.checkpoints.iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="has no checkpoint yet; let it train, or resume it"):
        run.export(tmp_path / "out")


def test_a_step_is_chosen_as_predict_chooses(data: Path, tmp_path: Path) -> None:
    run = train(data, tmp_path / "run", "checkpoint.keep_last=3")
    steps = [int(path.name[5:]) for path in run.folder.checkpoints.iterdir()]
    assert len(steps) > 1
    assert f"step-{run.export(tmp_path / 'out')['step']}" == run.checkpoint.name
    for step in steps:
        made = run.export(tmp_path / f"out-{step}", step=step)
        found = load_file(tmp_path / f"out-{step}" / "model.safetensors")
        truth = load_file(run.folder.checkpoints / f"step-{step}" / "model.safetensors")
        assert made["step"] == step and all(torch.equal(found[name], truth[name]) for name in truth)


def test_data_that_never_was_raw_takes_row_numbers(make_dataset: Callable[..., Any], tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    run = train(dataset.path, tmp_path / "run")
    made = run.export(tmp_path / "out")
    assert all(table["vocabulary"] is None for table in made["tables"])
    block = dataset.split("test").block(0)
    ids: dict[str, Any] = dict(zip(dataset.info.feature_names, block.ids, strict=True))
    values, splits = ids.pop("bag")
    columns: Columns = {name: np.asarray(rows).tolist() for name, rows in ids.items()}
    columns["bag"] = [values[a:b].tolist() for a, b in pairwise(splits)]
    columns |= {f"d{i}": column.tolist() for i, column in enumerate(block.dense)}
    scores = scorer_of(tmp_path / "out").score(columns).numpy()
    assert len(scores) == len(block.label) and np.isfinite(scores).all()
    assert (scores[block.label == 1].mean()) > (scores[block.label == 0].mean())


def test_what_is_no_row_number_is_named(make_dataset: Callable[..., Any], tmp_path: Path) -> None:
    train(make_dataset(tmp_path / "data").path, tmp_path / "run").export(tmp_path / "out")
    scorer = scorer_of(tmp_path / "out")
    name = next(feature["name"] for feature in scorer.about["features"] if feature["kind"] == "one_hot")
    columns = {each: [["1"], ["2"]] if each == "bag" else [1, 2] for each in scorer.columns}
    assert len(scorer.score(columns)) == 2
    for value in ("guest", None, -1, 1.5, 10**9, math.nan):
        with pytest.raises(ValueError, match=rf"column '{name}', row 1: .* pass an integer from 0 to \d+"):
            scorer.score(columns | {name: [1, value]})


def test_a_column_that_is_missing_or_too_short_is_named(run: hotrow.Run, logs: Path, tmp_path: Path) -> None:
    run.export(tmp_path / "out")
    scorer, columns = scorer_of(tmp_path / "out"), read_csv(logs / "new.csv")
    for name in scorer.columns:
        with pytest.raises(ValueError, match=f"column '{name}' is missing"):
            scorer.score({each: values for each, values in columns.items() if each != name})
    name = scorer.columns[-1]
    with pytest.raises(ValueError, match=f"column '{name}' has 7 rows, '{scorer.columns[0]}' has 300"):
        scorer.score(columns | {name: columns[name][:7]})


HOSTILE: list[Any] = [
    *(None, "guest", "12.0", " 12", "012", "+12", "-0", "1e1", "1e400", "1e99999999", "nan", "inf", "", " ", "0x1f"),
    *("1_2", "9" * 400, "18446744073709551615", "9223372036854775808", "\uff11", "a|b", "||", "12|x", "[1]", "1.5"),
    *(".5", "5."),
]
WILD: list[Any] = [12, 12.0, 12.5, -1, 2**63, 2**64 - 1, 2**80, math.nan, math.inf, -math.inf, 1e300, [], [12], [1, 2]]


def hostile(values: list[Any]) -> Columns:
    names = ("price", "age", "x", "user", "item", "big", "seen", "tags")
    good = clicks(1, 5)
    rows = [{name: good[name][0] for name in names} for _ in range(len(values) * len(names))]
    for i, row in enumerate(rows):
        name, value = names[i % len(names)], values[i // len(names)]
        row[name] = [12] if value == [1, 2] and name in ("seen", "tags") else value  # no frame mixes lists and text
    return {name: [row[name] for row in rows] for name in names}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("values", [HOSTILE, WILD], ids=["text", "wild"])
def test_any_value_gets_the_score_of_predict(logs: Path, tmp_path: Path, suffix: str, values: list[Any]) -> None:
    """One hostile value a row, in each column; ids of 64 bits with and without a sign, text, lists, numbers."""
    run = train(prepared(logs, tmp_path / "packed", suffix=suffix), tmp_path / "run")
    run.export(tmp_path / "out")
    scorer, columns = scorer_of(tmp_path / "out"), hostile(values)
    expected = run.predict(columns)
    found = scorer.score(columns).numpy()
    assert len(found) == len(expected) == 8 * len(values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert run.seen is not None
    for name, counts in run.seen.columns.items():
        assert scorer.seen.columns[name] == counts, name
    assert scorer.seen.warnings() == run.seen.warnings()


def test_an_export_names_rows_that_do_not_fit(run: hotrow.Run, logs: Path, tmp_path: Path) -> None:
    run.export(tmp_path / "out")
    scorer, columns = scorer_of(tmp_path / "out"), read_csv(logs / "new.csv")
    columns |= {"user": [None if user is None else user.upper() for user in columns["user"]]}
    with pytest.warns(UserWarning, match=r"never saw: user \d"):
        scorer.score(columns)
    assert scorer.seen.to_json()["user"]["stands_out"] == ["unknown"]
    assert scorer.seen.to_json()["user"]["usual"] == run.record.columns["val"]["user"]

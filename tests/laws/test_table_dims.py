"""Laws 2 and 3 for tables of different widths: 16, 8 and 1 columns train, move to disk, resume, predict and export."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from test_export import scorer_of
from test_resume import outcome, signal_at

import hotrow
from hotrow.config.load import apply_overrides, make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.kernels import ops
from hotrow.run import runs
from hotrow.setup import setup
from hotrow.setup.demand import required_bytes

native = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")
DIMS = {"default": 16, "user": 8, "hour": 1}
BASE: dict[str, Any] = {
    "model": {"name": "dcn", "embedding_dim": DIMS, "embedding_init": 0.1, "num_cross_layers": 2, "deep_mlp": [9, 5]},
    "optimizer": {"dense": {"name": "adagrad", "lr": 0.05}, "sparse": {"name": "row_wise_adagrad", "lr": 0.2}},
    "train": {"batch_size": 32, "max_steps": 50, "eval_every": 20, "log_every": 5, "seed": 3, "threads": 1},
    "checkpoint": {"every": 9},
}
SCHEMA = {
    "label": "click",
    "dense": [{"column": "price"}],
    "categorical": [
        {"column": "user", "type": "int"},
        {"column": "item", "type": "int"},
        {"column": "hour", "type": "int"},
        {"column": "seen", "kind": "multi_hot", "type": "int", "table": "item"},
    ],
    "split": {"kind": "random"},
}


def clicks(num_rows: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    item = rng.zipf(1.2, num_rows) % 1500
    seen = [rng.integers(0, 1500, n).tolist() for n in rng.integers(0, 4, num_rows)]
    return pa.table(
        {
            "click": (rng.random(num_rows) < np.where(item % 3 == 0, 0.8, 0.2)).astype(np.int64),
            "price": rng.normal(0, 1, num_rows).astype(np.float32),
            "user": rng.integers(0, 1200, num_rows),
            "item": item,
            "hour": rng.integers(0, 24, num_rows),
            "seen": pa.array(seen, pa.list_(pa.int64())),
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dims")
    return run_prepare("frame", clicks(3000, 0), folder / "packed", schema=parse_schema(SCHEMA, where="test")).path


def config(data: Path, run: Path, *changes: str, **memory: Any) -> Any:
    raw = {**BASE, "data": str(data), "run": str(run), **({"memory": memory} if memory else {})}
    return make_config(apply_overrides(raw, changes))


def tiers(data: Path, folder: Path) -> dict[str, Any]:
    """Memory for a good third of tables and states."""
    plain = config(data, folder / "x")
    needed = required_bytes(plain, setup.tables_of(plain, PackedDataset.open(data)))
    return {"dram": needed * 2 // 5, "ssd": str(folder), "force": True}


def test_tables_have_the_columns_that_the_config_says(data: Path, tmp_path: Path) -> None:
    tables = setup.tables_of(config(data, tmp_path), PackedDataset.open(data))
    assert {table.name: table.embedding_dim for table in tables} == {"user": 8, "item": 16, "hour": 1}


@pytest.mark.slow_but("fp32-adam")
@native
@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "split_bf16"])
def test_placement_changes_no_bit(data: Path, tmp_path: Path, optimizer: str, precision: str) -> None:
    changes = [f"optimizer.sparse.name={optimizer}", "optimizer.sparse.lr=0.02", f"train.precision={precision}"]
    plain = runs.train(config(data, tmp_path / "plain", *changes), quiet=True)
    tiered = runs.train(config(data, tmp_path / "tiers", *changes, **tiers(data, tmp_path)), quiet=True)
    assert tiered.record.memory["tables"]["user"]["written_rows"] > 20, "the run did not exercise the store"
    assert outcome(tiered) == outcome(plain)


@pytest.mark.slow_but("True")
@native
@pytest.mark.parametrize("tiered", [False, True])
def test_resume_changes_no_bit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiered: bool) -> None:
    memory = tiers(data, tmp_path) if tiered else {}
    whole = runs.train(config(data, tmp_path / "whole", **memory), quiet=True)
    with monkeypatch.context() as patch:
        signal_at(patch, 23, signal.SIGTERM)
        cut = runs.train(config(data, tmp_path / "cut", **memory), quiet=True)
    assert cut.record.status == "interrupted"
    assert outcome(runs.resume(cut.path, quiet=True)) == outcome(whole)


@native
def test_an_export_scores_as_predict_does(data: Path, tmp_path: Path) -> None:
    run = hotrow.load(runs.train(config(data, tmp_path / "run", **tiers(data, tmp_path)), quiet=True).path)
    new = clicks(400, 1)
    expected = run.predict(new)
    described = run.export(tmp_path / "out")
    run.close()
    assert expected.std() > 0.02
    dims = {table["name"]: table["embedding_dim"] for table in described["tables"]}
    assert dims == {"user": 8, "item": 16, "hour": 1}
    found = scorer_of(tmp_path / "out").score(new.to_pydict()).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            {"default": 16, "usr": 8},
            r"model\.embedding_dim names table 'usr', .* has no such table; did you mean 'user'",
        ),
        ({"default": 16, "zzz": 8}, r"names table 'zzz', but .*; its tables are user, item, hour"),
        ({"user": 8, "hour": 1}, r"embedding_dim has no number for table 'item' of .*; add it, or `default: 16`"),
    ],
)
def test_names_of_tables_are_checked_before_there_is_a_run(
    data: Path, tmp_path: Path, dims: dict[str, int], message: str
) -> None:
    raw = {**BASE, "data": str(data), "run": str(tmp_path / "run")}
    raw["model"] = {**BASE["model"], "embedding_dim": dims}
    with pytest.raises(ValueError, match=message):
        runs.train(make_config(raw), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_table_named_default_has_the_width_of_all_that_are_not_named() -> None:
    tables = [SimpleNamespace(name=name) for name in ("default", "item", "user")]
    dataset = cast(Any, SimpleNamespace(info=SimpleNamespace(tables=tables), path="d"))
    dims = make_config({"data": "d", "model": {"name": "dcn", "embedding_dim": {"default": 16, "user": 8}}}).model
    assert dims.dims_of(dataset) == {"default": 16, "item": 16, "user": 8}


def test_dlrm_needs_tables_of_one_width(data: Path, tmp_path: Path) -> None:
    model = {"name": "dlrm", "embedding_dim": DIMS}
    said = r"model\.embedding_dim gives .* \(user 8, item 16, hour 1\), but dlrm multiplies .* one number"
    with pytest.raises(ValueError, match=said):
        runs.train(make_config({**BASE, "data": str(data), "run": str(tmp_path / "run"), "model": model}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_one_width_may_be_said_by_table(data: Path, tmp_path: Path) -> None:
    """The same bits as one number for all."""
    found = []
    for name, dims in (("number", 6), ("mapping", {"default": 3, "user": 6, "item": 6, "hour": 6})):
        model = {"name": "dlrm", "embedding_dim": dims, "bottom_mlp": [8], "top_mlp": [8]}
        raw = {**BASE, "data": str(data), "run": str(tmp_path / name), "model": model}
        found.append(outcome(runs.train(make_config(raw), quiet=True)))
    assert found[0] == found[1]

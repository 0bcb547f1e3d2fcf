"""Laws 2 and 3 for TBSM, whose rows are looked up as sequences: placement and interruptions change no bit of a run."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import test_resume
from test_resume import outcome, signal_at

import hotrow
from benchmarks import histories
from hot_rig import copies_in_dram
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import load_schema
from hotrow.kernels import ops
from hotrow.placement.tiers import Tiers
from hotrow.run import runs
from hotrow.setup import memory as placement
from hotrow.setup import memory as room
from hotrow.setup import setup

native = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")
BASE: dict[str, Any] = {
    "model": {
        "name": "tbsm",
        "embedding_dim": 8,
        "bottom_mlp": [],
        "top_mlp": [12, 9],
        "history_steps": 6,
        "attention_mlp": [7],
        "final_mlp": [10],
    },
    "train": {"batch_size": 37, "max_steps": 45, "eval_every": 20, "log_every": 4, "seed": 5, "threads": 1},
}
VARIANTS = {
    "sgd": ["optimizer.dense.name=sgd", "optimizer.sparse.name=sgd"],
    "row-wise adagrad": ["optimizer.dense.name=adam", "optimizer.sparse.name=row_wise_adagrad"],
    "adam": ["optimizer.dense.name=adagrad", "optimizer.sparse.name=adam"],
    "float16 tables": ["train.precision=fp16"],
    "split weights": ["train.precision=split_bf16", "optimizer.sparse.name=sgd"],
    "split weights, bfloat16 layers": [
        "train.precision=split_bf16",
        "train.dense_dtype=bf16",
        "optimizer.dense.name=sgd",
        "optimizer.sparse.name=row_wise_adagrad",
    ],
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((variant, {}) for variant in VARIANTS),
    ("adam", {"lookahead": 0}),
    ("split weights", {"lookahead": 1}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("tbsm") / "data", num_events=2600)


def prepared(path: Path, *, num_events: int) -> Path:
    """Users who keep to few categories, of a thousand items each of which comes seldom."""
    rng = np.random.default_rng(1)
    user, item = rng.integers(0, 300, num_events), rng.integers(0, 200, num_events)
    item = item * 7 + user % 7
    events = pl.DataFrame({"user": user, "item": item, "category": item % 7, "time": np.arange(num_events)})
    return histories.prepare(events, path, length=6).path


config = functools.partial(test_resume.config, base=BASE)
tiers = functools.partial(test_resume.tiers, base=BASE)


@pytest.fixture(scope="module")
def truth(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the run of a variant in DRAM has, which is trained once."""
    return functools.cache(
        lambda variant: outcome(runs.train(config(data, tmp_path_factory.mktemp("plain") / "run", VARIANTS[variant])))
    )


@pytest.mark.slow_but("sgd-{}", "adam-{'lookahead': 0}", "split weights, bfloat16 layers-{}")
@native
@pytest.mark.parametrize(("variant", "memory"), CASES, ids=str)
def test_a_run_in_tiers_is_the_run_in_dram(
    data: Path, truth: Callable[[str], dict[str, Any]], tmp_path: Path, variant: str, memory: dict[str, Any]
) -> None:
    changes, expected = VARIANTS[variant], truth(variant)
    run = runs.train(config(data, tmp_path / "tiers", changes, tiers(data, changes, **memory)))
    tables = run.record.memory["tables"]
    assert tables["item"]["read_rows"] > 20, "the run did not exercise the store"
    assert tables["item"]["written_rows"] > 20
    assert outcome(run) == expected
    assert not (run.path / "memory").exists()


@pytest.mark.slow_but("adam-80000")
@pytest.mark.parametrize(("variant", "budget"), [("adam", 80000), ("split weights", 26000)])
def test_copies_of_hot_rows_change_nothing(data: Path, tmp_path: Path, variant: str, budget: int) -> None:
    """A sample is hot where the rows of all its steps are."""
    hot = ["hot.schedule=fae", "hot.small_table=0", f"hot.budget={budget}", "hot.rate=25", *VARIANTS[variant]]
    plain = runs.train(config(data, tmp_path / "plain", hot))
    with copies_in_dram() as steps:
        copied = runs.train(config(data, tmp_path / "copied", hot))
    assert len(steps) > 5 and copied.record.steps - len(steps) > 5
    found, wanted = outcome(copied), outcome(plain)
    for each in (found, wanted):
        each["state"]["turns"] = each["state"]["turns"]["order"]
    assert found == wanted


@native
def test_stopped_and_resumed_elsewhere(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = VARIANTS["adam"]
    expected = outcome(runs.train(config(data, tmp_path / "whole", changes)))
    here = tiers(data, changes)
    for stop, (before, after) in {6: (here, "dram"), 31: ("dram", here)}.items():
        with monkeypatch.context() as patch:
            signal_at(patch, stop, signal.SIGTERM)
            run = runs.train(config(data, tmp_path / str(stop), changes, before))
        assert (run.record.status, run.record.steps) == ("interrupted", stop)
        assert outcome(runs.resume(run.path, [f"memory={after}"])) == expected


@native
def test_scoring_what_does_not_fit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to predict bring their histories as lists; in tiers they get the same scores."""
    changes = VARIANTS["sgd"]
    run = runs.train(config(data, tmp_path / "run", changes))
    rows = {"user": [3, 4, 999], "item": [10, 4, 5], "category": [3, 4, 5]}
    lists = {"item_history": [[10, 17], [], [10**9, 5]], "category_history": [[3, 3], [], [1, 5]]}
    new = pa.table({**rows, **{name: pa.array(values, pa.list_(pa.int64())) for name, values in lists.items()}})
    loaded = hotrow.load(run.path)
    scores, expected = loaded.predict(new), loaded.evaluate("test")
    long = pa.table({**rows, **{name: pa.array([[1], [1], [1] * 7], pa.list_(pa.int64())) for name in lists}})
    with pytest.raises(ValueError, match=r"row 5 of the data, from 0: feature 'item_history' has 7 ids, but"):
        loaded.predict(pa.concat_tables([new, long]))
    assert np.isfinite(scores).all()
    assert len(set(scores.tolist())) == 3
    needed = placement.required_bytes(
        config(data, run.path, changes), setup.tables_of(config(data, run.path, []), PackedDataset.open(data))
    )
    monkeypatch.setattr(room, "available_memory_bytes", lambda: needed)
    monkeypatch.setattr(setup, "beside_bytes", lambda *_, **__: 0)
    again = hotrow.load(run.path)
    assert again.evaluate("test") == expected
    assert again._network[0].placement.find(Tiers) is not None
    np.testing.assert_array_equal(again.predict(new), scores)
    again.close()


def test_fit(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "tbsm", "quiet": True, "max_steps": 5, "top_mlp": [9, 9]}
    run = hotrow.fit(data, run=tmp_path / "run", history_steps=6, **options)
    assert run.record.steps == 5


def test_a_history_that_is_too_long_is_told_before_there_is_a_run(data: Path, tmp_path: Path) -> None:
    said = r"feature 'item_history', sample [\d,]+ of train in .*: 6 ids, but model\.history_steps is 5; raise it"
    with pytest.raises(ValueError, match=said):
        runs.train(config(data, tmp_path / "run", ["model.history_steps=5"]))
    assert not (tmp_path / "run").exists()


def test_histories_of_different_lengths_are_told_before_there_is_a_run(tmp_path: Path) -> None:
    """Two lists of one sample are its steps."""
    columns: dict[str, Any] = {name: np.arange(100) % 9 for name in ("user", "item", "category")}
    lists = [[3, 4]] * 60 + [[3, 4, 5]] + [[3]] * 39
    columns |= {"item_history": pa.array(lists), "category_history": pa.array([[1, 2]] * 61 + lists[61:])}
    table = pa.table({**columns, "came": np.arange(100) % 2, "time": np.arange(100)})
    data = run_prepare("frame", table, tmp_path / "data", schema=load_schema(histories.SCHEMA)).path
    said = r"'category_history', sample 60 of train in .*: 2 ids, but 'item_history' has another number; steps"
    with pytest.raises(ValueError, match=said):
        runs.train(config(data, tmp_path / "run", []))
    assert not (tmp_path / "run").exists()

"""The study hot: its cells, what they say against counting by hand and against runs, and its page."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import hot_study, hot_swaps
from benchmarks.hot_cells import HotCell, coverage, sizes_of
from benchmarks.hot_lab import Link, by_threshold
from hotrow.config.load import make_config, parse_yaml
from hotrow.data.packed.format import DatasetInfo, Feature, Table
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.hot.calibrate import calibrate
from hotrow.hot.hot_set import hot_samples
from packed_data import planted

pytestmark = pytest.mark.package

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CELL: dict[str, Any] = {"group": "g", "kind": "coverage", "source": "x", "rows": "exact", "amount": 0.5}
dataset = planted(opened=True, counts=True, rows={"train": 900, "val": 99, "test": 99})


def test_hot_samples_of_a_threshold_by_hand(dataset: PackedDataset) -> None:
    record_bytes = {"t0": 8, "t1": 12, "t2": 20}
    found = by_threshold(dataset, 2.0, record_bytes=record_bytes, small_table_bytes=0)
    for table in dataset.info.tables:
        counts = dataset.counts(table.name)
        wanted = 1 + sum(int(n) >= 0.02 * counts.sum() for n in counts[1:])
        assert found.rows[table.name].num_rows == wanted
    assert 3 < found.num_rows < 250
    whole = by_threshold(dataset, 1.0, record_bytes=record_bytes)
    assert whole.num_rows == 270
    with pytest.raises(ValueError, match="percent is 101; a threshold is from 0 to 100"):
        by_threshold(dataset, 101, record_bytes=record_bytes)


def test_bytes_over_the_link_are_those_of_the_batches(dataset: PackedDataset) -> None:
    """The formula of a coverage cell against an epoch's hot and cold batches, counted one by one."""
    cell = HotCell(**{**CELL, "small_table": "0", "embedding_dim": 8})
    row = coverage(cell, dataset)
    sizes = {"record_bytes": sizes_of(cell, dataset)[0], "small_table_bytes": 0}
    is_hot = hot_samples(dataset, calibrate(dataset, cell.rows, row["budget_bytes"], **sizes).hot)
    assert row["hot_samples"] == is_hot.mean()
    link, num_batches = Link(), 0
    for hot, only in ((False, ~is_hot), (True, is_hot)):
        for batch in Loader(dataset.split("train"), 64, shuffle_seed=None, only=only).epoch(0):
            link.count(batch, row_bytes=4 * 8 * 4 * len(batch), hot=hot)
            num_batches += hot
    assert link.hybrid_bytes == row["hybrid_bytes"] and row["sync_bytes"] == 4 * row["hot_bytes"]
    offsets = num_batches * 8 + int(is_hot.sum()) * 4 * 8  # of bags, which the cell leaves out
    assert row["link_bytes"] == pytest.approx(link.batch_bytes + row["sync_bytes"] - offsets, rel=0.01)


def test_the_model_is_that_which_fae_trains_on_such_data(dataset: PackedDataset, tmp_path: Path) -> None:
    """A TBSM as the recipe has it on histories, else a DLRM; the quality cell trains it by both orders."""
    assert hot_study.model_of(HotCell(**CELL), dataset) == hot_study.dense_of(dataset) == {}
    features = (Feature("item", "item"), Feature("item_history", "item", "sequence"))
    info = DatasetInfo(name="histories", dense=(), features=features, tables=(Table("item", 60),))
    rng = np.random.default_rng(3)
    with PackedWriter(tmp_path / "data", info, rows_per_block=128) as writer:
        for split, num_rows in (("train", 600), ("val", 200), ("test", 200)):
            item, splits = rng.integers(0, 60, num_rows), np.concatenate([[0], rng.integers(0, 4, num_rows).cumsum()])
            ids = {"item": item, "item_history": (rng.integers(0, 60, splits[-1]), splits)}
            writer.append(split, (item < 20).astype(np.float32), np.zeros((num_rows, 0), np.float32), ids)
        made = writer.close()
    fields = {**CELL, "kind": "quality", "amount": 0.5, "small_table": "0", "embedding_dim": 4, "batch_size": 32}
    cell = HotCell(**{**fields, "seeds": 2, "schedule": "fixed"})
    config = hot_study.config_of(cell, made, 2000, "fixed", 1)
    recipe = make_config(parse_yaml((RECIPES / "taobao-tbsm.yaml").read_text(), origin="the recipe"))
    assert config.model.model_copy(update={"embedding_dim": 16, "history_steps": 20}) == recipe.model
    assert config.optimizer.dense == recipe.optimizer.dense
    assert config.optimizer.sparse.lr == recipe.optimizer.sparse.lr
    with pytest.warns(UserWarning, match="its training split is counted"):
        row = hot_study.quality(cell, made, tmp_path)
    assert 0 < row["hot_samples"] < 1 and row["num_swaps"] >= 2
    assert row["auc_difference"] == pytest.approx(row["auc_fae"] - row["auc_baseline"])


def test_differences_are_paired_by_seed() -> None:
    found = hot_study.paired("auc", {"baseline": [0.70, 0.80, 0.75], "fae": [0.71, 0.81, 0.77]})
    differences = np.array([0.01, 0.01, 0.02])
    assert found["auc_difference"] == pytest.approx(differences.mean())
    assert found["auc_difference_se"] == pytest.approx(differences.std(ddof=1) / np.sqrt(3))
    assert found["auc_baseline_sd"] == pytest.approx(0.05)


@pytest.mark.filterwarnings("ignore:.* carries no counts")
def test_swaps_are_counted_without_counts_of_rows(
    tmp_path: Path,
    make_dataset: Callable[..., PackedDataset],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows are counted then."""
    monkeypatch.setattr(hot_swaps, "LONG", ())
    rows = {"train": 4096, "val": 9, "test": 9}
    path = make_dataset(tmp_path / "data", table_rows=(2000, 2000), bag=False, rows=rows).path
    monkeypatch.setattr(sys, "argv", ["hot_swaps", str(path), "--batch-size", "64"])
    hot_swaps.main()
    said = capsys.readouterr().out
    assert all(f"rate {rate} %, {name} phases of " in said for rate in hot_swaps.RATES for name in ("cold", "hot"))

"""DIN on real rows by its recipe, and what a user meets whose data has no histories."""

import csv
import gzip
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from benchmarks.histories import prepare
from hotrow.config.load import load_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.export.score import load_module
from hotrow.run import runs

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "taobao-din.yaml"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(real_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Every event of a user but the first is a target; two hours leave few of a user."""
    return prepare(real_data("taobao_userbehavior_110k.csv.gz"), tmp_path_factory.mktemp("din") / "data")


def test_the_recipe_learns_from_histories(
    data: PackedDataset, real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """An export scores what the run scores, and a history that changes another score."""
    changes = [f"data={data.path}", f"run={tmp_path / 'run'}", "train.threads=1", "train.eval_every=null"]
    run = hotrow.load(runs.train(load_config(RECIPE, changes), quiet=True).path)
    auc = run.metrics["auc"]
    print(f"test AUC {auc:.4f}")
    assert auc > 0.65
    with gzip.open(real_data("taobao_userbehavior_110k.csv.gz"), "rt") as lines:
        user, item, category = ([*map(int, own)] for own in list(zip(*csv.reader(islice(lines, 60)), strict=True))[:3])
    new = {"user": user[:40], "item": item[:40], "category": category[:40]}
    histories = {
        f"{name}_history": [own[k : k + k % 5] for k in range(40)]
        for name, own in (("item", item), ("category", category))
    }
    lists = {name: pa.array(own, pa.list_(pa.int64())) for name, own in histories.items()}
    scores = run.predict(pa.table(new | lists))
    run.export(tmp_path / "out")
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    np.testing.assert_allclose(scorer.score(new | histories).numpy(), scores, rtol=0, atol=1e-5)
    without = {name: pa.array([[]] * 40, pa.list_(pa.int64())) for name in histories}
    changed = run.predict(pa.table(new | without)) != scores
    assert changed[[k % 5 > 0 for k in range(40)]].mean() > 0.9 and not changed[::5].any()
    run.close()


def test_data_without_histories_is_refused_before_there_is_a_run(
    make_dataset: Callable[..., Any], tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "data")
    changes = ["model.name=din", f"data={dataset.path}", f"run={tmp_path / 'run'}"]
    (tmp_path / "recipe.yaml").write_text(f"data: {dataset.path}\n")
    with pytest.raises(ValueError, match=r"din needs a history.*'item_history'.*x0, x1, x2, bag"):
        runs.train(load_config(tmp_path / "recipe.yaml", changes), quiet=True)
    assert not (tmp_path / "run").exists()

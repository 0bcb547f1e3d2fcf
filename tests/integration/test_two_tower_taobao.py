"""The recipe for two towers on real histories: it finds more of what came next than ItemCF does."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from benchmarks.histories import prepare
from benchmarks.retrieval import KS, RECIPE, baselines, recalls
from hotrow.config.load import load_config
from hotrow.run import runs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_recipe_finds_more_than_items_of_the_same_users(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    assert len(RECIPE.read_text().splitlines()) <= 30
    dataset = prepare(real_data("taobao_userbehavior_110k.csv.gz"), tmp_path / "data")
    rivals = baselines(dataset, "test")
    changes = ["train.threads=1", "train.epochs=1", "train.eval_every=null", "train.early_stopping=null"]
    config = load_config(RECIPE, [f"data={dataset.path}", f"run={tmp_path / 'run'}", *changes])
    metrics = (runs.train(config, quiet=True).record.metrics or {})["test"]
    print({name: metrics[name] for name in ("recall_20", "recall_100", "unseen", "num_positives")}, rivals)
    assert metrics["recall_100"] >= rivals["itemcf"]["recall_100"] >= rivals["popular"]["recall_100"] > 0
    assert metrics["recall_100"] > 3 * 100 / np.count_nonzero(dataset.counts("item")[1:]), "than by chance"


def test_recall_of_rivals_against_sorting() -> None:
    """Items with a score first, the higher the better; equal scores, and the other items, by popularity."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (60, 300)) * (rng.random((60, 300)) < 0.4)
    order, item = rng.permutation(np.arange(1, 280)), rng.integers(0, 300, 60)
    popularity = {number: -place for place, number in enumerate(order.tolist())}
    found = dict.fromkeys(KS, 0)
    for own, target in zip(scores, item.tolist(), strict=True):
        best = sorted(popularity, key=lambda number: (own[number], popularity[number]), reverse=True)
        for most in KS:
            found[most] += target in best[:most]
    mine = recalls(scipy.sparse.csr_matrix(scores.astype(np.float32)), item, order)
    assert mine == {f"recall_{most}": number / 60 for most, number in found.items()}
    assert 0 < mine["recall_20"] < mine["recall_100"] < 1

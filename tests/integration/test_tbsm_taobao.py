"""TBSM on real rows: two hours of Taobao prepared, trained, and held against plain torch on the same samples.

The truth is tests/plain_tbsm.py under torch's own optimizers: other code, other draws, the same task.
"""

import csv
import gzip
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from benchmarks.histories import prepare
from hotrow.config.load import load_config, make_config
from hotrow.config.schema import Config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.export.inputs import load_module
from hotrow.run import runs, trainer
from hotrow.setup.setup import Setup
from plain_tbsm import PlainTBSM

FEATURES = (("user", None), ("item", "item_history"), ("category", "category_history"))
DIM, STEPS, BATCH_SIZE = 8, 6, 128
LONG = 20
"""Steps of the published model's histories."""
DENSE_LR, SPARSE_LR = 0.002, 0.1

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL: dict[str, Any] = {"bottom_mlp": [], "top_mlp": [15, 15], "attention_mlp": [15, 15], "final_mlp": [60]}


@pytest.fixture(scope="module")
def dataset(real_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Every event of a user but the first is a target; two hours leave few of a user."""
    out = tmp_path_factory.mktemp("taobao") / "data"
    return prepare(real_data("taobao_userbehavior_110k.csv.gz"), out, length=STEPS)


def config(
    dataset: PackedDataset,
    folder: Path,
    *,
    seed: int,
    max_steps: int | None,
    history_steps: int = STEPS,
    hot: dict[str, Any] | None = None,
) -> Config:
    """One epoch, or part of one."""
    return make_config(
        {
            "data": str(dataset.path),
            "run": str(folder),
            "model": {"name": "tbsm", "embedding_dim": DIM, "history_steps": history_steps, **MODEL},
            "optimizer": {"dense": {"name": "adam", "lr": DENSE_LR}, "sparse": {"name": "adagrad", "lr": SPARSE_LR}},
            "train": {"batch_size": BATCH_SIZE, "max_steps": max_steps, "eval_every": None, "seed": seed, "threads": 1},
            "hot": hot or {},
        }
    )


def fresh(dataset: PackedDataset, *, seed: int, history_steps: int = STEPS) -> PlainTBSM:
    """The plain model, its weights drawn by itself."""
    rows = {table.name: table.num_embeddings for table in dataset.info.tables}
    widths = {name.removesuffix("_mlp"): value for name, value in MODEL.items()}
    sizes = [rows[name] for name, _ in FEATURES]
    return PlainTBSM(FEATURES, sizes, dim=DIM, steps=history_steps, seed=seed, **widths)


def started_as(run: Config, dataset: PackedDataset) -> PlainTBSM:
    """The plain model with the weights that `run` starts from."""
    parts = trainer.build(Setup.decide(run, dataset, Path("run")))
    twin = fresh(dataset, seed=0, history_steps=parts.model.history_steps)
    with torch.no_grad():
        twin.A.copy_(parts.model.inner_MM)
        for table, (name, _) in zip(twin.tables, FEATURES, strict=True):
            table.weight.copy_(parts.embedding.weights[name])
        for part in ("bottom", "top", "attention", "final"):
            for mine, theirs in zip(getattr(parts.model, part).layers, getattr(twin, part), strict=True):
                theirs.load_state_dict(mine.state_dict())
    return twin


def metrics_of(run: Config) -> dict[str, float]:
    """Of the finished run, on the test split."""
    metrics: dict[str, float] = runs.train(run, quiet=True).record.metrics["test"]
    return metrics


def padded(batch: Any, history_steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """A batch as PlainTBSM takes it."""
    ids = {}
    for name, history in FEATURES:
        ids[name] = batch.sparse.bags(name)[0].long()
        if history is not None:
            values, offsets, _ = batch.sparse.bags(history)
            lengths = offsets.diff()
            slots = torch.arange(history_steps) >= history_steps - lengths[:, None]
            ids[history] = torch.zeros(slots.shape, dtype=torch.int64).masked_scatter(slots, values.long())
    return batch.dense, ids, lengths


def trained(model: PlainTBSM, dataset: PackedDataset, *, shuffle_seed: int, max_steps: int | None) -> dict[str, float]:
    """Test metrics of plain torch after an epoch, or part of one."""
    tables = list(model.tables.parameters())
    others = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers = [torch.optim.Adam(others, lr=DENSE_LR), torch.optim.Adagrad(tables, lr=SPARSE_LR)]
    loader = Loader(dataset.split("train"), BATCH_SIZE, shuffle_seed=shuffle_seed)
    for batch in islice(loader.epoch(0), max_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(*padded(batch, model.steps)), batch.label).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        test = list(Loader(dataset.split("test"), 4096, shuffle_seed=None).epoch(0))
        logits = torch.cat([model(*padded(batch, model.steps)) for batch in test])
    label = torch.cat([batch.label for batch in test])
    logloss = float(binary_cross_entropy_with_logits(logits, label))
    return {"auc": auc(logits.numpy(), label.numpy()), "logloss": logloss}


def auc(scores: NDArray[np.float32], label: NDArray[np.float32]) -> float:
    """Share of pairs in the right order, ties half."""
    positive, negative = scores[label == 1], np.sort(scores[label == 0])
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.mean() / 2 / len(negative))


def test_what_was_prepared(dataset: PackedDataset, real_data: Callable[[str], Path]) -> None:
    """Counted by hand: a pair for every event of a user but the first."""
    path = real_data("taobao_userbehavior_110k.csv.gz")
    with gzip.open(path, "rt") as lines:
        num_events = Counter(line.split(",")[0] for line in lines)
    targets = sum(num_events.values()) - len(num_events)
    rows = {split: dataset.split(split).num_rows for split in ("train", "val", "test")}
    print(f"{targets:,} targets, rows {rows}")
    assert sum(rows.values()) == 2 * targets, "a negative was found for each"
    for split in rows:
        label = torch.cat([batch.label for batch in Loader(dataset.split(split), 4096, shuffle_seed=None).epoch(0)])
        assert float(label.mean()) == 0.5


def test_quality_against_plain_torch_from_the_same_start(dataset: PackedDataset, tmp_path: Path) -> None:
    """Same weights at the start, same batches, other code: what is learned is the same but for rounding."""
    compare_from_the_same_start(dataset, tmp_path, seeds=(1, 3, 4), history_steps=STEPS, within=0.01, at_least=0.6)


def compare_from_the_same_start(
    dataset: PackedDataset, folder: Path, *, seeds: tuple[int, ...], history_steps: int, within: float, at_least: float
) -> None:
    found = []
    for seed in seeds:
        run = config(dataset, folder / str(seed), seed=seed, max_steps=180, history_steps=history_steps)
        twin = started_as(run, dataset)
        found.append((metrics_of(run), trained(twin, dataset, shuffle_seed=seed, max_steps=180)))
    for mine, theirs in found:
        print({name: (round(mine[name], 4), round(theirs[name], 4)) for name in ("auc", "logloss")})
        assert abs(mine["auc"] - theirs["auc"]) < within
        assert abs(mine["logloss"] - theirs["logloss"]) < within
    assert np.mean([mine["auc"] for mine, _ in found]) > at_least, "something was learned"


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "taobao-din.yaml"


@pytest.fixture(scope="module")
def data(real_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Every event of a user but the first is a target; two hours leave few of a user."""
    return prepare(real_data("taobao_userbehavior_110k.csv.gz"), tmp_path_factory.mktemp("din") / "data")


def test_the_recipe_learns_histories(data: PackedDataset, real_data: Callable[[str], Path], tmp_path: Path) -> None:
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


def test_data_without_histories_is_refused_before_a_run(make_dataset: Callable[..., Any], tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    changes = ["model.name=din", f"data={dataset.path}", f"run={tmp_path / 'run'}"]
    (tmp_path / "recipe.yaml").write_text(f"data: {dataset.path}\n")
    with pytest.raises(ValueError, match=r"din needs a history.*'item_history'.*x0, x1, x2, bag"):
        runs.train(load_config(tmp_path / "recipe.yaml", changes), quiet=True)
    assert not (tmp_path / "run").exists()

"""A label that is a number: from a frame to a model, its metrics, its predictions and its export."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import sklearn.metrics
import torch
from torch import nn

import hotrow
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.export.inputs import load_module
from hotrow.run import trainer
from hotrow.run.build import build
from hotrow.run.meters import StepClock
from hotrow.setup.setup import Setup

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "regression-small.yaml"
OPTIONS = {
    "batch_size": 32, "epochs": 6, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1,
    "refit": False,
}  # fmt: skip


def ratings(num_rows: int, seed: int = 0) -> pa.Table:
    """What a user gives an item: an effect of each, and of the price, and noise with a deviation of 0.3."""
    generator = np.random.default_rng(seed)
    user, item = generator.integers(0, 40, num_rows), generator.integers(0, 20, num_rows)
    price = generator.standard_normal(num_rows)
    score = 0.1 * (user - 20) + 0.2 * (item % 7 - 3) + 0.5 * price + generator.normal(0, 0.3, num_rows)
    ids = {"user": [f"u{i}" for i in user], "item": [f"i{i}" for i in item]}
    return pa.table({**ids, "price": price.round(4), "score": score.round(4)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("regression")
    told = {"label": "score", "objective": "squared_error", "run": folder / "run", "quiet": True}
    return hotrow.fit(ratings(3000), **told, **OPTIONS)


def test_it_learns_and_says_how_well(run: hotrow.Run) -> None:
    assert run.metrics["rmse"] < 0.6 and run.metrics["r2"] > 0.7, "the deviation of labels is 1.4"
    assert (run.record.objective, run.record.monitor) == ("squared_error", "rmse")
    assert run.summary()["rmse"] == run.metrics["rmse"] and "auc" not in run.summary()
    assert {line["loss"] > 0 for line in run.folder.measurements() if line["kind"] == "train"} == {True}
    lines = run.closing_lines("3,000 rows", [])
    assert f"RMSE     {run.metrics['rmse']:.4f}" in lines and "AUC" not in lines
    page = (run.path / "report.html").read_text()
    assert f"RMSE {run.metrics['rmse']:.4f}" in page and "mean squared error" in page and "AUC" not in page
    manifest = json.loads((run.path / "data" / "dataset.json").read_text())
    assert manifest["labels"] == [{"name": "score", "kind": "number"}]


def test_predictions_metrics_and_the_export_are_numbers(run: hotrow.Run, tmp_path: Path) -> None:
    new = ratings(400, seed=1)
    found, labels = run.predict(new.drop_columns("score")), new["score"].to_numpy()
    judged = run.evaluate_rows(new)
    assert judged["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(labels, found), rel=1e-5)
    assert judged["r2"] == pytest.approx(sklearn.metrics.r2_score(labels, found), abs=1e-5) and judged["r2"] > 0.6
    assert found.min() < -1, "a probability is above 0"
    run.export(tmp_path / "out")
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    scores = scorer.score({name: new[name].to_pylist() for name in ("user", "item", "price")})
    np.testing.assert_allclose(scores.numpy(), found, rtol=0, atol=1e-5)
    assert "predicted number" in (tmp_path / "out" / "README.md").read_text()


def test_a_number_without_an_objective_for_it_is_refused(run: hotrow.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--objective squared_error"):
        hotrow.fit(ratings(300), label="score", run=tmp_path / "a", quiet=True, **OPTIONS)
    packed = run.path / "data"
    with pytest.raises(ValueError, match=r"'score'.*set model\.objective to squared_error"):
        hotrow.fit(packed, run=tmp_path / "b", quiet=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"objective.*'mse'.*squared_error"):
        hotrow.fit(packed, objective="mse", run=tmp_path / "c", quiet=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"train\.monitor is 'auc'.*rmse, mae"):
        hotrow.fit(packed, objective="squared_error", monitor="auc", run=tmp_path / "d", quiet=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"label=.*--label"):
        hotrow.fit(ratings(300), objective="squared_error", run=tmp_path / "e", quiet=True, **OPTIONS)
    again = hotrow.fit(packed, objective="squared_error", run=tmp_path / "f", quiet=True, **OPTIONS)
    assert again.metrics == run.metrics


def test_init_and_prepare_write_what_training_needs(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(ratings(600), tmp_path / "ratings.csv")
    read = {"label": "score", "objective": "squared_error"}
    made = run_init(tmp_path / "ratings.csv", data=str(tmp_path / "packed"), out=tmp_path / "conf", **read)
    assert "label: {column: score, kind: number}" in str(made.schema)
    dataset = run_prepare("csv", tmp_path / "ratings.csv", tmp_path / "packed", **read)
    assert [(label.name, label.kind) for label in dataset.info.labels] == [("score", "number")]
    config = load_config(tmp_path / "conf" / "recipe.yaml")
    assert config.model.objective == "squared_error"
    config.model.check(dataset)
    assert "objective: squared_error" in run_init(tmp_path / "packed").recipe
    load_config(RECIPE).model.check(dataset)
    bad = ratings(600).set_column(3, "score", pa.array([None, *range(599)], pa.float64()))
    with pytest.raises(ValueError, match=r"\(score\).*every row needs a label"):
        run_prepare("frame", bad, tmp_path / "bad", **read)


class Plain(nn.Module):
    """The same DLRM of torch modules only, with the weights of ours copied in."""

    def __init__(self, parts: trainer.Parts) -> None:
        super().__init__()
        self.features, weights = parts.embedding.feature_names, parts.embedding.weights
        rows = (weights[feature].clone() for feature in self.features)
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(own, freeze=False) for own in rows)
        self.bottom, self.top = self.copied(parts.model.bottom), self.copied(parts.model.top)
        del self.top[-1]

    @staticmethod
    def copied(mlp: nn.Module) -> nn.Sequential:
        stack = nn.Sequential()
        for layer in mlp.layers:
            own = nn.Linear(layer.in_features, layer.out_features)
            own.load_state_dict(layer.state_dict())
            stack.append(own).append(nn.ReLU())
        return stack

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(own) for table, own in zip(self.tables, ids, strict=True))], dim=1)
        i, j = torch.tril_indices(3, 3, offset=-1)
        return self.top(torch.cat([x, (vectors @ vectors.transpose(1, 2))[:, i, j]], dim=1)).squeeze(1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_against_plain_torch(run: hotrow.Run, micro_batches: int) -> None:
    dataset = PackedDataset.open(run.path / "data")
    raw = {
        "data": str(dataset.path),
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "objective": "squared_error"},
        "optimizer": {"dense": {"name": "sgd", "lr": 0.02}, "sparse": {"name": "sgd", "lr": 0.02}},
        "train": {"micro_batches": micro_batches},
    }
    parts = build(Setup.decide(make_config(raw), dataset, Path("run")))
    plain, clock = Plain(parts), StepClock()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02)
    for step, batch in enumerate(Loader(dataset.split("train"), 64, shuffle_seed=1).epoch(0)):
        ours = trainer.train_step(parts, batch, step, clock)
        optimizer.zero_grad()
        theirs = nn.functional.mse_loss(plain(batch.dense, batch.sparse.values.view(2, -1).long()), batch.label)
        theirs.backward()
        optimizer.step()
        assert float(ours) == pytest.approx(float(theirs.detach()), rel=2e-4), step
    assert step > 30


def test_no_other_file_knows_of_it() -> None:
    """It is the proof that objectives are a seam: one file, and its entry in the list."""
    source = Path(sys.modules["hotrow"].__file__ or "").parent
    words, own = ("squared_error", "SquaredError"), source / "objectives"
    naming = {path for path in source.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert naming - {source / "sklearn.py"} == {own / "__init__.py", own / "squared_error.py"}  # Regressor names it

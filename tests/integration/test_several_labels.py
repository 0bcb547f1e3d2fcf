"""Several labels: from a schema's list to the loss, the metrics, the scores and the export of each."""

import gzip
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import sklearn.metrics
import torch
import yaml
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import hotrow
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import render_schema
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import load_schema, parse_schema
from hotrow.export.inputs import load_module
from hotrow.models import MODELS
from hotrow.models.spec import ModelSpec
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.several import for_labels
from hotrow.run import runs, trainer
from hotrow.run.build import build, look_up
from hotrow.run.meters import StepClock
from hotrow.setup.setup import Setup
from loops import looped

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "labels-small.yaml"
SMALL = {"embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4], "threads": 1, "refit": False, "quiet": True}
NAMES = ("click", "buy", "stay")
POOLED = [
    name
    for name, spec in MODELS.items()
    if spec.network.lookup == "pooled" and "num_outputs" in inspect.signature(spec.build).parameters
]


def visits(num_rows: int, seed: int = 0) -> dict[str, Any]:
    """Visits by user and item, whether they led to a click and to an order, which are unlike each other."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 30, num_rows), rng.integers(0, 20, num_rows)
    p_click = 1 / (1 + np.exp(-0.3 * (user - 15)))
    p_order = 1 / (1 + np.exp(-(item % 7 - 3.0)))
    return {
        "user": [f"u{i}" for i in user],
        "item": [f"i{i}" for i in item],
        "ts": np.arange(num_rows),
        "click": (rng.random(num_rows) < p_click).astype(int),
        "action": np.where(rng.random(num_rows) < p_order, "order", "none").tolist(),
    }


ORDERED = {"column": "action", "name": "ordered", "positive": ["order"]}
SCHEMA = {"label": ["click", ORDERED], "categorical": ["user", "item"], "split": {"fractions": [0.6, 0.2, 0.2]}}


@looped("weighted", [False, True])
@looped("name", [name for name, objective in OBJECTIVES.items() if not objective.retrieves])
def test_losses_and_metrics_are_those_of_each_label(name: str, weighted: bool) -> None:
    objective = for_labels(OBJECTIVES[name], NAMES)
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(400, 3, generator=generator).requires_grad_()
    labels = (outputs.detach() + torch.randn(400, 3, generator=generator) > 0.5).float()
    weight = torch.rand(400, generator=generator) if weighted else None
    ours = objective.loss(outputs, labels, 400, weight)
    each = {"squared_error": mse_loss, "binary_cross_entropy": binary_cross_entropy_with_logits}[name]
    theirs = (each(outputs, labels, reduction="none") * (1 if weight is None else weight[:, None])).mean()
    torch.testing.assert_close(ours, theirs)
    gradients = (torch.autograd.grad(loss, outputs)[0] for loss in (ours, theirs))
    torch.testing.assert_close(*gradients)
    metrics = objective.metrics()
    for part in torch.arange(400).split(150):
        metrics.update(outputs[part], labels[part], None if weight is None else weight[part])
    found = metrics.figures()
    objective.check(found)
    for k, prefix in enumerate(("", "buy.", "stay.")):
        alone = OBJECTIVES[name].metrics()
        alone.update(outputs[:, k], labels[:, k], weight)
        assert {figure: found[prefix + figure] for figure in OBJECTIVES[name].figures} == {
            figure: value for figure, value in alone.figures().items() if figure != "undefined"
        }
    share = 1.0 if weight is None else float(weight.mean())
    assert found["loss"] == pytest.approx(float(theirs.detach()) / share, rel=1e-5)


def test_one_label_alone_is_as_it_was() -> None:
    for objective in OBJECTIVES.values():
        assert for_labels(objective, ["click"]) is objective


def test_a_label_that_is_all_equal_is_named() -> None:
    metrics = for_labels(OBJECTIVES["binary_cross_entropy"], NAMES).metrics()
    metrics.update(np.eye(3), np.array([[0, 1, 0], [1, 1, 1], [0, 1, 1]]))
    found = metrics.figures()
    assert found["buy.auc"] is None and "buy" in found["undefined"] and "stay" not in found["undefined"]
    with pytest.raises(ValueError, match="6 labels"):
        metrics.update(np.eye(3), np.zeros((3, 2)))


@looped("model", POOLED)
def test_a_step_against_torch(model: str, tmp_path: Path) -> None:
    """The gradient of the loss by torch's own cross-entropy of all outputs, with SGD."""
    schema = parse_schema({**SCHEMA, "dense": ["ts"]}, where="test")
    dataset = run_prepare("frame", pa.table(visits(300)), tmp_path / "data", schema=schema)
    sgd = {"name": "sgd", "lr": 0.1}
    raw = {"data": str(dataset.path), "model": {"name": model}, "optimizer": {"dense": sgd, "sparse": sgd}}
    parts = build(Setup.decide(make_config(raw), dataset, tmp_path))
    batch = next(iter(Loader(dataset.split("train"), 64, shuffle_seed=1).epoch(0)))
    assert batch.label.shape == (64, 2)
    outputs = parts.model(batch.dense, look_up(parts.model, parts.embedding, batch.sparse))
    assert outputs.shape == (64, 2) and not torch.equal(outputs[:, 0], outputs[:, 1])
    theirs, weights = binary_cross_entropy_with_logits(outputs, batch.label), list(parts.model.parameters())
    gradients = torch.autograd.grad(theirs, weights)
    expected = [(weight - 0.1 * gradient).detach() for weight, gradient in zip(weights, gradients, strict=True)]
    ours = trainer.train_step(parts, batch, 0, StepClock())
    torch.testing.assert_close(ours, theirs.detach())
    torch.testing.assert_close([weight.detach() for weight in weights], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("labels")
    options = {"epochs": 6, "batch_size": 64, "eval_every": 1, "early_stopping": 6}
    return hotrow.fit(pa.table(visits(4000)), schema=SCHEMA, run=folder / "run", **SMALL, **options)


def test_each_label_is_learned_and_judged(run: hotrow.Run, tmp_path: Path) -> None:
    new = visits(1500, seed=1)
    scores = run.predict({name: new[name] for name in ("user", "item")})
    truths = (np.array(new["click"]), np.array([action == "order" for action in new["action"]]))
    assert scores.shape == (1500, 2) and scores.dtype == np.float32
    found = run.evaluate_rows(new)
    for k, prefix in enumerate(("", "ordered.")):
        auc = sklearn.metrics.roc_auc_score(truths[k], scores[:, k])
        assert found[f"{prefix}auc"] == pytest.approx(auc, abs=1e-6) and auc > 0.65
        loss = sklearn.metrics.log_loss(truths[k], scores[:, k].astype(np.float64))
        assert found[f"{prefix}logloss"] == pytest.approx(loss, rel=1e-4)
    crossed = sklearn.metrics.roc_auc_score(truths[0], scores[:, 1])
    assert crossed < sklearn.metrics.roc_auc_score(truths[0], scores[:, 0]) - 0.02, "it is of another label"
    assert found["loss"] == pytest.approx((found["logloss"] + found["ordered.logloss"]) / 2)
    assert run.predict({"user": [], "item": []}).shape == (0, 2)


def test_run_and_report_name_each_label(run: hotrow.Run) -> None:
    record = json.loads((run.path / "run.json").read_text())
    assert record["labels"] == ["click", "ordered"] and record["monitor"] == "loss"
    assert record["metrics"]["test"].keys() >= {"auc", "ordered.auc", "ordered.logloss", "loss"}
    lines, page = run.closing_lines("4,000 rows", []), (run.path / "report.html").read_text()
    for name, figure in (("click", "auc"), ("ordered", "ordered.auc")):
        assert name in lines and name in page and f"{run.metrics[figure]:.4f}" in lines
        assert f"{run.metrics[figure]:.4f}" in page
    assert "click, ordered" in page
    assert run.summary()["ordered.auc"] == run.metrics["ordered.auc"]
    assert run.evaluate("test") == {name: run.metrics[name] for name in run.evaluate("test")}


def test_files_of_scores_have_a_column_of_each_label(run: hotrow.Run, tmp_path: Path) -> None:
    new = pa.table(visits(50, seed=2))
    run.write_scores(new, tmp_path / "scores.csv", keep=["user"])
    written = pyarrow.csv.read_csv(tmp_path / "scores.csv")
    assert written.column_names == ["user", "score_click", "score_ordered"]
    columns = np.stack([written[name].to_numpy() for name in written.column_names[1:]], axis=1)
    np.testing.assert_allclose(columns, run.predict(new), rtol=1e-6)
    lists = new.append_column("tags", pa.array([["a", "b"]] * 50))
    with pytest.raises(ValueError, match=r"'tags' to keep has lists, which CSV cannot hold; write a \.parquet file"):
        run.write_scores(lists, tmp_path / "lists.csv", keep=["tags"])
    with pytest.raises(ValueError, match="list is not a path and not an Arrow-capable frame; pass paths"):
        run.predict([])
    with pytest.raises(ValueError, match="'score_click' to keep has the name of the scores"):
        run.write_scores(new.append_column("score_click", new["ts"]), tmp_path / "b.csv", keep=["score_click"])


def test_the_export_scores_each_label(run: hotrow.Run, tmp_path: Path) -> None:
    about, new = run.export(tmp_path / "out"), visits(80, seed=3)
    assert list(about["labels"]) == ["click", "ordered"]
    scorer = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out")
    scores = scorer.score({name: new[name] for name in ("user", "item")})
    np.testing.assert_allclose(scores.numpy(), run.predict(new), rtol=0, atol=1e-6)


@pytest.mark.slow_but("dlrm")
@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_a_resumed_run_ends_with_the_same_bits(run: hotrow.Run, tmp_path: Path, model: str) -> None:
    def trained(name: str, steps: int) -> Path:
        options = {"name": model, "embedding_dim": 2}
        train = {"max_steps": steps, "batch_size": 64, "threads": 1, "epochs": 9, "micro_batches": 3}
        raw = {"data": str(run.path / "data"), "run": str(tmp_path / name), "model": options, "train": train}
        return runs.train(make_config(raw), quiet=True).path

    whole, parts = trained("whole", 40), trained("parts", 23)
    runs.resume(parts, ["train.max_steps=40"], quiet=True)
    lines = (hotrow.load(path).folder.measurements() for path in (whole, parts))
    ends = [[line for line in own if line["kind"] == "eval"] for own in lines]
    assert ends[0][-1] | {"time": 0} == ends[1][-1] | {"time": 0}


@looped("model", POOLED)
def test_micro_batches_of_one_dense_input(model: str, tmp_path: Path) -> None:
    """The gradient of its weights, one for each label, is a column of a larger gradient."""
    schema = parse_schema({**SCHEMA, "dense": ["ts"]}, where="test")
    packed = run_prepare("frame", pa.table(visits(300)), tmp_path / "data", schema=schema).path
    own = {"model.first_order": True} if model == "dlrm" else {}
    options = {"threads": 1, "max_steps": 2, "micro_batches": 2, "quiet": True, **own}
    run = hotrow.fit(packed, run=tmp_path / "run", model=model, **options)
    assert run.record.steps == 2 and "inexact_model" not in run.record.warnings


def test_rows_that_are_sorted_keep_all_labels(tmp_path: Path) -> None:
    rows = visits(600)
    order = np.random.default_rng(0).permutation(600)
    mixed = {name: [values[i] for i in order] for name, values in rows.items()}
    schema = {**SCHEMA, "time": "ts", "statistics": ["user"]}
    dataset = run_prepare("frame", pa.table(mixed), tmp_path / "data", schema=parse_schema(schema, where="test"))
    assert [(label.name, label.kind) for label in dataset.info.labels] == [("click", "binary"), ("ordered", "binary")]
    blocks = [split.block(i) for split in dataset.splits.values() for i in range(split.num_blocks)]
    clicks, orders = (np.concatenate([block.labels[k] for block in blocks]) for k in (0, 1))
    np.testing.assert_array_equal(clicks, rows["click"])
    np.testing.assert_array_equal(orders, [action == "order" for action in rows["action"]])


def test_a_schema_of_several_labels_says_what_is_wrong() -> None:
    for change, reason in (
        ({"label": ["click", "click"]}, "two labels are called 'click'"),
        ({"label": ["click", {"column": "click", "name": "click"}]}, "two labels are called 'click'"),
        ({"label": []}, "label"),
        ({"label": ["click", {"column": "action", "positiv": ["order"]}]}, r"label\[1\].positiv.*positive"),
        ({"label": ["click", "user"]}, "categorical lists 'user', which is the label"),
        ({"label": {"column": "click", "positiv": [1]}}, r"label\.positiv"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_schema({**SCHEMA, **change}, where="test")
    schema = parse_schema(SCHEMA, where="test")
    assert parse_schema(schema.to_json(), where="again") == schema
    assert parse_schema({**SCHEMA, "label": ["click"]}, where="test").to_json()["label"]["column"] == "click"


def test_a_bad_value_names_its_label(tmp_path: Path) -> None:
    rows = visits(100)
    rows["action"][7] = None
    with pytest.raises(ValueError, match=r"8.*\(action\).*is missing"):
        run_prepare("frame", pa.table(rows), tmp_path / "data", schema=parse_schema(SCHEMA, where="test"))
    with pytest.raises(ValueError, match=r"no column 'actio'.*'action'"):
        wrong = {**SCHEMA, "label": ["click", {"column": "actio", "positive": ["order"]}]}
        run_prepare("frame", pa.table(visits(100)), tmp_path / "data", schema=parse_schema(wrong, where="test"))


def test_kinds_of_labels_must_suit_the_objective(tmp_path: Path) -> None:
    schema = parse_schema({**SCHEMA, "label": ["click", {"column": "ts", "kind": "number"}]}, where="test")
    dataset = run_prepare("frame", pa.table(visits(300)), tmp_path / "data", schema=schema)
    with pytest.raises(ValueError, match=r"label 'ts' of .* is any number"):
        hotrow.fit(dataset.path, run=tmp_path / "run", **SMALL)


def test_a_model_with_one_output_is_refused(run: hotrow.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(make_config({"data": ""}).model), "build", ModelSpec.build)
    with pytest.raises(ValueError, match="has the labels click, ordered, but model dlrm predicts one"):
        make_config({"data": ""}).model.check(PackedDataset.open(run.path / "data"))


@looped(
    ("labels", "reason"),
    [
        ("click", r"has 1 labels, but .* predicts 2"),
        ([ORDERED, "click"], r"predicts click, ordered, '\w+' in another place: .* in that order"),
        ([{**ORDERED, "name": "paid"}, "click"], r"predicts click, ordered, '\w+' in another place: .* in that order"),
    ],
)
def test_a_run_that_starts_from_another_has_its_labels(
    run: hotrow.Run, tmp_path: Path, labels: Any, reason: str
) -> None:
    """In their order too: what predicted clicks would go on to predict orders."""
    schema = parse_schema({**SCHEMA, "label": labels}, where="test")
    packed = run_prepare("frame", pa.table(visits(300)), tmp_path / "data", schema=schema).path
    with pytest.raises(ValueError, match=reason):
        hotrow.fit(packed, from_run=str(run.path), run=tmp_path / "run", quiet=True)


def test_options_for_one_label_are_refused(run: hotrow.Run, tmp_path: Path) -> None:
    for option, value in (("metrics.by", "user"), ("calibration.method", "platt"), ("calibration.negatives_kept", 0.5)):
        with pytest.raises(ValueError, match=f"{re.escape(option)} is for one label"):
            hotrow.fit(run.path / "data", run=tmp_path / option, quiet=True, **{option: value})


def test_labels_that_are_told_make_the_schema_and_choose_together(tmp_path: Path) -> None:
    """Both in the order told, two rules of one column apart by their values; the mean of their losses chooses."""
    rows = pa.table(visits(1500))
    told = ["action = none", "click", "action = order"]
    guess = guess_columns(rows, label=told)
    assert [(own.title, own.positive) for own in guess.schema().labels] == [
        ("none", ("none",)), ("click", None), ("order", ("order",)),
    ]  # fmt: skip
    assert parse_schema(yaml.safe_load(render_schema(guess)), where="written").labels == guess.schema().labels
    options = {**SMALL, "refit": True, "members": 1, "batch_size": 256, "epochs": 6}
    run = hotrow.fit(rows, label=["click", "action = order"], time="ts", run=tmp_path / "run", **options)
    assert run.record.labels == ["click", "action"] and run.record.choice is not None
    chosen = hotrow.load(tmp_path / "run" / "selection" / run.record.choice.run)
    assert chosen.record.monitor == "loss" == chosen.record.trained_for.loss_figure
    lines = [line for line in chosen.folder.measurements() if "losses" in line]
    weights = [len(range(k, 150, 64)) for k in range(64)]
    assert np.average(lines[-1]["losses"], weights=weights) == pytest.approx(lines[-1]["loss"], rel=1e-4)
    assert run.predict(rows).shape == (1500, 2)


def test_what_gives_any_of_the_labels_away_is_left_out() -> None:
    rows = visits(1500)
    rows["paid"] = [9.5 if action == "order" else None for action in rows["action"]]
    alone, both = (guess_columns(pa.table(rows), label=told) for told in ("click", ["click", "action = order"]))
    assert "paid" not in [g.column for g in alone.of("")] and "paid" in [g.column for g in both.of("")]


@looped("label, reason", [
    (["click", "action = order", "click"], "'click' twice"),
    (["click", "clack"], "'clack' is not there; did you mean 'click'"),
    (["click", "ts"], r"column 'ts' holds .* say which are positive"),
    (["click", 3], "label is .*3.*; give a list of the names of columns"),
])  # fmt: skip
def test_labels_that_cannot_be_are_named(label: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        hotrow.fit(pa.table(visits(300)), label=label)


def test_a_label_that_never_varies_is_named(tmp_path: Path) -> None:
    rows = pa.table(visits(600) | {"buy": [0] * 600})
    with pytest.raises(ValueError, match=r"fit tells rows apart by 'buy', but .* rows of label 0 alone"):
        hotrow.fit(rows, label=["click", "buy"], run=tmp_path / "run", refit=False, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "mmoe"])
@pytest.mark.filterwarnings("ignore:the recipe is for model dlrm")
def test_the_recipe_on_real_rows(real_data: Any, tmp_path: Path, model: str) -> None:
    """Taobao's events: whether an item goes into the cart, and whether it is bought."""
    with gzip.open(real_data("taobao_userbehavior_110k.csv.gz"), "rb") as file:
        lines = file.read().splitlines(keepends=True)[:40_000]
    (tmp_path / "events.csv").write_bytes(b"user,item,category,behaviour,time\n" + b"".join(lines))
    text = RECIPE.read_text()
    assert len(text.splitlines()) <= 30
    schema = "\n".join(
        line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ") and ": " in line
    )
    (tmp_path / "schema.yaml").write_text(schema)
    labels = [spec.title for spec in load_schema(tmp_path / "schema.yaml").labels]
    run_prepare("csv", tmp_path / "events.csv", tmp_path / "data", schema=tmp_path / "schema.yaml")
    changes = [f"data={tmp_path / 'data'}", f"run={tmp_path / 'run'}", "train.epochs=1", f"model.name={model}"]
    config = load_config(RECIPE, changes)
    runs.train(config, quiet=True)
    run = hotrow.load(tmp_path / "run")
    assert run.record.labels == labels == ["cart", "buy"]
    split, outputs = PackedDataset.open(tmp_path / "data").split("test"), run.evaluate("test")
    rates = [np.concatenate([split.block(i).labels[k] for i in range(split.num_blocks)]).mean() for k in (0, 1)]
    assert [outputs["base_rate"], outputs["buy.base_rate"]] == pytest.approx(rates, rel=1e-6)
    assert outputs["ne"] < 1.2 and outputs["buy.ne"] < 1.2

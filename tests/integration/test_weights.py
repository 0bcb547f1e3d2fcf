"""Sample weights: from a column of the rows to the loss, the metrics, the dataset and the run; copies are the truth."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import sklearn.metrics
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from hotrow.config.load import load_config, make_config
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.schema import parse_schema
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.objectives.objective import Objective
from hotrow.run import runs, trainer
from hotrow.run.build import build
from hotrow.run.meters import StepClock
from hotrow.setup.setup import Setup
from loops import looped

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "weighted-small.yaml"
SMALL = {"embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4], "threads": 1, "refit": False, "quiet": True}
SMALL |= {"epochs": 3}


def clicks(num_rows: int, seed: int = 0) -> dict[str, Any]:
    """Clicks by user and item, and a weight of 0, 1, 2 or 3."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 30, num_rows), rng.integers(0, 20, num_rows)
    p = 1 / (1 + np.exp(-(0.2 * (user - 15) + 0.3 * (item % 7 - 3))))
    return {
        "user": [f"u{i}" for i in user],
        "item": [f"i{i}" for i in item],
        "price": rng.standard_normal(num_rows).round(3),
        "ts": np.arange(num_rows),
        "click": (rng.random(num_rows) < p).astype(int),
        "w": rng.integers(0, 4, num_rows),
    }


SCHEMA = {"label": "click", "weight": "w", "dense": ["price"], "categorical": ["user", "item"]}


@pytest.mark.parametrize(
    "objective", [each for each in OBJECTIVES.values() if not each.retrieves], ids=lambda each: each.name
)
def test_a_row_of_weight_k_is_judged_as_k_rows(objective: Objective) -> None:
    rng = np.random.default_rng(3)
    outputs = np.round(rng.standard_normal(500), 1).astype(np.float32)
    labels = (rng.random(500) < 0.3).astype(np.float32)
    weights = rng.integers(0, 4, 500)
    weighted, copies = objective.metrics(), objective.metrics()
    for part in np.array_split(np.arange(500), 3):
        weighted.update(outputs[part], labels[part], weights[part])
    copies.update(outputs.repeat(weights), labels.repeat(weights))
    truth, found = copies.compute(), weighted.compute()
    assert (found.pop("num_rows"), truth.pop("num_rows")) == (500, weights.sum())
    assert found.pop("undefined") is truth.pop("undefined") is None
    assert found == pytest.approx(truth, rel=1e-12)


def test_a_label_may_have_nearly_all_of_the_weight() -> None:
    metrics = BinaryCrossEntropy().metrics()
    metrics.update(np.float32([0.5, -0.5, 1]), np.float32([1, 0, 1]), np.float32([1e8, 1e-12, 1e8]))
    found = metrics.compute()
    assert np.isnan(found["ne"]) and found["undefined"] is not None and found["base_rate"] == 1


def test_against_sklearn() -> None:
    rng = np.random.default_rng(5)
    labels, weights = (rng.random(5000) < 0.2).astype(np.float32), rng.exponential(size=5000).astype(np.float32)
    logits = np.round(rng.standard_normal(5000) + labels, 1).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    metrics = OBJECTIVES["binary_cross_entropy"].metrics()
    metrics.update(logits, labels, weights)
    found, truth = metrics.compute(), {"sample_weight": weights.astype(np.float64)}
    assert found["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels, logits, **truth), abs=1e-12)
    assert found["logloss"] == pytest.approx(sklearn.metrics.log_loss(labels, scores, **truth), rel=1e-7)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, scores >= 0.5, **truth))
    rate = np.average(labels, weights=weights)
    assert found["calibration"] == pytest.approx(np.average(scores, weights=weights) / rate)
    metrics = OBJECTIVES["squared_error"].metrics()
    metrics.update(logits, logits * 0.5 + labels, weights)
    found, pair = metrics.compute(), (logits * 0.5 + labels, logits)
    assert found["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(*pair, **truth))
    assert found["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(*pair, **truth))
    assert found["r2"] == pytest.approx(sklearn.metrics.r2_score(*pair, **truth))


def test_the_loss_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, weights = torch.randn(300, generator=generator), torch.rand(300, generator=generator)
    labels = (torch.rand(300, generator=generator) < 0.4).float()
    theirs = binary_cross_entropy_with_logits(logits, labels, weight=weights, pos_weight=torch.tensor(3.0))
    ours = BinaryCrossEntropy(pos_weight=3.0).loss(logits, labels[:, None], 300, weights)
    torch.testing.assert_close(ours, theirs)
    ours = OBJECTIVES["squared_error"].loss(logits, labels[:, None], 300, weights)
    torch.testing.assert_close(ours, (weights * (logits - labels) ** 2).mean())


def test_what_has_no_figures_is_said() -> None:
    metrics = OBJECTIVES["binary_cross_entropy"].metrics()
    for bad in ([-1.0], [np.nan], [np.inf], [1.0, 1.0]):
        with pytest.raises(ValueError, match="weights must be 1 finite"):
            metrics.update([0.5], [1], bad)
    metrics.update([0.5, 0.1, 0.2], [1, 1, 0], [1, 2, 0])
    found = metrics.compute()
    assert np.isnan(found["auc"]) and found["undefined"] is not None and found["base_rate"] == 1
    metrics = OBJECTIVES["squared_error"].metrics()
    metrics.update([0.5, 0.1, 0.2], [0.1, 0.1, 7], [1, 2, 0])
    assert np.isnan(metrics.compute()["r2"])
    with pytest.raises(ValueError, match="some rows came with weights"):
        metrics.update([0.5], [1])
    metrics = OBJECTIVES["squared_error"].metrics()
    metrics.update([0.5], [1], [0])
    with pytest.raises(ValueError, match="weights of all 1 rows are 0"):
        metrics.compute()


def state_after(path: Path, rows: dict[str, Any], schema: dict[str, Any], *, batch_size: int, lr: float) -> Any:
    """Returns losses, weights and the rows of tables by value after one pass over `rows` in their order, with SGD."""
    own = {**schema, "split": {"kind": "random", "fractions": [1, 0, 0]}}
    own["dense"] = [{"column": "price", "transform": "identity"}]
    dataset = run_prepare("frame", pa.table(rows), path, schema=parse_schema(own, where="test"))
    sgd = {"name": "sgd", "lr": lr}
    model = {"name": "dcn", "embedding_dim": 2, "embedding_init": 0.0, "deep_mlp": [8]}
    config = make_config({"data": str(path), "model": model, "optimizer": {"dense": sgd, "sparse": sgd}})
    parts, losses = build(Setup.decide(config, dataset, path)), []
    for step, batch in enumerate(Loader(dataset.split("train"), batch_size, shuffle_seed=None).epoch(0)):
        losses.append(trainer.train_step(parts, batch, step, StepClock()))
    found = {"losses": torch.stack(losses), **parts.model.state_dict()}
    for table in ("user", "item"):
        row_of = {
            keys.values[start:stop].tobytes(): int(number)
            for keys, numbers in dataset.vocabulary(table).entries()
            for start, stop, number in zip(keys.offsets, keys.offsets[1:], numbers, strict=False)
        }
        found |= {f"{table} {key!r}": parts.embedding.weights[table][row_of[key]] for key in sorted(row_of)}
    return {name: value.clone() for name, value in found.items() if b"junk" not in name.encode()}


def taken(rows: dict[str, Any], order: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {name: [values[i] for i in order] for name, values in rows.items()}


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_weight_k_trains_as_k_copies(tmp_path: Path) -> None:
    """Of two rows, k copies of one and 4 - k of the other; or each once by its weight, and others of weight 0 in the
    places of their copies, so that batches of 32 are of the same rows."""
    rows = clicks(200, seed=2)
    times = np.random.default_rng(4).integers(1, 4, 100)
    times = np.stack([times, 4 - times], axis=1).ravel()
    copies = taken({name: own for name, own in rows.items() if name != "w"}, np.arange(200).repeat(times))
    weighted = {name: list(own) for name, own in copies.items()} | {"w": np.zeros(400)}
    weighted["w"][np.cumsum(times) - times] = times
    for i in np.flatnonzero(weighted["w"] == 0):
        weighted["user"][i], weighted["item"][i], weighted["price"][i] = "junk", f"junk{i}", 9.0
        weighted["click"][i] = 1 - weighted["click"][i]
    unweighted = {name: value for name, value in SCHEMA.items() if name != "weight"}
    truth = state_after(tmp_path / "copies", copies, unweighted, batch_size=32, lr=0.1)
    found = state_after(tmp_path / "weighted", weighted, SCHEMA, batch_size=32, lr=0.1)
    assert len(truth["losses"]) == 13
    assert_same(found, truth)


def test_equal_weights_are_a_larger_rate(tmp_path: Path) -> None:
    rows = clicks(300, seed=2) | {"w": np.full(300, 4.0)}
    unweighted = {name: value for name, value in SCHEMA.items() if name != "weight"}
    truth = state_after(tmp_path / "plain", rows, unweighted, batch_size=32, lr=0.1)
    found = state_after(tmp_path / "weighted", rows, SCHEMA, batch_size=32, lr=0.025)
    found["losses"] = found["losses"] / 4
    assert_same(found, truth)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("weights")
    split = {"kind": "random", "fractions": [0.6, 0.2, 0.2]}
    rows = pa.table(clicks(3000))
    return hotrow.fit(rows, label="click", weight="w", split=split, run=folder / "run", exclude=["ts"], **SMALL)


def test_a_run_is_judged_by_weights(run: hotrow.Run) -> None:
    info = PackedDataset.open(run.path / "data").info
    manifest = json.loads((run.path / "data" / "dataset.json").read_text())
    assert (info.weight, manifest["weight"]) == ("w", "w")
    assert "w" not in (*info.dense_names, *info.feature_names)
    new = clicks(1000, seed=1)
    found = run.evaluate_rows(new)
    scores = run.predict({name: values for name, values in new.items() if name not in ("w", "click")})
    truth = sklearn.metrics.roc_auc_score(new["click"], scores, sample_weight=new["w"])
    assert found["auc"] == pytest.approx(truth, abs=1e-6) and found["auc"] > 0.6
    assert found["auc"] != pytest.approx(sklearn.metrics.roc_auc_score(new["click"], scores), abs=1e-5)
    stored, blocks = run.evaluate("test"), PackedDataset.open(run.path / "data").split("test")
    (block,) = (blocks.block(i) for i in range(blocks.num_blocks))
    assert stored["base_rate"] == pytest.approx(np.average(block.label, weights=block.weight))
    assert stored == {name: run.metrics[name] for name in stored}
    assert run.record.scores is not None and run.record.scores.rows.label == pytest.approx(stored["base_rate"])
    assert "by their w" in (run.path / "report.html").read_text()
    with pytest.raises(ValueError, match="no column 'w'"):
        run.evaluate_rows({name: values for name, values in new.items() if name != "w"})


def test_weights_come_through_sorting_by_time(tmp_path: Path) -> None:
    """Rows that come out of order are stored in files of their own before they are written."""
    rows = clicks(900)
    rows["w"] = rows["ts"] * 0.5
    mixed = taken(rows, np.random.default_rng(0).permutation(900))
    schema = parse_schema({**SCHEMA, "time": "ts", "statistics": ["user"]}, where="test")
    found = run_prepare("frame", pa.table(mixed), tmp_path / "data", schema=schema)
    weights = [split.block(i).weight for split in found.splits.values() for i in range(split.num_blocks)]
    np.testing.assert_array_equal(np.concatenate(weights), np.arange(900) * np.float32(0.5))


def test_a_weight_may_be_an_input_too(tmp_path: Path) -> None:
    schema = parse_schema({**SCHEMA, "dense": ["w"]}, where="test")
    dataset = run_prepare("frame", pa.table(clicks(300)), tmp_path / "data", schema=schema)
    assert dataset.info.stored_names[1:3] == ("w (weight)", "w")
    assert set(dataset.split("train").block(0).weight) == {0, 1, 2, 3}


@looped("bad", [-1.0, None, float("inf"), 1e39])
def test_a_bad_weight_names_column_and_row(tmp_path: Path, bad: float | None) -> None:
    rows = clicks(300)
    rows["w"] = [*rows["w"][:7].tolist(), bad, *rows["w"][8:].tolist()]
    with pytest.raises(ValueError, match=r"8.*\(w\).*is not a weight.*0 or more"):
        run_prepare("frame", pa.table(rows), tmp_path / "data", label="click", weight="w")
    dataset = run_prepare("frame", pa.table(rows), tmp_path / "less", label="click", weight="w", skip_bad_rows=1)
    assert dataset.info.summary["rows_skipped"] == 1


def test_words_are_no_weights(tmp_path: Path) -> None:
    rows = clicks(300)
    with pytest.raises(ValueError, match="weight column 'user' holds string values"):
        run_prepare("frame", pa.table(rows), tmp_path / "data", label="click", weight="user")
    text = [*map(str, rows["w"][:299]), "heavy"]
    pyarrow.csv.write_csv(pa.table(rows | {"w": text}), tmp_path / "rows.csv")
    with pytest.raises(ValueError, match=r"rows.csv:301.*w.*'heavy' is not a weight"):
        run_prepare("csv", tmp_path / "rows.csv", tmp_path / "data", schema=parse_schema(SCHEMA, where="test"))


@looped(
    ("told", "reason"),
    [
        ({"weight": "click"}, "'click' cannot be both label and weight"),
        ({"weight": "ts", "time": "ts"}, "'ts' cannot be both weight and time"),
        ({"weight": "w", "dense": ["w"]}, "'w' cannot be both dense and weight"),
        ({"weight": "v"}, "weight column 'v' is not there"),
        ({"weight": 3}, "weight is 3"),
    ],
)
def test_a_weight_is_one_column(tmp_path: Path, told: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run_prepare("frame", pa.table(clicks(300)), tmp_path / "data", label="click", **told)


def test_a_schema_says_what_no_weight_can_be() -> None:
    with pytest.raises(ValueError, match="weight is 'click', which is the label"):
        parse_schema({**SCHEMA, "weight": "click"}, where="test")
    assert parse_schema(SCHEMA, where="test").to_json()["weight"] == {"column": "w"}


def test_rows_that_count_may_be_few(tmp_path: Path) -> None:
    """So few that some of the parts, by which the errors of gains are known, would have none."""
    table = clicks(600)
    table["w"] = np.arange(600) % 7 == 0
    run = hotrow.fit(table, schema=SCHEMA, run=tmp_path / "run", **SMALL)
    scores = run.record.scores
    assert scores is not None and 0 < scores.gains_rows < 20
    assert scores.gains.keys() == {"price", "user", "item"}


def test_weights_of_nothing_are_refused(tmp_path: Path) -> None:
    rows = clicks(300) | {"w": [0] * 300}
    with pytest.raises(ValueError, match=r"the weight 'w' is 0 in all .* rows of the train split"):
        hotrow.fit(rows, label="click", weight="w", run=tmp_path / "run", **SMALL)


def test_init_writes_the_weight(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(pa.table(clicks(300)), tmp_path / "rows.csv")
    made = run_init(tmp_path / "rows.csv", label="click", weight="w")
    assert "weight: {column: w}" in str(made.schema)


def test_the_recipe_on_real_rows(real_data: Any, tmp_path: Path) -> None:
    """Taobao's events with a quarter of the views, each of which counts four; scores are then rates of all events."""
    rng, whole, kept = np.random.default_rng(0), 0, []
    with gzip.open(real_data("taobao_userbehavior_110k.csv.gz"), "rt") as file:
        for line in file:
            user, item, category, behaviour, _ = line.rstrip().split(",")
            is_view, whole = behaviour == "pv", whole + 1
            if not is_view or rng.random() < 0.25:
                kept.append([user, item, category, str(int(not is_view)), "4" if is_view else "1"])
    text = "\n".join(["user,item,category,click,weight", *map(",".join, kept)])
    (tmp_path / "clicks.csv").write_text(text + "\n")
    assert len(RECIPE.read_text().splitlines()) <= 30
    run_prepare("csv", tmp_path / "clicks.csv", tmp_path / "data", label="click", weight="weight")
    config = load_config(RECIPE, [f"data={tmp_path / 'data'}", f"run={tmp_path / 'run'}", "train.epochs=1"])
    runs.train(config, quiet=True)
    run = hotrow.load(tmp_path / "run")
    rate = sum(row[3] == "1" for row in kept) / whole
    assert run.metrics["base_rate"] == pytest.approx(rate, abs=0.01)
    assert run.metrics["calibration"] == pytest.approx(1, abs=0.25) and run.metrics["auc"] > 0.5

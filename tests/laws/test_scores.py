"""What a run's record and page say of its scores, against shuffles by hand and sklearn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_tbsm_law import BASE, prepared

import hotrow
from hotrow.config.load import make_config
from hotrow.parallel.communicator import Communicator
from hotrow.run import ending, runs, scores
from hotrow.run.checkpoint import list_checkpoints
from hotrow.run.folder import RunFolder
from rank_pool import RankPool

NUM_ROWS, NUM_SCORED = 4000, 1200
SCHEMA: dict[str, Any] = {
    "label": "click",
    "time": {"column": "day"},
    "dense": ["price", "price_log"],
    "categorical": [
        "user",
        "colour",
        {"column": "price", "buckets": [1, 2]},
        {"column": "tags", "kind": "multi_hot", "separator": " "},
    ],
    "transforms": [{"log1p_clip0": {"column": "price", "into": "price_log"}}],
    "statistics": ["user", {"columns": ["colour"], "priors": [5]}],
    "split": {"kind": "time", "fractions": [0.6, 0.1, 0.3]},
}
OPTIONS = {"batch_size": 64, "epochs": 3, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1}
OPTIONS |= {"refit": False}

Rows = dict[str, np.ndarray[Any, Any]]


def clicks() -> Rows:
    """Users, most of them rare and some of them new among the last rows; three colours; prices; tags."""
    rng = np.random.default_rng(0)
    day = np.arange(NUM_ROWS)
    user = rng.zipf(1.3, NUM_ROWS) % 300 + (rng.random(NUM_ROWS) < 0.1) * day
    colour = rng.choice(["red", "green", "blue"], NUM_ROWS, p=[0.5, 0.3, 0.2])
    price = rng.exponential(1.5, NUM_ROWS).round(3)
    drawn = [rng.integers(0, 9, length) for length in rng.integers(0, 4, NUM_ROWS)]
    logit = (colour == "red") * 1.5 - price + rng.normal(0, 1, 300)[user % 300]
    return {
        "click": (rng.random(NUM_ROWS) < 1 / (1 + np.exp(-logit))).astype(int),
        "day": day,
        "user": np.array([f"u{each}" for each in user]),
        "colour": colour,
        "price": price,
        "tags": np.array([" ".join(f"t{tag}" for tag in tags) for tags in drawn]),
        "unused": np.ones(NUM_ROWS),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    path = tmp_path_factory.mktemp("scores") / "run"
    return hotrow.fit(clicks(), schema=SCHEMA, run=path, quiet=True, **OPTIONS)


def scored_rows() -> Rows:
    return {name: column[NUM_ROWS - NUM_SCORED :] for name, column in clicks().items()}


def found(run: hotrow.Run) -> Any:
    assert run.record.scores is not None
    return run.record.scores


def logloss(run: hotrow.Run, rows: Rows) -> float:
    import sklearn.metrics  # late: ranks import this file

    return float(sklearn.metrics.log_loss(rows["click"], run.predict(rows).astype(np.float64)))


def test_what_a_column_gives_is_what_shuffling_its_raw_values_costs(run: hotrow.Run) -> None:
    """A shuffled raw column carries all that is made of it: number, logarithm, bucket, ids and statistics."""
    rows, generator = scored_rows(), np.random.default_rng(0)
    orders = [generator.permutation(NUM_SCORED) for _ in range(scores.SHUFFLES)]
    before, gains = logloss(run, rows), found(run).gains
    assert set(gains) == {"user", "colour", "price", "tags"} and found(run).gains_rows == NUM_SCORED
    for name, gain in gains.items():
        risen = [logloss(run, {**rows, name: rows[name][order]}) - before for order in orders]
        assert gain.increase == pytest.approx(np.mean(risen), abs=2e-6), name
    assert gains["price"].increase > 10 * gains["price"].error > 0
    assert abs(gains["tags"].increase) < 4 * gains["tags"].error, "tags say nothing of the label"


def test_tenths_of_scores_against_predict(run: hotrow.Run) -> None:
    rows, record = scored_rows(), found(run)
    score, label = run.predict(rows).astype(np.float64), rows["click"]
    assert (record.split, record.rows.num_rows) == ("test", NUM_SCORED)
    assert [record.rows.score, record.rows.label] == pytest.approx([score.mean(), label.mean()], rel=1e-6)
    tenths = np.array_split(np.argsort(score, kind="stable"), 10)
    for tenth, own in zip(record.tenths, tenths, strict=True):
        assert [tenth.score, tenth.label] == pytest.approx([score[own].mean(), label[own].mean()], rel=1e-4)


def test_the_page_answers_a_modeller_first(run: hotrow.Run, tmp_path: Path) -> None:
    page = (run.path / "report.html").read_text()
    for text in ("the schema does not list it", "unused", "price_log"):
        assert text in page, text
    assert page.index("<h2>Columns") < page.index("<h2>Scores") < page.index("<h2>Speed and memory")
    assert "What would help most" not in page, "nobody waits for a run of seconds"
    guessed = hotrow.fit(clicks(), label="click", run=tmp_path / "run", quiet=True, **OPTIONS)
    reasons = guessed.folder.facts().info.summary["left_out"]  # type: ignore[union-attr]
    assert "same value" in reasons["unused"] and str(reasons["unused"]) in (guessed.path / "report.html").read_text()


def test_looking_at_scores_changes_nothing(run: hotrow.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_look_at_scores", lambda *_: None)
    plain = hotrow.fit(clicks(), schema=SCHEMA, run=tmp_path / "run", quiet=True, **OPTIONS)
    assert plain.record.scores is None and plain.record.metrics == run.record.metrics
    (one, *_), (other, *_) = (
        [sorted(path.glob("**/*.safetensors")) for path in list_checkpoints(each.folder.checkpoints).values()]
        for each in (plain, run)
    )
    assert len(one) > 0 and [file.read_bytes() for file in one] == [file.read_bytes() for file in other]


def test_slow_models_are_looked_at_on_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MIN_SECONDS", 1e-4)
    monkeypatch.setattr(scores, "MAX_SHARE", 0.0)
    quick = hotrow.fit(clicks(), schema=SCHEMA, run=tmp_path / "run", quiet=True, **OPTIONS)
    assert 0 < found(quick).gains_rows < NUM_SCORED / 2 and len(found(quick).gains) < 4


def tbsm(data: Path, run: Path, **more: Any) -> Any:
    train = {**BASE["train"], "micro_batches": 2}
    return make_config({**BASE, "data": str(data), "run": str(run), **more, "train": train})


def train_rank(comm: Communicator, data: Path, run: Path) -> None:
    runs.train(tbsm(data, run), quiet=True, comm=comm)


@pytest.mark.slow_but("dcn")
@pytest.mark.parametrize("name", ["tbsm", "dcn"])
def test_histories_tiers_and_ranks_give_the_same(tmp_path: Path, name: str) -> None:
    data = prepared(tmp_path / "data", num_events=2600)
    more = {} if name == "tbsm" else {"model": {"name": "dcn", "embedding_dim": 8}}
    whole = runs.train(tbsm(data, tmp_path / "whole", **more), quiet=True).record.scores
    assert whole is not None
    together = {"item_history, category_history"} if name == "tbsm" else {"item_history", "category_history"}
    assert set(whole.gains) == {"user", "item", "category"} | together
    tiers = runs.train(tbsm(data, tmp_path / "tiers", **more, memory={"dram": "40KiB"}), quiet=True)
    assert tiers.record.scores == whole
    if name == "tbsm":
        with RankPool(2) as pool:
            pool.run(train_rank, data, tmp_path / "ranks", num_ranks=2, micro_batches=2)
        assert RunFolder.open(tmp_path / "ranks").record.scores == whole


def test_histories_are_exchanged_whole() -> None:
    rng = np.random.default_rng(1)
    bags = [rng.random((length, 3)).astype(np.float32) for length in (2, 0, 5, 1, 3)]
    offsets, order = np.cumsum([0, *map(len, bags)]), rng.permutation(len(bags))
    values, moved = scores._bags((torch.tensor(np.concatenate(bags)), torch.tensor(offsets)), torch.tensor(order))
    for place, start, stop in zip(order, moved, moved[1:], strict=False):
        assert np.array_equal(values[start:stop], bags[place])

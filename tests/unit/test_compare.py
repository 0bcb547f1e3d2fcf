"""Standard errors against brute force: the bootstrap, DeLong's formulas by a loop over pairs, and seeds by numpy."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import bootstrap, sem

from hotrow.config.load import make_config
from hotrow.objectives import OBJECTIVES
from hotrow.objectives.by_group import ClicksByGroup, group_auc
from hotrow.objectives.objective import Objective, judged
from hotrow.objectives.objective import compared as compared_metrics
from hotrow.tune.compare import mean_of, of_seeds, over_seeds

Floats = NDArray[np.float32]


def two_models(objective: Objective, num_rows: int, seed: int = 0) -> tuple[Floats, Floats, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    truth = rng.normal(-1, 1, num_rows)
    first, second = (np.round(truth + rng.normal(0, noise, num_rows), 1) for noise in (0.5, 0.7))
    if objective.label == "binary":
        labels = rng.random(num_rows) < 1 / (1 + np.exp(-truth))
    else:
        labels = (truth + rng.normal(0, 0.5, num_rows)).astype(np.float32)
    return first.astype(np.float32), second.astype(np.float32), labels


def compared(objective: Objective, first: Floats, second: Floats, labels: NDArray[Any], *more: Any) -> dict[str, Any]:
    both = [objective.metrics() for _ in range(2)]
    for metrics, outputs in zip(both, (first, second), strict=True):
        metrics.update(outputs, labels, *more)
    return compared_metrics(objective, *both)


def weights_of(num_rows: int) -> Floats:
    return np.random.default_rng(5).choice([0, 0.5, 1, 4], num_rows).astype(np.float32)


@pytest.mark.parametrize("weights", [None, weights_of(600)], ids=["alike", "weighted"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_errors_against_the_bootstrap(name: str, weights: Floats | None) -> None:
    """Rows drawn again with both outputs: the deviation of the differences that come of it."""
    objective = OBJECTIVES[name]
    first, second, labels = two_models(objective, 600)
    found = compared(objective, first, second, labels, weights)
    for measure in objective.measures:

        def difference(rows: NDArray[np.int64], measure: str = measure) -> float:
            own = None if weights is None else weights[rows]
            one, other = (objective.measured(outputs[rows], labels[rows], own)[measure] for outputs in (first, second))
            return float(other - one)

        rows = np.arange(len(labels))
        truth = bootstrap((rows,), difference, n_resamples=400, vectorized=False, method="basic", rng=1)
        assert found[measure]["error"] == pytest.approx(truth.standard_error, rel=0.12), measure
        assert found[measure]["difference"] == pytest.approx(difference(rows)), measure


@pytest.mark.parametrize("weights", [None, weights_of(600)], ids=["alike", "weighted"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_influences_give_the_error_of_a_single_figure(name: str, weights: Floats | None) -> None:
    objective = OBJECTIVES[name]
    outputs, _, labels = two_models(objective, 600, seed=2)
    if name != "sampled_softmax":  # some of its rows have no loss
        loss = np.average(objective.losses(outputs, labels), weights=weights)
        assert loss == pytest.approx(objective.measured(outputs, labels, weights)[objective.loss_figure], rel=1e-6)
    for measure, influence in objective.influences(outputs, labels, weights).items():

        def figure(rows: NDArray[np.int64], measure: str = measure) -> float:
            own = None if weights is None else weights[rows]
            return float(objective.measured(outputs[rows], labels[rows], own)[measure])

        truth = bootstrap((np.arange(600),), figure, n_resamples=400, vectorized=False, method="basic", rng=1)
        assert influence.std() / math.sqrt(600) == pytest.approx(truth.standard_error, rel=0.12), measure
        assert influence.mean() == pytest.approx(0, abs=1e-9), measure


@pytest.mark.parametrize("weights", [None, weights_of(900)], ids=["alike", "weighted"])
def test_the_error_of_gauc_is_that_over_groups(weights: Floats | None) -> None:
    """Groups are drawn again, each with all its rows; rows of group -1 are in none."""
    objective = ClicksByGroup(by="user")
    first, second, labels = two_models(objective, 900)
    groups = np.random.default_rng(3).integers(-1, 90, 900)
    found = compared(objective, first, second, labels, weights, groups)["gauc"]

    def difference(drawn: NDArray[np.int64]) -> float:
        rows = [np.flatnonzero(groups == group) for group in drawn]
        at, anew = np.concatenate(rows), np.repeat(np.arange(len(drawn)), [len(own) for own in rows])
        own = None if weights is None else weights[at]
        one, other = (group_auc(outputs[at], labels[at], anew, own)[0] for outputs in (first, second))
        return other - one

    truth = bootstrap((np.arange(90),), difference, n_resamples=400, vectorized=False, method="basic", rng=1)
    assert found["error"] == pytest.approx(truth.standard_error, rel=0.12)
    assert found["difference"] == pytest.approx(difference(np.arange(90)))


def test_the_error_of_auc_against_delong_by_pairs() -> None:
    """DeLong, DeLong and Clarke-Pearson (1988), equation 5 and those before it, in loops over pairs."""
    objective = OBJECTIVES["binary_cross_entropy"]
    first, second, labels = two_models(objective, 300)
    components = []
    for outputs in (first, second):
        beats = (outputs[labels][:, None] > outputs[~labels]) + 0.5 * (outputs[labels][:, None] == outputs[~labels])
        components.append((beats.mean(1), beats.mean(0)))
    of_positives, of_negatives = (np.stack(each) for each in zip(*components, strict=True))
    covariance = np.cov(of_positives) / labels.sum() + np.cov(of_negatives) / (~labels).sum()
    truth = math.sqrt(np.array([-1, 1]) @ covariance @ np.array([-1, 1]))
    assert compared(objective, first, second, labels)["auc"]["error"] == pytest.approx(truth, rel=0.01)


def test_the_error_of_a_loss_is_that_of_paired_losses() -> None:
    objective = OBJECTIVES["binary_cross_entropy"]
    first, second, labels = two_models(objective, 300)
    scores = (1 / (1 + np.exp(-z.astype(float))) for z in (first, second))
    one, other = (-np.log(np.where(labels, p, 1 - p)) for p in scores)
    assert compared(objective, first, second, labels)["logloss"]["error"] == pytest.approx(sem(other - one))


def test_metrics_that_are_undefined_have_no_difference() -> None:
    objective = OBJECTIVES["binary_cross_entropy"]
    first, second, _ = two_models(objective, 50)
    found = compared(objective, first, second, np.zeros(50, np.bool_))
    assert found["auc"] == {"first": None, "second": None, "difference": None, "error": None, "within_noise": None}
    assert found["logloss"]["error"] > 0
    found = compared(OBJECTIVES["sampled_softmax"], first, second, np.zeros(50, np.bool_))
    assert {own["error"] for own in found.values()} == {None}


def test_noise_begins_at_two_errors() -> None:
    assert judged(0.2, 0.1)["within_noise"] and judged(-0.2, 0.1)["within_noise"]
    assert judged(0.21, 0.1)["within_noise"] is False
    assert judged(0.2, None)["within_noise"] is None


def test_seeds_against_numpy() -> None:
    values = [0.71, 0.73, 0.74, 0.7]
    assert mean_of(values) == {"mean": pytest.approx(np.mean(values)), "error": pytest.approx(sem(values))}
    assert mean_of([0.7]) == {"mean": 0.7, "error": None}
    assert mean_of([0.7, None]) == {"mean": None, "error": None}


def test_seeds_follow_each_other() -> None:
    config = make_config({"data": "d", "run": "r", "train": {"seed": 5}})
    found = of_seeds(config, 3)
    assert [(own.train.seed, own.run) for own in found] == [(5, "r/seed-5"), (6, "r/seed-6"), (7, "r/seed-7")]
    assert [own.run for own in of_seeds(make_config({"data": "d"}), 2)] == [None, None]
    for number in (0, -1, 10**9):
        with pytest.raises(ValueError, match="--seeds"):
            of_seeds(config, number)


def test_figures_over_seeds_of_runs_without_scored_rows() -> None:
    record: Any = SimpleNamespace(trained_for=OBJECTIVES["squared_error"], final_metrics={})
    assert over_seeds([record]) == {}

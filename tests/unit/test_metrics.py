"""hotrow.objectives against scikit-learn and against counting every pair."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.data.packed.format import DatasetInfo, Feature, Table
from hotrow.data.packed.groups import Groups
from hotrow.objectives import OBJECTIVES, objective_of
from hotrow.objectives.binary import BinaryCrossEntropy, auc, entropy
from hotrow.objectives.by_group import group_auc
from hotrow.objectives.objective import Objective
from hotrow.objectives.squared_error import SquaredError
from loops import looped


def compute(scores: np.ndarray, labels: np.ndarray) -> dict:
    metrics = BinaryCrossEntropy().metrics()
    metrics.update(scores, labels)
    return metrics.compute()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_against_every_pair(rows: list[tuple[int, bool]]) -> None:
    positives = [score for score, label in rows if label]
    negatives = [score for score, label in rows if not label]
    got = auc(np.array([s for s, _ in rows], np.float32), np.array([y for _, y in rows], np.bool_))
    if not positives or not negatives:
        assert math.isnan(got)
        return
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    assert got == wins / (len(positives) * len(negatives))


@looped("ties", [False, True])
def test_against_sklearn(ties: bool) -> None:
    rng = np.random.default_rng(5)
    labels = (rng.random(20_000) < 0.03).astype(np.float32)
    logits = (rng.standard_normal(20_000) + labels - 3).astype(np.float32)
    if ties:
        logits = np.round(logits * 4) / 4
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    got = compute(logits, labels)
    rate = labels.mean(dtype=np.float64)
    assert got["num_rows"] == 20_000 and got["undefined"] is None
    assert got["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(labels, logits), abs=1e-12)
    assert got["logloss"] == pytest.approx(sklearn.metrics.log_loss(labels, probabilities), rel=1e-7)
    assert got["base_logloss"] == pytest.approx(sklearn.metrics.log_loss(labels, np.full(20_000, rate)), rel=1e-12)
    assert got["ne"] == pytest.approx(got["logloss"] / got["base_logloss"])
    assert got["calibration"] == pytest.approx(probabilities.mean() / rate, rel=1e-7)
    assert got["accuracy"] == sklearn.metrics.accuracy_score(labels, probabilities >= 0.5)
    assert got["base_rate"] == rate


def test_batches_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    scores, labels = rng.standard_normal(5000).astype(np.float32), rng.random(5000) < 0.2
    whole = compute(scores, labels)
    parts = BinaryCrossEntropy().metrics()
    for rows in np.array_split(np.arange(5000), 40):
        parts.update(torch.from_numpy(scores[rows]), torch.from_numpy(labels[rows]).float())
    assert parts.compute() == whole
    assert parts.compute() == whole, "computing does not use rows up"


def test_parts_are_judged_as_their_rows_alone() -> None:
    rng = np.random.default_rng(2)
    scores, labels, weights = rng.standard_normal(95).astype(np.float32), rng.random(95) < 0.4, rng.random(95)
    weights[10:20] = 0
    metrics = BinaryCrossEntropy().metrics()
    for rows in np.array_split(np.arange(95), 4):
        metrics.update(scores[rows], labels[rows], weights[rows])
    found = [*metrics.parts([0, 11, 44, 55, 85])]
    for part, start, stop in ((0, 0, 11), (2, 44, 55), (4, 85, 95)):
        alone = BinaryCrossEntropy().metrics()
        alone.update(scores[start:stop], labels[start:stop], weights[start:stop])
        assert found[part] == alone.figures()
    assert len(found) == 5 and sum(part["num_rows"] for part in found) == 95
    assert [*metrics.parts([0, 10, 20, 20])][1:3] == [{}, {}], "rows without weight are not judged, nor no rows"
    assert metrics.num_rows == 95, "the rows stay"


def test_logloss_of_extreme_logits_is_exact() -> None:
    got = compute(np.array([100.0, -100.0, 100.0]), np.array([1, 0, 0]))
    assert got["logloss"] == pytest.approx(100 / 3)


@looped("label", [0, 1])
def test_one_class_is_reported_not_a_crash(label: int) -> None:
    got = compute(np.array([0.5, -1.0]), np.array([label, label]))
    assert math.isnan(got["auc"]) and math.isnan(got["ne"])
    assert got["undefined"] == f"all 2 labels are {label}: auc and ne need both"
    assert math.isnan(got["calibration"]) == (label == 0)
    assert got["base_logloss"] == 0


def test_tensors_of_any_float_kind() -> None:
    logits = torch.tensor([[0.5], [-1.0]], requires_grad=True)
    metrics = BinaryCrossEntropy().metrics()
    metrics.update(logits, torch.tensor([[1.0], [0.0]]))
    metrics.update(logits.detach().bfloat16(), torch.tensor([1, 0]))
    assert metrics.num_rows == 4 and metrics.compute()["auc"] == 1.0


def test_later_changes_to_the_callers_arrays_do_not_reach_in() -> None:
    scores, labels = np.array([1, -1], np.float32), np.array([True, False])
    metrics = BinaryCrossEntropy().metrics()
    metrics.update(scores, labels)
    scores[:] = 0
    labels[:] = False
    assert metrics.compute()["auc"] == 1.0


def test_entropy() -> None:
    assert entropy(0.5) == pytest.approx(math.log(2))
    assert entropy(0.0) == entropy(1.0) == 0


@looped(
    ("scores", "labels", "message"),
    [
        ([0.0, math.nan], [0, 1], "1 of 2 scores are NaN or infinite"),
        ([math.inf], [0], "NaN or infinite"),
        ([0.0], [0.5], "labels hold 0.5"),
        ([0.0], [math.nan], "labels hold nan"),
        ([0.0], [0, 1], "1 scores came with 2 labels"),
    ],
)
def test_bad_rows(scores: list, labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute(np.array(scores), np.array(labels))


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="no rows were added"):
        BinaryCrossEntropy().metrics().compute()


def test_squared_error_against_sklearn() -> None:
    rng = np.random.default_rng(3)
    labels = (rng.standard_normal(5000) * 4 + 10).astype(np.float32)
    outputs = (labels + rng.standard_normal(5000) + 0.5).astype(np.float32)
    metrics = SquaredError().metrics()
    for rows in np.array_split(np.arange(5000), 7):
        metrics.update(torch.from_numpy(outputs[rows]), torch.from_numpy(labels[rows])[:, None])
    got, wide = metrics.compute(), (labels.astype(np.float64), outputs.astype(np.float64))
    assert got["num_rows"] == 5000 and got["undefined"] is None
    assert got["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(*wide), rel=1e-12)
    assert got["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(*wide), rel=1e-12)
    assert got["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(*wide), rel=1e-12)
    assert got["r2"] == pytest.approx(sklearn.metrics.r2_score(*wide), rel=1e-12)
    assert got["bias"] == pytest.approx(0.5, abs=0.05) and got["base_mse"] == pytest.approx(wide[0].var(), rel=1e-12)
    SquaredError().check(got)
    assert SquaredError().doubts(got, "rows") == {}


def test_squared_error_of_equal_labels_and_of_a_model_worse_than_their_mean() -> None:
    objective = SquaredError()
    metrics = objective.metrics()
    metrics.update(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    got = metrics.figures()
    assert got["r2"] is None and "r2" in got["undefined"] and got["rmse"] == 1.0
    objective.check(got)
    metrics.update(np.array([9.0, 9.0]), np.array([1.0, 3.0]))
    assert list(objective.doubts(metrics.figures(), "rows")) == ["worse_than_a_constant"]
    with pytest.raises(ValueError, match="labels hold inf"):
        metrics.update(np.array([1.0]), np.array([np.inf]))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_what_an_objective_promises_of_its_names(objective: Objective) -> None:
    figures = {*objective.figures}
    assert figures >= {"num_rows", *objective.optional, *objective.measures, *objective.summary, objective.loss_figure}
    assert objective.monitors and {*objective.monitors} <= {*objective.measures}
    metrics = objective.metrics()
    metrics.update(np.array([-1.0, 0.5, 2.0]), np.array([0.0, 1.0, 1.0]))
    found = metrics.figures()
    objective.check(found)
    for measure in objective.measures.values():
        assert measure.title in objective.line(found)
    assert all(objective.lines(found)) and objective.verdict(found)
    for altered in ({**found, "other": 1.0}, {**found, objective.loss_figure: "0"}, {**found, "num_rows": None}):
        with pytest.raises(ValueError, match=r"other|must be a number"):
            objective.check(altered)


def one_by_one(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> tuple[float, int, int]:
    """The definition: scikit-learn's AUC of each group that has both labels, and their mean weighted by rows."""
    own = [(scores[groups == group], labels[groups == group]) for group in np.unique(groups)]
    found = [(roc_auc_score(y, s), len(y)) for s, y in own if 0 < y.sum() < len(y)]
    rows = sum(n for _, n in found)
    return (sum(area * n for area, n in found) / rows if rows else math.nan), len(found), rows


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans(), st.integers(0, 4)), max_size=40))
def test_against_sklearn_with_ties(rows: list[tuple[int, bool, int]]) -> None:
    scores, labels, groups = (np.array([row[k] for row in rows]) for k in range(3))
    columns = scores.astype(np.float32), labels.astype(np.bool_), groups.astype(np.int64)
    assert group_auc(*columns) == pytest.approx(one_by_one(*columns), abs=1e-12, nan_ok=True)


def test_against_sklearn_over_many_groups() -> None:
    rng = np.random.default_rng(3)
    groups = (400 * rng.random(8000) ** 3).astype(np.int64) * 10**10
    labels = rng.random(8000) < 0.1
    scores = (rng.standard_normal(8000) + labels + groups / 1e13).astype(np.float32)
    assert group_auc(scores, labels, groups) == pytest.approx(one_by_one(scores, labels, groups), abs=1e-12)


def test_weights_count_as_rows_that_are_repeated() -> None:
    rng = np.random.default_rng(6)
    times, groups, labels = rng.integers(0, 4, 500), rng.integers(0, 30, 500), rng.random(500) < 0.3
    scores = rng.integers(-4, 4, 500).astype(np.float32)
    value, num_groups, num_rows = group_auc(scores, labels, groups, times.astype(np.float32))
    repeated = group_auc(*(np.repeat(own, times) for own in (scores, labels, groups)))
    assert (value, num_groups) == (pytest.approx(repeated[0], abs=1e-12), repeated[1])
    assert num_rows == np.isin(groups, groups[times > 0]).sum() - sum(
        (groups == group).sum()
        for group in set(groups[times > 0].tolist())
        if len(set(labels[(groups == group) & (times > 0)].tolist())) < 2
    ), "of groups that have both labels among rows that count"


def test_metrics_have_it_beside_those_of_all_rows() -> None:
    rng = np.random.default_rng(4)
    scores, labels = rng.standard_normal(900).astype(np.float32), rng.random(900) < 0.3
    groups = rng.integers(-1, 40, 900)
    metrics, plain = objective_of("binary_cross_entropy", "user").metrics(), BinaryCrossEntropy().metrics()
    plain.update(scores, labels)
    for part in np.array_split(np.arange(900), 7):
        metrics.update(torch.from_numpy(scores[part]), labels[part], groups=groups[part])
    found, known = metrics.compute(), groups >= 0
    wanted = one_by_one(scores[known], labels[known], groups[known])
    assert (found.pop("gauc"), found.pop("gauc_groups"), found.pop("gauc_rows")) == pytest.approx(wanted, abs=1e-12)
    assert found == plain.compute()


def test_groups_of_one_label_leave_it_undefined() -> None:
    metrics = objective_of("binary_cross_entropy", "user").metrics()
    metrics.update(np.arange(4.0), [0, 1, 0, 1], groups=[1, 2, 1, -1])
    found = metrics.figures()
    assert found["gauc"] is None and "user" in found["undefined"]
    assert (found["auc"], found["gauc_groups"], found["gauc_rows"]) == (0.75, 0, 0)


INFO = DatasetInfo(
    name="clicks",
    features=(Feature("user", "user"), Feature("day", "day"), Feature("tags", "day", "multi_hot")),
    tables=(Table("user", 9, missing_row=4, vocabulary="v"), Table("day", 7)),
)


def test_values_that_share_a_row_are_in_no_group() -> None:
    ids = [3, 0, 4, 5, 0, 4, 6, 5]
    lengths = torch.tensor([1] * 8 + [0, 2, 0, 0])
    sparse = KeyedJaggedTensor(["user", "day", "tags"], torch.tensor([*ids, 1, 2]), lengths=lengths)
    batch = Batch(torch.empty(4, 0), sparse, torch.zeros(4))
    assert Groups(INFO, "user").of(batch).tolist() == [3, -1, -1, 5]
    assert Groups(INFO, "day").of(batch).tolist() == [0, 4, 6, 5], "without a vocabulary row 0 is a row like any other"


def test_what_makes_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics\.by is 'usr'.*'user'.*day.*schema"):
        Groups(INFO, "usr")
    with pytest.raises(ValueError, match=r"metrics\.by is 'tags'.*list.*user, day"):
        Groups(INFO, "tags")
    with pytest.raises(ValueError, match=r"metrics\.by is 'user'.*squared_error.*null"):
        make_config({"data": "d", "model": {"objective": "squared_error"}, "metrics": {"by": "user"}})
    with pytest.raises(ValueError, match=r"train\.monitor is 'gauc'.*metrics\.by"):
        make_config({"data": "d", "train": {"monitor": "gauc"}})
    assert make_config({"data": "d", "train": {"monitor": "gauc"}, "metrics": {"by": "user"}}).monitor == "gauc"

"""AUC by group against scikit-learn, group by group; which rows are in no group; what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.config.load import make_config
from hotrow.data.packed.format import DatasetInfo, Feature, Table
from hotrow.data.packed.groups import Groups
from hotrow.objectives import objective_of
from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.objectives.by_group import group_auc


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
    groups = (2000 * rng.random(30_000) ** 3).astype(np.int64) * 10**10
    labels = rng.random(30_000) < 0.1
    scores = (rng.standard_normal(30_000) + labels + groups / 1e13).astype(np.float32)
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

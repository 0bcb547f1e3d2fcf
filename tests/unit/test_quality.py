"""The comparison with peers: what it reads, splits and judges, against loops that count."""

import math
from pathlib import Path

import numpy as np
import polars
import pytest

from benchmarks.quality import clear, judged, paired, split_of
from benchmarks.quality_peers import Rows, dense_inputs, encodings, frequent_codes

pytestmark = pytest.mark.package

RANDOM = np.random.default_rng(3)


def pairs_auc(label: np.ndarray, scores: np.ndarray) -> float:
    positive, negative = scores[label == 1], scores[label == 0]
    return float(np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative]))


def made_rows(num_rows: int, *, timed: bool) -> Rows:
    return Rows(
        label=RANDOM.integers(2, size=num_rows).astype(float),
        codes=RANDOM.integers(5, size=(num_rows, 2)),
        numbers=np.where(RANDOM.random((num_rows, 2)) < 0.2, np.nan, RANDOM.normal(3, 2, (num_rows, 2))),
        times=np.arange(num_rows) if timed else None,
    )


def test_times_are_joined_of_columns_or_are_the_digits_of_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("race;year;day;won  ;x;note\n2014-012;2001;3;1;5;a\n2015-003;2001;2;;6;b\n2015-001;2001;1;0; 7;c\n")
    told = {"separator": ";", "label": "won = 1", "exclude": ["note"]}
    joined = clear(path, told | {"time": "year day", "time_format": "%Y-%j"})
    assert joined.rows() == [(1, 978480000, "2014-012", "5"), (0, 978307200, "2015-001", "7")]
    assert joined.columns == ["label", "time", "race", "x"]
    assert clear(path, told | {"time": "race"})["time"].to_list() == [2014012, 2015001]


def test_the_newest_rows_test_and_equal_times_stay_together() -> None:
    times = RANDOM.integers(40, size=2000)
    split = split_of(polars.DataFrame({"label": np.zeros(2000), "time": times}))
    assert times[split == 0].max() < times[split == 1].min()
    assert times[split == 1].max() < times[split == 2].min()
    assert np.bincount(split) == pytest.approx([1600, 200, 200], abs=60)


def test_auc_and_errors_equal_counted_pairs_and_resampled_rows() -> None:
    label = RANDOM.integers(2, size=300).astype(float)
    ours, theirs = (np.round(np.clip(0.3 * label + RANDOM.random((2, 300)), 0.05, 0.95), 2) for _ in range(2))
    assert judged(label, ours)["auc"] == pytest.approx(np.mean([pairs_auc(label, one) for one in ours]))
    found = paired(label, ours[:1], theirs[:1])
    assert found["auc"] == pytest.approx(pairs_auc(label, ours[0]) - pairs_auc(label, theirs[0]))
    again = []
    for _ in range(400):
        drawn = RANDOM.integers(300, size=300)
        one, other = (judged(label[drawn], side[:1, drawn]) for side in (ours, theirs))
        again.append([one[name] - other[name] for name in ("auc", "logloss")])
    assert [found["auc_se"], found["logloss_se"]] == pytest.approx(np.std(again, axis=0), rel=0.2)


def test_encodings_of_rows_with_times_are_made_of_the_rows_before_them() -> None:
    rows, found_of = made_rows(120, timed=True), range(90)
    found, mean = encodings(rows, np.arange(90), 2.0), rows.label[:90].mean()
    for row, seen in [(0, 0), (5, 5), (40, 40), (89, 89), (90, 90), (119, 90)]:
        for column in (0, 1):
            same = [other for other in found_of[:seen] if rows.codes[other, column] == rows.codes[row, column]]
            rate = (rows.label[same].sum() + 2 * mean) / (len(same) + 2)
            assert found[row, 2 * column : 2 * column + 2] == pytest.approx([rate, math.log1p(len(same))])


@pytest.mark.parametrize("timed", [True, False])
def test_an_id_of_one_training_row_tells_that_row_nothing(*, timed: bool) -> None:
    rows = made_rows(60, timed=timed)
    rows.codes[:, 0] = np.arange(60)
    found = encodings(rows, np.arange(50), 2.0)
    assert found[:, 0] == pytest.approx(rows.label[:50].mean())
    assert not found[:, 1].any()


def test_rare_ids_and_missing_numbers_are_judged_by_the_rows_that_train() -> None:
    codes = np.array([[0], [0], [1], [2], [2], [1], [3]])
    numbers = np.array([[1.0], [3.0], [np.nan], [1.0], [3.0], [100.0], [np.nan]])
    rows, train = Rows(np.zeros(7), codes, numbers, None), np.arange(5)
    places, sizes = frequent_codes(rows, train, 2)
    assert places.ravel().tolist() == [1, 1, 0, 2, 2, 0, 0]
    assert sizes == [3]
    scaled = dense_inputs(rows, train, log=False)
    assert scaled.tolist() == [[-1, 0], [1, 0], [0, 1], [-1, 0], [1, 0], [10, 0], [0, 1]]

"""The estimators are scikit-learn's in all that its own checks and tools ask, and their scores are those of a run."""

import gc
import importlib
import json
import os
import pickle
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator
from typer.testing import CliRunner

import hotrow
from forked import run_forked
from hotrow.cli.app import app
from hotrow.sklearn import FEW_ROWS

pd = pytest.importorskip("pandas")
EXPECTED_FAILED_CHECKS = {
    "check_sample_weight_equivalence_on_dense_data": "a row of weight 2 is one sample of a batch, and two rows are two",
}
QUICK = ("unfitted", "set_params", "clone", "repr", "one_label", "1sample", "fit1d", "sparse_array", "y_no_nan", "tags")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).astype(int)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of a test."""
    (own := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    return own


@pytest.fixture(scope="module")
def fitted() -> hotrow.Classifier:
    return hotrow.Classifier(random_state=0).fit(X, Y)


def people(num_rows: int = 120) -> Any:
    """Rows of every kind of column that pandas has."""
    rng = np.random.default_rng(1)
    age, city = rng.integers(18, 80, num_rows), rng.choice(["Rome", "Oslo", "Lima"], num_rows)
    frame = pd.DataFrame({"age": age, "city": city, "rate": rng.normal(size=num_rows)})
    frame["rate"] = frame["rate"].where(rng.random(num_rows) > 0.1)
    return frame, np.where((age > 50) ^ (city == "Rome"), "yes", "no")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [hotrow.Classifier, hotrow.Regressor])
def test_scikit_learns_checks(kind: Any) -> None:
    found = check_estimator(kind(), expected_failed_checks=EXPECTED_FAILED_CHECKS, on_fail=None, on_skip=None)
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert not failed
    assert {each["check_name"] for each in found if each["status"] == "xfail"} == {*EXPECTED_FAILED_CHECKS}
    assert len(found) > 50


@pytest.mark.parametrize("kind", [hotrow.Classifier, hotrow.Regressor])
def test_scikit_learns_quick_checks(kind: Any) -> None:
    tried = 0
    for estimator, check in estimator_checks_generator(kind()):
        if any(word in check.func.__name__ for word in QUICK):
            check(estimator)
            tried += 1
    assert tried >= 10


def test_pipelines() -> None:
    frame, label = people()
    inputs = ColumnTransformer(
        [("numbers", StandardScaler(), ["age", "rate"]), ("ids", OneHotEncoder(sparse_output=False), ["city"])]
    )
    scaled = make_pipeline(StandardScaler(), hotrow.Classifier()).fit(X, Y)
    assert scaled.score(X, Y) > 0.85
    quick = hotrow.Classifier(options={"epochs": 8})
    made = make_pipeline(inputs, clone(quick)).fit(frame, label)
    assert made.predict_proba(frame).shape == (120, 2) and {*made.predict(frame)} == {"no", "yes"}
    kept = make_pipeline(inputs.set_params(ids="passthrough").set_output(transform="pandas"), quick)
    kept.fit(frame, label)
    assert [*kept[-1].feature_names_in_] == ["numbers__age", "numbers__rate", "ids__city"]


def test_searches() -> None:
    quick = hotrow.Classifier(random_state=3, options={"epochs": 12})
    scores = cross_val_score(quick, X, Y, cv=2, scoring="roc_auc", error_score="raise")
    assert scores.min() > 0.85
    grid = {"options": [{"epochs": 1}, {"epochs": 15}]}
    search = GridSearchCV(hotrow.Classifier(), grid, cv=2, scoring="neg_log_loss", error_score="raise").fit(X, Y)
    assert search.best_params_ == {"options": {"epochs": 15}}
    assert search.best_estimator_.run_.folder.options()["train.epochs"] == "15"


def test_a_clone_is_not_fitted_and_draws_the_same(fitted: Any) -> None:
    copy = clone(fitted)
    with pytest.raises(NotFittedError):
        copy.predict(X)
    assert np.array_equal(copy.fit(X, Y).predict_proba(X), fitted.predict_proba(X))
    other = clone(fitted).set_params(random_state=1).fit(X, Y)
    assert not np.array_equal(other.predict_proba(X), fitted.predict_proba(X))


def test_a_pickle_scores_elsewhere(fitted: Any, tmp_path: Path) -> None:
    """In another process, when the folder of the run is gone."""
    expected = fitted.predict_proba(X)
    own = pickle.loads(pickle.dumps(fitted))
    joblib.dump(own, tmp_path / "model.joblib")
    own = joblib.load(tmp_path / "model.joblib")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(own))
    np.save(tmp_path / "rows.npy", X)
    del own
    gc.collect()
    text = "import os, sys, pickle, numpy as np; os.chdir(sys.argv[1]); e = pickle.load(open('model.pickle', 'rb')); "
    text += "np.save('out.npy', e.predict_proba(np.load('rows.npy')))"
    done = run_forked(text, tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "out.npy"), expected)
    assert not [*tmp_path.glob("hotrow-*")]


def test_frames_of_three_kinds_give_the_same_bits() -> None:
    frame, label = people()
    shuffled = frame.set_index(np.roll(np.arange(120), 7) * 3)  # its index is no column
    table = pa.Table.from_pandas(frame, preserve_index=False)
    frames = [frame, shuffled, pl.from_arrow(table), table]
    found = [hotrow.Classifier(options={"epochs": 2}).fit(each, label).predict_proba(each) for each in frames]
    assert all(np.array_equal(each, found[0]) for each in found[1:])


def test_categoricals_and_nullable_kinds_work_as_they_are() -> None:
    frame, label = people()
    kinds = {"city": "category", "age": "Int64", "rate": "Float64"}
    plain, made = (hotrow.Classifier(options={"epochs": 2}).fit(each, label) for each in (frame, frame.astype(kinds)))
    assert np.array_equal(made.predict_proba(frame.astype(kinds)), plain.predict_proba(frame))
    frame.loc[0, "city"] = None
    assert np.isfinite(
        made.predict_proba(frame.assign(age=frame["age"].astype("Int64").where(frame["age"] < 70)))
    ).all()


@pytest.mark.parametrize("labels", [["no", "yes"], [False, True], [3, 7], [-1.0, 1.0]])
def test_labels_may_be_any_two(labels: list[Any]) -> None:
    label = np.array(labels)[Y]
    for column in (label, pd.Series(label), pl.Series(label), pa.array(label)):
        if column is not label and labels != ["no", "yes"]:
            continue
        made = hotrow.Classifier(options={"epochs": 10}).fit(X, column)
        assert [*made.classes_] == labels and made.classes_.dtype.kind in (label.dtype.kind, "O")
        assert np.mean(made.predict(X) == label) > 0.8


def test_sample_weights_shift_scores(fitted: Any) -> None:
    heavy = hotrow.Classifier(random_state=0).fit(X, Y, sample_weight=np.where(Y, 10.0, 1.0))
    assert heavy.predict_proba(X)[:, 1].mean() > fitted.predict_proba(X)[:, 1].mean() + 0.02
    with pytest.raises(ValueError, match="of one class"):
        hotrow.Classifier().fit(X, Y, sample_weight=Y)
    with pytest.raises(ValueError, match=r"weight.*-1"):
        hotrow.Classifier().fit(X, Y, sample_weight=-np.ones(120))


def test_what_tells_the_label_stays_and_importances_say_so(fitted: Any) -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(2 * FEW_ROWS, 3))
    made = hotrow.Classifier(random_state=0, choice=False).fit(rows, rows[:, 1] > 0)
    assert made.score(rows, rows[:, 1] > 0) > 0.95
    assert made.feature_importances_.argmax() == 1 and made.feature_importances_.shape == (3,)
    found = made.run_.importances
    assert [found[f"x{i}"][0] for i in range(3)] == made.feature_importances_.tolist() and found["x1"][1] > 0
    told = json.loads(CliRunner().invoke(app, ["report", str(made.run_.path), "--json"]).stdout)["importances"]
    assert {name: (own["increase"], own["error"]) for name, own in told.items()} == found
    assert f"{found['x1'][0]:.4f}" in (made.run_.path / "report.html").read_text()
    assert np.array_equal(pickle.loads(pickle.dumps(made)).feature_importances_, made.feature_importances_)
    assert not hasattr(fitted, "feature_importances_")


def test_regression_in_any_unit() -> None:
    label = 1e6 + 1e3 * X[:, 0]
    made = hotrow.Regressor(random_state=0).fit(X, label)
    assert made.score(X, label) > 0.8
    assert np.array_equal(pickle.loads(pickle.dumps(made)).predict(X), made.predict(X))


def test_nothing_is_left_behind(temporary: Path, tmp_path: Path) -> None:
    made = hotrow.Classifier(options={"epochs": 1}).fit(X, Y)
    num_threads = threading.active_count()
    made.fit(X, Y).fit(X, Y)
    gc.collect()
    assert threading.active_count() == num_threads and len([*temporary.iterdir()]) == 1
    del made
    gc.collect()
    assert not [*temporary.iterdir()]
    kept = hotrow.Classifier(run=tmp_path / "run", options={"epochs": 1}).fit(X, Y)
    assert kept.run_.path == tmp_path / "run" and (tmp_path / "run" / "report.html").is_file()
    with pytest.raises(ValueError, match="exists already"):
        kept.fit(X, Y)
    assert not [*temporary.iterdir()]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Only binary classification is supported\. .* multiclass"):
        hotrow.Classifier().fit(X, np.arange(120) % 3)
    with pytest.raises(ValueError, match="features"):
        hotrow.Classifier(options={"epochs": 1}).fit(X, Y).predict(X[:, :2])


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "hotrow.sklearn")
    with pytest.raises(ImportError, match=r"pip install 'hotrow\[sklearn\]'"):
        importlib.import_module("hotrow.sklearn")

"""Estimators for scikit-learn over `hotrow.fit`: `hotrow.Classifier` and `hotrow.Regressor`.

    classifier = hotrow.Classifier(random_state=0).fit(X, y)
    classifier.predict_proba(X)[:, 1], classifier.feature_importances_

X is a pandas, polars or Arrow frame, or an array, whose columns are called x0, x1 and so on. All of its columns are
inputs: the caller has chosen them, so a column that seems to give the label away stays. scikit-learn is optional, and
imported with this file.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.api import Run, fit
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.options import NAMES
from hotrow.data.sources.schema import SplitSpec
from hotrow.data.sources.tabular import frame_to_arrow
from hotrow.run.folder import CONFIG, RUN

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import assert_all_finite, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"hotrow.Classifier and hotrow.Regressor: {error}; pip install 'hotrow[sklearn]'") from error

FEW_ROWS = 200
"""With fewer rows there are no validation rows: a tenth of them would be too few to show anything."""
ROWS_TO_CHOOSE = 1000
"""With fewer rows nothing is chosen by validation rows."""
VALIDATION = 0.1
"""Share of the rows that the first run leaves out and chooses steps by; the second run trains on all rows."""


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators have in common: all but the label."""

    _objective: str | None = None

    def __init__(
        self, *, model: str | None = None, config: Any = None, choice: bool = True, refit: bool = True,
        run: Path | str | None = None, quiet: bool = True, random_state: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.config, self.choice, self.refit = model, config, choice, refit
        self.run, self.quiet, self.random_state, self.options = run, quiet, random_state, options

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.target_tags.required = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on rows X [N, columns] with labels y [N]. sample_weight [N]: how much each row counts, 0 or more."""
        table = self._table(X, reset=True)
        if y is None:
            raise ValueError(f"requires y to be passed, but the target y is None: {type(self).__name__} learns labels")
        check_consistent_length(X, y)
        if table.num_rows < 2:
            raise ValueError(f"X has n_samples={table.num_rows}; {type(self).__name__} learns from two rows or more")
        label = counted = self._labels(y)
        columns = dict(zip(table.column_names, table.columns, strict=True))
        given: dict[str, Any] = {"label": _free("label", table), "objective": self._objective}
        columns[given["label"]] = pa.array(label)
        if sample_weight is not None:
            weight = column_or_1d(np.asarray(sample_weight, np.float64))
            check_consistent_length(X, weight)
            counted = label[weight != 0]
            if not len(counted):
                raise ValueError("sample weights are all zero: no row counts")
            given["weight"] = _free("weight", table)
            columns[given["weight"]] = pa.array(weight)
        if self._objective is None and np.ptp(counted) == 0:
            raise ValueError("hotrow.Classifier needs rows of two classes, but all that count are of one class")
        self._train(pa.table(columns), {**given, **(self.options or {})})
        return self

    def _train(self, table: pa.Table, given: dict[str, Any]) -> None:
        few = table.num_rows < FEW_ROWS
        split: dict[str, Any] = {"fractions": (1.0, 0.0, 0.0) if few else (1.0 - VALIDATION, VALIDATION, 0.0)}
        if self.random_state is not None:
            seed = check_random_state(self.random_state).randint(1 << 31)
            given, split = {"train.seed": int(seed), **given}, {**split, "seed": int(seed)}
        if self.config is None and "schema" not in given:
            given = _with_leaks(table, given, split)
        with tempfile.TemporaryDirectory(prefix="hotrow-") as folder:
            self.run_ = fit(
                table, split=split, config=self.config, model=self.model, run=self.run or Path(folder) / "run",
                refit=self.refit, choice=self.choice and table.num_rows >= ROWS_TO_CHOOSE, quiet=self.quiet, **given,
            )  # fmt: skip
            if self.run_.record.status != "finished":
                raise KeyboardInterrupt
            if self.run is None:
                self._unpack(_packed(self.run_.path))

    def _unpack(self, packed: bytes) -> None:
        """Makes the run in a folder that goes with this estimator, or when it is trained again."""
        if (before := self.__dict__.get("_folder")) is not None:
            before()
        folder = Path(tempfile.mkdtemp(prefix="hotrow-"))
        # weakref.finalize would not be called at the end of a process that multiprocessing started.
        self._folder = Finalize(self, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(folder)
        self.run_ = Run(folder)

    def _table(self, X: Any, *, reset: bool) -> pa.Table:
        """X as an Arrow table."""
        if hasattr(X, "__arrow_c_stream__") and len(getattr(X, "shape", ())) == 2:
            validate_data(self, X, reset=reset, skip_check_array=True)
            return cast(pa.Table, frame_to_arrow(X)).rename_columns(self._names)
        rows = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite="allow-nan")
        return pa.table([pa.array(column, from_pandas=True) for column in np.asarray(rows).T], self._names)

    @property
    def _names(self) -> list[str]:
        """Names of the columns of X; a frame whose names are not text is read as an array."""
        return [*getattr(self, "feature_names_in_", (f"x{i}" for i in range(self.n_features_in_)))]

    def _scores(self, X: Any) -> NDArray[np.float32]:
        check_is_fitted(self)
        with warnings.catch_warnings():  # if all rows trained, nothing is known of rows that did not
            warnings.filterwarnings("ignore", "the run keeps no counts of validation rows")
            return self.run_.predict(self._table(X, reset=False))

    @property
    def feature_importances_(self) -> NDArray[np.float64]:
        """By column, how much the loss rises if it is shuffled among rows that did not train, as in the report; 0 if it
        is not an input. [columns]"""
        check_is_fitted(self)
        if not (found := self.run_.importances):
            raise AttributeError(f"no importances: below {FEW_ROWS} rows all train, and none is left to judge by")
        return np.array([found.get(name, (0.0, 0.0))[0] for name in self._names])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name != "_folder"}
        return state | {"run_": _packed(self.run_.path)} if "run_" in state else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "run_"})
        if "run_" in state:
            self._unpack(state["run_"])


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """`hotrow.fit` as scikit-learn's classifier of two classes, whose labels may be any values.

    model, config, choice, refit, run, quiet: as for `hotrow.fit`. With fewer than 1,000 rows nothing is chosen; with
    fewer than 200 all of them train. Without `run`, the run is in a temporary folder, which is removed with the
    estimator. options: other arguments of `hotrow.fit`, such as {"epochs": 3, "categorical": ["user"]}. random_state:
    draws validation rows and weights; if None, they are always the same.

    After `fit`, `run_` is the run; a pickle holds what it scores with. There is no `eval_set`: validation rows are
    drawn from X, or are its newest if it has a time, because the model is finally trained on them too.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _labels(self, y: Any) -> NDArray[Any]:
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_, positive = np.unique(y, return_inverse=True)
        return positive

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each class, [N, 2], in the order of `classes_`."""
        positive = self._scores(X).astype(np.float64)
        return np.stack([1.0 - positive, positive], axis=1)

    def predict(self, X: Any) -> NDArray[Any]:
        """The likelier class of each row, [N]."""
        likelier = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[likelier])


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """`hotrow.fit` as scikit-learn's regressor of one number, by squared error; its parameters are `Classifier`'s."""

    _objective = "squared_error"

    def _labels(self, y: Any) -> NDArray[Any]:
        y = np.asarray(column_or_1d(y, warn=True), np.float64)
        assert_all_finite(y, input_name="y")
        # Networks start near 0 and take steps of one size: labels of mean 0 and deviation 1 suit them.
        self._mean, self._deviation = float(y.mean()), float(y.std()) or 1.0
        return np.asarray((y - self._mean) / self._deviation)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The number predicted for each row, [N]."""
        return self._scores(X).astype(np.float64) * self._deviation + self._mean


def _free(name: str, table: pa.Table) -> str:
    """A name that no column has."""
    while name in table.column_names:
        name += "_"
    return name


def _with_leaks(table: pa.Table, given: dict[str, Any], split: dict[str, Any]) -> dict[str, Any]:
    """`given` with a role for each column that `hotrow.fit` would leave out because it seems to give the label away."""
    hints = {name: value for name, value in given.items() if name in NAMES}
    left_out = guess_columns(table, split=SplitSpec(**split), **hints).of("")
    for name in (guess.column for guess in left_out if guess.reason.startswith("a leak")):
        kind = table.schema.field(name).type
        if not pa.types.is_temporal(kind):
            is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
            role = "dense" if is_number else "lists" if pa.types.is_nested(kind) else "categorical"
            given = {**given, role: [*given.get(role, ()), name]}
    return given


def _packed(run: Path) -> bytes:
    """A zip archive of what a run scores with, and of the records that say what its columns give."""
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        checkpoint = Run(run).checkpoint
        for path in sorted(run.rglob("*")):
            name = path.relative_to(run)
            is_kept = path.is_relative_to(checkpoint) or name.parts[0] == "encoder" or path.name == RUN
            if path.is_file() and (is_kept or path == run / CONFIG):
                archive.write(path, name)
    return packed.getvalue()

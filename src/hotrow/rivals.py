"""Rivals on the rows of a run: a logistic regression and LightGBM, beside the run's own model.

They train on the rows that the run trained on and score the rows that judged it, as hotrow encoded both: numbers after
their transforms, ids as row numbers, and without the statistics of the label. A list is its length and its last id.
Settings are chosen by the LogLoss of validation rows. The libraries are optional, and imported when they are called.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.base.door import is_taken
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.objectives import DEFAULT, OBJECTIVES
from hotrow.objectives.objective import ERRORS, Metrics, compared, shown
from hotrow.report.columns import schema_of
from hotrow.run.folder import RunFolder
from hotrow.run.record import Rivals
from hotrow.run.scores import spread

MOST_ROWS = 200_000
"""The most rows of a split that are used, spread evenly over it."""
MAX_TREES, PATIENCE = 1000, 50
CLICKS = OBJECTIVES[DEFAULT]
Logits = NDArray[np.float64]


class Rows(NamedTuple):
    """Rows of a split as rivals take them: numbers, NaN if one is missing, and then ids."""

    inputs: NDArray[np.float64]
    num_ids: int
    label: NDArray[np.float32]
    weight: NDArray[np.float32] | None

    @property
    def columns(self) -> tuple[list[int], list[int]]:
        """Which inputs are numbers, and which are ids."""
        ends = self.inputs.shape[1] - self.num_ids, self.inputs.shape[1]
        return [*range(ends[0])], [*range(*ends)]

    def judged(self, outputs: NDArray[Any]) -> Metrics:
        found = CLICKS.metrics()
        found.update(outputs, self.label, self.weight)
        return found


def rows_of(split: Split, start: float = 0.0, stop: float = 1.0) -> Rows:
    """At most MOST_ROWS rows of a share of the split. Buckets of a number are left out, as the number is there."""
    info, schema = split.info, schema_of(split.info)
    counted = {name for spec in (schema.statistics if schema else ()) for name in spec.inputs}
    buckets = {spec.column for spec in (schema.categorical if schema else ()) if spec.buckets}
    only = spread(split.num_rows, MOST_ROWS)
    only[: int(start * len(only))] = only[int(stop * len(only)) :] = False
    batch, ids, lengths = next(iter(Loader(split, MOST_ROWS, shuffle_seed=None, only=only).epoch(0))), [], []
    numbers = {n: batch.dense[:, i].double() for i, n in enumerate(info.dense_names) if n not in counted}
    for feature in info.features:
        values, offsets, _ = batch.sparse.bags(feature.name)
        own = torch.cat([values.new_zeros(1), values])[torch.where(offsets.diff() > 0, offsets[1:], 0)]
        if feature.name in numbers and (missing := info.table_by_name[feature.table].missing_row) is not None:
            numbers[feature.name][own == missing] = math.nan
        if feature.name not in buckets or feature.name not in numbers:
            ids.append(own.double())
            lengths += [] if feature.kind == "one_hot" else [offsets.diff().double()]
    inputs = torch.stack([*numbers.values(), *lengths, *ids], 1).numpy()
    return Rows(inputs, len(ids), batch.label.numpy(), None if batch.weight is None else batch.weight.numpy())


def logistic(train: Rows, scored: Rows, setting: Mapping[str, Any], rounds: int | None) -> tuple[Logits, int]:
    """scikit-learn's logistic regression of one-hot ids that two rows have, and of standardized numbers."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    scaled = make_pipeline(StandardScaler(), SimpleImputer(strategy="constant", fill_value=0.0, add_indicator=True))
    one_hot = OneHotEncoder(min_frequency=2, handle_unknown="infrequent_if_exist")
    numbers, ids = train.columns
    inputs = make_column_transformer((scaled, numbers), (one_hot, ids), sparse_threshold=1.0)
    model = LogisticRegression(max_iter=500, **setting)
    model.fit(inputs.fit_transform(train.inputs), train.label, sample_weight=train.weight)
    return model.decision_function(inputs.transform(scored.inputs)), 0


def lightgbm(train: Rows, scored: Rows, setting: Mapping[str, Any], rounds: int | None) -> tuple[Logits, int]:
    """LightGBM, for which ids are categories. rounds: if None, it stops by the LogLoss of the rows that it scores."""
    import lightgbm as library

    params = {"objective": "binary", "verbosity": -1, "learning_rate": 0.05, "seed": 1, "deterministic": True}
    params |= {"bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8, **setting}
    ids = train.columns[1]
    data = library.Dataset(train.inputs, train.label, weight=train.weight, categorical_feature=ids, params=params)
    judge = [data.create_valid(scored.inputs, scored.label, weight=scored.weight)] if rounds is None else None
    stop = [library.early_stopping(PATIENCE, verbose=False)] if judge else None
    model = library.train(params, data, rounds or MAX_TREES, valid_sets=judge, callbacks=stop)
    return np.asarray(model.predict(scored.inputs, raw_score=True)), rounds or model.best_iteration


TREES = [
    {"num_leaves": leaves, "cat_l2": strong, "cat_smooth": strong, "min_data_in_leaf": least}
    for leaves, strong, least in ((15, 10, 20), (31, 10, 20), (63, 100, 100), (7, 30, 50))
]
RIVALS: dict[str, tuple[Callable[..., tuple[Logits, int]], str, list[dict[str, Any]]]] = {
    "logistic regression": (logistic, "sklearn", [{"C": c} for c in (0.03, 0.3, 3.0)]),
    "LightGBM": (lightgbm, "lightgbm", TREES),
}
"""By name: the function, the module that it needs, and the settings of which one is chosen."""


def compare_rivals(run: RunFolder, data: PackedDataset, judged: Metrics, say: Callable[[str], None]) -> Rivals:
    """Trains the rivals that are installed on the rows that a run trained on.

    data: those rows. judged: the model's outputs for the rows that it is judged by. say: called for each rival.
    """
    found, sure, split = Rivals([], {}), dict[str, float](), data.split(run.record.final_metrics["split"])
    kept, scored = rows_of(data.split("train")), rows_of(split)
    if run.record.objective != DEFAULT or run.record.labels or np.ptp(kept.label) == 0:
        return Rivals(["no rivals: they need one label of 0 or 1, and training rows of both"], {})
    outputs, label = (column[spread(split.num_rows, MOST_ROWS)] for column in judged.rows()[:2])
    assert np.array_equal(scored.label > 0.5, label), "the model was judged by other rows"
    own, (train, val) = scored.judged(outputs), rows_that_choose(run, data)
    for name, (fit, module, settings) in RIVALS.items():
        if importlib.util.find_spec(module) is None:
            found.lines.append(f"{name} needs {module}: pip install 'hotrow[rivals]'")
            continue
        tried = [(*fit(train, val, setting, None), setting) for setting in settings]
        _, rounds, setting = min(tried, key=lambda one: val.judged(one[0]).compute()["logloss"])
        beside = compared(CLICKS, own, scored.judged(fit(kept, scored, setting, rounds)[0]))
        found.rivals[name] = {**beside, "setting": setting, "rounds": rounds}
        auc, loss = beside["auc"], beside["logloss"]
        gap = f"{loss['difference']:+.4f} +- {loss['error'] or 0:.4f}"
        found.lines.append(f"{name}: AUC {shown(auc['second'])} LogLoss {shown(loss['second'])} ({gap} to hotrow's)")
        say(found.lines[-1])
        if loss["within_noise"] is False and loss["difference"] < 0:
            sure[name] = loss["difference"]
    if sure:
        best = min(sure, key=sure.__getitem__)
        found.lines.append(f"use {best} here: its LogLoss is lower by more than {ERRORS:.0f} standard errors")
    if max(split.num_rows, data.split("train").num_rows) > MOST_ROWS:
        counts = f"trained on {len(kept.label):,} rows and were judged by {len(scored.label):,}"
        found.lines.append(f"rivals {counts}, which lie evenly among all")
    return found


def rows_that_choose(run: RunFolder, data: PackedDataset) -> tuple[Rows, Rows]:
    """Rows to train on and to choose by: of the run that chose the steps, if there was one; without validation rows the
    last tenth of those that train."""
    path = run.selection / "data"
    own = (PackedDataset.open(path) if is_taken(path / MANIFEST) else data).splits
    if "val" in own and own["val"].num_rows:
        return rows_of(own["train"]), rows_of(own["val"])
    return rows_of(own["train"], stop=0.9), rows_of(own["train"], start=0.9)

"""The peers of benchmarks/quality.py: trees, a logistic regression and nets, each with the settings it may choose from.

A peer is a function of rows, which of them it trains on and scores, a setting, a seed and the number of rounds.
Without a number it stops by the LogLoss of the rows that it scores, and returns the number that was best. Libraries are
imported when a peer is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars
from numpy.typing import NDArray

THREADS = 2
PATIENCE = 50
"""Rounds of a tree without a lower LogLoss before it stops; at most MAX_ROUNDS."""
MAX_ROUNDS = 2000
FOLDS = 5
DAY_S = 86400

Floats = NDArray[np.float64]
Peer = Callable[..., tuple[Floats, int]]


@dataclass(frozen=True)
class Rows:
    """A file's rows as peers take them, in the file's order."""

    label: Floats
    codes: NDArray[np.int64]
    """[rows, categories]: each value by its place among all values of its column, a missing one too."""
    numbers: Floats
    """[rows, numbers]: NaN is missing."""
    times: NDArray[np.int64] | None

    def inputs(self, *, codes: bool = True) -> Floats:
        """Returns codes, if wanted, and numbers side by side."""
        return np.hstack([self.codes.astype(float), self.numbers]) if codes else self.numbers


def read_rows(path: Path, categorical: Sequence[str], train: NDArray[np.bool_]) -> Rows:
    """Reads the CSV file of benchmarks/quality.py. train: the rows that train.

    Hour and weekday are ids and numbers too, if training rows hold at least two days, or two weeks.
    """
    frame = polars.read_csv(path, infer_schema=False)
    ids = [frame[name].fill_null("").rank("dense").to_numpy().astype(np.int64) - 1 for name in categorical]
    left = [name for name in frame.columns if name not in ("label", "time", *categorical)]
    numbers = [frame[name].cast(polars.Float64, strict=False).to_numpy().astype(float) for name in left]
    times = frame["time"].cast(polars.Int64).to_numpy() if "time" in frame.columns else None
    if times is not None:
        for unit, period in ((3600, 24), (DAY_S, 7)):
            if np.ptp(times[train]) >= 2 * unit * period:
                ids.append(times // unit % period)
                numbers.append(ids[-1].astype(float))
    shape = (frame.height, 0)
    return Rows(
        label=frame["label"].cast(polars.Float64).to_numpy(),
        codes=np.stack(ids, 1) if ids else np.zeros(shape, np.int64),
        numbers=np.stack(numbers, 1) if numbers else np.zeros(shape),
        times=times,
    )


def logloss(label: Floats, scores: Floats) -> Floats:
    """Returns the LogLoss of each row."""
    scores = np.clip(scores, 1e-7, 1 - 1e-7)
    found: Floats = -np.log(np.where(label > 0.5, scores, 1 - scores))
    return found


def encodings(rows: Rows, train: NDArray[np.int64], weight: float) -> Floats:
    """Returns label rate and log count of each category: [rows, 2 * categories].

    Rates are drawn to the mean as by `weight` more rows. A row that trains sees the rows before it if there is a time,
    else those of other folds; every other row sees all that train.
    """
    mean, columns = rows.label[train].mean(), []
    folds = np.random.default_rng(0).integers(FOLDS, size=len(train))
    for codes in rows.codes.T:
        size = int(codes.max()) + 1
        positive, count = np.bincount(codes[train], rows.label[train], size), np.bincount(codes[train], minlength=size)
        sums, counts = positive[codes], count[codes].astype(float)
        own, label = codes[train], rows.label[train]
        if rows.times is not None:
            order = np.argsort(own, kind="stable")
            first = np.searchsorted(own[order], own[order])
            before = np.concatenate([[0.0], np.cumsum(label[order])])[:-1]
            sums[train[order]], counts[train[order]] = before - before[first], np.arange(len(own)) - first
        else:
            for fold in range(FOLDS):
                held = folds == fold
                sums[train[held]] -= np.bincount(own[held], label[held], size)[own[held]]
                counts[train[held]] -= np.bincount(own[held], minlength=size)[own[held]]
        columns += [(sums + weight * mean) / (counts + weight), np.log1p(counts)]
    return np.stack(columns, 1) if columns else np.zeros((len(rows.label), 0))


def lightgbm(
    rows: Rows,
    train: NDArray[np.int64],
    scored: NDArray[np.int64],
    setting: Mapping[str, Any],
    seed: int,
    rounds: int | None,
) -> tuple[Floats, int]:
    """LightGBM. setting: its parameters; `encode`: the weight of added target encodings; `ids` 0: without raw codes."""
    import lightgbm as library

    own = dict(setting)
    encode, ids = own.pop("encode", None), own.pop("ids", 1)
    inputs = rows.inputs(codes=bool(ids))
    if encode is not None:
        inputs = np.hstack([inputs, encodings(rows, train, encode)])
    params = {"objective": "binary", "num_threads": THREADS, "verbosity": -1, "learning_rate": 0.05, "max_bin": 255}
    params |= {"bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8, "seed": seed, **own}
    columns = list(range(rows.codes.shape[1])) if ids else []
    data = library.Dataset(inputs[train], rows.label[train], categorical_feature=columns, params=params)
    if rounds is not None:
        return np.asarray(library.train(params, data, rounds).predict(inputs[scored])), rounds
    judge = library.Dataset(inputs[scored], rows.label[scored], reference=data)
    stop = library.early_stopping(PATIENCE, verbose=False)
    model = library.train(params, data, MAX_ROUNDS, valid_sets=[judge], callbacks=[stop])
    return np.asarray(model.predict(inputs[scored])), model.best_iteration


def catboost(
    rows: Rows,
    train: NDArray[np.int64],
    scored: NDArray[np.int64],
    setting: Mapping[str, Any],
    seed: int,
    rounds: int | None,
) -> tuple[Floats, int]:
    """CatBoost with its own encodings of categories. setting: its parameters; has_time: if there is one."""
    import catboost as library

    own = {name: value for name, value in setting.items() if name != "has_time" or rows.times is not None}

    def pool(which: NDArray[np.int64]) -> Any:
        ids = rows.codes[which].astype("S").astype(object)
        numbers = rows.numbers[which].astype(np.float32)
        data = library.FeaturesData(numbers if numbers.shape[1] else None, ids if ids.shape[1] else None)
        return library.Pool(data, rows.label[which])

    model = library.CatBoostClassifier(
        iterations=rounds or MAX_ROUNDS,
        random_seed=seed,
        thread_count=THREADS,
        logging_level="Silent",
        allow_writing_files=False,
        **own,
    )
    judged = pool(scored)
    if rounds is None:
        model.fit(pool(train), eval_set=judged, early_stopping_rounds=PATIENCE, use_best_model=True)
    else:
        model.fit(pool(train))
    return model.predict_proba(judged)[:, 1], rounds or model.tree_count_


def dense_inputs(rows: Rows, train: NDArray[np.int64], *, log: bool) -> Floats:
    """Returns numbers with mean 0 and variance 1 over the rows that train, and a column for each that may be missing.

    log: of their logarithm, with their sign.
    """
    numbers = np.sign(rows.numbers) * np.log1p(np.abs(rows.numbers)) if log else rows.numbers
    missing = np.isnan(numbers)
    known = np.where(missing[train], np.nan, numbers[train])
    count = np.maximum((~missing[train]).sum(0), 1)
    mean = np.nansum(known, 0) / count
    spread = np.sqrt(np.nansum((known - mean) ** 2, 0) / count)
    scaled = np.where(missing, 0.0, (numbers - mean) / np.where(spread > 0, spread, 1.0))
    return np.hstack([np.clip(scaled, -10, 10), missing[:, missing[train].any(0)]])


def frequent_codes(rows: Rows, train: NDArray[np.int64], min_count: int) -> tuple[NDArray[np.int64], list[int]]:
    """Returns the codes that at least `min_count` rows that train have, from 1 on, and 0 for others; and sizes."""
    places, sizes = [], []
    for codes in rows.codes.T:
        kept = np.bincount(codes[train], minlength=int(codes.max()) + 1) >= min_count
        places.append((np.cumsum(kept) * kept)[codes])
        sizes.append(int(kept.sum()) + 1)
    return (np.stack(places, 1) if places else rows.codes), sizes


def logistic(
    rows: Rows,
    train: NDArray[np.int64],
    scored: NDArray[np.int64],
    setting: Mapping[str, Any],
    seed: int,
    rounds: int | None,
) -> tuple[Floats, int]:
    """scikit-learn's logistic regression on one-hot ids and standardised numbers."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression

    places, sizes = frequent_codes(rows, train, setting["min_count"])
    starts = np.cumsum([0, *sizes])
    columns = places + starts[:-1]
    pointers = np.arange(len(columns) + 1) * len(sizes)
    ids = csr_matrix((np.ones(columns.size), columns.ravel(), pointers), shape=(len(columns), starts[-1]))
    inputs = hstack([ids, csr_matrix(dense_inputs(rows, train, log=setting["log"]))]).tocsr()
    model = LogisticRegression(C=setting["C"], max_iter=300, random_state=seed).fit(inputs[train], rows.label[train])
    return model.predict_proba(inputs[scored])[:, 1], 0


def nets(
    rows: Rows,
    train: NDArray[np.int64],
    scored: NDArray[np.int64],
    setting: Mapping[str, Any],
    seed: int,
    rounds: int | None,
) -> tuple[Floats, int]:
    """The nets of benchmarks/quality_nets.py."""
    from benchmarks.quality_nets import fit

    return fit(rows, train, scored, setting, seed, rounds)


_MLP = {"dim": 8, "widths": (64, 32), "dropout": 0.0, "decay": 1e-5, "lr": 1e-3, "batch": 256}

PEERS: dict[str, tuple[Peer, str, list[dict[str, Any]]]] = {
    "lightgbm": (
        lightgbm,
        "lightgbm",
        [
            {"num_leaves": leaves, "cat_l2": strong, "cat_smooth": strong, "min_data_in_leaf": least}
            for leaves, strong, least in ((15, 10, 20), (15, 100, 100), (31, 10, 20), (63, 100, 100), (7, 30, 50))
        ],
    ),
    "lightgbm, target encodings": (
        lightgbm,
        "lightgbm",
        [
            {"encode": weight, "ids": ids, "num_leaves": leaves, "min_data_in_leaf": 50, "cat_l2": 100}
            for weight, ids, leaves in ((10, 0, 15), (10, 1, 15), (3, 0, 31), (30, 0, 7), (10, 0, 63), (10, 1, 31))
        ],
    ),
    "catboost": (
        catboost,
        "catboost",
        [
            {"learning_rate": 0.1, "depth": 6},
            {"learning_rate": 0.1, "depth": 8},
            {"learning_rate": 0.1, "depth": 6, "has_time": True, "l2_leaf_reg": 10},
            {"learning_rate": 0.05, "depth": 6, "l2_leaf_reg": 10},
        ],
    ),
    "logistic regression": (
        logistic,
        "sklearn",
        [{"C": c, "log": log, "min_count": 2} for log in (False, True) for c in (0.03, 0.3, 3.0, 30.0)],
    ),
    "mlp": (
        nets,
        "torch",
        [
            _MLP,
            _MLP | {"decay": 1e-4, "dim": 4},
            _MLP | {"dropout": 0.2, "widths": (128, 64), "decay": 1e-6, "dim": 16},
            _MLP | {"lr": 3e-3, "decay": 1e-4, "dropout": 0.2},
            _MLP | {"batch": 64, "decay": 1e-4},
        ],
    ),
    "fuxictr": (
        nets,
        "fuxictr",
        [
            _MLP
            | {"net": net, "crosses": 3, "widths": (128, 64), "dropout": dropout, "decay": decay, "batch_norm": False}
            for net in ("dcnv2", "deepfm")
            for dropout, decay in ((0.0, 1e-5), (0.2, 1e-4), (0.0, 1e-3))
        ],
    ),
}
"""By name: the function, the library it wants, and its settings; at most 8."""


def scores_of(
    name: str, rows: Rows, split: NDArray[np.uint8], seeds: Sequence[int]
) -> tuple[list[Floats], dict[str, Any]]:
    """Chooses a peer's setting by the LogLoss of validation rows, trains it for each seed on training and validation
    rows, and returns the scores of test rows, and what it chose, with the seconds of all seeds.
    """
    fit, _, settings = PEERS[name]
    train, val, test = (np.flatnonzero(split == one) for one in range(3))
    kept = np.concatenate([train, val])
    if rows.times is None:
        kept.sort()
    else:
        # Encodings of rows by those before them need the order of time.
        train, kept = (which[np.argsort(rows.times[which], kind="stable")] for which in (train, kept))
    tried = []
    settings_s = []
    for setting in settings:
        start = time.perf_counter()
        judged, rounds = fit(rows, train, val, setting, seeds[0], None)
        tried.append((float(logloss(rows.label[val], judged).mean()), rounds, setting))
        settings_s.append(time.perf_counter() - start)
    best, rounds, setting = min(tried, key=lambda one: one[0])
    chosen = {"setting": setting, "rounds": rounds, "validation_logloss": best, "settings_s": settings_s}
    start = time.perf_counter()
    scores = [fit(rows, kept, test, setting, seed, rounds)[0] for seed in seeds]
    return scores, chosen | {"seeds_s": time.perf_counter() - start}

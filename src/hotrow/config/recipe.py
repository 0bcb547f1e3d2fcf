"""The recipe for data of a given size: the options with which `fit` and `init` train by default.

It depends on the number of training rows and the model, and reads no file. What it reaches beside other libraries on
public files, `python -m benchmarks.quality` measures (docs/measurements/quality.md).
"""

from __future__ import annotations

import json
from typing import Any

from hotrow.models import MODELS

FEW_ROWS = 5_000_000
"""With up to this many rows, most ids are seen only a few times. With more, the recipe is the published one for
Criteo."""
MIN_BATCH, MAX_BATCH = 64, 256
ROWS_PER_SAMPLE_OF_BATCH = 500
"""Between the least and the largest batch an epoch so has 500 to 1,000 steps. On eleven files the best weights came
after 300 to 1,500 steps."""
RATE_OF_TABLES, FIRST_STEPS = 0.05, 8.0
"""Adagrad's rate, and the initial sum of squares in units of one sample's largest gradient, 1 / batch: an id's first 64
occurrences take steps of about the same size, so that one that occurs twice does not learn its two labels by heart."""
MIN_EPOCHS, MAX_EPOCHS, LEAST_STEPS = 3, 30, 1000
"""The learning rate falls to zero over three epochs, or as many as give 1,000 steps. Rows that are seen a few times are
overfitted by a fourth, while the MLPs of a small file have learned too little after three."""
EVALUATIONS = 12
"""How often validation rows are scored in all; half of these without a better score end the training."""
WARMUP_STEPS = 200
SCARCE_ROWS = 40_000
"""With fewer rows, several small models differ by so much that their mean is better than each: LogLoss by 1 % on 10,000
rows. With 60,000 rows and more it gained nothing, at twice the time and more."""


def choose_recipe(
    num_rows: int,
    *,
    model: str = "dlrm",
    batch_size: int | None = None,
    epochs: int | None = None,
    validated: bool = True,
    rated: bool = False,
) -> dict[str, Any]:
    """Returns config values by dotted name for `num_rows` training rows.

    batch_size, epochs: set by the user; if None, chosen. Rates and schedule follow them. validated: whether there are
    validation rows by which the best weights can be chosen. rated: whether scores are rates of one label of 0 and 1; a
    model of few rows is then corrected by validation rows if it is too sure of itself.
    """
    few = num_rows <= FEW_ROWS
    batch_size = batch_size or (_batch_of_few(num_rows) if few else 2048)
    steps_of_epoch = max(1, -(-num_rows // batch_size))
    if few:
        epochs = epochs or min(MAX_EPOCHS, max(MIN_EPOCHS, -(-LEAST_STEPS // steps_of_epoch)))
        size: dict[str, Any] = {"train.eval_every": max(2, epochs * steps_of_epoch // EVALUATIONS)}
    else:
        epochs, size = epochs or 1, {"train.eval_every": 0.25}
    size |= {"train.batch_size": batch_size, "train.epochs": epochs}
    # So small a step gains nothing from a second thread, and loses much if the cores are busy: 300 samples/s instead of
    # 4,500 on two cores that other processes used too.
    size |= {"train.threads": 1} if few and batch_size <= MAX_BATCH else {}
    stops: dict[str, Any] = {"train.early_stopping": EVALUATIONS // 2} if validated else {}
    stops |= {"calibration.method": "slope"} if few and validated and rated else {}
    chosen = _few(model, num_rows, batch_size, epochs * steps_of_epoch) if few else _many(model)
    return {**chosen, **size, **stops}


def _batch_of_few(num_rows: int) -> int:
    """Returns 64 below 64,000 rows, 256 from 128,000 rows on, and 128 between."""
    samples = max(1, num_rows // ROWS_PER_SAMPLE_OF_BATCH)
    return min(MAX_BATCH, max(MIN_BATCH, 1 << (samples.bit_length() - 1)))


def _few(model: str, num_rows: int, batch_size: int, steps: int) -> dict[str, Any]:
    """Returns the recipe for few rows and `steps` steps in all. What matters, by validation LogLoss on eleven files:

    - statistics of the label, which the schema has (data/prepare/statistics.py), with ids that are seen once left out;
    - dropout of hidden units and of whole rows, without which ids are learned by heart beside them;
    - the rows themselves as inputs of the top MLP, and `first_order`, by which an id has an effect of its own;
    - numbers in pieces, which come with it: 0.008 better on loans.csv.
    """
    warmup = min(WARMUP_STEPS, steps // 10)
    accumulator = (FIRST_STEPS / batch_size) ** 2
    small = dict(MODELS[model].small)
    if "members" in small and num_rows >= SCARCE_ROWS:
        small["members"] = 1
    return {
        "model.embedding_dim": 8,
        "model.embedding_init": 0.01,
        **{f"model.{name}": value for name, value in small.items()},
        "optimizer.dense": {"name": "adam", "lr": 0.002},
        "optimizer.sparse": {"name": "adagrad", "lr": RATE_OF_TABLES, "initial_accumulator_value": accumulator},
        "optimizer.schedule.warmup_steps": warmup,
        "optimizer.schedule.decay_steps": steps - warmup,
    }


def _many(model: str) -> dict[str, Any]:
    """Returns the published model of Criteo Kaggle, with row-wise Adagrad because batches are larger than its 128. This
    recipe was not measured here."""
    spec = MODELS[model]
    return {
        "model.embedding_dim": 16,
        **{f"model.{name}": spec.model_fields[name].default for name in spec.small},
        "optimizer.dense": {"name": "sgd", "lr": 0.1},
        "optimizer.sparse": {"name": "row_wise_adagrad", "lr": 0.05},
    }


def as_overrides(recipe: dict[str, Any]) -> list[str]:
    """Returns a recipe as `a.b=value` texts, which `apply_overrides` takes."""
    return [f"{name}={json.dumps(value)}" for name, value in recipe.items()]

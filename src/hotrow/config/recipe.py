"""The recipe for data of a given size: the options with which `fit`, `demo` and `init` train by default.

It depends on the number of training rows, the number of id features and the model, and reads no file. The figures here
were measured with `python -m benchmarks.recipe` on real data: 80,000 and 10,000 rows of Criteo, 110,300 and 10,000 of
Taobao.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hotrow.models import MODELS

FEW_ROWS = 5_000_000
"""With up to this many rows, most ids are seen only a few times. With more, the recipe is the published one for
Criteo."""
MIN_BATCH, MAX_BATCH = 64, 256
ROWS_PER_SAMPLE_OF_BATCH = 1250
RATE_OF_TABLES = 1.8
"""The learning rate of SGD at MIN_BATCH. The gradient is a mean over the batch, so the rate grows with the batch
size; an id that occurs once in a batch then learns equally fast at every size. Past MAX_BATCH this fails, because
frequent ids take steps that are too large: on 600,000 rows AUC was 0.79 at batch size 256; at 512 it was 0.74 with the
rate doubled and 0.77 with the same rate."""
FEATURES_OF_CRITEO, MAX_FACTOR = 26, 3.0
"""The rate above is for 26 id features. A step changes a logit by the sum over its features, so with fewer features
each may take a larger step: by a factor of sqrt(26 / features), at most 3. With Taobao's 3 features this raised AUC by
0.010 on 110,000 rows."""
SCARCE_ROWS = 20_000
"""With fewer rows, six epochs and a lower learning rate of the MLPs are better: on 8,000 rows of Taobao by 0.01 AUC and
0.002 LogLoss."""
EPOCHS = 3
"""The learning rate falls to zero over these. On 64,000 rows of Criteo, AUC after one epoch is 0.01 lower, and a fourth
epoch overfits."""


def choose_recipe(
    num_rows: int,
    *,
    num_features: int,
    model: str = "dlrm",
    batch_size: int | None = None,
    epochs: int | None = None,
    validated: bool = True,
) -> dict[str, Any]:
    """Returns config values by dotted name for `num_rows` training rows of `num_features` id features.

    batch_size, epochs: set by the user; if None, chosen. Rates and schedule follow them. validated: whether there are
    validation rows by which the best weights can be chosen.
    """
    few = num_rows <= FEW_ROWS
    batch_size = batch_size or (_batch_of_few(num_rows) if few else 2048)
    epochs = epochs or ((1 if num_rows >= SCARCE_ROWS else 2) * EPOCHS if few else 1)
    size = {"train.batch_size": batch_size, "train.epochs": epochs, "train.eval_every": 0.5 if few else 0.25}
    # So small a step gains nothing from a second thread, and loses much if the cores are busy: 300 samples/s instead of
    # 4,500 on two cores that other processes used too.
    size |= {"train.threads": 1} if few and batch_size <= MAX_BATCH else {}
    stops = {"train.early_stopping": 4} if validated else {}
    return {**(_few(model, num_rows, num_features, batch_size, epochs) if few else _many(model)), **size, **stops}


def _batch_of_few(num_rows: int) -> int:
    """Returns 64 up to 160,000 rows, 256 from 320,000 rows on, and 128 between."""
    samples = max(1, num_rows // ROWS_PER_SAMPLE_OF_BATCH)
    return min(MAX_BATCH, max(MIN_BATCH, 1 << (samples.bit_length() - 1)))


def _few(model: str, num_rows: int, num_features: int, batch_size: int, epochs: int) -> dict[str, Any]:
    """Returns the recipe for few rows. AUC on 64,000 rows of Criteo says what matters:

    - Rows start at zero, so that an unseen id has no effect. Random rows cost up to 0.02.
    - SGD takes small steps for rare ids; Adagrad, whose steps for them are large, costs 0.01.
    - With `first_order` an id has an effect of its own, which is worth 0.004.
    """
    factor = min(MAX_FACTOR, max(1.0, math.sqrt(FEATURES_OF_CRITEO / max(1, num_features))))
    rate = round(RATE_OF_TABLES * factor * min(batch_size, MAX_BATCH) / MIN_BATCH, 2)
    return {
        "model.embedding_dim": 8,
        "model.embedding_init": 0.0,
        **{f"model.{name}": value for name, value in MODELS[model].small.items()},
        "optimizer.dense": {
            "name": "adagrad",
            "lr": 0.015 if num_rows >= SCARCE_ROWS else 0.005,
            "weight_decay": 0.0003,
        },
        "optimizer.sparse": {"name": "sgd", "lr": rate},
        "optimizer.schedule.decay_steps": max(1, epochs * -(-num_rows // batch_size)),
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

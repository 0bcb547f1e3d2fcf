"""The recipe for data of a given size: what `fit`, `demo` and `init` train with if nobody says otherwise.

It knows the number of training rows, the number of id features and the model, never a file. The figures behind it are
measured by `python -m benchmarks.recipe` on real rows: 80,000 and 10,000 of Criteo's, 110,300 and 10,000 of Taobao's.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hotrow.models import MODELS

FEW_ROWS = 5_000_000
"""Up to here most ids are seen a few times at most; beyond, the recipe is that of the published Criteo models."""
LEAST_BATCH, MOST_BATCH = 64, 256
ROWS_PER_SAMPLE_OF_BATCH = 1250
RATE_OF_TABLES = 1.8
"""Rate of SGD at LEAST_BATCH. The gradient is a mean over the batch, so the rate grows with it: an id that comes
once a batch then learns as much each time. Past MOST_BATCH that fails, because frequent ids then step too far: on
600,000 rows AUC was 0.79 at 256; at 512 0.74 with the rate doubled, 0.77 with it kept."""
FEATURES_OF_CRITEO, MOST_FACTOR = 26, 3.0
"""The rate above is for 26 id features. A step moves a logit by the sum over its features, so with fewer of them each
may step further: by sqrt(26 / features), at most 3. With Taobao's 3 features that gave 0.010 AUC on 110,000 rows."""
SCARCE_ROWS = 20_000
"""Below, six epochs and a lower rate of the MLPs are better: on Taobao's 8,000 rows by 0.01 AUC and 0.002 LogLoss."""
EPOCHS = 3
"""With a rate that falls to zero. On Criteo's 64,000 rows one epoch is 0.01 AUC lower, and a fourth overfits."""


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

    batch_size, epochs: as the user has them, if he does: rates and schedule follow. validated: whether there are
    validation rows to choose the best weights by.
    """
    few = num_rows <= FEW_ROWS
    batch_size = batch_size or (_batch_of_few(num_rows) if few else 2048)
    epochs = epochs or ((1 if num_rows >= SCARCE_ROWS else 2) * EPOCHS if few else 1)
    size = {"train.batch_size": batch_size, "train.epochs": epochs, "train.eval_every": 0.5 if few else 0.25}
    # A step so small gains nothing from a second thread, and beside other work loses much: on two cores that others
    # used too, 300 samples/s instead of 4,500.
    size |= {"train.threads": 1} if few and batch_size <= MOST_BATCH else {}
    stops = {"train.early_stopping": 4} if validated else {}
    return {**(_few(model, num_rows, num_features, batch_size, epochs) if few else _many(model)), **size, **stops}


def _batch_of_few(num_rows: int) -> int:
    """The power of two nearest below, within bounds: 64 up to 160,000 rows, 256 from 320,000 on."""
    samples = max(1, num_rows // ROWS_PER_SAMPLE_OF_BATCH)
    return min(MOST_BATCH, max(LEAST_BATCH, 1 << (samples.bit_length() - 1)))


def _few(model: str, num_rows: int, num_features: int, batch_size: int, epochs: int) -> dict[str, Any]:
    """What matters, in AUC on Criteo's 64,000 rows: rows that start at zero say nothing until they were seen (else up
    to 0.02 lower), SGD's steps shrink with an id's frequency where Adagrad lets rare ids jump (0.01), and with
    `first_order` an id acts by itself (0.004).
    """
    factor = min(MOST_FACTOR, max(1.0, math.sqrt(FEATURES_OF_CRITEO / max(1, num_features))))
    rate = round(RATE_OF_TABLES * factor * min(batch_size, MOST_BATCH) / LEAST_BATCH, 2)
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
    """The published model of Criteo Kaggle, with a rate by row for batches larger than its 128. Not measured here."""
    spec = MODELS[model]
    return {
        "model.embedding_dim": 16,
        **{f"model.{name}": spec.model_fields[name].default for name in spec.small},
        "optimizer.dense": {"name": "sgd", "lr": 0.1},
        "optimizer.sparse": {"name": "row_wise_adagrad", "lr": 0.05},
    }


def as_overrides(recipe: dict[str, Any]) -> list[str]:
    """A recipe as `a.b=value` texts, which `apply_overrides` takes."""
    return [f"{name}={json.dumps(value)}" for name, value in recipe.items()]

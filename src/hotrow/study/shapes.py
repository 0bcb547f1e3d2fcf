"""Synthetic data in the shapes of public click logs, packed for a study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hotrow.data.prepare.pipeline import prepare
from hotrow.data.sources.registry import OpenedSource
from hotrow.data.sources.schema import parse_schema
from hotrow.data.sources.synthetic import SyntheticSource
from hotrow.data.sources.synthetic_config import SyntheticConfig, avazu, criteo_kaggle, criteo_terabyte

SHAPES: dict[str, Callable[..., SyntheticConfig]] = {
    "kaggle": criteo_kaggle,
    "terabyte": criteo_terabyte,
    "avazu": avazu,
}
"""By the names that studies use."""


def make_shape(name: str, num_samples: int, scale: float, out: Path) -> Path:
    """Pack a synthetic data set into the folder `out`: split by time, 80 % to train on, every id that occurs a row."""
    config = SHAPES[name](num_samples, scale=scale)
    ids = [table.name for table in config.tables]
    schema = parse_schema(
        {
            "label": "label",
            "time": "time",
            "dense": [column.name for column in config.dense],
            "categorical": ids,
            "split": {"kind": "time"},
        },
        where=config.name,
    )
    prepare(OpenedSource(SyntheticSource(config), schema, dict.fromkeys(ids, "int")), out)
    return out

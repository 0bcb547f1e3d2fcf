"""Avazu click-through rate prediction: ten days of mobile ads, from the Kaggle competition of 2014.

Layout of train.csv: header, comma-separated,

    id, click, hour (YYMMDDHH), C1, banner_pos, site_id, site_domain, site_category, app_id, app_domain, app_category,
    device_id, device_ip, device_model, device_type, device_conn_type, C14 .. C21

Ids are eight hex digits or small integers; both are kept as text. `hour` is the time of the split, not a feature; `id`
is unique per row and left out. test.csv lacks `click`: rows to predict.
"""

from __future__ import annotations

from typing import Any

from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.schema import Schema, parse_schema

FEATURES = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *("C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)
COLUMNS = ("id", "click", "hour", *FEATURES)
LICENCE = "Avazu CTR (Kaggle 2014): the competition's rules, which end use with the competition; check them"

SCHEMA = parse_schema(
    {
        "label": "click",
        "time": "hour",
        "categorical": list(FEATURES),
        "split": {"kind": "time"},
        "csv": {"delimiter": ","},
        "licence": LICENCE,
    },
    where="avazu",
)


def open_avazu(data: Any, schema: Schema = SCHEMA, **options: Any) -> ColumnsSource:
    """Avazu files as a source; `options` as for `ColumnsSource`."""
    return ColumnsSource(data, schema, name="avazu", **options)


def looks_like_avazu(line: str) -> bool:
    """Whether a file's first line is the header above, with or without `click`."""
    return tuple(name for name in line.split(",") if name != "click") == tuple(c for c in COLUMNS if c != "click")

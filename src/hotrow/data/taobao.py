"""Taobao UserBehavior: one event per line, from Alibaba's Tianchi platform.

Layout of UserBehavior.csv: no header, comma-separated, five columns

    user id, item id, category id, behaviour (pv, cart, fav or buy), unix time in seconds

The file is sorted by user, and by time within a user. There are no impressions without a click, so the click task is
made from the events themselves: an event is positive where the user did more than look (cart, fav, buy) and negative
where it is a page view (pv); any other behaviour is a bad row. A schema with another `label.positive` changes that. The
split is by time over all users.
"""

from __future__ import annotations

from typing import Any

from hotrow.data.columns import ColumnsSource
from hotrow.data.schema import Schema, parse_schema

COLUMNS = ("user", "item", "category", "behaviour", "time")
LICENCE = "Alibaba Tianchi UserBehavior: terms of the Tianchi platform (not verified here); check them before sharing"

SCHEMA = parse_schema(
    {
        "label": {"column": "behaviour", "positive": ["cart", "fav", "buy"], "negative": ["pv"]},
        "time": "time",
        "categorical": [{"column": name, "type": "int"} for name in ("user", "item", "category")],
        "split": {"kind": "time"},
        "csv": {"column_names": list(COLUMNS), "delimiter": ","},
        "licence": LICENCE,
    },
    where="taobao",
)


def open_taobao(data: Any, schema: Schema = SCHEMA, **options: Any) -> ColumnsSource:
    """UserBehavior files as a source; `options` as for `ColumnsSource`."""
    return ColumnsSource(data, schema, name="taobao", **options)


def looks_like_taobao(line: str) -> bool:
    """Whether a file's first line has the layout above."""
    fields = line.split(",")
    return len(fields) == len(COLUMNS) and fields[3] in ("pv", "cart", "fav", "buy") and fields[4].isdecimal()

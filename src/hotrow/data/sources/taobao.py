"""Taobao UserBehavior: one event per line, from Alibaba's Tianchi platform.

Layout of UserBehavior.csv: no header, comma-separated, five columns

    user id, item id, category id, behaviour (pv, cart, fav or buy), unix time in seconds

The file is sorted by user, and by time within a user. There are no impressions without a click, so the click task is
made from the events themselves: an event is positive where the user did more than look (cart, fav, buy) and negative
where it is a page view (pv); any other behaviour is a bad row. A schema with another `label.positive` changes that. The
split is by time over all users.

Source `taobao-histories` makes the task of TBSM from the same file instead: which item comes next, after the up to 20
items and categories before it? The reference (facebookresearch/tbsm, with the preparation of MIMN before it) keeps a
user's last 200 events, draws up to 10 targets of a user of 40 or more and fewer of others, and as many negatives, whose
items are drawn uniformly from all distinct items, not in that user's history; the users whose last event is latest,
30 %, are the test, with one row each whose target is the last event or, by a coin, a random item. Here, as there, items
of negatives are uniform over distinct items, but over those seen before the target, because later ones would tell of
the future; targets are one in ten of a user's events, whatever comes later; the split is by the target's time; test
rows come in pairs. All behaviours count as events, as there. `histories.py` says how.
"""

from __future__ import annotations

from typing import Any

from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.histories import HistoriesSource, open_columns
from hotrow.data.sources.schema import Schema, parse_schema

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

HISTORIES_SCHEMA = parse_schema(
    {
        "label": "came",
        "time": "time",
        "categorical": [
            *({"column": name, "type": "int"} for name in ("user", "item", "category")),
            *({"column": f"{n}_history", "kind": "sequence", "table": n, "type": "int"} for n in ("item", "category")),
        ],
        "split": {"kind": "time"},
        "histories": {"user": "user", "item": "item", "length": 20, "every": 10},
        "csv": {"column_names": list(COLUMNS), "delimiter": ","},
        "licence": LICENCE,
    },
    where="taobao-histories",
)


def open_taobao(
    data: Any, schema: Schema = SCHEMA, *, name: str = "taobao", **options: Any
) -> ColumnsSource | HistoriesSource:
    """UserBehavior files as a source; `options` as for `ColumnsSource`."""
    return open_columns(data, schema, name=name, **options)


def looks_like_taobao(line: str) -> bool:
    """Whether a file's first line has the layout above."""
    fields = line.split(",")
    return len(fields) == len(COLUMNS) and fields[3] in ("pv", "cart", "fav", "buy") and fields[4].isdecimal()

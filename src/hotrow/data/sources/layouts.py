"""Published logs that are plain tables: Avazu, Taobao UserBehavior, MovieLens; each is a schema for `ColumnsSource`.

Avazu click-through rate prediction: ten days of mobile ads, from the Kaggle competition of 2014. train.csv has a
header and is comma-separated:

    id, click, hour (YYMMDDHH), C1, banner_pos, site_id, site_domain, site_category, app_id, app_domain, app_category,
    device_id, device_ip, device_model, device_type, device_conn_type, C14 .. C21

Ids are eight hex digits or small integers; both are kept as text. `hour` is the time of the split, not a feature; `id`
is unique per row and left out. test.csv lacks `click`: rows to predict.

Taobao UserBehavior: one event per line, from Alibaba's Tianchi platform. UserBehavior.csv has no header and is
comma-separated, five columns:

    user id, item id, category id, behaviour (pv, cart, fav or buy), unix time in seconds

The file is sorted by user, and by time within a user. There are no impressions without a click, so the click task is
made from the events themselves: an event is positive if the user did more than look (cart, fav, buy) and negative if it
is a page view (pv); any other behaviour is a bad row. A schema with another `label.positive` changes that. The split is
by time over all users.

Source `taobao-histories` makes TBSM's task from the same file instead: which item comes next, after the up to 20 items
and categories before it? The reference (facebookresearch/tbsm, with MIMN's preparation before it) keeps a user's last
200 events. From a user with 40 or more it draws up to 10 targets, from others fewer, and as many negatives; a
negative's item is drawn uniformly from all distinct items that are not in that user's history. The 30 % of users whose
last event is latest are the test, with one row each, whose target is the last event or, by a coin toss, a random item.
Here, too, items of negatives are uniform over distinct items, but only over those seen before the target, because later
ones would reveal the future; one in ten of a user's events is a target, whatever comes later; the split is by the
target's time; test rows come in pairs. As in the reference, all behaviours count as events. `histories.py` says how.

MovieLens ratings of the 100k, 1M, 10M, 20M, 25M and 32M archives, from GroupLens at the University of Minnesota. The
first line tells the layouts apart:

    ml-100k  u.data        no header, tab-separated:    user, movie, rating, unix time
    ml-1m    ratings.dat   no header, '::' between:     user, movie, rating, unix time     (ml-10m the same)
    ml-20m   ratings.csv   header, comma-separated:     userId,movieId,rating,timestamp    (ml-25m, ml-32m the same)

A rating of 4 or more is positive, one below is negative. The split is by time over all users.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.histories import HistoriesSource, open_columns
from hotrow.data.sources.inputs import find_files
from hotrow.data.sources.schema import Schema, parse_schema

AVAZU_FEATURES = (
    *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
    *("C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)
AVAZU_COLUMNS = ("id", "click", "hour", *AVAZU_FEATURES)

AVAZU_SCHEMA = parse_schema(
    {
        "label": "click",
        "time": "hour",
        "categorical": list(AVAZU_FEATURES),
        "split": {"kind": "time"},
        "csv": {"delimiter": ","},
        "licence": "Avazu CTR (Kaggle 2014): the competition's rules, which end use with the competition; check them",
    },
    where="avazu",
)


def open_avazu(data: Any, schema: Schema = AVAZU_SCHEMA, **options: Any) -> ColumnsSource:
    """Opens Avazu files as a source; `options` as for `ColumnsSource`."""
    return ColumnsSource(data, schema, name="avazu", **options)


def looks_like_avazu(line: str) -> bool:
    """Returns whether a file's first line is Avazu's header, with or without `click`."""
    return [n for n in line.split(",") if n != "click"] == [n for n in AVAZU_COLUMNS if n != "click"]


TAOBAO_LICENCE = (
    "Alibaba Tianchi UserBehavior: terms of the Tianchi platform (not verified here); check them before sharing"
)
TAOBAO_COLUMNS = ("user", "item", "category", "behaviour", "time")

TAOBAO_SCHEMA = parse_schema(
    {
        "label": {"column": "behaviour", "positive": ["cart", "fav", "buy"], "negative": ["pv"]},
        "time": "time",
        "categorical": [{"column": name, "type": "int"} for name in ("user", "item", "category")],
        "split": {"kind": "time"},
        "csv": {"column_names": list(TAOBAO_COLUMNS), "delimiter": ","},
        "licence": TAOBAO_LICENCE,
    },
    where="taobao",
)

TAOBAO_HISTORIES_SCHEMA = parse_schema(
    {
        "label": "came",
        "time": "time",
        "categorical": [
            *({"column": name, "type": "int"} for name in ("user", "item", "category")),
            *({"column": f"{n}_history", "kind": "sequence", "table": n, "type": "int"} for n in ("item", "category")),
        ],
        "split": {"kind": "time"},
        "histories": {"user": "user", "item": "item", "length": 20, "every": 10},
        "csv": {"column_names": list(TAOBAO_COLUMNS), "delimiter": ","},
        "licence": TAOBAO_LICENCE,
    },
    where="taobao-histories",
)


def open_taobao(
    data: Any, schema: Schema = TAOBAO_SCHEMA, *, name: str = "taobao", **options: Any
) -> ColumnsSource | HistoriesSource:
    """Opens UserBehavior files as a source; `options` as for `ColumnsSource`."""
    return open_columns(data, schema, name=name, **options)


def looks_like_taobao(line: str) -> bool:
    """Returns whether a file's first line has the layout of UserBehavior.csv."""
    fields = line.split(",")
    return len(fields) == len(TAOBAO_COLUMNS) and fields[3] in ("pv", "cart", "fav", "buy") and fields[4].isdecimal()


MOVIELENS_LICENCE = (
    "MovieLens (GroupLens, University of Minnesota): research use, no redistribution; see the archive's README"
)
MOVIELENS_COLUMNS = ("userId", "movieId", "rating", "timestamp")
MOVIELENS_FILES = ("ratings.csv", "ratings.dat", "u.data")


def movielens_schema(csv: dict[str, Any]) -> Schema:
    """Returns the schema of ratings whose text is cut as `csv` says."""
    return parse_schema(
        {
            "label": {"column": "rating", "at_least": 4},
            "time": "timestamp",
            "categorical": [{"column": name, "type": "int"} for name in ("userId", "movieId")],
            "split": {"kind": "time"},
            "csv": csv,
            "licence": MOVIELENS_LICENCE,
        },
        where="movielens",
    )


# Arrow splits at single characters, so '::' is two splits with an empty column between them.
MOVIELENS_CSV: dict[str, dict[str, Any]] = {
    "100k": {"delimiter": "\t", "column_names": list(MOVIELENS_COLUMNS)},
    "1m": {"delimiter": ":", "column_names": ["userId", "_1", "movieId", "_2", "rating", "_3", "timestamp"]},
    "20m": {"delimiter": ","},
}


def open_movielens(data: Any, schema: Schema | None = None, **options: Any) -> ColumnsSource:
    """Opens a ratings file, or the folder of an archive, as a source; `options` as for `ColumnsSource`.

    Raises ValueError if the first line has none of the three layouts.
    """
    if isinstance(data, str | Path) and Path(data).is_dir():
        data = next((Path(data) / name for name in MOVIELENS_FILES if (Path(data) / name).is_file()), data)
    if schema is None:
        file = find_files([data], matches=lambda name: name in MOVIELENS_FILES, wanted=", ".join(MOVIELENS_FILES))[0]
        line = file.first_line()
        layout = movielens_layout(line)
        if layout is None:
            raise ValueError(
                f"{file.name}:1: {line[:60]!r} is not a MovieLens rating; expected u.data, ratings.dat or ratings.csv"
            )
        schema = movielens_schema(MOVIELENS_CSV[layout])
    return ColumnsSource(data, schema, name="movielens", **options)


def movielens_layout(line: str) -> str | None:
    """Returns the layout ("100k", "1m", "20m") that a first line has, or None."""
    if line.split(",") == list(MOVIELENS_COLUMNS):
        return "20m"
    for layout, separator in (("1m", "::"), ("100k", "\t")):
        fields = line.split(separator)
        if len(fields) == len(MOVIELENS_COLUMNS) and all(f.replace(".", "", 1).isdecimal() for f in fields):
            return layout
    return None

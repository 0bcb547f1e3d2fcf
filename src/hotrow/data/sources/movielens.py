"""MovieLens ratings of the 100k, 1M, 10M, 20M, 25M and 32M archives, from GroupLens at the University of Minnesota.

Layouts, told apart by the first line:

    ml-100k  u.data        no header, tab-separated:    user, movie, rating, unix time
    ml-1m    ratings.dat   no header, '::' between:     user, movie, rating, unix time     (ml-10m the same)
    ml-20m   ratings.csv   header, comma-separated:     userId,movieId,rating,timestamp    (ml-25m, ml-32m the same)

A rating of 4 or more is positive, one below is negative. The split is by time over all users.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.inputs import find_files
from hotrow.data.sources.schema import Schema, parse_schema

COLUMNS = ("userId", "movieId", "rating", "timestamp")
FILES = ("ratings.csv", "ratings.dat", "u.data")
LICENCE = "MovieLens (GroupLens, University of Minnesota): research use, no redistribution; see the archive's README"


def movielens_schema(csv: dict[str, Any]) -> Schema:
    """The schema of ratings whose text is cut as `csv` says."""
    return parse_schema(
        {
            "label": {"column": "rating", "at_least": 4},
            "time": "timestamp",
            "categorical": [{"column": name, "type": "int"} for name in ("userId", "movieId")],
            "split": {"kind": "time"},
            "csv": csv,
            "licence": LICENCE,
        },
        where="movielens",
    )


# Arrow cuts at single characters: '::' is two cuts with an empty column between.
CSV_BY_LAYOUT: dict[str, dict[str, Any]] = {
    "100k": {"delimiter": "\t", "column_names": list(COLUMNS)},
    "1m": {"delimiter": ":", "column_names": ["userId", "_1", "movieId", "_2", "rating", "_3", "timestamp"]},
    "20m": {"delimiter": ","},
}


def open_movielens(data: Any, schema: Schema | None = None, **options: Any) -> ColumnsSource:
    """A ratings file, or the folder of an archive, as a source; `options` as for `ColumnsSource`.

    Raises ValueError where the first line has none of the layouts above.
    """
    if isinstance(data, str | Path) and Path(data).is_dir():
        data = next((Path(data) / name for name in FILES if (Path(data) / name).is_file()), data)
    if schema is None:
        file = find_files([data], matches=lambda name: name in FILES, wanted=", ".join(FILES))[0]
        line = file.first_line()
        layout = movielens_layout(line)
        if layout is None:
            raise ValueError(
                f"{file.name}:1: {line[:60]!r} is no MovieLens rating; expected u.data, ratings.dat or ratings.csv"
            )
        schema = movielens_schema(CSV_BY_LAYOUT[layout])
    return ColumnsSource(data, schema, name="movielens", **options)


def movielens_layout(line: str) -> str | None:
    """The layout ("100k", "1m", "20m") a first line has, or None."""
    if line.split(",") == list(COLUMNS):
        return "20m"
    for layout, separator in (("1m", "::"), ("100k", "\t")):
        fields = line.split(separator)
        if len(fields) == len(COLUMNS) and all(f.replace(".", "", 1).isdecimal() for f in fields):
            return layout
    return None

"""The raw sources by name, as `hotrow prepare SOURCE` knows them: how each is opened, and its schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hotrow.data.chunk import Source
from hotrow.data.sources.columns import ColumnsSource, format_of, input_files, is_paths
from hotrow.data.sources.convert import IdEncoding
from hotrow.data.sources.criteo import CATEGORY_NAMES, DENSE_NAMES, CriteoSource
from hotrow.data.sources.guess import Role, guess_columns
from hotrow.data.sources.histories import HistoriesSource, open_columns
from hotrow.data.sources.inputs import find_files
from hotrow.data.sources.layouts import (
    AVAZU_SCHEMA,
    TAOBAO_HISTORIES_SCHEMA,
    TAOBAO_SCHEMA,
    looks_like_avazu,
    looks_like_taobao,
    movielens_layout,
    open_avazu,
    open_movielens,
    open_taobao,
)
from hotrow.data.sources.schema import Schema, nearest, parse_schema
from hotrow.data.sources.synthetic import open_synthetic
from hotrow.data.sources.tabular import is_parquet

SOURCE_NAMES = (
    *("criteo", "avazu", "taobao", "taobao-histories", "movielens"),
    *("csv", "parquet", "jsonl", "frame", "synthetic", "auto"),
)
CRITEO_LICENCE = "Criteo AI Lab click logs: CC BY-NC-SA 4.0 for the 1TB set; the Kaggle set has its challenge's terms"

CRITEO_SCHEMA = parse_schema(
    {
        "label": "label",
        "dense": [{"column": name, "transform": "log1p_clip0"} for name in DENSE_NAMES],
        "categorical": list(CATEGORY_NAMES),
        "split": {"kind": "reference"},
        "licence": CRITEO_LICENCE,
    },
    where="criteo",
)


def looks_like_criteo(line: str) -> bool:
    """Returns whether a first line has Criteo's columns: perhaps a label, 13 integers, 26 categories of hex digits."""
    fields = line.split("\t" if "\t" in line else ",")
    names = [*DENSE_NAMES, *CATEGORY_NAMES]
    if [field.upper() for field in fields[-len(names) :]] == names:
        return True
    return len(fields) in (39, 40) and all(re.fullmatch("[0-9a-fA-F]{0,8}", field) for field in fields[-26:])


LAYOUTS: dict[str, Callable[[str], bool]] = {
    "criteo": looks_like_criteo,
    "avazu": looks_like_avazu,
    "taobao": looks_like_taobao,
    "movielens": lambda line: movielens_layout(line) is not None,
}
"""Functions that say whether a file's first line has the layout of a source."""


@dataclass(frozen=True)
class OpenedSource:
    """A source, with what preparation must know about it."""

    source: Source
    schema: Schema
    encodings: Mapping[str, IdEncoding]
    """How raw ids are held, by feature."""
    notes: tuple[str, ...] = ()
    """What was found out and not given."""
    warnings: tuple[str, ...] = ()
    """Columns that the user named although they seem to give the label away."""

    def with_options(self, **options: Any) -> OpenedSource:
        """Returns this source with its schema changed by `Schema.with_options`."""
        return replace(self, schema=self.schema.with_options(**options))


def open_source(
    name: str,
    data: Any,
    *,
    schema: Schema | None = None,
    label: str | None = None,
    time: str | None = None,
    roles: Mapping[str, Role] | None = None,
    labels: Literal["required", "alone", "ignored"] = "required",
    encodings: Mapping[str, IdEncoding] | None = None,
    skip_bad_rows: int = 0,
    rows: int | None = None,
) -> OpenedSource:
    """Opens the source called `name` on `data`: paths, or an Arrow-capable frame.

    schema: how to read columns; None: the source's own schema, or for csv, parquet, jsonl and frame a guess, which the
    names `label` and `time` and the `roles` of columns can help. labels: "alone": without times, to evaluate a model;
    "ignored": for rows to predict, whose label and time may be absent or hold anything. encodings: how ids were held
    when a data set was prepared. skip_bad_rows: how many rows may be bad. rows: how many a synthetic preset makes.

    Raises ValueError naming an unknown source, or what is wrong with the data.
    """
    if name not in SOURCE_NAMES:
        raise ValueError(
            f"source {name!r} is not known{nearest(name, SOURCE_NAMES)}; choose one of {', '.join(SOURCE_NAMES)}"
        )
    if skip_bad_rows < 0:
        raise ValueError(f"skip_bad_rows is {skip_bad_rows}; it must be at least 0")
    if name == "synthetic":
        if schema is not None or label is not None or time is not None:
            raise ValueError("source synthetic has its own schema, label and time; leave schema, label and time out")
        made, own_schema = open_synthetic(data, rows=rows)
        return OpenedSource(made, own_schema, dict.fromkeys(own_schema.feature_names, "int"))
    if name == "auto":
        told = schema is not None or label is not None or time is not None or bool(roles)
        name = tell_format(data) if told else _tell_source(data)
    if given := [what for what, column in (("label", label), ("time", time)) if column is not None]:
        if schema is not None:
            raise ValueError(f"{given[0]} helps to guess a schema, but a schema is given; name it there")
        if name not in ("csv", "parquet", "jsonl", "frame"):
            raise ValueError(f"source {name} has its own {given[0]}; leave it out, or prepare the file as csv")
    if schema is not None and schema.histories is not None and name in ("criteo", "avazu", "movielens"):
        raise ValueError(f"source {name} cannot make histories; use csv, parquet, jsonl or frame with this schema")
    if name == "criteo" and is_paths(data):
        paths = [data] if isinstance(data, str | Path) else list(data)
        criteo = CriteoSource(
            paths, labels="ignored" if labels == "ignored" else "required", skip_bad_rows=skip_bad_rows
        )
        return OpenedSource(criteo, schema or CRITEO_SCHEMA, dict.fromkeys(CATEGORY_NAMES, "int"))
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    options: dict[str, Any] = {"labels": labels, "encodings": encodings, "skip_bad_rows": skip_bad_rows}
    source: ColumnsSource | HistoriesSource
    if name == "movielens":
        source = open_movielens(data, schema, **options)
    elif name in ("taobao", "taobao-histories"):
        own = TAOBAO_SCHEMA if name == "taobao" else TAOBAO_HISTORIES_SCHEMA
        source = open_taobao(data, schema or own, name=name, **options)
    elif name == "avazu":
        source = open_avazu(data, schema or AVAZU_SCHEMA, **options)
    elif name == "criteo":
        source = ColumnsSource(data, schema or CRITEO_SCHEMA, name=name, **options)
    else:
        if schema is None:
            guess = guess_columns(data, label=label, time=time, roles=roles)
            schema, notes, warnings = guess.schema(), (guess.summary(),), guess.warnings
        source = open_columns(data, schema, name=name, **options)
    return OpenedSource(source, source.schema, source.encodings, (*notes, *source.notes), warnings)


def _tell_source(data: Any) -> str:
    return recognise(data) or tell_format(data)


def tell_format(data: Any) -> str:
    """Returns the name of the source that reads `data` by a schema: frame, parquet, jsonl or csv."""
    files = input_files(data)
    return "frame" if files is None else format_of(files[0])


def recognise(data: Any) -> str | None:
    """Returns the name of the source whose published layout the first file's first line has, or None."""
    if not is_paths(data):
        return None
    file = find_files([data] if isinstance(data, str | Path) else data, matches=bool, wanted="any file")[0]
    if is_parquet(file):
        return None
    line = file.first_line()
    for name, looks_like in LAYOUTS.items():
        if looks_like(line):
            return name
    return None


def check_split(opened: OpenedSource) -> None:
    """Raises ValueError if the schema asks for a reference split and the source has none."""
    if opened.schema.split.kind == "reference" and not isinstance(opened.source, CriteoSource):
        raise ValueError(
            f"--split reference is published for criteo only, not for {opened.source.name}; use time or random"
        )


def rows_per_file(opened: OpenedSource) -> list[int]:
    """Counts the rows of each file, as the reference split needs; reads every file once."""
    assert isinstance(opened.source, CriteoSource), "check_split"
    return [CriteoSource([file], labels="ignored").scout(count="exact").num_rows for file in opened.source.files]

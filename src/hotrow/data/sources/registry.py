"""The raw sources by name, as `hotrow prepare SOURCE` knows them: how each is opened, and its schema.

Criteo's has a file of its own. Two other published logs are plain tables, each with a schema for `ColumnsSource`;
docs/prepare.md has the layouts.

    avazu      train.csv of the Kaggle competition of 2014, with a header. Ids are eight hex digits or small integers;
               both are kept as text. `id` is unique for each row and left out. test.csv lacks `click`: rows to predict.
    taobao     UserBehavior.csv of Alibaba's Tianchi platform, without a header, sorted by user and time. It has events
               and no impressions, so an event is positive if the user did more than look (cart, fav, buy).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hotrow.base.progress import ProgressCallback
from hotrow.base.records import MAX_COUNT, nearest
from hotrow.data.cells import HEX, MISSING, IdEncoding
from hotrow.data.chunk import Source
from hotrow.data.sources.columns import ColumnsSource, format_of, input_files, is_paths, left_out
from hotrow.data.sources.criteo import CATEGORY_NAMES, DENSE_NAMES, CriteoSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.inputs import find_files
from hotrow.data.sources.options import ReadOptions, with_read_options
from hotrow.data.sources.schema import Schema, SplitSpec, parse_schema
from hotrow.data.sources.tabular import columnar_format

OF_ANY_COLUMNS = ("csv", "parquet", "feather", "orc", "jsonl", "frame")
"""Sources that a schema describes."""
SOURCE_NAMES = ("criteo", "avazu", "taobao", *OF_ANY_COLUMNS, "auto")
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
    return len(fields) in (39, 40) and all(
        field.strip() in MISSING or re.fullmatch(HEX, field) for field in fields[-26:]
    )


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


def looks_like_taobao(line: str) -> bool:
    """Returns whether a file's first line has the layout of UserBehavior.csv."""
    fields = line.split(",")
    return len(fields) == len(TAOBAO_COLUMNS) and fields[3] in ("pv", "cart", "fav", "buy") and fields[4].isdecimal()


# ---- by name

OWN_SCHEMAS = {"criteo": CRITEO_SCHEMA, "avazu": AVAZU_SCHEMA, "taobao": TAOBAO_SCHEMA}
LAYOUTS: dict[str, Callable[[str], bool]] = {
    "criteo": looks_like_criteo,
    "avazu": looks_like_avazu,
    "taobao": looks_like_taobao,
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
    """What was found out rather than given."""
    warnings: tuple[str, ...] = ()
    """Columns that the user named although they seem to give the label away."""
    choices: tuple[str, ...] = ()
    """Choices of a guessed schema that the user may want to change, columns that it leaves out among them."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data that are not read, each with the reason."""
    clock: Mapping[str, list[Any]] = field(default_factory=dict)
    """What a guessed schema gains if hours and weekdays are inputs."""

    def with_schema(self, schema: Schema) -> OpenedSource:
        """Returns this source of tables, whose columns are read by another schema."""
        own = self.source
        assert isinstance(own, ColumnsSource), "a source with its own reader has its own schema"
        source = ColumnsSource(None, schema, name=own.name, skip_bad_rows=own.skip_bad_rows, reader=own._reader)
        left_out = {name: why for name, why in self.left_out.items() if name not in schema.column_names}
        return replace(self, source=source, schema=schema, encodings=source.encodings, left_out=left_out)

    def with_options(self, **options: Any) -> OpenedSource:
        """Returns this source with its schema changed by `Schema.with_options`."""
        return replace(self, schema=self.schema.with_options(**options))


@with_read_options
def open_source(
    name: str,
    data: Any,
    *,
    read: ReadOptions,
    schema: Schema | None = None,
    split: SplitSpec = SplitSpec(),  # noqa: B008
    labels: Literal["required", "alone", "ignored"] = "required",
    encodings: Mapping[str, IdEncoding] | None = None,
    values: Literal["strict", "any"] = "strict",
    rows: int | None = None,
    keep: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> OpenedSource:
    """Opens the source called `name` on `data`: paths, or an Arrow-capable frame.

    schema: how to read columns. If None, the source's own schema is taken, or for csv, parquet, jsonl and frame a
    guess.
    {read}
    split: how rows will be split, so that a guess looks at labels of training rows alone.
    labels: "alone": without times, to evaluate a model; "ignored": for rows to predict, whose label and time may be
    absent or hold anything. encodings: how ids were held when a data set was prepared. values: "any", for rows to
    score: what is not of its column's kind is missing. rows: how many of the first rows are wanted. keep: columns that
    chunks also hold unchanged. progress: for a guess.

    Raises ValueError naming an unknown source, or what is wrong with the data.
    """
    if name not in SOURCE_NAMES:
        raise ValueError(
            f"source {name!r} is not known{nearest(name, SOURCE_NAMES)}; choose one of {', '.join(SOURCE_NAMES)}"
        )
    if rows is not None and rows > MAX_COUNT:
        raise ValueError(f"rows is {reprlib.repr(rows)}; it must be at most {MAX_COUNT:,}")
    if name == "auto":
        name = (None if schema is not None or read.hints else recognise(data)) or tell_format(data)
    if read.hints:
        if schema is not None:
            raise ValueError(f"{read.hints[0]} is a hint for guessing a schema, but a schema is given; say it there")
        if name not in OF_ANY_COLUMNS:
            raise ValueError(f"source {name} has its own schema; leave {read.hints[0]} out, or prepare the file as csv")
    options: dict[str, Any] = {"values": values, "skip_bad_rows": read.skip_bad_rows}
    if name == "criteo" and is_paths(data):
        for field in ("transforms", "weight", "at_serving"):
            if schema is not None and getattr(schema, field):
                cure = "name the source csv with this schema"
                raise ValueError(f"{field}: source criteo reads its columns alone; {cure}")
        if keep:
            raise ValueError(f"column {keep[0]!r} to keep is not there: Criteo's text has no names of columns")
        paths = [data] if isinstance(data, str | Path) else list(data)
        criteo = CriteoSource(paths, labels="ignored" if labels == "ignored" else "required", **options)
        return OpenedSource(criteo, schema or CRITEO_SCHEMA, dict.fromkeys(CATEGORY_NAMES, "int"))
    notes, guess, schema = tuple(filter(None, [left_out(data)])), None, schema or OWN_SCHEMAS.get(name)
    if schema is None:
        guess = guess_columns(data, split=split, rows=rows, progress=progress, **vars(read))
        schema, notes = guess.schema(), (*notes, guess.summary())
    options |= {"labels": labels, "encodings": encodings, "reader": guess and guess.reader}
    source = ColumnsSource(data, schema, name=name, keep=keep, **options)
    warnings, choices = (guess.warnings, guess.notes) if guess else ((), ())
    reasons = {each.column: each.reason for each in guess.of("")} if guess else {}
    used = {*source.schema.column_names}
    unused = [column for column in source.column_names if column not in used]
    unread = {column: reasons.get(column, "the schema does not list it") for column in unused}
    told, clock = (*notes, *source.notes), guess.clock if guess else {}
    return OpenedSource(source, source.schema, source.encodings, told, warnings, choices, unread, clock)


def tell_format(data: Any) -> str:
    """Returns the name of the source that reads `data` by a schema: frame, parquet, jsonl or csv."""
    files = input_files(data)
    return "frame" if files is None else format_of(files[0])


def recognise(data: Any) -> str | None:
    """Returns the name of the source whose published layout the first file's first line has, or None."""
    if not is_paths(data):
        return None
    file = find_files([data] if isinstance(data, str | Path) else data, matches=bool, wanted="any file")[0]
    if columnar_format(file) is not None:
        return None
    line = file.first_line()
    return next((name for name, looks_like in LAYOUTS.items() if looks_like(line)), None)


def check_split(opened: OpenedSource) -> None:
    """Raises ValueError if the schema asks for a reference split and the source has none."""
    if opened.schema.split.kind == "reference" and not isinstance(opened.source, CriteoSource):
        raise ValueError(
            f"split reference is published for criteo only, not for {opened.source.name}; use time or random"
        )

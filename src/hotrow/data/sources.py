"""The raw sources by name, as `hotrow prepare SOURCE` knows them: what opens each, and the schema it reads by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotrow.data.avazu import SCHEMA as AVAZU_SCHEMA
from hotrow.data.avazu import open_avazu
from hotrow.data.chunk import Source
from hotrow.data.columns import ColumnsSource
from hotrow.data.convert import IdEncoding
from hotrow.data.criteo import CATEGORY_NAMES, DENSE_NAMES, CriteoSource
from hotrow.data.guess import guess_schema
from hotrow.data.movielens import open_movielens
from hotrow.data.schema import Schema, nearest, parse_schema
from hotrow.data.taobao import SCHEMA as TAOBAO_SCHEMA
from hotrow.data.taobao import open_taobao

SOURCE_NAMES = ("criteo", "avazu", "taobao", "movielens", "csv", "parquet", "frame")
Labels = Literal["required", "auto"]
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


@dataclass(frozen=True)
class OpenedSource:
    """A source with what preparation must know of it."""

    source: Source
    schema: Schema
    encodings: Mapping[str, IdEncoding]
    """How raw ids are held, by feature."""
    notes: tuple[str, ...] = ()
    """What was found rather than told."""


def open_source(
    name: str,
    data: Any,
    *,
    schema: Schema | None = None,
    labels: Labels = "required",
    encodings: Mapping[str, IdEncoding] | None = None,
    skip_bad_rows: int = 0,
) -> OpenedSource:
    """The source called `name` over `data` (paths, or a frame for "frame").

    schema: how to read columns; None: the source's own, or a guess for csv, parquet and frame. labels: "auto" accepts
    rows without a label. encodings: how ids were held when a data set was prepared. skip_bad_rows: rows that may be bad.

    Raises ValueError naming an unknown source, and whatever opening it finds.
    """
    if name not in SOURCE_NAMES:
        raise ValueError(
            f"source {name!r} is not known{nearest(name, SOURCE_NAMES)}; choose one of {', '.join(SOURCE_NAMES)}"
        )
    if skip_bad_rows < 0:
        raise ValueError(f"skip_bad_rows is {skip_bad_rows}; it must be at least 0")
    if name == "criteo":
        paths = [data] if isinstance(data, str | Path) else list(data)
        criteo = CriteoSource(paths, labels=labels, skip_bad_rows=skip_bad_rows)
        return OpenedSource(criteo, schema or CRITEO_SCHEMA, dict.fromkeys(CATEGORY_NAMES, "int"))
    options: dict[str, Any] = {"labels": labels, "encodings": encodings, "skip_bad_rows": skip_bad_rows}
    if name == "movielens":
        source = open_movielens(data, schema, **options)
    elif name == "taobao":
        source = open_taobao(data, schema or TAOBAO_SCHEMA, **options)
    elif name == "avazu":
        source = open_avazu(data, schema or AVAZU_SCHEMA, **options)
    else:
        source = ColumnsSource(data, schema or guess_schema(data), name=name, **options)
    return OpenedSource(source, source.schema, source.encodings, source.notes)


def rows_per_file(opened: OpenedSource) -> list[int]:
    """Exact rows of each file, in order, which the reference split needs; reads every file once.

    Raises ValueError where the source has no reference split.
    """
    if not isinstance(opened.source, CriteoSource):
        raise ValueError(
            f"--split reference is published for criteo only, not for {opened.source.name}; use time or random"
        )
    return [CriteoSource([file.name], labels="auto").scout(count="exact").num_rows for file in opened.source.files]

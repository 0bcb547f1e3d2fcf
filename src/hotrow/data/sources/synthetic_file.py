"""Synthetic data as users ask for it: the name of a preset, or a YAML file; the source and schema that make it.

    hotrow prepare synthetic criteo-kaggle --rows 1000000 --out data/kaggle-like
    hotrow prepare synthetic clicks.yaml --out data/clicks

A file holds the fields of `SyntheticConfig`, or of `SyntheticPreset`. docs/prepare.md is for users.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hotrow.data.sources.schema import Schema, explain_faults, load_yaml, nearest, parse_schema
from hotrow.data.sources.synthetic import SyntheticSource
from hotrow.data.sources.synthetic_config import CHECKED, PRESETS, SyntheticConfig, SyntheticDense, SyntheticTable

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class SyntheticPreset:
    """A ready-made shape, and what may be changed of it."""

    __pydantic_config__ = CHECKED

    preset: str
    num_rows: int
    scale: float = 1.0
    """Share of their rows that tables of more than 1,000 get, at least 1,000."""
    drift: float = 0.0
    """Of every table."""
    name: str | None = None
    seed: int | None = None
    num_days: float | None = None
    base_rate: float | None = None
    main_strength: float | None = None
    pair_strength: float | None = None
    dense_strength: float | None = None
    """None, of this and the six before: the preset's."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            near = nearest(self.preset, tuple(PRESETS))
            raise ValueError(f"preset is {self.preset!r}, which is none{near}; choose one of {', '.join(PRESETS)}")
        self.config()

    def config(self) -> SyntheticConfig:
        """The whole data set."""
        chosen = {key: value for key, value in asdict(self).items() if value is not None}
        return PRESETS[chosen.pop("preset")](chosen.pop("num_rows"), **chosen)


def open_synthetic(data: Any, *, rows: int | None = None) -> tuple[SyntheticSource, Schema]:
    """The source that makes the rows, and the schema it is read by.

    data: the name of a preset, which then has `rows` rows; a YAML file; or a `SyntheticConfig`. Raises ValueError
    naming file and field where one is wrong.
    """
    config = data if isinstance(data, SyntheticConfig) else _find_config(data, rows)
    return SyntheticSource(config), _schema_of(config)


def _find_config(data: Any, rows: int | None) -> SyntheticConfig:
    if not isinstance(data, str | Path):
        raise ValueError(f"source synthetic takes one preset or one YAML file, not {data!r}")
    if str(data) in PRESETS:
        if rows is None:
            raise ValueError(f"preset {str(data)!r} has as many rows as you say; give rows (--rows 1000000)")
        return SyntheticPreset(preset=str(data), num_rows=rows).config()
    if Path(data).suffix not in SUFFIXES:
        raise ValueError(
            f"{str(data)!r} is no preset{nearest(str(data), tuple(PRESETS))}; choose one of {', '.join(PRESETS)}, or "
            "give a YAML file (docs/prepare.md has its fields)"
        )
    return parse_synthetic(load_yaml(data, cure="docs/prepare.md has an example"), where=str(data))


def parse_synthetic(value: Any, *, where: str) -> SyntheticConfig:
    """The data set that parsed YAML describes; `where` (a file name) begins every error.

    Raises ValueError naming the field, the value got and what is allowed.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: synthetic data is a mapping with num_rows, and tables or preset; got {value!r}")
    kind = SyntheticPreset if "preset" in value else SyntheticConfig
    try:
        # JSON mode: strict about scalars, while a list may stand for a tuple.
        made = TypeAdapter[Any](kind).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        sections = {"tables": SyntheticTable, "dense": SyntheticDense}
        known = {name: [f.name for f in fields(section)] for name, section in sections.items()}
        known[""] = [f.name for f in fields(kind)]
        raise ValueError(explain_faults(error, where, lambda loc: known[str(loc[0]) if loc else ""])) from None
    return made.config() if isinstance(made, SyntheticPreset) else made


def _schema_of(config: SyntheticConfig) -> Schema:
    return parse_schema(
        {
            "label": "label",
            "time": "time",
            "dense": [{"column": column.name, "transform": "log1p_clip0"} for column in config.dense],
            "categorical": [{"column": table.name, "kind": table.kind} for table in config.tables],
            "licence": "made up by hotrow: no terms",
        },
        where=f"synthetic data {config.name!r}",
    )

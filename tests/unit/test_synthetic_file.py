"""Synthetic data by name and by file: the same rows as the generator's, and errors that name file and field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotrow.data.sources.registry import open_source
from hotrow.data.sources.synthetic import SyntheticPreset, open_synthetic, parse_synthetic
from hotrow.data.sources.synthetic_config import (
    SyntheticConfig,
    SyntheticDense,
    SyntheticTable,
    criteo_kaggle,
    criteo_terabyte,
)

DOCS = Path(__file__).parents[2] / "docs" / "prepare.md"
TABLES = [
    {"name": "user", "num_embeddings": 1000, "zipf": 1, "drift": 0.3},
    {"name": "tags", "num_embeddings": 50, "kind": "multi_hot", "mean_length": 3},
]


def test_a_preset_has_the_rows_that_are_asked_for() -> None:
    source, schema = open_synthetic("criteo-kaggle", rows=500)
    assert source.config == criteo_kaggle(500)
    assert schema.feature_names == tuple(table.name for table in source.config.tables)


def test_a_file_is_read_into_the_config_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "clicks.yaml"
    path.write_text(yaml.safe_dump({"num_rows": 100, "tables": TABLES, "dense": [{"name": "price"}], "seed": 3}))
    source, schema = open_synthetic(path)
    tables = (
        SyntheticTable(name="user", num_embeddings=1000, zipf=1.0, drift=0.3),
        SyntheticTable(name="tags", num_embeddings=50, kind="multi_hot", mean_length=3.0),
    )
    want = SyntheticConfig(num_rows=100, tables=tables, dense=(SyntheticDense(name="price"),), seed=3)
    assert source.config == want
    assert [c.kind for c in schema.categorical] == ["one_hot", "multi_hot"]
    path.write_text("{preset: criteo-terabyte, num_rows: 10, scale: 0.01, drift: 0.5, seed: 4, base_rate: 0.1}")
    source, _ = open_synthetic(path)
    assert source.config == criteo_terabyte(10, scale=0.01, drift=0.5, seed=4, base_rate=0.1)


def test_the_documented_examples_are_read() -> None:
    section = DOCS.read_text().partition("## Synthetic data")[2].partition("\n## ")[0]
    preset, whole = (
        parse_synthetic(yaml.safe_load(text), where="docs")
        for text in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    )
    assert preset == criteo_terabyte(10_000_000, scale=0.01, drift=0.2)
    assert [table.kind for table in whole.tables] == ["one_hot", "one_hot", "multi_hot", "sequence"]
    for field in (field for kind in (SyntheticPreset, SyntheticConfig, SyntheticTable) for field in fields(kind)):
        assert re.search(rf"\b{field.name}\b", section), f"{field.name} is documented"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "x.yaml: synthetic data is a mapping with num_rows, and tables or preset; got"),
        ({"tables": TABLES}, "x.yaml: num_rows is missing; add it"),
        ({"num_rows": 5, "tables": []}, "x.yaml: tables is empty"),
        ({"num_rows": "many", "tables": TABLES}, "x.yaml: num_rows is 'many': it must be a whole number"),
        ({"num_rows": 5, "tabels": TABLES}, "x.yaml: unknown key 'tabels'; did you mean 'tables'"),
        ({"num_rows": 5, "tables": [{"name": "a"}]}, r"x.yaml: tables\[0\].num_embeddings is missing"),
        ({"num_rows": 5, "tables": [TABLES[0] | {"zip": 1}]}, r"unknown key 'tables\[0\].zip'; did you mean 'zipf'"),
        ({"num_rows": 5, "tables": [TABLES[0] | {"zipf": 9}]}, "table 'user': zipf is 9.* from 0 to 5"),
        ({"num_rows": 5, "tables": [TABLES[0] | {"kind": "bag"}]}, r"tables\[0\].kind is 'bag': .*'one_hot'"),
        ({"num_rows": 5, "tables": TABLES, "dense": [{"name": "p", "std": 1}]}, r"unknown key 'dense\[0\].std'"),
        ({"num_rows": 5, "preset": "kagle"}, "preset 'kagle' is not known.*choose one of criteo-kaggle, "),
        ({"num_rows": 5, "preset": "avazu", "scale": 2}, "scale is 2.* at most 1"),
        ({"num_rows": 5, "preset": "avazu", "tables": TABLES}, "unknown key 'tables'.*known: preset, num_rows, scale"),
        ({"num_rows": 0, "preset": "avazu"}, "num_rows is 0; it must be at least 1"),
    ],
)
def test_what_is_wrong_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_synthetic(value, where="x.yaml")


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("criteo-kaggle", {}, r"preset 'criteo-kaggle' makes as many rows as you ask for; give rows \(--rows"),
        ("criteo-kagle", {"rows": 5}, "'criteo-kagle' is not a preset; did you mean 'criteo-kaggle'"),
        ("none.yaml", {}, "none.yaml: No such file or directory; docs/prepare.md has an example"),
        (["a.yaml", "b.yaml"], {}, "takes one preset or one YAML file"),
        ("criteo-kaggle", {"rows": 5, "label": "click"}, "has its own schema, label and time"),
    ],
)
def test_what_cannot_be_opened(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source("synthetic", data, **options)


def test_times_are_those_of_the_rows() -> None:
    source, _ = open_synthetic("avazu", rows=3000)
    times = [time for part in source.times() for time in part.tolist()]
    assert times == [time for chunk in source.chunks() for time in (chunk.time if chunk.time is not None else [])]

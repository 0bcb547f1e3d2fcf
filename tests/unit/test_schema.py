"""The schema's words: what is accepted, and that every fault is named with its place, value and cure."""

import re
from pathlib import Path

import pytest
import yaml

from hotrow.data.sources import schema as words
from hotrow.data.sources.schema import load_schema, parse_schema
from loops import looped

MINIMAL = {"label": "click", "categorical": ["user", "item"]}


def test_bare_names_stand_for_columns_with_defaults() -> None:
    schema = parse_schema(MINIMAL | {"dense": ["price"], "time": "ts"}, where="s.yaml")
    assert schema.label.column == "click"
    assert schema.time is not None and schema.time.column == "ts"
    assert schema.dense[0].transform == "standardize"
    assert schema.feature_names == schema.table_names == ("user", "item")
    assert schema.column_names == ("click", "ts", "price", "user", "item")


def test_json_round_trip_keeps_everything() -> None:
    schema = parse_schema(
        {
            "label": {"column": "behaviour", "positive": ["buy", "cart"]},
            "time": {"column": "ts", "format": "%Y"},
            "dense": [{"column": "age", "transform": "identity"}],
            "categorical": [
                {"column": "item", "type": "int"},
                {"column": "seen", "kind": "sequence", "table": "item", "separator": "|"},
            ],
            "tables": {"item": {"min_count": 3, "hash_cap": 100}},
            "split": {"kind": "random", "fractions": [0.5, 0.25, 0.25], "seed": 7},
            "csv": {"delimiter": ";", "null_values": ["", "NA"]},
            "licence": "ours",
        },
        where="s.yaml",
    )
    assert parse_schema(schema.to_json(), where="again") == schema
    assert schema.features_of("item") == ("item", "seen")
    assert schema.table("item").hash_cap == 100


@looped(
    ("change", "message"),
    [
        ({"labels": "x"}, r"s\.yaml: unknown key 'labels'; did you mean 'label'\?; known: version, label"),
        ({"categorical": [{"column": "a", "knd": "x"}]}, r"unknown key 'categorical\[0\]\.knd'; did you mean 'kind'\?"),
        ({"categorical": [{"column": "a", "kind": "list"}]}, r"categorical\[0\]\.kind is 'list': .*'multi_hot'"),
        ({"categorical": []}, r"categorical is \[\]: .*at least 1"),
        ({"categorical": ["user", "click"]}, "categorical lists 'click', which is the label"),
        ({"dense": ["a", "a"]}, "dense lists column 'a' twice"),
        (
            {"label": {"column": "click", "name": "a"}, "dense": ["a"]},
            "label: a label is called 'a', as another column",
        ),
        ({"label": {"column": "click", "name": "user"}}, "label: a label is called 'user', as another column"),
        ({"label": {"column": "click", "name": "w"}, "weight": "w"}, "label: a label is called 'w', as another column"),
        ({"tables": {"usr": {}}}, "tables lists 'usr', which no feature uses; did you mean 'user'"),
        ({"label": {"column": "r", "positive": [1], "at_least": 4}}, "label: give either 'positive' or 'at_least'"),
        ({"split": {"fractions": [0.5, 0.1, 0.1]}}, r"split: fractions \[0.5, 0.1, 0.1\] must be .* sum 1"),
        ({"split": {"kind": "time"}}, "split.kind is 'time', but no time column is named; name one under 'time'"),
        ({"split": {"kind": "chrono"}}, "split.kind is 'chrono': .*'random'"),
        ({"tables": {"user": {"min_count": 0}}}, r"tables\.user\.min_count is 0: it must be at least 1"),
        ({"tables": {"user": {"min_count": "2"}}}, r"tables\.user\.min_count is '2'"),
        (
            {"tables": {"user": {"expire": {"unused_days": 0}}}},
            r"tables\.user\.expire\.unused_days is 0: it must be at",
        ),
        (
            {"tables": {"user": {"expire": {"days": 3}}}},
            r"unknown key 'tables\.user\.expire\.days'.* known: unused_days",
        ),
        ({"categorical": [{"column": "a", "buckets": [1, 1]}]}, r"categorical\[0\]: buckets: .*\[1\.0, 1\.0\]"),
        ({"categorical": [{"column": "a", "buckets": [1], "type": "int"}]}, "'buckets' cut single numbers"),
        ({"categorical": [{"column": "a", "separator": "|"}]}, "'separator' is for kind multi_hot or sequence"),
    ],
)
def test_faults_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_schema(MINIMAL | change, where="s.yaml")


def test_missing_keys_are_all_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"label is missing; add it\n.*categorical is missing; add it"):
        parse_schema({}, where="s.yaml")


def test_options_override_every_table_and_the_split() -> None:
    schema = parse_schema(MINIMAL | {"tables": {"user": {"hash_cap": 5}}}, where="s.yaml")
    changed = schema.with_options(split="random", seed=3, min_count=2)
    assert {n: t.min_count for n, t in changed.tables.items()} == {"user": 2, "item": 2}
    assert changed.table("user").hash_cap == 5
    assert (changed.split.kind, changed.split.seed) == ("random", 3)
    assert schema.with_options().table("user") == schema.table("user")


def test_file_errors_name_the_file(tmp_path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("label: [click\ncategorical: x")
    with pytest.raises(ValueError, match=rf"{path}.*line 2"):
        load_schema(path)
    with pytest.raises(ValueError, match="hotrow init"):
        load_schema(tmp_path / "none.yaml")
    path.write_text("\ufefflabel: click\ncategorical: [user]\n")
    assert load_schema(path).feature_names == ("user",)
    path.write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ValueError, match="could not determine a constructor"):
        load_schema(path)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "prepare.md"


def test_the_documented_example_is_a_schema() -> None:
    schemas = DOCS.read_text()
    (plain,) = re.findall(r"```yaml\n(.*?)```", schemas, re.DOTALL)
    schema = parse_schema(yaml.safe_load(plain), where="docs")
    assert schema.table_names == ("user_id", "item", "tags")


def test_every_field_is_documented() -> None:
    text = DOCS.read_text()
    for section, model in words.SECTIONS.items():
        prefix = {
            "dense": "dense[].", "categorical": "categorical[].", "tables": "tables.<name>.",
            "expire": "tables.<name>.expire.", "transforms": "transforms[].<name>.", "statistics": "statistics[].",
        }.get(section, f"{section}.")  # fmt: skip
        for name in model.model_fields:
            if section in ("dense", "categorical") and name == "column":
                continue
            assert f"`{prefix}{name}`" in text, f"docs/prepare.md does not explain {prefix}{name}"


@looped(
    "change",
    [
        {"label": 1}, {"label": {"column": 5}}, {"label": {"column": "a", "positive": []}}, {"categorical": {"a": 1}},
        {"label": {"column": "a", "positive": [[1]]}}, {"label": {"column": "a", "at_least": float("nan")}},
        {"categorical": [1]}, {"categorical": [{"column": "b", "kind": 5}]}, {"tables": {"user": 5}}, {"tables": []},
        {"split": "x"}, {"split": {"fractions": 1}}, {"split": {"seed": -1}}, {"version": 3}, {"version": "1"},
        {"licence": 5}, {"csv": {"delimiter": "ab"}}, {"dense": [{"column": "c", "transform": "x"}]},
        {"licence": "\ud800"},
    ],
)  # fmt: skip
def test_faults_are_told_in_our_words(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^s\.yaml: ") as told:
        parse_schema(MINIMAL | change, where="s.yaml")
    for theirs in ("Input should", "valid string", "validation", "Tuple", "pydantic"):
        assert theirs not in str(told.value)

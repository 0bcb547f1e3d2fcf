"""Guessed schemas: right on plain tables, readable back, and aloud about what they leave out."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from hotrow.config.load import make_config
from hotrow.data.chunk import RowError
from hotrow.data.prepare.init import render_schema, run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import Schema, load_schema
from hotrow.models import MODELS
from loops import looped

N = 2000


def guess_schema(source: Any, label: str | None = None, time: str | None = None) -> Schema:
    return guess_columns(source, label=label, time=time).schema()


def clicks(**more: object) -> pa.Table:
    rng = np.random.default_rng(0)
    zipf = rng.zipf(1.3, N) % 5000
    start = datetime.datetime(2024, 1, 1)
    return pa.table(
        {
            "row_id": np.arange(N),
            "ts": [start + datetime.timedelta(seconds=int(s)) for s in np.sort(rng.integers(0, 10**6, N))],
            "click": rng.integers(0, 2, N),
            "user_id": zipf,
            "item": [f"i{k}" for k in zipf],
            "weekday": rng.integers(0, 7, N),
            "price": rng.lognormal(0, 2, N),
            "temperature": rng.normal(10, 3, N).round(1),
            "num_clicks": rng.integers(0, 50, N),
            "mobile": rng.random(N) < 0.5,
            "tags": [[f"t{k}" for k in rng.integers(0, 20, rng.integers(0, 4))] for _ in range(N)],
            "recent_items": [rng.integers(0, 900, 5).tolist() for _ in range(N)],
            "genres": [rng.choice(["a|b", "b|c", "c"]) for _ in range(N)],
            "embedding": [[0.5, 0.25]] * N,
            "constant": ["x"] * N,
            "nothing": pa.nulls(N),
            **more,
        }
    )


def test_folders_that_name_a_column_are_all_looked_at(tmp_path: Path) -> None:
    for region in ("north", "south"):
        folder = tmp_path / f"region={region}" / "country=x"
        folder.mkdir(parents=True)
        pq.write_table(clicks(), folder / "part.parquet")
    guess = guess_columns(tmp_path)
    assert "text: 2 different values" in {g.column: g.reason for g in guess.of("categorical")}["region"]
    assert "the same value" in {g.column: g.reason for g in guess.of("")}["country"]


def test_each_sort_of_column_is_taken_for_what_it_is() -> None:
    schema = guess_schema(clicks())
    assert schema.label.column == "click"
    assert schema.time is not None and schema.time.column == "ts"
    assert {d.column: d.transform for d in schema.dense} == {
        "user_id": "log1p_clip0",  # low numbers come most often, as counts do, so they are both
        "price": "log1p_clip0",
        "temperature": "standardize",
    }
    kinds = {c.column: c.kind for c in schema.categorical}
    one_hot = dict.fromkeys(["user_id", "item", "weekday", "price", "temperature", "num_clicks", "mobile"], "one_hot")
    assert kinds == {**one_hot, "tags": "multi_hot", "recent_items": "sequence", "genres": "multi_hot"}
    assert {g.column for g in guess_columns(clicks()).of("")} == {"row_id", "embedding", "constant", "nothing"}


def test_written_schema_reads_back_as_guessed(tmp_path: Path) -> None:
    names = {"a: #b": "odd name", "yes": "a word YAML knows", "über/x": "no file name"}
    table = clicks(**{name: [f"v{i % 90}" for i in range(N)] for name in names})
    path = tmp_path / "schema.yaml"
    path.write_text(render_schema(guess_columns(table)))
    assert load_schema(path) == guess_schema(table)


def test_told_columns_win_and_absent_ones_are_named() -> None:
    table = clicks(installed=np.arange(N) % 2)
    assert guess_schema(table, label="installed").label.column == "installed"
    assert guess_schema(table, time="row_id").time.column == "row_id"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="label column 'clik' is not there; did you mean 'click'"):
        guess_schema(table, label="clik")
    with pytest.raises(ValueError, match=r"label column 'price' holds 2000 values from .*, not 0 and 1; say which are"):
        guess_schema(table, label="price")


def test_which_ratings_are_positive_is_asked() -> None:
    """Never assumed: whether 3 of 5 stars are liked decides what the model learns."""
    table = pa.table({"user": [i // 5 % 7 for i in range(250)], "rating": [1.0, 2.0, 3.5, 4.0, 5.0] * 50})
    asks = r"column 'rating' holds 5 values from 1 to 5, not 0 and 1; say which are positive.*--label 'rating >= 4'"
    for label in (None, "rating"):
        with pytest.raises(ValueError, match=asks):
            guess_schema(table, label=label)
    found = guess_schema(table, label="rating >= 3.5")
    assert (found.label.column, found.label.at_least, found.feature_names) == ("rating", 3.5, ("user",))
    odd = table.append_column("rating >= 4", pa.array([0, 0, 1, 1, 0] * 50))
    assert guess_schema(odd, label="rating >= 4").label.at_least is None, "a column of that name wins"
    with pytest.raises(ValueError, match="label column 'ratin' is not there; did you mean 'rating'"):
        guess_schema(table, label="ratin >= 4")


def test_two_columns_that_could_be_the_label_are_named() -> None:
    table = clicks(purchased=np.arange(N) % 3 == 0)
    guess = guess_columns(table)
    assert guess.of("label")[0].column == "click"
    assert "another column could be the label: purchased (--label purchased)" in guess.summary()
    plain = pa.table({"a b": [0, 1] * 50, "b": [1, 0] * 50, "user": list("abcde") * 20})
    with pytest.raises(ValueError, match="2 columns hold 0 and 1; say which is the label: --label 'a b', --label b"):
        guess_schema(plain)


def test_told_roles_hold_for_the_columns_they_name() -> None:
    roles = {"categorical": ["price"], "dense": ["weekday"], "lists": ["tags"]}
    schema = guess_columns(clicks(price=np.arange(N) % 50), **roles).schema()
    assert "price" in schema.feature_names and "weekday" in schema.dense_names
    assert {c.column: c.kind for c in schema.categorical}["tags"] == "multi_hot"
    for wrong, message in [
        ({"item": "dense"}, "dense lists column 'item', which holds string values that are not numbers"),
        ({"item": "lists"}, "lists lists column 'item', which holds single values"),
        ({"click": "dense"}, "column 'click' cannot be both dense and label"),
    ]:
        with pytest.raises(ValueError, match=message):
            guess_columns(clicks(), **{role: [name] for name, role in wrong.items()})


@looped(
    ("texts", "spec"),
    [
        (["2014-10-21 00:00:00", "2014-10-22 10:00:00"], {"column": "ts"}),
        (["21/10/2014 13:05", "01/10/2014 13:05"], {"column": "ts", "format": "%d/%m/%Y %H:%M"}),
        (["10/21/2014 13:05", "10/01/2014 13:05"], {"column": "ts", "format": "%m/%d/%Y %H:%M"}),
        (["Oct 21 2014 10:00:00", "Nov 02 2014 10:00:00"], {"column": "ts", "format": "%b %d %Y %H:%M:%S"}),
        (["14102100", "14112223"], {"column": "ts"}),
        (["05/10/2014 13:05", "01/10/2014 13:05"], None),
    ],
)
def test_times_in_text(texts: list[str], spec: dict[str, str] | None) -> None:
    table = pa.table({"click": [0, 0, 1, 1] * 25, "user": list("abcde") * 20, "ts": texts * 50})
    guess = guess_columns(table)
    if spec is not None:
        assert guess.of("time")[0].spec == spec
        return
    assert not guess.of("time")

    with pytest.raises(ValueError, match="time column 'ts' may be read as '%d/%m/%Y %H:%M' or '%m/%d/%Y %H:%M'"):
        guess_columns(table, time="ts")


def test_no_label_is_an_error_for_fit_and_a_blank_for_init() -> None:
    table = pa.table({"user": ["a", "b"] * 50, "x": [1.5, 2.5] * 50})
    with pytest.raises(ValueError, match=r"no column holds 0 and 1; column 'user' holds a, b; .*--label 'user = b'"):
        guess_schema(table)
    assert "FILL_IN" in render_schema(guess_columns(table))


def test_csv_without_header_gets_numbered_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("".join(f"{i % 2};u{i % 7};{i}.5\n" for i in range(50)))
    guess = guess_columns(path)
    assert guess.csv == {"delimiter": ";", "column_names": ["c0", "c1", "c2"]}
    assert guess.schema().label.column == "c0"


def test_the_index_that_pandas_writes_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(",click,user\n" + "".join(f"{i},{i % 2},u{i % 7}\n" for i in range(200)))
    guess = guess_columns(path)
    assert "column_names" not in guess.csv
    assert [g.column for g in guess.of("")] == [""]
    assert guess.schema().feature_names == ("user",)


def test_a_header_that_repeats_a_name_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("click,user,user,user (2)\n0,a,b,c\n1,c,d,e\n0,x,y,z\n")
    guess = guess_columns(path, label="click")
    assert [g.column for g in guess.guesses] == ["click", "user", "user (3)", "user (2)"]
    assert "column_names" not in guess.csv


@looped(
    ("text", "columns"),
    [
        ("a,a,n\nx,y,1\nx,z,2\n", ["a", "a (2)", "n"]),  # a name above numbers: a header
        ("a,,n\nx,y,1\nx,z,2\n", ["a", "", "n"]),
        ("1,label,n\nx,0,1\nx,1,2\n", ["1", "label", "n"]),
        ("x,y,\nx,z,2\nx,y,3\n", ["c0", "c1", "c2"]),  # a missing value above numbers
        ("a,a,b\nx,y,p\nx,z,q\n", ["c0", "c1", "c2"]),
        ("x,0,1\nx,1,2\n", ["c0", "c1", "c2"]),
    ],
)
def test_what_is_a_header(tmp_path: Path, text: str, columns: list[str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    assert [g.column for g in guess_columns(path).guesses] == columns


LAYOUTS = {"criteo": "\t".join(["0", *["1"] * 13, *["68fd1e64"] * 26]), "taobao": "1,2268318,2520377,pv,1511544070"}


@looped("source", LAYOUTS)
def test_known_layouts_need_no_schema(tmp_path: Path, source: str) -> None:
    path = tmp_path / "logs.txt"
    path.write_text(LAYOUTS[source] + "\n")
    result = run_init(path)
    assert result.commands[0].startswith(f"hotrow prepare {source} ") and result.schema is None
    assert yaml.safe_load(result.recipe)["data"] == f"data/{source}"


def test_files_are_written_once(tmp_path: Path) -> None:
    pq.write_table(clicks(), tmp_path / "x.parquet")
    result = run_init(tmp_path / "x.parquet", out=tmp_path / "new", data="data/mine")
    assert [path.name for path in result.files] == ["schema.yaml", "recipe.yaml"]
    assert load_schema(tmp_path / "new" / "schema.yaml").label.column == "click"
    with pytest.raises(ValueError, match=r"recipe\.yaml exists and will not be overwritten"):
        run_init(tmp_path / "x.parquet", out=tmp_path / "new")


def test_figures_behind_a_guess_are_in_the_json_alone(tmp_path: Path, command: Any) -> None:
    pq.write_table(clicks(), tmp_path / "x.parquet")
    found = command("init", tmp_path / "x.parquet", "--out", tmp_path / "new", "--json")["columns"]
    assert {own["column"] for own in found} == {*clicks().column_names}
    (user,) = (own for own in found if own["column"] == "user_id" and own["role"] == "categorical")
    assert "LogLoss" in user["evidence"] and user["reason"] in (schema := (tmp_path / "new/schema.yaml").read_text())
    assert not any(own["evidence"] in schema for own in found if own["evidence"])


@looped("model", MODELS)
def test_a_recipe_for_the_model_that_was_named(tmp_path: Path, model: str) -> None:
    pq.write_table(clicks().slice(0, 200), tmp_path / "x.parquet")
    raw = yaml.safe_load(run_init(tmp_path / "x.parquet", model=model).recipe)
    assert make_config(raw).model.name == model
    assert MODELS[model].small.keys() <= raw["model"].keys()


def test_hostile_names_stay_within_their_line() -> None:
    evil = 'x"}\n!!python/object/apply:os.system ["true"]'
    table = pa.table({"click": [0, 1] * 50, evil: [f"v{i % 9}" for i in range(100)]})
    text = render_schema(guess_columns(table))
    value = yaml.safe_load(text)
    assert value["categorical"][0]["column"] == evil
    assert json.dumps(evil) in text


def test_types_that_are_no_feature_are_left_out_aloud() -> None:
    spans = {
        "wait": pa.array([datetime.timedelta(seconds=i) for i in range(N)]),
        "clock": pa.array([datetime.time(i % 24) for i in range(N)]),
        "waits": pa.array([[datetime.timedelta(seconds=i)] for i in range(N)]),
        "every": pa.array([pa.MonthDayNano([i % 9, 2, 3]) for i in range(N)]),
    }
    left_out = {g.column: g.reason for g in guess_columns(clicks(**spans)).of("")}
    assert all(f"type {values.type} is not an id, a number" in left_out[name] for name, values in spans.items())


@looped("stray", ["7", "nan", "", "yes"])
@looped("label", ["click", None])
def test_a_stray_value_in_a_label_is_a_bad_row_and_no_rating(stray: str, label: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    labels = [str(i % 2) for i in range(50)]
    labels[20] = stray
    path.write_text("user,click\n" + "".join(f"u{i % 9},{value}\n" for i, value in enumerate(labels)))
    schema = guess_schema(path, label=label)
    assert (schema.label.column, schema.label.at_least) == ("click", None)
    with pytest.raises(RowError, match=r"rows.csv:22 \(click\): .* is not a label; it must be 0 or 1"):
        list(ColumnsSource(path, schema).chunks())
    (guess,) = guess_columns(path, label=label).of("label")
    assert "1 rows are neither 0 nor 1" in guess.reason


@looped("word", ["-Infinity", "inf"])
def test_a_number_that_is_none_is_a_bad_row_and_no_id(word: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    prices = [f"{i}.25" for i in range(50)]
    prices[20] = word
    path.write_text("user,price,click\n" + "".join(f"u{i % 9},{p},{i % 2}\n" for i, p in enumerate(prices)))
    schema = guess_schema(path)
    assert schema.dense_names == ("price",)
    with pytest.raises(RowError, match=rf"rows.csv:22 \(price\): '{word}' is not a finite float32 number"):
        list(ColumnsSource(path, schema).chunks())


@looped("stored", ["text", "int", "csv"])
def test_a_label_made_of_values(stored: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    actions = random.integers(0, 4, N)
    words = [str(action) if stored != "text" else ("pv", "cart", "buy", "fav")[action] for action in actions]
    table = pa.table({"user": random.integers(0, 50, N), "what": actions if stored == "int" else words})
    rule = "what = buy, cart" if stored == "text" else "what = 2,1"
    source: object = table
    if stored == "csv":
        source = tmp_path / "x.csv"
        pa.csv.write_csv(table, source)
    dataset = run_prepare("auto", source, tmp_path / "out", label=rule, split="random")
    labels = [pa.ipc.open_file(file).read_all()["what"] for file in dataset.path.glob("*/*.arrow")]
    assert sum(column.to_numpy().sum() for column in labels) == np.isin(actions, [1, 2]).sum()


def test_a_value_that_no_row_holds_is_named() -> None:
    with pytest.raises(ValueError, match="'what' holds pv, buy, never 'by'; did you mean 'buy'"):
        guess_schema(pa.table({"user": [1, 2, 3] * 9, "what": ["pv", "pv", "buy"] * 9}), label="what = by")


def test_spaces_around_a_value_need_not_be_told() -> None:
    table = pa.table({"user": [1, 2, 3] * 9, "what": [" pv", " pv", " buy"] * 9})
    assert guess_schema(table, label="what = buy").label.positive == (" buy",)

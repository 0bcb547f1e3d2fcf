"""Cells as people and programs write them: missing texts, money, odd cells, ids as floats, labels of words."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data.cells import MISSING
from hotrow.data.chunk import FEW_ODD, RowError, most_odd
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import Schema, load_schema, parse_schema
from loops import looped
from raw_rows import read
from sampled import sampled

BLANKS = ("  ", " NA ", "null ")
LOST = [*MISSING, *BLANKS]


def schema_of(**more: Any) -> Schema:
    value = {"label": "y", "dense": ["price"], "categorical": ["item", {"column": "code", "type": "int"}], **more}
    return parse_schema(value, where="test")


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Writes columns in the format of the suffix; text in every format."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        rows = zip(*columns.values(), strict=True)
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        rows = zip(*columns.values(), strict=True)
        lines = (",".join(f'"{value}"' for value in row) for row in [tuple(columns), *rows])
        path.write_text("\n".join(lines) + "\n", newline="")
    return path


@looped("suffix", [".csv", ".jsonl", ".parquet"])
def test_missing_is_missing_in_every_format(suffix: str, tmp_path: Path) -> None:
    n = len(LOST)
    columns = {"y": ["0", "1"] * n, "price": [*LOST, *["2.5"] * n], "item": [*LOST, *["i7"] * n]}
    columns["code"] = [*LOST, *["7"] * n]
    rows = read(ColumnsSource(write(tmp_path / f"x{suffix}", columns), schema_of()))
    assert np.isnan(rows["dense"][:n]).all() and rows["dense"][n:] == [[2.5]] * n
    assert rows["item"] == [None] * n + ["i7"] * n
    assert rows["code"] == [None] * n + [7] * n


def test_missing_is_missing_in_dictionaries_lists_and_floats() -> None:
    frame = pa.table(
        {
            "y": [0, 1, 0, 1],
            "price": [1.5, float("nan"), None, 2.0],
            "item": pa.array(["a", "NA", "", "a"]).dictionary_encode(),
            "code": [1.0, float("nan"), None, 516.0],
            "tags": [["t", "null"], [], None, ["NA"]],
        }
    )
    schema = schema_of(categorical=["item", "code", {"column": "tags", "kind": "multi_hot"}])
    rows = read(ColumnsSource(frame, schema))
    assert np.isnan([price for (price,) in rows["dense"]]).tolist() == [False, True, True, False]
    assert (rows["item"], rows["code"]) == (["a", None, None, "a"], [1, None, None, 516])
    assert rows["tags"] == [["t", None], [], [], [None]]


def test_a_user_says_which_texts_are_missing() -> None:
    frame = pa.table({"y": [0, 1, 0], "price": ["1", "2", ""], "item": ["NA", "", "-"], "code": ["1", "2", "3"]})
    assert read(ColumnsSource(frame, schema_of(csv={"null_values": ["", "-"]})))["item"] == ["NA", None, None]


@looped(
    ("cells", "spec", "want"),
    [
        (["$1,234.50", "$-3", "-$0.5", "$ 12", "7"], {"thousands": ",", "unit": "$"}, [1234.5, -3, -0.5, 12, 7]),
        (["12 %", "0.5%", "-3%"], {"unit": "%"}, [12, 0.5, -3]),
        (["1.234,5", "-7", "0,25", "1.234.567"], {"decimal": ",", "thousands": "."}, [1234.5, -7, 0.25, 1234567]),
        (["1 234,5", "1\u00a0234\u202f567,25", "8"], {"decimal": ",", "thousands": " "}, [1234.5, 1234567.25, 8]),
        (["12,5 €", "€ 3", "1e3 €"], {"decimal": ",", "unit": "€"}, [12.5, 3, 1000]),
        (["1,23,456", "12,345"], {"thousands": ","}, [123456, 12345]),
        (["1'234.5", "2"], {"thousands": "'"}, [1234.5, 2]),
        (["EUR 12.5", "3 EUR"], {"unit": "EUR"}, [12.5, 3]),
    ],
)
def test_numbers_as_people_write_them(cells: list[str], spec: dict[str, str], want: list[float]) -> None:
    n = len(cells)
    frame = pa.table({"y": [0] * n, "price": cells, "item": ["i"] * n, "code": ["1"] * n})
    rows = read(ColumnsSource(frame, schema_of(dense=[{"column": "price", **spec}])))
    assert rows["dense"] == [[np.float32(value)] for value in want]


@looped(
    ("cell", "spec"),
    [
        ("1.234,5", {"thousands": ","}), ("1,2345", {"thousands": ","}), ("12", {"unit": "%"}), ("€5", {"unit": "$"}),
        ("1,234", {}), ("$5", {}), ("1 2", {"decimal": ","}),
    ],
)  # fmt: skip
def test_a_number_against_its_columns_rule_is_odd(cell: str, spec: dict[str, str]) -> None:
    frame = pa.table({"y": [0], "price": [cell], "item": ["i"], "code": ["1"]})
    with pytest.raises(RowError, match=rf"\(price\): {re.escape(repr(cell))} is not"):
        read(ColumnsSource(frame, schema_of(dense=[{"column": "price", **spec}])))


def coins(n: int) -> list[int]:
    return np.random.default_rng(5).integers(0, 2, n).tolist()


def amounts(n: int, form: str) -> list[str]:
    draw = np.random.default_rng(3)
    found = []
    for value in draw.lognormal(6, 2, n):
        text = f"{value:,.2f}"
        swapped = text.translate(str.maketrans(",.", ".,"))
        found.append({"en": text, "de": swapped, "fr": swapped.replace(".", "\u202f"), "plain": f"{value:.2f}"}[form])
    return found


@looped(
    ("form", "before", "after", "spec"),
    [
        ("plain", "", "", {}),
        ("en", "$", "", {"thousands": ",", "unit": "$"}),
        ("en", "", "", {"thousands": ","}),
        ("de", "", " €", {"decimal": ",", "thousands": ".", "unit": "€"}),
        ("de", "", "", {"decimal": ",", "thousands": "."}),
        ("fr", "", " €", {"decimal": ",", "thousands": " ", "unit": "€"}),
        ("plain", "", " %", {"unit": "%"}),
        ("plain", "CHF ", "", {"unit": "CHF"}),
    ],
)
def test_the_guess_finds_how_numbers_are_written(form: str, before: str, after: str, spec: dict[str, str]) -> None:
    n = 1200
    cells = [f"{before}{cell}{after}" for cell in amounts(n, form)]
    cells[5], cells[700] = "NA", "on request"
    frame = pa.table({"y": coins(n), "price": cells, "item": [f"i{i % 50}" for i in range(n)]})
    schema = guess_columns(frame, label="y").schema()
    (dense,) = schema.dense
    signs = dense.model_dump(exclude_defaults=True)
    assert {name: signs[name] for name in signs if name not in ("column", "transform")} == spec
    values = np.array(read(ColumnsSource(frame, schema))["dense"])[:, 0]
    truth = np.array([float(cell) for cell in amounts(n, "plain")], np.float32)
    assert np.flatnonzero(np.isnan(values)).tolist() == [5, 700]
    assert (values[~np.isnan(values)] == truth[~np.isnan(values)]).all()


@looped(
    "cells",
    [
        ["007", "012"], ["10.0.0.1", "192.168.1.10"], ["1.10.2", "2.0.13"], ["555-1234", "555-9876"],
        ["101 202", "303 404"], ["101,202", "303,404,505"], ["9223372036854775808", "1"], ["A12", "B7"], ["12kg", "7m"],
    ],
)  # fmt: skip
def test_codes_stay_text(cells: list[str]) -> None:
    frame = pa.table({"y": coins(200 * len(cells)), "code": cells * 200})
    schema = guess_columns(frame, label="y").schema()
    assert schema.dense == () and schema.feature_names == ("code",)
    assert read(ColumnsSource(frame, schema))["code"][:2] == cells


def test_ids_as_floats_are_whole_numbers(tmp_path: Path) -> None:
    """As pandas writes integers with gaps."""
    n = 400
    columns = {"y": [str(y) for y in coins(n)], "code": ["" if i % 7 == 0 else f"{i % 40}.0" for i in range(n)]}
    path = write(tmp_path / "x.csv", columns)
    want = [None if i % 7 == 0 else i % 40 for i in range(n)]
    schema = guess_columns(path, label="y", categorical=["code"]).schema()
    assert schema.categorical[0].type == "int"
    assert read(ColumnsSource(path, schema))["code"] == want
    frame = pa.table({"y": coins(n), "code": [None if v is None else float(v) for v in want]})
    assert read(ColumnsSource(frame, schema))["code"] == want


N = 3000


def logs(**changed: list[str]) -> dict[str, list[str]]:
    draw = np.random.default_rng(1)
    columns = {
        "click": [str(v) for v in draw.integers(0, 2, N)],
        "ts": [f"{1_700_000_000 + 7 * i}" for i in range(N)],
        "price": [f"{v:.2f}" for v in draw.lognormal(2, 1, N)],
        "user": [str(v) for v in draw.integers(1, 100_000, N) // 300],
        "item": [f"i{v}" for v in draw.integers(0, 60, N)],
    }
    return columns | changed


def with_cell(values: list[str], **cells: str) -> list[str]:
    return [cells.get(f"_{i}", value) for i, value in enumerate(values)]


@looped("cell", ["NA", "n.a.", ""])
def test_one_cell_does_not_change_a_column(cell: str, tmp_path: Path) -> None:
    columns = logs()
    path = write(tmp_path / "x.csv", {**columns, "price": with_cell(columns["price"], _77=cell)})
    said: list[str] = []
    dataset = run_prepare("csv", path, tmp_path / "out", announce=said.append)
    assert Encoder.load(dataset).schema.dense_names == ("price",)
    summary = dataset.info.summary
    assert summary["missing"] == {"price": 1} and summary["rows_skipped"] == 0
    assert any("price 1 " in line for line in said)
    if cell == "n.a.":
        assert summary["odd"]["price"]["cells"] == 1  # type: ignore[call-overload, index]
        assert any(f"{path}:79 (price): 'n.a.'" in line for line in said), "the row and the value are named"


@looped(("cell", "form"), [("", "int"), ("soon", "iso"), ("NaN", "float"), ("x", "float")])
def test_one_row_without_a_time_is_left_out_and_the_split_is_by_time(cell: str, form: str, tmp_path: Path) -> None:
    forms = {
        "int": [f"{1_700_000_000 + 7 * i}" for i in range(N)],
        "float": [f"{1_700_000_000 + 7 * i}.25" for i in range(N)],
        "iso": [f"2024-03-01 {i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}" for i in range(N)],
    }
    path = write(tmp_path / "x.csv", logs(ts=with_cell(forms[form], _1200=cell)))
    dataset = run_prepare("csv", path, tmp_path / "out")
    schema: Any = dataset.info.ids["schema"]
    assert schema["time"]["column"] == "ts" and schema["split"]["kind"] == "time"
    assert sum(split.num_rows for split in dataset.info.splits.values()) == N - 1
    assert dataset.info.summary["rows_skipped"] == 1
    assert dataset.info.summary["odd"]["ts"]["cells"] == 1  # type: ignore[call-overload, index]


def test_times_with_blanks_around_them_split_the_rows() -> None:
    """Text files lose such blanks when they are read; Parquet and frames keep them."""
    times = [f" {1_700_000_000 + i} " for i in range(400)]
    clicks, items = [int(i % 3 == 0) for i in range(400)], [f"i{i % 7}" for i in range(400)]
    table = pa.table({"click": clicks, "ts": times, "item": items})
    schema = guess_columns(table, label="click").schema()
    assert schema.time is not None and schema.time.column == "ts"
    source = ColumnsSource(table, schema)
    assert np.concatenate([chunk.time for chunk in source.chunks()]).tolist() == [1_700_000_000 + i for i in range(400)]


def test_a_time_with_gaps_is_named_with_what_splits_by_it(tmp_path: Path) -> None:
    columns = logs()
    path = write(tmp_path / "x.csv", {**columns, "ts": ["" if i % 20 == 3 else t for i, t in enumerate(columns["ts"])]})
    guess = guess_columns(path)
    assert guess.split_kind == "random"
    (note,) = [note for note in guess.notes if "ts" in note]
    found = re.search(r"--time ts --skip-bad-rows (\d+)", note)
    assert found is not None
    made = run_prepare("csv", path, tmp_path / "out", time="ts", skip_bad_rows=int(found[1]))
    assert made.info.summary["rows_skipped"] == N // 20
    assert made.info.ids["schema"]["split"]["kind"] == "time"  # type: ignore[call-overload, index]


def test_more_odd_cells_than_the_share_are_refused_with_a_cure_that_works(tmp_path: Path) -> None:
    columns = logs()
    prices = [*columns["price"][:200], *(["call us"] * 40), *columns["price"][240:]]
    path = write(tmp_path / "x.csv", {**columns, "price": prices})
    schema = {"label": "click", "dense": ["price"], "categorical": ["item"], "split": {"kind": "random"}}
    allowed = most_odd(N, Schema.model_fields["odd_share"].default)
    assert allowed == FEW_ODD
    with pytest.raises(RowError, match=rf"x.csv:{202 + allowed} \(price\): 'call us'") as error:
        run_prepare("csv", path, tmp_path / "a", schema=parse_schema(schema, where="test"))
    for option in ("null_values", "odd_share", "skip_bad_rows"):
        assert option in str(error.value)
    told = {"null_values": ["", "call us"]}
    cures: Any = [({"csv": told}, {}), ({"odd_share": 0.05}, {}), ({}, {"skip_bad_rows": 40})]
    for i, (more, options) in enumerate(cures):
        made = run_prepare("csv", path, tmp_path / f"b{i}", schema=parse_schema(schema | more, where="test"), **options)
        assert made.info.summary["rows_skipped"] == (40 if options else 0)


def test_counts_do_not_depend_on_chunks(tmp_path: Path) -> None:
    from hotrow.data.prepare.pipeline import Options, prepare
    from hotrow.data.sources.registry import open_source

    columns = logs()
    prices = with_cell(columns["price"], _9="x", _10="NA", _2999="y")
    times = with_cell(columns["ts"], _63="", _64="later", _2998="")
    path = write(tmp_path / "x.csv", {**columns, "price": prices, "ts": times})
    made = [
        prepare(open_source("csv", path), tmp_path / f"{size}", Options(rows_per_chunk=size)).path / "dataset.json"
        for size in (64, 1000, 65536)
    ]
    assert len({file.read_bytes() for file in made}) == 1
    summary = json.loads(made[0].read_text())["summary"]
    assert (summary["missing"], summary["rows_skipped"]) == ({"price": 3}, 3)
    assert {name: odd["cells"] for name, odd in summary["odd"].items()} == {"price": 2, "ts": 3}


@looped(
    ("pair", "label"),
    sampled(
        ["no yes", "No Yes", "N Y", "f t", "False True", "false true", "-1 1", "0.0 1.0"], [None, "click"], pairs=False
    ),
)
def test_labels_of_plain_meaning(pair: str, label: str | None, tmp_path: Path) -> None:
    """The positive value is the rarer one here, and then the more frequent one."""
    no, yes = pair.split()
    for rare in (1, 0):
        want = [int((i % 10 == 0) == bool(rare)) for i in range(N)]
        path = write(tmp_path / f"{rare}.csv", logs(click=[yes if value else no for value in want], ts=["7"] * N))
        schema = guess_columns(path, label=label).schema()
        assert schema.label.column == "click"
        assert read(ColumnsSource(path, schema))["label"] == want


def test_labels_of_minus_one_and_one_in_a_frame() -> None:
    for kind in (pa.int8(), pa.float64()):
        frame = pa.table({"click": pa.array([-1, 1, 1] * 100, kind), "item": [f"i{v}" for v in coins(300)]})
        assert read(ColumnsSource(frame, guess_columns(frame).schema()))["label"] == [0, 1, 1] * 100


@looped(
    ("values", "want"),
    [
        (["clicked"] * 8 + ["not clicked"] * 2, "clicked"),
        (["view"] * 8 + ["buy"] * 2, "buy"),
        (["no sale", "sale", "sale"], "sale"),
        (["pv"] * 9 + ["fav"] * 3 + ["buy"], "buy"),
    ],
)
def test_the_rule_that_is_proposed_names_the_positive_value_and_works(values: list[str], want: str) -> None:
    frame = pa.table({"user": [f"u{v}" for v in coins(100 * len(values))], "outcome": values * 100})
    with pytest.raises(ValueError, match=r"--label") as error:
        guess_columns(frame).schema()
    rule = re.search(r"label='([^']*)'", str(error.value))
    assert rule is not None and rule[1] == f"outcome = {want}"
    schema = guess_columns(frame, label=rule[1]).schema()
    assert read(ColumnsSource(frame, schema))["label"] == [float(value == want) for value in values] * 100


def test_one_and_two_are_a_label_by_rule_only() -> None:
    frame = pa.table({"user": [f"u{i % 7}" for i in range(300)], "click": [1 + i % 2 for i in range(300)]})
    with pytest.raises(ValueError, match="--label 'click >= 2'"):
        guess_columns(frame, label="click")


@looped("suffix", [".csv", ".jsonl", ".parquet"])
def test_predict_reads_cells_as_prepare_does(suffix: str, tmp_path: Path) -> None:
    columns = logs()
    draw = np.random.default_rng(4)
    columns["price"] = [f"{cell.replace('.', ',')} €" for cell in columns["price"]]
    for name in ("price", "user", "item"):
        for row in draw.choice(N, 300, replace=False):
            columns[name][row] = str(draw.choice(LOST))
    path = write(tmp_path / f"x{suffix}", columns)
    dataset = run_prepare("auto", path, tmp_path / "out")
    assert dataset.info.summary["missing"] == {"price": 300, "user": 300, "item": 300}
    raw = Encoder.load(dataset)
    (batch,) = raw.batches(path)
    train = dataset.split("train")
    first = train.block(0)
    n = len(first.label)  # split by time, and the rows are in its order
    num_numbers = len(raw.schema.dense_names)  # the others are statistics, which grow from row to row in training
    assert num_numbers == 1
    assert np.array_equal(np.stack(first.dense[:num_numbers], 1), batch.dense.numpy()[:n, :num_numbers])
    for name, ids in zip(dataset.info.feature_names, first.ids, strict=True):
        assert np.array_equal(ids, batch.sparse.bags(name)[0].numpy()[:n])


def test_init_writes_how_cells_are_read(tmp_path: Path) -> None:
    columns = logs()
    price = [f"$ {cell}" if i % 9 else "NA" for i, cell in enumerate(columns["price"])]
    path = write(tmp_path / "x.csv", columns | {"price": price})
    run_init(path, out=tmp_path / "conf")
    schema = load_schema(tmp_path / "conf" / "schema.yaml")
    assert schema.dense[0].unit == "$"
    assert "null_values" in (tmp_path / "conf" / "schema.yaml").read_text()
    assert schema == guess_columns(path).schema()

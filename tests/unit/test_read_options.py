"""What users say about files without a schema: one list of options, which every way in takes, with the same effect."""

import csv
import json
import re
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.main import get_command

import hotrow
from hotrow.cli import app as cli
from hotrow.data.cells import MISSING
from hotrow.data.chunk import RowError
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.options import NAMES, ReadOptions
from hotrow.data.sources.schema import parse_schema
from loops import looped
from raw_rows import read

N = 400
SMALL = {"batch_size": 64, "epochs": 1, "embedding_dim": 2, "bottom_mlp": [4], "top_mlp": [4], "threads": 1}
TOLD: dict[str, Any] = {
    "label": "click", "objective": "squared_error", "weight": "paid", "time": "seen", "time_format": "%d/%m/%Y",
    "categorical": ["age"], "dense": ["level"], "lists": ["tags"], "text": ["zip"], "exclude": ["note"],
    "null_values": ["-"], "skip_bad_rows": 1, "at_serving": ["zip=7"],
}  # fmt: skip
"""Every option, each with an effect on `logs`."""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with (tmp_path / "logs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["click", "seen", "age", "level", "tags", "zip", "note", "item", "paid"])
        for i in range(N):
            numbers = [
                i % 50, i % 3, "a|b" if i % 2 else "c", f"{i % 40}", f"n{i % 9}", "-" if i % 5 else f"i{i % 7}",
                1 + i % 2,
            ]  # fmt: skip
            rows.writerow(["" if i == 7 else draw.integers(2), f"{1 + i // 40:02}/02/2024", *numbers])
    return tmp_path / "logs.csv"


def flags(told: dict[str, Any]) -> list[str]:
    typed = []
    for name, value in told.items():
        for item in value if isinstance(value, list) else [value]:
            typed += [f"--{name.replace('_', '-')}", str(item)]
    return typed


def kinds(dataset: PackedDataset) -> dict[str, Any]:
    schema: Any = dataset.info.ids["schema"]
    return {name: schema[name] for name in ("label", "weight", "time", "dense", "categorical")} | {
        "nulls": schema["csv"]["null_values"],
        "at_serving": schema["at_serving"],
        "rows": sum(split.num_rows for split in dataset.info.splits.values()),
    }


def test_every_way_in_takes_every_option() -> None:
    verbs = get_command(cli.app).commands  # type: ignore[attr-defined]
    for verb in ("fit", "init", "prepare"):
        assert {*NAMES} <= {option.name for option in verbs[verb].params}, verb
    for function in (hotrow.fit, run_prepare, run_init, guess_columns):
        assert {*NAMES} <= {*signature(function).parameters}
        assert all(f"{name}: " in (function.__doc__ or "") for name in NAMES), "help() has them"
    assert {*TOLD} == {*NAMES}, "the tests below say each"


def test_every_option_means_the_same_everywhere(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    by_python = kinds(run_prepare("csv", logs, tmp_path / "a", **TOLD))
    assert by_python["rows"] == N - 1
    assert by_python["weight"] == {"column": "paid"}
    assert by_python["time"] == {"column": "seen", "format": "%d/%m/%Y"}
    assert [column["column"] for column in by_python["dense"]] == ["level"]
    assert {c["column"]: (c["kind"], c["type"]) for c in by_python["categorical"]} == {
        "age": ("one_hot", "int"),
        "tags": ("multi_hot", None),
        "zip": ("one_hot", "text"),
        "item": ("one_hot", None),
    }
    assert by_python["nulls"] == [*MISSING, "-"] and by_python["at_serving"] == {"zip": "7"}
    command("prepare", "csv", logs, "--out", "b", *flags(TOLD))
    assert kinds(PackedDataset.open(tmp_path / "b")) == by_python
    run = hotrow.fit(logs, run=tmp_path / "run", quiet=True, choice=False, **TOLD, **SMALL)
    assert kinds(PackedDataset.open(run.path / "data")) == by_python
    small = [part for name, value in SMALL.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    made = command("fit", logs, *flags(TOLD), *small, "--no-choice", "--json")
    assert kinds(PackedDataset.open(Path(made["run_dir"]) / "data")) == by_python
    line = command("init", logs, *flags(TOLD), "--out", "conf", "--json")["next"][0]
    command(*shlex.split(line)[1:])
    assert kinds(PackedDataset.open(tmp_path / "data" / "packed")) == by_python


def test_one_missing_label_is_passed_by_what_the_error_proposes(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {name: value for name, value in TOLD.items() if name != "skip_bad_rows"}
    with pytest.raises(RowError) as error:
        hotrow.fit(logs, run=tmp_path / "run", quiet=True, **told, **SMALL)
    flag = re.search(r"--skip-bad-rows", str(error.value))
    assert flag is not None
    assert "skip_bad_rows=" in str(error.value), "people in Python have no flags"
    small = [part for name, value in SMALL.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    command("fit", logs, *flags(told), flag[0], "1", *small, "--no-choice")


@looped(
    ("told", "message"),
    [
        ({"exclude": ["note"], "dense": ["note"]}, "column 'note' is listed in dense and in exclude"),
        ({"text": "zip"}, r"text is the text 'zip'; give a list of names: text=\['zip'\]"),
        ({"at_serving": ["position"]}, "at_serving is 'position'; write COLUMN=VALUE"),
        ({"null_values": [5]}, r"null_values is \[5\]; give a list of texts"),
        ({"time_format": "%Y"}, "time_format needs time"),
        ({"skip_bad_rows": -1}, "skip_bad_rows is -1"),
        ({"skip_bad_rows": True}, "skip_bad_rows is True"),
    ],
)
def test_wrong_options_are_named(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReadOptions(**told)


def test_a_misspelt_option_of_fit_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown option 'catgorical'; did you mean 'categorical'"):
        hotrow.fit("absent.csv", catgorical=["user"])


@pytest.mark.parametrize("made", ["", None], ids=["text", "null"])
@pytest.mark.parametrize("role", ["categorical", "dense", "text"])
def test_a_column_that_is_empty_in_the_sample_goes_in_either_list(made: str | None, role: str, tmp_path: Path) -> None:
    columns = {"click": [i % 2 for i in range(N)], "item": [f"i{i % 9}" for i in range(N)]}
    frame = pa.table({**columns, "late": pa.nulls(N, pa.string() if made == "" else pa.null())})
    assert "late" not in guess_columns(frame, label="click").schema().column_names
    schema = guess_columns(frame, label="click", **{role: ["late"]}).schema()
    assert "late" in (schema.dense_names if role == "dense" else schema.feature_names)
    assert len(read(ColumnsSource(frame, schema))["label"]) == N
    run_prepare("frame", frame, tmp_path / "a", label="click", split="random", **{role: ["late"]})


def test_what_is_left_out_is_no_label_and_no_time() -> None:
    columns = {"click": [i % 2 for i in range(N)], "sold": [i % 3 % 2 for i in range(N)], "user": ["a", "b"] * (N // 2)}
    frame = pa.table({**columns, "ts": [1_700_000_000 + i for i in range(N)]})
    schema = guess_columns(frame, exclude=["click", "ts"]).schema()
    assert (schema.label.column, schema.time) == ("sold", None)
    with pytest.raises(ValueError, match="column 'click' cannot be both exclude and label; name it once"):
        guess_columns(frame, label="click", exclude=["click"])


FAULTS = {
    "no label": ({"y": pa.array([0, None])}, {}),
    "label of words": ({"y": ["0", "guest"]}, {}),
    "no number": ({"d": ["1", "x"]}, {"dense": ["d"]}),
    "no time": ({"t": ["2024-01-01", "soon"]}, {"time": "t"}),
    "no integer": ({"a": ["1", "x"]}, {"categorical": [{"column": "a", "type": "int"}]}),
    "a fraction": ({"a": [1.0, 2.5]}, {}),
    "above at_least": ({"y": ["1", "x"]}, {"label": {"column": "y", "at_least": 1}}),
}


@pytest.mark.parametrize("columns, schema", FAULTS.values(), ids=list(FAULTS))
def test_nothing_is_proposed_twice(columns: dict[str, Any], schema: dict[str, Any]) -> None:
    frame = pa.table({"y": [0, 1], "a": [1, 2], "d": [1, 2], "t": [1, 2]} | columns)
    with pytest.raises(RowError) as error:
        read(ColumnsSource(frame, parse_schema({"label": "y", "categorical": ["a"]} | schema, where="test")))
    assert str(error.value).count("correct") == 1
    assert str(error.value).count("skip_bad_rows") == 1

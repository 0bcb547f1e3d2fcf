"""Every row gets a score, and rows that do not fit the model are named by column: in text, in JSON and in the run."""

import io
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from test_prepare import rows_of

import hotrow
from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.data.chunk import RowError
from hotrow.data.coded import to_keys
from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources.criteo import CATEGORY_NAMES, DENSE_NAMES
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import CategoricalSpec, parse_schema
from hotrow.export.inputs import load_module
from hotrow.run.folder import RunFolder
from hotrow.serve.scorer import Scorer
from loops import looped

OPTIONS: dict[str, Any] = {
    "batch_size": 64, "embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8], "threads": 1, "refit": False,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "label": "click",
    "categorical": [
        "item",
        {"column": "user", "type": "int"},
        {"column": "tags", "kind": "multi_hot", "type": "int", "separator": "|"},
    ],
    "dense": [{"column": "price", "transform": "log1p_clip0"}],
    "split": {"kind": "random"},
}
N = 3000


def rows(num_rows: int = N, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    item = rng.integers(0, 40, num_rows)
    return {
        "click": (rng.random(num_rows) < np.where(item % 3 == 0, 0.7, 0.1)).astype(int).tolist(),
        "item": [f"i{value}" for value in item],
        "user": rng.integers(1, 100, num_rows).tolist(),
        "tags": ["|".join(map(str, rng.integers(1, 20, rng.integers(0, 4)))) or None for _ in range(num_rows)],
        "price": rng.lognormal(1, 1, num_rows).tolist(),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hotrow.Run:
    folder = tmp_path_factory.mktemp("scoring") / "run"
    return hotrow.fit(pa.table(rows()), schema=SCHEMA, run=folder, quiet=True, epochs=3, **OPTIONS)


Change = Callable[[dict[str, list[Any]]], None]


def wrong_case(data: dict[str, list[Any]]) -> None:
    data["item"] = [item.upper() for item in data["item"]]


def blank_before(data: dict[str, list[Any]]) -> None:
    data["item"] = [f" {item}" for item in data["item"]]


def half_unknown(data: dict[str, list[Any]]) -> None:
    data["user"] = [user if i % 2 else user + 10_000 for i, user in enumerate(data["user"])]


def times_1000(data: dict[str, list[Any]]) -> None:
    data["price"] = [1000 * price for price in data["price"]]


def no_price(data: dict[str, list[Any]]) -> None:
    data["price"] = [None] * len(data["price"])


UNFIT: list[tuple[Change, str, str, str]] = [
    (wrong_case, "item", "unknown", "unknown_ids"),
    (blank_before, "item", "unknown", "unknown_ids"),
    (half_unknown, "user", "unknown", "unknown_ids"),
    (times_1000, "price", "outside", "numbers_outside_training"),
    (no_price, "price", "missing", "missing_values"),
]
unfit = pytest.mark.parametrize(("change", "column", "kind", "code"), UNFIT)


@pytest.mark.slow_but(
    "eval-wrong_case-item-unknown-unknown_ids", "predict-times_1000-price-outside-numbers_outside_training"
)
@unfit
@pytest.mark.parametrize("name", ["eval", "predict"])
def test_rows_that_do_not_fit_are_named(
    run: hotrow.Run, change: Change, column: str, kind: str, code: str, name: str, tmp_path: Path, command: Any
) -> None:
    data = rows(600, seed=1)
    change(data)
    pyarrow.csv.write_csv(pa.table(data), tmp_path / "new.csv")
    options = ["--out", tmp_path / "scores.csv"] if name == "predict" else []
    found = command(name, run.path, tmp_path / "new.csv", *options, "--json")
    assert {n: c["stands_out"] for n, c in found["columns"].items() if c["stands_out"]} == {column: [kind]}
    assert found["columns"][column][kind] > 250 and found["columns"][column]["values"] == 600
    assert set(found["warnings"]) - {"worse_than_a_constant", "auc_below_half"} == {code}
    for text in (found["warnings"][code]["text"], command.err):
        assert f"{column} " in text and "validation" in text


def test_a_packed_dataset_is_not_read_as_raw_rows(run: hotrow.Run) -> None:
    """Its files have columns of the same names, with row numbers for ids: every id would be unknown."""
    for score in (run.predict, run.evaluate_rows):
        for data in (run.path / "data", [str(run.path / "data")]):
            with pytest.raises(ValueError, match=r"data is a packed dataset, which has no raw rows: .* --data"):
                score(data)


@unfit
def test_odd_rows_are_named_in_python(run: hotrow.Run, change: Change, column: str, kind: str, code: str) -> None:
    data = rows(600, seed=1)
    change(data)
    for score in (run.predict, run.evaluate_rows):
        with pytest.warns(UserWarning, match=rf"{column} .*validation"):
            score(data)
        assert run.seen is not None
        assert run.seen.to_json()[column]["stands_out"] == [kind] and code in run.seen.warnings()


def test_rows_that_fit_are_scored_without_a_word(run: hotrow.Run, recwarn: pytest.WarningsRecorder) -> None:
    run.evaluate_rows(rows(600, seed=2))
    assert not recwarn.list
    assert run.seen is not None and run.seen.warnings() == {}
    assert {name: found["values"] for name, found in run.seen.to_json().items() if name != "tags"} == dict.fromkeys(
        ("price", "item", "user"), 600
    )


@pytest.mark.slow_but("half_unknown-user-unknown-unknown_ids")
@unfit
def test_fit_names_a_split_that_does_not_fit(
    change: Change, column: str, kind: str, code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last tenth of the rows, which is the test split."""
    data, late = rows(seed=3), rows(N // 10, seed=4)
    change(late)
    table = pa.table({name: [*values[: N - N // 10], *late[name]] for name, values in data.items()} | {"ts": range(N)})
    run = hotrow.fit(
        table, schema={**SCHEMA, "time": "ts", "split": {"kind": "time"}}, run=tmp_path / "run", epochs=3, **OPTIONS
    )
    counts, num = run.metrics["columns"][column], run.metrics["num_rows"]
    kind = "missing_or_zero" if kind == "missing" else kind  # a packed dataset keeps both as 0
    assert num == pytest.approx(N / 10, abs=2) and counts[kind] > 0.4 * num
    text = run.record.warnings[code]["text"]
    assert f"{column} " in text and "the test split" in text
    assert text.split("%")[0] in capfd.readouterr().err
    assert f"{column} " in (run.path / "report.html").read_text() and code in (run.path / "report.html").read_text()
    assert RunFolder.open(run.path).record.columns == run.record.columns


def test_a_feature_that_is_unknown_everywhere_is_named(tmp_path: Path) -> None:
    """Validation's share is as large: the comparison alone would be silent."""
    data = rows(seed=5)
    data["user"] = [i // 2 if i % 2 else 7 for i in range(N)]
    run = hotrow.fit(pa.table(data), schema=SCHEMA, run=tmp_path / "run", quiet=True, max_steps=4, **OPTIONS)
    for split in ("val", "test"):
        counts = run.record.columns[split]["user"]
        assert counts["unknown"] == pytest.approx(counts["values"] / 2, rel=0.3)
    assert "user 4" in run.record.warnings["unknown_ids"]["text"]


def test_a_run_without_counts_scores_and_says_so(run: hotrow.Run) -> None:
    old = hotrow.load(run.path)
    old.folder.record.columns = old.folder.record.ranges = None
    data = rows(600, seed=1)
    with pytest.warns(UserWarning, match="nothing says whether these rows"):
        np.testing.assert_array_equal(old.predict(data), run.predict(data))
    assert old.seen is not None and old.seen.to_json()["item"]["usual"] is None
    assert "columns" not in old.metrics


@looped("columns", [{"val": {"item": {"values": 3, "unknown": 4}}}, {"val": {"item": {"unknown": 0}}}])
def test_impossible_counts_in_run_json_are_refused(run: hotrow.Run, tmp_path: Path, columns: Any) -> None:
    folder = RunFolder.create(tmp_path / "run", name="run")
    with pytest.raises(ValueError, match="at most `values`"):
        folder.update(columns=columns)
        RunFolder.open(tmp_path / "run")


def scores_of(run: hotrow.Run, data: Any) -> np.ndarray[Any, Any]:
    found = run.predict(data)
    assert np.isfinite(found).all()
    return found


def one(**changed: Any) -> dict[str, list[Any]]:
    return {**{"item": ["i3"], "user": [12], "tags": ["3|4"], "price": [2.5]}, **{n: [v] for n, v in changed.items()}}


@looped("value", ["12", " 12", "12 ", "012", "+12", "12.0", "1.2e1", 12.0, "12."])
def test_a_whole_number_is_an_id_however_it_is_written(run: hotrow.Run, value: Any, tmp_path: Path) -> None:
    expected = scores_of(run, one())
    np.testing.assert_array_equal(scores_of(run, one(user=value)), expected)
    np.testing.assert_array_equal(scores_of(run, one(tags=f"{value}|4")), scores_of(run, one(tags="12|4")))
    pyarrow.csv.write_csv(pa.table(one(user=str(value))), tmp_path / "one.csv")
    np.testing.assert_array_equal(scores_of(run, tmp_path / "one.csv"), expected)
    assert run.seen is not None and run.seen.columns["user"]["unreadable"] == 0


@looped(
    "value",
    ["guest", "12.5", 12.5, math.inf, "1e999999999", "9" * 5000, "\uff11\uff12", "1_2", "0x0c", "-", 2**80, "12 3"],
)
def test_what_is_no_id_is_missing(run: hotrow.Run, value: Any) -> None:
    found = scores_of(run, one(user=value))
    assert run.seen is not None
    assert run.seen.columns["user"] == {"values": 1, "unknown": 0, "missing": 1, "unreadable": 1}
    np.testing.assert_array_equal(found, scores_of(run, one(user=None)))
    assert run.seen.columns["user"] == {"values": 1, "unknown": 0, "missing": 1, "unreadable": 0}
    with pytest.raises((RowError, ValueError), match=r":1 \(user\)"):
        run.predict(one(user=value if not isinstance(value, int) else str(value)), strict=True)


def test_an_odd_id_uses_the_row_in_scoring_that_it_used_in_training(tmp_path: Path) -> None:
    data = {**rows(), "user": [str(user) for user in rows()["user"]]}
    data["user"][::700] = ["guest", " 7", "012", "", "12.5"]
    pyarrow.csv.write_csv(pa.table(data), tmp_path / "x.csv")
    user = {"column": "user", "type": "int"}
    schema = {**SCHEMA, "categorical": [user], "split": {"kind": "random"}, "odd_share": 0.01}
    dataset = run_prepare("csv", tmp_path / "x.csv", tmp_path / "out", schema=parse_schema(schema, where="test"))
    assert dataset.info.summary["odd"]["user"]["cells"] == 2  # type: ignore[call-overload, index]
    packed = [row for split in dataset.splits for row in rows_of(dataset, split)["user"]]
    (batch,) = Encoder.load(dataset).batches(tmp_path / "x.csv")
    assert sorted(packed) == sorted(batch.sparse.values.tolist())
    cells = ["guest", "12.5", "", " 7", "7", "012", "12"]
    (odd,) = Encoder.load(dataset).batches(pa.table({"user": cells, "price": [1.0] * len(cells)}))
    found = odd.sparse.values.tolist()
    assert 0 != found[0] == found[1] == found[2] and found[3] == found[4] and found[5] == found[6]


def test_rows_come_through_a_pipe(run: hotrow.Run, tmp_path: Path) -> None:
    pyarrow.csv.write_csv(pa.table(rows(50)), tmp_path / "x.csv")
    text, pipes = (tmp_path / "x.csv").read_bytes(), [tmp_path / name for name in ("one", "two", "three")]
    for pipe in pipes:
        os.mkfifo(pipe)
        threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True).start()
    np.testing.assert_array_equal(scores_of(run, pipes[0]), scores_of(run, tmp_path / "x.csv"))
    assert run.evaluate_rows(pipes[1]) == run.evaluate_rows(tmp_path / "x.csv")
    assert run.write_scores(pipes[2], tmp_path / "scores.csv", keep=["item"]) == 50
    assert pyarrow.csv.read_csv(tmp_path / "scores.csv")["item"].to_pylist() == rows(50)["item"]


@looped(("value", "unreadable"), [("x", 1), (math.nan, 0), (math.inf, 1), ("1e400", 1), (None, 0)])
def test_what_is_no_number_is_missing(run: hotrow.Run, value: Any, unreadable: int) -> None:
    found = scores_of(run, one(price=value))
    assert run.seen is not None
    assert run.seen.columns["price"] == {"values": 1, "missing": 1, "outside": 0, "unreadable": unreadable}
    np.testing.assert_array_equal(found, scores_of(run, one(price=None)))


HOSTILE = [
    *(None, "", " ", "guest", "12.0", " 12", "012", "-0", "1e5", "1e400", "nan", "inf", "NULL", "true", "a|b", "|"),
    *("||", ",", '"', "'", "\t", "\\", "\u202e", "\x00", "é" * 300, "9" * 400, "0x1f", "{}", "[1, 2]", "1.234,5"),
    *("$1", "12 %", 12, 12.5, -1, 2**63, 2**64, 2**70, 1e300, math.nan, math.inf, -math.inf, True, 5e-324),
]


def hostile_rows(num_rows: int = 500) -> list[dict[str, Any]]:
    rng = np.random.default_rng(9)
    good = pa.table(rows(num_rows)).to_pylist()
    for row in good:
        del row["click"]
        for name in row:
            if rng.random() < 0.6:
                row[name] = HOSTILE[rng.integers(len(HOSTILE))]
    return good


def as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def write_csv(path: Path, found: list[dict[str, Any]]) -> Path:
    pyarrow.csv.write_csv(pa.table({n: [as_text(row[n]) for row in found] for n in found[0]}), path)
    return path


def write_json(path: Path, found: list[dict[str, Any]]) -> Path:
    def plain(value: Any) -> Any:
        wild = isinstance(value, float) and not math.isfinite(value)
        return {"deep": [value, {}]} if value == "{}" else [1, ["x"]] if value == "[1, 2]" else None if wild else value

    path.write_text("".join(json.dumps({n: plain(v) for n, v in row.items()}) + "\n" for row in found))
    return path


def floats_of(found: list[dict[str, Any]]) -> pa.Table:
    """Columns of doubles, with NaN and infinity."""

    def number(value: Any) -> float | None:
        is_number = isinstance(value, int | float) and abs(value) < 1e301
        return None if value is None else float(value) if is_number else math.inf

    return pa.table({n: pa.array([number(row[n]) for row in found], pa.float64()) for n in found[0]})


@looped("form", ["csv", "jsonl", "parquet", "floats", "dict", "rows", "polars", "lazy", "lists", "structs"])
def test_hostile_rows_get_a_score_each(run: hotrow.Run, form: str, tmp_path: Path) -> None:
    found = hostile_rows()
    texts = pa.table({n: [as_text(row[n]) for row in found] for n in found[0]})
    data: Any = {
        "csv": lambda: write_csv(tmp_path / "new.csv", found),
        "jsonl": lambda: write_json(tmp_path / "new.jsonl", found),
        "parquet": lambda: pq.write_table(texts, tmp_path / "new.parquet") or tmp_path / "new.parquet",
        "floats": lambda: floats_of(found),
        "dict": lambda: {n: [row[n] for row in found] for n in found[0]},
        "rows": lambda: found,
        "polars": lambda: pl.from_arrow(texts),
        "lazy": lambda: pl.from_arrow(texts).lazy(),  # type: ignore[union-attr]
        "lists": lambda: pa.table({n: [[v] * (i % 3) for i, v in enumerate(texts[n].to_pylist())] for n in found[0]}),
        "structs": lambda: pa.table({n: [{"x": v} for v in texts[n].to_pylist()] for n in found[0]}),
    }[form]()
    scores = run.predict(data)
    assert scores.shape == (500,) and ((scores > 0) & (scores < 1)).all()
    assert run.seen is not None
    assert run.seen.columns["user"]["values"] == run.seen.columns["price"]["values"] == 500
    assert run.seen.columns["user"]["unreadable"] > 0 and run.seen.columns["price"]["unreadable"] > 0
    out = io.BytesIO()
    assert run.write_scores(data, out) == out.getvalue().count(b"\n") - 1 == 500


def test_hostile_rows_of_every_form_get_the_same_scores(run: hotrow.Run, tmp_path: Path) -> None:
    found = [row for row in hostile_rows() if not any(v in ("[1, 2]", "{}", True, "", "\x00") for v in row.values())]
    found = [{n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in row.items()} for row in found]
    assert len(found) > 200
    expected = run.predict(found)
    for data in (write_csv(tmp_path / "new.csv", found), write_json(tmp_path / "new.jsonl", found)):
        np.testing.assert_allclose(run.predict(data), expected, rtol=1e-5)


def test_strict_refuses_what_is_scored_otherwise(run: hotrow.Run, tmp_path: Path, command: Any) -> None:
    data = rows(20, seed=1)
    data["user"] = [str(user) for user in data["user"]]
    data["user"][4] = "guest"
    path, out = tmp_path / "new.csv", tmp_path / "scores.csv"
    pyarrow.csv.write_csv(pa.table(data), path)
    for arguments in (("eval", run.path, path), ("predict", run.path, path, "--out", out)):
        err = command(*arguments, "--strict", code=2)
        assert "new.csv:6 (user): 'guest'" in err and not out.exists()
        shown = command(*arguments, "--json")
        assert shown["columns"]["user"]["unreadable"] == 1
        assert "unreadable_values" in shown["warnings"]
    with pytest.raises(RowError, match=r":5 \(user\)"):
        run.evaluate_rows(data, strict=True)


def test_predict_writes_to_standard_output(run: hotrow.Run, tmp_path: Path, command: Any) -> None:
    data = rows(50, seed=1)
    pyarrow.csv.write_csv(pa.table(data), tmp_path / "new.csv")
    shown = command("predict", run.path, tmp_path / "new.csv", "--keep", "user", "--out", "-")
    found = pyarrow.csv.read_csv(io.BytesIO(shown.encode()))
    assert found.column_names == ["user", "score"] and found["user"].to_pylist() == data["user"]
    np.testing.assert_allclose(found["score"].to_numpy(), run.predict(data), rtol=1e-5)
    assert not (tmp_path / "-").exists()


def test_every_way_to_hold_rows_scores_alike(run: hotrow.Run, tmp_path: Path) -> None:
    data = rows(80, seed=6)
    table = pa.table(data)
    expected = run.predict(table)
    for same in (data, table.to_pylist(), pl.from_arrow(table), pl.DataFrame(table).lazy()):
        np.testing.assert_array_equal(run.predict(same), expected)
        assert run.evaluate_rows(same)["num_rows"] == 80
    again = [
        hotrow.fit(same, schema=SCHEMA, run=tmp_path / str(i), quiet=True, max_steps=2, **OPTIONS).metrics
        for i, same in enumerate((table, data, table.to_pylist(), pl.DataFrame(table).lazy()))
    ]
    assert again[1:] == again[:1] * 3


def test_a_run_on_criteo_scores_its_text_in_every_form(tmp_path: Path) -> None:
    write_criteo(tmp_path / "train.txt", criteo_kaggle(800, scale=0.001))
    run = hotrow.fit(str(tmp_path / "train.txt"), run=tmp_path / "run", quiet=True, max_steps=5, **OPTIONS)
    lines = [line.split("\t") for line in (tmp_path / "train.txt").read_text().splitlines()[:200]]
    names = ["label", *DENSE_NAMES, *CATEGORY_NAMES]
    (tmp_path / "new.txt").write_text("".join("\t".join(line) + "\n" for line in lines))
    expected = scores_of(run, tmp_path / "new.txt")
    assert run.seen is not None
    counts = dict(run.seen.columns)
    columns = {name: [line[i] or None for line in lines] for i, name in enumerate(names)}
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    order = sorted(columns, reverse=True)
    pyarrow.csv.write_csv(pa.table({name: columns[name] for name in order}), tmp_path / "other.csv")
    write_json(tmp_path / "new.jsonl", pa.table(columns).to_pylist())
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day_0").write_bytes((tmp_path / "new.txt").read_bytes())
    for data in (columns, tmp_path / "days", *(tmp_path / name for name in ("new.parquet", "other.csv", "new.jsonl"))):
        np.testing.assert_array_equal(scores_of(run, data), expected)
        assert run.seen.columns == counts, data
    with pytest.raises(RowError, match=r"\(C1\): 'guest'"):
        run.predict({**columns, "C1": ["guest"] * 200}, strict=True)


def test_hostile_lines_of_criteo_get_a_score_each(tmp_path: Path) -> None:
    write_criteo(tmp_path / "train.txt", criteo_kaggle(800, scale=0.001))
    run = hotrow.fit(str(tmp_path / "train.txt"), run=tmp_path / "run", quiet=True, max_steps=5, **OPTIONS)
    lines = [line.split("\t") for line in (tmp_path / "train.txt").read_text().splitlines()[:500]]
    rng = np.random.default_rng(3)
    cells = ["guest", " 12", "012", "12.0", "nan", "1e400", "9" * 30, "123456789", "é", "-", "0x1f", " ", "a b"]
    num_bad = dict.fromkeys(CATEGORY_NAMES, 0)
    for number, line in enumerate(lines):
        for i in range(1, 40):
            if number % 3 == 0 and rng.random() < 0.3:
                line[i] = cells[rng.integers(len(cells))]
                if i > 13 and line[i] not in (" 12", "012", "1e400", "nan", " "):
                    num_bad[CATEGORY_NAMES[i - 14]] += 1
    (tmp_path / "new.txt").write_text("".join("\t".join(line) + "\n" for line in lines))
    scores = scores_of(run, tmp_path / "new.txt")
    assert len(scores) == 500
    assert run.seen is not None
    assert {name: run.seen.columns[name]["unreadable"] for name in CATEGORY_NAMES} == num_bad
    names = ["label", *DENSE_NAMES, *CATEGORY_NAMES]
    columns = {name: [line[i].strip() or None for line in lines] for i, name in enumerate(names)}
    frame = scores_of(run, columns)
    same = [i for i in range(500) if i % 3]
    np.testing.assert_array_equal(frame[same], scores[same])
    with pytest.raises(RowError, match=r"new\.txt:1, column"):
        run.predict(tmp_path / "new.txt", strict=True)
    with pytest.raises(RowError, match=r"new\.txt:2"):
        (tmp_path / "new.txt").write_text("\t".join(lines[0]) + "\nbroken\n")
        run.predict(tmp_path / "new.txt")


def test_a_run_is_not_lost_if_its_splits_cannot_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> Any:
        raise ValueError("part-00000.arrow: the checksum differs")

    monkeypatch.setattr("hotrow.run.ending.usual_of", damaged)
    run = hotrow.fit(pa.table(rows()), schema=SCHEMA, run=tmp_path / "run", quiet=True, max_steps=2, **OPTIONS)
    assert run.record.status == "finished" and run.record.columns is None
    assert "part-00000.arrow" in run.record.warnings["columns_not_counted"]["text"]


def test_text_of_integers_is_cast_at_once_unless_a_value_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value by value it would take many times as long, for every file of text."""
    looked_at: list[str] = []
    monkeypatch.setattr("hotrow.data.cells.integer_of", lambda text, _: looked_at.append(text))
    spec = CategoricalSpec(column="user")
    to_keys(pa.array(["12", "7", None] * 100), spec, "int")
    assert not looked_at
    to_keys(pa.array(["12", "7", "guest"] * 100), spec, "int")
    assert looked_at == ["12", "7", "guest"], "each different text once"


def test_a_column_counts_as_told_when_rows_are_scored(tmp_path: Path) -> None:
    """As if all rows had it, wherever they are scored; training and evaluation see what was logged. Clicks fall with
    the position, which says nothing of how good an item is."""
    rng, n = np.random.default_rng(0), 2000
    item, position = rng.integers(0, 20, n), rng.integers(1, 11, n)
    click = rng.random(n) < 0.9 * item / 20 / position
    logged = pa.table(
        {"item": item.astype(str), "position": position.astype(str), "price": rng.random(n), "click": click}
    )
    told: dict[str, Any] = {"label": "click", "choice": False, "quiet": True, **OPTIONS, "epochs": 4}
    plain = hotrow.fit(logged, run=tmp_path / "plain", **told)
    run = hotrow.fit(logged, run=tmp_path / "run", at_serving={"position": 1}, **told)
    assert run.metrics == plain.metrics and run.evaluate_rows(logged) == plain.evaluate_rows(logged)
    first = logged.set_column(1, "position", pa.array(["1"] * n))
    without, wanted = logged.drop_columns(["position", "click"]), plain.predict(first)
    for rows in (logged, first, without):
        np.testing.assert_array_equal(run.predict(rows, strict=True), wanted)
    run.write_scores(logged, tmp_path / "kept.parquet", keep=["position"])
    assert pq.read_table(tmp_path / "kept.parquet")["position"].to_pylist() == logged["position"].to_pylist()
    run.export(tmp_path / "out")
    scorer, served = load_module(tmp_path / "out" / "score.py").Scorer(tmp_path / "out"), Scorer(tmp_path / "out")
    assert sorted(scorer.columns) == sorted(served.columns) == ["item", "price"]
    np.testing.assert_array_equal(served.score(without.to_pylist(), strict=True), wanted)
    np.testing.assert_array_equal(served.score(logged.drop_columns(["click"]).to_pylist(), strict=True), wanted)
    np.testing.assert_allclose(scorer.score(logged.to_pydict()), wanted, rtol=0, atol=1e-6)
    order = [np.corrcoef(each.predict(logged), item)[0, 1] for each in (plain, run)]
    assert order[1] > order[0] + 0.2, "items are ranked by what they are worth"


def test_a_column_that_looks_like_a_position_is_named() -> None:
    rows = pa.table({"click": [0] * 50 + [1] * 50, "slot": [1, 2, 3, 4] * 25, "user": ["a", "b"] * 50})
    alone, told = (guess_columns(rows, label="click", at_serving=own) for own in ({}, {"slot": 3}))
    assert any("column slot must be known when" in note and "--at-serving slot=1" in note for note in alone.notes)
    assert any("counts as 3 in all rows" in note for note in told.notes) and told.schema().at_serving == {"slot": 3}
    for own, reason in (
        ({"slto": 1}, "at_serving column 'slto' is not there; did you mean 'slot'"),
        ({"click": 1}, "at_serving: no input is made of 'click'"),
        ({"slot": [1]}, "at_serving.slot"),
    ):
        with pytest.raises(ValueError, match=reason):
            guess_columns(rows, label="click", at_serving=own).schema()

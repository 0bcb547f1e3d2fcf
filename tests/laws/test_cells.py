"""Law: a cell means one thing. Arrow columns, Python values, every kind of file, requests and exports read it alike.

`MEANS` says what hostile cells mean; the fuzzer compares readers on generated ones. What one value means must depend on
nothing beside it, so every column is read whole and cell by cell.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_export import TOLERANCE, scorer_of

import hotrow
from hotrow.data.cells import (
    MISSING,
    PLAIN,
    UnreadableError,
    Written,
    column_of,
    id_of,
    ids,
    json_float,
    list_of,
    lists,
    number_of,
    numbers,
    without_missing,
)
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.schema import parse_schema

BAD = "bad"
HALF = "\ud83d"
MEANS: list[tuple[Any, Any, Any, Any]] = [
    # cell, number, integer id, text id
    (None, None, None, None),
    (math.nan, None, None, None),
    ([], None, None, None),
    (12, 12, 12, b"12"),
    (12.0, 12, 12, b"12"),
    (" 12", 12, 12, b" 12"),
    ("012", 12, 12, b"012"),
    ("12.0", 12, 12, b"12.0"),
    ("+5", 5, 5, b"+5"),
    ("1e3", 1000, 1000, b"1e3"),
    ("-0", 0, 0, b"-0"),
    ("5.", 5, 5, b"5."),
    (".5", 0.5, BAD, b".5"),
    (12.5, 12.5, BAD, b"12.5"),
    (-0.0, 0, 0, b"0"),
    (True, 1, 1, b"1"),
    (False, 0, 0, b"0"),
    (Decimal("1.50"), 1.5, BAD, b"1.50"),
    (Decimal("2"), 2, 2, b"2"),
    (Decimal("Infinity"), BAD, BAD, b"Infinity"),
    (b"12", 12, 12, b"12"),
    (b"\xff", BAD, BAD, b"\xff"),
    ([7], 7, 7, b"7"),
    ([7, 8], BAD, BAD, BAD),
    ([[7]], 7, 7, b"7"),
    ({"a": 1}, BAD, BAD, BAD),
    (HALF, BAD, BAD, BAD),
    ("\x00", BAD, BAD, b"\x00"),
    ("5\x00", BAD, BAD, b"5\x00"),
    ("1e999999999", BAD, BAD, b"1e999999999"),
    ("1e99999999999999999999", BAD, BAD, b"1e99999999999999999999"),
    ("1e-99999999999999999999", 0, BAD, b"1e-99999999999999999999"),
    ("0x1f", BAD, BAD, b"0x1f"),
    ("1_0", BAD, BAD, b"1_0"),
    ("\u0661\u0662", BAD, BAD, "\u0661\u0662".encode()),
    ("\uff11", BAD, BAD, "\uff11".encode()),
    *((text, BAD, BAD, text.encode()) for text in ("inf", "-inf", "Infinity", "naN", "1e400", "50 %", "true", "-")),
    (math.inf, BAD, BAD, BAD),
    (1e300, BAD, BAD, BAD),
    (2**53 + 1, 2.0**53, 2**53 + 1, b"9007199254740993"),
    (float(2**53), 2.0**53, BAD, BAD),
    ("9007199254740993.0", 2.0**53, 2**53 + 1, b"9007199254740993.0"),
    (2**63, 2.0**63, BAD, b"9223372036854775808"),
    ("9223372036854775808", 2.0**63, BAD, b"9223372036854775808"),
    (-(2**63), -(2.0**63), -(2**63), b"-9223372036854775808"),
    (2**64, 2.0**64, BAD, b"18446744073709551616"),
    (10**5000, BAD, BAD, BAD),
    ("9" * 5000, BAD, BAD, b"9" * 5000),
    (datetime(1970, 1, 2), BAD, 86_400_000_000, b"1970-01-02 00:00:00.000000"),
    (date(1970, 1, 2), BAD, 1, b"1970-01-02"),
    (timedelta(days=1), BAD, BAD, b"1 day, 0:00:00"),
    (np.int64(3), 3, 3, b"3"),
    (np.array([3]), 3, 3, b"3"),
    ("", BAD, BAD, b""),
]
"""Without texts that mean a missing value: `without_missing` makes None of these first."""


def meant(read: Callable[..., Any], *cell: Any) -> Any:
    """What a value means, None if it is missing, BAD if it is not of the kind."""
    try:
        found = read(*cell)
    except UnreadableError:
        return BAD
    return None if isinstance(found, float) and found != found else found


def test_what_hostile_cells_mean() -> None:
    for cell, number, integer, text in MEANS:
        found = [meant(number_of, cell), *(meant(id_of, cell, e) for e in ("int", "bytes"))]
        assert found == [number, integer, text], repr(cell)[:50]
        assert meant(id_of, cell, "hex") == integer or isinstance(cell, str | bytes)
    assert [id_of(text, "hex") for text in ("ff", " 0A ", 10)] == [255, 10, 10]
    assert [meant(id_of, t, "hex") for t in ("123456789", "0x1f", "-1", "")] == [BAD] * 4
    found = [meant(id_of, v, "uint64") for v in (2**64 - 1, "18446744073709551615", 2**64, -1, "-1", 5.0)]
    assert found == [-1, -1, BAD, BAD, BAD, 5]


WRITTEN = [PLAIN, Written(unit="%"), Written(thousands=",", unit="$"), Written(decimal=",", thousands=" ")]
ENCODINGS: list[Any] = ["int", "uint64", "hex", "bytes"]
SEPARATORS = [None, "|", "json"]


def test_numbers_as_people_write_them() -> None:
    percent, money, comma = WRITTEN[1:]
    for cell, written, want in (
        *(("50 %", percent, 50), ("%50", percent, 50), ("12", percent, BAD), (12, percent, BAD)),
        ("1e2%", percent, 100),
        *(("$1,234.50", money, 1234.5), ("-$ 2", money, -2), ("12", money, 12), ("1,23", money, BAD)),
        *(("1\u202f234,5", comma, 1234.5), ("1 234,5", comma, 1234.5), ("1.5", comma, BAD), (1.5, comma, 1.5)),
        *((HALF, money, BAD), ("\u0661", comma, BAD), (None, money, None), (True, percent, BAD)),
    ):
        assert meant(number_of, cell, written) == want, (cell, written)


# ---- both faces


def check_faces(cells: list[Any]) -> None:
    """Reads a column of any values whole, as a list and as Arrow holds it, and cell by cell, by every rule."""
    columns = [cells, column_of(cells)]
    for column in columns:
        for written in WRITTEN:
            found, bad = numbers(column, written)
            same(told(found.tolist(), bad), [meant(number_of, c, written) for c in cells], cells)
        for encoding in ENCODINGS:
            array, bad = ids(column, encoding)
            same(told(array.to_pylist(), bad), [meant(id_of, c, encoding) for c in cells], cells)
        for separator in SEPARATORS:
            items, splits, bad = lists(column, separator)
            array, bad_items = ids(items, "int")
            flat = told(array.to_pylist(), bad_items)
            found = [BAD if lost else flat[a:b] for lost, (a, b) in zip(bad, pairwise(splits), strict=True)]
            same(found, [meant(items_of, c, separator) for c in cells], cells)
    cleaned = [without_missing(column, MISSING) for column in columns]
    arrays = [ids(column, "bytes")[0].to_pylist() for column in cleaned]
    same(arrays[1], arrays[0], cells)


def items_of(cell: Any, separator: str | None) -> list[Any]:
    return [meant(id_of, i, "int") for i in list_of(cell, separator)]


def told(values: list[Any], bad: Any) -> list[Any]:
    made = [None if isinstance(v, float) and v != v else v for v in values]
    assert all(value is None for value, lost in zip(made, bad, strict=True) if lost)
    return [BAD if lost else value for value, lost in zip(made, bad, strict=True)]


def same(found: list[Any], want: list[Any], cells: list[Any]) -> None:
    assert found == want, [(c, f, w) for c, f, w in zip(cells, found, want, strict=True) if f != w][:3]


def test_hostile_cells_mean_the_same_in_arrow_as_by_themselves() -> None:
    cells = [cell for cell, *_ in MEANS]
    check_faces(cells)
    for kind in {*map(type, cells)}:
        check_faces([cell for cell in cells if type(cell) is kind or cell is None])
    for cell in cells:
        check_faces([cell])


PIECES = [
    *("0", "1", "5", "12", "007", "9" * 19, "255", "ff", "-", "+", ".", "e", "E5", "x", "_", " ", "\t", "\u00a0", "%"),
    *("$", ",", "|", "[", "]", '"', "'", "\x00", "\u0661", "\U0001f600", "\u202f", "NA", "null", "nan", "inf", "1e3"),
    *("\n", "true", "é", "2020-01-01", "18446744073709551615", "9223372036854775808", "9007199254740993"),
]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(5)))


MAKERS: list[Callable[[random.Random], Any]] = [
    text,
    lambda rng: rng.choice(PIECES),
    lambda rng: rng.choice([0, 1, -1, 2**53, 2**53 + 1, 2**63 - 1, rng.randrange(-(2**64), 2**65)]),
    lambda rng: rng.choice([0.5, -0.0, 1e15, 1e16, 1e39, 3e38, math.inf, math.nan, rng.uniform(-9, 9), 7.0]),
    lambda rng: rng.random() < 0.5,
    lambda rng: [text(rng) for _ in range(rng.randrange(3))],
    lambda rng: [rng.randrange(9) for _ in range(rng.randrange(3))],
]
ODD_MAKERS: list[Callable[[random.Random], Any]] = [
    lambda rng: text(rng) + HALF,
    lambda rng: rng.choice([cell for cell, *_ in MEANS]),
    lambda rng: [rng.choice(MAKERS)(rng) for _ in range(rng.randrange(4))],
    lambda rng: Decimal(rng.randrange(10**6)).scaleb(rng.randrange(-9, 9)),
    lambda rng: datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=rng.randrange(10**15)),
    lambda rng: rng.randbytes(rng.randrange(4)),
]


def column(rng: random.Random, makers: list[Callable[[random.Random], Any]]) -> list[Any]:
    """Mostly of one kind of cells, with gaps."""
    make = rng.choice(makers)
    others = 0.3 if rng.random() < 0.3 else 0
    made = [(rng.choice(makers) if rng.random() < others else make)(rng) for _ in range(rng.randrange(1, 9))]
    return [None if rng.random() < 0.1 else cell for cell in made]


SHARES = ["few", pytest.param("many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("share", SHARES)
def test_generated_cells_mean_the_same_in_arrow_as_by_themselves(share: str) -> None:
    for seed in range(200 if share == "few" else 13_700):
        check_faces(column(random.Random(seed), [*MAKERS, *ODD_MAKERS]))


# ---- every kind of file


SCHEMA = parse_schema(
    {
        "label": "y",
        "csv": {"delimiter": ","},
        "dense": ["n", {"column": "p", "unit": "%"}],
        "categorical": [
            "t",
            {"column": "i", "type": "int"},
            {"column": "l", "kind": "sequence", "type": "int", "separator": "|"},
            {"column": "b", "buckets": [0.5, 12]},
        ],
    },
    where="test",
)
USED: dict[str, Any] = {"t": "bytes", "i": "int", "l": "int", "b": "int"}
NAMES = ("n", "p", "t", "i", "l", "b")


def float32_of(cell: Any, written: Written = PLAIN) -> float:
    return float(np.float32(number_of(cell, written)))


def meanings(cells: list[Any]) -> dict[str, Any]:
    """What one column's cells mean in each column of SCHEMA, and how many are of another kind."""
    kept = without_missing(list(cells), MISSING)
    float32 = [meant(float32_of, c) for c in kept]
    cut = [
        None if n in (None, BAD) else int(np.searchsorted([0.5, 12], number_of(c), "right"))
        for n, c in zip(float32, kept, strict=True)
    ]
    percent = [meant(float32_of, c, WRITTEN[1]) for c in kept]
    listed = [meant(items_of, c, "|") for c in kept]
    found = {"n": float32, "p": percent, "t": [meant(id_of, c, "bytes") for c in kept]}
    found |= {"i": [meant(id_of, c, "int") for c in kept], "l": listed, "b": cut}
    lost = {name: own.count(BAD) for name, own in found.items()} | {"b": float32.count(BAD)}
    lost["l"] += sum(own.count(BAD) for own in listed if own != BAD)
    blank = {name: [None if v == BAD else v for v in own] for name, own in found.items() if name != "l"}
    blank["l"] = [[] if own == BAD else [None if v == BAD else v for v in own] for own in listed]
    return {**{name: blank[name] for name in NAMES}, "lost": {name: lost[name] for name in NAMES}}


def scored(data: Any) -> dict[str, Any]:
    """What a reader of rows to score makes of them."""
    found: dict[str, Any] = {name: [] for name in NAMES} | {"lost": dict.fromkeys(NAMES, 0)}
    for chunk in ColumnsSource(data, SCHEMA, labels="ignored", encodings=USED, values="any").chunks():
        for place, name in enumerate(SCHEMA.dense_names):
            found[name] += [None if v != v else v for v in chunk.dense[:, place].tolist()]
        for name, keys in chunk.keys.items():
            flat = keys.values.tolist()
            if keys.offsets is not None:
                flat = [keys.values[a:b].tobytes() for a, b in pairwise(keys.offsets)]
            flat = flat if keys.valid is None else [v if ok else None for v, ok in zip(flat, keys.valid, strict=True)]
            splits = keys.row_splits
            found[name] += flat if splits is None else [flat[a:b] for a, b in pairwise(splits)]
        for name, count in chunk.unreadable.items():
            found["lost"][name] += count
    return found


def refused(data: Any) -> str | None:
    """What a reader says of rows that train, of the columns of one cell each; None if it takes them."""
    try:
        list(ColumnsSource(data, SCHEMA, labels="ignored", encodings=USED).chunks())
    except ValueError as error:
        return str(error) or "refused"
    return None


def frame_of(cells: list[Any]) -> dict[str, list[Any]]:
    return dict.fromkeys(NAMES, cells)


def write_csv(path: Path, cells: list[str]) -> Path:
    quoted = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    lines = [",".join(NAMES), *(",".join([cell] * len(NAMES)) for cell in quoted)]
    path.write_text("\n".join(lines) + "\n", newline="")
    return path


def write_json(path: Path, cells: list[Any]) -> Path:
    path.write_text("".join(json.dumps(dict.fromkeys(NAMES, cell)) + "\n" for cell in cells))
    return path


def write_parquet(path: Path, array: pa.Array) -> Path:
    pq.write_table(pa.table(dict.fromkeys(NAMES, array)), path)
    return path


def check_readers(cells: list[Any], folder: Path) -> None:
    """Compares what files and frames make of a column with what its cells mean."""
    want, data = meanings(cells), dict[str, Any]()
    data["frame"] = frame_of(cells)
    data["rows"] = [dict.fromkeys(NAMES, cell) for cell in cells]
    if not isinstance(array := column_of(cells), list):
        data["parquet"] = write_parquet(folder / "x.parquet", array)
        data["arrow"] = pa.table(dict.fromkeys(NAMES, array))
    if all(isinstance(cell, str) and HALF not in cell for cell in cells):
        data["csv"] = write_csv(folder / "x.csv", cells)
    for name, own in data.items():
        assert scored(own) == want, (name, cells)
    if all(map(is_json, cells)):
        want_json = meanings([as_parsed(cell) for cell in cells])
        assert scored(write_json(folder / "x.jsonl", cells)) == want_json, ("jsonl", cells)
    strict = [name for name in ("csv", "arrow", "parquet") if name in data]
    is_flat = not any(isinstance(cell, list) for cell in cells)
    if strict and is_flat and {*map(type, cells)} - {type(None)} == {str}:
        odd = any(want["lost"].values())
        assert {name: refused(data[name]) is not None for name in strict} == dict.fromkeys(strict, odd), cells


def is_json(cell: Any) -> bool:
    if isinstance(cell, list):
        return all(map(is_json, cell))
    if isinstance(cell, int | float):
        return abs(cell) < 1e308
    return cell is None or isinstance(cell, str)


def as_parsed(cell: Any) -> Any:
    """A value of JSON, whose large floats are as they are written."""
    if isinstance(cell, list):
        return [*map(as_parsed, cell)]
    return json_float(json.dumps(cell)) if isinstance(cell, float) else cell


def test_hostile_cells_mean_the_same_in_every_reader(tmp_path: Path) -> None:
    cells = [*(cell for cell, *_ in MEANS), *MISSING, " NA ", "  ", "a|b", "1|x||3", "|"]
    check_readers(cells, tmp_path)
    for kind in (str, int, float, bool):
        check_readers([cell for cell in cells if type(cell) is kind and cell != HALF], tmp_path)
    for cell in cells:
        check_readers([cell], tmp_path)
        check_readers([cell, 3, cell, "7"], tmp_path)


@pytest.mark.parametrize("share", SHARES)
def test_generated_cells_mean_the_same_in_every_reader(share: str, tmp_path: Path) -> None:
    for seed in range(60 if share == "few" else 6_000):
        rng = random.Random(f"files {seed}")
        check_readers(column(rng, MAKERS if rng.random() < 0.7 else [*MAKERS, *ODD_MAKERS]), tmp_path)


def test_cells_of_criteos_layout_mean_the_same(tmp_path: Path) -> None:
    """Its own parser is for lines without a fault; `data/cells.py` reads the cells of others."""
    rng = random.Random(0)
    cells = [cell for cell, *_ in MEANS if isinstance(cell, str) and cell != HALF] + [*MISSING, " 0A ", "ff", "1e-3"]
    cells = [cell for cell in cells + [text(rng) for _ in range(200)] if not {*cell} & {*"\t\n\r"}]
    lines = ["\t".join(["1", *[cell] * 13, *[cell] * 26]) for cell in cells]
    (tmp_path / "x.txt").write_text("\n".join(lines) + "\n", newline="")
    kept = without_missing([*cells], MISSING)
    want = [meant(float32_of, c) for c in kept], [meant(id_of, c, "hex") for c in kept]
    blank = [[None if v == BAD else v for v in own] for own in want]
    (chunk,) = CriteoSource([tmp_path / "x.txt"], values="any").chunks()
    keys = chunk.keys["C7"]
    assert [None if v != v else v for v in chunk.dense[:, 3].tolist()] == blank[0]
    assert [v if ok else None for v, ok in zip(keys.values.tolist(), keys.valid, strict=True)] == blank[1]
    assert (chunk.unreadable["I4"], chunk.unreadable["C7"]) == (want[0].count(BAD), want[1].count(BAD))
    good = [n != BAD and c != BAD for n, c in zip(*want, strict=True)]
    (chunk,) = CriteoSource([tmp_path / "x.txt"], skip_bad_rows=len(cells)).chunks()
    assert chunk.num_rows == sum(good) > 5


TIMES = ["2020-01-01 00:00:00", " 2020-01-01", "2020-13-01", "NA", "x", "1577836800", "2020-01-01T01:02:03.000004"]
LABELS = ["0", "1", " 1", "1.0", "true", " FALSE", "2", "x", "NA", "1e0", "", "0x1", "-0", "\u0661", "nan", "1\x00"]
WEIGHTS = ["0", "2.5", "-1", "inf", "1e39", "1e-400", " 3 ", "x", "", "null", "1_0"]


def test_labels_weights_and_times_are_the_same_in_every_reader(tmp_path: Path) -> None:
    schema = parse_schema({"label": "y", "weight": "w", "time": "ts", "categorical": ["t"]}, where="test")
    good = {"y": "1", "w": "1", "ts": "2020-01-01 00:00:01", "t": "a"}
    cells = [("ts", TIMES[0]), *(("ts", cell) for cell in TIMES)]
    cells += [*(("y", cell) for cell in LABELS), *(("w", cell) for cell in WEIGHTS)]
    rows = [{**good, name: cell} for name, cell in cells]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    quoted = (",".join(f'"{cell}"' for cell in row.values()) for row in rows)
    (tmp_path / "x.csv").write_text("\n".join([",".join(good), *quoted]) + "\n", newline="")
    found = []
    for data in (table, *(tmp_path / f"x.{suffix}" for suffix in ("parquet", "jsonl", "csv"))):
        source = ColumnsSource(data, schema, skip_bad_rows=len(rows))
        (chunk,) = source.chunks()
        assert chunk.label is not None and chunk.time is not None and chunk.weight is not None
        reasons = [example.partition(": ")[2] for example in source.skipped.examples]
        found.append((chunk.label.tolist(), chunk.time.tolist(), chunk.weight.tolist(), reasons))
    assert found[1:] == found[:1] * 3
    labels, times, weights, _ = found[0]
    assert len(labels) == len(rows) - 4 - 8 - 7
    assert weights[-4:] == [0, 2.5, 0, 3] and labels[4:-4] == [0, 1, 1, 1, 1, 0, 1, 0]
    assert min(times) == 1577836800000000


# ---- requests and exports


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[hotrow.Run, Path]:
    """A run on ids that cells above mean, each of them missing in some rows, and its export."""
    folder, rng = tmp_path_factory.mktemp("cells"), random.Random(0)
    good = ["12", "5", "7", "3", "1000", "0", "1", "9223372036854775807", "007", "ff", "inf", "12.5", None]
    rows = {name: [rng.choice(good[:8] if name in "inpb" else good) for _ in range(400)] for name in NAMES}
    rows["p"] = [f"{cell} %" for cell in rows["p"]]
    for name in ("i", "l"):
        rows[name][::9] = [None] * len(rows[name][::9])
    rows["l"] = [None if cell is None or not cell.isdigit() else f"{cell}|12|{cell}" for cell in rows["l"]]
    table = pa.table({**rows, "y": [rng.randrange(2) for _ in range(400)]})
    options: dict[str, Any] = {"batch_size": 50, "max_steps": 9, "embedding_dim": 4, "threads": 1, "refit": False}
    schema = SCHEMA.model_dump(mode="json", by_alias=True)
    run = hotrow.fit(table, schema=schema, run=folder / "run", quiet=True, **options)
    run.export(folder / "out")
    return run, folder / "out"


def check_scores(cells: list[Any], run: hotrow.Run, export: Path) -> None:
    """Scores a column by the run, by a server's scorer, whole and row by row, and by the export's own program."""
    rows = [dict.fromkeys(NAMES, cell) for cell in cells]
    whole, alone = (hotrow.Scorer(export) for _ in "12")
    expected = run.predict(rows)
    assert run.seen is not None
    np.testing.assert_array_equal(whole.score(rows), expected, err_msg=" ".join(type(cell).__name__ for cell in cells))
    np.testing.assert_array_equal([alone.score([row])[0] for row in rows], expected)
    plain = scorer_of(export)
    np.testing.assert_allclose(plain.score(frame_of(cells)).numpy(), expected, rtol=0, atol=TOLERANCE)
    assert whole.seen.columns == alone.seen.columns == plain.seen.columns == run.seen.columns


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("share", SHARES)
def test_cells_score_alike_in_requests_and_exports(share: str, model: tuple[hotrow.Run, Path]) -> None:
    check_scores([cell for cell, *_ in MEANS if cell != 10**5000], *model)
    for seed in range(6 if share == "few" else 300):
        rng = random.Random(f"scores {seed}")
        check_scores(column(rng, MAKERS if rng.random() < 0.7 else [*MAKERS, *ODD_MAKERS]), *model)

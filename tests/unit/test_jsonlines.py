"""JSON Lines: the same dataset as the same values in a CSV file, and every bad line named."""

import bz2
import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.columns import open_table
from hotrow.data.sources.schema import CsvSpec, parse_schema

SCHEMA: dict[str, Any] = {
    "label": "click",
    "dense": ["price"],
    "categorical": ["user.id", {"column": "tags", "kind": "multi_hot", "separator": "|"}],
    "split": {"kind": "random", "fractions": [0.6, 0.2, 0.2], "seed": 1},
}
N = 400


def values() -> list[tuple[bool, str, int, list[str]]]:
    random = np.random.default_rng(0)
    prices = ["3", "3.0", "-0.25", "1e3", ""]
    return [
        (bool(random.integers(2)), prices[i % 5], 2**60 + int(random.integers(30)), ["a", "b", "ä"][: i % 4])
        for i in range(N)
    ]


def as_json(rows: list[tuple[bool, str, int, list[str]]]) -> str:
    lines = []
    for label, price, user, tags in rows:
        number = f'"price": {price}, ' if price else ""
        lines.append(f'{{"click": {json.dumps(label)}, {number}"user": {{"id": {user}}}, "tags": {json.dumps(tags)}}}')
    return "\n".join(lines) + "\n"


def as_csv(rows: list[tuple[bool, str, int, list[str]]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["click", "price", "user.id", "tags"])
    writer.writerows([int(label), price, user, "|".join(tags)] for label, price, user, tags in rows)
    return text.getvalue()


def columns(dataset: PackedDataset) -> dict[str, list[Any]]:
    found = {}
    for name in dataset.splits:
        files = sorted((dataset.path / name).glob("*.arrow"))
        found[name] = pa.concat_tables(pa.ipc.open_file(file).read_all() for file in files).to_pydict()
    return found


def test_against_the_same_values_as_csv(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(as_json(values()), encoding="utf-8")
    (tmp_path / "x.csv").write_text(as_csv(values()), encoding="utf-8")
    made = run_prepare("auto", tmp_path / "x.jsonl", tmp_path / "a", schema=parse_schema(SCHEMA, where="test"))
    expected = run_prepare("csv", tmp_path / "x.csv", tmp_path / "b", schema=parse_schema(SCHEMA, where="test"))
    assert columns(made) == columns(expected)
    assert made.info.tables == expected.info.tables


@pytest.mark.slow_but("gzip")
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress], ids=["plain", "gzip", "bz2"])
def test_from_raw_file_to_scores(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "clicks.log"  # told by its content
    file.write_bytes(pack(as_json(values()).encode()))
    schema = run_init(file, out=tmp_path / "conf")
    assert "jsonl" in " ".join(schema.commands)
    run = hotrow.fit(file, label="click", run=tmp_path / "run", quiet=True, epochs=1, threads=1, refit=False)
    assert len(run.predict(file)) == N


BAD_LINES = {
    '{"click": 1, "user": 7': "not a JSON object at character",
    "[1, 2]": "expected an object",
    '{"click": 1, "user": 7, "user": 8}': "member 'user' appears twice",
    '{"click": 1, "user": 7, "n.x": 8, "n": {"x": 1}}': "member 'n.x' appears twice, once within 'n'",
    '{"click": 1, "user": [7]}': "member 'user' is an array here",
    '{"click": 1, "user": "\\ud800"}': "half of a surrogate pair",
    '{"click": 1, "user": 7, "unread": "\\udc00"}': "half of a surrogate pair",
    '{"click": NaN, "user": 7}': "NaN is not JSON",
    "null": "expected an object",
    '{"click": 1, "user": ' + "[" * 100_000 + "}": "nested too deeply",
    b'{"click": 1, "user": "\xff"}': "byte 23 of the line is not UTF-8",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=lambda value: str(value)[:30])
def test_a_bad_line_is_named_and_counted(
    line: str | bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [json.dumps({"click": i % 2, "user": i % 5}).encode() for i in range(60)]
    bad = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([*good[:30], b"", bad, *good[30:]]))
    monkeypatch.setattr(
        "hotrow.data.sources.jsonlines.ESTIMATE_BYTES", 100
    )  # the bad line is not among those that name columns
    options: dict[str, Any] = {"label": "click", "split": "random"}
    with pytest.raises(ValueError, match=rf"x\.jsonl:32( \(user\))?: .*{re.escape(reason)}"):
        run_prepare("jsonl", tmp_path / "x.jsonl", tmp_path / "a", **options)
    made = run_prepare("jsonl", tmp_path / "x.jsonl", tmp_path / "b", skip_bad_rows=1, **options)
    assert sum(split.num_rows for split in made.info.splits.values()) == 60


def test_a_member_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    deep: list[Any] = [1, [1, 2], [[1], [2]], [{"x": 1}], "x", None]
    lines = (json.dumps({"click": i % 2, "user": i % 5, "more": {"deep": deep[i % 6]}}) for i in range(60))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    schema = parse_schema({"label": "click", "categorical": ["user"], "split": {"kind": "random"}}, where="test")
    made = run_prepare("jsonl", tmp_path / "x.jsonl", tmp_path / "out", schema=schema)
    assert sum(split.num_rows for split in made.info.splits.values()) == 60


def test_reading_goes_on_from_any_row(tmp_path: Path) -> None:
    lines = ['{"a": 1}', "", "{}", "broken", '{"a": "x", "later": 2}', '{"a": null}', '{"a": true}']
    (tmp_path / "day=3").mkdir()
    file = tmp_path / "day=3" / "x.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    reader = open_table(file, CsvSpec())
    assert reader.schema.names == ["a", "later", "day"]
    expected = [(1, "1"), (3, None), (5, "x"), (6, None), (7, "1")]
    for first in range(8):
        found, bad = [], []
        for rows in reader.read(0, first, ["a", "day"], 2):
            assert set(rows.batch.column(1).to_pylist()) <= {"3"}
            found += zip(rows.lines.tolist(), rows.batch.column(0).to_pylist(), strict=True)
            bad += [error.line for error in rows.bad]
        assert found == [(line, value) for line, value in expected if line > first]
        assert bad == ([4] if first < 4 else [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"click": 1, "user": 2},\n {"click": 0, "user": 3}]\n', "write one object a line"),
        ("\n \n", "is empty"),
        ('{"click": 1, "user": "' + "x" * (5 << 20) + '"}', "line 1 is longer than 4 MiB"),
    ],
    ids=["array", "empty", "long"],
)
def test_a_file_of_no_lines_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=rf"x\.json.*{reason}"):
        open_table(tmp_path / "x.json", CsvSpec())


def test_values_are_read_exactly(tmp_path: Path) -> None:
    lines = [
        f'{{"id": {2**64 + i}, "price": 7.{i:02}0, "at": "2024-01-01 10:{i:02}:00", "ok": true, "l": [1, "x"]}}'
        for i in range(50)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([*lines, '{"id": 7.0, "l": "abc"}', '{"id": 7, "l": null}']))
    reader = open_table(path, CsvSpec())
    (rows,) = reader.read(0, 0, reader.schema.names, 100)
    found = rows.batch.to_pydict()
    assert found["id"] == [*(str(2**64 + i) for i in range(50)), "7", "7"]
    assert found["price"][:2] == ["7", "7.01"]
    assert found["ok"][0] == "1" and found["at"][3] == "2024-01-01 10:03:00"
    assert found["l"][0] == ["1", "x"] and found["l"][-2:] == [["abc"], []]
    assert rows.mixed["l"][-2:] == ["abc", None]


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"], ids=["CR", "CRLF", "LF"])
@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_lines_end_any_way(end: str, read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.data.sources.jsonlines.READ_BYTES", read_bytes)
    path = tmp_path / "x.jsonl"
    path.write_bytes(end.join(['{"a": "x"}', "", '{"a": "\U0001f600"}', ' {"a": null} ']).encode())
    reader = open_table(path, CsvSpec())
    found: list[Any] = []
    for rows in reader.read(0, 0, ["a"], 100):
        found += zip(rows.lines, rows.batch.column(0).to_pylist(), strict=True)
    assert found == [(1, "x"), (3, "\U0001f600"), (4, None)]

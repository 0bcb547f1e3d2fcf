"""Files as other tools write them: odd line ends, headers, formats and pipes, read to the right values or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from hotrow.data.chunk import RowError
from hotrow.data.prepare.prepare import RawEncoder, run_prepare
from hotrow.data.sources import tabular
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import parse_schema
from raw_rows import read

N = 300
ITEMS = [f"i{i % 7}" for i in range(N)]
LABELS = [i % 3 % 2 for i in range(N)]


def schema_of(*categorical: Any, **more: Any) -> Any:
    return parse_schema({"label": "y", "categorical": list(categorical), **more}, where="test")


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"], ids=["CR", "CRLF", "LF"])
@pytest.mark.parametrize("many", [300, 30_000], ids=["small", "above 64 KiB"])
def test_lines_end_any_way(end: str, many: int, tmp_path: Path) -> None:
    lines = ["y,item", *(f"{i % 2},i{i % 9}" for i in range(many))]
    path = tmp_path / "x.csv"
    path.write_bytes((end.join(lines) + end).encode())
    source = open_source("auto", path, label="y").source
    assert read(source)["item"] == [f"i{i % 9}" for i in range(many)]
    assert source.scout().num_rows == many
    path.write_bytes((end.join([*lines, "1", "0,i1"]) + end).encode())
    with pytest.raises(RowError, match=rf"x\.csv:{many + 2}: too few columns, 1 instead of 2, in '1'"):
        read(open_source("auto", path, label="y").source)
    path.write_bytes(end.join(lines).encode() + f"{end}1,".encode() + b"\xff")
    with pytest.raises(ValueError, match=rf"x\.csv:{many + 2}: byte \d+ is not UTF-8"):
        read(open_source("auto", path, label="y").source)


@pytest.mark.parametrize("end", ["\r", "\n"], ids=["CR", "LF"])
def test_a_header_of_thousands_of_columns(end: str, tmp_path: Path) -> None:
    names = [f"a_column_of_some_length_{i}" for i in range(5000)]
    assert len(",".join(names)) > tabular.SNIFF_BYTES
    lines = [",".join(["y", *names]), *(",".join([str(i % 2), *[str(i)] * 5000]) for i in range(4))]
    (tmp_path / "wide.csv").write_text(end.join(lines) + end, newline="")
    schema = schema_of(names[-1], dense=[names[0]])
    rows = read(ColumnsSource(tmp_path / "wide.csv", schema))
    assert rows["label"] == [0, 1, 0, 1] and rows[names[-1]] == ["0", "1", "2", "3"]
    assert len(guess_columns(tmp_path / "wide.csv", label="y").guesses) == 5001


@pytest.mark.parametrize("text", ["\n\n\n", "\r\r", "\ufeff", "x" * (9 << 20)], ids=["LF", "CR", "BOM", "long"])
def test_no_message_tells_to_remove_a_file_that_has_bytes(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text, newline="")
    with pytest.raises(ValueError, match=r"x\.csv") as error:
        ColumnsSource(tmp_path / "x.csv", schema_of("a"))
    assert not {"remove", "empty"} & {*str(error.value).replace(";", " ").split()}


def test_blanks_around_names_are_trimmed_if_no_two_become_equal(tmp_path: Path) -> None:
    def written(name: str, header: str) -> Path:
        path = tmp_path / name
        rows = [f"{LABELS[i]},{ITEMS[i]},{i}" for i in range(N)]
        path.write_text("\n".join([header, *rows, ""]))
        return path

    plain = read(ColumnsSource(written("plain.csv", "y,item,price"), schema_of("item", dense=["price"])))
    odd = written("odd.csv", ' y ,item ,"  price"')
    for names in (("y", "item", "price"), (" y ", "item ", "  price")):
        schema = parse_schema({"label": names[0], "categorical": [names[1]], "dense": [names[2]]}, where="test")
        found = read(ColumnsSource(odd, schema))
        assert found["label"] == plain["label"] and found["dense"] == plain["dense"]
        assert found[names[1]] == plain["item"], "a name as stored is found too"
    assert guess_columns(odd, label="y").schema().feature_names == ("item",)
    assert not any("more than once" in note for note in open_source("auto", odd, label="y").notes)
    twins = written("twins.csv", "y,a ,a")
    assert read(ColumnsSource(twins, schema_of("a ", dense=["a"])))["a "] == ITEMS


@pytest.mark.parametrize("header", ["y,item,price", " y, item ,price "])
@pytest.mark.parametrize("new", ["y,item,price", "y ,  item,price"])
def test_scoring_finds_columns_with_other_blanks(header: str, new: str, tmp_path: Path) -> None:
    rows = [f"{y},{item},{i % 40}" for i, (y, item) in enumerate(zip(LABELS, ITEMS, strict=True))]
    (tmp_path / "old.csv").write_text("\n".join([header, *rows, ""]))
    (tmp_path / "new.csv").write_text("\n".join([new, *rows, ""]))
    encoder = RawEncoder(run_prepare("csv", tmp_path / "old.csv", tmp_path / "out", label="y", dense=["price"]))
    (want,), (found,) = encoder.batches(tmp_path / "old.csv"), encoder.batches(tmp_path / "new.csv")
    assert found.sparse.bags("item")[0].tolist() == want.sparse.bags("item")[0].tolist()
    (frame,) = encoder.batches(pa.csv.read_csv(tmp_path / "new.csv"))
    assert frame.sparse.bags("item")[0].tolist() == want.sparse.bags("item")[0].tolist()


@pytest.mark.parametrize("order", [1, -1], ids=["int first", "double first"])
def test_integers_in_one_parquet_file_and_floats_in_the_next_are_one_column(order: int, tmp_path: Path) -> None:
    """As pandas writes a column that has gaps in one of the files."""
    whole = {"y": [0, 1], "a": [2**60, 7], "d": [1, 2], "t": [10, 11], "late": [None, None]}
    gaps = {"y": [1.0, 0.0], "a": [7.0, None], "d": [1.5, None], "t": [12.0, 13.0], "late": [5, 6]}
    for i, columns in enumerate([whole, gaps][::order]):
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
    rows = read(ColumnsSource(tmp_path, schema_of("a", "late", dense=["d"], time="t")))
    assert rows["a"] == [2**60, 7, 7, None] if order == 1 else [7, None, 2**60, 7]
    assert rows["label"] == [0, 1, 1, 0][::order] if order == 1 else [1, 0, 0, 1]
    assert [value[0] for value in rows["dense"] if value[0] == value[0]] == ([1, 2, 1.5] if order == 1 else [1.5, 1, 2])
    assert sorted(rows["time"]) == [10_000_000, 11_000_000, 12_000_000, 13_000_000], "seconds in both files"
    assert rows["late"] == [None, None, 5, 6][::1] if order == 1 else [5, 6, None, None]


def test_numbers_and_text_are_still_two_columns(tmp_path: Path) -> None:
    for i, values in enumerate(([1, 2], ["1", "2"])):
        pq.write_table(pa.table({"y": [0, 1], "a": values}), tmp_path / f"{i}.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet: column 'a' has type string, .*0\.parquet has int64"):
        ColumnsSource(tmp_path, schema_of("a"))

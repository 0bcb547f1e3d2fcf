"""Any table as a source: exact ids of every Arrow type, faults with file, column and row, resumes at any row."""

import datetime
import decimal
import gzip
import io
import re
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow.data.cells import JSON_LISTS, IdEncoding
from hotrow.data.chunk import RowError
from hotrow.data.coded import CodedKeys, column_of, to_keys
from hotrow.data.sources import tabular
from hotrow.data.sources.columns import ColumnsSource, open_table
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.inputs import InputFile, find_files
from hotrow.data.sources.schema import CategoricalSpec, CsvSpec, Schema, parse_schema
from loops import looped
from raw_rows import read


def schema_of(*categorical: Any, **more: Any) -> Schema:
    return parse_schema({"label": "y", "categorical": list(categorical), **more}, where="test")


def read_column(array: Any, spec: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    table = pa.table({"y": pa.array([0] * len(array), pa.int8()), "a": array})
    return read(ColumnsSource(table, schema_of({"column": "a", **(spec or {})}), **options))["a"]


@looped(
    ("array", "want"),
    [
        (pa.array(["x", None, "", "é"]), ["x", None, None, "é"]),
        (pa.array(["x", None, "yy"], pa.large_string()), ["x", None, "yy"]),
        (pa.array(["x", None, "yy"], pa.string_view()), ["x", None, "yy"]),
        (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        (pa.array([b"ab", None], pa.binary()), ["ab", None]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), ["ab", "cd"]),
        (pa.array([1, None, -3], pa.int8()), [1, None, -3]),
        (pa.array([2**63 - 1, -(2**63)], pa.int64()), [2**63 - 1, -(2**63)]),
        (pa.array([0, 2**32 - 1], pa.uint32()), [0, 2**32 - 1]),
        (pa.array([0, 2**63 - 1, 2**63, 2**64 - 1], pa.uint64()), [0, 2**63 - 1, -(2**63), -1]),
        (pa.array([True, None, False]), [1, None, 0]),
        (pa.array([decimal.Decimal(12), None], pa.decimal128(18, 0)), [12, None]),
        (pa.array([decimal.Decimal(10**20), None], pa.decimal128(30, 0)), ["1" + "0" * 20, None]),
        (pa.array([decimal.Decimal("1.50")], pa.decimal128(5, 2)), ["1.50"]),
        (pa.array([5.0, None, float("nan"), -(2.0**52)], pa.float64()), [5, None, None, -(2**52)]),
        (pa.array([5.0, 7.0], pa.float32()), [5, 7]),
        (pa.array([datetime.date(1970, 1, 3)], pa.date32()), [2]),
        (pa.array([3, None], pa.timestamp("ms")), [3, None]),
        (pa.array([7], pa.timestamp("ns", "UTC")), [7]),
        (pa.array([9], pa.time64("us")), [9]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_ids_of_every_type_are_exact(array: pa.Array, want: list[Any]) -> None:
    assert read_column(array) == want
    doubled = pa.concat_arrays([pa.concat_arrays([array]), array]) if not pa.types.is_dictionary(array.type) else array
    assert read_column(doubled.slice(len(doubled) - 1)) == want[-1:], "a sliced array starts within its buffers"


@pytest.mark.parametrize(
    ("array", "kind", "want"),
    [
        (pa.array([["a", None], None, [], ["b"]]), "multi_hot", [["a", None], [], [], ["b"]]),
        (pa.array([[1, 2], None, [3]], pa.large_list(pa.int64())), "sequence", [[1, 2], [], [3]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), "sequence", [[1, 2], [], [3, 4]]),
        (
            pa.array([["a"], ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "sequence",
            [["a"], ["b", "a"]],
        ),
    ],
    ids=["list", "large_list", "fixed_size_list", "dictionary"],
)
def test_lists_become_jagged_keys(array: pa.Array, kind: str, want: list[Any]) -> None:
    assert read_column(array, {"kind": kind}) == want
    assert read_column(array.slice(1), {"kind": kind}) == want[1:]


@looped("encoding", ["int", "uint64", "hex"])
@looped(
    ("cell", "want"),
    [
        *((text, 12) for text in ("12", " 12", "012", "+12", "12.0", "1.2e1", "12.")),
        *((text, None) for text in ("guest", "12.5", "0x1f", "1_2", "9" * 30, "12 3", "\uff11\uff12", "1e999999999")),
    ],
)
def test_a_text_is_one_integer_id_in_training_and_scoring(cell: str, want: int | None, encoding: IdEncoding) -> None:
    """Training reports what is no id; both read it as missing. Beside other values it is read as by itself."""
    if encoding == "hex":
        want = int(cell, 16) if re.fullmatch("[0-9a-f]{1,8}", cell.strip()) else None
    for others in ([], ["7", "8"]):
        for spec, array in (
            (CategoricalSpec(column="a", type="int"), pa.array([cell, *others])),
            (
                CategoricalSpec(column="a", type="int", kind="multi_hot"),
                pa.array([["7", cell], *([o] for o in others)]),
            ),
        ):
            place = 0 if spec.kind == "one_hot" else 1
            for column in (array, array.to_pylist()):
                found, fault = to_keys(column, spec, encoding)
                valid = np.ones(found.num_keys, np.bool_) if found.valid is None else found.valid
                assert (int(found.values[place]) if valid[place] else None) == want
                assert found.values[valid].tolist().count(7) == place + len(others) // 2
                assert (0 if fault is None else fault.num_cells) == int(want is None)
                assert (None if fault is None else fault.rows.tolist()) == (
                    None if want else [True, *(False for _ in others)]
                )


def test_one_bad_json_list_leaves_the_others_as_they_are() -> None:
    spec = CategoricalSpec(column="a", type="int", kind="multi_hot", separator=JSON_LISTS)
    keys, fault = to_keys(pa.array(['["1", 2]', "[1", "[3]", '["x"]', None]), spec, "int")
    assert keys.row_splits is not None and keys.row_splits.tolist() == [0, 2, 2, 3, 4, 4]
    assert keys.values[:3].tolist() == [1, 2, 3]
    assert fault is not None and fault.rows.tolist() == [False, True, False, True, False]
    assert "is not a JSON array" in fault.describe(1) and "is not an exact integer id" in fault.describe(3)


def test_null_lists_drop_what_lies_beneath_them() -> None:
    values = pa.array([1, 2, 3, 4])
    array = pa.ListArray.from_arrays(pa.array([0, 2, 4]), values, mask=pa.array([True, False]))
    assert read_column(array, {"kind": "sequence"}) == [[], [3, 4]]


def test_separated_text_becomes_lists() -> None:
    array = pa.array(["a|b", "", None, "c"])
    assert read_column(array, {"kind": "multi_hot", "separator": "|"}) == [["a", "b"], [], [], ["c"]]
    numbers = pa.array(["1 22", "3"])
    assert read_column(numbers, {"kind": "sequence", "separator": " ", "type": "int"}) == [[1, 22], [3]]


@looped("array", [pa.array([-1.0, 0.5, None, 2.0, 7.5]), pa.array(["-1", "0.5", None, "2", "7.50"])])
def test_numbers_in_buckets(array: pa.Array) -> None:
    assert read_column(array, {"buckets": [0.5, 2, 7.5]}) == [0, 1, None, 2, 3]


@looped(
    ("array", "spec", "message"),
    [
        (pa.array([1.0, 2.5]), {}, r"<frame>:2 \(a\): 2.5 is not an exact integer id; an id must be a whole number"),
        (pa.array([1.0, 2.0**53]), {}, r"<frame>:2 \(a\): 9007199254740992.0 is not an exact integer id"),
        (pa.array([float("inf")]), {}, r"<frame>:1 \(a\): inf is not an exact integer id"),
        (pa.array(["1", "0x7"]), {"type": "int"}, r"<frame>:2 \(a\): '0x7' is not an exact integer id; set type: text"),
        (pa.array(["-0", "1.5"]), {"type": "int"}, "'1.5' is not an exact integer id"),
        (pa.array(["1", "x"]), {"type": "int"}, r"<frame>:2 \(a\): 'x' is not an exact integer id"),
        (pa.array(["99999999999999999999"]), {"type": "int"}, "'99999999999999999999' is not an exact integer id"),
        (pa.array([[1], [2, 3]]).cast(pa.list_(pa.float64())), {"kind": "sequence"}, None),
        (pa.array([[1.0], [2.0, 3.5, 4.5]]), {"kind": "sequence"}, r"<frame>:2 \(a\): 3.5 is not an exact"),
        (
            pa.array([["a"]]),
            {},
            r"'a' has type list<item: string>, which does not fit kind one_hot; set kind: multi_hot",
        ),
        (pa.array(["a"]), {"kind": "multi_hot"}, "does not fit kind multi_hot; give a separator"),
        (pa.array([{"x": 1}]), {}, r"column 'a' has type struct<x: int64>, which cannot be an id"),
    ],
)
def test_ids_are_never_rounded_or_guessed(array: pa.Array, spec: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert read_column(array, spec) == [[1], [2, 3]]
        return
    with pytest.raises(ValueError, match=message):
        read_column(array, spec)


def test_prediction_refuses_what_cannot_be_an_id() -> None:
    for array in (pa.array([{"x": 1}]), pa.array([1], pa.duration("s"))):
        with pytest.raises(ValueError, match=r"<frame>: column 'a' has type .*, which cannot be an id"):
            ColumnsSource(pa.table({"a": array}), schema_of("a"), labels="ignored", encodings={"a": "int"})


def test_prediction_reads_ids_as_they_were_prepared() -> None:
    assert read_column(pa.array([7, None]), encodings={"a": "bytes"}) == ["7", None]
    assert read_column(pa.array([7.0, None]), encodings={"a": "bytes"}) == ["7", None]
    assert read_column(pa.array(["7", None]), encodings={"a": "int"}) == [7, None]
    assert read_column(pa.array([7], pa.uint64()), encodings={"a": "int"}) == [7]
    with pytest.raises(RowError, match=r":2 \(a\): 18446744073709551615 .*another signedness"):
        read_column(pa.array([7, 2**64 - 1], pa.uint64()), encodings={"a": "int"})
    with pytest.raises(RowError, match=r":1 \(a\): -1 .*another signedness"):
        read_column(pa.array([-1]), encodings={"a": "uint64"})


@looped(
    ("array", "spec", "want"),
    [
        (pa.array([0, 1]), {}, [0, 1]),
        (pa.array([False, True]), {}, [0, 1]),
        (pa.array([0.0, 1.0]), {}, [0, 1]),
        (pa.array(["0", "1"]), {}, [0, 1]),
        (pa.array([3, 4, 5]), {"at_least": 4}, [0, 1, 1]),
        (pa.array([3.5, 4.0]), {"at_least": 4}, [0, 1]),
        (pa.array(["pv", "buy", "cart"]), {"positive": ["buy", "cart"]}, [0, 1, 1]),
        (pa.array([1, 2, 3]), {"positive": [2]}, [0, 1, 0]),
        (pa.array(["1", "2"]), {"positive": [2]}, [0, 1]),
    ],
)
def test_labels_by_every_rule(array: pa.Array, spec: dict[str, Any], want: list[float]) -> None:
    table = pa.table({"y": array, "a": pa.array(range(len(array)))})
    schema = parse_schema({"label": {"column": "y", **spec}, "categorical": ["a"]}, where="test")
    assert read(ColumnsSource(table, schema))["label"] == want


@looped(
    ("array", "spec", "message"),
    [
        (pa.array([0, 2]), {}, r"<frame>:2 \(y\): 2 is not a label; it must be 0 or 1"),
        (pa.array([0.0, float("nan")]), {}, r"<frame>:2 \(y\): nan is not a label"),
        (pa.array([0, None]), {}, r"<frame>:2 \(y\): an empty value is not a label"),
        (pa.array(["0", "yes"]), {}, r"<frame>:2 \(y\): 'yes' is not a label"),
        (pa.array(["a", None]), {"positive": ["a"]}, r"<frame>:2 \(y\): an empty value is missing"),
        (
            pa.array([1]),
            {"positive": ["a"]},
            r"label.positive \['a'\] cannot be compared with column 'y' of type int64",
        ),
        (pa.array([[1]]), {}, "column 'y' has type list<item: int64>, which is not a number"),
    ],
)
def test_labels_outside_their_rule_are_named(array: pa.Array, spec: dict[str, Any], message: str) -> None:
    table = pa.table({"y": array, "a": pa.array(range(len(array)))})
    schema = parse_schema({"label": {"column": "y", **spec}, "categorical": ["a"]}, where="test")
    with pytest.raises(ValueError, match=message):
        read(ColumnsSource(table, schema))


def test_dense_numbers_and_what_is_none() -> None:
    table = pa.table(
        {
            "y": [0, 1], "a": [1, 2], "i": [3, None], "d": [decimal.Decimal("1.5"), None], "s": ["2", None],
            "b": [True, None],
        }
    )  # fmt: skip
    dense = read(ColumnsSource(table, schema_of("a", dense=["i", "d", "s", "b"])))["dense"]
    assert dense[0] == [3, 1.5, 2, 1]
    assert np.isnan(dense[1]).all()


@looped("value", [float("inf"), 1e39, "abc", "inf", "1e999", "0x10"])
def test_dense_that_is_no_finite_number_is_named(value: Any) -> None:
    table = pa.table({"y": [0, 1], "a": [1, 2], "d": pa.array([type(value)(1), value])})
    with pytest.raises(RowError, match=r"<frame>:2 \(d\): .* is not a finite float32 number"):
        read(ColumnsSource(table, schema_of("a", dense=["d"])))


@looped(
    ("array", "options", "want"),
    [
        (pa.array([5, 3]), {}, [5, 3]),
        (pa.array(["5", "3"]), {}, [5, 3]),
        (pa.array([1.25, 2.0]), {}, [1_250_000, 2_000_000]),
        (pa.array(["1970-01-02", "1970-01-01"]), {}, [86_400_000_000, 0]),
        (pa.array(["1970-01-01T00:00:01Z"]), {}, [1_000_000]),
        (pa.array(["02/01/1970"]), {"format": "%d/%m/%Y"}, [86_400_000_000]),
        (pa.array([datetime.date(1970, 1, 3)]), {}, [2]),
        (pa.array([4], pa.timestamp("ms")), {}, [4]),
    ],
)
def test_times_of_every_type(array: pa.Array, options: dict[str, str], want: list[int]) -> None:
    table = pa.table({"y": [0] * len(array), "a": [1] * len(array), "t": array})
    assert read(ColumnsSource(table, schema_of("a", time={"column": "t", **options})))["time"] == want


def test_times_are_read_as_those_of_the_first_file_that_has_rows(tmp_path: Path) -> None:
    for name, rows in (("a.csv", ""), ("b.csv", "1,1700000000,x\n0,1700000060,y\n")):
        (tmp_path / name).write_text(f"y,t,a\n{rows}")
    assert read(ColumnsSource([tmp_path], schema_of("a", time="t")))["time"] == [1700000000, 1700000060]


def test_a_bad_first_time_is_the_only_bad_row() -> None:
    table = pa.table({"y": [0, 1, 0], "a": ["x", "y", "z"], "t": ["soon", "1700000000", "1700000001"]})
    with pytest.raises(RowError, match=r"<frame>:1 \(t\): 'soon' is not a time"):
        read(ColumnsSource(table, schema_of("a", time="t")))
    assert read(ColumnsSource(table, schema_of("a", time="t"), skip_bad_rows=1))["a"] == ["y", "z"]


@looped("values", [[1, None], ["1970-01-01", "soon"], ["5", "x"], [1.0, float("nan")]])
def test_times_that_cannot_be_read_are_named(values: list[Any]) -> None:
    table = pa.table({"y": [0, 0], "a": [1, 2], "t": pa.array(values)})
    with pytest.raises(RowError, match=r"<frame>:2 \(t\): .* is not a time like the others"):
        read(ColumnsSource(table, schema_of("a", time="t")))


def test_frames_of_other_libraries_through_arrow() -> None:
    frame = pl.DataFrame({"y": [0, 1], "a": ["x", None], "l": [[1, 2], []], "c": ["p", "q"]})
    frame = frame.with_columns(pl.col("c").cast(pl.Categorical))
    rows = read(ColumnsSource(frame, schema_of("a", {"column": "l", "kind": "sequence"}, "c")))
    assert (rows["a"], rows["l"], rows["c"]) == (["x", None], [[1, 2], []], ["p", "q"])

    class Relation:
        """As older duckdb: no stream protocol, but a method that returns Arrow."""

        def arrow(self) -> pa.Table:
            return pa.table({"y": [1], "a": [5]})

    class Result:
        """As newer duckdb: the method returns a reader of the result."""

        def arrow(self) -> pa.RecordBatchReader:
            return pa.table({"y": [1], "a": [5]}).to_reader()

    for older_or_newer in (Relation(), Result()):
        assert read(ColumnsSource(older_or_newer, schema_of("a")))["a"] == [5]
    with pytest.raises(ValueError, match="read once, preparation reads twice"):
        ColumnsSource(pa.table({"y": [1], "a": [5]}).to_reader(), schema_of("a"))
    for plain in (
        {"y": [1, 0], "a": [5, None]},
        {"y": np.array([1, 0]), "a": [5, None]},
        [{"y": 1, "a": 5}, {"y": 0}],
        pl.DataFrame({"y": [1, 0], "a": [5, None]}).lazy(),
    ):
        assert read(ColumnsSource(plain, schema_of("a")))["a"] == [5, None]
    for no_frame in (7, {1, 2}, [1, 2]):
        with pytest.raises(ValueError, match="is not a path and not an Arrow-capable frame"):
            ColumnsSource(no_frame, schema_of("a"))
    with pytest.raises(ValueError, match="dict cannot be read as an Arrow table"):
        ColumnsSource({"y": [1, "x"], "a": [5, 6]}, schema_of("a"))
    with pytest.raises(ValueError, match=r"Series cannot be read as an Arrow table: .*; convert it first"):
        ColumnsSource(frame["l"], schema_of("a"))


def write_csv(path: Path, text: str) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(text.encode())
    return path


def test_csv_text_stays_text_and_lines_end_any_way(tmp_path: Path) -> None:
    text = '\ufeffy,a,d\r\n1,007,1.5\r\n\r\n0,"q,""r",\r\n1,,-2\r\n'
    for name in ("x.csv", "x.csv.gz"):
        source = ColumnsSource(write_csv(tmp_path / name, text), schema_of("a", dense=["d"]))
        rows = read(source)
        assert rows["label"] == [1, 0, 1]
        assert rows["a"] == ["007", 'q,"r', None]
        assert rows["dense"][0] == [1.5] and np.isnan(rows["dense"][1][0])


@looped("delimiter", [",", "\t", ";", "|"])
def test_delimiters_are_found_and_announced(tmp_path: Path, delimiter: str) -> None:
    rows = [["y", "a", "b"]] + [[str(i % 2), f"k{i}", "x y"] for i in range(20)]
    path = write_csv(tmp_path / "x.csv", "\n".join(delimiter.join(row) for row in rows))
    source = ColumnsSource(path, schema_of("a", "b"))
    assert source.notes == (f"columns are cut at {delimiter!r} (found in {path})",)
    assert read(source)["a"][3] == "k3"
    assert ColumnsSource(path, schema_of("a", csv={"delimiter": delimiter})).notes == ()
    with pytest.raises(ValueError, match=r"x\.csv: the header, split at '#', lacks column 'y'.*set csv.delimiter"):
        ColumnsSource(path, schema_of("a", csv={"delimiter": "#"}))


def test_csv_without_header_and_with_own_nulls(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", "1,k,NA\n0,NA,2\n")
    schema = schema_of("a", dense=["d"], csv={"column_names": ["y", "a", "d"], "null_values": ["", "NA"]})
    assert read(ColumnsSource(path, schema))["a"] == ["k", None]


def test_csv_faults_name_file_line_and_column(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", "y,a,d\n0,k,1\n1,k\n0,k,zz\n2,k,1\n")
    schema = schema_of("a", dense=["d"])
    with pytest.raises(RowError, match=rf"{path}:3: too few columns, 2 instead of 3, in '1,k'"):
        read(ColumnsSource(path, schema))
    with pytest.raises(RowError, match=rf"{path}:4 \(d\): 'zz' is not a finite"):
        read(ColumnsSource(path, schema, skip_bad_rows=1))
    with pytest.raises(RowError, match=rf"{path}:5 \(y\): '2' is not a label"):
        read(ColumnsSource(path, schema, skip_bad_rows=2))
    source = ColumnsSource(path, schema, skip_bad_rows=3)
    assert read(source)["label"] == [0]
    assert source.skipped.num_rows == 3 and len(source.skipped.examples) == 3


def test_bad_lines_after_the_last_good_row_count_too(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", "y,a\n0,k\n1,k,k\n")
    with pytest.raises(RowError, match=":3: too many columns, 3 instead of 2"):
        read(ColumnsSource(path, schema_of("a")))
    path = write_csv(tmp_path / "z.csv", "y,a\n0,k,k\n1,k,k\n")
    source = ColumnsSource(path, schema_of("a"), skip_bad_rows=2)
    assert read(source)["label"] == [] and source.skipped.num_rows == 2


class SlowFile(io.BytesIO):
    """A file whose every read takes a while."""

    def read(self, size: int | None = -1, /) -> bytes:
        time.sleep(0.02)
        return super().read(size)


@pytest.mark.parametrize("text", ["y,a\n", "y,a\n" + "0,1\n" * 1000], ids=["header alone", "four blocks"])
def test_reading_broken_off_leaves_no_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Arrow's thread would need Python to let go of it, and abort the process where Python is shutting down."""
    noted: list[weakref.ref[Any]] = []

    class Places(tabular._LinePlaces):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            noted.append(weakref.ref(self))

    path = tmp_path / "rows.csv"
    path.write_text("y,a\n")
    reader = tabular.TextReader(find_files([path], matches=bool, wanted="any"), CsvSpec(delimiter=","))
    monkeypatch.setattr(tabular, "_LinePlaces", Places)
    monkeypatch.setattr(InputFile, "open_stream", lambda self: pa.PythonFile(SlowFile(text.encode()), "r"))
    monkeypatch.setattr(tabular, "CSV_BLOCK_BYTES", 1024)
    for _ in range(5):  # without the wait, Arrow's thread is the later one most times
        next(reader.read(0, 0, ["y"], 10), None)
    assert [places() for places in noted] == [None] * 5


def test_unreadable_files_are_named_with_the_cure(tmp_path: Path) -> None:
    schema = schema_of("a")
    rng = np.random.default_rng(1)
    whole = gzip.compress(("y,a\n" + "".join(f"0,{k}\n" for k in rng.integers(0, 2**60, 20_000))).encode())
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match=r"cut\.csv\.gz: Truncated compressed stream; the file is cut short"):
        read(ColumnsSource(tmp_path / "cut.csv.gz", schema))
    (tmp_path / "empty.csv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.csv is empty"):
        ColumnsSource(tmp_path / "empty.csv", schema)
    (tmp_path / "latin.csv").write_bytes("y,a\n0,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.csv:2: byte 6 is not UTF-8; convert it"):
        ColumnsSource(tmp_path / "latin.csv", schema)
    (tmp_path / "packed.csv").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"packed\.csv is a zip archive; unpack it"):
        ColumnsSource(tmp_path / "packed.csv", schema)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1xxxxxxxxxxxx")
    with pytest.raises(ValueError, match=r"cut\.parquet: .*write it again"):
        ColumnsSource(tmp_path / "cut.parquet", schema)
    with pytest.raises(ValueError, match=r"none\.csv: no such file or folder"):
        ColumnsSource(tmp_path / "none.csv", schema)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.md").write_text("x")
    with pytest.raises(ValueError, match=r"folder: no matching file .*\(\.parquet.*\.csv.*; it holds readme\.md"):
        ColumnsSource(tmp_path / "folder", schema)
    with pytest.raises(ValueError, match=r"\*\.csv: no file matches this pattern"):
        ColumnsSource(str(tmp_path / "folder" / "*.csv"), schema)


@pytest.mark.parametrize("line", [b"1,\xff\n", b"1,2,\xff\xfe,3\n"], ids=["a row", "a ragged line"])
def test_bytes_not_utf8_are_named_by_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], line: bytes) -> None:
    """Beyond what is looked at first; of a ragged line Arrow printed a traceback."""
    before = b"y,a\n" + b"0,b\n" * 30_000
    (tmp_path / "late.csv").write_bytes(before + line + b"1,b\n" * 10)
    with pytest.raises(ValueError, match=rf"late\.csv:30002: byte {len(before) + line.index(0xFF)} is not UTF-8"):
        read(ColumnsSource(tmp_path / "late.csv", schema_of("a"), skip_bad_rows=5))
    assert capfd.readouterr().err == ""


@looped("line", ['1,"b\n', '"1,b\n'])
@looped("header", [True, False])
def test_a_quote_that_is_never_closed_takes_no_rows_with_it(tmp_path: Path, line: str, header: bool) -> None:
    schema = schema_of("a", csv={} if header else {"column_names": ["y", "a"]})
    path = write_csv(tmp_path / "q.csv", "y,a\n" * header + "0,b\n" * 9 + line + "1,b\n" * 7)
    with pytest.raises(ValueError, match=rf"q\.csv:{10 + header}: a quote opens here and is never closed"):
        read(ColumnsSource(path, schema, skip_bad_rows=5))
    write_csv(path, "y,a\n" * header + "0,b\n" * 9 + '1,"b\nc"')
    assert read(ColumnsSource(path, schema))["a"] == ["b"] * 9 + ["b\nc"]


def test_one_column_and_no_last_newline(tmp_path: Path) -> None:
    """The line that `read` adds to a file must be a bad one in a file of any width, and no row."""
    for name, text in (("x.csv", "a\n1\n0"), ("y.csv", "a,b\n1,2\n0,3"), ("z.csv", "a,b\r\n1,2\r\n0,3\r\n\r\n")):
        reader = open_table(write_csv(tmp_path / name, text), CsvSpec())
        pieces = list(reader.read(0, 0, ["a"], 10))
        assert [value for rows in pieces for value in rows.batch.column(0).to_pylist()] == ["1", "0"]
        assert not any(rows.bad for rows in pieces)


def test_a_parquet_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    table = pa.table([[0, 1], ["a", "b"], ["c", "d"]], names=["y", "a", "a"])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet: two columns are called 'a'; rename one"):
        ColumnsSource(tmp_path / "x.parquet", schema_of("a"))


def test_a_header_of_very_many_names_alike_is_numbered_at_once() -> None:
    names = tabular.distinct_names(["", "x", "x (2)"] + ["x"] * 60_000)
    assert (names[:5], names[-1]) == (["", "x", "x (2)", "x (3)", "x (4)"], "x (60002)")


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def test_drift_between_parquet_files_is_named(tmp_path: Path) -> None:
    first = parquet(tmp_path / "a.parquet", y=[0], a=pa.array([1], pa.int32()), d=[1.0])
    schema = schema_of("a", dense=["d"])
    wider = parquet(tmp_path / "b.parquet", y=[1], a=pa.array([2], pa.int64()), d=[2.0])
    assert read(ColumnsSource([first, wider], schema))["a"] == [1, 2]
    text = parquet(tmp_path / "c.parquet", y=[1], a=["2"], d=[2.0])
    with pytest.raises(ValueError, match=r"c\.parquet: column 'a' has type string, .*a\.parquet has int32; rewrite"):
        ColumnsSource([first, text], schema)
    less = parquet(tmp_path / "d.parquet", y=[1], a=[2])
    chunks = list(ColumnsSource([first, less], schema).chunks())
    assert [np.isnan(chunk.dense).tolist() for chunk in chunks] == [[[False]], [[True]]], "a column that a file lacks"
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'amount'; columns: y, a, d"):
        ColumnsSource(first, schema_of("amount"))
    with pytest.raises(ValueError, match="of different formats"):
        ColumnsSource([first, write_csv(tmp_path / "x.csv", "y,a,d\n")], schema)


@looped(
    ("columns", "schema", "message"),
    [
        ({"y": [[1]], "a": [1]}, {}, "column 'y' has type list<element: int64>, which is not a number"),
        ({"y": [1], "a": [{"x": 1}]}, {}, "column 'a' has type struct<x: int64>, which cannot be an id"),
        ({"y": [1], "a": [["b"]]}, {}, "column 'a' has type list<element: string>, which does not fit kind one_hot"),
        ({"y": [1], "a": [1], "d": [datetime.date(2020, 1, 1)]}, {"dense": ["d"]}, "column 'd' has type date32"),
        ({"y": [1], "a": [1], "t": [True]}, {"time": "t"}, "time column 't' has type bool"),
    ],
)
def test_a_type_that_does_not_fit_is_said_with_its_file(
    columns: dict[str, Any], schema: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = parquet(tmp_path / "logs.parquet", **columns)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: {message}"):
        read(ColumnsSource(path, schema_of("a", **schema)))


def test_hive_folders_become_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "t" / "day=2" / "site=a%2Fb" / "p.parquet", y=[0], a=[1])
    parquet(tmp_path / "t" / "day=10" / "site=__HIVE_DEFAULT_PARTITION__" / "p.parquet", y=[1], a=[2])
    (tmp_path / "t" / "_SUCCESS").write_text("")
    parquet(tmp_path / "t" / ".hidden" / "p.parquet", y=[5], a=[5])
    rows = read(ColumnsSource(tmp_path / "t", schema_of("a", "site", time="day")))
    assert rows["a"] == [1, 2], "day=2 comes before day=10"
    assert rows["time"] == [2, 10]
    assert rows["site"] == ["a/b", None]


@looped("kind", ["parquet", "csv"])
def test_hive_columns_are_those_of_the_path_however_a_file_is_named(tmp_path: Path, kind: str) -> None:
    files = []
    for day, site, a in ((2, "x", 5), (10, "__HIVE_DEFAULT_PARTITION__", 6)):
        folder = tmp_path / "t" / f"day={day}" / f"site={site}"
        folder.mkdir(parents=True)
        file = folder / f"p.{kind}"
        text = f"y,a\n0,{a}\n1,{a}\n"
        files.append(parquet(file, y=[0, 1], a=[a, a]) if kind == "parquet" else write_csv(file, text))
    schema = schema_of({"column": "a", "type": "int"}, {"column": "day", "type": "int"}, "site")
    want = {"a": [5, 5, 6, 6], "day": [2, 2, 10, 10], "site": ["x", "x", None, None]}
    for paths in (tmp_path / "t", str(tmp_path / "t" / "*" / "*" / "p.*"), files, [f.parent for f in files]):
        rows = read(ColumnsSource(paths, schema))
        assert {name: rows[name] for name in want} == want
        assert "day" in guess_columns(paths, label="y").schema().feature_names
    rows = read(ColumnsSource(files[1].parent, schema))
    assert rows["day"] == [10, 10], "as when a folder of new rows is scored"


def test_a_hive_column_alone_is_read_from_text_without_looking_at_its_lines(tmp_path: Path) -> None:
    (tmp_path / "day=3").mkdir()
    file = write_csv(tmp_path / "day=3" / "p.csv", "7,x\n8,1\n")
    reader = open_table(file, CsvSpec(column_names=("a", "b")))
    (rows,) = reader.read(0, 0, ["day"], 100)
    assert rows.batch.to_pydict() == {"day": ["3", "3"]}
    assert rows.lines.tolist() == [1, 2]


def test_paths_globs_and_uris_name_the_same_files(tmp_path: Path) -> None:
    for i in (10, 9, 1):
        parquet(tmp_path / "logs" / f"part-{i}.parquet", y=[0], a=[i])
    folder = tmp_path / "logs"
    for paths in (
        folder,
        str(folder / "*.parquet"),
        str(tmp_path / "**" / "part-?*.parquet"),
        folder.as_uri(),
        folder.as_uri() + "/part-*.parquet",
    ):
        assert read(ColumnsSource(paths, schema_of("a")))["a"] == [1, 9, 10]
    explicit = [folder / f"part-{i}.parquet" for i in (9, 1)]
    assert [f.name for f in find_files(explicit, matches=bool, wanted="")] == [str(path) for path in explicit]
    (found,) = find_files([folder.as_uri() + "/part-9*"], matches=bool, wanted="")
    assert found.name == folder.as_uri() + "/part-9.parquet"


@pytest.fixture
def three_files(tmp_path: Path) -> dict[str, list[Path]]:
    """The same 40 rows in three files of each format."""
    rng = np.random.default_rng(3)
    names: dict[str, list[Path]] = {"csv": [], "parquet": []}
    for i, n in enumerate((17, 1, 22)):
        columns = {"y": rng.integers(0, 2, n), "a": [f"k{k}" for k in rng.integers(0, 9, n)]}
        columns["t"] = np.arange(n) + 100 * i
        names["parquet"].append(parquet(tmp_path / f"{i}.parquet", **columns))
        text = "\n".join(["y,a,t", *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))])
        names["csv"].append(write_csv(tmp_path / f"{i}.csv", text))
    return names


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 1000])
def test_every_position_resumes_alike(three_files: dict[str, list[Path]], kind: str, rows_per_chunk: int) -> None:
    source = ColumnsSource(three_files[kind], schema_of("a", time="t"))
    whole = read(source)
    assert len(whole["label"]) == 40
    assert whole == read(source, rows_per_chunk=rows_per_chunk)
    seen = 0
    for chunk in list(source.chunks(rows_per_chunk=rows_per_chunk)):
        seen += chunk.num_rows
        rest = read(source, start=chunk.position, rows_per_chunk=7)
        assert rest["a"] == whole["a"][seen:] and rest["time"] == whole["time"][seen:]
    assert seen == 40


def test_resume_between_bad_lines_keeps_the_count(tmp_path: Path) -> None:
    lines = ["y,a"] + [f"0,k{i}" if i % 3 else "0,x,y" for i in range(20)]
    source = ColumnsSource(write_csv(tmp_path / "x.csv", "\n".join(lines)), schema_of("a"), skip_bad_rows=7)
    whole = read(source)["a"]
    assert source.skipped.num_rows == 7
    seen = 0
    for chunk in list(source.chunks(rows_per_chunk=2)):
        seen += chunk.num_rows
        assert read(source, start=chunk.position)["a"] == whole[seen:]
        assert source.skipped.num_rows == 7


def test_scout_counts_or_estimates_rows(three_files: dict[str, list[Path]], tmp_path: Path) -> None:
    info = ColumnsSource(three_files["parquet"], schema_of("a")).scout()
    assert (info.num_rows, info.num_rows_exact, len(info.files)) == (40, True, 3)
    assert ColumnsSource(three_files["csv"], schema_of("a")).scout().num_rows == 40
    rng = np.random.default_rng(1)
    text = "y,a\n" + "".join(f"0,{k}\n" for k in rng.integers(0, 2**60, 250_000))
    for name in ("big.csv", "big.csv.gz"):
        estimate = ColumnsSource(write_csv(tmp_path / name, text), schema_of("a")).scout()
        assert estimate.num_rows == pytest.approx(250_000, rel=0.1)
        assert not estimate.num_rows_exact


def test_dictionaries_give_the_keys_they_stand_for(tmp_path: Path) -> None:
    """Coded columns, shared and changing dictionaries, against the plain text of the same rows."""
    rng = np.random.default_rng(4)
    texts = [None if k == 0 else f"k{k}" for k in rng.integers(0, 40, 300)]
    groups = [pa.array(texts[a:b]).dictionary_encode() for a, b in ((0, 130), (130, 300))]
    codes, entries = pa.array([0, 127, None] * 100, pa.int8()), pa.array([f"d{i}" for i in range(128)])
    narrow = pa.DictionaryArray.from_arrays(codes, entries)
    table = pa.table({"y": [0] * 300, "a": pa.chunked_array(groups), "b": narrow, "c": texts})
    pq.write_table(table.select(["y", "c"]), tmp_path / "x.parquet", row_group_size=90)
    rows = read(ColumnsSource(table, schema_of("a", "b")), rows_per_chunk=50)
    assert rows["a"] == texts
    assert rows["b"] == ["d0", "d127", None] * 100
    assert read(ColumnsSource(tmp_path / "x.parquet", schema_of("c")), rows_per_chunk=50)["c"] == texts
    chunks = list(ColumnsSource(table, schema_of("a")).chunks(rows_per_chunk=50))
    coded = [column_of(chunk.keys, "a") for chunk in chunks]
    assert all(isinstance(c, CodedKeys) for c in coded)
    assert coded[0].entries is coded[1].entries and coded[0].entries is not coded[-1].entries

"""Criteo-like text: every published layout, every bad input with its place, resume, and a slow parser to agree with."""

import gzip
import importlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.data import native, reference
from hotrow.data.chunk import Chunk, RowError
from hotrow.data.sources import criteo
from hotrow.data.sources.criteo import CATEGORY_NAMES, DENSE_NAMES, CriteoSource
from hotrow.data.sources.inputs import ByteStream, find_files, prefetch
from loops import looped

try:
    NATIVE: ModuleType | None = importlib.import_module("hotrow._native")
except ImportError:
    NATIVE = None
BACKENDS = [
    pytest.param(NATIVE, marks=pytest.mark.skipif(NATIVE is None, reason="the native module is absent"), id="native"),
    pytest.param(reference, id="reference"),
]


@pytest.fixture(params=BACKENDS)
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(native, "backend", lambda: request.param)
    return request.param


def row(n: int, *, label: str | None = "0", **fields: str) -> list[str]:
    values = {"label": label or ""}
    values |= {name: str(n * 13 + i) for i, name in enumerate(DENSE_NAMES)}
    values |= {name: f"{(n * 26 + i) * 2654435761 % 2**32:08x}" for i, name in enumerate(CATEGORY_NAMES)}
    values |= {"I2": "", "C4": ""} | fields
    return list(values.values())[label is None :]


def text(rows: list[list[str]], *, delimiter: str = "\t", end: str = "\n") -> bytes:
    return "".join(delimiter.join(fields) + end for fields in rows).encode()


def read(path: Path, *, rows_per_chunk: int = 4, buffer_bytes: int = 4096, **options: object) -> list[Chunk]:
    source = CriteoSource([path], buffer_bytes=buffer_bytes, **options)  # type: ignore[arg-type]
    return list(source.chunks(rows_per_chunk=rows_per_chunk))


def flat(chunks: list[Chunk]) -> list[tuple[object, ...]]:
    rows = []
    for chunk in chunks:
        for r in range(chunk.num_rows):
            dense = [None if math.isnan(x) else x for x in chunk.dense[r].tolist()]
            own = map(chunk.keys.get, CATEGORY_NAMES)
            keys = [int(k.values[r]) if k.valid is None or k.valid[r] else None for k in own]
            rows.append((None if chunk.label is None else float(chunk.label[r]), *dense, *keys))
    return rows


def unless_blank(field: str) -> str:
    return field if field.strip(" \r") else ""


def expected(rows: list[list[str]]) -> list[tuple[object, ...]]:
    result = []
    for fields in rows:
        label = [float(fields[0])] if len(fields) == 40 else [None]
        columns = list(map(unless_blank, fields))
        dense = [None if f == "" else float(np.float32(float(f))) for f in columns[-39:-26]]
        result.append((*label, *dense, *(None if f == "" else int(f, 16) for f in columns[-26:])))
    return result


ROWS = [row(n, label=str(n % 2)) for n in range(11)]
HEADER = ["label", *DENSE_NAMES, *CATEGORY_NAMES]
LAYOUTS = {
    "kaggle and terabyte": text(ROWS),
    "no newline at the end": text(ROWS)[:-1],
    "windows line ends": text(ROWS, end="\r\n"),
    "windows, no newline at the end": text(ROWS, end="\r\n")[:-2],
    "byte order mark": b"\xef\xbb\xbf" + text(ROWS),
    "comma": text(ROWS, delimiter=","),
    "comma with header": text([HEADER, *ROWS], delimiter=","),
    "header with Id": text([["Id", "Label", *HEADER[1:]], *([str(n), *r] for n, r in enumerate(ROWS))], delimiter=","),
    "byte order mark and header, windows": b"\xef\xbb\xbf" + text([HEADER, *ROWS], end="\r\n"),
    "tab with header of other names": text([["click", *(f"f{i}" for i in range(39))], *ROWS]),
    "gzip": gzip.compress(text(ROWS)),
    "two gzip members": gzip.compress(text(ROWS[:5])) + gzip.compress(text(ROWS[5:])),
    "zstd": pa.compress(text(ROWS), codec="zstd", asbytes=True),
}


@looped("name", LAYOUTS)
def test_every_layout_gives_the_same_rows(name: str, either: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(LAYOUTS[name])
    chunks = read(path)
    assert [chunk.num_rows for chunk in chunks] == [4, 4, 3]
    assert flat(chunks) == expected(ROWS)


def test_rows_without_label(either: ModuleType, tmp_path: Path) -> None:
    rows = [row(n, label=None) for n in range(3)]
    (tmp_path / "test.txt").write_bytes(text(rows))
    assert flat(read(tmp_path / "test.txt", labels="ignored")) == expected(rows)
    with pytest.raises(RowError, match=r"test.txt:1: 39 columns between tabs where 40 are expected"):
        read(tmp_path / "test.txt")
    (tmp_path / "head.csv").write_bytes(text([["Id", *HEADER[1:]], *([str(7), *r] for r in rows)], delimiter=","))
    assert flat(read(tmp_path / "head.csv", labels="ignored")) == expected(rows)
    with pytest.raises(ValueError, match="the header has no label column"):
        read(tmp_path / "head.csv")


@looped("label", ["", "-1", "unknown", "1"])
@looped("with_id", [False, True])
def test_an_ignored_label_may_hold_anything(label: str, with_id: bool, either: ModuleType, tmp_path: Path) -> None:
    rows = [[label, *row(n, label=None)] for n in range(5)]
    if with_id:
        rows = [["Id", *HEADER], *([str(n), *fields] for n, fields in enumerate(rows))]
    (tmp_path / "new.txt").write_bytes(text(rows))
    (tmp_path / "test.txt").write_bytes(text([row(5, label=None)]))
    chunks = list(CriteoSource([tmp_path / "new.txt", tmp_path / "test.txt"], labels="ignored").chunks())
    assert flat(chunks) == expected([row(n, label=None) for n in range(6)])
    (tmp_path / "bad.txt").write_bytes(text([[label, *row(0, label=None)], [label, *row(1, label=None, C1="?")]]))
    with pytest.raises(RowError, match=r"bad.txt:2, column 15 \(C1\)"):
        list(CriteoSource([tmp_path / "bad.txt"], labels="ignored").chunks())


BAD_FIELDS = [
    ({"label": "2"}, 1, "label", "label is '2'; it must be 0 or 1"),
    ({"label": ""}, 1, "label", "it must be 0 or 1"),
    ({"I1": "abc"}, 2, "I1", "'abc' is not a number"),
    ({"I3": "inf"}, 4, "I3", "'inf' is not a number"),
    ({"I3": "-inf"}, 4, "I3", "'-inf' is not a number"),
    ({"I4": "0x10"}, 5, "I4", "is not a number"),
    ({"I5": "1e"}, 6, "I5", "is not a number"),
    ({"I13": "1e39"}, 14, "I13", "too large"),
    ({"I13": "1e999"}, 14, "I13", "too large"),
    ({"C1": "0123456g"}, 15, "C1", "'0123456g' is not a category; it must be 1 to 8 hex digits"),
    ({"C2": "123456789"}, 16, "C2", "has more than 8 hex digits"),
    ({"C2": "12345678x"}, 16, "C2", "is not a category"),
    ({"C3": "é"}, 17, "C3", "'é' is not a category"),
    ({"C26": "xyz"}, 40, "C26", "'xyz' is not a category"),
    ({"C26": "\0"}, 40, "C26", "is not a category"),
]


@looped(("fields", "column", "name", "reason"), BAD_FIELDS)
def test_a_bad_field_is_named(
    fields: dict[str, str], column: int, name: str, reason: str, either: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(text([*ROWS[:6], row(9, **fields), *ROWS[6:]]))
    with pytest.raises(RowError, match=re.escape(f"{path}:7, column {column} ({name}): ")) as caught:
        read(path)
    assert reason in str(caught.value)
    assert (caught.value.line, caught.value.column) == (7, column)


def test_what_other_files_read_is_no_bad_field(either: ModuleType, tmp_path: Path) -> None:
    fields = {"I5": " 1 ", "I6": "+1", "I13": "-9223372036854775809", "I12": "9223372036854775808", "C1": "68fd1e64\r"}
    (tmp_path / "rows.txt").write_bytes(text([*ROWS, row(9, **fields)]))
    assert flat(read(tmp_path / "rows.txt")) == expected([*ROWS, row(9, **fields)])


@looped(
    ("line", "reason"),
    [
        (b"\t".join([b"0"] * 39), "39 columns between tabs where 40 are expected"),
        (b"\t".join([b"0"] * 41), "41 columns between tabs where 40 are expected"),
        (b",".join([b"0"] * 40), "1 column between tabs where 40 are expected; between commas there would be 40"),
        (
            b";".join([b"0"] * 40),
            "where 40 are expected; between semicolons there would be 40: replace them by tabs or commas",
        ),
        (b"", "the line is empty"),
        (b"\xf0\xfe\0", "1 column between tabs"),
    ],
)
def test_a_bad_line_is_named(line: bytes, reason: str, either: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(text(ROWS[:3]) + line + b"\n" + text(ROWS[3:]))
    with pytest.raises(RowError, match=re.escape(f"{path}:4: ") + ".*" + re.escape(reason)):
        read(path)


def test_another_delimiter_throughout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(text(ROWS, delimiter=";"))
    with pytest.raises(RowError, match=re.escape(f"{path}:1: 1 column between tabs where 40 are expected; between")):
        read(path)


@looped(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf\n", "the file is empty"),
        (text([HEADER]), "has a header and no rows"),
        (text([[*HEADER[1:], "label"], *ROWS]), "label is 'I1'"),
        (text([["label", *CATEGORY_NAMES, *DENSE_NAMES], *ROWS]), ":1: the header's columns are in another order"),
        ("\ufeff".encode("utf-16") + b"0", "UTF-16"),
        (gzip.compress(text(ROWS * 99))[:-200], r"reading failed after byte [\d,]+ of its decompressed gzip data"),
        (gzip.compress(text(ROWS))[:-4], "truncated or damaged, fetch it again"),
        (pa.compress(text(ROWS * 99), codec="zstd", asbytes=True)[:-99], "decompressed zstd data"),
        (b"0" * 9000, "column between tabs|longer than"),
        (text(ROWS) + b"0" * 9000, ":12: the line is longer than 4,096 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


@looped("compress", [gzip.compress, lambda raw: pa.compress(raw, codec="zstd", asbytes=True)])
def test_a_damaged_file_says_how_far_it_could_be_read(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8).tobytes()
    (tmp_path / "rows.gz").write_bytes(compress(raw)[: 2 << 20])
    (file,) = find_files([tmp_path / "rows.gz"], matches=bool, wanted="any")
    with ByteStream(file) as stream, pytest.raises(ValueError, match="reading failed after byte ") as caught:
        stream.readinto(memoryview(bytearray(4 << 20)))
    place = re.search("after byte ([0-9,]+) of", str(caught.value))
    assert place is not None and (1 << 20) < int(place[1].replace(",", "")) <= 2 << 20


def test_missing_paths_are_named(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "absent.txt", "absent.txt: no such file or folder"),
        (tmp_path / "*.txt", "no file matches this pattern"),
        (tmp_path, "no matching file in this folder .* it holds no file at all"),
        ("nosuch://bucket/x", "nosuch://bucket/x: this URI cannot be opened"),
    ]:
        with pytest.raises(ValueError, match=message):
            CriteoSource([path])
    with pytest.raises(ValueError, match="no input path given"):
        CriteoSource([])


def test_a_folder_gives_its_files_in_natural_order(tmp_path: Path) -> None:
    for day in (0, 2, 10):
        (tmp_path / f"day_{day}").write_bytes(text([row(day)]))
    (tmp_path / "README.md").write_text("not a log")
    (tmp_path / ".day_3").write_text("hidden")
    for paths in ([tmp_path], [tmp_path / "day_*"], [f"file://{tmp_path}"]):
        source = CriteoSource(paths)
        assert flat(list(source.chunks())) == expected([row(0), row(2), row(10)])


def test_texts_that_mean_missing_are_missing(either: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    written = [row(0), row(1, I1="NA", I3="\\N", C1="null", C9=" NaN "), row(2), row(3, C26="None")]
    path.write_bytes(text(written))
    want = [row(0), row(1, I1="", I3="", C1="", C9=""), row(2), row(3, C26="")]
    for rows_per_chunk in (1, 2, 3, 10):
        assert flat(read(path, rows_per_chunk=rows_per_chunk)) == expected(want)
    for bad in (row(1, I1="NA", C2="xyz"), row(1, label="NA")):
        path.write_bytes(text([row(0), bad]))
        with pytest.raises(RowError, match=r"rows\.txt:2, "):
            read(path)


def test_bad_rows_are_skipped_up_to_the_limit(either: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(text([row(9, I1="x"), *ROWS[:6], row(9, C5="?"), *ROWS[6:]]) + b"1\t2\n")
    source = CriteoSource([path], skip_bad_rows=3)
    chunks = list(source.chunks(rows_per_chunk=4))
    assert flat(chunks) == expected(ROWS)
    assert source.skipped.num_rows == 3
    places = [re.sub(r".*rows.txt:", "", e).split(":")[0] for e in source.skipped.examples]
    assert places == ["1, column 2 (I1)", "8, column 19 (C5)", "14"]
    again = CriteoSource([path], skip_bad_rows=3)
    assert flat(list(again.chunks(chunks[1].position, rows_per_chunk=4))) == expected(ROWS[8:])
    assert again.skipped.num_rows == 3
    with pytest.raises(RowError, match=r":14: .*2 bad rows were skipped before, as many as --skip-bad-rows allows"):
        list(CriteoSource([path], skip_bad_rows=2).chunks())
    with pytest.raises(ValueError, match="skip_bad_rows is -1"):
        CriteoSource([path], skip_bad_rows=-1)


@looped("compress", [bytes, gzip.compress])
def test_resume_at_every_chunk(compress: type[bytes], tmp_path: Path) -> None:
    for n, name in enumerate(("a.txt", "b.txt")):
        (tmp_path / name).write_bytes(compress(text(ROWS[n:], end="\r\n")[:-2]))

    def source() -> CriteoSource:
        return CriteoSource([tmp_path], buffer_bytes=1000)

    chunks = list(source().chunks(rows_per_chunk=2))
    for n, chunk in enumerate(chunks):
        rest = list(source().chunks(chunk.position, rows_per_chunk=2))
        assert flat(rest) == flat(chunks[n + 1 :])
        assert [c.position for c in rest] == [c.position for c in chunks[n + 1 :]]


def test_lines_are_counted_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text([HEADER, *ROWS, row(3, C1="?")], delimiter=","))
    position = read(path, skip_bad_rows=1)[0].position
    with pytest.raises(RowError, match=re.escape(f"{path}:13, column 15 (C1)")):
        list(CriteoSource([path]).chunks(position))


def test_scout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(text([HEADER, *ROWS]))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text(ROWS * 100)[:-1]))
    info = CriteoSource([tmp_path]).scout()
    assert info.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr("hotrow.data.sources.tabular.ESTIMATE_BYTES", 3000)
    estimate = CriteoSource([tmp_path]).scout()
    assert not estimate.num_rows_exact
    assert estimate.files == info.files
    (tmp_path / "a.txt").write_bytes(text(ROWS))
    assert CriteoSource([tmp_path]).scout().files != info.files


def test_against_the_published_rows(real_data: object) -> None:
    """Real Terabyte rows, field by field against Python's split, int and float."""
    path = real_data("criteo_terabyte_day0_10k.tsv.gz")  # type: ignore[operator]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    assert flat(list(CriteoSource([path]).chunks())) == expected([line.split("\t") for line in lines])


def test_against_float32_of_python() -> None:
    numbers = ["0", "-0", "7", "-3", "16777217", "123456789012345678", "9223372036854775807", "-9223372036854775808"]
    numbers += [
        "1.0", "-0.5", ".5", "5.", "1e3", "1E-3", "2.5e+2", "3.4028235e38", "1e-50", "1e-400", "0.1", "16777217.0",
    ]  # fmt: skip
    layout = native.RowLayout("\t", ignored_names=(), has_label=False, dense_names=("x",), category_names=("c",))
    for module in (NATIVE, reference):
        if module is None:
            continue
        columns = native.RowColumns.empty(layout, len(numbers))
        data = np.frombuffer("".join(f"{x}\tf\n" for x in numbers).encode(), np.uint8)
        native_backend, native.backend = native.backend, lambda module=module: module  # type: ignore[assignment]
        try:
            result = native.parse_rows(data, layout, columns, first_row=0, num_rows=len(numbers))
        finally:
            native.backend = native_backend  # type: ignore[assignment]
        assert result == (len(numbers), len(data), None, 0)
        truth = [np.float32(int(x)) if re.fullmatch(r"-?\d+", x) else np.float32(float(x)) for x in numbers]
        assert columns.dense[:, 0].tolist() == [float(x) for x in truth]


@looped("length", [1, 7, 8, 9])
def test_every_byte_in_every_place_of_a_number_and_a_category(length: int, either: ModuleType) -> None:
    """Fields of all lengths that the parser reads as one word, and one more, against Python's own idea of them."""
    layout = native.RowLayout("\t", ignored_names=(), has_label=False, dense_names=("x",), category_names=("c", "d"))
    columns = native.RowColumns.empty(layout, 1)
    for field, place, byte in itertools.product(("x", "c", "d"), range(length), range(256)):
        value = bytearray(b"7" * length)
        value[place] = byte
        fields = {"x": b"1", "c": b"a", "d": b"f" * 8, field: bytes(value)}
        line = b"\t".join(fields.values()) + b"\n"
        result = native.parse_rows(np.frombuffer(line, np.uint8), layout, columns, first_row=0, num_rows=1)
        if (field == "x" and byte in b"eE") or (field == "d" and byte in b"\r\n"):
            continue  # powers of ten, and ends of lines, have tests of their own
        wanted = rb"-?([0-9]+\.?[0-9]*|\.[0-9]+)" if field == "x" else rb"[0-9a-fA-F]{1,8}"
        is_good = re.fullmatch(wanted, bytes(value)) is not None
        assert (result.num_rows == 1) == is_good, (field, bytes(value))
        if is_good and field == "x":
            assert columns.dense[0, 0] == np.float32(float(value)), bytes(value)
        elif is_good:
            assert columns.keys["cd".index(field), 0] == int(value, 16), bytes(value)


def test_nothing_is_read_or_written_outside(either: ModuleType) -> None:
    """Guard values around the rows and the text survive; num_rows stops the parser."""
    layout = native.RowLayout("\t", ignored_names=(), has_label=True, dense_names=("x",), category_names=("c", "d"))
    columns = native.RowColumns.empty(layout, 4)
    for array in (columns.label, columns.dense, columns.keys):
        array[:] = 77
    data = np.frombuffer(b"1\t2\tff\t\n" * 5, np.uint8)
    result = native.parse_rows(data, layout, columns, first_row=1, num_rows=3)
    assert result == (2, 16, None, 0)
    assert columns.label.tolist() == [77, 1, 1, 77]
    assert columns.dense[:, 0].tolist() == [77, 2, 2, 77]
    assert columns.keys[0, :5].tolist() == [77, 255, 255, 77, 77]
    if either is NATIVE:
        for bad in (data[:-1], data[:3]):
            with pytest.raises(ValueError, match="must end with a newline"):
                native.parse_rows(bad, layout, columns, first_row=0, num_rows=1)
        with pytest.raises(ValueError, match="does not fit the columns"):
            native.parse_rows(data, layout, columns, first_row=0, num_rows=5)


def slow_fault(line: str, delimiter: str) -> int | None:
    """1-based column of the first fault of a labelled line, 0 for a wrong number of columns, None for a good line."""
    fields = line.removesuffix("\r").split(delimiter)
    if len(fields) != 40:
        return 0
    for column, written in enumerate(fields, start=1):
        field = unless_blank(written).strip() if column > 1 else written
        number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", field)
        if column == 1:
            good = re.fullmatch(r"[01](\.0*)?", field) is not None
        elif column <= 14:
            good = field == "" or (number is not None and abs(float(field)) < 3.4028236e38)
        else:
            good = re.fullmatch(r"[0-9a-fA-F]{0,8}", field) is not None
        if not good:
            return column
    return None


def fuzzed_lines() -> st.SearchStrategy[list[str]]:
    """Good rows with some fields replaced by numbers, digits and rubbish, and some characters anywhere."""
    rubbish = st.text(alphabet="0123456789abcdefABCDEF.-+eExg \r\t,\0é", max_size=10)
    numbers = st.one_of(st.integers(-(2**70), 2**70).map(str), st.floats(width=64).map(repr))
    edits = st.lists(st.tuples(st.integers(0, 39), st.one_of(rubbish, numbers, st.just(""))), max_size=2)

    def edited(n: int, changes: list[tuple[int, str]]) -> str:
        fields = row(n, label=str(n % 2))
        for place, value in changes:
            fields[place] = value
        return "\t".join(fields)

    return st.lists(st.builds(edited, st.integers(0, 1000), edits), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fuzzed_lines(), st.sampled_from(["\n", "\r\n"]))
def test_fuzz_against_a_slow_parser(lines: list[str], end: str) -> None:
    lines = [*lines, "\t".join(ROWS[0])]  # one good row, so that there is a layout to find
    faults = [(n, slow_fault(line, "\t")) for n, line in enumerate(lines, start=1)]
    good = [lines[n - 1].removesuffix("\r").split("\t") for n, fault in faults if fault is None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.txt"
        path.write_bytes(end.join(lines).encode())
        for module in (NATIVE, reference):
            if module is None:
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native, "backend", lambda module=module: module)
                source = CriteoSource([path], skip_bad_rows=len(lines), buffer_bytes=1000)
                chunks = list(source.chunks(rows_per_chunk=3))
                source.skipped.max_examples = len(lines)
                assert flat(chunks) == expected(good)
                assert source.skipped.num_rows == len(lines) - len(good)
                if first := next((fault for fault in faults if fault[1] is not None), None):
                    with pytest.raises(RowError) as caught:
                        list(CriteoSource([path]).chunks())
                    assert (caught.value.line, caught.value.column or 0) == first


def test_prefetch_keeps_order_and_delivers_errors_in_their_place() -> None:
    def items() -> object:
        yield from range(3)
        raise ValueError("the fourth")

    got = []
    with pytest.raises(ValueError, match="the fourth"):
        for item in prefetch(items()):  # type: ignore[arg-type]
            got.append(item)
    assert got == [0, 1, 2]


def test_prefetch_ends_its_thread_when_dropped() -> None:
    closed = []

    def items() -> object:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    iterator = prefetch(items())  # type: ignore[arg-type]
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert closed == [True]


@looped("bad", [(), (7,), (4990,), (7, 4990), (2499, 2500, 2501)])
def test_two_parsers_read_what_one_reads(bad: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are bad in the first half of a text, in the second, and where they meet."""
    lines = [row(i % 3, I1=str(i), C1=f"{i:x}") for i in range(5000)]
    for i in bad:
        lines[i] = row(i % 3, C1="?")
    (tmp_path / "rows.txt").write_bytes(text(lines))
    found = []
    for beside_rows in (1 << 40, 16):
        monkeypatch.setattr(criteo, "BESIDE_ROWS", beside_rows)
        monkeypatch.setattr(criteo, "usable_cores", lambda: 2)
        chunks = read(tmp_path / "rows.txt", rows_per_chunk=4096, buffer_bytes=1 << 17, skip_bad_rows=len(bad))
        found.append((flat(chunks), [(chunk.num_rows, chunk.position) for chunk in chunks]))
    assert found[0] == found[1] and len(found[0][0]) > 0

"""Sizes are checked before memory is taken: files of some kilobytes that stand for gigabytes, and files that lie."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from hotrow.data.sources import columnar
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import parse_schema
from raw_rows import read

MOST_S, KEPT_BYTES = 2.0, 50 << 20
"""Processor seconds of a case, and what all of them may leave in memory."""
NUM_ROWS = 64
STATUS = Path("/proc/self/status")


def memory(name: str) -> int:
    pa.default_memory_pool().release_unused()
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith(name))


@contextmanager
def peak_below(num_bytes: int) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    yield
    assert memory("VmHWM") - before < num_bytes


def coded(cells: list[Any]) -> pa.Array:
    return pa.array(cells, pa.large_string()).dictionary_encode()


def as_views(cells: list[Any]) -> pa.Array:
    """Cells that are all the first one, whose bytes are there once."""
    one = pa.array(cells[:1], pa.string_view()).buffers()
    return pa.Array.from_buffers(pa.string_view(), len(cells), [None, pa.py_buffer(bytes(one[1]) * len(cells)), one[2]])


COLUMNS: dict[str, Callable[[list[str]], Any]] = {
    "text": coded,
    "bytes": lambda cells: pa.array([cell.encode() for cell in cells], pa.large_binary()),
    "list": lambda cells: pa.array([[cell, "b"] for cell in cells], pa.list_(pa.string())),
    "struct": lambda cells: pa.StructArray.from_arrays([pa.array(cells, pa.large_string())], ["x"]),
    "items": lambda cells: pa.array(
        [[1]] * (len(cells) - 1) + [[7] * len(cells) * len(cells[0])], pa.list_(pa.int64())
    ),
    "views": as_views,
}
WRITERS: dict[str, Callable[[pa.Table, Path, str], None]] = {
    "parquet": lambda table, path, codec: pq.write_table(
        table, path, compression=codec, row_group_size=48, dictionary_pagesize_limit=64 << 20
    ),
    "feather": lambda table, path, codec: pyarrow.feather.write_feather(table, path, compression=codec),
    "orc": lambda table, path, codec: orc.write_table(table, path, compression=codec, dictionary_key_size_threshold=1),
}


def table_of(kind: str, width: int, num_rows: int = NUM_ROWS) -> pa.Table:
    column, plain = COLUMNS[kind](["a" * width] * num_rows), [i % 2 for i in range(num_rows)]
    return pa.table({"y": plain, "item": [f"i{i % 5}" for i in plain], "user": column})


def written(kind: str, form: str, path: Path, width: int, codec: str = "zstd") -> Path:
    table = table_of(kind, width)
    if form == "orc" and kind in ("text", "views"):  # it takes plain text alone
        table = table.set_column(2, "user", table["user"].cast(pa.large_string()))
    WRITERS[form](table, path, codec)
    return path


def read_all(path: Path, kind: str) -> Any:
    column = {"column": "user", "kind": "multi_hot"} if kind in ("list", "items") else "user"
    return read(ColumnsSource(path, parse_schema({"label": "y", "categorical": [column]}, where="test")))["user"]


CASES = [
    (kind, form) for kind in COLUMNS for form in WRITERS if (kind, form) not in (("views", "orc"), ("views", "parquet"))
]
MENDED = r"write it again without compression, or as CSV"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a thousand times as small as they are, so that no file of a test takes much if one is not kept."""
    monkeypatch.setattr(columnar, "MOST_BYTES", columnar.MOST_BYTES >> 10)
    monkeypatch.setattr(columnar, "MOST_TIMES", 8)
    monkeypatch.setattr(columnar, "PIECE_BYTES", columnar.PIECE_BYTES >> 10)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_what_a_few_bytes_stand_for_has_a_limit(kind: str, form: str, tmp_path: Path) -> None:
    path = written(kind, form, tmp_path / f"x.{form}", 20_000)
    assert path.stat().st_size < 400_000
    for use in (lambda: guess_columns(path, label="y"), lambda: read_all(path, kind)):
        with pytest.raises(
            ValueError, match=rf"x\.{form}: .* once it is decoded, above .*; .*{MENDED}|cannot be an id"
        ):
            use()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "form"), [case for case in CASES if case[0] != "struct"])
def test_what_stays_below_is_read_in_pieces_to_the_same_values(kind: str, form: str, tmp_path: Path) -> None:
    width = 20 if kind == "items" else 2500
    cells = [cell.decode() if isinstance(cell, bytes) else cell for cell in table_of(kind, width)["user"].to_pylist()]
    assert read_all(written(kind, form, tmp_path / f"x.{form}", width), kind) == cells


@pytest.mark.usefixtures("small")
def test_a_row_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MOST_BYTES", 1 << 30)
    for kind, form in CASES:
        if kind != "struct":
            path = written(kind, form, tmp_path / f"{kind}.{form}", 150 if kind == "items" else 72_000)
            with pytest.raises(
                ValueError, match=rf"{kind}\.{form}: a row has 7\d\.\d KiB, above 64\.0 KiB .*; leave the"
            ):
                read_all(path, kind)


def padded(old: int, new: int) -> tuple[bytes, bytes]:
    """Two numbers as Thrift writes them, the second one with as many bytes as the first."""

    def varint(value: int) -> list[int]:
        return [value & 127 | 128, *varint(value >> 7)] if value > 127 else [value]

    was, now = varint(2 * old), varint(2 * new)
    now[-1] |= 128 if len(now) < len(was) else 0
    return bytes(was), bytes(now + [128] * (len(was) - len(now) - 1) + [0] * (len(was) > len(now)))


@pytest.mark.usefixtures("small")
def test_a_file_that_lies_about_its_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table_of("items", 20_000), path, compression="zstd", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(2)
    content = path.read_bytes()
    path.write_bytes(content[:-2000] + content[-2000:].replace(*padded(chunk.total_uncompressed_size, 100)))
    assert pq.ParquetFile(path).metadata.row_group(0).column(2).total_uncompressed_size == 100
    with pytest.raises(ValueError, match="once it is decoded"):
        read_all(path, "items")
    path = written("list", "feather", tmp_path / "x.feather", 100)
    content, size = path.read_bytes(), (NUM_ROWS * 101).to_bytes(8, "little")
    assert size in content
    path.write_bytes(content.replace(size, (1 << 42).to_bytes(8, "little")))
    with pytest.raises(ValueError, match=r"has 4,096\.00 GiB once it is decoded"):
        read_all(path, "list")


def test_a_text_of_2_mib_for_1000_rows_takes_no_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table_of("text", 2 << 20, 1000), path, compression="zstd", dictionary_pagesize_limit=8 << 20)
    with peak_below(150 << 20):
        for use in (lambda: guess_columns(path, label="y"), lambda: read_all(path, "text")):
            with pytest.raises(ValueError, match=r"has 1\.95 GiB once it is decoded"):
                use()


def hostile(rng: random.Random, path: Path) -> str:
    """Writes a file that stands for more than it has, or with bytes that are others; returns which."""
    kind, form = rng.choice(CASES)
    codec = rng.choice(["zstd", "zlib"] if form == "orc" else ["zstd", "lz4"])
    written(kind, form, path, rng.choice([1, 50, 2000, 20_000]), codec)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([0, 1, 1, 3])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    return f"{kind} in {form}"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_cases", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_hostile_logs_are_errors_or_read_soon_and_leave_no_memory(num_cases: int, tmp_path: Path) -> None:
    rng, path = random.Random(num_cases), tmp_path / "x"
    for kind, form in CASES:  # what is loaded at first use stays
        with suppress(ValueError):
            read_all(written(kind, form, path, 50), kind)
    guess_columns(written("text", "parquet", path, 50), label="y")
    before = memory("VmRSS")
    for case in range(num_cases):
        what, start = hostile(rng, path), time.process_time()
        for use in (lambda: guess_columns(path, label="y"), lambda kind=what: read_all(path, kind.split(" ")[0])):
            with suppress(ValueError):
                use()
        assert time.process_time() - start < MOST_S, (case, what)
    assert memory("VmRSS") - before < KEPT_BYTES
    assert [*tmp_path.iterdir()] == [path]


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(np.int32([0, 1, 2])), pa.py_buffer(b"a\xff")])
    for form in ("parquet", "feather"):
        WRITERS[form](pa.table({"y": [0, 1], "user": bad}), tmp_path / f"x.{form}", "zstd")
        for use in (lambda p: guess_columns(p, label="y"), lambda p: read_all(p, "text")):
            with pytest.raises(
                ValueError, match=rf"x\.{form}: column 'user': .*UTF8.*; write it again with text in UTF-8"
            ):
                use(tmp_path / f"x.{form}")

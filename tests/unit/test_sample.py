"""The sample that columns are guessed from: rows from all over every file, in bounded bytes, whole records only."""

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from hotrow.data.sources import kept
from hotrow.data.sources import sample as sampling
from hotrow.data.sources.columns import ColumnsSource, open_table
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.jsonlines import JsonReader
from hotrow.data.sources.kept import KeptReader
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.sample import Sample, sample_rows
from hotrow.data.sources.schema import CsvSpec
from hotrow.data.sources.tabular import TextReader
from loops import looped

ROWS = 40_000


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_ROWS", 4000)


@functools.cache
def late(num_rows: int = ROWS, first: int = 20_000) -> pa.Table:
    """A column that is empty before row `first` and informative from there on; the file is sorted by `group`."""
    rng = np.random.default_rng(0)
    number = np.arange(num_rows)
    kind = rng.integers(0, 5, num_rows)
    click = rng.random(num_rows) < 0.1 + 0.15 * kind * (number >= first)
    feature = pa.array([f"kind {k}" for k in kind], pa.string(), mask=number < first)
    group = [f"g{n * 20 // num_rows}" for n in number]
    user = rng.integers(0, 900, num_rows)
    return pa.table({"click": click.astype(int), "user": user, "new": feature, "group": group})


def as_csv(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)


def as_gzip(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)
    path.write_bytes(gzip.compress(path.read_bytes(), 1))


def as_json(table: pa.Table, path: Path) -> None:
    rows = ({k: v for k, v in row.items() if v is not None} for row in table.to_pylist())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=7000)


def as_feather(table: pa.Table, path: Path) -> None:
    pyarrow.feather.write_feather(table, str(path), chunksize=7000)


def as_orc(table: pa.Table, path: Path) -> None:
    pyarrow.orc.write_table(table, str(path), stripe_size=1 << 16)


FORMATS: dict[str, Callable[[pa.Table, Path], None]] = {
    "feather": as_feather, "orc": as_orc, "csv": as_csv, "csv.gz": as_gzip, "jsonl": as_json, "parquet": as_parquet,
}  # fmt: skip


def sample_of(data: object) -> Sample:
    reader = open_table(data, CsvSpec())
    return sample_rows(KeptReader(reader) if isinstance(reader, TextReader | JsonReader) else reader)


@pytest.mark.parametrize("suffix", [*FORMATS, "frame"])
def test_a_column_that_fills_late_is_one(suffix: str, tmp_path: Path, few_rows: None) -> None:
    """Before, the first 20,000 rows decided, and the column was left out as empty."""
    data: object = late()
    if suffix != "frame":
        FORMATS[suffix](late(), tmp_path / f"rows.{suffix}")
        data = tmp_path / f"rows.{suffix}"
    guess = guess_columns(data, label="click")
    assert {"new", "user", "group"} == {g.column for g in guess.of("categorical")}
    assert "rows from all over" in guess.origin and "all 40,000" not in guess.origin
    rows = sample_of(data).rows
    assert 2000 <= len(rows) <= 4000
    assert len(rows["group"].unique()) >= 15, "the file is sorted: most groups lie after the first rows"


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_file_of_a_folder_is_looked_into(suffix: str, tmp_path: Path, few_rows: None) -> None:
    for day in range(12):
        table = late(3000 if day else 30).append_column("day", pa.array([day] * (3000 if day else 30)))
        FORMATS[suffix](table, tmp_path / f"day_{day}.{suffix}")
    rows = sample_of(tmp_path).rows
    assert set(rows["day"].cast(pa.int64()).to_pylist()) == set(range(12)) and len(rows) <= 4000


@looped("suffix", [*FORMATS, "frame"])
@looped("num_files", [1, 3])
def test_rows_have_their_numbers_in_the_table(suffix: str, num_files: int, tmp_path: Path, few_rows: None) -> None:
    table = late().append_column("number", pa.array(range(ROWS)))
    data: object = table
    if suffix != "frame":
        sizes = [ROWS] if num_files == 1 else [500, 25_000, ROWS - 25_500]
        for part, size in enumerate(sizes):
            FORMATS[suffix](table.slice(sum(sizes[:part]), size), tmp_path / f"{part}.{suffix}")
            if suffix == "csv":
                path = tmp_path / f"{part}.csv"
                path.write_text(path.read_text().replace('"', ""))
        data = tmp_path
    found = sample_of(data)
    number = np.array(found.rows["number"].cast(pa.int64()).to_pylist())
    assert (found.numbers == number).all()


def test_members_that_come_late_are_columns_to_prepare(tmp_path: Path) -> None:
    """The first 4 MiB of the first file decided; preparation then refused the column."""
    pad = "x" * 300
    more = ({"new": i % 7} if i > 15_000 else {} for i in range(20_000))
    rows = ({"click": i % 2, "user": i % 90, "pad": pad} | own for i, own in enumerate(more))
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "2.jsonl").write_text('{"click": 1, "other": 5}\n' * 50)
    schema = guess_columns(tmp_path, label="click", categorical=["new", "user"]).schema()
    num_rows = sum(chunk.num_rows for chunk in ColumnsSource(tmp_path, schema).chunks())
    assert "new" in schema.feature_names and num_rows == 20_050


@looped("suffix", FORMATS)
def test_a_small_table_is_its_sample(suffix: str, tmp_path: Path) -> None:
    for part in range(3):
        FORMATS[suffix](late(200 + part, first=50), tmp_path / f"{part}.{suffix}")
    found = sample_of(tmp_path)
    assert found.origin == "all 603 rows of 3 files"
    assert len(found.rows) == 603


def test_a_sample_is_made_of_whole_records(tmp_path: Path, few_rows: None) -> None:
    """Places fall within quotes that hold line ends and delimiters; each record comes out as it was written."""
    path = tmp_path / "x.csv"
    texts = [
        f'"line {i}\n{i % 7},{i % 5},{i % 3}\nand ""more"", {i}"' if i % 3 else f'"plain {i}"' for i in range(60_000)
    ]
    path.write_text("click,text,number\n" + "".join(f"{i % 2},{t},{i}\n" for i, t in enumerate(texts)))
    rows = sample_of(path).rows
    numbers = [int(n) for n in rows["number"].to_pylist()]
    assert len(numbers) > 1500 and numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] > 59_000
    for number, text in zip(numbers, rows["text"].to_pylist(), strict=True):
        assert text == texts[number][1:-1].replace('""', '"')


def test_stray_quotes_do_not_hide_the_rest(tmp_path: Path, few_rows: None) -> None:
    path = tmp_path / "x.csv"
    path.write_text("click,size,number\n" + "".join(f'{i % 2},{i % 9} 5" wide,{i}\n' for i in range(60_000)))
    numbers = [int(n) for n in sample_of(path).rows["number"].to_pylist()]
    assert len(numbers) > 2000 and numbers[-1] > 59_000


def test_what_is_wrong_is_named_with_its_line_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    good = b"".join(b"%d,u%d,%d\n" % (i % 2, i % 50, i) for i in range(40_000))
    path.write_bytes(b"click,user,number\n" + good + b"\xff\xfe,u1,5\n" * 20_000)
    with pytest.raises(ValueError, match=r"x\.csv:40002: byte .* is not UTF-8"):
        sample_of(path)


@looped("suffix", ["csv", "jsonl"])
def test_rows_beyond_memory_are_read_from_disk(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMATS[suffix](late(3000), tmp_path / f"x.{suffix}")
    held = sample_of(tmp_path / f"x.{suffix}").rows
    monkeypatch.setattr(kept, "IN_MEMORY_BYTES", 1000)
    assert sample_of(tmp_path / f"x.{suffix}").rows.equals(held)


@looped("suffix", ["csv", "jsonl", "parquet"])
def test_a_column_that_some_files_lack_is_missing_there(suffix: str, tmp_path: Path) -> None:
    """Whichever file comes first; one line says which files lack what."""
    old, new = late(300).drop_columns("new"), late(300, first=0)
    for name, tables in (("old first", (old, new)), ("new first", (new, old))):
        (tmp_path / name).mkdir()
        for i, table in enumerate(tables):
            FORMATS[suffix](table, tmp_path / name / f"{i}.{suffix}")
        opened = open_source("auto", tmp_path / name, label="click", text=["new"])
        assert "new" in opened.schema.feature_names
        valid = [chunk.keys["new"].valid for chunk in opened.source.chunks()]
        missing = sum(0 if own is None else int((~own).sum()) for own in valid)
        assert missing == 300
        if suffix != "jsonl":  # a line of JSON leaves missing members out
            lacks = [note for note in opened.notes if "lacks new" in note]
            assert len(lacks) == 1 and f"{int(name == 'new first')}.{suffix}" in lacks[0]

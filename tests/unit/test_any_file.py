"""Files as other tools write them: odd line ends, headers, formats and pipes, read to the right values or named."""

import gzip
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

import hotrow
from hotrow.data.chunk import Position, RowError
from hotrow.data.prepare.init import run_init
from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources import inputs, tabular
from hotrow.data.sources.columns import ColumnsSource, open_table
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import CsvSpec, parse_schema
from hotrow.export.inputs import load_module
from loops import looped
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
    with pytest.raises(RowError, match=rf"x\.csv:{many + 2}: too few columns, 1 instead of 2, in '1'") as error:
        read(open_source("auto", path, label="y").source)
    assert vars(pickle.loads(pickle.dumps(error.value))) == vars(error.value)
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
    reader = open_table(tmp_path / "wide.csv", CsvSpec())
    (batch,) = (rows.batch for rows in reader.read(0, 0, reader.schema.names, 100))
    assert batch.schema.names == ["y", *names]


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
    assert read(ColumnsSource(odd, schema_of("item", dense=["price"]))) == plain
    assert guess_columns(odd, label="y").schema().feature_names == ("item",)
    assert not any("more than once" in note for note in open_source("auto", odd, label="y").notes)
    twins = written("twins.csv", "y,a ,a")
    assert read(ColumnsSource(twins, schema_of("a ", dense=["a"])))["a "] == ITEMS


@looped("header", ["y,item,price", " y, item ,price "])
@looped("new", ["y,item,price", "y ,  item,price"])
def test_scoring_finds_columns_with_other_blanks(header: str, new: str, tmp_path: Path) -> None:
    rows = [f"{y},{item},{i % 40}" for i, (y, item) in enumerate(zip(LABELS, ITEMS, strict=True))]
    (tmp_path / "old.csv").write_text("\n".join([header, *rows, ""]))
    (tmp_path / "new.csv").write_text("\n".join([new, *rows, ""]))
    encoder = Encoder.load(run_prepare("csv", tmp_path / "old.csv", tmp_path / "out", label="y", dense=["price"]))
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


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=70)


def write_feather(table: pa.Table, path: Path) -> None:
    pyarrow.feather.write_feather(table, path, chunksize=70)


def write_orc(table: pa.Table, path: Path) -> None:
    with orc.ORCWriter(path, stripe_size=1024) as writer:
        for start in range(0, len(table), 70):
            writer.write(table.slice(start, 70))


WRITERS = {"parquet": write_parquet, "feather": write_feather, "orc": write_orc}


@looped("suffix", ["by name", "by content"])
@looped("kind", WRITERS)
def test_feather_and_orc_are_read_as_parquet_is(kind: str, suffix: str, tmp_path: Path) -> None:
    lists = [["a", "b"][: i % 3] for i in range(N)]
    columns = {"y": LABELS, "item": [None, *ITEMS[1:]], "price": [0.5 * i for i in range(N)], "tags": lists}
    for day in (1, 2):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        WRITERS[kind](pa.table(columns), folder / ("x" if suffix == "by content" else f"x.{kind}"))
    paths = [tmp_path / f"day={day}" / ("x" if suffix == "by content" else f"x.{kind}") for day in (1, 2)]
    schema = schema_of("item", {"column": "tags", "kind": "multi_hot"}, dense=["price"], time="day")
    source = open_source("auto", paths, schema=schema).source
    rows = read(source, rows_per_chunk=64)
    assert rows["label"] == LABELS * 2 and rows["item"] == [None, *ITEMS[1:]] * 2 and rows["tags"] == lists * 2
    assert rows["time"] == [1] * N + [2] * N and rows["dense"][5] == [2.5]
    assert source.scout().num_rows == 2 * N
    for first in (0, 1, 69, 70, 71, N - 1):
        rest = read(source, start=Position(1, first, first), rows_per_chunk=100)
        assert rest["item"] == rows["item"][N + first :]
    assert "tags" in guess_columns(paths[0], label="y").schema().feature_names
    assert read(ColumnsSource(paths, schema_of("day", dense=[])))["day"] == [1] * N + [2] * N


def test_lists_of_views_are_read(tmp_path: Path) -> None:
    frame = pl.DataFrame({"y": LABELS, "tags": [["a", f"b{i % 5}"] for i in range(N)], "item": ITEMS})
    frame.write_ipc(tmp_path / "x.feather", compat_level=pl.CompatLevel.newest())
    assert "view" in str(pyarrow.feather.read_table(tmp_path / "x.feather").schema)
    for data in (frame, tmp_path / "x.feather"):
        guess = guess_columns(data, label="y").schema()
        assert {"tags", "item"} <= {*guess.feature_names}
        assert read(ColumnsSource(data, guess))["tags"] == frame["tags"].to_list()


def test_files_of_columns_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    bad = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"y": [0, 1], "item": bad}), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet: column 'item': .*; write it again with text in UTF-8"):
        guess_columns(tmp_path / "bad.parquet", label="y")
    with pytest.warns(DeprecationWarning):
        pyarrow.feather.write_feather(pa.table({"y": [0]}), tmp_path / "old.feather", version=1)
    with pytest.raises(ValueError, match=r"old\.feather: Feather's version 1 cannot be read; write it again"):
        ColumnsSource(tmp_path / "old.feather", schema_of("a"))
    for kind, write in WRITERS.items():
        write(pa.table({"y": LABELS, "a": ITEMS}), tmp_path / f"cut.{kind}")
        (tmp_path / f"cut.{kind}").write_bytes((tmp_path / f"cut.{kind}").read_bytes()[:-100])
        with pytest.raises(ValueError, match=rf"cut\.{kind}: "):
            read(ColumnsSource(tmp_path / f"cut.{kind}", schema_of("a")))


def test_a_folder_of_several_formats_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.csv").write_text("y,item\n" + "".join(f"{y},{i}\n" for y, i in zip(LABELS, ITEMS, strict=True)))
    (folder / "README.md").write_text("a note")
    assert not any("left out are" in note for note in open_source("auto", folder, label="y").notes)
    pq.write_table(pa.table({"y": LABELS, "item": ITEMS}), folder / "b.parquet")
    for notes in (open_source("auto", folder, label="y").notes, (run_init(folder, label="y").found,)):
        (note,) = [note for note in notes if "left out are" in note]
        assert "a.csv" in note.split("left out are")[1] and "README" not in note
    said: list[str] = []
    run_prepare("auto", folder, tmp_path / "out", label="y", announce=said.append)
    assert any("a.csv" in line and "left out" in line for line in said)


def through_fifo(path: Path, content: bytes) -> Path:
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    return path


def through_descriptor(path: Path, content: bytes) -> Path:
    end, begin = os.pipe()

    def write() -> None:
        with os.fdopen(begin, "wb") as pipe:
            pipe.write(content)

    threading.Thread(target=write, daemon=True).start()
    return Path(f"/dev/fd/{end}")


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="there are no pipes with names here")
@pytest.mark.slow_but("plain-through_fifo", "gzip-through_descriptor")
@pytest.mark.parametrize("through", [through_fifo, through_descriptor])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_pipe_is_read(
    through: Callable[[Path, bytes], Path],
    pack: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = ("y,item\n" + "".join(f"{y},{item}\n" for y, item in zip(LABELS, ITEMS, strict=True)) * 40).encode()
    (tmp_path / "x.csv").write_bytes(text)
    want = run_prepare("auto", tmp_path / "x.csv", tmp_path / "a", label="y")
    made = run_prepare("auto", through(tmp_path / "p1", pack(text)), tmp_path / "b", label="y")
    assert made.info.tables == want.info.tables
    assert {n: s.num_rows for n, s in made.splits.items()} == {n: s.num_rows for n, s in want.splits.items()}
    pipe = through(tmp_path / "p2", pack(text))
    assert f"hotrow prepare csv {pipe}" in run_init(pipe, label="y", out=tmp_path / "conf").commands[0]
    run = hotrow.fit(through(tmp_path / "p3", pack(text)), label="y", quiet=True, max_steps=2, threads=1)
    assert sum(run.record.rows.values()) == 40 * N
    assert not list(tmp_path.glob("**/.hotrow-pipe*")), "nothing is left behind"
    os.mkfifo(tmp_path / "p4")
    with pytest.raises(ValueError, match="is neither a file nor a folder; write its rows to a file"):
        ColumnsSource(tmp_path / "p4", schema_of("item"))


def test_a_pipe_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "disk_free_bytes", lambda path: 1000)
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        try:
            (tmp_path / "pipe").write_bytes(b"y,item\n" * 1_000_000)
        except BrokenPipeError:
            return

    threading.Thread(target=write, daemon=True).start()
    with pytest.raises(ValueError, match="pipe: more came out of this pipe than half of what is free"):
        run_prepare("csv", tmp_path / "pipe", tmp_path / "out", label="y")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


LISTS = [["12", "7", "440"][: 1 + i // 3 % 3] for i in range(N)]
JOINED: dict[str, Callable[[list[str]], str]] = {
    "|": "|".join,
    "^": "^".join,
    " ": " ".join,
    "json": lambda ids: f"[{', '.join(ids)}]",
}


@pytest.mark.slow_but("i-|", "i-json")
@pytest.mark.parametrize("separator", JOINED)
@pytest.mark.parametrize("prefix", ["i", pytest.param("", marks=pytest.mark.slow)])
def test_joined_lists_are_told_from_ids(separator: str, prefix: str, tmp_path: Path) -> None:
    lists = [[prefix + item for item in ids] for ids in LISTS]
    quoted = [[f'"{item}"' for item in ids] if prefix and separator == "json" else ids for ids in lists]
    frame = pa.table({"y": LABELS, "item": ITEMS, "tags": [JOINED[separator](ids) for ids in quoted]})
    schema = guess_columns(frame, label="y").schema()
    (tags,) = (column for column in schema.categorical if column.column == "tags")
    assert (tags.kind, tags.separator) == ("multi_hot", separator)
    assert read(ColumnsSource(frame, schema))["tags"] == lists
    run = hotrow.fit(frame, label="y", run=tmp_path / "run", quiet=True, max_steps=2, threads=1)
    run.export(tmp_path / "export")
    module = load_module(tmp_path / "export" / "score.py")
    scores = module.Scorer(tmp_path / "export").score(frame.to_pydict()).numpy()
    assert scores == pytest.approx(run.predict(frame), rel=1e-5)


@pytest.mark.parametrize(
    "texts",
    [
        ["New York", "Rome", "San Jose 1"],
        ["1 234", "12 345", "7"],
        ["iPhone 12", "iPhone 13"],
        ["[a", "b]"],
        ["48.85 2.35"],
    ],
    ids=lambda texts: texts[0],
)
def test_text_with_blanks_and_brackets_is_no_list(texts: list[str]) -> None:
    frame = pa.table({"y": LABELS, "item": ITEMS, "tags": [texts[i % len(texts)] + "x" * (i % 2) for i in range(N)]})
    for column in guess_columns(frame, label="y").schema().categorical:
        assert column.separator is None
    frame = frame.set_column(2, "tags", pa.array([texts[i % len(texts)] for i in range(N)]))
    assert not any("separator" in guess.spec for guess in guess_columns(frame, label="y").guesses)


def test_items_between_commas_are_told_from_places_and_names(tmp_path: Path) -> None:
    rng = random.Random(0)
    tags = [rng.sample("abcde", rng.randint(1, 4)) for _ in range(N)]
    columns = {
        "tags": [",".join(own) for own in tags],
        "genres": [", ".join(sorted(rng.sample("abcde", 3))) for _ in range(N)],
        "place": [f"{rng.choice(['Rome', 'Oslo'])},{rng.choice(['Italy', 'Norway'])}" for _ in range(N)],
        "name": [f"{rng.choice('abcdefgh')},a{rng.randint(1, 10_000)}" for _ in range(N)],
        "seldom": ["b,a" if i % 5 == 0 else "a" for i in range(N)],
    }
    pyarrow.csv.write_csv(pa.table({"y": LABELS, "item": ITEMS, **columns}), tmp_path / "x.csv")
    schema = guess_columns(tmp_path / "x.csv", label="y").schema()
    assert {c.column: c.separator for c in schema.categorical if c.separator} == {"tags": ",", "genres": ", "}
    assert read(ColumnsSource(tmp_path / "x.csv", schema))["tags"] == tags


def test_amounts_in_several_currencies_are_named_with_the_cure() -> None:
    price = [f"{'$€£'[i % 3]}{i + 1}" for i in range(N)]
    frame = pa.table({"y": LABELS, "item": ITEMS, "price": price, "paid": [f"${i}" for i in range(N)]})
    (note,) = (note for note in guess_columns(frame, label="y").notes if "$, €, £" in note)
    assert "column price " in note and "--exclude price" in note
    assert not any("$" in note for note in guess_columns(frame, label="y", exclude=["price"]).notes)
    with pytest.raises(ValueError, match=r"'price'.*\$, €, £.*--exclude price"):
        guess_columns(frame, label="y", dense=["price"])

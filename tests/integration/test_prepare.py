"""Preparation end to end: every source to a dataset, new rows through its vocabularies, and what goes wrong."""

import errno
import gzip
import io
import json
import os
import re
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import hotrow
from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic_config import criteo_kaggle
from hotrow.base.files import parse_bytes
from hotrow.data.chunk import RowError
from hotrow.data.packed import writer as packed_writer
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import pipeline, rows
from hotrow.data.prepare.pipeline import Interrupted, Options, prepare
from hotrow.data.prepare.prepare import Encoder, run_prepare
from hotrow.data.sources import inputs
from hotrow.data.sources.registry import AVAZU_COLUMNS, open_source, recognise
from hotrow.data.sources.schema import parse_schema
from kill_prepare import check_kills
from loops import looped
from prepare_data import SCHEMA, file_hashes, make_rows, plan_of, to_table, write_parquet
from resealed import reseal

MEMORY = "256MiB"


def criteo_text(num_rows: int, seed: int = 0) -> str:
    """Rows in the published layout of Criteo's logs."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(num_rows):
        dense = ["" if rng.random() < 0.2 else str(rng.integers(-3, 5000)) for _ in range(13)]
        ids = ["" if rng.random() < 0.1 else f"{rng.zipf(1.3) % 2**32:08x}" for _ in range(26)]
        lines.append("\t".join([str(int(rng.random() < 0.25)), *dense, *ids]))
    return "\n".join(lines) + "\n"


def rows_of(dataset: PackedDataset, split: str) -> dict[str, Any]:
    """All columns of a split as lists."""
    found: dict[str, Any] = {}
    data = dataset.split(split)
    for index in range(data.num_blocks):
        block = data.block(index)
        names = [dataset.info.labels[0].name, *dataset.info.dense_names, *dataset.info.feature_names]
        for name, column in zip(names, [block.label, *block.dense, *block.ids], strict=True):
            if isinstance(column, tuple):
                ends = column.row_splits
                values = [column.values[a:b].tolist() for a, b in pairwise(ends)]
            else:
                values = column.tolist()
            found.setdefault(name, []).extend(values)
    return found


def brute_force_ids(column: list[Any], is_train: np.ndarray, min_count: int = 1) -> list[Any]:
    """Row numbers by the rule of docs/prepare.md, in plain Python: falling training count, ties by first appearance."""
    rows = [value if isinstance(value, list) else [value] for value in column]
    counts: dict[Any, int] = {}
    for row, train in zip(rows, is_train, strict=True):
        for value in row if train else []:
            counts[value] = counts.get(value, 0) + 1
    ranked = sorted((value for value in counts if counts[value] >= min_count), key=lambda value: -counts[value])
    number = {value: rank + 1 for rank, value in enumerate(ranked)}
    encoded = [[number.get(value, 0) for value in row] for row in rows]
    return encoded if isinstance(column[0], list) else [row[0] for row in encoded]


@looped("source", ["frame", "parquet"])
def test_against_brute_force(tmp_path: Path, source: str) -> None:
    """Every column of every split against ten lines of Python; Parquet text comes as dictionaries, a frame's plain."""
    rows = make_rows(1500, seed=3)
    data = to_table(rows) if source == "frame" else write_parquet(tmp_path / "logs", rows)
    dataset = prepare(open_source(source, data, schema=SCHEMA), tmp_path / "out")
    times = np.array(rows["ts"])
    codes = plan_of(dataset.info.ids["split"]).assign(np.arange(1500), times)
    assert times[codes == 0].max() < times[codes == 1].min() and times[codes == 1].max() < times[codes == 2].min()
    is_train = codes == 0
    items = [[item, *(seen or [])] for item, seen in zip(rows["item"], rows["seen"], strict=True)]
    shared = brute_force_ids(items, is_train)
    age = np.array([np.nan if a is None else a for a in rows["age"]])
    want = {
        "click": [float(c) for c in rows["click"]],
        "price": [0.0 if p is None else np.float32(np.log1p(np.float32(p))) for p in rows["price"]],
        "age": np.nan_to_num((age - np.nanmean(age[is_train])) / np.nanstd(age[is_train])).tolist(),
        "raw": [np.float32(r) for r in rows["raw"]],
        "user": brute_force_ids(rows["user"], is_train),
        "item": [row[0] for row in shared],
        "seen": [row[1:] for row in shared],
        "tags": brute_force_ids(rows["tags"], is_train, min_count=15),
        "site": brute_force_ids([k % 7 for k in rows["site"]], is_train),
    }
    for code, split in enumerate(("train", "val", "test")):
        got = rows_of(dataset, split)
        assert list(got) == list(want)
        for name, column in want.items():
            expected = [value for value, c in zip(column, codes, strict=True) if c == code]
            if name in dataset.info.dense_names:
                np.testing.assert_allclose(got[name], expected, rtol=1e-6, atol=1e-7)
            else:
                assert got[name] == expected, name


def test_a_list_with_missing_ids_is_one_missing_value(tmp_path: Path) -> None:
    tags = [["a", None, None], [None], ["b"], [], None] * 20
    said: list[str] = []
    schema = parse_schema({"label": "y", "categorical": [{"column": "tags", "kind": "multi_hot"}]}, where="test")
    frame = pa.table({"y": [0, 1] * 50, "tags": tags})
    info = prepare(open_source("frame", frame, schema=schema), tmp_path / "out", announce=said.append).info
    assert info.summary["missing"] == {"tags": sum(None in row for row in tags if row)}
    assert [line for line in said if "tags" in line and "40.00%" in line]


def test_dataset_tells_how_it_was_made(tmp_path: Path) -> None:
    rows = make_rows(500)
    logs = write_parquet(tmp_path / "logs", rows)
    info = prepare(open_source("parquet", logs, schema=SCHEMA), tmp_path / "out").info
    assert info.name == "parquet" and info.licence == "made for tests"
    assert [str(c.transform)[:11] for c in info.dense] == ["log1p_clip0", "standardize", "identity"]
    assert {t.name: t.missing_row is not None for t in info.tables} == {
        "user": True, "item": True, "tags": False, "hashed": False,
    }  # fmt: skip
    assert [Path(s.path).name for s in info.sources] == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]
    assert all(s.checksum.startswith("crc32:") for s in info.sources)
    assert info.ids["encodings"] == {"user": "bytes", "item": "int", "seen": "int", "tags": "bytes", "site": "int"}
    lost = {name: sum(value is None for value in rows[name]) for name in ("age", "item", "price", "user")}
    assert info.summary == {"rows_read": 500, "rows_skipped": 0, "missing": lost}
    assert not (tmp_path / "out" / ".prepare").exists()
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").rglob("*") if p.is_file()} == {0o600}


def test_new_rows_meet_the_vocabularies_of_training(tmp_path: Path) -> None:
    rows = make_rows(800)
    dataset = run_prepare(
        "parquet", write_parquet(tmp_path / "logs", rows), tmp_path / "out", schema=SCHEMA, split="random"
    )
    codes = plan_of(dataset.info.ids["split"]).assign(np.arange(800))
    encoder = Encoder.load(dataset)
    test = to_table(rows).filter(pa.array(codes == 2))
    (batch,) = encoder.batches(test)
    stored = rows_of(dataset, "test")
    assert batch.label.isnan().all(), "known, and not read"
    assert batch.dense.T.tolist() == [stored[name] for name in dataset.info.dense_names]
    for name in dataset.info.feature_names:
        values, offsets, _ = batch.sparse.bags(name)
        bags = [values[a:b].tolist() for a, b in pairwise(offsets)]
        assert bags == [row if isinstance(row, list) else [row] for row in stored[name]]
    small = list(encoder.batches(test, batch_size=7))
    assert sum(len(b) for b in small) == len(test) and max(len(b) for b in small) == 7
    unlabelled = pl.from_arrow(test).drop("click", "ts").with_columns(user=pl.lit("never seen"))  # type: ignore[union-attr]
    (batch,) = Encoder.load(tmp_path / "out").batches(unlabelled)
    assert batch.label.isnan().all()
    assert set(batch.sparse.bags("user")[0].tolist()) == {0}
    with pytest.raises(ValueError, match="no column 'item'"):
        next(encoder.batches(test.drop_columns("item")))


@looped("kind", ["csv", "parquet"])
def test_new_rows_are_encoded_whatever_stands_in_label_and_time(kind: str, tmp_path: Path) -> None:
    schema = {"label": "click", "time": "ts", "categorical": ["user"], "dense": ["price"]}

    def write(name: str, click: list[Any], ts: list[Any]) -> Path:
        table = pl.DataFrame({"user": ["a", "b", "a"] * 20, "price": [1, 2, 4] * 20, "click": click, "ts": ts})
        path = tmp_path / f"{name}.{kind}"
        table.write_csv(path) if kind == "csv" else table.write_parquet(path)
        return path

    old = write("old", [0, 1, 1] * 20, list(range(60)))
    encoder = Encoder.load(run_prepare(kind, old, tmp_path / "out", schema=parse_schema(schema, where="test")))
    (want,) = encoder.batches(old)
    for name, click, ts in (("empty", [None] * 60, [None] * 60), ("words", ["?"] * 60, ["soon"] * 60)):
        (batch,) = encoder.batches(write(name, click, ts))
        assert batch.sparse.bags("user")[0].tolist() == want.sparse.bags("user")[0].tolist()
        assert batch.dense.tolist() == want.dense.tolist() and batch.label.isnan().all()


@looped("source", ["criteo", "csv"])
def test_a_bad_row_to_predict_is_not_offered_to_be_skipped(source: str, tmp_path: Path) -> None:
    if source == "criteo":
        good, bad = "1" + "\t1" * 13 + "\tab" * 26 + "\n", "1" + "\t1" * 13 + "\tzz" * 26 + "\n"
    else:
        good, bad = "0.5,u1,1\n0.5,u1,0\n2.5,u2,0\n2.5,u2,1\n", "much,u1,1\n"
    header = "price,user,click\n" if source == "csv" else ""
    (tmp_path / "old.csv").write_text(header + good * 50)
    (tmp_path / "new.csv").write_text(header + good + bad)
    run_prepare(source, tmp_path / "old.csv", tmp_path / "out", split="random")
    with pytest.raises(RowError, match=r"new\.csv:\d.*; correct the (line|row)( or leave it empty)?$"):
        list(Encoder.load(tmp_path / "out").batches(tmp_path / "new.csv", values="strict"))
    assert sum(map(len, Encoder.load(tmp_path / "out").batches(tmp_path / "new.csv"))) == good.count("\n") + 1


def test_a_flipped_byte_of_a_vocabulary_is_refused_before_a_row_is_encoded(tmp_path: Path) -> None:
    prepare(open_source("frame", to_table(make_rows(300)), schema=SCHEMA), tmp_path / "out")
    path = tmp_path / "out" / "vocab" / "user"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"vocab/user.*altered"):
        Encoder.load(tmp_path / "out")


def test_a_vocabulary_that_is_not_the_datasets_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        prepare(open_source("frame", to_table(make_rows(300, seed)), schema=SCHEMA), tmp_path / str(seed))
    (tmp_path / "0" / "vocab" / "user").write_bytes((tmp_path / "1" / "vocab" / "user").read_bytes())
    with pytest.raises(ValueError, match=r"vocab/user has \d+ bytes, dataset\.json says"):
        Encoder.load(tmp_path / "0")
    other = json.loads((tmp_path / "1" / "dataset.json").read_text())["files"]["vocab/user"]
    reseal(tmp_path / "0" / "dataset.json", lambda own: own["files"].update({"vocab/user": other}))
    with pytest.raises(ValueError, match=r"vocab/user has id .* dataset\.json names"):
        Encoder.load(tmp_path / "0")


def test_criteo_kaggle_takes_the_reference_split(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(criteo_text(100))
    dataset = run_prepare("auto", path, tmp_path / "out", memory=MEMORY)
    # numpy.array_split-like days of 15, 15, 14, ...: six train (86), the last 14 are halved.
    assert {name: dataset.split(name).num_rows for name in dataset.splits} == {"train": 86, "test": 7, "val": 7}
    labels = [float(line[0]) for line in path.read_text().splitlines()]
    assert rows_of(dataset, "train")["label"] == labels[:86]
    assert rows_of(dataset, "test")["label"] == labels[86:93]
    assert rows_of(dataset, "val")["label"] == labels[93:]
    (batch,) = Encoder.load(dataset).batches(path)
    assert batch.sparse.bags("C7")[0].tolist()[:86] == rows_of(dataset, "train")["C7"]


def test_criteo_days_split_by_file(tmp_path: Path) -> None:
    for day, num_rows in ((2, 20), (10, 11), (1, 30)):
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(criteo_text(num_rows, seed=day).encode()))
    dataset = run_prepare("criteo", tmp_path, tmp_path / "out", hash_cap=50, memory=MEMORY)
    assert {name: dataset.split(name).num_rows for name in dataset.splits} == {"train": 50, "test": 6, "val": 5}
    assert max(table.num_embeddings for table in dataset.info.tables) <= 52, "0, at most 50 ids, missing"
    limited = run_prepare("criteo", tmp_path, tmp_path / "limited", rows=40, memory=MEMORY)
    assert {name: limited.split(name).num_rows for name in limited.splits} == {"train": 30, "test": 5, "val": 5}


@looped("missing", ["NA", "null", "\\N", ""])
def test_criteo_is_recognised_by_a_row_with_missing_texts(missing: str, tmp_path: Path) -> None:
    fields = ["1", *["2"] * 13, *["68fd1e64"] * 26]
    fields[3] = fields[20] = fields[39] = missing
    (tmp_path / "x.txt").write_text("\t".join(fields) + "\n")
    assert recognise(tmp_path / "x.txt") == "criteo"
    fields[20] = "NAN"
    (tmp_path / "y.txt").write_text("\t".join(fields) + "\n")
    assert recognise(tmp_path / "y.txt") is None


@looped("source", ["taobao", "avazu"])
def test_other_published_layouts(tmp_path: Path, source: str) -> None:
    rng = np.random.default_rng(0)
    n, path = 400, tmp_path / "logs.csv"
    users, items, times = rng.integers(1, 50, n), rng.integers(1, 90, n), np.sort(rng.integers(0, 9000, n)) + 10**9
    if source == "taobao":
        kinds = rng.choice(["pv", "cart", "buy"], n, p=[0.8, 0.1, 0.1])
        lines = [f"{u},{i},{i % 9},{k},{t}" for u, i, k, t in zip(users, items, kinds, times, strict=True)]
    else:
        hours = [14102100 + 100 * day + hour for day in range(10) for hour in range(24)]
        lines = [",".join(AVAZU_COLUMNS)]
        for row in range(n):
            ids = [f"{k:08x}" for k in rng.integers(0, 99, 21)]
            lines.append(",".join([str(10**18 + row), str(int(rng.random() < 0.2)), str(hours[row * 240 // n]), *ids]))
    path.write_text("\n".join(lines) + "\n")
    assert recognise(path) == source
    dataset = run_prepare("auto", path, tmp_path / "out", memory=MEMORY)
    assert dataset.info.name == source and dataset.info.ids["split"]["kind"] == "time"  # type: ignore[index, call-overload]
    assert sum(dataset.split(s).num_rows for s in dataset.splits) == n
    assert 0 < np.mean(rows_of(dataset, "train")[dataset.info.labels[0].name]) < 1
    assert sum(len(batch) for batch in Encoder.load(dataset).batches(path)) == n


def test_real_criteo_rows(real_data: Any, tmp_path: Path) -> None:
    dataset = run_prepare("criteo", real_data("criteo_terabyte_80k.tsv.gz"), tmp_path / "out", memory=MEMORY)
    found = {name: dataset.split(name).num_rows for name in dataset.splits}
    assert found == {"train": 68572, "test": 5714, "val": 5714}
    labels = sum(rows_of(dataset, name)["label"].count(1.0) for name in dataset.splits)
    assert labels / 80_000 == pytest.approx(0.03216, abs=1e-5)


def test_sample_keeps_whole_rows_of_each_split(tmp_path: Path) -> None:
    logs = write_parquet(tmp_path / "logs", make_rows(4000))
    whole = run_prepare("parquet", logs, tmp_path / "whole", schema=SCHEMA, split="random")
    part = run_prepare("parquet", logs, tmp_path / "part", schema=SCHEMA, split="random", sample=0.1)
    for split in whole.splits:
        share = part.split(split).num_rows / whole.split(split).num_rows
        assert share == pytest.approx(0.1, abs=0.05)
    assert set(rows_of(part, "train")["raw"]) < set(rows_of(whole, "train")["raw"])


def test_bad_rows_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    lines = [f"{i % 2},u{i % 9}" for i in range(60)]
    lines[30], lines[40] = "2,u1", "0,u1,u2"
    path.write_text("click,user\n" + "\n".join(lines) + "\n")
    schema = parse_schema({"label": "click", "categorical": ["user"]}, where="test")
    with pytest.raises(RowError, match=rf"{path}:42: too many columns, 3 inst|{path}:32 \(click\): '2' is not a label"):
        run_prepare("csv", path, tmp_path / "out", schema=schema)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    options: dict[str, Any] = {"schema": schema, "skip_bad_rows": 2, "announce": said.append}
    dataset = run_prepare("csv", path, tmp_path / "out", **options)
    assert dataset.info.summary == {"rows_read": 58, "rows_skipped": 2}
    assert any("skipped 2 bad rows" in line and "x.csv:32" in line for line in said)
    assert any("columns are cut at ','" in line for line in said)


def test_a_bad_row_found_late_leaves_what_can_be_gone_on_from_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "x.csv", tmp_path / "out"
    lines = [f"{i % 2},u{i % 9}" for i in range(3 * pipeline.ROWS_PER_CHUNK)]
    text = "click,user\n" + "\n".join(lines) + "\n"
    path.write_text(text + "2,u1\n")
    schema = parse_schema({"label": "click", "categorical": ["user"], "csv": {"delimiter": ","}}, where="test")
    said: list[str] = []
    for rows_per_part, is_kept in ((1 << 20, False), (pipeline.ROWS_PER_CHUNK, True)):
        monkeypatch.setattr(rows, "ROWS_PER_PART", rows_per_part)
        with pytest.raises(RowError, match="'2' is not a label"):
            prepare(open_source("csv", path, schema=schema), out, announce=said.append)
        assert (out / ".prepare").exists() == out.exists() == is_kept
        assert any("what was read is kept" in line for line in said) == is_kept
    dataset = run_prepare("csv", path, out, schema=schema, skip_bad_rows=1, announce=said.append)
    assert any("continuing the work" in line for line in said)
    assert dataset.info.summary == {"rows_read": len(lines), "rows_skipped": 1}


def test_finished_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    logs, out = write_parquet(tmp_path / "logs", make_rows(300)), tmp_path / "out"
    run_prepare("parquet", logs, out, schema=SCHEMA)
    first = file_hashes(out)
    with pytest.raises(ValueError, match=r"already holds a finished dataset.*--overwrite"):
        run_prepare("parquet", logs, out, schema=SCHEMA, seed=9, split="random")
    assert file_hashes(out) == first
    run_prepare("parquet", logs, out, schema=SCHEMA, seed=9, split="random", overwrite=True)
    assert file_hashes(out) != first
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="mine exists and is not a dataset folder"):
            run_prepare("parquet", logs, tmp_path / "mine", schema=SCHEMA, overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_ctrl_c_leaves_work_that_only_the_same_command_continues(tmp_path: Path) -> None:
    logs, out = write_parquet(tmp_path / "logs", make_rows(3000)), tmp_path / "out"
    opened = open_source("parquet", logs, schema=SCHEMA)
    options = Options(rows_per_chunk=50)

    pressed: list[Any] = []

    def press(report: Any) -> None:
        if report.stage == "count" and not pressed:
            pressed.append(report)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread shall see it before this worker is through

    with pytest.raises(Interrupted, match=r"its state is kept in .*\.prepare: run the same command to continue"):
        prepare(opened, out, options, progress=press)
    with pytest.raises(ValueError, match=r"work of another command: schema.split.seed is 6, was 5.*--overwrite"):
        prepare(opened.with_options(seed=6), out, options)
    prepare(opened, out, options)
    prepare(opened, tmp_path / "plain", options)
    assert file_hashes(out) == file_hashes(tmp_path / "plain")


def test_a_disk_too_small_is_told_before_and_a_full_one_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, out = write_parquet(tmp_path / "logs", make_rows(3000)), tmp_path / "out"
    opened, options = open_source("parquet", logs, schema=SCHEMA), Options(rows_per_block=128, rows_per_part=256)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "disk_free_bytes", lambda path: 1000)
        with pytest.raises(ValueError, match=r"needs about .* KiB more .*1,000 bytes are free: .* short; free some"):
            prepare(opened, out, options)
        assert not out.exists(), "nothing is left behind"
    finish, parts = packed_writer._PartWriter.finish, []

    def full(part: Any) -> Any:
        parts.append(part)
        if len(parts) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return finish(part)

    with monkeypatch.context() as patch:
        patch.setattr(packed_writer._PartWriter, "finish", full)
        with pytest.raises(OSError, match=r"disk full.*4 finished part.*run the same command again"):
            prepare(opened, out, options)
    prepare(opened, out, options)
    prepare(opened, tmp_path / "plain", options)
    assert file_hashes(out) == file_hashes(tmp_path / "plain")


def test_a_disk_that_is_full_at_any_write_names_the_file_and_what_is_kept(
    tmp_path: Path, small_disk: tuple[Path, Callable[[int], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever more room, page by page: counts, parts, marks and dataset.json are each the file that does not fit."""
    monkeypatch.setattr(rows, "disk_free_bytes", lambda path: 1 << 40)  # else it is refused before it begins
    disk, resize = small_disk
    logs, out = write_parquet(tmp_path / "logs", make_rows(2000)), disk / "out"
    opened, options = open_source("parquet", logs, schema=SCHEMA), Options(rows_per_block=128, rows_per_part=256)
    named, kib, start = set(), 4, packed_writer._PartWriter.__init__

    def squeeze(*arguments: Any) -> None:
        """Takes the room back that counts needed for a moment, or else it might do for all parts."""
        nonlocal kib
        monkeypatch.setattr(packed_writer._PartWriter, "__init__", start)
        resize(kib := shutil.disk_usage(disk).used // 1024)
        start(*arguments)

    monkeypatch.setattr(packed_writer._PartWriter, "__init__", squeeze)
    while not (out / "dataset.json").exists():
        resize(kib)
        try:
            prepare(opened, out, options)
        except OSError as error:
            text = str(error)
            assert re.search(r"full while .*kept.*run the same command again", text), text
            found = re.findall(re.escape(str(out)) + r"[^\s:,]*", text)
            assert found, text
            named.add(re.sub(r"\d+", "N", str(Path(found[-1]).relative_to(out))))
        kib += 4
    assert {"train/part-N.arrow", ".prepare/counts", ".prepare/parts.json", "dataset.json"} <= named, named
    prepare(opened, tmp_path / "plain", options)
    assert file_hashes(out) == file_hashes(tmp_path / "plain")


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    logs = write_parquet(tmp_path / "logs", make_rows(500))

    def touch(report: Any) -> None:
        os.utime(logs / "part-0.parquet", ns=(0, 0))

    with pytest.raises(ValueError, match=r"part-0\.parquet changed while it was being prepared"):
        prepare(open_source("parquet", logs, schema=SCHEMA), tmp_path / "out", progress=touch)
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert prepare(open_source("parquet", logs, schema=SCHEMA), tmp_path / "out", Options(overwrite=True)).info.splits


@pytest.mark.parametrize("num_kills", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_any_rename_and_continued_gives_the_same_bytes(tmp_path: Path, num_kills: int) -> None:
    logs = write_parquet(tmp_path / "logs", make_rows(1500))
    check_kills(logs, tmp_path, num_kills)


@looped(
    ("arguments", "message"),
    [
        ({"source": "creteo"}, "source 'creteo' is not known; did you mean 'criteo'"),
        ({"split": "reference"}, "split reference is published for criteo only"),
        ({"sample": 0.0}, "sample is 0.0; it is a share"),
        ({"rows": 0}, "rows is 0; it must be at least 1"),
        ({"memory": "lots"}, "memory is 'lots': size 'lots' is not understood; write a number and a unit"),
        ({"memory": "1MiB"}, "give at least 134,217,728"),
        ({"min_count": 0}, "min_count is 0"),
        ({"fractions": [1, 2, 3]}, r"fractions \[1.0, 2.0, 3.0\] must be"),
        ({"skip_bad_rows": -1}, "skip_bad_rows is -1"),
        ({"min_count": 1, "sample": 1e-9}, "no row is in the training split|nothing"),
    ],
)
def test_options_out_of_range_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    logs = write_parquet(tmp_path / "logs", make_rows(100))
    given = {"source": "parquet", "paths": logs, "out": tmp_path / "out", "schema": SCHEMA} | arguments
    with pytest.raises(ValueError, match=message):
        run_prepare(**given)
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert "sample" in arguments or not (tmp_path / "out").exists()


@looped(("text", "value"), [("256MiB", 2**28), ("4GB", 4 * 10**9), (" 1.5 kib ", 1536), ("7", 7), (5, 5)])
def test_sizes_are_read(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


def test_without_a_schema_the_guess_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    dataset = run_prepare(
        "auto", to_table(make_rows(400)), tmp_path / "out", label="click", time="ts", announce=said.append
    )
    assert dataset.info.name == "frame" and dataset.info.labels[0].name == "click"
    assert any(line.startswith("note: schema guessed: label click, time ts; dense price") for line in said)
    logs = write_parquet(tmp_path / "logs", make_rows(400))
    assert run_prepare("auto", logs, tmp_path / "parquet", label="click").info.name == "parquet"


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many bytes of raw files were read since the last call; nothing may read them but through `InputFile`."""
    counts: list[int] = []

    class Counted(io.RawIOBase):
        def __init__(self, raw: pa.NativeFile) -> None:
            self.raw, self.seek, self.tell, self.size = raw, raw.seek, raw.tell, raw.size

        def readinto(self, buffer: Any) -> int:
            counts.append(self.raw.readinto(buffer))
            return counts[-1]

        def read(self, num_bytes: int = -1) -> bytes:
            found = self.raw.read(num_bytes)
            counts.append(len(found))
            return found

    plain, open_ = inputs.InputFile.open_file, io.open

    def opened(path: Any, *given: Any, **named: Any) -> Any:
        is_raw = str(path).endswith((".csv", ".tsv", ".gz")) and not {*"".join(map(str, given))} & {*"wax"}
        assert not is_raw, f"{path} is read past InputFile"
        return open_(path, *given, **named)

    monkeypatch.setattr(inputs.InputFile, "open_file", lambda file: Counted(plain(file)))
    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr("builtins.open", opened)

    def taken() -> int:
        total = sum(counts)
        counts.clear()
        return total

    return taken


def test_fit_reads_text_once(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    """The guess, the run that chooses the steps, and the run that trains on validation rows too."""
    lines = (f"{i % 2},{1_700_000_000 + i},u{i % 97},{i % 13}.5" for i in range(60_000))
    text = ("click,ts,user,price\n" + "\n".join(lines) + "\n").encode()
    (tmp_path / "clicks.csv").write_bytes(text)
    small = {"train.epochs": 1, "train.batch_size": 8192}
    told = {"label": "click", "time": "ts", "run": tmp_path / "run", "quiet": True}
    run = hotrow.fit(tmp_path / "clicks.csv", choice=False, **told, **small)
    assert (tmp_path / "run" / "selection").is_dir()
    assert bytes_read() <= 1.3 * len(text)
    before = bytes_read()
    run.write_scores(tmp_path / "clicks.csv", tmp_path / "scores.csv", keep=["user", "ts"])
    assert bytes_read() - before <= 1.3 * len(text)


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".csv"])
def test_text_is_read_once(tmp_path: Path, bytes_read: Callable[[], int], suffix: str) -> None:
    path = tmp_path / f"clicks{suffix}"
    if suffix == ".csv":
        lines = (f"{i % 2},{1_700_000_000 + i},u{i % 977},{i % 13}.5" for i in range(400_000))
        text = ("click,ts,user,price\n" + "\n".join(lines) + "\n").encode()
    else:
        write_criteo(tmp_path / "clicks", criteo_kaggle(40_000, scale=0.001))
        text = (tmp_path / "clicks").read_bytes()
    text = gzip.compress(text, 1) if suffix.endswith(".gz") else text
    path.write_bytes(text)
    schema = {"label": "click", "time": "ts", "dense": ["price"], "categorical": ["user"], "statistics": ["user"]}
    given = parse_schema(schema | {"csv": {"delimiter": ","}}, where="test") if suffix == ".csv" else None
    dataset = run_prepare("auto" if given is None else "csv", path, tmp_path / "out", schema=given)
    assert dataset.info.sources[0].checksum == f"crc32:{zlib.crc32(text):08x}"
    assert bytes_read() <= 1.3 * len(text)

"""Packed datasets: what is written is what is read, by us and by other Arrow tools, to the byte of docs/format.md."""

import errno
import json
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from hotrow.data.packed import writer as packed_writer
from hotrow.data.packed.format import DatasetInfo, DenseColumn, Feature, Label, Ragged, Table
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from loops import looped
from packed_data import Rows, append_rows_to, counts_file, make_info, make_rows, write_dataset


def assert_holds(dataset: PackedDataset, split_name: str, rows: Rows) -> None:
    split = dataset.split(split_name)
    assert split.num_rows == len(rows.label) == split.block_rows.sum()
    start = 0
    for index in range(split.num_blocks):
        block = split.block(index)
        wanted = rows.slice(start, start + len(block.label))
        np.testing.assert_array_equal(block.label, wanted.label)
        np.testing.assert_array_equal(np.stack(block.dense, axis=1), wanted.dense)
        for name, ids in zip(dataset.info.feature_names, block.ids, strict=True):
            if isinstance(ids, Ragged):
                np.testing.assert_array_equal(ids.values, wanted.sparse[name][0])
                np.testing.assert_array_equal(ids.row_splits, wanted.sparse[name][1])
            else:
                np.testing.assert_array_equal(ids, wanted.sparse[name])
        start += len(block.label)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return make_rows(1037)


@pytest.fixture(scope="module")
def dataset(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return write_dataset(tmp_path_factory.mktemp("packed") / "data", rows)


@looped("append_rows", [1, 77, 100, 300, 5000])
def test_round_trip(tmp_path: Path, rows: Rows, dataset: PackedDataset, append_rows: int) -> None:
    """How rows are appended does not show."""
    write_dataset(tmp_path / "data", rows, append_rows=append_rows)
    found = PackedDataset.open(tmp_path / "data", verify="full")
    assert found.split("train").num_blocks == 11
    assert [part.num_rows for part in found.info.splits["train"].parts] == [300, 300, 300, 137]
    assert_holds(found, "train", rows)
    assert folder_bytes(found.path) == folder_bytes(dataset.path)


def folder_bytes(folder: Path) -> tuple[tuple[str, bytes], ...]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((path.relative_to(folder).as_posix(), path.read_bytes()) for path in files)


def test_reading_copies_nothing(dataset: PackedDataset) -> None:
    block = dataset.split("train").block(4)
    for column in (block.label, *block.dense, block.ids[0], *block.ids[2]):
        assert not column.flags.writeable and not column.flags.owndata
    again = dataset.split("train").block(4)
    assert again.label.ctypes.data == block.label.ctypes.data


def test_any_arrow_tool_opens_the_parts(dataset: PackedDataset, rows: Rows) -> None:
    paths = sorted((dataset.path / "train").glob("part-*.arrow"))
    with pa.OSFile(str(paths[0])) as file:
        assert pa.ipc.open_file(file).num_record_batches == 3
    tables = [pa.ipc.open_file(pa.OSFile(str(path))).read_all() for path in paths]
    for table in (pa.concat_tables(tables), pl.concat([pl.read_ipc(path) for path in paths]).to_arrow()):
        assert table.column_names == ["label", "I1", "I2", "row", "item", "bag", "past"]
        np.testing.assert_array_equal(table["label"], rows.label)
        np.testing.assert_array_equal(table["I2"], rows.dense[:, 1])
        np.testing.assert_array_equal(table["item"], rows.sparse["item"])
        np.testing.assert_array_equal(pc.list_flatten(table["past"]), rows.sparse["past"][0])
    assert tables[0].schema.field("past").type == pa.large_list(pa.field("item", pa.int32(), nullable=False))
    assert not any(field.nullable for field in tables[0].schema)


def test_bytes_of_a_part_are_as_specified(dataset: PackedDataset, rows: Rows) -> None:
    part = dataset.info.splits["train"].parts[1]
    data = (dataset.path / "train" / part.file).read_bytes()
    starts = (0, *part.range_ends)
    assert len(data) == part.range_ends[-1] and len(part.range_ends) == 3 + 2
    for start, end, crc in zip(starts, part.range_ends, part.range_crc32, strict=False):
        assert zlib.crc32(data[start:end]) == crc
    assert data[:8] == b"ARROW1\0\0" and data[-6:] == b"ARROW1"
    marker, schema_bytes = struct.unpack_from("<II", data, 8)
    assert (marker, 16 + schema_bytes) == (0xFFFFFFFF, part.range_ends[0])
    for start in starts[1:-2]:
        assert data[start : start + 4] == b"\xff\xff\xff\xff" and start % 8 == 0
    assert data[starts[-2] : starts[-2] + 8] == b"\xff\xff\xff\xff\0\0\0\0"
    _, metadata_bytes = struct.unpack_from("<II", data, starts[1])
    label_at = starts[1] + 8 + metadata_bytes
    assert data[label_at : label_at + 400] == rows.label[300:400].astype("<f4").tobytes()


def test_the_manifest_says_what_is_there(dataset: PackedDataset) -> None:
    value = json.loads((dataset.path / "dataset.json").read_bytes())
    assert (value["format"], value["version"]) == ("hotrow-packed", 1)
    assert value["dense"] == [{"name": "I1", "transform": "log1p"}, {"name": "I2", "transform": "none"}]
    assert value["features"][2] == {"name": "bag", "table": "tag", "kind": "multi_hot"}
    assert value["splits"]["train"]["num_rows"] == 1037
    assert PackedDataset.open(dataset.path).info == dataset.info
    assert len(dataset.checksum) == 64


def test_files_are_private_and_nothing_else_is_left(dataset: PackedDataset) -> None:
    files = [path for path in dataset.path.rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert sorted(path.name for path in dataset.path.iterdir()) == ["dataset.json", "train"]


def test_ids_are_int64_only_where_a_table_needs_it() -> None:
    assert Table("a", 2**31).id_dtype is np.int32
    assert Table("a", 2**31 + 1).id_dtype is np.int64


def test_vocabularies_and_counts_are_listed_and_checked(tmp_path: Path) -> None:
    folder, counts_of_3 = tmp_path / "data", np.arange(3, dtype="<u4")
    counts = counts_file(np.arange(100_000, dtype="<u4"))
    for name, content in {"vocab/row": b"v" * 10, "counts/row": counts, "counts/tag": counts_file(counts_of_3)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    dataset = write_dataset(folder, make_rows(10))
    assert dataset.counts("row").dtype == np.uint32 and dataset.counts("row")[7] == 7
    assert dataset.vocabulary_path("row") == folder / "vocab" / "row"
    with pytest.raises(ValueError, match="counts/tag counts 3 rows where the table has 100000"):
        dataset.counts("tag")
    with pytest.raises(ValueError, match="lists no file counts/item"):
        dataset.counts("item")
    with pytest.raises(ValueError, match="has no table 'user'; its tables are row, item, tag"):
        dataset.vocabulary_path("user")
    (folder / "counts" / "row").write_bytes(bytes(len(counts)))
    with pytest.raises(ValueError, match=r"counts/row: the checksum differs"):
        PackedDataset.open(folder, verify="full")
    with pytest.raises(ValueError, match=r"counts/row: the checksum differs"):
        PackedDataset.open(folder).counts("row")
    (folder / "vocab" / "row").write_bytes(b"v")
    with pytest.raises(ValueError, match=r"vocab/row has 1 bytes, dataset\.json says 10"):
        dataset.vocabulary_path("row")


def test_table_configs(dataset: PackedDataset) -> None:
    row, item, tag = dataset.table_configs(16)
    assert (row.name, row.num_embeddings, row.embedding_dim, row.feature_names) == ("row", 100_000, 16, ("row",))
    assert tag.feature_names == ("bag", "past") and item.init.zero_rows == 1


def test_more_parts_than_stay_open(tmp_path: Path) -> None:
    rows = make_rows(700, lists=False)
    dataset = write_dataset(tmp_path / "data", rows, rows_per_block=5, rows_per_part=10)
    blocks = [dataset.split("train").block(index) for index in range(140)]
    assert [int(block.ids[0][0]) for block in blocks] == list(range(0, 700, 5))


def test_several_splits(tmp_path: Path) -> None:
    train, test = make_rows(250), make_rows(120, seed=1)
    with PackedWriter(tmp_path / "data", make_info(), rows_per_part=100, rows_per_block=50) as writer:
        append_rows_to(writer, "train", train.slice(0, 200))
        append_rows_to(writer, "test", test)
        append_rows_to(writer, "train", train.slice(200, 250))
        dataset = writer.close({"rows_skipped": 3})
    assert_holds(dataset, "train", train)
    assert_holds(dataset, "test", test)
    assert dataset.info.summary == {"rows_skipped": 3}
    with pytest.raises(ValueError, match="no split 'valid'; its splits are train, test"):
        dataset.split("valid")


def interrupted_at(folder: Path, rows: Rows, stop: int) -> None:
    with PackedWriter(folder, make_info(), rows_per_part=300, rows_per_block=100) as writer:
        append_rows_to(writer, "train", rows.slice(0, stop))
        raise KeyboardInterrupt


@looped("stop", [0, 299, 300, 731, 1037])
def test_an_interrupted_writer_goes_on(tmp_path: Path, rows: Rows, stop: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(tmp_path / "data", rows, stop)
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(ValueError, match="preparation was interrupted, run the same prepare command again"):
        PackedDataset.open(tmp_path / "data")
    with PackedWriter(tmp_path / "data", make_info(), rows_per_part=300, rows_per_block=100) as writer:
        done = writer.finished_rows("train")
        assert done == min(stop, 900) // 300 * 300
        assert len(writer.finished_parts("train")) == done // 300
        append_rows_to(writer, "train", rows.slice(done, 1037))
        writer.close()
    write_dataset(tmp_path / "whole", rows)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "whole")


def test_a_killed_writer_goes_on(tmp_path: Path, rows: Rows) -> None:
    killed = PackedWriter(tmp_path / "data", make_info(), rows_per_part=300, rows_per_block=100)
    append_rows_to(killed, "train", rows.slice(0, 750))  # and neither closed nor aborted
    with PackedWriter(tmp_path / "data", make_info(), rows_per_part=300, rows_per_block=100) as writer:
        assert writer.finished_rows("train") == 600
        append_rows_to(writer, "train", rows.slice(600, 1037))
        dataset = writer.close()
    assert_holds(dataset, "train", rows)


def test_unfinished_work_of_another_schema_is_refused(tmp_path: Path, rows: Rows) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(tmp_path / "data", rows, 400)
    for info, sizes in ((make_info(num_embeddings=7), (300, 100)), (make_info(), (200, 100))):
        with pytest.raises(ValueError, match="unfinished parts of another schema"):
            PackedWriter(tmp_path / "data", info, rows_per_part=sizes[0], rows_per_block=sizes[1])
    part = tmp_path / "data" / "train" / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-00000\.arrow was finished but is now missing or cut"):
        PackedWriter(tmp_path / "data", make_info(), rows_per_part=300, rows_per_block=100)


def test_a_complete_dataset_is_not_written_over(dataset: PackedDataset) -> None:
    with pytest.raises(ValueError, match="already holds a complete dataset"):
        PackedWriter(dataset.path, make_info())


def test_a_full_disk_keeps_finished_parts(tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    put = packed_writer._ChecksumSink._put

    def put_until_full(sink: Any, view: memoryview) -> None:
        nonlocal written
        written += len(view)
        if written > 45_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(sink, view)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full while writing parts") as error:
        patch.setattr(packed_writer._ChecksumSink, "_put", put_until_full)
        write_dataset(tmp_path / "data", rows)
    assert error.value.errno == errno.ENOSPC
    cure = "2 finished part(s) with 600 rows are kept. Free some space, then run the same command again"
    assert cure in str(error.value)
    parts = sorted(path.name for path in (tmp_path / "data" / "train").iterdir())
    assert parts == ["part-00000.arrow", "part-00001.arrow"]
    with PackedWriter(tmp_path / "data", make_info(), rows_per_part=300, rows_per_block=100) as writer:
        append_rows_to(writer, "train", rows.slice(writer.finished_rows("train"), 1037))
        assert_holds(writer.close(), "train", rows)


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with (
        PackedWriter(tmp_path / "data", make_info()) as writer,
        pytest.raises(ValueError, match="no rows were written"),
    ):
        writer.close()


def one_row(**changes: Any) -> dict[str, Any]:
    bag = (np.array([1, 2]), np.array([0, 2]))
    row = {"label": [1], "dense": [[0.5, 1.5]], "row": np.array([3]), "item": np.array([4]), "bag": bag, "past": bag}
    return {**row, **changes}


@looped(
    ("changes", "message"),
    [
        ({"label": [2]}, "column 'label', row 0: label is 2.0; it must be 0 or 1"),
        ({"label": [np.nan]}, "label is nan"),
        ({"dense": [[0.5, np.inf]]}, "column 'I2', row 0: value is inf; dense values must be finite"),
        ({"dense": [[0.5]]}, r"dense has shape \(1, 1\); it must be \[1, 2\]"),
        ({"row": np.array([100_000])}, "column 'row', row 0: id is 100000; table 'row' has rows 0 to 99999"),
        ({"row": np.array([-1])}, "id is -1"),
        ({"row": np.array([2**31])}, "id 2147483648 does not fit its table"),
        ({"row": np.array([2**63], np.uint64)}, "does not fit"),
        ({"row": np.array([1.0])}, r"ids are float64 \(1,\); pass a 1-D integer array"),
        ({"row": np.array([1, 2])}, "of 1 ids"),
        ({"row": (np.array([1]), np.array([0, 1]))}, "feature 'row' is one_hot; pass one array of ids"),
        ({"bag": np.array([1])}, "feature 'bag' is multi_hot; pass a pair"),
        ({"bag": (np.array([1, 2]), np.array([0, 1]))}, "feature 'bag': row_splits must be 2 offsets, 0 to 2"),
        ({"bag": (np.array([1, 100_000]), np.array([0, 2]))}, "column 'bag', row 0: id is 100000"),
    ],
)
def test_values_that_may_not_be_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    row = one_row(**changes)
    with PackedWriter(tmp_path / "data", make_info()) as writer, pytest.raises(ValueError, match=message):
        writer.append("train", row.pop("label"), row.pop("dense"), row)
        writer.close()
    assert not (tmp_path / "data" / "dataset.json").exists()


def test_a_bad_row_of_a_list_is_named(tmp_path: Path) -> None:
    bag = (np.array([1, 2, 100_000, 3]), np.array([0, 2, 2, 4]))
    fine = (np.array([1]), np.array([0, 0, 0, 1]))
    with PackedWriter(tmp_path / "data", make_info()) as writer:
        ids = {"row": np.arange(3), "item": np.arange(3), "bag": bag, "past": fine}
        writer.append("train", [0] * 3, np.zeros((3, 2)), ids)
        with pytest.raises(ValueError, match="column 'bag', row 2: id is 100000"):
            writer.close()


def test_names_and_sizes_the_writer_refuses(tmp_path: Path) -> None:
    row = one_row()
    label, dense = row.pop("label"), row.pop("dense")
    with PackedWriter(tmp_path / "data", make_info()) as writer:
        for name, message in (("../x", "split name is '../x'"), ("vocab", "this name is taken")):
            with pytest.raises(ValueError, match=message):
                writer.append(name, label, dense, row)
        with pytest.raises(ValueError, match="sparse has features"):
            writer.append("train", label, dense, {"row": row["row"]})
    with pytest.raises(ValueError, match="rows_per_part is 150; it must be a multiple of rows_per_block 100"):
        PackedWriter(tmp_path / "data", make_info(), rows_per_part=150, rows_per_block=100)
    with pytest.raises(ValueError, match="rows_per_block is 0"):
        PackedWriter(tmp_path / "data", make_info(), rows_per_block=0)


@looped(
    ("changes", "message"),
    [
        ({"dense": (DenseColumn("x"), DenseColumn("x"))}, "dense column name 'x' is used twice"),
        ({"dense": (DenseColumn("row"), DenseColumn("row (ids)"))}, r"column name 'row \(ids\)' is used twice"),
        ({"features": (Feature("item", "item"), Feature("item", "row"))}, "feature name 'item' is used twice"),
        ({"labels": (Label("item"),)}, "column name 'item' is used twice"),
        ({"dense": (DenseColumn("label"),)}, "column name 'label' is used twice"),
        ({"tables": (Table("row", 5),)}, "feature 'item' names table 'item'; the tables are: row"),
        ({"tables": (*make_info().tables, Table("more", 5))}, "no feature looks up in table 'more'"),
        ({"features": ()}, "at least 1 item"),
        ({"files": {"../x": None}}, "files"),
    ],
)
def test_a_schema_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_info(), **changes)


def test_a_schema_of_the_wrong_types() -> None:
    with pytest.raises(ValueError, match="num_embeddings"):
        Table(name="a", num_embeddings=0)
    with pytest.raises(ValueError, match="num_embeddings"):
        Table(name="a", num_embeddings="7")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one_hot"):
        Feature("a", "a", kind="onehot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown"):
        DatasetInfo(name="x", features=(Feature("a", "a"),), tables=(Table("a", 1),), unknown=1)  # type: ignore[call-arg]


@looped("kinds", [["binary"], ["number"], ["binary", "number"], ["binary", "binary"]])
def test_labels_are_a_matrix(kinds: list[Any], tmp_path: Path) -> None:
    rows = make_rows(250)
    labels = np.stack([rows.label, np.linspace(-3, 1e6, 250, dtype=np.float32)], axis=1)
    labels = labels[:, [int(kind == "number") for kind in kinds]]
    info = replace(make_info(), labels=tuple(Label(f"label {k}", kind) for k, kind in enumerate(kinds)))
    with PackedWriter(tmp_path / "data", info, rows_per_part=200, rows_per_block=100) as writer:
        writer.append("train", labels if len(kinds) > 1 else labels[:, 0], rows.dense, rows.sparse)
        dataset = writer.close()
    assert PackedDataset.open(tmp_path / "data", verify="full").info == dataset.info
    assert dataset.info.labels == info.labels
    split = dataset.split("train")
    found = np.concatenate([np.stack(split.block(k).labels, axis=1) for k in range(split.num_blocks)])
    np.testing.assert_array_equal(found, labels)
    batches = list(Loader(split, 64, shuffle_seed=None).epoch(0))
    np.testing.assert_array_equal(torch.cat([batch.labels for batch in batches]).numpy(), labels)
    assert batches[0].label.shape == ((64, len(kinds)) if len(kinds) > 1 else (64,)) and len(batches[-1]) == 250 % 64


@looped(("kind", "value"), [("binary", 0.5), ("number", np.nan), ("number", np.inf)])
def test_a_label_that_is_not_of_its_kind_is_refused(kind: Any, value: float, tmp_path: Path) -> None:
    rows, info = make_rows(20), replace(make_info(), labels=(Label("y", kind),))
    rows.label[7] = value
    with PackedWriter(tmp_path / "data", info) as writer, pytest.raises(ValueError, match="column 'y', row 7: label"):
        writer.append("train", rows.label, rows.dense, rows.sparse)
        writer.close()


def test_labels_of_another_number_are_refused(tmp_path: Path) -> None:
    rows, info = make_rows(20), replace(make_info(), labels=(Label("a"), Label("b")))
    with (
        PackedWriter(tmp_path / "data", info) as writer,
        pytest.raises(ValueError, match=r"label has shape \(20, 1\); it must be \[20, 2\]"),
    ):
        writer.append("train", rows.label, rows.dense, rows.sparse)


def test_edges_are_boundaries_as_numbers_at_them_are_stored() -> None:
    """Those that the transform makes equal, or that no float32 tells apart or holds, are one; of many every second."""
    columns = {
        "log1p_clip0": ([-5, -1, 0, 1, 7], [0, math.log(2), math.log(8)]),
        "standardize(mean=10.0, std=4.0)": ([2, 10, 12], [-2, 0, 0.5]),
        "identity": ([1, 1 + 1e-9, 2, 3e38, 1e39], [1, 2, 3e38]),
        "clip(low=0.0)": ([0, 1e-45, 1], [0, 1]),
        "standardize": (list(range(50)), list(range(0, 50, 3))),
        "none": (None, []),
    }
    dense = tuple(DenseColumn(f"d{i}", transform) for i, transform in enumerate(columns))
    buckets = [{"column": f"d{i}", "buckets": raw} for i, (raw, _) in enumerate(columns.values())]
    info = replace(make_info(), dense=dense, ids={"schema": {"categorical": [{"column": "user"}, *buckets]}})
    for found, (_, edges) in zip(info.edges, columns.values(), strict=True):
        assert found == [float(np.float32(edge)) for edge in edges]
    assert replace(info, ids={}).edges == [[]] * len(columns)

"""Law 6 for packed datasets: whatever a folder holds, opening and reading it gives the rows that were written or a
ValueError that names the file; nothing outside the folder is read, and nothing crashes."""

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrow.data.packed.format import Part, arrow_schema
from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from packed_data import make_rows, write_dataset
from resealed import reseal

NUM_ROWS = 37


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "data"
    (folder / "vocab").mkdir(parents=True)
    (folder / "vocab" / "row").write_bytes(b"vocabulary")
    write_dataset(folder, make_rows(NUM_ROWS), rows_per_block=10, rows_per_part=20)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "data")
    return tmp_path / "data"


def read_everything(folder: Path) -> int:
    """Rows read through the loader; everything else is checked by verify="full"."""
    dataset = PackedDataset.open(folder, verify="full")
    return sum(len(batch) for batch in Loader(dataset.split("train"), 8, shuffle_seed=1))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    reseal(folder / "dataset.json", change)


def set_field(dotted: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = [int(step) if step.isdigit() else step for step in dotted.split("/")]
        for step in path:
            manifest = manifest[step]
        manifest[last] = value

    return change


PART = "splits/train/parts/0"
HUGE = 10**30


def test_the_original_is_read(original: Path) -> None:
    assert read_everything(original) == NUM_ROWS


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "parquet", "format is 'parquet', and this hotrow reads 'hotrow-packed'"),
        ("version", 2, "version is 2, and this hotrow reads 1; use the hotrow that wrote"),
        ("version", "1", "version is '1'"),
        ("version", True, "version is True"),
        (f"{PART}/file", "../part-00000.arrow", "parts.0.file is '../part-00000.arrow'"),
        (f"{PART}/file", "/etc/passwd", "parts.0.file is '/etc/passwd'"),
        (f"{PART}/file", "part-00000.arrow\n", "parts.0.file"),
        (f"{PART}/file", "part-00001.arrow", "a part is listed twice"),
        (f"{PART}/file", "part-00007.arrow", "part-00007.arrow: dataset.json names this file and it is missing"),
        (f"{PART}/file", 5, "parts.0.file is '5'"),
        (f"{PART}/block_rows", [], "at least one block"),
        (f"{PART}/block_rows", [10], "blocks \\+ 2 of each"),
        (f"{PART}/block_rows", [10, -10], "block_rows.1 is '-10'"),
        (f"{PART}/block_rows", [10, HUGE], "block_rows.1 is '1000000"),
        (f"{PART}/block_rows", [10, 10.0], "block_rows.1 is '10.0'"),
        (f"{PART}/block_rows", [4, 16], "all blocks but the last"),
        (f"{PART}/block_rows", [10, 9], "num_rows is 37 but the parts hold 36"),
        (f"{PART}/range_ends", [1, 2, 3], "blocks \\+ 2 of each"),
        (f"{PART}/range_ends", [9, 5, 6, 7], "range_ends must rise"),
        (f"{PART}/range_ends", [10, 20, 30, HUGE], "range_ends.3"),
        (f"{PART}/range_crc32", [0, 0, 0, 0], "header .bytes 0 to .*the checksum differs"),
        (f"{PART}/range_crc32", [0, 0, 0, 1 << 32], "range_crc32.3"),
        (f"{PART}/extra", 1, "extra: there is no such field"),
        ("splits/train/num_rows", 10**18, "but the parts hold 37"),
        ("splits/train/num_rows", -1, "num_rows is '-1'"),
        ("splits/train/num_rows", None, "num_rows is 'None'"),
        ("splits/..", {"num_rows": 0, "parts": []}, "split name is '..'"),
        ("splits/a~b", {"num_rows": 0, "parts": []}, None),
        ("splits/vocab", {"num_rows": 0, "parts": []}, "taken by a folder of the format"),
        ("splits", [], "splits is '\\[\\]'"),
        ("tables/0/num_embeddings", 0, "num_embeddings is '0'"),
        ("tables/0/num_embeddings", 2**62, "num_embeddings"),
        ("tables/0/num_embeddings", 2**40, "its columns are"),
        ("tables/0/num_embeddings", 36, "column 'row', row .*: id is 36; table 'row' has rows 0 to 35"),
        ("tables/2/num_embeddings", 3, "column 'bag', row .*: id is"),
        ("tables/0/name", "../row", "feature 'row' names table 'row'"),
        ("tables/0/key_kind", "float", "key_kind is 'float'"),
        ("features/0/table", "nowhere", "names table 'nowhere'"),
        ("features/0/kind", "sequence", "its columns are"),
        ("features/0/name", "x/y", "its columns are"),
        ("labels", [{"name": "I1"}], "column name 'I1' is used twice"),
        ("dense", [], "its columns are"),
        ("files", {"vocab/../../x": {"num_bytes": 1, "crc32": 1}}, "path component"),
        ("files", {"/etc/passwd": {"num_bytes": 1, "crc32": 1}}, "only paths below vocab/, counts/"),
        ("files", {"vocab": {"num_bytes": 1, "crc32": 1}}, "only paths below"),
        ("files", {"vocab/none": {"num_bytes": 1, "crc32": 1}}, "vocab/none: dataset.json names this file"),
        ("files/vocab~row/num_bytes", 9, "vocab/row has 10 bytes, dataset.json says 9"),
        ("files/vocab~row/crc32", 9, "vocab/row: the checksum differs"),
        ("unknown", 1, "unknown: there is no such field"),
    ],
)
def test_a_hostile_manifest(folder: Path, field: str, value: Any, message: str | None) -> None:
    change = set_field(field, value)
    if "~" in field:
        *path, last = field.split("/")
        path = [step.replace("~", "/") for step in path]

        def change(manifest: dict[str, Any]) -> None:
            for step in path:
                manifest = manifest[step]
            manifest[last] = value

    edit_manifest(folder, change)
    if message is None:
        assert read_everything(folder) == NUM_ROWS
        return
    with pytest.raises(ValueError, match=message):
        read_everything(folder)


@pytest.mark.parametrize("missing", ["features", "tables", "name", "splits/train/parts"])
def test_a_manifest_without_a_field(folder: Path, missing: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = missing.split("/")
        for step in path:
            manifest = manifest[step]
        del manifest[last]

    edit_manifest(folder, change)
    with pytest.raises(ValueError, match=rf"dataset\.json: .*{missing.split('/')[-1]}"):
        read_everything(folder)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": "hotrow-packed", "version": 1', b"\xff\xfe", b"[" * 100_000]
)
def test_a_manifest_that_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / "dataset.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"dataset\.json has no checksum at its end"):
        read_everything(folder)


def test_any_flipped_byte_of_a_part_is_found(folder: Path) -> None:
    path = folder / "train" / "part-00000.arrow"
    data = path.read_bytes()
    dataset = PackedDataset.open(folder)
    ends = dataset.info.splits["train"].parts[0].range_ends
    for position in {*range(0, len(data), 61), *ends[:-1], *(end - 1 for end in ends)}:
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        index = int(np.searchsorted(ends, position, "right"))
        where = "header" if index == 0 else "footer" if index == len(ends) - 1 else f"block {index - 1}"
        span = rf"part-00000\.arrow, {where} \(bytes {(0, *ends)[index]} to {ends[index]}\): the checksum differs"
        with pytest.raises(ValueError, match=span):
            read_everything(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 100, -1])
def test_a_part_that_was_cut_or_grew(folder: Path, size: int) -> None:
    path = folder / "train" / "part-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:size] if size >= 0 else data + b"x")
    with pytest.raises(ValueError, match=r"part-00001\.arrow has \d+ bytes, dataset\.json says .*restore the file"):
        read_everything(folder)


def test_blocks_are_checked_when_first_read_and_not_before(folder: Path) -> None:
    path = folder / "train" / "part-00000.arrow"
    data = bytearray(path.read_bytes())
    data[PackedDataset.open(folder).info.splits["train"].parts[0].range_ends[1] + 400] ^= 1
    path.write_bytes(data)
    split = PackedDataset.open(folder).split("train")
    split.block(0)
    with pytest.raises(ValueError, match="block 1"):
        split.block(1)
    with pytest.raises(ValueError, match="block 1"):
        split.block(1)


@pytest.mark.parametrize("link", ["train/part-00000.arrow", "train", "vocab/row", "vocab"])
def test_no_link_is_followed(folder: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    (folder / link).rename(outside)
    (folder / link).symlink_to(outside)
    with pytest.raises(ValueError, match="is a link"):
        read_everything(folder)


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert read_everything(tmp_path / "link") == NUM_ROWS


@pytest.mark.parametrize("name", ["train/part-00000.arrow", "vocab/row"])
def test_a_folder_or_device_in_a_files_place(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        read_everything(folder)


def seal(folder: Path, data: bytes, ends: list[int] | None = None) -> None:
    """Replace part 0 by `data` and make the manifest's checksums right for it: an attacker can."""
    (folder / "train" / "part-00000.arrow").write_bytes(data)

    def change(manifest: dict[str, Any]) -> None:
        part = manifest["splits"]["train"]["parts"][0]
        part["range_ends"] = ends or part["range_ends"]
        starts = [0, *part["range_ends"][:-1]]
        part["range_crc32"] = [zlib.crc32(data[a:b]) for a, b in zip(starts, part["range_ends"], strict=True)]

    edit_manifest(folder, change)


def forge(folder: Path, change: Callable[[dict[str, pa.Array]], None], **options: Any) -> None:
    """Rewrite part 0 with pyarrow from its own columns after `change`, sealed."""
    dataset = PackedDataset.open(folder)
    schema = arrow_schema(dataset.info)
    table = pa.ipc.open_file(pa.OSFile(str(folder / "train" / "part-00000.arrow"))).read_all()
    sink, ends = pa.BufferOutputStream(), [8 + schema.serialize().size]
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for start in (0, 10):
            columns = {name: pa.concat_arrays(table[name].slice(start, 10).chunks) for name in schema.names}
            change(columns)
            writer.write_batch(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema))
            ends.append(sink.tell())
    data = sink.getvalue().to_pybytes()
    seal(folder, data, [*ends, len(data)])


def replace_column(name: str, values: Any) -> Callable[[dict[str, pa.Array]], None]:
    def change(columns: dict[str, pa.Array]) -> None:
        columns[name] = pa.array(values, columns[name].type)

    return change


def test_a_forgery_without_changes_is_read(folder: Path) -> None:
    forge(folder, lambda columns: None)
    assert read_everything(folder) == NUM_ROWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_column("row", [0] * 9 + [100_000]), "column 'row', row 9: id is 100000"),
        (replace_column("row", [0] * 9 + [-1]), "column 'row', row 9: id is -1"),
        (replace_column("label", [0.0] * 9 + [0.5]), "column 'label', row 9: label is 0.5"),
        (replace_column("I2", [0.0] * 9 + [float("nan")]), "column 'I2', row 9: value is nan"),
        (replace_column("row", [0] * 9 + [None]), "nulls, where none may be"),
        (replace_column("bag", [[1, 2]] * 9 + [[100_000]]), "column 'bag', row 9: id is 100000"),
        (replace_column("bag", [[1, 2]] * 9 + [None]), "nulls, where none may be"),
    ],
)
def test_forged_values(folder: Path, change: Callable[[dict[str, pa.Array]], None], message: str) -> None:
    forge(folder, change)
    with pytest.raises(ValueError, match=message):
        read_everything(folder)


@pytest.mark.parametrize(
    "splits",
    [[0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2**60], [-(2**60), *[0] * 10], [2**63 - 1] * 11],
)
def test_forged_list_offsets(folder: Path, splits: list[int]) -> None:
    data = (folder / "train" / "part-00000.arrow").read_bytes()
    honest = PackedDataset.open(folder).split("train").block(0).ids[2].row_splits.tobytes()
    assert data.count(honest) == 1
    seal(folder, data.replace(honest, np.array(splits, "<i8").tobytes()))
    with pytest.raises(ValueError, match=r"part-00000\.arrow, block 0"):
        read_everything(folder)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_blocks_are_refused_unopened(folder: Path, codec: str) -> None:
    forge(folder, lambda columns: None, compression=codec)
    with pytest.raises(ValueError, match="an uncompressed record batch is expected"):
        read_everything(folder)


def test_forged_row_counts(folder: Path) -> None:
    def shorter(columns: dict[str, pa.Array]) -> None:
        for name, column in columns.items():
            columns[name] = column.slice(0, 9)

    forge(folder, shorter)
    with pytest.raises(ValueError, match="9 rows, or nulls"):
        read_everything(folder)


def test_a_block_that_says_the_stream_ends_here(folder: Path) -> None:
    data = bytearray((folder / "train" / "part-00000.arrow").read_bytes())
    start = PackedDataset.open(folder).info.splits["train"].parts[0].range_ends[0]
    data[start + 4 : start + 8] = bytes(4)
    seal(folder, bytes(data))
    with pytest.raises(ValueError, match=r"part-00000\.arrow, block 0 \(bytes"):
        read_everything(folder)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_noise_under_right_checksums_never_crashes(folder: Path, every: int) -> None:
    """Metadata of the header and of both blocks, one byte at a time; then whole ranges of noise."""
    data = (folder / "train" / "part-00000.arrow").read_bytes()
    part: Part = PackedDataset.open(folder).info.splits["train"].parts[0]
    rng = np.random.default_rng(11)
    header, first = part.range_ends[:2]
    block_metadata = range(header, header + 600)
    for position in [*range(0, header, 3 * every), *block_metadata[:: 2 * every]]:
        altered = bytearray(data)
        altered[position] = rng.integers(256)
        seal(folder, bytes(altered))
        read_or_refuse(folder)
    for start, end in ((0, header), (header, first), (header + 8, header + 100)):
        seal(folder, data[:start] + rng.bytes(end - start) + data[end:])
        with pytest.raises(ValueError, match=r"part-00000\.arrow"):
            read_everything(folder)


def read_or_refuse(folder: Path) -> None:
    try:
        assert read_everything(folder) == NUM_ROWS
    except ValueError as error:
        assert "part-00000.arrow" in str(error)

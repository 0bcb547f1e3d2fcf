"""benchmarks/synthetic.py: the rows follow the stated laws, whatever the chunks, with the planted truth."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray

from benchmarks.criteo_text import write_criteo
from benchmarks.synthetic import CELL_ROWS, Generator, SyntheticSource, _cell_spans, sigmoid
from benchmarks.synthetic_config import SyntheticConfig, SyntheticDense, SyntheticTable, criteo_terabyte
from hotrow.data.chunk import Chunk, Position
from hotrow.data.sources.clicks import SCHEMA, SIZES, make_clicks
from hotrow.data.sources.schema import parse_schema
from hotrow.objectives.binary import auc

pytestmark = pytest.mark.package


def make_config(num_rows: int = 40_000, **fields: Any) -> SyntheticConfig:
    tables = (
        SyntheticTable(name="user", num_embeddings=5_000, drift=0.3),
        SyntheticTable(name="site", num_embeddings=50, zipf=1.3, missing=0.2),
        SyntheticTable(name="tags", num_embeddings=300, kind="multi_hot", mean_length=3.0, max_length=8),
        SyntheticTable(name="past", num_embeddings=5_000, kind="sequence", mean_length=6.0, max_length=40, drift=0.1),
    )
    dense = (SyntheticDense(name="n", missing=0.3), SyntheticDense(name="m", mean=0.5, sd=0.5, missing=0.0))
    return SyntheticConfig(num_rows=num_rows, tables=tables, dense=dense, **fields)


def read(source: SyntheticSource, start: int = 0, rows_per_chunk: int = 65_536) -> list[Chunk]:
    return list(source.chunks(Position(offset=start), rows_per_chunk=rows_per_chunk))


def teacher_logits(source: SyntheticSource, start: int, stop: int) -> NDArray[np.float64]:
    cells = [(source._generator.cell(i), slice(a, b)) for i, a, b in _cell_spans(start, stop)]
    return np.concatenate([source.teacher.logits(cell)[rows] for cell, rows in cells])


@pytest.fixture(scope="module")
def whole() -> Chunk:
    (chunk,) = read(SyntheticSource(make_config()))
    return chunk


@pytest.mark.parametrize(
    ("start", "rows_per_chunk"), [(0, 1_000), (0, 16_384), (17_001, 9_999), (39_999, 5), (16_384, 30_000)]
)
def test_chunks_of_any_size_from_anywhere_hold_the_same_rows(whole: Chunk, start: int, rows_per_chunk: int) -> None:
    row = start
    for chunk in read(SyntheticSource(make_config()), start, rows_per_chunk):
        rows = slice(row, row + chunk.num_rows)
        row = rows.stop
        assert chunk.position == Position(offset=row)
        np.testing.assert_array_equal(chunk.label, whole.label[rows])
        np.testing.assert_array_equal(chunk.dense, whole.dense[rows])
        np.testing.assert_array_equal(chunk.time, whole.time[rows])
        for name, keys in chunk.keys.items():
            wanted = whole.keys[name]
            if wanted.row_splits is None:
                np.testing.assert_array_equal(keys.values, wanted.values[rows])
                np.testing.assert_array_equal(keys.valid, None if wanted.valid is None else wanted.valid[rows])
            else:
                splits = wanted.row_splits[rows.start : rows.stop + 1]
                np.testing.assert_array_equal(keys.row_splits, splits - splits[0])
                np.testing.assert_array_equal(keys.values, wanted.values[splits[0] : splits[-1]])
    assert row == 40_000


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.1, 2.0])
def test_popularity_follows_the_stated_law(zipf: float) -> None:
    table = SyntheticTable(name="t", num_embeddings=40, zipf=zipf)
    (chunk,) = read(SyntheticSource(SyntheticConfig(num_rows=100_000, tables=(table,))), rows_per_chunk=100_000)
    generator = Generator(SyntheticConfig(num_rows=1, tables=(table,)))
    key_of_item = generator.keys(0, np.arange(40))
    got = (chunk.keys["t"].values[:, None] == key_of_item).sum(axis=0)
    edges = np.arange(41) + 0.5
    integral = np.log(edges) if zipf == 1 else edges ** (1 - zipf) / (1 - zipf)
    wanted = 100_000 * np.diff(integral) / (integral[-1] - integral[0])
    assert got.sum() == 100_000
    # Each count is Binomial; 5 standard deviations.
    assert (np.abs(got - wanted) < 5 * np.sqrt(wanted) + 1).all()


def test_missing_values_and_lengths(whole: Chunk) -> None:
    assert (~whole.keys["site"].valid).mean() == pytest.approx(0.2, abs=0.02)
    assert np.isnan(whole.dense).mean(axis=0) == pytest.approx([0.3, 0.0], abs=0.02)
    counts = whole.dense[~np.isnan(whole.dense)]
    assert (counts == np.floor(counts)).all() and counts.min() >= 0
    assert np.log1p(whole.dense[:, 1]).mean() == pytest.approx(0.3, abs=0.1)
    for name, mean, longest in (("tags", 3.0, 8), ("past", 6.0, 40)):
        lengths = np.diff(whole.keys[name].row_splits)
        assert lengths.min() == 0 and lengths.max() == longest
        assert lengths.mean() == pytest.approx(mean, abs=0.15)
    assert np.diff(whole.keys["past"].row_splits).std() > 2 * np.diff(whole.keys["tags"].row_splits).std()


def test_labels_follow_the_teacher(whole: Chunk) -> None:
    logits = teacher_logits(SyntheticSource(make_config()), 0, 40_000)
    assert whole.label.mean() == pytest.approx(0.25, abs=0.01)
    order = np.argsort(logits)
    for tenth in np.array_split(order, 10):
        expected = sigmoid(logits[tenth]).mean()
        # 4,000 labels: the standard error is at most 0.008.
        assert whole.label[tenth].mean() == pytest.approx(expected, abs=0.04)


def test_criteo_text_is_the_same_rows(tmp_path: Path) -> None:
    config = criteo_terabyte(CELL_ROWS + 700, scale=1e-4)
    size = write_criteo(tmp_path / "day_0", config)
    assert size == (tmp_path / "day_0").stat().st_size and (tmp_path / "day_0").stat().st_mode & 0o777 == 0o600
    lines = (tmp_path / "day_0").read_text().splitlines()
    (chunk,) = read(SyntheticSource(config))
    assert len(lines) == chunk.num_rows
    for row in [*range(50), CELL_ROWS - 1, CELL_ROWS, chunk.num_rows - 1]:
        label, *fields = lines[row].split("\t")
        assert label == str(int(chunk.label[row]))
        assert fields[:13] == ["" if np.isnan(count) else str(int(count)) for count in chunk.dense[row]]
        wanted = [
            "" if keys.valid is not None and not keys.valid[row] else f"{keys.values[row]:08x}"
            for keys in chunk.keys.values()
        ]
        assert fields[13:] == wanted
    every_count = {field for line in lines for field in line.split("\t")[1:14]}
    assert not any(count.startswith("0") and len(count) > 1 for count in every_count)
    assert max(map(len, every_count)) == 8, "the widest counts are covered"


def test_rows_have_criteos_columns_and_the_seed_decides_them() -> None:
    rows = make_clicks(70_000, scale=0.001, seed=3)
    assert rows.column_names == [*parse_schema(SCHEMA, where="test").column_names]
    assert rows.equals(make_clicks(70_000, scale=0.001, seed=3))
    other = make_clicks(70_000, scale=0.001, seed=4)
    assert np.mean(other["label"].to_numpy() != rows["label"].to_numpy()) > 0.2
    assert rows["label"].to_numpy().mean() == pytest.approx(0.256, abs=0.01)
    assert (np.diff(rows["time"].to_numpy()) >= 0).all()
    for j, size in enumerate(SIZES, 1):
        assert pc.count_distinct(rows[f"C{j}"]).as_py() <= max(min(size, 1000), round(size * 0.001))
        assert rows[f"C{j}"].null_count / 70_000 == pytest.approx(0.04 * (size > 1_000_000), abs=0.005)
        assert rows[f"I{min(j, 13)}"].null_count / 70_000 == pytest.approx(0.04, abs=0.005)


def test_single_columns_tell_something_of_the_label() -> None:
    """The mean label of an id in the first rows orders later ones; of all columns together, much more."""
    rows = make_clicks(60_000, scale=0.001)
    label, total = rows["label"].to_numpy(), np.zeros(30_000)
    for j, size in enumerate(SIZES, 1):
        if size < 1000:
            _, group = np.unique(rows[f"C{j}"].to_numpy(), return_inverse=True)
            counts = np.bincount(group[:30_000], minlength=size)
            clicks = np.bincount(group[:30_000], label[:30_000], size)
            total += ((clicks + 25) / (counts + 100))[group[30_000:]]
    assert 0.55 < auc(total.astype(np.float32), label[30_000:] == 1) < 0.75

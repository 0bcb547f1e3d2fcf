"""Accesses of datasets and traces: the ids a trainer would look up, batch by batch; bad traces named by line."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.inspect import accesses
from hotrow.inspect.accesses import RowCounts, open_accesses, split_accesses, trace_accesses


@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize("batch_size", [1, 7, 64, 100, 1000])
def test_a_dataset_against_the_loader(
    batch_size: int,
    tmp_path: Path,
    make_dataset: Callable[..., PackedDataset],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks have 64 rows, table t0 two features, one of them bags: the batches are those the loader makes."""
    dataset = make_dataset(tmp_path / "data")
    monkeypatch.setattr(accesses, "_table_accesses", _without_counts)
    found = split_accesses(dataset)
    for table in found.tables:
        made = list(table.batches(batch_size))
        wanted = [
            np.concatenate([batch.sparse.bags(feature)[0].numpy() for feature in table.features])
            for batch in Loader(dataset.split("train"), batch_size, shuffle_seed=None)
        ]
        assert [ids.tolist() for ids in made] == [ids.tolist() for ids in wanted]
    assert found.tables[0].features == ("x0", "bag")


def _without_counts(dataset: PackedDataset, split: object, table: str) -> accesses.TableAccesses:
    columns = [j for j, feature in enumerate(dataset.info.features) if feature.table == table]
    features = tuple(dataset.info.features[j].name for j in columns)
    empty = np.empty(0, np.uint64)
    return accesses.TableAccesses(table, 1, features, lambda n: accesses._split_batches(split, columns, n), empty)


def test_a_dataset_without_counts_is_counted_first(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    dataset = make_dataset(tmp_path / "data")
    with pytest.warns(UserWarning, match="carries no counts: its training split is counted, .* prepare counts") as said:
        found = open_accesses(tmp_path / "data", split="val")
    assert len(said) == 1, "not for each table"
    for table in found.tables:
        wanted = np.zeros(table.num_embeddings, int)
        for batch in Loader(dataset.split("train"), 64, shuffle_seed=None):
            for feature in table.features:
                np.add.at(wanted, batch.sparse.bags(feature)[0].numpy(), 1)
        assert table.num_rare == wanted[0]
        assert table.counts.tolist() == sorted(wanted[1:].tolist(), reverse=True)


def test_an_empty_split_is_refused(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    make_dataset(tmp_path / "data", rows={"train": 64, "val": 0})
    with pytest.raises(ValueError, match=r"split 'val' has no rows, so no accesses; splits with rows: train"):
        open_accesses(tmp_path / "data", split="val")


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
@pytest.mark.parametrize("piece", [8, 1 << 22])
def test_a_trace(piece: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesses, "TEXT_BYTES", piece)
    ids = [5, 0, 7, 5, 5, 12345, 0, 2**40]
    newline = ending or "\n"
    text = newline.join(map(str, ids)) + ending
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "small.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.txt", "small.txt.gz"):
        found = open_accesses(tmp_path / name)
        (table,) = found.tables
        assert (found.kind, found.name, found.num_samples, table.num_embeddings) == ("trace", name, 8, 2**40 + 1)
        assert [batch.tolist() for batch in table.batches(3)] == [ids[:3], ids[3:6], ids[6:]]
        assert table.counts.tolist() == [3, 2, 1, 1, 1]


BAD = {
    "1\n2\nthree\n4\n": r"trace\.txt:3: 'three' is not a row id; a trace has one integer",
    "1\n-2\n": r"trace\.txt:2: '-2' is negative; .* remove or correct the line",
    "1\n\n2\n": r"trace\.txt:2: '' is not a row id",
    "1\n 2\n": r"trace\.txt:2: ' 2' is not a row id",
    "1\n2.0\n": r"trace\.txt:2: '2\.0' is not a row id",
    "1\n1_000\n": r"trace\.txt:2: '1_000' is not a row id",
    "1,2\n": r"trace\.txt:1: '1,2' is not a row id",
    "9223372036854775808\n": r"trace\.txt:1: '9223372036854775808' is not a row id",
    "": r"trace\.txt: the trace is empty; it needs one row id per line",
    "1\n" + "x" * 10_000: r"trace\.txt:2: 'x{40}' is not a row id",
    "x" * 100: r"trace\.txt:1: 'x{40}' is not a row id",
    "7\n\ud800\xff": None,
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:12]))
@pytest.mark.parametrize("piece", [4, 1 << 22])
def test_a_bad_trace_is_named_by_line(piece: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accesses, "TEXT_BYTES", piece)
    (tmp_path / "trace.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=BAD[text] or r"trace\.txt:2: "):
        trace_accesses(tmp_path / "trace.txt")


def test_a_cut_and_an_absent_trace(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join(str(i * 7919).encode() for i in range(5000)))
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.gz.*(truncated|damaged)"):
        trace_accesses(tmp_path / "cut.gz")
    with pytest.raises(ValueError, match=r"absent\.txt: no such file or folder"):
        open_accesses(tmp_path / "absent.txt")


def test_row_counts_against_one_count_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.inspect.accesses.MIN_WAITING", 50)
    ids = np.random.default_rng(0).integers(0, 300, 2000)
    found = RowCounts()
    for piece in np.array_split(ids, 37):
        found.add(piece)
    rows, counts = np.unique(ids, return_counts=True)
    for have, want in zip(found.sums(), (rows, counts), strict=True):
        assert have.tolist() == want.tolist()

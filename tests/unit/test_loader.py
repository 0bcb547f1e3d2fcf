"""hotrow.data.packed.loader: shapes, dtypes, arguments. Training: tests/laws/test_loader_resume.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrow.data.packed.format import DatasetInfo, Feature, Table
from hotrow.data.packed.loader import Loader, LoaderState, _Stream, permutation
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.parallel.ranks import Ranks
from loops import looped
from packed_data import make_info, make_rows, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return write_dataset(tmp_path_factory.mktemp("packed") / "data", make_rows(250, lists=False))


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return write_dataset(tmp_path_factory.mktemp("packed") / "lists", make_rows(250))


def test_a_one_hot_batch(dataset: PackedDataset) -> None:
    batch = next(iter(Loader(dataset.split("train"), 16, shuffle_seed=None)))
    assert batch.dense.shape == (16, 2) and batch.dense.dtype == torch.float32 and batch.dense.is_contiguous()
    assert batch.label.shape == (16,) and batch.label.dtype == torch.float32
    assert batch.sparse.keys == ("row", "item") and batch.sparse.one_hot
    assert batch.sparse.values.dtype == torch.int32
    assert batch.sparse.values[:16].tolist() == list(range(16))


def test_a_batch_may_be_changed_without_changing_the_next(dataset: PackedDataset) -> None:
    loader = Loader(dataset.split("train"), 16, shuffle_seed=None)
    wanted = list(loader.epoch(0))
    for batch, same in zip(loader.epoch(0), wanted, strict=True):
        assert torch.equal(batch.dense, same.dense) and torch.equal(batch.sparse.values, same.sparse.values)
        for tensor in (batch.dense, batch.label, batch.sparse.values):
            tensor.fill_(-1)


def test_a_state_at_the_very_end_of_an_epoch(dataset: PackedDataset) -> None:
    loader = Loader(dataset.split("train"), 100, shuffle_seed=1, start=LoaderState(0, 3))
    assert list(loader) == []
    assert loader.state() == LoaderState(1, 0)


def test_wide_ids_and_no_dense_columns(tmp_path: Path) -> None:
    wide = 2**31 + 5
    info = DatasetInfo(
        name="wide",
        features=(Feature("a", "a"), Feature("b", "b", "multi_hot")),
        tables=(Table("a", wide), Table("b", 10)),
    )
    with PackedWriter(tmp_path / "data", info) as writer:
        bags = (np.array([1, 2, 3]), np.array([0, 1, 1, 3]))
        writer.append("train", [0, 1, 0], np.empty((3, 0)), {"a": np.array([wide - 1, 0, 2**31]), "b": bags})
        dataset = writer.close()
    batch = next(iter(Loader(dataset.split("train"), 8, shuffle_seed=None)))
    assert batch.dense.shape == (3, 0)
    assert batch.sparse.values.dtype == torch.int64
    assert batch.sparse.values.tolist() == [wide - 1, 0, 2**31, 1, 2, 3]
    assert batch.sparse.lengths.tolist() == [1, 1, 1, 1, 0, 2]


@looped(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 8, "window_rows": 0}, "window_rows is 0"),
        ({"batch_size": 8, "shuffle_seed": -1}, "shuffle_seed is -1"),
        ({"batch_size": 100, "start": LoaderState(0, 4)}, "3 batches of 100 rows"),
        ({"batch_size": 100, "start": LoaderState(-1, 0)}, "epoch=-1"),
    ],
)
def test_arguments_out_of_range(dataset: PackedDataset, arguments: dict, message: str) -> None:
    arguments = {"shuffle_seed": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        Loader(dataset.split("train"), arguments.pop("batch_size"), **arguments)


def test_an_empty_split_has_no_batches(dataset: PackedDataset) -> None:
    info = replace(
        dataset.info,
        splits={**dataset.info.splits, "test": replace(dataset.info.splits["train"], num_rows=0, parts=())},
    )
    empty = PackedDataset(dataset.path, info).split("test")
    for seed in (None, 3):
        loader = Loader(empty, 8, shuffle_seed=seed)
        assert loader.num_batches == 0 and list(loader) == []


def test_a_damaged_block_raises_in_the_consumer(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", make_rows(250, lists=False))
    path = tmp_path / "data" / "train" / "part-00000.arrow"
    data = bytearray(path.read_bytes())
    data[dataset.info.splits["train"].parts[0].range_ends[1] + 700] ^= 1
    path.write_bytes(data)
    loader = Loader(PackedDataset.open(tmp_path / "data").split("train"), 50, shuffle_seed=None, window_rows=50)
    seen = 0
    with pytest.raises(ValueError, match=r"part-00000\.arrow, block 1 \(bytes"):
        for batch in loader:
            seen += len(batch)
    assert seen == 100


def test_the_bytes_of_a_row_are_those_of_its_columns() -> None:
    assert make_info(lists=False).row_bytes == 4 + 2 * 4 + 2 * 4
    assert make_info().row_bytes == 4 + 2 * 4 + 2 * 4 + 2 * 8


RANKS = [(1, 1), (2, 2), (3, 4), (4, 4), (5, 7)]


@looped(("num_ranks", "micro_batches"), RANKS)
@looped("shuffle_seed", [None, 3])
@looped("which", ["all", "streams", "only", "front"])
def test_the_parts_of_all_ranks_are_the_whole(
    lists: PackedDataset, num_ranks: int, micro_batches: int, shuffle_seed: int | None, which: str
) -> None:
    """Windows of 50 rows cut batches of 16, and the last batch has 10 samples or fewer."""
    split = lists.split("train")
    marked = np.arange(split.num_rows) % 3 == 0
    options = {"shuffle_seed": shuffle_seed, "window_rows": 50}
    options |= {
        "all": {},
        "streams": {"micro_batches": micro_batches},
        "only": {"only": marked},
        "front": {"front": marked, "front_batches": 2},
    }[which]
    everyone = [Ranks(rank, num_ranks, micro_batches) for rank in range(num_ranks)]
    whole = Loader(split, 16, **options)
    parts = [Loader(split, 16, part=ranks.samples, **options) for ranks in everyone]
    for epoch, start in ((0, 0), (1, 3)):
        batches = list(whole.epoch(epoch, start))
        for batch, *own in zip(batches, *(loader.epoch(epoch, start) for loader in parts), strict=True):
            for ranks, part in zip(everyone, own, strict=True):
                first, last = ranks.samples(len(batch))
                assert part.of_samples == part.num_samples == batch.num_samples == len(batch)
                assert torch.equal(part.dense, batch.dense[first:last])
                assert torch.equal(part.label, batch.label[first:last])
                wanted = batch.sparse.samples(first, last)
                assert part.sparse.keys == wanted.keys and part.sparse.stride == last - first
                assert part.sparse.values.dtype == wanted.values.dtype
                assert torch.equal(part.sparse.values, wanted.values)
                assert torch.equal(part.sparse.offsets, wanted.offsets)


def test_a_part_may_be_empty(lists: PackedDataset) -> None:
    """Of 2 samples for 4 ranks, two ranks have none; their batch has every feature and column all the same."""
    loader = Loader(lists.split("train"), 2, shuffle_seed=1, part=Ranks(0, 4, 4).samples)
    batch = next(iter(loader))
    assert len(batch) == 0 and batch.num_samples == 2
    assert batch.dense.shape == (0, 2) and batch.dense.dtype == torch.float32
    assert batch.sparse.keys == lists.info.feature_names and batch.sparse.stride == 0
    assert batch.sparse.values.dtype == torch.int32 and batch.sparse.offsets.tolist() == [0]


def test_a_part_gathers_its_own_rows_alone(dataset: PackedDataset) -> None:
    """A window keeps a column of a quarter of the rows, not of all of them."""
    loader = Loader(dataset.split("train"), 16, shuffle_seed=1, part=Ranks(1, 4, 4).samples)
    rows = _Stream(loader, 0)
    rows.rows(0, 4)
    held = sum(last - first for k in range(len(loader)) for _, first, last in loader.spans(k))
    assert {len(column) for column in rows._window} == {held} and held < 70


@looped("micro_batches", [1, 3, 4])
def test_against_streams_written_out(tmp_path: Path, micro_batches: int) -> None:
    """docs/format.md, "The order of shuffled batches", with lists of row numbers."""
    split = write_dataset(tmp_path / "data", make_rows(1037)).split("train")
    loader = Loader(split, 50, shuffle_seed=5, window_rows=200, micro_batches=micro_batches)
    first_rows = np.cumsum([0, *split.block_rows]).tolist()
    epoch = [
        row
        for block in permutation(split.num_blocks, seed=5, epoch=2, family=0)
        for row in range(first_rows[block], first_rows[block + 1])
    ]
    sizes = [50] * 20 + [37]
    wanted: list[list[int]] = [[] for _ in sizes]
    for v in range(micro_batches):
        own = [size * (v + 1) // micro_batches - size * v // micro_batches for size in sizes]
        stream, epoch = (epoch[: sum(own)], epoch[sum(own) :]) if v < micro_batches - 1 else (epoch, [])
        width, rows = -(-200 // micro_batches), []
        for w in range(0, len(stream), width):
            window = stream[w : w + width]
            order = permutation(len(window), seed=5, epoch=2, family=1, index=v * 2**32 + w // width)
            rows += [window[k] for k in order]
        for batch, size in zip(wanted, own, strict=True):
            batch += rows[:size]
            del rows[:size]
    found = [[int(n) for n in batch.sparse.bags("row")[0]] for batch in loader.epoch(2)]
    assert found == wanted


def test_a_rank_reads_the_blocks_of_its_own_streams(tmp_path: Path) -> None:
    """Of 11 blocks each of 3 ranks reads a third, and one more if it begins in the middle of it."""
    data = write_dataset(tmp_path / "data", make_rows(1037)).path
    read = []
    for rank in range(3):
        split = PackedDataset.open(data).split("train")
        loader = Loader(split, 50, shuffle_seed=5, part=Ranks(rank, 3, 6).samples, micro_batches=6)
        for _ in loader.epoch(0):
            pass
        read.append(int(split._verified.sum()))
    assert split.num_blocks == 11 and max(read) <= 5

"""Accesses of datasets: the ids a trainer would look up, batch by batch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotrow.data.packed.loader import Loader
from hotrow.data.packed.reader import PackedDataset
from hotrow.inspect import accesses
from hotrow.inspect.accesses import split_accesses


@pytest.mark.filterwarnings("ignore:.* carries no counts")
@pytest.mark.parametrize("batch_size", [1, 7, 64, 100, 1000])
def test_a_dataset_against_the_loader(
    batch_size: int, tmp_path: Path, make_dataset: Callable[..., PackedDataset], monkeypatch: pytest.MonkeyPatch
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
        found = split_accesses(dataset, "val")
    assert len(said) == 1, "not for each table"
    for table in found.tables:
        wanted = np.zeros(table.num_embeddings, int)
        for batch in Loader(dataset.split("train"), 64, shuffle_seed=None):
            for feature in table.features:
                np.add.at(wanted, batch.sparse.bags(feature)[0].numpy(), 1)
        assert table.num_rare == wanted[0]
        assert table.counts.tolist() == sorted(wanted[1:].tolist(), reverse=True)


def test_an_empty_split_is_refused(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 64, "val": 0})
    with pytest.raises(ValueError, match=r"split 'val' has no rows, so no accesses; splits with rows: train"):
        split_accesses(dataset, "val")

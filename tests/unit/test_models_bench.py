"""Models beside FuxiCTR's: which rows the other side gets, and how two sides are compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import models
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset

pytestmark = pytest.mark.package


def test_the_other_side_gets_every_row_with_ids_one_higher(
    make_dataset: Callable[..., PackedDataset], tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "data")
    columns, split, row = models.columns_of(dataset, "train"), dataset.split("train"), 0
    for block in map(split.block, range(split.num_blocks)):
        for k in range(block.num_rows):
            for feature, ids in zip(dataset.info.features, block.ids, strict=True):
                wanted = ids.values[slice(*ids.row_splits[k : k + 2])] if isinstance(ids, Ragged) else ids[k : k + 1]
                own = columns[feature.name][row].reshape(-1)
                assert (own[own > 0] - 1).tolist() == wanted.tolist()
            for dense, values in zip(dataset.info.dense, block.dense, strict=True):
                assert columns[dense.name][row] == values[k]
            assert columns[dataset.info.labels[0].name][row] == block.label[k]
            row += 1
    assert row == split.num_rows == len(columns["x0"])


def test_differences_have_the_errors_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((3, 4))

    def run(dataset: Any, name: str, seed: int, zoo: Path | None = None, *, lazy: bool = False) -> dict[str, float]:
        side = 0 if zoo is None else 1 + lazy
        return {"auc": values[side, seed - 1], "buy.auc": 0.5, "samples_per_s": 10.0 * seed}

    monkeypatch.setattr(models, "ours", run)
    monkeypatch.setattr(models, "theirs", run)
    found = models.cell(None, "din", 4, Path())
    assert found["samples_per_s"] == {"hotrow": 25, "fuxictr": 25, "lazy": 25}
    for side, own in enumerate(("hotrow", "fuxictr", "lazy")):
        assert found["auc"][own]["mean"] == pytest.approx(values[side].mean())
        assert found["auc"][own]["error"] == pytest.approx(values[side].std(ddof=1) / 2)
    difference = values[0].mean() - values[2].mean()
    assert found["auc"]["lazy"]["difference"] == pytest.approx(difference)
    assert found["auc"]["lazy"]["difference_error"] == pytest.approx(np.sqrt((values.var(1, ddof=1) / 4)[[0, 2]].sum()))
    assert found["buy.auc"]["fuxictr"] == {"mean": 0.5, "error": 0, "difference": 0, "difference_error": 0}

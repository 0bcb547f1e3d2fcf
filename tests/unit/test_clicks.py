"""The clicks of `hotrow demo`: Criteo's columns, the same rows from the same seed, and a truth that can be learned."""

import numpy as np
import pyarrow.compute as pc
import pytest

from hotrow.data.sources.clicks import SCHEMA, SIZES, make_clicks
from hotrow.data.sources.schema import parse_schema
from hotrow.objectives.binary import auc


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
            counts, clicks = (
                np.bincount(group[:30_000], minlength=size),
                np.bincount(group[:30_000], label[:30_000], size),
            )
            total += ((clicks + 25) / (counts + 100))[group[30_000:]]
    assert 0.55 < auc(total.astype(np.float32), label[30_000:] == 1) < 0.75

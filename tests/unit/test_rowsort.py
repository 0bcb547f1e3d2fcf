"""Sorting on disk against NumPy's sort of everything at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrow.data.sources.histories import RowSort


@pytest.mark.parametrize("rows_in_memory", [1, 2, 7, 64, 5000])
@pytest.mark.parametrize("num_keys", [1, 3, 40, 10**15])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_against_numpy(rows_in_memory: int, num_keys: int, num_rows: int) -> None:
    """Few keys: one of them fills many pieces; the third column tells the order in which equal rows were added."""
    rng = np.random.default_rng(num_rows + num_keys)
    first, second = rng.integers(-num_keys, num_keys, num_rows), rng.integers(0, 4, num_rows)
    columns = [first, second, np.arange(num_rows)]
    sort = RowSort(3, rows_in_memory=rows_in_memory)
    for cut in np.array_split(np.arange(num_rows), 11):
        sort.add([column[cut] for column in columns])
    order = np.lexsort((second, first))
    for got, column in zip(sort.sorted(), columns, strict=True):
        np.testing.assert_array_equal(got, column[order])


def test_pieces_stay_small_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sort = RowSort(2, rows_in_memory=100)
    values = np.random.default_rng(0).integers(0, 10**9, 10_000)
    sort.add([values, values])
    sort._write_run()
    assert len(sort._runs) == 100
    sizes = [len(first) for first, _ in sort._merged()]
    assert sum(sizes) == 10_000
    assert max(sizes) <= 200
    np.testing.assert_array_equal(sort.sorted()[0], np.sort(values))
    assert list(tmp_path.iterdir()) == []

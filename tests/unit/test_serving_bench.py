"""The measurement of serving, on tables of 1 MB: every cell runs, and what it compares is the same."""

import json
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import serving
from benchmarks.serving_export import CRITEO_TABLES, key_of

pytestmark = pytest.mark.package


def test_ids_of_a_table_differ() -> None:
    rows = np.arange(1, max(CRITEO_TABLES), 997)
    assert len(np.unique(key_of(rows, 3))) == len(rows)


def test_pages_are_those_of_the_rows_whatever_their_bytes() -> None:
    """Rows of 10 and of 132 bytes; pages that hold pinned rows are left out."""
    row_bytes, pinned, ids = (10, 132), (1000, 40), [np.array([5, 1500, 2500]), np.array([3, 70, 200])]
    pages = object.__new__(serving.Pages)
    cells = SimpleNamespace(names=("a", "b"), read=lambda *given: SimpleNamespace(ids=ids))
    pages._version, pages._pinned = SimpleNamespace(_cells=cells), np.array(pinned)
    pages._row_bytes = np.array(row_bytes)
    wanted = set()
    for f, rows in enumerate(ids):
        for row in rows:
            page = row * row_bytes[f] // mmap.PAGESIZE
            if page * mmap.PAGESIZE >= pinned[f] * row_bytes[f]:
                wanted.add((f, int(page)))
    assert wanted == set(pages.of(({}, [{}] * 3), 1.0)) and {f for f, _ in wanted} == {0, 1}


def test_every_cell_has_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "NUM_REQUESTS", 4)
    monkeypatch.setattr(serving, "SPREAD_REQUESTS", 4)
    words = [str(tmp_path / "made"), "--size", "1MB", "--items", "7", "20", "--seconds", "0.05", "--deltas", "3"]
    words += ["--memory", "1MiB", "--out", str(tmp_path / "out.json"), "--cells", *serving.CELLS]
    monkeypatch.setattr(sys, "argv", ["serving", *words])
    serving.main()
    report, text = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert {"7 candidates", "20 candidates", "20 candidates, cold"} <= report["latency"].keys()
    assert 0 < report["latency"]["7 candidates, cold"]["cached_share"] <= 1
    assert {"hotrow, whole", "ONNX Runtime, dense", "torch, whole"} <= report["throughput"].keys()
    memory = report["memory"]
    assert memory["unknown"] == 0, "ids are those of the vocabularies, so that rows all over the tables are read"
    assert memory["most"]["own"] >= memory["before"]["own"] > 0
    deltas = report["deltas"]
    assert (deltas["failed"], deltas["of_no_version"], deltas["bits_of_the_whole_export"]) == (0, 0, True)
    assert deltas["requests"] > 0
    assert all(f"| {cell} |" in text for cell in ("latency", "throughput", "memory")) and "failed: 0" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out.json"]

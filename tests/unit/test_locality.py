"""Locality: plain traces, bad ones named by line; drift against sets; all tables against adding up; the page."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.locality import __main__ as locality
from benchmarks.locality import traces
from benchmarks.locality.reuse import measure_locality
from benchmarks.locality.traces import open_accesses, trace_accesses
from hotrow.inspect.accesses import Accesses, TableAccesses
from hotrow.kernels import ops

pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing simulates caches"),
]


def table(name: str, num_embeddings: int, ids: np.ndarray) -> TableAccesses:
    counts = np.sort(np.bincount(ids))[::-1].astype(np.uint64)
    batches: Any = lambda n: iter(np.split(ids, range(n, len(ids), n)))  # noqa: E731
    return TableAccesses(name, num_embeddings, (name,), batches, counts)


def test_drift_against_sets() -> None:
    """The hot rows of the first tenth are of no use after the middle, where the ids move on."""
    generator = np.random.default_rng(5)
    first = np.where(generator.random(10_000) < 0.8, 3, generator.integers(0, 100, 10_000))
    ids = np.concatenate([first[:5000], first[5000:] + 100])
    windows = measure_locality(table("t", 200, ids), num_samples=10_000, batch_size=100).windows
    assert len(windows) == 10
    for k, window in enumerate(windows):
        own = Counter(ids[k * 1000 : (k + 1) * 1000].tolist()).most_common(2)  # 1 % of 200 rows
        assert window.own_hot_set == sum(count for _, count in own) / 1000
        hot = {row for row, _ in Counter(ids[:1000].tolist()).most_common(2)}
        assert window.first_hot_set == np.isin(ids[k * 1000 : (k + 1) * 1000], list(hot)).mean()
    assert windows[9].first_hot_set == 0 and windows[9].own_hot_set > 0.75


def test_all_tables_together_against_adding_up() -> None:
    generator = np.random.default_rng(6)
    ids = {"hot": (40 * generator.random(6000) ** 4).astype(np.int64), "flat": generator.integers(0, 500, 6000)}
    sizes = {"hot": 40, "flat": 500}
    found = locality.measure(Accesses("x", 6000, tuple(table(name, sizes[name], own) for name, own in ids.items())))
    alone = [measure_locality(own.table, num_samples=6000, batch_size=2048) for own in found.hotness.tables]
    misses = [own.by_lookup.miss_ratio(round(0.1 * size)) for own, size in zip(alone, sizes.values(), strict=True)]
    assert found.miss_ratio_of_share(0.1, per="lookup") == pytest.approx(sum(misses) / 2)
    rows, firsts = ([getattr(own, name) for own in alone] for name in ("rows_per_batch", "num_rows_read"))
    assert found.unique_ratio == pytest.approx(sum(rows) / 4096)
    different = sum(len(np.unique(own)) for own in ids.values())
    assert found.first(per="lookup") == pytest.approx(different / 12_000)
    assert found.first(per="row") == pytest.approx(different / sum(firsts))
    overlaps = sum(own.overlap[1] * n for own, n in zip(alone, rows, strict=True))
    assert found.overlap(1) == pytest.approx(overlaps / sum(rows))
    assert found.overlap(100) is None


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
@pytest.mark.parametrize("piece", [8, 1 << 22])
def test_a_trace(piece: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TEXT_BYTES", piece)
    ids = [5, 0, 7, 5, 5, 12345, 0, 2**40]
    newline = ending or "\n"
    text = newline.join(map(str, ids)) + ending
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "small.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.txt", "small.txt.gz"):
        found = open_accesses(tmp_path / name)
        (table,) = found.tables
        assert (found.name, found.num_samples, table.num_embeddings) == (name, 8, 2**40 + 1)
        assert [batch.tolist() for batch in table.batches(3)] == [ids[:3], ids[3:6], ids[6:]]
        assert table.counts.tolist() == [3, 2, 1, 1, 1]


def test_the_real_trace_is_what_its_readme_says(real_data: Any) -> None:
    found = trace_accesses(real_data("embedding_trace_500k_medium.txt.gz"))
    assert found.num_samples == 429_951 and found.tables[0].num_embeddings <= 500_000

"""The online tracker against dictionaries that count; its sketch and the caches against readable and brute ones."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.compiled import native
from benchmarks.hot_tracker import HotTracker
from hotrow.data.reference import fmix64
from hotrow.hot.hot_set import HotRows
from hotrow.kernels import ops

pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(not ops.isas(), reason="the native module is absent: nothing simulates caches"),
]
SIZES = {"small": 100, "a": 50_000, "b": 30_000}
RECORD = {"small": 64, "a": 64, "b": 96}
LEAST = 100 * 64 + 64 + 96
SLOTS, SCORE = 4, (1 << 24) - 1


def rows_of(rows: HotRows) -> set[int]:
    return set(range(rows.prefix)) | set(rows.listed.tolist())


def skewed(num_rows: int, n: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (num_rows * np.random.default_rng(seed).random(n) ** 6).astype(np.int64)


def sketch_add(slots: NDArray[np.uint64], seed: int, first_key: int, num_rows: int, ids: NDArray[Any]) -> None:
    """What benchmarks/native/sketch.cpp computes, written to be read: sets of counters."""
    keys = (ids[ids != 0].astype(np.int64) + first_key).view(np.uint64)
    hashes = fmix64(keys ^ fmix64(np.array([seed + 1], np.uint64)))
    buckets = ((hashes >> np.uint64(32)) * np.uint64(len(slots) // SLOTS)) >> np.uint64(32)
    for key, bucket in zip(keys.tolist(), buckets.tolist(), strict=True):
        own = slots[bucket * SLOTS : (bucket + 1) * SLOTS].tolist()
        scores = [slot & SCORE for slot in own]
        found = [k for k, slot in enumerate(own) if slot >> 24 == key]
        least = scores.index(min(scores))
        if found:
            own[found[0]] += scores[found[0]] < SCORE
        elif scores[least] > 1:
            own[least] -= 1
        else:
            own = [*own[:least], *own[least + 1 :], key << 24 | 1]
        slots[bucket * SLOTS : (bucket + 1) * SLOTS] = own


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_buckets", [1, 3, 64])
def test_the_sketch_against_its_readable_twin(num_buckets: int, dtype: Any) -> None:
    slots = [np.zeros(4 * num_buckets, np.uint64) for _ in range(2)]
    for seed, first_key in ((0, 1), (7, (1 << 40) - 5000)):
        for k in range(5):
            ids = skewed(4000, 700, k).astype(dtype)
            for add, own in zip((native().sketch_add, sketch_add), slots, strict=True):
                add(own, seed, first_key, 4000, ids)
            assert slots[0].tolist() == slots[1].tolist()
    assert (slots[0] != 0).all()


def test_what_fits_is_counted_exactly() -> None:
    """Few enough rows that no bucket overflows: the set is that of dictionaries, ties to the first keys."""
    tracker = HotTracker(SIZES, RECORD, LEAST + 3000 * 96)
    counts: dict[tuple[str, int], int] = Counter()
    for k in range(6):
        batch = {name: np.unique(skewed(900, 300, 10 * k + t)) for t, name in enumerate(("a", "b"))}
        batch = {name: np.repeat(ids, 1 + ids % 3) for name, ids in batch.items()}
        tracker.observe({**batch, "small": np.arange(50)})
        for name, ids in batch.items():
            counts.update((name, row) for row in ids.tolist() if row)
    hot = tracker.hot_set()
    assert rows_of(hot.rows["small"]) == set(range(100))
    for name in ("a", "b"):
        assert rows_of(hot.rows[name]) == {0} | {row for own, row in counts if own == name}


@settings(max_examples=25, deadline=None)
@given(budget=st.integers(LEAST, 4_000_000), seed=st.integers(0, 3), num_batches=st.integers(0, 4))
def test_never_over_the_budget_nor_over_its_memory(budget: int, seed: int, num_batches: int) -> None:
    tracker = HotTracker(SIZES, RECORD, budget, seed=seed)
    before = tracker.num_bytes
    for k in range(num_batches):
        tracker.observe({"a": skewed(50_000, 5000, k).astype(np.int32), "b": skewed(30_000, 5000, k)})
    hot = tracker.hot_set()
    assert hot.num_bytes <= budget
    assert hot.num_bytes == sum(len(rows_of(hot.rows[name])) * RECORD[name] for name in SIZES)
    assert tracker.num_bytes == before <= 8 * 4 * (budget // 64 + 1)
    assert all(0 in rows_of(rows) for rows in hot.rows.values())
    assert all(max(rows_of(rows)) < SIZES[name] for name, rows in hot.rows.items())

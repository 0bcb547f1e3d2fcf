"""Hot sets against sorting and brute force, samples against looking at every id, the estimate against the truth."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from hotrow.cli import tools
from hotrow.data.packed.format import Ragged
from hotrow.data.packed.reader import PackedDataset
from hotrow.hot.calibrate import CHUNKS, CONFIDENCE, T_QUANTILE, WAYS, calibrate, estimate, most_covered, prefixes_of
from hotrow.hot.hot_set import HotRows, HotSet, TableUse, count_accesses, hot_samples, most_accessed
from hotrow.inspect.hot_rows import compare_ways, record_bytes_of
from hotrow.inspect.report import estimate_sentences
from packed_data import planted

TABLE_ROWS = (60_000, 200, 30_000)
RECORD_BYTES = {"t0": 64, "t1": 64, "t2": 96}
dataset = planted(opened=True, rows={"train": 5000, "val": 64, "test": 64}, table_rows=TABLE_ROWS, rows_per_block=512)


@pytest.fixture(autouse=True)
def counts_are_not_there(recwarn: pytest.WarningsRecorder) -> None:
    """The warning that accesses are counted is not what most tests are about."""


def ids_of_samples(dataset: PackedDataset) -> list[dict[str, set[int]]]:
    found = []
    split = dataset.split("train")
    for index in range(split.num_blocks):
        block = split.block(index)
        for r in range(len(block.label)):
            own: dict[str, set[int]] = {name: set() for name in RECORD_BYTES}
            for feature, ids in zip(dataset.info.features, block.ids, strict=True):
                row = ids.values[slice(*ids.row_splits[r : r + 2])] if isinstance(ids, Ragged) else ids[r : r + 1]
                own[feature.table] |= set(row.tolist())
            found.append(own)
    return found


def rows_of(rows: HotRows) -> set[int]:
    return set(range(rows.prefix)) | set(rows.listed.tolist())


@pytest.mark.parametrize("how", list(WAYS))
def test_hot_samples_against_looking_at_every_id(how: str, dataset: PackedDataset) -> None:
    hot = calibrate(dataset, how, 900_000, record_bytes=RECORD_BYTES).hot
    assert 0 < hot.num_bytes <= 900_000
    assert hot.num_bytes == sum(len(rows_of(hot.rows[t])) * RECORD_BYTES[t] for t in RECORD_BYTES)
    own = {t: rows_of(rows) for t, rows in hot.rows.items()}
    expected = [all(sample[t] <= own[t] for t in own) for sample in ids_of_samples(dataset)]
    found = hot_samples(dataset, hot, threads=2)
    assert found.tolist() == expected
    assert 0 < sum(expected) < len(expected), "neither way is tried else"


@pytest.mark.parametrize("how", list(WAYS))
def test_the_same_seed_gives_the_same_hot_set(how: str, dataset: PackedDataset) -> None:
    first, second = (calibrate(dataset, how, 800_000, record_bytes=RECORD_BYTES, seed=4).hot for _ in range(2))
    assert all(rows_of(first.rows[t]) == rows_of(second.rows[t]) for t in RECORD_BYTES)


def test_exact_takes_the_rows_of_most_accesses_per_byte(dataset: PackedDataset) -> None:
    budget = 700_000
    hot = calibrate(dataset, "exact", budget, record_bytes=RECORD_BYTES).hot
    counts = dict.fromkeys(((t, r) for t, n in zip(RECORD_BYTES, TABLE_ROWS, strict=True) for r in range(n)), 0)
    for index in range(dataset.split("train").num_blocks):
        for feature, ids in zip(dataset.info.features, dataset.split("train").block(index).ids, strict=True):
            for row in (ids.values if isinstance(ids, Ragged) else ids).tolist():
                counts[feature.table, row] += 1
    chosen = {(t, r) for t in RECORD_BYTES for r in rows_of(hot.rows[t])}
    free = {key for key in counts if key[0] != "t1" and key[1] != 0}  # the small table is hot whole, row 0 always
    least = min(counts[key] / RECORD_BYTES[key[0]] for key in chosen & free)
    assert all(counts[key] / RECORD_BYTES[key[0]] <= least for key in free - chosen)
    assert {("t1", r) for r in range(200)} <= chosen
    assert budget - hot.num_bytes < max(RECORD_BYTES.values()), "no room is left for one row more"


def test_a_budget_for_everything_takes_everything(dataset: PackedDataset) -> None:
    total = sum(n * b for n, b in zip(TABLE_ROWS, RECORD_BYTES.values(), strict=True))
    hot = calibrate(dataset, "exact", total, record_bytes=RECORD_BYTES).hot
    assert hot.num_bytes == total
    assert hot_samples(dataset, hot).all()


def test_rows_that_were_never_accessed_stay_cold(dataset: PackedDataset) -> None:
    counts = count_accesses(dataset, 1.0, seed=0)
    hot = calibrate(dataset, "exact", 3_000_000, record_bytes=RECORD_BYTES).hot
    assert all(counts["t0"][list(rows_of(hot.rows["t0"]) - {0})] > 0)


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3),
    record_bytes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    budget=st.integers(0, 60),
)
def test_most_accessed_against_brute_force(counts: list[list[int]], record_bytes: list[int], budget: int) -> None:
    """Where all rows take as many bytes no choice of prefixes has more accesses; never is it over the budget."""
    scale = 1 << 20  # no table is small
    tables = [
        TableUse(f"t{k}", record_bytes[0] * scale, np.array([own[0], *sorted(own[1:], reverse=True)]), None)
        for k, own in enumerate(counts)
    ]
    budget = max(budget, record_bytes[0] * len(tables)) * scale
    found = most_accessed(tables, budget)
    assert sum(n * t.record_bytes for n, t in zip(found, tables, strict=True)) <= budget

    def hits(rows: tuple[int, ...] | list[int]) -> int:
        return sum(int(t.counts[:n].sum()) for t, n in zip(tables, rows, strict=True))

    choices = product(*(range(1, len(t.counts) + 1) for t in tables))
    allowed = [rows for rows in choices if sum(rows) * record_bytes[0] * scale <= budget]
    assert hits(found) == max(map(hits, allowed))


def covered(bins: NDArray[np.int16], cuts: list[int] | tuple[int, ...]) -> int:
    return int((bins <= np.array(cuts)[:, None]).all(axis=0).sum())


def test_covering_is_near_the_best_prefixes() -> None:
    """On 200 small cases against all choices of prefixes: never over the budget, nine tenths of the best at least."""
    found = best = 0
    for seed in range(200):
        g = np.random.default_rng(seed)
        bins = np.minimum(g.geometric(g.uniform(0.15, 0.6, (3, 1)), (3, 60)) - 1, 7).astype(np.int16)
        sizes = [np.cumsum(g.integers(1, 9, 8)) for _ in range(3)]
        budget = int(g.integers(sum(size[0] for size in sizes), sum(size[-1] for size in sizes)))
        cuts = most_covered(bins, sizes, budget)
        assert sum(int(size[cut]) for size, cut in zip(sizes, cuts, strict=True)) <= budget
        choices = (c for c in product(range(8), repeat=3) if sum(int(sizes[t][k]) for t, k in enumerate(c)) <= budget)
        found, best = found + covered(bins, cuts), best + max(covered(bins, c) for c in choices)
    assert found >= 0.9 * best


@settings(max_examples=50)
@given(st.integers(1, 5_000_000))
def test_prefixes_rise_to_all_rows(num_rows: int) -> None:
    found = prefixes_of(num_rows)
    assert found[0] == 1
    assert found[-1] == num_rows
    assert (np.diff(found) > 0).all()


def test_the_quantile_against_scipy() -> None:
    assert pytest.approx(stats.t.ppf((1 + CONFIDENCE) / 2, CHUNKS - 1), abs=1e-6) == T_QUANTILE


def test_the_interval_is_that_of_the_chunks() -> None:
    """By hand from the same chunks: their mean and variance, and scipy's interval."""
    hot = np.random.default_rng(1).random(2_000_000) < 0.1
    chunks = hot[np.random.default_rng([7, 1]).choice(len(hot), 35 * 1024, replace=False)].reshape(35, 1024).sum(1)
    n = len(hot) / 1024
    error = float(np.sqrt((n - 35) / n * chunks.var(ddof=1) / 35))
    expected = stats.t.interval(0.999, 34, loc=chunks.mean(), scale=error)
    assert estimate(hot, 7) == pytest.approx(np.array(expected) * n, rel=1e-6)


def test_what_cannot_be_is_refused(dataset: PackedDataset) -> None:
    with pytest.raises(ValueError, match="raise the budget by 1 bytes"):
        calibrate(dataset, "exact", 200 * 64 + 64 + 96 - 1, record_bytes=RECORD_BYTES)
    with pytest.raises(ValueError, match="choose one of exact, sampled, covering"):
        calibrate(dataset, "guess", 10**6, record_bytes=RECORD_BYTES)
    with pytest.raises(ValueError, match="too small for the coarsest threshold"):
        calibrate(dataset, "sampled", 200 * 64 + 64 + 96, record_bytes=RECORD_BYTES)
    lacking = HotSet(how="exact", rows={"t0": HotRows.first(3)}, record_bytes=RECORD_BYTES)
    with pytest.raises(ValueError, match="the hot set has no table 't1'; it has t0"):
        hot_samples(dataset, lacking)


def test_a_dataset_without_counts_is_counted_with_a_warning(dataset: PackedDataset) -> None:
    with pytest.warns(UserWarning, match="carries no counts: its training split is counted"):
        calibrate(dataset, "exact", 10**6, record_bytes=RECORD_BYTES)


def test_covering_never_covers_less_than_counting(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Histories of 20 steps, where giving way table by table alone ends below the rows of most accesses."""
    from benchmarks.histories import prepare

    data = prepare(real_data("taobao_userbehavior_tail_10k.csv.gz"), tmp_path / "taobao", every=10)
    record_bytes = {table.name: 64 for table in data.info.tables}
    total = 64 * sum(table.num_embeddings for table in data.info.tables)
    for percent in range(10, 100, 5):
        budget, covered = total * percent // 100, {}
        for how in ("exact", "covering"):
            hot = calibrate(data, how, budget, record_bytes=record_bytes, small_table_bytes=10_240).hot
            assert hot.num_bytes <= budget
            covered[how] = int(hot_samples(data, hot).sum())
        assert covered["covering"] >= covered["exact"] > 0, f"{percent} % of the bytes"


def test_the_estimate_told_is_that_of_the_threshold_taken() -> None:
    """Not of the one after it, whose upper bound no longer fitted."""
    sizes = [(1e-2, 1e3, 2e3, 1500), (1e-3, 4e3, 6e3, 5000), (1e-4, 8e3, 2e4, 9000)]
    fields = ("threshold_percent", "low_bytes", "high_bytes", "true_bytes")
    tried = [dict(zip(fields, own, strict=True)) for own in sizes]
    ways = [{"name": "exact"}, {"name": "sampled", "confidence": 0.999, "thresholds": tried}]
    assert estimate_sentences({"budget_bytes": 10_000, "ways": ways}) == [
        "sampled: rows of at least 0.001 % of their table's accesses were estimated at 3.9 KiB to 5.9 KiB, at 99.9 % "
        "confidence; their true size is 4.9 KiB."
    ]


def test_inspect_compares_the_ways(dataset: PackedDataset) -> None:
    ways = compare_ways(dataset, 900_000, embedding_dim=16, optimizer="row_wise_adagrad")["ways"]
    assert [way["name"] for way in ways] == ["exact", "sampled", "covering"]
    record_bytes = record_bytes_of(dataset, embedding_dim=16, optimizer="row_wise_adagrad")
    assert set(record_bytes.values()) == {68}
    for way in ways:
        assert way["hot_bytes"] == 68 * way["hot_rows"] == 68 * sum(way["tables"].values())
        hot = calibrate(dataset, way["name"], 900_000, record_bytes=record_bytes).hot
        assert way["hot_samples"] == hot_samples(dataset, hot).mean()
    with pytest.raises(ValueError, match="optimizer is 'sdg'; choose one of sgd"):
        compare_ways(dataset, 900_000, embedding_dim=16, optimizer="sdg")  # type: ignore[arg-type]


def test_inspect_refuses_a_budget_before_it_reads(
    make_dataset: Callable[..., PackedDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset(tmp_path / "data", counts=True).path
    monkeypatch.setattr(tools, "split_accesses", lambda *a, **k: pytest.fail("read before it was refused"))
    for hot, text in {"lots": "size 'lots' is not understood", "64": "a hot set of 64 bytes is too small"}.items():
        with pytest.raises(ValueError, match=f"hot is '{hot}': {text}"):
            tools.inspect(data, hot=hot)
    with pytest.raises(ValueError, match="optimizer is 'sdg'; choose one of"):
        tools.inspect(data, hot="1MiB", optimizer="sdg")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nowhere"):
        tools.inspect(tmp_path / "nowhere", hot="1MiB")


def test_how_many_of_the_first_rows_serve_hot_batches() -> None:
    rows = {"a": HotRows.of(np.array([0, 1, 2, 5, 9])), "b": HotRows.first(7)}
    hot = HotSet(how="sampled", rows=rows, record_bytes={"a": 4, "b": 4})
    assert hot.prefixes(ranked=True) == {"a": 5, "b": 7} and hot.prefixes(ranked=False) == {"a": 3, "b": 7}
    assert [hot.num_beyond({"a": a, "b": b}) for a, b in ((5, 7), (3, 7), (10, 7), (2, 4))] == [2, 2, 0, 3 + 3]

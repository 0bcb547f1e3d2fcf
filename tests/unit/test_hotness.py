"""The hotness report: formulas against counting, curves against sorting, and the files it makes."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hotrow import draw
from hotrow.cli import tools
from hotrow.data.packed.reader import PackedDataset
from hotrow.inspect.accesses import Accesses, TableAccesses, first_batches
from hotrow.inspect.demand import Demand, spread
from hotrow.inspect.hotness import Hotness, measure_hotness
from hotrow.inspect.report import inspection_page, print_inspection

GENERATOR = np.random.default_rng(5)
IDS = {
    "hot": (40 * GENERATOR.random(6000) ** 4).astype(np.int64),
    "cold": GENERATOR.integers(0, 9000, 12_000),
    "flat": GENERATOR.integers(0, 500, 3000),
}
LOOKUPS = {"hot": 2, "cold": 4, "flat": 1}
SAMPLES, BATCH = 3000, 64


def accesses(tables: dict[str, NDArray[np.int64]] = IDS) -> Accesses:
    """Three tables of 2, 4 and 1 lookups a sample."""

    def table(name: str, ids: NDArray[np.int64]) -> TableAccesses:
        step = LOOKUPS[name]
        return TableAccesses(
            name=name,
            num_embeddings={"hot": 40, "cold": 9000, "flat": 500}[name],
            features=(name,),
            batches=lambda size: (ids[start : start + size * step] for start in range(0, len(ids), size * step)),
            counts=np.sort(np.bincount(ids))[::-1].astype(np.uint64),
        )

    return Accesses("planted", SAMPLES, tuple(table(name, ids) for name, ids in tables.items()))


@pytest.fixture(scope="module")
def hotness() -> Hotness:
    return measure_hotness(accesses(), batch_size=BATCH, embedding_dim=8)


def test_bytes_against_counting_them_one_by_one(hotness: Hotness) -> None:
    for own in hotness.tables:
        ids, step = IDS[own.table.name], BATCH * LOOKUPS[own.table.name]
        gross = net = training = 0
        num_full = SAMPLES // BATCH
        for b in range(num_full):
            batch = ids[b * step : (b + 1) * step].tolist()
            for _ in batch:
                gross += 32
            for _ in set(batch):
                net += 32
                training += 32 + 32 + 32  # read by the lookup; read and written by the update
                training += 4 + 4  # its state, read and written
        demand = own.demand
        found = (demand.gross_bytes, demand.net_bytes, demand.training_bytes)
        assert found == pytest.approx((gross / num_full, net / num_full, training / num_full))
        assert demand.density == pytest.approx(training / num_full / (32 * own.table.num_embeddings))
        assert demand.unique_ratio == pytest.approx(net / gross)


def demands(*pairs: tuple[int, float]) -> list[Demand]:
    """Tables of so many rows, of which so many are demanded."""
    return [
        Demand(table=f"t{k}", num_embeddings=n, row_bytes=4, state_bytes=0, lookups=rows, rows=rows)
        for k, (n, rows) in enumerate(pairs)
    ]


def test_spread_of_demand() -> None:
    even = spread(demands((100, 10), (1000, 100), (10, 1)))
    assert (even["gini"], even["max_over_median"]) == (pytest.approx(0), pytest.approx(1))
    assert even["bytes_of_half_the_demand"] == pytest.approx(0.5)
    uneven = spread(demands((900, 0), (90, 0), (10, 10)))  # all demand on one byte in a hundred
    assert uneven["gini"] == pytest.approx(0.99)
    assert uneven["bytes_of_half_the_demand"] == pytest.approx(0.005)
    assert uneven["top_tables"][0] == {"tables": 1, "bytes": pytest.approx(0.01), "demand": 1.0}
    assert spread(demands((100, 10)))["gini"] is None


def test_gini_against_pairs_of_bytes() -> None:
    """Mean absolute difference of the demand of two random bytes, over twice the mean: Gini's definition."""
    tables = demands((3, 2), (50, 20), (200, 4), (11, 11))
    per_byte = np.concatenate([np.full(demand.table_bytes, demand.density) for demand in tables])
    pairs = np.abs(per_byte[:, None] - per_byte[None, :]).mean()
    assert spread(tables)["gini"] == pytest.approx(pairs / (2 * per_byte.mean()))


def test_coverage_against_sorting(hotness: Hotness) -> None:
    report = hotness.to_json()
    hot_all = 0
    for row in report["tables"]:
        counts = sorted(Counter(IDS[row["table"]].tolist()).values(), reverse=True)
        for share, name in ((0.001, "top_0.1%"), (0.01, "top_1%"), (0.1, "top_10%")):
            best = sum(counts[: max(1, round(share * row["num_embeddings"]))])
            assert row[name] == pytest.approx(best / len(IDS[row["table"]]))
        hot_all += best
        assert row["hottest"] == counts[0] / sum(counts)
        assert row["coverage"][-1] == [1.0, pytest.approx(1.0)]
    assert report["coverage"]["top_10%"] == pytest.approx(hot_all / sum(map(len, IDS.values())))


def test_row_zero_counts_but_is_not_hot() -> None:
    table = TableAccesses("t", 4, ("t",), lambda n: iter([np.array([0, 0, 0, 1])]), np.array([1, 0, 0], np.uint64), 3)
    (row,) = measure_hotness(Accesses("x", 4, (table,)), batch_size=4).to_json()["tables"]
    assert (row["accesses"], row["rare"], row["hottest"], row["top_10%"]) == (4, 0.75, 0.25, 0.25)


def test_the_first_batches_alone() -> None:
    report = measure_hotness(first_batches(accesses(), 3, batch_size=BATCH), batch_size=BATCH).to_json()
    assert (report["batches"], report["samples"], report["accesses"]) == (3, 3 * BATCH, 21_000)
    for row in report["tables"]:
        batches = np.split(IDS[row["table"]][: 3 * BATCH * LOOKUPS[row["table"]]], 3)
        assert row["demand"]["rows"] == pytest.approx(sum(len(np.unique(ids)) for ids in batches) / 3)
    with pytest.raises(ValueError, match="batches is 0; read at least 1"):
        first_batches(accesses(), 0, batch_size=BATCH)


def test_tables_nobody_looks_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Lists may be empty throughout; every figure, page and sentence holds without them."""
    nothing = np.empty(0, np.int64)
    empty = [
        TableAccesses(name, 10, (name,), lambda n: iter([nothing] * -(-SAMPLES // n)), np.zeros(9, np.uint32))
        for name in ("a", "b", "c", "d")
    ]
    for tables in ([*empty, *accesses().tables], empty):
        found = Accesses("x", SAMPLES, tuple(tables))
        report = {**measure_hotness(found, batch_size=BATCH).to_json(), "split": "train", "path": "x"}
        assert "nan" not in json.dumps(report, allow_nan=False) and "nan" not in inspection_page(report)
        print_inspection(report)
    assert "x: 3,000 samples" in capsys.readouterr().out


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        measure_hotness(accesses(), batch_size=0)


@pytest.fixture
def report(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> dict[str, Any]:
    """Of a dataset whose path is hostile to HTML."""
    dataset = make_dataset(tmp_path / "<b>&data")
    with pytest.warns(UserWarning, match="carries no counts"):
        return tools.inspect(dataset.path, batch_size=100, out=tmp_path / "out")


def test_the_files(report: dict[str, Any]) -> None:
    paths = [Path(file) for file in report["files"]]
    assert [path.name for path in paths] == ["hotness.json", "hotness.html"]
    kept = json.loads(paths[0].read_text())
    assert kept == {name: value for name, value in report.items() if name != "files"}
    page = paths[1].read_text()
    assert "<b>" not in page
    assert not re.search(r'(src|href)="', page), "the page needs nothing beside it"


def test_a_line_goes_where_its_points_are() -> None:

    drawn = draw.line_chart({"a": [(1, 1.0), (10, 0.5), (100, 0.0)]}, x_label="x", y_label="y", label="l")
    (points,) = re.findall(r'<polyline points="([^"]+)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points.split())
    assert (x0, x2) == (draw.LEFT, draw.WIDTH - draw.RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y0 == draw.TOP

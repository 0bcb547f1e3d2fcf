"""The cluster model: bytes against those that ranks sent, work and machines against counting by hand."""

import json
import math
import sys
from dataclasses import replace

import pytest

from benchmarks import cluster_model as paper
from benchmarks.cluster_model import DRAM_SHARE, MACHINES, MODELS, NODE_BATCH, OF_NODES, Model, Tier
from benchmarks.study.rows import SyntheticRows

pytestmark = pytest.mark.package

TINY = Model((100, 10), 4, 1, 0.0, 3, (5,), (6,))
SERVER = MACHINES["cpu-server"]


def test_products_and_weights_by_hand() -> None:
    """Two tables and the bottom MLP's output make three vectors of 4: three pairs."""
    bottom, top = 3 * 5 + 5 * 4, (4 + 3) * 6 + 6 * 1
    assert TINY.products == bottom + top + 3 * 4
    assert TINY.num_weights == bottom + top + (5 + 4 + 6 + 1)
    assert TINY.table_bytes == 110 * 4 * 4


def test_different_rows_against_the_law_row_by_row() -> None:
    for zipf in (0.0, 1.0, 1.3):
        shares = [k**-zipf for k in range(1, 1001)]
        wanted = sum(1 - math.exp(-300 * share / sum(shares)) for share in shares)
        assert paper.distinct_rows(1000, zipf, 300.0) == pytest.approx(wanted, rel=0.04)
        rates, rows = paper.rates_of(1000, zipf, 300.0)
        assert rows.sum() == 1000 and rates @ rows == pytest.approx(300)


def test_bytes_of_a_tiny_step_by_hand() -> None:
    """One rank of two, four samples each: all rows of a table of 10 fit a batch, few of one of a million do."""
    few = Model((1_000_000,), 2, 1, 0.0, 1, (), ())
    dense = 4 * few.num_weights
    rows = 4 * 2 * (2 + 2 * 4)  # the other rank holds half of 4 rows, and asks for half of its own 4
    assert paper.bytes_of_rank(few, 8, 2) == pytest.approx(rows / 2 + dense, rel=0.01)
    many = Model((1_000_000,), 2, 1000, 0.0, 1, (), ())
    bags = (4 * 8000 + 2 * 4 * 2 * 8) / 2 / 2  # of 8 bags, half have another owner; a rank sends half of that
    assert paper.bytes_of_rank(many, 8, 2) == pytest.approx(bags + dense, rel=0.01)
    assert paper.bytes_of_rank(few, 8, 1) == 0.0
    assert paper.bytes_of_rank(few, 16, 4) > paper.bytes_of_rank(replace(few, sizes=(2,)), 16, 4)


def test_bytes_are_those_that_ranks_sent() -> None:
    """Every cell of the study `scaling`, whose ranks counted what they sent."""
    shapes = {  # as benchmarks/study/scaling.yaml has them: rows, model, batch
        "clicks": (SyntheticRows(tables=26, rows=50_000, spread=20.0), 16, 1, (512, 256, 64), (512, 256), 2048),
        "bags": (SyntheticRows(tables=8, rows=200_000), 64, 20, (128,), (128,), 1024),
        "wide": (SyntheticRows(tables=8, rows=20_000), 32, 1, (512, 512), (1024, 512), 2048),
    }
    compared = 0
    for row in json.loads((paper.MEASUREMENTS / paper.SCALING).read_text())["cells"]:
        if row["axes"]["ranks"] == "1":
            continue
        rows, dim, lookups, bottom, top, batch_size = shapes[row["axes"]["shape"]]
        model = Model(tuple(rows.table_rows), dim, lookups, 1.05, 13, bottom, top)
        found = paper.bytes_of_rank(model, batch_size, int(row["axes"]["ranks"]), jagged=lookups > 1)
        assert found == pytest.approx(row["wire_bytes"], rel=0.02), row["key"]
        compared += 1
    assert compared == 18


def test_a_step_by_hand() -> None:
    """Two ranks on two machines, and then on one, whose link carries nothing."""
    here, machine = paper.measured(), MACHINES["sc20-cluster"]
    sent = paper.bytes_of_rank(TINY, 64, 2)
    parts = paper.step_parts(TINY, 64, machine, num_ranks=2, each=1)
    assert parts["link"] == pytest.approx(sent / 12.38e9)
    assert parts["messages"] == pytest.approx(5 * 30e-6)
    assert parts["sharing"] == pytest.approx(here.sharing_s + 2 * here.table_s + sent * 0.04e-9)
    flops = 6 * 32 * TINY.products
    touched = (2 * 32 + sum(2 * n * (1 - math.exp(-64 / n)) / 2 for n in (100, 10))) * 16 / 512
    wanted = flops / 6.45e12 / here.dense_share + touched * 4.5e-9 / here.rows_share + here.step_s
    assert parts["own work"] == pytest.approx(wanted, rel=1e-3)
    assert paper.step_parts(TINY, 64, machine, num_ranks=2, each=2)["link"] == 0.0
    assert set(paper.step_parts(TINY, 64, machine, num_ranks=1, each=1)) == {"own work"}


def test_efficiency_is_beside_the_fewest_sockets_that_hold_the_tables() -> None:
    model, machine = MODELS["large"], MACHINES["sc20-cluster"]
    least = math.ceil(64 * 6e6 * 256 * 4 / (0.6 * 192 * 2**30 / 2))
    found = paper.scaling(model, machine, least, weak=False)
    assert least == 7 and found["least_ranks"] == 7 and found["efficiency"] == pytest.approx(1.0)
    assert "efficiency" not in paper.scaling(model, machine, 6, weak=False)
    more = paper.scaling(model, machine, 14, weak=False)
    assert more["efficiency"] == pytest.approx(more["samples_per_s"] / found["samples_per_s"] / 2)
    assert sum(more["parts_ms"].values()) == pytest.approx(1e3 * 16_384 / more["samples_per_s"])


def test_machines_with_slower_memory() -> None:
    model = OF_NODES["large, Zipf 1.05, 8x rows"]
    found = paper.nodes(model, SERVER)
    assert found["in_dram"] == math.ceil(64 * 48e6 * 1024 / (DRAM_SHARE * 384 * 2**30)) == 13
    assert 1 <= found["with_tiers"] < 13 and found["fewer"] == 13 / found["with_tiers"]
    slow = Tier(name="tape", capacity_bytes=1e14, reads_per_s=1, writes_per_s=1, bytes_per_s=1e9, unit_bytes=512)
    assert paper.nodes(model, replace(SERVER, tiers=(slow,)))["with_tiers"] == 13, "one read a second saves none"
    assert paper.nodes(model, replace(SERVER, tiers=()))["with_tiers"] == 13
    instant = replace(slow, reads_per_s=1e15, writes_per_s=1e15, bytes_per_s=1e18)
    assert paper.nodes(model, replace(SERVER, tiers=(instant,)))["with_tiers"] == 1


def test_reads_of_a_slow_tier_by_hand() -> None:
    """DRAM keeps half of a table whose rows are all alike: half of a batch's different rows are read and written."""
    model = Model((1_000_000,), 128, 1, 0.0, 1, (), ())
    tier = Tier(name="t", capacity_bytes=1e12, reads_per_s=100.0, writes_per_s=50.0, bytes_per_s=1e12, unit_bytes=512)
    machine = replace(SERVER, dram_bytes=model.table_bytes / 2 / DRAM_SHARE, tiers=(tier,))
    distinct = 1e6 * (1 - math.exp(-NODE_BATCH / 1e6))
    wanted = distinct / 2 / 100 + distinct / 2 * 512 / 4096 / 50
    assert paper.tiered_step_s(model, machine, 1) == pytest.approx(wanted, rel=0.01)


def test_everything_that_is_said_is_called_modelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(told().startswith("modelled, not measured") for told in paper.TOLD.values())
    monkeypatch.setattr(sys, "argv", ["cluster_model"])
    paper.main()
    blocks = capsys.readouterr().out.split("\n\n")
    assert len(blocks) > 4 and all("modelled" in block.splitlines()[0] for block in blocks)
    monkeypatch.setattr(sys, "argv", ["cluster_model", "--json"])
    paper.main()
    assert json.loads(capsys.readouterr().out)["modelled"] is True

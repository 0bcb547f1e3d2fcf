"""What a run reports of its tiers, against counts made by hand: a dictionary for the cache, arithmetic for the disk."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrow.config.load import make_config
from hotrow.data.packed.format import DatasetInfo, Feature, Table
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.packed.writer import PackedWriter
from hotrow.kernels import ops
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from store_rig import UsesClock

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")

BATCH, STEPS, EPOCHS = 32, 16, 2
ROWS = {"far": 40_000, "near": 3_000, "small": 20}
DIM, SECTOR = 64, 512
RECORD = DIM * 4 * 2  # weights and Adagrad's sums: a sector
FAR_ROWS = [136 * n for n in range(4 * BATCH)]
"""In no page, nor in the next one, lies another of them: each is an I/O of its own."""


@pytest.fixture(scope="module")
def ids() -> dict[str, np.ndarray[Any, Any]]:
    """Of the training split: `far` goes through 128 rows in turn, `near` draws some rows more often than others."""
    generator = np.random.default_rng(5)
    num = BATCH * STEPS
    return {
        "far": np.array([FAR_ROWS[n % len(FAR_ROWS)] for n in range(num)]),
        "near": (ROWS["near"] * generator.random(num) ** 4).astype(np.int64),
        "small": generator.integers(0, ROWS["small"], num),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, ids: dict[str, np.ndarray[Any, Any]]) -> PackedDataset:
    info = DatasetInfo(
        name="counted",
        dense=(),
        features=tuple(Feature(name=name, table=name) for name in ROWS),
        tables=tuple(Table(name=name, num_embeddings=n) for name, n in ROWS.items()),
    )
    generator = np.random.default_rng(6)
    with PackedWriter(tmp_path_factory.mktemp("counted") / "data", info) as writer:
        num = BATCH * STEPS
        label = generator.integers(0, 2, num).astype(np.float32)
        writer.append("train", label, np.zeros((num, 0), np.float32), dict(ids))
        return writer.close()


def train(dataset: PackedDataset, run: Path, **memory: Any) -> RunFolder:
    raw = {
        "data": str(dataset.path),
        "run": str(run),
        "model": {"embedding_dim": DIM, "bottom_mlp": [8], "top_mlp": [8]},
        "optimizer": {"sparse": {"name": "adagrad", "lr": 0.1}},
        "train": {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "threads": 1, "log_every": 4},
        "memory": {"dram": 180_000, "lookahead": 0, **memory},
    }
    return runs.train(make_config(raw), quiet=True)


def by_hand(ids: np.ndarray[Any, Any], cached: int) -> Counter[str]:
    """What a cache of `cached` rows does, by the clock in lists."""
    counts: Counter[str] = Counter()
    clock = UsesClock(cached)
    exists: set[int] = set()
    for step in range(STEPS * EPOCHS):
        at = step % STEPS * BATCH
        batch = ids[at : at + BATCH].tolist()
        rows = list(dict.fromkeys(batch))
        missing = [row for row in rows if row not in clock.rows]
        counts += Counter(
            lookups=len(batch),
            lookup_misses=sum(row in missing for row in batch),
            unique_rows=len(rows),
            unique_row_misses=len(missing),
            created_rows=sum(row not in exists for row in missing),
            read_rows=sum(row in exists for row in missing),
        )
        _, left = clock.admit(rows)
        clock.release(rows)
        exists.update(row for row in left if row is not None)
        counts += Counter(evicted_rows=len(left), written_rows=len(left))
    return counts


def test_hits_misses_and_rows_against_a_dictionary(
    dataset: PackedDataset, ids: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    memory = train(dataset, tmp_path / "run", file=str(tmp_path / "rows")).record.memory
    totals: Counter[str] = Counter()
    for name in ("far", "near"):
        table = memory["tables"][name]
        expected = by_hand(ids[name], table["cached"])
        assert table["pinned"] == 0 and 2 * BATCH < table["cached"] < 4 * BATCH and table["store"] == "mapped"
        assert {key: table[key] for key in expected} == dict(expected)
        of = (("lookup_misses", "lookups"), ("unique_row_misses", "unique_rows"))
        misses = [expected[name] / expected[total] for name, total in of]
        assert (table["hits_per_lookup"], table["hits_per_row"]) == pytest.approx(
            [1 - miss for miss in misses], abs=1e-6
        )
        assert table["unique_ratio"] == pytest.approx(expected["unique_rows"] / expected["lookups"], abs=1e-6)
        # Of a mapped file as much is asked as rows take, whatever the system writes for it: no I/O is counted.
        assert table["read_bytes"] == RECORD * expected["read_rows"]
        assert table["written_bytes"] == RECORD * expected["written_rows"] == EPOCHS * table["written_bytes_per_epoch"]
        assert (table["write_amplification"], table["bytes_per_read"], table["cpu_us_per_io"]) == (None, None, None)
        totals += expected
    assert by_hand(ids["far"], 114)["created_rows"] == len(FAR_ROWS) and totals["evicted_rows"] > 500
    small = memory["tables"]["small"]
    assert (small["lookups"], small["lookup_misses"], small["hits_per_lookup"]) == (BATCH * STEPS * EPOCHS, 0, 1.0)
    assert (small["hits_per_row"], small["unique_ratio"], small["write_amplification"]) == (None, None, None)
    totals["lookups"] += small["lookups"]
    assert {key: memory[key] for key in totals} == dict(totals)
    assert {key: memory["tiers"]["dram"].get(key, totals[key]) for key in totals} == dict(totals)
    assert memory["tiers"]["file"]["tables"] == 2 and memory["tiers"]["file"]["read_rows"] == totals["read_rows"]
    assert set(memory["tiers"]) == {"dram", "file"}


def test_ios_against_arithmetic(dataset: PackedDataset, ids: dict[str, np.ndarray[Any, Any]], tmp_path: Path) -> None:
    run = train(dataset, tmp_path / "run", ssd=str(tmp_path / "rows"), force=True)
    memory = run.record.memory
    far, disk = memory["tables"]["far"], memory["tiers"]["ssd"]
    expected = by_hand(ids["far"], far["cached"])
    assert far["read_rows"] == expected["read_rows"] > 500
    assert far["reads"] - far["read_modify_writes"] == far["read_rows"] - far["served_from_queue"]
    assert far["bytes_per_read"] in (SECTOR, 1024, 2048, 4096) and far["bytes_per_write"] == far["bytes_per_read"]
    assert far["read_bytes"] == far["reads"] * far["bytes_per_read"]
    for figures in (far, memory["tables"]["near"], disk, memory):
        assert figures["write_amplification"] == pytest.approx(
            figures["written_bytes"] / (figures["written_rows"] * RECORD), abs=1e-4
        )
        ios = figures["reads"] + figures["writes"]
        assert figures["io_cpu_s"] == pytest.approx(figures["cpu_us_per_io"] * ios / 1e6, abs=2e-3)
        assert 0 < figures["cpu_us_per_io"] < 1000
    assert disk["reads"] == sum(memory["tables"][name]["reads"] for name in ROWS)
    # The others are given to the engine, and not yet on their way, when the last step is over.
    assert far["written_rows"] == expected["written_rows"] and far["writes"] <= far["written_rows"]
    assert far["writes"] + memory["aside"]["writes"] > 0.8 * far["written_rows"]


def test_seconds_and_bytes_of_the_whole_run(dataset: PackedDataset, tmp_path: Path) -> None:
    run = train(dataset, tmp_path / "run", file=str(tmp_path / "rows"))
    memory, seconds = run.record.memory, run.record.train_s
    rounding = 0.0005 / seconds  # of train_s, which is told to the millisecond
    assert memory["stall_share"] == pytest.approx(memory["stall_s"] / seconds, abs=rounding + 0.001)
    for name, table in memory["tables"].items():
        demanded = table["demanded_bytes_per_s"] * seconds
        assert demanded == pytest.approx(BATCH * STEPS * EPOCHS * DIM * 4, rel=rounding + 0.001), name
    checkpoints = sum(file.stat().st_size for file in (run.path / "checkpoints").rglob("*") if file.is_file())
    assert memory["drive_written_bytes"] == memory["written_bytes"] + checkpoints
    lines = [line for line in run.measurements() if line["kind"] == "train"]
    assert len(lines) == STEPS * EPOCHS / 4
    assert lines[-1]["drive_written_bytes"] == memory["written_bytes"], "the last checkpoint came after"
    assert lines[0]["hits_per_lookup"] < lines[-1]["hits_per_lookup"], "of its own steps: at first nothing is there"
    assert json.loads((run.path / "run.json").read_text())["memory"] == memory

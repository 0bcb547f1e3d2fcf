"""What is predicted of several ranks, beside what real ranks did: bytes by purpose, and steps of the probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_cost import NETWORK, machine, some_units

import hotrow
from hotrow.config.load import make_config
from hotrow.costs.cost import BLIND_ERROR, predict
from hotrow.costs.demand import tables_of
from hotrow.costs.hardware import Figure, Hardware
from hotrow.costs.work import work_of
from hotrow.data.packed.reader import PackedDataset
from hotrow.forecast.changes import ONE_PROCESS
from hotrow.lab import mpi_start, rank_probe
from hotrow.parallel.agreement import everyone
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.gloo import communicator
from hotrow.run import runs
from hotrow.setup import setup
from rank_pool import RankPool

MODEL = {"embedding_dim": 16, "bottom_mlp": [32], "top_mlp": [64, 8]}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def dataset(make_dataset: Callable[..., PackedDataset], tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("ranks") / "data"
    rows = {"train": 6000, "val": 64}
    return make_dataset(folder, rows=rows, table_rows=(50, 400, 200_000), rows_per_block=1000, counts=True)


def trained(comm: Communicator, raw: dict[str, Any], hardware: Hardware) -> str:
    setup.known_hardware = lambda: hardware
    return str(runs.train(make_config(raw), quiet=True, comm=comm).path)


@pytest.mark.parametrize(
    ("num_ranks", "micro_batches", "pooled", "wire_dtype"),
    [(2, 2, (), "fp32"), (3, 5, (), "fp32"), (3, 5, ("t1",), "bf16"), (3, 3, ("t1", "t2"), "fp32")],
)
def test_bytes_are_those_that_ranks_send(
    pool: RankPool,
    dataset: PackedDataset,
    tmp_path: Path,
    num_ranks: int,
    micro_batches: int,
    pooled: tuple[str, ...],
    wire_dtype: str,
) -> None:
    """One epoch of a real run: every purpose within 2 %, the total too; ids, of which there are few, within 5 %. If
    vectors of all tables but the replicated one travel, no rows do."""
    train = {"batch_size": 300, "threads": 1, "micro_batches": micro_batches, "eval_every": None}
    raw = {"data": str(dataset.path), "run": str(tmp_path / "run"), "model": MODEL, "train": train}
    sharding = {"t0": "replicated"} | {name: "table" if name in pooled else "row" for name in ("t1", "t2")}
    raw["parallel"] = {"sharding": sharding, "exchange": dict.fromkeys(pooled, "pooled") if pooled else "rows"}
    raw["parallel"] |= {"wire_dtype": wire_dtype}
    config = make_config(raw)
    hardware = machine(work_of(config, tables_of(config, dataset), dataset), some_units)
    hardware = replace(hardware, network=NETWORK)
    pool.run(trained, raw, hardware, num_ranks=num_ranks, micro_batches=num_ranks)
    run = hotrow.load(tmp_path / "run")
    assert run.record.predicted is not None and run.record.ranks is not None
    sent: Any = run.record.ranks["wire_bytes_per_step"]
    predicted = run.record.predicted["wire_bytes_per_step"]
    purposes = {"ids", "rows", "gradients", "replicated", "dense", "counts"}
    purposes |= {"pooled", "pooled_gradients"} if pooled else set()
    purposes -= {"rows"} if len(pooled) == 2 else set()
    assert set(predicted) == purposes == set(sent) - {"agreement"}
    for purpose, num_bytes in predicted.items():
        assert num_bytes == pytest.approx(sent[purpose], rel=0.05 if purpose in ("ids", "counts") else 0.02), purpose
    assert sum(predicted.values()) == pytest.approx(sum(sent.values()), rel=0.02)
    assert run.record.predicted["exchange_ms"] > 0
    assert "a step and rank (" in run.closing_lines("rows", []), "predicted beside measured"


def trained_on_one_machine(comm: Communicator, raw: dict[str, Any], hardware: Hardware) -> str:
    return trained(replace(comm, ranks=replace(comm.ranks, local_rank=comm.rank, local_size=comm.size)), raw, hardware)


@pytest.mark.parametrize(("s_per_message", "is_slower"), [(0.05, True), (1e-9, False)])
def test_ranks_of_one_machine_say_if_one_process_is_faster(
    pool: RankPool, dataset: PackedDataset, tmp_path: Path, s_per_message: float, is_slower: bool
) -> None:
    """The forecast knew 12,100 samples/s of two ranks and 152,000 of one process, and nobody said so."""
    train = {"batch_size": 300, "threads": 1, "max_steps": 1, "eval_every": None}
    raw = {"data": str(dataset.path), "run": str(tmp_path / "run"), "model": MODEL, "train": train}
    config = make_config(raw)
    work = work_of(config, tables_of(config, dataset), dataset)
    network = replace(NETWORK, s_per_message=Figure(s_per_message), cpu_s_per_message=Figure(1e-9))
    hardware = replace(machine(work, some_units, threads=(1,) if is_slower is False else (1, 4)), network=network)
    pool.run(trained_on_one_machine, raw, hardware, num_ranks=2, micro_batches=2)
    predicted = hotrow.load(tmp_path / "run").record.predicted
    assert predicted is not None
    (one,) = (change for change in predicted["changes"] if change["what"].startswith(ONE_PROCESS))
    most = 4 if is_slower else 1
    alone_s = predict(replace(work, threads=most), hardware).step_s
    assert one["samples_per_s"] == pytest.approx(300 / alone_s, rel=1e-3)
    assert one["gain"] == pytest.approx(one["samples_per_s"] / predicted["samples_per_s"] - 1, rel=1e-3, abs=1e-3)
    first = (tmp_path / "run" / "log.txt").read_text().splitlines()[0]
    assert (ONE_PROCESS in first) == is_slower == (one["gain"] > BLIND_ERROR)


def probed(comm: Communicator) -> dict[str, Any]:
    rank_probe.MIN_SHAPES, rank_probe.ROUNDS, rank_probe.TIMED = 1, 3, 2
    group = dist.new_group([0, 1])
    two = communicator(group) if comm.rank < 2 else None
    network = None if two is None else rank_probe._network(two, [])
    crowding, points = rank_probe._steps(comm, two, time.monotonic())
    everyone(comm, None)
    return {"network": network, "crowding": crowding, "points": points}


def test_three_processes_are_probed(pool: RankPool) -> None:
    """Steps of one, two and three ranks: two alone could not tell what each further rank adds."""
    found = pool.run(probed, num_ranks=3, micro_batches=3)[0]
    network = found["network"]
    assert 1e6 < network.bytes_per_s.value < 1e12 and 1e-6 < network.s_per_message.value < 0.1
    assert 1e-12 < network.cpu_s_per_message.value < 0.1
    assert 0 < network.cpu_s_per_byte.value < 1e-6 and found["crowding"].value >= 1
    assert set(found["points"]) == {"shared lookup", "shared update"}
    for phase, own in found["points"].items():
        assert len(own) == len(rank_probe.PARTS) * 4, phase
        assert all(point.seconds.value > 0 and point.sizes["shared steps"] == 1 for point in own)
        assert {point.sizes.get("messages", 0) for point in own} == {0, 1, 2}


@pytest.mark.slow
def test_the_probe_starts_its_processes() -> None:
    found = rank_probe.measure_ranks(seconds=0.1, progress=lambda _: None)
    assert set(found) >= {"network", "crowding", "kernels"} and not found["notes"].get("network"), found
    assert ("mpi" in found) == (mpi_start.mpiexec() is not None) != ("mpi" in found["notes"])
    assert all(len(points) >= 8 for points in found["kernels"].values())


def test_processes_that_fail_leave_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_probe.sys, "executable", "/bin/false")
    found = rank_probe.measure_ranks(seconds=0.1, progress=lambda _: None)
    for name in ("network", "mpi"):
        assert "two processes cannot train together here" in found["notes"][name]
    assert "one of them ended without a word" in found["notes"]["network"]

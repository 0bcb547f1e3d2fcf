"""hotrow.costs.declared: steps on a machine that is not here, against the machine that they were measured on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrow.config.load import make_config
from hotrow.costs import declared as module
from hotrow.costs.cost import PHASES, CostModel, amounts_of
from hotrow.costs.declared import RATES, faster, modelled, rate_of, read_machine
from hotrow.costs.demand import tables_of
from hotrow.costs.hardware import COST_VERSION, MACHINES, Figure, Hardware, Point
from hotrow.costs.traffic import traffic_of
from hotrow.costs.wire import sharing_amounts
from hotrow.costs.work import work_of
from hotrow.data.packed.reader import PackedDataset
from hotrow.lab.step_probe import OPTIMIZERS
from hotrow.parallel.shards import Shard
from hotrow.placement.budget import TableSlots

KINDS = ("steps", "calls", "multiply-adds", "lines from beyond 2 MiB", "pooled values beyond 2 MiB", "ids")
HERE = Hardware(
    name="here",
    cost_version=COST_VERSION,
    date="2026-01-31",
    host={},
    versions={},
    num_cores=2,
    dram_bytes=Figure(2.0**34),
    stream_bytes_per_s={"1": Figure(1e10), "2": Figure(1.5e10)},
    flops_per_s={"1": Figure(1e11), "2": Figure(2e11)},
    random_rows=[Point({"row_bytes": 512.0, "threads": n}, Figure(1e-7 / n)) for n in (1.0, 2.0)],
    kernels={
        phase: [
            Point({"threads": n, kind: 1.0}, Figure((k + 1) * 1e-6 / n))
            for k, kind in enumerate(KINDS)
            for n in (1.0, 2.0)
        ]
        for phase in (*PHASES, "window")
    },
)


@pytest.fixture
def units() -> Callable[[Hardware, int], dict[str, float]]:
    return lambda machine, threads: CostModel(machine).units("dense", threads)


def test_against_the_machine_itself(units: Callable[[Hardware, int], dict[str, float]]) -> None:
    same = modelled(replace(HERE, kernels={}), HERE)
    for threads in (1, 2):
        assert units(same, threads) == pytest.approx(units(HERE, threads), rel=1e-6)
    assert same.notes["kernels"].startswith("modelled from steps measured on here on 2026-01-31")
    figures = [point.seconds for points in same.kernels.values() for point in points]
    assert {figure.source for figure in figures} == {"assumed"}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"flops_per_s": {"1": Figure(4e11), "2": Figure(8e11)}}, "multiply-adds"),
        (
            {"random_rows": [Point({"row_bytes": 512.0, "threads": n}, Figure(2.5e-8 / n)) for n in (1.0, 2.0)]},
            "lines from beyond 2 MiB",
        ),
        ({"stream_bytes_per_s": {"1": Figure(4e10), "2": Figure(6e10)}}, "pooled values beyond 2 MiB"),
    ],
)
def test_a_rate_speeds_up_its_own_kind(
    units: Callable[[Hardware, int], dict[str, float]], changed: dict[str, object], kind: str
) -> None:
    made = modelled(replace(HERE, kernels={}, **changed), HERE)  # type: ignore[arg-type]
    before, after = units(HERE, 2), units(made, 2)
    for each in KINDS:
        assert after[each] == pytest.approx(before[each] / (4 if each == kind else 1), rel=1e-6)


def test_threads_speed_up_what_they_share_and_no_call(units: Callable[[Hardware, int], dict[str, float]]) -> None:
    many = replace(
        HERE,
        num_cores=8,
        kernels={},
        flops_per_s={"1": Figure(1e11), "8": Figure(2e11)},
        stream_bytes_per_s={"1": Figure(1e10), "8": Figure(1.5e10)},
    )
    made, before = units(modelled(many, HERE), 8), units(HERE, 2)
    assert made["ids"] == pytest.approx(before["ids"] / 4)
    for kind in ("steps", "calls", "multiply-adds", "pooled values beyond 2 MiB"):
        assert made[kind] == pytest.approx(before[kind])


def test_what_costs_nothing_here_costs_nothing_there() -> None:
    free = {phase: [*points, Point({"threads": 2.0, "ids": 1.0, "bags": 1.0}, Figure(3e-6))] for phase, points in
            HERE.kernels.items()}  # fmt: skip
    units = CostModel(modelled(replace(HERE, kernels={}), replace(HERE, kernels=free))).units("dense", 2)
    assert units["bags"] < 1e-20


def test_a_rate_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"here has no flops_per_s for 2 threads, .*: declare it"):
        modelled(replace(HERE, kernels={}, flops_per_s={"1": Figure(1e11)}), HERE)


def test_rows_scale_as_streams_if_no_row_was_measured_on_both() -> None:
    other = replace(HERE, random_rows=[], stream_bytes_per_s={"1": Figure(3e10)})
    assert faster(other, 1, HERE, 1)["random_rows"] == pytest.approx(3)


def test_every_kind_of_amount_has_a_rate(make_dataset: Callable[..., PackedDataset], tmp_path: Path) -> None:
    data = make_dataset(tmp_path, rows={"train": 400}, table_rows=(50, 4000), counts=True)
    found: set[str] = set()
    for k, (precision, dense) in enumerate(
        itertools.product(("fp32", "fp16", "split_bf16"), ("sgd", "adagrad", "adam"))
    ):
        for sparse in OPTIMIZERS:
            model = {"name": ("dlrm", "dcn")[k % 2], "embedding_dim": (16, 24)[k % 2]}
            optimizer = {"sparse": {"name": sparse}, "dense": {"name": dense}}
            train = {"batch_size": 100, "precision": precision, "threads": 1}
            config = make_config({"data": str(data.path), "model": model, "optimizer": optimizer, "train": train})
            work = work_of(config, tables_of(config, data), data)
            lists = replace(work, tables=tuple(replace(own, jagged=True) for own in work.tables))
            amounts = amounts_of(lists, traffic_of(work, [TableSlots(50, 0), TableSlots(10, 200)]))
            shards = {own.table.name: Shard() for own in work.tables}
            shared = sharing_amounts(work, shards, num_ranks=2)
            amounts |= {f"shared {name}": own for name, own in shared.items()}
            found |= {kind for own in amounts.values() for kind in own}
    assert found == RATES.keys()
    for kind, rate in (("pairs' multiply-adds", "flops_per_s"), ("jagged features", "one thread"), ("rows", "threads")):
        assert rate_of(kind) == rate
    with pytest.raises(ValueError, match=r"steps with 'jagged columns' cannot be modelled: .* hotrow probe"):
        rate_of("jagged columns")


def test_one_core_has_one_set_of_points(units: Callable[[Hardware, int], dict[str, float]]) -> None:
    one: dict[str, Any] = {name: {"1": getattr(HERE, name)["1"]} for name in ("stream_bytes_per_s", "flops_per_s")}
    made = modelled(replace(HERE, num_cores=1, kernels={}, random_rows=HERE.random_rows[:1], **one), HERE)
    assert all(len(points) == len(KINDS) for points in made.kernels.values())
    assert units(made, 1) == pytest.approx(units(HERE, 1), rel=1e-6)


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_declared_machines_can_be_modelled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_hardware", lambda: HERE)
    monkeypatch.setattr(module, "read_hardware", HERE.with_declared)
    made = read_machine(path)
    assert set(made.kernels) == set(HERE.kernels)
    before, after = CostModel(HERE).units("dense", 2), CostModel(made).units("dense", made.num_cores)
    assert after["multiply-adds"] < before["multiply-adds"] / 5 and after["calls"] == pytest.approx(before["calls"])

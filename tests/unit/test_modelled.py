"""hotrow.plan.modelled: steps on a machine that is not here, against the machine that they were measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hotrow.plan import modelled as module
from hotrow.plan.cost import PHASES, CostModel
from hotrow.plan.hardware import MACHINES, Figure, Hardware, Point
from hotrow.plan.modelled import faster, modelled, rate_of, read_machine

KINDS = ("steps", "calls", "multiply-adds", "lines from beyond 8 MiB", "pooled values beyond 1 MiB", "ids")
HERE = Hardware(
    name="here",
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
            "lines from beyond 8 MiB",
        ),
        ({"stream_bytes_per_s": {"1": Figure(4e10), "2": Figure(6e10)}}, "pooled values beyond 1 MiB"),
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
    for kind in ("steps", "calls", "multiply-adds", "pooled values beyond 1 MiB"):
        assert made[kind] == pytest.approx(before[kind])


def test_what_costs_nothing_here_costs_nothing_there() -> None:
    free = {phase: [*points, Point({"threads": 2.0, "ids": 1.0, "free": 1.0}, Figure(3e-6))] for phase, points in
            HERE.kernels.items()}  # fmt: skip
    units = CostModel(modelled(replace(HERE, kernels={}), replace(HERE, kernels=free))).units("dense", 2)
    assert units["free"] < 1e-20


def test_a_rate_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"here has no flops_per_s for 2 threads, .*: declare it"):
        modelled(replace(HERE, kernels={}, flops_per_s={"1": Figure(1e11)}), HERE)


def test_rows_scale_as_streams_if_no_row_was_measured_on_both() -> None:
    other = replace(HERE, random_rows=[], stream_bytes_per_s={"1": Figure(3e10)})
    assert faster(other, 1, HERE, 1)["random_rows"] == pytest.approx(3)


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("pairs' multiply-adds", "flops_per_s"),
        ("steps from beyond 64 MiB", "one thread"),
        ("tensors by adam", "one thread"),
        ("gradients from beyond 1 MiB", "random_rows"),
        ("layer values beyond 8 MiB", "stream_bytes_per_s"),
        ("sorted keys", "threads"),
    ],
)
def test_kinds(kind: str, rate: str) -> None:
    assert rate_of(kind) == rate


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_declared_machines_can_be_modelled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "known_hardware", lambda: HERE)
    monkeypatch.setattr(module, "read_hardware", HERE.with_declared)
    made = read_machine(path)
    assert set(made.kernels) == set(HERE.kernels)
    before, after = CostModel(HERE).units("dense", 2), CostModel(made).units("dense", made.num_cores)
    assert after["multiply-adds"] < before["multiply-adds"] / 5 and after["calls"] == pytest.approx(before["calls"])

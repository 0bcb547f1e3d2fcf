"""The probe's steps: what they count against brute force, and that the points they give predict a step."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from hotrow.config.load import make_config
from hotrow.costs.cost import PHASES
from hotrow.costs.fit import unit_seconds
from hotrow.data.packed.reader import Split
from hotrow.lab import step_probe
from hotrow.lab.step_probe import Drawn, Shape, measure_kernels, measure_shape, shapes
from hotrow.setup.device import splits_dense

TRAIN = {"batch_size": 96}
MODEL = {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]}
SMALL = Shape(
    config=make_config({"data": "probe", "model": MODEL, "train": TRAIN}),
    num_dense=2,
    rows=(400, 3000),
    zipf=1.0,
    lengths=(1.0, 3.0),
)


def test_shapes_are_functions_of_their_numbers() -> None:
    first, again = (list(islice(shapes(), 40)) for _ in range(2))
    assert first == again and len({shape.config.train.batch_size for shape in first}) > 20
    assert {shape.config.optimizer.sparse.name for shape in first} == set(step_probe.OPTIMIZERS)
    assert {shape.config.model.name for shape in first} == {"dlrm", "dcn"}
    six = first[:6]
    assert {shape.config.optimizer.sparse.name for shape in six[:5]} == set(step_probe.OPTIMIZERS)
    assert {shape.config.train.precision for shape in six} == {"fp32", "fp16", "split_bf16"}
    assert {shape.config.optimizer.dense.name for shape in six} == {"sgd", "adam", "adagrad"}
    assert any(splits_dense(shape.config) for shape in six) and six[5].in_tiers is not None
    assert max(sum(shape.rows) for shape in islice(shapes(1 << 20), 40)) < max(sum(shape.rows) for shape in first) / 50
    assert sum(shape.in_tiers is not None for shape in first) == 40 // step_probe.TIERS_EVERY


@pytest.mark.usefixtures("one_thread")
def test_a_point_for_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "TIMED", 3)
    monkeypatch.setattr(step_probe, "PARTS", (1,))
    points = dict(measure_shape(SMALL, [1], seed=5))
    assert points.keys() == set(PHASES)
    split = Drawn(SMALL, 96 * 5, np.random.default_rng(5))
    lists = split.block(0).ids[1]
    lookups = 96 + 96 * len(lists.values) / (96 * 5)
    assert points["lookup"].sizes["ids"] == pytest.approx(lookups, rel=0.05)
    assert points["update"].sizes["rows"] <= points["update"].sizes["keys"]
    assert all(0 < point.seconds.value < 1 for point in points.values())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_point_says_if_other_work_ran(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(step_probe, "TIMED", 2)
    monkeypatch.setattr(step_probe.Disturbance, "share", lambda _: share)
    points = [point for _, point in measure_shape(SMALL, [1])]
    assert len(points) > 4 and {point.disturbed for point in points} == {share > 0}
    if share:
        assert points[0].seconds.note == "disturbed: other work had the processors for 50% of the time"


def test_windows_are_figures_of_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "WINDOW_SHAPES", ((256, 1, 1, 1),))
    rounds, verified = iter([1.0, 2.0, 4.0, 0.1, 0.2, 0.4]), []

    def window_s(split: Split) -> float:
        verified.append(bool(split._verified.all()))
        return next(rounds)

    monkeypatch.setattr(step_probe, "_window_s", window_s)
    points = step_probe._windows([1, 2], 30.0)["window"]
    assert verified == [False] * 3 + [True] * 3
    assert [point.sizes["threads"] for point in points] == [1, 2, 1, 2]
    for point, median in zip(points, (2.0, 2.0, 0.2, 0.2), strict=True):
        found = (point.seconds.low, point.seconds.value, point.seconds.high)
        assert found == pytest.approx((0.75 * median, median, 1.5 * median))
        assert ("checked values" in point.sizes) == (median == 2)


def test_what_a_killed_probe_leaves_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_probe.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(step_probe, "WINDOW_SHAPES", ((256, 1, 1, 1),))

    with monkeypatch.context() as killed:  # the system gives back the lock of a process that was killed
        killed.setattr(step_probe.OwnFolder, "remove", lambda own: os.close(own._descriptor))
        step_probe._windows([1], 30.0)
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["data"]
    step_probe._windows([1], 30.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("one_thread")
def test_tiers_move_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_probe, "TIMED", 3)
    shape = replace(SMALL, rows=(400, 40_000), in_tiers=0.1)
    points = dict(measure_shape(shape, [1], folder=tmp_path))
    assert points["data"].sizes["tables in tiers"] == 1 and points["data"].sizes["missed rows"] > 5
    assert not list(tmp_path.iterdir()), "the tables' files are gone"


@pytest.mark.usefixtures("one_thread")
def test_measured_points_make_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "shapes", lambda _: islice(iter([SMALL, replace(SMALL, num_dense=9)]), 2))
    monkeypatch.setattr(step_probe, "WINDOW_SHAPES", ((256, 1, 1, 1),))
    monkeypatch.setattr(step_probe, "TIMED", 2)
    told: list[str] = []
    kernels = measure_kernels(threads=[1], seconds=30, progress=told.append)
    assert kernels.keys() == {"window", *PHASES} and len(told) == 2
    for points in kernels.values():
        units = unit_seconds(points)
        assert all(seconds >= 0 for seconds in units.values()) and any(units.values())

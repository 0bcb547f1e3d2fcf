"""Tables of many columns: work grows with their number and no faster, and a guess takes those that tell something."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from hotrow.data.prepare.pipeline import Options, prepare
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import SplitSpec, parse_schema
from hotrow.data.sources.screen import FEWEST, MANY, MOST_IDS
from hotrow.data.sources.split import RandomPlan

REAL = ("x3", "x140", "x299")


def wide(num_rows: int, num_columns: int, told: Any = True) -> pa.Table:
    """Returns normals, of which REAL tell the label in the rows `told`: by a line, by both ends, and by missing."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, num_columns))
    line, ends, gaps = x[:, 3], abs(x[:, 140 % num_columns]) - 0.7, x[:, 299 % num_columns] > 0.5
    odds = np.where(told, 1.5 * line + 2 * ends + 2 * gaps - 0.6, 0.0)
    x[gaps, 299 % num_columns] = np.nan
    columns = {f"x{i}": pa.array(x[:, i], from_pandas=True) for i in range(num_columns)}
    return pa.table({"y": (rng.logistic(size=num_rows) < odds).astype(int), **columns})


def calls_in(work: Callable[[], Any]) -> int:
    """The Python functions that are called, and the steps of generators, in all threads."""
    events = list[str]()
    threading.setprofile(count := lambda frame, event, argument: events.append(event))
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return events.count("call")


def test_work_grows_with_the_columns_and_no_faster(tmp_path: Path) -> None:
    def worked(num: int) -> int:
        names, frame = [f"x{i}" for i in range(num)], wide(300, num)
        ids = [{"column": name, "buckets": [-1, 0, 1]} for name in names[::4]]
        schema = {"label": "y", "dense": names, "categorical": ids, "statistics": names[::4]}

        def work() -> None:
            guess_columns(frame, label="y").schema()
            opened = open_source("frame", frame, schema=parse_schema(schema, where="test"))
            prepare(opened, tmp_path / str(num), Options(threads=1))

        return calls_in(work)

    worked(20)  # what is imported once
    of_40, of_80, of_160 = map(worked, (40, 80, 160))
    assert of_160 - of_80 < 2.05 * (of_80 - of_40)


def test_of_many_columns_those_are_taken_that_tell_something_in_training_rows() -> None:
    trains = RandomPlan(0, SplitSpec().fractions).assign(np.arange(1000)) == 0
    nothing, held, told = (guess_columns(wide(1000, 2 * MANY, who), label="y") for who in (False, ~trains, trains))
    assert held.schema() == nothing.schema(), "labels of other rows decide nothing"
    taken = [{g.column for g in found.of("dense")} for found in (nothing, told)]
    assert min(map(len, taken)) >= FEWEST and max(map(len, taken)) < MANY / 2
    assert taken[1] >= {*REAL} and not taken[0] >= {*REAL}
    assert len(told.of("categorical")) <= MOST_IDS


@pytest.mark.slow
def test_up_to_so_many_columns_all_are_taken() -> None:
    assert len(guess_columns(wide(3000, MANY), label="y").of("dense")) == MANY


@pytest.mark.slow
def test_fit_of_thousands_of_columns_finds_those_that_tell_something(tmp_path: Path) -> None:
    run = hotrow.fit(wide(1500, 3000), label="y", run=tmp_path / "run", quiet=True)
    assert run.metrics["auc"] > 0.8

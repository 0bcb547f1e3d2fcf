"""Law 6 for a guessed schema: no label of a row that will validate or test decides what a column is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from hotrow.data.sources import sample as sampling
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.schema import Schema, SplitSpec
from hotrow.data.sources.split import RandomPlan
from loops import looped

ROWS = 6000


def clicks(told: np.ndarray[Any, Any], *, with_time: bool) -> pa.Table:
    """Returns rows whose label is a coin, except in the rows `told`: there a number, an id and a pair tell it."""
    rng = np.random.default_rng(0)
    number, user, one, other = (rng.integers(0, top, ROWS) for top in (2000, 100, 12, 12))
    tells = 1 * (number > 1000) + (user % 2 == 1) + ((one + other) % 2 == 1) >= 2
    label = np.where(told, tells, rng.random(ROWS) < 0.5)
    # In the order of time but for neighbours, so that a file's end is not simply its newest rows.
    time = {"ts": 1_700_000_000 + (np.arange(ROWS) + rng.integers(0, 100, ROWS)) * 60} if with_time else {}
    text = np.char.add("user ", user.astype(str))
    return pa.table({"click": label.astype(int), "number": number, "user": text, "one": one, "other": other, **time})


def as_csv(table: pa.Table, folder: Path) -> Path:
    path = as_quoted_csv(table, folder)
    path.write_text(path.read_text().replace('"', ""))
    return path


def as_quoted_csv(table: pa.Table, folder: Path) -> Path:
    pyarrow.csv.write_csv(table, folder / "rows.csv")
    return folder / "rows.csv"


def as_json(table: pa.Table, folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return folder / "rows.jsonl"


def as_parquet(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / "rows.parquet", row_group_size=1500)
    return folder / "rows.parquet"


def as_files(table: pa.Table, folder: Path) -> Path:
    for part, first in enumerate((0, 1500, 4000)):
        pq.write_table(table.slice(first, (1500, 2500, 2000)[part]), folder / f"{part}.parquet", row_group_size=1000)
    return folder


def as_frame(table: pa.Table, folder: Path) -> pa.Table:
    return table


KINDS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "csv": as_csv, "quoted csv": as_quoted_csv, "jsonl": as_json, "parquet": as_parquet, "files": as_files,
    "frame": as_frame,
}  # fmt: skip


def held_out(table: pa.Table, split: SplitSpec, rows: int = ROWS) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns the rows that will not train: by preparation's own hash, or the newest of the first `rows`."""
    if "ts" not in table.column_names or split.kind == "random":
        held = RandomPlan(split.seed, split.fractions).assign(np.arange(len(table))) > 0
    else:
        time = table["ts"].to_numpy()
        held = time >= np.sort(time[:rows])[round(split.fractions[0] * rows)]
    return held | (np.arange(len(table)) >= rows)


def sample_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_ROWS", 2500)


RANDOM, BY_TIME = (False, SplitSpec()), (True, SplitSpec())
CASES: list[Any] = [
    pytest.param(kind, sampled, *split, marks=[] if sampled == (number % 2 > 0) else pytest.mark.slow)
    for number, kind in enumerate(KINDS)
    for sampled in (False, True)
    for split in (RANDOM, BY_TIME)
]
CASES += [("csv", True, True, SplitSpec(kind="random", seed=5))]
CASES += [("frame", False, False, SplitSpec(fractions=(0.5, 0.2, 0.3), seed=3))]


@looped(("kind", "sampled", "with_time", "split"), CASES)
def test_labels_of_held_out_rows_decide_nothing(
    kind: str, sampled: bool, with_time: bool, split: SplitSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        sample_less(monkeypatch)

    def guessed(told: np.ndarray[Any, Any]) -> Schema:
        data = KINDS[kind](clicks(told, with_time=with_time), tmp_path)
        return guess_columns(data, label="click", split=split).schema()

    check(guessed, held_out(clicks(np.zeros(ROWS, np.bool_), with_time=with_time), split))


def check(guessed: Callable[[np.ndarray[Any, Any]], Schema], held: np.ndarray[Any, Any]) -> None:
    nothing = guessed(np.zeros(ROWS, np.bool_))
    assert guessed(held) == nothing
    assert guessed(~held) != nothing, "labels of training rows decide"


@looped("kind", KINDS)
def test_a_table_may_begin_with_its_newest_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_less(monkeypatch)
    backwards = np.arange(ROWS)[::-1]

    def guessed(told: np.ndarray[Any, Any]) -> Schema:
        data = KINDS[kind](clicks(told, with_time=True).take(backwards), tmp_path)
        return guess_columns(data, label="click").schema()

    check(guessed, held_out(clicks(np.zeros(ROWS, np.bool_), with_time=True), SplitSpec()))


@pytest.mark.parametrize("split", [SplitSpec(), SplitSpec(kind="random")], ids=["time", "random"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_rows_beyond_the_first_that_are_prepared_decide_nothing(
    kind: str, sampled: bool, split: SplitSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        sample_less(monkeypatch)

    def guessed(told: np.ndarray[Any, Any]) -> Schema:
        data = KINDS[kind](clicks(told, with_time=True), tmp_path)
        return guess_columns(data, label="click", time="ts", split=split, rows=3500).schema()

    check(guessed, held_out(clicks(np.zeros(ROWS, np.bool_), with_time=True), split, 3500))


@pytest.mark.slow_but("click-1-True", "number-1-False", "ts-1-True")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("column", "skip"), [("click", 1), ("number", 1), ("ts", 1), ("ts", 0), ("other", 2)])
def test_a_row_that_is_left_out_moves_the_split_of_the_rows_after_it(
    column: str, skip: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        sample_less(monkeypatch)
    split = SplitSpec(kind="random")

    def guessed(told: np.ndarray[Any, Any]) -> Schema:
        path = as_csv(clicks(told, with_time=True), tmp_path)
        lines = path.read_text().splitlines()
        cells = lines[1].split(",")
        cells[lines[0].split(",").index(column)] = "soon"
        path.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]) + "\n")
        return guess_columns(path, label="click", time="ts", split=split, skip_bad_rows=skip).schema()

    held = held_out(clicks(np.zeros(ROWS, np.bool_), with_time=True), split)
    check(guessed, np.append(True, held[:-1]))


def test_no_label_decides_anything_if_any_number_of_rows_may_be_left_out() -> None:
    one, other = (clicks(np.full(ROWS, told), with_time=False) for told in (False, True))
    found = [guess_columns(table, label="click", skip_bad_rows=10**7).schema() for table in (one, other)]
    assert found[0] == found[1]

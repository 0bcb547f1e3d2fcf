"""Laws of hours: dataset.json says where each hour of the training rows begins, and progressive validation is by them.

The truths are dictionaries over raw times, scikit-learn on what the run before predicts of raw rows, and its ids.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sklearn.metrics
from test_from_run import OF_IDS, config, ids_of
from typer.testing import CliRunner

import hotrow
from hotrow.cli.app import app
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare import fit
from hotrow.data.prepare.fit import Hours
from hotrow.data.prepare.prepare import run_prepare
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from hotrow.run.runs import _lines_of_parts
from loops import looped
from resealed import reseal

MIDNIGHT = 1_699_920_000
"""The beginning of a day, in seconds since 1970."""
HOUR, DAY = 3600, 86_400


def truth(seconds: Sequence[int], most: int = 50) -> list[tuple[int, int]]:
    """Where hours begin, or days if more than `most` hours have rows; nothing of one, or of too many days."""
    for step in (HOUR, DAY):
        found: dict[int, int] = {}
        for row, second in enumerate(seconds):
            found.setdefault(second // step * step, row)
        if 1 < len(found) <= most:
            return list(found.items())
    return []


@looped("per_s", [1, 1000, 1_000_000])
@looped("span", [HOUR - 1, 5 * HOUR, 11 * DAY, 90 * DAY])
def test_hours_are_those_of_a_dictionary(monkeypatch: pytest.MonkeyPatch, per_s: int, span: int) -> None:
    """However rows are cut into chunks; times before 1970 too."""
    monkeypatch.setattr(fit, "MAX_HOURS", 30)
    rng = np.random.default_rng(span)
    for start in (MIDNIGHT, -7 * DAY - 5):
        times = start * per_s + np.sort(rng.integers(0, span * per_s, 700))
        times[300:330] = times[300]
        times.sort()
        hours = Hours(day=DAY * per_s)
        for chunk in np.split(times, np.sort(rng.integers(0, 701, 20))):
            hours.add(chunk)
        assert [tuple(begin) for begin in hours.found()] == truth((times // per_s).tolist(), 30)


def test_dates_are_told_by_days() -> None:
    hours = Hours(day=1)
    hours.add(np.array([19_000, 19_000, 19_002]))
    assert hours.found() == [[19_000 * DAY, 0], [19_002 * DAY, 2]]


def test_rows_out_of_order_have_no_hours() -> None:
    """Wherever the order breaks: within a chunk, or between two of them."""
    for chunks in ([[0, 9000, 8000]], [[0, 9000], [8000]], [[0, 9000], [8000, 20_000]]):
        hours = Hours(day=DAY)
        for chunk in chunks:
            hours.add(np.array(chunk))
        assert hours.found() == []


FORMS: dict[str, Any] = {
    "seconds": str,
    "fractions": lambda s: f"{s}.25",
    "text": lambda s: datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    "zone": lambda s: datetime.fromtimestamp(s + 2 * HOUR, UTC).strftime("%Y-%m-%dT%H:%M:%S+02:00"),
    "date": lambda s: datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%d"),
}


def prepared(folder: Path, times: Sequence[Any], **options: Any) -> PackedDataset:
    lines = (f"{k % 3 // 2},{time},i{k % 5}\n" for k, time in enumerate(times))
    (folder / "rows.csv").write_text("click,ts,item\n" + "".join(lines))
    schema = {"label": "click", "time": "ts", "categorical": ["item"], **options}
    (folder / "schema.yaml").write_text(json.dumps(schema))
    return run_prepare("csv", folder / "rows.csv", folder / "data", schema=folder / "schema.yaml")


@looped("form", FORMS)
def test_prepare_keeps_the_hours_of_training_rows(tmp_path: Path, form: str) -> None:
    """Some hours have no row, and the last rows are of other splits. Times may be of another zone."""
    step = 2000 if form == "date" else 150
    seconds = [MIDNIGHT + 22 * HOUR + k * step + (7 * HOUR if k > 300 else 0) for k in range(1000)]
    dataset = prepared(tmp_path, [FORMS[form](second) for second in seconds])
    num_rows = dataset.split("train").num_rows
    assert num_rows < 1000
    wanted = truth([s // DAY * DAY for s in seconds[:num_rows]] if form == "date" else seconds[:num_rows], 200)
    assert dataset.hours() == wanted and len(wanted) > 1


@pytest.mark.parametrize(
    "times",
    [
        [MIDNIGHT + k for k in range(500)],
        [20231101 + k // 25 for k in range(500)],
        [60 * k for k in range(500)],
        [60 * k + 0.5 for k in range(500)],
        [1000 * (MIDNIGHT + k) + 0.5 for k in range(500)],
    ],
    ids=["one hour", "dates that digits write", "whole numbers", "since the first row", "thousandths"],
)
def test_other_rows_have_none(tmp_path: Path, times: list[float]) -> None:
    dataset = prepared(tmp_path, times)
    assert "hours" not in dataset.info.summary and dataset.hours() == []


def test_hours_are_not_what_prepare_says(tmp_path: Path) -> None:
    """They would be a line of up to a hundred numbers."""
    dataset = prepared(tmp_path, [MIDNIGHT + 60 * k for k in range(500)])
    given = ["prepare", "csv", f"{tmp_path}/rows.csv", "--schema", f"{tmp_path}/schema.yaml", "--out", f"{tmp_path}/b"]
    said = CliRunner().invoke(app, given)
    summary = said.stdout.partition("\nsummary\n")[2]
    assert said.exit_code == 0 and "rows_read" in summary and "hours" not in summary
    assert PackedDataset.open(tmp_path / "b").hours() == dataset.hours() != []


@looped("statistics", [["item"], []])
def test_rows_out_of_order_are_sorted_and_have_hours(tmp_path: Path, statistics: list[str]) -> None:
    times = [MIDNIGHT + 60 * (k * 7 % 500) for k in range(500)]
    dataset = prepared(tmp_path, times, statistics=statistics)
    assert dataset.hours() == truth(sorted(times)[: dataset.split("train").num_rows], 200)


ALTERED: list[Any] = [
    *({"0": 0}, "soon", [[MIDNIGHT, 0], [MIDNIGHT + HOUR, "5"]], [[MIDNIGHT, 0], [MIDNIGHT + HOUR, 5, 6]]),
    *([[MIDNIGHT + 0.5, 0]], [[MIDNIGHT, 1]], [[MIDNIGHT, 0], [MIDNIGHT + HOUR, 0]], [[MIDNIGHT, 0], [MIDNIGHT, 5]]),
    *([[MIDNIGHT, 0], [MIDNIGHT + HOUR, 10**6]], [[10**30, 0]]),
]


def test_hours_that_cannot_be_are_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, [MIDNIGHT + 60 * k for k in range(500)])
    for hours in ALTERED:
        reseal(dataset.path / "dataset.json", lambda fields, hours=hours: fields["summary"].update(hours=hours))
        with pytest.raises(ValueError, match=r"dataset\.json: summary\.hours.*prepare the data again"):
            PackedDataset.open(dataset.path).hours()


def day_table(day: int, *, in_order: bool = True, one_hour: bool = False) -> pa.Table:
    """Clicks in six hours of ten, or in one; those of the last hour are all 0. Ids drift, and many are missing."""
    rng, num_rows = np.random.default_rng(day), 600
    of_day = rng.choice([0, 1, 2, 5, 6], num_rows) * HOUR + rng.integers(0, HOUR, num_rows)
    seconds = MIDNIGHT + DAY * day + np.sort(of_day)
    seconds[-8:] = MIDNIGHT + DAY * day + 9 * HOUR
    seconds = MIDNIGHT + DAY * day + np.arange(num_rows) if one_hour else seconds
    user, item = rng.integers(20 * day, 20 * day + 60, num_rows), rng.integers(15 * day, 15 * day + 25, num_rows)
    click = rng.random(num_rows) < np.where(item % 3 == 0, 0.7, 0.2)
    click[-8:] = False
    tags = [[f"t{t}" for t in rng.integers(9 * day, 9 * day + 30, rng.integers(0, 4))] for _ in range(num_rows)]
    table = pa.table({
        "click": click.astype(int),
        "ts": pa.array(seconds * 1000, pa.timestamp("ms")),
        "user": [int(u) if u % 11 else None for u in user],
        "item": [f"rare {day} {k}" if k % 29 == 0 else f"i{i}" for k, i in enumerate(item)],
        "tags": tags,
    })  # fmt: skip
    return table if in_order else table.take(rng.permutation(num_rows))


KINDS: dict[str, set[str]] = {"grown": set(), "expired": {"reborn"}, "out of order": {"reborn"}, "one hour": set()}
"""What lists rows of the third day that are not those of the second."""


@pytest.fixture(scope="module", params=KINDS)
def days(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path], pa.Table]:
    """The datasets of three days, whose ids drift, and the rows of the last."""
    folder, kind, found = tmp_path_factory.mktemp("hours"), request.param, list[Path]()
    expire = {"expire": {"unused_days": 1}} if kind in ("expired", "out of order") else {}
    schema = {
        "label": "click",
        "time": "ts",
        "categorical": ["user", "item", {"column": "tags", "kind": "multi_hot"}],
        "tables": {"default": {"min_count": 3, **expire}},
    }
    (folder / "schema.yaml").write_text(json.dumps(schema))
    for day in range(3):
        rows = day_table(day, in_order=kind != "out of order" or day < 2, one_hour=kind == "one hour" and day == 2)
        pq.write_table(rows, folder / f"{day}.parquet")
        first = {"base": "none", "schema": folder / "schema.yaml", "split": "random", "fractions": [1, 0, 0]}
        options = {"base": found[-1]} if found else first
        found.append(run_prepare("parquet", folder / f"{day}.parquet", folder / f"data-{day}", **options).path)
    return kind, found, rows


@pytest.mark.slow_but("grown", "expired")
@pytest.mark.filterwarnings("ignore")
def test_each_hour_of_new_rows_is_scored(days: tuple[str, list[Path], pa.Table], tmp_path: Path) -> None:
    kind, (first, base, day), rows = days
    one = runs.train(config(first, tmp_path / "one", *OF_IDS)).path
    two = runs.train(config(base, tmp_path / "two", *OF_IDS, f"from_run={one}")).path
    run = runs.train(config(day, tmp_path / "run", *OF_IDS, f"from_run={two}", "train.max_steps=1"))
    assert run.record.parent is not None
    parts = run.record.parent.parts
    read = RunFolder.open(run.path).record.parent
    assert read is not None and read.parts == parts
    counted = [part[name] for part in read.parts for name in ("num_rows", "tenth", "begins_s") if name in part]
    assert {*map(type, counted)} == {int} and len(counted) == 2 * len(parts)
    has = {path.parts[1] for name in PackedDataset.open(day).info.files if (path := Path(name)).parts[0] == "rare"}
    assert {"reborn"} & has == KINDS[kind]
    seconds = rows["ts"].cast(pa.int64()).to_numpy() // 1000
    label, score = rows["click"].to_numpy(), hotrow.load(two).predict(rows.drop_columns(["click"])).astype(np.float64)
    if kind == "one hour":
        own = np.array_split(np.arange(len(rows)), 10)
        assert [part["tenth"] for part in parts] == [*range(1, 11)] and not any("begins_s" in part for part in parts)
    else:
        begins = sorted({second // HOUR * HOUR for second in seconds.tolist()})
        own = [np.flatnonzero(seconds // HOUR * HOUR == second) for second in begins]
        assert [part["begins_s"] for part in parts] == begins and len(begins) == 6
    before = PackedDataset.open(base)
    known = {name: {*ids_of(before, name)} for name in ("user", "item", "tags")}
    for name, table in before.info.table_by_name.items():
        known[name] |= set() if table.missing_row is None else {None}
    log, total = (run.path / "log.txt").read_text(), 0.0
    for part, at in zip(parts, own, strict=True):
        y, p = label[at], score[at]
        logloss, rate = sklearn.metrics.log_loss(y, p, labels=[0, 1]), y.mean()
        assert part["num_rows"] == len(at)
        assert part["logloss"] == pytest.approx(logloss, abs=1e-6)
        if y.any():
            assert part["auc"] == pytest.approx(sklearn.metrics.roc_auc_score(y, p), abs=1e-6)
            assert part["ne"] == pytest.approx(logloss / sklearn.metrics.log_loss(y, np.full(len(y), rate)), abs=1e-6)
            assert part["calibration"] == pytest.approx(p.mean() / rate, abs=1e-6)
        else:
            assert part["auc"] is None and part["ne"] is None and part["calibration"] is None
        taken = rows.take(at)
        lookups = [(name, key) for name in ("user", "item") for key in taken[name].to_pylist()]
        lookups += [("tags", key) for keys in taken["tags"].to_pylist() for key in keys]
        lost = sum((key.encode() if isinstance(key, str) else key) not in known[name] for name, key in lookups)
        assert part["unknown"] == lost / len(lookups) < 1
        total += lost
        if "begins_s" in part:
            assert f"{datetime.fromtimestamp(part['begins_s'] or 0, UTC):%Y-%m-%d %H:%M} " in log
    tables = PackedDataset.open(day).info.summary["ids"]
    assert 0 < total == sum(own["unknown_to_base"] for own in tables.values())  # type: ignore[union-attr,index,call-overload]


@looped("number", [1, 10])
@looped("is_timed", [False, True])
def test_a_line_for_each_part(number: int, *, is_timed: bool) -> None:
    begins, tenths = [MIDNIGHT + k * HOUR for k in range(number)], [*range(1, number + 1)]
    columns: dict[str, list[Any]] = {"begins_s": begins} if is_timed else {"tenth": tenths}
    columns |= {"num_rows": [5000 + k for k in range(number)], "auc": [None] * number, "unknown": [0.125] * number}
    lines = [*_lines_of_parts(columns, {"auc": "AUC"})]
    assert len(lines) == 1 + number and len({len(line) for line in lines}) == 1, "columns are aligned"
    last = f"{datetime.fromtimestamp(MIDNIGHT + (number - 1) * HOUR, UTC):%Y-%m-%d %H:%M}"
    assert lines[-1].split() == [*(last.split() if is_timed else [f"{number}"]), f"{5000 + number - 1:,}", "-", "12.5%"]

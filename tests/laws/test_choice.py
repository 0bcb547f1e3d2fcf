"""fit chooses features and epochs on validation rows: what it may depend on, what it keeps, and how it goes on."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

import hotrow
from forked import start_forked
from hotrow import api
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import raw_rows, run_prepare
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.guess import guess_columns
from hotrow.data.sources.registry import open_source
from hotrow.data.sources.schema import parse_schema
from hotrow.run import choice, runs, several
from hotrow.run.choice import Features, candidates, plainest
from hotrow.run.folder import RunFolder
from loops import looped
from prepare_data import file_hashes

N = 1000
OPTIONS: dict[str, Any] = {"batch_size": 800, "embedding_dim": 2, "top_mlp": [4], "bottom_mlp": [4], "quiet": True}
OPTIONS |= {"train.early_stopping": None, "train.threads": 1}
SHORT = ["none", "singles-time", "singles-rows"]


def clicks(flipped: slice = slice(0)) -> pa.Table:
    """Items decide the click, and ten rows share a second. flipped: rows with the other label."""
    generator = np.random.default_rng(0)
    item = generator.integers(0, 20, N)
    click = generator.random(N) < np.where(item % 3 == 0, 0.8, 0.1)
    click[flipped] = ~click[flipped]
    return pa.table({"item": [f"i{i}" for i in item], "click": click, "ts": np.arange(N) // 10 + 1_700_000_000})


def fit(path: Path, rows: pa.Table, **more: Any) -> hotrow.Run:
    return hotrow.fit(rows, label="click", time="ts", run=path, **(OPTIONS | more))


def weights(run: hotrow.Run) -> dict[str, str]:
    return {name: digest for name, digest in file_hashes(run.checkpoint).items() if "safetensors" in name}


def outcomes(run: hotrow.Run) -> dict[str, Any]:
    """What was found of the candidates."""
    assert run.record.choice is not None
    return {name: (each.epochs, each.loss, each.worse) for name, each in run.record.choice.candidates.items()}


Weights = list[tuple[str, dict[str, str]]]


@contextmanager
def watched(found: Weights, *, stops: bool = False) -> Iterator[None]:
    """Notes each run that is trained to choose by, and its weights. stops: before the third, and within the fifth."""

    def train(config: Any, *, folder: RunFolder, quiet: bool) -> RunFolder:
        if folder.path.parent.name != "selection":  # the last one
            return runs.train(config, folder=folder, quiet=quiet)
        found.append((folder.path.name, {}))
        if stops and len(found) == 3:
            raise KeyboardInterrupt
        until_s = 0.0 if stops and len(found) == 5 else math.inf
        run = runs.train(config, folder=folder, quiet=quiet, until_s=until_s)
        if run.record.status == "finished":
            found[-1][1].update(weights(hotrow.load(run.path)))
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "train", train)
        patch.setattr(several, "usable_cores", lambda: 1)  # one after the other, in this process
        yield


@pytest.fixture(scope="module")
def trained() -> Weights:
    """The runs that the fixture `chosen` begins to train."""
    return []


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory, trained: Weights) -> hotrow.Run:
    """A run whose choice was stopped twice."""
    path = tmp_path_factory.mktemp("choice") / "run"
    with watched(trained, stops=True):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                fit(path, clicks())
        return fit(path, clicks())


def test_a_stopped_choice_goes_on_and_labels_of_the_test_change_nothing(
    chosen: hotrow.Run, trained: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals, to the bit, one whose candidates train side by side, in processes of which one fails and two are
    stopped, with other labels on its test rows."""
    start, begun = several._process, list[list[str]]()

    def process(folders: list[str]) -> Any:
        begun.append([Path(own).name for own in folders])
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if len(begun) == 4:
            return start(folders)
        program = "raise SystemExit(1)" if len(begun) == 3 else "from hotrow.run.several import main; main()"
        child = children.enter_context(start_forked(program, *folders))
        return SimpleNamespace(poll=lambda: None if child.is_alive() else 0, kill=child.end, wait=lambda: None)

    with monkeypatch.context() as patch, ExitStack() as children:
        patch.setattr(several, "usable_cores", lambda: 2)
        patch.setattr(several, "FEW_STEPS", 0)
        patch.setattr(several, "_process", process)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "run", clicks(slice(N * 9 // 10, N)))
        other = fit(tmp_path / "run", clicks(slice(N * 9 // 10, N)))
    assert begun[:4] == [SHORT[::2], SHORT[1:2]] * 2
    assert "failed: it is trained again" in (other.path / "selection" / SHORT[0] / "log.txt").read_text()
    assert weights(other) == weights(chosen) and outcomes(other) == outcomes(chosen)
    assert other.metrics != chosen.metrics, "the test rows have other labels"
    begun = [name for name, _ in trained]
    assert begun[:4] == [*SHORT, SHORT[2]] and begun[4] == begun[5] == "none-full"
    assert len({*begun[5:]}) == len(begun[5:]) == 3, "what has finished is not trained again"


def test_hours_are_inputs_if_validation_rows_say_so(tmp_path: Path) -> None:
    """The hour of the time's own offset decides the click; labels of test rows decide nothing; a further time that is
    set with the outcome is no candidate, and another one is."""
    generator, rows = np.random.default_rng(0), 3000
    start = datetime(2024, 3, 25, tzinfo=timezone(timedelta(hours=5)))
    times = [start + timedelta(minutes=4 * i) for i in range(rows)]
    click = generator.random(rows) < np.where(np.array([t.hour for t in times]) < 8, 0.7, 0.1)
    table = {"item": generator.integers(0, 20, rows).astype(str), "click": click, "ts": [t.isoformat() for t in times]}
    later = [t + timedelta(days=1) for t in times]
    joined = [start - timedelta(hours=int(h)) for h in generator.integers(1, 900, rows)]
    further = {"paid_at": later, "joined_at": joined}
    clock = guess_columns(pa.table(table | further), label="click", time="ts").clock
    made = [f"{name} {part}" for name in ("ts", "joined_at") for part in ("hour", "weekday")]
    assert [spec["column"] for spec in clock["categorical"]] == made
    flipped = np.where(np.arange(rows) < rows * 9 // 10, click, ~click)
    both = (pa.table(table | {"click": labels}) for labels in (click, flipped))
    run, other = (fit(tmp_path / f"run-{k}", each, epochs=4) for k, each in enumerate(both))
    tried, record = [*outcomes(run)], run.record.choice
    assert record is not None and "-clock" in record.chosen and outcomes(run) == outcomes(other)
    assert [name for name in tried if name.endswith("clock-full")] == [tried[5]]
    assert {f.name for f in (run.path / "selection").iterdir() if (f / "data").exists()} == {tried[5]}
    assert weights(run) == weights(other) and run.metrics != other.metrics
    with pytest.raises(ValueError, match="no column 'ts'"):
        run.predict({"item": ["1"]})


def test_what_is_kept_of_candidates(chosen: hotrow.Run) -> None:
    record = chosen.record.choice
    assert record is not None and record.run == record.chosen and [*record.candidates][:3] == SHORT
    assert len(record.candidates) == 6 and [*record.candidates][-1].endswith("-long"), "two of the three, and the best"
    epochs = [each.epochs for each in record.candidates.values()]
    assert epochs == [10, 10, 10, 30, 30, 48]
    own, features = record.candidates[record.chosen], record.chosen.partition("-full")[0].partition("-long")[0]
    assert (own.worse, own.error) == (0, 0)
    page = (chosen.path / "report.html").read_text()
    for name, each in record.candidates.items():
        folder = RunFolder.open(chosen.path / "selection" / name)
        assert folder.measurements() and folder.record.status == "finished" and f"{each.loss:.4f}" in page
        assert (folder.path / "checkpoints").exists() == (name == record.chosen)
        assert (folder.path / "data").exists() == (name == features)
    selected = hotrow.load(chosen.folder.selection)
    assert selected.evaluate("val")["logloss"] == pytest.approx(selected.record.metrics["val"]["logloss"])


def test_the_last_run_is_that_of_the_chosen_schema_alone(chosen: hotrow.Run, tmp_path: Path) -> None:
    """A person who has the schema, all but the test rows and the recipe gets the same weights, without a choice."""
    found = raw_rows(PackedDataset.open(chosen.path / "data"))
    assert found is not None and chosen.record.choice is not None
    kind = chosen.record.choice.chosen.partition("-")[0]
    assert bool(found.schema.statistics) == (kind != "none")
    assert found.schema.split.fractions == pytest.approx((0.9, 0, 0.1))
    packed = run_prepare("frame", clicks(), tmp_path / "packed", schema=found.schema)
    raw = yaml.safe_load((chosen.path / "config.yaml").read_text())
    assert raw["model"]["members"] == 4
    assert yaml.safe_load((chosen.folder.selection / "config.yaml").read_text())["model"]["members"] == 2
    config = make_config(raw | {"data": str(packed.path), "run": str(tmp_path / "alone")}, origin="test")
    assert weights(hotrow.load(runs.train(config, quiet=True).path)) == weights(chosen)


def test_labels_of_validation_rows_teach_no_candidate(
    chosen: hotrow.Run, trained: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say which one wins, and train the last run. All read the rows together."""
    found, reads, chunks = Weights(), list[Any](), ColumnsSource.chunks
    monkeypatch.setattr(ColumnsSource, "chunks", lambda *given, **more: reads.append(given) or chunks(*given, **more))
    with watched(found):
        other = fit(tmp_path / "run", clicks(slice(N * 8 // 10, N * 9 // 10)))
    assert len(reads) == 1
    ours, theirs = dict(trained), dict(found)
    assert {*SHORT} <= ours.keys() & theirs.keys() and all(ours[name] for name in SHORT)
    assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
    assert outcomes(other) != outcomes(chosen) and weights(other) != weights(chosen)


def test_candidates_of_a_long_log_train_on_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "MOST_ROWS", N // 2)
    run = fit(tmp_path / "run", clicks(), epochs=1, quiet=False)
    record = run.record.choice
    assert record is not None and record.run == "whole" and record.chosen.endswith("-full")
    sampled, whole = (RunFolder.open(run.path / "selection" / name).record.rows for name in (record.chosen, "whole"))
    assert sum(sampled.values()) == pytest.approx(N / 2, abs=80) and sum(whole.values()) == N
    assert not [*(run.path / "selection").glob("[!w]*/data")]
    assert sum(run.record.rows.values()) == N
    said = capfd.readouterr().err.splitlines()
    for name in outcomes(run):
        assert sum(line.startswith(f"{name}: AUC") for line in said) == 1
    assert sum(line.startswith("chosen: ") for line in said) == 1


STATISTICS = ["a", "b", ["a", "b"], ["a", "b", "c"]]
SCHEMA = parse_schema({"label": "click", "categorical": ["a", "b", "c"], "statistics": STATISTICS}, where="test")


def test_candidates_are_the_kinds_that_there_are() -> None:
    timed = parse_schema(SCHEMA.to_json() | {"time": "ts", "statistics": ["a", ["a", "b", "c"]]}, where="test")
    assert [each.name for each in candidates(SCHEMA)] == ["none", "singles-rows", "pairs-rows", "triples-rows"]
    found = [each.name for each in candidates(timed)]
    assert found == ["none", "singles-time", "singles-rows", "triples-time", "triples-rows"]
    by_group = SCHEMA.model_copy(update={"statistics_by": "a"})
    assert [each.name for each in candidates(by_group)][1:] == ["singles-groups", "pairs-groups", "triples-groups"]


@looped(("columns", "by", "kept"), [(0, None, 0), (1, "rows", 2), (2, "rows", 3), (3, "rows", 4)])
def test_a_candidate_is_a_part_of_the_statistics(columns: int, by: str | None, kept: int) -> None:
    rows = pa.table({name: ["x", "y"] * 20 for name in "abc"} | {"click": [0, 1] * 20})
    schema = Features(columns, by).of(open_source("frame", rows, schema=SCHEMA)).schema
    assert schema.statistics == SCHEMA.statistics[:kept] and schema.statistics_by == by


@looped(("worse", "place"), [([0.5, 0.0, 0.0], 0), ([1.5, 0.9, 0.0], 1), ([1.5, 1.5, 0.0], 2), ([0.0, 0.5, 0.5], 0)])
def test_within_a_standard_error_the_plainest_is_taken(worse: list[float], place: int) -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(size=64)
    error = noise.std(ddof=1) / 8
    base = generator.random(64)
    tried, run = list[Any](), RunFolder.__new__(RunFolder)
    for by in worse:
        own = base + (0 if by == 0 else noise - noise.mean() + by * error)
        tried.append(choice._Tried(Features(0), run, own))
    assert plainest(tried) is tried[place]

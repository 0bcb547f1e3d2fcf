"""fit trains again with the validation rows, for as many steps more as there are rows."""

import html
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

import hotrow
from hotrow import api
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.prepare import raw_rows, run_prepare
from hotrow.report.page import how_selected
from hotrow.run import runs
from hotrow.run.selection import losses_by_step, step_to_stop_at
from prepare_data import file_hashes

OPTIONS: dict[str, Any] = {"batch_size": 64, "epochs": 3, "embedding_dim": 4, "top_mlp": [8], "quiet": True}
OPTIONS["choice"] = False


def clicks(num_rows: int, *, timed: bool) -> pa.Table:
    """Items decide the click; later rows have items that earlier ones lack."""
    generator = np.random.default_rng(0)
    item = generator.integers(0, 20, num_rows) + np.arange(num_rows) // 200
    click = generator.random(num_rows) < np.where(item % 3 == 0, 0.8, 0.1)
    times = {"ts": np.arange(num_rows) + 1_700_000_000} if timed else {}
    return pa.table({"item": [f"i{i}" for i in item], "price": generator.random(num_rows), "click": click, **times})


def weights(run: hotrow.Run) -> dict[str, str]:
    return {name: digest for name, digest in file_hashes(run.checkpoint).items() if "safetensors" in name}


@pytest.mark.slow_but("True")
@pytest.mark.parametrize("timed", [False, True])
def test_the_second_run_trains_all_rows_but_those_of_the_test(timed: bool, tmp_path: Path) -> None:
    """It equals, to the bit, a run on data that a person has split into 90, 0 and 10 %, with the steps found."""
    rows, hints = clicks(1500, timed=timed), {"label": "click", **({"time": "ts"} if timed else {})}
    run = hotrow.fit(rows, run=tmp_path / "run", **hints, **OPTIONS)
    selection = hotrow.load(run.path / "selection")
    first, second = PackedDataset.open(selection.path / "data"), PackedDataset.open(run.path / "data")
    train, validation, test = (first.split(name).num_rows for name in ("train", "val", "test"))
    sizes = {name: split.num_rows for name, split in second.info.splits.items()}
    assert sizes == {"train": train + validation, "test": test}
    more = (train + validation) / train
    last = step_to_stop_at(losses_by_step(selection.folder.measurements()))
    assert run.record.steps == round(last * more)

    guessed = raw_rows(first)
    assert guessed is not None, "a guess looks at labels of training rows alone, so it is that of the first run"
    schema = guessed.schema
    by_hand = run_prepare("frame", rows, tmp_path / "packed", schema=schema, fractions=(0.8 + 0.1, 0.0, 0.1))
    raw = yaml.safe_load((selection.path / "config.yaml").read_text())
    raw["train"] |= {"max_steps": run.record.steps, "eval_every": None, "early_stopping": None}
    schedule = raw["optimizer"]["schedule"]
    raw["optimizer"]["schedule"] = {
        name: round(steps * more) if isinstance(steps, int) else steps for name, steps in schedule.items()
    }
    alone = runs.train(
        make_config(raw | {"data": str(by_hand.path), "run": str(tmp_path / "alone")}, origin="test"), quiet=True
    )
    assert weights(run) == weights(hotrow.load(alone.path))
    assert run.metrics["auc"] == hotrow.load(alone.path).metrics["auc"]


@pytest.fixture(scope="module")
def once_and_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[hotrow.Run, hotrow.Run]:
    """Runs of the same rows, without and with a second run that trains the validation rows too."""
    folder, rows = tmp_path_factory.mktemp("refit"), clicks(1500, timed=True)
    once = hotrow.fit(rows, label="click", time="ts", run=folder / "once", refit=False, **OPTIONS)
    return once, hotrow.fit(rows, label="click", time="ts", run=folder / "twice", **OPTIONS)


def test_the_report_says_what_the_first_run_found(once_and_twice: tuple[hotrow.Run, hotrow.Run]) -> None:
    _, run = once_and_twice
    auc = (hotrow.load(run.path / "selection").record.metrics or {})["val"]["auc"]
    said = how_selected(run.folder.facts())
    assert len(said) == 1 and f"{auc:.4f}" in said[0]
    assert said[0] in html.unescape((run.path / "report.html").read_text())
    assert not how_selected(hotrow.load(run.path / "selection").folder.facts())


def test_a_run_whose_steps_were_found_is_not_to_train_on(once_and_twice: tuple[hotrow.Run, hotrow.Run]) -> None:
    assert ["Train on" in run.folder.commands() for run in once_and_twice] == [True, False]


def test_losses_of_parts_are_kept_where_they_are_read(once_and_twice: tuple[hotrow.Run, hotrow.Run]) -> None:
    once, twice = once_and_twice
    for run, kept in ((hotrow.load(twice.path / "selection"), True), (once, False)):
        assert {"losses" in line for line in run.folder.measurements() if line.get("split") == "val"} == {kept}


def test_ids_of_validation_rows_are_known_afterwards(once_and_twice: tuple[hotrow.Run, hotrow.Run]) -> None:
    once, twice = once_and_twice
    sizes = [PackedDataset.open(run.path / "data").info.table_by_name["item"].num_embeddings for run in (once, twice)]
    assert sizes[0] < sizes[1]
    assert not (once.path / "selection").exists() and "val" in (once.record.metrics or {})


def test_a_selection_that_was_interrupted_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call ends after the first run, and the second goes on with the second one."""
    options = {"label": "click", "run": tmp_path / "run", **OPTIONS}
    rows, calls, train = clicks(1500, timed=False), [], api.train

    def counted(config: Any, **more: Any) -> Any:
        calls.append(config.run)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(config, **more)

    monkeypatch.setattr(api, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        hotrow.fit(rows, **options)
    assert hotrow.fit(rows, **options).record.status == "finished"
    assert [Path(call).name for call in calls] == ["selection", "run", "run"]


def test_without_validation_rows_there_is_one_run(tmp_path: Path) -> None:
    split = {"fractions": [0.9, 0.0, 0.1]}
    run = hotrow.fit(clicks(600, timed=False), label="click", run=tmp_path / "run", split=split, **OPTIONS)
    assert not (run.path / "selection").exists() and run.record.status == "finished"


def test_without_test_rows_all_train(tmp_path: Path) -> None:
    """What is usual for scored rows is then what the first run counted."""
    split = {"fractions": [0.9, 0.1, 0.0]}
    run = hotrow.fit(clicks(600, timed=False), label="click", run=tmp_path / "run", split=split, **OPTIONS)
    first = hotrow.load(run.path / "selection").record
    assert (run.record.rows or {})["train"] == 600 and run.metrics == {}
    assert run.record.columns == first.columns and first.columns


def test_max_steps_hold_for_both_runs(tmp_path: Path) -> None:
    run = hotrow.fit(clicks(600, timed=False), label="click", run=tmp_path / "run", max_steps=3, **OPTIONS)
    assert run.record.steps is not None and run.record.steps <= 3

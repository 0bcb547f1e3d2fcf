"""`hotrow tune`: what it refuses, how it halves, that a kill changes nothing, and that no trial sees test rows."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from at_step import at_step
from hotrow.api import load
from hotrow.config.load import load_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.objectives.objective import Measure
from hotrow.tune import tune as tuning
from hotrow.tune.space import Axis, Trial, load_optuna, next_values, own_values
from hotrow.tune.tune import RUNGS, steps_at, tune
from loops import looped
from packed_data import planted

Searched = tuple[Path, dict[str, Any], list[str]]
"""A recipe, what a search of it found, and what it said."""
SPACE: dict[str, Any] = {"optimizer.dense.lr": {"log": [1e-3, 1.0]}, "model.embedding_dim": [2, 4, 8]}
dataset = planted(opened=True, bag=False)


def recipe(dataset: PackedDataset, folder: Path, space: Any = SPACE, **options: Any) -> Path:
    path = folder / "recipe.yaml"
    model = {"embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]}
    train = {"batch_size": 32, "threads": 1, **options}
    raw = {"data": str(dataset.path), "model": model, "train": train, "memory": "dram", "tune": space}
    raw["optimizer"] = {"dense": {"lr": 0.001}}  # which is too low for so few steps
    path.write_text(yaml.safe_dump(raw))
    return path


def trials_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["trials"]
    return found


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, dataset: PackedDataset) -> Searched:
    """Of twelve trials."""
    folder, said = tmp_path_factory.mktemp("searched"), list[str]()
    path = recipe(dataset, folder)
    return path, tune(path, trials=12, out=folder / "out", say=said.append), said


def test_a_search_finds_the_best_of_its_whole_trials(searched: Searched) -> None:
    _, found, said = searched
    trials = trials_in(Path(found["out"]))
    whole = [trial["figures"][-1] for trial in trials if trial["status"] == "finished"]
    assert len(trials) == sum(found["trials"].values()) == 12 and found["trials"]["stopped"] >= 4
    assert found["best"]["figure"] == min(whole)
    assert sum(line.startswith("trial ") for line in said) == 12
    assert not [*(Path(found["out"]) / "trials").glob("*/checkpoints")], "trials keep no checkpoint"


def test_the_best_recipe_trains_to_the_figure_of_its_trial(searched: Searched) -> None:
    """Stops and resumes at the rungs changed no bit, and best.yaml is the recipe of the trial."""
    path, found, _ = searched
    best = load_config(found["recipe"])
    assert best.optimizer.dense.lr == found["best"]["values"]["optimizer.dense.lr"]
    run = load(found["test"]["runs"]["best"][0])
    assert run.record.metrics["val"]["logloss"] == found["best"]["figure"]
    given, options = load_config(path), load(found["test"]["runs"]["given"][0]).folder.options()
    assert float(options["optimizer.dense.lr"]) == given.optimizer.dense.lr


def test_both_recipes_are_compared_on_test_rows(searched: Searched) -> None:
    test = searched[1]["test"]
    given, best = (load(test["runs"][name][0]).metrics for name in ("given", "best"))
    assert test["difference"]["auc"]["difference"] == pytest.approx(best["auc"] - given["auc"])
    assert test["difference"]["auc"]["error"] > 0 and test["error_over"] == "test rows"


def test_more_trials_go_on_from_the_others(searched: Searched, tmp_path: Path) -> None:
    path, found, _ = searched
    shutil.copytree(found["out"], tmp_path / "out")
    more = tune(path, trials=14, out=tmp_path / "out")
    assert trials_in(tmp_path / "out")[:12] == trials_in(Path(found["out"]))
    assert sum(more["trials"].values()) == 14


def test_more_trials_may_find_a_better_recipe(dataset: PackedDataset, tmp_path: Path) -> None:
    """What was trained of the best recipe so far is not taken for the new one."""
    path = recipe(dataset, tmp_path, {"optimizer.dense.lr": [0.001, 0.1]})
    before, found = (tune(path, trials=trials, out=tmp_path / "out") for trials in (1, 2))
    assert [own["best"]["values"]["optimizer.dense.lr"] for own in (before, found)] == [0.001, 0.1]
    (best,) = found["test"]["runs"]["best"]
    assert load(best).folder.options()["optimizer.dense.lr"] == "0.1"
    assert found["test"]["difference"]["auc"]["difference"] != 0


def test_seeds_give_the_error_of_the_final_comparison(dataset: PackedDataset, tmp_path: Path) -> None:
    found = tune(recipe(dataset, tmp_path), trials=1, seeds=3, out=tmp_path / "out")["test"]
    assert found["error_over"] == "seeds" and len(found["runs"]["best"]) == 3
    figures = [[load(run).metrics["auc"] for run in found["runs"][name]] for name in ("given", "best")]
    apart = [other - one for one, other in zip(*figures, strict=True)]
    mean = sum(apart) / 3
    error = (sum((each - mean) ** 2 for each in apart) / 2 / 3) ** 0.5
    assert found["difference"]["auc"]["difference"] == pytest.approx(mean)
    assert found["difference"]["auc"]["error"] == pytest.approx(error)


def test_trials_may_be_judged_by_group(dataset: PackedDataset, tmp_path: Path) -> None:
    overrides = ["metrics.by=x1", "train.monitor=gauc"]
    found = tune(recipe(dataset, tmp_path), trials=2, out=tmp_path / "out", overrides=overrides)
    figures = [trial["figures"][-1] for trial in trials_in(tmp_path / "out") if trial["status"] == "finished"]
    assert found["best"]["figure"] == max(figures), "higher is better"
    assert found["test"]["difference"]["gauc"]["error"] is not None


def test_a_trial_that_diverges_is_a_result(dataset: PackedDataset, tmp_path: Path) -> None:
    space = {"optimizer.dense.lr": [1e30, 0.01]}
    found = tune(recipe(dataset, tmp_path, space), trials=5, out=tmp_path / "out")
    assert found["trials"] == {"finished": 1, "stopped": 0, "failed": 1}, "and both were tried once"
    (failed,) = [trial for trial in trials_in(tmp_path / "out") if trial["status"] == "failed"]
    assert failed["reason"]
    assert found["best"]["values"] == {"optimizer.dense.lr": 0.01}


def test_no_trial_looks_at_test_rows(dataset: PackedDataset, tmp_path: Path) -> None:
    """They are damaged: the search does not notice, the comparison at its end does."""
    data, said = tmp_path / "data", list[str]()
    shutil.copytree(dataset.path, data)
    for part in (data / "test").iterdir():
        whole = bytearray(part.read_bytes())
        whole[len(whole) // 2] ^= 1
        part.write_bytes(whole)
    path = recipe(PackedDataset.open(data), tmp_path)
    with pytest.raises(ValueError, match=r"/test/.*checksum"):
        tune(path, trials=3, out=tmp_path / "out", say=said.append)
    assert [trial["status"] != "running" for trial in trials_in(tmp_path / "out")] == [True] * 3
    assert (tmp_path / "out" / "best.yaml").exists()


def test_halving_against_optunas() -> None:
    """Optuna's pruner of successive halving, on the same figures in the same order, decides alike."""
    optuna = load_optuna()
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.create_study(pruner=pruner)
    search = object.__new__(tuning.Search)
    search.measure, search.results = Measure("loss", "lower"), tuning.Results({}, [])
    generator = random.Random(1)
    for _ in range(60):
        asked, trial = study.ask(), Trial({})
        search.results.trials.append(trial)
        for rung in range(len(RUNGS) - 1):
            figure = round(generator.random(), 1)  # some are equal
            trial.figures.append(figure)
            asked.report(figure, step=3**rung)
            pruned = asked.should_prune()
            assert search._goes_on(trial) is not pruned
            if pruned:
                study.tell(asked, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(asked, figure)


def test_rungs_are_shares_of_a_runs_steps(dataset: PackedDataset, tmp_path: Path) -> None:
    config = load_config(recipe(dataset, tmp_path))
    assert [steps_at(config, share, 900) for share in RUNGS.values()] == [4, 10, None]
    longer = load_config(recipe(dataset, tmp_path, epochs=3, max_steps=45))
    assert [steps_at(longer, share, 900) for share in RUNGS.values()] == [5, 15, 45]


@pytest.mark.slow
def test_a_kill_at_any_time_changes_nothing(searched: Searched, dataset: PackedDataset, tmp_path: Path) -> None:
    """Killed twice, then left alone: the same command comes to the same trials."""
    path, whole, _ = searched
    out = str(tmp_path / "out")
    line = [sys.executable, "-m", "hotrow", "tune", str(path), "--trials", "6", "--out", out, "--json"]
    for after_s in (0.0, 0.4):
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        before = len(trials_in(tmp_path / "out")) if (tmp_path / "out" / "results.json").exists() else 0
        while process.poll() is None:
            with suppress(OSError, ValueError):
                if len(trials_in(tmp_path / "out")) > before:
                    break
            time.sleep(0.05)
        time.sleep(after_s)
        process.kill()
        process.communicate()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert trials_in(tmp_path / "out") == trials_in(Path(whole["out"]))[:6]
    assert json.loads(done.stdout.splitlines()[-1])["test"]["given"] == whole["test"]["given"]


def test_a_stop_between_a_run_and_its_record_changes_nothing(
    searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a trial has come to its rung, and results.json does not say so yet."""
    path, whole, _ = searched
    real, calls = tuning.Search._figure, 0

    def stopped(self: Any, trial: Trial, run: Path) -> float:
        nonlocal calls
        calls += 1
        figure = real(self, trial, run)
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return figure

    monkeypatch.setattr(tuning.Search, "_figure", stopped)
    for _ in range(40):
        try:
            tune(path, trials=6, out=tmp_path / "out")
            break
        except KeyboardInterrupt as error:
            assert "the same command goes on" in str(error)
    assert trials_in(tmp_path / "out") == trials_in(Path(whole["out"]))[:6]


def test_a_signal_ends_a_search_in_good_order(
    searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole, _ = searched
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        found = tune(path, trials=3, out=tmp_path / "out")
    assert (found["status"], found["signal"]) == ("interrupted", signal.SIGTERM)
    tune(path, trials=3, out=tmp_path / "out")
    assert trials_in(tmp_path / "out") == trials_in(Path(whole["out"]))[:3]


def test_what_is_tried_next_follows_from_the_trials_alone() -> None:
    space = {
        "a": Axis("log", low=1e-4, high=1e-2),
        "b": Axis("choice", choices=([8, 4], [16], "x")),
        "c": Axis("int", low=1, high=3),
    }
    trials = list[Trial]()
    for number in range(15):
        values = next_values(space, trials, sign=-1)
        assert values is not None and values == next_values(space, trials, sign=-1)
        assert values not in [trial.values for trial in trials]
        assert 1e-4 <= values["a"] <= 1e-2 and values["b"] in space["b"].choices and values["c"] in (1, 2, 3)
        ended = [("finished", [0.5, 0.4, number / 10]), ("stopped", [0.6]), ("failed", [])][number % 3]
        trials.append(Trial(values, status=ended[0], figures=ended[1]))  # type: ignore[arg-type]


def test_the_given_recipe_is_tried_first_if_it_lies_in_the_space(dataset: PackedDataset, tmp_path: Path) -> None:
    config = load_config(recipe(dataset, tmp_path))
    lr, dim = config.optimizer.dense.lr, config.model.embedding_dim
    space = {"optimizer.dense.lr": Axis("log", low=lr / 2, high=lr), "model.embedding_dim": Axis("choice", (2, 8))}
    assert own_values(config, space) is None
    found = tune(recipe(dataset, tmp_path), trials=1, out=tmp_path / "out")
    assert found["best"]["values"] == {"optimizer.dense.lr": lr, "model.embedding_dim": dim}
    assert found["test"]["difference"]["auc"]["difference"] == 0


def test_the_search_comes_closer_to_the_best_value() -> None:
    """On a figure that is lowest at 1e-3: the second half of the trials is nearer to it than the first."""
    space, trials = {"a": Axis("log", low=1e-6, high=1.0)}, list[Trial]()
    for _ in range(40):
        values = next_values(space, trials, sign=-1)
        figure = (math.log10(float(values["a"])) + 3) ** 2  # type: ignore[arg-type]
        trials.append(Trial(values, status="finished", figures=[figure] * 3))
    halves = [sum(trial.figures[0] for trial in half) for half in (trials[:20], trials[20:])]
    assert halves[1] < halves[0] / 2


@looped(
    ("space", "said"),
    [
        ({}, "does not say what to search"),
        ([1], "does not say what to search"),
        ({"optimizer.dense.rl": [0.1]}, "did you mean optimizer.dense.lr"),
        ({"train.seed": [1, 2]}, "train.seed cannot be searched"),
        ({"calibration.method": ["platt", "isotonic"]}, "calibration.method cannot be searched"),
        ({"model.embedding_dim": []}, "model.embedding_dim is []"),
        ({"model.embedding_dim": {"range": [8, 16]}}, "write its values as one of"),
        ({"model.embedding_dim": {"int": [8, 8]}}, "an empty range"),
        ({"model.embedding_dim": {"int": [8, 16.5]}}, "whole numbers"),
        ({"optimizer.dense.lr": {"log": [0, 1]}}, "above 0"),
        ({"optimizer.dense.lr": {"log": [1, 0.1]}}, "below the second"),
        ({"optimizer.dense.lr": {"float": [0.1, float("inf")]}}, "must be numbers"),
        ({"optimizer.dense.lr": {"float": [-1, 2]}}, "optimizer.dense.lr is -1"),
        ({"model.embedding_dim": [8, 0]}, "model.embedding_dim"),
        ({"model.name": ["dcn", "two_tower"]}, "two_tower is trained for sampled_softmax"),
        ({"model.structure": ["parallel"]}, "model.structure for model dlrm"),
        ({"optimizer.schedule.decay_start_step": [9]}, "decay_steps is 0"),
        ("nowhere.yaml", "nowhere.yaml: No such file or directory; pass a YAML file"),
    ],
)
def test_a_wrong_space_is_refused_by_its_field(dataset: PackedDataset, tmp_path: Path, space: Any, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        tune(recipe(dataset, tmp_path, space), out=tmp_path / "out")
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_space_may_be_a_file_of_its_own(dataset: PackedDataset, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("model.embedding_dim: [2, 4]\n")
    found = tune(recipe(dataset, tmp_path, str(tmp_path / "space.yaml")), trials=1, out=tmp_path / "out")
    assert found["best"]["values"]["model.embedding_dim"] in (2, 4)


def test_another_recipe_space_or_dataset_is_not_mixed_in(
    searched: Searched, dataset: PackedDataset, tmp_path: Path
) -> None:
    path, found, _ = searched
    with pytest.raises(ValueError, match="another recipe"):
        tune(path, out=found["out"], overrides=["train.batch_size=64"])
    with pytest.raises(ValueError, match="another search space"):
        tune(recipe(dataset, tmp_path, {"model.embedding_dim": [2]}), out=found["out"])


def test_other_files_are_left_alone(dataset: PackedDataset, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis\.txt"):
        tune(recipe(dataset, tmp_path), out=tmp_path / "out")


def test_validation_rows_are_needed(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    data = make_dataset(tmp_path / "data", rows={"train": 128, "test": 64})
    with pytest.raises(ValueError, match="no validation rows"):
        tune(recipe(data, tmp_path), out=tmp_path / "out")


def test_without_test_rows_there_is_no_comparison(tmp_path: Path, make_dataset: Callable[..., PackedDataset]) -> None:
    data = make_dataset(tmp_path / "data", rows={"train": 128, "val": 64})
    found = tune(recipe(data, tmp_path), trials=1, out=tmp_path / "out")
    assert found["test"] is None and Path(found["recipe"]).exists()


def test_optuna_may_be_absent(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'hotrow\[tune\]'"):
        tune(recipe(dataset, tmp_path), out=tmp_path / "out")


def test_numbers_of_nothing_are_refused(dataset: PackedDataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trials"):
        tune(recipe(dataset, tmp_path), out=tmp_path / "out", trials=0)

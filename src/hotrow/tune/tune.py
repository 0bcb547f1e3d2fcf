"""`hotrow tune`: searches fields of a recipe by its validation rows, and compares the best recipe with the given one.

A trial is a run of the recipe with other values. It trains a ninth of its steps, then a third, then all, as long as its
figure is among the best third of the trials that have come as far (successive halving, Jamieson and Talwalkar, 2016;
asynchronous, so that no trial waits for another). To go on is to resume, which does not change a bit.

    OUT/results.json            every trial that was begun: the same command continues from here
    OUT/trials/000              its run, without its checkpoints once it has ended
    OUT/best.yaml               the recipe with the best figure of those that trained all their steps
    OUT/best/seed-1, OUT/given/seed-1   both recipes, trained anew; these alone see test rows
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.door import is_taken, make_folder, remove
from hotrow.base.files import atomic_write, claim_or_fail
from hotrow.base.records import STRICT, Count, Document
from hotrow.config.load import apply_overrides, overrides_of, read_config, with_model
from hotrow.config.schema import Config
from hotrow.data.packed.reader import PackedDataset
from hotrow.objectives.objective import judged, shown
from hotrow.run.folder import CONFIG, RunFolder
from hotrow.run.runs import resume, train
from hotrow.tune.compare import compare, in_columns, mean_of, of_seeds, over_seeds, verdict, with_error
from hotrow.tune.space import Trial, config_at, load_optuna, next_values, own_values, read_space, recipe_at

RUNGS = {"a ninth": 1 / 9, "a third": 1 / 3, "all": 1.0}
"""Shares of its steps after which a trial is judged; in one pass over the data, they are shares of the rows."""
KEEP = 3
"""One in this many trials goes on."""
STATUSES = ("finished", "stopped", "failed")
RESULTS, BEST = "results.json", "best.yaml"


@record(config=STRICT)
class Results:
    """What results.json says."""

    searched: dict[str, JsonValue]
    """Recipe, space and dataset, which may not change between two calls."""
    trials: list[Trial]
    compared: Count | None = None
    """The trial whose recipe is trained anew in OUT/best."""


_DOCUMENT = Document(Results, marks={"hotrow_tune": 1}, cure="remove the folder to search anew")


class _Interrupted(Exception):  # noqa: N818  # not an error
    """Raised if a run was stopped by a signal, which is its argument."""


def tune(
    recipe: Path | str,
    *,
    trials: int = 20,
    seeds: int = 1,
    out: Path | str | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Tries recipes of the search space in the YAML file `recipe` until `out` has `trials` of them, and compares the
    best one with the given one on test rows, with `seeds` seeds each. Returns what was found.

    Trials are judged by `train.monitor` on validation rows. out: by default tuned/<name of the file>. overrides: as for
    `hotrow train`. Raises ValueError, before anything trains, if Optuna is absent, the space names a field or a value
    that the recipe does not take, there are no validation rows, or `out` holds something else.
    """
    load_optuna()
    raw = read_config(recipe)
    raw = apply_overrides(with_model(raw, overrides_of(overrides).get("model.name")), overrides)
    folder = Path(out) if out is not None else Path("tuned") / Path(recipe).stem
    if trials < 1:
        raise ValueError(f"--trials is {trials}; it must be at least 1")
    with ExitStack() as stack:
        search = Search(raw, folder, origin=f"config {recipe}", say=say, stack=stack)
        of_seeds(search.given, seeds)
        try:
            search.run(trials)
            return {"status": "finished", **search.finish(seeds)}
        except _Interrupted as stopped:
            return {"status": "interrupted", "signal": stopped.args[0], "out": str(folder)}
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; trials are in {folder}, and the same command goes on") from None


class Search:
    """A search in a folder, which no other process may use until `stack` closes. Raises ValueError if the folder has
    trials of another recipe, space or dataset; for other errors see `tune`."""

    def __init__(
        self, recipe: dict[str, Any], folder: Path, *, origin: str, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self.recipe, self.folder, self.origin, self.say = recipe, folder, origin, say
        self.space, self.given = read_space(recipe, origin=origin), config_at(recipe, {}, origin=origin)
        self.measure = self.given.objective.measures[self.given.monitor]
        dataset = PackedDataset.open(self.given.data, verify="sizes")
        self.rows = {name: split.num_rows for name, split in dataset.splits.items()}
        if not self.rows.get("val"):
            cure = "prepare it with --fractions 0.8,0.1,0.1"
            raise ValueError(f"{self.given.data} has no validation rows, by which recipes are judged; {cure}")
        make_folder(folder)
        others = [path.name for path in folder.iterdir() if not path.name.startswith((".", RESULTS))]
        if others and not is_taken(folder / RESULTS):
            raise ValueError(f"{folder} holds {others[0]} and no {RESULTS}; pass another --out")
        claim_or_fail(folder, stack)
        axes = {name: asdict(axis) for name, axis in self.space.items()}
        searched = {"recipe": recipe_at(recipe, {}), "search space": axes, "dataset": dataset.checksum}
        self.results = Results(json.loads(json.dumps(searched)), [])
        if is_taken(folder / RESULTS):
            now, self.results = self.results.searched, _DOCUMENT.read(folder / RESULTS)
            if other := [name for name, value in now.items() if self.results.searched.get(name) != value]:
                raise ValueError(
                    f"{folder / RESULTS} is of another {' and another '.join(other)}, so its trials cannot be compared "
                    "with new ones: pass another --out, or remove the folder"
                )

    def run(self, num_trials: int) -> None:
        """Ends trials that were begun, and begins others until there are `num_trials` or no others to try."""
        trials = self.results.trials
        for number in range(num_trials):
            if number == len(trials):
                values = own_values(self.given, self.space) if not trials else None
                values = values or next_values(self.space, trials, sign=self.measure.sign)
                if values is None:
                    return self.say(f"after {number} trials nothing was drawn that has not been tried")
                trials.append(Trial(values))
                _DOCUMENT.write(self.folder / RESULTS, self.results)
            run = self.folder / "trials" / f"{number:03d}"
            if trials[number].status == "running":
                self._try(number, run)
            if run.is_dir():
                remove(run / "checkpoints", within=run)
        return None

    def _try(self, number: int, run: Path) -> None:
        """Trains a trial from rung to rung, until others are better, it fails, or it has come to its end."""
        trial = self.results.trials[number]
        while trial.status == "running":
            try:
                trial.figures.append(self._figure(trial, run))
            except (MemoryError, ValueError) as error:  # it diverged, or its values do not go together
                trial.status, trial.reason = "failed", str(error) or "memory ran out"
            else:
                if len(trial.figures) == len(RUNGS):
                    trial.status = "finished"
                elif not self._goes_on(trial):
                    trial.status = "stopped"
            _DOCUMENT.write(self.folder / RESULTS, self.results)
        values = " ".join(f"{name}={json.dumps(value)}" for name, value in trial.values.items())
        rungs = [f"{shown(figure)} after {share}" for figure, share in zip(trial.figures, RUNGS, strict=False)]
        figures = f"{self.measure.title} {', '.join(rungs)} of its steps; " if rungs else ""
        self.say(f"trial {number} {trial.status}: {figures}{values}{f' ({trial.reason})' if trial.reason else ''}")

    def _figure(self, trial: Trial, run: Path) -> float:
        """Trains a trial to its next rung, and returns its validation metric there."""
        config = config_at(self.recipe, trial.values, origin=self.origin).model_copy(update={"run": str(run)})
        steps = steps_at(config, [*RUNGS.values()][len(trial.figures)], self.rows["train"])
        figure = (_trained(config, steps, hidden=["test"]).record.metrics or {})["val"][self.given.monitor]
        if figure is None:
            raise ValueError(f"the validation rows have no {self.measure.title}: set train.monitor to another metric")
        return float(figure)

    def _goes_on(self, trial: Trial) -> bool:
        """Returns whether a trial is among the best of those that have come to its last rung, itself included."""
        rung, sign = len(trial.figures) - 1, self.measure.sign
        figures = [sign * own.figures[rung] for own in self.results.trials if len(own.figures) > rung]
        return sum(figure > sign * trial.figures[rung] for figure in figures) < max(1, len(figures) // KEEP)

    def finish(self, num_seeds: int) -> dict[str, Any]:
        """Writes the best recipe and compares it with the given one on test rows, if any. Raises ValueError if no trial
        ended."""
        trials = self.results.trials
        ended = [number for number, trial in enumerate(trials) if trial.status == "finished"]
        if not ended:
            why = f"the last one: {trials[-1].reason}"
            raise ValueError(f"none of {len(trials)} trials came to its end; mend that and pass another --out; {why}")
        best = max(ended, key=lambda number: self.measure.sign * trials[number].figures[-1])
        raw, figure = recipe_at(self.recipe, trials[best].values), trials[best].figures[-1]
        if self.results.compared != best:  # more trials may have found a better one
            remove(self.folder / "best")
            self.results.compared = best
            _DOCUMENT.write(self.folder / RESULTS, self.results)
        told = f"# {self.measure.title} {figure:.6g} on validation rows, the best of {len(ended)} whole trials\n"
        with atomic_write(self.folder / BEST) as file:
            file.write((told + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)).encode())
        return {
            **{name: str(self.folder / file) for name, file in {"out": "", "recipe": BEST}.items()},
            "trials": {status: sum(own.status == status for own in trials) for status in STATUSES},
            "best": {"trial": best, "values": trials[best].values, "monitor": self.given.monitor, "figure": figure},
            "test": self._tested({"given": recipe_at(self.recipe, {}), "best": raw}, num_seeds),
        }

    def _tested(self, recipes: dict[str, dict[str, Any]], num_seeds: int) -> dict[str, Any] | None:
        """Trains both recipes with each seed; returns their metrics on test rows and by how much these differ."""
        if not self.rows.get("test"):
            return None
        runs: dict[str, list[RunFolder]] = {}
        for name, raw in recipes.items():
            whole = config_at(raw, {}, origin=self.origin).model_copy(update={"run": str(self.folder / name)})
            for config in of_seeds(whole, num_seeds):
                self.say(f"the {name} recipe with seed {config.train.seed}: training to its end")
                runs.setdefault(name, []).append(_trained(config, config.train.max_steps))
        found = {name: over_seeds([run.record for run in own]) for name, own in runs.items()}
        over_rows = compare(*(own[0].path for own in runs.values()))["metrics"] if num_seeds == 1 else {}
        for name in found["best"]:
            pairs = [[run.record.final_metrics[name] for run in own] for own in runs.values()]
            apart = mean_of([None if None in pair else pair[1] - pair[0] for pair in zip(*pairs, strict=True)])
            error = over_rows[name]["error"] if over_rows else apart["error"]
            found.setdefault("difference", {})[name] = judged(apart["mean"], error)
        paths = {name: [str(run.path) for run in own] for name, own in runs.items()}
        return {"seeds": num_seeds, "error_over": "test rows" if over_rows else "seeds", "runs": paths, **found}


def lines_of(found: dict[str, Any]) -> list[str]:
    """Formats the result of `tune` as lines for people."""
    if "best" not in found:
        return [f"stopped; trials are in {found['out']}, and the same command goes on"]
    best, test, lines = found["best"], found["test"], []
    if test is not None:
        head = ["test rows", "given", "best", f"difference, error over {test['error_over']}", ""]
        both = [(name, test["given"][name], own, test["difference"][name]) for name, own in test["best"].items()]
        lines = in_columns([head, *([n, with_error(a), with_error(b), *verdict(apart)] for n, a, b, apart in both)])
        lines += ["", *test["runs"]["best"]]
    trials = ", ".join(f"{number} {status}" for status, number in found["trials"].items())
    values = " ".join(f"{name}={json.dumps(value)}" for name, value in best["values"].items())
    told = f"{best['monitor']} {shown(best['figure'])} on validation rows"
    return [
        f"trials: {trials}",
        f"best: trial {best['trial']}, {told}: {values}",
        *lines,
        found["recipe"],
    ]


def steps_at(config: Config, share: float, num_rows: int) -> int | None:
    """Returns `train.max_steps` for a share of the steps of a run; the run's own for all of them."""
    options = config.train
    if share == 1:
        return options.max_steps
    total = options.epochs * math.ceil(num_rows / options.batch_size)
    return max(1, math.ceil(share * min(total, options.max_steps or total)))


def _trained(config: Config, steps: int | None, *, hidden: Sequence[str] = ()) -> RunFolder:
    """Returns the run in the folder of `config`, begun or continued, when it has taken `steps` steps. Raises
    _Interrupted if a signal stopped it."""
    path = Path(config.run or "")
    if not is_taken(path / CONFIG):
        remove(path)  # a kill came before its first step
        options = config.train.model_copy(update={"max_steps": steps})
        found = train(config.model_copy(update={"train": options}), quiet=True, hidden=hidden)
    elif hidden or RunFolder.open(path).record.status != "finished":  # a trial may have farther to go
        found = resume(path, [f"train.max_steps={json.dumps(steps)}"], quiet=True, hidden=hidden)
    else:
        found = RunFolder.open(path)
    if found.record.status == "interrupted":
        raise _Interrupted(found.record.signal)
    return found

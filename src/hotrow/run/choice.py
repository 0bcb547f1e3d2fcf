"""What `fit` does before its last run: raw rows are packed, and validation rows choose features, epochs and steps.

    for jobs in selection.runs():                           # RUN/selection, or rounds of candidates in it
        for own, config, quiet in trained_beside(jobs):     # what has no process of its own
            train(config, folder=own, quiet=quiet)
    opened, asked = with_validation_rows(selection, ...)    # what the last run trains
    config = asked.config(folder, asked.packed(folder, opened, ...))

Features are the schema's `statistics` here: none, those of one column, of up to two, of up to three, each by the rules
of `statistics_by`. All train on a short schedule, the better half on a full one, and the best of these for more epochs
too, unless it stopped before the end of that one. Of features within one standard error of the lowest loss the plainest
are taken: few validation rows cannot tell more. If there are times, the best are also tried with hours and weekdays.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotrow.base.door import is_taken, remove
from hotrow.base.progress import num_of, progress_bar
from hotrow.config.load import TUNE, apply_overrides, make_config, overrides_of, read_config
from hotrow.config.recipe import as_overrides, choose_recipe
from hotrow.config.schema import Config
from hotrow.data.packed.format import MANIFEST
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.prepare.pipeline import Interrupted, Options, fingerprint, prepare
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.registry import OpenedSource
from hotrow.data.sources.schema import Schema, parse_schema
from hotrow.models import MODELS
from hotrow.objectives import BY_GROUP
from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.run.folder import CONFIG, ROWS, RUN, RunFolder
from hotrow.run.record import ALL_DONE, Candidate, Choice
from hotrow.run.selection import difference, losses_by_step, step_to_stop_at
from hotrow.run.several import Job
from hotrow.setup.setup import SELECTION, check_labels

MOST_ROWS = 500_000
"""If a log is longer, candidates train on a sample of about this many rows."""
MEMBERS = 2
"""Models of a candidate, whose mean is scored: a single one may be the best by luck."""
LENGTHS = {"": 1 / 3, "-full": 1.0, "-long": 1.6}
"""Epochs, as a share of the recipe's, by what the name of a run ends in. The learning rate falls to zero in each."""
FEW_ROWS = 100
"""Fewer training rows make no useful model."""
WHOLE = "whole"
"""The run on all rows, if candidates had a sample."""


@dataclass(frozen=True)
class Asked:
    """The user's arguments of `fit` besides rows."""

    recipe: Mapping[str, Any] | None
    """If None, one is chosen for the number of rows."""
    changes: Sequence[str]
    """Options as `a.b=v`."""
    quiet: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The options in `changes`."""
        return overrides_of(self.changes)

    def announce(self, folder: RunFolder, line: str) -> None:
        folder.log(line)
        if not self.quiet:
            print(line, file=sys.stderr)

    def packed(
        self, folder: RunFolder, opened: OpenedSource, out: Path | None = None, *, rows: Path, sample: float = 1.0
    ) -> PackedDataset:
        """Returns the raw rows packed in `out`, by default the run's folder, packing them if need be; says and logs
        what was found. rows: where they lie as read."""
        # What was found of these rows has been said when the validation rows were left out.
        own = replace(self, quiet=self.quiet or is_taken(folder.path / SELECTION))
        out, say = out or folder.path / "data", functools.partial(own.announce, folder)
        if is_taken(out / MANIFEST):
            say(f"{out} is prepared already")
            return PackedDataset.open(out)
        with folder, progress_bar(quiet=self.quiet) as progress:
            return prepare(opened, out, options=Options(sample=sample), progress=progress, announce=say, rows=rows)

    def config(self, folder: RunFolder, dataset: PackedDataset) -> Config:
        """The config of a run on a dataset; without a recipe, one is chosen for its number of rows, and logged."""
        raw = {**(self.recipe or {}), "data": str(dataset.path), "run": str(folder.path)}
        with folder:
            config = make_config(apply_overrides(raw, self.changes), origin="fit")
            num_rows, given = dataset.split("train").num_rows, self.given
            if isinstance(config.objective, BinaryCrossEntropy):
                for k, label in enumerate(dataset.info.labels):
                    what = f"fit tells rows apart by {label.name!r}"
                    check_labels(what, dataset, "train", "or say which values are positive", k)
            if num_rows < FEW_ROWS:
                text = f"{num_rows} rows to train on are no basis for a model: its scores are chance; give thousands"
                folder.warn("few_training_rows", text)
                self.announce(folder, f"warning: {text}")
            if self.recipe is not None:
                return config
            sizes = {name: getattr(config.train, name) for name in ("batch_size", "epochs") if f"train.{name}" in given}
            validated = "val" in dataset.splits and dataset.split("val").num_rows > 0
            rated = config.model.objective in BY_GROUP and len(dataset.info.labels) == 1
            own = choose_recipe(num_rows, model=config.model.name, validated=validated, rated=rated, **sizes)
            recipe = as_overrides(own)
            config = make_config(apply_overrides(raw, [*recipe, *self.changes]), origin="fit")
            folder.log(f"recipe for {num_rows:,} training rows: {', '.join(recipe)}")
            size = f"batches of {config.train.batch_size}, {num_of(config.train.epochs, 'epoch')}"
            self.announce(
                folder,
                f"recipe for {num_rows:,} training rows: {size}, dim {config.model.embedding_dim} "
                f"(all of it: {folder.path}/config.yaml; change it: --set train.batch_size=...)",
            )
        return config


def can_refit(opened: OpenedSource, config: Config) -> bool:
    """Returns whether rows are split into parts of stated sizes, of which one validates."""
    has_parts = not isinstance(opened.source, CriteoSource) and opened.schema.split.fractions[1] > 0
    return has_parts and config.hot.schedule != "fae"  # which follows the loss on validation rows


def with_validation_rows(selection: Selection, *, quiet: bool) -> tuple[OpenedSource, Asked]:
    """Returns the source with its validation rows among those that train, and the recipe that was found: that of the
    run, up to its last good step, with all steps stretched in proportion to the added rows."""
    opened, own = selection.opened, selection.run
    train_share, validation, test = opened.schema.split.fractions
    rows, recipe = own.record.rows or {}, read_config(own.path / CONFIG)
    config = make_config(recipe, origin=str(own.path / CONFIG))

    def stretched(steps: int) -> int:
        return round(steps * (rows["train"] + rows["val"]) / rows["train"])

    whole = config.train.epochs * math.ceil((rows["train"] + rows["val"]) / config.train.batch_size)
    schedule = {name: stretched(steps) for name, steps in config.optimizer.schedule if isinstance(steps, int)}
    changes = {
        "train.max_steps": min(stretched(_last_good_step(own)), whole, config.train.max_steps or whole),
        "train.eval_every": None,
        "train.early_stopping": None,
        **{f"optimizer.schedule.{name}": steps for name, steps in schedule.items()},
        **selection.options,
    }
    opened = opened.with_options(fractions=(train_share + validation, 0.0, test))
    return opened, Asked(recipe_of(recipe), as_overrides(changes), quiet=quiet)


def _last_good_step(own: RunFolder) -> int:
    """Returns the step of the last weights that are, within noise, as good as the best ones of a selection."""
    losses = losses_by_step(own.measurements())
    if own.record.monitor != own.record.trained_for.loss_figure or not losses:
        return own.record.chosen_step or 0
    return step_to_stop_at(losses)


def selection_line(own: RunFolder, changes: Mapping[str, Any]) -> str:
    """Returns in words what a selection found, and what follows."""
    record = own.record
    found = record.trained_for.line((record.metrics or {})["val"])
    best, last = f"{record.chosen_step:,} of {num_of(record.steps or 0, 'step')}", _last_good_step(own)
    alike = f", and within noise until step {last:,}" if last != record.chosen_step else ""
    return (
        f"validation rows: {found} after {best}{alike} ({own.path}); now training on these rows too, from the "
        f"start, {num_of(changes['train.max_steps'], 'step')}"
    )


def recipe_of(config: Path | str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the fields of a recipe except those that `fit` decides; None if no recipe is given."""
    if config is None:
        return None
    raw = dict(config) if isinstance(config, Mapping) else read_config(config)
    return {name: value for name, value in raw.items() if name not in ("data", "run", TUNE)}


class Features(NamedTuple):
    """Which of a schema's statistics are inputs."""

    columns: int
    """The most columns that one of them counts together; 0: there are none."""
    by: str | None = None
    """Their `statistics_by`."""
    clock: bool = False
    """Whether hours and weekdays of times are inputs too."""

    @property
    def name(self) -> str:
        rule = self.by if self.by in (None, "time", "rows") else "groups"
        size = ("none", "singles", "pairs", "triples")[min(self.columns, 3)]
        return size + (f"-{rule}" if rule else "") + ("-clock" if self.clock else "")

    def of(self, opened: OpenedSource) -> OpenedSource:
        """Returns the source with these inputs alone."""
        value = opened.schema.to_json()
        value |= {name: [*value[name], *more] for name, more in opened.clock.items() if self.clock}
        kept = [spec for spec in value["statistics"] if len(spec["columns"]) <= self.columns]
        schema = parse_schema(value | {"statistics": kept, "statistics_by": self.by}, where="choice")
        return opened.with_schema(schema) if self.clock else replace(opened, schema=schema)


def candidates(schema: Schema) -> list[Features]:
    """Returns the features to choose among, the plainest first."""
    rules = ["time", "rows"] if schema.time is not None else ["rows"]
    rules = rules if schema.statistics_by is None else [schema.statistics_by]
    sizes = sorted({len(spec.columns) for spec in schema.statistics})
    return [Features(0), *(Features(size, rule) for size in sizes for rule in rules)]


class _Tried(NamedTuple):
    """A candidate that was trained."""

    features: Features
    run: RunFolder
    losses: NDArray[np.float64]
    """By part of the validation rows."""

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def outcome(self, chosen: _Tried) -> Candidate:
        epochs = int(self.run.options()["train.epochs"])
        return Candidate(epochs, self.loss, *difference(self.losses, chosen.losses), self.run.record.train_s or 0.0)


def plainest(tried: Sequence[_Tried]) -> _Tried:
    """Returns the first of the candidates whose loss is within a standard error of the lowest."""
    best = min(tried, key=lambda each: each.loss)
    found = ((each, *difference(each.losses, best.losses)) for each in tried)
    return next(each for each, worse, error in found if worse <= error)


class Selection:
    """Runs that find by validation rows how many steps to train, and with `choice` which features and how many epochs.

    Runs that an earlier call finished are used again; others are made again.
    """

    def __init__(self, folder: RunFolder, opened: OpenedSource, asked: Asked, config: Config, *, choice: bool) -> None:
        """config: of what is asked, but for the recipe."""
        self.opened, self.run = opened, folder
        """The source with what was chosen, and the run that found the steps, or one that was interrupted."""
        self.options: dict[str, Any] = {}
        """What the last run has otherwise than `run`."""
        self._folder, self._asked, self._model = folder, asked, config.model.name
        is_fixed = any(name.startswith(("train.max_steps", "optimizer.schedule")) for name in asked.given)
        has_losses = not config.model.trained_for.retrieves
        self._chooses = choice and not (is_fixed or asked.recipe) and has_losses and bool(opened.schema.statistics)
        self._sets_members = "members" in MODELS[self._model].small and "model.members" not in asked.given
        self._sample = min(1.0, MOST_ROWS / max(1, opened.source.scout().num_rows))
        self._tried: list[_Tried] = []
        self._is_told = False
        """Whether it was said what was found of the rows, which is the same for all candidates."""

    def runs(self) -> Generator[list[Job], None, None]:
        """Yields the jobs to train before more are asked for. Raises Interrupted if a candidate was interrupted."""
        path = self._folder.path / SELECTION
        if not self._chooses:
            self._folder.update(choice=None)
            self.run = yield from self._whole(path)
            return
        if is_taken(path / RUN):
            remove(path, within=self._folder.path)
        found = yield from self._try(candidates(self.opened.schema), "")
        better = sorted(found, key=lambda each: each.loss)[: max(2, len(found) // 2)]
        kept = [each.features for each in found if each in better]
        self._give_back(kept)
        last = yield from self._try(kept, "-full")
        chosen = plainest(last)
        if self.opened.clock:
            last += yield from self._try([chosen.features._replace(clock=True)], "-full")
            lower, error = difference(chosen.losses, last[-1].losses)
            chosen = last[-1] if lower > error else chosen
        is_free = self._sample == 1 and "train.epochs" not in self._asked.given
        if is_free and chosen.run.record.ended == ALL_DONE:
            last += yield from self._try([chosen.features], "-long")
            chosen = min(chosen, last[-1], key=lambda each: each.loss)
        self._take(chosen, min(last, key=lambda each: each.loss))
        if self._sample < 1:
            self.run = yield from self._whole(self._folder.selection)

    def _take(self, chosen: _Tried, lowest: _Tried) -> None:
        """Says which candidate is chosen, and why; records them all, and frees the disk of the others."""
        folder, why = self._folder, "has the lowest loss on validation rows"
        if lowest is not chosen:
            less, error = difference(chosen.losses, lowest.losses)
            why = f"is plainer than {lowest.name}, whose loss is lower by {less:.2g} +- {error:.2g}: noise"
        self._asked.announce(folder, f"chosen: {chosen.name}, which {why} (--no-choice: all that was guessed)")
        outcomes = {each.name: each.outcome(chosen) for each in self._tried}
        folder.update(choice=Choice(chosen.name, chosen.name if self._sample == 1 else WHOLE, outcomes))
        self.opened = chosen.features.of(self.opened)
        if self._sample < 1:  # they know nothing of the steps for all rows
            self._give_back([])
            return
        self.run = chosen.run
        self._give_back([chosen.features])
        if self._sets_members:
            recipe = choose_recipe((chosen.run.record.rows or {})["train"], model=self._model)
            self.options = {"model.members": recipe["model.members"]}

    def _whole(self, path: Path) -> Generator[list[Job], None, RunFolder]:
        """The run on all rows."""
        asked, opened, rows = self._asked, self.opened, self._folder.path / ROWS
        own, jobs = self._begun(path, opened, lambda own: asked.config(own, asked.packed(own, opened, rows=rows)))
        if jobs:
            yield jobs
        return own

    def _try(self, several: Sequence[Features], length: str) -> Generator[list[Job], None, list[_Tried]]:
        """Trains candidates, or finds the runs that did."""
        begun, jobs = list[tuple[Features, RunFolder]](), list[Job]()
        for features in several:
            path, opened = self._folder.path / SELECTION / (features.name + length), features.of(self.opened)
            first = path.with_name(features.name + ("-full" if features.clock else ""))
            decide = functools.partial(self._config, opened, first, LENGTHS[length])
            own, more = self._begun(path, opened, decide)
            begun, jobs = [*begun, (features, own)], [*jobs, *more]
        if jobs:
            yield jobs
        return [self._tried_by(features, RunFolder.open(own.path)) for features, own in begun]

    def _tried_by(self, features: Features, own: RunFolder) -> _Tried:
        """What the run of a candidate found, which is said."""
        if own.record.status != "finished":
            raise Interrupted(f"{own.path} was stopped; the same command goes on behind what has finished")
        record, losses = own.record, losses_by_step(own.measurements())
        found = _Tried(features, own, losses[step_to_stop_at(losses)])
        self._tried.append(found)
        figures = record.trained_for.line((record.metrics or {})["val"])
        self._asked.announce(self._folder, f"{found.name}: {figures} on validation rows, {record.train_s or 0.0:.1f} s")
        return found

    def _config(self, opened: OpenedSource, first: Path, share: float, own: RunFolder) -> Config:
        """The config of a candidate. first: its first run, for which rows are packed. share: of the recipe's epochs."""
        quiet, rows = replace(self._asked, quiet=True), self._folder.path / ROWS
        asked, self._is_told = quiet if self._is_told else self._asked, True
        dataset = asked.packed(own, opened, first / "data", rows=rows, sample=self._sample)
        more = {"train.epochs": max(1, round(share * quiet.config(own, dataset).train.epochs))}
        more |= {"model.members": MEMBERS} if self._sets_members else {}
        return replace(quiet, changes=[*quiet.changes, *as_overrides(more)]).config(own, dataset)

    def _begun(
        self, path: Path, opened: OpenedSource, decide: Callable[[RunFolder], Config]
    ) -> tuple[RunFolder, list[Job]]:
        """The run at `path`, and it as something to train, if it has not finished."""
        if is_taken(path / CONFIG) and (found := RunFolder.open(path)).record.status == "finished":
            return found, []
        if is_taken(path / CONFIG) or not is_taken(path / RUN):
            remove(path, within=self._folder.path)
        with RunFolder.begin(path, name=SELECTION, preparation=fingerprint(opened)) as own:
            return own, [(own, decide(own), self._asked.quiet or (self._chooses and path.name != WHOLE))]

    def _give_back(self, kept: Sequence[Features]) -> None:
        """Removes packed rows except those of the features that are kept, and weights except those of `run`."""
        for each in self._tried:
            names = [] if each.run is self.run else ["checkpoints", "encoder"]
            for name in [*names, *([] if each.features in kept else ["data"])]:
                remove(each.run.path / name, within=self._folder.path)

"""What `fit` does before its last run: raw rows are packed, and validation rows choose features, epochs and steps.

    opened, own, more = select(folder, opened, asked, ...)                # trains RUN/selection, or candidates in it
    opened, asked = with_validation_rows(opened, own, more)               # what the last run trains
    config = asked.config(folder, asked.packed(folder, opened, ...))

Features are the schema's `statistics` here: none, those of one column, of up to two, of up to three, each by the rules
of `statistics_by`. All train on a short schedule, the better half on a full one, and the best of these for more epochs
too. Within one standard error of the lowest loss the plainest is taken: few validation rows cannot tell more.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from hotrow.run.folder import CONFIG, ROWS, RUN, RunFolder
from hotrow.run.record import Candidate, Choice
from hotrow.run.runs import train
from hotrow.run.selection import difference, losses_by_step, step_to_stop_at
from hotrow.setup.setup import SELECTION

MOST_ROWS = 500_000
"""Of a longer log, candidates train on a sample of about so many rows."""
MEMBERS = 2
"""Models of a candidate, whose mean is scored: a single one may be the best by luck."""
LENGTHS = {"": 1 / 3, "-full": 1.0, "-long": 1.6}
"""Epochs, as a share of the recipe's, by what the name of a run ends in. The learning rate falls to zero in each."""
WHOLE = "whole"
"""The run on all rows, if candidates had a sample."""


@dataclass(frozen=True)
class Asked:
    """What a user asked `fit` for besides rows."""

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
        with folder, nullcontext() if self.quiet else progress_bar() as progress:
            return prepare(opened, out, Options(sample=sample), progress=progress, announce=say, rows=rows)

    def config(self, folder: RunFolder, dataset: PackedDataset) -> Config:
        """The config of a run on a dataset; without a recipe, one is chosen for its number of rows, and said."""
        raw = {**(self.recipe or {}), "data": str(dataset.path), "run": str(folder.path)}
        with folder:
            config = make_config(apply_overrides(raw, self.changes), origin="fit")
            if self.recipe is not None:
                return config
            num_rows, given = dataset.split("train").num_rows, self.given
            sizes = {name: getattr(config.train, name) for name in ("batch_size", "epochs") if f"train.{name}" in given}
            validated = "val" in dataset.splits and dataset.split("val").num_rows > 0
            recipe = as_overrides(choose_recipe(num_rows, model=config.model.name, validated=validated, **sizes))
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
    """Returns whether rows are split into parts of stated sizes, of which one validates and another tests."""
    _, validation, test = opened.schema.split.fractions
    has_parts = not isinstance(opened.source, CriteoSource) and min(validation, test) > 0
    return has_parts and config.hot.schedule != "fae"  # which follows the loss on validation rows


def select(
    folder: RunFolder, opened: OpenedSource, asked: Asked, config: Config, *, choice: bool
) -> tuple[OpenedSource, RunFolder, dict[str, Any]]:
    """Finds by validation rows how many steps to train, and with `choice` which features, and for how many epochs.

    What an earlier call has finished is found again; what it has not is made again. config: of what is asked, but for
    the recipe. Returns the source with what was chosen, the run that found the steps, which may be interrupted, and
    options that the next one has otherwise. Raises Interrupted if a candidate was.
    """
    path = folder.path / SELECTION
    is_fixed = any(name.startswith(("train.max_steps", "optimizer.schedule")) for name in asked.given)
    if not choice or is_fixed or asked.recipe or not opened.schema.statistics or config.model.trained_for.retrieves:
        folder.update(choice=None)
        return opened, _trained(folder, path, opened, asked), {}
    if is_taken(path / RUN):
        remove(path, within=folder.path)
    return _Choice(folder, opened, asked, config.model.name).made()


def _trained(folder: RunFolder, path: Path, opened: OpenedSource, asked: Asked) -> RunFolder:
    """The run at `path`, below `folder`, that finds the best step by its validation rows."""
    with _begun(folder, path, opened) as own:
        if own.record.status != "finished":
            dataset = asked.packed(own, opened, rows=folder.path / ROWS)
            train(asked.config(own, dataset), folder=own, quiet=asked.quiet)
    return own


@contextmanager
def _begun(folder: RunFolder, path: Path, opened: OpenedSource) -> Iterator[RunFolder]:
    """The run at `path`, below `folder`: one that has finished, or one to train."""
    if is_taken(path / CONFIG) and (found := RunFolder.open(path)).record.status == "finished":
        yield found
        return
    if is_taken(path / CONFIG) or not is_taken(path / RUN):
        remove(path, within=folder.path)
    with RunFolder.begin(path, name=SELECTION, preparation=fingerprint(opened)) as own:
        yield own


def with_validation_rows(
    opened: OpenedSource, own: RunFolder, options: Mapping[str, Any], *, quiet: bool
) -> tuple[OpenedSource, Asked]:
    """Returns the source with its validation rows among those that train, and the recipe that a selection found: its
    own, up to its last good step, with all steps stretched by the rows that came to it, and with other `options`."""
    train_share, validation, test = opened.schema.split.fractions
    rows, recipe = own.record.rows or {}, read_config(own.path / CONFIG)
    config = make_config(recipe, origin=str(own.path / CONFIG))

    def stretched(steps: int) -> int:
        return round(steps * (rows["train"] + rows["val"]) / rows["train"])

    steps = stretched(_last_good_step(own))
    given = config.train.max_steps
    schedule = {name: stretched(steps) for name, steps in config.optimizer.schedule if isinstance(steps, int)}
    changes = {
        "train.max_steps": steps if given is None else min(steps, given),
        "train.eval_every": None,
        "train.early_stopping": None,
        **{f"optimizer.schedule.{name}": steps for name, steps in schedule.items()},
        **options,
    }
    opened = opened.with_options(fractions=(train_share + validation, 0.0, test))
    return opened, Asked(recipe_of(recipe), as_overrides(changes), quiet=quiet)


def _last_good_step(own: RunFolder) -> int:
    """Returns the step of the last weights that are, within noise, as good as those that a selection chose."""
    chosen = own.record.chosen_step or 0
    if own.record.monitor != own.record.trained_for.loss_figure:
        return chosen
    return step_to_stop_at(own.measurements(), chosen)


def selection_line(own: RunFolder, changes: Mapping[str, Any]) -> str:
    """Returns what a selection found, and what comes of it, in words."""
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

    @property
    def name(self) -> str:
        rule = self.by if self.by in (None, "time", "rows") else "groups"
        return ("none", "singles", "pairs", "triples")[min(self.columns, 3)] + (f"-{rule}" if rule else "")

    def of(self, opened: OpenedSource) -> OpenedSource:
        """Returns the source with these statistics alone."""
        value = opened.schema.to_json()
        kept = [spec for spec in value["statistics"] if len(spec["columns"]) <= self.columns]
        schema = parse_schema(value | {"statistics": kept, "statistics_by": self.by}, where="choice")
        return replace(opened, schema=schema)


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
    seconds: float
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
        return Candidate(epochs, self.loss, *difference(self.losses, chosen.losses), self.seconds)


def plainest(tried: Sequence[_Tried]) -> _Tried:
    """Returns the first of the candidates whose loss is within a standard error of the lowest."""
    best = min(tried, key=lambda each: each.loss)
    found = ((each, *difference(each.losses, best.losses)) for each in tried)
    return next(each for each, worse, error in found if worse <= error)


class _Choice:
    """The candidates of `fit`, each trained in a folder of RUN/selection."""

    def __init__(self, folder: RunFolder, opened: OpenedSource, asked: Asked, model: str) -> None:
        self._folder, self._opened, self._asked, self._model = folder, opened, asked, model
        self._sets_members = "members" in MODELS[model].small and "model.members" not in asked.given
        self._sample = min(1.0, MOST_ROWS / max(1, opened.source.scout().num_rows))
        self._tried: list[_Tried] = []

    def made(self) -> tuple[OpenedSource, RunFolder, dict[str, Any]]:
        """Trains the candidates; says and records which one is chosen, and why. See `select`."""
        found = [self._try(features, "") for features in candidates(self._opened.schema)]
        better = sorted(found, key=lambda each: each.loss)[: max(2, len(found) // 2)]
        kept = sorted({each.features for each in better}, key=[each.features for each in found].index)
        self._give_back(kept)
        chosen = plainest(last := [self._try(features, "-full") for features in kept])
        if self._sample == 1 and "train.epochs" not in self._asked.given:
            last.append(self._try(chosen.features, "-long"))
            chosen = plainest([chosen, last[-1]])
        lowest, why = min(last, key=lambda each: each.loss), "has the lowest loss on validation rows"
        if lowest is not chosen:
            less, error = difference(chosen.losses, lowest.losses)
            why = f"is plainer than {lowest.name}, whose loss is lower by {less:.2g} +- {error:.2g}: noise"
        self._asked.announce(self._folder, f"chosen: {chosen.name}, which {why} (--no-choice: all that was guessed)")
        return self._selected(chosen)

    def _selected(self, chosen: _Tried) -> tuple[OpenedSource, RunFolder, dict[str, Any]]:
        """Records the candidates, and frees the disk of all but the chosen one. If they had a sample of the rows, a run
        on all of them finds the steps."""
        folder, opened, own = self._folder, chosen.features.of(self._opened), chosen.run
        outcomes = {each.name: each.outcome(chosen) for each in self._tried}
        folder.update(choice=Choice(chosen.name, chosen.name if self._sample == 1 else WHOLE, outcomes))
        if self._sample < 1:
            self._give_back([])
            return opened, _trained(folder, folder.selection, opened, self._asked), {}
        self._give_back([chosen.features], own)
        recipe = choose_recipe((own.record.rows or {})["train"], model=self._model)
        return opened, own, {name: recipe[name] for name in ["model.members"] if self._sets_members}

    def _try(self, features: Features, length: str) -> _Tried:
        """Trains a candidate, or finds the run that did. What is packed for its first run serves the others."""
        began_s, opened, asked = time.monotonic(), features.of(self._opened), self._asked
        packed, rows = self._folder.path / SELECTION / features.name, self._folder.path / ROWS
        with _begun(self._folder, packed.with_name(features.name + length), opened) as own:
            if own.record.status != "finished":
                first = replace(asked, quiet=asked.quiet or bool(self._tried))
                dataset = first.packed(own, opened, packed / "data", rows=rows, sample=self._sample)
                config = self._config(own, dataset, LENGTHS[length])
                if train(config, folder=own, quiet=True).record.status != "finished":
                    raise Interrupted(f"{own.path} was stopped; the same command goes on behind what has finished")
        record, losses = own.record, losses_by_step(own.measurements())
        seconds = max(time.monotonic() - began_s, record.train_s or 0.0)  # of a run that was found its steps are known
        found = _Tried(features, own, seconds, losses.get(record.chosen_step or 0, losses[max(losses)]))
        self._tried.append(found)
        figures = record.trained_for.line((record.metrics or {})["val"])
        asked.announce(self._folder, f"{found.name}: {figures} on validation rows, {seconds:.1f} s")
        return found

    def _config(self, own: RunFolder, dataset: PackedDataset, share: float) -> Config:
        """The config of a candidate. share: of the recipe's epochs."""
        asked = replace(self._asked, quiet=True)
        more = {"train.epochs": max(1, round(share * asked.config(own, dataset).train.epochs))}
        more |= {"model.members": MEMBERS} if self._sets_members else {}
        return replace(asked, changes=[*asked.changes, *as_overrides(more)]).config(own, dataset)

    def _give_back(self, kept: Sequence[Features], run: RunFolder | None = None) -> None:
        """Removes packed rows except those of the features that are kept, and weights except those of `run`."""
        for each in self._tried:
            names = [] if each.run is run else ["checkpoints", "encoder"]
            for name in [*names, *([] if each.features in kept else ["data"])]:
                remove(each.run.path / name, within=self._folder.path)

"""The search space of `hotrow tune`: fields of a recipe, the values that they may have, and which to try next.

    tune:
      optimizer.dense.lr: {log: [1e-4, 1e-2]}    # a number between the two, drawn on a logarithmic scale
      model.dropout: {float: [0.0, 0.5]}         # a number between the two
      model.members: {int: [1, 4]}               # a whole number from 1 to 4
      model.embedding_dim: [8, 16, 32]           # one of these

The recipe's own values come first, then Optuna's sampler (TPE, Bergstra et al., 2011) chooses. It gets the list of
trials and nothing else, so that the same trials give the same next one, also after a kill.
"""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from pydantic import FiniteFloat, JsonValue
from pydantic.dataclasses import dataclass as record

from hotrow.base.records import STRICT, short
from hotrow.config.load import TUNE, apply_overrides, make_config, options, read_config, with_model
from hotrow.config.schema import Config

FIXED = {
    "data": "trials on other rows cannot be compared",
    "run": "tune makes the folders of its runs itself",
    "train.seed": "a seed is no choice, it is noise, which --seeds shows",
    "train.monitor": "trials are judged by it",
    "metrics.by": "it decides what trials are judged by",
    "model.objective": "metrics of different objectives cannot be compared",
    "calibration.method": "trials are judged by outputs before calibration",
    "calibration.negatives_kept": "it says how the rows were drawn",
}
"""Fields that cannot be searched, and why."""
MAX_DRAWS = 100
Values = dict[str, JsonValue]
"""A point of the space: values by dotted names of fields."""


@record(config=STRICT)
class Trial:
    """A recipe that was tried."""

    values: Values
    status: Literal["running", "stopped", "finished", "failed"] = "running"
    """`stopped`: others were better after as many steps."""
    figures: list[FiniteFloat] = field(default_factory=list)
    """The validation metric after each rung of the halving."""
    reason: str | None = None
    """Why it failed."""


@dataclass(frozen=True)
class Axis:
    """The values that a field may have: `choices`, or numbers from `low` to `high`."""

    kind: Literal["choice", "log", "float", "int"]
    choices: tuple[JsonValue, ...] = ()
    low: float = 0
    high: float = 0

    @classmethod
    def of(cls, given: Any, *, where: str) -> Axis:
        """Makes an axis of what a search space says. Raises ValueError, which begins with `where`."""
        if isinstance(given, list) and given:
            return cls("choice", tuple(given))
        kind: Any
        kind, ends = next(iter(given.items())) if isinstance(given, dict) and len(given) == 1 else ("", None)
        if kind not in ("log", "float", "int") or not isinstance(ends, list) or len(ends) != 2:
            forms = "[8, 16, 32], {log: [1e-4, 1e-2]}, {float: [0, 0.5]} or {int: [1, 4]}"
            raise ValueError(f"{where} is {short(given)}; write its values as one of {forms}")
        for end in ends:
            if type(end) is not int and (kind == "int" or type(end) is not float or not math.isfinite(end)):
                raise ValueError(f"{where}.{kind} is {short(ends)}; both must be {'whole ' * (kind == 'int')}numbers")
        if not ends[0] < ends[1] or (kind == "log" and ends[0] <= 0):
            first = "the first must be " + ("above 0 and " if kind == "log" else "") + "below the second"
            raise ValueError(f"{where}.{kind} is {short(ends)}, an empty range; {first}")
        low, high = ends if kind == "int" else map(float, ends)
        return cls(kind, low=low, high=high)

    def distribution(self, optuna: Any) -> Any:
        """Returns the axis as Optuna has it; choices by their places, because it knows no lists."""
        if self.choices:
            return optuna.distributions.CategoricalDistribution(range(len(self.choices)))
        if self.kind == "int":
            return optuna.distributions.IntDistribution(self.low, self.high)
        return optuna.distributions.FloatDistribution(self.low, self.high, log=self.kind == "log")

    def value(self, drawn: Any) -> Any:
        """Returns the value of a field for what Optuna drew; numbers in four digits, so that recipes can be read."""
        if self.choices:
            return self.choices[drawn]
        return int(drawn) if self.kind == "int" else min(self.high, max(self.low, float(f"{drawn:.4g}")))


def read_space(recipe: Mapping[str, Any], *, origin: str) -> dict[str, Axis]:
    """Returns the search space in the section `tune` of a recipe, or in the YAML file that it names. Each choice, and
    both ends of a range, is tried in the recipe. Raises ValueError, which names `origin`, the field and the cure, if
    there is no such field, if it may not be searched, or if the recipe refuses a value."""
    given = recipe.get(TUNE)
    if isinstance(given, str):
        origin = given
        given = read_config(given, what="search space", example="space.yaml", field="model.embedding_dim: [8, 16]")
    if not isinstance(given, dict) or not given:
        raise ValueError(
            f"{origin} does not say what to search; give it a section such as "
            "`tune: {optimizer.dense.lr: {log: [1e-4, 1e-2]}, model.embedding_dim: [8, 16, 32]}`"
        )
    known, space = list(options()), {}
    for name, values in given.items():
        where = f"{origin}: {TUNE}: {name}"
        if name not in known:
            inside = [path for path in known if path.startswith(f"{name}.") or path.endswith(f".{name}")]
            near = " or ".join(inside[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.5))
            hint = f"did you mean {near}?" if near else "docs/config.md lists the fields"
            raise ValueError(f"{where}: the recipe has no such field; {hint}")
        if name in FIXED:
            raise ValueError(f"{where} cannot be searched: {FIXED[name]}; remove it")
        space[name] = axis = Axis.of(values, where=where)
        for value in axis.choices or (axis.low, axis.high):
            own = config_at(recipe, {name: value}, origin=f"{where} {json.dumps(value)}").model
            if own.objective != (objective := config_at(recipe, {}, origin=origin).model.objective):
                raise ValueError(
                    f"{where}: {own.name} is trained for {own.objective}, the recipe for {objective}, and "
                    f"{FIXED['model.objective']}; leave {own.name} out"
                )
    return space


def own_values(config: Config, space: Mapping[str, Axis]) -> Values | None:
    """Returns the values that a config has for the fields of a space; None if one of them is outside."""
    found: Values = {}
    for name, axis in space.items():
        value: Any = config.model_dump(mode="json")
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        is_number = type(value) is int or (type(value) is float and axis.kind != "int")
        if not (value in axis.choices if axis.choices else is_number and axis.low <= value <= axis.high):
            return None
        found[name] = value
    return found


def recipe_at(recipe: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Returns the recipe with `values` and without `tune` and `run`; for another model, without options it lacks."""
    plain = {name: section for name, section in recipe.items() if name not in (TUNE, "run")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the space says which models there are
        plain = with_model(plain, values.get("model.name"))
    return apply_overrides(plain, [f"{name}={json.dumps(value)}" for name, value in values.items()])


def config_at(recipe: Mapping[str, Any], values: Values, *, origin: str) -> Config:
    """Returns `recipe_at` as a config. Raises ValueError naming `origin` if it is refused."""
    return make_config(recipe_at(recipe, values), origin=origin)


def load_optuna() -> Any:
    """Returns Optuna. Raises ValueError with the line that installs it if it is absent."""
    try:
        optuna = import_module("optuna")
    except ImportError as error:
        raise ValueError(f"hotrow tune needs Optuna ({error}): pip install 'hotrow[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def next_values(space: Mapping[str, Axis], trials: Sequence[Trial], *, sign: int) -> Values | None:
    """Returns what to try after `trials`; None if MAX_DRAWS draws found nothing new. Only these arguments decide. sign:
    1 if higher figures are better, else -1."""
    optuna = load_optuna()
    distributions = {name: axis.distribution(optuna) for name, axis in space.items()}
    for draw in range(MAX_DRAWS):
        sampler = optuna.samplers.TPESampler(seed=MAX_DRAWS * len(trials) + draw)
        study = optuna.create_study(sampler=sampler, direction="maximize" if sign > 0 else "minimize")
        for trial in trials:  # one that was stopped or has failed counts as pruned, the latter as worse than all
            places = {name: axis.choices.index(trial.values[name]) for name, axis in space.items() if axis.choices}
            finished = trial.status == "finished"
            told = optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if finished else optuna.trial.TrialState.PRUNED,
                value=trial.figures[-1] if finished else None,
                params={**trial.values, **places},
                distributions=distributions,
                intermediate_values=dict(enumerate(trial.figures)),
            )
            study.add_trial(told)
        drawn = study.ask(distributions).params
        values = {name: axis.value(drawn[name]) for name, axis in space.items()}
        if values not in [trial.values for trial in trials]:
            return values
    return None

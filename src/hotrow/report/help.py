"""What would help a run most: gains that the cost model predicted, and bounds that the run's own record proves.

A prediction was made before the run (forecast/changes.py); its ratio to the prediction of the run as it is scales the
measured speed. A bound is arithmetic: what does not take time cannot be saved. It does not say that the gain can be
had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotrow.forecast.changes import MORE_THREADS, change_of
from hotrow.report.facts import RunFacts, mapping_in, number_in, points

MIN_TRAIN_S = 60.0
MIN_GAIN = 0.005
"""Gains below this share of training time are not worth a line."""


@dataclass(frozen=True)
class Idea:
    """Something that would help."""

    text: str
    gain: float
    """The predicted gain in speed, or the most that could be saved as a share of training time; 0: neither."""
    figure: str
    """The gain in words."""
    predicted: bool = False
    """Whether the cost model was asked; otherwise `gain` is an upper bound."""
    between: str = ""
    """What the gain may be, by the error of the model."""
    samples_per_s: float | None = None
    """What the run would reach."""


def ideas(run: RunFacts) -> list[Idea]:
    """Returns what would help: predicted gains, then upper bounds, then what is not about time; largest gain first.

    Nothing of a run of seconds: nobody waits for it.
    """
    if (seconds := number_in(run.record, "train_s")) is not None and seconds < MIN_TRAIN_S:
        return []
    return [*_predicted(run), *_bounds(run), *_quality(run)]


def _predicted(run: RunFacts) -> list[Idea]:
    """Returns what was predicted to make the run faster, and what could not be predicted."""
    changes, error = mapping_in(run.record, "predicted").get("changes"), number_in(run.record, "predicted", "error")
    measured = number_in(run.record, "samples_per_s")
    found = []
    for change in changes if isinstance(changes, list) else ():
        if not isinstance(change, Mapping):
            continue
        gain, what = number_in(change, "gain"), str(change.get("what"))
        modelled = "; modelled, because nobody measured that machine" if change.get("modelled") is True else ""
        if gain is None:
            found.append(Idea(f"{what}: {change.get('cannot')}", 0.0, "not predicted", predicted=True))
        elif gain >= MIN_GAIN:
            least, most = (1 + gain) / (1 + (error or 0)) - 1, (1 + gain) * (1 + (error or 0)) - 1
            between = "" if error is None else f"{least:+.0%} to {most:+.0%}"
            speed = None if measured is None else measured * (1 + gain)
            figure = f"{gain:+.0%}"
            idea = Idea(what + modelled, gain, figure, predicted=True, between=between, samples_per_s=speed)
            found.append(idea)
    return sorted(found, key=lambda idea: -idea.gain)


def _bounds(run: RunFacts) -> list[Idea]:
    """Returns what could save time, with the most that it could save."""
    record = run.record
    phases = phases_of(record)
    total = sum(phases.values())
    found = []

    def saves(gain: float, text: str) -> None:
        if gain >= MIN_GAIN:
            found.append(Idea(text, gain, f"at most {gain:.0%}" if gain >= 0.095 else f"at most {gain:.1%}"))

    if total:
        waiting = number_in(record, "memory", "stall_share") or 0.0
        share = {phase: ms / total for phase, ms in phases.items()}
        threads, cores = number_in(record, "backend", "threads"), number_in(record, "host", "usable_cores")
        if waiting:
            saves(waiting, "With more DRAM, a faster disk or a longer look-ahead, steps would not wait for rows.")
        # Steps wait for rows as later batches are announced; without look-ahead, as rows are looked up.
        in_data = min(waiting, share.get("data", 0.0))
        rows = share.get("lookup", 0.0) + share.get("update", 0.0) - (waiting - in_data)
        fewer = "fewer bytes a row (train.precision, embedding_dim)"
        saves(rows, f"Faster memory or {fewer} would speed up looking rows up and updating them.")
        saves(share.get("dense", 0.0), "Narrower layers, a faster processor or a GPU would speed up the dense layers.")
        saves(share.get("data", 0.0) - in_data, "Packed data in memory or on a faster disk would give batches sooner.")
        answered = change_of(MORE_THREADS, mapping_in(record, "predicted"))
        if threads and cores and threads < cores and answered is None:
            text = (
                f"The run could use all {cores:.0f} cores: it used {threads:.0f} (train.threads). The bound assumes "
                "perfect scaling."
            )
            saves(1 - threads / cores, text)
    return sorted(found, key=lambda idea: -idea.gain)


def phases_of(record: Any) -> dict[str, float]:
    """Returns milliseconds of a step by phase."""
    phases = mapping_in(record, "step_ms")
    return {str(phase): ms for phase in phases if (ms := number_in(phases, phase)) is not None}


def _quality(run: RunFacts) -> list[Idea]:
    """Returns what the validation curve shows: a better model was there before the last step."""
    name, measure = next(iter(run.objective.measures.items()))
    curve = points(run.lines, "eval", name, split="val")
    if len(curve) < 2:
        return []
    step, best = max(curve, key=lambda point: measure.sign * point[1])
    last = curve[-1][1]
    if abs(best - last) < 1e-4 * abs(best) or run.options.get("train.early_stopping", "null") != "null":
        return []
    text = (
        f"train.early_stopping would keep the best model: the validation {measure.title} was {best:.4f} at step "
        f"{step:,.0f} and {last:.4f} in the last evaluation. The gain is the difference on that split."
    )
    return [Idea(text, 0.0, f"{best - last:+.4f} {measure.title}")]

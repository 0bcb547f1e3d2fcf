"""What would help a run most, with the most that each could gain: only what the run's own record proves.

A bound is arithmetic: what does not take time cannot be saved. It says nothing of whether the gain can be had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.report.facts import RunFacts, mapping_in, number_in, points

LEAST_GAIN = 0.005
"""Gains below this share of training time are not worth a line."""


@dataclass(frozen=True)
class Idea:
    """Something that would help."""

    text: str
    gain: float
    """The most it can save, as a share of training time; 0 if it is not about time."""
    figure: str
    """The gain in words."""


def ideas(run: RunFacts) -> list[Idea]:
    """Returns what would help, the largest gain first."""
    record = run.record
    phases = phases_of(record)
    total = sum(phases.values())
    found = []

    def saves(gain: float, text: str) -> None:
        if gain >= LEAST_GAIN:
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
        if threads and cores and threads < cores:
            text = (
                f"The run could use all {cores:.0f} cores: it used {threads:.0f} (train.threads). The bound assumes "
                "perfect scaling."
            )
            saves(1 - threads / cores, text)
    return [*sorted(found, key=lambda idea: -idea.gain), *_quality(run)]


def phases_of(record: Any) -> dict[str, float]:
    """Returns milliseconds of a step by phase."""
    phases = mapping_in(record, "step_ms")
    return {str(phase): ms for phase in phases if (ms := number_in(phases, phase)) is not None}


def _quality(run: RunFacts) -> list[Idea]:
    """Returns what the validation curve shows: a better model was there before the last step."""
    curve = points(run.lines, "eval", "auc", split="val")
    if len(curve) < 2:
        return []
    step, best = max(curve, key=lambda point: point[1])
    last = curve[-1][1]
    if best - last < 1e-4 or run.options.get("train.early_stopping", "null") != "null":
        return []
    text = (
        f"train.early_stopping would keep the best model: the validation AUC was {best:.4f} at step {step:,.0f} and "
        f"{last:.4f} in the last evaluation. The gain is the difference on that split."
    )
    return [Idea(text, 0.0, f"+{best - last:.4f} AUC")]

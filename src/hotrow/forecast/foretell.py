"""The one forecast: what a step of a setup will take on a machine, and what would make it faster.

Before a run, in `hotrow plan`, for several machines and in studies, the same Setup has the same forecast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from hotrow.base.records import Amount, Count
from hotrow.costs.cost import BLIND_ERROR
from hotrow.costs.hardware import why_unknown
from hotrow.forecast.changes import changes
from hotrow.setup.setup import Setup

QUICK_ROWS = 5_000_000
"""Rows whose accesses are looked at within a second, for predictions that the run itself does not need."""


class PredictedChange(TypedDict):
    """What a change of the machine or of an option would do, as `forecast/changes.py` says."""

    what: str
    samples_per_s: Amount | None
    gain: float | None
    cannot: str | None
    modelled: bool


class Predicted(TypedDict):
    """What `costs/cost.py` predicted of a step before the first one; see docs/memory-plan.md."""

    step_ms: dict[str, Amount]
    """By phase, as `RunRecord.step_ms`."""
    wait_ms: Amount
    """The wait for rows from disk: a part of `data`, or of `lookup` without look-ahead."""
    samples_per_s: Amount
    binds: str
    hardware: dict[str, str]
    """Name and date of the hardware file."""
    exchange_ms: NotRequired[Amount]
    """What the exchanges of several ranks take; it is a part of all phases."""
    wire_bytes_per_step: NotRequired[dict[str, Count]]
    """What a rank sends, by purpose, as `ranks.wire_bytes_per_step`."""
    error: NotRequired[Amount]
    """By how much such predictions are wrong, as a share: `costs/cost.py`'s BLIND_ERROR."""
    changes: NotRequired[list[PredictedChange]]
    """What would make it faster, the best first."""


@dataclass(frozen=True)
class Forecast:
    """What is known of a step before the first one."""

    predicted: Predicted | None = None
    not_predicted: str | None = None
    """Why nothing is predicted, if figures of a machine are known that might have told it."""


def foretell(setup: Setup, *, what_helps: bool = False) -> Forecast:
    """Returns the forecast of a run of `setup` on the machine by whose figures it was decided.

    what_helps: whether to predict what would make it faster, too. A run does not fail for want of a forecast.
    """
    planner = setup.planner
    if planner.hardware is None:
        return Forecast(not_predicted=why_unknown())
    try:
        found = planner.step(setup.below)
        others = changes(planner, setup.below, most_rows=QUICK_ROWS) if what_helps else []
    except Exception as error:
        return Forecast(not_predicted=str(error) or type(error).__name__)
    fields = {name: value for name, value in asdict(found).items() if value is not None}
    fields |= {"error": BLIND_ERROR, "changes": [asdict(each) for each in others]}
    machine = {"name": planner.hardware.name, "date": planner.hardware.date}
    return Forecast({**fields, "hardware": machine})  # type: ignore[arg-type]  # the fields are those of Step

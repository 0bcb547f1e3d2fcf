"""What models are trained for: a loss, metrics and scores. One file per objective, and the one list of them."""

from __future__ import annotations

from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.objectives.by_group import ClicksByGroup
from hotrow.objectives.objective import Objective
from hotrow.objectives.sampled_softmax import SampledSoftmax
from hotrow.objectives.squared_error import SquaredError

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective for objective in (BinaryCrossEntropy(), SquaredError(), SampledSoftmax())
}
"""By the name that `model.objective` selects; the first is the default."""
DEFAULT = next(iter(OBJECTIVES))
BY_GROUP = {ClicksByGroup.name: ClicksByGroup}
"""The objectives that can be judged by group as well, and their classes that do it."""


def objective_of(name: str, by: str | None = None) -> Objective:
    """Returns the objective called `name`. by: the feature whose values are groups to judge it by."""
    return OBJECTIVES[name] if by is None else BY_GROUP[name](by=by)

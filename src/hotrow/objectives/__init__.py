"""What models are trained for: a loss, metrics and scores. One file per objective, and the one list of them."""

from __future__ import annotations

from hotrow.objectives.binary import BinaryCrossEntropy
from hotrow.objectives.objective import Objective
from hotrow.objectives.squared_error import SquaredError

OBJECTIVES: dict[str, Objective] = {objective.name: objective for objective in (BinaryCrossEntropy(), SquaredError())}
"""By the name that `model.objective` selects; the first is the default."""
DEFAULT = next(iter(OBJECTIVES))

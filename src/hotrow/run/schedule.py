"""Learning rates as a function of the step: warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from hotrow.config.schema import ScheduleName

MIN_LR = 1e-7
"""The rate at which the quadratic decay ends; the value of the reference DLRM."""
START_SHARE, END_SHARE = 1 / 25, 1 / 25 / 1e4
"""The ends of one cycle as shares of its highest rate: the defaults of torch's OneCycleLR."""


class Schedule:
    """Sets every parameter group's `lr` to its initial value times a factor of the step alone, counted from 0:

        step < warmup_steps              (step + 1) / warmup_steps
        up to decay_start_step           1
        then, k = step + 1 - start       (1 - k / decay_steps)^2, the rate itself never below 1e-7
        from start + decay_steps - 1 on  as at the last step of the decay

    name: "quadratic" is the schedule above. "cosine" decays as torch's CosineAnnealingLR with T_max = decay_steps: from
    start on the factor is (1 + cos(pi * (step - start) / decay_steps)) / 2, and it is 0 from start + decay_steps on.
    "one_cycle" is torch's OneCycleLR: half a cosine up from 1/25 in warmup_steps, and another down to 1/250000 in
    decay_steps, which stays; it has no decay_start_step.
    optimizers: their groups' `lr` at construction is the initial value, so build the schedule before loading a state.
    decay_start_step: None means warmup_steps. The one deviation from the reference: between warm-up and decay the rate
    is the initial one, where the reference freezes the last warm-up step's (warmup_steps - 1) / warmup_steps of it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        name: ScheduleName = "quadratic",
        warmup_steps: int = 0,
        decay_start_step: int | None = None,
        decay_steps: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._initial = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self.name, self.warmup_steps, self.decay_steps = name, warmup_steps, decay_steps
        self.decay_start_step = warmup_steps if decay_start_step is None else decay_start_step

    def factor(self, step: int) -> float:
        """Returns what the initial rate is multiplied by at `step`."""
        start, steps = self.decay_start_step, self.decay_steps
        if self.name == "one_cycle":
            top = self.warmup_steps - 1  # the step with the highest rate
            if step <= top:
                return _from_one_to(START_SHARE, (top - step) / top)
            return _from_one_to(END_SHARE, min(1.0, (step - top) / steps))
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "cosine":
            return _from_one_to(0.0, min(1.0, max(0, step - start) / steps))
        decayed = min(step + 1 - start, steps - 1)
        return (1 - decayed / steps) ** 2 if steps and decayed > 0 else 1.0

    def apply(self, step: int) -> None:
        """Sets the rates for step number `step`."""
        factor = self.factor(step)
        floor = MIN_LR if self.name == "quadratic" and factor < 1.0 and step >= self.warmup_steps else 0.0
        # Groups are looked up anew each time: load_state_dict puts other dicts in their place.
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            for group, lr in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = max(floor, lr * factor)


def _from_one_to(last: float, share: float) -> float:
    """Returns the value at `share` of half a cosine that falls from 1 to `last`."""
    return last + (1 - last) * (1 + math.cos(math.pi * share)) / 2

"""Learning rates as a function of the step: warm-up and decay."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

MIN_LR = 1e-7
"""The rate at which the quadratic decay ends; the value of the reference DLRM."""


class Schedule:
    """Sets every parameter group's `lr` to its initial value times a factor of the step alone, counted from 0:

        step < warmup_steps              (step + 1) / warmup_steps
        up to decay_start_step           1
        then, k = step + 1 - start       (1 - k / decay_steps)^2, the rate itself never below 1e-7
        from start + decay_steps - 1 on  as at the last step of the decay

    optimizers: their groups' `lr` at construction is the initial value, so build the schedule before loading a state.
    decay_start_step: None means warmup_steps. The one deviation from the reference: between warm-up and decay the rate
    is the initial one, where the reference freezes the last warm-up step's (warmup_steps - 1) / warmup_steps of it.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        warmup_steps: int = 0,
        decay_start_step: int | None = None,
        decay_steps: int = 0,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._initial = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.decay_start_step = warmup_steps if decay_start_step is None else decay_start_step

    def factor(self, step: int) -> float:
        """Returns the factor of the initial rate at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        steps = self.decay_steps
        decayed = min(step + 1 - self.decay_start_step, steps - 1)
        return (1 - decayed / steps) ** 2 if steps and decayed > 0 else 1.0

    def apply(self, step: int) -> None:
        """Sets the rates for step number `step`."""
        factor = self.factor(step)
        floor = MIN_LR if factor < 1.0 and step >= self.warmup_steps else 0.0
        # Groups are looked up anew each time: load_state_dict puts other dicts in their place.
        for optimizer, initial in zip(self._optimizers, self._initial, strict=True):
            for group, lr in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = max(floor, lr * factor)

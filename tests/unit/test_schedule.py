"""The learning-rate schedule against a transcription of the reference DLRM's LRPolicyScheduler."""

from typing import Any

import pytest
import torch

from hotrow.run.schedule import Schedule


def reference_lr(step: int, base: float, warmup: int, start: int, decay: int) -> float:
    """facebookresearch/dlrm dlrm_s_pytorch.py, LRPolicyScheduler.get_lr; its _step_count is 1 at the first step."""
    count = step + 1
    if count < warmup:
        return base * (1.0 - (warmup - count) / warmup)
    if decay == 0 or count < start:
        return (
            base  # where there is a decay, the reference stays at its last warm-up rate: the deviation in the docstring
        )
    count = min(count, start + decay - 1)  # "freeze at last"
    return max(0.0000001, base * ((decay - (count - start)) / decay) ** 2)


def rates(steps: int, lr: float, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = Schedule([optimizer], **options)
    found = []
    for step in range(steps):
        schedule.apply(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize(
    ("warmup", "start", "decay"), [(0, 0, 0), (7, 7, 0), (0, 4, 6), (5, 5, 9), (5, 12, 10), (1, 1, 1)]
)
@pytest.mark.parametrize("base", [0.1, 1e-6])
def test_against_the_reference_dlrm(warmup: int, start: int, decay: int, base: float) -> None:
    options = {"warmup_steps": warmup, "decay_steps": decay} | ({"decay_start_step": start} if decay else {})
    expected = [reference_lr(step, base, warmup, start, decay) for step in range(40)]
    assert rates(40, base, **options) == pytest.approx(expected, rel=1e-12)


def test_rates_depend_on_the_step_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = Schedule([optimizer], warmup_steps=4, decay_start_step=6, decay_steps=5)
    forwards = rates(15, 0.5, warmup_steps=4, decay_start_step=6, decay_steps=5)
    for step in reversed(range(15)):
        schedule.apply(step)
        assert optimizer.param_groups[0]["lr"] == forwards[step]


def test_every_group_keeps_its_own_rate() -> None:
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.25}])
    Schedule([optimizer], warmup_steps=2).apply(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]

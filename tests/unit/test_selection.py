"""The last evaluation that is as good as the best one, within the noise of their difference."""

from typing import Any

import numpy as np
from sklearn.metrics import log_loss

from hotrow.objectives import OBJECTIVES
from hotrow.run.selection import NUM_PARTS, losses_by_step, losses_of_parts, step_to_stop_at
from loops import looped


def line(step: int, losses: Any) -> dict[str, Any]:
    return {"kind": "eval", "split": "val", "step": step, "losses": list(losses)}


@looped("num_rows", [1, 40, 1000])
def test_losses_of_parts_are_means_of_log_losses(num_rows: int) -> None:
    generator = np.random.default_rng(0)
    outputs, labels = generator.normal(size=num_rows).astype(np.float32), generator.random(num_rows) < 0.4
    objective = OBJECTIVES["binary_cross_entropy"]
    metrics = objective.metrics()
    metrics.update(outputs, labels.astype(np.float32))
    found = losses_of_parts(metrics, objective)
    parts = [slice(k, None, NUM_PARTS) for k in range(min(NUM_PARTS, num_rows))]
    expected = [log_loss(labels[own], 1 / (1 + np.exp(-outputs[own])), labels=[False, True]) for own in parts]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@looped(("worse", "step"), [(-0.1, 30), (0.4, 30), (0.6, 10), (3.0, 10)])
def test_a_later_step_counts_if_it_is_within_half_a_standard_error(worse: float, step: int) -> None:
    generator = np.random.default_rng(1)
    best, noise = generator.random(NUM_PARTS), generator.normal(size=NUM_PARTS)
    error = noise.std(ddof=1) / NUM_PARTS**0.5
    later = best + noise - noise.mean() + worse * error
    assert step_to_stop_at({5: best + 1, 10: best, 20: best + 1, 30: later}) == step


def test_an_evaluation_counts_with_its_neighbours_and_a_single_part_tells_no_noise() -> None:
    lines = [line(5, [0.4, 1]), {"kind": "train", "step": 11}, line(10, [0.1, 1]), line(20, [0.4, 4])]
    found = losses_by_step(lines)
    assert {step: own.tolist() for step, own in found.items()} == {5: [0.25, 1], 10: [0.3, 2], 20: [0.25, 2.5]}
    assert step_to_stop_at({10: np.array([0.3]), 20: np.array([0.31])}) == 10

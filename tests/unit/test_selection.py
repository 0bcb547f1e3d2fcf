"""The last evaluation that is as good as the best one, within the noise of their difference."""

from typing import Any

import numpy as np
from sklearn.metrics import log_loss

from hotrow.objectives import OBJECTIVES
from hotrow.run.selection import NUM_PARTS, losses_of_parts, step_to_stop_at
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
    lines = [line(5, best), line(10, best), {"kind": "train", "step": 11}, line(20, best + 1), line(30, later)]
    assert step_to_stop_at(lines, 10) == step


def test_the_best_step_stays_if_nothing_is_known_of_noise() -> None:
    assert step_to_stop_at([], 10) == 10
    assert step_to_stop_at([line(10, [0.3]), line(20, [0.3])], 10) == 10

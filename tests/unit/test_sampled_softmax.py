"""The softmax over items: its loss and gradients against loops over samples, and the model that it is least for."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hotrow.objectives.sampled_softmax import STRETCH, SampledSoftmax
from loops import looped


def by_loops(outputs: Tensor, labels: Tensor) -> Tensor:
    """The sum of losses, item by item in float64: of each item once, its candidates in the stretch counted."""
    total = outputs.new_zeros((), dtype=torch.float64)
    for own, facts in zip(outputs.double().split(STRETCH), labels.split(STRETCH), strict=True):
        user, item = own.chunk(2, dim=1)
        ids = facts[:, 1].tolist()
        for i, (label, mine, _) in enumerate(facts.tolist()):
            candidates = {}
            for j, other in enumerate(ids):
                at = i if other == mine else j  # the sample's own vector stands for its item
                candidates.setdefault(other, []).append(user[i] @ item[at] - facts[at, 2])
            weights = {number: torch.logsumexp(torch.stack(scores), 0) for number, scores in candidates.items()}
            total = total + label * (torch.logsumexp(torch.stack([*weights.values()]), 0) - weights[mine])
    return total


def drawn(num_samples: int, num_items: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    share = torch.rand(num_items, generator=g, dtype=torch.float64)
    item = torch.randint(0, num_items, (num_samples,), generator=g)
    label = (torch.rand(num_samples, generator=g) < 0.7).double()
    outputs = torch.randn(num_samples, 12, generator=g)
    return outputs, torch.stack([label, item.double(), torch.log(share / share.sum())[item]], dim=1)


@looped(("num_samples", "num_items"), [(1, 3), (2, 1), (40, 12), (64, 900), (STRETCH + 3, 50)])
def test_loss_and_gradients_against_loops(num_samples: int, num_items: int) -> None:
    outputs, labels = drawn(num_samples, num_items, seed=num_samples)
    mine, theirs = outputs.clone().requires_grad_(), outputs.clone().requires_grad_()
    loss = SampledSoftmax().loss(mine, labels, num_samples)
    if num_samples > STRETCH:  # loops over all would take minutes: the stretches are what is to be seen
        pairs = zip(theirs.split(STRETCH), labels.split(STRETCH), strict=True)
        parts = [SampledSoftmax().summed(*each) for each in pairs]
        truth = sum(parts, torch.zeros(())) / num_samples
    else:
        truth = by_loops(theirs, labels) / num_samples
    loss.backward()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert math.isfinite(loss.item()) and loss.item() >= 0


def test_large_scores_overflow_nothing() -> None:
    outputs, labels = drawn(50, 9, seed=1)
    outputs = (30 * outputs).requires_grad_()
    loss = SampledSoftmax().loss(outputs, labels, 50)
    loss.backward()
    assert loss.item() == pytest.approx(float(by_loops(outputs.detach(), labels)) / 50, rel=1e-4)
    assert bool(outputs.grad.isfinite().all())


P = np.array([[0.4, 0.3, 0.2, 0.1], [0.05, 0.05, 0.1, 0.8]])
"""P(item | user) of two users, of whom the first makes 70 % of the samples."""
USERS = np.array([0.7, 0.3])


def left_out(z: Tensor, same: Tensor) -> Tensor:
    """The losses of samples if others with the same item are left out, and not counted."""
    z = z.masked_fill(same & ~torch.eye(len(z), dtype=torch.bool), -math.inf)
    return torch.logsumexp(z, 1) - z.diagonal()


def gradient(log_share: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The largest derivative of the expected loss of three samples by a score, at scores that are log P."""
    joint = torch.from_numpy(USERS[:, None] * P).flatten()
    scores = torch.from_numpy(np.log(P)).float().requires_grad_()
    total = torch.zeros(())
    for batch in itertools.combinations_with_replacement(range(8), 3):  # the loss knows no order
        user, item = (torch.tensor([k // 4 for k in batch]), torch.tensor([k % 4 for k in batch]))
        orders = len(set(itertools.permutations(batch)))
        outputs = torch.cat([scores[user], torch.eye(4)[item]], dim=1)
        labels = torch.stack([torch.ones(3).double(), item.double(), log_share[item].double()], dim=1)
        total = total + orders * float(joint[list(batch)].prod()) * loss(outputs, labels)
    (found,) = torch.autograd.grad(total, scores)
    return float(found.abs().max())


def test_the_loss_is_least_for_the_true_softmax() -> None:
    """However few samples are compared, and however often two of them have one item; by no other correction."""
    share = torch.from_numpy(np.log(USERS @ P))
    assert gradient(share, SampledSoftmax().summed) < 1e-6
    assert gradient(torch.zeros(4), SampledSoftmax().summed) > 0.01, "without it"
    assert gradient(-share, SampledSoftmax().summed) > 0.01, "with the other sign"

    def uncounted(outputs: Tensor, labels: Tensor) -> Tensor:
        user, item = outputs.chunk(2, dim=1)
        return left_out(user @ item.T - labels[:, 2].float(), labels[:, 1, None] == labels[:, 1]).sum()

    assert gradient(share, uncounted) > 0.01, "if samples with the same item are left out"


def test_figures_against_counts_by_hand() -> None:
    place = np.array([0, 19.5, 20, 99, 100, -1, 3, 7], np.float32)
    label = np.array([1, 1, 1, 1, 1, 1, 0, 0])
    metrics = SampledSoftmax().metrics()
    metrics.update(place, label)
    found = metrics.figures()
    assert (found["num_rows"], found["num_positives"], found["undefined"]) == (8, 6, None)
    assert found["recall_20"] == pytest.approx(2 / 6) and found["recall_100"] == pytest.approx(4 / 6)
    assert found["mrr"] == pytest.approx((1 + 1 / 20.5 + 1 / 21 + 1 / 100 + 1 / 101) / 6)
    assert found["log_rank"] == pytest.approx(sum(map(math.log, (1, 20.5, 21, 100, 101))) / 5)
    assert found["unseen"] == pytest.approx(1 / 6)
    assert "0.8333" in SampledSoftmax().lines(found)[0], "recall cannot be higher"


def test_metrics_without_a_positive_row_are_undefined() -> None:
    metrics = SampledSoftmax().metrics()
    metrics.update(np.zeros(3), np.zeros(3))
    found = metrics.figures()
    SampledSoftmax().check(found)
    assert found["recall_100"] is None and found["log_rank"] is None and found["undefined"]
    assert SampledSoftmax().verdict(found) and SampledSoftmax().lines(found)


def test_a_weight_counts_in_the_means_as_so_many_rows() -> None:
    place, label = np.array([0, 30, 400, -1, 5], np.float32), np.array([1, 1, 1, 1, 0])
    weights = np.array([2, 1, 3, 0, 4])
    weighed, repeated = SampledSoftmax().metrics(), SampledSoftmax().metrics()
    weighed.update(place, label, weights)
    repeated.update(place.repeat(weights), label.repeat(weights))
    mine, theirs = weighed.figures(), repeated.figures()
    for name in SampledSoftmax.optional:
        assert mine[name] == pytest.approx(theirs[name]), name


def test_influences_are_the_derivatives_of_the_figures() -> None:
    """By taking a little more of one row."""
    place, label = np.array([0, 30, 400, -1, 5], np.float32), np.array([1, 1, 1, 1, 0]) > 0
    weights, objective = np.array([2, 1, 3, 0.5, 4], np.float32), SampledSoftmax()
    found, before = objective.influences(place, label, weights), objective.measured(place, label, weights)
    assert {*found} == {*objective.measures}
    for name, own in found.items():
        assert own.mean() == pytest.approx(0, abs=1e-6)
        for i in range(5):
            more = weights.astype(np.float64) * (1 + 1e-5 * (np.arange(5) == i))
            change = (objective.measured(place, label, more)[name] - before[name]) / 1e-5
            assert own[i] / 5 == pytest.approx(change, abs=1e-4)


def test_a_weight_is_that_of_a_samples_loss() -> None:
    outputs, labels = drawn(40, 12, seed=2)
    weight = torch.rand(40, generator=torch.Generator().manual_seed(1))
    loss = SampledSoftmax().loss(outputs, labels, 40, weight)
    each = [SampledSoftmax().loss(outputs, only(labels, i), 1).item() for i in range(40)]
    assert loss.item() == pytest.approx(float(np.dot(each, weight.numpy())) / 40, rel=1e-5)


def only(labels: Tensor, i: int) -> Tensor:
    kept = labels.clone()
    kept[:, 0] = 0
    kept[i, 0] = labels[i, 0]
    return kept

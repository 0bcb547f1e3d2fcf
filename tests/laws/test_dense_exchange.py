"""The exchange of dense gradients against the tree on one process, to the bit, and its bytes against 2 (R - 1) / R."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hotrow.kernels import tree
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import PURPOSE, Outcome, sum_over_ranks
from loops import looped
from rank_threads import ThreadPool


@pytest.fixture
def pool() -> ThreadPool:
    return ThreadPool()


class Sums(NamedTuple):
    loss: torch.Tensor
    gradient: torch.Tensor


def parts_of(num_samples: int, micro_batches: int, length: int) -> list[Sums | None]:
    """Returns the sums of each micro-batch, of sizes that make the order of sums show; None: absent."""
    starts = tree.starts(num_samples, micro_batches)
    found: list[Sums | None] = []
    for part in range(micro_batches):
        generator = torch.Generator().manual_seed(part)
        scale = 10.0 ** torch.randint(-4, 5, (), generator=generator).item()
        gradient, loss = torch.randn(length, generator=generator) * scale, torch.rand((), generator=generator) * scale
        found.append(Sums(loss, gradient) if starts[part] < starts[part + 1] else None)
    return found


def add(one: Sums, other: Sums) -> Sums:
    return Sums(one.loss + other.loss, one.gradient + other.gradient)


class Found:
    def __init__(self, told: Outcome) -> None:
        self.total, self.found = Sums(told.loss, told.gradient().clone()), told.found
        self.stop, self.finite = told.stop, told.finite


def summed(comm: Communicator, num_samples: int, length: int) -> tuple[Found, int]:
    first, last = comm.ranks.held
    nodes = tree.sums(parts_of(num_samples, comm.ranks.micro_batches, length)[first:last], first, last, add)
    told = Found(sum_over_ranks(comm, nodes, length=length))
    return told, comm.counts.sent_bytes.get(PURPOSE, 0)


def total_of(num_samples: int, micro_batches: int, length: int) -> Sums:
    nodes = tree.sums(parts_of(num_samples, micro_batches, length), 0, micro_batches, add)
    whole = tree.total(nodes, (0, tree.width(micro_batches)), add)
    assert whole is not None
    return whole


@looped("num_samples", [64, 7, 2])
@looped(("num_ranks", "micro_batches"), [(1, 3), (2, 2), (2, 5), (3, 3), (3, 4), (3, 8), (4, 4), (4, 7)])
def test_against_a_tree_on_one_process(pool: ThreadPool, num_ranks: int, micro_batches: int, num_samples: int) -> None:
    length = 1003
    whole = total_of(num_samples, micro_batches, length)
    for told, _ in pool.run(summed, num_samples, length, num_ranks=num_ranks, micro_batches=micro_batches):
        assert torch.equal(told.total.gradient.view(torch.int32), whole.gradient.view(torch.int32))
        assert torch.equal(told.total.loss.view(1).view(torch.int32), whole.loss.view(1).view(torch.int32))
        assert (told.found, told.stop, told.finite) == ("", 0, True)


def test_a_gradient_shorter_than_the_ranks_are_many(pool: ThreadPool) -> None:
    for told, _ in pool.run(summed, 64, 2, num_ranks=4, micro_batches=4):
        assert torch.equal(told.total.gradient, total_of(64, 4, 2).gradient)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_on_the_wire(pool: ThreadPool, num_ranks: int) -> None:
    """Where ranges are whole subtrees, a rank sends 2 (R - 1) / R of the gradient's bytes, and little else."""
    length = 100_000
    least = 2 * (num_ranks - 1) / num_ranks * 4 * length
    for _, sent in pool.run(summed, 64, length, num_ranks=num_ranks, micro_batches=num_ranks):
        assert least <= sent <= 1.01 * least


def test_bytes_of_ranges_that_are_not_subtrees(pool: ThreadPool) -> None:
    """Of four micro-batches the third rank of three holds two, a subtree; of eight, the second holds 2, 3 and 4."""
    length = 99_999
    sent = [each for _, each in pool.run(summed, 64, length, num_ranks=3, micro_batches=8)]
    nodes = [len(tree.aligned(*tree.held(8, rank, 3))) for rank in range(3)]
    wanted = np.array([2 / 3 * 4 * length * (num + 1) for num in nodes])
    assert nodes == [1, 2, 2] and (sent >= wanted).all() and (sent <= 1.01 * wanted).all()


def heard(comm: Communicator, found: list[str], stop: list[int]) -> tuple[str, int]:
    first, _ = comm.ranks.held
    nodes = {(first, 1): Sums(torch.ones(()), torch.ones(5))}
    told = Found(sum_over_ranks(comm, nodes, length=5, found=found[comm.rank], stop=stop[comm.rank]))
    return told.found, told.stop


def test_all_ranks_hear_what_one_found_and_who_stops(pool: ThreadPool) -> None:
    text = "the gradient of 'Größe' is NaN"
    told = pool.run(heard, ["", text, "later"], [0, 0, 15], num_ranks=3, micro_batches=3)
    assert told == [(f"rank 1: {text}", 15)] * 3


def overflowed(comm: Communicator, place: int) -> tuple[Found, list[int], list[int]]:
    """Every rank's gradient is finite, their sum at `place` is not; meanwhile the ranks exchange something else."""
    gradient = torch.ones(9)
    gradient[place] = 3e38 if comm.rank < 2 else 0.0
    told = sum_over_ranks(comm, {(comm.rank, 1): Sums(torch.ones(()), gradient)}, length=9)
    between = [own.tolist() for own in comm.gather(torch.tensor([comm.rank]), purpose="other")]
    return Found(told), [*chain(*between)], comm.gather_number(7 + comm.rank, purpose="other")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_all_ranks_know_early_whether_the_total_is_finite(pool: ThreadPool, place: int, num_ranks: int) -> None:
    for told, between, numbers in pool.run(overflowed, place, num_ranks=num_ranks, micro_batches=num_ranks):
        assert not told.finite and told.total.gradient.isinf().nonzero().tolist() == [[place]]
        assert (between, numbers) == ([0, 1, 2][:num_ranks], [7, 8, 9][:num_ranks])


def few_weights(comm: Communicator, length: int) -> tuple[Found, bool]:
    told = sum_over_ranks(comm, {(comm.rank, 1): Sums(torch.ones(()), torch.ones(length))}, length=length)
    return Found(told), told.finite


@pytest.mark.parametrize("length", [0, 1, 2])
def test_fewer_weights_than_ranks(pool: ThreadPool, length: int) -> None:
    for told, finite in pool.run(few_weights, length, num_ranks=3, micro_batches=3):
        assert told.total.gradient.tolist() == [3.0] * length and told.total.loss == 3 and finite

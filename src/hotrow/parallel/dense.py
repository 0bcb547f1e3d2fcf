"""The exchange of a step: dense gradients and losses of all ranks, added in the tree, and what ranks must agree on.

    rank r      its sums {node: gradient}     slice s of each --to rank s-->   all nodes of slice s
    rank s      adds them in the tree         the total of slice s --to all--> the total gradient

With R ranks whose micro-batches are whole subtrees, a rank sends 2 (R - 1) / R of a gradient's bytes. gloo's own
all-reduce sends as many, but its order of sums depends on the number of ranks and on a value's place in the buffer.
Two ranks send each other whole gradients, which are as many bytes, and each adds up all of them: nobody waits twice.
The first message also carries each rank's losses, what it found that is not finite, and whether it has to stop, so that
all ranks skip, stop and log alike. It says too whether the rank's sums are so small that no total can overflow. If all
ranks say so, rows may be updated while the totals are on their way; if not, the ranks compare their slices first.

`OverRanks` does this for the weights of a model; `DenseExchange` stands in its place if there is one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hotrow.kernels import ops, tree
from hotrow.kernels.tree import Node
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.ranks import Ranks

PURPOSE = "dense"
"""What `ExchangeCounts.sent_bytes` counts the bytes of this exchange under."""
_HEAD = 4
"""Words before the nodes of a message: the number of nodes, the bytes of `found`, `stop`, and 1 if no total of the
rank's sums with as large ones of others can overflow."""


Meanwhile: TypeAlias = Callable[[], Callable[[], object]]
"""What to do while messages travel, if there are any; it may begin exchanges, and returns what waits for them."""


class DenseExchange:
    """Adds up what micro-batches sum, and agrees on what comes next: here for one process, which has all of them.

        loss = exchange.total(nodes, weights, found="", meanwhile=rows.prepare)
        rows.step()                        # unless something was found that is not finite
        exchange.finish()                  # from here on the weights have their gradients
        dense.step()

    signal: returns the signal that asks this process to stop, if one does.
    """

    found = ""
    """What the first rank that found something not finite found at the last step; empty if none did."""

    def __init__(self, ranks: Ranks, signal: Callable[[], int | None] = lambda: None) -> None:
        self.ranks, self._signal = ranks, signal

    @property
    def stop(self) -> int | None:
        """The signal that asked a rank to stop; the same on all ranks."""
        return self._signal()

    def total(
        self,
        nodes: Mapping[Node, list[Tensor]],
        weights: Sequence[nn.Parameter],
        *,
        found: str = "",
        meanwhile: Meanwhile = lambda: lambda: None,
    ) -> Tensor:
        """Returns the loss of all micro-batches, 0-dim. Collective. nodes: as `sum_over_ranks` takes them, with a
        gradient for each of `weights`; they are not needed afterwards. found: what is not finite on this rank, in
        words."""
        self.found, sums = found, tree.total(nodes, (0, tree.width(self.ranks.micro_batches)), add_in_place)
        assert sums is not None, "a batch has samples"
        loss, *grads = sums
        _give(weights, grads)
        return loss

    def finish(self) -> None:
        """Waits until the weights have the gradients of all micro-batches. They have them at once if something, the
        loss among it, is not finite."""


class OverRanks(DenseExchange):
    """The same for ranks that train together. length: how many dense weights there are."""

    def __init__(self, comm: Communicator, signal: Callable[[], int | None], *, length: int) -> None:
        super().__init__(comm.ranks, signal)
        self._comm, self._length = comm, length
        self._stop: int | None = None
        self._arriving: tuple[Sequence[nn.Parameter], Callable[[], Tensor]] | None = None

    @property
    def stop(self) -> int | None:
        return self._stop

    def total(
        self,
        nodes: Mapping[Node, list[Tensor]],
        weights: Sequence[nn.Parameter],
        *,
        found: str = "",
        meanwhile: Meanwhile = lambda: lambda: None,
    ) -> Tensor:
        outcome = sum_over_ranks(
            self._comm,
            nodes,
            length=self._length,
            found=found,
            stop=self._signal() or 0,
            meanwhile=meanwhile,
        )
        self.found, self._stop = outcome.found, outcome.stop or None
        self._arriving = weights, outcome.gradient
        if outcome.found or not outcome.finite or not math.isfinite(float(outcome.loss)):
            self.finish()
        return outcome.loss

    def finish(self) -> None:
        if self._arriving is not None:
            (weights, gradient), self._arriving = self._arriving, None
            _give(weights, torch.split(gradient(), [weight.numel() for weight in weights]))


def _give(weights: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.view_as(weight)


def add_in_place(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Returns left + right, in the memory of `left`, which is not needed any more."""
    torch._foreach_add_(left, right)
    return left


# ---- messages


class Outcome(NamedTuple):
    """What all ranks know after the exchange; it is the same on each."""

    loss: Tensor
    """The total, 0-dim."""
    found: str
    """What the first rank that found something found; empty if none did."""
    stop: int
    """The signal by which the first rank that has to stop has to stop; 0 if none has to."""
    finite: bool
    """Whether all of the total gradient is finite."""
    gradient: Callable[[], Tensor]
    """Waits for the total gradient, which is on its way, and returns it. All ranks call it, once."""


def sum_over_ranks(
    comm: Communicator,
    nodes: Mapping[Node, Sequence[Tensor]],
    *,
    length: int,
    found: str = "",
    stop: int = 0,
    meanwhile: Meanwhile = lambda: lambda: None,
) -> Outcome:
    """Returns the total over all ranks, in the order of `kernels.tree`. All ranks call it together.

    The gradient may arrive later: slices travel while their ranks do something else.

    nodes: this rank's sums, of disjoint subtrees that are its micro-batches, as few as there can be: the loss, float32,
    0-dim, then the gradients; one without samples is left out. length: of all gradients together. found, stop: this
    rank's, see `Outcome`.
    """
    micro_batches = comm.ranks.micro_batches
    grads = (grad.view(-1).view(torch.int32) for _, *each in nodes.values() for grad in each)
    head = _header({node: sums[0] for node, sums in nodes.items()}, found, stop)
    message = _joined([head, *grads])
    message[_HEAD - 1] = _are_small(message[len(head) :].view(torch.float32), micro_batches)
    slices, messages = [(0, length)] * 2, [message] * 2
    if comm.size != 2:
        head, sums = message[: len(head)], message[len(head) :].view(len(nodes), length)
        slices = [*pairwise(tree.starts(length, comm.size))]
        messages = [_joined([head, *sums[:, first:last]]) for first, last in slices]
    arriving = comm.begin(messages, purpose=PURPOSE)
    others = meanwhile()
    first, last = slices[comm.rank]
    heard = [_Message.of(words, last - first) for words in arriving.wait()]
    whole = (0, tree.width(micro_batches))
    own = tree.total({node: part for each in heard for node, part in each.slices.items()}, whole, _added)
    loss = tree.total({node: part for each in heard for node, part in each.losses.items()}, whole, _added)
    assert own is not None and loss is not None, "a batch has samples"
    others()
    finite = all(each.is_small for each in heard) or not len(own) or ops.first_nonfinite(own) is None
    if comm.size == 2:
        return Outcome(loss, *_agreed(heard), finite, lambda: own)
    if not all(each.is_small for each in heard):
        finite = all(comm.gather_number(finite, purpose=PURPOSE))
    totals = comm.begin([own] * comm.size, purpose=PURPOSE, lengths=[end - start for start, end in slices])
    return Outcome(loss, *_agreed(heard), finite, lambda: _joined(totals.wait()))


def _are_small(gradients: Tensor, micro_batches: int) -> bool:
    """Returns whether all numbers are finite, and no total of as many as there are micro-batches can overflow."""
    if not len(gradients):
        return True
    limit = torch.finfo(torch.float32).max / (2 * micro_batches)
    low, high = torch.stack(torch.aminmax(gradients)).tolist()
    return bool(-limit <= low and high <= limit)  # not so if one is NaN


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns 1-dim tensors end to end, on pages that are kept from step to step."""
    if not parts:  # all weights are frozen
        return torch.empty(0)
    return torch.cat(list(parts), out=ops.empty(sum(map(len, parts)), dtype=parts[0].dtype))


def _added(left: Tensor, right: Tensor) -> Tensor:
    return torch.add(left, right, out=ops.empty(*left.shape))


def _header(losses: Mapping[Node, Tensor], found: str, stop: int) -> Tensor:
    """Returns the words of a message before the slices, int32: numbers, nodes, losses, and text. The last number says
    whether the slices are small, and is 0 here."""
    text = found.encode(errors="backslashreplace")
    numbers = [len(losses), len(text), stop, 0, *(number for node in losses for number in node)]
    words = [torch.tensor(numbers, dtype=torch.int32), *(loss.view(1).view(torch.int32) for loss in losses.values())]
    padded = bytearray(text.ljust(4 * _words_of(len(text))))
    return torch.cat([*words, torch.frombuffer(padded, dtype=torch.int32)] if text else words)


def _words_of(num_bytes: int) -> int:
    return -(-num_bytes // 4)


class _Message(NamedTuple):
    """A message, taken apart."""

    slices: dict[Node, Tensor]
    losses: dict[Node, Tensor]
    found: str
    stop: int
    is_small: bool

    @classmethod
    def of(cls, words: Tensor, length: int) -> _Message:
        """length: of a slice."""
        num_nodes, num_bytes, stop, is_small = words[:_HEAD].tolist()
        sizes = [_HEAD, 2 * num_nodes, num_nodes, _words_of(num_bytes), num_nodes * length]
        _, numbers, losses, text, slices = torch.split(words, sizes)
        nodes = [(first, size) for first, size in numbers.view(-1, 2).tolist()]
        return cls(
            dict(zip(nodes, slices.view(torch.float32).view(num_nodes, length), strict=True)),
            dict(zip(nodes, losses.view(torch.float32), strict=True)),
            bytes(text.view(torch.uint8).tolist())[:num_bytes].decode(),
            stop,
            bool(is_small),
        )


def _agreed(heard: Sequence[_Message]) -> tuple[str, int]:
    """Returns `found` and `stop` of the first rank that has them."""
    found = next((f"rank {rank}: {each.found}" for rank, each in enumerate(heard) if each.found), "")
    return found, next((each.stop for each in heard if each.stop), 0)

"""The exchange of a step: dense gradients and losses of all ranks, added in the tree, and what ranks must agree on.

    rank r      its sums {node: gradient}     slice s of each --to rank s-->   all nodes of slice s
    rank s      adds them in the tree         the total of slice s --to all--> the total gradient

With R ranks whose micro-batches are whole subtrees, a rank sends 2 (R - 1) / R of a gradient's bytes. gloo's own
all-reduce sends as many, but its order of sums depends on the number of ranks and on a value's place in the buffer.
The first message also says each rank's losses, whether it found something that is not finite, and whether it has to
stop, so that all ranks skip, stop and log alike. Then they say whether their slices are finite: if so, rows may be
updated while the totals are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.kernels import ops, tree
from hotrow.kernels.tree import Node
from hotrow.parallel.communicator import Communicator

PURPOSE = "dense"
"""What `ExchangeCounts.sent_bytes` counts the bytes of this exchange under."""
_HEAD = 3
"""Words before the nodes of a message: the number of nodes, the bytes of `found`, and `stop`."""
_NODE = 3
"""Words for each node before its slice: its first micro-batch, its size, and its loss."""


class Sums(NamedTuple):
    """What is added up over micro-batches."""

    gradient: Tensor
    """Of all dense weights, one after the other, float32 [n]."""
    loss: Tensor
    """float32, 0-dim."""


class Told(NamedTuple):
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
    nodes: Mapping[Node, Sums],
    *,
    length: int,
    found: str = "",
    stop: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
) -> Told:
    """Returns the total over all ranks, in the order of `kernels.tree`. All ranks call it together.

    The gradient may arrive later: slices travel while their ranks do something else.

    nodes: this rank's sums, of disjoint subtrees that are its micro-batches, as few as there can be; one without
    samples is left out. length: of a gradient. found, stop: as in `Told`, of this rank. meanwhile: what to do while the
    slices travel.
    """
    head = _header({node: sums.loss for node, sums in nodes.items()}, found, stop)
    cuts = tree.starts(length, comm.size)
    flat = [sums.gradient.view(torch.int32) for sums in nodes.values()]
    messages = [_joined([head, *(words[first:last] for words in flat)]) for first, last in pairwise(cuts)]
    own_length = cuts[comm.rank + 1] - cuts[comm.rank]
    arriving = comm.begin(messages, purpose=PURPOSE)
    meanwhile()
    heard = [_Heard.of(words, own_length) for words in arriving.wait()]
    everything = (0, tree.width(comm.ranks.micro_batches))
    own = tree.total({node: part for each in heard for node, part in each.slices.items()}, everything, _added)
    loss = tree.total({node: part for each in heard for node, part in each.losses.items()}, everything, _added)
    assert own is not None and loss is not None, "a batch has samples"
    own_finite = not len(own) or ops.first_nonfinite(own) is None
    finite = all(comm.tell(own_finite, purpose=PURPOSE))
    lengths = [last - first for first, last in pairwise(cuts)]
    totals = comm.begin([own] * comm.size, purpose=PURPOSE, lengths=lengths)
    return Told(loss, *_agreed(heard), finite, lambda: _joined(totals.wait()))


def bytes_of_heads(num_nodes: float) -> float:
    """Returns the bytes of a message before its slices, if nothing was found."""
    return 4 * _HEAD + 4 * _NODE * num_nodes


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns 1-dim tensors end to end, on pages that are kept from step to step."""
    return torch.cat(list(parts), out=ops.empty(sum(map(len, parts)), dtype=parts[0].dtype))


def _added(left: Tensor, right: Tensor) -> Tensor:
    return torch.add(left, right, out=ops.empty(*left.shape))


def _header(losses: Mapping[Node, Tensor], found: str, stop: int) -> Tensor:
    """Returns the words of a message before the slices, int32: numbers, nodes, losses, and text."""
    text = found.encode()
    numbers = [len(losses), len(text), stop, *(number for node in losses for number in node)]
    words = [torch.tensor(numbers, dtype=torch.int32), *(loss.view(1).view(torch.int32) for loss in losses.values())]
    padded = bytearray(text.ljust(4 * _words_of(len(text))))
    return torch.cat([*words, torch.frombuffer(padded, dtype=torch.int32)] if text else words)


def _words_of(num_bytes: int) -> int:
    return -(-num_bytes // 4)


class _Heard(NamedTuple):
    """A message, taken apart."""

    slices: dict[Node, Tensor]
    losses: dict[Node, Tensor]
    found: str
    stop: int

    @classmethod
    def of(cls, words: Tensor, length: int) -> _Heard:
        """length: of a slice."""
        num_nodes, num_bytes, stop = words[:_HEAD].tolist()
        sizes = [_HEAD, 2 * num_nodes, num_nodes, _words_of(num_bytes), num_nodes * length]
        _, numbers, losses, text, slices = torch.split(words, sizes)
        nodes = [(first, size) for first, size in numbers.view(-1, 2).tolist()]
        return cls(
            dict(zip(nodes, slices.view(torch.float32).view(num_nodes, length), strict=True)),
            dict(zip(nodes, losses.view(torch.float32), strict=True)),
            bytes(text.view(torch.uint8).tolist())[:num_bytes].decode(),
            stop,
        )


def _agreed(heard: Sequence[_Heard]) -> tuple[str, int]:
    """Returns `found` and `stop` of the first rank that has them."""
    found = next((f"rank {rank}: {each.found}" for rank, each in enumerate(heard) if each.found), "")
    return found, next((each.stop for each in heard if each.stop), 0)

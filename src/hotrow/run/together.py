"""What the ranks of a run do together at every step: they add up gradients and losses, and agree on what comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.kernels.tree import Node
from hotrow.optim import SparseOptimizer, nonfinite_gradient
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.dense import Sums, sum_over_ranks

Total: TypeAlias = Callable[[Mapping[Node, Sums], Sequence[nn.Parameter]], Tensor]
"""Given the sums of this rank's nodes, returns the loss of all micro-batches, and sees to the weights' gradients."""


class DenseExchange:
    """Adds up the dense gradients and losses of all ranks.

    signal: returns the signal that asks this rank to stop, if one does. length: how many dense weights there are.
    """

    def __init__(self, comm: Communicator, signal: Callable[[], int | None], *, length: int) -> None:
        self.comm, self._signal, self._length = comm, signal, length
        self.found = ""
        """What the first rank found, at the last step, that is not finite; empty if none did."""
        self._arriving: tuple[Sequence[nn.Parameter], Callable[[], Tensor]] | None = None
        self.stop: int | None = None
        """The signal that asked some rank to stop before the last exchange."""

    def total(self, embedding: EmbeddingCollection, batch: Batch, optimizer: SparseOptimizer) -> Total:
        """Returns what adds up the sums of all ranks for their parts of a batch, and sets `found` and `stop`.

        optimizer: of the embedding; what its next step needs of other ranks travels with these sums.
        The weights get their gradients in `finish`, or at once if something is not finite.
        """

        def over_ranks(nodes: Mapping[Node, Sums], weights: Sequence[nn.Parameter]) -> Tensor:
            found = self._nonfinite(embedding, batch, [float(sums.loss) for sums in nodes.values()])
            told = sum_over_ranks(
                self.comm,
                nodes,
                length=self._length,
                found=found,
                stop=self._signal() or 0,
                meanwhile=optimizer.prepare,
            )
            self.found, self.stop = told.found, told.stop or None
            self._arriving = weights, told.gradient
            if told.found or not told.finite or not math.isfinite(float(told.loss)):
                self.finish()
            return told.loss

        return over_ranks

    def finish(self) -> None:
        """Waits for the total gradient of the last `total`, and gives it to the weights."""
        if self._arriving is None:
            return
        (weights, gradient), self._arriving = self._arriving, None
        each = torch.split(gradient(), [weight.numel() for weight in weights])
        for weight, grad in zip(weights, each, strict=True):
            weight.grad = grad.view_as(weight)

    def _nonfinite(self, embedding: EmbeddingCollection, batch: Batch, losses: list[float]) -> str:
        """Returns what of this rank is not finite, but for gradients of dense layers, which all ranks will have."""
        found = nonfinite_gradient(embedding)
        if found is None and all(map(math.isfinite, losses)):
            return ""
        first, _ = self.comm.ranks.samples(batch.num_samples)
        where = f"its sample 0 is number {first} of the batch"
        return "; ".join([found or "its loss is not finite", *nonfinite_inputs(batch), where])


def nonfinite_inputs(batch: Batch) -> list[str]:
    """Returns where the dense inputs and the labels of a batch are not finite, in words."""
    found = []
    for what, values in {"the dense input": batch.dense, "the label": batch.label}.items():
        if (place := ops.first_nonfinite(values)) is not None:
            column = "".join(f", column {c}" for c in place[1:])
            found.append(f"{what} of sample {place[0]}{column} is {float(values[place])}, so look at the data first")
    return found

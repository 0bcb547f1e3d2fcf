"""What the ranks of a run do together at every step: they add up gradients and losses, and agree on what comes next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn

from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.kernels.tree import Node
from hotrow.optim import SparseOptimizer, nonfinite_gradient
from hotrow.parallel.dense import DenseExchange

Total: TypeAlias = Callable[[Mapping[Node, list[Tensor]], Sequence[nn.Parameter]], Tensor]
"""Given the sums of this rank's nodes, returns the loss of all micro-batches, and sees to the weights' gradients."""


def total_over_ranks(
    exchange: DenseExchange, embedding: EmbeddingCollection, batch: Batch, optimizer: SparseOptimizer
) -> Total:
    """Returns what adds up the sums of all ranks for their parts of a batch.

    optimizer: of the embedding; what its next step needs of other ranks travels with these sums.
    The weights get their gradients in `exchange.finish`, or at once if something is not finite.
    """

    def total(nodes: Mapping[Node, list[Tensor]], weights: Sequence[nn.Parameter]) -> Tensor:
        found = _nonfinite(exchange, embedding, batch, [float(loss) for loss, *_ in nodes.values()])
        return exchange.total(nodes, weights, found=found, meanwhile=optimizer.prepare)

    return total


def _nonfinite(exchange: DenseExchange, embedding: EmbeddingCollection, batch: Batch, losses: list[float]) -> str:
    """Returns what of this rank is not finite, but for gradients of dense layers, which all ranks will have."""
    found = nonfinite_gradient(embedding)
    if found is None and all(map(math.isfinite, losses)):
        return ""
    first, _ = exchange.ranks.samples(batch.num_samples)
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

"""A step in micro-batches: the model runs part by part, and what is summed over samples is added in a tree.

    pooled rows [B, P] --cut--> part 0, part 1, ... --model, loss / B, backward--> gradients of weights, rows' gradients
    gradients of weights, losses    added in the tree (kernels/tree.py), log2(V) + 1 of each held at a time
    rows' gradients                 put together again, for the one backward of the lookup

The parts are fixed for the life of a run (`train.micro_batches`), so the sums do not depend on how many ranks share
them. The rows' own gradients are summed by part in the update: ops.Kernels.update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, pairwise, repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hotrow.batch import Batch
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops, tree
from hotrow.kernels.tree import Node
from hotrow.optim import SparseOptimizer, nonfinite_gradient
from hotrow.parallel.dense import DenseExchange, add_in_place
from hotrow.parallel.ranks import Ranks
from hotrow.run.build import Parts

Total: TypeAlias = Callable[[Mapping[Node, list[Tensor]], Sequence[nn.Parameter]], Tensor]
"""Given the sums of this rank's nodes, returns the loss of all micro-batches, and sees to the weights' gradients."""


def cut(batch: Batch, ranks: Ranks) -> Batch:
    """Returns the batch with its samples cut into the micro-batches that this rank holds."""
    if ranks.micro_batches == 1:
        return batch
    lo, hi = ranks.held
    starts = tree.starts(batch.num_samples, ranks.micro_batches)[lo : hi + 1]
    return replace(batch, sparse=batch.sparse.in_parts([start - starts[0] for start in starts]))


def backward(parts: Parts, batch: Batch, rows: Any, step: int) -> Tensor:
    """Leaves the gradients of weights and of `rows`; returns the loss of all ranks' samples, detached, 0-dim.

    batch: from `cut`, of step number `step`. rows: what `look_up` returned for it. If several ranks train, the weights'
    gradients may arrive only with `parts.exchange.finish`.
    """
    batch = parts.labelled(batch)
    if batch.sparse.parts is None:

        def loss_of(batch: Batch, rows: Any) -> Tensor:
            with parts.model.drawing(step, 0):
                return _loss(parts, parts.dense.outputs(parts.model, batch.dense, rows), batch)

        loss = None if parts.graph is None else parts.graph.backward(batch, rows, loss_of)
        if loss is None:
            loss = loss_of(batch, rows)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach() / parts.model.num_members
    if parts.ranks.size == 1:
        return backward_in_parts(parts, batch, rows, step, parts.exchange.total)
    total = total_over_ranks(parts.exchange, parts.embedding, batch, parts.sparse_optimizer)
    return backward_in_parts(parts, batch, rows, step, total)


def backward_in_parts(parts: Parts, batch: Batch, rows: Any, step: int, total: Total) -> Tensor:
    """Leaves the gradients that `loss.backward()` leaves, of weights and of `rows`; returns the loss, 0-dim.

    batch: from `cut`, of step number `step`. rows: what `look_up` returned for it. total: sees to the weights'
    gradients, at once or later.
    """
    ranks = parts.ranks
    first = tree.starts(batch.num_samples, ranks.micro_batches)[ranks.held[0]]
    weights = [weight for weight in parts.model.parameters() if weight.requires_grad]
    looked_up = _LookedUp(rows)
    each = (
        _sums_of_part(parts, batch, looked_up, weights, step, first, *span)
        for span in pairwise(batch.sparse.parts or ())
    )
    lo, hi = ranks.held
    end = tree.width(hi) if hi == ranks.micro_batches else hi  # leaves beyond the last one are absent
    with ops.weights_stay() if hi - lo > 1 else nullcontext():  # for one batch it would be one pass more
        nodes = tree.sums(chain(each, repeat(None)), lo, end, add_in_place)
    looked_up.backward()
    return total(nodes, weights) / parts.model.num_members


def _loss(parts: Parts, outputs: Tensor, batch: Batch, own: slice = slice(None)) -> Tensor:
    """The loss of the samples `own`, 0-dim; of several members the sum, so that each trains as it would alone."""
    labels_BL = batch.labels[own].to(outputs.device)
    weight_B = None if batch.weight is None else batch.weight[own].to(outputs.device)
    members = outputs if parts.model.num_members > 1 else [outputs]
    losses = [parts.objective.loss(own_B, labels_BL, batch.num_samples, weight_B) for own_B in members]
    return functools.reduce(torch.add, losses)


def _sums_of_part(
    parts: Parts,
    batch: Batch,
    looked_up: _LookedUp,
    weights: Sequence[nn.Parameter],
    step: int,
    first: int,
    start: int,
    stop: int,
) -> list[Tensor] | None:
    """Returns the loss and the gradients of `weights` for samples [start, stop); None if there are none.

    first: place of this rank's first sample in the batch of all ranks.
    """
    if start == stop:
        return None
    rows, leaves = looked_up.samples(start, stop)
    with parts.model.drawing(step, first + start):
        outputs = parts.dense.outputs(parts.model, batch.dense[start:stop], rows)
    loss = _loss(parts, outputs, batch, slice(start, stop))
    grads = torch.autograd.grad(loss, [*weights, *leaves])
    looked_up.take(start, stop, grads[len(weights) :])
    sums = [loss.detach(), *(grad.contiguous() for grad in grads[: len(weights)])]
    # Autograd may give two weights one gradient; sums are added up in place.
    shared = len({own.untyped_storage().data_ptr() for own in sums}) < len(sums)
    return [own.clone() for own in sums] if shared else sums


class _LookedUp:
    """Rows of a batch as the model takes them, in parts; the parts' gradients come together in one tensor again."""

    def __init__(self, rows: Tensor | dict[str, tuple[Tensor, Tensor]]) -> None:
        self._offsets: dict[str, Tensor] = {}
        if isinstance(rows, Tensor):
            self._values = {"": rows}
        else:
            self._values = {name: values for name, (values, _) in rows.items()}
            self._offsets = {name: offsets for name, (_, offsets) in rows.items()}
        self._grads = {name: ops.empty_like(own) for name, own in self._values.items() if own.requires_grad}

    def _spans(self, start: int, stop: int) -> Iterator[tuple[str, slice]]:
        """Yields which values of each feature belong to samples [start, stop)."""
        for name in self._values:
            offsets = self._offsets.get(name)
            yield name, slice(start, stop) if offsets is None else slice(int(offsets[start]), int(offsets[stop]))

    def samples(self, start: int, stop: int) -> tuple[Any, list[Tensor]]:
        """Returns the rows of samples [start, stop) for the model, and those among them that get a gradient."""
        own = {name: self._values[name].detach()[span] for name, span in self._spans(start, stop)}
        leaves = [own[name].requires_grad_() for name in self._grads]
        if not self._offsets:
            return own[""], leaves
        offsets = {name: all_of[start : stop + 1] - all_of[start] for name, all_of in self._offsets.items()}
        return {name: (values, offsets[name]) for name, values in own.items()}, leaves

    def take(self, start: int, stop: int, grads: Sequence[Tensor]) -> None:
        """Keeps the gradients of the leaves that `samples` returned for [start, stop)."""
        spans = dict(self._spans(start, stop))
        for (name, whole), grad in zip(self._grads.items(), grads, strict=True):
            whole[spans[name]] = grad

    def backward(self) -> None:
        """Gives the lookup its gradient."""
        if self._grads:
            torch.autograd.backward([self._values[name] for name in self._grads], [*self._grads.values()])


# ---- what the ranks of a run do together: they add up gradients and losses, and agree on what comes next


def total_over_ranks(
    exchange: DenseExchange, embedding: EmbeddingCollection, batch: Batch, optimizer: SparseOptimizer
) -> Total:
    """Returns the function that adds up the sums of all ranks for their parts of a batch.

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

"""Gradients of both sides of a model together: are they finite, and how long are they.

The dense side is parameters and their `.grad`; the sparse side is what waits in an EmbeddingCollection for its
optimizer: a pooled gradient [B, output_dim] for every lookup. optim.py asks about the sparse side before it changes a
row, trainer.py about both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hotrow.embedding import EmbeddingCollection, Pending
from hotrow.kernels import ops


def nonfinite_gradient(emb: EmbeddingCollection) -> str | None:
    """Where NaN or infinity first stands among the pending gradients of `emb` and their per-id weights; None: nowhere.

    The sums a row gets from many finite gradients are not looked at.
    """
    for pending in emb.pending:
        found = ops.first_nonfinite(pending.grad)
        if found is not None:
            row, column = found
            feature = next(f for f in pending.kernels.layout.features if f.columns.start <= column < f.columns.stop)
            what = "sample" if emb.placement.kernels.are_pooled(pending.kernels) else "position"
            value = float(pending.grad[row, column])
            return (
                f"the gradient of feature {feature.name!r} (table {emb.tables[feature.table].name!r}), {what} {row}, "
                f"column {column - feature.columns.start} is {value}"
            )
        if pending.sparse.weights is not None and ops.first_nonfinite(pending.sparse.weights) is not None:
            for text in _nonfinite_weights(emb, pending):
                return text
    return None


def _nonfinite_weights(emb: EmbeddingCollection, pending: Pending) -> Iterator[str]:
    """Those of features that were looked up: a batch may hold others, whose weights play no part."""
    for feature in pending.kernels.layout.features:
        _, offsets, weights = pending.sparse.bags(feature.name)
        assert weights is not None
        found = ops.first_nonfinite(weights)
        if found is not None:
            sample = int(torch.searchsorted(offsets, found[0], right=True)) - 1
            yield (
                f"the weight of feature {feature.name!r} (table {emb.tables[feature.table].name!r}), sample {sample}, "
                f"position {found[0] - int(offsets[sample])} is {float(weights[found[0]])}"
            )


def nonfinite_parameter_gradient(module: nn.Module) -> str | None:
    """Where NaN or infinity first stands among the gradients of the parameters of `module`; None: nowhere."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and (found := ops.first_nonfinite(parameter.grad)) is not None:
            return f"the gradient of parameter {name!r} at {list(found)} is {float(parameter.grad[found])}"
    return None


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of all parameters and all pending lookups by `min(1, max_norm / (norm + 1e-6))`.

        norm = norm_type-norm of (every parameter's gradient, every pooled gradient of every EmbeddingCollection)

    modules: the model and its collections, or one module that holds them all; what stands in several counts once.
    Returns the norm before clipping, 0-dim, as torch.nn.utils.clip_grad_norm_.

    The sparse side's norm is that of the *pooled* gradients [B, output_dim], which are there before the step; the
    gradients of rows would have to be sorted and summed first. Where every bag holds one id and no id comes twice, they
    are the same numbers; else a row's gradient is a sum over its bags, and the two norms differ. Both sides are scaled
    by the same factor, and with the pooled gradients those of the rows.

    A norm that is NaN or infinite raises ValueError under `error_if_nonfinite`, naming what is not finite; else nothing
    is scaled, and the optimizers meet the gradients as they are. Raises ValueError unless max_norm >= 0.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be 0 or a positive number")
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
    collections = [part for part in parts if isinstance(part, EmbeddingCollection)]
    parameters = dict.fromkeys(parameter for root in roots for parameter in root.parameters())
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    pooled = [pending.grad for emb in collections for pending in emb.pending]
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in [*grads, *pooled]]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if not torch.isfinite(norm):
        if error_if_nonfinite:
            places = [*map(nonfinite_gradient, collections), *map(nonfinite_parameter_gradient, roots)]
            where = "; ".join(dict.fromkeys(place for place in places if place)) or "finite gradients overflow in sum"
            raise ValueError(f"the norm of the gradients is {float(norm)}: {where}; lower the learning rate")
        return norm
    factor = max_norm / (float(norm) + 1e-6)
    if factor < 1:
        for grad in grads:
            grad.mul_(factor)
        for emb in collections:
            emb.scale_pending(factor)
    return norm

"""DLRM (Naumov et al., 2019): bottom MLP, pairwise dot products, top MLP; initialised as its reference is.

    dense_BI --bottom MLP--> x_BD --+-- dot products --> [x | dots of all pairs] --top MLP--> logits_B
    pooled_BP (P = F * D) ----------+

With `first_order`, logits_B += sum_F pooled_BFD[:, :, 0] + dense_BI w_I: the logistic regression of the same inputs.
Else an id reaches the logit only through products and the top MLP, where rows at zero stay small and learn slowly.
It uses the rows that are there, so no second set of tables is looked up; w starts at zero and the top MLP has the bias.

The tables are not part of it: it takes their pooled rows, so that lookups are timed, placed and sharded on their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.kernels.ops import dot_interaction
from hotrow.models.layers import MLP, Constant


class DLRM(nn.Module):
    """dense [B, I], pooled [B, F * D] -> logits [B]; the sigmoid is left to the loss.

    num_dense: I; with 0 a learned vector takes the place of the bottom MLP, so every feature keeps a linear term.
    num_features: F. bottom_mlp, top_mlp: hidden widths; D and 1 are appended.
    first_order: whether the first-order term above is added. generator: CPU generator from which all weights are drawn,
    bottom MLP first.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        num_features: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        first_order: bool = False,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.num_features, self.embedding_dim = num_features, embedding_dim
        num_pairs = num_features * (num_features + 1) // 2
        self.bottom: nn.Module
        if num_dense:
            self.bottom = MLP([num_dense, *bottom_mlp, embedding_dim], generator=generator)
        else:
            self.bottom = Constant(embedding_dim, generator=generator)
        self.top = MLP([embedding_dim + num_pairs, *top_mlp, 1], generator=generator, last="linear")
        self.first_order_I = nn.Parameter(torch.zeros(num_dense)) if first_order else None

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        """Logits [B]."""
        pooled_BFD = pooled_BP.view(-1, self.num_features, self.embedding_dim)
        logits_B1: Tensor = self.top(dot_interaction(self.bottom(dense_BI), pooled_BFD))
        logits_B = logits_B1.squeeze(1)
        if self.first_order_I is not None:
            logits_B = logits_B + pooled_BFD[:, :, 0].sum(1) + dense_BI @ self.first_order_I
        return logits_B

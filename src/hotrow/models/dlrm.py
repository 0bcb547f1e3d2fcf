"""DLRM (Naumov et al., 2019): bottom MLP, pairwise dot products, top MLP; initialised as its reference is.

    dense_BI --bottom MLP--> x_BD --+-- dot products --> [x | dots of all pairs] --top MLP--> logits_B
    pooled_BP (P = F * D) ----------+

The tables are not part of it: it takes their pooled rows, so that lookups are timed, placed and sharded on their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Constant
from hotrow.ops import dot_interaction


class DLRM(nn.Module):
    """dense [B, I], pooled [B, F * D] -> logits [B]; the sigmoid is left to the loss.

    num_dense: I; with 0 a learned vector takes the place of the bottom MLP, so every feature keeps a linear term.
    num_features: F. bottom_mlp, top_mlp: hidden widths; D and 1 are appended.
    generator: CPU generator from which all weights are drawn, bottom MLP first.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        num_features: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
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

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        """Logits [B]."""
        pooled_BFD = pooled_BP.view(-1, self.num_features, self.embedding_dim)
        logits_B1: Tensor = self.top(dot_interaction(self.bottom(dense_BI), pooled_BFD))
        return logits_B1.squeeze(1)

"""DLRM (Naumov et al., 2019): bottom MLP, pairwise dot products, top MLP; initialised as its reference is.

    dense_BI --bottom MLP--> x_BD --+-- dot products --> [x | dots of all pairs] --top MLP--> logits_B
    pooled_BP (P = F * D) ----------+

With `first_order`, logits_B += sum_F pooled_BFD[:, :, 0] + dense_BI w_I: the logistic regression of the same inputs.
Without it an id reaches the logit only through products and the top MLP, where rows at zero stay small and learn
slowly. The term uses the rows that are looked up anyway, so it needs no second set of tables; w starts at zero, and the
top MLP has the bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Constant, Network, dot_interaction, product
from hotrow.models.spec import ModelSpec, Width


class DLRM(Network):
    """dense [B, I], pooled [B, F * D] -> logits [B].

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
        """Returns logits [B]."""
        pooled_BFD = pooled_BP.view(-1, self.num_features, self.embedding_dim)
        logits_B1: Tensor = self.top(dot_interaction(self.bottom(dense_BI), pooled_BFD))
        logits_B = logits_B1.squeeze(1)
        if self.first_order_I is not None:
            inputs_BX = torch.cat([dense_BI, pooled_BFD[:, :, 0]], dim=1)
            weight_X = torch.cat([self.first_order_I, dense_BI.new_ones(self.num_features)])
            logits_B = logits_B + product(inputs_BX, weight_X[None]).squeeze(1)
        return logits_B


class DLRMSpec(ModelSpec):
    """A bottom MLP on the dense inputs, dot products of its output and the embeddings in pairs, a top MLP on these."""

    network: ClassVar = DLRM
    equal_dims: ClassVar = True
    small: ClassVar[Mapping[str, Any]] = {"bottom_mlp": [64], "top_mlp": [64, 32], "first_order": True}

    name: Literal["dlrm"] = "dlrm"
    """DLRM (Naumov et al., 2019)."""
    bottom_mlp: list[Width] = [512, 256, 64]
    """Widths of the bottom MLP's hidden layers; a last layer of `embedding_dim` is added."""
    top_mlp: list[Width] = [512, 256]
    """Widths of the top MLP's hidden layers; the last layer, one logit, is added."""
    first_order: bool = False
    """Whether the logit also gets the first column of every pooled row and a linear map of the dense inputs, as in a
    logistic regression. Better on small data: an id then acts by itself, with no other id and through no MLP."""

    def build(self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator) -> DLRM:
        """Returns the network."""
        (embedding_dim,) = set(dims.values())
        return DLRM(
            num_dense=num_dense,
            num_features=len(dims),
            embedding_dim=embedding_dim,
            bottom_mlp=self.bottom_mlp,
            top_mlp=self.top_mlp,
            first_order=self.first_order,
            generator=generator,
        )

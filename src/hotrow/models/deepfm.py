"""DeepFM (Guo et al., 2017): a factorization machine and an MLP on the same rows; without products, Wide & Deep.

    first order   sum_F w_BF + dense_BI w_I
    second order  sum over pairs f < g of <v_f, v_g>  =  (|sum_F v_BFD|^2 - sum_F |v_BFD|^2) / 2
    deep          [dense_BI | v_BFD, all side by side] --MLP--> logit, with the model's bias
    logits_B = first order + second order + deep

A row holds w, its id's effect by itself, and then v [D], so that one lookup serves all three terms. Dense inputs have
no vectors: they act in the first order and in the MLP. w_I starts at zero; the MLP is drawn as by `layers.linear`.
The second order takes time in proportion to F, while products of all pairs take F^2.

Wide & Deep (Cheng et al., 2016) is the same without the second order. Its hand-made crosses of columns, if there are
any, are columns of the data.

Shape suffixes as in hotrow.batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Network, dots, product, weighted_sum
from hotrow.models.spec import MLPSpec, Width


class DeepFM(Network):
    """dense [B, I], pooled [B, F * (1 + D)] -> logits [B], or [B, L] if `num_outputs`, L, is above 1.

    num_dense: I. num_features: F. embedding_dim: D. deep_mlp: hidden widths; L is appended. dropout: of
    the hidden layers. generator: CPU generator from which the MLP is drawn. Several outputs share what
    rows give by themselves and in pairs; the MLP and the weights of dense inputs are their own.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        num_features: int,
        embedding_dim: int,
        second_order: bool,
        deep_mlp: Sequence[int],
        dropout: float,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.num_features, self.second_order = num_features, second_order
        self.num_outputs = num_outputs
        widths = [num_dense + num_features * embedding_dim, *deep_mlp, num_outputs]
        self.deep = MLP(widths, generator=generator, last="linear", dropout=dropout)
        self.first_order_I = nn.Parameter(torch.zeros(num_outputs * num_dense))  # of several outputs, one after another

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        rows_BFE = pooled_BP.view(len(pooled_BP), self.num_features, -1)  # E = 1 + D
        vectors_BFD = rows_BFE[:, :, 1:]
        flat_BX = vectors_BFD.flatten(1)
        weight_LI = self.first_order_I.view(self.num_outputs, dense_BI.shape[1])
        weight_LX = torch.cat([weight_LI, dense_BI.new_ones(self.num_outputs, self.num_features)], dim=1)
        first_BL = product(torch.cat([dense_BI, rows_BFE[:, :, 0]], dim=1), weight_LX)
        deep_BL: Tensor = self.deep(torch.cat([dense_BI, flat_BX], dim=1))
        logits_BL = (first_BL + deep_BL).squeeze(1)
        if self.second_order:
            sum_BD = weighted_sum(vectors_BFD, dense_BI.new_ones(len(dense_BI), self.num_features))
            second_B = (dots(sum_BD, sum_BD) - dots(flat_BX, flat_BX)) / 2
            several = self.num_outputs > 1
            ones_L1 = dense_BI.new_ones(self.num_outputs, 1)
            logits_BL = logits_BL + (product(second_B[:, None], ones_L1) if several else second_B)
        return logits_BL


class DeepFMSpec(MLPSpec):
    """Every id's own weight, the products of all pairs of embeddings, and an MLP on embeddings and dense inputs."""

    network: ClassVar = DeepFM
    equal_dims: ClassVar = True
    small: ClassVar[Mapping[str, Any]] = {"deep_mlp": [64, 32], "dropout": 0.2}

    name: Literal["deepfm"] = "deepfm"
    """DeepFM (Guo et al., 2017); Wide & Deep without `second_order`. Rows have `embedding_dim` + 1 columns: the first
    is the weight of the id by itself."""
    second_order: bool = True
    """Whether the logit gets the products of all pairs of embeddings. Without them the model is Wide & Deep."""
    deep_mlp: list[Width] = [400, 400, 400]
    """Widths of the MLP's hidden layers; the last layer, one logit, is added. With [] there are none, which leaves a
    factorization machine."""

    def row_dim(self, embedding_dim: int) -> int:
        """Returns the columns of a row: the weight of the id, then its vector."""
        return 1 + embedding_dim

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> DeepFM:
        (row_dim,) = set(dims.values())
        return DeepFM(
            num_dense=num_dense,
            num_features=len(dims),
            embedding_dim=row_dim - 1,
            second_order=self.second_order,
            deep_mlp=self.deep_mlp,
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )

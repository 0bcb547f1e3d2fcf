"""DLRM (Naumov et al., 2019): bottom MLP, pairwise dot products, top MLP; initialised as its reference is.

    dense_BI --bottom MLP--> x_BD --+-- dot products --> [x | dots of all pairs] --top MLP--> logits_B
    pooled_BP (P = F * D) ----------+

With `concatenated` the top MLP also gets the rows themselves: a row then has D effects of its own, as in DCN and
DeepFM, besides those of its products.

With `first_order`, logits_B += sum_F pooled_BFD[:, :, 0] + dense_BI w_I: the logistic regression of the same inputs.
Without it an id reaches the logit only through products and the top MLP, where rows at zero stay small and learn
slowly. The term uses the rows that are looked up anyway, so it needs no second set of tables; w starts at zero, and the
top MLP has the bias. Each dense column whose schema has buckets too then comes as `Pieces` beside the number, to the
bottom MLP and to w: so this term is a sum of broken lines, which fit a bend that standardized numbers hardly show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Constant, Dropout, Network, each, interactions, member_rows, products, repeated
from hotrow.models.spec import DropoutShare, Edges, Members, MLPSpec, Width


class Pieces(nn.Module):
    """dense [B, I] -> [B, I + P]: the numbers, then for each two neighbouring edges of a column how far its number has
    come from the one to the other, 0 to 1 (Gorishniy et al., 2022). A linear map of them bends at the edges."""

    def __init__(self, edges: Edges) -> None:
        super().__init__()
        numbers = [(i, 0.0, 1.0, -math.inf, math.inf) for i in range(len(edges))]
        pieces = [(i, low, 1 / (high - low), 0.0, 1.0) for i, own in enumerate(edges) for low, high in pairwise(own)]
        places, *how = zip(*numbers, *pieces, strict=True)
        self.place_P: Tensor
        self.how_4P: Tensor
        self.register_buffer("place_P", torch.tensor(places), persistent=False)  # a dataset or export has the edges
        self.register_buffer("how_4P", torch.tensor(how), persistent=False)
        self.num_outputs = len(places)

    def forward(self, dense_BI: Tensor) -> Tensor:
        """Returns numbers and pieces."""
        low_P, scale_P, least_P, most_P = self.how_4P
        return dense_BI.index_select(1, self.place_P).sub_(low_P).mul_(scale_P).clamp_(least_P, most_P)


class DLRM(Network):
    """dense [B, I], pooled [B, F * D] -> logits [B], or [B, L] if `num_outputs`, L, is above 1.

    num_dense: I; with 0 a learned vector takes the place of the bottom MLP, so every feature keeps a linear term.
    num_features: F. bottom_mlp, top_mlp: hidden widths; D and L are appended.
    concatenated, first_order: whether the inputs and the term above are added. dropout: of the MLPs' hidden
    layers. embedding_dropout: of the whole pooled row of a feature. generator: CPU generator from which all weights are
    drawn, bottom MLP first.
    """

    def __init__(
        self,
        *,
        num_dense: int,
        num_features: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        concatenated: bool = False,
        first_order: bool = False,
        dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        num_outputs: int = 1,
        pieces: Pieces | None = None,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.pieces = pieces
        num_dense = num_dense if pieces is None else pieces.num_outputs
        self.num_features, self.embedding_dim = num_features, embedding_dim
        num_pairs = num_features * (num_features + 1) // 2
        hidden: dict[str, Any] = {"dropout": dropout}
        self.bottom: nn.Module
        if num_dense:
            self.bottom = MLP([num_dense, *bottom_mlp, embedding_dim], generator=generator, **hidden)
        else:
            self.bottom = Constant(embedding_dim, generator=generator)
        num_inputs = embedding_dim + num_pairs + (num_features * embedding_dim if concatenated else 0)
        self.top = MLP([num_inputs, *top_mlp, num_outputs], generator=generator, last="linear", **hidden)
        self.concatenated, self.row_dropout = concatenated, Dropout(embedding_dropout, generator=generator)
        self.num_outputs = num_outputs  # of several, the weights of the first order stand one after another
        self.first_order_I = nn.Parameter(torch.zeros(num_outputs * num_dense)) if first_order else None

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        return _logits([self], dense_BI, pooled_BP)[0]


def _logits(members: Sequence[DLRM], dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
    """Returns the logits of DLRMs of the same size, each on its own rows, [M, B] or [M, B, L]."""
    one, num_members = members[0], len(members)
    num_different = 1 if dense_BI.stride(0) == 0 else len(dense_BI)  # rows of one tensor, expanded, go through once
    if one.pieces is not None:
        dense_BI = one.pieces(dense_BI)
    dense_MBI = dense_BI[None] if num_members == 1 else torch.stack([dense_BI] * num_members)
    drops = [own.row_dropout.drop for own in members] if one.row_dropout.moment and one.row_dropout.share else []
    if num_members > 1 or drops:
        pooled_MBFD = member_rows(pooled_BP.view(-1, one.num_features, num_members, one.embedding_dim), drops)
    else:
        pooled_MBFD = pooled_BP.view(1, -1, one.num_features, one.embedding_dim)
    bottom_MBD = each([own.bottom for own in members], dense_MBI[:, :num_different])
    if num_different < len(dense_BI):
        bottom_MBD = repeated(bottom_MBD.flatten(0, 1), len(dense_BI)).view(num_members, len(dense_BI), -1)
    vectors = bottom_MBD.flatten(0, 1), pooled_MBFD.flatten(0, 1)
    inputs, columns = interactions(*vectors, concatenated=one.concatenated)
    logits_MBL = each([own.top for own in members], inputs.view(num_members, len(dense_BI), -1))
    if one.first_order_I is not None:
        inputs_MBX = torch.cat([dense_MBI, columns.view(num_members, len(dense_BI), -1)], dim=2)
        weight_MI = torch.stack([own.first_order_I for own in members if own.first_order_I is not None])
        weight_MLI = weight_MI.view(num_members, one.num_outputs, dense_BI.shape[1])
        ones_MLF = dense_BI.new_ones(num_members, one.num_outputs, one.num_features)
        logits_MBL = logits_MBL + products(inputs_MBX, torch.cat([weight_MLI, ones_MLF], dim=2))
    return logits_MBL.squeeze(2)


class DLRMs(Network):
    """Several DLRMs that train at the same time on the same samples; the output is the mean of theirs.

    dense [B, I], pooled [B, F * M * D] -> logits [B] or [B, L]; in a training step those of each member, [M, B] or
    [M, B, L].

    A row holds the D columns of each member one after another, so that ids are looked up once for all. Members share no
    weight: they differ in what they were drawn as, and in what they drop.
    """

    def __init__(self, members: Sequence[DLRM]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.num_members, self.num_features = len(members), members[0].num_features

    def forward(self, dense_BI: Tensor, pooled_BP: Tensor) -> Tensor:
        """Returns logits, in a training step those of each member."""
        logits_MB = _logits([cast(DLRM, member) for member in self.members], dense_BI, pooled_BP)
        if self.is_drawing:
            return logits_MB
        mean_B = logits_MB[0]
        for logits_B in logits_MB[1:]:  # one after another: torch's own sums depend on addresses
            mean_B = mean_B + logits_B
        return mean_B / self.num_members


class DLRMSpec(MLPSpec):
    """A bottom MLP on the dense inputs, dot products of its output and the embeddings in pairs, a top MLP on these."""

    network: ClassVar = DLRM
    equal_dims: ClassVar = True
    small: ClassVar[Mapping[str, Any]] = {
        "bottom_mlp": [64],
        "top_mlp": [128, 64],
        "concatenated": True,
        "first_order": True,
        "dropout": 0.2,
        "embedding_dropout": 0.2,
        "members": 4,
    }

    name: Literal["dlrm"] = "dlrm"
    """DLRM (Naumov et al., 2019)."""
    bottom_mlp: list[Width] = [512, 256, 64]
    """Widths of the bottom MLP's hidden layers; a last layer of `embedding_dim` is added."""
    top_mlp: list[Width] = [512, 256]
    """Widths of the top MLP's hidden layers; the last layer, one logit, is added."""
    concatenated: bool = False
    """Whether the top MLP also gets the pooled rows themselves, beside their products."""
    first_order: bool = False
    """Whether the logit also gets the first column of every pooled row and a linear map of the dense inputs, as in a
    logistic regression. Better on small data: an id then acts by itself, with no other id and through no MLP. A number
    that the schema lists in `buckets` too is then an input in pieces as well, which bend at up to 20 boundaries."""
    members: Members = 1
    """Number of DLRMs that train at the same time, with columns and weights of their own; the mean of their logits is
    the model's. Rows have `members` times `embedding_dim` columns."""
    embedding_dropout: DropoutShare = 0.0
    """Share of the features whose whole row each sample leaves out in training. With rows that are seen a few times,
    it keeps the model from learning their labels by heart."""

    def row_dim(self, embedding_dim: int) -> int:
        return embedding_dim * self.members

    def edges_of(self, info: Any) -> list[list[float]]:
        return list(info.edges) if self.first_order else []

    def build(
        self,
        *,
        num_dense: int,
        dims: Mapping[str, int],
        generator: torch.Generator,
        num_outputs: int = 1,
        edges: Edges = (),
    ) -> DLRM | DLRMs:
        (row_dim,) = set(dims.values())
        pieces = Pieces(edges) if any(edges) else None
        members = [
            DLRM(
                num_dense=num_dense,
                num_features=len(dims),
                embedding_dim=row_dim // self.members,
                bottom_mlp=self.bottom_mlp,
                top_mlp=self.top_mlp,
                concatenated=self.concatenated,
                first_order=self.first_order,
                dropout=self.dropout,
                embedding_dropout=self.embedding_dropout,
                num_outputs=num_outputs,
                pieces=pieces,
                generator=generator,
            )
            for _ in range(self.members)
        ]
        return members[0] if self.members == 1 else DLRMs(members)

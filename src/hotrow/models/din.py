"""DIN (Zhou et al., 2018): a history counts as far as its steps matter to the item that is scored.

    history of X  k_LD --+
    X itself      q_BD --+--> [q | k | q - k | q * k] --attention MLP--> a_L --> sum over a sample's steps of a k = u_BD
    other features --pooled--> v_BD

    [dense_BI | u or v of every feature, side by side] --top MLP--> logits_B

Names decide which features are histories: `item_history` holds the earlier values of `item`. Each history has an
attention MLP of its own; histories of a sample need not be equally long, and one without steps gives zeros. Weights a
are any numbers, as in the paper, which found that a softmax loses how much a user cares. Rows of all other features are
pooled by their sum, X itself too, so it may have several ids.

Only steps that exist are computed, so padding has no part in it. It differs from the paper in that hidden layers have a
ReLU in place of PReLU or Dice, which takes means over a batch, and in that there is no penalty by mini-batch.

Shape suffixes as in hotrow.batch, and: L steps of a history, of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hotrow.models.layers import MLP, Lookup, Network, along, bag_sums, per_bag
from hotrow.models.spec import Dataset, MLPSpec, Width, histories_of


class Attention(nn.Module):
    """(k [L, D], q [B, D], where each sample's steps begin [B + 1]) -> weighted sums of k [B, D]. mlp: hidden widths
    between 4 D and 1."""

    def __init__(self, dim: int, mlp: Sequence[int], *, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = MLP([4 * dim, *mlp, 1], generator=generator, last="linear")

    def forward(self, k_LD: Tensor, q_BD: Tensor, offsets: Tensor) -> Tensor:
        q_LD = per_bag(q_BD, offsets)
        weight_L1 = self.mlp(torch.cat([q_LD, k_LD, q_LD - k_LD, q_LD * k_LD], dim=1))
        return bag_sums(k_LD * along(weight_L1.squeeze(1), k_LD.shape[1]), offsets)


class DIN(Network):
    """dense [B, I], rows of every feature not pooled (`EmbeddingCollection.sequence`) -> logits [B], or [B, L]
    if `num_outputs`, L, is above 1.

    num_dense: I. dims: D of every feature of the collection, by name. attention_mlp: hidden widths between 4 D and 1.
    top_mlp: hidden widths, L is appended. dropout: of the top MLP's hidden layers. generator: CPU generator
    from which all weights are drawn: attention, by the order of histories, then top.

    Raises ValueError if no feature has a history, or a history has no feature or other columns.
    """

    lookup: ClassVar[Lookup] = "sequence"

    def __init__(
        self,
        *,
        num_dense: int,
        dims: Mapping[str, int],
        attention_mlp: Sequence[int],
        top_mlp: Sequence[int],
        dropout: float,
        num_outputs: int = 1,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.feature_names, self.histories = tuple(dims), histories_of(tuple(dims), "din")
        for name, history in self.histories.items():
            if dims[name] != dims[history]:
                raise ValueError(
                    f"feature {name!r} has rows of {dims[name]} columns, but its history {history!r} of "
                    f"{dims[history]}; din compares them: give both one table in the schema, or their tables the same "
                    "number in model.embedding_dim"
                )
        self.attentions = nn.ModuleList(
            Attention(dims[name], attention_mlp, generator=generator) for name in self.histories
        )
        widths = [num_dense + sum(dims.values()), *top_mlp, num_outputs]
        self.top = MLP(widths, generator=generator, last="linear", dropout=dropout)

    def forward(self, dense_BI: Tensor, rows: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Returns logits. rows: feature -> (values [.., D], offsets [B + 1]); offsets are in DRAM."""
        if missing := [name for name in self.feature_names if name not in rows]:
            raise ValueError(f"feature {missing[0]!r} is missing from the batch; it has {', '.join(rows)}")
        attended = set(self.histories.values())
        vectors = {name: bag_sums(*rows[name]) for name in self.feature_names if name not in attended}
        for (name, history), attention in zip(self.histories.items(), self.attentions, strict=True):
            k_LD, offsets = rows[history]
            vectors[history] = attention(k_LD, vectors[name], offsets)
        logits_BL: Tensor = self.top(torch.cat([dense_BI, *(vectors[name] for name in self.feature_names)], dim=1))
        return logits_BL.squeeze(1)


class DINSpec(MLPSpec):
    """A history's rows are added up, each weighted by what an MLP makes of it and the row of what is scored.

    Features named X_history hold the earlier ids of feature X (docs/prepare.md). Tables may have different numbers of
    columns, but X and its history have the same.
    """

    network: ClassVar = DIN
    small: ClassVar[Mapping[str, Any]] = {"attention_mlp": [32], "top_mlp": [64, 32], "dropout": 0.2}

    name: Literal["din"] = "din"
    """DIN (Zhou et al., 2018)."""
    attention_mlp: list[Width] = [80, 40]
    """Widths of the hidden layers between a step beside the scored item and the step's weight."""
    top_mlp: list[Width] = [200, 80]
    """Widths of the hidden layers on dense inputs, attended histories and all other rows; one logit is added. `dropout`
    acts on these alone."""

    def check(self, dataset: Dataset) -> None:
        """Raises ValueError if the data has no histories, or one whose feature it lacks."""
        super().check(dataset)
        histories_of([feature.name for feature in dataset.info.features], self.name)

    def build(
        self, *, num_dense: int, dims: Mapping[str, int], generator: torch.Generator, num_outputs: int = 1
    ) -> DIN:
        return DIN(
            num_dense=num_dense,
            dims=dims,
            attention_mlp=self.attention_mlp,
            top_mlp=self.top_mlp,
            dropout=self.dropout,
            num_outputs=num_outputs,
            generator=generator,
        )
